"""Any order of prompts, answers, cancels and admissions, beside a token tape of the test's own."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modeld.shared.errors import ContextOverflow
from modeld.shared.messages import PromptIn, SegmentIn, Status
from tests.support.core_harness import FakeOp, options
from tests.support.evicting import Evicting, numbered
from tests.support.fake_engine import FakeContext, FakeEngine

WINDOW, SINK, RECENT, BLOCK = 1024, 256, 256, 256
CANCELS = st.one_of(st.none(), st.none(), st.integers(0, 30))
SIZES = st.sampled_from((1, 40, 300, 800, 2500))


class Conversation(RuleBasedStateMachine):
    """Only digits are sampled, so that a text's tokens are its bytes and answers can be sent as
    text.
    """

    trimmable = True
    cold_bytes = 1 << 30

    def __init__(self) -> None:
        super().__init__()
        engine = FakeEngine(
            micro_batch=64, trimmable=self.trimmable, ranges=self.trimmable, state_block=32
        )
        engine.bias[:] = -100.0
        engine.bias[48:58] = 0.0
        self.h = Evicting(engine, cold_bytes=self.cold_bytes, max_contexts=2)
        self.h.open_evicting()
        self.pieces: list[tuple[str, bool]] = []  # text, pinned
        self.tape: list[int] = []
        self.whole = True  # nothing was left out by a cancel
        self.number = 0

    # --- steps -----------------------------------------------------------------------------

    @rule(size=SIZES, pin=st.sampled_from((False, False, False, True)), split=st.booleans(),
          cancel_at=CANCELS)  # fmt: skip
    def go_on(self, size: int, pin: bool, split: bool, cancel_at: int | None) -> None:
        """The conversation with its answer as text, and news."""
        text = bytes(self.tape).decode()
        known = sum(len(piece) for piece, _ in self.pieces)
        pieces = [*self.pieces, (text[known:], False)] if text[known:] else list(self.pieces)
        self.number += 1
        news = numbered(size, self.number * 1000)
        self.send([*pieces, (news[:120], True) if pin else (news, False)], split, cancel_at)

    @precondition(lambda self: self.pieces)
    @rule(keep=st.floats(0, 1), size=SIZES, cancel_at=CANCELS)
    def go_back(self, keep: float, size: int, cancel_at: int | None) -> None:
        """Another prompt from somewhere on, or only the beginning of this one."""
        left = int(keep * sum(len(piece) for piece, _ in self.pieces))
        pieces = []
        for piece, pin in self.pieces:
            if left > 0:
                pieces.append((piece[:left], pin))
            left -= len(piece)
        self.number += 1
        news = [("x" + numbered(size, self.number * 1000), False)] if size > 1 else []
        if pieces or news:
            self.send([*pieces, *news], False, cancel_at)

    @precondition(lambda self: self.tape)
    @rule(tokens=st.sampled_from((1, 7, 200, 900)), cancel_at=CANCELS)
    def answer(self, tokens: int, cancel_at: int | None) -> None:
        before = self.h.explain()
        evaluated = self.h.engine.evaluated
        op = FakeOp(cancel_at=cancel_at)
        final = self.h.decode(options(tokens), op=op)
        session = self.h.session()
        answer = session.answer_ids
        if final.stop_reason != "cancelled":
            assert op.ids == answer[len(answer) - final.tokens :]
            assert final.tokens == tokens or final.stop_reason == "context_full"
        self.tape = [*self.tape[: session.prompt], *answer]
        self.whole = final.tokens > 0 or (self.whole and final.stop_reason != "context_full")
        if final.stop_reason == "context_full":
            assert any(pin for _, pin in self.pieces)
        if final.tokens and final.stop_reason != "cancelled":
            assert final.seen_tokens - before.seen_tokens <= final.prefilled + final.tokens
        assert self.h.engine.evaluated - evaluated >= final.recomputed
        explained = self.h.explain()
        assert (final.resident, final.parked, final.gone, final.seen_tokens) == (
            explained.resident, explained.parked, explained.gone, explained.seen_tokens,
        )  # fmt: skip
        if final.stop_reason == "cancelled" and len(self.h.held()) < self.target() - bool(answer):
            self.whole = False

    @precondition(lambda self: len(self.tape) > WINDOW)
    @rule(at=st.floats(0, 1), size=st.integers(1, 400), query=st.booleans(), cancel_at=CANCELS)
    def admit(self, at: float, size: int, query: bool, cancel_at: int | None) -> None:
        before = self.hot()
        begin = min(int(at * len(self.tape)), len(self.tape) - 1)
        what: dict[str, Any] = {"begin": begin, "end": min(begin + size, len(self.tape))}
        if query:
            what = {"query": bytes(self.tape[begin : begin + 12]).decode()}
        evaluated = self.h.engine.evaluated
        try:
            told = self.h.admit(op=FakeOp(cancel_at=cancel_at), **what)
        except ContextOverflow:
            assert any(pin for _, pin in self.pieces)
            return
        now = self.hot()
        came = {at for begin, end in told.ranges for at in range(begin, end)}
        assert told.admitted == len(came)
        assert came <= now
        assert not came & before
        assert told.restored <= told.admitted
        assert told.recomputed == self.h.engine.evaluated - evaluated
        assert told.admitted <= WINDOW - SINK - RECENT
        assert told.resident == len(now)
        if not told.cancelled:
            assert told.evicted == len(before - now)
        self.whole = not told.cancelled

    # --- what must hold --------------------------------------------------------------------

    @invariant()
    def the_context_is_what_the_blocks_say_of_the_tape(self) -> None:
        h, session = self.h, self.h.session()
        told = h.explain()
        held = h.held()
        assert held == h.hot(self.tape)
        assert told.resident == len(held) <= WINDOW
        assert told.resident + told.available == WINDOW
        # Each token's KV is what a fresh context computes after exactly those before it.
        context = session.entry.engine_context
        assert isinstance(context, FakeContext)
        assert context.hashes[: len(held)] == h.fresh_context(held).hashes if held else True
        h.check_records()
        sizes = {"hot": 0, "parked": 0, "gone": 0}
        at = 0
        for block in told.blocks:
            assert at <= block.begin < block.end <= len(self.tape)
            at = block.end
            sizes[block.state] += block.end - block.begin
            assert block.protected == (block.cls in ("pinned", "sink", "recent"))
        assert sizes == {"hot": told.resident, "parked": told.parked, "gone": told.gone}
        left = len(self.tape) - sum(sizes.values())
        if self.whole:
            assert left <= 1
        assert told.counters["evaluated_tokens"] == h.engine.evaluated
        if not self.cold_bytes:
            assert told.parked == 0

    @invariant()
    def what_must_stay_is_attended(self) -> None:
        if not self.whole or len(self.tape) <= WINDOW:
            return
        hot = self.hot()
        stays = {*range(SINK), *range(len(self.tape) - RECENT, len(self.tape) - 1)}
        at = 0
        for piece, pin in self.pieces:
            stays |= set(range(at, at + len(piece))) if pin else set()
            at += len(piece)
        assert stays <= hot

    # --- helpers ---------------------------------------------------------------------------

    def hot(self) -> set[int]:
        blocks = [b for b in self.h.explain().blocks if b.state == "hot"]
        return {at for block in blocks for at in range(block.begin, block.end)}

    def target(self) -> int:
        return len(self.h.session().known_tokens())

    def send(self, pieces: list[tuple[str, bool]], split: bool, cancel_at: int | None) -> None:
        h = self.h
        made = [
            SegmentIn(text=text, cache_class="task_pinned" if pin else "volatile")
            for text, pin in pieces
        ]
        tape = [byte for text, _ in pieces for byte in text.encode()]
        before = h.explain()
        prefix = PromptIn(segments=made[: len(made) // 2])
        suffix = PromptIn(segments=made[len(made) // 2 :])
        pins = sum(len(text) for text, pin in pieces if pin)
        op = FakeOp(cancel_at=cancel_at)
        try:
            if split:
                h.turn(prefix, suffix, options(1), op=op)
                answer = h.session().answer_ids
            else:
                answer = []
                first, evaluated = h.ensure(prefix), h.engine.evaluated
                self.check(h.suffix(suffix, op=op), first.seen_tokens, evaluated)
        except ContextOverflow as error:
            assert len(tape) > WINDOW
            assert pins > 0
            assert error.metadata["pinned"] == str(pins)  # noqa: PT017
            if split:
                assert h.explain() == before
                return
            self.pieces = pieces[: len(made) // 2]
            self.tape = [byte for text, _ in self.pieces for byte in text.encode()]
            self.whole = True
            return
        session = h.session()
        self.pieces, self.tape = pieces, [*tape, *answer]
        self.whole = cancel_at is None or len(h.held()) >= self.target() - bool(answer)
        assert session.length == len(self.tape)

    def check(self, status: Status, seen: int, evaluated: int) -> None:
        """Of a suffix behind its prefix."""
        assert status.prefilled == self.h.engine.evaluated - evaluated
        assert 0 <= status.recomputed <= status.prefilled
        again = status.prefilled - status.recomputed - (status.seen_tokens - seen)
        assert again in (0, 1)  # the last token, for its logits
        assert status.restored <= status.reused
        assert status.prefix + status.suffix == self.h.session().prompt
        assert status.resident + status.available == WINDOW


class WithoutAColdStore(Conversation):
    cold_bytes = 0


class WithoutTrimming(Conversation):
    trimmable = False


SETTINGS = settings(
    max_examples=25,
    stateful_step_count=14,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
for machine in (Conversation, WithoutAColdStore, WithoutTrimming):
    machine.TestCase.settings = SETTINGS
TestConversation = Conversation.TestCase
TestWithoutAColdStore = WithoutAColdStore.TestCase
TestWithoutTrimming = WithoutTrimming.TestCase
