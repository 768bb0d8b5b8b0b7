"""Constraints on their way to the daemon: from both clients, from the command line, and in it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from modeld.cli.main import cli
from modeld.client import AsyncClient, Client, InvalidRequest
from modeld.client.decode_options import DecodeOptions
from modeld.supervisor.rpc.convert import decode_in
from modeld.v1 import session_pb2
from tests.support.fake_daemon import FakeDaemon

SCHEMA = {"type": "object", "properties": {"z": {"const": "é"}, "a": {"type": "integer"}}}
HELLO = {"role": "user", "content": "hello world"}


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="md") as folder, FakeDaemon(Path(folder)) as daemon:
        yield daemon


@pytest.fixture
def modeld(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MODELD_DATA_ROOT", str(daemon.world.data_root))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, arguments)

    return run


def sent(daemon: FakeDaemon) -> session_pb2.StructuredOutput:
    request: session_pb2.TurnRequest = daemon.world.requests_of(session_pb2.TurnRequest)[-1]
    return request.options.structured


# --- the clients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json_schema": '{"a": 1}'}, "json_schema", '{"a": 1}'),
        ({"json_schema": True}, "json_schema", "true"),
        ({"regex": ""}, "regex", ""),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ],
)
def test_a_constraint_reaches_the_worker_as_it_is_given(
    given: dict[str, Any], kind: str, text: str
) -> None:
    worker = decode_in(DecodeOptions(**given).to_proto())
    assert (worker.structured_kind, worker.structured) == (kind, text)


def test_a_schema_as_an_object_keeps_the_order_of_its_properties() -> None:
    text = DecodeOptions(json_schema=SCHEMA).to_proto().structured.json_schema
    assert json.loads(text) == SCHEMA
    assert text.index('"z"') < text.index('"a"')


def test_without_a_constraint_none_is_sent() -> None:
    proto = DecodeOptions(max_tokens=3).to_proto()
    assert not proto.HasField("structured")
    assert decode_in(proto).structured_kind == ""


def test_an_empty_constraint_is_refused_by_the_daemon() -> None:
    options = session_pb2.DecodeOptions(structured=session_pb2.StructuredOutput())
    with pytest.raises(InvalidRequest, match="json_schema, regex, grammar"):
        decode_in(options)


@pytest.mark.parametrize(
    "given",
    [
        {"json_schema": {}, "regex": "a"},
        {"regex": "a", "grammar": "start:"},
        {"json_schema": {"a": {1, 2}}},
        {"json_schema": {"a": "\udcff"}},
        {"json_schema": 3},
    ],
)
def test_what_cannot_be_one_constraint_is_refused_before_it_is_sent(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        DecodeOptions(**given).to_proto()


async def test_both_clients_send_the_same_constraint(daemon: FakeDaemon) -> None:
    with Client.connect(daemon.world.data_root) as client, client.open_session("tiny") as session:
        session.turn([], [HELLO], json_schema=SCHEMA).read()
    first = sent(daemon)
    async with (
        await AsyncClient.connect(daemon.world.data_root) as aio,
        await aio.open_session("tiny") as twin,
    ):
        await twin.turn([], [HELLO], json_schema=SCHEMA).read()
    assert sent(daemon) == first
    assert first.WhichOneof("constraint") == "json_schema"


# --- the command line -----------------------------------------------------------------------------


def test_the_command_line_sends_each_kind(modeld, daemon: FakeDaemon, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "answer.lark"
    schema.write_text(json.dumps(SCHEMA))
    grammar.write_text('start: "é"', encoding="utf-8")
    assert modeld("run", "tiny", "hi", "--json-schema", str(schema)).exit_code == 0
    assert json.loads(sent(daemon).json_schema) == SCHEMA
    assert modeld("run", "tiny", "hi", "--regex", "yes|no").exit_code == 0
    assert sent(daemon).regex == "yes|no"
    assert modeld("run", "tiny", "hi", "--grammar", str(grammar)).exit_code == 0
    assert sent(daemon).grammar == 'start: "é"'
    assert modeld("run", "tiny", "hi").exit_code == 0
    assert sent(daemon).WhichOneof("constraint") is None


def test_two_constraints_or_a_missing_file_are_usage_errors(modeld, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text("{}")
    both = modeld("run", "tiny", "hi", "--regex", "a", "--json-schema", str(schema))
    assert both.exit_code == 2
    assert "can't be used together" in both.output
    assert modeld("run", "tiny", "hi", "--grammar", str(tmp_path / "none")).exit_code == 2
