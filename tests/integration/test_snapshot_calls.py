"""Snapshots through the product: what comes back, what is refused, and what a refusal leaves."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from modeld.client import Client, Session
from modeld.client.errors import DeadlineExceeded
from modeld.client.snapshot_file import SnapshotWriter
from modeld.client.values_residency import SnapshotChunk, SnapshotInfo
from modeld.shared.errors import (
    BackendMismatch,
    ContextOverflow,
    DigestMismatch,
    InvalidRequest,
    ManifestMismatch,
    ModelBusy,
    SnapshotNotFound,
)
from modeld.supervisor.saved_folder import SavedFolder, encode_info
from modeld.v1 import session_pb2 as pb
from tests.support.daemon import MODEL, RunningDaemon, Stubs, eventually
from tests.support.product import Told, ask, system, user

pytestmark = pytest.mark.real

STORY = "The keeper wrote what the sea had brought. Storms came and went; the light did not. " * 8
PREFIX = [system("You answer in few words.")]
FIRST = [user(STORY + "What did the keeper write?")]


@pytest.fixture(autouse=True)
def _no_snapshots(client: Client) -> Iterator[None]:
    yield
    for info in client.list_snapshots().snapshots:
        client.delete_snapshot(info.snapshot_id)


@pytest.fixture
def folder(daemon: RunningDaemon) -> Path:
    return daemon.data_root / "snapshots"


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def first_turn(session: Session) -> Told:
    return ask(session, PREFIX, FIRST)


def second_turn(session: Session, first: Told) -> Told:
    again = [*FIRST, first.turn or "", user("And what came and went?")]
    return ask(session, PREFIX, again, top_logprobs=3)


def open_chat(client: Client, window: int = 1024) -> Session:
    return client.open_session(MODEL, window=window)


def test_a_restored_session_goes_on_as_the_saved_one(client: Client, chat: Session) -> None:
    first = first_turn(chat)
    info = chat.snapshot("after the first turn")
    assert client.list_snapshots().snapshots == (info,)
    assert (info.label, info.model, info.window, info.turns) == (
        "after the first turn", MODEL, 1024, 1,
    )  # fmt: skip
    assert info.tokens == first.final.resident
    assert info.seen_tokens == first.final.seen_tokens
    before = chat.explain()
    went_on = second_turn(chat, first)

    fresh = open_chat(client)
    restored = fresh.restore(info.snapshot_id)
    assert restored.snapshot == info
    assert (restored.tokens, restored.resident) == (info.tokens, first.final.resident)
    assert restored.generated_turn_ids == before.generated_turn_ids
    assert (restored.exact, restored.exact_reason) == (info.exact, info.exact_reason)
    after = fresh.explain()
    assert (after.resident, after.available, after.seen_tokens) == (
        before.resident, before.available, before.seen_tokens,
    )  # fmt: skip
    assert after.segments == before.segments
    came_back = second_turn(fresh, first)
    assert came_back.after.reused == went_on.after.reused > 0
    assert came_back.after.prefilled == went_on.after.prefilled
    assert came_back.before.manifest_digest == went_on.before.manifest_digest
    assert info.exact, info.exact_reason
    assert came_back.ids == went_on.ids
    assert came_back.logprobs == went_on.logprobs


def test_a_restore_takes_the_place_of_what_the_session_held(client: Client, chat: Session) -> None:
    first = first_turn(chat)
    info = chat.snapshot()
    went_on = second_turn(chat, first)
    other = open_chat(client)
    ask(other, PREFIX, [user("Something else altogether.")])
    other.restore(info.snapshot_id)
    assert second_turn(other, first).ids == went_on.ids
    chat.restore(info.snapshot_id)  # and back in itself
    again = second_turn(chat, first)
    assert (again.ids, again.after.reused) == (went_on.ids, went_on.after.reused)


def test_a_session_without_tokens_has_nothing_to_save(chat: Session, folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="holds tokens"):
        chat.snapshot()
    assert names(folder) == set()


def unharmed(session: Session, first: Told, went_on: Told) -> None:
    """The live session answers with the same reused count as it would have."""
    told = second_turn(session, first)
    assert (told.ids, told.after.reused) == (went_on.ids, went_on.after.reused)


def test_damaged_cut_and_missing_files_are_refused_and_the_live_session_is_unharmed(
    client: Client, chat: Session, folder: Path
) -> None:
    first = first_turn(chat)
    info = chat.snapshot()
    went_on = second_turn(chat, first)
    live = open_chat(client)
    first = first_turn(live)
    held = live.explain()
    numbers = random.Random(5)
    there = folder / info.snapshot_id
    for file in sorted(there.iterdir()):
        whole = file.read_bytes()
        flips = [0, len(whole) - 1, *(numbers.randrange(len(whole)) for _ in range(3))]
        for at in flips:
            data = bytearray(whole)
            data[at] ^= 1 << numbers.randrange(8)
            file.write_bytes(data)
            with pytest.raises(DigestMismatch):
                live.restore(info.snapshot_id)
            with pytest.raises(DigestMismatch):
                list(client.snapshot_chunks(info.snapshot_id))
        file.write_bytes(whole[:-1])
        with pytest.raises(DigestMismatch):
            live.restore(info.snapshot_id)
        assert client.list_snapshots().snapshots == ()
        assert client.disk_stats().damaged_snapshots == (info.snapshot_id,)
        file.unlink()
        with pytest.raises(DigestMismatch):
            live.restore(info.snapshot_id)
        file.write_bytes(whole)
    with pytest.raises(SnapshotNotFound):
        live.restore("snap-0123456789abcdef")
    assert live.explain().resident == held.resident
    assert live.explain().segments == held.segments
    unharmed(live, first, went_on)
    assert live.restore(info.snapshot_id).tokens == info.tokens  # whole again


def test_a_session_of_another_kind_is_refused_by_name(chat: Session, raw: Session) -> None:
    first_turn(chat)
    info = chat.snapshot()
    told = ask(raw, [STORY], [" The light"])
    with pytest.raises(ManifestMismatch, match="prompt_format") as caught:
        raw.restore(info.snapshot_id)
    assert (caught.value.metadata["asserted"], caught.value.metadata["actual"]) == ("chat", "raw")
    again = ask(raw, [STORY], [" The light"])
    assert (again.ids, again.before.prefilled) == (told.ids, 0)


def test_another_window_will_do_unless_it_is_too_small(client: Client, chat: Session) -> None:
    first = first_turn(chat)
    info = chat.snapshot()
    went_on = second_turn(chat, first)
    small = open_chat(client, window=128)
    with pytest.raises(ContextOverflow, match="window of 1024"):
        small.restore(info.snapshot_id)
    assert small.explain().resident == 0
    large = open_chat(client, window=2048)
    restored = large.restore(info.snapshot_id)
    assert restored.available == 2048 - restored.resident
    assert second_turn(large, first).after.reused == went_on.after.reused


def test_a_cancelled_snapshot_is_whole_or_not_there(
    client: Client, chat: Session, folder: Path
) -> None:
    first = first_turn(chat)
    whole = chat.snapshot()
    numbers, stopped = random.Random(7), 0
    for _ in range(12):
        try:
            chat.snapshot(timeout=numbers.uniform(0.001, 1.2 * whole.seconds + 0.01))
        except (DeadlineExceeded, ModelBusy):  # the one before may still be on its way out
            stopped += 1
    assert stopped > 0
    # What the last one left is gone once the call has ended in the daemon as well.
    eventually(lambda: not any(name.startswith(".") for name in names(folder)))
    listed = {info.snapshot_id for info in client.list_snapshots().snapshots}
    assert names(folder) == listed
    for snapshot_id in sorted(listed):
        assert open_chat_and_restore(client, snapshot_id) == first.final.resident


def open_chat_and_restore(client: Client, snapshot_id: str) -> int:
    session = open_chat(client)
    try:
        return session.restore(snapshot_id).resident
    finally:
        session.close()


def test_an_export_can_be_taken_in_after_the_snapshot_is_gone(
    client: Client, chat: Session, folder: Path, tmp_path: Path
) -> None:
    first = first_turn(chat)
    info = chat.snapshot("kept elsewhere")
    went_on = second_turn(chat, first)
    exported = client.export_snapshot(info.snapshot_id, tmp_path / "kept.tar")
    assert exported.snapshot == info
    used = client.list_snapshots().used_bytes
    assert client.disk_stats().snapshots_bytes == used >= info.size_bytes
    client.delete_snapshot(info.snapshot_id)
    assert (client.list_snapshots().used_bytes, names(folder)) == (0, set())
    with pytest.raises(SnapshotNotFound):
        client.delete_snapshot(info.snapshot_id)
    imported = client.import_snapshot(tmp_path / "kept.tar")
    assert imported == info
    assert client.import_snapshot(tmp_path / "kept.tar") == info  # the same: there once
    assert client.list_snapshots().snapshots == (info,)
    fresh = open_chat(client)
    fresh.restore(imported.snapshot_id)
    assert second_turn(fresh, first).ids == went_on.ids


def chunks_of(client: Client, info: SnapshotInfo, stubs: Stubs) -> list[pb.SnapshotChunk]:
    request = pb.ExportSnapshotRequest(snapshot_id=info.snapshot_id)
    return stubs.stream(stubs.sessions.ExportSnapshot, request)


def test_an_import_that_is_cut_changed_or_out_of_order_leaves_nothing(
    client: Client, chat: Session, folder: Path, stubs: Stubs
) -> None:
    first_turn(chat)
    info = chat.snapshot()
    chunks = chunks_of(client, info, stubs)
    assert max(len(chunk.data) for chunk in chunks) <= 1 << 20
    client.delete_snapshot(info.snapshot_id)
    changed = pb.SnapshotChunk.FromString(chunks[-1].SerializeToString())
    changed.data = changed.data[:-1] + bytes([changed.data[-1] ^ 1])
    bare = pb.SnapshotChunk.FromString(chunks[0].SerializeToString())
    bare.ClearField("info")
    for stream, error in (
        (chunks[:-1], DigestMismatch),
        (chunks[:1], DigestMismatch),
        ([*chunks[:-1], changed], DigestMismatch),
        ([chunks[0], chunks[2], chunks[1], *chunks[3:]], InvalidRequest),
        (chunks[1:], InvalidRequest),
        ([bare, *chunks[1:]], InvalidRequest),
        ([], InvalidRequest),
        ([*chunks, chunks[-1]], InvalidRequest),
    ):
        with pytest.raises(error):
            stubs.unary(stubs.sessions.ImportSnapshot, iter(stream))
        assert names(folder) == set()
    told = stubs.unary(stubs.sessions.ImportSnapshot, iter(chunks))
    assert told.snapshot_id == info.snapshot_id


def test_a_snapshot_of_another_version_is_not_taken_in(
    client: Client, chat: Session, folder: Path, tmp_path: Path
) -> None:
    first_turn(chat)
    info = chat.snapshot()
    there = SavedFolder(folder / info.snapshot_id)
    saved = there.require(info.snapshot_id)
    kept = tmp_path / "kept"
    shutil.copytree(there.path, kept)
    identity = saved.identity
    for wrong, other_identity, error in (
        ("0.0.1", replace(identity, backend_version="0.0.1"), ManifestMismatch),
        ("tensor", replace(identity, backend="tensor"), BackendMismatch),
    ):
        other = replace(saved, identity=other_identity)
        with SnapshotWriter(tmp_path / f"{wrong}.tar", info.snapshot_id) as writer:
            writer.take(SnapshotChunk(info, 0, encode_info(other), "saved.json"))
            for name in saved.files:
                writer.take(SnapshotChunk(None, 0, (kept / name).read_bytes(), name))
            writer.finish()
        with pytest.raises(error, match=wrong):
            client.import_snapshot(tmp_path / f"{wrong}.tar")
    assert names(folder) == {info.snapshot_id}
