"""What a caller of the sampler can rely on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.shared.errors import InvalidRequest, SessionFatal
from modeld.shared.messages import SamplingIn
from modeld.workers.sampling import Sampler, top_logprobs, validate

VOCAB = 300


def logits_of(seed: int = 0, size: int = VOCAB) -> Any:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def sampled(options: SamplingIn, logits: Any, times: int = 200) -> list[int]:
    sampler = Sampler(options, len(logits))
    return [sampler.sample(logits) for _ in range(times)]


def off(**changes: Any) -> SamplingIn:
    """Sampling from the whole distribution."""
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return SamplingIn(**{**values, **changes})


def test_greedy_takes_the_best_and_the_lowest_id_of_equals() -> None:
    assert Sampler(SamplingIn(), 4).sample(np.array([1, 5, 5, 2], dtype=np.float32)) == 1


def test_greedy_respects_bias_and_penalties() -> None:
    logits = np.array([1.0, 4.0, 3.9, 0.0], dtype=np.float32)
    assert Sampler(SamplingIn(logit_bias={1: -math.inf}), 4).sample(logits) == 2
    assert Sampler(SamplingIn(logit_bias={3: 9.0}), 4).sample(logits) == 3
    sampler = Sampler(SamplingIn(repeat_penalty=1.5), 4)
    sampler.accept(1)
    assert sampler.sample(logits) == 2
    assert logits.tolist() == pytest.approx([1.0, 4.0, 3.9, 0.0]), "the engine's view is not edited"


def test_a_negative_logit_is_penalized_downwards() -> None:
    sampler = Sampler(SamplingIn(repeat_penalty=2.0), 2)
    sampler.accept(0)
    assert sampler.sample(np.array([-1.0, -1.5], dtype=np.float32)) == 1


def test_frequency_counts_and_presence_does_not() -> None:
    logits = np.array([3.0, 2.0], dtype=np.float32)
    once = Sampler(SamplingIn(frequency_penalty=0.4), 2)
    once.prime([0, 0])
    assert once.sample(logits) == 0
    once.accept(0)
    assert once.sample(logits) == 1
    present = Sampler(SamplingIn(presence_penalty=0.4), 2)
    present.prime([0, 0, 0, 0])
    assert present.sample(logits) == 0


def test_penalties_look_back_over_the_last_n_tokens_only() -> None:
    logits = np.array([3.0, 2.0, 0.0], dtype=np.float32)
    for last_n, expected in ((0, 0), (2, 0), (3, 1), (-1, 1)):
        sampler = Sampler(SamplingIn(repeat_penalty=9.0, repeat_last_n=last_n), 3)
        sampler.prime([0, 2, 2])
        assert sampler.sample(logits) == expected, last_n


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = logits_of()
    first = sampled(SamplingIn(temperature=1.0, top_k=0, seed=7), logits)
    assert first == sampled(SamplingIn(temperature=1.0, top_k=0, seed=7), logits)
    assert first != sampled(SamplingIn(temperature=1.0, top_k=0, seed=8), logits)


def test_unfiltered_sampling_follows_the_softmax() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    counts = np.bincount(sampled(off(seed=3), logits, 20_000), minlength=3) / 20_000
    assert counts == pytest.approx([0.5, 0.3, 0.2], abs=0.02)


def test_temperature_sharpens_and_a_tiny_one_is_greedy() -> None:
    logits = np.log(np.array([0.6, 0.4], dtype=np.float32))
    counts = np.bincount(sampled(off(temperature=0.5), logits, 20_000), minlength=2) / 20_000
    assert counts[0] == pytest.approx(0.36 / 0.52, abs=0.02)
    assert set(sampled(off(temperature=1e-300), logits)) == {0}


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.1, "top_p": 0.75}, {0, 1}),
        ({"typical_p": 0.2}, {1}),  # its surprise is nearest the entropy
        ({"top_k": 3, "top_p": 0.99, "min_p": 0.5}, {0, 1}),
    ],
)
def test_filters_keep(filters: dict[str, Any], kept: set[int]) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    assert set(sampled(off(**filters), logits, 400)) == kept


def test_top_k_keeps_the_lowest_ids_of_equals() -> None:
    assert set(sampled(off(top_k=3), np.zeros(50, dtype=np.float32), 400)) == {0, 1, 2}


@given(st.integers(0, 1000), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_skipping_the_sort_of_all_changes_nothing(seed: int, top_p: float, min_p: float) -> None:
    logits = logits_of(seed)
    quick = sampled(off(top_p=top_p, min_p=min_p, seed=seed), logits, 20)
    whole = sampled(off(top_p=top_p, min_p=min_p, seed=seed, top_k=VOCAB), logits, 20)
    assert quick == whole


@pytest.mark.parametrize("options", [SamplingIn(), off(), off(top_k=5), off(min_p=0.05)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_end_the_session(options: SamplingIn, bad: float) -> None:
    logits = logits_of()
    logits[17] = bad
    with pytest.raises(SessionFatal) as caught:
        Sampler(options, VOCAB).sample(logits)
    assert caught.value.metadata["cause"] == "engine_error"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banning_everything_is_refused(temperature: float) -> None:
    options = SamplingIn(temperature=temperature, logit_bias=dict.fromkeys(range(4), -math.inf))
    with pytest.raises(InvalidRequest, match="at least one token"):
        Sampler(options, 4).sample(np.zeros(4, dtype=np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("typical_p", math.nan),
        ("repeat_penalty", 0.0),
        ("repeat_last_n", -2),
        ("frequency_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("seed", -1),
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {3: math.inf}),
    ],
)
def test_an_option_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(SamplingIn(**{field: value}), VOCAB)
    assert caught.value.metadata["field"].startswith(f"sampling.{field}")
    assert caught.value.metadata["allowed"]


def test_log_probabilities_come_from_the_unmodified_logits() -> None:
    logits = logits_of()
    exact = logits.astype(np.float64)
    expected = exact - np.log(np.exp(exact).sum())
    own, best = top_logprobs(logits, 3, 5)
    assert own == pytest.approx(expected[5])
    assert [token for token, _ in best] == np.argsort(-expected)[:3].tolist()
    assert [value for _, value in best] == pytest.approx(sorted(expected, reverse=True)[:3])
    assert top_logprobs(logits, 0, 5) == (own, [])
