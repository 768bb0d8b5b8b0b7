"""Connecting the command to a daemon, starting one in the background where none runs."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from modeld.cli.exit_codes import Exit
from modeld.cli.main import Settings
from modeld.cli.output import note
from modeld.cli.progress import Meanwhile
from modeld.client import Client, ConnectionLost, DiscoveryError, NotInstalled, NotRunning, Stale
from modeld.client.discovery import look
from modeld.shared.errors import InvalidRequest, StorageFull
from modeld.shared.lease_record import DiscoveryState

START_TIMEOUT_S = 60.0
POLL_S = 0.05
LOG_LINES = 15


class DaemonDidNotStart(DiscoveryError):
    """The daemon that was started ended, or didn't come up in time."""

    state = "NOT_STARTED"


def serve_command(data_root: Path) -> list[str]:
    return [sys.executable, "-m", "modeld", "serve", "--data-root", str(data_root)]


def connect(settings: Settings) -> Client:
    """The running daemon's client. Raises NotInstalled, NotRunning, Stale or ConnectionLost."""
    try:
        return Client.connect(settings.data_root)
    except (NotRunning, Stale) as error:
        error.add_note("`modeld run` and `modeld chat` start one by themselves, unless --no-start.")
        raise


def connect_or_start(settings: Settings, *, may_start: bool) -> tuple[Client, bool]:
    """A client, and whether a daemon was started for it."""
    try:
        return connect(settings), False
    except NotInstalled:
        raise
    except (DiscoveryError, ConnectionLost):
        if not may_start:
            raise
    ours = start(settings.root, quiet=settings.json)
    return connect(settings), ours


@contextmanager
def data_root_errors(data_root: Path) -> Iterator[None]:
    """A folder that can't be made or opened, as InvalidRequest; a full disk, as StorageFull."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"No space left in {data_root}. Free some, or choose another data root.",
                metadata={"path": data_root},
            ) from None
        why = f"The system says: {error.strerror}."
        if isinstance(error, (FileExistsError, NotADirectoryError)):
            why = "It, or a part of its path, is not a folder."
        raise InvalidRequest.of(
            "data_root",
            str(data_root),
            "a folder that this user can write",
            f"{why} Choose another: --data-root, MODELD_DATA_ROOT.",
        ) from None


def log_path(data_root: Path) -> Path:
    return data_root / "logs" / "daemon.log"


def start(data_root: Path, *, quiet: bool) -> bool:
    """Start a daemon in a session of its own, and wait until one can be found.

    False where another one was quicker, and ours gave way to it.
    Raises InvalidRequest for a data root or a setting that can't be used, DaemonDidNotStart with
    the last lines of its log for everything else.
    """
    log = log_path(data_root)
    with data_root_errors(data_root):
        data_root.mkdir(mode=0o700, parents=True, exist_ok=True)
        log.parent.mkdir(mode=0o700, exist_ok=True)
        log.touch(mode=0o600)
        begin = log.stat().st_size
    with Meanwhile(quiet=quiet) as meanwhile:
        meanwhile.show("starting the daemon")
        with log.open("ab") as output:
            process = subprocess.Popen(
                serve_command(data_root),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=data_root,
                start_new_session=True,  # Ctrl-C here is not for the daemon
            )
        ours = _wait_until_found(data_root, process, log, begin) == process.pid
    if ours and not quiet:
        note(f"started a daemon on {data_root} (pid {process.pid}, log: {log})")
    return ours


def _wait_until_found(
    data_root: Path, process: subprocess.Popen[bytes], log: Path, begin: int
) -> int:
    """The pid of the daemon that was found."""
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        code = process.poll()  # before looking: what is seen then is from after its end
        found = look(data_root)
        if found.state is DiscoveryState.RUNNING and found.record is not None:
            return found.record.pid
        # Another daemon may have been quicker: ours has given way, and that one is starting.
        starting = found.state is DiscoveryState.NOT_RUNNING and found.record is not None
        if code is not None and not starting:
            refused = _refusal(log, begin)
            if code == Exit.USAGE and refused is not None:
                raise refused
            raise DaemonDidNotStart(
                f"The daemon ended with status {code} while it started. {found.detail} "
                f"The end of {log}:\n{_tail(log, begin)}"
            )
        time.sleep(POLL_S)
    raise DaemonDidNotStart(
        f"The daemon (pid {process.pid}) is not ready after {START_TIMEOUT_S:g} s. It is left "
        f"running; see `modeld status`. The end of {log}:\n{_tail(log, begin)}"
    )


def _refusal(log: Path, begin: int) -> InvalidRequest | None:
    """What the daemon that was started said of its settings, as its own error."""
    try:
        lines = _lines(log, begin)
    except OSError:
        return None
    mark = f"error: {InvalidRequest.default_reason}: "
    for line in reversed(lines):
        if line.startswith(mark):
            return InvalidRequest(f"The daemon can't start: {line.removeprefix(mark)}")
    return None


def _lines(log: Path, begin: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace").splitlines()


def _tail(log: Path, begin: int) -> str:
    """The last lines that were written after ``begin``."""
    try:
        lines = _lines(log, begin)
    except OSError as error:
        return f"  (can't be read: {error.strerror})"
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (empty)"
