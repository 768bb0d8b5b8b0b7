"""The host memory probe: what this process may still use, from the system and its cgroups.

Owns the reading only; budgets are the planner's. Every path hangs below ``sysroot``, so that
recorded readings can stand in for a machine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

import psutil

from modeld.shared.capacity import MemorySnapshot

log = logging.getLogger(__name__)

MIB = 1024 * 1024
UNKNOWN = MemorySnapshot(total_bytes=0, available_bytes=0, known=False)


class _Memory(Protocol):
    @property
    def total(self) -> int: ...
    @property
    def available(self) -> int: ...


@dataclass(frozen=True)
class CgroupReading:
    """The tightest level: its limit, and what is left below it, in bytes."""

    limit_bytes: int
    available_bytes: int


def host_memory(
    sysroot: Path = Path("/"), virtual_memory: Callable[[], _Memory] = psutil.virtual_memory
) -> MemorySnapshot:
    """A live reading; ``known`` is False where it couldn't be taken, never a guess."""
    try:
        system = virtual_memory()
        total, available = int(system.total), int(system.available)
        cgroup = cgroup_memory(sysroot, total)
    except (OSError, ValueError, RuntimeError, psutil.Error) as error:
        log.warning("host memory can't be read: %s", error)
        return UNKNOWN
    if total <= 0:
        return UNKNOWN
    if cgroup is None:
        return MemorySnapshot(total_bytes=total, available_bytes=max(0, available))
    return MemorySnapshot(
        total_bytes=total,
        available_bytes=max(0, min(available, cgroup.available_bytes)),
        limit_bytes=cgroup.limit_bytes,
    )


def cgroup_memory(sysroot: Path, total_bytes: int) -> CgroupReading | None:
    """The tightest limit over this process's cgroup and its ancestors; None if there is none.

    Page cache that the kernel can drop (file pages) counts as available. Raises OSError
    or ValueError when a limit stands whose usage can't be read.
    """
    tightest: CgroupReading | None = None
    for folder, read_level in _levels(sysroot):
        level = read_level(folder, total_bytes)
        if level is None:
            continue
        if tightest is None:
            tightest = level
        else:
            tightest = CgroupReading(
                min(tightest.limit_bytes, level.limit_bytes),
                min(tightest.available_bytes, level.available_bytes),
            )
    return tightest


_ReadLevel = Callable[[Path, int], CgroupReading | None]


def _levels(sysroot: Path) -> Iterator[tuple[Path, _ReadLevel]]:
    """Every cgroup folder that bounds this process's memory, from its own up to the mount."""
    mounts = _mounts(sysroot)
    for line in _lines(sysroot / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            kind, read_level = "cgroup2", _read_v2
        elif "memory" in controllers.split(","):
            kind, read_level = "cgroup", _read_v1
        else:
            continue
        if kind not in mounts:
            continue
        mount_root, mount_point = mounts[kind]
        top = sysroot / mount_point.lstrip("/")
        for folder in _ancestry(top, mount_root, path):
            yield folder, read_level


def _ancestry(top: Path, mount_root: str, path: str) -> Iterator[Path]:
    """Folders from the process's cgroup up to ``top``, the mount point.

    Inside a container the listed path may begin with what the mount hides (its root), or not
    exist below the mount at all; the mount point is then the process's own cgroup.
    """
    own = PurePosixPath(path)
    if mount_root != "/" and own.is_relative_to(mount_root):
        own = own.relative_to(mount_root)
    parts = [part for part in own.parts if part != "/"]
    folder = top.joinpath(*parts)
    if ".." in parts or not folder.is_dir():
        folder = top
    while folder != top:
        yield folder
        folder = folder.parent
    yield top


def _mounts(sysroot: Path) -> dict[str, tuple[str, str]]:
    """``cgroup2`` and the v1 memory hierarchy: (root inside the hierarchy, mount point)."""
    found: dict[str, tuple[str, str]] = {}
    for line in _lines(sysroot / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        kind, options = tail[0], tail[2].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options):
            found.setdefault(kind, (_unescape(fields[3]), _unescape(fields[4])))
    return found


def _unescape(text: str) -> str:
    """mountinfo writes blanks and backslashes as octal."""
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, plain)
    return text


def _read_v2(folder: Path, total_bytes: int) -> CgroupReading | None:
    # memory.high throttles and reclaims without end: living above it is no better than a limit.
    limits = [
        int(text)
        for name in ("memory.max", "memory.high")
        if (text := _text(folder / name)) not in ("", "max")
    ]
    limit = min(limits, default=0)
    if not limits or limit >= total_bytes:
        return None
    usage = int((folder / "memory.current").read_text())
    stat = _stat(folder)
    return _reading(limit, usage, stat.get("inactive_file", 0) + stat.get("active_file", 0))


def _read_v1(folder: Path, total_bytes: int) -> CgroupReading | None:
    text = _text(folder / "memory.limit_in_bytes")
    # "No limit" is a number near 2**63 here; anything at or above the machine's memory is none.
    if not text or int(text) >= total_bytes:
        return None
    usage = int((folder / "memory.usage_in_bytes").read_text())
    stat = _stat(folder)
    files = (stat.get(f"total_{n}", stat.get(n, 0)) for n in ("inactive_file", "active_file"))
    return _reading(int(text), usage, sum(files))


def _reading(limit: int, usage: int, reclaimable: int) -> CgroupReading:
    # File pages, a model's mapped weights among them, can be dropped and read again; the planner
    # charges weights itself, so they must not count as used here too.
    used = max(0, usage - reclaimable)
    return CgroupReading(limit_bytes=limit, available_bytes=max(0, limit - used))


def _stat(folder: Path) -> dict[str, int]:
    values: dict[str, int] = {}
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            values[name] = int(value)
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()
