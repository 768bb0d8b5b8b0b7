"""The cold store's part on disk: a folder with one file a block, within a budget of bytes.

Owns the files' names, what is swept at the start, and that a damaged one is never trusted. Knows
neither what is in RAM nor who evicts whom.

A name says all that finding a block takes but its tokens, so that no file is opened before it is
wanted: a start takes as long as listing the folder does.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modeld.shared.errors import InsufficientMemory, InvalidRequest, StorageFull
from modeld.workers.new_files import Cancelled, Live, nobody
from modeld.workers.state_file import (
    PARTIAL_SUFFIX,
    StateFile,
    StateHeader,
    Tokens,
    open_state,
    write_state,
)

if TYPE_CHECKING:
    from modeld.workers.engine import State

log = logging.getLogger(__name__)

_SUFFIX = ".kv"
# Who made it, the chain before the block and at its end, its positions, and its rank.
_NAME = re.compile(r"^([0-9a-f]{8})\.([0-9a-f]{64})\.([0-9a-f]{64})\.(\d+)-(\d+)\.(\d)\.kv\Z")
# Of a file besides payload and token ids: header and alignment, generously.
_OVERHEAD_BYTES = 1024


@dataclass(frozen=True)
class Maker:
    """Whose bytes they are: what was written by another build means nothing here."""

    backend: str
    build_digest: str
    state_layout: str

    @property
    def mark(self) -> str:
        made = "\0".join((self.backend, self.build_digest, self.state_layout))
        return hashlib.sha256(made.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Found:
    """A file of an earlier process, by its name."""

    path: Path
    before: str
    key: str
    begin: int
    end: int
    rank: int
    file_bytes: int
    used_s: float


class ColdFolder:
    """Files of blocks in ``folder``, which exists and is nobody else's."""

    def __init__(self, folder: Path, maker: Maker) -> None:
        self._folder, self._mark = folder, maker.mark

    def found(self, beat: Callable[[], None]) -> Iterator[Found]:
        """What is there. What a crash cut off and what other builds wrote is deleted."""
        try:
            entries = list(os.scandir(self._folder))
        except OSError as error:
            log.warning("the cold store's folder can't be read: %s", error.strerror)
            return
        for entry in entries:
            beat()
            path, match = Path(entry.path), _NAME.match(entry.name)
            if match is None or match[1] != self._mark:
                if entry.name.endswith((PARTIAL_SUFFIX, _SUFFIX)):
                    remove(path)
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                yield Found(
                    path, match[2], match[3], int(match[4]), int(match[5]), int(match[6]),
                    status.st_size, status.st_mtime,
                )  # fmt: skip

    def write(
        self, header: StateHeader, state: State, rank: int, live: Live
    ) -> tuple[Path, int] | None:
        """The new file and its bytes; None where it can't be written for whatever reason, which
        leaves nothing. Raises Cancelled, which leaves nothing either.
        """
        parts = (self._mark, header.chain_before, header.chain, f"{header.begin}-{header.end}")
        path = self._folder / f"{'.'.join(parts)}.{rank}{_SUFFIX}"
        try:
            written = write_state(path, header, 1, [(header.end, state)], live)
        except (StorageFull, InvalidRequest, OSError) as error:
            log.warning("a block isn't kept on disk: %s", error)
            return None
        except Cancelled:
            raise
        except Exception:  # such as no memory for it: a block is worth no operation's failure
            log.exception("a block isn't kept on disk")
            return None
        return path, written.file_bytes


def file_bytes(header: StateHeader, state_bytes: int) -> int:
    """At most so many bytes has the file of a block."""
    return state_bytes + len(header.token_ids) + _OVERHEAD_BYTES


def read_ids(path: Path) -> Tokens:
    """The tokens of a block's own positions.

    Raises ModeldError or OSError for a file that is damaged, gone or of another block.
    """
    with open_state(str(path)) as file:
        _check_named(path, file)
        return file.header.tokens[file.header.begin :].copy()


def read_block(path: Path, spare_bytes: Callable[[], int], live: Live = nobody) -> State | None:
    """The payload, every byte verified; None where there is no memory for it now.

    Raises ModeldError or OSError for a file that is damaged, gone or of another block, and
    Cancelled.
    """
    with open_state(str(path)) as file:
        _check_named(path, file)
        try:
            states = [state for _, state in file.parts(spare_bytes, live)]
        except InsufficientMemory as error:
            log.info("%s", error.message)
            return None
    return states[0]


def _check_named(path: Path, file: StateFile) -> None:
    header = file.header
    named = f".{header.chain_before}.{header.chain}.{header.begin}-{header.end}."
    if named not in path.name:
        raise InvalidRequest.of("path", path.name, "the file of this block")


def mark_used(path: Path) -> None:
    """What was used lately is listed as such at a later load."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
