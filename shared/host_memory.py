"""The host memory probe: what this process may still use, from the system and its cgroups.

Owns the reading only; budgets are the planner's. Every path hangs below ``sysroot``, so that
recorded readings can stand in for a machine.
"""

from __future__ import annotations

import logging
import os
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


class _Swap(Protocol):
    @property
    def total(self) -> int: ...
    @property
    def free(self) -> int: ...


@dataclass(frozen=True)
class CgroupReading:
    """The tightest level: its limit, and what is left below it, in bytes."""

    limit_bytes: int
    available_bytes: int


def host_memory(
    sysroot: Path = Path("/"),
    virtual_memory: Callable[[], _Memory] = psutil.virtual_memory,
    swap_memory: Callable[[], _Swap] = psutil.swap_memory,
) -> MemorySnapshot:
    """A live reading; ``known`` is False where it couldn't be taken, never a guess.

    Swap is read to be seen: nothing here adds it to what is available.
    """
    try:
        system, swap = virtual_memory(), swap_memory()
        total, available = int(system.total), int(system.available)
        swap_total, swap_free = int(swap.total), int(swap.free)
        cgroup = cgroup_memory(sysroot, total)
    except (OSError, ValueError, RuntimeError, psutil.Error) as error:
        log.warning("host memory can't be read: %s", error)
        return UNKNOWN
    if total <= 0:
        return UNKNOWN
    if cgroup is not None:
        available = min(available, cgroup.available_bytes)
    return MemorySnapshot(
        total_bytes=total,
        available_bytes=max(0, available),
        limit_bytes=cgroup.limit_bytes if cgroup is not None else 0,
        swap_total_bytes=max(0, swap_total),
        swap_free_bytes=max(0, swap_free),
    )


def cgroup_memory(sysroot: Path, total_bytes: int) -> CgroupReading | None:
    """The tightest limit over this process's cgroup and its ancestors; None if there is none.

    Page cache that the kernel can drop counts as available. Raises OSError or ValueError when a
    limit stands whose usage can't be read, or when the process's own cgroup can't be found.
    """
    levels = list(_levels(sysroot, total_bytes))
    if not levels:
        return None
    return CgroupReading(
        min(level.limit_bytes for level in levels),
        min(level.available_bytes for level in levels),
    )


def _levels(sysroot: Path, total_bytes: int) -> Iterator[CgroupReading]:
    """Every limit on this process's memory, from its own cgroup up to the mount."""
    mounts = _mounts(sysroot)
    paths: dict[str, str] = {}
    for line in _lines(sysroot / "proc/self/cgroup"):
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    # A controller is in one hierarchy only: beside v1's memory, the v2 tree bounds other things.
    kind = "cgroup" if "cgroup" in paths else "cgroup2"
    if kind in paths and mounts[kind]:
        read_levels = _read_v1 if kind == "cgroup" else _read_v2
        yield from read_levels(_ancestry(sysroot, mounts[kind], paths[kind]), total_bytes)


# --- where the process's cgroup is ------------------------------------------------------------

_Mount = tuple[str, str]  # root inside the hierarchy, mount point


def _ancestry(sysroot: Path, mounts: list[_Mount], path: str) -> list[Path]:
    """Folders from the process's cgroup up to the mount point. Raises ValueError: not there.

    A mount may show less than the whole hierarchy (a container's own cgroup and what is below
    it) or, in a cgroup namespace that kept its parent's mounts, more than the namespace does.
    """
    own = PurePosixPath(path)
    if ".." in own.parts:
        raise ValueError(f"this process's cgroup, {path}, is outside its cgroup namespace")
    top, parts = _mount_of(sysroot, mounts, own)
    folder = top.joinpath(*parts)
    if ".." in parts:
        folder = _below_hidden_names(top, parts)
    elif not folder.is_dir():
        folder = top  # the listed path is another namespace's: what is mounted is our own
    found = [folder]
    while found[-1] != top:
        found.append(found[-1].parent)
    return found


def _mount_of(
    sysroot: Path, mounts: list[_Mount], own: PurePosixPath
) -> tuple[Path, tuple[str, ...]]:
    """The mount that shows ``own`` with most of its ancestors, and the path below it."""
    candidates = []
    for root, point in mounts:
        top = sysroot / point.lstrip("/")
        above = PurePosixPath(root)
        if ".." in above.parts:
            candidates.append((top, (*above.parts[1:], *own.parts[1:])))
        elif own.is_relative_to(above):
            candidates.append((top, own.relative_to(above).parts))
    shown = [(t, p) for t, p in candidates if ".." in p or t.joinpath(*p).is_dir()]
    if shown:
        return max(shown, key=lambda one: len(one[1]))
    return sysroot / mounts[0][1].lstrip("/"), own.parts[1:]


def _below_hidden_names(top: Path, parts: tuple[str, ...]) -> Path:
    """The process's folder, where the mount begins some levels above the namespace's root.

    The names of those levels are hidden from this process; its own listing among the members of
    a cgroup is not.
    """
    hidden = parts.count("..")
    pid = str(os.getpid())
    for above in top.glob("/".join("*" * hidden)):
        folder = above.joinpath(*parts[hidden:])
        if folder.is_dir() and pid in _lines(folder / "cgroup.procs"):
            return folder
    raise ValueError(f"this process's cgroup isn't found {hidden} levels below {top}")


def _mounts(sysroot: Path) -> dict[str, list[_Mount]]:
    """Mounts of ``cgroup2`` and of the v1 memory hierarchy (``cgroup``)."""
    found: dict[str, tuple[str, str]] = {}  # by mount point: a later mount hides an earlier one
    for line in _lines(sysroot / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        kind = tail[0]
        if kind == "cgroup" and "memory" not in tail[2].split(","):
            kind = ""
        found.pop(_unescape(fields[4]), None)
        found[_unescape(fields[4])] = (kind, _unescape(fields[3]))
    return {
        wanted: [(root, point) for point, (kind, root) in found.items() if kind == wanted]
        for wanted in ("cgroup2", "cgroup")
    }


def _unescape(text: str) -> str:
    """mountinfo writes blanks and backslashes as octal."""
    for code, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, plain)
    return text


# --- what the levels say ------------------------------------------------------------------------


def _read_v2(folders: list[Path], total_bytes: int) -> Iterator[CgroupReading]:
    for folder in folders:
        # memory.high throttles and reclaims without end: living above it is no better than a
        # limit. The root cgroup has neither file, nor has one without the memory controller.
        limits = [
            int(text)
            for name in ("memory.max", "memory.high")
            if (text := _text(folder / name)) not in ("", "max")
        ]
        limit = min(limits, default=total_bytes)
        if limit < total_bytes:
            usage = int((folder / "memory.current").read_text())
            yield _reading(limit, usage, _droppable(_stat(folder)))


def _read_v1(folders: list[Path], total_bytes: int) -> Iterator[CgroupReading]:
    for level, folder in enumerate(folders):
        if level and _text(folder / "memory.use_hierarchy") == "0":
            return  # what is below isn't charged here, nor further up
        stat = _stat(folder) if (folder / "memory.stat").exists() else {}
        files = _droppable(stat)
        for kind in ("memory", "memory.memsw"):  # the second: memory and swap together
            text = _text(folder / f"{kind}.limit_in_bytes")
            limit = int(text) if text else total_bytes
            if kind == "memory":
                # The least limit up to the hierarchy's root: of levels that the mount hides, too.
                # What others use below those isn't told; this level's own use is.
                limit = min(limit, stat.get("hierarchical_memory_limit", limit))
            # "No limit" is a number near 2**63 here.
            if limit < total_bytes:
                usage = int((folder / f"{kind}.usage_in_bytes").read_text())
                yield _reading(limit, usage, files)


def _droppable(stat: dict[str, int]) -> int:
    """Bytes of file pages that can be dropped, with those of the cgroups below.

    The file lists hold neither shared memory and tmpfs (those need swap, and are listed as
    anonymous) nor locked pages (listed as unevictable); ``cache`` and ``file`` hold them all.
    """
    # v1 tells the hierarchy's sums beside the level's own; v2's are the hierarchy's.
    return sum(stat.get(f"total_{n}", stat.get(n, 0)) for n in ("inactive_file", "active_file"))


def _reading(limit: int, usage: int, droppable: int) -> CgroupReading:
    # File pages, a model's mapped weights among them, can be dropped and read again; the planner
    # charges weights itself, so they must not count as used here too.
    used = max(0, usage - droppable)
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


def anonymous_bytes(pid: int, sysroot: Path = Path("/")) -> int | None:
    """Memory of a process's own, mapped files left out; None where it can't be read."""
    try:
        lines = _lines(sysroot / f"proc/{pid}/status")
    except OSError:  # it ended meanwhile, or is another user's
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "RssAnon" and value.split()[:1] and value.split()[0].isdigit():
            return int(value.split()[0]) * 1024
    return None
