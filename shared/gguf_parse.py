"""A bounded, streaming parser of a GGUF file's header: metadata, array lengths, tensor infos.

Arrays are hopped over, not built; every count and length is checked against a limit and the
file's size before anything is allocated. Knows the format, and nothing of model families.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from modeld.shared.errors import ModelLoadFailed
from modeld.shared.gguf_types import TENSOR_TYPES

MAX_HEADER_BYTES = 128 * 1024 * 1024
MAX_KEPT_BYTES = 8 * 1024 * 1024  # strings and small arrays kept as values
MAX_METADATA_KEYS = 10_000
MAX_TENSORS = 20_000  # the biggest models have 2,000, old ones with an expert a tensor 12,000
MAX_KEY_BYTES = 65_535
MAX_NAME_BYTES = 128
MAX_STRING_BYTES = 64 * 1024 * 1024  # longer ones are refused
MAX_KEPT_STRING_BYTES = 1024 * 1024  # longer ones are hopped over
MAX_ARRAY_ELEMENTS = 4 * 1024 * 1024
MAX_KEPT_ELEMENTS = 4096  # numbers in an array that is kept
MAX_STRINGS = 1_000_000  # in all arrays together; the biggest vocabularies need 800,000
MAX_DIMENSIONS = 4
MAX_COUNT = 2**32 - 1  # the engine holds counts and lengths in 32 bits
TOKENS_KEY = "tokenizer.ggml.tokens"
_CHUNK_BYTES = 256 * 1024

_STRING, _ARRAY = 8, 9
# GGUF value type → struct code of a scalar.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_U64 = struct.Struct("<Q")

Scalar = int | float | bool | str
Value = Scalar | tuple[int | float | bool, ...]


class ArrayInfo(NamedTuple):
    length: int
    offset: int  # bytes from the file's begin to the first element
    strings: bool
    distinct: int = -1  # different strings among them; -1: not counted


class TensorInfo(NamedTuple):
    name: str
    dimensions: tuple[int, ...]
    type_number: int
    offset: int  # bytes from the begin of the data section


@dataclass
class Parsed:
    """What was read. ``end`` is the offset of the first byte after the tensor infos."""

    version: int
    file_bytes: int
    metadata: dict[str, Value] = field(default_factory=dict)
    arrays: dict[str, ArrayInfo] = field(default_factory=dict)
    tensors: list[TensorInfo] = field(default_factory=list)
    strings: int = 0  # in all arrays together
    end: int = 0


def refuse(what: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"Not a usable GGUF file: {what}. Fetch or convert the file again.",
        metadata={"cause": "header"},
    )


class HeaderBytes:
    """The header's bytes, read in big chunks; no step goes past the file or the limit."""

    def __init__(self, file: BinaryIO, file_bytes: int, begin: int = 0) -> None:
        self._file = file
        self._file_bytes = file_bytes
        self._buffer = b""
        self._base = begin  # file offset of the buffer's begin
        self._at = 0  # offset in the buffer
        file.seek(begin)

    @property
    def offset(self) -> int:
        return self._base + self._at

    def _check(self, count: int, what: str) -> None:
        end = self.offset + count
        if end > self._file_bytes:
            raise refuse(
                f"it is truncated: {what} needs bytes {self.offset}..{end}, "
                f"the file has {self._file_bytes}"
            )
        if end > MAX_HEADER_BYTES:
            raise refuse(f"its header is longer than {MAX_HEADER_BYTES} bytes")

    def _need(self, count: int, what: str) -> None:
        have = len(self._buffer) - self._at
        if have >= count:
            return
        self._check(count, what)
        rest = self._buffer[self._at :]
        self._base, self._at = self.offset, 0
        self._buffer = rest + self._file.read(max(count - len(rest), _CHUNK_BYTES))
        if len(self._buffer) < count:
            raise refuse(f"it shrank while {what} was read")

    def scalar(self, code: str, what: str) -> int | float | bool:
        form = struct.Struct("<" + code)
        self._need(form.size, what)
        (value,) = form.unpack_from(self._buffer, self._at)
        self._at += form.size
        return value  # type: ignore[no-any-return]

    def integer(self, code: str, what: str, most: int) -> int:
        value = int(self.scalar(code, what))
        if value > most:
            raise refuse(f"{what} is {value}, more than {most}")
        return value

    def raw(self, count: int, what: str) -> bytes:
        self._need(count, what)
        value = self._buffer[self._at : self._at + count]
        self._at += count
        return value

    def skip(self, count: int, what: str) -> None:
        if self._at + count <= len(self._buffer):
            self._at += count
            return
        self._check(count, what)
        self._base, self._at, self._buffer = self.offset + count, 0, b""
        self._file.seek(self._base)

    def hop_strings(
        self, count: int, what: str, take: Callable[[bytes], object] | None = None
    ) -> None:
        """Hop over ``count`` length-prefixed strings, giving each to ``take`` if there is one."""
        unpack = _U64.unpack_from
        while count:
            buffer, at, end = self._buffer, self._at, len(self._buffer)
            for hopped in range(count):  # the hottest loop: once for each token and merge
                after = at + 8 + unpack(buffer, at)[0] if at + 8 <= end else end + 1
                if after > end:
                    count -= hopped
                    break
                if take is not None:
                    take(buffer[at + 8 : after])
                at = after
            else:
                count = 0
            self._at = at
            if count:  # one that the buffer doesn't hold whole: the checked way
                most = MAX_STRING_BYTES if take is None else MAX_KEPT_STRING_BYTES
                length = self.integer("Q", f"a string of {what}", most)
                if take is None:
                    self.skip(length, what)
                else:
                    take(self.raw(length, what))
                count -= 1
                self._need(min(8, self._file_bytes - self.offset), what)


def parse(file: BinaryIO, file_bytes: int) -> Parsed:
    """Read the header. Raises ModelLoadFailed saying what is wrong with it."""
    reader = HeaderBytes(file, file_bytes)
    if reader.raw(4, "the magic") != b"GGUF":
        raise refuse("it doesn't begin with the GGUF magic")
    version = int(reader.scalar("I", "the version"))
    if version not in (2, 3):
        kind = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
        raise refuse(f"it is {kind}, and only little-endian versions 2 and 3 are read")
    tensors = reader.integer("Q", "the number of tensors", MAX_TENSORS)
    keys = reader.integer("Q", "the number of metadata keys", MAX_METADATA_KEYS)
    parsed = Parsed(version=version, file_bytes=file_bytes)
    kept = 0
    for _ in range(keys):
        kept += _read_pair(reader, parsed)
        if kept > MAX_KEPT_BYTES:
            raise refuse(f"its metadata values take more than {MAX_KEPT_BYTES} bytes")
    names: set[str] = set()
    for _ in range(tensors):
        tensor = _read_tensor(reader)
        if tensor.name in names:
            raise refuse(f"tensor {tensor.name!r} is there twice")
        names.add(tensor.name)
        parsed.tensors.append(tensor)
    parsed.end = reader.offset
    return parsed


def _text(reader: HeaderBytes, what: str, most: int) -> str:
    raw = reader.raw(reader.integer("Q", f"the length of {what}", most), what)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise refuse(f"{what} is not valid UTF-8") from None


def _read_pair(reader: HeaderBytes, parsed: Parsed) -> int:
    """Read one key and value; answers roughly how many bytes are kept for it."""
    key = _text(reader, "a metadata key", MAX_KEY_BYTES)
    if key in parsed.metadata or key in parsed.arrays:
        raise refuse(f"metadata key {key[:100]!r} is there twice")
    kind = int(reader.scalar("I", f"the type of {key[:100]!r}"))
    if kind == _ARRAY:
        return len(key) + _read_array(reader, parsed, key)
    if kind == _STRING:
        length = reader.integer("Q", f"the length of {key[:100]!r}", MAX_STRING_BYTES)
        if length > MAX_KEPT_STRING_BYTES:
            reader.skip(length, f"{key[:100]!r}")
            return len(key)
        raw = reader.raw(length, f"{key[:100]!r}")
        try:
            parsed.metadata[key] = raw.decode()
        except UnicodeDecodeError:
            raise refuse(f"the value of {key[:100]!r} is not valid UTF-8") from None
        return len(key) + length
    if kind not in _SCALARS:
        raise refuse(f"metadata key {key[:100]!r} has the unknown type {kind}")
    parsed.metadata[key] = reader.scalar(_SCALARS[kind], f"{key[:100]!r}")
    return len(key) + 8


def _read_array(reader: HeaderBytes, parsed: Parsed, key: str) -> int:
    shown = repr(key[:100])
    kind = int(reader.scalar("I", f"the element type of {shown}"))
    length = reader.integer("Q", f"the length of {shown}", MAX_ARRAY_ELEMENTS)
    parsed.arrays[key] = ArrayInfo(length, reader.offset, kind == _STRING)
    if kind == _STRING:
        parsed.strings += length
        if parsed.strings > MAX_STRINGS:
            raise refuse(f"its arrays hold more than {MAX_STRINGS} texts")
        if key == TOKENS_KEY:  # counted in passing: reading them again would take as long
            distinct: set[bytes] = set()
            reader.hop_strings(length, shown, distinct.add)
            parsed.arrays[key] = parsed.arrays[key]._replace(distinct=len(distinct))
        else:
            reader.hop_strings(length, shown)
        return 0
    if kind == _ARRAY:
        raise refuse(f"{shown} is an array of arrays, which no model needs")
    if kind not in _SCALARS:
        raise refuse(f"{shown} has elements of the unknown type {kind}")
    form = struct.Struct(f"<{length}{_SCALARS[kind]}")
    if length > MAX_KEPT_ELEMENTS:
        reader.skip(form.size, shown)
        return 0
    parsed.metadata[key] = form.unpack(reader.raw(form.size, shown))
    return length * 8


def _read_tensor(reader: HeaderBytes) -> TensorInfo:
    name = _text(reader, "a tensor's name", MAX_NAME_BYTES)
    rank = reader.integer("I", f"the rank of tensor {name!r}", MAX_DIMENSIONS)
    most = 2**62
    dimensions = tuple(
        reader.integer("Q", f"a dimension of tensor {name!r}", most) for _ in range(rank)
    )
    type_number = int(reader.scalar("I", f"the type of tensor {name!r}"))
    offset = reader.integer("Q", f"the offset of tensor {name!r}", most)
    return TensorInfo(name, dimensions, type_number, offset)


def tensor_size(tensor: TensorInfo) -> int:
    """Bytes of one tensor. Raises ModelLoadFailed for an unknown type or a broken row."""
    kind = TENSOR_TYPES.get(tensor.type_number)
    if kind is None:
        raise refuse(f"tensor {tensor.name!r} has the unknown type {tensor.type_number}")
    elements = 1
    for dimension in tensor.dimensions:
        elements *= dimension
    row = tensor.dimensions[0] if tensor.dimensions else 1
    if row % kind.block:
        raise refuse(
            f"tensor {tensor.name!r} has rows of {row} elements, "
            f"which {kind.name} stores in blocks of {kind.block}"
        )
    return elements // kind.block * kind.block_bytes


def read_string(file: BinaryIO, file_bytes: int, array: ArrayInfo, index: int) -> str:
    """One element of a string array; invalid UTF-8 becomes replacement characters."""
    reader = HeaderBytes(file, file_bytes, array.offset)
    reader.hop_strings(index, "a string array")
    length = reader.integer("Q", "a string's length", MAX_KEPT_STRING_BYTES)
    return reader.raw(length, "a string").decode(errors="replace")


def repeated_string(file: BinaryIO, file_bytes: int, array: ArrayInfo) -> tuple[int, str] | None:
    """The first element of a string array that was there before, with its index."""
    if array.distinct == array.length:
        return None
    seen: set[bytes] = set()
    found: list[tuple[int, str]] = []
    index = 0

    def compare(text: bytes) -> None:
        nonlocal index
        if text and text in seen and not found:  # the engine names empty ones itself
            found.append((index, text.decode(errors="replace")))
        seen.add(text)
        index += 1

    HeaderBytes(file, file_bytes, array.offset).hop_strings(array.length, "a string array", compare)
    return found[0] if found else None
