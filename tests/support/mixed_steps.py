"""What the clients of a mixed load do: every call of a session, at random, and what it leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from modeld.client import (
    CallCancelled,
    ContextOverflow,
    DeadlineExceeded,
    GeneratedTurn,
    InsufficientMemory,
    ModelBusy,
)
from modeld.client.streams import DecodeStream, TurnStream
from tests.support import tape_evicting, tape_reports
from tests.support.mixed_load import (
    LONGEST,
    OPEN,
    Kept,
    Talk,
    TapedClient,
)
from tests.support.token_tape import Step

MOST_KEPT = 12  # snapshots at once
SAVED_COUNTERS = (
    "evaluated_tokens",
    "reused_tokens",
    "dropped_tokens",
    "generated_tokens",
    "cancelled_ops",
)
ASKED_FOR = ("lighthouse", "copper wheel", "the letter", "seventh door")


@dataclass
class Plan:
    """A prompt that is about to be sent."""

    prefix: list[Any]
    suffix: list[Any]
    step: Step


class MixedClient(TapedClient):
    """One client; ``run`` steps until it is told to end, and leaves no session open."""

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.step()
        while self.talks:
            self.close(self.talks[-1], discard=True)
        for key, talk in list(self.kept_keys):
            self.reopen(key, talk)
            self.close(self.talks[-1], discard=True)

    def step(self) -> None:
        choose = self.random
        if not self.talks or (len(self.talks) < OPEN and choose.random() < 0.12):
            self.open()
            return
        talk = choose.choice(self.talks)
        actions: tuple[tuple[float, Callable[[Talk], None]], ...] = (
            (5, self.turn), (2, self.left_turn), (1.5, self.ensure), (1, self.left_ensure),
            (1.5, self.suffix), (1.5, self.decode), (0.7, self.left_decode), (0.8, self.fork),
            (1, self.snapshot), (1, self.restore), (0.6, self.delete), (0.9, self.admit),
            (0.7, self.close_one), (0.4, self.attach), (0.4, self.overflow),
        )  # fmt: skip
        weights = [weight for weight, _ in actions]
        try:
            choose.choices([action for _, action in actions], weights)[0](talk)
        except Exception as error:
            if not isinstance(error, AssertionError):
                error.add_note(str(talk.tape))
            raise

    # --- prompts

    def plan(self, talk: Talk, kind: str) -> Plan:
        """Of a conversation that goes on, is edited, or begins anew."""
        choose = self.random
        most = LONGEST if talk.evicts else talk.tape.window
        while True:
            prefix = list(talk.prefix)
            if len(prefix) > 1 and choose.random() < 0.2:
                prefix = prefix[: choose.randrange(1, len(prefix))]
            if not talk.chat and choose.random() < 0.5:
                prefix.append(self.raw(self.words(3, 40)))
            suffix: list[Any] = []
            if kind == "turn":
                suffix = [self.said_next(talk)]
            made = self.planned(talk, kind, prefix, suffix)
            if made is not None and len(made.step.target) <= most - 8:
                return made
            self.begin(talk)

    def said_next(self, talk: Talk) -> Any:
        long = talk.evicts and self.random.random() < 0.5
        text = self.words(60, 160) if long else self.words(2, 25)
        return self.message("user", text.strip()) if talk.chat else self.raw(text)

    def planned(self, talk: Talk, kind: str, prefix: list[Any], suffix: list[Any]) -> Plan | None:
        """None where the suffix would merge with the prefix's end."""
        before, _ = self.ids(talk, prefix, cue=False)
        whole, sampled = self.ids(talk, [*prefix, *suffix], cue=talk.chat and bool(suffix))
        if whole[: len(before)] != before:
            return None
        step = Step(kind, whole, len(before), frozenset(sampled), needs_logits=bool(suffix))
        self.shared.book.note(whole)
        return Plan(prefix, suffix, step)

    def options(self, step: Step, *, left: bool = False) -> dict[str, Any]:
        choose = self.random
        step.max_tokens = choose.randint(30, 200) if left else choose.randint(1, 24)
        step.greedy = left or choose.random() < 0.8
        options: dict[str, Any] = {"max_tokens": step.max_tokens, "token_ids": True}
        if not step.greedy:
            options |= {"temperature": 0.9, "seed": choose.randrange(1 << 30)}
        if left:
            options |= {"ignore_eos": True, "stream_interval_ms": 0}
        return options

    # --- calls that run to their end

    def turn(self, talk: Talk) -> None:
        plan = self.plan(talk, "turn")
        step = plan.step
        stream = talk.session.turn(plan.prefix, plan.suffix, **self.options(step))
        self.finish(talk, plan, stream)

    def finish(self, talk: Talk, plan: Plan, stream: TurnStream | DecodeStream) -> None:
        """Read an answer to its end, and go on from it."""
        step = plan.step
        for chunk in stream.chunks():
            step.ids += chunk.token_ids
        self.finished(talk, plan, stream)

    def finished(self, talk: Talk, plan: Plan, stream: TurnStream | DecodeStream) -> None:
        step = plan.step
        self.count(talk, step.kind)
        if isinstance(stream, TurnStream):
            assert stream.prefix_status is not None
            assert stream.suffix_status is not None
            step.statuses = [stream.prefix_status, stream.suffix_status]
            talk.sent = (plan.prefix, plan.suffix)
            talk.prefix = list(plan.prefix)
        step.final = stream.final
        turn = stream.generated_turn
        known = bool(step.target) or not (talk.tape.more or talk.partial)
        if talk.chat and talk.sent is not None and talk.sent[1] and turn is not None and known:
            talk.prefix = [*talk.sent[0], *talk.sent[1], turn]
        self.settle(talk, step)

    def ensure(self, talk: Talk) -> None:
        plan = self.plan(talk, "ensure")
        plan.step.statuses = [talk.session.ensure_prefix(plan.prefix)]
        self.count(talk, "ensure")
        talk.prefix, talk.sent = list(plan.prefix), (plan.prefix, [])
        self.settle(talk, plan.step)

    def suffix(self, talk: Talk) -> None:
        if talk.sent is None:
            return
        before, sent = talk.sent
        extend = bool(sent) and self.random.random() < 0.4
        more = [self.said_next(talk)]
        suffix = [*sent, *more] if extend else more
        plan = self.planned(talk, "suffix", before, suffix)
        if plan is None or (not talk.evicts and len(plan.step.target) > talk.tape.window):
            return
        plan.step.statuses = [talk.session.prefill_suffix(more, extend=extend)]
        self.count(talk, "suffix", f"{extend=}")
        talk.sent = (before, suffix)
        self.settle(talk, plan.step)

    def decode(self, talk: Talk) -> None:
        if not talk.tape.length:
            return
        step = Step("decode")
        stream = talk.session.decode(**self.options(step))
        self.finish(talk, Plan([], [], step), stream)

    # --- calls that their caller leaves

    def left_turn(self, talk: Talk) -> None:
        plan = self.plan(talk, "turn")
        options = self.options(plan.step, left=True)
        self.leave(talk, plan, talk.session.turn(plan.prefix, plan.suffix, **options))

    def left_decode(self, talk: Talk) -> None:
        if talk.tape.length:
            plan = Plan([], [], Step("decode"))
            self.leave(talk, plan, talk.session.decode(**self.options(plan.step, left=True)))

    def leave(self, talk: Talk, plan: Plan, stream: TurnStream | DecodeStream) -> None:
        """Cancel after some time, or behind a chunk."""
        step, choose = plan.step, self.random
        chunks = choose.randint(1, 12) if choose.random() < 0.5 else 0
        timer = threading.Timer(choose.uniform(0, 0.08), stream.cancel)
        if not chunks:
            timer.start()
        for number, chunk in enumerate(stream.chunks(), 1):
            step.ids += chunk.token_ids
            if number == chunks:
                stream.cancel()
        timer.cancel()
        if stream.final is not None:
            self.finished(talk, plan, stream)
        else:
            self.left(talk, plan, f"left {step.kind}")

    def left_ensure(self, talk: Talk) -> None:
        plan = self.plan(talk, "ensure")
        try:
            status = talk.session.ensure_prefix(
                plan.prefix, timeout=self.random.uniform(0.001, 0.1)
            )
        except (CallCancelled, DeadlineExceeded, ModelBusy):
            self.left(talk, plan, "left ensure")
            return
        plan.step.statuses = [status]
        self.count(talk, "ensure")
        talk.prefix, talk.sent = list(plan.prefix), (plan.prefix, [])
        self.settle(talk, plan.step)

    def left(self, talk: Talk, plan: Plan, kind: str) -> None:
        tape, step = talk.tape, plan.step
        report, moved = self.look(talk)
        tape.story.append(f"  n={len(step.target)} {len(step.ids)=} {self._seen(report, moved)}")
        began = tape_reports.check_cancelled(tape, step, report, moved)
        tape_reports.check_slot(tape)
        self.count(talk, kind if began else f"{kind} in the queue")
        if talk.evicts:
            tape_evicting.check_report(tape, report, moved, whole=False)
        else:
            tape_reports.check_report(tape, report, moved)
        if not began:
            return
        talk.saved_known = talk.saved_known and step.kind == "ensure"
        if step.target:
            # A suffix alone is refused from here on: the client can't know what it would follow.
            talk.prefix, talk.sent = list(plan.prefix), None
        elif talk.chat and isinstance(talk.prefix[-1], GeneratedTurn):
            talk.prefix = talk.prefix[:-1]  # it goes on, nobody knows how

    def overflow(self, talk: Talk) -> None:
        """More than the window is refused, and changes nothing."""
        if talk.evicts:
            return
        prefix = list(talk.prefix)
        while len(self.ids(talk, prefix, cue=False)[0]) <= talk.tape.window:
            more = self.words(40, 60)
            prefix.append(self.message("user", more) if talk.chat else self.raw(more))
        size = len(self.ids(talk, prefix, cue=False)[0])
        with pytest.raises(ContextOverflow) as refused:
            talk.session.ensure_prefix(prefix)
        told = refused.value.metadata
        self.count(talk, "overflow")
        tape = talk.tape
        tape.same("asked", int(told["requested_tokens"]), size)
        tape.same("too many", int(told["drop_tokens"]), size - tape.window)
        tape.same("effective", int(told["effective"]), tape.window)
        self.settle(talk, Step("overflow"))

    # --- what is kept, shared and brought back

    def fork(self, talk: Talk) -> None:
        if len(self.talks) >= OPEN or (talk.batched and not self.shared.take_stream()):
            return
        self.opened += 1
        tape = talk.tape
        key = f"f{self.number}-{self.opened}" if self.random.random() < 0.4 else ""
        durable = bool(key) and tape.logical > 0 and self.random.random() < 0.5
        session = talk.session.fork(session_key=key, durable=durable)
        branch = Talk(
            session, tape.copy(), talk.chat, key, durable, talk.batched, talk.exact,
            list(talk.prefix), talk.sent, dict(talk.said), talk.partial,
        )  # fmt: skip
        self.talks.append(branch)
        self.count(branch, "fork", f"of {talk.session.handle.session_id}")
        moved = self.settle(talk, Step("forked"))
        self.begun(branch, "forked", exactly=not moved.parked)
        if durable:
            branch.save()

    def snapshot(self, talk: Talk) -> None:
        with self.shared.lock:
            full = len(self.shared.snapshots) >= MOST_KEPT
        if full or not talk.tape.logical:
            return
        info = talk.session.snapshot(f"of {self.number}")
        self.count(talk, "snapshot")
        tape = talk.tape
        before = tape.logical
        self.settle(talk, Step("snapshot"))
        if tape.logical == before:
            tape.same("saved", info.tokens, tape.logical)
        told = (info.seen_tokens, info.turns, info.window)
        tape.same("saved counts", told, (tape.seen, len(tape.turns), tape.window))
        kept = tape.copy()
        kept.logical, kept.counters = info.tokens, dict(tape.counters)
        made = Kept(
            info, kept, talk.chat, list(talk.prefix), talk.sent, dict(talk.said), talk.exact
        )
        with self.shared.lock:
            self.shared.snapshots.append(made)

    def restore(self, talk: Talk) -> None:
        tape = talk.tape
        with self.shared.lock:
            like = [
                one
                for one in self.shared.snapshots
                if (one.chat, one.tape.evicts) == (talk.chat, talk.evicts)
                and (not talk.evicts or one.tape.window == tape.window)
            ]
            if not like:
                return
            kept = self.random.choice(like)
            kept.users += 1
        try:
            self.bring_back(talk, kept)
        finally:
            with self.shared.lock:
                kept.users -= 1

    def bring_back(self, talk: Talk, kept: Kept) -> None:
        tape, info = talk.tape, kept.info
        if not talk.evicts and max(info.tokens, len(kept.tape.prompt)) > tape.window:
            with pytest.raises(ContextOverflow):
                talk.session.restore(info.snapshot_id)
            self.count(talk, "restore refused")
            self.settle(talk, Step("restore refused"))
            return
        try:
            told = talk.session.restore(info.snapshot_id)
        except InsufficientMemory:
            if not talk.batched:  # which takes a second stream
                raise
            self.count(talk, "restore without a stream")
            self.settle(talk, Step("restore refused"))
            return
        self.count(talk, "restore")
        window, story, held, alone = tape.window, tape.story, tape.held, tape.alone
        # Its counters are the saved session's, what is the slot's and its moves' excepted.
        counters = kept.tape.counters | {
            name: value for name, value in tape.counters.items() if name not in SAVED_COUNTERS
        }
        tape = talk.tape = kept.tape.copy()
        tape.window, tape.story, tape.counters = window, story, counters
        tape.same("restored", (told.tokens, told.resident), (info.tokens, info.tokens))
        tape.same("available", told.available, window - info.tokens)
        tape.same("seen", told.seen_tokens, tape.seen)
        tape.same("turns", list(told.generated_turn_ids), tape.turns)
        if info.tokens:
            held, alone = tape.known[: tape.logical], tape.alone[: tape.logical]
        # … else all KV was lost when it was saved: what the context had stays behind.
        same = talk.exact and kept.exact
        tape.held, tape.alone = held, alone[: len(held)] if same else [None] * len(held)
        tape.held_more = max(0, tape.logical - len(held))
        talk.prefix, talk.sent = list(kept.prefix), kept.sent
        talk.said, talk.partial = dict(kept.said), True
        self.settle(talk, Step("restore"))

    def delete(self, talk: Talk) -> None:
        with self.shared.lock:
            idle = [one for one in self.shared.snapshots if not one.users]
            if not idle:
                return
            kept = self.random.choice(idle)
            self.shared.snapshots.remove(kept)
        self.client.delete_snapshot(kept.info.snapshot_id)
        self.count(talk, "delete")
        listed = {one.snapshot_id for one in self.client.list_snapshots().snapshots}
        talk.tape.same("deleted", kept.info.snapshot_id in listed, False)

    def admit(self, talk: Talk) -> None:
        tape, choose = talk.tape, self.random
        report = talk.report
        if not talk.evicts or report is None or tape.unevaluated > 1:
            return
        out = tape_evicting.out_of(report)
        if not out:
            return
        budget = choose.choice((0, 100, 256))
        what: dict[str, Any] = {"query": choose.choice(ASKED_FOR)}
        asked: tuple[int, int] | None = None
        if choose.random() < 0.7:
            begin, end = choose.choice(out)
            asked = (begin, choose.randint(begin + 1, end))
            what = {"range": asked}
        told = talk.session.admit(budget=budget, **what)
        self.count(talk, "admit", f"{what} {budget=} {told}")
        was = report.resident + tape.unevaluated
        tape_evicting.check_admitted(tape, told, report, budget, asked)
        moved = self.settle(talk, Step("admit"))
        if not (moved.parked and moved.lost):  # what was lost before it went out unseen
            tape.same("what came and went", told.resident, was + told.admitted - told.evicted)
