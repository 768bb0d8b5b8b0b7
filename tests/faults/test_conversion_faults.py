"""A first load for OpenVINO converts the model, and that goes wrong: typed errors, nothing lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from modeld.client import Client, LoadProgress, QueueStatus
from modeld.client.errors import ConnectionLost
from modeld.shared.errors import ModelLoadFailed, ShuttingDown, StorageFull, UnsupportedFeature
from tests.support import tiny_models
from tests.support.daemon import Background, RunningDaemon, eventually
from tests.support.faulting import DataRoot, until_state
from tests.support.full_disk import DiskDaemon
from tests.support.openvino_models import tiny_gguf

NAME = "tiny"


@pytest.fixture
def disk(root: DataRoot) -> Iterator[DiskDaemon]:
    daemon = root.start(DiskDaemon, backends="openvino")
    assert isinstance(daemon, DiskDaemon)
    yield daemon
    (root.path / "full").unlink(missing_ok=True)


@pytest.fixture
def client(disk: DiskDaemon, tmp_path: Path) -> Iterator[Client]:
    with disk.client() as connected:
        until_state(connected, "IDLE")
        connected.import_model(tiny_gguf(tmp_path / "tiny.gguf"), name=NAME, model_type="openvino")
        yield connected


def load(client: Client) -> list[str]:
    """Load it; the stages that were told."""
    stages: list[str] = []

    def told(event: LoadProgress | QueueStatus) -> None:
        if isinstance(event, LoadProgress):
            stages.append(event.stage)

    client.load_model(NAME, model_type="openvino", on_progress=told)
    return stages


def converter(daemon: RunningDaemon) -> psutil.Process | None:
    for process in daemon.workers():
        try:
            if "modeld.workers.openvino.convert" in process.cmdline():
                return process
        except psutil.Error:  # it ended meanwhile
            continue
    return None


def converted_in(root: DataRoot) -> list[str]:
    folder = root.path / "converted"
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_a_converter_that_is_killed_fails_one_load_and_nothing_else(
    root: DataRoot, disk: DiskDaemon, client: Client
) -> None:
    worker = client.status().slots[0].worker.pid
    loading = Background(lambda: load(client))
    eventually(lambda: converter(disk)).send_signal(signal.SIGKILL)
    with pytest.raises(ModelLoadFailed, match="signal SIGKILL"):
        loading.result()
    assert converted_in(root) == [".lock"]
    assert client.status().slots[0].worker.pid == worker
    assert "converting" in load(client)
    assert client.unload_model(NAME).was_resident
    assert "converting" not in load(client)


def test_a_full_disk_refuses_the_conversion_until_there_is_space(
    root: DataRoot, disk: DiskDaemon, client: Client
) -> None:
    generation = client.status().generation
    disk.fill()
    with pytest.raises(StorageFull, match="Free some space"):
        load(client)
    assert converted_in(root) in ([], [".lock"])
    assert client.status().slots[0].state.value == "SLOT_EMPTY"
    assert client.status().generation == generation
    disk.free()
    load(client)
    assert client.status().slots[0].state.value == "SLOT_READY"


def test_a_daemon_that_stops_meanwhile_leaves_no_converter(
    root: DataRoot, disk: DiskDaemon, client: Client
) -> None:
    loading = Background(lambda: load(client))
    process = eventually(lambda: converter(disk))
    assert disk.stop() == 0
    with pytest.raises((ShuttingDown, ConnectionLost)):
        loading.result()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert [name for name in converted_in(root) if name != ".lock"] == []


def test_a_model_that_would_not_convert_is_refused_at_its_import(
    client: Client, tmp_path: Path
) -> None:
    gguf = tiny_models.llama(tmp_path / "f32.gguf")
    with pytest.raises(UnsupportedFeature, match="Import it as type llama"):
        client.import_model(gguf, name="other", model_type="openvino")
    assert {model.name for model in client.models()} == {NAME, "smol"}
