"""What the loaded model really can do under the paged executor: tried once on it, with evidence.

Nothing is inferred from a model's name. Leaves no context behind.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.errors import ModelLoadFailed
from modeld.workers import saving, structured, tape
from modeld.workers.openvino.blocks import BLOCK_TOKENS
from modeld.workers.openvino.paged import PagedContext, PagedModel

if TYPE_CHECKING:
    from modeld.workers.engine import Logits

_HEAD, _ALL = BLOCK_TOKENS + 8, BLOCK_TOKENS + 12  # tokens: more than one block of them
_LATER = "no: not served yet"
_UNSERVED = (
    "vision",
    "embed",
)


@dataclass(frozen=True)
class Probed:
    """``capabilities``: name → ``"yes: evidence"``, ``"no: …"`` or ``"unknown: …"``."""

    capabilities: dict[str, str]
    exact_state: bool  # what goes on from KV that went out and came back is bit-equal

    @property
    def reason(self) -> str:
        """Why the paged executor serves the model."""
        return (
            "the block loop gave right numbers on a fixture, and this model's KV went out, back "
            f"and on at load, {_equal(self.exact_state)}"
        )


def probed(model: PagedModel, vocabulary: int) -> Probed:
    """Raises what making or using a context of this model raises: then it can't be served."""
    found = dict.fromkeys(_UNSERVED, _LATER)
    found["overflow.evict"] = tape.capability(drops_tail=True, gives_ranges=True)
    found["recompute"] = "yes: any prefix is evaluated again from its tokens"
    found["decode.logprobs"] = "yes: the whole row of logits is read for every token"
    found["decode.logit_bias"] = found["decode.logprobs"]
    found["structured_output"] = structured.capability()
    found["sparse_attention"] = "no: every layer attends as the model was exported"
    found["middle_removal"] = (
        "no: what follows had attended to it; survivors are evaluated again, and parked blocks "
        "return to their old positions"
    )
    found["position_shift"] = "no: stored keys are never rotated"
    with contextlib.ExitStack() as stack:

        def new() -> PagedContext:
            context = model.new_context(2 * BLOCK_TOKENS, lambda: 1 << 62)
            stack.callback(context.close)
            return context

        tried, exact_state = _tried(new(), new(), model, vocabulary)
        found |= tried
        found["adapters"] = _adapters(new(), model, vocabulary)
    _warm_up(model, vocabulary)
    return Probed(found, exact_state)


def _tried(
    first: PagedContext, second: PagedContext, model: PagedModel, vocabulary: int
) -> tuple[dict[str, str], bool]:
    tokens = [(7 * step + 11) % vocabulary for step in range(_ALL)]
    head, tail = tokens[:_HEAD], tokens[_HEAD:]

    def continued(context: PagedContext) -> Logits:
        context.evaluate(tail, _HEAD, cancelled=_never)
        return context.logits().copy()

    first.evaluate(head, 0, cancelled=_never)
    shared = second.copy_prefix_from(first, _HEAD)
    blocks, rest = first.export_state(0, BLOCK_TOKENS), first.export_state(BLOCK_TOKENS, _HEAD)
    reference = continued(first)
    same_shared = shared and bool(np.array_equal(continued(second), reference))
    first.trim(_HEAD)
    same = bool(np.array_equal(continued(first), reference))
    first.trim(_ALL - 1)
    first.evaluate(tokens[-1:], _ALL - 1, cancelled=_never)
    alone = bool(np.array_equal(first.logits(), reference))
    first.trim(0)
    back = first.import_state(blocks, BLOCK_TOKENS) and first.import_state(rest, _HEAD)
    same_bytes = back and bool(np.array_equal(first.export_state(0, BLOCK_TOKENS), blocks))
    same_back = back and bool(np.array_equal(continued(first), reference))
    first.trim(0)
    for token_at in range(0, _HEAD, 9):  # another split
        first.evaluate(head[token_at : token_at + 9], token_at, cancelled=_never)
    same_split = bool(np.array_equal(continued(first), reference))
    kv = model.compiled.k_type
    found = {
        "tail_removal": f"yes: removed and evaluated again at load, {_equal(same)}",
        "prefix_copy": f"yes: blocks shared by a second context at load, {_equal(same_shared)}",
        "state.blocks": (
            f"yes: blocks of {BLOCK_TOKENS} tokens went out and back at load, {_equal(same_back)}"
            if same_bytes
            else "no: blocks that went out came back as other bytes"
        ),
    }
    found["fork"], found["state.whole"] = found["prefix_copy"], found["state.blocks"]
    found |= saving.capabilities(found)
    found["cold_store"] = (
        f"yes: in blocks; what went out and came back at load gave {_equal(True)} at K/V "
        f"{kv}/{model.compiled.v_type}"
        if same_bytes and same_back
        else "no: what went out and came back at load gave other bytes or other logits"
    )
    if not model.exact:
        found["exact_warm"] = (
            f"no: {kv} keys are scaled by block, so that results depend on how a prompt is split"
        )
    elif same and alone and same_shared and same_split:
        found["exact_warm"] = (
            f"yes: the continuation of {_HEAD} tokens by {_ALL - _HEAD} is bit-equal after "
            "removal, in another split, after sharing and with its last token alone; sampled "
            "tokens keep what their decode computed, which a cold prefill of the same tokens "
            "rounds differently"
        )
    else:
        found["exact_warm"] = "no: a continuation differs after removal, sharing or another split"
    return found, same_bytes and same_back


def _adapters(context: PagedContext, model: PagedModel, vocabulary: int) -> str:
    """Raises ModelLoadFailed where adapters were applied and change nothing."""
    applied = model.applied
    if not applied.adapters:
        if not applied.changeable:
            return "no: none of its matrix products is known by the name of its weight"
        return (
            f"yes: {applied.changeable} weights can be changed; that an adapter changes the "
            "logits is proved when it is loaded"
        )
    tokens = [(5 * step + 3) % vocabulary for step in range(8)]
    rows = []
    for on in (False, True):
        model.switch_adapters(on=on)
        context.trim(0)
        context.evaluate(tokens, 0, cancelled=_never)
        rows.append(context.logits().copy())
    difference = float(np.abs(rows[1] - rows[0]).max())
    if not difference > 0:
        raise ModelLoadFailed(
            f"The {applied.adapters} adapter(s) were applied to {applied.weights} weights and the "
            "logits are the same with and without: they are empty, or of scale 0. Leave them out.",
            metadata={"cause": "adapter", "weights": applied.weights},
        )
    return (
        f"yes: {applied.adapters} applied to {applied.weights} weights, which moved the logits of "
        f"8 tokens by {difference:.3g} at load"
    )


def _warm_up(model: PagedModel, vocabulary: int) -> None:
    """Run one whole chunk and one step: the first of a size compiles kernels for a second or two,
    and touches the buffers that plans count as resident from here on.
    """
    with contextlib.closing(model.new_context(model.chunk + 1, lambda: 1 << 62)) as context:
        context.evaluate([11 % vocabulary] * model.chunk, 0, cancelled=_never)
        context.step(11 % vocabulary, model.chunk)


def _equal(same: bool) -> str:
    return "the same logits bit for bit" if same else "but with other logits"


def _never() -> bool:
    return False
