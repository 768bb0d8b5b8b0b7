"""What the loaded model's engine really can do: tried once on it, with the evidence.

Nothing is inferred from a model's name. Knows no sessions; leaves no context behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.capacity import ModelFacts
from modeld.workers.llama.context import LlamaContext, ModelTraits
from modeld.workers.llama.tokenizer import LlamaTokenizer

if TYPE_CHECKING:
    from modeld.workers.engine import Logits

_WINDOW = 256  # tokens
_HEAD, _ALL = 8, 12  # tokens evaluated first, and in all
# A probe costs some twenty tokens and the first touch of every weight; beyond this size that is
# seconds, so it isn't tried while loading.
MAX_PROBED_BYTES = 1024**3

_LATER = "no: not served yet"
_UNSERVED = (
    "cold_store",
    "structured_output",
    "vision",
    "embed",
    "overflow.evict",
    "layout.batched",
    "fork",
    "snapshot",
    "durable",
    "adapters",
)

MakeContext = Callable[[int, str, str], LlamaContext]


def capabilities(
    make: MakeContext, traits: ModelTraits, tokenizer: LlamaTokenizer, facts: ModelFacts
) -> dict[str, str]:
    """Name → ``"yes: evidence"``, ``"no: …"`` or ``"unknown: …"``.

    Raises what making or using a context of this model raises: then it can't be served.
    """
    found = dict.fromkeys(_UNSERVED, _LATER)
    found["recompute"] = "yes: any prefix is evaluated again from its tokens"
    found["decode.logprobs"] = "yes: the whole row of logits is read for every token"
    found["decode.logit_bias"] = found["decode.logprobs"]
    found["sparse_attention"] = (
        f"yes: a sliding window of {traits.window_tokens} tokens in some layers"
        if traits.window_tokens
        else "no: every token is attended"
    )
    if facts.weights_bytes > MAX_PROBED_BYTES:
        untried = f"unknown: not tried while loading {facts.weights_bytes} bytes of weights"
        for name in ("tail_removal", "prefix_copy", "exact_warm", "middle_removal"):
            found[name] = untried
        found["position_shift"] = untried
        return found
    with contextlib.ExitStack() as stack:

        def new() -> LlamaContext:
            context = make(min(_WINDOW, facts.model_max or _WINDOW), "f16", "f16")
            stack.callback(context.close)
            return context

        found |= _tried(new, traits, tokenizer)
    return found


def _tried(
    new: Callable[[], LlamaContext], traits: ModelTraits, tokenizer: LlamaTokenizer
) -> dict[str, str]:
    tokens = [(7 * step + 11) % tokenizer.vocab_size for step in range(_ALL)]
    head, tail = tokens[:_HEAD], tokens[_HEAD:]

    def continued(context: LlamaContext) -> Logits:
        context.evaluate(tail, _HEAD, cancelled=_never)
        return context.logits().copy()

    first, second = new(), new()
    first.evaluate(head, 0, cancelled=_never)
    copied = second.copy_prefix_from(first, _HEAD)
    reference = continued(first)
    found: dict[str, str] = {}
    how = f"the continuation of {_HEAD} tokens by {_ALL - _HEAD}"
    if first.can_trim(_HEAD):
        first.trim(_HEAD)
        same = bool(np.array_equal(continued(first), reference))
        first.trim(_ALL - 1)
        first.evaluate(tokens[-1:], _ALL - 1, cancelled=_never)
        same_alone = bool(np.array_equal(first.logits(), reference))
        found["tail_removal"] = f"yes: removed and evaluated again at load, {_equal(same)}"
        if traits.window_tokens:
            found["tail_removal"] += (
                f", as long as {traits.window_tokens} tokens before it are held; up to rounding "
                "once the window has moved on"
            )
    else:
        same = same_alone = False
        found["tail_removal"] = "no: a recurrent state can't go back; only whole prefixes are kept"
    if copied:
        same_copy = bool(np.array_equal(continued(second), reference))
        found["prefix_copy"] = f"yes: copied to a second context at load, {_equal(same_copy)}"
    else:
        same_copy = True
        found["prefix_copy"] = "no: the engine did not take a copied state"
    if traits.recurrent:
        found["exact_warm"] = "unknown: nothing is reused but whole prefixes, which are kept as is"
    elif traits.window_tokens:
        found["exact_warm"] = (
            "no: once a sliding window has moved on, results differ by rounding with where its "
            "cells lie"
        )
    elif same and same_alone and same_copy:
        found["exact_warm"] = (
            f"yes: {how} is bit-equal after removal, after copying and with its last token alone; "
            "sampled tokens keep what their decode computed, which a cold prefill of the same "
            "tokens rounds differently"
        )
    else:
        found["exact_warm"] = f"no: {how} differs after removal, after copying or token by token"
    found["middle_removal"], found["position_shift"] = _surgery(first, traits)
    return found


def _surgery(context: LlamaContext, traits: ModelTraits) -> tuple[str, str]:
    if traits.recurrent:
        why = "no: a recurrent state can't forget"
        return why, why
    if traits.window_tokens:
        why = "no: not exact in a sliding-window cache"
        return why, why
    removed, shifted = context.try_surgery()
    note = "the engine did it at load; what follows was computed with the removed tokens in sight"
    return (
        f"yes: {note}" if removed else "no: the engine would not remove a range",
        f"yes: {note}" if shifted else "no: the engine would not shift positions",
    )


def _equal(same: bool) -> str:
    return "the same logits bit for bit" if same else "but with other logits"


def _never() -> bool:
    return False
