"""Clients that vanish, close, unload or drain in the middle of work: exact numbers, no leaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import psutil
import pytest

from modeld.client import CallCancelled, Client, ConnectionLost, Session, StopReason
from modeld.client.values import ContextReport
from modeld.shared.errors import (
    DigestMismatch,
    GenerationStale,
    ModelBusy,
    SessionClosed,
    ShuttingDown,
    SwitchRequired,
)
from tests.support.daemon import Background, RunningDaemon, eventually
from tests.support.faulting import (
    LONG_TEXT,
    WINDOW,
    DataRoot,
    answer,
    footprint,
    on_every_backend,
    raw_session,
    settles_to,
    slot,
    until_state,
    until_working,
    worker_pid,
)
from tests.support.product import go_on

DISCONNECTS = 20


@pytest.fixture
def daemon(root: DataRoot) -> RunningDaemon:
    return root.start()


@pytest.fixture
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


def until_free(client: Client) -> None:
    eventually(lambda: not slot(client).holder_operation and not slot(client).queued)


def longer_than(least: int, got: list[int]) -> bool:
    return len(got) > least


def generated(told: ContextReport) -> int:
    return {one.name: one.value for one in told.counters}["generated_tokens"]


def vanish(gone: Client, running: Background) -> None:
    """The connection is closed under a call; what the call says no longer reaches anybody."""
    gone.close()
    with suppress(CallCancelled, ConnectionLost, ValueError):
        running.result()


@on_every_backend
def test_disconnects_in_prefill_leave_exact_numbers_and_nothing_else(
    root: DataRoot, right_answer: list[int]
) -> None:
    # Small micro-batches: a cancel is seen after each.
    daemon = root.start(n_ubatch=64)
    client = daemon.client()
    session = raw_session(client, session_key="kept")
    session.ensure_prefix("Another one. ")
    before = footprint(daemon)
    threads = psutil.Process(daemon.process.pid).num_threads()
    resident: list[int] = []
    for count in range(DISCONNECTS):
        gone = daemon.client()
        theirs = raw_session(gone, session_key="kept")
        assert theirs.opened.attached
        # Each time from the start: a text of its own shares nothing with the last one.
        text = f"{count} {LONG_TEXT}"
        running = Background(partial(theirs.ensure_prefix, text))
        until_working(client, "ensure_prefix")
        vanish(gone, running)
        until_free(client)
        told = session.explain()
        assert told.resident + told.available == WINDOW
        if not count:  # it is about the cancelled prompt now, which this client knows nothing of
            with pytest.raises(DigestMismatch, match="ensure the prefix again"):
                session.prefill_suffix(" and then")
        # What arrived is found again, and only that: the rest of a shorter prompt is evaluated.
        again = session.ensure_prefix(text[:800])
        assert again.reused >= min(told.resident, again.prefix) - 2  # where the text was cut
        assert again.reused <= max(told.resident, 1)
        assert again.reused + again.prefilled == again.prefix == again.resident
        assert again.resident + again.available == WINDOW
        resident.append(told.resident)
    assert any(resident), "no prefill was caught after its first micro-batch"
    assert answer(session) == right_answer
    settles_to(daemon, before)
    eventually(lambda: psutil.Process(daemon.process.pid).num_threads() <= threads + 2)
    assert slot(client).worker.restarts == 0
    client.close()


@on_every_backend
def test_disconnects_in_decode_leave_exact_numbers_and_nothing_else(
    daemon: RunningDaemon, client: Client, right_answer: list[int]
) -> None:
    session = raw_session(client, session_key="kept")
    prefix, suffix = "The quick brown fox", " jumps over"
    prompt = session.ensure_prefix(prefix).resident + session.prefill_suffix(suffix).suffix
    whole = go_on(session, 200, ignore_eos=True).ids
    before = footprint(daemon)
    for count in range(DISCONNECTS):
        gone = daemon.client()
        theirs = raw_session(gone, session_key="kept")
        got: list[int] = []

        def read(theirs: Session = theirs, got: list[int] = got) -> None:
            stream = theirs.turn(
                prefix, suffix, max_tokens=0, ignore_eos=True, token_ids=True, stream_interval_ms=0
            )
            for chunk in stream.chunks():
                got.extend(chunk.token_ids)

        before_it = generated(session.explain())
        running = Background(read)
        eventually(partial(longer_than, count, got))
        vanish(gone, running)
        until_free(client)
        told = session.explain()
        assert told.resident + told.available == WINDOW
        # What was evaluated is what was sampled, to the token, but for the last one where it was
        # not evaluated any more: going on gives the same text.
        evaluated = told.resident - prompt
        sampled = generated(told) - before_it
        assert sampled - 1 <= evaluated <= sampled
        assert len(got) <= sampled
        assert got[:200] == whole[: len(got)]
        if sampled < 190:
            assert go_on(session, 8, ignore_eos=True).ids == whole[sampled : sampled + 8]
    assert answer(session) == right_answer
    settles_to(daemon, before)
    assert slot(client).worker.restarts == 0


@on_every_backend
def test_a_disconnect_in_load_stops_the_load_and_the_next_open_loads(
    root: DataRoot, right_answer: list[int]
) -> None:
    # The first load is slowed, so that it is still at it when its caller goes.
    daemon = root.start(faults=f"load:after=2:slow=2:once={root.path / 'slowed'}")
    with daemon.client() as client:
        until_state(client, "IDLE")
        before = footprint(daemon)
        gone = daemon.client()
        opening = Background(lambda: raw_session(gone))
        eventually((root.path / "slowed").exists)
        vanish(gone, opening)
        until_free(client)
        assert not slot(client).model
        assert answer(raw_session(client)) == right_answer
        settles_to(daemon, before)
        assert slot(client).worker.restarts == 0


@on_every_backend
def test_closing_a_session_stops_its_running_turn(
    daemon: RunningDaemon, client: Client, right_answer: list[int]
) -> None:
    session = raw_session(client, session_key="shared")
    got: list[str] = []
    stream = session.turn("One, two,", " three,", max_tokens=0, ignore_eos=True)

    def read() -> None:
        for chunk in stream.chunks():
            got.append(chunk.text)  # noqa: PERF401

    running = Background(read)
    eventually(lambda: len(got) >= 3)
    with daemon.client() as other:
        raw_session(other, session_key="shared").close()
        with suppress(SessionClosed):
            running.result()
            assert stream.final is not None
            assert stream.final.stop_reason is StopReason.CANCELLED
        with pytest.raises(SessionClosed):
            session.explain()
        assert other.sessions() == []
        until_free(client)
        assert answer(raw_session(other)) == right_answer
        assert slot(client).worker.restarts == 0


def test_an_unload_waits_for_the_turn_or_refuses(daemon: RunningDaemon, client: Client) -> None:
    session = raw_session(client)
    running = Background(lambda: go_on_after(session, 300))
    eventually(lambda: slot(client).holder_operation == "turn")
    with daemon.client() as other:
        with pytest.raises(ModelBusy) as busy:
            other.unload_model(no_wait=True, force=True)
        assert busy.value.metadata["holder_operation"] == "turn"
        unforced = Background(other.unload_model)
        forced = Background(lambda: client.unload_model(force=True))
        told = running.result()
        assert told == (StopReason.LENGTH, 300)  # nobody cut it short
        # In whichever order they were served, the turn came first and the model is gone after.
        with suppress(SwitchRequired):
            unforced.result()
        assert forced.result().sessions_closed in (0, 1)
        assert not slot(client).model
        with pytest.raises(GenerationStale) as stale:
            session.explain()
        assert stale.value.metadata["cause"] == "unload"


def go_on_after(session: Session, tokens: int) -> tuple[StopReason, int]:
    stream = session.turn("One, two,", " three,", max_tokens=tokens, ignore_eos=True)
    stream.read()
    assert stream.final is not None
    return stream.final.stop_reason, stream.final.tokens


def test_a_drain_finishes_what_runs_and_refuses_what_waits(
    daemon: RunningDaemon, client: Client
) -> None:
    session, waiting = raw_session(client), raw_session(client)
    worker = worker_pid(client)
    running = Background(lambda: go_on_after(session, 300))
    eventually(lambda: slot(client).holder_operation == "turn")
    queued = [Background(lambda: answer(waiting)), Background(lambda: raw_session(client))]
    eventually(lambda: slot(client).queued == 2)
    draining = client.drain()
    assert (draining.running, draining.queued) == (1, 2)
    for call in queued:
        with pytest.raises(ShuttingDown) as refused:
            call.result()
        assert refused.value.retry_after_s
    assert running.result() == (StopReason.LENGTH, 300)
    assert daemon.wait() == 0
    assert not psutil.pid_exists(worker)
