"""What planning costs: a plan from cached facts, and the facts of a large file."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from bench.lab import Lab
from bench.runner import Spec, Target, require
from modeld.shared.capacity import (
    CapacityPolicy,
    CapacityRequest,
    DeviceKind,
    DeviceReading,
    LayerFacts,
    MachineReading,
    MemorySnapshot,
    ModelFacts,
    Placement,
    SlotUse,
)
from modeld.shared.planner.capacity import survey
from tests.support.gguf_bytes import big_file

GIB = 1 << 30
MB = 1_000_000
WORDS, TENSORS = 150_000, 1_000
ROUNDS = 50  # plans in a sample: a single one is too short for the clock

HOST = Spec(
    "plan_host",
    "a plan on the host: 80 layers, facts cached",
    "microbenchmark",
    "ms",
    Target("at most", 5.0),
)
DEVICES = Spec(
    "plan_devices",
    "a plan over 4 accelerators, layers shed: 80 layers, facts cached",
    "microbenchmark",
    "ms",
    Target("at most", 5.0),
)
FACTS_TIME = Spec(
    "facts_time",
    f"facts of a file with {WORDS:,} words and {TENSORS:,} tensors: the whole reading process",
    "product",
    "ms",
    Target("at most", 300.0),
)
FACTS_MEMORY = Spec(
    "facts_memory", "the same: most memory of that process", "product", "MB", Target("at most", 50)
)


def large_model() -> ModelFacts:
    """Shaped like a 70B: 80 layers with grouped-query attention."""
    each = 480 * 1024 * 1024
    return ModelFacts(
        architecture="llama",
        name="large",
        layers=(LayerFacts(80, 8, 128, 128),),
        embedding_length=8192,
        heads=64,
        model_max=131072,
        vocabulary=128256,
        weights_bytes=80 * each + 2 * GIB,
        file_bytes=80 * each + 2 * GIB,
        quantization="Q4_K_M",
        feed_forward_length=28672,
        layer_weights=(each,) * 80,
        input_bytes=GIB,
        output_bytes=GIB,
    )


def machine(devices: int) -> MachineReading:
    cards = tuple(
        DeviceReading(
            f"gpu{n}", f"card {n}", DeviceKind.NVIDIA, (8 + 4 * n) * GIB, (7 + 4 * n) * GIB,
            engine_name=f"CUDA{n}",
        )
        for n in range(devices)
    )  # fmt: skip
    return MachineReading(MemorySnapshot(256 * GIB, 200 * GIB), cards)


def plan_ms(devices: int) -> float:
    facts, policy = large_model(), CapacityPolicy(placement=Placement.SHED)
    request, reading = CapacityRequest(), machine(devices)
    began_s = time.perf_counter()
    for number in range(ROUNDS):
        # Another window each time, so that nothing of the plan before can be reused.
        plan = survey(facts, replace(request, window=8192 + number), policy, reading, SlotUse())
    spent_ms = (time.perf_counter() - began_s) * 1000 / ROUNDS
    require(plan.numbers.effective.tokens > 0, "nothing was planned")
    return spent_ms


def facts_run(path: Path) -> tuple[float, float]:
    """(milliseconds, megabytes) of the process that the daemon reads a file's facts with."""
    command = [sys.executable, "-P", "-m", "modeld.supervisor.models.facts", str(path)]
    began_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    spent_ms = (time.perf_counter() - began_s) * 1000
    require(done.returncode == 0 and b'"layers"' in done.stdout, "no facts were read")
    return spent_ms, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / MB


def facts_memory(path: Path) -> float:
    """Asked of a process that has no other children: the largest child is what is counted."""
    code = (
        "import sys; from pathlib import Path; from bench.cases.planner import facts_run; "
        "print(facts_run(Path(sys.argv[1]))[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def run(lab: Lab) -> None:
    pairs = lab.plan.pairs
    with lab.book.expecting(HOST, DEVICES):
        lab.book.record(HOST, [plan_ms(0) for _ in range(pairs)])
        lab.book.record(DEVICES, [plan_ms(4) for _ in range(pairs)])
    with (
        lab.book.expecting(FACTS_TIME, FACTS_MEMORY),
        tempfile.TemporaryDirectory() as folder,
    ):
        path = big_file(Path(folder) / "big.gguf", WORDS, TENSORS)
        lab.book.record(FACTS_TIME, [facts_run(path)[0] for _ in range(pairs)])
        lab.book.record(FACTS_MEMORY, [facts_memory(path) for _ in range(lab.plan.few)])
