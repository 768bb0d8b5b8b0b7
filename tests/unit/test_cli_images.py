"""Images and adapters on the command line, against a small daemon that follows the protos."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from modeld.cli.adapters import parsed
from modeld.cli.main import cli
from modeld.v1 import session_pb2 as pb
from tests.support.fake_daemon import FakeDaemon
from tests.support.lora_files import peft
from tests.support.pictures import picture

Modeld = Callable[..., Result]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="md") as folder:
        monkeypatch.setenv("MODELD_DATA_ROOT", folder)
        yield Path(folder)


@pytest.fixture
def daemon(root: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(root) as daemon:
        yield daemon


def modeld(*arguments: str, stdin: str | None = None) -> Result:
    result = CliRunner().invoke(cli, arguments, input=stdin)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def png(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    path.write_bytes(picture())
    return path


def images(segment: object) -> list[bytes]:
    return [part.image.data for part in segment.message.content if part.HasField("image")]  # type: ignore[attr-defined]


def test_run_sends_an_image_before_the_prompt_in_the_suffix(daemon: FakeDaemon, png: Path) -> None:
    result = modeld("run", "tiny", "what is it?", "--system", "Be brief.", "--image", str(png))
    assert result.exit_code == 0, result.stderr
    (turn,) = daemon.world.requests_of(pb.TurnRequest)
    (shown,) = turn.suffix.segments
    assert images(shown) == [png.read_bytes()]
    assert shown.message.content[0].image.mime_type == "image/png"
    assert shown.message.content[1].text == "what is it?"
    assert not any(images(segment) for segment in turn.prefix.segments)


def test_a_kept_conversation_shows_its_image_again(daemon: FakeDaemon, png: Path) -> None:
    modeld("run", "tiny", "hello", "--session", "k")
    modeld("run", "tiny", "what is it?", "--session", "k", "--image", str(png))
    png.unlink()
    result = modeld("run", "tiny", "and?", "--session", "k")
    assert result.exit_code == 0, result.stderr
    last = daemon.world.requests_of(pb.TurnRequest)[-1]
    assert [bool(images(segment)) for segment in last.suffix.segments] == [True, False, False]
    assert len(last.prefix.segments) == 2


def test_what_is_no_image_starts_nothing(root: Path, tmp_path: Path, png: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no image")
    result = modeld("run", "tiny", "what?", "--image", str(text))
    assert result.exit_code == 2
    assert "PNG, JPEG or WebP" in result.stderr
    assert modeld("run", "tiny", "what?", "--raw", "--image", str(png)).exit_code == 2
    assert not list(root.iterdir())


def test_chat_shows_an_image_with_the_next_message_only(daemon: FakeDaemon, png: Path) -> None:
    lines = f"/image\n/image {png}.jpg\n/image {png}\nwhat is it?\nand?\n"
    result = modeld("chat", "tiny", stdin=lines)
    assert "goes with the next message" in result.stderr
    assert "can't be read" in result.stderr
    turns = daemon.world.requests_of(pb.TurnRequest)
    assert [len(images(turn.suffix.segments[-1])) for turn in turns] == [1, 0]
    assert images(turns[1].suffix.segments[0]) == [png.read_bytes()]


# --- adapters


def test_an_adapter_is_kept_listed_and_removed_without_a_daemon(root: Path, tmp_path: Path) -> None:
    ones = np.ones((2, 2), np.float32)
    file = tmp_path / "french.safetensors"
    file.write_bytes(peft({"model.layers.0.mlp.up_proj": (ones, ones)}, alpha=2))
    done = modeld("models", "import", str(file), "--type", "adapter")
    assert done.exit_code == 0, done.stderr
    assert "--adapter french" in done.stderr
    (kept,) = json.loads(modeld("models", "list", "--json").stdout)["models"]
    assert (kept["name"], kept["type"]) == ("french", "adapter")
    assert modeld("models", "rm", "french").exit_code == 0
    assert json.loads(modeld("models", "list", "--json").stdout)["models"] == []


@pytest.mark.parametrize("value", ["=1", "a=", "a=much", "a=0", "a=nan", "a=inf"])
def test_an_adapter_option_that_says_no_scale_is_a_usage_error(root: Path, value: str) -> None:
    result = modeld("run", "tiny", "x", "--adapter", value)
    assert result.exit_code == 2
    assert "NAME=SCALE" in result.stderr
    assert (parsed("a"), parsed("a=-0.5")) == (("a", 1.0), ("a", -0.5))


def test_an_unknown_adapter_is_named(daemon: FakeDaemon) -> None:
    result = modeld("run", "tiny", "x", "--adapter", "frensh")
    assert result.exit_code != 0
    assert "No adapter is named 'frensh'" in result.stderr
    assert not daemon.world.requests_of(pb.OpenSessionRequest)
