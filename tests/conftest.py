"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.backends import converted_root

# A change must not fail for a case that another run would find: CI looks at the same cases always.
settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The small real model: ``MODELD_TEST_MODEL``, or what `make test` fetches."""
    given = os.environ.get("MODELD_TEST_MODEL")
    path = Path(given) if given else Path(__file__).parents[1] / ".data" / "test" / MODEL_FILE
    if not path.is_file():
        pytest.fail(
            f"{path} is not there. Run `make test`, which fetches the small model, or set "
            "MODELD_TEST_MODEL to a copy of it."
        )
    return path


@pytest.fixture(scope="session")
def demo_folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as the product converts it for OpenVINO: the folder that its worker loads."""
    return converted_root(demo_model, tmp_path_factory.mktemp("converted"))
