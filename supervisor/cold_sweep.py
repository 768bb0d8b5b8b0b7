"""Files of parked KV that no setting allows any more: what the daemon's start removes of them.

Owns which folders below ``cold/`` no worker will be given. What is in a folder that one is given is
that worker's; knows nothing of blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection
from itertools import islice
from pathlib import Path

from modeld.supervisor.config import Config
from modeld.supervisor.models.folders import is_plain_dir

log = logging.getLogger(__name__)

MAX_FILES = 100_000  # that one start removes; the next ones go on with the rest
WRITTEN = (".kv", ".partial")  # how the names of a worker's files end: whole, and cut by a crash


def sweep_cold(config: Config) -> None:
    """Remove parked KV from disk that is of a backend that isn't served, or of any where
    ``cold_disk_bytes`` is 0. Blocking; for the owner of the data root, before workers start.

    Links are never followed, other files and folders stay, and what can't be removed is left.
    """
    root = config.data_root / "cold"
    if not is_plain_dir(root):
        return
    served: Collection[str] = config.backends if config.cold_disk_bytes else ()
    why = "backends doesn't name it" if config.cold_disk_bytes else "cold_disk_bytes is 0"
    left = MAX_FILES
    for folder in sorted(root.iterdir()):
        name = folder.name
        if name in served or not is_plain_dir(folder):
            continue
        files, size = _empty(folder, left)
        left -= files
        if files:
            log.info(
                "removed %d files, %d bytes, of parked KV in cold/%s: %s", files, size, name, why
            )
        with contextlib.suppress(OSError):  # something else is in it
            folder.rmdir()


def _empty(folder: Path, most: int) -> tuple[int, int]:
    """Remove at most so many of its files; how many, and their bytes."""
    files = size = 0
    try:
        # By its descriptor, so that nothing else can come in the folder's place meanwhile.
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        log.warning("parked KV in %s stays: %s", folder, error.strerror)
        return 0, 0
    try:
        with os.scandir(fd) as entries:
            ours = (e for e in entries if e.name.endswith(WRITTEN))
            plain = [e for e in islice(ours, most) if e.is_file(follow_symlinks=False)]
        for entry in plain:
            try:
                held = os.stat(entry.name, dir_fd=fd, follow_symlinks=False).st_size
                os.unlink(entry.name, dir_fd=fd)
            except OSError as error:
                log.warning("%s in %s stays: %s", entry.name, folder, error.strerror)
                continue
            files, size = files + 1, size + held
    finally:
        os.close(fd)
    return files, size
