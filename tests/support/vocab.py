"""A real model's tokenizer alone: its vocabulary loaded without the weights."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

import llama_cpp

from modeld.workers.splits import bpe_can_split, bpe_safe_split

CONTROL, USER_DEFINED, LSTRIP, RSTRIP = 1 << 3, 1 << 4, 1 << 7, 1 << 8


class RealTokenizer:
    """The engine's tokenizer over a GGUF file's vocabulary. Close it."""

    def __init__(self, path: Path) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"{path} did not load"
        self._vocab = vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.bos: int | None = llama_cpp.llama_vocab_bos(vocab)
        self.add_bos = bool(llama_cpp.llama_vocab_get_add_bos(vocab))
        attrs = [llama_cpp.llama_vocab_get_attr(vocab, i) for i in range(self.vocab_size)]
        self.controls: Mapping[str, int] = {
            self.text(i): i for i, attr in enumerate(attrs) if attr & CONTROL
        }
        self.strips_left = frozenset(i for i, a in enumerate(attrs) if a & CONTROL and a & LSTRIP)
        self.strips_right = frozenset(i for i, a in enumerate(attrs) if a & CONTROL and a & RSTRIP)
        self.end_of_generation = frozenset(
            i for i in self.controls.values() if llama_cpp.llama_vocab_is_eog(vocab, i)
        )
        user = [i for i, attr in enumerate(attrs) if attr & USER_DEFINED]
        self._splits = bpe_can_split(
            self.meta("tokenizer.ggml.pre"),
            map(self.text, user),
            user_defined_strips=any(attrs[i] & (LSTRIP | RSTRIP) for i in user),
        )
        self.encoded_chars = 0  # given to ``encode`` so far

    def text(self, token: int) -> str:
        return str(llama_cpp.llama_vocab_get_text(self._vocab, token).decode())

    def meta(self, key: str) -> str:
        buffer = ctypes.create_string_buffer(1 << 16)
        llama_cpp.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return buffer.value.decode()

    def encode(self, text: str) -> list[int]:
        self.encoded_chars += len(text)
        return self.tokenize(text, special=False)

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        raw = text.encode()
        out = (llama_cpp.llama_token * (len(raw) + 16))()
        count = llama_cpp.llama_tokenize(self._vocab, raw, len(raw), out, len(out), False, special)
        assert count >= 0
        return out[:count]

    def piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        size = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, 256, 0, True)
        assert size >= 0
        return buffer.raw[:size]

    def safe_split(self, text: str, before: int) -> int | None:
        return bpe_safe_split(text, before) if self._splits else None

    def close(self) -> None:
        if self._model:
            llama_cpp.llama_model_free(self._model)
            self._model = None
