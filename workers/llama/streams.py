"""One llama context of several streams, whose sampled tokens are evaluated together.

Each stream has cells of its own, so that what a neighbour holds changes no result. Keeps the count
of what each holds and proves it against the engine after every change. Knows no prompt, sampling
or policy, and not who waits for whom: that is the gate's.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import (
    SessionFatal,
)
from modeld.shared.messages import PlacedOut
from modeld.workers.batching import Gate
from modeld.workers.engine import Cancelled, Piece
from modeld.workers.llama.context import ModelTraits
from modeld.workers.llama.made import Rows, make
from modeld.workers.llama.native import engine_log, llama
from modeld.workers.llama.parameters import ContextSettings
from modeld.workers.llama.stream import LlamaStream

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ABORTED = 2
_NO_ABORT = llama.ggml_abort_callback(0)
# Of the rows of several streams' prompts evaluated together, what may be there for the shorter ones
# to be as long as the longest. Rows cost alike, and together a row costs about a tenth less.
_PADDED_PART = 0.1
MAX_STREAMS = 64  # far more than gain anything; the engine's own limit is 256


class LlamaStreams:
    """See ``BatchContext``. Not thread-safe: one thread at a time."""

    def __init__(
        self,
        model: Any,
        traits: ModelTraits,
        settings: ContextSettings,
        streams: int,
        gate: Gate,
        planned_kv_bytes: Callable[[int], int],
        on_close: Callable[[LlamaStreams], None],
        work_bytes: int = 0,
        spare_bytes: Callable[[], int] = lambda: sys.maxsize,
        *,
        company: bool = False,
    ) -> None:
        """``settings`` are of one stream. ``company``: a sampled token is never evaluated alone,
        since this model's results would differ from those among others.

        Raises InsufficientMemory with the engine's words when it can't be made.
        """
        self.traits, self.company, self.gate = traits, company, gate
        self.spare_bytes, self._on_close = spare_bytes, on_close
        made = make(model, settings, planned_kv_bytes, work_bytes, streams)
        self.handle, self.memory, self.window = made.handle, made.memory, made.window
        self.chunk, self._n_ubatch = made.n_batch, made.n_ubatch
        self.broken, self.together = False, True
        self.streams = [
            LlamaStream(self, index, _shares(made.placed, streams, index))
            for index in range(streams)
        ]
        self._polled: Cancelled = _never
        self._aborted = False
        # The engine keeps only the address: the callback must live as long as the context.
        self._callback = llama.ggml_abort_callback(self._on_abort_poll)
        self._rows = rows = Rows(max(self.chunk, 2), streams)
        self._tokens, self._positions, self._wanted = rows.tokens, rows.positions, rows.wanted
        # Whose the tokens of a batch are: all one stream's, or each another's.
        self._of_one = [rows.all_of(index) for index in range(streams)]

    # --- evaluating --------------------------------------------------------------------------

    def step(self, tokens: Sequence[tuple[int, int]]) -> None:
        """See the protocol."""
        self.check_usable()
        asked = dict(tokens)
        rows = sorted(asked)
        companions = self._companions(rows) if self.company else []
        for index in companions:
            self.streams[index].settle()
        places = sorted([*rows, *companions])
        for at, index in enumerate(places):
            self._tokens[at] = asked.get(index, 0)
            self._positions[at] = self.streams[index].length
            self._rows.of[at] = self._rows.ids[index]
        # A companion's logits too: the last layer and the output matrix see the wanted rows only.
        self._wanted[: len(places)] = 1
        self._rows.batch.seq_id = self._rows.of
        code = self._decode(len(places))
        self._wanted[: len(places)] = 0
        if code:
            raise self._fatal(f"evaluating {len(rows)} tokens together answered {code}", code=code)
        for index in companions:
            llama.llama_memory_seq_rm(self.memory, index, self.streams[index].length, -1)
            self.prove(index)
        for at, index in enumerate(places):
            if index in asked:
                self._appended(index, 1, at)

    def _companions(self, rows: Sequence[int]) -> list[int]:
        """Streams that lend a cell for a moment, so that no token is alone.

        The engine evaluates streams together only where their numbers follow each other. Where no
        neighbour has a free cell, a token goes alone all the same.
        """
        lent: list[int] = []
        for index in rows:
            if {index - 1, index + 1} & {*rows, *lent}:
                continue
            for other in (index + 1, index - 1):
                if 0 <= other < len(self.streams) and self.streams[other].length < self.window:
                    lent.append(other)
                    break
        return lent

    def evaluate(self, pieces: Sequence[Piece]) -> list[int]:
        """See the protocol. ``cancelled`` is polled between batches, and some hundred times a
        micro-batch from within the engine; of pieces that go together, whether all are.
        """
        self.check_usable()
        done = dict.fromkeys((one.stream for one in pieces), 0)
        for group in self._grouped(pieces):
            cancelled = partial(_all_cancelled, group)
            self._polled, self._aborted = cancelled, False
            llama.llama_set_abort_callback(self.handle, self._callback, None)
            try:
                if len(group) == 1:
                    done[group[0].stream] = self._evaluate_one(group[0])
                elif not cancelled() and self._evaluate_together(group):
                    done.update((one.stream, len(one.tokens)) for one in group)
            finally:
                llama.llama_set_abort_callback(self.handle, _NO_ABORT, None)
                self._polled = _never
        return [done[one.stream] for one in pieces]

    def _grouped(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """Which go together: neighbours of about the same length, in one micro-batch."""
        groups: list[list[Piece]] = []
        for one in sorted(pieces, key=lambda piece: piece.stream):
            group = [*groups[-1], one] if groups else [one]
            longest = max(len(piece.tokens) for piece in group)
            rows = len(group) * longest
            fits = rows <= min(self._n_ubatch, self.chunk) and all(
                self.streams[piece.stream].length + longest <= self.window for piece in group
            )
            follows = len(group) > 1 and group[-2].stream + 1 == one.stream
            padding = rows - sum(len(piece.tokens) for piece in group)
            if follows and fits and longest > 1 and padding <= rows * _PADDED_PART:
                groups[-1] = group
            else:
                groups.append([one])
        return groups

    def _evaluate_together(self, group: Sequence[Piece]) -> bool:
        """Pieces of several streams in one micro-batch; False, and nothing changed, where that was
        cancelled.

        The engine takes as many tokens of each at a time: behind the shorter ones go copies of
        their last, to which nothing attends and whose cells are freed again.
        """
        longest = max(len(one.tokens) for one in group)
        begins = [self.streams[one.stream].length for one in group]
        lasts = [at * longest + len(one.tokens) - 1 for at, one in enumerate(group)]
        for at, (one, begin) in enumerate(zip(group, begins, strict=True)):
            rows = slice(at * longest, (at + 1) * longest)
            self._tokens[rows] = one.tokens[-1]
            self._tokens[rows.start : rows.start + len(one.tokens)] = one.tokens
            self._positions[rows] = np.arange(begin, begin + longest)
            self._rows.of[rows] = [self._rows.ids[one.stream]] * longest
            self._wanted[lasts[at]] = one.wanted
        self._rows.batch.seq_id = self._rows.of
        code = self._decode(len(group) * longest)
        self._wanted[lasts] = 0
        if code == _ABORTED and self._aborted:
            for one in group:
                self.prove(one.stream)
            return False
        if code:
            raise self._fatal(
                f"evaluating {longest} tokens of {len(group)} streams each answered {code}",
                code=code,
            )
        for one, begin, last in zip(group, begins, lasts, strict=True):
            size = len(one.tokens)
            if size < longest:
                llama.llama_memory_seq_rm(self.memory, one.stream, begin + size, -1)
            self._appended(one.stream, size, last if one.wanted else None)
        return True

    def _evaluate_one(self, piece: Piece) -> int:
        """In as many batches as it takes; how many tokens of it were evaluated."""
        self._rows.batch.seq_id = self._of_one[piece.stream]
        count, begin = len(piece.tokens), 0
        while begin < count:
            if piece.cancelled():
                break
            size = min(self.chunk, count - begin)
            if size > 1 and size % self._n_ubatch == 1:
                size -= 1  # no micro-batch of one token, which rounds differently
            last = piece.wanted and begin + size == count
            done = self._prompt_part(piece.stream, piece.tokens[begin : begin + size], last)
            begin += done
            if done < size:
                break
        return begin

    def _prompt_part(self, index: int, tokens: NDArray[np.int64], wanted: bool) -> int:
        """One batch of one stream's prompt; how many of its tokens were evaluated."""
        size, position = len(tokens), self.streams[index].length
        # Behind a lone token goes a copy of it, to which it doesn't attend and whose cell is freed
        # again: the engine multiplies by one row and by several with different routines.
        rows = 2 if size == 1 and position + 2 <= self.window else size
        self._tokens[:rows] = tokens if rows == size else tokens[0]
        self._positions[:rows] = np.arange(position, position + rows)
        # With company nor does the last layer, which sees the wanted rows only, see one alone. The
        # engine gives as many as there are streams: of one stream nothing has company.
        several = self.company and len(self.streams) > 1
        first = max(0, size - 2) if several else size - 1
        self._wanted[first : rows if several else size] = wanted
        code = self._decode(rows)
        self._wanted[:rows] = 0
        if not code and rows > size:
            llama.llama_memory_seq_rm(self.memory, index, position + size, -1)
        if not code:
            self._appended(index, size, size - 1 if wanted else None)
            return size
        kept = self._held(index) - position  # whole micro-batches of the batch stay
        whole = kept == size or kept % self._n_ubatch == 0
        if code != _ABORTED or not self._aborted or not 0 <= kept <= size or not whole:
            raise self._fatal(
                f"evaluating {size} tokens of stream {index} at {position} answered {code}, of "
                f"which {kept} stayed",
                code=code,
            )
        self._appended(index, kept, None)
        return kept

    def _decode(self, rows: int) -> int:
        self._rows.batch.n_tokens = rows
        return int(llama.llama_decode(self.handle, self._rows.batch))

    def _appended(self, index: int, count: int, row: int | None) -> None:
        """Record what a stream got, proven, and copy its logits from a row of the batch."""
        stream = self.streams[index]
        stream.length += count
        stream.has_logits = False
        self.prove(index)
        if row is None:
            return
        pointer = llama.llama_get_logits_ith(self.handle, row)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if not address:
            raise self._fatal(f"stream {index} has no logits")
        ctypes.memmove(stream.row.ctypes.data, address, stream.row.nbytes)
        stream.has_logits = True

    def _held(self, index: int) -> int:
        return int(llama.llama_memory_seq_pos_max(self.memory, index)) + 1

    def prove(self, index: int) -> None:
        """Raises SessionFatal where a stream doesn't hold what its record says."""
        held, length = self._held(index), self.streams[index].length
        if held != length:
            raise self._fatal(f"stream {index} holds {held} tokens, not {length}")

    def _on_abort_poll(self, _data: object) -> bool:
        if self._polled():
            self._aborted = True
        return self._aborted

    def check_usable(self) -> None:
        if not self.handle or self.broken:
            raise self._fatal("it is closed or was found broken before")

    def _fatal(self, what: str, **numbers: object) -> SessionFatal:
        self.broken = True
        said = engine_log.words()
        return SessionFatal(
            f"The engine context that {len(self.streams)} streams share can't be trusted: {what}"
            f"{f' ({said})' if said else ''}. The sessions in it are lost: open new ones.",
            metadata={"cause": "engine", "streams": len(self.streams), **numbers},
        )

    def close(self) -> None:
        """See the protocol."""
        if not self.handle:
            return
        handle, self.handle, self.memory = self.handle, None, None
        llama.llama_free(handle)
        self._on_close(self)


def _shares(placed: Sequence[PlacedOut], streams: int, index: int) -> list[PlacedOut]:
    """What one stream is charged: equal parts, and what is left over for the first."""

    def share(size: int) -> int:
        return size // streams + (size % streams if index == 0 else 0)

    return [
        PlacedOut(
            device=part.device,
            kv_bytes=share(part.kv_bytes),
            compute_bytes=share(part.compute_bytes),
        )
        for part in placed
    ]


def _all_cancelled(pieces: Sequence[Piece]) -> bool:
    return all(one.cancelled() for one in pieces)


def _never() -> bool:
    return False
