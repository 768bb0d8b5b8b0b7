"""Sessions, turns, typed errors and discovery, as a caller of the synchronous client sees them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from modeld import client as modeld
from modeld.client import Client, Deadlines, Message
from modeld.shared import errors as typed
from modeld.shared.errors import type_of
from modeld.v1 import session_pb2
from tests.support.fake_daemon import FakeDaemon, Hangup, write_lease

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "hello world"}


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[Client]:
    with Client.connect(daemon.world.data_root) as client:
        yield client


# --- discovery -----------------------------------------------------------------------------------


def test_no_lease_is_not_running_and_names_the_remedy(root):
    with pytest.raises(modeld.NotRunning, match="modeld serve"):
        Client.connect(root)


def test_a_dead_owners_lease_is_stale_and_names_the_remedy(root):
    write_lease(root, "gone", "unix:/nowhere", pid=2**22 - 1)
    with pytest.raises(modeld.Stale, match="modeld serve"):
        Client.connect(root)


def test_a_machine_without_a_daemon_program_is_not_installed(root, monkeypatch):
    monkeypatch.setattr("modeld.client.discovery.installed", lambda: False)
    with pytest.raises(modeld.NotInstalled, match="Install"):
        Client.connect(root)


def test_the_data_root_comes_from_the_environment(daemon, monkeypatch):
    monkeypatch.setenv("MODELD_DATA_ROOT", str(daemon.world.data_root))
    with Client.connect() as client:
        assert client.owner_instance_id == daemon.world.owner


def test_an_endpoint_needs_no_lease(daemon):
    with Client.connect(endpoint=daemon.endpoint) as client:
        assert client.status().owner_instance_id == daemon.world.owner


def test_an_endpoint_nobody_listens_on_is_a_lost_connection(root):
    with pytest.raises(modeld.ConnectionLost):
        Client.connect(endpoint=f"unix:{root}/none.sock", timeout=5)


# --- sessions and turns --------------------------------------------------------------------------


def test_opening_tells_identity_numbers_capabilities_and_progress(client):
    seen: list[modeld.LoadProgress | modeld.QueueStatus] = []
    with client.open_session("tiny", window=512, on_progress=seen.append) as session:
        assert session.identity.prompt_format == "chat"
        assert session.resolution.context.effective.tokens == 512
        assert session.resolution.context.effective.reason is modeld.ContextReason.REQUEST
        assert session.capabilities["tail_removal"].answer == "yes"
        assert session.handle.generation == 1
    assert [type(event) for event in seen] == [modeld.LoadProgress]


def test_a_turn_streams_text_then_knows_its_numbers(client):
    with client.open_session("tiny") as session:
        stream = session.turn([SYSTEM], [HELLO], temperature=0)
        assert list(stream) == ["you", " said:", " hello", " world"]
        assert stream.text == "you said: hello world"
        assert stream.prefix_status.prefilled == stream.prefix_status.prefix > 0
        assert stream.suffix_status.reused == stream.prefix_status.prefix
        assert stream.final.stop_reason is modeld.StopReason.EOS
        assert stream.final.seed == 2**63 + 1
        assert stream.seconds_to_first_token is not None


def test_chunks_and_read_give_the_same_answer(client):
    with client.open_session("tiny") as session:
        chunks = list(session.turn([], [HELLO]).chunks())
        assert [chunk.tokens for chunk in chunks] == [1, 1, 1, 1]
        assert session.turn([], [HELLO]).read() == "you said: hello world"


def test_the_parts_can_be_called_separately(client):
    with client.open_session("tiny", prompt_format="raw") as session:
        first = session.ensure_prefix("the prefix\n")
        again = session.ensure_prefix("the prefix\n")
        suffix = session.prefill_suffix("one ")
        extended = session.prefill_suffix("two", extend=True)
        decoded = session.decode(max_tokens=3)
        assert "".join(chunk.text for chunk in decoded) == "you said: one"
        assert (first.prefilled, again.reused) == (11, 11)
        assert (suffix.suffix, extended.suffix) == (4, 7)
        assert decoded.final.stop_reason is modeld.StopReason.LENGTH


def test_the_owner_id_goes_with_every_call_and_a_foreign_one_is_refused(client, daemon):
    daemon.world.owner = "another"
    with pytest.raises(typed.StaleFence):
        client.models()


def test_a_manifest_the_daemon_sees_otherwise_is_an_error_not_a_number(client, daemon):
    with client.open_session("tiny") as session:
        daemon.world.wrong_digest = True
        with pytest.raises(typed.DigestMismatch, match="disagree"):
            session.ensure_prefix([SYSTEM])
        with pytest.raises(typed.DigestMismatch):
            session.turn([SYSTEM], [HELLO]).read()


def test_a_stream_without_its_final_record_is_a_protocol_violation(client, daemon):
    daemon.world.no_final = True
    with client.open_session("tiny") as session, pytest.raises(modeld.ProtocolViolation):
        session.turn([], [HELLO]).read()


def test_cancelling_ends_the_iteration_and_the_daemons_work(client, daemon):
    daemon.world.chunk_pause_s = 0.05
    with client.open_session("tiny") as session:
        stream = session.turn([], [HELLO])
        assert next(stream) == "you"
        stream.cancel()
        assert len(list(stream)) <= 1
        assert stream.final is None
        assert stream.cancelled
        assert session.turn([], [HELLO]).read() == "you said: hello world"


def test_leaving_a_turn_early_cancels_it(client, daemon):
    daemon.world.chunk_pause_s = 30
    with client.open_session("tiny") as session:
        with session.turn([], [HELLO]) as stream:
            next(stream)
        assert session.explain().resident > 0


def test_a_silent_stream_stalls_with_its_own_error(daemon):
    daemon.world.chunk_pause_s = 30
    limits = Deadlines(stall_s=0.2)
    with Client.connect(daemon.world.data_root, deadlines=limits) as client:
        session = client.open_session("tiny")
        with pytest.raises(modeld.StreamStalled, match=r"0\.2 s"):
            session.turn([], [HELLO]).read()


def test_a_deadline_has_its_own_error(client, daemon):
    daemon.world.chunk_pause_s = 30
    with client.open_session("tiny") as session, pytest.raises(modeld.DeadlineExceeded):
        session.turn([], [HELLO], timeout=0.2).read()


@pytest.mark.parametrize("reason", sorted(type_of))
def test_every_reason_of_the_contract_raises_its_own_class(client, daemon, reason):
    cls = type_of[reason]
    error = cls("what happened", metadata={"n": 1}, retry_after_s=2.5)
    daemon.world.fail("OpenSession", error)
    with pytest.raises(cls) as caught:
        client.open_session("tiny")
    assert type(caught.value) is cls
    assert getattr(modeld, cls.__name__) is cls
    assert caught.value.metadata == {"n": "1"}
    assert caught.value.retry_after_s == 2.5
    assert caught.value.message == "what happened"


def test_an_unknown_reason_survives(client, daemon):
    daemon.world.fail("OpenSession", typed.ModeldError("new", reason="OF_TOMORROW"))
    with pytest.raises(typed.ModeldError) as caught:
        client.open_session("tiny")
    assert caught.value.reason == "OF_TOMORROW"


def test_closing_twice_or_after_a_loss_is_no_error(client, daemon):
    session = client.open_session("tiny")
    session.close()
    session.close()
    lost = client.open_session("tiny")
    daemon.world.bump()
    lost.close()
    with pytest.raises(typed.SessionClosed):
        lost.explain()


def test_models_describe_and_tokenize(client, root):
    assert [m.name for m in client.models()] == ["tiny", "other"]
    described = client.describe("tiny", window=100)
    assert described.resolution.context.requested.tokens == 100
    assert {q.name: q.answer for q in described.questions} == {
        "memory_fits": "yes",
        "quality_certified": "unknown",
    }
    with pytest.raises(typed.ModelNotActive):
        client.tokenize("tiny", "ab")
    assert client.tokenize("tiny", "ab", load=True).token_ids == (97, 98)
    assert client.detokenize("tiny", [97]).text == "a"
    file = root / "new.gguf"
    file.write_bytes(b"x" * 10)
    seen: list[modeld.ImportProgress] = []
    assert client.import_model(file, on_progress=seen.append).name == "new"
    assert seen[0].total_bytes == 10
    assert client.remove_model("tiny").freed_bytes == 1000


# --- chat ----------------------------------------------------------------------------------------


def test_a_chat_sends_all_that_was_said_with_answers_by_id(client, daemon):
    with client.open_session("tiny") as session:
        chat = session.chat(system="Be brief.")
        chat.send("one").read()
        second = chat.send("two")
        second.read()
        request = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
        kinds = [s.WhichOneof("content") for s in request.prefix.segments]
        assert kinds == ["message", "message", "generated_turn_id"]
        assert all(s.stable for s in request.prefix.segments)
        assert second.prefix_status.prefilled == 1  # what ends the answer
        assert second.suffix_status.prefilled == second.suffix_status.suffix


def test_a_cancelled_answer_joins_the_history_as_far_as_it_got(client, daemon):
    daemon.world.chunk_pause_s = 0.2
    with client.open_session("tiny") as session:
        chat = session.chat()
        with chat.send("one two three") as stream:
            next(stream)
        assert chat.history == [Message("user", "one two three"), Message("assistant", "you")]


def test_a_chat_needs_a_session_of_messages(client):
    with (
        client.open_session("tiny", prompt_format="raw") as session,
        pytest.raises(typed.InvalidRequest, match="chat"),
    ):
        session.chat()


# --- recovery ------------------------------------------------------------------------------------

LOSSES = [
    typed.GenerationStale("stale"),
    typed.SessionFatal("fatal"),
    typed.SessionClosed("closed"),
    typed.SessionNotFound("unknown"),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda e: e.reason)
def test_a_turn_lost_before_any_text_is_sent_again_and_says_so(client, daemon, loss, caplog):
    told: list[modeld.Recovery] = []
    session = client.open_session("tiny", recover=True, on_recovery=told.append)
    old = session.handle
    daemon.world.crash_worker("Turn", loss)
    stream = session.turn([SYSTEM], [HELLO])
    assert stream.read() == "you said: hello world"
    (recovery,) = session.recoveries
    assert told == [recovery]
    assert (recovery.cause, recovery.operation, recovery.retried) == (loss.reason, "turn", True)
    assert recovery.old == old
    assert recovery.new == session.handle != old
    assert "was lost" in caplog.text


def test_without_recover_a_loss_is_the_callers(client, daemon):
    session = client.open_session("tiny")
    daemon.world.crash_worker("Turn", typed.SessionFatal("fatal"))
    with pytest.raises(typed.SessionFatal):
        session.turn([], [HELLO]).read()
    assert session.recoveries == []


def test_an_answer_that_was_part_streamed_is_not_replayed_but_the_session_lives_on(client, daemon):
    session = client.open_session("tiny", recover=True)
    daemon.world.crash_worker("Turn", typed.SessionFatal("fatal"), after_chunks=2)
    stream = session.turn([], [HELLO])
    taken = []
    with pytest.raises(typed.SessionFatal) as caught:
        taken.extend(stream)
    assert stream.text == "you said:"
    assert "reopened" in caught.value.__notes__[0]
    assert [r.retried for r in session.recoveries] == [False]
    assert len(daemon.world.requests_of(session_pb2.TurnRequest)) == 1
    assert session.turn([], [HELLO]).read() == "you said: hello world"


def test_a_second_loss_of_the_same_turn_is_raised(client, daemon):
    session = client.open_session("tiny", recover=True)
    daemon.world.crash_worker("Turn", typed.SessionFatal("one"))
    daemon.world.crash_worker("Turn", typed.SessionFatal("two"))
    with pytest.raises(typed.SessionFatal, match="two"):
        session.turn([], [HELLO]).read()
    assert session.turn([], [HELLO]).read() == "you said: hello world"


def test_a_chat_goes_on_after_a_crash_with_old_answers_as_text(client, daemon):
    session = client.open_session("tiny", recover=True)
    chat = session.chat()
    chat.send("one").read()
    daemon.world.bump()
    assert chat.send("two").read() == "you said: two"
    request = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    answer = request.prefix.segments[1]
    assert (answer.message.role, answer.message.content[0].text) == ("assistant", "you said: one")
    assert [r.cause for r in session.recoveries] == ["GENERATION_STALE"]


def test_a_decode_after_a_loss_gets_its_prefix_and_suffix_again(client, daemon):
    session = client.open_session("tiny", recover=True, prompt_format="raw")
    session.ensure_prefix("prefix\n")
    session.prefill_suffix("a")
    session.prefill_suffix("b", extend=True)
    daemon.world.bump()
    assert "".join(c.text for c in session.decode()) == "you said: ab"


def test_a_suffix_after_a_loss_gets_its_prefix_again(client, daemon):
    session = client.open_session("tiny", recover=True, prompt_format="raw")
    session.ensure_prefix("prefix\n")
    daemon.world.bump()
    status = session.prefill_suffix("more")
    assert (status.prefix, status.suffix) == (7, 4)


def test_a_lost_connection_finds_the_successor(daemon):
    root = daemon.world.data_root
    with Client.connect(root) as client:
        session = client.open_session("tiny", recover=True)
        daemon.stop()
        with FakeDaemon(root) as successor:
            assert session.turn([], [HELLO]).read() == "you said: hello world"
            assert client.owner_instance_id == successor.world.owner
            assert [r.cause for r in session.recoveries] == ["CONNECTION_LOST"]


def test_a_session_key_finds_the_same_session_and_its_turns_again(client, daemon):
    session = client.open_session("tiny", recover=True, session_key="k")
    chat = session.chat()
    chat.send("one").read()
    daemon.world.fail("Turn", Hangup(), after_chunks=-1)
    chat.send("two").read()
    (recovery,) = session.recoveries
    assert recovery.attached
    request = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    assert request.prefix.segments[1].generated_turn_id == "t-1"


def test_where_no_daemon_comes_back_the_loss_is_told_with_its_cause(daemon):
    with Client.connect(daemon.world.data_root, recover_wait_s=0.1) as client:
        session = client.open_session("tiny", recover=True)
        daemon.stop()
        with pytest.raises(modeld.NotRunning) as caught:
            session.turn([], [HELLO]).read()
        assert isinstance(caught.value.__cause__, modeld.ConnectionLost)


def test_errors_that_are_no_loss_are_never_retried(client, daemon):
    session = client.open_session("tiny", recover=True)
    daemon.world.fail("Turn", typed.ContextOverflow("too long", metadata={"drop": 7}))
    with pytest.raises(typed.ContextOverflow) as caught:
        session.turn([], [HELLO]).read()
    assert caught.value.metadata["drop"] == "7"
    assert session.recoveries == []


def test_no_threads_are_left_behind(daemon):
    before = threading.active_count()
    with Client.connect(daemon.world.data_root) as client, client.open_session("tiny") as session:
        for _ in range(3):
            session.turn([], [HELLO]).read()
    for thread in threading.enumerate():
        if thread.name == "modeld-stall":
            thread.join(10)
    assert threading.active_count() <= before + 1  # grpc keeps one poller


# --- what can't be sent --------------------------------------------------------------------------

LONE = "x\udcff"  # what a byte that isn't UTF-8 becomes in an argument


@pytest.mark.parametrize(
    "send",
    [
        lambda client: client.tokenize("tiny", LONE),
        lambda client: client.tokenize(LONE, "x"),
        lambda client: client.render_template("tiny", [{"role": "user", "content": LONE}]),
        lambda client: client.open_session(LONE),
        lambda client: client.open_session("tiny", session_key=LONE),
        lambda client: client.describe(LONE),
        lambda client: client.load_model(LONE),
        lambda client: client.unload_model(LONE),
        lambda client: client.import_model(f"/tmp/{LONE}"),
        lambda client: client.remove_model(LONE),
        lambda client: client.clear_quarantine(LONE),
    ],
)
def test_text_that_is_not_unicode_is_refused_before_it_is_sent(client, daemon, send):
    with pytest.raises(modeld.InvalidRequest, match=r"U\+DCFF"):
        send(client)
    assert daemon.world.requests == []


@pytest.mark.parametrize(
    "send",
    [
        lambda s: s.turn([SYSTEM], [{"role": "user", "content": LONE}]).read(),
        lambda s: s.turn([SYSTEM], [HELLO], tools=[f'"{LONE}"']).read(),
        lambda s: s.turn([SYSTEM], [HELLO], stop=LONE).read(),
        lambda s: s.ensure_prefix([{"role": "system", "content": LONE}]),
        lambda s: s.prefill_suffix([{"role": "user", "content": LONE}]),
        lambda s: s.decode(regex=LONE).read(),
        lambda s: s.chat(LONE).send("hi").read(),
    ],
)
def test_a_session_refuses_text_that_is_not_unicode_and_goes_on(client, send):
    with client.open_session("tiny") as session:
        with pytest.raises(modeld.InvalidRequest, match=r"U\+DCFF"):
            send(session)
        assert session.turn([SYSTEM], [HELLO]).read() == "you said: hello world"


def test_a_session_can_be_closed_by_its_handle(client, daemon):
    client.open_session("tiny", session_key="k").detach()
    (info,) = client.sessions()
    client.close_session(info.session)
    assert daemon.world.sessions == {}
