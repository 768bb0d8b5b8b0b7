"""Opens a file to be read whole or in part, and says in typed errors why that can't be.

Owns no format. Knows not who wrote the file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from modeld.shared.errors import InvalidRequest, SnapshotNotFound


@contextlib.contextmanager
def opened(path: Path, field: str, missing: str = "") -> Iterator[tuple[int, int]]:
    """A regular file's descriptor and its size in bytes.

    Raises InvalidRequest, which names the request's ``field``, for what can't be read, and
    SnapshotNotFound, which ends with ``missing``, where there is nothing.
    """
    try:
        # Without O_NONBLOCK a pipe would be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SnapshotNotFound(
            f"There is no file {path}{missing}.", metadata={"path": path}
        ) from None
    except OSError as error:
        raise unreadable(path, field, error.strerror) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise unreadable(path, field, "it is no regular file")
        yield fd, status.st_size
    finally:
        os.close(fd)


def unreadable(path: Path, field: str, why: str | None) -> InvalidRequest:
    return InvalidRequest.of(
        field, str(path), "a file that can be read", f"The system says: {why}."
    )
