"""Saved sessions where the engine scales a block's keys by all that is or was in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.messages import (
    ChunkOut,
    LoadOp,
    OpenOp,
    RestoreOp,
    SaveOp,
    SaveResult,
    TrimOp,
)
from modeld.workers.core import SessionCore
from modeld.workers.openvino.engine import OpenVinoEngine
from tests.support.core_harness import FakeOp, Harness, options, raw
from tests.support.openvino_models import tiny_ir

BLOCK = 32


@pytest.fixture(scope="module")
def ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_ir(tmp_path_factory.mktemp("scaled") / "tiny")


class Worker(Harness):
    def __init__(self, ir: Path) -> None:
        self.core, self.turns = SessionCore(OpenVinoEngine()), 0
        self.run(
            LoadOp(
                path=str(ir), model="m", digest="", threads=1, k_type="u8", v_type="u8",
                max_contexts=2,
            )
        )  # fmt: skip
        self.open_("a")

    def open_(self, session_id: str) -> None:
        self.run(
            OpenOp(
                session_id=session_id, prompt_format="raw", window=256, k_type="u8", v_type="u8",
                kv_digest="kv", runtime_digest="rt",
            )
        )  # fmt: skip

    def save(self, folder: Path) -> SaveResult:
        result = self.run(SaveOp(session_id="a", folder=str(folder)))
        assert isinstance(result, SaveResult)
        return result

    def last_block(self) -> np.ndarray:
        entry = self.core.model.sessions.usable("a").entry
        return entry.export_state(len(entry) // BLOCK * BLOCK, len(entry))

    def answer(self, session_id: str) -> list[tuple[int, float]]:
        op, wanted = FakeOp(), options(12, top_logprobs=1)
        wanted.ignore_eos = True
        self.decode(wanted, session_id, op)
        found = [one for chunk in op.of(ChunkOut) for one in chunk.logprobs]
        return [(one.sampled.token_id, one.sampled.logprob) for one in found]


@pytest.fixture
def worker(ir: Path) -> Iterator[Worker]:
    made = Worker(ir)
    yield made
    made.core.close()


def test_a_part_that_ends_within_a_block_is_named_again_only_where_its_bytes_are_the_same(
    worker: Worker, tmp_path: Path
) -> None:
    held = worker.suffix(raw(("which of the 9 stones came first? " * 5)[:155])).resident
    assert held > 2 * BLOCK
    assert 4 < held % BLOCK < BLOCK - 12
    first = worker.save(tmp_path)
    assert worker.save(tmp_path).parts == first.parts  # nothing happened in between
    before = worker.last_block()
    worker.answer("a")
    worker.run(TrimOp(session_id="a", keep=held))
    assert not np.array_equal(worker.last_block(), before)
    second = worker.save(tmp_path)
    assert second.parts[:-1] == first.parts[:-1]  # whole blocks
    assert len(second.parts) == len(first.parts) > 1
    assert second.parts[-1].name != first.parts[-1].name
    worker.open_("b")
    worker.run(RestoreOp(session_id="b", folder=str(tmp_path), record=second.record))
    assert worker.answer("b") == worker.answer("a")
