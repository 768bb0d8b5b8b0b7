"""The worker's I/O thread: owns the DEALER socket, heartbeats, cancel flags and credit.

It also watches the end of the pipe that the supervisor holds: when that closes, the supervisor is
gone, and the process ends at once whatever the engine does. Knows nothing of engines or sessions.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass

import psutil
import zmq

from modeld.shared.codec import (
    CodecError,
    decode_envelope,
    decode_payload,
    encode_envelope,
    encode_payload,
)
from modeld.shared.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Credit,
    Envelope,
    Heartbeat,
    Kind,
    Payload,
    Welcome,
)
from modeld.workers.executor import Pulse, RunningOp, Tasks

log = logging.getLogger(__name__)

EXIT_ORPHANED = 70  # the supervisor is gone
EXIT_BROKEN = 71  # this thread failed, so that the worker is deaf
_LINGER_MS = 1000
_RSS_EVERY_S = 1.0


@dataclass(frozen=True)
class Settings:
    endpoint: str
    epoch: bytes
    owner_id: str
    supervisor_pid: int
    parent_fd: int  # -1: none to watch
    heartbeat_interval_s: float


class IoThread:
    def __init__(self, settings: Settings, tasks: Tasks, pulse: Pulse) -> None:
        self.welcomed = threading.Event()
        self.dropped = 0
        self._settings = settings
        self._tasks = tasks
        self._pulse = pulse
        self._operations: dict[int, RunningOp] = {}
        self._lock = threading.Lock()
        self._cancelling_all = False
        self._newest_generation = 0
        self._outbox: deque[bytes] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._stopping = False
        self._process = psutil.Process()
        self._rss_bytes = 0
        self._rss_at_s = 0.0
        self._thread = threading.Thread(target=self._main, name="io", daemon=True)

    # --- any thread ------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def send(self, kind: Kind, generation: int, op_id: int, seq: int, payload: Payload) -> None:
        """See ``Out``. Encoded here, so that a bad payload fails its maker."""
        self._outbox.append(self._encode(kind, generation, op_id, seq, payload))

    def flush(self) -> None:
        """See ``Out``."""
        if self._outbox:
            self._wake()

    def ended(self, operation: RunningOp) -> None:
        with self._lock:
            self._operations.pop(operation.op_id, None)

    def cancel_all(self) -> None:
        """Cancel what runs and whatever still arrives: the worker leaves. Safe in a signal
        handler: the lock is only tried, and the I/O thread finishes the job."""
        self._cancelling_all = True
        self._wake()

    def close(self) -> None:
        """Send what is queued, then end the thread."""
        self._stopping = True
        self._wake()
        self._thread.join(timeout=_LINGER_MS / 1000 + 1.0)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake enough
            os.write(self._wake_write, b"\0")

    def _encode(self, kind: Kind, generation: int, op_id: int, seq: int, payload: Payload) -> bytes:
        return encode_envelope(
            Envelope(
                PROTOCOL_VERSION,
                kind,
                self._settings.epoch,
                generation,
                op_id,
                seq,
                encode_payload(payload),
            )
        )

    # --- I/O thread ------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._loop()
        except BaseException:
            log.exception("the I/O thread failed")
            os._exit(EXIT_BROKEN)

    def _loop(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._settings.epoch)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        # Streams are bounded by credit, and everything else is small: sending must not block.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.connect(self._settings.endpoint)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        if self._settings.parent_fd >= 0:
            poller.register(self._settings.parent_fd, zmq.POLLIN)
        next_beat_s = time.monotonic()
        while True:
            wait_s = max(0.0, next_beat_s - time.monotonic())
            ready = dict(poller.poll(math.ceil(wait_s * 1000)))
            if self._settings.parent_fd in ready:  # nothing is ever written: it is the end
                os._exit(EXIT_ORPHANED)
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            if self._cancelling_all:
                self._cancel_running()
            if socket in ready:
                self._receive(socket)
            stopping = self._stopping  # before the last look at the outbox, not after
            while self._outbox:
                socket.send(self._outbox.popleft())
            if stopping:
                break
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                next_beat_s = now_s + self._settings.heartbeat_interval_s
                if self.welcomed.is_set():
                    socket.send(self._heartbeat(now_s))
        socket.close()
        context.term()

    def _heartbeat(self, now_s: float) -> bytes:
        if now_s - self._rss_at_s >= _RSS_EVERY_S:
            self._rss_at_s = now_s
            self._rss_bytes = self._process.memory_info().rss
        beat = Heartbeat(
            progress=self._pulse.progress,
            busy_op=self._pulse.busy_op,
            rss_bytes=self._rss_bytes,
            dropped=self.dropped,
            cold_bytes=self._pulse.cold_bytes,
        )
        return self._encode(Kind.HEARTBEAT, 0, 0, 0, beat)

    def _receive(self, socket: zmq.SyncSocket) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                envelope = decode_envelope(frames[-1])
                self._handle(envelope)
            except CodecError as error:
                # The supervisor speaks something else: nothing good can come of guessing.
                log.error("modeld: bad frame from the supervisor: %s", error)
                os._exit(EXIT_BROKEN)

    def _handle(self, envelope: Envelope) -> None:
        if envelope.version != PROTOCOL_VERSION:
            raise CodecError(f"protocol version {envelope.version}, not {PROTOCOL_VERSION}")
        if envelope.epoch != self._settings.epoch:
            self.dropped += 1
            return
        match envelope.kind:
            case Kind.OP:
                self._accept(envelope)
            case Kind.CANCEL:
                if operation := self._operations.get(envelope.op_id):
                    operation.cancel()
            case Kind.CREDIT:
                if operation := self._operations.get(envelope.op_id):
                    operation.grant(decode_payload(envelope.payload, Credit).chunks)
            case Kind.WELCOME:
                welcome = decode_payload(envelope.payload, Welcome)
                if welcome.owner_instance_id != self._settings.owner_id:
                    raise CodecError("welcomed by another owner than the one that spawned this")
                self.welcomed.set()
            case Kind.SHUTDOWN:
                self._tasks.put(None)  # behind what was sent before: that is finished first
            case _:
                raise CodecError(f"a frame of kind {envelope.kind} from the supervisor")

    def _accept(self, envelope: Envelope) -> None:
        if not self.welcomed.is_set():
            raise CodecError("a request before the welcome")
        if envelope.generation < self._newest_generation:
            self.dropped += 1
            return
        self._newest_generation = envelope.generation
        operation = RunningOp(
            envelope.op_id, envelope.generation, envelope.payload, self, self._pulse
        )
        with self._lock:
            self._operations[envelope.op_id] = operation
        if self._cancelling_all:
            operation.cancel()
        self._tasks.put(operation)

    def _cancel_running(self) -> None:
        with self._lock:
            running = list(self._operations.values())
        for operation in running:
            operation.cancel()
