"""From what a caller writes to a prompt on the wire: segments, hashes and the manifest digest.

Pure. Knows the manifest's rules, not the transport, and not any model's template.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, assert_never

from modeld.client.values import ToolCall
from modeld.shared.errors import InvalidRequest
from modeld.shared.images import ALLOWED, MIME_TYPES, NamedImage, checked_header
from modeld.shared.manifest import (
    Identity,
    SegmentId,
    manifest_digest,
    message_hash,
    raw_hash,
    sha256_hex,
    turn_hash,
)
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2

PREFIX_CLASS = "task_pinned"
SUFFIX_CLASS = "volatile"
RAW_KIND = {True: "system", False: "user_turn"}
ROLE_KIND = {"system": "system", "user": "user_turn", "assistant": "assistant_turn"}
TURN_KIND = "assistant_turn"


@dataclass(frozen=True)
class Text:
    """Raw text. ``parse_special``: recognise control tokens in it (default: they stay text)."""

    text: str
    parse_special: bool = False


@dataclass(frozen=True)
class Image:
    """An encoded PNG, JPEG or WebP image, for messages of the suffix; refused where the model
    takes none. ``mime_type`` "": whatever the bytes are.
    """

    data: bytes
    mime_type: str = ""

    @classmethod
    def from_file(cls, path: str | Path) -> Image:
        """Raises InvalidRequest where the file can't be read or isn't such an image."""
        try:
            return cls.from_bytes(Path(path).read_bytes(), str(path))
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise InvalidRequest.of(
                "image", str(path), ALLOWED, f"It can't be read: {why}."
            ) from None

    @classmethod
    async def from_file_async(cls, path: str | Path) -> Image:
        """``from_file``, without blocking the event loop."""
        return await asyncio.to_thread(cls.from_file, path)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "image") -> Image:
        """With the MIME type that the bytes tell. Raises InvalidRequest as ``from_file`` does."""
        header = checked_header(NamedImage(name, data, ""))
        return cls(data, MIME_TYPES[header.kind])


@dataclass(frozen=True)
class Message:
    """A chat message. The daemon renders it with the model's own template."""

    role: str
    content: str | tuple[str | Image, ...] = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""

    @classmethod
    def user(cls, text: str, images: Sequence[Image] = ()) -> Message:
        """A user's message: images, then the text."""
        return cls("user", (*images, text) if images else text)

    @property
    def has_images(self) -> bool:
        return any(isinstance(part, Image) for part in _parts(self))


@dataclass(frozen=True)
class GeneratedTurn:
    """An answer the model gave, referred to by id so that its sampled tokens stand.

    ``text`` is what a later session is given instead, in which the id no longer exists.
    """

    turn_id: str
    session_id: str
    text: str


Content: TypeAlias = Text | Message | GeneratedTurn


@dataclass(frozen=True)
class Segment:
    """A piece of a prompt with its own manifest attributes. Empty attributes take defaults.

    ``stable`` None: true in a prefix, false in a suffix.
    """

    content: Content | str
    kind: str = ""
    cache_class: str = ""
    invalidation: str = ""
    stable: bool | None = None


PromptItem: TypeAlias = str | Text | Message | GeneratedTurn | Segment | Mapping[str, Any]
PromptInput: TypeAlias = PromptItem | Sequence[PromptItem]
ToolInput: TypeAlias = str | Mapping[str, Any]


@dataclass(frozen=True)
class PromptPart:
    """A prefix or a suffix as the caller gave it, normalised; kept for recovery."""

    segments: tuple[Segment, ...] = ()
    tools: tuple[str, ...] = ()
    stable: bool = True

    def extended(self, other: PromptPart) -> PromptPart:
        return PromptPart(self.segments + other.segments, self.tools, self.stable)


@dataclass(frozen=True)
class WirePrompt:
    """A part ready to send, and the identifiers its manifest is made of."""

    proto: session_pb2.Prompt
    ids: tuple[SegmentId, ...] = field(default=())
    tools: tuple[str, ...] = ()


def prompt_part(
    prompt: PromptInput, *, stable: bool, tools: Sequence[ToolInput] = ()
) -> PromptPart:
    """Normalise a prompt: a string, a message, a turn, a segment, or a sequence of these.

    Raises InvalidRequest for anything else.
    """
    single = (str, Text, Message, GeneratedTurn, Segment, Mapping)
    items: Sequence[Any] = [prompt] if isinstance(prompt, single) else list(prompt)
    segments = tuple(_segment(item, index) for index, item in enumerate(items))
    return PromptPart(segments, tuple(_tool(tool) for tool in tools), stable)


def _segment(item: Any, index: int) -> Segment:
    if isinstance(item, Segment):
        return item
    if isinstance(item, str):
        return Segment(Text(item))
    if isinstance(item, (Text, Message, GeneratedTurn)):
        return Segment(item)
    if isinstance(item, Mapping):
        return Segment(message_from(item, f"prompt[{index}]"))
    raise InvalidRequest.of(
        f"prompt[{index}]",
        type(item).__name__,
        "str, Text, Message, GeneratedTurn, Segment, or a {'role', 'content'} mapping",
    )


def _tool(tool: ToolInput) -> str:
    if isinstance(tool, str):
        return tool
    return json.dumps(tool, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def message_from(item: Mapping[str, Any], where: str = "message") -> Message:
    """A Message from a mapping of the usual chat form. Raises InvalidRequest naming the field."""
    allowed = {"role", "content", "name", "tool_calls", "tool_call_id"}
    unknown = sorted(set(item) - allowed)
    if unknown:
        raise InvalidRequest.of(f"{where}.{unknown[0]}", "…", f"the keys {sorted(allowed)}")
    role = item.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest.of(f"{where}.role", role, "a role such as 'system' or 'user'")
    return Message(
        role=role,
        content=_content(item.get("content") or "", where),
        name=item.get("name") or "",
        tool_calls=tuple(_tool_call(call, where) for call in item.get("tool_calls") or ()),
        tool_call_id=item.get("tool_call_id") or "",
    )


def _content(content: Any, where: str) -> str | tuple[str | Image, ...]:
    if isinstance(content, str):
        return content
    parts: list[str | Image] = []
    for part in content if isinstance(content, Sequence) else [content]:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif isinstance(part, (str, Image)):
            parts.append(part)
        else:
            raise InvalidRequest.of(
                f"{where}.content", type(part).__name__, "text, {'text': …} parts, or Image"
            )
    return tuple(parts)


def _tool_call(call: Any, where: str) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    if isinstance(call, Mapping):
        function = call.get("function", call)
        arguments = function.get("arguments", "")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if isinstance(function.get("name"), str):
            return ToolCall(str(call.get("id", "")), function["name"], arguments)
    raise InvalidRequest.of(
        f"{where}.tool_calls", type(call).__name__, "ToolCall or {'id', 'name', 'arguments'}"
    )


# --- to the wire ---------------------------------------------------------------------------------


def wire_prompt(
    part: PromptPart,
    *,
    prompt_format: str,
    session_id: str,
    turns: Collection[str] | None = None,
    evicts: bool = False,
) -> WirePrompt:
    """Segments as sent. A turn that the session doesn't have goes as the text it had.

    ``turns`` are the ids of those that it has; None: those that were generated in it. In a session
    that ``evicts``, only the system's messages are pinned unless a segment says otherwise.

    Raises InvalidRequest where the form of a segment isn't the session's.
    """
    protos: list[common.Segment] = []
    ids: list[SegmentId] = []
    where = "prefix" if part.stable else "suffix"
    for index, segment in enumerate(part.segments):
        content = _live(segment.content, prompt_format, session_id, turns)
        _check_format(content, prompt_format, f"{where}[{index}]")
        kind, digest, fill = _encode(content, part.stable)
        identifier = SegmentId(
            kind=segment.kind or kind,
            stable=part.stable if segment.stable is None else segment.stable,
            cache_class=segment.cache_class or _class_of(content, part.stable, evicts),
            invalidation=segment.invalidation,
            hash=digest,
        )
        proto = common.Segment(
            kind=identifier.kind,
            stable=identifier.stable,
            cache_class=identifier.cache_class,
            invalidation=identifier.invalidation,
            hash=identifier.hash,
        )
        fill(proto)
        protos.append(proto)
        ids.append(identifier)
    tools = [common.Tool(json_schema=tool) for tool in part.tools]
    return WirePrompt(session_pb2.Prompt(segments=protos, tools=tools), tuple(ids), part.tools)


def _class_of(content: Content, stable: bool, evicts: bool) -> str:
    """A chat's history goes with the prefix; where it outgrows the window it must be able to go."""
    if evicts:
        stable = isinstance(content, Message) and content.role == "system"
    return PREFIX_CLASS if stable else SUFFIX_CLASS


def digest_of(identity: Identity, *parts: WirePrompt) -> str:
    """The manifest digest over these parts, in prompt order."""
    return manifest_digest(
        identity,
        [identifier for part in parts for identifier in part.ids],
        [tool for part in parts for tool in part.tools],
    )


def _live(
    content: Content | str, prompt_format: str, session_id: str, turns: Collection[str] | None
) -> Content:
    if isinstance(content, str):
        return Text(content)
    if not isinstance(content, GeneratedTurn):
        return content
    known = content.session_id == session_id if turns is None else content.turn_id in turns
    if not known:
        if prompt_format == "chat":
            return Message("assistant", content.text)
        return Text(content.text)
    return content


def _check_format(content: Content, prompt_format: str, where: str) -> None:
    if isinstance(content, Text) and prompt_format == "chat":
        raise InvalidRequest.of(
            where,
            "raw text",
            "a chat message in a session of prompt_format 'chat'",
            "Write {'role': 'user', 'content': …}, or open the session with prompt_format='raw'.",
        )
    if isinstance(content, Message) and prompt_format == "raw":
        raise InvalidRequest.of(
            where,
            "a chat message",
            "raw text in a session of prompt_format 'raw'",
            "Write a string, or open the session with prompt_format='chat'.",
        )


def _encode(content: Content, stable: bool) -> tuple[str, str, Callable[[common.Segment], None]]:
    """The default kind, the content's hash, and what puts the content into a segment."""
    if isinstance(content, Text):
        raw = common.RawText(text=content.text, parse_special=content.parse_special)
        return RAW_KIND[stable], raw_hash(content.text), lambda s: s.raw.CopyFrom(raw)
    if isinstance(content, GeneratedTurn):
        turn_id = content.turn_id
        return TURN_KIND, turn_hash(turn_id), lambda s: setattr(s, "generated_turn_id", turn_id)
    if isinstance(content, Message):
        message = chat_message(content)
        kind = ROLE_KIND.get(content.role, f"{content.role}_turn")
        return kind, _message_hash(content), lambda s: s.message.CopyFrom(message)
    assert_never(content)


def _parts(message: Message) -> tuple[str | Image, ...]:
    return (message.content,) if isinstance(message.content, str) else message.content


def chat_message(message: Message) -> common.ChatMessage:
    return common.ChatMessage(
        role=message.role,
        content=[
            common.ContentPart(text=part)
            if isinstance(part, str)
            else common.ContentPart(image=common.ImageRef(data=part.data, mime_type=part.mime_type))
            for part in _parts(message)
        ],
        tool_calls=[
            common.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _message_hash(message: Message) -> str:
    return message_hash(
        role=message.role,
        content=[
            (part, "") if isinstance(part, str) else ("", sha256_hex(part.data))
            for part in _parts(message)
        ],
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[(call.id, call.name, call.arguments) for call in message.tool_calls],
    )
