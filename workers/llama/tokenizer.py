"""The model's own vocabulary as the ``Tokenizer`` protocol: ids, pieces, control tokens.

Control tokens are never recognised in text here. Knows no context, prompt or template.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from modeld.shared.errors import InvalidRequest
from modeld.workers.llama.native import llama
from modeld.workers.splits import bpe_can_split, bpe_safe_split
from modeld.workers.utf8 import encoded

_BYTE_PAIRS = "gpt2"  # tokenizer.ggml.model of byte-pair vocabularies
# What the engine finds in text only when asked to parse special tokens. User-defined tokens are
# found either way, so they are ordinary text.
_CONTROL = llama.LLAMA_TOKEN_ATTR_CONTROL | llama.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = _CONTROL | llama.LLAMA_TOKEN_ATTR_USER_DEFINED


class LlamaTokenizer:
    """Tokenizes with a loaded model's vocabulary; unusable once the model is freed."""

    vocab_size: int
    bos: int | None
    add_bos: bool
    end_of_generation: frozenset[int]
    controls: Mapping[str, int]
    strips_left: frozenset[int]
    strips_right: frozenset[int]

    def __init__(self, vocab: Any, *, kind: str, pre: str) -> None:
        """``vocab`` is the engine's handle; ``kind`` and ``pre`` name the vocabulary's rules."""
        self._vocab = vocab
        self.vocab_size = llama.llama_vocab_n_tokens(vocab)
        bos = llama.llama_vocab_bos(vocab)
        self.bos = bos if 0 <= bos < self.vocab_size else None
        self.add_bos = bool(llama.llama_vocab_get_add_bos(vocab)) and self.bos is not None
        self._pieces: list[bytes | None] = [None] * self.vocab_size
        self._piece_buffer = ctypes.create_string_buffer(256)
        self._read_attributes()
        self._splits = kind == _BYTE_PAIRS and bpe_can_split(
            pre, self._user_defined.values(), user_defined_strips=self._user_defined_strips
        )

    def _read_attributes(self) -> None:
        vocab, attributes = self._vocab, llama.llama_vocab_get_attr
        special = [
            (token, attribute)
            for token in range(self.vocab_size)
            if (attribute := attributes(vocab, token)) & _SPECIAL
        ]
        controls = [(token, attribute) for token, attribute in special if attribute & _CONTROL]
        texts = {self._text(token): token for token, _ in controls}
        texts.pop("", None)
        self.controls = MappingProxyType(texts)
        left, right = llama.LLAMA_TOKEN_ATTR_LSTRIP, llama.LLAMA_TOKEN_ATTR_RSTRIP
        self.strips_left = frozenset(token for token, a in controls if a & left)
        self.strips_right = frozenset(token for token, a in controls if a & right)
        user_defined = [(token, a) for token, a in special if not a & _CONTROL]
        self._user_defined = {token: self._text(token) for token, _ in user_defined}
        self._user_defined_strips = any(a & (left | right) for _, a in user_defined)
        ends = {token for token, _ in special}
        ends |= {llama.llama_vocab_eos(vocab), llama.llama_vocab_eot(vocab)}
        self.end_of_generation = frozenset(
            token
            for token in ends
            if 0 <= token < self.vocab_size and llama.llama_vocab_is_eog(vocab, token)
        )

    def _text(self, token: int) -> str:
        raw: bytes | None = llama.llama_vocab_get_text(self._vocab, token)
        return (raw or b"").decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, control tokens off, no BOS; InvalidRequest for a lone surrogate."""
        if not text:
            return []
        raw = encoded(text)
        room = len(raw) + 16  # a token a byte, and a prefix some vocabularies add
        ids, count = self._tokenize(raw, room)
        if count < 0:
            ids, count = self._tokenize(raw, -count)
        if count < 0:
            raise InvalidRequest.of("text", f"{len(raw)} bytes", "text the tokenizer can take")
        answer: list[int] = ids[:count].tolist()
        return answer

    def _tokenize(self, raw: bytes, room: int) -> tuple[np.ndarray[Any, np.dtype[np.int32]], int]:
        ids = np.empty(room, dtype=np.int32)
        into = ids.ctypes.data_as(ctypes.POINTER(llama.llama_token))
        count = llama.llama_tokenize(self._vocab, raw, len(raw), into, room, False, False)
        return ids, count

    def piece(self, token: int) -> bytes:
        """The token's own bytes, a control token's text included; raises InvalidRequest."""
        if not 0 <= token < self.vocab_size:
            raise InvalidRequest.of("token", token, f"0 to {self.vocab_size - 1}")
        known = self._pieces[token]
        if known is None:
            known = self._pieces[token] = self._read_piece(token)
        return known

    def _read_piece(self, token: int) -> bytes:
        buffer = self._piece_buffer
        size = llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        if size < 0:
            buffer = ctypes.create_string_buffer(-size)
            size = llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, True)
        return ctypes.string_at(buffer, max(size, 0))

    def safe_split(self, text: str, before: int) -> int | None:
        """See the protocol; None where this tokenizer allows no proof."""
        return bpe_safe_split(text, before) if self._splits else None
