"""The settings and tensors that most model families share, for files that are all header.

Knows how families name their parts; which model has which sizes is said elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gguf import GGMLQuantizationType as Type

from tests.support.hollow_gguf import HollowGguf, Setting


class Shape(HollowGguf):
    """The settings and tensors that most families share."""

    def __init__(
        self,
        path: Path,
        architecture: str,
        *,
        blocks: int,
        width: int,
        context: int,
        heads: int | list[int] = 0,
        kv_heads: int | list[int] = 0,
        length: int = 0,
        feed_forward: int | list[int] = 0,
        **settings: Setting,
    ) -> None:
        super().__init__(path, architecture, block_count=blocks, context_length=context)
        self.width, self.blocks = width, blocks
        most = max(heads) if isinstance(heads, list) else heads
        self.length = length or (width // most if most else 0)
        self.set(
            embedding_length=width,
            feed_forward_length=feed_forward,
            attention__head_count=heads,
            attention__head_count_kv=kv_heads,
            attention__layer_norm_rms_epsilon=1e-5,
        )
        if length:
            self.set(attention__key_length=length, attention__value_length=length)
        self.set(**settings)

    def ends(self, vocabulary: int, *, tied: bool, norm: str = "output_norm") -> None:
        self.vocabulary(vocabulary)
        self.tensor("token_embd.weight", self.width, vocabulary)
        self.tensor(f"{norm}.weight", self.width)
        if not tied:
            self.tensor("output.weight", self.width, vocabulary)

    def norms(self, block: int, *names: str, width: int = 0) -> None:
        for name in names:
            self.tensor(f"blk.{block}.{name}.weight", width or self.width)

    def matrix(self, block: int, name: str, *dimensions: int, type: Type | None = None) -> None:
        self.tensor(f"blk.{block}.{name}.weight", *dimensions, type=type)

    def bias(self, block: int, name: str, *dimensions: int) -> None:
        self.tensor(f"blk.{block}.{name}.bias", *dimensions, type=Type.F32)

    def attention(
        self,
        block: int,
        heads: int,
        kv_heads: int,
        *,
        bias: bool = False,
        fused: bool = False,
        head_norms: bool = False,
        gated: bool = False,
        length: int = 0,
    ) -> None:
        """``gated`` queries carry a gate as wide as they are."""
        length = length or self.length
        q, kv = heads * length, kv_heads * length
        self.norms(block, "attn_norm")
        if fused:
            self.matrix(block, "attn_qkv", self.width, q + 2 * kv)
        else:
            for name, rows in (("q", 2 * q if gated else q), ("k", kv), ("v", kv)):
                self.matrix(block, f"attn_{name}", self.width, rows)
                if bias:
                    self.bias(block, f"attn_{name}", rows)
        self.matrix(block, "attn_output", q, self.width)
        if head_norms:
            self.norms(block, "attn_q_norm", "attn_k_norm", width=length)

    def feed_forward(
        self, block: int, inner: int, *, norm: str = "ffn_norm", suffix: str = ""
    ) -> None:
        if norm:
            self.norms(block, norm)
        self.matrix(block, f"ffn_gate{suffix}", self.width, inner)
        self.matrix(block, f"ffn_up{suffix}", self.width, inner)
        self.matrix(block, f"ffn_down{suffix}", inner, self.width)

    def experts(
        self,
        block: int,
        count: int,
        inner: int,
        *,
        shared: int = 0,
        norm: str = "ffn_norm",
        type: Type | None = None,
    ) -> None:
        self.norms(block, norm)
        self.matrix(block, "ffn_gate_inp", self.width, count)
        self.matrix(block, "ffn_gate_exps", self.width, inner, count, type=type)
        self.matrix(block, "ffn_up_exps", self.width, inner, count, type=type)
        self.matrix(block, "ffn_down_exps", inner, self.width, count, type=type)
        if shared:
            self.feed_forward(block, shared, norm="", suffix="_shexp")

    def mamba(self, block: int, inner: int, state: int, rank: int, *, norms: bool = False) -> None:
        self.norms(block, "attn_norm")
        self.matrix(block, "ssm_in", self.width, 2 * inner)
        self.matrix(block, "ssm_conv1d", 4, inner)
        self.bias(block, "ssm_conv1d", inner)
        self.matrix(block, "ssm_x", inner, rank + 2 * state)
        self.matrix(block, "ssm_dt", rank, inner, type=Type.F32)
        self.bias(block, "ssm_dt", inner)
        self.tensor(f"blk.{block}.ssm_a", state, inner)
        self.tensor(f"blk.{block}.ssm_d", inner)
        self.matrix(block, "ssm_out", inner, self.width)
        if norms:
            self.norms(block, "ssm_dt_norm", width=rank)
            self.norms(block, "ssm_b_norm", "ssm_c_norm", width=state)

    def mamba2(self, block: int, inner: int, state: int, heads: int, groups: int = 1) -> None:
        mixed = inner + 2 * groups * state
        self.matrix(block, "ssm_in", self.width, inner + mixed + heads)
        self.matrix(block, "ssm_conv1d", 4, mixed)
        self.bias(block, "ssm_conv1d", mixed)
        self.bias(block, "ssm_dt", heads)
        self.tensor(f"blk.{block}.ssm_a", 1, heads)
        self.tensor(f"blk.{block}.ssm_d", 1, heads)
        self.matrix(block, "ssm_norm", inner // groups, groups)
        self.matrix(block, "ssm_out", inner, self.width)


def ssm(inner: int, state: int, rank: int, groups: int = 0) -> dict[str, Setting]:
    settings: dict[str, Setting] = {
        "ssm__conv_kernel": 4,
        "ssm__inner_size": inner,
        "ssm__state_size": state,
        "ssm__time_step_rank": rank,
    }
    return settings | {"ssm__group_count": groups} if groups else settings


def at(blocks: int, places: Sequence[int], value: int) -> list[int]:
    """``value`` at the given layers, zero elsewhere."""
    return [value if block in places else 0 for block in range(blocks)]
