"""An inference that fails half-way, as for lack of memory, and what other sequences get then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.errors import SessionFatal
from modeld.workers.openvino.engine import OpenVinoEngine
from modeld.workers.openvino.paged import PagedModel
from tests.support.openvino_models import tiny_ir
from tests.support.reference import load_request, never

ROUNDS, KEPT, FAILING = 20, 10, 200


def at_poll(number: int) -> Callable[[], bool]:
    """Says yes from that question on; the first one comes before the engine begins."""
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > number

    return cancelled


def test_a_failure_half_way_costs_its_own_sequence_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OpenVinoEngine()
    engine.load(load_request(tiny_ir(tmp_path / "ir", layers=24)), lambda _s, _f: None, never)
    ids = [(7 * step + 11) % 250 for step in range(KEPT)]
    other = engine.new_context(64, "f16", "f16")
    other.evaluate(ids, 0, cancelled=never)
    right = other.logits().copy()
    was_cancelled = PagedModel._was_cancelled

    def fails(self: PagedModel) -> bool:
        # Broken off at a true place inside; only what the engine says of it is another.
        if was_cancelled(self):
            raise RuntimeError("std::bad_alloc")
        return False

    monkeypatch.setattr(PagedModel, "_was_cancelled", fails)
    failed = 0
    for count in range(ROUNDS):
        broken = engine.new_context(256, "f16", "f16")
        try:
            broken.evaluate([5] * FAILING, 0, cancelled=at_poll(1 + count % 4))
        except SessionFatal:
            failed += 1
        broken.close()
        other.trim(0)
        other.evaluate(ids, 0, cancelled=never)
        assert np.array_equal(other.logits(), right), count
    assert failed, "every inference was done before it could fail"
    engine.unload()
