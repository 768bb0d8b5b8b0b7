"""Images on their way: the client's messages, the manifest, the daemon's conversion, the limits."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import grpc
import pytest

from modeld.cli import conversations
from modeld.cli.conversations import Conversation, Exchange
from modeld.client import Image, InvalidRequest, Message
from modeld.client.calls import call
from modeld.client.chat import History, parted
from modeld.client.errors import MessageTooLarge, typed_error
from modeld.client.prompts import Text, prompt_part, wire_prompt
from modeld.client.transport import MAX_MESSAGE_BYTES, check_size
from modeld.shared import images as limits
from modeld.shared.codec import canonical
from modeld.shared.errors import UnsupportedFeature
from modeld.shared.manifest import message_hash, sha256_hex
from modeld.shared.messages import MAX_FRAME_BYTES, Heartbeat, Hello, ImageIn, RenderOp
from modeld.shared.messages import Message as WireMessage
from modeld.supervisor.link import Link
from modeld.supervisor.rpc import convert
from modeld.v1 import session_pb2
from tests.support.pictures import picture, png_of

PNG = picture()


def sent(*messages: Message) -> session_pb2.Prompt:
    part = prompt_part(list(messages), stable=False)
    return wire_prompt(part, prompt_format="chat", session_id="s").proto


def taken(prompt: session_pb2.Prompt, part: str = "suffix", *, vision: bool = True) -> WireMessage:
    done = convert.prompt_in(prompt, part, prompt_format="chat", max_bytes=1 << 25, vision=vision)
    message = done.prompt.segments[-1].message
    assert message is not None
    assert done.segments[-1].hash == prompt.segments[-1].hash  # both sides say the same
    return message


def test_each_image_arrives_with_its_place_among_the_text() -> None:
    other = picture(kind="JPEG")
    content = (Image(PNG, "image/png"), "before", Image(other), Image(PNG), " after")
    message = taken(sent(Message("user", content)))
    assert message.text == "before after"
    assert [(image.data, image.at) for image in message.images] == [(PNG, 0), (other, 6), (PNG, 6)]


def test_the_manifest_covers_an_image_by_the_digest_of_its_bytes() -> None:
    record = {
        "content": [{"image": hashlib.sha256(PNG).hexdigest(), "text": ""},
                    {"image": "", "text": "what?"}],
        "name": "", "role": "user", "tool_call_id": "", "tool_calls": [],
    }  # fmt: skip
    expected = hashlib.sha256(canonical(record)).hexdigest()
    prompt = sent(Message.user("what?", [Image(PNG)]))
    assert prompt.segments[0].hash == expected
    assert expected != sent(Message.user("what?", [Image(picture((1, 2, 3)))])).segments[0].hash
    assert expected != sent(Message("user", ("what?", Image(PNG)))).segments[0].hash


def test_the_hash_of_a_message_with_an_image_is_the_contracts() -> None:
    found = message_hash(role="user", content=[("", sha256_hex(b"\x89PNG")), ("what?", "")])
    assert found == "c069b0f334bb7648a8b4a4d6f9c115e686ec9797970b57a4f7c236bce4cc44df"
    comment = (Path(__file__).parents[2] / "proto/modeld/v1/common.proto").read_text()
    assert found in comment


def test_a_model_without_vision_gets_no_image() -> None:
    with pytest.raises(UnsupportedFeature) as error:
        taken(sent(Message.user("x", [Image(PNG)])), vision=False)
    assert error.value.metadata["capability"] == "vision"


def test_an_image_in_the_prefix_is_refused() -> None:
    with pytest.raises(UnsupportedFeature, match="suffix only") as error:
        taken(sent(Message.user("x", [Image(PNG)])), "prefix")
    assert error.value.metadata["capability"] == "vision"


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (Image(b"GIF89a" + bytes(30)), "neither PNG nor JPEG nor WebP"),
        (Image(PNG, "image/webp"), "mime_type"),
        (Image(png_of(40_000, 40_000)), "40000 x 40000 pixels"),
        (Image(PNG + bytes(limits.LIMITS.bytes_each)), "bytes an image"),
    ],
)
def test_a_bad_image_is_refused_by_name_before_it_reaches_a_worker(image: Image, said: str) -> None:
    good = Message.user("x", [Image(PNG)])
    with pytest.raises(InvalidRequest, match=said) as error:
        taken(sent(good, Message.user("y", [Image(PNG), image])))
    assert error.value.metadata["field"].startswith("suffix.segments[1].images[1]")


def test_more_images_than_a_prompt_takes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="at most 16 images"):
        taken(sent(Message.user("x", [Image(PNG)] * 17)))
    assert len(taken(sent(Message.user("x", [Image(PNG)] * 16))).images) == 16


# --- the client's side


def test_a_file_becomes_an_image_of_its_type(tmp_path: Path) -> None:
    path = tmp_path / "misnamed.png"
    path.write_bytes(picture(kind="JPEG"))
    assert Image.from_file(path) == Image(path.read_bytes(), "image/jpeg")
    with pytest.raises(InvalidRequest, match="can't be read"):
        Image.from_file(tmp_path / "none.png")
    path.write_text("text")
    with pytest.raises(InvalidRequest, match="PNG, JPEG or WebP"):
        Image.from_file(path)


async def test_a_file_is_read_beside_the_event_loop_too(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    assert await Image.from_file_async(path) == Image(PNG, "image/png")


def test_a_conversation_goes_into_the_suffix_from_its_first_image_on() -> None:
    history = History.starting("Be brief.")
    history.add(Message.user("one"), None, "1")
    shown, plain = Message.user("see", [Image(PNG)]), Message.user("and?")
    prefix, suffix = history.parts(plain)
    assert (len(prefix), suffix) == (3, [plain])
    prefix, suffix = history.parts(shown)
    assert (len(prefix), suffix) == (3, [shown])
    history.add(shown, None, "a cat")
    prefix, suffix = history.parts(plain)
    assert (len(prefix), suffix) == (3, [shown, Message("assistant", "a cat"), plain])
    assert parted([Text("a"), Text("b")]) == ([Text("a")], [Text("b")])


def test_a_kept_conversation_keeps_its_images(tmp_path: Path) -> None:
    kept = Conversation("chat", "m", [], [Exchange("what?", "a cat")])
    kept.exchanges[0].images = conversations.encoded([Image(PNG, "image/png")])
    conversations.save(tmp_path, "k", kept)
    again = conversations.load(tmp_path, "k", "chat", "m")
    assert again.items()[0] == Message.user("what?", [Image(PNG, "image/png")])


@pytest.mark.parametrize("text", ["%%%", base64.b64encode(b"no image").decode()])
def test_a_kept_conversation_with_a_damaged_image_says_so(tmp_path: Path, text: str) -> None:
    kept = Conversation("chat", "m", [], [Exchange("what?", "a cat", images=[text])])
    conversations.save(tmp_path, "k", kept)
    with pytest.raises(InvalidRequest):
        conversations.load(tmp_path, "k", "chat", "m")
    path = conversations.path_of(tmp_path, "k")
    assert json.loads(path.read_text())["exchanges"][0]["images"] == [text]


def test_a_request_beyond_a_message_is_refused_before_it_is_sent() -> None:
    request = sent(Message.user("x", [Image(bytes(MAX_MESSAGE_BYTES))]))
    turn = session_pb2.TurnRequest(suffix=request)
    with pytest.raises(InvalidRequest, match="at most 67108864 bytes a call"):
        check_size(call("SessionService", "Turn", turn, lambda m: m, None))


def test_a_transports_own_limit_is_a_typed_error() -> None:
    error = typed_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max", ())
    assert isinstance(error, MessageTooLarge)
    assert "max_message_bytes" in str(error)


class Silent:
    """A link's listener that nothing should reach."""

    def on_hello(self, hello: Hello) -> None:
        raise AssertionError(hello)

    def on_heartbeat(self, beat: Heartbeat) -> None:
        raise AssertionError(beat)

    def on_protocol_error(self, text: str) -> None:
        raise AssertionError(text)


async def test_an_operation_beyond_a_frame_is_refused_and_the_worker_is_left_alone() -> None:
    link = Link("owner", 0.25)
    await link.start()
    peer = link.admit(b"\1" * 16, Silent())
    image = ImageIn(data=bytes(MAX_FRAME_BYTES), mime_type="")
    big = WireMessage(role="user", text="", images=[image])
    with pytest.raises(InvalidRequest, match="fits a frame of 67108864 bytes"):
        link.start_op(peer.epoch, 1, RenderOp(messages=[big], tools=[], add_generation_prompt=True))
    assert not peer.operations
    await link.close()
