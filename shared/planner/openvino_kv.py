"""Widths of OpenVINO's paged KV cache, and which types may be asked of each backend's format.

Pure. Widths are the shapes of the cache inputs of compiled models, which are what the paged
executor allocates; a type that isn't served is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from modeld.shared.capacity import LayerFacts
from modeld.shared.errors import InvalidRequest
from modeld.shared.planner import kv_math
from modeld.shared.planner.kv_math import has_kv, round_up, value_length

BLOCK_TOKENS = 32  # a block of the paged cache on a CPU
TYPES = ("f16", "f32", "u8", "u4")
BITS = {"f32": 32, "f16": 16, "u8": 8, "u4": 4}  # an element
# What a quantised cache holds beside its elements, as elements of its own type: a scale and a zero
# point (f32 each, 8 bytes) for each channel of a block's keys, and for each token's values. Read
# off the inputs of models compiled by OpenVINO 2026.4.1 for a CPU, with heads of 16, 32, 64, 80,
# 96, 128, 192 and 256 elements: keys [blocks, heads, 32 + n, length], values [blocks, heads, 32,
# length + n]. GenAI's own metric counts a byte for each element of u4, twice what it takes.
SCALES = {"f32": 0, "f16": 0, "u8": 8, "u4": 16}


def check_type(field: str, kv_type: str) -> None:
    """Raises InvalidRequest for a type that isn't served, named by its field."""
    if kv_type in TYPES:
        return
    detail = "These are the types of openvino models."
    if kv_type == "bf16":
        detail += " Attention is computed in f32, for which the engine has no bf16 cache."
    raise InvalidRequest.of(field, kv_type, ", ".join(TYPES), detail)


def check_types(k_type: str, v_type: str) -> None:
    """Raises InvalidRequest for a type that isn't served, or for two that don't go together.

    The engine has kernels for keys and values of one type (and for u8 with u4, which isn't served:
    a model is compiled for one type). bf16 is refused where attention is computed in f32.
    """
    check_type("k_type", k_type)
    check_type("v_type", v_type)
    if v_type != k_type:
        raise InvalidRequest.of(
            "v_type",
            v_type,
            f"{k_type}, as k_type",
            "An openvino model is compiled for keys and values of one type.",
        )


def head_bytes_32(layer: LayerFacts, k_type: str, v_type: str) -> int:
    """Bytes of 32 tokens in one head of one such layer, keys and values.

    Source: the shapes described at ``SCALES``.
    """
    values = value_length(layer)
    keys = (BLOCK_TOKENS + SCALES[k_type]) * layer.key_length * BITS[k_type]
    rows = BLOCK_TOKENS * (values + SCALES[v_type]) * BITS[v_type] if values else 0
    return (keys + rows) // 8


def kv_bytes(layers: Sequence[LayerFacts], context: int, k_type: str, v_type: str) -> int:
    """Bytes of the paged cache for ``context`` tokens, in whole blocks of 32.

    Raises InvalidRequest as ``check_types`` does, or for a negative context.
    """
    if context < 0:
        raise InvalidRequest.of("context", context, "0 or more tokens")
    check_types(k_type, v_type)
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
    if model_type == "openvino":
        check_types(k_type, v_type)
    else:
        kv_math.check_types(layers, k_type, v_type)
