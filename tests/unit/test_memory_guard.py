"""A worker's last look before it allocates: refusals with numbers, and a bound that holds."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modeld.shared.capacity import MemorySnapshot
from modeld.shared.errors import InsufficientMemory
from modeld.workers import memory_guard
from modeld.workers.memory_guard import MemoryGuard, data_bytes, data_limit

MIB = 1024 * 1024
ADVICE = "Ask for less."


def reading(free: int, *, limit: int = 0, known: bool = True) -> MemorySnapshot:
    return MemorySnapshot(
        total_bytes=64 * 1024 * MIB, available_bytes=free, limit_bytes=limit, known=known
    )


def guard(free: int, *, limit: int = 0) -> MemoryGuard:
    return MemoryGuard(lambda: reading(free, limit=limit), slack_bytes=0)


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


@pytest.fixture(autouse=True)
def limits_as_before() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def test_what_does_not_fit_is_refused_with_every_number_before_anything_is_allocated() -> None:
    entered = False
    with (
        pytest.raises(InsufficientMemory) as refused,
        guard(1000, limit=5000).allocating(
            "A context of 512 tokens", {"kv": 900, "compute": 101}, ADVICE, more={"window": 512}
        ),
    ):
        entered = True
    assert not entered
    told = refused.value
    assert told.message == (
        "A context of 512 tokens needs 1001 bytes of the host's memory (900 kv + 101 compute), "
        "1000 are free (a limit of 5000 holds here). Ask for less."
    )
    assert {
        name: told.metadata[name] for name in ("needed_bytes", "kv_bytes", "compute_bytes")
    } == {
        "needed_bytes": "1001",
        "kv_bytes": "900",
        "compute_bytes": "101",
    }
    assert (told.metadata["free_bytes"], told.metadata["window"]) == ("1000", "512")
    assert told.metadata["cause"] == "host_memory"


def test_what_fits_exactly_is_let_through() -> None:
    with guard(1000).allocating("It", {"kv": 1000}, ADVICE, more={}):
        pass


def test_a_real_allocation_beyond_what_is_free_fails_and_the_process_lives_on() -> None:
    before = soft_limit()
    with guard(32 * MIB).allocating("It", {"kv": MIB}, ADVICE, more={}):
        assert len(bytearray(16 * MIB)) == 16 * MIB
        with pytest.raises(MemoryError):
            bytearray(256 * MIB)
    assert soft_limit() == before
    assert len(bytearray(256 * MIB)) == 256 * MIB


def test_the_limit_is_restored_when_the_allocation_raises() -> None:
    before = soft_limit()

    def allocate() -> None:
        with data_limit(MIB):
            assert soft_limit() != before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        allocate()
    assert soft_limit() == before


def test_a_limit_that_was_lower_before_stays() -> None:
    used, hard = data_bytes(), resource.getrlimit(resource.RLIMIT_DATA)[1]
    assert used is not None
    lower = used + 128 * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    with data_limit(1024 * MIB):
        assert soft_limit() == lower
    assert soft_limit() == lower


def test_where_the_host_cannot_be_read_nothing_is_refused_or_bounded() -> None:
    before = soft_limit()
    blind = MemoryGuard(lambda: reading(0, known=False))
    with blind.allocating("It", {"kv": 10**15}, ADVICE, more={}):
        assert soft_limit() == before


def test_a_platform_without_the_limit_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert data_bytes(tmp_path / "no-such-file") is None
    monkeypatch.setattr(memory_guard, "data_bytes", lambda: None)
    memory_guard._say_once.cache_clear()
    before = soft_limit()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with data_limit(MIB):
                assert soft_limit() == before
    assert [record.message for record in caplog.records] == [
        "this platform doesn't tell a process's data size: allocations aren't bounded"
    ]


# --- whom the kernel ends first ----------------------------------------------------------------


def oom_score_after(start: str) -> str:
    """What a process has that began at ``start`` and then offered itself."""
    code = (
        "from pathlib import Path\n"
        "from modeld.workers.memory_guard import offer_to_oom_killer\n"
        "file = Path('/proc/self/oom_score_adj')\n"
        f"file.write_text({start!r})\n"
        "offer_to_oom_killer()\n"
        "print(file.read_text().strip())\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize(("start", "after"), [("300", "500"), ("700", "700")])
def test_the_oom_score_is_raised_and_never_lowered(start: str, after: str) -> None:
    assert oom_score_after(start) == after


def test_a_worker_process_is_the_kernels_first_choice_and_its_parent_is_not(
    tmp_path: Path,
) -> None:
    mine = Path("/proc/self/oom_score_adj").read_text().strip()
    read, write = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, "-P", "-m", "modeld.workers.scripted"],
        env={
            **os.environ,
            "MODELD_WORKER_PARENT_FD": str(read),
            "MODELD_WORKER_ENDPOINT": f"ipc://{tmp_path / 'nobody'}",
            "MODELD_WORKER_EPOCH": "00" * 16,
            "MODELD_WORKER_OWNER": "o",
            "MODELD_WORKER_SUPERVISOR_PID": str(os.getpid()),
            "MODELD_WORKER_HEARTBEAT_S": "1",
        },
        pass_fds=[read],
        stderr=subprocess.DEVNULL,
    )
    try:
        score = mine
        while score == mine and worker.poll() is None:
            time.sleep(0.02)
            score = Path(f"/proc/{worker.pid}/oom_score_adj").read_text().strip()
        assert score == str(max(500, int(mine)))
        assert Path("/proc/self/oom_score_adj").read_text().strip() == mine
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        os.close(read)
        os.close(write)
