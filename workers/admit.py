"""Brings tokens that went out of attention back into it: by segment, range or query.

Owns what is asked for and the numbers of the answer; the planner says what goes out for it, and
``eviction`` carries that out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from modeld.shared.errors import InvalidRequest, UnsupportedFeature
from modeld.shared.messages import AdmitOp, AdmitResult
from modeld.shared.planner.residency import (
    NoRoom,
    admitting,
    first_of,
    like_query,
    most_admitted,
)
from modeld.shared.planner.token_ranges import Ranges, common, minus, total
from modeld.workers.engine import Tokenizer
from modeld.workers.eviction import Answering, Streaming, overflow, standing
from modeld.workers.executor import OpContext
from modeld.workers.pool import ContextPool
from modeld.workers.session import Session

_WHAT = "one of segment_index, a range and a query"


@dataclass(frozen=True)
class Chosen:
    """What of the conversation comes into attention, and what was asked for in all."""

    ranges: Ranges
    asked: Ranges


def choose(session: Session, tokenizer: Tokenizer, op: AdmitOp) -> Chosen:
    """What ``op`` brings back, within the budget. Changes nothing.

    Raises UnsupportedFeature (capability ``overflow.evict``) for a session under overflow refuse,
    and InvalidRequest for what can't be: no prompt, a segment that there isn't or that wasn't
    found in the prompt, a range outside the conversation, an empty query, a budget below 0.
    """
    layout = session.layout
    if layout is None:
        raise UnsupportedFeature(
            "Under overflow refuse everything is attended, so there is nothing to admit. Open "
            "the session with overflow evict.",
            metadata={"capability": "overflow.evict"},
        )
    if not session.length:
        raise InvalidRequest.of(
            "session_id", session.session_id, "a session with a prompt", "Send a prompt first."
        )
    if op.budget_tokens < 0:
        raise InvalidRequest.of("budget_tokens", op.budget_tokens, "0 (what fits) or more tokens")
    by_range = (op.begin, op.end) != (0, 0)
    if (op.segment_index >= 0) + by_range + bool(op.query) != 1:
        raise InvalidRequest.of("what", "", _WHAT)
    most = most_admitted(layout, session.length)
    most = min(most, op.budget_tokens or most)
    out = minus(((0, session.length),), layout.attended(session.length))
    if op.query:
        found = like_query(session.conversation(), out, _query(tokenizer, op.query), most)
        return Chosen(found, found)
    asked = (_range(session, op) if by_range else _segment(session, op.segment_index),)
    return Chosen(first_of(common(out, asked), most), asked)


def _query(tokenizer: Tokenizer, query: str) -> set[int]:
    """Its tokens, as they are at the beginning of a text and within one."""
    return {*tokenizer.encode(query), *tokenizer.encode(f" {query}")}


def _range(session: Session, op: AdmitOp) -> tuple[int, int]:
    if not 0 <= op.begin < op.end <= session.length:
        raise InvalidRequest.of(
            "range",
            f"{op.begin} to {op.end}",
            f"positions of the conversation, which has {session.length} tokens",
        )
    return op.begin, op.end


def _segment(session: Session, index: int) -> tuple[int, int]:
    segments = session.segments()
    if index >= len(segments):
        raise InvalidRequest.of(
            "segment_index", index, f"0 to {len(segments) - 1}, of the prompt's segments"
        )
    segment = segments[index]
    if not segment.located:
        raise InvalidRequest.of(
            "segment_index",
            index,
            "a segment that was found in the rendered prompt",
            "The chat template changed this one beyond recognition: admit a range instead.",
        )
    return segment.token_begin, segment.token_end


def admit(session: Session, pool: ContextPool, chosen: Chosen, context: OpContext) -> AdmitResult:
    """Have ``chosen`` attended, and the logits of the conversation's end current.

    Cancelled on the way, it says what is there by then; a later call evaluates the rest. Raises
    ContextOverflow, and nothing changed, where what is pinned leaves no room to go on at all.
    """
    began_s = time.perf_counter()
    before = session.layout
    assert before is not None
    restored: Ranges = ()
    resident_before = session.resident_ranges()
    layout = admitting(before, chosen.ranges, chosen.asked)
    try:
        if chosen.ranges:
            streaming = Streaming(session, pool, need_logits=True, layout=layout)
            arrived = streaming.advance(session.length, context)
            evaluated = streaming.evaluated
            restored = minus(streaming.restored, streaming.fresh)
        else:
            session.layout = layout
            evaluated, arrived = Answering(session, pool, context).ensure_logits()
            session.counters["cancelled_ops"] += not arrived
    except NoRoom as error:
        session.layout, size = before, session.length
        raise overflow(session, pool, "admit", size, 0, error) from None
    assert session.layout is not None
    resident = common(chosen.ranges, session.resident_ranges())
    parked, gone = standing(session, pool, session.length)
    return AdmitResult(
        admitted=total(resident),
        restored=total(common(resident, restored)),
        recomputed=evaluated,
        evicted=total(minus(resident_before, session.layout.attended(session.length))),
        ranges=[[begin, end] for begin, end in resident],
        resident=session.logical,
        available=session.available,
        parked=parked,
        gone=gone,
        seconds=time.perf_counter() - began_s,
        cancelled=not arrived,
    )
