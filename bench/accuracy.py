"""``python -m bench.accuracy``: what the planner predicts against what the engine allocates.

Writes ``accuracy.md`` and ``accuracy.json``. Rows of the path ``product`` open sessions through a
daemon on models that are really loaded; rows of the path ``engine control`` hold the arithmetic
against the engine's dry run of published shapes. A row that allocated nothing is a failed row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import machine
from bench.__main__ import model_path
from bench.daemon import REPOSITORY, Daemon
from modeld.client import Session
from modeld.shared.capacity import (
    CapacityPolicy,
    CapacityRequest,
    MachineReading,
    MemorySnapshot,
    ModelFacts,
    SlotUse,
)
from modeld.shared.planner.capacity import resolve
from modeld.supervisor.models.facts import read_facts
from tests.support import engine_costs, shapes, tiny_models

TIB = 1 << 40
# So much that memory never decides: what is compared is what a context costs.
BOUNDLESS = MachineReading(MemorySnapshot(TIB, TIB))
MAX_ERROR, MAX_UNDER = 0.05, 0.01  # of the total; KV is never under at all
TINY: dict[str, Callable[[Path], Path]] = {
    "tiny dense": tiny_models.llama,
    "tiny grouped-query": tiny_models.qwen2,
    "tiny sliding window": tiny_models.gemma3,
    "tiny alternating window": tiny_models.gemma2,
    "tiny recurrent": tiny_models.mamba,
    "tiny hybrid": tiny_models.jamba,
    "tiny latent": tiny_models.deepseek2,
}
BATCHES = ((512, 512), (512, 128))


@dataclass(frozen=True)
class Row:
    """Bytes. ``arithmetic`` is predicted from the file alone, ``planned`` by the daemon."""

    path: str
    model: str
    context: int
    kv_type: str
    n_ubatch: int
    sessions: int
    weights: int
    kv_arithmetic: int
    kv_allocated: int
    compute_arithmetic: int
    compute_allocated: int
    compute_planned: int  # -1: not asked
    failed: str = ""

    @property
    def kv_error(self) -> float:
        return _error(self.kv_arithmetic, self.kv_allocated)

    @property
    def total_error(self) -> float:
        return _error(
            self.weights + self.kv_arithmetic + self.compute_arithmetic,
            self.weights + self.kv_allocated + self.compute_allocated,
        )

    @property
    def planned_error(self) -> float:
        return _error(
            self.weights + self.kv_allocated + self.compute_planned,
            self.weights + self.kv_allocated + self.compute_allocated,
        )

    @property
    def holds(self) -> bool:
        """Of what the path promises: the daemon's plan, or the arithmetic alone."""
        if self.failed:
            return False
        error = self.planned_error if self.compute_planned >= 0 else self.total_error
        return -MAX_UNDER <= error <= MAX_ERROR and self.kv_error >= 0


def _error(predicted: int, allocated: int) -> float:
    return (predicted - allocated) / allocated if allocated else 0.0


def product_rows(folder: Path, name: str, file: Path, contexts: tuple[int, ...]) -> Iterator[Row]:
    """Each combination opened for real, from one daemon for each micro-batch."""
    facts = read_facts(file)
    for n_batch, n_ubatch in BATCHES:
        root = folder / f"{name.replace(' ', '-')}-{n_ubatch}"
        settings = {"n_batch": n_batch, "n_ubatch": n_ubatch, "idle_release_s": 0}
        daemon = Daemon(root, settings)
        try:
            daemon.import_model(file)
            policy = CapacityPolicy(n_batch=n_batch, n_ubatch=n_ubatch, max_sessions=8)
            for context in contexts:
                for k_type in _types(facts):
                    for sessions in (1, 3):
                        yield _opened(daemon, name, facts, policy, context, k_type, sessions)
        finally:
            daemon.stop()


def _types(facts: ModelFacts) -> tuple[str, ...]:
    """Types of the keys that the engine takes: blocks of 32 elements must divide a head."""
    lengths = {run.key_length for run in facts.layers if run.kv_heads}
    latent = any(run.kv_heads and not run.value_length for run in facts.layers)
    blocks = bool(lengths) and not latent and all(length % 32 == 0 for length in lengths)
    return ("f16", "f32", "q8_0", "q4_0") if blocks else ("f16",)


def _opened(
    daemon: Daemon,
    name: str,
    facts: ModelFacts,
    policy: CapacityPolicy,
    context: int,
    k_type: str,
    count: int,
) -> Row:
    request = CapacityRequest(window=context, k_type=k_type)
    by_arithmetic = resolve(facts, request, policy, BOUNDLESS, SlotUse())
    planned = daemon.client.describe("bench", window=context, k_type=k_type).resolution
    opened: list[Session] = []
    failed = ""
    try:
        while len(opened) < count:
            opened += [daemon.client.open_session("bench", window=context, k_type=k_type)]
        kv = sum(session.resolution.kv_bytes for session in opened)
        compute = sum(session.resolution.compute_bytes for session in opened)
        if not compute:
            failed = "nothing was allocated"
    except Exception as error:
        failed, kv, compute = f"{type(error).__name__}: {error}", 0, 0
    finally:
        for session in opened:
            session.close(discard=True)
    return Row(
        path="product",
        model=name,
        context=context,
        kv_type=f"{k_type}/f16",
        n_ubatch=policy.n_ubatch,
        sessions=count,
        weights=facts.weights_bytes,
        kv_arithmetic=by_arithmetic.kv_bytes * count,
        kv_allocated=kv,
        compute_arithmetic=by_arithmetic.compute_bytes * count,
        compute_allocated=compute,
        compute_planned=planned.compute_bytes * count,
        failed=failed,
    )


def control_rows(folder: Path) -> Iterator[Row]:
    """The arithmetic against the recorded dry runs of published shapes."""
    for name in shapes.SHAPES:
        for row in engine_costs.compared(name, folder):
            case = row.cost.case
            yield Row(
                path="engine control",
                model=name,
                context=case.window,
                kv_type=f"{case.k_type}/{case.v_type}",
                n_ubatch=case.n_ubatch,
                sessions=1,
                weights=row.weights,
                kv_arithmetic=row.kv,
                # Equal at the log's precision is equal: the log has no more.
                kv_allocated=row.kv
                if abs(row.kv_difference) <= row.printing
                else round(row.cost.kv_mib * engine_costs.MIB),
                compute_arithmetic=row.compute,
                compute_allocated=round(row.engine_compute),
                compute_planned=-1,
            )


# --- the report ----------------------------------------------------------------------------------


def table(rows: list[Row]) -> list[str]:
    lines = [
        "| path | model | context | K/V | micro-batch | sessions | predicted | allocated "
        "| KV error | total error | as planned | holds |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        predicted = row.weights + row.kv_arithmetic + row.compute_arithmetic
        allocated = row.weights + row.kv_allocated + row.compute_allocated
        planned = f"{row.planned_error:+.2%}" if row.compute_planned >= 0 else ""
        verdict = row.failed or ("yes" if row.holds else "**no**")
        lines.append(
            f"| {row.path} | {row.model} | {row.context:,} | {row.kv_type} | {row.n_ubatch} "
            f"| {row.sessions} | {predicted:,} | {allocated:,} | {row.kv_error:+.2%} "
            f"| {row.total_error:+.2%} | {planned} | {verdict} |"
        )
    return lines


def worst_by_model(rows: list[Row]) -> list[Row]:
    """For each model the row with the largest error of the total, either way."""
    found: dict[str, Row] = {}
    for row in rows:
        before = found.get(row.model)
        if before is None or (row.holds, -abs(row.total_error)) < (
            before.holds,
            -abs(before.total_error),
        ):
            found[row.model] = row
    return list(found.values())


def report(product: list[Row], control: list[Row]) -> str:
    missed = [row for row in (*product, *control) if not row.holds]
    apart = [row for row in product if not -MAX_UNDER <= row.total_error <= MAX_ERROR]
    lines = [
        "# Accuracy of the planner",
        "",
        "Made by `python -m bench.accuracy`; every row stands in `accuracy.json`.",
        "",
        "`predicted` is arithmetic from the file's header alone: weights, KV and compute buffers "
        "in bytes. `allocated` is what the engine reports and, in product rows, what the processor "
        "works in, which no report tells and both sides take from the same formula (the tests "
        "under a memory limit prove it). `as planned` is the daemon's own "
        "prediction, which has asked the engine in a dry run before. A row holds if the total (as "
        "planned, where a daemon planned it) is within 5 % and not under by more than 1 %, and KV "
        "is not under at all.",
        "",
        *(f"- {name}: {value}" for name, value in machine.facts().items()),
        f"- rows: {len(product)} product, {len(control)} engine control; {len(missed)} don't hold",
        f"- product rows whose arithmetic alone would not hold: {len(apart)}"
        + (f" ({', '.join(sorted({row.model for row in apart}))})" if apart else ""),
        "",
        "## Loaded models (product)",
        "",
        *table(product),
        "",
        "## Published shapes, the worst row of each (engine control: dry run)",
        "",
        *table(worst_by_model(control)),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m bench.accuracy", description=__doc__)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs")
    options = parser.parse_args(arguments)
    product: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = {name: make(folder / f"{name}.gguf") for name, make in TINY.items()}
        jobs: list[tuple[str, Path, tuple[int, ...]]] = [
            ("SmolLM2-135M Q4_1", model_path(), (512, 2048, 8192))
        ]
        jobs += [(name, file, (512, 2048)) for name, file in files.items()]
        for name, file, contexts in jobs:
            for row in product_rows(folder, name, file, contexts):
                product.append(row)
                print(table([row])[-1], flush=True)
        control = list(control_rows(folder))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "accuracy.md").write_text(report(product, control))
    data = [asdict(row) for row in (*product, *control)]
    (options.out / "accuracy.json").write_text(json.dumps(data, separators=(",", ":")) + "\n")
    print(*table(worst_by_model(control)), sep="\n")
    failed = sum(bool(row.failed) for row in product)
    print(f"{len(product)} + {len(control)} rows, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
