"""Two engines in one daemon: what is lost with one worker, and that nothing of the other is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from modeld.client import Client, Session, StopReason
from modeld.shared.errors import GenerationStale, ModelQuarantined, SessionFatal
from tests.support.backends import share_conversion
from tests.support.daemon import Background, RunningDaemon, eventually
from tests.support.faulting import (
    LONG_TEXT,
    QUESTION,
    WINDOW,
    DataRoot,
    assert_lost,
    assert_stale,
    caught,
    data_root,
    put_in_store,
    slot,
    until_state,
    until_working,
)
from tests.support.openvino_models import tiny_gguf
from tests.support.product import ask

BOTH = ("llama", "openvino")
# Of a stream that is under way while the other worker is lost.
TOKENS = 160
PREFIX, SUFFIX = QUESTION


def other(backend: str) -> str:
    return BOTH[1 - BOTH.index(backend)]


class Stream:
    """A long greedy answer, read in the background."""

    def __init__(self, session: Session, tokens: int = TOKENS) -> None:
        self.got: list[int] = []
        self.stop: StopReason | None = None
        stream = session.turn(
            PREFIX,
            SUFFIX,
            max_tokens=tokens,
            ignore_eos=True,
            token_ids=True,
            stream_interval_ms=0,
        )

        def read() -> None:
            for chunk in stream.chunks():
                self.got.extend(chunk.token_ids)
            assert stream.final is not None
            self.stop = stream.final.stop_reason

        self.running = Background(read)
        eventually(lambda: len(self.got) >= 3)

    def result(self) -> list[int]:
        self.running.result()
        assert self.stop is StopReason.LENGTH
        return self.got


class Pair:
    """One daemon that serves both; its models bear the names of their backends."""

    def __init__(self, root: DataRoot, daemon: RunningDaemon, stack: ExitStack) -> None:
        self.root, self.daemon = root, daemon
        self.client, self.second = (stack.enter_context(daemon.client()) for _ in range(2))
        self.alone: dict[str, list[int]] = {}

    def open(self, name: str, client: Client | None = None, window: int = WINDOW) -> Session:
        return (client or self.client).open_session(name, window=window, prompt_format="raw")

    def wait_in_queue(self, backend: str, work: Callable[[], object]) -> Background:
        before = slot(self.client, backend).queued
        waiting = Background(work)
        eventually(lambda: slot(self.client, backend).queued == before + 1)
        return waiting


@pytest.fixture(scope="module")
def pair(demo_model: Path, demo_folder: Path, evidence: Path) -> Iterator[Pair]:
    """The same file served by both engines."""
    with data_root(evidence=evidence) as root, ExitStack() as stack:
        for backend in BOTH:
            put_in_store(root.path, demo_model, backend, name=backend)
        share_conversion(demo_folder, root.path)
        # A load takes long while that file isn't there.
        slowed = root.path / "slowed"
        slowed.touch()
        daemon = root.start(
            backends=",".join(BOTH), heartbeat_limit_s=2.0, faults=f"load:slow=60:once={slowed}"
        )
        made = Pair(root, daemon, stack)
        for backend in BOTH:
            with made.open(backend) as session:
                made.alone[backend] = Stream(session).result()
        yield made


# --- one of them is lost -------------------------------------------------------------------------


@dataclass
class Struck:
    """A call that runs on the worker that will be lost, and the session that it is for."""

    running: Background
    session: Session | None


def in_load(pair: Pair, victim: str) -> Struck:
    pair.client.unload_model(victim, force=True)
    (pair.root.path / "slowed").unlink()
    running = Background(lambda: pair.open(victim, pair.second))
    eventually((pair.root.path / "slowed").exists)
    return Struck(running, None)


def in_prefill(pair: Pair, victim: str) -> Struck:
    session = pair.open(victim)
    running = Background(lambda: session.ensure_prefix(LONG_TEXT))
    until_working(pair.client, "ensure_prefix", victim)
    return Struck(running, session)


def in_decode(pair: Pair, victim: str) -> Struck:
    session = pair.open(victim)
    return Struck(Stream(session, tokens=0).running, session)


# Each moment and each way, though not each with each: a worker that dies six times within two
# minutes is given up. All of them together are tried on each engine alone.
STRIKES: Sequence[tuple[Callable[[Pair, str], Struck], signal.Signals]] = (
    (in_load, signal.SIGKILL),
    (in_prefill, signal.SIGSEGV),
    (in_decode, signal.SIGSTOP),
    (in_decode, signal.SIGKILL),
)


@pytest.mark.parametrize(
    ("begin", "signum"),
    STRIKES,
    ids=[f"{signum.name}-{begin.__name__}" for begin, signum in STRIKES],
)
@pytest.mark.parametrize("victim", BOTH)
def test_what_runs_and_is_open_on_the_other_worker_goes_on(
    pair: Pair, victim: str, begin: Callable[[Pair, str], Struck], signum: signal.Signals
) -> None:
    survivor = other(victim)
    kept = pair.open(survivor)
    kept.ensure_prefix(PREFIX)
    reused = kept.ensure_prefix(PREFIX)
    before = slot(pair.client, survivor)
    struck = begin(pair, victim)
    lost = slot(pair.client, victim)
    stream = Stream(kept)
    os.kill(lost.worker.pid, signum)
    assert stream.stop is None, "the other one's stream was over before"

    cause = assert_lost(caught(SessionFatal, struck.running.result), signum)
    assert stream.result() == pair.alone[survivor]
    assert slot(pair.client, victim).last_fatal == cause
    if struck.session is not None:
        error = caught(GenerationStale, struck.session.explain)
        assert_stale(error, struck.session, slot(pair.client, victim).generation, cause)

    # It is served again, under a number that the daemon never gave before.
    back = pair.open(victim)
    now = pair.client.status()
    assert back.handle.generation == now.generation == pair.root.durable_generation()
    assert now.generation > lost.generation
    assert slot(pair.client, victim).worker.restarts == lost.worker.restarts + 1
    told = ask(back, PREFIX, SUFFIX, max_tokens=TOKENS, ignore_eos=True)
    assert told.ids == pair.alone[victim]

    # Of the other nothing has changed: its worker, its sessions, what they hold and their handles.
    after = slot(pair.client, survivor)
    assert after.generation == before.generation == kept.handle.generation < now.generation
    assert (after.worker.pid, after.worker.restarts) == (before.worker.pid, before.worker.restarts)
    assert (after.sessions, after.last_fatal) == (before.sessions, before.last_fatal)
    again = kept.ensure_prefix(PREFIX)
    assert (again.reused, again.prefilled) == (reused.reused, reused.prefilled)
    assert again.reused > 0
    kept.close()
    back.close()
    pair.client.clear_quarantine(victim)  # forgets this death


def test_a_waiting_call_is_told_the_generation_of_its_own_handle(pair: Pair) -> None:
    # The other slot takes numbers in between, so that it isn't the one before the newest.
    session, waiting = pair.open("openvino"), pair.open("openvino", pair.second)
    pair.client.unload_model("llama", force=True)
    pair.open("llama").close()
    assert pair.client.status().generation > session.handle.generation + 1
    stream = Stream(session, tokens=0)
    queued = pair.wait_in_queue("openvino", lambda: ask(waiting, PREFIX, SUFFIX))
    os.kill(slot(pair.client, "openvino").worker.pid, signal.SIGKILL)
    cause = assert_lost(caught(SessionFatal, stream.running.result), signal.SIGKILL)
    error = caught(GenerationStale, queued.result)
    assert_stale(error, waiting, slot(pair.client, "openvino").generation, cause)
    pair.client.clear_quarantine("openvino")


def test_both_at_work_at_once_give_the_answers_that_each_gives_alone(pair: Pair) -> None:
    with pair.open("llama") as one, pair.open("openvino") as another:
        streams = [Stream(one), Stream(another)]
        assert streams[0].stop is None, "they never ran together"
        answers = [stream.result() for stream in streams]
    assert answers == [pair.alone["llama"], pair.alone["openvino"]]


# --- one of them is asked to go ------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that load in no time, on either engine."""
    folder = tmp_path_factory.mktemp("tiny")
    return tiny_gguf(folder / "one.gguf"), tiny_gguf(folder / "two.gguf", seed=2)


@pytest.fixture
def quick(tiny: tuple[Path, Path]) -> Iterator[DataRoot]:
    """The tiny models as "llama" and "llama2", "openvino" and "openvino2"."""
    with data_root(backend=",".join(BOTH)) as root:
        for backend in BOTH:
            put_in_store(root.path, tiny[0], backend, name=backend)
            put_in_store(root.path, tiny[1], backend, name=f"{backend}2")
        yield root


def test_an_unload_and_a_switch_of_one_leave_the_other_as_it_is(quick: DataRoot) -> None:
    with ExitStack() as stack:
        pair = Pair(quick, quick.start(), stack)
        for leaving in BOTH:
            staying = other(leaving)
            kept, gone = (pair.open(name, window=512) for name in (staying, leaving))
            alone = ask(kept, PREFIX, SUFFIX).ids
            before = slot(pair.client, staying)
            assert pair.client.unload_model(leaving, force=True).sessions_closed == 1
            assert "unload" in caught(GenerationStale, gone.explain).metadata["cause"]
            gone = pair.open(leaving, window=512)
            pair.client.switch_model(f"{leaving}2", gone.handle.generation)
            assert "switch" in caught(GenerationStale, gone.explain).metadata["cause"]
            assert slot(pair.client, leaving).model == f"{leaving}2"
            after = slot(pair.client, staying)
            assert (after.model, after.generation) == (staying, before.generation)
            assert after.worker.pid == before.worker.pid
            again = ask(kept, PREFIX, SUFFIX)
            assert again.ids == alone
            assert again.before.prefilled <= 1
            pair.client.unload_model(f"{leaving}2", force=True)
            pair.client.unload_model(staying, force=True)


def test_a_model_that_is_idle_is_released_while_the_other_is_in_use(quick: DataRoot) -> None:
    with ExitStack() as stack:
        pair = Pair(quick, quick.start(idle_release_s=1), stack)
        for idle in BOTH:
            used = other(idle)
            forgotten, kept = (pair.open(name, window=512) for name in (idle, used))

            def released(kept: Session = kept, idle: str = idle) -> bool:
                ask(kept, PREFIX, SUFFIX, max_tokens=2)
                return slot(pair.client, idle).state.value == "SLOT_IDLE"

            eventually(released)
            error = caught(GenerationStale, forgotten.explain)
            assert error.metadata["cause"] == "idle release"
            kept.explain()
            assert kept.handle.generation == slot(pair.client, used).generation
            kept.close()


def test_a_drain_lets_both_finish_and_ends_both(quick: DataRoot) -> None:
    with ExitStack() as stack:
        # Each token takes a while, so that both answers are under way.
        pair = Pair(quick, quick.start(faults="decode:slow=0.02"), stack)
        sessions = [pair.open(backend, window=512) for backend in BOTH]
        workers = [process.pid for process in pair.daemon.workers()]
        assert len(workers) == 2
        streams = [Stream(session, tokens=100) for session in sessions]
        assert pair.client.drain().running == 2
        assert [len(stream.result()) for stream in streams] == [100, 100]
        assert pair.daemon.wait() == 0
        assert not any(psutil.pid_exists(pid) for pid in workers)


def test_a_model_that_kills_one_engine_is_kept_from_that_one_alone(quick: DataRoot) -> None:
    # The same file is there for the other engine, which has nothing to do with it.
    with ExitStack() as stack:
        pair = Pair(quick, quick.start(faults="decode:slow=0.02"), stack)
        for _ in range(3):
            stream = Stream(pair.open("openvino", window=512), tokens=0)
            os.kill(slot(pair.client, "openvino").worker.pid, signal.SIGSEGV)
            caught(SessionFatal, stream.running.result)
        caught(ModelQuarantined, lambda: pair.open("openvino", window=512))
        assert pair.client.status().quarantined_models == ("openvino",)
        assert len(ask(pair.open("llama", window=512), PREFIX, SUFFIX).ids) == 8
        until_state(pair.client, "IDLE", "openvino")
        with pair.open("openvino2", window=512) as session:
            assert len(ask(session, PREFIX, SUFFIX).ids) == 8
        assert pair.client.clear_quarantine("openvino").was_quarantined
