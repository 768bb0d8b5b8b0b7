"""Tiny llama models with four-bit weights, in blocks written by hand: what no writer quantizes to.

Only the size of the numbers is chosen, the rest is random: every block has an offset of its own.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from numpy.typing import NDArray

from tests.support.tiny_models import CONTEXT, TEMPLATE, vocabulary

WIDTH, HEADS, KV_HEADS, LAYERS = 256, 4, 2, 2
_HEAD = WIDTH // HEADS
Raw = NDArray[np.uint8]
Q4_1, Q4_K = GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q4_K


def _half(value: float, blocks: int) -> Raw:
    return np.full((blocks, 1), value, np.float16).view(np.uint8)


def q4_1_blocks(blocks: int, scale: float, random: np.random.Generator) -> Raw:
    """Weights of about ``scale`` around zero."""
    steps = (random.uniform(0.1, 0.3, (blocks, 1)) * scale).astype(np.float16)
    least = (-steps * random.uniform(6, 9, (blocks, 1))).astype(np.float16)
    weights = random.integers(0, 256, (blocks, 16), dtype=np.uint8)
    return np.concatenate([steps.view(np.uint8), least.view(np.uint8), weights], axis=1)


def q4_k_blocks(blocks: int, scale: float, random: np.random.Generator) -> Raw:
    """Weights of about ``scale`` around zero."""
    step = scale * 0.2 / 48
    steps, offsets = random.integers(32, 64, (2, blocks, 8), dtype=np.uint8)
    low = (steps[:, :4] & 63) | (steps[:, 4:] >> 4 << 6)
    middle = (offsets[:, :4] & 63) | (offsets[:, 4:] >> 4 << 6)
    high = (steps[:, 4:] & 15) | ((offsets[:, 4:] & 15) << 4)
    weights = random.integers(0, 256, (blocks, 128), dtype=np.uint8)
    halves = _half(step, blocks), _half(7.5 * step, blocks)
    return np.concatenate([*halves, low, middle, high, weights], axis=1)


BLOCKS = {Q4_1: q4_1_blocks, Q4_K: q4_k_blocks}


def quantized(path: Path, kind: GGMLQuantizationType, *, seed: int = 1) -> Path:
    """A model whose matrices are all of ``kind``."""
    random = np.random.default_rng(seed)
    file_type = {Q4_1: gguf.LlamaFileType.MOSTLY_Q4_1, Q4_K: gguf.LlamaFileType.MOSTLY_Q4_K_M}
    writer = GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_file_type(int(file_type[kind]))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens, types, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def matrix(name: str, rows: int, scale: float) -> None:
        elements = gguf.GGML_QUANT_SIZES[kind][0]
        blocks = BLOCKS[kind](rows * WIDTH // elements, scale * WIDTH**-0.5, random)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, np.float32))

    matrix("token_embd.weight", len(tokens), WIDTH**0.5)
    norm("output_norm.weight")
    matrix("output.weight", len(tokens), 2)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        norm(block + "attn_norm.weight")
        matrix(block + "attn_q.weight", WIDTH, 1.5)
        matrix(block + "attn_k.weight", KV_HEADS * _HEAD, 1.5)
        matrix(block + "attn_v.weight", KV_HEADS * _HEAD, 1)
        matrix(block + "attn_output.weight", WIDTH, 1)
        norm(block + "ffn_norm.weight")
        for part in ("gate", "up", "down"):
            matrix(f"{block}ffn_{part}.weight", WIDTH, 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
