"""A slot under its planner: what it holds, what it asks for a model, and the identity that follows.

Owns the slot's questions, and whether what its contexts hold can be parked. Loads, makes and parks
nothing; the arithmetic of the account is ``slot_plan``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from modeld.shared.capacity import (
    CapacityRequest,
    Companions,
    MachineReading,
    Resolution,
    SlotUse,
)
from modeld.shared.host_memory import anonymous_bytes
from modeld.shared.manifest import Identity
from modeld.shared.planner.remedies import use_after_switch
from modeld.supervisor import parking
from modeld.supervisor.holdings import Held
from modeld.supervisor.models.store import StoredModel
from modeld.supervisor.planning import Question, allowed
from modeld.supervisor.slot_core import (
    SlotCore,
)
from modeld.supervisor.slot_plan import NO_COMPANIONS

# Settings that decide where layers go, which a load carries out.
PLACING = {"placement", "gpu_layers", "devices", "tensor_split", "openvino_device"}


@dataclass(frozen=True)
class WhatIf:
    """A hypothetical question. ``machine`` None: this one; ``settings`` as if they were these."""

    request: CapacityRequest
    companions: Companions = NO_COMPANIONS
    machine: MachineReading | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


class PlanningSlot(SlotCore):
    """Part of ``ModelSlot``. All methods run on the daemon's loop."""

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
        # The worker's account counts one that is being closed until it has answered that.
        there = min(question.use.sessions, self.sessions.resident)
        return replace(
            question,
            use=replace(question.use, sessions=there),
            cold_ram_bytes=cold.ram_bytes if cold else 0,
            batched=len(self.sessions.in_batch),
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

    @property
    def use(self) -> SlotUse:
        return self.plan.use

    @property
    def cannot_park(self) -> str:
        """Why no session of this slot is parked, in words; "" where they are."""
        resident = self.resident
        if not self.config.parks or (resident is not None and resident.cold is None):
            return parking.nowhere(self.config, resident.planned if resident else None)
        if resident is None or resident.cold_store.startswith("no"):  # what isn't known is tried
            return "Sessions of this model can't be parked (capability cold_store)."
        return ""

    def _cold_bytes(self) -> int:
        """RAM that the worker's parked KV takes: as of its last heartbeat, or told since."""
        if self.resident is None:
            return 0
        told, then = self._cold_told
        beat = self.keeper.heartbeat
        return told if beat is None or beat is then else beat.cold_bytes

    def _cold_is(self, size: int) -> None:
        self._cold_told = (size, self.keeper.heartbeat)
