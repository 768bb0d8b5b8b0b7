"""How a worker comes to be: the protocol that local processes and remote hosts share.

A launcher spawns; what it answers has exactly the verbs of a process. It knows nothing of the
protocol spoken with the worker, nor of when to restart it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from modeld.supervisor.process import LOG_MAX_BYTES, BoundedLog, Handle, Process, record_dir_of

# Threads that spin for long take shared cores from others. But one that sleeps at each of an
# evaluation's hundreds of barriers wakes late, so they spin for some 50 us first.
OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


@dataclass(frozen=True, slots=True)
class SpawnSpec:
    """What a worker must be told to find and convince its supervisor."""

    backend: str
    endpoint: str
    epoch: bytes
    owner_id: str
    heartbeat_interval_s: float


class Launcher(Protocol):
    async def spawn(self, spec: SpawnSpec) -> Handle:
        """Raises OSError if nothing could be started."""


class LocalLauncher:
    """Runs ``python -m <module>`` here; logs to ``<data_root>/logs/worker-<backend>.log``."""

    def __init__(
        self,
        module: str,
        data_root: Path,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        log_max_bytes: int = LOG_MAX_BYTES,
    ) -> None:
        """``env`` is added to the supervisor's own; it may be changed between spawns."""
        self.module = module
        self.data_root = data_root
        self.env: dict[str, str] = dict(env or {})
        self.python = python
        self.log_max_bytes = log_max_bytes

    async def spawn(self, spec: SpawnSpec) -> Process:
        worker_log = BoundedLog(
            self.data_root / "logs" / f"worker-{spec.backend}.log", self.log_max_bytes
        )
        # -P: a file named like a module of ours in the current folder must not be run instead.
        command = [self.python, "-P", "-m", self.module]
        return Process(command, self._environment(spec), worker_log, record_dir_of(self.data_root))

    def _environment(self, spec: SpawnSpec) -> dict[str, str]:
        env = {**os.environ, **self.env}
        if "OMP_WAIT_POLICY" not in env:  # a user's own setting stands
            env = {**OPENMP, **env}
        env.update(
            GGML_NO_BACKTRACE="1",  # else an abort starts a debugger first
            PYTHONUNBUFFERED="1",
            MODELD_WORKER_ENDPOINT=spec.endpoint,
            MODELD_WORKER_EPOCH=spec.epoch.hex(),
            MODELD_WORKER_OWNER=spec.owner_id,
            MODELD_WORKER_SUPERVISOR_PID=str(os.getpid()),
            MODELD_WORKER_HEARTBEAT_S=repr(spec.heartbeat_interval_s),
        )
        return env
