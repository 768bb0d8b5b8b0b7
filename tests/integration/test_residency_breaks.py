"""Kept and parked state under what clients do to it: many at once, hang-ups, made-up exports."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from modeld.cli.main import cli
from modeld.client import Client, Session
from modeld.shared.codec import canonical
from modeld.shared.errors import InvalidRequest
from tests.support import tiny_models
from tests.support.daemon import Background, RunningDaemon, eventually, running_daemon
from tests.support.product import ask

pytestmark = pytest.mark.real

TINY = "tiny"
CONTEXTS = 2
WORDS = " word" * 60

Saved = dict[str, Any]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    model = tiny_models.llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with running_daemon(max_sessions=CONTEXTS) as daemon:
        with daemon.client() as client:
            client.import_model(model, name=TINY, model_type="llama")
        yield daemon


@pytest.fixture
def crowd(crowded: RunningDaemon) -> Iterator[Client]:
    with crowded.client() as client:
        yield client
        for info in client.list_snapshots().snapshots:
            client.delete_snapshot(info.snapshot_id)


def open_raw(client: Client) -> Session:
    return client.open_session(TINY, window=1024, prompt_format="raw")


def resident(client: Client, session: Session) -> int:
    of = session.opened.session.session_id
    return next(one.resident for one in client.sessions() if one.session.session_id == of)


def test_more_clients_at_once_than_contexts_are_all_served(
    crowded: RunningDaemon, crowd: Client
) -> None:
    sessions = [open_raw(crowd) for _ in range(3 * CONTEXTS)]
    together = threading.Barrier(len(sessions))

    def talk(number: int, session: Session) -> list[list[int]]:
        together.wait()
        prefix = f"{number}.{WORDS}"
        return [ask(session, prefix, f" {n}?", 24, ignore_eos=True).ids for n in range(4)]

    talks = [Background(partial(talk, n, session)) for n, session in enumerate(sessions)]
    answers = [one.result() for one in talks]
    assert any(one.parked for one in crowd.sessions())
    for session in sessions:
        session.close()
    for number, told in enumerate(answers):
        with open_raw(crowd) as alone:
            assert [
                ask(alone, f"{number}.{WORDS}", f" {n}?", 24, ignore_eos=True).ids for n in range(4)
            ] == told


def test_a_session_that_holds_something_is_restored_while_all_contexts_are_taken(
    crowd: Client,
) -> None:
    with open_raw(crowd) as session, open_raw(crowd) as other:
        first = ask(session, WORDS, " one?", ignore_eos=True)
        info = session.snapshot()
        ask(session, "else" + WORDS, " two?", ignore_eos=True)
        beside = ask(other, "beside" + WORDS, " one?", ignore_eos=True)
        assert not any(one.parked for one in crowd.sessions())
        assert session.restore(info.snapshot_id).resident == first.final.resident
        again = ask(session, WORDS, " one?", ignore_eos=True)
        assert (again.ids, again.before.prefilled) == (first.ids, 0)
        assert ask(other, "beside" + WORDS, " one?", ignore_eos=True).ids == beside.ids


def test_what_a_cancelled_first_turn_left_is_listed_and_can_be_saved(crowd: Client) -> None:
    with open_raw(crowd) as session:
        stream = session.turn(WORDS, " on and on", max_tokens=900, ignore_eos=True)
        next(stream.chunks())
        stream.cancel()
        for _ in stream.chunks():
            pass
        told = session.explain()  # after the worker has ended the turn
        assert told.resident > 0
        assert eventually(lambda: resident(crowd, session) == told.resident, 5)
        assert session.snapshot().tokens == told.resident


def test_a_kept_conversation_goes_back_to_what_was_restored_and_on_from_there(
    crowded: RunningDaemon, crowd: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELD_DATA_ROOT", str(crowded.data_root))

    def modeld(*arguments: str) -> dict[str, Any]:
        result = CliRunner().invoke(cli, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
        told: dict[str, Any] = json.loads(result.stdout)
        return told

    def said(text: str) -> dict[str, Any]:
        options = ("--session", "back", "--max-tokens", "4", "--window", "1024")
        return modeld("run", TINY, text, *options)

    first = said("One.")
    kept = modeld("sessions", "snapshot", "back")["snapshot_id"]
    second = said("Two.")
    said("Three.")
    modeld("sessions", "restore", "back", kept)
    again = said("Two.")
    assert again["answer"] == second["answer"]
    assert again["prefix"]["prefix"] == second["prefix"]["prefix"]
    assert again["prefix"]["reused"] >= first["final"]["resident"]
    assert again["prefix"]["turns_recomputed"] == 0
    modeld("sessions", "close", "back", "--discard")


# --- exports that no daemon made -----------------------------------------------------------------


@pytest.fixture
def members(crowd: Client, tmp_path: Path) -> list[tuple[str, bytes]]:
    """The files of an export, whose snapshot is deleted."""
    with open_raw(crowd) as session:
        ask(session, WORDS, " one?", ignore_eos=True)
        info = session.snapshot()
    crowd.export_snapshot(info.snapshot_id, tmp_path / "kept.tar")
    crowd.delete_snapshot(info.snapshot_id)
    with tarfile.open(tmp_path / "kept.tar") as archive:
        return [(one.name, archive.extractfile(one).read()) for one in archive]  # type: ignore[union-attr]


def packed(members: list[tuple[str, bytes]]) -> io.BytesIO:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    target.seek(0)
    return target


def sealed(saved: Saved) -> bytes:
    """As a daemon seals it."""
    digest = hashlib.sha256(canonical(saved)).hexdigest()
    told = {"format": 1, "sha256": digest, "saved": saved}
    return json.dumps(told, indent=1, ensure_ascii=False).encode() + b"\n"


def longer(saved: Saved) -> None:
    saved["tokens"] = saved["parts"][-1]["end"] = 2**63


CHANGES: dict[str, Callable[[Saved], None]] = {
    "turns beyond the wire's": lambda saved: saved.update(turns=2**31),
    "fewer turns than none": lambda saved: saved.update(turns=-1),
    "a window beyond the wire's": lambda saved: saved.update(window=2**63),
    "seen beyond the wire's": lambda saved: saved.update(seen_tokens=2**63),
    "tokens beyond the wire's": longer,
    "a time beyond the calendar": lambda saved: saved.update(created_unix_ms=2**62),
    "seconds before it began": lambda saved: saved.update(seconds=-1.0),
    "a digest of megabytes": lambda saved: saved["identity"].update(kv_digest="a" * 2**21),
    "a digest that paints": lambda saved: saved["identity"].update(kv_digest="\x1b[31m"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_import_that_no_list_could_tell_of_is_refused(
    crowd: Client, members: list[tuple[str, bytes]], change: Callable[[Saved], None]
) -> None:
    saved = json.loads(dict(members)["saved.json"])["saved"]
    change(saved)
    made_up = [(n, sealed(saved) if n == "saved.json" else data) for n, data in members]
    with pytest.raises(InvalidRequest, match=r"saved\.json"):
        crowd.import_snapshot(packed(made_up))
    assert crowd.list_snapshots().snapshots == ()
    assert crowd.import_snapshot(packed(members)) in crowd.list_snapshots().snapshots


def test_a_file_that_is_no_export_is_refused_in_words(
    crowd: Client, members: list[tuple[str, bytes]]
) -> None:
    strange = [
        [("info.json", b"[" * 900_000), *members[1:]],
        [*members[:2], ("kv-\udcff", b"x"), *members[2:]],
    ]
    sparse = tarfile.TarInfo("sparse")
    sparse.pax_headers = {"GNU.sparse.map": "a,b"}
    plain = packed(members).getvalue()
    at = tarfile.BLOCKSIZE * (1 + -(-len(members[0][1]) // tarfile.BLOCKSIZE))
    header = sparse.tobuf(tarfile.PAX_FORMAT)
    files = [*map(packed, strange), io.BytesIO(plain[:at] + header + plain[at:])]
    for file in files:
        with pytest.raises(InvalidRequest, match="isn't a whole exported snapshot"):
            crowd.import_snapshot(file)
    assert crowd.list_snapshots().snapshots == ()
