"""The host's part of a model and of its contexts, where accelerators hold the rest.

Pure arithmetic over file facts; the engine gives accelerators the last layers, output first.
"""

from __future__ import annotations

from dataclasses import replace

from modeld.shared.capacity import LayerFacts, ModelFacts
from modeld.shared.planner.budget import estimate_compute_bytes

# The scheduler reserves room for 60 tensor structs of 336 bytes a graph node, and some more; it is
# aborted, not refused, when that fails.
_NODE_BYTES = 24 * 1024


def host_layer_count(facts: ModelFacts, gpu_layers: int) -> int:
    """Layers that stay on the host, the output not counted."""
    count = sum(layer.count for layer in facts.layers)
    return min(count, max(0, count + 1 - gpu_layers))


def on_host(facts: ModelFacts, gpu_layers: int) -> ModelFacts:
    """The same facts with only the host's layers, which are the first ones."""
    left, kept = host_layer_count(facts, gpu_layers), list[LayerFacts]()
    for run in facts.layers:
        if left > 0:
            kept.append(replace(run, count=min(run.count, left)))
        left -= run.count
    return replace(facts, layers=tuple(kept))


def host_weights(facts: ModelFacts, gpu_layers: int) -> int | None:
    """Bytes of weights that stay on the host; None where the file's facts don't tell by layer."""
    if gpu_layers <= 0:
        return facts.weights_bytes
    if not facts.layer_weights:
        return None
    return facts.input_bytes + sum(facts.layer_weights[: host_layer_count(facts, gpu_layers)])


def estimated_compute(
    facts: ModelFacts, cells: int, gpu_layers: int, *, n_batch: int, n_ubatch: int, outputs: int
) -> int:
    """Bytes of a context's compute buffer on the host, where no plan came with the request.

    0 with layers on an accelerator: what is left on the host then isn't known beforehand.
    """
    if gpu_layers > 0:
        return 0
    return estimate_compute_bytes(facts, cells, n_batch=n_batch, n_ubatch=n_ubatch, outputs=outputs)


def graph_bytes(facts: ModelFacts, tensors: int, n_ubatch: int) -> int:
    """Bytes that a context's graph and scheduler reserve and hardly touch, for a model of
    ``tensors`` tensors: 8 nodes a tensor, and up to 32 where layers are recurrent.
    """
    nodes = max(40 * n_ubatch, 32 * tensors) if facts.recurrent else max(1024, 8 * tensors)
    return nodes * _NODE_BYTES
