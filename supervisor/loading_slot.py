"""What model a slot has: loaded, loaded anew, switched, unloaded, and released when it is idle.

Owns the order of refusing, giving up and loading. Opens no session, and knows no transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from modeld.shared.capacity import (
    AdapterUse,
    CapacityRequest,
)
from modeld.shared.errors import (
    BackendMismatch,
    GenerationStale,
    ModeldError,
    ModelLoadFailed,
    ModelNotActive,
    ModelQuarantined,
    ShuttingDown,
    SwitchRequired,
)
from modeld.shared.messages import (
    LoadResult,
    Payload,
    Progress,
    UnloadOp,
)
from modeld.supervisor.context_slot import ContextSlot
from modeld.supervisor.findings import check_load
from modeld.supervisor.models.store import StoredModel
from modeld.supervisor.sessions import Session
from modeld.supervisor.slot import FINAL
from modeld.supervisor.slot_core import (
    Caller,
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
from modeld.supervisor.slot_plan import Resident

logger = logging.getLogger(__name__)

OPEN_RETRY_S = 600.0
NAMED = 5  # sessions in a refusal, at most


class LoadingSlot(ContextSlot):
    """Part of ``ModelSlot``. All methods run on the daemon's loop."""

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

    def _refuse_switch(
        self, model: StoredModel, capacity: CapacityRequest | None, force: bool
    ) -> None:
        attached = self.sessions.attached(time.monotonic())
        if self.resident is None or force or not attached or self._is_resident(model, capacity):
            return
        if capacity is not None and self._is_resident(model):
            if self.resident.adapters != capacity.adapters:
                raise self._other_adapters(self.resident, capacity, attached)
            raise self._other_kv_types(self.resident, capacity, attached)
        raise SwitchRequired(
            f"{self.model_name!r} is resident with {_open(attached)}, so {model.name!r} can't be "
            "loaded behind their back. Close them, wait until they are idle, or call SwitchModel.",
            metadata={
                "resident_model": self.model_name,
                "requested_model": model.name,
                "generation": self.sessions.generation,
                **_counted(attached),
            },
        )

    def _other_adapters(
        self, resident: Resident, capacity: CapacityRequest, attached: Sequence[Session]
    ) -> SwitchRequired:
        has, wanted = adapter_words(resident.adapters), adapter_words(capacity.adapters)
        return SwitchRequired(
            f"{self.model_name!r} is resident with {has} and {_open(attached)}; {wanted} needs it "
            "loaded again. Ask for what is resident, or close the sessions.",
            metadata={
                "resident_model": self.model_name,
                "requested_model": self.model_name,
                "resident_adapters": has,
                "adapters": wanted,
                "generation": self.sessions.generation,
                **_counted(attached),
            },
        )

    def _other_kv_types(
        self, resident: Resident, capacity: CapacityRequest, attached: Sequence[Session]
    ) -> SwitchRequired:
        k_type, v_type = resident.kv_types
        return SwitchRequired(
            f"{self.model_name!r} is resident, compiled for KV of {k_type}, with "
            f"{_open(attached)}; K {capacity.k_type} and V {capacity.v_type} need it loaded "
            f"again. Ask for {k_type}, or close the sessions.",
            metadata={
                "resident_model": self.model_name,
                "requested_model": self.model_name,
                "resident_k_type": k_type,
                "resident_v_type": v_type,
                "k_type": capacity.k_type,
                "v_type": capacity.v_type,
                "generation": self.sessions.generation,
                **_counted(attached),
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
                    f"{self.model_name!r} has {_open(attached)}. Close them, or unload with force.",
                    metadata={"resident_model": self.model_name, **_counted(attached)},
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


def _cause(error: BaseException) -> str:
    if isinstance(error, ModeldError):
        return error.message
    return "cancelled" if isinstance(error, asyncio.CancelledError) else type(error).__name__


def _open(sessions: Sequence[Session]) -> str:
    """How many are open, with the names of the first ones."""
    named = ", ".join(one.key or one.session_id for one in sessions[:NAMED])
    more = f" and {len(sessions) - NAMED} more" if len(sessions) > NAMED else ""
    return f"{len(sessions)} open session(s): {named}{more}"


def _counted(sessions: Sequence[Session]) -> dict[str, object]:
    ids = ",".join(one.session_id for one in sessions[:NAMED])
    return {"sessions": len(sessions), "session_ids": ids}
