"""Makes a session's context hold a given prompt, reusing whatever already holds its beginning.

Owns matching, taking over and copying of contexts, evaluation and the numbers of both. Knows
nothing of templates or sampling.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from modeld.shared.errors import ContextOverflow
from modeld.shared.messages import Status
from modeld.workers import faults
from modeld.workers.engine import Cancelled
from modeld.workers.executor import OpContext
from modeld.workers.images import Rereading, SeeingContext
from modeld.workers.parking import ranks_of
from modeld.workers.pool import WORTHWHILE_TOKENS, ContextPool
from modeld.workers.pooled_context import PooledContext, Tokens, common_prefix
from modeld.workers.prompt import Assembled
from modeld.workers.refusals import context_overflow
from modeld.workers.session import Session

# Below this the exact count is cheap; only beyond it is the longest piece looked up at all.
_PLAIN_BYTES_A_TOKEN = 16


def check_window(session: Session, pool: ContextPool, assembled: Assembled, stage: str) -> None:
    """Raises ContextOverflow, before any KV changes, if the prompt exceeds the window.

    A prompt of exactly the window's size is accepted: its first answer token needs no cell.
    """
    asked, window = len(assembled.tokens), session.window
    if asked <= window:
        return
    target = np.asarray(assembled.tokens, dtype=np.int32)
    additional = asked - common_prefix(session.logical_tokens(), target)
    raise _overflow(session, pool, stage, asked, additional, exact=True)


def check_bytes(session: Session, pool: ContextPool, text_bytes: int, stage: str) -> None:
    """Raises ContextOverflow for a rendered prompt that can't fit, before it is tokenized.

    No token spells more than the vocabulary's longest piece, so the bytes give a lower bound of
    the tokens. Tokenizing megabytes takes seconds, in which no cancel is seen.
    """
    if text_bytes <= session.window * _PLAIN_BYTES_A_TOKEN:
        return
    least = -(-text_bytes // session.assembler.longest_piece)
    if least > session.window:
        raise _overflow(session, pool, stage, least, least, exact=False)


def _overflow(
    session: Session, pool: ContextPool, stage: str, asked: int, additional: int, *, exact: bool
) -> ContextOverflow:
    window = session.window
    bound = "" if exact else "at least "
    return context_overflow(
        session,
        pool,
        f"The {stage} brings the context to {bound}{asked} tokens, {asked - window} more than the "
        f"session's window of {window}. Nothing was changed. Drop {bound}{asked - window} tokens, "
        "or open a session with a larger window.",
        stage=stage,
        asked=asked,
        additional=additional,
        drop=asked - window,
        # Counted in bytes: the counts of tokens asked, additional and to drop are at least.
        **({} if exact else {"lower_bounds": True}),
    )


@dataclass(frozen=True)
class _Find:
    """Where a target stands in one context: tokens matched, and how many can be kept."""

    matched: int
    keep: int
    cannot_trim: bool


def _find(entry: PooledContext, target: Tokens, need_logits: bool) -> _Find:
    matched = common_prefix(entry.tokens, target)
    if matched == len(target):
        if not need_logits:
            return _Find(matched, matched, False)
        keep = matched - 1  # the last token is evaluated again: logits aren't kept
    else:
        keep = matched
    if entry.can_keep(keep):
        return _Find(matched, keep, False)
    return _Find(matched, 0, True)


class Prefill:
    """One call's way from what is resident to ``assembled``; construct, then ``advance``.

    Constructing matches, and takes over or copies another context where that is worthwhile;
    ``advance`` evaluates. A part's ``Status`` counts what was done up to then. Everything the
    context held before stays findable until a token must be evaluated in its place.

    ``prefilled`` counts all tokens that the call evaluated for the part. For a suffix that also
    means tokens of the prefix, where they had to be evaluated (again): after a cancelled prefix,
    or where the model's memory can't be trimmed (``miss_reason`` CANNOT_TRIM).
    """

    def __init__(
        self, session: Session, pool: ContextPool, assembled: Assembled, *, need_logits: bool
    ) -> None:
        self._session = session
        self._assembled = assembled
        self._target: Tokens = np.asarray(assembled.tokens, dtype=np.int32)
        self._began_s = time.perf_counter()
        self._old_logical = session.logical
        self._stayed = common_prefix(session.logical_tokens(), self._target)
        self._other_digest = self._leave_other_digest()
        self._copied = 0
        self._held = self._old_logical or len(session.entry)
        own = _find(session.entry, self._target, need_logits)
        self._found = self._take_better(pool, own, need_logits)
        self._warm = self._found.keep  # without the cold store
        self._found = self._bring_back(self._found, need_logits)
        self._position = self._found.keep
        self._reused = self._found.keep  # until an engine that keeps its cache itself was asked
        self._lower_bound = False
        self._asked = 0
        self._evaluated = 0
        # What of this was already told by an earlier status of the same call.
        self._told_evaluated = 0
        self._told_dropped = 0
        self._told_s = 0.0
        session.logical = min(self._stayed, self._found.keep)
        pool.touch(session.entry)
        self._ranks = ranks_of(session)
        # Where only the last token is evaluated, it is for its logits.
        size = len(self._target)
        self._again_from = size if self._position == size - 1 else 0

    @property
    def position(self) -> int:
        """Tokens of the target that are there."""
        return self._position

    @property
    def brought(self) -> tuple[int, int]:
        """Positions from and to which the cold store gave the target."""
        return self._warm, max(self._warm, self._found.keep)

    @property
    def copied(self) -> int:
        """Tokens of the target, from the first on, that came from another session's context."""
        return self._copied

    def advance(self, end: int, context: OpContext) -> bool:
        """Bring the first ``end`` tokens of the prompt into the context; False when cancelled."""
        session, entry = self._session, self._session.entry
        parked = True
        if entry.samples_itself is not None:
            self._ask(end, context)
        elif self._position < end:
            faults.point("prefill")
            done = 0
            parked = entry.park(self._position)
            if parked:  # else cancelled: what is held stays
                entry.trim(self._position)
                show_images(session)
                new = self._assembled.tokens[self._position : end]
                done = entry.extend(new, polled(context))
            session.took(self._position, self._position + done, again_from=self._again_from)
            self._position += done
            self._evaluated += done
            session.counters["evaluated_tokens"] += done
        if parked:
            entry.ranks = self._ranks
        session.logical = min(self._position, end)
        arrived = session.logical == end
        session.counters["cancelled_ops"] += not arrived
        return arrived

    def _ask(self, end: int, context: OpContext) -> None:
        """``advance`` where the engine keeps its cache itself: what the record says of it is only
        asked for, and what was found there is what counts, even where nothing is new.
        """
        session, entry = self._session, self._session.entry
        if end <= self._asked:
            return
        faults.point("prefill")
        if self._position < end:
            entry.trim(self._position)
            new = self._assembled.tokens[self._position : end]
            session.seen_tokens += entry.extend(new, polled(context))
            self._position = len(entry)
        elif entry.confirm(end, polled(context)) < end:
            self._position = len(entry)
        measured = entry.measured
        assert measured is not None
        self._asked = min(end, measured.held)
        self._reused, self._lower_bound = measured.reused, measured.lower_bound
        self._evaluated += measured.evaluated
        session.counters["evaluated_tokens"] += measured.evaluated

    def status(self, part: Literal["prefix", "suffix"]) -> Status:
        """The numbers of a part, after ``advance`` to its end."""
        session, assembled = self._session, self._assembled
        prefix, total = assembled.prefix_tokens, len(assembled.tokens)
        begin, end = (0, prefix) if part == "prefix" else (prefix, total)
        reused = max(0, min(self._reused, end) - begin)
        dropped = self._dropped_at(end) - self._told_dropped
        prefilled = self._evaluated - self._told_evaluated
        seconds = time.perf_counter() - self._began_s - self._told_s
        self._told_dropped += dropped
        self._told_evaluated += prefilled
        self._told_s += seconds
        session.counters["reused_tokens"] += reused
        session.counters["dropped_tokens"] += dropped
        segments = list(assembled.segments)
        return Status(
            part=part,
            reused=reused,
            dropped=dropped,
            prefilled=prefilled,
            prefix=prefix,
            suffix=total - prefix if part == "suffix" else 0,
            resident=session.logical,
            available=session.available,
            retained=session.retained,
            copied=max(0, min(self._copied, self._reused, end) - begin),
            restored=max(0, min(self._reused, end) - max(begin, self._warm)),
            miss_reason=self.miss_reason(begin, end),
            stable_token_hash=token_hash(self._target[:prefix]),
            volatile_token_hash=token_hash(self._target[prefix:end]),
            template_additive=assembled.additive,
            turns_recomputed=assembled.turns_recomputed,
            seen_tokens=session.seen_tokens,
            seconds=seconds,
            reused_lower_bound=self._lower_bound,
            segments=segments[: len(session.prefix.segments)] if part == "prefix" else segments,
        )

    def _leave_other_digest(self) -> bool:
        """What was built under another kv_digest means other KV: none of it may be matched."""
        session, entry = self._session, self._session.entry
        if entry.kv_digest == session.kv_digest:
            return False
        held_something = len(entry) > 0
        session.logical = self._stayed = 0
        entry.park_last()
        entry.trim(0)
        entry.kv_digest, entry.runtime_digest = session.kv_digest, session.runtime_digest
        return held_something

    def _take_better(self, pool: ContextPool, own: _Find, need_logits: bool) -> _Find:
        """Look for a context that holds clearly more of the target; take it over or copy it."""
        session, mine = self._session, self._session.entry
        best, other = own, mine
        for entry in pool.contexts:
            if entry is not mine and entry.kv_digest == session.kv_digest:
                found = _find(entry, self._target, need_logits)
                if found.keep > best.keep and (
                    pool.may_take(mine, entry) or pool.may_copy(mine, entry, found.keep)
                ):
                    best, other = found, entry
        if best.keep < own.keep + WORTHWHILE_TOKENS:
            return own
        if pool.may_take(mine, other):
            pool.swap(mine, other)
            session.context = other
            session.counters["adopted_contexts"] += 1
        else:
            if not mine.park(common_prefix(mine.tokens, other.tokens[: best.keep])):
                return own  # cancelled: what is held stays
            session.logical = 0
            if not pool.copy(mine, other, best.keep):
                return _Find(0, 0, own.cannot_trim)
            self._copied = best.keep
            session.counters["copied_tokens"] += best.keep
        self._held = len(other)
        # The other's content helps, but it is still for lack of a trim that more is evaluated.
        return _Find(best.matched, best.keep, own.cannot_trim)

    def _bring_back(self, found: _Find, need_logits: bool) -> _Find:
        """What the cold store has beyond what was found."""
        session, entry = self._session, self._session.entry
        if entry.parking is None:
            return found
        session.logical = min(session.logical, found.keep)
        keep = entry.parking.bring_back(entry, self._target, found.keep, need_logits=need_logits)
        session.logical = min(session.logical, len(entry))
        if keep == found.keep:
            return found
        session.counters["restored_tokens"] += max(0, keep - found.keep)
        self._held = max(self._held, len(entry))
        matched = common_prefix(entry.tokens, self._target)
        return _Find(max(matched, found.matched), keep, found.cannot_trim)

    def _dropped_at(self, end: int) -> int:
        """Tokens that left the session's context by this call, as far as is known at ``end``.

        What lies beyond a prefix that stayed may still be the suffix's: it is judged there.
        """
        if self._session.logical == end <= self._stayed and end < len(self._assembled.tokens):
            return 0
        return self._old_logical - min(self._stayed, self._session.logical)

    def _was_dropped(self, end: int) -> bool:
        """Whether the engine's own cache had lost what the record says it holds.

        It finds whole blocks, and evaluates a prompt's last token again.
        """
        entry = self._session.entry
        if entry.samples_itself is None:
            return False
        block = entry.engine_context.state_block
        due = min(self._found.keep, end - 1)
        return not self._lower_bound and self._reused < due - due % block

    def miss_reason(self, begin: int, end: int) -> str:
        """Why not all from ``begin`` to ``end`` of the target was there."""
        if begin == end:
            return "NONE"
        if isinstance(self._session.entry.engine_context, Rereading):
            return "RECOMPUTED"
        if self._found.cannot_trim and self._found.keep < end:
            return "CANNOT_TRIM"
        matched = self._found.matched
        if self._was_dropped(end):
            return "RECLAIMED"
        if matched >= end:
            return "NONE"
        if self._other_digest:
            return "KV_DIGEST"
        if matched == 0 and self._old_logical == 0:
            return "COLD"
        return "EXTENDED" if matched >= self._held else "TOKENS_DIFFER"


def token_hash(tokens: Tokens) -> str:
    """SHA-256 hex of the ids as little-endian int32."""
    return hashlib.sha256(tokens.astype("<i4", copy=False).tobytes()).hexdigest()


def show_images(session: Session) -> None:
    """Before any of a prompt with images is evaluated: what the ids below 0 stand for."""
    assembled, context = session.assembled, session.entry.engine_context
    if assembled is not None and assembled.images:
        assert isinstance(context, SeeingContext)  # else the engine's vision would be None
        context.show(assembled.images)


def polled(context: OpContext) -> Cancelled:
    """Asking whether to go on is what an engine does as it works: it counts as life."""

    def cancelled() -> bool:
        context.beat()
        return context.cancelled()

    return cancelled


def ensure_logits(session: Session, context: OpContext) -> tuple[int, bool]:
    """Make the logits after the prompt and the answer so far current.

    Evaluates what isn't resident of them (the last sampled token, or what a cancel left out), or
    the last token again. Returns how many tokens were evaluated, and False when cancelled on the
    way. All are evaluated where the model's memory can't give up its last token.
    """
    entry, logical, missing = session.entry, session.logical, session.missing()
    if not missing and entry.logits_at(logical):
        return 0, True
    keep = logical if missing else logical - 1
    if not entry.can_keep(keep):
        keep = 0
    tokens = [*entry.tokens[keep:logical].tolist(), *missing]
    if not entry.park(logical):
        return 0, False
    entry.trim(keep)
    show_images(session)
    # Sampled tokens go one by one, as they did or would have when they were sampled.
    prompt = max(0, session.as_prompt - keep)
    cancelled = polled(context)
    done = entry.extend(tokens[:prompt], cancelled) if prompt else 0
    if done == min(prompt, len(tokens)):
        for token in tokens[prompt:]:
            if not entry.append(token, cancelled):
                break
            done += 1
    session.took(keep, keep + done, again_from=logical if keep == logical - 1 else 0)
    session.logical = keep + done
    session.counters["evaluated_tokens"] += done
    return done, done == len(tokens)
