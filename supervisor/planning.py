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
from pathlib import Path
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
from modeld.shared.planner import openvino_kv
from modeld.shared.planner.capacity import resolve, survey
from modeld.shared.planner.kv_math import block
from modeld.supervisor.asking import ask_engine
from modeld.supervisor.config import NO_DEVICES, Config
from modeld.supervisor.evidence import BuildEvidence, EvidenceStore, cost_key, paged_key
from modeld.supervisor.models.store import StoredModel

log = logging.getLogger(__name__)

READ_LIMIT_S = 5.0
UNQUANTISED = ("f16", "bf16", "f32")
Ask = Callable[[str, AskRequest], AskAnswer]
About = tuple[str, str, str]  # a model's digest, the settings asked with, the path asked about


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
    cold_ram_bytes: int | None = None  # of a resident model's cold store; None: the settings'
    batched: int = 0  # of the slot's sessions: max_sessions doesn't count them

    def policy(self, config: Config) -> CapacityPolicy:
        policy = config.capacity_policy()
        policy = replace(policy, max_sessions=policy.max_sessions + self.batched)
        if self.cold_ram_bytes is None:
            return policy
        bound = min(policy.cold_budget_bytes, self.cold_ram_bytes)
        return replace(policy, cold_budget_bytes=bound)


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
        self.devices: tuple[EngineDevice, ...] = ()  # of the engine, as it greeted
        self._ask = ask
        # Threads of their own: neither waits for other long work, nor do questions to engines,
        # one at a time, make others wait.
        self._reader = ThreadPoolExecutor(1, "modeld-probe")
        self._asker = ThreadPoolExecutor(1, "modeld-ask")
        self._turn = asyncio.Semaphore(1)
        self._waiting: Counter[About] = Counter()
        self._stuck: asyncio.Future[MachineReading] | None = None  # a reading that hangs
        self._asking: dict[About, asyncio.Task[None]] = {}
        self._failed: dict[About, str] = {}
        # Why a device can't be used, not kept for longer: a driver may be installed any time.
        self._no_device: dict[tuple[str, str], str] = {}

    def heard_of(self, build: str, version: str, devices: Sequence[EngineDevice]) -> None:
        """The engine that a worker runs, as it greeted."""
        if build != self.build:
            self._failed.clear()
            self._no_device.clear()
        self.build, self.backend_version, self.devices = build, version, tuple(devices)
        if self.backend == "llama":  # layers are placed on no other engine's devices
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
        if self.backend == "openvino":
            return paged_key(c.n_ubatch, request.k_type, request.v_type, c.openvino_device)
        return cost_key(c.n_batch, c.n_ubatch, request.k_type, request.v_type, flash_attn=False)

    async def ensure_asked(
        self,
        model: StoredModel,
        request: CapacityRequest,
        config: Config | None = None,
        path: Path | None = None,
    ) -> None:
        """Ask the engine about the file, once for each build and choice of types. ``path``: what is
        loaded, where that was made of the model's file.

        What it could not be asked is not tried again before another engine shows up. A question
        that nobody waits for any more isn't put. Raises InvalidRequest for an unknown type.
        """
        if self.backend == "openvino":
            openvino_kv.check_types(request.k_type, request.v_type)
        else:
            block(request.k_type, "k_type")
            block(request.v_type, "v_type")
        digest, key = model.digest, self.key(request, config)
        about = (digest, key, str(path or model.path))
        if about in self._failed or (digest, key) in self._no_device or self._known(digest, key):
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
        costs = found.costs.get(key)
        answered = costs is not None and bool(costs.dry)
        return found.loader == "no" or answered

    async def _put(
        self,
        model: StoredModel,
        request: CapacityRequest,
        config: Config,
        about: About,
    ) -> None:
        digest, key, path = about
        question = AskRequest(
            path=path,
            n_batch=config.n_batch,
            n_ubatch=config.n_ubatch,
            k_type=request.k_type,
            v_type=request.v_type,
            device=config.openvino_device if self.backend == "openvino" else "",
            windows=list(WINDOWS),
        )
        async with self._turn:
            if not self._waiting[about]:
                return
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._asker, self._ask, self.backend, question)
        if answer.device:
            self._no_device[digest, key] = answer.device
            self.devices = self.devices or tuple(answer.devices)
            return
        if answer.loader == "unknown":
            self._failed[about] = "; ".join([answer.words, *answer.notes])
            return
        if not self.build:
            self.heard_of(answer.build_digest, answer.backend_version, answer.devices)
        if not answer.points:
            self._failed[about] = "; ".join(answer.notes) or answer.words
        await asyncio.to_thread(self.evidence.asked, digest, key, answer)

    def known_of(self, digest: str) -> BuildEvidence:
        """What the present engine said of a model; with why it could not be asked."""
        known = self.evidence.build(digest, self.build)
        words = next((why for (of, *_), why in self._failed.items() if of == digest), "")
        if known.loader == "unknown" and words:
            return BuildEvidence(words=words)
        return known

    def check_types(self, question: Question, config: Config | None = None) -> None:
        """Raise InvalidRequest for types that the engine makes no context with: what is known of
        it, or, where it was asked, its own words.
        """
        request = question.request
        check_kv_types(question.facts.model_type, request.k_type, request.v_type)
        key = self.key(question.request, config)
        costs = self.evidence.costs(question.digest, self.build, key)
        if costs is None or costs.dry or not costs.notes:
            return
        raise InvalidRequest.of(
            "k_type",
            f"{request.k_type} with v_type {request.v_type}",
            "types that the engine takes for this model, f16 for both among them",
            f"It said: {costs.notes[0]}",
        )

    def device_words(
        self, digest: str, request: CapacityRequest, config: Config | None = None
    ) -> str:
        """Why the device that the settings name can't run the model; "" where nothing is known
        against it.
        """
        return self._no_device.get((digest, self.key(request, config)), "")

    def check_device(self, question: Question) -> None:
        """Raise InvalidRequest where the device that the settings name can't run the model."""
        words = self.device_words(question.digest, question.request)
        if words:
            there = ", ".join(device.name for device in self.devices) or "CPU"
            raise InvalidRequest.of(
                "openvino_device", self.config.openvino_device, there, f"OpenVINO says: {words}"
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

    async def model_loaded(self, digest: str, request: CapacityRequest, copied: int) -> None:
        """Keep what loading the model took beside its file's pages, for the next plan."""
        key = self.key(request)
        await asyncio.to_thread(self.evidence.model_loaded, digest, self.build, key, copied)

    async def quality_seen(self, digest: str, placement: str, seen: QualityOut) -> None:
        """Keep what the greedy probe of a load sampled."""
        await asyncio.to_thread(
            self.evidence.quality_seen, digest, self.build, self.backend_version, placement, seen
        )

    # --- asking ----------------------------------------------------------------------------------

    def resolve(self, question: Question, machine: MachineReading) -> Resolution:
        """Plan it. Raises InsufficientMemory or InvalidRequest."""
        self.check_types(question)
        self.check_device(question)
        return resolve(
            question.facts,
            question.request,
            question.policy(self.config),
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
        return survey(
            question.facts,
            question.request,
            question.policy(config or self.config),
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


def served_types(config: Config, backend: str, k_type: str, v_type: str) -> tuple[str, str]:
    """The KV types of a request, "" being the settings'. Raises InvalidRequest as
    ``check_kv_types`` does, naming what was given.
    """
    if backend == "openvino":  # one stands for both: a bad one is named by its own field
        for field_name, given in (("k_type", k_type), ("v_type", v_type)):
            if given:
                openvino_kv.check_type(field_name, given)
    k_type, v_type = config.kv_types(backend, k_type, v_type)
    check_kv_types(backend, k_type, v_type)
    return k_type, v_type


def check_kv_types(backend: str, k_type: str, v_type: str) -> None:
    """Raise InvalidRequest for types that no model of the backend is served with."""
    if backend == "openvino":
        openvino_kv.check_types(k_type, v_type)
    else:
        check_v_type(v_type)


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
