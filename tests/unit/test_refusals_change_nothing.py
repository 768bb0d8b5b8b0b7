"""What a refused or overtaken open, fork or call leaves behind in a slot: nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from modeld.shared.capacity import CapacityRequest
from modeld.shared.errors import (
    InsufficientMemory,
    ManifestMismatch,
    ModelBusy,
    SessionClosed,
)
from modeld.shared.messages import (
    CloseOp,
    ForkOp,
    OpenOp,
    ParkOp,
    Payload,
    ResumeOp,
    TrimOp,
)
from modeld.supervisor.durable_sessions import DurableSessions
from modeld.supervisor.model_slot import ModelSlot, Opened, OpenRequest
from modeld.supervisor.saved_quota import SavedQuota
from modeld.supervisor.sessions import Session
from modeld.supervisor.slot_core import Caller
from tests.support import slots as slots_support
from tests.support.slots import GIB, Machine, Slots, Worker, make_slots

WINDOW = 8192
SEVERAL = 3  # contexts that the small machine below holds

P = TypeVar("P", bound=Payload)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slots:
    """A machine that holds three contexts, whose slots share what is durable."""
    return on_small(tmp_path, monkeypatch)


def on_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Slots:
    slots = make_slots(tmp_path, monkeypatch, machine=Machine(8 * GIB, 4 * GIB), **settings)
    shared = DurableSessions(tmp_path, SavedQuota(tmp_path, 0))
    for slot in slots.slots.values():
        slot.durable = shared
        shared.join(slot.sessions)
    return slots


def slot_of(slots: Slots) -> tuple[ModelSlot, Worker]:
    return slots.slots["llama"], slots.workers["llama"]


def slot_for(slots: Slots, model: str) -> ModelSlot:
    return slots.slots[slots.store.get(model).type]


async def open_by(slots: Slots, key: str, model: str = "big", **given: Any) -> Opened:
    slot = slot_for(slots, model)
    k_type, v_type = slots.config.kv_types(slot.backend)
    capacity = CapacityRequest(window=given.pop("window", WINDOW), k_type=k_type, v_type=v_type)
    return await slot.open(OpenRequest(model, capacity, key, "", "raw", **given), Caller())


async def open_several(slots: Slots, count: int = SEVERAL) -> list[Session]:
    return await slots_support.open_several(slots, count, WINDOW)


def sent(worker: Worker, *kinds: type[P]) -> list[P]:
    return [payload for payload in worker.sent if isinstance(payload, kinds)]


async def until(happened: Callable[[], object]) -> None:
    """Wait for what will come; a machine that is busy may take its time."""
    for _ in range(20_000):
        if happened():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it never came")


# --- planned before anybody goes -----------------------------------------------------------------


async def test_a_fresh_open_that_does_not_fit_leaves_the_session_that_has_the_key(
    small: Slots,
) -> None:
    slot, worker = slot_of(small)
    held = (await open_by(small, "mine", durable=True)).session
    with pytest.raises(InsufficientMemory):
        await open_by(small, "mine", durable=True, fresh=True, window=100_000)
    assert slot.sessions.all() == [held]
    assert not held.parked
    assert not sent(worker, CloseOp, ParkOp)
    made = await open_by(small, "mine", durable=True, fresh=True)
    assert slot.sessions.all() == [made.session]


async def test_a_fresh_open_is_planned_with_the_memory_of_the_one_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = on_small(tmp_path, monkeypatch, cold_ram_bytes=0)  # parking is no way out
    slot, worker = slot_of(slots)
    window = (SEVERAL - 1) * WINDOW
    held = (await open_by(slots, "mine", durable=True, window=window)).session
    with pytest.raises(InsufficientMemory):
        await open_by(slots, "other", durable=True, window=window)
    made = (await open_by(slots, "mine", durable=True, fresh=True, window=window)).session
    assert slot.sessions.all() == [made]
    assert set(worker.contexts) == {made.session_id}
    assert [one.session_id for one in sent(worker, CloseOp)] == [held.session_id]


@pytest.mark.parametrize("parks", [True, False])
async def test_an_open_that_does_not_fit_closes_no_detached_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parks: bool
) -> None:
    settings = {"max_sessions": 2, "max_open_sessions": 2}
    slots = on_small(tmp_path, monkeypatch, cold_ram_bytes=GIB if parks else 0, **settings)
    slot, worker = slot_of(slots)
    first, second = await open_several(slots, 2)
    first.attached = False
    with pytest.raises(InsufficientMemory):
        await slots.open("big", 100_000)
    assert slot.sessions.all() == [first, second]
    assert not sent(worker, CloseOp, ParkOp)
    third = await slots.open("big", WINDOW)
    assert slot.sessions.all() == [second, third]
    assert not sent(worker, ParkOp)


async def test_who_is_used_again_while_an_open_is_planned_is_not_closed_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = on_small(tmp_path, monkeypatch, max_open_sessions=2, max_sessions=2)
    slot, worker = slot_of(slots)
    first, second = [await slots.open("big", WINDOW) for _ in range(2)]
    first.attached = False
    read = slot.planning.read

    async def reading(*given: Any) -> Any:
        slot.sessions.get(first.session_id, first.generation, first.used_at)  # as a call does
        return await read(*given)

    monkeypatch.setattr(slot.planning, "read", reading)
    with pytest.raises(InsufficientMemory, match="max_open_sessions"):
        await slots.open("big", WINDOW)
    assert slot.sessions.all() == [first, second]
    assert not sent(worker, CloseOp)


async def test_a_fork_that_does_not_fit_neither_brings_its_source_back_nor_parks_for_it(
    small: Slots,
) -> None:
    slot, worker = slot_of(small)
    source = await small.open("big", 2 * WINDOW)
    source.used_at = 0.0
    other = await small.open("big", 2 * WINDOW)
    assert source.parked
    worker.sent.clear()
    with pytest.raises(InsufficientMemory) as refused:
        await slot.fork(source, Caller())
    assert refused.value.metadata["parked_sessions"] == "0"
    assert not sent(worker, ParkOp, ResumeOp, ForkOp)
    assert (source.parked, other.parked) == (True, False)


async def test_a_fork_where_one_context_is_allowed_leaves_its_parked_source_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = on_small(tmp_path, monkeypatch, max_sessions=1)
    slot, worker = slot_of(slots)
    source, other = await open_several(slots, 2)
    assert source.parked
    worker.sent.clear()
    with pytest.raises(InsufficientMemory, match="max_sessions allows 1"):
        await slot.fork(source, Caller())
    assert not worker.sent
    assert (source.parked, other.parked) == (True, False)


# --- closed while a call of it goes on -----------------------------------------------------------


async def test_a_session_that_is_closed_while_it_comes_back_is_told_as_closed(
    small: Slots,
) -> None:
    slot, worker = slot_of(small)
    first, *_ = await open_several(small)
    await small.open("big", WINDOW)
    assert first.parked
    worker.gates[ResumeOp] = asyncio.Event()

    async def use() -> None:
        async with slot.hold(first.session_id, "trim", Caller()):
            await slot.call(TrimOp(session_id=first.session_id, keep=0), session=first)

    running = asyncio.create_task(use())
    await until(lambda: sent(worker, ResumeOp))
    closing = asyncio.create_task(slot.close(first, why="closed by its client"))
    await until(lambda: not slot.sessions.is_open(first))
    worker.gates[ResumeOp].set()
    await closing
    with pytest.raises(SessionClosed, match="closed by its client"):
        await running
    assert not sent(worker, TrimOp)
    assert first.session_id not in worker.contexts
    assert slot.use.sessions == slot.sessions.resident == len(worker.contexts)
    assert slot.queue.snapshot().running == 0
    assert not slot.machine.running
    assert (await small.open("big", WINDOW)).session_id in worker.contexts  # nothing is stuck


async def test_a_session_closed_while_no_memory_is_found_for_it_is_told_as_closed(
    small: Slots,
) -> None:
    slot, worker = slot_of(small)
    first, *others = await open_several(small)
    others.append(await small.open("big", WINDOW))
    for busy in others:
        busy.operations.add(object())  # type: ignore[arg-type]
    read = slot.planning.read

    async def reading() -> Any:
        if slot.sessions.is_open(first):
            await slot.close(first, why="closed by its client")
        return await read()

    slot.planning.read = reading  # type: ignore[method-assign, assignment]
    with pytest.raises(SessionClosed):
        await slot.ready(first)
    assert not sent(worker, ResumeOp)
    for busy in others:
        busy.operations.clear()


async def test_who_was_closed_meanwhile_is_not_closed_again_for_another(small: Slots) -> None:
    slot, worker = slot_of(small)
    first, second = await open_several(small, 2)
    await slot.close(second, why="closed by its client")
    await slot._close_all([(first, "for another"), (second, "for another")])
    assert [one.session_id for one in sent(worker, CloseOp)] == [
        second.session_id,
        first.session_id,
    ]


# --- one session a key ---------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [(True, True), (True, False), (False, True)])
async def test_two_opens_at_once_in_two_slots_give_a_durable_key_to_one(
    small: Slots, durable: tuple[bool, bool]
) -> None:
    for model in ("big", "ir"):
        await slot_for(small, model).ensure_loaded(small.store.get(model), Caller())
    gate = small.workers["llama"].gates[OpenOp] = asyncio.Event()
    opens = [
        asyncio.create_task(open_by(small, "mine", model, window=1024, durable=each))
        for model, each in zip(("big", "ir"), durable, strict=True)
    ]
    await until(lambda: sent(small.workers["llama"], OpenOp))  # the first is being made
    await asyncio.sleep(0.05)  # the second one gets as far as it can
    assert not opens[1].done()
    assert not slot_for(small, "ir").queue.snapshot().running  # others may go on there
    opener = slot_for(small, "ir")
    hasty = OpenRequest("ir", CapacityRequest(window=1024), "mine", "", "raw", durable=True)
    for caller in (Caller(no_wait=True), Caller(deadline=asyncio.get_running_loop().time() + 0.1)):
        with pytest.raises(ModelBusy, match="mine"):
            await asyncio.wait_for(opener.open(hasty, caller), 5)
    gate.set()
    answers = await asyncio.gather(*opens, return_exceptions=True)
    won = [one for one in answers if isinstance(one, Opened)]
    (lost,) = [one for one in answers if not isinstance(one, Opened)]
    assert isinstance(lost, ManifestMismatch), lost
    open_ones = [one for slot in small.slots.values() for one in slot.sessions.all()]
    assert open_ones == [won[0].session]


async def test_a_fork_and_an_open_elsewhere_give_a_key_to_one(small: Slots) -> None:
    slot, worker = slot_of(small)
    source = await small.open("big", 1024)
    await small.open("ir", 1024)
    worker.gates[ForkOp] = asyncio.Event()
    forking = asyncio.create_task(slot.fork(source, Caller(), session_key="mine"))
    await until(lambda: sent(worker, ForkOp))
    opening = asyncio.create_task(open_by(small, "mine", "ir", window=1024, durable=True))
    await asyncio.sleep(0.05)
    assert not opening.done()  # who has the key isn't known before the fork is there
    worker.gates[ForkOp].set()
    forked = await forking
    with pytest.raises(ManifestMismatch):
        await opening
    assert slot.sessions.by_key("mine") is forked.session
