"""The disk fills up under a running daemon: typed refusals, nothing half written, and recovery."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from modeld.client import Client
from modeld.shared.errors import (
    GenerationStale,
    ModeldError,
    NotOwner,
    SessionNotFound,
    StorageFull,
)
from tests.support.daemon import MODEL, eventually
from tests.support.faulting import DataRoot, answer, raw_session, slot, until_state
from tests.support.full_disk import DiskDaemon

LEASE_TTL_S = 3.0


@pytest.fixture
def disk(root: DataRoot) -> Iterator[DiskDaemon]:
    daemon = root.start(DiskDaemon)
    assert isinstance(daemon, DiskDaemon)
    yield daemon
    (root.path / "full").unlink(missing_ok=True)


@pytest.fixture
def client(disk: DiskDaemon) -> Iterator[Client]:
    with disk.client() as connected:
        until_state(connected, "IDLE")
        yield connected


def full(work: Callable[[], object]) -> StorageFull:
    with pytest.raises(StorageFull) as caught:
        work()
    assert "Free some space" in caught.value.message
    return caught.value


def test_a_load_is_refused_and_succeeds_once_there_is_space(
    root: DataRoot, disk: DiskDaemon, client: Client, right_answer: list[int]
) -> None:
    generation = client.status().generation
    disk.fill()
    for _ in range(2):  # a refusal leaves the slot as it was
        full(lambda: raw_session(client))
    assert slot(client).state.value == "SLOT_EMPTY"
    assert client.status().generation == generation == root.durable_generation()
    disk.free()
    session = raw_session(client)
    assert answer(session) == right_answer
    assert session.handle.generation > generation


def test_what_is_resident_goes_on_and_stays_where_an_unload_is_refused(
    root: DataRoot, disk: DiskDaemon, client: Client, right_answer: list[int]
) -> None:
    session = raw_session(client)
    disk.fill()
    assert answer(session) == right_answer
    full(lambda: client.unload_model(force=True))
    assert slot(client).state.value == "SLOT_READY"
    assert answer(session) == right_answer
    disk.free()
    assert client.unload_model(force=True).was_resident
    with pytest.raises(GenerationStale):
        session.explain()


def test_a_worker_lost_meanwhile_never_lets_an_old_handle_reach_the_next_model(
    root: DataRoot, disk: DiskDaemon, client: Client, right_answer: list[int]
) -> None:
    session = raw_session(client)
    generation = session.handle.generation
    pid = slot(client).worker.pid
    disk.fill()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: "SIGKILL" in slot(client).last_fatal)
    with pytest.raises((GenerationStale, SessionNotFound)):
        answer(session)
    full(lambda: raw_session(client))
    disk.free()
    fresh = raw_session(client)
    assert fresh.handle.generation > generation
    assert fresh.handle.generation == root.durable_generation()
    assert answer(fresh) == right_answer
    with pytest.raises(GenerationStale):
        answer(session)
    assert len(client.sessions()) == 1


def test_an_import_leaves_nothing_half_written(
    root: DataRoot, disk: DiskDaemon, client: Client, demo_model: Path
) -> None:
    before = sorted(root.path.rglob("*"))
    disk.fill()
    full(lambda: client.import_model(demo_model, name="another", copy=True))
    assert [model.name for model in client.models()] == [MODEL]
    disk.free()
    assert sorted(root.path.rglob("*")) == before
    client.import_model(demo_model, name="another", copy=True)
    assert len(client.models()) == 2


def test_a_lease_that_cannot_be_renewed_fences_until_it_can(
    root: DataRoot, right_answer: list[int]
) -> None:
    daemon = root.start(DiskDaemon, lease_ttl_s=LEASE_TTL_S)
    assert isinstance(daemon, DiskDaemon)
    with ExitStack() as stack:
        client = stack.enter_context(daemon.client())
        session = raw_session(client)
        daemon.fill()

        def refused() -> ModeldError | None:
            try:
                session.explain()
            except NotOwner as error:
                return error
            return None

        error = eventually(refused)
        assert "can't be renewed now" in error.message
        assert "nothing is served until it can" in error.message
        daemon.free()
        assert answer(session) == right_answer  # it renews before it answers
        assert daemon.process.poll() is None


def test_a_daemon_does_not_start_on_a_full_disk(root: DataRoot) -> None:
    (root.path / "full").touch()
    before = {path for path in root.path.iterdir() if not path.name.startswith("daemon")}
    daemon = root.start(DiskDaemon)
    assert daemon.wait() == 6
    assert "STORAGE_FULL" in daemon.log()
    assert "Free some space" in daemon.log()
    after = {path for path in root.path.iterdir() if not path.name.startswith("daemon")}
    assert after <= {*before, root.path / "modeld.lease.lock"}
    (root.path / "full").unlink()
    with root.start(DiskDaemon).client() as client:
        assert client.status().generation > 0
