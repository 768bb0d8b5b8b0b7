"""What the engine answers with no reuse at all: the yardstick of every warm answer.

Drives the engine's primitives directly, a fresh context for each question; knows no sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.messages import LoadOp
from tests.support.backends import LLAMA, Backend

if TYPE_CHECKING:
    from modeld.workers.engine import Logits

# What one call evaluated: a list's tokens together, a tuple's one token as a decode's step.
Split = list[int] | tuple[int, ...]


def never() -> bool:
    return False


def load_request(path: Path, *, n_batch: int = 512, n_ubatch: int = 512) -> LoadOp:
    """A load with the product's defaults, on two threads."""
    return LoadOp(
        path=str(path), model="m", digest="", n_batch=n_batch, n_ubatch=n_ubatch, threads=2
    )


class Reference:
    """A model of its own, outside the product. ``path`` is what the backend's worker loads."""

    def __init__(
        self, path: Path, *, backend: Backend = LLAMA, n_batch: int = 512, n_ubatch: int = 512
    ) -> None:
        self.engine = backend.engine()
        self.engine.load(
            load_request(path, n_batch=n_batch, n_ubatch=n_ubatch), lambda _s, _f: None, never
        )

    def close(self) -> None:
        self.engine.unload()

    @property
    def end_of_generation(self) -> frozenset[int]:
        return self.engine.tokenizer.end_of_generation

    def encode(self, text: str) -> list[int]:
        """Plain text's ids."""
        return self.engine.tokenizer.encode(text)

    def text(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.engine.tokenizer.piece, ids)).decode(errors="replace")

    def logits(self, parts: Sequence[Split], *, window: int = 1024) -> Logits:
        """Logits after ``parts``, each evaluated by one call of a fresh context."""
        context = self.engine.new_context(window, "f16", "f16")
        position = 0
        for part in parts:
            if isinstance(part, tuple):
                context.step(part[0], position)
            else:
                assert context.evaluate(part, position, cancelled=never) == len(part)
            position += len(part)
        answer = context.logits().copy()
        context.close()
        return answer

    def greedy(
        self, prompt: Sequence[int], count: int, *, stepped: Sequence[int] = (), window: int = 1024
    ) -> list[int]:
        """Up to ``count`` most likely tokens after ``prompt``, the end-of-generation one included.

        One shot: the whole prompt in one evaluation, then token by token. ``stepped``: positions
        of the prompt's tokens that go alone, as a sampled token does: the engine computes a
        single token by other routines than several, which differ by rounding.
        """
        context = self.engine.new_context(window, "f16", "f16")
        edges = sorted({0, len(prompt), *stepped, *(position + 1 for position in stepped)})
        for begin, end in pairwise(edges):
            if begin in stepped:
                context.step(prompt[begin], begin)
            else:
                context.evaluate(prompt[begin:end], begin, cancelled=never)
        answer: list[int] = []
        while len(answer) < count:
            answer.append(int(np.argmax(context.logits())))
            if answer[-1] in self.end_of_generation:
                break
            if len(answer) < count:
                context.step(answer[-1], len(prompt) + len(answer) - 1)
        context.close()
        return answer
