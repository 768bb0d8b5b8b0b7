"""Reading a turn or a decode as it is generated; synchronous.

A stream starts with the first item taken. A call is sent again after a loss only while nothing
has been delivered; what has been streamed is never replayed silently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Protocol, Self

from modeld.client.calls import Call, TurnEvent, TurnItem
from modeld.client.errors import RECOVERABLE, CallCancelled
from modeld.client.prompts import GeneratedTurn
from modeld.client.session_core import StreamState
from modeld.client.transport import Stream
from modeld.client.values import Chunk, Final, PrefillStatus, QueueStatus

EventCallback = Callable[[TurnItem], None]


class Source(Protocol):
    """What a stream asks of its session."""

    def begin(self, operation: str) -> None:
        """Make the session usable: recover from an earlier loss, or raise."""

    def send(self, call: Call[TurnEvent]) -> Stream[TurnEvent]: ...

    def recover_from(self, cause: Exception, operation: str, *, retry: bool) -> bool:
        """Whether the session is usable again and the call may be sent again."""

    def done(self, state: StreamState) -> GeneratedTurn | None: ...

    def failed(self, error: BaseException) -> None: ...


class ChunkStream:
    """What both kinds of stream share: events in, chunks out, then the final record."""

    def __init__(
        self,
        source: Source,
        operation: str,
        make_call: Callable[[], Call[TurnEvent]],
        on_event: EventCallback | None = None,
        on_done: Callable[[StreamState, GeneratedTurn | None], None] | None = None,
    ) -> None:
        self._source = source
        self._operation = operation
        self._make_call = make_call
        self._on_event = on_event
        self._on_done = on_done
        self._state = StreamState()
        self._stream: Stream[TurnEvent] | None = None
        self._chunks = self._run()
        self._recorded = False
        self.cancelled = False
        self.generated_turn: GeneratedTurn | None = None

    # --- what has arrived ------------------------------------------------------------------------

    @property
    def queue(self) -> QueueStatus | None:
        """The latest word on the queue, if the call had to wait."""
        return self._state.queue

    @property
    def final(self) -> Final | None:
        """The final record; None until the stream has ended, and after a cancel."""
        return self._state.final

    @property
    def text(self) -> str:
        """All text delivered so far."""
        return self._state.text

    @property
    def seconds_to_first_token(self) -> float | None:
        """From the start of the call to its first chunk, waiting and prefill included."""
        return self._state.seconds_to_first_token

    # --- reading ---------------------------------------------------------------------------------

    def chunks(self) -> Iterator[Chunk]:
        """The chunks not yet taken."""
        return self._chunks

    def read(self) -> str:
        """Take everything to the end; returns the whole text."""
        for _chunk in self._chunks:
            pass
        return self.text

    def cancel(self) -> None:
        """Stop generating. The session stays usable; iteration ends without a final record."""
        self.cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    def close(self) -> None:
        """Cancel unless the stream has ended."""
        if self._state.final is None:
            self.cancel()
        with contextlib.suppress(ValueError):  # another thread is reading; the cancel ends it
            self._chunks.close()
            self._record()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self) -> Generator[Chunk, None, None]:
        try:
            yield from self._attempts()
        except BaseException as error:
            self._source.failed(error)
            if isinstance(error, Exception):
                self._recorded = True  # nothing of a failed turn joins a history
            raise

    def _attempts(self) -> Generator[Chunk, None, None]:
        may_retry = True
        self._source.begin(self._operation)
        while not self.cancelled:
            try:
                yield from self._attempt()
                return
            except CallCancelled:
                if not self._asked_to_cancel():
                    raise
                self._record()
                return
            except RECOVERABLE as cause:
                retry = may_retry and not self._state.delivered
                if not self._source.recover_from(cause, self._operation, retry=retry):
                    raise
                may_retry = False
                started_s, self._state = self._state.started_s, StreamState()
                self._state.started_s = started_s

    def _attempt(self) -> Generator[Chunk, None, None]:
        self._stream = self._source.send(self._make_call())
        if self._asked_to_cancel():  # by another thread, while the call was on its way
            self._stream.cancel()
        try:
            for kind, value in self._stream:
                if self._on_event is not None:
                    self._on_event(value)
                chunk = self._state.feed(kind, value)
                if chunk is not None:
                    yield chunk
        finally:
            self._stream.close()
        if not self.cancelled:
            self._state.require_final()
        self._record()

    def _asked_to_cancel(self) -> bool:
        return self.cancelled

    def _record(self) -> None:
        """Tell the session, and the owner of the history, once: the whole answer, or what a cancel
        left of it.
        """
        if self._recorded or self._stream is None:
            return
        self._recorded = True
        self.generated_turn = self._source.done(self._state)
        if self._on_done is not None and (self._state.final or self._state.text):
            self._on_done(self._state, self.generated_turn)


class DecodeStream(ChunkStream):
    """An iterator of ``Chunk``; ``final`` stands when it has ended."""

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)


class TurnStream(ChunkStream):
    """An iterator of text; ``chunks()`` gives the whole chunks instead."""

    @property
    def prefix_status(self) -> PrefillStatus | None:
        """What the prefix cost; stands before the first chunk."""
        return self._state.prefix_status

    @property
    def suffix_status(self) -> PrefillStatus | None:
        return self._state.suffix_status

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        for chunk in self._chunks:
            if chunk.text:
                return chunk.text
        raise StopIteration
