"""One stream of a shared llama context as the ``EngineContext`` protocol: what one session holds.

Checks what is asked of it and moves its bytes. Never touches its neighbours; evaluating is the
batch's, and when is the gate's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.errors import (
    ContextOverflow,
    InvalidRequest,
    SessionFatal,
    UnsupportedFeature,
)
from modeld.shared.messages import PlacedOut
from modeld.workers.engine import Cancelled, EngineContext
from modeld.workers.llama import stream_state
from modeld.workers.llama.native import engine_log, llama
from modeld.workers.llama.state import check_spare, put_state, take_state

if TYPE_CHECKING:
    from modeld.workers.engine import Logits, State
    from modeld.workers.llama.stream_state import Cells
    from modeld.workers.llama.streams import LlamaStreams


class LlamaStream:
    """See ``EngineContext``. Not thread-safe: one thread at a time."""

    state_block = 1

    def __init__(self, batch: LlamaStreams, index: int, placed: list[PlacedOut]) -> None:
        """``placed`` is its share of what the whole takes."""
        self._batch, self._index = batch, index
        self.window = batch.window
        self.placed = placed
        self.kv_bytes = sum(part.kv_bytes for part in placed)
        self.compute_bytes = sum(part.compute_bytes for part in placed)
        self.length = 0
        self.has_logits = False
        self.row: Logits = np.zeros(batch.traits.vocab, dtype=np.float32)
        self._broken = False
        # All that is held, as bytes beside the engine while ranges go out or in, for it gives and
        # takes a stream as a whole only; and how many tokens of that it doesn't have yet.
        self._copy: list[Cells] = []
        self._ahead = 0

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        """See the protocol. Waits for its turn."""
        self.settle()
        self._check_room(position, len(tokens))
        for token in (min(tokens, default=0), max(tokens, default=0)):
            self._check_token(token)
        return self._batch.gate.evaluate(self._batch, self._index, tokens, cancelled)

    def step(self, token: int, position: int) -> None:
        """See the protocol. Waits for the others' tokens."""
        self.settle()
        self._check_room(position, 1)
        self._check_token(token)
        self._batch.gate.step(self._batch, self._index, token)

    def _check_room(self, position: int, count: int) -> None:
        self._check_usable()
        if position != self.length:
            raise self._fatal(
                f"tokens were to go to position {position}, it holds {self.length}", "bookkeeping"
            )
        if position + count > self.window:
            raise ContextOverflow(
                f"{position} resident and {count} more tokens exceed the window of {self.window}.",
                metadata={"resident": position, "additional": count, "window": self.window},
            )

    def _check_token(self, token: int) -> None:
        vocab = self._batch.traits.vocab
        if not 0 <= token < vocab:
            raise InvalidRequest.of("token", token, f"0 to {vocab - 1}")

    def _check_usable(self) -> None:
        self._batch.check_usable()
        if self._broken:
            raise self._fatal("it was found broken before", "bookkeeping")

    def logits(self) -> Logits:
        """See the protocol. Raises SessionFatal where they aren't numbers."""
        self._check_usable()
        if not self.has_logits:
            raise self._fatal("logits were asked for where none are", "bookkeeping")
        if not np.isfinite(self.row.max()):
            raise self._fatal(
                "the logits are not finite: the model's weights or this KV are broken", "engine"
            )
        return self.row

    # --- going back and copying --------------------------------------------------------------

    def can_trim(self, keep: int) -> bool:
        """See the protocol: always, in a memory where every token stays."""
        usable = bool(self._batch.handle) and not self._batch.broken and not self._broken
        return usable and 0 <= keep <= self.length

    def trim(self, keep: int) -> None:
        """See the protocol."""
        if not self.can_trim(keep):
            raise self._fatal(f"it can't go back from {self.length} to {keep} tokens", "engine")
        if keep == self.length:
            return
        self.has_logits = False
        if keep > self.length - self._ahead:
            self.settle()
        self._remove(keep)

    def _remove(self, keep: int) -> None:
        self._copy, self._ahead = [], 0
        if not llama.llama_memory_seq_rm(self._batch.memory, self._index, keep or -1, -1):
            raise self._fatal(f"the engine would not remove the tail from {keep} on", "engine")
        self.length = keep
        self._batch.prove(self._index)

    def copy_prefix_from(self, source: EngineContext, tokens: int) -> bool:
        """See the protocol. Through the bytes: the engine copies a stream only whole and later, at
        the next evaluation.
        """
        if not self.can_trim(0):
            return False
        self.trim(0)
        if source is self or not 0 < tokens <= self.window or not source.can_trim(tokens):
            return False
        try:
            return self.import_state(source.export_state(0, tokens), tokens)
        except UnsupportedFeature:  # its bytes aren't of the form that is known here
            return False
        finally:
            self.settle()
            if isinstance(source, LlamaStream):
                source.settle()

    # --- its bytes ---------------------------------------------------------------------------

    def export_state(self, begin: int, end: int) -> State:
        """See the protocol: in the form of a context of its own, which takes it, too. Takes memory
        for a copy of the whole, which stays for the ranges that follow, until ``settle``.
        """
        if self._ahead:  # what goes out is what the engine has
            self.settle()
        self._check_usable()
        if not 0 <= begin < end <= self.length:
            raise InvalidRequest.of(
                "range", f"{begin} to {end}", f"a part of 0 to {self.length}, which is held"
            )
        return stream_state.write([self._copied()[0].part(begin, end)], 1)

    def _copied(self) -> list[Cells]:
        """All that is held, in parts; one where nothing is ahead."""
        if self.length and not self._copy:
            self._copy = [self._cells()]
        return self._copy

    def _cells(self) -> Cells:
        batch = self._batch
        # Half of what is spare: what is put together from it is as large.
        state = take_state(batch.handle, self._index, self.length, lambda: batch.spare_bytes() // 2)
        cells = None if state is None else stream_state.read(state, len(batch.streams))
        if cells is None or (cells.first, cells.count) != (0, self.length):
            raise UnsupportedFeature(
                f"The engine gives no state of stream {self._index} that can be read "
                f"({engine_log.words()}).",
                metadata={"capability": "state.whole", "held": self.length},
            )
        return cells

    def import_state(self, state: State, end: int) -> bool:
        """See the protocol. What comes behind others waits beside the engine for what else comes,
        until ``settle``.
        """
        self._check_usable()
        begin, new = self.length, stream_state.read(state, 1)
        if new is None or not begin < end <= self.window:
            return False
        if (new.first, new.first + new.count) != (begin, end):
            return False
        before = self._copied()
        if before and not new.continues(before[-1]):
            return False
        check_spare(sum(part.bytes for part in before) + new.bytes, end, self._batch.spare_bytes)
        self.has_logits = False
        self._copy, self._ahead, self.length = [*before, new], self._ahead + new.count, end
        return bool(begin) or self._put()  # the first shows whether the engine takes such bytes

    def settle(self) -> None:
        """See ``Settling``."""
        if self._ahead and self._batch.handle and not self._put():
            raise self._fatal("what it held did not go back in", "engine")
        self._copy = []

    def _put(self) -> bool:
        """Have the engine hold the copy in place of what it does; it holds nothing where that
        fails.
        """
        whole = stream_state.write(self._copy, len(self._batch.streams))
        if not put_state(self._batch.handle, self._index, whole):
            self._remove(0)
            return False
        self._copy, self._ahead = [], 0
        self._batch.prove(self._index)
        return True

    # --- ending ------------------------------------------------------------------------------

    def _fatal(self, what: str, cause: str) -> SessionFatal:
        self._broken = True
        return SessionFatal(
            f"The session's stream can't be trusted: {what}. Open a new session.",
            metadata={"cause": cause, "stream": self._index},
        )

    def close(self) -> None:
        """Empty it, for whoever takes it next. Idempotent."""
        self.has_logits = False
        if self._batch.handle and not self._batch.broken:
            self._remove(0)
            self._broken = False
