"""What must be refused before it reaches the engine, where it would abort the process.

Pure checks over requests and a file's header; loads nothing.
"""

from __future__ import annotations

from pathlib import Path

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import InvalidRequest, ModelLoadFailed
from modeld.shared.gguf_header import GgufHeader, check_extents, read_header, repeated_token
from modeld.shared.gguf_parts import read_parts
from modeld.shared.messages import LoadOp
from modeld.shared.planner import kv_math

# KV cache type → ggml's type number. Any other number aborts the engine or divides by zero.
KV_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}
MAX_WINDOW = 16 * 1024 * 1024  # tokens; far beyond any model, far below what hangs the engine
MAX_BATCH = 16 * 1024  # tokens
MAX_THREADS = 512  # ggml's own limit
ENGINE_MAX_LAYERS = 512  # llama.cpp's LLAMA_MAX_LAYERS, an assertion there
CELL_PAD = 256  # cells; the engine rounds windows up to it
SEQUENCES = 2  # the session and one scratch sequence


def check_load(request: LoadOp) -> None:
    """Raise InvalidRequest for numbers the engine would not survive."""
    _within("n_batch", request.n_batch, SEQUENCES, MAX_BATCH)
    _within("n_ubatch", request.n_ubatch, SEQUENCES, request.n_batch)
    _within("threads", request.threads, 0, MAX_THREADS)
    _within("n_gpu_layers", request.n_gpu_layers, 0, ENGINE_MAX_LAYERS + 1)
    if "\0" in request.path:
        raise InvalidRequest.of("path", request.path[:200], "a path without NUL characters")


def _within(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest.of(field, value, f"{least} to {most}")


def check_file(path: str) -> GgufHeader:
    """Read and prove a model file's header, all parts of a split set. Raises ModelLoadFailed."""
    header = read_header(path)
    if header.integer("split.count", 1) > 1:
        header, _, _ = read_parts(Path(path), header)
    else:
        check_extents(header, header.file_bytes)
    if not header.architecture:
        raise _bad("it names no architecture")
    if not header.tensors:
        raise _bad("it holds no tensors")
    if header.block_count > ENGINE_MAX_LAYERS:
        raise _bad(f"it has {header.block_count} blocks, the engine takes {ENGINE_MAX_LAYERS}")
    for name in ("scores", "token_type"):
        array = header.arrays.get(f"tokenizer.ggml.{name}")
        if array is not None and array.length < header.vocabulary:
            raise _bad(f"its {name} cover {array.length} of {header.vocabulary} tokens")
    repeated = repeated_token(path, header)
    if repeated is not None:
        raise _bad(f"token {repeated[0]} repeats the text {repeated[1]!r:.100} of another")
    return header


def check_gpu_layers(n_gpu_layers: int, header: GgufHeader) -> None:
    """Raise InvalidRequest for more layers than the model has, its output counted as one."""
    _within("n_gpu_layers", n_gpu_layers, 0, header.block_count + 1)


def _bad(what: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"The model file can't be served: {what}. Fetch or convert it again.",
        metadata={"cause": "header"},
    )


def check_kv_types(facts: ModelFacts, k_type: str, v_type: str, *, flash_attn: bool) -> None:
    """Raise InvalidRequest for a cache type the engine can't allocate for this model."""
    for field, value in (("k_type", k_type), ("v_type", v_type)):
        if value not in KV_TYPES:
            raise InvalidRequest.of(field, value, ", ".join(sorted(KV_TYPES)))
    kv_math.check_types(facts.layers, k_type, v_type)
    if not flash_attn and kv_math.block(v_type)[0] > 1:
        raise InvalidRequest.of(
            "v_type",
            v_type,
            "f32, f16, bf16 while flash attention is off",
            "A quantised V cache needs flash attention, which is off where exactness is promised.",
        )


def largest_window(facts: ModelFacts) -> int:
    """The model's ceiling in tokens, rounded as the engine allocates."""
    ceiling = facts.model_max or MAX_WINDOW
    return min(kv_math.round_up(ceiling, CELL_PAD), MAX_WINDOW)


def check_window(facts: ModelFacts, window: int) -> None:
    """Raise InvalidRequest for a window (tokens) outside what the model can attend."""
    _within("window", window, 1, largest_window(facts))


def planned_kv_bytes(
    facts: ModelFacts,
    cells: int,
    k_type: str,
    v_type: str,
    n_ubatch: int,
    *,
    flash_attn: bool = False,
) -> int:
    """Bytes that the engine allocates for KV and recurrent states in a context of ``cells``."""
    return kv_math.kv_bytes(
        facts.layers,
        cells,
        k_type,
        v_type,
        pad=CELL_PAD,
        extra_window_cells=n_ubatch,
        window_sequences=SEQUENCES,
        widest_value=0 if flash_attn else facts.widest_value,
    )
