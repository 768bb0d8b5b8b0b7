"""Kills and a full disk at any moment of a snapshot: what is listed afterwards is whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from modeld.client import Client, ResolvedSegment, Session
from modeld.client.errors import ClientError
from modeld.shared.errors import ModeldError, StorageFull
from tests.support import tiny_models
from tests.support.daemon import MODEL, REPOSITORY, RunningDaemon, eventually
from tests.support.faulting import DataRoot, data_root, worker_pid
from tests.support.full_disk import DiskDaemon
from tests.support.product import ask

# Each costs the start of a worker, or of a daemon and its worker. Many more can be run:
ROUNDS = int(os.environ.get("MODELD_KILL_ROUNDS", "6"))
# Rounds; in the others only the worker is killed. A daemon that lost three would load no more.
DAEMON_EVERY = 3
WRITER_ROUNDS = 40  # of killing what the daemon alone does, which costs next to nothing
KEPT = 4  # snapshots of earlier rounds
WINDOW = 1024
TEXT = "The keeper wrote what the sea had brought in the night. " * 8


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asked") / "evidence"


@pytest.fixture
def place(tiny_model: Path, asked: Path) -> Iterator[DataRoot]:
    with data_root(tiny_model, evidence=asked) as made:
        yield made


def open_raw(client: Client) -> Session:
    return client.open_session(MODEL, window=WINDOW, prompt_format="raw")


def entries(place: DataRoot) -> set[str]:
    return {entry.name for entry in (place.path / "snapshots").iterdir()}


@dataclass
class Saver:
    """Takes snapshots of a session, one after the other, until its daemon or worker is gone."""

    session: Session
    answered: list[str] = field(default_factory=list)
    wrong: list[BaseException] = field(default_factory=list)

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        try:
            while True:
                self.answered.append(self.session.snapshot().snapshot_id)
        except (ClientError, ModeldError):
            pass  # it was killed
        except BaseException as error:
            self.wrong.append(error)


@dataclass
class Known:
    """What each snapshot must be: the segments, with the hashes of their tokens."""

    place: DataRoot
    segments: dict[str, tuple[ResolvedSegment, ...]] = field(default_factory=dict)
    of_round: tuple[ResolvedSegment, ...] = ()

    def check(self, client: Client, session: Session) -> None:
        """All that is listed restores as what it was, and all that was answered is listed."""
        # A worker's death is answered before the daemon has cleaned up after it.
        eventually(lambda: not any(name.startswith(".") for name in entries(self.place)))
        listed = client.list_snapshots().snapshots
        assert client.disk_stats().damaged_snapshots == ()
        assert {info.snapshot_id for info in listed} == entries(self.place)
        assert set(self.segments) <= entries(self.place)
        for info in listed:
            # One that was saved in full, but not answered any more, is of the last round.
            expected = self.segments.setdefault(info.snapshot_id, self.of_round)
            restored = session.restore(info.snapshot_id)
            assert (restored.tokens, restored.resident) == (info.tokens, info.tokens)
            assert session.explain().segments == expected
        for info in listed[KEPT:]:
            client.delete_snapshot(info.snapshot_id)
            del self.segments[info.snapshot_id]

    def kill_in_the_midst(self, session: Session, pid: int, after_s: float) -> None:
        self.of_round = session.explain().segments
        saver = Saver(session)
        thread = saver.start()
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        thread.join(60)
        assert not thread.is_alive()
        assert saver.wrong == []
        self.segments |= dict.fromkeys(saver.answered, self.of_round)


def until_found(client: Client, lost: int) -> None:
    """Until a worker's death is known, a call may be sent to the one that is gone."""
    eventually(lambda: worker_pid(client) != lost)


def test_kills_at_any_moment_of_a_snapshot_leave_only_whole_ones(place: DataRoot) -> None:
    numbers, known = random.Random(11), Known(place)
    daemon: RunningDaemon = place.start()
    client, seen = daemon.client(), 0
    for number in range(ROUNDS):
        session = open_raw(client)
        known.check(client, session)
        ask(session, [TEXT], [f"Round {number}."], max_tokens=2)
        of_daemon = number % DAEMON_EVERY == DAEMON_EVERY - 1
        pid = daemon.process.pid if of_daemon else worker_pid(client)
        known.kill_in_the_midst(session, pid, numbers.uniform(0.0, 0.2))
        seen += len(known.segments)
        if of_daemon:
            daemon.wait()
            client.close()
            daemon = place.start()
            client = daemon.client()
        else:
            until_found(client, pid)
    known.check(client, open_raw(client))
    assert seen > 0
    client.close()


def test_kills_at_any_moment_of_a_commit_leave_only_whole_ones(tmp_path: Path) -> None:
    words = ("-m", "tests.support.snapshot_killer", str(tmp_path), str(WRITER_ROUNDS), "5")
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=REPOSITORY, check=False
    )
    assert done.returncode == 0, done.stderr
    unfinished, whole = map(int, done.stdout.split())
    assert unfinished > 0, "no kill came in the midst"
    assert whole > 0, "no snapshot was ever whole"


def test_a_full_disk_refuses_a_snapshot_and_loses_nothing(place: DataRoot, tmp_path: Path) -> None:
    daemon = place.start(DiskDaemon)
    assert isinstance(daemon, DiskDaemon)
    with daemon.client() as client:
        session = open_raw(client)
        ask(session, [TEXT], [" And then"])
        kept = session.snapshot()
        exported = tmp_path / "kept.tar"
        client.export_snapshot(kept.snapshot_id, exported)
        held = session.explain()
        daemon.fill()
        for work in (session.snapshot, lambda: client.import_snapshot(exported)):
            with pytest.raises(StorageFull, match="Free some space"):
                work()
            assert client.list_snapshots().snapshots == (kept,)
            assert entries(place) == {kept.snapshot_id}
        assert session.explain().segments == held.segments
        again = ask(session, [TEXT], [" And now"])
        assert again.before.prefilled == 0  # the session goes on with all that it had
        assert session.restore(kept.snapshot_id).tokens == kept.tokens
        client.delete_snapshot(kept.snapshot_id)
        assert entries(place) == set()
        daemon.free()
        assert client.import_snapshot(exported) == kept
        assert session.snapshot().tokens == kept.tokens
