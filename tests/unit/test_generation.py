"""The generation: durable before it is returned, never reused, whatever happens to its file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.shared.errors import StorageFull
from modeld.supervisor import durable
from modeld.supervisor.generation import RECOVERY_STEP, GenerationStore


def test_bumps_count_up_and_survive_a_restart(tmp_path: Path) -> None:
    store = GenerationStore.open(tmp_path)
    assert (store.current, store.last_cause) == (0, "")
    assert [store.bump("load"), store.bump("switch")] == [1, 2]
    again = GenerationStore.open(tmp_path)
    assert (again.current, again.last_cause) == (2, "switch")
    assert again.bump("unload") == 3


def test_floor_of_the_lease_is_a_second_witness(tmp_path: Path) -> None:
    GenerationStore.open(tmp_path).bump("load")
    assert GenerationStore.open(tmp_path, floor=1).current == 1
    assert GenerationStore.open(tmp_path, floor=500).current >= 500 + RECOVERY_STEP


@given(damage=st.binary(max_size=80), bumps=st.integers(1, 4))
def test_torn_file_never_leads_to_a_number_already_given(
    tmp_path_factory: pytest.TempPathFactory, damage: bytes, bumps: int
) -> None:
    root = tmp_path_factory.mktemp("g")
    store = GenerationStore.open(root)
    given_out = [store.bump("load") for _ in range(bumps)]
    (root / "generation").write_bytes(damage)
    assert GenerationStore.open(root).bump("start") > max(given_out)


def test_every_cut_and_flipped_byte_is_noticed(tmp_path: Path) -> None:
    store = GenerationStore.open(tmp_path)
    store.bump("load")
    store.bump("load")
    whole = (tmp_path / "generation").read_bytes()
    previous = (tmp_path / "generation.previous").read_bytes()
    for cut in range(len(whole) - 1):  # without its newline it is still whole
        (tmp_path / "generation").write_bytes(whole[:cut])
        (tmp_path / "generation.previous").write_bytes(previous)
        assert GenerationStore.open(tmp_path).current > 2
    flipped = whole.replace(b'"generation":2', b'"generation":1')
    (tmp_path / "generation").write_bytes(flipped)
    assert GenerationStore.open(tmp_path).current > 2


def test_lost_file_is_recovered_from_its_predecessor(tmp_path: Path) -> None:
    store = GenerationStore.open(tmp_path)
    store.bump("load")
    store.bump("load")
    (tmp_path / "generation").unlink()
    recovered = GenerationStore.open(tmp_path)
    assert recovered.current > 2
    assert GenerationStore.open(tmp_path).current == recovered.current


def test_torn_file_without_any_witness_still_steps_away(tmp_path: Path) -> None:
    (tmp_path / "generation").write_bytes(b"")
    assert GenerationStore.open(tmp_path).current >= RECOVERY_STEP


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_full_disk_refuses_the_bump_and_keeps_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = GenerationStore.open(tmp_path)
    store.bump("load")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(StorageFull, match="Free some space"):
            store.bump("switch")
    assert (store.current, store.last_cause) == (1, "load")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["generation"]
    assert store.bump("switch") == 2


def test_number_is_on_disk_before_it_is_returned(tmp_path: Path) -> None:
    """A process that dies right after bump() has told a number that its successor passes."""
    code = (
        "import os, sys; from pathlib import Path;"
        "from modeld.supervisor.generation import GenerationStore as G;"
        "print(G.open(Path(sys.argv[1])).bump('load'), flush=True); os._exit(9)"
    )
    seen = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, check=False
        )
        seen.append(int(done.stdout))
    assert seen == [1, 2, 3]


def test_leftover_temporary_files_are_swept(tmp_path: Path) -> None:
    (tmp_path / f"generation{durable.TEMP_MARK}dead").write_bytes(b"x")
    GenerationStore.open(tmp_path).bump("load")
    assert not list(tmp_path.glob(f"*{durable.TEMP_MARK}*"))
