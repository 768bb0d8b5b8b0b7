"""One llama context as the ``EngineContext`` protocol: a session's KV state and a scratch sequence.

Keeps the count of what the engine holds and proves it against the engine after every change.
Knows no prompt, sampling or policy.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import (
    ContextOverflow,
    InsufficientMemory,
    InvalidRequest,
    SessionFatal,
    UnsupportedFeature,
)
from modeld.workers.engine import Cancelled, EngineContext
from modeld.workers.llama.made import Rows, make
from modeld.workers.llama.native import engine_log, llama
from modeld.workers.llama.parameters import ContextSettings
from modeld.workers.llama.state import put_state, take_state
from modeld.workers.llama.validate import SEQUENCES

if TYPE_CHECKING:
    from modeld.workers.engine import Logits, State

_OWN, _SCRATCH = 0, 1  # sequence ids
_ABORTED = 2
_COPY_TOKENS = 512  # of a prefix at a time
_NO_ABORT = llama.ggml_abort_callback(0)


@dataclass(frozen=True)
class ModelTraits:
    """What the loaded model's memory allows."""

    vocab: int
    window_tokens: int  # sliding window; 0: every token is attended
    recurrent: bool  # any layer keeps a state that can't go back

    @property
    def dense(self) -> bool:
        """Every token's KV is a row of its own that stays: ranges of it mean something."""
        return not (self.recurrent or self.window_tokens)


class LlamaContext:
    """See ``EngineContext``. Not thread-safe: the engine thread only."""

    state_block = 1

    def __init__(
        self,
        model: Any,
        traits: ModelTraits,
        settings: ContextSettings,
        planned_kv_bytes: Callable[[int], int],
        on_close: Callable[[LlamaContext], None],
        work_bytes: int = 0,
        spare_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        """Raises InsufficientMemory with the engine's words when it can't be made."""
        self._traits, self._on_close, self._spare_bytes = traits, on_close, spare_bytes
        made = make(model, settings, planned_kv_bytes, work_bytes)
        self._handle, self._memory, self.window = made.handle, made.memory, made.window
        self._n_batch, self._n_ubatch = made.n_batch, made.n_ubatch
        self.placed = made.placed
        self.kv_bytes = sum(part.kv_bytes for part in made.placed)
        self.compute_bytes = sum(part.compute_bytes for part in made.placed)
        self._length = 0
        self._has_logits = False
        self._broken = False
        self._logits_at = 0
        self._logits_view: Logits | None = None
        self._polled: Cancelled = _never
        self._aborted = False
        # The engine keeps only the address: the callback must live as long as the context.
        self._callback = llama.ggml_abort_callback(self._on_abort_poll)
        self._rows = rows = Rows(self._n_batch, SEQUENCES)
        self._tokens, self._positions, self._wanted = rows.tokens, rows.positions, rows.wanted

    @property
    def has_memory(self) -> bool:
        """False for a model that only embeds."""
        return bool(self._memory)

    # --- evaluating --------------------------------------------------------------------------

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        """See the protocol. ``cancelled`` is polled between batches and, while several tokens are
        evaluated at once, some hundred times a micro-batch from within the engine.
        """
        count = len(tokens)
        self._check_room(position, count)
        ids = np.asarray(tokens, dtype=np.int64)
        if count and not 0 <= int(ids.min()) <= int(ids.max()) < self._traits.vocab:
            self._checked_token(int(ids.min()))
            self._checked_token(int(ids.max()))
        return self._evaluate_many(ids, position, cancelled)

    def step(self, token: int, position: int) -> None:
        """See the protocol."""
        self._check_room(position, 1)
        self._tokens[0] = self._checked_token(token)
        self._positions[0] = position
        self._decode(1, wanted=0)

    def _check_room(self, position: int, count: int) -> None:
        self._check_usable()
        if position != self._length:
            raise self._fatal(
                f"tokens were to go to position {position}, it holds {self._length}", "bookkeeping"
            )
        if position + count > self.window:
            raise ContextOverflow(
                f"{position} resident and {count} more tokens exceed the window of {self.window}.",
                metadata={"resident": position, "additional": count, "window": self.window},
            )

    def _check_usable(self) -> None:
        if not self._handle or self._broken:
            raise self._fatal("it is closed or was found broken before", "bookkeeping")

    def _evaluate_many(self, ids: Any, position: int, cancelled: Cancelled) -> int:
        # A recurrent state is overwritten while a micro-batch runs, so one can't be given up
        # halfway: batches of one micro-batch, and no interruption within.
        whole = self._traits.recurrent
        step = self._n_ubatch if whole else self._n_batch
        count = len(ids)
        if not whole:
            self._polled, self._aborted = cancelled, False
            llama.llama_set_abort_callback(self._handle, self._callback, None)
        try:
            begin = 0
            while begin < count:
                if cancelled():
                    return begin
                size = min(step, count - begin)
                if size > 1 and size % self._n_ubatch == 1:
                    size -= 1  # no micro-batch of one token, which rounds differently
                self._tokens[:size] = ids[begin : begin + size]
                self._positions[:size] = np.arange(position + begin, position + begin + size)
                wanted = size - 1 if begin + size == count else None
                alone = size == 1 and self._has_companion()
                decode = self._decode_with_companion if alone else self._decode
                if not decode(size, wanted=wanted):
                    return self._length - position
                begin += size
        finally:
            if not whole:
                llama.llama_set_abort_callback(self._handle, _NO_ABORT, None)
                self._polled = _never
        return count

    def _decode(self, size: int, *, wanted: int | None, own: int | None = None) -> bool:
        """Run one batch; False when it was interrupted. Updates the length, proven.

        ``wanted``: whose logits, by place in the batch. ``own``: how many of its tokens, from its
        beginning on, are this sequence's (None: all).
        """
        batch = self._rows.batch
        batch.n_tokens = size
        if wanted is not None:
            self._wanted[wanted] = 1
        self._has_logits = False
        code = llama.llama_decode(self._handle, batch)
        if wanted is not None:
            self._wanted[wanted] = 0
        held = llama.llama_memory_seq_pos_max(self._memory, _OWN) + 1
        if code == 0:
            self._length += size if own is None else own
            if held != self._length:
                raise self._fatal(f"it holds {held} tokens, not {self._length}", "bookkeeping")
            self._has_logits = wanted is not None
            return True
        if code != _ABORTED or not self._aborted:
            raise self._fatal(
                f"evaluating {size} tokens at {self._length} answered {code} "
                f"({engine_log.words()})",
                "engine",
                code=code,
            )
        kept = held - self._length  # whole micro-batches of the batch stay
        if not 0 <= kept <= size or (kept < size and kept % self._n_ubatch):
            raise self._fatal(f"{kept} of {size} tokens stayed after a cancel", "bookkeeping")
        self._length = held
        return False

    def _has_companion(self) -> bool:
        """Whether a lone token can be evaluated as one of two.

        Not where the window has one free cell only: that token is then computed by the routines
        for one, which differ by rounding.
        """
        return not self._traits.recurrent and self._n_ubatch > 1 and self._length + 2 <= self.window

    def _decode_with_companion(self, _size: int, *, wanted: int | None) -> bool:
        """Evaluate the token in the first place together with one on the scratch sequence.

        The engine multiplies by one row and by several with different routines. The companion
        makes two rows of one; nothing attends to it, and its cell is freed again.
        """
        self._tokens[1], self._positions[1] = self._tokens[0], 0
        self._rows.of[1] = self._rows.ids[_SCRATCH]
        try:
            return self._decode(2, wanted=wanted, own=1)
        finally:
            self._rows.of[1] = self._rows.ids[_OWN]
            if self._handle:
                llama.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)

    def _on_abort_poll(self, _data: object) -> bool:
        if self._polled():
            self._aborted = True
        return self._aborted

    def _checked_token(self, token: int) -> int:
        if not 0 <= token < self._traits.vocab:
            raise InvalidRequest.of("token", token, f"0 to {self._traits.vocab - 1}")
        return token

    def logits(self) -> Logits:
        """See the protocol. Raises SessionFatal where they aren't numbers."""
        if not self._has_logits or not self._handle:
            raise self._fatal("logits were asked for where none are", "bookkeeping")
        pointer = llama.llama_get_logits_ith(self._handle, -1)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if not address:
            raise self._fatal(f"it has no logits ({engine_log.words()})", "engine")
        if self._logits_view is None or address != self._logits_at:
            view: Logits = np.ctypeslib.as_array(pointer, shape=(self._traits.vocab,))
            self._logits_at, self._logits_view = address, view
        view = self._logits_view
        # Broken weights decode without an error, to NaN; a maximum shows it at little cost.
        if not np.isfinite(view.max()):
            raise self._fatal(
                "the logits are not finite: the model's weights or this KV are broken", "engine"
            )
        return view

    # --- going back and copying --------------------------------------------------------------

    def can_trim(self, keep: int) -> bool:
        """See the protocol. In a sliding-window cache, exact means up to rounding: where the
        window's cells lie depends on what was there before.
        """
        if self._broken or not self._handle or not 0 <= keep <= self._length:
            return False
        if keep in (0, self._length):
            return True
        if self._traits.recurrent:
            return False
        if self._traits.window_tokens:
            # The engine would remove the tail even where cells that the window needs again are
            # gone, and answer from what is left.
            first: int = llama.llama_memory_seq_pos_min(self._memory, _OWN)
            return first <= max(0, keep - self._traits.window_tokens)
        return True

    def trim(self, keep: int) -> None:
        """See the protocol."""
        if keep == self._length and not self._broken and self._handle:
            return
        if not self.can_trim(keep):
            raise self._fatal(f"it can't go back from {self._length} to {keep} tokens", "engine")
        self._has_logits = False
        if keep == 0:
            self._clear()
            return
        if not llama.llama_memory_seq_rm(self._memory, _OWN, keep, -1):
            raise self._fatal(f"the engine would not remove the tail from {keep} on", "engine")
        self._length = keep
        self._prove_length()

    def _clear(self) -> None:
        llama.llama_memory_clear(self._memory, False)
        self._length, self._has_logits = 0, False
        self._prove_length()

    def _prove_length(self) -> None:
        held = llama.llama_memory_seq_pos_max(self._memory, _OWN) + 1
        if held != self._length:
            raise self._fatal(f"it holds {held} tokens, not {self._length}", "bookkeeping")

    def copy_prefix_from(self, source: EngineContext, tokens: int) -> bool:
        """See the protocol. The source keeps all it holds. Goes block by block where the memory
        allows it, so that no buffer of the whole state's size is ever needed.
        """
        if self._broken or not self._handle:
            return False
        self._clear()
        if not isinstance(source, LlamaContext) or source is self:
            return False
        if not 0 < tokens <= self.window or not source.can_trim(tokens):
            return False
        step = _COPY_TOKENS if self._traits.dense else tokens
        for begin in range(0, tokens, step):
            end = min(begin + step, tokens)
            try:
                copy = source._taken(begin, end)
            except InsufficientMemory:
                self._clear()
                raise
            if copy is None or not self.import_state(copy, end):
                self._clear()
                return False
        return True

    # --- its bytes ---------------------------------------------------------------------------

    def export_state(self, begin: int, end: int) -> State:
        """See the protocol. Any range of a dense model; else all that is held, or nothing. A
        range's bytes don't depend on what is held behind it.
        """
        self._check_usable()
        if not 0 <= begin < end <= self._length:
            raise InvalidRequest.of(
                "range", f"{begin} to {end}", f"a part of 0 to {self._length}, which is held"
            )
        if not self._traits.dense and (begin, end) != (0, self._length):
            kind = "a recurrent state" if self._traits.recurrent else "a sliding-window cache"
            raise UnsupportedFeature(
                f"{begin} to {end} can't be taken out of {self._length} tokens in {kind}: only the "
                "whole can.",
                metadata={"capability": "state.blocks", "held": self._length},
            )
        taken = self._taken(begin, end)
        if taken is None:
            raise UnsupportedFeature(
                f"The engine gives no state of {begin} to {end} ({engine_log.words()}).",
                metadata={"capability": "state.whole", "held": self._length},
            )
        return taken

    def _taken(self, begin: int, end: int) -> State | None:
        """The engine's own bytes of a range, through the scratch sequence; all of a memory that
        isn't dense, which can't be shared for a while, from its own.
        """
        own = not self._traits.dense and begin == 0 and end == self._length
        sequence = _OWN if own else _SCRATCH
        if not own:
            llama.llama_memory_seq_cp(self._memory, _OWN, _SCRATCH, begin, end)
        try:
            return take_state(self._handle, sequence, end - begin, self._spare_bytes)
        finally:
            if not own:
                llama.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
            self._prove_length()

    def import_state(self, state: State, end: int) -> bool:
        """See the protocol. Setting replaces a sequence, so what isn't the first comes in through
        the scratch sequence.
        """
        self._check_usable()
        begin = self._length
        if not begin < end <= self.window or (begin and not self._traits.dense):
            return False
        sequence = _SCRATCH if begin else _OWN
        if not put_state(self._handle, sequence, state) or not self._spans(sequence, begin, end):
            llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self._prove_length()
            return False
        self._has_logits = False
        if begin:
            llama.llama_memory_seq_cp(self._memory, _SCRATCH, _OWN, -1, -1)
            llama.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        self._length = end
        self._prove_length()
        return True

    def _spans(self, sequence: int, begin: int, end: int) -> bool:
        """Whether a sequence holds positions up to ``end``, from ``begin`` on where all stay."""
        first = llama.llama_memory_seq_pos_min(self._memory, sequence)
        last = llama.llama_memory_seq_pos_max(self._memory, sequence)
        return last + 1 == end and (first == begin or not self._traits.dense)

    def try_surgery(self) -> tuple[bool, bool]:
        """Whether a middle range can be removed, and what follows moved up. Empties the context.

        Nothing is evaluated afterwards, so that no wrong number can come of it.
        """
        begin, end = 1, max(2, self._length // 2)
        removed = bool(llama.llama_memory_seq_rm(self._memory, _OWN, begin, end))
        shifted = removed and bool(llama.llama_memory_can_shift(self._memory))
        if shifted:
            llama.llama_memory_seq_add(self._memory, _OWN, end, -1, begin - end)
            held = llama.llama_memory_seq_pos_max(self._memory, _OWN) + 1
            shifted = held == self._length - (end - begin)
        self._clear()
        return removed, shifted

    # --- ending ------------------------------------------------------------------------------

    def _fatal(self, what: str, cause: str, **numbers: object) -> SessionFatal:
        self._broken = True
        return SessionFatal(
            f"The session's engine context can't be trusted: {what}. Open a new session.",
            metadata={"cause": cause, **numbers},
        )

    def close(self) -> None:
        """See the protocol."""
        if not self._handle:
            return
        handle, self._handle = self._handle, None
        self._memory, self._logits_view, self._has_logits = None, None, False
        llama.llama_free(handle)
        self._on_close(self)


def _never() -> bool:
    return False
