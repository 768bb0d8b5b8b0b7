"""What both synchronous classes can do with kept state: a session's calls, and the snapshots'.

Mixed into ``Session`` and ``Client``; the calls themselves are in ``residency_calls``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Self, TypeVar

from modeld.client import residency_calls, snapshot_file
from modeld.client.calls import Call, Deadlines
from modeld.client.session_core import SessionCore
from modeld.client.transport import Transport
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


class SessionResidency(ABC):
    """Snapshot, restore, fork and admit of an open session. ``timeout`` in seconds."""

    _core: SessionCore

    @abstractmethod
    def _send(self, operation: str, make: Callable[[], Call[T]], *, restore: bool = True) -> T: ...

    @abstractmethod
    def _send_once(self, operation: str, make: Callable[[], Call[T]]) -> T:
        """As ``_send``, but raising a loss: what makes something new is never sent twice."""

    @abstractmethod
    def _beside(self, core: SessionCore) -> Self:
        """A session of the same client."""

    @abstractmethod
    def _prefill_s(self, timeout: float | None) -> float | None: ...

    def snapshot(self, label: str = "", *, timeout: float | None = None) -> SnapshotInfo:
        """Keep the session's prompt, answers and KV durably, under an id that the daemon makes.

        Raises UnsupportedFeature where the model's executor doesn't give its KV, StorageFull
        where the snapshot would not fit; then nothing was kept.
        """
        return self._send_once(
            "snapshot",
            lambda: residency_calls.snapshot(self._core, label, self._prefill_s(timeout)),
        )

    def restore(self, snapshot_id: str, *, timeout: float | None = None) -> Restored:
        """Make the session what was kept, in the place of what it holds.

        Refused, the session stays as it was: SnapshotNotFound, DigestMismatch (damaged),
        ManifestMismatch (of another identity), ContextOverflow (longer than this window).
        """
        return self._send(
            "restore",
            lambda: residency_calls.restore(self._core, snapshot_id, self._prefill_s(timeout)),
            restore=False,
        )

    def fork(
        self,
        *,
        session_key: str = "",
        durable: bool = False,
        no_wait: bool = False,
        timeout: float | None = None,
    ) -> Self:
        """A second session of the same prompt, answers and KV, which goes on by itself.

        What it took over is ``opened.resident`` tokens. Close either one without harm to the other.
        A ``durable`` one, which needs a key, is saved at once: ``saved`` tells how that went.
        """
        forked = self._send_once(
            "fork",
            lambda: residency_calls.fork(
                self._core, session_key, durable, no_wait, self._prefill_s(timeout)
            ),
        )
        core = residency_calls.forked_core(self._core, forked, session_key, durable)
        return self._beside(core)

    def admit(
        self,
        *,
        segment: int | None = None,
        range: tuple[int, int] | None = None,
        query: str | None = None,
        budget: int = 0,
        timeout: float | None = None,
    ) -> Admitted:
        """Bring tokens that went out of attention back into it, under ``overflow="evict"``.

        One of ``segment`` (its index in the prompt, prefix then suffix), ``range`` (begin and end
        in the conversation's tokens, as ``explain`` counts them) and ``query`` (the parked blocks
        that are most like it). ``budget``: at most so many tokens; 0: what fits.
        """
        return self._send_once(
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


class ClientSnapshots(ABC):
    """What a daemon keeps of sessions. ``timeout`` in seconds."""

    deadlines: Deadlines

    @property
    @abstractmethod
    def transport(self) -> Transport: ...

    def list_snapshots(self, model_digest: str = "") -> SnapshotList:
        """Those of a model (by ``ModelInfo.digest``; "": of all), with the space and the quota."""
        return self.transport.unary(residency_calls.list_snapshots(model_digest, self.deadlines))

    def delete_snapshot(self, snapshot_id: str) -> None:
        """Raises SnapshotNotFound, ModelBusy while it is restored or exported."""
        self.transport.unary(residency_calls.delete_snapshot(snapshot_id, self.deadlines))

    def saved_sessions(self) -> list[SavedSession]:
        """What is saved of durable sessions, open or not, the last used first."""
        return list(self.transport.unary(residency_calls.list_saved(self.deadlines)).saved)

    def discard_saved(self, session_key: str) -> Closed:
        """Forget what is saved of the durable session of a key, and close it where it is open.

        Raises SessionNotFound where there is neither.
        """
        return self.transport.unary(residency_calls.discard_saved(session_key, self.deadlines))

    def snapshot_chunks(
        self, snapshot_id: str, *, timeout: float | None = None
    ) -> Iterator[SnapshotChunk]:
        """A snapshot's files as they are streamed, for keeping them in a way of one's own."""
        timeout_s = timeout if timeout is not None else self.deadlines.import_s
        return iter(self.transport.stream(residency_calls.export_snapshot(snapshot_id, timeout_s)))

    def export_snapshot(
        self, snapshot_id: str, path: str | Path, *, timeout: float | None = None
    ) -> Exported:
        """Write a snapshot to one file on this side, a tar (see ``snapshot_file``).

        ``path`` is the file, which must not exist yet, or a folder, where it is named by the id.
        Raises InvalidRequest or StorageFull where it can't be written; then nothing remains.
        """
        with snapshot_file.SnapshotWriter(path, snapshot_id) as writer:
            for chunk in self.snapshot_chunks(snapshot_id, timeout=timeout):
                writer.take(chunk)
            return writer.finish()

    def import_snapshot(
        self, source: str | Path | BinaryIO, *, timeout: float | None = None
    ) -> SnapshotInfo:
        """Give the daemon a snapshot that ``export_snapshot`` wrote, from a path or an open file.

        It is read as a stream, and listed only once the daemon has verified all of it. Raises
        InvalidRequest for another kind of file, DigestMismatch for a damaged one, StorageFull.
        """
        call = residency_calls.import_snapshot(
            timeout if timeout is not None else self.deadlines.import_s
        )
        with snapshot_file.opened(source) as file:
            return self.transport.upload(call, snapshot_file.read_chunks(file))
