"""What is told of the daemon and its sessions, by every way of asking, is the same truth."""

from __future__ import annotations

import stat
from dataclasses import astuple
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from modeld.client import (
    Client,
    ContextNumbers,
    ContextOverflow,
    ContextReason,
    Session,
    SessionNotFound,
    SlotState,
)
from tests.support.backends import Backend
from tests.support.daemon import MODEL, Background, RunningDaemon, Stubs, eventually
from tests.support.product import ask, system, user

pytestmark = pytest.mark.real

SIX = ("model_max", "requested", "memory_fit", "effective", "hot", "planner")


def numbers(context: ContextNumbers) -> dict[str, Any]:
    return {name: astuple(getattr(context, name)) for name in SIX}


def test_the_six_numbers_are_the_sessions_own_everywhere(client: Client) -> None:
    with client.open_session(MODEL, window=768, prompt_format="raw") as session:
        own = numbers(session.resolution.context)
        (listed,) = client.sessions()
        (slot,) = client.status().slots
        described = client.describe(MODEL)
        by_id = client.describe(MODEL, session_id=session.handle.session_id)
        assert own["effective"][0] == 768
        assert numbers(listed.context) == own
        assert numbers(slot.context) == own
        assert numbers(described.resolution.context) == own
        assert described.resolution_source == "open_session"
        assert described.resolution == by_id.resolution == session.resolution
        assert numbers(session.explain().resolution.context) == own
        with pytest.raises(ContextOverflow) as refused:
            ask(session, " the" * 760, " sea" * 20)
        told = refused.value.metadata
        for name in ("effective", "hot", "planner"):
            assert int(told[name]) == own[name][0], name


def test_a_closed_session_s_numbers_are_quoted_no_more(client: Client) -> None:
    first = client.open_session(MODEL, window=512)
    second = client.open_session(MODEL, window=768)
    assert client.describe(MODEL).resolution == second.resolution
    second.close()
    assert client.describe(MODEL).resolution == first.resolution
    first.close()
    described = client.describe(MODEL)
    assert described.resident
    assert described.resolution_source == "hypothetical"
    assert described.resolution.context.effective.tokens == described.facts.context_length


def test_what_another_session_would_get_can_be_asked_while_one_is_open(client: Client) -> None:
    with client.open_session(MODEL, window=512):
        told = client.describe(MODEL, hypothetical=True)
        assert told.resolution_source == "hypothetical"
        with client.open_session(MODEL) as another:
            got, promised = another.resolution.context, told.resolution.context
            for name in ("model_max", "requested", "effective", "planner"):  # memory moves
                assert getattr(got, name).tokens == getattr(promised, name).tokens, name
        none = client.describe(MODEL, what_if={"devices": "none"})
        assert none.resolution_source == "hypothetical"


def test_numbers_say_what_bound_them(client: Client) -> None:
    asked = client.describe(MODEL, window=512)
    assert asked.resolution_source == "hypothetical"
    context = asked.resolution.context
    assert (context.requested.tokens, context.effective.tokens) == (512, 512)
    assert context.effective.reason is ContextReason.REQUEST
    assert context.model_max.tokens == asked.facts.context_length
    beyond = client.describe(MODEL, window=10 * context.model_max.tokens).resolution.context
    assert beyond.effective.tokens == context.model_max.tokens
    assert beyond.effective.reason is ContextReason.MODEL_CEILING
    assert beyond.requested.tokens == 10 * context.model_max.tokens
    rows = {row.name: row.bytes for row in asked.resolution.budget}
    assert rows["kv"] == asked.resolution.kv_bytes
    assert rows["weights"] == asked.resolution.weights_bytes > 0


def test_the_plan_is_what_the_engine_then_allocates(client: Client) -> None:
    planned = client.describe(MODEL, window=512).resolution
    with client.open_session(MODEL, window=512) as session:
        assert session.resolution.kv_bytes == planned.kv_bytes
        assert session.resolution.context.effective == planned.context.effective


def test_a_session_is_listed_as_it_is(client: Client) -> None:
    session = client.open_session(
        MODEL, window=512, session_key="listed", profile_id="mine", prompt_format="raw"
    )
    told = ask(session, " One two", " three", 3)
    (listed,) = client.sessions()
    assert listed.session == session.handle
    assert (listed.session_key, listed.profile_id) == ("listed", "mine")
    assert (listed.model, listed.prompt_format, listed.attached) == (MODEL, "raw", True)
    assert (listed.resident, listed.seen_tokens) == (
        told.final.resident,
        told.final.seen_tokens,
    )
    assert 0 <= listed.idle_seconds <= listed.age_seconds
    session.close()
    assert client.sessions() == []


def test_status_tells_daemon_slot_and_worker(client: Client, daemon: RunningDaemon) -> None:
    with client.open_session(MODEL, window=512) as session:
        ask(session, [system("x")], [user("y")], 1)
        status = client.status()
        (slot,) = status.slots
        assert status.pid == daemon.process.pid
        assert status.data_root == str(daemon.data_root)
        assert status.endpoints == (daemon.endpoint,)
        assert status.owner_instance_id == client.owner_instance_id
        assert not status.draining
        assert status.supervisor_rss_bytes > 0
        assert (slot.state, slot.model, slot.sessions) == (SlotState.READY, MODEL, 1)
        assert slot.generation == status.generation == session.handle.generation
        assert slot.model_digest == session.identity.model_digest
        assert slot.worker.state == "IDLE"
        assert slot.worker.backend_version == session.identity.backend_version
        worker = psutil.Process(slot.worker.pid)
        assert worker.ppid() == daemon.process.pid
        assert slot.worker.rss_bytes > 0


def test_a_running_turn_is_seen(client: Client, daemon: RunningDaemon, raw: Session) -> None:
    stream = raw.turn(" Count", " up", max_tokens=0, ignore_eos=True)
    next(stream)
    with daemon.client() as other:
        (slot,) = other.status().slots
    assert (slot.state, slot.holder_operation) == (SlotState.BUSY, "turn")
    assert slot.worker.state == "BUSY"
    stream.close()
    eventually(lambda: client.status().slots[0].state is SlotState.READY)


def test_identity_is_told_alike_before_and_after_opening(client: Client) -> None:
    with client.open_session(MODEL, window=512, prompt_format="raw") as session:
        described = client.describe(
            MODEL, prompt_format="raw", session_id=session.handle.session_id
        )
        assert described.identity == session.identity
        assert client.status().slots[0].identity.kv_digest == session.identity.kv_digest
        assert client.load_model(MODEL).identity.kv_digest == session.identity.kv_digest


def test_describe_answers_the_six_questions_and_a_second_load_certifies(
    client: Client, backend: Backend
) -> None:
    client.load_model(MODEL)
    described = client.describe(MODEL)
    assert described.resident
    questions = {question.name: question.answer for question in described.questions}
    assert len(questions) == 6
    assert questions["metadata_parsed"] == "yes"
    assert questions["loader_supports_architecture"] == "yes"
    assert all(question.evidence for question in described.questions)
    facts = described.facts
    assert (facts.architecture, facts.layers, facts.vocabulary) == ("llama", 30, 49152)
    assert facts.has_chat_template
    client.unload_model(force=True)
    cold = client.describe(MODEL)
    assert not cold.resident
    assert cold.identity.runtime_digest == ""
    assert cold.identity.kv_digest == described.identity.kv_digest
    asked = {question.name: question for question in cold.questions}
    assert asked["loader_supports_architecture"].answer == "yes"
    how = {"llama": "dry run", "openvino": "in a trial"}[backend.name]
    assert how in asked["loader_supports_architecture"].evidence
    client.load_model(MODEL)
    again = {question.name: question for question in client.describe(MODEL).questions}
    assert again["quality_certified"].answer == "yes"
    assert "second run" in again["quality_certified"].evidence
    client.unload_model(force=True)
    assert client.status().slots[0].state is SlotState.EMPTY


def test_describe_of_a_session_that_isnt_open_is_refused(client: Client) -> None:
    with pytest.raises(SessionNotFound):
        client.describe(MODEL, session_id="llama-0123456789abcdef")


def test_models_and_disk_are_told(client: Client, demo_model: Path, backend: Backend) -> None:
    client.load_model(MODEL)
    (model,) = client.models()
    assert (model.name, model.type, model.resident) == (MODEL, backend.name, True)
    assert model.size_bytes == demo_model.stat().st_size
    assert (model.architecture, model.quantization) == ("llama", "Q4_1")
    assert client.disk_stats().models_bytes >= model.size_bytes


def test_events_tell_what_happens(client: Client, daemon: RunningDaemon, backend: Backend) -> None:
    client.unload_model(force=True)
    with daemon.client() as watcher:
        events = watcher.watch_events()
        first = next(events)
        assert (first.kind, first.backend, first.state) == ("slot", backend.name, "EMPTY")

        def until_closed() -> list[Any]:
            seen = []
            for event in events:
                seen.append(event)
                if (event.kind, event.state) == ("session", "closed"):
                    return seen
            raise AssertionError("the stream ended")

        watching = Background(until_closed)
        session = client.open_session(MODEL, window=512)
        generation = session.handle.generation
        session.close()
        seen = watching.result()
    kinds = [(event.kind, event.state) for event in seen]
    assert ("slot", "LOADING") in kinds
    assert ("slot", "READY") in kinds
    assert kinds.index(("slot", "LOADING")) < kinds.index(("session", "open"))
    assert kinds[-1] == ("session", "closed")
    assert seen[-1].session_id == session.handle.session_id
    assert any(event.kind == "generation" and event.generation == generation for event in seen)
    sequence = [event.sequence for event in seen]
    assert sequence == sorted(set(sequence))


def test_health_and_reflection_need_no_owner(stubs: Stubs) -> None:
    health = health_pb2_grpc.HealthStub(stubs.channel)
    for service in ("", "modeld.v1.SessionService", "modeld.v1.DaemonService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refused:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    reflection = reflection_pb2_grpc.ServerReflectionStub(stubs.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = reflection.ServerReflectionInfo(iter([request]))
    names = {service.name for service in answer.list_services_response.service}
    assert {
        "modeld.v1.SessionService",
        "modeld.v1.ModelService",
        "modeld.v1.DaemonService",
        "grpc.health.v1.Health",
    } <= names


def test_the_socket_is_for_its_owner_only(daemon: RunningDaemon) -> None:
    mode = (daemon.data_root / "modeld.sock").stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_the_log_holds_no_prompt_text(client: Client, daemon: RunningDaemon, raw: Session) -> None:
    secret = " Xylophonist Quetzalcoatl"
    ask(raw, secret, " plays", 2)
    with pytest.raises(ContextOverflow):
        ask(raw, secret * 400, " plays", 2)
    assert "Xylophonist" not in daemon.log()
    assert "Quetzalcoatl" not in daemon.log()


def test_the_log_does_not_grow_with_every_call(daemon: RunningDaemon, raw: Session) -> None:
    ask(raw, " Once upon", " a time", 2)
    before = len(daemon.log())
    for _ in range(3):
        ask(raw, " Once upon", " a time", 2)
        raw.explain()
    assert len(daemon.log()) == before
