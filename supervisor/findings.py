"""Holds what an engine reports against what was declared and planned; a difference is a finding.

Pure: reports and facts in, sentences out. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from modeld.shared.capacity import LayerKind, ModelFacts, Resolution
from modeld.shared.messages import LoadResult, OpenResult

HOST_DEVICE = "CPU"  # what engines call the host
WEIGHTS_SLACK = 0.01  # of the weights: an engine may pad tensors where it places them
COMPUTE_SLACK = 0.05
# Where KV is known from the engine's log alone, each of its lines is rounded to 0.01 MiB.
KV_SLACK_BYTES = 32 * 1024


def declared_traits(facts: ModelFacts) -> Mapping[str, int]:
    """What the file declares, under the names that an engine reports it by; 0: not declared."""
    return {
        "layers": sum(run.count for run in facts.layers),
        "train_context": facts.model_max,
        "embedding_length": facts.embedding_length,
        "heads": facts.heads,
        "vocabulary": facts.vocabulary,
    }


def check_load(
    facts: ModelFacts, load: LoadResult, planned: Resolution, copied: int = 0
) -> tuple[str, ...]:
    """What a loaded model is, against the file's header and the plan. ``copied``: bytes of its own
    that loading took beside the file's pages; 0: not known.
    """
    found = [
        f"the file declares {name} {declared}, the engine reads {load.traits[name]}"
        for name, declared in declared_traits(facts).items()
        if declared and name in load.traits and load.traits[name] != declared
    ]
    found += _check_window(facts, load.traits)
    if load.gpu_layers != planned.gpu_layers:
        found.append(
            f"{planned.gpu_layers} layers were planned for accelerators, the engine has "
            f"{load.gpu_layers} there"
        )
    placed = {row.device: row.weights_bytes for row in load.placed}
    for row in planned.devices:
        name = row.engine_name or HOST_DEVICE
        if planned.gpu_layers and name in placed:
            found += _apart(f"weights on {name}", row.weights_bytes, placed[name], WEIGHTS_SLACK)
    expected = next((row.bytes for row in planned.budget if row.name == "weights_copied"), 0)
    if expected and copied > expected * (1 + COMPUTE_SLACK):
        found.append(
            f"{expected} bytes were planned for weights in the engine's own form, loading took "
            f"{copied}"
        )
    return tuple(found)


def _check_window(facts: ModelFacts, traits: Mapping[str, int]) -> list[str]:
    """The declared window against the engine's: one that it doesn't keep isn't planned for."""
    engine = traits.get("sliding_window")
    windowed = [run for run in facts.layers if run.kind is LayerKind.WINDOW]
    if engine is None:
        return []
    if facts.unknown_pattern and engine:
        return [
            f"the engine attends a window of {engine} tokens in layers that the file doesn't "
            "name: every layer was planned as full attention"
        ]
    planned = windowed[0].window_cells if windowed else 0
    if planned == engine:
        return []
    return [f"a sliding window of {planned} tokens was planned, the engine keeps {engine}"]


def check_context(planned: Resolution, opened: OpenResult) -> tuple[str, ...]:
    """What a context really got, against its plan."""
    found = []
    if opened.window != planned.allocated:
        found.append(
            f"a window of {planned.allocated} tokens was planned, the engine made {opened.window}"
        )
    if abs(opened.kv_bytes - planned.kv_bytes) > KV_SLACK_BYTES:
        found += _apart("KV", planned.kv_bytes, opened.kv_bytes, 0.0)
    found += _apart(
        "the compute buffer", planned.compute_bytes, opened.compute_bytes, COMPUTE_SLACK
    )
    return tuple(found)


def _apart(what: str, planned: int, reported: int, slack: float) -> Iterable[str]:
    if reported and abs(reported - planned) > slack * planned:
        return [f"{what} was planned at {planned} bytes, the engine reports {reported}"]
    return []
