"""What the command prints: nothing that a terminal obeys, on any stream, in any encoding."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from click.testing import Result

from modeld.cli import output, plan_view
from modeld.cli.budget_bar import Picture, draw
from modeld.cli.exit_codes import Exit
from modeld.cli.progress import Meanwhile
from modeld.client import Client, ModelInfo
from modeld.shared.errors import ModelLoadFailed
from modeld.v1 import common_pb2
from tests.support import tiny_models
from tests.support.fake_daemon import FakeSession

TITLE = "\x1b]0;owned\x07"  # sets a terminal's title
CLEAR = "\x1b[2J"
C1 = "\x9b31m"  # the same as ESC [ in one character
TURNED = "\u202e"  # what follows is shown from right to left
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


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


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def terminal_of(monkeypatch) -> Terminal:
    """Both standard streams are this terminal, without colours."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


# --- controls ------------------------------------------------------------------------------------


@pytest.fixture
def hostile_machine(tmp_path) -> Path:
    path: Path = tmp_path / "machine.json"
    card = {
        "id": "gpu0",
        "name": f"Card{TITLE}{C1}",
        "kind": "nvidia",
        "engine_name": f"CUDA0{CLEAR}",
        "total": "6GiB",
        "free": "5GiB",
        "note": f"a note{TURNED}{CLEAR}\nok       host: healthy",
        "processes": [{"pid": 1, "name": f"game{TITLE}"}],
    }
    machine = {
        "host": {"total": "8GiB", "available": "6GiB"},
        "devices": [card],
        "notes": [f"told{TITLE}\r\n{CLEAR}"],
    }
    path.write_text(json.dumps(machine))
    return path


def test_a_files_names_and_notes_reach_no_terminal_as_commands(
    modeld, tiny, tmp_path, hostile_machine
):
    model = tmp_path / f"model{CLEAR}.gguf"
    model.hardlink_to(tiny)
    result = modeld("plan", model, "--device", hostile_machine)
    assert result.exit_code == 0
    assert "Card]0;owned31m" in result.stdout
    assert "CUDA0[2J (Card" in result.stdout  # over its picture, too
    assert "a note[2J ok       host: healthy" in result.stdout  # in one line, within its cell
    assert CONTROL.findall(result.stdout + result.stderr) == []


def test_an_error_names_a_file_without_obeying_it(modeld, tmp_path):
    result = modeld("plan", "tiny", "--device", tmp_path / f"none{TITLE}{C1}.json")
    assert result.exit_code == Exit.USAGE
    assert "none]0;owned31m.json describes no machine" in result.stderr
    assert CONTROL.findall(result.stderr) == []


def test_a_terminal_gets_no_controls_either(monkeypatch):
    terminal = terminal_of(monkeypatch)
    hostile = f"x{TITLE}{CLEAR}{C1}{TURNED}y"
    output.say(hostile)
    output.note(hostile)
    output.table(hostile, ("what", ""), [(hostile, 1)])
    output.report_error(ModelLoadFailed(hostile, metadata={"path": hostile}), False)
    assert terminal.getvalue().count("x]0;owned[2J31my") == 6
    assert CONTROL.findall(terminal.getvalue()) == []


def test_a_picture_on_a_terminal_has_no_controls(monkeypatch):
    terminal = terminal_of(monkeypatch)
    for line in draw(Picture(f"x{TITLE}", (), note=f"y{CLEAR}"), 80, glyphs=True):
        plan_view._print(line)
    assert "x]0;owned" in terminal.getvalue()
    assert CONTROL.findall(terminal.getvalue()) == []


def test_what_goes_on_is_told_without_controls(capsys):
    Meanwhile().show(f"planning x{TITLE}")
    assert capsys.readouterr().err == "planning x]0;owned ...\n"


def test_json_keeps_every_character_and_a_terminal_obeys_none(capsys):
    text = f"x{TITLE}{C1}\x7fy"
    output.emit_json({"text": text})
    printed = capsys.readouterr().out
    assert CONTROL.findall(printed) == []
    assert json.loads(printed) == {"text": text}


# --- encodings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "koi8-r"])
@pytest.mark.parametrize(
    "arguments", [("status",), ("sessions",), ("describe", "tiny"), ("plan", "tiny"), ("doctor",)]
)
def test_every_command_has_something_to_show_for_what_the_stream_lacks(
    modeld, daemon, charset, arguments
):
    daemon.world.sessions["s"] = FakeSession("s", 1, "tiny", "", common_pb2.Identity())
    result = modeld(*arguments, charset=charset)
    assert result.exit_code == 0
    assert "–" not in result.stdout
    if arguments != ("doctor",):
        assert re.search(r"(^|\s)-($|\s)", result.stdout)


def test_models_whose_type_is_unknown_are_listed_in_ascii(modeld, daemon, monkeypatch):
    odd = ModelInfo("odd", "llama", "ab" * 32, 1, "llama", "", 4096, False, 0, False)
    monkeypatch.setattr(Client, "models", lambda _: [odd])
    result = modeld("models", "list", charset="ascii")
    assert result.exit_code == 0
    assert re.search(r"^odd +llama +1 B +llama +- +4,096", result.stdout, re.MULTILINE)


def test_json_is_json_in_ascii_too(modeld, tiny, tmp_path):
    model = tmp_path / "größe.gguf"
    model.hardlink_to(tiny)
    result = modeld("plan", model, "--ctx", "512", "--json", charset="ascii")
    assert result.exit_code == 0
    assert result.stdout.isascii()
    assert json.loads(result.stdout)["model"] == "größe"


def test_a_file_whose_name_is_no_text_is_refused(modeld, tiny, tmp_path):
    model = tmp_path / "odd\udcff.gguf"
    model.hardlink_to(tiny)
    for arguments in ((model,), (tiny, "--draft", model)):
        result = modeld("plan", *arguments)
        assert result.exit_code == Exit.USAGE
        assert "a path in UTF-8" in result.stderr


def test_a_machine_file_whose_name_is_no_text_is_planned_for(modeld, tiny, tmp_path):
    path = tmp_path / "odd\udcff.json"
    path.write_text('{"host": {"total": "8GiB", "available": "6GiB"}}')
    result = modeld("plan", tiny, "--device", path, "--ctx", "512")
    assert result.exit_code == 0
    assert "odd\\udcff.json): 6.4 GB available" in result.stdout


# --- tables --------------------------------------------------------------------------------------


def test_numbers_below_zero_are_aligned_with_the_others(capsys):
    output.table("", ("left", "name"), [("-876.3 MB", "a"), ("10.1 GB", "b"), ("–", "c")])
    assert capsys.readouterr().out.splitlines() == [
        "     left  name",
        "-876.3 MB  a",
        "  10.1 GB  b",
        "        –  c",
    ]
