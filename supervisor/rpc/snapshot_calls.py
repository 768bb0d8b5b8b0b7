"""The session service's calls on snapshots: taken, brought back, listed, streamed out and in.

Owns what is checked before a worker is asked, and what a session is known to hold after a restore.
The store owns ids and folders, the worker writes and reads what is in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import fields
from typing import Any, TypeVar

from modeld.shared.errors import (
    BackendMismatch,
    ContextOverflow,
    InvalidRequest,
    ManifestMismatch,
    ModeldError,
    SessionClosed,
)
from modeld.shared.manifest import Identity
from modeld.shared.messages import RestoreOp, RestoreResult, SaveOp, SaveResult
from modeld.supervisor.awaiting import see_through
from modeld.supervisor.model_slot import ModelSlot
from modeld.supervisor.rpc import convert
from modeld.supervisor.rpc.errors import Context, guarded, guarded_while_draining
from modeld.supervisor.rpc.session_calls import SessionCalls, check_text, expect
from modeld.supervisor.rpc.streaming import caller_of
from modeld.supervisor.saved_folder import SavedInfo, now_unix_ms, saved_info
from modeld.supervisor.saved_quota import Room
from modeld.supervisor.sessions import Session
from modeld.supervisor.snapshot_transfer import IncomingSnapshot, Piece, pieces_of
from modeld.supervisor.snapshots import PendingSnapshot
from modeld.v1 import session_pb2 as pb

T = TypeVar("T")

KIND = "snapshot"
MAX_PIECE_BYTES = 1 << 20
# What of an identity may differ between what was saved and the session it is brought back into.
MAY_DIFFER = frozenset({"runtime_digest", "profile_id"})
# Beside the KV: the record with its tokens, and each file's header.
RECORD_BYTES = 64 * 1024
RECORD_BYTES_A_TOKEN = 16


class SnapshotCalls(SessionCalls):
    """Part of the session service; see the proto for what each call promises."""

    @guarded
    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> pb.SnapshotInfo:
        slot, session = self._session(request.session, request.identity)
        check_text("label", request.label)
        store = self.services.snapshots
        what = f"Saving session {session.session_id}"
        async with slot.hold(session.session_id, "snapshot", caller_of(context, no_wait=False)):
            self._session(request.session)  # it may have gone while this call waited
            _require_tokens(session)
            room_of = store.quota.room(estimated_bytes(session), what)
            async with apart(room_of) as room, apart(store.begin()) as pending:
                operation = SaveOp(session_id=session.session_id, folder=str(pending.folder.path))
                result = expect(await slot.call(operation, session=session), SaveResult)
                if result.cancelled:
                    raise self._cancelled(request.session, "saving")
                info = saved_info(
                    result, session, kind=KIND, saved_id=pending.saved_id, label=request.label
                )
                self.gate.check_owner()
                return snapshot_info(await in_thread(_commit, room, pending, info))

    @guarded
    async def Restore(self, request: pb.RestoreRequest, context: Context) -> pb.RestoreResponse:
        slot, session = self._session(request.session, request.identity)
        store = self.services.snapshots
        async with apart(store.using(request.snapshot_id)) as (folder, info):
            check_restorable(info, session)
            caller = caller_of(context, no_wait=False)
            async with slot.hold(session.session_id, "restore", caller):
                self._session(request.session)
                operation = RestoreOp(
                    session_id=session.session_id, folder=str(folder.path), record=info.record
                )
                result = expect(await slot.call_beside(session, operation), RestoreResult)
                if result.cancelled:
                    raise self._cancelled(request.session, "restoring")
                _restored(slot, session, info, result)
            await in_thread(folder.touch, now_unix_ms())
        return pb.RestoreResponse(
            snapshot=snapshot_info(info),
            resident=result.resident,
            available=result.available,
            seconds=result.seconds,
            tokens=result.tokens,
            exact=result.exact,
            exact_reason=result.exact_reason,
            seen_tokens=result.seen_tokens,
            generated_turn_ids=result.turn_ids,
        )

    def _cancelled(self, handle: Any, doing: str) -> ModeldError:
        """Why an operation was stopped that this call's client didn't stop."""
        try:
            self._session(handle)
        except ModeldError as error:
            return error
        return SessionClosed(
            f"{doing.capitalize()} {handle.session_id} was stopped. Nothing changed: try again.",
            metadata={"session_id": handle.session_id, "cause": "cancelled"},
        )

    @guarded_while_draining
    async def ListSnapshots(
        self, request: pb.ListSnapshotsRequest, context: Context
    ) -> pb.ListSnapshotsResponse:
        store = self.services.snapshots

        def look() -> tuple[tuple[SavedInfo, ...], int]:
            return store.list(request.model_digest), store.quota.used_bytes

        infos, used = await asyncio.to_thread(look)
        return pb.ListSnapshotsResponse(
            snapshots=map(snapshot_info, infos),
            used_bytes=used,
            quota_bytes=store.quota.limit_bytes,
        )

    @guarded
    async def DeleteSnapshot(
        self, request: pb.DeleteSnapshotRequest, context: Context
    ) -> pb.DeleteSnapshotResponse:
        await in_thread(self.services.snapshots.delete, request.snapshot_id)
        return pb.DeleteSnapshotResponse()

    @guarded
    async def ExportSnapshot(self, request: pb.ExportSnapshotRequest, context: Context) -> None:
        writer = self._writer(context)
        most = min(MAX_PIECE_BYTES, self.services.config.max_message_bytes // 2)
        async with apart(self.services.snapshots.using(request.snapshot_id)) as (folder, info):
            told: pb.SnapshotInfo | None = snapshot_info(info)
            pieces = pieces_of(folder, info, most)
            while (piece := await in_thread(next, pieces, None)) is not None:
                await writer.write(
                    pb.SnapshotChunk(
                        info=told, file=piece.file, offset=piece.offset, data=piece.data
                    )
                )
                told = None

    @guarded
    async def ImportSnapshot(self, request_iterator: Any, context: Context) -> pb.SnapshotInfo:
        begun = False
        incoming = IncomingSnapshot(self.services.snapshots, self._check_served)
        chunks, limit_s = aiter(request_iterator), self.services.config.stall_limit_s
        async with apart(incoming):
            while (chunk := await _next_within(chunks, limit_s)) is not None:
                if not begun:
                    if not chunk.HasField("info"):
                        raise InvalidRequest.of("info", "", "the snapshot's, on the first chunk")
                    incoming.begin(chunk.info.snapshot_id, chunk.info.digest)
                    begun = True
                self.gate.check_owner()
                piece = Piece(chunk.file, chunk.offset, chunk.data)
                await in_thread(incoming.take, piece)
            if not begun:
                raise InvalidRequest.of("chunks", 0, "what ExportSnapshot gave, in its order")
            self.gate.check_owner()
            return snapshot_info(await in_thread(incoming.finish))

    def _check_served(self, info: SavedInfo) -> None:
        """Raises where it is known that no session here can ever be what was saved."""
        backend, version = info.identity.backend, info.identity.backend_version
        slot = self.services.slots.get(backend)
        if slot is None:
            raise BackendMismatch(
                f"This snapshot is of backend {backend[:64]!r}, and this daemon runs "
                f"{', '.join(self.services.slots)} only. The setting backends says which.",
                metadata={"type": backend[:64], "backends": ",".join(self.services.slots)},
            )
        hello = slot.keeper.hello
        if hello is not None and hello.backend_version != version:
            raise _differs("backend_version", version, hello.backend_version)


async def _next_within(chunks: AsyncIterator[Any], limit_s: float) -> Any:
    """None: that was all. Raises InvalidRequest where nothing comes for ``limit_s``: whoever sends
    no more holds room that others want.
    """
    try:
        async with asyncio.timeout(limit_s):
            return await anext(chunks, None)
    except TimeoutError:
        raise InvalidRequest.of(
            "chunks",
            f"nothing for {limit_s:g} s",
            "one chunk after the other, as stall_limit_s allows",
            "The import was given up, and nothing was kept. Send it again from its beginning.",
        ) from None


def _commit(room: Room, pending: PendingSnapshot, info: SavedInfo) -> SavedInfo:
    room.resize(info.size_bytes)
    return pending.commit(info)


def _restored(slot: ModelSlot, session: Session, info: SavedInfo, result: RestoreResult) -> None:
    session.resident, session.seen_tokens = result.resident, result.seen_tokens
    session.prefix, session.tools, session.suffix = info.prefix, info.tools, info.suffix
    session.back = None  # what a resume brought back has made way
    slot.plan.count(result, slot.sessions.resident)


def _require_tokens(session: Session) -> None:
    if session.resident <= 0:
        raise InvalidRequest.of(
            "session",
            session.session_id,
            "one that holds tokens",
            "There is nothing to save yet: send a prefix or a turn first.",
        )


def estimated_bytes(session: Session) -> int:
    """What saving a session will write, by what its KV takes a token."""
    resolution, tokens = session.resolution, session.resident
    kv = resolution.kv_bytes * tokens // max(1, resolution.numbers.effective.tokens)
    return kv + RECORD_BYTES + RECORD_BYTES_A_TOKEN * max(tokens, session.seen_tokens)


def check_restorable(info: SavedInfo, session: Session) -> None:
    """Raises ManifestMismatch, naming the first field that differs, or ContextOverflow."""
    types = (info.k_type, info.v_type), (session.request.k_type, session.request.v_type)
    for field in fields(Identity):
        saved, has = getattr(info.identity, field.name), getattr(session.identity, field.name)
        if field.name in MAY_DIFFER or saved == has:
            continue
        if field.name == "kv_digest" and types[0] != types[1]:
            raise _differs(
                "kv_digest", saved, has, f" (KV {'/'.join(types[0])}, not {'/'.join(types[1])})"
            )
        raise _differs(field.name, saved, has)
    window = session.resolution.numbers.effective.tokens
    if info.tokens > window:
        raise ContextOverflow(
            f"The snapshot holds {info.tokens} tokens, and the session's window is {window}. "
            f"Open a session with a window of {info.window}, as it was saved, and restore there.",
            metadata={
                "stage": "restore",
                "requested_tokens": info.tokens,
                "effective": window,
                "drop_tokens": info.tokens - window,
                "saved_window": info.window,
            },
        )


def _differs(field: str, saved: object, has: object, detail: str = "") -> ManifestMismatch:
    return ManifestMismatch(
        f"The snapshot was saved with {field}={saved!r}, and here it is {has!r}{detail}. Nothing "
        "was changed. Open a session like the one that was saved, and restore it there.",
        metadata={"reason": "identity", "field": field, "asserted": saved, "actual": has},
    )


def snapshot_info(info: SavedInfo) -> pb.SnapshotInfo:
    return pb.SnapshotInfo(
        snapshot_id=info.saved_id,
        label=info.label,
        size_bytes=info.size_bytes,
        digest=info.record_digest,
        tokens=info.tokens,
        exact=info.exact,
        identity=convert.identity(info.identity),
        created_unix_ms=info.created_unix_ms,
        exact_reason=info.exact_reason,
        model=info.model,
        window=info.window,
        seen_tokens=info.seen_tokens,
        turns=info.turns,
        seconds=info.seconds,
        k_type=info.k_type,
        v_type=info.v_type,
        overflow=f"OVERFLOW_{info.overflow.upper()}",
    )


# --- the disk, beside the loop -------------------------------------------------------------------


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run blocking work to its end, also when cancelled meanwhile; the cancel counts after it."""
    return await see_through(asyncio.to_thread(work, *args))


@asynccontextmanager
async def apart(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """A context that is entered and left in a thread, and left whatever happens."""
    stack = ExitStack()
    try:
        yield await in_thread(stack.enter_context, manager)
    finally:
        await in_thread(stack.close)
