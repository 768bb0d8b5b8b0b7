"""Random-weight models whose KV weighs something: many heads and layers, few other weights.

Of the families of ``tiny_models`` and made in the same way; tens of MiB of KV at a thousand
tokens, in a file of some MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from tests.support import tiny_models
from tests.support.tiny_models import _Model as Model

CONTEXT = 16384  # tokens
LENGTH, INNER = 32, 128  # of a head, of the feed-forward part


def _deep(
    path: Path, architecture: str, *, blocks: int, heads: int, width: int, seed: int
) -> Model:
    with patch.object(tiny_models, "CONTEXT", CONTEXT):
        model = Model(path, architecture, embedding=width, blocks=blocks, seed=seed)
    model.writer.add_feed_forward_length(INNER)
    model.writer.add_head_count(heads)
    return model


def llama(path: Path) -> Path:
    """Twelve layers of eight heads, each with KV of its own: 12 KiB a token."""
    model = _deep(path, "llama", blocks=12, heads=8, width=8 * LENGTH, seed=11)
    model.writer.add_head_count_kv(8)
    model.writer.add_rope_dimension_count(LENGTH)
    model.ends()
    model.attention(8, 8, LENGTH, INNER)
    return model.write()


def qwen2(path: Path) -> Path:
    """Sixteen layers of six heads that share three: 6 KiB a token."""
    model = _deep(path, "qwen2", blocks=16, heads=6, width=6 * LENGTH, seed=12)
    model.writer.add_head_count_kv(3)
    model.ends()
    model.attention(6, 3, LENGTH, INNER)
    return model.write()


def _windowed(path: Path, architecture: str, *, blocks: int, window: int, seed: int) -> Model:
    model = _deep(path, architecture, blocks=blocks, heads=8, width=64, seed=seed)
    model.writer.add_head_count_kv(8)
    model.writer.add_key_length(LENGTH)
    model.writer.add_value_length(LENGTH)
    model.writer.add_sliding_window(window)
    model.writer.add_rope_freq_base(1000000.0)
    model.ends(scale=0.3, head=False)
    model.attention(8, 8, LENGTH, INNER)
    return model


def gemma2(path: Path) -> Path:
    """Twelve layers, every other one with a window of 256 tokens: 6 KiB a token beyond it."""
    model = _windowed(path, "gemma2", blocks=12, window=256, seed=13)
    for block in range(model.blocks):
        model.constant(f"blk.{block}.post_attention_norm.weight", 1, 64)
        model.constant(f"blk.{block}.post_ffw_norm.weight", 1, 64)
    return model.write()


def gemma3(path: Path) -> Path:
    """Eighteen layers, every sixth of which attends everything: 3 KiB a token beyond 256."""
    model = _windowed(path, "gemma3", blocks=18, window=256, seed=14)
    for block in range(model.blocks):
        for norm, width in (
            ("attn_q_norm", LENGTH),
            ("attn_k_norm", LENGTH),
            ("post_attention_norm", 64),
            ("post_ffw_norm", 64),
        ):
            model.constant(f"blk.{block}.{norm}.weight", 1, width)
    return model.write()


def jamba(path: Path) -> Path:
    """Twelve layers: every other one attends, with 6 KiB a token, and the rest keep a state."""
    sizes = 512, 4, 16, 16
    kv_heads = [0, 8] * 6
    model = _deep(path, "jamba", blocks=len(kv_heads), heads=8, width=8 * LENGTH, seed=15)
    model.writer.add_head_count_kv(kv_heads)
    model.ssm_settings(*sizes)
    model.ends()
    for block, heads in enumerate(kv_heads):
        if heads:
            model.attention_block(block, 8, heads, LENGTH)
        else:
            model.mamba(block, *sizes)
            for norm, width in (("dt", 16), ("b", 16), ("c", 16)):
                model.constant(f"blk.{block}.ssm_{norm}_norm.weight", 1, width)
        model.feed_forward(block, INNER)
    return model.write()


MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": llama,
    "qwen2": qwen2,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "jamba": jamba,
}
