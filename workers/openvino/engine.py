"""The OpenVINO engine behind the ``Engine`` protocol: one loaded model, run by one executor.

Chooses the executor by what was proved on the model, and says why. Knows no sessions, prompts or
policy.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import (
    InsufficientMemory,
    InvalidRequest,
    ModeldError,
    ModelLoadFailed,
    ModelNotActive,
    UnsupportedFeature,
)
from modeld.shared.host_memory import host_memory
from modeld.shared.ir_embedding import embeds
from modeld.shared.ir_facts import ir_facts
from modeld.shared.ir_texts import IrTexts, ir_texts
from modeld.shared.messages import EngineDevice, Hello, LoadOp, LoadResult
from modeld.workers import threads
from modeld.workers.batching import Gate
from modeld.workers.embedding import Embedded, not_embedding
from modeld.workers.engine import Cancelled, EngineContext, ReportProgress
from modeld.workers.images import Vision
from modeld.workers.memory_guard import MemoryGuard, return_memory
from modeld.workers.openvino.blocks import BLOCK_TOKENS
from modeld.workers.openvino.embedding_model import EmbeddingModel
from modeld.workers.openvino.native import build, core, words
from modeld.workers.openvino.paged_served import GAPS_S, PagedServed
from modeld.workers.openvino.pipeline_model import PipelineModel
from modeld.workers.openvino.streams import PagedStreams
from modeld.workers.openvino.tokenizer import OpenVinoTokenizer
from modeld.workers.openvino.vision_model import VisionModel

log = logging.getLogger(__name__)

KV_TYPES = ("f32", "f16", "u8", "u4")
# For tests and for an operator who mistrusts the paged loop: run everything by GenAI's pipeline.
EXECUTOR_VARIABLE = "MODELD_OPENVINO_EXECUTOR"
# Of the .bin file's size, what a load takes beside the mapping at the very least: weights in the
# plugin's own layout (2.4 times were measured on SmolLM2-135M, 5 times for weights in f16). Less
# than this is refused outright; the bound that the guard sets catches the rest.
REPACKED = 1.25

Served = PagedServed | PipelineModel | VisionModel | EmbeddingModel


class OpenVinoEngine:
    """See ``Engine``. All methods run on one thread."""

    def __init__(self, guard: MemoryGuard | None = None) -> None:
        self._guard = guard or MemoryGuard()
        self._loaded: Served | None = None

    def hello(self) -> Hello:
        """Brings the library up."""
        return Hello(
            backend="openvino",
            backend_version=build().version,
            build_digest=build().digest,
            pid=os.getpid(),
            capabilities={"generate": "yes"},
            devices=_devices(),
            state_layout=f"openvino-blocks-{BLOCK_TOKENS}",
            longest_gap_s=GAPS_S,
        )

    # --- the model ---------------------------------------------------------------------------

    def load(self, request: LoadOp, report: ReportProgress, cancelled: Cancelled) -> LoadResult:
        """See ``Engine``. ``request.path`` is the IR's folder. Replaces a model that is loaded."""
        began = time.monotonic()
        self.unload()
        _check_request(request)
        processors = threads.usable_processors()
        busy = threads.read_busy(processors)
        report("loading", 0.0)
        folder = Path(request.path)
        facts, texts = ir_facts(folder), ir_texts(folder)
        device = _checked_device(request.device)
        chosen = request.threads or threads.free_threads(busy, processors)

        def step(fraction: float) -> None:
            if cancelled():
                raise ModelLoadFailed(
                    "Loading was cancelled; nothing is loaded.", metadata={"cause": "cancelled"}
                )
            report("loading", fraction)

        try:
            with self._guard.allocating(
                f"The model {request.model!r}",
                {"weights": int(facts.weights_bytes * REPACKED)},
                "Free memory, or choose a smaller model or quantisation.",
                more={"model": request.model},
                untouched_bytes=host_memory().total_bytes,  # a pool's address space
            ):
                step(0.05)
                self._loaded = self._made(
                    request, facts, texts, device=device, threads=chosen, step=step
                )
            step(0.8)
            if isinstance(self._loaded, PagedServed):
                self._loaded.prove()
            return self._loaded.result(time.monotonic() - began)
        except ModeldError:
            self.unload()
            raise
        except Exception as error:
            self.unload()
            raise _engine_refusal(request, error) from None

    def _made(
        self,
        request: LoadOp,
        facts: ModelFacts,
        texts: IrTexts,
        *,
        device: str,
        threads: int,
        step: Callable[[float], None],
    ) -> Served:
        """What runs a model of this kind. Raises as its constructor does."""
        how: dict[str, Any] = {
            "device": device, "threads": threads, "guard": self._guard, "step": step,
        }  # fmt: skip
        if embeds(facts):
            return EmbeddingModel(request, facts, texts, **how)
        if facts.vision:
            return VisionModel(request, facts, texts, **how)
        why = f"{EXECUTOR_VARIABLE} asks for it"
        if os.environ.get(EXECUTOR_VARIABLE) != "pipeline":
            try:
                return PagedServed(request, facts, texts, **how)
            except UnsupportedFeature as error:
                if request.adapters or error.metadata.get("capability") != "generate":
                    raise  # only the paged executor applies adapters
                why = error.message
                log.warning("the paged executor can't run this model: %s", why)
        return PipelineModel(request, facts, texts, why, **how)

    def unload(self) -> None:
        """See ``Engine``."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        loaded.close()
        del loaded
        gc.collect()
        return_memory()

    @property
    def _current(self) -> Served:
        if self._loaded is None:
            raise ModelNotActive("No model is loaded in this worker. Load one first.")
        return self._loaded

    @property
    def vision(self) -> Vision | None:
        """See ``SeeingEngine``."""
        return self._loaded.vision if isinstance(self._loaded, VisionModel) else None

    @property
    def tokenizer(self) -> OpenVinoTokenizer:
        return self._current.tokenizer

    @property
    def chat_template(self) -> str | None:
        return self._current.texts.template or None

    def special_texts(self) -> Mapping[str, str]:
        """The same texts from which the template's digest is made."""
        texts = self._current.texts
        return {"bos_token": texts.bos_text, "eos_token": texts.eos_text}

    def embed(
        self,
        texts: Sequence[str],
        pooling: str,
        normalize: bool,
        cancelled: Cancelled,
        beat: Callable[[], None],
    ) -> Embedded:
        """See ``EmbeddingEngine``."""
        loaded = self._current
        if not isinstance(loaded, EmbeddingModel):
            raise not_embedding(f"{loaded.request.model!r} generates")
        return loaded.embedder.embed(texts, pooling, normalize, cancelled, beat)

    # --- contexts ----------------------------------------------------------------------------

    def new_context(
        self, window: int, k_type: str, v_type: str, compute_bytes: int = 0
    ) -> EngineContext:
        """See ``Engine``. InvalidRequest for other KV types than the model was loaded with."""
        return self._current.new_context(window, k_type, v_type)

    def new_batch(
        self,
        streams: int,
        window: int,
        k_type: str,
        v_type: str,
        gate: Gate,
        compute_bytes: int = 0,
    ) -> PagedStreams:
        """See ``BatchingEngine``."""
        loaded = self._current
        if not isinstance(loaded, PagedServed):
            raise UnsupportedFeature(
                f"The model {loaded.request.model!r} isn't run by the paged executor, which alone "
                "evaluates several sessions together. Open an isolated session.",
                metadata={"capability": "layout.batched"},
            )
        return loaded.new_batch(streams, window, k_type, v_type, gate)


def _check_request(request: LoadOp) -> None:
    if request.k_type not in KV_TYPES:
        raise InvalidRequest.of("k_type", request.k_type, ", ".join(KV_TYPES))
    if request.v_type != request.k_type:
        raise InvalidRequest.of(
            "v_type", request.v_type, request.k_type, "Keys and values have one type."
        )
    if request.n_ubatch < 1:
        raise InvalidRequest.of("n_ubatch", request.n_ubatch, "1 token or more")
    if request.threads < 0:
        raise InvalidRequest.of("threads", request.threads, "0 (chosen by what is free) or more")
    if request.n_gpu_layers:
        raise InvalidRequest.of(
            "n_gpu_layers", request.n_gpu_layers, "0", "A model runs on one device as a whole."
        )
    if not Path(request.path).is_dir():
        raise ModelLoadFailed(
            f"{request.path!r} is not a folder: an OpenVINO model is one with its .xml and .bin.",
            metadata={"cause": "path", "model": request.model},
        )


def _checked_device(name: str) -> str:
    """The device to compile for, or what the plugin says where it can't be used."""
    device = name or "CPU"
    available = list(core().available_devices)
    if device in available:
        return device
    try:
        core().get_property(device, "FULL_DEVICE_NAME")
        said = "the plugin lists no such device"
    except Exception as error:
        said = words(error)
    raise InvalidRequest.of("device", device, ", ".join(available), f"OpenVINO says: {said}")


def _devices() -> list[EngineDevice]:
    found = []
    for name in core().available_devices:
        try:
            description = str(core().get_property(name, "FULL_DEVICE_NAME"))
        except Exception as error:
            description = words(error)
        kind = {"CPU": "cpu", "GPU": "gpu", "NPU": "accel"}.get(name.partition(".")[0], "accel")
        found.append(EngineDevice(name=name, description=description, kind=kind))
    return found


def _engine_refusal(request: LoadOp, error: Exception) -> ModeldError:
    log.warning("loading failed", exc_info=error)
    said, about = words(error), {"cause": "engine", "model": request.model}
    if isinstance(error, MemoryError) or "bad_alloc" in said or "allocat" in said.lower():
        return InsufficientMemory(
            f"The engine could not allocate the model {request.model!r}. It said: {said}. Free "
            "memory, or choose a smaller model.",
            metadata=about,
        )
    return ModelLoadFailed(
        f"The engine refused the model {request.model!r}. It said: {said}.", metadata=about
    )
