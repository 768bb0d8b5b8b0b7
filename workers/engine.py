"""The primitives an inference engine offers to the session core, whatever library it wraps.

An implementation lives in ``workers/llama/`` or ``workers/openvino/``; it validates everything
that would abort natively before it reaches the library. All methods run on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from modeld.shared.messages import Hello, LoadOp, LoadResult, PlacedOut

    Logits = NDArray[np.float32]

Cancelled = Callable[[], bool]
ReportProgress = Callable[[str, float], None]


class Tokenizer(Protocol):
    """The model's own tokenizer. Ids are ints in ``range(vocab_size)``."""

    vocab_size: int
    bos: int | None
    add_bos: bool
    end_of_generation: frozenset[int]
    controls: Mapping[str, int]  # control-token text → id
    strips_left: frozenset[int]  # control ids that swallow whitespace before them
    strips_right: frozenset[int]  # … and after them

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` with control tokens off and no BOS added."""

    def piece(self, token: int) -> bytes:
        """The token's own bytes (a control token's text included)."""

    def safe_split(self, text: str, before: int) -> int | None:
        """The largest character offset below ``before`` at which tokenization provably splits.

        For the offset p answered, encode(text) == encode(text[:p]) + encode(text[p:]), and the
        same holds at p for every text that begins with text[:p + 1]. None where the tokenizer
        doesn't allow a proof near there.
        """


class EngineContext(Protocol):
    """One sequence's KV state in an engine context of its own."""

    window: int  # tokens allocated, as the engine rounded them
    kv_bytes: int  # on all devices together
    compute_bytes: int
    placed: list[PlacedOut]  # the same by device

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        """Append ``tokens`` at ``position`` and return how many were evaluated.

        Fewer than all only when ``cancelled`` turned true: whole micro-batches, which stay. The
        caller guarantees that ``position`` is the current length and that all fits ``window``.
        For the tokens of prompts: where the engine computes a lone token by other routines than
        several, that is hidden here, so that a prompt's results don't depend on how it is split.
        Raises SessionFatal when the engine reports an error after which the state is unknown.
        """

    def step(self, token: int, position: int) -> None:
        """Append one sampled token, as fast as the engine can. Raises as ``evaluate`` does."""

    def logits(self) -> Logits:
        """Logits of the last evaluated token, shape (vocab_size,).

        A view, valid until the next call.
        """

    def can_trim(self, keep: int) -> bool:
        """Whether the tail from ``keep`` on can be removed with exact results."""

    def trim(self, keep: int) -> None:
        """Remove everything from position ``keep`` on; raises SessionFatal if the engine won't."""

    def copy_prefix_from(self, source: EngineContext, tokens: int) -> bool:
        """Replace this context's content by the first ``tokens`` of ``source``; False if it can't.

        On False this context is empty, and so it is where there is no memory for the copy now,
        which is InsufficientMemory.
        """

    def close(self) -> None:
        """Free it. Idempotent."""


class Engine(Protocol):
    """One loaded model at most."""

    def hello(self) -> Hello: ...

    def load(self, request: LoadOp, report: ReportProgress, cancelled: Cancelled) -> LoadResult:
        """Carries out the request's placement and reports what really went where.

        Raises ModelLoadFailed with the engine's own words or InsufficientMemory with the numbers,
        leaving nothing loaded; InvalidRequest for a placement that can't be.
        """

    def unload(self) -> None:
        """Free the model and give the memory back to the system. Idempotent."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> str | None:
        """The raw template text from the model, or None."""

    def special_texts(self) -> Mapping[str, str]:
        """Template variables: bos_token, eos_token, …"""

    def new_context(
        self, window: int, k_type: str, v_type: str, compute_bytes: int = 0
    ) -> EngineContext:
        """``compute_bytes`` is what was planned for its buffers on the host; 0: estimate it.

        Raises InsufficientMemory if it can't be allocated, InvalidRequest for a bad type.
        """
