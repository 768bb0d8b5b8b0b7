"""One backend's slot, under its operations: who holds it, what the worker is sent, how it ends.

Carries out what the pure slot machine decides, in its order: the generation is durable before any
client can see the new state. Knows no gRPC, no engine, and not what a model is loaded for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from modeld.shared.capacity import (
    Resolution,
)
from modeld.shared.errors import (
    ContextOverflow,
    ModeldError,
    NotOwner,
    SessionFatal,
    ShuttingDown,
    WorkerUnavailable,
)
from modeld.shared.messages import (
    ChunkOut,
    FinalOut,
    Heartbeat,
    Payload,
    Status,
)
from modeld.supervisor.awaiting import see_through
from modeld.supervisor.config import Config
from modeld.supervisor.durable_sessions import DurableSessions
from modeld.supervisor.events import EventBus
from modeld.supervisor.fleet import Death, WorkerKeeper
from modeld.supervisor.generation import GenerationStore
from modeld.supervisor.holdings import Holdings
from modeld.supervisor.idle import IdleTimer
from modeld.supervisor.lifecycle import WorkerState
from modeld.supervisor.link import Operation
from modeld.supervisor.models.store import ModelStore
from modeld.supervisor.planning import Planning
from modeld.supervisor.queue import Hold, TurnQueue
from modeld.supervisor.sessions import Session, SessionRegistry
from modeld.supervisor.slot import VACANT, QuarantineLedger, SlotMachine
from modeld.supervisor.slot_events import (
    BumpGeneration,
    Drain,
    Event,
    EvictSessions,
    FailWaiters,
    GraceExpired,
    IdleExpired,
    LoadRequested,
    OwnerLost,
    Publish,
    QuarantineCleared,
    SlotState,
    StateUntrusted,
    SwitchRequested,
    TurnEnded,
    TurnStarted,
    Unloaded,
    UnloadRequested,
    WorkerDied,
)
from modeld.supervisor.slot_plan import Resident, SlotPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")
Report = Callable[[str, float], Awaitable[None]]
OnData = Callable[[Payload], Awaitable[None]]
Adopt = Callable[[], None]
OnPosition = Callable[[int, str, float], None]

DETACH_AFTER_S = 60.0
# A stream may run ahead of its reader by this many chunks; more are granted in halves.
CREDIT_CHUNKS = 64
GRANT_CHUNKS = 32
# Events that ask for something, which may be refused; all others tell what has happened.
_REQUESTS = (LoadRequested, SwitchRequested, UnloadRequested, IdleExpired)


@dataclass(frozen=True)
class Caller:
    """How a call waits: its deadline on the loop's clock (None: none) and who is told."""

    deadline: float | None = None
    no_wait: bool = False
    on_position: OnPosition | None = None


async def ignore_progress(_stage: str, _fraction: float) -> None:
    return None


class SlotCore:
    """What every operation on a slot goes through. All methods run on the daemon's loop."""

    def __init__(
        self,
        backend: str,
        *,
        config: Config,
        store: ModelStore,
        generations: GenerationStore,
        bus: EventBus,
        planning: Planning,
        holdings: Holdings | None = None,
        durable: DurableSessions | None = None,
    ) -> None:
        self.backend = backend
        self.config = config
        self._store = store
        self._generations = generations
        self._bus = bus
        self.planning = planning
        self.plan = SlotPlan(config, store, planning, holdings)
        self.keeper: WorkerKeeper  # set by attach_keeper, which the daemon calls at once
        self.quarantine = QuarantineLedger()
        # Beside all streams' turns goes one operation that is no session's.
        self.machine = SlotMachine(self.quarantine, max_running_turns=config.batch_streams + 1)
        self.queue = TurnQueue(config.queue_limit, max_beside=config.batch_streams)
        self.sessions = SessionRegistry(
            backend, session_ttl_s=config.session_ttl_s, detach_after_s=DETACH_AFTER_S
        )
        self.sessions.at_work = self.queue.sessions
        self.durable = durable or DurableSessions(config.data_root)
        self.durable.join(self.sessions)
        self.idle = IdleTimer(config.idle_release_s)
        self.resident: Resident | None = None
        self.last_fatal = ""
        self.latest: Resolution | None = None  # of the latest opened session
        self.placing = asyncio.Lock()  # contexts are planned, made and parked one at a time
        # RAM of the cold store as an answer told it, and the heartbeat that was the last one then.
        self._cold_told: tuple[int, Heartbeat | None] = (0, None)
        self._op_ids = itertools.count(1)
        self._background: set[asyncio.Task[None]] = set()
        self.sessions.bumped(generations.current, generations.last_cause)

    def attach_keeper(self, keeper: WorkerKeeper) -> None:
        self.keeper = keeper

    # --- the slot machine's instructions ---------------------------------------------------

    def apply(self, event: Event) -> None:
        """Feed the machine and carry out its instructions, in order.

        What it says to send to the worker is sent by the method that fed the event, which awaits
        the answer; what runs when a worker dies is failed by the keeper right after this.
        Where the generation can't be made durable, a request is undone and its error raised.
        """
        undo = self.machine.checkpoint()
        for instruction in self.machine.apply(event):
            if isinstance(instruction, BumpGeneration):
                try:
                    self._bump(instruction.cause)
                except (ModeldError, OSError) as error:
                    if isinstance(event, _REQUESTS):
                        undo()
                        raise
                    # It happened all the same. Nothing is loaded again before a bump succeeds.
                    logger.error("no new generation for %r: %s", instruction.cause, error)
            elif isinstance(instruction, EvictSessions):
                self.sessions.evict()
                self.queue.release_parked()
                self.latest = None
                self.plan.reset()
                self.idle.clear()
            elif isinstance(instruction, FailWaiters):
                self._fail_waiters(instruction)
            elif isinstance(instruction, Publish):
                self._emit("slot", state=instruction.state.name, cause=self.machine.last_cause)

    def _bump(self, cause: str) -> None:
        generation = self._generations.bump(cause)
        self.sessions.bumped(generation, cause)
        self._emit("generation", cause=cause)

    def _fail_waiters(self, instruction: FailWaiters) -> None:
        cause = instruction.cause
        if instruction.reason == "GENERATION_STALE":
            before = self.sessions.previous
            self.queue.fail_waiters(lambda: self.sessions.stale(before))
        elif instruction.reason == "SHUTTING_DOWN":
            self.queue.close(
                lambda: ShuttingDown(
                    "The daemon is draining. Start it again, or retry later.", retry_after_s=5.0
                )
            )
        elif instruction.reason == "NOT_OWNER":
            self.queue.close(lambda: NotOwner(f"This process lost the data root: {cause}."))
        # A failed load fails its own caller; others that wait find out by trying themselves.

    def _emit(self, kind: str, *, state: str = "", cause: str = "") -> None:
        self._bus.emit(
            kind,
            backend=self.backend,
            state=state,
            model=self.model_name,
            generation=self.sessions.generation,
            cause=cause,
        )

    def worker_died(self, death: Death) -> None:
        """Called by the keeper before it fails the running operations."""
        self.last_fatal = death.text
        self.resident = None
        self.apply(WorkerDied(death.text, time.monotonic()))

    def worker_changed(self) -> None:
        """Called by the keeper when the worker's state changed."""
        hello = self.keeper.hello
        if hello is not None and hello.build_digest != self.planning.build:
            self.planning.heard_of(hello.build_digest, hello.backend_version, hello.devices)
        self._emit("worker", state=self.keeper.state.name)

    def clear_quarantine(self, digest: str) -> bool:
        """Let a model be loaded again, and a worker that was given up be started again."""
        was = self.quarantine.is_quarantined(digest)
        self.apply(QuarantineCleared(digest))
        if self.keeper.state is WorkerState.FAILED:
            self.keeper.clear()
        return was

    def begin_drain(self) -> None:
        self.apply(Drain())

    def end_grace(self) -> None:
        self.apply(GraceExpired())

    def owner_lost(self, cause: str) -> None:
        self.apply(OwnerLost(cause))

    @property
    def model_name(self) -> str:
        return self.resident.model.name if self.resident else ""

    # --- running operations ----------------------------------------------------------------

    def goes_beside(self, session_id: str) -> bool:
        """Whether what the session does may run together with what batched sessions do."""
        return self.sessions.is_batched(session_id)

    @contextlib.asynccontextmanager
    async def hold(
        self,
        session: str,
        operation: str,
        caller: Caller,
        *,
        exclusive: bool = False,
        beside: bool | None = None,
        turn_id: str = "",
        keep_turn: bool = False,
    ) -> AsyncIterator[Hold]:
        """The slot for one operation. With ``turn_id`` and ``keep_turn`` it stays for that turn.

        ``beside``: together with what batched sessions do; None: if the session's may.
        """
        if beside is None:
            beside = not exclusive and self.goes_beside(session)
        hold = await self.queue.acquire(
            session=session,
            operation=operation,
            no_wait=caller.no_wait,
            deadline=caller.deadline,
            exclusive=exclusive,
            beside=beside,
            turn_id=turn_id,
            on_position=caller.on_position,
        )
        op_id = next(self._op_ids)
        kept = False
        try:
            if not exclusive:
                if self.machine.state in VACANT:
                    # The model went away between the grant and now.
                    raise self.sessions.stale(self.sessions.previous)
                self.apply(TurnStarted(op_id))
            self.idle.began()
            try:
                yield hold
                kept = bool(turn_id) and keep_turn
            finally:
                ended = time.monotonic()
                self.idle.ended(ended)
                self.sessions.used(session, ended)
                if not exclusive:
                    self.apply(TurnEnded(op_id))
        finally:
            if kept:
                hold.park(turn_id, self.config.turn_idle_s)
            else:
                hold.release()

    async def call(
        self,
        request: Payload,
        *,
        session: Session | None = None,
        on_data: OnData | None = None,
        credit: int = 0,
        adopt: Adopt | None = None,
    ) -> Payload:
        """Send one operation and see it through to its terminal, also when cancelled.

        ``adopt`` notes what the session is about from now on: called unless the worker refused,
        also where the caller is gone.

        Raises what the worker answered. A cancelled caller leaves only after the worker has
        stopped, so that the slot is never released while the engine still runs. The worker is
        quick to stop; if it isn't, its heartbeat limit ends it. A parked ``session`` gets a context
        first; raises SessionClosed, or GenerationStale, where it was closed or lost by then.
        """
        if session is not None:
            await self.ready(session)
            self.sessions.require(session)
        try:
            operation = self.keeper.call(self.sessions.generation, request, credit=credit)
        except WorkerUnavailable:
            await self.keeper.loss_known()  # it may have died this moment, and the session with it
            if session is not None:
                self.sessions.require(session)
            raise
        if session is not None:
            session.operations.add(operation)
        taken = 0
        try:
            while (payload := await operation.next()) is not None:
                if on_data is None:
                    continue
                await on_data(payload)
                if isinstance(payload, ChunkOut):
                    taken += 1
                    if taken == GRANT_CHUNKS:
                        operation.grant(taken)
                        taken = 0
            return await operation.result()
        except SessionFatal as error:
            self._engine_fatal(error)
            raise
        except ContextOverflow as error:
            if session is not None:  # the worker knows no plan
                error.metadata["planner"] = str(session.resolution.numbers.planner.tokens)
            raise
        finally:
            try:
                if not operation.ended:
                    operation.cancel()
                    await self._settle(operation)
            finally:
                if session is not None:
                    session.operations.discard(operation)
                    await _note_end(session, operation, adopt)

    def refuse_overtaken(self, generation: int) -> None:
        """Raises GenerationStale where the slot was reset since ``generation``.

        An answer may be read together with its worker's death: what it tells of is gone then.
        """
        if self.sessions.generation != generation:
            raise self.sessions.stale(generation)

    async def ready(self, session: Session) -> None:
        """See to what an operation of the session needs: a slot that parks gives it a context."""

    async def _settle(self, operation: Operation) -> None:
        """Wait for a cancelled operation's terminal, whatever happens to this task meanwhile."""
        await see_through(self._terminal(operation))

    async def _terminal(self, operation: Operation) -> None:
        try:
            await operation.result()
        except SessionFatal as error:
            self._engine_fatal(error)
        except ModeldError:
            logger.debug("cancelled operation ended with an error", exc_info=True)

    def _engine_fatal(self, error: SessionFatal) -> None:
        """The worker lives but its state can't be trusted: evict, and replace the process.

        After a death the keeper has evicted already, and nothing is resident any more.
        """
        if self.resident is None:
            return
        self.last_fatal = error.message
        self.resident = None
        self.apply(StateUntrusted(error.metadata.get("cause", "engine error")))
        self.spawn(self._replace_worker())

    async def _replace_worker(self) -> None:
        await self.keeper.recycle()
        if self.machine.state is SlotState.UNLOADING:
            self.apply(Unloaded())

    def spawn(self, work: Awaitable[None]) -> None:
        """Run in the background, keeping a reference until it ends."""

        async def run() -> None:
            try:
                await work
            except Exception:
                logger.exception("background work failed")

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def drain(self) -> None:
        """Wait for what runs in the background to end."""
        while self._background:
            await asyncio.wait(self._background)


async def _note_end(session: Session, operation: Operation, adopt: Adopt | None) -> None:
    """What the session holds after an ended operation, also where nobody was left to be told."""
    try:
        result = await operation.result()
    except ModeldError:
        return
    if isinstance(result, FinalOut | Status):
        session.resident, session.seen_tokens = result.resident, result.seen_tokens
    if adopt is not None:
        adopt()
