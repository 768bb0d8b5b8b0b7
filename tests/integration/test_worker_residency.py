"""A session's KV outlives its worker, on real engines in real worker processes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from modeld.shared.errors import DigestMismatch, InvalidRequest
from modeld.shared.messages import (
    ChunkOut,
    CloseOp,
    DecodeIn,
    DecodeOp,
    EnsureOp,
    ExplainOp,
    ExplainResult,
    ExportOp,
    ExportResult,
    ForkOp,
    ForkResult,
    ImportOp,
    ImportResult,
    LoadOp,
    LoadResult,
    OpenOp,
    Payload,
    PromptIn,
    SamplingIn,
    SegmentIn,
    Status,
    TrimOp,
    TrimResult,
    TurnOp,
)
from tests.support.backends import BACKENDS, Backend
from tests.support.keeping import Kept, kept, until
from tests.support.residency import flipped

T = TypeVar("T")

WINDOW = 1024
HEAD = "The harbour master kept three ledgers, and trusted none of them entirely.\n" * 3
MIDDLE = "In the first he wrote the ships that came, with their cargo and their flag.\n" * 32
END = "In the last he wrote what the sea had taken, and for whom the bells rang.\n" * 4
QUESTION = "He opened the second ledger and read:"
ALL_TYPES = [(backend, types) for backend in BACKENDS for types in backend.kv_types]
EXACT_TYPES = [(backend, types) for backend in BACKENDS for types in backend.exact]


def named(cases: list[tuple[Backend, tuple[str, str]]]) -> list[object]:
    return [pytest.param(*case, id=f"{case[0].name}-{'-'.join(case[1])}") for case in cases]


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float]] = field(default_factory=list)  # the best ones of every step


class Serving:
    """A model loaded in a worker, and what is asked of it."""

    def __init__(self, running: Kept, backend: Backend, types: tuple[str, str], path: Path) -> None:
        self.running, self.backend, self.types, self.path = running, backend, types, path
        self.loaded: LoadResult | None = None

    async def load(self) -> LoadResult:
        await self.running.keeper.ready(None)
        k_type, v_type = self.types
        self.loaded = await self.ask(
            LoadOp(
                path=str(self.path), model="m", digest="", threads=2, k_type=k_type, v_type=v_type
            ),
            LoadResult,
        )
        return self.loaded

    async def die(self) -> None:
        """The worker is killed; another one comes, and loads."""
        running = self.running
        seen = len(running.deaths)
        os.kill(running.keeper.pid or 0, signal.SIGKILL)
        await until(lambda: len(running.deaths) > seen)
        await self.load()

    async def ask(self, request: Payload, kind: type[T]) -> T:
        result = await self.running.keeper.call(1, request, credit=10_000).result()
        assert isinstance(result, kind)
        return result

    async def open(self, name: str) -> None:
        k_type, v_type = self.types
        await self.running.keeper.call(
            1,
            OpenOp(
                session_id=name, prompt_format="raw", window=WINDOW, k_type=k_type, v_type=v_type,
                kv_digest="kv", runtime_digest="rt",
            ),
        ).result()  # fmt: skip

    async def close(self, name: str) -> None:
        await self.running.keeper.call(1, CloseOp(session_id=name, discard=True)).result()

    async def ensure(self, name: str, *texts: str) -> Status:
        return await self.ask(EnsureOp(session_id=name, prefix=prompt(*texts)), Status)

    async def turn(self, name: str, *texts: str) -> Answer:
        request = TurnOp(
            session_id=name, turn_id="t", prefix=prompt(*texts), suffix=prompt(QUESTION),
            options=OPTIONS,
        )  # fmt: skip
        return await self.answer(request)

    async def go_on(self, name: str) -> Answer:
        return await self.answer(DecodeOp(session_id=name, turn_id="t", options=OPTIONS))

    async def answer(self, request: Payload) -> Answer:
        operation, answer = self.running.keeper.call(1, request, credit=10_000), Answer()
        while (payload := await operation.next()) is not None:
            if isinstance(payload, ChunkOut):
                answer.ids += payload.token_ids
                for step in payload.logprobs:
                    answer.logprobs += [(one.token_id, one.logprob) for one in step.top]
        await operation.result()
        assert len(answer.ids) == OPTIONS.max_tokens
        assert len(answer.logprobs) == OPTIONS.max_tokens * OPTIONS.top_logprobs
        return answer

    async def export(self, name: str, path: Path, begin: int = 0, end: int = -1) -> ExportResult:
        request = ExportOp(session_id=name, path=str(path), begin=begin, end=end)
        return await self.ask(request, ExportResult)

    async def import_(self, name: str, path: Path) -> ImportResult:
        return await self.ask(ImportOp(session_id=name, path=str(path)), ImportResult)


OPTIONS = DecodeIn(
    sampling=SamplingIn(), max_tokens=16, token_ids=True, top_logprobs=3, ignore_eos=True
)


def prompt(*texts: str) -> PromptIn:
    return PromptIn(segments=[SegmentIn(text=text) for text in texts])


@asynccontextmanager
async def serving(
    request: pytest.FixtureRequest, tmp_path: Path, backend: Backend, types: tuple[str, str]
) -> AsyncIterator[Serving]:
    path: Path = request.getfixturevalue(backend.model)
    async with kept(tmp_path, module=backend.module) as running:
        made = Serving(running, backend, types, path)
        await made.load()
        yield made


@pytest.mark.real
@pytest.mark.parametrize(("backend", "types"), named(ALL_TYPES))
async def test_a_session_goes_on_bit_for_bit_after_its_worker_was_killed(
    request: pytest.FixtureRequest, tmp_path: Path, backend: Backend, types: tuple[str, str]
) -> None:
    async with serving(request, tmp_path, backend, types) as worker:
        assert worker.loaded is not None
        for name in ("state.blocks", "state.whole"):
            assert worker.loaded.capabilities[name].startswith("yes: ")
            assert "bit for bit" in worker.loaded.capabilities[name]
        assert "/".join(types) in worker.loaded.exact_state_types
        await worker.open("a")
        size = (await worker.ensure("a", HEAD, MIDDLE)).prefix
        assert size > 512
        assert size % 32  # neither whole blocks nor whole chunks
        written = await worker.export("a", tmp_path / "state")
        assert written.tokens == size
        assert written.file_bytes == (tmp_path / "state").stat().st_size
        assert written.exact, written.exact_reason
        expected = await worker.turn("a", HEAD, MIDDLE)

        await worker.die()
        await worker.open("b")
        taken = await worker.import_("b", tmp_path / "state")
        assert (taken.tokens, taken.resident, taken.retained) == (size, 0, size)
        assert taken.exact, taken.exact_reason
        status = await worker.ensure("b", HEAD, MIDDLE)
        assert (status.reused, status.prefilled, status.resident) == (size, 0, size)
        again = await worker.export("b", tmp_path / "again")
        assert again.digest == written.digest
        assert (tmp_path / "again").read_bytes() == (tmp_path / "state").read_bytes()
        assert await worker.turn("b", HEAD, MIDDLE) == expected


@pytest.mark.real
@pytest.mark.parametrize(("backend", "types"), named(EXACT_TYPES))
async def test_a_parked_range_returns_after_the_survivors_went_on_without_it(
    request: pytest.FixtureRequest, tmp_path: Path, backend: Backend, types: tuple[str, str]
) -> None:
    async with serving(request, tmp_path, backend, types) as worker:
        await worker.open("a")
        whole = (HEAD, MIDDLE, END)
        head = (await worker.ensure("a", HEAD)).prefix
        middle = (await worker.ensure("a", HEAD, MIDDLE)).prefix
        begin, end = head // 32 * 32, middle // 32 * 32
        assert end - begin > 512  # more than a chunk
        expected = await worker.turn("a", *whole)
        parked = await worker.export("a", tmp_path / "middle", begin, end)
        assert (parked.tokens, parked.exact) == (end - begin, True)

        without = await worker.ensure("a", HEAD, END)
        assert head - 1 <= without.reused < middle
        assert without.prefilled == without.prefix - without.reused
        alone = await worker.turn("a", HEAD, END)
        await worker.open("b")
        assert await worker.turn("b", HEAD, END) == alone
        await worker.close("b")

        cut = await worker.ask(TrimOp(session_id="a", keep=begin), TrimResult)
        assert cut.resident == begin
        taken = await worker.import_("a", tmp_path / "middle")
        assert (taken.begin, taken.end, taken.exact) == (begin, end, True)
        status = await worker.ensure("a", *whole)
        assert status.reused == end
        assert status.prefilled == status.prefix - end
        assert await worker.turn("a", *whole) == expected
        again = await worker.export("a", tmp_path / "again", begin, end)
        assert again.digest == parked.digest


@pytest.mark.real
@pytest.mark.parametrize(("backend", "types"), named(EXACT_TYPES))
async def test_a_fork_and_its_source_go_on_alike_and_apart(
    request: pytest.FixtureRequest, tmp_path: Path, backend: Backend, types: tuple[str, str]
) -> None:
    async with serving(request, tmp_path, backend, types) as worker:
        await worker.open("a")
        first = await worker.turn("a", HEAD)
        before = await worker.ask(ExplainOp(session_id="a"), ExplainResult)
        made = await worker.ask(ForkOp(session_id="a", new_session_id="b"), ForkResult)
        assert made.copied == made.resident == before.resident
        forked = await worker.ask(ExplainOp(session_id="b"), ExplainResult)
        assert forked.segments == before.segments
        assert forked.counters["evaluated_tokens"] == 0
        second = await worker.go_on("b")
        other = await worker.turn("b", MIDDLE)  # elsewhere, over what it shared
        assert await worker.go_on("a") == second
        await worker.close("a")
        await worker.open("c")
        assert await worker.turn("c", HEAD) == first
        assert await worker.turn("b", MIDDLE) == other


@pytest.mark.real
@pytest.mark.parametrize(("backend", "types"), named(EXACT_TYPES))
async def test_what_is_refused_leaves_the_session_as_it_was(
    request: pytest.FixtureRequest, tmp_path: Path, backend: Backend, types: tuple[str, str]
) -> None:
    async with serving(request, tmp_path, backend, types) as worker:
        await worker.open("a")
        size = (await worker.ensure("a", HEAD)).prefix
        written = await worker.export("a", tmp_path / "state")
        for at in (100, written.file_bytes - written.payload_bytes, written.file_bytes - 1):
            with pytest.raises(DigestMismatch):
                await worker.import_("a", flipped(tmp_path / "state", at, tmp_path / "flipped"))
        with pytest.raises(InvalidRequest, match="doesn't exist yet"):
            await worker.export("a", tmp_path / "state")
        with pytest.raises(InvalidRequest, match="absolute"):
            await worker.export("a", Path("state"))
        await worker.export("a", tmp_path / "range", 32)
        with pytest.raises(InvalidRequest, match="the session holds"):
            await worker.import_("a", tmp_path / "range")
        status = await worker.ensure("a", HEAD)
        assert (status.reused, status.prefilled) == (size, 0)
        expected = await worker.turn("a", HEAD)
        # Over what it holds: the same state in the place of a longer one.
        taken = await worker.import_("a", tmp_path / "state")
        assert (taken.resident, taken.retained) == (size, 0)
        assert await worker.turn("a", HEAD) == expected
