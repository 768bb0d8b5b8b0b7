"""A message's content as a template takes it: text, or a list of text and image parts.

Small functions over both forms. Knows nothing of templates, tokens or engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from modeld.shared.messages import Message
from modeld.workers.images import IMAGE
from modeld.workers.splits import Part

Content: TypeAlias = str | list[dict[str, Any]]
Span: TypeAlias = tuple[int, int]  # characters of a rendered text


def content_texts(content: Content) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for part in content:
        if "text" in part:
            yield part["text"]


def map_content(content: Content, change: Callable[[str], str]) -> Content:
    """The same content with every text changed."""
    if isinstance(content, str):
        return change(content)
    return [{**part, "text": change(part["text"])} if "text" in part else part for part in content]


def marked(content: Content, mark: str) -> Content:
    """The content with ``mark`` before and behind its text.

    Inside surrounding whitespace, which templates like to trim. Unchanged where it has no text.
    """
    if isinstance(content, str):
        return _behind(_before(content, mark), mark) if content.strip() else content
    places = [index for index, part in enumerate(content) if part.get("text", "").strip()]
    if not places:
        return content
    parts = list(content)
    first, last = places[0], places[-1]
    parts[first] = {**parts[first], "text": _before(parts[first]["text"], mark)}
    parts[last] = {**parts[last], "text": _behind(parts[last]["text"], mark)}
    return parts


def _before(text: str, mark: str) -> str:
    begin = len(text) - len(text.lstrip())
    return text[:begin] + mark + text[begin:]


def _behind(text: str, mark: str) -> str:
    end = len(text.rstrip())
    return text[:end] + mark + text[end:]


def found(contents: Sequence[Content], text: str) -> list[Span | None]:
    """Where contents stand in ``text``, by looking for them in order."""
    spans: list[Span | None] = []
    cursor = 0
    for content in contents:
        cores = [core for core in map(str.strip, content_texts(content)) if core]
        begin = -1
        end = cursor
        for core in cores:
            at = text.find(core, end)
            if at < 0:
                begin = -1
                break
            begin, end = (at if begin < 0 else begin), at + len(core)
        if begin < 0:
            spans.append(None)
            continue
        cursor = end
        spans.append((begin, end))
    return spans


def without_stand_ins(parts: Sequence[Part], stand_ins: Sequence[str], marker: str) -> list[Part]:
    """The parts with each stand-in a part of its own: the marker, as an image.

    Images stand in the order of the stand-ins, or are left out: the caller counts them.
    """
    if not stand_ins:
        return list(parts)
    pattern = re.compile("([" + "".join(map(re.escape, stand_ins)) + "])")
    expected = iter(stand_ins)
    split: list[Part] = []
    for part in parts:
        if part.token is not None:
            split.append(part)
            continue
        for index, piece in enumerate(pattern.split(part.text)):
            if index % 2 == 0:
                if piece:
                    split.append(Part(piece, None))
            elif piece == next(expected, ""):
                split.append(Part(marker, IMAGE))
    return split


def with_images(
    spans: Sequence[Span | None], messages: Sequence[Message], parts: Sequence[Part]
) -> list[Span | None]:
    """The messages' spans widened by their images, which are the parts of token ``IMAGE``."""
    images = iter(image_spans(parts))
    widened: list[Span | None] = []
    for span, message in zip(spans, messages, strict=True):
        own = [next(images) for _ in message.images]
        known = [span] if span is not None else []
        if span is None and message.text.strip():
            own = []  # its text wasn't found: where it lies isn't known
        both = [*known, *own]
        widened.append((min(s[0] for s in both), max(s[1] for s in both)) if both else None)
    return widened


def image_spans(parts: Sequence[Part]) -> list[Span]:
    """The characters of each image's marker."""
    spans, at = [], 0
    for part in parts:
        if part.token == IMAGE:
            spans.append((at, at + len(part.text)))
        at += len(part.text)
    return spans
