"""Typed errors: one class a reason, the same names as the public contract, whole on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.shared import errors
from modeld.shared.codec import decode_payload, encode_payload
from modeld.shared.errors import (
    GRPC_CODE,
    ContextOverflow,
    InvalidRequest,
    ModeldError,
    UnsupportedFeature,
    from_wire,
    type_of,
    unsupported,
)
from modeld.shared.messages import WireError
from modeld.v1 import common_pb2

REASONS = sorted(GRPC_CODE)


def test_the_reasons_are_those_of_the_public_contract() -> None:
    published = set(common_pb2.ErrorReason.keys()) - {"ERROR_REASON_UNSPECIFIED"}
    assert published == set(GRPC_CODE) == set(type_of)


def test_only_failures_before_dispatch_are_unavailable() -> None:
    unavailable = {reason for reason, code in GRPC_CODE.items() if code == "UNAVAILABLE"}
    assert unavailable == {"WORKER_UNAVAILABLE", "SHUTTING_DOWN"}


@pytest.mark.parametrize("reason", REASONS)
def test_each_reason_comes_back_as_its_own_class(reason: str) -> None:
    error = type_of[reason]("what happened", metadata={"tokens": 5}, retry_after_s=1.5)
    assert error.reason == reason
    back = from_wire(**error.to_wire())
    assert type(back) is type(error)
    assert back.to_wire() == error.to_wire()


def test_a_reason_of_a_later_version_survives() -> None:
    back = from_wire("MOON_PHASE", "wait for it", {"phase": "full"}, 3.0)
    assert type(back) is ModeldError
    assert back.to_wire() == {
        "reason": "MOON_PHASE",
        "message": "wait for it",
        "metadata": {"phase": "full"},
        "retry_after_s": 3.0,
    }
    assert from_wire(**back.to_wire()).reason == "MOON_PHASE"


@given(
    st.text(max_size=40),
    st.text(max_size=40),
    st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=4),
    st.one_of(st.none(), st.floats(0, 1e6)),
)
def test_any_error_crosses_the_seam_unchanged(
    reason: str, message: str, metadata: dict[str, str], retry_after_s: float | None
) -> None:
    error = from_wire(reason, message, metadata, retry_after_s)
    frame = encode_payload(WireError(**error.to_wire()))
    told = decode_payload(frame, WireError)
    back = from_wire(told.reason, told.message, told.metadata, told.retry_after_s)
    assert back.to_wire() == error.to_wire()


def test_live_numbers_become_text() -> None:
    error = ContextOverflow("too long", metadata={"resident": 7, "durable": True, "rate": 0.5})
    assert error.metadata == {"resident": "7", "durable": "true", "rate": "0.5"}
    assert str(error) == "too long"


def test_an_invalid_request_names_field_value_and_what_is_allowed() -> None:
    error = InvalidRequest.of("window", -1, "0 or more tokens", "Ask for 0 to let it choose.")
    assert error.metadata == {"field": "window", "value": "-1", "allowed": "0 or more tokens"}
    assert error.message == (
        "window=-1 is not valid: allowed is 0 or more tokens. Ask for 0 to let it choose."
    )


def test_what_is_not_served_yet_names_the_capability() -> None:
    error = unsupported("snapshot")
    assert isinstance(error, UnsupportedFeature)
    assert error.metadata == {"capability": "snapshot"}


def test_every_class_can_be_told_by_its_base() -> None:
    with pytest.raises(ModeldError):
        raise errors.ModelBusy("held")
