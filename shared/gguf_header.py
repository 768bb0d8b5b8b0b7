"""A GGUF file's header as typed settings, and the proof that its tensors lie in the file.

Reads a file once, in bounded time and memory (``gguf_parse``); loads no weights. What follows from
the settings is ``gguf_facts``'s to say.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from modeld.shared.errors import ModelLoadFailed
from modeld.shared.gguf_facts import companion_facts, model_facts
from modeld.shared.gguf_layers import MAX_LAYERS
from modeld.shared.gguf_parse import (
    MAX_COUNT,
    TOKENS_KEY,
    ArrayInfo,
    TensorInfo,
    Value,
    parse,
    read_string,
    refuse,
    repeated_string,
    tensor_size,
)
from modeld.shared.gguf_types import (
    ADD_BOS_PRE_TOKENIZERS,
    ADD_BOS_VOCABULARIES,
    FILE_TYPES,
    TENSOR_TYPES,
)

__all__ = [
    "GgufHeader",
    "check_extents",
    "companion_facts",
    "model_facts",
    "read_header",
    "repeated_token",
    "tensor_size",
]

DEFAULT_ALIGNMENT = 32
MAX_ARCHITECTURE = 100  # letters


@dataclass(frozen=True)
class GgufHeader:
    """A parsed header. Sizes are bytes; a property of a missing key is 0, "" or None.

    Properties raise ModelLoadFailed for a key of the wrong type.
    """

    version: int
    file_bytes: int
    metadata: Mapping[str, Value]
    arrays: Mapping[str, ArrayInfo]  # every array key: length, and where its elements begin
    tensors: tuple[TensorInfo, ...]
    alignment: int
    data_offset: int  # where the tensors' data begins
    bos_text: str
    eos_text: str

    def integer(self, key: str, default: int = 0) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise refuse(f"{key!r} is {value!r:.100}, not an integer")
        return value

    def text(self, key: str) -> str:
        value = self._value(key, "")
        if not isinstance(value, str):
            raise refuse(f"{key!r} is {value!r:.100}, not a text")
        return value

    def count(self, name: str, default: int = 0) -> int:
        """This architecture's setting ``name``, which counts something. At most 32 bits."""
        key = self.own(name)
        return _counted(key, self.integer(key, default))

    def numbers(self, key: str) -> tuple[int, ...]:
        """An array of counts or of truth values, () if there is none."""
        value = self._value(key, ())
        if not isinstance(value, tuple) or not all(isinstance(v, int) for v in value):
            raise refuse(f"{key!r} is {value!r:.100}, not an array of integers")
        return tuple(_counted(key, int(number)) for number in value)

    def per_layer(self, key: str, default: int) -> tuple[int, ...]:
        """An integer key that may be an array: one value for each block."""
        if key not in self.arrays:
            return (_counted(key, self.integer(key, default)),) * self.block_count
        if self.arrays[key].length != self.block_count:
            raise refuse(
                f"{key!r} has {self.arrays[key].length} elements for {self.block_count} blocks"
            )
        return self.numbers(key)

    def _value(self, key: str, default: Value) -> Value:
        if key in self.arrays and key not in self.metadata:
            raise refuse(f"{key!r} is an array of {self.arrays[key].length} elements")
        return self.metadata.get(key, default)

    def own(self, name: str) -> str:
        """The key of this architecture's setting ``name``."""
        return f"{self.architecture}.{name}"

    @property
    def architecture(self) -> str:
        name = self.text("general.architecture")
        if len(name) > MAX_ARCHITECTURE:
            raise refuse(f"its architecture's name has {len(name)} letters")
        return name

    @property
    def name(self) -> str:
        return self.text("general.name")

    @property
    def context_length(self) -> int:
        return self.count("context_length")

    @property
    def block_count(self) -> int:
        count = self.count("block_count")
        if count > MAX_LAYERS:
            raise refuse(f"block_count is {count}, more than {MAX_LAYERS}")
        return count

    @property
    def embedding_length(self) -> int:
        return self.count("embedding_length")

    @property
    def feed_forward_lengths(self) -> tuple[int, ...]:
        """Of each layer."""
        return self.per_layer(self.own("feed_forward_length"), 0)

    @property
    def feed_forward_length(self) -> int:
        """The widest layer's."""
        return max(self.feed_forward_lengths, default=0)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Attention heads of each layer."""
        return self.per_layer(self.own("attention.head_count"), 0)

    @property
    def head_count(self) -> int:
        """Attention heads; the most of any layer where they differ."""
        return max(self.head_counts, default=0)

    @property
    def head_count_kv(self) -> tuple[int, ...]:
        """KV heads of each layer."""
        key = self.own("attention.head_count_kv")
        present = key in self.metadata or key in self.arrays
        return self.per_layer(key, 0) if present else self.head_counts

    def _head_length(self, name: str) -> int:
        """As llama_model_base::load_hparams: none where the first layer has no heads."""
        first = self.head_counts[0] if self.head_counts else 0
        if first == 0 and self.architecture != "plamo2":  # which reads its lengths again
            return 0
        return self.count(f"attention.{name}", self.embedding_length // first if first else 0)

    @property
    def key_length(self) -> int:
        return self._head_length("key_length")

    @property
    def value_length(self) -> int:
        return self._head_length("value_length")

    @property
    def sliding_window(self) -> int:
        return self.count("attention.sliding_window")

    @property
    def rope(self) -> tuple[tuple[str, str], ...]:
        """RoPE settings as sorted (key, value) texts: they change what KV bytes mean."""
        prefix = self.own("rope.")
        return tuple(
            sorted((key, repr(v)) for key, v in self.metadata.items() if key.startswith(prefix))
        )

    @property
    def vocabulary(self) -> int:
        """Tokens in the vocabulary."""
        tokens = self.arrays.get(TOKENS_KEY)
        return tokens.length if tokens else self.count("vocab_size")

    @property
    def tokenizer_model(self) -> str:
        return self.text("tokenizer.ggml.model")

    @property
    def tokenizer_pre(self) -> str:
        return self.text("tokenizer.ggml.pre")

    @property
    def chat_template(self) -> str | None:
        return self.text("tokenizer.chat_template") or None

    @property
    def add_bos(self) -> bool:
        """As the file says, else as the engine decides for this kind of vocabulary."""
        value = self.metadata.get("tokenizer.ggml.add_bos_token")
        if isinstance(value, bool):
            return value
        if self.tokenizer_model in ADD_BOS_VOCABULARIES:
            return True
        return self.tokenizer_model == "gpt2" and self.tokenizer_pre in ADD_BOS_PRE_TOKENIZERS

    @property
    def bos_id(self) -> int | None:
        return self._token_id("bos")

    @property
    def eos_id(self) -> int | None:
        return self._token_id("eos")

    def _token_id(self, which: str) -> int | None:
        key = f"tokenizer.ggml.{which}_token_id"
        if key not in self.metadata:
            return None
        value = self.integer(key)
        return value if 0 <= value < self.vocabulary else None

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors; raises ModelLoadFailed for a type or shape that can't be."""
        return sum(tensor_size(tensor) for tensor in self.tensors)

    @property
    def quantization(self) -> str:
        """The file type's name; the type that holds most bytes where it isn't declared."""
        declared = FILE_TYPES.get(self.integer("general.file_type", -1))
        if declared:
            return declared
        size_of: dict[str, int] = {}
        for tensor in self.tensors:
            name = (
                TENSOR_TYPES[tensor.type_number].name if tensor.type_number in TENSOR_TYPES else "?"
            )
            size_of[name] = size_of.get(name, 0) + tensor_size(tensor)
        return max(size_of, key=lambda name: size_of[name]) if size_of else ""

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps a recurrent state, by the model's own settings."""
        marks = ("ssm.", "wkv.", "shortconv.", "kda.")
        return any(key.startswith(self.own(mark)) for mark in marks for key in self.metadata)


def _counted(key: str, value: int) -> int:
    if not 0 <= value <= MAX_COUNT:
        raise refuse(f"{key!r} is {value}, not a count up to {MAX_COUNT}")
    return value


def read_header(path: str | Path) -> GgufHeader:
    """Read a file's header. Raises ModelLoadFailed in words that say what to do."""
    try:
        # Not blocking: a named pipe in a model's place must not hold the caller.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelLoadFailed(
            f"The model file can't be opened: {reason}.", metadata={"cause": "open"}
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise refuse("it is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        size = status.st_size
        parsed = parse(file, size)
        metadata = MappingProxyType(parsed.metadata)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            isinstance(alignment, bool)
            or not isinstance(alignment, int)
            or not 1 <= alignment <= 65536
            or alignment & (alignment - 1)
        ):
            raise refuse(f"its alignment is {alignment!r:.100}, not a power of two up to 65536")

        def token_text(which: str) -> str:
            tokens = parsed.arrays.get(TOKENS_KEY)
            index = metadata.get(f"tokenizer.ggml.{which}_token_id")
            if tokens is None or not tokens.strings or not isinstance(index, int):
                return ""
            return read_string(file, size, tokens, index) if 0 <= index < tokens.length else ""

        return GgufHeader(
            version=parsed.version,
            file_bytes=size,
            metadata=metadata,
            arrays=MappingProxyType(parsed.arrays),
            tensors=tuple(parsed.tensors),
            alignment=alignment,
            data_offset=_padded(parsed.end, alignment),
            bos_text=token_text("bos"),
            eos_text=token_text("eos"),
        )


def repeated_token(path: str | Path, header: GgufHeader) -> tuple[int, str] | None:
    """The first token whose text another has too (which aborts the engine), or None."""
    tokens = header.arrays.get(TOKENS_KEY)
    if tokens is None or not tokens.strings:
        return None
    with open(path, "rb") as file:
        return repeated_string(file, header.file_bytes, tokens)


def _padded(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment


def check_extents(header: GgufHeader, file_bytes: int) -> None:
    """Raise ModelLoadFailed unless every tensor lies in the file, aligned, overlapping none."""
    before, free_from = "", 0
    for tensor in sorted(header.tensors, key=lambda tensor: tensor.offset):
        size = tensor_size(tensor)
        begin = header.data_offset + tensor.offset
        if tensor.offset % header.alignment:
            raise refuse(
                f"tensor {tensor.name!r} begins at {tensor.offset}, "
                f"which is not a multiple of {header.alignment}"
            )
        if tensor.offset < free_from:
            raise refuse(f"tensors {before!r} and {tensor.name!r} overlap")
        if begin + size > file_bytes:
            raise refuse(
                f"it is truncated: tensor {tensor.name!r} needs bytes {begin}..{begin + size}, "
                f"the file has {file_bytes}"
            )
        before, free_from = tensor.name, tensor.offset + size
