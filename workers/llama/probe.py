"""What the loaded model's engine really can do: tried once on it, with the evidence.

Nothing is inferred from a model's name. Knows no sessions; leaves no context behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import InsufficientMemory, InvalidRequest
from modeld.workers import saving, structured, tape
from modeld.workers.llama.context import LlamaContext, ModelTraits
from modeld.workers.llama.tokenizer import LlamaTokenizer

if TYPE_CHECKING:
    from modeld.workers.engine import Logits

_WINDOW = 256  # tokens
_CUT, _HEAD, _ALL = 3, 8, 12  # tokens of a first range, evaluated first, and in all
# A probe costs some twenty tokens and the first touch of every weight; beyond this size that is
# seconds, so it isn't tried while loading.
MAX_PROBED_BYTES = 1024**3

_LATER = "no: not served yet"
_UNSERVED = (
    "vision",
    "embed",
    "adapters",
)

MakeContext = Callable[[int, str, str], LlamaContext]


@dataclass(frozen=True)
class Probed:
    """``capabilities``: name → ``"yes: evidence"``, ``"no: …"`` or ``"unknown: …"``."""

    capabilities: dict[str, str]
    exact_state_types: tuple[str, ...]  # "K/V"


def probed(
    make: MakeContext,
    traits: ModelTraits,
    tokenizer: LlamaTokenizer,
    facts: ModelFacts,
    kv_types: tuple[str, str] = ("f16", "f16"),
) -> Probed:
    """What was tried at f16, and imported states at ``kv_types`` too, where the model takes them.

    Raises what making or using a context of this model raises: then it can't be served.
    """
    found = dict.fromkeys(_UNSERVED, _LATER)
    found["overflow.evict"] = tape.capability(
        drops_tail=not traits.recurrent, gives_ranges=traits.dense
    )
    found["recompute"] = "yes: any prefix is evaluated again from its tokens"
    found["decode.logprobs"] = "yes: the whole row of logits is read for every token"
    found["decode.logit_bias"] = found["decode.logprobs"]
    found["structured_output"] = structured.capability()
    found["sparse_attention"] = (
        f"yes: a sliding window of {traits.window_tokens} tokens in some layers"
        if traits.window_tokens
        else "no: every token is attended"
    )
    if facts.weights_bytes > MAX_PROBED_BYTES:
        untried = f"unknown: not tried while loading {facts.weights_bytes} bytes of weights"
        for name in ("tail_removal", "prefix_copy", "exact_warm", "middle_removal"):
            found[name] = untried
        for name in ("position_shift", "state.blocks", "state.whole"):
            found[name] = untried
        found |= saving.capabilities(found)
        found["cold_store"] = f"{untried}; the first block that comes back is compared"
        found["fork"] = found["prefix_copy"]
        return Probed(found, ())
    exact = []
    with _two_contexts(make, facts, "f16", "f16") as (first, second):
        moved = _moved(first, second, traits, tokenizer)
        if moved.exact:
            exact.append("f16/f16")
        found |= _tried(first, second, traits, tokenizer)
    if kv_types != ("f16", "f16") and moved.exact:
        # Types that this model can't have now are refused when a session is opened with them.
        with (
            contextlib.suppress(InvalidRequest, InsufficientMemory),
            _two_contexts(make, facts, *kv_types) as (first, second),
        ):
            if _moved(first, second, traits, tokenizer).exact:
                exact.append("/".join(kv_types))
    found |= _state_answers(moved, traits, exact)
    found |= saving.capabilities(found)
    found["cold_store"] = _parks(moved, traits, exact)
    found["fork"] = found["prefix_copy"]
    return Probed(found, tuple(exact))


@contextlib.contextmanager
def _two_contexts(
    make: MakeContext, facts: ModelFacts, k_type: str, v_type: str
) -> Iterator[tuple[LlamaContext, LlamaContext]]:
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                contextlib.closing(make(min(_WINDOW, facts.model_max or _WINDOW), k_type, v_type))
            )
            for _ in range(2)
        )
        yield first, second


@dataclass(frozen=True)
class _Moved:
    """What became of a state that went out of one context and into another."""

    taken: bool
    same: bool  # the continuation, bit for bit
    exact: bool  # … and it says so for any state


def _moved(
    first: LlamaContext, second: LlamaContext, traits: ModelTraits, tokenizer: LlamaTokenizer
) -> _Moved:
    """Both contexts are empty, and are again afterwards."""
    tokens = _tokens(tokenizer)
    ends = (_CUT, _HEAD) if traits.dense else (_HEAD,)
    first.evaluate(tokens[:_HEAD], 0, cancelled=_never)
    parts = [first.export_state(begin, end) for begin, end in pairwise((0, *ends))]
    reference = _continued(first, tokens)
    taken = all(second.import_state(part, end) for part, end in zip(parts, ends, strict=True))
    same = False
    if taken:
        again = second.export_state(*((_CUT, _HEAD) if traits.dense else (0, _HEAD)))
        same = bool(np.array_equal(again, parts[-1]))
        same = same and bool(np.array_equal(_continued(second, tokens), reference))
    if same and traits.dense:  # a range that went, and came back
        first.trim(_CUT)
        same = first.import_state(parts[-1], _HEAD)
        same = same and bool(np.array_equal(_continued(first, tokens), reference))
    first.trim(0)
    second.trim(0)
    return _Moved(taken, same, same and not traits.window_tokens)


def _state_answers(moved: _Moved, traits: ModelTraits, exact: list[str]) -> dict[str, str]:
    if not moved.taken:
        no = "no: the engine did not take its own state back"
        return {"state.whole": no, "state.blocks": no}
    seen = f"went out and into a second context at load, {_equal(moved.same)}"
    if exact:
        seen += f" at K/V {' and '.join(exact)}"
    if traits.dense:
        found = f"yes: ranges {seen}"
        return {"state.whole": found, "state.blocks": found}
    whole = f"yes: a whole state {seen}"
    if traits.recurrent:
        return {"state.whole": whole, "state.blocks": "no: a recurrent state has no ranges"}
    return {
        "state.whole": f"{whole}; up to rounding once the window has moved on",
        "state.blocks": "no: of a sliding-window cache only the whole goes out",
    }


def _parks(moved: _Moved, traits: ModelTraits, exact: list[str]) -> str:
    if not moved.taken:
        return "no: the engine did not take its own state back"
    seen = "what went out and came back at load gave"
    if not moved.same:
        return f"no: {seen} other logits"
    seen += f" {_equal(True)}"
    if exact:
        seen += f" at K/V {' and '.join(exact)}"
    if traits.dense:
        return f"yes: in blocks; {seen}"
    rounding = "; up to rounding once the window has moved on" if traits.window_tokens else ""
    return f"yes: all that is held, or nothing; {seen}{rounding}"


def _tokens(tokenizer: LlamaTokenizer) -> list[int]:
    return [(7 * step + 11) % tokenizer.vocab_size for step in range(_ALL)]


def _continued(context: LlamaContext, tokens: list[int]) -> Logits:
    """Behind the head, by the tail."""
    context.evaluate(tokens[_HEAD:], _HEAD, cancelled=_never)
    return context.logits().copy()


def _tried(
    first: LlamaContext, second: LlamaContext, traits: ModelTraits, tokenizer: LlamaTokenizer
) -> dict[str, str]:
    tokens = _tokens(tokenizer)
    first.evaluate(tokens[:_HEAD], 0, cancelled=_never)
    copied = second.copy_prefix_from(first, _HEAD)
    reference = _continued(first, tokens)
    found: dict[str, str] = {}
    how = f"the continuation of {_HEAD} tokens by {_ALL - _HEAD}"
    if first.can_trim(_HEAD):
        first.trim(_HEAD)
        same = bool(np.array_equal(_continued(first, tokens), reference))
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
        same_copy = bool(np.array_equal(_continued(second, tokens), reference))
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
