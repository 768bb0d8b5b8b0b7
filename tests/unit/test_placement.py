"""Placement on accelerators: what goes where, that it fits there, and what a refusal offers."""

from __future__ import annotations

import struct
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeld.shared.capacity import (
    CapacityPolicy,
    CapacityRequest,
    Companions,
    DevicePlan,
    DeviceReading,
    LayerFacts,
    LayerKind,
    MachineReading,
    ModelFacts,
    PlacedUse,
    Placement,
    Reason,
    Remedy,
    Resolution,
    SlotUse,
)
from modeld.shared.errors import InsufficientMemory, InvalidRequest
from modeld.shared.planner.budget import device_reserve
from modeld.shared.planner.capacity import confirm, resolve, survey
from modeld.shared.planner.placement import engine_counts
from modeld.shared.planner.remedies import use_after_switch
from tests.support import planning_inputs as inputs
from tests.support.planning_inputs import GIB, MIB, device, machine, model

POLICY = CapacityPolicy()
SHED = replace(POLICY, placement=Placement.SHED)
AUTO = CapacityRequest()
FRESH = SlotUse()
WHOLE = 33  # layers of the model, with its output


def plan(
    found: ModelFacts,
    there: MachineReading,
    request: CapacityRequest = AUTO,
    policy: CapacityPolicy = POLICY,
    use: SlotUse = FRESH,
) -> Resolution:
    return resolve(found, request, policy, there, use)


def on_devices(found: Resolution) -> list[DevicePlan]:
    return [row for row in found.devices if row.device_id != "host"]


def on_host(found: Resolution) -> DevicePlan:
    assert found.devices[0].device_id == "host"
    return found.devices[0]


def note(found: Resolution) -> str:
    return next(row.note for row in found.budget if row.name == "placement")


def findings(found: Resolution) -> str:
    return "\n".join(found.findings)


# --- one accelerator -------------------------------------------------------------------------


def test_a_model_that_fits_its_accelerator_goes_there_whole() -> None:
    found = plan(model(), machine(24 * GIB))
    assert found.placement == "device"
    assert found.gpu_layers == WHOLE
    assert found.tensor_split == (33.0,)
    assert not found.shed
    (there,) = on_devices(found)
    assert (there.layers, there.first_layer, there.engine_name) == (33, 0, "CUDA0")
    assert there.weights_bytes == 32 * 128 * MIB + 400 * MIB
    assert on_host(found).weights_bytes == 256 * MIB  # the token embedding stays
    assert on_host(found).layers == 0
    assert on_host(found).first_layer == -1


def test_kv_lives_where_its_layers_live() -> None:
    found = plan(model(), machine(24 * GIB), CapacityRequest(window=8192))
    (there,) = on_devices(found)
    assert there.kv_bytes == 8192 * 32 * 8 * 256 * 2 == found.kv_bytes
    assert on_host(found).kv_bytes == 0
    half = plan(
        model(), machine(24 * GIB), CapacityRequest(window=8192), replace(POLICY, gpu_layers=17)
    )
    assert half.placement == "split"
    assert [row.kv_bytes for row in half.devices] == [found.kv_bytes // 2] * 2
    assert [row.layers for row in half.devices] == [16, 17]
    assert half.devices[1].first_layer == 16


def test_recurrent_states_live_where_their_layers_live() -> None:
    layers = (
        LayerFacts(8, 8, 128, 128),
        LayerFacts(8, 0, 0, 0, kind=LayerKind.RECURRENT, state_bytes=MIB),
    )
    policy = replace(POLICY, gpu_layers=9)
    found = plan(model(layers), machine(24 * GIB), CapacityRequest(window=4096), policy)
    (there,) = on_devices(found)
    assert there.kv_bytes == 8 * 2 * MIB
    assert on_host(found).kv_bytes == 4096 * 8 * 8 * 256 * 2


def test_a_tied_head_costs_a_copy_of_the_embedding_where_the_output_lives() -> None:
    tied = model(tied=True, output_bytes=0)
    (there,) = on_devices(plan(tied, machine(24 * GIB)))
    assert there.weights_bytes == 32 * 128 * MIB + 256 * MIB
    assert on_host(plan(tied, machine(24 * GIB))).weights_bytes == 256 * MIB


def test_weights_are_those_of_the_layers_placed_there_not_a_share_of_the_file() -> None:
    blocks = tuple((i + 1) * MIB for i in range(32))
    uneven = replace(model(), layer_weights=blocks, weights_bytes=sum(blocks) + (256 + 400) * MIB)
    found = plan(uneven, machine(24 * GIB), policy=replace(POLICY, gpu_layers=3))
    (there,) = on_devices(found)
    assert there.weights_bytes == (31 + 32 + 400) * MIB


def test_unknown_layer_sizes_are_spread_evenly_and_said_to_be() -> None:
    vague = replace(model(), layer_weights=(), output_bytes=0, input_bytes=0)
    found = plan(vague, machine(24 * GIB))
    assert "spread evenly" in note(found)
    assert on_devices(found)[0].weights_bytes >= vague.weights_bytes
    assert "spread evenly" not in note(plan(model(), machine(24 * GIB)))


def test_the_reserve_of_an_accelerator_is_a_tenth_within_its_bounds() -> None:
    assert device_reserve(80 * GIB) == 8 * GIB
    assert device_reserve(4 * GIB) == 512 * MIB
    assert device_reserve(1 * GIB) == 256 * MIB


def test_headroom_is_taken_once_and_the_row_adds_up() -> None:
    for row in plan(model(), machine(24 * GIB)).devices:
        assert 0 < row.headroom_bytes <= row.budget_bytes * 0.02 + 1
        spent = row.headroom_bytes + row.weights_bytes + row.kv_bytes + row.compute_bytes
        assert row.left_bytes == row.budget_bytes - spent >= 0
    (there,) = on_devices(plan(model(), machine(24 * GIB)))
    assert there.budget_bytes == 24 * GIB - there.reserve_bytes


def test_without_an_accelerator_everything_is_host_memory_and_says_so() -> None:
    found = plan(model(), machine())
    assert (found.placement, found.gpu_layers, found.tensor_split) == ("host", 0, ())
    assert "no accelerator" in note(found)
    assert len(found.devices) == 1
    assert on_host(found).layers == WHOLE


def test_a_device_that_no_engine_can_use_is_named_and_not_used() -> None:
    there = MachineReading(machine().host, (device(24 * GIB, engine_name=""),))
    found = plan(model(), there)
    assert found.placement == "host"
    assert "no engine here can use a card" in note(found)


def test_a_device_whose_memory_was_not_read_is_told_from_one_that_no_engine_can_use() -> None:
    silent = replace(device(24 * GIB), known=False, name="a silent card", note="timed out")
    other = device(24 * GIB, number=1, engine_name="")
    found = plan(model(), replace(machine(), devices=(silent, other)))
    assert note(found) == (
        "the memory of a silent card (timed out) could not be read, and no engine here can use "
        "a card: everything is host memory"
    )
    assert findings(found) == (
        "CUDA0 (a silent card) is not used: its memory could not be read (timed out)"
    )
    shared = replace(device(24 * GIB), shared_memory=True)
    assert "a card uses the host's memory" in note(
        plan(model(), replace(machine(), devices=(shared,)))
    )


def test_an_unread_card_is_told_of_where_another_is_used_too() -> None:
    silent = replace(device(24 * GIB, number=1), known=False)
    found = plan(model(), replace(machine(24 * GIB), devices=(device(24 * GIB), silent)))
    assert found.placement == "device"
    assert "CUDA1 (a card) is not used" in findings(found)
    assert plan(model(), machine(24 * GIB)).findings == ()
    none_wanted = plan(
        model(), replace(machine(), devices=(silent,)), policy=replace(POLICY, gpu_layers=0)
    )
    assert none_wanted.findings == ()


def test_layers_that_the_operator_wanted_on_accelerators_in_vain_are_told_of() -> None:
    wanted = replace(POLICY, gpu_layers=20)
    assert "gpu_layers is 20, and 0 are planned: no accelerator here" in findings(
        plan(model(), machine(), policy=wanted)
    )
    assert plan(model(), machine(24 * GIB), policy=wanted).findings == ()
    many = plan(model(), machine(24 * GIB), policy=replace(POLICY, gpu_layers=999))
    assert "gpu_layers is 999, and 33 are planned: the model has 33 layers" in findings(many)
    loaded = SlotUse(weights_resident=True, gpu_layers=0)
    assert "the model was loaded so" in findings(
        plan(model(), machine(24 * GIB), policy=wanted, use=loaded)
    )


def test_devices_and_shares_that_lead_nowhere_are_told_of() -> None:
    policy = replace(POLICY, tensor_split=(1.0, 2.0), devices=("CUDA7",))
    missing = "devices names 'CUDA7', which isn't here"
    there = replace(machine(), notes=("a probe found nothing", missing))
    found = plan(model(), there, policy=policy)
    assert found.findings[0] == missing
    assert "devices and tensor_split are set, and no accelerator here can be used" in findings(
        found
    )
    assert "a probe found nothing" not in findings(found)
    there = machine(24 * GIB, 24 * GIB)
    assert plan(model(), there, policy=replace(policy, devices=("CUDA0", "CUDA1"))).findings == ()


def test_a_host_that_cannot_be_read_is_said_to_leave_its_cards_unused() -> None:
    there = machine(24 * GIB)
    found = plan(model(), replace(there, host=replace(there.host, known=False)))
    assert found.placement == "host"
    assert "no memory reading: nothing is promised" in findings(found)
    assert "without CUDA0" in findings(found)


@pytest.mark.parametrize(
    "there",
    [replace(device(24 * GIB), known=False), replace(device(24 * GIB), shared_memory=True)],
)
def test_unread_and_shared_memory_devices_are_not_placed_on(there: DeviceReading) -> None:
    assert plan(model(), replace(machine(), devices=(there,))).placement == "host"


def test_a_card_whose_instances_are_listed_is_not_itself_used() -> None:
    card = device(80 * GIB, number=0)
    instance = replace(device(20 * GIB, number=1), parent=card.id)
    found = plan(model(), replace(machine(), devices=(card, instance)))
    assert [row.device_id for row in on_devices(found)] == ["GPU-1"]


def test_zero_gpu_layers_keep_everything_on_the_host() -> None:
    found = plan(model(), machine(24 * GIB), policy=replace(POLICY, gpu_layers=0))
    assert found.placement == "host"
    assert "0 layers" in note(found)


def test_a_resident_model_is_planned_as_it_was_loaded() -> None:
    loaded = SlotUse(
        weights_resident=True,
        gpu_layers=10,
        tensor_split=(10.0,),
        on_devices=(PlacedUse("GPU-0", 2 * GIB),),
    )
    found = plan(model(), machine(20 * GIB), use=loaded)
    assert (found.gpu_layers, found.tensor_split) == (10, (10.0,))
    assert found.placement == "split"
    assert not found.shed


def test_what_is_loaded_on_a_device_is_not_charged_twice() -> None:
    weights = 32 * 128 * MIB + 400 * MIB
    before = plan(model(), machine(12 * GIB), CapacityRequest(window=4096))
    loaded = SlotUse(
        weights_resident=True,
        gpu_layers=WHOLE,
        tensor_split=(33.0,),
        on_devices=(PlacedUse("GPU-0", weights),),
    )
    there = replace(machine(12 * GIB), devices=(device(12 * GIB - weights, total=12 * GIB),))
    after = plan(model(), there, CapacityRequest(window=4096), use=loaded)
    assert before.numbers == after.numbers
    assert before.devices[1].budget_bytes == after.devices[1].budget_bytes


@pytest.mark.parametrize(
    "lost", [replace(device(24 * GIB), known=False), replace(device(24 * GIB), id="GPU-9")]
)
def test_without_a_reading_of_where_the_model_lives_nothing_is_promised(
    lost: DeviceReading,
) -> None:
    loaded = SlotUse(
        weights_resident=True,
        gpu_layers=WHOLE,
        tensor_split=(33.0,),
        on_devices=(PlacedUse("GPU-0", 4 * GIB),),
    )
    found = plan(model(), replace(machine(), devices=(lost,)), use=loaded)
    assert not found.numbers.memory_fit.known
    assert (found.gpu_layers, found.placement) == (WHOLE, "device")
    assert "GPU-0" in found.budget[0].note


def test_a_device_limit_bounds_the_window_and_is_named() -> None:
    found = plan(model(), machine(24 * GIB), policy=replace(POLICY, device_limit_bytes=8 * GIB))
    assert found.numbers.memory_fit.reason is Reason.USER_LIMIT
    assert found.numbers.memory_fit.runner_up is Reason.MEMORY
    free = plan(model(), machine(24 * GIB))
    assert found.numbers.memory_fit.runner_up_tokens == free.numbers.memory_fit.tokens
    assert free.numbers.memory_fit.reason is Reason.MEMORY


# --- what doesn't fit ------------------------------------------------------------------------


def test_auto_refuses_rather_than_spill_to_the_host() -> None:
    with pytest.raises(InsufficientMemory) as refused:
        plan(model(), machine(5 * GIB))
    told = refused.value.metadata
    assert told["place"] == "GPU-0"
    assert "on CUDA0" in refused.value.message
    assert 0 < int(told["layers_that_fit"]) < WHOLE
    assert "placement" in told["remedies"]


def test_shedding_leaves_as_few_layers_on_the_host_as_it_can_and_says_so() -> None:
    found = plan(model(), machine(5 * GIB), policy=SHED)
    assert found.shed
    assert found.placement == "split"
    assert 0 < found.gpu_layers < WHOLE
    assert "because they don't fit" in note(found)
    one_more = replace(POLICY, gpu_layers=found.gpu_layers + 1)
    with pytest.raises(InsufficientMemory):
        plan(model(), machine(5 * GIB), CapacityRequest(window=4096), one_more)


def test_a_longer_window_sheds_more_layers() -> None:
    there = machine(6 * GIB)
    layers = [
        plan(model(), there, CapacityRequest(window=window), SHED).gpu_layers
        for window in (1024, 8192, 32768)
    ]
    assert layers[0] > layers[1] > layers[2] > 0


def test_shedding_everything_is_the_host() -> None:
    found = plan(model(), machine(600 * MIB), policy=SHED)
    assert (found.placement, found.gpu_layers, found.shed) == ("host", 0, True)
    assert found.tensor_split == ()


def test_a_model_that_neither_place_holds_is_refused_even_with_shedding() -> None:
    there = machine(3 * GIB, host=2 * GIB)
    with pytest.raises(InsufficientMemory) as refused:
        plan(model(), there, policy=SHED)
    assert refused.value.metadata["place"] == "host"


def test_an_explicit_window_is_offloaded_whole_where_it_fits() -> None:
    found = plan(model(), machine(24 * GIB), CapacityRequest(window=16384), SHED)
    assert found.placement == "device"
    assert not found.shed


def test_a_request_beyond_the_ceiling_with_memory_to_spare_is_bound_by_the_ceiling() -> None:
    short = model(model_max=8192)
    found = plan(short, machine(24 * GIB), CapacityRequest(window=100_000))
    assert found.numbers.effective.tokens == 8192
    assert found.numbers.effective.reason is Reason.MODEL_CEILING


# --- several accelerators --------------------------------------------------------------------


def test_layers_are_spread_in_proportion_to_what_is_free() -> None:
    found = plan(model(), machine(24 * GIB, 12 * GIB), CapacityRequest(window=8192))
    large, small = on_devices(found)
    assert large.layers + small.layers == WHOLE
    assert large.layers > small.layers > 5
    fill = [1 - row.left_bytes / (row.budget_bytes - row.headroom_bytes) for row in (large, small)]
    assert abs(fill[0] - fill[1]) < 0.1


def test_a_small_card_is_not_overfilled_while_a_big_one_idles() -> None:
    for order in ((3 * GIB, 40 * GIB), (40 * GIB, 3 * GIB)):
        found = plan(model(), machine(*order), CapacityRequest(window=32768))
        assert found.placement == "device"
        assert all(row.left_bytes >= 0 for row in found.devices)


def test_several_cards_hold_what_none_of_them_holds_alone() -> None:
    with pytest.raises(InsufficientMemory):
        plan(model(), machine(4 * GIB))
    found = plan(model(), machine(4 * GIB, 4 * GIB, 4 * GIB))
    assert found.placement == "device"
    assert sum(found.tensor_split) == WHOLE


def test_the_operator_s_split_is_kept() -> None:
    policy = replace(POLICY, tensor_split=(3.0, 1.0))
    found = plan(model(), machine(24 * GIB, 24 * GIB), policy=policy)
    assert found.tensor_split == (25.0, 8.0)
    turned = replace(POLICY, tensor_split=(0.0, 1.0))
    assert plan(model(), machine(24 * GIB, 24 * GIB), policy=turned).tensor_split == (0.0, 33.0)


@pytest.mark.parametrize(
    "split",
    [
        (-1.0, 2.0),
        (float("nan"),),
        (float("inf"), 1.0),
        (1e300, 1.0),
        (3e38, 3e38),
        (1e-50, 1e-50),
        (1.0, 1e7),
    ],
)
def test_shares_that_are_none_are_refused(split: tuple[float, ...]) -> None:
    with pytest.raises(InvalidRequest, match="tensor_split"):
        plan(model(), machine(24 * GIB), policy=replace(POLICY, tensor_split=split))


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.integers(1, 60_000),
    st.permutations(range(4)),
)
@settings(max_examples=150, deadline=None)
def test_the_order_of_the_cards_hardly_matters(
    gibs: list[int], window: int, order: list[int]
) -> None:
    """Rounding to whole layers is all that may differ: a layer's worth on each card."""
    turned = [gibs[i] for i in order if i < len(gibs)]
    request = CapacityRequest(window=window)
    first = survey(model(), request, POLICY, machine(*(g * GIB for g in gibs)), FRESH)
    spare = 2 * (128 + 400) * MIB + (first.kv_bytes + first.compute_bytes) // 4
    richer = machine(*(g * GIB + spare for g in turned))
    second = survey(model(), request, replace(POLICY, device_reserve_bytes=MIB), richer, FRESH)
    if first.refusal is None:
        assert second.refusal is None


# --- the engine's own arithmetic -------------------------------------------------------------


def engine_device_of(layer: int, layers: int, split: tuple[float, ...]) -> int:
    """Which device gets the layer, step by step in float32 (llama-model.cpp)."""
    splits = array("f", split)
    total = array("f", [0.0])
    for i, share in enumerate(splits):
        total[0] = total[0] + share
        splits[i] = total[0]
    for i in range(len(splits)):
        splits[i] = splits[i] / total[0]
    (at,) = struct.unpack("f", struct.pack("f", layer / layers))
    return next(i for i, end in enumerate(splits) if end > at)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=8).filter(any))
@settings(max_examples=300, deadline=None)
def test_counts_of_layers_as_shares_are_followed_exactly(counts: list[int]) -> None:
    layers = sum(counts)
    split = tuple(float(count) for count in counts)
    assert engine_counts(layers, split) == tuple(counts)
    placed = [engine_device_of(layer, layers, split) for layer in range(layers)]
    assert placed == sorted(placed)
    assert [placed.count(i) for i in range(len(counts))] == counts


@pytest.mark.parametrize(
    ("split", "counts"),
    [
        ((1e300, 1.0), (10, 0)),
        ((3e38, 3e38), (5, 5)),
        ((1e-50, 1e-50), (5, 5)),
        ((5e-324, 0.0, 5e-324), (5, 0, 5)),
    ],
)
def test_shares_beyond_single_precision_keep_their_proportion(
    split: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    assert engine_counts(10, split) == counts


@given(
    st.integers(1, 200),
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=6).filter(lambda s: sum(s) > 1e-3),
)
@settings(max_examples=300, deadline=None)
def test_any_shares_are_read_as_the_engine_reads_them(layers: int, split: list[float]) -> None:
    placed = [engine_device_of(layer, layers, tuple(split)) for layer in range(layers)]
    counts = tuple(placed.count(i) for i in range(len(split)))
    assert engine_counts(layers, tuple(split)) == counts


# --- companions, sessions, confirmation ------------------------------------------------------


def test_companions_are_charged_once_with_rows_of_their_own() -> None:
    beside = Companions(
        projector_bytes=600 * MIB,
        projector_compute_bytes=100 * MIB,
        adapter_bytes=33 * MIB,
        draft_bytes=700 * MIB,
    )
    bare = plan(model(), machine(), CapacityRequest(window=4096))
    found = resolve(
        model(), CapacityRequest(window=4096), POLICY, machine(), FRESH, companions=beside
    )
    rows = {row.name: row.bytes for row in found.budget}
    assert [rows[k] for k in ("projector", "projector_compute", "adapters", "draft")] == [
        600 * MIB,
        100 * MIB,
        33 * MIB,
        700 * MIB,
    ]
    assert on_host(bare).left_bytes - on_host(found).left_bytes == 1433 * MIB
    placed = resolve(
        model(), CapacityRequest(window=4096), POLICY, machine(24 * GIB), FRESH, companions=beside
    )
    alone = plan(model(), machine(24 * GIB), CapacityRequest(window=4096))
    both = [a.left_bytes - b.left_bytes for a, b in zip(alone.devices, placed.devices, strict=True)]
    assert sum(both) == 1433 * MIB
    assert both[1] == 33 * MIB  # an adapter's tensors follow the model's


def test_sessions_that_must_fit_are_all_made_room_for() -> None:
    there = machine(12 * GIB)
    one = plan(model(), there, CapacityRequest(window=8192))
    assert 1 < one.max_sessions < 8
    most = one.max_sessions
    served = plan(model(), there, CapacityRequest(window=8192, sessions=most))
    assert served.max_sessions >= most
    with pytest.raises(InsufficientMemory) as refused:
        plan(model(), there, CapacityRequest(window=8192, sessions=most + 1))
    assert refused.value.metadata["sessions"] == str(most + 1)
    assert f"room for {most} sessions" in refused.value.metadata["remedies"]


def test_open_sessions_count_among_those_that_must_fit() -> None:
    there = machine(12 * GIB)
    asked = CapacityRequest(window=8192, sessions=9)
    policy = replace(POLICY, max_sessions=9)
    with pytest.raises(InsufficientMemory):
        plan(model(), there, asked, policy)
    found = plan(model(), there, asked, policy, SlotUse(sessions=8))
    assert found.numbers.effective.tokens == 8192


def test_measured_bytes_stand_in_their_device_s_row() -> None:
    planned = plan(model(), machine(24 * GIB), CapacityRequest(window=4096))
    found = confirm(
        planned,
        window=4096,
        slot_cells=4096,
        kv_bytes=planned.kv_bytes,
        compute_bytes=500 * MIB,
        findings=("something differs",),
        on_devices={"GPU-0": (planned.kv_bytes, 480 * MIB)},
    )
    (there,) = on_devices(found)
    assert there.compute_bytes == 480 * MIB
    spent = there.headroom_bytes + there.weights_bytes + there.kv_bytes + there.compute_bytes
    assert there.left_bytes == there.budget_bytes - spent
    assert found.findings == ("something differs",)
    assert "predicted" in next(r.note for r in found.budget if r.name == "compute_measured:GPU-0")


# --- refusals: the sum, and remedies that hold -----------------------------------------------


def test_a_refusal_on_an_accelerator_adds_up_by_hand() -> None:
    with pytest.raises(InsufficientMemory) as refused:
        plan(model(), machine(6 * GIB), CapacityRequest(window=32768))
    told = refused.value.metadata
    number = {key: int(value) for key, value in told.items() if key.endswith("_bytes")}
    assert number["budget_bytes"] == (
        number["free_bytes"]
        + number["loaded_bytes"]
        + number["reclaimable_bytes"]
        - number["promised_bytes"]
        - number["reserve_bytes"]
    )
    assert number["needed_bytes"] == (
        number["weights_bytes"] + number["kv_bytes"] + number["compute_bytes"]
    )
    missing = number["needed_bytes"] - number["budget_bytes"] + number["headroom_bytes"]
    assert 0 < missing <= number["short_bytes"]
    for prefix in ("host", "device0"):
        assert number[f"{prefix}_left_bytes"] == (
            number[f"{prefix}_budget_bytes"]
            - number[f"{prefix}_headroom_bytes"]
            - number[f"{prefix}_weights_bytes"]
            - number[f"{prefix}_kv_bytes"]
            - number[f"{prefix}_compute_bytes"]
        )
    assert number["device0_left_bytes"] < 0 <= number["host_left_bytes"]


def test_a_smaller_model_of_the_store_that_fits_is_named() -> None:
    smaller = [model(layer_bytes=mib * MIB, name=f"smaller-{mib}") for mib in (16, 60, 110)]
    found = survey(model(), AUTO, POLICY, machine(5 * GIB), FRESH, alternatives=smaller)
    assert found.refusal is not None
    assert dict(found.refusal.numbers)["model_that_fits"] == "smaller-60"
    assert plan(smaller[1], machine(5 * GIB)).placement == "device"


def test_a_surveyed_refusal_keeps_its_numbers() -> None:
    there, use = machine(5 * GIB), SlotUse(sessions=1)
    found = survey(model(), CapacityRequest(window=8192), POLICY, there, use)
    assert found.refusal is not None
    assert found.numbers.effective.tokens == found.numbers.planner.tokens == 0
    assert found.numbers.effective.reason is found.refusal.bound
    assert found.numbers.requested.tokens == 8192
    assert found.kv_bytes == 8192 * 32 * 8 * 256 * 2
    assert found.devices[1].left_bytes < 0
    with pytest.raises(InsufficientMemory) as refused:
        resolve(model(), CapacityRequest(window=8192), POLICY, there, use)
    assert refused.value.message == found.refusal.message
    assert refused.value.metadata == dict(found.refusal.numbers)


def follow(
    remedy: Remedy,
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    there: MachineReading,
    use: SlotUse,
    alternatives: list[ModelFacts],
    beside: Companions,
) -> Resolution:
    """The plan with the one thing changed that the remedy names."""
    value = remedy.value
    if remedy.kind == "window":
        request = replace(request, window=int(value))
    elif remedy.kind == "sessions":
        request = replace(request, sessions=int(value))
    elif remedy.kind == "k_type":
        request = replace(request, k_type=value)
    elif remedy.kind == "max_sessions":
        policy = replace(policy, max_sessions=int(value))
    elif remedy.kind == "gpu_layers":
        policy = replace(policy, gpu_layers=int(value))
    elif remedy.kind == "placement":
        policy = replace(policy, placement=Placement(value))
    elif remedy.kind == "user_limit":
        policy = replace(policy, user_limit_bytes=int(value))
    elif remedy.kind == "device_limit":
        policy = replace(policy, device_limit_bytes=int(value))
    elif remedy.kind == "model":
        facts = next(one for one in alternatives if one.name == value)
        use = use_after_switch(use)
    else:
        assert remedy.kind == "free"
        freed = tuple(
            replace(one, free_bytes=one.free_bytes + int(value))
            if remedy.text.endswith(f"on {one.engine_name}")
            else one
            for one in there.devices
        )
        host = there.host
        if freed == there.devices:
            host = replace(host, available_bytes=host.available_bytes + int(value))
        there = replace(there, host=host, devices=freed)
    return survey(facts, request, policy, there, use, companions=beside)


@settings(max_examples=120, deadline=None)
@given(
    inputs.models(),
    inputs.requests,
    inputs.policies,
    inputs.readings(),
    inputs.uses(),
    inputs.companions,
)
def test_every_remedy_of_every_refusal_makes_the_plan_fit(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    there: MachineReading,
    use: SlotUse,
    beside: Companions,
) -> None:
    request = inputs.typed(facts, request)
    smaller = replace(
        facts,
        name="smaller",
        weights_bytes=facts.weights_bytes // 4,
        layer_weights=tuple(own // 4 for own in facts.layer_weights),
        input_bytes=facts.input_bytes // 4,
        output_bytes=facts.output_bytes // 4,
    )
    found = survey(facts, request, policy, there, use, companions=beside, alternatives=[smaller])
    if found.refusal is None:
        return
    told = dict(found.refusal.numbers)
    if request.sessions <= policy.max_sessions:
        assert int(told["short_bytes"]) > 0
    for remedy in found.refusal.remedies:
        after = follow(remedy, facts, request, policy, there, use, [smaller], beside)
        assert after.refusal is None, remedy
        if remedy.kind == "window":
            assert after.numbers.effective.tokens == int(remedy.value)


# --- what holds for every input --------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    inputs.models(),
    inputs.requests,
    inputs.policies,
    inputs.readings(),
    inputs.uses(),
    inputs.companions,
)
def test_every_plan_keeps_its_bounds_and_covers_each_layer_once(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    there: MachineReading,
    use: SlotUse,
    beside: Companions,
) -> None:
    request = inputs.typed(facts, request)
    found = survey(facts, request, policy, there, use, companions=beside)
    six = found.numbers
    assert six.effective.tokens <= six.hot.tokens
    assert six.effective.tokens <= six.planner.tokens
    if six.memory_fit.known:
        assert six.hot.tokens <= six.memory_fit.tokens
    if six.model_max.known:
        assert six.planner.tokens <= six.model_max.tokens
    if request.window:
        assert six.effective.tokens <= request.window
    if policy.max_window:
        assert six.effective.tokens <= policy.max_window
    assert 0 <= found.max_sessions <= policy.max_sessions
    if not six.memory_fit.known:
        assert (found.refusal is None) == (request.sessions <= policy.max_sessions)
        assert not there.host.known or use.gpu_layers > 0
        return
    total = sum(run.count for run in facts.layers) + 1
    assert sum(row.layers for row in found.devices) == total
    first = 0
    for row in found.devices:
        assert row.first_layer == (first if row.layers else -1)
        first += row.layers
        spent = row.headroom_bytes + row.weights_bytes + row.kv_bytes + row.compute_bytes
        assert row.left_bytes == row.budget_bytes - spent
    assert found.gpu_layers == sum(row.layers for row in on_devices(found))
    assert sum(row.kv_bytes for row in found.devices) == found.kv_bytes
    if found.gpu_layers:
        counts = tuple(row.layers for row in on_devices(found))
        assert engine_counts(found.gpu_layers, found.tensor_split) == counts
    if found.refusal is not None:
        assert six.effective.tokens == six.planner.tokens == found.allocated == 0
        assert six.hot.tokens == use.cells
        return
    assert six.effective.tokens > 0
    for row in found.devices:
        assert row.left_bytes >= 0 or (row.layers == 0 and row.device_id != "host")
    if request.sessions:
        assert found.max_sessions >= min(request.sessions, policy.max_sessions)
    if policy.placement is Placement.REFUSE:
        assert not found.shed


@settings(max_examples=120, deadline=None)
@given(
    inputs.models(),
    inputs.requests,
    inputs.policies,
    inputs.readings(),
    inputs.uses(),
    st.integers(0, 4),
    st.integers(0, 16 * GIB),
)
def test_more_free_memory_anywhere_never_lowers_a_number(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    there: MachineReading,
    use: SlotUse,
    where: int,
    more: int,
) -> None:
    request = inputs.typed(facts, request)
    # What is reclaimable is evicted only where the window needs it, so that a longer window may
    # leave fewer cells in all: hot is compared where nothing can be evicted.
    use = replace(
        use,
        reclaimable_bytes=0,
        reclaimable_cells=0,
        on_devices=tuple(replace(row, reclaimable_bytes=0) for row in use.on_devices),
    )
    if where and where <= len(there.devices):
        grown = there.devices[where - 1]
        grown = replace(grown, free_bytes=grown.free_bytes + more)
        devices = (*there.devices[: where - 1], grown, *there.devices[where:])
        richer = replace(there, devices=devices)
    else:
        host = replace(there.host, available_bytes=there.host.available_bytes + more)
        richer = replace(there, host=host)
    less = survey(facts, request, policy, there, use)
    found = survey(facts, request, policy, richer, use)
    if less.refusal is None:
        assert found.refusal is None
    for name in ("model_max", "requested", "memory_fit", "effective", "hot", "planner"):
        assert getattr(found.numbers, name).tokens >= getattr(less.numbers, name).tokens, name


@settings(max_examples=200, deadline=None)
@given(
    inputs.models(),
    inputs.requests,
    inputs.policies,
    inputs.readings(),
    inputs.uses(),
    st.integers(1, 100_000),
)
def test_a_longer_request_never_raises_memory_fit(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    there: MachineReading,
    use: SlotUse,
    more: int,
) -> None:
    request = inputs.typed(facts, request)
    longer = replace(request, window=request.window + more)
    found = survey(facts, request, policy, there, use)
    other = survey(facts, longer, policy, there, use)
    assert other.numbers.memory_fit == found.numbers.memory_fit


@settings(max_examples=100, deadline=None)
@given(inputs.models(), inputs.requests, inputs.policies, inputs.readings(), inputs.uses())
def test_quantising_never_shrinks_the_window(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    there: MachineReading,
    use: SlotUse,
) -> None:
    wide = survey(facts, replace(request, k_type="f16", v_type="f16"), policy, there, use)
    for k_type, v_type in (("q8_0", "f16"), ("f16", "q4_0"), ("q4_0", "q4_0")):
        asked = inputs.typed(facts, replace(request, k_type=k_type, v_type=v_type))
        narrow = survey(facts, asked, policy, there, use)
        assert narrow.numbers.effective.tokens >= wide.numbers.effective.tokens
        assert narrow.numbers.memory_fit.tokens >= wide.numbers.memory_fit.tokens


@settings(max_examples=100, deadline=None)
@given(inputs.models(), inputs.policies, st.integers(0, 1 << 30))
def test_a_request_never_revives_a_spent_budget(
    facts: ModelFacts, policy: CapacityPolicy, window: int
) -> None:
    spent = machine(0, 0, host=0)
    for request in (CapacityRequest(window=min(window, 1 << 24)), AUTO):
        found = survey(facts, request, policy, spent, FRESH)
        assert found.refusal is not None
        assert found.numbers.memory_fit.tokens == 0
