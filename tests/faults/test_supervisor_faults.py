"""The daemon itself killed, stopped, replaced or told to end: workers, successors, old clients."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from modeld.client import Client, ConnectionLost, LoadProgress, Session
from modeld.shared.errors import (
    GenerationStale,
    NotOwner,
    SessionFatal,
    ShuttingDown,
    StaleFence,
)
from modeld.shared.lease_record import DiscoveryState
from tests.support.daemon import Background, RunningDaemon, Stubs, eventually
from tests.support.faulting import (
    LONG_TEXT,
    DataRoot,
    answer,
    ends,
    raw_session,
    slot,
    until_state,
    until_working,
    worker_pid,
)

LEASE_TTL_S = 3.0
EXIT_LOST_OWNER = 3
EXIT_REFUSED = 4

Begin = Callable[[Client, DataRoot], Background]


def fails(kind: type[Exception], work: Callable[[], object]) -> Exception:
    with pytest.raises(kind) as found:
        work()
    return found.value


def until_fenced(client: Client, session: Session) -> StaleFence:
    """An old client's call reaches the new owner once its channel has connected again."""

    def refused() -> StaleFence | None:
        try:
            session.explain()
        except StaleFence as error:
            return error
        except ConnectionLost:
            return None
        raise AssertionError("an old client's call was served")

    error: StaleFence = eventually(refused)
    return error


def in_load(client: Client, root: DataRoot) -> Background:
    seen: list[str] = []

    def on_progress(event: object) -> None:
        if isinstance(event, LoadProgress):
            seen.append(event.stage)

    opening = Background(lambda: raw_session(client, on_progress=on_progress))
    eventually((root.path / "slowed").exists)
    return opening


def in_prefill(client: Client, root: DataRoot) -> Background:
    session = raw_session(client)
    running = Background(lambda: session.ensure_prefix(LONG_TEXT))
    until_working(client, "ensure_prefix")
    return running


def in_decode(client: Client, root: DataRoot) -> Background:
    return decoding(raw_session(client))[0]


def decoding(session: Session, max_tokens: int = 0) -> tuple[Background, list[str]]:
    got: list[str] = []

    def read() -> str:
        stream = session.turn("One, two,", " three,", max_tokens=max_tokens, ignore_eos=True)
        for chunk in stream.chunks():
            got.append(chunk.text)  # noqa: PERF401
        assert stream.final is not None
        return stream.final.stop_reason.value

    running = Background(read)
    eventually(lambda: len(got) >= 3)
    return running, got


@pytest.mark.parametrize(
    ("begin", "faults"),
    [(in_load, "load:after=2:slow=60:once={root}/slowed"), (in_prefill, ""), (in_decode, "")],
    ids=["load", "prefill", "decode"],
)
def test_a_killed_supervisor_is_followed_at_once(
    root: DataRoot, begin: Begin, faults: str, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        first = root.start(faults=faults.format(root=root.path))
        old = stack.enter_context(first.client())
        status = old.status()
        running = begin(old, root)
        workers = [process.pid for process in first.workers()]
        assert workers == [worker_pid(old)]
        generation = old.status().generation
        first.process.kill()
        first.process.wait()

        fails(ConnectionLost, running.result)
        ends(workers)
        found = root.discover()
        assert found.state is DiscoveryState.STALE
        assert "takes over by itself" in found.detail
        assert root.durable_generation() >= generation

        # No wait for the old lease: the long one of the first daemon is not over yet.
        second = root.start()
        new = stack.enter_context(second.client())
        assert "dead_owner" in second.log()
        assert new.owner_instance_id != status.owner_instance_id
        now = new.status()
        assert now.generation > generation
        assert now.generation == root.durable_generation()
        assert root.discover().state is DiscoveryState.RUNNING
        assert answer(raw_session(new)) == right_answer
        assert len(second.workers()) == 1
        assert not [p for p in root.drafts() if p.name != f"{worker_pid(new)}.json"]


def test_an_old_client_is_fenced_off_by_the_next_owner(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        first = root.start()
        old = stack.enter_context(first.client())
        session = raw_session(old)
        recovering = raw_session(old, recover=True)
        first.process.kill()
        first.process.wait()
        fails(ConnectionLost, session.explain)
        second = root.start()
        new = stack.enter_context(second.client())
        error = until_fenced(old, session)
        assert error.metadata["actual"] == new.owner_instance_id
        # A handle is no better in the right owner's name.
        stubs = Stubs(second, new.owner_instance_id)
        stack.callback(stubs.close)
        from modeld.v1 import session_pb2

        request = session_pb2.CloseSessionRequest()
        request.session.session_id = session.handle.session_id
        request.session.generation = session.handle.generation
        stale = fails(GenerationStale, lambda: stubs.unary(stubs.sessions.CloseSession, request))
        assert isinstance(stale, GenerationStale)
        assert stale.metadata["handle_generation"] == str(session.handle.generation)
        assert stale.metadata["cause"]
        # Who asked to recover does so, and is told.
        assert answer(recovering) == right_answer
        assert len(recovering.recoveries) == 1


def test_generations_rise_over_every_kind_of_end(root: DataRoot) -> None:
    seen: list[int] = []
    for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        daemon = root.start()
        with daemon.client() as client:
            seen.append(client.status().generation)
            seen.append(raw_session(client).handle.generation)
        daemon.process.send_signal(end)
        daemon.wait()
    assert seen == sorted(set(seen))


# --- asked to end ------------------------------------------------------------------------------


def test_sigterm_lets_a_running_decode_finish_and_refuses_the_rest(root: DataRoot) -> None:
    with ExitStack() as stack:
        daemon = root.start()
        client, other = (stack.enter_context(daemon.client()) for _ in range(2))
        session, waiting = raw_session(client), raw_session(other)
        running, _ = decoding(session, max_tokens=200)
        queued = Background(lambda: answer(waiting))
        eventually(lambda: slot(client).queued == 1)
        workers = [process.pid for process in daemon.workers()]
        daemon.process.send_signal(signal.SIGTERM)
        fails(ShuttingDown, queued.result)
        fails(ShuttingDown, lambda: raw_session(other))
        assert client.status().draining
        assert running.result() == "LENGTH"
        assert daemon.wait() == 0
        ends(workers)
    assert root.discover().state is DiscoveryState.NOT_RUNNING
    assert not (root.path / "modeld.lease").exists()
    assert not (root.path / "modeld.sock").exists()
    assert root.drafts() == []


def test_a_second_sigterm_ends_what_runs_at_once(root: DataRoot) -> None:
    with ExitStack() as stack:
        daemon = root.start()
        client = stack.enter_context(daemon.client())
        running, _ = decoding(raw_session(client))
        workers = [process.pid for process in daemon.workers()]
        daemon.process.send_signal(signal.SIGTERM)
        eventually(lambda: client.status().draining)
        daemon.process.send_signal(signal.SIGTERM)
        error = fails(SessionFatal, running.result)
        assert isinstance(error, SessionFatal)
        assert error.metadata["cause"] == "drain"
        assert daemon.wait() == 0
        ends(workers)
    assert root.discover().state is DiscoveryState.NOT_RUNNING


def test_a_drain_that_takes_longer_than_its_grace_ends_what_runs(root: DataRoot) -> None:
    with ExitStack() as stack:
        daemon = root.start()
        client = stack.enter_context(daemon.client())
        running, got = decoding(raw_session(client))
        before = len(got)
        assert client.drain(grace_s=0.5).running == 1
        error = fails(SessionFatal, running.result)
        assert isinstance(error, SessionFatal)
        assert error.metadata["cause"] == "drain"
        assert len(got) > before  # it went on until then
        assert daemon.wait() == 0


# --- stopped and continued ---------------------------------------------------------------------


def test_a_short_stop_of_the_supervisor_costs_nothing(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        daemon = root.start(heartbeat_limit_s=1)
        client = stack.enter_context(daemon.client())
        session = raw_session(client)
        before = client.status()
        supervisor = psutil.Process(daemon.process.pid)
        supervisor.suspend()
        asked = Background(lambda: answer(session))
        with pytest.raises(psutil.TimeoutExpired):
            supervisor.wait(2.5)  # longer than a worker may be silent
        supervisor.resume()
        assert asked.result() == right_answer
        after = client.status()
        assert after.owner_instance_id == before.owner_instance_id
        assert after.generation == before.generation
        assert after.slots[0].worker.pid == before.slots[0].worker.pid


def test_a_stop_beyond_the_lease_without_a_successor_is_survived(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        daemon = root.start(lease_ttl_s=LEASE_TTL_S)
        client = stack.enter_context(daemon.client())
        session = raw_session(client)
        daemon.process.send_signal(signal.SIGSTOP)
        eventually(lambda: root.discover().state is DiscoveryState.STALE)
        daemon.process.send_signal(signal.SIGCONT)
        assert answer(session) == right_answer
        assert root.discover().state is DiscoveryState.RUNNING


def test_a_stopped_owner_that_was_followed_answers_nobody_and_ends(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        first = root.start(lease_ttl_s=LEASE_TTL_S)
        old = stack.enter_context(first.client())
        session, idle = raw_session(old), raw_session(old)
        running, got = decoding(session)
        workers = [process.pid for process in first.workers()]
        generation = old.status().generation
        first.process.send_signal(signal.SIGSTOP)
        eventually(lambda: root.discover().state is DiscoveryState.STALE)

        second = root.start()
        new = stack.enter_context(second.client())
        assert "expired" in second.log()
        assert new.status().generation > generation
        served = raw_session(new)
        assert answer(served) == right_answer

        # What the first finds when it wakes: calls that were sent while it was stopped.
        calls = [
            Background(old.status),
            Background(old.sessions),
            Background(idle.explain),
            Background(lambda: raw_session(old)),
        ]
        already = len(got)
        first.process.send_signal(signal.SIGCONT)
        for call in calls:
            with pytest.raises((NotOwner, ConnectionLost, StaleFence)):
                call.result()
        with pytest.raises((NotOwner, SessionFatal, ConnectionLost)):
            running.result()
        # What had left it before the stop may arrive late; nothing comes after.
        assert len(got) - already < 64
        assert first.wait() == EXIT_LOST_OWNER
        ends(workers)

        # The second is unharmed: its lease, its socket, its session and new clients.
        assert root.discover().state is DiscoveryState.RUNNING
        assert answer(served) == right_answer
        again = stack.enter_context(second.client())
        assert again.owner_instance_id == new.owner_instance_id
        assert answer(raw_session(again)) == right_answer
        assert new.status().slots[0].worker.restarts == 0
        assert new.status().generation == root.durable_generation()


# --- two at once -------------------------------------------------------------------------------


def test_of_two_daemons_started_at_once_exactly_one_serves(
    root: DataRoot, right_answer: list[int]
) -> None:
    with ExitStack() as stack:
        daemons = [root.start() for _ in range(2)]
        loser = eventually(lambda: next((d for d in daemons if d.process.poll() is not None), None))
        winner: RunningDaemon = next(d for d in daemons if d is not loser)
        assert loser.process.returncode == EXIT_REFUSED
        client = stack.enter_context(winner.client())
        assert client.status().pid == winner.process.pid
        assert answer(raw_session(client)) == right_answer
        log = loser.log()
        assert "NOT_OWNER" in log
        assert f"pid {winner.process.pid}" in log
        assert "--data-root" in log
        assert winner.process.poll() is None


def test_the_socket_is_for_its_owner_alone(root: DataRoot) -> None:
    daemon = root.start()
    with daemon.client():
        mode = (root.path / "modeld.sock").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        assert [p.name for p in root.path.iterdir() if p.is_socket()] == ["modeld.sock"]


def test_a_worker_that_outlived_its_supervisor_is_ended_by_the_next_owner(root: DataRoot) -> None:
    # A stopped worker neither sees its pipe close nor can end itself by it.
    first = root.start()
    with first.client() as client:
        pid = until_state(client, "IDLE").worker.pid
    # Freed from its parent-death signal only by the stop's taking effect first.
    os.kill(pid, signal.SIGSTOP)
    first.process.kill()
    first.process.wait()
    second = root.start()
    with second.client():
        ends([pid])


# --- torn files --------------------------------------------------------------------------------


def test_a_torn_lease_is_left_alone_and_told(root: DataRoot) -> None:
    lease = root.path / "modeld.lease"
    torn = b'{"format": "modeld-lease-1", "instance_'
    lease.write_bytes(torn)
    found = root.discover()
    assert found.state is DiscoveryState.STALE
    daemon = root.start()
    assert daemon.wait() == EXIT_REFUSED
    assert "NOT_OWNER" in daemon.log()
    assert f"{lease} can't be read" in daemon.log()
    assert "delete that file" in daemon.log()
    assert lease.read_bytes() == torn
    lease.unlink()
    with root.start().client() as client:
        assert client.status().generation > 0


def test_a_lease_torn_under_a_running_daemon_ends_it(root: DataRoot) -> None:
    lease = root.path / "modeld.lease"
    daemon = root.start(lease_ttl_s=LEASE_TTL_S)
    with daemon.client() as client:
        raw_session(client)
        workers = [process.pid for process in daemon.workers()]
    lease.write_bytes(b"torn")
    assert daemon.wait() == EXIT_LOST_OWNER
    ends(workers)
    assert lease.read_bytes() == b"torn"
    assert "can't be read" in daemon.log()


@pytest.mark.parametrize("torn", [["generation"], ["generation", "generation.previous"]])
def test_a_torn_generation_file_never_makes_a_number_come_again(
    root: DataRoot, torn: list[str]
) -> None:
    daemon = root.start()
    with daemon.client() as client:
        used = raw_session(client).handle.generation
    daemon.process.kill()
    daemon.wait()
    for name in torn:
        path = root.path / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    daemon = root.start()
    with daemon.client() as client:
        assert client.status().generation > used
        assert client.status().generation == root.durable_generation()
    assert "generation is torn" in daemon.log()


def test_leftovers_of_a_crash_do_not_block_a_start(root: DataRoot) -> None:
    sock = root.path / "modeld.sock"
    sock.write_text("not even a socket")
    (root.path / "modeld.lease.lock").touch(0o600)
    (root.path / "modeld.lease.tmp-000000000000").write_text("half a lease")
    (root.path / "generation.tmp-000000000000").write_text("half a number")
    workers: Path = root.path / "workers"
    workers.mkdir()
    (workers / "1.json").write_text('{"pid": 1, "started": "long ago"}')
    (workers / "2.json").write_text("torn")
    with root.start().client() as client:
        pid = until_state(client, "IDLE").worker.pid
        assert [path.name for path in root.drafts()] == [f"{pid}.json"]
