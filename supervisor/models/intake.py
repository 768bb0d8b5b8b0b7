"""What an import checks and reads: paths, names, types, digests, the bytes themselves.

Functions only; the store decides where things go. Messages are for a person whose first import
went wrong.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from modeld.shared.errors import (
    BackendMismatch,
    DigestMismatch,
    InvalidRequest,
    UnsupportedModelType,
)
from modeld.shared.gguf_parts import set_stem
from modeld.shared.ids import check_model_name
from modeld.shared.ir_facts import is_ir

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 1024 * 1024
TYPES = ("llama", "openvino")

# Called with (stage, done_bytes, total_bytes); stages are "check", "hash", "copy". What it raises
# ends the import, which leaves nothing behind.
ImportProgress = Callable[[str, int, int], None]


def derive_name(path: Path, *, is_folder: bool = False) -> str:
    """A valid model name from a file's name. Raises InvalidRequest if nothing of it can stay."""
    stem = path.name if is_folder else set_stem(path)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:128].rstrip("-._")
    if not name:
        raise InvalidRequest.of(
            "name",
            "",
            "letters, digits, '.', '_' and '-'",
            f"None can be made from the file name {path.name!r}: give the model a name.",
        )
    return check_model_name(name)


# --- checks ----------------------------------------------------------------------------------


def _bad_path(path: Path, detail: str) -> InvalidRequest:
    allowed = "the absolute path of a GGUF file or of an OpenVINO model's folder"
    return InvalidRequest.of("path", str(path)[:1000], allowed, detail)


def _existing(path: Path) -> tuple[Path, os.stat_result]:
    """What is at ``path``, links resolved. Raises InvalidRequest."""
    if not path.is_absolute():
        raise _bad_path(path, "It is not absolute.")
    try:
        real = path.resolve(strict=True)
        return real, real.stat()
    except (FileNotFoundError, NotADirectoryError):
        near = difflib.get_close_matches(path.name, _names_in(path.parent), n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise _bad_path(path, f"There is no such file on the daemon's machine.{hint}") from None
    except (OSError, RuntimeError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise _bad_path(path, f"The system says: {said}.") from None


def check_model_source(path: Path, model_type: str) -> Path:
    """The real file or folder behind ``path``, links resolved.

    Raises InvalidRequest for what can't be a model, BackendMismatch for a folder that is to be of
    type llama.
    """
    real, status = _existing(path)
    if not stat.S_ISDIR(status.st_mode):
        return check_source(path)
    if model_type == "llama" and is_ir(real):
        raise BackendMismatch(
            f"{path.name} is an OpenVINO model's folder, and a model of type 'llama' is a GGUF "
            "file. Name that file, or import the folder as type openvino.",
            metadata={"type": "openvino", "served": "llama"},
        )
    if model_type == "openvino" or is_ir(real):
        return real
    raise _a_folder(path, real)


def _a_folder(path: Path, real: Path) -> InvalidRequest:
    files = sorted(name for name in _names_in(real) if name.endswith(".gguf"))
    hint = f": {', '.join(files[:3])}" if files else ""
    return _bad_path(path, f"It is a folder; name the .gguf file in it{hint}.")


def check_source(path: Path) -> Path:
    """The real file behind ``path``, links resolved; InvalidRequest for whatever isn't one."""

    def bad(detail: str) -> InvalidRequest:
        return _bad_path(path, detail)

    real, status = _existing(path)
    if stat.S_ISDIR(status.st_mode):
        raise _a_folder(path, real)
    if not stat.S_ISREG(status.st_mode):
        raise bad("It is not a regular file.")
    if not os.access(real, os.R_OK):
        raise bad("The daemon may not read it; check its permissions.")
    if status.st_size == 0:
        raise bad("It is empty; the download may have failed.")
    return real


def _names_in(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError:
        return []


def check_type(model_type: str) -> None:
    """Raise UnsupportedModelType for a type that there isn't; "" is by the content."""
    if model_type and model_type not in TYPES:
        raise UnsupportedModelType(
            f"There is no model type {model_type[:40]!r}: it is 'llama' (a GGUF file) or "
            "'openvino' (an exported folder, or a GGUF file to convert). Leave it out to go by "
            "the content.",
            metadata={"type": model_type, "known": ",".join(TYPES)},
        )


def check_served(model_type: str, served: Collection[str]) -> None:
    """Raise BackendMismatch for a type that this daemon doesn't run."""
    if model_type in served:
        return
    advice = f"Start it with the backend {model_type} too."
    if model_type == "openvino":
        advice = (
            f"Import the GGUF form of the model as type llama, or {advice[0].lower()}{advice[1:]}"
        )
    raise BackendMismatch(
        f"This daemon serves models of type {' and '.join(map(repr, served))}, not "
        f"{model_type!r}. {advice}",
        metadata={"type": model_type, "served": ",".join(served)},
    )


def check_digest(digest: str) -> str:
    plain = digest.lower().removeprefix("sha256:")
    if plain and not re.fullmatch(r"[0-9a-f]{64}", plain):
        raise InvalidRequest.of("expected_digest", digest[:100], "a SHA-256 of 64 hex digits")
    return plain


def check_expected(digest: str, expected: str, source: Path) -> None:
    if expected and digest != expected:
        raise DigestMismatch(
            f"{source.name} has the SHA-256 {digest}, not the expected {expected}. "
            "Get the file again, or check where the expected digest is from.",
            metadata={"digest": digest, "expected": expected},
        )


def same_file(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_size, one.st_mtime_ns, one.st_ino, one.st_dev) == (
        other.st_size,
        other.st_mtime_ns,
        other.st_ino,
        other.st_dev,
    )


# --- bytes ---


def no_progress(stage: str, done: int, total: int) -> None:
    pass


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd, os.fstat(fd)
    finally:
        os.close(fd)


def hash_file(fd: int, total: int, out: int | None, report: ImportProgress | None) -> str:
    """SHA-256 hex of ``fd``, copied to ``out`` on the way if given.

    Raises InvalidRequest if there is more than ``total`` bytes.
    """
    digest, done = hashlib.sha256(), 0
    stage = "hash" if out is None else "copy"
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    while count := os.readv(fd, [buffer]):
        digest.update(view[:count])
        written = 0
        while out is not None and written < count:
            written += os.write(out, view[written:count])
        done += count
        if done > total:  # or a file that is still being written would never end
            raise InvalidRequest(
                f"The file grew beyond {total} bytes while it was read. Import it when it is "
                "complete.",
                metadata={"field": "path"},
            )
        if report is not None:
            report(stage, done, total)
    return digest.hexdigest()


def hard_link(source: Path, target: Path) -> bool:
    """Hard-link if the system lets us (same filesystem, own or writable file)."""
    try:
        os.link(source, target)
    except OSError as error:
        log.info("%s can't be linked and is copied: %s", source.name, error.strerror)
        return False
    return True
