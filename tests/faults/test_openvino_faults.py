"""What is wrong with an OpenVINO model or asked of it wrongly, through client and command.

Each ends in a typed error that says what to do, and the daemon then serves a good model as before.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from modeld.cli.exit_codes import Exit
from modeld.client import Client, Session
from modeld.shared.errors import (
    ContextOverflow,
    DigestMismatch,
    InvalidRequest,
    ModelBusy,
    ModeldError,
    ModelLoadFailed,
    UnsupportedFeature,
)
from tests.support import tiny_models
from tests.support.daemon import Background, eventually
from tests.support.faulting import DataRoot, caught, data_root, modeld, slot, until_state
from tests.support.openvino_models import tiny_gguf, tiny_ir
from tests.support.product import ask

MODEL, TOKENIZER, DETOKENIZER = (
    f"openvino_{part}" for part in ("model", "tokenizer", "detokenizer")
)
GOOD = "good"
LARGE = 1_000_000


@dataclass(frozen=True)
class Files:
    gguf: Path
    folder: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A tiny model as a GGUF file and as a folder."""
    made = tmp_path_factory.mktemp("files")
    return Files(tiny_gguf(made / "tiny.gguf"), tiny_ir(made / "ir"))


@pytest.fixture(scope="module")
def served(files: Files) -> Iterator[DataRoot]:
    with data_root(files.gguf, backend="openvino") as root:
        root.start().client().close()
        yield root


@pytest.fixture(scope="module")
def client(served: DataRoot, files: Files) -> Iterator[Client]:
    with served.daemons[0].client() as connected:
        connected.import_model(files.gguf, name=GOOD, model_type="openvino")
        until_state(connected, "IDLE")
        yield connected


@pytest.fixture(scope="module")
def answer(client: Client) -> list[int]:
    return good_answer(client)


def raw(client: Client, name: str = GOOD, **options: object) -> Session:
    return client.open_session(name, window=256, prompt_format="raw", **options)  # type: ignore[arg-type]


def good_answer(client: Client) -> list[int]:
    with raw(client) as session:
        return ask(session, "One, two,", " three,").ids


@pytest.fixture(autouse=True)
def _still_serves(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, the good model answers as before, by the same worker."""
    if "client" not in request.fixturenames:
        yield
        return
    client: Client = request.getfixturevalue("client")
    right: list[int] = request.getfixturevalue("answer")
    before = slot(client).worker
    yield
    client.unload_model(force=True)
    assert good_answer(client) == right
    after = slot(client).worker
    assert (after.pid, after.restarts) == (before.pid, before.restarts)


# --- files that are damaged --------------------------------------------------------------------


def cut(name: str, left: Callable[[int], int]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(left((folder / name).stat().st_size))

    return change


def edited(name: str, pattern: str, new: str, count: int = 1) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text, done = re.subn(pattern, new, (folder / name).read_text(), count=count)
        assert done, f"{pattern} isn't in {name}"
        (folder / name).write_text(text)

    return change


def filled(name: str, value: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        size = (folder / name).stat().st_size
        (folder / name).write_bytes(bytes([value]) * size)

    return change


def without(stem: str) -> Callable[[Path], None]:
    return lambda folder: (folder / f"{stem}.xml").unlink()


def swapped(folder: Path) -> None:
    for end in ("xml", "bin"):
        shutil.copy(folder / f"{MODEL}.{end}", folder / f"{TOKENIZER}.{end}")


WEIGHT = r'element_type="f16" shape="(\d+), (\d+)"'
AT_IMPORT = {
    "a byte of weights missing": (cut(f"{MODEL}.bin", lambda n: n - 1), "it is truncated"),
    "half the weights": (cut(f"{MODEL}.bin", lambda n: n // 2), "it is truncated"),
    "half the graph": (cut(f"{MODEL}.xml", lambda n: n // 2), "not well-formed XML"),
    "a constant outside": (
        edited(f"{MODEL}.xml", r'offset="\d+"', 'offset="99999999"'),
        "it is truncated",
    ),
    "no tokenizer": (without(TOKENIZER), "the tokenizer is missing"),
    "no detokenizer": (without(DETOKENIZER), "the detokenizer is missing"),
}
AT_LOAD = {
    "a weight said to be larger": (
        edited(f"{MODEL}.xml", WEIGHT, r'element_type="f16" shape="\1, 6\2"'),
        "can't read openvino_model.xml",
    ),
    "a weight said to be smaller": (
        edited(f"{MODEL}.xml", WEIGHT, r'element_type="f16" shape="\1, 2"'),
        "can't read openvino_model.xml",
    ),
    "an edge from nowhere": (
        edited(f"{MODEL}.xml", '<edge from-layer="', '<edge from-layer="9'),
        "can't read openvino_model.xml",
    ),
    "an unknown operation": (
        edited(f"{MODEL}.xml", 'type="MatMul"', 'type="MatMax"', 0),
        "can't read openvino_model.xml",
    ),
    "constants of noise": (filled(f"{MODEL}.bin", 255), "can't read openvino_model.xml"),
    "a tokenizer of noise": (filled(f"{TOKENIZER}.bin", 255), "tokenizer can't be used"),
    "a detokenizer of noise": (filled(f"{DETOKENIZER}.bin", 255), "points outside"),
    "a tokenizer that is none": (swapped, "0 tokenizing steps"),
}


def damaged(files: Files, tmp_path: Path, change: Callable[[Path], None]) -> Path:
    folder = tmp_path / "bad"
    shutil.copytree(files.folder, folder)
    change(folder)
    return folder


@pytest.mark.parametrize(("change", "words"), AT_IMPORT.values(), ids=AT_IMPORT.keys())
def test_a_folder_that_is_not_whole_is_refused_at_its_import(
    client: Client, files: Files, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    before = client.models()
    with pytest.raises(ModelLoadFailed, match=words) as refused:
        client.import_model(damaged(files, tmp_path, change))
    assert re.search("(Export|Fetch|fetch|writes)", refused.value.message)
    assert client.models() == before


@pytest.mark.parametrize(("change", "words"), AT_LOAD.values(), ids=AT_LOAD.keys())
def test_a_folder_that_computes_nothing_is_refused_at_its_first_load_and_not_tried_again(
    client: Client, files: Files, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    client.import_model(damaged(files, tmp_path, change), name="bad", replace=True)
    generation = client.status().generation
    for _ in range(2):
        error = caught(ModelLoadFailed, lambda: raw(client, "bad"))
        assert words in error.message
        assert ".." not in error.message
        assert re.search("(Export|Convert|Fetch)", error.message)
    assert client.status().generation == generation
    assert slot(client).state.value in ("SLOT_EMPTY", "SLOT_READY")  # as it was before
    client.remove_model("bad")


def test_the_command_says_the_same(
    served: DataRoot, client: Client, files: Files, tmp_path: Path
) -> None:
    change, words = AT_IMPORT["half the weights"]
    folder = damaged(files, tmp_path, change)
    told = modeld(served.path, "models", "import", str(folder), code=Exit.WORKER)
    assert "MODEL_LOAD_FAILED" in told
    assert words in told
    assert "Export or fetch the model again" in told
    shutil.rmtree(folder)
    change, words = AT_LOAD["a weight said to be larger"]
    folder = damaged(files, tmp_path, change)
    modeld(served.path, "models", "import", "--name", "bad", str(folder), code=Exit.OK)
    told = modeld(served.path, "run", "bad", "Hello.", code=Exit.WORKER)
    assert "MODEL_LOAD_FAILED" in told
    assert words in told
    assert "Export or convert the model again" in told
    client.remove_model("bad")


# --- GGUF files --------------------------------------------------------------------------------


def test_a_gguf_file_that_is_cut_is_refused_at_its_import(
    served: DataRoot, client: Client, files: Files, tmp_path: Path
) -> None:
    whole = files.gguf.read_bytes()
    before = client.models()
    for left in (len(whole) - 1, len(whole) // 2, 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:left])
        told = modeld(
            served.path, "models", "import", "--type", "openvino", str(tmp_path / "cut.gguf"),
            code=Exit.WORKER,
        )  # fmt: skip
        assert "MODEL_LOAD_FAILED" in told
        assert "Fetch or convert the file again" in told
    assert client.models() == before


def test_an_architecture_that_is_not_converted_is_refused_with_what_to_use(
    client: Client, tmp_path: Path
) -> None:
    gguf = tiny_models.llama(tmp_path / "other.gguf")
    content = gguf.read_bytes()
    gguf.write_bytes(content.replace(b"llama", b"lliam"))
    error = caught(
        ModeldError, lambda: client.import_model(gguf, name="other", model_type="openvino")
    )
    assert isinstance(error, (UnsupportedFeature, ModelLoadFailed))
    assert "lliam" in error.message
    assert "llama" in error.message


# --- files that change -------------------------------------------------------------------------


def test_a_folder_swapped_after_its_import_is_not_loaded(
    served: DataRoot, client: Client, files: Files
) -> None:
    client.import_model(files.folder, name="swapped", copy=True, replace=True)
    with raw(client, "swapped") as session:
        session.ensure_prefix("One")
    client.unload_model(force=True)
    weights = served.path / "models" / "swapped" / "ir" / f"{MODEL}.bin"
    filled(weights.name, 0)(weights.parent)
    error = caught(DigestMismatch, lambda: raw(client, "swapped"))
    assert "with replace" in error.message
    client.import_model(files.folder, name="swapped", copy=True, replace=True)
    with raw(client, "swapped") as session:
        session.ensure_prefix("One")
    client.unload_model(force=True)
    client.remove_model("swapped")


def test_a_conversion_that_was_changed_is_made_again(
    served: DataRoot, client: Client, answer: list[int]
) -> None:
    client.unload_model(force=True)
    (weights,) = (served.path / "converted").glob(f"*/{MODEL}.bin")
    filled(weights.name, 0)(weights.parent)
    assert good_answer(client) == answer


# --- calls -------------------------------------------------------------------------------------


def over_long(client: Client, session: Session) -> object:
    return session.ensure_prefix("word " * 300)


def bias_outside(client: Client, session: Session) -> object:
    return ask(session, "One", " two", logit_bias={LARGE: 1.0})


def bias_below(client: Client, session: Session) -> object:
    return ask(session, "One", " two", logit_bias={-1: 1.0})


def ids_outside(client: Client, session: Session) -> object:
    return client.detokenize(GOOD, [1, LARGE])


def ids_below(client: Client, session: Session) -> object:
    return client.detokenize(GOOD, [-1])


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (over_long, ContextOverflow, "256"),
        (bias_outside, InvalidRequest, str(LARGE)),
        (bias_below, InvalidRequest, "-1"),
        (ids_outside, InvalidRequest, str(LARGE)),
        (ids_below, InvalidRequest, "-1"),
    ],
    ids=["too long", "bias outside", "bias below", "ids outside", "ids below"],
)
def test_what_the_engine_would_swallow_never_reaches_it(
    client: Client,
    answer: list[int],
    call: Callable[[Client, Session], object],
    kind: type[ModeldError],
    words: str,
) -> None:
    with raw(client) as session:
        assert ask(session, "One, two,", " three,").ids == answer
        held = session.explain().resident
        assert words in caught(kind, lambda: call(client, session)).message
        assert session.explain().resident == held  # nothing was lost
        assert ask(session, "One, two,", " three,").ids == answer


def test_two_callers_at_once_take_turns(client: Client, answer: list[int]) -> None:
    def asked(session: Session) -> Background:
        return Background(lambda: ask(session, "One, two,", " three,").ids)

    with raw(client) as one, raw(client) as another:
        calls = [asked(one), asked(another)]
        assert [call.result() for call in calls] == [answer, answer]


def test_who_would_not_wait_is_told_who_holds_the_model(files: Files) -> None:
    with data_root(files.gguf, backend="openvino") as root:
        daemon = root.start(faults="decode:slow=0.02")
        with daemon.client() as client:
            one, another = raw(client, "smol"), raw(client, "smol")
            running = Background(lambda: ask(one, "One", " two", max_tokens=50, ignore_eos=True))
            eventually(lambda: slot(client).holder_operation == "turn")
            error = caught(ModelBusy, lambda: another.ensure_prefix("One", no_wait=True))
            assert error.metadata["holder_operation"] == "turn"
            assert len(running.result().ids) == 50


# --- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["GPU.9", "FOO"])
def test_a_device_that_is_not_there_is_named_with_the_setting_and_those_that_are(
    files: Files, device: str
) -> None:
    with data_root(files.gguf, backend="openvino") as root:
        daemon = root.start(openvino_device=device)
        with daemon.client() as client:
            pid = until_state(client, "IDLE").worker.pid
            error = caught(InvalidRequest, lambda: raw(client, "smol"))
            assert error.metadata["field"] == "openvino_device"
            assert device in error.message
            assert "CPU" in error.message
            told = modeld(root.path, "run", "smol", "Hello.", code=Exit.USAGE)
            assert "openvino_device" in told
            assert "OpenVINO says" in told
            assert slot(client).worker.pid == pid
        daemon.stop()
        # With a device that there is, the same data root serves.
        with root.start().client() as client, raw(client, "smol") as session:
            assert len(ask(session, "One, two,", " three,").ids) == 8
