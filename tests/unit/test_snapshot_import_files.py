"""An exported file that was cut, added to or put together anew, on its way into a data root."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from modeld.client.convert import from_proto
from modeld.client.snapshot_file import SnapshotWriter, read_chunks
from modeld.client.values_residency import SnapshotChunk, SnapshotInfo
from modeld.shared.errors import DigestMismatch, InvalidRequest, ModeldError
from modeld.supervisor.rpc.snapshot_calls import snapshot_info
from modeld.supervisor.saved_folder import SavedFolder, SavedInfo
from modeld.supervisor.saved_quota import SavedQuota
from modeld.supervisor.snapshot_transfer import IncomingSnapshot, Piece, pieces_of
from modeld.supervisor.snapshots import SnapshotStore
from tests.support.saved_files import RECORD, committed

END = bytes(2 * tarfile.BLOCKSIZE)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    root = tmp_path / "root"
    root.mkdir()
    return SnapshotStore(root, SavedQuota(root, 1 << 30))


@pytest.fixture
def exported(tmp_path: Path) -> bytes:
    """As the client writes what the daemon sends."""
    info = committed(tmp_path / "made", tokens=600)
    told = from_proto(SnapshotInfo, snapshot_info(info))
    with SnapshotWriter(tmp_path / "s.tar", info.saved_id) as writer:
        for piece in pieces_of(SavedFolder(tmp_path / "made"), info, 1000):
            writer.take(SnapshotChunk(told, piece.offset, piece.data, piece.file))
        writer.finish()
    return (tmp_path / "s.tar").read_bytes()


def imported(store: SnapshotStore, file: io.BytesIO) -> SavedInfo:
    """As the client sends a file, and the daemon takes it."""
    with IncomingSnapshot(store, lambda _info: None) as incoming:
        for chunk in read_chunks(file):
            if chunk.HasField("info"):
                incoming.begin(chunk.info.snapshot_id, chunk.info.digest)
            incoming.take(Piece(chunk.file, chunk.offset, chunk.data))
        return incoming.finish()


def refused(store: SnapshotStore, data: bytes, error: type[ModeldError]) -> str:
    with pytest.raises(error) as caught:
        imported(store, io.BytesIO(data))
    assert list(store.root.iterdir()) == []
    assert store.quota.used_bytes == 0
    with store.quota.room(store.quota.limit_bytes // 2, "a later one"):
        pass
    return str(caught.value)


def members(data: bytes) -> list[bytes]:
    """Each with its header and its padding."""
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        begins = [member.offset for member in archive]
    return [data[b:e] for b, e in zip(begins, [*begins[1:], len(data) - len(END)], strict=True)]


def test_what_was_exported_comes_in_also_filled_up_with_zeros_and_from_a_slow_pipe(
    store: SnapshotStore, exported: bytes
) -> None:
    class Pipe(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 300))

    for file in (io.BytesIO(exported + bytes(9000)), Pipe(exported)):
        assert imported(store, file).tokens == 600
        store.delete(*(entry.name for entry in store.root.iterdir()))


def test_a_file_that_ends_early_is_refused_wherever_it_was_cut(
    store: SnapshotStore, exported: bytes
) -> None:
    cut = {0, 1, 511, len(exported) - 1, len(exported) - 512, len(exported) - len(END)}
    at = 0
    for member in members(exported):
        cut |= {at, at + 512, at + 513, at + len(member) - 1}
        at += len(member)
    for length in sorted(cut):
        assert "cut off" in refused(store, exported[:length], InvalidRequest)


@pytest.mark.parametrize("garbage", [b"x", bytes(512) + b"x", b"more" * 3000])
def test_what_goes_on_behind_its_end_is_refused(
    store: SnapshotStore, exported: bytes, garbage: bytes
) -> None:
    assert "goes on behind its end" in refused(store, exported + garbage, InvalidRequest)


def test_garbage_in_the_place_of_a_header_or_of_padding_is_refused(
    store: SnapshotStore, exported: bytes
) -> None:
    info, saved, *rest = members(exported)
    refused(store, b"".join([info, saved, b"z" * 512, *rest, END]), InvalidRequest)
    assert not any(info[-1:]), "there is padding"
    refused(store, b"".join([info[:-1] + b"x", saved, *rest, END]), InvalidRequest)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda info, saved, record, *parts: [saved, record, *parts], InvalidRequest),
        (lambda info, saved, record, *parts: [info, info, saved, record, *parts], DigestMismatch),
        (lambda info, saved, record, *parts: [info, saved, saved, record, *parts], InvalidRequest),
        (lambda info, saved, record, *parts: [info, saved, record, record, *parts], InvalidRequest),
        (lambda info, saved, record, *parts: [info, saved, record, *parts, record], InvalidRequest),
        (lambda info, saved, record, *parts: [info, saved, record, *parts, saved], InvalidRequest),
        (lambda info, saved, record, *parts: [info, saved, *parts, record], InvalidRequest),
        (lambda info, saved, record, *parts: [info, record, saved, *parts], DigestMismatch),
        (lambda info, saved, record, *parts: [info, saved, record, *parts[::-1]], InvalidRequest),
        (lambda info, saved, record, *parts: [info, saved, record, *parts[1:]], InvalidRequest),
        (lambda info, saved, record, *parts: [info, saved, record, *parts[:-1]], DigestMismatch),
        (lambda info, saved, record, *parts: [info, saved, record], DigestMismatch),
        (lambda info, saved, record, *parts: [info, saved], DigestMismatch),
        (lambda info, saved, record, *parts: [info], InvalidRequest),
        (lambda info, saved, record, *parts: [], InvalidRequest),
    ],
)
def test_members_that_are_missing_there_twice_or_out_of_order_are_refused(
    store: SnapshotStore,
    exported: bytes,
    change: Callable[..., list[bytes]],
    error: type[ModeldError],
) -> None:
    parts = members(exported)
    assert len(parts) == 6
    refused(store, b"".join(change(*parts)) + END, error)


def test_a_member_that_is_no_file_is_refused(store: SnapshotStore, exported: bytes) -> None:
    info, saved, *rest = members(exported)
    link = tarfile.TarInfo(RECORD)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    told = refused(store, b"".join([info, saved, link.tobuf(), *rest, END]), InvalidRequest)
    assert "no file of a snapshot" in told
