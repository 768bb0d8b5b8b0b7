"""Tokens in steady state: the bare library, the engine class, the link, gRPC, the binding's class.

All sample greedily at the same depth; a token's cost is the time from the first to the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from bench.control import DecodeRun, Kind
from bench.lab import Lab
from bench.runner import Spec, Target, differences, interleaved, ratios, require
from bench.texts import text

DEPTHS = (100, 2000)
SUFFIX = 8  # tokens
TOKENS = 64

Side = Literal["bare", "engine", "link", "product", "high_level"]
SIDES: Mapping[Side, tuple[Literal["product", "engine control"], str]] = {
    "bare": ("engine control", "llama_decode and argmax"),
    "engine": ("engine control", "the worker's engine class and argmax"),
    "link": ("engine control", "a worker behind the link, no gRPC"),
    "product": ("product", "through gRPC"),
    "high_level": ("engine control", "llama_cpp.Llama.generate"),
}
CONTROLS: Mapping[Side, Kind] = {
    "bare": "bare", "engine": "engine", "link": "link", "high_level": "high_level",
}  # fmt: skip


def time_spec(depth: int, side: Side) -> Spec:
    path, what = SIDES[side]
    title = f"decode at {depth:,} tokens: {what}"
    return Spec(f"decode.{depth}.{side}", title, path, "ms/token")


def ratio_specs(depth: int) -> dict[tuple[Side, Side], Spec]:
    """Rates of the first over the second, pair by pair."""
    return {
        ("product", "engine"): Spec(
            f"decode.{depth}.product_over_engine",
            f"decode rate at {depth:,}: gRPC over the engine's own loop",
            "product",
            "of its rate",
            Target("at least", 0.95),
        ),
        ("product", "bare"): Spec(
            f"decode.{depth}.product_over_bare",
            f"decode rate at {depth:,}: gRPC over llama_decode and argmax",
            "product",
            "of its rate",
        ),
        ("engine", "high_level"): Spec(
            f"decode.{depth}.engine_over_high_level",
            f"decode rate at {depth:,}: the engine's own loop over llama_cpp.Llama",
            "engine control",
            "of its rate",
            Target("at least", 1.0),
        ),
        ("product", "high_level"): Spec(
            f"decode.{depth}.product_over_high_level",
            f"decode rate at {depth:,}: gRPC over llama_cpp.Llama",
            "product",
            "of its rate",
        ),
    }


def cost_specs(depth: int) -> dict[tuple[Side, Side], Spec]:
    """Microseconds that the first takes for a token beyond the second, pair by pair."""
    steps: list[tuple[Side, Side, str]] = [
        ("engine", "bare", "the engine class's checks"),
        ("link", "engine", "session, sampler, stream and link"),
        ("product", "link", "supervisor, gRPC and client"),
        ("product", "engine", "the whole path"),
    ]
    return {
        (a, b): Spec(
            f"path.{depth}.{a}_less_{b}",
            f"a token's cost at {depth:,}: {what}",
            SIDES[a][0],
            "µs/token",
        )
        for a, b, what in steps
    }


def run(lab: Lab) -> None:
    for depth in DEPTHS:
        _run_at(lab, depth)


def _run_at(lab: Lab, depth: int) -> None:
    book, pairs = lab.book, lab.plan.pairs
    times = {side: time_spec(depth, side) for side in SIDES}
    rates, costs = ratio_specs(depth), cost_specs(depth)
    ms: dict[Side, list[float]] = {side: [] for side in SIDES}
    expected = (*times.values(), *rates.values(), *costs.values())
    with book.expecting(*expected), lab.session() as session:
        book.say(f"decoding at {depth:,} tokens")
        prefix = lab.words.draw(depth - SUFFIX, 5)

        def decode(side: Side, number: int, *, token_ids: bool = False) -> DecodeRun:
            suffix = lab.words.draw(SUFFIX, number)
            if side == "product":
                turn = lab.turn(session, text(prefix), text(suffix), TOKENS, token_ids=token_ids)
                at = turn.prefix.prefix + turn.suffix.suffix
                require(at == depth, f"it decoded at {at} tokens, not {depth}")
                return turn.decode
            ids = lab.words.ids(prefix), lab.words.ids(suffix)
            return lab.control(CONTROLS[side]).decode(
                *ids, TOKENS, texts=(text(prefix), text(suffix))
            )

        # Warms everyone, and shows that all compute the same.
        answers = {side: decode(side, 0, token_ids=True).ids for side in SIDES}
        same = [side for side in SIDES if answers[side] == answers["bare"]]
        for number, side in interleaved(tuple(SIDES), pairs):
            ms[side].append(decode(side, number + 1).ms_a_token)
        alike = f"same {TOKENS} greedy tokens by {len(same)} of {len(SIDES)} paths"
        for side, spec in times.items():
            book.record(spec, ms[side], alike if side == "bare" else "")
        for (a, b), spec in rates.items():
            book.record(spec, ratios(ms[b], ms[a]))
        for (a, b), spec in costs.items():
            book.record(spec, [1000 * d for d in differences(ms[a], ms[b])])
