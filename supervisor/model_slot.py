"""One backend's slot: what is loaded there, for which sessions, and on what plan.

Knows no gRPC and no engine; who may run what on the slot is the core's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from modeld.shared.capabilities import Capability, parse_capability
from modeld.shared.capacity import (
    AdapterUse,
    CapacityRequest,
    Companions,
    MachineReading,
    Resolution,
    SlotUse,
)
from modeld.shared.errors import (
    BackendMismatch,
    GenerationStale,
    InvalidRequest,
    ModeldError,
    ModelLoadFailed,
    ModelNotActive,
    ModelQuarantined,
    ShuttingDown,
    SwitchRequired,
    UnsupportedFeature,
)
from modeld.shared.host_memory import anonymous_bytes
from modeld.shared.manifest import Identity
from modeld.shared.messages import (
    CloseOp,
    CloseResult,
    LoadResult,
    OpenOp,
    Payload,
    Progress,
    RestoreResult,
    UnloadOp,
)
from modeld.shared.planner.remedies import use_after_switch
from modeld.supervisor.awaiting import see_through
from modeld.supervisor.context_slot import ContextSlot
from modeld.supervisor.durable_sessions import Resumed, Saved, refuse_unless_saved
from modeld.supervisor.findings import check_load
from modeld.supervisor.holdings import Held
from modeld.supervisor.models.store import StoredModel
from modeld.supervisor.planning import Question, allowed
from modeld.supervisor.sessions import Session, check_attach
from modeld.supervisor.slot import FINAL
from modeld.supervisor.slot_core import (
    CREDIT_CHUNKS,
    Adopt,
    Caller,
    OnData,
    Report,
    ignore_progress,
)
from modeld.supervisor.slot_events import (
    Event,
    IdleExpired,
    LoadDone,
    LoadFailed,
    LoadRequested,
    SlotModel,
    SlotState,
    SwitchRequested,
    Unloaded,
    UnloadRequested,
)
from modeld.supervisor.slot_plan import NO_COMPANIONS, Resident, host_buffers

logger = logging.getLogger(__name__)

OPEN_RETRY_S = 600.0
# Settings that decide where layers go, which a load carries out.
PLACING = {"placement", "gpu_layers", "devices", "tensor_split", "openvino_device"}


@dataclass(frozen=True)
class OpenRequest:
    model: str
    capacity: CapacityRequest
    session_key: str
    profile_id: str
    prompt_format: str
    overflow: str = "refuse"  # refuse | evict
    durable: bool = False  # saved at the end of each turn, and brought back from what was saved
    fresh: bool = False  # … but begun anew
    layout: str = "isolated"  # isolated | batched

    @property
    def alone(self) -> bool:
        """Whether opening it must run with nothing else: what is saved comes back before anyone who
        attaches by key can send a turn.
        """
        return self.layout != "batched" or self.durable


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
    resumed: Resumed | None = None  # of a durable session that was saved before


class ModelSlot(ContextSlot):
    """The slot of one backend. All methods run on the daemon's loop."""

    # --- load, switch, unload ----------------------------------------------------------------

    async def ensure_loaded(
        self,
        model: StoredModel,
        caller: Caller,
        report: Report = ignore_progress,
        *,
        capacity: CapacityRequest | None = None,
        force_switch: bool = False,
        expected_generation: int | None = None,
    ) -> float:
        """Make ``model`` resident; the seconds the load took (0: it was resident).

        ``capacity`` is what a session will ask of it: it decides what goes to accelerators, and
        the KV types where an engine compiles them in. None: a resident model will do as it is.

        Raises SwitchRequired, ModelLoadFailed, ModelQuarantined, InsufficientMemory,
        WorkerUnavailable, ModelBusy or GenerationStale.
        """
        started = time.monotonic()
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
        capacity: CapacityRequest | None,
        force_switch: bool,
        expected_generation: int | None,
    ) -> float:
        if self._is_resident(model, capacity) and expected_generation is None:
            return 0.0
        self._refuse_switch(model, capacity, force_switch)
        async with self.hold("", "load", caller, exclusive=True):
            # Waiting may have changed everything: look again.
            if expected_generation is not None and expected_generation != self.sessions.generation:
                raise self.sessions.stale(expected_generation)
            if self._is_resident(model, capacity):
                return 0.0
            self._refuse_switch(model, capacity, force_switch)
            if capacity is None:
                k_type, v_type = self.config.kv_types(self.backend)
                capacity = CapacityRequest(k_type=k_type, v_type=v_type)
            return await self._load(model, caller, report, capacity)

    @property
    def kv_types(self) -> tuple[str, str]:
        """Those of a session that asks for none: the settings', or those that are compiled in."""
        if self.resident is not None and self.backend == "openvino":
            return self.resident.kv_types
        return self.config.kv_types(self.backend)

    def _is_resident(self, model: StoredModel, capacity: CapacityRequest | None = None) -> bool:
        """Whether it is loaded, and serves such sessions as it is."""
        resident = self.resident
        if resident is None or resident.model.digest != model.digest:
            return False
        if capacity is not None and resident.adapters != capacity.adapters:
            return False
        # A model that OpenVINO runs is compiled for its KV types; others take them by session.
        if capacity is None or self.backend != "openvino":
            return True
        return resident.kv_types == (capacity.k_type, capacity.v_type)

    def _refuse_switch(
        self, model: StoredModel, capacity: CapacityRequest | None, force: bool
    ) -> None:
        attached = self.sessions.attached(time.monotonic())
        if self.resident is None or force or not attached or self._is_resident(model, capacity):
            return
        if capacity is not None and self._is_resident(model):
            if self.resident.adapters != capacity.adapters:
                raise self._other_adapters(self.resident, capacity, len(attached))
            raise self._other_kv_types(self.resident, capacity, len(attached))
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

    def _other_adapters(
        self, resident: Resident, capacity: CapacityRequest, attached: int
    ) -> SwitchRequired:
        has, wanted = adapter_words(resident.adapters), adapter_words(capacity.adapters)
        return SwitchRequired(
            f"{self.model_name!r} is resident with {has} and {attached} open session(s); {wanted} "
            "needs it loaded again. Ask for what is resident, or close the sessions.",
            metadata={
                "resident_model": self.model_name,
                "requested_model": self.model_name,
                "resident_adapters": has,
                "adapters": wanted,
                "sessions": attached,
                "generation": self.sessions.generation,
            },
        )

    def _other_kv_types(
        self, resident: Resident, capacity: CapacityRequest, attached: int
    ) -> SwitchRequired:
        k_type, v_type = resident.kv_types
        return SwitchRequired(
            f"{self.model_name!r} is resident, compiled for KV of {k_type}, with {attached} open "
            f"session(s); K {capacity.k_type} and V {capacity.v_type} need it loaded again. Ask "
            f"for {k_type}, or close the sessions.",
            metadata={
                "resident_model": self.model_name,
                "requested_model": self.model_name,
                "resident_k_type": k_type,
                "resident_v_type": v_type,
                "k_type": capacity.k_type,
                "v_type": capacity.v_type,
                "sessions": attached,
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
        path = await self._store.conversions.ensure(model, report)
        await self.planning.ensure_asked(model, capacity, path=path)
        self._refuse_unloadable(model)
        # Anew for other KV types or adapters, which is no switch: nothing of it stays meanwhile.
        again = self._is_resident(model)
        switching = self.resident is not None and not again
        # Refuse before anything is given up: with the resident model's memory counted as free.
        machine = await self.planning.read()
        question = self._question(model, capacity)
        planned = self.plan.resolve(question, machine)
        self._refuse_ending()  # any of these may have taken until after the drain began
        target = SlotModel(model.name, model.digest)
        if again:
            await self._unload(UnloadRequested(f"load {model.name} for other KV types or adapters"))
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
        adapters = capacity.adapters
        request = self.plan.load_op(
            model, planned, path, quality=quality and not adapters, adapters=adapters
        )
        before, generation = self._worker_bytes(), self.sessions.generation
        try:
            with self.plan.under_way(planned, load=True):
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
        self.refuse_overtaken(generation)
        after = self._worker_bytes()
        copied = self.plan.copied(after, before)
        findings = check_load(model.facts, result, planned, copied)
        self.resident = Resident(
            model, model.facts, result, planned, findings, adapters, request.cold
        )
        self.plan.loaded(result, planned, after, before)
        self._cold_is(0)
        self.keeper.longest_gap_s = result.longest_gap_s
        self._tell_findings(findings)
        self.apply(LoadDone())
        self.idle.touch(time.monotonic())
        if copied and not adapters:
            await self.planning.model_loaded(digest, capacity, copied)
        if result.quality is not None:
            await self.planning.quality_seen(digest, planned.placement, result.quality)
        return time.monotonic() - started

    def begin_drain(self) -> None:
        super().begin_drain()
        self._store.conversions.end()  # nobody will load what comes out

    def owner_lost(self, cause: str) -> None:
        super().owner_lost(cause)
        self._store.conversions.end()

    def _refuse_ending(self) -> None:
        if self.machine.state in FINAL:
            raise ShuttingDown(
                "The daemon is draining. Start it again, or retry later.", retry_after_s=5.0
            )

    def _refuse_unloadable(self, model: StoredModel) -> None:
        """The engine has said that it can't load this file: it isn't made to try."""
        known = self.planning.known_of(model.digest)
        if known.loader == "no":
            raise ModelLoadFailed(
                f"The engine refused the model {model.name!r}. It said: {known.words.rstrip('.')}.",
                metadata={
                    "cause": "engine",
                    "model": model.name,
                    "architecture": model.facts.architecture,
                    "backend_version": known.backend_version,
                },
            )

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
        self.keeper.longest_gap_s = {}

    async def _unload(self, event: Event) -> int:
        closed = len(self.sessions)
        self._give_up_resident(event)
        await self.call(UnloadOp())
        self.apply(Unloaded())
        return closed

    async def tick(self, now: float) -> None:
        """Time-outs: sessions whose time is up, and idle release. Called about once a second."""
        for session in self.sessions.expired(now):
            if self.sessions.is_expired(session, now):  # closing another one takes a while
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

    def held(self) -> Held:
        """What the other slots plan beside."""
        self.plan.touched(self._worker_bytes(), self._cold_bytes())
        return self.plan.held()

    def _worker_bytes(self) -> int | None:
        pid = self.keeper.pid
        return anonymous_bytes(pid) if pid else None

    def _question(
        self, model: StoredModel, request: CapacityRequest, companions: Companions = NO_COMPANIONS
    ) -> Question:
        self.plan.touched(self._worker_bytes(), self._cold_bytes())
        resident = self.resident if self._is_resident(model, request) else None
        question = self.plan.question(
            model,
            request,
            resident=resident is not None,
            occupied=self.resident is not None,
            companions=companions,
        )
        if resident is None:
            return question
        cold = None if self.cannot_park else resident.cold
        return replace(
            question,
            cold_ram_bytes=cold.ram_bytes if cold else 0,
            batched=len(self.sessions.of_layout("batched")),
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
        if self._is_resident(model, what.request) and PLACING & set(what.settings):
            # Layers stay where they are until the model is loaded again: plan for that.
            question = replace(question, use=use_after_switch(question.use))
        if "cold_ram_bytes" in what.settings:
            question = replace(question, cold_ram_bytes=None)
        machine = what.machine
        if machine is None:
            machine = await self.planning.read(config)
        else:  # nothing of this slot lives on that machine
            machine = allowed(machine, (config or self.config).devices)
            question = replace(question, use=SlotUse(), cold_ram_bytes=None)
        return self.plan.survey(question, machine, config), machine

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
        load = self.resident.load if self.resident and self._is_resident(model, request) else None
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
        self, request: OpenRequest, caller: Caller, report: Report = ignore_progress
    ) -> Opened:
        """Open or attach a session, loading the model if policy allows."""
        started = time.monotonic()
        load_s = 0.0
        if request.layout == "batched":
            shared = replace(request.capacity, streams=self.config.batch_streams)
            request = replace(request, capacity=shared)
        while True:
            model = self.find_model(request.model)
            try:
                attached = self._attach(request)
                if attached is not None:
                    return attached
                load_s += await self.ensure_loaded(model, caller, report, capacity=request.capacity)
                async with self.hold("", "open", caller, beside=not request.alone) as hold:
                    # Waiting may have changed everything: look again.
                    attached = self._attach(request)
                    if attached is not None:
                        return attached
                    if not self._is_resident(model, request.capacity):
                        continue
                    waited_s = hold.waited_s
                    await report("opening", 1.0)
                    session = await self._open(model, request)
                    resumed = await self._begin(session, request)
            except GenerationStale:
                # The slot was reset while this call waited; it has no handle that could be stale.
                if time.monotonic() - started > OPEN_RETRY_S:
                    raise
                continue
            return Opened(session, False, load_s > 0, load_s, waited_s, resumed)

    def _attach(self, request: OpenRequest) -> Opened | None:
        if not request.session_key:
            return None
        session = self.sessions.by_key(request.session_key)
        if session is None:
            self._refuse_taken(request)
            return None
        if request.fresh and session.durable:
            return None  # it makes way for the new one
        check_attach(
            session,
            model=request.model,
            profile_id=request.profile_id,
            prompt_format=request.prompt_format,
            capacity=request.capacity,
            durable=request.durable,
            overflow=request.overflow,
            layout=request.layout,
        )
        session.attached = True
        session.used_at = time.monotonic()
        self.idle.touch(session.used_at)
        return Opened(session, True, False, 0.0, 0.0)

    async def _open(self, model: StoredModel, request: OpenRequest) -> Session:
        assert self.resident is not None
        load = self.resident.load
        _refuse_overflow(request, load)
        _refuse_layout(request, load)
        if request.durable:
            refuse_unless_saved(model.name, load.capabilities)
            await self._end_before_fresh(request)
        await self._make_place(request.layout)
        session_id = self.sessions.new_id()

        async def make(planned: Resolution) -> Session:
            window = planned.numbers.effective.tokens
            identity = self.identity(
                model,
                request.capacity,
                window=window,
                prompt_format=request.prompt_format,
                profile_id=request.profile_id,
            )
            operation = OpenOp(
                session_id=session_id,
                prompt_format=identity.prompt_format,
                window=window,
                k_type=request.capacity.k_type,
                v_type=request.capacity.v_type,
                kv_digest=identity.kv_digest,
                runtime_digest=identity.runtime_digest,
                free_bytes=planned.free_bytes,
                compute_bytes=host_buffers(planned),
                overflow=request.overflow,
                layout=request.layout,
                streams=request.capacity.streams,
            )
            _, resolution = await self._make_context(planned, operation)
            return Session(
                session_id=session_id,
                generation=self.sessions.generation,
                key=request.session_key,
                model=model.name,
                identity=identity,
                request=request.capacity,
                resolution=resolution,
                capabilities=capabilities_of(load),
                opened_at=time.monotonic(),
                used_at=time.monotonic(),
                overflow=request.overflow,
                layout=request.layout,
                durable=request.durable,
            )

        return await self._new_session(session_id, model, request.capacity, make)

    # --- durable sessions ----------------------------------------------------------------------

    def _refuse_taken(self, request: OpenRequest) -> None:
        self.durable.check_elsewhere(
            self.sessions, request.session_key, model=request.model, durable=request.durable
        )

    async def _end_before_fresh(self, request: OpenRequest) -> None:
        session = self.sessions.by_key(request.session_key)
        if request.fresh and session is not None:
            await self.close(session, why="its key was opened anew")

    async def _begin(self, session: Session, request: OpenRequest) -> Resumed | None:
        """Bring a new durable session to where it was saved. What stands against it is part of the
        answer; GenerationStale where the worker went away.
        """
        if not request.durable:
            return None

        async def send(operation: Payload) -> Payload:
            await self.ready(session)
            result = await self.call(operation, session=session)
            if isinstance(result, RestoreResult) and not result.cancelled:
                self.plan.count(result, self.sessions.resident)
            return result

        try:
            self._refuse_taken(request)
            return await self.durable.begin(session, send, fresh=request.fresh)
        except BaseException:
            self.spawn(self._close_unknown(session))
            raise

    async def _close_unknown(self, session: Session, *, discard: bool = False) -> None:
        """Nobody has its handle, and what was saved hasn't come back: it must not stand for it."""
        if self.sessions.is_open(session):
            with contextlib.suppress(ModeldError):
                await self.close(session, why="opening it didn't go through", discard=discard)

    async def keep(self, session: Session, key: str) -> Saved:
        """Make an open session durable under a key, and save it at once. In a hold.

        Raises InvalidRequest for a key that is taken.
        """
        other = self.sessions.by_key(key)
        if other is not None and other is not session:
            raise InvalidRequest.of(
                "session_key", key, "a key of no open session", f"{other.session_id} has it."
            )
        self.durable.check_elsewhere(self.sessions, key, model=session.model, durable=True)
        session.key, session.durable = key, True
        return await self._save(session)

    async def answer(
        self,
        session: Session,
        request: Payload,
        on_data: OnData,
        adopt: Adopt | None = None,
    ) -> tuple[Payload, Saved | None]:
        """A decode or a turn; then, of a durable session, how saving it went. In a hold, which is
        kept until it is saved, also where the caller is gone, or the answer failed on its way.
        ``adopt`` as in ``call``.
        """
        began = False

        async def took(payload: Payload) -> None:
            nonlocal began
            began = True
            await on_data(payload)

        try:
            result = await self.call(
                request, session=session, on_data=took, credit=CREDIT_CHUNKS, adopt=adopt
            )
        except BaseException as error:
            # A refusal has changed nothing, and must not take the place of what is saved.
            refused = isinstance(error, ModeldError) and not began
            if session.durable and not refused and self.sessions.is_open(session):
                await self._save(session)
            raise
        return result, await self._save(session) if session.durable else None

    async def _save(self, session: Session) -> Saved:
        async def send(operation: Payload) -> Payload:
            if not self.sessions.is_open(session):
                self.sessions.get(session.session_id, session.generation, time.monotonic())
            return await self.call(operation)

        return await self.durable.save(session, send)

    @property
    def use(self) -> SlotUse:
        return self.plan.use

    async def close(self, session: Session, *, why: str, discard: bool = False) -> int:
        """Close a session; how many tokens stay behind as reclaimable cache.

        What runs for it is stopped; the worker closes it after that. What is saved of a durable one
        stays unless ``discard``.
        """
        self.sessions.close(session, why)
        open_ones = self.sessions.all()
        newest = max(open_ones, key=lambda one: one.opened_at) if open_ones else None
        self.latest = newest.resolution if newest else None
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
        if session.durable and discard:
            session.durable = False  # what its last turn saves comes too late
            # First, so that it is forgotten also where the worker dies of the close.
            await see_through(self.durable.forget(session.key))
        return await see_through(self._close_in_worker(session, discard))

    async def _close_in_worker(self, session: Session, discard: bool) -> int:
        generation = self.sessions.generation
        result = await self.call(CloseOp(session_id=session.session_id, discard=discard))
        assert isinstance(result, CloseResult)
        if self.sessions.generation == generation:
            self.plan.count(result, self.sessions.resident)
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


def adapter_words(adapters: tuple[AdapterUse, ...]) -> str:
    return ", ".join(f"{one.name} at {one.scale:g}" for one in adapters) or "no adapters"


def _refuse_overflow(request: OpenRequest, load: LoadResult) -> None:
    """Raises UnsupportedFeature for overflow evict where the load didn't find that it can be."""
    told = parse_capability("overflow.evict", load.capabilities.get("overflow.evict", ""))
    if request.overflow == "evict" and told.answer != "yes":
        raise UnsupportedFeature(
            f"Sessions of {request.model!r} can't go on beyond their window: {told.answer}, "
            f"{told.evidence or 'its worker does not say so'}. Open with OVERFLOW_REFUSE.",
            metadata={"capability": "overflow.evict", "model": request.model},
        )


def _refuse_layout(request: OpenRequest, load: LoadResult) -> None:
    """Raises UnsupportedFeature for a batched session where the load didn't find that it can be."""
    told = parse_capability("layout.batched", load.capabilities.get("layout.batched", ""))
    if request.layout == "batched" and told.answer != "yes":
        raise UnsupportedFeature(
            f"Sessions of {request.model!r} can't share a context: {told.answer}, "
            f"{told.evidence or 'its worker does not say so'}. Open with LAYOUT_ISOLATED.",
            metadata={"capability": "layout.batched", "model": request.model},
        )


def capabilities_of(load: LoadResult) -> tuple[Capability, ...]:
    return tuple(
        # It names the executor, and why it is that one: what is asked of it isn't yes or no.
        Capability(name, "yes", text) if name == "executor" else parse_capability(name, text)
        for name, text in sorted(load.capabilities.items())
    )


def _cause(error: BaseException) -> str:
    if isinstance(error, ModeldError):
        return error.message
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__
