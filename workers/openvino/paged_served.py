"""What the engine holds while a model is run block by block, and what it reports of it.

Owns the way from a folder to a proved paged model. Knows no sessions, prompts or policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import (
    InvalidRequest,
    ModelLoadFailed,
    SessionFatal,
    UnsupportedFeature,
)
from modeld.shared.host_memory import host_memory
from modeld.shared.ir_texts import IrTexts
from modeld.shared.messages import LoadOp, LoadResult, PlacedOut
from modeld.workers.batch_probe import STREAMS, Shared, compared
from modeld.workers.batching import Gate
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.openvino import adapters, probe
from modeld.workers.openvino.blocks import BLOCK_TOKENS, BlockPool
from modeld.workers.openvino.graph import Compiled, NotPaged, compile_paged, read_model, to_paged
from modeld.workers.openvino.native import core
from modeld.workers.openvino.paged import CHUNK_TOKENS, PagedContext, PagedModel
from modeld.workers.openvino.proof import paged_loop_works
from modeld.workers.openvino.streams import MAX_STREAMS, PagedStreams
from modeld.workers.openvino.tokenizer import OpenVinoTokenizer

# Every native call releases the GIL, but the graph's surgery is Python and holds it in pieces of
# up to 0.25 s. The rest is room for a loaded machine.
GAPS_S = {"load": 1.0, "evaluate": 0.25, "copy": 0.25, "tokenize": 0.25}
PROBE_BLOCKS = 32  # a whole chunk, and some short sequences
# Tokens of the prompts by which streams are tried: a sequence of more than a block is attended by
# other routines when it is alone.
TRIED_LENGTHS = (2, BLOCK_TOKENS + 8, 2, BLOCK_TOKENS + 2)


class PagedServed:
    """A folder's model in the paged executor. Close it."""

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
        """Raises UnsupportedFeature (capability ``generate``) where the model can't be driven block
        by block, ModelLoadFailed, InsufficientMemory, and what the library raises.
        """
        self.request, self.texts = request, texts
        self._facts, self._threads, self._guard = facts, threads, guard
        if not (works := paged_loop_works()):
            raise _not_paged(f"The paged executor doesn't work with this OpenVINO: {works.reason}")
        folder = Path(request.path)
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
            raise _not_paged(f"The model {request.model!r}: {error}") from None
        _check_read_back(request, compiled.k_type, compiled.v_type)
        pool = BlockPool(compiled.ports, _blocks(request, facts, compiled))
        self.paged = PagedModel(compiled, pool, min(request.n_ubatch, CHUNK_TOKENS), applied)
        self.tokenizer = OpenVinoTokenizer(folder, core(), compiled.vocabulary)
        self._probed: probe.Probed | None = None
        self._shared = Shared("unknown: not tried yet")

    def prove(self) -> None:
        """Try it; before anything else is done with it. Not under a bound on this process's memory:
        with its first inference the library takes address space as large as the pool's, which
        nothing touches. Raises ModelLoadFailed where the model doesn't compute.
        """
        request = self.request
        try:
            self._probed = probe.probed(self.paged, self.tokenizer.vocab_size)
            self._shared = self._tried_together()
        except SessionFatal as error:
            raise ModelLoadFailed(
                f"The model {request.model!r} loads but doesn't compute: {error.message}",
                metadata={"cause": "probe", "model": request.model},
            ) from None

    def _tried_together(self) -> Shared:
        """Whether neighbours in a batch change a stream's results; leaves nothing behind."""
        window = max(TRIED_LENGTHS) + 1
        with (
            contextlib.closing(self.paged.new_context(window, lambda: 1 << 62)) as own,
            contextlib.closing(
                PagedStreams(self.paged, STREAMS, window, Gate(), lambda: 1 << 62)
            ) as batch,
        ):
            shared = compared(own, batch, self.tokenizer.vocab_size, TRIED_LENGTHS)
        if self.paged.exact:
            return shared
        return replace(
            shared,
            capability=f"{shared.capability.replace(': exact', '')}; but "
            f"{self.paged.compiled.k_type} keys are scaled by block, so that results depend on how "
            "a prompt is split, and that on the neighbours: not exact",
        )

    def new_context(self, window: int, k_type: str, v_type: str) -> PagedContext:
        """InvalidRequest for other KV types than the model was loaded with; InsufficientMemory."""
        with self._allocating(window, k_type, v_type):
            return self.paged.new_context(window, self._guard.spare_bytes)

    def new_batch(
        self, streams: int, window: int, k_type: str, v_type: str, gate: Gate
    ) -> PagedStreams:
        """See ``BatchingEngine``; raises as ``new_context`` does."""
        if not 1 <= streams <= MAX_STREAMS:
            raise InvalidRequest.of("streams", streams, f"1 to {MAX_STREAMS}")
        with self._allocating(window, k_type, v_type, streams):
            # With company whatever was tried: when a lone sequence takes other routines hangs on
            # its length too.
            return PagedStreams(
                self.paged, streams, window, gate, self._guard.spare_bytes, company=True
            )

    def _allocating(
        self, window: int, k_type: str, v_type: str, streams: int = 1
    ) -> AbstractContextManager[None]:
        """The guard over so many sequences of ``window`` tokens; raises as ``new_context`` does."""
        compiled, pool = self.paged.compiled, self.paged.pool
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
        return self._guard.allocating(
            f"{streams} streams of {window} tokens"
            if streams > 1
            else f"A context of {window} tokens",
            {"kv": kv * streams, "promised": pool.promised_bytes},
            "Ask for a smaller window, or close a session.",
            more={"window": window},
        )

    def result(self, seconds: float) -> LoadResult:
        """What the load reports, once it is proved."""
        facts, compiled, probed = self._facts, self.paged.compiled, self._probed
        assert probed is not None
        return LoadResult(
            description=f"{facts.architecture or 'unknown'} IR {facts.quantization}".strip(),
            vocab=compiled.vocabulary,
            train_context=facts.model_max,
            weights_bytes=facts.weights_bytes,
            add_bos=self.tokenizer.add_bos,
            template_digest=self.texts.digest,
            template_supports_tools=False,  # known only by rendering, which isn't done here
            threads=self._threads,
            capabilities={**probed.capabilities, "layout.batched": self._shared.capability},
            seconds=seconds,
            placed=[PlacedOut(device="CPU", weights_bytes=facts.weights_bytes)],
            traits={"layers": compiled.layers, "vocabulary": compiled.vocabulary},
            executor="paged",
            executor_reason=probed.reason,
            kv_untouched=True,
            exact_state_types=(
                [f"{compiled.k_type}/{compiled.v_type}"] if probed.exact_state else []
            ),
            longest_gap_s=GAPS_S,
        )

    def close(self) -> None:
        """Free it. Idempotent."""
        self.paged.close()


def _blocks(request: LoadOp, facts: ModelFacts, compiled: Compiled) -> int:
    """All that sessions could ever have: each the model's whole window, or what the machine holds.

    It is address space only; the probe's own sequences come on top.
    """
    block = sum(port.block_bytes for port in compiled.ports)
    machine = max(1, host_memory().total_bytes // block)
    if not facts.model_max:
        return machine
    sessions = request.max_contexts * -(-facts.model_max // BLOCK_TOKENS)
    return min(machine, sessions) + PROBE_BLOCKS


def _not_paged(why: str) -> UnsupportedFeature:
    return UnsupportedFeature(f"{why}.", metadata={"capability": "generate"})


def _check_read_back(request: LoadOp, k_type: str, v_type: str) -> None:
    if (k_type, v_type) != (request.k_type, request.v_type):
        raise ModelLoadFailed(
            f"A KV cache of {request.k_type} was asked for, the engine made K {k_type} and "
            f"V {v_type}. Choose another type.",
            metadata={"cause": "kv_type", "k_type": k_type, "v_type": v_type},
        )
