"""What neighbours in a batch change in a stream's results, tried on a loaded model.

Over any engine's batch; leaves it empty. Knows no sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from modeld.workers.engine import BatchContext, EngineContext, Logits

STREAMS = 4  # that ``compared`` takes
# Tokens: a prompt for each stream, and what follows it. Few, since every load pays for them: where
# routines differ, the first token shows it.
_HEADS, _STEPS = (2, 3, 2, 2), 1


@dataclass(frozen=True)
class Shared:
    """``capability``: ``"yes: evidence"``, ``"no: …"`` or ``"unknown: …"``. ``company``: whether a
    sampled token must not go alone for results to be the same among others.
    """

    capability: str
    company: bool = False
    served: bool = False


def compared(own: EngineContext, batch: BatchContext, vocabulary: int) -> Shared:
    """Stream 1 alone, and with some or all of the others; the same in a context of its own. All
    are empty before. Raises SessionFatal where they don't compute.
    """
    tokens = [[(7 * at + 31 * s + 11) % vocabulary for at in range(8)] for s in range(STREAMS)]
    for stream, prompt_tokens, head in zip(batch.streams, tokens, _HEADS, strict=True):
        stream.evaluate(prompt_tokens[:head], 0, cancelled=_never)
    own.evaluate(tokens[1][: _HEADS[1]], 0, cancelled=_never)
    apart = [own.logits().copy(), *_own_steps(own, tokens[1])]
    prompt = batch.streams[1].logits().copy()
    two, four = (_rows(batch, tokens, group) for group in ((1, 2), (0, 1, 2, 3)))
    drift = _furthest(two, four)
    alone = _furthest(_rows(batch, tokens, (1,)), two)
    if alone:
        batch.company = True
        drift = max(drift, *(_furthest(_rows(batch, tokens, one), two) for one in ((1,), (1, 3))))
    rows = two if alone else _rows(batch, tokens, (1,))
    from_own = _furthest([prompt, *rows], apart)
    how = f"{STREAMS} streams of one context at load: the logits behind a stream's prompt were"
    if drift:
        return Shared(
            f"yes: {how} other ones among one and three others (by up to {drift:.2g}): not exact",
            company=bool(alone),
            served=True,
        )
    if alone:
        how += (
            " the same bit for bit among one and three others, and other ones alone (by up to "
            f"{alone:.2g}), so that no sampled token is evaluated alone, after which they were the "
            "same: exact"
        )
    else:
        how += " the same bit for bit alone and among one and three others: exact"
    if from_own:
        how += f"; in a context of its own they differ by up to {from_own:.2g}"
    else:
        how += ", and the same as in a context of its own"
    return Shared(f"yes: {how}", company=bool(alone), served=True)


def _own_steps(context: EngineContext, tokens: list[int]) -> list[Logits]:
    rows = []
    for at in range(_HEADS[1], _HEADS[1] + _STEPS):
        context.step(tokens[at], at)
        rows.append(context.logits().copy())
    return rows


def _rows(batch: BatchContext, tokens: list[list[int]], group: tuple[int, ...]) -> list[Logits]:
    """Stream 1's logits after each step behind its prompt, with a group that goes along."""
    rows = []
    for step in range(_STEPS):
        batch.step([(index, tokens[index][_HEADS[index] + step]) for index in group])
        rows.append(batch.streams[1].logits().copy())
    for index in group:
        batch.streams[index].trim(_HEADS[index])
    return rows


def _furthest(left: list[Logits], right: list[Logits]) -> float:
    """The largest difference of two logits; 0 where all are the same bit for bit."""
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def _never() -> bool:
    return False
