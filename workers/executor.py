"""What runs on a worker's main thread: one operation at a time, from a queue, in order.

The handler does the work; this loop turns what it returns or raises into exactly one terminal
frame per operation. It knows no socket: frames go to a ``Send``.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import msgspec

from modeld.shared.codec import CodecError, decode_any_payload
from modeld.shared.errors import ModeldError, SessionFatal
from modeld.shared.messages import Hello, Kind, Payload, WireError

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


@dataclass
class Pulse:
    """What heartbeats tell. Written by the main thread, read by the I/O thread."""

    progress: int = 0
    busy_op: int = 0


class Send(Protocol):
    def __call__(self, kind: Kind, generation: int, op_id: int, seq: int, payload: Payload) -> None:
        """Queue a frame; never blocks."""


class RunningOp:
    """One operation as both threads see it: the I/O thread cancels and grants, the main runs it.

    It exists from the arrival of the request, so that a cancel finds it before it starts.
    """

    def __init__(
        self, op_id: int, generation: int, request: msgspec.Raw, send: Send, pulse: Pulse
    ) -> None:
        self.op_id = op_id
        self.generation = generation
        self.request = request
        self._send = send
        self._pulse = pulse
        self._seq = 0
        self._cancelled = False
        self._credit = 0
        self._changed = threading.Condition()

    # --- main thread -----------------------------------------------------------------------

    def cancelled(self) -> bool:
        return self._cancelled

    def emit(self, payload: Payload) -> None:
        self._frame(Kind.DATA, payload)

    def wait_credit(self) -> bool:
        with self._changed:
            while self._credit == 0 and not self._cancelled:
                if not self._changed.wait(_CREDIT_BEAT_S):
                    self._pulse.progress += 1
            if self._cancelled:
                return False
            self._credit -= 1
            return True

    def beat(self) -> None:
        self._pulse.progress += 1

    def finish(self, kind: Kind, payload: Payload) -> None:
        """The terminal frame."""
        self._frame(kind, payload)

    def _frame(self, kind: Kind, payload: Payload) -> None:
        self._send(kind, self.generation, self.op_id, self._seq, payload)
        self._seq += 1

    # --- I/O thread ------------------------------------------------------------------------

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify()

    def grant(self, chunks: int) -> None:
        with self._changed:
            self._credit += chunks
            self._changed.notify()


Task: TypeAlias = RunningOp | None  # None: leave

Tasks: TypeAlias = "queue.SimpleQueue[Task]"


def run(handler: Handler, tasks: Tasks, pulse: Pulse, ended: Callable[[RunningOp], None]) -> None:
    """Serve until None is taken from the queue. ``ended`` is called after each terminal frame."""
    while (operation := tasks.get()) is not None:
        pulse.busy_op = operation.op_id
        kind, payload = _serve(handler, operation)
        pulse.busy_op = 0
        pulse.progress += 1
        operation.finish(kind, payload)
        ended(operation)


def _serve(handler: Handler, operation: RunningOp) -> tuple[Kind, Payload]:
    try:
        request = decode_any_payload(operation.request)
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
