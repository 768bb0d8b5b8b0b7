"""Random-weight models whose KV weighs something: many heads and layers, few other weights.

Of the families of ``tiny_models`` and in the same way; tens of MiB of KV at some thousand tokens,
a file of a few MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.support import tiny_models
from tests.support.tiny_models import _Model as Model

CONTEXT = 16384  # tokens
WIDTH, LENGTH, INNER = 64, 32, 128


class _Deep(Model):
    def __init__(self, path: Path, architecture: str, *, blocks: int, heads: int, seed: int):
        usual = tiny_models.CONTEXT
        tiny_models.CONTEXT = CONTEXT
        try:
            super().__init__(path, architecture, embedding=WIDTH, blocks=blocks, seed=seed)
        finally:
            tiny_models.CONTEXT = usual
        self.writer.add_feed_forward_length(INNER)
        self.writer.add_head_count(heads)
        self.writer.add_key_length(LENGTH)
        self.writer.add_value_length(LENGTH)


def llama(path: Path) -> Path:
    """Twelve layers of eight heads, each with KV of its own: 12 KiB a token."""
    model = _Deep(path, "llama", blocks=12, heads=8, seed=11)
    model.writer.add_head_count_kv(8)
    model.writer.add_rope_dimension_count(LENGTH)
    model.ends()
    model.attention(8, 8, LENGTH, INNER)
    return model.write()


def qwen2(path: Path) -> Path:
    """Sixteen layers of six heads that share three: 6 KiB a token."""
    model = _Deep(path, "qwen2", blocks=16, heads=6, seed=12)
    model.writer.add_head_count_kv(3)
    model.ends()
    model.attention(6, 3, LENGTH, INNER)
    return model.write()


def gemma2(path: Path) -> Path:
    """Twelve layers, every other one with a window of 512 tokens: 6 KiB a token beyond it."""
    model = _windowed(path, "gemma2", blocks=12, heads=8, window=512, seed=13)
    for block in range(model.blocks):
        model.constant(f"blk.{block}.post_attention_norm.weight", 1, WIDTH)
        model.constant(f"blk.{block}.post_ffw_norm.weight", 1, WIDTH)
    return model.write()


def gemma3(path: Path) -> Path:
    """Eighteen layers, every sixth of which attends everything: 3 KiB a token beyond 256."""
    model = _windowed(path, "gemma3", blocks=18, heads=8, window=256, seed=14)
    for block in range(model.blocks):
        for norm, width in (
            ("attn_q_norm", LENGTH),
            ("attn_k_norm", LENGTH),
            ("post_attention_norm", WIDTH),
            ("post_ffw_norm", WIDTH),
        ):
            model.constant(f"blk.{block}.{norm}.weight", 1, width)
    return model.write()


def _windowed(
    path: Path, architecture: str, *, blocks: int, heads: int, window: int, seed: int
) -> _Deep:
    model = _Deep(path, architecture, blocks=blocks, heads=heads, seed=seed)
    model.writer.add_head_count_kv(heads)
    model.writer.add_sliding_window(window)
    model.writer.add_rope_freq_base(1000000.0)
    model.ends(scale=0.3, head=False)
    model.attention(heads, heads, LENGTH, INNER)
    return model


def jamba(path: Path) -> Path:
    """Fourteen layers: every other one attends, with 7 KiB a token, and the rest keep a state."""
    sizes = 128, 4, 16, 4
    kv_heads = [0, 8] * 7
    model = _Deep(path, "jamba", blocks=len(kv_heads), heads=8, seed=15)
    model.writer.add_head_count_kv(kv_heads)
    model.ssm_settings(*sizes)
    model.ends()
    for block, heads in enumerate(kv_heads):
        if heads:
            model.attention_block(block, 8, heads, LENGTH)
        else:
            model.mamba(block, *sizes)
            for norm, width in (("dt", 4), ("b", 16), ("c", 16)):
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
