"""A daemon on a data root of its own, as a process: started, found, stopped.

``python -m bench.daemon ROOT MODULE`` serves with another worker module than the product's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from modeld.client import Client, ClientError, Deadlines
from modeld.supervisor.launcher import OPENMP

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = "bench"
START_S = 60.0
STOP_S = 20.0


class DaemonFailed(Exception):
    """The daemon didn't come up; the message holds the end of its log."""


def clean_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without the user's settings of modeld."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("MODELD_")}
    return {**env, **OPENMP, **(given or {})}  # as workers are started


class Daemon:
    """A started daemon. ``module`` None: the product as ``modeld serve`` runs it."""

    def __init__(
        self,
        root: Path,
        settings: Mapping[str, object],
        *,
        module: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """``settings`` are modeld's own, by name. Raises DaemonFailed."""
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        given = {f"MODELD_{name.upper()}": str(value) for name, value in settings.items()}
        own = ["modeld", "serve", "--data-root", str(root)]
        command = own if module is None else ["bench.daemon", str(root), module]
        self._log = root / "bench-daemon.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env=clean_environment({**given, **(env or {})}),
                start_new_session=True,
            )
        try:
            self.client = self._connect()
        except BaseException:
            self._end_process()
            raise

    def _connect(self) -> Client:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            try:
                return Client.connect(self.root, deadlines=Deadlines(turn_s=600.0, prefill_s=600.0))
            except ClientError:
                time.sleep(0.02)
        tail = self._log.read_text(errors="replace")[-2000:]
        raise DaemonFailed(f"the daemon on {self.root} didn't start:\n{tail}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> float:
        """Processor seconds that the supervisor has used, its threads included."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def worker_pid(self) -> int:
        return self.client.status().slots[0].worker.pid

    def import_model(self, path: Path, model_type: str = "") -> None:
        """Into the store as ``MODEL``, unless it is there."""
        if MODEL not in {model.name for model in self.client.models()}:
            self.client.import_model(path, name=MODEL, model_type=model_type)

    def stop(self) -> None:
        self.client.close()
        self._end_process()

    def _end_process(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> int:
    from modeld.supervisor.config import load_config
    from modeld.supervisor.daemon import Daemon as Served

    root, module = sys.argv[1:]
    logging.basicConfig(level="INFO")
    config = load_config({}, dict(os.environ), Path(root))
    return asyncio.run(Served(config, {"llama": module}).run())


if __name__ == "__main__":
    sys.exit(main())
