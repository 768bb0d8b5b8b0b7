"""The greedy probe: what a model answers to one fixed prompt, step by step.

Runs over the ``Engine`` protocol, in a context of its own that is closed again. Judges nothing:
whoever asked compares the ids and margins.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.errors import ModelLoadFailed, SessionFatal
from modeld.shared.messages import QualityOut
from modeld.workers.engine import Cancelled, Engine, ReportProgress, SelfSampling

if TYPE_CHECKING:
    from modeld.workers.engine import Logits

PROMPT = "The lighthouse stood on a rock far out in the sea. Every evening, when the sun went down,"
WINDOW = 256  # tokens
STEPS = 24  # tokens
KV_TYPE = "f16"
STAGE = "certifying"


def greedy_probe(
    engine: Engine, report: ReportProgress, cancelled: Cancelled, kv_type: str = KV_TYPE
) -> QualityOut | None:
    """Evaluate ``PROMPT`` and take the likeliest token ``STEPS`` times, ties to the lowest id.

    Ends early with an end-of-generation token, which is then the last of ``ids``. ``cancelled`` is
    polled between tokens and, where the engine can, inside a micro-batch. Raises ModelLoadFailed
    when the model doesn't compute or the probe is cancelled, InsufficientMemory when no context
    can be had. The same build, file and prompt give the same answer. None, since there is nothing
    to compare, where the engine samples by itself and gives no logits.
    """
    began_s = time.monotonic()
    report(STAGE, 0.0)
    tokenizer = engine.tokenizer
    prompt = tokenizer.encode(PROMPT)[: WINDOW - STEPS - 1]
    if tokenizer.add_bos and tokenizer.bos is not None:
        prompt.insert(0, tokenizer.bos)
    if not prompt:
        raise _failed("its tokenizer gives no token for plain English")
    ids: list[int] = []
    margins: list[float] = []
    with contextlib.closing(engine.new_context(WINDOW, kv_type, kv_type)) as context:
        if isinstance(context, SelfSampling):
            return None
        try:
            if context.evaluate(prompt, 0, cancelled=cancelled) < len(prompt):
                raise _cancelled()
            while True:
                token, margin = best(context.logits())
                ids.append(token)
                margins.append(margin)
                report(STAGE, len(ids) / STEPS)
                if len(ids) == STEPS or token in tokenizer.end_of_generation:
                    break
                if cancelled():
                    raise _cancelled()
                context.step(token, len(prompt) + len(ids) - 1)
        except SessionFatal as error:
            raise _failed(error.message) from None
    return QualityOut(
        prompt_ids=prompt, ids=ids, margins=margins, seconds=time.monotonic() - began_s
    )


def best(row: Logits) -> tuple[int, float]:
    """The id of the largest logit, the lowest of equals, and how far it is above the next one.

    Raises ModelLoadFailed where they aren't numbers.
    """
    token = int(row.argmax())
    first = float(row[token])
    if not math.isfinite(first):
        raise _failed("its logits are not finite")
    if len(row) < 2:
        return token, 0.0
    return token, first - float(np.partition(row, -2)[-2])


def _failed(why: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"The model loads but doesn't compute: {why}", metadata={"cause": "quality_probe"}
    )


def _cancelled() -> ModelLoadFailed:
    return ModelLoadFailed(
        "Loading was cancelled while the model was tried; nothing is loaded.",
        metadata={"cause": "cancelled"},
    )
