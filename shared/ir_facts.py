"""An OpenVINO IR folder's facts, from ``config.json`` and the head of its model file.

Reads a bounded part of each file and no weights; knows nothing of the engine that runs it. Layers
are what the configuration declares, in the same value types as a GGUF model's.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from modeld.shared.capacity import LayerFacts, LayerKind, ModelFacts
from modeld.shared.ir_embedding import declared_pooling, gives_hidden_states, layers_without_kv
from modeld.shared.ir_files import MAX_XML_BYTES, file_size, open_regular, read_object, refused
from modeld.shared.ir_texts import ir_texts
from modeld.shared.ir_vision import LANGUAGE, sees, vision_parts

NAMES = (LANGUAGE, "openvino_model")  # the former beside a vision encoder
MAX_LAYERS = 4096
MAX_NUMBER = 2**31 - 1
_HEAD_BYTES = 64 * 1024
_CHUNK_BYTES = 1024 * 1024
_OVERLAP_BYTES = 1024  # more than a name and its shape take
_NESTED = ("text_config", "llm_config", "language_config")
_ROPE = (
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
_KINDS = {
    "full_attention": LayerKind.FULL,
    "sliding_attention": LayerKind.WINDOW,
    "chunked_attention": LayerKind.WINDOW,
    "linear_attention": LayerKind.RECURRENT,
    "mamba": LayerKind.RECURRENT,
    "conv": LayerKind.RECURRENT,
}
_NET = re.compile(rb"<net\b[^>]{0,500}\bversion=\"1[01]\"")
# A stateful model's variables or a stateless one's inputs, and their shape a little further on:
# [batch, heads, tokens, length]. Two steps, so that no text makes the search go back and forth.
_PAST = re.compile(rb'="past_key_values\.(\d{1,4})\.(key|value)')
_SHAPE = re.compile(rb'shape="([^"]{1,100})"')
_SHAPE_WITHIN_BYTES = 400
_MAX_PAST = 4 * MAX_LAYERS  # each name is there once or twice


def is_ir(folder: Path) -> bool:
    """Whether the folder holds an IR model's files."""
    return any((folder / f"{name}.xml").is_file() for name in NAMES)


def ir_facts(folder: Path) -> ModelFacts:
    """What planning needs to know of an IR. Raises ModelLoadFailed in words that say what to do.

    ``weights_bytes`` is the size of the ``.bin`` file, and of those of all parts of a model that
    sees; ``state_bytes`` of recurrent layers isn't declared anywhere, and 0.
    """
    stem = next((name for name in NAMES if (folder / f"{name}.xml").exists()), "")
    if not stem:
        raise refused(folder, f"it has no {' or '.join(f'{name}.xml' for name in NAMES)}")
    xml, weights = folder / f"{stem}.xml", folder / f"{stem}.bin"
    vision = sees(folder)
    parts = vision_parts(folder) if vision else [stem]
    weights_bytes = file_size(weights) + sum(
        file_size(folder / f"{part}.bin") for part in parts if part != stem
    )
    file_bytes = weights_bytes + sum(file_size(folder / f"{part}.xml") for part in parts)
    _check_ir(xml)
    config = read_object(folder / "config.json")
    for name in _NESTED:
        nested = config.get(name)
        if isinstance(nested, dict):
            config = {**config, **nested}
    embedder = not vision and gives_hidden_states(xml)
    if embedder:
        layers, unknown = layers_without_kv(_number(config, "num_hidden_layers")), False
    else:
        layers, unknown = _layers(xml, config)
    texts = ir_texts(folder)
    return ModelFacts(
        architecture=_text(config, "model_type"),
        name=folder.resolve().name[:200],
        layers=layers,
        embedding_length=_number(config, "hidden_size"),
        heads=_number(config, "num_attention_heads"),
        model_max=_number(config, "max_position_embeddings"),
        vocabulary=_number(config, "vocab_size"),
        weights_bytes=weights_bytes,
        file_bytes=file_bytes,
        quantization=_text(read_object(folder / "openvino_config.json"), "dtype"),
        sliding_window=max((layer.window_cells for layer in layers), default=0)
        or _number(config, "sliding_window"),
        unknown_pattern=unknown,
        recurrent=any(layer.kind is LayerKind.RECURRENT for layer in layers),
        has_template=bool(texts.template),
        template_digest=texts.digest,
        add_bos=texts.add_bos,
        feed_forward_length=_number(config, "intermediate_size"),
        rope=_rope(config),
        model_type="openvino",
        vision=vision,
        pooling=declared_pooling(folder) if embedder else "",
        window_pattern_source="config.json" if any(layer.window_cells for layer in layers) else "",
    )


# --- the model file --------------------------------------------------------------------------


def _check_ir(xml: Path) -> None:
    descriptor, _ = open_regular(xml)
    with os.fdopen(descriptor, "rb") as file:
        if _NET.search(file.read(_HEAD_BYTES)) is None:
            raise refused(xml, "it doesn't begin as an IR of version 10 or 11 does")


def _past_shapes(xml: Path) -> dict[int, dict[bytes, tuple[int, int]]]:
    """(heads, length) of keys and values by layer, as far as the model file tells."""
    found: dict[int, dict[bytes, tuple[int, int]]] = {}
    names = 0
    descriptor, size = open_regular(xml)
    with os.fdopen(descriptor, "rb") as file:
        if size > MAX_XML_BYTES:
            raise refused(xml, f"it has {size} bytes, and at most {MAX_XML_BYTES} are read")
        window = b""
        while chunk := file.read(_CHUNK_BYTES):
            window = window[-_OVERLAP_BYTES:] + chunk
            for match in _PAST.finditer(window):
                names += 1
                if names > _MAX_PAST:
                    raise refused(xml, f"it names more than {_MAX_PAST} states")
                if not window.endswith((b" variable_id", b" name"), 0, match.start()):
                    continue  # of a port, which tells no shape
                told = _SHAPE.search(window, match.end(), match.end() + _SHAPE_WITHIN_BYTES)
                size_of = _heads_and_length(told[1]) if told else None
                if size_of is not None:
                    found.setdefault(int(match[1]), {})[match[2]] = size_of
    return found


def _heads_and_length(shape: bytes) -> tuple[int, int] | None:
    parts = [part.strip() for part in shape.split(b",")]
    if len(parts) != 4 or not (parts[1].isdigit() and parts[3].isdigit()):
        return None
    size_of = int(parts[1]), int(parts[3])
    return size_of if max(size_of) <= MAX_NUMBER else None


# --- settings --------------------------------------------------------------------------------


def _number(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_NUMBER:
        raise refused(Path("config.json"), f"{key!r} is {value!r:.100}, not a count")
    return value


def _text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key, "")
    return value[:100] if isinstance(value, str) else ""


def _rope(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    settings = []
    for key in _ROPE:
        if config.get(key) is not None:
            text = msgspec.json.encode(config[key], order="deterministic").decode()
            short = text if len(text) <= 500 else hashlib.sha256(text.encode()).hexdigest()
            settings.append((key, short))
    return tuple(settings)


def _layers(xml: Path, config: Mapping[str, Any]) -> tuple[tuple[LayerFacts, ...], bool]:
    """Runs of layers, and whether a declared window has no known pattern."""
    count = _number(config, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise refused(Path("config.json"), f"it has {count} layers, more than {MAX_LAYERS}")
    heads = _number(config, "num_attention_heads")
    kv_heads = _number(config, "num_key_value_heads", heads)
    length = _number(config, "head_dim") or _number(config, "hidden_size") // max(heads, 1)
    # With a compressed cache in the original, what the export keeps is in the model file only.
    if not count or not kv_heads or not length or config.get("kv_lora_rank"):
        return _layers_of_states(xml), False
    kinds, window, unknown = _kinds(config, count)
    full = LayerFacts(1, kv_heads, length, length)
    each = {
        LayerKind.FULL: full,
        LayerKind.WINDOW: LayerFacts(1, kv_heads, length, length, window, LayerKind.WINDOW),
        LayerKind.RECURRENT: LayerFacts(1, 0, 0, 0, kind=LayerKind.RECURRENT),
    }
    _check_rows(kv_heads * length * 2 * count, _number(config, "max_position_embeddings"))
    return tuple(_runs([each[kind] for kind in kinds])), unknown


def _kinds(config: Mapping[str, Any], count: int) -> tuple[list[LayerKind], int, bool]:
    """The kind of each layer, the window in tokens, and whether its pattern is unknown."""
    window = 0
    if config.get("use_sliding_window") is not False:
        window = _number(config, "sliding_window") or _number(config, "attention_chunk_size")
    listed = config.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != count:
            raise refused(Path("config.json"), f"'layer_types' isn't a list of {count} layers")
        kinds = [
            _KINDS.get(name, LayerKind.FULL) if isinstance(name, str) else LayerKind.FULL
            for name in listed
        ]
        known = all(isinstance(name, str) and name in _KINDS for name in listed)
        if not window:
            known = known and LayerKind.WINDOW not in kinds
            kinds = [LayerKind.FULL if kind is LayerKind.WINDOW else kind for kind in kinds]
        return kinds, window, not known
    period = _number(config, "sliding_window_pattern") or _number(config, "_sliding_window_pattern")
    if not window or not period:
        return [LayerKind.FULL] * count, window, window > 0
    kinds = [LayerKind.WINDOW if (layer + 1) % period else LayerKind.FULL for layer in range(count)]
    return kinds, window, False


def _layers_of_states(xml: Path) -> tuple[LayerFacts, ...]:
    shapes = _past_shapes(xml)
    if not shapes or set(shapes) != set(range(len(shapes))):
        raise refused(
            xml, "config.json doesn't tell its layers and heads, and neither does this file"
        )
    layers = []
    for number in range(len(shapes)):
        key = shapes[number].get(b"key")
        value = shapes[number].get(b"value", key)
        if key is None or value is None or key[0] != value[0]:
            raise refused(xml, f"the states of layer {number} don't tell its keys and values")
        layers.append(LayerFacts(1, key[0], key[1], value[1]))
    _check_rows(sum(one.kv_heads * (one.key_length + one.value_length) for one in layers), 0)
    return tuple(_runs(layers))


def _check_rows(elements: int, tokens: int) -> None:
    if elements * 4 * max(tokens, 1) >= 2**63:
        raise refused(Path("config.json"), f"KV of {tokens} tokens would take over 2^63 bytes")


def _runs(layers: list[LayerFacts]) -> list[LayerFacts]:
    return [
        LayerFacts(
            len(list(group)),
            kind.kv_heads,
            kind.key_length,
            kind.value_length,
            kind.window_cells,
            kind.kind,
        )
        for kind, group in groupby(layers)
    ]
