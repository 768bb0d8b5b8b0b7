"""Constant tables: the GGUF format's types, and what the engine knows of model families by name.

Knows no file. Tensor types follow ggml's type traits (``ggml/src/ggml.c``); a test compares them
with the ``gguf`` package. Families follow llama.cpp as llama-cpp-python 0.3.36 vendors it; each row
names its source below ``src/``.
"""

from __future__ import annotations

from typing import NamedTuple


class TensorType(NamedTuple):
    name: str
    block: int  # elements a block
    block_bytes: int


# ggml type number → its traits.
TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}

# general.file_type (llama_ftype) → the quantization's usual name.
FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
}

POOLING = {0: "", 1: "mean", 2: "cls", 3: "last", 4: "rank"}  # llama_pooling_type


class WindowFamily(NamedTuple):
    """How the engine tells which layers of a family attend a window only.

    ``period`` n: of each n layers in a row, one attends everything, the last one (the first one
    if ``dense_first``); 0: there is no rule, the file must have the list; 1: all attend everything.
    """

    source: str
    period: int = 0
    dense_first: bool = False
    scalar: bool = True  # a number under sliding_window_pattern replaces the period
    default_window: int = 0  # tokens, where the file declares none
    fixed_window: int = 0  # tokens, whatever the file declares above 0
    blocks: int = 0  # only models of this many blocks; 0: all
    all_attention: bool = False  # every layer with attention is windowed


# Families whose loaders read a window (load_swa_pattern, set_swa_pattern, is_swa_impl). A list
# under sliding_window_pattern wins over the period, except where that isn't read at all.
WINDOWS: dict[str, WindowFamily] = {
    "afmoe": WindowFamily("models/afmoe.cpp", 4),
    "cohere2": WindowFamily("models/cohere2.cpp", 4),
    "cohere2moe": WindowFamily("models/cohere2moe.cpp", 4, dense_first=True),
    "dflash": WindowFamily("models/dflash.cpp", scalar=False),
    "dots3note": WindowFamily("models/dots3note.cpp", scalar=False),
    "exaone-moe": WindowFamily("models/exaone-moe.cpp", 4, default_window=128),
    "exaone4": WindowFamily("models/exaone4.cpp", 4, default_window=4096, blocks=64),
    "gemma-embedding": WindowFamily("models/gemma-embedding.cpp", 6),
    "gemma2": WindowFamily("models/gemma2.cpp", 2, default_window=4096),
    "gemma3": WindowFamily("models/gemma3.cpp", 6),
    "gemma3n": WindowFamily("models/gemma3n.cpp", 5),
    "gemma4": WindowFamily("models/gemma4.cpp", scalar=False),
    "gemma4-assistant": WindowFamily("models/gemma4-assistant.cpp", scalar=False),
    "gpt-oss": WindowFamily("models/openai-moe.cpp", 2),
    "granite_swa": WindowFamily("models/granite-swa.cpp", scalar=False),
    "laguna": WindowFamily("models/laguna.cpp", 4, dense_first=True),
    "lfm2": WindowFamily("models/lfm2.cpp", all_attention=True),
    "llama4": WindowFamily("models/llama4.cpp", 4, default_window=8192, fixed_window=8192),
    "maple": WindowFamily("models/maple.cpp", scalar=False),
    "mellum": WindowFamily("models/mellum.cpp", 4),
    "mimo2": WindowFamily("models/mimo2.cpp", scalar=False),
    "modern-bert": WindowFamily("models/modern-bert.cpp", 3, dense_first=True),
    "muse-glimmer": WindowFamily("models/muse-glimmer.cpp", 4),
    "olmo2": WindowFamily("models/olmo2.cpp", 4),
    "phi3": WindowFamily("models/phi3.cpp (windows are switched off)", 1, scalar=False),
    "phimoe": WindowFamily("models/phimoe.cpp (windows are not read)", 1, scalar=False),
    "plamo3": WindowFamily("models/plamo3.cpp", 8),
    "smallthinker": WindowFamily("models/smallthinker.cpp", 4, dense_first=True, fixed_window=4096),
    "spark2_5": WindowFamily("models/spark2-5.cpp", scalar=False),
    "step35": WindowFamily("models/step35.cpp", scalar=False),
}


class RecurrentFamily(NamedTuple):
    """Which layers of a family keep a recurrent state, and by which sizes.

    ``layers``: ``all``; ``kv0`` those without KV heads; ``nemotron`` those with neither KV heads
    nor a feed-forward part; ``interval`` all but each n-th; ``both`` all, beside their KV.
    ``state``: the branch of llama_hparams::n_embd_r and n_embd_s that applies.
    """

    source: str
    layers: str
    state: str  # wkv, shortconv, kda, linear, ssm, or ssm1 (without groups)
    interval: int = 0  # where the file has no full_attention_interval
    trunk_only: bool = False  # blocks that predict further tokens hold no KV


# llm_arch_is_recurrent and llm_arch_is_hybrid in llama-arch.cpp; layer filters in
# llama_model::create_memory (llama-model.cpp).
RECURRENT: dict[str, RecurrentFamily] = {
    "arwkv7": RecurrentFamily("models/arwkv7.cpp", "all", "wkv"),
    "bailingmoe3": RecurrentFamily("models/bailingmoe3.cpp", "kv0", "kda"),
    "falcon-h1": RecurrentFamily("models/falcon-h1.cpp", "both", "ssm"),
    "glm5-next": RecurrentFamily("models/glm5-next.cpp", "kv0", "kda", trunk_only=True),
    "granitehybrid": RecurrentFamily("models/granite-hybrid.cpp", "kv0", "ssm"),
    "jamba": RecurrentFamily("models/jamba.cpp", "kv0", "ssm1"),
    "kimi-k3": RecurrentFamily("models/kimi-k3.cpp", "kv0", "kda"),
    "kimi-linear": RecurrentFamily("models/kimi-linear.cpp", "kv0", "kda"),
    "lfm2": RecurrentFamily("models/lfm2.cpp", "kv0", "shortconv"),
    "lfm2moe": RecurrentFamily("models/lfm2moe.cpp", "kv0", "shortconv"),
    "mamba": RecurrentFamily("models/mamba.cpp", "all", "ssm1"),
    "mamba2": RecurrentFamily("models/mamba2.cpp", "all", "ssm"),
    "minimax-01": RecurrentFamily("models/minimax-01.cpp", "interval", "linear", 8, True),
    "nemotron_h": RecurrentFamily("models/nemotron-h.cpp", "nemotron", "ssm"),
    "nemotron_h_moe": RecurrentFamily("models/nemotron-h.cpp", "nemotron", "ssm"),
    "plamo2": RecurrentFamily("models/plamo2.cpp", "kv0", "ssm"),
    "qwen35": RecurrentFamily("models/qwen35.cpp", "interval", "ssm", 4, True),
    "qwen35moe": RecurrentFamily("models/qwen35moe.cpp", "interval", "ssm", 4, True),
    "qwen3next": RecurrentFamily("models/qwen3next.cpp", "interval", "ssm", 4, True),
    "qwen4exp": RecurrentFamily("models/qwen4exp.cpp", "interval", "ssm", 4, True),
    "rwkv6": RecurrentFamily("models/rwkv6.cpp", "all", "wkv"),
    "rwkv6qwen2": RecurrentFamily("models/rwkv6qwen2.cpp", "all", "wkv"),
    "rwkv7": RecurrentFamily("models/rwkv7.cpp", "all", "wkv"),
}

# Families that get no memory in llama_model::create_memory: encoders and diffusion models.
MEMORYLESS = frozenset(
    {"bert", "dream", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llada"}
    | {"llada-moe", "modern-bert", "neo-bert", "nomic-bert", "nomic-bert-moe", "rnd1"}
    | {"wavtokenizer-dec"}
)

# Families whose loaders read attention.key_length_mla and value_length_mla: with both, a layer
# keeps keys only (llama_hparams::is_mla, llama-kv-cache.cpp).
LATENT = frozenset(
    {"bailingmoe3", "deepseek2", "deepseek32", "dots3note", "glm-dsa", "glm5-next", "hy_v4"}
    | {"kimi-k3", "kimi-linear", "mistral4"}
)

# Families with a second cache of indexer keys, one head wide, for sparse attention
# (llama-kv-cache-dsa.cpp, -dsa-iswa.cpp, -msa.cpp, llama-memory-hybrid-idx.cpp).
INDEXED = frozenset(
    {"deepseek32", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "minimax-m3", "qwen4exp"}
)

# gemma3n: hparams.n_layer_kv_from_start (models/gemma3n.cpp).
LAYERS_WITH_OWN_KV = {"gemma3n": 20}

# Tensors that stay with the input or go to the first block, by llm_tensor_infos in llama-arch.cpp.
# Whatever else has no block's number goes with the output, which is one more layer.
INPUT_TENSORS = frozenset(
    {"token_embd", "position_embd", "token_types", "per_layer_token_embd"}
    | {"masked_embd_centroids", "masked_embd_ordering"}
)
FIRST_BLOCK_TENSORS = frozenset(
    {"token_embd_norm", "rope_freqs", "rope_factors_long", "rope_factors_short", "conv1d"}
    | {"hrm.z_l_init", "per_layer_model_proj", "per_layer_proj_norm", "nextn.pre_projection"}
)
# Where token_embd_norm is the output's norm (LLM_TENSOR_OUTPUT_NORM_LFM2).
EMBEDDING_NORM_IS_OUTPUTS = frozenset({"lfm2", "lfm2moe"})
# Families without a head: their token embedding is not copied to the output (models/*.cpp).
HEADLESS = frozenset(
    {"bert", "clip", "eurobert", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert"}
    | {"nomic-bert", "nomic-bert-moe", "wavtokenizer-dec"}
)

# Vocabularies and pre-tokenizers with which the engine adds a BOS when the file doesn't say.
ADD_BOS_VOCABULARIES = frozenset({"llama", "bert"})
ADD_BOS_PRE_TOKENIZERS = frozenset(
    {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"}
)
