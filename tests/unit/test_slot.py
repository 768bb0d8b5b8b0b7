"""The slot machine: what each event asks for, in which order, and what is never possible."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modeld.supervisor.slot import (
    FINAL,
    RESIDENT,
    VACANT,
    InvalidTransition,
    QuarantineLedger,
    SlotMachine,
)
from modeld.supervisor.slot_events import (
    BumpGeneration,
    Drain,
    Event,
    EvictSessions,
    FailRunning,
    FailWaiters,
    GraceExpired,
    IdleExpired,
    Instruction,
    LoadDone,
    LoadFailed,
    LoadRequested,
    OwnerLost,
    OwnerTakenOver,
    Publish,
    QuarantineCleared,
    QuarantineSet,
    RestartWorker,
    SendLoad,
    SendUnload,
    SlotModel,
    SlotState,
    StateUntrusted,
    StopWorker,
    SwitchRequested,
    TurnEnded,
    TurnStarted,
    Unloaded,
    UnloadRequested,
    WorkerDied,
)

A = SlotModel("a", "digest-a")
B = SlotModel("b", "digest-b")


def machine_after(*events: Event, max_running_turns: int = 1) -> SlotMachine:
    machine = SlotMachine(max_running_turns=max_running_turns)
    for event in events:
        machine.apply(event)
    return machine


def ready(**options: int) -> SlotMachine:
    return machine_after(LoadRequested(A), LoadDone(), **options)


def state_of(machine: SlotMachine) -> SlotState:
    """Read anew: a type checker would hold on to the state it saw before ``apply``."""
    return machine.state


def kinds(instructions: list[Instruction]) -> list[type]:
    return [type(instruction) for instruction in instructions]


# --- the usual life --------------------------------------------------------------------------


def test_a_load_bumps_first_and_publishes_last() -> None:
    machine = SlotMachine()
    assert machine.apply(LoadRequested(A)) == [
        BumpGeneration("load a"),
        SendLoad(A),
        Publish(SlotState.LOADING),
    ]
    assert machine.apply(LoadDone()) == [Publish(SlotState.READY)]
    assert machine.model == A


def test_a_turn_makes_the_slot_busy_until_it_ends() -> None:
    machine = ready()
    assert machine.apply(TurnStarted(1)) == [Publish(SlotState.BUSY)]
    assert machine.running == {1}
    assert (machine.admits_turn, machine.admits_exclusive) == (False, False)
    assert machine.apply(TurnEnded(1)) == [Publish(SlotState.READY)]
    assert (machine.admits_turn, machine.admits_exclusive) == (True, True)


def test_a_slot_admits_as_many_turns_as_it_was_told_to() -> None:
    machine = ready(max_running_turns=2)
    machine.apply(TurnStarted(1))
    assert machine.apply(TurnStarted(2)) == []
    with pytest.raises(InvalidTransition, match="2 may run"):
        machine.apply(TurnStarted(3))
    assert machine.apply(TurnEnded(1)) == []
    assert machine.apply(TurnEnded(2)) == [Publish(SlotState.READY)]


def test_an_unload_evicts_under_a_new_generation() -> None:
    machine = ready()
    assert machine.apply(UnloadRequested()) == [
        BumpGeneration("unload"),
        EvictSessions("unload"),
        FailWaiters("GENERATION_STALE", "unload"),
        SendUnload(),
        Publish(SlotState.UNLOADING),
    ]
    assert machine.apply(Unloaded()) == [Publish(SlotState.EMPTY)]
    assert machine.model is None
    assert machine.last_model == A


def test_unloading_an_empty_slot_does_nothing() -> None:
    assert SlotMachine().apply(UnloadRequested()) == []


def test_an_idle_release_leaves_the_slot_idle_and_loadable() -> None:
    machine = ready()
    assert machine.apply(IdleExpired())[0] == BumpGeneration("idle release")
    assert machine.apply(Unloaded()) == [Publish(SlotState.IDLE)]
    assert machine.last_model == A
    assert machine.apply(UnloadRequested()) == [Publish(SlotState.EMPTY)]
    assert machine.apply(LoadRequested(A))[0] == BumpGeneration("load a")


def test_a_switch_unloads_then_loads_under_one_new_generation() -> None:
    machine = ready()
    assert kinds(machine.apply(SwitchRequested(B))) == [
        BumpGeneration,
        EvictSessions,
        FailWaiters,
        SendUnload,
        Publish,
    ]
    assert state_of(machine) is SlotState.SWITCHING
    with pytest.raises(InvalidTransition):
        machine.apply(LoadDone())
    assert machine.apply(Unloaded()) == [SendLoad(B)]
    assert machine.apply(LoadDone()) == [Publish(SlotState.READY)]
    assert machine.model == B


def test_a_failed_load_answers_those_who_wait_and_leaves_the_slot_usable() -> None:
    machine = machine_after(LoadRequested(A))
    assert machine.apply(LoadFailed("unknown architecture")) == [
        FailWaiters("MODEL_LOAD_FAILED", "unknown architecture"),
        Publish(SlotState.FAILED),
    ]
    assert machine.model is None
    machine.apply(LoadRequested(B))
    assert state_of(machine) is SlotState.LOADING


def test_a_failed_load_in_a_switch_leaves_nothing_resident() -> None:
    machine = ready()
    machine.apply(SwitchRequested(B))
    machine.apply(Unloaded())
    machine.apply(LoadFailed("no"))
    assert state_of(machine) is SlotState.FAILED
    assert machine.model is None
    assert machine.last_model == B


def test_taking_over_from_another_owner_bumps_before_anything_else() -> None:
    machine = SlotMachine()
    assert machine.apply(OwnerTakenOver("previous owner died"))[0] == BumpGeneration(
        "previous owner died"
    )
    with pytest.raises(InvalidTransition):
        ready().apply(OwnerTakenOver("late"))


# --- deaths and distrust ---------------------------------------------------------------------


def test_a_worker_s_death_in_a_turn_bumps_then_answers_then_restarts() -> None:
    machine = ready()
    machine.apply(TurnStarted(7))
    cause = "worker died: SIGSEGV"
    assert machine.apply(WorkerDied(cause, at_s=1.0)) == [
        BumpGeneration(cause),
        FailRunning((7,), cause),
        EvictSessions(cause),
        FailWaiters("GENERATION_STALE", cause),
        RestartWorker(cause),
        Publish(SlotState.EMPTY),
    ]
    assert machine.running == frozenset()
    assert machine.last_cause == cause


def test_the_end_of_a_turn_that_was_lost_is_not_an_error() -> None:
    machine = ready()
    machine.apply(TurnStarted(7))
    machine.apply(WorkerDied("SIGKILL", at_s=1.0))
    assert machine.apply(TurnEnded(7)) == []
    with pytest.raises(InvalidTransition):
        machine.apply(TurnEnded(7))


def test_a_death_while_loading_fails_the_load() -> None:
    machine = machine_after(LoadRequested(A))
    instructions = machine.apply(WorkerDied("SIGABRT", at_s=1.0))
    assert FailWaiters("MODEL_LOAD_FAILED", "SIGABRT") in instructions
    assert instructions[-1] == Publish(SlotState.FAILED)


@pytest.mark.parametrize("start", [(), (LoadRequested(A), LoadDone(), IdleExpired(), Unloaded())])
def test_a_death_in_a_vacant_slot_keeps_its_state(start: tuple[Event, ...]) -> None:
    machine = machine_after(*start)
    before = machine.state
    instructions = machine.apply(WorkerDied("SIGTERM", at_s=1.0))
    assert instructions[0] == BumpGeneration("SIGTERM")
    assert machine.state is before


def test_distrusted_state_is_evicted_with_everything_in_the_slot() -> None:
    machine = ready()
    machine.apply(TurnStarted(1))
    instructions = machine.apply(StateUntrusted("engine error -3"))
    assert kinds(instructions) == [
        BumpGeneration,
        FailRunning,
        EvictSessions,
        FailWaiters,
        SendUnload,
        Publish,
    ]
    assert machine.apply(StateUntrusted("again")) == []
    machine.apply(Unloaded())
    assert state_of(machine) is SlotState.EMPTY


# --- quarantine ------------------------------------------------------------------------------


def kill_while_loading(machine: SlotMachine, model: SlotModel, at_s: float) -> list[Instruction]:
    machine.apply(LoadRequested(model))
    return machine.apply(WorkerDied("SIGSEGV", at_s=at_s))


def test_a_model_that_kills_its_worker_three_times_is_quarantined() -> None:
    machine = SlotMachine()
    kill_while_loading(machine, A, 0.0)
    kill_while_loading(machine, A, 10.0)
    instructions = kill_while_loading(machine, A, 20.0)
    assert FailWaiters("MODEL_QUARANTINED", "SIGSEGV") in instructions
    assert state_of(machine) is SlotState.QUARANTINED
    with pytest.raises(InvalidTransition, match="quarantined"):
        machine.apply(LoadRequested(A))
    machine.apply(LoadRequested(B))
    assert state_of(machine) is SlotState.LOADING


def test_a_cleared_model_may_be_loaded_again() -> None:
    machine = SlotMachine(QuarantineLedger(deaths=1))
    kill_while_loading(machine, A, 0.0)
    assert machine.apply(UnloadRequested()) == []
    assert state_of(machine) is SlotState.QUARANTINED
    assert machine.apply(QuarantineCleared(A.digest)) == [Publish(SlotState.EMPTY)]
    machine.apply(LoadRequested(A))


def test_deaths_while_running_count_too_and_old_ones_are_forgotten() -> None:
    ledger = QuarantineLedger(deaths=2, window_s=60.0)
    assert not ledger.record_death("d", 0.0)
    assert not ledger.record_death("d", 61.0)
    assert not ledger.record_death("other", 62.0)
    assert ledger.record_death("d", 100.0)
    assert ledger.quarantined == {"d"}
    assert ledger.clear("d")
    assert not ledger.clear("d")
    assert not ledger.record_death("d", 101.0)


def test_a_quarantine_set_by_hand_holds_from_the_next_load_on() -> None:
    machine = ready()
    assert machine.apply(QuarantineSet(A.digest)) == []
    assert machine.admits_turn
    machine.apply(UnloadRequested())
    machine.apply(Unloaded())
    with pytest.raises(InvalidTransition, match="quarantined"):
        machine.apply(LoadRequested(A))
    assert QuarantineLedger(quarantined=["x"]).is_quarantined("x")


def test_the_old_model_is_blamed_for_a_death_while_a_switch_unloads_it() -> None:
    machine = SlotMachine(QuarantineLedger(deaths=1))
    machine.apply(LoadRequested(A))
    machine.apply(LoadDone())
    machine.apply(SwitchRequested(B))
    machine.apply(WorkerDied("SIGSEGV", at_s=0.0))
    assert machine.ledger.quarantined == {A.digest}
    assert state_of(machine) is SlotState.FAILED
    machine.apply(LoadRequested(B))


# --- the end ---------------------------------------------------------------------------------


def test_drain_lets_what_runs_finish_then_stops_the_worker() -> None:
    machine = ready()
    machine.apply(TurnStarted(1))
    assert machine.apply(Drain()) == [
        FailWaiters("SHUTTING_DOWN", "drain"),
        Publish(SlotState.SHUTTING_DOWN),
    ]
    with pytest.raises(InvalidTransition):
        machine.apply(TurnStarted(2))
    assert machine.apply(TurnEnded(1)) == [
        BumpGeneration("drain"),
        EvictSessions("drain"),
        StopWorker("drain"),
    ]
    assert machine.apply(WorkerDied("exit 0", at_s=1.0)) == []


def test_drain_of_a_resting_slot_stops_at_once() -> None:
    assert kinds(ready().apply(Drain())) == [
        BumpGeneration,
        FailWaiters,
        Publish,
        EvictSessions,
        StopWorker,
    ]
    assert kinds(SlotMachine().apply(Drain())) == [FailWaiters, Publish, StopWorker]


def test_what_outlasts_the_grace_is_ended() -> None:
    machine = ready()
    machine.apply(TurnStarted(1))
    machine.apply(Drain())
    assert kinds(machine.apply(GraceExpired())) == [
        BumpGeneration,
        FailRunning,
        EvictSessions,
        StopWorker,
    ]
    assert machine.apply(GraceExpired()) == []
    assert machine.apply(Drain()) == []


def test_a_load_that_was_given_up_leaves_an_empty_slot_and_no_failure() -> None:
    machine = SlotMachine()
    machine.apply(LoadRequested(A))
    assert machine.apply(LoadFailed("cancelled", given_up=True)) == [Publish(SlotState.EMPTY)]
    assert machine.apply(LoadRequested(A))


@pytest.mark.parametrize("late", [LoadDone(), LoadFailed("x"), Unloaded(), WorkerDied("x", 1.0)])
def test_late_news_from_a_worker_is_nothing_after_the_end(late: Event) -> None:
    machine = machine_after(LoadRequested(A), Drain())
    assert machine.apply(late) == []
    assert state_of(machine) is SlotState.SHUTTING_DOWN


def test_losing_ownership_fences_first_and_leaves_the_generation_to_the_new_owner() -> None:
    machine = ready()
    machine.apply(TurnStarted(1))
    instructions = machine.apply(OwnerLost("lease taken over"))
    assert instructions[0] == Publish(SlotState.LOST_OWNER)
    assert BumpGeneration not in kinds(instructions)
    assert FailWaiters("NOT_OWNER", "lease taken over") in instructions
    assert kinds(instructions)[-1] is StopWorker
    assert machine.apply(OwnerLost("again")) == []
    assert machine.apply(StateUntrusted("late")) == []


# --- invalid transitions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "event"),
    [
        (SlotMachine(), LoadDone()),
        (SlotMachine(), LoadFailed("x")),
        (SlotMachine(), Unloaded()),
        (SlotMachine(), TurnStarted(1)),
        (SlotMachine(), TurnEnded(1)),
        (SlotMachine(), SwitchRequested(A)),
        (SlotMachine(), IdleExpired()),
        (SlotMachine(), GraceExpired()),
        (SlotMachine(), StateUntrusted("x")),
        (ready(), LoadRequested(B)),
        (ready(), SwitchRequested(A)),
        (machine_after(LoadRequested(A)), LoadRequested(A)),
        (machine_after(LoadRequested(A)), UnloadRequested()),
        (machine_after(LoadRequested(A)), TurnStarted(1)),
        (machine_after(LoadRequested(A), LoadDone(), TurnStarted(1)), UnloadRequested()),
        (machine_after(LoadRequested(A), LoadDone(), TurnStarted(1)), SwitchRequested(B)),
        (machine_after(LoadRequested(A), LoadDone(), TurnStarted(1)), IdleExpired()),
        (machine_after(LoadRequested(A), LoadDone(), TurnStarted(1)), TurnStarted(1)),
        (machine_after(Drain()), LoadRequested(A)),
        (machine_after(OwnerLost("x")), LoadRequested(A)),
    ],
)
def test_an_invalid_event_is_refused_and_changes_nothing(
    machine: SlotMachine, event: Event
) -> None:
    before = (machine.state, machine.model, machine.running, machine.story)
    with pytest.raises(InvalidTransition) as refused:
        machine.apply(event)
    assert refused.value.state is machine.state
    assert (machine.state, machine.model, machine.running, machine.story) == before


def test_a_refusal_carries_the_recent_story() -> None:
    machine = ready()
    for op_id in range(20):
        machine.apply(TurnStarted(op_id))
        machine.apply(TurnEnded(op_id))
    with pytest.raises(InvalidTransition, match=r"TurnEnded\(op_id=19\) → READY") as refused:
        machine.apply(Unloaded())
    assert len(refused.value.story) == 10


# --- whatever happens ------------------------------------------------------------------------


class AnySlot(RuleBasedStateMachine):
    """Drives the machine as a fleet would, with a client's view that moves only at Publish."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = SlotMachine(QuarantineLedger(deaths=2), max_running_turns=2)
        self.generation = 1
        self.visible = SlotState.EMPTY
        self.minted = 0  # generation under which handles of what is resident were minted
        self.worker_holds: SlotModel | None = None
        self.now_s = 0.0
        self.next_op = 0
        self.stopped = False

    def carry_out(self, event: Event) -> list[Instruction]:
        before = self.machine.state
        instructions = self.machine.apply(event)
        bumps = [i for i in instructions if isinstance(i, BumpGeneration)]
        assert len(bumps) <= 1
        if bumps:
            assert instructions[0] == bumps[0]
        if any(
            isinstance(i, (EvictSessions, SendUnload, RestartWorker)) for i in instructions
        ) and not isinstance(event, OwnerLost):
            assert bumps
        for instruction in instructions:
            self.carry_out_one(instruction)
        assert self.visible is self.machine.state
        if before in VACANT and self.machine.state is SlotState.LOADING:
            assert bumps
        return instructions

    def carry_out_one(self, instruction: Instruction) -> None:
        match instruction:
            case BumpGeneration():
                self.generation += 1
            case SendLoad(model):
                assert self.worker_holds is None
                assert not self.machine.running
                self.worker_holds = model
            case SendUnload():
                assert self.worker_holds is not None
                assert not self.machine.running
            case RestartWorker():
                assert not self.stopped
                self.worker_holds = None
            case StopWorker():
                self.stopped = True
            case Publish(state):
                if self.visible in RESIDENT and state not in RESIDENT | FINAL:
                    assert self.generation > self.minted
                if state is SlotState.READY and self.visible not in RESIDENT:
                    self.minted = self.generation
                self.visible = state

    def accept_or_refuse(self, event: Event, valid: bool) -> None:
        if valid:
            self.carry_out(event)
        else:
            with pytest.raises(InvalidTransition):
                self.machine.apply(event)

    @rule(model=st.sampled_from([A, B]))
    def load(self, model: SlotModel) -> None:
        blocked = self.machine.ledger.is_quarantined(model.digest)
        self.accept_or_refuse(LoadRequested(model), self.machine.state in VACANT and not blocked)

    @rule(model=st.sampled_from([A, B]))
    def switch(self, model: SlotModel) -> None:
        blocked = self.machine.ledger.is_quarantined(model.digest)
        valid = self.machine.state is SlotState.READY and self.machine.model != model
        self.accept_or_refuse(SwitchRequested(model), valid and not blocked)

    @rule()
    def unload(self) -> None:
        valid = self.machine.state in VACANT | {SlotState.READY}
        self.accept_or_refuse(UnloadRequested(), valid)

    @rule()
    def idle(self) -> None:
        self.accept_or_refuse(IdleExpired(), self.machine.state is SlotState.READY)

    @precondition(lambda self: self.machine.state is SlotState.LOADING)
    @rule(works=st.booleans())
    def loaded(self, works: bool) -> None:
        if not works:
            self.worker_holds = None
        self.carry_out(LoadDone() if works else LoadFailed("bad file"))

    @precondition(lambda self: self.machine.state is SlotState.UNLOADING)
    @rule()
    def unloaded(self) -> None:
        self.worker_holds = None
        self.carry_out(Unloaded())

    @precondition(lambda self: self.machine.state is SlotState.SWITCHING)
    @rule(works=st.booleans())
    def switched(self, works: bool) -> None:
        if self.worker_holds != self.machine.model:
            self.worker_holds = None
            self.carry_out(Unloaded())
        else:
            self.loaded(works)

    @rule()
    def start_turn(self) -> None:
        self.next_op += 1
        self.accept_or_refuse(TurnStarted(self.next_op), self.machine.admits_turn)

    @precondition(lambda self: self.machine.running)
    @rule(data=st.data())
    def end_turn(self, data: st.DataObject) -> None:
        op_id = data.draw(st.sampled_from(sorted(self.machine.running)))
        self.carry_out(TurnEnded(op_id))

    @rule(after_s=st.sampled_from([1.0, 10_000.0]))
    def die(self, after_s: float) -> None:
        self.now_s += after_s
        running = self.machine.running
        instructions = self.carry_out(WorkerDied("SIGSEGV", self.now_s))
        failed = [i for i in instructions if isinstance(i, FailRunning)]
        assert [set(i.op_ids) for i in failed] == ([set(running)] if running else [])

    @precondition(lambda self: self.machine.state in RESIDENT)
    @rule()
    def distrust(self) -> None:
        self.carry_out(StateUntrusted("bookkeeping"))
        assert not self.machine.running

    @rule(model=st.sampled_from([A, B]), on=st.booleans())
    def quarantine(self, model: SlotModel, on: bool) -> None:
        self.carry_out(QuarantineSet(model.digest) if on else QuarantineCleared(model.digest))
        assert self.machine.ledger.is_quarantined(model.digest) is on

    @precondition(lambda self: self.next_op > 8)
    @rule(grace_ends=st.booleans())
    def drain(self, grace_ends: bool) -> None:
        self.carry_out(Drain())
        if grace_ends and self.machine.state is SlotState.SHUTTING_DOWN:
            self.carry_out(GraceExpired())
            assert self.stopped

    @precondition(lambda self: self.next_op > 8)
    @rule()
    def lose_owner(self) -> None:
        self.carry_out(OwnerLost("lease"))
        assert self.stopped

    @invariant()
    def only_resident_models_run(self) -> None:
        machine = self.machine
        if machine.running:
            assert machine.state in {SlotState.BUSY, SlotState.SHUTTING_DOWN}
            assert machine.model == self.worker_holds
        if machine.state is SlotState.BUSY:
            assert machine.running
        if machine.state is SlotState.READY:
            assert not machine.running

    @invariant()
    def a_vacant_slot_holds_nothing(self) -> None:
        assert (self.machine.model is None) == (
            self.machine.state in VACANT
            or self.machine.state is SlotState.LOST_OWNER
            or (self.machine.state is SlotState.SHUTTING_DOWN and self.stopped)
        )
        if self.machine.state in VACANT:
            assert self.worker_holds is None

    @invariant()
    def a_quarantined_slot_holds_a_quarantined_model(self) -> None:
        if self.machine.state is SlotState.QUARANTINED:
            assert self.machine.last_model is not None
            assert self.machine.ledger.is_quarantined(self.machine.last_model.digest)


TestAnySlot = AnySlot.TestCase
TestAnySlot.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
