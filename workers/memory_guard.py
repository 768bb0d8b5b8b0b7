"""The last look before a large allocation, and the bound under which it is made.

Owns the worker's own readings and limits, for any engine: a request beyond free memory is refused
with its numbers, and one that turns out larger fails as an allocation does, instead of bringing
the kernel's killer. Plans nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from modeld.shared.capacity import MemorySnapshot
from modeld.shared.errors import InsufficientMemory
from modeld.shared.host_memory import host_memory

log = logging.getLogger(__name__)

MIB = 1024 * 1024
# Above what is free: the interpreter's and the engine's small blocks must not be what fails. An
# engine that checks its large allocations may abort over a small one.
SLACK_BYTES = 64 * MIB
_OOM_SCORE = 500  # of 1,000: before the daemon and the user's programs
_OOM_FILE = Path("/proc/self/oom_score_adj")


class MemoryGuard:
    """``read`` takes a live reading; ``slack_bytes`` is allowed above it."""

    def __init__(
        self, read: Callable[[], MemorySnapshot] = host_memory, slack_bytes: int = SLACK_BYTES
    ) -> None:
        self._read = read
        self._slack_bytes = slack_bytes

    def spare_bytes(self) -> int:
        """What something short-lived may take that nobody planned: half of what is free. Where
        the host can't be read, as much as it likes.
        """
        reading = self._read()
        return reading.available_bytes // 2 if reading.known else sys.maxsize

    @contextlib.contextmanager
    def allocating(
        self,
        what: str,
        parts: Mapping[str, int],
        advice: str,
        *,
        more: Mapping[str, object],
        untouched_bytes: int = 0,
    ) -> Iterator[None]:
        """Allocate inside this block. ``parts`` are the bytes it is expected to take on the host,
        by name; ``more`` goes into the refusal's metadata; ``advice`` says what to do.
        ``untouched_bytes`` are reserved by the engine and hardly ever used: they count against the
        bound, not against what is free.

        Raises InsufficientMemory, with all the numbers, where they don't fit what is free. Inside,
        the process's data can't grow beyond what is free now: the engine's allocation fails there.
        Mapped files and what a device holds aren't data. Where the host can't be read, nothing is
        refused here and nothing bounded.
        """
        reading = self._read()
        if not reading.known:
            _say_once(
                "the host's memory can't be read: allocations are neither checked nor bounded"
            )
            yield
            return
        check(what, parts, advice, reading, more)
        with data_limit(reading.available_bytes + untouched_bytes + self._slack_bytes):
            yield


def check(
    what: str,
    parts: Mapping[str, int],
    advice: str,
    reading: MemorySnapshot,
    more: Mapping[str, object],
) -> None:
    """Raise InsufficientMemory if the parts' bytes exceed what ``reading`` says is free."""
    needed, free = sum(parts.values()), reading.available_bytes
    if needed <= free:
        return
    each = " + ".join(f"{size} {name}" for name, size in parts.items())
    bound = f" (a limit of {reading.limit_bytes} holds here)" if reading.limit_bytes else ""
    raise InsufficientMemory(
        f"{what} needs {needed} bytes of the host's memory ({each}), {free} are free{bound}. "
        f"{advice}",
        metadata={
            "cause": "host_memory",
            "needed_bytes": needed,
            **{f"{name}_bytes": size for name, size in parts.items()},
            "free_bytes": free,
            "total_bytes": reading.total_bytes,
            "limit_bytes": reading.limit_bytes,
            **more,
        },
    )


@contextlib.contextmanager
def data_limit(room_bytes: int) -> Iterator[None]:
    """Let this process's data grow by ``room_bytes`` at most inside the block.

    RLIMIT_DATA counts private writable memory, touched or not: what malloc and anonymous maps
    give. A limit that was lower before stays; the one before is restored afterwards.
    """
    used = data_bytes()
    if used is None:
        _say_once("this platform doesn't tell a process's data size: allocations aren't bounded")
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (min([used + room_bytes, *limits]), hard))
    except (OSError, ValueError) as error:
        _say_once(f"a process's data can't be limited here ({error}): allocations aren't bounded")
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def data_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """What RLIMIT_DATA is compared with (VmData), in bytes; None where it can't be known."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "VmData":
            return int(value.split()[0]) * 1024
    return None


def offer_to_oom_killer(file: Path = _OOM_FILE) -> None:
    """Have the kernel end this process rather than the daemon or the user's programs, where
    memory runs out all the same. Best effort; a score that is higher already stays.
    """
    try:
        if int(file.read_text()) < _OOM_SCORE:
            file.write_text(str(_OOM_SCORE))
    except (OSError, ValueError) as error:
        log.debug("the out-of-memory score can't be set: %s", error)


def return_memory() -> None:
    """Give the allocator's free pages back to the system, where it can be asked to."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        log.debug("this platform's allocator can't be trimmed")


@functools.cache
def _say_once(words: str) -> None:
    log.warning("%s", words)
