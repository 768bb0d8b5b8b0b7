"""The paged executor: a sequence as the ``EngineContext`` protocol, its KV in blocks of a pool.

Owns the block tables, the inputs of each inference and its cancel. Validates everything before
the engine sees it, since the engine checks neither positions nor ids. Knows no prompt or policy.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import (
    ContextOverflow,
    InsufficientMemory,
    InvalidRequest,
    SessionFatal,
)
from modeld.shared.messages import PlacedOut
from modeld.workers.engine import Cancelled, EngineContext
from modeld.workers.openvino.adapters import NOTHING_APPLIED, SWITCH, Applied
from modeld.workers.openvino.blocks import BLOCK_TOKENS, BlockPool
from modeld.workers.openvino.graph import SELECTED, Compiled
from modeld.workers.openvino.native import ov, words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from modeld.workers.engine import Logits, State

log = logging.getLogger(__name__)

# KV of these types means the same however a prompt is split; the others' scales cover a block.
EXACT_TYPES = ("f32", "f16")
CHUNK_TOKENS = 256  # an inference of a prompt: larger ones are slower and hold more memory
_POLL_MS = 2


class PagedModel:
    """The compiled model with its one infer request and its pool: what its sequences share."""

    def __init__(
        self,
        compiled: Compiled,
        pool: BlockPool,
        chunk: int = CHUNK_TOKENS,
        applied: Applied = NOTHING_APPLIED,
    ) -> None:
        self.compiled, self.pool, self.chunk, self.applied = compiled, pool, chunk, applied
        self.exact = compiled.k_type in EXACT_TYPES and compiled.v_type in EXACT_TYPES
        self.sequences: set[PagedContext] = set()
        pool.reserve(1)
        self.scratch = pool.take()  # for cells that nothing attends to
        self._request = self.new_request()
        self._output = compiled.model.outputs[0].get_any_name()
        self._row: Logits | None = None
        if compiled.selects:  # one row, always in the same place
            shape = (1, 1, compiled.vocabulary)
            buffer: Logits = np.zeros(shape, dtype=np.float32)
            self._request.set_tensor(self._output, ov.Tensor(buffer, shared_memory=True))
            self._row = buffer.reshape(-1)
        self._kept = {count: _Inputs(count, compiled.selects) for count in {1, 2, chunk}}
        self._bound: _Inputs | None = None
        self._bound_table: NDArray[np.int32] | None = None
        self._finished = 0  # tokens of the latest inference that came to its end
        self._torn: set[int] = set()  # numbers of tokens whose shapes may be left in the graph

    def new_request(self) -> Any:
        """An infer request over the pool's blocks, with the model's adapters on."""
        request = self.compiled.model.create_infer_request()
        for name, tensor in self.pool.tensors.items():
            request.set_tensor(name, tensor)
        self._switch_adapters(request, on=True)
        return request

    def switch_adapters(self, *, on: bool) -> None:
        """Whether what is evaluated from here on goes through the model's adapters, if any. For
        probes: a batch's request has them on.
        """
        self._switch_adapters(self._request, on=on)

    def _switch_adapters(self, request: Any, *, on: bool) -> None:
        if self.applied.adapters:
            request.set_tensor(SWITCH, ov.Tensor(np.array([float(on)], dtype=np.float32)))

    def run(
        self,
        tokens: NDArray[np.int64],
        position: int,
        table: NDArray[np.int32],
        row: int,
        cancelled: Cancelled | None,
    ) -> bool:
        """Evaluate tokens of one sequence; False when cancelled on the way.

        ``row`` is the one whose logits are wanted. ``table`` is read in place, also by later runs
        that bring the same array. Raises what the library raises.
        """
        self.begin(len(tokens))
        if not self._infer(tokens, position, table, row, cancelled):
            return False
        self.finished(len(tokens))
        return True

    def begin(self, tokens: int) -> None:
        """Before any inference of so many tokens, and ``finished`` once it came to its end."""
        if tokens in self._torn:
            self._settle()
        self._torn |= {tokens, self._finished}  # stands where this one isn't finished

    def finished(self, tokens: int) -> None:
        self._finished = tokens
        self._torn.clear()

    def _settle(self) -> None:
        """Make the graph whole where inferences that were cancelled, or failed, left it with shapes
        of several sizes.

        Its operations keep their shapes until their inputs' change. Those before that place have
        the shapes of the tokens that were given up, those behind it of the ones before: the next
        inference with as many tokens as either would find them apart, and fail. One of another
        size makes all of them work theirs out.
        """
        size = next(size for size in itertools.count(2) if size not in self._torn)
        ids = np.zeros(size, dtype=np.int64)
        table = np.full(-(-size // BLOCK_TOKENS), self.scratch, dtype=np.int32)
        self.run(ids, 0, table, size - 1, None)

    def _infer(
        self,
        tokens: NDArray[np.int64],
        position: int,
        table: NDArray[np.int32],
        row: int,
        cancelled: Cancelled | None,
    ) -> bool:
        count = len(tokens)
        inputs = self._kept.get(count) or _Inputs(count, self.compiled.selects)
        if inputs is not self._bound:
            for name, tensor in inputs.tensors.items():
                self._request.set_tensor(name, tensor)
            self._bound = inputs
        inputs.fill(tokens, position, len(table), row)
        if table is not self._bound_table:
            tensor = ov.Tensor(table, shared_memory=True)
            self._request.set_tensor("block_indices", tensor)
            self._bound_table = table
        if cancelled is None:
            self._request.infer()
            return True
        self._request.start_async()
        while not self._request.wait_for(_POLL_MS):
            if cancelled():
                self._request.cancel()
                return not self._was_cancelled()
        self._request.wait()  # raises what went wrong
        return True

    def _was_cancelled(self) -> bool:
        try:
            self._request.wait()
        except RuntimeError as error:
            if "cancel" in str(error).lower():
                return True
            raise
        return False  # it was done before the cancel came

    def logits(self, row: int) -> Logits:
        """The row asked for in the last run: a view, valid until the next one."""
        if self._row is not None:
            return self._row
        data = self._request.get_tensor(self._output).data
        wanted: Logits = data.reshape(-1, self.compiled.vocabulary)[row]
        return wanted

    def new_context(self, window: int, spare_bytes: Callable[[], int]) -> PagedContext:
        """Raises InsufficientMemory where no address space is left for it."""
        return PagedContext(self, window, spare_bytes)

    def close(self) -> None:
        """Free it; the sequences first. Idempotent."""
        for context in list(self.sequences):
            context.close()
        self._bound = self._bound_table = None
        self._kept.clear()
        self._request = None


class _Inputs:
    """Input tensors for one number of tokens, filled in place."""

    def __init__(self, count: int, selects: bool) -> None:
        self._ids = np.zeros(count, dtype=np.int64)
        self._positions = np.zeros(count, dtype=np.int64)
        self._steps = np.arange(count, dtype=np.int64)
        self._longest = np.zeros((), dtype=np.int32)
        self._past = np.zeros(1, dtype=np.int32)
        self._begins = np.array([0, count], dtype=np.int32)
        self._table_begins = np.zeros(2, dtype=np.int32)
        self._row = np.zeros(1, dtype=np.int64)
        arrays = {
            "input_ids": self._ids,
            "position_ids": self._positions,
            "max_context_len": self._longest,
            "past_lens": self._past,
            "subsequence_begins": self._begins,
            "block_indices_begins": self._table_begins,
        }
        if selects:
            arrays[SELECTED] = self._row
        self.tensors = {
            name: ov.Tensor(array, shared_memory=True) for name, array in arrays.items()
        }

    def fill(self, tokens: NDArray[np.int64], position: int, blocks: int, row: int) -> None:
        self._ids[:] = tokens
        np.add(self._steps, position, out=self._positions)
        self._longest[...] = position + len(tokens)
        self._past[0] = position
        self._table_begins[1] = blocks
        self._row[0] = row


class PagedContext:
    """See ``EngineContext``. Not thread-safe: the engine thread only."""

    state_block = BLOCK_TOKENS

    def __init__(
        self,
        model: PagedModel,
        window: int,
        spare_bytes: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        """Reserves blocks for ``window`` tokens, rounded up to whole ones; touches none."""
        self._model, self._pool = model, model.pool
        self._spare_bytes = spare_bytes
        self._reserved = -(-window // BLOCK_TOKENS)
        if not self._pool.reserve(self._reserved):
            raise InsufficientMemory(
                f"A window of {window} tokens takes {self._reserved} blocks of KV cache, "
                f"{self._pool.blocks - self._pool.reserved} of {self._pool.blocks} are left. "
                "Ask for a smaller window, or close a session.",
                metadata={
                    "cause": "kv_blocks",
                    "needed_blocks": self._reserved,
                    "free_blocks": self._pool.blocks - self._pool.reserved,
                },
            )
        self.window = self._reserved * BLOCK_TOKENS
        self.kv_bytes = self._reserved * self._pool.block_bytes
        self.compute_bytes = 0  # the model's, touched when it was loaded
        self.placed = [PlacedOut(device="CPU", kv_bytes=self.kv_bytes)]
        self._blocks: list[int] = []
        # One more for a cell behind the window that nothing attends to.
        self._table = np.zeros(self._reserved + 1, dtype=np.int32)
        self._used = self._table[:0]
        self._length = 0
        self._logits: Logits = np.empty(model.compiled.vocabulary, dtype=np.float32)
        self._has_logits = False
        self._open = True
        model.sequences.add(self)

    # --- evaluating --------------------------------------------------------------------------

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        """See the protocol. A chunk that is given up leaves nothing behind."""
        count = len(tokens)
        self._check_room(position, count)
        ids = np.asarray(tokens, dtype=np.int64)
        vocabulary = self._model.compiled.vocabulary
        if count and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            outside = int(ids.min()) if ids.min() < 0 else int(ids.max())
            raise InvalidRequest.of("token", outside, f"0 to {vocabulary - 1}")
        begin = 0
        while begin < count:
            if cancelled():
                return begin
            size = min(self._model.chunk, count - begin)
            if size > 2 and count - begin - size == 1:
                size -= 1  # no chunk of one token, which rounds differently
            last = begin + size == count
            if not self._run(ids[begin : begin + size], cancelled, wanted=last):
                return begin
            begin += size
        return count

    def step(self, token: int, position: int) -> None:
        """See the protocol."""
        self._check_room(position, 1)
        if not 0 <= token < self._model.compiled.vocabulary:
            limit = self._model.compiled.vocabulary - 1
            raise InvalidRequest.of("token", token, f"0 to {limit}")
        self._run(np.array([token], dtype=np.int64), None, wanted=True, alone=True)

    def _run(
        self,
        ids: NDArray[np.int64],
        cancelled: Cancelled | None,
        *,
        wanted: bool,
        alone: bool = False,
    ) -> bool:
        """One inference at the end; False when cancelled, with the length as it was."""
        count, position = len(ids), self._length
        self._has_logits = False
        try:
            self._make_writable(position, position + count)
            row, blocks = count - 1, len(self._blocks)
            if count == 1 and not alone and self._model.exact:
                # The engine computes one row by other routines than several. The same token
                # behind it makes two rows of one; the first doesn't attend to it, and its cell
                # is the next token's, or lies in a block that is nobody's.
                ids = np.repeat(ids, 2)
                if (position + 1) % BLOCK_TOKENS == 0:
                    self._table[blocks] = self._model.scratch
                    blocks += 1
            if len(self._used) != blocks:
                self._used = self._table[:blocks]
            if not self._model.run(ids, position, self._used, row, cancelled):
                self._give_back()
                return False
            if wanted:
                self._logits[:] = self._model.logits(row)
        except Exception as error:
            raise self._fatal(
                f"evaluating {count} tokens at {position} failed ({words(error)})", "engine"
            ) from None
        self._length = position + count
        self._has_logits = wanted
        return True

    def _check_room(self, position: int, count: int) -> None:
        if not self._open:
            raise self._fatal("it is closed or was found broken before", "bookkeeping")
        if position != self._length:
            raise self._fatal(
                f"tokens were to go to position {position}, it holds {self._length}", "bookkeeping"
            )
        if position + count > self.window:
            raise ContextOverflow(
                f"{position} resident and {count} more tokens exceed the window of {self.window}.",
                metadata={"resident": position, "additional": count, "window": self.window},
            )

    def _make_writable(self, begin: int, end: int) -> None:
        """Blocks of its own for the positions from ``begin`` to ``end``."""
        first = begin // BLOCK_TOKENS
        if first < len(self._blocks):
            self._set_block(first, self._pool.own(self._blocks[first]))
        while len(self._blocks) * BLOCK_TOKENS < end:
            self._blocks.append(0)
            self._set_block(len(self._blocks) - 1, self._pool.take())

    def _set_block(self, index: int, block: int) -> None:
        self._blocks[index] = block
        self._table[index] = block

    def _give_back(self) -> None:
        """Drop the blocks behind the length."""
        held = -(-self._length // BLOCK_TOKENS)
        self._pool.drop(self._blocks[held:])
        del self._blocks[held:]

    def logits(self) -> Logits:
        """See the protocol. Raises SessionFatal where they aren't numbers."""
        if not self._has_logits or not self._open:
            raise self._fatal("logits were asked for where none are", "bookkeeping")
        # Broken weights decode without an error, to NaN; a maximum shows it at little cost.
        if not np.isfinite(self._logits.max()):
            raise self._fatal(
                "the logits are not finite: the model's weights or this KV are broken", "engine"
            )
        return self._logits

    # --- going back and copying --------------------------------------------------------------

    def can_trim(self, keep: int) -> bool:
        """See the protocol: always, since positions say what is attended."""
        return self._open and 0 <= keep <= self._length

    def trim(self, keep: int) -> None:
        """See the protocol."""
        if not self.can_trim(keep):
            raise self._fatal(f"it can't go back from {self._length} to {keep} tokens", "engine")
        if keep != self._length:
            self._length, self._has_logits = keep, False
            self._give_back()

    def copy_prefix_from(self, source: EngineContext, tokens: int) -> bool:
        """See the protocol. Nothing is copied: both read the same blocks until one writes."""
        if not self._open:
            return False
        self.trim(0)
        if not isinstance(source, PagedContext) or source is self or source._pool is not self._pool:
            return False
        if not 0 < tokens <= min(self.window, source._length):
            return False
        for block in source._blocks[: -(-tokens // BLOCK_TOKENS)]:
            self._blocks.append(0)
            self._set_block(len(self._blocks) - 1, self._pool.share(block))
        self._length = tokens
        return True

    # --- its bytes ---------------------------------------------------------------------------

    def export_state(self, begin: int, end: int) -> State:
        """See the protocol. Whole blocks, with what lies behind ``end`` in the last one."""
        if not self._open:
            raise self._fatal("it is closed or was found broken before", "bookkeeping")
        if not 0 <= begin < end <= self._length or begin % BLOCK_TOKENS:
            raise InvalidRequest.of(
                "range",
                f"{begin} to {end}",
                f"a part of 0 to {self._length} from a multiple of {BLOCK_TOKENS} on",
            )
        blocks = self._blocks[begin // BLOCK_TOKENS : -(-end // BLOCK_TOKENS)]
        needed, spare = len(blocks) * self._pool.block_bytes, self._spare_bytes()
        if needed > spare:
            raise InsufficientMemory(
                f"A copy of {end - begin} tokens takes {needed} bytes, for which there is no "
                f"memory now ({spare} can be spared).",
                metadata={"needed_bytes": needed, "free_bytes": spare, "cause": "copy"},
            )
        return self._pool.read(blocks)

    def import_state(self, state: State, end: int) -> bool:
        """See the protocol."""
        begin = self._length
        blocks = -(-end // BLOCK_TOKENS) - begin // BLOCK_TOKENS
        if not self._open or not begin < end <= self.window or begin % BLOCK_TOKENS:
            return False
        if state.nbytes != blocks * self._pool.block_bytes:
            return False
        self._has_logits = False
        self._make_writable(begin, end)
        self._pool.write(self._blocks[begin // BLOCK_TOKENS :], state)
        self._length = end
        return True

    # --- ending ------------------------------------------------------------------------------

    def _fatal(self, what: str, cause: str, **numbers: object) -> SessionFatal:
        self._has_logits = False
        return SessionFatal(
            f"The session's engine context can't be trusted: {what}. Open a new session.",
            metadata={"cause": cause, **numbers},
        )

    def close(self) -> None:
        """See the protocol."""
        if not self._open:
            return
        self._open, self._has_logits = False, False
        self._pool.drop(self._blocks)
        self._blocks.clear()
        self._pool.unreserve(self._reserved)
        self._model.sequences.discard(self)
