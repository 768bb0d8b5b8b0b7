"""An answer's tokens where the engine samples them itself, one at a time.

Owns the way from what is resident to the engine's next token, and keeps the session exact. Knows
nothing of text or of how an answer ends.
"""

from __future__ import annotations

from collections.abc import Generator

from modeld.shared.errors import SessionFatal
from modeld.shared.messages import DecodeIn
from modeld.workers.executor import OpContext
from modeld.workers.images import Rereading
from modeld.workers.prefill import polled
from modeld.workers.session import Session


class EngineTokens:
    """``begin``, then ``token`` is the first; ``go_on`` to each next one; ``close``."""

    def __init__(self, session: Session, options: DecodeIn, context: OpContext) -> None:
        self._session, self._options, self._context = session, options, context
        self._stream: Generator[int, None, None] | None = None
        self.token = -1
        self.evaluated = 0  # tokens, before the first one was sampled
        self._begun = False

    def begin(self) -> tuple[int, bool]:
        """Evaluate what isn't resident of prompt and answer, and sample the first token.

        Returns how many tokens the engine evaluated, its prompt's last one among them, and False
        when cancelled on the way.
        """
        session, entry = self._session, self._session.entry
        rereading = entry.engine_context
        if isinstance(rereading, Rereading):
            assert session.assembled is not None  # there is no decode without a prompt
            rereading.reread(session.assembled, session.answer_text)
            session.answer_spelled = False  # what is text to the engine is tokenized as text
        missing = session.missing()
        most = session.window - session.logical - len(missing) + 1
        if self._options.max_tokens:
            most = min(most, self._options.max_tokens)
        entry.trim(session.logical)
        self._stream = entry.generate(missing, self._options, most, polled(self._context))
        token = next(self._stream, None)
        measured = entry.measured
        evaluated = self.evaluated = measured.evaluated if measured else 0
        self._begun = True
        session.logical = len(entry)
        if not isinstance(rereading, Rereading):  # else they were when they were noted
            session.seen_tokens += evaluated
        session.counters["evaluated_tokens"] += evaluated
        if token is None:
            return evaluated, False
        self.token = token
        return evaluated, True

    def go_on(self) -> bool:
        """Evaluate the token and sample the next one; False, and neither, if cancelled."""
        assert self._stream is not None
        if self._context.cancelled():
            return False
        token = next(self._stream, None)
        if token is None:
            raise SessionFatal(
                "The engine ended an answer before it was asked to. Open a new session.",
                metadata={"cause": "engine_error"},
            )
        self.token = token
        return True

    def close(self) -> None:
        """End it. What the engine tells only now is in ``evaluated`` then, and in the counters."""
        if self._stream is None:
            return
        self._stream.close()
        measured = self._session.entry.measured
        if measured is None or not self._begun:
            return
        corrected = measured.evaluated - self.evaluated
        self._session.counters["evaluated_tokens"] += corrected + measured.ahead
        self.evaluated = measured.evaluated
