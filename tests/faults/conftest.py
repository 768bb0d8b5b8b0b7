"""What the fault tests of the whole daemon share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faulting import ANSWER_TOKENS, QUESTION, DataRoot, data_root
from tests.support.reference import Reference


@pytest.fixture
def root(demo_model: Path) -> Iterator[DataRoot]:
    """A data root with the real small model in its store, and no daemon yet."""
    with data_root(demo_model) as made:
        yield made


@pytest.fixture(scope="session")
def right_answer(demo_model: Path) -> list[int]:
    """What the engine alone answers to ``QUESTION``."""
    reference = Reference(demo_model)
    prompt = reference.encode("".join(QUESTION))
    ids = reference.greedy(prompt, ANSWER_TOKENS, window=1024)
    reference.close()
    return ids
