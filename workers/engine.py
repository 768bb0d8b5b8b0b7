"""The primitives an inference engine offers to the session core, whatever library it wraps.

An implementation lives in ``workers/llama/`` or ``workers/openvino/``; it validates everything
that would abort natively before it reaches the library. All methods run on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from modeld.shared.messages import DecodeIn, Hello, LoadOp, LoadResult, PlacedOut
    from modeld.workers.batching import Gate

    Logits = NDArray[np.float32]
    State = NDArray[np.uint8]  # one dimension

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

    # --- residency: what a session's KV can do besides growing and shrinking at its end

    state_block: int  # tokens: exported ranges begin at multiples of it

    def export_state(self, begin: int, end: int) -> State:
        """A copy of the engine's own bytes of the KV of positions ``begin`` to ``end``.

        Changes nothing. Where ``end`` lies within a block, the bytes are the whole block's. Raises
        UnsupportedFeature where this model's memory can't give a range (capability
        ``state.blocks`` or ``state.whole``), InvalidRequest for a range that isn't held or begins
        within a block, and InsufficientMemory where there is none for the copy.
        """

    def import_state(self, state: State, end: int) -> bool:
        """Append what ``export_state`` gave of positions from the current length to ``end``.

        False, and nothing changed, if these bytes can't be of such a range here. The caller
        guarantees that they were made by this engine build under the same kv_digest.
        """

    def close(self) -> None:
        """Free it. Idempotent."""


@runtime_checkable
class Settling(Protocol):
    """What an ``EngineContext`` has besides that keeps bytes beside the engine while ranges of its
    state go out or in.
    """

    def settle(self) -> None:
        """No range follows: what came in goes into the engine, and the copies are freed.

        Whatever changes or evaluates does it first. Raises SessionFatal where the engine refuses.
        """


@dataclass(frozen=True)
class Measured:
    """What an engine that keeps its cache by itself was seen to do in one call, in tokens.

    ``reused + evaluated`` is what was asked for, or less where it was cancelled. With
    ``lower_bound`` it may have reused more than ``reused``, and evaluated as many fewer.
    """

    reused: int
    lower_bound: bool
    evaluated: int
    held: int  # of the tokens asked for, from the first on
    ahead: int = 0  # sampled and evaluated beyond those that were taken, and thrown away


@runtime_checkable
class SelfSampling(Protocol):
    """What an ``EngineContext`` has besides whose engine keeps its cache and samples by itself.

    Its ``logits`` raise. What it holds is a record that may claim more than the engine's cache
    still has: ``measured`` says what the last call found, and after a cancel the record may be
    shorter than before.
    """

    measured: Measured | None

    def check(self, options: DecodeIn) -> None:
        """Raises UnsupportedFeature, with the capability, for options it can't carry out."""

    def confirm(self, tokens: int, *, cancelled: Cancelled) -> int:
        """Have the engine hold the first ``tokens`` of the record again, and return how many it
        does: fewer only when cancelled. At least the last of them is evaluated.
        """

    def generate(
        self, tokens: Sequence[int], options: DecodeIn, most: int, *, cancelled: Cancelled
    ) -> Generator[int, None, None]:
        """Sample up to ``most`` tokens after ``tokens``, which are all from position 0 on.

        Whoever takes the next token has the one before it evaluated. Ends without a token when
        cancelled before the first; must be closed. Raises SessionFatal as ``evaluate`` does.
        """


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens of a prompt, in shape (tokens,), for the end of a stream."""

    stream: int
    tokens: NDArray[np.int64]
    wanted: bool  # whether logits are, of the last one
    cancelled: Cancelled


class BatchContext(Protocol):
    """One engine context of several streams, whose sampled tokens can be evaluated together.

    Its ``streams`` are ``EngineContext`` whose ``evaluate`` and ``step`` go through the gate that
    it was made with. Closing a stream empties it for the next one; the memory is the batch's.
    """

    window: int  # tokens a stream
    chunk: int  # most tokens of prompts that ``evaluate`` takes
    together: bool  # several streams' pieces of prompts take less time than one after another
    broken: bool  # nothing of it can be trusted; streams raise SessionFatal from then on
    company: bool  # a sampled token is never evaluated alone: the results would be other ones

    @property
    def streams(self) -> Sequence[EngineContext]: ...

    def step(self, tokens: Sequence[tuple[int, int]]) -> None:
        """Append one sampled token to each of several streams: pairs of its index and the token.

        Raises SessionFatal when what any stream holds is unknown afterwards.
        """

    def evaluate(self, pieces: Sequence[Piece]) -> list[int]:
        """Append to each of several streams a piece of its prompt, and return how many tokens of
        each were: fewer than all only of what was cancelled. All of them are at most ``chunk``
        tokens. Raises as ``step`` does.
        """

    def close(self) -> None:
        """Free it. Idempotent."""


@runtime_checkable
class BatchingEngine(Protocol):
    """What an ``Engine`` has besides whose sessions can share a batch."""

    def new_batch(
        self,
        streams: int,
        window: int,
        k_type: str,
        v_type: str,
        gate: Gate,
        compute_bytes: int = 0,
    ) -> BatchContext:
        """Raises as ``new_context`` does, and UnsupportedFeature (capability ``layout.batched``)
        where the loaded model can't be run so.
        """


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
