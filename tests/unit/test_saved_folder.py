"""A saved session's folder: one whole state at every moment, and every flipped byte is caught."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modeld.shared.errors import DigestMismatch, InvalidRequest, StorageFull
from modeld.supervisor import saved_folder
from modeld.supervisor.saved_folder import INFO_NAME, SavedFile, SavedFolder
from tests.support.saved_files import RECORD, committed, info_of, write_files


@pytest.fixture
def folder(tmp_path: Path) -> SavedFolder:
    made = SavedFolder(tmp_path / "saved")
    made.create()
    return made


def names(folder: SavedFolder) -> set[str]:
    return {entry.name for entry in folder.path.iterdir()}


def test_what_is_committed_is_read_back_whole(folder: SavedFolder) -> None:
    info = committed(folder.path)
    read = folder.read()
    assert read is not None
    assert read.used_unix_ms > info.used_unix_ms  # when it was written
    assert replace(read, used_unix_ms=info.used_unix_ms) == info
    assert folder.missing() == []
    assert folder.bytes_used() == info.size_bytes + (folder.path / INFO_NAME).stat().st_size


def test_nothing_is_committed_in_an_empty_folder_or_in_none(tmp_path: Path) -> None:
    folder = SavedFolder(tmp_path / "none")
    assert folder.read() is None
    assert folder.missing() == []
    folder.create()
    assert folder.read() is None
    assert (folder.path.stat().st_mode & 0o777) == 0o700


def test_a_commit_removes_what_it_does_not_name(folder: SavedFolder) -> None:
    first = committed(folder.path, tokens=600)
    later = info_of(write_files(folder.path, tokens=900, fill=b"xy"))
    (folder.path / ".left.partial").write_bytes(b"half")
    folder.commit(later)
    assert names(folder) == {INFO_NAME, *later.files}
    assert set(first.files) - set(later.files)  # the last block was another one
    assert (folder.read() or first).tokens == 900


def test_a_commit_of_what_is_not_there_is_refused_and_the_old_state_stands(
    folder: SavedFolder,
) -> None:
    committed(folder.path)
    before, record = (folder.path / INFO_NAME).read_bytes(), (folder.path / RECORD).read_bytes()
    later = info_of(write_files(folder.path, tokens=900))
    (folder.path / later.parts[-1].name).unlink()
    with pytest.raises(DigestMismatch, match=later.parts[-1].name):
        folder.commit(later)
    assert (folder.path / INFO_NAME).read_bytes() == before
    (folder.path / RECORD).write_bytes(record)  # a worker gives each a name of its own
    assert folder.missing() == []


def test_every_flipped_byte_of_the_index_is_caught(folder: SavedFolder) -> None:
    committed(folder.path)
    path = folder.path / INFO_NAME
    whole = path.read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 0x01
        path.write_bytes(data)
        with pytest.raises(DigestMismatch):
            folder.read()
    path.write_bytes(whole)
    assert folder.read() is not None


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_cut_index_is_damaged(folder: SavedFolder, cut: int) -> None:
    committed(folder.path)
    path = folder.path / INFO_NAME
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DigestMismatch, match="is damaged"):
        folder.read()


def test_an_index_of_another_format_is_not_guessed_at(folder: SavedFolder) -> None:
    committed(folder.path)
    path = folder.path / INFO_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(DigestMismatch, match="format 2"):
        folder.read()


def test_missing_and_cut_files_are_named(folder: SavedFolder) -> None:
    info = committed(folder.path)
    (folder.path / info.parts[0].name).unlink()
    cut = folder.path / info.parts[2].name
    cut.write_bytes(cut.read_bytes()[:-1])
    assert folder.missing() == [info.parts[0].name, info.parts[2].name]
    with pytest.raises(DigestMismatch, match=r"2 of the 4 files"):
        folder.require(info.saved_id)


def test_a_link_is_no_file_of_it(folder: SavedFolder, tmp_path: Path) -> None:
    info = committed(folder.path)
    record = folder.path / RECORD
    elsewhere = tmp_path / "elsewhere"
    record.rename(elsewhere)
    record.symlink_to(elsewhere)
    assert folder.missing() == [info.record]


@pytest.mark.parametrize(
    "wrong",
    [
        {"record": "../record"},
        {"record": INFO_NAME},
        {"record": ".hidden"},
        {"record": "a/b"},
        {"tokens": 601},
        {"size_bytes": 1},
        {"record_bytes": 0},
        {"parts": (SavedFile("p", 1, 600, 10, "x"),)},
        {"parts": (SavedFile("p", 0, 300, 10, "x"), SavedFile("p", 300, 600, 10, "x"))},
        {"parts": (SavedFile("p", 0, 300, 10, "x"), SavedFile("q", 301, 600, 10, "x"))},
        {"parts": (SavedFile("p", 0, 0, 10, "x"),)},
    ],
)
def test_names_and_ranges_that_do_not_add_up_are_refused(
    folder: SavedFolder, wrong: dict[str, Any]
) -> None:
    info = replace(info_of(write_files(folder.path)), **wrong)
    with pytest.raises(DigestMismatch):
        folder.commit(info)
    assert folder.read() is None


def test_a_full_disk_leaves_what_was_committed(
    folder: SavedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(folder.path)
    later = info_of(write_files(folder.path, tokens=900))
    before = names(folder)

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFull):
        folder.commit(later)
    monkeypatch.undo()
    assert names(folder) == before
    assert (folder.read() or later).tokens == 600


def test_an_index_that_could_not_be_read_again_is_not_written(
    folder: SavedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_folder, "MAX_INFO_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="tools"):
        folder.commit(info_of(write_files(folder.path)))
    assert folder.read() is None


def test_use_is_noted_without_a_rewrite(folder: SavedFolder) -> None:
    committed(folder.path)
    before = (folder.path / INFO_NAME).read_bytes()
    folder.touch(1_900_000_000_123)
    read = folder.read()
    assert read is not None
    assert read.used_unix_ms == 1_900_000_000_123
    assert (folder.path / INFO_NAME).read_bytes() == before


def test_a_sweep_removes_what_crashes_left(folder: SavedFolder) -> None:
    info = committed(folder.path)
    for left in (".x.partial", "part-600-700.kv", f"{INFO_NAME}.tmp-aa"):
        (folder.path / left).write_bytes(b"half")
    folder.sweep()
    assert names(folder) == {INFO_NAME, *info.files}


def test_a_sweep_removes_a_folder_in_which_nothing_is_committed(folder: SavedFolder) -> None:
    write_files(folder.path)
    folder.sweep()
    assert not folder.path.exists()
    assert list(folder.path.parent.iterdir()) == []


def test_a_sweep_keeps_a_damaged_folder(folder: SavedFolder) -> None:
    committed(folder.path)
    (folder.path / INFO_NAME).write_text("{}")
    before = names(folder)
    folder.sweep()
    assert names(folder) == before


def test_removing_takes_the_folder_out_of_sight_first(
    folder: SavedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed(folder.path)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a crash before
    folder.remove()
    assert not folder.path.exists()
    assert [entry.name[0] for entry in folder.path.parent.iterdir()] == ["."]
    folder.remove()  # nothing to do
