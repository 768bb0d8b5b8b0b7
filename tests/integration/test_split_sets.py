"""A model that comes in several files is served as one, and answers as its single file does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny_models
from tests.support.daemon import running_daemon
from tests.support.product import ask

pytestmark = pytest.mark.real


def test_a_split_set_is_imported_planned_and_answers_as_the_whole_file(tmp_path: Path) -> None:
    first = tiny_models.llama(tmp_path / "parts.gguf", part_tensors=6)
    whole = tiny_models.llama(tmp_path / "whole.gguf")
    answers = {}
    with running_daemon() as daemon, daemon.client() as client:
        for name, path in (("parts", first), ("whole", whole)):
            client.import_model(path, name=name)
            described = client.describe(name, window=512)
            loader = next(
                question
                for question in described.questions
                if question.name == "loader_supports_architecture"
            )
            assert loader.answer == "yes", loader.evidence
            with client.open_session(name, window=512, prompt_format="raw") as session:
                assert not session.resolution.findings
                told = ask(session, "the thing in the", " end", max_tokens=16)
            answers[name] = (told.ids, described.resolution.kv_bytes, described.facts.weights_bytes)
            client.unload_model(force=True)
        parts = next(model for model in client.models() if model.name == "parts")
        assert parts.size_bytes == sum(
            part.stat().st_size for part in tmp_path.glob("parts-*.gguf")
        )
        assert client.describe("parts").facts.parts > 1
    assert answers["parts"] == answers["whole"]
