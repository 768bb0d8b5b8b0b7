"""What callers of either client can rely on of durable sessions: discarded, forked, come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modeld import client as modeld
from modeld.shared import errors as typed
from modeld.v1 import session_pb2
from tests.support.both_clients import done
from tests.support.fake_daemon import FakeDaemon, Hangup

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "hello world"}
AGAIN = {"role": "user", "content": "again"}
KEY = "k"


@pytest.fixture(autouse=True)
def saves(daemon: FakeDaemon) -> None:
    daemon.world.saved = session_pb2.Saved(ok=True, tokens=40, saved_unix_ms=1)


async def opened(client: Any, **options: Any) -> tuple[Any, str]:
    """A durable session of one answer, and the id of that."""
    session = await done(client.open_session("tiny", durable=True, session_key=KEY, **options))
    stream = session.turn([SYSTEM], [HELLO])
    await done(stream.read())
    return session, stream.generated_turn.turn_id


# --- discarding ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recover", [False, True])
async def test_discarding_a_session_whose_worker_died_forgets_what_was_saved(
    client, daemon, recover
):
    session, _ = await opened(client, recover=recover)
    daemon.world.bump()
    await done(session.close(discard=True))
    assert daemon.world.kept_keys == set()
    assert session.recoveries == []  # nothing was brought back to be discarded
    with pytest.raises(modeld.SessionClosed):
        await done(session.explain())


async def test_discarding_after_a_close_or_a_detach_forgets_it_too(client, daemon):
    for end in ("close", "detach"):
        session, _ = await opened(client)
        await done(getattr(session, end)())
        assert daemon.world.kept_keys == {KEY}
        for _ in range(2):
            await done(session.close(discard=True))
        assert (daemon.world.kept_keys, daemon.world.sessions) == (set(), {})
    closes = daemon.world.requests_of(session_pb2.CloseSessionRequest)
    assert [c.discard for c in closes] == [False, True, False, True]


@pytest.mark.parametrize("failure", [Hangup(), typed.StaleFence("another owner")])
async def test_a_discard_that_failed_is_told_and_can_be_asked_for_again(client, daemon, failure):
    session, _ = await opened(client)
    daemon.world.fail("CloseSession", failure)
    with pytest.raises((modeld.ConnectionLost, modeld.StaleFence)) as caught:
        await done(session.close(discard=True))
    (told,) = caught.value.__notes__
    assert f"modeld sessions close {KEY} --discard" in told
    assert daemon.world.kept_keys == {KEY}
    await done(session.close(discard=True))
    assert daemon.world.kept_keys == set()


async def test_a_session_that_recovers_reconnects_to_discard(client, daemon):
    session, _ = await opened(client, recover=True)
    daemon.world.fail("CloseSession", Hangup())
    await done(session.close(discard=True))
    assert daemon.world.kept_keys == set()


async def test_a_plain_close_of_a_lost_session_keeps_what_was_saved(client, daemon):
    session, _ = await opened(client)
    daemon.world.bump()
    assert await done(session.close()) == modeld.Closed(0)
    assert daemon.world.kept_keys == {KEY}


async def test_a_lost_session_that_is_not_durable_needs_no_discard(client, daemon):
    session = await done(client.open_session("tiny", session_key="other"))
    daemon.world.bump()
    assert await done(session.close(discard=True)) == modeld.Closed(0)


async def test_what_is_saved_can_be_discarded_by_its_key_alone(client, daemon):
    session, _ = await opened(client)
    await done(session.close())
    await done(client.discard_saved(KEY))
    assert daemon.world.kept_keys == set()
    with pytest.raises(modeld.SessionNotFound):
        await done(client.discard_saved(KEY))


# --- forking -------------------------------------------------------------------------------------


async def test_a_fork_takes_its_answers_from_the_call_itself(client, daemon):
    session, turn_id = await opened(client)
    branch = await done(session.fork())
    assert branch.has_turn(turn_id)
    assert daemon.world.requests_of(session_pb2.ExplainContextRequest) == []
    assert branch.saved is None


@pytest.mark.parametrize("ok", [True, False])
async def test_a_durable_fork_tells_whether_it_was_saved(client, daemon, ok):
    session, _ = await opened(client)
    assert session.saved.ok
    daemon.world.saved = session_pb2.Saved(ok=ok, tokens=7, reason="" if ok else "STORAGE_FULL")
    branch = await done(session.fork(session_key="b", durable=True))
    assert (branch.saved.ok, branch.saved.tokens) == (ok, 7)
    assert branch.saved.reason == ("" if ok else "STORAGE_FULL")
    assert session.saved.tokens == 40


async def test_a_durable_fork_that_comes_back_is_where_it_was_without_being_read_again(
    client, daemon
):
    session, turn_id = await opened(client, recover=True)
    branch = await done(session.fork(session_key="b", durable=True))
    lose(daemon, turn_id)
    await done(branch.decode().read())
    assert prefixes(daemon) == 0
    daemon.world.saved = session_pb2.Saved(ok=False)
    unsaved = await done(branch.fork(session_key="c", durable=True))
    lose(daemon, turn_id)
    await done(unsaved.decode().read())
    assert prefixes(daemon) == 1


# --- where a session is that came back -----------------------------------------------------------


def lose(daemon: FakeDaemon, turn_id: str) -> None:
    """The worker dies; what comes back is what was saved with that answer."""
    daemon.world.resumed = session_pb2.Resumed(tokens=40, generated_turn_ids=[turn_id])
    daemon.world.kept_turns = {turn_id: "you said: hello world"}
    daemon.world.bump()


def prefixes(daemon: FakeDaemon) -> int:
    return len(daemon.world.requests_of(session_pb2.EnsurePrefixRequest))


async def nothing(_session: Any, _daemon: FakeDaemon) -> None:
    pass


async def looks(session: Any, _daemon: FakeDaemon) -> None:
    await done(session.explain())
    await done(session.snapshot())


async def is_refused(session: Any, daemon: FakeDaemon) -> None:
    daemon.world.fail("Decode", typed.ModelBusy("busy"), after_chunks=-1)
    with pytest.raises(modeld.ModelBusy):
        await done(session.decode().read())
    daemon.world.fail("Admit", typed.ModelBusy("busy"))
    with pytest.raises(modeld.ModelBusy):
        await done(session.admit(segment=0))


async def admits(session: Any, _daemon: FakeDaemon) -> None:
    await done(session.admit(segment=0))


async def restores(session: Any, _daemon: FakeDaemon) -> None:
    info = await done(session.snapshot())
    await done(session.restore(info.snapshot_id))
    await done(session.ensure_prefix([SYSTEM]))


async def appends(session: Any, _daemon: FakeDaemon) -> None:
    await done(session.prefill_suffix([AGAIN]))


async def gives_up_a_decode(session: Any, daemon: FakeDaemon) -> None:
    daemon.world.chunk_pause_s = 30
    with pytest.raises(modeld.DeadlineExceeded):
        await done(session.decode(timeout=0.2).read())
    daemon.world.chunk_pause_s = 0


async def leaves_a_decode(session: Any, daemon: FakeDaemon) -> None:
    daemon.world.chunk_pause_s = 30
    stream = session.decode()
    await (anext(stream) if hasattr(stream, "__anext__") else done(next(stream)))
    await done(stream.close())
    daemon.world.chunk_pause_s = 0


async def goes_on_unsaved(session: Any, daemon: FakeDaemon) -> None:
    daemon.world.saved = session_pb2.Saved(ok=False, reason="STORAGE_FULL")
    await done(session.turn([SYSTEM], [HELLO]).read())


@pytest.mark.parametrize(
    ("happens", "again"),
    [
        (nothing, 0),
        (looks, 0),
        (is_refused, 0),
        (admits, 1),
        (restores, 2),  # its own, and after the loss
        (appends, 1),
        (gives_up_a_decode, 1),
        (leaves_a_decode, 1),
        (goes_on_unsaved, 1),
    ],
)
async def test_after_a_loss_the_prompt_is_sent_again_unless_what_was_saved_is_where_it_was(
    client: Any, daemon: FakeDaemon, happens: Callable[..., Any], again: int
) -> None:
    session, turn_id = await opened(client, recover=True, overflow="evict", window=2048)
    await happens(session, daemon)
    lose(daemon, turn_id)
    await done(session.decode().read())
    assert len(session.recoveries) == 1
    assert prefixes(daemon) == again
