"""Where text may be cut for tokenizing: at control tokens, and at places proven safe.

Pure text work over a vocabulary's control texts. Knows nothing of engines or messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import NamedTuple

# C's isspace, which is what a stripping control token swallows.
_SPACE = " \t\n\v\f\r"


class Part(NamedTuple):
    """A control token (``token`` set) or a run of text between two of them.

    A control token's text includes the whitespace that it swallowed, so that parts tile the text.
    """

    text: str
    token: int | None


class Controls:
    """Finds control tokens' texts as the engine's own tokenizer does with special tokens on.

    That one takes token by token, the longest text first, over the whole input. Where no two
    control texts can overlap, which is the rule, the leftmost longest match gives the same.
    """

    def __init__(
        self,
        controls: Mapping[str, int],
        strips_left: Iterable[int] = (),
        strips_right: Iterable[int] = (),
    ) -> None:
        self.texts = sorted((text for text in controls if text), key=lambda t: (-len(t), t))
        self._ids = dict(controls)
        self._strips_left = frozenset(strips_left)
        self._strips_right = frozenset(strips_right)
        self._pattern = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None
        self._starts = {text[:n] for text in self.texts for n in range(1, len(text))}
        self._ends = {text[n:] for text in self.texts for n in range(1, len(text))}
        self._first = {text[0] for text in self.texts}
        self._last = {text[-1] for text in self.texts}
        self._longest = max(map(len, self.texts), default=0)
        self._joined = "\0".join(self.texts)
        self._overlap = any(
            text[n:] in self._starts for text in self.texts for n in range(1, len(text))
        )
        self.alphabet = frozenset().union(*self.texts) if self.texts else frozenset()

    def split(self, text: str, *, strip: bool = True) -> list[Part]:
        """The parts of ``text``, in order, without empty runs."""
        if self._pattern is None or not text:
            return [Part(text, None)] if text else []
        parts = self._by_token(text) if self._overlap else self._by_position(text, self._pattern)
        return self._strip(parts) if strip else parts

    def join(self, pieces: Iterable[Part]) -> list[Part]:
        """The parts of a text that comes in pieces: neighbouring plain ones become one run."""
        parts: list[Part] = []
        for plain, group in groupby(pieces, key=lambda piece: piece.token is None):
            if plain:
                parts.append(Part("".join(piece.text for piece in group), None))
            else:
                parts.extend(group)
        return self._strip(parts)

    def contained(self, text: str) -> bool:
        return self._pattern is not None and self._pattern.search(text) is not None

    def starts_at_end(self, text: str) -> bool:
        """Whether ``text`` ends with the beginning of a control text."""
        tail = text[-(self._longest - 1) :] if self._longest > 1 else ""
        return not self._first.isdisjoint(tail) and any(
            tail[n:] in self._starts for n in range(len(tail))
        )

    def ends_at_start(self, text: str) -> bool:
        """Whether ``text`` begins with the end of a control text."""
        head = text[: self._longest - 1] if self._longest > 1 else ""
        return not self._last.isdisjoint(head) and any(
            head[:n] in self._ends for n in range(1, len(head) + 1)
        )

    def inside(self, text: str) -> bool:
        """Whether ``text`` lies within a control text."""
        return len(text) < self._longest and text in self._joined

    def _by_position(self, text: str, pattern: re.Pattern[str]) -> list[Part]:
        parts: list[Part] = []
        done = 0
        for match in pattern.finditer(text):
            begin, end = match.span()
            if begin > done:
                parts.append(Part(text[done:begin], None))
            parts.append(Part(text[begin:end], self._ids[match.group()]))
            done = end
        if done < len(text):
            parts.append(Part(text[done:], None))
        return parts

    def _by_token(self, text: str) -> list[Part]:
        parts = [Part(text, None)]
        for control in self.texts:
            if control not in text:
                continue
            token = self._ids[control]
            found: list[Part] = []
            for part in parts:
                if part.token is not None or control not in part.text:
                    found.append(part)
                    continue
                first, *rest = part.text.split(control)
                found.append(Part(first, None))
                for run in rest:
                    found += (Part(control, token), Part(run, None))
            parts = [part for part in found if part.text]
        return parts

    def _strip(self, parts: list[Part]) -> list[Part]:
        if not self._strips_left and not self._strips_right:
            return parts
        stripped = list(parts)
        for index, (text, token) in enumerate(parts):
            if token is None:
                continue
            before = stripped[index - 1] if index else None
            if token in self._strips_left and before is not None and before.token is None:
                kept = before.text.rstrip(_SPACE)
                stripped[index - 1] = Part(kept, None)
                text = before.text[len(kept) :] + text
            after = stripped[index + 1] if index + 1 < len(parts) else None
            if token in self._strips_right and after is not None and after.token is None:
                kept = after.text.lstrip(_SPACE)
                stripped[index + 1] = Part(kept, None)
                text += after.text[: len(after.text) - len(kept)]
            stripped[index] = Part(text, token)
        return [part for part in stripped if part.text]


# Pre-tokenizers (tokenizer.ggml.pre) whose word pattern was checked for the rule below. All are
# the pattern of GPT-2, with or without a pass that sets digits apart, or that of Llama 3.
SPLITTABLE_PRE = frozenset(
    {"gpt-2", "smollm", "starcoder", "refact", "llama-bpe", "llama3", "llama-v3", "qwen2"}
)


def bpe_can_split(pre: str, user_defined: Iterable[str], *, user_defined_strips: bool) -> bool:
    """Whether ``bpe_safe_split`` may be used with a BPE vocabulary.

    ``user_defined`` are texts of tokens that are matched in plain text before any word is formed;
    ``user_defined_strips`` says whether one of them swallows whitespace around it.
    """
    return (
        pre in SPLITTABLE_PRE
        and not user_defined_strips
        and not any(_PAIR.search(text) for text in user_defined)
    )


_PAIR = re.compile(r"[A-Za-z][ \n]")


def bpe_safe_split(text: str, before: int, *, look_back: int = 4096) -> int | None:
    """The largest offset below ``before`` between an ASCII letter and a following space or newline.

    Tokenization splits there, for vocabularies of which ``bpe_can_split`` says yes:

    - BPE merges only within a word of the pre-tokenizer's pattern, and no alternative of the
      patterns in ``SPLITTABLE_PRE`` matches a letter directly followed by whitespace: a letter is
      only ever matched by a letter run or a contraction, which end with a letter. So a word ends
      at p and another begins there.
    - Words are found from left to right, each decided by its own characters, but for
      ``\\s+(?!\\S)``, which looks one character beyond the whitespace. Before p that character is
      at most the letter at p - 1; from p on nothing is looked back at. So the words of text[:p]
      and text[p:] are those of the whole, whatever follows text[p].
    - User-defined tokens are cut out of the text before; none contains such a pair, so none
      crosses p, and the cuts on either side don't depend on the other.

    Looks back ``look_back`` characters at most; None if there is no such place.
    """
    limit = min(before, len(text))
    last = None
    for match in _PAIR.finditer(text, max(0, limit - look_back), limit):
        last = match.start() + 1
    return last
