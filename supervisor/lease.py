"""The data root's lease: acquire, renew, fence oneself, release.

Owns every write of ``<data_root>/modeld.lease``. Judging a record is ``shared.lease_record``'s;
what stops when the lease is lost is the daemon's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from modeld.shared.errors import InvalidRequest, ModeldError, NotOwner
from modeld.shared.lease_record import (
    FORMAT,
    LeaseHeld,
    LeaseRecord,
    LeaseUnreadable,
    Verdict,
    Viewpoint,
    boot_clock_s,
    expires_in_s,
    judge,
    lease_path,
    read,
    viewpoint,
)
from modeld.shared.messages import PROTOCOL_VERSION
from modeld.supervisor.durable import (
    create_exclusive,
    ensure_data_root,
    storage_errors,
    sweep_temps,
    write_atomic,
)

log = logging.getLogger(__name__)

Look = Callable[[], Viewpoint]
Clock = Callable[[], float]

RETRY_S = 1.0  # between renewals that fail
LOCK_WAIT_S = 5.0


class Lease:
    """A lease that this process holds, until ``check`` says otherwise.

    Thread-safe: ``renew`` may run in a thread while ``check`` runs on the loop.
    """

    def __init__(
        self,
        root: Path,
        record: LeaseRecord,
        took_over: LeaseRecord | None,
        look: Look,
        clock: Clock,
    ) -> None:
        self._path = lease_path(root)
        self._record = record
        self._look = look
        self._clock = clock
        self._mutex = threading.RLock()
        self._lost: str = ""
        self.took_over = took_over  # the dead or expired record that this one replaced
        self.fence_s = record.ttl_s * 2 / 3

    @classmethod
    def acquire(
        cls,
        root: Path,
        *,
        instance_id: str,
        ttl_s: float,
        endpoints: Sequence[str] = (),
        backends: Sequence[str] = (),
        generation_floor: int = 0,
        look: Look = viewpoint,
        clock: Clock = boot_clock_s,
    ) -> Lease:
        """Become the owner of ``root``, or raise.

        Raises LeaseHeld (a live owner: who, and what to do), LeaseUnreadable (a torn or foreign
        file, which is left alone), InvalidRequest (the root can't be used) or StorageFull.
        The new record never has a lower generation floor than the one it replaces.
        """
        ensure_data_root(root)
        path = lease_path(root)
        with _changing(path):
            sweep_temps(path)
            found = read(path)
            here = look()
            if found is not None and judge(found, here) is Verdict.LIVE:
                raise held(found, here, path)
            floor = max(generation_floor, found.generation_floor if found else 0)
            record = _record(here, instance_id, ttl_s, endpoints, backends, floor)
            if found is None:
                try:
                    create_exclusive(path, record.encode())
                except FileExistsError:
                    raise held(read(path), here, path) from None
            else:
                log.warning(
                    "taking over the lease of instance %s (pid %d on %s): %s",
                    found.instance_id, found.pid, found.host, judge(found, here).value,
                )  # fmt: skip
                write_atomic(path, record.encode())
            # Read back: where the lock doesn't reach (some network filesystems), the last
            # replacement stands and everybody else sees here that it isn't theirs.
            seen = read(path)
            if seen is None or seen.instance_id != instance_id:
                raise held(seen, here, path)
        return cls(root, record, found, look, clock)

    @property
    def record(self) -> LeaseRecord:
        return self._record

    @property
    def lost(self) -> str:
        """Why ownership is gone for good, or ""."""
        return self._lost

    def still_owner(self) -> bool:
        """Whether replies may leave now; re-reads the file if the last renewal is too old."""
        try:
            self.check()
        except NotOwner:
            return False
        return True

    def check(self) -> None:
        """Raise NotOwner unless this process surely owns the root. Call before a reply leaves.

        Costs one clock reading, unless the last renewal is older than ``fence_s``, which is two
        thirds of the TTL: then (a suspend, a stop, a full disk) it renews first, or refuses.
        """
        if self._lost:
            raise self._not_owner(self._lost)
        if self._age_s() <= self.fence_s:
            return
        try:
            self.renew()
        except NotOwner:
            raise
        except (OSError, ModeldError) as error:
            raise self._not_owner(
                f"the lease was last renewed {self._age_s():.1f} s ago and can't be renewed now "
                f"({error}); nothing is served until it can"
            ) from None

    def renew(self, *, generation_floor: int | None = None) -> None:
        """Renew now; ``generation_floor`` raises the record's.

        Raises NotOwner when the file is another's, gone or unreadable, which is final; and
        StorageFull or OSError when it can't be written, which may pass.
        """
        self._rewrite(generation_floor=generation_floor)

    def publish(self, endpoints: Sequence[str]) -> None:
        """Say where the daemon listens: clients see it as running from here on."""
        self._rewrite(endpoints=tuple(endpoints))

    def _rewrite(
        self, *, generation_floor: int | None = None, endpoints: tuple[str, ...] | None = None
    ) -> None:
        with self._mutex:
            if self._lost:
                raise self._not_owner(self._lost)
            with _changing(self._path):
                self._require_own_file()
                # Taken before the write: a stop during it must count against this renewal.
                here = self._look()
                old = self._record
                record = msgspec.structs.replace(
                    old,
                    renewed=here.now_unix_s,
                    renewed_boot_s=here.now_boot_s,
                    generation_floor=max(old.generation_floor, generation_floor or 0),
                    endpoints=old.endpoints if endpoints is None else endpoints,
                )
                write_atomic(self._path, record.encode())
                self._record = record

    def _require_own_file(self) -> None:
        try:
            found = read(self._path)
        except LeaseUnreadable as error:
            self._lost = error.message
        else:
            if found is None:
                self._lost = f"the lease file {self._path} was removed"
            elif found.instance_id != self._record.instance_id:
                self._lost = (
                    f"instance {found.instance_id} (pid {found.pid} on {found.host}) "
                    "took the data root over"
                )
        if self._lost:
            log.error("the lease is lost: %s", self._lost)
            raise self._not_owner(self._lost)

    def release(self) -> bool:
        """Remove the lease if it is still one's own; True if it was. Never raises for another's."""
        with self._mutex:
            if self._lost:
                return False
            try:
                with _changing(self._path):
                    self._require_own_file()
                    self._path.unlink()
            except (NotOwner, OSError) as error:
                log.warning("the lease was not released: %s", error)
                return False
            finally:
                self._lost = self._lost or "this daemon released the lease"
            return True

    async def keep(
        self,
        on_lost: Callable[[NotOwner], None],
        generation_floor: Callable[[], int] = lambda: 0,
    ) -> None:
        """Renew every third of the TTL until the lease is lost or the task is cancelled.

        ``on_lost`` is called once, on the loop, when ownership is gone for good. A full disk
        only delays: renewals are tried on, and ``check`` refuses meanwhile once time is up.
        """
        period_s = self._record.ttl_s / 3
        delay_s = period_s
        # A thread of its own: imports and other long work must not stand in a renewal's way.
        thread = ThreadPoolExecutor(1, "modeld-lease")
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(delay_s)
            try:
                renew = functools.partial(self.renew, generation_floor=generation_floor())
                await loop.run_in_executor(thread, renew)
            except NotOwner as error:
                if self._lost:
                    on_lost(error)
                    return
                log.error("the lease could not be renewed, trying on: %s", error)
                delay_s = min(RETRY_S, period_s)
            except (OSError, ModeldError) as error:
                log.error("the lease could not be renewed, trying on: %s", error)
                delay_s = min(RETRY_S, period_s)
            else:
                delay_s = period_s

    def _age_s(self) -> float:
        return self._clock() - self._record.renewed_boot_s

    def _not_owner(self, why: str) -> NotOwner:
        return NotOwner(
            f"This daemon does not own {self._path.parent}: {why}.",
            metadata={"instance_id": self._record.instance_id, "data_root": self._path.parent},
        )


def held(record: LeaseRecord | None, here: Viewpoint, path: Path) -> LeaseHeld:
    """The error for an owner that is alive, or just took the root."""
    if record is None:
        return LeaseHeld(
            f"Another process is changing {path} at this moment. Try again.",
            metadata={"path": path},
            retry_after_s=1.0,
        )
    left_s = expires_in_s(record, here)
    where = record.endpoints[0] if record.endpoints else "not listening yet"
    return LeaseHeld(
        f"{path.parent} is owned by the daemon of pid {record.pid} on {record.host} ({where}). "
        "Use that one, stop it with `modeld drain`, or give this one another --data-root. "
        f"Unless it renews, its lease ends in {left_s:.0f} s.",
        metadata={
            "instance_id": record.instance_id,
            "pid": record.pid,
            "host": record.host,
            "expires_in_s": f"{left_s:.1f}",
        },
        retry_after_s=left_s,
    )


def _record(
    here: Viewpoint,
    instance_id: str,
    ttl_s: float,
    endpoints: Sequence[str],
    backends: Sequence[str],
    floor: int,
) -> LeaseRecord:
    return LeaseRecord(
        format=FORMAT,
        instance_id=instance_id,
        pid=os.getpid(),
        pid_start=here.pid_start_of(os.getpid()) or 0,
        pid_namespace=here.pid_namespace,
        host=here.host,
        boot_id=here.boot_id,
        endpoints=tuple(endpoints),
        backends=tuple(backends),
        protocol_version=PROTOCOL_VERSION,
        generation_floor=floor,
        acquired=here.now_unix_s,
        renewed=here.now_unix_s,
        renewed_boot_s=here.now_boot_s,
        ttl_s=ttl_s,
    )


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Hold the side lock under which every change of the lease is made.

    A renewal must not overwrite a takeover that happened between its read and its write. The
    side file stays: removing a lock file is itself a race. A holder that was stopped while it
    held the lock keeps others out, which is safe; they give up after a few seconds.
    """
    with storage_errors(path.name, path.parent):
        fd = os.open(
            path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
    try:
        give_up = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise held(None, viewpoint(), path) from None
                time.sleep(0.005)
            except OSError as error:
                raise InvalidRequest.of(
                    "data_root",
                    str(path.parent),
                    "a folder on a filesystem with file locks",
                    f"The system says: {error.strerror}. Choose another with --data-root.",
                ) from None
        yield
    finally:
        os.close(fd)
