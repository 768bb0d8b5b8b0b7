"""Parked KV on disk that no setting allows any more is gone after a start, and nothing else is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from modeld.supervisor import cold_sweep
from modeld.supervisor.cold_sweep import sweep_cold
from modeld.supervisor.config import Config, load_config

BLOCK = "a" * 64 + ".0.kv"


def config_of(root: Path, **settings: object) -> Config:
    return load_config({"backends": "llama", **settings}, {}, root)


def fill(root: Path, backend: str, count: int = 1) -> Path:
    folder = root / "cold" / backend
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:064x}.1.kv").write_bytes(b"kv" * 50)
    (folder / ".0123.partial").write_bytes(b"kv")
    return folder


def test_without_a_disk_budget_parked_kv_of_every_backend_goes_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for backend in ("llama", "openvino"):
        fill(tmp_path, backend, 3)
    sweep_cold(config_of(tmp_path, cold_disk_bytes=0))
    assert list((tmp_path / "cold").iterdir()) == []
    assert "removed 4 files, 302 bytes, of parked KV in cold/llama: cold_disk_bytes is 0" in (
        caplog.messages
    )


def test_with_a_disk_budget_only_what_no_worker_is_given_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    kept, gone = fill(tmp_path, "llama"), fill(tmp_path, "openvino")
    sweep_cold(config_of(tmp_path, cold_disk_bytes=1000))
    assert len(list(kept.iterdir())) == 2
    assert not gone.exists()
    (said,) = caplog.messages
    assert said.endswith("cold/openvino: backends doesn't name it")


def test_links_are_not_followed_and_what_isn_t_the_store_s_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / BLOCK).write_bytes(b"mine")
    folder = fill(tmp_path, "llama")
    (folder / "notes.txt").write_text("mine")
    (folder / f"{'b' * 64}.0.kv").symlink_to(outside / BLOCK)
    (folder / f"{'c' * 64}.0.kv").mkdir()
    (tmp_path / "cold" / "linked").symlink_to(outside, target_is_directory=True)
    sweep_cold(config_of(tmp_path))
    assert (outside / BLOCK).read_bytes() == b"mine"
    assert {entry.name for entry in folder.iterdir()} == {
        "notes.txt", f"{'b' * 64}.0.kv", f"{'c' * 64}.0.kv",
    }  # fmt: skip
    assert (tmp_path / "cold" / "linked").is_symlink()


def test_a_linked_cold_folder_is_left_alone(tmp_path: Path) -> None:
    elsewhere = fill(tmp_path / "elsewhere", "llama")
    (tmp_path / "cold").symlink_to(elsewhere.parent, target_is_directory=True)
    sweep_cold(config_of(tmp_path))
    assert len(list(elsewhere.iterdir())) == 2


def test_one_start_removes_so_many_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cold_sweep, "MAX_FILES", 3)
    folder = fill(tmp_path, "llama", 4)
    sweep_cold(config_of(tmp_path))
    assert len(list(folder.iterdir())) == 2
    sweep_cold(config_of(tmp_path))
    assert not folder.exists()


def test_nothing_there_is_nothing_to_do(tmp_path: Path) -> None:
    sweep_cold(config_of(tmp_path))
    assert not (tmp_path / "cold").exists()
