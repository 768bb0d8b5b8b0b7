"""The vision executor: GenAI's vision-language pipeline, which keeps nothing between turns.

Owns the runs of it, their streaming and their end. Knows no prompt's making and no policy. Facts
about openvino-genai 2026.4.1 that decide how it is driven, each shown by a test here:

* It takes text, not tokens, and finds images in it by the model's own marker, in order.
* It samples ahead of whoever takes its tokens, and goes on for some tokens after a stop.
* Nothing is called before the first token, so that nothing can stop it until then.
* An exception that leaves the callback ends the process.
* A request that its cache can't hold raises; how many tokens one had is told when it is over.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import ContextOverflow, ModelLoadFailed, UnsupportedFeature
from modeld.shared.messages import DecodeIn, PlacedOut
from modeld.workers.engine import Cancelled, EngineContext, Measured
from modeld.workers.openvino import generation
from modeld.workers.openvino.blocks import BLOCK_TOKENS
from modeld.workers.openvino.generation import genai
from modeld.workers.openvino.native import PRECISION, ov, words
from modeld.workers.openvino.request import fatal

if TYPE_CHECKING:
    from modeld.workers.engine import Logits, State
    from modeld.workers.images import Pixels, PlacedImage, Prompted
    from modeld.workers.openvino.vision_model import VisionModel

log = logging.getLogger(__name__)

EXECUTOR = "vision"
POLL_S = 0.02  # between questions whether to go on, while the engine says nothing
# Beyond the largest window: for what the engine samples after a stop.
SPARE_BLOCKS = 1
# What the engine writes before and behind an image may become one token with the text there.
MERGES_AROUND = 2  # tokens an image
_DROPPED = "did not fit"  # in the engine's words about a request that its cache can't hold


class DoesNotFit(Exception):
    """The engine's cache is too small for a request."""


@dataclass(frozen=True)
class Told:
    """What the engine tells of a run when it is over, in tokens."""

    evaluated: int  # of the prompt, images included
    sampled: int
    score: float  # the sampled tokens' log-probabilities together; 0.0 where they weren't asked for


class VisionPipeline:
    """One loaded model under GenAI, with a cache for one request at a time."""

    def __init__(
        self, folder: Path, device: str, *, kv_type: str, blocks: int, threads: int
    ) -> None:
        """``blocks`` of ``BLOCK_TOKENS`` tokens are reserved, and touched as they are used.

        Raises ModelLoadFailed with the engine's own words.
        """
        self.folder, self.device, self.kv_type, self.threads = folder, device, kv_type, threads
        self.blocks = blocks
        self._engine: Any = None
        self._start(blocks)

    def _start(self, blocks: int) -> None:
        settings = genai.SchedulerConfig()
        settings.num_kv_blocks = blocks + SPARE_BLOCKS
        settings.cache_size = 0
        settings.enable_prefix_caching = False  # what it would reuse can't be told
        settings.use_cache_eviction = False
        settings.max_num_seqs = 1
        properties = {
            "KV_CACHE_PRECISION": self.kv_type,
            "INFERENCE_PRECISION_HINT": PRECISION,
            "INFERENCE_NUM_THREADS": self.threads,
        }
        self._engine = None  # not two of them at once
        try:
            self._engine = genai.VLMPipeline(
                str(self.folder), self.device, scheduler_config=settings, **properties
            )
        except Exception as error:
            raise ModelLoadFailed(
                f"GenAI's vision pipeline refused the model in {self.folder.name!r}. It said: "
                f"{words(error)}.",
                metadata={"cause": "engine", "executor": EXECUTOR},
            ) from None
        self.blocks = blocks
        self._tokenizer = self._engine.get_tokenizer()

    @property
    def tokens(self) -> int:
        """The largest prompt that the cache is meant to hold."""
        return self.blocks * BLOCK_TOKENS

    def grow(self, blocks: int) -> None:
        """Load the model anew with a larger cache. Raises ModelLoadFailed with the old one back."""
        before = self.blocks
        try:
            self._start(blocks)
        except ModelLoadFailed:
            self._start(before)
            raise

    def encode(self, text: str) -> list[int]:
        """As the engine's own tokenizer does: control tokens are found in text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).input_ids.data
        return [int(one) for one in ids[0]]

    def start(self, text: str, images: Sequence[Pixels], config: Any) -> Run:
        """Begin a run, which nothing else may run beside; ``images`` in the order of markers."""
        config.apply_chat_template = False
        return Run(
            self._engine, text, [ov.Tensor(np.ascontiguousarray(one)) for one in images], config
        )

    def whole(self, text: str, images: Sequence[Pixels], most: int) -> tuple[list[int], Told]:
        """The likeliest ``most`` tokens after a prompt. Raises DoesNotFit, and SessionFatal."""
        config = genai.GenerationConfig(max_new_tokens=most, ignore_eos=True, logprobs=1)
        run = self.start(text, images, config)
        tokens = []
        try:
            while (token := run.next(_never)) is not None:
                tokens.append(token)
        finally:
            told = run.finish()
        return tokens, told

    def close(self) -> None:
        """Free it. Idempotent."""
        self._engine = self._tokenizer = None


class Run:
    """One call of the engine, in a thread of its own. Not thread-safe beyond that; finish it."""

    def __init__(self, engine: Any, text: str, images: list[Any], config: Any) -> None:
        self._tokens: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._result: Any = None
        self._streamer = _streamer(self._take)
        self._thread = threading.Thread(
            target=self._run, args=(engine, text, images, config), name="vision", daemon=True
        )
        self._thread.start()

    def _run(self, engine: Any, text: str, images: list[Any], config: Any) -> None:
        try:
            self._result = engine.generate(
                text, images=images, generation_config=config, streamer=self._streamer
            )
        except BaseException as error:
            self._failure = self._failure or error
        self._tokens.put(None)

    def _take(self, tokens: list[int]) -> bool:
        """Whether to go on. Called from a thread of the engine's: nothing may be raised there."""
        try:
            for token in tokens:
                self._tokens.put(int(token))
        except BaseException as error:
            self._failure = self._failure or error
            return False
        return not self._stop.is_set()

    def next(self, cancelled: Cancelled) -> int | None:
        """The next token; None when there are no more, or when it is cancelled and has stopped."""
        while True:
            try:
                token = self._tokens.get(timeout=POLL_S)
            except queue.Empty:
                token = -1
            if token is None:
                self._tokens.put(None)  # for whoever asks again
                return None
            if cancelled():
                self._stop.set()
            elif token >= 0:
                return token

    def finish(self) -> Told:
        """Stop it, wait for it, and say what it did. Raises DoesNotFit, and SessionFatal."""
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            if _DROPPED in str(self._failure):
                raise DoesNotFit(words(self._failure)) from None
            raise fatal(f"a run failed ({words(self._failure)})", "engine") from None
        metrics = self._result.perf_metrics
        scores = self._result.scores
        return Told(
            int(metrics.get_num_input_tokens()),
            int(metrics.get_num_generated_tokens()),
            float(scores[0]) if len(scores) else 0.0,
        )


def _streamer(take: Any) -> Any:
    class Streamer(genai.StreamerBase):  # type: ignore[misc]
        def write(self, token: Any) -> Any:
            tokens = [token] if isinstance(token, int) else list(token)
            status = genai.StreamingStatus
            return status.RUNNING if take(tokens) else status.STOP

        def end(self) -> None:
            pass

    return Streamer()


class VisionContext:
    """See ``EngineContext``, ``SelfSampling`` and ``Rereading``: a record of how many tokens a
    session's prompt has, which the engine evaluates when it is asked for an answer.
    """

    def __init__(self, model: VisionModel, window: int, kv_bytes: int) -> None:
        self._model, self.window, self.kv_bytes = model, window, kv_bytes
        self.state_block = BLOCK_TOKENS
        self.compute_bytes = 0  # the model's, touched when it was loaded
        self.placed = [PlacedOut(device="CPU", kv_bytes=kv_bytes)]
        self.measured: Measured | None = None
        self._length = 0
        self._open = True
        self._text = ""
        self._images: tuple[PlacedImage, ...] = ()
        self._expected = 0  # tokens of both

    # --- its record ----------------------------------------------------------------------------

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        """Nothing is evaluated: the tokens are noted."""
        self._check_room(position, len(tokens))
        self._length = position + len(tokens)
        self._note_nothing_done()
        return len(tokens)

    def confirm(self, tokens: int, *, cancelled: Cancelled) -> int:
        """See the protocol. Nothing is evaluated."""
        if not 0 < tokens <= self._length or not self._open:
            raise fatal(f"{tokens} of {self._length} tokens were asked for", "bookkeeping")
        self._note_nothing_done()
        return tokens

    def step(self, token: int, position: int) -> None:
        """See the protocol."""
        self.evaluate([token], position, cancelled=_never)

    def _note_nothing_done(self) -> None:
        self.measured = Measured(reused=0, lower_bound=False, evaluated=0, held=self._length)

    def _check_room(self, position: int, count: int) -> None:
        if not self._open:
            raise fatal("its context is closed", "bookkeeping")
        if position != self._length:
            raise fatal(
                f"tokens were to go to position {position}, it holds {self._length}", "bookkeeping"
            )
        if position + count > self.window:
            raise ContextOverflow(
                f"{position} and {count} more tokens exceed the window of {self.window}.",
                metadata={"resident": position, "additional": count, "window": self.window},
            )

    def logits(self) -> Logits:
        """Raises UnsupportedFeature: there are none to be had."""
        raise UnsupportedFeature(
            "GenAI's pipeline samples by itself and doesn't give its logits.",
            metadata={"capability": "decode.logprobs", "executor": EXECUTOR},
        )

    # --- sampling ------------------------------------------------------------------------------

    def check(self, options: DecodeIn) -> None:
        """See the protocol."""
        generation.check(options, EXECUTOR)

    def reread(self, prompt: Prompted, answer: str) -> None:
        """See the protocol."""
        if not self._model.sees:  # else that was checked when the prompt was assembled
            self._model.prompts.check(prompt)
        text = self._model.prompts.handed(prompt) + answer
        self._expected = self._model.prompts.count(text, prompt.images)
        self._text, self._images = text, prompt.images
        if self._expected > self.window:
            raise ContextOverflow(
                f"The prompt and the answer so far take {self._expected} tokens, and the window "
                f"is {self.window}. Open a session with a larger one.",
                metadata={"requested_tokens": self._expected, "effective": self.window},
            )

    def generate(
        self, tokens: Sequence[int], options: DecodeIn, most: int, *, cancelled: Cancelled
    ) -> Generator[int, None, None]:
        """See the protocol. All is evaluated anew, as the text that ``reread`` was given last."""
        count = len(tokens)
        self._check_room(self._length, count - self._length)
        config = generation.decode_config(options, most, echo=False)
        run = self._model.pipeline.start(self._text, [one.pixels for one in self._images], config)
        self._length, taken = count, 0
        self.measured = Measured(0, False, self._expected, count)
        try:
            # Later ones come one by one, and whoever takes them asks for itself.
            while (token := run.next(_never if taken else cancelled)) is not None:
                self._length += taken > 0
                taken += 1
                yield token
        finally:
            told = self._finished(run)
            ahead = max(0, told.sampled - taken)
            self.measured = Measured(0, False, told.evaluated, self._length, ahead)

    def _finished(self, run: Run) -> Told:
        """What the engine evaluated must be what was counted, but for merges around images."""
        try:
            told = run.finish()
        except DoesNotFit as error:
            raise fatal(f"its cache can't hold the request ({error})", "engine_cache") from None
        most = self._expected
        if not most - MERGES_AROUND * len(self._images) <= told.evaluated <= most:
            raise fatal(
                f"a prompt of {most} tokens was asked for, it evaluated {told.evaluated}",
                "token_count",
            )
        return told

    # --- going back and copying ----------------------------------------------------------------

    def can_trim(self, keep: int) -> bool:
        """See the protocol: the record gets shorter."""
        return self._open and 0 <= keep <= self._length

    def trim(self, keep: int) -> None:
        """See the protocol."""
        if not self.can_trim(keep):
            raise fatal(f"it can't go back from {self._length} to {keep} tokens", "bookkeeping")
        self._length = keep

    def copy_prefix_from(self, source: EngineContext, tokens: int) -> bool:
        """See the protocol. A record is copied; nothing else is there."""
        self._length = 0
        if not isinstance(source, VisionContext) or source._model is not self._model:
            return False
        if not 0 < tokens <= min(self.window, source._length) or not self._open:
            return False
        self._length = tokens
        return True

    # --- its bytes -----------------------------------------------------------------------------

    def export_state(self, begin: int, end: int) -> State:
        """Raises UnsupportedFeature."""
        raise UnsupportedFeature(
            "The vision executor keeps no KV between turns, so that none can be kept or moved.",
            metadata={"capability": "state.blocks", "executor": EXECUTOR},
        )

    def import_state(self, state: State, end: int) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """See the protocol."""
        self._open, self._length = False, 0


def _never() -> bool:
    return False
