"""A real daemon in a process of its own, for tests through the whole product.

Starts `modeld serve` on a short data root, finds it as a client would, and proves at the end that
neither the daemon nor its workers are left.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil

from modeld.client import Client, DiscoveryError
from modeld.client.errors import ConnectionLost, from_rpc_error
from modeld.v1 import daemon_pb2_grpc, model_pb2_grpc, session_pb2_grpc
from tests.support.backends import share_conversion

REPOSITORY = Path(__file__).parents[2]
START_LIMIT_S = 120.0
STOP_LIMIT_S = 60.0
LOG_TAIL = 20_000  # characters that a failing test shows
MODEL = "smol"

# What the tests' daemons run with. Two engine threads: as many as a small machine has.
SETTINGS: Mapping[str, object] = {"threads": 2, "idle_release_s": 0, "floor_window": 1024}


class RunningDaemon:
    """One daemon process and its data root."""

    program: tuple[str, ...] = ("-m", "modeld")

    def __init__(self, data_root: Path, settings: Mapping[str, object]) -> None:
        self.data_root = data_root
        flags = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in {**SETTINGS, **settings}.items()
        ]
        self.log_path = data_root / "daemon.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.program, "--data-root", str(data_root), "serve", *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
            )
        self.endpoint = f"unix:{data_root}/modeld.sock"
        self._workers: list[psutil.Process] = []

    def client(self) -> Client:
        """A connection of its own, once the daemon serves."""
        limit = time.monotonic() + START_LIMIT_S
        while True:
            try:
                return Client.connect(self.data_root)
            except (DiscoveryError, ConnectionLost):
                if self.process.poll() is not None or time.monotonic() > limit:
                    raise AssertionError(f"the daemon didn't start:\n{self.log()}") from None
                time.sleep(0.05)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """End it as an operator would; the exit code. Nothing of it may be left."""
        if self.process.poll() is None:
            self._workers = self.workers()
            self.process.send_signal(signal.SIGTERM)
        code = self.wait()
        _, alive = psutil.wait_procs(self._workers, timeout=10)
        assert not alive, f"workers outlived their daemon: {alive}"
        return code

    def wait(self) -> int:
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the daemon didn't stop:\n{self.log()}") from None


@contextmanager
def running_daemon(
    model: Path | None = None,
    *,
    backend: str = "llama",
    converted: Path | None = None,
    **settings: object,
) -> Iterator[RunningDaemon]:
    """A daemon of its own; with ``model`` in its store, for ``backend``, under the name ``MODEL``.

    ``converted`` is a folder that the same model was converted to already. The data root is short:
    a unix socket's path has about a hundred bytes.
    """
    data_root = Path(tempfile.mkdtemp(prefix="md-"))
    daemon = RunningDaemon(data_root, {"backends": backend, **settings})
    try:
        with daemon.client() as client:
            if model is not None:
                client.import_model(model, name=MODEL, model_type=backend)
            if converted is not None:  # what no model of the store is made of is swept at start
                share_conversion(converted, data_root)
        yield daemon
    except BaseException:
        print(f"the daemon's log ends:\n{daemon.log()[-LOG_TAIL:]}", file=sys.stderr)
        raise
    finally:
        code = daemon.stop()
        log = daemon.log()
        shutil.rmtree(data_root, ignore_errors=True)
    assert code == 0, log
    # Whatever a test did, it must not have shown the daemon something it had no answer for.
    assert "Traceback" not in log, log


class Stubs:
    """Raw stubs over a channel of their own: for what the client library would never send."""

    def __init__(self, daemon: RunningDaemon, owner: str) -> None:
        self.owner = owner
        self.channel = grpc.insecure_channel(
            daemon.endpoint, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self.sessions: Any = session_pb2_grpc.SessionServiceStub(self.channel)
        self.models: Any = model_pb2_grpc.ModelServiceStub(self.channel)
        self.daemon: Any = daemon_pb2_grpc.DaemonServiceStub(self.channel)

    def metadata(self, owner: str | None = None) -> tuple[tuple[str, str], ...]:
        return (("modeld-owner", self.owner if owner is None else owner),)

    def unary(self, method: Any, request: Any, *, timeout_s: float = 60.0) -> Any:
        """Raises what the client library would."""
        with typed():
            return method(request, metadata=self.metadata(), timeout=timeout_s)

    def stream(self, method: Any, request: Any, *, timeout_s: float = 120.0) -> list[Any]:
        with typed():
            return list(method(request, metadata=self.metadata(), timeout=timeout_s))

    def close(self) -> None:
        self.channel.close()


@contextmanager
def typed() -> Iterator[None]:
    """A raw call's failure as the typed error that it carries."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


class Background:
    """A call that runs in a thread while the test does something else."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def result(self, limit_s: float = 120.0) -> Any:
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), "the call never ended"
        if self._error is not None:
            raise self._error
        return self._result


def eventually(condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """The first true answer of ``condition``; fails the test if there is none for very long."""
    limit = time.monotonic() + limit_s
    while not (answer := condition()):
        assert time.monotonic() < limit, "what was waited for never came"
        time.sleep(0.02)
    return answer
