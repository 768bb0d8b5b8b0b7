"""Shapes of published models as GGUF files without data: what an engine sees before it reads
weights. Sizes follow the models' public configurations; token texts and templates are made up.

``make(name, folder)`` writes one in some tens of milliseconds and some megabytes of disk.
"""

from __future__ import annotations

from pathlib import Path

from tests.support import shape_families as families
from tests.support import shape_recurrent as recurrent
from tests.support.hollow_gguf import Setting
from tests.support.shape_families import Maker
from tests.support.shape_parts import Shape


def dense(
    architecture: str,
    *,
    blocks: int,
    width: int,
    context: int,
    heads: int,
    kv_heads: int,
    feed_forward: int,
    vocabulary: int,
    tied: bool,
    length: int = 0,
    bias: bool = False,
    head_norms: bool = False,
    post_norms: bool = False,
    experts: tuple[int, int, int] = (0, 0, 0),  # how many, how wide each, how wide the shared
    parallel: bool = False,  # attention and feed-forward share a norm
    frequencies: bool = False,
    **settings: Setting,
) -> Maker:
    """Families that differ from Llama in a few tensors."""

    def write(path: Path) -> Path:
        shape = Shape(
            path,
            architecture,
            blocks=blocks,
            width=width,
            context=context,
            heads=heads,
            kv_heads=kv_heads,
            length=length,
            feed_forward=feed_forward,
            **settings,
        )
        shape.set(rope__dimension_count=shape.length, rope__freq_base=500000.0)
        shape.ends(vocabulary, tied=tied)
        if frequencies:
            shape.tensor("rope_freqs.weight", shape.length // 2)
        for block in range(blocks):
            shape.attention(block, heads, kv_heads, bias=bias, head_norms=head_norms)
            if experts[0]:
                shape.experts(block, *experts[:2], shared=experts[2])
            else:
                shape.feed_forward(block, feed_forward, norm="" if parallel else "ffn_norm")
            if post_norms:
                shape.norms(block, "post_attention_norm", "post_ffw_norm")
        return shape.write()

    return write


SHAPES: dict[str, Maker] = {
    "smollm2-135m": dense(
        "llama",
        blocks=30,
        width=576,
        context=8192,
        heads=9,
        kv_heads=3,
        feed_forward=1536,
        vocabulary=49152,
        tied=True,
    ),
    "tinyllama-1.1b": dense(
        "llama",
        blocks=22,
        width=2048,
        context=2048,
        heads=32,
        kv_heads=4,
        feed_forward=5632,
        vocabulary=32000,
        tied=False,
    ),
    "llama-3.2-1b": dense(
        "llama",
        blocks=16,
        width=2048,
        context=131072,
        heads=32,
        kv_heads=8,
        feed_forward=8192,
        vocabulary=128256,
        tied=True,
        frequencies=True,
    ),
    "llama-3.1-8b": dense(
        "llama",
        blocks=32,
        width=4096,
        context=131072,
        heads=32,
        kv_heads=8,
        feed_forward=14336,
        vocabulary=128256,
        tied=False,
        frequencies=True,
    ),
    "mistral-7b": dense(
        "llama",
        blocks=32,
        width=4096,
        context=32768,
        heads=32,
        kv_heads=8,
        feed_forward=14336,
        vocabulary=32768,
        tied=False,
    ),
    "mixtral-8x7b": dense(
        "llama",
        blocks=32,
        width=4096,
        context=32768,
        heads=32,
        kv_heads=8,
        feed_forward=14336,
        vocabulary=32000,
        tied=False,
        experts=(8, 14336, 0),
        expert_count=8,
        expert_used_count=2,
    ),
    "llama-4-scout": dense(
        "llama4",
        blocks=48,
        width=5120,
        context=10485760,
        heads=40,
        kv_heads=8,
        feed_forward=16384,
        vocabulary=202048,
        tied=False,
        experts=(16, 8192, 8192),
        expert_count=16,
        expert_used_count=1,
        expert_feed_forward_length=8192,
        interleave_moe_layer_step=1,
        attention__chunk_size=8192,
    ),
    "command-r7b": dense(
        "cohere2",
        blocks=32,
        width=4096,
        context=8192,
        heads=32,
        kv_heads=8,
        feed_forward=14336,
        vocabulary=256000,
        tied=True,
        parallel=True,
        attention__layer_norm_epsilon=1e-5,
        attention__sliding_window=4096,
        logit_scale=0.25,
    ),
    "qwen2.5-1.5b": dense(
        "qwen2",
        blocks=28,
        width=1536,
        context=32768,
        heads=12,
        kv_heads=2,
        feed_forward=8960,
        vocabulary=151936,
        tied=True,
        bias=True,
    ),
    "qwen3-4b": dense(
        "qwen3",
        blocks=36,
        width=2560,
        context=40960,
        heads=32,
        kv_heads=8,
        length=128,
        feed_forward=9728,
        vocabulary=151936,
        tied=True,
        head_norms=True,
    ),
    "qwen3-30b-a3b": dense(
        "qwen3moe",
        blocks=48,
        width=2048,
        context=40960,
        heads=32,
        kv_heads=4,
        length=128,
        feed_forward=6144,
        vocabulary=151936,
        tied=False,
        head_norms=True,
        experts=(128, 768, 0),
        expert_feed_forward_length=768,
        expert_count=128,
        expert_used_count=8,
    ),
    "gemma-2-9b": dense(
        "gemma2",
        blocks=42,
        width=3584,
        context=8192,
        heads=16,
        kv_heads=8,
        length=256,
        feed_forward=14336,
        vocabulary=256000,
        tied=True,
        post_norms=True,
        attention__sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    "gemma-3-4b": dense(
        "gemma3",
        blocks=34,
        width=2560,
        context=131072,
        heads=8,
        kv_heads=4,
        length=256,
        feed_forward=10240,
        vocabulary=262144,
        tied=True,
        head_norms=True,
        post_norms=True,
        attention__sliding_window=1024,
    ),
    "phi-3-mini": families.phi3_mini,
    "gemma-3n-e4b": families.gemma3n_e4b,
    "gemma-4-small": families.gemma4,
    "gpt-oss-20b": families.gpt_oss_20b,
    "deepseek-v2-lite": families.deepseek2(latent=True),
    "deepseek-v2-lite-whole": families.deepseek2(latent=False),
    "mamba-130m": recurrent.mamba_130m,
    "mamba2-780m": recurrent.mamba2_780m,
    "jamba-3b": recurrent.jamba_3b,
    "lfm2-1.2b": recurrent.lfm2_1b,
    "granite-4-tiny": recurrent.granite4_tiny,
    "qwen3-next-80b-a3b": recurrent.qwen3next_80b,
    "falcon-h1-0.5b": recurrent.falcon_h1_500m,
    "nemotron-h-4b": recurrent.nemotron_h,
    "rwkv7-1.5b": recurrent.rwkv7_1b5,
    "openelm-270m": families.openelm_270m,
    "bge-small": families.bge_small,
}


def make(name: str, folder: Path) -> Path:
    """Write the shape into ``folder``. Raises KeyError for a name that isn't in ``SHAPES``."""
    return SHAPES[name](folder / f"{name}.gguf")
