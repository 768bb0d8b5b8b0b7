"""A session's KV to a file and back, forked and trimmed; and refusals that cost nothing.

On the fake engine, whose state is a hash of every token before it: a range that came back in a
wrong place or order answers otherwise.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modeld.shared.errors import (
    ContextOverflow,
    DigestMismatch,
    InsufficientMemory,
    InvalidRequest,
    ManifestMismatch,
    ModeldError,
    SessionFatal,
    SessionNotFound,
    SnapshotNotFound,
    StorageFull,
    UnsupportedFeature,
)
from modeld.shared.messages import ExplainResult
from modeld.workers import residency
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.state_file import StateHeader, open_state, token_chain
from tests.support.core_harness import FakeOp, Harness, chat, options, raw, turn_ref
from tests.support.fake_engine import FakeEngine
from tests.support.residency import export, flipped, fork, import_, rewritten, trim

TEXT = "the world is held here\nand a line more of it\nand one behind\n"  # 50 tokens
OTHER = "quite another beginning\n"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "CHUNK_TOKENS", 16)


@pytest.fixture
def harness() -> Harness:
    made = Harness()
    made.open()
    return made


def header_of(path: Path) -> StateHeader:
    with open_state(str(path)) as file:
        return file.header


def fresh(engine: FakeEngine | None = None, **how: Any) -> Harness:
    made = Harness(engine)
    made.open(**how)
    return made


# --- whole sessions ------------------------------------------------------------------------------


def test_a_session_comes_back_in_another_worker_and_nothing_is_prefilled(
    harness: Harness, tmp_path: Path
) -> None:
    size = harness.ensure(raw(TEXT)).prefix
    written = export(harness, tmp_path / "s")
    assert (written.begin, written.end, written.tokens) == (0, size, size)
    assert written.payload_bytes == 16 * size
    assert written.file_bytes == (tmp_path / "s").stat().st_size
    other = fresh()
    taken = import_(other, tmp_path / "s")
    assert (taken.tokens, taken.resident, taken.retained) == (size, 0, size)
    assert (taken.digest, taken.payload_bytes) == (written.digest, written.payload_bytes)
    status = other.ensure(raw(TEXT))
    assert (status.reused, status.prefilled, status.retained) == (size, 0, 0)
    assert other.engine.evaluated == 0
    op = FakeOp()
    other.turn(raw(TEXT), raw("go on"), op=op)
    assert (op.text, op.ids) == harness.fresh_answer(raw(TEXT), raw("go on"))[:2]
    other.check_records()


def test_an_export_changes_nothing_and_says_the_same_twice(
    harness: Harness, tmp_path: Path
) -> None:
    harness.turn(raw(TEXT), raw("go on"))
    before = harness.explain()
    one, two = export(harness, tmp_path / "1"), export(harness, tmp_path / "2")
    assert harness.explain() == before
    assert (one.digest, one.chain) == (two.digest, two.chain)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert harness.decode().prefilled == 1  # the last answer's token, as without an export


def test_the_whole_is_all_that_the_context_holds(harness: Harness, tmp_path: Path) -> None:
    size = harness.ensure(raw(TEXT)).prefix
    head = harness.ensure(raw("the world")).prefix
    assert export(harness, tmp_path / "all").tokens == size
    assert export(harness, tmp_path / "resident", end=head).tokens == head


def test_an_answer_comes_back_to_the_conversation_that_it_is_of(
    harness: Harness, tmp_path: Path
) -> None:
    harness.turn(raw(TEXT), raw("go on"), options(8))
    explained = harness.explain()
    export(harness, tmp_path / "s")
    harness.turn(raw(OTHER), raw("x"), options(3))
    harness.turn(raw(TEXT), raw("go on"), options(8))
    trim(harness, 10)
    taken = import_(harness, tmp_path / "s")
    assert (taken.resident, taken.retained) == (explained.resident, 0)
    assert harness.decode(options(4)).prefilled == 1
    harness.check_records()


def test_an_import_replaces_what_is_held_and_the_slot_does_not_grow(
    harness: Harness, tmp_path: Path
) -> None:
    size = harness.ensure(raw(TEXT)).prefix
    export(harness, tmp_path / "s")
    harness.ensure(raw(OTHER))
    before = harness.explain()
    taken = import_(harness, tmp_path / "s")
    assert (taken.tokens, taken.resident) == (size, 0)
    assert taken.slot_cells == before.slot_cells
    assert len(harness.core.model.pool.contexts) == 1
    assert harness.ensure(raw(TEXT)).reused == size
    harness.check_records()


def test_an_import_takes_a_reclaimable_context_and_leaves_its_own_as_cache(
    harness: Harness, tmp_path: Path
) -> None:
    size = harness.ensure(raw(TEXT)).prefix
    export(harness, tmp_path / "s")
    other = harness.ensure(raw(OTHER)).prefix
    harness.open("b")
    harness.ensure(raw("b's\n"), "b")
    harness.close("b")
    import_(harness, tmp_path / "s")
    assert harness.explain().reclaimable_tokens == other
    assert harness.explain().slot_cells == 512
    assert harness.ensure(raw(TEXT)).reused == size
    harness.check_records()


def test_without_a_second_context_what_is_held_stays_until_it_is_trimmed(tmp_path: Path) -> None:
    harness = Harness(max_contexts=1)
    harness.open()
    size = harness.ensure(raw(TEXT)).prefix
    export(harness, tmp_path / "s")
    held = harness.ensure(raw(OTHER)).prefix
    with pytest.raises(InsufficientMemory, match="trim the session to 0"):
        import_(harness, tmp_path / "s")
    assert harness.ensure(raw(OTHER)).reused == held
    trim(harness, 0)
    assert import_(harness, tmp_path / "s").tokens == size
    assert harness.ensure(raw(TEXT)).reused == size


def test_a_memory_without_ranges_goes_out_whole_only(tmp_path: Path) -> None:
    harness = fresh(FakeEngine(ranges=False, trimmable=False))
    size = harness.ensure(raw(TEXT)).prefix
    with pytest.raises(UnsupportedFeature) as refused:
        export(harness, tmp_path / "r", end=20)
    assert refused.value.metadata["capability"] == "state.blocks"
    assert list(tmp_path.iterdir()) == []
    export(harness, tmp_path / "s")
    assert len(header_of(tmp_path / "s").chunks) == 1
    other = fresh(FakeEngine(ranges=False, trimmable=False))
    import_(other, tmp_path / "s")
    assert other.ensure(raw(TEXT)).reused == size


def test_a_session_that_was_given_nothing_has_nothing_to_export(
    harness: Harness, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="holds tokens"):
        export(harness, tmp_path / "s")
    with pytest.raises(SessionNotFound):
        export(harness, tmp_path / "s", "nobody")


# --- exactness -----------------------------------------------------------------------------------


def test_exact_is_said_only_of_types_that_were_seen_to_be(tmp_path: Path) -> None:
    for k_type, exact in (("f16", True), ("q8_0", False)):
        harness = fresh(k_type=k_type)
        harness.ensure(raw(TEXT))
        written = export(harness, tmp_path / k_type)
        taken = import_(fresh(k_type=k_type), tmp_path / k_type)
        assert (written.exact, taken.exact) == (exact, exact)
        assert f"{k_type}/f16" in written.exact_reason
        assert f"{k_type}/f16" in taken.exact_reason


def test_a_state_of_another_runtime_is_taken_but_not_called_exact(
    harness: Harness, tmp_path: Path
) -> None:
    harness.ensure(raw(TEXT))
    export(harness, tmp_path / "s")
    other = rewritten(tmp_path / "s", tmp_path / "o", runtime_digest="other")
    taken = import_(fresh(), other)
    assert taken.tokens == 50
    assert not taken.exact
    assert "runtime_digest" in taken.exact_reason


# --- ranges --------------------------------------------------------------------------------------


def test_a_middle_range_is_parked_survivors_are_evaluated_again_and_it_returns(
    harness: Harness, tmp_path: Path
) -> None:
    lines = TEXT.splitlines(keepends=True)
    ends = [harness.ensure(raw(*lines[: n + 1])).prefix for n in range(3)]
    parked = export(harness, tmp_path / "middle", begin=ends[0], end=ends[1])
    assert (parked.begin, parked.end, parked.tokens) == (ends[0], ends[1], ends[1] - ends[0])
    assert parked.payload_bytes == 16 * parked.tokens
    without = harness.ensure(raw(lines[0], lines[2]))
    assert without.reused >= ends[0]
    assert harness.turn(raw(lines[0], lines[2]), raw("x")).prefilled == 0
    harness.ensure(raw(lines[0]))
    trim(harness, ends[0])
    taken = import_(harness, tmp_path / "middle")
    assert (taken.begin, taken.end, taken.resident) == (ends[0], ends[1], ends[0])
    back = harness.ensure(raw(*lines))
    assert (back.reused, back.prefilled) == (ends[1], ends[2] - ends[1])
    op = FakeOp()
    harness.turn(raw(*lines), raw("go on"), op=op)
    assert op.ids == harness.fresh_answer(raw(TEXT), raw("go on"))[1]
    harness.check_records()


def test_ranges_come_back_one_behind_the_other(harness: Harness, tmp_path: Path) -> None:
    harness.ensure(raw(TEXT))
    bounds = [0, 7, 30, 50]
    for number, begin in enumerate(bounds[:-1]):
        written = export(harness, tmp_path / str(number), begin=begin, end=bounds[number + 1])
        assert header_of(tmp_path / str(number)).chain == written.chain
    assert header_of(tmp_path / "2").chain_before == header_of(tmp_path / "1").chain
    other = fresh()
    for number in range(3):
        import_(other, tmp_path / str(number))
    assert other.ensure(raw(TEXT)).reused == 50
    other.check_records()


def test_ranges_are_whole_blocks_or_end_where_the_session_does(tmp_path: Path) -> None:
    harness = fresh(FakeEngine(state_block=8))
    harness.ensure(raw(TEXT))
    for field, begin, end in (("begin", 4, 16), ("end", 8, 20), ("end", 0, 49)):
        with pytest.raises(InvalidRequest, match="a multiple of 8") as refused:
            export(harness, tmp_path / "s", begin=begin, end=end)
        assert refused.value.metadata["field"] == field
    assert export(harness, tmp_path / "1", begin=8, end=40).tokens == 32
    assert export(harness, tmp_path / "2", begin=40).tokens == 10
    assert [chunk.end for chunk in header_of(tmp_path / "1").chunks] == [24, 40]


@pytest.mark.parametrize(
    ("begin", "end", "field"),
    [(-1, 5, "begin"), (5, 5, "begin"), (9, 5, "begin"), (0, 51, "end"), (0, 0, "end"),
     (0, -2, "end"), (50, -1, "begin")],
)  # fmt: skip
def test_a_range_that_is_not_held_is_refused(
    harness: Harness, tmp_path: Path, begin: int, end: int, field: str
) -> None:
    harness.ensure(raw(TEXT))
    with pytest.raises(InvalidRequest) as refused:
        export(harness, tmp_path / "s", begin=begin, end=end)
    assert refused.value.metadata["field"] == field
    assert list(tmp_path.iterdir()) == []


# --- refusals of an import -----------------------------------------------------------------------


def told(harness: Harness) -> ExplainResult:
    """Without how many contexts there ever were: a second one may have come and gone."""
    explained = harness.explain()
    for counter in ("slot_contexts_created", "slot_contexts_freed"):
        del explained.counters[counter]
    return explained


def refused_import(
    harness: Harness, path: Path | str, kind: type[ModeldError], prompt: str = OTHER
) -> ModeldError:
    """A refusal that leaves the session with the same content, answer and reuse."""
    size = harness.ensure(raw(prompt)).prefix
    harness.ensure(raw(prompt[:9]))  # part of it retained
    before = told(harness)
    held = harness.core.model.sessions.by_id["a"].entry.tokens.tolist()
    with pytest.raises(kind) as caught:
        import_(harness, path)
    assert told(harness) == before
    assert harness.core.model.sessions.by_id["a"].entry.tokens.tolist() == held
    status = harness.ensure(raw(prompt))
    assert (status.reused, status.prefilled) == (size, 0)
    op = FakeOp()
    harness.turn(raw(prompt), raw("go on"), op=op)
    assert op.ids == harness.fresh_answer(raw(prompt), raw("go on"))[1]
    harness.check_records()
    return caught.value


@pytest.fixture
def state(tmp_path: Path) -> Path:
    source = fresh()
    source.ensure(raw(TEXT))
    export(source, tmp_path / "state")
    return tmp_path / "state"


@pytest.mark.parametrize("keep", [0, 40, 300, -1])
def test_a_truncated_file_is_refused(harness: Harness, state: Path, keep: int) -> None:
    state.write_bytes(state.read_bytes()[:keep])
    refused_import(harness, state, DigestMismatch)


@pytest.mark.parametrize("at", [0, 20, 60, 300, -800, -400, -1])
def test_a_flipped_byte_is_refused(harness: Harness, state: Path, tmp_path: Path, at: int) -> None:
    refused_import(harness, flipped(state, at, tmp_path / "flipped"), DigestMismatch)


@pytest.mark.parametrize(
    ("field", "value"),
    [("backend", "llama"), ("build_digest", "1" * 64), ("state_layout", "x"), ("k_type", "q8_0"),
     ("v_type", "q8_0")],
)  # fmt: skip
def test_a_state_of_another_identity_is_refused(
    harness: Harness, state: Path, tmp_path: Path, field: str, value: str
) -> None:
    path = rewritten(state, tmp_path / "other", **{field: value})
    error = refused_import(harness, path, ManifestMismatch)
    assert (error.metadata["field"], error.metadata["asserted"]) == (field, value)


def test_a_state_under_another_kv_digest_is_refused(harness: Harness, tmp_path: Path) -> None:
    source = fresh(kv_digest="foreign")
    source.ensure(raw(TEXT))
    export(source, tmp_path / "s")
    error = refused_import(harness, tmp_path / "s", ManifestMismatch)
    assert error.metadata["field"] == "kv_digest"
    assert (error.metadata["asserted"], error.metadata["actual"]) == ("foreign", "kv")


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_token_ids_that_the_model_does_not_have_are_refused(
    harness: Harness, state: Path, tmp_path: Path, token: int
) -> None:
    tokens = header_of(state).tokens
    tokens[3] = token
    path = rewritten(
        state, tmp_path / "x", token_ids=tokens.tobytes(), chain=token_chain("kv", tokens)
    )
    refused_import(harness, path, DigestMismatch)


def test_a_range_computed_after_other_tokens_is_refused(harness: Harness, tmp_path: Path) -> None:
    source = fresh()
    source.ensure(raw(TEXT))
    size = harness.ensure(raw(OTHER)).prefix
    export(source, tmp_path / "s", begin=size)
    error = refused_import(harness, tmp_path / "s", ManifestMismatch)
    assert (error.metadata["reason"], error.metadata["position"]) == ("tokens", "0")


@pytest.mark.parametrize("begin", [5, 40])
def test_a_range_that_does_not_begin_where_the_session_ends_is_refused(
    harness: Harness, tmp_path: Path, begin: int
) -> None:
    source = fresh()
    source.ensure(raw(TEXT))
    export(source, tmp_path / "s", begin=begin)
    error = refused_import(harness, tmp_path / "s", InvalidRequest, TEXT[:30])
    assert (error.metadata["field"], error.metadata["value"]) == ("begin", str(begin))


def test_a_state_beyond_the_window_is_refused_with_the_numbers(state: Path, tmp_path: Path) -> None:
    error = refused_import(fresh(window=40), state, ContextOverflow)
    assert error.metadata["drop_tokens"] == "10"
    assert error.metadata["effective"] == "40"


@pytest.mark.parametrize("path", ["relative", "", "/", "a\0b"])
def test_a_path_that_is_not_absolute_is_refused(harness: Harness, path: str) -> None:
    refused_import(harness, path, InvalidRequest)


def test_a_missing_file_or_folder_is_refused(harness: Harness, tmp_path: Path) -> None:
    refused_import(harness, tmp_path / "none", SnapshotNotFound)
    refused_import(harness, tmp_path / "none" / "s", SnapshotNotFound)
    refused_import(harness, tmp_path, InvalidRequest)


@pytest.mark.parametrize("fatal", [False, True])
@pytest.mark.parametrize("accepted", range(4))
def test_an_engine_that_refuses_in_the_middle_leaves_what_is_held(
    harness: Harness, state: Path, accepted: int, fatal: bool
) -> None:
    harness.engine.refuse_imports_after = accepted
    harness.engine.refuses_fatally = fatal
    error = refused_import(harness, state, DigestMismatch)
    assert error.metadata["cause"] == "engine"
    assert harness.explain().slot_cells == 256


@pytest.mark.parametrize("accepted", range(3))
def test_an_engine_that_refuses_a_range_in_the_middle_leaves_what_is_held(
    harness: Harness, tmp_path: Path, accepted: int
) -> None:
    lines = TEXT.splitlines(keepends=True)
    size = harness.ensure(raw(lines[0])).prefix
    source = fresh()
    source.ensure(raw(TEXT))
    export(source, tmp_path / "s", begin=size)
    harness.engine.refuse_imports_after = accepted
    with pytest.raises(DigestMismatch) as refused:
        import_(harness, tmp_path / "s")
    assert refused.value.metadata["begin"] == str(size + 16 * accepted)
    assert harness.ensure(raw(lines[0])).reused == size
    assert harness.explain().retained == 0
    assert import_(harness, tmp_path / "s").tokens == 50 - size
    assert harness.ensure(raw(TEXT)).reused == 50
    harness.check_records()


def test_a_fatal_refusal_within_the_sessions_own_context_ends_the_session(
    harness: Harness, state: Path
) -> None:
    harness.engine.refuse_imports_after, harness.engine.refuses_fatally = 1, True
    with pytest.raises(SessionFatal):
        import_(harness, state)
    with pytest.raises(SessionFatal, match="Open a new session"):
        harness.ensure(raw(TEXT))


def test_a_file_that_changes_while_it_is_imported_is_refused(harness: Harness, state: Path) -> None:
    """What goes to the engine is what was verified: nothing is read a second time."""

    class Changing(FakeOp):
        def beat(self) -> None:
            super().beat()
            if self.beats == 1:  # the fourth chunk isn't read yet; nor may be those before it
                flipped(state, -1, state)

    size = harness.ensure(raw(OTHER)).prefix
    with pytest.raises(DigestMismatch):
        import_(harness, state, op=Changing())
    assert harness.engine.imported < 64
    assert harness.ensure(raw(OTHER)).reused == size


@pytest.mark.parametrize("polls", range(9))
def test_a_cancelled_import_changes_nothing(harness: Harness, state: Path, polls: int) -> None:
    size = harness.ensure(raw(OTHER)).prefix
    taken = import_(harness, state, op=FakeOp(cancel_at=polls))
    if polls == 8:  # for each chunk one for reading it and one
        assert (taken.cancelled, taken.tokens) == (False, 50)
        return
    assert (taken.cancelled, taken.tokens, taken.resident) == (True, 0, size)
    assert harness.ensure(raw(OTHER)).reused == size
    assert harness.explain().slot_cells == 256


def test_a_chunk_that_memory_has_no_room_for_is_refused(
    harness: Harness, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryGuard, "spare_bytes", lambda self: 100)
    error = refused_import(harness, state, InsufficientMemory)
    assert error.metadata["needed_bytes"] == "256"


# --- refusals of an export -----------------------------------------------------------------------


def refused_export(harness: Harness, path: Path | str, kind: type[ModeldError]) -> ModeldError:
    size = harness.ensure(raw(TEXT)).prefix
    before = harness.explain()
    with pytest.raises(kind) as caught:
        export(harness, path)
    assert harness.explain() == before
    assert harness.ensure(raw(TEXT)).reused == size
    return caught.value


def test_an_export_never_overwrites_and_makes_no_folders(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("precious")
    for path in (tmp_path / "there", tmp_path / "none" / "s", "relative", ""):
        refused_export(harness, path, InvalidRequest)
    assert (tmp_path / "there").read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("writes", range(5))
def test_a_full_disk_leaves_no_file_and_the_session_as_it_was(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    real: Callable[[int, bytes], int] = os.write
    left = writes

    def full(fd: int, data: bytes) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    harness.ensure(raw(TEXT))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        refused_export(harness, tmp_path / "s", StorageFull)
    assert list(tmp_path.iterdir()) == []
    assert export(harness, tmp_path / "s").tokens == 50


def test_a_copy_that_memory_has_no_room_for_leaves_no_file(
    harness: Harness, tmp_path: Path
) -> None:
    harness.engine.most_exported = 15
    refused_export(harness, tmp_path / "s", InsufficientMemory)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("polls", range(10))
def test_a_cancelled_export_leaves_no_file(harness: Harness, tmp_path: Path, polls: int) -> None:
    harness.ensure(raw(TEXT))
    written = export(harness, tmp_path / "s", op=FakeOp(cancel_at=polls))
    if polls == 9:  # for each chunk one and one for writing it, and one for the sync
        assert (written.cancelled, written.tokens) == (False, 50)
        return
    assert (written.cancelled, written.tokens, written.digest) == (True, 0, "")
    assert list(tmp_path.iterdir()) == []


# --- fork ----------------------------------------------------------------------------------------


def test_a_fork_goes_on_as_its_source_would_and_neither_hurts_the_other(harness: Harness) -> None:
    harness.turn(raw(TEXT), raw("go on"), options(6), turn_id="t")
    made = fork(harness, "a", "b")
    source = harness.explain("a")
    assert (made.copied, made.resident, made.retained) == (source.resident, source.resident, 0)
    forked = harness.explain("b")
    assert forked.segments == source.segments
    assert (forked.turn_ids, forked.seen_tokens) == (source.turn_ids, source.seen_tokens)
    assert (forked.counters["copied_tokens"], forked.counters["evaluated_tokens"]) == (
        made.copied, 0,
    )  # fmt: skip
    ops = {name: FakeOp() for name in "ab"}
    for name, op in ops.items():
        assert harness.decode(options(5), name, op).prefilled == 1
    assert ops["a"].ids == ops["b"].ids
    harness.turn(raw(OTHER), raw("x"), options(3), "b")
    assert harness.explain("a").turn_ids == ["t", "t1"]
    assert harness.explain("b").turn_ids == ["t", "t2", "t3"]
    harness.close("b", discard=True)
    op = FakeOp()
    harness.turn(raw(TEXT), raw("and"), op=op)
    assert op.ids == harness.fresh_answer(raw(TEXT), raw("and"))[1]
    harness.check_records()


def test_a_fork_outlives_its_source(harness: Harness) -> None:
    size = harness.ensure(raw(TEXT)).prefix
    fork(harness, "a", "b")
    harness.close("a", discard=True)
    assert harness.ensure(raw(TEXT), "b").reused == size
    op = FakeOp()
    harness.turn(raw(TEXT), raw("go on"), session_id="b", op=op)
    assert op.ids == harness.fresh_answer(raw(TEXT), raw("go on"))[1]


def test_a_forked_chat_knows_the_answers_of_its_source() -> None:
    harness = fresh(prompt_format="chat", window=512)
    harness.turn(chat(("system", "be brief")), chat(("user", "hello")), options(6), turn_id="t")
    fork(harness, "a", "b")
    conversation = chat(("system", "be brief"), ("user", "hello"), turn_ref("t"))
    statuses = [harness.ensure(conversation, name) for name in "ab"]
    assert statuses[0].reused == statuses[1].reused > 20
    assert statuses[1].turns_recomputed == 0
    harness.check_records()


def test_a_fork_of_a_session_without_a_prompt_is_an_empty_one(harness: Harness) -> None:
    made = fork(harness, "a", "b")
    assert (made.copied, made.resident, made.retained) == (0, 0, 0)
    assert harness.ensure(raw(TEXT), "b").prefilled == 50


def test_a_fork_without_a_context_to_be_had_is_refused(harness: Harness) -> None:
    size = harness.ensure(raw(TEXT)).prefix
    for name in "bcd":
        fork(harness, "a", name)
    with pytest.raises(InsufficientMemory) as refused:
        fork(harness, "a", "e")
    assert refused.value.metadata["sessions"] == "4"
    with pytest.raises(SessionNotFound):
        harness.explain("e")
    assert harness.ensure(raw(TEXT)).reused == size


def test_a_fork_that_the_engine_does_not_copy_is_refused_and_leaves_no_context() -> None:
    harness = fresh(FakeEngine(copies=False))
    size = harness.ensure(raw(TEXT)).prefix
    with pytest.raises(UnsupportedFeature) as refused:
        fork(harness, "a", "b")
    assert refused.value.metadata["capability"] == "prefix_copy"
    assert harness.explain().slot_cells == 256
    assert harness.ensure(raw(TEXT)).reused == size


def test_a_fork_under_an_id_that_is_open_is_refused(harness: Harness) -> None:
    for new in ("a", "b"):
        harness.open("b") if new == "b" else None
        with pytest.raises(InvalidRequest) as refused:
            fork(harness, "a", new)
        assert refused.value.metadata["field"] == "new_session_id"


# --- trim ----------------------------------------------------------------------------------------


def test_what_is_trimmed_is_evaluated_again_when_it_is_needed(harness: Harness) -> None:
    harness.turn(raw(TEXT), raw("go on"), options(6))
    session = harness.core.model.sessions.by_id["a"]
    known = len(session.assembled.tokens) + 6  # type: ignore[union-attr]
    held = len(session.entry)
    cut = trim(harness, 20)
    assert (cut.dropped, cut.resident, cut.retained) == (held - 20, 20, 0)
    op = FakeOp()
    assert harness.decode(options(6), op=op).prefilled == known - 20
    whole = harness.fresh_answer(raw(TEXT), raw("go on"), options(12))[1]
    assert op.ids == whole[6:]
    harness.check_records()


def test_a_trim_takes_what_is_retained_first(harness: Harness) -> None:
    harness.ensure(raw(TEXT))
    head = harness.ensure(raw("the world")).prefix
    cut = trim(harness, head + 5)
    assert (cut.dropped, cut.resident, cut.retained) == (45 - head, head, 5)
    assert harness.ensure(raw(TEXT)).reused == head + 5


@pytest.mark.parametrize("keep", [-1, 51])
def test_a_trim_beyond_what_is_held_is_refused(harness: Harness, keep: int) -> None:
    harness.ensure(raw(TEXT))
    with pytest.raises(InvalidRequest) as refused:
        trim(harness, keep)
    assert refused.value.metadata["allowed"].startswith("0 to 50")
    assert harness.ensure(raw(TEXT)).reused == 50


def test_a_memory_that_cannot_go_back_says_so(harness: Harness) -> None:
    harness = fresh(FakeEngine(trimmable=False))
    harness.ensure(raw(TEXT))
    with pytest.raises(UnsupportedFeature) as refused:
        trim(harness, 20)
    assert refused.value.metadata["capability"] == "tail_removal"
    assert harness.ensure(raw(TEXT)).reused == 50
    assert trim(harness, 50).dropped == 0
    assert trim(harness, 0).dropped == 50


def test_what_another_kv_digest_left_in_a_context_is_not_the_sessions(tmp_path: Path) -> None:
    harness = Harness(max_contexts=1)
    harness.open("old", kv_digest="foreign")
    harness.ensure(raw(TEXT), "old")
    harness.close("old")
    assert harness.open("a").retained == 50
    with pytest.raises(InvalidRequest, match="holds tokens"):
        export(harness, tmp_path / "s")
    source = fresh()
    source.ensure(raw(TEXT))
    export(source, tmp_path / "s")
    assert import_(harness, tmp_path / "s").tokens == 50
    assert harness.ensure(raw(TEXT)).reused == 50
    harness.check_records()
