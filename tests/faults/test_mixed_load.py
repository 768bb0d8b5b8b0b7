"""Clients that do everything at random, at once: all counts agree with an independent token tape,
answers are what the engine alone gives, and nothing is left behind.

``MODELD_MIXED_SECONDS``, ``_SEED``, ``_BACKEND`` (llama or openvino) and ``_MODEL`` (tiny or demo)
may be set in the environment, for a longer run by hand.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from modeld.client import Client
from modeld.shared.host_memory import anonymous_bytes
from tests.support.backends import LLAMA, OPENVINO
from tests.support.daemon import RunningDaemon, eventually, running_daemon
from tests.support.mixed_load import MODEL, Common, Sample
from tests.support.mixed_steps import MixedClient
from tests.support.openvino_models import tiny_gguf, tiny_ir
from tests.support.reference import Reference
from tests.support.tiny_models import llama
from tests.support.token_tape import counters_of
from tests.support.vocab import RealTokenizer

SECONDS = float(os.environ.get("MODELD_MIXED_SECONDS", "4"))
SEED = int(os.environ.get("MODELD_MIXED_SEED", "1"))
BACKEND = os.environ.get("MODELD_MIXED_BACKEND", "llama")
DEMO = os.environ.get("MODELD_MIXED_MODEL", "tiny") == "demo"
CLIENTS = 4
CONTEXTS = 3  # of isolated sessions: fewer than there are sessions
ROUNDS = 4 if SECONDS < 60 else 12  # after each of them nothing is open
MIB = 1 << 20
KV_BYTES = 32 if DEMO else 4  # MiB of the cold store's RAM
SLACK_BYTES = 16 * MIB
LAZY = 6  # threads and descriptors that pools make as they are first needed
MOST_SAMPLES = 40 if SECONDS < 60 else 200
SETTINGS: dict[str, Any] = {
    "n_ubatch": 64,
    "max_sessions": CONTEXTS,
    "max_open_sessions": 64,
    "cold_ram_bytes": KV_BYTES * MIB,
    "cold_disk_bytes": 2 * KV_BYTES * MIB,
}
TEXTS = [
    " ".join(f"The {what} keeps what the {other} brought." for what in ("mill", "sea", "rope"))
    for other in ("storm", "river", "letter", "winter")
]


@dataclass(frozen=True)
class Left:
    """What is there while nothing is open. Bytes of the worker's own are without parked KV."""

    daemon_bytes: int
    worker_bytes: int
    threads: tuple[int, int]  # of daemon and worker
    descriptors: tuple[int, int]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A GGUF file, of which the tokenizer is known."""
    if DEMO:
        found: Path = request.getfixturevalue("demo_model")
        return found
    folder = tmp_path_factory.mktemp("mixed")
    return (llama if BACKEND == "llama" else tiny_gguf)(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def served(
    made: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Path:
    """What the worker loads."""
    if BACKEND == "llama":
        return made
    if DEMO:
        found: Path = request.getfixturevalue("demo_folder")
        return found
    return tiny_ir(tmp_path_factory.mktemp("ir") / "tiny")


@contextmanager
def serving(made: Path, streams: int) -> Iterator[tuple[RunningDaemon, Client]]:
    with (
        running_daemon(backend=BACKEND, batch_streams=streams, **SETTINGS) as daemon,
        daemon.client() as client,
    ):
        client.import_model(made, name=MODEL, model_type=BACKEND)
        client.load_model(MODEL)
        yield daemon, client


@pytest.mark.parametrize("streams", [1, 4])
def test_four_clients_do_everything_at_random_and_every_count_agrees(
    made: Path, served: Path, streams: int
) -> None:
    tokenizer = RealTokenizer(made)
    shared = Common(tokenizer, streams, TEXTS, CONTEXTS + streams, 3 if DEMO else 1)
    left: list[Left] = []
    with serving(made, streams) as (daemon, client):
        clients = [MixedClient(daemon.client(), shared, number, SEED) for number in range(CLIENTS)]
        for _ in range(ROUNDS):
            run_round(clients, SECONDS / ROUNDS)
            left.append(nothing_open(daemon, client, shared))
        for one in clients:
            one.client.close()
    tell(shared, left)
    assert_no_growth(left)
    check_answers(served, shared.samples)
    tokenizer.close()
    assert len(shared.steps) >= 12, shared.steps


def run_round(clients: list[MixedClient], seconds: float) -> None:
    """All clients at once, each until the time is over or one of them has failed."""
    end = time.monotonic() + seconds
    failed: list[BaseException] = []

    def run(client: MixedClient) -> None:
        try:
            client.run(lambda: time.monotonic() > end or bool(failed))
        except BaseException as error:
            failed.append(error)
            raise

    with ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(run, client) for client in clients]
    if failed:
        raise failed[0]
    for one in running:
        one.result()


def nothing_open(daemon: RunningDaemon, client: Client, shared: Common) -> Left:
    """With all sessions closed and all snapshots deleted, nothing of either is left."""
    for kept in shared.snapshots:
        client.delete_snapshot(kept.info.snapshot_id)
    shared.snapshots.clear()
    assert client.sessions() == []
    listed = client.list_snapshots()
    assert (listed.snapshots, listed.used_bytes) == ((), 0)
    assert shared.batched == 0
    root = daemon.data_root
    for folder in (root / "snapshots", root / "durable"):
        eventually(lambda empty=folder: not files_in(empty))  # type: ignore[misc]
    assert list(root.rglob("*.tmp-*")) == []
    cold = assert_contexts_are_free(client)
    on_disk = sum(path.stat().st_size for path in files_in(root / "cold"))
    assert on_disk == cold["slot_cold_disk_bytes"] <= SETTINGS["cold_disk_bytes"]
    assert cold["slot_cold_ram_bytes"] <= SETTINGS["cold_ram_bytes"]
    slot = client.status().slots[0]
    pids = (daemon.process.pid, slot.worker.pid)
    processes = [psutil.Process(pid) for pid in pids]
    parked = cold["slot_cold_ram_bytes"] + slot.reclaimable_bytes
    return Left(
        daemon_bytes=anonymous_bytes(pids[0]) or 0,
        worker_bytes=(anonymous_bytes(pids[1]) or 0) - parked,
        threads=(processes[0].num_threads(), processes[1].num_threads()),
        descriptors=(processes[0].num_fds(), processes[1].num_fds()),
    )


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def assert_contexts_are_free(client: Client) -> dict[str, int]:
    """The slot's counters, which one session more tells: no context has an owner but its own."""
    with client.open_session(MODEL, window=512, prompt_format="raw") as session:
        counters = counters_of(session.explain())
        assert counters["slot_contexts"] == counters["slot_contexts_reclaimable"] + 1, counters
        made, freed = counters["slot_contexts_created"], counters["slot_contexts_freed"]
        assert counters["slot_contexts"] == made - freed
    slot = client.status().slots[0]
    assert (slot.sessions, slot.queued, slot.holder_operation) == (0, 0, "")
    return counters


def tell(shared: Common, left: list[Left]) -> None:
    steps = sum(shared.steps.values())
    print(f"seed {SEED}, {BACKEND}, {steps} steps, {shared.book.checks} checks")
    print(f"{shared.strict} steps exact, {shared.loose} within bounds: {dict(shared.steps)}")
    for one in left:
        print(one)


def assert_no_growth(left: list[Left]) -> None:
    half = len(left) // 2
    for name in ("daemon_bytes", "worker_bytes"):
        sizes = [getattr(one, name) for one in left]
        early, late = max(sizes[:half]), min(sizes[half:])
        assert late <= early + SLACK_BYTES, (name, sizes)
    for name in ("threads", "descriptors"):
        for who in range(2):
            counts = [getattr(one, name)[who] for one in left]
            assert min(counts[half:]) <= max(counts[:half]) + LAZY, (name, counts)


def check_answers(served: Path, samples: list[Sample]) -> None:
    """Some of the greedy answers, against the engine in a fresh context."""
    assert samples
    chosen = random.Random(SEED).sample(samples, min(MOST_SAMPLES, len(samples)))
    reference = Reference(served, backend=LLAMA if BACKEND == "llama" else OPENVINO)
    for sample in chosen:
        due = reference.greedy(sample.prompt, len(sample.ids), stepped=sample.alone, window=1024)
        assert sample.ids == due, (len(sample.prompt), sample.alone)
    print(f"{len(chosen)} of {len(samples)} sampled answers compared, all equal")
    reference.close()
