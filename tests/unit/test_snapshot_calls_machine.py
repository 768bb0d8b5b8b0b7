"""The calls on snapshots over a worker that only answers: what is asked of it, and what stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from google.rpc import error_details_pb2, status_pb2

from modeld.shared.capacity import CapacityRequest
from modeld.shared.errors import ModeldError, from_wire
from modeld.shared.manifest import SegmentId
from modeld.shared.messages import Payload, RestoreOp, RestoreResult, SavedPart, SaveOp, SaveResult
from modeld.supervisor.events import EventBus
from modeld.supervisor.model_slot import OpenRequest
from modeld.supervisor.rpc import convert
from modeld.supervisor.rpc.services import Services
from modeld.supervisor.rpc.session_calls import handle_of
from modeld.supervisor.rpc.session_service import SessionService
from modeld.supervisor.rpc.snapshot_calls import estimated_bytes
from modeld.supervisor.saved_folder import INFO_NAME
from modeld.supervisor.saved_quota import SavedQuota
from modeld.supervisor.sessions import Session
from modeld.supervisor.slot_core import Caller
from modeld.supervisor.snapshots import SnapshotStore
from modeld.v1 import session_pb2 as pb
from tests.support.saved_files import RECORD, info_of, write_files
from tests.support.slots import Slots, Worker, make_slots

TOKENS = 600
SEGMENT = SegmentId("message", True, "task_pinned", "none", "h" * 64)


class Refused(Exception):
    """What left the daemon as a status."""

    def __init__(self, error: ModeldError) -> None:
        super().__init__(error.message)
        self.error = error


class Call:
    """A gRPC context of one call."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("modeld-owner", "me"),)

    def time_remaining(self) -> None:
        return None

    async def write(self, message: Any) -> None:
        self.written.append(message)

    async def abort(self, code: Any, message: str, trailing_metadata: Any = ()) -> None:
        status = status_pb2.Status.FromString(dict(trailing_metadata)["grpc-status-details-bin"])
        info = error_details_pb2.ErrorInfo()
        status.details[0].Unpack(info)
        raise Refused(from_wire(info.reason, message, info.metadata))


class Gate:
    owner_instance_id = "me"
    draining = False

    def check_owner(self) -> None:
        pass


@dataclass
class Scene:
    slots: Slots
    service: SessionService
    store: SnapshotStore
    session: Session
    answer: Callable[[Payload], Payload] | None = None
    sent: list[Payload] = field(default_factory=list)

    async def call(self, name: str, request: Any, context: Call | None = None) -> Any:
        return await getattr(self.service, name)(request, context or Call())

    def about(self, cls: Any, session: Session | None = None, **more: Any) -> Any:
        session = session or self.session
        identity = convert.identity(session.identity)
        return cls(session=handle_of(session), identity=identity, **more)

    async def snapshot(self, **more: Any) -> pb.SnapshotInfo:
        told: pb.SnapshotInfo = await self.call("Snapshot", self.about(pb.SnapshotRequest, **more))
        return told

    async def restore(self, snapshot_id: str, session: Session | None = None) -> Any:
        request = self.about(pb.RestoreRequest, session, snapshot_id=snapshot_id)
        return await self.call("Restore", request)

    async def refused(self, name: str, request: Any) -> ModeldError:
        with pytest.raises(Refused) as caught:
            await self.call(name, request)
        return caught.value.error

    def entries(self) -> list[str]:
        return sorted(entry.name for entry in self.store.root.iterdir())


def saved(folder: Path, kv_digest: str, tokens: int = TOKENS) -> SaveResult:
    """What a worker does for a SaveOp, in small."""
    told: dict[str, Any] = {"kv_digest": kv_digest, "prompt_format": "raw", "seen_tokens": tokens}
    files = write_files(folder, tokens, **told)
    info = info_of(files)
    return SaveResult(
        record=RECORD,
        record_bytes=info.record_bytes,
        record_digest=info.record_digest,
        parts=[
            SavedPart(
                name=p.name, begin=p.begin, end=p.end, file_bytes=p.file_bytes, digest=p.digest
            )
            for p in info.parts
        ],
        written_bytes=info.size_bytes,
        tokens=tokens,
        seen_tokens=tokens,
        turns=2,
        exact=True,
        exact_reason="",
        seconds=0.5,
    )


def restored(**more: Any) -> RestoreResult:
    given: dict[str, Any] = {
        "tokens": TOKENS,
        "resident": TOKENS,
        "available": 424,
        "retained": 0,
        "seen_tokens": TOKENS + 5,
        "turn_ids": ["t-1", "t-2"],
        "exact": True,
        "exact_reason": "",
        "seconds": 0.25,
        "slot_cells": 4096,
        "slot_bytes": 4096 * 122_880,
    }
    return RestoreResult(**{**given, **more})


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    slots = make_slots(tmp_path, monkeypatch)
    store = SnapshotStore(tmp_path, SavedQuota(tmp_path, 1 << 40))
    services = Services(
        Gate(),
        slots.config,
        slots.store,  # type: ignore[arg-type]
        slots.slots,
        EventBus(),
        store,
    )
    session = await slots.open("big", window=1024)
    session.resident, session.seen_tokens = TOKENS, TOKENS
    session.prefix, session.tools, session.suffix = (SEGMENT,), ("{}",), (SEGMENT, SEGMENT)
    made = Scene(slots, SessionService(services), store, session)
    worker = slots.workers["llama"]
    others = worker._answer

    def answer(payload: Payload) -> Payload:
        made.sent.append(payload)
        if made.answer is not None:
            return made.answer(payload)
        if isinstance(payload, SaveOp):
            return saved(Path(payload.folder), session.identity.kv_digest)
        return restored() if isinstance(payload, RestoreOp) else others(payload)

    monkeypatch.setattr(worker, "_answer", answer)
    return made


def raising(error: ModeldError) -> Callable[[Payload], Payload]:
    def answer(_payload: Payload) -> Payload:
        raise error

    return answer


# --- taking one ----------------------------------------------------------------------------------


async def test_a_snapshot_tells_what_was_saved_and_is_listed(scene: Scene) -> None:
    info = await scene.snapshot(label="before lunch")
    assert (info.label, info.tokens, info.turns, info.window) == ("before lunch", TOKENS, 2, 1024)
    assert info.model == "big"
    assert info.identity.model_digest == "digest-of-big"
    files = (scene.store.root / info.snapshot_id).iterdir()
    assert info.size_bytes == sum(f.stat().st_size for f in files if f.name != INFO_NAME)
    listed = await scene.call("ListSnapshots", pb.ListSnapshotsRequest())
    assert list(listed.snapshots) == [info]
    assert listed.used_bytes > info.size_bytes
    assert listed.quota_bytes == 1 << 40
    other = pb.ListSnapshotsRequest(model_digest="0" * 64)
    assert list((await scene.call("ListSnapshots", other)).snapshots) == []
    folder = Path(next(op for op in scene.sent if isinstance(op, SaveOp)).folder)
    assert folder.name.startswith(".")  # out of sight while it was written
    assert scene.entries() == [info.snapshot_id]


async def test_a_session_that_holds_nothing_has_nothing_to_save(scene: Scene) -> None:
    scene.session.resident = 0
    error = await scene.refused("Snapshot", scene.about(pb.SnapshotRequest))
    assert error.reason == "INVALID_REQUEST"
    assert "holds tokens" in error.message
    assert not any(isinstance(op, SaveOp) for op in scene.sent)
    assert scene.entries() == []


@pytest.mark.parametrize("label", ["\x1b[2J", "x" * 257])
async def test_labels_are_short_and_printable(scene: Scene, label: str) -> None:
    error = await scene.refused("Snapshot", scene.about(pb.SnapshotRequest, label=label))
    assert error.reason == "INVALID_REQUEST"


async def test_another_identity_is_refused(scene: Scene) -> None:
    request = scene.about(pb.SnapshotRequest)
    request.identity.kv_digest = "x"
    assert (await scene.refused("Snapshot", request)).metadata["field"] == "kv_digest"
    assert scene.entries() == []


@pytest.mark.parametrize("reason", ["UNSUPPORTED_FEATURE", "STORAGE_FULL", "INSUFFICIENT_MEMORY"])
async def test_what_the_worker_refuses_leaves_nothing(scene: Scene, reason: str) -> None:
    scene.answer = raising(from_wire(reason, "no", {"capability": "snapshot"}))
    error = await scene.refused("Snapshot", scene.about(pb.SnapshotRequest))
    assert (error.reason, error.message) == (reason, "no")
    assert scene.entries() == []
    scene.store.quota.limit_bytes = 1000
    with scene.store.quota.room(1000, "all of it"):  # no room stays promised
        pass


async def test_a_save_that_was_stopped_leaves_nothing(scene: Scene) -> None:
    def stopped(payload: Payload) -> Payload:
        assert isinstance(payload, SaveOp)
        result = saved(Path(payload.folder), scene.session.identity.kv_digest)
        result.cancelled = True
        return result

    scene.answer = stopped
    error = await scene.refused("Snapshot", scene.about(pb.SnapshotRequest))
    assert error.reason == "SESSION_CLOSED"
    assert scene.entries() == []


async def test_files_that_are_not_there_are_no_snapshot(scene: Scene) -> None:
    def short(payload: Payload) -> Payload:
        assert isinstance(payload, SaveOp)
        result = saved(Path(payload.folder), scene.session.identity.kv_digest)
        (Path(payload.folder) / result.parts[0].name).write_bytes(b"cut")
        return result

    scene.answer = short
    error = await scene.refused("Snapshot", scene.about(pb.SnapshotRequest))
    assert error.reason == "DIGEST_MISMATCH"
    assert scene.entries() == []


async def test_the_quota_is_looked_at_before_and_after_the_worker_writes(scene: Scene) -> None:
    need = estimated_bytes(scene.session)
    assert need > TOKENS * 122_880  # as f16 KV of this model is planned
    scene.store.quota.limit_bytes = need - 1
    error = await scene.refused("Snapshot", scene.about(pb.SnapshotRequest))
    assert error.reason == "STORAGE_FULL"
    assert error.metadata["needed_bytes"] == str(need)
    assert not any(isinstance(op, SaveOp) for op in scene.sent)
    scene.store.quota.limit_bytes = need

    def larger(payload: Payload) -> Payload:
        assert isinstance(payload, SaveOp)
        result = saved(Path(payload.folder), scene.session.identity.kv_digest)
        with (Path(payload.folder) / RECORD).open("ab") as file:
            file.truncate(need + 1)
        result.record_bytes = need + 1
        return result

    scene.answer = larger
    assert (await scene.refused("Snapshot", scene.about(pb.SnapshotRequest))).reason == (
        "STORAGE_FULL"
    )
    assert scene.entries() == []
    scene.answer = None
    await scene.snapshot()


# --- bringing one back ---------------------------------------------------------------------------


async def test_a_restore_makes_the_session_what_was_saved(scene: Scene) -> None:
    info = await scene.snapshot()
    fresh = await scene.slots.open("big", window=1024)
    assert (fresh.resident, fresh.prefix) == (0, ())
    told = await scene.restore(info.snapshot_id, fresh)
    operation = next(op for op in scene.sent if isinstance(op, RestoreOp))
    assert operation.session_id == fresh.session_id
    assert Path(operation.folder) == scene.store.root / info.snapshot_id
    assert operation.record == RECORD
    assert told.snapshot == info
    assert (told.tokens, told.resident, told.available) == (TOKENS, TOKENS, 424)
    assert list(told.generated_turn_ids) == ["t-1", "t-2"]
    assert (fresh.resident, fresh.seen_tokens) == (TOKENS, TOKENS + 5)
    assert fresh.prefix == scene.session.prefix
    assert (fresh.tools, fresh.suffix) == (scene.session.tools, scene.session.suffix)
    assert scene.slots.slots["llama"].use.cells == 4096  # as the worker counted after it


async def test_a_restore_counts_as_use(scene: Scene) -> None:
    info = await scene.snapshot()
    before = scene.store.find(info.snapshot_id).used_unix_ms
    await asyncio.sleep(0.01)
    await scene.restore(info.snapshot_id)
    assert scene.store.find(info.snapshot_id).used_unix_ms > before


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / RECORD).write_bytes(b"cut"), "DIGEST_MISMATCH"),
        (lambda folder: (folder / INFO_NAME).write_bytes(b"{"), "DIGEST_MISMATCH"),
        (lambda folder: folder.rename(folder.with_name("away")), "SNAPSHOT_NOT_FOUND"),
    ],
)
async def test_what_is_missing_or_cut_is_refused_before_the_worker_is_asked(
    scene: Scene, damage: Callable[[Path], object], reason: str
) -> None:
    info = await scene.snapshot()
    damage(scene.store.root / info.snapshot_id)
    request = scene.about(pb.RestoreRequest, snapshot_id=info.snapshot_id)
    assert (await scene.refused("Restore", request)).reason == reason
    assert not any(isinstance(op, RestoreOp) for op in scene.sent)
    assert scene.session.resident == TOKENS


@pytest.mark.parametrize(
    ("name", "k_type", "prompt_format"),
    [("kv_digest", "q8_0", "raw"), ("prompt_format", "f16", "chat")],
)
async def test_another_identity_is_named_with_both_values(
    scene: Scene, name: str, k_type: str, prompt_format: str
) -> None:
    info = await scene.snapshot()
    wanted = OpenRequest("big", CapacityRequest(1024, k_type, "f16"), "", "", prompt_format)
    other = (await scene.slots.slots["llama"].open(wanted, Caller())).session
    request = scene.about(pb.RestoreRequest, other, snapshot_id=info.snapshot_id)
    error = await scene.refused("Restore", request)
    assert (error.reason, error.metadata["field"]) == ("MANIFEST_MISMATCH", name)
    saved_value = getattr(scene.session.identity, name)
    assert error.metadata["asserted"] == saved_value != getattr(other.identity, name)
    assert error.metadata["actual"] == getattr(other.identity, name)
    assert not any(isinstance(op, RestoreOp) for op in scene.sent)
    assert other.resident == 0


async def test_profile_and_run_settings_may_be_others(scene: Scene) -> None:
    info = await scene.snapshot()
    wanted = OpenRequest("big", CapacityRequest(2048), "", "another", "raw")
    other = (await scene.slots.slots["llama"].open(wanted, Caller())).session
    assert other.identity.runtime_digest != scene.session.identity.runtime_digest
    assert other.identity.profile_id != scene.session.identity.profile_id
    assert (await scene.restore(info.snapshot_id, other)).tokens == TOKENS


async def test_a_smaller_window_is_refused_with_the_one_that_it_takes(scene: Scene) -> None:
    info = await scene.snapshot()
    small = await scene.slots.open("big", window=512)
    request = scene.about(pb.RestoreRequest, small, snapshot_id=info.snapshot_id)
    error = await scene.refused("Restore", request)
    assert error.reason == "CONTEXT_OVERFLOW"
    assert (error.metadata["requested_tokens"], error.metadata["effective"]) == ("600", "512")
    assert "window of 1024" in error.message
    large = await scene.slots.open("big", window=2048)
    assert (await scene.restore(info.snapshot_id, large)).tokens == TOKENS


async def test_a_restore_that_fails_leaves_the_session_as_it_was_known(scene: Scene) -> None:
    info = await scene.snapshot()
    known = (scene.session.resident, scene.session.prefix, scene.session.suffix)
    scene.answer = raising(from_wire("DIGEST_MISMATCH", "a chunk isn't what was written"))
    request = scene.about(pb.RestoreRequest, snapshot_id=info.snapshot_id)
    assert (await scene.refused("Restore", request)).reason == "DIGEST_MISMATCH"
    scene.answer = lambda _payload: restored(cancelled=True, tokens=0, resident=0)
    assert (await scene.refused("Restore", request)).reason == "SESSION_CLOSED"
    assert (scene.session.resident, scene.session.prefix, scene.session.suffix) == known
    await scene.call("DeleteSnapshot", pb.DeleteSnapshotRequest(snapshot_id=info.snapshot_id))


# --- out, in, away -------------------------------------------------------------------------------


async def test_an_export_is_the_info_once_and_then_the_files(scene: Scene) -> None:
    info = await scene.snapshot()
    context = Call()
    request = pb.ExportSnapshotRequest(snapshot_id=info.snapshot_id)
    await scene.call("ExportSnapshot", request, context)
    first, *others = context.written
    assert first.info == info
    assert first.file == INFO_NAME
    assert not any(chunk.HasField("info") for chunk in others)
    assert max(len(chunk.data) for chunk in context.written) <= 1 << 20
    with pytest.raises(Refused):
        await scene.call("ExportSnapshot", pb.ExportSnapshotRequest(snapshot_id="snap-x"))


async def test_an_export_comes_in_again_after_it_was_deleted(scene: Scene) -> None:
    info = await scene.snapshot()
    context = Call()
    request = pb.ExportSnapshotRequest(snapshot_id=info.snapshot_id)
    await scene.call("ExportSnapshot", request, context)
    await scene.call("DeleteSnapshot", pb.DeleteSnapshotRequest(snapshot_id=info.snapshot_id))
    assert scene.entries() == []

    async def chunks(count: int) -> AsyncIterator[Any]:
        for chunk in context.written[:count]:
            yield chunk

    for count, reason in ((0, "INVALID_REQUEST"), (2, "DIGEST_MISMATCH")):
        assert (await scene.refused("ImportSnapshot", chunks(count))).reason == reason
        assert scene.entries() == []
    told = await scene.call("ImportSnapshot", chunks(len(context.written)))
    assert told == info
    assert (await scene.restore(info.snapshot_id)).tokens == TOKENS


@pytest.mark.parametrize("came", [0, 1, 2])
async def test_an_import_whose_sender_stalls_is_given_up_and_leaves_nothing(
    scene: Scene, came: int
) -> None:
    info = await scene.snapshot()
    context = Call()
    request = pb.ExportSnapshotRequest(snapshot_id=info.snapshot_id)
    await scene.call("ExportSnapshot", request, context)
    await scene.call("DeleteSnapshot", pb.DeleteSnapshotRequest(snapshot_id=info.snapshot_id))
    config = replace(scene.service.services.config, stall_limit_s=0.1)
    scene.service.services = replace(scene.service.services, config=config)

    async def chunks() -> AsyncIterator[Any]:
        for chunk in context.written[:came]:
            yield chunk
        await asyncio.Event().wait()

    error = await scene.refused("ImportSnapshot", chunks())
    assert error.reason == "INVALID_REQUEST"
    assert "nothing for 0.1 s" in error.message
    assert scene.entries() == []
    assert scene.store.quota.used_bytes == 0
    scene.store.quota.limit_bytes = 10_000
    with scene.store.quota.room(10_000, "all of it: nothing is promised any more"):
        pass


async def test_what_another_version_saved_is_not_taken_in(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = await scene.snapshot()
    context = Call()
    request = pb.ExportSnapshotRequest(snapshot_id=info.snapshot_id)
    await scene.call("ExportSnapshot", request, context)

    async def chunks() -> AsyncIterator[Any]:
        for chunk in context.written:
            yield chunk

    hello = msgspec.structs.replace(scene.slots.workers["llama"].hello, backend_version="2")
    monkeypatch.setattr(Worker, "hello", hello)
    error = await scene.refused("ImportSnapshot", chunks())
    assert (error.reason, error.metadata["field"]) == ("MANIFEST_MISMATCH", "backend_version")
    scene.service.services.slots.pop("llama")
    assert (await scene.refused("ImportSnapshot", chunks())).reason == "BACKEND_MISMATCH"
    assert scene.entries() == [info.snapshot_id]


async def test_a_snapshot_that_is_not_there_can_not_be_deleted(scene: Scene) -> None:
    request = pb.DeleteSnapshotRequest(snapshot_id="snap-0123456789abcdef")
    assert (await scene.refused("DeleteSnapshot", request)).reason == "SNAPSHOT_NOT_FOUND"
