"""The cold store: KV of a model that no context needs to hold, in RAM and on disk, found by tokens.

Owns budgets, what goes out for what, and that nothing damaged comes back. Knows no context and no
session; the bytes are an engine's, which are kept and never looked into.

A block is the KV of positions ``begin`` to ``end`` behind exactly the tokens that its chain
(``state_file.token_chain``) names. It lies in RAM or in a file, never in both.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modeld.shared.errors import ModeldError
from modeld.workers.cold_disk import ColdFolder, Maker, file_bytes, read_block, remove
from modeld.workers.memory_guard import MemoryGuard, return_memory
from modeld.workers.pool import Tokens, common_prefix
from modeld.workers.state_file import StateHeader

if TYPE_CHECKING:
    from modeld.workers.engine import State

log = logging.getLogger(__name__)

BLOCK_TOKENS = 256  # blocks begin at multiples of it


@dataclass(frozen=True)
class Match:
    """A stored block, and how many of its tokens, from its first on, are those asked for."""

    key: str
    begin: int
    end: int
    ids: Tokens  # of its own positions
    common: int


@dataclass
class _Stored:
    key: str
    before: str  # the chain at ``begin``
    begin: int
    end: int
    ids: Tokens  # of ``begin`` to ``end``
    rank: int
    used: int  # the tick at which it was put, asked for or brought back last
    size: int  # bytes where it lies
    header: StateHeader | None = None  # these three in RAM
    state: State | None = None
    checksum: int = 0
    path: Path | None = None  # on disk

    @property
    def order(self) -> tuple[int, int, int]:
        """What comes first goes first: by class, then the least recently used; of blocks that were
        used together the later positions, which mean nothing without those before.
        """
        return (self.rank, self.used, -self.begin)

    def match(self, common: int) -> Match:
        return Match(self.key, self.begin, self.end, self.ids, common)


class ColdStore:
    """Blocks by their key, the chain at their end. One thread uses it, any may read ``ram_bytes``.

    ``most_ram_bytes`` is a bound; less is used where ``spare_bytes`` (of the machine, now) is
    less. With ``folder``, what falls out of RAM goes there, up to ``most_disk_bytes``.
    """

    def __init__(
        self,
        maker: Maker,
        most_ram_bytes: int,
        most_disk_bytes: int = 0,
        folder: Path | None = None,
        *,
        spare_bytes: Callable[[], int] | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._most_ram, self._most_disk = most_ram_bytes, most_disk_bytes
        self._spare_bytes = spare_bytes or MemoryGuard().spare_bytes
        self._folder = ColdFolder(folder, maker) if folder and most_disk_bytes > 0 else None
        self._blocks: dict[str, _Stored] = {}
        self._behind: dict[str, dict[str, _Stored]] = {}  # by the chain before them
        self._tick = 0
        self.ram_bytes = 0
        self.disk_bytes = 0
        self.hits = 0  # blocks brought back
        self.dropped = 0  # blocks that went for want of room
        self.damaged = 0
        if self._folder is not None:
            self._index(self._folder, beat)

    def __len__(self) -> int:
        return len(self._blocks)

    def has(self, key: str) -> bool:
        """Whether the KV of the block that ends at this chain is stored, in RAM or on disk."""
        return key in self._blocks

    def tick(self) -> None:
        """A new moment: what is used from here on is more recent than all before."""
        self._tick += 1

    # --- finding

    def longest(self, before: str, ids: Tokens) -> Match | None:
        """The block behind the chain ``before`` that has the most tokens in common with ``ids``."""
        best: Match | None = None
        for block in self._behind.get(before, {}).values():
            common = common_prefix(block.ids, ids)
            if common > (best.common if best else 0):
                best = block.match(common)
        return best

    def wholly(self, before: str, ids: Tokens) -> Match | None:
        """The longest block behind ``before`` all of whose tokens ``ids`` begins with."""
        fitting = [
            block
            for block in self._behind.get(before, {}).values()
            if common_prefix(block.ids, ids) == len(block.ids)
        ]
        best = max(fitting, key=lambda block: block.end, default=None)
        return best.match(len(best.ids)) if best else None

    def shorter(self, key: str) -> list[str]:
        """The blocks that hold nothing but a beginning of this one."""
        block = self._blocks[key]
        others = [other for other in self._behind[block.before].values() if other is not block]
        return [
            other.key
            for other in others
            if common_prefix(other.ids, block.ids) == len(other.ids) < len(block.ids)
        ]

    def touch(self, keys: Iterable[str], rank: int = 0) -> None:
        """They were used now, for a class of at least ``rank``."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                block.used = self._tick
                block.rank = max(block.rank, rank)

    # --- in and out

    def put(self, header: StateHeader, state: State, rank: int, *, in_ram: bool = True) -> bool:
        """Take a new block in; False where there is no room.

        ``in_ram`` is False where memory is what is short: then only the disk takes it.
        """
        key, ids = header.chain, header.tokens[header.begin :]
        block = _Stored(
            key, header.chain_before, header.begin, header.end, ids.copy(), rank, self._tick,
            state.nbytes + len(header.token_ids), header, state, zlib.crc32(state.data),
        )  # fmt: skip
        if in_ram and self._room_in_ram(block):
            self.ram_bytes += block.size
            self._add(block)
            return True
        if self._to_disk(block):
            self._add(block)
            return True
        self.dropped += 1
        return False

    def read(self, key: str) -> State | None:
        """A block's bytes, verified, to be read only; None if it is gone, damaged (then it goes),
        or can't be read for want of memory.
        """
        block = self._blocks.get(key)
        if block is None:
            return None
        if block.state is not None:
            if zlib.crc32(block.state.data) == block.checksum:
                return block.state
            log.error("a parked block changed in RAM and was dropped")
        elif block.path is not None:
            try:
                return read_block(block.path, key, self._spare_bytes)
            except (ModeldError, OSError) as error:
                log.warning("a stored block is damaged and was deleted: %s", error)
        self.damaged += 1
        self.remove(key)
        return None

    def remove(self, key: str) -> None:
        """Forget a block, its file too; it may have been pushed out already."""
        block = self._blocks.pop(key, None)
        if block is None:
            return
        behind = self._behind[block.before]
        del behind[key]
        if not behind:
            del self._behind[block.before]
        self._leave(block)

    def shrink(self, wanted_bytes: int) -> int:
        """Free at least so many bytes of RAM, or all of it; returns how many. What goes is kept on
        disk where there is room.
        """
        before = self.ram_bytes
        while before - self.ram_bytes < wanted_bytes and (victim := self._first_in_ram()):
            self._out_of_ram(victim)
        if freed := before - self.ram_bytes:
            return_memory()
        return freed

    def close(self) -> None:
        """Give the RAM back. Files stay for a later load."""
        self._blocks.clear()
        self._behind.clear()
        self.ram_bytes = self.disk_bytes = 0
        return_memory()

    def counters(self) -> dict[str, int]:
        """The slot's, since the model was loaded."""
        return {
            "slot_cold_ram_bytes": self.ram_bytes,
            "slot_cold_disk_bytes": self.disk_bytes,
            "slot_cold_blocks": len(self._blocks),
            "slot_cold_hits": self.hits,
            "slot_cold_dropped": self.dropped,
            "slot_cold_damaged": self.damaged,
        }

    # --- room

    def _add(self, block: _Stored) -> None:
        self._blocks[block.key] = block
        self._behind.setdefault(block.before, {})[block.key] = block

    def _leave(self, block: _Stored) -> None:
        """Free what the block takes where it lies."""
        if block.path is not None:
            remove(block.path)
            self.disk_bytes -= block.size
        else:
            self.ram_bytes -= block.size
        block.header = block.state = block.path = None

    def _first_in_ram(self) -> _Stored | None:
        held = (block for block in self._blocks.values() if block.state is not None)
        return min(held, key=lambda block: block.order, default=None)

    def _room_in_ram(self, block: _Stored) -> bool:
        """Whether there is, after what comes before it went out. Where the machine has nothing to
        spare, it takes the place of others, and the store doesn't grow.
        """
        if block.size > self._most_ram:
            return False
        spare, freed = max(0, self._spare_bytes()), 0
        while self.ram_bytes + block.size > self._most_ram or block.size - freed > spare:
            victim = self._first_in_ram()
            if victim is None or victim.order > block.order:
                return False
            freed += victim.size
            self._out_of_ram(victim)
        return True

    def _out_of_ram(self, block: _Stored) -> None:
        """To disk, or for good."""
        size = block.size
        if self._to_disk(block):
            self.ram_bytes -= size
            return
        self.dropped += 1
        self.remove(block.key)

    def _to_disk(self, block: _Stored) -> bool:
        """Make a block that lies in RAM a file; False, and nothing changed, where it can't be."""
        if self._folder is None or block.state is None or block.header is None:
            return False
        if zlib.crc32(block.state.data) != block.checksum:
            self.damaged += 1
            return False
        if not self._room_on_disk(block, file_bytes(block.header, block.state.nbytes)):
            return False
        written = self._folder.write(block.header, block.state, block.rank)
        if written is None:
            return False
        block.path, block.size = written
        self.disk_bytes += block.size
        block.header = block.state = None
        return True

    def _room_on_disk(self, block: _Stored, size: int) -> bool:
        if size > self._most_disk:
            return False
        while self.disk_bytes + size > self._most_disk:
            held = (other for other in self._blocks.values() if other.path is not None)
            victim = min(held, key=lambda other: other.order, default=None)
            if victim is None or victim.order > block.order:
                return False
            self.dropped += 1
            self.remove(victim.key)
        return True

    # --- at load

    def _index(self, folder: ColdFolder, beat: Callable[[], None]) -> None:
        """Take up what an earlier process left, the least recently used first."""
        there = []
        for found in folder.found(beat):
            if found is None:
                self.damaged += 1
            else:
                there.append(found)
        for found in sorted(there, key=lambda found: found.used_s):
            header = found.header
            if header.chain in self._blocks:  # of two ranks: a crash came in between
                remove(found.path)
                continue
            self._tick += 1
            self.disk_bytes += found.file_bytes
            block = _Stored(
                header.chain, header.chain_before, header.begin, header.end,
                header.tokens[header.begin :].copy(), found.rank, self._tick, found.file_bytes,
                path=found.path,
            )  # fmt: skip
            self._add(block)
        while self.disk_bytes > self._most_disk:
            victim = min(self._blocks.values(), key=lambda block: block.order)
            self.dropped += 1
            self.remove(victim.key)
