"""The command's ways to kept state: snapshots, forks, kept and durable conversations, evict."""

from __future__ import annotations

import json

import pytest

from modeld.cli.exit_codes import Exit, exit_code_of
from modeld.shared import errors as typed
from modeld.v1 import session_pb2
from tests.support.fake_daemon import FakeDaemon, FakeSession


def session_of(daemon: FakeDaemon, key: str) -> FakeSession:
    (found,) = [s for s in daemon.world.sessions.values() if s.key == key]
    return found


def last_turn(daemon: FakeDaemon) -> session_pb2.TurnRequest:
    request: session_pb2.TurnRequest = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    return request


@pytest.fixture
def kept(modeld, daemon) -> str:
    """The id of a snapshot of the conversation 'me'."""
    assert modeld("run", "tiny", "My name is Ada.", "--session", "me").exit_code == 0
    result = modeld("sessions", "snapshot", "me", "--label", "before lunch", "--json")
    snapshot_id: str = json.loads(result.stdout)["snapshot_id"]
    return snapshot_id


# --- snapshots -----------------------------------------------------------------------------------


def test_a_snapshot_is_listed_shown_and_deleted(modeld, daemon, kept):
    daemon.world.snapshot_quota = 2_000_000
    listed = modeld("snapshots", "list")
    assert kept in listed.stdout
    assert "before lunch" in listed.stdout
    assert "of 2.0 MB used by snapshots and durable sessions" in listed.stderr
    shown = modeld("snapshots", "show", kept).stdout
    assert daemon.world.snapshots[kept].info.digest in shown
    assert "kv_digest" in shown
    assert "runtime_digest" not in shown  # it may differ
    assert modeld("snapshots", "delete", kept).stdout == f"deleted {kept}\n"
    assert modeld("snapshots", "list").stderr.startswith("no snapshots")


def test_lists_for_programs_carry_every_field(modeld, daemon, kept):
    told = json.loads(modeld("snapshots", "list", "--json").stdout)
    (info,) = told["snapshots"]
    assert set(info) == {f.name for f in session_pb2.SnapshotInfo.DESCRIPTOR.fields}
    assert info == json.loads(modeld("snapshots", "show", kept, "--json").stdout)
    assert (told["used_bytes"], told["quota_bytes"]) == (info["size_bytes"], 0)
    (session,) = json.loads(modeld("sessions", "--json").stdout)["sessions"]
    assert set(session) == {f.name for f in session_pb2.SessionInfo.DESCRIPTOR.fields}


def test_the_list_can_be_of_one_model(modeld, daemon, kept):
    assert kept in modeld("snapshots", "list", "--model", "tiny").stdout
    assert kept not in modeld("snapshots", "list", "--model", "other").stdout
    assert modeld("snapshots", "list", "--model", "none").exit_code == Exit.NOT_FOUND


@pytest.mark.parametrize(
    "arguments",
    [
        ("snapshots", "show", "snap-none"),
        ("snapshots", "delete", "snap-none"),
        ("snapshots", "export", "snap-none", "x.tar"),
        ("sessions", "restore", "me", "snap-none"),
    ],
)
def test_an_unknown_snapshot_is_eight(modeld, daemon, root, monkeypatch, arguments):
    monkeypatch.chdir(root)
    result = modeld(*arguments)
    assert result.exit_code == Exit.NOT_FOUND
    assert "SNAPSHOT_NOT_FOUND" in result.stderr
    assert not (root / "x.tar").exists()


def test_what_is_exported_can_be_imported(modeld, daemon, root, kept):
    path = root / "kept.tar"
    assert f"wrote {path}" in modeld("snapshots", "export", kept, str(path)).stdout
    modeld("snapshots", "delete", kept)
    for arguments, stdin in (((str(path),), None), (("-",), path.read_bytes())):
        result = modeld("snapshots", "import", *arguments, "--json", stdin=stdin)
        info = json.loads(result.stdout)
        assert info["label"] == "before lunch"
        assert info["snapshot_id"] in daemon.world.snapshots


def test_an_export_goes_into_this_folder_by_default_and_replaces_nothing(
    modeld, daemon, root, kept, monkeypatch
):
    monkeypatch.chdir(root)
    told = json.loads(modeld("snapshots", "export", kept, "--json").stdout)
    assert told["path"] == str(root / f"{kept}.tar")
    assert told["snapshot"]["snapshot_id"] == kept
    again = modeld("snapshots", "export", kept)
    assert again.exit_code == Exit.USAGE
    assert "INVALID_REQUEST" in again.stderr


def test_a_file_that_is_no_snapshot_is_two_and_names_what_is(modeld, daemon, root):
    (root / "notes.txt").write_text("hello")
    result = modeld("snapshots", "import", str(root / "notes.txt"))
    assert result.exit_code == Exit.USAGE
    assert "modeld snapshots export" in result.stderr


def test_no_room_is_six(modeld, daemon):
    modeld("run", "tiny", "x", "--session", "me")
    error = typed.StorageFull("The quota is used up.", metadata={"quota_bytes": 10})
    daemon.world.fail("Snapshot", error)
    result = modeld("sessions", "snapshot", "me")
    assert result.exit_code == Exit.NO_ROOM
    assert "quota_bytes: 10" in result.stderr


def test_run_can_keep_what_it_leaves(modeld, daemon):
    result = modeld("run", "tiny", "hi", "--snapshot", "fresh", "--json")
    told = json.loads(result.stdout)["snapshot"]
    assert (told["label"], told["turns"]) == ("fresh", 1)
    assert daemon.world.sessions == {}
    assert "snapshot snap-" in modeld("run", "tiny", "hi", "--snapshot", "x").stderr


@pytest.mark.parametrize("failing", ["the snapshot", "the text"])
def test_an_answer_is_told_whatever_fails_after_it(modeld, daemon, root, failing):
    arguments = ["run", "tiny", "hi"]
    error: typed.ModeldError
    if failing == "the snapshot":
        arguments += ["--snapshot", "x"]
        error = typed.StorageFull("full", metadata={"quota_bytes": 10})
    else:
        arguments += ["--session", "me"]
        (root / "conversations").write_text("no folder")
        error = typed.InvalidRequest("in the way")
    for as_json in (True, False):
        if failing == "the snapshot":
            daemon.world.fail("Snapshot", error)
        result = modeld(*arguments, *(["--json"] if as_json else []))
        assert result.exit_code == exit_code_of(error)
        if as_json:
            told = json.loads(result.stdout)
            assert told["answer"]
            assert told["error"]["reason"] == error.reason
            assert told["snapshot"] is None
        else:
            assert result.stdout.strip()
            assert "prefilled" in result.stderr
            assert error.reason in result.stderr


# --- sessions ------------------------------------------------------------------------------------


def test_a_restore_goes_on_from_the_snapshot_in_an_open_session_and_in_a_new_one(
    modeld, daemon, kept
):
    before = session_of(daemon, "me").tokens
    modeld("run", "tiny", "And I like tea.", "--session", "me")
    assert session_of(daemon, "me").tokens != before
    result = modeld("sessions", "restore", "me", kept)
    assert f"me holds {len(before)} tokens of {kept}" in result.stdout
    assert session_of(daemon, "me").tokens == before
    modeld("sessions", "close", "me")
    assert modeld("sessions", "restore", "other", kept).exit_code == 0
    assert session_of(daemon, "other").tokens == before
    assert not session_of(daemon, "other").attached


def test_a_restore_that_fails_leaves_no_session_behind(modeld, daemon, kept):
    modeld("sessions", "close", "me")
    daemon.world.fail("Restore", typed.DigestMismatch("It is damaged."))
    assert modeld("sessions", "restore", "new", kept).exit_code == Exit.REFUSED
    assert daemon.world.sessions == {}


def test_a_fork_takes_the_text_along_and_both_go_on(modeld, daemon, root):
    modeld("run", "tiny", "My name is Ada.", "--session", "me", "--system", "Be brief.")
    result = modeld("sessions", "fork", "me", "you")
    assert "tokens of me" in result.stdout
    assert not session_of(daemon, "you").attached
    modeld("run", "tiny", "I am Bob.", "--session", "you")
    sent = last_turn(daemon)
    assert sent.session.session_id == session_of(daemon, "you").session_id
    assert sent.prefix.segments[0].message.content[0].text == "Be brief."
    assert sent.prefix.segments[2].generated_turn_id  # as it was sampled, in the branch
    modeld("run", "tiny", "Again.", "--session", "me")
    assert b"Bob" not in session_of(daemon, "me").tokens


def test_a_fork_never_replaces_a_conversation(modeld, daemon):
    modeld("run", "tiny", "a", "--session", "me")
    modeld("run", "tiny", "b", "--session", "you")
    result = modeld("sessions", "fork", "me", "you")
    assert result.exit_code == Exit.USAGE
    assert "conversations/you.json" in result.stderr
    assert daemon.world.requests_of(session_pb2.ForkRequest) == []


def test_a_session_shows_what_is_attended_parked_and_gone(modeld, daemon):
    modeld("run", "tiny", "hi", "--session", "me", "--overflow", "evict")
    daemon.world.outside = (1536, 256, 0)
    shown = modeld("sessions", "show", "me").stdout
    assert "parked 1,536, gone 256" in shown
    states = [line.split()[2] for line in shown.splitlines() if " prefix " in line]
    assert states == ["hot", "parked", "gone"]
    told = json.loads(modeld("sessions", "show", "me", "--json").stdout)
    assert set(told) == {f.name for f in session_pb2.ExplainContextResponse.DESCRIPTOR.fields}


def test_the_list_of_sessions_tells_what_is_out_of_the_ordinary(modeld, daemon):
    modeld("run", "tiny", "hi", "--session", "me", "--overflow", "evict", "--durable")
    listed = modeld("sessions").stdout
    assert "detached, evicts, durable (saved never)" in listed


@pytest.mark.parametrize("command", ["show", "snapshot"])
def test_looking_at_a_session_leaves_it_as_it_was(modeld, daemon, command):
    modeld("run", "tiny", "hi", "--session", "me")
    assert modeld("sessions", command, "me").exit_code == 0
    assert not session_of(daemon, "me").attached
    session_of(daemon, "me").attached = True
    assert modeld("sessions", command, "me").exit_code == 0
    assert session_of(daemon, "me").attached


@pytest.mark.parametrize("command", ["show", "snapshot"])
def test_an_unknown_session_is_eight(modeld, daemon, command):
    assert modeld("sessions", command, "nobody").exit_code == Exit.NOT_FOUND


# --- evict and durable ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "chat"])
def test_overflow_and_durable_are_asked_for_and_remembered_with_the_key(modeld, daemon, command):
    def once(*flags: str) -> session_pb2.OpenSessionRequest:
        asked = ("run", "tiny", "hi") if command == "run" else ("chat", "tiny")
        result = modeld(*asked, "--session", "me", *flags, stdin="hi\n")
        assert result.exit_code == 0, result.stderr
        found: session_pb2.OpenSessionRequest = daemon.world.requests_of(
            session_pb2.OpenSessionRequest
        )[-1]
        return found

    opened = once("--overflow", "evict", "--durable", "--window", "2048")
    assert (opened.overflow, opened.durable) == (session_pb2.OVERFLOW_EVICT, True)
    opened = once()
    assert (opened.overflow, opened.durable) == (session_pb2.OVERFLOW_EVICT, True)
    opened = once("--no-durable", "--overflow", "refuse")
    assert (opened.overflow, opened.durable) == (session_pb2.OVERFLOW_REFUSE, False)
    assert not once().durable


@pytest.mark.parametrize("command", [("run", "tiny", "hi"), ("chat", "tiny")])
def test_durable_without_a_key_is_wrong_usage(modeld, daemon, command):
    result = modeld(*command, "--durable")
    assert result.exit_code == Exit.USAGE
    assert "--session" in result.stderr


def test_the_line_of_numbers_tells_what_is_not_attended_and_whether_it_was_saved(modeld, daemon):
    daemon.world.outside = (1536, 256, 40)
    daemon.world.saved = session_pb2.Saved(ok=True)
    told = modeld("run", "tiny", "hi", "--session", "me", "--durable").stderr
    assert "1,536 parked · 256 gone · 40 recomputed · saved" in told
    daemon.world.outside = (0, 0, 0)
    daemon.world.saved = session_pb2.Saved(ok=False, reason="STORAGE_FULL")
    told = modeld("run", "tiny", "hi", "--session", "me").stderr
    assert "not saved: STORAGE_FULL" in told
    assert "parked" not in told
    assert "gone" not in told
    assert "saved" not in modeld("run", "tiny", "hi").stderr


def test_a_session_that_comes_back_says_from_when_and_its_answers_stay_as_sampled(modeld, daemon):
    daemon.world.saved = session_pb2.Saved(ok=True)
    modeld("run", "tiny", "My name is Ada.", "--session", "me", "--durable")
    old = session_of(daemon, "me")
    daemon.world.kept_turns = dict(old.turns)
    daemon.world.resumed = session_pb2.Resumed(
        tokens=1234, saved_unix_ms=1_700_000_000_000, generated_turn_ids=list(old.turns)
    )
    daemon.world.bump()
    for _ in range(2):  # also once it is no longer new
        result = modeld("run", "tiny", "And yours?", "--session", "me")
        assert result.exit_code == 0
        answer = last_turn(daemon).prefix.segments[1]
        assert answer.generated_turn_id in old.turns
    daemon.world.bump()
    daemon.world.resumed.saved_unix_ms = 1_700_000_000_000
    assert "the session is back with 1,234 tokens, as saved" in (
        modeld("run", "tiny", "x", "--session", "me").stderr
    )


def test_what_did_not_come_back_is_told_with_its_reason(modeld, daemon):
    daemon.world.resumed = session_pb2.Resumed(miss_reason="another kv_digest")
    told = modeld("run", "tiny", "hi", "--session", "me", "--durable").stderr
    assert "didn't come back (another kv_digest)" in told


# --- chat with a key -----------------------------------------------------------------------------


def test_a_chat_goes_on_where_run_left_off_and_the_other_way_round(modeld, daemon):
    modeld("run", "tiny", "My name is Ada.", "--session", "me", "--system", "Be brief.")
    first = session_of(daemon, "me").session_id
    result = modeld("chat", "tiny", "--session", "me", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert "'me' goes on after 1 exchange\n" in result.stderr
    sent = last_turn(daemon)
    assert sent.session.session_id == first
    roles = [s.message.role or "answer" for s in (*sent.prefix.segments, *sent.suffix.segments)]
    assert roles == ["system", "user", "answer", "user", "answer", "user"]
    assert not session_of(daemon, "me").attached
    modeld("run", "tiny", "three", "--session", "me")
    assert len(last_turn(daemon).prefix.segments) == 7


def test_new_begins_the_kept_conversation_anew(modeld, daemon, root):
    modeld("chat", "tiny", "--session", "me", "--system", "Be brief.", stdin="one\n/new\ntwo\n")
    kept = json.loads((root / "conversations" / "me.json").read_text())
    assert [e["user"] for e in kept["exchanges"]] == ["two"]
    assert kept["system"] == ["Be brief."]


def test_a_chat_without_a_key_keeps_nothing(modeld, daemon, root):
    modeld("chat", "tiny", stdin="one\n")
    assert not (root / "conversations").exists()
    assert daemon.world.sessions == {}


def test_a_conversation_kept_by_an_earlier_version_goes_on(modeld, daemon, root):
    modeld("run", "tiny", "one", "--session", "me")
    path = root / "conversations" / "me.json"
    kept = json.loads(path.read_text())
    del kept["overflow"], kept["durable"]
    path.write_text(json.dumps(kept))
    assert modeld("run", "tiny", "two", "--session", "me").exit_code == 0
    assert len(last_turn(daemon).prefix.segments) == 2
