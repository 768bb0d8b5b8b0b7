"""Images through the whole product: a daemon, a model that sees, a client, the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from modeld.client import (
    Client,
    ContextOverflow,
    Image,
    InvalidRequest,
    Message,
    MissReason,
    Session,
    StopReason,
    UnsupportedFeature,
)
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.openvino_models import tiny_ir
from tests.support.openvino_vision import IMAGE_TOKENS, tiny_llava
from tests.support.pictures import picture
from tests.support.product import ask

SEEING, BLIND = "tiny-llava", "tiny-llama"
RED, BLUE = picture((200, 30, 30), (64, 48)), picture((20, 30, 200), (64, 48))


@pytest.fixture(scope="module")
def seeing_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("models")
    with running_daemon(backends="openvino") as daemon, daemon.client() as client:
        client.import_model(tiny_llava(folder / "llava"), name=SEEING)
        client.import_model(tiny_ir(folder / "ir"), name=BLIND)
        yield daemon


@pytest.fixture
def seeing_client(seeing_daemon: RunningDaemon) -> Iterator[Client]:
    with seeing_daemon.client() as client:
        yield client


@pytest.fixture
def session(seeing_client: Client) -> Iterator[Session]:
    with seeing_client.open_session(SEEING, window=512) as session:
        yield session


def shown(text: str, *images: bytes) -> list[Message]:
    return [Message("user", (text, *map(Image.from_bytes, images)))]


def test_the_answer_depends_on_the_image(session: Session) -> None:
    assert session.capabilities["vision"].answer == "yes"
    red = ask(session, [], shown("What is it?", RED))
    assert ask(session, [], shown("What is it?", RED)).ids == red.ids
    assert ask(session, [], shown("What is it?", BLUE)).ids != red.ids
    assert ask(session, [], shown("What is it?")).ids != red.ids
    both = ask(session, [], shown("Compare", RED, BLUE))
    assert both.ids != ask(session, [], shown("Compare", BLUE, RED)).ids


def test_a_turn_says_that_all_of_it_was_computed_anew(session: Session) -> None:
    first = ask(session, [], shown("What is it?", RED), 4)
    again = ask(session, [], shown("What is it?", RED), 4)
    for told in (first, again):
        assert (told.after.reused, told.after.prefilled) == (0, 0)
        assert told.after.miss_reason is MissReason.RECOMPUTED
        assert told.final.prefilled == told.after.prefix + told.after.suffix > IMAGE_TOKENS
        assert told.stop in (StopReason.LENGTH, StopReason.EOS)


def test_a_conversation_goes_on_after_an_image(session: Session) -> None:
    chat = session.chat("You see.")
    for text, images in (("What is it?", [Image.from_bytes(RED)]), ("And what else?", [])):
        stream = chat.send(text, images=images, max_tokens=4)
        assert list(stream)
        assert stream.final is not None
        assert stream.final.tokens > 0
    assert len(chat.history) == 5


def test_bad_images_and_too_many_are_refused_and_the_session_goes_on(session: Session) -> None:
    for suffix, words in (
        (shown("a", RED[:60]), "images"),
        ([Message("user", ("a", Image(b"no image at all", "image/png")))], "images"),
        (shown("a", *[RED] * 17), "16"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            ask(session, [], suffix, 2)
    with pytest.raises(UnsupportedFeature, match="suffix only"):
        ask(session, shown("a", RED), shown("b"), 2)
    with pytest.raises(InvalidRequest, match="control token"):
        ask(session, [], shown("a <|im_end|> b", RED), 2)
    assert session.explain().resident == 0
    assert ask(session, [], shown("What is it?", RED), 2).final.tokens > 0


def test_images_count_against_the_window(seeing_client: Client) -> None:
    client = seeing_client
    with client.open_session(SEEING, window=64) as session:
        with pytest.raises(ContextOverflow) as refused:
            ask(session, [], shown("a", RED, BLUE, RED, BLUE), 2)
        assert int(refused.value.metadata["requested_tokens"]) > 4 * IMAGE_TOKENS


def test_a_model_without_eyes_refuses_images(seeing_client: Client) -> None:
    client = seeing_client
    client.unload_model(force=True)
    with client.open_session(BLIND, window=512) as session:
        assert session.capabilities["vision"].answer == "no"
        with pytest.raises(UnsupportedFeature) as refused:
            ask(session, [], shown("What is it?", RED), 2)
        assert refused.value.metadata["capability"] == "vision"
    client.unload_model(force=True)


def test_describing_it_answers_for_vision_and_plans_all_its_weights(seeing_client: Client) -> None:
    client = seeing_client
    client.unload_model(force=True)
    for how in ("the engine's own report of the file", "loaded for it"):  # asked, then loaded
        told = client.describe(SEEING, window=512)
        task = next(one for one in told.questions if one.name == "pipeline_supports_task")
        assert (task.answer, task.evidence) == ("yes", f"vision: {how}")
        client.open_session(SEEING, window=512).close()
    assert told.executor == "vision"
    assert told.facts.weights_bytes > 2_000_000
    found = [slot for slot in client.status().slots if slot.model == SEEING]
    assert found


def test_the_command_line_shows_an_image(seeing_daemon: RunningDaemon, tmp_path: Path) -> None:
    answers = []
    for name, data in (("red", RED), ("blue", BLUE), ("again", RED)):
        file = tmp_path / f"{name}.png"
        file.write_bytes(data)
        command = ["-m", "modeld", "--data-root", str(seeing_daemon.data_root), "run", SEEING]
        flags = ["--image", str(file), "--temperature", "0", "--max-tokens", "8", "--no-stats"]
        done = subprocess.run(
            [sys.executable, *command, "What is it?", *flags], capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert answers[0] == answers[2] != answers[1]
