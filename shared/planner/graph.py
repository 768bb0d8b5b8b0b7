"""The compute buffer of one engine context, estimated from what a model's graph has to hold.

Pure arithmetic in bytes. Knows no budget and no window policy. Its terms were read off the sizes
that the engine reports for published shapes, and a dry run of the engine corrects them.
"""

from __future__ import annotations

from collections.abc import Sequence

from modeld.shared.capacity import LayerFacts, LayerKind, ModelFacts
from modeld.shared.planner.kv_math import HAS_STATE, layer_cells, value_length

PAD_CELLS = 256  # llama.cpp rounds n_ctx, and what a windowed layer keeps, up to this
# The isolated layout's context is unified, with the session and one scratch sequence; a windowed
# layer keeps its window for each.
SEQUENCES = 2
F32_BYTES = 4
F16_BYTES = 2
GRAPH_BYTES = 1 << 20
LAYER_GRAPH_BYTES = 128 << 10
# Elements a token in a recurrent layer, by the embedding length; as measured.
STATE_WIDTH = 14
WIDER_STATES = {"nemotron_h": 18, "nemotron_h_moe": 18, "rwkv6": 20, "rwkv7": 20, "arwkv7": 20}
PARALLEL = frozenset({"cohere2", "command-r"})  # attention's output waits for the feed-forward part
# Families that hold an input of this many elements for every block (gemma3n.cpp, gemma4.cpp).
LAYER_INPUTS = {"gemma3n": 256, "gemma4": 256}
STREAMS = {"gemma3n": 3}  # residual streams beside the usual one (n_altup)
# Families whose graphs hold the queries of a layer more often than others do; as measured.
MORE_QUERIES = {"gemma4": 2, "qwen3next": 2, "qwen35": 2, "qwen35moe": 2}
HEAD_NORMS = frozenset({"gemma3", "gemma3n", "gemma4"})  # as above, in the feed-forward part


def estimate_compute_bytes(
    facts: ModelFacts,
    context: int,
    *,
    n_batch: int,
    n_ubatch: int,
    outputs: int = SEQUENCES,
    pad: int = PAD_CELLS,
    flash_attn: bool = False,
    layers: Sequence[LayerFacts] | None = None,
) -> int:
    """Compute buffer of one context with its rows of logits: an estimate to be calibrated.

    Its drivers, for a micro-batch of u tokens over c cells: without flash attention the scores
    (heads x u x c, f32), a mask (u x c) for each kind of layer, and the widest activations that
    are held at once: queries, keys and values beside the residual, or the feed-forward part, or
    the experts', or the logits where they are more. The engine re-uses space between layers, so
    that the count of layers doesn't matter. ``layers`` restricts it to those of one device;
    ``outputs`` is the rows of logits made at once, 0 where the head lives elsewhere.
    """
    if context <= 0:
        return 0
    batch = min(n_batch, n_ubatch, context)
    present = facts.layers if layers is None else layers
    cells = _mask_cells(present, context, n_batch, n_ubatch, pad)
    if not facts.layers:
        cells = {0: context}
    widths = [_feed_forward(facts, present)]
    longest = max(cells.values(), default=0)
    heads = facts.heads or max(1, facts.embedding_length // 64)
    scores = 0 if flash_attn else heads * longest
    if cells:
        widths.append(scores + _attention(facts, present))
    latent = max((x.key_length for x in present if x.kind is LayerKind.LATENT), default=0)
    if latent and not flash_attn:  # the copied values of the rows, f16, beside fewer activations
        rows = -(-longest * latent * F16_BYTES // (F32_BYTES * batch))
        widths.append(scores + rows + 4 * facts.embedding_length + 2 * heads * latent)
    wide = max(widths) + _inputs(facts) + (facts.embedding_length if flash_attn else 0)
    # A window shorter than a micro-batch was seen to hold one embedding more.
    longer = min(batch * (wide + facts.embedding_length), min(n_batch, n_ubatch) * wide)
    elements = max(batch * wide, longer, _recurrent(facts, present, batch))
    elements = max(elements, min(outputs, batch) * facts.vocabulary)
    elements += min(outputs, SEQUENCES) * facts.vocabulary  # in a buffer of their own
    mask_bytes = F16_BYTES if flash_attn else F32_BYTES
    return F32_BYTES * elements + mask_bytes * batch * sum(cells.values())


def work_bytes(
    facts: ModelFacts,
    context: int,
    *,
    n_batch: int,
    n_ubatch: int,
    k_type: str,
    v_type: str,
    pad: int = PAD_CELLS,
    flash_attn: bool = False,
    layers: Sequence[LayerFacts] | None = None,
) -> int:
    """What the processor's side of the engine takes beside a context's compute buffer, on the
    host; no report of the engine tells it.

    A product's second factor is converted to the type that the first is multiplied with, in a
    buffer as large as the largest needs (ggml-cpu.c, ggml_graph_plan, GGML_OP_MUL_MAT): the scores
    of a micro-batch (heads x u x c) to the values' type, or activations to the weights'. It grows
    as the window fills. The rest is the graph itself and its schedule, as measured.
    """
    present = facts.layers if layers is None else layers
    if context <= 0 or not present:
        return 0
    batch = min(n_batch, n_ubatch, context)
    cells = _mask_cells(present, context, n_batch, n_ubatch, pad)
    heads = facts.heads or max(1, facts.embedding_length // 64)
    latent = any(layer.kind is LayerKind.LATENT for layer in present)
    values = k_type if latent else v_type
    scores = 0 if flash_attn or values == "f32" else heads * max(cells.values(), default=0)
    wide = max(facts.feed_forward_length, facts.embedding_length)
    if facts.experts_used:
        wide = max(wide, facts.experts_used * facts.expert_feed_forward_length)
    blocks = sum(layer.count for layer in present)
    return F16_BYTES * batch * max(scores, wide) + GRAPH_BYTES + LAYER_GRAPH_BYTES * blocks


def input_bytes(
    facts: ModelFacts,
    context: int,
    *,
    n_batch: int,
    n_ubatch: int,
    pad: int = PAD_CELLS,
    layers: Sequence[LayerFacts] | None = None,
) -> tuple[int, int]:
    """What goes into the graph of one micro-batch: bytes of its embeddings, and of its masks."""
    batch = min(n_batch, n_ubatch, max(context, 0))
    present = facts.layers if layers is None else layers
    cells = _mask_cells(present, context, n_batch, n_ubatch, pad)
    if not facts.layers:
        cells = {0: context}
    return F32_BYTES * batch * facts.embedding_length, F32_BYTES * batch * sum(cells.values())


def _mask_cells(
    layers: Sequence[LayerFacts], context: int, n_batch: int, n_ubatch: int, pad: int
) -> dict[int, int]:
    """Cells that are attended, by the window of the layers that attend them."""
    cells: dict[int, int] = {}
    for layer in layers:
        if layer.kind is LayerKind.NONE:  # it attends the micro-batch, or nothing
            cells[0] = max(cells.get(0, 0), min(n_batch, n_ubatch, context))
        elif layer.kind is not LayerKind.RECURRENT:
            cells[layer.window_cells] = layer_cells(
                layer,
                context,
                pad=pad,
                extra_window_cells=min(n_batch, n_ubatch),
                window_sequences=SEQUENCES,
            )
    return cells


def _recurrent(facts: ModelFacts, layers: Sequence[LayerFacts], batch: int) -> int:
    """Elements that a recurrent layer holds: activations, and the states that it works on."""
    states = max((x.state_bytes for x in layers if x.kind in HAS_STATE), default=0)
    if not states:
        return 0
    wide = WIDER_STATES.get(facts.architecture, STATE_WIDTH) * facts.embedding_length
    return batch * wide + SEQUENCES * states // F32_BYTES


def _pair(layers: Sequence[LayerFacts]) -> int:
    """Elements of one token's keys and values, in the widest layer."""
    return max((x.kv_heads * (x.key_length + value_length(x)) for x in layers), default=0)


def _attention(facts: ModelFacts, layers: Sequence[LayerFacts]) -> int:
    """Elements a token that are held while scores are."""
    heads = facts.heads or max(1, facts.embedding_length // 64)
    embedding = facts.embedding_length
    latent = max((x.key_length for x in layers if x.kind is LayerKind.LATENT), default=0)
    plain = [layer for layer in layers if layer.kind is not LayerKind.LATENT]
    pairs = 1
    if any(layer.window_cells for layer in plain):
        pairs = 2
    if any(layer.value_length != layer.key_length for layer in plain if layer.kv_heads):
        pairs = 3
    queries = heads * max((layer.key_length for layer in plain), default=0)
    queries *= MORE_QUERIES.get(facts.architecture, 1)
    pair = pairs * _pair(plain)
    if any(layer.kind is LayerKind.NONE for layer in plain):  # it keeps no KV, but may attend
        queries, pair = max(queries, embedding), max(pair, 2 * embedding)
    return max(
        (3 if layers else 6) * embedding + 2 * queries + pair,
        # queries as read and as absorbed, and what comes out of both
        4 * embedding + heads * latent * 5 // 2 if latent else 0,
    )


def _feed_forward(facts: ModelFacts, layers: Sequence[LayerFacts]) -> int:
    """Elements a token that are held in the feed-forward part."""
    embedding, pair = facts.embedding_length, _pair(layers)
    wide = 3 * facts.feed_forward_length + 3 * embedding + pair
    if any(layer.window_cells for layer in layers):
        heads = facts.heads or max(1, embedding // 64)
        queries = heads * max(layer.key_length for layer in layers)
        wide += pair + queries * (2 if facts.architecture in HEAD_NORMS else 1)
    if facts.architecture in PARALLEL:
        wide += embedding
    used = facts.experts_used
    if used:
        expert = facts.expert_feed_forward_length or facts.feed_forward_length
        dense = wide if facts.expert_feed_forward_length else 0
        wide = max(
            dense,
            3 * used * expert + 3 * embedding + pair,
            2 * used * embedding + 4 * embedding + pair + 2 * facts.experts_used,
        )
    return wide


def _inputs(facts: ModelFacts) -> int:
    """Elements a token that live through the whole graph, in the families that have such."""
    blocks = sum(layer.count for layer in facts.layers)
    streams = STREAMS.get(facts.architecture, 0) * facts.embedding_length
    return LAYER_INPUTS.get(facts.architecture, 0) * blocks + streams
