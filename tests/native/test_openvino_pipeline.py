"""GenAI's pipeline as an executor: what it reused is read off it, and its silences are heard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modeld.shared.errors import InvalidRequest, ModelLoadFailed, SessionFatal, UnsupportedFeature
from modeld.shared.messages import DecodeIn, SamplingIn
from modeld.workers.engine import Measured, SelfSampling
from modeld.workers.openvino import generation
from modeld.workers.openvino.blocks import BLOCK_TOKENS
from modeld.workers.openvino.ends import Ends
from modeld.workers.openvino.generation import genai
from modeld.workers.openvino.native import PRECISION, ov
from modeld.workers.openvino.piped import PipelineContext
from modeld.workers.openvino.pipeline import Pipeline
from tests.support.openvino_models import HEAD_LENGTH, KV_HEADS, LAYERS, tiny_ir
from tests.support.tiny_models import vocabulary

VOCABULARY = len(vocabulary()[0])
CHUNK = 64
BLOCKS = 32
PROMPT = np.random.default_rng(5).integers(10, VOCABULARY, 900).tolist()
OTHER = np.random.default_rng(6).integers(10, VOCABULARY, 900).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_ir(tmp_path_factory.mktemp("pipeline") / "ir")


def made(folder: Path, *, kv_type: str = "f32", blocks: int = BLOCKS) -> Pipeline:
    return Pipeline(
        folder,
        "CPU",
        kv_type=kv_type,
        total_blocks=blocks,
        threads=2,
        vocabulary=VOCABULARY,
        chunk=CHUNK,
    )


@pytest.fixture
def pipeline(folder: Path) -> Iterator[Pipeline]:
    pipeline = made(folder)
    yield pipeline
    pipeline.close()


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Pipeline]:
    """For what doesn't depend on what the cache holds."""
    pipeline = made(folder)
    yield pipeline
    pipeline.close()


@pytest.fixture(scope="module")
def cold(folder: Path) -> float:
    """Log-probability of the token after 400 of the prompt, in a cache that held nothing."""
    pipeline = made(folder)
    found = _log_probability(pipeline._engine, PROMPT[:400])
    pipeline.close()
    return found


def never() -> bool:
    return False


class After:
    """Cancelled once it was asked ``polls`` times."""

    def __init__(self, polls: int) -> None:
        self.left = polls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def hold(context: PipelineContext, tokens: Sequence[int], cancelled: Any = never) -> Measured:
    """Make the context's record and the cache hold ``tokens``, from the start on."""
    context.trim(0)
    context.evaluate(tokens, 0, cancelled=cancelled)
    assert context.measured is not None
    return context.measured


def answer(
    context: PipelineContext, tokens: Sequence[int], most: int = 12, **sampling: Any
) -> list[int]:
    options = DecodeIn(sampling=SamplingIn(**sampling))
    return list(context.generate(tokens, options, most, cancelled=never))


class Meter:
    """The same engine at one token a step: the steps to the first token are the tokens evaluated,
    which is a count that owes nothing to what is tested here.
    """

    def __init__(self, folder: Path) -> None:
        settings = genai.SchedulerConfig()
        settings.num_kv_blocks, settings.cache_size = BLOCKS, 0
        settings.max_num_batched_tokens = 1
        settings.enable_prefix_caching = True
        properties = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": PRECISION}
        self.engine = genai.ContinuousBatchingPipeline(str(folder), settings, "CPU", properties)
        self.requests = 0

    def evaluated(self, tokens: Sequence[int]) -> int:
        self.requests += 1
        steps = 0
        handle = raw_request(self.engine, self.requests, tokens)
        while not handle.can_read():
            self.engine.step()
            steps += 1
        return steps


def raw_request(engine: Any, number: int, tokens: Sequence[int]) -> Any:
    config = genai.GenerationConfig(max_new_tokens=1, ignore_eos=True)
    return engine.add_request(number, ov.Tensor(np.array([tokens], dtype=np.int64)), config)


def test_reuse_is_counted_as_the_engine_itself_counts_its_steps(
    folder: Path, pipeline: Pipeline
) -> None:
    meter, context = Meter(folder), pipeline.new_context(900)
    prompts = [
        PROMPT[:70],
        PROMPT[:70],
        PROMPT[:75],
        PROMPT[:72],
        PROMPT[:96],
        PROMPT[:96],
        [*PROMPT[:40], *OTHER[:11]],
        PROMPT[:64],
        OTHER[:20],
        OTHER[:50],
    ]
    for tokens in prompts:  # none longer than a chunk more than what is held: all counts are exact
        measured = hold(context, tokens)
        # An end inside a block is gone on from up to that block's end, as another request.
        assert measured.evaluated == meter.evaluated(tokens), (len(tokens), measured)
        assert measured.reused + measured.evaluated == measured.held == len(tokens)
        assert not measured.lower_bound


@pytest.mark.parametrize("held", [0, 64, 70, 320, 333])
def test_a_long_evaluation_says_exactly_what_it_reused(pipeline: Pipeline, held: int) -> None:
    context = pipeline.new_context(900)
    if held:
        hold(context, PROMPT[:held])
    measured = hold(context, PROMPT[:700])
    assert measured == Measured(held, False, 700 - held, 700)


def test_where_only_a_bound_is_to_be_had_it_says_so(pipeline: Pipeline) -> None:
    first, second = pipeline.new_context(400), pipeline.new_context(400)
    hold(first, PROMPT[:320])  # ends with a block, so that nothing tells the second of it
    measured = hold(second, PROMPT[:330])
    assert measured == Measured(288, True, 42, 330)
    assert hold(second, PROMPT[:330]) == Measured(329, False, 1, 330)


def test_the_record_claims_more_than_the_cache_has_and_the_measure_tells(
    pipeline: Pipeline,
) -> None:
    idle, other = pipeline.new_context(600), pipeline.new_context(400)
    hold(idle, PROMPT[:600])
    for begin in range(0, 500, 50):  # ten other prompts of 350 tokens, in a cache of 1,024
        hold(other, OTHER[begin : begin + 350])
    assert idle.confirm(600, cancelled=never) == 600
    assert idle.measured == Measured(0, False, 600, 600)
    assert idle.confirm(300, cancelled=never) == 300
    assert idle.measured == Measured(288, False, 12, 300)
    assert idle._length == 600


def test_the_engine_finds_a_block_it_never_filled_after_a_cancel_inside_it(
    pipeline: Pipeline, cold: float
) -> None:
    """The fault that this executor must never meet. Once it is gone, a simpler cancel will do."""
    engine = pipeline._engine
    first = raw_request(engine, 1001, PROMPT[:70])
    while engine.has_non_finished_requests():
        engine.step()
    assert first.can_read()
    handle = raw_request(engine, 1002, PROMPT[:400])
    engine.step()  # 70 + 64 tokens: inside the fifth block
    handle.cancel()
    engine.step()
    assert _log_probability(engine, PROMPT[:400]) != pytest.approx(cold, abs=1e-3)


def _log_probability(engine: Any, tokens: Sequence[int]) -> float:
    config = genai.GenerationConfig(max_new_tokens=1, ignore_eos=True, logprobs=1)
    handle = engine.add_request(99, ov.Tensor(np.array([tokens], dtype=np.int64)), config)
    while engine.has_non_finished_requests():
        engine.step()
    (output,) = handle.read().values()
    return float(output.generated_log_probs[0])


def test_the_meter_shows_how_the_engine_finds_the_last_block_of_a_request(folder: Path) -> None:
    meter = Meter(folder)
    for first, (lengths, expected) in enumerate(
        (
            ((70, 75, 200), (0, 70, 70)),  # still by its first end
            ((70, 96, 200), (0, 70, 70)),
            ((70, 128, 200), (0, 70, 128)),  # as a whole one, now that another follows
            ((64, 96, 200), (0, 64, 96)),
        )
    ):
        prompt = [10 + first, *PROMPT]
        assert tuple(n - meter.evaluated(prompt[:n]) for n in lengths) == expected


@pytest.mark.parametrize("polls", [2, 4])
@pytest.mark.parametrize("held", [0, 64, 70])
def test_a_cancelled_evaluation_keeps_what_it_did_and_harms_nothing(
    pipeline: Pipeline, cold: float, held: int, polls: int
) -> None:
    context = pipeline.new_context(900)
    if held:
        hold(context, PROMPT[:held])
    done = held + context.evaluate(PROMPT[held:400], held, cancelled=After(polls))
    assert context.measured is not None
    assert held <= done < 400
    assert done - held == context.measured.evaluated
    context.evaluate(PROMPT[done:400], done, cancelled=never)
    measured = context.measured
    # Where it goes on from inside a block, a token may be evaluated twice.
    assert measured.reused in (done, done - 1)
    assert measured == Measured(measured.reused, False, 400 - measured.reused, 400)
    assert pipeline.rebuilt == 0
    assert _log_probability(pipeline._engine, PROMPT[:400]) == pytest.approx(cold, abs=1e-4)


def test_a_cancel_where_the_place_in_a_block_is_unknown_empties_the_cache(
    pipeline: Pipeline,
) -> None:
    context, other = pipeline.new_context(600), pipeline.new_context(400)
    hold(context, PROMPT[:333])
    for begin in range(0, 500, 50):
        hold(other, OTHER[begin : begin + 350])
    # The record believes that it goes on from 333; the cache has nothing of it left.
    assert context.evaluate(PROMPT[333:500], 333, cancelled=After(2)) == 0
    assert pipeline.unsound
    assert context._length == 0
    assert hold(context, PROMPT[:500]) == Measured(0, False, 500, 500)
    assert (pipeline.unsound, pipeline.rebuilt) == (False, 1)


def test_an_answer_is_the_same_warm_as_cold(folder: Path, pipeline: Pipeline) -> None:
    context = pipeline.new_context(900)
    cold = answer(context, PROMPT[:333])
    assert answer(context, PROMPT[:333]) == cold
    hold(context, [*PROMPT[:300], *OTHER[:200]])
    assert answer(context, PROMPT[:333]) == cold
    second = pipeline.new_context(100)
    hold(second, OTHER[:90])
    third = pipeline.new_context(900)  # the cache grows for it, and is empty again
    assert pipeline.rebuilt > 0
    assert answer(third, PROMPT[:333]) == cold


def test_a_decode_evaluates_the_last_token_again_and_no_more(pipeline: Pipeline) -> None:
    context = pipeline.new_context(900)
    hold(context, PROMPT[:333])
    tokens = answer(context, PROMPT[:333], 20)
    assert len(tokens) == 20
    assert context.measured == Measured(332, False, 1, 333)
    assert context._length == 333 + 19  # the last one is sampled, not evaluated
    more = answer(context, [*PROMPT[:333], *tokens], 5)
    assert context.measured == Measured(352, False, 1, 353)
    assert answer(context, PROMPT[:333], 25) == [*tokens, *more]


def test_a_prompt_of_the_whole_window_yields_one_token_and_more_are_refused_aloud(
    folder: Path,
) -> None:
    pipeline = made(folder, blocks=8)
    try:
        context = pipeline.new_context(256)
        assert len(answer(context, PROMPT[:256], 1)) == 1
        assert len(answer(context, PROMPT[:250], 7)) == 7
        with pytest.raises(SessionFatal) as refused:
            answer(context, PROMPT[:250], 8)
        assert refused.value.metadata["cause"] == "engine_cache"
        assert len(answer(context, PROMPT[:250], 7)) == 7  # and it lives on
    finally:
        pipeline.close()


def test_ids_outside_the_vocabulary_never_reach_the_engine(shared: Pipeline) -> None:
    context = shared.new_context(100)
    for bad in (-1, VOCABULARY, 2**40):
        with pytest.raises(InvalidRequest):
            context.evaluate([5, bad], 0, cancelled=never)
        assert context._length == 0
    assert hold(context, [5, 6]).held == 2


def test_the_same_seed_draws_the_same_and_all_of_its_bits_count(shared: Pipeline) -> None:
    context = shared.new_context(200)

    def drawn(seed: int) -> list[int]:
        return answer(
            context, PROMPT[:100], 16, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed
        )

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert drawn(7) != drawn(7 + (1 << 40))
    assert drawn(2**64 - 1) == drawn(2**64 - 1)


@pytest.mark.parametrize(
    "one",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_p": 1e-9}],
)
def test_whatever_keeps_one_candidate_is_greedy(shared: Pipeline, one: dict[str, Any]) -> None:
    context = shared.new_context(200)
    asked = {"temperature": 1.5, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | one
    assert answer(context, PROMPT[:100], 8, **asked) == answer(context, PROMPT[:100], 8)


def test_penalties_change_what_repeats(shared: Pipeline) -> None:
    context = shared.new_context(300)
    prompt = PROMPT[:100]
    plain = answer(context, prompt, 40)
    assert len(set(plain)) < 40
    counted = answer(context, prompt, 40, frequency_penalty=2.0, repeat_last_n=-1)
    assert max(map(counted.count, counted)) < max(map(plain.count, plain))
    fresh = answer(context, prompt, 8, repeat_penalty=900.0, repeat_last_n=-1)
    assert not set(fresh) & set(prompt)


@pytest.mark.parametrize(
    ("options", "capability"),
    [
        (DecodeIn(sampling=SamplingIn(logit_bias={3: 1.0})), "decode.logit_bias"),
        (DecodeIn(sampling=SamplingIn(typical_p=0.9, temperature=1.0)), "decode.typical_p"),
        (DecodeIn(sampling=SamplingIn(), top_logprobs=1), "decode.logprobs"),
        (DecodeIn(sampling=SamplingIn(repeat_penalty=1.1)), "decode.repeat_last_n"),
        (
            DecodeIn(sampling=SamplingIn(presence_penalty=2.5, repeat_last_n=-1)),
            "decode.presence_penalty",
        ),
    ],
)
def test_what_the_engine_cannot_sample_is_refused_by_name(
    options: DecodeIn, capability: str
) -> None:
    with pytest.raises(UnsupportedFeature) as refused:
        generation.check(options)
    assert refused.value.metadata["capability"] == capability


def test_default_options_are_served() -> None:
    generation.check(DecodeIn(sampling=SamplingIn()))
    generation.check(DecodeIn(sampling=SamplingIn(temperature=0.8, seed=2**64 - 1)))


@pytest.mark.parametrize(
    ("kv_type", "bits_a_head"),
    [
        ("f32", 2 * HEAD_LENGTH * 32),
        ("f16", 2 * HEAD_LENGTH * 16),
        ("u8", (HEAD_LENGTH * 40 // 32 + HEAD_LENGTH + 8) * 8),
        ("u4", (HEAD_LENGTH * 48 // 32 + HEAD_LENGTH + 16) * 4),
    ],
)
def test_the_cache_is_of_the_type_that_was_asked_for(
    folder: Path, kv_type: str, bits_a_head: int
) -> None:
    pipeline = made(folder, kv_type=kv_type, blocks=8)
    try:
        token_bytes = LAYERS * KV_HEADS * bits_a_head // 8
        assert pipeline.block_bytes == token_bytes * BLOCK_TOKENS
        context = pipeline.new_context(100)
        assert context.window == 128
        assert context.kv_bytes == 4 * pipeline.block_bytes == context.placed[0].kv_bytes
        assert len(answer(context, PROMPT[:80])) == 12
    finally:
        pipeline.close()


def test_it_says_what_it_cannot_do(shared: Pipeline) -> None:
    context = shared.new_context(100)
    assert isinstance(context, SelfSampling)
    hold(context, PROMPT[:64])
    with pytest.raises(UnsupportedFeature):
        context.export_state(0, 32)
    with pytest.raises(UnsupportedFeature):
        context.logits()
    assert not context.import_state(np.zeros(4, dtype=np.uint8), 96)
    said = shared.capabilities()
    for name in ("tail_removal", "position_shift", "middle_removal", "state.blocks"):
        assert said[name].startswith("no: "), name
    assert said["exact_warm"].startswith("unknown: ")


def test_a_folder_without_a_model_is_refused_with_the_engines_words(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed) as refused:
        made(tmp_path)
    assert refused.value.metadata["executor"] == "pipeline"


def test_ends_finds_the_longest_it_has_seen() -> None:
    ends = Ends()
    ids = np.array(PROMPT, dtype=np.int64)
    for length in (70, 64, 33, 500):
        ends.add(ids[:length])
    assert len(ends) == 3  # whole blocks are no news
    assert ends.longest(ids[:600]) == 500
    assert ends.longest(ids[:499]) == 70
    assert ends.longest(ids[:70]) == 70
    assert ends.longest(ids[:69]) == 33
    assert ends.longest(np.array(OTHER, dtype=np.int64)) == 0
    ends.clear()
    assert ends.longest(ids) == 0 == len(ends)
