"""A core harness whose sessions evict, and a second opinion on what they should hold."""

from __future__ import annotations

import numpy as np

from modeld.shared.messages import (
    AdmitOp,
    AdmitResult,
    ColdIn,
    LoadOp,
    OpenOp,
    OpenResult,
    PromptIn,
    SegmentIn,
)
from modeld.workers.session import Session
from tests.support.core_harness import FakeOp, Harness
from tests.support.fake_engine import FakeContext, FakeEngine


def numbered(count: int, start: int = 0) -> str:
    """Text of ``count`` tokens for the fake tokenizer, in which every six tell where they are."""
    return "".join(f"{start + at:05d} " for at in range(-(-count // 6)))[:count]


def pinned(text: str) -> SegmentIn:
    return SegmentIn(text=text, cache_class="task_pinned")


def segments(*given: SegmentIn | str) -> PromptIn:
    return PromptIn(
        segments=[one if isinstance(one, SegmentIn) else SegmentIn(text=one) for one in given]
    )


class Evicting(Harness):
    """Sessions under overflow evict; ``cold_bytes`` 0: nothing is parked."""

    _reference = FakeEngine(micro_batch=64)

    def __init__(
        self, engine: FakeEngine | None = None, *, cold_bytes: int = 1 << 30, max_contexts: int = 1
    ) -> None:
        super().__init__(engine or FakeEngine(micro_batch=64, end_bias=-100.0))
        cold = ColdIn(ram_bytes=cold_bytes) if cold_bytes else None
        self.run(LoadOp(path="m", model="m", digest="d", max_contexts=max_contexts, cold=cold))

    def open_evicting(
        self, session_id: str = "a", *, window: int = 1024, prompt_format: str = "raw"
    ) -> OpenResult:
        result = self.run(
            OpenOp(
                session_id=session_id, prompt_format=prompt_format, window=window, k_type="f16",
                v_type="f16", kv_digest="kv", runtime_digest="rt", overflow="evict",
            )
        )  # fmt: skip
        assert isinstance(result, OpenResult)
        return result

    def admit(self, session_id: str = "a", op: FakeOp | None = None, **what: object) -> AdmitResult:
        result = self.run(AdmitOp(session_id=session_id, **what), op)  # type: ignore[arg-type]
        assert isinstance(result, AdmitResult)
        return result

    def session(self, session_id: str = "a") -> Session:
        return self.core.model.sessions.by_id[session_id]

    def held(self, session_id: str = "a") -> list[int]:
        """What the engine holds of what is attended."""
        session = self.session(session_id)
        context = session.entry.engine_context
        assert isinstance(context, FakeContext)
        return context.tokens[: session.logical]

    def hot(self, tape: list[int], session_id: str = "a") -> list[int]:
        """The tokens of ``tape`` that the session says are attended, in order."""
        blocks = [block for block in self.explain(session_id).blocks if block.state == "hot"]
        return [token for block in blocks for token in tape[block.begin : block.end]]

    def fresh_context(self, tokens: list[int]) -> FakeContext:
        """One that is fed exactly these, of an engine of its own."""
        self._reference.bias = self.engine.bias
        context = FakeContext(self._reference, 1 << 20, 0)
        context.evaluate(tokens, 0, cancelled=lambda: False)
        return context

    def logits_after(self, tokens: list[int]) -> np.ndarray:
        return self.fresh_context(tokens).logits()
