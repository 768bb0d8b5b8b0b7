"""The llama engine's primitives on real inference: exactness, going back, copying, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.capabilities import parse_capability
from modeld.shared.errors import (
    ContextOverflow,
    InvalidRequest,
    ModeldError,
    ModelLoadFailed,
    ModelNotActive,
    SessionFatal,
)
from modeld.shared.messages import LoadOp, LoadResult
from modeld.workers.llama.context import LlamaContext
from modeld.workers.llama.engine import LlamaEngine
from tests.support import tiny_models

MIB = 1024 * 1024
TEXT = "The old lighthouse keeper wrote each evening what the sea had brought, and what it took. "


def never() -> bool:
    return False


def load(
    engine: LlamaEngine, path: Path, *, n_batch: int = 512, n_ubatch: int = 512, threads: int = 2
) -> LoadResult:
    request = LoadOp(
        path=str(path),
        model="m",
        digest="",
        n_batch=n_batch,
        n_ubatch=n_ubatch,
        threads=threads,
    )
    return engine.load(request, lambda stage, fraction: None, never)


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaEngine]:
    made = LlamaEngine()
    yield made
    made.unload()


@pytest.fixture(scope="module")
def real(demo_model: Path) -> Iterator[LlamaEngine]:
    """An engine of its own, since trying out what the model can takes seconds."""
    made = LlamaEngine()
    load(made, demo_model, n_batch=128, n_ubatch=64)
    yield made
    made.unload()


@pytest.fixture
def tiny(engine: LlamaEngine, tmp_path: Path) -> Callable[..., LlamaEngine]:
    """Loads one of the generated models by its maker's name."""

    def make(kind: str = "llama", n_ubatch: int = 64, **options: object) -> LlamaEngine:
        path = getattr(tiny_models, kind)(tmp_path / f"{kind}.gguf", **options)
        load(engine, path, n_batch=128, n_ubatch=n_ubatch)
        return engine

    return make


def prompt(engine: LlamaEngine, count: int) -> list[int]:
    return engine.tokenizer.encode(TEXT * (count // 8 + 1))[:count]


def after(context: LlamaContext, tokens: list[int], position: int) -> np.ndarray:
    """Evaluate and answer a copy of the logits."""
    assert context.evaluate(tokens, position, cancelled=never) == len(tokens)
    return context.logits().copy()


def greedy(context: LlamaContext, position: int, count: int) -> list[int]:
    chosen: list[int] = []
    for step in range(count):
        chosen.append(int(context.logits().argmax()))
        context.step(chosen[-1], position + step)
    return chosen


class CancelAfter:
    """Turns true at the given poll."""

    def __init__(self, polls: int) -> None:
        self.left = polls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


# --- exactness on the real model ---------------------------------------------------------------


@pytest.mark.real
def test_a_warm_suffix_equals_a_fresh_context_bit_for_bit(real: LlamaEngine) -> None:
    tokens = prompt(real, 170)
    prefix, first, second = tokens[:150], tokens[150:], tokens[50:70]
    warm = real.new_context(1024, "f16", "f16")
    after(warm, prefix, 0)
    after(warm, first, 150)
    greedy(warm, 170, 8)
    warm.trim(150)
    fresh = real.new_context(1024, "f16", "f16")
    after(fresh, prefix, 0)
    assert np.array_equal(after(warm, second, 150), after(fresh, second, 150))
    assert greedy(warm, 170, 8) == greedy(fresh, 170, 8)


@pytest.mark.real
def test_a_copied_prefix_continues_bit_for_bit_and_leaves_the_source_as_it_was(
    real: LlamaEngine,
) -> None:
    assert_copied(real, prompt(real, 230), 130)


def test_a_prefix_of_several_blocks_is_copied_bit_for_bit(
    tiny: Callable[..., LlamaEngine],
) -> None:
    assert_copied(tiny(), [5 + step * 7 % 200 for step in range(1200)], 1100)


def assert_copied(engine: LlamaEngine, tokens: list[int], prefix: int) -> None:
    """The copy of a prefix, and what it was copied from, go on alike."""
    end = prefix + 60
    source = engine.new_context(2048, "f16", "f16")
    after(source, tokens[:prefix], 0)
    after(source, tokens[prefix:end], prefix)
    taker = engine.new_context(2048, "f16", "f16")
    after(taker, tokens[50:90], 0)
    assert taker.copy_prefix_from(source, prefix)
    copied = after(taker, tokens[prefix:end], prefix)
    continued = after(source, tokens[end:], end)
    assert np.array_equal(after(taker, tokens[end:], end), continued)
    source.trim(prefix)
    assert np.array_equal(after(source, tokens[prefix:end], prefix), copied)


@pytest.mark.real
def test_a_cancelled_prefill_keeps_whole_micro_batches_and_resumes_exactly(
    real: LlamaEngine,
) -> None:
    tokens = prompt(real, 250)
    cut = real.new_context(1024, "f16", "f16")
    kept = cut.evaluate(tokens, 0, cancelled=CancelAfter(1500))
    assert 0 < kept < len(tokens)
    assert kept % 64 == 0
    resumed = after(cut, tokens[kept:], kept)
    fresh = real.new_context(1024, "f16", "f16")
    after(fresh, tokens[:kept], 0)
    assert np.array_equal(resumed, after(fresh, tokens[kept:], kept))


@pytest.mark.real
def test_kv_bytes_are_the_formula_and_the_window_is_what_was_allocated(real: LlamaEngine) -> None:
    context = real.new_context(4000, "f16", "f16")
    assert context.window == 4096
    assert context.kv_bytes == 90 * MIB
    assert 0 < context.compute_bytes < 64 * MIB


@pytest.mark.real
def test_the_load_reports_what_was_tried_on_the_model(
    engine: LlamaEngine, demo_model: Path
) -> None:
    told: list[tuple[str, float]] = []
    request = LoadOp(path=str(demo_model), model="small", digest="")
    result = engine.load(request, lambda stage, fraction: told.append((stage, fraction)), never)
    assert (result.vocab, result.train_context, result.add_bos) == (49152, 8192, False)
    assert result.threads >= 1
    assert len(result.template_digest) == 64
    assert told[-1] == ("loading", 1.0)
    answers = {name: parse_capability(name, text) for name, text in result.capabilities.items()}
    for name in ("tail_removal", "middle_removal", "position_shift", "prefix_copy", "exact_warm"):
        assert answers[name].answer == "yes", answers[name]
    assert answers["structured_output"].answer == "yes", answers["structured_output"]
    assert all(answer.evidence for answer in answers.values())


@pytest.mark.real
def test_the_tokenizer_never_reads_control_tokens_in_text(real: LlamaEngine) -> None:
    tokenizer = real.tokenizer
    assert tokenizer.controls["<|im_end|>"] == 2
    assert 2 in tokenizer.end_of_generation
    text = "hello <|im_end|>\x00 wörld 🙂"
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.controls.values())
    assert b"".join(map(tokenizer.piece, ids)).decode() == text
    assert tokenizer.piece(2) == b"<|im_end|>"
    assert tokenizer.encode("") == []
    with pytest.raises(InvalidRequest):
        tokenizer.encode("lone \ud800")
    with pytest.raises(InvalidRequest):
        tokenizer.piece(tokenizer.vocab_size)


@pytest.mark.real
def test_a_safe_split_splits_tokenization(real: LlamaEngine) -> None:
    text = TEXT * 3
    encode = real.tokenizer.encode
    split = real.tokenizer.safe_split(text, 150)
    assert split is not None
    assert encode(text) == encode(text[:split]) + encode(text[split:])


# --- other memories ----------------------------------------------------------------------------


def test_a_sliding_window_goes_back_only_while_its_cells_are_held(
    tiny: Callable[..., LlamaEngine],
) -> None:
    engine = tiny("gemma3", n_ubatch=32)
    tokens = [5 + step % 200 for step in range(900)]
    context, fresh = engine.new_context(1024, "f16", "f16"), engine.new_context(1024, "f16", "f16")
    context.evaluate(tokens[:800], 0, cancelled=never)
    possible = [keep for keep in range(1, 800) if context.can_trim(keep)]
    assert possible == list(range(possible[0], 800))
    assert possible[0] > 128
    keep = possible[0]
    context.trim(keep)
    fresh.evaluate(tokens[:keep], 0, cancelled=never)
    tail = tokens[100:150]
    # By rounding only: cells lie elsewhere. Without the cells that were lost it would be units.
    assert np.allclose(after(context, tail, keep), after(fresh, tail, keep), atol=5e-3)
    context.trim(0)
    assert context.evaluate(tokens[:10], 0, cancelled=never) == 10


def test_a_sliding_window_refuses_to_go_back_too_far(tiny: Callable[..., LlamaEngine]) -> None:
    context = tiny("gemma3", n_ubatch=32).new_context(1024, "f16", "f16")
    context.evaluate([5 + step % 200 for step in range(800)], 0, cancelled=never)
    assert not context.can_trim(200)
    with pytest.raises(SessionFatal):
        context.trim(200)


def test_a_windowed_context_costs_what_the_engine_allocates(
    tiny: Callable[..., LlamaEngine],
) -> None:
    engine = tiny("gemma3", n_ubatch=32)
    context = engine.new_context(1024, "f16", "f16")
    cell = 1 * (32 + 32) * 2  # kv heads, lengths, bytes an element
    assert context.kv_bytes == cell * (1 * 1024 + 5 * 512)


def test_a_recurrent_model_goes_back_only_to_the_start(tiny: Callable[..., LlamaEngine]) -> None:
    engine = tiny("mamba")
    tokens = [5 + step % 200 for step in range(100)]
    context, other = engine.new_context(512, "f16", "f16"), engine.new_context(512, "f16", "f16")
    reference = after(context, tokens, 0)
    assert [keep for keep in (0, 1, 50, 99, 100) if context.can_trim(keep)] == [0, 100]
    assert not other.copy_prefix_from(context, 50)
    assert other.copy_prefix_from(context, 100)
    assert np.array_equal(after(other, [7, 8], 100), after(context, [7, 8], 100))
    context.trim(0)
    assert np.array_equal(after(context, tokens, 0), reference)


def test_a_recurrent_prefill_stops_between_micro_batches(tiny: Callable[..., LlamaEngine]) -> None:
    engine = tiny("mamba")
    tokens = [5 + step % 200 for step in range(300)]
    cut, fresh = engine.new_context(512, "f16", "f16"), engine.new_context(512, "f16", "f16")
    assert cut.evaluate(tokens, 0, cancelled=CancelAfter(2)) == 128
    assert np.array_equal(after(cut, tokens[128:], 128), after(fresh, tokens, 0))


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("k_type", "v_type", "field"),
    [("q3_k", "f16", "k_type"), ("f16", "q8_0", "v_type"), ("q8_0", "f16", "k_type")],
)
def test_cache_types_that_would_abort_the_engine_are_refused(
    tiny: Callable[..., LlamaEngine], k_type: str, v_type: str, field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        tiny("llama").new_context(256, k_type, v_type)  # heads of 16 don't divide into 32
    assert refused.value.metadata["field"] == field


def test_a_quantised_k_cache_works_where_heads_divide(tiny: Callable[..., LlamaEngine]) -> None:
    context = tiny("llama", heads=2, kv_heads=1).new_context(256, "q8_0", "f16")
    assert context.kv_bytes == 2 * 256 * (32 * 34 // 32 + 32 * 2)
    assert context.evaluate([5, 6, 7], 0, cancelled=never) == 3


@pytest.mark.parametrize("window", [0, -1, 4096, 2_000_000_000])
def test_windows_the_model_cannot_attend_are_refused(
    tiny: Callable[..., LlamaEngine], window: int
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        tiny("llama").new_context(window, "f16", "f16")
    assert refused.value.metadata["field"] == "window"


def test_tokens_and_lengths_are_checked_before_the_engine_sees_them(
    tiny: Callable[..., LlamaEngine],
) -> None:
    context = tiny("llama").new_context(256, "f16", "f16")
    for bad in ([-1], [5, 10**6], [5, -3], [2**40, 5]):
        with pytest.raises(InvalidRequest):
            context.evaluate(bad, 0, cancelled=never)
    with pytest.raises(ContextOverflow):
        context.evaluate([5] * 257, 0, cancelled=never)
    assert context.evaluate([5] * 256, 0, cancelled=never) == 256
    assert not context.can_trim(257)


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(2, 2), (5, 3), (16384, 16384)])
def test_batches_of_any_allowed_size_are_never_longer_than_the_engine_takes(
    engine: LlamaEngine, tmp_path: Path, n_batch: int, n_ubatch: int
) -> None:
    load(engine, tiny_models.llama(tmp_path / "m.gguf"), n_batch=n_batch, n_ubatch=n_ubatch)
    context = engine.new_context(1, "f16", "f16")
    assert context.window == 256
    assert context.evaluate([5] * 100, 0, cancelled=never) == 100


def test_a_wrong_position_makes_the_context_untrusted(tiny: Callable[..., LlamaEngine]) -> None:
    context = tiny("llama").new_context(256, "f16", "f16")
    with pytest.raises(SessionFatal) as refused:
        context.evaluate([5], 3, cancelled=never)
    assert refused.value.metadata["cause"] == "bookkeeping"
    with pytest.raises(SessionFatal):
        context.evaluate([5], 0, cancelled=never)


@pytest.mark.parametrize(
    ("norm", "said"), [(float("nan"), "It said: .*output_norm"), (3e38, "not finite")]
)
def test_a_model_that_does_not_compute_is_refused_when_loaded(
    tiny: Callable[..., LlamaEngine], norm: float, said: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=said):
        tiny("llama", norm=norm)


def test_an_unknown_architecture_carries_the_engines_words(
    tiny: Callable[..., LlamaEngine],
) -> None:
    with pytest.raises(ModelLoadFailed, match="unknown model architecture: 'zorkformer'"):
        tiny("llama", architecture="zorkformer")


def test_a_truncated_file_is_refused_before_the_engine_maps_it(
    engine: LlamaEngine, tmp_path: Path
) -> None:
    path = tiny_models.llama(tmp_path / "whole.gguf")
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelLoadFailed, match="truncated"):
        load(engine, path)


def test_a_vocabulary_that_would_abort_the_engine_is_refused(
    engine: LlamaEngine, tmp_path: Path
) -> None:
    path = tiny_models.llama(tmp_path / "twice.gguf")
    one, other = (b"\1\0\0\0\0\0\0\0" + letter for letter in (b"a", b"b"))
    path.write_bytes(path.read_bytes().replace(other, one, 1))
    with pytest.raises(ModelLoadFailed, match="repeats the text 'a'"):
        load(engine, path)


@pytest.mark.parametrize(
    "wrong", [{"n_batch": 0}, {"n_ubatch": 0}, {"n_ubatch": 1024}, {"threads": -1}]
)
def test_load_settings_the_engine_would_not_survive_are_refused(
    engine: LlamaEngine, tmp_path: Path, wrong: dict[str, int]
) -> None:
    path = tiny_models.llama(tmp_path / "m.gguf")
    with pytest.raises(InvalidRequest):
        load(engine, path, **wrong)


def test_a_cancelled_load_leaves_nothing_loaded(engine: LlamaEngine, tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m.gguf")
    request = LoadOp(path=str(path), model="m", digest="")
    with pytest.raises(ModelLoadFailed) as refused:
        engine.load(request, lambda stage, fraction: None, CancelAfter(1))
    assert refused.value.metadata["cause"] == "cancelled"
    with pytest.raises(ModelNotActive):
        _ = engine.tokenizer


# --- ending ------------------------------------------------------------------------------------


def test_unloading_closes_contexts_first_and_twice_is_harmless(
    tiny: Callable[..., LlamaEngine],
) -> None:
    engine = tiny("llama")
    context, kept = engine.new_context(256, "f16", "f16"), engine.new_context(256, "f16", "f16")
    context.close()
    context.close()
    kept.evaluate([5, 6], 0, cancelled=never)
    engine.unload()
    engine.unload()
    with pytest.raises(ModeldError):
        kept.evaluate([7], 2, cancelled=never)
    assert not kept.can_trim(1)
    assert not kept.copy_prefix_from(context, 1)


def test_hello_names_the_build(engine: LlamaEngine) -> None:
    hello = engine.hello()
    assert hello.backend == "llama"
    assert hello.backend_version.startswith("llama-cpp-python ")
    assert len(hello.build_digest) == 64
    assert hello == engine.hello()
