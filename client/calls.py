"""Every call as a value: its path, request, deadline and how its answer is read.

Pure; shared by the synchronous and the asyncio client, so that only the transport differs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf import message_factory
from google.protobuf.message import Message as Proto

from modeld.client import values
from modeld.client.convert import from_proto
from modeld.client.prompts import Message, ToolInput, chat_message, prompt_part
from modeld.client.sendable import sendable, unsendable
from modeld.shared.capacity import Companions
from modeld.shared.errors import InvalidRequest
from modeld.shared.manifest import AdapterId
from modeld.v1 import daemon_pb2, model_pb2, session_pb2

T = TypeVar("T")
V = TypeVar("V")

NO_COMPANIONS = Companions()
_FILES = (daemon_pb2.DESCRIPTOR, model_pb2.DESCRIPTOR, session_pb2.DESCRIPTOR)
_SERVICES = {s.name: s for f in _FILES for s in f.services_by_name.values()}


@dataclass(frozen=True)
class Deadlines:
    """Seconds each kind of call may take. None: no limit.

    A turn or a decode has no deadline of its own by default; ``stall_s`` bounds how long its
    stream may stay silent, so it must be longer than the longest prefill.
    """

    status_s: float = 10.0
    quick_s: float = 30.0
    describe_s: float = 120.0  # the first time, the engine is asked about the file
    open_s: float | None = 300.0
    prefill_s: float | None = 600.0
    turn_s: float | None = None
    stall_s: float | None = 600.0
    import_s: float | None = 3600.0


@dataclass(frozen=True)
class Call(Generic[T]):
    """One call. ``parse`` reads an answer, or each message of a stream."""

    path: str
    request: Proto
    response_type: type[Proto]
    parse: Callable[[Any], T]
    timeout_s: float | None


def call(
    service: str,
    method: str,
    request: Proto,
    parse: Callable[[Any], T],
    timeout_s: float | None,
) -> Call[T]:
    descriptor = _SERVICES[service]
    output = descriptor.methods_by_name[method].output_type
    return Call(
        path=f"/{descriptor.full_name}/{method}",
        request=request,
        response_type=message_factory.GetMessageClass(output),
        parse=parse,
        timeout_s=timeout_s,
    )


def answer(cls: type[V]) -> Callable[[Any], V]:
    return lambda message: from_proto(cls, message)


# An event of a stream: a message with one oneof named `event`.
OpenEvent: TypeAlias = values.QueueStatus | values.LoadProgress | values.Opened
LoadEvent: TypeAlias = values.QueueStatus | values.LoadProgress | values.Loaded
ImportEvent: TypeAlias = values.ImportProgress | values.ModelInfo
TurnItem: TypeAlias = values.QueueStatus | values.PrefillStatus | values.Chunk | values.Final
TurnEvent: TypeAlias = tuple[str, TurnItem]  # ("queued" | "prefix" | "suffix" | ..., value)


def tagged_events(types: Mapping[str, type[Any]]) -> Callable[[Any], tuple[str, Any] | None]:
    """Read a oneof as (its field's name, value); None for an event of a newer daemon."""

    def parse(message: Any) -> tuple[str, Any] | None:
        kind = message.WhichOneof("event")
        if kind not in types:
            return None
        return kind, from_proto(types[kind], getattr(message, kind))

    return parse


def events(types: Mapping[str, type[Any]]) -> Callable[[Any], Any]:
    tagged = tagged_events(types)

    def parse(message: Any) -> Any:
        event = tagged(message)
        return None if event is None else event[1]

    return parse


# --- daemon --------------------------------------------------------------------------------------


def status(deadlines: Deadlines) -> Call[values.DaemonStatus]:
    return call(
        "DaemonService",
        "Status",
        daemon_pb2.StatusRequest(),
        answer(values.DaemonStatus),
        deadlines.status_s,
    )


def watch_events() -> Call[values.Event]:
    request = daemon_pb2.WatchEventsRequest()
    return call("DaemonService", "WatchEvents", request, answer(values.Event), None)


@sendable
def drain(grace_s: float, deadlines: Deadlines) -> Call[values.Draining]:
    request = daemon_pb2.DrainRequest(grace_seconds=grace_s)
    return call(
        "DaemonService", "Drain", request, answer(values.Draining), deadlines.quick_s + grace_s
    )


@sendable
def clear_quarantine(model: str, deadlines: Deadlines) -> Call[values.QuarantineCleared]:
    request = daemon_pb2.ClearQuarantineRequest(model=model)
    parse = answer(values.QuarantineCleared)
    return call("DaemonService", "ClearQuarantine", request, parse, deadlines.quick_s)


# --- models --------------------------------------------------------------------------------------


def list_models(deadlines: Deadlines) -> Call[values.ModelList]:
    request = model_pb2.ListModelsRequest()
    return call("ModelService", "ListModels", request, answer(values.ModelList), deadlines.quick_s)


_LOAD_EVENTS = {
    "queued": values.QueueStatus,
    "progress": values.LoadProgress,
    "loaded": values.Loaded,
}


@sendable
def load_model(
    model: str, model_type: str, no_wait: bool, timeout_s: float | None
) -> Call[LoadEvent]:
    request = model_pb2.LoadModelRequest(model=model, model_type=model_type, no_wait=no_wait)
    return call("ModelService", "LoadModel", request, events(_LOAD_EVENTS), timeout_s)


@sendable
def switch_model(
    model: str, model_type: str, expected_generation: int, no_wait: bool, timeout_s: float | None
) -> Call[LoadEvent]:
    request = model_pb2.SwitchModelRequest(
        model=model,
        model_type=model_type,
        no_wait=no_wait,
    )
    put(request, "expected_generation", expected_generation)
    return call("ModelService", "SwitchModel", request, events(_LOAD_EVENTS), timeout_s)


@sendable
def unload_model(
    model: str, no_wait: bool, force: bool, timeout_s: float | None
) -> Call[values.Unloaded]:
    request = model_pb2.UnloadModelRequest(model=model, no_wait=no_wait, force=force)
    return call("ModelService", "UnloadModel", request, answer(values.Unloaded), timeout_s)


@sendable
def import_model(
    path: str | Path,
    name: str,
    model_type: str,
    copy: bool,
    replace: bool,
    expected_digest: str,
    timeout_s: float | None,
) -> Call[ImportEvent]:
    request = model_pb2.ImportModelRequest(
        path=str(Path(path).expanduser().absolute()),
        name=name,
        type=model_type,
        copy=copy,
        replace=replace,
        expected_digest=expected_digest,
    )
    parse = events({"progress": values.ImportProgress, "imported": values.ModelInfo})
    return call("ModelService", "ImportModel", request, parse, timeout_s)


@sendable
def remove_model(name: str, deadlines: Deadlines) -> Call[values.Removed]:
    request = model_pb2.RemoveModelRequest(name=name)
    return call("ModelService", "RemoveModel", request, answer(values.Removed), deadlines.quick_s)


def disk_stats(deadlines: Deadlines) -> Call[values.DiskStats]:
    request = model_pb2.DiskStatsRequest()
    return call("ModelService", "DiskStats", request, answer(values.DiskStats), deadlines.quick_s)


# --- sessions ------------------------------------------------------------------------------------


def _session(method: str, request: Proto, cls: type[V], timeout_s: float | None) -> Call[V]:
    return call("SessionService", method, request, answer(cls), timeout_s)


@dataclass(frozen=True)
class OpenOptions:
    """What a session is opened, and after a loss reopened, with."""

    model: str
    model_type: str = ""
    window: int = 0
    k_type: str = ""
    v_type: str = ""
    session_key: str = ""
    no_wait: bool = False
    profile_id: str = ""
    prompt_format: str = ""
    overflow: str = "refuse"
    layout: str = "isolated"
    durable: bool = False
    adapters: tuple[AdapterId, ...] = ()
    fresh: bool = False  # of the first open only


@sendable
def open_session(options: OpenOptions, timeout_s: float | None) -> Call[OpenEvent]:
    overflows, layouts = session_pb2.Overflow, session_pb2.Layout
    request = session_pb2.OpenSessionRequest(
        model=options.model,
        model_type=options.model_type,
        k_type=options.k_type,
        v_type=options.v_type,
        overflow=_choice("overflow", options.overflow, "OVERFLOW", dict(overflows.items())),
        layout=_choice("layout", options.layout, "LAYOUT", dict(layouts.items())),
        durable=options.durable,
        session_key=options.session_key,
        no_wait=options.no_wait,
        profile_id=options.profile_id,
        prompt_format=options.prompt_format,
        adapters=[{"digest": one.digest, "scale": one.scale} for one in options.adapters],
        fresh=options.fresh,
    )
    put(request, "window", options.window)
    parse = events(
        {
            "queued": values.QueueStatus,
            "progress": values.LoadProgress,
            "opened": values.Opened,
        }
    )
    return call("SessionService", "OpenSessionStream", request, parse, timeout_s)


def _choice(field: str, value: str, prefix: str, numbers: Mapping[str, int]) -> Any:
    name = f"{prefix}_{value.upper()}"
    if name not in numbers:
        allowed = ", ".join(sorted(key.removeprefix(f"{prefix}_").lower() for key in numbers))
        raise InvalidRequest.of(field, value, allowed)
    return numbers[name]


@sendable
def describe(
    model: str,
    *,
    model_type: str = "",
    window: int = 0,
    k_type: str = "",
    v_type: str = "",
    prompt_format: str = "",
    profile_id: str = "",
    session_id: str = "",
    sessions: int = 0,
    machine: str = "",
    what_if: Mapping[str, str] | None = None,
    companions: Companions = NO_COMPANIONS,
    hypothetical: bool = False,
    deadlines: Deadlines,
) -> Call[values.Description]:
    request = session_pb2.DescribeRequest(
        model=model,
        model_type=model_type,
        k_type=k_type,
        v_type=v_type,
        prompt_format=prompt_format,
        profile_id=profile_id,
        session_id=session_id,
        machine=machine,
        what_if=what_if or {},
        hypothetical=hypothetical,
        companions=session_pb2.Companions(**dataclasses.asdict(companions)),
    )
    put(request, "window", window)
    put(request, "sessions", sessions)
    return _session("Describe", request, values.Description, deadlines.describe_s)


@sendable
def tokenize(
    model: str, text: str, *, parse_special: bool, add_bos: bool, load: bool, deadlines: Deadlines
) -> Call[values.Tokens]:
    request = session_pb2.TokenizeRequest(
        model=model, text=text, parse_special=parse_special, add_bos=add_bos, load=load
    )
    return _session("Tokenize", request, values.Tokens, _may_load(load, deadlines))


@sendable
def embed(
    model: str,
    texts: str | Sequence[str],
    *,
    model_type: str,
    pooling: str,
    normalize: bool,
    no_wait: bool,
    timeout_s: float | None,
) -> Call[values.Embeddings]:
    request = session_pb2.EmbedRequest(
        model=model,
        texts=[texts] if isinstance(texts, str) else texts,
        model_type=model_type,
        pooling=pooling,
        normalize=normalize,
        no_wait=no_wait,
    )
    return _session("Embed", request, values.Embeddings, timeout_s)


@sendable
def detokenize(
    model: str, token_ids: Sequence[int], *, load: bool, deadlines: Deadlines
) -> Call[values.Detokenized]:
    request = session_pb2.DetokenizeRequest(model=model, token_ids=token_ids, load=load)
    return _session("Detokenize", request, values.Detokenized, _may_load(load, deadlines))


@sendable
def render_template(
    model: str,
    messages: Sequence[Message | Mapping[str, Any]],
    *,
    tools: Sequence[ToolInput],
    add_generation_prompt: bool,
    load: bool,
    deadlines: Deadlines,
) -> Call[values.Rendered]:
    part = prompt_part(list(messages), stable=True, tools=tools)
    request = session_pb2.RenderTemplateRequest(
        model=model,
        messages=[chat_message(_message(s.content)) for s in part.segments],
        tools=[{"json_schema": tool} for tool in part.tools],
        add_generation_prompt=add_generation_prompt,
        load=load,
    )
    return _session("RenderTemplate", request, values.Rendered, _may_load(load, deadlines))


def _message(content: object) -> Message:
    if not isinstance(content, Message):
        raise InvalidRequest.of("messages", type(content).__name__, "chat messages only")
    return content


def _may_load(load: bool, deadlines: Deadlines) -> float | None:
    return deadlines.open_s if load else deadlines.quick_s


def list_sessions(deadlines: Deadlines) -> Call[values.SessionList]:
    request = session_pb2.ListSessionsRequest()
    return _session("ListSessions", request, values.SessionList, deadlines.quick_s)


@sendable
def close_session(
    handle: values.SessionHandle, *, discard: bool, detach: bool, deadlines: Deadlines
) -> Call[values.Closed]:
    request = session_pb2.CloseSessionRequest(discard=discard, detach=detach)
    request.session.session_id = handle.session_id
    request.session.generation = handle.generation
    return _session("CloseSession", request, values.Closed, deadlines.quick_s)


TURN_EVENTS: Mapping[str, type[Any]] = {
    "queued": values.QueueStatus,
    "prefix": values.PrefillStatus,
    "suffix": values.PrefillStatus,
    "chunk": values.Chunk,
    "final": values.Final,
}


# --- decoding ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeOptions:
    """How to generate. None takes the daemon's default; with nothing set, decoding is greedy.

    ``max_tokens`` 0: until the window is full; in a session that evicts, until the answer ends by
    itself, so that a bound is wise. ``stream_interval_ms`` 0: each token at once. One
    of ``json_schema`` (its text or the schema itself), ``regex`` and ``grammar`` (Lark) constrains
    the whole answer; with any other stop reason than EOS the text is a beginning of such an answer.
    """

    max_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] = ()
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    stream_interval_ms: int | None = None
    token_ids: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False

    def to_proto(self) -> session_pb2.DecodeOptions:
        """Raises InvalidRequest for a value that the field's type can't hold, and for more than
        one constraint.
        """
        constraints = [name for name in _STRUCTURED if getattr(self, name) is not None]
        if len(constraints) > 1:
            raise InvalidRequest.of(
                "options.structured", " and ".join(constraints), f"one of {', '.join(_STRUCTURED)}"
            )
        options = session_pb2.DecodeOptions()
        options.sampling.SetInParent()
        for name in (*_SAMPLING, *_STRUCTURED, *_PLAIN):
            value = getattr(self, name)
            if name == "json_schema" and isinstance(value, Mapping | bool):
                value = _schema_text(value)
            if value is not None:
                part = options.sampling if name in _SAMPLING else options
                put(options.structured if name in _STRUCTURED else part, name, value)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        _guard("stop", lambda: options.stop.extend(stop))
        bias = self.logit_bias or {}
        _guard("logit_bias", lambda: options.sampling.logit_bias.update(bias))
        return options


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)
_STRUCTURED = ("json_schema", "regex", "grammar")
_PLAIN = ("max_tokens", "stream_interval_ms", "token_ids", "top_logprobs", "ignore_eos")


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    """Its JSON, the properties in the order given: that is their order in an answer."""
    try:
        return json.dumps(schema if isinstance(schema, bool) else dict(schema), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        allowed = "a schema that can be written as JSON"
        raise InvalidRequest.of(
            "json_schema", type(schema).__name__, allowed, f"({type(error).__name__})"
        ) from None


def put(target: Proto, name: str, value: object) -> None:
    _guard(name, lambda: setattr(target, name, value), value)


def _guard(name: str, put: Callable[[], None], value: object = None) -> None:
    """Name the option that the field's type can't hold; text is never quoted."""
    try:
        put()
    except UnicodeEncodeError as error:
        raise unsendable(error, name) from None
    except (TypeError, ValueError) as error:
        shown = value if isinstance(value, (int, float)) else type(value).__name__
        allowed = "a value of the option's type and range"
        raise InvalidRequest.of(name, shown, allowed, f"({error})") from None
