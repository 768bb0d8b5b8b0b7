"""`modeld plan` and `doctor` at their edges: names that files have too, numbers that no field has
room for, machine files that are none, and commands to type that ask the same question again.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from modeld.cli.exit_codes import Exit
from modeld.cli.plan_view import remedy_command, with_data_root
from modeld.client.values_capacity import Remedy
from modeld.v1 import session_pb2
from tests.support import tiny_models
from tests.support.fake_daemon import FakeDaemon

NO_USER = "~no-user-has-this-name/x.gguf"
BY_DAEMON = "planned by the running daemon"
A_FILE = "planned here, for a file that isn't in a store"


@pytest.fixture
def modeld(modeld):
    """The command, of which nothing may be unexpected."""

    def run(*arguments: str | Path, **options: str) -> Result:
        result: Result = modeld(*arguments, **options)
        assert "Unexpected" not in result.stderr
        return result

    return run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return tiny_models.qwen2(path)


@pytest.fixture(scope="module")
def small_machine(tmp_path_factory) -> Path:
    """A machine on which nothing fits."""
    path: Path = tmp_path_factory.mktemp("machines") / "small machine.json"
    path.write_text(json.dumps({"host": {"total": "64MiB", "available": "4MiB"}}))
    return path


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """The current folder."""
    folder: Path = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def asked(daemon: FakeDaemon) -> list[Any]:
    return daemon.world.requests_of(session_pb2.DescribeRequest)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option", [("--ctx", str(2**63)), ("--ctx", str(2**31)), ("--sessions", "1025")]
)
def test_a_number_that_no_plan_can_have_is_refused_with_and_without_a_daemon(
    modeld, root, tiny, option
):
    alone = modeld("plan", tiny, *option)
    with FakeDaemon(root) as daemon:
        answered = modeld("plan", "tiny", *option)
        assert asked(daemon) == []
    assert alone.exit_code == answered.exit_code == Exit.USAGE
    assert option[0] in alone.stderr
    assert alone.stderr == answered.stderr


def test_the_largest_numbers_that_may_be_asked_are_answered(modeld, tiny):
    largest = modeld("plan", tiny, "--ctx", str(2**31 - 1), "--sessions", "1024", "--json")
    assert largest.exit_code in (0, Exit.NO_ROOM, Exit.USAGE)
    assert json.loads(largest.stdout)


# --- names and paths -----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["", " "])
def test_an_empty_name_is_wrong_usage(modeld, here, model):
    result = modeld("plan", model)
    assert result.exit_code == Exit.USAGE
    assert " plan [OPTIONS] MODEL" in result.stderr
    assert "it is empty" in result.stderr


def test_a_home_folder_that_nobody_has_is_refused_where_it_was_named(modeld, tiny):
    for arguments in (("plan", NO_USER), ("plan", tiny, "--draft", NO_USER)):
        result = modeld(*arguments)
        assert result.exit_code == Exit.USAGE
        assert "INVALID_REQUEST" in result.stderr
        assert NO_USER in result.stderr
    imported = modeld("models", "import", NO_USER)
    assert imported.exit_code == Exit.USAGE
    assert NO_USER in imported.stderr


@pytest.mark.parametrize("store", [True, False])
def test_a_name_longer_than_any_files_is_no_models(modeld, root, tiny, store):
    if store:
        modeld("models", "import", tiny, "--name", "mine")
    for arguments in (("plan", "x" * 300), ("plan", tiny, "--draft", "x" * 300)):
        result = modeld(*arguments)
        assert result.exit_code == (Exit.USAGE if store else Exit.NOT_FOUND)
        assert ("INVALID_REQUEST" if store else "MODEL_NOT_FOUND") in result.stderr


def test_a_path_longer_than_any_files_can_not_be_loaded(modeld, tiny):
    long = f"./{'x' * 300}"
    assert modeld("plan", long).exit_code == Exit.WORKER
    assert modeld("plan", tiny, "--projector", long).exit_code == Exit.WORKER
    assert modeld("plan", tiny, "--device", long).exit_code == Exit.USAGE


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_name_of_the_store_goes_before_what_lies_here_by_that_name(modeld, here, tiny, kind):
    modeld("models", "import", tiny, "--name", "mine")
    if kind == "folder":
        (here / "mine").mkdir()
    else:
        (here / "mine").write_text("no model")
    result = modeld("plan", "mine", "--draft", "mine", "--ctx", "512")
    assert result.exit_code == 0
    assert result.stdout.startswith("mine (llama, qwen2")
    assert "planned here; no daemon runs" in result.stdout
    assert "draft: mine" in result.stdout
    assert modeld("plan", "./mine").exit_code == Exit.WORKER


def test_a_name_that_the_daemon_knows_goes_before_what_lies_here(modeld, daemon, here):
    (here / "tiny").mkdir()
    result = modeld("plan", "tiny")
    assert result.exit_code == 0
    assert BY_DAEMON in result.stdout


def test_a_file_here_that_is_nobodys_name_is_planned_beside_a_daemon(modeld, daemon, here, tiny):
    (here / "my.gguf").hardlink_to(tiny)
    result = modeld("plan", "my.gguf", "--ctx", "512")
    assert result.exit_code == 0
    assert A_FILE in result.stdout
    assert asked(daemon) == []


def test_a_file_here_is_planned_where_a_daemon_does_not_answer(modeld, daemon, here, tiny):
    (here / "my.gguf").hardlink_to(tiny)
    daemon.world.owner = "another"
    assert A_FILE in modeld("plan", "my.gguf", "--ctx", "512").stdout


def test_a_refusal_calls_a_model_by_the_name_that_it_was_asked_for_by(
    modeld, tmp_path, tiny, small_machine
):
    modeld("models", "import", tiny, "--name", "mine")
    file = tmp_path / "renamed.gguf"
    file.hardlink_to(tiny)
    for model, name in (("mine", "mine"), (file, "renamed")):
        result = modeld("plan", model, "--device", small_machine)
        assert result.exit_code == Exit.NO_ROOM
        assert f"refused: Not enough memory for {name} " in result.stdout


# --- machine files -------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("running", [True, False])
def test_a_machine_file_that_is_not_utf8_is_refused(
    modeld, root, tiny, tmp_path, encoding, running
):
    path = tmp_path / "machine.json"
    path.write_text('{"host": {"total": "8GiB", "available": "4GiB"}}', encoding=encoding)
    if running:
        with FakeDaemon(root) as daemon:
            result = modeld("plan", "tiny", "--device", path)
            assert asked(daemon) == []
    else:
        result = modeld("plan", tiny, "--device", path)
    assert result.exit_code == Exit.USAGE
    assert str(path) in result.stderr
    assert "UTF-8" in result.stderr


def test_a_machine_files_own_name_is_told_of_a_daemons_answer(modeld, daemon, small_machine):
    told = json.loads(modeld("plan", "tiny", "--device", small_machine, "--json").stdout)
    assert told["machine"]["source"] == str(small_machine)
    assert f"machine ({small_machine})" in modeld("plan", "tiny", "--device", small_machine).stdout


# --- what a daemon is asked ----------------------------------------------------------------------


def test_a_plan_is_of_another_open_not_of_the_session_that_is_open(modeld, daemon, root):
    modeld("run", "tiny", "hello", "--session", "me")
    described = json.loads(modeld("describe", "tiny", "--json").stdout)
    assert described["resolution_source"] == "open_session"
    planned = json.loads(modeld("plan", "tiny", "--json").stdout)
    assert planned["resolution_source"] == "hypothetical"
    (root / "models" / "tiny").mkdir(parents=True)
    modeld("doctor")
    assert [request.hypothetical for request in asked(daemon)] == [False, True, True]


# --- a draft's types -----------------------------------------------------------------------------


def test_a_draft_is_planned_with_the_types_that_the_settings_would_have(modeld, tiny):
    def draft_kv(*more: str) -> int:
        text = modeld("plan", tiny, "--ctx", "1024", "--draft", tiny, *more).stdout
        (found,) = re.findall(r"draft: .* (\d+) of KV", text)
        return int(found)

    assert draft_kv("--what-if", "k_type=q8_0") < draft_kv()
    assert draft_kv("--what-if", "v_type=f32") > draft_kv()


# --- commands to type ----------------------------------------------------------------------------


ASKED = (("--ctx", "9"), ("--kv", "q8_0/f16"), ("--device", "a b.json"), ("--sessions", "3"))
SAME = "--ctx 9 --kv q8_0/f16 --device 'a b.json' --sessions 3"


def test_another_model_is_asked_the_same_question():
    command = remedy_command(Remedy("model", "smaller", ""), "m", ASKED)
    assert command == f"modeld plan smaller {SAME}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("modeld plan m --ctx 9", "modeld --data-root '/a b' plan m --ctx 9"),
        ("modeld drain --wait, then modeld serve",
         "modeld --data-root '/a b' drain --wait, then modeld --data-root '/a b' serve"),
        ("pip install modeld", "pip install modeld"),
        ("pip install 'modeld[llama]'", "pip install 'modeld[llama]'"),
        ("", ""),
    ],
)  # fmt: skip
def test_commands_keep_the_data_root_that_was_named(text, expected):
    assert with_data_root(text, Path("/a b")) == expected
    assert with_data_root(text, None) == text


def commands(result: Result) -> list[list[str]]:
    """Of each remedy, the words after `modeld`."""
    return [shlex.split(found) for found in re.findall(r": modeld (.*)$", result.stdout, re.M)]


def test_a_remedy_that_is_typed_asks_the_same_data_root(modeld, daemon, root, monkeypatch):
    monkeypatch.setenv("MODELD_DATA_ROOT", str(root / "elsewhere"))
    refused = modeld("--data-root", root, "plan", "tiny", "--ctx", "30000")
    typed = commands(refused)
    assert {words[2] for words in typed} == {"plan", "serve"}
    assert all(words[:2] == ["--data-root", str(root)] for words in typed)
    (window,) = [words for words in typed if "--ctx" in words and "30000" not in words]
    assert modeld(*window).exit_code == 0
    described = modeld("describe", "tiny", "--window", "30000", "--data-root", root)
    assert commands(described) == typed


def test_a_data_root_from_the_environment_is_not_repeated(modeld, daemon):
    refused = modeld("plan", "tiny", "--ctx", "30000")
    assert commands(refused)
    assert "--data-root" not in refused.stdout


def test_what_doctor_says_to_do_is_for_the_data_root_that_was_named(modeld, root):
    text = modeld("doctor", "--data-root", root).stdout
    assert f"do: modeld --data-root {root} serve" in text
    assert f"modeld --data-root {root} models import --demo" in text
    assert "--data-root" not in modeld("doctor").stdout


# --- one bad model -------------------------------------------------------------------------------


def test_a_model_that_nobody_can_plan_is_a_problem_and_the_others_are_told(modeld, root, tiny):
    for name in ("bad", "good"):
        modeld("models", "import", tiny, "--name", name)
    path = root / "models" / "bad" / "model.json"
    record = json.loads(path.read_text())
    record["facts"]["layers"][0]["key_length"] = 2**62  # more bytes than an answer can hold
    path.write_text(json.dumps(record))
    result = modeld("doctor", "--json")
    assert result.exit_code == Exit.UNEXPECTED
    report = json.loads(result.stdout)
    levels = {
        finding["text"].partition(":")[0]: finding
        for finding in report["findings"]
        if finding["area"] == "models"
    }
    assert levels["bad"]["level"] == "problem"
    assert "ValueError: " in levels["bad"]["text"]
    assert levels["bad"]["remedy"]
    assert levels["good"]["level"] == "ok"
    assert [model["fits"] for model in report["models"]] == [None, True]
    text = modeld("doctor").stdout
    assert "Traceback" not in text
    assert "disk" in text
