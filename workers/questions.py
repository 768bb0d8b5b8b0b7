"""What is asked of a loaded model or a session without any change: no KV is touched.

Short, and needing no engine batch. Knows no transport and no session's state beyond what it tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modeld.shared.errors import InvalidRequest
from modeld.shared.messages import (
    DetokenizeOp,
    DetokenizeResult,
    ExplainResult,
    PromptIn,
    RenderOp,
    RenderResult,
    SegmentIn,
    TokenizeOp,
    TokenizeResult,
)
from modeld.workers import eviction
from modeld.workers.session import COUNTERS, Session
from modeld.workers.splits import Controls, Part

if TYPE_CHECKING:
    from modeld.workers.engine import Tokenizer
    from modeld.workers.loaded_model import LoadedModel
    from modeld.workers.pool import ContextPool


def explain(session: Session, pool: ContextPool) -> ExplainResult:
    """What a session's context holds, and why."""
    parked, gone = eviction.standing(session, pool, session.length)
    return ExplainResult(
        resident=session.logical,
        available=session.available,
        retained=session.retained,
        seen_tokens=session.seen_tokens,
        segments=session.segments(),
        blocks=eviction.blocks(session, pool),
        counters={name: session.counters[name] for name in COUNTERS} | pool.counters(),
        turn_ids=list(session.turns),
        slot_cells=pool.slot_cells,
        reclaimable_tokens=pool.reclaimable_tokens,
        parked=parked,
        gone=gone,
    )


def tokenize(tokenizer: Tokenizer, op: TokenizeOp) -> TokenizeResult:
    """Raises InvalidRequest where a beginning-of-text token is asked for that there isn't."""
    ids: list[int] = []
    if op.add_bos:
        if tokenizer.bos is None:
            raise InvalidRequest.of(
                "add_bos", op.add_bos, "false", "The model has no beginning-of-text token."
            )
        ids.append(tokenizer.bos)
    parts = [Part(op.text, None)]
    if op.parse_special:
        controls = Controls(tokenizer.controls, tokenizer.strips_left, tokenizer.strips_right)
        parts = controls.split(op.text)
    for text, token in parts:
        ids += tokenizer.encode(text) if token is None else [token]
    return TokenizeResult(ids=ids, pieces=[tokenizer.piece(token) for token in ids])


def detokenize(tokenizer: Tokenizer, op: DetokenizeOp) -> DetokenizeResult:
    """Raises InvalidRequest for an id that the vocabulary hasn't."""
    for token in op.ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise InvalidRequest.of("token_ids", token, f"0 to {tokenizer.vocab_size - 1}")
    return DetokenizeResult(raw=b"".join(tokenizer.piece(token) for token in op.ids))


def render(model: LoadedModel, op: RenderOp) -> RenderResult:
    """Raises InvalidRequest where the model has no chat template, or the template refuses."""
    template = model.template
    if template is None:
        raise InvalidRequest.of(
            "messages", len(op.messages), "none", "The model has no chat template."
        )
    messages = [SegmentIn(message=message) for message in op.messages]
    suffix: PromptIn | None = None
    prefix = PromptIn(segments=messages, tools=op.tools)
    if op.add_generation_prompt:
        # All in the suffix: there is no boundary at which the two could merge.
        prefix, suffix = PromptIn(segments=[], tools=op.tools), PromptIn(segments=messages)
    assembled = model.assembler("chat").assemble(prefix, suffix, {})
    text = assembled.text
    if not assembled.images:
        text = template.render(op.messages, op.tools, op.add_generation_prompt)
    return RenderResult(text=text, template_digest=template.digest, ids=assembled.tokens)
