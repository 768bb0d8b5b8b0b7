"""How many threads to compute with: what is free now, not what exists.

The choice is a pure function; the readers beside it ask the operating system. Knows no engine.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

SAMPLE_S = 0.1
# With a neighbour on one of two cores, one thread was faster than two by half or more. A core
# that is busy for less than this part of the time is taken as free.
_BUSY_CORE = 0.6


def choose_threads(affinity: int, quota_cpus: float | None, busy_cpus: float) -> int:
    """Threads for ``affinity`` usable processors of which others keep ``busy_cpus`` busy.

    ``quota_cpus`` is the cgroup's limit in processors, None if there is none. At least 1, at most
    the affinity and the whole processors of the quota.
    """
    taken = math.floor(max(busy_cpus, 0.0) + 1 - _BUSY_CORE)
    most = affinity if quota_cpus is None else min(affinity, math.floor(quota_cpus))
    return max(1, min(most, affinity - taken))


def usable_processors() -> frozenset[int]:
    """The processors this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _v2_quota(text: str) -> float | None:
    """From ``cpu.max``: "quota period", or "max period"."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) == 0:
        return None
    return int(parts[0]) / int(parts[1])


def _v1_quota(quota: str, period: str) -> float | None:
    quota, period = quota.strip(), period.strip()
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:  # -1: no limit
        return None
    return int(quota) / int(period)


def quota_cpus(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float | None:
    """The tightest processor limit on the way up from this process's cgroup, v1 or v2."""
    limits: list[float | None] = []
    for line in _read(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        base = root if not controllers else root / "cpu"
        if controllers and not base.exists():
            base = root / controllers
        folder = Path(path.lstrip("/"))
        # Inside a container the named path may not be mounted; its own limit is at the root.
        for level in (folder, *folder.parents):
            if controllers:
                limits.append(
                    _v1_quota(
                        _read(base / level / "cpu.cfs_quota_us"),
                        _read(base / level / "cpu.cfs_period_us"),
                    )
                )
            else:
                limits.append(_v2_quota(_read(base / level / "cpu.max")))
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True)
class BusyReading:
    """Processor seconds used up to now, by everyone on the given processors and by this process."""

    at_s: float
    everyone_s: float
    own_s: float


def read_busy(processors: Collection[int], stat: Path = Path("/proc/stat")) -> BusyReading:
    hertz = os.sysconf("SC_CLK_TCK")
    ticks = 0
    for line in _read(stat).splitlines():
        name, *fields = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in processors:
            user, nice, system, _idle, _wait, irq, soft, steal = [*map(int, fields), *[0] * 8][:8]
            ticks += user + nice + system + irq + soft + steal
    return BusyReading(time.monotonic(), ticks / hertz, time.process_time())


def busy_between(begin: BusyReading, end: BusyReading) -> float:
    """Processors that others kept busy, on average, from one reading to the other."""
    elapsed = end.at_s - begin.at_s
    if elapsed <= 0:
        return 0.0
    others = (end.everyone_s - begin.everyone_s) - (end.own_s - begin.own_s)
    return max(others, 0.0) / elapsed


def free_threads(begin: BusyReading, processors: Collection[int]) -> int:
    """The choice for now, from a reading begun at least about ``SAMPLE_S`` ago (waits if not)."""
    time.sleep(max(0.0, begin.at_s + SAMPLE_S - time.monotonic()))
    busy = busy_between(begin, read_busy(processors))
    return choose_threads(len(processors), quota_cpus(), busy)
