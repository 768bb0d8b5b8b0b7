"""LoRA adapters for tests: .safetensors files by hand, and the same change merged into a GGUF."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    quants,
)
from numpy.typing import NDArray

from modeld.shared.messages import AdapterIn
from tests.support.openvino_models import HEADS, KV_HEADS

Matrix = NDArray[Any]
Pairs = dict[str, tuple[Matrix, Matrix]]  # weight → A, B

_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
_GGUF = {
    "self_attn.q_proj": ("attn_q", HEADS),
    "self_attn.k_proj": ("attn_k", KV_HEADS),
    "self_attn.v_proj": ("attn_v", 0),
    "self_attn.o_proj": ("attn_output", 0),
    "mlp.gate_proj": ("ffn_gate", 0),
    "mlp.up_proj": ("ffn_up", 0),
    "mlp.down_proj": ("ffn_down", 0),
}
STEP = 2.0**-10  # weights are multiples of it, which float16 holds exactly below 2


def safetensors(tensors: Mapping[str, Matrix], metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    body = b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def peft(pairs: Pairs, *, alpha: float | None, dtype: str = "float32") -> bytes:
    """An adapter file as training leaves it; ``alpha`` None: it doesn't say."""
    tensors = {
        f"base_model.model.{target}.lora_{side}.weight": _as(matrix, dtype)
        for target, pair in pairs.items()
        for side, matrix in zip("AB", pair, strict=True)
    }
    return safetensors(tensors, {"lora_alpha": str(alpha)} if alpha is not None else None)


def _as(matrix: Matrix, dtype: str) -> Matrix:
    if dtype == "bfloat16":
        return (matrix.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return matrix.astype(dtype)


def adapter(path: Path, data: bytes, scale: float = 1.0) -> AdapterIn:
    path.write_bytes(data)
    return AdapterIn(path=str(path), digest=hashlib.sha256(data).hexdigest(), scale=scale)


def pairs_for(gguf: Path, targets: Mapping[str, str], rank: int, seed: int) -> Pairs:
    """Pairs for weights of a GGUF, of numbers that every float type here holds exactly."""
    random = np.random.default_rng(seed)
    shapes = {t.name: tuple(reversed(t.shape.tolist())) for t in GGUFReader(gguf).tensors}
    found: Pairs = {}
    for target, name in targets.items():
        outputs, inputs = shapes[name]
        a = random.integers(-2, 3, (rank, inputs)) / 4.0
        b = random.integers(-2, 3, (outputs, rank)) / 16.0
        found[target] = (a.astype(np.float32), b.astype(np.float32))
    return found


def gguf_names(layers: int) -> dict[str, str]:
    """Every weight that an adapter can change → its tensor's name in the GGUF."""
    return {
        f"model.layers.{layer}.{part}": f"blk.{layer}.{name}.weight"
        for layer in range(layers)
        for part, (name, _) in _GGUF.items()
    }


def rounded(source: Path, path: Path) -> Path:
    """A copy with all changeable weights on a grid that allows exact sums in float16."""
    return merged(source, path, {}, 0.0)


def merged(source: Path, path: Path, pairs: Pairs, factor: float) -> Path:
    """A copy with ``factor · B A`` added to the weights, in the row order of the file's kind."""
    shutil.copyfile(source, path)
    reader = GGUFReader(path, "r+")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for target, name in gguf_names(64).items():
        if name not in tensors:
            continue
        weight = tensors[name].data
        values = np.round(weight.astype(np.float64) / STEP) * STEP
        if target in pairs:
            a, b = pairs[target]
            delta = factor * (b.astype(np.float64) @ a)
            heads = _GGUF[target.split(".", 3)[3]][1]
            values += interleaved(delta, heads) if heads else delta
        assert np.array_equal(values.astype(np.float16), values)  # else the two can't be compared
        weight[:] = values.astype(np.float16)
    reader.data.flush()
    return path


def interleaved(rows: Matrix, heads: int) -> Matrix:
    """Rows of a rotary projection from halves, as trained, to pairs, as a llama GGUF has them."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def quantised(source: Path, path: Path, kind: GGMLQuantizationType) -> Path:
    """A copy with all matrices quantised."""
    reader = GGUFReader(source)
    writer = GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (
            "general.architecture",
            "general.file_type",
        ):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(int(LlamaFileType[f"MOSTLY_{kind.name}"]))  # the converter goes by it
    for tensor in reader.tensors:
        if len(tensor.shape) == 2:
            data = quants.quantize(tensor.data.astype(np.float32), kind)
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
