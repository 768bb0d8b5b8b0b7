"""Reading and judging the lease file, and the four states that a client can find."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.shared.lease_record import (
    FORMAT,
    MAX_LEASE_BYTES,
    DiscoveryState,
    LeaseRecord,
    LeaseUnreadable,
    Verdict,
    Viewpoint,
    discover,
    expires_in_s,
    judge,
    lease_path,
    parse,
    process_start,
    read,
)

RECORD = LeaseRecord(
    format=FORMAT,
    instance_id="one",
    pid=4242,
    pid_start=77,
    pid_namespace="pid:[1]",
    host="here",
    boot_id="boot",
    endpoints=("unix:/x.sock",),
    backends=("llama",),
    protocol_version=1,
    generation_floor=5,
    acquired=1000.0,
    renewed=1000.0,
    renewed_boot_s=50.0,
    ttl_s=15.0,
)
HERE = Viewpoint(
    now_unix_s=1001.0,
    now_boot_s=51.0,
    host="here",
    boot_id="boot",
    pid_namespace="pid:[1]",
    pid_start_of=lambda pid: 77,
)


def changed(**values: object) -> LeaseRecord:
    return msgspec.structs.replace(RECORD, **values)


def test_live_owner_on_this_host_is_live_whatever_the_wall_clock_says() -> None:
    for now in (0.0, 1001.0, 1e9):
        assert judge(RECORD, replace(HERE, now_unix_s=now)) is Verdict.LIVE


def test_owner_whose_process_is_gone_or_whose_pid_was_used_again_is_dead_at_once() -> None:
    assert judge(RECORD, replace(HERE, pid_start_of=lambda pid: None)) is Verdict.DEAD_OWNER
    assert judge(RECORD, replace(HERE, pid_start_of=lambda pid: 78)) is Verdict.DEAD_OWNER


def test_stopped_owner_expires_by_the_boot_clock() -> None:
    assert judge(RECORD, replace(HERE, now_boot_s=65.0)) is Verdict.LIVE
    assert judge(RECORD, replace(HERE, now_boot_s=65.1)) is Verdict.EXPIRED


@pytest.mark.parametrize(
    "elsewhere",
    [replace(HERE, host="there"), replace(HERE, pid_namespace="pid:[2]")],
    ids=["host", "namespace"],
)
def test_pids_of_another_host_or_namespace_prove_nothing(elsewhere: Viewpoint) -> None:
    view = replace(elsewhere, pid_start_of=lambda pid: None, now_boot_s=9e9)
    assert judge(RECORD, view) is Verdict.LIVE
    assert judge(RECORD, replace(view, now_unix_s=1015.1)) is Verdict.EXPIRED


def test_another_boot_of_this_host_is_dead_once_the_record_is_old() -> None:
    """Not before: two machines of one name may share a folder."""
    view = replace(HERE, boot_id="next boot")
    assert judge(RECORD, view) is Verdict.LIVE
    assert judge(RECORD, replace(view, now_unix_s=1016.0)) is Verdict.DEAD_OWNER


@given(st.floats(0, 100), st.floats(0, 100))
def test_expiry_tells_the_same_as_the_verdict(age: float, unix_age: float) -> None:
    for view in (HERE, replace(HERE, host="there", pid_namespace="pid:[2]")):
        view = replace(view, now_boot_s=50.0 + age, now_unix_s=1000.0 + unix_age)
        expired = judge(RECORD, view) is Verdict.EXPIRED
        assert expired == (expires_in_s(RECORD, view) == 0) or expires_in_s(RECORD, view) < 1e-9


def test_record_reads_back_exactly(tmp_path: Path) -> None:
    assert parse(RECORD.encode(), tmp_path) == RECORD


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    with pytest.raises(LeaseUnreadable, match="delete that file"):
        parse(data, Path("/x/modeld.lease"))


def test_every_torn_prefix_is_unreadable() -> None:
    data = RECORD.encode().rstrip()
    for cut in range(len(data)):
        with pytest.raises(LeaseUnreadable):
            parse(data[:cut], Path("/x"))


@pytest.mark.parametrize(
    "bad",
    [{"format": "other-1"}, {"pid": 0}, {"instance_id": ""}, {"ttl_s": 0.0}],
)
def test_foreign_record_is_unreadable(bad: dict[str, object]) -> None:
    with pytest.raises(LeaseUnreadable):
        parse(changed(**bad).encode(), Path("/x"))


def test_what_is_not_a_plain_small_file_is_unreadable(tmp_path: Path) -> None:
    path = lease_path(tmp_path)
    os.mkfifo(path)
    with pytest.raises(LeaseUnreadable, match="not a plain file"):
        read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(LeaseUnreadable):
        read(path)
    path.rmdir()
    target = tmp_path / "target"
    target.write_bytes(RECORD.encode())
    path.symlink_to(target)
    with pytest.raises(LeaseUnreadable, match="link"):
        read(path)
    path.unlink()
    path.write_bytes(b" " * (MAX_LEASE_BYTES + 1))
    with pytest.raises(LeaseUnreadable, match="larger"):
        read(path)


def test_process_start_knows_the_living_and_the_gone() -> None:
    own = process_start(os.getpid())
    assert own is not None
    assert own == process_start(os.getpid())
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert process_start(pid) is None  # a zombie serves nobody
    os.waitpid(pid, 0)
    assert process_start(pid) is None


def test_discovery_tells_four_states_apart(tmp_path: Path) -> None:
    assert discover(tmp_path, installed=False).state is DiscoveryState.NOT_INSTALLED
    absent = discover(tmp_path / "not" / "there", installed=True)
    assert absent.state is DiscoveryState.NOT_RUNNING
    assert "modeld serve" in absent.detail
    path = lease_path(tmp_path)
    path.write_bytes(RECORD.encode())
    running = discover(tmp_path, installed=True, here=HERE)
    assert running.state is DiscoveryState.RUNNING
    assert running.record == RECORD
    dead = discover(tmp_path, installed=True, here=replace(HERE, pid_start_of=lambda pid: None))
    assert dead.state is DiscoveryState.STALE
    assert "takes over by itself" in dead.detail
    path.write_bytes(changed(endpoints=()).encode())
    starting = discover(tmp_path, installed=True, here=HERE)
    assert starting.state is DiscoveryState.NOT_RUNNING
    assert "starting" in starting.detail


def test_discovery_of_a_torn_file_is_stale_and_says_what_to_do(tmp_path: Path) -> None:
    lease_path(tmp_path).write_bytes(RECORD.encode()[:40])
    found = discover(tmp_path, installed=True)
    assert found.state is DiscoveryState.STALE
    assert found.record is None
    assert str(lease_path(tmp_path)) in found.detail
    (tmp_path / "file").write_text("x")
    assert discover(tmp_path / "file", installed=True).state is DiscoveryState.NOT_RUNNING
