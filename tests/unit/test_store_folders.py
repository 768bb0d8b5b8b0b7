"""OpenVINO folders in the store: taken whole, refused in words, and noticed when they change."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modeld.shared.errors import (
    BackendMismatch,
    DigestMismatch,
    InvalidRequest,
    ModeldError,
    ModelLoadFailed,
    UnsupportedFeature,
)
from modeld.shared.ir_check import check_extents
from modeld.supervisor.models.facts import inspect
from modeld.supervisor.models.store import ModelStore
from tests.support.ir_folders import ir_folder, net, write_pair
from tests.support.openvino_models import tiny_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return ir_folder(tmp_path / "downloads" / "tiny-ov")


@pytest.fixture
def models(tmp_path: Path) -> ModelStore:
    """A store that reads facts in this process, which is quicker."""
    return ModelStore(tmp_path / "root", read=inspect)


def names_in(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "root" / "models").iterdir())


def sha256sum(folder: Path, names: list[str]) -> str:
    """As the command prints it, over what the command prints of the files."""
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# --- importing -------------------------------------------------------------------------------


def test_a_folder_is_linked_hashed_and_remembered(
    models: ModelStore, folder: Path, tmp_path: Path
) -> None:
    (folder / "README.md").write_text("not of use to the engine")
    (folder / "model.safetensors").write_bytes(b"neither")
    model = models.import_file(folder)
    assert (model.name, model.type, model.linked) == ("tiny-ov", "openvino", True)
    names = sorted(file.name for file in model.files)
    assert names == sorted({p.name for p in folder.iterdir()} - {"README.md", "model.safetensors"})
    assert all(file.samefile(folder / file.name) for file in model.files)
    assert sorted(model.path.iterdir()) == sorted(model.files)
    assert model.digest == sha256sum(folder, names)
    assert model.size_bytes == sum(file.stat().st_size for file in model.files)
    assert (model.facts.architecture, model.facts.model_type) == ("qwen2", "openvino")
    assert not model.converts
    again = ModelStore(tmp_path / "root", read=inspect)
    assert again.get("tiny-ov") == model
    assert again.list() == (model,)


def test_a_folders_facts_are_read_by_a_process_of_their_own(tmp_path: Path, folder: Path) -> None:
    model = ModelStore(tmp_path / "root").import_file(folder, "mine", "openvino")
    assert model.facts == inspect(folder, "openvino")


def test_a_copy_is_independent_of_the_folder(models: ModelStore, folder: Path) -> None:
    model = models.import_file(folder, copy=True)
    assert not model.linked
    shutil.rmtree(folder)
    assert models.get("tiny-ov") == model


def test_the_same_folder_again_is_the_same_model_and_another_is_not(
    models: ModelStore, folder: Path, tmp_path: Path
) -> None:
    first = models.import_file(folder)
    assert models.import_file(folder) == first
    other = ir_folder(tmp_path / "other", size=6000)
    with pytest.raises(InvalidRequest, match="Give another name, or replace"):
        models.import_file(other, "tiny-ov")
    assert models.import_file(other, "tiny-ov", replace=True).digest != first.digest
    assert names_in(tmp_path) == [".lock", "tiny-ov"]


def test_one_digest_covers_names_and_contents(
    models: ModelStore, folder: Path, tmp_path: Path
) -> None:
    first = models.import_file(folder, "a")
    (folder / "added.txt").write_text("more")
    second = models.import_file(folder, "b")
    (folder / "added.txt").rename(folder / "renamed.txt")
    third = models.import_file(folder, "c")
    assert len({first.digest, second.digest, third.digest}) == 3
    with pytest.raises(DigestMismatch, match=third.digest):
        models.import_file(folder, "d", expected_digest=first.digest)
    assert models.import_file(folder, "d", expected_digest=third.digest).digest == third.digest


def test_an_embedding_models_folder_needs_no_detokenizer(
    models: ModelStore, folder: Path, tmp_path: Path
) -> None:
    write_pair(folder, "openvino_model", 5000, outputs="last_hidden_state")
    for name in ("openvino_detokenizer.xml", "openvino_detokenizer.bin"):
        (folder / name).unlink()
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    model = models.import_file(folder)
    assert model.facts.pooling == "cls"
    assert (model.path / "1_Pooling" / "config.json").is_file()
    assert models.get(model.name) == model


# --- refusals --------------------------------------------------------------------------------


def truncate(folder: Path, name: str, size: int) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(size)


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside.json"
    (folder / "config.json").rename(outside)
    (folder / "config.json").symlink_to(outside)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "more.json")


def vision(folder: Path, *, without: str = "") -> None:
    """As a model that sees, of three models and one more."""
    for end in ("xml", "bin"):
        (folder / f"openvino_model.{end}").rename(folder / f"openvino_language_model.{end}")
    for part, size in (("text_embeddings", 700), ("vision_embeddings", 900), ("resampler", 50)):
        if part != without:
            write_pair(folder, f"openvino_{part}_model", size, outputs="last_hidden_state")
    if without != "preprocessor":
        (folder / "preprocessor_config.json").write_text("{}")


def vision_cut(folder: Path, part: str, size: int) -> None:
    vision(folder)
    truncate(folder, f"openvino_{part}_model.bin", size)


MODEL, TOKENIZER = "openvino_model", "openvino_tokenizer"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / f"{MODEL}.bin").unlink(), "the model is missing: it has no openvino_model"),
        (lambda f: (f / f"{TOKENIZER}.xml").unlink(), "the tokenizer is missing"),
        (lambda f: (f / f"{TOKENIZER}.bin").unlink(), "the tokenizer is missing"),
        (lambda f: (f / "openvino_detokenizer.xml").unlink(), "the detokenizer is missing"),
        (lambda f: truncate(f, f"{MODEL}.bin", 4999), "truncated: openvino_model.xml needs 5000"),
        (lambda f: truncate(f, f"{TOKENIZER}.bin", 0), "needs 300 bytes of it, the file has 0"),
        (lambda f: truncate(f, f"{MODEL}.xml", 200), "not well-formed XML"),
        (lambda f: truncate(f, f"{MODEL}.xml", 0), "not well-formed XML"),
        (lambda f: write(f, f"{MODEL}.xml", net(version="9")), "of version '9', not an IR"),
        (lambda f: write(f, f"{MODEL}.xml", "<html/>"), "it is 'html'"),
        (lambda f: write(f, f"{MODEL}.xml", net((-1, 2))), "not a number of bytes"),
        (lambda f: write(f, f"{MODEL}.xml", net((2**63, 2**63))), "not a number of bytes"),
        (lambda f: write(f, f"{MODEL}.xml", f"<!DOCTYPE net []>{net()[22:]}"), "document type"),
        (lambda f: write(f, "config.json", "{"), "not JSON"),
        (link_out, "config.json is a link that leads out of it"),
        (pipe, "more.json is not a regular file"),
        (lambda f: vision(f, without="text_embeddings"), "the model of text embeddings is missing"),
        (lambda f: vision(f, without="vision_embeddings"), "the vision encoder is missing"),
        (lambda f: vision(f, without="preprocessor"), "says how images are prepared"),
        (
            lambda f: vision_cut(f, "vision_embeddings", 899),
            "truncated: openvino_vision_embeddings_model.xml needs 900",
        ),
        (lambda f: vision_cut(f, "resampler", 0), "needs 50 bytes"),
    ],
)
def test_a_folder_that_is_no_whole_model_leaves_nothing(
    models: ModelStore,
    folder: Path,
    tmp_path: Path,
    change: Callable[[Path], object],
    words: str,
) -> None:
    change(folder)
    with pytest.raises(ModelLoadFailed) as refused:
        models.import_file(folder, "m", "openvino")
    assert words in refused.value.message
    assert names_in(tmp_path) == [".lock"]


def test_a_model_that_sees_is_imported_with_all_its_parts(models: ModelStore, folder: Path) -> None:
    vision(folder)
    model = models.import_file(folder)
    assert (model.facts.model_type, model.facts.vision) == ("openvino", True)
    assert model.facts.weights_bytes == 5000 + 700 + 900 + 50
    assert (model.path / "openvino_resampler_model.bin").stat().st_size == 50
    assert (model.path / "preprocessor_config.json").is_file()


def test_links_within_the_folder_are_followed(models: ModelStore, folder: Path) -> None:
    (folder / "weights").mkdir()
    (folder / f"{MODEL}.bin").rename(folder / "weights" / "blob")
    (folder / f"{MODEL}.bin").symlink_to(Path("weights") / "blob")
    model = models.import_file(folder)
    assert not (model.path / f"{MODEL}.bin").is_symlink()
    assert (model.path / f"{MODEL}.bin").samefile(folder / "weights" / "blob")


def test_a_folder_can_not_be_of_another_type(
    models: ModelStore, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(BackendMismatch, match="import the folder as type openvino"):
        models.import_file(folder, model_type="llama")
    with pytest.raises(BackendMismatch, match="'llama', not 'openvino'"):
        models.import_file(folder, served=("llama",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"It is a folder; name the \.gguf file"):
        models.import_file(tmp_path / "empty")
    with pytest.raises(ModelLoadFailed, match=r"no openvino_model\.xml"):
        models.import_file(tmp_path / "empty", model_type="openvino")


def test_damage_anywhere_in_the_xml_is_refused_or_changes_nothing(folder: Path) -> None:
    xml = folder / f"{MODEL}.xml"
    whole, refused = xml.read_bytes(), 0
    for place in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        xml.write_bytes(damaged)
        try:
            assert check_extents(folder, MODEL) <= 5000
        except ModelLoadFailed:
            refused += 1
    assert refused > len(whole) // 20


# --- afterwards ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ir: (ir / "config.json").write_text("{}"), "config.json has another size"),
        (lambda ir: (ir / f"{MODEL}.bin").unlink(), "openvino_model.bin can't be read"),
        (lambda ir: (ir / "generation_config.json").write_text("{}"), "has come into its folder"),
    ],
)
def test_a_changed_folder_is_noticed(
    models: ModelStore, folder: Path, change: Callable[[Path], object], words: str
) -> None:
    model = models.import_file(folder, copy=True)
    change(model.path)
    with pytest.raises(DigestMismatch) as noticed:
        models.get(model.name)
    assert words in noticed.value.message
    assert "Import it again, with replace" in noticed.value.message


def test_a_restored_backup_is_accepted_after_hashing_it_again(
    models: ModelStore, folder: Path
) -> None:
    model = models.import_file(folder, copy=True)
    for file in model.files:
        os.utime(file, ns=(1, 1))
    with pytest.raises(DigestMismatch):
        models.get(model.name)
    assert models.rehash(model.name).digest == model.digest
    assert models.get(model.name).digest == model.digest
    (model.path / "config.json").write_text("{}")
    with pytest.raises(DigestMismatch, match="SHA-256"):
        models.rehash(model.name)


def test_removing_a_folder_frees_what_is_not_shared(models: ModelStore, folder: Path) -> None:
    models.import_file(folder, "linked")
    copied = models.import_file(folder, "copied", copy=True)
    assert models.disk_stats().models_bytes >= 2 * copied.size_bytes
    assert models.remove("linked") == 0
    assert models.remove("copied") == copied.size_bytes
    assert (folder / "config.json").is_file()
    assert models.list() == ()


# --- GGUF files of type openvino ---------------------------------------------------------------


def test_one_gguf_can_be_there_once_for_each_engine(models: ModelStore, tmp_path: Path) -> None:
    gguf = tiny_gguf(tmp_path / "tiny.gguf")
    llama = models.import_file(gguf)
    with pytest.raises(InvalidRequest, match="Give another name"):
        models.import_file(gguf, model_type="openvino")
    converted = models.import_file(gguf, "tiny-ov", "openvino")
    assert (llama.type, converted.type) == ("llama", "openvino")
    assert llama.digest == converted.digest
    assert (llama.converts, converted.converts) == (False, True)
    assert converted.facts.model_type == "openvino"
    assert models.import_file(gguf, "tiny-ov", "openvino") == converted
    assert models.smaller_than(llama.facts) == ()


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (lambda data: data[: len(data) // 2], ModelLoadFailed),
        (lambda data: data[:-1], ModelLoadFailed),
        (lambda data: data.replace(b"smollm", b"falcon"), UnsupportedFeature),
    ],
)
def test_a_gguf_that_would_not_convert_is_refused_at_the_import(
    models: ModelStore,
    tmp_path: Path,
    content: Callable[[bytes], bytes],
    error: type[ModeldError],
) -> None:
    gguf = tiny_gguf(tmp_path / "tiny.gguf")
    gguf.write_bytes(content(gguf.read_bytes()))
    with pytest.raises(error):
        models.import_file(gguf, model_type="openvino")
    assert names_in(tmp_path) == [".lock"]
