"""Drives a SessionCore in a test: one operation at a time, with what it sent and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from modeld.shared.messages import (
    ChunkOut,
    CloseOp,
    CloseResult,
    DecodeIn,
    DecodeOp,
    EnsureOp,
    ExplainOp,
    ExplainResult,
    FinalOut,
    LoadOp,
    Message,
    OpenOp,
    OpenResult,
    Payload,
    PromptIn,
    SamplingIn,
    SegmentIn,
    Status,
    SuffixOp,
    TurnOp,
)
from modeld.workers.core import SessionCore
from tests.support.fake_engine import FakeContext, FakeEngine

T = TypeVar("T")


class FakeOp:
    """An ``OpContext``: cancelled after ``cancel_at`` polls, with credit for ``credit`` chunks."""

    def __init__(self, *, cancel_at: int | None = None, credit: int | None = None) -> None:
        self.op_id = 1
        self.generation = 1
        self.sent: list[Payload] = []
        self.polls = 0
        self.beats = 0
        self.credit = credit
        self.cancel_at = cancel_at

    def cancelled(self) -> bool:
        self.polls += 1
        return self.cancel_at is not None and self.polls > self.cancel_at

    def emit(self, payload: Payload) -> None:
        self.sent.append(payload)

    def wait_credit(self) -> bool:
        """Where credit runs out, the caller is taken to have cancelled."""
        if self.credit is None:
            return True
        if self.credit == 0:
            self.cancel_at = 0
            return False
        self.credit -= 1
        return True

    def beat(self) -> None:
        self.beats += 1

    def of(self, kind: type[T]) -> list[T]:
        return [payload for payload in self.sent if isinstance(payload, kind)]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.of(ChunkOut))

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.of(ChunkOut) for token in chunk.token_ids]


def raw(*texts: str) -> PromptIn:
    return PromptIn(segments=[SegmentIn(text=text) for text in texts])


def turn_ref(turn_id: str) -> SegmentIn:
    return SegmentIn(generated_turn_id=turn_id)


def chat(*messages: tuple[str, str] | SegmentIn) -> PromptIn:
    return PromptIn(
        segments=[
            item
            if isinstance(item, SegmentIn)
            else SegmentIn(message=Message(role=item[0], text=item[1]))
            for item in messages
        ]
    )


def options(
    max_tokens: int = 12, *, stop: Sequence[str] = (), top_logprobs: int = 0, **sampling: object
) -> DecodeIn:
    return DecodeIn(
        sampling=SamplingIn(**sampling),  # type: ignore[arg-type]
        stop=list(stop),
        max_tokens=max_tokens,
        token_ids=True,
        top_logprobs=top_logprobs,
    )


class Harness:
    def __init__(self, engine: FakeEngine | None = None, *, max_contexts: int = 4) -> None:
        self.engine = engine or FakeEngine()
        self.core = SessionCore(self.engine)
        self.turns = 0
        self.loaded = self.run(
            LoadOp(path="m", model="m", digest="d", max_contexts=max_contexts), FakeOp()
        )

    def run(self, request: Payload, op: FakeOp | None = None) -> Payload:
        return self.core.handle(request, op or FakeOp())

    def open(
        self,
        session_id: str = "a",
        *,
        window: int = 256,
        prompt_format: str = "raw",
        kv_digest: str = "kv",
        k_type: str = "f16",
    ) -> OpenResult:
        result = self.run(
            OpenOp(
                session_id=session_id,
                prompt_format=prompt_format,
                window=window,
                k_type=k_type,
                v_type="f16",
                kv_digest=kv_digest,
                runtime_digest="rt",
            )
        )
        assert isinstance(result, OpenResult)
        return result

    def ensure(self, prefix: PromptIn, session_id: str = "a", op: FakeOp | None = None) -> Status:
        result = self.run(EnsureOp(session_id=session_id, prefix=prefix), op)
        assert isinstance(result, Status)
        return result

    def suffix(
        self,
        suffix: PromptIn,
        session_id: str = "a",
        op: FakeOp | None = None,
        *,
        extend: bool = False,
    ) -> Status:
        result = self.run(SuffixOp(session_id=session_id, suffix=suffix, extend=extend), op)
        assert isinstance(result, Status)
        return result

    def decode(
        self,
        options_: DecodeIn | None = None,
        session_id: str = "a",
        op: FakeOp | None = None,
        *,
        turn_id: str = "",
    ) -> FinalOut:
        result = self.run(
            DecodeOp(
                session_id=session_id,
                turn_id=turn_id or self._next_turn(),
                options=options_ or options(),
            ),
            op,
        )
        assert isinstance(result, FinalOut)
        return result

    def turn(
        self,
        prefix: PromptIn,
        suffix: PromptIn,
        options_: DecodeIn | None = None,
        session_id: str = "a",
        op: FakeOp | None = None,
        *,
        turn_id: str = "",
    ) -> FinalOut:
        result = self.run(
            TurnOp(
                session_id=session_id,
                turn_id=turn_id or self._next_turn(),
                prefix=prefix,
                suffix=suffix,
                options=options_ or options(),
            ),
            op,
        )
        assert isinstance(result, FinalOut)
        return result

    def close(self, session_id: str = "a", *, discard: bool = False) -> CloseResult:
        result = self.run(CloseOp(session_id=session_id, discard=discard))
        assert isinstance(result, CloseResult)
        return result

    def explain(self, session_id: str = "a") -> ExplainResult:
        result = self.run(ExplainOp(session_id=session_id))
        assert isinstance(result, ExplainResult)
        return result

    def check_records(self) -> None:
        """What the pool believes of each context is what the engine holds."""
        pool = self.core.model.pool
        assert pool is not None
        for entry in pool.contexts:
            assert isinstance(entry.engine_context, FakeContext)
            assert entry.tokens.tolist() == entry.engine_context.tokens

    def fresh_answer(
        self, prefix: PromptIn, suffix: PromptIn | None, options_: DecodeIn | None = None
    ) -> tuple[str, list[int], FinalOut]:
        """What a new worker answers to the same prompt: the reference for every reuse."""
        other = Harness(FakeEngine(micro_batch=self.engine.micro_batch))
        other.engine.bias = self.engine.bias
        other.open(window=4096, prompt_format="chat" if _is_chat(prefix, suffix) else "raw")
        op = FakeOp()
        final = other.turn(prefix, suffix or raw(), options_, op=op)
        return op.text, op.ids, final

    def _next_turn(self) -> str:
        self.turns += 1
        return f"t{self.turns}"


def _is_chat(*prompts: PromptIn | None) -> bool:
    return any(
        segment.message is not None for prompt in prompts if prompt for segment in prompt.segments
    )
