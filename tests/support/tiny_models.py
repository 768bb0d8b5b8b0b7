"""Tiny random-weight GGUF files, made in milliseconds: a model of each kind that tests need.

Every maker takes the path to write and returns it. The vocabulary is a byte-level BPE of the 256
bytes, a few merges and chat control tokens.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFWriter

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
_WORDS = (" the", " a", "in", "er", "on", "he", "th", " t", "nd", "ing", "user", "assistant")
CONTEXT = 2048  # tokens


def _byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    letters = _byte_letters()
    tokens = [*CONTROLS, *letters]
    merges: list[str] = []
    for word in _WORDS:
        joined = letters[word.encode()[0]]
        for byte in word.encode()[1:]:
            pair = f"{joined} {letters[byte]}"
            joined += letters[byte]
            if pair not in merges:
                merges.append(pair)
            if joined not in tokens:
                tokens.append(joined)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    types = [control] * len(CONTROLS) + [normal] * (len(tokens) - len(CONTROLS))
    return tokens, types, merges


class _Model:
    """A GGUF being written: settings first, then random tensors from a seed."""

    def __init__(
        self,
        path: Path,
        architecture: str,
        *,
        embedding: int,
        blocks: int,
        seed: int,
        part_tensors: int = 0,
    ):
        """``part_tensors``: write a split set, with so many tensors in a part."""
        self.path, self.embedding, self.blocks = path, embedding, blocks
        self.writer = GGUFWriter(path, architecture, split_max_tensors=part_tensors)
        self._random = np.random.default_rng(seed)
        writer = self.writer
        writer.add_name(path.stem)
        writer.add_file_type(0)
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(embedding)
        writer.add_block_count(blocks)
        writer.add_layer_norm_rms_eps(1e-5)

    def vocabulary(self) -> int:
        tokens, types, merges = vocabulary()
        writer = self.writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(TEMPLATE)
        writer.add_vocab_size(len(tokens))
        return len(tokens)

    def matrix(self, name: str, *shape: int, scale: float | None = None) -> None:
        scale = scale if scale is not None else shape[-1] ** -0.5
        values = self._random.standard_normal(shape) * scale
        self.writer.add_tensor(name, values.astype(np.float32))

    def constant(self, name: str, value: float, *shape: int) -> None:
        self.writer.add_tensor(name, np.full(shape, value, dtype=np.float32))

    def attention(self, heads: int, kv_heads: int, length: int, feed_forward: int) -> None:
        for block in range(self.blocks):
            self.attention_block(block, heads, kv_heads, length)
            self.feed_forward(block, feed_forward)

    def attention_block(self, block: int, heads: int, kv_heads: int, length: int) -> None:
        name, width = f"blk.{block}.", self.embedding
        self.constant(name + "attn_norm.weight", 1, width)
        self.matrix(name + "attn_q.weight", heads * length, width, scale=1.5 * width**-0.5)
        self.matrix(name + "attn_k.weight", kv_heads * length, width, scale=1.5 * width**-0.5)
        self.matrix(name + "attn_v.weight", kv_heads * length, width)
        self.matrix(name + "attn_output.weight", width, heads * length)

    def feed_forward(self, block: int, inner: int) -> None:
        name, width = f"blk.{block}.", self.embedding
        self.constant(name + "ffn_norm.weight", 1, width)
        self.matrix(name + "ffn_gate.weight", inner, width)
        self.matrix(name + "ffn_up.weight", inner, width)
        self.matrix(name + "ffn_down.weight", width, inner)

    def mamba(self, block: int, inner: int, convolution: int, state: int, rank: int) -> None:
        name, width = f"blk.{block}.", self.embedding
        decay = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
        self.constant(name + "attn_norm.weight", 1, width)
        self.matrix(name + "ssm_in.weight", 2 * inner, width)
        self.matrix(name + "ssm_conv1d.weight", inner, convolution, scale=0.5)
        self.constant(name + "ssm_conv1d.bias", 0, inner)
        self.matrix(name + "ssm_x.weight", rank + 2 * state, inner)
        self.matrix(name + "ssm_dt.weight", inner, rank)
        self.constant(name + "ssm_dt.bias", 0, inner)
        self.writer.add_tensor(name + "ssm_a", decay)
        self.constant(name + "ssm_d", 1, inner)
        self.matrix(name + "ssm_out.weight", width, inner)

    def ssm_settings(self, inner: int, convolution: int, state: int, rank: int) -> None:
        self.writer.add_ssm_conv_kernel(convolution)
        self.writer.add_ssm_inner_size(inner)
        self.writer.add_ssm_state_size(state)
        self.writer.add_ssm_time_step_rank(rank)

    def ends(self, *, scale: float = 1.0, norm: float = 1.0, head: bool = True) -> None:
        size, width = self.vocabulary(), self.embedding
        self.matrix("token_embd.weight", size, width, scale=scale)
        self.constant("output_norm.weight", norm, width)
        if head:
            self.matrix("output.weight", size, width, scale=2 * width**-0.5)

    def write(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        if self.writer.split_max_tensors:
            return min(self.path.parent.glob(f"{self.path.stem}-00001-of-*.gguf"))
        return self.path


def llama(
    path: Path,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    architecture: str = "llama",
    seed: int = 1,
    norm: float = 1.0,
    part_tensors: int = 0,
) -> Path:
    """Two dense layers; heads of 64/``heads`` elements. ``norm`` scales the output.

    With ``part_tensors`` a split set beside ``path``, whose first part is answered.
    """
    model = _Model(path, architecture, embedding=64, blocks=2, seed=seed, part_tensors=part_tensors)
    length = 64 // heads
    model.writer.add_feed_forward_length(128)
    model.writer.add_head_count(heads)
    model.writer.add_head_count_kv(kv_heads)
    model.writer.add_rope_dimension_count(length)
    model.writer.add_rope_freq_base(10000.0)
    model.ends(norm=norm)
    model.attention(heads, kv_heads, length, 128)
    return model.write()


def qwen2(path: Path) -> Path:
    """Three dense layers whose heads of 32 elements hold whole blocks of quantised keys."""
    return _plain(path, "qwen2", blocks=3, length=32)


def _plain(path: Path, architecture: str, *, blocks: int, length: int) -> Path:
    model = _Model(path, architecture, embedding=64, blocks=blocks, seed=5)
    model.writer.add_feed_forward_length(128)
    model.writer.add_head_count(64 // length)
    model.writer.add_head_count_kv(1)
    model.ends()
    model.attention(64 // length, 1, length, 128)
    return model.write()


def _gemma(path: Path, architecture: str, *, blocks: int, window: int, kv_heads: int) -> _Model:
    seed = 2 if architecture == "gemma3" else 6
    model = _Model(path, architecture, embedding=64, blocks=blocks, seed=seed)
    model.writer.add_feed_forward_length(128)
    model.writer.add_head_count(4)
    model.writer.add_head_count_kv(kv_heads)
    model.writer.add_key_length(32)
    model.writer.add_value_length(32)
    model.writer.add_sliding_window(window)
    model.writer.add_rope_freq_base(1000000.0)
    model.ends(scale=0.3, head=False)
    model.attention(4, kv_heads, 32, 128)
    return model


def gemma2(path: Path, *, window: int = 96) -> Path:
    """Four layers: every other one with a sliding window."""
    model = _gemma(path, "gemma2", blocks=4, window=window, kv_heads=2)
    for block in range(4):
        model.constant(f"blk.{block}.post_attention_norm.weight", 1, 64)
        model.constant(f"blk.{block}.post_ffw_norm.weight", 1, 64)
    return model.write()


def gemma3(path: Path, *, window: int = 128) -> Path:
    """Six layers: five with a sliding window, one that attends everything."""
    model = _gemma(path, "gemma3", blocks=6, window=window, kv_heads=1)
    for block in range(6):
        for norm, width in (
            ("attn_q_norm", 32),
            ("attn_k_norm", 32),
            ("post_attention_norm", 64),
            ("post_ffw_norm", 64),
        ):
            model.constant(f"blk.{block}.{norm}.weight", 1, width)
    return model.write()


def mamba(path: Path) -> Path:
    """Two recurrent layers: no KV, a state that can't go back."""
    sizes = 128, 4, 16, 4
    model = _Model(path, "mamba", embedding=64, blocks=2, seed=4)
    model.writer.add_feed_forward_length(0)
    model.writer.add_head_count(0)
    model.ssm_settings(*sizes)
    model.ends()
    for block in range(2):
        model.mamba(block, *sizes)
    return model.write()


def jamba(path: Path) -> Path:
    """Five layers: two that attend, three that keep a recurrent state."""
    sizes = 128, 4, 16, 4
    kv_heads = (0, 1, 0, 0, 1)
    model = _Model(path, "jamba", embedding=64, blocks=5, seed=7)
    model.writer.add_feed_forward_length(128)
    model.writer.add_head_count(2)
    model.writer.add_head_count_kv(list(kv_heads))
    model.ssm_settings(*sizes)
    model.ends()
    for block, heads in enumerate(kv_heads):
        if heads:
            model.attention_block(block, 2, heads, 32)
        else:
            model.mamba(block, *sizes)
            for norm, width in (("dt", 4), ("b", 16), ("c", 16)):
                model.constant(f"blk.{block}.ssm_{norm}_norm.weight", 1, width)
        model.feed_forward(block, 128)
    return model.write()


def deepseek2(path: Path) -> Path:
    """Three dense layers that keep one latent row a token for keys and values together."""
    heads, rank, rope, key, value = 4, 32, 16, 32, 16
    model = _Model(path, "deepseek2", embedding=64, blocks=3, seed=8)
    writer = model.writer
    writer.add_feed_forward_length(128)
    writer.add_expert_feed_forward_length(128)
    writer.add_leading_dense_block_count(3)
    writer.add_expert_shared_count(0)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(0)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(key)
    writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rope)
    model.ends()
    for block in range(3):
        name = f"blk.{block}."
        model.constant(name + "attn_norm.weight", 1, 64)
        model.constant(name + "attn_kv_a_norm.weight", 1, rank)
        model.matrix(name + "attn_q.weight", heads * key, 64)
        model.matrix(name + "attn_kv_a_mqa.weight", rank + rope, 64)
        model.matrix(name + "attn_k_b.weight", heads, rank, key - rope)
        model.matrix(name + "attn_v_b.weight", heads, value, rank)
        model.matrix(name + "attn_output.weight", 64, heads * value)
        model.feed_forward(block, 128)
    return model.write()
