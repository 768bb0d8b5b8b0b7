"""A session without a context: how it gives its own up, and how it gets one again.

Owns the order of both and their numbers. What is stored and found is ``parking``'s.
"""

from __future__ import annotations

import time

import numpy as np

from modeld.shared.errors import InvalidRequest
from modeld.shared.messages import ParkResult, ResumeOp, ResumeResult
from modeld.workers.parking import ranks_of
from modeld.workers.pool import ContextPool
from modeld.workers.pooled_context import PooledContext, common_prefix
from modeld.workers.residency import held
from modeld.workers.session import Parked, Session


def park(session: Session, pool: ContextPool) -> ParkResult:
    """Store what the session's context holds, and leave the context to whoever needs one.

    The session keeps its prompt, answers and turns; until it is resumed it can only be closed.
    Nothing is refused: what can't be stored is ``lost`` and evaluated again.
    """
    began_s = time.perf_counter()
    entry, parking = session.entry, pool.parking
    count = len(held(session))
    stored = 0
    if parking is not None and count:
        parking.park_range(entry, 0, count, entry.ranks)
        stored = parking.reach(session.kv_digest, entry.tokens, entry.window)
    session.parked = Parked(entry.shape, session.logical)
    session.context, session.logical = None, 0
    pool.release(entry)
    return ParkResult(
        parked=stored,
        lost=count - stored,
        ram_bytes=parking.store.ram_bytes if parking is not None else 0,
        disk_bytes=parking.store.disk_bytes if parking is not None else 0,
        seconds=time.perf_counter() - began_s,
        **pool.totals(),
    )


def give_context(session: Session, pool: ContextPool, op: ResumeOp) -> bool:
    """A context for a parked session, and whether the pool had it: the one that still holds the
    most of it, or any. Raises InsufficientMemory, and the session stays parked, and InvalidRequest
    for a session that has one.
    """
    parked = session.parked
    if parked is None:
        raise InvalidRequest.of("session_id", session.session_id, "a session that is parked")
    known = np.asarray(session.known_tokens(), dtype=np.int32)
    entry = pool.take_like(session.session_id, parked.shape, session.kv_digest, known)
    reused = entry is not None
    if entry is None:
        entry, reused = pool.acquire(
            session.session_id, parked.shape, op.free_bytes, op.compute_bytes
        )
    session.context = entry
    session.counters["adopted_contexts" if reused else "created_contexts"] += 1
    return reused


def resume(session: Session, pool: ContextPool, *, reused: bool, began_s: float) -> ResumeResult:
    """Bring back into the session's new context what the store has of it.

    What is missing of the prompt is evaluated when it is next needed. Raises SessionFatal.
    """
    entry, parked = session.entry, session.parked
    assert parked is not None
    session.parked = None
    known = np.asarray(session.known_tokens(), dtype=np.int32)
    if entry.kv_digest != session.kv_digest:
        entry.park_last()
        entry.trim(0)
        entry.kv_digest, entry.runtime_digest = session.kv_digest, session.runtime_digest
    found = _kept(entry, common_prefix(entry.tokens, known))
    now = found
    if pool.parking is not None:
        now = pool.parking.bring_back(entry, known, found, least=1)
    session.logical = now
    entry.ranks = ranks_of(session)
    session.counters["restored_tokens"] += max(0, now - found)
    pool.touch(entry)
    return ResumeResult(
        reused_context=reused,
        retained=session.retained,
        **pool.opened(entry),
        restored=max(0, now - found),
        missing=max(0, parked.tokens - now),
        resident=session.logical,
        seconds=time.perf_counter() - began_s,
    )


def _kept(entry: PooledContext, common: int) -> int:
    return common if entry.can_keep(common) else 0
