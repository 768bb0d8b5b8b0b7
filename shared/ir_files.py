"""Reading an OpenVINO folder's files without trusting them: bounded, regular files only, no DTD.

Knows what a file may be and how much of it is read, and nothing of what is in it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.parsers import expat

import msgspec

from modeld.shared.errors import ModelLoadFailed

MAX_JSON_BYTES = 4 * 1024 * 1024
MAX_XML_BYTES = 64 * 1024 * 1024
MAX_XML_DEPTH = 64
_CHUNK_BYTES = 1024 * 1024

# Called with an element's name and its attributes, and the names of the elements around it.
OnElement = Callable[[str, Mapping[str, str], "list[str]"], None]


def refused(path: Path, why: str) -> ModelLoadFailed:
    """The error for a file of a folder that can't be used."""
    return ModelLoadFailed(
        f"{path.name} can't be used as an OpenVINO model: {why}. Export or fetch the model again.",
        metadata={"file": path.name, "cause": "ir"},
    )


def open_regular(path: Path) -> tuple[int, int]:
    """A descriptor of a regular file, and its size in bytes. The caller closes it."""
    try:
        # Not blocking: a named pipe in a file's place must not hold the caller.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise refused(path, f"it can't be opened ({reason})") from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise refused(path, "it is not a regular file")
    return descriptor, status.st_size


def file_size(path: Path) -> int:
    """A regular file's size in bytes. Raises ModelLoadFailed."""
    descriptor, size = open_regular(path)
    os.close(descriptor)
    return size


def read_bounded(path: Path, most: int) -> bytes:
    """A whole file of at most ``most`` bytes. Raises ModelLoadFailed."""
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > most:
            raise refused(path, f"it has {size} bytes, and at most {most} are read")
        return file.read(most)


def read_object(path: Path, most: int = MAX_JSON_BYTES) -> Mapping[str, Any]:
    """The object in a JSON file; empty if there is no file. Raises ModelLoadFailed."""
    if not os.path.lexists(path):
        return {}
    try:
        value = msgspec.json.decode(read_bounded(path, most))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise refused(path, f"it is not JSON ({str(error)[:100]})") from None
    if not isinstance(value, dict):
        raise refused(path, "it doesn't hold a JSON object")
    return value


def read_elements(path: Path, element: OnElement, most: int = MAX_XML_BYTES) -> None:
    """Call ``element`` for each element of an XML file, in order, a part of the file at a time.

    Raises ModelLoadFailed for a file that is too large, isn't well-formed, nests deeper than
    ``MAX_XML_DEPTH`` or declares a document type (whose entities could grow without bound).
    """
    around: list[str] = []
    parser = expat.ParserCreate()

    def start(name: str, attributes: dict[str, str]) -> None:
        element(name, attributes, around)
        around.append(name)
        if len(around) > MAX_XML_DEPTH:
            raise refused(path, f"its elements nest deeper than {MAX_XML_DEPTH}")

    def end(_: str) -> None:
        around.pop()

    def doctype(*_: object) -> None:
        raise refused(path, "it declares a document type")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    descriptor, size = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if size > most:
            raise refused(path, f"it has {size} bytes, and at most {most} are read")
        left = most
        try:
            while chunk := file.read(min(_CHUNK_BYTES, left)):
                left -= len(chunk)
                parser.Parse(chunk, False)
            parser.Parse(b"", True)
        except expat.ExpatError as error:
            said = expat.ErrorString(error.code)
            raise refused(
                path, f"it is not well-formed XML (line {error.lineno}: {said})"
            ) from None
