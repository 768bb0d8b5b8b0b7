"""Snapshots of a data root: what is listed, refused, streamed and removed."""

from __future__ import annotations

import hashlib
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modeld.shared.errors import (
    BackendMismatch,
    DigestMismatch,
    InvalidRequest,
    ModelBusy,
    ModeldError,
    SnapshotNotFound,
    StorageFull,
)
from modeld.shared.sealed_file import DigestCheck
from modeld.supervisor.saved_folder import INFO_NAME, SavedFolder, SavedInfo, now_unix_ms
from modeld.supervisor.saved_quota import SavedQuota
from modeld.supervisor.snapshot_transfer import IncomingSnapshot, Piece, pieces_of
from modeld.supervisor.snapshots import SnapshotStore
from tests.support.saved_files import (
    RECORD,
    committed,
    info_of,
    record_file,
    state_file,
    write_files,
)

DAY_MS = 86_400_000


def make_store(root: Path, quota: int = 0, max_age_s: float = 0.0) -> SnapshotStore:
    return SnapshotStore(root, SavedQuota(root, quota), max_age_s)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return make_store(tmp_path)


def save(store: SnapshotStore, tokens: int = 600, fill: bytes = b"kv", **other: Any) -> SavedInfo:
    with store.begin() as pending:
        files = write_files(pending.folder.path, tokens, fill)
        return pending.commit(info_of(files, **other))


def listed(store: SnapshotStore) -> list[str]:
    return [info.saved_id for info in store.list()]


def entries(store: SnapshotStore) -> set[str]:
    return {entry.name for entry in store.root.iterdir()}


# --- saving and looking --------------------------------------------------------------------------


def test_a_snapshot_is_listed_once_it_is_whole_and_not_before(store: SnapshotStore) -> None:
    with store.begin() as pending:
        files = write_files(pending.folder.path)
        assert listed(store) == []
        with pytest.raises(SnapshotNotFound):
            store.find(pending.saved_id)
        info = pending.commit(info_of(files))
    assert listed(store) == [info.saved_id] == [pending.saved_id]
    assert store.find(info.saved_id).label == "before lunch"
    assert entries(store) == {info.saved_id}
    assert (store.root.stat().st_mode & 0o777) == 0o700


def test_one_that_is_not_committed_leaves_nothing(store: SnapshotStore) -> None:
    class Stopped(Exception):
        pass

    def write_and_stop() -> None:
        with store.begin() as pending:
            write_files(pending.folder.path)
            raise Stopped

    with pytest.raises(Stopped):
        write_and_stop()
    assert entries(store) == set()
    assert store.quota.used_bytes == 0


def test_they_are_listed_newest_first_and_by_model(store: SnapshotStore) -> None:
    old = save(store, created_unix_ms=1)
    new = save(store, created_unix_ms=3)
    identity = replace(old.identity, model_digest="e" * 64)
    other = save(store, created_unix_ms=2, identity=identity)
    assert listed(store) == [new.saved_id, other.saved_id, old.saved_id]
    assert [info.saved_id for info in store.list("e" * 64)] == [other.saved_id]


def test_a_restart_finds_them_and_sweeps_what_crashes_left(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    info = save(store)
    for left in (".new-aa", ".gone-bb"):
        (store.root / left).mkdir()
        write_files(store.root / left)
    (store.root / info.saved_id / ".x.partial").write_bytes(b"half")
    again = make_store(tmp_path)
    assert listed(again) == [info.saved_id]
    assert entries(again) == {info.saved_id}
    assert {e.name for e in (store.root / info.saved_id).iterdir()} == {INFO_NAME, *info.files}


@pytest.mark.parametrize("snapshot_id", ["", "snap-", "../models", "snap-0123456789abcdeF", "."])
def test_what_is_no_id_is_not_found(store: SnapshotStore, snapshot_id: str) -> None:
    for work in (store.find, store.delete, lambda one: store.using(one).__enter__()):
        with pytest.raises(SnapshotNotFound):
            work(snapshot_id)


def cut(folder: Path) -> None:
    part = next(folder.glob("part-*"))
    part.write_bytes(part.read_bytes()[:-1])


def rename(folder: Path) -> None:
    text = (folder / INFO_NAME).read_text()
    (folder / INFO_NAME).write_text(text.replace("before lunch", "after lunch"))


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        rename,
        lambda folder: (folder / INFO_NAME).unlink(),
        lambda folder: (folder / RECORD).unlink(),
    ],
    ids=["cut", "edited", "no index", "no record"],
)
def test_a_damaged_one_is_left_out_told_and_can_be_deleted(
    store: SnapshotStore, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    whole, broken = save(store), save(store, fill=b"xy")
    damage(store.root / broken.saved_id)
    assert listed(store) == listed(store) == [whole.saved_id]
    assert caplog.text.count(broken.saved_id + " is left out") == 1  # and not at each look
    assert store.damaged() == (broken.saved_id,)
    with pytest.raises(DigestMismatch):
        store.find(broken.saved_id)
    store.delete(broken.saved_id)
    assert store.damaged() == ()
    assert entries(store) == {whole.saved_id}


def test_a_folder_under_another_name_is_damaged(store: SnapshotStore) -> None:
    info = save(store)
    (store.root / info.saved_id).rename(store.root / ("snap-" + "0" * 16))
    assert listed(store) == []
    assert store.damaged() == ("snap-" + "0" * 16,)


# --- removing ------------------------------------------------------------------------------------


def test_what_is_in_use_is_neither_deleted_nor_pruned(tmp_path: Path) -> None:
    store = make_store(tmp_path, max_age_s=1.0)
    info = save(store)
    SavedFolder(store.root / info.saved_id).touch(1)
    with store.using(info.saved_id) as (folder, used):
        assert used.record_digest == info.record_digest
        with pytest.raises(ModelBusy, match="restored or exported"):
            store.delete(info.saved_id)
        assert store.prune() == ()
        assert folder.missing() == []
    assert store.delete(info.saved_id) > info.size_bytes
    assert entries(store) == set()
    with pytest.raises(SnapshotNotFound):
        store.delete(info.saved_id)


def test_only_what_was_not_used_for_long_is_pruned(tmp_path: Path) -> None:
    store = make_store(tmp_path, max_age_s=86_400)
    used, unused = save(store, created_unix_ms=1, used_unix_ms=1), save(store, fill=b"xy")
    old = now_unix_ms() - 2 * DAY_MS
    for info in store.list():
        folder = SavedFolder(store.root / info.saved_id)
        folder.commit(replace(info, used_unix_ms=1))
        folder.touch(old)
    SavedFolder(store.root / used.saved_id).touch(now_unix_ms())  # restored just now
    assert store.prune() == (unused.saved_id,)
    assert listed(store) == [used.saved_id]


@pytest.mark.parametrize("used", [True, False])
def test_what_is_restored_while_others_are_pruned_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    store = make_store(tmp_path, max_age_s=86_400)
    info = save(store, created_unix_ms=1, used_unix_ms=1)
    folder = SavedFolder(store.root / info.saved_id)
    folder.touch(1)
    looked = store.list

    def look(*given: str) -> tuple[SavedInfo, ...]:
        found = looked(*given)
        if used:  # by a restore that began and ended since
            with store.using(info.saved_id) as (there, _):
                there.touch(now_unix_ms())
        return found

    monkeypatch.setattr(store, "list", look)
    assert store.prune() == (() if used else (info.saved_id,))
    monkeypatch.undo()
    assert listed(store) == ([info.saved_id] if used else [])


def test_nothing_is_pruned_without_an_age(store: SnapshotStore) -> None:
    info = save(store, created_unix_ms=1, used_unix_ms=1)
    SavedFolder(store.root / info.saved_id).touch(1)
    assert store.prune() == ()


# --- quota ---------------------------------------------------------------------------------------


def test_a_full_quota_is_refused_with_the_numbers_and_what_could_go(tmp_path: Path) -> None:
    store = make_store(tmp_path, quota=22_000)
    infos = [save(store, fill=bytes([65 + n, 65])) for n in range(3)]
    for at, info in enumerate(infos):
        SavedFolder(store.root / info.saved_id).touch(now_unix_ms() + DAY_MS - at * 60_000)
    used = store.quota.used_bytes
    assert 3 * infos[0].size_bytes < used < 22_000
    with pytest.raises(StorageFull) as caught, store.quota.room(8_000, "Saving it"):
        pytest.fail("there is no room")
    error = caught.value
    assert int(error.metadata["needed_bytes"]) == 8_000
    assert int(error.metadata["used_bytes"]) == used
    assert int(error.metadata["quota_bytes"]) == 22_000
    assert int(error.metadata["free_disk_bytes"]) > 0
    assert error.metadata["bound"] == "quota"
    # The longest unused first, and only so many as would do.
    asked = used + 8_000 - 22_000
    sizes = [SavedFolder(store.root / info.saved_id).bytes_used() for info in infos]
    enough = next(n for n in range(1, 4) if sum(sizes[-n:]) >= asked)
    unused = [info.saved_id for info in reversed(infos)][:enough]
    assert error.metadata["could_delete"] == ",".join(unused)
    assert unused[0] in error.message
    assert len(listed(store)) == 3  # nothing was removed unasked


def test_more_than_all_that_could_go_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path, quota=10_000)
    save(store)
    with pytest.raises(StorageFull, match="Raise snapshot_quota_bytes"):
        store.quota.room(20_000, "Saving it").__enter__()


def test_what_is_in_use_is_not_named_as_what_could_go(tmp_path: Path) -> None:
    store = make_store(tmp_path, quota=6_000)
    kept, other = save(store), save(store, fill=b"xy")
    with store.using(kept.saved_id), pytest.raises(StorageFull) as caught:
        store.quota.room(1_500, "Saving it").__enter__()
    assert caught.value.metadata["could_delete"] == other.saved_id


def test_room_is_promised_to_one_save_at_a_time(tmp_path: Path) -> None:
    quota = SavedQuota(tmp_path, 1_000)
    with quota.room(600, "one"):
        with pytest.raises(StorageFull) as caught:
            quota.room(600, "another").__enter__()
        assert caught.value.metadata["promised_bytes"] == "600"
        with quota.room(400, "a small one"):
            pass
    with quota.room(600, "another") as room:
        with pytest.raises(StorageFull):
            room.resize(1_001)
        assert room.bytes == 600
        room.resize(1_000)
    with quota.room(1_000, "all of it"):
        pass


def test_durable_sessions_count_as_snapshots_do(tmp_path: Path) -> None:
    store = make_store(tmp_path, quota=8_000)
    (tmp_path / "durable").mkdir()
    committed(tmp_path / "durable" / "a")
    used = store.quota.used_bytes
    assert used > 1_000
    store.quota.check("Saving it")
    committed(tmp_path / "durable" / "a", tokens=3_000)  # it has grown
    assert store.quota.used_bytes > used + 4_000
    with pytest.raises(StorageFull):
        store.quota.check("Saving it")
    SavedFolder(tmp_path / "durable" / "a").remove()
    assert store.quota.used_bytes == 0


def test_without_a_quota_only_the_disk_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path)
    with store.quota.room(10_000_000, "Saving it"):
        pass
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(StorageFull, match="1000 free") as caught:
        store.quota.room(1_001, "Saving it").__enter__()
    assert caught.value.metadata["bound"] == "disk"
    assert "Free some space" in caught.value.message


# --- out and in ----------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path) -> SnapshotStore:
    root = tmp_path / "other"
    root.mkdir()
    return make_store(root)


def exported(store: SnapshotStore, info: SavedInfo, most: int = 100) -> list[Piece]:
    with store.using(info.saved_id) as (folder, used):
        return list(pieces_of(folder, used, most))


def take_in(
    store: SnapshotStore,
    pieces: list[Piece],
    info: SavedInfo,
    check: Callable[[SavedInfo], None] = lambda _info: None,
) -> SavedInfo:
    with IncomingSnapshot(store, check) as incoming:
        incoming.begin(info.saved_id, info.record_digest)
        for piece in pieces:
            incoming.take(piece)
        return incoming.finish()


def contents(store: SnapshotStore, saved_id: str) -> dict[str, bytes]:
    folder = store.root / saved_id
    return {e.name: e.read_bytes() for e in folder.iterdir() if e.name != INFO_NAME}


@pytest.mark.parametrize("most", [1, 7, 100, 1 << 20])
def test_what_goes_out_comes_in_as_it_was(
    store: SnapshotStore, other: SnapshotStore, most: int
) -> None:
    info = save(store, tokens=300)
    pieces = exported(store, info, most)
    assert pieces[0].file == INFO_NAME
    assert max(len(piece.data) for piece in pieces) <= most
    taken = take_in(other, pieces, info)
    assert taken.saved_id == info.saved_id
    assert contents(other, info.saved_id) == contents(store, info.saved_id)
    assert replace(other.find(info.saved_id), used_unix_ms=0) == replace(info, used_unix_ms=0)
    assert entries(other) == {info.saved_id}


def test_the_same_content_comes_in_once(store: SnapshotStore) -> None:
    info = save(store)
    taken = take_in(store, exported(store, info), info)
    assert taken.saved_id == info.saved_id
    assert entries(store) == {info.saved_id}


def test_another_content_under_a_taken_id_gets_a_new_one(
    store: SnapshotStore, other: SnapshotStore
) -> None:
    info = save(store)
    pieces = exported(store, info)
    with other.begin(info.saved_id) as pending:
        theirs = pending.commit(info_of(write_files(pending.folder.path, fill=b"xy")))
    taken = take_in(other, pieces, info)
    assert taken.saved_id not in (info.saved_id, "")
    assert set(listed(other)) == {theirs.saved_id, taken.saved_id}
    assert contents(other, taken.saved_id) == contents(store, info.saved_id)
    assert contents(other, theirs.saved_id) != contents(store, info.saved_id)


def test_a_damaged_one_is_replaced_by_a_whole_copy(store: SnapshotStore) -> None:
    info = save(store)
    pieces = exported(store, info)
    cut(store.root / info.saved_id)
    assert listed(store) == []
    assert take_in(store, pieces, info).saved_id == info.saved_id
    assert listed(store) == [info.saved_id]
    assert entries(store) == {info.saved_id}


def test_many_imports_of_one_snapshot_at_once_leave_one(
    store: SnapshotStore, other: SnapshotStore
) -> None:
    info = save(store)
    pieces = exported(store, info)
    start, ids, errors = threading.Barrier(4), [], []

    def run() -> None:
        start.wait()
        try:
            ids.append(take_in(other, pieces, info).saved_id)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(ids) == {info.saved_id}
    assert entries(other) == {info.saved_id}


def renamed(pieces: list[Piece]) -> list[Piece]:
    return [replace(p, file="../x") if p.file == RECORD else p for p in pieces]


def swapped(pieces: list[Piece]) -> list[Piece]:
    record = [p for p in pieces if p.file == RECORD]
    rest = [p for p in pieces if p.file not in (RECORD, INFO_NAME)]
    return [p for p in pieces if p.file == INFO_NAME] + rest + record


def longer(pieces: list[Piece]) -> list[Piece]:
    last = pieces[-1]
    return [*pieces, Piece(last.file, last.offset + len(last.data), b"more")]


def gap(pieces: list[Piece]) -> list[Piece]:
    at = next(i for i, p in enumerate(pieces) if p.file.startswith("part-")) + 1
    return pieces[:at] + pieces[at + 1 :]


def flipped(pieces: list[Piece]) -> list[Piece]:
    last = pieces[-1]
    return [*pieces[:-1], replace(last, data=bytes([last.data[0] ^ 1]) + last.data[1:])]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda pieces: pieces[:-1], DigestMismatch),
        (lambda pieces: [p for p in pieces if p.file in (RECORD, INFO_NAME)], DigestMismatch),
        (lambda pieces: [p for p in pieces if p.file == INFO_NAME], DigestMismatch),
        (lambda pieces: pieces[1:], InvalidRequest),
        (lambda pieces: [pieces[0], *pieces], InvalidRequest),
        (lambda pieces: [replace(pieces[0], file=RECORD)], DigestMismatch),
        (lambda pieces: [*pieces, Piece("another", 0, b"x")], InvalidRequest),
        (lambda pieces: [*pieces, Piece(RECORD, 0, b"x")], InvalidRequest),
        (lambda pieces: [Piece(INFO_NAME, 0, b"")], InvalidRequest),
        (lambda pieces: [], DigestMismatch),
        (renamed, InvalidRequest),
        (swapped, InvalidRequest),
        (longer, InvalidRequest),
        (gap, InvalidRequest),
        (flipped, DigestMismatch),
    ],
)
def test_a_stream_that_is_not_the_whole_export_in_order_is_refused_and_leaves_nothing(
    store: SnapshotStore,
    other: SnapshotStore,
    change: Callable[[list[Piece]], list[Piece]],
    error: type[ModeldError],
) -> None:
    info = save(store)
    pieces = change(exported(store, info))
    with pytest.raises(error):
        take_in(other, pieces, info)
    assert entries(other) == set()
    assert other.quota.used_bytes == 0
    with other.quota.room(1, "a later one"):
        pass


def test_what_this_daemon_cannot_serve_is_refused_before_its_bytes_come(
    store: SnapshotStore, other: SnapshotStore
) -> None:
    info = save(store)
    seen: list[str] = []

    def check(told: SavedInfo) -> None:
        seen.append(told.backend)
        raise BackendMismatch("not here")

    pieces = exported(store, info)
    first = next(i for i, p in enumerate(pieces) if p.file == RECORD)
    with pytest.raises(BackendMismatch):
        take_in(other, pieces[: first + 1], info, check)
    assert seen == ["llama"]
    assert entries(other) == set()


def test_an_import_beyond_the_quota_is_refused(tmp_path: Path, store: SnapshotStore) -> None:
    info = save(store)
    small = make_store(tmp_path, quota=info.size_bytes + 100)
    with pytest.raises(StorageFull):
        take_in(small, exported(store, info), info)
    assert entries(small) == {info.saved_id}


@pytest.mark.parametrize(
    "wrong", [{"label": "\x1b[2J"}, {"model": "a/b"}, {"session_key": "a b"}, {"saved_id": "../x"}]
)
def test_texts_that_no_snapshot_has_are_refused(
    store: SnapshotStore, other: SnapshotStore, wrong: dict[str, Any], tmp_path: Path
) -> None:
    info = committed(tmp_path / "made", **wrong)
    pieces = list(pieces_of(SavedFolder(tmp_path / "made"), info, 1 << 20))
    with pytest.raises(InvalidRequest):
        take_in(other, pieces, info)
    assert entries(other) == set()


@pytest.mark.parametrize(
    "recorded",
    [
        {"token_ids": bytes(4 * 599)},
        {"seen_tokens": 1},
        {"turns": []},
        {"exact": False, "exact_reason": "not seen"},
        {"kv_digest": "0" * 64},
        {"parts": []},
        {"parts": "none"},
    ],
    ids=lambda recorded: "-".join(recorded),
)
def test_what_tells_other_numbers_than_its_sealed_record_is_refused(
    other: SnapshotStore, tmp_path: Path, recorded: dict[str, Any]
) -> None:
    made = SavedFolder(tmp_path / "made")
    made.create()
    info = info_of(write_files(made.path, **recorded))
    made.commit(info)
    with pytest.raises(DigestMismatch) as caught:
        take_in(other, list(pieces_of(made, info, 1 << 20)), info)
    assert caught.value.metadata["file"] == RECORD
    assert entries(other) == set()
    assert other.quota.used_bytes == 0


def test_the_window_that_is_listed_is_the_records(other: SnapshotStore, tmp_path: Path) -> None:
    info = committed(tmp_path / "made", window=1 << 20)
    pieces = list(pieces_of(SavedFolder(tmp_path / "made"), info, 1 << 20))
    assert take_in(other, pieces, info).window == 1024
    assert other.find(info.saved_id).window == 1024


def test_an_announcement_of_another_snapshot_is_refused(
    store: SnapshotStore, other: SnapshotStore
) -> None:
    info = save(store)
    with pytest.raises(InvalidRequest):
        take_in(other, exported(store, info), replace(info, record_digest="0" * 64))
    assert entries(other) == set()


def test_an_export_ends_where_a_file_is_not_what_was_saved(store: SnapshotStore) -> None:
    info = save(store)
    part = store.root / info.saved_id / info.parts[1].name
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    assert listed(store) == [info.saved_id]  # names and sizes are as they were
    with pytest.raises(DigestMismatch, match=part.name):
        exported(store, info)


# --- digests of files ----------------------------------------------------------------------------


def holds(digest: str, data: bytes, sizes: Iterator[int]) -> bool:
    check, at = DigestCheck(digest), 0
    while at < len(data):
        size = next(sizes)
        check.update(data[at : at + size])
        at += size
    return check.matches()


def some(seed: int) -> Iterator[int]:
    numbers = random.Random(seed)
    while True:
        yield numbers.choice((1, 3, 64, 1000))


FILES = {
    "state": state_file([b"a" * 700, b"b", b"c" * 1500]),
    "small state": state_file([b"a" * 70, b"b" * 30]),
    "record": record_file(b"all that it is besides its KV"),
    "empty record": record_file(b""),
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", FILES)
def test_a_file_matches_its_digest_however_it_is_cut(kind: str, seed: int) -> None:
    digest, data = FILES[kind]
    assert holds(digest, data, some(seed))
    assert not holds(digest, data[:-1], some(seed))
    assert not holds(digest, data + b"x", some(seed))
    assert not holds("0" * 64, data, some(seed))
    assert not holds(digest, data[:40], some(seed))
    assert not holds(digest, b"", some(seed))


@pytest.mark.parametrize("kind", ["small state", "record"])
def test_every_flipped_byte_of_a_file_is_caught(kind: str) -> None:
    digest, data = FILES[kind]
    for at in range(len(data)):
        wrong = bytearray(data)
        wrong[at] ^= 0x10
        assert not holds(digest, bytes(wrong), some(1)), f"byte {at} was flipped unseen"


def test_another_file_with_the_digest_of_its_bytes_is_none_of_a_session() -> None:
    for data in (b"m", b"model", b"modeldK", b"record" * 50):
        assert not holds(hashlib.sha256(data).hexdigest(), data, some(2))
