"""Asks the planner: puts readings, policy and evidence together, in one place for every caller.

Owns when the engine is asked about a model, and which of its answers a plan is made from. Knows
no slot, session or transport.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from modeld.shared.asking import WINDOWS, AskAnswer, AskPoint, AskRequest
from modeld.shared.capacity import (
    CapacityPolicy,
    CapacityRequest,
    Companions,
    DeviceReading,
    EngineMeasure,
    MachineReading,
    ModelFacts,
    Resolution,
    SlotUse,
)
from modeld.shared.errors import InvalidRequest
from modeld.shared.host_memory import host_memory
from modeld.shared.messages import EngineDevice, QualityOut
from modeld.shared.planner.capacity import resolve, survey
from modeld.shared.planner.kv_math import block
from modeld.supervisor.asking import ask_engine
from modeld.supervisor.config import NO_DEVICES, Config
from modeld.supervisor.evidence import BuildEvidence, EvidenceStore, cost_key
from modeld.supervisor.models.store import StoredModel

log = logging.getLogger(__name__)

READ_LIMIT_S = 5.0
UNQUANTISED = ("f16", "bf16", "f32")
Ask = Callable[[str, AskRequest], AskAnswer]


class Probe(Protocol):
    """A machine's readings; ``MachineProbe`` in the product."""

    def read(self) -> MachineReading:
        """Blocks; use a thread."""

    def attach_engine(self, devices: Sequence[EngineDevice]) -> None: ...


@dataclass(frozen=True)
class Question:
    """What is asked of the planner, but for the readings."""

    facts: ModelFacts
    digest: str
    request: CapacityRequest
    use: SlotUse = field(default_factory=SlotUse)
    companions: Companions = field(default_factory=Companions)
    alternatives: tuple[ModelFacts, ...] = ()


class Planning:
    """One backend's planner, with the machine under it. Methods run on the daemon's loop."""

    def __init__(
        self,
        backend: str,
        config: Config,
        probe: Probe,
        evidence: EvidenceStore,
        ask: Ask = ask_engine,
    ) -> None:
        self.backend = backend
        self.config = config
        self.probe = probe
        self.evidence = evidence
        self.build = ""  # digest of the engine's build, once it has been heard of
        self.backend_version = ""
        self._ask = ask
        # Threads of their own: neither waits for other long work, nor do questions to engines,
        # one at a time, make others wait.
        self._reader = ThreadPoolExecutor(1, "modeld-probe")
        self._asker = ThreadPoolExecutor(1, "modeld-ask")
        self._turn = asyncio.Semaphore(1)
        self._waiting: Counter[tuple[str, str]] = Counter()
        self._stuck: asyncio.Future[MachineReading] | None = None  # a reading that hangs
        self._asking: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._failed: dict[tuple[str, str], str] = {}

    def heard_of(self, build: str, version: str, devices: Sequence[EngineDevice]) -> None:
        """The engine that a worker runs, as it greeted."""
        if build != self.build:
            self._failed.clear()
        self.build, self.backend_version = build, version
        self.probe.attach_engine(devices)

    async def read(self, config: Config | None = None) -> MachineReading:
        """A live reading, of the devices that the operator lets be used.

        A driver that hangs costs the devices, never the answer: until it comes back, only the
        host is known, and no second thread is given to it.
        """
        if self._stuck is None or self._stuck.done():
            loop = asyncio.get_running_loop()
            reading = loop.run_in_executor(self._reader, self.probe.read)
            done, _ = await asyncio.wait([reading], timeout=READ_LIMIT_S)
            if done:
                return allowed(reading.result(), (config or self.config).devices)
            self._stuck = reading
        log.warning("the devices' drivers have not answered for %g s", READ_LIMIT_S)
        note = f"accelerators: their drivers did not answer within {READ_LIMIT_S:g} s"
        return MachineReading(host_memory(), notes=(note,))

    # --- evidence --------------------------------------------------------------------------------

    def key(self, request: CapacityRequest, config: Config | None = None) -> str:
        c = config or self.config
        return cost_key(c.n_batch, c.n_ubatch, request.k_type, request.v_type, flash_attn=False)

    async def ensure_asked(
        self, model: StoredModel, request: CapacityRequest, config: Config | None = None
    ) -> None:
        """Ask the engine about the file, once for each build and choice of types.

        What it could not be asked is not tried again before another engine shows up. A question
        that nobody waits for any more isn't put. Raises InvalidRequest for an unknown type.
        """
        if self.backend == "llama":
            block(request.k_type, "k_type")
            block(request.v_type, "v_type")
        about = (model.digest, self.key(request, config))
        if about in self._failed or self._known(*about):
            return
        task = self._asking.get(about)
        if task is None:
            task = asyncio.ensure_future(self._put(model, request, config or self.config, about))
            self._asking[about] = task
            task.add_done_callback(lambda _task: self._asking.pop(about, None))
        self._waiting[about] += 1
        try:
            await asyncio.shield(task)
        finally:
            self._waiting[about] -= 1
            if not self._waiting[about]:
                del self._waiting[about]

    def _known(self, digest: str, key: str) -> bool:
        found = self.evidence.build(digest, self.build)
        return found.loader == "no" or (key in found.costs and bool(found.costs[key].dry))

    async def _put(
        self,
        model: StoredModel,
        request: CapacityRequest,
        config: Config,
        about: tuple[str, str],
    ) -> None:
        question = AskRequest(
            path=str(model.path),
            n_batch=config.n_batch,
            n_ubatch=config.n_ubatch,
            k_type=request.k_type,
            v_type=request.v_type,
            windows=list(WINDOWS),
        )
        async with self._turn:
            if not self._waiting[about]:
                return
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._asker, self._ask, self.backend, question)
        if answer.loader == "unknown":
            self._failed[about] = answer.words
            return
        if not self.build:
            self.heard_of(answer.build_digest, answer.backend_version, answer.devices)
        if not answer.points:
            self._failed[about] = "; ".join(answer.notes) or answer.words
        await asyncio.to_thread(self.evidence.asked, model.digest, about[1], answer)

    def known_of(self, digest: str) -> BuildEvidence:
        """What the present engine said of a model; with why it could not be asked."""
        known = self.evidence.build(digest, self.build)
        words = next((why for (of, _), why in self._failed.items() if of == digest), "")
        if known.loader == "unknown" and words:
            return BuildEvidence(words=words)
        return known

    def check_types(self, question: Question, config: Config | None = None) -> None:
        """Raise InvalidRequest for types that the engine makes no context with: what is known of
        it, or, where it was asked, its own words.
        """
        if question.facts.model_type == "llama":
            check_v_type(question.request.v_type)
        key = self.key(question.request, config)
        costs = self.evidence.costs(question.digest, self.build, key)
        if costs is None or costs.dry or not costs.notes:
            return
        request = question.request
        raise InvalidRequest.of(
            "k_type",
            f"{request.k_type} with v_type {request.v_type}",
            "types that the engine takes for this model, f16 for both among them",
            f"It said: {costs.notes[0]}",
        )

    def measure(self, question: Question, config: Config | None = None) -> EngineMeasure:
        key = self.key(question.request, config)
        return self.evidence.measure(question.digest, self.build, key)

    async def context_made(
        self, digest: str, request: CapacityRequest, cells: int, kv_bytes: int, compute_bytes: int
    ) -> None:
        """Keep what a context on the host really cost, for the next plan."""
        point = AskPoint(cells, kv_bytes, compute_bytes)
        await asyncio.to_thread(self.evidence.loaded, digest, self.build, self.key(request), point)

    async def quality_seen(self, digest: str, placement: str, seen: QualityOut) -> None:
        """Keep what the greedy probe of a load sampled."""
        await asyncio.to_thread(
            self.evidence.quality_seen, digest, self.build, self.backend_version, placement, seen
        )

    # --- asking ----------------------------------------------------------------------------------

    def resolve(self, question: Question, machine: MachineReading) -> Resolution:
        """Plan it. Raises InsufficientMemory or InvalidRequest."""
        self.check_types(question)
        return resolve(
            question.facts,
            question.request,
            self.config.capacity_policy(),
            machine,
            question.use,
            companions=question.companions,
            measure=self.measure(question),
            alternatives=question.alternatives,
        )

    def survey(
        self,
        question: Question,
        machine: MachineReading,
        config: Config | None = None,
    ) -> Resolution:
        """Plan it, and answer a refusal as one. Raises InvalidRequest."""
        self.check_types(question, config)
        policy: CapacityPolicy = (config or self.config).capacity_policy()
        return survey(
            question.facts,
            question.request,
            policy,
            machine,
            question.use,
            companions=question.companions,
            measure=self.measure(question, config),
            alternatives=question.alternatives,
        )


def allowed(machine: MachineReading, devices: tuple[str, ...]) -> MachineReading:
    """The machine with only those accelerators that the setting ``devices`` lets be used."""
    if not devices:
        return machine
    names = () if devices == NO_DEVICES else devices

    def kept(device: DeviceReading) -> DeviceReading:
        if not device.engine_name or {device.engine_name, device.id} & set(names):
            return device
        return replace(device, engine_name="", note="not among the devices that may be used")

    missing = [
        name
        for name in names
        if not any(name in (device.engine_name, device.id) for device in machine.devices)
    ]
    notes = tuple(f"devices names {name!r}, which isn't here" for name in missing)
    return replace(
        machine,
        devices=tuple(kept(device) for device in machine.devices),
        notes=machine.notes + notes,
    )


def check_v_type(v_type: str) -> None:
    """Raise InvalidRequest for values that llama.cpp can't quantise as it is run here."""
    if v_type not in UNQUANTISED:
        raise InvalidRequest.of(
            "v_type",
            v_type,
            " or ".join(UNQUANTISED),
            "Quantised values need flash attention, which is off where results are to be exact. "
            "Keys can be quantised: k_type.",
        )
