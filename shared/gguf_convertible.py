"""Which GGUF files OpenVINO GenAI's converter makes the same model of, found out by trying.

The converter leaves out what it doesn't know (a scaled RoPE, biases, another way to cut words)
without a word, and crashes on damaged headers: what isn't proven here never reaches it. Tried with
openvino-genai 2026.4.1 against llama.cpp: the same logits to 1e-2 and the same tokens. Loads no
engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from modeld.shared.errors import UnsupportedFeature
from modeld.shared.gguf_parse import TOKENS_KEY, TensorInfo, refuse
from modeld.shared.gguf_types import TENSOR_TYPES

if TYPE_CHECKING:
    from modeld.shared.gguf_header import GgufHeader

CAPABILITY = "openvino.convert_gguf"
ARCHITECTURES = ("llama", "qwen2", "qwen3")
MATRIX_TYPES = ("F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
# Of these the converter rounds the offsets to whole steps, which the process that runs it undoes.
ROUNDED_TYPES = ("Q4_1", "Q4_K")
END_TYPES = (*MATRIX_TYPES, "BF16", "F32")  # of the embedding and the output
VECTOR_TYPES = ("F32",)
_FLOATS = ("F16", "BF16", "F32")
_FLOAT_FILE_TYPES = (0, 1)  # of general.file_type: the converter looks for no scales then
# tokenizer.ggml.pre of byte-pair vocabularies that come out with the same tokens. Every other
# value comes out as "default" does, whatever the model was trained with.
WORD_RULES = ("default", "qwen2", "smollm")
_SETTINGS = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "tensor_data_layout",  # how the file was made; no engine reads it
        "vocab_size",
    }
)
# Values that change nothing, beside zero and nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.factor": (1,),
    "rope.scaling.type": ("none",),
}


def check_convertible(header: GgufHeader, parts: int = 1) -> None:
    """Raise unless the converter was seen to make the same model of such a file.

    UnsupportedFeature (capability ``openvino.convert_gguf``) for a sound file of another kind,
    ModelLoadFailed for one that contradicts itself. Its tensors' extents are checked elsewhere.
    """
    if parts > 1:
        raise _unsupported("It is a split set, and only single files are converted")
    if header.architecture not in ARCHITECTURES:
        raise _unsupported(
            f"Its architecture is {header.architecture!r}, and tried are {_listed(ARCHITECTURES)}"
        )
    _check_settings(header)
    shape = _shape(header)
    _check_tokenizer(header)
    _check_tensors(header, shape)


def _unsupported(why: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"This GGUF file can't be converted for OpenVINO. {why}. Import it as type llama, or "
        "import a folder that was exported for OpenVINO.",
        metadata={"capability": CAPABILITY},
    )


def _listed(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


# --- settings ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    """Elements, but for ``layers``."""

    layers: int
    embedding: int
    feed_forward: int
    queries: int  # heads times their length
    keys: int
    head: int
    vocabulary: int


def _shape(header: GgufHeader) -> _Shape:
    head_count, width = header.head_count, header.feed_forward_length
    kv_count = min(header.head_count_kv, default=0)
    if not head_count or not kv_count or head_count % kv_count:
        raise refuse(f"it says of {head_count} heads and {kv_count} KV heads")
    head = header.key_length
    if head != header.value_length:
        raise _unsupported(f"Its keys have {head} elements and its values {header.value_length}")
    if not head or not width or not header.embedding_length or head % 2:
        raise refuse(f"it says of heads of {head} and layers of {width} elements")
    rotated = header.count("rope.dimension_count", head)
    if rotated not in (0, head):
        raise _unsupported(f"It rotates {rotated} of {head} elements")
    return _Shape(
        layers=header.block_count,
        embedding=header.embedding_length,
        feed_forward=width,
        queries=head_count * head,
        keys=kv_count * head,
        head=head,
        vocabulary=header.vocabulary,
    )


def _check_settings(header: GgufHeader) -> None:
    if "general.file_type" not in header.metadata:
        raise _unsupported("It doesn't declare its file type (general.file_type)")
    epsilon = header.metadata.get(header.own("attention.layer_norm_rms_epsilon"))
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise refuse(f"its attention.layer_norm_rms_epsilon is {epsilon!r:.40}")
    base = header.metadata.get(header.own("rope.freq_base"), 10000.0)
    if not isinstance(base, float) or not 1 < base < 1e12:
        raise refuse(f"its rope.freq_base is {base!r:.40}")
    if not header.context_length:
        raise refuse("it doesn't tell its context length")
    prefix = header.own("")
    for key in header.arrays:
        if key.startswith(prefix):
            raise _unsupported(f"Its setting {key!r:.100} differs by layer")
    for key, value in header.metadata.items():
        name = key.removeprefix(prefix)
        if name == key or name in _SETTINGS or not value or value in _NEUTRAL.get(name, ()):
            continue
        raise _unsupported(f"The converter would leave out its setting {key!r:.100}")


def _check_tokenizer(header: GgufHeader) -> None:
    if header.tokenizer_model != "gpt2":
        raise _unsupported(
            f"Its tokenizer is of kind {header.tokenizer_model!r:.40}, and only 'gpt2' (byte "
            "pairs) is converted"
        )
    if header.tokenizer_pre not in WORD_RULES:
        raise _unsupported(
            f"Its tokenizer cuts words by the rule {header.tokenizer_pre!r:.40}, which would come "
            f"out as another; {_listed(WORD_RULES)} come out right"
        )
    tokens = header.arrays.get(TOKENS_KEY)
    types = header.arrays.get("tokenizer.ggml.token_type")
    merges = header.arrays.get("tokenizer.ggml.merges")
    if tokens is None or not tokens.strings or types is None or types.strings:
        raise refuse("its vocabulary has no texts or no types")
    if types.length != tokens.length:
        raise refuse(f"it has {tokens.length} tokens and types of {types.length}")
    if merges is None or not merges.strings:
        raise refuse("its vocabulary has no merges")
    for which, token in (("eos", header.eos_id), ("bos", header.bos_id)):
        if token is None:
            raise _unsupported(f"Its vocabulary names no {which} token")


# --- tensors -----------------------------------------------------------------------------------


def _expected(header: GgufHeader, shape: _Shape) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """(name, dimensions, whether it must be there), dimensions as GGUF orders them."""
    wide = shape.embedding
    held = {tensor.name for tensor in header.tensors}
    yield "token_embd.weight", (wide, shape.vocabulary), True
    yield "output.weight", (wide, shape.vocabulary), False
    yield "output_norm.weight", (wide,), True
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        yield f"{block}attn_norm.weight", (wide,), True
        yield f"{block}ffn_norm.weight", (wide,), True
        yield f"{block}attn_q.weight", (wide, shape.queries), True
        yield f"{block}attn_k.weight", (wide, shape.keys), True
        yield f"{block}attn_v.weight", (wide, shape.keys), True
        yield f"{block}attn_output.weight", (shape.queries, wide), True
        yield f"{block}ffn_gate.weight", (wide, shape.feed_forward), True
        yield f"{block}ffn_up.weight", (wide, shape.feed_forward), True
        yield f"{block}ffn_down.weight", (shape.feed_forward, wide), True
        if header.architecture == "qwen2":
            for name, size in (("q", shape.queries), ("k", shape.keys), ("v", shape.keys)):
                if f"{block}attn_q.bias" in held:
                    yield f"{block}attn_{name}.bias", (size,), True
        if header.architecture == "qwen3":
            yield f"{block}attn_q_norm.weight", (shape.head,), True
            yield f"{block}attn_k_norm.weight", (shape.head,), True


def _check_tensors(header: GgufHeader, shape: _Shape) -> None:
    held = {tensor.name: tensor for tensor in header.tensors}
    quantized = ""
    for name, dimensions, needed in _expected(header, shape):
        tensor = held.pop(name, None)
        if tensor is None:
            if needed:
                raise refuse(f"it has no tensor {name!r}")
            continue
        if _trimmed(tensor) != dimensions:
            raise refuse(f"tensor {name!r} is {tensor.dimensions}, not {dimensions}")
        kind = _checked_type(tensor)
        if kind not in _FLOATS:
            quantized = kind
    if held:
        raise _unsupported(f"The converter would leave out its tensor {min(held)!r:.100}")
    declared = header.integer("general.file_type")
    if quantized and declared in _FLOAT_FILE_TYPES:
        raise _unsupported(
            f"It declares the file type {header.quantization} and holds tensors of {quantized}"
        )


def _trimmed(tensor: TensorInfo) -> tuple[int, ...]:
    """Dimensions without the ones at the end, which say nothing."""
    dimensions = tensor.dimensions
    while len(dimensions) > 1 and dimensions[-1] == 1:
        dimensions = dimensions[:-1]
    return dimensions


def _checked_type(tensor: TensorInfo) -> str:
    kind = TENSOR_TYPES[tensor.type_number].name if tensor.type_number in TENSOR_TYPES else "?"
    allowed: tuple[str, ...] = MATRIX_TYPES
    if tensor.name in ("token_embd.weight", "output.weight"):
        allowed = END_TYPES
    elif len(_trimmed(tensor)) == 1:
        allowed = VECTOR_TYPES
    if kind not in allowed:
        raise _unsupported(
            f"Its tensor {tensor.name!r} is of type {kind}, and there {_listed(allowed)} "
            f"{'is' if len(allowed) == 1 else 'are'} converted"
        )
    return kind
