"""Clients that do at random whatever sessions can do, each step held against a token tape.

A client owns its sessions; snapshots and a few long texts are all clients' together. Everything
random comes from one seed a client.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from modeld.client import (
    Client,
    ContextReport,
    GeneratedTurn,
    Message,
    Segment,
    Session,
    SnapshotInfo,
    Text,
)
from tests.support import tape_evicting, tape_reports, token_tape
from tests.support.token_tape import Book, Moved, Step, Tape, counters_of
from tests.support.vocab import RealTokenizer

TEXT = (
    "stone bridge river mill keeper evening sea storm light harbour rope wheel copper field winter "
    "letter the a in on she writes nothing again under every seventh door"
)
WORDS = TEXT.split()
MODEL = "mixed"
REFUSING, EVICTING = (512, 768, 1024), (1024, 1280)
BATCHED_WINDOW = 1024
LONGEST = 4000  # tokens of a conversation under overflow evict, before it begins anew
OPEN = 5  # sessions of a client at most


@dataclass
class Talk:
    """A session, its conversation as its client has it, and its tape."""

    session: Session
    tape: Tape
    chat: bool
    key: str = ""
    durable: bool = False
    batched: bool = False
    exact: bool = True  # what it samples is as in isolation
    prefix: list[Any] = field(default_factory=list)  # texts, or messages and turns, to go on from
    sent: tuple[list[Any], list[Any]] | None = None  # prefix and suffix as the daemon has them
    said: dict[str, list[int]] = field(default_factory=dict)  # ids of answers, by turn
    partial: bool = False  # this client's session doesn't know how the present answer began
    saved: Tape | None = None  # of a durable session: what is saved
    saved_prefix: list[Any] = field(default_factory=list)
    saved_sent: tuple[list[Any], list[Any]] | None = None
    saved_said: dict[str, list[int]] = field(default_factory=dict)
    saved_known: bool = True
    report: ContextReport | None = None

    @property
    def evicts(self) -> bool:
        return self.tape.evicts

    def save(self) -> None:
        """What is here now is what a durable session comes back as."""
        self.saved, self.saved_known = self.tape.copy(), True
        self.saved_prefix, self.saved_sent = list(self.prefix), self.sent
        self.saved_said = dict(self.said)


@dataclass(frozen=True)
class Sample:
    """A greedy answer to be compared with what the engine alone gives."""

    prompt: list[int]
    alone: list[int]  # positions of the prompt that were sampled
    ids: list[int]


@dataclass
class Kept:
    """A snapshot, and what a session restored from it must be."""

    info: SnapshotInfo
    tape: Tape
    chat: bool
    prefix: list[Any]
    sent: tuple[list[Any], list[Any]] | None
    said: dict[str, list[int]]
    exact: bool
    users: int = 0


@dataclass
class Common:
    """What all clients share."""

    tokenizer: RealTokenizer
    streams: int
    texts: list[str]
    n_contexts: int
    longer: int = 1  # texts have so many times the words: a larger vocabulary takes fewer tokens
    book: Book = field(default_factory=Book)
    lock: threading.Lock = field(default_factory=threading.Lock)
    snapshots: list[Kept] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    steps: Counter[str] = field(default_factory=Counter)
    batched: int = 0  # open now
    strict: int = 0
    loose: int = 0
    tokenizing: threading.Lock = field(default_factory=threading.Lock)

    def encode(self, text: str) -> list[int]:
        with self.tokenizing:
            return self.tokenizer.encode(text)

    def take_stream(self) -> bool:
        with self.lock:
            free = self.batched < self.streams
            self.batched += free
            return free

    def give_stream(self) -> None:
        with self.lock:
            self.batched -= 1


class TapedClient:
    """One client's sessions, and how each of their steps is held against its tape."""

    def __init__(self, client: Client, shared: Common, number: int, seed: int) -> None:
        self.client, self.shared, self.number = client, shared, number
        self.random = random.Random(f"{seed}/{number}")
        self.talks: list[Talk] = []
        self.opened = 0
        self.kept_keys: list[tuple[str, Talk]] = []  # durable ones that are closed

    # --- texts

    def words(self, low: int, high: int) -> str:
        """Of its own: no other text goes on the same way for long."""
        count = self.random.randint(low, high) * self.shared.longer
        chosen = [self.random.choice(WORDS) for _ in range(count)]
        return f" {self.random.randrange(10**6)} " + " ".join(chosen)

    def ids(self, talk: Talk, items: list[Any], *, cue: bool) -> tuple[list[int], set[int]]:
        """A prompt's tokens, by the chat template's rule or as plain text; and which positions
        earlier answers gave.
        """
        encode, control = self.shared.encode, self.shared.tokenizer.controls
        if not talk.chat:
            return encode("".join(one.content.text for one in items)), set()
        begin, end, line = control["<|im_start|>"], control["<|im_end|>"], encode("\n")
        found: list[int] = []
        sampled: set[int] = set()
        for one in items:
            if isinstance(one, GeneratedTurn):
                run = [*encode("assistant\n"), *talk.said[one.turn_id]]
                last = len(found) + 1 + len(run)
                sampled.update(range(last - len(talk.said[one.turn_id]), last))
            else:
                run = encode(f"{one.content.role}\n{one.content.content}")
            found += [begin, *run, end, *line]
        return ([*found, begin, *encode("assistant\n")] if cue else found), sampled

    def raw(self, text: str, cache_class: str = "volatile") -> Segment:
        return Segment(Text(text), cache_class=cache_class)

    def message(self, role: str, text: str, cache_class: str = "volatile") -> Segment:
        return Segment(Message(role, text), cache_class=cache_class)

    # --- a step and what follows it

    def count(self, talk: Talk, kind: str, note: str = "") -> None:
        with self.shared.lock:
            self.shared.steps[kind] += 1
        talk.tape.story.append(f"{self.number}/{talk.session.handle.session_id} {kind} {note}")

    def look(self, talk: Talk) -> tuple[ContextReport, Moved]:
        """The session's report, and what happened since the last one."""
        report = talk.session.explain()
        counters = counters_of(report)
        moved = Moved.between(talk.tape.counters, counters)
        talk.tape.counters, talk.report = counters, report
        contexts = self.shared.n_contexts
        talk.tape.within("contexts", counters["slot_contexts"], 0, contexts)
        with self.shared.lock:
            loose = moved.parked and moved.lost
            self.shared.loose += loose
            self.shared.strict += not loose
        return report, moved

    def settle(self, talk: Talk, step: Step) -> Moved:
        """Hold a whole call, and what the session says after it, against the tape."""
        tape = talk.tape
        tape.story.append(f"  {self._told(step)}")
        report, moved = self.look(talk)
        tape.story.append(f"  then {self._seen(report, moved)}")
        rules: Any = tape_evicting if talk.evicts else token_tape
        if step.statuses:
            talk.partial = False
            rules.check_prefill(tape, step, moved)
        if step.final is not None:
            sampled = self._sample(talk, step)
            rules.check_answer(tape, step, moved)
            talk.said[step.final.generated_turn_id] = list(tape.answer)
            if tape.more:
                talk.said.pop(step.final.generated_turn_id)
            if sampled is not None:
                with self.shared.lock:
                    self.shared.samples.append(sampled)
            self._saved(talk, step)
        reports: Any = tape_evicting if talk.evicts else tape_reports
        tape_reports.check_counters(tape, step, moved)
        reports.check_report(tape, report, moved)
        return moved

    def _told(self, step: Step) -> str:
        parts = [
            f"{s.reused=} {s.dropped=} {s.prefilled=} {s.prefix=} {s.suffix=} {s.resident=} "
            f"{s.retained=} {s.restored=} {s.copied=} {s.parked=} {s.gone=} {s.recomputed=} "
            f"{s.seen_tokens=} {s.miss_reason=!s}"
            for s in step.statuses
        ]
        f = step.final
        if f is not None:
            parts.append(
                f"{f.stop_reason=!s} {f.tokens=} {f.prefilled=} {f.resident=} {f.parked=} "
                f"{f.gone=} {f.recomputed=} {f.seen_tokens=}"
            )
        return f"n={len(step.target)} " + " | ".join(parts)

    def _seen(self, report: ContextReport, moved: Moved) -> str:
        news = {name: value for name, value in moved.news.items() if value}
        return (
            f"{report.resident=} {report.retained=} {report.parked=} {report.gone=} "
            f"{report.seen_tokens=} {moved.parked=} {moved.lost=} {news}"
        )

    def _sample(self, talk: Talk, step: Step) -> Sample | None:
        """The answer, where how each token before it was computed is known and it can be redone."""
        tape = talk.tape
        if talk.evicts or not talk.exact or not step.ids or step.kind != "turn":
            return None
        if not step.greedy or None in tape.alone or self.random.random() > 0.4:
            return None
        stepped = [at for at, lone in enumerate(tape.alone[: len(tape.prompt)]) if lone]
        return Sample(list(tape.prompt), stepped, list(step.ids))

    def _saved(self, talk: Talk, step: Step) -> None:
        final = step.final
        assert final is not None
        if not talk.durable:
            return
        saved = final.saved
        talk.tape.same("saved", saved is not None and saved.ok, True)
        if saved is not None:
            talk.tape.same("saved tokens", saved.tokens, final.resident)
        talk.save()

    # --- opening and closing

    def open(self) -> None:
        choose = self.random
        self.opened += 1
        evicts, chat = choose.random() < 0.35, choose.random() < 0.5
        batched = choose.random() < 0.35 and self.shared.take_stream()
        key = f"k{self.number}-{self.opened}" if choose.random() < 0.4 else ""
        window = choose.choice(EVICTING if evicts else REFUSING)
        self._open(
            window=BATCHED_WINDOW if batched else window,
            prompt_format="chat" if chat else "raw",
            overflow="evict" if evicts else "refuse",
            layout="batched" if batched else "isolated",
            session_key=key,
            durable=bool(key) and choose.random() < 0.5,
        )

    def _open(self, **options: Any) -> Talk:
        session = self.client.open_session(MODEL, **options)
        evicts, batched = options["overflow"] == "evict", options["layout"] == "batched"
        tape = Tape(options["window"], evicts, self.shared.book)
        talk = Talk(session, tape, options["prompt_format"] == "chat", options["session_key"],
                    options["durable"], batched, exact=not batched)  # fmt: skip
        tape.same("window", session.resolution.context.effective.tokens, options["window"])
        self.talks.append(talk)
        self.count(talk, "open", f"{options}")
        report, _ = self.look(talk)
        tape.held_more = report.retained
        tape.same("nothing yet", (report.resident, report.seen_tokens), (0, 0))
        self.begin(talk)
        return talk

    def begin(self, talk: Talk) -> None:
        """A new conversation: of a text that others have too, or of its own."""
        shared = self.random.choice(self.shared.texts) if self.random.random() < 0.6 else ""
        pin = "task_pinned" if talk.evicts and self.random.random() < 0.3 else "volatile"
        text = shared or self.words(10, 50)
        if pin == "task_pinned":
            text = self.words(4, 12)
        if talk.chat:
            talk.prefix = [self.message("system", "You answer." + text, pin)]
        else:
            talk.prefix = [self.raw(text, pin)]

    def close_one(self, talk: Talk) -> None:
        if len(self.talks) < 3:
            return
        if talk.durable and talk.saved is not None and talk.saved_known:
            if self.random.random() < 0.6:
                self.close(talk, discard=False)
                self.kept_keys.append((talk.key, talk))
                if self.random.random() < 0.7:
                    self.reopen(talk.key, talk)
                return
            self.close(talk, discard=True)
            return
        self.close(talk, discard=talk.durable or self.random.random() < 0.5)

    def close(self, talk: Talk, *, discard: bool) -> None:
        self.count(talk, "close", f"{discard=}")
        self.talks.remove(talk)
        closed = talk.session.close(discard=discard)
        if discard:
            talk.tape.same("retained", closed.retained_tokens, 0)
        if talk.batched:
            self.shared.give_stream()

    def reopen(self, key: str, old: Talk) -> None:
        """A durable session comes back as it was saved."""
        assert old.saved is not None
        if old.batched and not self.shared.take_stream():
            return
        self.kept_keys.remove((key, old))
        session = self.client.open_session(
            MODEL, window=old.tape.window, prompt_format="chat" if old.chat else "raw",
            overflow="evict" if old.evicts else "refuse", session_key=key, durable=True,
            layout="batched" if old.batched else "isolated",
        )  # fmt: skip
        tape = old.saved.copy()
        talk = Talk(
            session, tape, old.chat, key, True, old.batched, old.exact, list(old.saved_prefix),
            old.saved_sent, dict(old.saved_said), partial=True,
        )  # fmt: skip
        self.talks.append(talk)
        self.count(talk, "reopen")
        resumed = session.opened.resumed
        assert resumed is not None, tape
        tape.same("resumed", (resumed.tokens, resumed.miss_reason), (tape.logical, ""))
        self.begun(talk, "resumed")
        talk.save()

    def begun(self, talk: Talk, what: str, *, exactly: bool = True) -> None:
        """``exactly``: what it began as wasn't parked meanwhile, when more may have come back."""
        report, moved = self.look(talk)
        tape = talk.tape
        tape_reports.check_begun(tape, report, what, exactly=exactly and not moved.parked)
        known = tape.known[: report.resident]
        if talk.evicts:
            tape.logical, tape.parked, tape.gone = report.resident, report.parked, report.gone
            tape.unevaluated = tape.length - tape_reports.accounted(report)
            return
        tape.logical = report.resident
        tape.held, tape.alone = known, tape.alone[: len(known)]
        tape.alone += [None] * (len(known) - len(tape.alone))
        tape.held_more = report.resident + report.retained - len(known)

    def attach(self, talk: Talk) -> None:
        if not talk.key:
            return
        talk.session.detach()
        session = self.client.open_session(
            MODEL, window=talk.tape.window, prompt_format="chat" if talk.chat else "raw",
            overflow="evict" if talk.evicts else "refuse", session_key=talk.key,
            durable=talk.durable, layout="batched" if talk.batched else "isolated",
        )  # fmt: skip
        self.count(talk, "attach")
        talk.tape.same("attached", session.opened.attached, True)
        talk.tape.same("handle", session.handle, talk.session.handle)
        talk.session, talk.partial = session, True
        self.settle(talk, Step("attach"))
