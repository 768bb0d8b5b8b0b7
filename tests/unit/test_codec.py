"""The seam's codec: strict both ways, capped, and never raising anything but CodecError."""

from __future__ import annotations

import contextlib
import typing

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modeld.shared import codec
from modeld.shared.codec import (
    CodecError,
    canonical,
    decode_any_payload,
    decode_envelope,
    decode_payload,
    encode_envelope,
    encode_payload,
)
from modeld.shared.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    ChunkOut,
    Credit,
    DecodeIn,
    Empty,
    Envelope,
    Heartbeat,
    Kind,
    Message,
    Payload,
    PromptIn,
    SamplingIn,
    SegmentIn,
    Status,
    TurnOp,
)

TURN = TurnOp(
    session_id="s-1",
    turn_id="t-1",
    prefix=PromptIn(segments=[SegmentIn(message=Message(role="system", text="be brief"))]),
    suffix=PromptIn(segments=[SegmentIn(text="hello"), SegmentIn(generated_turn_id="t-0")]),
    options=DecodeIn(sampling=SamplingIn(seed=2**64 - 1, logit_bias={5: -1.5}), stop=["\n"]),
)

# Plain values that MessagePack can hold, for frames that are well-formed but not ours.
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=8)
        | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def frame(payload: Payload) -> bytes:
    return encode_envelope(
        Envelope(
            version=PROTOCOL_VERSION,
            kind=Kind.OP,
            epoch=b"e" * 16,
            generation=2**63,
            op_id=7,
            seq=0,
            payload=encode_payload(payload),
        )
    )


def test_an_envelope_and_its_payload_come_back_equal() -> None:
    envelope = decode_envelope(frame(TURN))
    assert envelope.version == PROTOCOL_VERSION
    assert envelope.kind == Kind.OP
    assert (envelope.epoch, envelope.generation, envelope.op_id) == (b"e" * 16, 2**63, 7)
    assert decode_payload(envelope.payload, TurnOp) == TURN
    assert decode_any_payload(envelope.payload) == TURN
    assert decode_envelope(memoryview(frame(TURN))).op_id == 7


def test_every_payload_has_a_tag_of_its_own() -> None:
    tags = [struct.__struct_config__.tag for struct in typing.get_args(Payload)]
    assert len(set(tags)) == len(tags)


@given(st.lists(st.text(), max_size=4), st.integers(0, 2**31), st.lists(st.integers(0, 2**31)))
def test_any_chunk_comes_back_equal(texts: list[str], tokens: int, ids: list[int]) -> None:
    for text in texts:
        chunk = ChunkOut(text=text, tokens=tokens, token_ids=ids)
        assert decode_payload(encode_payload(chunk), ChunkOut) == chunk


def test_another_payload_than_expected_is_refused_by_name() -> None:
    with pytest.raises(CodecError, match="expected Heartbeat, got Empty"):
        decode_payload(encode_payload(Empty()), Heartbeat)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "Credit", "chunks": 1, "more": 1},  # unknown field
        {"type": "Credit"},  # missing field
        {"type": "Credit", "chunks": "1"},  # wrong type: never coerced
        {"type": "Credit", "chunks": 1.0},
        {"type": "Credit", "chunks": True},
        {"type": "Credit", "chunks": None},
        {"type": "Nothing"},  # unknown tag
        {"chunks": 1},  # no tag
        ["Credit", 1],
        "Credit",
        None,
    ],
)
def test_a_payload_that_is_not_exactly_right_is_refused(value: object) -> None:
    raw = msgspec.Raw(msgspec.msgpack.encode(value))
    with pytest.raises(CodecError, match="bad payload"):
        decode_payload(raw, Credit)
    with pytest.raises(CodecError):
        decode_any_payload(raw)


@pytest.mark.parametrize(
    "value",
    [
        [],
        [1, 3, b"e", 1, 1, 0],  # one short
        [1, 3, b"e", 1, 1, 0, None, 0],  # one too many
        ["1", 3, b"e", 1, 1, 0, None],
        [1, 3, "e", 1, 1, 0, None],
        [1, 3, b"e", 1.5, 1, 0, None],
        {"version": 1},
    ],
)
def test_an_envelope_that_is_not_exactly_right_is_refused(value: object) -> None:
    with pytest.raises(CodecError, match="bad envelope"):
        decode_envelope(msgspec.msgpack.encode(value))


def test_bytes_after_a_frame_are_refused() -> None:
    with pytest.raises(CodecError):
        decode_envelope(frame(Empty()) + b"\x00")


def test_a_cut_frame_is_refused_at_every_length() -> None:
    whole = frame(TURN)
    for length in range(len(whole)):
        with pytest.raises(CodecError):
            decode_envelope(whole[:length])


def test_a_frame_beyond_the_cap_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 64)
    with pytest.raises(CodecError, match=r"exceeds the limit of 64 bytes"):
        decode_envelope(b"\xff" * 65)
    with pytest.raises(CodecError, match="exceeds"):
        decode_payload(msgspec.Raw(b"\xff" * 65), Empty)
    with pytest.raises(CodecError, match="exceeds"):
        frame(TURN)


def test_the_cap_is_a_bounded_number_of_bytes() -> None:
    assert MAX_FRAME_BYTES == 64 * 1024 * 1024


@pytest.mark.parametrize("opener", [b"\x91", b"\x81\xa0", b"\xdd\x00\x00\x00\x01"])
def test_nesting_without_end_is_refused(opener: bytes) -> None:
    deep = opener * 200_000 + b"\xc0"
    with pytest.raises(CodecError):
        decode_envelope(deep)
    with pytest.raises(CodecError):
        decode_envelope(b"\x97\x01\x03\xc4\x01e\x01\x01\x00" + deep)
    with pytest.raises(CodecError):
        decode_payload(msgspec.Raw(deep), Empty)


def test_a_list_that_claims_more_than_its_frame_holds_is_refused() -> None:
    head = msgspec.msgpack.encode({"type": "DetokenizeOp", "ids": []})[:-1]
    with pytest.raises(CodecError, match="truncated"):
        decode_any_payload(msgspec.Raw(head + b"\xdd\xff\xff\xff\xff"))


def decode_whatever(data: bytes) -> None:
    """Decode as far as it goes; anything but CodecError fails the test."""
    with contextlib.suppress(CodecError):
        decode_any_payload(decode_envelope(data).payload)
    with contextlib.suppress(CodecError):
        decode_any_payload(msgspec.Raw(data))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\xc1")
@example(b"\xa2\xff\xff")
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    decode_whatever(data)


@given(plain)
def test_well_formed_frames_of_another_shape_raise_nothing_else(value: object) -> None:
    decode_whatever(msgspec.msgpack.encode(value))


@given(st.lists(plain, min_size=7, max_size=7))
def test_envelopes_of_random_fields_raise_nothing_else(value: list[object]) -> None:
    decode_whatever(msgspec.msgpack.encode(value))


@given(st.data())
def test_a_damaged_frame_raises_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(frame(TURN))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    decode_whatever(bytes(whole))


@given(
    st.sampled_from(sorted(Status.__struct_fields__)),
    plain,
)
def test_a_field_of_any_other_type_raises_nothing_else(field: str, value: object) -> None:
    fields: dict[str, object] = {"type": "Status", field: value}
    with contextlib.suppress(CodecError):
        decode_payload(msgspec.Raw(msgspec.msgpack.encode(fields)), Status)


def test_the_canonical_encoding_does_not_depend_on_the_order_of_keys() -> None:
    assert canonical({"b": 1, "a": {"d": 2, "c": 3}}) == canonical({"a": {"c": 3, "d": 2}, "b": 1})
    assert canonical({"b": 1, "a": 2}) == b"\x82\xa1a\x02\xa1b\x01"


def test_the_canonical_encoding_is_shortest_for_integers_and_64_bit_for_floats() -> None:
    assert canonical([127, 128, 65535, 65536]) == (
        b"\x94\x7f\xcc\x80\xcd\xff\xff\xce\x00\x01\x00\x00"
    )
    assert canonical(1.0) == b"\xcb\x3f\xf0" + bytes(6)
