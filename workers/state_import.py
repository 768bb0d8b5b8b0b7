"""KV from files into a session: every chunk verified before an engine gets it, undone if refused.

Owns the order of an import's checks, and which context takes the bytes. Knows neither an engine's
bytes nor who keeps the files.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.errors import (
    DigestMismatch,
    InsufficientMemory,
    InvalidRequest,
    ManifestMismatch,
    SessionFatal,
)
from modeld.shared.messages import ImportOp, ImportResult
from modeld.workers.executor import OpContext
from modeld.workers.images import SeeingContext
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.new_files import Cancelled
from modeld.workers.pool import ContextPool
from modeld.workers.pooled_context import PooledContext, Tokens, common_prefix
from modeld.workers.refusals import check_identity, context_overflow
from modeld.workers.residency import Source, held, live_of
from modeld.workers.session import Session
from modeld.workers.state_file import StateFile, StateHeader, open_state, read_ahead

if TYPE_CHECKING:
    from modeld.workers.engine import State

log = logging.getLogger(__name__)


def import_(
    session: Session, pool: ContextPool, source: Source, op: ImportOp, context: OpContext
) -> ImportResult:
    """Take an exported range into the session's context; a later prompt then finds it there.

    A range from 0 on replaces what the context holds, any other one goes behind exactly the tokens
    that it was computed after. Every chunk is verified before the engine gets it, and what is
    refused on the way is undone: a refusal leaves the session with what it held.

    Raises ManifestMismatch for a state of another identity or after other tokens, DigestMismatch
    for a damaged file or bytes that the engine won't take, SnapshotNotFound and InvalidRequest for
    a path or range that can't be, ContextOverflow beyond the window, and InsufficientMemory where
    there is none for a chunk, or for the second context that replacing takes.
    """
    began_s = time.perf_counter()
    with open_state(op.path) as file:
        otherwise = "Its bytes mean nothing here: compute that state again."
        check_identity(session, source, file.header, "The state", otherwise)
        _check_fits(session, pool, source, file.header)
        cancelled = False
        try:
            incoming = Incoming([file], file.header.tokens, file.header.begin, context)
            if len(held(session)) == file.header.begin:
                append(session, incoming)
            else:
                replace(session, pool, incoming)
            _found_again(session)
        except Cancelled:
            cancelled = True
        header, digest = file.header, file.digest
    exact, why = _import_exactness(session, source, header)
    return ImportResult(
        begin=header.begin,
        end=header.end,
        tokens=0 if cancelled else header.end - header.begin,
        resident=session.logical,
        available=session.available,
        retained=session.retained,
        payload_bytes=header.payload_bytes,
        digest=digest,
        exact=exact,
        exact_reason=why,
        seconds=time.perf_counter() - began_s,
        cancelled=cancelled,
        **pool.totals(),
    )


class Incoming:
    """Open files on their way into a context: the KV of ``tokens`` from ``begin`` on, one file
    behind the other.
    """

    def __init__(
        self, files: Sequence[StateFile], tokens: Tokens, begin: int, context: OpContext
    ) -> None:
        self.tokens, self.begin = tokens, begin
        self._files, self._live = files, live_of(context)

    def verify(self) -> None:
        """Read it all; raises what reading it raises, and Cancelled."""
        with contextlib.closing(self._parts()) as parts:
            for _ in parts:
                self._live()

    def into(self, entry: PooledContext) -> None:
        """Append all of it; raises on the way what leaves the context with a part of it."""
        begin = self.begin
        with contextlib.closing(self._parts()) as parts:
            for end, state in parts:
                self._live()
                if not entry.import_state(state, self.tokens[begin:end]):
                    raise not_taken(begin, end)
                begin = end
        entry.settle()

    def _parts(self) -> Generator[tuple[int, State], None, None]:
        return read_ahead(self._files, MemoryGuard().spare_bytes, self._live)


def not_taken(begin: int, end: int) -> DigestMismatch:
    return DigestMismatch(
        f"The engine doesn't take the state of positions {begin} to {end}: its bytes aren't what "
        "this context holds for such a range. Nothing was changed. Compute that state again.",
        metadata={"cause": "engine", "begin": begin, "end": end},
    )


def append(session: Session, incoming: Incoming) -> None:
    """Behind what the context holds, which stays: undone by going back."""
    entry, begin = session.entry, incoming.begin
    if not begin:
        entry.clear()  # of another kv_digest, which this session could never use
        entry.kv_digest, entry.runtime_digest = session.kv_digest, session.runtime_digest
    try:
        incoming.into(entry)
    except SessionFatal:
        raise
    except BaseException:
        entry.trim(begin)
        raise


def replace(
    session: Session,
    pool: ContextPool,
    incoming: Incoming,
    otherwise: str = "trim the session to 0 tokens first if it may go",
) -> None:
    """Into a second context first, so that what is held stays until all of it is there.

    ``otherwise`` is what to do where there is none.
    """
    mine = session.entry
    try:
        other, taken = pool.stand_in(mine)
    except InsufficientMemory as error:
        raise InsufficientMemory(
            f"{error.message} What the session holds stays until an imported state is complete, "
            f"which takes a second context: {otherwise}.",
            metadata={**error.metadata, "held": len(mine)},
        ) from None
    other.kv_digest, other.runtime_digest = session.kv_digest, session.runtime_digest
    try:
        incoming.into(other)
    except SessionFatal as error:
        log.warning("importing ended the second context: %s", error.message)
        pool.destroy(other)
        raise not_taken(0, len(incoming.tokens)) from None
    except BaseException:
        if taken:
            other.trim(0)
            pool.release(other)
        else:
            pool.destroy(other)
        raise
    pool.swap(mine, other)
    session.context = other
    if not taken:
        pool.give_up(mine)  # the slot holds as many contexts as before


def _found_again(session: Session) -> None:
    """Resident is what of the prompt and the answer so far the context holds now."""
    target = np.asarray(session.known_tokens(), dtype=np.int32)
    session.logical = common_prefix(session.entry.tokens, target)


def _check_fits(session: Session, pool: ContextPool, source: Source, header: StateHeader) -> None:
    """Its tokens are this model's, fit the window, and follow what the context holds."""
    tokens, here, begin = header.tokens, held(session), header.begin
    least = (
        np.iinfo(np.int32).min if isinstance(session.entry.engine_context, SeeingContext) else 0
    )  # an image's ids are below 0
    if int(tokens.min()) < least or int(tokens.max()) >= source.vocab:
        raise DigestMismatch(
            f"The state has token ids outside {least} to {source.vocab - 1}: it isn't of this "
            "model. Nothing was changed. Compute that state again.",
            metadata={"cause": "tokens", "vocab": source.vocab},
        )
    window = session.window
    if header.end > window:
        raise context_overflow(
            session,
            pool,
            f"The state is of {header.end} tokens, {header.end - window} more than the session's "
            f"window of {window}. Nothing was changed. Open a session with a larger window.",
            stage="import",
            asked=header.end,
            additional=header.end - begin,
            drop=header.end - window,
        )
    if not begin:
        return
    if len(here) != begin:
        raise InvalidRequest.of(
            "begin",
            begin,
            f"{len(here)}, the tokens that the session holds",
            "A range goes back behind exactly what it was computed after: bring the session to "
            "those tokens, and trim it to them.",
        )
    same = common_prefix(here, tokens[:begin])
    if same != begin:
        raise ManifestMismatch(
            f"The state was computed after other tokens than the session's: they differ from "
            f"position {same} on. Nothing was changed. Compute that state again.",
            metadata={"reason": "tokens", "position": same, "begin": begin},
        )


def _import_exactness(session: Session, source: Source, header: StateHeader) -> tuple[bool, str]:
    exact, why = source.exactness(session.entry)
    if not header.exact:
        return False, header.exact_reason
    if exact and header.runtime_digest != session.runtime_digest:
        return False, "it was computed under another runtime_digest"
    return exact, why
