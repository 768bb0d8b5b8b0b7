"""Daemons that faults are done to: several on one data root, and proof of what they leave behind.

Builds on ``daemon``; where that ends a daemon as an operator would, here it may be killed, stopped
or replaced at any moment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from modeld.cli.exit_codes import Exit
from modeld.client import Client, DaemonStatus, Session, SlotStatus
from modeld.shared.errors import ModeldError
from modeld.shared.lease_record import Discovery, discover
from tests.support.backends import BACKENDS, share_conversion
from tests.support.daemon import MODEL, REPOSITORY, RunningDaemon, eventually
from tests.support.product import ask

FAULTS = "MODELD_FAULTS"
WINDOW = 4096
# What every recovered daemon is asked, to prove that it computes and doesn't only answer.
QUESTION = ("The quick brown fox jumps over the lazy dog. The quick brown fox", " jumps over")
ANSWER_TOKENS = 8
# Long enough that a fault always finds it at work, in prefill or in decode.
LONG_TEXT = "A stone bridge crossed the river near the old mill. " * 290

# For what an engine's own threads, memory or calls could make different; what is the supervisor's
# alone is tested on one.
on_every_backend = pytest.mark.parametrize(
    "backend", BACKENDS, ids=lambda backend: backend.name, indirect=True, scope="session"
)


class DataRoot:
    """A short data root and every daemon that was started on it."""

    def __init__(self, path: Path, backends: str = "llama") -> None:
        self.path = path
        self.backends = backends
        self.daemons: list[RunningDaemon] = []

    def start(
        self, kind: type[RunningDaemon] = RunningDaemon, *, faults: str = "", **settings: object
    ) -> RunningDaemon:
        """Start a daemon; it may still be on its way when this returns."""
        for daemon in self.daemons:  # the next one would overwrite the log
            if daemon.log_path.name == "daemon.log":
                aside = self.path / f"daemon-{daemon.process.pid}.log"
                daemon.log_path = daemon.log_path.rename(aside)
        with _environment(FAULTS, faults):
            daemon = kind(self.path, {"backends": self.backends, **settings})
        self.daemons.append(daemon)
        return daemon

    def discover(self) -> Discovery:
        return discover(self.path, installed=True)

    def durable_generation(self) -> int:
        """What the next owner would go on from."""
        generation: int = json.loads((self.path / "generation").read_bytes())["generation"]
        return generation

    def drafts(self) -> list[Path]:
        """Half-written files, and records of workers that nobody watches any more."""
        return [*self.path.rglob("*.tmp-*"), *(self.path / "workers").glob("*")]

    def end(self) -> None:
        """Whatever a test left running ends; it fails if a worker outlives its daemon."""
        workers: list[psutil.Process] = []
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                workers += daemon.workers()
                daemon.process.send_signal(signal.SIGCONT)
                daemon.process.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            daemon.wait()
        _, alive = psutil.wait_procs(workers, timeout=30)
        for process in alive:
            process.kill()
        assert not alive, f"workers outlived their daemon: {alive}"
        for daemon in self.daemons:
            assert "Traceback" not in daemon.log(), daemon.log()


@contextlib.contextmanager
def data_root(
    model: Path | None = None,
    *,
    backend: str = "llama",
    converted: Path | None = None,
    evidence: Path | None = None,
) -> Iterator[DataRoot]:
    """A data root; with ``model`` in its store, for ``backend``, under the name ``MODEL``.

    ``converted`` is a folder that the same model was converted to already. ``evidence`` holds what
    earlier daemons asked their engines, so that it isn't asked again, and takes in what this one
    asks.
    """
    path = Path(tempfile.mkdtemp(prefix="md-"))
    root = DataRoot(path, backend)
    try:
        if model is not None:
            put_in_store(path, model, backend)
        if converted is not None:  # a store sweeps what no model of it needs
            share_conversion(converted, path)
        if evidence is not None and evidence.is_dir():
            shutil.copytree(evidence, path / "evidence")
        yield root
        root.end()
        if evidence is not None and (path / "evidence").is_dir():
            shutil.copytree(path / "evidence", evidence, dirs_exist_ok=True)
    finally:
        for daemon in root.daemons:
            if daemon.process.poll() is None:
                daemon.process.kill()
            daemon.process.wait()
        shutil.rmtree(path, ignore_errors=True)


def put_in_store(path: Path, model: Path, model_type: str, name: str = MODEL) -> None:
    """As `modeld models import` does without a daemon."""
    from modeld.supervisor.models.store import ModelStore

    ModelStore(path).import_file(model, name, model_type=model_type)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


# --- the command ---------------------------------------------------------------------------------


def modeld(path: Path, *words: str, code: Exit | int, env: dict[str, str] | None = None) -> str:
    """Run the command to its end; what it wrote. The exit status must be ``code``."""
    done = subprocess.run(
        [sys.executable, "-m", "modeld", "--data-root", str(path), *words],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        timeout=120,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == code, told
    assert "Traceback" not in told
    return told


# --- looking -----------------------------------------------------------------------------------


def slot_of(status: DaemonStatus, backend: str = "") -> SlotStatus:
    """The backend's slot; "": the first one."""
    return next(slot for slot in status.slots if backend in ("", slot.backend))


def slot(client: Client, backend: str = "") -> SlotStatus:
    return slot_of(client.status(), backend)


def worker_pid(client: Client, backend: str = "") -> int:
    return slot(client, backend).worker.pid


def until_state(client: Client, state: str, backend: str = "") -> SlotStatus:
    """Wait for the worker's state; the slot then."""

    def found() -> SlotStatus | None:
        now = slot(client, backend)
        return now if now.worker.state == state else None

    there: SlotStatus = eventually(found)
    return there


def until_working(client: Client, operation: str, backend: str = "") -> int:
    """Wait until the engine computes for this operation; the worker's pid.

    Being granted the slot isn't being at work: the worker must have used the processor since.
    """
    eventually(lambda: slot(client, backend).holder_operation == operation)
    pid = worker_pid(client, backend)
    worker = psutil.Process(pid)
    begun_s = _used_s(worker)
    eventually(lambda: _used_s(worker) > begun_s + 0.2)
    caught_at_it = slot(client, backend).holder_operation == operation
    assert caught_at_it, "it was over before it was caught"
    return pid


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def raw_session(client: Client, **options: object) -> Session:
    return client.open_session(MODEL, window=WINDOW, prompt_format="raw", **options)  # type: ignore[arg-type]


def answer(session: Session) -> list[int]:
    """The ids of a short greedy answer to ``QUESTION``."""
    return ask(session, *QUESTION, max_tokens=ANSWER_TOKENS, ignore_eos=True).ids


# --- what a lost worker's callers are told -----------------------------------------------------


def caught(kind: type[ModeldError], work: Callable[[], object]) -> ModeldError:
    with pytest.raises(kind) as found:
        work()
    return found.value


def assert_lost(error: ModeldError, signum: signal.Signals) -> str:
    """The error of a call that ran; what it says of the cause."""
    if signum is signal.SIGSTOP:
        assert error.metadata["cause"] == "heartbeat"
        assert "no heartbeat" in error.message
    else:
        assert error.metadata["cause"] == "native crash"
        assert error.metadata["signal"] == signum.name
        assert signum.name in error.message
    return error.metadata["detail"]


def assert_stale(error: ModeldError, session: Session, now: int, cause: str) -> None:
    """Both numbers and the cause, as for every handle from before the death."""
    assert error.metadata["handle_generation"] == str(session.handle.generation)
    assert error.metadata["slot_generation"] == str(now)
    assert error.metadata["cause"] == cause


# --- what is left behind -----------------------------------------------------------------------


@dataclass(frozen=True)
class Footprint:
    """What a daemon holds: open descriptors, threads and children."""

    descriptors: int
    children: int


def footprint(daemon: RunningDaemon) -> Footprint:
    process = psutil.Process(daemon.process.pid)
    return Footprint(process.num_fds(), len(process.children(recursive=True)))


def settles_to(daemon: RunningDaemon, before: Footprint) -> None:
    """The daemon comes back to holding no more than before: one worker, no more descriptors."""
    eventually(
        lambda: (
            footprint(daemon).descriptors <= before.descriptors
            and footprint(daemon).children == before.children
        )
    )


def is_gone(pid: int) -> bool:
    """Neither running nor waiting to be reaped."""
    return not psutil.pid_exists(pid)


def ends(pids: list[int], limit_s: float = 30.0) -> None:
    """These processes end, whoever their parent is by then."""

    def running() -> list[int]:
        found = []
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    found.append(pid)
        return found

    eventually(lambda: not running(), limit_s)
