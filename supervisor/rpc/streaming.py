"""Writing to a gRPC stream: one writer, a limit on a stalled reader, queue positions meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from modeld.shared.errors import SlowConsumer
from modeld.supervisor.rpc.errors import Context
from modeld.supervisor.slot_core import Caller
from modeld.v1 import common_pb2 as common

logger = logging.getLogger(__name__)


class Writer:
    """Writes messages of one stream in order; raises SlowConsumer after ``stall_limit_s``.

    For use by one task at a time. A timer for each write would cost more than the write's own
    Python, so one is armed now and then, and looks for how long the write of that moment waits.
    """

    def __init__(self, context: Context, stall_limit_s: float, check: Callable[[], None]) -> None:
        self._context = context
        self._stall_limit_s = stall_limit_s
        self._check = check  # whether this process may still answer
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.Task[Any] | None = None  # the task that waits in a write
        self._since_s = 0.0
        self._armed = False
        self._stalled = False

    async def write(self, message: Any) -> None:
        self._check()
        self._since_s = self._loop.time()
        self._writer = asyncio.current_task()
        if not self._armed:
            self._arm(self._stall_limit_s)
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if not self._stalled or self._writer is None or self._writer.uncancel() > 0:
                raise  # somebody else's cancel, perhaps besides ours
            raise SlowConsumer(
                f"The stream's reader took nothing for {self._stall_limit_s:g} s, so the operation "
                "was stopped; the session is intact. Read faster, or ask for fewer tokens.",
                metadata={"stall_limit_seconds": self._stall_limit_s},
            ) from None
        finally:
            self._writer = None

    def _arm(self, delay_s: float) -> None:
        self._armed = True
        self._loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        self._armed = False
        if self._writer is None:
            return  # the next write arms it again
        left_s = self._since_s + self._stall_limit_s - self._loop.time()
        if left_s > 0:
            self._arm(left_s)
            return
        self._stalled = True
        self._writer.cancel()


class QueueReporter:
    """Tells a waiting stream its place; costs nothing where nobody waits.

    The queue's callback must not block, so a task writes the latest position. ``stop`` must be
    awaited before anything else is written.
    """

    def __init__(self, write: Callable[[common.QueueStatus], Awaitable[None]]) -> None:
        self._write = write
        self._latest: common.QueueStatus | None = None
        self._changed = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def __call__(self, position: int, holder_operation: str, holder_age_s: float) -> None:
        self._latest = common.QueueStatus(
            position=position, holder_operation=holder_operation, holder_age_seconds=holder_age_s
        )
        self._changed.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._stopping:
            await self._changed.wait()
            self._changed.clear()
            status, self._latest = self._latest, None
            if status is not None and not self._stopping:
                await self._write(status)

    async def stop(self) -> None:
        if self._task is None:
            return
        # Not by a cancel: gRPC goes on with a write that was begun, and refuses the next one.
        self._stopping = True
        self._changed.set()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and self._task.exception() is not None:
            logger.debug("a queue position couldn't be told", exc_info=self._task.exception())
        self._task = None
        self._stopping = False
        self._latest = None
        self._changed.clear()


def caller_of(context: Context, *, no_wait: bool, reporter: QueueReporter | None = None) -> Caller:
    """A call's deadline on the loop's clock and its wish about waiting."""
    remaining = context.time_remaining()
    deadline = None
    if remaining is not None and remaining < 10**8:
        deadline = asyncio.get_running_loop().time() + remaining
    return Caller(deadline, no_wait, reporter)
