"""Processes that write snapshots until they are killed, and what each leaves behind.

Run as a module: ``python -m tests.support.snapshot_killer ROOT ROUNDS SEED``. It forks, so that a
round costs milliseconds; it ends with status 1 at the first round after which something is half.
Answers a line: how many rounds left a snapshot that was being written, and how many are whole.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from modeld.shared.sealed_file import DigestCheck
from modeld.supervisor.saved_folder import INFO_NAME, SavedFolder
from modeld.supervisor.saved_quota import SavedQuota
from modeld.supervisor.snapshot_transfer import digests
from modeld.supervisor.snapshots import SnapshotStore
from tests.support.saved_files import info_of, write_files

LONGEST_S = 0.1  # until a kill: some snapshots
KEPT = 5  # of earlier rounds


def make_store(root: Path) -> SnapshotStore:
    return SnapshotStore(root, SavedQuota(root, 0))


def write_for_ever(root: Path, told: int) -> None:
    """Each id is told when its snapshot was answered as saved."""
    store = make_store(root)
    for number in range(1_000_000):
        with store.begin() as pending:
            files = write_files(pending.folder.path, fill=number.to_bytes(2, "little"))
            os.write(told, pending.commit(info_of(files)).saved_id.encode() + b"\n")


def killed(root: Path, after_s: float) -> set[str]:
    """What was answered as saved before the kill."""
    reading, told = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        try:
            write_for_ever(root, told)
        finally:
            os._exit(3)
    os.close(told)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"it ended by itself: {status}"
    with open(reading, "rb") as answers:
        return set(answers.read().decode().split())


def check(store: SnapshotStore, answered: set[str]) -> None:
    listed = {info.saved_id: info for info in store.list()}
    assert store.damaged() == ()
    assert answered <= set(listed), "a snapshot that was answered is gone"
    assert {entry.name for entry in store.root.iterdir()} == set(listed), "something is half"
    for saved_id, info in listed.items():
        folder = SavedFolder(store.root / saved_id)
        assert {entry.name for entry in folder.path.iterdir()} == {INFO_NAME, *info.files}
        for name, digest in digests(info).items():
            whole = DigestCheck(digest)
            whole.update((folder.path / name).read_bytes())
            assert whole.matches(), f"{name} isn't what was saved"


def main(root: Path, rounds: int, seed: int) -> None:
    numbers, unfinished = random.Random(seed), 0
    make_store(root)
    for _ in range(rounds):
        answered = killed(root, numbers.uniform(0.0, LONGEST_S))
        unfinished += any(entry.name[0] == "." for entry in (root / "snapshots").iterdir())
        store = make_store(root)  # as the next daemon starts
        check(store, answered)
        for info in store.list()[KEPT:]:
            store.delete(info.saved_id)
    print(unfinished, len(make_store(root).list()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
