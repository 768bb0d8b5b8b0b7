"""The header of a .safetensors file, read strictly: names, types, shapes and places of tensors.

Reads no tensor. The file is untrusted: whatever doesn't add up exactly is refused. Knows nothing
of what the tensors are for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 100_000
MAX_RANK = 8
# Bytes of an element, by the format's names.
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


class BadSafetensors(ValueError):
    """What is wrong with the file, in words that can follow its name."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's place: bytes ``begin`` to ``end`` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    data_begin: int  # bytes before the tensors
    file_bytes: int


def read_header(path: Path) -> SafetensorsHeader:
    """Raises BadSafetensors unless the tensors fill the file exactly, and OSError."""
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if file_bytes < 10 or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
            raise BadSafetensors(
                f"its header would be of {length} bytes, in a file of {file_bytes} bytes; allowed "
                f"are 2 to {MAX_HEADER_BYTES}"
            )
        text = file.read(length)
    plain = _parsed(text)
    metadata = plain.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadSafetensors("its metadata isn't a map of texts")
    if len(plain) > MAX_TENSORS:
        raise BadSafetensors(f"it has {len(plain)} tensors, more than {MAX_TENSORS}")
    begin = 8 + length
    entries = {name: _entry(name, value, begin) for name, value in plain.items()}
    at = begin
    for entry in sorted(entries.values(), key=lambda one: (one.begin, one.end)):
        if entry.begin != at:
            raise BadSafetensors(f"tensor {entry.name[:100]!r} begins at {entry.begin}, not {at}")
        at = entry.end
    if at != file_bytes:
        raise BadSafetensors(f"its tensors end at byte {at} of {file_bytes}: it is cut off or more")
    return SafetensorsHeader(entries, metadata, begin, file_bytes)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        plain = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadSafetensors(f"its header isn't JSON ({type(error).__name__})") from None
    if not isinstance(plain, dict):
        raise BadSafetensors("its header isn't a map")
    return plain


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise ValueError("a name twice")
    return plain


def _no_constant(text: str) -> Any:
    raise ValueError(text)


def _entry(name: str, value: Any, data_begin: int) -> TensorEntry:
    shown = name[:100]
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise BadSafetensors(
            f"tensor {shown!r} lacks its dtype, shape or data_offsets, or has more"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise BadSafetensors(f"tensor {shown!r} is of the unknown type {str(dtype)[:20]!r}")
    if not _sizes(shape) or len(shape) > MAX_RANK or not _sizes(offsets) or len(offsets) != 2:
        raise BadSafetensors(f"tensor {shown!r} has a bad shape or place")
    begin, end = offsets
    size = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != size:
        raise BadSafetensors(
            f"tensor {shown!r} of shape {shape} and type {dtype} takes {size} bytes, but its place "
            f"has {end - begin}"
        )
    return TensorEntry(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 48 for one in value)
