"""What contexts cost: kinds of layers, OpenVINO's widths, and the correction by measured bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeld.shared.capacity import (
    CapacityPolicy,
    CapacityRequest,
    EngineMeasure,
    LayerFacts,
    LayerKind,
    MeasuredPoint,
    ModelFacts,
    Resolution,
    SlotUse,
)
from modeld.shared.errors import InvalidRequest
from modeld.shared.gguf_facts import model_facts
from modeld.shared.gguf_header import read_header
from modeld.shared.planner import kv_math, openvino_cost, openvino_kv
from modeld.shared.planner.capacity import resolve
from modeld.shared.planner.costs import Costs
from tests.support import engine_costs, shapes
from tests.support import planning_inputs as inputs
from tests.support.planning_inputs import GIB, MIB, machine, model

SMOL = (LayerFacts(30, 3, 64, 64),)
POLICY = CapacityPolicy(n_ubatch=256)
DRY = "dry run"


def costs_of(
    facts: ModelFacts | None = None,
    measure: EngineMeasure = EngineMeasure(),  # noqa: B008
    policy: CapacityPolicy = POLICY,
) -> Costs:
    return Costs(facts or model(), policy, "f16", "f16", measure)


def measured(*points: tuple[int, int, int], source: str = DRY) -> EngineMeasure:
    return EngineMeasure(tuple(MeasuredPoint(*point) for point in points), source)


# --- kinds of layers -------------------------------------------------------------------------


def test_a_recurrent_layer_keeps_a_state_for_each_sequence_and_never_grows() -> None:
    layer = (LayerFacts(24, 0, 0, 0, kind=LayerKind.RECURRENT, state_bytes=1000),)
    for context in (1, 256, 100_000):
        assert kv_math.kv_bytes(layer, context, "f16", "f16", window_sequences=2) == 48_000
    assert kv_math.kv_bytes(layer, 0, "f16", "f16", window_sequences=2) == 0


def test_a_mixed_layer_keeps_both_kv_and_state() -> None:
    layer = (LayerFacts(2, 3, 64, 64, kind=LayerKind.MIXED, state_bytes=1000),)
    plain = (LayerFacts(2, 3, 64, 64),)
    both = kv_math.kv_bytes(layer, 512, "f16", "f16", window_sequences=2)
    assert both == kv_math.kv_bytes(plain, 512, "f16", "f16") + 2 * 2 * 1000


@pytest.mark.parametrize("kind", [LayerKind.SHARED, LayerKind.NONE])
def test_layers_without_kv_of_their_own_cost_nothing(kind: LayerKind) -> None:
    layer = (LayerFacts(10, 8, 128, 128, kind=kind, state_bytes=5),)
    assert kv_math.kv_bytes(layer, 4096, "f16", "f16") == 0


def test_a_latent_layer_keeps_one_row_a_token() -> None:
    # DeepSeek V2 Lite: 27 layers, rows of 512 + 64; the engine says 486 MiB at 16,384 cells.
    layer = (LayerFacts(27, 1, 576, 512, kind=LayerKind.LATENT),)
    assert kv_math.kv_bytes(layer, 16384, "f16", "f16", pad=256) == 486 * MIB


def test_a_latent_model_takes_one_type_for_keys_and_values() -> None:
    layer = (LayerFacts(27, 1, 576, 512, kind=LayerKind.LATENT),)
    kv_math.check_types(layer, "q8_0", "q8_0")
    with pytest.raises(InvalidRequest, match="one row"):
        kv_math.check_types(layer, "q8_0", "f16")


def test_values_are_as_wide_as_the_widest_where_the_engine_pads_them() -> None:
    # Two layers of 1 and 4 heads of 64: without flash attention both store 256 values a token.
    layers = (LayerFacts(1, 1, 64, 64), LayerFacts(1, 4, 64, 64))
    plain = kv_math.kv_bytes(layers, 256, "f16", "f16")
    padded = kv_math.kv_bytes(layers, 256, "f16", "f16", widest_value=256)
    assert padded - plain == 256 * (256 - 64) * 2
    facts = replace(model(layers), widest_value=256)
    assert costs_of(facts).kv(256) == padded
    assert costs_of(facts, policy=replace(POLICY, flash_attn=True)).kv(256) == plain


# --- against what the engine says --------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(engine_costs.table()["shapes"]))
def test_costs_are_near_what_the_engine_says_of_published_shapes(name: str, tmp_path: Path) -> None:
    """KV to the precision that the engine prints; all memory within 5 %, never under by 1 %."""
    path = shapes.make(name, tmp_path)
    header = read_header(path)
    facts = model_facts(header, header.file_bytes)
    recorded = [cost for cost in engine_costs.recorded_costs(name) if not cost.refused]
    assert len(recorded) >= 9
    for cost in recorded:
        case = cost.case
        policy = CapacityPolicy(n_batch=case.n_batch, n_ubatch=case.n_ubatch)
        costs = Costs(facts, policy, case.k_type, case.v_type)
        printing = 0.00501 * MIB * max(1, cost.printed)
        assert costs.kv(cost.cells) == pytest.approx(cost.kv_mib * MIB, abs=printing), case
        context = (cost.kv_mib + cost.compute + cost.output) * MIB
        # What the processor works in stands in no report of the engine.
        ours = costs.kv(cost.cells) + costs.formula_compute(cost.cells, host=False)
        weights = facts.weights_bytes
        assert 0.99 <= (weights + ours) / (weights + context) <= 1.05, case
        if cost.cells >= 1024:
            assert 0.97 <= ours / context <= 1.08, case


# --- OpenVINO --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_type", "per_token"),
    [("f32", 46_080), ("f16", 23_040), ("u8", 13_680), ("u4", 7_920)],
)
def test_openvino_widths_are_those_that_were_measured(kv_type: str, per_token: int) -> None:
    assert openvino_kv.kv_bytes(SMOL, 320, kv_type, kv_type) == 320 * per_token


def test_openvino_allocates_whole_blocks_of_32_tokens() -> None:
    assert openvino_kv.kv_bytes(SMOL, 33, "f16", "f16") == 64 * 23_040
    assert openvino_kv.kv_bytes(SMOL, 0, "u8", "u8") == 0


@pytest.mark.parametrize("length", [16, 32, 64, 80, 96, 128, 192, 256])
def test_openvino_scales_are_those_of_the_compiled_model_s_inputs(length: int) -> None:
    # Keys [blocks, heads, 32 + n, length] and values [blocks, heads, 32, length + n], in elements.
    layer = (LayerFacts(1, 1, length, length),)
    for kv_type, bits, n in (("u8", 8, 8), ("u4", 4, 16)):
        shape = (32 + n) * length + 32 * (length + n)
        assert openvino_kv.kv_bytes(layer, 32, kv_type, kv_type) == shape * bits // 8


def test_openvino_keys_and_values_have_one_type() -> None:
    for k_type, v_type in (("u8", "f16"), ("f16", "u8"), ("u4", "u8")):
        with pytest.raises(InvalidRequest, match="one type") as refused:
            openvino_kv.kv_bytes(SMOL, 32, k_type, v_type)
        assert refused.value.metadata["field"] == "v_type"
    with pytest.raises(InvalidRequest, match="no bf16") as refused:
        openvino_kv.kv_bytes(SMOL, 32, "bf16", "bf16")
    assert refused.value.metadata["allowed"] == "f16, f32, u8, u4"


def test_openvino_weights_cost_what_loads_were_measured_to_take_or_somewhat_more() -> None:
    """Growth of a worker that loaded each, in MB: SmolLM2-135M in 4 bits, and 4 layers of 1,024
    by 2,048 elements in 4, 8 and 16 bits.
    """
    smol = replace(model(SMOL), model_type="openvino", embedding_length=576, heads=9)
    smol = replace(smol, feed_forward_length=1536, quantization="Q4_1", weights_bytes=92_485_340)
    wide = replace(smol, layers=(LayerFacts(4, 8, 64, 64),), embedding_length=1024, heads=16)
    wide = replace(wide, feed_forward_length=2048)
    for facts, measured in (
        (smol, 222.3),
        (replace(wide, quantization="int4", weights_bytes=21_646_564), 71.9),
        (replace(wide, quantization="Q8_0", weights_bytes=40_894_436), 92.4),
        (replace(wide, quantization="MOSTLY_F16", weights_bytes=76_742_990), 377.6),
        (replace(wide, quantization="", weights_bytes=76_742_990), 377.6),
    ):
        planned = openvino_cost.copied_bytes(facts, EngineMeasure(), 512)
        assert measured * 1e6 <= planned <= measured * 1e6 * 1.75, facts.quantization
        known = EngineMeasure(copied_bytes=7)
        assert openvino_cost.copied_bytes(facts, known, 512) == 7
    assert openvino_cost.copied_bytes(model(SMOL), EngineMeasure(), 512) == 0


@pytest.mark.parametrize(("tokens", "measured"), [(1024, 2.4), (2048, 5.9), (4096, 9.8)])
def test_openvino_working_memory_grows_as_a_context_fills(tokens: int, measured: float) -> None:
    smol = replace(model(SMOL), model_type="openvino", embedding_length=576, heads=9)
    planned = costs_of(smol).compute(tokens)
    assert measured * 1e6 <= planned <= measured * 1e6 * 2


def test_types_are_those_of_the_model_s_own_backend() -> None:
    openvino = replace(model(SMOL), model_type="openvino")
    found = resolve(openvino, CapacityRequest(1000, "u8", "u8"), POLICY, machine(), SlotUse())
    assert found.allocated == 1024
    assert found.kv_bytes == 1024 * 13_680
    with pytest.raises(InvalidRequest, match="u8, u4") as refused:
        resolve(openvino, CapacityRequest(1000, "q8_0", "f16"), POLICY, machine(), SlotUse())
    assert refused.value.metadata["field"] == "k_type"
    with pytest.raises(InvalidRequest, match="q8_0"):
        resolve(model(), CapacityRequest(1000, "u8", "f16"), POLICY, machine(), SlotUse())


# --- measured costs --------------------------------------------------------------------------

FORMULA = costs_of()


def test_without_measures_the_formula_stands_and_no_row_claims_otherwise() -> None:
    found = resolve(model(), CapacityRequest(4096), POLICY, machine(), SlotUse())
    assert found.compute_bytes == FORMULA.formula_compute(4096)
    assert "calibration" not in {row.name for row in found.budget}


def test_a_dry_run_s_compute_buffer_is_taken_as_it_is() -> None:
    points = measured((4096, 0, 7 * MIB), (8192, 0, 11 * MIB))
    costs = costs_of(measure=points)
    assert costs.compute(4096) == 7 * MIB
    assert costs.compute(8192) == 11 * MIB
    assert costs.compute(6144) == 9 * MIB  # on the straight line between
    assert costs.compute(256) == 7 * MIB  # held before the first


def test_what_loads_reported_corrects_within_bounds() -> None:
    formula = FORMULA.formula_compute(4096)
    for told, expected in (
        (formula * 11 // 10, formula * 11 // 10),
        (formula * 10, 2 * formula),
        (MIB, -(-formula // 2)),
    ):
        costs = costs_of(measure=measured((4096, 0, told), source="loads"))
        assert costs.compute(4096) == expected


def test_beyond_the_last_point_the_faster_of_slope_and_formula_is_taken() -> None:
    flat = costs_of(measure=measured((4096, 0, 900 * MIB), (8192, 0, 901 * MIB)))
    grown = FORMULA.formula_compute(16384) - FORMULA.formula_compute(8192)
    assert flat.compute(16384) == 901 * MIB + grown
    steep = costs_of(measure=measured((4096, 0, 100 * MIB), (8192, 0, 900 * MIB)))
    assert steep.compute(12288) == 1700 * MIB


def test_the_correction_is_a_row_with_its_factor() -> None:
    told = FORMULA.formula_compute(4096) * 3 // 2
    found = resolve(
        model(),
        CapacityRequest(4096),
        POLICY,
        machine(),
        SlotUse(),
        measure=measured((4096, 0, told)),
    )
    (row,) = [row for row in found.budget if row.name == "calibration"]
    assert row.bytes == told - FORMULA.formula_compute(4096)
    assert "factor 1.500" in row.note
    assert DRY in row.note
    assert found.compute_bytes == told


def rows_of(found: Resolution, name: str) -> list[str]:
    return [row.note for row in found.budget if row.name == name]


def test_kv_that_the_engine_reports_otherwise_is_planned_as_it_says() -> None:
    exact = FORMULA.formula_kv(4096)
    printed = measured((4096, exact + MIB // 100, 0))
    assert costs_of(measure=printed).kv(4096) == exact  # within the log's precision
    more = measured((4096, exact + MIB, 0), (8192, 2 * exact + 2 * MIB, 0))
    costs = costs_of(measure=more)
    assert costs.kv(4096) == exact + MIB
    assert costs.kv(6144) == exact * 3 // 2 + MIB * 3 // 2
    found = resolve(model(), CapacityRequest(4096), POLICY, machine(), SlotUse(), measure=more)
    assert found.kv_bytes == exact + MIB
    (note,) = rows_of(found, "kv")
    assert "as the engine reports it" in note
    assert str(exact) in note


def test_between_points_kv_of_windowed_layers_is_not_underestimated() -> None:
    """Windowed layers grow fast and then not at all: a straight line would lie below them."""
    windowed = model((LayerFacts(4, 8, 128, 128), LayerFacts(28, 8, 128, 128, 1024)))
    truth = costs_of(windowed)
    extra = 5 * MIB
    points = [(n, truth.formula_kv(n) + extra, 0) for n in (256, 16384)]
    told = costs_of(windowed, measured(*points))
    for tokens in range(256, 16385, 256):
        assert told.kv(tokens) >= truth.formula_kv(tokens) + extra


def test_measured_kv_is_shared_out_over_the_devices_by_the_formula() -> None:
    exact = FORMULA.formula_kv(4096)
    found = resolve(
        model(),
        CapacityRequest(4096),
        replace(POLICY, gpu_layers=17),
        machine(24 * GIB),
        SlotUse(),
        measure=measured((4096, exact + 16 * MIB, 0)),
    )
    assert [row.kv_bytes for row in found.devices] == [exact // 2 + 8 * MIB] * 2


points = st.lists(
    st.tuples(st.integers(1, 300_000), st.integers(0, 1 << 34), st.integers(0, 1 << 34)),
    max_size=6,
)


@settings(max_examples=200, deadline=None)
@given(
    inputs.models(),
    points,
    st.sampled_from([DRY, "loads"]),
    st.integers(1, 200_000),
    st.integers(0, 100_000),
    st.sampled_from([64, 300, 512, 2048]),
    st.booleans(),
)
def test_costs_never_fall_as_the_window_grows(
    facts: ModelFacts,
    told: list[tuple[int, int, int]],
    source: str,
    tokens: int,
    more: int,
    ubatch: int,
    flash_attn: bool,
) -> None:
    policy = CapacityPolicy(n_batch=2048, n_ubatch=ubatch, flash_attn=flash_attn)
    costs = Costs(facts, policy, "f16", "f16", measured(*told, source=source))
    assert costs.kv(tokens) <= costs.kv(tokens + more)
    assert costs.compute(tokens) <= costs.compute(tokens + more)
    assert costs.formula_compute(tokens) <= costs.formula_compute(tokens + more)


@settings(max_examples=200, deadline=None)
@given(inputs.models(), st.integers(1, 100_000), st.data())
def test_more_layers_on_a_place_never_cost_it_less(
    facts: ModelFacts, tokens: int, data: st.DataObject
) -> None:
    costs = costs_of(facts)
    total = len(costs.shape_of) + 1
    first = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(first, total))
    inner = data.draw(st.integers(first, stop))
    end = data.draw(st.integers(inner, stop))
    window = costs.window(tokens)
    assert window.kv_of(inner, end) <= window.kv_of(first, stop)
    for copies in (False, True):
        part = window.working(inner, end, copies=copies)
        assert part <= window.working(first, stop, copies=copies)
    parts = window.kv_of(0, inner) + window.kv_of(inner, total)
    assert parts == window.kv_of(0, total) == window.kv


# --- the logical window ----------------------------------------------------------------------


def test_the_cold_budget_extends_the_logical_window_up_to_the_ceiling() -> None:
    per_token = 32 * 8 * 256 * 2
    policy = replace(POLICY, cold_budget_bytes=1000 * per_token + 5)
    found = resolve(model(), CapacityRequest(4096), policy, machine(), SlotUse())
    assert found.numbers.effective.tokens == 4096
    assert found.numbers.planner.tokens == 5096
    assert found.numbers.planner.reason.value == "cold_budget"
    plenty = replace(POLICY, cold_budget_bytes=1 << 40)
    full = resolve(model(), CapacityRequest(4096), plenty, machine(), SlotUse())
    assert full.numbers.planner.tokens == full.numbers.model_max.tokens
    assert full.numbers.planner.reason.value == "model_ceiling"


def test_only_layers_that_grow_take_of_the_cold_budget() -> None:
    layers = (
        LayerFacts(1, 1, 64, 64, kind=LayerKind.MIXED, state_bytes=MIB),
        LayerFacts(5, 8, 128, 128, 1024),
        LayerFacts(5, 0, 0, 0, kind=LayerKind.RECURRENT, state_bytes=MIB),
    )
    policy = replace(POLICY, cold_budget_bytes=256 * 100)
    found = resolve(model(layers), CapacityRequest(4096), policy, machine(), SlotUse())
    assert found.numbers.planner.tokens == 4196
    fixed = resolve(model(layers[2:]), CapacityRequest(4096), policy, machine(), SlotUse())
    assert fixed.numbers.planner.tokens == 4096
