"""What the session core promises about prefixes and suffixes: reuse, its numbers, its refusals."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from modeld.shared.errors import (
    ContextOverflow,
    InsufficientMemory,
    InvalidRequest,
    ManifestMismatch,
    ModelLoadFailed,
    ModelNotActive,
    SessionFatal,
    SessionNotFound,
)
from modeld.shared.messages import (
    Cancel,
    DetokenizeOp,
    DetokenizeResult,
    LoadOp,
    LoadResult,
    Message,
    Progress,
    RenderOp,
    RenderResult,
    Status,
    TokenizeOp,
    TokenizeResult,
    UnloadOp,
)
from tests.support.core_harness import FakeOp, Harness, chat, options, raw, turn_ref
from tests.support.fake_engine import TEMPLATE, FakeEngine

LINES = "".join(f"line {n}: some text of the repository\n" for n in range(4))


def numbers(status: Status) -> tuple[int, int, int]:
    return status.reused, status.dropped, status.prefilled


# --- prefix ---------------------------------------------------------------------------------------


def test_cold_prefix_is_prefilled_whole() -> None:
    harness = Harness()
    harness.open()
    status = harness.ensure(raw("hello, bright day\n"))
    assert status.reused == 0
    assert status.prefilled == status.prefix == status.resident == harness.engine.evaluated
    assert status.available == 256 - status.resident
    assert status.miss_reason == "COLD"
    assert status.part == "prefix"
    assert status.seen_tokens == status.prefilled


def test_same_prefix_again_costs_nothing() -> None:
    harness = Harness()
    harness.open()
    first = harness.ensure(raw(LINES))
    again = harness.ensure(raw(LINES))
    assert numbers(again) == (first.prefix, 0, 0)
    assert again.miss_reason == "NONE"
    assert again.stable_token_hash == first.stable_token_hash
    assert harness.engine.evaluated == first.prefix


def test_changed_prefix_keeps_the_common_part_only() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n", "two\n", "3\n"))
    status = harness.ensure(raw("one\n", "2\n", "3\n"))
    assert numbers(status) == (4, 6, 4)
    assert status.miss_reason == "TOKENS_DIFFER"
    assert status.resident == 8
    assert status.retained == 0


def test_longer_prefix_is_extended() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    status = harness.ensure(raw("one\ntwo\n"))
    assert numbers(status) == (4, 0, 4)
    assert status.miss_reason == "EXTENDED"


def test_shorter_prefix_leaves_the_rest_to_be_found_again() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\ntwo\n"))
    shorter = harness.ensure(raw("one\n"))
    assert numbers(shorter) == (4, 4, 0)
    assert (shorter.resident, shorter.retained) == (4, 4)
    longer = harness.ensure(raw("one\ntwo\n"))
    assert numbers(longer) == (8, 0, 0)
    assert harness.engine.evaluated == 8


def test_empty_prefix_holds_nothing() -> None:
    harness = Harness()
    harness.open()
    status = harness.ensure(raw())
    assert (status.prefix, status.resident, status.miss_reason) == (0, 0, "NONE")


def test_token_hashes_are_of_little_endian_int32_ids() -> None:
    harness = Harness()
    harness.open()
    prefix = harness.ensure(raw("ab\n"))
    suffix = harness.suffix(raw("cd"))
    expected = hashlib.sha256(np.array([97, 98, 10], dtype="<i4").tobytes()).hexdigest()
    assert prefix.stable_token_hash == suffix.stable_token_hash == expected
    assert suffix.volatile_token_hash == hashlib.sha256(b"c\0\0\0d\0\0\0").hexdigest()


# --- suffix ---------------------------------------------------------------------------------------


def test_suffix_is_appended_and_the_prefix_untouched() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    status = harness.suffix(raw("two\n"))
    assert status.part == "suffix"
    assert numbers(status) == (0, 0, 4)
    assert (status.prefix, status.suffix, status.resident) == (4, 4, 8)
    assert status.miss_reason == "EXTENDED"
    assert len(status.segments) == 2


def test_second_suffix_replaces_the_first() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    harness.suffix(raw("two\n"))
    status = harness.suffix(raw("tea and\n"))
    assert numbers(status) == (1, 3, status.suffix - 1)
    assert status.resident == 4 + status.suffix
    assert status.miss_reason == "TOKENS_DIFFER"


def test_suffix_is_extended_when_asked() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    harness.suffix(raw("two\n"))
    status = harness.suffix(raw("3\n"), extend=True)
    assert numbers(status) == (4, 0, 2)
    assert status.suffix == 6


def test_same_suffix_again_evaluates_its_last_token_for_the_logits() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    harness.suffix(raw("two\n"))
    status = harness.suffix(raw("two\n"))
    assert numbers(status) == (3, 0, 1)
    assert status.miss_reason == "NONE"


def test_empty_suffix_adds_and_costs_nothing() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    status = harness.suffix(raw())
    assert (*numbers(status), status.suffix, status.resident) == (0, 0, 0, 0, 4)
    assert status.miss_reason == "NONE"


def test_suffix_without_a_prefix_is_a_prompt_of_its_own() -> None:
    harness = Harness()
    harness.open()
    status = harness.suffix(raw("one\n"))
    assert (status.prefix, status.suffix, status.miss_reason) == (0, 4, "COLD")


def test_suffix_that_merges_with_the_prefix_is_refused_and_nothing_changes() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("a wor"))
    before = harness.explain()
    with pytest.raises(ManifestMismatch) as caught:
        harness.suffix(raw("ld"))
    assert caught.value.metadata["reason"] == "boundary_merge"
    assert harness.explain() == before
    assert harness.suffix(raw(" day")).resident > before.resident


# --- windows and memory ---------------------------------------------------------------------------


def test_prompt_beyond_the_window_is_refused_with_the_numbers_and_nothing_changes() -> None:
    harness = Harness()
    harness.open(window=16)
    harness.open("b", window=32)
    harness.ensure(raw("0123456\n"))
    harness.suffix(raw("abc"))
    before = harness.explain()
    with pytest.raises(ContextOverflow) as caught:
        harness.suffix(raw("abcdefghij"))
    assert caught.value.metadata == {
        "stage": "suffix",
        "resident": "11",
        "additional": "7",
        "requested_tokens": "18",
        "effective": "16",
        "hot": "48",
        "planner": "16",
        "drop_tokens": "2",
    }
    assert harness.explain() == before
    with pytest.raises(ContextOverflow) as caught:
        harness.ensure(raw("x" * 17))
    assert caught.value.metadata["stage"] == "prefix"
    with pytest.raises(ContextOverflow) as caught:
        harness.turn(raw("0123456\n"), raw("abcdefghij"))
    assert caught.value.metadata["stage"] == "turn"
    assert harness.explain() == before
    assert harness.decode(options(2)).prefilled == 0


def test_prompt_of_exactly_the_window_is_accepted() -> None:
    harness = Harness()
    harness.open(window=16)
    assert harness.ensure(raw("x" * 16)).available == 0


def test_sessions_beyond_the_limit_are_refused_with_the_numbers() -> None:
    harness = Harness(max_contexts=2)
    harness.open("a")
    harness.open("b")
    with pytest.raises(InsufficientMemory) as caught:
        harness.open("c")
    assert caught.value.metadata["sessions"] == "2"
    assert caught.value.metadata["max_contexts"] == "2"
    harness.close("b")
    assert harness.open("c").reused_context


def test_reclaimable_contexts_are_freed_oldest_first_when_memory_is_short() -> None:
    harness = Harness(FakeEngine(cell_limit=600))
    for name, text in (("a", "aaaa"), ("b", "bbbb")):
        harness.open(name)
        harness.ensure(raw(text), name)
    harness.close("a")
    harness.close("b")
    opened = harness.open("c", window=300)
    assert not opened.reused_context
    assert opened.slot_cells == 556
    assert harness.explain("c").reclaimable_tokens == 4
    assert harness.ensure(raw("bbbb" * 10), "c").copied == 0  # not worthwhile for 4 tokens
    with pytest.raises(InsufficientMemory) as caught:
        harness.open("d", window=400)
    assert caught.value.metadata["sessions"] == "1"
    assert caught.value.metadata["free_cells"] == "300"


def test_blank_context_of_the_same_shape_is_taken_before_a_new_one_is_made() -> None:
    harness = Harness()
    harness.open("a")
    harness.close("a")
    assert harness.open("b").reused_context
    assert not harness.open("c", window=300).reused_context


def test_context_of_another_shape_is_made_anew_at_the_limit() -> None:
    harness = Harness(max_contexts=1)
    harness.open("a", window=64)
    harness.close("a")
    opened = harness.open("b", window=128)
    assert not opened.reused_context
    assert (opened.window, opened.slot_cells) == (128, 128)


# --- sharing --------------------------------------------------------------------------------------


def test_next_session_finds_what_a_closed_one_left() -> None:
    harness = Harness()
    harness.open("a")
    prefix = harness.ensure(raw(LINES), "a").prefix
    assert harness.close("a").retained == prefix
    opened = harness.open("b")
    assert not opened.reused_context  # there was room for a new one
    status = harness.ensure(raw(LINES), "b")
    assert (status.reused, status.prefilled, status.copied) == (prefix, 0, 0)
    assert harness.explain("b").counters["adopted_contexts"] == 1
    assert harness.engine.evaluated == prefix


def test_discarded_session_leaves_nothing() -> None:
    harness = Harness()
    harness.open("a")
    harness.ensure(raw(LINES), "a")
    closed = harness.close("a", discard=True)
    assert (closed.retained, closed.slot_cells, closed.slot_bytes) == (0, 0, 0)
    harness.open("b")
    assert harness.ensure(raw(LINES), "b").miss_reason == "COLD"


def test_live_sessions_prefix_is_copied_and_the_other_untouched() -> None:
    harness = Harness()
    harness.open("a")
    harness.open("b")
    prefix = harness.ensure(raw(LINES), "a").prefix
    harness.suffix(raw("question one"), "a")
    before = harness.explain("a")
    status = harness.ensure(raw(LINES), "b")
    assert (status.reused, status.copied, status.prefilled) == (prefix, prefix, 0)
    harness.check_records()
    after = harness.explain("a")
    assert (after.blocks, after.resident) == (before.blocks, before.resident)
    expected = harness.fresh_answer(raw(LINES), raw("question two"))
    op = FakeOp()
    harness.suffix(raw("question two"), "b")
    harness.decode(session_id="b", op=op)
    assert (op.text, op.ids) == expected[:2]


def test_closed_session_with_another_window_is_copied_from() -> None:
    harness = Harness()
    harness.open("a", window=512)
    prefix = harness.ensure(raw(LINES), "a").prefix
    harness.close("a")
    harness.open("b", window=256)
    status = harness.ensure(raw(LINES), "b")
    assert (status.reused, status.copied) == (prefix, prefix)


def test_failed_copy_starts_cold_and_is_not_tried_again() -> None:
    harness = Harness(FakeEngine(copies=False))
    harness.open("a")
    harness.open("b")
    harness.ensure(raw(LINES), "a")
    status = harness.ensure(raw(LINES), "b")
    assert (status.reused, status.copied, status.miss_reason) == (0, 0, "COLD")
    harness.ensure(raw("x" * 100), "b")
    assert harness.ensure(raw(LINES), "b").prefilled == status.prefilled


def test_nothing_is_reused_under_another_kv_digest() -> None:
    harness = Harness(max_contexts=1)
    harness.open("a", kv_digest="one")
    harness.ensure(raw(LINES), "a")
    harness.close("a")
    assert harness.open("b", kv_digest="two").retained > 0
    status = harness.ensure(raw(LINES), "b")
    assert (status.reused, status.miss_reason) == (0, "KV_DIGEST")


# --- memory that can't be trimmed -----------------------------------------------------------------


def test_memory_that_cant_be_trimmed_is_recomputed_and_said_so() -> None:
    harness = Harness(FakeEngine(trimmable=False))
    harness.open()
    first = harness.ensure(raw("one\ntwo\n"))
    status = harness.ensure(raw("one\n2\n"))
    assert (status.reused, status.prefilled, status.miss_reason) == (0, 6, "CANNOT_TRIM")
    extended = harness.ensure(raw("one\n2\n3\n"))
    assert (extended.reused, extended.prefilled) == (6, 2)
    assert first.miss_reason == "COLD"


# --- cancelling -----------------------------------------------------------------------------------


def test_cancelled_prefix_tells_what_is_there_and_is_gone_on_with() -> None:
    harness = Harness()
    harness.open()
    cut = harness.ensure(raw(LINES), op=FakeOp(cancel_at=2))
    assert (cut.prefilled, cut.resident) == (16, 16)
    assert cut.prefix > 16
    assert harness.explain().counters["cancelled_ops"] == 1
    rest = harness.ensure(raw(LINES))
    assert (rest.reused, rest.prefilled) == (16, cut.prefix - 16)
    op = FakeOp()
    harness.decode(op=op)
    assert (op.text, op.ids) == harness.fresh_answer(raw(LINES), None)[:2]


def test_decode_after_a_cancelled_suffix_evaluates_what_is_missing() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    cut = harness.suffix(raw(LINES), op=FakeOp(cancel_at=1))
    assert cut.resident == 12
    op = FakeOp()
    final = harness.decode(op=op)
    assert final.prefilled == cut.prefix + cut.suffix - 12
    assert (op.text, op.ids) == harness.fresh_answer(raw("one\n"), raw(LINES))[:2]


# --- failing --------------------------------------------------------------------------------------


def test_engine_failure_ends_the_session_for_good() -> None:
    harness = Harness()
    harness.open("a")
    harness.open("b")
    harness.ensure(raw(LINES), "b")
    harness.engine.fail_after = 2
    with pytest.raises(SessionFatal):
        harness.ensure(raw(LINES[::-1]), "a")
    for call in (harness.ensure, harness.suffix):
        with pytest.raises(SessionFatal):
            call(raw("x"), "a")
    with pytest.raises(SessionFatal):
        harness.decode(session_id="a")
    assert harness.engine.cells == 256  # its context is gone, the other's stands
    assert harness.ensure(raw(LINES), "b").prefilled == 0
    harness.close("a")
    harness.open("a")


def test_unplanned_exception_while_kv_changes_is_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    harness.open()
    monkeypatch.setattr(harness.engine, "micro_batch", 0.5)  # the engine trips over itself
    with pytest.raises(SessionFatal) as caught:
        harness.ensure(raw("text"))
    assert caught.value.metadata["cause"] == "engine_error"
    assert caught.value.__cause__ is None


# --- model and questions --------------------------------------------------------------------------


def test_nothing_is_served_without_a_model() -> None:
    harness = Harness()
    harness.open()
    harness.run(UnloadOp())
    for call in (harness.open, harness.explain, harness.close):
        with pytest.raises(ModelNotActive):
            call("a")
    with pytest.raises(ModelNotActive):
        harness.run(TokenizeOp(text="x", parse_special=False, add_bos=False))
    assert harness.engine.cells == 0
    assert not harness.engine.loaded


def test_failed_load_leaves_nothing_loaded() -> None:
    harness = Harness()
    with pytest.raises(ModelLoadFailed):
        harness.run(LoadOp(path="bad", model="m", digest="d"))
    with pytest.raises(ModelNotActive):
        harness.open()


def test_load_reports_progress_and_the_templates_truth() -> None:
    harness = Harness()
    op = FakeOp()
    result = harness.run(LoadOp(path="m", model="m", digest="d"), op)
    assert isinstance(result, LoadResult)
    assert op.of(Progress)
    assert len(result.template_digest) == 64
    assert not result.template_supports_tools


def test_unknown_sessions_and_operations_are_refused() -> None:
    harness = Harness()
    with pytest.raises(SessionNotFound):
        harness.ensure(raw("x"), "nobody")
    with pytest.raises(InvalidRequest):
        harness.run(Cancel())
    harness.open("a")
    with pytest.raises(InvalidRequest):
        harness.open("a")
    with pytest.raises(InvalidRequest):
        harness.open("b", k_type="f8")
    with pytest.raises(InvalidRequest):
        harness.open("b", prompt_format="xml")
    with pytest.raises(InvalidRequest):
        harness.open("b", window=0)


def test_chat_needs_a_template() -> None:
    harness = Harness(FakeEngine(template=None))
    with pytest.raises(InvalidRequest):
        harness.open(prompt_format="chat")


def test_tokenize_and_detokenize_are_each_others_inverse() -> None:
    harness = Harness()
    text = "hello <|im_end|> world"
    plain = harness.run(TokenizeOp(text=text, parse_special=False, add_bos=False))
    special = harness.run(TokenizeOp(text=text, parse_special=True, add_bos=True))
    assert isinstance(plain, TokenizeResult)
    assert isinstance(special, TokenizeResult)
    end = harness.engine.tokenizer.controls["<|im_end|>"]
    assert end not in plain.ids
    assert end in special.ids
    assert special.ids[0] == harness.engine.tokenizer.bos
    assert b"".join(plain.pieces) == text.encode()
    back = harness.run(DetokenizeOp(ids=plain.ids))
    assert back == DetokenizeResult(raw=text.encode())
    for bad in (-1, harness.engine.tokenizer.vocab_size):
        with pytest.raises(InvalidRequest):
            harness.run(DetokenizeOp(ids=[bad]))


def test_rendering_gives_the_ids_a_session_would_have() -> None:
    harness = Harness()
    harness.open(prompt_format="chat", window=512)
    messages = [Message(role="user", text="say <|im_end|> please")]
    result = harness.run(RenderOp(messages=messages, tools=[], add_generation_prompt=True))
    assert isinstance(result, RenderResult)
    assert result.text.endswith("<|im_start|>assistant\n")
    harness.ensure(chat())
    status = harness.suffix(chat(("user", "say <|im_end|> please")))
    assert status.resident == len(result.ids)
    ids = np.array(result.ids, dtype="<i4")
    assert status.volatile_token_hash == hashlib.sha256(ids.tobytes()).hexdigest()


def test_unadditive_template_is_matched_whole_and_reported() -> None:
    template = "{{ messages | length }} messages\n" + TEMPLATE
    harness = Harness(FakeEngine(template=template))
    harness.open(prompt_format="chat", window=512)
    harness.ensure(chat(("system", "be brief")))
    status = harness.suffix(chat(("user", "go")))
    assert not status.template_additive
    assert status.prefix + status.suffix == status.resident
    assert status.reused + status.prefilled >= status.suffix


def test_explain_names_every_part() -> None:
    harness = Harness()
    harness.open()
    harness.ensure(raw("one\n"))
    harness.suffix(raw("two\n"))
    harness.decode(options(5), turn_id="t")
    harness.suffix(raw("2\n"))
    harness.suffix(raw("two\n"))
    explained = harness.explain()
    assert [(b.begin, b.end, b.what) for b in explained.blocks] == [
        (0, 4, "prefix"),
        (4, 8, "suffix"),
    ]
    harness.decode(options(5), turn_id="u")
    explained = harness.explain()
    assert [(b.begin, b.end, b.what) for b in explained.blocks[2:]] == [(8, 12, "generated")]
    assert explained.turn_ids == ["t", "u"]
    harness.ensure(raw("one\n"))
    explained = harness.explain()
    assert [(b.begin, b.end, b.state) for b in explained.blocks] == [
        (0, 4, "hot"),
        (4, 12, "retained"),
    ]
    assert explained.counters["generated_tokens"] == 10
    assert explained.counters["evaluated_tokens"] == harness.engine.evaluated


def test_generated_turn_of_an_unknown_id_is_refused() -> None:
    harness = Harness()
    harness.open()
    prompt = raw("x")
    prompt.segments.append(turn_ref("nope"))
    with pytest.raises(InvalidRequest):
        harness.ensure(prompt)
