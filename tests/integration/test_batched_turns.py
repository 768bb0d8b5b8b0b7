"""Turns of batched sessions through a real daemon: together, and each as if it were alone.

The worker takes a little longer for every token, so that answers last while others begin.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from modeld.client import Chunk, Client, Description, Session, StopReason
from modeld.client.convert import identity_to_proto
from modeld.client.streams import TurnStream
from modeld.shared.errors import (
    ContextOverflow,
    GenerationStale,
    InsufficientMemory,
    ManifestMismatch,
    SessionFatal,
)
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2 as pb
from tests.support import openvino_models, tiny_models
from tests.support.daemon import Background, RunningDaemon, Stubs, eventually, running_daemon
from tests.support.faulting import FAULTS
from tests.support.product import Told, ask

pytestmark = pytest.mark.real

BACKENDS = ("llama", "openvino")
TINY = "tiny"
WINDOW = 768
STREAMS = 4
LONG = 70  # tokens
LONGER = 250
TOKEN_S = 0.002  # that each takes longer
PROMPTS = (
    "A stone bridge crossed the river near the old mill.",
    "The second one is about weather. " * 6,
    "1 2 3 4 5 6 7 8 9 10 11 12 13 " * 4,
    "d",
)


@pytest.fixture(scope="module", params=BACKENDS)
def daemon(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningDaemon]:
    backend = str(request.param)
    folder = tmp_path_factory.mktemp(backend)
    made: Path = (
        tiny_models.llama(folder / "tiny.gguf")
        if backend == "llama"
        else openvino_models.tiny_ir(folder / "tiny")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULTS, f"decode:slow={TOKEN_S}")
        with running_daemon(backend=backend) as running, running.client() as client:
            client.import_model(made, name=TINY, model_type=backend)
            yield running


@pytest.fixture(scope="module")
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def stubs(daemon: RunningDaemon, client: Client) -> Iterator[Stubs]:
    made = Stubs(daemon, client.owner_instance_id)
    yield made
    made.close()


def opened(client: Client, layout: str = "batched", **options: Any) -> Session:
    given = {"window": WINDOW, "prompt_format": "raw", "layout": layout}
    return client.open_session(TINY, **{**given, **options})


def begin(session: Session, number: int, **options: Any) -> TurnStream:
    given = {"max_tokens": LONG, "token_ids": True, "ignore_eos": True}
    return session.turn(PROMPTS[number], " go:", **{**given, **options})


class Timed:
    """An answer that a thread of its own reads: its ids, and when they began and ended to come."""

    def __init__(self, session: Session, number: int, **options: Any) -> None:
        self.began = self.ended = 0.0
        self._reading = Background(lambda: self._read(Reading(session, number, **options)))

    def _read(self, reading: Reading) -> list[int]:
        self.began = time.monotonic()
        ids = reading.ids()
        self.ended = time.monotonic()
        return ids

    def ids(self) -> list[int]:
        found: list[int] = self._reading.result()
        return found


class Reading:
    """An answer of which the first chunk has come."""

    def __init__(self, session: Session, number: int, **options: Any) -> None:
        self.stream = begin(session, number, **options)
        self._chunks = self.stream.chunks()
        self._first = next(self._chunks)

    def ids(self) -> list[int]:
        """All of it, read to its end."""
        chunks: list[Chunk] = [self._first, *self._chunks]
        return [token for chunk in chunks for token in chunk.token_ids]

    @property
    def stop(self) -> StopReason:
        assert self.stream.final is not None
        return self.stream.final.stop_reason


def raw(text: str) -> pb.Prompt:
    return pb.Prompt(segments=[common.Segment(raw=common.RawText(text=text))])


def answer(session: Session, number: int, tokens: int = LONG) -> Told:
    return ask(session, PROMPTS[number], " go:", tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(client: Client) -> list[list[int]]:
    """What each prompt is answered while nothing else runs."""
    found = []
    for number in range(len(PROMPTS)):
        session = opened(client)
        found.append(answer(session, number).ids)
        session.close(discard=True)
    return found


def queued(client: Client) -> int:
    return sum(slot.queued for slot in client.status().slots)


def test_four_sessions_answer_at_once_what_each_answers_alone(
    client: Client, expected: list[list[int]]
) -> None:
    assert [len(ids) for ids in expected] == [LONG] * STREAMS
    with ExitStack() as stack:
        sessions = [stack.enter_context(opened(client)) for _ in PROMPTS]
        told = {one.layout.value for one in client.sessions()}
        assert told == {"LAYOUT_BATCHED"}
        numbers = sessions[-1].resolution.context
        assert numbers.effective.tokens == WINDOW
        assert numbers.hot.tokens == STREAMS * WINDOW
        for _ in range(2):  # cold, then with all of the prompts there
            answers = [Timed(session, number) for number, session in enumerate(sessions)]
            assert [one.ids() for one in answers] == expected
            assert max(one.began for one in answers) < min(one.ended for one in answers)


def test_what_happens_to_one_concerns_no_other(client: Client, expected: list[list[int]]) -> None:
    """One is cancelled, one is refused, one stops by itself, and one goes on."""
    with ExitStack() as stack:
        sessions = [stack.enter_context(opened(client)) for _ in PROMPTS]
        cancelled, going, stopped = (Reading(sessions[n], n) for n in (0, 1, 2))
        with pytest.raises(ContextOverflow):
            ask(sessions[3], "far too long " * WINDOW, " go:", 5)
        cancelled.stream.cancel()
        short = answer(sessions[3], 3, 7)
        assert (short.ids, short.stop) == (expected[3][:7], StopReason.LENGTH)
        assert going.ids() == expected[1]
        assert stopped.ids() == expected[2]
        assert answer(sessions[0], 0).ids == expected[0]


def test_a_reader_who_takes_nothing_stops_no_one_else(
    client: Client, daemon: RunningDaemon, stubs: Stubs, expected: list[list[int]]
) -> None:
    channel = grpc.insecure_channel(
        daemon.endpoint,
        options=[("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)],
    )
    method: Any = channel.unary_stream(
        "/modeld.v1.SessionService/Turn",
        request_serializer=pb.TurnRequest.SerializeToString,
        response_deserializer=pb.TurnEvent.FromString,
    )
    with opened(client) as slow, opened(client) as quick:
        handle = slow.handle
        request = pb.TurnRequest(
            session=common.SessionHandle(
                session_id=handle.session_id, generation=handle.generation
            ),
            identity=identity_to_proto(slow.identity),
            prefix=raw(PROMPTS[0]),
            suffix=raw(" go:"),
            options=pb.DecodeOptions(ignore_eos=True, top_logprobs=20, stream_interval_ms=0),
        )
        call = method(request, metadata=stubs.metadata())
        next(call)
        assert len(answer(quick, 3, 2 * LONGER).ids) == 2 * LONGER
        slot = client.status().slots[0]
        assert (slot.holder_operation, slot.queued) == ("turn", 0)  # the slow one's still
        call.cancel()
        assert 0 < slow.explain().resident < 2 * LONGER  # it would be further than the quick one
        assert answer(slow, 0).ids == expected[0]
    channel.close()


def test_a_question_about_tokens_is_answered_while_every_stream_s_turn_runs(
    client: Client, expected: list[list[int]]
) -> None:
    with ExitStack() as stack:
        sessions = [stack.enter_context(opened(client)) for _ in PROMPTS]
        answers = [Timed(one, n, max_tokens=LONGER) for n, one in enumerate(sessions)]
        eventually(lambda: all(one.began for one in answers))
        told = client.tokenize(TINY, PROMPTS[0])
        assert client.detokenize(TINY, told.token_ids).text == PROMPTS[0]
        answered = time.monotonic()
        assert [one.ids()[:LONG] for one in answers] == expected
        assert answered < min(one.ended for one in answers)


def test_an_isolated_turn_waits_for_the_batch_and_is_not_overtaken(client: Client) -> None:
    with ExitStack() as stack:
        first, second, late = (stack.enter_context(opened(client)) for _ in range(3))
        isolated = stack.enter_context(opened(client, "isolated"))
        before = answer(isolated, 2).ids
        running = [Reading(one, n, max_tokens=LONGER) for n, one in enumerate((first, second))]
        waiting = Background(lambda: Reading(isolated, 2))
        eventually(lambda: queued(client) == 1)
        behind = Background(lambda: answer(late, 3, 5))
        eventually(lambda: queued(client) == 2)
        for reading in running:
            reading.ids()
        reading = waiting.result()
        assert queued(client) == 1  # the one that came later waits still
        assert reading.ids() == before
        assert len(behind.result().ids) == 5


def test_a_killed_worker_ends_each_running_turn_by_itself(
    client: Client, daemon: RunningDaemon
) -> None:
    sessions = [opened(client) for _ in PROMPTS]
    isolated = opened(client, "isolated")
    readings = [Reading(session, n, max_tokens=0) for n, session in enumerate(sessions)]
    waiting = Background(lambda: answer(isolated, 0, 5))
    eventually(lambda: queued(client) == 1)
    (worker,) = daemon.workers()
    worker.send_signal(signal.SIGKILL)
    for reading in readings:
        with pytest.raises(SessionFatal):
            reading.ids()
    with pytest.raises(GenerationStale):
        waiting.result()
    with opened(client) as session:
        assert len(answer(session, 0, 5).ids) == 5


def test_streams_that_are_taken_are_refused_and_given_back(client: Client) -> None:
    sessions = [opened(client, session_key=f"k{number}") for number in range(STREAMS)]
    with pytest.raises(InsufficientMemory) as refused:
        opened(client)
    assert refused.value.metadata["streams"] == refused.value.metadata["streams_in_use"] == "4"
    with pytest.raises(ManifestMismatch) as other:
        opened(client, "isolated", session_key="k0")
    assert other.value.metadata["field"] == "layout"
    sessions[1].close()
    with opened(client) as session:
        assert len(answer(session, 0, 5).ids) == 5
    sessions[2].detach()
    with opened(client) as one, opened(client) as two:  # the detached one makes room
        assert len(answer(one, 0, 5).ids) == len(answer(two, 1, 5).ids) == 5


def test_a_durable_session_is_saved_while_others_go_on_and_comes_back(
    client: Client, expected: list[list[int]]
) -> None:
    with ExitStack() as stack:
        kept = stack.enter_context(opened(client, session_key="kept", durable=True))
        other = stack.enter_context(opened(client))
        running = Timed(other, 1)
        told = answer(kept, 0)
        assert told.ids == expected[0]
        assert told.final.saved is not None
        assert told.final.saved.tokens > LONG
        assert running.ids() == expected[1]
        client.unload_model(force=True)
        back = stack.enter_context(opened(client, session_key="kept", durable=True))
        assert back.opened.resumed is not None
        assert back.opened.resumed.tokens == told.final.saved.tokens
        assert answer(back, 0).ids == expected[0]
        back.close(discard=True)


def test_a_plan_of_the_layout_is_what_an_open_then_gets(client: Client) -> None:
    def planned_for(layout: str, window: int = WINDOW) -> Description:
        return client.describe(TINY, window=window, prompt_format="raw", layout=layout)

    with opened(client, "isolated"):  # so that the model is loaded
        planned, one = planned_for("batched"), planned_for("isolated")
    assert planned.resolution_source == "hypothetical"
    assert planned.resolution.kv_bytes == STREAMS * one.resolution.kv_bytes
    with opened(client) as session:
        given, foretold = session.resolution.context, planned.resolution.context
        assert given.effective.tokens == foretold.effective.tokens == WINDOW
        assert session.resolution.kv_bytes * STREAMS == planned.resolution.kv_bytes
        again = planned_for("batched", window=0)
        assert again.resolution_source == "open_session"
        assert again.resolution.kv_bytes == session.resolution.kv_bytes


def test_the_capability_says_that_it_is_served(client: Client) -> None:
    with opened(client) as session:
        assert session.capabilities["layout.batched"].answer == "yes"


def test_an_idle_batch_makes_room_for_an_isolated_session_and_comes_back(tmp_path: Path) -> None:
    """Where memory is for one of them: each takes the other's place, and none loses its KV."""
    model = tiny_models.llama(tmp_path / "tiny.gguf")
    limits: dict[str, Any] = {"user_limit_bytes": 48 << 20, "cold_ram_bytes": 8 << 20}
    with running_daemon(**limits) as daemon, daemon.client() as client, ExitStack() as stack:
        client.import_model(model, name=TINY, model_type="llama")
        batched = [stack.enter_context(opened(client, window=2048)) for _ in range(2)]
        before = [answer(session, 2 - number, 5) for number, session in enumerate(batched)]
        isolated = stack.enter_context(opened(client, "isolated", window=2048))
        assert [one.parked for one in client.sessions()] == [True, True, False]
        alone = answer(isolated, 2, 5)
        for session, told, number in zip(batched, before, (2, 1), strict=True):
            again = answer(session, number, 5)
            assert again.ids == told.ids
            assert again.before.restored + again.after.restored > 64
            assert [one.parked for one in client.sessions()][2]
        assert not any(one.parked for one in client.sessions()[:2])
        assert answer(isolated, 2, 5).ids == alone.ids
        assert [one.parked for one in client.sessions()] == [True, True, False]
