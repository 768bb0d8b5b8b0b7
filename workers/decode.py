"""The decode loop: sample, stream, evaluate, until there is a reason to stop.

Owns how an answer ends and what of it is kept. Knows nothing of templates or other sessions.

A sampled token is part of the answer at once, and is evaluated only when another one follows. So
the last token of an answer isn't resident; the next turn, or the next decode, evaluates it with
what comes then. The end-of-generation token is never evaluated: a chat template writes its own.
A prompt that fills the window still yields one token, whose sampling needs no cell.

Under a constraint only what it allows is sampled, an end where it may end; the answer is over
("eos", nothing sampled for it) once nothing may follow. What is released is then always a
beginning of what the constraint allows: of an answer cut within a character, that one is left out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.errors import InvalidRequest
from modeld.shared.messages import (
    ChunkOut,
    DecodeIn,
    FinalOut,
    SampledTokenOut,
    SamplingIn,
    TokenLogprobOut,
)
from modeld.shared.planner.residency import NoRoom
from modeld.workers import faults, sampling, structured
from modeld.workers.engine import SelfSampling, Tokenizer
from modeld.workers.engine_tokens import EngineTokens
from modeld.workers.eviction import Answering, standing
from modeld.workers.executor import OpContext
from modeld.workers.prefill import ensure_logits
from modeld.workers.prompt import GeneratedTurn
from modeld.workers.session import Session
from modeld.workers.stream import Coalescer, TextStream, validate_stop

if TYPE_CHECKING:
    from modeld.workers.engine import Logits
    from modeld.workers.pool import ContextPool
    from modeld.workers.structured import Constraint

MAX_TOP_LOGPROBS = 20


def check_options(
    turn_id: str, options: DecodeIn, tokenizer: Tokenizer, engine: SelfSampling | None = None
) -> None:
    """Raises InvalidRequest for anything a decode would stumble over, before it begins.

    Where the ``engine`` samples by itself, UnsupportedFeature for what it can't do.
    """
    if not turn_id:
        raise InvalidRequest.of("turn_id", turn_id, "a name for the answer")
    if options.max_tokens < 0:
        raise InvalidRequest.of("max_tokens", options.max_tokens, "0 (until the window is full)")
    if not 0 <= options.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest.of("top_logprobs", options.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}")
    sampling.validate(options.sampling, tokenizer.vocab_size)
    validate_stop(options.stop)
    Coalescer(options.stream_interval_ms)
    structured.check(options, engine)
    if engine is not None:
        engine.check(options)


def decode(
    session: Session,
    tokenizer: Tokenizer,
    turn_id: str,
    options: DecodeIn,
    context: OpContext,
    *,
    spent_s: float = 0.0,
    constraint: Constraint | None = None,
    pool: ContextPool,
) -> FinalOut:
    """Generate after the prompt, or after the answer so far, and keep the answer as a turn.

    What isn't resident of the prompt (after a cancel) is evaluated first. ``spent_s`` is what the
    operation spent before, for its time to the first token. A second decode without a new prompt
    continues the answer: its turn is then the whole of it. ``constraint`` is that of the whole
    answer, with what is there already taken in.

    Raises InvalidRequest where a constraint leaves nothing to choose; what was generated is kept.
    """
    return _Decode(session, tokenizer, options, context, spent_s, constraint, pool).run(turn_id)


def nothing_decoded(session: Session, options: DecodeIn, pool: ContextPool) -> FinalOut:
    """The final record of a turn that was cancelled before its first token."""
    return _final(session, options, "cancelled", pool)


def _final(
    session: Session,
    options: DecodeIn,
    stop_reason: str,
    pool: ContextPool,
    *,
    stop_sequence: str = "",
    tokens: int = 0,
    prefilled: int = 0,
    engine_s: float = 0.0,
    first_token_s: float = 0.0,
    recomputed: int = 0,
) -> FinalOut:
    parked, gone = standing(session, pool, session.length)
    return FinalOut(
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
        tokens=tokens,
        prefilled=prefilled,
        engine_seconds=engine_s,
        first_token_seconds=first_token_s,
        resident=session.logical,
        available=session.available,
        seen_tokens=session.seen_tokens,
        seed=options.sampling.seed,
        parked=parked,
        gone=gone,
        recomputed=recomputed,
    )


def _samples(session: Session) -> bool:
    return session.entry.samples_itself is not None


class _Chunks:
    """What was sampled and not yet sent; sends it when it is due and there is credit."""

    def __init__(self, options: DecodeIn, context: OpContext) -> None:
        self._context = context
        self._coalescer = Coalescer(options.stream_interval_ms)
        self._with_ids = options.token_ids
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[SampledTokenOut] = []
        self.waited_s = 0.0  # for credit

    def take(self, token: int, text: str, logprob: SampledTokenOut | None, now_s: float) -> bool:
        """Add a token; False when cancelled while waiting for credit."""
        if text:
            self._texts.append(text)
        if self._with_ids:
            self._ids.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
        return not self._coalescer.take(now_s) or self.send(now_s)

    def finish(self, text: str, now_s: float) -> bool:
        """Send what is left, if anything is."""
        if text:
            self._texts.append(text)
        if not self._coalescer.waiting_tokens and not self._texts:
            return True
        return self.send(now_s)

    def send(self, now_s: float) -> bool:
        if not self._context.wait_credit():
            return False
        ready_s = time.perf_counter()
        self.waited_s += ready_s - now_s
        chunk = ChunkOut(
            text="".join(self._texts),
            tokens=self._coalescer.waiting_tokens,
            token_ids=self._ids,
            logprobs=self._logprobs,
        )
        self._context.emit(chunk)
        self._coalescer.flushed(ready_s)
        self._texts, self._ids, self._logprobs = [], [], []
        return True


class _Decode:
    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        options: DecodeIn,
        context: OpContext,
        spent_s: float,
        constraint: Constraint | None,
        pool: ContextPool,
    ) -> None:
        self._session = session
        self._pool = pool
        # Set under overflow evict.
        self._answering = Answering(session, pool, context) if session.layout is not None else None
        self._tokenizer = tokenizer
        self._options = options
        self._context = context
        self._spent_s = spent_s
        self._constraint = constraint
        self._stream = TextStream(options.stop)
        self._chunks = _Chunks(options, context)
        self._before = len(session.answer_ids)  # tokens of the answer that this one continues
        self._sampled = 0
        self._first_token_s = 0.0
        # Set where the engine samples by itself.
        self._engine = EngineTokens(session, options, context) if _samples(session) else None

    def run(self, turn_id: str) -> FinalOut:
        session, options = self._session, self._options
        began_s = time.perf_counter()
        prefilled = 0
        if self._constraint is not None and self._constraint.complete:
            stop = "eos"
        elif self._answering is None and session.logical + len(session.missing()) > session.window:
            stop = "context_full"  # an earlier answer's last token has no cell
        else:
            try:
                prefilled, stop = self._answer(began_s)
            except InvalidRequest:
                if self._constraint is not None:  # what was shown stands
                    self._end("length")
                    self._keep(turn_id)
                raise
        stop = self._end(stop)
        self._keep(turn_id)
        if stop == "cancelled":
            session.counters["cancelled_ops"] += 1
        return _final(
            session,
            options,
            stop,
            self._pool,
            stop_sequence=self._stream.matched or "",
            tokens=self._sampled,
            prefilled=prefilled,
            engine_s=time.perf_counter() - began_s - self._chunks.waited_s,
            first_token_s=self._first_token_s,
            recomputed=self._answering.recomputed if self._answering is not None else 0,
        )

    def _answer(self, began_s: float) -> tuple[int, str]:
        """Tokens evaluated before the first one was sampled, and why the answer stopped."""
        engine = self._engine
        if self._answering is not None:
            try:
                prefilled, ready = self._answering.ensure_logits()
            except NoRoom:
                return 0, "context_full"
            return prefilled, self._loop(began_s) if ready else "cancelled"
        if engine is None:
            prefilled, ready = ensure_logits(self._session, self._context)
            return prefilled, self._loop(began_s) if ready else "cancelled"
        try:
            _, ready = engine.begin()
            stop = self._loop(began_s) if ready else "cancelled"
        finally:
            engine.close()
        return engine.evaluated, stop

    def _loop(self, began_s: float) -> str:
        """Sample until there is a reason to stop. The session is exact after every token."""
        session, context, options = self._session, self._context, self._options
        entry, stream, chunks = session.entry, self._stream, self._chunks
        answer, window, limit = session.answer_ids, session.window, options.max_tokens
        cancelled, beat, piece_of = context.cancelled, context.beat, self._tokenizer.piece
        ends = frozenset[int]() if options.ignore_eos else self._tokenizer.end_of_generation
        sampler, constraint = self._sampler(options.sampling), self._constraint
        engine = self._engine
        logits: Logits | None = None  # none of an engine that samples by itself
        logprob: SampledTokenOut | None = None
        while not cancelled():
            faults.point("decode")
            if engine is None:
                logits = entry.logits()
                allowed = None
                if constraint is not None and (allowed := constraint.allowed()) is None:
                    return "eos"
                token = sampler.sample(logits, allowed)
                sampler.accept(token)
            else:
                token = engine.token
            now_s = time.perf_counter()
            if not self._sampled:
                self._first_token_s = self._spent_s + now_s - began_s
            self._sampled += 1
            session.seen_tokens += 1
            beat()
            if options.top_logprobs and logits is not None:
                logprob = self._logprob(logits, token)
            if token in ends:
                return "eos" if chunks.take(token, "", logprob, now_s) else "cancelled"
            if constraint is not None:
                constraint.accept(token)
            answer.append(token)
            if not chunks.take(token, stream.feed(piece_of(token)), logprob, now_s):
                return "cancelled"
            if stream.matched is not None:
                return "stop_sequence"
            if constraint is not None and constraint.complete:
                return "eos"
            if self._sampled == limit:
                return "length"
            if session.logical == window:
                if self._answering is None:
                    return "context_full"
                if why := self._answering.make_room():
                    return why
                entry = session.entry  # which another may have taken the place of
                continue
            if not (engine.go_on() if engine else entry.append(token, cancelled)):
                return "cancelled"
            session.logical += 1
            session.counters["evaluated_tokens"] += 1
        return "cancelled"

    def _sampler(self, options: SamplingIn) -> sampling.Sampler:
        sampler = sampling.Sampler(options, self._tokenizer.vocab_size)
        before = self._session.entry.tokens
        if self._answering is not None:
            before = np.asarray(self._session.conversation(), dtype=np.int32)
        if options.repeat_last_n >= 0:
            before = before[max(0, len(before) - options.repeat_last_n) :]
        sampler.prime(before[before >= 0].tolist())  # an image's ids aren't the vocabulary's
        return sampler

    def _logprob(self, logits: Logits, token: int) -> SampledTokenOut:
        piece = self._tokenizer.piece
        own, best = sampling.top_logprobs(logits, self._options.top_logprobs, token)
        return SampledTokenOut(
            sampled=TokenLogprobOut(token_id=token, raw=piece(token), logprob=own),
            top=[TokenLogprobOut(token_id=i, raw=piece(i), logprob=value) for i, value in best],
        )

    def _end(self, stop: str) -> str:
        """Release what was held back, and send it unless the reader is gone."""
        text = self._stream.finish(whole=self._constraint is not None)
        if self._stream.matched is not None and stop != "cancelled":
            stop = "stop_sequence"
        if stop != "cancelled" and not self._chunks.finish(text, time.perf_counter()):
            return "cancelled"
        return stop

    def _keep(self, turn_id: str) -> None:
        """The answer is what was released: tokens beyond it go, from the context too."""
        session, stream = self._session, self._stream
        session.counters["generated_tokens"] += self._sampled
        if self._sampled:
            session.sampled()
        kept = self._before + stream.visible_tokens
        shown = session.answer_ids[self._before : kept]
        session.cut(kept)
        session.answer_text += stream.text
        session.answer_spelled = session.answer_spelled and stream.spelled
        del session.answer_ids[kept:]
        assembled = session.assembled
        assert assembled is not None  # there is no decode without a prompt
        session.keep_turn(
            GeneratedTurn(
                turn_id=turn_id,
                tail_text=assembled.tail_text,
                tail_ids=tuple(assembled.tail_ids),
                answer_text=session.answer_text,
                answer_ids=tuple(session.answer_ids),
                spelled=session.answer_spelled,
            )
        )
        if not stream.spelled:
            # A stop sequence cut within a token: a decode that continues this answer must stand
            # on the text that was shown.
            inside = b"".join(map(self._tokenizer.piece, shown)).decode(errors="replace")
            session.answer_ids += self._tokenizer.encode(stream.text[len(inside) :])
