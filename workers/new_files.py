"""New files in a folder: each whole and on the disk before it has its name, or not there at all.

Owns temporary names, syncing, and how storage failures become typed errors. Knows no format.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

from modeld.shared.errors import InvalidRequest, StorageFull

T = TypeVar("T")

# Called before each piece of long work: tells that there is life, and raises Cancelled to stop it.
# Threads beside the caller's call it too.
Live: TypeAlias = Callable[[], None]

PARTIAL_SUFFIX = ".partial"  # of a file that is being written; one that stays was cut by a crash
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# What one call to the system reads, writes or waits for: a slow disk answers between two of them.
PIECE_BYTES = 8 * 1024 * 1024
_BEGIN_WRITING = 2  # SYNC_FILE_RANGE_WRITE
_WAIT_FOR = 7  # … with SYNC_FILE_RANGE_WAIT_BEFORE and _WAIT_AFTER


class Cancelled(Exception):
    """On the way; whoever catches it undoes what was done."""


def nobody() -> None:
    """A ``Live`` of work that nobody watches."""


class NewFiles:
    """Files that come into a folder together; a context manager.

    Each is synced before it gets its name. Left by an exception, or before ``keep``, all of them
    are gone again. What was in the folder before is never touched.
    """

    def __init__(self, folder: Path, live: Live = nobody) -> None:
        self._folder, self._live = folder, live
        self._made: list[Path] = []

    def __enter__(self) -> NewFiles:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        for leftover in self._made:
            with contextlib.suppress(OSError):
                leftover.unlink()

    def add(self, write: Callable[[int], T], name: Callable[[T], str]) -> tuple[str, T]:
        """Have ``write`` fill a file by its descriptor; its name may depend on what that answers.

        Raises Cancelled, StorageFull, and InvalidRequest for a name or folder that can't be
        written.
        """
        partial = self._folder / f".{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        with storage_errors(self._folder):
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._made.append(partial)
            try:
                answer = write(fd)
                _sync(fd, self._live)
            finally:
                os.close(fd)
            named = name(answer)
            # One process writes in a folder at a time, so nothing can have come by this name.
            partial.rename(self._folder / named)
            self._made[-1] = self._folder / named
        return named, answer

    def keep(self) -> None:
        """Make the names last, and the files stay. Raises as ``add``, and then they don't."""
        with storage_errors(self._folder):
            fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        self._made.clear()


def free_name(folder: Path, name: str) -> str:
    """``name``, or one made of it where that is taken: nothing is ever overwritten."""
    found, count = name, 1
    while os.path.lexists(folder / found):
        count += 1
        found = f"{name}-{count}"
    return found


def write_all(fd: int, view: memoryview, live: Live = nobody) -> None:
    while view:
        live()
        view = view[os.write(fd, view[:PIECE_BYTES]) :]


def _sync(fd: int, live: Live) -> None:
    """Piece by piece where the system can be told: one sync may wait for gigabytes."""
    call = _sync_file_range()
    if call is not None:
        for begin in range(0, os.fstat(fd).st_size, PIECE_BYTES):
            live()
            call(fd, begin, PIECE_BYTES, _WAIT_FOR)
    os.fsync(fd)


def begin_writing(fd: int) -> None:
    """Have the system write what is there while more comes, where it can be told: a sync at the
    end then waits for less. Keeps nothing durable by itself.
    """
    call = _sync_file_range()
    if call is not None:
        call(fd, 0, 0, _BEGIN_WRITING)  # all of it; a failure only means a longer sync


@functools.cache
def _sync_file_range() -> Any:
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


@contextlib.contextmanager
def storage_errors(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                f"No space left to write a session's state to {where}: nothing of it was left. "
                "Free some space on that filesystem and try again.",
                metadata={"path": where},
            ) from None
        raise InvalidRequest.of(
            "path", str(where), "a place that can be written", f"The system says: {error.strerror}."
        ) from None
