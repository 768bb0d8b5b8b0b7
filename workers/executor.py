"""What runs on a worker's main thread: operations from a queue, in order of arrival.

The handler does the work; this loop turns what it returns or raises into exactly one terminal
frame per operation. One operation at a time, unless the handler says which may run beside each
other (``workers/batching.py``). It knows no socket: frames go to an ``Out``.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import msgspec

from modeld.shared.codec import CodecError, decode_any_payload
from modeld.shared.errors import ModeldError, SessionFatal
from modeld.shared.messages import Hello, Kind, Payload, WireError
from modeld.workers.batching import Gate, Place, Strand

log = logging.getLogger(__name__)

# How often a wait for credit counts as life: the worker waits by order, it doesn't hang.
_CREDIT_BEAT_S = 1.0


class OpContext(Protocol):
    """What a handler may use of the runtime while it serves one operation."""

    op_id: int
    generation: int

    def cancelled(self) -> bool:
        """Whether this operation was cancelled. Cheap: polled between tokens and in callbacks."""

    def emit(self, payload: Payload) -> None:
        """Send a DATA frame now. Never blocks."""

    def wait_credit(self) -> bool:
        """Block until a chunk may be sent (uses one credit); False when cancelled meanwhile."""

    def beat(self) -> None:
        """Count a unit of progress (a token, a micro-batch), shown in heartbeats."""


class Handler(Protocol):
    """Serves operations; raises ModeldError for a typed refusal."""

    def hello(self) -> Hello: ...

    def handle(self, request: Payload, context: OpContext) -> Payload: ...

    def close(self) -> None: ...


@runtime_checkable
class Batching(Protocol):
    """What a handler has besides that can serve several operations at once."""

    gate: Gate

    def place(self, request: Payload) -> Place:
        """Where an operation belongs, asked when it is first in line for its sessions."""

    def sessions(self, request: Payload) -> tuple[str, ...]:
        """Ids of the sessions that it names: these are served in order of arrival."""


@runtime_checkable
class ColdKeeping(Protocol):
    """What a handler has besides that keeps KV in RAM outside of its contexts."""

    @property
    def cold_bytes(self) -> int:
        """Bytes of it now; read by any thread."""


@dataclass
class Pulse:
    """What heartbeats tell. Written by the main thread, read by the I/O thread."""

    progress: int = 0
    busy_op: int = 0
    keeper: ColdKeeping | None = None

    @property
    def cold_bytes(self) -> int:
        return self.keeper.cold_bytes if self.keeper is not None else 0


class Out(Protocol):
    """Where an operation's frames go. No call blocks."""

    def send(self, kind: Kind, generation: int, op_id: int, seq: int, payload: Payload) -> None:
        """Queue a frame."""

    def flush(self) -> None:
        """See that what is queued goes out."""

    def ended(self, operation: RunningOp) -> None:
        """Called after the operation's terminal frame."""


class RunningOp:
    """One operation as both threads see it: the I/O thread cancels and grants, the main runs it.

    It exists from the arrival of the request, so that a cancel finds it before it starts.
    """

    def __init__(
        self, op_id: int, generation: int, request: msgspec.Raw, out: Out, pulse: Pulse
    ) -> None:
        self.op_id = op_id
        self.generation = generation
        self.request = request
        self._out = out
        self._pulse = pulse
        self._seq = 0
        self._cancelled = False
        self._credit = 0
        self._changed = threading.Condition()
        self._strand: Strand | None = None
        self._wake: Callable[[Strand], None] = _nobody
        self._waiting = False  # its strand, for credit

    # --- main thread, or the operation's strand --------------------------------------------

    def run_in(self, strand: Strand, wake: Callable[[Strand], None]) -> None:
        """From now on waiting pauses the strand; ``wake`` is called, by any thread, when it can
        go on.
        """
        self._strand, self._wake = strand, wake

    def cancelled(self) -> bool:
        return self._cancelled

    def emit(self, payload: Payload) -> None:
        self._frame(Kind.DATA, payload)

    def wait_credit(self) -> bool:
        with self._changed:
            while self._credit == 0 and not self._cancelled:
                if self._strand is not None:
                    self._leave_to_others(self._strand)
                elif not self._changed.wait(_CREDIT_BEAT_S):
                    self._pulse.progress += 1
            if self._cancelled:
                return False
            self._credit -= 1
            return True

    def _leave_to_others(self, strand: Strand) -> None:
        """Until there is credit, or a cancel. ``_changed`` is held before and after."""
        self._waiting = True
        self._changed.release()
        try:
            strand.pause()
        finally:
            self._changed.acquire()

    def beat(self) -> None:
        self._pulse.progress += 1

    def finish(self, kind: Kind, payload: Payload) -> None:
        """The terminal frame."""
        self._frame(kind, payload)

    def _frame(self, kind: Kind, payload: Payload) -> None:
        self._out.send(kind, self.generation, self.op_id, self._seq, payload)
        self._seq += 1
        if self._strand is None:  # else the loop does it, once for all strands of a round
            self._out.flush()

    # --- I/O thread ------------------------------------------------------------------------

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._notify()

    def grant(self, chunks: int) -> None:
        with self._changed:
            self._credit += chunks
            self._notify()

    def _notify(self) -> None:
        if self._waiting and self._strand is not None:
            self._waiting = False
            self._wake(self._strand)
        self._changed.notify()


def _nobody(strand: Strand) -> None:
    raise AssertionError("a strand without a loop")


Task: TypeAlias = RunningOp | Strand | None  # a strand that can go on; None: leave

Tasks: TypeAlias = "queue.SimpleQueue[Task]"


def run(handler: Handler, tasks: Tasks, pulse: Pulse, out: Out) -> None:
    """Serve until None is taken from the queue."""
    pulse.keeper = handler if isinstance(handler, ColdKeeping) else None
    _Loop(handler, tasks, pulse, out).run()


@dataclass(frozen=True)
class _Arrived:
    operation: RunningOp
    request: Payload | CodecError
    sessions: tuple[str, ...]


class _Loop:
    """Who runs now. Everything here is done by the main thread, while no strand runs."""

    def __init__(self, handler: Handler, tasks: Tasks, pulse: Pulse, out: Out) -> None:
        self._handler, self._tasks, self._pulse, self._out = handler, tasks, pulse, out
        self._batching = handler if isinstance(handler, Batching) else None
        self._gate = self._batching.gate if self._batching is not None else Gate()
        self._line: deque[_Arrived] = deque()
        self._running: dict[Strand, _Arrived] = {}
        self._ready: deque[Strand] = deque()
        self._leaving = False

    def run(self) -> None:
        while True:
            self._take_what_came()
            self._start()
            if self._ready:
                self._go_on(self._ready.popleft())
            elif self._gate.waiting:
                # The engine takes its time without the interpreter, which the I/O thread needs.
                self._out.flush()
                self._ready += self._gate.round()
            elif self._running or not self._leaving:
                self._wait()
            else:
                self._out.flush()
                return

    def _take_what_came(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._accept(self._tasks.get_nowait())

    def _wait(self) -> None:
        """For the next task. All that run wait for credit: by order, they don't hang."""
        self._out.flush()
        try:
            self._accept(self._tasks.get(timeout=_CREDIT_BEAT_S if self._running else None))
        except queue.Empty:
            self._pulse.progress += 1

    def _accept(self, task: Task) -> None:
        if isinstance(task, Strand):
            self._ready.append(task)
        elif task is None:
            self._leaving = True
        elif not self._leaving:
            self._line.append(self._arrived(task))

    def _arrived(self, operation: RunningOp) -> _Arrived:
        try:
            request = decode_any_payload(operation.request)
        except CodecError as error:
            return _Arrived(operation, error, ())
        sessions = self._batching.sessions(request) if self._batching is not None else ()
        return _Arrived(operation, request, sessions)

    def _start(self) -> None:
        """Begin, or serve, what can be: in order of arrival for each session, and nothing passes
        what must run alone.
        """
        held = {session for arrived in self._running.values() for session in arrived.sessions}
        passed: list[_Arrived] = []
        while self._line:
            arrived = self._line.popleft()
            if held.intersection(arrived.sessions):
                held.update(arrived.sessions)
                passed.append(arrived)
                continue
            place = self._place(arrived)
            if place.how == "alone" and (self._running or passed):
                self._line.appendleft(arrived)
                break
            if place.how == "beside":
                held.update(arrived.sessions)
                self._begin(arrived)
                continue
            self._pulse.busy_op = arrived.operation.op_id
            self._out.flush()
            self._end(arrived, *_serve(self._handler, arrived.request, arrived.operation))
        self._line.extendleft(reversed(passed))

    def _place(self, arrived: _Arrived) -> Place:
        if self._batching is None or isinstance(arrived.request, CodecError):
            return Place("alone")
        return self._batching.place(arrived.request)

    def _begin(self, arrived: _Arrived) -> None:
        operation = arrived.operation

        def work() -> None:
            kind, payload = _serve(self._handler, arrived.request, operation)
            self._end(arrived, kind, payload)

        strand = Strand(work)
        operation.run_in(strand, self._tasks.put)
        self._running[strand] = arrived
        self._ready.append(strand)
        self._tell_busy()

    def _go_on(self, strand: Strand) -> None:
        if not strand.begun:  # what precedes its first batch may take long
            self._out.flush()
        if not self._gate.run(strand):
            return
        del self._running[strand]
        if strand.error is not None:  # not even a terminal frame could be sent
            raise strand.error

    def _end(self, arrived: _Arrived, kind: Kind, payload: Payload) -> None:
        self._tell_busy(ended=arrived)
        self._pulse.progress += 1
        arrived.operation.finish(kind, payload)
        self._out.ended(arrived.operation)

    def _tell_busy(self, ended: _Arrived | None = None) -> None:
        """In heartbeats: the one that has run longest."""
        running = (one for one in self._running.values() if one is not ended)
        first = next(running, None)
        self._pulse.busy_op = first.operation.op_id if first is not None else 0


def _serve(
    handler: Handler, request: Payload | CodecError, operation: RunningOp
) -> tuple[Kind, Payload]:
    try:
        if isinstance(request, CodecError):
            raise request
        return Kind.DONE, handler.handle(request, operation)
    except ModeldError as error:
        return Kind.ERROR, _wire(error)
    except CodecError as error:
        log.error("request of operation %d: %s", operation.op_id, error)
        return Kind.ERROR, _wire(
            SessionFatal("The worker couldn't read the request.", metadata={"cause": "internal"})
        )
    except Exception:
        # The stack may help whoever reads the log; it never crosses the wire. What the session
        # holds after an unplanned exception can't be proved, so it is lost.
        log.exception("operation %d failed", operation.op_id)
        return Kind.ERROR, _wire(
            SessionFatal(
                "The worker failed inside; its log has the details. Open a new session.",
                metadata={"cause": "internal"},
            )
        )


def _wire(error: ModeldError) -> WireError:
    return WireError(
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )
