"""The cold store's part on disk: a folder with one file a block, within a budget of bytes.

Owns the files' names, what is swept at the start, and that a damaged one is never trusted. Knows
neither what is in RAM nor who evicts whom.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modeld.shared.errors import InsufficientMemory, InvalidRequest, ModeldError, StorageFull
from modeld.workers.state_file import PARTIAL_SUFFIX, StateHeader, open_state, write_state

if TYPE_CHECKING:
    from modeld.workers.engine import State

log = logging.getLogger(__name__)

_NAME = re.compile(r"^([0-9a-f]{64})\.(\d)\.kv\Z")  # the block's key, and its rank
# Of a file besides payload and token ids: header and alignment, generously.
_OVERHEAD_BYTES = 1024


@dataclass(frozen=True)
class Maker:
    """Whose bytes they are: what was written by another build means nothing here."""

    backend: str
    build_digest: str
    state_layout: str

    def made(self, header: StateHeader) -> bool:
        return (header.backend, header.build_digest, header.state_layout) == (
            self.backend,
            self.build_digest,
            self.state_layout,
        )


@dataclass(frozen=True)
class Found:
    """A file of an earlier process."""

    path: Path
    rank: int
    header: StateHeader
    file_bytes: int
    used_s: float


class ColdFolder:
    """Files of blocks in ``folder``, which exists and is nobody else's."""

    def __init__(self, folder: Path, maker: Maker) -> None:
        self._folder, self._maker = folder, maker

    def found(self, beat: Callable[[], None]) -> Iterator[Found | None]:
        """What is there, and None for each damaged file, which is deleted. What a crash cut off
        and what other builds wrote is deleted too. Payloads are verified when they are read.
        """
        try:
            paths = sorted(self._folder.iterdir())
        except OSError as error:
            log.warning("the cold store's folder can't be read: %s", error.strerror)
            return
        for path in paths:
            beat()
            match = _NAME.match(path.name)
            if match is None:
                if path.name.endswith(PARTIAL_SUFFIX):
                    remove(path)
                continue
            try:
                used_s = path.stat().st_mtime
                with open_state(str(path)) as file:
                    header, size = file.header, path.stat().st_size
            except (OSError, ModeldError) as error:
                log.warning("a stored block is damaged and was deleted: %s", error)
                remove(path)
                yield None
                continue
            if not self._maker.made(header) or header.chain != match[1]:
                log.info("deleting a stored block of another build or name")
                remove(path)
                continue
            yield Found(path, int(match[2]), header, size, used_s)

    def write(self, header: StateHeader, state: State, rank: int) -> tuple[Path, int] | None:
        """The new file and its bytes; None where it can't be written, which leaves nothing."""
        path = self._folder / f"{header.chain}.{rank}.kv"
        try:
            written = write_state(path, header, 1, [(header.end, state)])
        except (StorageFull, InvalidRequest, OSError) as error:
            log.warning("a block isn't kept on disk: %s", error)
            return None
        return path, written.file_bytes


def file_bytes(header: StateHeader, state_bytes: int) -> int:
    """At most so many bytes has the file of a block."""
    return state_bytes + len(header.token_ids) + _OVERHEAD_BYTES


def read_block(path: Path, key: str, spare_bytes: Callable[[], int]) -> State | None:
    """The payload, every byte verified; None where there is no memory for it now.

    Raises ModeldError or OSError for a file that is damaged, gone or of another block.
    """
    with open_state(str(path)) as file:
        if file.header.chain != key:
            raise InvalidRequest.of("path", path.name, "the file of this block")
        try:
            states = [state for _, state in file.parts(spare_bytes)]
        except InsufficientMemory as error:
            log.info("%s", error.message)
            return None
    with contextlib.suppress(OSError):  # what was used lately is indexed as such
        os.utime(path)
    return states[0]


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
