"""Parked KV on slow disks, under cancels, in small budgets and over restarts: no worker is killed
for it, nothing is lost by it, and nothing stays for ever.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modeld.shared.errors import DigestMismatch, InsufficientMemory, SessionFatal
from modeld.shared.messages import (
    ForkOp,
    ImportOp,
    ImportResult,
    OpenOp,
    ParkOp,
    ParkResult,
    PromptIn,
    ResumeOp,
    SegmentIn,
    UnloadOp,
)
from modeld.workers import cold_disk, new_files
from modeld.workers.cold_store import BLOCK_TOKENS, HOLDS, ColdStore
from modeld.workers.new_files import Cancelled, Live
from modeld.workers.state_file import token_chains
from tests.support.batch_rig import BatchingFake
from tests.support.cold import (
    GIB,
    IDS,
    PLENTY,
    SIZE,
    A,
    B,
    Parked,
    answer,
    file_of,
    header,
    put,
    state_of,
    store,
    tokens_of,
)
from tests.support.core_harness import FakeOp, options, raw
from tests.support.evicting import Evicting, numbered
from tests.support.fake_engine import FakeContext
from tests.support.residency import export, fork

WHOLE_A = 680 * 16 + 4 * (256 + 512 + 680)  # bytes of A's three blocks in RAM


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a disk takes at once, so that it is slow with a block of some kilobytes."""
    monkeypatch.setattr(new_files, "PIECE_BYTES", 512)
    monkeypatch.setattr("modeld.workers.state_file.PIECE_BYTES", 512)


class Counting:
    """A ``Live`` that is cancelled after so many calls."""

    def __init__(self, most: int = PLENTY) -> None:
        self.calls, self.most = 0, most

    def __call__(self) -> None:
        self.calls += 1
        if self.calls > self.most:
            raise Cancelled


def served_by(kept: ColdStore, live: Live) -> None:
    kept.live = lambda: live


# --- slow disks and cancels


def test_a_block_s_way_to_a_slow_disk_and_back_shows_life_piece_by_piece(
    tmp_path: Path, small_pieces: None
) -> None:
    kept, live = store(ram=0, disk=PLENTY, folder=tmp_path), Counting()
    served_by(kept, live)
    key = put(kept, 1)
    assert live.calls >= 2 * SIZE // 512  # written, and waited for
    live.calls = 0
    assert kept.read(key) is not None
    assert live.calls >= SIZE // 512


def test_a_cancel_anywhere_in_a_write_leaves_the_block_in_ram_and_no_file(
    tmp_path: Path, small_pieces: None
) -> None:
    kept = store(ram=SIZE + IDS, disk=PLENTY, folder=tmp_path)
    first = put(kept, 1)
    for polls in itertools.count():
        served_by(kept, Counting(polls))
        try:
            put(kept, 2)  # the first goes to disk for it
            break
        except Cancelled:
            assert list(tmp_path.iterdir()) == []
            assert kept.ram_bytes == SIZE + IDS
            assert (kept.disk_bytes, kept.dropped, len(kept)) == (0, 0, 1)
            found = kept.read(first)
            assert found is not None
            assert np.array_equal(found, state_of(1))
    assert polls > SIZE // 512


def test_a_cancelled_reading_isn_t_taken_for_damage(tmp_path: Path, small_pieces: None) -> None:
    kept = store(ram=0, disk=PLENTY, folder=tmp_path)
    key = put(kept, 1)
    served_by(kept, Counting(3))
    with pytest.raises(Cancelled):
        kept.read(key)
    assert (kept.damaged, kept.has(key)) == (0, True)


def test_memory_that_is_asked_back_shows_life_and_is_freed_after_a_cancel_too(
    tmp_path: Path, small_pieces: None
) -> None:
    kept, live = store(disk=PLENTY, folder=tmp_path), Counting()
    keys = [put(kept, seed) for seed in range(1, 5)]
    served_by(kept, live)
    assert kept.shrink(2 * (SIZE + IDS)) == 2 * (SIZE + IDS)
    assert live.calls > 2 * SIZE // 512
    served_by(kept, Counting(0))
    assert kept.shrink(PLENTY) == 2 * (SIZE + IDS)
    assert [kept.has(key) for key in keys] == [True, True, False, False]
    assert kept.dropped == 2


def test_a_cancel_while_another_conversation_is_parked_loses_none_of_it(
    tmp_path: Path, small_pieces: None
) -> None:
    harness = Parked(ram=0, disk=GIB, folder=tmp_path)
    harness.open(window=1024)
    first = answer(harness, raw(A))
    kinds = set()
    for polls in (0, 1, 2, 5, 20, 40, 60, 80, 120, 10_000):
        op = FakeOp(cancel_at=polls)
        reached = harness.ensure(raw(B), op=op).resident
        assert op.beats >= min(polls, op.polls)
        status = harness.ensure(raw(A))
        assert (status.reused, status.prefilled) == (680, 0)
        kinds.add((status.restored > 0, reached == 680))
        harness.check_records()
        for path in tmp_path.iterdir():  # so that all of it is written again
            path.unlink()
        harness.parking.store.close()
    assert kinds >= {(False, False), (True, True)}
    assert answer(harness, raw(A)) == first


def test_a_parked_session_whose_way_back_was_cancelled_goes_on(tmp_path: Path) -> None:
    for polls in range(8):
        harness = Parked(ram=0, disk=GIB, folder=tmp_path / str(polls))
        (tmp_path / str(polls)).mkdir()
        harness.open("a", window=1024)
        first = answer(harness, raw(A))
        harness.run(ParkOp(session_id="a"), FakeOp())
        harness.open("b", window=1024)
        answer(harness, raw(B), "b")
        harness.close("b")
        harness.run(ResumeOp(session_id="a"), FakeOp(cancel_at=polls))
        assert answer(harness, raw(A)) == first
        harness.check_records()


def test_a_cancelled_parking_tells_what_it_stored_and_gives_the_context_up(tmp_path: Path) -> None:
    harness = Parked(ram=0, disk=GIB, folder=tmp_path)
    harness.open("a", window=1024)
    first = answer(harness, raw(A))
    parked = harness.run(ParkOp(session_id="a"), FakeOp(cancel_at=5))
    assert isinstance(parked, ParkResult)
    assert parked.parked == 256
    assert parked.lost > 400
    harness.open("b", window=900)  # the context goes, and is parked before
    harness.close("b", discard=True)
    assert harness.resume().missing == 0
    assert answer(harness, raw(A)) == first


def test_a_cancel_before_another_s_kv_is_copied_leaves_what_was_held() -> None:
    harness = Parked(max_contexts=2)
    harness.open("a", window=1024)
    harness.open("b", window=1024)
    harness.ensure(raw(B), "b")
    harness.ensure(raw(A), "a")
    harness.ensure(raw(B), "a", FakeOp(cancel_at=0))
    assert harness.core.cold_bytes == 0
    status = harness.ensure(raw(A), "a")
    assert (status.reused, status.restored, status.prefilled) == (680, 0, 0)
    harness.check_records()
    assert harness.ensure(raw(B), "a").copied == 680


def test_a_cancel_loses_nothing_of_a_context_that_goes_anyway() -> None:
    harness = Parked(max_contexts=2)
    harness.open("a", window=1024)
    harness.ensure(raw(A), "a")
    harness.close("a")
    op = OpenOp(
        session_id="b", prompt_format="raw", window=1024, k_type="f16", v_type="f16",
        kv_digest="other", runtime_digest="rt",
    )  # fmt: skip
    harness.engine.cell_limit = 1024  # no second one: it is taken
    harness.run(op)
    harness.ensure(raw(B), "b", FakeOp(cancel_at=0))
    assert len(harness.entry("b")) == 0
    harness.close("b")
    harness.open("c", window=900)
    assert harness.ensure(raw(A), "c").restored == 680


def test_a_cancelled_fork_loses_nothing_of_the_context_that_it_takes() -> None:
    harness = Parked(max_contexts=2)
    for name, text in (("a", A), ("b", B)):
        harness.open(name, window=1024)
        harness.ensure(raw(text), name)
    harness.close("b")
    harness.run(ForkOp(session_id="a", new_session_id="c"), FakeOp(cancel_at=0))
    assert harness.ensure(raw(B), "c").restored == 680
    assert harness.ensure(raw(A), "a").prefilled == 0


def test_a_cancelled_restore_leaves_the_contexts_that_it_would_have_taken(tmp_path: Path) -> None:
    harness = Parked(max_contexts=2)
    for name, text in (("a", A), ("b", B)):
        harness.open(name, window=1024)
        harness.ensure(raw(text), name)
    file = tmp_path / "b.kv"
    export(harness, file, session_id="b")
    harness.close("b")
    op = ImportOp(session_id="a", path=str(file))
    for polls in range(4):
        result = harness.run(op, FakeOp(cancel_at=polls))
        assert isinstance(result, ImportResult)
        assert result.cancelled
        harness.open("b", window=1024)
        assert harness.ensure(raw(B), "b").prefilled == 0
        assert harness.ensure(raw(A), "a").prefilled == 0
        harness.close("b")


def test_a_cancelled_parking_does_not_give_what_is_held_the_next_prompt_s_classes() -> None:
    harness = Parked()
    harness.open("a", window=1024)
    harness.ensure(PromptIn(segments=[SegmentIn(text=A, cache_class="task_pinned")]))
    ranks = harness.entry().ranks
    harness.ensure(raw(B), op=FakeOp(cancel_at=0))
    assert harness.entry().ranks == ranks != ()


def test_no_copy_of_what_is_held_stays_behind_an_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: set[int] = set()  # contexts that keep one, as streams of a batch do until they settle
    taken_out = FakeContext.export_state

    def exported(self: FakeContext, begin: int, end: int) -> object:
        copies.add(id(self))
        return taken_out(self, begin, end)

    monkeypatch.setattr(FakeContext, "export_state", exported)
    monkeypatch.setattr(FakeContext, "settle", lambda self: copies.discard(id(self)), raising=False)
    harness = Parked()
    harness.open("a", window=1024)
    harness.ensure(raw(A))
    harness.engine.most_exported = 300
    with pytest.raises(InsufficientMemory):
        export(harness, tmp_path / "a.kv")
    assert copies == set()
    assert harness.park().parked == 680
    assert copies == set()


def test_a_state_that_the_engine_refuses_at_its_end_leaves_the_session_what_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Parked(max_contexts=2)
    for name, text in (("a", A), ("b", B)):
        harness.open(name, window=1024)
        harness.ensure(raw(text), name)
    export(harness, tmp_path / "b.kv", session_id="b")
    harness.close("b")

    mine = harness.entry("a").engine_context

    def settle(self: FakeContext) -> None:
        if self is not mine and self.engine.imported:
            raise SessionFatal("it did not go in", metadata={"cause": "engine"})

    monkeypatch.setattr(FakeContext, "settle", settle, raising=False)
    with pytest.raises(DigestMismatch):
        harness.run(ImportOp(session_id="a", path=str(tmp_path / "b.kv")))
    monkeypatch.undo()
    assert harness.ensure(raw(A), "a").prefilled == 0


# --- small budgets


def test_what_is_brought_back_isn_t_pushed_out_by_what_goes_for_it() -> None:
    harness = Parked(ram=WHOLE_A)
    harness.open(window=1024)
    harness.ensure(raw(A))
    harness.ensure(raw(B))
    assert harness.core.cold_bytes == WHOLE_A
    status = harness.ensure(raw(A))
    assert (status.restored, status.prefilled) == (680, 0)


def test_a_class_lapses_where_its_block_isn_t_used_while_much_else_comes_in() -> None:
    kept = store(ram=4 * (SIZE + IDS))
    unused, used = put(kept, 1, 2), put(kept, 2, 2)
    held = []
    for seed in range(3, 3 + 4 * (HOLDS + 2)):
        kept.tick()
        kept.touch((used,))
        put(kept, seed)
        held.append((kept.has(unused), kept.has(used)))
    assert all(here for _, here in held)
    gone = [here for here, _ in held].index(False)
    # As often as it says, by what is stored of a block, and not for ever.
    assert 4 * (HOLDS - 1) < gone < 4 * (HOLDS + 2)


def test_pinned_blocks_of_closed_sessions_don_t_keep_others_out_for_ever() -> None:
    pinned = PromptIn(segments=[SegmentIn(text=A, cache_class="task_pinned")])
    harness = Parked(ram=WHOLE_A)
    harness.open("a", window=1024)
    harness.ensure(pinned, "a")
    harness.close("a")
    restored = []
    for seed in range(3 * HOLDS):
        name = f"s{seed}"
        harness.open(name, window=900 + seed % 2)  # the other one's context goes
        restored.append(harness.ensure(raw(B, str(seed)), name).restored)
        harness.close(name)
    assert restored[1] == 0
    assert restored[-1] >= 2 * BLOCK_TOKENS


# --- numbers


def test_a_block_in_whose_place_a_longer_one_is_counts_as_stored_as_long_as_that_is() -> None:
    kept, tokens = store(), tokens_of(1)
    keys = token_chains("kv", tokens, (100, 180, 256))
    for end in (100, 180, 256):
        kept.tick()
        kept.put(header(tokens[:end]), state_of(end), 0)
        kept.absorb(keys[(100, 180, 256).index(end)])
    assert len(kept) == 1
    assert [kept.has(key) for key in keys] == [True, True, True]
    kept.touch(keys[:1], rank=2)
    assert kept.wholly(token_chains("kv", tokens, (0,))[0], tokens) is not None
    kept.remove(keys[2])
    assert [kept.has(key) for key in keys] == [False, False, False]


def test_what_is_parked_with_what_else_follows_in_its_block_isn_t_told_as_gone() -> None:
    harness = Evicting()
    harness.open_evicting()
    long = numbered(999)
    harness.suffix(raw(long))
    harness.suffix(raw(long[:851] + numbered(428, 5000)))
    told = harness.explain()
    assert (told.gone, told.parked + told.resident) == (0, 851 + 428)


def test_the_beginning_of_a_parked_block_counts_where_the_conversation_leaves_it() -> None:
    harness = Evicting()
    harness.open_evicting()
    long = numbered(2400)
    harness.suffix(raw(long))
    cut = next(b.begin for b in harness.explain().blocks if b.state == "parked") + 100
    harness.suffix(raw(long[:cut] + numbered(1000, 50_000)))
    told = harness.explain()
    assert (told.gone, told.parked + told.resident) == (0, cut + 1000)
    # What is told is there: it comes back without being evaluated.
    back = harness.admit(begin=256, end=cut)
    assert (back.admitted, back.restored) == (100, 100)


def test_a_fork_holds_all_that_its_source_does_and_a_parked_source_only_what_is_resident() -> None:
    harness = Parked(max_contexts=2)
    harness.open("a", window=1024)
    final = harness.turn(raw(A), raw("?"), options(30))
    told = harness.explain("a")
    # The last sampled token was seen, and has no KV before something goes on from it.
    assert (final.tokens, told.seen_tokens, told.resident) == (30, 711, 710)
    made = fork(harness, "a", "b")
    assert (made.copied, made.resident, made.retained) == (710, 710, 0)
    harness.ensure(raw(A), "a")  # the rest stays behind what is resident
    harness.close("b", discard=True)
    made = fork(harness, "a", "b")
    assert (made.copied, made.resident, made.retained) == (710, 680, 30)
    harness.close("b", discard=True)
    harness.park("a")
    harness.open("c", window=1000)
    harness.open("d", window=1000)  # both contexts went
    for name in "cd":
        harness.close(name, discard=True)
    assert harness.resume("a").resident == 680
    made = fork(harness, "a", "b")
    assert (made.copied, made.resident, made.retained) == (680, 680, 0)


# --- what is freed for a new context


def opened(harness: Parked, name: str, window: int, free_bytes: int) -> None:
    op = OpenOp(
        session_id=name, prompt_format="raw", window=window, k_type="f16", v_type="f16",
        kv_digest="kv", runtime_digest="rt", free_bytes=free_bytes,
    )  # fmt: skip
    harness.run(op)


def test_a_context_with_nothing_of_its_own_goes_before_parked_kv_does() -> None:
    harness = Parked(max_contexts=4)
    harness.open("a", window=1024)
    answer(harness, raw(A), "a")
    answer(harness, raw(B), "a")
    harness.open("b", window=1024)
    harness.ensure(raw(B), "b")  # copied: the first one has it too
    harness.close("b")
    held = harness.core.cold_bytes
    assert held > 9000
    opened(harness, "c", 512, 3000)
    assert harness.core.cold_bytes == held
    assert harness.explain("c").slot_cells == 1024 + 512
    harness.ensure(raw(numbered(400)), "c")
    harness.close("c")  # what it holds is nobody else's
    opened(harness, "d", 700, 3000)
    assert harness.core.cold_bytes <= held - 3000
    assert harness.explain("d").reclaimable_tokens == 400


def test_what_a_freed_context_left_to_the_store_outlasts_what_the_store_gives_up_then() -> None:
    harness = Parked(max_contexts=3)
    harness.open("a", window=1024)
    harness.ensure(raw(A), "a")
    harness.park("a")  # stored, and still in the context
    harness.close("a")
    harness.open("b", window=900)
    harness.ensure(raw(B), "b")
    harness.ensure(raw("q0" * 340), "b")  # what it held is the newest in the store
    held = harness.core.cold_bytes
    context = 1024 * 2 + 1000
    opened(harness, "c", 512, context + 1)  # a little more than that one gives
    assert harness.core.cold_bytes < held
    status = harness.ensure(raw(A), "b")
    assert (status.restored, status.prefilled) == (680, 0)


def test_streams_take_the_place_of_an_empty_context_before_that_of_parked_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Parked(BatchingFake(), max_contexts=3)
    harness.open("a", window=1024)
    harness.ensure(raw(A), "a")
    harness.ensure(raw(B), "a")
    harness.open("b", window=512)
    harness.close("b")
    held, make = harness.core.cold_bytes, BatchingFake.new_batch
    assert held > 9000

    def tight(self: BatchingFake, *given: Any) -> object:
        if self.cells > 1024 and harness.core.cold_bytes == held:
            raise InsufficientMemory(
                "no", metadata={"cause": "host_memory", "needed_bytes": 9000, "free_bytes": 4000}
            )
        return make(self, *given)

    monkeypatch.setattr(BatchingFake, "new_batch", tight)
    op = OpenOp(
        session_id="c", prompt_format="raw", window=512, k_type="f16", v_type="f16",
        kv_digest="kv", runtime_digest="rt", layout="batched", streams=2,
    )  # fmt: skip
    harness.run(op)
    assert harness.core.cold_bytes == held
    assert harness.explain("a").slot_cells == 1024 + 2 * 512


def test_a_context_that_can_t_be_parked_costs_nobody_else_a_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Parked()
    harness.open("a", window=1024)
    answer(harness, raw(A), "a")
    harness.close("a")

    def broken(self: FakeContext, begin: int, end: int) -> object:
        raise SessionFatal("copying failed", metadata={"cause": "engine_error"})

    monkeypatch.setattr(FakeContext, "export_state", broken)
    harness.open("b", window=900)  # the other one goes for it
    monkeypatch.undo()
    assert harness.ensure(raw(A), "b").prefilled == 680
    assert harness.explain("b").slot_cells == 900


# --- loads and unloads


def test_a_load_opens_no_file_and_what_is_damaged_goes_when_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store(ram=0, disk=PLENTY, folder=tmp_path)
    keys = [put(kept, seed) for seed in range(1, 5)]
    for key, size in zip(keys, (0, 300, SIZE), strict=False):
        os.truncate(file_of(tmp_path, key), size)

    def refused(*given: object) -> object:
        raise AssertionError("a file was opened at load")

    with monkeypatch.context() as patched:
        patched.setattr(cold_disk, "open_state", refused)
        later = store(disk=PLENTY, folder=tmp_path)
        assert (len(later), later.damaged) == (4, 0)
        assert later.disk_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    start = token_chains("kv", tokens_of(1), (0,))[0]
    match = later.longest(start, tokens_of(4))  # asks all that stand at the beginning
    assert match is not None
    assert match.key == keys[3]
    assert (later.damaged, len(later), len(list(tmp_path.iterdir()))) == (3, 1, 1)
    found = later.read(keys[3])
    assert found is not None
    assert np.array_equal(found, state_of(4))


def test_a_smaller_disk_budget_is_reached_in_one_go_over_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store(ram=0, disk=PLENTY, folder=tmp_path)
    for seed in range(40):
        put(kept, seed)
    one = kept.disk_bytes // 40
    asked = []
    order = ColdStore._order

    def counted(self: ColdStore, block: object) -> tuple[int, int, int]:
        asked.append(block)
        return order(self, block)  # type: ignore[arg-type]

    monkeypatch.setattr(ColdStore, "_order", counted)
    later = store(disk=10 * one, folder=tmp_path)
    assert len(later) == len(list(tmp_path.iterdir())) == 10
    assert len(asked) == 40


def test_what_lies_in_ram_at_an_unload_is_found_after_the_next_load(tmp_path: Path) -> None:
    harness = Parked(disk=GIB, folder=tmp_path)
    harness.open(window=1024)
    first = answer(harness, raw(A))
    answer(harness, raw(B))
    assert list(tmp_path.iterdir()) == []
    op = FakeOp()
    harness.run(UnloadOp(), op)
    assert op.beats > 0
    assert len(list(tmp_path.iterdir())) == 3
    harness.load()
    harness.open(window=1024)
    status = harness.ensure(raw(A))
    assert (status.restored, status.prefilled) == (680, 0)
    assert answer(harness, raw(A)) == first


def test_the_engine_lets_the_model_go_whatever_becomes_of_what_is_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Parked()

    def fails(self: ColdStore) -> int:
        raise MemoryError

    monkeypatch.setattr(ColdStore, "flush", fails)
    harness.run(UnloadOp())
    assert not harness.engine.loaded


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_where_time_is_short_what_matters_most_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    kept = store(disk=PLENTY, folder=tmp_path)
    pinned, old, new = put(kept, 1, 2), put(kept, 2), put(kept, 3)
    harness = Parked(disk=GIB, folder=tmp_path)
    parking = harness.parking
    parking.store, kept.live = kept, parking.store.live
    clock = itertools.count()
    write: Callable[[int, memoryview], int] = os.write
    if end == "close":  # each write takes a while
        seconds = [0.0]
        monkeypatch.setattr("modeld.workers.parking.time.monotonic", lambda: seconds[0])

        def slow(fd: int, data: memoryview) -> int:
            seconds[0] += 0.6  # two a file, beside what describes it
            return write(fd, data)

        monkeypatch.setattr(os, "write", slow)
        harness.core.close()
    else:
        monkeypatch.setattr(FakeOp, "cancelled", lambda self: next(clock) >= 4)
        harness.run(UnloadOp())
    left = {path.name.split(".")[2] for path in tmp_path.iterdir()}
    assert pinned in left
    assert old not in left
    assert (new in left) == (end == "cancel")
