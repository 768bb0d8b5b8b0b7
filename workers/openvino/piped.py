"""One session's context under the pipeline executor: the tokens whose KV the cache is asked for.

Validates what the engine would take without a word. Knows no prompt or policy.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.errors import ContextOverflow, InvalidRequest, UnsupportedFeature
from modeld.shared.messages import DecodeIn, PlacedOut
from modeld.workers.engine import Cancelled, EngineContext, Measured
from modeld.workers.openvino import generation
from modeld.workers.openvino.blocks import BLOCK_TOKENS
from modeld.workers.openvino.request import Request, fatal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from modeld.workers.engine import Logits, State
    from modeld.workers.openvino.pipeline import Pipeline

    Ids = NDArray[np.int64]


class PipelineContext:
    """See ``EngineContext`` and ``SelfSampling``: the tokens of which the cache is asked to hold
    the KV. Not thread-safe: the engine thread only.
    """

    state_block = BLOCK_TOKENS

    def __init__(self, pipeline: Pipeline, window: int) -> None:
        self._pipeline, self.window = pipeline, window
        self.kv_bytes = window // BLOCK_TOKENS * pipeline.block_bytes
        self.compute_bytes = 0  # the model's, touched when it was loaded
        self.placed = [PlacedOut(device="CPU", kv_bytes=self.kv_bytes)]
        self.measured: Measured | None = None
        self._ids = np.zeros(window, dtype=np.int64)
        self._length = 0
        self._open = True

    # --- evaluating --------------------------------------------------------------------------

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        """See the protocol. What the cache had dropped is evaluated again: see ``measured``."""
        self._check_room(position, len(tokens))
        self._ids[position : position + len(tokens)] = self._checked(tokens)
        return max(0, self._ask(position + len(tokens), cancelled) - position)

    def confirm(self, tokens: int, *, cancelled: Cancelled) -> int:
        """See the protocol. What lies behind ``tokens`` stays on the record."""
        if not 0 < tokens <= self._length or not self._open:
            raise fatal(f"{tokens} of {self._length} tokens were asked for", "bookkeeping")
        length = self._length
        held = self._ask(tokens, cancelled)
        if held >= tokens:
            self._length = length
        return held

    def step(self, token: int, position: int) -> None:
        """See the protocol."""
        self.evaluate([token], position, cancelled=_never)

    def _ask(self, count: int, cancelled: Cancelled) -> int:
        """How many of the first ``count`` ids it holds now."""
        if not count:
            return 0
        known = min(self._length, count)
        measured = self._pipeline.evaluate(self._ids[:count], known, cancelled)
        self.measured = measured or Measured(
            reused=known, lower_bound=False, evaluated=0, held=known
        )
        self._length = self.measured.held
        return self._length

    def _check_room(self, position: int, count: int) -> None:
        if not self._open:
            raise fatal("its context is closed", "bookkeeping")
        if position != self._length:
            raise fatal(
                f"tokens were to go to position {position}, it holds {self._length}", "bookkeeping"
            )
        if position + count > self.window:
            raise ContextOverflow(
                f"{position} resident and {count} more tokens exceed the window of {self.window}.",
                metadata={"resident": position, "additional": count, "window": self.window},
            )

    def _checked(self, tokens: Sequence[int]) -> Ids:
        """The engine takes any id without a word, and answers nonsense."""
        ids = np.asarray(tokens, dtype=np.int64)
        vocabulary = self._pipeline.vocabulary
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            outside = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise InvalidRequest.of("token", outside, f"0 to {vocabulary - 1}")
        return ids

    def logits(self) -> Logits:
        """Raises UnsupportedFeature: there are none to be had."""
        raise UnsupportedFeature(
            "GenAI's pipeline samples by itself and doesn't give its logits.",
            metadata={"capability": "decode.logprobs", "executor": "pipeline"},
        )

    # --- sampling ----------------------------------------------------------------------------

    def check(self, options: DecodeIn) -> None:
        """See the protocol."""
        generation.check(options)

    def generate(
        self, tokens: Sequence[int], options: DecodeIn, most: int, *, cancelled: Cancelled
    ) -> Generator[int, None, None]:
        """See the protocol."""
        count = len(tokens)
        known = min(self._length, count)
        self._length = known
        self._check_room(known, count - known)
        self._ids[:count] = self._checked(tokens)
        before = None
        if count - known > self._pipeline.chunk:  # else the request itself evaluates them at once
            if self._ask(count, cancelled) < count:
                return
            before = self.measured
        request = self._pipeline.decode(self._ids[:count].copy(), options, most)
        while not request.answered:
            if request.steps and cancelled():
                self.measured = request.give_up()
                self._length = self.measured.held
                return
            request.step()
        self.measured = _together(before, request.measured)
        self._length = count
        try:
            yield from self._answer(request)
        finally:
            request.finish()

    def _answer(self, request: Request) -> Generator[int, None, None]:
        while True:
            for token in request.read():
                yield token
                if self._length < self.window:
                    self._ids[self._length] = token
            if request.done:
                return
            request.step()
            self._length += 1

    # --- going back and copying --------------------------------------------------------------

    def can_trim(self, keep: int) -> bool:
        """See the protocol: the record gets shorter, and the cache is asked again."""
        return self._open and 0 <= keep <= self._length

    def trim(self, keep: int) -> None:
        """See the protocol."""
        if not self.can_trim(keep):
            raise fatal(f"it can't go back from {self._length} to {keep} tokens", "bookkeeping")
        self._length = keep

    def copy_prefix_from(self, source: EngineContext, tokens: int) -> bool:
        """See the protocol. Both ask the same cache, so there is nothing to copy."""
        self._length = 0
        if not isinstance(source, PipelineContext) or source._pipeline is not self._pipeline:
            return False
        if not 0 < tokens <= min(self.window, source._length) or not self._open:
            return False
        self._ids[:tokens] = source._ids[:tokens]
        self._length = tokens
        return True

    # --- its bytes ---------------------------------------------------------------------------

    def export_state(self, begin: int, end: int) -> State:
        """Raises UnsupportedFeature."""
        raise UnsupportedFeature(
            "GenAI's pipeline gives no access to its KV, so that none can be kept or moved.",
            metadata={"capability": "state.blocks", "executor": "pipeline"},
        )

    def import_state(self, state: State, end: int) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """See the protocol. What the cache holds of it stays findable."""
        self._open, self._length = False, 0
        self._pipeline.contexts.discard(self)


def _together(before: Measured | None, last: Measured | None) -> Measured | None:
    """Of an evaluation and the request after it, which evaluates a token or so again."""
    if before is None or last is None:
        return last
    evaluated = before.evaluated + last.evaluated
    return Measured(before.reused, before.lower_bound, evaluated, last.held)


def _never() -> bool:
    return False
