"""A daemon whose disk is full while a file named ``full`` stands in its data root.

Mounting a small filesystem takes rights that tests don't have, so the error that a full one gives
is given here, at the system call, to every write below the data root.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.daemon import RunningDaemon


class DiskDaemon(RunningDaemon):
    """Fill and free the disk under it."""

    program = ("-m", "tests.support.full_disk")

    def fill(self) -> None:
        (self.data_root / "full").touch()

    def free(self) -> None:
        (self.data_root / "full").unlink()


def limit_writes(data_root: Path) -> None:
    write: Any = os.write
    marker = data_root / "full"

    def maybe_full(fd: int, data: bytes) -> int:
        if marker.exists() and Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(data_root):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written: int = write(fd, data)
        return written

    os.write = maybe_full  # type: ignore[assignment]


if __name__ == "__main__":
    from modeld.cli.main import main

    limit_writes(Path(sys.argv[sys.argv.index("--data-root") + 1]))
    main()
