"""Manifests: the published vector, and what each digest does and doesn't depend on."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.shared.codec import canonical
from modeld.shared.errors import ManifestMismatch
from modeld.shared.manifest import (
    AdapterId,
    Identity,
    SegmentId,
    check_identity,
    kv_digest,
    manifest_digest,
    message_hash,
    raw_hash,
    runtime_digest,
    sha256_hex,
    turn_hash,
)

IDENTITY = Identity(
    backend="llama",
    backend_version="1",
    model_digest="aa",
    adapters=(),
    prompt_format="raw",
    prompt_template_digest="",
    add_bos=False,
    kv_digest="bb",
    runtime_digest="cc",
)
HELLO = SegmentId("system", True, "task_pinned", "", raw_hash("hello"))

VECTOR_SEGMENT = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
VECTOR_MANIFEST = "f7a955e118eef73484490928018e5a7356872378edfcd5c02e63458e5aa6df14"

OTHER_VALUES: dict[str, Any] = {
    "backend": "openvino",
    "backend_version": "2",
    "model_digest": "ab",
    "adapters": (AdapterId("d", 0.5),),
    "prompt_format": "chat",
    "prompt_template_digest": "t",
    "add_bos": True,
    "kv_digest": "b",
    "runtime_digest": "c",
    "profile_id": "p",
}


def test_the_published_vector_holds() -> None:
    assert raw_hash("hello") == VECTOR_SEGMENT
    assert manifest_digest(IDENTITY, [HELLO]) == VECTOR_MANIFEST


def test_the_vector_stands_in_the_public_contract() -> None:
    proto = Path(__file__).parents[2] / "proto" / "modeld" / "v1" / "common.proto"
    text = proto.read_text()
    assert VECTOR_SEGMENT in text
    assert VECTOR_MANIFEST in text


def test_the_vector_can_be_built_by_the_rule_alone() -> None:
    """As a client in another language would: sorted keys, every key present, hand-made bytes."""

    def text(value: str) -> bytes:
        data = value.encode()
        head = bytes([0xA0 | len(data)]) if len(data) < 32 else bytes([0xD9, len(data)])
        return head + data

    def record(pairs: dict[str, bytes]) -> bytes:
        body = b"".join(text(key) + pairs[key] for key in sorted(pairs))
        return bytes([0x80 | len(pairs)]) + body

    identity = record(
        {
            "adapters": b"\x90",
            "add_bos": b"\xc2",
            "backend": text("llama"),
            "backend_version": text("1"),
            "kv_digest": text("bb"),
            "model_digest": text("aa"),
            "profile_id": text(""),
            "prompt_format": text("raw"),
            "prompt_template_digest": text(""),
            "runtime_digest": text("cc"),
        }
    )
    segment = record(
        {
            "cache_class": text("task_pinned"),
            "hash": text(VECTOR_SEGMENT),
            "invalidation": text(""),
            "kind": text("system"),
            "stable": b"\xc3",
        }
    )
    whole = record({"identity": identity, "segments": b"\x91" + segment, "tools": b"\x90"})
    assert sha256_hex(whole) == VECTOR_MANIFEST


def test_every_identity_field_is_tried_here() -> None:
    assert set(OTHER_VALUES) == {field.name for field in fields(Identity)}


@pytest.mark.parametrize("field", sorted(OTHER_VALUES))
def test_every_identity_field_changes_the_manifest_and_fails_the_gate(field: str) -> None:
    other = replace(IDENTITY, **{field: OTHER_VALUES[field]})
    assert manifest_digest(other, [HELLO]) != VECTOR_MANIFEST
    with pytest.raises(ManifestMismatch) as refused:
        check_identity(other, IDENTITY)
    assert refused.value.metadata["field"] == field
    assert refused.value.metadata["asserted"] != refused.value.metadata["actual"]


def test_an_equal_identity_passes_the_gate() -> None:
    check_identity(replace(IDENTITY), IDENTITY)


@pytest.mark.parametrize(
    "segment",
    [
        replace(HELLO, kind="tools"),
        replace(HELLO, stable=False),
        replace(HELLO, cache_class="volatile"),
        replace(HELLO, invalidation="on_edit"),
        replace(HELLO, hash=raw_hash("hello ")),
    ],
)
def test_every_segment_field_changes_the_manifest(segment: SegmentId) -> None:
    assert manifest_digest(IDENTITY, [segment]) != VECTOR_MANIFEST


def test_order_of_segments_tools_and_adapters_counts() -> None:
    other = replace(HELLO, kind="tools")
    assert manifest_digest(IDENTITY, [HELLO, other]) != manifest_digest(IDENTITY, [other, HELLO])
    assert manifest_digest(IDENTITY, [HELLO], ["{}", "[]"]) != manifest_digest(
        IDENTITY, [HELLO], ["[]", "{}"]
    )
    one, two = AdapterId("1", 1.0), AdapterId("2", 1.0)
    assert manifest_digest(replace(IDENTITY, adapters=(one, two)), []) != manifest_digest(
        replace(IDENTITY, adapters=(two, one)), []
    )


def test_a_whole_numbered_scale_is_encoded_as_a_float() -> None:
    whole = replace(IDENTITY, adapters=(AdapterId("1", 1),))
    assert manifest_digest(whole, []) == manifest_digest(
        replace(IDENTITY, adapters=(AdapterId("1", 1.0),)), []
    )


@given(st.text(), st.text())
def test_text_and_a_generated_turn_never_hash_alike(text: str, turn_id: str) -> None:
    if text != f"generated_turn:{turn_id}":
        assert raw_hash(text) != turn_hash(turn_id)


def test_a_message_hash_is_of_its_canonical_record() -> None:
    found = message_hash(
        role="assistant",
        content=[("see", ""), ("", "f00d")],
        tool_calls=[("c1", "grep", '{"q": 1}')],
    )
    record = {
        "tool_calls": [{"name": "grep", "id": "c1", "arguments": '{"q": 1}'}],
        "tool_call_id": "",
        "role": "assistant",
        "name": "",
        "content": [{"text": "see", "image": ""}, {"image": "f00d", "text": ""}],
    }
    assert found == sha256_hex(canonical(record))


def test_every_part_of_a_message_changes_its_hash() -> None:
    base: dict[str, Any] = {"role": "user", "content": [("a", "")]}
    changes: list[dict[str, Any]] = [
        {},
        {"role": "system"},
        {"content": [("b", "")]},
        {"content": [("a", ""), ("", "")]},
        {"content": [("a", "i")]},
        {"name": "n"},
        {"tool_call_id": "c"},
        {"tool_calls": [("", "f", "{}")]},
    ]
    assert len({message_hash(**{**base, **change}) for change in changes}) == len(changes)


KV: dict[str, Any] = {
    "model_digest": "m",
    "adapters": [],
    "rope": [("freq_base", "10000")],
    "k_type": "f16",
    "v_type": "f16",
    "flash_attn": False,
    "build_digest": "b",
    "state_layout": "1",
}
RUNTIME: dict[str, Any] = {
    "kv": "k",
    "window": 4096,
    "n_batch": 512,
    "n_ubatch": 256,
    "n_gpu_layers": 0,
    "tensor_split": [],
    "threads": 2,
}


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "n"},
        {"adapters": [AdapterId("a", 1.0)]},
        {"rope": [("freq_base", "500000")]},
        {"k_type": "q8_0"},
        {"v_type": "q8_0"},
        {"flash_attn": True},
        {"build_digest": "c"},
        {"state_layout": "2"},
    ],
)
def test_kv_digest_covers_what_kv_bytes_mean(change: dict[str, Any]) -> None:
    assert kv_digest(**{**KV, **change}) != kv_digest(**KV)


def test_kv_digest_does_not_depend_on_the_order_of_rope_settings() -> None:
    rope = [("a", "1"), ("b", "2")]
    assert kv_digest(**{**KV, "rope": rope}) == kv_digest(**{**KV, "rope": rope[::-1]})


@pytest.mark.parametrize(
    "change",
    [
        {"kv": "l"},
        {"window": 8192},
        {"n_batch": 256},
        {"n_ubatch": 128},
        {"n_gpu_layers": 1},
        {"tensor_split": [1]},
        {"threads": 1},
    ],
)
def test_runtime_digest_covers_what_may_differ_without_harm(change: dict[str, Any]) -> None:
    assert runtime_digest(**{**RUNTIME, **change}) != runtime_digest(**RUNTIME)
