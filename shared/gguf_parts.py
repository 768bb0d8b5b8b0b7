"""A model in several GGUF files: finds the parts beside one of them and proves that they fit.

Knows how split sets are named and what their parts say of themselves; nothing of models.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from modeld.shared.errors import ModelLoadFailed
from modeld.shared.gguf_header import GgufHeader, check_extents, read_header
from modeld.shared.gguf_parse import MAX_TENSORS, TensorInfo

MAX_PARTS = 512
_NAME = re.compile(r"(?P<stem>.+)-(?P<part>[0-9]{5})-of-(?P<parts>[0-9]{5})\.gguf", re.DOTALL)
_MERGE = (
    "Fetch all parts into one folder under their original names, or merge them into one file "
    "(`llama-gguf-split --merge`)."
)


def read_parts(path: Path, header: GgufHeader) -> tuple[GgufHeader, int, Path]:
    """Read and check all parts of the set that ``path``, whose header is given, belongs to.

    Answers the first part's header with the tensors of all, how many parts there are, and the
    first part's path. Raises ModelLoadFailed naming the file that is missing or doesn't fit.
    """
    count = header.integer("split.count")
    if not 1 < count <= MAX_PARTS:
        raise _refused(
            path, f"it says that it is one of {count} parts, and at most {MAX_PARTS} are"
        )
    paths = part_paths(path, count)
    headers = []
    for number, part in enumerate(paths):
        read = header if part == path else _read_part(part)
        _check_part(part, read, number, count)
        headers.append(read)
    tensors = _joined(paths, headers)
    declared = headers[0].integer("split.tensors.count", len(tensors))
    if declared != len(tensors):
        raise _refused(
            paths[0], f"its set holds {len(tensors)} tensors in {count} parts, it says {declared}"
        )
    whole = replace(
        headers[0], tensors=tensors, file_bytes=sum(part.file_bytes for part in headers)
    )
    return whole, count, paths[0]


def is_part(path: Path) -> bool:
    """Whether it is named like one file of a set."""
    return _NAME.fullmatch(path.name) is not None


def set_stem(path: Path) -> str:
    """The name of the set that a part is named after; the file's own stem for any other."""
    named = _NAME.fullmatch(path.name)
    return named["stem"] if named else path.stem


def part_paths(path: Path, count: int) -> list[Path]:
    """The paths of all ``count`` parts of the set that ``path`` is one of, in order.

    Raises ModelLoadFailed where it isn't named like a part. ``count`` 1: the path itself.
    """
    if count == 1:
        return [path]
    named = _NAME.fullmatch(path.name)
    if named is None or int(named["parts"]) != count:
        raise _refused(
            path,
            f"it is one of {count} parts and isn't named like one (name-00001-of-{count:05d}.gguf)",
        )
    return [
        path.with_name(f"{named['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]


def _read_part(path: Path) -> GgufHeader:
    try:
        return read_header(path)
    except ModelLoadFailed as error:
        if error.metadata.get("cause") == "open":
            raise _refused(path, "this part of the set can't be opened") from None
        raise _refused(path, f"this part of the set is broken. {error.message}") from None


def _check_part(path: Path, header: GgufHeader, number: int, count: int) -> None:
    says = header.integer("split.count"), header.integer("split.no", -1)
    if says != (count, number):
        raise _refused(
            path,
            f"it should be part {number + 1} of {count} and says it is "
            f"part {says[1] + 1} of {says[0]}",
        )
    try:
        check_extents(header, header.file_bytes)
    except ModelLoadFailed as error:
        raise _refused(path, f"this part of the set is broken. {error.message}") from None


def _joined(paths: list[Path], headers: list[GgufHeader]) -> tuple[TensorInfo, ...]:
    tensors: list[TensorInfo] = []
    holder: dict[str, Path] = {}
    for path, header in zip(paths, headers, strict=True):
        for tensor in header.tensors:
            if tensor.name in holder:
                raise _refused(
                    path, f"tensor {tensor.name!r} is in {holder[tensor.name].name!r} too"
                )
            holder[tensor.name] = path
        tensors += header.tensors
        if len(tensors) > MAX_TENSORS:
            raise _refused(path, f"the set holds more than {MAX_TENSORS} tensors")
    return tuple(tensors)


def _refused(path: Path, why: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{path.name} can't be used: {why.removesuffix('.')}. {_MERGE}",
        metadata={"file": path.name, "cause": "parts"},
    )
