"""Engine contexts and what each one physically holds: who owns which, which may be taken again.

Owns the exact record of evaluated tokens. Knows nothing of prompts, turns, sampling or clients.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modeld.shared.errors import InsufficientMemory, SessionFatal, UnsupportedFeature
from modeld.shared.messages import DecodeIn, PlacedOut
from modeld.workers.batched_contexts import BatchedContexts
from modeld.workers.batching import Gate
from modeld.workers.engine import (
    BatchingEngine,
    Cancelled,
    Engine,
    EngineContext,
    Measured,
    SelfSampling,
)

if TYPE_CHECKING:
    from modeld.workers.engine import Logits, State
    from modeld.workers.parking import Parking

log = logging.getLogger(__name__)

Tokens = NDArray[np.int32]
Ranks = Sequence[tuple[int, int, int]]  # [begin, end) in tokens, and the rank of their class
# Another source of KV is worth taking over or copying when it has at least this many tokens more.
WORTHWHILE_TOKENS = 32


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

    def park(self, keep: int = 0, *, in_ram: bool = True) -> None:
        """Before what is held from ``keep`` on goes: to the cold store, where there is one."""
        if self.parking is not None:
            self.parking.park(self, keep, in_ram=in_ram)

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

    def close(self) -> None:
        self.engine_context.close()
        self._length = 0
        self._logits_current = False
        self._unmark(0)


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

    def __init__(self, engine: Engine, max_contexts: int, gate: Gate | None = None) -> None:
        """``gate`` is what streams of a shared context wait at."""
        self._engine = engine
        self._gate = gate or Gate()
        self.batched = BatchedContexts()  # beyond ``max_contexts``: they come and go together
        self.max_contexts = max_contexts
        self.contexts: list[PooledContext] = []
        self.created = 0
        self.freed = 0
        self.parking: Parking | None = None  # set before the first context is made
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
        return sum(entry.bytes for entry in self._given_back())

    @property
    def slot_placed(self) -> list[PlacedOut]:
        """KV and compute bytes of all contexts, by device."""
        return _added(self.contexts)

    @property
    def reclaimable_placed(self) -> list[PlacedOut]:
        """Those of contexts without a session."""
        return _added(self._given_back())

    def totals(self) -> dict[str, Any]:
        """The fields of ``SlotTotals``, as they are now."""
        return {
            "slot_cells": self.slot_cells,
            "slot_bytes": self.slot_bytes,
            "slot_compute_bytes": self.slot_compute_bytes,
            "reclaimable_bytes": self.reclaimable_bytes,
            "slot_placed": self.slot_placed,
            "reclaimable_placed": self.reclaimable_placed,
        }

    def opened(self, entry: PooledContext) -> dict[str, Any]:
        """What an ``OpenResult`` tells of a session's context, and the totals with it."""
        context = entry.engine_context
        return {
            "window": entry.window,
            "kv_bytes": context.kv_bytes,
            "compute_bytes": context.compute_bytes,
            "placed": list(context.placed),
            **self.totals(),
        }

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
            **(self.parking.counters() if self.parking is not None else {}),
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
        reclaimable context of this shape is taken instead, or the cold store's RAM and then others
        are freed. ``compute_bytes`` is what was planned for a new one's buffers on the host.

        Raises InsufficientMemory with the numbers when nothing can be had, and InvalidRequest for
        a KV type that the engine doesn't know.
        """
        if shape.streams:
            return self._acquire_stream(owner, shape, free_bytes, compute_bytes)
        entry = next((e for e in self._reclaimable() if e.shape == shape and not len(e)), None)
        if entry is None and free_bytes > 0:
            entry = self._give_back(shape, free_bytes)
        reused = entry is not None
        if entry is None:
            entry, reused = self._make_room(shape, compute_bytes)
        entry.owner = owner
        self.touch(entry)
        return entry, reused

    def take_like(
        self, owner: str, shape: Shape, kv_digest: str, target: Tokens
    ) -> PooledContext | None:
        """The reclaimable context of this shape that holds the most of ``target``, where that is
        worthwhile.
        """
        free = self.batched.free() if shape.streams else self._reclaimable()
        like = [e for e in free if e.shape == shape and e.kv_digest == kv_digest]
        best = max(like, key=lambda entry: common_prefix(entry.tokens, target), default=None)
        if best is None or common_prefix(best.tokens, target) < WORTHWHILE_TOKENS:
            return None
        best.owner = owner
        self.touch(best)
        return best

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
        if mine.shape.streams:
            like = [self.batched.take(mine.shape)]
        else:
            like = [entry for entry in self._reclaimable() if entry.shape == mine.shape]
        entry = min(like, key=lambda entry: len(entry) > 0, default=None)
        taken = entry is not None
        if entry is None:
            entry, taken = self._make_room(mine.shape, 0)
        entry.park()
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
        if source.shape.streams and not mine.shape.streams:
            return False
        return pair not in self._copy_failed and source.can_keep(count)

    def copy(self, mine: PooledContext, source: PooledContext, count: int) -> bool:
        """Make ``mine`` hold the first ``count`` tokens of ``source``; False (and empty) if not."""
        self.touch(source)
        mine.park(common_prefix(mine.tokens, source.tokens[:count]))
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
        """Free it; a stream is emptied, for it is freed with the others only."""
        if entry.shape.streams:
            if self.batched.retire(entry):
                self._drop_batch()
            return
        self.contexts.remove(entry)
        self.freed += 1
        entry.close()

    def close(self) -> None:
        self._drop_batch()
        while self.contexts:
            self.destroy(self.contexts[-1])

    def _reclaimable(self) -> list[PooledContext]:
        """Contexts of their own, least recently used first."""
        free = [e for e in self.contexts if e.owner is None and not e.shape.streams]
        return sorted(free, key=lambda entry: entry.last_used)

    def _given_back(self) -> list[PooledContext]:
        """What could be freed now: streams only if no session has any of them."""
        return [*self._reclaimable(), *(self.batched.entries if self.batched.idle else ())]

    def _drop_batch(self, *, in_ram: bool | None = None) -> None:
        """Free all streams; ``in_ram``: park what they hold before."""
        for entry in self.batched.entries:
            if in_ram is not None:
                entry.park(in_ram=in_ram)
            self.contexts.remove(entry)
            self.freed += 1
        self.batched.close()

    def _acquire_stream(
        self, owner: str, shape: Shape, free_bytes: int, compute_bytes: int
    ) -> tuple[PooledContext, bool]:
        """``acquire`` of a free stream, and whether there were streams before."""
        if not isinstance(self._engine, BatchingEngine):
            raise UnsupportedFeature(
                "This engine gives each session a context of its own. Open an isolated session.",
                metadata={"capability": "layout.batched"},
            )
        if self.batched.idle and not self.batched.fits(shape):
            self._drop_batch(in_ram=True)
        reused = bool(self.batched.entries)
        if not reused:
            if free_bytes > 0:
                self._free_contexts(free_bytes)
            self._make_batch(self._engine, shape, compute_bytes)
        entry = self.batched.take(shape)
        entry.owner = owner
        self.touch(entry)
        return entry, reused

    def _make_batch(self, engine: BatchingEngine, shape: Shape, compute_bytes: int) -> None:
        """In the place of reclaimable contexts, where there is no memory besides."""
        while True:
            try:
                batch = engine.new_batch(
                    shape.streams,
                    shape.window,
                    shape.k_type,
                    shape.v_type,
                    self._gate,
                    compute_bytes,
                )
                break
            except InsufficientMemory as error:
                if self.parking is not None and self.parking.make_way(error):
                    continue
                if not self._free_contexts(1):
                    raise self._exhausted(error) from None
        self.batched.fill(batch, shape, self._enter)

    def _enter(self, made: EngineContext, shape: Shape) -> PooledContext:
        entry = PooledContext(made, shape)
        entry.parking = self.parking
        self.contexts.append(entry)
        self.created += 1
        return entry

    def _free_contexts(self, free_bytes: int) -> bool:
        """Free reclaimable contexts of at least ``free_bytes``; whether any was there."""
        freed = 0
        for entry in self._reclaimable():
            if freed >= free_bytes:
                break
            freed += entry.bytes
            entry.park(in_ram=False)
            self.destroy(entry)
        if freed < free_bytes and self.batched.idle:
            freed += sum(entry.bytes for entry in self.batched.entries)
            self._drop_batch(in_ram=False)
        return freed > 0

    def _give_back(self, shape: Shape, free_bytes: int) -> PooledContext | None:
        """A reclaimable context of this shape, or None after freeing ``free_bytes``."""
        free = self._reclaimable()
        same = next((entry for entry in free if entry.shape == shape), None)
        if same is None and self.parking is not None:
            free_bytes -= self.parking.give_back(free_bytes)
        if same is None and free_bytes > 0:
            self._free_contexts(free_bytes)
        return same

    def _make_room(self, shape: Shape, compute_bytes: int) -> tuple[PooledContext, bool]:
        """A new context, or the least recently used reclaimable one where none can be made."""
        refusal: InsufficientMemory | None = None
        while True:
            if len(self.contexts) - len(self.batched.entries) < self.max_contexts:
                try:
                    return self._create(shape, compute_bytes), False
                except InsufficientMemory as error:
                    refusal = error
                    if self.parking is not None and self.parking.make_way(error):
                        continue
            free = self._reclaimable()
            if not free and refusal is not None and self._free_contexts(1):
                continue  # a batch that no session uses
            if not free:
                raise self._exhausted(refusal)
            if free[0].shape == shape:
                return free[0], True
            log.info("freeing a reclaimable context of %d tokens", len(free[0]))
            free[0].park(in_ram=refusal is None)
            self.destroy(free[0])

    def _create(self, shape: Shape, compute_bytes: int) -> PooledContext:
        made = self._engine.new_context(shape.window, shape.k_type, shape.v_type, compute_bytes)
        return self._enter(made, shape)

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
