"""The host probe, on recorded readings of both cgroup versions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from modeld.shared.host_memory import host_memory

GIB = 1 << 30
MIB = 1 << 20
NO_LIMIT_V1 = "9223372036854771712"


def machine(total: int = 16 * GIB, available: int = 12 * GIB):
    return lambda: SimpleNamespace(total=total, available=available)


def record(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def v2(root: Path, path: str, mount_root: str = "/", **levels: dict[str, str]) -> Path:
    return record(
        root,
        {
            "proc/self/cgroup": f"0::{path}",
            "proc/self/mountinfo": (
                "22 1 0:20 / / rw - ext4 /dev/root rw\n"
                f"31 22 0:28 {mount_root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"
            ),
        },
    )


def level(root: Path, folder: str, limit: str, usage: int, inactive: int = 0, high: str = "max"):
    record(
        root,
        {
            f"{folder}/memory.max": limit,
            f"{folder}/memory.high": high,
            f"{folder}/memory.current": str(usage),
            f"{folder}/memory.stat": f"anon 1\ninactive_file {inactive // 4}\n"
            f"active_file {inactive - inactive // 4}",
        },
    )


def test_machine_without_cgroups_is_what_the_system_says(tmp_path: Path) -> None:
    snapshot = host_memory(tmp_path, machine())
    assert snapshot.known
    assert (snapshot.total_bytes, snapshot.available_bytes) == (16 * GIB, 12 * GIB)
    assert snapshot.limit_bytes == 0


def test_v2_limit_counts_droppable_page_cache_as_available(tmp_path: Path) -> None:
    v2(tmp_path, "/app.slice/modeld.service")
    level(tmp_path, "sys/fs/cgroup/app.slice/modeld.service", str(4 * GIB), 3 * GIB, 2 * GIB)
    snapshot = host_memory(tmp_path, machine())
    assert (snapshot.limit_bytes, snapshot.available_bytes) == (4 * GIB, 3 * GIB)


def test_v2_tightest_ancestor_decides(tmp_path: Path) -> None:
    v2(tmp_path, "/a/b")
    level(tmp_path, "sys/fs/cgroup/a/b", "max", GIB)
    level(tmp_path, "sys/fs/cgroup/a", str(8 * GIB), 7 * GIB)
    snapshot = host_memory(tmp_path, machine())
    assert (snapshot.limit_bytes, snapshot.available_bytes) == (8 * GIB, GIB)


def test_v2_throttle_limit_counts_as_a_limit(tmp_path: Path) -> None:
    v2(tmp_path, "/a")
    level(tmp_path, "sys/fs/cgroup/a", "max", GIB, high=str(2 * GIB))
    assert host_memory(tmp_path, machine()).available_bytes == GIB


@pytest.mark.parametrize(
    ("path", "mount_root"), [("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/../x", "/")]
)
def test_inside_a_container_the_mount_point_is_the_own_cgroup(
    tmp_path: Path, path: str, mount_root: str
) -> None:
    v2(tmp_path, path, mount_root)
    level(tmp_path, "sys/fs/cgroup", str(2 * GIB), GIB)
    assert host_memory(tmp_path, machine()).limit_bytes == 2 * GIB


def test_machine_with_less_free_than_the_cgroup_allows_wins(tmp_path: Path) -> None:
    v2(tmp_path, "/a")
    level(tmp_path, "sys/fs/cgroup/a", str(8 * GIB), 0)
    assert host_memory(tmp_path, machine(available=GIB)).available_bytes == GIB


def v1(root: Path, limit: str, usage: int, inactive: int, path: str = "/jobs/1") -> Path:
    return record(
        root,
        {
            "proc/self/cgroup": f"9:name=systemd:/\n4:cpu,memory:{path}\n0::/",
            "proc/self/mountinfo": (
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
                "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
            ),
            f"sys/fs/cgroup/memory{path}/memory.limit_in_bytes": limit,
            f"sys/fs/cgroup/memory{path}/memory.usage_in_bytes": str(usage),
            f"sys/fs/cgroup/memory{path}/memory.stat": (
                f"cache 5\ninactive_file 1\ntotal_inactive_file {inactive}"
            ),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
        },
    )


def test_v1_limit_is_honoured_and_no_limit_is_none(tmp_path: Path) -> None:
    v1(tmp_path / "a", str(3 * GIB), 2 * GIB, GIB)
    snapshot = host_memory(tmp_path / "a", machine())
    assert (snapshot.limit_bytes, snapshot.available_bytes) == (3 * GIB, 2 * GIB)
    v1(tmp_path / "b", NO_LIMIT_V1, 2 * GIB, GIB)
    assert host_memory(tmp_path / "b", machine()).limit_bytes == 0


def test_usage_over_the_limit_is_nothing_available_not_negative(tmp_path: Path) -> None:
    v1(tmp_path, str(GIB), 2 * GIB, 0)
    assert host_memory(tmp_path, machine()).available_bytes == 0


def test_limit_whose_usage_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    v1(tmp_path, str(GIB), 0, 0)
    (tmp_path / "sys/fs/cgroup/memory/jobs/1/memory.usage_in_bytes").write_text("broken")
    snapshot = host_memory(tmp_path, machine())
    assert not snapshot.known
    assert snapshot.available_bytes == 0


def test_system_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    def fails() -> NoReturn:
        raise OSError(13, "denied")

    assert not host_memory(tmp_path, fails).known


def test_this_machine_can_be_read() -> None:
    snapshot = host_memory()
    assert snapshot.known
    assert 0 < snapshot.available_bytes <= snapshot.total_bytes
