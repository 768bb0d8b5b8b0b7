"""The sessions of a loaded model, by id, and what becomes of one whose state is unknown.

Knows no operation, prompt or engine.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from modeld.shared.errors import InvalidRequest, ModeldError, SessionFatal, SessionNotFound

if TYPE_CHECKING:
    from modeld.workers.pool import ContextPool
    from modeld.workers.session import Session

log = logging.getLogger(__name__)


class OpenSessions:
    """``by_id``: all that are open, parked and lost ones too."""

    def __init__(self, pool: ContextPool) -> None:
        self._pool = pool
        self.by_id: dict[str, Session] = {}

    def check_new(self, field: str, session_id: str) -> None:
        """Raises InvalidRequest where that id is taken."""
        if session_id in self.by_id:
            raise InvalidRequest.of(field, session_id, "an id that isn't open")

    def add(self, session: Session) -> None:
        self.by_id[session.session_id] = session

    def remove(self, session_id: str) -> Session:
        """Raises SessionNotFound. What becomes of its context is the caller's."""
        session = self.find(session_id)
        del self.by_id[session_id]
        return session

    def find(self, session_id: str) -> Session:
        """An open session in whatever state. Raises SessionNotFound."""
        session = self.by_id.get(session_id)
        if session is None:
            raise SessionNotFound(
                f"This worker has no session {session_id!r}. Open one.",
                metadata={"session_id": session_id},
            )
        return session

    def usable(self, session_id: str) -> Session:
        """An open session that has a context. Raises SessionNotFound, SessionFatal where it was
        lost, and InvalidRequest where it is parked.
        """
        session = self.find(session_id)
        if session.parked is not None:
            raise InvalidRequest.of(
                "session_id", session_id, "a session that isn't parked", "Resume it first."
            )
        if session.context is None:
            raise SessionFatal(
                "This session's context was destroyed after an engine error. Open a new session.",
                metadata={"cause": session.fatal_cause, "session_id": session_id},
            )
        return session

    @contextlib.contextmanager
    def changing(self, session: Session) -> Iterator[None]:
        """While KV is being changed: whatever leaves its state unknown ends the session."""
        refusal: ModeldError | None = None
        try:
            try:
                yield
            except SessionFatal:
                raise
            except ModeldError as error:
                refusal = error
            if session.context is not None:
                session.context.settle()
        except SessionFatal as error:
            self._condemn(session, error.metadata.get("cause", "engine_error"))
            raise
        except Exception as error:
            log.exception("an operation failed while it changed KV")
            self._condemn(session, "engine_error")
            raise SessionFatal(
                f"The engine failed ({type(error).__name__}); the session's state can't be "
                "trusted and was destroyed. Open a new session.",
                metadata={"cause": "engine_error", "session_id": session.session_id},
            ) from None
        if refusal is not None:
            raise refusal

    def _condemn(self, session: Session, cause: str) -> None:
        entry, session.context, session.fatal_cause = session.context, None, cause
        session.logical = 0
        if entry is not None:
            self._pool.destroy(entry)
