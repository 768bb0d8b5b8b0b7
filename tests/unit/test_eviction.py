"""A conversation that outgrows its window goes on, and every number says what became of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modeld.shared.errors import (
    ContextOverflow,
    InvalidRequest,
    SessionFatal,
    UnsupportedFeature,
)
from modeld.shared.messages import (
    ExplainResult,
    FinalOut,
    OpenOp,
    ParkOp,
    ResumeOp,
    ResumeResult,
    Status,
)
from modeld.workers.sampling import Sampler
from modeld.workers.state_file import token_chains
from tests.support.core_harness import FakeOp, chat, options, raw, turn_ref
from tests.support.evicting import Evicting, numbered, pinned, segments
from tests.support.fake_engine import FakeContext, FakeEngine
from tests.support.residency import fork, trim

WINDOW, SINK, RECENT, BLOCK = 1024, 256, 256, 256


@pytest.fixture
def h() -> Evicting:
    made = Evicting(max_contexts=2)
    made.open_evicting()
    return made


def streamed(
    h: Evicting, tape: list[int], count: int, compact: list[int] | None = None
) -> list[int]:
    """What greedy decoding gives under the policy, worked out step by step from ``tape``."""
    tape = list(tape)
    fresh = h.fresh_context(tape if compact is None else compact)
    answer: list[int] = []
    while len(answer) < count:
        answer.append(int(np.argmax(fresh.logits())))
        tape.append(answer[-1])
        if len(fresh.tokens) == WINDOW:
            fresh = h.fresh_context(tape[:SINK] + tape[-RECENT:])
        else:
            fresh.step(answer[-1], len(fresh.tokens))
    return answer


def bytes_of(h: Evicting, ids: list[int]) -> str:
    return b"".join(map(h.engine.tokenizer.piece, ids)).decode()


def told(result: Status | FinalOut | ExplainResult) -> tuple[int, int, int]:
    return result.resident, result.parked, result.gone


# --- opening -----------------------------------------------------------------------------------


def test_a_window_below_four_blocks_and_an_unknown_overflow_are_refused(h: Evicting) -> None:
    with pytest.raises(InvalidRequest) as refused:
        h.open_evicting("b", window=1023)
    assert refused.value.metadata["field"] == "window"
    op = OpenOp(session_id="b", prompt_format="raw", window=1024, k_type="f16", v_type="f16",
                kv_digest="kv", runtime_digest="rt", overflow="drop")  # fmt: skip
    with pytest.raises(InvalidRequest):
        h.run(op)


def test_a_model_that_cannot_says_so_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    load = engine.load

    def without(*args: Any) -> Any:
        result = load(*args)
        result.capabilities = {"overflow.evict": "no: its cache is its own"}
        return result

    monkeypatch.setattr(engine, "load", without)
    with pytest.raises(UnsupportedFeature) as refused:
        Evicting(engine).open_evicting()
    assert refused.value.metadata["capability"] == "overflow.evict"
    assert "its cache is its own" in refused.value.message


# --- decoding ----------------------------------------------------------------------------------


def test_ten_windows_are_decoded_without_a_stop_and_each_token_is_the_policy_s(
    h: Evicting,
) -> None:
    op = FakeOp()
    prompt = list(numbered(700).encode())
    final = h.turn(raw(), raw(numbered(700)), options(9_500), op=op)
    assert final.stop_reason == "length"
    assert op.ids == streamed(h, prompt, 9_500)
    tape = prompt + op.ids
    assert h.hot(tape) == h.held() == h.held()[: final.resident]
    # 768 tokens go out whenever the window is full: 324 tokens on, then every 512 evaluated.
    rounds = 1 + (9_500 - 324 - 1) // 512
    assert final.recomputed == rounds * (RECENT - 1)
    assert final.parked + final.gone + final.resident == len(tape) - 1
    assert final.gone == 0
    assert final.seen_tokens == len(tape)
    assert final.resident + final.available == WINDOW
    h.check_records()


def test_decoding_on_after_each_stop_gives_the_same_as_one_decode(h: Evicting) -> None:
    prompt = list(numbered(1000).encode())
    h.suffix(raw(numbered(1000)))
    ids: list[int] = []
    for count in (24, 1, 1, 200, 300, 511, 1, 400):
        op = FakeOp()
        final = h.decode(options(count), op=op)
        assert (final.stop_reason, len(op.ids)) == ("length", count)
        ids += op.ids
    assert ids == streamed(h, prompt, len(ids))
    assert final.seen_tokens == 1000 + len(ids)


def test_what_went_out_is_parked_or_gone_and_explained_by_class(h: Evicting) -> None:
    prompt = segments(pinned(numbered(300)), numbered(600, 50))
    h.turn(prompt, raw("?"), options(400))
    told_ = h.explain()
    shown = [(b.begin, b.end, b.state, b.cls, b.what, b.protected) for b in told_.blocks]
    end = 901 + 400  # once evicted, with the token that the window had no room for
    assert shown == [
        (0, 300, "hot", "pinned", "prefix", True),
        (300, 769, "parked", "volatile", "prefix", False),
        (769, 900, "hot", "volatile", "prefix", False),
        (900, 901, "hot", "volatile", "suffix", False),
        (901, end - RECENT, "hot", "volatile", "generated", False),
        (end - RECENT, end - 1, "hot", "recent", "generated", True),
    ]
    assert told(told_) == (end - 1 - 469, 469, 0)


def test_a_block_that_the_cold_store_lost_is_gone_and_the_others_are_parked(h: Evicting) -> None:
    final = h.turn(raw(), raw(numbered(1000)), options(100))
    assert (final.parked, final.gone) == (1025 - SINK - RECENT, 0)
    keys = token_chains("kv", np.array(h.session().conversation()[:1024], np.int32), [512, 768])
    assert h.core.model.parking is not None
    h.core.model.parking.store.remove(keys[1])
    told_ = h.explain()
    assert (told_.parked, told_.gone) == (1025 - SINK - RECENT - BLOCK, BLOCK)
    shown = [(b.begin, b.end, b.state) for b in told_.blocks if b.state != "hot"]
    assert shown == [(256, 512, "parked"), (512, 768, "gone"), (768, 769, "parked")]


def test_what_went_out_of_a_discarded_session_is_forgotten() -> None:
    h = Evicting()
    h.open_evicting()
    final = h.turn(raw(), raw(numbered(1000)), options(100))
    assert final.parked > 0
    assert h.core.cold_bytes > 0
    h.close(discard=True)
    assert h.core.cold_bytes == 0


def test_without_a_cold_store_what_went_out_is_gone() -> None:
    h = Evicting(cold_bytes=0)
    h.open_evicting()
    final = h.turn(raw(), raw(numbered(1000)), options(100))
    assert (final.parked, final.gone) == (0, 1025 - SINK - RECENT)
    assert {b.state for b in h.explain().blocks} == {"hot", "gone"}


def test_a_memory_that_cannot_go_back_evaluates_all_that_stays() -> None:
    h = Evicting(FakeEngine(micro_batch=64, end_bias=-100.0, trimmable=False, ranges=False))
    h.open_evicting()
    op = FakeOp()
    prompt = list(numbered(1000).encode())
    final = h.turn(raw(), raw(numbered(1000)), options(700), op=op)
    assert op.ids == streamed(h, prompt, 700)
    assert final.recomputed == 2 * (SINK + RECENT - 1)
    h.check_records()


def test_an_answer_whose_pins_leave_no_room_ends_as_full(h: Evicting) -> None:
    h.suffix(segments(numbered(256), pinned(numbered(300, 200)), numbered(400, 400)))
    final = h.decode(options(500))
    assert final.stop_reason == "context_full"
    assert final.resident == WINDOW
    again = h.decode(options(5))
    assert (again.stop_reason, again.tokens) == ("context_full", 0)
    h.check_records()


# --- prompts -----------------------------------------------------------------------------------


def test_a_prompt_of_five_windows_is_read_whole_and_its_end_attended(h: Evicting) -> None:
    text = numbered(5500)
    status = h.suffix(raw(text))
    tape = list(text.encode())
    # A window of 1,024, then chunks of 768 behind the head.
    attended = tape[:SINK] + tape[1024 + 5 * 768 :]
    assert h.held() == h.hot(tape) == attended
    assert (status.prefilled, status.recomputed, status.reused) == (5500, 0, 0)
    assert told(status) == (len(attended), 5500 - len(attended), 0)
    assert status.seen_tokens == 5500 == h.engine.evaluated
    op = FakeOp()
    h.decode(options(2), op=op)
    assert op.ids == streamed(h, tape, 2, attended)


def test_a_short_rest_of_a_long_prompt_takes_what_is_recent_with_it(h: Evicting) -> None:
    tape = list(numbered(1100).encode())
    status = h.suffix(raw(numbered(1100)))
    assert h.held() == tape[:SINK] + tape[-RECENT:]
    assert status.prefilled == 1024 + RECENT
    assert status.recomputed == 1024 - (1100 - RECENT)
    assert status.seen_tokens == 1100


def test_a_conversation_whose_end_fits_evicts_once_and_then_reads_the_news(h: Evicting) -> None:
    tape = list(numbered(900).encode())
    h.suffix(raw(numbered(900)))
    status = h.suffix(raw(numbered(900), "-" * 200))
    tape += b"-" * 200
    assert h.held() == tape[:SINK] + tape[-RECENT:]
    assert (status.reused, status.prefilled, status.recomputed) == (SINK, RECENT, RECENT - 200)
    assert status.dropped == 900 - 256 - (RECENT - 200)
    assert status.miss_reason == "EXTENDED"
    assert told(status) == (512, 588, 0)


def test_a_conversation_by_turns_never_overflows_and_each_turn_costs_its_news(h: Evicting) -> None:
    h.open_evicting("c", prompt_format="chat")
    history: list[Any] = []
    costs = []
    for turn in range(40):
        history.append(("user", f"<{turn:02d}>" + "." * 60))
        before = h.engine.evaluated
        final = h.turn(chat(), chat(*history), options(30), "c", turn_id=f"t{turn}")
        assert final.stop_reason == "length"
        history.append(turn_ref(f"t{turn}"))
        costs.append(h.engine.evaluated - before)
        tape = h.session("c").conversation()
        assert h.held("c") == h.hot(tape, "c")
        assert final.resident + final.parked + final.gone == len(tape) - 1
    assert final.seen_tokens == len(tape)
    assert max(costs) < 100 + 30 + RECENT
    # In parts it is the same: ensuring a prefix doesn't make the rest forgotten.
    h.ensure(chat(*history[:2]), "c")
    before = h.engine.evaluated
    status = h.suffix(chat(*history[2:], ("user", "!")), "c")
    assert h.engine.evaluated - before < 50
    assert status.recomputed == 0
    assert status.parked > 1000


def test_a_prefix_longer_than_the_head_comes_back_from_the_cold_store(h: Evicting) -> None:
    history = numbered(3000)
    h.turn(raw(history[:600]), raw(history[600:]), options(2))
    h.ensure(raw(history[:600]))
    assert h.held() == list(history[:600].encode())
    before = h.engine.evaluated
    status = h.suffix(raw(history[600:], "!"))
    assert status.restored > 0
    assert h.engine.evaluated - before < BLOCK
    assert status.parked + status.gone > 1500


def test_another_prompt_forgets_what_went_out(h: Evicting) -> None:
    h.turn(raw(), raw(numbered(3000)), options(2))
    status = h.suffix(raw(numbered(100), "zzzzzzz"))
    assert told(status) == (107, 0, 0)
    status = h.suffix(raw(numbered(100), "z" * 3000))
    assert status.parked + status.gone + status.resident == 3100
    assert h.held() == h.hot(list((numbered(100) + "z" * 3000).encode()))


def test_a_prompt_rolled_back_to_where_it_fits_is_attended_whole(h: Evicting) -> None:
    text = numbered(2000)
    h.suffix(raw(text))
    status = h.suffix(raw(text[:900]))
    assert told(status) == (900, 0, 0)
    assert status.restored + status.prefilled >= 600
    assert h.held() == list(text[:900].encode())


def test_what_is_recent_is_attended_where_a_prompt_ends_within_what_went_out(h: Evicting) -> None:
    text = numbered(4000)
    h.suffix(raw(text))
    status = h.suffix(raw(text[:2500]))
    tape = list(text[:2500].encode())
    assert h.held() == tape[:SINK] + tape[-RECENT:]
    assert status.seen_tokens == 4000
    assert status.recomputed + status.restored == RECENT


def test_chat_messages_keep_their_system_message_and_their_answers_by_id() -> None:
    h = Evicting()
    h.open_evicting(prompt_format="chat")
    system = chat(("system", "You are " + "careful " * 45))
    system.segments[0].cache_class = "task_pinned"
    messages: list[Any] = []
    for turn in range(12):
        messages.append(("user", f"question {turn} " + "x" * 100))
        op = FakeOp()
        final = h.turn(system, chat(*messages), options(60), op=op, turn_id=f"t{turn}")
        assert final.stop_reason == "length"
        assert op.of(Status)[-1].turns_recomputed == 0
        messages.append(turn_ref(f"t{turn}"))
    first = h.explain().blocks[0]
    assert (first.begin, first.state, first.cls) == (0, "hot", "pinned")
    assert first.end >= 360
    assert final.parked > 500


def test_what_is_pinned_only_later_comes_back(h: Evicting) -> None:
    parts = (numbered(300), numbered(100, 50), numbered(3000, 100))
    h.suffix(segments(*parts))
    assert not [b for b in h.explain().blocks if b.begin <= 350 < b.end and b.state == "hot"]
    status = h.suffix(segments(parts[0], pinned(parts[1]), parts[2]))
    (block,) = [b for b in h.explain().blocks if b.cls == "pinned"]
    assert (block.begin, block.end, block.state) == (300, 400, "hot")
    assert h.held() == h.hot(list("".join(parts).encode()))
    assert status.recomputed >= 100


# --- beside the other things that a session can do -----------------------------------------------


def test_a_branch_goes_on_by_itself_from_what_is_attended(h: Evicting) -> None:
    h.suffix(raw(numbered(3000)))
    h.decode(options(5))
    before = h.explain()
    fork(h, "a", "b")
    tape, attended = h.session().conversation(), h.session().known_tokens()
    ids = {}
    for name in ("b", "a"):
        op = FakeOp()
        h.decode(options(900), name, op)
        ids[name] = op.ids
    assert ids["a"] == ids["b"] == streamed(h, tape, 900, attended)
    for name in ("a", "b"):
        assert h.held(name) == h.hot(tape + ids[name], name)
        assert h.explain(name).parked > before.parked


def test_a_session_that_was_parked_or_trimmed_evaluates_what_it_lost(h: Evicting) -> None:
    h.suffix(raw(numbered(3000)))
    h.decode(options(5))
    tape, attended = h.session().conversation(), h.held()
    trim(h, 300)
    assert h.held() == attended[:300]
    op = FakeOp()
    h.decode(options(1), op=op)
    assert op.ids == [int(np.argmax(h.logits_after([*attended, tape[-1]])))]
    held = h.held()
    h.run(ParkOp(session_id="a"))
    resumed = h.run(ResumeOp(session_id="a"))
    assert isinstance(resumed, ResumeResult)
    assert (resumed.resident, resumed.missing) == (len(held), 0)
    assert h.held() == held == h.hot(h.session().conversation())


# --- what can't be -----------------------------------------------------------------------------


def test_pins_that_leave_no_room_are_refused_and_change_nothing(h: Evicting) -> None:
    h.turn(raw(), raw(numbered(3000)), options(20))
    before = h.explain()
    prompt = segments(numbered(300), pinned(numbered(257, 50)), numbered(3000, 100))
    with pytest.raises(ContextOverflow) as refused:
        h.suffix(prompt)
    error = refused.value
    assert error.metadata["pinned"] == "257"
    assert error.metadata["drop_tokens"] == "1"
    assert error.metadata["requested_tokens"] == "3557"
    assert "Pin 1 tokens less" in error.message
    assert h.explain() == before
    status = h.suffix(segments(numbered(300), pinned(numbered(256, 50)), numbered(3000, 100)))
    assert status.resident <= WINDOW
    assert [b.end - b.begin for b in h.explain().blocks if b.cls == "pinned"] == [256]


def test_an_engine_that_fails_while_it_evaluates_again_ends_the_session(h: Evicting) -> None:
    h.suffix(raw(numbered(1024)))
    h.engine.fail_after = 2
    with pytest.raises(SessionFatal):
        h.decode(options(10))
    with pytest.raises(SessionFatal):
        h.explain()


# --- cancelled at any moment -------------------------------------------------------------------


def test_a_cancel_in_an_answer_s_eviction_loses_nothing() -> None:
    prompt = list(numbered(1020).encode())
    whole = Evicting()
    whole.open_evicting()
    expected = streamed(whole, prompt, 12)
    where = set()
    for cancel_at in range(40):
        h = Evicting()
        h.open_evicting()
        h.suffix(raw(numbered(1020)))
        op = FakeOp(cancel_at=cancel_at)
        final = h.decode(options(12), op=op)
        answer = h.session().answer_ids
        assert h.explain().counters["cancelled_ops"] == (final.stop_reason == "cancelled")
        assert h.held() == h.hot(prompt + answer)
        assert final.seen_tokens == len(prompt) + final.tokens == len(prompt) + len(answer)
        where.add((final.stop_reason, final.resident < len(h.session().known_tokens()) - 1))
        if final.stop_reason == "cancelled" and len(answer) < 12:
            final = h.decode(options(12 - len(answer)))
        assert answer == expected
        assert final.recomputed <= 2 * RECENT
        assert final.seen_tokens == 1032
        h.check_records()
    assert where == {("cancelled", True), ("cancelled", False), ("length", False)}


def test_what_a_cancel_left_out_of_an_eviction_is_evaluated_as_it_would_have_been(
    h: Evicting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one by one, as sampled tokens are: engines compute a lone token in another way."""
    h.suffix(raw(numbered(900)))
    h.decode(options(124))
    h.decode(options(2), op=FakeOp(cancel_at=9))
    left = len(h.session().missing())
    assert 60 < left < RECENT
    stepped: list[int] = []
    step = FakeContext.step

    def counted(self: FakeContext, token: int, position: int) -> None:
        stepped.append(token)
        step(self, token, position)

    monkeypatch.setattr(FakeContext, "step", counted)
    h.decode(options(1))
    assert (len(h.session().missing()), stepped) == (1, [])


def test_an_eviction_takes_what_a_closed_session_left_of_the_same_conversation(
    h: Evicting,
) -> None:
    h.suffix(raw(numbered(1000)))
    h.open_evicting("b")
    other, mine = FakeOp(), FakeOp()
    h.turn(raw(), raw(numbered(1000)), options(60), "b", other)
    h.close("b")
    final = h.decode(options(60), op=mine)
    assert mine.ids == other.ids == streamed(h, list(numbered(1000).encode()), 60)
    assert final.recomputed == 0
    assert h.explain().counters["adopted_contexts"] == 1
    assert h.held() == h.hot(h.session().conversation())


@pytest.mark.parametrize("trimmable", [True, False])
def test_a_cancel_in_a_long_prompt_loses_nothing(trimmable: bool) -> None:
    text = numbered(3100)
    tape = list(text.encode())
    stopped = set()
    for cancel_at in range(0, 70, 3):
        engine = FakeEngine(micro_batch=64, end_bias=-100.0, trimmable=trimmable)
        h = Evicting(engine)
        h.open_evicting()
        op = FakeOp(cancel_at=cancel_at)
        status = h.suffix(raw(text), op=op)
        assert status.prefilled == engine.evaluated
        assert status.resident + status.available == WINDOW
        assert h.held() == h.hot(tape)
        stopped.add(status.resident)
        op = FakeOp()
        final = h.decode(options(4), op=op)
        compact = h.held()[:-3]
        assert compact[:SINK] == tape[:SINK]
        assert compact[-RECENT:] == tape[-RECENT:]
        assert op.ids == streamed(h, tape, 4, compact)
        assert final.seen_tokens == 3104
        assert final.resident + final.parked + final.gone == 3103
        h.check_records()
    assert len(stopped) > 5


# --- what else an answer is made by ------------------------------------------------------------


def test_a_stop_sequence_over_an_eviction_leaves_the_text_that_was_shown(h: Evicting) -> None:
    prompt = list(numbered(1000).encode())
    expected = streamed(h, prompt, 60)
    text, before = bytes_of(h, expected), bytes_of(h, expected[:24])
    at, stop = len(before), bytes_of(h, expected[24:27])  # the eviction comes with token 25
    assert text.index(stop) == at
    op = FakeOp()
    final = h.turn(raw(), raw(numbered(1000)), options(60, stop=[stop]), op=op, turn_id="t")
    assert (final.stop_reason, op.text) == ("stop_sequence", text[:at])
    session = h.session()
    assert session.answer_ids == expected[:24]
    assert h.held() == h.hot(prompt + expected[:24])
    assert session.layout is not None
    assert session.layout.seen == session.layout.evaluated == 1024
    op = FakeOp()
    h.turn(raw(), segments(numbered(1000), turn_ref("t"), " go on"), options(5), op=op)
    assert len(op.ids) == 5
    h.check_records()


def test_penalties_look_back_on_the_conversation_and_not_on_what_is_attended(h: Evicting) -> None:
    given: dict[str, Any] = {"repeat_last_n": -1, "frequency_penalty": 0.5}
    asked = options(700, **given)
    op = FakeOp()
    h.turn(raw(), raw(numbered(900)), asked, op=op)
    tape = list(numbered(900).encode())
    fresh, sampler = h.fresh_context(tape), Sampler(asked.sampling, h.engine.tokenizer.vocab_size)
    sampler.prime(tape)
    for token in op.ids:
        assert token == sampler.sample(fresh.logits())
        sampler.accept(token)
        tape.append(token)
        if len(fresh.tokens) == WINDOW:
            fresh = h.fresh_context(tape[:SINK] + tape[-RECENT:])
        else:
            fresh.step(token, len(fresh.tokens))
    # A second decode is primed with the whole, which is mostly out of attention.
    op = FakeOp()
    h.decode(options(100, **given), op=op)
    again = Sampler(asked.sampling, h.engine.tokenizer.vocab_size)
    again.prime(tape)
    for token in op.ids:
        assert token == again.sample(fresh.logits())
        again.accept(token)
        fresh.step(token, len(fresh.tokens))
    assert len(fresh.tokens) < WINDOW


def test_a_constraint_holds_over_an_eviction(h: Evicting) -> None:
    asked = options(0)
    asked.structured_kind, asked.structured = "regex", "(ab|cd){150}"
    op = FakeOp()
    final = h.turn(raw(), raw(numbered(1000)), asked, op=op)
    assert final.stop_reason == "eos"
    assert len(op.text) == 300
    assert {op.text[at : at + 2] for at in range(0, 300, 2)} <= {"ab", "cd"}
    assert final.recomputed > 0
