"""The file that holds a range of a session's KV: its format, written whole or not at all.

Owns the header, its checks and how storage failures become typed errors. Knows no engine and no
session: payloads are the engine's own bytes, which are kept and never looked into.

The layout is the state's of ``shared/sealed_file.py``; its header is a ``StateHeader``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
)
from modeld.shared.sealed_file import MAX_HEADER_BYTES, SHA_BYTES, STATE_MAGIC, STATE_NUMBERS
from modeld.shared.sealed_file import Chunk as Chunk
from modeld.workers.new_files import PARTIAL_SUFFIX as PARTIAL_SUFFIX
from modeld.workers.new_files import (
    PIECE_BYTES,
    Live,
    NewFiles,
    begin_writing,
    nobody,
    write_all,
)
from modeld.workers.regular_file import opened

if TYPE_CHECKING:
    from modeld.workers.engine import State

Tokens = NDArray[np.int32]

VERSION = 1
CHAIN_TOKENS = 32  # a step of the chained hash
_PREAMBLE_BYTES = STATE_NUMBERS.size + SHA_BYTES
_ALIGN = 64
_BESIDE = 2  # threads that hash, read and write beside the engine's
_AHEAD = 3  # chunks in memory while a state is read
_WIDEST = 2**64 - 1


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
    chunks: tuple[Chunk, ...]


def token_chain(kv_digest: str, tokens: Tokens) -> str:
    """SHA-256 hex that names the KV of ``tokens``: each step's hash covers the one before.

    It begins with the hash of ``kv_digest``; a step takes CHAIN_TOKENS ids, the last what is left.
    """
    return token_chains(kv_digest, tokens, (len(tokens),))[0]


def token_chains(kv_digest: str, tokens: Tokens, ends: Iterable[int]) -> list[str]:
    """``token_chain`` of the first tokens up to each of ``ends``, which rise."""
    link = hashlib.sha256(kv_digest.encode()).digest()
    raw = memoryview(tokens.astype("<i4", copy=False).tobytes())
    at, chains = 0, []
    for end in ends:
        while at + CHAIN_TOKENS <= end:
            link = hashlib.sha256(link + raw[4 * at : 4 * (at + CHAIN_TOKENS)]).digest()
            at += CHAIN_TOKENS
        rest = raw[4 * at : 4 * end]
        chains.append((hashlib.sha256(link + rest).digest() if rest else link).hex())
    return chains


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
    path: Path,
    header: StateHeader,
    most_chunks: int,
    parts: Iterable[tuple[int, State]],
    live: Live = nobody,
) -> Written:
    """Write ``parts``, each with the position that it ends at, in at most ``most_chunks`` chunks.

    The file appears under its name when all of it is on the disk, or not at all: whatever is
    raised, by ``parts`` too, nothing is left. Raises StorageFull, and InvalidRequest for a path
    that can't be written.
    """
    with NewFiles(path.parent, live) as files:
        _, written = files.add(
            lambda fd: fill_state(fd, header, most_chunks, parts, live), lambda _: path.name
        )
        files.keep()
    return written


def fill_state(
    fd: int,
    header: StateHeader,
    most_chunks: int,
    parts: Iterable[tuple[int, State]],
    live: Live = nobody,
) -> Written:
    """What ``write_state`` writes, into an empty file.

    The payload first, then what describes it, into the room that was left for it. While the next
    chunk is made, the one before is hashed and written.
    """
    offset = _payload_offset(header, most_chunks)
    os.lseek(fd, offset, os.SEEK_SET)
    chunks: list[Chunk] = []
    with ThreadPoolExecutor(_BESIDE, thread_name_prefix="state") as beside:
        leaving: tuple[int, int, Future[bytes], Future[None]] | None = None
        for end, state in parts:
            if leaving is not None:
                chunks.append(_left(*leaving))
            view = state.data.cast("B")
            hashing, writing = (
                beside.submit(_sha256, view),
                beside.submit(_write_chunk, fd, view, live),
            )
            leaving = end, view.nbytes, hashing, writing
        if leaving is not None:
            chunks.append(_left(*leaving))
    if not 0 < len(chunks) <= most_chunks:
        raise ValueError(f"{len(chunks)} chunks, there is room for 1 to {most_chunks}")
    payload = sum(chunk.size for chunk in chunks)
    encoded = canonical(msgspec.structs.replace(header, payload_bytes=payload, chunks=chunks))
    numbers = STATE_NUMBERS.pack(STATE_MAGIC, VERSION, len(encoded), offset)
    described = encoded.ljust(offset - _PREAMBLE_BYTES, b"\0")
    digest = hashlib.sha256(numbers + described)
    os.lseek(fd, 0, os.SEEK_SET)
    write_all(fd, memoryview(numbers + digest.digest() + described))
    return Written(offset + payload, payload, digest.hexdigest(), tuple(chunks))


def _left(end: int, size: int, hashing: Future[bytes], writing: Future[None]) -> Chunk:
    writing.result()
    return Chunk(end, size, hashing.result())


def _sha256(view: memoryview) -> bytes:
    return hashlib.sha256(view).digest()


def _write_chunk(fd: int, view: memoryview, live: Live) -> None:
    write_all(fd, view, live)
    begin_writing(fd)


def _payload_offset(header: StateHeader, most_chunks: int) -> int:
    """Behind the longest header that so many chunks can make."""
    widest = Chunk(_WIDEST, _WIDEST, bytes(SHA_BYTES))
    longest = msgspec.structs.replace(header, payload_bytes=_WIDEST, chunks=[widest] * most_chunks)
    size = _PREAMBLE_BYTES + len(canonical(longest))
    return -(-size // _ALIGN) * _ALIGN


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

    def parts(
        self, spare_bytes: Callable[[], int], live: Live = nobody
    ) -> Iterator[tuple[int, State]]:
        """Each chunk's end and bytes, verified; one is in memory at a time.

        Raises DigestMismatch, Cancelled, and InsufficientMemory where there is none for a chunk.
        """
        for place in self.places():
            yield place.end, place.verified(_buffer(place.size, spare_bytes), live)

    def places(self) -> Iterator[Place]:
        """Where each chunk lies."""
        offset = self._offset
        for number, chunk in enumerate(self.header.chunks):
            yield Place(self._fd, offset, number, chunk)
            offset += chunk.size


@dataclass(frozen=True)
class Place:
    """Where a chunk lies in an open file."""

    fd: int
    offset: int
    number: int
    chunk: Chunk

    @property
    def end(self) -> int:
        return self.chunk.end

    @property
    def size(self) -> int:
        return self.chunk.size

    def verified(self, state: State, live: Live) -> State:
        """The chunk, read into ``state`` of its size; raises DigestMismatch and Cancelled."""
        if _read_into(self.fd, state.data, self.offset, live) != self.size:
            raise _damaged("it ends before its payload does")
        if hashlib.sha256(state.data).digest() != self.chunk.sha256:
            raise _damaged(f"chunk {self.number} of its payload isn't what was written")
        return state


def read_ahead(
    files: Sequence[StateFile], spare_bytes: Callable[[], int], live: Live = nobody
) -> Generator[tuple[int, State], None, None]:
    """Each chunk's end and bytes, of one file after the other, verified. While one is used, the
    next ones are read and verified, as far as there is memory for them. Close it before the files.

    Raises as ``StateFile.parts``.
    """
    places = [place for file in files for place in file.places()]
    with ThreadPoolExecutor(_BESIDE, thread_name_prefix="state") as beside:
        coming: deque[Future[State]] = deque()
        begun = 0
        for number, place in enumerate(places):
            while begun < len(places) and begun < number + _AHEAD:
                try:
                    state = _buffer(places[begun].size, spare_bytes)
                except InsufficientMemory:
                    if not coming:
                        raise
                    break
                coming.append(beside.submit(places[begun].verified, state, live))
                begun += 1
            yield place.end, coming.popleft().result()


@contextlib.contextmanager
def open_state(given: str) -> Iterator[StateFile]:
    """Open and verify all but the payload.

    Raises InvalidRequest for a path that can't be read, SnapshotNotFound where there is nothing,
    DigestMismatch for a file that is damaged or another kind's, ManifestMismatch for another
    version's.
    """
    with opened(_checked_path(given), "path") as (fd, file_bytes):
        yield _opened(fd, file_bytes)


def _opened(fd: int, file_bytes: int) -> StateFile:
    numbers, sealed = _read(fd, STATE_NUMBERS.size, 0), _read(fd, SHA_BYTES, STATE_NUMBERS.size)
    if len(sealed) != SHA_BYTES or not numbers.startswith(STATE_MAGIC):
        raise _damaged("it doesn't begin as one")
    _, version, size, offset = STATE_NUMBERS.unpack(numbers)
    if version != VERSION:
        raise ManifestMismatch(
            f"The file is of version {version} of the state's format; this worker reads version "
            f"{VERSION}. Send its prompt again.",
            metadata={
                "reason": "identity", "field": "version", "asserted": version, "actual": VERSION,
            },
        )  # fmt: skip
    room = offset - _PREAMBLE_BYTES
    if not 0 < size <= room <= MAX_HEADER_BYTES or offset > file_bytes:
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


def _read_into(fd: int, view: memoryview, offset: int, live: Live = nobody) -> int:
    done = 0
    while done < len(view):
        live()
        try:
            got = os.preadv(fd, [view[done : done + PIECE_BYTES]], offset + done)
        except OSError as error:
            raise _damaged(f"it can't be read ({error.strerror})") from None
        if not got:
            break
        done += got
    return done


def _damaged(what: str) -> DigestMismatch:
    return DigestMismatch(
        f"The file doesn't hold a session's state as it was written: {what}. Nothing was changed. "
        "Send its prompt again.",
        metadata={"cause": "state_file"},
    )
