"""An independent account of what a session must hold: token lists, and the arithmetic of answers.

Knows the contract, the prompts that were sent and the ids that came back. Imports nothing of the
product but the values that it answers, and shares no code with what it checks.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from modeld.client import ContextReport, Final, PrefillStatus, StopReason

WORTHWHILE = 32  # tokens: what another context or the store has more is taken from there on
BLOCK = 256  # tokens that go out and come back together
NOTED = 32  # tokens between two positions of a list at which the book knows it


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    return next(at for at in range(size) if left[at] != right[at])


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def _marks(ids: Sequence[int]) -> list[bytes]:
    """A name of the list's first 32, 64, … tokens."""
    chain, marks = hashlib.blake2b(digest_size=10), []
    for at in range(NOTED, len(ids) + 1, NOTED):
        chain.update(struct.pack(f"<{NOTED}i", *ids[at - NOTED : at]))
        marks.append(chain.digest())
    return marks


class Book:
    """Every token list that any session was ever asked to hold, known by its beginnings."""

    def __init__(self) -> None:
        self._known: set[bytes] = set()
        self._lock = threading.Lock()
        self.checks = 0  # comparisons made, all sessions together

    def note(self, ids: Sequence[int]) -> None:
        with self._lock:
            self._known.update(_marks(ids))

    def longest(self, ids: Sequence[int]) -> int:
        """At most so many of the list's first tokens can be held anywhere."""
        with self._lock:
            found = next((at for at, m in enumerate(_marks(ids)) if m not in self._known), None)
        return len(ids) if found is None else min(len(ids), (found + 1) * NOTED - 1)


@dataclass
class Step:
    """One call: what was asked, and all that it answered."""

    kind: str
    target: list[int] = field(default_factory=list)  # of a prefill: the whole prompt
    prefix: int = 0  # of its tokens
    sampled: frozenset[int] = frozenset()  # positions of tokens that earlier answers gave
    needs_logits: bool = False
    statuses: list[PrefillStatus] = field(default_factory=list)
    final: Final | None = None
    ids: list[int] = field(default_factory=list)
    max_tokens: int = 0
    greedy: bool = False

    @property
    def prefilled(self) -> int:
        return sum(status.prefilled for status in self.statuses)

    @property
    def reused(self) -> int:
        return sum(status.reused for status in self.statuses)

    @property
    def helped(self) -> int:
        return sum(status.copied + status.restored for status in self.statuses)


@dataclass
class Tape:
    """What one session was told and said. Counts are tokens; lists are token ids.

    ``more`` of the answer are tokens whose ids nobody was told: what a cancel left. Of a context,
    ``held`` is what is known of its beginning, ``held_more`` how many may follow.
    """

    window: int
    evicts: bool
    book: Book
    prompt: list[int] = field(default_factory=list)
    prefix: int = 0
    answer: list[int] = field(default_factory=list)
    more: int = 0
    logical: int = 0
    held: list[int] = field(default_factory=list)
    held_more: int = 0
    # How each held token was computed: alone, as it was sampled; with others; nobody can tell.
    alone: list[bool | None] = field(default_factory=list)
    seen: int = 0
    parked: int = 0
    gone: int = 0
    unevaluated: int = 0  # of the conversation, and not left out for others: a last sampled token
    turns: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    story: list[str] = field(default_factory=list)
    loose: int = 0  # steps of which only bounds could be told
    strict: int = 0

    # --- what is known

    @property
    def known(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer) + self.more

    def copy(self) -> Tape:
        """Another session's that begins as this one is."""
        lists = ("prompt", "answer", "held", "alone", "turns", "story")
        other = Tape(**{**vars(self), **{name: list(getattr(self, name)) for name in lists}})
        other.counters, other.loose, other.strict = {}, 0, 0
        return other

    # --- comparing

    def same(self, what: str, told: object, due: object) -> None:
        self.book.checks += 1
        assert told == due, f"{what} is {told!r}, not {due!r}\n{self}"

    def within(self, what: str, told: int, low: int, high: int) -> None:
        self.book.checks += 1
        assert low <= told <= high, f"{what} is {told}, not {low} to {high}\n{self}"

    def __str__(self) -> str:
        numbers = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, int) and name not in ("loose", "strict")
        }
        sizes = {"prompt": len(self.prompt), "answer": len(self.answer), "held": len(self.held)}
        return "\n".join([f"before: {numbers} {sizes} {self.counters}", *self.story[-12:]])


@dataclass
class Moved:
    """What else happened to a session since its last report, as that and this one tell."""

    parked: bool  # its context was another's meanwhile
    lost: bool  # the cold store dropped or failed to keep something, be it another's
    adopted: bool  # it goes on in another context
    news: dict[str, int]  # by how much each counter rose

    @classmethod
    def between(cls, before: dict[str, int], after: dict[str, int]) -> Moved:
        news = {name: value - before.get(name, 0) for name, value in after.items()}
        lost = ("slot_cold_dropped", "slot_cold_failed", "slot_cold_damaged")
        return cls(
            parked=bool(news["times_parked"]),
            lost=any(news.get(name) for name in lost),
            adopted=bool(news["adopted_contexts"] or news["created_contexts"]),
            news=news,
        )


def counters_of(report: ContextReport) -> dict[str, int]:
    return {one.name: one.value for one in report.counters}


# --- prefills, under overflow refuse -------------------------------------------------------------


def check_prefill(tape: Tape, step: Step, moved: Moved) -> None:
    """Hold a whole prefill's numbers against the tape, and take it in."""
    target, size = step.target, len(step.target)
    own = common(tape.held, target)
    most = size - 1 if step.needs_logits else size
    at_least = _found_at_least(tape, target, own, most, moved)
    can = own + tape.held_more if own == len(tape.held) else own
    at_most = min(most, max(can, tape.book.longest(target)))
    last = step.statuses[-1]
    if step.kind == "suffix" and step.prefilled > size - step.prefix:
        tape.same("reused", step.reused, 0)  # of the prefix too something had to be evaluated
        keep = size - step.prefilled
    else:
        keep = step.reused + (step.prefix if step.kind == "suffix" else 0)
        tape.same("reused and prefilled", keep + step.prefilled, size)
    tape.within("reused", keep, at_least, at_most)
    if keep > at_least and not moved.parked and not moved.adopted and not tape.held_more:
        tape.within("restored and copied", step.helped, 1, keep)
    for status in step.statuses:
        tape.within("restored and copied", status.restored + status.copied, 0, status.reused)
        tape.same("parked, gone, recomputed", _out(status), (0, 0, 0))
        tape.same("additive", (status.template_additive, status.turns_recomputed), (True, 0))
        tape.same("lower bound", status.reused_lower_bound, False)
    _check_parts(tape, step)
    _check_dropped(tape, step, moved)
    tape.same("resident", last.resident, size)
    if keep < size:
        tape.same("retained", last.retained, 0)
    elif own == keep and not (moved.parked or moved.adopted or step.helped or tape.held_more):
        tape.same("retained", last.retained, len(tape.held) - size)
    _take_prompt(tape, step, keep, own, last.retained)
    tape.seen += step.prefilled
    tape.same("seen", last.seen_tokens, tape.seen)


def _found_at_least(tape: Tape, target: list[int], own: int, most: int, moved: Moved) -> int:
    if not moved.parked:
        return min(own, most)
    if moved.lost:
        return 0
    # Its prompt and answer are brought back; what was kept behind them, where that is worthwhile.
    back = min(most, common(tape.known[: tape.logical], target))
    return min(own, most) if min(own, most) >= back + WORTHWHILE else back


def _check_parts(tape: Tape, step: Step) -> None:
    target, prefix = step.target, step.prefix
    for status in step.statuses:
        whole = status is not step.statuses[0] or step.kind == "suffix"
        end = len(target) if whole else prefix
        tape.same("prefix", status.prefix, prefix)
        tape.same("suffix", status.suffix, end - prefix)
        tape.same("stable hash", status.stable_token_hash, digest(target[:prefix]))
        tape.same("volatile hash", status.volatile_token_hash, digest(target[prefix:end]))
        tape.same("available", status.available, tape.window - status.resident)
    if step.kind == "turn":
        before, after = step.statuses
        if not tape.evicts:
            tape.same("the prefix's parts", before.reused + before.prefilled, prefix)
            tape.same("the suffix's parts", after.reused + after.prefilled, len(target) - prefix)
            tape.same("resident after the prefix", before.resident, prefix)


def _check_dropped(tape: Tape, step: Step, moved: Moved) -> None:
    dropped = sum(status.dropped for status in step.statuses)
    resident = tape.known[: tape.logical]
    stayed = common(resident, step.target)
    unknown = tape.logical - len(resident) if stayed == len(resident) else 0
    low = high = tape.logical - stayed
    if moved.parked:
        low, high = 0 if moved.lost else low, tape.length - stayed
    tape.within("dropped", dropped, low - unknown, high)


def _take_prompt(tape: Tape, step: Step, keep: int, own: int, retained: int) -> None:
    """From here on the session is about this prompt."""
    size = len(step.target)
    alone = [*tape.alone[: min(keep, own)]]
    # What was found elsewhere was computed alone only where it was sampled.
    alone += [None if at in step.sampled else False for at in range(len(alone), keep)]
    alone += [False] * (size - keep)
    behind = tape.held[size : size + retained] if own == keep == size else []
    tape.alone = alone + ([None] * len(behind))
    tape.held = step.target + behind
    tape.held_more = retained - len(behind)
    tape.prompt, tape.prefix = step.target, step.prefix
    tape.answer, tape.more, tape.logical = [], 0, size
    tape.book.note(tape.prompt)


# --- answers, under overflow refuse --------------------------------------------------------------


def check_answer(tape: Tape, step: Step, moved: Moved) -> None:
    """Hold a whole answer's final record against the tape, and take it in."""
    final, ids = step.final, step.ids
    assert final is not None
    check_ids(tape, step)
    length, missing = tape.length, tape.length - tape.logical
    again = final.prefilled
    if moved.lost and moved.parked:
        tape.within("prefilled for the answer", again, 0, length)
    elif missing and ids:
        low = 0 if moved.parked else missing
        tape.within("prefilled for the answer", again, low, max(1, missing))
    else:
        tape.within("prefilled for the answer", again, 0, 1)
    tape.same("parked, gone, recomputed", (final.parked, final.gone, final.recomputed), (0, 0, 0))
    if ids:
        tape.same("resident", final.resident, length + len(ids) - 1)
    else:
        tape.same("stop", final.stop_reason, StopReason.CONTEXT_FULL)
        tape.same("nothing to say it in", length > tape.window, True)
    if final.stop_reason == StopReason.CONTEXT_FULL and ids:
        tape.same("a full window", final.resident, tape.window)
    tape.same("available", final.available, tape.window - final.resident)
    tape.seen += final.prefilled + final.tokens
    tape.same("seen", final.seen_tokens, tape.seen)
    ends = final.stop_reason == StopReason.EOS
    said = ids[:-1] if ends else ids
    if not ids:
        return
    # What was sampled is computed alone; what a cancel left of a prompt isn't.
    lone = [at >= len(tape.prompt) for at in range(len(tape.alone), final.resident)]
    tape.alone = [*tape.alone[: min(len(tape.alone), length)], *lone][: final.resident]
    tape.answer, tape.logical = tape.answer + said, final.resident
    tape.held, tape.held_more = tape.known[: tape.logical], 0
    if tape.more:  # the ids behind what nobody was told aren't placed
        tape.answer, tape.more = tape.answer[: -len(said) or None], tape.more + len(said)
        tape.held = tape.known[: tape.logical]
        tape.held_more = tape.logical - len(tape.held)
    tape.alone = tape.alone[: len(tape.held)]
    tape.book.note(tape.known)


def check_ids(tape: Tape, step: Step) -> None:
    """What is the same under either overflow."""
    final, ids = step.final, step.ids
    assert final is not None
    tape.same("sampled", final.tokens, len(ids))
    if final.stop_reason == StopReason.LENGTH:
        tape.same("sampled to the limit", len(ids), step.max_tokens)
    elif step.max_tokens:
        tape.within("sampled", len(ids), 0, step.max_tokens)
    reasons = (StopReason.EOS, StopReason.LENGTH, StopReason.CONTEXT_FULL)
    tape.same("a reason to stop", final.stop_reason in reasons, True)
    tape.turns.append(final.generated_turn_id)


def _out(status: Any) -> tuple[int, int, int]:
    return status.parked, status.gone, status.recomputed
