"""Bytes of a KV cache and the inversion: the largest window whose KV fits a given room.

Pure integer arithmetic over layer facts. Knows no budget, no policy and no engine but for the
rounding that its caller names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modeld.shared.capacity import LayerFacts, LayerKind
from modeld.shared.errors import InvalidRequest

# (elements, bytes) of one block, by ggml type name: the block structs of ggml-common.h, which the
# gguf package repeats as GGML_QUANT_SIZES. A quantised block carries its scales, so that a q8_0
# element costs 34/32 bytes and a q4_0 element 18/32.
BLOCK: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q8_0": (32, 34),
    "q5_1": (32, 24),
    "q5_0": (32, 22),
    "q4_1": (32, 20),
    "q4_0": (32, 18),
    "iq4_nl": (32, 18),
}

NO_KV = frozenset({LayerKind.RECURRENT, LayerKind.SHARED, LayerKind.NONE})
HAS_STATE = frozenset({LayerKind.RECURRENT, LayerKind.MIXED})


def block(kv_type: str, field: str = "kv_type") -> tuple[int, int]:
    """(elements, bytes) of a block of the type. Raises InvalidRequest naming what is allowed."""
    try:
        return BLOCK[kv_type]
    except KeyError:
        raise InvalidRequest.of(field, kv_type, ", ".join(sorted(BLOCK))) from None


def has_kv(layer: LayerFacts) -> bool:
    """Whether such a layer keeps keys of its own."""
    return layer.kv_heads > 0 and layer.kind not in NO_KV


def grows(layer: LayerFacts) -> bool:
    """Whether every further token costs such a layer further bytes."""
    return has_kv(layer) and layer.window_cells == 0


def check_types(layers: Sequence[LayerFacts], k_type: str, v_type: str) -> None:
    """Refuse types that the engine can't allocate: blocks that don't divide a head, or two types
    where keys and values are one row (llama-context.cpp, llama_init_from_model).
    """
    for field, kv_type, lengths in (
        ("k_type", k_type, [layer.key_length for layer in layers if has_kv(layer)]),
        ("v_type", v_type, [value_length(layer) for layer in layers if has_kv(layer)]),
    ):
        elements, _ = block(kv_type, field)
        for length in lengths:
            if length % elements:
                raise InvalidRequest.of(
                    field,
                    kv_type,
                    "f32, f16, bf16 for this model",
                    f"Its heads of {length} elements don't divide into blocks of {elements}.",
                )
    if k_type != v_type and any(layer.kind is LayerKind.LATENT for layer in layers):
        raise InvalidRequest.of(
            "v_type", v_type, k_type, "This model keeps keys and values as one row of one type."
        )


def value_length(layer: LayerFacts) -> int:
    """Elements of one head's value: none where the values are part of a latent row."""
    return 0 if layer.kind is LayerKind.LATENT else layer.value_length


def round_up(tokens: int, pad: int) -> int:
    """The next multiple of ``pad`` that isn't below ``tokens``."""
    return -(-tokens // pad) * pad


def layer_cells(
    layer: LayerFacts,
    context: int,
    *,
    pad: int = 1,
    extra_window_cells: int = 0,
    window_sequences: int = 1,
) -> int:
    """Cells that one such layer allocates for a window of ``context`` tokens.

    Windowed layers: llama-kv-cache-iswa.cpp, ``size_swa``.
    """
    full = round_up(context, pad)
    if layer.window_cells == 0:
        return full
    kept = layer.window_cells * window_sequences + extra_window_cells
    return min(full, round_up(kept, pad))


def state_bytes(layer: LayerFacts, context: int, sequences: int) -> int:
    """Bytes of one such layer's recurrent states: one for each sequence, whatever the window."""
    return layer.state_bytes * sequences if context and layer.kind in HAS_STATE else 0


def kv_bytes(
    layers: Sequence[LayerFacts],
    context: int,
    k_type: str,
    v_type: str,
    *,
    pad: int = 1,
    extra_window_cells: int = 0,
    window_sequences: int = 1,
    widest_value: int = 0,
) -> int:
    """Bytes of the cache for a window of ``context`` tokens, exact, rounded up once.

    ``pad`` is the engine's rounding in cells. A windowed layer keeps its window for each of
    ``window_sequences`` sequences and ``extra_window_cells`` more (a micro-batch), padded alike;
    a recurrent one keeps a state for each sequence. With ``widest_value`` (elements) every layer
    that has values stores that many a token, as the engine does without flash attention where
    they differ (llama-kv-cache.cpp, TAG_V_CACHE_VARIABLE).
    Raises InvalidRequest for an unknown type or a negative context.
    """
    if context < 0:
        raise InvalidRequest.of("context", context, "0 or more tokens")
    k_elements, k_bytes = block(k_type, "k_type")
    v_elements, v_bytes = block(v_type, "v_type")
    scaled = 0  # bytes times both block lengths, so that nothing is rounded on the way
    states = 0
    for layer in layers:
        states += layer.count * state_bytes(layer, context, window_sequences)
        if layer.kind in NO_KV or not (layer.kv_heads or widest_value):
            continue  # with a widest value, a layer without heads keeps a row of it all the same
        cells = layer_cells(
            layer,
            context,
            pad=pad,
            extra_window_cells=extra_window_cells,
            window_sequences=window_sequences,
        )
        keys = layer.kv_heads * layer.key_length
        values = layer.kv_heads * value_length(layer)
        if widest_value and layer.kind is not LayerKind.LATENT:
            values = widest_value
        width = keys * k_bytes * v_elements + values * v_bytes * k_elements
        scaled += layer.count * cells * width
    return states - (-scaled // (k_elements * v_elements))


def largest(fits: Callable[[int], bool], pad: int, limit_tokens: int) -> int:
    """The largest multiple of ``pad`` up to ``limit_tokens`` that fits; 0 where none does.

    Whatever is smaller than what fits must fit too.
    """
    low, high = 0, max(0, limit_tokens) // pad
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle * pad):
            low = middle
        else:
            high = middle - 1
    return low * pad


def fit(
    layers: Sequence[LayerFacts],
    room_bytes: int,
    k_type: str,
    v_type: str,
    *,
    pad: int = 1,
    limit_tokens: int,
    extra_window_cells: int = 0,
    window_sequences: int = 1,
    widest_value: int = 0,
    overhead_bytes: Callable[[int], int] | None = None,
) -> int:
    """The largest multiple of ``pad`` up to ``limit_tokens`` whose bytes are within the room.

    The exact inverse of ``kv_bytes``, plus ``overhead_bytes(context)`` where given, which must
    never fall as the context grows. 0 where nothing fits. ``limit_tokens`` itself is the answer
    of a model whose cache doesn't grow.
    """

    def cost(context: int) -> int:
        kv = kv_bytes(
            layers,
            context,
            k_type,
            v_type,
            pad=pad,
            extra_window_cells=extra_window_cells,
            window_sequences=window_sequences,
            widest_value=widest_value,
        )
        return kv + (overhead_bytes(context) if overhead_bytes is not None else 0)

    block(k_type, "k_type")
    block(v_type, "v_type")
    return largest(lambda context: cost(context) <= room_bytes, pad, limit_tokens)
