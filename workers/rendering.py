"""Rendering messages so that nothing in their content can become a control token.

Owns the distinction of the template's own text from what the messages bring, and where their
images stand. Knows nothing of tokenizers beyond their control texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from modeld.shared.errors import InvalidRequest, ModeldError, UnsupportedFeature, unsupported
from modeld.shared.messages import Message
from modeld.workers.contents import (
    content_texts,
    found,
    map_content,
    marked,
    with_images,
    without_stand_ins,
)
from modeld.workers.images import IMAGE, Vision, no_vision
from modeld.workers.splits import Controls, Part
from modeld.workers.template import ChatTemplate, Plain

Span = tuple[int, int]  # characters of the rendered text

MAX_JUDGED_CHARS = 4 * 1024 * 1024  # of contents whose verdict is remembered

_PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
_PRIVATE_CHARS = re.compile("[\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


@dataclass(frozen=True)
class Rendered:
    """``parts`` tile ``text``; those of token ``IMAGE`` are the messages' images, in order."""

    text: str
    parts: list[Part]


class ChatRenderer:
    """Renders with one template, for one vocabulary's control tokens.

    With ``vision``, ``controls`` know its marker as ``IMAGE``: the template's own marks an image.
    """

    def __init__(
        self, template: ChatTemplate, controls: Controls, vision: Vision | None = None
    ) -> None:
        self._template = template
        self._vision = vision
        self._controls = controls
        self._fixed = "".join([template.source, *template.special_texts.values()])
        # Whether template text on either side of a content could complete it to a control text.
        self._dangling = any(map(controls.starts_at_end, template.literals)) and any(
            map(controls.ends_at_start, template.literals)
        )
        self._judged: dict[str, bool] = {}
        self._judged_chars = 0
        self._tools: tuple[list[str], list[Plain], bool] | None = None

    def render(self, messages: Sequence[Message], tools: Sequence[str], cue: bool) -> Rendered:
        """The text and its parts: control tokens only where the template itself writes them.

        Where no content holds or touches a control text, the rendering is split as it stands.
        Else those contents are rendered with every character that a control text could need
        replaced by one found nowhere else, and put back after the split. Raises InvalidRequest
        if that changes the rendering: then the template reads or transforms the content, and
        what stands where can't be told.

        Raises UnsupportedFeature (capability ``vision``) for images where the model takes none.
        """
        self._check_images(messages, tools)
        stand_ins = self._stand_ins(messages, tools)
        plain = self._plain(messages, stand_ins)
        parts = self._split(plain, tools, cue)
        if self._vision is None:
            return Rendered("".join(part.text for part in parts), parts)
        parts = without_stand_ins(parts, stand_ins, self._vision.marker)
        images = sum(len(message.images) for message in messages)
        written = sum(part.token == IMAGE for part in parts)
        if written != images:
            raise self._miscounted(written, images)
        return Rendered("".join(part.text for part in parts), parts)

    def _split(self, plain: list[Plain], tools: Sequence[str], cue: bool) -> list[Part]:
        parsed, tools_touch = self._parsed(tools)
        text = self._template.render_plain(plain, parsed, cue)
        touches = [self._message_touches(message) for message in plain]
        if not tools_touch and not any(touches):
            return self._controls.split(text)
        free = _free_characters(text, self._fixed, *_texts([plain, parsed]))
        there = [(char, next(free)) for char in sorted(self._controls.alphabet)]
        back = [(stand_in, char) for char, stand_in in there]

        def shield(content: str) -> str:
            return _exchange(content, there) if self._touches(content) else content

        shielded = self._shielded(plain, parsed, cue, shield)
        if shielded is None or _exchange(shielded, back) != text:
            raise InvalidRequest(
                "A message or tool contains the text of one of the model's control tokens, and "
                "the model's chat template transforms it, so that it can't be told from the "
                "template's own. Remove or break up that text, or use a session with "
                "prompt_format=raw.",
                metadata={
                    "field": "messages",
                    "value": "",
                    "allowed": "content without control-token text, for this template",
                },
            )
        return [
            Part(_exchange(part.text, back), part.token) for part in self._controls.split(shielded)
        ]

    def spans(
        self, messages: Sequence[Message], tools: Sequence[str], cue: bool, rendered: Rendered
    ) -> list[Span | None]:
        """Where each message's content stands in its rendering's text; None where unknown."""
        marker = self._vision.marker if self._vision else ""
        images = sum(len(message.images) for message in messages)
        plain = self._plain(messages, [marker] * images)
        spans = self._marked(plain, tools, cue, rendered.text)
        if spans is None:
            spans = found([message["content"] for message in plain], rendered.text)
        return with_images(spans, messages, rendered.parts) if images else spans

    # --- images

    def _check_images(self, messages: Sequence[Message], tools: Sequence[str]) -> None:
        vision = self._vision
        if vision is None:
            if any(message.images for message in messages):
                raise no_vision()
            return
        if not vision.by_text:
            return
        texts = [text for message in messages for text in _own_texts(message)]
        if any(vision.marker in text for text in (*texts, *tools)):
            raise InvalidRequest(
                "A message or tool contains the text by which the model's engine finds images, so "
                "that it would be taken for one. Remove or break up that text.",
                metadata={
                    "field": "messages",
                    "value": "",
                    "allowed": "content without the model's image marker",
                },
            )

    def _stand_ins(self, messages: Sequence[Message], tools: Sequence[str]) -> list[str]:
        """A character found nowhere else for each image, for a template that takes plain text."""
        count = sum(len(message.images) for message in messages)
        if not count or self._template.takes_parts:
            return []
        texts = [text for message in messages for text in _own_texts(message)]
        free = _free_characters(self._fixed, *texts, *tools)
        return [char for char, _ in zip(free, range(count), strict=False)]

    def _plain(self, messages: Sequence[Message], stand_ins: Sequence[str]) -> list[Plain]:
        plain, done = [], 0
        for message in messages:
            count = len(message.images)
            plain.append(self._template.plain_message(message, stand_ins[done : done + count]))
            done += count
        return plain

    def _miscounted(self, written: int, images: int) -> ModeldError:
        if self._template.takes_parts:
            return _no_marker(written, images)
        return InvalidRequest(
            f"The model's chat template leaves out or repeats what stands in a message: of "
            f"{images} image(s), {written} are in the prompt. Put images where the template shows "
            "them: in the messages of role user.",
            metadata={"field": "messages", "value": "", "allowed": "images in user messages"},
        )

    # --- contents

    def _shielded(
        self, plain: list[Plain], tools: list[Plain], cue: bool, shield: Callable[[str], str]
    ) -> str | None:
        try:
            return self._template.render_plain(
                [_map_message(message, shield) for message in plain],
                [_map_json(tool, shield) for tool in tools],
                cue,
            )
        except InvalidRequest:
            return None

    def _marked(
        self, plain: list[Plain], tools: Sequence[str], cue: bool, text: str
    ) -> list[Span | None] | None:
        """Spans from a rendering with a mark on either side of each content, if that's neutral."""
        parsed, _ = self._parsed(tools)
        free = _free_characters(text, self._fixed, *_texts([plain, parsed]), skip_basic=True)
        marks: list[str] = []
        marked_messages = []
        for message in plain:
            marks.append(next(free, ""))
            if not marks[-1]:
                return None
            content = marked(message["content"], marks[-1])
            marked_messages.append({**message, "content": content})
        if not marks:
            return []
        try:
            rendering = self._template.render_plain(marked_messages, parsed, cue)
        except ModeldError:
            return None
        pieces = re.split(f"([{marks[0]}-{marks[-1]}])", rendering)
        if "".join(pieces[0::2]) != text:
            return None
        places: dict[str, list[int]] = {}
        position = 0
        for run, mark in zip(pieces[0::2], pieces[1::2], strict=False):
            position += len(run)
            places.setdefault(mark, []).append(position)
        return [(at[0], at[1]) if len(at := places.get(mark, [])) == 2 else None for mark in marks]

    def _parsed(self, tools: Sequence[str]) -> tuple[list[Plain], bool]:
        if self._tools is None or self._tools[0] != list(tools):
            parsed = self._template.plain_tools(tools)
            judged = [self._json_touches(tool) for tool in parsed]
            self._tools = (list(tools), parsed, any(judged))
        return self._tools[1], self._tools[2]

    def _message_touches(self, message: Plain) -> bool:
        # All JSON is judged, whatever the rest: it may be refused.
        judged = [
            self._json_touches(call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        return any(judged) or any(map(self._touches, _message_texts(message)))

    def _json_touches(self, value: Any) -> bool:
        if any(map(self._touches, _texts(value))):
            return True
        if not isinstance(value, str) and self._controls.contained(
            json.dumps(value, ensure_ascii=False)
        ):
            raise InvalidRequest.of(
                "tools",
                "",
                "JSON whose punctuation doesn't spell one of the model's control tokens",
            )
        return False

    def _touches(self, content: str) -> bool:
        """Whether a control text stands in ``content`` or could form across its edges."""
        known = self._judged.get(content)
        if known is not None:
            return known
        controls = self._controls
        trimmed = content.strip()
        touches = (
            controls.contained(content)
            or any(controls.starts_at_end(text) for text in (content, trimmed))
            or any(controls.ends_at_start(text) for text in (content, trimmed))
            or (self._dangling and bool(trimmed) and controls.inside(trimmed))
        )
        self._judged_chars += len(content)
        if len(self._judged) >= 4096 or self._judged_chars > MAX_JUDGED_CHARS:
            self._judged.clear()
            self._judged_chars = len(content)
        self._judged[content] = touches
        return touches


def _message_texts(message: Plain) -> Iterator[str]:
    yield from content_texts(message["content"])
    for key in ("name", "tool_call_id"):
        if key in message:
            yield message[key]
    for call in message.get("tool_calls", ()):
        yield call.get("id", "")
        yield call["function"]["name"]


def _map_message(message: Plain, change: Callable[[str], str]) -> Plain:
    mapped = {key: change(text) if key != "role" else text for key, text in message.items()
              if key not in ("tool_calls", "content")}  # fmt: skip
    mapped["content"] = map_content(message["content"], change)
    if "tool_calls" in message:
        mapped["tool_calls"] = [
            {
                **({"id": change(call["id"])} if "id" in call else {}),
                "type": call["type"],
                "function": {
                    "name": change(call["function"]["name"]),
                    "arguments": _map_json(call["function"]["arguments"], change),
                },
            }
            for call in message["tool_calls"]
        ]
    return mapped


def _map_json(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_json(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_json(item, change) for item in value]
    return value


def _texts(value: Any) -> Iterator[str]:
    """Every string in plain data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _exchange(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Replace each pair's first character by its second (for long texts faster than translate)."""
    for old, new in pairs:
        text = text.replace(old, new)
    return text


def _free_characters(*texts: str, skip_basic: bool = False) -> Iterator[str]:
    """Private-use characters found in none of the texts, in ascending order."""
    taken: set[str] = set()
    for text in texts:
        if not text.isascii():
            taken.update(_PRIVATE_CHARS.findall(text))
    for block in _PRIVATE[1 if skip_basic else 0 :]:
        for code in block:
            if chr(code) not in taken:
                yield chr(code)


def _own_texts(message: Message) -> Iterator[str]:
    """Every string that a message brings."""
    yield from (message.text, message.name, message.tool_call_id)
    for call in message.tool_calls:
        yield from (call.id, call.name, call.arguments)


def _no_marker(written: int, images: int) -> UnsupportedFeature:
    return unsupported(
        "vision",
        f"The model's chat template writes the engine's image marker {written} time(s) for "
        f"{images} image(s): the two don't belong together.",
    )
