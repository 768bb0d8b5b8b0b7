"""Whole sessions into a folder and back, what is written of them, and refusals that cost nothing.

On the fake engine, whose state is a hash of every token before it: KV that came back in a wrong
place answers otherwise.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from modeld.shared.errors import (
    ContextOverflow,
    DigestMismatch,
    InsufficientMemory,
    InvalidRequest,
    ManifestMismatch,
    ModeldError,
    SessionFatal,
    SnapshotNotFound,
    StorageFull,
    UnsupportedFeature,
)
from modeld.shared.messages import ImageIn, OpenOp, SaveResult, Status
from modeld.workers import residency, saving
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.pooled_context import PooledContext
from modeld.workers.session_record import encode_record, read_record
from tests.support.core_harness import FakeOp, Harness, chat, options, raw, turn_ref
from tests.support.fake_engine import FakeEngine
from tests.support.residency import flipped, fork, trim
from tests.support.saved import content, prune, ranges, restore, save, session_of, told

TEXT = "the world is held here\nand a line more of it\nand one behind\n"  # 50 tokens
OTHER = "quite another beginning\n"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "CHUNK_TOKENS", 16)
    monkeypatch.setattr(saving, "CUT_TOKENS", 16)


def fresh(engine: FakeEngine | None = None, **how: Any) -> Harness:
    made = Harness(engine)
    made.open(**how)
    return made


@pytest.fixture
def harness() -> Harness:
    return fresh()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, SaveResult]:
    """A conversation in a folder of its own."""
    source, folder = fresh(), tmp_path / "saved"
    folder.mkdir()
    source.turn(raw(TEXT), raw("go on"), options(8), turn_id="first")
    return folder, save(source, folder)


# --- what comes back -----------------------------------------------------------------------------


def test_a_session_goes_on_in_another_worker_as_if_nothing_had_been(tmp_path: Path) -> None:
    source, other = fresh(), fresh()
    source.turn(raw(TEXT), raw("go on"), options(8), turn_id="first")
    before = told(source)
    made = save(source, tmp_path)
    assert told(source) == before
    assert made.tokens == before.resident
    assert (made.seen_tokens, made.turns, made.exact) == (before.seen_tokens, 1, True)
    assert not made.cancelled
    sizes = {name: len(data) for name, data in content(tmp_path).items()}
    assert sizes == {made.record: made.record_bytes} | {p.name: p.file_bytes for p in made.parts}
    assert made.written_bytes == sum(sizes.values())

    back = restore(other, tmp_path, made.record)
    assert (back.tokens, back.resident, back.retained) == (made.tokens, before.resident, 0)
    assert (back.seen_tokens, back.turn_ids) == (before.seen_tokens, ["first"])
    assert (back.available, back.exact, back.cancelled) == (before.available, True, False)
    assert told(other) == before
    op, undisturbed = FakeOp(), FakeOp()
    assert other.decode(options(9), op=op).prefilled == 1  # the last answer's last token
    source.decode(options(9), op=undisturbed)
    assert op.ids == undisturbed.ids
    assert other.engine.evaluated == 9
    assert other.explain().counters == source.explain().counters
    other.check_records()


def test_the_next_turn_finds_all_of_it_and_generated_turns_stand(tmp_path: Path) -> None:
    source = fresh(prompt_format="chat", window=512)
    source.turn(chat(("system", "be brief")), chat(("user", "hello")), options(9), turn_id="t1")
    made = save(source, tmp_path)
    other = fresh(prompt_format="chat", window=512)
    back = restore(other, tmp_path, made.record)
    system, asked = ("system", "be brief"), ("user", "hello")
    said = []
    for harness in (source, other):
        op, prefix = FakeOp(), chat(system, asked, turn_ref("t1"))
        harness.turn(prefix, chat(("user", "more")), options(6), op=op, turn_id="t2")
        said.append((op.ids, [msgspec.structs.replace(s, seconds=0.0) for s in op.of(Status)]))
    assert said[0] == said[1]
    assert (said[1][1][0].reused, said[1][1][0].turns_recomputed) == (made.tokens, 0)
    assert said[1][1][0].prefilled < 5  # the answer's last token and the end of its message
    assert back.turn_ids == ["t1"]
    assert other.explain().turn_ids == ["t1", "t2"]
    other.check_records()


def test_a_prefix_that_was_only_ensured_comes_back_with_its_segments(
    harness: Harness, tmp_path: Path
) -> None:
    size = harness.ensure(raw(TEXT, OTHER)).prefix
    made = save(harness, tmp_path)
    other = fresh()
    restore(other, tmp_path, made.record)
    assert other.explain().segments == harness.explain().segments
    status = other.suffix(raw("go on"))
    assert (status.prefix, status.prefilled) == (size, status.suffix)


def test_what_is_retained_stays_out(harness: Harness, tmp_path: Path) -> None:
    harness.ensure(raw(TEXT))
    head = harness.ensure(raw("the world")).prefix
    made = save(harness, tmp_path)
    assert made.tokens == head
    other = fresh()
    assert restore(other, tmp_path, made.record).retained == 0


def test_a_session_without_a_prompt_is_saved_too(harness: Harness, tmp_path: Path) -> None:
    made = save(harness, tmp_path)
    assert (made.tokens, made.parts) == (0, [])
    other = fresh()
    other.turn(raw(TEXT), raw("go on"), options(3))
    back = restore(other, tmp_path, made.record)
    assert (back.tokens, back.resident, back.turn_ids) == (0, 0, [])
    assert session_of(other).assembled is None


def test_a_cancelled_prefill_is_saved_as_far_as_it_came(harness: Harness, tmp_path: Path) -> None:
    harness.turn(raw(TEXT), raw("go on"), op=FakeOp(cancel_at=3))
    before = told(harness)
    assert 0 < before.resident < 50
    made = save(harness, tmp_path)
    other = fresh()
    restore(other, tmp_path, made.record)
    assert told(other) == before
    op = FakeOp()
    other.turn(raw(TEXT), raw("go on"), op=op)
    assert op.ids == harness.fresh_answer(raw(TEXT), raw("go on"))[1]


def test_a_conversation_under_eviction_comes_back_with_what_is_parked_and_gone(
    tmp_path: Path,
) -> None:
    def opened() -> Harness:
        made = Harness()
        made.run(
            OpenOp(
                session_id="a", prompt_format="raw", window=1024, k_type="f16", v_type="f16",
                kv_digest="kv", runtime_digest="rt", overflow="evict",
            )
        )  # fmt: skip
        return made

    try:
        source = opened()
    except UnsupportedFeature:
        pytest.fail("the fake engine doesn't serve overflow evict")
    text = "".join(f"line {n} of many\n" for n in range(200))
    source.turn(raw(text), raw("go on"), options(8))
    before = told(source)
    assert before.gone + before.parked > 500
    made = save(source, tmp_path)
    assert made.tokens == before.resident < 1024
    other = opened()
    restore(other, tmp_path, made.record)
    after = told(other)
    assert (after.resident, after.gone + after.parked) == (
        before.resident,
        before.gone + before.parked,
    )
    ops = FakeOp(), FakeOp()
    for harness, op in zip((source, other), ops, strict=True):
        harness.decode(options(6), op=op)
    assert ops[0].ids == ops[1].ids
    with pytest.raises(ManifestMismatch) as refused:
        restore(fresh(window=1024), tmp_path, made.record)
    assert refused.value.metadata["field"] == "overflow"


def test_exact_is_said_only_where_types_were_seen_and_the_runtime_is_the_same(
    tmp_path: Path,
) -> None:
    for k_type, exact in (("f16", True), ("q8_0", False)):
        source, folder = fresh(k_type=k_type), tmp_path / k_type
        folder.mkdir()
        source.ensure(raw(TEXT))
        made = save(source, folder)
        assert made.exact is exact
        other = fresh(k_type=k_type)
        assert restore(other, folder, made.record).exact is exact
    session_of(other).runtime_digest = "other"
    made = save(source, folder)
    assert "bit-equal" in restore(other, folder, made.record).exact_reason
    other = fresh()
    session_of(other).runtime_digest = "other"
    record = next(path.name for path in (tmp_path / "f16").glob("session-*"))
    back = restore(other, tmp_path / "f16", record)
    assert (back.exact, back.tokens) == (False, 50)
    assert "runtime_digest" in back.exact_reason


# --- what is written -----------------------------------------------------------------------------


def test_only_what_is_new_is_written(harness: Harness, tmp_path: Path) -> None:
    lines = TEXT.splitlines(keepends=True)
    sizes, results = [], []
    for count in (1, 2, 3):
        sizes.append(harness.ensure(raw("".join(lines[:count]))).prefix)
        results.append(save(harness, tmp_path))
        prune(tmp_path, results[-1])
        other = fresh()
        assert restore(other, tmp_path, results[-1].record).tokens == sizes[-1]
        assert other.ensure(raw("".join(lines[:count]))).reused == sizes[-1]
    assert ranges(results[-1]) == [*pairwise([0, *sizes])]
    for before, after in pairwise(results):
        assert after.parts[:-1] == before.parts
        assert after.written_bytes == after.record_bytes + after.parts[-1].file_bytes
    again = save(harness, tmp_path)
    assert again.parts == results[-1].parts
    assert again.written_bytes == again.record_bytes
    assert again.record_digest == results[-1].record_digest
    assert again.record != results[-1].record  # nothing is overwritten, not even by the same


def test_a_suffix_that_changes_costs_itself_only(harness: Harness, tmp_path: Path) -> None:
    size = harness.ensure(raw(TEXT)).prefix
    harness.turn(raw(TEXT), raw("go on"), options(4))
    first = save(harness, tmp_path)
    assert ranges(first)[0] == (0, size)
    harness.turn(raw(TEXT), raw("stop here"), options(4))
    second = save(harness, tmp_path)
    assert second.parts[0] == first.parts[0]
    assert second.written_bytes == second.record_bytes + second.parts[1].file_bytes


def test_a_part_is_cut_where_a_conversation_went_another_way(
    harness: Harness, tmp_path: Path
) -> None:
    head = "".join(TEXT.splitlines(keepends=True)[:2])
    same = harness.ensure(raw(head)).prefix
    harness.ensure(raw(TEXT))
    save(harness, tmp_path)
    for end in ("one way of it", "and another"):
        harness.ensure(raw(head + end))
        made = save(harness, tmp_path)
        assert ranges(made)[0] == (0, same)
    assert made.written_bytes == made.record_bytes + made.parts[1].file_bytes


def test_a_part_that_ends_within_a_block_is_replaced_from_the_block_on(tmp_path: Path) -> None:
    harness = fresh(FakeEngine(state_block=8))
    lines = TEXT.splitlines(keepends=True)
    sizes = []
    for count in (1, 2, 3):
        sizes.append(harness.ensure(raw("".join(lines[:count]))).prefix)
        made = save(harness, tmp_path)
    assert all(size % 8 for size in sizes)
    assert ranges(made) == [*pairwise([0, *(size // 8 * 8 for size in sizes), sizes[-1]])]
    assert len([name for name in content(tmp_path) if name.startswith("kv-")]) == 6
    other = fresh(FakeEngine(state_block=8))
    restore(other, tmp_path, made.record)
    assert other.ensure(raw(TEXT)).reused == 50


def test_resident_tokens_that_end_within_a_block_are_saved_alone(tmp_path: Path) -> None:
    harness = fresh(FakeEngine(state_block=8))
    harness.ensure(raw(TEXT))
    head = harness.ensure(raw(TEXT.splitlines(keepends=True)[0])).prefix
    made = save(harness, tmp_path)
    assert made.tokens == head
    assert head % 8


def test_equal_tokens_with_other_kv_are_written_anew(harness: Harness, tmp_path: Path) -> None:
    size = harness.ensure(raw(TEXT)).prefix
    first = save(harness, tmp_path)
    trim(harness, 20)
    harness.ensure(raw(TEXT))  # evaluated again, to the same bits
    assert save(harness, tmp_path).parts == first.parts
    trim(harness, 20)
    harness.ensure(raw(TEXT))
    context = session_of(harness).entry.engine_context
    context.hashes[30] ^= 1  # type: ignore[attr-defined]  # to others
    second = save(harness, tmp_path)
    assert ranges(second) == [(0, size)]
    assert second.parts[0].digest != first.parts[0].digest
    other = fresh()
    restore(other, tmp_path, second.record)
    assert session_of(other).entry.engine_context.hashes == context.hashes  # type: ignore[attr-defined]


def test_a_conversation_that_moved_to_another_context_is_not_written_again(
    harness: Harness, tmp_path: Path
) -> None:
    harness.ensure(raw(TEXT))
    first = save(harness, tmp_path)
    fork(harness, "a", "b")
    harness.ensure(raw(OTHER))
    harness.ensure(raw(TEXT))  # copied from b
    assert harness.explain().counters["copied_tokens"] > 0
    assert save(harness, tmp_path).parts == first.parts
    (tmp_path / "b").mkdir()
    assert save(harness, tmp_path / "b", "b").written_bytes > first.parts[0].file_bytes


@pytest.mark.parametrize("how", ["removed", "replaced", "longer", "link"])
def test_a_part_that_is_not_what_was_written_is_written_again(
    harness: Harness, tmp_path: Path, how: str
) -> None:
    harness.ensure(raw(TEXT))
    first = save(harness, tmp_path)
    path = tmp_path / first.parts[0].name
    data = path.read_bytes()
    if how == "longer":
        with path.open("ab") as file:
            file.write(b"x")
    else:
        path.unlink()
    if how == "replaced":
        path.write_bytes(data[::-1])
    if how == "link":
        path.symlink_to("/dev/null")
    foreign = content(tmp_path) if how != "link" else {}
    second = save(harness, tmp_path)
    assert second.written_bytes > len(data)
    if how == "removed":
        assert second.parts == first.parts
    else:
        assert second.parts[0].name not in (first.parts[0].name, first.record)
        assert foreign.items() <= content(tmp_path).items()
    other = fresh()
    assert restore(other, tmp_path, second.record).tokens == 50


def test_more_parts_than_a_folder_takes_become_one(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "MAX_PARTS", 3)
    text, counts = "", []
    for number in range(8):
        text += f"line {number}\n"
        size = harness.ensure(raw(text)).prefix
        made = save(harness, tmp_path)
        prune(tmp_path, made)
        counts.append(len(made.parts))
    assert counts == [1, 2, 3, 1, 2, 3, 1, 2]
    other = fresh()
    restore(other, tmp_path, made.record)
    assert other.ensure(raw(text)).reused == size


def test_a_memory_without_ranges_is_one_part_each_time(tmp_path: Path) -> None:
    def engine() -> FakeEngine:
        return FakeEngine(ranges=False, trimmable=False)

    harness = fresh(engine())
    for number, count in enumerate((1, 2, 3)):
        text = "".join(TEXT.splitlines(keepends=True)[:count])
        size = harness.ensure(raw(text)).prefix
        made = save(harness, tmp_path)
        assert ranges(made) == [(0, size)]
        assert len(content(tmp_path)) == 2 * (number + 1)
    again = save(harness, tmp_path)
    assert again.parts == made.parts
    assert again.written_bytes == again.record_bytes
    other = fresh(engine())
    restore(other, tmp_path, made.record)
    op = FakeOp()
    other.turn(raw(TEXT), raw("go on"), op=op)
    assert op.ids == harness.fresh_answer(raw(TEXT), raw("go on"))[1]
    assert other.engine.evaluated < 30


def test_after_a_restart_a_folder_is_written_on_with(tmp_path: Path) -> None:
    source, text = fresh(), TEXT
    source.turn(raw(text), raw("go on"), options(8))
    made = save(source, tmp_path)
    for number in range(3):
        parts = {part.name for part in made.parts}
        source = fresh()
        restore(source, tmp_path, made.record)
        source.decode(options(3), turn_id=f"again {number}")
        made = save(source, tmp_path)
        prune(tmp_path, made)
        assert parts < {part.name for part in made.parts}
        assert len(made.parts) == len(parts) + 1
        assert made.turns == number + 2


def test_a_fork_does_not_know_its_sources_folder(harness: Harness, tmp_path: Path) -> None:
    harness.ensure(raw(TEXT))
    first = save(harness, tmp_path)
    fork(harness, "a", "b")
    harness.ensure(raw(TEXT + "b\n"), "b")
    assert save(harness, tmp_path, "b").parts[0].name != first.parts[0].name
    assert harness.explain("a").resident == 50


def test_folders_that_were_saved_to_long_ago_are_forgotten(
    harness: Harness, tmp_path: Path
) -> None:
    harness.ensure(raw(TEXT))
    for name in "abcdefg":
        (tmp_path / name).mkdir()
        save(harness, tmp_path / name)
    assert [Path(name).name for name in session_of(harness).saves] == [*"defg"]
    assert save(harness, tmp_path / "e").written_bytes < save(harness, tmp_path / "a").written_bytes


# --- refusals of a save --------------------------------------------------------------------------


def refused_save(harness: Harness, folder: Path, kind: type[ModeldError]) -> ModeldError:
    before, there = told(harness), content(folder)
    with pytest.raises(kind) as caught:
        save(harness, folder)
    assert told(harness) == before
    assert content(folder) == there
    return caught.value


@pytest.mark.parametrize("writes", range(9))
def test_a_full_disk_leaves_the_folder_as_it_was(
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

    harness.ensure(raw("the world"))
    first = save(harness, tmp_path)
    harness.turn(raw(TEXT), raw("go on"), options(4))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        if writes < 7:  # 3 and 1 chunks, each file's head, and the record
            refused_save(harness, tmp_path, StorageFull)
        else:
            assert save(harness, tmp_path).tokens > 50
            return
    other = fresh()
    assert restore(other, tmp_path, first.record).tokens == first.tokens
    second = save(harness, tmp_path)
    assert second.parts[0] == first.parts[0]


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize("after", range(3))
def test_a_disk_that_fails_when_asked_to_keep_leaves_the_folder_as_it_was(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    real, left = getattr(os, call), after

    def failing(*given: object) -> object:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*given)

    harness.ensure(raw(TEXT))
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing)
        if (call, after) == ("rename", 2):  # two files
            assert save(harness, tmp_path).tokens == 50
        else:
            refused_save(harness, tmp_path, StorageFull)


@pytest.mark.parametrize("polls", range(9))
def test_a_cancelled_save_leaves_the_folder_as_it_was(
    harness: Harness, tmp_path: Path, polls: int
) -> None:
    harness.ensure(raw("the world"))
    first = save(harness, tmp_path)
    harness.ensure(raw(TEXT))
    before, there = told(harness), content(tmp_path)
    made = save(harness, tmp_path, op=FakeOp(cancel_at=polls))
    assert told(harness) == before
    if polls == 8:  # for each chunk one and one for writing it, and one for each file's sync
        assert (made.cancelled, made.tokens) == (False, 50)
    else:
        assert (made.cancelled, made.tokens, made.record, made.parts) == (True, 0, "", [])
        assert content(tmp_path) == there
        assert save(harness, tmp_path).parts[0] == first.parts[0]


def test_memory_that_has_no_room_for_a_chunk_is_refused(harness: Harness, tmp_path: Path) -> None:
    harness.ensure(raw(TEXT))
    harness.engine.most_exported = 15
    refused_save(harness, tmp_path, InsufficientMemory)


@pytest.mark.parametrize("folder", ["", "relative", "/", "/nowhere/at/all", "/etc/passwd"])
def test_a_folder_that_cannot_be_is_refused(harness: Harness, folder: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        save(harness, folder) if folder != "/" else save(harness, "/proc")
    assert refused.value.metadata["field"] in ("folder", "path")
    with pytest.raises(InvalidRequest if folder != "/" else SnapshotNotFound):
        restore(harness, folder, "session-1")


def test_an_engine_that_gives_no_state_out_says_so(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.ensure(raw(TEXT))

    def nothing(self: PooledContext, begin: int, end: int) -> None:
        raise UnsupportedFeature("it keeps it", metadata={"capability": "state.blocks"})

    with monkeypatch.context() as patched:
        patched.setattr(PooledContext, "export_state", nothing)
        error = refused_save(harness, tmp_path, UnsupportedFeature)
    assert error.metadata["capability"] == "snapshot"
    with monkeypatch.context() as patched:
        patched.setattr(PooledContext, "samples_itself", object())
        error = refused_save(harness, tmp_path, UnsupportedFeature)
    assert error.metadata["capability"] == "snapshot"


def test_a_prompt_with_images_is_refused(harness: Harness, tmp_path: Path) -> None:
    harness.ensure(raw(TEXT))
    asked = chat(("user", "look"))
    message = asked.segments[0].message
    assert message is not None
    message.images.append(ImageIn(data=b"", mime_type="image/png"))
    session_of(harness).suffix = asked
    error = refused_save(harness, tmp_path, UnsupportedFeature)
    assert "1 image(s)" in error.message


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ({"state.blocks": "yes: seen", "state.whole": "yes: seen"}, "yes: seen; of a session"),
        ({"state.blocks": "no: none", "state.whole": "yes: seen"}, "yes: seen; all of it"),
        ({"state.blocks": "no: a", "state.whole": "no: b"}, "no: b"),
        ({"state.blocks": "unknown: a", "state.whole": "unknown: a"}, "unknown: a"),
    ],
)
def test_what_can_be_saved_is_told_by_what_was_seen_at_load(
    states: dict[str, str], said: str
) -> None:
    answers = saving.capabilities(states)
    assert set(answers) == {"snapshot", "durable"}
    assert all(answer.startswith(said) for answer in answers.values())


# --- refusals of a restore -----------------------------------------------------------------------


def live() -> Harness:
    """A session with an answer, and part of what its context holds retained."""
    made = fresh()
    made.turn(raw(OTHER), raw("and so it goes on"), options(6), turn_id="mine")
    made.ensure(raw(OTHER[:9]))
    return made


def refused_restore(
    harness: Harness, folder: Path, record: str, kind: type[ModeldError], op: FakeOp | None = None
) -> ModeldError:
    """A refusal that leaves the session with the same content, answers and reuse."""
    before, held = told(harness), session_of(harness).entry.tokens.tolist()
    with pytest.raises(kind) as caught:
        restore(harness, folder, record, op=op)
    unchanged(harness, before, held)
    return caught.value


def unchanged(harness: Harness, before: object, held: list[int]) -> None:
    assert told(harness) == before
    assert session_of(harness).entry.tokens.tolist() == held
    if held:
        op = FakeOp()
        status = harness.ensure(raw(OTHER))
        assert (status.reused, status.prefilled) == (status.prefix, 0)
        harness.turn(raw(OTHER), raw("go on"), op=op)
        assert op.ids == harness.fresh_answer(raw(OTHER), raw("go on"))[1]
    harness.check_records()


def test_a_restore_replaces_what_is_held_and_the_slot_does_not_grow(
    saved: tuple[Path, SaveResult],
) -> None:
    folder, made = saved
    harness = live()
    back = restore(harness, folder, made.record)
    assert (back.resident, back.retained, back.slot_cells) == (made.tokens, 0, 256)
    assert back.turn_ids == ["first"]
    harness.check_records()


def test_every_flipped_byte_is_refused(saved: tuple[Path, SaveResult], tmp_path: Path) -> None:
    folder, made = saved
    harness = fresh()
    for name, data in content(folder).items():
        path = folder / name
        for at in range(0, len(data), 7):
            flipped(path, at, path)
            with pytest.raises((DigestMismatch, ManifestMismatch)) as refused:
                restore(harness, folder, made.record)
            version = name != made.record and 8 <= at < 12
            assert isinstance(refused.value, ManifestMismatch) == version
            flipped(path, at, path)
    assert session_of(harness).assembled is None
    assert len(session_of(harness).entry) == 0
    assert restore(harness, folder, made.record).tokens == made.tokens


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("how", ["missing", "truncated", "longer", "flipped", "another"])
def test_a_damaged_folder_changes_nothing(
    saved: tuple[Path, SaveResult], tmp_path: Path, which: int, how: str
) -> None:
    folder, made = saved
    name = [made.record, *(part.name for part in made.parts)][which]
    path, kind = folder / name, DigestMismatch
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
        kind = SnapshotNotFound  # type: ignore[assignment]
    elif how == "truncated":
        path.write_bytes(data[:-1])
    elif how == "longer":
        path.write_bytes(data + b"x")
    elif how == "flipped":
        flipped(path, -1, path)
    else:
        other, elsewhere = fresh(), tmp_path / "elsewhere"
        elsewhere.mkdir()
        other.turn(raw(OTHER * 3), raw("go on"), options(2))
        written = save(other, elsewhere)
        foreign = [written.record, *(part.name for part in written.parts)][which]
        path.write_bytes((elsewhere / foreign).read_bytes())
        if not which:  # a whole record, of parts that aren't here
            kind = SnapshotNotFound  # type: ignore[assignment]
    refused_restore(live(), folder, made.record, kind)


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"kv_digest": "foreign"}, "kv_digest"),
        ({"k_type": "q8_0"}, "k_type"),
        ({"prompt_format": "chat"}, "prompt_format"),
    ],
)
def test_another_identity_is_refused(
    saved: tuple[Path, SaveResult], how: dict[str, Any], field: str
) -> None:
    harness = fresh(**how)
    error = refused_restore(harness, saved[0], saved[1].record, ManifestMismatch)
    assert (error.metadata["reason"], error.metadata["field"]) == ("identity", field)
    assert error.metadata["actual"] == next(iter(how.values()))


@pytest.mark.parametrize(
    ("field", "value"),
    [("backend", "other"), ("build_digest", "b" * 64), ("state_layout", "rows-2")],
)
def test_another_engine_is_refused(saved: tuple[Path, SaveResult], field: str, value: str) -> None:
    folder, made = saved
    record = msgspec.structs.replace(read_record(folder, made.record), **{field: value})
    (folder / "changed").write_bytes(encode_record(record)[0])
    error = refused_restore(live(), folder, "changed", ManifestMismatch)
    assert (error.metadata["field"], error.metadata["asserted"]) == (field, value)


def test_another_template_is_refused_for_messages(tmp_path: Path) -> None:
    source = fresh(prompt_format="chat")
    source.turn(chat(("system", "s")), chat(("user", "hello")), options(3))
    made = save(source, tmp_path)
    template = source.engine.template
    assert template is not None
    other = Harness(FakeEngine(template=template + " "))
    other.open(prompt_format="chat")
    with pytest.raises(ManifestMismatch) as refused:
        restore(other, tmp_path, made.record)
    assert refused.value.metadata["field"] == "template_digest"


def test_ids_that_the_model_does_not_have_are_refused(saved: tuple[Path, SaveResult]) -> None:
    folder, made = saved
    record = read_record(folder, made.record)
    turn = msgspec.structs.replace(record.turns[0], answer_ids=(999).to_bytes(4, "little"))
    record = msgspec.structs.replace(record, turns=[turn])
    (folder / "changed").write_bytes(encode_record(record)[0])
    assert "ids" in refused_restore(live(), folder, "changed", DigestMismatch).message


def test_more_than_the_window_is_refused_with_the_numbers(
    saved: tuple[Path, SaveResult], tmp_path: Path
) -> None:
    harness = fresh(window=40)
    harness.ensure(raw(OTHER))
    error = refused_restore(harness, saved[0], saved[1].record, ContextOverflow)
    assert error.metadata["drop_tokens"] == str(saved[1].tokens - 40)
    source = fresh()
    source.turn(raw(TEXT), raw("go on"), op=FakeOp(cancel_at=3))  # few tokens of a long prompt
    made = save(source, tmp_path)
    assert made.tokens < 40
    error = refused_restore(harness, tmp_path, made.record, ContextOverflow)
    assert error.metadata["requested_tokens"] == "55"


def test_a_larger_window_takes_it(saved: tuple[Path, SaveResult]) -> None:
    harness = fresh(window=300)
    back = restore(harness, saved[0], saved[1].record)
    assert back.available == 300 - saved[1].tokens


@pytest.mark.parametrize("fatal", [False, True])
@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("empty", [False, True])
def test_an_engine_that_refuses_on_the_way_changes_nothing(
    saved: tuple[Path, SaveResult], accepted: int, fatal: bool, empty: bool
) -> None:
    folder, made = saved
    harness = fresh() if empty else live()
    harness.engine.refuse_imports_after = accepted
    harness.engine.refuses_fatally = fatal
    error = refused_restore(harness, folder, made.record, DigestMismatch)
    assert error.metadata["cause"] == "engine"
    assert harness.explain().slot_cells == 256
    assert restore(harness, folder, made.record).tokens == made.tokens


def test_an_empty_context_that_cannot_be_had_again_ends_the_session(
    saved: tuple[Path, SaveResult],
) -> None:
    harness = fresh()
    harness.engine.refuse_imports_after, harness.engine.refuses_fatally = 1, True
    harness.engine.cell_limit = 0
    with pytest.raises(InsufficientMemory):
        restore(harness, saved[0], saved[1].record)
    with pytest.raises(SessionFatal, match="Open a new session"):
        harness.ensure(raw(TEXT))


@pytest.mark.parametrize("polls", range(11))
@pytest.mark.parametrize("empty", [False, True])
def test_a_cancelled_restore_changes_nothing(
    saved: tuple[Path, SaveResult], polls: int, empty: bool
) -> None:
    folder, made = saved
    harness = fresh() if empty else live()
    before, held = told(harness), session_of(harness).entry.tokens.tolist()
    back = restore(harness, folder, made.record, op=FakeOp(cancel_at=polls))
    if polls >= 10:  # for each chunk one for reading it and one
        assert (back.cancelled, back.tokens) == (False, made.tokens)
        return
    assert (back.cancelled, back.tokens, back.resident) == (True, 0, before.resident)
    unchanged(harness, before, held)
    assert restore(harness, folder, made.record).tokens == made.tokens


def test_memory_that_has_no_room_for_a_chunk_changes_nothing(
    saved: tuple[Path, SaveResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = live()
    with monkeypatch.context() as patched:
        patched.setattr(MemoryGuard, "spare_bytes", lambda self: 100)
        refused_restore(harness, saved[0], saved[1].record, InsufficientMemory)
    # One at a time is enough.
    monkeypatch.setattr(MemoryGuard, "spare_bytes", lambda self: 256)
    assert restore(harness, saved[0], saved[1].record).tokens == saved[1].tokens


def test_without_a_second_context_what_is_held_stays(saved: tuple[Path, SaveResult]) -> None:
    folder, made = saved
    harness = Harness(max_contexts=1)
    harness.open()
    harness.turn(raw(OTHER), raw("and so it goes on"), options(6), turn_id="mine")
    harness.ensure(raw(OTHER[:9]))
    error = refused_restore(harness, folder, made.record, InsufficientMemory)
    assert error.metadata["max_contexts"] == "1"
    trim(harness, 0)
    assert restore(harness, folder, made.record).tokens == made.tokens


@pytest.mark.parametrize("damaged", [False, True])
def test_anothers_cache_gives_way_where_there_is_no_second_context(
    saved: tuple[Path, SaveResult], damaged: bool
) -> None:
    folder, made = saved
    harness = Harness(max_contexts=1)
    harness.open("old")
    harness.ensure(raw(OTHER), "old")
    harness.close("old")
    kept = harness.open("a").retained
    if damaged:
        part = folder / made.parts[-1].name
        flipped(part, -1, part)
        with pytest.raises(DigestMismatch):
            restore(harness, folder, made.record)
        assert harness.explain().retained == kept > 0
        assert harness.ensure(raw(OTHER)).reused == kept
        return
    assert restore(harness, folder, made.record).tokens == made.tokens
    assert harness.ensure(raw(TEXT)).reused == 50
    harness.check_records()
