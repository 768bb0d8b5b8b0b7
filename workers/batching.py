"""Several operations of one worker, advancing together in one engine batch.

Owns the threads that operations run in, of which one runs at a time, the requests that they wait
with, and who of them is served next. Knows no engine, session or prompt.

An operation that may run beside others has a thread of its own (``Strand``). It runs until it needs
the engine or credit; only when none can go on does the engine thread run a batch. So whatever
stands between two waits is done as if alone, and the engine is used by one thread only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from modeld.shared.errors import ModeldError, SessionFatal
from modeld.workers.engine import Piece

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from modeld.workers.engine import BatchContext, Cancelled

log = logging.getLogger(__name__)

# Of prompts at a time while other operations run: they wait for so many tokens at most. Each
# takes a small model milliseconds, so that a stream's next token comes within a blink.
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Place:
    """How an operation may run with regard to others.

    ``alone``: with nothing else. ``beside``: in a strand, with any others but those of the same
    sessions. ``between``: at once, between two batches, since it needs no batch itself.
    """

    how: Literal["alone", "beside", "between"]
    sessions: tuple[str, ...] = ()


class Strand:
    """A thread that runs only while the engine thread waits for it. Ends with its work."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        # Held but for the moment in which the turn goes over: a lock is the cheapest signal.
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._main, name="operation", daemon=True)
        self.begun = False
        self.ended = False
        self.error: BaseException | None = None  # that the work raised

    def resume(self) -> None:
        """Let it run until it pauses or ends. The engine thread's call."""
        if self.begun:
            self._turn.release()
        else:
            self.begun = True
            self._thread.start()
        self._back.acquire()
        if self.ended:
            self._thread.join()

    def pause(self) -> None:
        """Give the turn back until the next ``resume``. This thread's own call."""
        self._back.release()
        self._turn.acquire()

    def _main(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self.ended = True
        self._back.release()


@dataclass(eq=False)
class _Request:
    """What a strand waits for: tokens at the end of a stream."""

    batch: BatchContext
    stream: int
    tokens: NDArray[np.int64]
    sampled: bool  # one token that was sampled: it goes with those of other streams
    cancelled: Cancelled
    strand: Strand | None
    done: int = 0
    error: ModeldError | None = None
    finished: bool = field(default=False)

    @property
    def left(self) -> int:
        """Tokens not yet evaluated."""
        return len(self.tokens) - self.done


class Gate:
    """Between operations and the engine: takes requests, runs batches, says who goes on.

    Each round serves either every sampled token that waits, together, or a chunk of prompts. Where
    both wait, they alternate, and several prompts take turns.
    """

    def __init__(self, chunk: int = CHUNK_TOKENS) -> None:
        """``chunk``: tokens of prompts at a time while other operations run."""
        self._chunk = chunk
        self._pending: list[_Request] = []
        self._prompt_was_last = False
        self.current: Strand | None = None
        self.alive = 0  # strands that have begun and not ended

    # --- strands -------------------------------------------------------------------------------

    def run(self, strand: Strand) -> bool:
        """Let a strand go on until it waits or ends; whether it has ended."""
        if not strand.begun:
            self.alive += 1
        self.current = strand
        try:
            strand.resume()
        finally:
            self.current = None
        self.alive -= strand.ended
        return strand.ended

    # --- what streams ask for ------------------------------------------------------------------

    def evaluate(
        self, batch: BatchContext, stream: int, tokens: Sequence[int], cancelled: Cancelled
    ) -> int:
        """Append a prompt's tokens; how many were: fewer only when cancelled. Raises
        SessionFatal where the batch's state is unknown afterwards.
        """
        if not len(tokens):
            return 0
        ids = np.asarray(tokens, dtype=np.int64)
        return self._served(_Request(batch, stream, ids, False, cancelled, self.current)).done

    def step(self, batch: BatchContext, stream: int, token: int) -> None:
        """Append one sampled token. Raises as ``evaluate`` does."""
        ids = np.array([token], dtype=np.int64)
        self._served(_Request(batch, stream, ids, True, _never, self.current))

    def _served(self, request: _Request) -> _Request:
        if request.strand is None:  # nothing runs beside it
            while not request.finished:
                self._run([request])
        else:
            self._pending.append(request)
            request.strand.pause()
        if request.error is not None:
            raise request.error
        return request

    # --- rounds --------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether there is anything for the engine to do."""
        return bool(self._pending)

    def round(self) -> list[Strand]:
        """Run one engine batch; the strands that can go on."""
        batch = self._pending[0].batch
        self._run([request for request in self._pending if request.batch is batch])
        ready = [request.strand for request in self._pending if request.finished and request.strand]
        self._pending = [request for request in self._pending if not request.finished]
        return ready

    def _run(self, requests: list[_Request]) -> None:
        """One batch of what these ask for, all of one context."""
        try:
            for request in requests:
                request.finished = not request.sampled and request.cancelled()
            sampled = [request for request in requests if request.sampled]
            prompts = [r for r in requests if not r.sampled and not r.finished]
            if sampled and (self._prompt_was_last or not prompts):
                self._prompt_was_last = False
                self._steps(sampled)
            elif prompts:
                self._prompt_was_last = True
                self._prompts(prompts, awaited=bool(sampled))
        except Exception as error:
            # One context holds what all of them have: none can be trusted.
            fatal = error if isinstance(error, SessionFatal) else _unplanned(error)
            requests[0].batch.broken = True
            for request in requests:
                request.error, request.finished = _copy(fatal), True

    def _steps(self, requests: list[_Request]) -> None:
        batch = requests[0].batch
        batch.step([(request.stream, int(request.tokens[0])) for request in requests])
        for request in requests:
            request.done, request.finished = 1, True

    def _prompts(self, requests: list[_Request], *, awaited: bool) -> None:
        """A chunk of the first one, and what may share the engine batch with it.

        While sampled tokens are ``awaited`` that is what ends within the same chunk: each sampled
        token in between would be evaluated in a smaller batch than when all go on. Else it is a
        chunk of each, where the engine gains by it.
        """
        batch = requests[0].batch
        most = min(self._chunk, batch.chunk) if self.alive > 1 else batch.chunk  # of one
        all_go = batch.together and not awaited
        free = batch.chunk if all_go else most
        shares: list[tuple[_Request, int]] = []
        for request in requests:
            count = min(most, request.left)
            if count > 2 and request.left - count == 1:
                count -= 1  # a prompt's token alone rounds differently
            if not shares or (count <= free and (all_go or count == request.left)):
                shares.append((request, count))
                free -= count
        done = batch.evaluate(
            [
                Piece(
                    request.stream,
                    request.tokens[request.done : request.done + count],
                    count == request.left,
                    request.cancelled,
                )
                for request, count in shares
            ]
        )
        for (request, count), got in zip(shares, done, strict=True):
            request.done += got
            request.finished = got < count or not request.left
            if not request.finished and request in self._pending:  # the next one's turn
                self._pending.remove(request)
                self._pending.append(request)


def _never() -> bool:
    return False


def _unplanned(error: Exception) -> SessionFatal:
    log.exception("a batch failed")
    return SessionFatal(
        f"The engine failed ({type(error).__name__}) in a batch of several sessions; the state of "
        "all of them can't be trusted. Open new sessions.",
        metadata={"cause": "engine_error"},
    )


def _copy(error: SessionFatal) -> SessionFatal:
    """One for each session: it is raised in several threads."""
    return SessionFatal(error.message, metadata=dict(error.metadata))
