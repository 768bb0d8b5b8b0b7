"""One real daemon with the real model, shared by the integration tests that can share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modeld.client import Client, Session
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2 as pb
from tests.support.daemon import MODEL, RunningDaemon, Stubs, running_daemon
from tests.support.reference import Reference


@pytest.fixture(scope="session")
def daemon(demo_model: Path) -> Iterator[RunningDaemon]:
    with running_daemon(demo_model) as running:
        yield running


@pytest.fixture(scope="session")
def client(daemon: RunningDaemon) -> Iterator[Client]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture(autouse=True)
def _nothing_left_open(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test begins without open sessions; what is cached of earlier ones is discarded."""
    if "client" not in request.fixturenames:
        yield
        return
    connected: Client = request.getfixturevalue("client")
    stubs: Stubs = request.getfixturevalue("stubs")
    yield
    for info in connected.sessions():
        handle = common.SessionHandle(
            session_id=info.session.session_id, generation=info.session.generation
        )
        stubs.unary(
            stubs.sessions.CloseSession, pb.CloseSessionRequest(session=handle, discard=True)
        )


@pytest.fixture(scope="session")
def stubs(daemon: RunningDaemon, client: Client) -> Iterator[Stubs]:
    made = Stubs(daemon, client.owner_instance_id)
    yield made
    made.close()


@pytest.fixture
def chat(client: Client) -> Session:
    """A fresh chat session with a window of 1,024 tokens."""
    return client.open_session(MODEL, window=1024)


@pytest.fixture
def raw(client: Client) -> Session:
    """A fresh raw session with a window of 1,024 tokens."""
    return client.open_session(MODEL, window=1024, prompt_format="raw")


@pytest.fixture(scope="session")
def reference(demo_model: Path) -> Iterator[Reference]:
    made = Reference(demo_model)
    yield made
    made.close()
