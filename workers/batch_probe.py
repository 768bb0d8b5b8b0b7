"""What neighbours in a batch change in a stream's results, tried on a loaded model.

Over any engine's batch; leaves it empty. Knows no sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from modeld.workers.engine import Piece

if TYPE_CHECKING:
    from modeld.workers.engine import BatchContext, EngineContext, Logits

STREAMS = 4  # that ``compared`` takes
_STEPS = 1  # tokens behind each prompt: every load pays for them


@dataclass(frozen=True)
class Shared:
    """``capability``: ``"yes: evidence"``, ``"no: …"`` or ``"unknown: …"``. ``company``: whether a
    sampled token must not go alone for results to be the same among others.
    """

    capability: str
    company: bool = False
    served: bool = False


def compared(
    own: EngineContext, batch: BatchContext, vocabulary: int, lengths: Sequence[int]
) -> Shared:
    """Stream 1 alone, and with some or all of the others; the same in a context of its own. All
    are empty before. ``lengths``: of the prompts, in tokens, such that the engine's routines show
    what they differ by. Raises SessionFatal where they don't compute.
    """
    tokens = [_tokens(stream, length + _STEPS, vocabulary) for stream, length in enumerate(lengths)]
    for stream, prompt_tokens, head in zip(batch.streams, tokens, lengths, strict=True):
        stream.evaluate(prompt_tokens[:head], 0, cancelled=_never)
    own.evaluate(tokens[1][: lengths[1]], 0, cancelled=_never)
    apart = [own.logits().copy(), *_own_steps(own, tokens[1])]
    prompt = batch.streams[1].logits().copy()
    two, four = (_rows(batch, tokens, group) for group in ((1, 2), (0, 1, 2, 3)))
    drift = _furthest(two, four)
    alone = _furthest(_rows(batch, tokens, (1,)), two)
    if alone:
        batch.company = True
        drift = max(drift, *(_furthest(_rows(batch, tokens, one), two) for one in ((1,), (1, 3))))
    rows = two if alone else _rows(batch, tokens, (1,))
    if batch.together:
        prompts = [_tokens(stream, lengths[1], vocabulary) for stream in range(STREAMS)]
        prompt, among = (_prompt(batch, prompts, group) for group in ((1,), range(STREAMS)))
        drift = max(drift, _furthest([prompt], [among]))
    from_own = _furthest([prompt, *rows], apart)
    how = f"{STREAMS} streams together at load: logits of a prompt of {lengths[1]} tokens were"
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


def _tokens(stream: int, count: int, vocabulary: int) -> list[int]:
    return [(7 * at + 31 * stream + 11) % vocabulary for at in range(count)]


def _prompt(batch: BatchContext, prompts: list[list[int]], group: Sequence[int]) -> Logits:
    """Stream 1's logits behind its prompt, evaluated with those of a group."""
    for stream in batch.streams:
        stream.trim(0)
    ids = [np.asarray(tokens, dtype=np.int64) for tokens in prompts]
    batch.evaluate([Piece(index, ids[index], True, _never) for index in group])
    return batch.streams[1].logits().copy()


def _own_steps(context: EngineContext, tokens: list[int]) -> list[Logits]:
    rows = []
    for at in range(len(tokens) - _STEPS, len(tokens)):
        context.step(tokens[at], at)
        rows.append(context.logits().copy())
    return rows


def _rows(batch: BatchContext, tokens: list[list[int]], group: tuple[int, ...]) -> list[Logits]:
    """Stream 1's logits after each step behind its prompt, with a group that goes along."""
    rows = []
    for left in range(_STEPS, 0, -1):
        batch.step([(index, tokens[index][-left]) for index in group])
        rows.append(batch.streams[1].logits().copy())
    for index in group:
        batch.streams[index].trim(len(tokens[index]) - _STEPS)
    return rows


def _furthest(left: list[Logits], right: list[Logits]) -> float:
    """The largest difference of two logits; 0 where all are the same bit for bit."""
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def _never() -> bool:
    return False
