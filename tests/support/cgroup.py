"""A real memory cgroup for tests: made, limited, read and removed; and daemons inside one.

Knows both versions' files. Where the machine allows no memory cgroup, the test is skipped with a
reason that says what is not proven. Run as a program, it joins a cgroup and becomes another
program: ``python -m tests.support.cgroup FOLDER ARGUMENT...`` for the interpreter's arguments.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.daemon import RunningDaemon

TOP = Path("/sys/fs/cgroup")
_NUMBER = itertools.count()


class MemoryCgroup:
    """A group that was made for a test. Sizes are bytes."""

    def __init__(self, path: Path, *, second: bool) -> None:
        self.path = path
        self._second = second  # of version 2

    @property
    def limit(self) -> int:
        text = self._text("memory.max" if self._second else "memory.limit_in_bytes")
        return 0 if text == "max" else int(text)

    @limit.setter
    def limit(self, size: int) -> None:
        """Raises OSError where more than that is in use and can't be dropped."""
        name = "memory.max" if self._second else "memory.limit_in_bytes"
        with (self.path / name).open("r+") as file:  # the kernel makes it, never a test
            file.write(str(size))

    @property
    def usage(self) -> int:
        return int(self._text("memory.current" if self._second else "memory.usage_in_bytes"))

    @property
    def used(self) -> int:
        """Of the usage, what is no file page that could be dropped."""
        stat = self.stat
        files = ("inactive_file", "active_file")
        return self.usage - sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in files)

    @property
    def stat(self) -> dict[str, int]:
        lines = self._text("memory.stat").splitlines()
        return {name: int(value) for name, _, value in (line.partition(" ") for line in lines)}

    @property
    def oom_kills(self) -> int:
        """How many of its processes the kernel ended for want of memory."""
        text = self._text("memory.events" if self._second else "memory.oom_control")
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])

    @property
    def times_full(self) -> int:
        """How often the limit was reached, so that the kernel had to drop something."""
        if not self._second:
            return int(self._text("memory.failcnt"))
        return int(dict(line.split() for line in self._text("memory.events").splitlines())["max"])

    def add(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    @contextmanager
    def inner(self) -> Iterator[MemoryCgroup]:
        """A group below this one, without a limit of its own."""
        made = MemoryCgroup(self.path / "inner", second=self._second)
        made.path.mkdir()
        try:
            yield made
        finally:
            made.path.rmdir()

    def _text(self, name: str) -> str:
        return (self.path / name).read_text().strip()


def _parents() -> Iterator[tuple[Path, bool]]:
    """Folders in which a memory cgroup may be made, and whether they are of version 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            own = TOP / "memory" / path.lstrip("/")
            yield (own if own.is_dir() else TOP / "memory"), False
        elif number == "0":
            own = TOP / path.lstrip("/")
            for folder in (own, *own.parents):
                if folder.is_relative_to(TOP):
                    yield folder, True


@contextmanager
def memory_cgroup(limit: int, unproven: str) -> Iterator[MemoryCgroup]:
    """A cgroup with a limit in bytes, removed afterwards: by then nothing may run in it.

    Skips the test where none can be made; ``unproven`` says what is then not proven.
    """
    refused = []
    for parent, second in _parents():
        group = MemoryCgroup(parent / f"modeld-test-{os.getpid()}-{next(_NUMBER)}", second=second)
        try:
            group.path.mkdir()
        except OSError as error:
            refused.append(f"{group.path}: {error.strerror}")
            continue
        try:
            group.limit = limit
        except OSError as error:
            refused.append(f"a limit in {group.path}: {error.strerror}")
            group.path.rmdir()
            continue
        try:
            yield group
        finally:
            group.path.rmdir()
        return
    pytest.skip(
        f"NOT PROVEN ON THIS MACHINE: {unproven}; for no memory cgroup can be made here "
        f"({'; '.join(refused) or 'there is none'})"
    )


def into(group: MemoryCgroup) -> list[str]:
    """The beginning of a command: an interpreter that is in the cgroup before it begins."""
    return [sys.executable, "-m", "tests.support.cgroup", str(group.path)]


class LimitedDaemon(RunningDaemon):
    """A daemon that was in a cgroup before it began, with all its workers."""

    def __init__(
        self, group: MemoryCgroup, data_root: Path, settings: Mapping[str, object]
    ) -> None:
        self.program = (*into(group)[1:], "-m", "modeld")
        super().__init__(data_root, settings)


@contextmanager
def limited_daemon(group: MemoryCgroup, **settings: object) -> Iterator[LimitedDaemon]:
    """A daemon of its own inside ``group``, ended before this returns."""
    data_root = Path(tempfile.mkdtemp(prefix="md-"))
    daemon = LimitedDaemon(group, data_root, settings)
    try:
        daemon.client().close()
        yield daemon
    finally:
        code = daemon.stop()
        log = daemon.log()
        shutil.rmtree(data_root, ignore_errors=True)
    assert code == 0, log
    assert "Traceback" not in log, log


if __name__ == "__main__":
    (Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
