"""Calls on what a session holds, as values: snapshots, restore, fork, admit. Nothing is sent here.

Both clients send these; what a call leaves behind in a session's core is done where its answer is
read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from modeld.client.calls import Call, Deadlines, answer, call, close_session
from modeld.client.convert import from_proto, identity_to_proto
from modeld.client.sendable import put, sendable
from modeld.client.session_core import SessionCore
from modeld.client.values import Closed, Opened, SavedSessionList
from modeld.client.values_residency import (
    Admitted,
    Forked,
    Restored,
    SnapshotChunk,
    SnapshotInfo,
    SnapshotList,
)
from modeld.shared.errors import InvalidRequest
from modeld.v1 import session_pb2

SERVICE = "SessionService"


def _asserted(core: SessionCore, cls: type[Any], **fields: Any) -> Any:
    """A request of this session, with the identity that it asserts."""
    identity = identity_to_proto(core.identity)
    return cls(session=core.wire_handle(), identity=identity, **fields)


# --- of a session --------------------------------------------------------------------------------


@sendable
def snapshot(core: SessionCore, label: str, timeout_s: float | None) -> Call[SnapshotInfo]:
    request = _asserted(core, session_pb2.SnapshotRequest, label=label)
    return call(SERVICE, "Snapshot", request, answer(SnapshotInfo), timeout_s)


@sendable
def restore(core: SessionCore, snapshot_id: str, timeout_s: float | None) -> Call[Restored]:
    request = _asserted(core, session_pb2.RestoreRequest, snapshot_id=snapshot_id)

    def parse(response: Any) -> Restored:
        restored = from_proto(Restored, response)
        core.turns = set(restored.generated_turn_ids)
        core.prefix = core.suffix = None  # the prompt is the snapshot's now
        core.saved_turn = core.answered = ""
        return restored

    return call(SERVICE, "Restore", request, parse, timeout_s)


@sendable
def fork(
    core: SessionCore, session_key: str, durable: bool, no_wait: bool, timeout_s: float | None
) -> Call[Forked]:
    request = _asserted(
        core,
        session_pb2.ForkRequest,
        session_key=session_key,
        durable=durable,
        no_wait=no_wait,
    )
    return call(SERVICE, "Fork", request, answer(Forked), timeout_s)


def forked_core(core: SessionCore, forked: Forked, session_key: str, durable: bool) -> SessionCore:
    """The new session's core."""
    branch = SessionCore(
        options=dataclasses.replace(core.options, session_key=session_key, durable=durable),
        deadlines=core.deadlines,
        opened=Opened(
            session=forked.session,
            identity=forked.identity,
            resolution=forked.resolution,
            capabilities=forked.capabilities,
            attached=False,
            loaded=False,
            load_seconds=0.0,
            resident=forked.status.resident,
            detail="",
            queue_seconds=forked.status.queue_seconds,
        ),
        recover=core.recover,
        on_recovery=core.on_recovery,
        prefix=core.prefix,
        suffix=core.suffix,
        answered=core.answered,
    )
    branch.turns, branch.saved = set(forked.generated_turn_ids), forked.saved
    if forked.saved is not None and forked.saved.ok and forked.generated_turn_ids:
        branch.saved_turn = forked.generated_turn_ids[-1]
    return branch


@sendable
def admit(
    core: SessionCore,
    *,
    segment: int | None,
    range: tuple[int, int] | None,
    query: str | None,
    budget: int,
    timeout_s: float | None,
) -> Call[Admitted]:
    given = [
        name
        for name, value in (("segment", segment), ("range", range), ("query", query))
        if value is not None
    ]
    if len(given) != 1:
        raise InvalidRequest.of("what", " and ".join(given), "one of segment, range and query")
    request = _asserted(core, session_pb2.AdmitRequest)
    put(request, "budget_tokens", budget)
    if segment is not None:
        put(request, "segment_index", segment)
    if query is not None:
        put(request, "query", query)
    if range is not None:
        put(request.range, "begin", range[0])
        put(request.range, "end", range[1])
        request.range.SetInParent()

    def parse(response: Any) -> Admitted:
        core.saved_turn = ""  # what was saved attends to other tokens
        return from_proto(Admitted, response)

    return call(SERVICE, "Admit", request, parse, timeout_s)


# --- kept snapshots ------------------------------------------------------------------------------


@sendable
def list_snapshots(model_digest: str, deadlines: Deadlines) -> Call[SnapshotList]:
    request = session_pb2.ListSnapshotsRequest(model_digest=model_digest)
    return call(SERVICE, "ListSnapshots", request, answer(SnapshotList), deadlines.quick_s)


@sendable
def delete_snapshot(snapshot_id: str, deadlines: Deadlines) -> Call[None]:
    request = session_pb2.DeleteSnapshotRequest(snapshot_id=snapshot_id)
    return call(SERVICE, "DeleteSnapshot", request, lambda _answer: None, deadlines.quick_s)


def list_saved(deadlines: Deadlines) -> Call[SavedSessionList]:
    request = session_pb2.ListSavedSessionsRequest()
    return call(SERVICE, "ListSavedSessions", request, answer(SavedSessionList), deadlines.quick_s)


@sendable
def discard_saved(session_key: str, deadlines: Deadlines) -> Call[Closed]:
    return close_session(None, discard=True, session_key=session_key, deadlines=deadlines)


@sendable
def export_snapshot(snapshot_id: str, timeout_s: float | None) -> Call[SnapshotChunk]:
    request = session_pb2.ExportSnapshotRequest(snapshot_id=snapshot_id)
    return call(SERVICE, "ExportSnapshot", request, answer(SnapshotChunk), timeout_s)


def import_snapshot(timeout_s: float | None) -> Call[SnapshotInfo]:
    """The chunks are sent beside it; the request of this call is none of them."""
    request = session_pb2.SnapshotChunk()
    return call(SERVICE, "ImportSnapshot", request, answer(SnapshotInfo), timeout_s)
