"""Shapes of published models with layers that keep a recurrent state, alone or among layers that
attend. Sizes follow the models' public configurations.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGMLQuantizationType as Type

from tests.support.shape_parts import Shape, at, ssm


def rwkv7_1b5(path: Path) -> Path:
    """Recurrent in every layer, by another rule than Mamba's."""
    width, inner = 2048, 8192
    ranks = {"decay": 96, "iclr": 96, "value_residual_mix": 64, "gate": 256}
    shape = Shape(path, "rwkv7", blocks=24, width=width, context=1048576, feed_forward=inner)
    shape.set(attention__layer_norm_epsilon=1e-5, wkv__head_size=64, token_shift_count=2)
    shape.set(**{f"attention__{name}_lora_rank": rank for name, rank in ranks.items()})
    shape.ends(65536, tied=False)
    for name in ("token_embd_norm.weight", "token_embd_norm.bias", "output_norm.bias"):
        shape.tensor(name, width, type=Type.F32)
    for block in range(24):
        for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            shape.norms(block, name)
            shape.bias(block, name, width)
        shape.norms(
            block, *(f"time_mix_{name}" for name in ("w0", "a0", "v0", "k_k", "k_a", "r_k"))
        )
        low = "iclr" if block == 0 else "value_residual_mix"
        for name, rank in (("w", "decay"), ("a", "iclr"), ("v", low), ("g", "gate")):
            shape.matrix(block, f"time_mix_{name}1", width, ranks[rank])
            shape.matrix(block, f"time_mix_{name}2", ranks[rank], width)
        shape.matrix(block, "time_mix_lerp_fused", width, 1, 1, 6, type=Type.F32)
        shape.matrix(block, "channel_mix_lerp_k", width, 1, 1, type=Type.F32)
        for name in ("key", "value", "receptance", "output"):
            shape.matrix(block, f"time_mix_{name}", width, width)
        shape.matrix(block, "channel_mix_key", width, inner)
        shape.matrix(block, "channel_mix_value", inner, width)
    return shape.write()


def mamba_130m(path: Path) -> Path:
    shape = Shape(path, "mamba", blocks=24, width=768, context=1048576)
    shape.set(**ssm(1536, 16, 48))
    shape.ends(50280, tied=True)
    for block in range(24):
        shape.mamba(block, 1536, 16, 48)
    return shape.write()


def mamba2_780m(path: Path) -> Path:
    shape = Shape(path, "mamba2", blocks=48, width=1536, context=1048576)
    shape.set(**ssm(3072, 128, 48, 1))
    shape.ends(50288, tied=True)
    for block in range(48):
        shape.norms(block, "attn_norm")
        shape.mamba2(block, 3072, 128, 48)
    return shape.write()


def jamba_3b(path: Path) -> Path:
    """Two attention layers among recurrent ones, told apart by their KV heads."""
    attended = (7, 21)
    shape = Shape(
        path,
        "jamba",
        blocks=28,
        width=2560,
        context=262144,
        heads=20,
        kv_heads=at(28, attended, 1),
        feed_forward=8192,
    )
    shape.set(**ssm(5120, 16, 160))
    shape.ends(65536, tied=True)
    for block in range(28):
        if block in attended:
            shape.attention(block, 20, 1)
        else:
            shape.mamba(block, 5120, 16, 160, norms=True)
        shape.feed_forward(block, 8192)
    return shape.write()


def lfm2_1b(path: Path) -> Path:
    """Short convolutions between attention layers."""
    attended = (2, 5, 8, 10, 12, 14)
    shape = Shape(
        path,
        "lfm2",
        blocks=16,
        width=2048,
        context=128000,
        heads=32,
        kv_heads=at(16, attended, 8),
        feed_forward=8192,
        shortconv__l_cache=3,
    )
    shape.ends(65536, tied=True, norm="token_embd_norm")
    for block in range(16):
        if block in attended:
            shape.attention(block, 32, 8, head_norms=True)
        else:
            shape.norms(block, "attn_norm")
            shape.matrix(block, "shortconv.conv", 3, 2048)
            shape.matrix(block, "shortconv.in_proj", 2048, 3 * 2048)
            shape.matrix(block, "shortconv.out_proj", 2048, 2048)
        shape.feed_forward(block, 8192)
    return shape.write()


def granite4_tiny(path: Path) -> Path:
    attended = (5, 15, 25, 35)
    shape = Shape(
        path,
        "granitehybrid",
        blocks=40,
        width=1536,
        context=131072,
        heads=12,
        kv_heads=at(40, attended, 4),
        feed_forward=512,
        expert_count=64,
        expert_used_count=6,
        expert_shared_feed_forward_length=1024,
        rope__dimension_count=128,
    )
    shape.set(**ssm(3072, 128, 48, 1))
    shape.ends(100352, tied=True)
    for block in range(40):
        if block in attended:
            shape.attention(block, 12, 4)
        else:
            shape.norms(block, "attn_norm")
            shape.mamba2(block, 3072, 128, 48)
        shape.experts(block, 64, 512, shared=1024)
    return shape.write()


def qwen3next_80b(path: Path) -> Path:
    """Every fourth layer attends, by the family's rule; the others keep a delta-net state."""
    width, key_heads, value_heads, state = 2048, 16, 32, 128
    keys, values = key_heads * state, value_heads * state
    shape = Shape(
        path,
        "qwen3next",
        blocks=48,
        width=width,
        context=262144,
        heads=16,
        kv_heads=2,
        length=256,
        feed_forward=5120,
        expert_feed_forward_length=512,
        expert_shared_feed_forward_length=512,
        expert_count=512,
        expert_used_count=10,
        rope__dimension_count=64,
    )
    shape.set(**ssm(values, state, value_heads, key_heads))
    shape.ends(151936, tied=False)
    for block in range(48):
        if block % 4 == 3:
            shape.attention(block, 16, 2, head_norms=True, gated=True)
        else:
            shape.norms(block, "attn_norm")
            shape.matrix(block, "attn_qkv", width, 2 * keys + values)
            shape.matrix(block, "attn_gate", width, values)
            shape.matrix(block, "ssm_conv1d", 4, 2 * keys + values)
            shape.bias(block, "ssm_dt", value_heads)
            shape.tensor(f"blk.{block}.ssm_a", value_heads)
            shape.matrix(block, "ssm_ba", width, 2 * value_heads)
            shape.norms(block, "ssm_norm", width=state)
            shape.matrix(block, "ssm_out", values, width)
        shape.experts(block, 512, 512, shared=512, norm="post_attention_norm")
        shape.norms(block, "ffn_gate_inp_shexp")
    return shape.write()


def falcon_h1_500m(path: Path) -> Path:
    """Attention and a recurrent state side by side in every layer."""
    shape = Shape(
        path,
        "falcon-h1",
        blocks=36,
        width=1024,
        context=16384,
        heads=8,
        kv_heads=2,
        length=64,
        feed_forward=2048,
        rope__dimension_count=64,
    )
    shape.set(**ssm(1536, 128, 24, 1))
    shape.ends(32784, tied=True)
    for block in range(36):
        shape.attention(block, 8, 2)
        shape.mamba2(block, 1536, 128, 24)
        shape.feed_forward(block, 2048, norm="")
        shape.tensor(f"blk.{block}.ffn_norm", 1024)
    return shape.write()


def nemotron_h(path: Path) -> Path:
    """Layers of one thing each: a recurrent state, attention, or a feed-forward and no memory."""
    kinds = ("M-" * 4 + "M*-M-") * 3
    blocks, inner = len(kinds), 12288
    shape = Shape(
        path,
        "nemotron_h",
        blocks=blocks,
        width=3136,
        context=8192,
        heads=32,
        kv_heads=at(blocks, [i for i, kind in enumerate(kinds) if kind == "*"], 8),
        length=128,
        feed_forward=at(blocks, [i for i, kind in enumerate(kinds) if kind == "-"], inner),
        attention__layer_norm_epsilon=1e-5,
        rope__dimension_count=128,
    )
    shape.set(**ssm(7168, 128, 112, 8))
    shape.ends(131072, tied=False)
    for block, kind in enumerate(kinds):
        if kind == "*":
            shape.attention(block, 32, 8)
            continue
        shape.norms(block, "attn_norm")
        if kind == "M":
            shape.mamba2(block, 7168, 128, 112, 8)
        else:
            shape.matrix(block, "ffn_up", 3136, inner)
            shape.matrix(block, "ffn_down", inner, 3136)
    return shape.write()
