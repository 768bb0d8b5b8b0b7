"""Asking OpenVINO in a process of its own: the sizes that contexts really have, devices in the
library's words, refusals as answers.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from modeld.shared.asking import AskAnswer, AskRequest
from modeld.shared.messages import LoadOp
from modeld.supervisor.asking import ask_engine
from modeld.workers.openvino.engine import OpenVinoEngine
from tests.support import openvino_models

MIB = 1 << 20
COMMAND = (sys.executable, "-P", "-m", "modeld.workers.openvino.ask")


def run(raw: bytes, command: Sequence[str] = COMMAND) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, input=raw, capture_output=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return openvino_models.tiny_ir(tmp_path_factory.mktemp("tiny"))


def test_it_loads_a_model_in_a_trial_and_tells_the_sizes_that_contexts_have(folder: Path) -> None:
    request = AskRequest(path=str(folder), windows=[100, 4096], k_type="u4", v_type="u4")
    told = ask_engine("openvino", request)
    assert (told.loader, told.words, told.generates, told.device) == ("yes", "", "", "")
    assert told.traits["layers"] == openvino_models.LAYERS
    assert 1 * MIB < told.copied_bytes < 200 * MIB
    engine = OpenVinoEngine()
    load = LoadOp(path=str(folder), model="m", digest="d", k_type="u4", v_type="u4")
    engine.load(load, lambda _stage, _fraction: None, lambda: False)
    try:
        assert told.points[0].cells == 128  # whole blocks of 32 tokens
        for point in told.points:
            context = engine.new_context(point.cells, "u4", "u4")
            assert (context.window, context.kv_bytes) == (point.cells, point.kv_bytes)
            context.close()
    finally:
        engine.unload()


@pytest.mark.parametrize(
    ("device", "words"), [("GPU", "OpenCL"), ("FOO", "not registered in the OpenVINO Runtime")]
)
def test_a_device_that_is_not_there_is_told_in_the_plugin_s_words(
    folder: Path, device: str, words: str
) -> None:
    told = ask_engine("openvino", AskRequest(path=str(folder), device=device))
    if device in {one.name for one in told.devices}:
        pytest.fail(f"this machine has a {device}: the test needs one that hasn't")
    assert words in told.device
    assert told.loader == "unknown"
    assert [one.name for one in told.devices] == ["CPU"]


def test_a_folder_that_is_no_model_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_text('<net name="x" version="11"></net>')
    (tmp_path / "openvino_model.bin").write_bytes(b"")
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}'
    )
    told = ask_engine("openvino", AskRequest(path=str(tmp_path)))
    assert told.loader == "no"
    assert "openvino" in told.words


def test_types_that_are_not_served_are_a_note_and_no_verdict(folder: Path) -> None:
    told = ask_engine("openvino", AskRequest(path=str(folder), k_type="bf16", v_type="bf16"))
    assert told.loader == "unknown"
    assert "f16, f32, u8, u4" in told.notes[0]


def test_a_gguf_file_is_judged_by_the_checks_before_its_conversion(tmp_path: Path) -> None:
    good = openvino_models.tiny_gguf(tmp_path / "good.gguf")
    told = ask_engine("openvino", AskRequest(path=str(good)))
    assert told.loader == "unknown"
    assert "can be converted" in told.words
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(good.read_bytes()[:-1000])
    assert ask_engine("openvino", AskRequest(path=str(cut))).loader == "no"


def test_it_answers_whatever_it_is_asked(tmp_path: Path) -> None:
    for raw in (b"", b"not json", b'{"path": 1}', b'{"nonsense": 1}'):
        done = run(raw)
        assert done.returncode == 0
        assert msgspec.json.decode(done.stdout, type=AskAnswer).loader == "unknown"
    assert run(b"", (*COMMAND, "more")).returncode == 2
