"""One worker process on this machine: spawned, watched through a pidfd, taken down and reaped.

Knows processes, signals, log files and the record by which leftovers are found; nothing of
operations, sockets or restart policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

log = logging.getLogger(__name__)

LOG_MAX_BYTES = 4 * 1024 * 1024
ABORT_GRACE_S = 0.5  # time to write the stacks after SIGABRT
PARENT_FD_VARIABLE = "MODELD_WORKER_PARENT_FD"
_SWEEP_WAIT_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # Linux only


class Handle(Protocol):
    """The verbs of a process, wherever it runs."""

    pid: int

    @property
    def exit(self) -> asyncio.Future[int]:
        """Resolves, once reaped, to the exit code; negative is the signal's number."""

    def signal(self, signum: int) -> None:
        """Deliver a signal; nothing happens if it has ended."""

    def kill(self) -> None: ...

    def stderr_tail(self) -> str:
        """The end of what it wrote to stderr in this life."""

    def trim_log(self) -> None:
        """Keep its log bounded; called now and then."""


async def take_down(
    handle: Handle,
    *,
    grace_s: float,
    ask: Callable[[], None] | None = None,
    abort_s: float = ABORT_GRACE_S,
) -> int:
    """The kill ladder: ask (or SIGTERM), then SIGABRT for the stacks, then SIGKILL; reaps always.

    ``grace_s`` 0 skips the asking, ``abort_s`` 0 the SIGABRT. Returns the exit code.
    """
    if grace_s > 0:
        if ask is not None:
            ask()
        else:
            handle.signal(signal.SIGTERM)
        await asyncio.wait({handle.exit}, timeout=grace_s)
    if abort_s > 0 and not handle.exit.done():
        handle.signal(signal.SIGABRT)
        handle.signal(signal.SIGCONT)  # a stopped process takes no other signal but SIGKILL
        await asyncio.wait({handle.exit}, timeout=abort_s)
    while not handle.exit.done():
        handle.kill()
        await asyncio.wait({handle.exit}, timeout=10.0)
        if not handle.exit.done():
            log.warning("worker %d was killed but doesn't end (stuck in a driver?)", handle.pid)
    return handle.exit.result()


def own_log(path: Path) -> BoundedLog | None:
    """The file there, where it is this process's own stderr and appended to; else None."""
    try:
        if not os.path.samestat(os.fstat(2), path.stat()):
            return None
        appended = fcntl.fcntl(2, fcntl.F_GETFL) & os.O_APPEND
    except OSError:
        return None
    return BoundedLog(path) if appended else None


class BoundedLog:
    """An append-only file of bounded size that a process has as its stderr, and writes directly."""

    def __init__(self, path: Path, max_bytes: int = LOG_MAX_BYTES) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self.max_bytes = max_bytes
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._begin = os.fstat(self.fd).st_size

    def tail(self, max_bytes: int = 16 * 1024) -> str:
        if self.fd < 0:
            return ""
        size = os.fstat(self.fd).st_size
        begin = max(min(self._begin, size), size - max_bytes)
        return os.pread(self.fd, size - begin, begin).decode("utf-8", "replace")

    def trim(self) -> None:
        """Move the newer half aside to ``<name>.1`` and start over.

        The writer appends by O_APPEND, so truncating under it is safe; what it writes between the
        two steps is lost, which a log can bear.
        """
        if self.fd < 0:
            return
        size = os.fstat(self.fd).st_size
        if size <= self.max_bytes:
            return
        kept = os.pread(self.fd, self.max_bytes // 2, size - self.max_bytes // 2)
        old = self.path.with_name(self.path.name + ".1")
        old.touch(mode=0o600)
        old.write_bytes(kept)
        os.ftruncate(self.fd, 0)
        self._begin = 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Process:
    """A spawned child. Must be made on the loop's thread, which should be the main thread.

    The parent-death signal is tied to the spawning thread: a child spawned from a helper thread
    would be killed when that thread ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        worker_log: BoundedLog,
        record_dir: Path | None = None,
    ) -> None:
        """Raises OSError if the program can't be started (the log is closed then)."""
        if threading.current_thread() is not threading.main_thread():
            log.warning("spawning a worker off the main thread: its life is tied to this thread")
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._log = worker_log
        self._record: Path | None = None
        self._last_words: str | None = None
        read_end, write_end = os.pipe()
        try:
            self._popen = subprocess.Popen(
                list(command),
                env={**env, PARENT_FD_VARIABLE: str(read_end)},
                stdin=subprocess.DEVNULL,
                stdout=worker_log.fd,
                stderr=worker_log.fd,
                pass_fds=(read_end,),
                close_fds=True,
                # A session of its own: Ctrl-C and a closing terminal reach the supervisor alone,
                # which then decides how its workers end.
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            worker_log.close()
            raise
        finally:
            os.close(read_end)
        self._parent_pipe = write_end
        self.pid = self._popen.pid
        self._pidfd = _pidfd_open(self.pid)
        if self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._on_exit)
        else:
            threading.Thread(
                target=self._wait_in_thread, name=f"modeld-wait-{self.pid}", daemon=True
            ).start()
        if record_dir is not None:
            self._record = _write_record(record_dir, self.pid)

    @property
    def exit(self) -> asyncio.Future[int]:
        return self._exit

    def signal(self, signum: int) -> None:
        if self._exit.done():
            return
        with contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signum)
            else:
                self._popen.send_signal(signum)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    async def stop(self, grace_s: float) -> int:
        """SIGTERM, then the rest of the ladder; returns the exit code."""
        return await take_down(self, grace_s=grace_s)

    def stderr_tail(self) -> str:
        return self._log.tail() if self._last_words is None else self._last_words

    def trim_log(self) -> None:
        self._log.trim()

    def _on_exit(self) -> None:
        code = self._popen.poll()
        if code is None:  # readable before it can be reaped: the next round has it
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._finish(code)

    def _wait_in_thread(self) -> None:
        code = self._popen.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finish, code)

    def _finish(self, code: int) -> None:
        os.close(self._parent_pipe)
        self._last_words = self._log.tail()
        self._log.close()
        if self._record is not None:
            self._record.unlink(missing_ok=True)
        if not self._exit.done():
            self._exit.set_result(code)


def _pidfd_open(pid: int) -> int:
    """-1 where the system has none."""
    if sys.platform != "linux":
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


# --- leftovers of a supervisor that died -----------------------------------------------------


def started_at(pid: int) -> str | None:
    """What tells this process from a later one of the same pid; None if there is none."""
    try:
        if _BOOT_ID.exists():
            stat = Path(f"/proc/{pid}/stat").read_text()
            boot = _BOOT_ID.read_text().strip()
            # After the command's closing parenthesis: state is field 3, the start time field 22.
            return f"{boot}:{stat.rpartition(')')[2].split()[19]}"
        return repr(psutil.Process(pid).create_time())
    except (OSError, psutil.Error, IndexError):
        return None


def _write_record(record_dir: Path, pid: int) -> Path:
    record_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = record_dir / f"{pid}.json"
    draft = record_dir / f".{pid}.tmp"
    draft.write_text(json.dumps({"pid": pid, "started": started_at(pid)}))
    draft.replace(path)
    return path


def record_dir_of(data_root: Path) -> Path:
    return data_root / "workers"


def sweep_leftovers(data_root: Path) -> list[int]:
    """Kill workers that outlived an earlier supervisor of this data root; blocks up to 5 s.

    Call it only while holding the data root's lease. Returns the pids killed. A worker normally
    ends with its supervisor; this is for where neither the signal nor the pipe reached it.
    """
    folder = record_dir_of(data_root)
    killed: list[psutil.Process] = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            record = json.loads(path.read_text())
            pid, started = int(record["pid"]), str(record["started"])
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)  # torn: it was written by a supervisor that died at it
            continue
        if started_at(pid) == started:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                process.kill()
                killed.append(process)
                log.warning("killed worker %d, left over by an earlier supervisor", pid)
        path.unlink(missing_ok=True)
    _wait_until_ended(killed)
    return [process.pid for process in killed]


def _wait_until_ended(killed: list[psutil.Process]) -> None:
    """A zombie has ended: who should reap it may be the earlier supervisor, stopped or hung."""
    give_up = time.monotonic() + _SWEEP_WAIT_S
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < give_up:
                time.sleep(0.01)
