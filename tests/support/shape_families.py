"""Shapes of published models whose tensors follow rules of their own: windows, experts, latent
rows, heads that differ. Sizes follow the models' public configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from tests.support.shape_parts import Shape

Maker = Callable[[Path], Path]


def phi3_mini(path: Path) -> Path:
    """Fused query, key and value; declares a window that the engine turns off."""
    shape = Shape(
        path, "phi3", blocks=32, width=3072, context=4096, heads=32, kv_heads=32, feed_forward=8192
    )
    shape.set(rope__dimension_count=96, attention__sliding_window=2047)
    shape.ends(32064, tied=False)
    for block in range(32):
        shape.attention(block, 32, 32, fused=True)
        shape.norms(block, "ffn_norm")
        shape.matrix(block, "ffn_up", 3072, 2 * 8192)
        shape.matrix(block, "ffn_down", 8192, 3072)
    return shape.write()


def gemma3n_e4b(path: Path) -> Path:
    """Layers from the twentieth on reuse the KV of earlier ones."""
    blocks, width, inner, vocabulary, side = 35, 2048, 16384, 262144, 256
    shape = Shape(
        path,
        "gemma3n",
        blocks=blocks,
        width=width,
        context=32768,
        heads=8,
        kv_heads=2,
        length=256,
        feed_forward=inner,
        attention__sliding_window=512,
        attention__sliding_window_pattern=[block % 5 < 4 for block in range(blocks)],
        attention__shared_kv_layers=15,
        embedding_length_per_layer_input=side,
        altup__active_idx=0,
        altup__num_inputs=4,
    )
    shape.ends(vocabulary, tied=True)
    for name in ("altup_proj", "altup_unembd_proj"):
        shape.tensor(f"{name}.weight", width, width, 3)
    shape.tensor("per_layer_token_embd.weight", side * blocks, vocabulary)
    shape.tensor("per_layer_model_proj.weight", width, side * blocks)
    shape.tensor("per_layer_proj_norm.weight", side)
    for block in range(blocks):
        shape.attention(block, 8, 2, head_norms=True)
        shape.feed_forward(block, inner)
        shape.norms(block, "post_attention_norm", "post_ffw_norm", "post_norm")
        shape.norms(block, "altup_correct_scale", "altup_router_norm", "laurel_post_norm")
        shape.matrix(block, "inp_gate", width, side)
        shape.matrix(block, "proj", side, width)
        shape.matrix(block, "altup_correct_coef", 4, 4, type=Type.F32)
        shape.matrix(block, "altup_predict_coef", 4, 16, type=Type.F32)
        shape.matrix(block, "altup_router", width, 4)
        shape.matrix(block, "laurel_l", width, 64)
        shape.matrix(block, "laurel_r", 64, width)
    return shape.write()


def gemma4(path: Path) -> Path:
    """Full layers with heads twice as long as the windowed ones; the last ones reuse KV."""
    blocks, width, inner, vocabulary, side, shared = 35, 1536, 6144, 262144, 256, 20
    windowed = [block % 5 < 4 for block in range(blocks)]
    shape = Shape(
        path,
        "gemma4",
        blocks=blocks,
        width=width,
        context=131072,
        heads=8,
        kv_heads=1,
        length=512,
        feed_forward=inner,
        attention__key_length_swa=256,
        attention__value_length_swa=256,
        rope__dimension_count=512,
        rope__dimension_count_swa=256,
        attention__sliding_window=512,
        attention__sliding_window_pattern=windowed,
        attention__shared_kv_layers=shared,
        embedding_length_per_layer_input=side,
    )
    shape.ends(vocabulary, tied=True)
    shape.tensor("rope_freqs.weight", 256)
    shape.tensor("per_layer_token_embd.weight", side * blocks, vocabulary)
    shape.tensor("per_layer_model_proj.weight", width, side * blocks)
    shape.tensor("per_layer_proj_norm.weight", side)
    for block, local in enumerate(windowed):
        shape.attention(block, 8, 1, head_norms=True, length=256 if local else 512)
        shape.feed_forward(block, inner)
        shape.norms(block, "post_attention_norm", "post_ffw_norm", "post_norm")
        shape.matrix(block, "inp_gate", width, side)
        shape.matrix(block, "proj", side, width)
    return shape.write()


def gpt_oss_20b(path: Path) -> Path:
    width, heads, kv_heads, count = 2880, 64, 8, 32
    shape = Shape(
        path,
        "gpt-oss",
        blocks=24,
        width=width,
        context=131072,
        heads=heads,
        kv_heads=kv_heads,
        length=64,
        feed_forward=2880,
        expert_feed_forward_length=2880,
        expert_count=count,
        expert_used_count=4,
        attention__sliding_window=128,
        rope__dimension_count=64,
    )
    shape.ends(201088, tied=False)
    for block in range(24):
        shape.attention(block, heads, kv_heads, bias=True)
        shape.bias(block, "attn_output", width)
        shape.norms(block, "attn_sinks", width=heads)
        shape.experts(block, count, 2880, norm="post_attention_norm", type=Type.MXFP4)
        shape.bias(block, "ffn_gate_inp", count)
        for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
            shape.bias(block, name, 2880, count)
    return shape.write()


def deepseek2(latent: bool) -> Maker:
    """With the split up-projections the engine keeps one latent row a token; files from before
    them make it keep whole keys and values, of different lengths.
    """
    width, heads, rank, rope, key, value = 2048, 16, 512, 64, 192, 128

    def write(path: Path) -> Path:
        shape = Shape(
            path,
            "deepseek2",
            blocks=27,
            width=width,
            context=163840,
            heads=heads,
            kv_heads=1 if latent else heads,
            feed_forward=10944,
            attention__key_length=rank + rope if latent else key,
            attention__value_length=rank if latent else value,
            attention__kv_lora_rank=rank,
            rope__dimension_count=rope,
            leading_dense_block_count=1,
            expert_count=64,
            expert_used_count=6,
            expert_shared_count=2,
            expert_feed_forward_length=1408,
        )
        if latent:
            shape.set(attention__key_length_mla=key, attention__value_length_mla=value)
        shape.ends(102400, tied=False)
        for block in range(27):
            shape.norms(block, "attn_norm")
            shape.norms(block, "attn_kv_a_norm", width=rank)
            shape.matrix(block, "attn_q", width, heads * key)
            shape.matrix(block, "attn_kv_a_mqa", width, rank + rope)
            if latent:
                shape.matrix(block, "attn_k_b", key - rope, rank, heads)
                shape.matrix(block, "attn_v_b", rank, value, heads)
            else:
                shape.matrix(block, "attn_kv_b", rank, heads * (key - rope + value))
            shape.matrix(block, "attn_output", heads * value, width)
            if block:
                shape.experts(block, 64, 1408, shared=2 * 1408)
            else:
                shape.feed_forward(block, 10944)
        return shape.write()

    return write


def openelm_270m(path: Path) -> Path:
    """Head counts and feed-forward widths that grow from layer to layer."""
    kv_heads = [3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 5, 5, 5, 5]
    heads = [4 * count for count in kv_heads]
    inner = [768 + 256 * block for block in range(16)]
    shape = Shape(
        path,
        "openelm",
        blocks=16,
        width=1280,
        context=2048,
        heads=heads,
        kv_heads=kv_heads,
        length=64,
        feed_forward=inner,
        rope__dimension_count=64,
    )
    shape.ends(32000, tied=True)
    for block in range(16):
        shape.attention(block, heads[block], kv_heads[block], fused=True, head_norms=True)
        shape.feed_forward(block, inner[block])
    return shape.write()


def bge_small(path: Path) -> Path:
    """An encoder: no KV cache."""
    width, inner = 384, 1536
    shape = Shape(
        path, "bert", blocks=12, width=width, context=512, heads=12, kv_heads=12, feed_forward=inner
    )
    shape.set(attention__layer_norm_epsilon=1e-12, attention__causal=False, pooling_type=2)
    shape.token_kinds(2)
    shape.vocabulary(30522)
    shape.tensor("token_embd.weight", width, 30522)
    shape.tensor("token_types.weight", width, 2, type=Type.F32)
    shape.tensor("position_embd.weight", width, 512, type=Type.F32)
    for part in ("weight", "bias"):
        shape.tensor(f"token_embd_norm.{part}", width, type=Type.F32)
    for block in range(12):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shape.matrix(block, name, width, width)
            shape.bias(block, name, width)
        shape.matrix(block, "ffn_up", width, inner)
        shape.bias(block, "ffn_up", inner)
        shape.matrix(block, "ffn_down", inner, width)
        shape.bias(block, "ffn_down", width)
        for name in ("attn_output_norm", "layer_output_norm"):
            shape.norms(block, name)
            shape.bias(block, name, width)
    return shape.write()
