"""The slot's batch context: its streams as contexts of the pool, which are taken and given back.

One at a time, made when the first session asks for the layout. Knows no prompt, and not what runs
together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from modeld.shared.errors import InsufficientMemory

if TYPE_CHECKING:
    from modeld.workers.engine import BatchContext, EngineContext
    from modeld.workers.pooled_context import PooledContext, Shape

log = logging.getLogger(__name__)

Make = Callable[["Shape"], "BatchContext"]
Enter = Callable[["EngineContext", "Shape"], "PooledContext"]


class BatchedContexts:
    """Streams that sessions own or left. All are made together, and freed together."""

    def __init__(self) -> None:
        self._batch: BatchContext | None = None
        self.entries: list[PooledContext] = []

    @property
    def idle(self) -> bool:
        """Whether there are streams, and no session has one."""
        return bool(self.entries) and all(entry.owner is None for entry in self.entries)

    @property
    def broken(self) -> bool:
        """Whether nothing that the streams hold can be trusted."""
        return self._batch is not None and self._batch.broken

    def free(self) -> list[PooledContext]:
        """Streams without a session: empty ones first, then by last use."""
        free = [entry for entry in self.entries if entry.owner is None]
        return sorted(free, key=lambda entry: (len(entry) > 0, entry.last_used))

    def fits(self, shape: Shape) -> bool:
        """Whether a session of this shape could have a stream of what is there."""
        batch = self._batch
        if batch is None or batch.broken:
            return False
        mine = self.entries[0].shape
        types = (mine.k_type, mine.v_type)
        return shape.window <= batch.window and (shape.k_type, shape.v_type) == types

    def take(self, shape: Shape) -> PooledContext:
        """A free stream. Raises InsufficientMemory with the numbers."""
        free = self.free()
        if free and self.fits(shape):
            return free[0]
        mine, used = self.entries[0].shape, len(self.entries) - len(free)
        numbers = {
            "cause": "streams",
            "streams": len(self.entries),
            "streams_in_use": used,
            "stream_window": mine.window,
            "window": shape.window,
        }
        if free:
            raise InsufficientMemory(
                f"This slot's {len(self.entries)} streams have windows of {mine.window} tokens, K "
                f"{mine.k_type} and V {mine.v_type}, and {used} are in use: a window of "
                f"{shape.window} with K {shape.k_type} and V {shape.v_type} isn't among them. Ask "
                "for what there is, close the sessions in them, or open an isolated session.",
                metadata=numbers,
            )
        raise InsufficientMemory(
            f"All {used} streams of this slot's batch are held by open sessions. Close one, or "
            "open an isolated session.",
            metadata=numbers,
        )

    def fill(self, batch: BatchContext, shape: Shape, enter: Enter) -> None:
        """Take in what was made; there was none before."""
        assert self._batch is None
        self._batch = batch
        self.entries = [enter(stream, shape) for stream in batch.streams]

    def retire(self, entry: PooledContext) -> bool:
        """Empty a stream for the next session; whether all are to go, since nothing of them can be
        trusted and none has a session any more.
        """
        entry.owner = None
        entry.close()
        return self.broken and self.idle

    def close(self) -> list[PooledContext]:
        """Free it; the contexts that are gone. Idempotent."""
        gone, self.entries = self.entries, []
        batch, self._batch = self._batch, None
        for entry in gone:
            entry.close()
        if batch is not None:
            batch.close()
        return gone
