"""One request to GenAI's pipeline: its steps, what it was seen to reuse, and its end.

Owns the reading of the engine's silent failures. Knows no session and no prompt.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import SessionFatal
from modeld.workers.engine import Measured
from modeld.workers.openvino.blocks import BLOCK_TOKENS
from modeld.workers.openvino.generation import genai
from modeld.workers.openvino.native import words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from modeld.workers.openvino.pipeline import Pipeline

    Ids = NDArray[np.int64]


def fatal(what: str, cause: str) -> SessionFatal:
    """The engine did what leaves its state unknown."""
    return SessionFatal(
        f"GenAI's pipeline can't be trusted with this session: {what}. Open a new session.",
        metadata={"cause": cause, "executor": "pipeline"},
    )


class Request:
    """One request to the engine, stepped to its end or given up; nothing else runs meanwhile."""

    def __init__(
        self, pipeline: Pipeline, ids: Ids, config: Any, *, echo: bool = False, aligned: bool
    ) -> None:
        """``aligned``: what it reuses ends at a block's end, unless it is all but the last token;
        ``echo`` is as in its config.
        """
        self._pipeline, self._ids, self._echo, self._aligned = pipeline, ids, echo, aligned
        self.steps = 0
        self.measured: Measured | None = None
        self.sampled: list[int] = []
        self._unread: list[int] = []
        self._used = 0  # blocks after the first step
        try:
            self._handle = pipeline.add(ids, config)
        except Exception as error:
            raise fatal(f"it took no request ({words(error)})", "engine") from None

    @property
    def answered(self) -> bool:
        """Whether the prompt is evaluated and its first token sampled."""
        return self.measured is not None

    @property
    def done(self) -> bool:
        return not self._pipeline.busy

    def step(self) -> None:
        """One chunk of the prompt, or one token. Raises SessionFatal where the engine gives up,
        which it does without a word: no exception, only a status.
        """
        try:
            used = self._pipeline.step()
            self.steps += 1
            self._used = self._used or used
            while self._handle.can_read():
                for output in self._handle.read().values():
                    self._take(output)
        except SessionFatal:
            raise
        except Exception as error:
            self._drop()
            raise fatal(f"a step failed ({words(error)})", "engine") from None
        if self._handle.get_status() == genai.GenerationStatus.IGNORED:
            raise fatal(
                f"it gave up a request of {len(self._ids)} tokens after {len(self.sampled)} "
                "sampled ones: its cache is too small for it",
                "engine_cache",
            )

    def _take(self, output: Any) -> None:
        tokens = list(output.generated_ids)
        if not self.answered:
            if self._echo:
                tokens = tokens[len(self._ids) :]
            self.measured = self._measure(len(output.generated_log_probs))
        self.sampled += tokens
        self._unread += tokens

    def _measure(self, told: int) -> Measured:
        """``told``: log-probabilities in the first answer."""
        count, chunk = len(self._ids), self._pipeline.chunk
        if self._echo:
            # One for each token evaluated; where nothing was reused, one more for the first.
            evaluated = min(told, count)
            return Measured(count - evaluated, False, evaluated, count)
        least = max(0, count - self.steps * chunk)
        most = count - (self.steps - 1) * chunk - 1
        if self.steps > 1:
            least = max(least, (self._used - 1) * BLOCK_TOKENS - chunk + 1)
            most = min(most, self._used * BLOCK_TOKENS - chunk)
        if self._aligned:
            least = min(most, -(-least // BLOCK_TOKENS) * BLOCK_TOKENS)
            if most < count - 1:
                most = most // BLOCK_TOKENS * BLOCK_TOKENS
        return Measured(least, least != most, count - least, count)

    def read(self) -> list[int]:
        """Tokens sampled since the last time."""
        unread, self._unread = self._unread, []
        return unread

    def give_up(self) -> Measured:
        """Cancel before the answer; what was evaluated up to here stays findable."""
        chunk = self._pipeline.chunk
        reused = max(0, self._used * BLOCK_TOKENS - chunk)
        self._drop()
        if not self._aligned:
            # Where it stands in its last block isn't known, and the engine would find that block
            # as a whole one.
            self._pipeline.unsound = True
            return Measured(0, False, self.steps * chunk, 0)
        return Measured(reused, False, self.steps * chunk, reused + self.steps * chunk)

    def finish(self) -> None:
        """The caller wants no more tokens; the KV is that of all but the last sampled one."""
        self._drop()
        kept = np.asarray(self.sampled[:-1], dtype=np.int64)
        self._pipeline.ended(np.concatenate([self._ids, kept]) if len(kept) else self._ids)

    def _drop(self) -> None:
        if not self._pipeline.busy:
            return
        self._handle.cancel()
        with contextlib.suppress(Exception):
            self._pipeline.step()
        if self._pipeline.busy:
            raise fatal("it didn't let go of a cancelled request", "engine")
