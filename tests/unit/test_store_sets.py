"""A model in several files is one model of the store: found, hashed, watched and removed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from modeld.shared.errors import DigestMismatch, InvalidRequest, ModelLoadFailed
from modeld.supervisor.models.store import ModelStore
from tests.support import tiny_models


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """The first part of a set of several."""
    folder = tmp_path / "downloads"
    folder.mkdir()
    return tiny_models.llama(folder / "tiny.gguf", part_tensors=6)


def parts_of(first: Path) -> list[Path]:
    return sorted(first.parent.glob("tiny-*.gguf"))


def test_a_set_is_imported_whole_from_any_of_its_parts(tmp_path: Path, first: Path) -> None:
    parts = parts_of(first)
    assert len(parts) > 2
    whole = tiny_models.llama(tmp_path / "whole.gguf")
    store = ModelStore(tmp_path / "root")
    model = store.import_file(parts[-1])
    assert model.name == "tiny"
    assert [path.name for path in model.files] == [
        f"model-{number:05d}-of-{len(parts):05d}.gguf" for number in range(1, len(parts) + 1)
    ]
    assert [a.read_bytes() for a in model.files] == [b.read_bytes() for b in parts]
    assert model.size_bytes == sum(part.stat().st_size for part in parts)
    alone = store.import_file(whole)
    assert model.facts.weights_bytes == alone.facts.weights_bytes
    assert model.facts.layers == alone.facts.layers
    assert model.digest != alone.digest


def test_a_set_s_digest_is_of_its_parts_digests_in_order(tmp_path: Path, first: Path) -> None:
    lines = "".join(f"{hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in parts_of(first))
    expected = hashlib.sha256(lines.encode()).hexdigest()
    store = ModelStore(tmp_path / "root")
    assert store.import_file(first, expected_digest=expected).digest == expected
    with pytest.raises(DigestMismatch):
        store.import_file(first, "other", expected_digest="0" * 64)
    assert [model.name for model in store.list()] == ["tiny"]


def test_progress_runs_over_all_parts(tmp_path: Path, first: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    ModelStore(tmp_path / "root").import_file(
        first, progress=lambda stage, done, total: seen.append((stage, done, total))
    )
    total = sum(part.stat().st_size for part in parts_of(first))
    hashed = [done for stage, done, of in seen if stage == "hash" and of == total]
    assert hashed == sorted(hashed)
    assert hashed[-1] == total


def test_a_missing_part_is_named_and_nothing_is_left(tmp_path: Path, first: Path) -> None:
    gone = parts_of(first)[1]
    gone.unlink()
    store = ModelStore(tmp_path / "root")
    with pytest.raises(ModelLoadFailed) as caught:
        store.import_file(first)
    assert gone.name in caught.value.message
    assert store.list() == ()


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_change_of_any_part_is_seen(tmp_path: Path, first: Path, number: int) -> None:
    store = ModelStore(tmp_path / "root")
    model = store.import_file(first, copy=True)
    file = model.files[number]
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(DigestMismatch) as caught:
        store.get("tiny")
    assert file.name in caught.value.message


def test_a_set_is_removed_whole(tmp_path: Path, first: Path) -> None:
    store = ModelStore(tmp_path / "root")
    model = store.import_file(first, copy=True)
    size = model.size_bytes
    assert store.remove("tiny") == size
    assert store.list() == ()


def test_a_name_comes_from_the_path_that_was_given_not_from_what_it_links_to(
    tmp_path: Path,
) -> None:
    blob = tiny_models.llama(tmp_path / "3f9a0c.gguf")
    link = tmp_path / "tiny-chat.gguf"
    link.symlink_to(blob)
    assert ModelStore(tmp_path / "root").import_file(link).name == "tiny-chat"


def test_a_linked_set_of_blobs_is_found_by_its_links_names(tmp_path: Path, first: Path) -> None:
    links = tmp_path / "snapshot"
    links.mkdir()
    for number, part in enumerate(parts_of(first)):
        blob = part.rename(part.with_name(f"blob{number}"))
        (links / part.name).symlink_to(blob)
    model = ModelStore(tmp_path / "root").import_file(links / first.name)
    assert model.name == "tiny"
    assert len(model.files) == len(list(links.iterdir()))


def test_a_record_of_older_facts_is_read_again(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "root")
    model = store.import_file(tiny_models.llama(tmp_path / "tiny.gguf"))
    record = model.path.with_name("model.json")
    data = json.loads(record.read_text())
    del data["facts_version"]
    data["facts"] = {
        name: value
        for name, value in data["facts"].items()
        if name not in ("layer_weights", "input_bytes", "output_bytes")
    }
    record.write_text(json.dumps(data))
    again = ModelStore(tmp_path / "root").get("tiny")
    assert again.facts == model.facts
    assert json.loads(record.read_text())["facts_version"] == model.record.facts_version


def test_a_set_under_a_taken_name_is_refused_unless_it_is_the_same(
    tmp_path: Path, first: Path
) -> None:
    store = ModelStore(tmp_path / "root")
    model = store.import_file(first)
    assert store.import_file(first).digest == model.digest
    other = tmp_path / "other"
    other.mkdir()
    second = tiny_models.llama(other / "tiny.gguf", part_tensors=6, seed=9)
    with pytest.raises(InvalidRequest):
        store.import_file(second)
    assert store.import_file(second, replace=True).digest != model.digest
