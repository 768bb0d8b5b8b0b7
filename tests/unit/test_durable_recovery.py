"""How a client of a durable session goes on after a loss: nothing sent again that came back."""

from __future__ import annotations

from typing import Any

import pytest

from modeld.shared import errors as typed
from modeld.v1 import session_pb2
from tests.support.both_clients import done
from tests.support.fake_daemon import FakeDaemon

LOST = typed.SessionFatal("the worker died", metadata={"cause": "native crash"})
SAVED = session_pb2.Saved(ok=True, tokens=40, written_bytes=1000, saved_unix_ms=7)


@pytest.fixture(autouse=True)
def saves(daemon: FakeDaemon) -> None:
    daemon.world.saved = SAVED


async def opened(client: Any, **options: Any) -> Any:
    """A durable session of two parts and an answer, which was saved."""
    session = await done(
        client.open_session(
            "tiny", durable=True, session_key="k", recover=True, prompt_format="raw", **options
        )
    )
    await done(session.turn("prefix\n", "suffix\n").read())
    return session


def resumed_with(daemon: FakeDaemon, *turn_ids: str) -> None:
    """What a reopened session will say that it has."""
    daemon.world.resumed = session_pb2.Resumed(
        tokens=40, saved_unix_ms=7, generated_turn_ids=turn_ids
    )
    daemon.world.kept_turns = dict.fromkeys(turn_ids, "an answer")


async def test_what_came_back_whole_is_not_sent_again(client: Any, daemon: FakeDaemon) -> None:
    session = await opened(client)
    resumed_with(daemon, "t-1")
    daemon.world.crash_worker("Decode", LOST, after_chunks=-1)
    await done(session.decode().read())
    (recovery,) = session.recoveries
    assert recovery.resumed.tokens == 40
    assert recovery.resumed.saved_unix_ms == 7
    assert not daemon.world.requests_of(session_pb2.EnsurePrefixRequest)
    assert not daemon.world.requests_of(session_pb2.PrefillSuffixRequest)


@pytest.mark.parametrize("kept", [(), ("t-0",), ("t-1", "t-2")])
async def test_what_came_back_otherwise_gets_its_prompt_again(
    client: Any, daemon: FakeDaemon, kept: tuple[str, ...]
) -> None:
    session = await opened(client)
    resumed_with(daemon, *kept)
    daemon.world.crash_worker("Decode", LOST, after_chunks=-1)
    await done(session.decode().read())
    assert len(daemon.world.requests_of(session_pb2.EnsurePrefixRequest)) == 1
    assert len(daemon.world.requests_of(session_pb2.PrefillSuffixRequest)) == 1


async def test_a_prompt_that_came_after_the_save_is_sent_again(
    client: Any, daemon: FakeDaemon
) -> None:
    session = await opened(client)
    await done(session.ensure_prefix("another\n"))
    resumed_with(daemon, "t-1")
    daemon.world.crash_worker("Decode", LOST, after_chunks=-1)
    await done(session.decode().read())
    sent = daemon.world.requests_of(session_pb2.EnsurePrefixRequest)
    assert [s.prompt.segments[0].raw.text for s in sent] == ["another\n", "another\n"]


async def test_an_answer_that_was_not_saved_is_not_taken_for_one(
    client: Any, daemon: FakeDaemon
) -> None:
    daemon.world.saved = session_pb2.Saved(ok=False, reason="STORAGE_FULL", detail="no space")
    session = await opened(client)
    resumed_with(daemon, "t-1")
    daemon.world.crash_worker("Decode", LOST, after_chunks=-1)
    await done(session.decode().read())
    assert len(daemon.world.requests_of(session_pb2.EnsurePrefixRequest)) == 1


async def test_a_fresh_session_is_not_forgotten_when_it_is_reopened(
    client: Any, daemon: FakeDaemon
) -> None:
    session = await opened(client, fresh=True)
    daemon.world.crash_worker("Decode", LOST, after_chunks=-1)
    await done(session.decode().read())
    opens = daemon.world.requests_of(session_pb2.OpenSessionRequest)
    assert [(o.fresh, o.durable, o.session_key) for o in opens] == [
        (True, True, "k"),
        (False, True, "k"),
    ]


@pytest.mark.parametrize("kept", [True, False])
async def test_answers_keep_their_ids_where_they_came_back(
    client: Any, daemon: FakeDaemon, kept: bool
) -> None:
    session = await done(client.open_session("tiny", durable=True, session_key="k", recover=True))
    chat = session.chat()
    await done(chat.send("one").read())
    if kept:
        resumed_with(daemon, "t-1")
    daemon.world.crash_worker("Turn", LOST, after_chunks=-1)
    await done(chat.send("two").read())
    assert len(session.recoveries) == 1
    answer = daemon.world.requests_of(session_pb2.TurnRequest)[-1].prefix.segments[1]
    if kept:
        assert answer.generated_turn_id == "t-1"
    else:
        assert answer.message.role == "assistant"
        assert answer.message.content[0].text == "you said: one"
