"""The files of a saved session, as far as their digests reach: what seals which bytes.

Owns the layouts' numbers and the check of a whole file as its bytes go by. Knows nothing of what is
sealed, and opens no file.

Numbers are little-endian. A state, which holds KV:

- preamble: magic ``modeldKV``, version (u32), header bytes (u32), payload offset (u64), and the
  SHA-256 of those numbers and all that follows up to the payload
- header: MessagePack with ``chunks``, padded with zeros up to the payload
- payload: the chunks that the header lists, one after the other, and nothing behind them

A record: magic ``modeldSR``, version (u32), bytes of the body (u64), the SHA-256 of those numbers
and the body, and the body.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from modeld.shared.codec import CodecError, decode_struct
from modeld.shared.messages import SavedPart

STATE_MAGIC, RECORD_MAGIC = b"modeldKV", b"modeldSR"
STATE_NUMBERS = struct.Struct("<8sIIQ")
RECORD_NUMBERS = struct.Struct("<8sIQ")
SHA_BYTES = 32
MAX_HEADER_BYTES = 64 * 1024 * 1024
_MAGIC_BYTES = 8


class Chunk(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One call's worth of an engine's bytes: positions up to ``end``."""

    end: int  # tokens
    size: int  # bytes
    sha256: bytes


class _Sealed(msgspec.Struct, frozen=True):
    """Of a state's header, what says where the digests of the payload are."""

    chunks: list[Chunk]


class RecordTold(msgspec.Struct, frozen=True):
    """Of a record's body, what is told of it to whom can't read the rest."""

    backend: str
    kv_digest: str
    prompt_format: str
    window: int  # tokens
    seen_tokens: int
    turns: list[msgspec.Raw]
    token_ids: bytes  # of the tokens whose KV is saved, four bytes each
    parts: list[SavedPart]
    exact: bool
    exact_reason: str


def record_told(data: bytes) -> RecordTold:
    """From a record's bytes, whose digest was checked. Raises CodecError."""
    return decode_struct(data[RECORD_NUMBERS.size + SHA_BYTES :], RecordTold)


class DigestCheck:
    """Whether the bytes of a file are those that ``digest`` (SHA-256 hex) names, as they go by.

    The digest of a state or a record is the one it begins with, which covers every byte behind it.
    Keeps a state's header in memory, and never a payload.
    """

    def __init__(self, digest: str) -> None:
        self._digest = digest
        self._head: bytearray | None = bytearray()  # None: all of it was understood
        self._hash = hashlib.sha256()
        self._left = 0  # bytes that still belong into the hash
        self._chunks: list[Chunk] | None = None  # of a state, those to come, the next one last
        self._wrong = False

    def update(self, data: bytes) -> None:
        if self._wrong:
            return
        if self._head is None:
            self._pass(data)
            return
        self._head += data
        magic = bytes(self._head[:_MAGIC_BYTES])
        if magic == STATE_MAGIC:
            self._state(self._head)
        elif magic == RECORD_MAGIC:
            self._record(self._head)
        elif len(magic) == _MAGIC_BYTES:
            self._wrong = True

    def _record(self, head: bytearray) -> None:
        body = RECORD_NUMBERS.size + SHA_BYTES
        if len(head) >= body:
            _, _, self._left = RECORD_NUMBERS.unpack_from(head)
            self._wrong = head[RECORD_NUMBERS.size : body].hex() != self._digest
            self._hash.update(head[: RECORD_NUMBERS.size])
            self._understood(head[body:])

    def _state(self, head: bytearray) -> None:
        begin = STATE_NUMBERS.size + SHA_BYTES
        if len(head) < begin:
            return
        _, _, size, offset = STATE_NUMBERS.unpack_from(head)
        if not 0 < size <= offset - begin <= MAX_HEADER_BYTES:
            self._wrong = True
        elif len(head) >= offset:
            sealed = hashlib.sha256(head[: STATE_NUMBERS.size] + head[begin:offset]).hexdigest()
            said = head[STATE_NUMBERS.size : begin].hex()
            try:
                header = decode_struct(bytes(head[begin : begin + size]), _Sealed)
            except CodecError:
                self._wrong = True
                return
            self._wrong = not sealed == said == self._digest
            self._chunks = header.chunks[::-1]
            self._next_chunk()
            self._understood(head[offset:])

    def _understood(self, rest: bytearray) -> None:
        self._head = None
        self._pass(bytes(rest))

    def _next_chunk(self) -> None:
        self._hash = hashlib.sha256()
        self._left = self._chunks[-1].size if self._chunks else 0

    def _pass(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._wrong:
            taken = view[: max(0, self._left)]
            self._hash.update(taken)
            self._left -= len(taken)
            view = view[len(taken) :]
            if not taken:
                self._wrong = True  # more than belongs to it
            elif not self._left and self._chunks:
                self._wrong = self._hash.digest() != self._chunks.pop().sha256
                self._next_chunk()

    def matches(self) -> bool:
        """Once all has gone by: whether it was the file that the digest names."""
        if self._wrong or self._head is not None or self._left:
            return False
        return (
            not self._chunks
            if self._chunks is not None
            else (self._hash.hexdigest() == self._digest)
        )
