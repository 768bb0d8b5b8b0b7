"""An engine context with the exact record of the tokens that were evaluated in it.

Every change of what it holds goes through here. Knows nothing of who else has contexts, nor of
prompts, turns, sampling or clients.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from modeld.shared.errors import SessionFatal
from modeld.workers.engine import Cancelled, EngineContext, Measured, SelfSampling, Settling
from modeld.workers.new_files import Cancelled as Stopped

if TYPE_CHECKING:
    from modeld.shared.messages import DecodeIn
    from modeld.workers.engine import Logits, State
    from modeld.workers.parking import Parking

Tokens = NDArray[np.int32]
Ranks = Sequence[tuple[int, int, int]]  # [begin, end) in tokens, and the rank of their class


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Length in tokens of the longest common prefix."""
    size = min(len(left), len(right))
    if size == 0:
        return 0
    differs = left[:size] != right[:size]
    first = int(differs.argmax())
    return first if differs[first] else size


@dataclass(frozen=True)
class Shape:
    """What an engine context is allocated for: window in tokens, KV types by ggml name, and of how
    many ``streams`` it is one (0: it is a context of its own).
    """

    window: int
    k_type: str
    v_type: str
    streams: int = 0


class Mark:
    """How many of a context's first tokens are, bit for bit, what they were when it was made."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens


class PooledContext:
    """An engine context with the record of what is in it.

    ``tokens`` is exactly what the engine holds, position by position. Every change goes through
    ``extend``, ``trim``, ``copy_from`` and ``import_state``, so the record can't drift from the
    engine's state. Of a ``SelfSampling`` engine it is what was there when that was asked last.
    """

    def __init__(self, engine_context: EngineContext, shape: Shape) -> None:
        self.engine_context = engine_context
        self.shape = shape
        self.window = engine_context.window
        self.kv_digest = ""
        self.runtime_digest = ""
        self.owner: str | None = None
        self.last_used = 0
        self.parking: Parking | None = None
        self.ranks: Ranks = ()  # of what is held, where it is more than volatile
        self._buffer: Tokens = np.empty(self.window, dtype=np.int32)
        self._length = 0
        self._logits_current = False
        self._marks: weakref.WeakSet[Mark] = weakref.WeakSet()

    def __len__(self) -> int:
        return self._length

    @property
    def bytes(self) -> int:
        return self.engine_context.kv_bytes + self.engine_context.compute_bytes

    @property
    def tokens(self) -> Tokens:
        """A view of what is physically there."""
        return self._buffer[: self._length]

    def logits_at(self, length: int) -> bool:
        """Whether ``logits()`` are those after exactly ``length`` tokens."""
        return self._logits_current and self._length == length

    def logits(self) -> Logits:
        return self.engine_context.logits()

    def can_keep(self, keep: int) -> bool:
        """Whether the context can go back to ``keep`` tokens with exact results."""
        return keep in (0, self._length) or self.engine_context.can_trim(keep)

    def park(self, keep: int = 0, *, in_ram: bool = True) -> bool:
        """Before what is held from ``keep`` on goes: to the cold store, where there is one. False
        where it was cancelled. Raises SessionFatal only.
        """
        if self.parking is None:
            return True
        parked = self.parking.park(self, keep, in_ram=in_ram)
        self.settle()
        return parked

    def park_last(self, *, in_ram: bool = True) -> None:
        """``park`` of all, which goes whatever happens: no cancel stops it. Raises SessionFatal."""
        if self.parking is not None:
            with self.parking.unstopped():
                self.park(in_ram=in_ram)

    def trim(self, keep: int) -> None:
        """Go back to ``keep`` tokens; raises SessionFatal if the engine won't."""
        if keep == self._length:
            return
        self._logits_current = False
        self.engine_context.trim(keep)
        self._length = keep
        self._unmark(keep)
        if not keep:
            self.ranks = ()  # they were of what is gone

    def clear(self) -> None:
        """All that is held goes, to the cold store where there is one. Raises SessionFatal, and
        Cancelled, which leaves it as it is.
        """
        if not self.park():
            raise Stopped
        self.trim(0)

    def mark(self) -> Mark:
        """Of all that is held now; good for as long as the caller keeps it."""
        mark = Mark(self._length)
        self._marks.add(mark)
        return mark

    def untouched(self, mark: Mark) -> int:
        """Tokens of the mark that never went since; 0 for another context's mark."""
        return mark.tokens if mark in self._marks else 0

    def _unmark(self, keep: int) -> None:
        for mark in self._marks:
            mark.tokens = min(mark.tokens, keep)

    def extend(self, tokens: Sequence[int], cancelled: Cancelled) -> int:
        """Evaluate at the end; return how many were (fewer only when cancelled)."""
        begin, asked = self._length, len(tokens)
        self._logits_current = False
        done = self.engine_context.evaluate(tokens, begin, cancelled=cancelled)
        if not 0 <= done <= asked:
            raise SessionFatal(
                f"The engine reports {done} of {asked} tokens evaluated, which can't be.",
                metadata={"cause": "bookkeeping", "evaluated": done, "asked": asked},
            )
        self._buffer[begin : begin + done] = tokens[:done]
        self._length = begin + done
        if self.measured is not None:
            # Of what the record claimed, some was gone, and a cancel came before it was back.
            self._length = min(self._length, self.measured.held)
        # The engine computes logits for a call's last token only.
        self._logits_current = done == asked > 0
        return done

    @property
    def samples_itself(self) -> SelfSampling | None:
        """The context as what it is where the engine keeps its cache and samples by itself."""
        context = self.engine_context
        return context if isinstance(context, SelfSampling) else None

    @property
    def measured(self) -> Measured | None:
        """What the last call was seen to reuse, where the record can't tell."""
        engine = self.samples_itself
        return engine.measured if engine else None

    def confirm(self, length: int, cancelled: Cancelled) -> int:
        """Have a ``SelfSampling`` engine hold the first ``length`` tokens; how many it does."""
        engine = self.samples_itself
        assert engine is not None
        held = engine.confirm(length, cancelled=cancelled)
        if held < length:
            self._length = held
        return held

    def generate(
        self, missing: Sequence[int], options: DecodeIn, most: int, cancelled: Cancelled
    ) -> Generator[int, None, None]:
        """Evaluate ``missing`` and sample by a ``SelfSampling`` engine, which see."""
        engine = self.samples_itself
        assert engine is not None
        self._logits_current = False
        held = [*self.tokens.tolist(), *missing]
        stream = engine.generate(held, options, most, cancelled=cancelled)
        answered = False
        try:
            for token in stream:
                answered = True
                self._buffer[self._length : len(held)] = held[self._length :]
                self._length = len(held)
                yield token
                held.append(token)
        finally:
            stream.close()
            if not answered and engine.measured is not None:  # cancelled on the way
                self._length = min(self._length, engine.measured.held)

    def append(self, token: int, cancelled: Cancelled) -> bool:
        """Evaluate one sampled token; False if it was not, being cancelled."""
        length = self._length
        self._logits_current = False
        if cancelled():
            return False
        self.engine_context.step(token, length)
        self._buffer[length] = token
        self._length = length + 1
        self._logits_current = True
        return True

    def copy_from(self, source: PooledContext, count: int) -> bool:
        """Become the first ``count`` tokens of ``source``; False (and empty) if it can't be."""
        self._logits_current = False
        self._length = 0
        self._unmark(0)
        if not self.engine_context.copy_prefix_from(source.engine_context, count):
            return False
        self._buffer[:count] = source.tokens[:count]
        self._length = count
        self.ranks = source.ranks
        return True

    def export_state(self, begin: int, end: int) -> State:
        """A copy of the engine's bytes of positions ``begin`` to ``end``; raises as it does."""
        return self.engine_context.export_state(begin, end)

    def import_state(self, state: State, tokens: Tokens) -> bool:
        """Append ``tokens`` by the engine's bytes of them; False, and nothing changed, if it won't.

        The caller guarantees that the bytes are of these tokens after those that are held.
        """
        end = self._length + len(tokens)
        if end > self.window or not self.engine_context.import_state(state, end):
            return False
        self._buffer[self._length : end] = tokens
        self._length = end
        self._logits_current = False
        return True

    def settle(self) -> None:
        """No range goes out or in for now. Raises SessionFatal as the engine does."""
        if isinstance(self.engine_context, Settling):
            self.engine_context.settle()

    def close(self) -> None:
        self.engine_context.close()
        self._length = 0
        self._logits_current = False
        self._unmark(0)
