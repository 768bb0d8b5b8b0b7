"""What a slot holds in bytes, and what it asks the planner: one slot's side of planning.

Owns the account of the slot's memory and the identity that a plan leads to. Knows no queue, no
worker process and no transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from modeld.shared import manifest
from modeld.shared.capacity import (
    CapacityRequest,
    Companions,
    MachineReading,
    ModelFacts,
    PlacedUse,
    Resolution,
    SlotUse,
)
from modeld.shared.errors import InsufficientMemory
from modeld.shared.manifest import Identity
from modeld.shared.messages import CloseResult, Hello, LoadOp, LoadResult, OpenResult, PlacedOut
from modeld.shared.planner.remedies import use_after_switch
from modeld.supervisor.config import Config
from modeld.supervisor.findings import HOST_DEVICE
from modeld.supervisor.models.store import ModelStore, StoredModel
from modeld.supervisor.planning import Planning, Question

NO_COMPANIONS = Companions()
# Of a worker's memory that grew and isn't KV: what may be anything but a compute buffer.
TOUCHED_SLACK_BYTES = 8 << 20


@dataclass(frozen=True)
class Resident:
    """The loaded model and what the worker reported of it."""

    model: StoredModel
    facts: ModelFacts
    load: LoadResult
    planned: Resolution  # as it was loaded
    findings: tuple[str, ...] = ()


class SlotPlan:
    """The account of one slot, and its questions."""

    def __init__(self, config: Config, store: ModelStore, planning: Planning) -> None:
        self.config = config
        self.planning = planning
        self.use = SlotUse()
        self._anonymous_at_load: int | None = None
        self._compute_bytes = 0  # of all contexts, on the host
        self._store = store
        self._ids: Mapping[str, str] = {}  # engine name → device id, of the resident model

    def reset(self) -> None:
        self.use = SlotUse()
        self._anonymous_at_load = None

    def loaded(self, load: LoadResult, planned: Resolution, anonymous: int | None) -> None:
        """Take the account up from a load that succeeded. ``anonymous``: the worker's memory of
        its own, in bytes; None: not known.
        """
        self._anonymous_at_load = anonymous
        self._ids = {row.engine_name: row.device_id for row in planned.devices if row.engine_name}
        self.use = SlotUse(
            weights_resident=True,
            gpu_layers=load.gpu_layers,
            tensor_split=planned.tensor_split,
            on_devices=tuple(
                PlacedUse(self._ids[row.device], row.weights_bytes)
                for row in load.placed
                if row.device in self._ids
            ),
        )

    def count(self, told: OpenResult | CloseResult, sessions: int) -> None:
        """Keep what the worker said that its contexts hold. Its totals are over all memories."""
        held = _by_device(told.slot_placed, self._ids)
        free = _by_device(told.reclaimable_placed, self._ids)
        elsewhere = sum(row.compute_bytes for row in told.slot_placed if row.device in self._ids)
        self._compute_bytes = told.slot_compute_bytes - elsewhere
        self.use = replace(
            self.use,
            cells=told.slot_cells,
            resident_bytes=told.slot_bytes - sum(held.values()),
            reclaimable_bytes=told.reclaimable_bytes - sum(free.values()),
            compute_bytes=self._compute_bytes,
            sessions=sessions,
            on_devices=tuple(
                replace(
                    placed,
                    resident_bytes=held.get(placed.device_id, 0),
                    reclaimable_bytes=free.get(placed.device_id, 0),
                )
                for placed in self.use.on_devices
            ),
        )

    def touched(self, anonymous: int | None) -> None:
        """Take off what is promised to compute buffers what the worker has touched of them by now.

        A reading of available memory lacks that already. What the worker holds beside KV, which is
        touched when it is allocated, counts as compute buffer, but for some slack.
        """
        before, use = self._anonymous_at_load, self.use
        if before is None or anonymous is None:
            return
        kv = use.resident_bytes - self._compute_bytes
        touched = anonymous - before - kv - TOUCHED_SLACK_BYTES
        promised = min(self._compute_bytes, self._compute_bytes - touched)
        self.use = replace(use, compute_bytes=max(0, promised))

    def question(
        self,
        model: StoredModel,
        request: CapacityRequest,
        *,
        resident: bool,
        occupied: bool,
        companions: Companions = NO_COMPANIONS,
    ) -> Question:
        """``resident``: the slot holds this model. ``occupied``: it holds another, which a switch
        would give back: mapped weights count as available already, so only what was allocated.
        """
        use = SlotUse()
        if resident:
            use = self.use
        elif occupied:
            use = use_after_switch(self.use)
        facts = replace(model.facts, name=model.name)  # a refusal names it as people do here
        return Question(facts, model.digest, request, use, companions)

    def resolve(self, question: Question, machine: MachineReading) -> Resolution:
        """Plan it; a refusal names what of the store would fit instead."""
        try:
            return self.planning.resolve(question, machine)
        except InsufficientMemory:
            others = self._store.smaller_than(question.facts)
            if not others:
                raise
            return self.planning.resolve(replace(question, alternatives=others), machine)

    def survey(
        self, question: Question, machine: MachineReading, config: Config | None
    ) -> Resolution:
        """As ``resolve``, with a refusal as an answer."""
        plan = self.planning.survey(question, machine, config)
        if plan.refusal is None:
            return plan
        others = self._store.smaller_than(question.facts)
        if not others:
            return plan
        return self.planning.survey(replace(question, alternatives=others), machine, config)

    def load_op(self, model: StoredModel, planned: Resolution, *, quality: bool) -> LoadOp:
        """What the worker is told to load, and where."""
        used = [row for row in planned.devices if row.engine_name and row.layers > 0]
        return LoadOp(
            path=str(model.path),
            model=model.name,
            digest=model.digest,
            n_batch=self.config.n_batch,
            n_ubatch=self.config.n_ubatch,
            n_gpu_layers=planned.gpu_layers,
            threads=self.config.threads,
            max_contexts=self.config.max_sessions,
            devices=[row.engine_name for row in used],
            tensor_split=[float(row.layers) for row in used],
            quality=quality,
        )

    def identity(
        self,
        model: StoredModel,
        request: CapacityRequest,
        *,
        hello: Hello | None,
        load: LoadResult | None,
        window: int,
        prompt_format: str,
        profile_id: str,
    ) -> Identity:
        """The identity of a session; ``runtime_digest`` is "" while the model isn't resident."""
        facts = model.facts
        kv = manifest.kv_digest(
            model_digest=model.digest,
            adapters=(),
            rope=facts.rope,
            k_type=request.k_type,
            v_type=request.v_type,
            flash_attn=False,
            build_digest=hello.build_digest if hello else "",
            state_layout=hello.state_layout if hello else "",
        )
        runtime = ""
        if load is not None:
            runtime = manifest.runtime_digest(
                kv=kv,
                window=window,
                n_batch=self.config.n_batch,
                n_ubatch=self.config.n_ubatch,
                n_gpu_layers=load.gpu_layers,
                tensor_split=self.use.tensor_split,
                threads=load.threads,
            )
        return Identity(
            backend=self.planning.backend,
            backend_version=hello.backend_version if hello else "",
            model_digest=model.digest,
            adapters=(),
            prompt_format=prompt_format or ("chat" if facts.has_template else "raw"),
            prompt_template_digest=facts.template_digest,
            add_bos=facts.add_bos,
            kv_digest=kv,
            runtime_digest=runtime,
            profile_id=profile_id,
        )


def _by_device(placed: Iterable[PlacedOut], ids: Mapping[str, str]) -> dict[str, int]:
    return {
        ids[row.device]: row.kv_bytes + row.compute_bytes
        for row in placed
        if row.device in ids and row.device != HOST_DEVICE
    }
