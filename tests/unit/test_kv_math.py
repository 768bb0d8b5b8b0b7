"""KV bytes and their inversion: hand-checkable vectors, ggml's own type table, properties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.shared.capacity import LayerFacts
from modeld.shared.errors import InvalidRequest
from modeld.shared.planner.kv_math import BLOCK, check_types, fit, kv_bytes, round_up

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "capacity.json").read_text())
CASES: list[dict[str, Any]] = VECTORS["cases"]
TYPES = sorted(BLOCK)
SMOL = (LayerFacts(30, 3, 64, 64),)


def layers_of(facts: dict[str, int]) -> tuple[LayerFacts, ...]:
    shape = (facts["kv_heads"], facts["key_length"], facts["value_length"])
    windowed = facts.get("windowed_layers", 0)
    return (
        LayerFacts(facts["layers"] - windowed, *shape),
        LayerFacts(windowed, *shape, window_cells=facts.get("window_cells", 0)),
    )


def name_of(case: dict[str, Any]) -> str:
    return f"{case['kind']}-{case['model']}-{case['k_type']}-{case['v_type']}"


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == "kv_bytes"], ids=name_of)
def test_kv_bytes_equal_the_vector(case: dict[str, Any]) -> None:
    found = kv_bytes(layers_of(case["facts"]), case["context"], case["k_type"], case["v_type"])
    assert found == case["expected_bytes"]


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == "memory_fit"], ids=name_of)
def test_the_inversion_equals_the_vector(case: dict[str, Any]) -> None:
    found = fit(
        layers_of(case["facts"]),
        case["room_bytes"],
        case["k_type"],
        case["v_type"],
        limit_tokens=case["search_limit_tokens"],
    )
    assert found == case["expected_tokens"]


def test_every_vector_is_of_a_known_kind() -> None:
    assert {case["kind"] for case in CASES} == {"kv_bytes", "memory_fit"}


@pytest.mark.parametrize("kv_type", TYPES)
def test_type_widths_are_those_of_ggml(kv_type: str) -> None:
    ggml_type = gguf.GGMLQuantizationType[kv_type.upper()]
    assert BLOCK[kv_type] == gguf.GGML_QUANT_SIZES[ggml_type]


@pytest.mark.parametrize("kv_type", ["", "F16", "q9_0", "q6_K", "i8"])
def test_an_unknown_type_is_refused_with_what_is_allowed(kv_type: str) -> None:
    with pytest.raises(InvalidRequest, match="q8_0") as refused:
        kv_bytes(SMOL, 1, kv_type, "f16")
    assert refused.value.metadata["field"] == "k_type"
    with pytest.raises(InvalidRequest) as refused:
        fit(SMOL, 1, "f16", kv_type, limit_tokens=1)
    assert refused.value.metadata["field"] == "v_type"


def test_a_type_whose_blocks_do_not_divide_a_head_is_refused() -> None:
    tiny = (LayerFacts(2, 2, 16, 64),)
    check_types(tiny, "f16", "q8_0")
    with pytest.raises(InvalidRequest, match="16 elements"):
        check_types(tiny, "q8_0", "f16")


def test_negative_context_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="context"):
        kv_bytes(SMOL, -1, "f16", "f16")


def test_key_and_value_lengths_and_types_count_apart() -> None:
    layer = (LayerFacts(1, 1, 64, 32),)
    assert kv_bytes(layer, 1, "f16", "q8_0") == 64 * 2 + 34
    assert kv_bytes(layer, 1, "q8_0", "f16") == 2 * 34 + 32 * 2


def test_per_layer_head_counts_add_up() -> None:
    layers = (LayerFacts(1, 8, 64, 64), LayerFacts(1, 0, 64, 64), LayerFacts(1, 2, 64, 64))
    assert kv_bytes(layers, 10, "f16", "f16") == 10 * (8 + 2) * 128 * 2


def test_bytes_are_rounded_up_once_at_the_end() -> None:
    # An element of q4_0 is 0.5625 bytes: seven of them are 3.9375 bytes, not seven times one.
    assert kv_bytes((LayerFacts(7, 1, 1, 0),), 1, "q4_0", "q4_0") == 4


def test_padding_is_what_the_engine_allocates() -> None:
    assert kv_bytes(SMOL, 4000, "f16", "f16", pad=256) == 4096 * 23040
    assert kv_bytes(SMOL, 0, "f16", "f16", pad=256) == 0


def test_a_windowed_layer_keeps_window_and_micro_batch_padded_for_each_sequence() -> None:
    layer = (LayerFacts(1, 1, 1, 0, window_cells=1000),)
    cells = [
        kv_bytes(
            layer,
            context,
            "f16",
            "f16",
            pad=256,
            extra_window_cells=512,
            window_sequences=sequences,
        )
        // 2
        for context, sequences in ((300, 1), (1400, 1), (9000, 1), (9000, 2))
    ]
    assert cells == [512, 1536, 1536, 2560]


layer_facts = st.builds(
    LayerFacts,
    count=st.integers(1, 40),
    kv_heads=st.integers(0, 16),
    key_length=st.sampled_from([32, 64, 96, 128, 256]),
    value_length=st.sampled_from([32, 64, 128, 256]),
    window_cells=st.sampled_from([0, 0, 128, 1000, 4096]),
)
layer_lists = st.lists(layer_facts, min_size=1, max_size=4)
kv_types = st.sampled_from(TYPES)
pads = st.sampled_from([1, 32, 256])


@given(layer_lists, st.integers(0, 1 << 36), kv_types, kv_types, pads, st.integers(0, 512))
def test_what_fits_is_within_the_room_and_one_pad_more_is_not(
    layers: list[LayerFacts], room: int, k: str, v: str, pad: int, extra: int
) -> None:
    limit = 1 << 20
    found = fit(layers, room, k, v, pad=pad, limit_tokens=limit, extra_window_cells=extra)
    assert found % pad == 0
    assert kv_bytes(layers, found, k, v, pad=pad, extra_window_cells=extra) <= room
    if found + pad <= limit:
        more = kv_bytes(layers, found + pad, k, v, pad=pad, extra_window_cells=extra)
        assert more > room


@given(layer_lists, st.integers(0, 100_000), kv_types, kv_types, pads)
def test_room_for_a_window_fits_that_window(
    layers: list[LayerFacts], context: int, k: str, v: str, pad: int
) -> None:
    room = kv_bytes(layers, context, k, v, pad=pad)
    assert fit(layers, room, k, v, pad=pad, limit_tokens=1 << 20) >= round_up(context, pad)


@given(layer_lists, st.integers(0, 1 << 36), st.integers(0, 1 << 30), kv_types, pads)
def test_more_room_or_an_overhead_moves_the_fit_the_right_way(
    layers: list[LayerFacts], room: int, more: int, kv_type: str, pad: int
) -> None:
    def fitted(room_bytes: int, per_token: int = 0) -> int:
        return fit(
            layers,
            room_bytes,
            kv_type,
            kv_type,
            pad=pad,
            limit_tokens=1 << 20,
            overhead_bytes=lambda tokens: tokens * per_token,
        )

    assert fitted(room) <= fitted(room + more)
    assert fitted(room, per_token=1000) <= fitted(room)


@given(layer_lists, st.integers(0, 10_000))
def test_a_narrower_type_never_costs_more(layers: list[LayerFacts], context: int) -> None:
    by_width = sorted(TYPES, key=lambda name: BLOCK[name][1] / BLOCK[name][0])
    costs = [kv_bytes(layers, context, name, name) for name in by_width]
    assert costs == sorted(costs)


def test_a_layer_without_heads_keeps_values_as_wide_as_the_widest() -> None:
    layers = (LayerFacts(2, 4, 64, 64), LayerFacts(1, 0, 64, 64))
    padded = kv_bytes(layers, 256, "f16", "f16", widest_value=256)
    assert padded == 256 * 2 * (2 * (256 + 256) + 256)
    assert kv_bytes(layers, 256, "f16", "f16") == 256 * 2 * 2 * (256 + 256)
