"""What a slot holds in bytes, and what it asks the planner: one slot's side of planning.

Owns the account of the slot's memory and the identity that a plan leads to. Knows no queue, no
worker process and no transport.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from modeld.shared import manifest
from modeld.shared.capacity import (
    AdapterUse,
    CapacityRequest,
    Companions,
    MachineReading,
    ModelFacts,
    PlacedUse,
    Resolution,
    SlotUse,
)
from modeld.shared.errors import InsufficientMemory
from modeld.shared.manifest import AdapterId, Identity
from modeld.shared.messages import (
    AdapterIn,
    ColdIn,
    Hello,
    LoadOp,
    LoadResult,
    PlacedOut,
    SlotTotals,
)
from modeld.shared.planner.remedies import use_after_switch
from modeld.supervisor.config import Config
from modeld.supervisor.durable import private_folder
from modeld.supervisor.findings import HOST_DEVICE
from modeld.supervisor.holdings import Held, Holdings
from modeld.supervisor.models.store import ModelStore, StoredModel
from modeld.supervisor.planning import Planning, Question

log = logging.getLogger(__name__)

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
    adapters: tuple[AdapterUse, ...] = ()
    cold: ColdIn | None = None  # None: it was loaded without a cold store

    @property
    def cold_store(self) -> str:
        """Whether it parks, as the worker said it of a model that may."""
        return self.load.capabilities.get("cold_store", "no") if self.cold else "no"

    @property
    def kv_types(self) -> tuple[str, str]:
        """Those that it was loaded for."""
        return self.planned.k_type, self.planned.v_type


class SlotPlan:
    """The account of one slot, and its questions."""

    def __init__(
        self,
        config: Config,
        store: ModelStore,
        planning: Planning,
        holdings: Holdings | None = None,
    ) -> None:
        """``holdings`` are those of the daemon's slots; None: there is no other slot."""
        self.config = config
        self.planning = planning
        self.use = SlotUse()
        self._holdings = holdings or Holdings()
        self._anonymous_at_load: int | None = None
        self._kv_untouched = False  # KV is touched as it fills, not when it is allocated
        self._weights_bytes = 0  # mapped file pages on the host
        self._promised_bytes = 0  # to all contexts, on the host, touched since or not
        self._touched_at_once_bytes = 0  # of all contexts, on the host
        self._working_bytes = 0  # what an engine works in that reports no buffer for a context
        self._under_way = Held()  # planned, and being allocated
        self._store = store
        self._ids: Mapping[str, str] = {}  # engine name → device id, of the resident model

    def reset(self) -> None:
        self.use = SlotUse()
        self._anonymous_at_load = None
        self._weights_bytes = self._promised_bytes = self._touched_at_once_bytes = 0
        self._working_bytes = 0

    def loaded(
        self,
        load: LoadResult,
        planned: Resolution,
        anonymous: int | None,
        before: int | None = None,
    ) -> None:
        """Take the account up from a load that succeeded. ``anonymous``: the worker's memory of
        its own, in bytes, and ``before`` the load; None: not known.
        """
        self.reset()
        self._anonymous_at_load = anonymous
        self._kv_untouched = load.kv_untouched
        self._weights_bytes = sum(
            row.weights_bytes for row in load.placed if row.device == HOST_DEVICE
        ) or (0 if load.placed else load.weights_bytes)
        self._ids = {row.engine_name: row.device_id for row in planned.devices if row.engine_name}
        self.use = SlotUse(
            weights_resident=True,
            weights_anonymous_bytes=self.copied(anonymous, before),
            gpu_layers=load.gpu_layers,
            tensor_split=planned.tensor_split,
            on_devices=tuple(
                PlacedUse(self._ids[row.device], row.weights_bytes)
                for row in load.placed
                if row.device in self._ids
            ),
        )

    def copied(self, anonymous: int | None, before: int | None) -> int:
        """Of an engine that keeps weights in a form of its own: by how much loading grew it, in
        bytes; 0 where that isn't known.
        """
        if self.planning.backend != "openvino" or anonymous is None or before is None:
            return 0
        return max(0, anonymous - before)

    def count(self, told: SlotTotals, sessions: int, opened: Resolution | None = None) -> None:
        """Keep what the worker said that its contexts hold. Its totals are over all memories.

        ``sessions`` have a context; ``opened`` is the plan of the one that is new among them.
        """
        held = _by_device(told.slot_placed, self._ids)
        free = _by_device(told.reclaimable_placed, self._ids)
        elsewhere = sum(row.compute_bytes for row in told.slot_placed if row.device in self._ids)
        compute = told.slot_compute_bytes - elsewhere
        resident = told.slot_bytes - sum(held.values())
        if opened is not None and self._kv_untouched:
            # One buffer of the model's serves all contexts, and grows with the longest.
            self._working_bytes = max(self._working_bytes, opened.compute_bytes)
        untouched = resident if self._kv_untouched else compute
        self._touched_at_once_bytes = resident - untouched
        self._promised_bytes = untouched + self._working_bytes
        self.use = replace(
            self.use,
            cells=told.slot_cells,
            resident_bytes=resident,
            reclaimable_bytes=told.reclaimable_bytes - sum(free.values()),
            compute_bytes=self._promised_bytes,
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

    def touched(self, anonymous: int | None, cold: int = 0) -> None:
        """Take off what is promised to contexts what the worker has touched of it by now.

        A reading of available memory lacks that already. What the worker holds beside that which
        is touched when it is allocated, and beside the ``cold`` bytes of parked KV, counts as
        promised, but for some slack.
        """
        self.use = use = replace(self.use, cold_bytes=cold)
        before = self._anonymous_at_load
        if before is None or anonymous is None:
            return
        touched = anonymous - cold - before - self._touched_at_once_bytes - TOUCHED_SLACK_BYTES
        promised = min(self._promised_bytes, self._promised_bytes - touched)
        self.use = replace(use, compute_bytes=max(0, promised))

    def held(self) -> Held:
        """What other slots must plan beside, as of the latest ``touched``.

        Mapped weights are in it: their pages count as available, and are needed all the same.
        """
        use, weights = self.use, self._weights_bytes
        copied, contexts = use.weights_anonymous_bytes, use.resident_bytes + self._working_bytes
        total = weights + copied + contexts + use.cold_bytes
        return Held(total, weights + use.compute_bytes) + self._under_way

    @contextmanager
    def under_way(self, planned: Resolution, *, load: bool) -> Iterator[None]:
        """While a load or a context is being made: others count it as if it were there, and what
        is touched of it meanwhile twice.
        """
        host = planned.devices[0] if planned.devices else None
        if load:
            size = host.weights_bytes if host else planned.weights_bytes
        else:
            size = host.kv_bytes + host.compute_bytes if host else 0
            size = size or planned.kv_bytes + planned.compute_bytes
        self._under_way = Held(size, size)
        try:
            yield
        finally:
            self._under_way = Held()

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
        if not resident:  # of a resident model, what loading it took has its adapters in it
            size = sum(one.memory_bytes for one in request.adapters)
            companions = replace(companions, adapter_bytes=companions.adapter_bytes + size)
        use = SlotUse()
        if resident:
            use = self.use
        elif occupied:
            use = use_after_switch(self.use)
        beside = self._holdings.beside(self.planning.backend)
        use = replace(use, elsewhere_bytes=beside.total, elsewhere_untouched_bytes=beside.untouched)
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

    def load_op(
        self,
        model: StoredModel,
        planned: Resolution,
        path: Path,
        *,
        quality: bool,
        adapters: tuple[AdapterUse, ...] = (),
    ) -> LoadOp:
        """What the worker is told to load, and where. ``path``: the model's own, or what was made
        of it for its engine.
        """
        used = [row for row in planned.devices if row.engine_name and row.layers > 0]
        return LoadOp(
            path=str(path),
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
            k_type=planned.k_type,
            v_type=planned.v_type,
            window=planned.numbers.effective.tokens,
            device=self.config.openvino_device if self.planning.backend == "openvino" else "",
            adapters=[
                AdapterIn(path=one.path, digest=one.digest, scale=one.scale) for one in adapters
            ],
            cold=self._cold(planned),
        )

    def _cold(self, planned: Resolution) -> ColdIn | None:
        """Where parked KV goes, and how much of it there may be."""
        config = self.config
        if not config.parks:
            return None
        # The worker sees how much memory is free, but not what the operator lets be planned with.
        ram = planned.cold_bytes if config.user_limit_bytes else config.cold_ram_bytes
        disk = config.cold_disk_bytes
        folder = config.data_root / "cold" / self.planning.backend
        if disk:
            try:
                private_folder(folder.parent)
                private_folder(folder)
            except OSError as error:  # parked KV can always be evaluated again
                log.error("nothing is parked on disk: %s: %s", folder, error.strerror or error)
                disk = 0
        if not (ram or disk):
            return None
        return ColdIn(ram_bytes=ram, disk_bytes=disk, folder=str(folder))

    def _state_layout(self, hello: Hello | None) -> str:
        """What says how KV lies in memory. An engine that compiles for one device computes it
        there in that device's way; precision and versions are in the build's digest.
        """
        layout = hello.state_layout if hello else ""
        if self.planning.backend != "openvino":
            return layout
        return f"{layout} on {self.config.openvino_device}"

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
        adapters = tuple(AdapterId(one.digest, one.scale) for one in request.adapters)
        kv = manifest.kv_digest(
            model_digest=model.digest,
            adapters=adapters,
            rope=facts.rope,
            k_type=request.k_type,
            v_type=request.v_type,
            flash_attn=False,
            build_digest=hello.build_digest if hello else "",
            state_layout=self._state_layout(hello),
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
            adapters=adapters,
            prompt_format=prompt_format or ("chat" if facts.has_template else "raw"),
            prompt_template_digest=facts.template_digest,
            add_bos=facts.add_bos,
            kv_digest=kv,
            runtime_digest=runtime,
            profile_id=profile_id,
        )


def host_buffers(planned: Resolution) -> int:
    """Bytes of a planned context's compute buffers, for the worker's last look at the host."""
    return planned.compute_bytes if not planned.gpu_layers else 0


def one_stream(planned: Resolution) -> Resolution:
    """Of a plan for sessions that share a context, what is one session's; any other as it is."""
    streams = max(1, planned.streams)
    return replace(
        planned,
        kv_bytes=planned.kv_bytes // streams,
        compute_bytes=planned.compute_bytes // streams,
    )


def _by_device(placed: Iterable[PlacedOut], ids: Mapping[str, str]) -> dict[str, int]:
    return {
        ids[row.device]: row.kv_bytes + row.compute_bytes
        for row in placed
        if row.device in ids and row.device != HOST_DEVICE
    }
