"""The bytes of each token, from the vocabulary of a detokenizer's graph.

Reads constants only: the graph itself drops special tokens and parts of characters. Knows no
tokenizing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from modeld.shared.errors import UnsupportedFeature
from modeld.workers.openvino.tokenizer_graph import (
    Strings,
    broken,
    constant,
    constant_text,
    nodes,
    read_graph,
    source,
)

DETOKENIZER = "openvino_detokenizer"
_BYTE = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """A detokenizer's vocabulary. ``size`` tokens; ``skipped`` are those it leaves out."""

    def __init__(self, core: Any, folder: Path) -> None:
        """Raises ModelLoadFailed, and UnsupportedFeature for another kind of detokenizer."""
        name = f"{DETOKENIZER}.xml"
        model = read_graph(core, folder, DETOKENIZER)
        decoders = nodes(model, "VocabDecoder")
        kinds = {node.get_type_name() for node in model.get_ordered_ops()}
        if len(decoders) != 1 or "CharsToBytes" in kinds:
            raise UnsupportedFeature(
                "This model's detokenizer isn't one that spells tokens from a list of bytes. "
                "Convert it again with a current openvino_tokenizers, or use a GGUF file.",
                metadata={"capability": "openvino.tokenizer"},
            )
        vocabulary = Strings.of_input(decoders[0], 1, name)
        self.size = len(vocabulary)
        self._entries = vocabulary.as_list()
        self.skipped = _skipped(decoders[0], name)
        self._bytes = "ByteFallback" in kinds
        self._replaced = _replaced(model)
        self._plain: frozenset[int] = frozenset()

    def keep(self, tokens: frozenset[int]) -> None:
        """Tokens whose piece is their text as it stands."""
        self._plain = tokens

    def text(self, token: int) -> bytes | None:
        """The vocabulary's own text; None for an id that it doesn't have."""
        return self._entries[token] if 0 <= token < self.size else None

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; b"" beyond the vocabulary."""
        raw = self.text(token) or b""
        if token in self._plain:
            return raw
        if self._bytes and (match := _BYTE.fullmatch(raw)):
            return bytes.fromhex(match[1].decode())
        for sought, put in self._replaced:
            raw = raw.replace(sought, put)
        return raw


def _skipped(decoder: Any, name: str) -> frozenset[int]:
    if decoder.get_input_size() < 5:
        listed = decoder.get_attributes().get("skip_tokens") or []
        return frozenset(int(token) for token in listed)
    node = source(decoder, 4)
    values = constant(node, 0) if node.get_type_name() == "Slice" else constant(decoder, 4)
    if values is None:
        raise broken(name, "the list of its special tokens can't be read")
    return frozenset(values.tolist())


def _replaced(model: Any) -> list[tuple[bytes, bytes]]:
    """The texts that are replaced wherever they stand, as ▁ by a space.

    What is replaced at a text's beginning or end only is no part of a token.
    """
    found = []
    for node in nodes(model, "RegexNormalization"):
        last = node.get_input_size() - 1
        sought, put = constant_text(node, last - 1), constant_text(node, last)
        if sought and put is not None and re.escape(sought).replace("\\ ", " ") == sought:
            found.append((sought.encode(), put.encode()))
    return found
