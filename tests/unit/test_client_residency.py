"""What callers of either client can do with kept state: snapshots, restore, fork, admit."""

from __future__ import annotations

import io
import json
import logging
import tarfile
from pathlib import Path
from typing import Any

import pytest

from modeld import client as modeld
from modeld.client.snapshot_file import SnapshotWriter, read_chunks
from modeld.client.values_residency import SnapshotChunk
from modeld.shared import errors as typed
from modeld.v1 import session_pb2
from tests.support.both_clients import done
from tests.support.fake_daemon import Hangup

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "hello world"}
AGAIN = {"role": "user", "content": "again"}


async def opened(client: Any, **options: Any) -> Any:
    """A session of one question and its answer."""
    session = await done(client.open_session("tiny", **options))
    stream = session.turn([SYSTEM], [HELLO])
    await done(stream.read())
    return session, stream


async def chunks_of(client: Any, snapshot_id: str) -> list[SnapshotChunk]:
    chunks = client.snapshot_chunks(snapshot_id)
    return [c async for c in chunks] if hasattr(chunks, "__aiter__") else list(chunks)


# --- snapshot and restore ------------------------------------------------------------------------


async def test_a_snapshot_is_listed_and_restored_into_a_fresh_session_with_its_answers(
    client, daemon
):
    session, stream = await opened(client)
    info = await done(session.snapshot("before lunch"))
    assert (info.label, info.model, info.turns, info.tokens > 0) == (
        "before lunch",
        "tiny",
        1,
        True,
    )
    assert info.identity == session.identity
    listed = await done(client.list_snapshots())
    assert (listed.snapshots, listed.used_bytes) == ((info,), info.size_bytes)
    await done(session.close())

    fresh = await done(client.open_session("tiny"))
    restored = await done(fresh.restore(info.snapshot_id))
    assert (restored.snapshot, restored.tokens) == (info, info.tokens)
    assert restored.generated_turn_ids == (stream.generated_turn.turn_id,)
    # The answer is in the new session: it is referred to, not sent as text.
    await done(fresh.turn([SYSTEM, HELLO, stream.generated_turn], [AGAIN]).read())
    sent = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    assert sent.prefix.segments[2].generated_turn_id == stream.generated_turn.turn_id


async def test_an_answer_given_after_the_snapshot_goes_as_text_once_it_is_restored(client, daemon):
    session, _first = await opened(client)
    info = await done(session.snapshot())
    second = session.turn([SYSTEM], [AGAIN])
    await done(second.read())
    await done(session.restore(info.snapshot_id))
    third = session.turn([SYSTEM, AGAIN, second.generated_turn], [HELLO])
    assert await done(third.read()) == "you said: hello world"
    sent = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    assert sent.prefix.segments[2].message.content[0].text == "you said: again"
    await done(session.turn([SYSTEM, HELLO, third.generated_turn], [AGAIN]).read())
    sent = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    assert sent.prefix.segments[2].generated_turn_id == third.generated_turn.turn_id


async def test_snapshots_can_be_listed_by_model_and_deleted(client):
    session, _ = await opened(client)
    info = await done(session.snapshot())
    assert (await done(client.list_snapshots(info.identity.model_digest))).snapshots == (info,)
    assert (await done(client.list_snapshots("ff" * 32))).snapshots == ()
    assert await done(client.delete_snapshot(info.snapshot_id)) is None
    assert (await done(client.list_snapshots())).snapshots == ()
    with pytest.raises(modeld.SnapshotNotFound):
        await done(client.delete_snapshot(info.snapshot_id))


async def test_a_restore_that_is_refused_is_typed_and_the_session_goes_on(client):
    session, stream = await opened(client)
    with pytest.raises(modeld.SnapshotNotFound):
        await done(session.restore("snap-none"))
    again = session.turn([SYSTEM, HELLO, stream.generated_turn], [AGAIN])
    assert await done(again.read()) == "you said: again"


@pytest.mark.parametrize(
    "send",
    [lambda s: s.snapshot("x"), lambda s: s.fork(), lambda s: s.admit(segment=0)],
    ids=["snapshot", "fork", "admit"],
)
async def test_what_may_have_had_an_effect_is_not_sent_again_after_a_loss(client, daemon, send):
    session, _ = await opened(client, recover=True)
    for method in ("Snapshot", "Fork", "Admit"):
        daemon.world.fail(method, Hangup())
    with pytest.raises(modeld.ConnectionLost) as caught:
        await done(send(session))
    assert "not sent again" in caught.value.__notes__[0]
    kinds = (session_pb2.SnapshotRequest, session_pb2.ForkRequest, session_pb2.AdmitRequest)
    assert sum(len(daemon.world.requests_of(kind)) for kind in kinds) == 1
    assert await done(session.turn([SYSTEM], [HELLO]).read()) == "you said: hello world"


async def test_a_restore_is_sent_again_after_a_loss(client, daemon):
    session, _ = await opened(client, recover=True)
    info = await done(session.snapshot())
    daemon.world.bump()
    assert (await done(session.restore(info.snapshot_id))).tokens == info.tokens
    assert [r.cause for r in session.recoveries] == ["GENERATION_STALE"]


# --- fork ----------------------------------------------------------------------------------------


async def test_a_fork_goes_on_by_itself_with_the_answers_of_both(client, daemon):
    session, stream = await opened(client, overflow="evict")
    branch = await done(session.fork(session_key="b", durable=True))
    assert branch.handle != session.handle
    assert branch.opened.resident == len(daemon.world.sessions[session.handle.session_id].tokens)
    asked = daemon.world.requests_of(session_pb2.ForkRequest)[-1]
    assert (asked.session_key, asked.durable) == ("b", True)
    turn = stream.generated_turn
    await done(branch.turn([SYSTEM, HELLO, turn], [AGAIN]).read())
    sent = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    assert sent.prefix.segments[2].generated_turn_id == turn.turn_id
    await done(branch.close())
    assert (
        await done(session.turn([SYSTEM, HELLO, turn], [HELLO]).read()) == "you said: hello world"
    )


async def test_an_answer_that_only_one_branch_has_goes_to_the_other_as_text(client, daemon):
    session, _ = await opened(client)
    branch = await done(session.fork())
    later = session.turn([SYSTEM], [AGAIN])
    await done(later.read())
    await done(branch.turn([SYSTEM, AGAIN, later.generated_turn], [HELLO]).read())
    sent = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    assert sent.prefix.segments[2].message.content[0].text == "you said: again"


async def test_a_lost_fork_is_reopened_under_its_own_key(client, daemon):
    session, _ = await opened(client, recover=True, session_key="a", window=512)
    branch = await done(session.fork(session_key="b"))
    daemon.world.bump()
    assert await done(branch.turn([SYSTEM], [HELLO]).read()) == "you said: hello world"
    again = daemon.world.requests_of(session_pb2.OpenSessionRequest)[-1]
    assert (again.session_key, again.window, again.durable) == ("b", 512, False)


# --- admit and the numbers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "field"),
    [
        ({"segment": 0}, "segment_index"),
        ({"range": (256, 512)}, "range"),
        ({"query": "x"}, "query"),
    ],
)
async def test_admit_asks_by_segment_range_or_query(client, daemon, what, field):
    daemon.world.outside = (768, 32, 0)
    session, _ = await opened(client, overflow="evict", window=2048)
    admitted = await done(session.admit(**what, budget=300))
    assert (admitted.admitted, admitted.evicted, admitted.parked) == (256, 128, 768)
    assert admitted.ranges == (modeld.TokenRange(256, 512),)
    (asked,) = daemon.world.requests_of(session_pb2.AdmitRequest)
    assert (asked.WhichOneof("what"), asked.budget_tokens) == (field, 300)
    if field == "range":
        assert (asked.range.begin, asked.range.end) == (256, 512)


@pytest.mark.parametrize("what", [{}, {"segment": 1, "query": "x"}, {"segment": 2**40}])
async def test_admit_refuses_what_is_not_one_question_before_it_is_sent(client, daemon, what):
    session, _ = await opened(client)
    with pytest.raises(modeld.InvalidRequest):
        await done(session.admit(**what))
    assert daemon.world.requests_of(session_pb2.AdmitRequest) == []


async def test_numbers_of_what_is_not_attended_reach_the_caller(client, daemon):
    daemon.world.outside = (768, 32, 40)
    session, stream = await opened(client, overflow="evict", window=2048)
    final = stream.final
    assert (final.parked, final.gone, final.recomputed, final.saved) == (768, 32, 40, None)
    report = await done(session.explain())
    assert (report.parked, report.gone) == (768, 32)
    assert [(b.state, b.cache_class) for b in report.blocks][1:] == [
        ("parked", "volatile"),
        ("gone", "volatile"),
    ]
    (info,) = await done(client.sessions())
    assert (info.overflow, info.layout) == (modeld.Overflow.EVICT, modeld.Layout.ISOLATED)


async def test_a_durable_sessions_saves_and_resumption_are_told(client, daemon):
    daemon.world.saved = session_pb2.Saved(ok=True, tokens=40, written_bytes=1000)
    daemon.world.resumed = session_pb2.Resumed(tokens=40, generated_turn_ids=["t-9"], exact=True)
    daemon.world.kept_turns = {"t-9": "forty"}
    session = await done(client.open_session("tiny", durable=True, session_key="k"))
    assert (session.opened.resumed.tokens, session.opened.resumed.exact) == (40, True)
    earlier = modeld.GeneratedTurn("t-9", "a session of before", "forty")
    stream = session.turn([HELLO, earlier], [AGAIN])
    await done(stream.read())
    assert (stream.final.saved.ok, stream.final.saved.written_bytes) == (True, 1000)
    sent = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    assert sent.prefix.segments[1].generated_turn_id == "t-9"


# --- export and import ---------------------------------------------------------------------------


async def test_an_exported_file_is_a_tar_in_the_streams_order_and_comes_back(client, tmp_path):
    session, stream = await opened(client)
    info = await done(session.snapshot("kept"))
    exported = await done(client.export_snapshot(info.snapshot_id, tmp_path / "s.tar"))
    path = tmp_path / "s.tar"
    assert (exported.path, exported.size_bytes) == (str(path), path.stat().st_size)
    assert exported.snapshot == info
    with tarfile.open(path, "r:") as archive:
        names = archive.getnames()
        file = archive.extractfile("info.json")
        assert file is not None
        told = json.load(file)
        sizes = [m.size for m in archive.getmembers()]
    assert names == ["info.json", "part-0", "part-1", "empty", "record-1"]
    assert sum(sizes[1:]) == info.size_bytes
    assert (told["format"], told["snapshot"]["snapshot_id"]) == (
        "modeld-snapshot",
        info.snapshot_id,
    )
    assert list(tmp_path.iterdir()) == [path]

    await done(client.delete_snapshot(info.snapshot_id))
    back = await done(client.import_snapshot(path))
    assert (back.digest, back.label) == (info.digest, "kept")
    restored = await done(session.restore(back.snapshot_id))
    assert restored.generated_turn_ids == (stream.generated_turn.turn_id,)


async def test_a_folder_gets_a_file_named_by_the_id_and_an_open_file_can_be_read(client, tmp_path):
    session, _ = await opened(client)
    info = await done(session.snapshot())
    exported = await done(client.export_snapshot(info.snapshot_id, tmp_path))
    assert exported.path == str(tmp_path / f"{info.snapshot_id}.tar")
    data = io.BytesIO((tmp_path / f"{info.snapshot_id}.tar").read_bytes())
    assert (await done(client.import_snapshot(data))).digest == info.digest
    assert not data.closed


async def test_chunks_come_with_the_info_first_and_without_gaps(client):
    session, _ = await opened(client)
    info = await done(session.snapshot())
    chunks = await chunks_of(client, info.snapshot_id)
    assert [c.info for c in chunks] == [info] + [None] * (len(chunks) - 1)
    assert sum(len(c.data) for c in chunks) == info.size_bytes


async def test_an_export_that_fails_leaves_nothing(client, daemon, tmp_path):
    session, _ = await opened(client)
    info = await done(session.snapshot())
    daemon.world.fail("ExportSnapshot", typed.DigestMismatch("damaged"), after_chunks=2)
    with pytest.raises(modeld.DigestMismatch):
        await done(client.export_snapshot(info.snapshot_id, tmp_path / "s.tar"))
    assert list(tmp_path.iterdir()) == []


async def test_an_export_never_replaces_a_file(client, tmp_path):
    session, _ = await opened(client)
    info = await done(session.snapshot())
    taken = tmp_path / "s.tar"
    taken.write_text("mine")
    with pytest.raises(modeld.InvalidRequest, match="path"):
        await done(client.export_snapshot(info.snapshot_id, taken))
    with pytest.raises(modeld.InvalidRequest, match="path"):
        await done(client.export_snapshot(info.snapshot_id, tmp_path / "none" / "s.tar"))
    assert taken.read_text() == "mine"


async def exported_bytes(client: Any, tmp_path: Path) -> bytes:
    session, _ = await opened(client)
    info = await done(session.snapshot())
    path = tmp_path / "whole.tar"
    await done(client.export_snapshot(info.snapshot_id, path))
    return path.read_bytes()


async def test_a_file_that_is_cut_off_is_refused_and_nothing_is_listed(
    client, daemon, tmp_path, caplog
):
    whole = await exported_bytes(client, tmp_path)
    daemon.world.snapshots.clear()
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        last = archive.getmember("record-1")
    for length in (0, 100, 1000, last.offset, last.offset_data + 1, len(whole) - 512):
        with pytest.raises(modeld.InvalidRequest, match="isn't a whole exported snapshot"):
            await done(client.import_snapshot(io.BytesIO(whole[:length])))
    # With an end, but without the last member: only the daemon can know that one is missing.
    with pytest.raises(modeld.DigestMismatch):
        await done(client.import_snapshot(io.BytesIO(whole[: last.offset] + bytes(1024))))
    assert daemon.world.snapshots == {}
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_another_kind_of_file_is_refused_before_anything_is_sent(client, daemon, tmp_path):
    other = tmp_path / "other.tar"
    (tmp_path / "x").write_text("x")
    with tarfile.open(other, "w") as archive:
        archive.add(tmp_path / "x", "x")
    for source in (other, tmp_path / "x", tmp_path / "none"):
        with pytest.raises(modeld.InvalidRequest):
            await done(client.import_snapshot(source))
    assert daemon.world.requests_of(session_pb2.SnapshotChunk) == []


async def test_a_refused_import_tells_the_daemons_reason(client, daemon, tmp_path):
    whole = await exported_bytes(client, tmp_path)
    daemon.world.fail("ImportSnapshot", typed.StorageFull("no room", metadata={"quota_bytes": 5}))
    with pytest.raises(modeld.StorageFull) as caught:
        await done(client.import_snapshot(io.BytesIO(whole)))
    assert caught.value.metadata == {"quota_bytes": "5"}


# --- the file itself -----------------------------------------------------------------------------


def info_value() -> modeld.SnapshotInfo:
    from modeld.client.convert import from_proto

    return from_proto(modeld.SnapshotInfo, session_pb2.SnapshotInfo(snapshot_id="snap-1"))


def test_a_stream_with_a_gap_is_not_kept(tmp_path):
    chunks = [
        SnapshotChunk(info_value(), 0, b"abc", "part-0"),
        SnapshotChunk(None, 5, b"xyz", "part-0"),
    ]
    with SnapshotWriter(tmp_path / "s.tar", "snap-1") as writer:
        writer.take(chunks[0])
        with pytest.raises(modeld.ProtocolViolation, match="byte 5 of part-0, after 3 bytes"):
            writer.take(chunks[1])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/etc/x", "n" * 200])
def test_a_name_that_is_no_plain_file_name_is_not_written(tmp_path, name):
    with (
        SnapshotWriter(tmp_path / "s.tar", "snap-1") as writer,
        pytest.raises(modeld.ProtocolViolation),
    ):
        writer.take(SnapshotChunk(info_value(), 0, b"x", name))
    assert list(tmp_path.iterdir()) == []


def test_a_file_on_a_full_disk_is_storage_full(tmp_path, monkeypatch):
    with SnapshotWriter(tmp_path / "s.tar", "snap-1") as writer:
        writer.take(SnapshotChunk(info_value(), 0, b"x", "part-0"))

        def full(_fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(modeld.StorageFull, match=r"s\.tar"):
            writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_large_files_are_read_in_pieces(tmp_path):
    data = bytes(range(256)) * 10_000
    with SnapshotWriter(tmp_path / "s.tar", "snap-1") as writer:
        writer.take(SnapshotChunk(info_value(), 0, data, "part-0"))
        exported = writer.finish()
    with Path(exported.path).open("rb") as file:
        chunks = list(read_chunks(file))
    assert [c.offset for c in chunks] == [0, 1 << 20, 2 << 20]
    assert b"".join(c.data for c in chunks) == data
    assert [c.info.snapshot_id for c in chunks] == ["snap-1", "", ""]
