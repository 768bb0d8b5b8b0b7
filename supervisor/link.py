"""The supervisor's one socket to its workers, and the operations that run over it.

Owns the ROUTER socket, the check of envelopes, and each operation's stream, credit and single
terminal. Knows nothing of processes, restarts, sessions or gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from modeld.shared.codec import (
    CodecError,
    decode_any_payload,
    decode_envelope,
    decode_payload,
    encode_envelope,
    encode_payload,
)
from modeld.shared.errors import (
    GenerationStale,
    InvalidRequest,
    ModeldError,
    SessionFatal,
    WorkerUnavailable,
)
from modeld.shared.errors import from_wire as error_from_wire
from modeld.shared.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Envelope,
    Heartbeat,
    Hello,
    Kind,
    Payload,
    Shutdown,
    Welcome,
    WireError,
)
from modeld.supervisor.durable import private_folder
from modeld.supervisor.lifecycle import (
    OperationEvent,
    OperationInstruction,
    OperationMachine,
    OperationState,
)

log = logging.getLogger(__name__)

_FRAMES_A_TURN = 256  # of the loop: beyond it others get their turn first
_SOCKET_PATH_LIMIT = 107  # bytes, of sockaddr_un without its closing zero

ErrorFactory = Callable[[], ModeldError]


class Listener(Protocol):
    """Who is told what one worker says beside operations."""

    def on_hello(self, hello: Hello) -> None: ...

    def on_heartbeat(self, beat: Heartbeat) -> None: ...

    def on_protocol_error(self, text: str) -> None:
        """The worker can't be trusted any more; the link drops whatever follows."""


@dataclass
class LinkCounters:
    """Frames dropped, by why."""

    unknown: int = 0  # from an epoch that isn't admitted
    stale: int = 0  # of another generation than its operation's
    late: int = 0  # of an operation that has ended


class Operation:
    """One request to a worker: its DATA stream, and exactly one terminal.

    Not for several readers: ``next`` has one caller at a time.
    """

    __slots__ = (
        "_data", "_ended", "_error", "_machine", "_on_end", "_peer", "_result", "_seq", "_waiter",
        "cancelled_s", "generation", "kind", "op_id",
    )  # fmt: skip

    def __init__(
        self,
        peer: Peer,
        op_id: int,
        generation: int,
        kind: str,
        on_end: Callable[[Operation], None] | None,
    ) -> None:
        self.op_id = op_id
        self.generation = generation
        self.kind = kind  # the request's type name
        self.cancelled_s = 0.0  # when the cancel was sent, of time.monotonic; 0: it wasn't
        self._peer = peer
        self._machine = OperationMachine()
        self._seq = 0
        self._data: deque[msgspec.Raw] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] = peer.link.loop.create_future()
        self._result: Payload | None = None
        self._error: ModeldError | None = None
        self._on_end = on_end

    @property
    def state(self) -> OperationState:
        return self._machine.state

    @property
    def ended(self) -> bool:
        """Whether the terminal is there; DATA may still wait to be read."""
        return self._machine.ended

    @property
    def begun(self) -> bool:
        """Whether the worker is known to have begun it, since it has sent something of it."""
        return self._seq > 0

    async def next(self) -> Payload | None:
        """The next DATA payload, in order; None once all are read and the terminal is there."""
        while not self._data:
            if self._machine.ended:
                return None
            if self._waiter is not None:
                raise RuntimeError(f"operation {self.op_id} is being read by two callers")
            self._waiter = self._peer.link.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        raw = self._data.popleft()
        try:
            return decode_any_payload(raw)
        except CodecError as error:
            self._peer.violated(f"operation {self.op_id}: {error}")
            raise _protocol_error(str(error)) from None

    async def result(self) -> Payload:
        """The terminal payload; raises its ModeldError instead if it was one.

        Doesn't wait for the DATA to be read. Cancelling the waiter cancels nothing in the worker.
        """
        if not self._machine.ended:
            await asyncio.shield(self._ended)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Ask the worker to stop. The terminal still comes, a normal result perhaps. Idempotent."""
        for instruction in self._machine.handle(OperationEvent.CANCEL_ASKED):
            if instruction is OperationInstruction.SEND_CANCEL:
                self.cancelled_s = time.monotonic()
                self._peer.control(Kind.CANCEL, Cancel(), self)

    def grant(self, chunks: int) -> None:
        """Allow ``chunks`` more chunks. A frame of its own each: grant several at once."""
        if chunks > 0 and not self._machine.ended:
            self._peer.control(Kind.CREDIT, Credit(chunks=chunks), self)

    def fail(self, error: ModeldError) -> None:
        """End it here, whatever the worker does; nothing happens if it has ended."""
        self._end(OperationEvent.GIVEN_UP, error=error)

    # --- called by the link ----------------------------------------------------------------

    def sent(self) -> None:
        self._machine.handle(OperationEvent.SENT)

    def received(self, envelope: Envelope) -> None:
        if envelope.seq != self._seq:
            self._peer.violated(
                f"operation {self.op_id} ({self.kind}): frame {envelope.seq} where "
                f"{self._seq} was due"
            )
            return
        self._seq += 1
        if envelope.kind == Kind.DATA:
            self._data.append(envelope.payload)
            waiter = self._waiter
            if waiter is not None and not waiter.done():
                waiter.set_result(None)
            return
        try:
            if envelope.kind == Kind.DONE:
                result = decode_any_payload(envelope.payload)
                self._end(OperationEvent.FINISHED, result=result)
            else:
                wire = decode_payload(envelope.payload, WireError)
                error = error_from_wire(
                    wire.reason, wire.message, wire.metadata, wire.retry_after_s
                )
                self._end(OperationEvent.FAILED, error=error)
        except CodecError as error:
            self._peer.violated(f"operation {self.op_id}: {error}")

    def _end(
        self,
        event: OperationEvent,
        *,
        result: Payload | None = None,
        error: ModeldError | None = None,
    ) -> None:
        if OperationInstruction.END not in self._machine.handle(event):
            return
        self._result, self._error = result, error
        self._peer.operations.pop(self.op_id, None)
        if not self._ended.done():
            self._ended.set_result(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._on_end is not None:
            self._on_end(self)


def _protocol_error(text: str) -> SessionFatal:
    return SessionFatal(
        f"The worker broke the protocol ({text}) and is being replaced; open a new session.",
        metadata={"cause": "protocol"},
    )


class Peer:
    """One admitted worker epoch."""

    __slots__ = ("epoch", "generation", "heard_s", "link", "listener", "operations", "trusted")

    def __init__(self, link: Link, epoch: bytes, listener: Listener) -> None:
        self.link = link
        self.epoch = epoch
        self.listener = listener
        self.operations: dict[int, Operation] = {}
        self.generation = 0  # the newest sent
        self.heard_s = time.monotonic()
        self.trusted = True

    def violated(self, text: str) -> None:
        if self.trusted:
            self.trusted = False
            log.error("worker broke the protocol: %s", text)
            self.listener.on_protocol_error(text)

    def control(self, kind: Kind, payload: Payload, operation: Operation | None = None) -> None:
        """Send a frame that opens no operation. What can't be sent finds the worker dead."""
        op_id, generation = (operation.op_id, operation.generation) if operation else (0, 0)
        try:
            self.link.send(self.epoch, kind, generation, op_id, payload)
        except zmq.Again:
            self.violated("it doesn't read its socket")
        except zmq.ZMQError as error:
            # Its end is gone: the exit status, on its way, says more than this does.
            log.debug("%s for operation %d not sent: %s", kind.name, op_id, error)


class Link:
    """The ROUTER socket. All methods run on the loop's thread."""

    def __init__(
        self, owner_id: str, heartbeat_interval_s: float, folder: Path | None = None
    ) -> None:
        """``folder``: where the socket goes if its path is short enough; else a temporary one."""
        self._wanted = folder
        self.owner_id = owner_id
        self.heartbeat_interval_s = heartbeat_interval_s
        self.counters = LinkCounters()
        self.endpoint = ""
        self.loop: asyncio.AbstractEventLoop
        self._peers: dict[bytes, Peer] = {}
        self._last_op = 0
        self._context: zmq.SyncContext | None = None
        self._socket: zmq.SyncSocket
        self._fd = -1
        self._folder: Path | None = None
        self._drain_due = False

    async def start(self) -> str:
        """Bind in a private folder; returns the endpoint that workers connect to."""
        self.loop = asyncio.get_running_loop()
        self._folder = _socket_folder(self._wanted)
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        # Else what goes to a dead peer, or past the high-water mark, vanishes without a word.
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket = socket
        self.endpoint = f"ipc://{self._folder / 'link'}"
        socket.bind(self.endpoint)
        self._fd = int(socket.getsockopt(zmq.FD))
        self.loop.add_reader(self._fd, self._drain)
        return self.endpoint

    async def close(self) -> None:
        """Idempotent. Operations that still run are failed."""
        if self._context is None:
            return
        for epoch in list(self._peers):
            self.forget(epoch)
        self.loop.remove_reader(self._fd)
        self._context.destroy(linger=0)
        self._context = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def admit(self, epoch: bytes, listener: Listener) -> Peer:
        """Listen to this epoch from now on."""
        peer = Peer(self, epoch, listener)
        self._peers[epoch] = peer
        return peer

    def forget(self, epoch: bytes, error: ErrorFactory | None = None) -> None:
        """Hear nothing more of it, and end its operations with an error each."""
        peer = self._peers.pop(epoch, None)
        if peer is None:
            return
        peer.trusted = False
        for operation in list(peer.operations.values()):
            operation.fail(error() if error is not None else _lost())

    def start_op(
        self,
        epoch: bytes,
        generation: int,
        payload: Payload,
        credit: int = 0,
        on_end: Callable[[Operation], None] | None = None,
    ) -> Operation:
        """Send a request, and then ``credit`` chunks of credit. Sent once, never again.

        Raises WorkerUnavailable if nothing was sent, InvalidRequest if it is too large to be,
        GenerationStale if a newer generation's request went to this worker before. ``on_end`` is
        called once, on the loop.
        """
        peer = self._peers.get(epoch)
        if peer is None or not peer.trusted:
            raise _not_sent("it is gone")
        if generation < peer.generation:
            raise GenerationStale(
                f"Generation {generation} is over, {peer.generation} is current; open again.",
                metadata={"generation": generation, "current_generation": peer.generation},
            )
        self._last_op += 1
        operation = Operation(peer, self._last_op, generation, type(payload).__name__, on_end)
        try:
            self.send(epoch, Kind.OP, generation, operation.op_id, payload)
        except CodecError as error:
            raise InvalidRequest.of(
                "request",
                str(error),
                f"what fits a frame of {MAX_FRAME_BYTES} bytes",
                "Send less text, or fewer or smaller images, at once. Nothing was sent.",
            ) from None
        except zmq.ZMQError as error:
            raise _not_sent(str(error)) from None
        peer.generation = generation
        peer.operations[operation.op_id] = operation
        operation.sent()
        operation.grant(credit)
        return operation

    def welcome(self, epoch: bytes) -> None:
        payload = Welcome(
            owner_instance_id=self.owner_id, heartbeat_interval_s=self.heartbeat_interval_s
        )
        self._peers[epoch].control(Kind.WELCOME, payload)

    def shutdown(self, epoch: bytes) -> None:
        """Ask the worker to finish what it was sent and exit."""
        peer = self._peers.get(epoch)
        if peer is not None:
            peer.control(Kind.SHUTDOWN, Shutdown())

    def send(self, epoch: bytes, kind: Kind, generation: int, op_id: int, payload: Payload) -> None:
        """Raises zmq.Again (the worker doesn't read) or another ZMQError (it isn't connected)."""
        envelope = Envelope(
            PROTOCOL_VERSION, kind, epoch, generation, op_id, 0, encode_payload(payload)
        )
        self._socket.send_multipart([epoch, encode_envelope(envelope)], zmq.NOBLOCK)
        # The descriptor signals edges, and a send may have swallowed one that told of input.
        if not self._drain_due and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._drain_due = True
            self.loop.call_soon(self._drain)

    def poll(self) -> None:
        """Take in what has arrived, now; for callers about to judge a silence or a death."""
        self._drain()

    def _drain(self) -> None:
        self._drain_due = False
        if self._context is None:
            return
        socket = self._socket
        for _ in range(_FRAMES_A_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:  # a wake-up without input; it looked, so the edge is armed
                return
            self._received(frames)
            # Looking is what arms the next edge, and costs less than a recv that fails.
            if self._context is None or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
        self._drain_due = True
        self.loop.call_soon(self._drain)

    def _received(self, frames: list[bytes]) -> None:
        peer = self._peers.get(frames[0])
        if peer is None or not peer.trusted:
            self.counters.unknown += 1
            return
        if len(frames) != 2:
            peer.violated(f"{len(frames) - 1} frames where one was due")
            return
        try:
            envelope = decode_envelope(frames[1])
        except CodecError as error:
            peer.violated(str(error))
            return
        if envelope.epoch != peer.epoch or envelope.version != PROTOCOL_VERSION:
            peer.violated(
                f"protocol version {envelope.version} (this daemon speaks {PROTOCOL_VERSION}), "
                f"epoch {'right' if envelope.epoch == peer.epoch else 'wrong'}"
            )
            return
        peer.heard_s = time.monotonic()
        if Kind.DATA <= envelope.kind <= Kind.ERROR:
            operation = peer.operations.get(envelope.op_id)
            if operation is None:
                self.counters.late += 1
            elif operation.generation != envelope.generation:
                self.counters.stale += 1
            else:
                operation.received(envelope)
            return
        try:
            if envelope.kind == Kind.HEARTBEAT:
                peer.listener.on_heartbeat(decode_payload(envelope.payload, Heartbeat))
            elif envelope.kind == Kind.HELLO:
                peer.listener.on_hello(decode_payload(envelope.payload, Hello))
            else:
                peer.violated(f"a frame of kind {envelope.kind} from a worker")
        except CodecError as error:
            peer.violated(str(error))


def _lost() -> SessionFatal:
    return SessionFatal(
        "The worker left while this call ran; open a new session.", metadata={"cause": "lost"}
    )


def _not_sent(why: str) -> WorkerUnavailable:
    return WorkerUnavailable(
        f"Nothing was sent to the worker: {why}. Try again.",
        metadata={"state": "unreachable"},
        retry_after_s=0.5,
    )


def _socket_folder(wanted: Path | None) -> Path:
    """A 0700 folder whose path leaves room for the socket's; raises OSError if none will do.

    A folder of the owner's own is used again after a crash; a temporary one would stay behind.
    """
    if wanted is not None and len(os.fsencode(wanted)) + 5 <= _SOCKET_PATH_LIMIT:
        return private_folder(wanted)
    candidates = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
    for base in candidates:
        # mkdtemp adds "modeld-" and 8 characters, the socket "/link".
        if not base or len(os.fsencode(base)) + 1 + 15 + 5 > _SOCKET_PATH_LIMIT:
            continue
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="modeld-", dir=base))
    raise OSError("no folder with a short enough path for a socket; set XDG_RUNTIME_DIR to one")
