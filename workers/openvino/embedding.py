"""The *embedding* executor: a model without generation, whose hidden states become vectors.

Owns the compiled model, its tokenizer, pooling and batches. Knows no session and no slot. Every
batch holds texts of one length, so that nothing is padded and a vector doesn't depend on what
else was asked.
"""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.capacity import ModelFacts
from modeld.shared.embedding import POOLINGS, empty_text
from modeld.shared.errors import (
    ContextOverflow,
    InsufficientMemory,
    InvalidRequest,
    ModelLoadFailed,
    SessionFatal,
)
from modeld.shared.ir_files import read_object
from modeld.workers.embedding import Embedded
from modeld.workers.engine import Cancelled
from modeld.workers.memory_guard import MemoryGuard
from modeld.workers.openvino.native import PRECISION, core, words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from modeld.workers.embedding import Vectors

    Ids = NDArray[np.int64]

HIDDEN = "last_hidden_state"
_NEEDED = frozenset({"input_ids", "attention_mask"})
_KNOWN = _NEEDED | {"token_type_ids", "position_ids"}
# Where the configuration declares no ceiling.
UNDECLARED_TOKENS = 8192
# Texts of 12 tokens took half the time in batches of 32, those of 60 and more gained nothing.
BATCH_TOKENS, BATCH_TEXTS = 1024, 32
# How far a vector may move when its text is computed beside others; else they go one by one.
SAME = 1e-5
_POLL_MS = 50
# Families that number positions from the padding token's id on, so that their table of
# ``max_position_embeddings`` rows serves fewer tokens.
_AFTER_PADDING = frozenset(
    {"camembert", "data2vec-text", "longformer", "mpnet", "roberta", "xlm-roberta"}
)


@dataclass(frozen=True)
class Shape:
    """What decides an embedder's limits, from its folder. Tokens are 0 where nothing is said."""

    max_tokens: int
    vocabulary: int
    pooling: str  # of the model; "": it declares none
    feed_forward: int


def shape_of(folder: Path, facts: ModelFacts) -> Shape:
    """From the folder's facts and its ``config.json``. Raises ModelLoadFailed."""
    most = facts.model_max
    if most and facts.architecture in _AFTER_PADDING:
        padding = read_object(folder / "config.json").get("pad_token_id")
        most = max(1, most - 1 - (padding if isinstance(padding, int) else 1))
    return Shape(most, facts.vocabulary, facts.pooling, facts.feed_forward_length)


def is_embedder(model: Any) -> bool:
    """Whether a read IR gives hidden states of its tokens and keeps nothing between calls."""
    inputs = {port.get_any_name() for port in model.inputs}
    outputs = {name for port in model.outputs for name in port.get_names()}
    return (
        HIDDEN in outputs
        and "logits" not in outputs
        and _NEEDED <= inputs <= _KNOWN
        and not model.get_sinks()
    )


class Embedder:
    """A loaded embedding model. All methods run on one thread."""

    def __init__(
        self,
        folder: Path,
        model: Any,
        shape: Shape,
        *,
        device: str,
        threads: int,
        guard: MemoryGuard,
    ) -> None:
        """``model`` is the IR as read, for which ``is_embedder`` holds.

        Raises ModelLoadFailed where the model or its tokenizer doesn't do what embedding needs,
        and whatever the library raises when it compiles.
        """
        self._guard = guard
        self._shape = shape
        self.pooling = shape.pooling or "mean"
        self._tokens = _Tokens(folder, shape)
        settings = {
            "INFERENCE_PRECISION_HINT": PRECISION,
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }
        compiled = core().compile_model(model, device, settings)
        self._inputs = [port.get_any_name() for port in compiled.inputs]
        self._output = next(port for port in compiled.outputs if HIDDEN in port.get_names())
        self._request = compiled.create_infer_request()
        # (texts, tokens) that the graph's operations may have been left at; one when it is whole
        self._left: set[tuple[int, int]] = set()
        self._batch_texts = _batch_of(compiled)
        self.dimensions = 0
        self._prove()

    @property
    def max_tokens(self) -> int:
        """The longest text that is taken, in tokens, with those the tokenizer puts around it."""
        return self._tokens.most

    def capabilities(self) -> dict[str, str]:
        """``embed`` and ``generate``, with their evidence."""
        source = "the model declares it" if self._shape.pooling else "the model declares none"
        beside = (
            "beside another as alone"
            if self._batch_texts > 1
            else "one text at a time, since batches change the vectors"
        )
        return {
            "embed": f"yes: computed at load, {beside}; {self.dimensions} dimensions, up to "
            f"{self.max_tokens} tokens a text, {self.pooling} pooling unless asked otherwise "
            f"({source})",
            "generate": "no: it gives hidden states and no logits: it is an embedding model",
        }

    def embed(
        self,
        texts: Sequence[str],
        pooling: str,
        normalize: bool,
        cancelled: Cancelled,
        beat: Callable[[], None],
    ) -> Embedded:
        """See ``EmbeddingEngine``. All texts are checked before any is computed."""
        pooling = pooling or self.pooling
        if pooling not in POOLINGS:
            raise InvalidRequest.of(
                "pooling", "", ", ".join(POOLINGS), f"The model declares {pooling!r}: name one."
            )
        rows = []
        for index, text in enumerate(texts):
            rows.append(self._tokens.of(text, index))
            if cancelled():
                return self._stopped(rows, pooling)
        vectors = np.zeros((len(rows), self.dimensions), dtype=np.float32)
        for batch in batches(rows, self._batch_texts):
            hidden = self._infer(np.stack([rows[index] for index in batch]), cancelled)
            if hidden is None:
                return self._stopped(rows, pooling)
            vectors[batch] = pooled(hidden, pooling, normalize)
            beat()
        return Embedded(vectors, [len(row) for row in rows], pooling)

    def _stopped(self, rows: Sequence[Ids], pooling: str) -> Embedded:
        none = np.zeros((0, self.dimensions), dtype=np.float32)
        return Embedded(none, [len(row) for row in rows], pooling, cancelled=True)

    def _infer(self, ids: Ids, cancelled: Cancelled) -> Vectors | None:
        """Hidden states, (texts, tokens, dimensions); None where it was cancelled."""
        if len(self._left) > 1:
            self._computed(np.zeros(_another(self._left, self._batch_texts), np.int64), _never)
        return self._computed(ids, cancelled)

    def _computed(self, ids: Ids, cancelled: Cancelled) -> Vectors | None:
        given = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
            "position_ids": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(),
        }
        texts, tokens = ids.shape
        with self._guard.allocating(
            f"Embedding {texts} texts of {tokens} tokens",
            {"activations": ids.size * self._bytes_a_token()},
            "Send shorter texts, or free memory.",
            more={"texts": texts, "tokens": tokens},
        ):
            self._left.add((texts, tokens))
            try:
                self._request.start_async({name: given[name] for name in self._inputs})
                while not self._request.wait_for(_POLL_MS):
                    if cancelled():
                        self._cancel()
                        return None
                self._request.wait()
                hidden = np.array(self._request.get_tensor(self._output).data, dtype=np.float32)
            except Exception as error:
                raise _failed(error, texts, tokens) from None
            self._left = {(texts, tokens)}
        if not np.isfinite(hidden).all():
            raise SessionFatal(
                f"The engine's hidden states of {texts} texts of {tokens} tokens aren't numbers.",
                metadata={"cause": "engine_error"},
            )
        return hidden

    def _cancel(self) -> None:
        self._request.cancel()
        try:
            self._request.wait()
        except RuntimeError:  # how it says that it was cancelled
            return

    def _bytes_a_token(self) -> int:
        """Of activations: four rows of hidden states and two of the feed-forward part, in f32.

        18 KB for 384 dimensions and 1,536; 15 KB were measured there at 4,088 tokens.
        """
        wide = self._shape.feed_forward or 4 * self.dimensions
        return 4 * (4 * self.dimensions + 2 * wide)

    def _prove(self) -> None:
        """Compute once, which also compiles the kernels, and see whether batches change anything.

        Raises ModelLoadFailed.
        """
        row = self._tokens.sample()
        try:
            alone = self._infer(row[None], _never)
            assert alone is not None
            if alone.ndim != 3 or alone.shape[:2] != (1, len(row)):
                raise ModelLoadFailed(
                    f"The model's {HIDDEN} of {len(row)} tokens is shaped {alone.shape}, not "
                    "(texts, tokens, dimensions): it can't be served for embedding.",
                    metadata={"cause": "probe"},
                )
            self.dimensions = alone.shape[2]
            if self._batch_texts > 1:
                both = self._infer(np.stack([row[::-1], row]), _never)
                assert both is not None
                if np.abs(both[1] - alone[0]).max() > SAME:
                    self._batch_texts = 1
        except SessionFatal as error:
            raise ModelLoadFailed(
                f"The model loads but doesn't compute: {error.message}",
                metadata={"cause": "probe"},
            ) from None

    def close(self) -> None:
        """Free it. Idempotent."""
        self._request = self._output = None
        gc.collect()


class _Tokens:
    """The folder's tokenizer as embedding needs it: with special tokens, and never cut."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        import openvino_genai

        # GenAI's wrapper and not the bare model: it lifts the truncation that an exported
        # tokenizer has at the model's limit.
        self._tokenizer: Any = openvino_genai.Tokenizer(str(folder))
        self._vocabulary = shape.vocabulary
        self.most = shape.max_tokens or UNDECLARED_TOKENS
        # One made from a GGUF file cuts at a length of its own all the same. A text that reaches
        # it may have been cut.
        reached = len(self._encode("a b " * (self.most // 2 + 32)))
        self._cuts_at = reached if reached <= self.most else 0
        self.most = min(self.most, reached - 1)
        self._around = len(self._encode(""))
        if self.most <= self._around:
            raise ModelLoadFailed(
                f"The tokenizer gives {reached} tokens for a long text: the model can't be "
                "served for embedding. Export it again.",
                metadata={"cause": "tokenizer"},
            )

    def _encode(self, text: str) -> Ids:
        told = self._tokenizer.encode(text)
        ids: Ids = np.asarray(told.input_ids.data, dtype=np.int64).reshape(-1)
        real = np.asarray(told.attention_mask.data).reshape(-1) != 0  # some pad to a length
        kept: Ids = ids[real]
        return kept

    def of(self, text: str, index: int) -> Ids:
        """Raises ContextOverflow or InvalidRequest that names the text by its index."""
        ids = self._encode(text)
        if len(ids) <= self._around:
            raise empty_text(index)
        if len(ids) > self.most:
            raise ContextOverflow(
                f"texts[{index}] has {len(ids)} tokens{self._or_more(len(ids))}, and "
                f"{self.most} are taken. "
                "Nothing was embedded: send it in parts.",
                metadata={"index": index, "tokens": len(ids), "max_tokens": self.most},
            )
        highest = int(ids.max())
        if self._vocabulary and highest >= self._vocabulary:
            raise InvalidRequest.of(
                f"texts[{index}]",
                f"token {highest}",
                f"tokens of the model's {self._vocabulary}",
                "Its tokenizer knows more than the model does.",
            )
        return ids

    def _or_more(self, tokens: int) -> str:
        return " or more" if 0 < self._cuts_at <= tokens else ""

    def sample(self) -> Ids:
        return self._encode("a b a c")[: self.most]


def batches(rows: Sequence[Ids], most_texts: int = BATCH_TEXTS) -> list[list[int]]:
    """Indices of rows by batch: rows of one length, as many as fit the bounds, at least one."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_length[len(row)].append(index)
    found = []
    for length, indices in sorted(by_length.items()):
        step = max(1, min(most_texts, BATCH_TOKENS // length))
        found += [indices[begin : begin + step] for begin in range(0, len(indices), step)]
    return found


def pooled(hidden: Vectors, pooling: str, normalize: bool) -> Vectors:
    """One vector a text from unpadded hidden states; of length 1 with ``normalize``."""
    if pooling == "cls":
        vectors = hidden[:, 0].astype(np.float64)
    elif pooling == "last":
        vectors = hidden[:, -1].astype(np.float64)
    else:
        vectors = hidden.mean(axis=1, dtype=np.float64)
    if normalize:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.where(lengths == 0, 1, lengths)
    return vectors.astype(np.float32)


def _another(left: Collection[tuple[int, int]], most_texts: int) -> tuple[int, int]:
    """The least (texts, tokens) that shares no number with those ``left``, nor their product.

    The graph's operations keep their shapes until their inputs' change. After an inference that
    was cancelled or failed, those before that place have its shapes and those behind it the ones of
    the inference before: of these sizes the next one would fail, or answer other vectors. One of
    another size makes all of them work theirs out.
    """
    rows, lengths = {one[0] for one in left}, {one[1] for one in left}
    products = {texts * tokens for texts, tokens in left}
    texts = 1 if most_texts == 1 else next(n for n in itertools.count(1) if n not in rows)
    tokens = (n for n in itertools.count(1) if n not in lengths and texts * n not in products)
    return texts, next(tokens)


def _batch_of(compiled: Any) -> int:
    """How many texts may go together. Raises ModelLoadFailed for shapes that can't be fed."""
    most = BATCH_TEXTS
    for port in compiled.inputs:
        shape = port.get_partial_shape()
        if shape.rank != 2 or shape[1].is_static or (shape[0].is_static and shape[0] != 1):
            raise ModelLoadFailed(
                f"The model's {port.get_any_name()} is shaped {shape}, not (texts, tokens). Export "
                "it with dynamic shapes.",
                metadata={"cause": "shape"},
            )
        if shape[0].is_static:
            most = 1
    return most


def _failed(error: Exception, texts: int, tokens: int) -> InsufficientMemory | SessionFatal:
    said = words(error)
    if isinstance(error, MemoryError) or "alloc" in said.lower():
        return InsufficientMemory(
            f"The engine could not allocate what {texts} texts of {tokens} tokens need. It said: "
            f"{said}. Send shorter texts, or free memory.",
            metadata={"texts": texts, "tokens": tokens},
        )
    return SessionFatal(
        f"The engine failed on {texts} texts of {tokens} tokens. It said: {said}.",
        metadata={"cause": "engine_error"},
    )


def _never() -> bool:
    return False
