"""Whole sessions saved and restored on real engines: what goes on is what would have gone on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest

from modeld.shared.errors import ContextOverflow, DigestMismatch
from modeld.shared.messages import (
    ChunkOut,
    DecodeIn,
    DecodeOp,
    EnsureOp,
    LoadOp,
    LoadResult,
    OpenOp,
    Payload,
    PromptIn,
    RestoreOp,
    RestoreResult,
    SamplingIn,
    SaveOp,
    SaveResult,
    SegmentIn,
    Status,
    TurnOp,
)
from modeld.workers.core import SessionCore
from tests.support import openvino_models, tiny_models
from tests.support.backends import BACKENDS, LLAMA, OPENVINO, Backend
from tests.support.core_harness import FakeOp, chat, turn_ref
from tests.support.keeping import kept, until
from tests.support.residency import flipped

T = TypeVar("T")

OPTIONS = DecodeIn(
    sampling=SamplingIn(), max_tokens=7, token_ids=True, top_logprobs=3, ignore_eos=True
)
SYSTEM = ("system", "you answer in the order in which you were asked, and in nothing else " * 4)
ASKED = [("user", f"what of the {n} things came before the others? " * 2) for n in (3, 5, 8, 13)]


@dataclass(frozen=True)
class Case:
    """``ranges``: whether parts of the KV go out. ``exact``: whether what follows is bit-equal."""

    backend: Backend
    model: Callable[[Path], Path]
    types: tuple[str, str] = ("f16", "f16")
    ranges: bool = True
    exact: bool = True


def openvino(path: Path) -> Path:
    gguf = openvino_models.tiny_gguf(path.with_suffix(".gguf"))
    return openvino_models.converted(gguf, path)


CASES = {
    "llama": Case(LLAMA, tiny_models.llama),
    "quantised": Case(LLAMA, tiny_models.qwen2, ("q8_0", "f16")),
    "sliding": Case(LLAMA, tiny_models.gemma3, ranges=False, exact=False),
    "recurrent": Case(LLAMA, tiny_models.mamba, ranges=False),
    "openvino": Case(OPENVINO, openvino),
    "openvino-u8": Case(OPENVINO, openvino, ("u8", "u8")),
}


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float]] = field(default_factory=list)

    def take(self, chunk: ChunkOut) -> None:
        self.ids += chunk.token_ids
        for step in chunk.logprobs:
            self.logprobs += [(one.token_id, one.logprob) for one in step.top]


class Worker:
    """A session core over a real engine with a session ``a``."""

    def __init__(self, case: Case, path: Path) -> None:
        self.core = SessionCore(case.backend.engine())
        k_type, v_type = self.types = case.types
        self.loaded = self.ask(
            LoadOp(
                path=str(path), model="m", digest="", n_batch=128, n_ubatch=64, threads=1,
                k_type=k_type, v_type=v_type,
            ),
            LoadResult,
        )  # fmt: skip
        self.open("a")

    def open(self, name: str, window: int = 1024) -> None:
        k_type, v_type = self.types
        self.core.handle(
            OpenOp(
                session_id=name, prompt_format="chat", window=window, k_type=k_type, v_type=v_type,
                kv_digest="kv", runtime_digest=f"rt {window}",
            ),
            FakeOp(),
        )  # fmt: skip

    def ask(self, request: Payload, kind: type[T], op: FakeOp | None = None) -> T:
        result = self.core.handle(request, op or FakeOp())
        assert isinstance(result, kind)
        return result

    def turn(self, number: int) -> tuple[Answer, list[Status]]:
        """The conversation's next, its answers named as they were generated."""
        before = [
            part for at in range(number) for part in (ASKED[at], turn_ref(f"t{at}"))
        ]  # fmt: skip
        op, answer = FakeOp(), Answer()
        request = TurnOp(
            session_id="a", turn_id=f"t{number}", prefix=chat(SYSTEM, *before),
            suffix=chat(ASKED[number]), options=OPTIONS,
        )  # fmt: skip
        self.core.handle(request, op)
        for chunk in op.of(ChunkOut):
            answer.take(chunk)
        assert len(answer.logprobs) == 3 * len(answer.ids) == 21
        return answer, op.of(Status)

    def save(self, folder: Path) -> SaveResult:
        return self.ask(SaveOp(session_id="a", folder=str(folder)), SaveResult)

    def restore(self, folder: Path, record: str, name: str = "a") -> RestoreResult:
        request = RestoreOp(session_id=name, folder=str(folder), record=record)
        return self.ask(request, RestoreResult)


@contextmanager
def working(case: Case, path: Path) -> Iterator[Worker]:
    worker = Worker(case, path)
    try:
        yield worker
    finally:
        worker.core.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    made: dict[Callable[[Path], Path], Path] = {}

    def of(case: Case) -> Path:
        if case.model not in made:
            made[case.model] = case.model(tmp_path_factory.mktemp("model") / "model")
        return made[case.model]

    return of


@pytest.mark.parametrize("name", CASES)
def test_a_conversation_goes_on_in_another_engine_as_it_would_have(
    name: str, models: Callable[[Case], Path], tmp_path: Path
) -> None:
    case = CASES[name]
    path = models(case)
    with working(case, path) as first:
        for capability in ("snapshot", "durable"):
            assert first.loaded.capabilities[capability].startswith("yes: ")
        saves = []
        for number in range(3):
            first.turn(number)
            saves.append(first.save(tmp_path))
        expected, said = first.turn(3)
        if case.exact:
            assert first.save(tmp_path).exact is True
    for before, made in pairwise(saves):
        payload = sum(part.file_bytes for part in made.parts)
        if case.ranges:
            assert made.parts[0] == before.parts[0]
            assert made.written_bytes - made.record_bytes < payload
        else:
            assert len(made.parts) == 1

    with working(case, path) as second:
        back = second.restore(tmp_path, saves[-1].record)
        assert back.tokens == saves[-1].tokens
        assert back.turn_ids == ["t0", "t1", "t2"]
        assert back.exact is case.exact, back.exact_reason
        answer, statuses = second.turn(3)
        assert [s.reused for s in statuses] == [s.reused for s in said]
        assert [s.prefilled for s in statuses] == [s.prefilled for s in said]
        assert statuses[0].turns_recomputed == 0
        if case.exact:
            assert answer == expected
        else:  # up to rounding
            assert answer.ids[:1] == expected.ids[:1]
            near = zip(answer.logprobs[:3], expected.logprobs[:3], strict=True)
            assert max(abs(one[1] - other[1]) for one, other in near) < 1e-2
        again = second.save(tmp_path)
        if case.ranges:
            assert again.parts[0] == saves[-1].parts[0]


@pytest.mark.parametrize("name", ["llama", "recurrent", "openvino"])
def test_what_cannot_be_brought_back_leaves_the_live_session_as_it_was(
    name: str, models: Callable[[Case], Path], tmp_path: Path
) -> None:
    case = CASES[name]
    with working(case, models(case)) as worker:
        worker.turn(0)
        made = worker.save(tmp_path)
        worker.turn(1)
        whole = worker.save(tmp_path)
        worker.open("small", window=64)
        with pytest.raises(ContextOverflow) as refused:
            worker.restore(tmp_path, made.record, "small")
        assert refused.value.metadata["effective"] == "64"
        for path in (tmp_path / made.parts[-1].name, tmp_path / made.record):
            middle = path.stat().st_size // 2
            for at in (middle, -1):
                flipped(path, at, path)
                with pytest.raises(DigestMismatch):
                    worker.restore(tmp_path, made.record)
                flipped(path, at, path)
        cancelled = worker.ask(
            RestoreOp(session_id="a", folder=str(tmp_path), record=made.record),
            RestoreResult,
            FakeOp(cancel_at=0),
        )
        assert (cancelled.cancelled, cancelled.resident) == (True, whole.tokens)
        answer, statuses = worker.turn(2)
        assert statuses[0].reused == whole.tokens

    with working(case, models(case)) as other:
        other.restore(tmp_path, whole.record)
        assert other.turn(2)[0] == answer
        other.open("large", window=1536)
        back = other.restore(tmp_path, whole.record, "large")
        assert (back.tokens, back.exact) == (whole.tokens, False)
        assert "runtime_digest" in back.exact_reason


# --- the real small model, across a worker's death -----------------------------------------------

HEAD = "The harbour master kept three ledgers, and trusted none of them entirely.\n" * 14
QUESTION = "He opened the second ledger and read:"


def plain(*texts: str) -> PromptIn:
    return PromptIn(segments=[SegmentIn(text=text) for text in texts])


@pytest.mark.real
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
async def test_a_saved_session_outlives_its_worker(
    request: pytest.FixtureRequest, tmp_path: Path, backend: Backend
) -> None:
    path: Path = request.getfixturevalue(backend.model)
    folder = tmp_path / "saved"
    folder.mkdir()
    async with kept(tmp_path, module=backend.module) as running:

        async def ask(asked: Payload, kind: type[T]) -> T:
            result = await running.keeper.call(1, asked, credit=10_000).result()
            assert isinstance(result, kind)
            return result

        async def ready() -> None:
            await running.keeper.ready(None)
            await ask(LoadOp(path=str(path), model="m", digest="", threads=2), LoadResult)
            await running.keeper.call(
                1,
                OpenOp(
                    session_id="a", prompt_format="raw", window=512, k_type="f16", v_type="f16",
                    kv_digest="kv", runtime_digest="rt",
                ),
            ).result()  # fmt: skip

        async def answer(asked: Payload) -> Answer:
            operation, answer = running.keeper.call(1, asked, credit=10_000), Answer()
            while (payload := await operation.next()) is not None:
                if isinstance(payload, ChunkOut):
                    answer.take(payload)
            await operation.result()
            assert len(answer.ids) == 7
            return answer

        await ready()
        await answer(
            TurnOp(
                session_id="a", turn_id="t", prefix=plain(HEAD), suffix=plain(QUESTION),
                options=OPTIONS,
            )
        )  # fmt: skip
        made = await ask(SaveOp(session_id="a", folder=str(folder)), SaveResult)
        assert made.exact, made.exact_reason
        files = sum(entry.stat().st_size for entry in folder.iterdir())
        assert files == made.written_bytes
        expected = await answer(DecodeOp(session_id="a", turn_id="t", options=OPTIONS))
        seen = len(running.deaths)
        os.kill(running.keeper.pid or 0, signal.SIGKILL)
        await until(lambda: len(running.deaths) > seen)

        await ready()
        back = await ask(
            RestoreOp(session_id="a", folder=str(folder), record=made.record), RestoreResult
        )
        assert (back.tokens, back.resident, back.exact) == (made.tokens, made.tokens, True)
        assert await answer(DecodeOp(session_id="a", turn_id="t", options=OPTIONS)) == expected
        status = await ask(EnsureOp(session_id="a", prefix=plain(HEAD)), Status)
        assert (status.reused, status.prefilled) == (status.prefix, 0)
