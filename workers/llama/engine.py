"""The llama.cpp engine behind the ``Engine`` protocol: one loaded model and its contexts.

Uses the binding's low-level functions only. Knows no sessions, prompts or policy.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
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
from modeld.shared.gguf_header import GgufHeader, model_facts
from modeld.shared.manifest import template_digest
from modeld.shared.messages import Hello, LoadOp, LoadResult
from modeld.workers import threads
from modeld.workers.batch_probe import Shared
from modeld.workers.batching import Gate
from modeld.workers.engine import Cancelled, ReportProgress
from modeld.workers.llama import host, probe, reports, validate
from modeld.workers.llama.context import LlamaContext, ModelTraits
from modeld.workers.llama.devices import accelerators, engine_devices
from modeld.workers.llama.native import build, engine_log, llama, start
from modeld.workers.llama.parameters import (
    ContextSettings,
    ModelParameters,
    context_settings,
    model_parameters,
)
from modeld.workers.llama.probe_streams import shared
from modeld.workers.llama.streams import MAX_STREAMS, LlamaStreams
from modeld.workers.llama.tokenizer import LlamaTokenizer
from modeld.workers.llama.traits import engine_traits, why_not_generating
from modeld.workers.memory_guard import MemoryGuard, return_memory

log = logging.getLogger(__name__)


class _Loaded:
    """A model that is loaded, with what was found out about it."""

    def __init__(
        self,
        handle: Any,
        header: GgufHeader,
        facts: ModelFacts,
        request: LoadOp,
        threads: int,
        lines: list[str],
    ) -> None:
        """``lines`` is what the engine logged while it loaded."""
        self.handle, self.header, self.facts = handle, header, facts
        self.request, self.threads = request, threads
        self.gpu_layers = reports.offloaded_layers(lines)
        self.placed = reports.placed(weights=reports.weights_by_device(lines))
        vocab = llama.llama_model_get_vocab(handle)
        self.tokenizer = LlamaTokenizer(
            vocab, kind=header.tokenizer_model, pre=header.tokenizer_pre
        )
        self.traits = ModelTraits(
            vocab=self.tokenizer.vocab_size,
            window_tokens=llama.llama_model_n_swa(handle),
            recurrent=llama.llama_model_is_recurrent(handle) or llama.llama_model_is_hybrid(handle),
        )
        self.contexts: set[LlamaContext | LlamaStreams] = set()
        self.shared = Shared("unknown: not tried yet")


class LlamaEngine:
    """See ``Engine``. All methods run on one thread."""

    def __init__(self, guard: MemoryGuard | None = None) -> None:
        self._guard = guard or MemoryGuard()
        self._loaded: _Loaded | None = None

    def hello(self) -> Hello:
        """Brings the library up."""
        start()
        offload = "yes" if llama.llama_supports_gpu_offload() else "no"
        return Hello(
            backend="llama",
            backend_version=build().version,
            build_digest=build().digest,
            pid=os.getpid(),
            capabilities={"generate": "yes", "gpu_offload": offload},
            devices=engine_devices(),
            state_layout=f"llama-sequence-{llama.LLAMA_STATE_SEQ_VERSION}",
            # Every native call releases the GIL: a 2 ms beat came at most 7 ms late during
            # prefill. The rest is room for a loaded machine.
            longest_gap_s={"load": 0.5, "evaluate": 0.25, "copy": 0.25, "tokenize": 0.25},
        )

    # --- the model ---------------------------------------------------------------------------

    def load(self, request: LoadOp, report: ReportProgress, cancelled: Cancelled) -> LoadResult:
        """See ``Engine``. Replaces a model that is still loaded. ``report("loading", fraction)``
        follows the engine; UnsupportedFeature for a model that can't generate.
        """
        began = time.monotonic()
        start()
        self.unload()
        validate.check_load(request)
        if request.n_gpu_layers and not llama.llama_supports_gpu_offload():
            raise InvalidRequest.of(
                "n_gpu_layers", request.n_gpu_layers, "0", "This build of the engine has no GPU."
            )
        processors = threads.usable_processors()
        busy = threads.read_busy(processors)
        report("loading", 0.0)
        header = validate.check_file(request.path)
        validate.check_gpu_layers(request.n_gpu_layers, header)
        facts = model_facts(header, header.file_bytes)
        chosen = request.threads or threads.free_threads(busy, processors)
        placement = model_parameters(
            request.n_gpu_layers, request.devices, request.tensor_split, accelerators()
        )
        weights = host.host_weights(facts, request.n_gpu_layers) or 0
        with (
            engine_log.recording() as lines,
            self._guard.allocating(
                f"The model {request.model!r}",
                {"weights": weights},
                "Free memory, choose a smaller model or quantisation, or leave fewer of its layers "
                "on the host.",
                more={"model": request.model},
            ),
        ):
            handle = _load_model(request, facts, placement, report, cancelled)
        try:
            self._loaded = _Loaded(handle, header, facts, request, chosen, lines)
            _refuse_unless_it_generates(self._loaded)
            found = _probed(self, self._loaded)
            found.capabilities["layout.batched"] = self._loaded.shared.capability
            return self._result(self._loaded, found, time.monotonic() - began)
        except BaseException:
            if self._loaded is None:
                llama.llama_model_free(handle)
            self.unload()
            raise

    def _result(self, loaded: _Loaded, found: probe.Probed, seconds: float) -> LoadResult:
        description = ctypes.create_string_buffer(256)
        llama.llama_model_desc(loaded.handle, description, len(description))
        header, template = loaded.header, self.chat_template
        return LoadResult(
            description=description.value.decode(errors="replace"),
            vocab=loaded.tokenizer.vocab_size,
            train_context=llama.llama_model_n_ctx_train(loaded.handle),
            weights_bytes=llama.llama_model_size(loaded.handle),
            add_bos=loaded.tokenizer.add_bos,
            template_digest=(
                template_digest(template, header.bos_text, header.eos_text) if template else ""
            ),
            template_supports_tools=False,  # known only by rendering, which isn't done here
            threads=loaded.threads,
            capabilities=found.capabilities,
            exact_state_types=list(found.exact_state_types),
            seconds=seconds,
            gpu_layers=loaded.gpu_layers,
            placed=loaded.placed,
            traits=engine_traits(loaded.handle),
        )

    def unload(self) -> None:
        """See ``Engine``."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        for context in list(loaded.contexts):  # a context must not outlive its model
            context.close()
        llama.llama_model_free(loaded.handle)
        gc.collect()
        return_memory()

    @property
    def _current(self) -> _Loaded:
        if self._loaded is None:
            raise ModelNotActive("No model is loaded in this worker. Load one first.")
        return self._loaded

    @property
    def tokenizer(self) -> LlamaTokenizer:
        return self._current.tokenizer

    @property
    def facts(self) -> ModelFacts:
        """The loaded model's, from its header."""
        return self._current.facts

    @property
    def chat_template(self) -> str | None:
        return self._current.header.chat_template

    def special_texts(self) -> Mapping[str, str]:
        """As the file says: the same texts from which the template's digest is made."""
        header = self._current.header
        return {"bos_token": header.bos_text, "eos_token": header.eos_text}

    # --- contexts ----------------------------------------------------------------------------

    def new_context(
        self, window: int, k_type: str, v_type: str, compute_bytes: int = 0
    ) -> LlamaContext:
        """See ``Engine``. ``window`` is tokens; what is really allocated is in the answer."""
        loaded = self._current
        facts, settings = loaded.facts, self._settings(window, k_type, v_type)
        with self._allocating(settings, {"window": window}, compute_bytes):
            context = LlamaContext(
                loaded.handle,
                loaded.traits,
                settings,
                functools.partial(settings.planned_kv_bytes, facts),
                loaded.contexts.discard,
                settings.work_bytes(host.on_host(facts, loaded.gpu_layers), settings.window),
                self._guard.spare_bytes,
            )
        loaded.contexts.add(context)
        return context

    def new_batch(
        self,
        streams: int,
        window: int,
        k_type: str,
        v_type: str,
        gate: Gate,
        compute_bytes: int = 0,
    ) -> LlamaStreams:
        """See ``BatchingEngine``. ``window`` is tokens a stream."""
        shared = self._current.shared
        if not shared.served:
            raise UnsupportedFeature(
                f"The model {self._current.request.model!r} gives each session a context of its "
                f"own ({shared.capability}). Open an isolated session.",
                metadata={"capability": "layout.batched"},
            )
        return self._streams(
            streams, window, (k_type, v_type), gate, compute_bytes, company=shared.company
        )

    def _streams(
        self,
        streams: int,
        window: int,
        types: tuple[str, str],
        gate: Gate,
        compute_bytes: int = 0,
        *,
        company: bool,
    ) -> LlamaStreams:
        loaded = self._current
        facts = loaded.facts
        settings = self._settings(window, *types)
        most = min(MAX_STREAMS, settings.n_ubatch)
        if not 1 <= streams <= most:
            raise InvalidRequest.of("streams", streams, f"1 to {most}")
        more = {"window": window, "streams": streams}
        with self._allocating(settings, more, compute_bytes):
            batch = LlamaStreams(
                loaded.handle,
                loaded.traits,
                settings,
                streams,
                gate,
                functools.partial(settings.planned_kv_bytes, facts),
                loaded.contexts.discard,
                settings.work_bytes(host.on_host(facts, loaded.gpu_layers), settings.window),
                self._guard.spare_bytes,
                company=company,
            )
        loaded.contexts.add(batch)
        return batch

    def _settings(self, window: int, k_type: str, v_type: str) -> ContextSettings:
        loaded = self._current
        request, facts = loaded.request, loaded.facts
        validate.check_window(facts, window)
        validate.check_kv_types(facts, k_type, v_type, flash_attn=request.flash_attn)
        return context_settings(
            window,
            n_batch=request.n_batch,
            n_ubatch=request.n_ubatch,
            k_type=k_type,
            v_type=v_type,
            threads=loaded.threads,
            flash_attn=request.flash_attn,
            offload=request.n_gpu_layers > 0,
        )

    def _allocating(
        self, settings: ContextSettings, more: Mapping[str, int], compute_bytes: int
    ) -> AbstractContextManager[None]:
        """The guard over a context. ``compute_bytes``: as planned, or 0."""
        loaded, streams = self._current, more.get("streams", 1)
        facts = loaded.facts
        kv = settings.planned_kv_bytes(host.on_host(facts, loaded.gpu_layers), settings.window)
        what = f"{streams} streams of" if streams > 1 else "A context of"
        return self._guard.allocating(
            f"{what} {settings.window} tokens",
            {
                "kv": kv * streams,
                "compute": compute_bytes or self._estimated_compute(settings, streams),
            },
            "Ask for a smaller window, or close a session.",
            more=more,
            untouched_bytes=host.graph_bytes(facts, len(loaded.header.tensors), settings.n_ubatch),
        )

    def _estimated_compute(self, settings: ContextSettings, streams: int) -> int:
        loaded = self._current
        return host.estimated_compute(
            loaded.facts,
            settings.window,
            loaded.gpu_layers,
            n_batch=settings.n_batch,
            n_ubatch=settings.n_ubatch,
            outputs=max(validate.SEQUENCES, streams),
        )


def _load_model(
    request: LoadOp,
    facts: ModelFacts,
    placement: ModelParameters,
    report: ReportProgress,
    cancelled: Cancelled,
) -> Any:
    stopped, told = False, 0.0

    @llama.llama_progress_callback  # type: ignore[untyped-decorator]
    def on_progress(fraction: float, _data: object) -> bool:
        nonlocal stopped, told
        if fraction >= min(told + 0.01, 1.0):
            told = fraction
            report("loading", fraction)
        stopped = stopped or cancelled()
        return not stopped

    parameters = placement.struct
    parameters.load_mode = llama.LLAMA_LOAD_MODE_MMAP
    # Weights that aren't numbers decode without an error. Looking costs 0.2 s a GiB, once it is
    # read; beyond that size they are found at the first logits.
    parameters.check_tensors = facts.weights_bytes <= probe.MAX_PROBED_BYTES
    parameters.progress_callback = on_progress
    engine_log.clear()
    if cancelled():
        raise _load_cancelled()
    handle = llama.llama_model_load_from_file(request.path.encode(), parameters)
    if handle and not stopped:
        return handle
    if handle:
        llama.llama_model_free(handle)
    if stopped:
        raise _load_cancelled()
    raise _engine_refusal(request)


def _engine_refusal(request: LoadOp) -> ModeldError:
    said, about = engine_log.words(), {"cause": "engine", "model": request.model}
    if reports.lacks_memory(said):
        return InsufficientMemory(
            f"The engine could not allocate the model {request.model!r}. It said: {said}. Free "
            "memory, choose a smaller model, or place its layers otherwise.",
            metadata=about,
        )
    return ModelLoadFailed(
        f"The engine refused the model {request.model!r}. It said: {said}.", metadata=about
    )


def _probed(engine: LlamaEngine, loaded: _Loaded) -> probe.Probed:
    kv_types = loaded.request.k_type, loaded.request.v_type
    try:
        found = probe.probed(
            engine.new_context, loaded.traits, loaded.tokenizer, loaded.facts, kv_types
        )
        loaded.shared = shared(
            lambda streams, window, company: engine._streams(
                streams, window, ("f16", "f16"), Gate(), company=company
            ),
            lambda window: engine.new_context(window, "f16", "f16"),
            loaded.traits,
            loaded.tokenizer,
            loaded.facts,
            flash_attn=loaded.request.flash_attn,
        )
        return found
    except SessionFatal as error:
        raise ModelLoadFailed(
            f"The model {loaded.request.model!r} loads but doesn't compute: {error.message}",
            metadata={"cause": "probe", "model": loaded.request.model},
        ) from None


def _load_cancelled() -> ModelLoadFailed:
    return ModelLoadFailed(
        "Loading was cancelled; nothing is loaded.", metadata={"cause": "cancelled"}
    )


def _refuse_unless_it_generates(loaded: _Loaded) -> None:
    why = why_not_generating(loaded.handle, loaded.header)
    if why:
        raise UnsupportedFeature(
            f"The model {loaded.request.model!r} can't be served for generation: {why}. "
            "Open a session with a model that generates.",
            metadata={"capability": "generate", "model": loaded.request.model},
        )
