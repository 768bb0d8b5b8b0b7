"""The file that holds a range of a session's KV: its format, written whole or not at all.

Owns the layout, its checks and how storage failures become typed errors. Knows no engine and no
session: payloads are the engine's own bytes, which are kept and never looked into.

Layout, numbers little-endian:

- preamble: magic ``modeldKV``, version (u32), header bytes (u32), payload offset (u64), and the
  SHA-256 of those numbers and all that follows up to the payload
- header: MessagePack of ``StateHeader``, padded with zeros up to the payload
- payload: the chunks that the header lists, one after the other, and nothing behind them
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from modeld.shared.codec import CodecError, canonical, decode_struct
from modeld.shared.errors import (
    DigestMismatch,
    InsufficientMemory,
    InvalidRequest,
    ManifestMismatch,
    SnapshotNotFound,
    StorageFull,
)

if TYPE_CHECKING:
    from modeld.workers.engine import State

Tokens = NDArray[np.int32]

VERSION = 1
CHAIN_TOKENS = 32  # a step of the chained hash
PARTIAL_SUFFIX = ".partial"  # of a file that is being written; one that stays was cut by a crash
_MAGIC = b"modeldKV"
_NUMBERS = struct.Struct("<8sIIQ")
_SHA_BYTES = 32
_PREAMBLE_BYTES = _NUMBERS.size + _SHA_BYTES
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_ALIGN = 64
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_WIDEST = 2**64 - 1


class Chunk(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One call's worth of an engine's bytes: positions up to ``end``."""

    end: int  # tokens
    size: int  # bytes
    sha256: bytes


class StateHeader(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What the bytes are, and of what. Nothing in it depends on when or where it was written."""

    backend: str
    build_digest: str  # of the engine
    state_layout: str
    kv_digest: str
    runtime_digest: str
    k_type: str
    v_type: str
    begin: int  # tokens: the payload is of positions ``begin`` to ``end``
    end: int
    token_ids: bytes  # little-endian int32 of positions 0 to ``end``: what the KV was computed from
    chain_before: str  # ``token_chain`` up to ``begin``
    chain: str  # … and up to ``end``
    exact: bool  # whether the engine was seen to continue bit for bit from such bytes
    exact_reason: str
    payload_bytes: int = 0
    chunks: list[Chunk] = []

    @property
    def tokens(self) -> Tokens:
        return np.frombuffer(self.token_ids, dtype="<i4").astype(np.int32)


@dataclass(frozen=True)
class Written:
    file_bytes: int
    payload_bytes: int
    digest: str  # SHA-256 hex, as the preamble has it: of the header, which covers every chunk


def token_chain(kv_digest: str, tokens: Tokens) -> str:
    """SHA-256 hex that names the KV of ``tokens``: each step's hash covers the one before.

    It begins with the hash of ``kv_digest``; a step takes CHAIN_TOKENS ids, the last what is left.
    """
    link = hashlib.sha256(kv_digest.encode()).digest()
    raw = tokens.astype("<i4", copy=False).tobytes()
    for begin in range(0, len(raw), 4 * CHAIN_TOKENS):
        link = hashlib.sha256(link + raw[begin : begin + 4 * CHAIN_TOKENS]).digest()
    return link.hex()


# --- writing -------------------------------------------------------------------------------------


def check_target(given: str) -> Path:
    """The path of a file to write; raises InvalidRequest unless it is absolute and new, in a
    folder that exists.
    """
    path = _checked_path(given)
    if not path.parent.is_dir():
        raise InvalidRequest.of("path", given, "a file in a folder that exists")
    if os.path.lexists(path):
        raise InvalidRequest.of("path", given, "a file that doesn't exist yet")
    return path


def write_state(
    path: Path, header: StateHeader, most_chunks: int, parts: Iterable[tuple[int, State]]
) -> Written:
    """Write ``parts``, each with the position that it ends at, in at most ``most_chunks`` chunks.

    The file appears under its name when all of it is on the disk, or not at all: whatever is
    raised, by ``parts`` too, nothing is left. Raises StorageFull, and InvalidRequest for a path
    that can't be written.
    """
    partial = path.with_name(f".{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
    made: list[Path] = []
    try:
        with _storage_errors(path):
            fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            made.append(partial)
            try:
                written = _write(fd, header, most_chunks, parts)
                os.fsync(fd)
            finally:
                os.close(fd)
            # One process writes in a folder at a time, so nothing can have come by this name.
            partial.rename(path)
            made[:] = [path]
            _sync_folder(path.parent)
    except BaseException:
        for leftover in made:
            with contextlib.suppress(OSError):
                leftover.unlink()
        raise
    return written


def _write(
    fd: int, header: StateHeader, most_chunks: int, parts: Iterable[tuple[int, State]]
) -> Written:
    """The payload first, then what describes it, into the room that was left for it."""
    offset = _payload_offset(header, most_chunks)
    os.lseek(fd, offset, os.SEEK_SET)
    chunks: list[Chunk] = []
    for end, state in parts:
        view = state.data.cast("B")
        chunks.append(Chunk(end, view.nbytes, hashlib.sha256(view).digest()))
        _write_all(fd, view)
    if not 0 < len(chunks) <= most_chunks:
        raise ValueError(f"{len(chunks)} chunks, there is room for 1 to {most_chunks}")
    payload = sum(chunk.size for chunk in chunks)
    encoded = canonical(msgspec.structs.replace(header, payload_bytes=payload, chunks=chunks))
    numbers = _NUMBERS.pack(_MAGIC, VERSION, len(encoded), offset)
    described = encoded.ljust(offset - _PREAMBLE_BYTES, b"\0")
    digest = hashlib.sha256(numbers + described)
    os.lseek(fd, 0, os.SEEK_SET)
    _write_all(fd, memoryview(numbers + digest.digest() + described))
    return Written(offset + payload, payload, digest.hexdigest())


def _payload_offset(header: StateHeader, most_chunks: int) -> int:
    """Behind the longest header that so many chunks can make."""
    widest = Chunk(_WIDEST, _WIDEST, bytes(_SHA_BYTES))
    longest = msgspec.structs.replace(header, payload_bytes=_WIDEST, chunks=[widest] * most_chunks)
    size = _PREAMBLE_BYTES + len(canonical(longest))
    return -(-size // _ALIGN) * _ALIGN


def _write_all(fd: int, view: memoryview) -> None:
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull(
                f"No space left to write a session's state to {path}: nothing of it was left. "
                "Free some space on that filesystem and try again.",
                metadata={"path": path},
            ) from None
        raise InvalidRequest.of(
            "path", str(path), "a file that can be written", f"The system says: {error.strerror}."
        ) from None


def _checked_path(given: str) -> Path:
    if not given.startswith("/") or "\0" in given or not Path(given).name:
        raise InvalidRequest.of("path", given, "an absolute path of a file")
    return Path(given)


# --- reading -------------------------------------------------------------------------------------


class StateFile:
    """An open file whose header was verified. Chunks are verified as they are read."""

    def __init__(self, fd: int, header: StateHeader, offset: int, digest: str) -> None:
        self._fd, self._offset = fd, offset
        self.header = header
        self.digest = digest

    def parts(self, spare_bytes: Callable[[], int]) -> Iterator[tuple[int, State]]:
        """Each chunk's end and bytes, verified; one is in memory at a time.

        Raises DigestMismatch, and InsufficientMemory where there is none for a chunk.
        """
        offset = self._offset
        for number, chunk in enumerate(self.header.chunks):
            state = _buffer(chunk.size, spare_bytes)
            if _read_into(self._fd, state.data, offset) != chunk.size:
                raise _damaged("it ends before its payload does")
            if hashlib.sha256(state.data).digest() != chunk.sha256:
                raise _damaged(f"chunk {number} of its payload isn't what was written")
            yield chunk.end, state
            offset += chunk.size


@contextlib.contextmanager
def open_state(given: str) -> Iterator[StateFile]:
    """Open and verify all but the payload.

    Raises InvalidRequest for a path that can't be read, SnapshotNotFound where there is nothing,
    DigestMismatch for a file that is damaged or another kind's, ManifestMismatch for another
    version's.
    """
    path = _checked_path(given)
    try:
        # Without O_NONBLOCK a pipe would be waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SnapshotNotFound(f"There is no file {given}.", metadata={"path": given}) from None
    except OSError as error:
        raise _unreadable(given, error.strerror) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable(given, "it is no regular file")
        yield _opened(fd, status.st_size)
    finally:
        os.close(fd)


def _opened(fd: int, file_bytes: int) -> StateFile:
    numbers, sealed = _read(fd, _NUMBERS.size, 0), _read(fd, _SHA_BYTES, _NUMBERS.size)
    if len(sealed) != _SHA_BYTES or not numbers.startswith(_MAGIC):
        raise _damaged("it doesn't begin as one")
    _, version, size, offset = _NUMBERS.unpack(numbers)
    if version != VERSION:
        raise ManifestMismatch(
            f"The file is of version {version} of the state's format; this worker reads version "
            f"{VERSION}. Compute that state again.",
            metadata={
                "reason": "identity", "field": "version", "asserted": version, "actual": VERSION,
            },
        )  # fmt: skip
    room = offset - _PREAMBLE_BYTES
    if not 0 < size <= room <= _MAX_HEADER_BYTES or offset > file_bytes:
        raise _damaged("its header doesn't fit it")
    described = _read(fd, room, _PREAMBLE_BYTES)
    digest = hashlib.sha256(numbers + described)
    if digest.digest() != sealed:
        raise _damaged("its header isn't what was written")
    try:
        header = decode_struct(described[:size], StateHeader)
    except CodecError as error:
        raise _damaged(f"its header can't be read ({error})") from None
    _check(header, file_bytes - offset)
    return StateFile(fd, header, offset, digest.hexdigest())


def _check(header: StateHeader, payload_bytes: int) -> None:
    """That the header agrees with itself and with the file's size."""
    ends = [chunk.end for chunk in header.chunks]
    sizes = [chunk.size for chunk in header.chunks]
    rising = all(left < right for left, right in zip([header.begin, *ends], ends, strict=False))
    if not 0 <= header.begin < header.end or len(header.token_ids) != 4 * header.end:
        raise _damaged("its tokens aren't those of its range")
    if not ends or not rising or ends[-1] != header.end or min(sizes) < 1:
        raise _damaged("its chunks don't make up its range")
    if sum(sizes) != header.payload_bytes:
        raise _damaged("its chunks don't make up its payload")
    if payload_bytes != header.payload_bytes:
        raise _damaged(f"it has {payload_bytes} bytes of payload, not {header.payload_bytes}")
    tokens = header.tokens
    chains = (
        token_chain(header.kv_digest, tokens[: header.begin]),
        token_chain(header.kv_digest, tokens),
    )
    if chains != (header.chain_before, header.chain):
        raise _damaged("its chained hashes aren't those of its tokens")


def _buffer(size: int, spare_bytes: Callable[[], int]) -> State:
    spare = spare_bytes()
    if size <= spare:
        try:
            return np.empty(size, dtype=np.uint8)
        except MemoryError:
            spare = 0
    raise InsufficientMemory(
        f"Reading this state takes a buffer of {size} bytes, for which there is no memory now. "
        "Free memory and try again.",
        metadata={"needed_bytes": size, "spare_bytes": spare, "cause": "state"},
    )


def _read(fd: int, size: int, offset: int) -> bytes:
    """Fewer bytes where the file ends."""
    buffer = bytearray(size)
    return bytes(buffer[: _read_into(fd, memoryview(buffer), offset)])


def _read_into(fd: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise _damaged(f"it can't be read ({error.strerror})") from None
        if not got:
            break
        done += got
    return done


def _unreadable(given: str, why: str | None) -> InvalidRequest:
    return InvalidRequest.of("path", given, "a file that can be read", f"The system says: {why}.")


def _damaged(what: str) -> DigestMismatch:
    return DigestMismatch(
        f"The file doesn't hold a session's state as it was written: {what}. Nothing was changed. "
        "Compute that state again.",
        metadata={"cause": "state_file"},
    )
