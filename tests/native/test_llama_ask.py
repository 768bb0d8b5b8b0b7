"""Asking the linked engine in a process of its own: costs as real contexts have them, refusals in
the engine's words, and an answer whatever is asked.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from modeld.shared.asking import WINDOWS, AskAnswer, AskRequest
from modeld.shared.messages import LoadOp
from modeld.workers.llama import ask, validate
from modeld.workers.llama.engine import LlamaEngine
from modeld.workers.llama.native import build
from tests.support import shapes, tiny_models

MIB = 1024 * 1024
COMMAND = [sys.executable, "-P", "-m", "modeld.workers.llama.ask"]


def run(raw: bytes, command: Sequence[str] = COMMAND) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, input=raw, capture_output=True, check=False)


def answer(path: Path | str = "", **more: object) -> AskAnswer:
    request = AskRequest(path=str(path), **more)  # type: ignore[arg-type]
    done = run(msgspec.json.encode(request))
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return msgspec.json.decode(done.stdout, type=AskAnswer)


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaEngine]:
    made = LlamaEngine()
    yield made
    made.unload()


def test_without_a_file_it_tells_the_build_and_its_devices() -> None:
    told = answer()
    assert told.loader == "unknown"
    assert (told.backend_version, told.build_digest) == (build().version, build().digest)
    cpu = next(device for device in told.devices if device.name == "CPU")
    assert cpu.kind == "cpu"
    assert told.points == []


@pytest.mark.real
@pytest.mark.parametrize("k_type", ["f16", "q8_0"])
def test_what_it_tells_of_a_real_model_is_what_real_contexts_cost(
    engine: LlamaEngine, demo_model: Path, k_type: str
) -> None:
    told = answer(demo_model, windows=[512, 4000, 8192], k_type=k_type, n_ubatch=256)
    assert (told.loader, told.words, told.generates, told.notes) == ("yes", "", "", [])
    load = LoadOp(path=str(demo_model), model="m", digest="", threads=1, n_ubatch=256)
    result = engine.load(load, lambda stage, fraction: None, lambda: False)
    assert told.traits == result.traits
    assert [point.cells for point in told.points] == [512, 4096, 8192]
    for point in told.points:
        context = engine.new_context(point.cells, k_type, "f16")
        assert (point.kv_bytes, point.compute_bytes) == (context.kv_bytes, context.compute_bytes)
        context.close()


Maker = Callable[[Path], Path]


@pytest.mark.parametrize("maker", [tiny_models.llama, tiny_models.gemma3, tiny_models.mamba])
def test_every_kind_of_memory_is_told_as_a_real_context_has_it(
    engine: LlamaEngine, tmp_path: Path, maker: Maker
) -> None:
    path = maker(tmp_path / "m.gguf")
    told = answer(path, windows=[256, 2048], n_ubatch=64)
    load = LoadOp(path=str(path), model="m", digest="", threads=1, n_ubatch=64)
    assert told.traits == engine.load(load, lambda stage, fraction: None, lambda: False).traits
    assert len(told.points) == 2
    for point in told.points:
        context = engine.new_context(point.cells, "f16", "f16")
        assert (point.kv_bytes, point.compute_bytes) == (context.kv_bytes, context.compute_bytes)
        assert point.kv_bytes > 0
        context.close()


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "gemma-3-4b", "falcon-h1-0.5b"])
def test_a_large_model_is_sized_without_its_weights(tmp_path: Path, shape: str) -> None:
    path = shapes.make(shape, tmp_path)
    told = answer(path, windows=list(WINDOWS))
    assert told.loader == "yes", told.words
    assert told.notes == []
    ceiling = told.traits["train_context"]
    assert [point.cells for point in told.points] == [w for w in WINDOWS if w <= ceiling]
    for before, after in zip(told.points, told.points[1:], strict=False):
        assert before.kv_bytes < after.kv_bytes
        assert before.compute_bytes < after.compute_bytes
    if shape == "llama-3.1-8b":
        assert told.points[4].cells == 4096
        assert told.points[4].kv_bytes == 512 * MIB
    assert bool(told.traits["hybrid"]) == (shape == "falcon-h1-0.5b")


def test_windows_beyond_the_ceiling_are_answered_for_the_ceiling_once(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m.gguf")
    told = answer(path, windows=[1 << 30, 300, 512, 4096, 256])
    assert [point.cells for point in told.points] == [256, 512, tiny_models.CONTEXT]


def test_a_context_the_engine_cannot_make_is_left_out_with_words(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m.gguf")  # heads of 16 elements
    told = answer(path, windows=[256], k_type="q8_0")
    assert told.loader == "yes"
    assert told.points == []
    assert len(told.notes) == 1
    assert "k_type='q8_0'" in told.notes[0]


def test_a_context_that_fails_in_the_engine_keeps_its_words(
    engine: LlamaEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Our own checks are taken away: what is left is the engine's refusal.
    monkeypatch.setattr(validate, "check_kv_types", lambda *_, **__: None)
    path = tiny_models.llama(tmp_path / "m.gguf", heads=2, kv_heads=1)
    told = ask.answer(AskRequest(path=str(path), windows=[256], v_type="q8_0"))
    assert told.points == []
    assert "256 cells: " in told.notes[0]
    assert "flash" in told.notes[0].lower()


def test_a_file_the_engine_does_not_know_is_refused_in_its_words(tmp_path: Path) -> None:
    told = answer(tiny_models.llama(tmp_path / "m.gguf", architecture="zorkformer"))
    assert told.loader == "no"
    assert "unknown model architecture: 'zorkformer'" in told.words


def test_a_file_that_a_load_would_refuse_is_refused_the_same_way(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-4096])
    told = answer(path, windows=[256])
    assert told.loader == "no"
    assert "truncated" in told.words
    assert answer(tmp_path / "none.gguf").loader == "no"


def test_an_embedding_model_loads_and_does_not_generate(tmp_path: Path) -> None:
    told = answer(shapes.make("bge-small", tmp_path), windows=[256])
    assert told.loader == "yes"
    assert "embedding model" in told.generates
    assert told.points == []


@pytest.mark.parametrize("raw", [b"", b"{", b'{"path": 7}', b'{"unknown": 1}', b"\xff" * 100])
def test_a_request_that_cannot_be_read_is_answered_all_the_same(raw: bytes) -> None:
    done = run(raw)
    assert done.returncode == 0
    told = msgspec.json.decode(done.stdout, type=AskAnswer)
    assert told.loader == "unknown"
    assert "request can't be read" in told.words


def test_numbers_the_engine_would_not_survive_never_reach_it(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "m.gguf")
    huge, none = {"windows": [256] * 1000}, {"windows": [256, 0]}
    for wrong in ({"n_batch": 0}, {"n_ubatch": 10**6}, huge, none):
        told = answer(path, **wrong)
        assert told.loader == "unknown"
        assert next(iter(wrong)) in told.words


def test_it_bounds_its_own_memory_time_and_core() -> None:
    code = (
        "import resource as r\n"
        "from modeld.workers.llama import ask\n"
        "ask._limit_self()\n"
        "print([r.getrlimit(x) for x in (r.RLIMIT_DATA, r.RLIMIT_CPU, r.RLIMIT_CORE)])\n"
        "try:\n    bytearray(4 << 30)\nexcept MemoryError:\n    print('bounded')\n"
    )
    done = run(b"", [sys.executable, "-P", "-c", code])
    assert done.returncode == 0, done.stderr
    limits, bounded = done.stdout.decode().splitlines()
    assert f"({ask.CPU_SECONDS}, {ask.CPU_SECONDS}), (0, 0)" in limits
    assert str(resource.RLIM_INFINITY) not in limits
    assert bounded == "bounded"


def test_what_the_engine_prints_never_mixes_with_the_answer() -> None:
    code = (
        "import os, sys\n"
        "from modeld.workers.llama import ask\n"
        "def noisy(request):\n"
        "    os.write(1, b'noise'); print('more')\n"
        "    return ask._unknown('x')\n"
        "ask.answer = noisy\n"
        "sys.exit(ask.main(['ask']))\n"
    )
    done = run(b"{}", ["env", "-u", "PYTHONUNBUFFERED", sys.executable, "-P", "-c", code])
    assert done.returncode == 0
    assert msgspec.json.decode(done.stdout, type=AskAnswer).words == "x"
    assert b"noise" in done.stderr
    assert b"more" in done.stderr
