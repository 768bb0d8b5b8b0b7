"""An embedding call cancelled while the engine computes, and then texts of other lengths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from modeld.shared.messages import EmbedOp, EmbedResult, LoadOp
from modeld.workers.core import SessionCore
from modeld.workers.openvino import embedding
from modeld.workers.openvino.engine import OpenVinoEngine
from tests.support.core_harness import FakeOp
from tests.support.openvino_embedder import tiny_embedder

ROUNDS = 40
LONG = ("x" * 3900, "x" * 2000)  # long enough to be cancelled on the way
SHORT = (3, 39, 40)  # characters, each a token


def test_what_comes_after_it_has_the_same_vectors_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Cancelled anywhere, the graph is left with the shapes of two sizes, in this place or another.
    monkeypatch.setattr(embedding, "_POLL_MS", 1)
    folder = tiny_embedder(tmp_path / "embedder", max_tokens=4000).folder
    core = SessionCore(OpenVinoEngine())
    core.handle(LoadOp(path=str(folder), model="tiny", digest="d", threads=2), FakeOp())

    def embed(text: str, op: FakeOp | None = None) -> EmbedResult:
        result = core.handle(EmbedOp(texts=[text]), op or FakeOp())
        assert isinstance(result, EmbedResult)
        return result

    def vector(text: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.frombuffer(embed(text).vectors, dtype="<f4")

    texts = [*("a" * size for size in SHORT), *LONG]
    right = [vector(text) for text in texts]
    caught = 0
    for count in range(ROUNDS):
        which = count % len(texts)
        vector(texts[which])
        caught += embed(LONG[count % 2], FakeOp(cancel_at=1 + count % 20)).cancelled
        assert np.allclose(vector(texts[which]), right[which], atol=1e-5), (count, which)
    assert caught, "every call was done before its cancel"
    core.close()
