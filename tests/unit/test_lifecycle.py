from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modeld.supervisor.lifecycle import (
    OPERATION_TERMINAL,
    AbandonOperations,
    AnnounceDeath,
    BackoffElapsed,
    CancelWait,
    Cleared,
    Exited,
    Greeted,
    Instruction,
    InvalidTransition,
    Misbehaved,
    OpEnded,
    OperationEvent,
    OperationInstruction,
    OperationMachine,
    OperationState,
    OpStarted,
    Report,
    SendWelcome,
    Spawn,
    Spawned,
    SpawnFailed,
    StartAsked,
    StopAsked,
    TakeDown,
    Wait,
    WorkerEvent,
    WorkerMachine,
    WorkerState,
)
from modeld.supervisor.restart import RestartPolicy, Restarts


def worker(policy: RestartPolicy | None = None) -> WorkerMachine:
    return WorkerMachine(Restarts(policy or RestartPolicy(jitter=0.0), lambda: 0.0))


def feed(machine: WorkerMachine, *events: WorkerEvent) -> list[Instruction]:
    out: list[Instruction] = []
    for event in events:
        out = machine.handle(event, 0.0)
    return out


def test_a_worker_is_spawned_greeted_and_busy_while_an_operation_runs() -> None:
    machine = worker()
    assert feed(machine, StartAsked()) == [Spawn()]
    assert feed(machine, Spawned(7), Greeted()) == [SendWelcome()]
    states = [machine.state]
    feed(machine, OpStarted(1), OpStarted(2), OpEnded(1))
    states.append(machine.state)
    feed(machine, OpEnded(2))
    states.append(machine.state)
    assert states == [WorkerState.IDLE, WorkerState.BUSY, WorkerState.IDLE]


def test_a_crash_is_announced_before_the_restart_is_arranged() -> None:
    machine = worker()
    out = feed(machine, StartAsked(), Spawned(7), Greeted(), OpStarted(1), Exited(-11))
    assert out == [AnnounceDeath("signal", -11, ""), Wait(0.0)]
    assert machine.state is WorkerState.BACKOFF
    assert feed(machine, BackoffElapsed()) == [Spawn()]


def test_a_hung_worker_is_dead_at_once_and_respawned_only_when_reaped() -> None:
    machine = worker()
    out = feed(machine, StartAsked(), Spawned(7), Greeted(), Misbehaved("heartbeat", "silent"))
    assert out == [
        AnnounceDeath("heartbeat", None, "silent"),
        TakeDown(0.0, ask=False, abort=True),
    ]
    assert machine.state is WorkerState.DEAD
    # The exit that the ladder brings about is the same death, not a second one.
    assert feed(machine, Exited(-6)) == [Wait(0.0)]


def test_a_worker_that_cannot_boot_fails_at_once_until_cleared() -> None:
    machine = worker()
    out = feed(machine, StartAsked(), Spawned(7), Exited(64))
    assert isinstance(out[-1], Report)
    assert machine.state is WorkerState.FAILED
    assert feed(machine, Cleared()) == [Spawn()]


def test_a_stop_while_spawning_takes_down_what_was_spawned() -> None:
    machine = worker()
    feed(machine, StartAsked(), StopAsked(0.0))
    assert feed(machine, Spawned(7)) == [TakeDown(0.0, ask=False, abort=False)]
    feed(machine, Exited(-9))
    assert machine.state is WorkerState.STOPPED


def test_a_recycle_ends_in_a_new_worker_without_a_death() -> None:
    machine = worker()
    out = feed(machine, StartAsked(), Spawned(7), Greeted(), StopAsked(1.0, then_restart=True))
    assert out == [TakeDown(1.0, ask=True, abort=True)]
    assert feed(machine, Exited(0)) == [AbandonOperations(), Spawn()]


def test_a_stop_overrides_a_recycle_under_way() -> None:
    machine = worker()
    feed(machine, StartAsked(), Spawned(7), Greeted(), StopAsked(1.0, then_restart=True))
    assert feed(machine, StopAsked(0.0)) == [TakeDown(0.0, ask=False, abort=False)]
    assert feed(machine, Exited(-9)) == [AbandonOperations()]
    assert machine.state is WorkerState.STOPPED


def test_an_impossible_event_raises_with_the_story_that_led_there() -> None:
    machine = worker()
    feed(machine, StartAsked(), Spawned(7))
    with pytest.raises(InvalidTransition) as caught:
        feed(machine, OpStarted(1))
    assert "HANDSHAKING" in str(caught.value)
    assert "StartAsked" in caught.value.story[0]
    assert machine.state is WorkerState.HANDSHAKING


class WorkerLife(RuleBasedStateMachine):
    """A worker under everything the world can do to it, against a small model of that world."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = WorkerMachine(
            Restarts(RestartPolicy(jitter=0.0, max_deaths=3, window_s=50.0), lambda: 0.0)
        )
        self.now_s = 0.0
        self.processes = 0  # alive or not yet reaped
        self.spawn_due = False
        self.wait_due = False
        self.next_op = 1
        self.live_ops: set[int] = set()
        self.announced = 0
        self.lives = 0

    def send(self, event: WorkerEvent) -> None:
        self.now_s += 1.0
        for instruction in self.machine.handle(event, self.now_s):
            match instruction:
                case Spawn():
                    assert self.processes == 0, "respawned before the old one was reaped"
                    assert not self.spawn_due
                    self.spawn_due = True
                    self.lives += 1
                case AnnounceDeath():
                    self.announced += 1
                    self.live_ops.clear()
                case AbandonOperations():
                    self.live_ops.clear()
                case Wait():
                    assert not self.wait_due
                    self.wait_due = True
                case CancelWait():
                    assert self.wait_due
                    self.wait_due = False
                case TakeDown():
                    assert self.processes == 1

    @precondition(lambda self: self.machine.state is WorkerState.STOPPED)
    @rule()
    def start(self) -> None:
        self.send(StartAsked())

    @precondition(lambda self: self.spawn_due)
    @rule(works=st.booleans())
    def spawn(self, works: bool) -> None:
        self.spawn_due = False
        self.processes = 1 if works else 0
        self.send(Spawned(self.lives) if works else SpawnFailed("no"))

    @precondition(
        lambda self: self.processes == 1 and self.machine.state is WorkerState.HANDSHAKING
    )
    @rule()
    def greet(self) -> None:
        self.send(Greeted())

    @precondition(lambda self: self.machine.state in (WorkerState.IDLE, WorkerState.BUSY))
    @rule()
    def begin(self) -> None:
        self.live_ops.add(self.next_op)
        self.send(OpStarted(self.next_op))
        self.next_op += 1

    @precondition(lambda self: self.live_ops)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        op_id = data.draw(st.sampled_from(sorted(self.live_ops)))
        self.live_ops.remove(op_id)
        self.send(OpEnded(op_id))

    @precondition(lambda self: self.processes == 1 and self.machine.state is not WorkerState.DEAD)
    @rule(cause=st.sampled_from(["heartbeat", "protocol"]))
    def misbehave(self, cause: str) -> None:
        self.send(Misbehaved(cause, "text"))

    @precondition(lambda self: self.processes == 1)
    @rule(code=st.sampled_from([0, 1, 64, -6, -9, -11]))
    def exit(self, code: int) -> None:
        self.processes = 0
        self.send(Exited(code))

    @precondition(lambda self: self.wait_due)
    @rule()
    def wait_is_over(self) -> None:
        self.wait_due = False
        self.send(BackoffElapsed())

    @rule(grace_s=st.sampled_from([0.0, 1.0]), then_restart=st.booleans())
    def stop(self, grace_s: float, then_restart: bool) -> None:
        self.send(StopAsked(grace_s, then_restart))

    @rule()
    def clear(self) -> None:
        self.send(Cleared())

    @invariant()
    def it_always_has_a_way_on(self) -> None:
        state = self.machine.state
        waits_for = {
            WorkerState.SPAWNING: self.spawn_due,
            WorkerState.HANDSHAKING: self.processes == 1,
            WorkerState.IDLE: self.processes == 1,
            WorkerState.BUSY: self.processes == 1,
            WorkerState.DRAINING: self.processes == 1 or self.spawn_due,
            WorkerState.DEAD: self.processes == 1,
            WorkerState.BACKOFF: self.wait_due,
            WorkerState.STOPPED: not (self.processes or self.spawn_due or self.wait_due),
            WorkerState.FAILED: not (self.processes or self.spawn_due or self.wait_due),
        }
        assert waits_for[state]

    @invariant()
    def busy_means_that_an_operation_runs(self) -> None:
        assert self.machine.running == frozenset(self.live_ops)
        if self.machine.state is WorkerState.BUSY:
            assert self.live_ops
        if self.machine.state is WorkerState.IDLE:
            assert not self.live_ops

    @invariant()
    def no_life_has_two_deaths(self) -> None:
        assert self.announced <= self.lives


TestWorkerLife = WorkerLife.TestCase
TestWorkerLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class OperationLife(RuleBasedStateMachine):
    """Whatever happens in whatever order: one terminal, at most one cancel frame."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = OperationMachine()
        self.ends = 0
        self.cancels = 0

    @rule(event=st.sampled_from(OperationEvent))
    def happens(self, event: OperationEvent) -> None:
        before = self.machine.state
        try:
            instructions = self.machine.handle(event)
        except InvalidTransition:
            assert self.machine.state is before
            return
        self.ends += instructions.count(OperationInstruction.END)
        self.cancels += instructions.count(OperationInstruction.SEND_CANCEL)
        if before in OPERATION_TERMINAL:
            assert self.machine.state is before

    @invariant()
    def exactly_one_terminal(self) -> None:
        assert self.ends == (1 if self.machine.ended else 0)
        assert self.cancels <= 1


TestOperationLife = OperationLife.TestCase
TestOperationLife.settings = settings(max_examples=100, deadline=None)


def test_an_operation_cancelled_before_it_was_sent_is_lost_without_a_frame() -> None:
    machine = OperationMachine()
    assert machine.handle(OperationEvent.CANCEL_ASKED) == (OperationInstruction.END,)
    assert machine.state is OperationState.LOST


def test_a_result_that_races_a_cancel_still_counts() -> None:
    machine = OperationMachine()
    machine.handle(OperationEvent.SENT)
    assert machine.handle(OperationEvent.CANCEL_ASKED) == (OperationInstruction.SEND_CANCEL,)
    machine.handle(OperationEvent.FINISHED)
    assert machine.state is OperationState.DONE
