"""The worker killed or stopped under a whole daemon: who gets which error, and what is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import psutil
import pytest

from modeld.client import Client, LoadProgress, Session
from modeld.shared.errors import (
    GenerationStale,
    ModelQuarantined,
    SessionFatal,
    WorkerUnavailable,
)
from tests.support.daemon import MODEL, Background, RunningDaemon, eventually
from tests.support.faulting import (
    LONG_TEXT,
    DataRoot,
    answer,
    assert_lost,
    assert_stale,
    caught,
    footprint,
    is_gone,
    on_every_backend,
    raw_session,
    settles_to,
    slot,
    until_state,
    until_working,
    worker_pid,
)

SIGNALS = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP]
HEARTBEAT_LIMIT_S = 2.0


@pytest.fixture(params=SIGNALS, ids=lambda signum: signum.name)
def signum(request: pytest.FixtureRequest) -> signal.Signals:
    chosen: signal.Signals = request.param
    return chosen


class Scene:
    """A daemon with a worker at work for one caller, and others who wait."""

    def __init__(self, root: DataRoot, daemon: RunningDaemon, stack: ExitStack) -> None:
        self.root, self.daemon = root, daemon
        self.client, self.other, self.third = (
            stack.enter_context(daemon.client()) for _ in range(3)
        )

    def wait_in_queue(self, work: Callable[[], object]) -> Background:
        before = slot(self.client).queued
        waiting = Background(work)
        eventually(lambda: slot(self.client).queued == before + 1)
        return waiting


def start(root: DataRoot, stack: ExitStack, faults: str = "") -> Scene:
    daemon = root.start(faults=faults, heartbeat_limit_s=HEARTBEAT_LIMIT_S)
    return Scene(root, daemon, stack)


def strike(scene: Scene, pid: int, signum: signal.Signals) -> None:
    os.kill(pid, signum)


def assert_recovered(
    scene: Scene, opened: Session, pid: int, generation: int, right_answer: list[int]
) -> None:
    """A fresh worker, a higher generation in memory and on disk, the right answer."""
    assert answer(opened) == right_answer
    now = scene.client.status()
    assert now.generation > generation
    assert opened.handle.generation == now.generation == scene.root.durable_generation()
    assert now.slots[0].worker.restarts == 1
    assert now.slots[0].worker.pid != pid
    assert is_gone(pid)


@on_every_backend
def test_death_in_load(root: DataRoot, signum: signal.Signals, right_answer: list[int]) -> None:
    # The second progress report of the first load takes long; the strike comes after the first.
    fault = f"load:after=2:slow=60:once={root.path / 'slowed'}"
    with ExitStack() as stack:
        scene = start(root, stack, fault)
        until_state(scene.client, "IDLE")
        before = footprint(scene.daemon)
        generation = scene.client.status().generation
        seen: list[str] = []

        def on_progress(event: object) -> None:
            if isinstance(event, LoadProgress):
                seen.append(event.stage)

        opener = Background(lambda: raw_session(scene.client, on_progress=on_progress))
        eventually((root.path / "slowed").exists)
        eventually(lambda: "loading" in seen)
        queued_open = scene.wait_in_queue(lambda: raw_session(scene.other))
        queued_load = scene.wait_in_queue(lambda: scene.third.load_model(MODEL))
        pid = worker_pid(scene.client)
        loading = slot(scene.client).generation
        assert loading > generation
        strike(scene, pid, signum)

        error = caught(SessionFatal, opener.result)
        assert isinstance(error, SessionFatal)
        cause = assert_lost(error, signum)
        opened: Session = queued_open.result()  # waited for the restart, and loaded again
        assert cause == slot(scene.client).last_fatal
        queued_load.result()
        assert_recovered(scene, opened, pid, loading, right_answer)
        settles_to(scene.daemon, before)


@dataclass
class Turning:
    """A running call, and what tells the moment to strike."""

    running: Background
    pid: int


def in_prefill(scene: Scene, session: Session) -> Turning:
    running = Background(lambda: session.ensure_prefix(LONG_TEXT))
    return Turning(running, until_working(scene.client, "ensure_prefix"))


def in_decode(scene: Scene, session: Session) -> Turning:
    got: list[str] = []

    def read() -> None:
        stream = session.turn("One, two,", " three,", max_tokens=0, ignore_eos=True)
        for chunk in stream.chunks():
            got.append(chunk.text)  # noqa: PERF401

    running = Background(read)
    eventually(lambda: len(got) >= 3)
    return Turning(running, worker_pid(scene.client))


@on_every_backend
@pytest.mark.parametrize("begin", [in_prefill, in_decode], ids=["prefill", "decode"])
def test_death_in_a_turn(
    root: DataRoot,
    signum: signal.Signals,
    begin: Callable[[Scene, Session], Turning],
    right_answer: list[int],
) -> None:
    with ExitStack() as stack:
        scene = start(root, stack)
        first, second = raw_session(scene.client), raw_session(scene.other)
        assert answer(second) == right_answer
        before = footprint(scene.daemon)
        generation = scene.client.status().generation
        assert first.handle.generation == generation == root.durable_generation()

        turning = begin(scene, first)
        queued_turn = scene.wait_in_queue(lambda: answer(second))
        queued_open = scene.wait_in_queue(lambda: raw_session(scene.third))
        strike(scene, turning.pid, signum)

        error = caught(SessionFatal, turning.running.result)
        assert isinstance(error, SessionFatal)
        cause = assert_lost(error, signum)
        error = caught(GenerationStale, queued_turn.result)
        assert isinstance(error, GenerationStale)
        assert_stale(error, second, generation + 1, cause)
        opened: Session = queued_open.result()

        now = scene.client.status().generation
        for session in (first, second):
            for use in (session.explain, lambda s=session: s.ensure_prefix("x")):
                error = caught(GenerationStale, use)
                assert isinstance(error, GenerationStale)
                assert_stale(error, session, now, cause)
        assert_recovered(scene, opened, turning.pid, generation, right_answer)
        settles_to(scene.daemon, before)
        assert [info.session for info in scene.client.sessions()] == [opened.handle]


@on_every_backend
def test_death_of_an_idle_worker_is_told_to_the_next_call(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        scene = start(root, stack)
        session = raw_session(scene.client)
        pid = worker_pid(scene.client)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: slot(scene.client).last_fatal)
        error = caught(GenerationStale, lambda: answer(session))
        assert isinstance(error, GenerationStale)
        assert "SIGKILL" in error.metadata["cause"]
        assert answer(raw_session(scene.client)) == right_answer


@on_every_backend
def test_a_kill_while_a_second_session_opens(root: DataRoot, right_answer: list[int]) -> None:
    fault = f"open:after=2:slow=60:once={root.path / 'slowed'}"
    with ExitStack() as stack:
        scene = start(root, stack, fault)
        first = raw_session(scene.client)
        opening = Background(lambda: raw_session(scene.other))
        eventually(lambda: slot(scene.client).holder_operation == "open")
        eventually((root.path / "slowed").exists)
        pid = worker_pid(scene.client)
        os.kill(pid, signal.SIGKILL)
        error = caught(SessionFatal, opening.result)
        assert error.metadata["signal"] == "SIGKILL"
        caught(GenerationStale, lambda: answer(first))
        assert answer(raw_session(scene.client)) == right_answer
        assert len(scene.client.sessions()) == 1
        assert len(psutil.Process(scene.daemon.process.pid).children()) == 1


def kill_while_decoding(scene: Scene, signum: signal.Signals) -> None:
    session = raw_session(scene.client)
    turning = in_decode(scene, session)
    os.kill(turning.pid, signum)
    caught(SessionFatal, turning.running.result)


@on_every_backend
def test_a_model_that_kills_its_worker_three_times_is_quarantined_until_cleared(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        scene = start(root, stack)
        for signum in (signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL):
            kill_while_decoding(scene, signum)
        error = caught(ModelQuarantined, lambda: raw_session(scene.client))
        assert error.metadata["model"] == MODEL
        assert "SIGKILL" in error.metadata["cause"]
        assert "ClearQuarantine" in error.message
        status = scene.client.status()
        assert status.quarantined_models == (MODEL,)
        assert slot(scene.client).state.value == "SLOT_QUARANTINED"
        caught(ModelQuarantined, lambda: scene.client.load_model(MODEL))

        assert scene.client.clear_quarantine(MODEL).was_quarantined
        assert not scene.client.clear_quarantine(MODEL).was_quarantined
        assert answer(raw_session(scene.client)) == right_answer
        assert scene.client.status().quarantined_models == ()


def kill_idle(client: Client) -> None:
    pid = until_state(client, "IDLE").worker.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: worker_pid(client) != pid)


def test_a_crash_loop_backs_off_and_tells_when_it_is_tried_again(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        scene = start(root, stack)
        for _ in range(4):
            kill_idle(scene.client)
        assert slot(scene.client).worker.state == "BACKOFF"
        error = caught(WorkerUnavailable, lambda: raw_session(scene.client, timeout=0.5))
        assert 0 < float(error.metadata["restart_in_seconds"]) < 3
        assert error.retry_after_s is not None
        assert error.retry_after_s > 0
        assert "SIGKILL" in error.metadata["last_death"]
        # With time to wait, it is waited for.
        assert answer(raw_session(scene.client)) == right_answer


def test_a_worker_that_never_stays_up_is_given_up_until_cleared(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        scene = start(root, stack)
        for _ in range(6):
            kill_idle(scene.client)
        assert slot(scene.client).worker.state == "FAILED"
        error = caught(WorkerUnavailable, lambda: raw_session(scene.client))
        assert "died 6 times" in error.message
        assert error.retry_after_s is None
        scene.client.clear_quarantine(MODEL)
        assert answer(raw_session(scene.client)) == right_answer


def test_an_open_gets_a_typed_error_before_its_deadline_while_a_worker_boots(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        scene = start(root, stack)
        pid = until_state(scene.client, "IDLE").worker.pid
        os.kill(pid, signal.SIGKILL)
        booting = until_state(scene.client, "HANDSHAKING").worker.pid
        os.kill(booting, signal.SIGSTOP)
        error = caught(WorkerUnavailable, lambda: raw_session(scene.client, timeout=1.0))
        assert error.metadata["state"] == "handshaking"
        os.kill(booting, signal.SIGCONT)
        assert answer(raw_session(scene.client)) == right_answer
