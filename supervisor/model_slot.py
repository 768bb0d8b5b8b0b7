"""One backend's slot: what is loaded, its sessions, its queue and its worker, put together.

Carries out what the pure slot machine decides, in its order: the generation is durable before any
client can see the new state. Knows no gRPC and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from modeld.shared.capabilities import Capability, parse_capability
from modeld.shared.capacity import (
    CapacityRequest,
    Companions,
    MachineReading,
    Resolution,
    SlotUse,
)
from modeld.shared.errors import (
    BackendMismatch,
    GenerationStale,
    ModeldError,
    ModelLoadFailed,
    ModelNotActive,
    ModelQuarantined,
    NotOwner,
    SessionFatal,
    ShuttingDown,
    SwitchRequired,
)
from modeld.shared.manifest import Identity
from modeld.shared.messages import (
    ChunkOut,
    CloseOp,
    CloseResult,
    LoadResult,
    OpenOp,
    OpenResult,
    Payload,
    Progress,
    UnloadOp,
)
from modeld.shared.planner.capacity import confirm
from modeld.supervisor.config import Config
from modeld.supervisor.events import EventBus
from modeld.supervisor.findings import check_context, check_load
from modeld.supervisor.fleet import Death, WorkerKeeper
from modeld.supervisor.generation import GenerationStore
from modeld.supervisor.idle import IdleTimer
from modeld.supervisor.lifecycle import WorkerState
from modeld.supervisor.link import Operation
from modeld.supervisor.models.store import ModelStore, StoredModel
from modeld.supervisor.planning import Planning, Question, allowed
from modeld.supervisor.queue import Hold, TurnQueue
from modeld.supervisor.sessions import Session, SessionRegistry, check_attach
from modeld.supervisor.slot import VACANT, QuarantineLedger, SlotMachine
from modeld.supervisor.slot_events import (
    BumpGeneration,
    Drain,
    Event,
    EvictSessions,
    FailWaiters,
    GraceExpired,
    IdleExpired,
    LoadDone,
    LoadFailed,
    LoadRequested,
    OwnerLost,
    Publish,
    QuarantineCleared,
    SlotModel,
    SlotState,
    StateUntrusted,
    SwitchRequested,
    TurnEnded,
    TurnStarted,
    Unloaded,
    UnloadRequested,
    WorkerDied,
)
from modeld.supervisor.slot_plan import NO_COMPANIONS, Resident, SlotPlan

logger = logging.getLogger(__name__)

T = TypeVar("T")
Report = Callable[[str, float], Awaitable[None]]
OnData = Callable[[Payload], Awaitable[None]]
OnPosition = Callable[[int, str, float], None]

DETACH_AFTER_S = 60.0
OPEN_RETRY_S = 600.0
# A stream may run ahead of its reader by this many chunks; more are granted in halves.
CREDIT_CHUNKS = 64
GRANT_CHUNKS = 32
# Events that ask for something, which may be refused; all others tell what has happened.
_REQUESTS = (LoadRequested, SwitchRequested, UnloadRequested, IdleExpired)


@dataclass(frozen=True)
class OpenRequest:
    model: str
    capacity: CapacityRequest
    session_key: str
    profile_id: str
    prompt_format: str


@dataclass(frozen=True)
class WhatIf:
    """A hypothetical question. ``machine`` None: this one; ``settings`` as if they were these."""

    request: CapacityRequest
    companions: Companions = NO_COMPANIONS
    machine: MachineReading | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Opened:
    session: Session
    attached: bool
    loaded: bool
    load_seconds: float
    queue_seconds: float


@dataclass(frozen=True)
class Caller:
    """How a call waits: its deadline on the loop's clock (None: none) and who is told."""

    deadline: float | None = None
    no_wait: bool = False
    on_position: OnPosition | None = None


async def _ignore_progress(_stage: str, _fraction: float) -> None:
    return None


class ModelSlot:
    """The slot of one backend. All methods run on the daemon's loop."""

    def __init__(
        self,
        backend: str,
        *,
        config: Config,
        store: ModelStore,
        generations: GenerationStore,
        bus: EventBus,
        planning: Planning,
    ) -> None:
        self.backend = backend
        self.config = config
        self._store = store
        self._generations = generations
        self._bus = bus
        self.planning = planning
        self.plan = SlotPlan(config, store, planning)
        self.keeper: WorkerKeeper  # set by attach_keeper, which the daemon calls at once
        self.quarantine = QuarantineLedger()
        self.machine = SlotMachine(self.quarantine)
        self.queue = TurnQueue(config.queue_limit)
        self.sessions = SessionRegistry(
            backend, session_ttl_s=config.session_ttl_s, detach_after_s=DETACH_AFTER_S
        )
        self.idle = IdleTimer(config.idle_release_s)
        self.resident: Resident | None = None
        self.last_fatal = ""
        self.latest: Resolution | None = None  # of the latest opened session
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
            before = self.sessions.generation - 1
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

    @contextlib.asynccontextmanager
    async def hold(
        self,
        session: str,
        operation: str,
        caller: Caller,
        *,
        exclusive: bool = False,
        turn_id: str = "",
        keep_turn: bool = False,
    ) -> AsyncIterator[Hold]:
        """The slot for one operation. With ``turn_id`` and ``keep_turn`` it stays for that turn."""
        hold = await self.queue.acquire(
            session=session,
            operation=operation,
            no_wait=caller.no_wait,
            deadline=caller.deadline,
            exclusive=exclusive,
            turn_id=turn_id,
            on_position=caller.on_position,
        )
        op_id = next(self._op_ids)
        kept = False
        try:
            if not exclusive:
                if self.machine.state in VACANT:
                    # The model went away between the grant and now.
                    raise self.sessions.stale(self.sessions.generation - 1)
                self.apply(TurnStarted(op_id))
            self.idle.began()
            try:
                yield hold
                kept = bool(turn_id) and keep_turn
            finally:
                self.idle.ended(time.monotonic())
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
    ) -> Payload:
        """Send one operation and see it through to its terminal, also when cancelled.

        Raises what the worker answered. A cancelled caller leaves only after the worker has
        stopped, so that the slot is never released while the engine still runs. The worker is
        quick to stop; if it isn't, its heartbeat limit ends it.
        """
        operation = self.keeper.call(self.sessions.generation, request, credit=credit)
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
        finally:
            if not operation.ended:
                operation.cancel()
                await self._settle(operation)
            if session is not None:
                session.operations.discard(operation)

    async def _settle(self, operation: Operation) -> None:
        """Wait for a cancelled operation's terminal, whatever happens to this task meanwhile."""
        waiting = asyncio.ensure_future(self._terminal(operation))
        cancelled = False
        while not waiting.done():
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError

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

    # --- load, switch, unload ----------------------------------------------------------------

    async def ensure_loaded(
        self,
        model: StoredModel,
        caller: Caller,
        report: Report = _ignore_progress,
        *,
        capacity: CapacityRequest | None = None,
        force_switch: bool = False,
        expected_generation: int | None = None,
    ) -> float:
        """Make ``model`` resident; the seconds the load took (0: it was resident).

        ``capacity`` is what a session will ask of it: it decides what goes to accelerators.

        Raises SwitchRequired, ModelLoadFailed, ModelQuarantined, InsufficientMemory,
        WorkerUnavailable, ModelBusy or GenerationStale.
        """
        started = time.monotonic()
        if capacity is None:
            capacity = CapacityRequest(k_type=self.config.k_type, v_type=self.config.v_type)
        if not self._is_resident(model):
            await self.planning.ensure_asked(model, capacity)
        while True:
            try:
                return await self._ensure_loaded(
                    model, caller, report, capacity, force_switch, expected_generation
                )
            except GenerationStale:
                # The slot was reset while this call waited; it has no handle that could be stale.
                if expected_generation is not None or time.monotonic() - started > OPEN_RETRY_S:
                    raise

    async def _ensure_loaded(
        self,
        model: StoredModel,
        caller: Caller,
        report: Report,
        capacity: CapacityRequest,
        force_switch: bool,
        expected_generation: int | None,
    ) -> float:
        if self._is_resident(model) and expected_generation is None:
            return 0.0
        self._refuse_switch(model, force_switch)
        async with self.hold("", "load", caller, exclusive=True):
            # Waiting may have changed everything: look again.
            if expected_generation is not None and expected_generation != self.sessions.generation:
                raise self.sessions.stale(expected_generation)
            if self._is_resident(model):
                return 0.0
            self._refuse_switch(model, force_switch)
            return await self._load(model, caller, report, capacity)

    def _is_resident(self, model: StoredModel) -> bool:
        return self.resident is not None and self.resident.model.digest == model.digest

    def _refuse_switch(self, model: StoredModel, force: bool) -> None:
        attached = self.sessions.attached(time.monotonic())
        if self.resident is None or force or not attached or self._is_resident(model):
            return
        raise SwitchRequired(
            f"{self.model_name!r} is resident with {len(attached)} open session(s), so "
            f"{model.name!r} can't be loaded behind their back. Close them, wait until they are "
            "idle, or call SwitchModel.",
            metadata={
                "resident_model": self.model_name,
                "requested_model": model.name,
                "sessions": len(attached),
                "generation": self.sessions.generation,
            },
        )

    async def _load(
        self, model: StoredModel, caller: Caller, report: Report, capacity: CapacityRequest
    ) -> float:
        started = time.monotonic()
        if self.quarantine.is_quarantined(model.digest):
            raise ModelQuarantined(
                f"{model.name!r} killed its worker repeatedly and isn't loaded again. Look at the "
                "worker's log, then clear it with ClearQuarantine or replace the model.",
                metadata={"model": model.name, "digest": model.digest, "cause": self.last_fatal},
            )
        await report("starting_worker", 0.0)
        await self.keeper.ready(caller.deadline)
        self._refuse_unloadable(model)
        switching = self.resident is not None
        # Refuse before anything is given up: with the resident model's memory counted as free.
        machine = await self.planning.read()
        question = self._question(model, capacity)
        planned = self.plan.resolve(question, machine)
        target = SlotModel(model.name, model.digest)
        if switching:
            self._give_up_resident(SwitchRequested(target))
            await self.call(UnloadOp())
            self.apply(Unloaded())
        else:
            self.apply(LoadRequested(target))

        async def on_data(payload: Payload) -> None:
            if isinstance(payload, Progress):
                await report(payload.stage, payload.fraction)

        digest, build = model.digest, self.planning.build
        quality = self.planning.evidence.wants_quality(digest, build, planned.placement)
        request = self.plan.load_op(model, planned, quality=quality)
        try:
            result = await self.call(request, on_data=on_data)
        except BaseException as error:
            if self.machine.state in (SlotState.LOADING, SlotState.SWITCHING):
                given_up = isinstance(error, asyncio.CancelledError)
                self.apply(LoadFailed(_cause(error), given_up))
                if given_up:
                    # The cancel may have come too late: what the worker loaded must go.
                    self.spawn(self._discard_load())
            raise
        assert isinstance(result, LoadResult)
        findings = check_load(model.facts, result, planned)
        self.resident = Resident(model, model.facts, result, planned, findings)
        self.plan.loaded(result, planned)
        self._tell_findings(findings)
        self.apply(LoadDone())
        self.idle.touch(time.monotonic())
        if result.quality is not None:
            await self.planning.quality_seen(digest, planned.placement, result.quality)
        return time.monotonic() - started

    def _refuse_unloadable(self, model: StoredModel) -> None:
        """The engine has said that it can't load this file: it isn't made to try."""
        known = self.planning.known_of(model.digest)
        if known.loader == "no":
            raise ModelLoadFailed(
                f"The engine refused the model {model.name!r}. It said: {known.words}.",
                metadata={
                    "cause": "engine",
                    "model": model.name,
                    "architecture": model.facts.architecture,
                    "backend_version": known.backend_version,
                },
            )

    def _tell_findings(self, findings: tuple[str, ...]) -> None:
        for finding in findings:
            logger.warning("%s: %s", self.model_name, finding)
            self._emit("finding", cause=finding)

    async def _discard_load(self) -> None:
        with contextlib.suppress(ModeldError):
            await self.call(UnloadOp())

    async def unload(self, caller: Caller, *, force: bool, cause: str = "unload") -> int | None:
        """Unload what is resident; how many sessions closed, or None if nothing was resident."""
        while self.resident is not None:
            try:
                return await self._unload_when_free(caller, force, cause)
            except GenerationStale:
                # The slot was reset while this call waited; it has no handle that could be stale.
                continue
        return None

    async def _unload_when_free(self, caller: Caller, force: bool, cause: str) -> int | None:
        async with self.hold("", "unload", caller, exclusive=True):
            if not self.model_name:  # another caller's unload came first
                return None
            attached = self.sessions.attached(time.monotonic())
            if attached and not force:
                raise SwitchRequired(
                    f"{self.model_name!r} has {len(attached)} open session(s). Close them, or "
                    "unload with force.",
                    metadata={"resident_model": self.model_name, "sessions": len(attached)},
                )
            return await self._unload(UnloadRequested(cause))

    def _give_up_resident(self, event: Event) -> None:
        resident, self.resident = self.resident, None
        try:
            self.apply(event)
        except BaseException:
            self.resident = resident  # nothing was given up
            raise

    async def _unload(self, event: Event) -> int:
        closed = len(self.sessions)
        self._give_up_resident(event)
        await self.call(UnloadOp())
        self.apply(Unloaded())
        return closed

    async def tick(self, now: float) -> None:
        """Time-outs: sessions whose time is up, and idle release. Called about once a second."""
        for session in self.sessions.expired(now):
            await self.close(session, why="session_ttl")
        if self.resident is None or not self.idle.due(now):
            return
        caller = Caller(no_wait=True)
        try:
            async with self.hold("", "idle release", caller, exclusive=True):
                if self.resident is not None:
                    logger.info("releasing idle model %s", self.model_name)
                    await self._unload(IdleExpired())
        except ModeldError as error:
            logger.warning("idle release didn't happen: %s", error)

    def find_model(self, name: str) -> StoredModel:
        """Raises ModelNotFound, InvalidRequest, DigestMismatch or BackendMismatch."""
        model = self._store.get(name)
        if model.record.type != self.backend:
            raise BackendMismatch(
                f"{name!r} is a {model.record.type} model, and this slot runs {self.backend}.",
                metadata={"model": name, "type": model.record.type, "backend": self.backend},
            )
        return model

    # --- planning ------------------------------------------------------------------------------

    def _question(
        self, model: StoredModel, request: CapacityRequest, companions: Companions = NO_COMPANIONS
    ) -> Question:
        return self.plan.question(
            model,
            request,
            resident=self._is_resident(model),
            occupied=self.resident is not None,
            companions=companions,
        )

    async def hypothetical(
        self, model: StoredModel, what: WhatIf
    ) -> tuple[Resolution, MachineReading]:
        """What opening a session now would be given, and from which readings; a refusal comes as
        an answer. Nothing is loaded for it.
        """
        config = self.config.with_settings(what.settings, "what_if") if what.settings else None
        await self.planning.ensure_asked(model, what.request, config)
        question = self._question(model, what.request, what.companions)
        machine = what.machine
        if machine is None:
            machine = await self.planning.read()
        else:  # nothing of this slot lives on that machine
            machine = allowed(machine, (config or self.config).devices)
            question = replace(question, use=SlotUse())
        question = replace(question, alternatives=self.plan.alternatives(model.facts))
        return self.planning.survey(question, machine, config), machine

    def identity(
        self,
        model: StoredModel,
        request: CapacityRequest,
        *,
        window: int,
        prompt_format: str,
        profile_id: str,
    ) -> Identity:
        """The identity of a session; ``runtime_digest`` is "" while the model isn't resident."""
        load = self.resident.load if self.resident and self._is_resident(model) else None
        return self.plan.identity(
            model,
            request,
            hello=self.keeper.hello,
            load=load,
            window=window,
            prompt_format=prompt_format,
            profile_id=profile_id,
        )

    # --- sessions ------------------------------------------------------------------------------

    async def open(
        self, request: OpenRequest, caller: Caller, report: Report = _ignore_progress
    ) -> Opened:
        """Open or attach a session, loading the model if policy allows."""
        started = time.monotonic()
        load_s = 0.0
        while True:
            model = self.find_model(request.model)
            try:
                attached = self._attach(request)
                if attached is not None:
                    return attached
                load_s += await self.ensure_loaded(model, caller, report, capacity=request.capacity)
                async with self.hold("", "open", caller) as hold:
                    # Waiting may have changed everything: look again.
                    attached = self._attach(request)
                    if attached is not None:
                        return attached
                    if not self._is_resident(model):
                        continue
                    waited_s = hold.waited_s
                    await report("opening", 1.0)
                    session = await self._open(model, request)
            except GenerationStale:
                # The slot was reset while this call waited; it has no handle that could be stale.
                if time.monotonic() - started > OPEN_RETRY_S:
                    raise
                continue
            return Opened(session, False, load_s > 0, load_s, waited_s)

    def _attach(self, request: OpenRequest) -> Opened | None:
        if not request.session_key:
            return None
        session = self.sessions.by_key(request.session_key)
        if session is None:
            return None
        check_attach(
            session,
            model=request.model,
            profile_id=request.profile_id,
            prompt_format=request.prompt_format,
            capacity=request.capacity,
        )
        session.attached = True
        session.used_at = time.monotonic()
        self.idle.touch(session.used_at)
        return Opened(session, True, False, 0.0, 0.0)

    async def _open(self, model: StoredModel, request: OpenRequest) -> Session:
        assert self.resident is not None
        load = self.resident.load
        await self._make_place()
        machine = await self.planning.read()
        planned = self.plan.resolve(self._question(model, request.capacity), machine)
        window = planned.numbers.effective.tokens
        identity = self.identity(
            model,
            request.capacity,
            window=window,
            prompt_format=request.prompt_format,
            profile_id=request.profile_id,
        )
        session_id = self.sessions.new_id()
        result = await self.call(
            OpenOp(
                session_id=session_id,
                prompt_format=identity.prompt_format,
                window=window,
                k_type=request.capacity.k_type,
                v_type=request.capacity.v_type,
                kv_digest=identity.kv_digest,
                runtime_digest=identity.runtime_digest,
                free_bytes=planned.free_bytes,
                compute_bytes=planned.compute_bytes if not planned.gpu_layers else 0,
            )
        )
        assert isinstance(result, OpenResult)
        findings = check_context(planned, result)
        self._tell_findings(findings)
        resolution = confirm(
            planned,
            window=result.window,
            slot_cells=result.slot_cells,
            kv_bytes=result.kv_bytes,
            compute_bytes=result.compute_bytes,
            findings=self.resident.findings + findings,
        )
        if not planned.gpu_layers:
            await self.planning.context_made(
                model.digest,
                request.capacity,
                result.window,
                result.kv_bytes,
                result.compute_bytes,
            )
        now = time.monotonic()
        session = Session(
            session_id=session_id,
            generation=self.sessions.generation,
            key=request.session_key,
            model=model.name,
            identity=identity,
            request=request.capacity,
            resolution=resolution,
            capabilities=capabilities_of(load),
            opened_at=now,
            used_at=now,
        )
        self.sessions.add(session)
        self.plan.count(result, len(self.sessions))
        self.latest = resolution
        self._bus.emit(
            "session",
            backend=self.backend,
            state="open",
            model=model.name,
            generation=session.generation,
            session_id=session_id,
        )
        return session

    async def _make_place(self) -> None:
        """Where all places are taken, close the detached session that was used least recently.

        What it held stays as reclaimable cache, which its key's next open finds.
        """
        if len(self.sessions) < self.config.max_sessions:
            return
        detached = self.sessions.detached(time.monotonic())
        if detached:
            oldest = min(detached, key=lambda session: session.used_at)
            await self.close(oldest, why="closed while detached, to make room for another session")

    @property
    def use(self) -> SlotUse:
        return self.plan.use

    async def close(self, session: Session, *, why: str, discard: bool = False) -> int:
        """Close a session; how many tokens stay behind as reclaimable cache.

        What runs for it is stopped; the worker closes it after that.
        """
        self.sessions.close(session, why)
        self.queue.release_parked(session.session_id)
        for operation in tuple(session.operations):
            operation.cancel()
        self._bus.emit(
            "session",
            backend=self.backend,
            state="closed",
            model=session.model,
            generation=session.generation,
            session_id=session.session_id,
            cause=why,
        )
        result = await self.call(CloseOp(session_id=session.session_id, discard=discard))
        assert isinstance(result, CloseResult)
        self.plan.count(result, len(self.sessions))
        return result.retained

    def require_active(self, model: StoredModel) -> Resident:
        """Raises ModelNotActive unless the model's content is resident, under whatever name."""
        if self.resident is None or self.resident.model.digest != model.digest:
            raise ModelNotActive(
                f"{model.name!r} isn't resident"
                + (f" ({self.model_name!r} is)" if self.resident else "")
                + ". Load it first, or set `load` in the request.",
                metadata={"model": model.name, "resident_model": self.model_name},
            )
        return self.resident

    async def drain(self) -> None:
        """Wait for what runs in the background to end."""
        while self._background:
            await asyncio.wait(self._background)


def capabilities_of(load: LoadResult) -> tuple[Capability, ...]:
    return tuple(parse_capability(name, text) for name, text in sorted(load.capabilities.items()))


def _cause(error: BaseException) -> str:
    if isinstance(error, ModeldError):
        return error.message
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
