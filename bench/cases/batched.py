"""Four sessions that decode at once, against llama.cpp's own server with four slots."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Literal

from bench.daemon import MODEL
from bench.lab import Lab, follow, now
from bench.llama_server import LlamaServer, Streamed
from bench.runner import Spec, Target, interleaved, ratios, require, tokens_a_second
from bench.texts import text

Side = Literal["product", "llama-server"]
SESSIONS = 4
WINDOW, DEPTH, SUFFIX, ANSWER = 2048, 500, 26, 128  # tokens
RATE = Target("at least", 1.0)
EVEN = Target("at least", 0.8)


def run(lab: Lab) -> None:
    for here in (lab, lab.openvino):
        together(lab, here)


def together(lab: Lab, here: Lab) -> None:
    """``lab`` holds the GGUF model that the server reads, ``here`` the backend's daemon."""
    name, title = f"batched.{here.backend}", f"{here.backend}: {SESSIONS} sessions decoding at once"
    rate = {
        "product": Spec(f"{name}.rate", f"{title}, total", "product", "tokens/s"),
        "llama-server": Spec(
            f"{name}.llama_server", f"{title}: llama-server with as many slots, total",
            "engine control", "tokens/s",
        ),
    }  # fmt: skip
    over = Spec(f"{name}.over", f"{title}: total rate over llama-server's", "product",
                "of its rate", RATE)  # fmt: skip
    even = Spec(f"{name}.even", f"{title}: the slowest over the fastest", "product", "of its rate",
                EVEN)  # fmt: skip
    rates: dict[Side, list[float]] = {"product": [], "llama-server": []}
    slowest: list[float] = []
    with lab.book.expecting(*rate.values(), over, even), ExitStack() as stack:
        lab.book.say(title)
        server = LlamaServer(lab.engine, SESSIONS, WINDOW, lab.folder)
        stack.callback(server.stop)
        client = here.product.client
        sessions = [
            client.open_session(MODEL, window=WINDOW, prompt_format="raw", layout="batched")
            for _ in range(SESSIONS)
        ]
        for session in sessions:
            stack.callback(session.close, discard=True)
        prefixes = [lab.words.draw(DEPTH, number) for number in range(SESSIONS)]

        def ours(index: int, suffix: list[str]) -> Streamed:
            turn = follow(
                sessions[index].turn(
                    text(prefixes[index]), text(suffix), max_tokens=ANSWER, ignore_eos=True
                )
            )
            ended_s = now()
            require(turn.final.tokens == ANSWER, f"it made {turn.final.tokens} tokens")
            return Streamed(ANSWER, turn.prefix.reused, ended_s - turn.rest_s, ended_s)

        def theirs(index: int, suffix: list[str]) -> Streamed:
            return server.complete(lab.words.ids([*prefixes[index], *suffix]), ANSWER, index)

        sides: dict[Side, Callable[[int, list[str]], Streamed]] = {
            "product": ours,
            "llama-server": theirs,
        }
        pool = stack.enter_context(ThreadPoolExecutor(SESSIONS))
        for number, side in interleaved(list(sides), lab.plan.pairs + 1):
            suffixes = [lab.words.draw(SUFFIX, SESSIONS * number + n) for n in range(SESSIONS)]
            began_s = now()
            runs = list(pool.map(sides[side], range(SESSIONS), suffixes))
            spent_s = max(run.last_s for run in runs) - began_s
            if number:  # the first round reads the prefixes
                require(all(run.cached >= DEPTH - 1 for run in runs), "a prefix was read again")
                rates[side].append(tokens_a_second(sum(run.tokens for run in runs), spent_s))
                if side == "product":
                    each = [(run.tokens - 1) / (run.last_s - run.first_s) for run in runs]
                    slowest.append(min(each) / max(each))
        told = f"{DEPTH} + {SUFFIX} tokens each, {ANSWER} generated, prefixes resident"
        for side, values in rates.items():
            lab.book.record(rate[side], values, told)
        lab.book.record(over, ratios(rates["product"], rates["llama-server"]), told)
        lab.book.record(even, slowest)
