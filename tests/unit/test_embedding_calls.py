"""``embed`` in both clients and on the command line, against a daemon that answers by rule."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result

from modeld.cli.exit_codes import Exit
from modeld.client import AsyncClient, Client, ContextOverflow, Embedding, InvalidRequest
from modeld.shared.embedding import MAX_TEXT_BYTES, MAX_TEXTS, check_texts
from tests.support.fake_daemon import FakeDaemon

Modeld = Callable[..., Result]

pytestmark = pytest.mark.usefixtures("daemon")
VECTORS = (Embedding((2.0, 97.0), 2), Embedding((1.0, 98.0), 1))


def test_a_client_gets_a_vector_for_each_text_in_order(daemon: FakeDaemon) -> None:
    with Client.connect(daemon.world.data_root) as client:
        made = client.embed("tiny", ["ab", "b"])
        assert made.embeddings == VECTORS
        assert (made.dimensions, made.pooling, made.normalized) == (2, "mean", True)
        alone = client.embed("tiny", "ab", pooling="cls", normalize=False)
        assert alone.embeddings == VECTORS[:1]
        assert (alone.pooling, alone.normalized) == ("cls", False)
        with pytest.raises(ContextOverflow) as caught:
            client.embed("tiny", ["ok", "much too long"])
    assert caught.value.metadata["index"] == "1"


def test_the_asyncio_client_does_the_same(daemon: FakeDaemon) -> None:
    async def ask() -> Any:
        async with await AsyncClient.connect(daemon.world.data_root) as client:
            return await client.embed("tiny", ["ab", "b"], pooling="last")

    made = asyncio.run(ask())
    assert (made.embeddings, made.pooling) == (VECTORS, "last")


def test_the_command_shows_the_beginning_of_each_vector(modeld: Modeld) -> None:
    result = modeld("embed", "tiny", "ab", "b")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["2", "tokens", "+2.0000", "+97.0000"],
        ["1", "tokens", "+1.0000", "+98.0000"],
    ]
    assert "2 vectors of 2 dimensions, mean pooling" in result.stderr


def test_the_commands_json_has_whole_vectors_of_stdins_lines(modeld: Modeld) -> None:
    result = modeld("embed", "tiny", "--json", "--pooling", "cls", "--raw", stdin="ab\n\nb\n")
    assert json.loads(result.stdout) == {
        "dimensions": 2,
        "pooling": "cls",
        "normalized": False,
        "embeddings": [
            {"tokens": 2, "values": [2.0, 97.0]},
            {"tokens": 1, "values": [1.0, 98.0]},
        ],
    }


def test_the_command_has_nothing_to_embed(modeld: Modeld) -> None:
    result = modeld("embed", "tiny", stdin="\n\n")
    assert result.exit_code == Exit.USAGE
    assert "give a TEXT, or lines on stdin" in result.stderr


@pytest.mark.parametrize(
    ("texts", "field"),
    [
        ([], "texts"),
        (["a"] * (MAX_TEXTS + 1), "texts"),
        (["a", "", "b"], "texts[1]"),
        (["é" * (MAX_TEXT_BYTES // 2), "é" * (MAX_TEXT_BYTES // 2 + 1)], "texts[1]"),
    ],
)
def test_texts_beyond_the_bounds_are_refused_by_their_index(texts: list[str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_texts(texts)
    assert caught.value.metadata["field"] == field


def test_the_largest_call_is_taken() -> None:
    assert check_texts(["é" * (MAX_TEXT_BYTES // 2)] * MAX_TEXTS) == MAX_TEXT_BYTES * MAX_TEXTS
