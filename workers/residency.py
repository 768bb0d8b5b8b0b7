"""What a session's KV can do besides serving its prompts: go to a file, fork, shrink.

Owns the checks, so that a refusal changes nothing, and the numbers; how a file comes back is
``state_import``'s. Knows neither an engine's bytes nor who keeps the files.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modeld.shared.errors import (
    InvalidRequest,
    ModeldError,
    SessionFatal,
    UnsupportedFeature,
)
from modeld.shared.messages import (
    ExportOp,
    ExportResult,
    ForkOp,
    ForkResult,
    Hello,
    LoadResult,
    TrimResult,
)
from modeld.workers.executor import OpContext
from modeld.workers.new_files import Cancelled, Live
from modeld.workers.pool import ContextPool
from modeld.workers.pooled_context import PooledContext, Tokens
from modeld.workers.prompt import PromptAssembler
from modeld.workers.session import Session
from modeld.workers.state_file import (
    StateHeader,
    check_target,
    token_chains,
    write_state,
)

if TYPE_CHECKING:
    from modeld.workers.engine import State

log = logging.getLogger(__name__)

# Exported at a time, where the model's memory gives ranges: what bounds the buffers, and how long
# a cancel waits.
CHUNK_TOKENS = 512
CHUNK_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Source:
    """What an engine's bytes depend on besides the session: the build and the loaded model."""

    backend: str
    build_digest: str
    state_layout: str
    vocab: int
    exact_types: frozenset[str]  # "K/V"
    template_digest: str = ""  # "": the model has none

    @classmethod
    def of(cls, hello: Hello, loaded: LoadResult) -> Source:
        return cls(
            hello.backend,
            hello.build_digest,
            hello.state_layout,
            loaded.vocab,
            frozenset(loaded.exact_state_types),
            loaded.template_digest,
        )

    def exactness(self, entry: PooledContext) -> tuple[bool, str]:
        """Whether states of these types were seen to continue bit for bit, and why (not)."""
        types = f"{entry.shape.k_type}/{entry.shape.v_type}"
        if entry.shape.streams:
            return False, "in a batch tokens may be computed by other routines than alone"
        if types in self.exact_types:
            return True, f"a continuation at K/V {types} was bit-equal at load"
        return False, f"no continuation at K/V {types} was seen to be bit-equal at load"


def live_of(context: OpContext) -> Live:
    """What long work of an operation calls."""

    def live() -> None:
        context.beat()
        if context.cancelled():
            raise Cancelled

    return live


def held(session: Session) -> Tokens:
    """Tokens that the context holds under the session's own kv_digest."""
    entry = session.entry
    return entry.tokens if entry.kv_digest == session.kv_digest else entry.tokens[:0]


# --- to a file -----------------------------------------------------------------------------------


def export(session: Session, source: Source, op: ExportOp, context: OpContext) -> ExportResult:
    """Write a range of what the context holds to a new file. Changes nothing in the session.

    Raises InvalidRequest for a range or path that can't be, UnsupportedFeature (capability
    ``state.blocks`` or ``state.whole``) where the model's memory doesn't give it, StorageFull, and
    InsufficientMemory where there is none for a chunk. Nothing is left of a file then.
    """
    began_s = time.perf_counter()
    path = check_target(op.path)
    tokens = held(session)
    begin, end = _checked_range(session, op.begin, len(tokens) if op.end == -1 else op.end)
    header = state_header(session, source, tokens, begin, end)
    result = ExportResult(
        begin=begin, end=end, tokens=0, file_bytes=0, payload_bytes=0, digest="",
        chain=header.chain, exact=header.exact, exact_reason=header.exact_reason, seconds=0.0,
    )  # fmt: skip
    outgoing = Outgoing(session.entry, begin, end, live_of(context))
    try:
        written = write_state(path, header, outgoing.most_chunks, outgoing.chunks(), outgoing.live)
    except Cancelled:
        result.cancelled = True
    else:
        result.tokens = end - begin
        result.file_bytes, result.payload_bytes = written.file_bytes, written.payload_bytes
        result.digest = written.digest
    result.seconds = time.perf_counter() - began_s
    return result


def _checked_range(session: Session, begin: int, end: int) -> tuple[int, int]:
    size, block = len(held(session)), session.entry.engine_context.state_block
    if not size:
        raise InvalidRequest.of(
            "session_id", session.session_id, "a session that holds tokens", "Send a prompt first."
        )
    if not 0 < end <= size or (end % block and end != size):
        raise InvalidRequest.of("end", end, _multiples(block, size))
    if not 0 <= begin < end or begin % block:
        raise InvalidRequest.of("begin", begin, _multiples(block, end))
    return begin, end


def _multiples(block: int, size: int) -> str:
    return f"up to {size}" if block == 1 else f"a multiple of {block} up to {size}, or {size}"


def state_header(
    session: Session, source: Source, tokens: Tokens, begin: int, end: int
) -> StateHeader:
    """Of a file with the KV of ``tokens`` from ``begin`` to ``end``, as the session holds it."""
    entry, ids = session.entry, tokens[:end]
    exact, why = source.exactness(entry)
    chain_before, chain = token_chains(session.kv_digest, ids, (begin, end))
    return StateHeader(
        backend=source.backend,
        build_digest=source.build_digest,
        state_layout=source.state_layout,
        kv_digest=session.kv_digest,
        runtime_digest=session.runtime_digest,
        k_type=entry.shape.k_type,
        v_type=entry.shape.v_type,
        begin=begin,
        end=end,
        token_ids=ids.astype("<i4", copy=False).tobytes(),
        chain_before=chain_before,
        chain=chain,
        exact=exact,
        exact_reason=why,
    )


@dataclass(frozen=True)
class Outgoing:
    """A range of what a context holds, on its way out."""

    entry: PooledContext
    begin: int
    end: int
    live: Live

    @property
    def most_chunks(self) -> int:
        return -(-(self.end - self.begin) // self._step)

    @property
    def _step(self) -> int:
        """Tokens a chunk: whole blocks."""
        engine = self.entry.engine_context
        block, token_bytes = engine.state_block, max(1, engine.kv_bytes // engine.window)
        return max(block, min(CHUNK_TOKENS, CHUNK_BYTES // token_bytes) // block * block)

    def chunks(self) -> Iterator[tuple[int, State]]:
        """Where each ends, and its bytes; all at once where the model's memory gives nothing less.

        Raises Cancelled, and what ``export_state`` raises.
        """
        entry, at, step = self.entry, self.begin, self._step
        while at < self.end:
            until = min(at + step, self.end)
            try:
                state = self.chunk(at, until)
            except UnsupportedFeature:
                if (at, self.end) != (0, len(entry)) or until == self.end:
                    raise
                until = self.end
                state = entry.export_state(at, until)
            yield until, state
            at = until

    def chunk(self, begin: int, end: int) -> State:
        self.live()
        return self.entry.export_state(begin, end)


# --- a second session, and a shorter one ---------------------------------------------------------


def fork(
    source: Session, assembler: PromptAssembler, pool: ContextPool, op: ForkOp
) -> tuple[Session, ForkResult]:
    """A session of the same prompt, answers and KV in a context of its own.

    Raises InsufficientMemory where no context or no copy can be had, and UnsupportedFeature
    (capability ``prefix_copy``) where the engine doesn't copy. Nothing is left behind then, and
    the source is as it was.
    """
    began_s = time.perf_counter()
    mine, count = source.entry, len(held(source))
    entry, reused = pool.acquire(op.new_session_id, mine.shape, op.free_bytes, op.compute_bytes)
    try:
        entry.park_last()
        if not count:
            entry.trim(0)
        elif not entry.copy_from(mine, count):
            raise UnsupportedFeature(
                "The engine doesn't copy this session's state to a second context. Open a session "
                "with the same prompt instead: it is evaluated again.",
                metadata={"capability": "prefix_copy", "tokens": count},
            )
    except BaseException as error:
        if reused and isinstance(error, ModeldError) and not isinstance(error, SessionFatal):
            pool.release(entry)
        else:
            pool.destroy(entry)
        raise
    entry.kv_digest, entry.runtime_digest = source.kv_digest, mine.runtime_digest
    pool.touch(mine)
    session = replace(
        source,
        session_id=op.new_session_id,
        assembler=assembler,
        context=entry,
        answer_ids=list(source.answer_ids),
        turns=OrderedDict(source.turns),
        counters=Counter(copied_tokens=count),
        saves=OrderedDict(),
    )
    session.counters["adopted_contexts" if reused else "created_contexts"] += 1
    return session, ForkResult(
        reused_context=reused,
        retained=session.retained,
        **pool.opened(entry),
        copied=count,
        resident=session.logical,
        seconds=time.perf_counter() - began_s,
        turn_ids=list(session.turns),
    )


def trim(session: Session, keep: int) -> TrimResult:
    """Remove the tail of what the context holds; the prompt stays, and what is missing of it is
    evaluated when it is next needed.

    Raises InvalidRequest beyond what is held, and UnsupportedFeature (capability
    ``tail_removal``) where the model's memory can't go back there with exact results.
    """
    entry, size = session.entry, len(held(session))
    if not 0 <= keep <= size:
        raise InvalidRequest.of("keep", keep, f"0 to {size}, the tokens that the session holds")
    if keep and not entry.can_keep(keep):
        raise UnsupportedFeature(
            f"This model's memory can't go back from {size} to {keep} tokens with exact results. "
            "Trim to 0, or send the shorter prompt: it is evaluated again.",
            metadata={"capability": "tail_removal", "held": size, "keep": keep},
        )
    entry.trim(keep)
    session.logical = min(session.logical, keep)
    return TrimResult(
        dropped=size - keep,
        resident=session.logical,
        available=session.available,
        retained=session.retained,
    )
