"""Carries out plans of overflow evict: what goes out is parked, what stays is evaluated again.

Owns the way from a conversation of any length to a context that holds what is attended of it, and
the numbers of that way. What is attended is the planner's decision; matching, copying, the cold
store and evaluation are ``Prefill``'s.

A cancel may come at any token. The session is then inside a pass: its layout says what is to be
attended, ``logical`` how much of that is there, and whatever comes next plans anew from both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from modeld.shared.errors import ContextOverflow
from modeld.shared.messages import BlockOut, PromptIn, Status
from modeld.shared.planner.residency import (
    BLOCK_TOKENS,
    PROTECTED,
    Layout,
    NoRoom,
    Pass,
    Stored,
    out_of_attention,
    passes,
    pieces,
    taking,
)
from modeld.shared.planner.token_ranges import (
    Ranges,
    common,
    minus,
    placed,
    taken,
    total,
    union,
    upto,
)
from modeld.workers.executor import OpContext
from modeld.workers.pool import ContextPool
from modeld.workers.pooled_context import common_prefix
from modeld.workers.prefill import Prefill, check_window, ensure_logits, token_hash
from modeld.workers.prompt import Assembled
from modeld.workers.refusals import context_overflow
from modeld.workers.session import Session
from modeld.workers.state_file import token_chains

Part = Literal["prefix", "suffix"]


def check_fits(
    session: Session,
    pool: ContextPool,
    prefix: PromptIn,
    suffix: PromptIn | None,
    assembled: Assembled,
    stage: str,
) -> None:
    """Raises ContextOverflow, before anything changes, if the session can't take the prompt."""
    if session.layout is None:
        check_window(session, pool, assembled, stage)
        return
    following, asked = session.next_tape(prefix, suffix, assembled), len(assembled.tokens)
    try:
        passes(following.layout, asked, 0)
    except NoRoom as error:
        raise overflow(session, pool, stage, asked, asked - following.same, error) from None


def prefill_of(
    session: Session, pool: ContextPool, assembled: Assembled, *, need_logits: bool
) -> Prefill | StreamedPrefill:
    """The way to ``assembled``, which is the session's prompt."""
    if session.layout is None:
        return Prefill(session, pool, assembled, need_logits=need_logits)
    return StreamedPrefill(session, pool, assembled, need_logits=need_logits)


class Streaming:
    """Makes a session's context hold what its layout is to be, in as many passes as that takes.

    Construct, then ``advance`` to positions of the conversation. ``layout`` is what it is to be,
    where that isn't the session's. Raises NoRoom, with nothing changed. Numbers are of this call.
    """

    def __init__(
        self,
        session: Session,
        pool: ContextPool,
        *,
        need_logits: bool,
        layout: Layout | None = None,
    ) -> None:
        layout = layout or session.layout
        assert layout is not None
        self._session, self._pool, self._need_logits = session, pool, need_logits
        steps = passes(layout, session.length, _resident(session, layout))
        self.evicts = len(steps) > 1 or not _is(steps[0], layout)
        if self.evicts:  # what stays is evaluated again in one go, sampled or not
            layout = replace(layout, as_prompt=session.length)
        self._steps = list(steps)
        self.evaluated = 0  # tokens
        self.evicted = 0
        self._recomputed_before = session.counters["recomputed_tokens"]
        self.fresh: Ranges = ()  # of the conversation, what was evaluated
        self.restored: Ranges = ()  # … and what the cold store gave
        self._begin(layout)

    @property
    def recomputed(self) -> int:
        """Tokens that were evaluated before, and again."""
        return self._session.counters["recomputed_tokens"] - self._recomputed_before

    @property
    def prefill(self) -> Prefill:
        """The present pass's."""
        return self._prefill

    def advance(self, end: int, context: OpContext) -> bool:
        """Have the conversation evaluated up to ``end``; False when cancelled on the way."""
        while True:
            step = self._steps[0]
            if not self._evaluate(total(upto(step.attended, end)), context):
                return False
            if end <= step.end and (end < self._session.length or len(self._steps) == 1):
                return True
            del self._steps[0]
            assert self._session.layout is not None
            self._begin(self._session.layout)

    def _evaluate(self, position: int, context: OpContext) -> bool:
        session, before = self._session, self._prefill.position
        arrived = self._prefill.advance(position, context)
        done = max(0, self._prefill.position - before)
        assert session.layout is not None
        ranges = taken(self._steps[0].attended, before, before + done)
        self.fresh = union(self.fresh, ranges)
        self.evaluated += done
        return arrived

    def _begin(self, layout: Layout) -> None:
        """The first of the passes that are left: its layout, and what is there of it."""
        session, step = self._session, self._steps[0]
        assert session.layout is not None
        attended = session.layout.attended(session.length)
        lost = minus(taken(attended, 0, _resident(session, session.layout)), step.attended)
        evicted = total(lost)
        self.evicted += evicted
        session.counters["evicted_tokens"] += evicted
        stored = _parked(session, self._pool, lost) if lost else []
        session.layout = taking(layout, step, stored)
        tokens = session.conversation()
        compact = [token for begin, end in step.attended for token in tokens[begin:end]]
        target = Assembled(
            tokens=compact, prefix_tokens=0, text_bytes=0, additive=True, turns_recomputed=0,
            segments=[], tail_text="", tail_ids=[],
        )  # fmt: skip
        last = len(self._steps) == 1
        self._prefill = Prefill(session, self._pool, target, need_logits=last and self._need_logits)
        self.restored = union(self.restored, taken(step.attended, *self._prefill.brought))


class StreamedPrefill(Streaming):
    """``Prefill`` for a session under overflow evict: the same calls, and statuses whose counts are
    of what is attended, with what isn't beside them.
    """

    def __init__(
        self, session: Session, pool: ContextPool, assembled: Assembled, *, need_logits: bool
    ) -> None:
        self._began_s = time.perf_counter()
        self._assembled = assembled
        self._old_logical = session.logical
        self._told_evaluated = self._told_recomputed = self._told_dropped = 0
        self._told_s = 0.0
        super().__init__(session, pool, need_logits=need_logits)
        self._first = self.prefill

    def status(self, part: Part) -> Status:
        """The numbers of a part, after ``advance`` to its end."""
        session, assembled = self._session, self._assembled
        prefix, size = assembled.prefix_tokens, len(assembled.tokens)
        begin, end = (0, prefix) if part == "prefix" else (prefix, size)
        resident = common(session.resident_ranges(), ((begin, end),))
        found = minus(resident, self.fresh)
        attended = self._steps[0].attended
        parked, gone = standing(session, self._pool, end)
        tokens = np.asarray(assembled.tokens, dtype=np.int32)
        dropped, prefilled, recomputed, seconds = self._news(end)
        session.counters["reused_tokens"] += total(found)
        session.counters["dropped_tokens"] += dropped
        segments = list(assembled.segments)
        return Status(
            part=part,
            reused=total(found),
            dropped=dropped,
            prefilled=prefilled,
            prefix=prefix,
            suffix=size - prefix if part == "suffix" else 0,
            resident=session.logical,
            available=session.available,
            retained=session.retained,
            copied=total(common(taken(attended, 0, self.prefill.copied), found)),
            restored=total(common(self.restored, found)),
            miss_reason=self._miss_reason(begin, end),
            stable_token_hash=token_hash(tokens[:prefix]),
            volatile_token_hash=token_hash(tokens[prefix:end]),
            template_additive=assembled.additive,
            turns_recomputed=assembled.turns_recomputed,
            seen_tokens=session.seen_tokens,
            seconds=seconds,
            segments=segments[: len(session.prefix.segments)] if part == "prefix" else segments,
            parked=parked,
            gone=gone,
            recomputed=recomputed,
        )

    def _news(self, end: int) -> tuple[int, int, int, float]:
        """Dropped, prefilled and recomputed tokens and seconds since the last status."""
        session = self._session
        stayed = total(common(session.stayed, session.resident_ranges()))
        if session.logical == total(upto(self._steps[0].attended, end)) and end < session.length:
            dropped = 0  # what lies beyond a prefix may still be the suffix's: it is judged there
        else:
            dropped = self._old_logical - stayed
        news = (
            dropped - self._told_dropped,
            self.evaluated - self._told_evaluated,
            self.recomputed - self._told_recomputed,
            time.perf_counter() - self._began_s - self._told_s,
        )
        self._told_dropped += news[0]
        self._told_evaluated += news[1]
        self._told_recomputed += news[2]
        self._told_s += news[3]
        return news

    def _miss_reason(self, begin: int, end: int) -> str:
        if not self.evicts:
            attended = self._steps[0].attended
            return self._first.miss_reason(*(total(upto(attended, at)) for at in (begin, end)))
        if begin == end or not common(self.fresh, ((begin, end),)):
            return "NONE"
        reason = self._first.miss_reason(0, self._first.position)
        if reason != "TOKENS_DIFFER":
            return reason
        # That tokens went out for others doesn't make them another conversation's.
        return "EXTENDED" if total(self._session.stayed) == self._old_logical else reason


# --- for an answer -------------------------------------------------------------------------------


class Answering:
    """What a decode needs of it: logits to begin with, and room to go on."""

    def __init__(self, session: Session, pool: ContextPool, context: OpContext) -> None:
        self._session, self._pool, self._context = session, pool, context
        self.recomputed = 0  # tokens

    def ensure_logits(self) -> tuple[int, bool]:
        """As ``prefill.ensure_logits``, for a conversation of any length. Raises NoRoom."""
        session = self._session
        assert session.layout is not None
        steps = passes(session.layout, session.length, session.logical)
        before = session.counters["recomputed_tokens"]
        if len(steps) == 1 and _is(steps[0], session.layout):
            done, arrived = ensure_logits(session, self._context)
        else:
            done, arrived = self._stream()
        self.recomputed += session.counters["recomputed_tokens"] - before
        return done, arrived

    def make_room(self) -> str:
        """With the window full and a token sampled: "" to go on, else why the answer stops."""
        session = self._session
        before = session.counters["recomputed_tokens"]
        session.sampled()
        try:
            _, arrived = self._stream()
        except NoRoom:
            return "context_full"
        self.recomputed += session.counters["recomputed_tokens"] - before
        return "" if arrived else "cancelled"

    def _stream(self) -> tuple[int, bool]:
        session = self._session
        streaming = Streaming(session, self._pool, need_logits=True)
        arrived = streaming.advance(session.length, self._context)
        session.counters["cancelled_ops"] -= not arrived  # the answer counts it
        return streaming.evaluated, arrived


# --- what goes out, and what is told of it -------------------------------------------------------


def _is(step: Pass, layout: Layout) -> bool:
    return step.attended == layout.attended(step.end)


def _resident(session: Session, layout: Layout) -> int:
    """Tokens that are there of what ``layout`` attends, also where the prompt is another by now."""
    tokens = session.conversation()
    attended = [t for b, e in layout.attended(len(tokens)) for t in tokens[b:e]]
    return common_prefix(session.logical_tokens(), np.asarray(attended, dtype=np.int32))


def _parked(session: Session, pool: ContextPool, lost: Ranges) -> list[Stored]:
    """Park what is about to go, and say which blocks hold what of the conversation."""
    entry, parking = session.entry, pool.parking
    if parking is None or not parking.gives_ranges or entry.kv_digest != session.kv_digest:
        return []  # a whole state would come back for the whole of its tokens only
    assert session.layout is not None
    attended = session.layout.attended(session.length)
    at = placed(attended, lost)
    # Of a block that is stored with what else follows in it, or in a longer one, that one's key.
    now = parking.park_range(entry, at[0][0], at[-1][1], entry.ranks)
    held = _resident(session, session.layout)
    bounds = [(b, min(b + BLOCK_TOKENS, held)) for b in range(0, held, BLOCK_TOKENS)]
    keys = token_chains(session.kv_digest, entry.tokens, [end for _, end in bounds])
    stored = []
    for (begin, end), key in zip(bounds, keys, strict=True):
        block = taken(attended, begin, end)
        out = common(block, lost)
        stored += [Stored(b, e, now.get(begin, key)) for b, e in out]
    return stored


def standing(session: Session, pool: ContextPool, end: int) -> tuple[int, int]:
    """Tokens of the conversation before ``end`` that aren't attended: parked, and gone."""
    if session.layout is None:
        return 0, 0
    out = out_of_attention(session.layout, session.length, _has(pool))
    parked, gone = (total(upto(ranges, end)) for ranges in out)
    return parked, gone


def blocks(session: Session, pool: ContextPool) -> list[BlockOut]:
    """What the context holds, in order; under overflow evict the conversation's ranges."""
    if session.layout is None:
        return session.blocks()
    parts = ((session.prefix_tokens, "prefix"), (session.prompt, "suffix"))
    found = pieces(
        session.layout, session.length, session.logical, _has(pool), [at for at, _ in parts]
    )
    return [
        BlockOut(
            begin=piece.begin,
            end=piece.end,
            state=piece.state,
            what=next((what for at, what in parts if piece.begin < at), "generated"),
            protected=piece.cls in PROTECTED,
            cls=piece.cls,
        )
        for piece in found
    ]


def _has(pool: ContextPool) -> Callable[[str], bool]:
    parking = pool.parking
    return parking.store.has if parking is not None else lambda _key: False


def overflow(
    session: Session,
    pool: ContextPool,
    stage: str,
    asked: int,
    additional: int,
    error: NoRoom,
) -> ContextOverflow:
    """What a caller is told; ``asked`` tokens in all, ``additional`` to what was there."""
    assert session.layout is not None
    window, sizes = session.window, session.layout.sizes
    drop = error.staying + BLOCK_TOKENS - window
    return context_overflow(
        session,
        pool,
        f"The {stage} brings the conversation to {asked} tokens, of which {error.staying} must "
        f"stay in attention ({error.pinned} pinned, {sizes.sink} at its head, {sizes.recent} "
        f"recent): that leaves less than {BLOCK_TOKENS} of the session's "
        f"window of {window} to go on with. Nothing was changed. Pin {drop} tokens less "
        "(cache_class task_pinned), or open a session with a larger window.",
        stage=stage,
        asked=asked,
        additional=additional,
        drop=drop,
        pinned=error.pinned,
        staying=error.staying,
    )
