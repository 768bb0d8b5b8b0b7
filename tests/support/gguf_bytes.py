"""GGUF headers from their parts, as bytes: for files that no writer would make.

A document is a list of pairs and of tensors, so that a test can change any of them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

STRING, ARRAY = 8, 9
CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
Setting = bool | int | float | str | list[int] | list[bool] | list[str]


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Setting) -> tuple[int, bytes]:
    """The GGUF type of a value, and its bytes."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            kind = (5 if value < 0 else 4) if abs(value) < 2**31 else 10
            return kind, struct.pack("<" + CODES[kind], value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return STRING, text(value)
    if value and isinstance(value[0], str):
        body = b"".join(text(str(item)) for item in value)
        return ARRAY, struct.pack("<IQ", STRING, len(value)) + body
    kind = 7 if value and isinstance(value[0], bool) else 5
    return ARRAY, struct.pack(f"<IQ{len(value)}{CODES[kind]}", kind, len(value), *value)


def tensor(name: str, dimensions: tuple[int, ...], kind: int, offset: int) -> bytes:
    rank = len(dimensions)
    return text(name) + struct.pack(f"<I{rank}QIQ", rank, *dimensions, kind, offset)


@dataclass
class Document:
    """A header to be. ``pairs`` are key, type and value bytes; ``tensors`` are whole infos."""

    pairs: list[tuple[str, int, bytes]] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data_bytes: int = 0
    counts: tuple[int, int] | None = None  # tensors and pairs as the header says; None: the truth

    def set(self, **settings: Setting) -> Document:
        """Keys with two underscores for each dot; those of no section are the architecture's."""
        for name, value in settings.items():
            key = name.replace("__", ".")
            if key.partition(".")[0] not in ("general", "tokenizer", "split"):
                key = f"{self.architecture}.{key}"
            self.pairs = [pair for pair in self.pairs if pair[0] != key]
            self.pairs.append((key, *typed(value)))
        return self

    @property
    def architecture(self) -> str:
        found = [raw[8:].decode() for key, _, raw in self.pairs if key == "general.architecture"]
        return found[0] if found else ""

    def add(self, name: str, elements: int = 32) -> Document:
        """An F32 tensor of one row."""
        self.tensors.append(tensor(name, (elements,), 0, self.data_bytes))
        self.data_bytes += -(-elements * 4 // 32) * 32
        return self

    def encode(self) -> bytes:
        """The header, padded to where the data begins."""
        head = self.unpadded()
        return head + b"\0" * (-len(head) % 32)

    def unpadded(self) -> bytes:
        counts = self.counts or (len(self.tensors), len(self.pairs))
        head = b"GGUF" + struct.pack("<IQQ", 3, *counts)
        head += b"".join(text(key) + struct.pack("<I", kind) + raw for key, kind, raw in self.pairs)
        return head + b"".join(self.tensors)

    def write(self, path: Path) -> Path:
        """The header and a hole in the data's place."""
        with path.open("wb") as file:
            size = file.write(self.encode())
            file.truncate(size + self.data_bytes)
        return path


def model(architecture: str, blocks: int = 4, /, **settings: Setting) -> Document:
    """Of 64 elements, 4 heads of 16 and 2 KV heads; two small tensors a block, and both ends."""
    document = Document().set(general__architecture=architecture)
    document.set(
        general__name="a model",
        block_count=blocks,
        context_length=4096,
        embedding_length=64,
        feed_forward_length=128,
        attention__head_count=4,
        attention__head_count_kv=2,
    )
    document.set(**settings)
    document.add("token_embd.weight", 256).add("output_norm.weight", 64)
    for block in range(blocks):
        document.add(f"blk.{block}.attn_q.weight", 64).add(f"blk.{block}.ffn_up.weight", 128)
    return document


def split(folder: Path, document: Document, parts: int, stem: str = "whole") -> list[Path]:
    """The document as a set: settings in the first part, tensors dealt out in turn."""
    names = [f"{stem}-{part + 1:05d}-of-{parts:05d}.gguf" for part in range(parts)]
    sizes = [_elements(info) for info in document.tensors]
    paths = []
    for part, name in enumerate(names):
        one = Document(pairs=list(document.pairs) if part == 0 else [])
        one.set(split__no=part, split__count=parts, split__tensors__count=len(sizes))
        for tensor_name, elements in sizes[part::parts]:
            one.add(tensor_name, elements)
        paths.append(one.write(folder / name))
    return paths


def _elements(info: bytes) -> tuple[str, int]:
    (length,) = struct.unpack_from("<Q", info)
    return info[8 : 8 + length].decode(), int(struct.unpack_from("<Q", info, 8 + length + 4)[0])


def big_file(path: Path, words: int, tensors: int) -> Path:
    """A file with a vocabulary of ``words``, merges, scores and types, and so many tensors."""
    document = model("llama", 111)
    document.set(
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__tokens=[f"token{number:06d}" for number in range(words)],
        tokenizer__ggml__merges=[f"tok{number} en{number}" for number in range(words)],
        tokenizer__ggml__token_type=[1] * words,
    )
    document.pairs.append(
        ("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", 6, words) + b"\0" * 4 * words)
    )
    for number in range(tensors - len(document.tensors)):
        document.add(f"blk.{number % 111}.t{number}.weight", 64)
    return document.write(path)
