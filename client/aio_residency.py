"""The twin of ``residency``; asyncio. What each call does and raises is told there."""

# ruff: noqa: ASYNC109  a timeout here is the call's gRPC deadline, which the daemon sees too

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from modeld.client import residency_calls, snapshot_file
from modeld.client.aio_transport import AsyncTransport
from modeld.client.calls import Call, Deadlines
from modeld.client.session_core import SessionCore
from modeld.client.values import Closed, SavedSession
from modeld.client.values_residency import (
    Admitted,
    Exported,
    Restored,
    SnapshotChunk,
    SnapshotInfo,
    SnapshotList,
)

T = TypeVar("T")


class AsyncSessionResidency(ABC):
    """Snapshot, restore, fork and admit of an open session. ``timeout`` in seconds."""

    _core: SessionCore

    @abstractmethod
    async def _send(
        self, operation: str, make: Callable[[], Call[T]], *, restore: bool = True
    ) -> T: ...

    @abstractmethod
    async def _send_once(self, operation: str, make: Callable[[], Call[T]]) -> T: ...

    @abstractmethod
    def _beside(self, core: SessionCore) -> Self: ...

    @abstractmethod
    def _prefill_s(self, timeout: float | None) -> float | None: ...

    async def snapshot(self, label: str = "", *, timeout: float | None = None) -> SnapshotInfo:
        """Keep the session durably, under an id. See ``Session.snapshot``."""
        return await self._send_once(
            "snapshot",
            lambda: residency_calls.snapshot(self._core, label, self._prefill_s(timeout)),
        )

    async def restore(self, snapshot_id: str, *, timeout: float | None = None) -> Restored:
        """Make the session what was kept. See ``Session.restore``."""
        return await self._send(
            "restore",
            lambda: residency_calls.restore(self._core, snapshot_id, self._prefill_s(timeout)),
            restore=False,
        )

    async def fork(
        self,
        *,
        session_key: str = "",
        durable: bool = False,
        no_wait: bool = False,
        timeout: float | None = None,
    ) -> Self:
        """A second session of the same state. See ``Session.fork``."""
        forked = await self._send_once(
            "fork",
            lambda: residency_calls.fork(
                self._core, session_key, durable, no_wait, self._prefill_s(timeout)
            ),
        )
        core = residency_calls.forked_core(self._core, forked, session_key, durable)
        return self._beside(core)

    async def admit(
        self,
        *,
        segment: int | None = None,
        range: tuple[int, int] | None = None,
        query: str | None = None,
        budget: int = 0,
        timeout: float | None = None,
    ) -> Admitted:
        """Bring tokens back into attention. See ``Session.admit``."""
        return await self._send_once(
            "admit",
            lambda: residency_calls.admit(
                self._core,
                segment=segment,
                range=range,
                query=query,
                budget=budget,
                timeout_s=self._prefill_s(timeout),
            ),
        )


class AsyncClientSnapshots(ABC):
    """What a daemon keeps of sessions. ``timeout`` in seconds."""

    deadlines: Deadlines

    @property
    @abstractmethod
    def transport(self) -> AsyncTransport: ...

    async def list_snapshots(self, model_digest: str = "") -> SnapshotList:
        """Those of a model, or of all. See ``Client.list_snapshots``."""
        call = residency_calls.list_snapshots(model_digest, self.deadlines)
        return await self.transport.unary(call)

    async def delete_snapshot(self, snapshot_id: str) -> None:
        """See ``Client.delete_snapshot``."""
        await self.transport.unary(residency_calls.delete_snapshot(snapshot_id, self.deadlines))

    async def saved_sessions(self) -> list[SavedSession]:
        """See ``Client.saved_sessions``."""
        return list((await self.transport.unary(residency_calls.list_saved(self.deadlines))).saved)

    async def discard_saved(self, session_key: str) -> Closed:
        """See ``Client.discard_saved``."""
        call = residency_calls.discard_saved(session_key, self.deadlines)
        return await self.transport.unary(call)

    async def snapshot_chunks(
        self, snapshot_id: str, *, timeout: float | None = None
    ) -> AsyncIterator[SnapshotChunk]:
        """A snapshot's files as they are streamed."""
        timeout_s = timeout if timeout is not None else self.deadlines.import_s
        stream = self.transport.stream(residency_calls.export_snapshot(snapshot_id, timeout_s))
        async for chunk in stream:
            yield chunk

    async def export_snapshot(
        self, snapshot_id: str, path: str | Path, *, timeout: float | None = None
    ) -> Exported:
        """Write a snapshot to one file. See ``Client.export_snapshot``."""
        with snapshot_file.SnapshotWriter(path, snapshot_id) as writer:
            chunks = self.snapshot_chunks(snapshot_id, timeout=timeout)
            async with contextlib.aclosing(chunks):  # type: ignore[type-var]
                async for chunk in chunks:
                    await asyncio.to_thread(writer.take, chunk)
            return await asyncio.to_thread(writer.finish)

    async def import_snapshot(
        self, source: str | Path | BinaryIO, *, timeout: float | None = None
    ) -> SnapshotInfo:
        """Give the daemon an exported snapshot. See ``Client.import_snapshot``."""
        call = residency_calls.import_snapshot(
            timeout if timeout is not None else self.deadlines.import_s
        )
        with snapshot_file.opened(source) as file:
            return await self.transport.upload(call, snapshot_file.read_chunks(file))
