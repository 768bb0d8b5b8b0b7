"""What the session core promises about answers: how they end, what is kept, what is reused."""

from __future__ import annotations

import math

import pytest

from modeld.shared.errors import InvalidRequest, SessionFatal
from modeld.shared.messages import ChunkOut, DecodeIn, FinalOut, Status
from tests.support.core_harness import FakeOp, Harness, chat, options, raw, turn_ref
from tests.support.fake_engine import FakeEngine

SYSTEM = ("system", "You are brief.")
ASK = ("user", "Name a colour.")


def chatting(**engine: object) -> Harness:
    harness = Harness(FakeEngine(**engine))  # type: ignore[arg-type]
    harness.open(window=1024, prompt_format="chat")
    return harness


def statuses(op: FakeOp) -> tuple[Status, Status]:
    prefix, suffix = op.of(Status)
    return prefix, suffix


def eager_end(harness: Harness) -> None:
    """Make the end-of-generation token the only choice."""
    harness.engine.bias[harness.engine.tokenizer.controls["<|im_end|>"]] = 1e3


# --- a turn and its parts -------------------------------------------------------------------------


def test_turn_tells_prefix_then_suffix_then_chunks() -> None:
    harness = Harness()
    harness.open()
    op = FakeOp()
    final = harness.turn(raw("one\n"), raw("two\n"), options(9), op=op)
    assert [type(sent) for sent in op.sent[:2]] == [Status, Status]
    assert all(isinstance(sent, ChunkOut) for sent in op.sent[2:])
    prefix, suffix = statuses(op)
    assert (prefix.part, prefix.resident, prefix.prefilled) == ("prefix", 4, 4)
    assert (suffix.part, suffix.resident, suffix.prefilled) == ("suffix", 8, 4)
    assert len(prefix.segments) == 1
    assert len(suffix.segments) == 2
    assert final.tokens == sum(chunk.tokens for chunk in op.of(ChunkOut)) == len(op.ids) == 9
    assert final.stop_reason == "length"
    assert final.prefilled == 0
    assert final.resident == 8 + 8  # the last token is sampled, not evaluated
    assert final.available == 256 - final.resident
    assert final.seen_tokens == 8 + 9


def test_turn_gives_what_its_parts_give() -> None:
    harness = Harness()
    harness.open("a")
    harness.open("b")
    one, two = FakeOp(), FakeOp()
    harness.turn(raw("one\n"), raw("two\n"), session_id="a", op=one)
    harness.ensure(raw("one\n"), "b")
    harness.suffix(raw("two\n"), "b")
    harness.decode(session_id="b", op=two)
    assert (one.text, one.ids) == (two.text, two.ids)


def test_repeated_raw_turn_without_suffix_evaluates_one_token() -> None:
    harness = Harness()
    harness.open()
    harness.turn(raw("one two\n"), raw(), options(3))
    op = FakeOp()
    harness.turn(raw("one two\n"), raw(), options(3), op=op)
    prefix, suffix = statuses(op)
    assert (prefix.reused, prefix.prefilled) == (prefix.prefix - 1, 1)
    assert (suffix.reused, suffix.prefilled, suffix.dropped, suffix.suffix) == (0, 0, 0, 0)
    assert prefix.dropped == 2
    assert prefix.miss_reason == suffix.miss_reason == "NONE"


def test_refused_turn_changes_nothing() -> None:
    harness = Harness()
    harness.open()
    harness.turn(raw("one\n"), raw("two\n"), turn_id="t")
    before = harness.explain()
    for bad in (
        DecodeIn(sampling=options().sampling, max_tokens=-1),
        options(top_logprobs=21),
        options(stop=[""]),
        options(temperature=-1.0),
        options(logit_bias={99999: 1.0}),
    ):
        with pytest.raises(InvalidRequest):
            harness.turn(raw("other\n"), raw("x"), bad)
    with pytest.raises(InvalidRequest):
        harness.turn(raw(), raw())
    assert harness.explain() == before


def test_decode_without_a_prompt_is_refused() -> None:
    harness = Harness()
    harness.open()
    with pytest.raises(InvalidRequest):
        harness.decode()
    harness.ensure(raw())
    with pytest.raises(InvalidRequest):
        harness.decode()


def test_decode_after_a_matched_prefix_evaluates_its_last_token() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    harness.decode(options(5))
    harness.ensure(raw("one\n"))
    op = FakeOp()
    final = harness.decode(options(5), op=op)
    assert final.prefilled == 1
    assert op.ids == harness.fresh_answer(raw("one\n"), None, options(5))[1]


def test_memory_that_cant_be_trimmed_answers_the_same_and_counts_the_work() -> None:
    harness = Harness(FakeEngine(trimmable=False))
    harness.open()
    harness.ensure(raw("one\n"))
    harness.decode(options(5))
    harness.ensure(raw("one\n"))
    op = FakeOp()
    final = harness.decode(options(5), op=op)
    assert final.prefilled == 4
    assert op.ids == harness.fresh_answer(raw("one\n"), None, options(5))[1]


# --- how an answer ends ---------------------------------------------------------------------------


def test_end_of_generation_ends_the_answer_and_is_counted() -> None:
    harness = Harness()
    harness.open()
    eager_end(harness)
    op = FakeOp()
    final = harness.turn(raw("one\n"), raw("two\n"), op=op)
    assert (final.stop_reason, final.tokens, op.text) == ("eos", 1, "")
    assert op.ids == [harness.engine.tokenizer.controls["<|im_end|>"]]
    assert final.resident == 8


def test_end_of_generation_is_passed_when_asked() -> None:
    harness = Harness()
    harness.open()
    eager_end(harness)
    asked = options(4)
    asked.ignore_eos = True
    final = harness.turn(raw("one\n"), raw("two\n"), asked)
    assert (final.stop_reason, final.tokens) == ("length", 4)


def test_full_window_ends_the_answer_after_one_more_token() -> None:
    harness = Harness()
    harness.open(window=16)
    op = FakeOp()
    final = harness.turn(raw("0123456\n"), raw("abcdef"), options(0), op=op)
    assert (final.stop_reason, final.tokens) == ("context_full", 3)
    assert (final.resident, final.available) == (16, 0)
    again = harness.decode(options(0))
    assert (again.stop_reason, again.tokens, again.resident) == ("context_full", 0, 16)


def test_prompt_that_fills_the_window_yields_one_token() -> None:
    harness = Harness()
    harness.open(window=16)
    final = harness.turn(raw("0123456\n"), raw("abcdefgh"), options(0))
    assert (final.stop_reason, final.tokens, final.resident) == ("context_full", 1, 16)
    final = harness.turn(raw("0123456\n"), raw("abcdefgh"), options(1))
    assert (final.stop_reason, final.tokens, final.resident) == ("length", 1, 16)


def test_stop_sequence_is_cut_off_and_the_context_rolled_back() -> None:
    harness = Harness()
    harness.open()
    prompt = raw("one\n"), raw("two\n")
    text, ids, _ = harness.fresh_answer(*prompt, options(40))
    pieces = [harness.engine.tokenizer.piece(token).decode() for token in ids]
    # From the start of the seventh token to the middle of the tenth.
    begin = len("".join(pieces[:7]))
    stop = text[begin : begin + len("".join(pieces[7:10]))]
    op = FakeOp()
    final = harness.turn(*prompt, options(40, stop=[stop]), op=op)
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert op.text == text[: text.index(stop)]
    assert final.tokens == sum(chunk.tokens for chunk in op.of(ChunkOut)) == 10
    assert final.resident == 8 + 7
    assert harness.explain().retained == 2  # the tenth was never evaluated
    rest = FakeOp()
    final = harness.decode(options(33), op=rest)
    assert final.prefilled == 1
    assert op.text + rest.text == text


def test_answer_cut_within_a_token_goes_on_from_what_was_shown() -> None:
    harness = Harness()
    harness.open()
    harness.engine.bias[harness.engine.tokenizer.encode("hello")[0]] = 1e3  # "hello" forever
    op = FakeOp()
    final = harness.turn(raw("one\n"), raw("two\n"), options(40, stop=["lohe"]), op=op)
    assert (final.stop_reason, op.text, final.resident) == ("stop_sequence", "hel", 8)
    final = harness.decode(options(1), turn_id="u")
    assert final.prefilled == 3
    assert final.resident == 8 + 3
    harness.ensure(raw("one\n"))
    prompt = raw("two\n")
    prompt.segments.append(turn_ref("u"))
    status = harness.suffix(prompt)
    assert status.suffix == 4 + len(harness.engine.tokenizer.encode("helhello"))


def test_continued_answer_is_the_uninterrupted_one() -> None:
    harness = Harness()
    harness.open()
    one, two = FakeOp(), FakeOp()
    harness.turn(raw("one\n"), raw("two\n"), options(5), op=one)
    final = harness.decode(options(7), op=two)
    assert final.prefilled == 1
    whole = harness.fresh_answer(raw("one\n"), raw("two\n"), options(12))
    assert one.ids + two.ids == whole[1]
    assert one.text + two.text == whole[0]


# --- conversations --------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [True, False])
def test_second_turn_reuses_everything_but_what_is_new(by_name: bool) -> None:
    harness = chatting(end_bias=1.0)
    first = FakeOp()
    final = harness.turn(chat(SYSTEM), chat(ASK), options(60), op=first, turn_id="t")
    assert final.stop_reason == "eos"
    answer = turn_ref("t") if by_name else ("assistant", first.text)
    suffix = chat(ASK, answer, ("user", "Another."))
    op = FakeOp()
    harness.turn(chat(SYSTEM), suffix, options(10), op=op)
    prefix_status, status = statuses(op)
    assert prefix_status.prefilled == 0
    new = "<|im_end|>\n<|im_start|>user\nAnother.<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = harness.engine.tokenizer
    controls = new.count("<|")
    plain = new.replace("<|im_end|>", "\0").replace("<|im_start|>", "\0").split("\0")
    assert status.prefilled == controls + sum(len(tokenizer.encode(part)) for part in plain)
    assert status.turns_recomputed == 0
    assert status.dropped == prefix_status.dropped == 0  # nothing left the context for good
    assert status.resident == final.resident + status.prefilled


def test_sampled_ids_stand_even_where_tokenizing_their_text_gives_others() -> None:
    harness = chatting()
    bias = harness.engine.bias
    bias[:] = -100.0
    bias[ord("h")] = bias[ord("e")] = bias[ord("t")] = 0.0  # "the" is then never one token
    first = FakeOp()
    harness.turn(chat(SYSTEM), chat(ASK), options(200), op=first, turn_id="t")
    assert harness.engine.tokenizer.encode(first.text) != first.ids
    op = FakeOp()
    harness.turn(chat(SYSTEM), chat(ASK, ("assistant", first.text), ASK), options(1), op=op)
    status = statuses(op)[1]
    assert status.turns_recomputed == 0
    assert status.reused >= 199


def test_answer_of_a_cancelled_decode_is_kept() -> None:
    harness = chatting()
    first = FakeOp(cancel_at=20)
    final = harness.turn(chat(SYSTEM), chat(ASK), options(60), op=first, turn_id="t")
    assert final.stop_reason == "cancelled"
    assert 0 < final.tokens < 20
    assert harness.explain().turn_ids == ["t"]
    op = FakeOp()
    harness.turn(chat(SYSTEM), chat(ASK, turn_ref("t"), ASK), options(1), op=op)
    assert statuses(op)[1].dropped == 0


def test_only_the_latest_turns_are_kept() -> None:
    harness = Harness()
    harness.open()
    for index in range(260):
        harness.turn(raw("one\n"), raw("two\n"), options(1), turn_id=f"t{index}")
    kept = harness.explain().turn_ids
    assert (len(kept), kept[0], kept[-1]) == (256, "t4", "t259")


# --- cancelling and credit ------------------------------------------------------------------------


def test_turn_cancelled_in_its_prefix_says_what_is_there() -> None:
    harness = Harness()
    harness.open()
    op = FakeOp(cancel_at=1)
    final = harness.turn(raw("a long enough prefix\n"), raw("two\n"), op=op)
    assert (final.stop_reason, final.tokens, final.resident) == ("cancelled", 0, 8)
    (status,) = op.of(Status)
    assert (status.part, status.prefilled, status.resident) == ("prefix", 8, 8)
    again = FakeOp()
    harness.turn(raw("a long enough prefix\n"), raw("two\n"), op=again)
    assert statuses(again)[0].reused == 8
    assert again.ids == harness.fresh_answer(raw("a long enough prefix\n"), raw("two\n"))[1]


def test_decode_stops_within_a_token_of_a_cancel() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    op = FakeOp(cancel_at=6)
    final = harness.decode(options(0), op=op)
    assert final.stop_reason == "cancelled"
    assert final.resident == 4 + 3
    assert harness.engine.evaluated == 7


def test_without_credit_the_answer_waits_and_a_cancel_ends_it_intact() -> None:
    harness = Harness()
    harness.open()
    op = FakeOp(credit=2)
    final = harness.turn(raw("one\n"), raw("two\n"), options(60), op=op)
    assert final.stop_reason == "cancelled"
    assert len(op.of(ChunkOut)) == 2
    assert final.tokens <= 1 + 8 + 8
    assert harness.explain().resident == final.resident == 8 + final.tokens - 1
    rest = FakeOp()
    harness.decode(options(60 - final.tokens), op=rest)
    whole = harness.fresh_answer(raw("one\n"), raw("two\n"), options(60))
    assert whole[0].endswith(rest.text)
    assert whole[0].startswith(op.text)


def test_progress_is_counted_while_working() -> None:
    harness = Harness()
    harness.open()
    op = FakeOp()
    harness.turn(raw("x" * 64), raw("two\n"), options(10), op=op)
    assert op.beats >= 8 + 10


# --- sampling -------------------------------------------------------------------------------------


def test_seed_decides_and_is_reported() -> None:
    harness = Harness()
    harness.open()
    answers = []
    for seed in (7, 7, 8):
        op = FakeOp()
        final = harness.turn(
            raw("one\n"), raw("two\n"), options(20, temperature=1.0, seed=seed), op=op
        )
        assert final.seed == seed
        answers.append(op.ids)
    assert answers[0] == answers[1] != answers[2]


def test_penalties_look_back_on_the_prompt() -> None:
    harness = Harness()
    harness.open()
    op = FakeOp()
    penalised = options(1, presence_penalty=900.0, repeat_last_n=-1)
    letters = "".join(chr(code) for code in range(32, 127) if chr(code) not in "\nq")
    harness.engine.bias[256:] = -1e3
    harness.turn(raw(letters), raw(), penalised, op=op)
    assert op.text == "q"


def test_logprobs_are_of_the_raw_logits_and_ordered() -> None:
    harness = Harness()
    harness.open()
    op = FakeOp()
    harness.turn(raw("one\n"), raw("two\n"), options(6, top_logprobs=3), op=op)
    sampled = [entry for chunk in op.of(ChunkOut) for entry in chunk.logprobs]
    assert [entry.sampled.token_id for entry in sampled] == op.ids
    for entry in sampled:
        assert len(entry.top) == 3
        assert entry.top[0] == entry.sampled  # greedy
        values = [best.logprob for best in entry.top]
        assert values == sorted(values, reverse=True)
        assert values[0] < 0
    assert b"".join(entry.sampled.raw for entry in sampled).decode() == op.text


def test_banning_every_token_is_refused_and_leaves_the_session_exact() -> None:
    harness = Harness()
    harness.open()
    size = harness.engine.tokenizer.vocab_size
    with pytest.raises(InvalidRequest):
        harness.turn(
            raw("one\n"), raw("two\n"), options(1, logit_bias=dict.fromkeys(range(size), -math.inf))
        )
    assert harness.explain().resident == 8
    assert isinstance(harness.decode(options(1)), FinalOut)


def test_logits_that_arent_numbers_end_the_session() -> None:
    harness = Harness()
    harness.open()
    harness.engine.bias[:] = math.nan
    with pytest.raises(SessionFatal):
        harness.turn(raw("one\n"), raw("two\n"))
    with pytest.raises(SessionFatal):
        harness.explain()


def test_engine_failure_while_decoding_ends_the_session() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    harness.engine.fail_after = 3
    with pytest.raises(SessionFatal):
        harness.decode(options(10))
    with pytest.raises(SessionFatal):
        harness.ensure(raw("one\n"))
    assert harness.engine.cells == 0


def test_text_is_that_of_the_sampled_bytes_whatever_the_chunks() -> None:
    harness = Harness()
    harness.open()
    bias = harness.engine.bias
    bias[:] = -100.0
    bias[0xC3] = bias[0xA9] = 0.0
    op = FakeOp()
    asked = options(30)
    asked.stream_interval_ms = 0
    harness.turn(raw("one\n"), raw("two\n"), asked, op=op)
    assert any(not chunk.text for chunk in op.of(ChunkOut))  # half a character is held back
    pieces = [harness.engine.tokenizer.piece(token) for token in op.ids]
    assert op.text == b"".join(pieces).decode(errors="replace")
    assert "é" in op.text
