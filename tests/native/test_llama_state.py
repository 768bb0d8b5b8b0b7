"""A llama context's state as bytes: what goes out comes back exactly, or is refused untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.errors import InsufficientMemory, InvalidRequest, UnsupportedFeature
from modeld.shared.messages import LoadOp, LoadResult
from modeld.workers.llama.context import LlamaContext
from modeld.workers.llama.engine import LlamaEngine
from tests.support import tiny_models

TOKENS = [5 + step % 200 for step in range(400)]
TAIL = TOKENS[100:116]


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaEngine]:
    made = LlamaEngine()
    yield made
    made.unload()


@pytest.fixture
def load(engine: LlamaEngine, tmp_path: Path) -> Callable[..., LoadResult]:
    """Loads one of the generated models by its maker's name."""

    def make(kind: str, k_type: str = "f16", v_type: str = "f16", **options: object) -> LoadResult:
        path = getattr(tiny_models, kind)(tmp_path / f"{kind}.gguf", **options)
        request = LoadOp(
            path=str(path), model="m", digest="", n_batch=128, n_ubatch=64, threads=1,
            k_type=k_type, v_type=v_type,
        )  # fmt: skip
        return engine.load(request, lambda stage, fraction: None, never)

    return make


def never() -> bool:
    return False


def after(context: LlamaContext, tokens: list[int], position: int) -> np.ndarray:
    assert context.evaluate(tokens, position, cancelled=never) == len(tokens)
    return context.logits().copy()


def filled(
    engine: LlamaEngine, count: int, types: tuple[str, str] = ("f16", "f16")
) -> LlamaContext:
    context = engine.new_context(512, *types)
    context.evaluate(TOKENS[:count], 0, cancelled=never)
    return context


@pytest.mark.parametrize(
    ("kind", "types"),
    [("llama", ("f16", "f16")), ("llama", ("f32", "f32")), ("qwen2", ("q8_0", "f16")),
     ("deepseek2", ("f16", "f16"))],
)  # fmt: skip
def test_ranges_of_a_dense_model_make_up_the_whole_again(
    engine: LlamaEngine, load: Callable[..., LoadResult], kind: str, types: tuple[str, str]
) -> None:
    load(kind)
    source, taker = filled(engine, 300, types), engine.new_context(512, *types)
    for begin, end in ((0, 1), (1, 130), (130, 300)):
        assert taker.import_state(source.export_state(begin, end), end)
    assert np.array_equal(taker.export_state(0, 300), source.export_state(0, 300))
    expected = after(source, TAIL, 300)
    assert np.array_equal(after(taker, TAIL, 300), expected)
    assert np.array_equal(after(filled(engine, 300, types), TAIL, 300), expected)


def test_a_range_s_bytes_do_not_depend_on_what_is_held_behind_it(
    engine: LlamaEngine, load: Callable[..., LoadResult]
) -> None:
    load("llama")
    context = filled(engine, 200)
    whole, part = context.export_state(0, 200), context.export_state(64, 128)
    logits = after(context, TAIL, 200)
    assert np.array_equal(context.export_state(0, 200), whole)
    assert np.array_equal(context.export_state(64, 128), part)
    assert np.array_equal(context.logits(), logits)  # an export changes nothing
    context.trim(128)
    assert np.array_equal(context.export_state(64, 128), part)


def test_a_range_taken_out_comes_back_after_the_tail_was_another(
    engine: LlamaEngine, load: Callable[..., LoadResult]
) -> None:
    load("llama")
    context = filled(engine, 300)
    expected = after(context, TAIL, 300)
    parked = context.export_state(100, 300)
    context.trim(100)
    after(context, TOKENS[300:390], 100)
    context.trim(100)
    assert context.import_state(parked, 300)
    assert np.array_equal(after(context, TAIL, 300), expected)


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_a_recurrent_state_goes_out_whole_only_and_goes_on_bit_for_bit(
    engine: LlamaEngine, load: Callable[..., LoadResult], kind: str
) -> None:
    loaded = load(kind)
    assert loaded.capabilities["state.blocks"].startswith("no: ")
    assert loaded.capabilities["state.whole"].startswith("yes: ")
    assert loaded.exact_state_types == ["f16/f16"]
    source, taker = filled(engine, 300), filled(engine, 20)
    for begin, end in ((0, 200), (100, 300)):
        with pytest.raises(UnsupportedFeature) as refused:
            source.export_state(begin, end)
        assert refused.value.metadata["capability"] == "state.blocks"
    state = source.export_state(0, 300)
    assert not taker.import_state(state, 300)  # not behind anything
    taker.trim(0)
    assert taker.import_state(state, 300)
    assert np.array_equal(after(taker, TAIL, 300), after(source, TAIL, 300))


def test_a_sliding_window_goes_out_whole_and_is_not_called_exact(
    engine: LlamaEngine, load: Callable[..., LoadResult]
) -> None:
    loaded = load("gemma3")
    assert loaded.capabilities["state.blocks"].startswith("no: ")
    assert "rounding" in loaded.capabilities["state.whole"]
    assert loaded.exact_state_types == []
    source, taker = filled(engine, 390), engine.new_context(512, "f16", "f16")
    with pytest.raises(UnsupportedFeature):
        source.export_state(0, 64)
    assert taker.import_state(source.export_state(0, 390), 390)
    ours, theirs = after(taker, TAIL, 390), after(source, TAIL, 390)
    assert np.allclose(ours, theirs, atol=5e-3)


def test_bytes_of_another_range_are_refused_and_nothing_changes(
    engine: LlamaEngine, load: Callable[..., LoadResult]
) -> None:
    load("llama")
    source, taker = filled(engine, 300), filled(engine, 100)
    expected = after(filled(engine, 100), TAIL, 100)
    good = source.export_state(100, 200)
    wrong = [
        (source.export_state(0, 100), 200),  # of other positions
        (source.export_state(101, 200), 200),
        (good, 201),
        (good, 100),
        (good, 513),
        (good[:-1], 200),
        (np.concatenate([good, good[:8]]), 200),
        (np.zeros(1000, dtype=np.uint8), 200),
        (np.zeros(0, dtype=np.uint8), 200),
    ]
    for state, end in wrong:
        assert not taker.import_state(state, end)
    assert taker.import_state(good, 200)
    taker.trim(100)
    assert np.array_equal(after(taker, TAIL, 100), expected)
    empty = engine.new_context(512, "f16", "f16")
    for state, end in wrong[:1] + wrong[4:]:
        assert not empty.import_state(state, end)
    assert np.array_equal(after(empty, TOKENS[:100], 0), after(filled(engine, 0), TOKENS[:100], 0))


def test_a_state_of_other_types_is_refused(
    engine: LlamaEngine, load: Callable[..., LoadResult]
) -> None:
    load("qwen2")
    state = filled(engine, 100).export_state(0, 100)
    taker = engine.new_context(512, "q8_0", "f16")
    assert not taker.import_state(state, 100)
    after(taker, TOKENS[:100], 0)


@pytest.mark.parametrize(("begin", "end"), [(0, 101), (-1, 5), (5, 5), (50, 40), (100, 101)])
def test_a_range_that_is_not_held_is_refused(
    engine: LlamaEngine, load: Callable[..., LoadResult], begin: int, end: int
) -> None:
    load("llama")
    context = filled(engine, 100)
    with pytest.raises(InvalidRequest):
        context.export_state(begin, end)
    after(context, TAIL, 100)


def test_an_export_beyond_free_memory_is_refused_and_changes_nothing(
    engine: LlamaEngine, load: Callable[..., LoadResult]
) -> None:
    load("llama")
    context = filled(engine, 100)
    expected = after(filled(engine, 100), TAIL, 100)
    context._spare_bytes = lambda: 1000
    with pytest.raises(InsufficientMemory) as refused:
        context.export_state(0, 100)
    assert int(refused.value.metadata["needed_bytes"]) > 1000
    assert np.array_equal(after(context, TAIL, 100), expected)


def test_the_load_tries_the_types_that_the_first_session_will_ask_for(
    load: Callable[..., LoadResult],
) -> None:
    assert load("qwen2", "q8_0", "f16").exact_state_types == ["f16/f16", "q8_0/f16"]
    # Heads of 16 elements hold no block of 32: whoever opens such a session is told.
    assert load("llama", "q8_0", "f16").exact_state_types == ["f16/f16"]
