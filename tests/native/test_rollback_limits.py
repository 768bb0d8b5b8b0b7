"""Going back further than a model's memory allows: refused or evaluated again, never wrong.

Each way back is tried on generated models of each kind of memory, with flash attention off, which
is all that a daemon asks for, and on, which only a worker's own protocol can ask for. What follows
is held against a session that never went anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from modeld.shared.errors import (
    InvalidRequest,
    SessionFatal,
    SessionNotFound,
    UnsupportedFeature,
)
from modeld.shared.messages import (
    AdmitOp,
    AdmitResult,
    ChunkOut,
    CloseOp,
    ColdIn,
    DecodeIn,
    DecodeOp,
    EmbedOp,
    EmbedResult,
    EnsureOp,
    ExplainOp,
    ExplainResult,
    ForkOp,
    LoadOp,
    LoadResult,
    OpenOp,
    ParkOp,
    ParkResult,
    Payload,
    PromptIn,
    RestoreOp,
    ResumeOp,
    ResumeResult,
    SamplingIn,
    SaveOp,
    SegmentIn,
    Status,
    SuffixOp,
    TrimOp,
    TrimResult,
)
from modeld.workers.core import SessionCore
from modeld.workers.engine import EngineContext
from modeld.workers.llama.context import LlamaContext
from modeld.workers.openvino.engine import OpenVinoEngine
from tests.support import openvino_models, tiny_models
from tests.support.backends import LLAMA, OPENVINO, Backend
from tests.support.core_harness import FakeOp
from tests.support.openvino_embedder import tiny_embedder

WINDOW, SIZE, BLOCK = 1024, 700, 256
KEEPS = (300, 699)  # of SIZE tokens
DEEP = KEEPS[:1]  # where cells that a sliding window of these models needs again are lost
OPTIONS = DecodeIn(
    sampling=SamplingIn(), max_tokens=6, token_ids=True, top_logprobs=3, ignore_eos=True
)


@dataclass(frozen=True)
class Case:
    """``off``: by how much a row's best logits may be off where it isn't bit-equal."""

    backend: Backend
    model: Callable[[Path], Path]
    types: tuple[str, str] = ("f16", "f16")
    flash: bool = False
    refuses: tuple[int, ...] = ()  # of KEEPS, where it can't go back to
    off: float = 0.0


def openvino(path: Path) -> Path:
    return openvino_models.tiny_ir(path)


F16, Q8_V = ("f16", "f16"), ("q8_0", "q8_0")
CASES = {
    "dense": Case(LLAMA, tiny_models.llama),
    "dense-flash": Case(LLAMA, tiny_models.llama, flash=True, off=5e-3),
    "latent": Case(LLAMA, tiny_models.deepseek2),
    "quantised": Case(LLAMA, tiny_models.qwen2, ("q8_0", "f16")),
    "quantised-flash": Case(LLAMA, tiny_models.qwen2, Q8_V, flash=True),
    "sliding": Case(LLAMA, tiny_models.gemma3, refuses=DEEP, off=5e-3),
    "sliding-flash": Case(LLAMA, tiny_models.gemma3, flash=True, refuses=DEEP, off=2e-2),
    "alternating": Case(LLAMA, tiny_models.gemma2, refuses=DEEP, off=5e-3),
    "recurrent": Case(LLAMA, tiny_models.mamba, refuses=KEEPS),
    "hybrid": Case(LLAMA, tiny_models.jamba, refuses=KEEPS),
    "openvino": Case(OPENVINO, openvino),
    "openvino-u8": Case(OPENVINO, openvino, ("u8", "u8"), off=2e-2),
}
DENSE = [name for name, case in CASES.items() if not case.refuses]


def text(seed: int, size: int) -> str:
    """So many tokens: letters that never merge."""
    letters = "bcfgjklmpqrvwxyz0123456789"
    return "".join(letters[i] for i in np.random.default_rng(seed).integers(0, len(letters), size))


def prompt(given: str) -> PromptIn:
    return PromptIn(segments=[SegmentIn(text=given)])


@dataclass
class Answer:
    ids: list[int]
    rows: np.ndarray  # the best log-probabilities of each step


class Worker:
    """A session core over a real engine, and sessions that never find each other's KV."""

    def __init__(self, case: Case, path: Path, contexts: int = 8) -> None:
        self.case, self.engine = case, case.backend.engine()
        self.core = SessionCore(self.engine)
        self.uses = 0
        k_type, v_type = case.types
        loaded = self.run(
            LoadOp(
                path=str(path), model="m", digest="", n_batch=128, n_ubatch=64, threads=1,
                k_type=k_type, v_type=v_type, flash_attn=case.flash, window=WINDOW,
                max_contexts=contexts,
                cold=ColdIn(ram_bytes=1 << 28),
            )
        )  # fmt: skip
        assert isinstance(loaded, LoadResult)
        self.loaded = loaded

    def run(self, request: Payload, op: FakeOp | None = None) -> Payload:
        return self.core.handle(request, op or FakeOp())

    def open(self, name: str, overflow: str = "refuse") -> None:
        k_type, v_type = self.case.types
        self.run(
            OpenOp(
                session_id=name, prompt_format="raw", window=WINDOW, k_type=k_type, v_type=v_type,
                kv_digest=f"{name} {self.uses}", runtime_digest="rt", overflow=overflow,
            )
        )  # fmt: skip

    def ensure(self, name: str, given: str) -> Status:
        status = self.run(EnsureOp(session_id=name, prefix=prompt(given)))
        assert isinstance(status, Status)
        return status

    def go_on(self, name: str) -> Answer:
        op = FakeOp()
        self.run(DecodeOp(session_id=name, turn_id="t", options=OPTIONS), op)
        steps = [step for chunk in op.of(ChunkOut) for step in chunk.logprobs]
        return Answer(op.ids, np.array([[one.logprob for one in step.top] for step in steps]))

    def fresh(self, given: str) -> Answer:
        """What a session that holds nothing answers."""
        self.open("fresh")
        assert self.ensure("fresh", given).prefilled == len(given)
        answer = self.go_on("fresh")
        self.run(CloseOp(session_id="fresh", discard=True))
        return answer

    def explain(self, name: str) -> ExplainResult:
        told = self.run(ExplainOp(session_id=name))
        assert isinstance(told, ExplainResult)
        return told

    def context(self, name: str) -> EngineContext:
        context: EngineContext = self.core.model.sessions.by_id[name].entry.engine_context
        return context

    def check(self, answer: Answer, expected: Answer) -> float:
        """That it is the same answer; by how much its first row is off."""
        off = float(np.abs(answer.rows[0] - expected.rows[0]).max())
        assert off <= self.case.off
        if not self.case.off:
            assert answer.ids == expected.ids
            assert np.array_equal(answer.rows, expected.rows)
        return off


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Worker]]:
    models: dict[Callable[[Path], Path], Path] = {}
    made: dict[tuple[str, int], Worker] = {}

    def of(name: str, contexts: int) -> Worker:
        case = CASES[name]
        if case.model not in models:
            models[case.model] = case.model(tmp_path_factory.mktemp("model") / "model")
        if (name, contexts) not in made:
            made[name, contexts] = Worker(case, models[case.model], contexts)
        return made[name, contexts]

    yield of
    for worker in made.values():
        worker.core.close()


@pytest.fixture
def make(workers: Callable[[str, int], Worker]) -> Iterator[Callable[..., Worker]]:
    """A worker of a case, which has nothing that an earlier test left."""
    used: list[Worker] = []

    def of(name: str, contexts: int = 8) -> Worker:
        worker = workers(name, contexts)
        worker.uses += 1
        used.append(worker)
        return worker

    yield of
    for worker in used:
        for session_id in list(worker.core.model.sessions.by_id):
            worker.run(CloseOp(session_id=session_id, discard=True))


@pytest.mark.parametrize("name", CASES)
def test_a_tail_is_removed_only_where_what_follows_is_right(
    name: str, make: Callable[..., Worker]
) -> None:
    worker, offs, refused = make(name), [], set()
    for keep in KEEPS:
        whole = text(keep, SIZE)  # never one that the cold store has: of a window it has no more
        worker.open("a")
        worker.ensure("a", whole)
        before = worker.explain("a").blocks
        if not worker.context("a").can_trim(keep):
            with pytest.raises(UnsupportedFeature) as error:
                worker.run(TrimOp(session_id="a", keep=keep))
            assert error.value.metadata["capability"] == "tail_removal"
            assert worker.explain("a").blocks == before
            refused.add(keep)
        else:
            told = worker.run(TrimOp(session_id="a", keep=keep))
            assert isinstance(told, TrimResult)
            assert (told.dropped, told.resident) == (SIZE - keep, keep)
        other = whole[:keep] + text(0, 30)
        status = worker.ensure("a", other)
        if keep in refused:
            assert (status.reused, status.prefilled) == (0, len(other))
            assert status.miss_reason == "CANNOT_TRIM"
        else:
            assert (status.reused, status.prefilled) == (keep, 30)
        offs.append(worker.check(worker.go_on("a"), worker.fresh(other)))
        worker.run(CloseOp(session_id="a", discard=True))
    print(name, refused, max(offs))
    assert refused == set(worker.case.refuses)


@pytest.mark.parametrize(
    "name",
    ["dense", "quantised-flash", "sliding", "sliding-flash", "recurrent", "hybrid", "openvino"],
)
def test_a_shorter_prompt_is_answered_as_if_nothing_had_been_there(
    name: str, make: Callable[..., Worker]
) -> None:
    """The way that clients have: a prompt which differs from some token on, deeper each time, of
    the session that was asked before and of one that it was forked into.
    """
    worker = make(name)
    whole, offs = text(2, SIZE), []
    worker.open("a")
    worker.ensure("a", whole)
    worker.go_on("a")
    for keep in (KEEPS[-1], KEEPS[0]):
        worker.run(ForkOp(session_id="a", new_session_id="b"))
        other = whole[:keep] + text(0, 30)
        expected = worker.fresh(other)
        for one in ("b", "a"):
            status = worker.ensure(one, other)
            assert status.reused in (0, keep)
            assert status.reused + status.prefilled == len(other)
            offs.append(worker.check(worker.go_on(one), expected))
            if one == "b":  # or its prefix would be copied
                worker.run(CloseOp(session_id="b", discard=True))
        worker.ensure("a", whole)
    print(name, max(offs))


def test_what_a_forced_rollback_would_answer_is_far_off(make: Callable[..., Worker]) -> None:
    """The comparison above sees it: the engine goes back without a word, and answers from what is
    left of the window.
    """
    worker, whole = make("sliding"), text(1, SIZE)
    worker.open("a")
    worker.ensure("a", whole)
    context = worker.context("a")
    assert isinstance(context, LlamaContext)
    assert not context.can_trim(200)
    context._traits = replace(context._traits, window_tokens=0)
    context.trim(200)
    encode = worker.engine.tokenizer.encode
    context.evaluate(encode(text(0, 30)), 200, cancelled=lambda: False)
    fresh = worker.engine.new_context(WINDOW, "f16", "f16")
    tokens = encode(whole[:200] + text(0, 30))
    fresh.evaluate(tokens, 0, cancelled=lambda: False)
    off = float(np.abs(context.logits() - fresh.logits()).max())
    print(off)
    assert off > 100 * worker.case.off
    fresh.close()


@pytest.mark.parametrize("name", ["sliding", "sliding-flash", "alternating", "recurrent", "hybrid"])
def test_a_context_that_is_told_to_go_back_too_far_answers_nothing_more(
    name: str, make: Callable[..., Worker]
) -> None:
    worker = make(name)
    for keep in (1, 300):
        worker.open("a")
        worker.ensure("a", text(1, SIZE))
        context = worker.context("a")
        assert not context.can_trim(keep)
        with pytest.raises(SessionFatal):
            context.trim(keep)
        with pytest.raises(SessionFatal):
            worker.ensure("a", text(1, SIZE) + text(3, 10))
        worker.run(CloseOp(session_id="a", discard=True))


# --- flash attention, on and off: a daemon has no setting for it ---------------------------------


@pytest.mark.parametrize("name", DENSE)
def test_blocks_that_were_parked_come_back_as_they_were(
    name: str, make: Callable[..., Worker]
) -> None:
    parked, straight = make(name, contexts=1), make(name)
    assert parked.loaded.capabilities["cold_store"].startswith("yes: in blocks")
    for worker in (parked, straight):
        worker.open("a")
        worker.ensure("a", text(1, SIZE))
        worker.go_on("a")
    told = parked.run(ParkOp(session_id="a"))
    assert isinstance(told, ParkResult)
    assert told.lost == 0
    parked.fresh(text(2, SIZE))  # in the place of it
    back = parked.run(ResumeOp(session_id="a"))
    assert isinstance(back, ResumeResult)
    assert (back.restored, back.missing) == (told.parked, 0)
    one, other = parked.go_on("a"), straight.go_on("a")
    assert one.ids == other.ids
    assert np.array_equal(one.rows, other.rows)


@pytest.mark.parametrize("name", DENSE)
def test_what_stays_is_evaluated_again_as_a_fresh_context_does(
    name: str, make: Callable[..., Worker]
) -> None:
    worker = make(name)
    assert worker.loaded.capabilities["overflow.evict"].startswith("yes")
    worker.open("a", "evict")
    suffix = prompt(text(5, 3 * WINDOW))
    status = worker.run(SuffixOp(session_id="a", suffix=suffix))
    assert isinstance(status, Status)
    assert status.parked > 0
    offs, recomputed = [], []
    for _ in range(2):
        session = worker.core.model.sessions.by_id["a"]
        tokens = session.logical_tokens().tolist()
        fresh = worker.engine.new_context(WINDOW, *worker.case.types)
        fresh.evaluate(tokens, 0, cancelled=lambda: False)
        logits = worker.context("a").logits()
        offs.append(float(np.abs(logits - fresh.logits()).max()))
        fresh.close()
        told = worker.run(AdmitOp(session_id="a", begin=BLOCK, end=2 * BLOCK))
        assert isinstance(told, AdmitResult)
        recomputed.append(told.recomputed)
    assert recomputed[0] >= BLOCK > recomputed[1]  # the second time it is there
    print(name, offs)
    assert max(offs) <= worker.case.off


def test_a_quantised_value_cache_is_refused_while_flash_attention_is_off(tmp_path: Path) -> None:
    path = tiny_models.qwen2(tmp_path / "tiny.gguf")
    worker = Worker(Case(LLAMA, tiny_models.qwen2, Q8_V), path)
    with pytest.raises(InvalidRequest, match="needs flash attention"):
        worker.open("a")
    worker.core.close()


# --- models that only embed ----------------------------------------------------------------------


def test_an_openvino_model_that_embeds_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    core = SessionCore(OpenVinoEngine())
    try:
        folder = tiny_embedder(tmp_path / "tiny").folder
        loaded = core.handle(LoadOp(path=str(folder), model="m", digest="", threads=1), FakeOp())
        assert isinstance(loaded, LoadResult)
        for capability in (
            "cold_store", "durable", "fork", "overflow.evict", "snapshot", "state.blocks",
            "state.whole", "tail_removal",
        ):  # fmt: skip
            assert loaded.capabilities[capability].startswith("no: an embedding model")
        for overflow in ("refuse", "evict"):
            with pytest.raises(UnsupportedFeature, match="embed") as refused:
                core.handle(
                    OpenOp(
                        session_id="a", prompt_format="raw", window=WINDOW, k_type="f16",
                        v_type="f16", kv_digest="kv", runtime_digest="rt", overflow=overflow,
                    ),
                    FakeOp(),
                )  # fmt: skip
            capability = refused.value.metadata["capability"]
            assert capability == ("generate" if overflow == "refuse" else "overflow.evict")
        for request in (
            SaveOp(session_id="a", folder=str(tmp_path)),
            RestoreOp(session_id="a", folder=str(tmp_path), record="r"),
            AdmitOp(session_id="a", query="q"),
            ForkOp(session_id="a", new_session_id="b"),
            ParkOp(session_id="a"),
            TrimOp(session_id="a", keep=0),
        ):
            with pytest.raises(SessionNotFound):
                core.handle(request, FakeOp())
        embedded = core.handle(EmbedOp(texts=["still there"]), FakeOp())
        assert isinstance(embedded, EmbedResult)
    finally:
        core.close()


def test_a_llama_model_that_embeds_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = GGUFWriter.write_header_to_file

    def write_causal(writer: GGUFWriter) -> None:
        writer.add_causal_attention(False)
        write(writer)

    monkeypatch.setattr(GGUFWriter, "write_header_to_file", write_causal)
    path = tiny_models.llama(tmp_path / "embeds.gguf")
    with pytest.raises(UnsupportedFeature, match="it is an embedding model"):
        Worker(CASES["dense"], path)
