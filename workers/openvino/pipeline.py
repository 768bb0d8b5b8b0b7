"""The pipeline executor: GenAI's continuous batching with its own prefix cache and sampler.

Owns the requests to it and the measurement of what its cache gave. Knows no prompt or policy.

The cache drops what it likes without a word, so nothing here is believed from a record: how many
tokens a request reused is read off the engine each time. Four facts about openvino-genai 2026.4.1,
each of which a test here shows, decide how it is asked:

* Whole blocks are found by the tokens up to their end. The last, partly filled block of a request
  is found too, by a prompt that goes on from exactly where that request ended; and only so, until
  a later request has gone on from it into another block.
* A request cancelled inside a block leaves that block findable as if it were whole, with cells
  never written. So no request may stop there, and if one had to, the cache is thrown away.
* With ``echo`` and ``logprobs`` a request tells a log-probability for each token that it evaluated,
  whose number is exact. It costs the output layer for them, so only short evaluations ask for it.
* Otherwise the blocks in use after the first step tell: reused and evaluated tokens lie in them.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import (
    InsufficientMemory,
    InvalidRequest,
    ModelLoadFailed,
)
from modeld.shared.messages import DecodeIn
from modeld.workers.engine import Cancelled, Measured
from modeld.workers.openvino import generation
from modeld.workers.openvino.blocks import BLOCK_TOKENS
from modeld.workers.openvino.ends import Ends
from modeld.workers.openvino.generation import genai
from modeld.workers.openvino.native import PRECISION, ov, words
from modeld.workers.openvino.piped import PipelineContext
from modeld.workers.openvino.request import Request, fatal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]

log = logging.getLogger(__name__)

# Tokens a step: it can't be cancelled inside one, and holds the GIL. A multiple of a block, so
# that a prompt that began at one stops at one.
CHUNK_TOKENS = 64
MAX_ENDS = 1 << 17
_METRIC_BITS_OF_U4 = 8  # the engine's own count of a 4-bit cache takes a byte an element


class Pipeline:
    """One loaded model under GenAI, and the blocks that its contexts share."""

    def __init__(
        self,
        folder: Path,
        device: str,
        *,
        kv_type: str,
        total_blocks: int,
        threads: int,
        vocabulary: int,
        chunk: int = CHUNK_TOKENS,
    ) -> None:
        """``total_blocks`` blocks of ``BLOCK_TOKENS`` tokens are reserved, and touched as they
        are used; they can grow. Raises ModelLoadFailed with the engine's own words.
        """
        if chunk % BLOCK_TOKENS or chunk < 2 * BLOCK_TOKENS:
            raise InvalidRequest.of("chunk", chunk, f"a multiple of {BLOCK_TOKENS}, not one alone")
        if total_blocks < 1:
            raise InvalidRequest.of("total_blocks", total_blocks, "1 or more")
        self.folder, self.device, self.kv_type = folder, device, kv_type
        self.blocks, self.threads, self.chunk = total_blocks, threads, chunk
        self.vocabulary = vocabulary
        self.contexts: set[PipelineContext] = set()
        self.rebuilt = 0  # how often the cache was thrown away
        self.unsound = False  # a block may be found that was never filled
        self._ends = Ends()
        self._requests = 0
        self._engine: Any = None
        self._step_s = 0.0
        self._start()
        self.block_bytes = self._tried()

    # --- the engine ---------------------------------------------------------------------------

    def _start(self) -> None:
        """Make the engine, with an empty cache."""
        settings = genai.SchedulerConfig()
        settings.num_kv_blocks = self.blocks
        settings.cache_size = 0
        settings.max_num_batched_tokens = self.chunk
        settings.enable_prefix_caching = True
        settings.use_cache_eviction = False  # with a prefix cache it leaks blocks
        settings.max_num_seqs = 1
        properties = {
            "KV_CACHE_PRECISION": self.kv_type,
            "INFERENCE_PRECISION_HINT": PRECISION,
            "INFERENCE_NUM_THREADS": self.threads,
        }
        self._engine = None
        self._ends.clear()
        self.unsound = False
        try:
            self._engine = genai.ContinuousBatchingPipeline(
                str(self.folder), settings, self.device, properties
            )
            self._warm_up()
        except Exception as error:
            raise ModelLoadFailed(
                f"GenAI's pipeline refused the model in {self.folder.name!r}. It said: "
                f"{words(error)}.",
                metadata={"cause": "engine", "executor": "pipeline"},
            ) from None

    def rebuild(self, blocks: int = 0) -> None:
        """Throw the cache away, and make it of ``blocks`` blocks (0: as many as there were)."""
        log.info("the pipeline's cache is made anew")
        self.blocks = max(self.blocks, blocks)
        self.rebuilt += 1
        self._start()

    def _warm_up(self) -> None:
        """Evaluate a chunk so that kernels are compiled: the one call that leaves the GIL alone."""
        ids = self._some_ids()
        config = genai.GenerationConfig(max_new_tokens=1, ignore_eos=True)
        self._engine.generate([ov.Tensor(ids[np.newaxis])], [config])
        self.ended(ids)

    def _tried(self) -> int:
        """Take one step, to know how long they are; bytes of a block."""
        ids = (self._some_ids() + 1) % self.vocabulary
        try:
            request = Request(
                self, ids, generation.prompt_config(echo=True), echo=True, aligned=True
            )
            began_s = time.monotonic()
            request.step()
            self._step_s = time.monotonic() - began_s
            if not request.sampled:
                raise fatal("a request gave no token", "probe")
            request.finish()
            size = int(self._engine.get_metrics().kv_cache_size_in_bytes)
        except Exception as error:
            raise ModelLoadFailed(
                f"The model loads but doesn't compute: {words(error)}.",
                metadata={"cause": "probe", "executor": "pipeline"},
            ) from None
        if self.kv_type == "u4":
            size = size * 4 // _METRIC_BITS_OF_U4
        return size // self.blocks

    def _some_ids(self) -> Ids:
        count = min(self.chunk, self.blocks * BLOCK_TOKENS)
        return np.arange(11, 11 + count, dtype=np.int64) % self.vocabulary

    def longest_gap_s(self) -> dict[str, float]:
        """How long each kind of call may hold the GIL, in seconds: one step of a chunk.

        A later step takes longer, having more to attend to, and the machine may be loaded.
        """
        step_s = 1.0 + 4 * self._step_s
        return {"load": step_s, "evaluate": step_s, "copy": 0.25, "tokenize": 0.25}

    def add(self, ids: Ids, config: Any) -> Any:
        self._requests += 1
        return self._engine.add_request(self._requests, ov.Tensor(ids[np.newaxis]), config)

    def step(self) -> int:
        """Blocks in use after one step."""
        self._engine.step()
        usage: float = self._engine.get_metrics().cache_usage  # percent
        return round(usage * self.blocks / 100)

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_non_finished_requests())

    # --- evaluating ---------------------------------------------------------------------------

    def evaluate(self, ids: Ids, known: int, cancelled: Cancelled) -> Measured | None:
        """Have the cache hold all of ``ids``; None where it was cancelled before the first step.

        ``known`` is how many of them a record says it holds. A prompt that may go on from inside a
        block is first brought to the next block's end, so that what follows can be cancelled at
        every step. (Not to that block's: until another one follows, the engine finds it by its
        first end alone.) Where that costs a token more, it counts as not reused.
        """
        self.prepare()
        end = self._ends.longest(ids)
        whole = -(-end // BLOCK_TOKENS) * BLOCK_TOKENS + BLOCK_TOKENS if end else 0
        if not 0 < whole < len(ids):
            return self._evaluate(ids, max(known, end), cancelled, aligned=end == 0)
        first = self._evaluate(ids[:whole], max(min(known, whole), end), cancelled, aligned=False)
        if first is None or first.held < whole:
            return first
        rest = self._evaluate(ids, max(known, whole), cancelled, aligned=True)
        if rest is None:
            return first
        evaluated = first.evaluated + rest.evaluated
        bound = first.lower_bound or rest.lower_bound
        return Measured(max(0, rest.held - evaluated), bound, evaluated, rest.held)

    def _evaluate(
        self, ids: Ids, known: int, cancelled: Cancelled, *, aligned: bool
    ) -> Measured | None:
        echo = len(ids) - known <= self.chunk
        if cancelled():
            return None
        request = Request(
            self, ids, generation.prompt_config(echo=echo), echo=echo, aligned=aligned
        )
        while not request.answered:
            if request.steps and cancelled():
                return request.give_up()
            request.step()
        request.finish()
        return request.measured

    def ended(self, ids: Ids) -> None:
        """A request's KV ended here."""
        self._ends.add(ids)

    def decode(self, ids: Ids, options: DecodeIn, most: int) -> Request:
        """A request for an answer to a prompt that the cache holds."""
        self.prepare()
        config = generation.decode_config(options, most, echo=True)
        return Request(self, ids, config, echo=True, aligned=False)

    # --- contexts -----------------------------------------------------------------------------

    @property
    def reserved_blocks(self) -> int:
        return sum(context.window // BLOCK_TOKENS for context in self.contexts)

    def needed_blocks(self, window: int) -> int:
        """Blocks that a context of ``window`` tokens adds to those that are there."""
        return max(0, self.reserved_blocks + -(-window // BLOCK_TOKENS) - self.blocks)

    def new_context(self, window: int) -> PipelineContext:
        """The cache grows for it where it must, which empties it. Raises InvalidRequest, and
        InsufficientMemory with the engine's words.
        """
        if window < 1:
            raise InvalidRequest.of("window", window, "1 token or more")
        if more := self.needed_blocks(window):
            blocks = self.blocks
            try:
                self.rebuild(blocks + more)
            except ModelLoadFailed as error:
                self.blocks = blocks
                self._start()
                raise InsufficientMemory(
                    f"The engine can't make a cache of {blocks + more} blocks. {error.message}",
                    metadata={"needed_blocks": blocks + more, "cause": "engine"},
                ) from None
        context = PipelineContext(self, -(-window // BLOCK_TOKENS) * BLOCK_TOKENS)
        self.contexts.add(context)
        return context

    def prepare(self) -> None:
        """Before a request: nothing runs, the cache is sound, the record of ends stays bounded."""
        if self.busy:
            raise fatal("another request is still running in it", "bookkeeping")
        if self.unsound or len(self._ends) > MAX_ENDS:
            self.rebuild()

    def close(self) -> None:
        """Free it; the contexts first. Idempotent."""
        for context in list(self.contexts):
            context.close()
        self._engine = None

    def capabilities(self) -> dict[str, str]:
        """Name → ``"yes: evidence"``, ``"no: …"`` or ``"unknown: …"``."""
        no_state = "no: GenAI's pipeline gives no access to its KV"
        return {
            "executor": "pipeline: GenAI's continuous batching, tried at load",
            "recompute": "yes: any prefix is evaluated again from its tokens",
            "tail_removal": (
                "no: the engine forgets nothing on request; a shorter prompt is asked again, and "
                f"its prefix cache finds whole blocks of {BLOCK_TOKENS} tokens of it"
            ),
            "middle_removal": no_state,
            "position_shift": no_state,
            "state.blocks": no_state,
            "state.whole": no_state,
            "cold_store": no_state,
            "overflow.evict": no_state,
            "snapshot": no_state,
            "durable": no_state,
            "prefix_copy": "yes: contexts share the engine's prefix cache; nothing is copied",
            "layout.batched": "no: GenAI's pipeline serves one request after another here",
            "exact_warm": (
                "unknown: the engine gives no logits to compare; a prompt that goes on from inside "
                "a block is split otherwise than a cold one"
            ),
            "sparse_attention": "no: every layer attends as the model was exported",
            "structured_output": "no: not served by this executor yet",
            **generation.CAPABILITIES,
        }
