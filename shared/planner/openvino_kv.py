"""Widths of OpenVINO's paged KV cache, and which types may be asked of each backend's format.

Pure. Widths are what the engine was measured to allocate; a width that isn't known is refused by
name, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence

from modeld.shared.capacity import LayerFacts
from modeld.shared.errors import InvalidRequest
from modeld.shared.planner import kv_math
from modeld.shared.planner.kv_math import has_kv, round_up, value_length

BLOCK_TOKENS = 32  # a block of the paged cache on a CPU
FLOATS = {"f32": 4, "f16": 2, "bf16": 2}  # bytes an element
TYPES = (*FLOATS, "u8", "u4")
# Measured for keys and values together, one head of one layer, one token. It is more than u8's,
# and no formula of it is published, so that no other length is known.
U4_LENGTH = 64
U4_BYTES = 176


def check_types(layers: Sequence[LayerFacts], k_type: str, v_type: str) -> None:
    """Raises InvalidRequest for a type that isn't one, or whose width isn't known here."""
    for field, kv_type in (("k_type", k_type), ("v_type", v_type)):
        if kv_type not in TYPES:
            raise InvalidRequest.of(field, kv_type, ", ".join(TYPES))
    known = ", ".join(name for name in TYPES if name != "u4")
    for field, kv_type, other in (("k_type", k_type, v_type), ("v_type", v_type, k_type)):
        if kv_type == "u4" and other != "u4":
            raise InvalidRequest.of(
                field, kv_type, known, "u4 is known for keys and values together only."
            )
    lengths = {n for one in layers if has_kv(one) for n in (one.key_length, value_length(one))}
    if k_type == "u4" and lengths - {U4_LENGTH}:
        raise InvalidRequest.of(
            "k_type",
            "u4",
            known,
            f"What u4 costs is known for heads of {U4_LENGTH} elements only; this model's have "
            f"{', '.join(str(n) for n in sorted(lengths))}.",
        )


def head_bytes_32(layer: LayerFacts, k_type: str, v_type: str) -> int:
    """Bytes of 32 tokens in one head of one such layer, keys and values.

    u8 keys keep a scale and a zero point for each channel of a block of 32 tokens, so that a
    channel costs 40 bytes a block; u8 values keep both (8 bytes) for each token.
    """
    if k_type == "u4":
        return 32 * U4_BYTES
    values = value_length(layer)
    keys = layer.key_length * 40 if k_type == "u8" else 32 * layer.key_length * FLOATS[k_type]
    if not values:
        return keys
    return keys + 32 * (values + 8 if v_type == "u8" else values * FLOATS[v_type])


def kv_bytes(layers: Sequence[LayerFacts], context: int, k_type: str, v_type: str) -> int:
    """Bytes of the paged cache for ``context`` tokens, in whole blocks of 32.

    Raises InvalidRequest as ``check_types`` does, or for a negative context.
    """
    if context < 0:
        raise InvalidRequest.of("context", context, "0 or more tokens")
    check_types(layers, k_type, v_type)
    blocks = round_up(context, BLOCK_TOKENS) // BLOCK_TOKENS
    return blocks * sum(
        layer.count * layer.kv_heads * head_bytes_32(layer, k_type, v_type)
        for layer in layers
        if has_kv(layer)
    )


def check_types_for(
    model_type: str, layers: Sequence[LayerFacts], k_type: str, v_type: str
) -> None:
    """Refuse types that the model's backend doesn't know. Raises InvalidRequest."""
    check = check_types if model_type == "openvino" else kv_math.check_types
    check(layers, k_type, v_type)
