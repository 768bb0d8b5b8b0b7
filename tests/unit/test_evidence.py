"""What is found out about a model outlives the daemon, and a broken file costs only itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modeld.shared.asking import AskAnswer, AskPoint
from modeld.shared.messages import QualityOut
from modeld.supervisor.evidence import MAX_FILES, EvidenceStore, cost_key

DIGEST = "ab" * 32
KEY = cost_key(512, 512, "f16", "f16", flash_attn=False)


def answer(**changes: object) -> AskAnswer:
    values: dict[str, object] = {
        "loader": "yes",
        "backend_version": "engine 1",
        "build_digest": "b1",
        "points": [AskPoint(256, 1000, 50), AskPoint(512, 2000, 90)],
        **changes,
    }
    return AskAnswer(**values)  # type: ignore[arg-type]


def run(*ids: int) -> QualityOut:
    return QualityOut(prompt_ids=[1], ids=list(ids), margins=[9.0] * len(ids), seconds=0.1)


def test_an_answer_is_found_again_by_another_store(tmp_path: Path) -> None:
    EvidenceStore(tmp_path).asked(DIGEST, KEY, answer())
    again = EvidenceStore(tmp_path)
    assert again.build(DIGEST, "b1").loader == "yes"
    measure = again.measure(DIGEST, "b1", KEY)
    assert [(p.cells, p.kv_bytes, p.compute_bytes) for p in measure.points] == [
        (256, 1000, 50),
        (512, 2000, 90),
    ]
    assert measure.source == "dry run"


def test_another_build_or_other_types_know_nothing(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    store.asked(DIGEST, KEY, answer())
    assert store.build(DIGEST, "b2").loader == "unknown"
    other = cost_key(512, 512, "q8_0", "f16", flash_attn=False)
    assert store.measure(DIGEST, "b1", other).points == ()


def test_what_a_load_reported_stands_in_the_place_of_the_dry_run(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    store.asked(DIGEST, KEY, answer())
    store.loaded(DIGEST, "b1", KEY, AskPoint(512, 2000, 95))
    store.loaded(DIGEST, "b1", KEY, AskPoint(512, 2000, 96))
    points = EvidenceStore(tmp_path).measure(DIGEST, "b1", KEY).points
    assert [p.compute_bytes for p in points] == [50, 96]


def test_loads_alone_are_told_from_a_dry_run(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    store.loaded(DIGEST, "b1", KEY, AskPoint(512, 2000, 95))
    assert store.measure(DIGEST, "b1", KEY).source == "loads"


def test_an_answer_that_could_not_be_had_is_not_kept(tmp_path: Path) -> None:
    EvidenceStore(tmp_path).asked(DIGEST, KEY, answer(loader="unknown", words="it crashed"))
    assert not list(tmp_path.glob("evidence/*.json"))


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 99}', b"\xff\xfe", b"[]"])
def test_a_torn_or_foreign_file_is_dropped_and_written_anew(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "evidence"
    folder.mkdir()
    (folder / f"{DIGEST}.json").write_bytes(content)
    store = EvidenceStore(tmp_path)
    assert store.build(DIGEST, "b1").loader == "unknown"
    store.asked(DIGEST, KEY, answer())
    assert EvidenceStore(tmp_path).build(DIGEST, "b1").loader == "yes"


def test_evidence_of_another_model_in_its_place_is_not_believed(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    store.asked(DIGEST, KEY, answer())
    other = "cd" * 32
    (tmp_path / "evidence" / f"{DIGEST}.json").rename(tmp_path / "evidence" / f"{other}.json")
    assert EvidenceStore(tmp_path).build(other, "b1").loader == "unknown"


def test_a_disk_that_takes_nothing_costs_only_the_memory_of_it(tmp_path: Path) -> None:
    (tmp_path / "evidence").write_text("a file where the folder should be")
    store = EvidenceStore(tmp_path)
    store.asked(DIGEST, KEY, answer())
    assert store.build(DIGEST, "b1").loader == "yes"
    assert EvidenceStore(tmp_path).build(DIGEST, "b1").loader == "unknown"


def test_old_evidence_goes_when_there_is_too_much(tmp_path: Path) -> None:
    folder = tmp_path / "evidence"
    folder.mkdir()
    for number in range(MAX_FILES + 3):
        path = folder / f"{number:064x}.json"
        path.write_text("{}")
        os.utime(path, ns=(number, number))
    EvidenceStore(tmp_path).asked(DIGEST, KEY, answer())
    left = sorted(path.stem for path in folder.glob("*.json"))
    assert len(left) == MAX_FILES
    assert DIGEST in left
    assert f"{0:064x}" not in left


def test_the_first_run_is_a_reference_and_certifies_nothing(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    assert store.quality(DIGEST).answer == "unknown"
    store.quality_seen(DIGEST, "b1", "engine 1", "host", run(3, 4))
    told = store.quality(DIGEST)
    assert told.answer == "unknown"
    assert "recorded as the reference" in told.evidence


def test_a_second_run_that_agrees_certifies(tmp_path: Path) -> None:
    EvidenceStore(tmp_path).quality_seen(DIGEST, "b1", "engine 1", "host", run(3, 4))
    store = EvidenceStore(tmp_path)
    store.quality_seen(DIGEST, "b1", "engine 1", "host", run(3, 4))
    told = store.quality(DIGEST)
    assert (told.answer, "a second run" in told.evidence) == ("yes", True)


def test_a_run_that_disagrees_is_a_no_and_the_reference_stands(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    for ids in ((3, 4), (3, 5), (3, 4)):
        store.quality_seen(DIGEST, "b1", "engine 1", "host", run(*ids))
    assert store.quality(DIGEST).answer == "yes"  # the latest agrees with the first
    store.quality_seen(DIGEST, "b2", "engine 2", "device", run(9, 4))
    told = store.quality(DIGEST)
    assert told.answer == "no"
    assert "engine 2 on device" in told.evidence


def test_the_probe_is_wanted_until_this_build_was_compared_here(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    assert store.wants_quality(DIGEST, "b1", "host")
    store.quality_seen(DIGEST, "b1", "engine 1", "host", run(3))
    assert store.wants_quality(DIGEST, "b1", "host")  # a reference alone confirms nothing
    store.quality_seen(DIGEST, "b1", "engine 1", "host", run(3))
    assert not store.wants_quality(DIGEST, "b1", "host")
    assert store.wants_quality(DIGEST, "b2", "host")
    assert store.wants_quality(DIGEST, "b1", "device")


def test_a_load_corrects_upwards_and_never_without_bound(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    store.asked(DIGEST, KEY, answer())
    store.loaded(DIGEST, "b1", KEY, AskPoint(512, 1, 1))
    store.loaded(DIGEST, "b1", KEY, AskPoint(256, 10**12, 10**12))
    store.loaded(DIGEST, "b1", KEY, AskPoint(8192, 1, 1))  # nothing asked of it could bound it
    points = [
        (p.cells, p.kv_bytes, p.compute_bytes) for p in store.measure(DIGEST, "b1", KEY).points
    ]
    assert points == [(256, 2000, 100), (512, 2000, 90)]


def test_evidence_stays_within_what_is_read_again(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path)
    store.quality_seen(DIGEST, "b1", "engine 1", "host", run(3, 4))
    points = [AskPoint(256 << step, 10**12, 10**12) for step in range(13)]
    for build in range(12):
        for batch in range(40):
            key = cost_key(batch, batch, "f16", "f16", flash_attn=False)
            store.asked(DIGEST, key, answer(build_digest=f"{build:064x}", points=points))
            for cells in range(20):
                store.loaded(DIGEST, f"{build:064x}", key, AskPoint(cells, 1, 1))
    again = EvidenceStore(tmp_path)
    assert again.get(DIGEST).reference is not None
    assert again.costs(DIGEST, f"{11:064x}", key) is not None
    assert again.costs(DIGEST, f"{0:064x}", key) is None


def test_a_pipe_in_the_place_of_evidence_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "evidence").mkdir()
    os.mkfifo(tmp_path / "evidence" / f"{DIGEST}.json")
    assert EvidenceStore(tmp_path).build(DIGEST, "b1").loader == "unknown"
