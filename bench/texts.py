"""Prompts whose number of tokens is known beforehand: words that are one token each.

Deterministic, so that every run and both sides of a pair read the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_COMMON = """
    time year people way day man thing woman life child world school state family student
    group country problem hand part place case week company system program question work
    number night point home water room mother area money story fact month lot right study
    book eye job word business issue side kind head house service friend father power hour
    game line end member law car city community name team minute idea body information back
    parent face others level office door health person art war history party result change
    morning reason research girl guy moment air teacher force education foot boy age policy
    process music market sense nation plan college interest death experience effect use class
    control care field development role effort rate heart drug show leader light voice wife
    police mind price report decision son view relationship town road arm difference value
    building action model season society tax director position player record paper space
    ground form event official matter center couple site project activity star table need
    court oil situation cost industry figure street image phone data picture practice piece
    land product doctor wall worker news test movie north love support technology step baby
"""
CANDIDATES = _COMMON.split()

Tokenize = Callable[[str], Sequence[int]]


class Words:
    """Texts of exactly so many tokens. ``text`` begins every word with a space."""

    def __init__(self, tokenize: Tokenize) -> None:
        ids = {word: tokenize(f" {word}") for word in CANDIDATES}
        self._ids = {word: found[0] for word, found in ids.items() if len(found) == 1}
        self._words = list(self._ids)
        if len(self._words) < 100:
            raise ValueError(
                f"only {len(self._words)} of {len(ids)} common words are one token in this model"
            )

    def draw(self, tokens: int, number: int) -> list[str]:
        """``tokens`` words; draws of other numbers (modulo a hundred) begin with other words."""
        chosen = random.Random(f"{tokens} {number}").choices(self._words, k=max(0, tokens - 1))
        return [self._words[number % 100], *chosen]

    def ids(self, words: Sequence[str]) -> list[int]:
        return [self._ids[word] for word in words]


def text(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)
