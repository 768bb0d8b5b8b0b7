"""The only place that knows MessagePack: strict typed decoding, a size cap, canonical encoding."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from modeld.shared.messages import MAX_FRAME_BYTES, Envelope, Payload

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_canonical = msgspec.msgpack.Encoder(order="deterministic")
# Nesting without end raises RecursionError: a bad frame like any other.
_BAD_FRAME = (msgspec.DecodeError, msgspec.ValidationError, RecursionError)
_envelope = msgspec.msgpack.Decoder(Envelope)
_payload: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Payload)


class CodecError(ValueError):
    """A frame that is too large, not MessagePack, or not of the expected shape."""


def _checked(data: bytes | memoryview) -> bytes | memoryview:
    size = len(data)
    if size > MAX_FRAME_BYTES:
        raise CodecError(f"frame of {size} bytes exceeds the limit of {MAX_FRAME_BYTES} bytes")
    return data


def encode_envelope(envelope: Envelope) -> bytes:
    """Raises CodecError when the frame would exceed the size cap."""
    data = _encoder.encode(envelope)
    _checked(data)
    return data


def decode_envelope(data: bytes | memoryview) -> Envelope:
    try:
        return _envelope.decode(_checked(data))
    except _BAD_FRAME as error:
        raise CodecError(f"bad envelope: {error}") from None


def encode_payload(payload: Payload) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(payload))


def decode_payload(raw: msgspec.Raw, expected: type[T]) -> T:
    """Decode a payload and insist on its type; raises CodecError otherwise."""
    try:
        value = _payload.decode(_checked(raw))
    except _BAD_FRAME as error:
        raise CodecError(f"bad payload: {error}") from None
    if not isinstance(value, expected):
        raise CodecError(f"expected {expected.__name__}, got {type(value).__name__}")
    return value


def decode_any_payload(raw: msgspec.Raw) -> Payload:
    return decode_payload(raw, msgspec.Struct)  # type: ignore[return-value]


def decode_struct(data: bytes, expected: type[T]) -> T:
    """A struct that isn't a payload, such as a file's header; raises CodecError."""
    try:
        return msgspec.msgpack.decode(_checked(data), type=expected)
    except _BAD_FRAME as error:
        raise CodecError(f"bad {expected.__name__}: {error}") from None


def canonical(value: Any) -> bytes:
    """Deterministic MessagePack (sorted keys, shortest forms): what digests are made of."""
    return _canonical.encode(value)
