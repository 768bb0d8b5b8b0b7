"""Kept state through the client library and the command, on a real daemon."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from modeld.cli.main import cli
from modeld.client import AsyncClient, Client, ContextOverflow, DigestMismatch, Segment, Text
from modeld.client.prompts import PromptItem
from tests.support.daemon import MODEL, RunningDaemon
from tests.support.product import ask, system, user

pytestmark = pytest.mark.real

PREFIX = [system("You answer in few words.")]
FIRST = [user("The keeper wrote each evening what the sea had brought. " * 12 + "What was it?")]
EVICTING_WINDOW = 1024
BLOCK_TOKENS = 256
FACT = " The lighthouse is painted in vermilion."
FILLER = " Waves came in, waves went out, and nothing else was to be seen."


@pytest.fixture(autouse=True)
def _no_snapshots(client: Client) -> Iterator[None]:
    yield
    for info in client.list_snapshots().snapshots:
        client.delete_snapshot(info.snapshot_id)


@pytest.fixture
def modeld(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command in this process on the daemon's data root."""
    monkeypatch.setenv("MODELD_DATA_ROOT", str(daemon.data_root))

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        return result

    return run


def test_an_exported_snapshot_comes_back_from_its_file_and_a_changed_byte_is_caught(
    client: Client, tmp_path: Path
) -> None:
    with client.open_session(MODEL, window=1024) as session:
        first = ask(session, PREFIX, FIRST, 8)
        info = session.snapshot("to keep")
        again = [*FIRST, first.turn or "", user("And then?")]
        went_on = ask(session, PREFIX, again, 8)
    path = tmp_path / "kept.tar"
    exported = client.export_snapshot(info.snapshot_id, path)
    assert exported.size_bytes == path.stat().st_size >= info.size_bytes
    client.delete_snapshot(info.snapshot_id)

    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with pytest.raises(DigestMismatch):
        client.import_snapshot(io.BytesIO(bytes(data)))
    assert client.list_snapshots().snapshots == ()

    back = client.import_snapshot(path)
    assert (back.digest, back.label, back.tokens) == (info.digest, "to keep", info.tokens)
    with client.open_session(MODEL, window=1024) as fresh:
        fresh.restore(back.snapshot_id)
        told = ask(fresh, PREFIX, again, 8)
    assert (told.ids, told.after.reused) == (went_on.ids, went_on.after.reused)


async def test_the_asyncio_client_keeps_forks_and_brings_back(
    daemon: RunningDaemon, client: Client, tmp_path: Path
) -> None:
    async with await AsyncClient.connect(daemon.data_root) as other:
        session = await other.open_session(MODEL, window=1024)
        first = session.turn(PREFIX, FIRST, max_tokens=8)
        await first.read()
        branch = await session.fork()
        assert branch.opened.resident == (await session.explain()).resident
        info = await session.snapshot()
        await session.close()
        assert first.generated_turn is not None
        again: list[PromptItem] = [*FIRST, first.generated_turn, user("And then?")]
        second = branch.turn(PREFIX, again, max_tokens=8)
        text = await second.read()
        await other.export_snapshot(info.snapshot_id, tmp_path)
        await other.delete_snapshot(info.snapshot_id)
        back = await other.import_snapshot(tmp_path / f"{info.snapshot_id}.tar")
        restored = await branch.restore(back.snapshot_id)
        assert restored.tokens == info.tokens
        third = branch.turn(PREFIX, again, max_tokens=8)
        assert await third.read() == text
        assert third.prefix_status is not None
        assert third.prefix_status.turns_recomputed == 0
        await branch.close()


def test_a_conversation_is_kept_forked_and_brought_back_by_the_command(
    client: Client, modeld: Callable[..., Result]
) -> None:
    def said(key: str, text: str) -> dict[str, dict[str, int]]:
        result = modeld(
            "run", MODEL, text, "--session", key, "--max-tokens", "8", "--window", "1024", "--json"
        )
        told: dict[str, dict[str, int]] = json.loads(result.stdout)
        return told

    said("res-me", "My name is Ada and I keep the lighthouse.")
    kept = json.loads(modeld("sessions", "snapshot", "res-me", "--label", "a", "--json").stdout)
    assert kept["snapshot_id"] in modeld("snapshots", "list", "--model", MODEL).stdout
    assert "hot" in modeld("sessions", "show", "res-me").stdout

    modeld("sessions", "fork", "res-me", "res-you")
    branch = said("res-you", "What is my name?")
    assert branch["suffix"]["resident"] > branch["suffix"]["prefilled"]
    assert branch["prefix"]["reused"] >= kept["tokens"] - 1

    modeld("sessions", "close", "res-me", "--discard")
    modeld("sessions", "close", "res-you", "--discard")
    modeld("sessions", "restore", "res-me", kept["snapshot_id"])
    again = said("res-me", "What is my name?")
    assert again["prefix"]["reused"] >= kept["tokens"] - 1
    modeld("snapshots", "delete", kept["snapshot_id"])


def test_a_conversation_beyond_its_window_counts_what_is_out_and_admits_it(client: Client) -> None:
    with client.open_session(
        MODEL, window=EVICTING_WINDOW, prompt_format="raw", overflow="evict"
    ) as session:
        prefix = [
            Segment(Text("A keeper's notes."), cache_class="task_pinned"),
            Segment(Text(FILLER * 30), cache_class="volatile"),
            Segment(Text(FACT), cache_class="volatile"),
            Segment(Text(FILLER * 120), cache_class="volatile"),
        ]
        told = ask(session, prefix, " The colour was", 4)
        assert told.final.parked + told.final.gone > 0
        report = session.explain()
        assert report.resident <= EVICTING_WINDOW
        assert (report.parked, report.gone) == (told.final.parked, told.final.gone)
        states = {block.state for block in report.blocks}
        assert "hot" in states
        assert states & {"parked", "gone"}
        out = sum(
            b.token_end - b.token_begin for b in report.blocks if b.state in ("parked", "gone")
        )
        assert out == report.parked + report.gone

        admitted = session.admit(query="lighthouse painted vermilion", budget=BLOCK_TOKENS)
        assert 0 < admitted.admitted <= BLOCK_TOKENS
        assert admitted.admitted == sum(r.end - r.begin for r in admitted.ranges)
        assert admitted.resident <= EVICTING_WINDOW
        after = session.explain()
        assert (after.parked, after.gone) == (admitted.parked, admitted.gone)
        (info,) = client.sessions()
        assert info.overflow.value == "OVERFLOW_EVICT"


def test_a_conversation_that_refuses_overflow_still_does(client: Client) -> None:
    with (
        client.open_session(MODEL, window=EVICTING_WINDOW, prompt_format="raw") as session,
        pytest.raises(ContextOverflow),
    ):
        session.ensure_prefix(FILLER * 150)
