"""Sessions of the batched layout: what advances together, in which order, and what stays apart."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from modeld.shared.errors import SessionFatal
from modeld.shared.messages import (
    CloseOp,
    CloseResult,
    ExplainOp,
    ExplainResult,
    ForkOp,
    ForkResult,
    OpenResult,
    Status,
    TokenizeOp,
    TokenizeResult,
    UnloadOp,
)
from modeld.workers.batching import CHUNK_TOKENS
from tests.support.batch_rig import BatchingFake, FakeBatch, Rig
from tests.support.core_harness import Harness, options, raw
from tests.support.fake_engine import FakeEngine

TEXTS = {
    "a": "hello world, said the first",
    "b": "the second " * 9,
    "c": "a third one that is longer " * 6,
    "d": "4",
}


def rig(*sessions: str, joins: bool = False) -> Rig:
    """``joins``: the engine evaluates several prompts at once."""
    engine = BatchingFake()
    engine.joins = joins
    made = Rig(engine)
    made.open(*sessions)
    engine_of(made).log.clear()
    return made


def engine_of(made: Rig) -> BatchingFake:
    assert isinstance(made.engine, BatchingFake)
    return made.engine


def alone(text: str, tokens: int = 12) -> list[int]:
    """What a session with a context of its own answers."""
    harness = Harness(FakeEngine(micro_batch=16))
    return harness.fresh_answer(raw(), raw(text), options(tokens))[1]


def at_batch(made: Rig, number: int, act: Callable[[], None]) -> None:
    """Do it in the engine batch of this number, counted from 1."""

    def between(batch: FakeBatch) -> None:
        if len(engine_of(made).log) == number:
            act()

    engine_of(made).between = between


def test_answers_advance_together_and_are_what_each_session_alone_would_answer() -> None:
    made = rig("a", "b", "c", "d")
    turns = {session: made.send_turn(session, TEXTS[session], 30) for session in "abcd"}
    made.run()
    for session, op_id in turns.items():
        assert made.ids(op_id) == alone(TEXTS[session], 30)
        assert made.final(op_id).stop_reason == "length"
    # Of the 29 tokens that each has evaluated, all but those while the others' prompts came.
    assert engine_of(made).together.count(4) >= 20


def test_a_long_prompt_comes_in_chunks_with_a_token_of_the_others_after_each() -> None:
    made = rig("a", "b")
    first = made.send_turn("a", "short", 40)
    second = made.send_turn("b", "a long prompt " * 60)
    made.run()
    log = engine_of(made).log
    chunks = [at for at, batch in enumerate(log) if batch[0][1] > 1 and batch[0][0] == 1]
    sizes = [log[at][0][1] for at in chunks]
    assert len(sizes) > 5
    assert max(sizes) == CHUNK_TOKENS
    assert min(sizes) > 1  # no token of a prompt alone
    between = {right - left for left, right in pairwise(chunks)}
    assert between == {2}  # one batch of sampled tokens between any two chunks
    assert made.ids(first) == alone("short", 40)
    assert made.ids(second) == alone("a long prompt " * 60)


def test_a_prompt_alone_is_not_cut_into_small_chunks() -> None:
    made = rig("a")
    made.send_turn("a", "a long prompt " * 60, 1)
    made.run()
    assert engine_of(made).log[0][0][1] == 512


def test_prompts_take_turns() -> None:
    made = rig("a", "b", "c")
    for session in "abc":
        made.send_turn(session, f"{session} long prompt " * 30, 1)
    made.run()
    order = [batch[0][0] for batch in engine_of(made).log]
    assert order[:9] == [0, 1, 2] * 3


@pytest.mark.parametrize(("length", "at_once"), [(16, 4), (17, 3), (30, 2), (40, 1)])
def test_short_prompts_share_a_chunk(length: int, at_once: int) -> None:
    made = rig(*"abcd")
    turns = {name: made.send_turn(name, name * length, 9) for name in "abcd"}
    made.run()
    sizes = [[count for _, count in batch] for batch in engine_of(made).log]
    assert sizes[: at_once + 1] == [[length]] * at_once + [[1] * at_once]
    for name, op_id in turns.items():
        assert made.ids(op_id) == alone(name * length, 9)


def test_prompts_go_together_where_the_engine_gains_by_it_and_nobody_waits_for_a_token() -> None:
    made = rig(*"abc", joins=True)
    turns = {name: made.send_turn(name, name * 100, 9) for name in "abc"}
    made.run()
    log = engine_of(made).log
    assert log[0] == [(0, 64), (1, 64), (2, 64)]
    assert log[1] == [(0, 36), (1, 36), (2, 36)]
    assert {len(batch) for batch in log[2:]} == {3}
    for name, op_id in turns.items():
        assert made.ids(op_id) == alone(name * 100, 9)


def test_prompts_beside_an_answer_share_one_chunk() -> None:
    made = rig(*"abcd", joins=True)
    first = made.send_turn("a", "a" * 10, 40)
    late: list[int] = []

    def come() -> None:
        late.extend(made.send_turn(name, name * 30, 9) for name in "bcd")

    at_batch(made, 5, come)
    made.run()
    log = engine_of(made).log
    prompts = [batch for batch in log[1:] if batch[0][1] > 1]
    assert prompts == [[(1, 30), (2, 30)], [(3, 30)]]
    assert made.ids(first) == alone("a" * 10, 40)
    for name, op_id in zip("bcd", late, strict=True):
        assert made.ids(op_id) == alone(name * 30, 9)


def test_what_was_made_is_on_its_way_before_the_engine_goes_on() -> None:
    made = rig("a", "b")
    held: list[int] = []
    engine_of(made).between = lambda batch: held.append(made.out.held)
    made.send_turn("a", TEXTS["a"])
    made.send_turn("b", TEXTS["c"])
    made.run()
    assert len(held) == len(engine_of(made).log) > 12
    assert not any(held)


def test_a_reader_who_takes_nothing_stops_nobody_else() -> None:
    made = rig("a", "b", "c")
    stalled = made.send_turn("a", TEXTS["a"], credit=2)
    others = [made.send_turn(session, TEXTS[session], 30) for session in "bc"]

    def when_the_others_are_done(op_id: int) -> None:
        if set(others) <= set(made.ended):
            made.operations[stalled - 1].grant(100)

    made.on_end = when_the_others_are_done
    made.run()
    assert made.ended[-1] == stalled
    for session, op_id in zip("bc", others, strict=True):
        assert made.ids(op_id) == alone(TEXTS[session], 30)
    assert made.ids(stalled) == alone(TEXTS["a"])


def test_a_reader_who_takes_nothing_can_be_cancelled() -> None:
    made = rig("a", "b")
    stalled = made.send_turn("a", TEXTS["a"], credit=1)
    made.send_turn("b", TEXTS["b"])
    made.on_end = lambda op_id: made.operations[stalled - 1].cancel()
    made.run()
    assert made.final(stalled).stop_reason == "cancelled"
    made.on_end = lambda op_id: None
    again = made.send_turn("a", TEXTS["a"])
    made.run()
    assert made.ids(again) == alone(TEXTS["a"])


@pytest.mark.parametrize("batch", [2, 5, 9])
def test_a_cancelled_answer_ends_at_its_next_token_and_disturbs_nobody(batch: int) -> None:
    made = rig("a", "b", "c")
    turns = {session: made.send_turn(session, TEXTS[session], 20) for session in "abc"}
    at_batch(made, batch, made.operations[turns["b"] - 1].cancel)
    made.run()
    final = made.final(turns["b"])
    assert final.stop_reason == "cancelled"
    assert final.tokens < 20
    for session in "ac":
        assert made.ids(turns[session]) == alone(TEXTS[session], 20)
    explained = made.do(ExplainOp(session_id="b"))
    assert isinstance(explained, ExplainResult)
    assert explained.resident == final.resident
    again = made.send_turn("b", TEXTS["b"], 20)
    made.run()
    assert made.ids(again) == alone(TEXTS["b"], 20)


def test_a_prompt_that_waits_for_its_turn_is_cancelled_without_the_engine() -> None:
    made = rig("a", "b")
    made.send_turn("a", "a long prompt " * 60, 1)
    waiting = made.send_turn("b", "another long prompt " * 30, 1)
    at_batch(made, 1, made.operations[waiting - 1].cancel)
    made.run()
    assert made.ended[-2] == waiting
    assert made.final(waiting).resident == 0
    assert not [batch for batch in engine_of(made).log if batch[0][0] == 1]


def test_an_engine_error_in_a_batch_ends_every_session_in_it_and_a_new_batch_serves_again() -> None:
    made = rig("a", "b", "c")
    turns = [made.send_turn(session, TEXTS[session], 20) for session in "ab"]

    def fail() -> None:
        raise SessionFatal("decode answered -3", metadata={"cause": "engine", "code": -3})

    at_batch(made, 6, fail)
    made.run()
    for op_id in turns:
        error = made.error(op_id)
        assert (error.reason, error.metadata["code"]) == ("SESSION_FATAL", "-3")
    idle = made.send_turn("c", TEXTS["c"])  # its KV was in the same context
    made.run()
    assert made.error(idle).reason == "SESSION_FATAL"
    assert engine_of(made).batches[0].closed
    made.open("e")
    turn = made.send_turn("e", TEXTS["a"])
    made.run()
    assert made.ids(turn) == alone(TEXTS["a"])
    assert len(engine_of(made).batches) == 2


def test_what_no_batch_foresaw_ends_its_sessions_too_and_keeps_its_words_to_itself() -> None:
    made = rig("a", "b")
    turns = [made.send_turn(session, TEXTS[session], 20) for session in "ab"]

    def fail() -> None:
        raise KeyError("a prompt's text")

    at_batch(made, 6, fail)
    made.run()
    for op_id in turns:
        assert made.error(op_id).reason == "SESSION_FATAL"
        assert "prompt" not in made.error(op_id).message


def test_a_prompt_too_long_is_refused_for_its_session_only() -> None:
    made = rig("a", "b")
    turn = made.send_turn("a", TEXTS["a"], 30)
    refused = made.send_turn("b", "x y " * 600)
    made.run()
    assert made.error(refused).reason == "CONTEXT_OVERFLOW"
    assert made.ids(turn) == alone(TEXTS["a"], 30)
    after = made.send_turn("b", TEXTS["b"])
    made.run()
    assert made.ids(after) == alone(TEXTS["b"])


def test_a_full_window_or_a_stop_sequence_ends_one_answer_and_no_other() -> None:
    made = Rig(BatchingFake())
    made.open("a", "b", "c", window=64)
    full = made.send_turn("a", "x" * 50, 200)
    harness = Harness(FakeEngine(micro_batch=16))
    text = harness.fresh_answer(raw(), raw("stop here"), options(12))[0]
    stop = text[3:5]
    stopped = made.send_turn("b", "stop here", how=options(12, stop=[stop]))
    going = made.send_turn("c", "goes on", 40)
    made.run()
    assert made.final(full).stop_reason == "context_full"
    assert made.final(full).resident == 64
    assert made.final(stopped).stop_reason == "stop_sequence"
    assert made.ids(going) == alone("goes on", 40)


def test_one_session_s_operations_keep_their_order_while_others_go_on() -> None:
    made = rig("a", "b")
    turn = made.send_turn("a", TEXTS["a"], 20)
    explain = made.send(ExplainOp(session_id="a"))
    close = made.send(CloseOp(session_id="a"))
    other = made.send_turn("b", TEXTS["b"], 40)
    made.run()
    assert made.ended[-4:] == [turn, explain, close, other]
    explained = made.end(explain)
    assert isinstance(explained, ExplainResult)
    assert explained.resident == made.final(turn).resident
    closed = made.end(close)
    assert isinstance(closed, CloseResult)
    assert closed.retained == explained.resident


def test_questions_and_new_sessions_are_answered_while_turns_run() -> None:
    made = rig("a")
    turn = made.send_turn("a", TEXTS["a"], 40)
    asked: list[int] = []

    def ask() -> None:
        asked.extend(
            [
                made.send(TokenizeOp(text="the", add_bos=False, parse_special=False)),
                made.send_open("b"),
            ]
        )

    at_batch(made, 5, ask)
    made.run()
    tokenized, opened = (made.end(op_id) for op_id in asked)
    assert isinstance(tokenized, TokenizeResult)
    assert isinstance(opened, OpenResult)
    assert made.ended[-3:] == [*asked, turn]


def test_what_must_run_alone_waits_for_the_others_and_is_not_overtaken() -> None:
    made = rig("a", "b")
    first = made.send_turn("a", TEXTS["a"], 30)
    unload = made.send(UnloadOp())
    late = made.send_turn("b", TEXTS["b"], 5)
    made.run()
    assert made.ended[-3:] == [first, unload, late]
    assert made.ids(first) == alone(TEXTS["a"], 30)
    assert made.error(late).reason == "MODEL_NOT_ACTIVE"


def test_isolated_sessions_are_served_beside_as_before() -> None:
    made = rig("a")
    made.open("own", layout="isolated")
    first = made.send_turn("a", TEXTS["a"], 20)
    own = made.send_turn("own", TEXTS["b"], 20)
    second = made.send_turn("a", TEXTS["a"], 20)
    made.run()
    assert made.ended[-3:] == [first, own, second]
    assert made.ids(own) == alone(TEXTS["b"], 20)


def test_no_free_stream_is_refused_with_the_numbers_until_one_is_closed() -> None:
    made = rig("a", "b", "c", "d")
    turn = made.send_turn("a", TEXTS["a"] * 3)
    fifth = made.send_open("e")
    made.run()
    error = made.error(fifth)
    assert error.reason == "INSUFFICIENT_MEMORY"
    assert (error.metadata["streams"], error.metadata["streams_in_use"]) == ("4", "4")
    resident = made.final(turn).resident
    made.do(CloseOp(session_id="a"))
    made.open("e")
    again = made.send_turn("e", TEXTS["a"] * 3)
    made.run()
    status = next(p for op, k, p in made.frames if op == again and isinstance(p, Status))
    assert status.part == "prefix"
    reused = [p.reused for op, k, p in made.frames if op == again and isinstance(p, Status)]
    assert sum(reused) >= len(TEXTS["a"])  # what the closed session left in its stream
    assert made.final(again).resident == resident
    assert made.ids(again) == made.ids(turn)


def test_a_window_that_no_stream_has_is_refused_while_streams_are_in_use() -> None:
    made = rig("a")
    larger = made.send_open("b", window=2048)
    made.run()
    assert made.error(larger).metadata["stream_window"] == "1024"
    made.do(CloseOp(session_id="a"))
    made.open("b", window=2048)  # in the place of streams that nobody uses
    assert [batch.window for batch in engine_of(made).batches] == [1024, 2048]
    assert engine_of(made).batches[0].closed


def test_a_prefix_that_another_stream_holds_is_copied_and_a_fork_goes_its_own_way() -> None:
    made = rig("a", "b")
    first = made.send_turn("a", TEXTS["c"])
    made.run()
    second = made.send_turn("b", TEXTS["c"])
    fork = made.send(ForkOp(session_id="a", new_session_id="f"))
    made.run()
    assert engine_of(made).copied >= len(TEXTS["c"]) // 8
    assert made.ids(second) == made.ids(first) == alone(TEXTS["c"])
    forked = made.end(fork)
    assert isinstance(forked, ForkResult)
    assert forked.copied == made.final(first).resident
    turns = [made.send_turn(session, f"{TEXTS['c']} and {session}") for session in "af"]
    made.run()
    for session, op_id in zip("af", turns, strict=True):
        assert made.ids(op_id) == alone(f"{TEXTS['c']} and {session}")


def test_heartbeats_name_a_running_operation_as_long_as_one_runs() -> None:
    made = rig("a", "b")
    busy: list[int] = []
    engine_of(made).between = lambda batch: busy.append(made.pulse.busy_op)
    first, second = made.send_turn("a", TEXTS["a"], 5), made.send_turn("b", TEXTS["b"], 20)
    progress = made.pulse.progress
    made.run()
    assert busy == sorted(busy)
    assert set(busy) == {first, second}
    assert made.pulse.progress - progress >= 25


@pytest.mark.parametrize(
    ("layout", "streams", "field"), [("shared", 4, "layout"), ("batched", 0, "streams")]
)
def test_a_layout_that_is_none_is_refused_by_name(layout: str, streams: int, field: str) -> None:
    made = Rig(BatchingFake())
    refused = made.send_open("a", layout=layout, streams=streams)
    made.run()
    assert made.error(refused).reason == "INVALID_REQUEST"
    assert made.error(refused).metadata["field"] == field


def test_an_engine_without_batches_refuses_the_layout_by_capability() -> None:
    made = Rig(FakeEngine())
    refused = made.send_open("a")
    made.run()
    assert made.error(refused).reason == "UNSUPPORTED_FEATURE"
    assert made.error(refused).metadata["capability"] == "layout.batched"
