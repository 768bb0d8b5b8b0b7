"""Batched sessions in a slot: what is planned for them, and who runs with whom."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from modeld.shared.capacity import CapacityRequest
from modeld.shared.errors import (
    GenerationStale,
    InsufficientMemory,
    ManifestMismatch,
    ModeldError,
    SessionFatal,
    ShuttingDown,
    UnsupportedFeature,
)
from modeld.shared.messages import (
    CloseOp,
    ForkOp,
    ForkResult,
    Heartbeat,
    LoadResult,
    OpenOp,
    OpenResult,
    ParkOp,
    ParkResult,
    Payload,
    ResumeOp,
    ResumeResult,
    TrimOp,
)
from modeld.supervisor import parking, planning_slot
from modeld.supervisor.fleet import Death, WorkerKeeper
from modeld.supervisor.lifecycle import WorkerState
from modeld.supervisor.model_slot import ModelSlot, OpenRequest
from modeld.supervisor.sessions import Session
from modeld.supervisor.slot_core import Caller, SlotCore
from modeld.supervisor.slot_events import SlotState
from tests.support.slots import GIB, MIB, Machine, Slots, Worker, make_slots

WINDOW = 4096
STREAM = WINDOW * 122_880  # bytes
STREAMS = 4

P = TypeVar("P", bound=Payload)


@dataclass
class BatchedWorker(Worker):
    """With streams: made together at the first batched open, and kept."""

    layout: str = "yes: tried: exact"
    streams: dict[str, str] = field(default_factory=dict)  # stream → session, "" if free
    shapes: dict[str, int] = field(default_factory=dict)  # windows asked for, by session

    async def recycle(self) -> None:
        pass

    def _answer(self, payload: Payload) -> Payload:
        if isinstance(payload, OpenOp) and payload.layout == "batched":
            self._ready(payload.streams, payload.window)
            self.shapes[payload.session_id] = payload.window
            return OpenResult(**self._taken(payload.session_id))
        if isinstance(payload, CloseOp):
            self._left(payload.session_id)
        if isinstance(payload, ParkOp) and payload.session_id in self.streams.values():
            self._left(payload.session_id)
            if not any(self.streams.values()):  # nobody's: given up for what needs the memory
                for stream in self.streams:
                    self._freed(stream)
                self.streams.clear()
            return ParkResult(
                parked=0, lost=0, ram_bytes=0, disk_bytes=0, seconds=0.0, **self._totals()
            )
        if isinstance(payload, ResumeOp) and payload.session_id not in self.parked:
            self._ready(STREAMS, self.shapes.get(payload.session_id, WINDOW))
            taken = self._taken(payload.session_id)
            return ResumeResult(restored=0, missing=0, resident=0, seconds=0.0, **taken)
        if isinstance(payload, ForkOp) and payload.session_id in self.streams.values():
            taken = self._taken(payload.new_session_id)
            return ForkResult(copied=7, resident=7, seconds=0.0, turn_ids=[], **taken)
        if isinstance(payload, TrimOp):
            self.contexts.setdefault(payload.session_id, 0)
        answer = super()._answer(payload)
        if isinstance(answer, LoadResult):
            answer.capabilities["layout.batched"] = self.layout
        return answer

    def _ready(self, streams: int, window: int) -> None:
        if not self.streams:
            self.streams = {f"stream {n}": "" for n in range(streams)}
            for stream in self.streams:
                self._made(stream, window)

    def _left(self, session_id: str) -> None:
        for stream, owner in self.streams.items():
            self.streams[stream] = "" if owner == session_id else owner

    def call(self, generation: int, payload: Payload, credit: int = 0) -> Any:
        free = [stream for stream, owner in self.streams.items() if not owner]
        wants = isinstance(payload, ForkOp) or getattr(payload, "layout", "") == "batched"
        if wants and self.streams and not free:
            self.refusals[type(payload)] = InsufficientMemory(
                "All are held.", metadata={"cause": "streams", "streams": len(self.streams)}
            )
        else:
            self.refusals.pop(OpenOp, None)
        return super().call(generation, payload, credit)

    def _taken(self, session_id: str) -> dict[str, Any]:
        stream = next(stream for stream, owner in self.streams.items() if not owner)
        self.streams[stream] = session_id
        return {
            "window": self.windows[stream],
            "kv_bytes": self.contexts[stream],
            "compute_bytes": 0,
            "reused_context": False,
            "retained": 0,
            **self._totals(),
        }


@dataclass
class Rig:
    slots: Slots
    slot: ModelSlot
    worker: BatchedWorker
    machine: Machine

    async def open(self, layout: str = "batched", window: int = WINDOW, key: str = "") -> Session:
        request = OpenRequest("big", CapacityRequest(window=window), key, "", "", layout=layout)
        return (await self.slot.open(request, Caller())).session

    async def open_all(self) -> list[Session]:
        return [await self.open() for _ in range(STREAMS)]

    def sent(self, kind: type[P]) -> list[P]:
        return [payload for payload in self.worker.sent if isinstance(payload, kind)]

    async def use(self, session: Session) -> None:
        async with self.slot.hold(session.session_id, "trim", Caller()):
            await self.slot.call(TrimOp(session_id=session.session_id, keep=0), session=session)

    async def using(self, *sessions: Session) -> list[asyncio.Task[None]]:
        """Calls of these, which the worker answers once its gate is opened."""
        self.worker.gates[TrimOp] = asyncio.Event()
        tasks = [asyncio.create_task(self.use(session)) for session in sessions]
        await settle()
        return tasks


@pytest.fixture
def rig_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(available: int = 12 * GIB, layout: str = "yes: tried: exact", **settings: Any) -> Rig:
        machine = Machine(16 * GIB, available)
        slots = make_slots(tmp_path, monkeypatch, machine=machine, **settings)
        worker = BatchedWorker("llama", machine, pid=1000, layout=layout)
        slot = slots.slots["llama"]
        slot.attach_keeper(worker)  # type: ignore[arg-type]
        slots.workers["llama"] = worker
        monkeypatch.setattr(planning_slot, "anonymous_bytes", lambda pid: worker.anonymous)
        return Rig(slots, slot, worker, machine)

    return make


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# --- planning ------------------------------------------------------------------------------------


async def test_the_first_open_plans_for_all_streams_and_tells_one_sessions_part(
    rig_of: Any,
) -> None:
    rig = rig_of()
    session = await rig.open()
    (operation,) = rig.sent(OpenOp)
    assert (operation.layout, operation.streams, operation.window) == ("batched", 4, WINDOW)
    numbers = session.resolution.numbers
    assert numbers.effective.tokens == session.resolution.allocated == WINDOW
    assert numbers.hot.tokens == STREAMS * WINDOW
    assert session.resolution.kv_bytes == STREAM
    rows = {row.name: row.bytes for row in session.resolution.budget}
    assert rows["kv"] == STREAMS * STREAM
    assert session.resolution.findings == ()


async def test_an_automatic_window_leaves_room_for_the_batch_and_not_for_four_of_them(
    rig_of: Any,
) -> None:
    rig = rig_of()
    session = await rig.open(window=0)
    numbers = session.resolution.numbers
    fits = numbers.memory_fit.tokens
    assert fits - 4 * 256 <= STREAMS * numbers.effective.tokens <= fits


async def test_more_sessions_of_a_batch_need_no_memory(rig_of: Any) -> None:
    rig = rig_of()
    await rig.open()
    rig.machine.available = 1 * MIB
    second = await rig.open()
    smaller = await rig.open(window=WINDOW // 2)
    unsaid = await rig.open(window=0)
    assert [one.free_bytes for one in rig.sent(OpenOp)] == [0] * 4
    assert second.resolution.numbers.hot.tokens == STREAMS * WINDOW
    assert smaller.resolution.numbers.effective.tokens == WINDOW // 2
    assert smaller.resolution.numbers.requested.tokens == WINDOW // 2
    assert unsaid.resolution.numbers.effective.tokens == WINDOW
    assert rig.slot.plan.use.cells == STREAMS * WINDOW
    assert not rig.sent(ParkOp)


async def test_a_batch_that_does_not_fit_is_refused_with_its_sum(rig_of: Any) -> None:
    rig = rig_of(available=4 * GIB)
    with pytest.raises(InsufficientMemory) as refused:
        await rig.open(window=3 * WINDOW)
    numbers = refused.value.metadata
    assert (numbers["streams"], numbers["sessions"]) == ("4", "1")
    assert int(numbers["kv_bytes"]) == STREAMS * 3 * STREAM
    assert int(numbers["needed_bytes"]) > int(numbers["kv_bytes"])
    assert numbers["layout_that_fits"] == "isolated"
    assert "4 streams of one context" in refused.value.message
    assert "open an isolated session" in refused.value.message
    assert not rig.sent(OpenOp)
    largest = int(numbers["largest_window"])
    assert (await rig.open(window=largest)).resolution.numbers.effective.tokens == largest


async def test_all_streams_taken_is_refused_and_a_detached_session_makes_room(
    rig_of: Any,
) -> None:
    rig = rig_of()
    sessions = await rig.open_all()
    with pytest.raises(InsufficientMemory) as refused:
        await rig.open()
    assert refused.value.metadata["streams"] == "4"
    sessions[2].attached = False
    await rig.open()
    assert not rig.slot.sessions.is_open(sessions[2])
    assert len(rig.slot.sessions) == STREAMS


async def test_max_sessions_does_not_count_streams(rig_of: Any) -> None:
    rig = rig_of(max_sessions=1)
    await rig.open_all()
    session = await rig.open("isolated")
    assert not rig.sent(ParkOp)
    assert session.resolution.findings == ()


async def test_an_idle_batch_is_parked_as_a_whole_for_others_and_comes_back(rig_of: Any) -> None:
    rig = rig_of(available=4 * GIB)
    sessions = await rig.open_all()
    isolated = await rig.open("isolated", window=4 * WINDOW)
    assert [one.session_id for one in rig.sent(ParkOp)] == [one.session_id for one in sessions]
    assert not rig.worker.streams
    for session in sessions:
        await rig.use(session)
        assert isolated.parked
    assert len(rig.sent(ResumeOp)) == STREAMS
    assert rig.slot.plan.use.cells == STREAMS * WINDOW
    assert not any(session.parked for session in sessions)
    await rig.use(isolated)
    assert all(session.parked for session in sessions)


async def test_a_batched_turn_that_waits_behind_who_needs_the_memory_gets_it_back(
    rig_of: Any,
) -> None:
    rig = rig_of(available=4 * GIB)
    sessions = await rig.open_all()
    (running,) = await rig.using(sessions[2])
    opening = asyncio.create_task(rig.open("isolated", window=4 * WINDOW))
    behind = asyncio.create_task(rig.use(sessions[0]))
    await settle()
    assert not rig.sent(ParkOp)  # while one of the batch runs
    rig.worker.gates[TrimOp].set()
    await running
    isolated = await opening
    await behind
    assert isolated.parked
    assert [one.parked for one in sessions] == [False, True, True, True]
    assert parking.idle(sessions, {sessions[0].session_id}, ()) == []


async def test_a_context_too_many_is_made_room_for_by_an_isolated_session(rig_of: Any) -> None:
    rig = rig_of(max_sessions=1)
    await rig.open_all()
    first = await rig.open("isolated")
    await rig.open("isolated")
    assert [one.session_id for one in rig.sent(ParkOp)] == [first.session_id]


@pytest.mark.parametrize("answer", ["no: recurrent", "unknown: no memory to try it", ""])
async def test_a_model_that_can_not_is_refused_by_capability(rig_of: Any, answer: str) -> None:
    rig = rig_of(layout=answer)
    with pytest.raises(UnsupportedFeature) as refused:
        await rig.open()
    assert refused.value.metadata["capability"] == "layout.batched"
    assert not rig.sent(OpenOp)


async def test_a_key_attaches_in_its_own_layout_only(rig_of: Any) -> None:
    rig = rig_of()
    session = await rig.open(key="k")
    assert await rig.open(key="k") is session
    with pytest.raises(ManifestMismatch) as other:
        await rig.open("isolated", key="k")
    assert other.value.metadata["field"] == "layout"


async def test_a_fork_takes_a_free_stream_or_is_refused(rig_of: Any) -> None:
    rig = rig_of()
    sessions = [await rig.open() for _ in range(STREAMS - 1)]
    rig.machine.available = 1 * MIB
    forked = (await rig.slot.fork(sessions[0], Caller())).session
    assert forked.layout == "batched"
    assert forked.resolution.numbers.hot.tokens == STREAMS * WINDOW
    with pytest.raises(InsufficientMemory) as refused:
        await rig.slot.fork(sessions[0], Caller())
    assert refused.value.metadata["streams"] == "4"


async def test_a_further_session_never_takes_the_way_back_of_a_parked_one(rig_of: Any) -> None:
    rig = rig_of(available=4 * GIB)
    sessions = await rig.open_all()
    await rig.open("isolated", window=4 * WINDOW)
    assert all(one.parked for one in sessions)
    rig.worker.sent.clear()
    with pytest.raises(InsufficientMemory) as refused:
        await rig.open()
    assert refused.value.metadata["cause"] == "streams"
    assert refused.value.metadata["streams"] == "4"
    with pytest.raises(InsufficientMemory) as refused:
        await rig.slot.fork(sessions[0], Caller())
    assert refused.value.metadata["cause"] == "streams"
    assert not rig.worker.sent
    await rig.use(sessions[0])


async def test_a_bigger_batch_comes_back_in_the_place_of_an_idle_smaller_one(rig_of: Any) -> None:
    rig = rig_of(available=4 * GIB)
    big = await rig.open()
    await rig.open("isolated", window=4 * WINDOW)
    small = await rig.open(window=WINDOW // 4)
    assert (big.parked, small.parked) == (True, False)
    (running,) = await rig.using(small)
    with pytest.raises(InsufficientMemory, match="comes back once"):
        await rig.slot.ready(big)
    assert (big.parked, small.parked) == (True, False)
    behind = asyncio.create_task(rig.use(big))  # a call of it waits for that
    await settle()
    assert rig.slot.queue.snapshot().queued == 1
    assert (big.parked, small.parked) == (True, False)
    rig.worker.gates[TrimOp].set()
    await running
    await behind
    assert (big.parked, small.parked) == (False, True)
    await rig.use(small)  # a stream of the bigger one
    assert not big.parked
    unsaid = await rig.open(window=0)  # by the batch that is there now
    assert unsaid.resolution.numbers.effective.tokens == WINDOW


async def test_an_open_that_no_stream_is_wide_enough_for_closes_no_detached_session(
    rig_of: Any,
) -> None:
    rig = rig_of()
    sessions = await rig.open_all()
    sessions[0].attached = False
    with pytest.raises(InsufficientMemory) as refused:
        await rig.open(window=2 * WINDOW)
    assert refused.value.metadata["stream_window"] == str(WINDOW)
    assert rig.slot.sessions.all() == sessions
    assert not rig.sent(CloseOp)
    assert not any(session.parked for session in sessions)


async def test_a_batch_is_not_parked_for_one_who_lacks_a_context(rig_of: Any) -> None:
    rig = rig_of(available=4 * GIB, max_sessions=1)
    sessions = await rig.open_all()
    isolated = await rig.open("isolated", window=256)
    isolated.operations.add(object())
    with pytest.raises(InsufficientMemory):
        await rig.open("isolated", window=4 * WINDOW)
    assert not rig.sent(ParkOp)
    isolated.operations.clear()
    await rig.open("isolated", window=4 * WINDOW)
    assert isolated.parked
    assert all(session.parked for session in sessions)


async def test_a_parked_session_keeps_no_batch_in_memory(rig_of: Any) -> None:
    rig = rig_of()
    first, second = await rig.open(), await rig.open()
    assert parking.given_back([first], [second]) == []
    second.parked = True
    assert parking.given_back([first], [second]) == [first]


# --- running -------------------------------------------------------------------------------------


async def test_batched_sessions_run_together_and_an_isolated_one_by_itself(rig_of: Any) -> None:
    rig = rig_of()
    sessions = await rig.open_all()
    isolated = await rig.open("isolated", window=256)
    tasks = await rig.using(*sessions)
    assert len(rig.slot.machine.running) == STREAMS
    assert rig.slot.machine.state.name == "BUSY"
    alone = asyncio.create_task(rig.use(isolated))
    await settle()
    assert len(rig.sent(TrimOp)) == STREAMS
    assert rig.slot.queue.snapshot().queued == 1
    rig.worker.gates[TrimOp].set()
    await asyncio.gather(*tasks, alone)
    assert rig.slot.machine.state.name == "READY"
    assert not rig.slot.machine.running


async def test_a_session_is_opened_and_forked_while_others_run(rig_of: Any) -> None:
    rig = rig_of()
    sessions = [await rig.open() for _ in range(2)]
    tasks = await rig.using(sessions[0])
    await rig.open()
    await rig.slot.fork(sessions[1], Caller())
    assert not tasks[0].done()
    rig.worker.gates[TrimOp].set()
    await tasks[0]


async def test_nothing_is_idle_while_one_of_them_runs(rig_of: Any) -> None:
    rig = rig_of(idle_release_s=0.001)
    sessions = await rig.open_all()
    tasks = await rig.using(*sessions[:2])
    tasks[0].cancel()
    await settle()
    assert not rig.slot.idle.due(1e12)
    rig.worker.gates[TrimOp].set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert rig.slot.idle.due(1e12)


async def test_a_dead_worker_ends_all_that_run_and_all_that_wait(rig_of: Any) -> None:
    rig = rig_of()
    sessions = await rig.open_all()
    death = Death("signal", "SIGKILL", -9, "killed", 1, ())
    rig.worker.refusals[TrimOp] = death.error()
    tasks = await rig.using(*sessions)
    waiting = asyncio.create_task(rig.use(sessions[0]))
    await settle()
    rig.slot.worker_died(death)
    rig.worker.gates[TrimOp].set()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in ended] == [SessionFatal] * STREAMS
    with pytest.raises(GenerationStale):
        await waiting
    assert rig.slot.machine.state is SlotState.EMPTY
    assert not rig.slot.machine.running
    assert len(rig.slot.sessions) == 0
    await rig.slot.queue.quiet()


async def test_an_engine_error_in_one_makes_all_handles_stale(rig_of: Any) -> None:
    rig = rig_of()
    sessions = await rig.open_all()
    tasks = await rig.using(*sessions[:2])
    fatal: ModeldError = SessionFatal("It failed.", metadata={"cause": "engine_error"})
    rig.worker.refusals[TrimOp] = fatal
    late = asyncio.create_task(rig.use(sessions[2]))
    await settle()
    rig.worker.gates[TrimOp].set()
    with pytest.raises(SessionFatal):
        await late
    await asyncio.gather(*tasks)  # what had ended in the worker by then stands
    with pytest.raises(GenerationStale):
        rig.slot.sessions.get(sessions[3].session_id, sessions[3].generation, 0.0)
    assert not rig.slot.machine.running
    await rig.slot.drain()


async def test_a_drain_lets_all_of_them_finish(rig_of: Any) -> None:
    rig = rig_of()
    sessions = await rig.open_all()
    tasks = await rig.using(*sessions[:3])
    SlotCore.begin_drain(rig.slot)
    with pytest.raises(ShuttingDown):
        await rig.use(sessions[3])
    assert len(rig.slot.machine.running) == 3
    rig.worker.gates[TrimOp].set()
    await asyncio.gather(*tasks)
    assert not rig.slot.machine.running
    await rig.slot.queue.quiet()


# --- a worker with several running calls ---------------------------------------------------------


@pytest.mark.parametrize(("begun", "said"), [(True, "it ignored a cancel for 61.0 s"), (False, "")])
def test_a_cancel_that_is_ignored_is_seen_of_each_call_that_has_begun(
    begun: bool, said: str
) -> None:
    """Heartbeats name the oldest alone; what still waits for its turn isn't judged."""
    link: Any = SimpleNamespace(heartbeat_interval_s=0.1)
    launcher: Any = None
    keeper = WorkerKeeper("llama", launcher, link)
    machine: Any = SimpleNamespace(state=WorkerState.BUSY, running={1, 2})
    keeper._machine = machine
    now_s = time.monotonic()
    keeper._progressed_s = now_s
    keeper.heartbeat = Heartbeat(progress=1, busy_op=1)
    oldest = SimpleNamespace(op_id=1, kind="TurnOp", cancelled_s=0.0, begun=True)
    other = SimpleNamespace(op_id=2, kind="DecodeOp", cancelled_s=now_s - 61, begun=begun)
    peer: Any = SimpleNamespace(heard_s=now_s, operations={1: oldest, 2: other})
    assert keeper._hung(peer, now_s) == said
