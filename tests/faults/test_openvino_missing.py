"""A machine without OpenVINO whose settings name it: llama models are served all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from modeld.client import WorkerUnavailable
from tests.support import openvino_models, tiny_models
from tests.support.daemon import RunningDaemon, eventually, running_daemon
from tests.support.product import ask


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """Its processes find a package of that name that fails as a missing one does."""
    folder = tmp_path_factory.mktemp("missing")
    (folder / "openvino.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'openvino'\", name='openvino')\n"
    )
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # this process must still find the real one
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
            running = stack.enter_context(running_daemon(backends="llama,openvino"))
        yield running


def test_the_other_backend_serves_and_status_and_the_error_say_what_is_missing(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    llama = tmp_path / "tiny.gguf"
    tiny_models.llama(llama)
    folder = openvino_models.tiny_ir(tmp_path / "ir")
    with daemon.client() as client:
        client.import_model(llama, name="tiny")
        client.import_model(folder, name="ir")

        def given_up() -> bool:
            slots = {slot.backend: slot for slot in client.status().slots}
            return slots["openvino"].worker.state == "FAILED"

        eventually(given_up)
        slots = {slot.backend: slot for slot in client.status().slots}
        assert "No module named 'openvino'" in slots["openvino"].worker.last_death
        assert slots["openvino"].worker.restarts == 0
        with pytest.raises(WorkerUnavailable) as refused:
            client.open_session("ir", timeout=60)
        assert "pip install 'modeld[openvino]'" in str(refused.value)
        assert refused.value.metadata["install"] == "pip install 'modeld[openvino]'"
        assert refused.value.metadata["backend"] == "openvino"
        with client.open_session("tiny", prompt_format="raw", window=512) as session:
            assert ask(session, "abc", "def", max_tokens=4).final.tokens == 4
        described = client.describe("ir")
        loader = next(q for q in described.questions if "loader" in q.name)
        assert loader.answer == "unknown"
        assert "openvino can't be imported" in loader.evidence
