"""Beyond the window: a token tape's arithmetic under overflow evict.

Which tokens go out is the product's to plan. What must hold whatever it plans is checked: each
token of the conversation is in one place, head and end are attended, and numbers add up.
"""

from __future__ import annotations

from modeld.client import Admitted, ContextReport, StopReason
from tests.support.tape_reports import accounted
from tests.support.token_tape import BLOCK, Moved, Step, Tape, check_ids, digest


def sizes(window: int) -> tuple[int, int]:
    """Tokens at the head and at the end that always stay: a sixteenth and a quarter, in blocks."""
    return (-(-window // (16 * BLOCK)) * BLOCK, -(-window // (4 * BLOCK)) * BLOCK)


def check_prefill(tape: Tape, step: Step, moved: Moved) -> None:
    target, size, prefix = step.target, len(step.target), step.prefix
    last = step.statuses[-1]
    for status in step.statuses:
        end = size if status is last else prefix
        tape.same("in one place", status.resident + status.parked + status.gone, end)
        tape.same("available", status.available, tape.window - status.resident)
        tape.within("resident", status.resident, 0, tape.window)
        tape.within("restored and copied", status.restored + status.copied, 0, status.reused)
        tape.within("recomputed", status.recomputed, 0, status.prefilled)
        tape.same("parts", (status.prefix, status.suffix), (prefix, end - prefix))
        tape.same("stable hash", status.stable_token_hash, digest(target[:prefix]))
        tape.same("volatile hash", status.volatile_token_hash, digest(target[prefix:end]))
        tape.same("turns recomputed", status.turns_recomputed, 0)
    tape.within("resident", last.resident, min(size, sum(sizes(tape.window))), tape.window)
    if step.kind != "suffix":
        # Every attended token was found, or evaluated by this call; of those some may have gone.
        first = step.statuses[0]
        tape.within("evaluated", first.resident - first.reused, 0, first.prefilled)
        low = -first.reused if moved.news["evicted_tokens"] else 0
        tape.within("evaluated in all", last.resident - step.reused, low, step.prefilled)
        if size <= tape.window:
            tape.same("all of it attended", last.resident, size)
            tape.same("reused and prefilled", step.reused + step.prefilled, size)
    dropped = sum(status.dropped for status in step.statuses)
    if not moved.parked:
        tape.within("dropped", dropped, 0, tape.logical)
        came = last.resident - (tape.logical - dropped)
        # A suffix alone tells of the prefix only what was evaluated of it.
        most = step.prefilled + step.reused + (step.prefix if step.kind == "suffix" else 0)
        tape.within("that came", came, 0, most)
    again = sum(status.recomputed for status in step.statuses)
    news = last.seen_tokens - tape.seen
    tape.within("newly seen", news, max(0, step.prefilled - again - 2), step.prefilled - again)
    tape.seen, tape.logical = last.seen_tokens, last.resident
    tape.prompt, tape.prefix, tape.answer, tape.more = target, prefix, [], 0
    tape.unevaluated = 0
    tape.book.note(target)


def check_answer(tape: Tape, step: Step, moved: Moved) -> None:
    final, ids = step.final, step.ids
    assert final is not None
    check_ids(tape, step)
    ends = final.stop_reason == StopReason.EOS
    before = tape.length
    said = ids[:-1] if ends else ids
    if tape.more:
        tape.more += len(said)
    else:
        tape.answer = tape.answer + said
    if ids:
        tape.unevaluated = 0 if ends else 1
    else:
        tape.same("stop", final.stop_reason, StopReason.CONTEXT_FULL)
    told = final.resident + final.parked + final.gone
    tape.same("in one place", told, tape.length - tape.unevaluated)
    tape.same("available", final.available, tape.window - final.resident)
    low = min(before, sum(sizes(tape.window)) - 1)
    tape.within("resident", final.resident, low, tape.window)
    news = final.seen_tokens - tape.seen - final.tokens
    tape.within("newly seen but sampled", news, 0, final.prefilled)
    tape.seen, tape.logical = final.seen_tokens, final.resident
    tape.book.note(tape.known)


def check_report(tape: Tape, report: ContextReport, moved: Moved, *, whole: bool = True) -> None:
    """``whole``: the last call ran to its end, so that nothing is left out."""
    tape.same("available", report.available, tape.window - report.resident)
    tape.same("turns", list(report.generated_turn_ids), tape.turns)
    tape.same("seen", report.seen_tokens, tape.seen)
    if moved.parked:  # a last sampled token may have been held by somebody else
        low = 0 if moved.lost or not whole else tape.length - tape.unevaluated
        tape.within("in one place", accounted(report), low, tape.length)
    elif whole:
        tape.same("resident", report.resident, tape.logical)
        tape.same("in one place", accounted(report), tape.length - tape.unevaluated)
    tape.logical, tape.parked, tape.gone = report.resident, report.parked, report.gone
    tape.unevaluated = tape.length - accounted(report)
    _check_blocks(tape, report)


def _check_blocks(tape: Tape, report: ContextReport) -> None:
    """Its blocks are one after the other, and say the same as its counts."""
    by_state = dict.fromkeys(("hot", "parked", "gone", "retained"), 0)
    at = 0
    for block in report.blocks:
        tape.within("a block's begin", block.token_begin, at, tape.length)
        tape.within("a block's end", block.token_end, block.token_begin + 1, tape.length)
        at = block.token_end
        by_state[block.state] += block.token_end - block.token_begin
    told = (by_state["hot"], by_state["parked"], by_state["gone"])
    tape.same("blocks' tokens", told, (report.resident, report.parked, report.gone))
    tape.same("retained among them", by_state["retained"], 0)
    if tape.unevaluated > 1:
        return  # a cancel left the end out
    sink, recent = sizes(tape.window)
    end = tape.length - tape.unevaluated
    for begin, to in ((0, min(sink, end)), (max(0, tape.length - recent), end)):
        out = [b for b in report.blocks if b.state != "hot" and b.token_begin < to]
        tape.same("always attended", [b for b in out if b.token_end > begin], [])


def out_of(report: ContextReport) -> list[tuple[int, int]]:
    """What isn't attended, in order."""
    return [(b.token_begin, b.token_end) for b in report.blocks if b.state in ("parked", "gone")]


def check_admitted(
    tape: Tape, told: Admitted, before: ContextReport, budget: int, asked: tuple[int, int] | None
) -> None:
    """``before`` is the session's report before the call; ``asked`` a range, if that was asked."""
    ranges = [(one.begin, one.end) for one in told.ranges]
    tape.same("admitted", told.admitted, sum(end - begin for begin, end in ranges))
    was_out = {at for begin, end in out_of(before) for at in range(begin, end)}
    came = {at for begin, end in ranges for at in range(begin, end)}
    tape.same("admitted what wasn't attended", came - was_out, set())
    if budget:
        tape.within("admitted", told.admitted, 0, budget)
    if asked is not None:
        tape.same("admitted what was asked", came - set(range(*asked)), set())
    tape.within("restored", told.restored, 0, told.admitted)
    tape.within("evaluated for it", told.recomputed, told.admitted - told.restored, 1 << 30)
    tape.same("in one place", told.resident + told.parked + told.gone, tape.length)
    tape.same("available", told.available, tape.window - told.resident)
    tape.logical, tape.parked, tape.gone = told.resident, told.parked, told.gone
    tape.unevaluated = 0
