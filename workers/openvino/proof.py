"""Proof that the paged loop works with the installed OpenVINO: a tiny model against numpy.

The transformation it rests on is a private name of the library, so that no version may be trusted
unseen. Knows no user's model.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.workers.openvino.blocks import BLOCK_TOKENS, BlockPool
from modeld.workers.openvino.graph import compile_paged, to_paged
from modeld.workers.openvino.native import ops, ov, words
from modeld.workers.openvino.paged import PagedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float32]

log = logging.getLogger(__name__)

_HEADS, _LENGTH, _VOCABULARY, _POSITIONS = 2, 64, 97, 128
_WIDTH = _HEADS * _LENGTH
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Verdict:
    works: bool
    reason: str

    def __bool__(self) -> bool:
        return self.works


@functools.cache
def paged_loop_works() -> Verdict:
    """Prefill in chunks, a lone token, tail removal and block sharing, once a process."""
    try:
        apart = _largest_difference()
    except Exception as error:
        log.warning("the paged loop fails on its fixture", exc_info=True)
        return Verdict(False, f"it fails on a fixture ({words(error)})")
    if not apart < _TOLERANCE:
        return Verdict(False, f"its logits on a fixture are {apart:g} off")
    return Verdict(True, f"a fixture's logits are within {_TOLERANCE:g} of a direct computation")


def _largest_difference() -> float:
    weights = _Weights()
    model = weights.graph()
    selects = to_paged(model)
    compiled = compile_paged(model, selects, device="CPU", kv_type="f32", threads=1)
    tokens = [(5 * step + 3) % _VOCABULARY for step in range(2 * BLOCK_TOKENS + 7)]
    paged = PagedModel(compiled, BlockPool(compiled.ports, 16), chunk=24)
    apart = []
    with contextlib.closing(paged):
        first, second = (paged.new_context(4 * BLOCK_TOKENS, lambda: 1 << 62) for _ in range(2))
        for begin, end in ((0, 50), (50, 51), (51, len(tokens))):
            first.evaluate(tokens[begin:end], begin, cancelled=_never)
            apart.append(_apart(first.logits(), weights.logits(tokens[:end])))
        second.copy_prefix_from(first, 40)
        other = [*tokens[:40], 1, 2, 3]
        second.step(1, 40)
        second.evaluate([2, 3], 41, cancelled=_never)
        apart.append(_apart(second.logits(), weights.logits(other)))
        first.trim(45)
        first.evaluate([9, 8], 45, cancelled=_never)
        apart.append(_apart(first.logits(), weights.logits([*tokens[:45], 9, 8])))
    return max(apart)


def _apart(one: Array, other: Array) -> float:
    return float(np.abs(one - other).max())


def _never() -> bool:
    return False


class _Weights:
    """One layer of attention with learned positions, as a graph and as arithmetic."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)

        def matrix(*shape: int) -> Array:
            made: Array = random.standard_normal(shape, dtype=np.float32)
            return made / np.float32(np.sqrt(shape[-1]))

        self.embed, self.places = matrix(_VOCABULARY, _WIDTH), matrix(_POSITIONS, _WIDTH)
        self.q, self.k, self.v, self.o = (matrix(_WIDTH, _WIDTH) for _ in range(4))
        self.head = matrix(_VOCABULARY, _WIDTH) * 4

    def logits(self, tokens: list[int]) -> Array:
        """After the last of them."""
        x = (self.embed[tokens] + self.places[: len(tokens)]) * 8
        q, k, v = (
            (x @ w.T).reshape(len(tokens), _HEADS, _LENGTH).transpose(1, 0, 2)
            for w in (self.q, self.k, self.v)
        )
        scores = q[:, -1:] @ k.transpose(0, 2, 1) / np.sqrt(_LENGTH)
        chances = np.exp(scores - scores.max(axis=-1, keepdims=True))
        chances /= chances.sum(axis=-1, keepdims=True)
        attended = (chances @ v).transpose(1, 0, 2).reshape(_WIDTH)
        result: Array = self.head @ (x[-1] + self.o @ attended)
        return result

    def graph(self) -> Any:
        """The stateful form that exporters make."""
        ids = _parameter("input_ids", [-1, -1], ov.Type.i64)
        mask = _parameter("attention_mask", [-1, -1], ov.Type.i64)
        positions = _parameter("position_ids", [-1, -1], ov.Type.i64)
        beam = _parameter("beam_idx", [-1], ov.Type.i32)
        axis = ops.constant(np.int64(0))
        x = ops.add(
            ops.gather(ops.constant(self.embed), ids, axis),
            ops.gather(ops.constant(self.places), positions, axis),
        )
        x = ops.multiply(x, ops.constant(np.float32(8)))
        q, k, v = (
            ops.transpose(
                ops.reshape(
                    ops.matmul(x, ops.constant(w), False, True),
                    ops.constant(np.array([0, 0, _HEADS, _LENGTH], np.int64)),
                    True,
                ),
                ops.constant(np.array([0, 2, 1, 3], np.int64)),
            )
            for w in (self.q, self.k, self.v)
        )
        batch = ops.gather(ops.shape_of(ids, "i64"), ops.constant(np.array([0], np.int64)), axis)
        sinks, grown = [], []
        for part, fresh in (("key", k), ("value", v)):
            whole, sink = _remembered(f"past_key_values.0.{part}", fresh, batch, beam, axis)
            grown.append(whole)
            sinks.append(sink)
        floats = ops.convert(mask, "f32")
        hidden = ops.multiply(
            ops.subtract(ops.constant(np.float32(1)), floats), ops.constant(np.float32(-1e9))
        )
        bias = ops.unsqueeze(hidden, ops.constant(np.array([1, 2], np.int64)))
        attended = ops.scaled_dot_product_attention(q, grown[0], grown[1], bias)
        merged = ops.reshape(
            ops.transpose(attended, ops.constant(np.array([0, 2, 1, 3], np.int64))),
            ops.constant(np.array([0, 0, _WIDTH], np.int64)),
            True,
        )
        x = ops.add(x, ops.matmul(merged, ops.constant(self.o), False, True))
        result = ops.result(ops.matmul(x, ops.constant(self.head), False, True))
        result.output(0).get_tensor().set_names({"logits"})
        return ov.Model([result], sinks, [ids, mask, positions, beam], "proof")


def _parameter(name: str, shape: list[int], kind: Any) -> Any:
    made = ops.parameter(ov.PartialShape(shape), kind, name=name)
    made.output(0).get_tensor().set_names({name})
    return made


def _remembered(name: str, fresh: Any, batch: Any, beam: Any, axis: Any) -> tuple[Any, Any]:
    """A state that grows by ``fresh`` along its tokens; the whole of it, and what stores it."""
    rest = ops.constant(np.array([_HEADS, 0, _LENGTH], np.int64))
    empty = ops.broadcast(ops.constant(np.float32(0)), ops.concat([batch, rest], 0))
    read = ops.read_value(empty, name, ov.Type.f32, ov.PartialShape([-1, _HEADS, -1, _LENGTH]))
    past = ops.gather(read, beam, axis)
    whole = ops.concat([past, fresh], 2)
    return whole, ops.assign(whole, name)
