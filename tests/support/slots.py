"""Slots of one daemon over workers that only answer: for what a supervisor decides by itself.

The store, the generations, the bus, the planner and the slot are the product's; a worker is a
few numbers, and the machine's reading is set by the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from modeld.shared.asking import AskAnswer, AskPoint, AskRequest
from modeld.shared.capacity import (
    CapacityRequest,
    LayerFacts,
    MachineReading,
    MemorySnapshot,
    ModelFacts,
)
from modeld.shared.errors import ModeldError, ModelNotFound, WorkerUnavailable
from modeld.shared.messages import (
    CloseOp,
    CloseResult,
    Empty,
    EngineDevice,
    ForkOp,
    ForkResult,
    Heartbeat,
    Hello,
    LoadOp,
    LoadResult,
    OpenOp,
    OpenResult,
    ParkOp,
    ParkResult,
    Payload,
    PlacedOut,
    ResumeOp,
    ResumeResult,
    TrimOp,
    TrimResult,
    UnloadOp,
)
from modeld.supervisor import planning_slot
from modeld.supervisor.config import Config, load_config
from modeld.supervisor.events import EventBus
from modeld.supervisor.evidence import EvidenceStore
from modeld.supervisor.generation import GenerationStore
from modeld.supervisor.holdings import Holdings
from modeld.supervisor.lifecycle import WorkerState
from modeld.supervisor.model_slot import ModelSlot, OpenRequest
from modeld.supervisor.models.store import ModelRecord, StoredModel
from modeld.supervisor.planning import Planning
from modeld.supervisor.sessions import Session
from modeld.supervisor.slot_core import Caller

MIB = 1 << 20
GIB = 1 << 30
LAYERS = (LayerFacts(30, 8, 128, 128),)  # f16: 122,880 bytes a token


def facts(model_type: str, name: str, weights_bytes: int = 100 * MIB) -> ModelFacts:
    return ModelFacts(
        architecture="llama",
        name=name,
        layers=LAYERS,
        embedding_length=1024,
        heads=8,
        model_max=131072,
        vocabulary=1000,
        weights_bytes=weights_bytes,
        file_bytes=weights_bytes,
        quantization="int4" if model_type == "openvino" else "Q4_0",
        feed_forward_length=2048,
        model_type=model_type,
    )


def stored(name: str, model_type: str, digest: str = "") -> StoredModel:
    record = ModelRecord(
        name=name,
        type=model_type,
        digest=digest or f"digest-of-{name}",
        size_bytes=1,
        mtime_ns=1,
        inode=1,
        facts=facts(model_type, name),
        imported_unix_ms=1,
        linked=False,
    )
    return StoredModel(record, Path(f"/models/{name}/model"))


class _Conversions:
    async def ensure(self, model: StoredModel, report: Any) -> Path:
        return model.path


class Store:
    """Models by name."""

    def __init__(self, *models: StoredModel) -> None:
        self.models = {model.name: model for model in models}
        self.conversions = _Conversions()

    def get(self, name: str) -> StoredModel:
        if name not in self.models:
            raise ModelNotFound(f"No model is named {name!r}.")
        return self.models[name]

    def smaller_than(self, facts: ModelFacts) -> tuple[ModelFacts, ...]:
        return ()


class Machine:
    """A reading that the test sets; what workers touch goes off it."""

    def __init__(self, total: int = 16 * GIB, available: int = 12 * GIB) -> None:
        self.total, self.available = total, available

    def read(self) -> MachineReading:
        return MachineReading(MemorySnapshot(self.total, self.available))

    def attach_engine(self, devices: Sequence[EngineDevice]) -> None:
        pass


class _Operation:
    """An answer that is there at once, or a refusal; or once a gate is opened."""

    def __init__(self, answer: Payload | ModeldError, gate: asyncio.Event | None) -> None:
        self.kind, self.ended, self._answer, self._gate = "fake", True, answer, gate

    async def next(self) -> None:
        return None

    async def result(self) -> Payload:
        if self._gate is not None:
            await self._gate.wait()
        if isinstance(self._answer, ModeldError):
            raise self._answer
        return self._answer

    def cancel(self) -> None:
        pass


@dataclass
class Worker:
    """Answers loads, opens, closes, parks, resumes and forks. ``anonymous`` is its memory, in
    bytes; what it parks takes ``parked_share`` of a context.
    """

    backend: str
    machine: Machine
    pid: int
    kv_untouched: bool = False
    copied: int = 0  # bytes that a load takes of its own
    compute: int = 0  # bytes that a context reports
    anonymous: int = 50 * MIB
    sent: list[Payload] = field(default_factory=list)
    contexts: dict[str, int] = field(default_factory=dict)  # KV bytes by session
    windows: dict[str, int] = field(default_factory=dict)
    longest_gap_s: dict[str, float] = field(default_factory=dict)
    state: WorkerState = WorkerState.IDLE
    cold_store: str = "yes: tried"
    fork: str = "yes: tried"
    parked: dict[str, int] = field(default_factory=dict)  # windows by session
    parked_share: float = 0.1
    cold: int = 0  # bytes that are parked
    lost: int = 0  # tokens that each park loses
    heartbeat: Heartbeat | None = None
    refusals: dict[type, ModeldError] = field(default_factory=dict)  # by operation
    gates: dict[type, asyncio.Event] = field(default_factory=dict)  # by operation
    unreachable: Callable[[], None] | None = None  # it left just now; what knowing it does

    def beat(self) -> None:
        self.heartbeat = Heartbeat(progress=0, busy_op=0, cold_bytes=self.cold)

    @property
    def hello(self) -> Hello:
        return Hello(backend=self.backend, backend_version="1", build_digest="b", pid=self.pid)

    async def ready(self, deadline: float | None) -> Hello:
        return self.hello

    async def loss_known(self) -> None:
        if self.unreachable is not None:
            self.unreachable()

    def call(self, generation: int, payload: Payload, credit: int = 0) -> _Operation:
        if self.unreachable is not None:
            raise WorkerUnavailable("Nothing was sent to the worker: Host unreachable.")
        self.sent.append(payload)
        gate = self.gates.get(type(payload))
        refusal = self.refusals.get(type(payload))
        return _Operation(self._answer(payload) if refusal is None else refusal, gate)

    def touch(self, size: int) -> None:
        """Write to so much more memory, which the machine's reading then lacks."""
        self.anonymous += size
        self.machine.available -= size

    def _answer(self, payload: Payload) -> Payload:
        if isinstance(payload, LoadOp):
            self.touch(self.copied)
            return LoadResult(
                description="",
                vocab=1000,
                train_context=131072,
                weights_bytes=100 * MIB,
                add_bos=False,
                template_digest="",
                template_supports_tools=False,
                threads=1,
                capabilities={"cold_store": self.cold_store, "fork": self.fork},
                seconds=0.0,
                placed=[PlacedOut(device="CPU", weights_bytes=100 * MIB)],
                executor="paged" if self.kv_untouched else "",
                longest_gap_s={"evaluate": 7.0} if self.kv_untouched else {},
                kv_untouched=self.kv_untouched,
            )
        if isinstance(payload, OpenOp):
            return self._opened(payload)
        if isinstance(payload, CloseOp):
            self._freed(payload.session_id)
            self.parked.pop(payload.session_id, None)
            return CloseResult(retained=0, **self._totals())
        if isinstance(payload, ParkOp):
            return self._parked(payload)
        if isinstance(payload, ResumeOp):
            return self._resumed(payload)
        if isinstance(payload, ForkOp):
            assert payload.session_id in self.contexts, "it has no context"
            window = self.windows[payload.session_id]
            made = self._made(payload.new_session_id, window)
            half = window // 2
            return ForkResult(copied=half, resident=half, seconds=0.0, turn_ids=["t-1"], **made)
        if isinstance(payload, TrimOp):
            assert payload.session_id in self.contexts, "it has no context"
            return TrimResult(dropped=0, resident=0, available=0, retained=0)
        assert isinstance(payload, UnloadOp), payload
        for session_id in list(self.contexts):
            self._freed(session_id)
        self.parked.clear()
        self.touch(-self.copied - self.cold)
        self.cold = 0
        return Empty()

    def _opened(self, payload: OpenOp) -> OpenResult:
        width = {"f16": 2.0, "f32": 4.0, "u8": 1.1875, "u4": 0.6875, "q8_0": 1.53125}
        return OpenResult(**self._made(payload.session_id, payload.window, width[payload.k_type]))

    def _made(self, session_id: str, window: int, width: float = 2.0) -> dict[str, Any]:
        size = int(window * 30 * 8 * 256 * width)
        self.contexts[session_id] = size
        self.windows[session_id] = window
        if not self.kv_untouched:
            self.touch(size)
        return {
            "window": window,
            "kv_bytes": size,
            "compute_bytes": self.compute,
            "reused_context": False,
            "retained": 0,
            **self._totals(),
        }

    def _freed(self, session_id: str) -> int:
        size = self.contexts.pop(session_id, 0)
        self.windows.pop(session_id, None)
        if not self.kv_untouched:
            self.touch(-size)
        return size

    def _parked(self, payload: ParkOp) -> ParkResult:
        window = self.windows[payload.session_id]
        kept = int(self._freed(payload.session_id) * self.parked_share)
        self.parked[payload.session_id] = window
        self.cold += kept
        self.touch(kept)
        return ParkResult(
            parked=window // 10,
            lost=self.lost,
            ram_bytes=self.cold,
            disk_bytes=0,
            seconds=0.0,
            **self._totals(),
        )

    def _resumed(self, payload: ResumeOp) -> ResumeResult:
        window = self.parked.pop(payload.session_id)
        made = self._made(payload.session_id, window)
        held = window // 10
        return ResumeResult(
            restored=held - self.lost, missing=self.lost, resident=held, seconds=0.25, **made
        )

    def _totals(self) -> dict[str, Any]:
        compute = self.compute * len(self.contexts)
        return {
            "slot_cells": sum(self.windows.values()),
            "slot_bytes": sum(self.contexts.values()) + compute,
            "slot_compute_bytes": compute,
        }


@dataclass
class Slots:
    config: Config
    machine: Machine
    store: Store
    slots: dict[str, ModelSlot]
    workers: dict[str, Worker]

    async def open(self, name: str, window: int = 0, k_type: str = "", v_type: str = "") -> Any:
        """As ``OpenSession``: the model's own slot, and the settings' types."""
        slot = self.slots[self.store.get(name).type]
        k_type, v_type = self.config.kv_types(slot.backend, k_type, v_type)
        capacity = CapacityRequest(window=window, k_type=k_type, v_type=v_type)
        opened = await slot.open(OpenRequest(name, capacity, "", "", ""), Caller())
        return opened.session

    def loads(self, backend: str) -> list[LoadOp]:
        return [sent for sent in self.workers[backend].sent if isinstance(sent, LoadOp)]


def answered(copied: int) -> AskAnswer:
    return AskAnswer(
        loader="yes",
        backend_version="1",
        build_digest="b",
        copied_bytes=copied,
        points=[AskPoint(256, 256 * 122_880, 0)],
    )


def make_slots(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    copied: int = 300 * MIB,
    machine: Machine | None = None,
    asked: AskAnswer | None = None,
    **settings: object,
) -> Slots:
    """A llama and an openvino slot on one machine, with a model each ("big" and "ir")."""
    config = load_config({"backends": "llama,openvino", **settings}, {}, tmp_path)
    machine = machine or Machine()
    store = Store(stored("big", "llama"), stored("ir", "openvino"), stored("ir2", "openvino"))
    generations = GenerationStore.open(tmp_path)
    holdings, slots, workers = Holdings(), dict[str, ModelSlot](), dict[str, Worker]()
    evidence = EvidenceStore(tmp_path)

    def ask(backend: str, request: AskRequest) -> AskAnswer:
        if asked is not None:
            return asked
        return answered(copied if backend == "openvino" else 0)

    for number, backend in enumerate(config.backends):
        worker = Worker(backend, machine, pid=1000 + number)
        if backend == "openvino":
            worker = replace(worker, kv_untouched=True, copied=copied)
        slot = ModelSlot(
            backend,
            config=config,
            store=store,  # type: ignore[arg-type]
            generations=generations,
            bus=EventBus(),
            planning=Planning(backend, config, machine, evidence, ask),
            holdings=holdings,
        )
        slot.attach_keeper(worker)  # type: ignore[arg-type]
        slot.worker_changed()
        holdings.join(backend, slot.held)
        slots[backend], workers[backend] = slot, worker
    by_pid = {worker.pid: worker for worker in workers.values()}
    monkeypatch.setattr(planning_slot, "anonymous_bytes", lambda pid: by_pid[pid].anonymous)
    return Slots(config, machine, store, slots, workers)


async def open_several(slots: Slots, count: int, window: int) -> list[Session]:
    """Sessions of "big", in the order of their last use."""
    opened = []
    for number in range(count):
        session = await slots.open("big", window)
        session.used_at = float(number)
        opened.append(session)
    return opened
