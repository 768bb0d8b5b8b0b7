from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import pytest

from modeld.shared.codec import encode_payload
from modeld.shared.errors import ModelBusy
from modeld.shared.messages import (
    DetokenizeOp,
    Empty,
    Hello,
    Kind,
    Payload,
    Progress,
    UnloadOp,
    WireError,
)
from modeld.workers.executor import OpContext, Pulse, RunningOp, Tasks, run

Frame = tuple[Kind, int, int, int, Payload]


class Rig:
    """An executor whose handler is a function, and the frames that it sent."""

    def __init__(self, handle: Callable[[Payload, OpContext], Payload]) -> None:
        self.frames: list[Frame] = []
        self.flushed = 0
        self.pulse = Pulse()
        self.tasks: Tasks = queue.SimpleQueue()
        self._handle = handle

    def hello(self) -> Hello:
        return Hello(backend="b", backend_version="1", build_digest="", pid=1)

    def handle(self, request: Payload, context: OpContext) -> Payload:
        return self._handle(request, context)

    def close(self) -> None:
        pass

    def operation(self, op_id: int = 1, payload: Payload | None = None) -> RunningOp:
        return RunningOp(op_id, 7, encode_payload(payload or UnloadOp()), self, self.pulse)

    def send(self, kind: Kind, generation: int, op_id: int, seq: int, payload: Payload) -> None:
        self.frames.append((kind, generation, op_id, seq, payload))

    def flush(self) -> None:
        self.flushed = len(self.frames)

    def ended(self, operation: RunningOp) -> None:
        pass

    def run(self, *operations: RunningOp) -> None:
        for operation in operations:
            self.tasks.put(operation)
        self.tasks.put(None)
        run(self, self.tasks, self.pulse, self)
        assert self.flushed == len(self.frames)


def test_frames_are_numbered_from_zero_and_end_with_one_terminal() -> None:
    def handle(request: Payload, context: OpContext) -> Payload:
        context.emit(Progress(stage="x", fraction=0.5))
        return Empty()

    rig = Rig(handle)
    rig.run(rig.operation(1), rig.operation(2))
    assert [frame[:4] for frame in rig.frames] == [
        (Kind.DATA, 7, 1, 0),
        (Kind.DONE, 7, 1, 1),
        (Kind.DATA, 7, 2, 0),
        (Kind.DONE, 7, 2, 1),
    ]


def test_a_typed_error_becomes_an_error_frame_with_its_numbers() -> None:
    def handle(request: Payload, context: OpContext) -> Payload:
        raise ModelBusy("held", metadata={"age": 3}, retry_after_s=0.5)

    rig = Rig(handle)
    rig.run(rig.operation())
    wire = WireError(reason="MODEL_BUSY", message="held", metadata={"age": "3"}, retry_after_s=0.5)
    assert rig.frames[-1] == (Kind.ERROR, 7, 1, 0, wire)


def test_an_unplanned_exception_is_fatal_for_the_session_and_keeps_its_words_to_itself() -> None:
    def handle(request: Payload, context: OpContext) -> Payload:
        raise KeyError("a prompt's text")

    rig = Rig(handle)
    rig.run(rig.operation(1), rig.operation(2))  # the loop goes on
    kind, _, _, _, payload = rig.frames[0]
    assert kind is Kind.ERROR
    assert isinstance(payload, WireError)
    assert (payload.reason, payload.metadata) == ("SESSION_FATAL", {"cause": "internal"})
    assert "prompt" not in payload.message
    assert len(rig.frames) == 2


def test_a_cancel_from_before_the_start_is_seen_by_the_handler() -> None:
    seen: list[tuple[bool, bool]] = []

    def handle(request: Payload, context: OpContext) -> Payload:
        seen.append((context.cancelled(), context.wait_credit()))
        return Empty()

    rig = Rig(handle)
    operation = rig.operation()
    operation.grant(1)
    operation.cancel()
    rig.run(operation)
    assert seen == [(True, False)]


@pytest.mark.parametrize("end", ["grant", "cancel"])
def test_waiting_for_credit_ends_with_a_grant_or_a_cancel(end: str) -> None:
    got: list[bool] = []
    waiting = threading.Event()

    def handle(request: Payload, context: OpContext) -> Payload:
        assert context.wait_credit()
        waiting.set()
        got.append(context.wait_credit())
        return Empty()

    rig = Rig(handle)
    operation = rig.operation()
    operation.grant(1)

    def other_side() -> None:
        waiting.wait()
        operation.grant(1) if end == "grant" else operation.cancel()

    thread = threading.Thread(target=other_side)
    thread.start()
    rig.run(operation)
    thread.join()
    assert got == [end == "grant"]


def test_the_request_arrives_as_it_was_sent() -> None:
    got: list[Payload] = []

    def handle(request: Payload, context: OpContext) -> Payload:
        got.append(request)
        return Empty()

    rig = Rig(handle)
    rig.run(rig.operation(payload=DetokenizeOp(ids=[1, 2])))
    assert got == [DetokenizeOp(ids=[1, 2])]
