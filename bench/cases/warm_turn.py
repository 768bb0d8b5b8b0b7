"""A resident prefix and a new suffix: against the binding's own class, and against cold."""

from __future__ import annotations

from bench.lab import Lab, Turn
from bench.runner import Spec, Target, differences, interleaved, ratios, require
from bench.texts import text
from modeld.client import Session
from modeld.client.prompts import PromptInput

SUFFIX = 26  # tokens
ANSWER = 8  # tokens; on both sides
DEPTHS = (1000, 4000, 7500)
TARGET_DEPTH = 4000
OVER_MS = Target("at most", 25.0)
TIMES_COLD = Target("at least", 90.0)


class Specs:
    def __init__(self, form: str, depth: int) -> None:
        target = depth == TARGET_DEPTH
        what = f"{form}, {depth:,} tokens resident + {SUFFIX} new"
        name = f"warm.{form}.{depth}"
        self.warm = Spec(f"{name}.first", f"warm turn: first token ({what})", "product", "ms")
        self.control = Spec(
            f"{name}.control", f"the same by llama_cpp.Llama ({what})", "engine control", "ms"
        )
        self.over = Spec(
            f"{name}.over",
            f"warm turn above llama_cpp.Llama ({what})",
            "product",
            "ms",
            OVER_MS if target else None,
        )
        self.outside = Spec(
            f"{name}.outside", f"warm turn: outside of the engine ({what})", "product", "ms"
        )
        self.cold = Spec(
            f"cold.{form}.{depth}",
            f"cold turn: first token ({depth:,} + {SUFFIX})",
            "product",
            "ms",
        )
        self.ratio = Spec(
            f"{name}.times", f"cold over warm ({what})", "product", "times",
            TIMES_COLD if target else None,
        )  # fmt: skip


class Texts:
    """Prefixes and suffixes of exactly so many tokens, rendered ones included."""

    def __init__(self, lab: Lab, session: Session, form: str, depth: int) -> None:
        self._words, self._form, self._suffixes = lab.words, form, 0
        self.around = (0, 0)
        if form == "chat":  # what the template puts around the words
            probe = lab.turn(session, self.wrap("system", 60, 0), self.wrap("user", 60, 1), 1)
            self.around = (probe.prefix.prefix - 60, probe.suffix.suffix - 60)
        self._depth = depth

    def plain(self, tokens: int, number: int) -> str:
        return text(self._words.draw(tokens, number))

    def wrap(self, role: str, tokens: int, number: int) -> PromptInput:
        plain = self.plain(tokens, number)
        return plain if self._form == "raw" else {"role": role, "content": plain}

    def prefix(self, number: int) -> tuple[str, PromptInput]:
        size = self._depth - self.around[0]
        return self.plain(size, number), self.wrap("system", size, number)

    def suffix(self) -> tuple[str, PromptInput]:
        """Another one at every call, from its first word on."""
        self._suffixes += 1
        size = SUFFIX - self.around[1]
        return self.plain(size, self._suffixes), self.wrap("user", size, self._suffixes)


def check_warm(turn: Turn, depth: int, alike: int = 0) -> None:
    """``alike``: what the template may write around any suffix, found again before the words."""
    p, s = turn.prefix, turn.suffix
    require(
        (p.prefix, p.reused, p.prefilled) == (depth, depth, 0),
        f"prefix {p.prefix}: reused {p.reused}, prefilled {p.prefilled}; asked was {depth}, all, 0",
    )
    require(
        s.suffix == SUFFIX == s.prefilled + s.reused and s.reused <= alike,
        f"suffix {s.suffix}: reused {s.reused}, prefilled {s.prefilled}; asked was {SUFFIX} new",
    )


def check_cold(turn: Turn, depth: int) -> None:
    p = turn.prefix
    require(
        (p.prefix, p.reused, p.prefilled) == (depth, 0, depth),
        f"prefix {p.prefix}: reused {p.reused}, prefilled {p.prefilled}; asked was a cold {depth}",
    )


def against_control(lab: Lab, form: str, depth: int, pairs: int) -> None:
    specs = Specs(form, depth)
    book = lab.book
    product_ms: list[float] = []
    control_ms: list[float] = []
    outside_ms: list[float] = []
    expected = (specs.warm, specs.control, specs.over, specs.outside)
    with book.expecting(*expected), lab.session(form) as session:
        control = lab.control("high_level")
        texts = Texts(lab, session, form, depth)
        plain, prefix = texts.prefix(7)
        lab.turn(session, prefix, texts.suffix()[1], ANSWER)
        control.turn(plain, texts.suffix()[0], ANSWER, chat=form == "chat")
        asked = {number: texts.suffix() for number in range(pairs)}
        for number, side in interleaved(("product", "control"), pairs):
            plain_suffix, suffix = asked[number]
            if side == "product":
                turn = lab.turn(session, prefix, suffix, ANSWER)
                check_warm(turn, depth, texts.around[1])
                product_ms.append(turn.first_s * 1000)
                outside_ms.append((turn.first_s - turn.final.first_token_seconds) * 1000)
                continue
            run = control.turn(plain, plain_suffix, ANSWER, chat=form == "chat")
            require(run.prompt == depth + SUFFIX, f"the control read {run.prompt} tokens")
            control_ms.append(run.first_s * 1000)
        book.record(specs.warm, product_ms, "prefix: prefilled 0 in every run")
        book.record(specs.control, control_ms, "own prefix reuse, one process, same text")
        book.record(specs.over, differences(product_ms, control_ms))
        note = "the client's clock less the worker's own time to the first token"
        book.record(specs.outside, outside_ms, note)


def against_cold(lab: Lab, depth: int, pairs: int) -> None:
    specs = Specs("raw", depth)
    cold_ms: list[float] = []
    warm_ms: list[float] = []
    with lab.book.expecting(specs.cold, specs.ratio), lab.session() as session:
        texts = Texts(lab, session, "raw", depth)
        for number in range(pairs):
            _, prefix = texts.prefix(10 + number)
            turn = lab.turn(session, prefix, texts.suffix()[1], ANSWER)
            check_cold(turn, depth)
            cold_ms.append(turn.first_s * 1000)
            turn = lab.turn(session, prefix, texts.suffix()[1], ANSWER)
            check_warm(turn, depth)
            warm_ms.append(turn.first_s * 1000)
            lab.book.say(f"cold {cold_ms[-1]:.0f} ms, warm {warm_ms[-1]:.1f} ms")
        note = "no token in common with what was resident"
        lab.book.record(specs.cold, cold_ms, note)
        lab.book.record(specs.ratio, ratios(cold_ms, warm_ms), "each pair: the same prefix")


def run(lab: Lab) -> None:
    plan = lab.plan
    for depth in DEPTHS:
        target = depth == TARGET_DEPTH
        if plan.quick and not target:
            continue
        lab.book.say(f"warm turns at {depth:,} tokens")
        against_control(lab, "raw", depth, plan.pairs)
        if target:
            against_control(lab, "chat", depth, plan.pairs)
        against_cold(lab, depth, plan.pairs if target and not plan.quick else plan.few)
