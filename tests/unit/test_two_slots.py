"""Two backends in one daemon: whose model it is, what both hold, and what types are compiled in."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modeld.shared.asking import AskAnswer
from modeld.shared.capacity import CapacityRequest, Resolution
from modeld.shared.errors import (
    BackendMismatch,
    InsufficientMemory,
    InvalidRequest,
    ModelNotFound,
    SwitchRequired,
    UnsupportedModelType,
)
from modeld.shared.messages import EngineDevice, Hello, UnloadOp
from modeld.supervisor.fleet import HeartbeatLimits, WorkerKeeper
from modeld.supervisor.planning import check_kv_types, served_types
from modeld.supervisor.planning_slot import WhatIf
from modeld.supervisor.rpc.services import Services
from tests.support.slots import GIB, MIB, Machine, Slots, make_slots

KV_A_TOKEN = 122_880  # f16
WINDOW = 32_768


@pytest.fixture
def slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slots:
    return make_slots(tmp_path, monkeypatch)


async def planned(slots: Slots, name: str, window: int = 0, **settings: str) -> Resolution:
    slot = slots.slots[slots.store.get(name).type]
    k_type, v_type = slots.config.kv_types(slot.backend)
    request = CapacityRequest(window=window, k_type=k_type, v_type=v_type)
    plan, _ = await slot.hypothetical(slots.store.get(name), WhatIf(request, settings=settings))
    return plan


def row(plan: Resolution, name: str) -> int:
    return next((one.bytes for one in plan.budget if one.name == name), 0)


# --- one machine ---------------------------------------------------------------------------------


async def test_what_one_slot_was_promised_is_not_planned_again_by_the_other(slots: Slots) -> None:
    before = await planned(slots, "big")
    session = await slots.open("ir", WINDOW)
    reading = slots.machine.available
    kv = WINDOW * KV_A_TOKEN
    assert slots.workers["openvino"].contexts[session.session_id] == kv
    assert reading > 12 * GIB - 400 * MIB  # only the weights were touched: the KV looks free
    after = await planned(slots, "big")
    lost = before.numbers.memory_fit.tokens - after.numbers.memory_fit.tokens
    assert lost * KV_A_TOKEN > kv * 0.95
    assert row(after, "free") == reading
    assert row(after, "elsewhere_untouched") >= kv + 100 * MIB  # and the mapped weights
    assert row(before, "elsewhere_untouched") == 0


async def test_a_second_open_is_refused_for_the_first_one_s_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch, machine=Machine(8 * GIB, 6 * GIB))
    assert (await planned(slots, "big", 30_000)).refusal is None
    await slots.open("ir", 24_000)
    assert slots.machine.available > 30_000 * KV_A_TOKEN + 1 * GIB  # it looks as if there were room
    with pytest.raises(InsufficientMemory) as refused:
        await slots.open("big", 30_000)
    numbers = refused.value.metadata
    assert int(numbers["elsewhere_untouched_bytes"]) > 24_000 * KV_A_TOKEN
    assert "of other slots that count as free" in refused.value.message
    assert "unload the other backend's model" in refused.value.message
    assert not slots.loads("llama")  # nothing was tried
    largest = int(numbers["largest_window"])
    assert 0 < largest < 30_000
    await slots.open("big", largest)


async def test_promises_end_as_they_are_touched_and_the_plan_stays_the_same(slots: Slots) -> None:
    await slots.open("ir", WINDOW)
    plans = [await planned(slots, "big")]
    for _ in range(3):
        slots.workers["openvino"].touch(WINDOW * KV_A_TOKEN // 4)
        plans.append(await planned(slots, "big"))
    fits = [plan.numbers.memory_fit.tokens for plan in plans]
    assert max(fits) - min(fits) <= 256  # what counts as slack, and the engine's pad
    promises = [row(plan, "elsewhere_untouched") for plan in plans]
    assert promises == sorted(promises, reverse=True)
    assert promises[0] - promises[-1] > WINDOW * KV_A_TOKEN // 2


async def test_a_slot_s_own_promises_are_charged_to_its_next_session(slots: Slots) -> None:
    before = await planned(slots, "ir")
    await slots.open("ir", WINDOW)
    after = await planned(slots, "ir", 1024)
    assert row(after, "promised") >= WINDOW * KV_A_TOKEN
    held = WINDOW + row(after, "kv_at_memory_fit") // KV_A_TOKEN
    assert held <= before.numbers.memory_fit.tokens * 1.02
    assert after.numbers.memory_fit.tokens >= WINDOW


async def test_kv_that_is_touched_when_it_is_made_is_counted_once(slots: Slots) -> None:
    before = await planned(slots, "ir")
    await slots.open("big", WINDOW)
    after = await planned(slots, "ir")
    lost = before.numbers.memory_fit.tokens - after.numbers.memory_fit.tokens
    kv, a_token = (
        WINDOW * KV_A_TOKEN,
        row(after, "kv_at_memory_fit") // after.numbers.memory_fit.tokens,
    )
    a_token += row(after, "compute_at_memory_fit") // after.numbers.memory_fit.tokens
    # The KV went off the reading. What is charged beside it are the other model's mapped weights.
    assert kv <= lost * a_token / 0.98 < kv + 200 * MIB
    assert row(after, "elsewhere_untouched") == 100 * MIB


async def test_a_user_s_limit_holds_for_both_slots_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch, user_limit_bytes="6GiB")
    await slots.open("ir", 16_384)
    plan = await planned(slots, "big")
    taken = 16_384 * KV_A_TOKEN + 400 * MIB
    assert row(plan, "elsewhere") >= taken
    assert row(plan, "budget") <= 6 * GIB - taken
    assert plan.numbers.memory_fit.tokens * KV_A_TOKEN <= 6 * GIB - taken


async def test_weights_are_charged_as_mapped_and_as_what_the_engine_keeps_of_them(
    slots: Slots,
) -> None:
    plan = await planned(slots, "ir")
    assert (row(plan, "weights"), row(plan, "weights_copied")) == (100 * MIB, 300 * MIB)
    await slots.open("ir", 1024)
    again = await planned(slots, "ir", 1024)
    # Loaded, it is off the reading, and given back before it is charged again.
    assert (row(again, "loaded"), row(again, "weights_copied")) == (300 * MIB, 300 * MIB)


async def test_what_a_load_took_is_kept_for_the_next_plan_and_told_where_it_was_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch)
    slots.workers["openvino"].copied = 500 * MIB
    await slots.open("ir", 1024)
    resident = slots.slots["openvino"].resident
    assert resident is not None
    assert any("in the engine's own form" in finding for finding in resident.findings)
    caller = _caller()
    await slots.slots["openvino"].unload(caller, force=True)
    assert row(await planned(slots, "ir"), "weights_copied") == 500 * MIB


async def test_memory_comes_back_to_the_other_slot_when_a_model_is_unloaded(slots: Slots) -> None:
    before = await planned(slots, "big")
    await slots.open("ir", WINDOW)
    await slots.slots["openvino"].unload(_caller(), force=True)
    after = await planned(slots, "big")
    assert after.numbers.memory_fit.tokens == before.numbers.memory_fit.tokens
    assert row(after, "elsewhere_untouched") == 0


# --- KV types that are compiled in ---------------------------------------------------------------


async def test_a_load_is_told_the_first_session_s_types_its_window_and_the_device(
    slots: Slots,
) -> None:
    await slots.open("ir", 2048, "u8")
    (load,) = slots.loads("openvino")
    assert (load.k_type, load.v_type, load.window, load.device) == ("u8", "u8", 2048, "CPU")
    await slots.open("big", 1024, "q8_0")
    (load,) = slots.loads("llama")
    assert (load.k_type, load.v_type, load.device) == ("q8_0", "f16", "")


async def test_other_types_beside_an_open_session_name_those_that_are_resident(
    slots: Slots,
) -> None:
    await slots.open("ir", 1024)
    with pytest.raises(SwitchRequired) as refused:
        await slots.open("ir", 1024, "u8")
    told = refused.value.metadata
    assert (told["resident_k_type"], told["resident_v_type"]) == ("f16", "f16")
    assert (told["k_type"], told["resident_model"], told["sessions"]) == ("u8", "ir", "1")
    assert "Ask for f16" in refused.value.message
    assert len(slots.loads("openvino")) == 1
    await slots.open("ir", 1024)  # those that are resident still open


async def test_other_types_load_the_model_again_when_no_session_is_attached(slots: Slots) -> None:
    session = await slots.open("ir", 1024)
    slot = slots.slots["openvino"]
    await slot.close(session, why="test")
    again = await slots.open("ir", 1024, "u4")
    assert [load.k_type for load in slots.loads("openvino")] == ["f16", "u4"]
    assert any(isinstance(sent, UnloadOp) for sent in slots.workers["openvino"].sent)
    assert again.generation > session.generation
    assert slot.kv_types == ("u4", "u4")
    assert again.identity.kv_digest != session.identity.kv_digest


async def test_a_detached_session_stands_in_no_reload_s_way(slots: Slots) -> None:
    session = await slots.open("ir", 1024)
    session.attached, session.used_at = False, time.monotonic() - 1000
    await slots.open("ir", 1024, "u8")
    assert len(slots.loads("openvino")) == 2


async def test_llama_takes_types_by_session_and_is_never_loaded_again_for_them(
    slots: Slots,
) -> None:
    await slots.open("big", 1024)
    await slots.open("big", 1024, "q8_0")
    assert len(slots.loads("llama")) == 1


@pytest.mark.parametrize(
    ("k_type", "v_type", "field"),
    [("bf16", "bf16", "k_type"), ("q8_0", "f16", "k_type"), ("u8", "u4", "v_type")],
)
async def test_types_that_openvino_does_not_serve_are_refused_by_name_before_anything(
    slots: Slots, k_type: str, v_type: str, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await slots.open("ir", 1024, k_type, v_type)
    assert refused.value.metadata["field"] == field
    assert "f16" in refused.value.metadata["allowed"] or k_type in refused.value.metadata["allowed"]
    assert not slots.workers["openvino"].sent
    check_kv_types("llama", "q8_0", "f16")
    with pytest.raises(InvalidRequest, match="flash attention"):
        check_kv_types("llama", "f16", "q8_0")


@pytest.mark.parametrize(
    ("k_type", "v_type", "field"), [("", "q8_0", "v_type"), ("q8_0", "", "k_type")]
)
def test_a_type_that_stands_for_both_is_refused_by_the_name_it_was_given_under(
    slots: Slots, k_type: str, v_type: str, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        served_types(slots.config, "openvino", k_type, v_type)
    assert refused.value.metadata["field"] == field


def test_one_type_stands_for_both_of_an_openvino_model(slots: Slots) -> None:
    config = slots.config
    assert config.kv_types("openvino") == ("f16", "f16")
    assert config.kv_types("openvino", "u8") == ("u8", "u8")
    assert config.kv_types("openvino", "", "u4") == ("u4", "u4")
    assert config.kv_types("llama", "q8_0") == ("q8_0", "f16")


# --- devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["GPU", "FOO"])
async def test_a_device_that_is_not_there_is_refused_in_the_library_s_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    told = AskAnswer(
        loader="unknown",
        words="not tried",
        device="libOpenCL.so.1: cannot open shared object file",
        backend_version="1",
        build_digest="b",
        devices=[EngineDevice(name="CPU", description="", kind="cpu")],
    )
    slots = make_slots(tmp_path, monkeypatch, asked=told, openvino_device=device)
    with pytest.raises(InvalidRequest) as refused:
        await slots.open("ir", 1024)
    assert refused.value.metadata["field"] == "openvino_device"
    assert (refused.value.metadata["value"], refused.value.metadata["allowed"]) == (device, "CPU")
    assert "libOpenCL" in refused.value.message
    assert not slots.workers["openvino"].sent
    slot = slots.slots["openvino"]
    request = CapacityRequest()
    assert "libOpenCL" in slot.planning.device_words("digest-of-ir", request)


async def test_the_device_is_part_of_what_kv_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for device in ("CPU", "GPU"):
        folder = tmp_path / device
        folder.mkdir()
        slots = make_slots(folder, monkeypatch, openvino_device=device)
        found.add((await slots.open("ir", 1024)).identity.kv_digest)
    assert len(found) == 2


# --- how long a worker may be silent -------------------------------------------------------------


async def test_a_loaded_model_s_own_gaps_count_until_it_is_gone(slots: Slots) -> None:
    keeper: Any = slots.workers["openvino"]
    await slots.open("ir", 1024)
    assert keeper.longest_gap_s == {"evaluate": 7.0}
    await slots.slots["openvino"].unload(_caller(), force=True)
    assert keeper.longest_gap_s == {}


def test_a_worker_counts_as_hung_by_the_gaps_of_the_model_that_it_runs() -> None:
    link, limits = SimpleNamespace(heartbeat_interval_s=0.5), HeartbeatLimits(slack_s=1.0)
    keeper = WorkerKeeper("openvino", None, link, limits=limits)  # type: ignore[arg-type]
    keeper.hello = Hello(
        backend="openvino",
        backend_version="1",
        build_digest="b",
        pid=1,
        longest_gap_s={"evaluate": 4.0},
    )
    peer: Any = SimpleNamespace(operations={1: SimpleNamespace(kind="DecodeOp")})
    assert keeper._silence_limit_s(peer) == 5.0
    keeper.longest_gap_s = {"evaluate": 30.0}
    assert keeper._silence_limit_s(peer) == 31.0


# --- whose model it is ---------------------------------------------------------------------------


def services(slots: Slots, *backends: str) -> Services:
    served = {name: slots.slots[name] for name in backends or slots.slots}
    return Services(None, slots.config, slots.store, served, None)  # type: ignore[arg-type]


def test_a_model_s_own_record_says_which_slot_serves_it(slots: Slots) -> None:
    both = services(slots)
    assert both.slot_of_model("big").backend == "llama"
    assert both.slot_of_model("ir").backend == "openvino"
    assert both.slot_of_model("ir", "openvino").backend == "openvino"
    assert services(slots, "openvino", "llama").slot_of_model("big").backend == "llama"


def test_a_type_that_contradicts_the_record_is_a_mismatch(slots: Slots) -> None:
    with pytest.raises(BackendMismatch) as refused:
        services(slots).slot_of_model("ir", "llama")
    assert refused.value.metadata["type"] == "openvino"
    assert refused.value.metadata["asked_type"] == "llama"


def test_a_model_of_a_backend_that_is_not_served_says_which_are(slots: Slots) -> None:
    with pytest.raises(BackendMismatch, match="backends") as refused:
        services(slots, "llama").slot_of_model("ir")
    assert refused.value.metadata["backends"] == "llama"
    with pytest.raises(BackendMismatch):
        services(slots, "llama").slot_of_model("ir", "openvino")


def test_names_and_types_that_nobody_knows_are_told_as_such(slots: Slots) -> None:
    with pytest.raises(ModelNotFound):
        services(slots).slot_of_model("nobody")
    with pytest.raises(UnsupportedModelType):
        services(slots).slot_of_model("big", "onnx")


def _caller() -> Any:
    from modeld.supervisor.slot_core import Caller

    return Caller()
