"""The cold store: KV of a model that no context needs to hold, in RAM and on disk, found by tokens.

Owns budgets, what goes out for what, and that nothing damaged comes back. Knows no context and no
session; the bytes are an engine's, which are kept and never looked into.

A block is the KV of positions ``begin`` to ``end`` behind exactly the tokens that its chain
(``state_file.token_chain``) names. It lies in RAM or in a file, never in both.

A block's class holds while the block is used: see ``ColdStore._order``.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.errors import ModeldError
from modeld.workers.cold_disk import (
    ColdFolder,
    Found,
    Maker,
    file_bytes,
    mark_used,
    read_block,
    read_ids,
    remove,
)
from modeld.workers.memory_guard import MemoryGuard, return_memory
from modeld.workers.new_files import Cancelled, Live, nobody
from modeld.workers.pooled_context import Tokens, common_prefix
from modeld.workers.state_file import StateHeader

if TYPE_CHECKING:
    from modeld.workers.engine import State

log = logging.getLogger(__name__)

BLOCK_TOKENS = 256  # blocks begin at multiples of it
# A class above volatile lapses when so many times the budget came in since the block was used.
HOLDS = 4


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
    ids: Tokens | None  # of ``begin`` to ``end``; None: only the file says
    rank: int
    used: int  # the moment at which it was put, asked for or brought back last
    size: int  # bytes where it lies
    header: StateHeader | None = None  # these three in RAM
    state: State | None = None
    checksum: int = 0
    path: Path | None = None  # on disk
    held: int = 0  # by so many: it stays
    names: tuple[str, ...] = ()  # keys of shorter blocks in whose place it is


class ColdStore:
    """Blocks by their key, the chain at their end. One thread uses it, any may read ``ram_bytes``.

    ``most_ram_bytes`` is a bound; less is used where ``spare_bytes`` (of the machine, now) is
    less. With ``folder``, what falls out of RAM goes there, up to ``most_disk_bytes``. What reads
    or writes files raises Cancelled, in the middle of a block too, which then is as it was.
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
        self._names: dict[str, _Stored] = {}  # by ``_Stored.names``
        self._tick = 0  # a clock of bytes that came in
        self._came = 0  # bytes since the last tick
        self.live: Callable[[], Live] = lambda: nobody  # of what the present thread serves
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
        return self._find(key) is not None

    def key_of(self, key: str) -> str:
        """The stored block's that is in the place of this one, or this; "" where none is."""
        block = self._find(key)
        return block.key if block is not None else ""

    def _find(self, key: str) -> _Stored | None:
        return self._blocks.get(key) or self._names.get(key)

    def tick(self) -> None:
        """A new moment: what is used from here on is more recent than all before."""
        self._tick += 1 + self._came
        self._came = 0

    # --- finding

    def longest(self, before: str, ids: Tokens) -> Match | None:
        """The block behind the chain ``before`` that has the most tokens in common with ``ids``."""
        best: Match | None = None
        for match in self.matches(before, ids):
            if match.common > (best.common if best else 0):
                best = match
        return best

    def wholly(self, before: str, ids: Tokens) -> Match | None:
        """The longest block behind ``before`` all of whose tokens ``ids`` begins with."""
        found = (one for one in self.matches(before, ids) if one.common == len(one.ids))
        return max(found, key=lambda match: match.end, default=None)

    def matches(self, before: str, ids: Tokens) -> Iterator[Match]:
        """All blocks behind ``before``, with what they have in common with ``ids``, if anything."""
        for block in list(self._behind.get(before, {}).values()):
            own = self._ids(block)
            if own is not None:
                yield Match(block.key, block.begin, block.end, own, common_prefix(own, ids))

    def _ids(self, block: _Stored) -> Tokens | None:
        """None for a file that is damaged, which goes."""
        if block.ids is None and block.path is not None:
            try:
                block.ids = read_ids(block.path)
            except (ModeldError, OSError) as error:
                self._damaged(block, error)
        return block.ids

    def touch(self, keys: Iterable[str], rank: int = 0) -> None:
        """They were used now, for a class of at least ``rank``."""
        for key in keys:
            block = self._find(key)
            if block is not None:
                block.rank = max(self._rank(block), rank)
                block.used = self._tick
                if block.path is not None:
                    mark_used(block.path)

    @contextlib.contextmanager
    def holding(self, keys: Iterable[str]) -> Iterator[None]:
        """These blocks don't go for others meanwhile."""
        blocks = [block for key in keys if (block := self._find(key)) is not None]
        for block in blocks:
            block.held += 1
        try:
            yield
        finally:
            for block in blocks:
                block.held -= 1

    # --- in and out

    def put(self, header: StateHeader, state: State, rank: int, *, in_ram: bool = True) -> bool:
        """Take a new block in; False where there is no room.

        ``in_ram`` is False where memory is what is short: then only the disk takes it.
        """
        key, ids = header.chain, header.tokens[header.begin :]
        self._came += state.nbytes
        block = _Stored(
            key, header.chain_before, header.begin, header.end, ids.copy(), rank, self._tick,
            state.nbytes + len(header.token_ids), header, state, _checksum(state),
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

    def absorb(self, key: str) -> None:
        """Remove the blocks that hold nothing but a beginning of this one: it has their names."""
        block = self._blocks[key]
        ids = self._ids(block)
        for match in self.matches(block.before, ids) if ids is not None else ():
            other = self._blocks[match.key]
            if match.end < block.end and match.common == len(match.ids) and not other.held:
                names = (other.key, *other.names)
                block.rank = max(block.rank, self._rank(other))
                self.remove(other.key)
                block.names += names
                self._names.update(dict.fromkeys(names, block))

    def read(self, key: str) -> State | None:
        """A block's bytes, verified, to be read only; None if it is gone, damaged (then it goes),
        or can't be read for want of memory.
        """
        block = self._blocks.get(key)
        if block is None:
            return None
        if block.state is not None:
            if _checksum(block.state) == block.checksum:
                return block.state
            log.error("a parked block changed in RAM and was dropped")
        elif block.path is not None:
            try:
                return read_block(block.path, self._spare_bytes, self.live())
            except (ModeldError, OSError) as error:
                self._damaged(block, error)
                return None
        self.damaged += 1
        self.remove(key)
        return None

    def _damaged(self, block: _Stored, error: Exception) -> None:
        log.warning("a stored block is damaged and was deleted: %s", error)
        self.damaged += 1
        self.remove(block.key)

    def remove(self, key: str) -> None:
        """Forget a block, its file too; it may have been pushed out already."""
        block = self._blocks.pop(key, None)
        if block is None:
            return
        behind = self._behind[block.before]
        del behind[key]
        if not behind:
            del self._behind[block.before]
        for name in block.names:
            if self._names.get(name) is block:
                del self._names[name]
        self._leave(block)

    def shrink(self, wanted_bytes: int) -> int:
        """Free at least so many bytes of RAM, or all of it; returns how many. What goes is kept on
        disk where there is room. After a cancel it is freed without.
        """
        before = self.ram_bytes
        for victim in self._going(in_ram=True):
            if before - self.ram_bytes >= wanted_bytes:
                break
            try:
                self._out_of_ram(victim)
            except Cancelled:
                self._drop(victim)
        if freed := before - self.ram_bytes:
            return_memory()
        return freed

    def flush(self) -> int:
        """What lies in RAM to disk, what goes last first, until it is cancelled; returns how many
        blocks.
        """
        written = 0
        if self._folder is None:
            return written
        with contextlib.suppress(Cancelled):
            for block in reversed(self._going(in_ram=True)):
                written += self._went_to_disk(block)
        return written

    def close(self) -> None:
        """Give the RAM back. Files stay for a later load."""
        self._blocks.clear()
        self._behind.clear()
        self._names.clear()
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

    def _going(self, *, in_ram: bool) -> list[_Stored]:
        """What lies there and may go, in the order in which it does."""
        blocks = [
            block
            for block in self._blocks.values()
            if (block.path is None) == in_ram and not block.held
        ]
        return sorted(blocks, key=self._order)

    def _order(self, block: _Stored) -> tuple[int, int, int]:
        """What comes first goes first: by class, then the least recently used; of blocks that were
        used together the later positions, which mean nothing without those before.
        """
        return (self._rank(block), block.used, -block.begin)

    def _rank(self, block: _Stored) -> int:
        """Its class's, as long as that holds: nothing is kept for ever that nobody uses."""
        most = self._most_ram if block.path is None else self._most_disk
        return block.rank if self._tick - block.used <= HOLDS * most else 0

    def _room_in_ram(self, block: _Stored) -> bool:
        """Whether there is, after what comes before it went out. Where the machine has nothing to
        spare, it takes the place of others, and the store doesn't grow.
        """
        if block.size > self._most_ram:
            return False
        spare, freed = max(0, self._spare_bytes()), 0
        going: Iterator[_Stored] | None = None
        while self.ram_bytes + block.size > self._most_ram or block.size - freed > spare:
            going = going or iter(self._going(in_ram=True))
            victim = next(going, None)
            if victim is None or self._order(victim) > self._order(block):
                return False
            size = victim.size
            self._out_of_ram(victim)
            freed += size
        return True

    def _out_of_ram(self, block: _Stored) -> None:
        """To disk, or for good."""
        if not self._went_to_disk(block):
            self._drop(block)

    def _went_to_disk(self, block: _Stored) -> bool:
        """``_to_disk`` of a block that is counted as in RAM."""
        size = block.size
        written = self._to_disk(block)
        if written:
            self.ram_bytes -= size
        return written

    def _drop(self, block: _Stored) -> None:
        self.dropped += 1
        self.remove(block.key)

    def _to_disk(self, block: _Stored) -> bool:
        """Make a block that lies in RAM a file; False, and nothing changed, where it can't be."""
        if self._folder is None or block.state is None or block.header is None:
            return False
        if _checksum(block.state) != block.checksum:
            self.damaged += 1
            return False
        if not self._room_on_disk(block, file_bytes(block.header, block.state.nbytes)):
            return False
        rank = self._rank(block)  # what had lapsed in RAM has lapsed for good
        written = self._folder.write(block.header, block.state, rank, self.live())
        if written is None:
            return False
        block.rank, (block.path, block.size) = rank, written
        self.disk_bytes += block.size
        block.header = block.state = None
        return True

    def _room_on_disk(self, block: _Stored, size: int) -> bool:
        if size > self._most_disk:
            return False
        going: Iterator[_Stored] | None = None
        while self.disk_bytes + size > self._most_disk:
            going = going or iter(self._going(in_ram=False))
            victim = next(going, None)
            if victim is None or self._order(victim) > self._order(block):
                return False
            self._drop(victim)
        return True

    # --- at load

    def _index(self, folder: ColdFolder, beat: Callable[[], None]) -> None:
        """Take up what an earlier process left, the least recently used first. Damage shows when
        a file is read.
        """
        for found in sorted(folder.found(beat), key=lambda found: found.used_s):
            if found.key in self._blocks:  # of two ranks: a crash came in between
                remove(found.path)
                continue
            self._tick += 1
            self.disk_bytes += found.file_bytes
            self._add(_of_file(found, self._tick))
        for victim in self._going(in_ram=False):
            if self.disk_bytes <= self._most_disk:
                break
            beat()
            self._drop(victim)


def _of_file(found: Found, tick: int) -> _Stored:
    return _Stored(
        found.key, found.before, found.begin, found.end, None, found.rank, tick, found.file_bytes,
        path=found.path,
    )  # fmt: skip


def _checksum(state: State) -> int:
    """Of bytes in RAM, against stray writes: any one word that changes changes it. A CRC of what a
    long conversation comes back with would take several times as long.
    """
    words = state[: state.nbytes // 8 * 8].view(np.uint64)
    return int(np.add.reduce(words, dtype=np.uint64)) ^ zlib.crc32(state[words.nbytes :].data)
