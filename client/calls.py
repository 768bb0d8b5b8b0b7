"""Every call as a value: its path, request, deadline and how its answer is read.

Pure; shared by the synchronous and the asyncio client, so that only the transport differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from google.protobuf import message_factory
from google.protobuf.message import Message as Proto

from modeld.client import values, values_daemon
from modeld.client.convert import from_proto
from modeld.client.prompts import Message, ToolInput, chat_message, prompt_part
from modeld.client.sendable import put, sendable
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
LoadEvent: TypeAlias = values.QueueStatus | values.LoadProgress | values_daemon.Loaded
ImportEvent: TypeAlias = values_daemon.ImportProgress | values_daemon.ModelInfo
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


def status(deadlines: Deadlines) -> Call[values_daemon.DaemonStatus]:
    return call(
        "DaemonService",
        "Status",
        daemon_pb2.StatusRequest(),
        answer(values_daemon.DaemonStatus),
        deadlines.status_s,
    )


def watch_events() -> Call[values_daemon.Event]:
    request = daemon_pb2.WatchEventsRequest()
    return call("DaemonService", "WatchEvents", request, answer(values_daemon.Event), None)


@sendable
def drain(grace_s: float, deadlines: Deadlines) -> Call[values_daemon.Draining]:
    request = daemon_pb2.DrainRequest(grace_seconds=grace_s)
    return call(
        "DaemonService",
        "Drain",
        request,
        answer(values_daemon.Draining),
        deadlines.quick_s + grace_s,
    )


@sendable
def clear_quarantine(model: str, deadlines: Deadlines) -> Call[values_daemon.QuarantineCleared]:
    request = daemon_pb2.ClearQuarantineRequest(model=model)
    parse = answer(values_daemon.QuarantineCleared)
    return call("DaemonService", "ClearQuarantine", request, parse, deadlines.quick_s)


# --- models --------------------------------------------------------------------------------------


def list_models(deadlines: Deadlines) -> Call[values_daemon.ModelList]:
    request = model_pb2.ListModelsRequest()
    return call(
        "ModelService", "ListModels", request, answer(values_daemon.ModelList), deadlines.quick_s
    )


_LOAD_EVENTS = {
    "queued": values.QueueStatus,
    "progress": values.LoadProgress,
    "loaded": values_daemon.Loaded,
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
) -> Call[values_daemon.Unloaded]:
    request = model_pb2.UnloadModelRequest(model=model, no_wait=no_wait, force=force)
    return call("ModelService", "UnloadModel", request, answer(values_daemon.Unloaded), timeout_s)


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
    parse = events({"progress": values_daemon.ImportProgress, "imported": values_daemon.ModelInfo})
    return call("ModelService", "ImportModel", request, parse, timeout_s)


@sendable
def remove_model(name: str, deadlines: Deadlines) -> Call[values_daemon.Removed]:
    request = model_pb2.RemoveModelRequest(name=name)
    return call(
        "ModelService", "RemoveModel", request, answer(values_daemon.Removed), deadlines.quick_s
    )


def disk_stats(deadlines: Deadlines) -> Call[values_daemon.DiskStats]:
    request = model_pb2.DiskStatsRequest()
    return call(
        "ModelService", "DiskStats", request, answer(values_daemon.DiskStats), deadlines.quick_s
    )


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
    layout: str = "isolated",
    deadlines: Deadlines,
) -> Call[values_daemon.Description]:
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
        layout=_choice("layout", layout, "LAYOUT", dict(session_pb2.Layout.items())),
        companions=session_pb2.Companions(**dataclasses.asdict(companions)),
    )
    put(request, "window", window)
    put(request, "sessions", sessions)
    return _session("Describe", request, values_daemon.Description, deadlines.describe_s)


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
    handle: values.SessionHandle | None,
    *,
    discard: bool,
    detach: bool = False,
    session_key: str = "",
    deadlines: Deadlines,
) -> Call[values.Closed]:
    """``session_key``: of a durable session, to discard also where the handle is stale or None."""
    request = session_pb2.CloseSessionRequest(
        discard=discard, detach=detach, session_key=session_key
    )
    if handle is not None:
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
