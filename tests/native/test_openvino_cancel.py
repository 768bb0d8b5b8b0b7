"""A prefill cancelled while the engine computes, and then prompts of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from modeld.workers.openvino.engine import OpenVinoEngine
from tests.support.reference import load_request, never

ROUNDS = 8


def at_poll(number: int) -> Callable[[], bool]:
    """Says yes from that question on; the first one comes before the engine begins."""
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > number

    return cancelled


def test_what_comes_after_it_is_right_whatever_the_sizes(demo_folder: Path) -> None:
    # Cancelled anywhere, the graph is left with the shapes of two sizes, in this place or another.
    engine = OpenVinoEngine()
    engine.load(load_request(demo_folder), lambda _s, _f: None, never)
    context = engine.new_context(512, "f16", "f16")
    for kept, given_up in ((100, 40), (40, 100)):
        first = [(7 * step + 11) % 4000 for step in range(kept)]
        other = [(5 * step + 3) % 4000 for step in range(given_up)]
        context.evaluate(first, 0, cancelled=never)
        right = context.logits().copy()
        caught = 0
        for count in range(ROUNDS):
            context.trim(0)
            caught += context.evaluate(other, 0, cancelled=at_poll(2 + 3 * count)) < given_up
            context.trim(0)
            context.evaluate(first, 0, cancelled=never)
            assert np.array_equal(context.logits(), right), (kept, given_up, count)
        assert caught, f"{given_up} tokens were done before any cancel"
        context.trim(0)
    engine.unload()
