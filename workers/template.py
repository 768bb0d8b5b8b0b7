"""A model's own chat template: rendering messages and tools to the text the model was trained on.

Owns Jinja2 and the form in which messages reach a template. Knows nothing of tokens.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, meta
from jinja2.exceptions import TemplateSyntaxError, UndefinedError

from modeld.shared import ids, manifest
from modeld.shared.errors import InvalidRequest, ModeldError, unsupported
from modeld.shared.messages import Message
from modeld.workers.sandbox import (
    MAX_TEMPLATE_CHARS,
    BoundedEnvironment,
    TemplateLimit,
    TemplateRefusal,
)

MAX_DEPTH = 100  # of JSON in tools and tool calls

Plain = dict[str, Any]  # a message or a tool as the template sees it
_PROBE = "modeld-probe"


class ChatTemplate:
    """Compiled once a model. A template that doesn't compile leaves ``error`` set, and the model
    still serves raw prompts: rendering raises it then, as InvalidRequest.
    """

    def __init__(self, source: str, special_texts: Mapping[str, str]) -> None:
        self.source = source
        self.special_texts = dict(special_texts)
        self.digest = manifest.template_digest(
            source, self.special_texts.get("bos_token", ""), self.special_texts.get("eos_token", "")
        )
        self.supports_tools = False
        self.literals: list[str] = []
        self.error: InvalidRequest | None = None
        self._environment = _environment()
        self._template: Template | None = None
        try:
            self._template = self._compile()
        except ModeldError as error:
            self.error = InvalidRequest(error.message, metadata=error.metadata)
        except TemplateSyntaxError as error:
            self.error = _refused(f"it doesn't compile (line {error.lineno}: {error.message})")
        except Exception as error:  # whatever else a hostile template makes the compiler raise
            self.error = _refused(f"it doesn't compile ({type(error).__name__})")

    def _compile(self) -> Template:
        if len(self.source) > MAX_TEMPLATE_CHARS:
            raise _refused(f"it has {len(self.source)} characters, more than {MAX_TEMPLATE_CHARS}")
        environment = self._environment
        self.literals = environment.literals(self.source)
        undeclared = meta.find_undeclared_variables(environment.parse(self.source))
        self.supports_tools = "tools" in undeclared
        return environment.from_string(self.source)

    @functools.cached_property
    def takes_parts(self) -> bool:
        """Whether it renders a content that is a list of parts, and writes something of its own
        where an image part stands.
        """
        image, text = {"type": "image"}, {"type": "text", "text": _PROBE}
        alone, both = self._probed([text]), self._probed([image, text])
        return bool(alone and both) and alone != both

    @functools.cached_property
    def needs_parts(self) -> bool:
        """Whether it renders text only where that comes as a part."""
        return self.takes_parts and not self._probed(_PROBE)

    def _probed(self, content: Any) -> str:
        """A user message's rendering; "" unless its text is there and nothing of its form is."""
        try:
            text = self._rendered([{"role": "user", "content": content}], [], False)
        except ModeldError:
            return ""
        return text if _PROBE in text and "'type'" not in text and '"type"' not in text else ""

    def render(
        self, messages: Sequence[Message], tools: Sequence[str], add_generation_prompt: bool
    ) -> str:
        """The text of the conversation, with the generation cue if asked.

        Raises InvalidRequest when the template refuses or fails, and UnsupportedFeature
        (capability ``tools``) when tools are given to a template that has no place for them.
        """
        return self.render_plain(
            [self.plain_message(message) for message in messages],
            self.plain_tools(tools),
            add_generation_prompt,
        )

    def plain_message(self, message: Message, stand_ins: Sequence[str] = ()) -> Plain:
        """A message in the form that this template takes.

        Images become parts of their own where it takes parts; else each is the next of
        ``stand_ins``, in its place among the text.
        """
        plain = plain_message(message)
        if self.needs_parts or (message.images and self.takes_parts):
            plain["content"] = _parts(message)
        elif message.images:
            plain["content"] = _with_stand_ins(message, stand_ins)
        return plain

    def plain_tools(self, tools: Sequence[str]) -> list[Plain]:
        """The tools' JSON texts, parsed; refused if the template takes none."""
        if tools and self.error is None and not self.supports_tools:
            raise unsupported("tools", "The model's chat template takes no tool definitions.")
        return [_tool(index, text) for index, text in enumerate(tools)]

    def render_plain(
        self, messages: Sequence[Plain], tools: Sequence[Plain], add_generation_prompt: bool
    ) -> str:
        """Render what ``plain_message`` and ``plain_tools`` made.

        Raises as ``render`` does; UnsupportedFeature too where tool calls leave no trace.
        """
        text = self._rendered(messages, tools, add_generation_prompt)
        if any("tool_calls" in message for message in messages):
            bare = [{k: v for k, v in m.items() if k != "tool_calls"} for m in messages]
            # A template that fails without them has seen them.
            with contextlib.suppress(InvalidRequest):
                if text == self._rendered(bare, tools, add_generation_prompt):
                    raise unsupported("tools", "The model's chat template leaves tool calls out.")
        return text

    def _rendered(
        self, messages: Sequence[Plain], tools: Sequence[Plain], add_generation_prompt: bool
    ) -> str:
        if self._template is None:
            raise self.error or _refused("it doesn't compile")
        self._environment.allow(_chars(messages) + _chars(tools))
        try:
            text = self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_texts,
            )
            text.encode()
        except TemplateRefusal as refusal:
            raise _refused(f"it says: {self._own_words(str(refusal))}") from None
        except TemplateLimit as limit:
            raise _refused(f"it goes beyond its bounds: {limit}") from None
        except UndefinedError as error:
            raise _refused(self._undefined(str(error))) from None
        except Exception as error:  # templates can raise anything; its text may quote the prompt
            raise _refused(f"it fails with {type(error).__name__}") from None
        return text

    def _own_words(self, said: str) -> str:
        """What the template said, without what it may have quoted from the prompt."""
        if said in self.literals:
            return said
        starts = [text for text in self.literals if text.strip() and said.startswith(text)]
        return max(starts, key=len) + "…" if starts else "(its words quote the prompt)"

    def _undefined(self, message: str) -> str:
        quoted = re.findall(r"'([^']*)'", message)
        if all(part in self.source or part.endswith(" object") for part in quoted):
            return f"it fails: {message}"
        return "it uses something that the messages don't have"


def plain_message(message: Message) -> Plain:
    """A message as templates expect it; optional fields that are empty are absent."""
    if not ids.ROLE.fullmatch(message.role):
        raise InvalidRequest.of("role", message.role[:40], "a name of a-z and '_', at most 32")
    plain: Plain = {"role": message.role, "content": message.text}
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return plain


def _pieces(message: Message) -> list[str | None]:
    """A message's text in pieces, with None where an image stands."""
    pieces: list[str | None] = []
    done = 0
    for image in message.images:
        at = min(max(done, image.at), len(message.text))
        pieces += [message.text[done:at], None]
        done = at
    return [piece for piece in [*pieces, message.text[done:]] if piece != ""]


def _parts(message: Message) -> list[Plain]:
    return [
        {"type": "image"} if piece is None else {"type": "text", "text": piece}
        for piece in _pieces(message)
    ]


def _with_stand_ins(message: Message, stand_ins: Sequence[str]) -> str:
    following = iter(stand_ins)
    return "".join(next(following, "") if piece is None else piece for piece in _pieces(message))


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment()
    environment.add_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    indent: int | None = None,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: unlike Jinja2's own filter it doesn't escape for HTML."""
    if isinstance(indent, int) and indent > 16:
        raise TemplateLimit("a JSON indentation of more than 16")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object = "") -> None:
    raise TemplateRefusal(str(message)[:1000])


def _strftime_now(form: str) -> str:
    if len(form) > 256:
        raise TemplateLimit("a date format of more than 256 characters")
    return datetime.now().strftime(form)


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(
        f"The model's chat template can't render this prompt: {why}. Change the messages to what "
        "the template takes, or use a session with prompt_format=raw.",
        metadata={"field": "messages", "value": "", "allowed": "what the model's template renders"},
    )


def _not_json(_: str) -> Any:
    raise ValueError("not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError("number out of range")
    return number


def _load_object(text: str) -> Plain | None:
    """The JSON object that ``text`` spells, or None."""
    try:
        value = json.loads(text, parse_constant=_not_json, parse_float=_finite)
        if not isinstance(value, dict):
            return None
        _chars(value)
        if "\\u" in text:  # an escaped half of a surrogate pair is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _arguments(text: str) -> Any:
    parsed = _load_object(text)
    return text if parsed is None else parsed


def _tool(index: int, text: str) -> Plain:
    tool = _load_object(text)
    if tool is None:
        raise InvalidRequest.of(f"tools[{index}]", f"{len(text)} characters", "a JSON object")
    return tool


def _chars(value: Any, depth: int = 0) -> int:
    """About how many characters a plain value holds. Raises RecursionError if nested too deep."""
    if isinstance(value, str):
        return len(value)
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, Mapping):
        return sum(len(str(key)) + _chars(item, depth + 1) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(_chars(item, depth + 1) for item in value)
    return 8
