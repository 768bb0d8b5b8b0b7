"""What unit tests of the client and the command share: a fake daemon on a data root of its own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from modeld.cli.main import cli
from modeld.client import AsyncClient, Client
from tests.support.both_clients import done
from tests.support.fake_daemon import FakeDaemon


@pytest.fixture
def root() -> Iterator[Path]:
    """A data root whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="md") as folder:
        yield Path(folder)


@pytest.fixture
def daemon(root: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(root) as daemon:
        yield daemon


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "asyncio"])
async def client(request: pytest.FixtureRequest, daemon: FakeDaemon) -> AsyncIterator[Any]:
    """Both clients keep the same promises; their calls are awaited where there is something to."""
    connected = await done(request.param.connect(daemon.world.data_root))
    yield connected
    await done(connected.close())


@pytest.fixture
def modeld(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command in this process on the test's data root."""
    monkeypatch.setenv("MODELD_DATA_ROOT", str(root))

    def run(
        *arguments: str | Path, stdin: str | bytes | None = None, charset: str = "utf-8"
    ) -> Result:
        given = [str(one) for one in arguments]
        result = CliRunner(charset=charset).invoke(cli, given, input=stdin)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
