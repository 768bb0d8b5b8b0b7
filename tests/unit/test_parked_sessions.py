"""More sessions than memory: who is parked for whom, what comes back, and what plans make of it."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from modeld.shared.capacity import CapacityRequest, PlacedUse, SlotUse
from modeld.shared.errors import (
    ContextOverflow,
    GenerationStale,
    InsufficientMemory,
    InvalidRequest,
    ManifestMismatch,
    SessionClosed,
    UnsupportedFeature,
    WorkerUnavailable,
)
from modeld.shared.messages import (
    CloseOp,
    ForkOp,
    OpenOp,
    ParkOp,
    Payload,
    ResumeOp,
    Status,
    TrimOp,
)
from modeld.shared.planner.budget import needed_total
from modeld.supervisor import parking
from modeld.supervisor.config import ConfigError, load_config
from modeld.supervisor.context_slot import Forked
from modeld.supervisor.events import Event, Watcher
from modeld.supervisor.fleet import Death
from modeld.supervisor.model_slot import ModelSlot, OpenRequest
from modeld.supervisor.planning_slot import WhatIf
from modeld.supervisor.sessions import Back, Session
from modeld.supervisor.slot_core import Caller
from tests.support import slots as slots_support
from tests.support.slots import GIB, MIB, Machine, Slots, Worker, make_slots

WINDOW = 8192
KV_A_TOKEN = 122_880
CONTEXT = WINDOW * KV_A_TOKEN  # bytes
SEVERAL = 3  # contexts that the small machine below holds

P = TypeVar("P", bound=Payload)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slots:
    """A machine that holds three contexts."""
    return make_slots(tmp_path, monkeypatch, machine=Machine(8 * GIB, 4 * GIB))


def slot_of(slots: Slots) -> tuple[ModelSlot, Worker]:
    return slots.slots["llama"], slots.workers["llama"]


async def open_several(slots: Slots, count: int = SEVERAL) -> list[Session]:
    return await slots_support.open_several(slots, count, WINDOW)


async def use(slot: ModelSlot, session: Session) -> None:
    """One call of the session that goes to the worker."""
    async with slot.hold(session.session_id, "trim", Caller()):
        await slot.call(TrimOp(session_id=session.session_id, keep=0), session=session)


def sent(worker: Worker, kind: type[P]) -> list[P]:
    return [payload for payload in worker.sent if isinstance(payload, kind)]


def parked(slot: ModelSlot) -> list[str]:
    return [session.session_id for session in slot.sessions.all() if session.parked]


def ids(sessions: Sequence[Session]) -> list[str]:
    return [session.session_id for session in sessions]


async def events(watcher: Watcher, count: int) -> list[Event]:
    """The next ones about sessions."""
    found: list[Event] = []
    while len(found) < count:
        event = await watcher.next()
        found += [event] if event.kind == "session" else []
    return found


async def refusal_of(slots: Slots, window: int = WINDOW) -> InsufficientMemory:
    with pytest.raises(InsufficientMemory) as refused:
        await slots.open("big", window)
    return refused.value


# --- opening more than fit -----------------------------------------------------------------------


async def test_where_memory_is_full_the_one_used_least_recently_is_parked(small: Slots) -> None:
    slot, worker = slot_of(small)
    first, second, third = await open_several(small)
    assert not parked(slot)
    second.used_at = 0.5
    first.used_at = 10.0  # used last, though opened first
    watcher = slot._bus.watch()
    fourth = await small.open("big", WINDOW)
    assert parked(slot) == [second.session_id]
    assert set(worker.contexts) == {one.session_id for one in (first, third, fourth)}
    assert (slot.use.sessions, slot.use.cells) == (3, 3 * WINDOW)
    told, opened = await events(watcher, 2)
    assert (told.kind, told.state, told.session_id) == ("session", "parked", second.session_id)
    assert told.cause.startswith(f"{WINDOW // 10} tokens kept in ")
    assert (opened.state, opened.session_id) == ("open", fourth.session_id)
    assert len(slot.sessions) == 4
    assert second.times_parked == 1


async def test_a_dozen_sessions_take_turns_in_three_contexts(small: Slots) -> None:
    slot, worker = slot_of(small)
    sessions = [await small.open("big", WINDOW) for _ in range(12)]
    assert len(parked(slot)) == 9
    before = len(sent(worker, ResumeOp))
    for _ in range(2):
        for session in sessions:
            await use(slot, session)
            assert not session.parked
            assert len(worker.contexts) == slot.sessions.resident == slot.use.sessions <= SEVERAL
    resumed = sent(worker, ResumeOp)[before:]
    assert [one.session_id for one in resumed] == ids(sessions) * 2
    assert all(session.times_parked for session in sessions)
    assert sessions[0].resumed_tokens == 2 * (WINDOW // 10)


async def test_a_plan_that_parking_everything_would_not_fit_parks_nobody(small: Slots) -> None:
    slot, worker = slot_of(small)
    await open_several(small)
    error = await refusal_of(small, 5 * WINDOW)
    assert not sent(worker, ParkOp)
    assert not parked(slot)
    assert error.metadata["parked_sessions"] == "0"
    assert int(error.metadata["short_bytes"]) > 0
    assert error.message.endswith(
        "Parking the sessions that are idle would not make room for it either."
    )


async def test_as_many_are_parked_as_it_takes_and_no_more(small: Slots) -> None:
    slot, _ = slot_of(small)
    first, second, third = await open_several(small)
    await small.open("big", 2 * WINDOW - 512)
    assert parked(slot) == ids([first, second])
    assert not third.parked


async def test_without_anywhere_to_keep_them_the_refusal_names_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch, machine=Machine(8 * GIB, 4 * GIB), cold_ram_bytes=0)
    slot, worker = slot_of(slots)
    await open_several(slots)
    error = await refusal_of(slots)
    assert "cold_ram_bytes and cold_disk_bytes are both 0. Set one of them" in error.message
    assert f"to at least {CONTEXT}" in error.message
    assert error.metadata["open_sessions"] == "3"
    assert not sent(worker, ParkOp)
    assert not parked(slot)
    assert slots.loads("llama")[0].cold is None


async def test_a_first_session_that_does_not_fit_is_refused_without_a_word_on_parking(
    small: Slots,
) -> None:
    error = await refusal_of(small, 100_000)
    assert "park" not in error.message


async def test_sessions_of_a_model_that_can_not_be_parked_stay(small: Slots) -> None:
    slot, worker = slot_of(small)
    worker.cold_store = "no: its engine gives nothing"
    await open_several(small)
    error = await refusal_of(small)
    assert "(capability cold_store)" in error.message
    assert not sent(worker, ParkOp)
    numbers = slot.sessions.all()[0].resolution.numbers
    assert numbers.planner.tokens == numbers.effective.tokens == WINDOW
    detached = slot.sessions.all()[0]
    detached.attached = False
    await refusal_of(small)  # memory isn't made by closing before all contexts are taken
    assert detached.session_id in ids(slot.sessions.all())


async def test_whoever_has_a_call_running_waiting_or_kept_is_not_parked(small: Slots) -> None:
    slot, worker = slot_of(small)
    kept, waiting, idle = await open_several(small)
    async with slot.hold(kept.session_id, "ensure_prefix", Caller(), turn_id="t", keep_turn=True):
        pass
    queued = asyncio.create_task(use(slot, waiting))
    await asyncio.sleep(0)
    assert parking.idle(slot.sessions.all(), slot.queue.sessions(), set()) == [idle]
    fourth = asyncio.create_task(small.open("big", WINDOW))
    await asyncio.sleep(0)
    slot.queue.release_parked()
    await queued
    await fourth
    # Kept turn or not by then: the others' calls ended after this one was opened.
    assert parked(slot) == [idle.session_id]
    assert [one.session_id for one in sent(worker, ParkOp)] == [idle.session_id]


async def test_one_that_can_not_be_parked_is_passed_over(
    small: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, worker = slot_of(small)
    first, second, _third = await open_several(small)
    call, refusal = worker.call, UnsupportedFeature("What it holds can't go out.")

    def refusing(generation: int, payload: Payload, credit: int = 0) -> Any:
        worker.refusals.clear()
        if isinstance(payload, ParkOp) and payload.session_id == first.session_id:
            worker.refusals[ParkOp] = refusal
        return call(generation, payload, credit)

    monkeypatch.setattr(worker, "call", refusing)
    await small.open("big", WINDOW)
    assert [one.session_id for one in sent(worker, ParkOp)] == ids([first, second])
    assert parked(slot) == [second.session_id]


async def test_where_the_worker_refuses_what_was_planned_one_more_is_parked(small: Slots) -> None:
    slot, worker = slot_of(small)
    first, _second = await open_several(small, 2)
    worker.refusals[OpenOp] = InsufficientMemory("Free memory fell meanwhile.")
    with pytest.raises(InsufficientMemory) as refused:
        await small.open("big", WINDOW)
    assert refused.value.message.startswith("Free memory fell meanwhile.")
    assert refused.value.metadata["parked_sessions"] == "2"
    assert len(parked(slot)) == 2
    worker.refusals.clear()
    await use(slot, first)
    assert not first.parked


# --- limits --------------------------------------------------------------------------------------


async def test_contexts_are_bounded_by_one_setting_and_open_sessions_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch, max_sessions=2, max_open_sessions=4)
    slot, worker = slot_of(slots)
    sessions = [await slots.open("big", 1024) for _ in range(4)]
    assert len(worker.contexts) == slot.sessions.resident == 2
    assert slots.loads("llama")[0].max_contexts == 2
    with pytest.raises(InsufficientMemory) as refused:
        await slots.open("big", 1024)
    assert refused.value.metadata == {"open_sessions": "4", "max_open_sessions": "4"}
    assert len(slot.sessions) == 4
    assert len(sent(worker, OpenOp)) == 4
    sessions[2].attached = False
    await slots.open("big", 1024)  # the detached one makes way
    assert sessions[2].session_id not in ids(slot.sessions.all())
    assert len(slot.sessions) == 4


async def test_all_contexts_taken_and_none_idle_is_the_worker_s_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch, max_sessions=1)
    slot, worker = slot_of(slots)
    only = await slots.open("big", 1024)
    only.operations.add(object())
    worker.refusals[OpenOp] = InsufficientMemory("All 1 engine contexts are held.")
    with pytest.raises(InsufficientMemory, match="All 1 engine contexts are held"):
        await slots.open("big", 1024)
    assert not sent(worker, ParkOp)
    assert not only.parked
    assert len(slot.sessions) == 1


@pytest.mark.parametrize(
    ("given", "contexts", "opened"),
    [
        ({}, 8, 64),
        ({"max_sessions": 100}, 100, 100),
        ({"max_open_sessions": 4}, 4, 4),
        ({"max_sessions": 2, "max_open_sessions": 3}, 2, 3),
    ],
)
def test_a_default_gives_way_to_the_limit_that_was_set(
    tmp_path: Path, given: dict[str, object], contexts: int, opened: int
) -> None:
    config = load_config(given, {}, tmp_path)
    assert (config.max_sessions, config.max_open_sessions) == (contexts, opened)


def test_fewer_open_sessions_than_contexts_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({"max_sessions": 5, "max_open_sessions": 4}, {}, tmp_path)
    assert refused.value.metadata["field"] == "max_open_sessions"
    assert "max_sessions (5)" in refused.value.message


# --- coming back ---------------------------------------------------------------------------------


async def test_a_parked_session_s_next_call_brings_it_back_first(small: Slots) -> None:
    slot, worker = slot_of(small)
    first, second, *_ = await open_several(small)
    fourth = await small.open("big", WINDOW)
    watcher = slot._bus.watch()
    second.used_at, fourth.used_at = 0.5, 50.0
    worker.sent.clear()
    await use(slot, first)
    assert [type(payload) for payload in worker.sent] == [ParkOp, ResumeOp, TrimOp]
    assert parked(slot) == [second.session_id]
    out, back = await events(watcher, 2)
    assert (out.state, out.session_id) == ("parked", second.session_id)
    assert (back.state, back.session_id) == ("resumed", first.session_id)
    assert back.cause == f"{WINDOW // 10} tokens brought back in 0.250 s"
    assert first.resident == WINDOW // 10
    # The window is the one that was opened, whatever an automatic one would be by now.
    assert worker.windows[first.session_id] == WINDOW


async def test_a_session_that_can_not_come_back_stays_parked_and_says_why(small: Slots) -> None:
    slot, worker = slot_of(small)
    first, second, third = await open_several(small)
    fourth = await small.open("big", WINDOW)
    for busy in (second, third, fourth):
        busy.operations.add(object())  # type: ignore[arg-type]
    with pytest.raises(InsufficientMemory) as refused:
        await use(slot, first)
    assert first.parked
    assert refused.value.metadata["parked_sessions"] == "0"
    assert int(refused.value.metadata["window"]) == WINDOW
    assert not sent(worker, TrimOp)
    for busy in (second, third, fourth):
        busy.operations.clear()
    await use(slot, first)
    assert not first.parked


async def test_two_calls_of_parked_sessions_at_once_bring_each_back_once(small: Slots) -> None:
    slot, worker = slot_of(small)
    first, second, third = await open_several(small)
    for number in range(3):
        other = await small.open("big", WINDOW)
        other.used_at = 100.0 + number
    assert parked(slot) == ids([first, second, third])
    await asyncio.gather(*(slot.ready(session) for session in (first, second, first, second)))
    resumed = [one.session_id for one in sent(worker, ResumeOp)]
    assert sorted(resumed) == sorted(ids([first, second]))
    assert len(worker.contexts) == slot.use.sessions == SEVERAL


async def test_a_session_closed_while_it_waits_to_come_back_is_closed(small: Slots) -> None:
    slot, worker = slot_of(small)
    first, *_ = await open_several(small)
    await small.open("big", WINDOW)
    async with slot.placing:
        waiting = asyncio.create_task(slot.ready(first))
        await asyncio.sleep(0)
        await slot.close(first, why="closed by its client")
    with pytest.raises(SessionClosed):
        await waiting
    assert not sent(worker, ResumeOp)


async def test_a_cancelled_call_leaves_its_session_as_the_worker_has_it(small: Slots) -> None:
    slot, worker = slot_of(small)
    first, *_ = await open_several(small)
    await small.open("big", WINDOW)
    worker.gates[ResumeOp] = gate = asyncio.Event()
    calling = asyncio.create_task(use(slot, first))
    while not sent(worker, ResumeOp):  # noqa: ASYNC110
        await asyncio.sleep(0)
    calling.cancel()
    await asyncio.sleep(0)
    assert not calling.done(), "it leaves before the worker is done"
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert not first.parked
    assert not sent(worker, TrimOp)
    assert slot.sessions.resident == len(worker.contexts) == SEVERAL


async def test_an_open_whose_caller_is_gone_leaves_no_session(small: Slots) -> None:
    slot, worker = slot_of(small)
    await open_several(small, 1)
    worker.gates[OpenOp] = gate = asyncio.Event()
    opening = asyncio.create_task(small.open("big", WINDOW))
    while len(sent(worker, OpenOp)) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    opening.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await slot.drain()
    assert len(slot.sessions) == len(worker.contexts) == slot.use.sessions == 1


# --- the end of a parked session -----------------------------------------------------------------


async def test_a_parked_session_is_closed_without_being_brought_back(small: Slots) -> None:
    slot, worker = slot_of(small)
    first, *_ = await open_several(small)
    await small.open("big", WINDOW)
    assert first.parked
    await slot.close(first, why="closed by its client", discard=True)
    assert not worker.parked
    assert not sent(worker, ResumeOp)
    assert (len(slot.sessions), slot.use.sessions, len(worker.contexts)) == (3, 3, 3)


async def test_a_detached_parked_session_is_found_by_its_key_and_expires_like_any(
    small: Slots,
) -> None:
    slot, _ = slot_of(small)
    capacity = CapacityRequest(window=WINDOW)
    keyed = (await slot.open(OpenRequest("big", capacity, "key", "", ""), Caller())).session
    keyed.attached, keyed.used_at = False, 0.0
    await open_several(small)
    assert parked(slot) == [keyed.session_id]
    opened = await slot.open(OpenRequest("big", capacity, "key", "", ""), Caller())
    assert opened.attached
    assert opened.session is keyed
    await use(slot, keyed)
    nameless = next(one for one in slot.sessions.all() if one.parked)
    assert nameless is not keyed
    nameless.used_at = -slot.config.session_ttl_s
    await slot.tick(1.0)
    assert nameless.session_id not in ids(slot.sessions.all())


async def test_a_worker_that_dies_takes_parked_sessions_with_it(small: Slots) -> None:
    slot, _ = slot_of(small)
    first, *_ = await open_several(small)
    await small.open("big", WINDOW)
    generation = slot.sessions.generation
    slot.worker_died(Death("signal", "SIGKILL", -9, "killed", None, ()))
    assert not slot.sessions.all()
    assert slot.sessions.generation > generation
    assert slot.use == SlotUse()
    assert slot.held().total == 0
    with pytest.raises(Exception, match="generation"):
        await use(slot, first)


async def test_a_call_to_a_worker_that_just_died_is_told_that_its_session_is_gone(
    small: Slots,
) -> None:
    slot, worker = slot_of(small)
    first, *_ = await open_several(small)
    death = Death("signal", "SIGKILL", -9, "killed", None, ())
    worker.unreachable = lambda: slot.worker_died(death)
    with pytest.raises(GenerationStale) as told:
        await use(slot, first)
    assert "killed" in told.value.metadata["cause"]
    first.generation = slot.sessions.generation  # one that nobody lost
    worker.unreachable = lambda: None
    with pytest.raises(WorkerUnavailable):
        await slot.call(ParkOp(session_id="s"))


async def test_an_open_whose_answer_comes_with_the_worker_s_death_is_made_anew(
    small: Slots, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, worker = slot_of(small)
    call, deaths = slot.call, [1]

    async def dying(request: Payload, **options: Any) -> Payload:
        result = await call(request, **options)
        if isinstance(request, OpenOp) and deaths:
            deaths.clear()
            worker.contexts.clear()
            worker.windows.clear()
            slot.worker_died(Death("signal", "SIGKILL", -9, "killed", None, ()))
        return result

    monkeypatch.setattr(slot, "call", dying)
    session = await small.open("big", WINDOW)
    assert not deaths
    assert slot.sessions.all() == [session]
    assert session.generation == slot.sessions.generation
    assert len(small.loads("llama")) == 2
    await use(slot, session)


async def test_a_session_is_idle_from_its_last_call_s_end_on_and_not_while_one_waits(
    small: Slots,
) -> None:
    slot, _ = slot_of(small)
    running, waiting, idle = await open_several(small)
    async with slot.hold(running.session_id, "turn", Caller()):
        queued = asyncio.create_task(use(slot, waiting))
        await asyncio.sleep(0)
        long_after = time.monotonic() + 10 * slot.config.session_ttl_s
        assert slot.sessions.attached(long_after) == [running, waiting]
        assert slot.sessions.expired(long_after) == [idle]
        began = time.monotonic()
    await queued
    assert running.used_at >= began
    assert waiting.used_at >= running.used_at
    assert len(slot.sessions.expired(long_after)) == 3


async def test_an_unload_forgets_what_was_parked(small: Slots) -> None:
    slot, worker = slot_of(small)
    await open_several(small)
    await small.open("big", WINDOW)
    worker.beat()
    assert slot.held().total >= 3 * CONTEXT + worker.cold
    assert await slot.unload(Caller(), force=True) == 4
    assert slot.held().total == 0  # though the last heartbeat still tells of parked bytes
    await open_several(small)
    assert slot.use.cold_bytes == 0
    assert not parked(slot)


# --- what plans make of it -----------------------------------------------------------------------


async def test_parked_kv_is_given_back_to_its_own_slot_and_held_for_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch)
    slot, worker = slot_of(slots)
    await slots.open("big", WINDOW)
    before, beside = await plan(slots, "big"), await plan(slots, "ir")
    worker.cold = GIB
    worker.touch(GIB)
    worker.beat()
    after, other = await plan(slots, "big"), await plan(slots, "ir")
    assert row(after, "reclaimable") - row(before, "reclaimable") == GIB
    assert after.numbers.memory_fit.tokens == before.numbers.memory_fit.tokens
    lost = beside.numbers.memory_fit.tokens - other.numbers.memory_fit.tokens
    assert lost * KV_A_TOKEN > 0.9 * GIB
    assert slot.held().total == 100 * MIB + CONTEXT + GIB
    # What is beyond the contexts and the reserve is to be freed for a context that needs it.
    largest = CapacityRequest(window=after.numbers.memory_fit.tokens - WINDOW)
    full, _ = await slot.hypothetical(slots.store.get("big"), WhatIf(largest))
    assert full.refusal is None
    assert 0.9 * GIB < full.free_bytes <= GIB


async def test_the_store_s_growth_is_not_taken_for_buffers_that_were_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch)
    _, worker = slot_of(slots)
    worker.compute = 512 * MIB
    await slots.open("big", WINDOW)
    assert row(await plan(slots, "big"), "promised") == 512 * MIB
    worker.cold = 300 * MIB
    worker.touch(300 * MIB)
    worker.beat()
    assert row(await plan(slots, "big"), "promised") == 512 * MIB
    worker.touch(300 * MIB)  # buffers, this time
    assert row(await plan(slots, "big"), "promised") == (512 - 300 + 8) * MIB


async def test_what_a_park_told_counts_until_a_newer_heartbeat(small: Slots) -> None:
    slot, worker = slot_of(small)
    worker.beat()
    await open_several(small)
    await small.open("big", WINDOW)
    slot.held()
    assert slot.use.cold_bytes == worker.cold == CONTEXT // 10
    worker.cold //= 2
    worker.beat()
    slot.held()
    assert slot.use.cold_bytes == CONTEXT // 20


async def test_the_worker_is_told_its_budgets_and_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(
        tmp_path, monkeypatch, cold_ram_bytes="3GiB", cold_disk_bytes="5GiB", backends="llama"
    )
    session = await slots.open("big", WINDOW)
    (load,) = slots.loads("llama")
    assert load.cold is not None
    assert (load.cold.ram_bytes, load.cold.disk_bytes) == (3 * GIB, 5 * GIB)
    folder = tmp_path / "cold" / "llama"
    assert load.cold.folder == str(folder)
    for made in (folder, folder.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    # 3 GiB hold 26,214 tokens beside the window.
    assert session.resolution.numbers.planner.tokens == WINDOW + 3 * GIB // KV_A_TOKEN
    assert session.resolution.cold_bytes == 3 * GIB


async def test_a_user_s_limit_holds_for_parked_kv_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(
        tmp_path, monkeypatch, cold_ram_bytes="3GiB", user_limit_bytes="2GiB", backends="llama"
    )
    session = await slots.open("big", WINDOW)
    (load,) = slots.loads("llama")
    assert load.cold is not None
    left = row(session.resolution, "left")
    assert load.cold.ram_bytes == session.resolution.cold_bytes == left
    assert 0 < left < 2 * GIB - CONTEXT


async def test_where_a_limit_leaves_nothing_to_parked_kv_nothing_is_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "roomy").mkdir()
    roomy = make_slots(tmp_path / "roomy", monkeypatch, backends="llama")
    plain = (await roomy.open("big", WINDOW)).resolution
    predicted = row(plain, "compute") + row(plain, "kv") + row(plain, "weights")
    limit = needed_total(predicted, 0.02)  # all of it, and what isn't modelled
    slots = make_slots(tmp_path, monkeypatch, user_limit_bytes=limit, backends="llama")
    _, worker = slot_of(slots)
    plan = (await slots.open("big", WINDOW)).resolution
    assert plan.cold_bytes == 0
    assert slots.loads("llama")[0].cold is None
    assert plan.numbers.planner.tokens == WINDOW
    error = await refusal_of(slots)
    assert f"of user_limit_bytes ({limit}) the plan" in error.message
    assert "left 0 bytes" in error.message
    assert f"Set cold_disk_bytes to at least {CONTEXT}" in error.message
    assert f"or user_limit_bytes to at least {limit + CONTEXT}." in error.message
    assert not sent(worker, ParkOp)
    (tmp_path / "raised").mkdir()  # what it says to do is what it takes
    raised = make_slots(
        tmp_path / "raised", monkeypatch, user_limit_bytes=limit + CONTEXT, backends="llama"
    )
    await raised.open("big", WINDOW)
    cold = raised.loads("llama")[0].cold
    assert cold is not None
    assert cold.ram_bytes > 0


async def test_a_folder_that_can_not_be_written_is_told_as_why_nothing_is_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cold").write_text("in the way")
    slots = make_slots(
        tmp_path, monkeypatch, cold_ram_bytes=0, cold_disk_bytes=GIB, backends="llama"
    )
    slot, _ = slot_of(slots)
    await slots.open("big", WINDOW)
    assert slots.loads("llama")[0].cold is None
    assert f"cold_disk_bytes is {GIB}, but {tmp_path / 'cold'} can't be written" in slot.cannot_park
    assert "user_limit_bytes" not in slot.cannot_park


async def test_an_overflow_tells_the_session_s_own_logical_window(small: Slots) -> None:
    slot, worker = slot_of(small)
    (session,) = await open_several(small, 1)
    worker.refusals[TrimOp] = ContextOverflow("Too long.", metadata={"planner": WINDOW})
    with pytest.raises(ContextOverflow) as refused:
        await use(slot, session)
    told = int(refused.value.metadata["planner"])
    assert told == session.resolution.numbers.planner.tokens > WINDOW


async def plan(slots: Slots, name: str) -> Any:
    slot = slots.slots[slots.store.get(name).type]
    k_type, v_type = slots.config.kv_types(slot.backend)
    request = CapacityRequest(k_type=k_type, v_type=v_type)
    found, _ = await slot.hypothetical(slots.store.get(name), WhatIf(request))
    return found


def row(found: Any, name: str) -> int:
    return next((one.bytes for one in found.budget if one.name == name), 0)


# --- forks ---------------------------------------------------------------------------------------


async def fork(slots: Slots, source: Session, **given: Any) -> Forked:
    slot, _ = slot_of(slots)
    return await slot.fork(source, Caller(), **given)


async def test_a_fork_is_a_session_of_the_source_s_kind_with_a_context_of_its_own(
    small: Slots,
) -> None:
    slot, worker = slot_of(small)
    (source,) = await open_several(small, 1)
    source.seen_tokens, source.tools = 77, ("{}",)
    forked = await fork(small, source, session_key="branch")
    made = forked.session
    assert made.session_id != source.session_id
    assert slot.sessions.by_key("branch") is made
    assert (made.identity, made.request, made.tools) == (
        source.identity, source.request, source.tools,
    )  # fmt: skip
    assert (made.resident, made.seen_tokens) == (WINDOW // 2, 77)
    assert made.capabilities == source.capabilities
    assert made.resolution.numbers.effective.tokens == WINDOW
    assert made.resolution.numbers.hot.tokens == 2 * WINDOW
    (operation,) = sent(worker, ForkOp)
    assert (operation.session_id, operation.new_session_id) == tuple(ids([source, made]))
    await slot.close(source, why="closed by its client")
    await use(slot, made)
    assert (len(slot.sessions), slot.use.sessions) == (1, 1)


async def test_a_fork_parks_others_and_never_its_source(small: Slots) -> None:
    slot, worker = slot_of(small)
    source, second, _ = await open_several(small)
    forked = await fork(small, source)
    assert parked(slot) == [second.session_id]
    assert {source.session_id, forked.session.session_id} <= set(worker.contexts)


async def test_a_parked_source_is_brought_back_to_be_forked(small: Slots) -> None:
    slot, worker = slot_of(small)
    source, second, third = await open_several(small)
    await small.open("big", WINDOW)
    second.used_at, third.used_at = 0.5, 0.6
    worker.sent.clear()
    await fork(small, source)
    assert [type(one) for one in worker.sent] == [ParkOp, ResumeOp, ParkOp, ForkOp]
    assert parked(slot) == ids([second, third])


async def test_a_session_that_is_being_closed_is_in_no_fork_s_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch, max_sessions=SEVERAL)
    slot, worker = slot_of(slots)
    source, closing, _, busy = await open_several(slots, SEVERAL + 1)
    assert parked(slot) == [source.session_id]
    busy.operations.add(object())  # type: ignore[arg-type]
    worker.gates[CloseOp] = gate = asyncio.Event()
    close = asyncio.create_task(slot.close(closing, why="test"))
    await asyncio.sleep(0)
    forked = await fork(slots, source)
    assert not source.parked
    gate.set()
    await close
    assert len(slot.sessions.all()) == SEVERAL + 1
    assert slot.use.sessions == slot.sessions.resident
    assert forked.session.session_id in worker.contexts


async def test_a_fork_that_does_not_fit_is_refused_with_the_numbers_and_changes_nothing(
    small: Slots,
) -> None:
    slot, worker = slot_of(small)
    big = await small.open("big", 2 * WINDOW)
    with pytest.raises(InsufficientMemory) as refused:
        await fork(small, big)
    assert int(refused.value.metadata["window"]) == 2 * WINDOW
    assert not sent(worker, ForkOp)
    assert slot.sessions.all() == [big]


async def test_a_model_whose_state_is_not_copied_is_not_forked(small: Slots) -> None:
    slot, worker = slot_of(small)
    worker.fork = "no: not tried"
    (source,) = await open_several(small, 1)
    with pytest.raises(UnsupportedFeature, match="evaluated again") as refused:
        await fork(small, source)
    assert refused.value.metadata["capability"] == "fork"
    assert slot.sessions.all() == [source]
    assert not sent(worker, ForkOp)


async def test_a_fork_s_key_must_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = make_slots(tmp_path, monkeypatch)
    slot, worker = slot_of(slots)
    source = await slots.open("big", WINDOW)
    other = await slots.open("big", WINDOW)
    other.key = "taken"
    with pytest.raises(InvalidRequest) as refused:
        await fork(slots, source, session_key="taken")
    assert refused.value.metadata["field"] == "session_key"
    elsewhere = await slots.open("ir", WINDOW)
    elsewhere.key, elsewhere.durable = "there", True
    slot.durable.join(slots.slots["openvino"].sessions)
    with pytest.raises(ManifestMismatch):
        await fork(slots, source, session_key="there")
    assert not sent(worker, ForkOp)
    assert len(slot.sessions) == 2


async def test_forks_count_as_open_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch, max_sessions=2, max_open_sessions=2)
    slot, _ = slot_of(slots)
    source = await slots.open("big", 1024)
    await fork(slots, source)
    with pytest.raises(InsufficientMemory, match="max_open_sessions"):
        await fork(slots, source)
    assert len(slot.sessions) == 2


async def test_a_detached_source_is_not_closed_to_make_place_for_its_own_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(tmp_path, monkeypatch, max_sessions=1, max_open_sessions=1)
    slot, _ = slot_of(slots)
    source = await slots.open("big", 1024)
    source.attached = False
    with pytest.raises(InsufficientMemory, match="max_open_sessions"):
        await fork(slots, source)
    assert slot.sessions.all() == [source]


# --- the pure parts ------------------------------------------------------------------------------


async def test_what_parking_would_give_back_is_each_session_s_share_of_every_place(
    small: Slots,
) -> None:
    first, second, third = await open_several(small)
    held = SlotUse(
        cells=3 * WINDOW,
        resident_bytes=2 * CONTEXT,
        sessions=3,
        on_devices=(PlacedUse("gpu", 5, CONTEXT, 0),),
    )
    after = parking.use_if_parked(held, [first, second])
    assert (after.sessions, after.reclaimable_cells) == (1, 2 * WINDOW)
    assert after.reclaimable_bytes == 2 * CONTEXT * 2 // 3
    assert after.on_devices[0].reclaimable_bytes == CONTEXT * 2 // 3
    assert after.on_devices[0].weights_bytes == 5
    everything = parking.use_if_parked(held, [first, second, third, first])
    assert everything.reclaimable_bytes == 2 * CONTEXT
    assert everything.reclaimable_cells == 3 * WINDOW
    assert parking.use_if_parked(SlotUse(), []) == SlotUse()


def status(reused: int, *, prefilled: int = 5, restored: int = 0, miss: str = "NONE") -> Status:
    return Status(
        part="prefix", reused=reused, dropped=0, prefilled=prefilled, prefix=0, suffix=0,
        resident=0, available=0, retained=0, copied=0, miss_reason=miss, stable_token_hash="",
        volatile_token_hash="", template_additive=True, turns_recomputed=0, seen_tokens=0,
        seconds=1.0, segments=[], restored=restored,
    )  # fmt: skip


async def test_what_came_back_is_told_once_over_the_statuses_of_a_turn(small: Slots) -> None:
    (session,) = await open_several(small, 1)
    session.back = Back(restored=100, missing=0, seconds=0.5)
    prefix = parking.told(session, status(60))
    suffix = parking.told(session, status(70, restored=10))
    assert (prefix.restored, prefix.seconds) == (60, 1.5)
    assert (suffix.restored, suffix.seconds) == (50, 1.0)
    assert prefix.miss_reason == suffix.miss_reason == "NONE"
    third = parking.told(session, status(70))
    assert third.restored == 0


@pytest.mark.parametrize(
    ("miss", "prefilled", "expected"),
    [
        ("NONE", 5, "RECLAIMED"),
        ("EXTENDED", 5, "RECLAIMED"),
        ("TOKENS_DIFFER", 5, "TOKENS_DIFFER"),
        ("NONE", 0, "NONE"),
    ],
)
async def test_what_was_lost_while_parked_is_why_it_is_evaluated_again(
    small: Slots, miss: str, prefilled: int, expected: str
) -> None:
    (session,) = await open_several(small, 1)
    session.back = Back(restored=0, missing=9, seconds=0.0)
    assert parking.told(session, status(0, prefilled=prefilled, miss=miss)).miss_reason == expected
