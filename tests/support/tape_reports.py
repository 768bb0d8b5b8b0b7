"""What a session says of itself, held against its token tape: reports, counters, and what a cancel,
a fork or a restore leaves. See ``token_tape``.
"""

from __future__ import annotations

from modeld.client import ContextReport
from tests.support.token_tape import Moved, Step, Tape, common

# --- reports -------------------------------------------------------------------------------------


def check_report(tape: Tape, report: ContextReport, moved: Moved) -> None:
    """Hold what the session says of itself against the tape."""
    if moved.parked:
        high = tape.length
        low = 0 if moved.lost else min(tape.logical, high)
        tape.within("resident", report.resident, low, high)
        tape.logical = report.resident
        tape.held = tape.known[: report.resident]
        tape.alone = [*tape.alone, *[None] * len(tape.held)][: len(tape.held)]
        tape.held_more = report.resident + report.retained - len(tape.held)
    else:
        tape.same("resident", report.resident, tape.logical)
        tape.same("retained", report.retained, len(tape.held) + tape.held_more - tape.logical)
    tape.same("available", report.available, tape.window - report.resident)
    tape.same("seen", report.seen_tokens, tape.seen)
    tape.same("turns", list(report.generated_turn_ids), tape.turns)
    tape.same("parked and gone", (report.parked, report.gone), (0, 0))
    prefix, prompt = min(tape.prefix, tape.logical), min(len(tape.prompt), tape.logical)
    due = [
        (0, prefix, "hot", "prefix"),
        (prefix, prompt, "hot", "suffix"),
        (prompt, tape.logical, "hot", "generated"),
        (tape.logical, tape.logical + report.retained, "retained", "retained"),
    ]
    told = [(b.token_begin, b.token_end, b.state, b.what) for b in report.blocks]
    tape.same("blocks", told, [one for one in due if one[0] < one[1]])


def check_counters(tape: Tape, step: Step, moved: Moved) -> None:
    """The counters rose by what the call said."""
    news, final = moved.news, step.final
    said = len(step.ids)
    tape.same("counter of reused", news["reused_tokens"], step.reused)
    dropped = sum(status.dropped for status in step.statuses)
    tape.same("counter of dropped", news["dropped_tokens"], dropped)
    tape.same("counter of generated", news["generated_tokens"], said)
    tape.same("counter of cancels", news["cancelled_ops"], 0)
    again = final.prefilled if final is not None else 0
    if not tape.evicts:
        evaluated = step.prefilled + again + max(0, said - 1)
        tape.same("counter of evaluated", news["evaluated_tokens"], evaluated)
    check_slot(tape)


def check_slot(tape: Tape) -> None:
    """Contexts that were made are there or freed."""
    slot = tape.counters
    made, freed = slot["slot_contexts_created"], slot["slot_contexts_freed"]
    tape.same("contexts", slot["slot_contexts"], made - freed)
    tape.within("reclaimable contexts", slot["slot_contexts_reclaimable"], 0, made - freed)


# --- what a cancel leaves ------------------------------------------------------------------------

_SIGNS = ("evaluated_tokens", "reused_tokens", "generated_tokens", "cancelled_ops")


def check_cancelled(tape: Tape, step: Step, report: ContextReport, moved: Moved) -> bool:
    """Take in whatever a call had done that its caller left; whether it had begun at all.

    ``step.ids`` are those that had arrived. The answer's other ids nobody knows.
    """
    news = moved.news
    sampled = news["generated_tokens"]
    if not any(news[name] for name in _SIGNS):
        tape.same("ids of what never began", step.ids, [])
        return False
    tape.within("ids that arrived", len(step.ids), 0, sampled)
    if step.max_tokens:
        tape.within("sampled", sampled, 0, step.max_tokens)
    tape.within("cancelled", news["cancelled_ops"], 0, 1)
    new_turns = list(report.generated_turn_ids)[len(tape.turns) :]
    tape.within("turns of a cancelled call", len(new_turns), min(1, sampled), 1)
    tape.turns += new_turns
    if not tape.evicts:
        _check_cancelled_seen(tape, step, report, moved)
    own = common(tape.held, step.target)
    if step.target:
        tape.prompt, tape.prefix, tape.answer, tape.more = step.target, step.prefix, [], 0
        tape.book.note(step.target)
        computed = [*tape.alone[: min(own, news["reused_tokens"])]]
        found = range(len(computed), news["reused_tokens"])
        computed += [None if at in step.sampled else False for at in found]
        tape.alone = computed + [False] * (len(step.target) - len(computed))
    if tape.more:
        tape.more += sampled
    else:
        tape.answer, tape.more = tape.answer + step.ids, sampled - len(step.ids)
    tape.logical, tape.seen = report.resident, report.seen_tokens
    tape.parked, tape.gone = report.parked, report.gone
    tape.within("resident", tape.logical, 0, min(tape.length, tape.window))
    tape.held = tape.known[: tape.logical]
    tape.held_more = tape.logical + report.retained - len(tape.held)
    missing = len(tape.held) - len(tape.alone)
    tape.alone = [*tape.alone, *[True] * max(0, missing)][: len(tape.held)]
    tape.unevaluated = tape.length - report.resident - report.parked - report.gone
    tape.within("left out", tape.unevaluated, 0, tape.length)
    return True


def _check_cancelled_seen(tape: Tape, step: Step, report: ContextReport, moved: Moved) -> None:
    """What was evaluated and sampled is what is resident and was seen, under overflow refuse."""
    news, size, there = moved.news, len(step.target), report.resident
    evaluated, sampled = news["evaluated_tokens"], news["generated_tokens"]
    seen, slack = tape.seen + evaluated, 1 if moved.parked else 0
    if step.target:
        appended = max(0, news["reused_tokens"] + evaluated - size) if sampled else 0
        if not moved.parked:
            tape.same("reused and evaluated", news["reused_tokens"] + evaluated, there)
        elif not moved.lost:
            tape.within("resident", there, news["reused_tokens"] + evaluated, size + sampled)
    else:  # the last token may have been evaluated again for its logits
        appended = min(sampled, max(0, there - tape.length))
        if not moved.parked:
            again = evaluated - (there - tape.logical)
            tape.within("evaluated again", again, 0, 1)
    if sampled:
        tape.within("of the answer evaluated", appended, sampled - 1 - slack, sampled)
    due = seen - appended + sampled
    tape.within("seen", report.seen_tokens, due - slack, due + slack)


# --- a session that begins as another one was ----------------------------------------------------


def check_begun(tape: Tape, report: ContextReport, what: str, *, exactly: bool) -> None:
    """``tape`` is a copy of the other session's; the report is the first of the new one.

    Under overflow evict too. Where the other was parked meanwhile, more of what it was to hold may
    have come back, or less: then not ``exactly``.
    """
    tape.same(f"{what}: turns", list(report.generated_turn_ids), tape.turns)
    tape.same(f"{what}: seen", report.seen_tokens, tape.seen)
    tape.within(f"{what}: resident", report.resident, 0, tape.length)
    if exactly:
        tape.same(f"{what}: resident", report.resident, tape.logical)
        if tape.evicts:
            tape.same(f"{what}: accounted", accounted(report), tape.length - tape.unevaluated)
    tape.same(f"{what}: available", report.available, tape.window - report.resident)
    parts = [one for one in report.blocks if one.what == "prefix"]
    end = max((one.token_end for one in parts), default=0)
    tape.within(f"{what}: prefix", end, 0, tape.prefix)


def accounted(report: ContextReport) -> int:
    return report.resident + report.parked + report.gone
