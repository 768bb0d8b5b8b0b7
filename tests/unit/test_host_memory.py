"""The host probe, on recorded readings of both cgroup versions."""

from __future__ import annotations

import os
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
    ("path", "mount_root"), [("/docker/abc", "/docker/abc"), ("/docker/abc", "/"), ("/", "/")]
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


def test_v2_hidden_levels_above_a_namespace_are_found_by_the_own_process(tmp_path: Path) -> None:
    """A cgroup namespace whose mounts are its parent's: the root reads as `/../..`."""
    v2(tmp_path, "/", "/../..")
    level(tmp_path, "sys/fs/cgroup/a/b", str(4 * GIB), 3 * GIB)
    level(tmp_path, "sys/fs/cgroup/a/c", str(GIB), 0)
    record(
        tmp_path,
        {
            "sys/fs/cgroup/a/b/cgroup.procs": f"1\n{os.getpid()}",
            "sys/fs/cgroup/a/c/cgroup.procs": "2",
        },
    )
    snapshot = host_memory(tmp_path, machine())
    assert (snapshot.limit_bytes, snapshot.available_bytes) == (4 * GIB, GIB)


@pytest.mark.parametrize(("path", "mount_root"), [("/../x", "/"), ("/", "/../..")])
def test_cgroup_that_cannot_be_found_is_unknown(tmp_path: Path, path: str, mount_root: str) -> None:
    v2(tmp_path, path, mount_root)
    level(tmp_path, "sys/fs/cgroup", "max", 0)
    assert not host_memory(tmp_path, machine()).known


def test_later_mount_at_the_same_place_hides_the_earlier_one(tmp_path: Path) -> None:
    v2(tmp_path, "/docker/abc", "/")
    with (tmp_path / "proc/self/mountinfo").open("a") as file:
        file.write("40 22 0:28 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    level(tmp_path, "sys/fs/cgroup", str(2 * GIB), GIB)
    level(tmp_path, "sys/fs/cgroup/docker/abc", str(GIB), GIB)  # another's, of the same name
    assert host_memory(tmp_path, machine()).limit_bytes == 2 * GIB


def test_mount_that_shows_most_ancestors_is_read(tmp_path: Path) -> None:
    v2(tmp_path, "/pod/app", "/pod/app")
    with (tmp_path / "proc/self/mountinfo").open("a") as file:
        file.write("40 22 0:28 / /host/cgroup rw - cgroup2 cgroup2 rw\n")
    level(tmp_path, "sys/fs/cgroup", str(4 * GIB), GIB)
    level(tmp_path, "host/cgroup/pod/app", str(4 * GIB), GIB)
    level(tmp_path, "host/cgroup/pod", str(2 * GIB), GIB)
    assert host_memory(tmp_path, machine()).limit_bytes == 2 * GIB


def test_limit_at_or_above_the_machine_is_none(tmp_path: Path) -> None:
    v2(tmp_path, "/a")
    level(tmp_path, "sys/fs/cgroup/a", str(16 * GIB), 15 * GIB)
    snapshot = host_memory(tmp_path, machine())
    assert (snapshot.limit_bytes, snapshot.available_bytes) == (0, 12 * GIB)


def test_shared_memory_and_locked_pages_are_used_not_droppable(tmp_path: Path) -> None:
    """A tmpfs file is in `file` and `shmem` and needs swap to go; a locked page can't go."""
    v2(tmp_path, "/a")
    level(tmp_path, "sys/fs/cgroup/a", str(4 * GIB), 3 * GIB)
    record(
        tmp_path,
        {
            "sys/fs/cgroup/a/memory.stat": (
                f"anon {GIB}\nfile {2 * GIB}\nshmem {GIB}\nfile_mapped {GIB}\n"
                f"inactive_anon {2 * GIB}\nactive_anon 0\ninactive_file {256 * MIB}\n"
                f"active_file {256 * MIB}\nunevictable {512 * MIB}"
            )
        },
    )
    assert host_memory(tmp_path, machine()).available_bytes == GIB + 512 * MIB


def test_v1_hybrid_reads_the_hierarchy_that_has_the_memory_controller(tmp_path: Path) -> None:
    v1(tmp_path, str(3 * GIB), 2 * GIB, GIB)
    record(tmp_path, {"proc/self/cgroup": "4:memory:/jobs/1\n0::/../x"})
    level(tmp_path, "sys/fs/cgroup/unified", str(GIB), GIB)  # no such files there in truth
    snapshot = host_memory(tmp_path, machine())
    assert (snapshot.limit_bytes, snapshot.available_bytes) == (3 * GIB, 2 * GIB)


def test_v1_limit_of_levels_that_the_mount_hides_is_told_by_the_hierarchy(tmp_path: Path) -> None:
    v1(tmp_path, NO_LIMIT_V1, GIB, GIB // 2)
    stat = tmp_path / "sys/fs/cgroup/memory/jobs/1/memory.stat"
    stat.write_text(stat.read_text() + f"hierarchical_memory_limit {2 * GIB}\n")
    snapshot = host_memory(tmp_path, machine())
    assert (snapshot.limit_bytes, snapshot.available_bytes) == (2 * GIB, GIB + GIB // 2)


@pytest.mark.parametrize(("hierarchy", "limit"), [("1", GIB), ("0", 3 * GIB)])
def test_v1_ancestor_bounds_its_children_only_with_hierarchy(
    tmp_path: Path, hierarchy: str, limit: int
) -> None:
    v1(tmp_path, str(3 * GIB), 0, 0)
    record(
        tmp_path,
        {
            "sys/fs/cgroup/memory/jobs/memory.use_hierarchy": hierarchy,
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": "0",
            "sys/fs/cgroup/memory/jobs/memory.stat": "total_inactive_file 0",
        },
    )
    assert host_memory(tmp_path, machine()).limit_bytes == limit


def test_v1_limit_on_memory_and_swap_together_counts_what_was_swapped_out(tmp_path: Path) -> None:
    v1(tmp_path, str(2 * GIB), GIB, 0)
    record(
        tmp_path,
        {
            "sys/fs/cgroup/memory/jobs/1/memory.memsw.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/jobs/1/memory.memsw.usage_in_bytes": str(GIB + 512 * MIB),
        },
    )
    assert host_memory(tmp_path, machine()).available_bytes == 512 * MIB


@pytest.mark.parametrize("broken", ["memory.max", "memory.current", "memory.stat"])
def test_unreadable_cgroup_file_makes_the_reading_unknown_never_zero(
    tmp_path: Path, broken: str
) -> None:
    v2(tmp_path, "/a")
    level(tmp_path, "sys/fs/cgroup/a", str(4 * GIB), GIB)
    path = tmp_path / "sys/fs/cgroup/a" / broken
    path.unlink()
    path.mkdir()  # reading it fails for every user, root too
    assert not host_memory(tmp_path, machine()).known


def test_swap_is_seen_and_never_spent(tmp_path: Path) -> None:
    snapshot = host_memory(
        tmp_path, machine(), lambda: SimpleNamespace(total=8 * GIB, free=6 * GIB)
    )
    assert (snapshot.swap_total_bytes, snapshot.swap_free_bytes) == (8 * GIB, 6 * GIB)
    assert (snapshot.total_bytes, snapshot.available_bytes) == (16 * GIB, 12 * GIB)


def test_system_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    def fails() -> NoReturn:
        raise OSError(13, "denied")

    assert not host_memory(tmp_path, fails).known


def test_this_machine_can_be_read() -> None:
    snapshot = host_memory()
    assert snapshot.known
    assert 0 < snapshot.available_bytes <= snapshot.total_bytes
