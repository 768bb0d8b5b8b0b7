"""A deterministic engine without a model: its logits depend on every token before them.

A context keeps, for each position, a hash of everything up to it, so any mistake in what is kept,
trimmed or copied changes what is generated. Tokens are bytes, a few merges, and control tokens.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.errors import (
    InsufficientMemory,
    InvalidRequest,
    ModelLoadFailed,
    SessionFatal,
    UnsupportedFeature,
)
from modeld.shared.messages import Hello, LoadOp, LoadResult, PlacedOut
from modeld.workers.engine import Cancelled, EngineContext, ReportProgress

if TYPE_CHECKING:
    from modeld.workers.engine import Logits, State

MERGES = ("the", "ing", "hello", "wor", "ld", "world", "an", "er", " the")
CONTROLS = ("<|begin|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ROWS = 1021
# A newline is a pretoken of its own, so nothing merges across one.
_PRETOKEN = re.compile(r"\n| ?[^ \n]+| ")


class FakeTokenizer:
    def __init__(self, *, add_bos: bool = False) -> None:
        self.pieces: list[bytes] = [bytes([value]) for value in range(256)]
        self.pieces += [merge.encode() for merge in MERGES]
        first = len(self.pieces)
        self.pieces += [control.encode() for control in CONTROLS]
        self.vocab_size = len(self.pieces)
        self.controls: Mapping[str, int] = {
            text: first + index for index, text in enumerate(CONTROLS)
        }
        self.bos: int | None = self.controls["<|begin|>"]
        self.add_bos = add_bos
        self.end_of_generation = frozenset(
            {self.controls["<|im_end|>"], self.controls["<|endoftext|>"]}
        )
        self.strips_left: frozenset[int] = frozenset()
        self.strips_right: frozenset[int] = frozenset()
        self._merges = sorted(
            ((piece, 256 + index) for index, piece in enumerate(self.pieces[256:first])),
            key=lambda pair: -len(pair[0]),
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for match in _PRETOKEN.finditer(text):
            ids += self._word(match.group().encode())
        return ids

    def _word(self, word: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(word):
            for piece, token in self._merges:
                if word.startswith(piece, at):
                    ids.append(token)
                    at += len(piece)
                    break
            else:
                ids.append(word[at])
                at += 1
        return ids

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def safe_split(self, text: str, before: int) -> int | None:
        """Behind a newline, or at the start."""
        return text.rfind("\n", 0, before - 1) + 1 if before > 0 else None


class FakeContext:
    """Appends only at its end; refuses whatever a real engine would corrupt itself over."""

    def __init__(self, engine: FakeEngine, window: int, cell_bytes: int) -> None:
        self.window = window
        self.kv_bytes = window * cell_bytes
        self.compute_bytes = 1000
        self.placed = [
            PlacedOut(device="CPU", kv_bytes=self.kv_bytes, compute_bytes=self.compute_bytes)
        ]
        self.engine = engine
        self.state_block = engine.state_block
        self.tokens: list[int] = []
        self.hashes: list[int] = []
        self.closed = False

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        self._check_usable()
        if position != len(self.tokens):
            raise SessionFatal(f"position {position}, but {len(self.tokens)} tokens are there")
        if position + len(tokens) > self.window:
            raise SessionFatal("more tokens than the window")
        done = 0
        while done < len(tokens):
            if cancelled():
                return done
            if self.engine.fail_after is not None:
                self.engine.fail_after -= 1
                if self.engine.fail_after < 0:
                    self.engine.fail_after = None
                    raise SessionFatal("decode failed", metadata={"cause": "engine_error"})
            batch = tokens[done : done + self.engine.micro_batch]
            for token in batch:
                before = self.hashes[-1] if self.hashes else 17
                self.hashes.append(zlib.crc32(token.to_bytes(4, "little"), before))
            self.tokens.extend(batch)
            done += len(batch)
            self.engine.evaluated += len(batch)
        return done

    def step(self, token: int, position: int) -> None:
        self.evaluate([token], position, cancelled=lambda: False)

    def logits(self) -> Logits:
        state = self.hashes[-1]
        row = self.engine.table[state % _ROWS]
        shifted = np.roll(row, state // _ROWS % len(row)) + self.engine.bias
        return np.asarray(shifted, dtype=np.float32)

    def can_trim(self, keep: int) -> bool:
        return self.engine.trimmable

    def trim(self, keep: int) -> None:
        self._check_usable()
        if keep > 0 and not self.engine.trimmable:
            raise SessionFatal("this memory can't be trimmed")
        del self.tokens[keep:]
        del self.hashes[keep:]

    def copy_prefix_from(self, source: EngineContext, tokens: int) -> bool:
        self._check_usable()
        assert isinstance(source, FakeContext)
        self.tokens, self.hashes = [], []
        if not self.engine.copies:
            return False
        self.tokens = source.tokens[:tokens]
        self.hashes = source.hashes[:tokens]
        self.engine.copied += tokens
        return True

    def export_state(self, begin: int, end: int) -> State:
        """The ids and hashes of the range, as bytes."""
        self._check_usable()
        size, block = len(self.tokens), self.state_block
        if not 0 <= begin < end <= size or begin % block:
            raise InvalidRequest.of("range", f"{begin} to {end}", f"blocks of {block}")
        if not self.engine.ranges and (begin, end) != (0, size):
            raise UnsupportedFeature("no ranges", metadata={"capability": "state.blocks"})
        if end - begin > self.engine.most_exported:
            raise InsufficientMemory("no memory for a copy", metadata={"cause": "copy"})
        rows = np.array([self.tokens[begin:end], self.hashes[begin:end]], dtype="<i8")
        return rows.T.copy().view(np.uint8).reshape(-1)

    def import_state(self, state: State, end: int) -> bool:
        self._check_usable()
        begin = len(self.tokens)
        if state.nbytes != 16 * (end - begin) or end > self.window or begin % self.state_block:
            return False
        if self.engine.refuse_imports_after is not None:
            self.engine.refuse_imports_after -= 1
            if self.engine.refuse_imports_after < 0:
                self.engine.refuse_imports_after = None
                if self.engine.refuses_fatally:
                    raise SessionFatal("import failed", metadata={"cause": "engine_error"})
                if self.engine.refuses_for_memory:
                    raise InsufficientMemory("no memory for a copy", metadata={"cause": "copy"})
                return False
        tokens, hashes = state.view("<i8").reshape(-1, 2).T.tolist()
        self.tokens += tokens
        self.hashes += hashes
        self.engine.imported += len(tokens)
        return True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.engine.cells -= self.window

    def _check_usable(self) -> None:
        if self.closed:
            raise SessionFatal("use after close")


class FakeEngine:
    """``cell_limit`` bounds the KV cells of all contexts; the other knobs are named for effect."""

    def __init__(
        self,
        *,
        micro_batch: int = 8,
        trimmable: bool = True,
        copies: bool = True,
        cell_limit: int = 1 << 30,
        add_bos: bool = False,
        template: str | None = TEMPLATE,
        end_bias: float = -2.0,
        ranges: bool = True,
        state_block: int = 1,
    ) -> None:
        self.micro_batch = micro_batch
        self.trimmable = trimmable
        self.copies = copies
        self.cell_limit = cell_limit
        self.template = template
        self.ranges = ranges  # False: only whole states go out
        self.state_block = state_block
        self.most_exported = 1 << 30  # tokens at a time
        self.refuse_imports_after: int | None = None  # take that many states, then refuse one
        self.refuses_fatally = False
        self.refuses_for_memory = False
        self.imported = 0
        self.cells = 0
        self.evaluated = 0
        self.copied = 0
        self.planned_compute: list[int] = []  # of every context asked for
        self.fail_after: int | None = None  # evaluate that many micro-batches, then fail
        self.loaded = False
        self._tokenizer = FakeTokenizer(add_bos=add_bos)
        size = self._tokenizer.vocab_size
        self.table = np.random.default_rng(7).standard_normal((_ROWS, size)).astype(np.float32)
        # Printable ASCII and merges are likely, other bytes are not, control tokens by choice.
        self.bias = np.full(size, -6.0, dtype=np.float32)
        self.bias[32:127] = 0.0
        self.bias[256:] = 0.0
        for token in self._tokenizer.controls.values():
            self.bias[token] = -100.0
        self.bias[self._tokenizer.controls["<|im_end|>"]] = end_bias

    def hello(self) -> Hello:
        return Hello(backend="fake", backend_version="1", build_digest="0" * 64, pid=1)

    def load(self, request: LoadOp, report: ReportProgress, cancelled: Cancelled) -> LoadResult:
        if request.path == "bad":
            raise ModelLoadFailed("unknown architecture", metadata={"model": request.model})
        report("loading", 1.0)
        self.loaded = True
        return LoadResult(
            description="fake",
            vocab=self._tokenizer.vocab_size,
            train_context=4096,
            weights_bytes=1,
            add_bos=self._tokenizer.add_bos,
            template_digest="",
            template_supports_tools=False,
            threads=1,
            capabilities={"overflow.evict": "yes: everything is evaluated again"},
            seconds=0.0,
            exact_state_types=["f16/f16"],
        )

    def unload(self) -> None:
        self.loaded = False

    @property
    def tokenizer(self) -> FakeTokenizer:
        return self._tokenizer

    @property
    def chat_template(self) -> str | None:
        return self.template

    def special_texts(self) -> Mapping[str, str]:
        return {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}

    def new_context(
        self, window: int, k_type: str, v_type: str, compute_bytes: int = 0
    ) -> FakeContext:
        self.planned_compute.append(compute_bytes)
        if k_type not in ("f16", "q8_0") or v_type not in ("f16", "q8_0"):
            raise InvalidRequest.of("k_type", k_type, "f16 or q8_0")
        if self.cells + window > self.cell_limit:
            raise InsufficientMemory(
                f"{window} cells don't fit.", metadata={"free_cells": self.cell_limit - self.cells}
            )
        self.cells += window
        return FakeContext(self, window, cell_bytes=2 if k_type == "f16" else 1)
