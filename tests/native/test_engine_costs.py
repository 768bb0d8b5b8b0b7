"""The recorded sizes of contexts are those of the engine that is linked here."""

from __future__ import annotations

from pathlib import Path

import pytest

from modeld.shared.messages import LoadOp
from modeld.shared.planner.graph import work_bytes
from modeld.workers.llama.context import LlamaContext
from modeld.workers.llama.engine import LlamaEngine
from modeld.workers.llama.native import build
from tests.support import engine_costs, shapes, tiny_models
from tests.support.dry_run import Case, Cost, measure

MIB = 1 << 20
SAMPLE = (
    "smollm2-135m",
    "gemma-3-4b",
    "gpt-oss-20b",
    "deepseek-v2-lite",
    "granite-4-tiny",
    "openelm-270m",
)
WINDOWS = (512, 4096)


def test_the_table_was_recorded_with_the_engine_in_use() -> None:
    assert engine_costs.table()["engine"] == build().version


@pytest.mark.parametrize("name", SAMPLE)
def test_the_engine_still_says_what_was_recorded(name: str, tmp_path: Path) -> None:
    recorded = [cost for cost in engine_costs.recorded_costs(name) if cost.case.window in WINDOWS]
    measured = measure(shapes.make(name, tmp_path), [cost.case for cost in recorded])
    assert measured.n_swa == engine_costs.table()["shapes"][name]["inputs"]["n_swa"]
    assert len(recorded) >= 2
    assert list(measured.costs) == recorded


@pytest.fixture(scope="module")
def engine() -> LlamaEngine:
    return LlamaEngine()


def check_dry_against_real(engine: LlamaEngine, path: Path, window: int, k_type: str) -> None:
    cost = measure(path, [Case(window, 128, 64, k_type, "f16")]).costs[0]
    request = LoadOp(path=str(path), model="m", digest="", n_batch=128, n_ubatch=64, threads=1)
    engine.load(request, lambda stage, fraction: None, lambda: False)
    context = engine.new_context(window, k_type, "f16")
    try:
        assert isinstance(context, LlamaContext)
        assert context.window == cost.cells
        assert context.kv_bytes == pytest.approx(
            cost.kv_mib * MIB, abs=0.00501 * MIB * cost.printed
        )
        work = work_bytes(
            engine.facts, context.window, n_batch=128, n_ubatch=64, k_type=k_type, v_type="f16"
        )
        reported = (cost.compute + cost.output) * MIB
        assert context.compute_bytes - work == pytest.approx(reported, abs=1)
    finally:
        context.close()
        engine.unload()


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "gemma2", "gemma3", "mamba", "jamba", "deepseek2"]
)
def test_a_dry_run_says_what_a_real_load_allocates(
    engine: LlamaEngine, kind: str, tmp_path: Path
) -> None:
    path = getattr(tiny_models, kind)(tmp_path / f"{kind}.gguf")
    check_dry_against_real(engine, path, 1024, "f16")


@pytest.mark.real
@pytest.mark.parametrize("k_type", ["f16", "q8_0"])
@pytest.mark.parametrize("window", [512, 8192])
def test_a_dry_run_of_the_real_model_says_what_its_load_allocates(
    engine: LlamaEngine, demo_model: Path, window: int, k_type: str
) -> None:
    check_dry_against_real(engine, demo_model, window, k_type)


def test_a_model_that_cannot_be_loaded_is_told_in_the_engine_s_words(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(RuntimeError, match="can't load it"):
        measure(path, [])


def test_a_context_that_cannot_be_made_is_told_too(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "llama.gguf")
    cost: Cost = measure(path, [Case(512, 128, 64, "f16", "q8_0")]).costs[0]
    assert "quantized V cache requires flash_attn" in cost.refused
