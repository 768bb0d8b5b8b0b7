"""Writes ``docs/backends.md``: one model on both engines, as each reports of it once it is loaded.

Run it as ``python scripts/backends_doc.py MODEL.gguf docs/backends.md``; it serves the model in a
daemon of its own, and only copies what that answers.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from modeld.client import Client, ClientError, Session
from modeld.shared.capabilities import Capability

BACKENDS = ("llama", "openvino")
KV_TYPES = {
    "llama": (("f16", "f16"), ("q8_0", "f16"), ("f32", "f32")),
    "openvino": (("f16", "f16"), ("u8", "u8"), ("u4", "u4"), ("f32", "f32")),
}
WINDOW = 4096
START_S, STOP_S = 60.0, 30.0


@dataclass(frozen=True)
class Report:
    version: str
    executor: str
    questions: dict[str, Capability]
    capabilities: dict[str, Capability]
    kv: list[tuple[str, str, int]]  # K, V, bytes a token


def main(arguments: list[str]) -> int:
    model, target = Path(arguments[0]).absolute(), Path(arguments[1])
    root = Path(tempfile.mkdtemp(prefix="modeld-doc-"))
    command = [
        "-m",
        "modeld",
        "--data-root",
        str(root),
        "serve",
        f"--backends={','.join(BACKENDS)}",
    ]
    daemon = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL)
    try:
        with connected(root, daemon) as client:
            reports = {backend: report(client, backend, model) for backend in BACKENDS}
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(STOP_S)
        shutil.rmtree(root, ignore_errors=True)
    target.write_text(markdown(model.name, reports), encoding="utf-8")
    return 0


def connected(root: Path, daemon: subprocess.Popen[bytes]) -> Client:
    end_s = time.monotonic() + START_S
    while True:
        try:
            return Client.connect(root)
        except ClientError:
            if daemon.poll() is not None or time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def report(client: Client, backend: str, model: Path) -> Report:
    client.import_model(model, name=backend, model_type=backend)
    for _ in range(2):  # the second load is what certifies the first
        client.load_model(backend)
        client.unload_model(backend, force=True)
    with client.open_session(backend, window=WINDOW) as session:
        described = client.describe(backend)
        status = next(slot for slot in client.status().slots if slot.backend == backend)
        return Report(
            version=status.worker.backend_version,
            executor=status.executor or "llama.cpp contexts",
            questions={question.name: question for question in described.questions},
            capabilities=dict(session.capabilities),
            kv=kv_rows(client, backend, session),
        )


def kv_rows(client: Client, backend: str, session: Session) -> list[tuple[str, str, int]]:
    rows = []
    for k_type, v_type in KV_TYPES[backend]:
        plan = client.describe(
            backend, window=WINDOW, k_type=k_type, v_type=v_type, hypothetical=True
        ).resolution
        rows.append((k_type, v_type, plan.kv_bytes // plan.allocated))
    return rows


def markdown(model: str, reports: dict[str, Report]) -> str:
    lines = [
        "# The two engines on one model",
        "",
        f"What each reports of `{model}` once it is loaded, made by `scripts/backends_doc.py` from "
        "a daemon that serves both. Nothing here is written by hand: a capability is what a "
        "session's `capabilities` answered, with the evidence that came with it. How fast they are "
        "stands in [bench.md](bench.md).",
        "",
        *(f"- {name}: {told.version}; executor: {told.executor}" for name, told in reports.items()),
        "",
        *table("question", {name: told.questions for name, told in reports.items()}),
        "",
        *table("capability", {name: told.capabilities for name, told in reports.items()}),
        "",
        "KV cache, bytes a token as planned and as the engines allocate:",
        "",
        "| engine | K | V | bytes a token |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {k_type} | {v_type} | {size:,} |"
            for name, told in reports.items()
            for k_type, v_type, size in told.kv
        ),
    ]
    return "\n".join(lines) + "\n"


def table(title: str, told: dict[str, dict[str, Capability]]) -> list[str]:
    names = sorted({name for each in told.values() for name in each})
    return [
        f"| {title} | {' | '.join(told)} |",
        "| --- " * (len(told) + 1) + "|",
        *(
            f"| {name} | " + " | ".join(cell(each.get(name)) for each in told.values()) + " |"
            for name in names
        ),
    ]


def cell(told: Capability | None) -> str:
    if told is None:
        return "–"
    words = re.sub(r"\s+", " ", told.evidence).replace("|", "\\|")
    return f"**{told.answer}**: {words}" if words else f"**{told.answer}**"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
