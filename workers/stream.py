"""From sampled tokens' bytes to the text that may be shown, and when to send it.

Owns UTF-8 across tokens, stop sequences and coalescing. Knows nothing of engines or frames.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from modeld.shared.errors import InvalidRequest

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
DEFAULT_INTERVAL_MS = 8
MAX_INTERVAL_MS = 60_000


def validate_stop(stop: Sequence[str]) -> None:
    """Raises InvalidRequest for an empty or too long stop sequence, or too many."""
    if len(stop) > MAX_STOPS:
        raise InvalidRequest.of("stop", f"{len(stop)} sequences", f"at most {MAX_STOPS}")
    for index, text in enumerate(stop):
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest.of(
                f"stop[{index}]", f"{len(text)} characters", f"1 to {MAX_STOP_CHARS} characters"
            )


class TextStream:
    """One answer's text. A character is released once it is whole and can't belong to a stop.

    Of several stop sequences the one that is complete first counts, however tokens fall.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """Raises InvalidRequest as ``validate_stop`` does."""
        validate_stop(stop)
        self._stop = list(dict.fromkeys(stop))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, not released
        self._decoded_chars = 0
        self._released_chars = 0
        self._released: list[str] = []
        # Where tokens that aren't wholly released end, in characters of the decoded text; one
        # that ends within a character ends after it.
        self._ends: deque[int] = deque()
        self._last_end = 0  # of the last visible token
        self._ended = False
        self.matched: str | None = None  # the stop sequence that ended it
        self.visible_tokens = 0  # tokens that lie wholly within the released text

    @property
    def text(self) -> str:
        """All that was released."""
        if len(self._released) > 1:
            self._released = ["".join(self._released)]
        return self._released[0] if self._released else ""

    @property
    def spelled(self) -> bool:
        """Whether the visible tokens make up exactly the released text."""
        return self._last_end == self._released_chars

    def feed(self, piece: bytes) -> str:
        """Take a token's bytes; returns what may be shown now. Nothing after a stop matched."""
        if self._ended:
            return ""
        text = self._decoder.decode(piece)
        self._decoded_chars += len(text)
        partial = self._decoder.getstate()[0] != b""
        self._ends.append(self._decoded_chars + partial)
        return self._release(text, final=False)

    def finish(self, *, whole: bool = False) -> str:
        """The answer is over: returns what was held back, a cut character as U+FFFD.

        With ``whole``, a cut character is left out, and its tokens aren't visible.
        """
        if self._ended:
            return ""
        text = "" if whole else self._decoder.decode(b"", True)
        cut = self._decoded_chars + 1  # where tokens of the cut character end, were it one
        self._decoded_chars += len(text)
        if len(text) > 1:
            self._ends = deque(self._decoded_chars if end == cut else end for end in self._ends)
        released = self._release(text, final=True)
        self._ended = True
        return released

    def _release(self, text: str, *, final: bool) -> str:
        pending = self._held + text
        cut = self._find_stop(pending)
        if cut is not None:
            begin, self.matched = cut
            self._ended = True
            out, self._held = pending[:begin], ""
        else:
            keep = 0 if final else self._possible_stop(pending)
            out, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        if out:
            self._released.append(out)
            self._released_chars += len(out)
        while self._ends and self._ends[0] <= self._released_chars:
            self._last_end = self._ends.popleft()
            self.visible_tokens += 1
        return out

    def _find_stop(self, pending: str) -> tuple[int, str] | None:
        """The stop sequence that is complete first, the longest of those; and where it begins."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            begin = pending.find(stop)
            if begin >= 0:
                found = (begin + len(stop), begin, stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[1], best[2])

    def _possible_stop(self, pending: str) -> int:
        """Length of the longest end of ``pending`` with which a stop sequence could begin."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(pending)), longest, -1):
                if pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class Coalescer:
    """When to send: the first token at once, then by time.

    At the default interval, or a shorter one, also every ``max_tokens`` tokens; a caller who asks
    for a longer interval wants fewer, larger chunks. 0: each token.
    """

    def __init__(self, interval_ms: int = DEFAULT_INTERVAL_MS, max_tokens: int = 8) -> None:
        """Raises InvalidRequest for an interval outside of 0 to 60,000 ms."""
        if not 0 <= interval_ms <= MAX_INTERVAL_MS:
            raise InvalidRequest.of(
                "stream_interval_ms", interval_ms, f"0 to {MAX_INTERVAL_MS} milliseconds"
            )
        self._interval_s = interval_ms / 1000
        self._max_tokens = max_tokens if interval_ms <= DEFAULT_INTERVAL_MS else 0
        self._sent_s: float | None = None
        self.waiting_tokens = 0  # taken since the last flush

    def take(self, now_s: float) -> bool:
        """Count a token; True when what is waiting should be sent now (then call ``flushed``)."""
        self.waiting_tokens += 1
        if self._sent_s is None or self._interval_s == 0:
            return True
        if self._max_tokens and self.waiting_tokens >= self._max_tokens:
            return True
        return now_s - self._sent_s >= self._interval_s

    def flushed(self, now_s: float) -> None:
        """What was waiting has been sent."""
        self._sent_s = now_s
        self.waiting_tokens = 0
