"""What the engine holds while a model is run by GenAI's pipeline, and what it reports of it.

Owns how many blocks its cache has. Knows no sessions, prompts or policy.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import InvalidRequest, ModeldError
from modeld.shared.ir_texts import IrTexts
from modeld.shared.messages import LoadOp, LoadResult, PlacedOut
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.openvino import adapters
from modeld.workers.openvino.blocks import BLOCK_TOKENS
from modeld.workers.openvino.graph import read_model
from modeld.workers.openvino.native import core
from modeld.workers.openvino.piped import PipelineContext
from modeld.workers.openvino.pipeline import Pipeline
from modeld.workers.openvino.tokenizer import OpenVinoTokenizer

# Where no session is planned yet. The cache grows for a larger one, which empties it.
FIRST_WINDOW = 512  # tokens


class PipelineModel:
    """A folder's model loaded into GenAI's pipeline, and why it is. Close it."""

    def __init__(
        self,
        request: LoadOp,
        facts: ModelFacts,
        texts: IrTexts,
        reason: str,
        *,
        device: str,
        threads: int,
        guard: MemoryGuard,
        step: Callable[[float], None],
    ) -> None:
        """Raises ModelLoadFailed with the engine's words, UnsupportedFeature for adapters."""
        adapters.refuse(request.adapters, "the pipeline executor")
        folder = Path(request.path)
        self.request, self.texts = request, texts
        self._facts, self._threads, self._guard, self._reason = facts, threads, guard, reason
        self.tokenizer = OpenVinoTokenizer(folder, core(), _vocabulary(folder))
        step(0.3)
        window = request.window or min(facts.model_max or FIRST_WINDOW, FIRST_WINDOW)
        self.pipeline = Pipeline(
            folder,
            device,
            kv_type=request.k_type,
            total_blocks=-(-window // BLOCK_TOKENS),
            threads=threads,
            vocabulary=self.tokenizer.vocab_size,
        )

    def new_context(self, window: int, k_type: str, v_type: str) -> PipelineContext:
        """Raises InvalidRequest for other KV types than the cache has, and InsufficientMemory."""
        pipeline = self.pipeline
        if window < 1:
            raise InvalidRequest.of("window", window, "1 token or more")
        for field, asked in (("k_type", k_type), ("v_type", v_type)):
            if asked != pipeline.kv_type:
                raise InvalidRequest.of(
                    field, asked, pipeline.kv_type, "The model was loaded for it."
                )
        with self._guard.allocating(
            f"A context of {window} tokens",
            {"kv": -(-window // BLOCK_TOKENS) * pipeline.block_bytes},  # touched as it is used
            "Ask for a smaller window, or close a session.",
            more={"window": window},
        ):
            return pipeline.new_context(window)

    def result(self, seconds: float) -> LoadResult:
        """What the load reports."""
        facts, capabilities = self._facts, self.pipeline.capabilities()
        return LoadResult(
            description=f"{facts.architecture or 'unknown'} IR {facts.quantization}".strip(),
            vocab=self.tokenizer.vocab_size,
            train_context=facts.model_max,
            weights_bytes=facts.weights_bytes,
            add_bos=self.tokenizer.add_bos,
            template_digest=self.texts.digest,
            template_supports_tools=False,  # known only by rendering, which isn't done here
            threads=self._threads,
            capabilities=capabilities,
            seconds=seconds,
            placed=[PlacedOut(device="CPU", weights_bytes=facts.weights_bytes)],
            traits={"vocabulary": self.tokenizer.vocab_size},
            executor="pipeline",
            kv_untouched=True,
            executor_reason=self._reason,
            longest_gap_s=self.pipeline.longest_gap_s(),
        )

    def close(self) -> None:
        """Free it. Idempotent."""
        self.pipeline.close()


def _vocabulary(folder: Path) -> int | None:
    """The width of the logits, or None where the IR leaves it open."""
    try:
        width = read_model(folder).outputs[0].get_partial_shape()[-1]
    except ModeldError:
        raise
    except Exception:
        return None
    return int(width.get_length()) if width.is_static else None
