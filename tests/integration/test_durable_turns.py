"""Durable sessions through the product: saved at each turn's end, and back under their key.

Each test leaves its session open: what closes it afterwards discards what was saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from modeld.client import Client, Resumed, Session, StopReason
from modeld.shared.errors import InvalidRequest, ManifestMismatch, SessionClosed, SessionNotFound
from modeld.v1 import session_pb2 as pb
from tests.support.backends import Backend
from tests.support.daemon import MODEL, RunningDaemon, Stubs, eventually, running_daemon
from tests.support.openvino_models import tiny_gguf
from tests.support.product import Told, ask, go_on, system, user

KEY = "durable"
WINDOW = 1024
PREFIX = "A stone bridge crossed the river near the old mill. " * 8
QUESTIONS = (" The miller said", " The river answered", " At night the bridge")
SAMPLED = {"temperature": 0.9, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def daemon(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One with a tiny model: each test loads it twice or more."""
    model = tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with running_daemon(model, backend=backend.name) as running:
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


def durable(client: Client, **options: Any) -> Session:
    given = {"window": WINDOW, "prompt_format": "raw", "session_key": KEY, "durable": True}
    return client.open_session(MODEL, **{**given, **options})


def chatting(client: Client, **options: Any) -> Session:
    return durable(client, prompt_format="chat", **options)


def gone(client: Client) -> None:
    """Every session goes with its model, as at an idle release or a crash."""
    client.unload_model(force=True)


def resumed(session: Session) -> Resumed:
    assert session.opened.resumed is not None, "nothing was saved"
    return session.opened.resumed


class Talk:
    """A conversation that names its answers by id."""

    def __init__(self) -> None:
        self.said: list[Any] = [system(PREFIX)]

    def turn(self, session: Session, question: str) -> Told:
        told = ask(session, self.said, [user(question)], 12, **SAMPLED)
        self.said += [user(question), told.turn]
        return told


# --- coming back ---------------------------------------------------------------------------------


def test_a_key_goes_on_where_it_was_token_by_token(client: Client) -> None:
    plain, talk = chatting(client, session_key="plain", durable=False), Talk()
    whole = [talk.turn(plain, question) for question in QUESTIONS]
    assert whole[-1].final.saved is None

    talk, session = Talk(), chatting(client)
    assert session.opened.resumed is None
    told = [talk.turn(session, question) for question in QUESTIONS[:2]]
    saved = told[-1].final.saved
    assert saved is not None
    assert (saved.ok, saved.reason) == (True, "")
    assert saved.tokens >= told[-1].final.resident
    assert saved.written_bytes > 0
    (listed,) = client.saved_sessions()
    assert (listed.open, listed.tokens, listed.turns) == (True, saved.tokens, 2)
    gone(client)
    (listed,) = client.saved_sessions()
    assert (listed.open, listed.saved_unix_ms) == (False, saved.saved_unix_ms)
    assert client.list_snapshots().used_bytes >= listed.size_bytes > saved.tokens

    again = chatting(client)
    back = resumed(again)
    assert back.miss_reason == ""
    assert (back.tokens, back.saved_unix_ms) == (saved.tokens, saved.saved_unix_ms)
    assert back.seen_tokens == told[-1].final.seen_tokens
    assert back.generated_turn_ids == tuple(t.turn.turn_id for t in told if t.turn)
    report = again.explain()
    assert report.resident == again.opened.resident == told[-1].final.resident
    assert report.generated_turn_ids == back.generated_turn_ids

    last = talk.turn(again, QUESTIONS[2])
    assert [t.ids for t in (*told, last)] == [t.ids for t in whole]
    # The answer's last token was sampled and not evaluated; all before it is there.
    assert last.before.reused == told[-1].final.resident
    assert last.before.prefilled == last.before.prefix - last.before.reused
    assert last.before.turns_recomputed == 0
    assert last.final.saved is not None
    assert last.final.saved.ok


def test_a_decode_goes_on_with_the_answer_that_was_saved(client: Client) -> None:
    plain = durable(client, session_key="plain", durable=False)
    whole = [*ask(plain, PREFIX, QUESTIONS[0], 6, ignore_eos=True).ids]
    whole += go_on(plain, 6, ignore_eos=True).ids
    session = durable(client)
    ids = ask(session, PREFIX, QUESTIONS[0], 6, ignore_eos=True).ids
    gone(client)
    again = durable(client)
    told = go_on(again, 6, ignore_eos=True)
    assert ids + told.ids == whole
    assert told.final.saved is not None
    assert told.final.saved.ok


def test_a_suffix_goes_on_behind_the_prefix_that_was_saved(client: Client) -> None:
    session = durable(client)
    ask(session, PREFIX, QUESTIONS[0], 4, ignore_eos=True)
    prefix = session.explain().segments[0].token_end
    gone(client)
    again = durable(client)
    # Its manifest is that of the prefix, which this client never sent.
    status = again.prefill_suffix(QUESTIONS[1])
    assert status.prefix == prefix
    assert status.resident == prefix + status.suffix
    assert status.prefilled <= status.suffix


def test_only_what_is_new_is_written(client: Client) -> None:
    talk, session = Talk(), chatting(client)
    first, second = (talk.turn(session, question).final.saved for question in QUESTIONS[:2])
    assert first is not None
    assert second is not None
    assert second.tokens > first.tokens
    assert second.written_bytes < first.written_bytes


def test_a_cancelled_answer_is_saved_as_far_as_it_came(client: Client) -> None:
    session = durable(client)
    stream = session.turn(PREFIX, QUESTIONS[0], max_tokens=0, ignore_eos=True, stream_interval_ms=0)
    for _ in zip(range(5), stream.chunks(), strict=False):
        pass
    stream.cancel()
    list(stream.chunks())
    (info,) = eventually(lambda: [s for s in client.sessions() if s.saved_unix_ms])
    before = session.explain()
    gone(client)
    again = durable(client)
    assert resumed(again).saved_unix_ms == info.saved_unix_ms
    report = again.explain()
    assert (report.resident, report.seen_tokens) == (before.resident, before.seen_tokens)
    assert report.generated_turn_ids == before.generated_turn_ids
    assert len(report.generated_turn_ids) == 1


def test_an_open_session_is_listed_with_when_it_was_saved(client: Client) -> None:
    session = durable(client)
    (info,) = client.sessions()
    assert (info.durable, info.saved_unix_ms) == (True, 0)
    session.ensure_prefix(PREFIX)
    (info,) = client.sessions()
    assert info.saved_unix_ms == 0  # not a turn
    saved = go_on(session, 2).final.saved
    assert saved is not None
    (info,) = client.sessions()
    assert info.saved_unix_ms == saved.saved_unix_ms > 0


# --- not coming back -----------------------------------------------------------------------------


def test_a_smaller_window_begins_cold_and_says_the_numbers(client: Client) -> None:
    talk, session = Talk(), chatting(client)
    tokens = talk.turn(session, QUESTIONS[0]).final.resident
    gone(client)
    small = chatting(client, window=256)
    back = resumed(small)
    assert tokens > 256
    assert back.tokens == 0
    assert "256" in back.miss_reason
    gone(client)
    # Nothing was saved of the small one: it is still there for a window that takes it.
    assert resumed(chatting(client)).tokens >= tokens


def test_a_flipped_byte_begins_cold_and_the_next_turn_saves_anew(
    client: Client, daemon: RunningDaemon
) -> None:
    ask(durable(client), PREFIX, QUESTIONS[0], 4, ignore_eos=True)
    gone(client)
    (folder,) = (daemon.data_root / "durable").iterdir()
    part = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    again = durable(client)
    assert resumed(again).tokens == 0
    assert "isn't what was written" in resumed(again).miss_reason
    told = ask(again, "".join([PREFIX, QUESTIONS[0]]), QUESTIONS[1], 4, ignore_eos=True)
    assert told.before.reused == 0
    assert told.final.saved is not None
    assert told.final.saved.ok
    gone(client)
    assert resumed(durable(client)).tokens == told.final.saved.tokens


# --- forgetting and refusing ---------------------------------------------------------------------


def test_closing_keeps_it_and_discarding_forgets_it(client: Client) -> None:
    session = durable(client)
    ask(session, PREFIX, QUESTIONS[0], 2)
    session.close()
    again = durable(client)
    assert resumed(again).tokens > 0
    again.close(discard=True)
    assert durable(client).opened.resumed is None


def test_discarding_forgets_it_also_where_its_session_is_gone(client: Client, stubs: Stubs) -> None:
    lost = durable(client)
    ask(lost, PREFIX, QUESTIONS[0], 2)
    gone(client)
    lost.close(discard=True)
    assert client.models()[0].resident is False  # nothing was loaded for it
    again = durable(client)
    assert again.opened.resumed is None
    ask(again, PREFIX, QUESTIONS[0], 2)
    client.discard_saved(KEY)  # open or not
    assert client.sessions() == []
    with pytest.raises(SessionNotFound):
        client.discard_saved(KEY)
    assert client.list_snapshots().used_bytes == 0
    stale = pb.CloseSessionRequest(
        session={"session_id": again.handle.session_id, "generation": again.handle.generation}
    )
    for flags in ({}, {"session_key": KEY}, {"discard": True}):  # as it was before
        with pytest.raises(SessionClosed):
            stubs.unary(
                stubs.sessions.CloseSession,
                pb.CloseSessionRequest(session=stale.session, **flags),
            )


def test_fresh_begins_anew(client: Client) -> None:
    ask(durable(client), PREFIX, QUESTIONS[0], 2)
    anew = durable(client, fresh=True)
    assert (anew.opened.attached, anew.opened.resumed, anew.opened.resident) == (False, None, 0)
    gone(client)
    assert durable(client).opened.resumed is None


def test_an_attached_client_gets_the_open_session(client: Client, daemon: RunningDaemon) -> None:
    session = durable(client)
    told = ask(session, PREFIX, QUESTIONS[0], 2)
    with daemon.client() as other:
        attached = durable(other)
        assert attached.handle == session.handle
        assert (attached.opened.attached, attached.opened.resumed) == (True, None)
        assert attached.opened.resident == told.final.resident
        with pytest.raises(ManifestMismatch) as refused:
            durable(other, durable=False)
        assert refused.value.metadata["field"] == "durable"


@pytest.mark.parametrize(
    ("options", "field"),
    [({"session_key": ""}, "session_key"), ({"durable": False, "fresh": True}, "fresh")],
)
def test_what_makes_no_sense_is_refused_by_field(
    client: Client, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        durable(client, **options)
    assert refused.value.metadata["field"] == field
    assert client.sessions() == []


def test_a_full_window_is_saved_too(client: Client) -> None:
    session = durable(client, window=256)
    told = ask(session, "One, two, three,", " four,", 0, ignore_eos=True)
    assert told.stop is StopReason.CONTEXT_FULL
    assert told.final.saved is not None
    assert told.final.saved.ok
    gone(client)
    again = durable(client, window=256)
    assert again.explain().resident == told.final.resident
