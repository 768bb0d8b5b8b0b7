"""The recorded table of what the engine says that contexts cost, and our arithmetic beside it."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modeld.shared.capacity import ModelFacts
from modeld.shared.gguf_header import model_facts, read_header
from modeld.shared.planner.budget import PAD_CELLS, SEQUENCES, estimate_compute_bytes
from modeld.shared.planner.kv_math import kv_bytes
from tests.support import shapes
from tests.support.dry_run import Case, Cost, cost_from

TABLE = Path(__file__).parents[1] / "vectors" / "engine_costs.json"
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One case: what the engine says, and what we compute. Bytes."""

    cost: Cost
    weights: int
    kv: int
    compute: int

    @property
    def engine_compute(self) -> float:
        """With the rows of logits, which are a buffer of their own."""
        return (self.cost.compute + self.cost.output) * MIB

    @property
    def kv_difference(self) -> float:
        return self.kv - self.cost.kv_mib * MIB

    @property
    def printing(self) -> float:
        """How far the printed sizes may be from the real ones."""
        return 0.00501 * MIB * max(1, self.cost.printed)

    @property
    def total(self) -> float:
        """Ours over the engine's: weights, KV and compute together."""
        return self._ratio(self.weights)

    @property
    def contexts(self) -> float:
        """Ours over the engine's: KV and compute only."""
        return self._ratio(0)

    def _ratio(self, weights: int) -> float:
        engine = weights + self.cost.kv_mib * MIB + self.engine_compute
        return (weights + self.kv + self.compute) / engine

    def __str__(self) -> str:
        case = self.cost.case
        return (
            f"{case.window} cells, batch {case.n_batch}/{case.n_ubatch}, K {case.k_type} "
            f"V {case.v_type}: KV {self.kv / MIB:.2f} for {self.cost.kv_mib:.2f} MiB, compute "
            f"{self.compute / MIB:.2f} for {self.engine_compute / MIB:.2f} MiB, contexts "
            f"{self.contexts - 1:+.1%}, with weights {self.total - 1:+.1%}"
        )


@functools.cache
def table() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(TABLE.read_text())
    return recorded


def recorded_costs(name: str) -> list[Cost]:
    return [cost_from(row) for row in table()["shapes"][name]["rows"]]


def planned_kv(facts: ModelFacts, cells: int, case: Case) -> int:
    """Bytes that a context of ``cells`` holds, by our arithmetic."""
    return kv_bytes(
        facts.layers,
        cells,
        case.k_type,
        case.v_type,
        pad=PAD_CELLS,
        extra_window_cells=case.n_ubatch,
        window_sequences=SEQUENCES,
        widest_value=facts.widest_value,
    )


def compared(name: str, folder: Path) -> list[Row]:
    """Every recorded row of a shape that the engine serves, with what we compute
    from its file's header.
    """
    path = shapes.make(name, folder)
    header = read_header(path)
    facts = model_facts(header, header.file_bytes)
    return [
        Row(
            cost,
            facts.weights_bytes,
            planned_kv(facts, cost.cells, cost.case),
            estimate_compute_bytes(
                facts,
                cost.cells,
                n_batch=cost.case.n_batch,
                n_ubatch=cost.case.n_ubatch,
                outputs=SEQUENCES,
            ),
        )
        for cost in recorded_costs(name)
        if not cost.refused
    ]
