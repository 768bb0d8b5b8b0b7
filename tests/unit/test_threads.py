"""The thread count follows what is free: affinity, cgroup quota and what others keep busy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.workers.threads import (
    BusyReading,
    busy_between,
    choose_threads,
    quota_cpus,
    read_busy,
    usable_processors,
)


@pytest.mark.parametrize(
    ("affinity", "quota", "busy", "chosen"),
    [
        (2, None, 0.0, 2),  # idle
        (2, None, 0.4, 2),  # light background load
        (2, None, 1.0, 1),  # a busy neighbour
        (2, None, 2.0, 1),
        (8, 2.5, 0.1, 2),  # a quota counts in whole processors
        (8, 0.5, 0.0, 1),
        (64, 4.0, 30.0, 4),  # neighbours outside the quota leave enough
        (8, None, 3.0, 5),
        (1, None, 9.0, 1),
    ],
)
def test_threads_are_what_is_free(
    affinity: int, quota: float | None, busy: float, chosen: int
) -> None:
    assert choose_threads(affinity, quota, busy) == chosen


@given(
    affinity=st.integers(1, 256),
    quota=st.none() | st.floats(0.01, 512),
    busy=st.floats(0, 512),
)
def test_threads_are_at_least_one_and_at_most_what_is_allowed(
    affinity: int, quota: float | None, busy: float
) -> None:
    chosen = choose_threads(affinity, quota, busy)
    assert 1 <= chosen <= affinity
    assert quota is None or chosen <= max(1, int(quota))
    assert choose_threads(affinity, quota, busy + 1) <= chosen


def test_own_work_is_not_taken_for_load() -> None:
    begin = BusyReading(at_s=0.0, everyone_s=10.0, own_s=1.0)
    end = BusyReading(at_s=0.1, everyone_s=10.15, own_s=1.1)
    assert busy_between(begin, end) == pytest.approx(0.5)


def test_the_tightest_v2_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    inner = tmp_path / "cgroup" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    assert quota_cpus(tmp_path / "cgroup", own) == 1.5


def test_a_v1_limit_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "cgroup" / "cpu" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("300000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    (folder.parent / "cpu.cfs_quota_us").write_text("-1\n")
    (folder.parent / "cpu.cfs_period_us").write_text("100000\n")
    own = tmp_path / "own"
    own.write_text("5:memory:/job\n4:cpu,cpuacct:/job\n")
    assert quota_cpus(tmp_path / "cgroup", own) == 3.0


def test_no_cgroup_means_no_limit(tmp_path: Path) -> None:
    assert quota_cpus(tmp_path / "none", tmp_path / "missing") is None


def test_only_usable_processors_are_counted(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 9 9 9\ncpu0 100 0 0 500 0 0 0 0\ncpu1 900 0 0 0 0 0 0 0\nintr 1\n")
    one = read_busy({0}, stat).everyone_s
    assert read_busy({0, 1}, stat).everyone_s == pytest.approx(10 * one)
    assert usable_processors()
