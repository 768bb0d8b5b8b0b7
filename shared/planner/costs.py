"""What a context of a model costs, by its window and by the layers that a place holds of it.

Puts the KV arithmetic, the estimate of the compute buffer and what an engine reported together.
Knows no budget and no policy but for batch sizes. Costs never fall as the window grows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, repeat

from modeld.shared.capacity import (
    BudgetRow,
    CapacityPolicy,
    EngineMeasure,
    LayerFacts,
    ModelFacts,
)
from modeld.shared.planner import openvino_cost, openvino_kv
from modeld.shared.planner.graph import (
    PAD_CELLS,
    SEQUENCES,
    estimate_compute_bytes,
    input_bytes,
    work_bytes,
)
from modeld.shared.planner.kv_math import grows, kv_bytes

MIB = 1 << 20
DRY_RUN = "dry run"  # how the source of a measure begins that the engine itself computed
LOG_SLACK_BYTES = MIB // 50  # sizes are logged as MiB with two decimals, a line for each cache
NO_MEASURE = EngineMeasure()
COPIES = 3  # further ones of a graph's inputs, where several accelerators work in a pipeline

Formula = Callable[[int], int]
Points = Sequence[tuple[int, int]]  # (cells, bytes), ascending in both


class Costs:
    """What contexts of one model cost for one choice of batch sizes and types. Bytes."""

    def __init__(
        self,
        facts: ModelFacts,
        policy: CapacityPolicy,
        k_type: str,
        v_type: str,
        measure: EngineMeasure = NO_MEASURE,
        streams: int = 1,
    ) -> None:
        """``streams``: of one context, each of the window that is asked about. Their KV adds up,
        and one buffer serves them.
        """
        self.facts = facts
        self.policy = policy
        self.k_type = k_type
        self.v_type = v_type
        self.measure = measure
        self.streams = streams
        self.paged = facts.model_type == "openvino"
        self.pad = openvino_kv.BLOCK_TOKENS if self.paged else PAD_CELLS
        counts: dict[LayerFacts, int] = {}
        for run in facts.layers:
            shape = replace(run, count=1)
            counts[shape] = counts.get(shape, 0) + run.count
        self.shapes = tuple(counts)
        self._merged = tuple(replace(shape, count=n) for shape, n in counts.items())
        self._graph = replace(facts, layers=self._merged)  # order doesn't matter to a graph
        ids = {shape: index for index, shape in enumerate(self.shapes)}
        self.shape_of = tuple(
            chain.from_iterable(
                repeat(ids[replace(run, count=1)], run.count) for run in facts.layers
            )
        )
        self._compute_points = _ascending((p.cells, p.compute_bytes) for p in measure.points)
        self._kv_points: Points = ()
        points = _ascending((p.cells, p.kv_bytes) for p in measure.points)
        if any(abs(told - self.formula_kv(cells)) > LOG_SLACK_BYTES for cells, told in points):
            self._kv_points = points
        self._windows: dict[int, WindowCosts] = {}
        self._present: dict[tuple[int, int], int] = {}

    def formula_kv(self, tokens: int, layers: Sequence[LayerFacts] | None = None) -> int:
        """KV and recurrent states by arithmetic alone."""
        layers = self._merged if layers is None else layers
        if self.paged:
            return openvino_kv.kv_bytes(layers, tokens, self.k_type, self.v_type)
        return kv_bytes(
            layers,
            tokens,
            self.k_type,
            self.v_type,
            pad=PAD_CELLS,
            extra_window_cells=min(self.policy.n_batch, self.policy.n_ubatch),
            window_sequences=SEQUENCES,
            widest_value=0 if self.policy.flash_attn else self.facts.widest_value,
        )

    def formula_compute(
        self,
        tokens: int,
        layers: Sequence[LayerFacts] | None = None,
        *,
        output: bool = True,
        host: bool = True,
    ) -> int:
        """``host``: with what a processor works in, which accelerators don't need."""
        if self.paged:
            present = self._merged if layers is None else layers
            return openvino_cost.context_bytes(self.facts, tokens, present)
        work = 0
        if host:
            work = work_bytes(
                self._graph,
                tokens,
                n_batch=self.policy.n_batch,
                n_ubatch=self.policy.n_ubatch,
                k_type=self.k_type,
                v_type=self.v_type,
                pad=self.pad,
                flash_attn=self.policy.flash_attn,
                layers=layers,
            )
        return work + estimate_compute_bytes(
            self._graph,
            tokens,
            n_batch=self.policy.n_batch,
            n_ubatch=self.policy.n_ubatch,
            outputs=SEQUENCES if output else 0,
            pad=self.pad,
            flash_attn=self.policy.flash_attn,
            layers=layers,
        )

    def inputs(self, tokens: int, layers: Sequence[LayerFacts] | None = None) -> tuple[int, int]:
        """Bytes of a micro-batch's embeddings and of its masks."""
        return input_bytes(
            self._graph,
            tokens,
            n_batch=self.policy.n_batch,
            n_ubatch=self.policy.n_ubatch,
            pad=self.pad,
            layers=layers,
        )

    def kv(self, tokens: int) -> int:
        """KV and recurrent states of one context: by arithmetic, or the engine's own numbers where
        those differ.
        """
        if not self._kv_points or tokens <= 0:
            return self.streams * self.formula_kv(tokens)
        return self.streams * _corrected_kv(self._kv_points, self.formula_kv, tokens)

    def compute(self, tokens: int) -> int:
        """The compute buffer of one context: the estimate, corrected by what was measured."""
        formula = self.formula_compute(tokens)
        if not self._compute_points or tokens <= 0:
            return formula
        corrected = _corrected_compute(self._compute_points, self.formula_compute, tokens)
        if self.measure.source.startswith(DRY_RUN):
            return corrected
        return min(max(corrected, -(-formula // 2)), 2 * formula)

    def both(self, tokens: int) -> int:
        return self.kv(tokens) + self.compute(tokens)

    def window(self, tokens: int) -> WindowCosts:
        found = self._windows.get(tokens)
        if found is None:
            found = self._windows[tokens] = WindowCosts(self, tokens)
        return found

    def present(self, first: int, stop: int) -> int:
        """Which shapes the layers from ``first`` to before ``stop`` have, as bits."""
        found = self._present.get((first, stop))
        if found is None:
            found = 0
            for shape in set(self.shape_of[first:stop]):
                found |= 1 << shape
            self._present[first, stop] = found
        return found

    def cold_bytes_per_token(self) -> int:
        """KV bytes of one token in the layers that grow with every token; 0: none does."""
        growing = [layer for layer in self._merged if grows(layer)]
        if self.paged:
            return -(-openvino_kv.kv_bytes(growing, 32, self.k_type, self.v_type) // 32)
        widest = 0 if self.policy.flash_attn else self.facts.widest_value
        return kv_bytes(growing, 1, self.k_type, self.v_type, widest_value=widest) - sum(
            layer.count * layer.state_bytes for layer in growing
        )

    def notes(self, tokens: int) -> tuple[str, BudgetRow | None]:
        """What to say of the KV, and the row that shows a correction of the compute buffer."""
        said = []
        if self.streams > 1:
            said.append(f"of {self.streams} streams that share one context")
        if self.facts.unknown_pattern:
            said.append("window pattern unknown: every layer as full attention")
        if self._kv_points:
            by = self.streams * self.formula_kv(tokens)
            said.append(f"as the engine reports it ({self.measure.source}); arithmetic says {by}")
        if not self._compute_points:
            return "; ".join(said), None
        formula, corrected = self.formula_compute(tokens), self.compute(tokens)
        factor = corrected / formula if formula else 1.0
        note = f"factor {factor:.3f} on an estimate of {formula}, by {self.measure.source}"
        return "; ".join(said), BudgetRow("calibration", corrected - formula, note)


class WindowCosts:
    """The costs of one window, layer by layer. Layers are 0 to n-1, the output is layer n."""

    def __init__(self, costs: Costs, tokens: int) -> None:
        self._costs = costs
        self._tokens = tokens
        self.kv, self.compute = costs.kv(tokens), costs.compute(tokens)
        self._formula_kv = costs.formula_kv(tokens)
        self._formula_compute = costs.formula_compute(tokens)
        self._layers = len(costs.shape_of)
        self._kv_before: list[int] = []
        self._working: dict[tuple[int, bool, bool, bool], int] = {}

    def kv_of(self, first: int, stop: int) -> int:
        """KV and states of the layers from ``first`` to before ``stop``."""
        before = self._kv_before
        if not before:
            of_shape = [self._costs.formula_kv(self._tokens, (s,)) for s in self._costs.shapes]
            own = [of_shape[shape] for shape in self._costs.shape_of]
            before = self._kv_before = list(accumulate(chain(own, (0,)), initial=0))
        plain = before[stop] - before[first]
        if self.kv == self._formula_kv or not self._formula_kv:
            return plain
        return -(-plain * self.kv // self._formula_kv)

    def working(self, first: int, stop: int, *, copies: bool = False, host: bool = False) -> int:
        """The compute buffer of a place that holds these layers.

        ``copies``: with further copies of the inputs, as each of several accelerators has them so
        that the next micro-batch can start (ggml-backend.cpp, GGML_SCHED_MAX_COPIES).
        """
        if first >= stop:
            return 0
        key = (self._costs.present(first, stop), stop > self._layers, copies, host)
        found = self._working.get(key)
        if found is None:
            shapes = tuple(
                shape for index, shape in enumerate(self._costs.shapes) if key[0] >> index & 1
            )
            plain = self._costs.formula_compute(self._tokens, shapes, output=key[1], host=host)
            found = -(-plain * self.compute // self._formula_compute)
            if copies:
                found += COPIES * sum(self._costs.inputs(self._tokens, shapes))
            self._working[key] = found
        return found

    def inputs(self) -> int:
        """The host's own buffer where it holds no layer: embeddings twice, and the masks."""
        embeddings, masks = self._costs.inputs(self._tokens)
        return 2 * embeddings + masks


def _ascending(points: Iterable[tuple[int, int]]) -> Points:
    """Points that tell something, by cells; one that reports less than a shorter one is raised."""
    told = sorted({cells: size for cells, size in points if cells > 0 and size > 0}.items())
    highest = accumulate((size for _, size in told), max)
    return tuple(zip((cells for cells, _ in told), highest, strict=True))


def _segment(points: Points, tokens: int) -> int:
    """The index of the first point beyond ``tokens``."""
    return bisect_right(points, tokens, key=lambda point: point[0])


def _beyond(points: Points, formula: Formula, tokens: int) -> int:
    """Past the last point: as fast as the last two say, or the formula if that is faster."""
    cells, size = points[-1]
    growth = formula(tokens) - formula(cells)
    if len(points) > 1:
        before, less = points[-2]
        growth = max(growth, -(-(tokens - cells) * (size - less) // (cells - before)))
    return size + max(0, growth)


def _corrected_compute(points: Points, formula: Formula, tokens: int) -> int:
    """Between points as on a straight line, which is not below what is convex."""
    index = _segment(points, tokens)
    if index == 0:
        return points[0][1]
    if index == len(points):
        return _beyond(points, formula, tokens)
    (low, less), (high, more) = points[index - 1], points[index]
    return less - (-(tokens - low) * (more - less) // (high - low))


def _corrected_kv(points: Points, formula: Formula, tokens: int) -> int:
    """Between points not below the straight line, and not below what the formula adds: a cache
    with windowed layers grows fast at first.
    """
    index = _segment(points, tokens)
    if index == 0:
        return points[0][1]
    if index == len(points):
        return _beyond(points, formula, tokens)
    (low, less), (high, more) = points[index - 1], points[index]
    line = less - (-(tokens - low) * (more - less) // (high - low))
    return min(more, max(line, less + formula(tokens) - formula(low)))
