"""The OpenVINO worker: its paged loop against GenAI's own pipeline, and gRPC against the loop."""

from __future__ import annotations

import threading
import time
from typing import Literal

from bench.cases.prefill import TOKENS as PREFILLED
from bench.cases.warm_turn import ANSWER, Texts, check_cold, check_warm
from bench.control import DecodeRun
from bench.daemon import MODEL
from bench.lab import Lab, now
from bench.runner import Spec, Target, interleaved, ratios, require, tokens_a_second
from bench.texts import text

Side = Literal["genai", "paged", "product"]
PATHS: dict[Side, tuple[Literal["product", "engine control"], str]] = {
    "genai": ("engine control", "GenAI's continuous batching"),
    "paged": ("engine control", "the worker's paged loop and argmax"),
    "product": ("product", "through gRPC"),
}
DEPTHS = (100, 2000)
SUFFIX = 8  # tokens
TOKENS = 64
WARM_DEPTH, EDITED_AT = 4000, 3000
LOOP = Target("at least", 0.92)
GRPC = Target("at least", 0.95)
TIMES_COLD = Target("at least", 60.0)
CANCEL = Target("at most", 50.0)


def run(lab: Lab) -> None:
    here = lab.openvino
    for depth in DEPTHS:
        decoding(here, depth)
    prefilling(here)
    warm(here)
    cancelling(here)


def decoding(lab: Lab, depth: int) -> None:
    book, pairs = lab.book, lab.plan.pairs
    title = f"OpenVINO decode at {depth:,} tokens"
    times = {
        side: Spec(f"openvino.decode.{depth}.{side}", f"{title}: {what}", path, "ms/token")
        for side, (path, what) in PATHS.items()
    }
    loop = Spec(
        f"openvino.decode.{depth}.paged_over_genai",
        f"OpenVINO decode rate at {depth:,}: the paged loop over GenAI",
        "engine control", "of its rate", LOOP,
    )  # fmt: skip
    grpc = Spec(
        f"openvino.decode.{depth}.product_over_paged",
        f"OpenVINO decode rate at {depth:,}: gRPC over the paged loop",
        "product", "of its rate", GRPC,
    )  # fmt: skip
    ms: dict[Side, list[float]] = {side: [] for side in PATHS}
    with book.expecting(*times.values(), loop, grpc), lab.session() as session:
        book.say(f"OpenVINO: decoding at {depth:,} tokens")
        prefix = lab.words.draw(depth - SUFFIX, 5)

        def decode(side: Side, number: int, *, token_ids: bool = False) -> DecodeRun:
            suffix = lab.words.draw(SUFFIX, number)
            if side == "product":
                turn = lab.turn(session, text(prefix), text(suffix), TOKENS, token_ids=token_ids)
                at = turn.prefix.prefix + turn.suffix.suffix
                require(at == depth, f"it decoded at {at} tokens, not {depth}")
                return turn.decode
            ids = lab.words.ids(prefix), lab.words.ids(suffix)
            return lab.control(side).decode(*ids, TOKENS, texts=(text(prefix), text(suffix)))

        answers = {side: decode(side, 0, token_ids=True).ids for side in PATHS}
        same = [side for side in PATHS if answers[side] == answers["genai"]]
        for number, side in interleaved(tuple(PATHS), pairs):
            ms[side].append(decode(side, number + 1).ms_a_token)
        alike = f"same {TOKENS} greedy tokens by {len(same)} of {len(PATHS)} paths"
        for side, spec in times.items():
            book.record(spec, ms[side], alike if side == "genai" else "")
        book.record(loop, ratios(ms["genai"], ms["paged"]))
        book.record(grpc, ratios(ms["paged"], ms["product"]))


def prefilling(lab: Lab) -> None:
    book = lab.book
    specs = {
        side: Spec(f"openvino.prefill.{side}", f"OpenVINO prefill of {PREFILLED:,} tokens: {what}",
                   path, "tokens/s")
        for side, (path, what) in PATHS.items()
    }  # fmt: skip
    loop = Spec("openvino.prefill.paged_over_genai", "OpenVINO prefill rate: the paged loop over "
                "GenAI", "engine control", "of its rate", LOOP)  # fmt: skip
    grpc = Spec("openvino.prefill.product_over_paged", "OpenVINO prefill rate: gRPC over the paged "
                "loop", "product", "of its rate", GRPC)  # fmt: skip
    rates: dict[Side, list[float]] = {side: [] for side in PATHS}
    with book.expecting(*specs.values(), loop, grpc), lab.session() as session:
        book.say(f"OpenVINO: prefilling {PREFILLED:,} tokens")

        def seconds(side: Side, number: int) -> float:
            words = lab.words.draw(PREFILLED, number)
            if side != "product":
                return lab.control(side).prefill(lab.words.ids(words))
            prompt, began_s = text(words), now()
            status = session.ensure_prefix(prompt)
            spent_s = now() - began_s
            require(status.prefilled == PREFILLED, f"it prefilled {status.prefilled} tokens")
            return spent_s

        for side in PATHS:
            seconds(side, 0)
        for number, side in interleaved(tuple(PATHS), lab.plan.pairs):
            rates[side].append(tokens_a_second(PREFILLED, seconds(side, number + 1)))
        for side, spec in specs.items():
            book.record(spec, rates[side])
        book.record(loop, ratios(rates["paged"], rates["genai"]))
        book.record(grpc, ratios(rates["product"], rates["paged"]))


def warm(lab: Lab) -> None:
    """A whole prefix resident, and one edited at its third quarter, against cold."""
    book = lab.book
    cold = Spec("openvino.cold", f"OpenVINO cold turn: first token ({WARM_DEPTH:,} + 26)",
                "product", "ms")  # fmt: skip
    first = Spec("openvino.warm", f"OpenVINO warm turn: first token ({WARM_DEPTH:,} resident + 26 "
                 "new)", "product", "ms")  # fmt: skip
    times = Spec("openvino.warm.times", "OpenVINO cold over warm", "product", "times", TIMES_COLD)
    edited = Spec("openvino.edited", f"OpenVINO tokens prefilled after an edit at {EDITED_AT:,} of "
                  f"{WARM_DEPTH:,}", "product", "tokens",
                  Target("at most", WARM_DEPTH - EDITED_AT))  # fmt: skip
    pairs = lab.plan.few if lab.plan.quick else lab.plan.pairs
    cold_ms: list[float] = []
    warm_ms: list[float] = []
    again: list[float] = []
    with book.expecting(cold, first, times, edited), lab.session() as session:
        texts = Texts(lab, session, "raw", WARM_DEPTH)
        for number in range(pairs):
            plain, prefix = texts.prefix(10 + number)
            turn = lab.turn(session, prefix, texts.suffix()[1], ANSWER)
            check_cold(turn, WARM_DEPTH)
            cold_ms.append(turn.first_s * 1000)
            turn = lab.turn(session, prefix, texts.suffix()[1], ANSWER)
            check_warm(turn, WARM_DEPTH)
            warm_ms.append(turn.first_s * 1000)
            words = plain.split()
            tail = lab.words.draw(WARM_DEPTH - EDITED_AT, 50 + number)
            changed = session.ensure_prefix(text([*words[:EDITED_AT], *tail]))
            require(changed.prefix == WARM_DEPTH, f"the edited prefix has {changed.prefix} tokens")
            again.append(float(changed.prefilled))
        book.record(cold, cold_ms)
        book.record(first, warm_ms, "prefix: prefilled 0 in every run")
        book.record(times, ratios(cold_ms, warm_ms))
        book.record(edited, again, "from the edit on, and no token before it")


def cancelling(lab: Lab) -> None:
    """From the cancel of a long prefill to the answer of a call that waited behind it."""
    title = f"OpenVINO: a cancel in a prefill of {WARM_DEPTH:,} tokens frees the slot"
    spec = Spec("openvino.cancel", title, "product", "ms", CANCEL)
    client = lab.product.client
    waited_ms: list[float] = []
    with lab.book.expecting(spec), lab.session() as session:
        for number in range(lab.plan.pairs):
            stream = session.turn(text(lab.words.draw(WARM_DEPTH, number)), " go", max_tokens=1)
            reader = threading.Thread(target=list, args=(stream,), daemon=True)
            reader.start()
            time.sleep(0.5)  # well within the prefill
            began_s = now()
            stream.cancel()
            client.tokenize(MODEL, "after")
            waited_ms.append((now() - began_s) * 1000)
            reader.join()
        lab.book.record(spec, waited_ms, "to the end of a Tokenize that had to wait for it")
