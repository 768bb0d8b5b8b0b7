"""The model store: verified imports, whole or not at all, and files that are what they were."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.shared.errors import (
    BackendMismatch,
    DigestMismatch,
    InvalidRequest,
    ModeldError,
    ModelLoadFailed,
    ModelNotFound,
    StorageFull,
    UnsupportedModelType,
)
from modeld.shared.ids import MODEL_NAME
from modeld.supervisor.models import facts
from modeld.supervisor.models.facts import inspect, read_facts
from modeld.supervisor.models.intake import derive_name
from modeld.supervisor.models.store import ModelStore
from tests.support import tiny_models


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("gguf") / "original.gguf")


@pytest.fixture
def gguf(tmp_path: Path, original: Path) -> Path:
    (tmp_path / "downloads").mkdir()
    return Path(shutil.copy(original, tmp_path / "downloads" / "tiny.gguf"))


@pytest.fixture
def models(tmp_path: Path) -> ModelStore:
    """A store that reads facts in this process, which is quicker."""
    return ModelStore(tmp_path / "root", read=inspect)


def names_in(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "root" / "models").iterdir())


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- importing -------------------------------------------------------------------------------


def test_import_links_hashes_and_remembers(models: ModelStore, gguf: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    model = models.import_file(gguf, progress=lambda *step: steps.append(step))
    assert (model.name, model.type, model.linked) == ("tiny", "llama", True)
    assert model.digest == digest_of(gguf)
    assert model.path.samefile(gguf)
    assert model.facts == inspect(gguf)
    size = gguf.stat().st_size
    assert steps == [("check", 0, size), ("hash", size, size)]
    again = ModelStore(tmp_path / "root", read=inspect)
    assert again.get("tiny") == model
    assert again.list() == (model,)
    assert names_in(tmp_path) == [".lock", "tiny"]


def test_facts_are_read_by_a_process_of_their_own(tmp_path: Path, gguf: Path) -> None:
    assert ModelStore(tmp_path / "root").import_file(gguf).facts == inspect(gguf)


def test_copy_leaves_the_original_alone(models: ModelStore, gguf: Path) -> None:
    model = models.import_file(gguf, "mine", copy=True)
    assert not model.linked
    gguf.write_bytes(b"changed")
    assert models.get("mine").digest == digest_of(model.path)


def test_file_that_cannot_be_linked_is_copied(
    models: ModelStore, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_filesystem(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_filesystem)
    model = models.import_file(gguf)
    assert not model.linked
    assert model.digest == digest_of(gguf)
    assert not model.path.samefile(gguf)


def test_symbolic_link_is_followed_to_the_file_itself(models: ModelStore, gguf: Path) -> None:
    link = gguf.with_name("latest.gguf")
    link.symlink_to(gguf)
    model = models.import_file(link)
    assert not model.path.is_symlink()
    assert model.path.samefile(gguf)


def test_same_file_again_is_answered_without_hashing(models: ModelStore, gguf: Path) -> None:
    first = models.import_file(gguf)

    def never(*_: object) -> None:
        raise AssertionError("it was read again")

    assert models.import_file(gguf, progress=never) == first


def test_same_content_from_elsewhere_is_the_same_model(models: ModelStore, gguf: Path) -> None:
    first = models.import_file(gguf)
    assert models.import_file(Path(shutil.copy(gguf, gguf.parent / "b.gguf")), "tiny") == first


def test_name_of_another_model_is_taken_unless_replaced(
    models: ModelStore, gguf: Path, tmp_path: Path
) -> None:
    models.import_file(gguf)
    other = tiny_models.llama(tmp_path / "other.gguf", seed=9)
    with pytest.raises(InvalidRequest, match="Give another name, or replace"):
        models.import_file(other, "tiny")
    replaced = models.import_file(other, "tiny", replace=True)
    assert models.get("tiny").digest == digest_of(other) == replaced.digest
    assert names_in(tmp_path) == [".lock", "tiny"]


def test_expected_digest_is_checked(models: ModelStore, gguf: Path, tmp_path: Path) -> None:
    digest = digest_of(gguf)
    with pytest.raises(DigestMismatch, match=digest):
        models.import_file(gguf, expected_digest="0" * 64)
    with pytest.raises(InvalidRequest, match="64 hex digits"):
        models.import_file(gguf, expected_digest="abc")
    assert names_in(tmp_path) == [".lock"]
    assert models.import_file(gguf, expected_digest=f"sha256:{digest.upper()}").digest == digest


def test_wrong_types_are_refused_in_words(models: ModelStore, gguf: Path) -> None:
    with pytest.raises(BackendMismatch, match="'llama', not 'openvino'"):
        models.import_file(gguf, model_type="openvino", served=("llama",))
    with pytest.raises(UnsupportedModelType, match="'onnx'"):
        models.import_file(gguf, model_type="onnx")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: d / "tinny.gguf", "no such file on the daemon's machine. Did you mean tiny"),
        (lambda d: d, "It is a folder; name the .gguf file in it: tiny.gguf"),
        (lambda d: Path("tiny.gguf"), "not absolute"),
        (lambda d: Path("/dev/zero"), "not a regular file"),
        (lambda d: d / "tiny.gguf" / "x", "no such file"),
        (lambda d: d / ("x" * 300), "The system says"),
        (lambda d: d / "a\0b", "The system says"),
    ],
)
def test_wrong_paths_say_what_is_wrong(models: ModelStore, gguf: Path, make, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        models.import_file(make(gguf.parent))
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (lambda data: b"", InvalidRequest, "It is empty"),
        (lambda data: b"<html>not found</html>", ModelLoadFailed, "GGUF"),
        (lambda data: data[:200], ModelLoadFailed, "GGUF"),
        (lambda data: data[:-50], ModelLoadFailed, "truncated"),
    ],
)
def test_file_that_is_no_whole_model_leaves_nothing(
    tmp_path: Path, gguf: Path, content, error: type[ModeldError], words: str
) -> None:
    models = ModelStore(tmp_path / "root")
    gguf.write_bytes(content(gguf.read_bytes()))
    with pytest.raises(error, match=words):
        models.import_file(gguf)
    assert names_in(tmp_path) == [".lock"]


@pytest.mark.parametrize(
    ("copy", "mode", "words"),
    [(True, "ab", "grew"), (True, "r+b", "changed"), (False, "ab", "grew|changed")],
)
def test_file_that_changes_during_the_import_is_refused(
    models: ModelStore, gguf: Path, tmp_path: Path, copy: bool, mode: str, words: str
) -> None:
    def still_downloading(stage: str, done: int, total: int) -> None:
        if stage in ("copy", "hash"):
            with open(gguf, mode) as file:
                file.write(b"GGUF")

    with pytest.raises(InvalidRequest, match=words):
        models.import_file(gguf, copy=copy, progress=still_downloading)
    assert names_in(tmp_path) == [".lock"]


def test_import_ended_by_its_progress_callback_leaves_nothing(
    models: ModelStore, gguf: Path, tmp_path: Path
) -> None:
    class GoneAwayError(Exception):
        pass

    def gone(stage: str, done: int, total: int) -> None:
        if stage == "hash":
            raise GoneAwayError

    with pytest.raises(GoneAwayError):
        models.import_file(gguf, progress=gone)
    assert names_in(tmp_path) == [".lock"]


# --- full disks and crashes ------------------------------------------------------------------


def test_copy_that_would_not_fit_is_refused_before_it_begins(
    models: ModelStore, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=100, used=90, free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageFull, match="has 10 free: nothing was written"):
        models.import_file(gguf, copy=True)
    assert names_in(tmp_path) == [".lock"]


def test_disk_that_fills_up_during_a_copy_leaves_nothing(
    models: ModelStore, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageFull):
            models.import_file(gguf, copy=True)
    assert names_in(tmp_path) == [".lock"]
    models.import_file(gguf, copy=True)


KILLED = """
import os, signal, sys
from pathlib import Path
from modeld.supervisor.models import store
from modeld.supervisor.models.facts import inspect
models = store.ModelStore(Path(sys.argv[1]), read=inspect)
at = sys.argv[3]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
if at == "swap":
    real = Path.rename
    def rename(self, target):
        if ".incoming-" in self.name:
            die()
        return real(self, target)
    Path.rename = rename
models.import_file(
    Path(sys.argv[2]), "tiny", replace=True, copy=True,
    progress=lambda stage, *_: die() if stage == at else None,
)
"""


@pytest.mark.parametrize("at", ["copy", "swap"])
def test_killed_import_loses_nothing_and_is_swept(tmp_path: Path, gguf: Path, at: str) -> None:
    root = tmp_path / "root"
    before = ModelStore(root, read=inspect).import_file(gguf, copy=True)
    other = tiny_models.llama(tmp_path / "other.gguf", seed=9)
    done = subprocess.run([sys.executable, "-c", KILLED, root, other, at], check=False)
    assert done.returncode == -9
    assert len(names_in(tmp_path)) > 2 or at == "swap"
    after = ModelStore(root, read=inspect)
    assert after.get("tiny") == before
    assert names_in(tmp_path) == [".lock", "tiny"]


def test_sweeping_spares_an_import_that_is_under_way(tmp_path: Path, gguf: Path) -> None:
    root = tmp_path / "root"

    def another_starts(stage: str, done: int, total: int) -> None:
        if stage == "copy":
            ModelStore(root, read=inspect)

    assert ModelStore(root, read=inspect).import_file(gguf, copy=True, progress=another_starts)


@pytest.mark.parametrize("same", [True, False])
def test_of_two_imports_of_one_name_one_wins_cleanly(
    tmp_path: Path, gguf: Path, same: bool
) -> None:
    root = tmp_path / "root"
    models = ModelStore(root, read=inspect)
    other = tiny_models.llama(tmp_path / "other.gguf", seed=9)
    gate = threading.Barrier(2)
    results: list[object] = []

    def run(path: Path) -> None:
        def meet(stage: str, done: int, total: int) -> None:
            if stage == "copy" and done == total:
                gate.wait(30)

        try:
            results.append(models.import_file(path, "name", copy=True, progress=meet).digest)
        except InvalidRequest as error:
            results.append(error)

    threads = [threading.Thread(target=run, args=(p,)) for p in (gguf, gguf if same else other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [result for result in results if isinstance(result, str)]
    assert models.get("name").digest == won[0]
    if same:
        assert won[0] == won[1]
    else:
        assert len(won) == 1
        assert "isn't taken" in next(r.message for r in results if isinstance(r, InvalidRequest))
    assert names_in(tmp_path) == [".lock", "name"]


# --- getting ---------------------------------------------------------------------------------


def test_linked_file_changed_in_place_is_noticed(models: ModelStore, gguf: Path) -> None:
    models.import_file(gguf)
    data = bytearray(gguf.read_bytes())
    data[-1] ^= 1
    gguf.write_bytes(data)
    with pytest.raises(DigestMismatch, match=r"shares its blocks.*Import it again, with replace"):
        models.get("tiny")
    with pytest.raises(DigestMismatch, match="SHA-256"):
        models.rehash("tiny")
    assert models.import_file(gguf, "tiny", replace=True).digest == digest_of(gguf)
    models.get("tiny")


def test_restored_backup_is_accepted_after_hashing_it_again(models: ModelStore, gguf: Path) -> None:
    model = models.import_file(gguf, copy=True)
    os.utime(model.path, ns=(1, 1))
    with pytest.raises(DigestMismatch):
        models.get("tiny")
    assert models.rehash("tiny").digest == model.digest
    assert models.get("tiny").record.mtime_ns == 1


def test_missing_name_lists_near_ones(models: ModelStore, gguf: Path) -> None:
    with pytest.raises(ModelNotFound, match="The store is empty"):
        models.get("tiny")
    models.import_file(gguf, "smollm2-135m")
    with pytest.raises(ModelNotFound, match="Did you mean 'smollm2-135m'"):
        models.get("smollm-135m")
    with pytest.raises(ModelNotFound, match="The store holds: smollm2-135m"):
        models.get("zzz")


@pytest.mark.parametrize("name", ["../x", "/etc", "a/b", ".lock", "", "a\n", "x" * 129])
def test_names_are_never_paths(models: ModelStore, name: str) -> None:
    for call in (models.get, models.remove):
        with pytest.raises(InvalidRequest):
            call(name)


def test_links_out_of_the_store_are_not_followed(
    models: ModelStore, gguf: Path, tmp_path: Path
) -> None:
    model = models.import_file(gguf, copy=True)
    outside = tmp_path / "outside"
    shutil.copytree(model.path.parent, outside)
    (tmp_path / "root" / "models" / "alias").symlink_to(outside)
    with pytest.raises(ModelNotFound):
        models.get("alias")
    model.path.unlink()
    model.path.symlink_to(outside / "model.gguf")
    with pytest.raises(DigestMismatch, match="not a regular file"):
        models.get("tiny")


def test_broken_record_is_said_and_hides_no_other_model(models: ModelStore, gguf: Path) -> None:
    models.import_file(gguf, "good")
    broken = models.import_file(gguf, "broken")
    broken.path.with_name("model.json").write_text('{"name"')
    assert [model.name for model in models.list()] == ["good"]
    with pytest.raises(ModelLoadFailed, match="Import its file again, with replace"):
        models.get("broken")
    assert models.import_file(gguf, "broken", replace=True).name == "broken"


def test_remove_frees_what_is_not_shared(models: ModelStore, gguf: Path, tmp_path: Path) -> None:
    size = gguf.stat().st_size
    models.import_file(gguf, "linked")
    models.import_file(gguf, "copied", copy=True)
    stats = models.disk_stats()
    assert stats.models_bytes >= 2 * size
    assert stats.total_bytes >= stats.free_bytes > 0
    assert models.remove("linked") == 0
    assert models.remove("copied") == size
    assert gguf.exists()
    assert names_in(tmp_path) == [".lock"]
    with pytest.raises(ModelNotFound):
        models.remove("linked")


# --- names and facts -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("foo bar.gguf", "foo-bar"),
        ("_x(1).gguf", "x-1"),
        ("Qwen2.5-0.5B.Q4.gguf", "Qwen2.5-0.5B.Q4"),
    ],
)
def test_names_come_from_file_names(file: str, name: str) -> None:
    assert derive_name(Path("/d") / file) == name


@given(st.text(min_size=1).filter(lambda text: "/" not in text and "\0" not in text))
def test_every_file_name_gives_a_valid_name_or_a_clear_refusal(text: str) -> None:
    if any(letter.isascii() and letter.isalnum() for letter in text):
        assert MODEL_NAME.match(derive_name(Path("/d") / f"{text}.gguf"))
    else:
        with pytest.raises(InvalidRequest, match="give the model a name"):
            derive_name(Path("/d") / f"{text}.gguf")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.abort()", "signal SIGABRT"),
        ("raise SystemExit(3)", "exit code 3"),
        ("print('nonsense')", "no usable answer"),
        ("print('{}')", "gave no answer"),
        ("import time; time.sleep(60)", "longer than 0.5 s"),
    ],
)
def test_reader_that_fails_in_any_way_is_a_typed_error(
    gguf: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    monkeypatch.setattr(facts, "_command", lambda *_: [sys.executable, "-c", code])
    with pytest.raises(ModelLoadFailed, match=words):
        read_facts(gguf, timeout_s=0.5 if "sleep" in code else 30)


def test_reader_runs_under_limits(tmp_path: Path) -> None:
    code = (
        "import resource as r; from modeld.supervisor.models import facts; facts._limit_self();"
        "print([r.getrlimit(x)[0] for x in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_CORE)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([facts.ADDRESS_SPACE_BYTES, facts.CPU_SECONDS, 0])
