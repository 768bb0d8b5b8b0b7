"""The planner's facts of a GGUF file, from its parsed header: layers, weights by layer, names.

Arithmetic over a header's numbers; reads no file and knows no engine build.
"""

from __future__ import annotations

import hashlib
import re
from itertools import groupby
from typing import TYPE_CHECKING

from modeld.shared.capacity import FileKind, LayerFacts, ModelFacts
from modeld.shared.gguf_layers import read_layers
from modeld.shared.gguf_parse import refuse, tensor_size
from modeld.shared.gguf_types import (
    EMBEDDING_NORM_IS_OUTPUTS,
    FIRST_BLOCK_TENSORS,
    HEADLESS,
    INPUT_TENSORS,
    POOLING,
    TENSOR_TYPES,
)

if TYPE_CHECKING:
    from modeld.shared.gguf_header import GgufHeader

MAX_NAME = 200  # letters of a model's name that are kept
_MAX_SETTING = 200  # letters of a setting's value; longer ones become a digest
MAX_EXPERTS = 1024  # llama.cpp's LLAMA_MAX_EXPERTS, an assertion there
MAX_WIDTH = 1 << 20  # elements of an embedding or a feed-forward part; many times what is known
MAX_HEADS = 1 << 16
# Their one expert is none to the engine (llama-model.cpp, load_hparams).
_ONE_EXPERT_IS_NONE = frozenset({"hunyuan-dense", "hunyuan_vl"})
_BLOCK = re.compile(r"(?:(?:enc\.|dec\.)?blk|convnext|posnet)\.([0-9]{1,4})\.")


def model_facts(header: GgufHeader, file_bytes: int, *, template_digest: str = "") -> ModelFacts:
    """What the planner needs. Raises ModelLoadFailed where the header contradicts itself.

    ``window_cells`` of a layer is the window in tokens: the engine's micro-batch and padding are
    the planner's to add. Weights are the file's bytes, those of blocks that predict further tokens
    included, which the engine maps and doesn't read unless it is told to.
    """
    experts_used, expert_length = _experts(header)
    _check_widths(header, expert_length)
    read = read_layers(header)
    weights = _weights(header, len(read.layers))
    return ModelFacts(
        architecture=header.architecture,
        name=header.name[:MAX_NAME],
        layers=tuple(_runs(read.layers)),
        embedding_length=header.embedding_length,
        heads=header.head_count,
        model_max=header.context_length,
        vocabulary=header.vocabulary,
        weights_bytes=header.tensor_bytes,
        file_bytes=file_bytes,
        quantization=header.quantization,
        sliding_window=read.windows.tokens or header.sliding_window,
        unknown_pattern=read.windows.unknown,
        recurrent=header.recurrent or any(layer.state_bytes for layer in read.layers),
        has_template=header.chat_template is not None,
        template_digest=template_digest,
        add_bos=header.add_bos,
        feed_forward_length=header.feed_forward_length,
        rope=_rope(header),
        layer_weights=tuple(weights[:-2]),
        input_bytes=weights[-2],
        output_bytes=weights[-1],
        tied_output=_tied(header),
        tensor_types=tensor_types(header),
        pooling=_pooling(header),
        window_pattern_source=read.windows.source,
        widest_value=read.widest_value,
        experts_used=experts_used,
        expert_feed_forward_length=expert_length,
    )


def companion_facts(header: GgufHeader, file_bytes: int, kind: FileKind) -> ModelFacts:
    """Of a projector or an adapter: what it is and what it weighs; it has no layers to plan."""
    return ModelFacts(
        architecture=header.architecture,
        name=header.name[:MAX_NAME],
        layers=(),
        embedding_length=0,
        heads=0,
        model_max=0,
        vocabulary=0,
        weights_bytes=header.tensor_bytes,
        file_bytes=file_bytes,
        quantization=header.quantization,
        file_kind=kind,
        tensor_types=tensor_types(header),
    )


def tensor_types(header: GgufHeader) -> tuple[tuple[str, int], ...]:
    """(type, bytes) of all tensors, most bytes first."""
    size_of: dict[str, int] = {}
    for tensor in header.tensors:
        size = tensor_size(tensor)
        name = TENSOR_TYPES[tensor.type_number].name
        size_of[name] = size_of.get(name, 0) + size
    return tuple(sorted(size_of.items(), key=lambda item: (-item[1], item[0])))


def _runs(layers: tuple[LayerFacts, ...]) -> list[LayerFacts]:
    return [
        LayerFacts(
            len(list(group)),
            kind.kv_heads,
            kind.key_length,
            kind.value_length,
            kind.window_cells,
            kind.kind,
            kind.state_bytes,
        )
        for kind, group in groupby(layers)
    ]


def _weights(header: GgufHeader, layers: int) -> list[int]:
    """Bytes of each layer, of what stays with the input, and of what goes with the output."""
    weights = [0] * (layers + 2)
    norm_is_outputs = header.architecture in EMBEDDING_NORM_IS_OUTPUTS
    for tensor in header.tensors:
        block = _BLOCK.match(tensor.name)
        place = layers + 1
        if block is not None:
            place = int(block[1]) if int(block[1]) < layers else layers + 1
        else:
            stem = tensor.name.rpartition(".")[0] or tensor.name
            if stem in INPUT_TENSORS:
                place = layers
            elif {stem, tensor.name} & FIRST_BLOCK_TENSORS and layers:
                place = layers + 1 if norm_is_outputs and stem == "token_embd_norm" else 0
        weights[place] += tensor_size(tensor)
    return weights


def _tied(header: GgufHeader) -> bool:
    names = {tensor.name for tensor in header.tensors}
    return (
        "output.weight" not in names
        and "token_embd.weight" in names
        and header.architecture not in HEADLESS
    )


def _most(header: GgufHeader, name: str) -> int:
    """A setting's highest value of any layer."""
    return max(header.per_layer(header.own(name), 0), default=0)


def _experts(header: GgufHeader) -> tuple[int, int]:
    """Experts that work on a token, and elements of one. Raises ModelLoadFailed where the engine
    would end in an assertion.
    """
    experts, used = header.count("expert_count"), _most(header, "expert_used_count")
    length = _most(header, "expert_feed_forward_length")
    if header.own("expert_count") not in header.metadata:
        return 0, length
    if experts > MAX_EXPERTS:
        raise refuse(f"its expert_count is {experts}, and the engine takes at most {MAX_EXPERTS}")
    if experts <= 1 and header.architecture in _ONE_EXPERT_IS_NONE:
        return 0, length
    if used > experts:
        raise refuse(f"its expert_used_count is {used}, more than its {experts} experts")
    return used, length


def _check_widths(header: GgufHeader, expert_length: int) -> None:
    """Refuse lengths that no model has, so that no product of them leaves 63 bits."""
    for name, length, most in (
        ("embedding_length", header.embedding_length, MAX_WIDTH),
        ("feed_forward_length", header.feed_forward_length, MAX_WIDTH),
        ("expert_feed_forward_length", expert_length, MAX_WIDTH),
        ("attention.head_count", header.head_count, MAX_HEADS),
    ):
        if length > most:
            raise refuse(f"its {name} is {length}, more than {most}")


def _pooling(header: GgufHeader) -> str:
    number = header.count("pooling_type")
    if number not in POOLING:
        raise refuse(f"its pooling_type is {number}, and the engine knows {sorted(POOLING)}")
    return POOLING[number]


def _rope(header: GgufHeader) -> tuple[tuple[str, str], ...]:
    return tuple(
        (key, text if len(text) <= _MAX_SETTING else hashlib.sha256(text.encode()).hexdigest())
        for key, text in header.rope
    )
