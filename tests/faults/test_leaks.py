"""The OpenVINO worker and its supervisor after many loads, sessions, cancels and kills.

Descriptors and threads are no more than after the first rounds, but for a few that pools of threads
and channels still make as they are first needed: fewer than the rounds that follow. Memory of a
process's own may go up and down with its allocator, by ``SLACK_BYTES``, and doesn't grow with the
rounds.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest

from modeld.client import Client
from modeld.client.errors import DeadlineExceeded
from modeld.shared.host_memory import anonymous_bytes
from tests.support.daemon import RunningDaemon, eventually
from tests.support.faulting import data_root, put_in_store, slot, until_state, worker_pid
from tests.support.keeping import Kept, kept, until
from tests.support.openvino_models import tiny_gguf
from tests.support.product import ask

SLACK_BYTES = 8 * 1024 * 1024
LAZY = 6  # threads of the event loop's pool, or their descriptors, on a small machine
MODEL = "smol"
DEEP = "deep"  # whose prefill takes far longer than a deadline of DEADLINE_S
LONG = "One stone bridge. " * 115
DEADLINE_S = 0.1


@dataclass(frozen=True)
class Counted:
    descriptors: int
    threads: int


def counted(pid: int) -> Counted:
    process = psutil.Process(pid)
    return Counted(process.num_fds(), process.num_threads())


def own_bytes(pid: int) -> int:
    found = anonymous_bytes(pid)
    assert found is not None
    return found


def _near(now: Counted, before: Counted, few: int) -> bool:
    few = min(few, LAZY)
    return now.descriptors <= before.descriptors + few and now.threads <= before.threads + few


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("tiny")
    with data_root(tiny_gguf(folder / "tiny.gguf"), backend="openvino") as root:
        deep = tiny_gguf(folder / "deep.gguf", layers=24)
        put_in_store(root.path, deep, "openvino", name=DEEP)
        # A cold store that the first rounds fill: what it takes later is a leak, too.
        yield root.start(n_ubatch=64, cold_ram_bytes=1 << 20)


@pytest.fixture(scope="module")
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with daemon.client() as connected:
        until_state(connected, "IDLE")
        yield connected


def leaves_nothing(
    daemon: RunningDaemon, client: Client, rounds: int, work: Callable[[], object]
) -> None:
    """Compare after the first three rounds, which fill what is kept, and after all of them."""
    pids = (daemon.process.pid, worker_pid(client))
    for _ in range(3):
        work()
    # What gRPC made for these calls may come and go: the baseline is when nothing runs.
    before = [counted(pid) for pid in pids]
    sizes: list[list[int]] = []
    for _ in range(rounds - 3):
        work()
        sizes.append([own_bytes(pid) for pid in pids])
    few = rounds - 3 - 1  # what leaked one a round would be more
    eventually(
        lambda: all(_near(counted(pid), one, few) for pid, one in zip(pids, before, strict=True))
    )
    half = len(sizes) // 2
    for who in range(2):
        early = max(size[who] for size in sizes[:half])
        late = min(size[who] for size in sizes[half:])
        assert late <= early + SLACK_BYTES // 4, (who, sizes)  # it doesn't grow
        assert max(size[who] for size in sizes) <= sizes[0][who] + SLACK_BYTES, (who, sizes)
    assert worker_pid(client) == pids[1]


def test_loading_and_unloading(daemon: RunningDaemon, client: Client) -> None:
    def work() -> None:
        client.load_model(MODEL)
        with client.open_session(MODEL, window=512, prompt_format="raw") as session:
            assert len(ask(session, "One, two,", " three,").ids) == 8
        client.unload_model(force=True)

    leaves_nothing(daemon, client, 10, work)


def test_opening_and_closing_sessions(daemon: RunningDaemon, client: Client) -> None:
    def work() -> None:
        with client.open_session(MODEL, window=512, prompt_format="raw") as session:
            session.ensure_prefix("One, two, three")

    leaves_nothing(daemon, client, 50, work)
    assert client.sessions() == []


def test_prefills_that_are_cancelled(daemon: RunningDaemon, client: Client) -> None:
    numbers = iter(range(100))
    with client.open_session(DEEP, window=2048, prompt_format="raw") as session:
        told: list[int] = []

        def work() -> None:
            text = f"{next(numbers)} {LONG}"  # shares nothing with the last one
            with pytest.raises(DeadlineExceeded):
                session.ensure_prefix(text, timeout=DEADLINE_S)
            eventually(lambda: not slot(client).holder_operation)
            told.append(session.explain().resident)

        leaves_nothing(daemon, client, 30, work)
        assert any(told), "no prefill was caught after its first part"


def died_since(k: Kept, deaths: int) -> bool:
    return len(k.deaths) > deaths


async def test_killing_the_worker(tmp_path: Path) -> None:
    # ``kept`` proves that no descriptor and no child is left at the end.
    async with kept(tmp_path, module="modeld.workers.openvino") as k:
        threads, size = 0, 0
        for count in range(20):
            deaths = len(k.deaths)
            await k.keeper.ready(None)
            if count == 3:
                threads, size = psutil.Process().num_threads(), own_bytes(os.getpid())
            os.kill(k.keeper.pid or 0, (signal.SIGKILL, signal.SIGSEGV)[count % 2])
            await until(partial(died_since, k, deaths))
        await k.keeper.ready(None)
        assert psutil.Process().num_threads() <= threads + LAZY
        assert own_bytes(os.getpid()) <= size + SLACK_BYTES
