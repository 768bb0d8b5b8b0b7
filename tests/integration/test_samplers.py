"""Decode options through the whole product: what they do to the answer, and how it ends."""

from __future__ import annotations

import math

import numpy as np
import pytest

from modeld.client import Client, Session, StopReason
from tests.support.daemon import MODEL
from tests.support.product import Told, ask, go_on, prompt_ids, system, text_ids, user
from tests.support.reference import Reference

pytestmark = pytest.mark.real

PREFIX, SUFFIX = " Once upon a time, in a village by the sea,", " there lived"


@pytest.fixture
def talk(client: Client) -> Session:
    return client.open_session(MODEL, window=512, prompt_format="raw")


def tell(session: Session, max_tokens: int = 12, **options: object) -> Told:
    return ask(session, PREFIX, SUFFIX, max_tokens, **options)


def test_nothing_set_is_greedy(client: Client, talk: Session, reference: Reference) -> None:
    told = tell(talk)
    assert told.ids == reference.greedy(text_ids(client, PREFIX + SUFFIX), 12)
    assert told.stop is StopReason.LENGTH
    assert told.text == reference.text(told.ids)


def test_a_seed_repeats_an_answer_and_another_seed_another(talk: Session) -> None:
    tell(talk, 1)  # from here on every turn begins from the same resident prompt
    first = tell(talk, temperature=1.0, seed=7)
    again = tell(talk, temperature=1.0, seed=7)
    other = [tell(talk, temperature=1.0, seed=seed).ids for seed in (8, 9)]
    assert first.ids == again.ids
    assert first.final.seed == 7
    assert any(ids != first.ids for ids in other)


def test_a_drawn_seed_is_told_and_repeats(talk: Session) -> None:
    tell(talk, 1)
    drawn = tell(talk, temperature=1.2)
    assert tell(talk, temperature=1.2, seed=drawn.final.seed).ids == drawn.ids


def test_one_candidate_is_greedy_at_any_temperature(talk: Session) -> None:
    tell(talk, 1)
    greedy = tell(talk)
    assert tell(talk, temperature=1.5, top_k=1, seed=3).ids == greedy.ids
    assert tell(talk, temperature=1.5, top_k=0, top_p=0.0, seed=3).ids == greedy.ids
    assert tell(talk, temperature=1.5, top_k=0, min_p=1.0, seed=3).ids == greedy.ids


def test_heat_spreads_the_answers(talk: Session) -> None:
    tell(talk, 1)
    hot = {
        tuple(tell(talk, 4, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed).ids)
        for seed in range(4)
    }
    cool = {tuple(tell(talk, 4, temperature=1e-5, seed=seed).ids) for seed in range(2)}
    assert len(hot) > 1
    assert len(cool) == 1


# --- how an answer ends --------------------------------------------------------------------------


def test_a_stop_sequence_ends_the_text_before_itself(talk: Session) -> None:
    whole = tell(talk, 14).text
    words = whole.split(" ")
    stop = " " + words[5]
    told = tell(talk, 14, stop=[stop])
    assert told.stop is StopReason.STOP_SEQUENCE
    assert told.final.stop_sequence == stop
    assert told.text == whole[: whole.index(stop)]


def test_a_stop_sequence_across_tokens_is_never_shown(talk: Session, client: Client) -> None:
    plain = tell(talk, 14)
    middle = len(plain.text) // 2
    stop = plain.text[middle - 4 : middle + 5]
    assert len(text_ids(client, stop)) > 1
    stream = talk.turn(
        PREFIX, SUFFIX, max_tokens=14, stop=[stop, "never said"], stream_interval_ms=0
    )
    chunks = list(stream)
    assert stream.final is not None
    assert stream.final.stop_sequence == stop
    assert "".join(chunks) == plain.text[: plain.text.index(stop)]


def test_a_stop_sequence_that_doesnt_come_changes_nothing(talk: Session) -> None:
    plain = tell(talk, 10)
    told = tell(talk, 10, stop=["\u0000never", plain.text[-3:] + "…"])
    assert told.text == plain.text
    assert told.stop is StopReason.LENGTH


def test_a_stopped_answer_leaves_exact_numbers_and_goes_on(talk: Session, client: Client) -> None:
    plain = tell(talk, 14)
    stop = plain.text[10:14]
    told = tell(talk, 14, stop=[stop])
    report = talk.explain()
    assert report.resident == told.final.resident
    assert report.resident + report.available == 512
    assert report.resident <= len(text_ids(client, PREFIX + SUFFIX)) + told.final.tokens
    again = tell(talk, 14)
    assert again.text == plain.text


def test_max_tokens_counts_sampled_tokens(talk: Session) -> None:
    for limit in (1, 2, 5):
        told = tell(talk, limit)
        assert (len(told.ids), told.final.tokens, told.stop) == (limit, limit, StopReason.LENGTH)


def test_the_end_of_generation_token_ends_an_answer_unless_ignored(
    client: Client, chat: Session, reference: Reference
) -> None:
    asked = [system("Answer with the single word: Yes"), user("Say: Yes")]
    end = next(iter(reference.end_of_generation & {2}))
    bias = {end: 100.0}
    told = ask(chat, asked[:1], asked[1:], 5, logit_bias=bias)
    assert (told.ids, told.text, told.stop) == ([end], "", StopReason.EOS)
    assert told.final.resident == len(prompt_ids(client, asked))
    on = ask(chat, asked[:1], asked[1:], 5, logit_bias=bias, ignore_eos=True)
    assert (on.ids, on.stop) == ([end] * 5, StopReason.LENGTH)


# --- what changes the choice ---------------------------------------------------------------------


def test_a_banned_token_is_never_sampled(talk: Session) -> None:
    plain = tell(talk, 12)
    banned = dict.fromkeys(set(plain.ids), -math.inf)
    told = tell(talk, 12, logit_bias=banned)
    assert not set(told.ids) & set(banned)


def test_a_bias_forces_a_token(talk: Session, client: Client) -> None:
    (wanted,) = text_ids(client, " sea")
    assert set(tell(talk, 4, logit_bias={wanted: 200.0}).ids) == {wanted}


@pytest.mark.parametrize(
    "penalty",
    [{"repeat_penalty": 1.8}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}],
    ids=str,
)
def test_a_penalty_keeps_an_answer_from_repeating(talk: Session, penalty: dict[str, float]) -> None:
    looping = " tick tock tick tock tick tock tick tock tick"
    plain = ask(talk, looping, " tock", 8)
    told = ask(talk, looping, " tock", 8, repeat_last_n=-1, **penalty)
    assert told.ids != plain.ids
    assert len(set(told.ids)) > len(set(plain.ids))


# --- what is told of it --------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model(
    client: Client, talk: Session, reference: Reference
) -> None:
    told = tell(talk, 4, top_logprobs=5)
    prompt = text_ids(client, PREFIX + SUFFIX)
    assert len(told.logprobs) == 4
    for index, sampled in enumerate(told.logprobs):
        assert sampled.sampled.token_id == told.ids[index]
        assert len(sampled.top) == 5
        values = [entry.logprob for entry in sampled.top]
        assert values == sorted(values, reverse=True)
        assert sum(math.exp(value) for value in values) <= 1.0 + 1e-6
        assert sampled.sampled == sampled.top[0], "greedy takes the best"
    logits = reference.logits([prompt]).astype(np.float64)
    exact = logits - (logits.max() + np.log(np.exp(logits - logits.max()).sum()))
    for entry in told.logprobs[0].top:
        assert entry.logprob == pytest.approx(float(exact[entry.token_id]), abs=1e-4)
        assert reference.engine.tokenizer.piece(entry.token_id) == entry.raw


def test_logprobs_of_a_hot_sample_name_the_sampled_token(talk: Session) -> None:
    told = tell(talk, 6, top_logprobs=20, temperature=1.5, top_k=20, seed=5)
    for index, sampled in enumerate(told.logprobs):
        assert sampled.sampled.token_id == told.ids[index]
        assert sampled.sampled in sampled.top
        assert sampled.sampled.logprob <= sampled.top[0].logprob


def test_chunks_cover_the_answer_however_they_are_cut(talk: Session) -> None:
    each = tell(talk, 9, stream_interval_ms=0)
    few = tell(talk, 9, stream_interval_ms=10_000)
    assert [chunk.tokens for chunk in each.chunks] == [1] * 9
    assert len(few.chunks) < 9
    assert each.text == few.text
    assert each.ids == few.ids
    for told in (each, few):
        assert sum(chunk.tokens for chunk in told.chunks) == told.final.tokens
        assert "".join(chunk.text for chunk in told.chunks) == told.text


def test_characters_of_several_tokens_arrive_whole(
    client: Client, talk: Session, reference: Reference
) -> None:
    ids = text_ids(client, "🦉")
    assert len(ids) > 1
    told = tell(talk, 1, logit_bias={ids[0]: 300.0})
    assert told.ids == ids[:1]
    assert told.text == "\ufffd", "a cut character is shown as such at the end, not before"
    more = go_on(talk, 1)
    assert more.final.resident == told.final.resident + 1
    assert reference.text(ids) == "🦉"
