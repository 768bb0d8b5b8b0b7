"""Prove on a machine with an NVIDIA GPU what was only simulated elsewhere; prints a report.

Run it with a llama-cpp-python that was built for CUDA (CMAKE_ARGS="-DGGML_CUDA=on"):

    python scripts/gpu_proof.py MODEL.gguf [--window 8192] [--report FILE]

Through the product's own path (a daemon, its worker, its planner) it loads the model with none,
half and all of its layers on the GPU and, where there are several GPUs, split over them. It holds
against each other: the plan, the engine's report, and what NVML says was taken. It fills each
window whole. Exit status 0 only if every row holds; 2 where there is no GPU to prove anything on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from modeld.client import Client, ModeldError, Resolution, Session
from modeld.shared.asking import AskRequest
from modeld.supervisor.asking import ask_engine
from modeld.supervisor.probes.machine import MachineProbe

TOLERANCE = 0.05  # of the bytes planned on a device; what the driver keeps itself is measured apart
BOOT_S = 120.0
NO_GPU = 2


@dataclass(frozen=True)
class Row:
    what: str
    planned: str
    seen: str
    holds: bool


@contextmanager
def daemon(data_root: Path, settings: dict[str, str]) -> Iterator[Client]:
    env = os.environ | {f"MODELD_{name.upper()}": value for name, value in settings.items()}
    env["MODELD_DATA_ROOT"] = str(data_root)
    log = (data_root / "daemon.log").open("ab")
    process = subprocess.Popen(
        [Path(sys.executable).with_name("modeld"), "serve"], env=env, stderr=log
    )
    try:
        deadline = time.monotonic() + BOOT_S
        while True:
            try:
                client = Client.connect(data_root)
                break
            except Exception:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.2)
        with client:
            yield client
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def device_bytes(plan: Resolution) -> dict[str, int]:
    return {
        row.device_id: row.weights_bytes + row.kv_bytes + row.compute_bytes
        for row in plan.devices
        if row.engine_name and row.layers
    }


def used(probe: MachineProbe) -> dict[str, int]:
    return {d.id: d.total_bytes - d.free_bytes for d in probe.read().devices if d.known}


def prove(model: Path, window: int, name: str, settings: dict[str, str]) -> list[Row]:
    """One placement, from an empty daemon to a filled window."""
    probe = MachineProbe()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder), settings) as client:
        client.import_model(model, name="proof")
        before = used(probe)
        plan = client.describe("proof", window=window).resolution
        with client.open_session("proof", window=window, prompt_format="raw") as session:
            opened = session.resolution
            after = used(probe)
            rows.append(
                Row(
                    f"{name}: layers on devices",
                    str(plan.gpu_layers),
                    str(opened.gpu_layers),
                    plan.gpu_layers == opened.gpu_layers and not opened.findings,
                )
            )
            rows += [Row(f"{name}: finding", "none", text, False) for text in opened.findings]
            for device, planned in device_bytes(opened).items():
                taken = after[device] - before[device]
                rows.append(
                    Row(
                        f"{name}: bytes on {device} (NVML, with the driver's own)",
                        f"{planned:,}",
                        f"{taken:,}",
                        planned * (1 - TOLERANCE) <= taken,
                    )
                )
            rows.append(filled(session, name, opened.context.effective.tokens))
    return rows


def filled(session: Session, name: str, tokens: int) -> Row:
    """Fill the window with full micro-batches and decode to its very end."""
    what = f"{name}: window filled to its end"
    prompt = " the" * (tokens - 8)
    try:
        turn = session.turn(prompt, " of", max_tokens=tokens, ignore_eos=True)
        for _ in turn:
            pass
    except ModeldError as error:
        return Row(what, str(tokens), error.message, False)
    final = turn.final
    seen = f"{final.resident} ({final.stop_reason.value})"
    return Row(what, str(tokens), seen, final.stop_reason.value == "CONTEXT_FULL")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--window", type=int, default=8192)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    answer = ask_engine("llama", AskRequest())
    gpus = [device for device in answer.devices if device.kind == "gpu"]
    probe = MachineProbe()
    probe.attach_engine(answer.devices)
    machine = probe.read()
    lines = [
        f"engine: {answer.backend_version}",
        *(f"device: {device}" for device in machine.devices),
    ]
    lines += [f"note: {note}" for note in machine.notes]
    if not gpus:
        print("\n".join(lines))
        print("No GPU that the linked engine can use: nothing is proved.", file=sys.stderr)
        return NO_GPU
    layers = ask_engine("llama", AskRequest(path=str(options.model))).traits.get("layers", 0) + 1
    cases = [
        ("host only", {"gpu_layers": "0"}),
        ("half", {"gpu_layers": str(layers // 2)}),
        ("all", {"gpu_layers": str(layers)}),
        ("planned", {}),
    ]
    if len(gpus) > 1:
        cases.append(("first GPU only", {"devices": gpus[0].name}))
    rows = [
        row
        for name, settings in cases
        for row in prove(options.model, options.window, name, settings)
    ]
    lines += ["", "| what | planned | seen | holds |", "| --- | --- | --- | --- |"]
    for row in rows:
        lines.append(
            f"| {row.what} | {row.planned} | {row.seen} | {'yes' if row.holds else 'NO'} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.report:
        options.report.write_text(text)
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
