"""A sequence's state is, to the byte, what the arithmetic says that its tokens hold.

The engine's log gives sizes in MiB with two decimals. The size of a sequence's saved state is
exact: the same rows, and a header that follows from the number of tokens and layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modeld.shared.capacity import LayerKind, ModelFacts
from modeld.shared.messages import LoadOp
from modeld.shared.planner.kv_math import HAS_STATE, has_kv, kv_bytes, layer_cells
from modeld.workers.llama.context import LlamaContext
from modeld.workers.llama.engine import LlamaEngine
from modeld.workers.llama.native import llama
from tests.support import tiny_models

U32, U64 = 4, 8  # bytes
WINDOW = 512  # tokens


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaEngine]:
    made = LlamaEngine()
    yield made
    made.unload()


def header_bytes(facts: ModelFacts, tokens: int) -> int:
    """What a sequence's state has beside rows (llama-context.cpp, llama-kv-cache.cpp,
    llama-memory-recurrent.cpp, functions ``state_write*``), without flash attention.

    Once: a magic number and the sequence. For each KV cache (windowed layers have one of their
    own): streams and cells; for each cell its position, the count of its sequences and the one;
    whether values are transposed, and the layers; for each layer the keys' type and row size, and
    the values' type, element size and row length. For recurrent states the same without sequences
    and with one cell; for each layer the type and row size of both of its states.
    """
    size = 2 * U32
    caches: dict[bool, int] = {}
    for layer in facts.layers:
        if not has_kv(layer):
            continue
        windowed = bool(layer.window_cells)
        if windowed not in caches:
            caches[windowed] = 2 * U32 + layer_cells(layer, tokens) * 3 * U32 + 2 * U32
        values = 0 if layer.kind is LayerKind.LATENT else 3 * U32
        caches[windowed] += layer.count * (U32 + U64 + values)
    size += sum(caches.values())
    states = sum(layer.count for layer in facts.layers if layer.kind in HAS_STATE)
    if states:
        size += U32 + 2 * U32 + 2 * U32 + states * 2 * (U32 + U64)
    return size


def state_size(
    engine: LlamaEngine, path: Path, tokens: int, k_type: str, v_type: str = "f16"
) -> int:
    """Bytes of a sequence's state after ``tokens`` tokens in a context of a really loaded model."""
    request = LoadOp(path=str(path), model="m", digest="", n_batch=128, n_ubatch=64, threads=1)
    engine.load(request, lambda stage, fraction: None, lambda: False)
    context = engine.new_context(WINDOW, k_type, v_type)
    try:
        assert isinstance(context, LlamaContext)
        ids = [5 + token % 200 for token in range(tokens)]
        assert context.evaluate(ids, 0, cancelled=lambda: False) == tokens
        size: int = llama.llama_state_seq_get_size(context._handle, 0)
        return size
    finally:
        context.close()


CASES = [
    ("llama", "f16", "f16"),
    ("llama", "f32", "f32"),
    ("qwen2", "f16", "f16"),
    ("qwen2", "q8_0", "f16"),
    ("qwen2", "q4_0", "bf16"),
    ("gemma2", "f16", "f16"),
    ("gemma2", "q8_0", "f16"),
    ("gemma3", "f16", "f16"),
    ("mamba", "f16", "f16"),
    ("jamba", "f16", "f16"),
    ("jamba", "q8_0", "f32"),
    ("deepseek2", "f16", "f16"),
    ("deepseek2", "f32", "f32"),
]


@pytest.mark.parametrize(("kind", "k_type", "v_type"), CASES)
@pytest.mark.parametrize("tokens", [2, 64, 301])
def test_the_rows_of_a_sequence_s_state_are_what_is_computed(
    engine: LlamaEngine, tmp_path: Path, kind: str, k_type: str, v_type: str, tokens: int
) -> None:
    path = getattr(tiny_models, kind)(tmp_path / f"{kind}.gguf")
    size = state_size(engine, path, tokens, k_type, v_type)
    facts = engine.facts
    rows = kv_bytes(facts.layers, tokens, k_type, v_type)
    assert rows > 0
    assert size == rows + header_bytes(facts, tokens)


def test_a_windowed_layer_s_rows_stop_at_its_window(engine: LlamaEngine, tmp_path: Path) -> None:
    path = tiny_models.gemma2(tmp_path / "gemma2.gguf", window=96)
    at_96, at_97, at_200, at_201 = (
        state_size(engine, path, tokens, "f16") for tokens in (96, 97, 200, 201)
    )
    full_row = 2 * 2 * (32 + 32) * 2  # layers, heads, elements, bytes
    meta = 3 * U32  # of a cell
    assert at_97 - at_96 == full_row + meta
    assert at_201 - at_200 == full_row + meta


def test_a_recurrent_state_is_the_same_for_one_token_and_for_many(
    engine: LlamaEngine, tmp_path: Path
) -> None:
    path = tiny_models.mamba(tmp_path / "mamba.gguf")
    sizes = {state_size(engine, path, tokens, "f16") for tokens in (1, 50, 400)}
    assert len(sizes) == 1
