"""Forks through a real daemon: a branch answers as the conversation would, and hurts nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modeld.client import (
    Client,
    InvalidRequest,
    ManifestMismatch,
    Session,
    SessionClosed,
)
from modeld.client.convert import identity_to_proto
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2 as pb
from tests.support.daemon import MODEL, Stubs
from tests.support.product import Told, ask

pytestmark = pytest.mark.real

BASE = " The old lighthouse keeper wrote each evening what the sea had brought, and what it took."
WINDOW = 512
TOKENS = 6


def talk(session: Session) -> list[Any]:
    """Two rounds of a conversation; what its next turn's suffix begins with."""
    first = ask(session, BASE, " In spring", TOKENS)
    suffix = [" In spring", first.turn, " and then"]
    second = ask(session, BASE, suffix, TOKENS)
    return [*suffix, second.turn]


def forked(stubs: Stubs, client: Client, session: Session, **given: Any) -> pb.ForkResponse:
    """The raw call: what the library keeps to itself of the answer."""
    answer: pb.ForkResponse = stubs.unary(
        stubs.sessions.Fork, fork_request(client, session, **given)
    )
    return answer


def fork_request(client: Client, session: Session, **given: Any) -> pb.ForkRequest:
    info = next(one for one in client.sessions() if one.session.session_id == id_of(session))
    handle = common.SessionHandle(
        session_id=info.session.session_id, generation=info.session.generation
    )
    identity = identity_of(session)
    return pb.ForkRequest(**{"session": handle, "identity": identity, **given})


def id_of(session: Session) -> str:
    return session.opened.session.session_id


def identity_of(session: Session) -> common.Identity:
    return identity_to_proto(session.identity)


def open_raw(client: Client) -> Session:
    return client.open_session(MODEL, window=WINDOW, prompt_format="raw")


def test_branches_go_on_as_the_undisturbed_conversation_and_outlive_each_other(
    client: Client,
) -> None:
    expected: list[Told] = []
    for ending in (" the ship", " the storm"):
        undisturbed = open_raw(client)
        before = talk(undisturbed)
        expected.append(ask(undisturbed, BASE, [*before, ending], TOKENS))
        undisturbed.close(discard=True)
    source = open_raw(client)
    before = talk(source)
    resident = source.explain().resident
    branch = source.fork()
    assert id_of(branch) != id_of(source)
    assert branch.identity == source.identity
    assert branch.explain().resident == resident
    in_source = ask(source, BASE, [*before, " the ship"], TOKENS)
    in_branch = ask(branch, BASE, [*before, " the storm"], TOKENS)
    for told, wanted in zip((in_source, in_branch), expected, strict=True):
        assert told.ids == wanted.ids
        assert told.before.prefilled == 0
        assert told.after.reused >= wanted.after.reused
        assert told.final.seen_tokens == wanted.final.seen_tokens
    source.close(discard=True)
    again = ask(branch, BASE, [*before, " the storm"], TOKENS)
    assert again.ids == expected[1].ids
    twig = branch.fork()
    branch.close()
    assert ask(twig, BASE, [*before, " the storm"], TOKENS).ids == expected[1].ids
    assert [one.session.session_id for one in client.sessions()] == [id_of(twig)]


def test_the_answer_tells_what_was_copied_and_the_source_keeps_its_own(
    client: Client, stubs: Stubs
) -> None:
    source = open_raw(client)
    talk(source)
    before = source.explain()
    answer = forked(stubs, client, source)
    status = answer.status
    assert status.copied == before.resident + before.retained > 0
    assert (status.resident, status.retained) == (before.resident, before.retained)
    assert status.available == before.available
    assert status.seen_tokens == before.seen_tokens
    assert (status.prefilled, status.reused) == (0, 0)
    assert answer.identity == identity_of(source)
    assert answer.resolution.context.effective.tokens == WINDOW
    assert answer.capabilities
    after = source.explain()
    assert (after.resident, after.blocks) == (before.resident, before.blocks)
    assert len(client.sessions()) == 2


def test_the_answer_names_the_answers_that_the_branch_has(client: Client, stubs: Stubs) -> None:
    source = open_raw(client)
    talk(source)
    answer = forked(stubs, client, source)
    assert list(answer.generated_turn_ids) == list(source.explain().generated_turn_ids)
    assert len(answer.generated_turn_ids) == 2
    assert not answer.HasField("saved")


def test_an_empty_session_forks_into_an_empty_one(client: Client) -> None:
    source = open_raw(client)
    branch = source.fork()
    assert branch.saved is None
    assert branch.explain().resident == 0
    assert ask(branch, BASE, " In spring", 3).ids == ask(source, BASE, " In spring", 3).ids


def test_a_branch_s_key_is_its_own_and_finds_it_again(client: Client, stubs: Stubs) -> None:
    source = client.open_session(
        MODEL, window=WINDOW, prompt_format="raw", session_key="fork-source"
    )
    talk(source)
    with pytest.raises(InvalidRequest) as taken:
        forked(stubs, client, source, session_key="fork-source")
    assert taken.value.metadata["field"] == "session_key"
    with pytest.raises(InvalidRequest):
        forked(stubs, client, source, session_key="no/key")
    with pytest.raises(InvalidRequest) as keyless:
        forked(stubs, client, source, durable=True)
    assert keyless.value.metadata["field"] == "session_key"
    assert len(client.sessions()) == 1
    answer = forked(stubs, client, source, session_key="fork-branch")
    attached = client.open_session(
        MODEL, window=WINDOW, prompt_format="raw", session_key="fork-branch"
    )
    assert id_of(attached) == answer.session.session_id
    assert attached.opened.attached
    assert attached.opened.resident == answer.status.resident


def test_a_durable_branch_is_saved_at_once(client: Client, stubs: Stubs) -> None:
    source = open_raw(client)
    talk(source)
    answer = forked(stubs, client, source, session_key="fork-durable", durable=True)
    saved = {one.session.session_id: one for one in client.sessions()}
    assert saved[answer.session.session_id].saved_unix_ms == answer.saved.saved_unix_ms > 0
    assert answer.saved.ok
    assert answer.saved.tokens == answer.status.resident + answer.status.retained
    assert not saved[id_of(source)].durable
    close = pb.CloseSessionRequest(session=answer.session)  # what is saved stays
    stubs.unary(stubs.sessions.CloseSession, close)
    with pytest.raises(InvalidRequest, match="nothing is saved under"):
        forked(stubs, client, source, session_key="fork-durable", durable=True)
    back = client.open_session(
        MODEL, window=WINDOW, prompt_format="raw", session_key="fork-durable", durable=True
    )
    assert back.explain().resident == answer.status.resident
    back.close(discard=True)


@pytest.mark.parametrize("change", ["identity", "closed"])
def test_only_an_open_session_of_the_asserted_identity_is_forked(
    client: Client, stubs: Stubs, change: str
) -> None:
    source = open_raw(client)
    request = fork_request(client, source)
    attempts: dict[str, Callable[[], Any]] = {
        "identity": lambda: request.identity.MergeFrom(common.Identity(kv_digest="0" * 64)),
        "closed": source.close,
    }
    attempts[change]()
    expected = {"identity": ManifestMismatch, "closed": SessionClosed}[change]
    before = len(client.sessions())
    with pytest.raises(expected):
        stubs.unary(stubs.sessions.Fork, request)
    assert len(client.sessions()) == before
