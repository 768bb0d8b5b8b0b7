"""Writes GGUF files that are all header: metadata, vocabulary, every tensor's info; no data.

The data section is a hole, so that a file of many gigabytes takes some megabytes of disk. Knows
the format and how quantised files choose types, no model family.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.support import tiny_models

Setting = bool | int | float | str | list[int] | list[bool]
Type = GGMLQuantizationType

_ALIGNMENT = 32  # bytes
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # GGUF value types
_SMALL_MATRICES = ("ffn_gate_inp", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "shortconv.conv")


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _texts(values: list[str]) -> bytes:
    return struct.pack("<IQ", _STRING, len(values)) + b"".join(map(_text, values))


def _value(value: Setting) -> bytes:
    """Type and value. Whole numbers are unsigned, arrays of them signed, as converters write."""
    match value:
        case bool():
            return struct.pack("<I?", _BOOL, value)
        case int():
            return struct.pack("<II", _U32, value)
        case float():
            return struct.pack("<If", _F32, value)
        case str():
            return struct.pack("<I", _STRING) + _text(value)
    flags = isinstance(value[0], bool)
    head = struct.pack("<IIQ", _ARRAY, _BOOL if flags else _I32, len(value))
    return head + struct.pack(f"<{len(value)}{'?' if flags else 'i'}", *value)


@functools.cache
def _vocabulary(size: int) -> tuple[tuple[str, bytes], ...]:
    """Keys and encoded values of a byte-level BPE of ``size`` tokens, mostly dummies."""
    tokens, types, merges = tiny_models.vocabulary()
    tokens = tokens + [f"<t{number}>" for number in range(len(tokens), size)]
    types = types + [1] * (size - len(types))
    numbers = struct.pack(f"<IQ{size}i", _I32, size, *types[:size])
    array = struct.pack("<I", _ARRAY)
    return (
        ("tokenizer.ggml.model", _value("gpt2")),
        ("tokenizer.ggml.pre", _value("smollm")),
        ("tokenizer.ggml.tokens", array + _texts(tokens[:size])),
        ("tokenizer.ggml.token_type", array + numbers),
        ("tokenizer.ggml.merges", array + _texts(merges)),
        ("tokenizer.ggml.bos_token_id", _value(1)),
        ("tokenizer.ggml.eos_token_id", _value(2)),
        ("tokenizer.ggml.add_bos_token", _value(False)),
        ("tokenizer.chat_template", _value(tiny_models.TEMPLATE)),
    )


def _type_of(name: str, dimensions: tuple[int, ...]) -> Type:
    """As a Q4_K_M file has it: norms, biases and small matrices whole, ends in six bits."""
    if len(dimensions) == 1 or any(part in name for part in _SMALL_MATRICES):
        return Type.F32
    ends = name in ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
    if dimensions[0] % 256 == 0:
        return Type.Q6_K if ends else Type.Q4_K
    if dimensions[0] % 32 == 0:
        return Type.Q8_0 if ends else Type.Q5_0
    return Type.F16


class HollowGguf:
    """A GGUF being written: settings and tensors in any order, then ``write``."""

    def __init__(self, path: Path, architecture: str, **settings: Setting) -> None:
        self._path, self._architecture = path, architecture
        self._metadata: list[tuple[str, bytes]] = [
            ("general.architecture", _value(architecture)),
            ("general.name", _value(path.stem.replace("-", " "))),
            ("general.file_type", _value(15)),
        ]
        self._tensors: list[tuple[str, tuple[int, ...], Type]] = []
        self.set(**settings)

    def set(self, **settings: Setting) -> None:
        """Settings of the architecture; two underscores stand for the dot in a name."""
        for name, value in settings.items():
            key = f"{self._architecture}.{name.replace('__', '.')}"
            self._metadata.append((key, _value(value)))

    def vocabulary(self, size: int) -> None:
        self._metadata += _vocabulary(size)
        self.set(vocab_size=size)

    def token_kinds(self, count: int) -> None:
        """How many kinds of tokens ("sentence A, sentence B") an encoder embeds."""
        self._metadata.append(("tokenizer.ggml.token_type_count", _value(count)))

    def tensor(self, name: str, *dimensions: int, type: Type | None = None) -> None:
        """Dimensions in the file's order: the length of a row first."""
        self._tensors.append((name, dimensions, type or _type_of(name, dimensions)))

    def write(self) -> Path:
        head = [b"GGUF", struct.pack("<IQQ", 3, len(self._tensors), len(self._metadata))]
        head += [_text(key) + value for key, value in self._metadata]
        offset = 0
        for name, dimensions, kind in self._tensors:
            shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
            head.append(_text(name) + shape + struct.pack("<IQ", int(kind), offset))
            offset += _aligned(_tensor_bytes(dimensions, kind))
        header = b"".join(head)
        with self._path.open("wb") as file:
            file.write(header)
            file.truncate(_aligned(len(header)) + offset)
        return self._path


def _tensor_bytes(dimensions: tuple[int, ...], kind: Type) -> int:
    elements = 1
    for dimension in dimensions:
        elements *= dimension
    block, block_bytes = GGML_QUANT_SIZES[kind]
    return elements // block * block_bytes


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
