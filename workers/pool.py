"""The engine contexts of a slot: who owns which, which may be taken again, which are freed.

What a context holds is its own record's (``pooled_context.py``). Knows nothing of prompts, turns,
sampling or clients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from modeld.shared.errors import InsufficientMemory, SessionFatal, UnsupportedFeature
from modeld.shared.messages import PlacedOut
from modeld.workers.batched_contexts import BatchedContexts
from modeld.workers.batching import Gate
from modeld.workers.engine import BatchingEngine, Engine, EngineContext
from modeld.workers.pooled_context import PooledContext, Shape, Tokens, common_prefix

if TYPE_CHECKING:
    from modeld.workers.parking import Parking

log = logging.getLogger(__name__)

# Another source of KV is worth taking over or copying when it has at least this many tokens more.
WORTHWHILE_TOKENS = 32


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
        reclaimable context of this shape is taken instead. Else goes what is missed least: contexts
        that hold nothing of their own, the cold store's RAM, the least recently used of others.
        ``compute_bytes`` is what was planned for a new one's buffers on the host.

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
        held goes. Raises InsufficientMemory with the numbers, and Cancelled.
        """
        if mine.shape.streams:
            like = [self.batched.take(mine.shape)]
        else:
            like = [entry for entry in self._reclaimable() if entry.shape == mine.shape]
        entry = min(like, key=lambda entry: len(entry) > 0, default=None)
        taken = entry is not None
        if entry is None:
            entry, taken = self._make_room(mine.shape, 0)
        entry.clear()
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
        """Make ``mine``, of which nothing else is needed any more, hold the first ``count`` tokens
        of ``source``; False (and empty) if not.
        """
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
        """Free it; a stream is emptied, for it is freed with the others only."""
        if entry.shape.streams:
            if self.batched.retire(entry):
                self._drop_batch()
            return
        self.contexts.remove(entry)
        self.freed += 1
        entry.close()

    def give_up(self, entry: PooledContext, *, in_ram: bool = True) -> None:
        """Free a context that can be trusted, and park what it holds before."""
        self._park_last(entry, in_ram=in_ram)
        self.destroy(entry)

    def _park_last(self, entry: PooledContext, *, in_ram: bool) -> None:
        """The context goes: that it can't be parked is no session's failure."""
        try:
            entry.park_last(in_ram=in_ram)
        except SessionFatal as error:
            log.warning("a context that goes isn't parked: %s", error.message)

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
            if in_ram is not None and not self.batched.broken:
                self._park_last(entry, in_ram=in_ram)
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
            self._free(free_bytes)
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
                if self._made_way(error):
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
            self.give_up(entry, in_ram=False)
        if freed < free_bytes and self.batched.idle:
            freed += sum(entry.bytes for entry in self.batched.entries)
            self._drop_batch(in_ram=False)
        return freed > 0

    def _free_spare(self, free_bytes: int) -> int:
        """Free reclaimable contexts with which nothing goes that isn't held or stored elsewhere,
        until that is ``free_bytes``; returns how many bytes it is.
        """
        freed = 0
        for entry in self._reclaimable():
            if freed >= free_bytes:
                break
            if self._is_spare(entry):
                freed += entry.bytes
                self.destroy(entry)
        streams = self.batched.entries if self.batched.idle else []
        if streams and freed < free_bytes and all(self._is_stored(entry) for entry in streams):
            freed += sum(entry.bytes for entry in streams)
            self._drop_batch()
        return freed

    def _made_way(self, refusal: InsufficientMemory) -> bool:
        """Whether anything was freed for a context that was refused, without the loss of another:
        what costs nothing first, then the store's RAM.
        """
        if self._free_spare(1):
            return True
        return self.parking is not None and self.parking.make_way(refusal)

    def _is_spare(self, entry: PooledContext) -> bool:
        size, tokens = len(entry), entry.tokens
        others = (
            common_prefix(other.tokens, tokens)
            for other in self.contexts
            if other is not entry and other.kv_digest == entry.kv_digest
        )
        return any(common == size for common in others) or self._is_stored(entry)

    def _is_stored(self, entry: PooledContext) -> bool:
        """Whether the cold store has all that it holds. Asking is a use: what else is stored makes
        way first.
        """
        size, tokens, parking = len(entry), entry.tokens, self.parking
        if not size:
            return True
        if parking is None or parking.reach(entry.kv_digest, tokens, entry.window) != size:
            return False
        entry.park_last()
        return True

    def _give_back(self, shape: Shape, free_bytes: int) -> PooledContext | None:
        """A reclaimable context of this shape, or None after freeing ``free_bytes``."""
        free = self._reclaimable()
        same = next((entry for entry in free if entry.shape == shape), None)
        if same is None:
            self._free(free_bytes)
        return same

    def _free(self, free_bytes: int) -> None:
        """Give so much back: what costs nothing first, then the store's RAM, then contexts."""
        free_bytes -= self._free_spare(free_bytes)
        if self.parking is not None:
            free_bytes -= self.parking.give_back(free_bytes)
        if free_bytes > 0:
            self._free_contexts(free_bytes)

    def _make_room(self, shape: Shape, compute_bytes: int) -> tuple[PooledContext, bool]:
        """A new context, or the least recently used reclaimable one where none can be made."""
        refusal: InsufficientMemory | None = None
        while True:
            if len(self.contexts) - len(self.batched.entries) < self.max_contexts:
                try:
                    return self._create(shape, compute_bytes), False
                except InsufficientMemory as error:
                    refusal = error
                    if self._made_way(error):
                        continue
            free = self._reclaimable()
            if not free and refusal is not None and self._free_contexts(1):
                continue  # a batch that no session uses
            if not free:
                raise self._exhausted(refusal)
            if free[0].shape == shape:
                return free[0], True
            log.info("freeing a reclaimable context of %d tokens", len(free[0]))
            self.give_up(free[0], in_ram=refusal is None)

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
