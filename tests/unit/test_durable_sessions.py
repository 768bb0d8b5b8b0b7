"""Durable sessions: what a key brings back, what stays saved, and what is told where it isn't."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from modeld.shared.capacity import CapacityRequest
from modeld.shared.errors import (
    DigestMismatch,
    InvalidRequest,
    ManifestMismatch,
    ModeldError,
    NotOwner,
    SessionFatal,
    StorageFull,
    UnsupportedFeature,
    WorkerUnavailable,
)
from modeld.shared.manifest import SegmentId
from modeld.shared.messages import (
    ChunkOut,
    DecodeIn,
    DecodeOp,
    FinalOut,
    Payload,
    RestoreOp,
    RestoreResult,
    SamplingIn,
    SavedPart,
    SaveOp,
    SaveResult,
)
from modeld.supervisor.durable_sessions import DurableSessions, Saved, folder_name
from modeld.supervisor.fleet import Death
from modeld.supervisor.model_slot import ModelSlot, Opened, OpenRequest
from modeld.supervisor.saved_folder import SavedInfo, now_unix_ms
from modeld.supervisor.saved_quota import SavedQuota
from modeld.supervisor.sessions import Session
from modeld.supervisor.slot_core import Caller
from tests.support.slots import Slots, Worker, make_slots

KEY = "mine"
WINDOW = 4096
TOKENS = 100  # that every save here holds
PREFIX = (SegmentId("system", True, "task_pinned", "", "hash-of-it"),)


@dataclass
class Saving:
    """A worker that saves too, in files of a few bytes: a part a save, and a record of turns."""

    slot: ModelSlot
    worker: Worker
    sent: list[Any] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    fails: ModeldError | None = None  # the next save, or the next restore
    deaths: int = 0  # that the next restores are

    def __post_init__(self) -> None:
        self._others = self.worker._answer
        self.worker._answer = self.answer  # type: ignore[method-assign]

    def answer(self, payload: Payload) -> Payload:
        self.sent.append(payload)
        if isinstance(payload, DecodeOp):
            self.turns.append(payload.turn_id)
            return final()
        if isinstance(payload, SaveOp):
            saved = self.save(Path(payload.folder))
            self._fail()
            return saved
        if isinstance(payload, RestoreOp):
            if self.deaths:
                self.deaths -= 1
                self._die()
            self._fail()
            return self.restored(Path(payload.folder) / payload.record)
        return self._others(payload)

    def _fail(self) -> None:
        error, self.fails = self.fails, None
        if error is not None:
            raise error

    def _die(self) -> None:
        self.worker.contexts.clear()
        self.worker.windows.clear()
        self.slot.worker_died(Death("signal", "SIGSEGV", None, "it died of it", 1, ("RestoreOp",)))
        raise SessionFatal("The worker died.", metadata={"cause": "native crash"})

    def save(self, folder: Path) -> SaveResult:
        number = len(self.turns)
        part, record = folder / f"part-{number}", folder / f"record-{number}"
        part.write_bytes(b"kv" * TOKENS)
        record.write_text(" ".join(["turns", *self.turns]))
        size = record.stat().st_size
        return SaveResult(
            record=record.name,
            record_bytes=size,
            record_digest=hashlib.sha256(record.read_bytes()).hexdigest(),
            parts=[SavedPart(part.name, 0, TOKENS, 2 * TOKENS, "d")],
            written_bytes=2 * TOKENS + size,
            tokens=TOKENS,
            seen_tokens=120,
            turns=number,
            exact=True,
            exact_reason="as tried",
            seconds=0.001,
        )

    def restored(self, record: Path) -> RestoreResult:
        return RestoreResult(
            tokens=TOKENS,
            resident=90,
            available=WINDOW - 90,
            retained=10,
            seen_tokens=120,
            turn_ids=record.read_text().split()[1:],
            exact=True,
            exact_reason="as tried",
            seconds=0.001,
            **self.worker._totals(),
        )

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(one, kind) for one in self.sent)


def final() -> FinalOut:
    return FinalOut(
        stop_reason="length", stop_sequence="", tokens=3, prefilled=0, engine_seconds=0.1,
        first_token_seconds=0.1, resident=90, available=WINDOW - 90, seen_tokens=120, seed=1,
    )  # fmt: skip


@dataclass
class Scene:
    slots: Slots
    saving: dict[str, Saving]

    @property
    def llama(self) -> Saving:
        return self.saving["llama"]

    @property
    def durable(self) -> DurableSessions:
        return self.llama.slot.durable

    def folder(self, key: str = KEY) -> Path:
        return self.durable.root / folder_name(key)

    def files(self, key: str = KEY) -> set[str]:
        folder = self.folder(key)
        return {path.name for path in folder.iterdir()} if folder.exists() else set()

    async def open(self, model: str = "big", window: int = WINDOW, **options: Any) -> Opened:
        backend = self.slots.store.get(model).type
        k_type, v_type = self.slots.config.kv_types(backend)
        capacity = CapacityRequest(window=window, k_type=k_type, v_type=v_type)
        given = {
            "session_key": KEY, "profile_id": "", "prompt_format": "raw", "durable": True,
            "capacity": capacity, **options,
        }  # fmt: skip
        return await self.slots.slots[backend].open(OpenRequest(model, **given), Caller())

    async def turn(self, session: Session, turn_id: str) -> Saved:
        slot = self.llama.slot
        session.prefix = PREFIX
        operation = DecodeOp(
            session_id=session.session_id, turn_id=turn_id, options=DecodeIn(sampling=SamplingIn())
        )
        async with slot.hold(session.session_id, "decode", Caller()):
            _, saved = await slot.answer(session, operation, ignore)
        assert saved is not None
        return saved

    async def saved(self, *turn_ids: str) -> Session:
        """A session that was saved after these turns, and is gone with its model."""
        session = (await self.open()).session
        for turn_id in turn_ids or ("t-1",):
            assert (await self.turn(session, turn_id)).ok
        await self.llama.slot.unload(Caller(), force=True)
        return session


async def ignore(_payload: Payload) -> None:
    pass


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    slots = make_slots(tmp_path, monkeypatch)
    shared = DurableSessions(tmp_path, SavedQuota(tmp_path, 0))
    for slot in slots.slots.values():
        slot.durable = shared
        shared.join(slot.sessions)
    saving = {name: Saving(slots.slots[name], slots.workers[name]) for name in slots.slots}
    return Scene(slots, saving)


# --- coming back ---------------------------------------------------------------------------------


async def test_a_key_brings_back_what_was_saved_and_says_from_when(scene: Scene) -> None:
    before = (await scene.open()).session
    assert (await scene.turn(before, "t-1")).ok
    saved = await scene.turn(before, "t-2")
    assert (saved.ok, saved.tokens, saved.written_bytes > 0) == (True, TOKENS, True)
    assert before.saved_unix_ms == saved.saved_unix_ms > 0
    await scene.llama.slot.unload(Caller(), force=True)

    opened = await scene.open()
    assert opened.session.session_id != before.session_id
    assert not opened.attached
    assert opened.resumed is not None
    assert opened.resumed.miss_reason == ""
    assert (opened.resumed.tokens, opened.resumed.seen_tokens) == (TOKENS, 120)
    assert opened.resumed.turn_ids == ("t-1", "t-2")
    assert opened.resumed.saved_unix_ms == saved.saved_unix_ms
    assert opened.resumed.exact
    # What the supervisor tells of the session is what it was saved with.
    session = opened.session
    assert (session.resident, session.seen_tokens) == (90, 120)
    assert session.prefix == PREFIX
    assert (session.durable, session.saved_unix_ms) == (True, saved.saved_unix_ms)


async def test_a_key_under_which_nothing_was_saved_says_nothing(scene: Scene) -> None:
    opened = await scene.open()
    assert opened.resumed is None
    assert opened.session.saved_unix_ms == 0
    assert not scene.llama.count(RestoreOp)


async def test_only_the_last_committed_state_is_on_disk(scene: Scene) -> None:
    await scene.saved("t-1", "t-2", "t-3")
    assert scene.files() == {"saved.json", "record-3", "part-3"}


async def test_an_open_session_is_attached_and_not_brought_back(scene: Scene) -> None:
    first = await scene.open()
    await scene.turn(first.session, "t-1")
    again = await scene.open()
    assert again.session is first.session
    assert (again.attached, again.resumed) == (True, None)


@pytest.mark.parametrize("was", [True, False])
async def test_attaching_must_agree_on_durable(scene: Scene, was: bool) -> None:
    await scene.open(durable=was)
    with pytest.raises(ManifestMismatch) as refused:
        await scene.open(durable=not was)
    assert refused.value.metadata["field"] == "durable"


async def test_a_key_is_one_session_s_in_all_slots(scene: Scene) -> None:
    await scene.open("big")
    for durable in (True, False):
        with pytest.raises(ManifestMismatch) as refused:
            await scene.open("ir", durable=durable)
        assert refused.value.metadata["field"] == "model"
        assert refused.value.metadata["actual"] == "big"
    assert scene.saving["openvino"].count(SaveOp) == 0
    assert len(scene.slots.slots["openvino"].sessions) == 0
    # Without durable on either side, keys are each slot's own.
    await scene.open("big", session_key="plain", durable=False)
    await scene.open("ir", session_key="plain", durable=False)


async def test_a_model_whose_kv_can_t_be_had_is_refused(scene: Scene) -> None:
    await scene.open(durable=False, session_key="other")
    resident = scene.llama.slot.resident
    assert resident is not None
    resident.load.capabilities["durable"] = "no: GenAI's pipeline gives no access to its KV"
    with pytest.raises(UnsupportedFeature) as refused:
        await scene.open()
    assert refused.value.metadata["capability"] == "durable"
    assert len(scene.llama.slot.sessions) == 1


# --- not coming back -----------------------------------------------------------------------------


async def check_cold(scene: Scene, opened: Opened, *words: str) -> None:
    """It opened cold and said why; what was saved stays until the next save, which goes well."""
    resumed = opened.resumed
    assert resumed is not None
    assert (resumed.tokens, resumed.turn_ids) == (0, ())
    for word in words:
        assert word in resumed.miss_reason
    there = scene.files()
    assert "record-1" in there or "saved.json" in there
    if opened.session.identity.backend == "llama":
        scene.llama.turns.clear()
        assert (await scene.turn(opened.session, "t-new")).ok
        await scene.llama.slot.unload(Caller(), force=True)
        assert scene.durable.folder(KEY).read() is not None
        assert scene.durable.folder(KEY).missing() == []


async def test_another_profile_begins_cold_and_says_both(scene: Scene) -> None:
    await scene.saved()
    opened = await scene.open(profile_id="fast")
    await check_cold(scene, opened, "profile_id", "'fast'")


async def test_other_kv_types_begin_cold(scene: Scene) -> None:
    await scene.saved()
    capacity = CapacityRequest(window=WINDOW, k_type="q8_0", v_type="f16")
    opened = await scene.open(capacity=capacity)
    await check_cold(scene, opened, "kv_digest")


async def test_a_window_that_is_too_small_begins_cold_with_the_numbers(scene: Scene) -> None:
    await scene.saved()
    folder = scene.durable.folder(KEY)
    info = folder.read()
    assert info is not None
    part = replace(info.parts[0], end=5000)
    folder.commit(replace(info, tokens=5000, parts=(part,)))
    opened = await scene.open()
    await check_cold(scene, opened, "5000", str(WINDOW))
    assert not scene.llama.count(RestoreOp)


async def test_a_larger_window_brings_it_back(scene: Scene) -> None:
    await scene.saved()
    opened = await scene.open(window=2 * WINDOW)
    assert opened.resumed is not None
    assert opened.resumed.tokens == TOKENS


async def test_another_model_s_save_is_not_taken(scene: Scene) -> None:
    await scene.saved()
    opened = await scene.open("ir")
    await check_cold(scene, opened, "backend", "'llama'")


@pytest.mark.parametrize("name", ["saved.json", "record-1", "part-1"])
async def test_a_missing_or_torn_file_begins_cold(scene: Scene, name: str) -> None:
    await scene.saved()
    path = scene.folder() / name
    path.write_bytes(path.read_bytes()[:-7])
    await check_cold(scene, await scene.open(), name)


async def test_what_the_worker_refuses_is_told_in_its_words(scene: Scene) -> None:
    await scene.saved()
    scene.llama.fails = DigestMismatch("part-1 is damaged at byte 17.")
    await check_cold(scene, await scene.open(), "damaged at byte 17")


async def test_a_worker_that_dies_of_it_is_tried_again_and_then_no_more(scene: Scene) -> None:
    await scene.saved()
    scene.llama.deaths = 1
    opened = await scene.open()
    assert opened.resumed is not None
    assert opened.resumed.tokens == TOKENS  # the second try
    await scene.llama.slot.unload(Caller(), force=True)
    scene.llama.deaths = 1
    opened = await scene.open()
    assert scene.llama.count(RestoreOp) == 3
    await check_cold(scene, opened, "ended 2 times")


async def test_a_state_is_not_blamed_for_a_worker_that_was_not_given_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.saved()
    for gone in (
        WorkerUnavailable("Nothing was sent to the worker."),
        SessionFatal("The worker was ended on request.", metadata={"cause": "drain"}),
    ):
        scene.llama.fails = gone
        opened = await scene.open()
        assert opened.resumed is not None
        assert opened.resumed.tokens == TOKENS  # the second try
        await scene.llama.slot.unload(Caller(), force=True)
    dies = [True, True]

    async def ready(session: Session) -> None:
        if dies:
            dies.pop()
            raise SessionFatal("The worker died of another one.", metadata={"cause": "signal"})

    monkeypatch.setattr(scene.llama.slot, "ready", ready)
    opened = await scene.open()
    assert not dies
    assert opened.resumed is not None
    assert opened.resumed.tokens == TOKENS
    assert not scene.durable._deaths


# --- forgetting ----------------------------------------------------------------------------------


async def test_fresh_forgets_what_was_saved(scene: Scene) -> None:
    await scene.saved()
    opened = await scene.open(fresh=True)
    assert opened.resumed is None
    assert scene.files() == set()
    await scene.llama.slot.unload(Caller(), force=True)
    assert (await scene.open()).resumed is None


async def test_fresh_takes_the_place_of_the_open_session(scene: Scene) -> None:
    first = (await scene.open()).session
    await scene.turn(first, "t-1")
    second = await scene.open(fresh=True)
    assert second.session is not first
    assert not second.attached
    assert scene.llama.slot.sessions.all() == [second.session]
    assert scene.files() == set()


async def test_a_refused_fresh_open_forgets_nothing(scene: Scene) -> None:
    await scene.saved()
    with pytest.raises(ModeldError):
        await scene.open(fresh=True, window=10**8)
    assert "saved.json" in scene.files()


async def test_closing_keeps_what_was_saved_and_discarding_forgets_it(scene: Scene) -> None:
    session = (await scene.open()).session
    await scene.turn(session, "t-1")
    await scene.llama.slot.close(session, why="test")
    back = await scene.open()
    assert back.resumed is not None
    assert back.resumed.tokens == TOKENS
    await scene.llama.slot.close(back.session, why="test", discard=True)
    assert scene.files() == set()
    assert (await scene.open()).resumed is None


async def test_a_save_after_a_discard_brings_nothing_back(scene: Scene) -> None:
    session = (await scene.open()).session
    await scene.turn(session, "t-1")
    await scene.llama.slot.close(session, why="test", discard=True)
    late = await scene.durable.save(session, scene.llama.slot.call)
    assert (late.ok, late.reason) == (False, "SESSION_CLOSED")
    assert scene.files() == set()


# --- saving --------------------------------------------------------------------------------------


async def test_a_failed_save_is_told_and_keeps_the_earlier_one(scene: Scene) -> None:
    session = (await scene.open()).session
    first = await scene.turn(session, "t-1")
    scene.llama.fails = StorageFull("No space left.")
    failed = await scene.turn(session, "t-2")
    assert (failed.ok, failed.reason, failed.detail) == (False, "STORAGE_FULL", "No space left.")
    assert (failed.tokens, failed.saved_unix_ms) == (TOKENS, first.saved_unix_ms)
    assert scene.files() == {"saved.json", "record-1", "part-1"}
    await scene.llama.slot.unload(Caller(), force=True)
    opened = await scene.open()
    assert opened.resumed is not None
    assert opened.resumed.turn_ids == ("t-1",)


async def test_a_first_save_that_fails_leaves_nothing(scene: Scene) -> None:
    session = (await scene.open()).session
    scene.llama.fails = StorageFull("No space left.")
    failed = await scene.turn(session, "t-1")
    assert (failed.ok, failed.tokens, failed.saved_unix_ms) == (False, 0, 0)
    assert scene.files() == set()


async def test_the_quota_is_kept_and_told(scene: Scene) -> None:
    session = (await scene.open()).session
    await scene.turn(session, "t-1")
    # What a save replaces doesn't count beside it: the record is some bytes longer, and no more.
    scene.durable.quota.limit_bytes = scene.durable.quota.used_bytes + 2
    failed = await scene.turn(session, "t-2")
    assert (failed.ok, failed.reason) == (False, "STORAGE_FULL")
    assert "snapshot_quota_bytes" in failed.detail
    assert "close KEY --discard" in failed.detail
    assert scene.files() == {"saved.json", "record-1", "part-1"}
    scene.durable.quota.limit_bytes = 0
    assert (await scene.turn(session, "t-3")).ok


async def test_a_full_quota_costs_no_writing(scene: Scene) -> None:
    session = (await scene.open()).session
    await scene.turn(session, "t-1")
    scene.durable.quota.limit_bytes = 10
    refused = await scene.turn(session, "t-2")
    assert not refused.ok
    assert "can't be saved; snapshots and durable sessions use" in refused.detail
    assert scene.llama.count(SaveOp) == 1


async def test_a_turn_whose_client_left_is_saved_all_the_same(scene: Scene) -> None:
    session, slot = (await scene.open()).session, scene.llama.slot
    reached, go_on = asyncio.Event(), asyncio.Event()
    call = slot.call

    async def slowly(request: Payload, **options: Any) -> Payload:
        if isinstance(request, SaveOp):
            reached.set()
            await go_on.wait()
        return await call(request, **options)

    slot.call = slowly  # type: ignore[method-assign]
    task = asyncio.ensure_future(scene.turn(session, "t-1"))
    await reached.wait()
    for _ in range(3):  # however often
        task.cancel()
        await asyncio.sleep(0)
    assert slot.queue.snapshot().holder_operation == "decode"  # nobody else may change it meanwhile
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slot.queue.snapshot().holder_operation == ""
    assert scene.files() == {"saved.json", "record-1", "part-1"}
    assert session.saved_unix_ms > 0


@pytest.mark.parametrize("began", [True, False])
async def test_a_failed_answer_is_saved_as_far_as_it_came(scene: Scene, began: bool) -> None:
    session, slot = (await scene.open()).session, scene.llama.slot
    assert (await scene.turn(session, "t-1")).ok
    call = slot.call

    async def failing(request: Payload, **options: Any) -> Payload:
        if isinstance(request, DecodeOp):
            if began:
                scene.llama.turns.append(request.turn_id)
                await options["on_data"](ChunkOut(text="so far", tokens=2))
            raise InvalidRequest.of("structured", "", "something that can go on")
        return await call(request, **options)

    slot.call = failing  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest):
        await scene.turn(session, "t-2")
    slot.call = call  # type: ignore[method-assign]
    await slot.unload(Caller(), force=True)
    opened = await scene.open()
    assert opened.resumed is not None
    # What was refused before anything changed doesn't count as a turn's end.
    assert opened.resumed.turn_ids == (("t-1", "t-2") if began else ("t-1",))
    assert scene.llama.count(SaveOp) == (2 if began else 1)


async def test_a_session_that_is_gone_by_its_end_says_that_it_wasn_t_saved(scene: Scene) -> None:
    session, slot = (await scene.open()).session, scene.llama.slot
    first = await scene.turn(session, "t-1")
    call = slot.call

    async def closed_meanwhile(request: Payload, **options: Any) -> Payload:
        result = await call(request, **options)
        if isinstance(request, DecodeOp):
            await slot.close(session, why="closed by its client")
        return result

    slot.call = closed_meanwhile  # type: ignore[method-assign]
    saved = await scene.turn(session, "t-2")
    assert (saved.ok, saved.reason) == (False, "SESSION_CLOSED")
    assert saved.saved_unix_ms == first.saved_unix_ms
    assert scene.files() == {"saved.json", "record-1", "part-1"}


async def test_who_lost_the_data_root_writes_nothing_more(scene: Scene) -> None:
    session = (await scene.open()).session
    await scene.turn(session, "t-1")

    def lost() -> None:
        raise NotOwner("This process lost the data root.")

    scene.durable._check_owner = lost
    saved = await scene.turn(session, "t-2")
    assert (saved.ok, saved.reason) == (False, "NOT_OWNER")
    assert scene.files() == {"saved.json", "record-1", "part-1"}


async def test_a_session_without_durable_is_never_saved(scene: Scene) -> None:
    session, slot = (await scene.open(durable=False)).session, scene.llama.slot
    operation = DecodeOp(
        session_id=session.session_id, turn_id="t-1", options=DecodeIn(sampling=SamplingIn())
    )
    async with slot.hold(session.session_id, "decode", Caller()):
        _, saved = await slot.answer(session, operation, ignore)
    assert saved is None
    assert not scene.llama.count(SaveOp)


async def test_an_open_session_can_be_made_durable_at_once(scene: Scene) -> None:
    slot = scene.llama.slot
    session = (await scene.open(durable=False, session_key="")).session
    taken = (await scene.open(durable=False, session_key="taken")).session
    with pytest.raises(InvalidRequest):
        await slot.keep(session, taken.key)
    assert (session.durable, session.key) == (False, "")
    async with slot.hold(session.session_id, "fork", Caller()):
        assert (await slot.keep(session, KEY)).ok
    await slot.unload(Caller(), force=True)
    opened = await scene.open()
    assert opened.resumed is not None
    assert opened.resumed.tokens == TOKENS


# --- what is left ---------------------------------------------------------------------------------


async def test_what_a_crash_left_is_swept_at_the_next_start(scene: Scene, tmp_path: Path) -> None:
    await scene.saved()
    (scene.folder() / "part-2").write_bytes(b"not committed")
    half = scene.durable.root / folder_name("half")
    half.mkdir()
    (half / "part-1").write_bytes(b"never committed")
    (scene.durable.root / ".gone-x").mkdir()
    DurableSessions(tmp_path).start()
    assert scene.files() == {"saved.json", "record-1", "part-1"}
    assert [path.name for path in scene.durable.root.iterdir()] == [folder_name(KEY)]


async def test_age_removes_what_nobody_used_but_never_what_is_open(
    scene: Scene, tmp_path: Path
) -> None:
    await scene.saved()
    session = (await scene.open(session_key="open")).session
    await scene.turn(session, "t-9")
    assert await scene.durable.prune() == ()  # no age is set
    scene.durable._max_age_s = 3600.0
    for key in (KEY, "open"):
        scene.durable.folder(key).touch(1)
    assert await scene.durable.prune() == ()  # saved within the hour, whatever the file's time
    scene.durable._max_age_s = 1e-3
    await asyncio.sleep(0.01)
    assert await scene.durable.prune() == (KEY,)
    assert scene.files() == set()
    assert "saved.json" in scene.files("open")


async def test_what_comes_back_while_age_removes_others_stays(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.saved()
    scene.durable._max_age_s = 0.02
    await asyncio.sleep(0.05)
    looked = scene.durable.infos

    def look() -> list[SavedInfo]:
        found = looked()
        scene.durable.folder(KEY).touch(now_unix_ms())  # restored, and closed again
        return found

    monkeypatch.setattr(scene.durable, "infos", look)
    assert await scene.durable.prune() == ()
    assert "saved.json" in scene.files()


async def test_a_durable_fork_that_is_given_up_leaves_its_key_free(scene: Scene) -> None:
    source, slot = (await scene.open()).session, scene.llama.slot
    reached, go_on, call = asyncio.Event(), asyncio.Event(), slot.call

    async def slowly(request: Payload, **options: Any) -> Payload:
        if isinstance(request, SaveOp):
            reached.set()
            await go_on.wait()
        return await call(request, **options)

    slot.call = slowly  # type: ignore[method-assign]
    task = asyncio.ensure_future(slot.fork(source, Caller(), session_key="branch", durable=True))
    await reached.wait()
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await slot.drain()
    assert slot.sessions.all() == [source]
    assert scene.files("branch") == set()
    branch = await slot.fork(source, Caller(), session_key="branch", durable=True)
    assert branch.session.saved_unix_ms > 0


async def test_an_open_that_is_given_up_leaves_no_half_restored_session(scene: Scene) -> None:
    await scene.saved()
    slot, call, reached = scene.llama.slot, scene.llama.slot.call, asyncio.Event()

    async def waiting(request: Payload, **options: Any) -> Payload:
        if isinstance(request, RestoreOp):
            reached.set()
            await asyncio.Event().wait()
        return await call(request, **options)

    slot.call = waiting  # type: ignore[method-assign]
    task = asyncio.ensure_future(scene.open())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    slot.call = call  # type: ignore[method-assign]
    await slot.drain()
    assert len(slot.sessions) == 0
    opened = await scene.open()
    assert opened.resumed is not None
    assert opened.resumed.tokens == TOKENS
