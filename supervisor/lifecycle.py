"""The lives of a worker and of an operation, as pure state machines: events in, instructions out.

They do no I/O and read no clock; the keeper and the link carry the instructions out. A transition
that can't be is an error that carries its story.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from modeld.supervisor.restart import GiveUp, Restarts

_STORY_LENGTH = 24


class InvalidTransition(RuntimeError):
    """An event that can't happen in that state; ``story`` holds what led there, oldest first."""

    def __init__(self, machine: str, state: Enum, event: object, story: Sequence[str]) -> None:
        self.story = tuple(story)
        super().__init__(
            f"{machine}: {event!r} can't happen in {state.name}; story: {' | '.join(self.story)}"
        )


# --- worker ----------------------------------------------------------------------------------


class WorkerState(Enum):
    SPAWNING = "spawning"
    HANDSHAKING = "handshaking"
    IDLE = "idle"
    BUSY = "busy"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"  # known to be lost, its process not yet reaped
    BACKOFF = "backoff"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StartAsked:
    pass


@dataclass(frozen=True, slots=True)
class Spawned:
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    text: str


@dataclass(frozen=True, slots=True)
class Greeted:
    """A valid hello arrived."""


@dataclass(frozen=True, slots=True)
class OpStarted:
    op_id: int


@dataclass(frozen=True, slots=True)
class OpEnded:
    op_id: int


@dataclass(frozen=True, slots=True)
class Misbehaved:
    """Silent beyond its limit (``heartbeat``), or speaking nonsense (``protocol``)."""

    cause: str
    text: str


@dataclass(frozen=True, slots=True)
class Exited:
    code: int  # negative: the signal's number


@dataclass(frozen=True, slots=True)
class BackoffElapsed:
    pass


@dataclass(frozen=True, slots=True)
class StopAsked:
    grace_s: float  # 0: at once
    then_restart: bool = False


@dataclass(frozen=True, slots=True)
class Cleared:
    """Someone asks for a fresh chance after a crash loop."""


WorkerEvent: TypeAlias = (
    StartAsked | Spawned | SpawnFailed | Greeted | OpStarted | OpEnded | Misbehaved | Exited
    | BackoffElapsed | StopAsked | Cleared
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spawn:
    pass


@dataclass(frozen=True, slots=True)
class SendWelcome:
    pass


@dataclass(frozen=True, slots=True)
class AnnounceDeath:
    """Tell the owner, then end every running operation; in this order."""

    cause: str  # signal | exit | heartbeat | protocol
    code: int | None
    text: str


@dataclass(frozen=True, slots=True)
class TakeDown:
    """Begin, or shorten, the kill ladder. ``ask``: begin with a shutdown frame, not SIGTERM."""

    grace_s: float
    ask: bool
    abort: bool  # write stacks before the kill


@dataclass(frozen=True, slots=True)
class AbandonOperations:
    """End what still runs: the worker left while it was asked to."""


@dataclass(frozen=True, slots=True)
class Wait:
    delay_s: float


@dataclass(frozen=True, slots=True)
class CancelWait:
    pass


@dataclass(frozen=True, slots=True)
class Report:
    """The worker is given up; ``text`` says why."""

    text: str


Instruction: TypeAlias = (
    Spawn | SendWelcome | AnnounceDeath | TakeDown | AbandonOperations | Wait | CancelWait | Report
)

_LIVE = (WorkerState.IDLE, WorkerState.BUSY)


class WorkerMachine:
    """One worker's place in its life. ``now_s`` of every event is the same monotonic clock."""

    def __init__(self, restarts: Restarts) -> None:
        self.state = WorkerState.STOPPED
        self.pid: int | None = None
        self.running: frozenset[int] = frozenset()
        self.spawns = 0
        self._restarts = restarts
        self._born_s = 0.0
        self._stop_after = False  # what DRAINING and DEAD end in: STOPPED, or another spawn
        self._story: deque[str] = deque(maxlen=_STORY_LENGTH)

    @property
    def story(self) -> tuple[str, ...]:
        return tuple(self._story)

    @property
    def will_return(self) -> bool:
        """Whether a live worker is to be expected without anybody asking."""
        if self.state in (WorkerState.STOPPED, WorkerState.FAILED):
            return False
        return not self._stop_after

    def handle(self, event: WorkerEvent, now_s: float) -> list[Instruction]:
        """Raises InvalidTransition, leaving the machine as it was."""
        before = self.state
        match event:
            case StartAsked():
                out = self._start(event)
            case Spawned(pid):
                out = self._spawned(event, pid, now_s)
            case SpawnFailed(text):
                out = self._spawn_failed(event, text, now_s)
            case Greeted():
                out = self._greeted(event)
            case OpStarted(op_id):
                out = self._op_started(event, op_id)
            case OpEnded(op_id):
                out = self._op_ended(event, op_id)
            case Misbehaved(cause, text):
                out = self._misbehaved(event, cause, text)
            case Exited(code):
                out = self._exited(event, code, now_s)
            case BackoffElapsed():
                self._must_be(event, WorkerState.BACKOFF)
                out = self._spawn()
            case StopAsked(grace_s, then_restart):
                out = self._stop(grace_s, then_restart)
            case Cleared():
                out = self._cleared()
        # Operations come and go by the thousand and would push the interesting past out.
        if not isinstance(event, OpStarted | OpEnded):
            self._story.append(f"{now_s:.3f} {before.name} {event!r} -> {self.state.name}")
        return out

    def _must_be(self, event: WorkerEvent, *states: WorkerState) -> None:
        if self.state not in states:
            raise InvalidTransition("worker", self.state, event, self._story)

    def _spawn(self) -> list[Instruction]:
        self.state = WorkerState.SPAWNING
        self._stop_after = False
        self.spawns += 1
        return [Spawn()]

    def _start(self, event: WorkerEvent) -> list[Instruction]:
        self._must_be(event, WorkerState.STOPPED)
        return self._spawn()

    def _spawned(self, event: WorkerEvent, pid: int, now_s: float) -> list[Instruction]:
        self._must_be(event, WorkerState.SPAWNING, WorkerState.DRAINING)
        if self.pid is not None:
            raise InvalidTransition("worker", self.state, event, self._story)
        self.pid = pid
        self._born_s = now_s
        if self.state is WorkerState.DRAINING:  # the stop came while it was being spawned
            return [TakeDown(0.0, ask=False, abort=False)]
        self.state = WorkerState.HANDSHAKING
        return []

    def _spawn_failed(self, event: WorkerEvent, text: str, now_s: float) -> list[Instruction]:
        self._must_be(event, WorkerState.SPAWNING, WorkerState.DRAINING)
        if self.pid is not None:
            raise InvalidTransition("worker", self.state, event, self._story)
        if self.state is WorkerState.DRAINING:
            return self._gone_as_asked()
        self._born_s = now_s
        self.state = WorkerState.DEAD
        return [AnnounceDeath("exit", None, text), *self._decide(None, now_s)]

    def _greeted(self, event: WorkerEvent) -> list[Instruction]:
        self._must_be(event, WorkerState.HANDSHAKING, WorkerState.DRAINING)
        if self.state is WorkerState.DRAINING:
            return []  # it says hello while it is being taken down
        self.state = WorkerState.IDLE
        return [SendWelcome()]

    def _op_started(self, event: WorkerEvent, op_id: int) -> list[Instruction]:
        self._must_be(event, *_LIVE)
        if op_id in self.running:
            raise InvalidTransition("worker", self.state, event, self._story)
        self.running |= {op_id}
        self.state = WorkerState.BUSY
        return []

    def _op_ended(self, event: WorkerEvent, op_id: int) -> list[Instruction]:
        if op_id not in self.running:
            raise InvalidTransition("worker", self.state, event, self._story)
        self.running -= {op_id}
        if self.state is WorkerState.BUSY and not self.running:
            self.state = WorkerState.IDLE
        return []

    def _misbehaved(self, event: WorkerEvent, cause: str, text: str) -> list[Instruction]:
        self._must_be(event, WorkerState.HANDSHAKING, *_LIVE, WorkerState.DRAINING)
        if self.pid is None:
            raise InvalidTransition("worker", self.state, event, self._story)
        if self.state is WorkerState.DRAINING:
            return [TakeDown(0.0, ask=False, abort=True)]
        self.state = WorkerState.DEAD
        self.running = frozenset()
        # It is announced now, not when the ladder is through: nothing it still says is heard.
        return [AnnounceDeath(cause, None, text), TakeDown(0.0, ask=False, abort=True)]

    def _exited(self, event: WorkerEvent, code: int, now_s: float) -> list[Instruction]:
        self._must_be(
            event, WorkerState.HANDSHAKING, *_LIVE, WorkerState.DRAINING, WorkerState.DEAD
        )
        if self.pid is None:
            raise InvalidTransition("worker", self.state, event, self._story)
        self.pid = None
        if self.state is WorkerState.DRAINING:
            return self._gone_as_asked()
        if self.state is WorkerState.DEAD:  # announced already; now it is reaped as well
            return self._decide(None, now_s)
        self.state = WorkerState.DEAD
        self.running = frozenset()
        cause = "signal" if code < 0 else "exit"
        return [AnnounceDeath(cause, code, ""), *self._decide(code, now_s)]

    def _decide(self, code: int | None, now_s: float) -> list[Instruction]:
        if self._stop_after:
            self.state = WorkerState.STOPPED
            return []
        decision = self._restarts.after_death(now_s, now_s - self._born_s, code)
        if isinstance(decision, GiveUp):
            self.state = WorkerState.FAILED
            return [Report(decision.text)]
        self.state = WorkerState.BACKOFF
        return [Wait(decision.delay_s)]

    def _gone_as_asked(self) -> list[Instruction]:
        self.running = frozenset()
        if self._stop_after:
            self.state = WorkerState.STOPPED
            return [AbandonOperations()]
        return [AbandonOperations(), *self._spawn()]

    def _stop(self, grace_s: float, then_restart: bool) -> list[Instruction]:
        match self.state:
            case WorkerState.STOPPED:
                return []
            case WorkerState.FAILED:
                return self._fresh_or_stopped(then_restart)
            case WorkerState.BACKOFF:
                return [CancelWait(), *self._fresh_or_stopped(then_restart)]
            case WorkerState.DEAD:
                self._stop_after = self._stop_after or not then_restart
                return []
            case WorkerState.DRAINING:
                # A stop overrides a restart under way, never the other way round.
                self._stop_after = self._stop_after or not then_restart
                if self.pid is None or grace_s > 0:
                    return []
                return [TakeDown(0.0, ask=False, abort=False)]
        greeted = self.state in _LIVE
        self.state = WorkerState.DRAINING
        self._stop_after = not then_restart
        if self.pid is None:
            return []
        return [TakeDown(grace_s, ask=greeted, abort=grace_s > 0)]

    def _fresh_or_stopped(self, then_restart: bool) -> list[Instruction]:
        self._restarts.clear()
        if then_restart:
            return self._spawn()
        self.state = WorkerState.STOPPED
        return []

    def _cleared(self) -> list[Instruction]:
        self._restarts.clear()
        return self._spawn() if self.state is WorkerState.FAILED else []


# --- operation -------------------------------------------------------------------------------


class OperationState(Enum):
    QUEUED = "queued"  # nothing was sent
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"
    ERROR = "error"
    LOST = "lost"  # ended by the supervisor, since the worker can't


class OperationEvent(Enum):
    SENT = "sent"
    CANCEL_ASKED = "cancel asked"
    FINISHED = "finished"
    FAILED = "failed"
    GIVEN_UP = "given up"


class OperationInstruction(Enum):
    SEND_CANCEL = "send cancel"
    END = "end"  # wake whoever waits: this is the one terminal


OPERATION_TERMINAL = frozenset({OperationState.DONE, OperationState.ERROR, OperationState.LOST})

_S, _E, _I = OperationState, OperationEvent, OperationInstruction
_OPERATION: dict[
    tuple[OperationState, OperationEvent],
    tuple[OperationState, tuple[OperationInstruction, ...]],
] = {
    (_S.QUEUED, _E.SENT): (_S.RUNNING, ()),
    (_S.QUEUED, _E.CANCEL_ASKED): (_S.LOST, (_I.END,)),
    (_S.QUEUED, _E.GIVEN_UP): (_S.LOST, (_I.END,)),
    (_S.RUNNING, _E.CANCEL_ASKED): (_S.CANCELLING, (_I.SEND_CANCEL,)),
    (_S.CANCELLING, _E.CANCEL_ASKED): (_S.CANCELLING, ()),
    **{
        (state, event): (end, (_I.END,))
        for state in (_S.RUNNING, _S.CANCELLING)
        for event, end in (
            (_E.FINISHED, _S.DONE),
            (_E.FAILED, _S.ERROR),
            (_E.GIVEN_UP, _S.LOST),
        )
    },
    # Cancelling or giving up what has ended is a race everybody may lose.
    **{
        (state, event): (state, ())
        for state in OPERATION_TERMINAL
        for event in (_E.CANCEL_ASKED, _E.GIVEN_UP)
    },
}


class OperationMachine:
    """One operation's place in its life; exactly one END ever comes out of it."""

    __slots__ = ("_story", "state")

    def __init__(self) -> None:
        self.state = OperationState.QUEUED
        self._story: list[str] = []

    @property
    def ended(self) -> bool:
        return self.state in OPERATION_TERMINAL

    def handle(self, event: OperationEvent) -> tuple[OperationInstruction, ...]:
        """Raises InvalidTransition, leaving the machine as it was."""
        step = _OPERATION.get((self.state, event))
        if step is None:
            raise InvalidTransition("operation", self.state, event, self._story)
        state, instructions = step
        if state is not self.state:
            self._story.append(f"{self.state.name} {event.name} -> {state.name}")
        self.state = state
        return instructions
