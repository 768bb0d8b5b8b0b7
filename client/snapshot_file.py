"""A snapshot as one file: a plain uncompressed tar whose first member is info.json.

The other members are the snapshot's files in the order of the daemon's stream, byte for byte.
``info.json`` is ``{"format": "modeld-snapshot", "version": 1, "snapshot": {…}}``, the last under
the names of the wire's SnapshotInfo. Knows no call; what is in the files is the daemon's business.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from google.protobuf import json_format

from modeld.client.errors import ProtocolViolation
from modeld.client.values import to_plain
from modeld.client.values_residency import Exported, SnapshotChunk, SnapshotInfo
from modeld.shared.errors import InvalidRequest, StorageFull
from modeld.v1 import session_pb2

FORMAT = "modeld-snapshot"
VERSION = 1
INFO = "info.json"
SUFFIX = ".tar"
PIECE_BYTES = 1 << 20
MAX_INFO_BYTES = 1 << 20


class SnapshotWriter:
    """Takes an export's chunks; the file is at ``path`` once all of it is on the disk.

    A ``path`` that is a folder gets a file named by the snapshot's id. A context manager: left
    without ``finish``, nothing remains. Raises InvalidRequest for a path that is taken or can't
    be written, StorageFull, and ProtocolViolation for a stream with gaps.
    """

    def __init__(self, path: str | Path, snapshot_id: str) -> None:
        target = Path(path).expanduser()
        if target.is_dir():
            target = target / f"{snapshot_id}{SUFFIX}"
        if target.exists():
            raise InvalidRequest.of("path", str(target), "a path where nothing is yet")
        self.path = target.absolute()
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        with self._written():
            self._file: BinaryIO = self._temporary.open("xb")
        self._info: SnapshotInfo | None = None
        self._name = ""
        self._begin = 0  # of the open member's header
        self._length = 0  # bytes of the open member so far

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def take(self, chunk: SnapshotChunk) -> None:
        with self._written():
            if self._info is None:
                self._begin_with(chunk.info)
            if chunk.file and chunk.file != self._name:
                self._end_member()
                self._begin_member(chunk.file)
            if not chunk.data:
                return
            if not self._name or chunk.offset != self._length:
                raise ProtocolViolation(
                    f"The export is at byte {chunk.offset} of {chunk.file or 'no file'}, after "
                    f"{self._length} bytes of {self._name or 'no file'}. Export it again."
                )
            self._file.write(chunk.data)
            self._length += len(chunk.data)

    def finish(self) -> Exported:
        if self._info is None:
            raise ProtocolViolation("The export ended before it began.")
        with self._written():
            self._end_member()
            self._file.write(bytes(2 * tarfile.BLOCKSIZE))
            size_bytes = self._file.tell()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.rename(self.path)
        return Exported(self._info, str(self.path), size_bytes)

    def _begin_with(self, info: SnapshotInfo | None) -> None:
        if info is None:
            raise ProtocolViolation("The export's first chunk says nothing of the snapshot.")
        self._info = info
        told = {"format": FORMAT, "version": VERSION, "snapshot": to_plain(info)}
        data = json.dumps(told, indent=1).encode()
        self._begin_member(INFO)
        self._file.write(data)
        self._length = len(data)
        self._end_member()

    def _begin_member(self, name: str) -> None:
        self._name, self._begin, self._length = name, self._file.tell(), 0
        self._file.write(_header(name, 0))

    def _end_member(self) -> None:
        """Its length is known only now: pad it, and write the header again."""
        if not self._name:
            return
        self._file.write(bytes(-self._length % tarfile.BLOCKSIZE))
        end = self._file.tell()
        self._file.seek(self._begin)
        self._file.write(_header(self._name, self._length))
        self._file.seek(end)
        self._name = ""

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageFull(
                    f"No space left to export the snapshot to {self.path}: nothing was kept. "
                    "Free some space, or name a path on another disk.",
                    metadata={"path": self.path},
                ) from None
            why = error.strerror or str(error)
            raise InvalidRequest.of(
                "path", str(self.path), "a path that can be written", f"({why})"
            ) from None


def _header(name: str, size_bytes: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size = size_bytes
    header = info.tobuf(tarfile.GNU_FORMAT)
    if len(header) != tarfile.BLOCKSIZE or "/" in name:
        raise ProtocolViolation(f"The export names a file that can't be one of it: {name!r}.")
    return header


def read_chunks(source: BinaryIO) -> Iterator[session_pb2.SnapshotChunk]:
    """An exported file as the chunks of an import, read as they are taken.

    Raises InvalidRequest for what isn't an exported snapshot, is cut off wherever, or goes on
    behind its end: the last chunk is given once the whole file was seen to be one. Which files
    there must be, and in which order, the daemon knows.
    """
    try:
        header = _member(source)
        if header is None or header.name != INFO or not 0 < header.size <= MAX_INFO_BYTES:
            raise _refused(f"its first member isn't {INFO}")
        info: session_pb2.SnapshotInfo | None = _info_of(b"".join(_content(source, header.size)))
        last: session_pb2.SnapshotChunk | None = None
        while (header := _member(source)) is not None:
            offset = 0
            for data in _content(source, header.size):
                if last is not None:
                    yield last
                last = session_pb2.SnapshotChunk(
                    info=info, file=header.name, offset=offset, data=data
                )
                info, offset = None, offset + len(data)
        if last is None:
            raise _refused("it has no files")
        yield last
    except (tarfile.TarError, ValueError, OverflowError) as error:
        # ValueError: a header's field that is no number, or a name that isn't text.
        raise _refused(str(error) or type(error).__name__) from None
    except OSError as error:
        raise _refused(error.strerror or str(error)) from None


def _member(source: BinaryIO) -> tarfile.TarInfo | None:
    """The next member's header; None at the file's end, once that was seen to be one."""
    block = _exactly(source, tarfile.BLOCKSIZE)
    if any(block):
        header = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or "/" in header.name:
            raise _refused(f"it has {header.name!r}, which is no file of a snapshot")
        return header
    rest = _exactly(source, tarfile.BLOCKSIZE)
    while rest:
        if rest.strip(b"\0"):
            raise _refused("it goes on behind its end")
        rest = source.read(PIECE_BYTES)  # zeros: other programs fill up what they write
    return None


def _content(source: BinaryIO, size: int) -> Iterator[bytes]:
    """A member's bytes, in pieces; one that is empty for an empty member."""
    for at in range(0, max(1, size), PIECE_BYTES):
        yield _exactly(source, min(size - at, PIECE_BYTES))
    if any(_exactly(source, -size % tarfile.BLOCKSIZE)):
        raise _refused("it has something between its files")


def _exactly(source: BinaryIO, size: int) -> bytes:
    """A pipe may give less at a time."""
    data = b""
    while len(data) < size:
        more = source.read(size - len(data))
        if not more:
            raise _refused("it is cut off")
        data += more
    return data


def _info_of(data: bytes) -> session_pb2.SnapshotInfo:
    try:
        told: Any = json.loads(data)
        if (told["format"], told["version"]) != (FORMAT, VERSION):
            raise _refused(f"it is of format {told['format']!r}, version {told['version']!r}")
        return json_format.ParseDict(
            told["snapshot"], session_pb2.SnapshotInfo(), ignore_unknown_fields=True
        )
    except (ValueError, KeyError, TypeError, RecursionError, json_format.Error) as error:
        raise _refused(f"its {INFO} can't be read ({error})") from None


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"This isn't a whole exported snapshot: {why}. Import a file that was made by "
        "`modeld snapshots export`. Nothing was imported.",
        metadata={"field": "source", "allowed": "a file made by an export"},
    )


@contextlib.contextmanager
def opened(source: str | Path | BinaryIO) -> Iterator[BinaryIO]:
    """The file to import from; one that the caller opened stays open."""
    if not isinstance(source, (str, Path)):
        yield source
        return
    path = Path(source).expanduser()
    try:
        file = path.open("rb")
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidRequest.of(
            "source", str(path), "a file that can be read", f"({why})"
        ) from None
    with file:
        yield file
