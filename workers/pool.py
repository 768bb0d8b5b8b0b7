"""Engine contexts and what each one physically holds: who owns which, which may be taken again.

Owns the exact record of evaluated tokens. Knows nothing of prompts, turns, sampling or clients.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from modeld.shared.errors import InsufficientMemory, SessionFatal
from modeld.shared.messages import DecodeIn, PlacedOut
from modeld.workers.engine import Cancelled, Engine, EngineContext, Measured, SelfSampling

if TYPE_CHECKING:
    from modeld.workers.engine import Logits, State

log = logging.getLogger(__name__)

Tokens = NDArray[np.int32]


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
    """What an engine context is allocated for: window in tokens, KV types by ggml name."""

    window: int
    k_type: str
    v_type: str


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
        self._buffer: Tokens = np.empty(self.window, dtype=np.int32)
        self._length = 0
        self._logits_current = False

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

    def trim(self, keep: int) -> None:
        """Go back to ``keep`` tokens; raises SessionFatal if the engine won't."""
        if keep == self._length:
            return
        self._logits_current = False
        self.engine_context.trim(keep)
        self._length = keep

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
        if not self.engine_context.copy_prefix_from(source.engine_context, count):
            return False
        self._buffer[:count] = source.tokens[:count]
        self._length = count
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

    def close(self) -> None:
        self.engine_context.close()
        self._length = 0
        self._logits_current = False


def _added(entries: Iterable[PooledContext]) -> list[PlacedOut]:
    """One row a device, in the order in which the engine names them."""
    rows: dict[str, PlacedOut] = {}
    for entry in entries:
        for part in entry.engine_context.placed:
            row = rows.setdefault(part.device, PlacedOut(device=part.device))
            row.kv_bytes += part.kv_bytes
            row.compute_bytes += part.compute_bytes
    return list(rows.values())


class ContextPool:
    """At most ``max_contexts`` engine contexts, in use and reclaimable together."""

    def __init__(self, engine: Engine, max_contexts: int) -> None:
        self._engine = engine
        self.max_contexts = max_contexts
        self.contexts: list[PooledContext] = []
        self.created = 0
        self.freed = 0
        self._tick = 0
        self._copy_failed: set[tuple[Shape, Shape]] = set()

    @property
    def slot_cells(self) -> int:
        """KV cells allocated by all contexts."""
        return sum(entry.window for entry in self.contexts)

    @property
    def reclaimable_tokens(self) -> int:
        return sum(len(entry) for entry in self.contexts if entry.owner is None)

    @property
    def slot_bytes(self) -> int:
        """KV and compute bytes of all contexts."""
        return sum(entry.bytes for entry in self.contexts)

    @property
    def slot_compute_bytes(self) -> int:
        """Compute buffers of all contexts: allocated, and touched as they are used."""
        return sum(entry.engine_context.compute_bytes for entry in self.contexts)

    @property
    def reclaimable_bytes(self) -> int:
        return sum(entry.bytes for entry in self.contexts if entry.owner is None)

    @property
    def slot_placed(self) -> list[PlacedOut]:
        """KV and compute bytes of all contexts, by device."""
        return _added(self.contexts)

    @property
    def reclaimable_placed(self) -> list[PlacedOut]:
        """Those of contexts without a session."""
        return _added(self._reclaimable())

    @property
    def in_use(self) -> int:
        return sum(entry.owner is not None for entry in self.contexts)

    def counters(self) -> dict[str, int]:
        """The slot's, since the model was loaded."""
        return {
            "slot_contexts": len(self.contexts),
            "slot_contexts_created": self.created,
            "slot_contexts_freed": self.freed,
            "slot_contexts_reclaimable": len(self.contexts) - self.in_use,
        }

    def touch(self, entry: PooledContext) -> None:
        """Mark as used now; the order of use decides what is reclaimed first."""
        self._tick += 1
        entry.last_used = self._tick

    def acquire(
        self, owner: str, shape: Shape, free_bytes: int = 0, compute_bytes: int = 0
    ) -> tuple[PooledContext, bool]:
        """A context for ``owner``, and whether it was taken from the pool.

        A blank one of this shape first, then a new one, then the least recently used reclaimable
        one. ``free_bytes`` is what must be given back before anything new is allocated: a
        reclaimable context of this shape is taken instead, or others are freed. ``compute_bytes``
        is what was planned for a new one's buffers on the host.

        Raises InsufficientMemory with the numbers when nothing can be had, and InvalidRequest for
        a KV type that the engine doesn't know.
        """
        entry = next((e for e in self._reclaimable() if e.shape == shape and not len(e)), None)
        if entry is None and free_bytes > 0:
            entry = self._give_back(shape, free_bytes)
        reused = entry is not None
        if entry is None:
            entry, reused = self._make_room(shape, compute_bytes)
        entry.owner = owner
        self.touch(entry)
        return entry, reused

    def release(self, entry: PooledContext) -> None:
        """Leave the context, with what it holds, for whoever can use it."""
        entry.owner = None
        self.touch(entry)

    def swap(self, mine: PooledContext, other: PooledContext) -> None:
        """Give ``other`` to the owner of ``mine``, whose context becomes reclaimable."""
        owner = mine.owner
        self.release(mine)
        other.owner = owner
        self.touch(other)

    def stand_in(self, mine: PooledContext) -> tuple[PooledContext, bool]:
        """A second, empty context like ``mine`` for its owner, and whether the pool had it.

        One that is reclaimable first, so that the slot grows for no longer than it must; what it
        held goes. Raises InsufficientMemory with the numbers.
        """
        like = [entry for entry in self._reclaimable() if entry.shape == mine.shape]
        entry = min(like, key=lambda entry: len(entry) > 0, default=None)
        taken = entry is not None
        if entry is None:
            entry, taken = self._make_room(mine.shape, 0)
        entry.trim(0)
        entry.owner = mine.owner
        self.touch(entry)
        return entry, taken

    def may_take(self, mine: PooledContext, other: PooledContext) -> bool:
        """Whether ``other`` could simply be swapped for ``mine``."""
        return other.owner is None and other.shape == mine.shape

    def may_copy(self, mine: PooledContext, source: PooledContext, count: int) -> bool:
        """Whether copying is worth a try: a failed one costs ``mine`` its content."""
        pair = (source.shape, mine.shape)
        return pair not in self._copy_failed and source.can_keep(count)

    def copy(self, mine: PooledContext, source: PooledContext, count: int) -> bool:
        """Make ``mine`` hold the first ``count`` tokens of ``source``; False (and empty) if not."""
        self.touch(source)
        try:
            if mine.copy_from(source, count):
                return True
        except InsufficientMemory as error:  # another time there may be
            log.info("%s", error.message)
            return False
        log.warning("the engine can't copy %s to %s; not tried again", source.shape, mine.shape)
        self._copy_failed.add((source.shape, mine.shape))
        return False

    def destroy(self, entry: PooledContext) -> None:
        self.contexts.remove(entry)
        self.freed += 1
        entry.close()

    def close(self) -> None:
        while self.contexts:
            self.destroy(self.contexts[-1])

    def _reclaimable(self) -> list[PooledContext]:
        """Least recently used first."""
        free = [entry for entry in self.contexts if entry.owner is None]
        return sorted(free, key=lambda entry: entry.last_used)

    def _give_back(self, shape: Shape, free_bytes: int) -> PooledContext | None:
        """A reclaimable context of this shape, or None after freeing ``free_bytes``."""
        free = self._reclaimable()
        same = next((entry for entry in free if entry.shape == shape), None)
        while same is None and free and free_bytes > 0:
            free_bytes -= free[0].bytes
            self.destroy(free.pop(0))
        return same

    def _make_room(self, shape: Shape, compute_bytes: int) -> tuple[PooledContext, bool]:
        """A new context, or the least recently used reclaimable one where none can be made."""
        refusal: InsufficientMemory | None = None
        while True:
            if len(self.contexts) < self.max_contexts:
                try:
                    return self._create(shape, compute_bytes), False
                except InsufficientMemory as error:
                    refusal = error
            free = self._reclaimable()
            if not free:
                raise self._exhausted(refusal)
            if free[0].shape == shape:
                return free[0], True
            log.info("freeing a reclaimable context of %d tokens", len(free[0]))
            self.destroy(free[0])

    def _create(self, shape: Shape, compute_bytes: int) -> PooledContext:
        made = self._engine.new_context(shape.window, shape.k_type, shape.v_type, compute_bytes)
        entry = PooledContext(made, shape)
        self.contexts.append(entry)
        self.created += 1
        return entry

    def _exhausted(self, refusal: InsufficientMemory | None) -> InsufficientMemory:
        numbers = {
            "sessions": self.in_use,
            "max_contexts": self.max_contexts,
            "slot_cells": self.slot_cells,
        }
        if refusal is None:
            return InsufficientMemory(
                f"All {self.max_contexts} engine contexts of this slot are held by open sessions "
                f"({self.in_use}). Close a session, or raise the daemon's setting max_sessions.",
                metadata=numbers,
            )
        return InsufficientMemory(
            f"{refusal.message} Nothing reclaimable is left to free ({self.in_use} sessions are "
            "open). Close a session, or ask for a smaller window.",
            metadata={**numbers, **refusal.metadata},
        )
