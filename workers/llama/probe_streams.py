"""Whether sessions can share a batch on the loaded model, tried once, and what neighbours change.

Leaves no context behind. Knows no sessions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import InsufficientMemory, InvalidRequest
from modeld.workers.batch_probe import STREAMS, Shared, compared
from modeld.workers.llama.context import LlamaContext, ModelTraits
from modeld.workers.llama.probe import MAX_PROBED_BYTES
from modeld.workers.llama.streams import LlamaStreams
from modeld.workers.llama.tokenizer import LlamaTokenizer

_WINDOW = 256  # tokens
# Of the prompts tried, in tokens: where routines differ by the number of rows, the first shows it.
_LENGTHS = (2, 3, 2, 2)

MakeStreams = Callable[[int, int, bool], LlamaStreams]  # streams, window, company


def why_not_shared(traits: ModelTraits, *, flash_attn: bool) -> str:
    """Why this model's sessions get contexts of their own only; "" where they can share one."""
    if traits.recurrent:
        return "a recurrent state can't be evaluated in parts beside others"
    if traits.window_tokens:
        return "the cells of a sliding window are kept by one sequence"
    if flash_attn:
        return "flash attention is on, with which results depend on the shape of a batch"
    return ""


def shared(
    make: MakeStreams,
    alone: Callable[[int], LlamaContext],
    traits: ModelTraits,
    tokenizer: LlamaTokenizer,
    facts: ModelFacts,
    *,
    flash_attn: bool,
) -> Shared:
    """``make`` and ``alone`` make what sessions would get. Raises SessionFatal where using it
    fails: then the model can't be served.
    """
    if why := why_not_shared(traits, flash_attn=flash_attn):
        return Shared(f"no: {why}")
    if facts.weights_bytes > MAX_PROBED_BYTES:
        return Shared(
            "unknown: served, and whether neighbours change a stream's results was not tried while "
            f"loading {facts.weights_bytes} bytes of weights",
            company=True,
            served=True,
        )
    window = min(_WINDOW, facts.model_max or _WINDOW)
    try:
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(contextlib.closing(alone(window)))
            batch = stack.enter_context(contextlib.closing(make(STREAMS, window, False)))
            return compared(own, batch, tokenizer.vocab_size, _LENGTHS)
    except (InsufficientMemory, InvalidRequest) as error:
        return Shared(f"unknown: not tried at load: {error.message}", company=True, served=True)
