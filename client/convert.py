"""Protobuf messages to the client's values: the one place that walks a message.

A dataclass field takes the message field of the same name; nested dataclasses, tuples and enums
follow their annotations; ``X | None`` is None for a message that isn't set. An enum number that
this version doesn't know is UNRECOGNIZED.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.message import Message as Proto

from modeld.shared.capabilities import AnswerName, Capability
from modeld.shared.manifest import Identity
from modeld.v1 import common_pb2 as common

T = TypeVar("T")
Reader = Callable[[Any, Any], Any]  # (the field's value, its descriptor) → the dataclass's value

_ANSWERS: dict[int, AnswerName] = {common.ANSWER_YES: "yes", common.ANSWER_NO: "no"}


def from_proto(cls: type[T], message: Proto) -> T:
    """Build ``cls`` from a message that has at least its fields."""
    if cls is Capability:
        proto = typing.cast(common.Capability, message)
        answer = _ANSWERS.get(proto.answer, "unknown")
        return typing.cast(T, Capability(proto.name, answer, proto.evidence))
    by_name = message.DESCRIPTOR.fields_by_name
    absent = [name for name in _optional(cls) if not message.HasField(name)]
    return cls(
        **{
            name: None if name in absent else read(getattr(message, name), by_name[name])
            for name, read in _readers(cls)
        }
    )


_cache: dict[type[Any], tuple[tuple[str, Reader], ...]] = {}


def _readers(cls: type[Any]) -> tuple[tuple[str, Reader], ...]:
    readers = _cache.get(cls)
    if readers is None:
        hints = typing.get_type_hints(cls)
        readers = tuple((f.name, _reader(hints[f.name])) for f in dataclasses.fields(cls))
        _cache[cls] = readers
    return readers


_optional_cache: dict[type[Any], tuple[str, ...]] = {}


def _optional(cls: type[Any]) -> tuple[str, ...]:
    names = _optional_cache.get(cls)
    if names is None:
        hints = typing.get_type_hints(cls)
        named = ((f.name, typing.get_origin(hints[f.name])) for f in dataclasses.fields(cls))
        names = tuple(name for name, origin in named if origin is types.UnionType)
        _optional_cache[cls] = names
    return names


def _reader(hint: Any) -> Reader:
    if typing.get_origin(hint) is types.UnionType:
        return _reader(next(t for t in typing.get_args(hint) if t is not types.NoneType))
    if typing.get_origin(hint) is tuple:
        item = _reader(typing.get_args(hint)[0])
        return lambda value, descriptor: tuple(item(element, descriptor) for element in value)
    if typing.get_origin(hint) is dict:
        return lambda value, _descriptor: dict(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return functools.partial(_enum, hint)
    if dataclasses.is_dataclass(hint):
        return lambda value, _descriptor: from_proto(typing.cast("type[Any]", hint), value)
    return lambda value, _descriptor: value


def _enum(cls: type[Enum], number: int, descriptor: Any) -> Enum:
    known = descriptor.enum_type.values_by_number.get(number)
    try:
        return cls(known.name if known is not None else "UNRECOGNIZED")
    except ValueError:
        return cls("UNRECOGNIZED")


def identity_to_proto(identity: Identity) -> common.Identity:
    return common.Identity(
        backend=identity.backend,
        backend_version=identity.backend_version,
        model_digest=identity.model_digest,
        adapters=[common.Adapter(digest=a.digest, scale=a.scale) for a in identity.adapters],
        prompt_format=identity.prompt_format,
        prompt_template_digest=identity.prompt_template_digest,
        add_bos=identity.add_bos,
        kv_digest=identity.kv_digest,
        runtime_digest=identity.runtime_digest,
        profile_id=identity.profile_id,
    )
