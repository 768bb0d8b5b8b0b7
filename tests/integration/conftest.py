"""One real daemon with the real model, shared by the integration tests that can share it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modeld.client import Client, Session
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2 as pb
from tests.support.backends import BACKENDS, LLAMA, Backend
from tests.support.daemon import MODEL, RunningDaemon, Stubs, running_daemon
from tests.support.reference import Reference


@pytest.fixture(scope="session", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """What is promised is promised on every engine: each test runs on all of them."""
    chosen: Backend = request.param
    return chosen


@pytest.fixture(scope="session")
def served(backend: Backend, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What ``running_daemon`` needs to serve the small model by this backend."""
    if backend is LLAMA:
        return {"model": request.getfixturevalue("demo_model"), "backend": backend.name}
    return {
        "model": request.getfixturevalue("demo_model"),
        "backend": backend.name,
        "converted": request.getfixturevalue(backend.model),
    }


@pytest.fixture(scope="session")
def engine_path(backend: Backend, request: pytest.FixtureRequest) -> Path:
    """What the backend's worker loads."""
    path: Path = request.getfixturevalue(backend.model)
    return path


@pytest.fixture(scope="session")
def daemon(served: dict[str, Any]) -> Iterator[RunningDaemon]:
    with running_daemon(**served) as running:
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
def reference(backend: Backend, engine_path: Path) -> Iterator[Reference]:
    made = Reference(engine_path, backend=backend)
    yield made
    made.close()
