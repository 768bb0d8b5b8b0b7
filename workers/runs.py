"""Tokens of runs: the text between two control tokens, tokenized once and remembered.

Owns the tokenizer calls and what makes a warm prompt cheap. Knows nothing of templates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from modeld.workers.engine import Tokenizer

Ids: TypeAlias = NDArray[np.int32]
Offsets: TypeAlias = NDArray[np.int64]

# A shorter run is tokenized whole: looking for what it extends would cost as much.
MIN_EXTENDED_CHARS = 256


@dataclass(frozen=True, eq=False)
class Run:
    """``ends`` are the tokens' ends in the run's UTF-8 bytes; exact where ``aligned``.

    Where the tokenizer normalizes text, so that the pieces don't spell it, they are estimates.
    """

    text: str
    tokens: list[int]
    ids: Ids
    ends: Offsets
    size_bytes: int
    aligned: bool


class Runs:
    """Run text → tokens. Remembers the runs that were used since the last but one ``turn_over``."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lengths: Ids = np.full(tokenizer.vocab_size, -1, dtype=np.int32)
        self._kept: dict[tuple[str, str], Run] = {}
        self._used: dict[tuple[str, str], Run] = {}

    def turn_over(self) -> None:
        """Forget what the last prompt didn't use."""
        self._kept, self._used = self._used, {}

    def of_text(self, text: str) -> Run:
        run = self._recall(text, "")
        if run is None:
            run = self._extended(text) or self._run(text, self._tokenizer.encode(text))
            self._used[(text, "")] = run
        return run

    def of_tokens(self, text: str, name: str, tokens: Sequence[int]) -> Run:
        """The run ``text`` of known tokens; ``name`` tells runs of equal text apart."""
        run = self._recall(text, name)
        if run is None:
            run = self._used[(text, name)] = self._run(text, list(tokens))
        return run

    def _recall(self, text: str, name: str) -> Run | None:
        key = (text, name)
        run = self._used.get(key) or self._kept.get(key)
        if run is not None:
            self._used[key] = run
        return run

    def _run(self, text: str, tokens: list[int]) -> Run:
        ids = np.array(tokens, dtype=np.int32)
        size_bytes = len(text) if text.isascii() else len(text.encode())
        lengths = self._lengths[ids]
        if len(lengths) and lengths.min() < 0:
            for token in np.unique(ids[lengths < 0]).tolist():
                self._lengths[token] = len(self._tokenizer.piece(token))
            lengths = self._lengths[ids]
        ends: Offsets = np.cumsum(lengths, dtype=np.int64)
        spelled = int(ends[-1]) if len(ends) else 0
        if spelled == size_bytes:
            return Run(text, tokens, ids, ends, size_bytes, True)
        if spelled == size_bytes + 1 and self._tokenizer.piece(tokens[0]).startswith(b" "):
            ends = np.maximum(ends - 1, 0)  # the space that some tokenizers put before a text
        elif spelled:
            ends = ends * size_bytes // spelled
        return Run(text, tokens, ids, ends, size_bytes, False)

    def _extended(self, text: str) -> Run | None:
        """The run's tokens from those of a remembered run that begins alike, if provable."""
        if len(text) < MIN_EXTENDED_CHARS:
            return None
        best, common = None, MIN_EXTENDED_CHARS - 1
        for known in (self._used, self._kept):
            for (other, name), run in known.items():
                if name or not run.aligned or len(other) <= common:
                    continue
                if len(text) <= common or other[: common + 1] != text[: common + 1]:
                    continue
                best, common = run, common_chars(text, other)
        if best is None:
            return None
        split = self._tokenizer.safe_split(text, common)
        if split is None or split <= 0:
            return None
        head = text[:split]
        head_bytes = split if head.isascii() else len(head.encode())
        count = int(np.searchsorted(best.ends, head_bytes)) + 1
        if count > len(best.ends) or best.ends[count - 1] != head_bytes:
            return None
        # Tokens without bytes would make the cut ambiguous.
        if count < len(best.ends) and best.ends[count] == head_bytes:
            return None
        return self._run(text, best.tokens[:count] + self._tokenizer.encode(text[split:]))


def common_chars(one: str, other: str) -> int:
    """Length of the longest common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
