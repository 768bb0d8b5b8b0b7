"""What leaves the contexts comes back from the cold store instead of being evaluated again."""

from __future__ import annotations

import queue
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.errors import InsufficientMemory, InvalidRequest, ModeldError, SessionFatal
from modeld.shared.messages import (
    OpenOp,
    ParkOp,
    ParkResult,
    PromptIn,
    ResumeOp,
    ResumeResult,
    SegmentIn,
    Status,
    UnloadOp,
)
from modeld.workers.executor import Pulse, Tasks, run
from modeld.workers.pooled_context import PooledContext
from modeld.workers.state_file import token_chains
from tests.support.batch_rig import Kept
from tests.support.cold import GIB, A, B, Parked, answer
from tests.support.core_harness import FakeOp, Harness, options, raw
from tests.support.fake_engine import FakeEngine
from tests.support.residency import export, fork, trim


def fresh(prompt: PromptIn, tokens: int = 12) -> str:
    text, _, _ = Harness().fresh_answer(prompt, raw("?"), options(tokens))
    return text


@pytest.mark.parametrize("block", [1, 32])
def test_a_conversation_that_another_pushed_out_comes_back_by_copy(block: int) -> None:
    harness = Parked(FakeEngine(state_block=block))
    harness.open(window=1024)
    first = answer(harness, raw(A))
    answer(harness, raw(B))  # in the place of all of it
    evaluated = harness.engine.evaluated
    status = harness.ensure(raw(A))
    assert (status.reused, status.restored, status.prefilled) == (680, 680, 0)
    assert harness.engine.evaluated == evaluated
    assert status.miss_reason == "NONE"
    assert answer(harness, raw(A)) == first == fresh(raw(A))
    counters = harness.counters()
    assert counters["restored_tokens"] >= 680
    assert counters["slot_cold_hits"] >= 3
    assert counters["slot_cold_ram_bytes"] == harness.core.cold_bytes > 0


def test_heartbeats_tell_what_the_store_takes_of_ram() -> None:
    harness = Parked()
    tasks: Tasks = queue.SimpleQueue()
    tasks.put(None)
    pulse = Pulse()
    run(harness.core, tasks, pulse, Kept())
    assert pulse.cold_bytes == 0
    harness.open(window=1024)
    answer(harness, raw(A))
    answer(harness, raw(B))
    assert pulse.cold_bytes == harness.counters()["slot_cold_ram_bytes"] > 10_000
    harness.run(UnloadOp())
    assert pulse.cold_bytes == 0


def test_only_what_the_store_lacks_is_evaluated() -> None:
    harness = Parked()
    harness.open(window=1024)
    answer(harness, raw(A), tokens=2)
    answer(harness, raw(B), tokens=2)
    status = harness.ensure(raw(A, "0123456789"))
    # 680 and the question's mark differ from what follows now.
    assert (status.reused, status.restored, status.prefilled) == (680, 680, 10)
    assert answer(harness, raw(A[:300], B[:300])) == fresh(raw(A[:300], B[:300]))


def test_a_beginning_that_a_context_holds_is_not_brought_back_again() -> None:
    harness = Parked()
    harness.open(window=1024)
    answer(harness, raw(A))
    answer(harness, raw(A[:400], B[:300]))
    status = harness.ensure(raw(A))
    assert status.reused == 680
    assert status.restored == 280
    assert status.prefilled == 0


def test_what_is_stored_already_is_not_stored_twice() -> None:
    harness = Parked()
    harness.open(window=1024)
    for _ in range(3):
        answer(harness, raw(A))
        answer(harness, raw(B))
    counters = harness.counters()
    answer(harness, raw(A))
    answer(harness, raw(B))
    assert harness.counters()["slot_cold_blocks"] == counters["slot_cold_blocks"]
    assert harness.counters()["slot_cold_ram_bytes"] == counters["slot_cold_ram_bytes"]


def test_a_tail_takes_the_place_of_the_shorter_one_that_it_goes_on_from() -> None:
    harness = Parked()
    harness.open(window=1024)
    harness.ensure(raw(A[:400]))
    entry = harness.entry()
    assert len(harness.parking.park_range(entry, 0, 400)) == 2
    harness.ensure(raw(A[:500]))
    assert len(harness.parking.park_range(entry, 0, 500)) == 2
    assert harness.counters()["slot_cold_blocks"] == 2
    assert harness.parking.reach("kv", np.asarray(entry.tokens), 1024) == 500


def test_parked_blocks_are_known_by_the_chain_of_their_tokens() -> None:
    harness = Parked()
    harness.open(window=1024)
    harness.ensure(raw(A))
    entry = harness.entry()
    keys = harness.parking.park_range(entry, 300, 400)  # all of the block around it
    assert keys == {256: token_chains("kv", entry.tokens, [512])[0]}
    assert harness.parking.store.has(keys[256])
    assert harness.parking.reach("kv", entry.tokens, 1024) == 0  # there is a gap before it
    assert harness.parking.reach("kv", entry.tokens, 1024, 256) == 512


def test_a_closed_session_s_context_is_parked_before_another_shape_takes_its_memory() -> None:
    harness = Parked()
    harness.open("a", window=1024)
    first = answer(harness, raw(A), "a")
    harness.close("a")
    harness.open("b", window=900)  # one context at most: the first one goes
    status = harness.ensure(raw(A), "b")
    assert (status.restored, status.prefilled) == (680, 0)
    assert answer(harness, raw(A), "b") == first


def test_a_discarded_session_is_not_parked() -> None:
    harness = Parked()
    harness.open("a", window=1024)
    answer(harness, raw(A), "a")
    harness.close("a", discard=True)
    assert harness.core.cold_bytes == 0


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("parked", [True, False])
def test_nothing_of_a_discarded_session_stays_in_the_store(
    tmp_path: Path, ranges: bool, parked: bool
) -> None:
    harness = Parked(FakeEngine(ranges=ranges), disk=GIB, folder=tmp_path)
    harness.open("a", window=1024)
    answer(harness, raw(A), "a")
    harness.park("a")
    harness.open("b", window=1024)
    answer(harness, raw(B), "b")
    assert harness.core.cold_bytes > 0
    if not parked:
        harness.close("b")
        harness.resume("a")
    harness.close("a", discard=True)
    if parked:
        harness.close("b", discard=True)
    harness.parking.store.flush()
    held = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert np.asarray(list(A[:256].encode()), dtype="<i4").tobytes() not in held
    harness.open("c", window=1024)
    assert harness.ensure(raw(A), "c").restored == 0


def test_the_context_that_a_discarded_session_was_parked_from_is_emptied_too() -> None:
    harness = Parked()
    harness.open("a", window=1024)
    answer(harness, raw(A), "a")
    harness.park("a")
    harness.close("a", discard=True)
    assert harness.core.cold_bytes == 0
    harness.open("b", window=1024)
    status = harness.ensure(raw(A), "b")
    assert (status.reused, status.prefilled) == (0, 680)


def test_what_another_session_has_too_is_not_forgotten() -> None:
    harness = Parked(max_contexts=2)
    harness.open("a", window=1024)
    first = answer(harness, raw(A), "a")
    fork(harness, "a", "b")
    harness.ensure(raw(A, B[:200]), "b")
    harness.park("a")
    harness.park("b")
    for each in ("c", "d"):  # the store alone has it then
        harness.open(each, window=1024)
        answer(harness, raw(each * 300), each)
    harness.close("a", discard=True)
    harness.close("c", discard=True)
    resumed = harness.resume("b")
    assert (resumed.missing, resumed.resident) == (0, 880)
    assert answer(harness, raw(A), "b") == first


def test_kv_of_another_digest_is_never_brought_back() -> None:
    harness = Parked()
    harness.open("a", window=1024, kv_digest="one")
    harness.ensure(raw(A), "a")
    harness.close("a")
    harness.open("b", window=1024, kv_digest="two")
    status = harness.ensure(raw(A), "b")
    assert (status.reused, status.restored, status.prefilled) == (0, 0, 680)
    assert status.miss_reason == "KV_DIGEST"
    harness.close("b")
    harness.open("c", window=1024, kv_digest="one")  # what the second one pushed out
    status = harness.ensure(raw(A), "c")
    assert (status.restored, status.prefilled) == (680, 0)


def test_a_fork_parks_what_its_context_held() -> None:
    harness = Parked(max_contexts=2)
    harness.open("a", window=1024)
    harness.open("b", window=1024)
    answer(harness, raw(B), "b")
    harness.close("b")
    harness.ensure(raw(A), "a")
    fork(harness, "a", "c")
    status = harness.ensure(raw(B), "c")
    assert (status.restored, status.prefilled) == (680, 0)


# --- classes and budgets


def test_pinned_segments_stay_longer_than_volatile_ones() -> None:
    cost = 3 * 256 * 16 + 4 * (256 + 512 + 768)  # bytes of one conversation's full blocks

    def prompt(text: str, cls: str) -> PromptIn:
        return PromptIn(segments=[SegmentIn(text=text, cache_class=cls)])

    harness = Parked(ram=cost)
    harness.open(window=1024)
    long_a, long_b, long_c = (text * 2 for text in (A[:384], B[:384], "q0" * 192))
    harness.ensure(prompt(long_a, "task_pinned"))
    harness.ensure(prompt(long_b, "volatile"))
    harness.ensure(prompt(long_c, "volatile"))
    assert harness.counters()["slot_cold_dropped"] >= 3  # the second conversation
    status = harness.ensure(prompt(long_a, "task_pinned"))
    assert (status.restored, status.prefilled) == (768, 0)
    status = harness.ensure(prompt(long_b, "volatile"))
    assert (status.restored, status.prefilled) == (0, 768)


def test_a_fork_s_pinned_segments_are_pinned_before_its_next_prompt_too() -> None:
    harness = Parked(ram=3 * 256 * 16 + 4 * (256 + 512 + 768), max_contexts=2)
    harness.open(window=1024)
    pinned = PromptIn(segments=[SegmentIn(text=A[:384] * 2, cache_class="task_pinned")])
    harness.ensure(pinned)
    fork(harness, "a", "b")
    harness.close("a", discard=True)
    harness.ensure(raw(B[:384] * 2), "b")  # what the fork held is parked for it
    harness.ensure(raw("q0" * 384), "b")
    assert harness.ensure(pinned, "b").restored == 768


def test_no_more_ram_is_used_than_was_given_and_the_rest_is_on_disk(tmp_path: Path) -> None:
    harness = Parked(ram=10_000, disk=GIB, folder=tmp_path)
    harness.open(window=1024)
    first = answer(harness, raw(A))
    answer(harness, raw(B))
    assert 0 < harness.core.cold_bytes <= 10_000
    counters = harness.counters()
    assert counters["slot_cold_disk_bytes"] == sum(p.stat().st_size for p in tmp_path.iterdir()) > 0
    assert harness.ensure(raw(A)).restored == 680
    assert answer(harness, raw(A)) == first


def test_what_is_on_disk_is_found_after_the_model_was_loaded_again(tmp_path: Path) -> None:
    harness = Parked(ram=0, disk=GIB, folder=tmp_path)
    harness.open(window=1024)
    first = answer(harness, raw(A))
    answer(harness, raw(B))
    harness.run(UnloadOp())
    assert harness.core.cold_bytes == 0
    harness.load()
    harness.open(window=1024)
    status = harness.ensure(raw(A))
    assert (status.restored, status.prefilled) == (680, 0)
    assert answer(harness, raw(A)) == first


def test_memory_for_a_new_context_comes_from_the_store_first() -> None:
    harness = Parked(max_contexts=3)
    harness.open("a", window=1024)
    answer(harness, raw(A), "a")
    answer(harness, raw(B), "a")
    held = harness.core.cold_bytes
    assert held > 9000
    op = OpenOp(
        session_id="b", prompt_format="raw", window=512, k_type="f16", v_type="f16",
        kv_digest="kv", runtime_digest="rt", free_bytes=9000,
    )  # fmt: skip
    harness.run(op)
    assert harness.core.cold_bytes <= held - 9000


def test_the_store_makes_way_for_a_context_that_finds_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Parked(max_contexts=3)
    harness.open("a", window=1024)
    answer(harness, raw(A), "a")
    answer(harness, raw(B), "a")
    held = harness.core.cold_bytes
    make = harness.engine.new_context

    def tight(window: int, k_type: str, v_type: str, compute_bytes: int = 0) -> object:
        if harness.core.cold_bytes > held - 5000:
            raise InsufficientMemory(
                "no", metadata={"cause": "host_memory", "needed_bytes": 9000, "free_bytes": 4000}
            )
        return make(window, k_type, v_type, compute_bytes)

    monkeypatch.setattr(harness.engine, "new_context", tight)
    harness.open("b", window=512)
    assert 0 < harness.core.cold_bytes <= held - 5000


# --- sessions


def test_a_parked_session_gives_its_context_up_and_goes_on_where_it_was() -> None:
    harness = Parked()
    harness.open("a", window=1024)
    other = Harness(FakeEngine())
    other.open("a", window=1024)
    for each in (harness, other):
        each.turn(raw(A), raw("?"), options(8), turn_id="t1")
    held = len(harness.entry())
    parked = harness.park()
    assert (parked.parked, parked.lost) == (held, 0)
    assert parked.ram_bytes == harness.core.cold_bytes > 0
    harness.open("b", window=1024)
    answer(harness, raw(B), "b")
    with pytest.raises(InsufficientMemory):
        harness.resume()
    harness.close("b")
    evaluated = harness.engine.evaluated
    resumed = harness.resume()
    assert harness.engine.evaluated == evaluated
    assert (resumed.restored, resumed.missing, resumed.resident) == (held, 0, held)
    ops = [FakeOp(), FakeOp()]
    for each, op in zip((harness, other), ops, strict=True):
        each.decode(options(20), op=op)  # goes on with the answer
    assert ops[0].ids == ops[1].ids
    harness.check_records()


def test_a_session_that_nobody_pushed_out_gets_its_own_context_back() -> None:
    harness = Parked(max_contexts=2)
    harness.open("a", window=1024)
    harness.ensure(raw(A))
    context = harness.entry().engine_context
    harness.park()
    resumed = harness.resume()
    assert harness.entry().engine_context is context
    assert (resumed.reused_context, resumed.restored, resumed.missing) == (True, 0, 0)
    assert resumed.resident == 680


def test_every_other_call_to_a_parked_session_says_that_it_must_be_resumed(tmp_path: Path) -> None:
    harness = Parked()
    harness.open("a", window=1024)
    harness.ensure(raw(A))
    with pytest.raises(InvalidRequest, match="parked"):
        harness.resume()  # it isn't
    harness.park()
    calls = (
        lambda: harness.ensure(raw(A)),
        lambda: harness.suffix(raw("x")),
        lambda: harness.decode(),
        lambda: answer(harness, raw(A)),
        lambda: harness.explain(),
        lambda: trim(harness, 0),
        lambda: export(harness, tmp_path / "f"),
        lambda: fork(harness, "a", "b"),
        lambda: harness.park(),
    )
    for call in calls:
        with pytest.raises(InvalidRequest) as refused:
            call()
        assert "Resume it" in refused.value.message
        assert not isinstance(refused.value, SessionFatal)
    assert harness.resume().resident == 680
    harness.park()
    harness.close("a")
    harness.open("a", window=1024)


def test_what_was_lost_of_a_parked_session_is_told_and_evaluated_again() -> None:
    harness = Parked(ram=6000)
    harness.open("a", window=1024)
    first = answer(harness, raw(A))
    parked = harness.park()
    assert parked.parked == 256
    assert parked.lost > 0
    harness.open("b", window=900)
    harness.close("b", discard=True)
    resumed = harness.resume()
    assert (resumed.restored, resumed.resident) == (256, 256)
    assert resumed.missing == parked.lost
    assert answer(harness, raw(A)) == first


def test_without_a_store_a_session_can_still_be_parked_and_loses_its_kv() -> None:
    harness = Harness(max_contexts=1)
    harness.open("a", window=1024)
    harness.ensure(raw(A))
    parked = harness.run(ParkOp(session_id="a"))
    assert isinstance(parked, ParkResult)
    assert (parked.parked, parked.lost, parked.ram_bytes) == (0, 680, 0)
    harness.open("b", window=900)
    harness.close("b", discard=True)
    resumed = harness.run(ResumeOp(session_id="a"))
    assert isinstance(resumed, ResumeResult)
    assert (resumed.restored, resumed.missing) == (0, 680)
    assert answer(harness, raw(A)) == fresh(raw(A))


# --- memories that give no ranges, and failures


@pytest.mark.parametrize("trimmable", [True, False])
def test_a_memory_without_ranges_is_parked_whole_and_found_by_all_its_tokens(
    trimmable: bool,
) -> None:
    harness = Parked(FakeEngine(ranges=False, trimmable=trimmable))
    harness.open(window=1024)
    harness.ensure(raw(A))
    harness.ensure(raw(B))
    assert harness.counters()["slot_cold_blocks"] == 1
    status = harness.ensure(raw(A, "more"))
    assert (status.reused, status.restored, status.prefilled) == (680, 680, 4)
    status = harness.ensure(raw(B[:600]))  # less than what is stored of it: nothing fits
    assert (status.restored, status.prefilled) == (0, 600)
    assert answer(harness, raw(A, "more")) == fresh(raw(A, "more"))


def test_a_whole_state_is_no_match_where_its_last_logits_are_needed() -> None:
    harness = Parked(FakeEngine(ranges=False, trimmable=False))
    harness.open(window=1024)
    harness.turn(raw(A), raw("?"), options(1))  # holds the prompt, and no more
    assert len(harness.entry()) == 681
    harness.ensure(raw(B))
    op = FakeOp()
    harness.turn(raw(A), raw("?"), options(12), op=op)
    assert [status.prefilled for status in op.of(Status)] == [680, 1]
    assert [status.restored for status in op.of(Status)] == [0, 0]
    harness.check_records()


def test_an_engine_that_refuses_a_block_costs_an_evaluation_and_nothing_else() -> None:
    harness = Parked()
    harness.open(window=1024)
    first = answer(harness, raw(A))
    answer(harness, raw(B))
    harness.engine.refuse_imports_after = 1
    status = harness.ensure(raw(A))
    assert (status.restored, status.prefilled) == (256, 424)
    assert harness.counters()["slot_cold_failed"] == 1
    assert answer(harness, raw(A)) == first


def test_a_block_that_finds_no_memory_costs_an_evaluation_and_stays_stored() -> None:
    harness = Parked()
    harness.open(window=1024)
    first = answer(harness, raw(A))
    answer(harness, raw(B))
    harness.engine.refuse_imports_after, harness.engine.refuses_for_memory = 1, True
    status = harness.ensure(raw(A))
    assert (status.restored, status.prefilled) == (256, 424)
    assert harness.counters()["slot_cold_failed"] == 0
    assert answer(harness, raw(A)) == first
    answer(harness, raw(B))
    assert harness.ensure(raw(A)).restored == 680


def test_an_engine_that_dies_of_a_block_ends_the_session_as_any_fatal_error_does() -> None:
    harness = Parked()
    harness.open(window=1024)
    answer(harness, raw(A))
    answer(harness, raw(B))
    harness.engine.refuse_imports_after, harness.engine.refuses_fatally = 1, True
    with pytest.raises(SessionFatal):
        harness.ensure(raw(A))
    harness.engine.refuses_fatally = False
    harness.open("b", window=1024)
    assert harness.ensure(raw(A), "b").restored > 0


def test_bytes_that_come_back_as_others_are_not_trusted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Parked(disk=GIB, folder=tmp_path)
    harness.open(window=1024)
    first = answer(harness, raw(A))
    answer(harness, raw(B))
    take = PooledContext.export_state
    monkeypatch.setattr(
        PooledContext, "export_state", lambda self, begin, end: take(self, begin, end) ^ 1
    )
    status = harness.ensure(raw(A))
    assert (status.restored, status.prefilled) == (0, 680)
    assert answer(harness, raw(A)) == first
    assert harness.core.cold_bytes == 0
    answer(harness, raw(B))
    assert harness.ensure(raw(A)).restored == 0  # off for good
    harness.run(UnloadOp())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [InsufficientMemory("no"), ValueError("a mistake")])
def test_a_failure_to_park_never_breaks_what_was_asked(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    harness = Parked()
    harness.open(window=1024)
    answer(harness, raw(A))

    def fails(self: PooledContext, begin: int, end: int) -> object:
        raise error

    monkeypatch.setattr(PooledContext, "export_state", fails)
    assert answer(harness, raw(B)) == fresh(raw(B))
    assert harness.counters()["slot_cold_failed"] >= 1
    assert harness.counters()["slot_cold_blocks"] == 0
    parked = harness.park()
    assert parked.parked == 0
    assert parked.lost > 680


def test_a_short_tail_is_not_worth_parking() -> None:
    harness = Parked()
    harness.open(window=1024)
    harness.ensure(raw(A[:600]))
    harness.ensure(raw(A[:550], "!"))
    assert harness.counters()["slot_cold_blocks"] == 0


def test_images_and_what_follows_them_are_not_parked() -> None:
    harness = Parked()
    harness.open(window=1024)
    harness.ensure(raw(A))
    entry = harness.entry()
    entry.tokens[300] = -5  # as an image's id would stand there
    assert len(harness.parking.park_range(entry, 0, 680)) == 1
    entry.tokens[300] = 7
    entry.tokens[100] = -5
    assert harness.parking.park_range(entry, 0, 680) == {}


def test_nothing_is_parked_where_the_model_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    load = FakeEngine.load

    def refuses(self: FakeEngine, *args: object) -> object:
        result = load(self, *args)  # type: ignore[arg-type]
        result.capabilities["cold_store"] = "no: it keeps its cache to itself"
        return result

    monkeypatch.setattr(FakeEngine, "load", refuses)
    harness = Parked()
    harness.open(window=1024)
    answer(harness, raw(A))
    answer(harness, raw(B))
    assert harness.core.cold_bytes == 0
    assert harness.ensure(raw(A)).restored == 0


def test_random_prompts_with_a_small_store_always_answer_as_a_fresh_worker_does(
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(5)
    harness = Parked(ram=20_000, disk=30_000, folder=tmp_path, max_contexts=2)
    texts = [("abcdefgh"[i] + "0123456"[i % 7]) * 150 for i in range(6)]
    harness.open("a", window=1024)
    harness.open("b", window=1024)
    for _ in range(25):
        session = "ab"[random.integers(2)]
        pick = [texts[i][: int(random.integers(50, 300))] for i in random.integers(0, 6, 3)]
        prompt = raw(*pick)
        if random.integers(4) == 0:
            harness.park(session)
            harness.resume(session)
        assert answer(harness, prompt, session, 6) == fresh(prompt, 6)
        counters = harness.counters(session)
        assert counters["slot_cold_ram_bytes"] <= 20_000
        assert counters["slot_cold_disk_bytes"] <= 30_000
        assert counters["slot_cold_disk_bytes"] == sum(
            path.stat().st_size for path in tmp_path.iterdir()
        )
    assert harness.counters("a")["slot_cold_hits"] > 0
    assert isinstance(harness.counters("a")["slot_cold_damaged"], int)
    with pytest.raises(ModeldError):
        harness.run(ParkOp(session_id="nobody"))
