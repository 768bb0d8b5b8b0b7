"""The KV cache as a pool of blocks that sequences share by counting references.

Owns the memory of every layer's cache and which block is whose. Knows no tokens, no model and no
policy: how many blocks a sequence may have was reserved for it before.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import InsufficientMemory
from modeld.workers.openvino.native import ov

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

BLOCK_TOKENS = 32
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


@dataclass(frozen=True)
class CachePort:
    """One cache input of the compiled model: its tensor is ``[blocks, *shape]``."""

    name: str
    element_type: Any
    shape: tuple[int, ...]  # of a block

    @property
    def block_bytes(self) -> int:
        elements = int(np.prod(self.shape, dtype=np.int64))
        bits: int = elements * self.element_type.bitwidth
        return -(-bits // 8)


class BlockPool:
    """Blocks of ``BLOCK_TOKENS`` tokens over all layers.

    The tensors are address space only: memory comes as blocks are written, and goes back to the
    system when the last owner of a block drops it.
    """

    def __init__(self, ports: Sequence[CachePort], blocks: int) -> None:
        """``blocks`` is how many there can ever be. Fewer where the system gives no more address
        space; raises InsufficientMemory where it gives none.
        """
        self.block_bytes = sum(port.block_bytes for port in ports)
        self._ports = list(ports)
        while True:
            try:
                self._maps = [_reserve(port.block_bytes * blocks) for port in ports]
                break
            except OSError as error:
                blocks //= 2
                if blocks < 1:
                    raise InsufficientMemory(
                        f"No address space for a KV cache ({error.strerror}). Free memory, or "
                        "lift the limit on this process's address space (ulimit -v).",
                        metadata={"cause": "address_space", "block_bytes": self.block_bytes},
                    ) from None
        self.blocks = blocks
        self._bytes: list[Bytes] = [np.frombuffer(area, dtype=np.uint8) for area in self._maps]
        self.tensors = {
            port.name: ov.Tensor(raw, ov.Shape([blocks, *port.shape]), port.element_type)
            for port, raw in zip(ports, self._bytes, strict=True)
        }
        self.reserved = 0  # blocks promised to sequences
        self._next = 0  # the first block that was never used
        self._free: list[int] = []
        self._owners: dict[int, int] = {}

    @property
    def taken(self) -> int:
        """Blocks that hold something."""
        return len(self._owners)

    @property
    def promised_bytes(self) -> int:
        """Reserved for sequences and not written yet, in bytes."""
        return max(0, self.reserved - self.taken) * self.block_bytes

    def reserve(self, count: int) -> bool:
        """Promise ``count`` blocks to a sequence; False where there can't be so many."""
        if self.reserved + count > self.blocks:
            return False
        self.reserved += count
        return True

    def unreserve(self, count: int) -> None:
        self.reserved -= count

    def take(self) -> int:
        """A block for one owner."""
        if self._free:
            block = self._free.pop()
        else:
            block, self._next = self._next, self._next + 1
        assert block < self.blocks, "more blocks taken than were reserved"
        self._owners[block] = 1
        return block

    def share(self, block: int) -> int:
        """One owner more of a block that is only read from now on."""
        self._owners[block] += 1
        return block

    def is_shared(self, block: int) -> bool:
        return self._owners[block] > 1

    def drop(self, blocks: Sequence[int]) -> None:
        """One owner less of each; what is left without any gives its memory back to the system."""
        freed = []
        for block in blocks:
            self._owners[block] -= 1
            if not self._owners[block]:
                del self._owners[block]
                freed.append(block)
        freed.sort()
        self._free += reversed(freed)
        # Run by run: the system takes longer to be asked than to take a run of any length.
        for begin, end in _runs(freed):
            for port, area in zip(self._ports, self._maps, strict=True):
                first = -(-begin * port.block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
                last = end * port.block_bytes // mmap.PAGESIZE * mmap.PAGESIZE
                if last > first:
                    area.madvise(mmap.MADV_DONTNEED, first, last - first)

    def own(self, block: int) -> int:
        """The block itself, or a copy of it where others read it too: one that may be written."""
        if not self.is_shared(block):
            return block
        copy = self.take()
        for port, raw in zip(self._ports, self._bytes, strict=True):
            size = port.block_bytes
            raw[copy * size : (copy + 1) * size] = raw[block * size : (block + 1) * size]
        self.drop([block])
        return copy

    def read(self, blocks: Sequence[int]) -> Bytes:
        """Their bytes: port by port, and within a port block by block."""
        data = np.empty(len(blocks) * self.block_bytes, dtype=np.uint8)
        rows, begin = np.asarray(blocks, dtype=np.intp), 0
        for port, raw in zip(self._ports, self._bytes, strict=True):
            size = port.block_bytes * len(blocks)
            into = data[begin : begin + size].reshape(len(blocks), port.block_bytes)
            # Any other mode goes through a copy; the rows are this pool's own.
            raw.reshape(-1, port.block_bytes).take(rows, axis=0, out=into, mode="clip")
            begin += size
        return data

    def write(self, blocks: Sequence[int], data: Bytes) -> None:
        """What ``read`` gave of as many blocks."""
        begin = 0
        for port, raw in zip(self._ports, self._bytes, strict=True):
            size = port.block_bytes * len(blocks)
            rows = data[begin : begin + size].reshape(len(blocks), port.block_bytes)
            raw.reshape(-1, port.block_bytes)[list(blocks)] = rows
            begin += size


def _runs(ordered: Sequence[int]) -> Iterator[tuple[int, int]]:
    """``[begin, end)`` of the numbers that follow each other."""
    begin = 0
    for at in range(1, len(ordered) + 1):
        if at == len(ordered) or ordered[at] != ordered[at - 1] + 1:
            yield ordered[begin], ordered[at - 1] + 1
            begin = at


def _reserve(size: int) -> mmap.mmap:
    """Private memory that isn't there until it is touched."""
    area = mmap.mmap(-1, max(size, mmap.PAGESIZE), mmap.MAP_PRIVATE | mmap.MAP_ANON | _NORESERVE)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # Huge pages would make one block of one layer cost megabytes.
        with contextlib.suppress(OSError):
            area.madvise(mmap.MADV_NOHUGEPAGE)
    return area
