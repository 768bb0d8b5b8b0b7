"""Any order of operations: the numbers add up, and no reuse ever changes an answer."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from modeld.shared.errors import (
    ContextOverflow,
    InsufficientMemory,
    InvalidRequest,
    ManifestMismatch,
)
from modeld.shared.messages import FinalOut, PromptIn, SegmentIn, Status
from modeld.workers.session import Session
from tests.support.core_harness import FakeOp, Harness, chat, options
from tests.support.fake_engine import FakeContext, FakeEngine

WINDOWS = (128, 200)
LONG = "this is a line long enough to be worth finding again in another session\n"
TEXTS = (LONG, LONG, "one\n", "the world\n", "a wor", "ld and\n")
LISTS = st.lists(st.sampled_from(TEXTS), max_size=3)
CANCELS = st.one_of(st.none(), st.none(), st.integers(0, 12))


class Sessions(RuleBasedStateMachine):
    trimmable = True
    copies = True
    sessions: Bundle[str] = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        engine = FakeEngine(
            micro_batch=7, trimmable=self.trimmable, copies=self.copies, end_bias=0.0
        )
        self.harness = Harness(engine, max_contexts=3)
        self.count = 0
        self.chat: dict[str, bool] = {}

    # --- steps -----------------------------------------------------------------------------

    @rule(
        target=sessions,
        window=st.sampled_from(WINDOWS),
        is_chat=st.booleans(),
        digest=st.sampled_from(("kv", "kv", "kv", "kv2")),
    )
    def open(self, window: int, is_chat: bool, digest: str) -> Any:
        self.count += 1
        name = f"s{self.count}"
        in_use = len(self.chat)
        try:
            opened = self.harness.open(
                name, window=window, prompt_format="chat" if is_chat else "raw", kv_digest=digest
            )
        except InsufficientMemory as error:
            self.check_refused(in_use, error)
            return multiple()
        assert in_use < 3
        assert opened.window == window
        self.chat[name] = is_chat
        return name

    @rule(name=consumes(sessions), discard=st.booleans())
    def close(self, name: str, discard: bool) -> None:
        held = len(self.session(name).entry)
        assert self.harness.close(name, discard=discard).retained == (0 if discard else held)
        del self.chat[name]

    @rule(name=sessions, texts=LISTS, cancel_at=CANCELS)
    def ensure(self, name: str, texts: list[str], cancel_at: int | None) -> None:
        before = self.before(name)
        try:
            status = self.harness.ensure(
                self.prompt(name, texts), name, FakeOp(cancel_at=cancel_at)
            )
        except (ContextOverflow, ManifestMismatch):
            self.check_unchanged(name, before)
            return
        self.check_status(name, status, before, cancel_at)
        assert status.suffix == 0

    @rule(
        name=sessions,
        texts=LISTS,
        extend=st.booleans(),
        cancel_at=CANCELS,
        refer=st.booleans(),
    )
    def suffix(
        self, name: str, texts: list[str], extend: bool, cancel_at: int | None, refer: bool
    ) -> None:
        before = self.before(name)
        suffix = self.prompt(name, texts, refer=refer)
        if not suffix.segments and not self.session(name).logical:
            return
        if not self.chat[name] and not suffix.segments:
            suffix = self.prompt(name, ["x"])
        try:
            status = self.harness.suffix(suffix, name, FakeOp(cancel_at=cancel_at), extend=extend)
        except (ContextOverflow, ManifestMismatch):
            self.check_unchanged(name, before)
            return
        except InvalidRequest:
            assert not texts  # a prompt of a generated turn only, and that one is empty
            self.check_unchanged(name, before)
            return
        self.check_status(name, status, before, cancel_at)

    @rule(name=sessions, tokens=st.integers(1, 20), cancel_at=CANCELS, stop=st.booleans())
    def decode(self, name: str, tokens: int, cancel_at: int | None, stop: bool) -> None:
        session = self.session(name)
        if session.assembled is None or not session.assembled.tokens:
            return
        known = [*session.assembled.tokens, *session.answer_ids]
        op = FakeOp(cancel_at=cancel_at)
        final = self.harness.decode(options(tokens, stop=["e"] if stop else ()), name, op)
        self.check_answer(name, known, op, final, cancelled=cancel_at is not None)

    @rule(
        name=sessions,
        prefix=LISTS,
        suffix=LISTS,
        tokens=st.integers(1, 12),
        cancel_at=CANCELS,
        refer=st.booleans(),
    )
    def turn(
        self,
        name: str,
        prefix: list[str],
        suffix: list[str],
        tokens: int,
        cancel_at: int | None,
        refer: bool,
    ) -> None:
        if not prefix and not suffix:
            prefix = ["one\n"]
        before = self.before(name)
        op = FakeOp(cancel_at=cancel_at)
        try:
            final = self.harness.turn(
                self.prompt(name, prefix),
                self.prompt(name, suffix, refer=refer),
                options(tokens),
                name,
                op,
            )
        except (ContextOverflow, ManifestMismatch):
            self.check_unchanged(name, before)
            assert not op.sent
            return
        statuses = op.of(Status)
        for status in statuses:
            assert status.resident <= status.prefix + status.suffix
        tokens_ = self.session(name).assembled.tokens  # type: ignore[union-attr]
        evaluated = sum(status.prefilled for status in statuses)
        reused = sum(status.reused for status in statuses)
        if len(statuses) == 2 and statuses[1].resident == len(tokens_):
            assert reused + evaluated == len(tokens_)
            stayed = common(before["logical"], tokens_)
            assert sum(s.dropped for s in statuses) == len(before["logical"]) - stayed
        else:
            assert cancel_at is not None
            assert final.stop_reason == "cancelled"
            assert final.resident == statuses[-1].resident
        self.check_answer(name, tokens_, op, final, cancelled=cancel_at is not None)

    # --- what must hold --------------------------------------------------------------------

    @invariant()
    def record_equals_the_engines_state(self) -> None:
        pool = self.harness.core.model.pool
        assert pool is not None
        assert len(pool.contexts) <= 3
        assert pool.in_use == len(self.chat)
        self.harness.check_records()

    @invariant()
    def parts_add_up(self) -> None:
        for name in self.chat:
            session, explained = self.session(name), self.harness.explain(name)
            assert explained.resident + explained.available == session.window
            sizes = {block.what: block.end - block.begin for block in explained.blocks}
            hot = sum(size for what, size in sizes.items() if what != "retained")
            assert hot == explained.resident
            assert sizes.get("retained", 0) == explained.retained
            if session.assembled is not None:
                known = [*session.assembled.tokens, *session.answer_ids]
                assert session.logical_tokens().tolist() == known[: session.logical]

    def check_status(
        self, name: str, status: Status, before: dict[str, Any], cancel_at: int | None
    ) -> None:
        session = self.session(name)
        assert session.assembled is not None
        tokens = session.assembled.tokens
        assert status.prefix + status.suffix == len(tokens)
        assert status.resident + status.available == session.window
        assert status.copied <= max(status.reused, 0)
        assert status.seen_tokens == before["seen"] + status.prefilled
        stayed = common(before["logical"], tokens)
        assert status.dropped == len(before["logical"]) - min(stayed, status.resident)
        if status.resident < len(tokens):
            assert cancel_at is not None
            return
        if status.suffix:
            assert status.prefilled > 0  # there are logits to go on from
        if status.part == "prefix":
            assert status.reused + status.prefilled == status.prefix
        elif status.miss_reason != "CANNOT_TRIM" and before["resident"] >= status.prefix:
            assert status.reused + status.prefilled == status.suffix or not status.template_additive

    def check_answer(
        self, name: str, known: list[int], op: FakeOp, final: FinalOut, *, cancelled: bool
    ) -> None:
        session = self.session(name)
        assert final.resident == session.logical
        assert final.resident + final.available == session.window
        if final.stop_reason == "cancelled":
            assert cancelled
        else:
            assert final.tokens == len(op.ids)
        assert op.ids == self.reference(known, len(op.ids))

    def reference(self, known: list[int], count: int) -> list[int]:
        """What a fresh context that is fed the same tokens generates."""
        engine = self.harness.engine
        context = FakeContext(engine, 4096, 0)
        evaluated = engine.evaluated
        context.evaluate(known, 0, cancelled=lambda: False)
        answer: list[int] = []
        while len(answer) < count:
            answer.append(int(np.argmax(context.logits())))
            context.evaluate(answer[-1:], len(context.tokens), cancelled=lambda: False)
        engine.evaluated = evaluated
        return answer

    # --- helpers ---------------------------------------------------------------------------

    def session(self, name: str) -> Session:
        return self.harness.core.model.sessions.by_id[name]

    def before(self, name: str) -> dict[str, Any]:
        session = self.session(name)
        return {
            "explained": self.harness.explain(name),
            "logical": session.logical_tokens().tolist(),
            "resident": session.logical,
            "seen": session.seen_tokens,
        }

    def check_refused(self, in_use: int, error: InsufficientMemory) -> None:
        assert in_use == 3
        assert error.metadata["sessions"] == "3"

    def check_unchanged(self, name: str, before: dict[str, Any]) -> None:
        assert self.harness.explain(name) == before["explained"]

    def prompt(self, name: str, texts: list[str], *, refer: bool = False) -> PromptIn:
        turns = self.session(name).turns
        extra = [SegmentIn(generated_turn_id=next(reversed(turns)))] if refer and turns else []
        if self.chat[name]:
            return chat(*(("user", text) for text in texts), *extra)
        return PromptIn(segments=[*(SegmentIn(text=text) for text in texts), *extra])


class UntrimmableSessions(Sessions):
    trimmable = False


class UncopyableSessions(Sessions):
    copies = False


def common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
for machine in (Sessions, UntrimmableSessions, UncopyableSessions):
    machine.TestCase.settings = SETTINGS
TestSessions = Sessions.TestCase
TestUntrimmableSessions = UntrimmableSessions.TestCase
TestUncopyableSessions = UncopyableSessions.TestCase
