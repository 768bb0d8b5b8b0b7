"""The slot's state machine: events in, instructions out, in the order they must be carried out.

Owns which model is resident, which operations run and what is quarantined. Does no I/O, reads no
clock and knows no process, socket or client; the generation's number is kept elsewhere.

``Publish`` is the only point at which clients may see a state. ``BumpGeneration``, where there is
one, comes first, so that no handle of the old generation can be used on what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

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

STORY_LENGTH = 10

VACANT = frozenset({SlotState.EMPTY, SlotState.IDLE, SlotState.FAILED, SlotState.QUARANTINED})
RESIDENT = frozenset({SlotState.READY, SlotState.BUSY})
FINAL = frozenset({SlotState.SHUTTING_DOWN, SlotState.LOST_OWNER})


class InvalidTransition(RuntimeError):
    """An event that this state doesn't allow: a fault of the caller's, told with its story."""

    def __init__(self, state: SlotState, event: Event, why: str, story: Iterable[str]) -> None:
        self.state = state
        self.event = event
        self.story = tuple(story)
        told = "; ".join(self.story) or "nothing happened before"
        super().__init__(f"{event} is not valid in {state.value}: {why}. Before: {told}")


class QuarantineLedger:
    """Which models killed their worker too often: ``deaths`` times within ``window_s`` seconds.

    A quarantined digest stays so until it is cleared. One ledger may serve several slots.
    """

    def __init__(
        self, *, deaths: int = 3, window_s: float = 600.0, quarantined: Iterable[str] = ()
    ) -> None:
        self._limit = deaths
        self._window_s = window_s
        self._deaths: dict[str, deque[float]] = {}
        self._quarantined = set(quarantined)

    @property
    def quarantined(self) -> frozenset[str]:
        return frozenset(self._quarantined)

    def is_quarantined(self, digest: str) -> bool:
        return digest in self._quarantined

    def record_death(self, digest: str, at_s: float) -> bool:
        """Count a death of the worker that held this model; whether it is quarantined now."""
        deaths = self._deaths.setdefault(digest, deque(maxlen=self._limit))
        deaths.append(at_s)
        if len(deaths) == self._limit and at_s - deaths[0] <= self._window_s:
            self.quarantine(digest)
        return self.is_quarantined(digest)

    def quarantine(self, digest: str) -> None:
        self._quarantined.add(digest)

    def clear(self, digest: str) -> bool:
        """Forget its deaths too; whether it was quarantined."""
        self._deaths.pop(digest, None)
        was = digest in self._quarantined
        self._quarantined.discard(digest)
        return was


class SlotMachine:
    """State of one slot. ``apply`` either makes a whole transition or raises and changes nothing.

    ``model`` is the one that is resident or on its way in, None when vacant; ``last_model`` is
    what a vacant slot held or failed to hold; ``running`` are operations that hold the slot.
    """

    def __init__(
        self, ledger: QuarantineLedger | None = None, *, max_running_turns: int = 1
    ) -> None:
        self.ledger = ledger if ledger is not None else QuarantineLedger()
        self.state = SlotState.EMPTY
        self.model: SlotModel | None = None
        self.last_model: SlotModel | None = None
        self.last_cause = ""  # of the latest failure, death or eviction
        self._running: set[int] = set()
        self._lost: set[int] = set()  # ended by FailRunning; their callers still unwind
        self._max_running = max_running_turns
        self._after_unload = SlotState.EMPTY
        self._worker_stopped = False
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._running)

    @property
    def story(self) -> tuple[str, ...]:
        """The latest transitions, oldest first."""
        return tuple(self._story)

    @property
    def admits_turn(self) -> bool:
        return self.state in RESIDENT and len(self._running) < self._max_running

    @property
    def admits_exclusive(self) -> bool:
        """Whether load, switch, unload or restore may begin: nothing runs, nothing is changing."""
        return self.state in VACANT or self.state is SlotState.READY

    def apply(self, event: Event) -> list[Instruction]:
        """Raises InvalidTransition, with what led here, for what this state doesn't allow."""
        before = self.state
        instructions = _HANDLERS[type(event)](self, event)
        self._story.append(f"{before.value} + {event} → {self.state.value}")
        return instructions

    def checkpoint(self) -> Callable[[], None]:
        """What undoes the next ``apply``, where its first instruction can't be carried out.

        For requests only: what has happened, such as a death, can't be undone.
        """
        kept = (self.state, self.model, self.last_model, self.last_cause, self._after_unload)
        story = tuple(self._story)

        def restore() -> None:
            self.state, self.model, self.last_model, self.last_cause, self._after_unload = kept
            self._story = deque(story, maxlen=STORY_LENGTH)

        return restore

    @property
    def _load_was_sent(self) -> bool:
        if self.state is SlotState.SWITCHING:
            return self._after_unload is SlotState.LOADING
        return self.state is SlotState.LOADING

    # --- helpers: they don't raise once state has changed ---

    def _refuse(self, event: Event, why: str) -> InvalidTransition:
        return InvalidTransition(self.state, event, why, self._story)

    def _enter(self, state: SlotState) -> list[Instruction]:
        self.state = state
        return [Publish(state)]

    def _vacate(self, state: SlotState) -> list[Instruction]:
        self.last_model = self.model or self.last_model
        self.model = None
        return self._enter(state)

    def _lose_running(self, cause: str) -> list[Instruction]:
        if not self._running:
            return []
        lost = tuple(sorted(self._running))
        self._lost |= self._running
        self._running.clear()
        return [FailRunning(lost, cause)]

    def _begin_unload(self, cause: str, then: SlotState) -> list[Instruction]:
        self._after_unload = then
        self.last_cause = cause
        return [
            BumpGeneration(cause),
            *self._lose_running(cause),
            EvictSessions(cause),
            FailWaiters("GENERATION_STALE", cause),
            SendUnload(),
            *self._enter(SlotState.UNLOADING),
        ]

    def _check_loadable(self, event: Event, model: SlotModel) -> None:
        if self.ledger.is_quarantined(model.digest):
            raise self._refuse(event, f"{model.name} is quarantined")

    # --- loading, switching, unloading ---

    def _owner_taken_over(self, event: OwnerTakenOver) -> list[Instruction]:
        if self._story:
            raise self._refuse(event, "ownership is taken before anything else happens")
        return [BumpGeneration(event.cause), Publish(self.state)]

    def _load_requested(self, event: LoadRequested) -> list[Instruction]:
        if self.state not in VACANT:
            raise self._refuse(event, "a load needs a vacant slot")
        self._check_loadable(event, event.model)
        self.model = event.model
        cause = f"load {event.model.name}"
        return [BumpGeneration(cause), SendLoad(event.model), *self._enter(SlotState.LOADING)]

    def _switch_requested(self, event: SwitchRequested) -> list[Instruction]:
        if self.state is not SlotState.READY or self.model is None:
            raise self._refuse(event, "a switch needs a resident model and nothing running")
        if event.model == self.model:
            raise self._refuse(event, "that model is resident")
        self._check_loadable(event, event.model)
        cause = f"switch from {self.model.name} to {event.model.name}"
        self.last_model, self.model = self.model, event.model
        self.last_cause = cause
        self._after_unload = SlotState.SWITCHING
        return [
            BumpGeneration(cause),
            EvictSessions(cause),
            FailWaiters("GENERATION_STALE", cause),
            SendUnload(),
            *self._enter(SlotState.SWITCHING),
        ]

    def _load_done(self, event: LoadDone) -> list[Instruction]:
        if self.state in FINAL:
            return []
        if not self._load_was_sent:
            raise self._refuse(event, "nothing is being loaded")
        return self._enter(SlotState.READY)

    def _load_failed(self, event: LoadFailed) -> list[Instruction]:
        if self.state in FINAL:
            return []
        if not self._load_was_sent:
            raise self._refuse(event, "nothing is being loaded")
        self.last_cause = event.reason
        if event.given_up:
            return self._vacate(SlotState.EMPTY)
        failed = FailWaiters("MODEL_LOAD_FAILED", event.reason)
        return [failed, *self._vacate(SlotState.FAILED)]

    def _unload_requested(self, event: UnloadRequested) -> list[Instruction]:
        if self.state in VACANT:  # idempotent; a quarantine isn't lifted by it
            if self.state in (SlotState.EMPTY, SlotState.QUARANTINED):
                return []
            return self._enter(SlotState.EMPTY)
        if self.state is not SlotState.READY:
            raise self._refuse(event, "an unload needs a slot with nothing running")
        return self._begin_unload(event.cause, SlotState.EMPTY)

    def _idle_expired(self, event: IdleExpired) -> list[Instruction]:
        if self.state is not SlotState.READY:
            raise self._refuse(event, "only a resident model with nothing running is idle")
        return self._begin_unload("idle release", SlotState.IDLE)

    def _unloaded(self, event: Unloaded) -> list[Instruction]:
        if self.state in FINAL:
            return []
        if self.state is SlotState.UNLOADING:
            return self._vacate(self._after_unload)
        if self.state is SlotState.SWITCHING and self._after_unload is SlotState.SWITCHING:
            assert self.model is not None
            self._after_unload = SlotState.LOADING  # the second half of the switch
            return [SendLoad(self.model)]
        raise self._refuse(event, "nothing is being unloaded")

    # --- operations ---

    def _turn_started(self, event: TurnStarted) -> list[Instruction]:
        if self.state not in RESIDENT:
            raise self._refuse(event, "a turn needs a resident model")
        if event.op_id in self._running or event.op_id in self._lost:
            raise self._refuse(event, "an operation runs once")
        if len(self._running) >= self._max_running:
            raise self._refuse(event, f"{self._max_running} may run at a time")
        self._running.add(event.op_id)
        return [] if self.state is SlotState.BUSY else self._enter(SlotState.BUSY)

    def _turn_ended(self, event: TurnEnded) -> list[Instruction]:
        if event.op_id in self._lost:  # it was ended for its caller, who now unwinds
            self._lost.discard(event.op_id)
            return []
        if event.op_id not in self._running:
            raise self._refuse(event, "it isn't running")
        self._running.discard(event.op_id)
        if self._running:
            return []
        if self.state is SlotState.SHUTTING_DOWN:
            return self._stop("drain")
        return self._enter(SlotState.READY)

    # --- faults ---

    def _state_untrusted(self, event: StateUntrusted) -> list[Instruction]:
        if self.state in FINAL:
            return [] if self._worker_stopped else self._stop(event.cause)
        if self.state is SlotState.UNLOADING:
            return []  # a second witness: it is going already
        if self.state not in RESIDENT:
            raise self._refuse(event, "no session's state is resident")
        return self._begin_unload(event.cause, SlotState.EMPTY)

    def _worker_died(self, event: WorkerDied) -> list[Instruction]:
        if self.state in FINAL:
            return [] if self._worker_stopped else self._stop(event.cause)
        self.last_cause = event.cause
        loading = self.state in (SlotState.LOADING, SlotState.SWITCHING)
        # While a switch still unloads, it is the old model that the worker held.
        held = self.model if self._load_was_sent or not loading else self.last_model
        quarantined = False
        if self.model is not None and held is not None:
            quarantined = self.ledger.record_death(held.digest, event.at_s) and held == self.model
        if quarantined:
            state = SlotState.QUARANTINED
        elif loading:
            state = SlotState.FAILED
        else:
            state = self.state if self.state in VACANT else SlotState.EMPTY
        instructions: list[Instruction] = [
            BumpGeneration(event.cause),
            *self._lose_running(event.cause),
            EvictSessions(event.cause),
            FailWaiters("GENERATION_STALE", event.cause),
        ]
        if loading or quarantined:
            reason = "MODEL_QUARANTINED" if quarantined else "MODEL_LOAD_FAILED"
            instructions.append(FailWaiters(reason, event.cause))
        return [*instructions, RestartWorker(event.cause), *self._vacate(state)]

    def _quarantine_set(self, event: QuarantineSet) -> list[Instruction]:
        self.ledger.quarantine(event.digest)
        if self.state in VACANT and self.last_model and self.last_model.digest == event.digest:
            return self._enter(SlotState.QUARANTINED)
        return []

    def _quarantine_cleared(self, event: QuarantineCleared) -> list[Instruction]:
        self.ledger.clear(event.digest)
        if (
            self.state is SlotState.QUARANTINED
            and self.last_model
            and self.last_model.digest == event.digest
        ):
            return self._enter(SlotState.EMPTY)
        return []

    # --- the end ---

    def _stop(self, cause: str) -> list[Instruction]:
        """Nothing may run any more: give up what is resident and end the worker."""
        self._worker_stopped = True
        instructions: list[Instruction] = []
        if self.model is not None or self._running:
            instructions = [
                BumpGeneration(cause),
                *self._lose_running(cause),
                EvictSessions(cause),
            ]
        self.last_model, self.model = self.model or self.last_model, None
        return [*instructions, StopWorker(cause)]

    def _drain(self, event: Drain) -> list[Instruction]:
        if self.state in FINAL:
            return []
        self.state = SlotState.SHUTTING_DOWN
        told: list[Instruction] = [
            FailWaiters("SHUTTING_DOWN", "drain"),
            Publish(SlotState.SHUTTING_DOWN),
        ]
        if self._running:
            return told  # they may finish; the last one's end stops the worker
        stop = self._stop("drain")
        bump = [step for step in stop if isinstance(step, BumpGeneration)]
        return [*bump, *told, *(step for step in stop if step not in bump)]

    def _grace_expired(self, event: GraceExpired) -> list[Instruction]:
        if self.state is SlotState.LOST_OWNER:
            return []
        if self.state is not SlotState.SHUTTING_DOWN:
            raise self._refuse(event, "nothing is draining")
        return [] if self._worker_stopped else self._stop("the drain's grace is over")

    def _owner_lost(self, event: OwnerLost) -> list[Instruction]:
        """Fence first. No bump: the data root is another's now, and taking it over was its bump."""
        if self.state is SlotState.LOST_OWNER:
            return []
        self.last_cause = event.cause
        self._worker_stopped = True
        lost = self._lose_running(event.cause)
        return [
            *self._vacate(SlotState.LOST_OWNER),
            *lost,
            FailWaiters("NOT_OWNER", event.cause),
            EvictSessions(event.cause),
            StopWorker(event.cause),
        ]


_HANDLERS: dict[type, Callable[[SlotMachine, Any], list[Instruction]]] = {
    OwnerTakenOver: SlotMachine._owner_taken_over,
    LoadRequested: SlotMachine._load_requested,
    LoadDone: SlotMachine._load_done,
    LoadFailed: SlotMachine._load_failed,
    TurnStarted: SlotMachine._turn_started,
    TurnEnded: SlotMachine._turn_ended,
    SwitchRequested: SlotMachine._switch_requested,
    UnloadRequested: SlotMachine._unload_requested,
    Unloaded: SlotMachine._unloaded,
    IdleExpired: SlotMachine._idle_expired,
    StateUntrusted: SlotMachine._state_untrusted,
    WorkerDied: SlotMachine._worker_died,
    QuarantineSet: SlotMachine._quarantine_set,
    QuarantineCleared: SlotMachine._quarantine_cleared,
    Drain: SlotMachine._drain,
    GraceExpired: SlotMachine._grace_expired,
    OwnerLost: SlotMachine._owner_lost,
}
