"""Several sequences of the paged executor, whose sampled tokens go through one inference.

Owns that inference's inputs. A stream is a sequence like any other, over the blocks that all share;
who waits for whom is the gate's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import InsufficientMemory, InvalidRequest, SessionFatal
from modeld.workers.batching import Gate
from modeld.workers.engine import Cancelled, Piece
from modeld.workers.openvino.graph import SELECTED
from modeld.workers.openvino.native import ov, words
from modeld.workers.openvino.paged import PagedContext, PagedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_STREAMS = 64  # far more than gain anything


class PagedStreams:
    """See ``BatchContext``. Not thread-safe: one thread at a time."""

    def __init__(
        self,
        model: PagedModel,
        streams: int,
        window: int,
        gate: Gate,
        spare_bytes: Callable[[], int],
        *,
        company: bool = False,
    ) -> None:
        """``window``: tokens a stream. ``company``: see ``BatchContext``.

        Raises InsufficientMemory where there are not enough blocks, and leaves none reserved.
        """
        self.model, self.gate, self.company = model, gate, company
        self.chunk, self.together = model.chunk, False  # it would be one inference each
        self.broken = False
        self.streams: list[PagedStream] = []
        try:
            for index in range(streams):
                self.streams.append(PagedStream(self, index, window, spare_bytes))
        except InsufficientMemory:
            self.close()
            raise
        self.window = self.streams[0].window
        self._request: Any = None  # made for the first tokens that go together

    def step(self, tokens: Sequence[tuple[int, int]]) -> None:
        """See the protocol."""
        if len(tokens) == 1 and not self.company:
            index, token = tokens[0]
            self.streams[index].step_alone(token)
            return
        streams = [self.streams[index] for index, _ in tokens]
        ids = np.array([token for _, token in tokens], dtype=np.int64)
        try:
            tables = [stream.table_for_one() for stream in streams]
            past = [len(stream) for stream in streams]
            if len(ids) == 1:
                # A sequence of one token in a block that is nobody's, so that there are two rows.
                ids, past = np.append(ids, 0), [*past, 0]
                tables.append(np.array([self.model.scratch], dtype=np.int32))
            rows = self._infer(ids, past, tables)[: len(streams)]
        except Exception as error:
            self.broken = True
            raise SessionFatal(
                f"Evaluating {len(tokens)} tokens together failed ({words(error)}). The sessions "
                "in this batch are lost: open new ones.",
                metadata={"cause": "engine", "streams": len(self.streams)},
            ) from None
        for stream, row in zip(streams, rows, strict=True):
            stream.appended(row)

    def _infer(
        self, ids: NDArray[np.int64], past: list[int], tables: list[NDArray[np.int32]]
    ) -> NDArray[np.float32]:
        """One token behind each sequence; their rows of logits, valid until the next inference."""
        count, model = len(ids), self.model
        if self._request is None:
            self._request = model.new_request()
        begins = np.cumsum([0, *(len(table) for table in tables)], dtype=np.int32)
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": ids,
            "position_ids": np.array(past, dtype=np.int64),
            "max_context_len": np.array(max(past) + 1, dtype=np.int32),
            "past_lens": np.array(past, dtype=np.int32),
            "subsequence_begins": np.arange(count + 1, dtype=np.int32),
            "block_indices_begins": begins,
            "block_indices": np.concatenate(tables),
        }
        if model.compiled.selects:
            arrays[SELECTED] = np.arange(count, dtype=np.int64)
        for name, array in arrays.items():
            self._request.set_tensor(name, ov.Tensor(array))
        model.begin(count)
        self._request.infer()
        model.finished(count)
        rows: NDArray[np.float32] = self._request.get_output_tensor(0).data
        return rows.reshape(-1, model.compiled.vocabulary)

    def evaluate(self, pieces: Sequence[Piece]) -> list[int]:
        """See the protocol."""
        return [self.streams[one.stream].evaluate_now(one.tokens, one.cancelled) for one in pieces]

    def close(self) -> None:
        """See the protocol."""
        streams, self.streams = self.streams, []
        for stream in streams:
            PagedContext.close(stream)
        self._request = None


class PagedStream(PagedContext):
    """A sequence that waits for its turn. Closing empties it; its blocks stay reserved."""

    def __init__(
        self, batch: PagedStreams, index: int, window: int, spare_bytes: Callable[[], int]
    ) -> None:
        super().__init__(batch.model, window, spare_bytes)
        self._batch, self._index = batch, index

    def __len__(self) -> int:
        return self._length

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        """See the protocol."""
        self._check_room(position, len(tokens))
        self._check_tokens(min(tokens, default=0), max(tokens, default=0))
        return self._batch.gate.evaluate(self._batch, self._index, tokens, cancelled)

    def step(self, token: int, position: int) -> None:
        """See the protocol."""
        self._check_room(position, 1)
        self._check_tokens(token)
        self._batch.gate.step(self._batch, self._index, token)

    def _check_tokens(self, *tokens: int) -> None:
        vocabulary = self._model.compiled.vocabulary
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise InvalidRequest.of("token", token, f"0 to {vocabulary - 1}")

    def _check_room(self, position: int, count: int) -> None:
        if self._batch.broken:
            raise self._fatal("an inference of its batch failed", "engine")
        super()._check_room(position, count)

    # --- for its batch -----------------------------------------------------------------------

    def evaluate_now(self, tokens: NDArray[np.int64], cancelled: Cancelled) -> int:
        """A prompt's tokens, at the end."""
        return super().evaluate(tokens.tolist(), self._length, cancelled=cancelled)

    def step_alone(self, token: int) -> None:
        """One sampled token, at the end, as a sequence by itself."""
        super().step(token, self._length)

    def table_for_one(self) -> NDArray[np.int32]:
        """Its blocks, with room for one token more."""
        self._has_logits = False
        self._make_writable(self._length, self._length + 1)
        return self._table[: len(self._blocks)]

    def appended(self, row: NDArray[np.float32]) -> None:
        """That token is there, and these are the logits behind it."""
        self._length += 1
        self._logits[:] = row
        self._has_logits = True

    def can_trim(self, keep: int) -> bool:
        """See the protocol."""
        return not self._batch.broken and super().can_trim(keep)

    def close(self) -> None:
        """See the protocol."""
        if self.can_trim(0):
            self.trim(0)
