"""Writes that survive a crash or a power cut: whole files, atomically, or nothing.

Owns fsync, rename and how storage failures become typed errors; knows nothing of what is stored.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modeld.shared.errors import InvalidRequest, StorageFull

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
TEMP_MARK = ".tmp-"


@contextmanager
def storage_errors(what: str, path: Path) -> Iterator[None]:
    """Turn a full disk into StorageFull; every other OSError passes through."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageFull(
            f"No space left to write {what} at {path}: nothing was half written. "
            "Free some space on that filesystem and try again.",
            metadata={"path": path, "what": what},
        ) from None


def fsync_dir(path: Path) -> None:
    """Make renames inside ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_temp(path: Path, data: bytes, *, mode: int = 0o600) -> Path:
    """Write ``data`` durably to a new file beside ``path`` and return the new file's path.

    The caller renames or links it into place. On failure nothing is left behind.
    """
    temp = path.with_name(f"{path.name}{TEMP_MARK}{secrets.token_hex(6)}")
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        with suppress(OSError):
            temp.unlink()
        raise
    return temp


def write_atomic(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``: readers see the old file or the new one, never a part.

    Raises StorageFull when the disk is full, OSError otherwise; the old file then still stands.
    """
    with storage_errors(path.name, path.parent):
        temp = write_temp(path, data, mode=mode)
        try:
            temp.replace(path)
        except BaseException:
            with suppress(OSError):
                temp.unlink()
            raise
        fsync_dir(path.parent)


def create_exclusive(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Create ``path`` with all of ``data`` at once; raises FileExistsError if it exists.

    A plain O_EXCL open would show readers an empty file first, hence the link of a finished one.
    """
    with storage_errors(path.name, path.parent):
        temp = write_temp(path, data, mode=mode)
        try:
            os.link(temp, path)
        finally:
            with suppress(OSError):
                temp.unlink()
        fsync_dir(path.parent)


def sweep_temps(path: Path) -> None:
    """Remove what a crash left beside ``path``. Only for a file that one process writes."""
    for leftover in path.parent.glob(f"{path.name}{TEMP_MARK}*"):
        with suppress(OSError):
            leftover.unlink()


def ensure_data_root(root: Path) -> Path:
    """Create the data root (mode 0700) if needed and prove that it can be written.

    Raises InvalidRequest saying what is wrong with it, or StorageFull.
    """
    allowed = "a folder that this user can write"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with storage_errors("a probe file", root):
            write_temp(root / ".probe", b"x").unlink()
    except (FileExistsError, NotADirectoryError):
        raise InvalidRequest.of(
            "data_root", str(root), allowed, "It, or a part of its path, is not a folder."
        ) from None
    except OSError as error:
        raise InvalidRequest.of(
            "data_root",
            str(root),
            allowed,
            f"The system says: {error.strerror}. Choose another: --data-root, MODELD_DATA_ROOT.",
        ) from None
    return root


def private_folder(path: Path) -> Path:
    """Make sure that ``path`` is a folder of this user's alone.

    Raises PermissionError where another user made it first: what is put there could be replaced.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{path} is not a folder of this user's")
    if status.st_mode & 0o077:
        path.chmod(0o700)
    return path
