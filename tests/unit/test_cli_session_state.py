"""What the command says and does where sessions are restored, forked, closed and discarded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from modeld.cli.exit_codes import Exit
from modeld.client import Client
from modeld.shared import errors as typed
from modeld.v1 import session_pb2 as pb
from tests.support.fake_daemon import FakeDaemon, FakeSession

Modeld = Callable[..., Result]

pytestmark = pytest.mark.usefixtures("daemon")


def session_of(daemon: FakeDaemon, key: str) -> FakeSession:
    (found,) = [s for s in daemon.world.sessions.values() if s.key == key]
    return found


def last(daemon: FakeDaemon, kind: type[Any]) -> Any:
    return daemon.world.requests_of(kind)[-1]


def kept(modeld: Modeld, *more: str) -> str:
    """The id of a snapshot of the conversation 'me', which has gone on since."""
    assert modeld("run", "tiny", "My name is Ada.", "--session", "me", *more).exit_code == 0
    told = json.loads(modeld("sessions", "snapshot", "me", "--json").stdout)
    modeld("run", "tiny", "And I like tea.", "--session", "me")
    snapshot_id: str = told["snapshot_id"]
    return snapshot_id


# --- restore -------------------------------------------------------------------------------------


def test_a_restore_under_a_new_key_takes_the_text_along_and_says_how_to_go_on(
    modeld: Modeld, daemon: FakeDaemon, root: Path
) -> None:
    snapshot_id = kept(modeld)
    result = modeld("sessions", "restore", "you", snapshot_id)
    assert result.exit_code == 0
    assert "you, a new session, holds " in result.stdout
    assert f"copied from {root}/conversations/me.json" in result.stderr
    assert "1 later exchange(s) are not in" in result.stderr
    assert "modeld run tiny PROMPT --session you" in result.stderr
    held = session_of(daemon, "you").tokens
    modeld("run", "tiny", "What is it?", "--session", "you")
    sent = last(daemon, pb.TurnRequest)
    assert sent.session.session_id == session_of(daemon, "you").session_id
    assert sent.prefix.segments[1].generated_turn_id
    assert session_of(daemon, "you").tokens.startswith(held)
    mine = json.loads((root / "conversations" / "me.json").read_text())
    assert len(mine["exchanges"]) == 2  # the conversation itself is as it was


def test_a_restore_without_its_text_says_that_there_is_none(modeld: Modeld, root: Path) -> None:
    snapshot_id = kept(modeld)
    (root / "conversations" / "me.json").unlink()
    result = modeld("sessions", "restore", "you", snapshot_id)
    assert result.exit_code == 0
    assert "no text of it is kept here" in result.stderr
    told = json.loads(modeld("sessions", "restore", "they", snapshot_id, "--json").stdout)
    assert (told["opened"], told["conversation"]) == (True, None)
    assert told["snapshot"]["snapshot_id"] == snapshot_id


def test_a_restore_into_another_conversation_says_that_it_will_make_way(
    modeld: Modeld, root: Path
) -> None:
    snapshot_id = kept(modeld)
    modeld("run", "tiny", "Something else.", "--session", "you")
    result = modeld("sessions", "restore", "you", snapshot_id)
    assert "a new session" not in result.stdout
    assert "you.json has none of its answers" in result.stderr
    assert "go on with" not in result.stderr


def test_a_session_is_found_by_its_id_too_with_its_text(
    modeld: Modeld, daemon: FakeDaemon, root: Path
) -> None:
    snapshot_id = kept(modeld)
    session_id = session_of(daemon, "me").session_id
    told = json.loads(modeld("sessions", "restore", session_id, snapshot_id, "--json").stdout)
    assert (told["opened"], told["conversation"]) == (
        False,
        str(root / "conversations" / "me.json"),
    )
    assert len(daemon.world.sessions) == 1
    modeld("sessions", "fork", session_id, "you")
    assert (root / "conversations" / "you.json").exists()


def test_a_new_session_is_opened_as_the_one_that_was_saved(
    modeld: Modeld, daemon: FakeDaemon
) -> None:
    snapshot_id = kept(modeld, "--overflow", "evict", "--window", "2048")
    daemon.world.snapshots[snapshot_id].info.k_type = "q8_0"
    modeld("sessions", "restore", "you", snapshot_id)
    asked = last(daemon, pb.OpenSessionRequest)
    assert (asked.overflow, asked.window) == (pb.OVERFLOW_EVICT, 2048)
    assert (asked.k_type, asked.v_type) == ("q8_0", "f16")


@pytest.mark.parametrize("kept_before", [False, True])
def test_after_a_restore_into_a_programs_session_run_finds_it_as_it_was_opened(
    modeld: Modeld, daemon: FakeDaemon, root: Path, kept_before: bool
) -> None:
    snapshot_id = kept(modeld)
    if kept_before:
        text = root / "conversations" / "me.json"
        (root / "conversations" / "you.json").write_text(text.read_text())
    with Client.connect(root) as program:
        program.open_session("tiny", session_key="you", durable=True, overflow="evict", window=2048)
        result = modeld("sessions", "restore", "you", snapshot_id)
        assert "modeld run tiny PROMPT --session you`" in result.stderr
        assert modeld("run", "tiny", "What is it?", "--session", "you").exit_code == 0
    asked = last(daemon, pb.OpenSessionRequest)
    assert (asked.durable, asked.overflow) == (True, pb.OVERFLOW_EVICT)
    assert (asked.k_type, asked.v_type) == ("f16", "f16")
    assert last(daemon, pb.TurnRequest).prefix.segments[1].generated_turn_id
    modeld("sessions", "fork", "you", "they")
    modeld("run", "tiny", "And now?", "--session", "they")
    asked = last(daemon, pb.OpenSessionRequest)
    assert (asked.durable, asked.overflow) == (False, pb.OVERFLOW_EVICT)


def test_a_restore_says_where_a_durable_conversation_is_in_a_session_that_is_not(
    modeld: Modeld, daemon: FakeDaemon
) -> None:
    snapshot_id = kept(modeld, "--durable")
    modeld("sessions", "close", "me")
    with Client.connect(daemon.world.data_root) as program:
        program.open_session("tiny", session_key="me")
        assert "isn't durable" in modeld("sessions", "restore", "me", snapshot_id).stderr
    modeld("run", "tiny", "What is it?", "--session", "me")
    assert not last(daemon, pb.OpenSessionRequest).durable


@pytest.mark.parametrize("program_s", [False, True])
def test_a_durable_conversation_is_restored_into_a_durable_session(
    modeld: Modeld, daemon: FakeDaemon, program_s: bool
) -> None:
    snapshot_id = kept(modeld, "--durable")
    modeld("sessions", "close", "me")
    if program_s:  # the text of which is its own
        (daemon.world.data_root / "conversations" / "me.json").unlink()
    assert "isn't durable" not in modeld("sessions", "restore", "me", snapshot_id).stderr
    assert last(daemon, pb.OpenSessionRequest).durable
    assert session_of(daemon, "me").durable
    if not program_s:
        assert modeld("run", "tiny", "What is it?", "--session", "me").exit_code == 0
        assert last(daemon, pb.OpenSessionRequest).durable


def test_the_way_to_go_on_names_the_flags_that_a_conversation_does_not_remember(
    modeld: Modeld, daemon: FakeDaemon
) -> None:
    assert modeld("run", "tiny", "Once", "--session", "me", "--raw").exit_code == 0
    told = json.loads(modeld("sessions", "snapshot", "me", "--json").stdout)
    session_of(daemon, "me").identity.adapters.add(digest="d" * 64, scale=0.5)
    result = modeld("sessions", "restore", "me", told["snapshot_id"])
    assert f"PROMPT --session me --raw --adapter {'d' * 64}=0.5`" in result.stderr


def test_the_cache_types_of_a_conversation_are_remembered_until_others_are_given(
    modeld: Modeld, daemon: FakeDaemon
) -> None:
    def asked(*flags: str) -> tuple[str, str]:
        assert modeld("run", "tiny", "hi", "--session", "me", *flags).exit_code == 0
        request = last(daemon, pb.OpenSessionRequest)
        return request.k_type, request.v_type

    assert asked("--k-type", "q8_0", "--v-type", "f16") == ("q8_0", "f16")
    assert asked() == ("q8_0", "f16")
    assert asked("--k-type", "f16") == ("f16", "")
    assert asked() == ("f16", "")


def test_the_model_is_found_by_its_content_where_it_has_another_name(
    modeld: Modeld, daemon: FakeDaemon
) -> None:
    info = daemon.world.snapshots[kept(modeld)].info
    info.model = "renamed"
    assert modeld("sessions", "restore", "you", info.snapshot_id).exit_code == 0
    assert last(daemon, pb.OpenSessionRequest).model == "tiny"
    info.identity.model_digest = "0" * 64
    result = modeld("sessions", "restore", "they", info.snapshot_id)
    assert result.exit_code == Exit.NOT_FOUND
    assert "digest is " + "0" * 64 in result.stderr


# --- fork ----------------------------------------------------------------------------------------


def test_a_durable_fork_says_whether_it_was_saved(modeld: Modeld, daemon: FakeDaemon) -> None:
    modeld("run", "tiny", "hi", "--session", "me")
    assert "saved" not in modeld("sessions", "fork", "me", "a").stderr
    daemon.world.saved = pb.Saved(ok=True, written_bytes=2_000_000)
    assert "saved (2.0 MB" in modeld("sessions", "fork", "me", "b", "--durable").stderr
    daemon.world.saved = pb.Saved(ok=False, reason="STORAGE_FULL", detail="The quota is used up.")
    result = modeld("sessions", "fork", "me", "c", "--durable")
    assert result.exit_code == 0
    assert "wasn't saved: STORAGE_FULL. The quota is used up." in result.stderr
    told = json.loads(modeld("sessions", "fork", "me", "d", "--durable", "--json").stdout)
    assert (told["saved"]["ok"], told["saved"]["reason"]) == (False, "STORAGE_FULL")


def test_a_fork_whose_text_cannot_be_kept_leaves_nothing(
    modeld: Modeld, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    modeld("run", "tiny", "hi", "--session", "me")

    def full(*_: object) -> None:
        raise typed.StorageFull("No space left.")

    monkeypatch.setattr("modeld.cli.conversations.save", full)
    assert modeld("sessions", "fork", "me", "you", "--durable").exit_code == Exit.NO_ROOM
    assert [s.key for s in daemon.world.sessions.values()] == ["me"]
    assert daemon.world.kept_keys == set()


@pytest.mark.parametrize("command", [("run", "tiny", "hi"), ("chat", "tiny")])
def test_an_answer_that_was_not_saved_is_told_with_its_reason(
    modeld: Modeld, daemon: FakeDaemon, command: tuple[str, ...]
) -> None:
    daemon.world.saved = pb.Saved(ok=False, reason="STORAGE_FULL", detail="Quota.", saved_unix_ms=5)
    told = modeld(*command, "--session", "me", "--durable", stdin="hi\n").stderr
    assert "wasn't saved: STORAGE_FULL. Quota. Its next answer saves it; what was saved" in told


# --- close and list ------------------------------------------------------------------------------


def test_what_is_saved_can_be_discarded_with_its_session_open_or_not(
    modeld: Modeld, daemon: FakeDaemon
) -> None:
    def run() -> None:
        assert modeld("run", "tiny", "hi", "--session", "me", "--durable").exit_code == 0
        assert daemon.world.kept_keys == {"me"}

    run()
    assert "closed s-" in modeld("sessions", "close", "me", "--discard").stdout
    assert daemon.world.kept_keys == set()
    run()
    assert "what was saved of it stays" in modeld("sessions", "close", "me").stderr
    assert daemon.world.kept_keys == {"me"}
    unknown = modeld("sessions", "close", "me")
    assert unknown.exit_code == Exit.NOT_FOUND
    assert "--session KEY` opens one" in unknown.stderr
    discarded = modeld("sessions", "close", "me", "--discard")
    assert discarded.stdout == "discarded what was saved of me\n"
    assert daemon.world.kept_keys == set()
    assert modeld("sessions", "close", "me", "--discard").exit_code == Exit.NOT_FOUND


def test_what_is_saved_is_discarded_where_a_session_that_is_not_durable_has_its_key(
    modeld: Modeld, daemon: FakeDaemon
) -> None:
    modeld("run", "tiny", "hi", "--session", "me", "--durable")
    modeld("sessions", "close", "me")
    modeld("run", "tiny", "hi", "--session", "me", "--no-durable")
    assert "discarded what was saved of me" in modeld("sessions", "close", "me", "--discard").stdout
    assert (daemon.world.kept_keys, daemon.world.sessions) == (set(), {})
    modeld("run", "tiny", "hi", "--session", "me")
    nothing_saved = modeld("sessions", "close", "me", "--discard")
    assert nothing_saved.exit_code == 0
    assert "discarded" not in nothing_saved.stdout


def test_what_is_saved_of_a_session_that_is_not_open_is_listed(
    modeld: Modeld, daemon: FakeDaemon
) -> None:
    modeld("run", "tiny", "hi", "--session", "me", "--durable")
    assert "saved, not open" not in modeld("sessions").stdout
    modeld("sessions", "close", "me")
    told = modeld("sessions")
    assert "no sessions" in told.stderr
    row = next(line for line in told.stdout.splitlines() if line.startswith("me "))
    assert row.split()[:6] == ["me", "tiny", "4,096", "40", "2", "3.0"]
    listed = json.loads(modeld("sessions", "list", "--json").stdout)
    assert [(one["session_key"], one["open"]) for one in listed["saved"]] == [("me", False)]
    gone = json.loads(modeld("sessions", "close", "me", "--discard", "--json").stdout)
    assert (gone["closed"], gone["discarded"]) == ([], ["me"])


def test_both_lists_are_there_with_and_without_the_word(modeld: Modeld) -> None:
    snapshot_id = kept(modeld)
    for words, shown in ((("sessions",), "me"), (("snapshots",), snapshot_id)):
        assert shown in modeld(*words, "list").stdout
        assert shown in modeld(*words).stdout
        assert json.loads(modeld(*words, "--json").stdout)[words[0]]


def test_a_delete_that_fails_names_those_that_went_before(modeld: Modeld) -> None:
    snapshot_id = kept(modeld)
    result = modeld("snapshots", "delete", snapshot_id, "snap-none", "--json")
    assert result.exit_code == Exit.NOT_FOUND
    assert json.loads(result.stdout)["error"]["metadata"]["deleted"] == snapshot_id
