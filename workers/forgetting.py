"""What a session that is closed with discard leaves nowhere: stored blocks, and contexts without a
session that hold its conversation still.

Goes by the conversation as it is; knows neither budgets nor an engine's bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from modeld.workers.cold_store import BLOCK_TOKENS
from modeld.workers.memory_guard import return_memory
from modeld.workers.pooled_context import Tokens, common_prefix
from modeld.workers.state_file import token_chains

if TYPE_CHECKING:
    from modeld.workers.parking import Parking
    from modeld.workers.pool import ContextPool
    from modeld.workers.session import Session


def forget(session: Session, others: Collection[Session], pool: ContextPool) -> None:
    """Remove what store and pool have of a session that was closed, but for what ``others``, which
    are open, have too: what they said alike comes back to them as before.
    """
    _forget_contexts(session, others, pool)
    if pool.parking is None:
        return
    going = _blocks_of(session, pool.parking)
    for other in others:
        going -= _blocks_of(other, pool.parking)
    for key in going:
        pool.parking.store.remove(key)
    if going:
        return_memory()


def _forget_contexts(session: Session, others: Collection[Session], pool: ContextPool) -> None:
    for entry in [one for one in pool.contexts if one.owner is None and len(one)]:
        held = entry.tokens

        def has(one: Session, held: Tokens = held, digest: str = entry.kv_digest) -> bool:
            alike = (_all_of(tape, held) for tape in _tapes(one))
            return one.kv_digest == digest and any(alike)

        if has(session) and not any(map(has, others)):
            pool.destroy(entry)


def _blocks_of(session: Session, parking: Parking) -> set[str]:
    """Keys of the stored blocks that hold nothing but tokens of a session's, or all of those that
    it has there.
    """
    store, found = parking.store, set[str]()
    for tokens in _tapes(session):
        step = BLOCK_TOKENS if parking.gives_ranges else max(1, len(tokens))
        begins = range(0, len(tokens), step)
        chains = token_chains(session.kv_digest, tokens, begins)
        for at, chain in zip(begins, chains, strict=True):
            ids = tokens[at : at + step]
            found |= {match.key for match in store.matches(chain, ids) if _all_of(ids, match.ids)}
    layouts = [session.layout, session.former.layout if session.former is not None else None]
    for layout in layouts:
        stored = layout.stored if layout is not None else ()
        found.update(key for one in stored if (key := store.key_of(one.key)))
    return found


def _tapes(session: Session) -> list[Tokens]:
    """What its context holds or is to hold, one token after the other."""
    known = np.asarray(session.known_tokens(), dtype=np.int32)
    return [known] if session.context is None else [known, session.context.tokens]


def _all_of(one: Tokens, other: Tokens) -> bool:
    """Whether one begins with the other, and neither is empty."""
    least = min(len(one), len(other))
    return least > 0 and common_prefix(one, other) == least
