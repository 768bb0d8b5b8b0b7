"""What the fault tests of the whole daemon share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.backends import LLAMA, Backend
from tests.support.faulting import ANSWER_TOKENS, QUESTION, DataRoot, data_root
from tests.support.reference import Reference


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    """llama, unless a test says that it runs on every engine (``faulting.on_every_backend``)."""
    chosen: Backend = getattr(request, "param", LLAMA)
    return chosen


@pytest.fixture(scope="session")
def engine_path(backend: Backend, request: pytest.FixtureRequest) -> Path:
    """What the backend's worker loads."""
    path: Path = request.getfixturevalue(backend.model)
    return path


@pytest.fixture(scope="session")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the daemons of earlier tests asked their engines about the model."""
    return tmp_path_factory.mktemp("asked") / "evidence"


@pytest.fixture
def root(
    backend: Backend, engine_path: Path, demo_model: Path, evidence: Path
) -> Iterator[DataRoot]:
    """A data root with the real small model in its store, and no daemon yet."""
    converted = None if backend is LLAMA else engine_path
    with data_root(
        demo_model, backend=backend.name, converted=converted, evidence=evidence
    ) as made:
        yield made


@pytest.fixture(scope="session")
def right_answer(backend: Backend, engine_path: Path) -> list[int]:
    """What the engine alone answers to ``QUESTION``."""
    reference = Reference(engine_path, backend=backend)
    prompt = reference.encode("".join(QUESTION))
    ids = reference.greedy(prompt, ANSWER_TOKENS, window=1024)
    reference.close()
    return ids
