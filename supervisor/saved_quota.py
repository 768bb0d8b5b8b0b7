"""How much disk saved sessions may take, snapshots and durable ones together.

Owns the account: what the folders hold, and what was promised to those that are written now. It
removes nothing: a full quota is refused, never made room in.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from modeld.shared.errors import StorageFull
from modeld.supervisor.saved_folder import SavedFolder

FOLDERS = ("snapshots", "durable")
MAX_NAMED = 5  # of what could be deleted
SETTLED_NS = 100_000_000


@dataclass(frozen=True)
class Deletable:
    """Something whose removal would make room."""

    saved_id: str
    size_bytes: int


class Room:
    """What was promised to one save that is under way."""

    def __init__(self, quota: SavedQuota, what: str) -> None:
        self._quota, self._what, self.bytes = quota, what, 0

    def resize(self, size: int) -> None:
        """Promise so many bytes in all. Raises StorageFull where there is no room for them; the
        promise is as it was then.
        """
        self._quota._promise(self, size, self._what)


class SavedQuota:
    """Bytes below one data root, under ``limit_bytes`` (0: no limit). Safe to use from threads;
    blocks on the disk.
    """

    def __init__(self, data_root: Path, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._data_root = data_root
        self._sizes: dict[Path, tuple[int, int]] = {}  # the folder's time (ns), and its bytes
        self._rooms: set[Room] = set()
        self._lock = threading.Lock()
        # What could be deleted, the longest unused first; set by who knows.
        self.deletable: Callable[[], Sequence[Deletable]] = tuple

    @property
    def used_bytes(self) -> int:
        """Of all folders, but for those that are written out of sight."""
        with self._lock:
            return self._measure()

    def _measure(self) -> int:
        """A folder's time tells whether its files are still those that were counted."""
        seen: dict[Path, tuple[int, int]] = {}
        for root in FOLDERS:
            for entry in _folders(self._data_root / root):
                now_ns, path = time.time_ns(), Path(entry.path)
                try:
                    changed_ns = entry.stat(follow_symlinks=False).st_mtime_ns
                except OSError:
                    continue  # removed meanwhile
                known = self._sizes.get(path)
                if known is not None and known[0] == changed_ns:
                    seen[path] = known
                    continue
                # One that changed just now may change again within the clock's step.
                settled = now_ns - changed_ns > SETTLED_NS
                seen[path] = (changed_ns if settled else -1, SavedFolder(path).bytes_used())
        self._sizes = seen
        return sum(size for _, size in seen.values())

    @contextmanager
    def room(self, needed: int, what: str) -> Iterator[Room]:
        """Keep room for ``needed`` bytes while they are written out of sight.

        Raises StorageFull with the numbers where quota or disk has no room for them.
        """
        room = Room(self, what)
        room.resize(needed)
        try:
            yield room
        finally:
            with self._lock:
                self._rooms.discard(room)

    def check(self, what: str, *, needed: int = 0, leaving: int = 0) -> None:
        """Raises StorageFull where what is there is more than the limit: by now, or once of
        what is counted ``leaving`` bytes have made way for ``needed``.
        """
        with self._lock:
            numbers = self._numbers(None, needed)
        numbers["used_bytes"] -= leaving
        if (over := self._over(numbers)) > 0:
            raise self._refusal(what, numbers, over)

    def _promise(self, room: Room, size: int, what: str) -> None:
        with self._lock:
            numbers = self._numbers(room, size)
            # Of a promise that grows, what was promised before is written already.
            short = size - room.bytes > numbers["free_disk_bytes"]
            over = self._over(numbers)
            if over <= 0 and not short:
                room.bytes = size
                self._rooms.add(room)
                return
        raise self._refusal(what, numbers, over)

    def _numbers(self, room: Room | None, size: int) -> dict[str, int]:
        return {
            "needed_bytes": size,
            "used_bytes": self._measure(),
            "promised_bytes": sum(other.bytes for other in self._rooms if other is not room),
            "quota_bytes": self.limit_bytes,
            "free_disk_bytes": shutil.disk_usage(self._data_root).free,
        }

    def _over(self, numbers: dict[str, int]) -> int:
        """Bytes beyond the limit, 0 or less where it is kept."""
        wanted = sum(numbers[name] for name in ("needed_bytes", "used_bytes", "promised_bytes"))
        return wanted - self.limit_bytes if self.limit_bytes else 0

    def _refusal(self, what: str, numbers: dict[str, int], over: int) -> StorageFull:
        if over <= 0:
            return StorageFull(
                f"{what} takes {numbers['needed_bytes']} bytes, and the filesystem of the data "
                f"root has {numbers['free_disk_bytes']} free. Nothing was saved. Free some space "
                "there, or delete snapshots, and try again.",
                metadata={**numbers, "bound": "disk"},
            )
        chosen, freed = [], 0
        for one in self.deletable():
            if freed >= over:
                break
            chosen.append(one)
            freed += one.size_bytes
        beside = (
            f" and {numbers['promised_bytes']} being written" if numbers["promised_bytes"] else ""
        )
        needed = numbers["needed_bytes"]
        takes = f"takes {needed} bytes" if needed else "can't be saved"
        return StorageFull(
            f"{what} {takes}; snapshots and durable sessions use "
            f"{numbers['used_bytes']}{beside} of the {self.limit_bytes} that snapshot_quota_bytes "
            f"allows: {over} too many. Nothing was saved, and nothing is removed unasked. "
            f"{_advice(chosen, freed, over)}",
            metadata={
                **numbers,
                "bound": "quota",
                "could_delete": ",".join(one.saved_id for one in chosen),
            },
        )


def _advice(chosen: Sequence[Deletable], freed: int, over: int) -> str:
    if freed < over:
        return (
            "Raise snapshot_quota_bytes, or close durable sessions that aren't needed with discard "
            "(`modeld sessions` lists what is saved, `modeld sessions close KEY --discard` removes "
            "it)."
        )
    named = ", ".join(f"{one.saved_id} ({one.size_bytes} bytes)" for one in chosen[:MAX_NAMED])
    more = f" and {len(chosen) - MAX_NAMED} more" if len(chosen) > MAX_NAMED else ""
    return f"Deleting what was unused longest would make room: {named}{more}; or raise the quota."


def _folders(root: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            return [e for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] != "."]
    except FileNotFoundError:
        return []
