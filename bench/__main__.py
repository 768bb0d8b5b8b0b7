"""``python -m bench``: run the measurements, write ``bench.md`` and ``bench.json``.

Exits with 1 if a row failed to run; a missed target is a result, not a failure.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from bench import machine, report
from bench.cases import (
    batched,
    decode,
    growing_turn,
    openvino,
    planner,
    prefill,
    residency,
    supervisor,
    warm_turn,
    worker_death,
)
from bench.daemon import REPOSITORY
from bench.lab import Lab, Plan
from bench.runner import TARGET_PAIRS, Book

CASES: dict[str, Callable[[Lab], None]] = {
    "decode": decode.run,
    "prefill": prefill.run,
    "warm": warm_turn.run,
    "growing": growing_turn.run,
    "supervisor": supervisor.run,
    "death": worker_death.run,
    "planner": planner.run,
    "openvino": openvino.run,
    "residency": residency.run,
    "batched": batched.run,
    "memory": supervisor.memory,  # last: after all that the daemon has served
}
TEST_MODEL = REPOSITORY / ".data" / "test" / "SmolLM2-135M-Instruct.Q4_1.gguf"
QUICK_PAIRS = 3


def model_path() -> Path:
    """Raises SystemExit with what to do if the model isn't there."""
    path = Path(os.environ.get("MODELD_TEST_MODEL") or TEST_MODEL).absolute()
    if not path.is_file():
        raise SystemExit(
            f"There is no model at {path}. `make bench` fetches it; or name one of the same kind "
            "in MODELD_TEST_MODEL."
        )
    return path


def usable_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench", description="Measure what modeld promises.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="few pairs; labelled so")
    size.add_argument("--full", action="store_true", help="the default")
    parser.add_argument("--only", action="append", choices=CASES, help="this case; may be repeated")
    parser.add_argument("--threads", type=int, default=usable_processors(), help="of both sides")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the results; default docs/, or .data/bench/ for less than the full run",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="replace only what was measured in the results that stand in the folder",
    )
    return parser.parse_args(arguments)


def label(options: argparse.Namespace) -> str:
    parts = []
    if options.quick:
        parts.append(
            f"Quick run: {QUICK_PAIRS} pairs where {TARGET_PAIRS} are needed for a verdict."
        )
    if options.only:
        parts.append(f"Only: {', '.join(options.only)}.")
    return " ".join(parts)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    facts = {"label": label(options), **machine.facts()}
    model = model_path()
    plan = Plan(
        model=model,
        threads=options.threads,
        quick=options.quick,
        pairs=QUICK_PAIRS if options.quick else TARGET_PAIRS,
        few=2 if options.quick else 3,
    )
    book = Book()
    # So that a terminated run takes its daemons and controls with it.
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    with Lab(plan, book) as lab:
        facts["engine"] = (
            f"{model.name}, window {lab.engine.window:,}, batch {lab.engine.n_batch}, "
            f"micro-batch {lab.engine.n_ubatch}, {lab.engine.threads} threads, f16 KV, "
            "flash attention off"
        )
        for name, case in CASES.items():
            if not options.only or name in options.only:
                with book.case(name):
                    case(lab)
    whole = not options.quick and not options.only
    folder = options.out or REPOSITORY / ("docs" if whole else ".data/bench")
    rows = book.rows
    if options.merge:
        facts["label"] = "Of several runs of the suite on this machine, each row of the latest."
        rows = report.merged(folder, rows)
    text, data = report.write(folder, rows, facts)
    book.say(f"written: {text}, {data}")
    return 1 if book.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
