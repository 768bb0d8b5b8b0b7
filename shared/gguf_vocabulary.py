"""A GGUF file's vocabulary: the texts of its tokens and their types.

Reads the two arrays that ``gguf_parse`` hops over, within its limits; loads no engine.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from modeld.shared.gguf_parse import TOKENS_KEY, ArrayInfo, HeaderBytes, refuse

if TYPE_CHECKING:
    from modeld.shared.gguf_header import GgufHeader

TYPES_KEY = "tokenizer.ggml.token_type"
_HEAD_BYTES = 12  # of an array: its elements' type and its length
_INTEGERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}


@dataclass(frozen=True)
class Vocabulary:
    """By id. Invalid UTF-8 became replacement characters."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]


def read_vocabulary(path: Path, header: GgufHeader) -> Vocabulary:
    """Raises ModelLoadFailed where the file has no vocabulary with types."""
    tokens, types = header.arrays.get(TOKENS_KEY), header.arrays.get(TYPES_KEY)
    if tokens is None or not tokens.strings or types is None or types.strings:
        raise refuse("its vocabulary has no texts or no types")
    if types.length != tokens.length:
        raise refuse(f"it has {tokens.length} tokens and types of {types.length}")
    with path.open("rb") as file:
        texts: list[str] = []
        HeaderBytes(file, header.file_bytes, tokens.offset).hop_strings(
            tokens.length,
            "the vocabulary",
            lambda raw: texts.append(raw.decode(errors="replace")),
        )
        return Vocabulary(tuple(texts), _integers(file, header.file_bytes, types))


def _integers(file: BinaryIO, file_bytes: int, array: ArrayInfo) -> tuple[int, ...]:
    reader = HeaderBytes(file, file_bytes, array.offset - _HEAD_BYTES)
    kind = reader.integer("I", "the type of the token types", 2**32)
    if kind not in _INTEGERS:
        raise refuse("its token types aren't integers")
    form = struct.Struct(f"<{array.length}{_INTEGERS[kind]}")
    reader.skip(_HEAD_BYTES - 4, "the token types")
    return form.unpack(reader.raw(form.size, "the token types"))
