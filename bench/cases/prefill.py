"""Prompt tokens a second: through gRPC, and by the bare library in the same batches."""

from __future__ import annotations

from bench.lab import Lab, now
from bench.runner import Spec, Target, interleaved, ratios, require, tokens_a_second
from bench.texts import text

TOKENS = 1024  # two batches

PRODUCT = Spec("prefill.product", f"prefill of {TOKENS:,} tokens", "product", "tokens/s")
BARE = Spec(
    "prefill.bare",
    f"prefill of {TOKENS:,} tokens: llama_decode in batches of 512",
    "engine control",
    "tokens/s",
)
RATIO = Spec(
    "prefill.ratio",
    "prefill rate: gRPC over llama_decode",
    "product",
    "of its rate",
    Target("at least", 0.97),
)
OVERHEAD = Spec(
    "prefill.overhead", f"a prefill of {TOKENS:,}: outside of the engine", "product", "ms"
)


def run(lab: Lab) -> None:
    book = lab.book
    product: list[float] = []
    bare: list[float] = []
    overhead_ms: list[float] = []
    with book.expecting(PRODUCT, BARE, RATIO, OVERHEAD), lab.session() as session:
        control = lab.control("bare")
        book.say(f"prefilling {TOKENS:,} tokens")
        session.ensure_prefix(text(lab.words.draw(TOKENS, 0)))
        control.prefill(lab.words.ids(lab.words.draw(TOKENS, 0)))
        for number, side in interleaved(("product", "bare"), lab.plan.pairs):
            words = lab.words.draw(TOKENS, number + 1)
            if side == "bare":
                seconds = control.prefill(lab.words.ids(words))
                bare.append(tokens_a_second(TOKENS, seconds))
                continue
            prompt = text(words)
            began_s = now()
            status = session.ensure_prefix(prompt)
            seconds = now() - began_s
            require(
                (status.prefix, status.prefilled) == (TOKENS, TOKENS),
                f"prefix {status.prefix}: prefilled {status.prefilled}",
            )
            product.append(tokens_a_second(TOKENS, seconds))
            overhead_ms.append((seconds - status.seconds) * 1000)
        book.record(PRODUCT, product, "the client's clock: tokenizing and both ways included")
        book.record(BARE, bare)
        book.record(RATIO, ratios(product, bare))
        book.record(OVERHEAD, overhead_ms, "the client's clock less the engine's own seconds")
