"""Which evidence and which devices a plan is made from, and how often the engine is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from modeld.shared.asking import WINDOWS, AskAnswer, AskPoint, AskRequest
from modeld.shared.capacity import (
    CapacityRequest,
    DeviceKind,
    DeviceReading,
    LayerFacts,
    MachineReading,
    MemorySnapshot,
    ModelFacts,
)
from modeld.shared.errors import InvalidRequest
from modeld.shared.messages import EngineDevice
from modeld.supervisor import asking
from modeld.supervisor.config import load_config
from modeld.supervisor.evidence import EvidenceStore
from modeld.supervisor.models.store import ModelRecord, StoredModel
from modeld.supervisor.planning import Planning, Question, allowed

GIB = 1 << 30
FACTS = ModelFacts(
    architecture="llama",
    name="tiny",
    layers=(LayerFacts(2, 2, 16, 16),),
    embedding_length=64,
    heads=4,
    model_max=2048,
    vocabulary=272,
    weights_bytes=1 << 20,
    file_bytes=1 << 20,
    quantization="F32",
)
MODEL = StoredModel(
    ModelRecord(
        name="tiny",
        type="llama",
        digest="ab" * 32,
        size_bytes=1,
        mtime_ns=1,
        inode=1,
        facts=FACTS,
        imported_unix_ms=1,
        linked=False,
    ),
    Path("/models/tiny/model.gguf"),
)
MACHINE = MachineReading(MemorySnapshot(24 * GIB, 20 * GIB))
PLAIN = CapacityRequest()


class Machine:
    def __init__(self, reading: MachineReading = MACHINE) -> None:
        self.reading = reading
        self.engine: tuple[EngineDevice, ...] = ()

    def read(self) -> MachineReading:
        return self.reading

    def attach_engine(self, devices: Sequence[EngineDevice]) -> None:
        self.engine = tuple(devices)


class Engine:
    """Answers as an engine would, and keeps what it was asked."""

    def __init__(self, **changes: object) -> None:
        self.asked: list[AskRequest] = []
        values: dict[str, object] = {
            "loader": "yes",
            "backend_version": "engine 1",
            "build_digest": "b1",
            "points": [AskPoint(256, 65536, 7_000_000), AskPoint(512, 131072, 7_500_000)],
            **changes,
        }
        self.answer = AskAnswer(**values)  # type: ignore[arg-type]

    def __call__(self, backend: str, request: AskRequest) -> AskAnswer:
        self.asked.append(request)
        return self.answer


def planning(tmp_path: Path, engine: Engine, machine: Machine | None = None) -> Planning:
    config = load_config({}, {}, tmp_path)
    return Planning("llama", config, machine or Machine(), EvidenceStore(tmp_path), engine)


def test_the_engine_is_asked_once_for_each_choice_of_types(tmp_path: Path) -> None:
    engine = Engine()
    plans = planning(tmp_path, engine)

    async def many() -> None:
        await asyncio.gather(*(plans.ensure_asked(MODEL, PLAIN) for _ in range(5)))
        await plans.ensure_asked(MODEL, PLAIN)
        await plans.ensure_asked(MODEL, replace(PLAIN, k_type="q8_0"))

    asyncio.run(many())
    assert [request.k_type for request in engine.asked] == ["f16", "q8_0"]
    assert engine.asked[0].windows == list(WINDOWS)
    assert engine.asked[0].path == str(MODEL.path)


def test_another_daemon_on_the_data_root_need_not_ask_again(tmp_path: Path) -> None:
    asyncio.run(planning(tmp_path, Engine()).ensure_asked(MODEL, PLAIN))
    second = Engine()
    plans = planning(tmp_path, second)
    plans.heard_of("b1", "engine 1", [])
    asyncio.run(plans.ensure_asked(MODEL, PLAIN))
    assert second.asked == []


def test_another_build_of_the_engine_is_asked_anew(tmp_path: Path) -> None:
    asyncio.run(planning(tmp_path, Engine()).ensure_asked(MODEL, PLAIN))
    second = Engine(build_digest="b2")
    plans = planning(tmp_path, second)
    plans.heard_of("b2", "engine 2", [])
    asyncio.run(plans.ensure_asked(MODEL, PLAIN))
    assert len(second.asked) == 1


def test_an_engine_that_could_not_be_asked_is_unknown_with_why_and_not_asked_again(
    tmp_path: Path,
) -> None:
    engine = Engine(loader="unknown", words="it ended with signal SIGSEGV", build_digest="")
    plans = planning(tmp_path, engine)
    asyncio.run(plans.ensure_asked(MODEL, PLAIN))
    asyncio.run(plans.ensure_asked(MODEL, PLAIN))
    known = plans.known_of(MODEL.digest)
    assert (known.loader, known.words) == ("unknown", "it ended with signal SIGSEGV")
    assert len(engine.asked) == 1


def test_a_refused_architecture_is_not_asked_about_again(tmp_path: Path) -> None:
    engine = Engine(loader="no", words="unknown model architecture: 'zorkformer'", points=[])
    plans = planning(tmp_path, engine)
    asyncio.run(plans.ensure_asked(MODEL, PLAIN))
    asyncio.run(plans.ensure_asked(MODEL, replace(PLAIN, k_type="q8_0")))
    assert len(engine.asked) == 1
    assert "zorkformer" in plans.known_of(MODEL.digest).words


def test_a_plan_takes_the_engine_s_own_costs_where_it_told_them(tmp_path: Path) -> None:
    plans = planning(tmp_path, Engine())
    question = Question(FACTS, MODEL.digest, CapacityRequest(window=512))
    before = plans.resolve(question, MACHINE)
    asyncio.run(plans.ensure_asked(MODEL, PLAIN))
    after = plans.resolve(question, MACHINE)
    assert after.compute_bytes == 7_500_000
    assert before.compute_bytes != after.compute_bytes
    assert before.kv_bytes == after.kv_bytes == 131072


def test_what_a_load_really_cost_corrects_the_next_plan(tmp_path: Path) -> None:
    plans = planning(tmp_path, Engine())
    asyncio.run(plans.ensure_asked(MODEL, PLAIN))
    asyncio.run(plans.context_made(MODEL.digest, PLAIN, 512, 131072, 7_900_000))
    plan = plans.resolve(Question(FACTS, MODEL.digest, CapacityRequest(window=512)), MACHINE)
    assert plan.compute_bytes == 7_900_000


CARD = DeviceReading("GPU-1", "card", DeviceKind.NVIDIA, 24 * GIB, 20 * GIB, engine_name="CUDA0")
IDLE = DeviceReading("GPU-2", "other", DeviceKind.NVIDIA, 8 * GIB, 8 * GIB)


def test_only_named_devices_are_used_and_a_missing_one_is_told() -> None:
    machine = replace(MACHINE, devices=(CARD, IDLE))
    assert allowed(machine, ()) == machine
    assert allowed(machine, ("CUDA0",)).devices == machine.devices
    assert allowed(machine, ("GPU-1",)).devices[0].engine_name == "CUDA0"
    none = allowed(machine, ("none",))
    assert [device.engine_name for device in none.devices] == ["", ""]
    absent = allowed(machine, ("CUDA7",))
    assert absent.devices[0].engine_name == ""
    assert any("CUDA7" in note for note in absent.notes)


def test_a_driver_that_hangs_costs_the_devices_and_not_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modeld.supervisor.planning.READ_LIMIT_S", 0.05)
    answered = threading.Event()
    reads: list[int] = []

    class Hanging(Machine):
        def read(self) -> MachineReading:
            reads.append(1)
            if len(reads) == 1:
                answered.wait(30)
            return MACHINE

    async def both() -> None:
        plans = planning(tmp_path, Engine(), Hanging())
        for _ in range(2):
            reading = await plans.read()
            assert reading.host.known
            assert any("did not answer" in note for note in reading.notes)
        assert len(reads) == 1
        answered.set()
        assert plans._stuck is not None
        await plans._stuck
        assert await plans.read() == MACHINE

    asyncio.run(both())


def test_questions_are_put_one_at_a_time_and_none_that_nobody_waits_for(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Engine):
        def __call__(self, backend: str, request: AskRequest) -> AskAnswer:
            inside.append(1)
            most.append(len(inside))
            begun.set()
            go_on.wait(30)
            inside.pop()
            return super().__call__(backend, request)

    engine = Slow()
    plans = planning(tmp_path, engine)

    async def flood() -> None:
        batches = [load_config({"n_batch": 512 + n}, {}, tmp_path) for n in range(6)]
        asked = [
            asyncio.ensure_future(plans.ensure_asked(MODEL, PLAIN, config)) for config in batches
        ]
        await asyncio.to_thread(begun.wait, 30)
        for task in asked[1:5]:
            task.cancel()
        await asyncio.gather(*asked[1:5], return_exceptions=True)
        go_on.set()
        await asyncio.gather(asked[0], asked[5])

    asyncio.run(flood())
    assert [request.n_batch for request in engine.asked] == [512, 517]
    assert max(most) == 1


def test_an_unknown_type_is_refused_before_the_engine_is_asked(tmp_path: Path) -> None:
    engine = Engine()
    plans = planning(tmp_path, engine)
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(plans.ensure_asked(MODEL, CapacityRequest(k_type="nonsense")))
    assert refused.value.metadata["field"] == "k_type"
    assert engine.asked == []


def test_an_engine_that_does_not_start_is_told_in_its_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(asking.MODULES, "llama", "modeld.no_such_engine")
    answer = asking.ask_engine("llama", AskRequest())
    assert answer.loader == "unknown"
    assert "exit code 1" in answer.words
    assert "No module named modeld.no_such_engine" in answer.words
