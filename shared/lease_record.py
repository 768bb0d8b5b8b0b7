"""The lease file as a value: its strict form, who may be presumed alive, what a client finds.

Owns reading and judging ``<data_root>/modeld.lease``, for the daemon, the client and the command
alike. It never writes: acquiring, renewing and releasing are the supervisor's.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec
import platformdirs

from modeld.shared.errors import NotOwner

LEASE_NAME = "modeld.lease"
_LINUX = sys.platform == "linux"
MAX_LEASE_BYTES = 64 * 1024
FORMAT = "modeld-lease-1"


class LeaseUnreadable(NotOwner):
    """The lease file is torn, or not ours: its owner can't be told, so nobody may take it."""


class LeaseHeld(NotOwner):
    """Another daemon owns the data root."""


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What the lease file says. Times are Unix seconds, but for ``renewed_boot_s``."""

    format: str
    instance_id: str
    pid: int
    pid_start: int  # as process_start() tells it; proves that a pid was not used again
    pid_namespace: str  # pids compare within one namespace only
    host: str
    boot_id: str
    endpoints: tuple[str, ...]  # empty while the daemon is starting
    backends: tuple[str, ...]
    protocol_version: int
    generation_floor: int  # no generation up to this one may be handed out again
    acquired: float
    renewed: float
    renewed_boot_s: float  # clock that neither suspends nor jumps; compares within one boot
    ttl_s: float

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


_decoder = msgspec.json.Decoder(LeaseRecord)


def lease_path(data_root: Path) -> Path:
    return data_root / LEASE_NAME


def default_data_root(env: Mapping[str, str] | None = None) -> Path:
    """MODELD_DATA_ROOT, else the platform's folder for this user's data."""
    chosen = (os.environ if env is None else env).get("MODELD_DATA_ROOT", "")
    return Path(chosen).expanduser().absolute() if chosen else _user_data_dir()


def _user_data_dir() -> Path:
    return Path(platformdirs.user_data_dir("modeld", appauthor=False))


def parse(data: bytes, path: Path) -> LeaseRecord:
    """Strictly decode a lease file's bytes; raises LeaseUnreadable."""
    try:
        record = _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise _unreadable(path, str(error)) from None
    if record.format != FORMAT:
        raise _unreadable(
            path, f"its format is {record.format[:40]!r}, this version reads {FORMAT!r}"
        )
    if not record.instance_id or record.pid <= 0 or not record.ttl_s > 0:
        raise _unreadable(path, "instance_id, pid and ttl_s must be set")
    return record


def read(path: Path) -> LeaseRecord | None:
    """The record at ``path`` from one read, or None if there is no file.

    Raises LeaseUnreadable for a torn, foreign or oversized file, and what isn't a plain file.
    """
    # O_NONBLOCK: a FIFO in the lease's place must not hang whoever looks.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            return None
        why = "it is a link" if error.errno == errno.ELOOP else (error.strerror or str(error))
        raise _unreadable(path, why) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _unreadable(path, "it is not a plain file")
        data = os.read(fd, MAX_LEASE_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_LEASE_BYTES:
        raise _unreadable(path, f"it is larger than {MAX_LEASE_BYTES} bytes")
    return parse(data, path)


def _unreadable(path: Path, why: str) -> LeaseUnreadable:
    return LeaseUnreadable(
        f"The lease file {path} can't be read: {why}. It is left as it is. If no modeld daemon "
        "runs on this data root, delete that file and start again.",
        metadata={"path": path, "why": why},
    )


# --- judging ---------------------------------------------------------------------------------


class Verdict(Enum):
    LIVE = "live"
    EXPIRED = "expired"  # not renewed in time; its owner has fenced itself by then
    DEAD_OWNER = "dead_owner"  # certain: the process or its boot is gone


@dataclass(frozen=True)
class Viewpoint:
    """Who judges: where and when. ``pid_start_of`` answers None for a process that is gone."""

    now_unix_s: float
    now_boot_s: float
    host: str
    boot_id: str
    pid_namespace: str
    pid_start_of: Callable[[int], int | None]


def judge(record: LeaseRecord, here: Viewpoint) -> Verdict:
    """Whether the record's owner may still be serving. Pure.

    On the owner's own host the answer is certain and needs no wall clock: a pid that is gone or
    was used again is dead at once, and age is taken on the boot clock. Elsewhere record time
    decides, so hosts that share a data root must keep their clocks together.
    """
    same_host = record.host == here.host and bool(record.boot_id) and bool(here.boot_id)
    if same_host and record.boot_id != here.boot_id:
        # Two machines of one name look the same as a reboot, so the boot id alone proves nothing
        # until the record is also old.
        return Verdict.DEAD_OWNER if _old(record, here) else Verdict.LIVE
    if same_host and record.pid_namespace == here.pid_namespace:
        if here.pid_start_of(record.pid) != record.pid_start:
            return Verdict.DEAD_OWNER
        age_s = here.now_boot_s - record.renewed_boot_s
        return Verdict.EXPIRED if age_s > record.ttl_s else Verdict.LIVE
    return Verdict.EXPIRED if _old(record, here) else Verdict.LIVE


def _old(record: LeaseRecord, here: Viewpoint) -> bool:
    return here.now_unix_s - record.renewed > record.ttl_s


def expires_in_s(record: LeaseRecord, here: Viewpoint) -> float:
    """Seconds until the record is seen as expired; 0 if it is."""
    same_boot = bool(here.boot_id) and record.boot_id == here.boot_id
    if same_boot and record.pid_namespace == here.pid_namespace:
        return max(0.0, record.renewed_boot_s + record.ttl_s - here.now_boot_s)
    return max(0.0, record.renewed + record.ttl_s - here.now_unix_s)


def boot_clock_s() -> float:
    """Seconds on a clock that runs on during a suspend and never jumps."""
    if _LINUX:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def boot_id() -> str:
    """This boot's id, or "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def process_start(pid: int) -> int | None:
    """When a process was started, in a unit of this system; None if it is gone or a zombie."""
    if _LINUX:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
        return None if fields[0] in "ZX" else int(fields[19])
    import psutil

    try:
        return int(psutil.Process(pid).create_time() * 1000)
    except psutil.NoSuchProcess:
        return None


def viewpoint() -> Viewpoint:
    """Here and now."""
    return Viewpoint(
        now_unix_s=time.time(),
        now_boot_s=boot_clock_s(),
        host=socket.gethostname(),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid_start_of=process_start,
    )


# --- discovery -------------------------------------------------------------------------------


class DiscoveryState(Enum):
    NOT_INSTALLED = "NOT_INSTALLED"
    NOT_RUNNING = "NOT_RUNNING"
    STALE = "STALE"
    RUNNING = "RUNNING"


@dataclass(frozen=True)
class Discovery:
    """What a client found. ``detail`` says what to do; ``record`` is set where one was read."""

    state: DiscoveryState
    record: LeaseRecord | None
    detail: str


def discover(data_root: Path, installed: bool, here: Viewpoint | None = None) -> Discovery:
    """One of four states, from one atomic read of the lease file. Never raises.

    A daemon that holds the lease but has no endpoint yet is NOT_RUNNING, with its record: it is
    starting, and a caller may look again.
    """
    path = lease_path(data_root)
    try:
        record = read(path)
    except LeaseUnreadable as error:
        return Discovery(DiscoveryState.STALE, None, error.message)
    if record is None:
        return _absent(data_root, installed)
    verdict = judge(record, here or viewpoint())
    who = f"pid {record.pid} on {record.host}"
    if verdict is not Verdict.LIVE:
        why = (
            "has ended"
            if verdict is Verdict.DEAD_OWNER
            else f"has not renewed in {record.ttl_s:g} s"
        )
        return Discovery(
            DiscoveryState.STALE,
            record,
            f"The daemon of {data_root} ({who}) {why} without releasing {path.name}. "
            "Start it again with `modeld serve`; it takes over by itself.",
        )
    if not record.endpoints:
        return Discovery(
            DiscoveryState.NOT_RUNNING,
            record,
            f"The daemon ({who}) is starting. Try again shortly.",
        )
    return Discovery(DiscoveryState.RUNNING, record, f"Running: {who}.")


def _absent(data_root: Path, installed: bool) -> Discovery:
    if not installed:
        return Discovery(
            DiscoveryState.NOT_INSTALLED, None, "modeld is not installed here. Install it first."
        )
    return Discovery(
        DiscoveryState.NOT_RUNNING,
        None,
        f"No daemon runs on {data_root}. Start it with `modeld serve`.",
    )
