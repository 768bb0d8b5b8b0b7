"""What an OpenVINO model and its contexts take beside their KV cache: estimates, to be corrected.

Pure arithmetic in bytes, for the paged executor on a CPU. The measured sizes stand in
docs/decisions/capacity.md; what the engine was seen to take on this machine goes first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from modeld.shared.capacity import EngineMeasure, LayerFacts, ModelFacts
from modeld.shared.planner.kv_math import has_kv, value_length

MIB = 1 << 20
F32_BYTES = 4
CHUNK_TOKENS = 256  # most tokens that the executor evaluates at once
# As measured when a model is loaded, in memory of the process's own.
PROCESS_BYTES = 24 * MIB  # the tokenizer, the executor's proof, kernels
LAYER_BYTES = 5 * MIB // 4  # of the graph, a layer
# Of the .bin file, in quarters: weights are kept in f32 and again as the kernels want them (4.5
# times an f16 file), or, where they stay quantised, once and with their scales in f32 (1.75 times).
FLOAT_QUARTERS, QUANTISED_QUARTERS = 18, 7
_QUANTISED = re.compile(r"(?:^|[^a-z])(?:int|[iuq]|nf)[2-8](?![0-9])")


def copied_bytes(facts: ModelFacts, measure: EngineMeasure, n_ubatch: int) -> int:
    """Memory that a loaded model takes beside the pages of its file; 0 for other formats.

    As it was measured on this machine, else an estimate that is rather too large: where the
    folder doesn't tell that its weights are quantised, as if they were floats.
    """
    if facts.model_type != "openvino":
        return 0
    if measure.copied_bytes:
        return measure.copied_bytes
    layers = sum(run.count for run in facts.layers)
    quantised = _QUANTISED.search(facts.quantization.lower())
    weights = facts.weights_bytes * (QUANTISED_QUARTERS if quantised else FLOAT_QUARTERS) // 4
    return PROCESS_BYTES + layers * LAYER_BYTES + weights + chunk_bytes(facts, n_ubatch)


def chunk_bytes(facts: ModelFacts, n_ubatch: int) -> int:
    """Activations of the largest evaluation, which one infer request holds for all contexts.

    Twice the widest that must be there at once, in f32, and 2 MiB of kernels: 36 KB a token were
    measured for SmolLM2-135M, of which this formula makes 41 KB.
    """
    widest = max((_pair(layer) for layer in facts.layers), default=0)
    lengths = max((layer.key_length for layer in facts.layers), default=0)
    queries = facts.heads * lengths or facts.embedding_length
    held = 2 * facts.embedding_length + queries + widest + 2 * facts.feed_forward_length
    return 2 * MIB + min(n_ubatch, CHUNK_TOKENS) * 2 * F32_BYTES * held


def context_bytes(facts: ModelFacts, tokens: int, layers: Sequence[LayerFacts]) -> int:
    """What evaluating grows by as a context fills: one layer's KV in f32, and a part of its scores.

    2.0 to 2.4 KB a token were measured for SmolLM2-135M, of which this formula makes 2.7 KB.
    """
    if tokens <= 0:
        return 0
    widest = max((_pair(layer) for layer in layers), default=0)
    return MIB + tokens * (F32_BYTES * widest + 32 * F32_BYTES * facts.heads)


def _pair(layer: LayerFacts) -> int:
    """Elements of one token's keys and values."""
    if not has_kv(layer):
        return 0
    return layer.kv_heads * (layer.key_length + value_length(layer))
