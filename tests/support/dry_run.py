"""What the linked engine says that contexts of a model cost, without reading its weights.

A dry run loads a model's shape only: KV and compute buffers are sized and logged, not allocated
(but for recurrent states, which are). Run as a program, it measures one file in a process of its
own: ``python -m tests.support.dry_run FILE`` with the cases as JSON on its input.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_KV = re.compile(
    r"llama_kv_cache: size =\s*[\d.]+ MiB \(\s*(\d+) cells,\s*(\d+) layers,.*"
    r"K \(\S+\):\s*([\d.]+) MiB, V \(\S+\):\s*([\d.]+) MiB"
)
_STATE = re.compile(
    r"llama_memory_recurrent: size =.*R \(\S+\):\s*([\d.]+) MiB, S \(\S+\):\s*([\d.]+) MiB"
)
_COMPUTE = re.compile(r"compute buffer size\s*=\s*([\d.]+) MiB")
_OUTPUT = re.compile(r"output buffer size\s*=\s*([\d.]+) MiB")


@dataclass(frozen=True)
class Case:
    """A context to be sized. Counts are tokens; types are ggml names."""

    window: int
    n_batch: int
    n_ubatch: int
    k_type: str
    v_type: str


@dataclass(frozen=True)
class Cost:
    """The engine's words on one case. Sizes are MiB as printed, with two decimals."""

    case: Case
    cells: int  # of the context: its window as the engine rounded it
    caches: tuple[tuple[int, int, float, float], ...]  # of each KV cache: cells, layers, K, V
    states: tuple[float, ...]  # recurrent, of all sequences: R and S; () where there are none
    compute: float
    output: float
    refused: str = ""  # the engine's words where it can't make the context

    @property
    def kv_mib(self) -> float:
        """KV and recurrent states together, as the sum of what is printed."""
        return sum(k + v for _, _, k, v in self.caches) + sum(self.states)

    @property
    def printed(self) -> int:
        """How many rounded numbers ``kv_mib`` is the sum of."""
        return 2 * len(self.caches) + len(self.states)


@dataclass(frozen=True)
class Measured:
    engine: str  # its version
    n_swa: int  # tokens of the sliding window that the engine works with; 0: none
    costs: tuple[Cost, ...]  # one for each case, in order


def cost_from(row: Sequence[Any]) -> Cost:
    """The inverse of ``row_of``."""
    return Cost(
        Case(*row[:5]),
        row[5],
        tuple((cells, layers, k, v) for cells, layers, k, v in row[6]),
        tuple(row[7]),
        row[8],
        row[9],
        *row[10:],
    )


def row_of(cost: Cost) -> list[Any]:
    row = [*asdict(cost.case).values(), cost.cells, cost.caches, cost.states]
    return [*row, cost.compute, cost.output, *([cost.refused] if cost.refused else [])]


def measure(path: Path, cases: Sequence[Case]) -> Measured:
    """What the engine says of each case, from a child process.

    Raises RuntimeError with the engine's words where the model can't be loaded.
    """
    command = [sys.executable, "-m", "tests.support.dry_run", str(path)]
    given = json.dumps([[*asdict(case).values()] for case in cases])
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, cwd=_ROOT, check=False
    )
    if done.returncode:
        raise RuntimeError(f"dry run of {path.name}: exit {done.returncode}\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    return Measured(answer["engine"], answer["n_swa"], tuple(map(cost_from, answer["rows"])))


def _load(path: Path) -> Any:
    from modeld.workers.llama.native import engine_log, llama, start
    from modeld.workers.llama.parameters import model_parameters

    start()
    made = model_parameters(0, (), (), {})  # on the host, as a worker loads it
    made.struct.no_alloc, made.struct.load_mode = True, llama.LLAMA_LOAD_MODE_NONE
    model = llama.llama_model_load_from_file(str(path).encode(), made.struct)
    if not model:
        sys.exit(f"the engine can't load it: {engine_log.words()}")
    return model


def _size(model: Any, case: Case) -> Cost:
    from modeld.workers.llama.native import engine_log, llama
    from modeld.workers.llama.parameters import context_parameters, context_settings

    settings = context_settings(**asdict(case), threads=1, flash_attn=False, offload=False)
    engine_log.clear()
    with engine_log.recording() as lines:
        context = llama.llama_init_from_model(model, context_parameters(settings))
    if not context:
        return Cost(case, 0, (), (), 0, 0, engine_log.words())
    cells: int = llama.llama_n_ctx_seq(context)
    llama.llama_free(context)
    return _read(case, cells, lines)


def _read(case: Case, cells: int, lines: Sequence[str]) -> Cost:
    caches: list[tuple[int, int, float, float]] = []
    states: tuple[float, ...] = ()
    compute = output = 0.0
    for line in lines:
        if found := _KV.search(line):
            count, layers, k, v = found.groups()
            caches.append((int(count), int(layers), float(k), float(v)))
        elif found := _STATE.search(line):
            states += (float(found[1]), float(found[2]))
        elif found := _COMPUTE.search(line):
            compute += float(found[1])
        elif found := _OUTPUT.search(line):
            output += float(found[1])
    return Cost(case, cells, tuple(caches), states, compute, output)


def _main(path: Path) -> None:
    from modeld.workers.llama.native import build, llama

    model = _load(path)
    answer = {
        "engine": build().version,
        "n_swa": llama.llama_model_n_swa(model),
        "rows": [row_of(_size(model, Case(*row))) for row in json.load(sys.stdin)],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
