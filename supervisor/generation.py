"""The durable generation: one 64-bit counter for the daemon, never reused.

Owns ``<data_root>/generation`` and its predecessor. What a bump means for slots, sessions and
handles is decided elsewhere. Only the lease's owner may open it.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modeld.supervisor.durable import fsync_dir, storage_errors, sweep_temps, write_temp

log = logging.getLogger(__name__)

# Added when the newest number can't be known: more than any daemon bumps between two durable
# witnesses (the previous file lags by one bump, the lease by a few seconds).
RECOVERY_STEP = 1 << 20
CEILING = (1 << 64) - 1


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    generation: int
    cause: str
    crc32: int  # over generation and cause


@dataclass(frozen=True)
class _Read:
    state: str  # good | absent | torn
    generation: int = 0
    cause: str = ""


def _crc(generation: int, cause: str) -> int:
    return zlib.crc32(f"{generation}\n{cause}".encode())


class GenerationStore:
    """The counter. ``bump`` returns only numbers that are already durable."""

    def __init__(
        self, path: Path, current: int, last_cause: str, check_owner: Callable[[], None]
    ) -> None:
        self._path = path
        self._check_owner = check_owner
        self._backup = path.with_name("generation.previous")
        self._current = current
        self._last_cause = last_cause

    @classmethod
    def open(
        cls, root: Path, floor: int = 0, check_owner: Callable[[], None] = lambda: None
    ) -> GenerationStore:
        """Read the counter. ``floor`` is a second witness: the lease's generation floor.

        ``check_owner`` is called before each bump and raises NotOwner once the counter is
        another's: a process that was stopped must not write over its successor's numbers.

        A torn or lost file is answered with a step past everything the remaining witnesses can
        have missed, and logged; it is made durable before this returns. Raises StorageFull.
        """
        path = root / "generation"
        sweep_temps(path)
        store = cls(path, 0, "", check_owner)
        main, backup = _read(path), _read(store._backup)
        witness = max(main.generation, backup.generation, floor)
        if main.state == "good" and main.generation >= witness:
            store._current, store._last_cause = main.generation, main.cause
        elif witness == 0 and main.state == "absent" and backup.state == "absent":
            pass  # a new data root
        else:
            log.warning(
                "%s is %s; the other witnesses say %d: continuing from %d",
                path, "behind" if main.state == "good" else main.state,
                witness, witness + RECOVERY_STEP,
            )  # fmt: skip
            step_to = witness + RECOVERY_STEP
            store._advance(step_to, "generation file recovered", keep_old=main.state == "good")
        return store

    @property
    def current(self) -> int:
        """The newest durable generation; 0 before the first bump."""
        return self._current

    @property
    def last_cause(self) -> str:
        return self._last_cause

    def bump(self, cause: str) -> int:
        """Make the next generation durable and return it.

        Raises NotOwner, StorageFull or OSError; ``current`` then stays, and nothing may be served
        under a number that wasn't returned. Blocks for the disk: under a millisecond when it is
        idle, some ten when it is busy.
        """
        self._check_owner()
        self._advance(self._current + 1, cause)
        return self._current

    def _advance(self, generation: int, cause: str, *, keep_old: bool = True) -> None:
        if generation > CEILING:
            raise OverflowError("the generation counter is exhausted")
        value = _File(generation, cause, _crc(generation, cause))
        with storage_errors("the generation", self._path.parent):
            temp = write_temp(self._path, msgspec.json.encode(value) + b"\n")
            try:
                # A crash between the two leaves only the previous number, which open() steps past.
                # A torn file is overwritten in one step: it must not become the backup.
                if keep_old:
                    with suppress(FileNotFoundError):
                        self._path.replace(self._backup)
                temp.replace(self._path)
                fsync_dir(self._path.parent)
            except BaseException:
                with suppress(OSError):
                    temp.unlink()
                raise
        self._current, self._last_cause = generation, cause


def _read(path: Path) -> _Read:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return _Read("absent")
    try:
        value = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return _Read("torn")
    if value.crc32 != _crc(value.generation, value.cause) or not 0 <= value.generation <= CEILING:
        return _Read("torn")
    return _Read("good", value.generation, value.cause)
