"""Serving an embedding, whatever engine makes the vectors: what is asked is checked here.

Owns the limits of a call and what crosses the seam. Knows no library and no session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from modeld.shared.embedding import POOLINGS, check_texts
from modeld.shared.errors import InvalidRequest, UnsupportedFeature
from modeld.shared.messages import MAX_FRAME_BYTES, EmbedOp, EmbedResult
from modeld.workers.engine import Cancelled
from modeld.workers.executor import OpContext

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vectors = NDArray[np.float32]

MAX_VECTOR_BYTES = MAX_FRAME_BYTES // 2


@dataclass(frozen=True)
class Embedded:
    """Rows of ``vectors`` belong to the texts in order; fewer only where it was cancelled."""

    vectors: Vectors
    tokens: list[int]
    pooling: str
    cancelled: bool = False


@runtime_checkable
class EmbeddingEngine(Protocol):
    """What an engine offers beside ``Engine`` if it knows embedding models."""

    def embed(
        self,
        texts: Sequence[str],
        pooling: str,
        normalize: bool,
        cancelled: Cancelled,
        beat: Callable[[], None],
    ) -> Embedded:
        """The vector of each text, the same whatever other texts come with it.

        ``beat`` is called for each batch that is done. Raises UnsupportedFeature (capability
        ``embed``) where the loaded model generates, ContextOverflow for a text that is too long,
        InvalidRequest for one without tokens, and InsufficientMemory.
        """


def embed(engine: object, op: EmbedOp, context: OpContext) -> EmbedResult:
    """Serve the operation. Raises what ``EmbeddingEngine.embed`` does, and InvalidRequest."""
    if not isinstance(engine, EmbeddingEngine):
        raise not_embedding("it is served by an engine that only generates here")
    if op.pooling not in ("", *POOLINGS):
        raise InvalidRequest.of("pooling", op.pooling, f"{', '.join(POOLINGS)} or empty")
    check_texts(op.texts)
    began_s = time.perf_counter()
    done = engine.embed(op.texts, op.pooling, op.normalize, context.cancelled, context.beat)
    if done.vectors.nbytes > MAX_VECTOR_BYTES:
        raise InvalidRequest.of(
            "texts",
            f"{len(op.texts)} texts of {done.vectors.shape[1]} dimensions",
            f"vectors of {MAX_VECTOR_BYTES} bytes in all",
            "Send several calls.",
        )
    return EmbedResult(
        dimensions=done.vectors.shape[1],
        pooling=done.pooling,
        tokens=done.tokens,
        vectors=done.vectors.astype("<f4", copy=False).tobytes(),
        normalized=op.normalize,
        seconds=time.perf_counter() - began_s,
        cancelled=done.cancelled,
    )


def not_embedding(why: str) -> UnsupportedFeature:
    """The refusal of a model that makes no vectors."""
    return UnsupportedFeature(
        f"The model can't embed: {why}. Use an embedding model.", metadata={"capability": "embed"}
    )
