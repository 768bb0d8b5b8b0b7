"""A conversation that grows: each turn pays for its new text only, and no answer is read again."""

from __future__ import annotations

from bench.lab import Lab, follow
from bench.runner import Spec, Target, require
from bench.texts import text

SYSTEM, QUESTION, ANSWER = 800, 30, 48  # tokens, about
NOTHING = Target("at most", 0)

FIRST = Spec(
    "growing.first",
    f"next turn of a conversation: first token ({SYSTEM} + growing)",
    "product",
    "ms",
)
NEW = Spec("growing.new", "tokens evaluated in a next turn", "product", "tokens")
AGAIN = Spec("growing.again", "tokens evaluated again in a next turn", "product", "tokens", NOTHING)
RECOMPUTED = Spec("growing.recomputed", "answers tokenized again", "product", "answers", NOTHING)


def run(lab: Lab) -> None:
    turns = lab.plan.pairs
    first_ms: list[float] = []
    new: list[float] = []
    again: list[float] = []
    recomputed: list[float] = []
    expected = (FIRST, NEW, AGAIN, RECOMPUTED)
    with lab.book.expecting(*expected), lab.session("chat") as session:
        words = lab.words
        chat = session.chat(text(words.draw(SYSTEM, 3)))
        resident = 0
        for number in range(turns + 1):
            question = text(words.draw(QUESTION, number)) + "?"
            turn = follow(chat.send(question, max_tokens=ANSWER))
            p, s = turn.prefix, turn.suffix
            if number:
                prefilled, asked = p.prefilled + s.prefilled, p.prefix + s.suffix
                require(asked > resident, f"the prompt has {asked} tokens, {resident} were there")
                first_ms.append(turn.first_s * 1000)
                new.append(prefilled)
                again.append(prefilled - (asked - resident))
                recomputed.append(p.turns_recomputed + s.turns_recomputed)
            resident = turn.final.resident
        note = f"{turns} turns, up to {resident:,} tokens resident"
        lab.book.record(FIRST, first_ms, note)
        lab.book.record(NEW, new, "the question, the template around it, the answer's last token")
        lab.book.record(AGAIN, again, "evaluated, less what the prompt has beyond the resident")
        lab.book.record(RECOMPUTED, recomputed)
