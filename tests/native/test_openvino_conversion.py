"""GGUF files converted for OpenVINO: once, whole, and the same model; or a typed error and nothing.

Every conversion is the product's own, in its disposable process.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import openvino
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from modeld.shared.capacity import ModelFacts
from modeld.shared.converting import ConvertLine, ConvertRequest
from modeld.shared.errors import (
    BackendMismatch,
    DigestMismatch,
    ModeldError,
    ModelLoadFailed,
    StorageFull,
    UnsupportedFeature,
    from_wire,
)
from modeld.shared.ir_facts import ir_facts
from modeld.shared.ir_texts import ir_texts
from modeld.supervisor.models import conversion
from modeld.supervisor.models.facts import inspect
from modeld.supervisor.models.records import StoredModel
from modeld.supervisor.models.store import ModelStore
from modeld.workers.openvino.offsets import _of_q4_1, _of_q4_k
from tests.support.daemon import eventually
from tests.support.openvino_models import tiny_gguf
from tests.support.quantized_models import BLOCKS, Q4_1, Q4_K, quantized
from tests.support.reference import Reference

TEXTS = ("The capital of France is", "The quick brown fox jumps over the lazy")


async def quiet(stage: str, fraction: float) -> None:
    pass


def ensure(models: ModelStore, model: StoredModel) -> Path:
    return asyncio.run(models.conversions.ensure(model, quiet))


def refused(models: ModelStore, model: StoredModel) -> ModeldError:
    with pytest.raises(ModeldError) as caught:
        ensure(models, model)
    return caught.value


def converted_in(root: Path) -> list[str]:
    folder = root / "converted"
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, gguf: Path) -> tuple[Path, str]:
    """A data root with a model that was imported and converted, which tests copy."""
    root = tmp_path_factory.mktemp("done")
    models = ModelStore(root, read=inspect)
    return root, ensure(models, models.import_file(gguf, "tiny", "openvino")).name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def models(root: Path) -> ModelStore:
    return ModelStore(root, read=inspect)


@pytest.fixture
def model(models: ModelStore, gguf: Path) -> StoredModel:
    return models.import_file(gguf, "tiny", "openvino")


@pytest.fixture
def again(root: Path, done: tuple[Path, str]) -> ModelStore:
    """A store of its own where the model is converted already."""
    shutil.copytree(done[0], root)
    models = ModelStore(root, read=inspect)
    models.rehash("tiny")  # a copy has inodes of its own
    return models


# --- what comes out --------------------------------------------------------------------------


def logits(folder: Path, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Of the last token, from the converted model itself."""
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", settings)
    run = compiled.create_infer_request()
    run.infer(
        {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    return np.array(run.get_output_tensor(0).data[0, -1], np.float32)


def test_a_converted_model_computes_what_its_gguf_does(done: tuple[Path, str], gguf: Path) -> None:
    root, name = done
    ids = list(range(4, 84, 3))
    ours = logits(root / "converted" / name, ids)
    reference = Reference(gguf)
    try:
        theirs = reference.logits([ids])
    finally:
        reference.close()
    assert np.abs(ours - theirs).max() < 0.02 * np.ptp(theirs)
    assert ours.argmax() == theirs.argmax()


@pytest.mark.parametrize("kind", [Q4_1, Q4_K])
def test_four_bit_weights_keep_their_offsets(
    models: ModelStore, tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    """The converter alone rounds them: another model, at a cosine of 0.97 to 0.99."""
    gguf = quantized(tmp_path / "tiny.gguf", kind)
    folder = ensure(models, models.import_file(gguf, model_type="openvino"))
    ids = list(range(4, 84, 3))
    ours = logits(folder, ids)
    reference = Reference(gguf)
    try:
        theirs = reference.logits([ids])  # which rounds what it multiplies with to eight bits
    finally:
        reference.close()
    assert cosine(ours, theirs) > 0.999


@pytest.mark.parametrize(("kind", "parse"), [(Q4_1, _of_q4_1), (Q4_K, _of_q4_k)])
def test_scales_and_offsets_are_read_as_the_format_has_them(
    kind: GGMLQuantizationType, parse: Callable[[Any], Any]
) -> None:
    raw = BLOCKS[kind](20, 1.0, np.random.default_rng(3))
    groups = parse(raw)
    scales, offsets = groups.scales.reshape(-1, 1), groups.offsets.reshape(-1, 1)
    weights = dequantize(raw, kind).reshape(-1, 32)
    steps = (weights + offsets) / scales
    assert np.abs(steps - steps.round()).max() < 1e-2
    assert (steps.round().min(), steps.round().max()) == (0, 15)


def cosine(one: Any, other: Any) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_a_conversion_holds_what_planner_and_worker_need(
    done: tuple[Path, str], gguf: Path
) -> None:
    folder = done[0] / "converted" / done[1]
    ours, theirs = ir_facts(folder), inspect(gguf, "openvino")
    same = (
        *("architecture", "layers", "heads", "embedding_length", "feed_forward_length"),
        *("model_max", "vocabulary", "has_template", "template_digest", "add_bos", "model_type"),
    )
    assert picked(ours, same) == picked(theirs, same)
    assert not list(folder.glob("*.gguf"))
    tokens = json.loads((folder / "modeld_tokenizer.json").read_text())
    assert (tokens["pre"], tokens["model"], tokens["eog"]) == ("smollm", "gpt2", [0, 2])
    assert tokens["controls"] == {
        "<|endoftext|>": 0,
        "<|im_start|>": 1,
        "<|im_end|>": 2,
        "<unk>": 3,
    }
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [0, 2]}


def picked(facts: ModelFacts, names: tuple[str, ...]) -> list[object]:
    return [getattr(facts, name) for name in names]


def test_a_real_model_keeps_its_texts_and_the_ends_of_its_answers(
    models: ModelStore, demo_model: Path
) -> None:
    model = models.import_file(demo_model, "smol", "openvino")
    told: list[tuple[str, float]] = []

    async def report(stage: str, fraction: float) -> None:
        told.append((stage, fraction))

    folder = asyncio.run(models.conversions.ensure(model, report))
    assert told[0] == ("converting", 0.0)
    assert {stage for stage, _ in told} == {"converting"}
    assert [fraction for _, fraction in told] == sorted({fraction for _, fraction in told})
    assert ir_texts(folder).digest == model.facts.template_digest
    reference = Reference(demo_model)
    try:
        for text in TEXTS:
            ids = reference.encode(text)
            ours, theirs = logits(folder, ids), reference.logits([ids])
            assert ours.argmax() == theirs.argmax()
            assert cosine(ours, theirs) > 0.99
        ends, controls = reference.end_of_generation, reference.engine.tokenizer.controls
    finally:
        reference.close()
    tokens = json.loads((folder / "modeld_tokenizer.json").read_text())
    assert frozenset(tokens["eog"]) == ends
    assert tokens["controls"] == dict(controls)


# --- once ------------------------------------------------------------------------------------


def test_a_model_is_converted_once(again: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_command", lambda: [sys.executable, "-c", "raise SystemExit"])
    assert ensure(again, again.get("tiny")).is_dir()


def test_callers_that_ask_at_once_share_one_conversion(
    models: ModelStore, model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, command = [0], conversion._command

    def counted() -> list[str]:
        started[0] += 1
        return command()

    monkeypatch.setattr(conversion, "_command", counted)

    async def both() -> list[Path]:
        one = models.conversions.ensure(model, quiet)
        other = models.conversions.ensure(model, quiet)
        return list(await asyncio.gather(one, other))

    paths = asyncio.run(both())
    assert paths[0] == paths[1]
    assert started == [1]


def test_a_file_of_a_conversion_that_was_touched_is_made_again(
    again: ModelStore, root: Path
) -> None:
    folder = ensure(again, again.get("tiny"))
    with (folder / "openvino_model.bin").open("r+b") as file:
        file.truncate(1000)
    assert ensure(again, again.get("tiny")) == folder
    assert (folder / "openvino_model.bin").stat().st_size > 1000
    assert converted_in(root) == [".lock", folder.name]


def test_another_version_of_the_engine_converts_anew_and_the_older_is_removed(
    again: ModelStore, root: Path, done: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert converted_in(root) == [".lock", done[1]]
    monkeypatch.setattr(conversion, "_engine", lambda: "9999.0")
    digest = again.get("tiny").digest
    assert ensure(again, again.get("tiny")).name == f"{digest}-9999.0"
    assert converted_in(root) == [".lock", f"{digest}-9999.0"]


def test_what_no_model_needs_any_more_is_removed(again: ModelStore, root: Path, gguf: Path) -> None:
    taken = again.conversions.total_bytes()
    assert again.disk_stats().models_bytes > taken > 0
    again.import_file(gguf, "other", "openvino")
    again.import_file(gguf, "llama-too", "llama")
    assert again.remove("tiny") < taken
    assert len(converted_in(root)) == 2
    assert again.remove("other") == taken
    assert converted_in(root) == [".lock"]


def test_a_start_removes_conversions_of_models_that_are_gone(again: ModelStore, root: Path) -> None:
    (root / "converted" / ".incoming-abc").mkdir()
    shutil.rmtree(root / "models" / "tiny")
    ModelStore(root, read=inspect)
    assert converted_in(root) == [".lock"]


def test_models_that_need_none_are_answered_as_they_are(models: ModelStore, gguf: Path) -> None:
    llama = models.import_file(gguf)
    assert ensure(models, llama) == llama.path


# --- what goes wrong -------------------------------------------------------------------------


KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (KILLED, "signal SIGKILL"),
        ("import sys; print('Segmentation', file=sys.stderr); sys.exit(3)", "exit code 3: Segment"),
        ("print('nonsense')", "exit code 0"),
        ("print('{\"done\": true}')", "the model is missing"),
    ],
)
def test_a_converter_that_fails_in_any_way_is_a_typed_error_and_leaves_nothing(
    models: ModelStore,
    model: StoredModel,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    words: str,
) -> None:
    monkeypatch.setattr(conversion, "_command", lambda: [sys.executable, "-c", code])
    error = refused(models, model)
    assert isinstance(error, ModelLoadFailed)
    assert words in error.message
    assert converted_in(root) == [".lock"]


def test_a_converter_that_hangs_is_ended(
    models: ModelStore, model: StoredModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(conversion, "_command", lambda: hang)
    models.conversions = conversion.Conversions(root, timeout_s=0.5)
    assert "longer than 0.5 s" in refused(models, model).message
    assert converted_in(root) == [".lock"]


def process_at_work(models: ModelStore) -> Any:
    """The converter's process, once the engine is at it."""
    for job in models.conversions._jobs.values():
        if job.process is not None and job.fraction > 0:
            return job.process
    return None


def test_a_converter_killed_midway_leaves_nothing_and_the_next_succeeds(
    models: ModelStore, model: StoredModel, root: Path
) -> None:
    async def killed() -> None:
        waiting = asyncio.create_task(models.conversions.ensure(model, quiet))
        process = await asyncio.to_thread(eventually, lambda: process_at_work(models))
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ModelLoadFailed, match="signal SIGKILL"):
            await waiting

    asyncio.run(killed())
    assert converted_in(root) == [".lock"]
    assert ensure(models, model).is_dir()


def test_a_conversion_ends_with_the_last_who_waits_for_it(
    models: ModelStore, model: StoredModel, root: Path
) -> None:
    async def gone() -> int:
        waiting = [asyncio.create_task(models.conversions.ensure(model, quiet)) for _ in range(2)]
        process = await asyncio.to_thread(eventually, lambda: process_at_work(models))
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        assert process.poll() is None  # another waits still
        waiting[1].cancel()
        await asyncio.wait(waiting)
        return int(await asyncio.to_thread(process.wait))

    assert asyncio.run(gone()) == -signal.SIGKILL
    assert converted_in(root) == [".lock"]


CALLER = """
import asyncio, sys
from pathlib import Path
from modeld.supervisor.models.facts import inspect
from modeld.supervisor.models.store import ModelStore
models = ModelStore(Path(sys.argv[1]), read=inspect)
async def report(stage, fraction):
    pids = [j.process.pid for j in models.conversions._jobs.values() if j.process]
    if fraction > 0:
        print(*pids, flush=True)
asyncio.run(models.conversions.ensure(models.get("tiny"), report))
"""


def test_a_converter_does_not_outlive_its_caller(
    models: ModelStore, model: StoredModel, root: Path
) -> None:
    async def killed() -> int:
        caller = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CALLER, str(root), stdout=asyncio.subprocess.PIPE
        )
        assert caller.stdout is not None
        pid = int(await caller.stdout.readline())
        caller.kill()
        await caller.wait()
        return pid

    pid = asyncio.run(killed())
    status = Path(f"/proc/{pid}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()
    assert [name for name in converted_in(root) if name.startswith(".incoming-")]
    ModelStore(root, read=inspect)
    assert converted_in(root) == [".lock"]


def test_without_the_converter_installed_it_is_said(
    models: ModelStore, model: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "PACKAGE", "openvino-genai-of-no-such-name")
    error = refused(models, model)
    assert isinstance(error, BackendMismatch)
    assert "install modeld[openvino]" in error.message


def test_a_file_that_changed_is_not_converted(
    models: ModelStore, tmp_path: Path, root: Path
) -> None:
    source = tiny_gguf(tmp_path / "mine.gguf", seed=3)
    model = models.import_file(source, model_type="openvino")
    os.utime(source, ns=(1, 1))
    assert isinstance(refused(models, model), DigestMismatch)
    assert converted_in(root) == []


# --- full disks ------------------------------------------------------------------------------


def test_a_conversion_that_would_not_fit_is_refused_before_it_begins(
    models: ModelStore, model: StoredModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=100, used=90, free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    error = refused(models, model)
    assert isinstance(error, StorageFull)
    assert "has 10 free: nothing was written" in error.message
    assert converted_in(root) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    models: ModelStore, model: StoredModel, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(conversion, "_synced", full)
    assert isinstance(refused(models, model), StorageFull)
    assert converted_in(root) == [".lock"]


# As a full disk does to the engine: it writes no further, and need not say so.
SHORT = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
runpy.run_module("modeld.workers.openvino.convert", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("most", [100, 100_000, 1_000_000])
def test_files_that_stay_short_are_never_taken_for_a_conversion(
    models: ModelStore,
    model: StoredModel,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
) -> None:
    short = [sys.executable, "-P", "-c", SHORT, str(most)]
    monkeypatch.setattr(conversion, "_command", lambda: short)
    assert isinstance(refused(models, model), ModelLoadFailed | StorageFull)
    assert converted_in(root) == [".lock"]


# --- damaged files ---------------------------------------------------------------------------


def damaged(seed: int, whole: bytes) -> bytes:
    """A few bits of the header flipped."""
    random_ = random.Random(seed)
    content = bytearray(whole)
    for _ in range(random_.randrange(1, 4)):
        content[random_.randrange(6000)] ^= 1 << random_.randrange(8)
    return bytes(content)


def test_a_damaged_header_never_brings_down_the_caller(
    models: ModelStore, gguf: Path, tmp_path: Path
) -> None:
    whole, path = gguf.read_bytes(), tmp_path / "damaged.gguf"
    let_through: list[StoredModel] = []
    refusals = 0
    for seed in range(400):
        path = tmp_path / f"damaged-{seed}.gguf"
        path.write_bytes(damaged(seed, whole))
        try:
            let_through.append(models.import_file(path, model_type="openvino"))
        except (ModelLoadFailed, UnsupportedFeature):
            refusals += 1
            path.unlink()
    assert refusals > 100
    # What is left differs in its texts: a few are converted, and none but works or is refused.
    for model in let_through[:4]:
        with contextlib.suppress(ModelLoadFailed):
            assert ensure(models, model).is_dir()


def test_truncated_files_are_refused_by_the_converter_too(gguf: Path, tmp_path: Path) -> None:
    """Were one ever to reach it."""
    path, work = tmp_path / "short.gguf", tmp_path / "work"
    work.mkdir()
    path.write_bytes(gguf.read_bytes()[:-100])
    request = ConvertRequest(source=str(path), folder=str(work))
    lines = asyncio.run(asked(msgspec.json.encode(request) + b"\n"))
    error = lines[-1].error
    assert error is not None
    assert "truncated" in from_wire(**error).message
    assert not list(work.iterdir())


@pytest.mark.parametrize("request_", [b"", b"{}\n", b"[" * 1000 + b"\n", b'{"source": "x"'])
def test_requests_that_are_none_are_answered_with_an_error(request_: bytes) -> None:
    lines = asyncio.run(asked(request_))
    assert lines[-1].error is not None


async def asked(request: bytes) -> list[ConvertLine]:
    process = await asyncio.create_subprocess_exec(
        *conversion._command(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request)
    if not request.endswith(b"\n"):
        process.stdin.close()
    lines = [msgspec.json.decode(line, type=ConvertLine) async for line in process.stdout]
    assert await process.wait() == 0
    return lines
