"""Finding the daemon of a data root: four states, each failing one with its own exception."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass
from pathlib import Path

from modeld.client.errors import DiscoveryError, NotInstalled, NotRunning, Stale
from modeld.shared import lease_record
from modeld.shared.lease_record import Discovery, DiscoveryState, default_data_root

_FAILURES: dict[DiscoveryState, type[DiscoveryError]] = {
    DiscoveryState.NOT_INSTALLED: NotInstalled,
    DiscoveryState.NOT_RUNNING: NotRunning,
    DiscoveryState.STALE: Stale,
}


@dataclass(frozen=True)
class Found:
    """A running daemon: its owner id, and where it listens, best first."""

    owner_instance_id: str
    endpoints: tuple[str, ...]
    pid: int

    @property
    def endpoint(self) -> str:
        return self.endpoints[0]


def data_root_of(data_root: str | Path | None) -> Path:
    """The given data root, else MODELD_DATA_ROOT, else the platform's folder for user data."""
    return Path(data_root).expanduser().absolute() if data_root else default_data_root()


def installed() -> bool:
    """Whether a daemon could be started here: by this interpreter, or by a command on the path."""
    return importlib.util.find_spec("modeld.supervisor") is not None or bool(shutil.which("modeld"))


def look(data_root: str | Path | None = None) -> Discovery:
    """The state of a data root. Never raises."""
    return lease_record.discover(data_root_of(data_root), installed())


def discover(data_root: str | Path | None = None) -> Found:
    """The running daemon of a data root.

    Raises NotInstalled, NotRunning or Stale, each saying the remedy.
    """
    found = look(data_root)
    record = found.record
    if found.state is not DiscoveryState.RUNNING or record is None:
        raise _FAILURES.get(found.state, NotRunning)(found.detail)
    unix_first = sorted(record.endpoints, key=lambda e: not e.startswith("unix:"))
    return Found(record.instance_id, tuple(unix_first), record.pid)
