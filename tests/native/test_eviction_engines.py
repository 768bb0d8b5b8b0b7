"""Conversations beyond their window on both engines: what goes on is what a fresh context gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.messages import (
    AdmitOp,
    AdmitResult,
    ColdIn,
    DecodeOp,
    ExplainOp,
    ExplainResult,
    FinalOut,
    LoadOp,
    LoadResult,
    OpenOp,
    Payload,
    PromptIn,
    SegmentIn,
    Status,
    SuffixOp,
)
from modeld.workers.core import SessionCore
from modeld.workers.engine import Engine, EngineContext
from modeld.workers.llama.engine import LlamaEngine
from modeld.workers.openvino.engine import OpenVinoEngine
from modeld.workers.session import Session
from tests.support import openvino_models, tiny_models
from tests.support.core_harness import FakeOp, options

WINDOW, SINK, RECENT, BLOCK = 1024, 256, 256, 256
FACT = "the vault opens with QZX-77 {~} "
KINDS = ("llama", "openvino")


class Worker:
    """A core with a tiny model of one engine, and a session that evicts."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self.engine = engine
        self.core = SessionCore(engine)
        self.opened = 0
        loaded = self.core.handle(
            LoadOp(
                path=str(path), model="m", digest="", n_batch=256, n_ubatch=256, threads=1,
                max_contexts=1, window=WINDOW, cold=ColdIn(ram_bytes=1 << 28),
            ),
            FakeOp(),
        )  # fmt: skip
        assert isinstance(loaded, LoadResult)
        self.loaded = loaded

    def open(self) -> None:
        """A session of its own ``kv_digest``, so that none finds what another left."""
        self.opened += 1
        self.name = f"s{self.opened}"
        if self.opened > 1:
            del self.core.model.sessions.by_id[f"s{self.opened - 1}"]
            pool = self.core.model.pool
            assert pool is not None
            pool.release(pool.contexts[0])
        self.run(
            OpenOp(
                session_id=self.name, prompt_format="raw", window=WINDOW, k_type="f16",
                v_type="f16", kv_digest=self.name, runtime_digest="rt", overflow="evict",
            )
        )  # fmt: skip

    def run(self, request: Payload, op: FakeOp | None = None) -> Payload:
        return self.core.handle(request, op or FakeOp())

    def prompt(self, text: str) -> Status:
        suffix = PromptIn(segments=[SegmentIn(text=text)])
        status = self.run(SuffixOp(session_id=self.name, suffix=suffix))
        assert isinstance(status, Status)
        return status

    def decode(self, tokens: int) -> FinalOut:
        asked = options(tokens, temperature=1.5, seed=self.opened)
        asked.ignore_eos = True
        final = self.run(DecodeOp(session_id=self.name, turn_id="t", options=asked))
        assert isinstance(final, FinalOut)
        return final

    def admit(self, **what: object) -> AdmitResult:
        told = self.run(AdmitOp(session_id=self.name, **what))  # type: ignore[arg-type]
        assert isinstance(told, AdmitResult)
        return told

    def explain(self) -> ExplainResult:
        told = self.run(ExplainOp(session_id=self.name))
        assert isinstance(told, ExplainResult)
        return told

    @property
    def session(self) -> Session:
        return self.core.model.sessions.by_id[self.name]

    @property
    def tape(self) -> list[int]:
        return self.session.conversation()

    @property
    def held(self) -> list[int]:
        tokens: list[int] = self.session.logical_tokens().tolist()
        return tokens

    def fresh(self, tokens: list[int], steps: int = 0) -> EngineContext:
        """A context that is fed exactly these, the last ``steps`` as sampled tokens are."""
        made = self.engine.new_context(WINDOW, "f16", "f16")
        prompt = len(tokens) - steps
        assert made.evaluate(tokens[:prompt], 0, cancelled=lambda: False) == prompt
        for at in range(prompt, len(tokens)):
            made.step(tokens[at], at)
        return made

    def same_as_fresh(self, steps: int = 0) -> bool:
        """Whether KV and logits are, bit for bit, those of a fresh context of the same tokens."""
        entry, size = self.session.entry, len(self.held)
        made = self.fresh(self.held, steps)
        try:
            whole = size // BLOCK * BLOCK
            mine = entry.engine_context
            same = np.array_equal(mine.export_state(0, whole), made.export_state(0, whole))
            return bool(same and np.array_equal(mine.logits(), made.logits()))
        finally:
            made.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Worker]]:
    workers: dict[str, Worker] = {}

    def of(kind: str) -> Worker:
        if kind not in workers:
            folder = tmp_path_factory.mktemp(kind)
            if kind == "llama":
                workers[kind] = Worker(LlamaEngine(), tiny_models.llama(folder / "tiny.gguf"))
            else:
                workers[kind] = Worker(OpenVinoEngine(), openvino_models.tiny_ir(folder / "tiny"))
        return workers[kind]

    yield of
    for worker in workers.values():
        worker.core.close()


@pytest.fixture(params=KINDS)
def worker(request: pytest.FixtureRequest, made: Callable[[str], Worker]) -> Worker:
    one = made(request.param)
    one.open()
    return one


def text(tokens: int) -> str:
    """About so many tokens, in which no two places are alike."""
    random = np.random.default_rng(tokens)
    return "".join(chr(c) for c in random.choice(list(b"abdfgijklmpsuvw0123456789 "), tokens))


def test_the_engine_says_that_it_can_and_what_it_costs(worker: Worker) -> None:
    told = worker.loaded.capabilities
    assert told["overflow.evict"].startswith("yes: what goes out is parked in blocks of 256")
    assert told["exact_warm"].startswith("yes: ")


def test_ten_windows_go_by_and_each_end_is_what_a_fresh_context_gives(worker: Worker) -> None:
    status = worker.prompt(text(9 * WINDOW))
    length = status.suffix
    assert length > 8 * WINDOW
    assert status.prefilled == length + status.recomputed == status.seen_tokens + status.recomputed
    assert worker.same_as_fresh()
    room = status.available
    for _ in range(5):
        final = worker.decode(room + 1 + 40)  # 40 tokens beyond the next eviction
        assert final.stop_reason == "length"
        # The newest wasn't evaluated before; what stood there may begin alike.
        assert RECENT - 5 < final.recomputed < RECENT
        assert worker.held == [*worker.tape[:SINK], *worker.tape[-RECENT - 40 : -1]]
        assert worker.same_as_fresh(steps=39)
        assert final.resident + final.parked + final.gone == len(worker.tape) - 1
        room = final.available - 1  # the last one sampled takes a place
    assert final.seen_tokens == len(worker.tape) > 10 * WINDOW
    assert final.gone == 0


def test_a_fact_goes_out_is_said_to_be_out_and_comes_back_by_range_and_by_query(
    worker: Worker,
) -> None:
    head = text(300)
    worker.prompt(head + FACT + text(9 * WINDOW))
    fact = worker.engine.tokenizer.encode(FACT)
    at = next(i for i in range(len(worker.tape)) if worker.tape[i : i + 8] == fact[2:10]) - 2
    (block,) = [b for b in worker.explain().blocks if b.begin <= at < b.end]
    assert (block.state, block.end >= at + len(fact)) == ("parked", True)
    assert len(worker.tape) > 9 * WINDOW

    told = worker.admit(begin=SINK, end=2 * BLOCK)
    assert at < 2 * BLOCK
    assert (told.admitted, told.gone) == (BLOCK, 0)
    # What stood there before may begin alike.
    assert BLOCK - 4 < told.restored <= BLOCK
    assert told.recomputed == told.resident - 2 * BLOCK
    assert worker.held[: 2 * BLOCK] == worker.tape[: 2 * BLOCK]
    assert worker.same_as_fresh()

    worker.prompt("another ")
    worker.prompt(head + FACT + text(9 * WINDOW))
    told = worker.admit(query="QZX-77 {~}", budget_tokens=BLOCK)
    assert told.ranges == [[SINK, 2 * BLOCK]]
    assert worker.same_as_fresh()
    tail = len(worker.held) - 2 * BLOCK
    assert worker.held == [*worker.tape[: 2 * BLOCK], *worker.tape[-tail:]]


@pytest.mark.parametrize("kind", ["mamba", "gemma3"])
def test_a_memory_that_cannot_go_back_evaluates_again_and_goes_on(
    kind: str, tmp_path: Path
) -> None:
    worker = Worker(LlamaEngine(), getattr(tiny_models, kind)(tmp_path / f"{kind}.gguf"))
    try:
        assert "kept as tokens only" in worker.loaded.capabilities["overflow.evict"]
        worker.open()
        room = worker.prompt(text(2 * WINDOW)).available
        final = worker.decode(room + 20)
        assert final.stop_reason == "length"
        assert final.recomputed > 0
        assert worker.held[:SINK] == worker.tape[:SINK]
        assert final.resident + final.parked + final.gone == len(worker.tape) - 1
        assert worker.admit(begin=SINK, end=SINK + 50).admitted == 50
        # A recurrent state is computed the same again; a window's rows differ by rounding.
        made = worker.fresh(worker.held)
        entry = worker.session.entry
        assert np.allclose(made.logits(), entry.logits(), atol=0 if kind == "mamba" else 5e-3)
        made.close()
    finally:
        worker.core.close()
