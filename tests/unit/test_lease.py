"""The lease: one owner, at once after a crash, never on numbers that can't be proved."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from modeld.shared.errors import InvalidRequest, NotOwner, StorageFull, from_wire
from modeld.shared.lease_record import (
    DiscoveryState,
    LeaseHeld,
    LeaseRecord,
    LeaseUnreadable,
    Viewpoint,
    boot_clock_s,
    discover,
    lease_path,
    read,
    viewpoint,
)
from modeld.supervisor import durable, lease
from modeld.supervisor.lease import Lease


@dataclass
class Clocks:
    """Both clocks of a simulated machine; moving time is all it can do."""

    passed_s: float = 0.0
    wall_jump_s: float = 0.0

    def look(self) -> Viewpoint:
        here = viewpoint()
        return replace(
            here,
            now_boot_s=1000.0 + self.passed_s,
            now_unix_s=5000.0 + self.passed_s + self.wall_jump_s,
        )

    def boot_s(self) -> float:
        return 1000.0 + self.passed_s


def acquire(
    root: Path,
    name: str,
    clocks: Clocks | None = None,
    *,
    endpoints: Sequence[str] = (),
    backends: Sequence[str] = (),
    generation_floor: int = 0,
) -> Lease:
    return Lease.acquire(
        root,
        instance_id=name,
        ttl_s=15,
        endpoints=endpoints,
        backends=backends,
        generation_floor=generation_floor,
        look=viewpoint if clocks is None else clocks.look,
        clock=boot_clock_s if clocks is None else clocks.boot_s,
    )


def recorded(root: Path) -> LeaseRecord:
    """What the lease file of ``root`` says; there must be one."""
    record = read(lease_path(root))
    assert record is not None
    return record


def test_owner_is_found_running_once_it_says_where_it_listens(tmp_path: Path) -> None:
    held = acquire(tmp_path / "new" / "root", "one", backends=("llama",))
    root = tmp_path / "new" / "root"
    assert root.stat().st_mode & 0o777 == 0o700
    assert lease_path(root).stat().st_mode & 0o777 == 0o600
    assert discover(root, True).state is DiscoveryState.NOT_RUNNING
    held.publish(["unix:/x.sock"])
    found = discover(root, True)
    assert found.state is DiscoveryState.RUNNING
    assert found.record is not None
    assert found.record.endpoints == ("unix:/x.sock",)
    assert held.release()
    assert discover(root, True).state is DiscoveryState.NOT_RUNNING


def test_second_daemon_is_told_who_holds_the_root_and_what_to_do(tmp_path: Path) -> None:
    acquire(tmp_path, "one", endpoints=("unix:/x.sock",))
    with pytest.raises(LeaseHeld) as caught:
        acquire(tmp_path, "two")
    assert f"pid {os.getpid()}" in caught.value.message
    assert "--data-root" in caught.value.message
    assert caught.value.reason == "NOT_OWNER"
    assert recorded(tmp_path).instance_id == "one"
    assert type(from_wire("NOT_OWNER", "x")) is NotOwner


def test_owner_that_stopped_renewing_is_taken_over_and_then_refuses(tmp_path: Path) -> None:
    clocks = Clocks()
    old = acquire(tmp_path, "old", clocks, generation_floor=41)
    clocks.passed_s = 15.5
    new = acquire(tmp_path, "new", clocks, generation_floor=3)
    assert new.took_over is not None
    assert new.took_over.instance_id == "old"
    assert new.record.generation_floor == 41
    assert not old.still_owner()
    with pytest.raises(NotOwner, match="took the data root over"):
        old.check()
    assert not old.release()
    assert recorded(tmp_path).instance_id == "new"
    new.check()


def test_owner_fences_itself_before_its_record_can_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks()
    held = acquire(tmp_path, "one", clocks)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        clocks.passed_s = 5
        with pytest.raises(StorageFull):
            held.renew()
        assert held.still_owner()  # the last renewal still stands
        clocks.passed_s = 10.1
        with pytest.raises(NotOwner, match="can't be renewed now"):
            held.check()
    with pytest.raises(LeaseHeld):  # nobody else can have it yet
        acquire(tmp_path, "two", clocks)
    held.check()  # space again, and still ours: it renews and goes on
    assert not held.lost
    assert held.record.renewed_boot_s == clocks.boot_s()


def test_suspended_owner_checks_the_file_before_a_reply_leaves(tmp_path: Path) -> None:
    clocks = Clocks()
    held = acquire(tmp_path, "one", clocks)
    clocks.passed_s = 3600
    held.check()  # nobody took it: renewed, and serving is right
    assert recorded(tmp_path).renewed_boot_s == clocks.boot_s()


def test_jump_of_the_wall_clock_moves_nothing(tmp_path: Path) -> None:
    clocks = Clocks()
    held = acquire(tmp_path, "one", clocks)
    for jump in (1e6, -1e6):
        clocks.wall_jump_s = jump
        held.check()
        with pytest.raises(LeaseHeld):
            acquire(tmp_path, "two", clocks)


def test_floor_only_rises(tmp_path: Path) -> None:
    held = acquire(tmp_path, "one", generation_floor=7)
    held.renew(generation_floor=9)
    held.renew(generation_floor=2)
    assert recorded(tmp_path).generation_floor == 9


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": "else"}', b"\x00" * 500])
def test_torn_or_foreign_file_is_never_overwritten(tmp_path: Path, content: bytes) -> None:
    lease_path(tmp_path).write_bytes(content)
    with pytest.raises(LeaseUnreadable, match=r"delete that file") as caught:
        acquire(tmp_path, "one")
    assert str(lease_path(tmp_path)) in caught.value.message
    assert lease_path(tmp_path).read_bytes() == content


@pytest.mark.parametrize("damage", ["removed", "torn", "foreign"])
def test_owner_whose_file_was_damaged_is_no_owner_and_leaves_it(
    tmp_path: Path, damage: str
) -> None:
    held = acquire(tmp_path, "one")
    path = lease_path(tmp_path)
    if damage == "removed":
        path.unlink()
    elif damage == "torn":
        path.write_bytes(b'{"form')
    else:
        path.write_bytes(msgspec.structs.replace(held.record, instance_id="two").encode())
    content = path.read_bytes() if path.exists() else None
    with pytest.raises(NotOwner):
        held.renew()
    assert held.lost
    assert not held.still_owner()
    assert not held.release()
    assert (path.read_bytes() if path.exists() else None) == content


def test_released_lease_serves_nothing_more(tmp_path: Path) -> None:
    held = acquire(tmp_path, "one")
    assert held.release()
    assert not held.release()
    assert not held.still_owner()
    acquire(tmp_path, "two")


def test_unusable_data_root_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidRequest, match="not a folder"):
            acquire(root, "one")

    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        with pytest.raises(InvalidRequest, match=r"Read-only file system.*--data-root"):
            acquire(tmp_path, "one")


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens in a thread
        await asyncio.sleep(0.01)


async def test_keeping_renews_and_reports_a_takeover_once(tmp_path: Path) -> None:
    held = Lease.acquire(tmp_path, instance_id="one", ttl_s=0.3)
    lost: list[NotOwner] = []
    task = asyncio.create_task(held.keep(lost.append, lambda: 12))
    first = held.record.renewed_boot_s
    await until(lambda: held.record.renewed_boot_s != first)
    assert recorded(tmp_path).generation_floor == 12
    lease_path(tmp_path).write_bytes(msgspec.structs.replace(held.record, instance_id="x").encode())
    await task
    assert len(lost) == 1
    assert held.lost


async def test_keeping_tries_on_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RETRY_S", 0.01)
    held = Lease.acquire(tmp_path, instance_id="one", ttl_s=0.3)
    failures = 0
    real = durable.write_atomic

    def full(path: Path, data: bytes) -> None:
        nonlocal failures
        failures += 1
        if failures <= 3:
            raise StorageFull("full")
        real(path, data)

    monkeypatch.setattr(lease, "write_atomic", full)
    first = held.record.renewed_boot_s
    task = asyncio.create_task(held.keep(lambda error: None))
    await until(lambda: held.record.renewed_boot_s != first)
    assert failures >= 4
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# --- several processes -----------------------------------------------------------------------

CONTENDER = """
import sys, time
from pathlib import Path
from modeld.shared.errors import NotOwner
from modeld.supervisor.lease import Lease
root, name = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
try:
    lease = Lease.acquire(root, instance_id=name, ttl_s=float(sys.argv[3]))
except NotOwner:
    print("lost", flush=True)
else:
    print("won", flush=True)
    for line in sys.stdin:
        print("owner" if lease.still_owner() else "not owner", flush=True)
"""


def contender(root: Path, name: str, ttl_s: float = 15) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CONTENDER, str(root), name, str(ttl_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert hear(process) == "ready\n"
    return process


def say(process: subprocess.Popen[str], text: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(text + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.parametrize("case", ["cold", "takeover"])
def test_of_many_contenders_exactly_one_wins(tmp_path: Path, case: str) -> None:
    if case == "takeover":
        first = contender(tmp_path, "crashed")
        say(first)
        assert hear(first) == "won\n"
        end(first)
    several = [contender(tmp_path, f"c{n}") for n in range(8)]
    try:
        for process in several:
            say(process)
        results = [hear(process).strip() for process in several]
        assert sorted(results) == ["lost"] * 7 + ["won"]
        winner = results.index("won")
        assert json.loads(lease_path(tmp_path).read_bytes())["instance_id"] == f"c{winner}"
    finally:
        for process in several:
            end(process)


def test_killed_owner_is_taken_over_at_once(tmp_path: Path) -> None:
    owner = contender(tmp_path, "one")
    say(owner)
    assert hear(owner) == "won\n"
    with pytest.raises(LeaseHeld):
        acquire(tmp_path, "two")
    end(owner)
    taken = acquire(tmp_path, "two")
    assert taken.took_over is not None
    assert taken.took_over.instance_id == "one"


def test_stopped_owner_refuses_after_another_took_over(tmp_path: Path) -> None:
    owner = contender(tmp_path, "one", ttl_s=1)
    try:
        say(owner)
        assert hear(owner) == "won\n"
        owner.send_signal(signal.SIGSTOP)
        taken = None
        while taken is None:
            try:
                taken = acquire(tmp_path, "two")
            except LeaseHeld:
                time.sleep(0.05)
        owner.send_signal(signal.SIGCONT)
        say(owner, "check")
        assert hear(owner) == "not owner\n"
        assert taken.still_owner()
    finally:
        end(owner)


def test_stopped_owner_that_nobody_replaced_goes_on(tmp_path: Path) -> None:
    owner = contender(tmp_path, "one", ttl_s=0.2)
    try:
        say(owner)
        assert hear(owner) == "won\n"
        owner.send_signal(signal.SIGSTOP)
        while discover(tmp_path, True).state is not DiscoveryState.STALE:
            time.sleep(0.05)
        owner.send_signal(signal.SIGCONT)
        say(owner, "check")
        assert hear(owner) == "owner\n"
    finally:
        end(owner)
