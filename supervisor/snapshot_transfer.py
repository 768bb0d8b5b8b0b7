"""Snapshots as a stream of pieces: out of a folder, and into a new one, verified both ways.

The order is ``saved.json``, the record, the parts. Knows no transport and no engine; whether a
snapshot may be taken in at all is the caller's to say.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass, replace
from typing import Self

import msgspec

from modeld.shared.codec import CodecError
from modeld.shared.errors import DigestMismatch, InvalidRequest
from modeld.shared.ids import MODEL_NAME, SESSION_KEY, SNAPSHOT_ID
from modeld.shared.messages import MAX_FRAME_BYTES
from modeld.shared.sealed_file import DigestCheck, RecordTold, record_told
from modeld.supervisor.durable import fsync_dir, storage_errors
from modeld.supervisor.saved_folder import (
    FILE_NAME,
    INFO_NAME,
    MAX_INFO_BYTES,
    SavedFolder,
    SavedInfo,
    decode_info,
    encode_info,
    now_unix_ms,
)
from modeld.supervisor.saved_quota import Room
from modeld.supervisor.snapshots import PendingSnapshot, SnapshotStore

MAX_TEXT = 1024
MAX_RECORD_BYTES = MAX_FRAME_BYTES + 1024  # no worker writes a larger one
TOKEN_BYTES = 4
MAX_COUNT = 2**31 - 1
MAX_UNIX_MS = 253_402_300_799_999  # the end of the year 9999


@dataclass(frozen=True)
class Piece:
    """Bytes of one file, from ``offset`` on."""

    file: str
    offset: int
    data: bytes


def digests(info: SavedInfo) -> dict[str, str]:
    return {info.record: info.record_digest} | {part.name: part.digest for part in info.parts}


def damaged(snapshot_id: str, file: str, why: str) -> DigestMismatch:
    return DigestMismatch(
        f"Snapshot {snapshot_id} isn't what was saved: {file} {why}. Delete it, or import it again "
        "from a copy that is whole.",
        metadata={"snapshot_id": snapshot_id, "file": file},
    )


def pieces_of(folder: SavedFolder, info: SavedInfo, most_bytes: int) -> Iterator[Piece]:
    """All of a snapshot, at most ``most_bytes`` at a time. Blocks on the disk.

    Raises DigestMismatch at the end of a file that isn't what was saved.
    """
    data = encode_info(info)
    for offset in range(0, len(data), most_bytes):
        yield Piece(INFO_NAME, offset, data[offset : offset + most_bytes])
    for name, digest in digests(info).items():
        check, offset = DigestCheck(digest), 0
        try:
            with (folder.path / name).open("rb") as file:
                while data := file.read(most_bytes):
                    check.update(data)
                    yield Piece(name, offset, data)
                    offset += len(data)
        except OSError as error:
            raise damaged(info.saved_id, name, f"can't be read ({error.strerror})") from None
        if offset != info.files[name] or not check.matches():
            raise damaged(info.saved_id, name, "has other bytes than its digest names")


class IncomingSnapshot:
    """Takes pieces in the order that ``pieces_of`` gives them; blocks on the disk.

    A context manager: left without ``finish``, nothing remains. ``check`` raises for a snapshot
    that this daemon doesn't take.
    """

    def __init__(self, store: SnapshotStore, check: Callable[[SavedInfo], None]) -> None:
        self._store = store
        self._check = check
        self._stack = ExitStack()
        self._told = bytearray()  # saved.json
        self._info: SavedInfo | None = None
        self._pending: PendingSnapshot | None = None
        self._room: Room | None = None
        self._waiting: list[str] = []  # files that are still to come, the next one last
        self._name = INFO_NAME
        self._done = 0  # bytes of it
        self._fd = -1
        self._digest = DigestCheck("")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self._stack.close()

    def begin(self, snapshot_id: str, digest: str) -> None:
        """What the stream says that it brings."""
        if not SNAPSHOT_ID.match(snapshot_id):
            raise InvalidRequest.of("info.snapshot_id", snapshot_id[:64], "an exported one's")
        self._announced = (snapshot_id, digest)

    def take(self, piece: Piece) -> None:
        """Raises InvalidRequest for a piece that isn't the next one, DigestMismatch for one of
        another content, StorageFull, and what ``check`` raises.
        """
        if not FILE_NAME.match(piece.file):
            raise InvalidRequest.of("file", piece.file[:64], "the name of a snapshot's file")
        if piece.file != self._name:
            self._finish_file()
            self._begin_file(piece.file)
        if piece.offset != self._done or not piece.data:
            raise InvalidRequest.of(
                "offset",
                piece.offset,
                f"{self._done}, with at least one byte",
                f"That is how far {self._name} has come. Send each file once, from its beginning.",
            )
        self._done += len(piece.data)
        if self._info is None:
            if self._done > MAX_INFO_BYTES:
                raise self._oversized(INFO_NAME, MAX_INFO_BYTES)
            self._told += piece.data
            return
        if self._done > self._info.files[self._name]:
            raise self._oversized(self._name, self._info.files[self._name])
        self._digest.update(piece.data)
        self._write(piece.data)

    def finish(self) -> SavedInfo:
        """What is listed now: this, or what was there already with the same content."""
        self._finish_file()
        if self._waiting:
            raise self._cut(self._waiting[-1])
        assert self._info is not None
        assert self._pending is not None
        fsync_dir(self._pending.folder.path)
        return self._pending.commit(replace(self._info, used_unix_ms=now_unix_ms()))

    # --- inside ------------------------------------------------------------------------------

    def _finish_file(self) -> None:
        if self._info is None:
            self._read_info()
            return
        if self._done != self._info.files[self._name]:
            raise self._cut(self._name)
        with storage_errors(self._name, self._store.root):
            os.fsync(self._fd)
        self._close()
        if not self._digest.matches():
            raise damaged(self._info.saved_id, self._name, "has other bytes than its digest names")
        if self._name == self._info.record:
            self._info = self._as_recorded(self._info)

    def _as_recorded(self, info: SavedInfo) -> SavedInfo:
        """With the record's own window. Raises DigestMismatch where else it tells other things."""
        assert self._pending is not None
        with (self._pending.folder.path / info.record).open("rb") as file:
            data = file.read(MAX_RECORD_BYTES)
        try:
            told = record_told(data)
        except CodecError as error:
            raise damaged(info.saved_id, info.record, f"can't be read here ({error})") from None
        for name, (said, recorded) in _both(info, told).items():
            if said != recorded:
                why = f"has other {name} than {INFO_NAME} says"
                raise damaged(info.saved_id, info.record, why)
        return replace(info, window=told.window)

    def _read_info(self) -> None:
        info = decode_info(bytes(self._told), f"{INFO_NAME} of the import")
        if (info.saved_id, info.record_digest) != self._announced:
            raise InvalidRequest.of(
                "info", self._announced[0], f"what {INFO_NAME} says: {info.saved_id[:64]!r}"
            )
        _check_told(info)
        self._check(info)
        self._info = replace(info, kind="snapshot")
        self._told.clear()
        what = f"Importing snapshot {info.saved_id}"
        self._room = self._stack.enter_context(self._store.quota.room(info.size_bytes, what))
        self._pending = self._stack.enter_context(self._store.begin(info.saved_id))
        self._waiting = list(info.files)[::-1]

    def _begin_file(self, name: str) -> None:
        assert self._info is not None
        assert self._pending is not None
        if not self._waiting or name != self._waiting[-1]:
            expected = self._waiting[-1] if self._waiting else "nothing more"
            raise InvalidRequest.of("file", name, f"{expected}, after {self._name}")
        self._name, self._done = self._waiting.pop(), 0
        self._digest = DigestCheck(digests(self._info)[name])
        with storage_errors(name, self._store.root):
            path = self._pending.folder.path / name
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def _write(self, data: bytes) -> None:
        with storage_errors(self._name, self._store.root):
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]

    def _close(self) -> None:
        if self._fd >= 0:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = -1

    def _oversized(self, name: str, size: int) -> InvalidRequest:
        return InvalidRequest.of("data", f"more than {size} bytes of {name}", f"{size} bytes of it")

    def _cut(self, name: str) -> DigestMismatch:
        assert self._info is not None
        done = self._done if name == self._name else 0
        return DigestMismatch(
            f"The import ended early: of {name} {done} of {self._info.files[name]} bytes came. "
            "Nothing was kept. Send all of the export.",
            metadata={"file": name, "received_bytes": done},
        )


def _both(info: SavedInfo, told: RecordTold) -> dict[str, tuple[object, object]]:
    """What a snapshot's info and its record both tell."""
    identity = info.identity
    return {
        "identity": (
            (identity.backend, identity.kv_digest, identity.prompt_format),
            (told.backend, told.kv_digest, told.prompt_format),
        ),
        "counts": (
            (info.tokens, info.seen_tokens, info.turns),
            (len(told.token_ids) // TOKEN_BYTES, told.seen_tokens, len(told.turns)),
        ),
        "parts": (
            [astuple(p) for p in info.parts],
            [msgspec.structs.astuple(p) for p in told.parts],
        ),
        "exactness": ((info.exact, info.exact_reason), (told.exact, told.exact_reason)),
    }


def _check_told(info: SavedInfo) -> None:
    """What is shown, looked for and sent again: only such as a save gives. Nothing else covers it,
    and what no answer can carry would be in the way of every list.
    """
    names_ok = MODEL_NAME.match(info.model) and SNAPSHOT_ID.match(info.saved_id)
    key_ok = not info.session_key or SESSION_KEY.match(info.session_key)
    identity = [text for text in astuple(info.identity) if isinstance(text, str)]
    texts = (info.label, info.exact_reason, info.k_type, info.v_type, *identity)
    texts_ok = all(t.isprintable() and len(t) <= MAX_TEXT for t in texts)
    if not (names_ok and key_ok and texts_ok and info.overflow in ("refuse", "evict")):
        raise InvalidRequest.of(
            INFO_NAME, info.saved_id[:64], "names and texts as a snapshot has them"
        )
    counts = (info.tokens, info.seen_tokens, info.window, info.turns)
    timed = 0 <= info.created_unix_ms <= MAX_UNIX_MS and 0 <= info.seconds < math.inf
    if not timed or not all(0 <= count <= MAX_COUNT for count in counts):
        raise InvalidRequest.of(
            INFO_NAME, info.saved_id[:64], "counts and times as a snapshot has them"
        )
