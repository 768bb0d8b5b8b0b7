"""What an engine reports otherwise than declared or planned is told, never silent."""

from __future__ import annotations

from dataclasses import replace

from modeld.shared.capacity import DevicePlan, LayerFacts, LayerKind, ModelFacts, Resolution
from modeld.shared.messages import LoadResult, OpenResult, PlacedOut
from modeld.supervisor.findings import KV_SLACK_BYTES, check_context, check_load

WINDOWED = LayerFacts(5, 1, 32, 32, 128, LayerKind.WINDOW)
FULL = LayerFacts(1, 1, 32, 32)
FACTS = ModelFacts(
    architecture="gemma3",
    name="tiny",
    layers=(WINDOWED, FULL),
    embedding_length=64,
    heads=4,
    model_max=2048,
    vocabulary=272,
    weights_bytes=1000,
    file_bytes=1100,
    quantization="F32",
    sliding_window=128,
)
TRAITS = {
    "layers": 6,
    "train_context": 2048,
    "sliding_window": 128,
    "embedding_length": 64,
    "heads": 4,
    "vocabulary": 272,
}


def load(traits: dict[str, int] = TRAITS, **changes: object) -> LoadResult:
    values: dict[str, object] = {
        "description": "",
        "vocab": 272,
        "train_context": 2048,
        "weights_bytes": 1000,
        "add_bos": False,
        "template_digest": "",
        "template_supports_tools": False,
        "threads": 2,
        "capabilities": {},
        "seconds": 0.1,
        "traits": traits,
        **changes,
    }
    return LoadResult(**values)  # type: ignore[arg-type]


def plan(**changes: object) -> Resolution:
    base = Resolution(
        numbers=None,  # type: ignore[arg-type]  # nothing here reads them
        budget=(),
        k_type="f16",
        v_type="f16",
        kv_bytes=4096,
        compute_bytes=10_000,
        weights_bytes=1000,
        placement="host",
        max_sessions=1,
        allocated=512,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def opened(**changes: object) -> OpenResult:
    values: dict[str, object] = {
        "window": 512,
        "kv_bytes": 4096,
        "compute_bytes": 10_000,
        "slot_cells": 512,
        "reused_context": False,
        "retained": 0,
        **changes,
    }
    return OpenResult(**values)  # type: ignore[arg-type]


def test_an_engine_that_agrees_leaves_no_finding() -> None:
    assert check_load(FACTS, load(), plan()) == ()
    assert check_context(plan(), opened()) == ()


def test_a_ceiling_that_the_engine_reads_otherwise_is_told_with_both_numbers() -> None:
    (finding,) = check_load(FACTS, load({**TRAITS, "train_context": 1024}), plan())
    assert "2048" in finding
    assert "1024" in finding


def test_a_window_that_the_engine_does_not_keep_is_told() -> None:
    (finding,) = check_load(FACTS, load({**TRAITS, "sliding_window": 0}), plan())
    assert "128" in finding


def test_a_window_that_was_costed_as_full_attention_is_told() -> None:
    dense = replace(FACTS, layers=(replace(FULL, count=6),), unknown_pattern=True)
    (finding,) = check_load(dense, load(), plan())
    assert "full attention" in finding


def test_an_engine_that_tells_nothing_is_not_held_against_the_file() -> None:
    assert check_load(FACTS, load({}), plan()) == ()


def test_layers_that_went_elsewhere_than_planned_are_told() -> None:
    split = plan(
        gpu_layers=3,
        devices=(DevicePlan("g", "card", "CUDA0", 3, 4, 500, 0, 0, 0, 0, 0, 0, 0),),
    )
    reported = load(gpu_layers=2, placed=[PlacedOut(device="CUDA0", weights_bytes=600)])
    layers, weights = check_load(FACTS, reported, split)
    assert "3" in layers
    assert "2" in layers
    assert "500" in weights
    assert "600" in weights


def test_kv_is_held_to_the_log_s_precision_and_the_buffer_to_a_twentieth() -> None:
    assert check_context(plan(), opened(kv_bytes=4096 + KV_SLACK_BYTES)) == ()
    (finding,) = check_context(plan(), opened(kv_bytes=4097 + KV_SLACK_BYTES))
    assert "4096" in finding
    assert check_context(plan(), opened(compute_bytes=10_400)) == ()
    assert len(check_context(plan(), opened(compute_bytes=10_600))) == 1
    assert len(check_context(plan(), opened(window=256))) == 1
