"""A saved session back into an open one: all of it, or nothing changed.

Owns the order of the checks, and what a refusal on the way undoes. Knows no engine's bytes, and not
whose folder it is.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from modeld.shared.errors import InsufficientMemory, SessionFatal
from modeld.shared.messages import RestoreOp, RestoreResult
from modeld.workers import state_import
from modeld.workers.executor import OpContext
from modeld.workers.new_files import Cancelled
from modeld.workers.parking import ranks_of
from modeld.workers.pool import ContextPool
from modeld.workers.refusals import check_identity, context_overflow
from modeld.workers.residency import Source, held
from modeld.workers.saving import Known, checked_folder, remember, seen_file
from modeld.workers.session import Session
from modeld.workers.session_record import SessionRecord, damaged, put_into, read_record
from modeld.workers.state_file import StateFile, open_state

log = logging.getLogger(__name__)


def restore(
    session: Session, pool: ContextPool, source: Source, op: RestoreOp, context: OpContext
) -> RestoreResult:
    """Make a session what was saved: its prompt, answers and turns, and their KV.

    Every byte is verified before the engine gets it, and the engine gets it in a second context
    unless the session holds nothing: a refusal or a cancel leaves the session as it was.

    Raises ManifestMismatch for what was saved of another identity, DigestMismatch for what is
    damaged or the engine won't take, SnapshotNotFound for a missing file, InvalidRequest for a
    folder or name that can't be, ContextOverflow beyond the window, and InsufficientMemory where
    there is none for a chunk or for the second context.
    """
    began_s = time.perf_counter()
    folder = checked_folder(op.folder)
    record = read_record(folder, op.record)
    _check_identity(session, source, record)
    _check_fits(session, pool, source, record)
    cancelled = False
    try:
        with _opened(folder, record) as files:
            known = [
                Known(part, tuple(file.header.chunks), seen_file(folder / part.name))
                for part, file in zip(record.parts, files, strict=True)
            ]
            if files:
                incoming = state_import.Incoming(files, record.tokens, 0, context)
                _bring_in(session, pool, incoming)
    except Cancelled:
        cancelled = True
    else:
        put_into(record, session)
        session.entry.ranks = ranks_of(session)
        remember(session, folder, record.tokens, known)
    exact, why = _exactness(session, source, record)
    return RestoreResult(
        tokens=0 if cancelled else len(record.tokens),
        resident=session.logical,
        available=session.available,
        retained=session.retained,
        seen_tokens=session.seen_tokens,
        turn_ids=list(session.turns),
        exact=exact,
        exact_reason=why,
        seconds=time.perf_counter() - began_s,
        cancelled=cancelled,
        **pool.totals(),
    )


@contextlib.contextmanager
def _opened(folder: Path, record: SessionRecord) -> Iterator[list[StateFile]]:
    """All parts, each the one that the record names."""
    with contextlib.ExitStack() as stack:
        files = []
        for part in record.parts:
            file = stack.enter_context(open_state(str(folder / part.name)))
            header = file.header
            if (file.digest, header.begin, header.end) != (part.digest, part.begin, part.end):
                raise damaged(f"{part.name} isn't the file that was saved")
            if (header.kv_digest, header.token_ids) != (
                record.kv_digest,
                record.token_ids[: 4 * part.end],
            ):
                raise damaged(f"{part.name} is of other tokens")
            files.append(file)
        yield files


def _bring_in(session: Session, pool: ContextPool, incoming: state_import.Incoming) -> None:
    """The KV into the session's context or another one, which is then its."""
    if len(held(session)):
        try:
            otherwise = "open a new session, which needs none, and restore it there"
            state_import.replace(session, pool, incoming, otherwise)
        except InsufficientMemory:
            if session.assembled is not None or session.logical:
                raise
            # All that it holds is another session's cache, which may go once all is verified.
            incoming.verify()
            session.entry.clear()
        else:
            return
    mine = session.entry
    try:
        state_import.append(session, incoming)
    except SessionFatal as error:
        log.warning("restoring ended an empty context: %s", error.message)
        pool.destroy(mine)
        session.context, session.fatal_cause = None, error.metadata.get("cause", "engine_error")
        session.context, _ = pool.acquire(session.session_id, mine.shape)
        raise state_import.not_taken(0, len(incoming.tokens)) from None


def _check_identity(session: Session, source: Source, record: SessionRecord) -> None:
    more = [
        ("prompt_format", record.prompt_format, session.prompt_format),
        ("overflow", record.overflow, "refuse" if session.layout is None else "evict"),
    ]
    if record.prompt_format == "chat":
        more.append(("template_digest", record.template_digest, source.template_digest))
    otherwise = (
        "Open a session as it was saved, or send its conversation again: it is evaluated anew."
    )
    check_identity(session, source, record, "What was saved", otherwise, more)


def _check_fits(session: Session, pool: ContextPool, source: Source, record: SessionRecord) -> None:
    if any(len(ids) and not 0 <= ids.min() <= ids.max() < source.vocab for ids in record.all_ids()):
        raise damaged(
            f"it has token ids outside 0 to {source.vocab - 1}, which aren't this model's"
        )
    asked, window = len(record.tokens), session.window
    if record.layout is None:
        asked = max(asked, record.prompt_tokens)
    if asked <= window:
        return
    raise context_overflow(
        session,
        pool,
        f"What was saved takes {asked} tokens, {asked - window} more than the session's window of "
        f"{window}. Nothing was changed. Open a session with a window of {record.window}, which "
        "it was saved from.",
        stage="restore",
        asked=asked,
        additional=asked - session.logical,
        drop=asked - window,
    )


def _exactness(session: Session, source: Source, record: SessionRecord) -> tuple[bool, str]:
    if not record.exact:
        return False, record.exact_reason
    if record.runtime_digest != session.runtime_digest:
        return False, "it was saved under another runtime_digest, such as another window's"
    return source.exactness(session.entry)
