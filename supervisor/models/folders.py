"""Folders that are whole or not there: built aside, renamed into place, swept after a crash.

Owns the temporary names and the locks below one root. Knows nothing of what the folders hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from modeld.supervisor.durable import fsync_dir, storage_errors

log = logging.getLogger(__name__)

_INCOMING = ".incoming-"
_TRASH = ".trash-"


class Folders:
    """The folders below ``root``. Safe against other processes that use the same root."""

    def __init__(self, root: Path, what: str) -> None:
        """``what`` names a folder's content in errors."""
        self.root = root
        self._what = what

    def make(self) -> None:
        """Create the root. Raises StorageFull."""
        with storage_errors(self._what, self.root.parent):
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude every other process that changes names below the root."""
        with storage_errors(self._what, self.root):
            fd = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def incoming(self) -> Iterator[Path]:
        """A folder to build in, locked while this process lives; gone afterwards."""
        folder = self.root / f"{_INCOMING}{secrets.token_hex(6)}"
        with storage_errors(self._what, self.root), self.locked():
            folder.mkdir(mode=0o700)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            os.close(fd)
            remove_tree(folder)

    def put(self, folder: Path, name: str) -> Path | None:
        """Rename a finished folder to ``name``; what stood there, moved aside, for the caller to
        remove after the lock. Call it while ``locked``.
        """
        target, trash = self.root / name, None
        if target.exists() or target.is_symlink():
            # The name tells the sweep where it belongs, should a crash come in between.
            trash = self.root / f"{_TRASH}{secrets.token_hex(6)}-{name}"
            target.rename(trash)
        try:
            folder.rename(target)
        except BaseException:
            if trash is not None:
                trash.rename(target)
            raise
        fsync_dir(self.root)
        return trash

    def take_away(self, name: str) -> Path:
        """Move a folder aside for good: a crash while it is removed must not leave half of it.
        Call it while ``locked``, and remove what is answered afterwards.
        """
        trash = self.root / f"{_TRASH}{secrets.token_hex(6)}"
        (self.root / name).rename(trash)
        fsync_dir(self.root)
        return trash

    def sweep(self) -> None:
        """Remove what crashes left unfinished or half removed; put back what one left nowhere."""
        with self.locked():
            for leftover in list(self.root.glob(f"{_TRASH}*")):
                _, _, name = leftover.name.removeprefix(_TRASH).partition("-")
                if name and not (self.root / name).exists():
                    leftover.rename(self.root / name)
                else:
                    remove_tree(leftover)
            for leftover in list(self.root.glob(f"{_INCOMING}*")):
                if not _in_use(leftover):
                    log.info("removing the unfinished %s", leftover.name)
                    remove_tree(leftover)


def is_plain_dir(path: Path) -> bool:
    """Whether it is a folder, and not a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _in_use(folder: Path) -> bool:
    """Whether a living process builds in it (it holds the folder's lock)."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def remove_tree(path: Path) -> None:
    """Remove a folder or whatever is in its place; a rest that stays is swept at the next start."""
    if is_plain_dir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def tree_bytes(folder: Path, *, freed: bool = False) -> int:
    """Bytes of all files; ``freed``: only of those whose blocks no other name shares."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                status = (Path(parent) / name).lstat()
                total += status.st_size if status.st_nlink == 1 or not freed else 0
    return total
