"""The OpenVINO engine behind the ``Engine`` protocol: one loaded model, run by one executor.

Chooses the executor by what was proved on the model, and says why. Knows no sessions, prompts or
policy.
"""

from __future__ import annotations

import contextlib
import ctypes
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
    SessionFatal,
    UnsupportedFeature,
)
from modeld.shared.host_memory import host_memory
from modeld.shared.ir_embedding import embeds
from modeld.shared.ir_facts import ir_facts
from modeld.shared.ir_texts import IrTexts, ir_texts
from modeld.shared.messages import EngineDevice, Hello, LoadOp, LoadResult, PlacedOut
from modeld.workers import threads
from modeld.workers.embedding import Embedded, not_embedding
from modeld.workers.engine import Cancelled, EngineContext, ReportProgress
from modeld.workers.images import Vision
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.openvino import adapters, probe
from modeld.workers.openvino.blocks import BLOCK_TOKENS, BlockPool
from modeld.workers.openvino.embedding_model import EmbeddingModel
from modeld.workers.openvino.graph import NotPaged, compile_paged, read_model, to_paged
from modeld.workers.openvino.native import build, core, words
from modeld.workers.openvino.paged import CHUNK_TOKENS, PagedModel
from modeld.workers.openvino.pipeline_model import PipelineModel
from modeld.workers.openvino.proof import paged_loop_works
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
# Every native call releases the GIL, but the graph's surgery is Python and holds it in pieces of
# up to 0.25 s. The rest is room for a loaded machine.
GAPS_S = {"load": 1.0, "evaluate": 0.25, "copy": 0.25, "tokenize": 0.25, "embed": 0.5}


class _Loaded:
    """A model that is loaded, with what was found out about it."""

    def __init__(
        self,
        request: LoadOp,
        facts: ModelFacts,
        texts: IrTexts,
        tokenizer: OpenVinoTokenizer,
        paged: PagedModel,
        threads: int,
    ) -> None:
        self.request, self.facts, self.texts = request, facts, texts
        self.tokenizer, self.paged, self.threads = tokenizer, paged, threads


class OpenVinoEngine:
    """See ``Engine``. All methods run on one thread."""

    def __init__(self, guard: MemoryGuard | None = None) -> None:
        self._guard = guard or MemoryGuard()
        self._loaded: _Loaded | None = None
        self._embedding: EmbeddingModel | None = None  # in the place of the other
        self._piped: PipelineModel | VisionModel | None = None  # likewise

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
            ):
                step(0.05)
                if embeds(facts):
                    adapters.refuse(request.adapters, "an embedding model")
                    self._embedding = EmbeddingModel(
                        request,
                        facts,
                        device=device,
                        threads=chosen,
                        guard=self._guard,
                        step=step,
                    )
                    step(0.8)
                    return self._embedding.result(time.monotonic() - began, GAPS_S)
                if facts.vision:
                    self._piped = VisionModel(
                        request,
                        facts,
                        texts,
                        device=device,
                        threads=chosen,
                        guard=self._guard,
                        step=step,
                    )
                    step(0.8)
                    return self._piped.result(time.monotonic() - began)
                paged, why_not = self._paged_or_why(request, folder, device, chosen, step)
                if paged is None:
                    self._piped = PipelineModel(
                        request,
                        facts,
                        texts,
                        why_not,
                        device=device,
                        threads=chosen,
                        guard=self._guard,
                        step=step,
                    )
                    step(0.8)
                    return self._piped.result(time.monotonic() - began)
            tokenizer = OpenVinoTokenizer(folder, core(), paged.compiled.vocabulary)
            self._loaded = _Loaded(request, facts, texts, tokenizer, paged, chosen)
            step(0.8)
            probed = self._probed(self._loaded)
            return self._result(self._loaded, probed, time.monotonic() - began)
        except ModeldError:
            self.unload()
            raise
        except Exception as error:
            self.unload()
            raise _engine_refusal(request, error) from None

    def _paged_or_why(
        self, request: LoadOp, folder: Path, device: str, threads: int, step: Any
    ) -> tuple[PagedModel | None, str]:
        """The paged executor, or None and why GenAI's pipeline is to run the model."""
        if os.environ.get(EXECUTOR_VARIABLE) == "pipeline":
            return None, f"{EXECUTOR_VARIABLE} asks for it"
        try:
            return self._build(request, folder, device, threads, step), ""
        except UnsupportedFeature as error:
            if request.adapters:  # only the paged executor applies them
                raise
            log.warning("the paged executor can't run this model: %s", error.message)
            return None, error.message

    def _build(
        self, request: LoadOp, folder: Path, device: str, threads: int, step: Any
    ) -> PagedModel:
        if not (works := paged_loop_works()):
            raise UnsupportedFeature(
                f"The paged executor doesn't work with this OpenVINO: {works.reason}.",
                metadata={"capability": "generate"},
            )
        model = read_model(folder)
        step(0.2)
        try:
            selects = to_paged(model)
            applied = adapters.apply(model, request.adapters)
            step(0.4)
            compiled = compile_paged(
                model, selects, device=device, kv_type=request.k_type, threads=threads
            )
        except NotPaged as error:
            raise UnsupportedFeature(
                f"The model {request.model!r} can't be served for generation: {error}.",
                metadata={"capability": "generate", "model": request.model},
            ) from None
        _check_read_back(request, compiled.k_type, compiled.v_type)
        block = sum(port.block_bytes for port in compiled.ports)
        # Address space for as many blocks as the machine could ever hold.
        pool = BlockPool(compiled.ports, max(1, host_memory().total_bytes // block))
        return PagedModel(compiled, pool, min(request.n_ubatch, CHUNK_TOKENS), applied)

    def _probed(self, loaded: _Loaded) -> probe.Probed:
        try:
            return probe.probed(loaded.paged, loaded.tokenizer.vocab_size)
        except SessionFatal as error:
            raise ModelLoadFailed(
                f"The model {loaded.request.model!r} loads but doesn't compute: {error.message}",
                metadata={"cause": "probe", "model": loaded.request.model},
            ) from None

    def _result(self, loaded: _Loaded, probed: probe.Probed, seconds: float) -> LoadResult:
        facts, compiled = loaded.facts, loaded.paged.compiled
        return LoadResult(
            description=f"{facts.architecture or 'unknown'} IR {facts.quantization}".strip(),
            vocab=compiled.vocabulary,
            train_context=facts.model_max,
            weights_bytes=facts.weights_bytes,
            add_bos=loaded.tokenizer.add_bos,
            template_digest=loaded.texts.digest,
            template_supports_tools=False,  # known only by rendering, which isn't done here
            threads=loaded.threads,
            capabilities=probed.capabilities,
            seconds=seconds,
            placed=[PlacedOut(device="CPU", weights_bytes=facts.weights_bytes)],
            traits={"layers": compiled.layers, "vocabulary": compiled.vocabulary},
            executor="paged",
            kv_untouched=True,
            executor_reason=probed.reason,
            exact_state_types=(
                [f"{compiled.k_type}/{compiled.v_type}"] if probed.exact_state else []
            ),
            longest_gap_s=GAPS_S,
        )

    def unload(self) -> None:
        """See ``Engine``."""
        loaded, self._loaded = self._loaded, None
        embedding, self._embedding = self._embedding, None
        piped, self._piped = self._piped, None
        if loaded is not None:
            loaded.paged.close()
        elif embedding is not None:
            embedding.close()
        elif piped is not None:
            piped.close()
        else:
            return
        del loaded, embedding, piped
        gc.collect()
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)

    @property
    def _current(self) -> _Loaded:
        if self._embedding is not None:
            raise UnsupportedFeature(
                "The loaded model embeds and doesn't generate.",
                metadata={"capability": "generate"},
            )
        if self._loaded is None:
            raise ModelNotActive("No model is loaded in this worker. Load one first.")
        return self._loaded

    @property
    def _serving(self) -> _Loaded | PipelineModel | VisionModel:
        return self._piped or self._current

    @property
    def vision(self) -> Vision | None:
        """See ``SeeingEngine``."""
        return self._piped.vision if isinstance(self._piped, VisionModel) else None

    @property
    def tokenizer(self) -> OpenVinoTokenizer:
        return self._embedding.tokenizer if self._embedding else self._serving.tokenizer

    @property
    def chat_template(self) -> str | None:
        return None if self._embedding else self._serving.texts.template or None

    def special_texts(self) -> Mapping[str, str]:
        """The same texts from which the template's digest is made."""
        texts = self._serving.texts
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
        if self._embedding is None:
            raise not_embedding(f"{self._serving.request.model!r} generates")
        return self._embedding.embedder.embed(texts, pooling, normalize, cancelled, beat)

    # --- contexts ----------------------------------------------------------------------------

    def new_context(
        self, window: int, k_type: str, v_type: str, compute_bytes: int = 0
    ) -> EngineContext:
        """See ``Engine``. InvalidRequest for other KV types than the model was loaded with."""
        if self._piped is not None:
            return self._piped.new_context(window, k_type, v_type)
        loaded = self._current
        compiled, pool = loaded.paged.compiled, loaded.paged.pool
        if window < 1:
            raise InvalidRequest.of("window", window, "1 token or more")
        for field, asked, served in (
            ("k_type", k_type, compiled.k_type),
            ("v_type", v_type, compiled.v_type),
        ):
            if asked != served:
                raise InvalidRequest.of(
                    field, asked, served, "The model was compiled for it when it was loaded."
                )
        kv = -(-window // BLOCK_TOKENS) * pool.block_bytes
        with self._guard.allocating(
            f"A context of {window} tokens",
            {"kv": kv, "promised": pool.promised_bytes},
            "Ask for a smaller window, or close a session.",
            more={"window": window},
        ):
            return loaded.paged.new_context(window, self._guard.spare_bytes)


def _check_request(request: LoadOp) -> None:
    if request.k_type not in KV_TYPES:
        raise InvalidRequest.of("k_type", request.k_type, ", ".join(KV_TYPES))
    if request.v_type != request.k_type:
        raise InvalidRequest.of(
            "v_type", request.v_type, request.k_type, "Keys and values have one type."
        )
    if request.n_ubatch < 1:
        raise InvalidRequest.of("n_ubatch", request.n_ubatch, "1 token or more")
    if request.n_gpu_layers:
        raise InvalidRequest.of(
            "n_gpu_layers", request.n_gpu_layers, "0", "A model runs on one device as a whole."
        )
    if not Path(request.path).is_dir():
        raise ModelLoadFailed(
            f"{request.path!r} is not a folder: an OpenVINO model is one with its .xml and .bin.",
            metadata={"cause": "path", "model": request.model},
        )


def _check_read_back(request: LoadOp, k_type: str, v_type: str) -> None:
    if (k_type, v_type) != (request.k_type, request.v_type):
        raise ModelLoadFailed(
            f"A KV cache of {request.k_type} was asked for, the engine made K {k_type} and "
            f"V {v_type}. Choose another type.",
            metadata={"cause": "kv_type", "k_type": k_type, "v_type": v_type},
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
