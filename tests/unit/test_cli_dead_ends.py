"""Where the command met a wall: it says what is so and what to do, never a trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modeld.cli import daemon_start
from modeld.cli.exit_codes import Exit
from modeld.cli.progress import Meanwhile
from modeld.client import Client, QueueStatus
from modeld.shared import errors as typed
from modeld.v1 import session_pb2


def process(
    root: Path | str, *arguments: str | bytes, **options
) -> subprocess.CompletedProcess[Any]:
    return subprocess.run(
        [sys.executable, "-m", "modeld", *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "MODELD_DATA_ROOT": str(root)},
        check=False,
        timeout=60,
        **options,
    )


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("run", "tiny", "-"), ("tokenize", "tiny", "-")])
def test_stdin_that_is_not_utf8_is_refused_as_usage(modeld, daemon, arguments):
    result = modeld(*arguments, stdin=b"a\xff\xfeb")
    assert result.exit_code == Exit.USAGE
    assert "stdin can't be read as UTF-8 text" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "tiny", b"\xff"),
        ("tokenize", "tiny", b"\xff"),
        ("run", "tiny", "hi", "--system", b"\xff"),
        ("chat", "tiny", "--system", b"\xff"),
        ("run", "tiny", "hi", "--stop", b"\xff"),
        ("describe", b"\xff"),
    ],
)
def test_an_argument_that_is_not_utf8_is_refused_as_usage(daemon, root, arguments):
    done = process(root, *arguments)
    assert done.returncode == Exit.USAGE
    assert b"Traceback" not in done.stderr
    assert b"0xff" in done.stderr or b"U+DCFF" in done.stderr


def test_chat_names_input_that_is_not_utf8(modeld, daemon):
    result = modeld("chat", "tiny", stdin=b"\xff\n")
    assert result.exit_code == Exit.USAGE
    assert "UTF-8" in result.stderr


@pytest.mark.parametrize("way", ["argument", "stdin", "file"])
def test_an_empty_prompt_is_refused(modeld, daemon, root, way):
    empty = root / "empty"
    empty.touch()
    arguments = {"argument": ("",), "stdin": ("-",), "file": ("--file", str(empty))}[way]
    result = modeld("run", "tiny", *arguments, stdin="")
    assert result.exit_code == Exit.USAGE
    assert "the prompt is empty" in result.stderr


def test_a_number_beyond_its_field_is_named(modeld, daemon):
    for flag, name in (("--max-tokens", "max_tokens"), ("--window", "window")):
        result = modeld("run", "tiny", "hi", flag, str(10**23))
        assert result.exit_code == Exit.USAGE
        assert name in result.stderr


# --- data roots and output -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "a", "hi"),
        ("models", "list"),
        ("models", "rm", "a"),
        ("run", "a", "b", "--session", "k"),
    ],
)
@pytest.mark.parametrize("kind", ["a file", "below a file"])
def test_a_data_root_that_cannot_be_one_is_named(modeld, root, monkeypatch, arguments, kind):
    file = root / "plain"
    file.write_text("")
    bad = file if kind == "a file" else file / "below"
    monkeypatch.setenv("MODELD_DATA_ROOT", str(bad))
    result = modeld(*arguments)
    assert result.exit_code == Exit.USAGE
    assert "INVALID_REQUEST: data_root=" in result.stderr
    assert "MODELD_DATA_ROOT" in result.stderr


@pytest.mark.parametrize(
    "arguments", [("run", "tiny", "hi"), ("models", "list"), ("status", "--json"), ("--help",)]
)
def test_output_that_cannot_be_written_is_one_line_and_status_one(daemon, root, arguments):
    with open("/dev/full", "wb") as full:
        done = process(root, *arguments, stdout=full)
    assert done.returncode == Exit.UNEXPECTED
    assert b"standard output can't be written: No space left" in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr


def test_what_nobody_expected_is_one_line(modeld, daemon, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("one\ntwo")

    monkeypatch.setattr(Client, "models", fail)
    result = modeld("models", "list")
    assert result.exit_code == Exit.UNEXPECTED
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: RuntimeError: one two.")
    assert "modeld --help" in line


# --- kept conversations --------------------------------------------------------------------------


def test_another_window_opens_a_kept_conversations_session_anew(modeld, daemon):
    modeld("run", "tiny", "I am Ada", "--session", "me", "--window", "300")
    (old,) = daemon.world.sessions
    result = modeld("run", "tiny", "who am I", "--session", "me", "--window", "600")
    assert result.exit_code == 0
    assert (
        "the session of 'me' had window 300; it is opened anew with 600 and goes on"
        in result.stderr
    )
    (new,) = daemon.world.sessions.values()
    assert new.session_id != old
    assert (new.key, new.window) == ("me", 600)
    prefix = daemon.world.requests_of(session_pb2.TurnRequest)[-1].prefix
    assert prefix.segments[1].message.content[0].text == "you said: I am Ada"


def test_a_session_that_somebody_is_attached_to_is_not_closed_behind_their_back(modeld, daemon):
    modeld("run", "tiny", "hi", "--session", "me", "--window", "300")
    (session,) = daemon.world.sessions.values()
    session.attached = True
    result = modeld("run", "tiny", "hi", "--session", "me", "--window", "600")
    assert result.exit_code == Exit.REFUSED
    assert "modeld sessions close me" in result.stderr
    assert list(daemon.world.sessions) == [session.session_id]


def test_a_kept_conversation_belongs_to_its_model(modeld, daemon, root):
    modeld("run", "tiny", "hi", "--session", "notes")
    result = modeld("run", "other", "hi", "--session", "notes")
    assert result.exit_code == Exit.USAGE
    assert "held with tiny" in result.stderr
    assert "another key" in result.stderr
    assert daemon.world.resident == "tiny"


def test_a_conversation_kept_without_a_models_name_still_goes_on(modeld, daemon, root):
    modeld("run", "tiny", "hi", "--session", "k")
    file = root / "conversations" / "k.json"
    old = json.loads(file.read_text())
    del old["model"]
    file.write_text(json.dumps(old))
    assert modeld("run", "tiny", "more", "--session", "k").exit_code == 0
    assert json.loads(file.read_text())["model"] == "tiny"


def test_an_answer_cut_by_a_crash_says_what_stands(modeld, daemon, root):
    modeld("run", "tiny", "one", "--session", "w")
    daemon.world.crash_worker("Turn", typed.SessionFatal("it crashed"), after_chunks=2)
    result = modeld("run", "tiny", "two", "--session", "w")
    assert result.exit_code == Exit.WORKER
    assert result.stdout == "you said:\n"
    assert "What was shown stands" in result.stderr
    assert "goes on from before this question" in result.stderr
    assert "sent again" not in result.stderr
    assert modeld("run", "tiny", "three", "--session", "w").exit_code == 0
    kept = json.loads((root / "conversations" / "w.json").read_text())["exchanges"]
    assert [e["user"] for e in kept] == ["one", "three"]


def test_the_window_of_a_conversation_is_remembered(modeld, daemon):
    modeld("run", "tiny", "I am Ada", "--session", "me", "--window", "300")
    modeld("sessions", "close", "me")
    modeld("run", "tiny", "who am I", "--session", "me")
    (session,) = daemon.world.sessions.values()
    assert session.window == 300
    told = modeld("run", "tiny", "who am I", "--session", "me", "--window", "200000").stderr
    assert "the window is 100,000 tokens, not 200,000: model_ceiling" in told


def test_a_full_window_is_told_even_without_numbers(modeld, daemon):
    daemon.world.window_full = True
    result = modeld("run", "tiny", "hi", "--no-stats")
    assert "the window is full" in result.stderr
    assert "--window" in result.stderr
    told = modeld("chat", "tiny", stdin="hi\n").stderr
    assert "the window is full" in told
    assert "/new" in told


# --- sessions and models -------------------------------------------------------------------------


def test_sessions_are_listed_and_closed_by_key_or_id(modeld, daemon):
    assert "no sessions" in modeld("sessions").stderr
    modeld("run", "tiny", "hi", "--session", "a")
    modeld("run", "tiny", "hi", "--session", "b")
    assert "detached" in modeld("sessions").stdout
    listed = json.loads(modeld("sessions", "--json").stdout)["sessions"]
    assert [s["session_key"] for s in listed] == ["a", "b"]
    assert "closed s-" in modeld("sessions", "close", "a").stdout
    told = modeld("sessions", "close", listed[1]["session"]["session_id"], "--json").stdout
    assert json.loads(told)["closed"] == [listed[1]["session"]["session_id"]]
    assert daemon.world.sessions == {}
    missing = modeld("sessions", "close", "a")
    assert missing.exit_code == Exit.NOT_FOUND
    assert "modeld sessions" in missing.stderr


def test_a_resident_model_can_be_unloaded(modeld, daemon):
    assert modeld("models", "unload").stdout == "no model is resident\n"
    modeld("run", "tiny", "hi", "--session", "a")
    assert modeld("models", "unload", "other").stdout == "other is not resident\n"
    for session in daemon.world.sessions.values():
        session.attached = True
    assert modeld("models", "unload", "tiny").exit_code == Exit.REFUSED
    assert modeld("models", "unload", "tiny", "--force").stdout == (
        "unloaded tiny, 1 session closed\n"
    )
    assert daemon.world.resident == ""


def test_errors_that_another_command_or_option_solves_name_it(modeld, daemon):
    daemon.world.fail("RemoveModel", typed.SwitchRequired("resident"))
    assert "modeld models unload tiny" in modeld("models", "rm", "tiny").stderr
    daemon.world.fail("Turn", typed.ContextOverflow("too long"))
    assert "larger --window" in modeld("run", "tiny", "hi").stderr


def test_options_that_cannot_be_sent_start_nothing(modeld, root):
    assert modeld("run", "tiny", "hi", "--max-tokens", str(10**23)).exit_code == Exit.USAGE
    assert not daemon_start.log_path(root).exists()


def test_without_a_daemon_nothing_is_resident(modeld):
    assert json.loads(modeld("models", "unload", "--json").stdout)["was_resident"] is False


# --- chat and waiting ----------------------------------------------------------------------------


def test_chat_has_no_json_form_and_says_so(modeld, daemon):
    result = modeld("chat", "tiny", "--json", stdin="hi\n")
    assert result.exit_code == Exit.USAGE
    assert "--session" in result.stderr
    assert daemon.world.requests == []


def test_chat_names_a_command_it_does_not_know(modeld, daemon):
    told = modeld("chat", "tiny", stdin="/bogus\n/help\n").stderr
    assert "/bogus is unknown. /stats" in told
    assert "/help is unknown" not in told


def test_waiting_is_told_once_a_place(capsys):
    with Meanwhile() as meanwhile:
        for position, holder, age_s in ((2, "open", 1), (2, "open", 2), (1, "open", 3), (1, "", 0)):
            meanwhile.event(QueueStatus(position, holder, age_s))
    assert capsys.readouterr().err.splitlines() == [
        "waiting, position 2; now running: open ...",
        "waiting, position 1; now running: open ...",
        "waiting, position 1 ...",
    ]


# --- starting a daemon ---------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("status",), ("describe", "t"), ("tokenize", "t", "x")])
def test_commands_that_start_no_daemon_say_so(modeld, arguments):
    assert "start" in modeld(arguments[0], "--help").stdout
    assert "Doesn't start" in " ".join(modeld(arguments[0], "--help").stdout.split())
    result = modeld(*arguments)
    assert result.exit_code == Exit.NO_DAEMON
    assert "`modeld run` and `modeld chat` start one" in result.stderr


def test_a_bad_setting_is_the_same_error_under_run_as_under_serve(modeld, root):
    (root / "modeld.toml").write_text("max_sessions = 'many'\n")
    served, ran = modeld("serve"), modeld("run", "tiny", "hi")
    assert served.exit_code == ran.exit_code == Exit.USAGE
    said = served.stderr.splitlines()[0].removeprefix("error: INVALID_REQUEST: ")
    assert f"error: INVALID_REQUEST: The daemon can't start: {said}" in ran.stderr
    assert daemon_start.log_path(root).exists()


def test_a_quarantine_can_be_cleared(modeld, daemon):
    done = modeld("models", "clear", "tiny")
    assert done.exit_code == Exit.OK
    assert done.stdout == "tiny is cleared\n"
