"""What the engine holds while an embedding model is loaded, and what it reports of it.

Knows no sessions: such a model has none. The vectors are ``embedding.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import ModeldError, ModelLoadFailed, UnsupportedFeature
from modeld.shared.ir_texts import IrTexts
from modeld.shared.messages import LoadOp, LoadResult, PlacedOut
from modeld.workers.engine import EngineContext
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.openvino import adapters
from modeld.workers.openvino.embedding import Embedder, is_embedder, shape_of
from modeld.workers.openvino.graph import read_model
from modeld.workers.openvino.native import core
from modeld.workers.openvino.tokenizer import OpenVinoTokenizer

# A batch is one inference, which can be cancelled; tokenizing a long text can't.
GAPS_S = {"load": 1.0, "tokenize": 0.25, "embed": 0.5}
_NOTHING_KEPT = "no: an embedding model generates nothing and keeps nothing between calls"
_UNSERVED = (
    "cold_store",
    "decode.logit_bias",
    "decode.logprobs",
    "durable",
    "exact_warm",
    "fork",
    "overflow.evict",
    "prefix_copy",
    "recompute",
    "snapshot",
    "state.blocks",
    "state.whole",
    "structured_output",
    "tail_removal",
    "vision",
)


class EmbeddingModel:
    """A folder's model loaded for embedding. Close it."""

    def __init__(
        self,
        request: LoadOp,
        facts: ModelFacts,
        texts: IrTexts,
        *,
        device: str,
        threads: int,
        guard: MemoryGuard,
        step: Callable[[float], None],
    ) -> None:
        """Raises ModelLoadFailed and InsufficientMemory, and what the library raises."""
        adapters.refuse(request.adapters, "an embedding model")
        self.request = request
        self.texts = replace(texts, template="")  # a chat is nothing to embed
        folder = Path(request.path)
        model = read_model(folder)
        if not is_embedder(model):
            names = ", ".join(sorted(port.get_any_name() for port in model.inputs))
            raise ModelLoadFailed(
                f"The model {request.model!r} gives hidden states, but from the inputs {names}: "
                "it can't be served for embedding.",
                metadata={"cause": "inputs", "model": request.model},
            )
        step(0.3)
        shape = shape_of(folder, facts)
        self.embedder = Embedder(folder, model, shape, device=device, threads=threads, guard=guard)
        self._facts, self._threads = facts, threads
        self._tokenizer: OpenVinoTokenizer | ModeldError
        try:
            self._tokenizer = OpenVinoTokenizer(folder, core())
        except ModeldError as error:  # it embeds all the same
            self._tokenizer = error

    @property
    def tokenizer(self) -> OpenVinoTokenizer:
        """Raises why there is none for plain text."""
        if isinstance(self._tokenizer, ModeldError):
            raise self._tokenizer
        return self._tokenizer

    def new_context(self, window: int, k_type: str, v_type: str) -> EngineContext:
        """Raises UnsupportedFeature: there is nothing to keep."""
        raise UnsupportedFeature(
            "The loaded model embeds and doesn't generate.", metadata={"capability": "generate"}
        )

    def result(self, seconds: float) -> LoadResult:
        """What the load reports."""
        facts, capabilities = self._facts, dict.fromkeys(_UNSERVED, _NOTHING_KEPT)
        known = not isinstance(self._tokenizer, ModeldError)
        return LoadResult(
            description=f"{facts.architecture or 'unknown'} IR {facts.quantization}".strip(),
            vocab=facts.vocabulary or (self.tokenizer.vocab_size if known else 0),
            train_context=facts.model_max,
            weights_bytes=facts.weights_bytes,
            add_bos=facts.add_bos,
            template_digest="",
            template_supports_tools=False,
            threads=self._threads,
            capabilities=capabilities | self.embedder.capabilities(),
            seconds=seconds,
            placed=[PlacedOut(device="CPU", weights_bytes=facts.weights_bytes)],
            executor="embedding",
            executor_reason="the model gives hidden states and keeps no state",
            longest_gap_s=GAPS_S,
        )

    def close(self) -> None:
        """Free it. Idempotent."""
        self.embedder.close()
