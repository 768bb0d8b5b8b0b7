from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from modeld.shared.codec import decode_any_payload, decode_envelope, encode_envelope, encode_payload
from modeld.shared.errors import (
    ContextOverflow,
    GenerationStale,
    ModelBusy,
    SessionFatal,
    WorkerUnavailable,
)
from modeld.shared.messages import (
    PROTOCOL_VERSION,
    Cancel,
    ChunkOut,
    Credit,
    DetokenizeResult,
    Empty,
    Envelope,
    Heartbeat,
    Hello,
    Kind,
    Payload,
    Progress,
    UnloadOp,
    WireError,
)
from modeld.supervisor.lifecycle import OperationState
from modeld.supervisor.link import Link, Operation
from tests.support.keeping import until

EPOCH = b"\x01" * 16


class Heard:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.hellos: list[Hello] = []
        self.beats: list[Heartbeat] = []
        self.violations: list[str] = []

    def on_hello(self, hello: Hello) -> None:
        self.hellos.append(hello)

    def on_heartbeat(self, beat: Heartbeat) -> None:
        self.beats.append(beat)

    def on_protocol_error(self, text: str) -> None:
        self.violations.append(text)


class FakeWorker:
    """The other end of the link, driven frame by frame."""

    def __init__(self, endpoint: str, epoch: bytes = EPOCH) -> None:
        self.epoch = epoch
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, epoch)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # as a worker has it; a full queue would block
        self._socket.connect(endpoint)

    def send(
        self,
        kind: Kind,
        payload: Payload,
        op: Operation | None = None,
        seq: int = 0,
        generation: int | None = None,
        version: int = PROTOCOL_VERSION,
    ) -> None:
        op_id, own = (op.op_id, op.generation) if op else (0, 0)
        at = own if generation is None else generation
        self._socket.send(
            encode_envelope(
                Envelope(version, kind, self.epoch, at, op_id, seq, encode_payload(payload))
            )
        )

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    async def receive(self) -> tuple[Kind, Payload]:
        await until(lambda: self._socket.poll(0))
        envelope = decode_envelope(self._socket.recv())
        return Kind(envelope.kind), decode_any_payload(envelope.payload)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Rig:
    def __init__(self, link: Link, worker: FakeWorker, heard: Heard) -> None:
        self.link = link
        self.worker = worker
        self.heard = heard

    def call(self, generation: int = 1, credit: int = 0) -> Operation:
        return self.link.start_op(EPOCH, generation, UnloadOp(), credit)

    async def settle(self) -> None:
        """Return once everything that the worker sent has been taken in."""
        seen = len(self.heard.beats)
        self.worker.send(Kind.HEARTBEAT, Heartbeat(progress=0, busy_op=0))
        await until(lambda: len(self.heard.beats) > seen or self.heard.violations)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    link = Link("owner", 0.25)
    endpoint = await link.start()
    heard = Heard()
    link.admit(EPOCH, heard)
    worker = FakeWorker(endpoint)
    rig = Rig(link, worker, heard)
    await rig.settle()  # connected
    yield rig
    worker.close()
    await link.close()


def chunk(text: str) -> ChunkOut:
    return ChunkOut(text=text, tokens=1)


async def texts(operation: Operation) -> list[str]:
    out = []
    while (payload := await operation.next()) is not None:
        assert isinstance(payload, ChunkOut)
        out.append(payload.text)
    return out


async def test_the_socket_lies_in_a_private_folder_that_goes_with_the_link() -> None:
    link = Link("owner", 0.25)
    folder = Path((await link.start()).removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(os.fsencode(link.endpoint.removeprefix("ipc://"))) < 108
    await link.close()
    assert not folder.exists()


async def test_data_comes_in_order_and_then_the_result(rig: Rig) -> None:
    operation = rig.call()
    for seq, text in enumerate("abc"):
        rig.worker.send(Kind.DATA, chunk(text), operation, seq)
    rig.worker.send(Kind.DONE, Empty(), operation, 3)
    assert await texts(operation) == ["a", "b", "c"]
    assert await operation.result() == Empty()
    assert operation.state is OperationState.DONE


async def test_a_typed_error_arrives_as_its_class_with_its_numbers(rig: Rig) -> None:
    operation = rig.call()
    wire = WireError(reason="CONTEXT_OVERFLOW", message="too long", metadata={"must_drop": "7"})
    rig.worker.send(Kind.ERROR, wire, operation)
    assert await operation.next() is None
    with pytest.raises(ContextOverflow, match="too long") as caught:
        await operation.result()
    assert caught.value.metadata == {"must_drop": "7"}


async def test_credit_follows_the_request_and_grants_add_to_it(rig: Rig) -> None:
    operation = rig.call(credit=4)
    operation.grant(2)
    assert await rig.worker.receive() == (Kind.OP, UnloadOp())
    assert await rig.worker.receive() == (Kind.CREDIT, Credit(chunks=4))
    assert await rig.worker.receive() == (Kind.CREDIT, Credit(chunks=2))


async def test_cancelling_twice_sends_one_frame_and_the_result_still_comes(rig: Rig) -> None:
    operation = rig.call()
    operation.cancel()
    operation.cancel()
    rig.worker.send(Kind.DONE, Empty(), operation)
    assert await operation.result() == Empty()
    assert await rig.worker.receive() == (Kind.OP, UnloadOp())
    assert await rig.worker.receive() == (Kind.CANCEL, Cancel())
    operation.cancel()  # ended: nothing to send


async def test_a_gap_in_the_sequence_is_a_protocol_error(rig: Rig) -> None:
    operation = rig.call()
    rig.worker.send(Kind.DATA, chunk("a"), operation, 0)
    rig.worker.send(Kind.DATA, chunk("c"), operation, 2)
    await rig.settle()
    assert len(rig.heard.violations) == 1
    assert "frame 2 where 1 was due" in rig.heard.violations[0]
    with pytest.raises(WorkerUnavailable):
        rig.call()


async def test_frames_after_the_terminal_are_dropped_and_counted(rig: Rig) -> None:
    operation = rig.call()
    operation.fail(ModelBusy("enough"))
    rig.worker.send(Kind.DATA, chunk("a"), operation, 0)
    rig.worker.send(Kind.DONE, Empty(), operation, 1)
    await rig.settle()
    assert rig.link.counters.late == 2
    assert operation.state is OperationState.LOST
    with pytest.raises(ModelBusy):
        await operation.result()


async def test_frames_of_another_generation_are_dropped_and_counted(rig: Rig) -> None:
    operation = rig.call(generation=5)
    rig.worker.send(Kind.DONE, Empty(), operation, 0, generation=4)
    await rig.settle()
    assert rig.link.counters.stale == 1
    assert operation.state is OperationState.RUNNING


async def test_an_older_generation_is_refused_before_anything_is_sent(rig: Rig) -> None:
    rig.call(generation=5)
    with pytest.raises(GenerationStale) as caught:
        rig.call(generation=4)
    assert caught.value.metadata["current_generation"] == "5"


async def test_an_epoch_that_was_never_admitted_is_not_heard(rig: Rig) -> None:
    stranger = FakeWorker(rig.link.endpoint, b"\x02" * 16)
    stranger.send(Kind.HEARTBEAT, Heartbeat(progress=9, busy_op=0))
    await until(lambda: rig.link.counters.unknown)
    stranger.close()
    assert all(beat.progress == 0 for beat in rig.heard.beats)


@pytest.mark.parametrize("frames", [(b"not msgpack",), (b"a", b"b"), (b"",)])
async def test_a_malformed_frame_is_a_protocol_error(rig: Rig, frames: tuple[bytes]) -> None:
    rig.worker.send_raw(*frames)
    await rig.settle()
    assert len(rig.heard.violations) == 1


async def test_another_protocol_version_is_named_in_the_error(rig: Rig) -> None:
    rig.worker.send(Kind.HEARTBEAT, Heartbeat(progress=0, busy_op=0), version=99)
    await rig.settle()
    assert "99" in rig.heard.violations[0]


async def test_forgetting_a_worker_ends_each_of_its_operations_once(rig: Rig) -> None:
    ended: list[int] = []
    operations = [
        rig.link.start_op(EPOCH, 1, UnloadOp(), on_end=lambda op: ended.append(op.op_id))
        for _ in range(3)
    ]
    waiting = asyncio.create_task(operations[0].next())
    await asyncio.sleep(0)
    rig.link.forget(EPOCH, lambda: SessionFatal("gone", metadata={"cause": "native crash"}))
    assert await waiting is None
    for operation in operations:
        with pytest.raises(SessionFatal):
            await operation.result()
    assert ended == [operation.op_id for operation in operations]


async def test_data_that_arrived_before_a_loss_is_still_readable(rig: Rig) -> None:
    operation = rig.call()
    rig.worker.send(Kind.DATA, chunk("a"), operation, 0)
    await rig.settle()
    rig.link.forget(EPOCH)
    assert await texts(operation) == ["a"]


async def test_sending_to_a_worker_that_left_says_that_nothing_was_sent() -> None:
    link = Link("owner", 0.25)
    await link.start()
    link.admit(EPOCH, Heard())
    with pytest.raises(WorkerUnavailable, match="Nothing was sent"):
        link.start_op(EPOCH, 1, UnloadOp())
    await link.close()


async def test_frames_of_many_megabytes_pass(rig: Rig) -> None:
    operation = rig.call()
    raw = os.urandom(1024) * 8192
    rig.worker.send(Kind.DONE, DetokenizeResult(raw=raw), operation)
    assert await operation.result() == DetokenizeResult(raw=raw)


async def test_a_burst_larger_than_one_turn_of_the_loop_is_read_to_its_end(rig: Rig) -> None:
    operation = rig.call()
    for seq in range(2000):
        rig.worker.send(Kind.DATA, Progress(stage="x", fraction=0.0), operation, seq)
    rig.worker.send(Kind.DONE, Empty(), operation, 2000)
    count = 0
    while await operation.next() is not None:
        count += 1
    assert count == 2000


async def test_no_input_is_forgotten_while_both_sides_send_at_once(rig: Rig) -> None:
    # The descriptor signals edges; sends between receives must not swallow one.
    for round_number in range(300):
        operation = rig.call(credit=1)
        rig.worker.send(Kind.DATA, chunk("a"), operation, 0)
        operation.grant(1)
        rig.worker.send(Kind.DONE, Empty(), operation, 1)
        operation.cancel()
        assert await asyncio.wait_for(operation.result(), 30) == Empty(), round_number


async def test_a_cancelled_reader_leaves_the_stream_readable(rig: Rig) -> None:
    operation = rig.call()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(operation.next(), 0.01)
    rig.worker.send(Kind.DATA, chunk("a"), operation, 0)
    rig.worker.send(Kind.DONE, Empty(), operation, 1)
    assert await texts(operation) == ["a"]
