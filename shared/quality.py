"""Judges a greedy continuation against a stored one: pure, on token ids and margins.

A model's first continuation becomes the reference; a later run confirms it or shows that
something computes otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modeld.shared.capabilities import AnswerName

# Logits. Engines, builds and batch shapes round differently: up to 0.65 was measured between two
# correct computations of the same token, so that a best token that leads by less may change.
NEAR_TIE = 1.0


@dataclass(frozen=True)
class Continuation:
    """What greedy sampling gave. ``margins`` are logits between the best and the second best."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Verdict:
    answer: AnswerName
    evidence: str


def judge(reference: Continuation, seen: Continuation) -> Verdict:
    """``yes``: the same tokens, or the same up to a near tie after which they may part."""
    if reference.prompt_ids != seen.prompt_ids:
        return Verdict("no", "the probe's prompt was tokenized otherwise than for the reference")
    length = min(len(reference.ids), len(seen.ids))
    for step in range(length):
        if reference.ids[step] == seen.ids[step]:
            continue
        margin = min(_margin(reference, step), _margin(seen, step))
        where = f"token {step + 1} is {seen.ids[step]}, the reference has {reference.ids[step]}"
        if margin < NEAR_TIE:
            return Verdict(
                "unknown",
                f"{step} tokens matched the reference; {where}, a near tie of {margin:.3f} logits",
            )
        return Verdict("no", f"{where}, and neither was a near tie ({margin:.3f} logits)")
    if len(reference.ids) != len(seen.ids):
        return Verdict("no", f"{len(seen.ids)} tokens, the reference has {len(reference.ids)}")
    if not length:
        return Verdict("unknown", "the probe gave no tokens to compare")
    return Verdict("yes", f"{length} greedy tokens matched the reference")


def _margin(of: Continuation, step: int) -> float:
    margins: Sequence[float] = of.margins
    return margins[step] if step < len(margins) else 0.0
