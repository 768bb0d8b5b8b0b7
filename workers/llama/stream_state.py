"""A llama sequence's state as cells: ranges taken out, put together, and moved between contexts.

Reads and writes the engine's own bytes of one sequence of a dense cache, from a context of any
number of streams; those of one stream are the form in which states go out. Proves what it reads
by its sizes and positions, and knows no engine handle.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from modeld.workers.engine import State

_HEAD = struct.Struct("<IiI")  # magic, sequence, streams
_COUNT = struct.Struct("<I")  # of cells
_KINDS = struct.Struct("<II")  # whether values are transposed, layers
_ROWS = struct.Struct("<iQ")  # type, bytes a cell
_COLUMNS = struct.Struct("<iII")  # type, bytes an element, elements a cell
_CELL_INTS = 3  # position, number of sequences, sequence
_SEQUENCE = 1  # in what is written: the engine puts it into whichever it is told


@dataclass(frozen=True)
class _Section:
    """One layer's keys or values: rows of a cell each, or, transposed, a cell's bytes in each."""

    head: bytes
    data: NDArray[np.uint8]  # two dimensions
    cell: int  # bytes of a cell along axis 1; 0: cells are rows

    def part(self, begin: int, end: int) -> NDArray[np.uint8]:
        if self.cell:
            return self.data[:, begin * self.cell : end * self.cell]
        return self.data[begin:end]


@dataclass(frozen=True)
class Cells:
    """A sequence's cells in order of position, from ``first`` on: views of the bytes read."""

    magic: int
    transposed: int
    layers: int
    first: int
    count: int
    sections: tuple[_Section, ...]

    @property
    def bytes(self) -> int:
        return sum(section.data.nbytes for section in self.sections)

    def part(self, begin: int, end: int) -> Cells:
        """Those of positions ``begin`` to ``end``."""
        low, high = begin - self.first, end - self.first
        sections = tuple(
            _Section(section.head, section.part(low, high), section.cell)
            for section in self.sections
        )
        return Cells(self.magic, self.transposed, self.layers, begin, end - begin, sections)

    def continues(self, before: Cells) -> bool:
        """Whether these can stand behind ``before``."""
        return (
            self.first == before.first + before.count
            and (self.magic, self.transposed, self.layers)
            == (before.magic, before.transposed, before.layers)
            and [one.head for one in self.sections] == [one.head for one in before.sections]
        )


def read(state: State, streams: int) -> Cells | None:
    """The cells in a state of one sequence, from a context of so many streams; None where these
    bytes aren't that, or positions don't follow each other.
    """
    try:
        return _read(memoryview(state.data), streams)
    except (struct.error, ValueError):
        return None


def _read(raw: memoryview, streams: int) -> Cells | None:
    magic, _, written = _HEAD.unpack_from(raw)
    if written != streams:
        return None
    at, found = _HEAD.size, None
    for stream in range(streams):
        (count,) = _COUNT.unpack_from(raw, at)
        at += _COUNT.size
        if not count:
            continue
        if found is not None:
            return None
        end = len(raw) - _COUNT.size * (streams - 1 - stream)
        found = _body(raw[at:end], magic, count)
        at = end
    return found if at == len(raw) else None


def _body(raw: memoryview, magic: int, count: int) -> Cells | None:
    cells = np.frombuffer(raw, dtype="<i4", count=count * _CELL_INTS).reshape(count, _CELL_INTS)
    first = int(cells[0, 0])
    follow = np.arange(first, first + count, dtype=np.int32)
    if not np.array_equal(cells[:, 0], follow) or not (cells[:, 1] == 1).all():
        return None
    at = cells.nbytes
    transposed, layers = _KINDS.unpack_from(raw, at)
    at += _KINDS.size
    if transposed > 1:
        return None
    sections: list[_Section] = []
    while at < len(raw):
        by_column = bool(transposed) and len(sections) >= layers
        head = _COLUMNS if by_column else _ROWS
        _, size, *elements = head.unpack_from(raw, at)
        words = bytes(raw[at : at + head.size])
        at += head.size
        shape = (elements[0], count * size) if by_column else (count, size)
        length = shape[0] * shape[1]
        if not length or at + length > len(raw):
            return None
        data = np.frombuffer(raw, dtype=np.uint8, count=length, offset=at).reshape(shape)
        sections.append(_Section(words, data, size if by_column else 0))
        at += length
    if not layers <= len(sections) <= 2 * layers:
        return None
    return Cells(magic, transposed, layers, first, count, tuple(sections))


def write(parts: Sequence[Cells], streams: int) -> State:
    """The state of a sequence that holds these cells, one part behind the other, for a context of
    so many streams.
    """
    count = sum(part.count for part in parts)
    cells = np.empty((count, _CELL_INTS), dtype="<i4")
    cells[:, 0] = np.arange(parts[0].first, parts[0].first + count)
    cells[:, 1], cells[:, 2] = 1, _SEQUENCE
    one = parts[0]
    pieces: list[bytes | NDArray[np.uint8]] = [
        _HEAD.pack(one.magic, _SEQUENCE, streams) + _COUNT.pack(count),
        cells.view(np.uint8).reshape(-1),
        _KINDS.pack(one.transposed, one.layers),
    ]
    for index, section in enumerate(one.sections):
        pieces.append(section.head)
        data = [part.sections[index].data for part in parts]
        if len(data) > 1:
            pieces.append(np.concatenate(data, axis=1 if section.cell else 0))
        else:
            pieces.append(data[0])
    pieces.append(_COUNT.pack(0) * (streams - 1))
    made: State = np.empty(sum(_size(piece) for piece in pieces), dtype=np.uint8)
    at = 0
    for piece in pieces:
        size = _size(piece)
        if isinstance(piece, bytes):
            made[at : at + size] = np.frombuffer(piece, dtype=np.uint8)
        else:
            made[at : at + size].reshape(piece.shape)[...] = piece
        at += size
    return made


def _size(piece: bytes | NDArray[np.uint8]) -> int:
    return len(piece) if isinstance(piece, bytes) else piece.size
