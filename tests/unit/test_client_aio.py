"""The asyncio client keeps the same promises as the synchronous one."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from modeld import client as modeld
from modeld.client import AsyncClient, Deadlines, Message
from modeld.shared import errors as typed
from modeld.v1 import session_pb2
from tests.support.fake_daemon import FakeDaemon

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "hello world"}


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="md") as folder, FakeDaemon(Path(folder)) as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: FakeDaemon) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(daemon.world.data_root) as client:
        yield client


@pytest.mark.parametrize(
    ("sync", "twin"),
    [
        (modeld.Client, modeld.AsyncClient),
        (modeld.Session, modeld.AsyncSession),
        (modeld.Chat, modeld.AsyncChat),
        (modeld.TurnStream, modeld.AsyncTurnStream),
        (modeld.DecodeStream, modeld.AsyncDecodeStream),
    ],
)
def test_both_clients_offer_the_same_calls_with_the_same_arguments(sync, twin):
    def surface(cls):
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(cls, inspect.isroutine)
            if not name.startswith("_")
        }

    assert surface(sync) == surface(twin)


async def test_a_turn_streams_text_then_knows_its_numbers(client):
    async with await client.open_session("tiny", window=512) as session:
        stream = session.turn([SYSTEM], [HELLO])
        assert [text async for text in stream] == ["you", " said:", " hello", " world"]
        assert stream.suffix_status.reused == stream.prefix_status.prefix > 0
        assert stream.final.generated_turn_id == stream.generated_turn.turn_id
        assert await session.turn([SYSTEM], [HELLO]).read() == "you said: hello world"


async def test_the_parts_can_be_called_separately(client):
    async with await client.open_session("tiny", prompt_format="raw") as session:
        await session.ensure_prefix("the prefix\n")
        status = await session.prefill_suffix("one")
        decoded = session.decode(max_tokens=2)
        assert [chunk.text async for chunk in decoded] == ["you", " said:"]
        assert (status.suffix, decoded.final.tokens) == (3, 2)


async def test_turns_run_side_by_side(client):
    sessions = [await client.open_session("tiny") for _ in range(3)]
    answers = await asyncio.gather(*(s.turn([], [HELLO]).read() for s in sessions))
    assert answers == ["you said: hello world"] * 3


async def test_cancelling_a_stream_ends_it_without_an_error(client, daemon):
    daemon.world.chunk_pause_s = 5
    async with await client.open_session("tiny") as session:
        stream = session.turn([], [HELLO])
        assert await anext(stream) == "you"
        stream.cancel()
        assert [text async for text in stream] == []
        assert stream.final is None


async def test_cancelling_a_task_cancels_the_call_and_the_task(client, daemon):
    daemon.world.chunk_pause_s = 30
    async with await client.open_session("tiny") as session:
        stream = session.turn([], [HELLO])
        task = asyncio.create_task(stream.read())
        await asyncio.sleep(0.2)  # wherever in the turn this is
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        daemon.world.chunk_pause_s = 0
        assert await session.turn([], [HELLO]).read() == "you said: hello world"


async def test_a_silent_stream_stalls_and_a_deadline_expires_each_with_its_error(daemon):
    daemon.world.chunk_pause_s = 30
    limits = Deadlines(stall_s=0.2)
    async with await AsyncClient.connect(daemon.world.data_root, deadlines=limits) as client:
        session = await client.open_session("tiny")
        with pytest.raises(modeld.StreamStalled):
            await session.turn([], [HELLO]).read()
        with pytest.raises(modeld.DeadlineExceeded):
            await session.turn([], [HELLO], timeout=0.1).read()


async def test_typed_errors_keep_their_class_and_numbers(client, daemon):
    daemon.world.fail("OpenSession", typed.ModelBusy("busy", metadata={"position": 2}))
    with pytest.raises(typed.ModelBusy) as caught:
        await client.open_session("tiny")
    assert caught.value.metadata == {"position": "2"}


async def test_a_chat_recovers_before_text_and_not_after(client, daemon):
    session = await client.open_session("tiny", recover=True)
    chat = session.chat(system="Be brief.")
    await chat.send("one").read()
    daemon.world.bump()
    assert await chat.send("two").read() == "you said: two"
    daemon.world.crash_worker("Turn", typed.SessionFatal("fatal"), after_chunks=1)
    with pytest.raises(typed.SessionFatal):
        await chat.send("three").read()
    assert [r.cause for r in session.recoveries] == ["GENERATION_STALE", "SESSION_FATAL"]
    assert len(chat.history) == 5  # the failed turn is not part of it
    assert await chat.send("three").read() == "you said: three"
    last = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    assert not any(s.generated_turn_id for s in last.prefix.segments)


async def test_a_decode_after_a_loss_gets_its_prefix_and_suffix_again(client, daemon):
    session = await client.open_session("tiny", recover=True, prompt_format="raw")
    await session.ensure_prefix("prefix\n")
    await session.prefill_suffix("ab")
    daemon.world.bump()
    assert "".join([c.text async for c in session.decode()]) == "you said: ab"


async def test_a_recovery_that_was_cancelled_is_begun_anew(client, daemon, monkeypatch):
    session = await client.open_session("tiny", recover=True, prompt_format="raw")
    await session.ensure_prefix("prefix\n")
    await session.prefill_suffix("ab")
    daemon.world.bump()
    again = session._ensure_again

    async def cancelled(*_: object) -> None:
        monkeypatch.setattr(session, "_ensure_again", again)
        raise asyncio.CancelledError

    monkeypatch.setattr(session, "_ensure_again", cancelled)
    with pytest.raises(asyncio.CancelledError):
        [c.text async for c in session.decode()]
    assert "".join([c.text async for c in session.decode()]) == "you said: ab"


async def test_a_lost_connection_finds_the_successor(daemon):
    root = daemon.world.data_root
    async with await AsyncClient.connect(root) as client:
        session = await client.open_session("tiny", recover=True)
        daemon.stop()
        with FakeDaemon(root):
            assert await session.turn([], [HELLO]).read() == "you said: hello world"
            assert [r.cause for r in session.recoveries] == ["CONNECTION_LOST"]


async def test_where_no_daemon_comes_back_the_loss_is_told_with_its_cause(daemon):
    root = daemon.world.data_root
    async with await AsyncClient.connect(root, recover_wait_s=0.1) as client:
        session = await client.open_session("tiny", recover=True)
        daemon.stop()
        with pytest.raises(modeld.NotRunning) as caught:
            await session.turn([], [HELLO]).read()
        assert isinstance(caught.value.__cause__, modeld.ConnectionLost)


async def test_a_cancelled_answer_joins_the_history_as_far_as_it_got(client, daemon):
    daemon.world.chunk_pause_s = 5
    async with await client.open_session("tiny") as session:
        chat = session.chat()
        async with chat.send("one two") as stream:
            await anext(stream)
        assert chat.history == [Message("user", "one two"), Message("assistant", "you")]
