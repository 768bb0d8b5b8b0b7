"""The host's memory under a real memory cgroup: a limit of 1 GiB on a machine that has more."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from modeld.shared.capacity import CapacityPolicy, LayerFacts, MemorySnapshot, ModelFacts, SlotUse
from modeld.shared.host_memory import host_memory
from modeld.shared.planner.budget import make_budget
from tests.support.cgroup import MemoryCgroup, memory_cgroup

MIB = 1 << 20
GIB = 1 << 30
SLACK = 24 * MIB  # the interpreter's own growth, and pages that the kernel charges ahead

# Waits to be moved, then reads before and after it takes memory of each kind.
CHILD = """
import json, os, sys
from modeld.shared.host_memory import host_memory

MIB = 1 << 20
sys.stdin.readline()
seen = []

def look(step):
    s = host_memory()
    seen.append([step, s.known, s.total_bytes, s.limit_bytes, s.available_bytes])

look("start")
anonymous = bytearray(128 * MIB)
look("anonymous")
with open(sys.argv[1], "wb") as file:
    file.write(bytes(64 * MIB))
    file.flush()
    os.fsync(file.fileno())
look("file")
shared = os.memfd_create("shared")
os.write(shared, bytes(64 * MIB))
look("shared")
print(json.dumps(seen))
"""


@pytest.fixture
def limited() -> Iterator[MemoryCgroup]:
    """A cgroup with a limit of 1 GiB; removed afterwards."""
    with memory_cgroup(
        GIB, "what a process reads under memory limits that aren't recorded"
    ) as made:
        yield made


def readings_inside(group: MemoryCgroup) -> dict[str, MemorySnapshot]:
    """What a process in ``group`` reads, step by step."""
    with (
        tempfile.TemporaryDirectory(dir="/var/tmp") as folder,  # on a disk: not in memory
        subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, str(Path(folder) / "file")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as child,
    ):
        try:
            group.add(child.pid)
            output, _ = child.communicate("go\n")
        finally:
            with suppress(ProcessLookupError):
                child.kill()
    assert child.returncode == 0
    return {
        step: MemorySnapshot(total, available, limit, known)
        for step, known, total, limit, available in json.loads(output)
    }


def test_a_process_in_a_cgroup_of_1_gib_has_1_gib_whatever_the_machine_has(
    limited: MemoryCgroup,
) -> None:
    assert host_memory().total_bytes > GIB, "this test needs a machine with more than 1 GiB"
    seen = readings_inside(limited)
    assert all(reading.known for reading in seen.values())
    assert {reading.limit_bytes for reading in seen.values()} == {GIB}
    assert {reading.total_bytes for reading in seen.values()} == {host_memory().total_bytes}
    left = {step: reading.available_bytes for step, reading in seen.items()}
    assert GIB - 2 * SLACK < left["start"] <= GIB
    assert abs(left["start"] - left["anonymous"] - 128 * MIB) < SLACK
    assert abs(left["anonymous"] - left["file"]) < SLACK  # the page cache can be dropped
    assert abs(left["file"] - left["shared"] - 64 * MIB) < SLACK  # shared memory can't


def test_a_plan_in_such_a_cgroup_spends_and_reserves_of_1_gib(limited: MemoryCgroup) -> None:
    facts = ModelFacts(
        architecture="llama",
        name="small",
        layers=(LayerFacts(30, 3, 64, 64),),
        embedding_length=576,
        heads=9,
        model_max=8192,
        vocabulary=49152,
        weights_bytes=98 * MIB,
        file_bytes=100 * MIB,
        quantization="Q4_1",
    )
    inside = readings_inside(limited)["start"]
    plan = make_budget(facts, CapacityPolicy(), inside, SlotUse(), reclaim=False)
    assert plan.reserve == GIB // 4  # the default for 1 GiB; of this machine it would be more
    assert GIB // 2 < plan.memory_arm <= GIB - GIB // 4
    outside = make_budget(facts, CapacityPolicy(), host_memory(), SlotUse(), reclaim=False)
    assert outside.reserve > plan.reserve


def test_a_limit_on_the_group_above_counts(limited: MemoryCgroup) -> None:
    with limited.inner() as inner:
        assert readings_inside(inner)["start"].limit_bytes == GIB
