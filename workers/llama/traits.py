"""What the engine read from a model's file, and whether it can generate with it.

Questions to a model handle only; nothing is evaluated.
"""

from __future__ import annotations

from typing import Any

from modeld.shared.gguf_header import GgufHeader
from modeld.workers.llama.native import llama

_VOCABULARY_NONE = 0


def engine_traits(model: Any) -> dict[str, int]:
    """Name → number, to be held against the file's facts. Heads are those of the first layer;
    ``sliding_window`` and ``train_context`` are tokens, 0 where there is none.
    """
    return {
        "layers": llama.llama_model_n_layer(model),
        "train_context": llama.llama_model_n_ctx_train(model),
        "sliding_window": llama.llama_model_n_swa(model),
        "embedding_length": llama.llama_model_n_embd(model),
        "heads": llama.llama_model_n_head(model),
        "kv_heads": llama.llama_model_n_head_kv(model),
        "vocabulary": llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)),
        "recurrent": int(llama.llama_model_is_recurrent(model)),
        "hybrid": int(llama.llama_model_is_hybrid(model)),
    }


def why_not_generating(model: Any, header: GgufHeader) -> str:
    """Why the model can't be served for generation; "" if it can."""
    if llama.llama_vocab_type(llama.llama_model_get_vocab(model)) == _VOCABULARY_NONE:
        return "it has no vocabulary"
    if llama.llama_model_has_encoder(model) or not llama.llama_model_has_decoder(model):
        return "it has an encoder"
    if llama.llama_model_is_diffusion(model):
        return "it generates by diffusion"
    if header.metadata.get(header.own("attention.causal")) is False:
        return "its attention isn't causal: it is an embedding model"
    return ""
