"""Where memory is short: a cgroup's limit is planned with, and what exceeds it costs no daemon.

On real memory cgroups, with a real worker in them.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from modeld.client import (
    Client,
    InsufficientMemory,
    Session,
    SessionFatal,
    SlotState,
    to_plain,
)
from tests.support import deep_models
from tests.support.cgroup import MemoryCgroup, into, limited_daemon, memory_cgroup
from tests.support.daemon import MODEL, REPOSITORY, Background, eventually, running_daemon
from tests.support.product import ask

pytestmark = pytest.mark.real

MIB, GIB = 1 << 20, 1 << 30
SMOL = "smollm2"
HEADROOM = 0.02  # of a budget
DECODED = 8  # tokens


def test_a_cgroup_of_1_gib_is_planned_as_1_gib(demo_model: Path) -> None:
    assert psutil.virtual_memory().total > 2 * GIB, "this test needs a machine with more"
    unproven = "that a daemon in a cgroup of 1 GiB plans with 1 GiB"
    with memory_cgroup(GIB, unproven) as group, limited_daemon(group) as daemon:
        with daemon.client() as client:
            client.import_model(demo_model, name=SMOL)
            described = client.describe(SMOL, window=1024)
            assert described.machine.cgroup_limit_bytes == GIB
            assert described.machine.host_total_bytes > GIB
            assert client.status().machine.cgroup_limit_bytes == GIB
        assert_planned_as_1_gib(to_plain(described.resolution))
        by_daemon = plan_in(group, daemon.data_root, SMOL)
        assert by_daemon["machine"]["cgroup_limit_bytes"] == GIB
        assert_planned_as_1_gib(by_daemon["resolution"])
        # Planned by the command itself, which is in the cgroup as well.
        by_itself = plan_in(group, daemon.data_root, str(demo_model))
        assert by_itself["machine"]["cgroup_limit_bytes"] == GIB
        assert_planned_as_1_gib(by_itself["resolution"])


def assert_planned_as_1_gib(resolution: dict[str, Any]) -> None:
    rows = {row["name"]: row["bytes"] for row in resolution["budget"]}
    assert rows["cgroup_limit"] == GIB
    assert rows["reserve"] == GIB // 4  # the default for 1 GiB; of more it would be more
    assert 0 < rows["budget"] <= GIB - rows["reserve"]
    spent = rows["weights"] + rows["kv_at_memory_fit"] + rows["compute_at_memory_fit"]
    assert 0 < spent <= rows["budget"] - rows["headroom"]
    each = resolution["kv_bytes"] // 1024  # of a token, in the window of 1,024 that was asked for
    fit = resolution["context"]["memory_fit"]
    assert 1024 < fit["tokens"] <= GIB // each
    assert fit["reason"] == "MEMORY"


def plan_in(group: MemoryCgroup, data_root: Path, model: str) -> Any:
    """What `modeld plan` prints for programs, run inside the cgroup."""
    command = ["-m", "modeld", "plan", model, "--ctx", "1024", "--json"]
    done = subprocess.run(
        [*into(group), *command, "--data-root", str(data_root)],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_worker_that_the_kernel_ends_for_want_of_memory_is_told_as_such(demo_model: Path) -> None:
    unproven = "that an out-of-memory kill is told as one, and survived"
    with (
        running_daemon(demo_model, floor_window=256) as daemon,
        memory_cgroup(MIB, unproven) as group,
        daemon.client() as client,
    ):
        session = client.open_session(MODEL, window=8192, prompt_format="raw")
        (slot,) = client.status().slots
        text = "0123456789" * 800
        asked = Background(lambda: ask(session, text[:-1], text[-1:], 1))
        eventually(lambda: client.status().slots[0].state is SlotState.BUSY)
        # What it has is charged where it was; each page that it takes from now on is charged here.
        group.add(slot.worker.pid)
        with pytest.raises(SessionFatal) as lost:
            asked.result()
        assert group.oom_kills == 1
        assert lost.value.metadata["cause"] == "out of memory"
        assert lost.value.metadata["signal"] == "SIGKILL"
        assert "the kernel ran out of memory" in lost.value.message
        assert daemon.process.poll() is None
        with client.open_session(MODEL, window=512, prompt_format="raw") as again:
            assert again.handle.generation > session.handle.generation
            assert len(ask(again, "012345678", "9", 4, ignore_eos=True).ids) == 4
        (then,) = client.status().slots
        assert then.worker.pid != slot.worker.pid
        assert "ran out of memory" in then.worker.last_death


# --- at the limit, with everything in use --------------------------------------------------------


@contextmanager
def filled(file: Path, window: int, sessions: int) -> Iterator[tuple[Client, list[Session]]]:
    """Sessions that have filled their windows, in a cgroup with room for them and nothing else."""
    unproven = "that what nobody planned costs no session at the exact limit of memory"
    settings = {"n_batch": 256, "n_ubatch": 128, "reserve_bytes": 1, "floor_window": 256}
    with (
        memory_cgroup(8 * GIB, unproven) as group,
        limited_daemon(group, threads=2, idle_release_s=0, **settings) as daemon,
        daemon.client() as client,
    ):
        client.import_model(file, name=MODEL, copy=True)
        client.load_model(MODEL)
        plan = client.describe(MODEL, window=window).resolution
        contexts = sessions * (plan.kv_bytes + plan.compute_bytes)
        group.limit = group.used + int((plan.weights_bytes + contexts) / (1 - HEADROOM)) + MIB
        opened = [
            client.open_session(MODEL, window=window, prompt_format="raw") for _ in range(sessions)
        ]
        for number, session in enumerate(opened):
            fill(session, number, window)
        before = client.status().slots[0].worker.pid
        yield client, opened
        (slot,) = client.status().slots
        assert (slot.worker.pid, slot.sessions) == (before, sessions), slot.worker.last_death


def fill(session: Session, number: int, window: int) -> list[int]:
    """Fill the window with the text of that number; the tokens that followed."""
    text = "".join(random.Random(number).choices("0123456789", k=window - DECODED))
    return ask(session, text[:-1], text[-1:], 0, ignore_eos=True).ids


def test_a_question_costs_no_open_session_where_there_is_no_room_to_ask(tmp_path: Path) -> None:
    with filled(deep_models.llama(tmp_path / "deep.gguf"), 1024, 1) as (client, (session,)):
        # Types that nobody asked about before: the engine would have to be asked, in a process.
        told = client.describe(MODEL, window=1024, k_type="q8_0")
        assert told.resolution.kv_bytes > 0
        assert session.explain().resident == 1024


def test_a_prefix_is_copied_only_where_there_is_room_for_it(tmp_path: Path) -> None:
    # A windowed cache is copied whole, by way of a buffer as large as it.
    window = 3072
    with filled(deep_models.gemma2(tmp_path / "deep.gguf"), window, 2) as (_, (first, second)):
        assert fill(second, 0, window) == fill(first, 0, window)


def test_sessions_that_are_filled_one_after_another_are_all_opened_as_planned(
    demo_model: Path,
) -> None:
    """What a session's compute buffer has touched is in the reading: it isn't charged twice."""
    unproven = "that a third planned session opens after the first two have worked"
    window, count = 1024, 3
    room = 24 * MIB  # less than one compute buffer
    with (
        memory_cgroup(4 * GIB, unproven) as group,
        limited_daemon(
            group, reserve_bytes=1, floor_window=256, cold_ram_bytes=0, idle_release_s=0
        ) as daemon,
        daemon.client() as client,
    ):
        client.import_model(demo_model, name=SMOL, copy=True)
        client.load_model(SMOL)
        plan = client.describe(SMOL, window=window).resolution
        assert plan.compute_bytes > room + 8 * MIB
        contexts = count * (plan.kv_bytes + plan.compute_bytes)
        group.limit = group.used + int((plan.weights_bytes + contexts) / (1 - HEADROOM)) + room
        worker = client.status().slots[0].worker.pid
        for number in range(count):
            session = client.open_session(SMOL, window=window, prompt_format="raw")
            fill(session, number, window)
        assert client.status().slots[0].worker.pid == worker
        with pytest.raises(InsufficientMemory):
            client.open_session(SMOL, window=window, prompt_format="raw")
