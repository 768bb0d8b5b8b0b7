"""KV that went into the cold store and came back, on tiny models of both engines: bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.messages import (
    ColdIn,
    LoadOp,
    LoadResult,
    OpenOp,
    ParkOp,
    ParkResult,
    PromptIn,
    ResumeOp,
    ResumeResult,
    SampledTokenOut,
    SegmentIn,
    Status,
    TurnOp,
)
from modeld.workers.core import SessionCore
from modeld.workers.engine import Engine
from modeld.workers.llama.engine import LlamaEngine
from modeld.workers.openvino.engine import OpenVinoEngine
from tests.support import tiny_models
from tests.support.core_harness import FakeOp, Harness, options, raw, turn_ref
from tests.support.openvino_models import tiny_ir

WINDOW = 1024
GIB = 1 << 30


def text(seed: int, size: int = 600) -> str:
    """So many tokens, or a few less: bytes that hardly ever merge."""
    letters = "bcfgjklmpqrvwxyz0123456789"
    return "".join(letters[i] for i in np.random.default_rng(seed).integers(0, len(letters), size))


class Worker(Harness):
    """A core over a real engine, with one context: whoever comes pushes out who was there."""

    def __init__(self, engine: Engine, request: LoadOp) -> None:
        self.core = SessionCore(engine)
        self.turns = 0
        self.types = request.k_type, request.v_type
        loaded = self.run(request)
        assert isinstance(loaded, LoadResult)
        self.result = loaded

    def open_(self, session_id: str = "a", window: int = WINDOW) -> None:
        k_type, v_type = self.types
        op = OpenOp(
            session_id=session_id, prompt_format="raw", window=window, k_type=k_type,
            v_type=v_type, kv_digest="kv", runtime_digest="rt",
        )  # fmt: skip
        self.run(op)

    def ask(self, prefix: str, question: str = " q", session_id: str = "a") -> Answer:
        op = FakeOp()
        turn = TurnOp(
            session_id=session_id, turn_id=self._next_turn(), prefix=raw(prefix),
            suffix=raw(question), options=options(16, top_logprobs=1),
        )  # fmt: skip
        turn.options.ignore_eos = True
        self.run(turn, op)
        return Answer(op)

    def go_on(self, session_id: str = "a") -> Answer:
        op, wanted = FakeOp(), options(16, top_logprobs=1)
        wanted.ignore_eos = True
        self.decode(wanted, session_id, op)
        return Answer(op)

    def go_on_from(self, prefix: str, turn_id: str) -> Answer:
        """A turn behind one of before, whose answer is a part of the prompt."""
        op = FakeOp()
        so_far = PromptIn(segments=[*raw(prefix, " q").segments, turn_ref(turn_id)])
        wanted = options(16, top_logprobs=1)
        wanted.ignore_eos = True
        # Sampled ids stand where a control token bounds them.
        end = SegmentIn(text="<|im_end|>", parse_special=True)
        self.turn(so_far, PromptIn(segments=[end, *raw("01").segments]), wanted, op=op)
        return Answer(op)

    def park(self) -> ParkResult:
        result = self.run(ParkOp(session_id="a"))
        assert isinstance(result, ParkResult)
        return result

    def resume(self) -> ResumeResult:
        result = self.run(ResumeOp(session_id="a"))
        assert isinstance(result, ResumeResult)
        return result

    def pushed_out(self) -> None:
        """Whatever the one context held is another session's now, which goes without a trace."""
        self.open_("other", WINDOW // 2)
        self.run_close("other")

    def run_close(self, session_id: str) -> None:
        self.close(session_id, discard=True)


class Answer:
    """Tokens with their log-probabilities, which are equal only where the logits are."""

    def __init__(self, op: FakeOp) -> None:
        self.statuses = op.of(Status)
        sampled: list[SampledTokenOut] = [
            one for chunk in op.sent if hasattr(chunk, "logprobs") for one in chunk.logprobs
        ]
        self.tokens = [(one.sampled.token_id, one.sampled.logprob) for one in sampled]

    @property
    def restored(self) -> int:
        return sum(status.restored for status in self.statuses)

    @property
    def prefilled(self) -> int:
        return sum(status.prefilled for status in self.statuses)


Make = Callable[..., Worker]


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Make]:
    """A worker with one of the generated models, by its maker's name."""
    workers: list[Worker] = []

    def make(kind: str, k_type: str = "f16", *, flash: bool = False, disk: bool = False) -> Worker:
        path = tmp_path / f"{kind}.gguf"
        if not path.exists():
            getattr(tiny_models, kind)(path)
        workers.append(Worker(LlamaEngine(), load_op(path, k_type, "f16", tmp_path, disk, flash)))
        return workers[-1]

    yield make
    for worker in workers:
        worker.core.close()


@pytest.fixture(scope="module")
def ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_ir(tmp_path_factory.mktemp("cold") / "tiny")


@pytest.fixture
def openvino(ir: Path, tmp_path: Path) -> Iterator[Make]:
    workers: list[Worker] = []

    def make(kv_type: str, *, disk: bool = False) -> Worker:
        worker = Worker(OpenVinoEngine(), load_op(ir, kv_type, kv_type, tmp_path, disk))
        assert worker.result.executor == "paged"
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.core.close()


def load_op(
    path: Path, k_type: str, v_type: str, folder: Path, disk: bool, flash: bool = False
) -> LoadOp:
    into = folder / "cold"
    into.mkdir(exist_ok=True)
    cold = ColdIn(ram_bytes=0 if disk else GIB, disk_bytes=GIB if disk else 0, folder=str(into))
    return LoadOp(
        path=str(path), model="m", digest="", n_batch=128, n_ubatch=64, threads=1,
        k_type=k_type, v_type=v_type, max_contexts=1, cold=cold, flash_attn=flash,
    )  # fmt: skip


def check_goes_on(parked: Worker, straight: Worker) -> None:
    """Parked and resumed between two decodes of an answer, and pushed out between two turns."""
    a, b = text(1), text(2)
    for worker in (parked, straight):
        worker.open_()
        worker.ask(a)
    held = len(parked.core.model.sessions.by_id["a"].entry)
    assert parked.park().lost == 0
    parked.pushed_out()
    resumed = parked.resume()
    assert (resumed.restored, resumed.missing) == (held, 0)
    assert parked.go_on().tokens == straight.go_on().tokens

    parked.ask(b)  # in the place of it
    returned, stayed = parked.ask(a, " another"), straight.ask(a, " another")
    assert returned.restored > 500 > 60 > returned.prefilled == stayed.prefilled
    assert returned.tokens == stayed.tokens


@pytest.mark.parametrize(
    ("kind", "k_type", "flash"),
    [("llama", "f16", False), ("qwen2", "q8_0", False), ("qwen2", "f16", True),
     ("deepseek2", "f16", False)],
)  # fmt: skip
def test_a_dense_llama_model_goes_on_bit_for_bit(
    llama: Make, kind: str, k_type: str, flash: bool
) -> None:
    parked = llama(kind, k_type, flash=flash)
    told = parked.result.capabilities["cold_store"]
    assert told.startswith("yes: in blocks")
    assert "bit for bit" in told
    assert f"{k_type}/f16" in told
    check_goes_on(parked, llama(kind, k_type, flash=flash))


@pytest.mark.parametrize("kv_type", ["f16", "u8"])
def test_a_paged_openvino_model_goes_on_bit_for_bit(openvino: Make, kv_type: str) -> None:
    parked = openvino(kv_type)
    told = parked.result.capabilities["cold_store"]
    assert told.startswith("yes: in blocks")
    assert "bit for bit" in told
    assert kv_type in told
    check_goes_on(parked, openvino(kv_type))


@pytest.mark.parametrize("kind", ["mamba", "jamba"])
def test_a_recurrent_model_is_parked_whole_and_goes_on_bit_for_bit(llama: Make, kind: str) -> None:
    parked, straight = llama(kind), llama(kind)
    assert parked.result.capabilities["cold_store"].startswith("yes: all that is held, or nothing")
    a, b = text(1), text(2)
    for worker in (parked, straight):
        worker.open_()
        worker.ask(a)
    held = len(parked.core.model.sessions.by_id["a"].entry)
    assert parked.park().lost == 0
    parked.pushed_out()
    resumed = parked.resume()
    assert (resumed.restored, resumed.missing) == (held, 0)
    assert parked.go_on().tokens == straight.go_on().tokens
    assert parked.explain().counters["slot_cold_blocks"] == 1
    held = len(parked.core.model.sessions.by_id["a"].entry)
    parked.ask(b)  # the whole state goes
    assert parked.explain().counters["slot_cold_blocks"] == 2
    # The answers are a part of it, and it can't go back to the prompt: all is evaluated.
    returned = parked.ask(a, " another")
    assert returned.restored == 0
    assert returned.prefilled > 600
    # What goes on from all of it finds it.
    returned, stayed = parked.go_on_from(a, "t2"), straight.go_on_from(a, "t2")
    assert returned.restored == held
    assert returned.tokens == stayed.tokens


def test_a_sliding_window_is_parked_whole_and_said_not_to_be_exact(llama: Make) -> None:
    parked = llama("gemma3")
    told = parked.result.capabilities["cold_store"]
    assert told.startswith("yes: all that is held, or nothing")
    assert told.endswith("up to rounding once the window has moved on")
    parked.open_()
    parked.ask(text(1))
    held = len(parked.core.model.sessions.by_id["a"].entry)
    assert parked.park().lost == 0
    parked.pushed_out()
    assert parked.resume().restored == held
    straight = llama("gemma3")
    straight.open_()
    straight.ask(text(1))
    ours, theirs = parked.go_on().tokens, straight.go_on().tokens
    assert np.allclose([p for _, p in ours[:2]], [p for _, p in theirs[:2]], atol=5e-3)


@pytest.mark.parametrize("kind", ["llama", "openvino"])
def test_blocks_on_disk_serve_a_worker_that_comes_later(
    kind: str, llama: Make, openvino: Make
) -> None:
    def make(*, disk: bool) -> Worker:
        return llama("llama", disk=disk) if kind == "llama" else openvino("f16", disk=disk)

    first = make(disk=True)
    first.open_()
    first.ask(text(1))
    assert first.park().disk_bytes > 0
    first.core.close()
    later, straight = make(disk=True), make(disk=False)
    for worker in (later, straight):
        worker.open_()
    returned, evaluated = later.ask(text(1)), straight.ask(text(1))
    assert returned.restored > 500 > 20 > returned.prefilled
    assert returned.tokens == evaluated.tokens
    assert later.core.cold_bytes == 0
