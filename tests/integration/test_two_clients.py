"""Several clients on one daemon: shared prefixes, fair turns, cancels, switches, release, drain."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from modeld.client import (
    CallCancelled,
    Client,
    DeadlineExceeded,
    Deadlines,
    GenerationStale,
    InsufficientMemory,
    ManifestMismatch,
    ModelBusy,
    QueueStatus,
    Session,
    SessionClosed,
    SessionFatal,
    ShuttingDown,
    SlotState,
    SlowConsumer,
    StopReason,
    SwitchRequired,
)
from modeld.client.convert import identity_to_proto
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2 as pb
from tests.support.backends import OPENVINO, Backend
from tests.support.daemon import (
    MODEL,
    Background,
    RunningDaemon,
    Stubs,
    eventually,
    running_daemon,
    typed,
)
from tests.support.openvino_models import tiny_gguf
from tests.support.product import ask, system, text_ids, told, user
from tests.support.product import common as common_length
from tests.support.reference import Reference

pytestmark = pytest.mark.real

STORY = " The keeper wrote what the sea had brought. Storms came and went; the light did not."
LONG = STORY * 12  # some 240 tokens
NARROWER = {"llama": "q8_0", "openvino": "u8"}  # keys than f16


@pytest.fixture
def other(daemon: RunningDaemon) -> Iterator[Client]:
    """A second client, with a connection of its own."""
    with daemon.client() as connected:
        yield connected


def raw_session(client: Client, window: int = 512, **options: Any) -> Session:
    return client.open_session(MODEL, window=window, prompt_format="raw", **options)


def turn_request(session: Session, prefix: str, suffix: str, **options: Any) -> pb.TurnRequest:
    def prompt(text: str, stable: bool) -> pb.Prompt:
        return pb.Prompt(segments=[common.Segment(stable=stable, raw=common.RawText(text=text))])

    return pb.TurnRequest(
        session=common.SessionHandle(
            session_id=session.handle.session_id, generation=session.handle.generation
        ),
        identity=identity_to_proto(session.identity),
        prefix=prompt(prefix, True),
        suffix=prompt(suffix, False),
        options=pb.DecodeOptions(**options),
    )


class Holder:
    """A turn that holds the slot until it is released, in a window that lasts long enough."""

    def __init__(self, client: Client) -> None:
        session = raw_session(client, window=8192)
        self.stream = session.turn(" Count", " on", max_tokens=0, ignore_eos=True)
        next(self.stream.chunks())
        self._reading = Background(self._read)

    def _read(self) -> None:
        for _chunk in self.stream.chunks():
            pass

    def release(self) -> None:
        self.stream.cancel()
        self._reading.result()


# --- sharing what was computed -------------------------------------------------------------------


def test_two_clients_share_a_prefix_and_keep_their_own_conversations(
    client: Client, other: Client, reference: Reference
) -> None:
    rules = system("You keep the lighthouse log." + STORY * 3)
    mine, yours = (c.open_session(MODEL, window=1024) for c in (client, other))
    first = ask(mine, [rules], [user("What came ashore?")], 6)
    assert first.before.reused == 0
    second = ask(yours, [rules], [user("Did the light go out?")], 6)
    assert second.before.copied == second.before.reused == second.before.prefix
    assert second.before.prefilled == 0
    # Each goes on with its own history, whatever the other does between.
    talks = [mine.chat("Be brief."), yours.chat("Be brief.")]
    for question in ("Name a bird.", "Name a fish."):
        for talk in talks:
            stream = talk.send(question, max_tokens=5)
            stream.read()
            assert stream.prefix_status is not None
            assert stream.prefix_status.turns_recomputed == 0
    assert len(talks[0].history) == len(talks[1].history) == 5


def test_two_one_shots_share_a_prefix_through_what_a_closed_session_left(
    client: Client, other: Client
) -> None:
    with raw_session(client) as session:
        ask(session, STORY * 4, " And", 2)
        closed = session.close()
    assert closed.retained_tokens > 0
    with raw_session(other) as session:
        second = ask(session, STORY * 4, " But", 2)
    assert second.before.reused == second.before.prefix
    assert second.before.prefilled == 0


def test_a_discarded_session_leaves_nothing_to_reuse(client: Client) -> None:
    unique = " Entirely other words, said by nobody else in this house, stand here now." * 3
    session = raw_session(client)
    ask(session, unique, " And", 2)
    assert session.close(discard=True).retained_tokens == 0
    with raw_session(client) as fresh:
        assert ask(fresh, unique, " And", 2).before.reused == 0


def test_a_session_is_attached_by_its_key_with_all_it_holds(client: Client, other: Client) -> None:
    session = raw_session(client, session_key="shared")
    first = ask(session, STORY, " And", 3)
    session.detach()
    assert [s.attached for s in client.sessions()] == [False]
    attached = raw_session(other, session_key="shared")
    assert attached.handle == session.handle
    assert attached.opened.attached
    assert attached.opened.resident == first.final.resident
    assert attached.identity == session.identity
    again = ask(attached, STORY, " And", 3)
    assert (again.before.prefilled, again.after.prefilled) == (0, 1)
    assert [s.attached for s in client.sessions()] == [True]
    assert other.open_session(MODEL, session_key="shared").handle == session.handle


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_format", "chat"),
        ("profile_id", "another"),
        ("window", 1024),
        ("k_type", "another"),
        ("v_type", "f32"),
    ],
)
def test_a_key_is_refused_to_who_asks_for_another_session_than_it_names(
    client: Client, other: Client, backend: Backend, field: str, value: Any
) -> None:
    session = raw_session(client, session_key="shared")
    if value == "another":
        value = NARROWER[backend.name]
    elif field == "v_type" and backend is OPENVINO:  # keys and values have one type
        field = "k_type"
    options = {"window": 512, "prompt_format": "raw", field: value}
    with pytest.raises(ManifestMismatch) as refused:
        other.open_session(MODEL, session_key="shared", **options)
    assert refused.value.metadata["field"] == field
    assert refused.value.metadata["asserted"] == str(value)
    assert session.explain().resident == 0


def test_sessions_of_other_kv_types_share_nothing(
    client: Client, other: Client, backend: Backend
) -> None:
    session = raw_session(client)
    ask(session, STORY * 3, " And", 2)
    if backend is OPENVINO:  # compiled for one type: another means loading it again
        with pytest.raises(SwitchRequired) as refused:
            raw_session(other, k_type="u8")
        assert refused.value.metadata["resident_k_type"] == "f16"
        session.close()
    told_ = ask(raw_session(other, k_type=NARROWER[backend.name]), STORY * 3, " And", 2)
    assert (told_.before.reused, told_.before.copied) == (0, 0)


# --- queueing ------------------------------------------------------------------------------------


def test_turns_of_two_sessions_alternate_however_many_one_asks(
    client: Client, stubs: Stubs
) -> None:
    a, b = raw_session(client), raw_session(client)
    holder = Holder(client)
    finished: list[str] = []
    lock = threading.Lock()

    def run(name: str, session: Session) -> None:
        request = turn_request(session, " One", " two", max_tokens=8, ignore_eos=True)
        stubs.stream(stubs.sessions.Turn, request)
        with lock:
            finished.append(name)

    calls: list[Background] = []
    for name, session in [("a", a)] * 4 + [("b", b)] * 3:
        calls.append(Background(partial(run, name, session)))
        eventually(lambda: client.status().slots[0].queued == len(calls))
    holder.release()
    for call in calls:
        call.result()
    assert "".join(finished) == "abababa"


def test_a_caller_that_wont_wait_learns_its_place_and_the_holder(
    client: Client, other: Client
) -> None:
    waiting = raw_session(other)
    holder = Holder(client)
    with pytest.raises(ModelBusy) as refused:
        ask(waiting, " One", " two", 1, no_wait=True)
    told_ = refused.value.metadata
    assert told_["position"] == "1"
    assert told_["holder_operation"] == "turn"
    assert float(told_["holder_age_seconds"]) > 0
    assert refused.value.retry_after_s is not None
    with pytest.raises(ModelBusy):
        waiting.ensure_prefix(" One", no_wait=True)
    with pytest.raises(ModelBusy):
        raw_session(other, no_wait=True)
    holder.release()
    assert len(ask(waiting, " One", " two", 1, no_wait=False).ids) == 1


def test_a_deadline_in_the_queue_is_busy_not_deadline_exceeded(
    client: Client, other: Client
) -> None:
    waiting = raw_session(other)
    holder = Holder(client)
    with pytest.raises(ModelBusy) as refused:
        waiting.turn(" One", " two", max_tokens=1, timeout=1.0).read()
    assert refused.value.metadata["holder_operation"] == "turn"
    with pytest.raises(ModelBusy):
        waiting.ensure_prefix(" One", timeout=1.0)
    assert client.status().slots[0].queued == 0
    holder.release()


def test_a_deadline_in_a_running_turn_ends_it_and_leaves_the_session(client: Client) -> None:
    session = raw_session(client, window=2048)
    with pytest.raises(DeadlineExceeded):
        session.turn(" Count", " on", max_tokens=0, ignore_eos=True, timeout=1.0).read()
    report = session.explain()
    assert report.resident + report.available == 2048
    assert len(ask(session, " Count", " on", 2).ids) == 2


def test_waiting_streams_are_told_their_place(client: Client, other: Client) -> None:
    waiting, second = raw_session(other), raw_session(other)
    holder = Holder(client)
    seen: dict[str, list[QueueStatus]] = {"first": [], "second": []}

    def collect(name: str) -> Any:
        def on_event(event: Any) -> None:
            if isinstance(event, QueueStatus):
                seen[name].append(event)

        return on_event

    first_call = Background(
        lambda: waiting.turn(" One", " two", max_tokens=2, on_event=collect("first")).read()
    )
    eventually(lambda: seen["first"])
    second_call = Background(
        lambda: second.turn(" One", " two", max_tokens=2, on_event=collect("second")).read()
    )
    eventually(lambda: seen["second"])
    assert (seen["first"][0].position, seen["second"][0].position) == (1, 2)
    assert seen["first"][0].holder_operation == "turn"
    holder.release()
    first_call.result()
    second_call.result()
    assert waiting.explain().resident > 0


def test_a_turn_kept_over_its_parts_is_not_interrupted(client: Client, other: Client) -> None:
    mine, yours = raw_session(client), raw_session(other)
    mine.ensure_prefix(" One", turn_id="t")
    with pytest.raises(ModelBusy) as refused:
        ask(yours, " One", " two", 1, no_wait=True)
    assert refused.value.metadata["holder_operation"] == "ensure_prefix"
    mine.prefill_suffix(" two", turn_id="t")
    mine.decode(max_tokens=2, turn_id="t").read()
    assert len(ask(yours, " One", " two", 1, no_wait=True).ids) == 1


def test_a_waiting_call_that_is_cancelled_leaves_the_queue(client: Client, other: Client) -> None:
    waiting = raw_session(other)
    holder = Holder(client)
    stream = waiting.turn(" One", " two", max_tokens=1)
    reading = Background(stream.read)
    eventually(lambda: client.status().slots[0].queued == 1)
    stream.cancel()
    assert reading.result() == ""
    eventually(lambda: client.status().slots[0].queued == 0)
    holder.release()
    assert waiting.explain().seen_tokens == 0


def test_a_load_whose_caller_went_away_leaves_the_next_open_working(
    client: Client, stubs: Stubs
) -> None:
    client.unload_model(force=True)
    request = pb.OpenSessionRequest(model=MODEL, window=512)
    call = stubs.sessions.OpenSessionStream(request, metadata=stubs.metadata())
    assert next(call).HasField("progress")
    call.cancel()
    with client.open_session(MODEL, window=512) as session:
        assert len(ask(session, [], [user("x")], 1).ids) == 1
        assert len(client.sessions()) == 1


# --- stopping ------------------------------------------------------------------------------------


def test_a_cancelled_decode_leaves_exact_numbers_and_the_right_next_answer(
    client: Client, raw: Session, reference: Reference
) -> None:
    stream = raw.turn(STORY, " And then", max_tokens=0, ignore_eos=True, token_ids=True)
    taken: list[int] = []
    for chunk in stream.chunks():
        taken += chunk.token_ids
        if len(taken) >= 5:
            stream.cancel()
    assert stream.final is None
    report = raw.explain()
    prompt = text_ids(client, STORY + " And then")
    assert report.resident >= len(prompt) + 4
    assert report.resident + report.available == 1024
    assert {c.name: c.value for c in report.counters}["cancelled_ops"] == 1
    again = ask(raw, STORY, " And then", 6)
    assert again.before.prefilled == 0
    assert again.after.prefilled == 1
    assert again.ids == reference.greedy(prompt, 6)
    assert taken[:5] == reference.greedy(prompt, 5)


def test_a_client_that_goes_away_in_a_decode_frees_the_slot(
    client: Client, daemon: RunningDaemon, raw: Session, reference: Reference
) -> None:
    leaving = Stubs(daemon, client.owner_instance_id)
    request = turn_request(raw, STORY, " And then", ignore_eos=True)
    call = leaving.sessions.Turn(request, metadata=leaving.metadata())
    while not next(call).HasField("chunk"):
        pass
    leaving.close()
    # The slot becomes free although nobody took the rest; the session is as good as before.
    report = raw.explain()
    assert report.resident + report.available == 1024
    prompt = text_ids(client, STORY + " And then")
    again = ask(raw, STORY, " And then", 6)
    assert again.before.reused == again.before.prefix
    assert again.ids == reference.greedy(prompt, 6)
    with pytest.raises((grpc.RpcError, ValueError)):
        list(call)


def test_closing_a_session_stops_what_runs_for_it(client: Client, other: Client) -> None:
    session = raw_session(client, window=2048, session_key="closing")
    stream = session.turn(" Count", " on", max_tokens=0, ignore_eos=True)
    next(stream.chunks())
    raw_session(other, window=2048, session_key="closing").close()
    try:
        stream.read()
        assert stream.final is not None
        assert stream.final.stop_reason is StopReason.CANCELLED
    except (SessionClosed, CallCancelled):
        pass
    with pytest.raises(SessionClosed):
        ask(session, " Count", " on", 1)
    eventually(lambda: client.status().slots[0].state is SlotState.READY)


# --- a daemon with tight limits ------------------------------------------------------------------


@pytest.fixture(scope="module")
def tight(served: dict[str, Any]) -> Iterator[RunningDaemon]:
    with running_daemon(
        **served,
        n_ubatch=32,
        n_batch=32,
        max_sessions=2,
        cold_ram_bytes=0,
        stall_limit_s=1,
        turn_idle_s=0.2,
    ) as running:
        yield running


@pytest.fixture
def narrow(tight: RunningDaemon) -> Iterator[Client]:
    with tight.client() as connected:
        yield connected
        connected.unload_model(force=True)


def test_one_session_too_many_is_refused_with_the_budget(narrow: Client) -> None:
    first, second = raw_session(narrow), raw_session(narrow)
    assert first.resolution.max_sessions == 2
    with pytest.raises(InsufficientMemory) as refused:
        raw_session(narrow)
    assert refused.value.metadata["sessions"] == "2"
    assert "cold_ram_bytes and cold_disk_bytes are both 0" in refused.value.message
    assert len(narrow.sessions()) == 2
    ask(first, " One", " two", 1)
    second.close()
    with raw_session(narrow) as third:
        ask(third, " One", " two", 1)


def test_a_cancelled_prefill_keeps_whole_micro_batches_and_goes_on_from_there(
    narrow: Client, tight: RunningDaemon, backend: Backend, engine_path: Path
) -> None:
    session = raw_session(narrow, window=2048)
    prompt = text_ids(narrow, LONG + " And then")
    stubs = Stubs(tight, narrow.owner_instance_id)
    seen = 0
    while not 0 < seen < len(prompt):
        request = turn_request(session, LONG, " And then", max_tokens=1)
        call = stubs.sessions.Turn(request, metadata=stubs.metadata())
        eventually(lambda: narrow.status().slots[0].state is SlotState.BUSY)
        threading.Event().wait(0.3)
        call.cancel()
        report = session.explain()
        assert report.resident >= seen, "what was evaluated stays"
        assert report.resident % 32 == 0
        assert report.resident + report.available == 2048
        assert report.seen_tokens == report.resident
        seen = report.resident
    stubs.close()
    # Something else in between costs nothing of what matches.
    resumed = ask(session, LONG, " And then", 6)
    assert resumed.before.reused == seen
    assert resumed.before.prefilled + resumed.after.prefilled == len(prompt) - seen
    reference = Reference(engine_path, backend=backend, n_batch=32, n_ubatch=32)
    assert resumed.ids == reference.greedy(prompt, 6, window=2048)
    reference.close()


def test_a_cancelled_prefix_call_leaves_a_usable_session(
    narrow: Client, tight: RunningDaemon
) -> None:
    session = raw_session(narrow, window=2048)
    stubs = Stubs(tight, narrow.owner_instance_id)
    turn = turn_request(session, LONG, "")
    request = pb.EnsurePrefixRequest(
        session=turn.session, identity=turn.identity, prompt=turn.prefix
    )
    call = stubs.sessions.EnsurePrefix.future(request, metadata=stubs.metadata())
    eventually(lambda: narrow.status().slots[0].state is SlotState.BUSY)
    call.cancel()
    report = session.explain()
    assert report.resident < len(text_ids(narrow, LONG))
    status = session.ensure_prefix(STORY)
    assert (
        status.resident
        == status.prefix
        == common_length(text_ids(narrow, STORY), text_ids(narrow, LONG))
    )
    stubs.close()


def test_a_turn_left_between_its_parts_gives_the_slot_up(narrow: Client) -> None:
    mine, yours = raw_session(narrow), raw_session(narrow)
    mine.ensure_prefix(" One", turn_id="t")
    assert len(ask(yours, " One", " two", 1).ids) == 1
    status = mine.prefill_suffix(" two", turn_id="t")
    assert status.reused + status.prefilled == status.suffix


def test_a_reader_that_stops_reading_is_slow_and_its_session_intact(
    narrow: Client, tight: RunningDaemon
) -> None:
    session = raw_session(narrow, window=2048)
    channel = grpc.insecure_channel(
        tight.endpoint,
        options=[("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)],
    )
    stubs = Stubs(tight, narrow.owner_instance_id)
    method: Any = channel.unary_stream(
        "/modeld.v1.SessionService/Turn",
        request_serializer=pb.TurnRequest.SerializeToString,
        response_deserializer=pb.TurnEvent.FromString,
    )
    request = turn_request(
        session, " Count", " on", ignore_eos=True, top_logprobs=20, stream_interval_ms=0
    )
    call = method(request, metadata=stubs.metadata())
    next(call)
    eventually(lambda: narrow.status().slots[0].state is SlotState.READY, 120)
    with pytest.raises(SlowConsumer) as refused, typed():
        for _event in call:
            pass
    assert float(refused.value.metadata["stall_limit_seconds"]) == 1.0
    report = session.explain()
    assert 0 < report.resident < 2048
    assert report.resident + report.available == 2048
    again = ask(session, " Count", " on", 2)
    assert again.after.prefilled == 1
    channel.close()
    stubs.close()


# --- another model -------------------------------------------------------------------------------


def test_a_switch_is_refused_behind_open_sessions_and_done_when_asked(
    tight: RunningDaemon, narrow: Client, backend: Backend, tmp_path: Path
) -> None:
    tiny_model = tiny_gguf(tmp_path / "tiny.gguf")
    narrow.import_model(tiny_model, name="tiny", model_type=backend.name, replace=True)
    session = raw_session(narrow)
    ask(session, " One", " two", 1)
    generation = session.handle.generation
    for attempt in (
        lambda: narrow.open_session("tiny", window=256),
        lambda: narrow.load_model("tiny"),
    ):
        with pytest.raises(SwitchRequired) as refused:
            attempt()
        assert refused.value.metadata["resident_model"] == MODEL
        assert refused.value.metadata["sessions"] == "1"
        assert refused.value.metadata["session_ids"] == session.handle.session_id
    with pytest.raises(GenerationStale):
        narrow.switch_model("tiny", generation - 1)
    assert ask(session, " One", " two", 1).after.prefilled == 1
    loaded = narrow.switch_model("tiny", generation)
    assert loaded.generation > generation
    with pytest.raises(GenerationStale) as stale:
        ask(session, " One", " two", 1)
    assert "switch" in stale.value.metadata["cause"]
    with narrow.open_session("tiny", window=256) as tiny:
        assert tiny.identity.model_digest == loaded.identity.model_digest
        told_ = ask(tiny, [], [user("hello there")], 4, ignore_eos=True)
        assert len(told_.ids) == 4
    assert narrow.status().slots[0].model == "tiny"
    # A session that is detached stands in nobody's way.
    kept = narrow.open_session("tiny", window=256, session_key="kept")
    kept.detach()
    with raw_session(narrow) as back:
        assert back.opened.loaded
        assert len(ask(back, " One", " two", 1).ids) == 1


def test_unloading_is_refused_with_sessions_forced_and_idempotent(narrow: Client) -> None:
    session = raw_session(narrow)
    with pytest.raises(SwitchRequired):
        narrow.unload_model(MODEL)
    unloaded = narrow.unload_model(MODEL, force=True)
    assert (unloaded.was_resident, unloaded.sessions_closed) == (True, 1)
    assert not narrow.unload_model(MODEL).was_resident
    assert narrow.status().slots[0].state is SlotState.EMPTY
    with pytest.raises(GenerationStale):
        session.explain()


# --- daemons of their own ------------------------------------------------------------------------


def test_an_idle_slot_gives_its_memory_back_and_a_key_reopens(served: dict[str, Any]) -> None:
    with running_daemon(**served, idle_release_s=4) as daemon, daemon.client() as client:
        session = raw_session(client, window=4096, session_key="mine")
        first = ask(session, STORY, " And", 3)
        worker = psutil.Process(client.status().slots[0].worker.pid)
        held = worker.memory_info().rss
        kv = session.resolution.kv_bytes
        eventually(lambda: client.status().slots[0].state is SlotState.IDLE)
        given_back = held - worker.memory_info().rss
        assert given_back > kv + session.resolution.weights_bytes // 2
        assert worker.is_running()
        with pytest.raises(GenerationStale) as stale:
            session.explain()
        assert stale.value.metadata["cause"] == "idle release"
        again = raw_session(client, window=4096, session_key="mine")
        assert again.opened.loaded
        assert not again.opened.attached
        assert again.handle.generation > session.handle.generation
        assert ask(again, STORY, " And", 3).ids == first.ids


def test_a_drain_lets_a_decode_finish_and_admits_nothing_new(served: dict[str, Any]) -> None:
    with running_daemon(**served) as daemon, daemon.client() as client:
        session = raw_session(client)
        stream = session.turn(" Count", " on", max_tokens=60, ignore_eos=True)
        next(stream.chunks())
        with daemon.client() as operator:
            draining = operator.drain(grace_s=60)
            assert draining.running == 1
            with pytest.raises(ShuttingDown):
                raw_session(operator)
            with pytest.raises(ShuttingDown):
                operator.load_model(MODEL)
            # What is there can be looked at meanwhile.
            assert [one.session for one in operator.sessions()] == [session.handle]
            assert [model.name for model in operator.models()] == [MODEL]
            assert (operator.saved_sessions(), operator.list_snapshots().used_bytes) == ([], 0)
        finished = told(stream)
        assert finished.stop is StopReason.LENGTH
        assert finished.final.tokens == 60
        assert daemon.wait() == 0


def test_a_drain_ends_what_waits_and_what_outlives_the_grace(served: dict[str, Any]) -> None:
    with (
        running_daemon(**served) as daemon,
        daemon.client() as client,
        daemon.client() as second,
    ):
        session, waiting = raw_session(client, window=8192), raw_session(second)
        stream = session.turn(" Count", " on", max_tokens=0, ignore_eos=True)
        next(stream.chunks())
        queued = Background(lambda: ask(waiting, " One", " two", 1))
        eventually(lambda: client.status().slots[0].queued == 1)
        with daemon.client() as operator:
            told_ = operator.drain(grace_s=0.2)
            assert (told_.running, told_.queued) == (1, 1)
        with pytest.raises(ShuttingDown):
            queued.result()
        with pytest.raises(SessionFatal):
            stream.read()
        assert daemon.wait() == 0


def test_a_restarted_daemon_is_another_owner(served: dict[str, Any]) -> None:
    with running_daemon(**served) as daemon, daemon.client() as client:
        owner = client.owner_instance_id
        session = client.open_session(MODEL, window=512, prompt_format="raw")
        generation = session.handle.generation
        daemon.stop()
        again = RunningDaemon(daemon.data_root, {"backends": served["backend"]})
        try:
            with again.client() as fresh:
                assert fresh.owner_instance_id != owner
                assert [model.name for model in fresh.models()] == [MODEL]
                assert fresh.status().generation > generation
                late = Client(fresh.transport, deadlines=Deadlines())
                with pytest.raises(GenerationStale):
                    Session(late, session._core).explain()
        finally:
            assert again.stop() == 0
