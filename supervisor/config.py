"""The daemon's configuration: one value made of flags, environment, file and defaults.

Owns precedence, where a value came from, and checks over several settings; knows nothing of what
a setting does. The settings themselves stand in ``settings``.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modeld.shared.capacity import CapacityPolicy, Placement
from modeld.shared.lease_record import default_data_root
from modeld.supervisor.settings import (
    BY_NAME,
    ENV_PREFIX,
    SETTINGS,
    ConfigError,
    is_loopback,
    parse_value,
    split_address,
    unknown_setting,
)

__all__ = ["SETTINGS", "Config", "ConfigError", "load_config", "split_address"]

log = logging.getLogger(__name__)

FILE_NAME = "modeld.toml"
SOCKET_NAME = "modeld.sock"
NO_DEVICES = ("none",)
# What a plan depends on, and may be asked about as if it were otherwise.
PLANNED = (
    "max_sessions",
    "max_window",
    "floor_window",
    "sessions_share",
    "reserve_bytes",
    "user_limit_bytes",
    "cold_ram_bytes",
    "batch_streams",
    "k_type",
    "v_type",
    "openvino_kv_type",
    "openvino_device",
    "placement",
    "gpu_layers",
    "devices",
    "tensor_split",
    "device_reserve_bytes",
    "device_limit_bytes",
    "n_batch",
    "n_ubatch",
)
GIVES_WAY = (  # (the smaller, the larger)
    ("floor_window", "max_window"),
    ("n_ubatch", "n_batch"),
    ("max_sessions", "max_open_sessions"),
)
MAX_SOCKET_PATH_BYTES = 107  # the system's limit for a unix socket's path


@dataclass(frozen=True)
class Config:
    """Every setting, checked. Names and units are those of ``SETTINGS``."""

    data_root: Path
    listen: str
    tls_cert: str
    tls_key: str
    tls_client_ca: str
    backends: tuple[str, ...]
    idle_release_s: float
    session_ttl_s: float
    turn_idle_s: float
    queue_limit: int
    max_sessions: int
    batch_streams: int
    max_open_sessions: int
    max_window: int
    floor_window: int
    sessions_share: int
    reserve_bytes: int
    user_limit_bytes: int
    cold_ram_bytes: int
    cold_disk_bytes: int
    snapshot_quota_bytes: int
    snapshot_max_age_s: float
    k_type: str
    v_type: str
    openvino_kv_type: str
    openvino_device: str
    placement: str
    gpu_layers: int
    devices: tuple[str, ...]
    tensor_split: tuple[float, ...]
    device_reserve_bytes: int
    device_limit_bytes: int
    n_batch: int
    n_ubatch: int
    threads: int
    drain_grace_s: float
    stall_limit_s: float
    max_message_bytes: int
    max_prompt_bytes: int
    heartbeat_limit_s: float
    lease_ttl_s: float
    log_level: str
    log_prompts: bool
    sources: tuple[tuple[str, str], ...] = ()  # (setting, where it came from), defaults left out

    @property
    def socket_path(self) -> Path:
        """In the data root, or, where that path is too long for a socket, in a short folder of
        this user's that is named after the data root."""
        path = self.data_root / SOCKET_NAME
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        name = hashlib.sha256(os.fsencode(self.data_root)).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"modeld-{os.getuid()}-{name}" / SOCKET_NAME

    @property
    def tls(self) -> bool:
        return bool(self.tls_cert)

    def capacity_policy(self) -> CapacityPolicy:
        """What the planner takes of it."""
        return CapacityPolicy(
            reserve_bytes=self.reserve_bytes,
            user_limit_bytes=self.user_limit_bytes,
            max_window=self.max_window,
            floor_window=self.floor_window,
            sessions_share=self.sessions_share,
            max_sessions=self.max_sessions,
            cold_budget_bytes=self.cold_ram_bytes,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            placement=Placement(self.placement),
            gpu_layers=0 if self.devices == NO_DEVICES else self.gpu_layers,
            tensor_split=self.tensor_split,
            device_reserve_bytes=self.device_reserve_bytes,
            device_limit_bytes=self.device_limit_bytes,
            devices=() if self.devices == NO_DEVICES else self.devices,
        )

    @property
    def parks(self) -> bool:
        """Whether there is anywhere to keep a parked session's KV."""
        return bool(self.cold_ram_bytes or self.cold_disk_bytes)

    def kv_types(self, backend: str, k_type: str = "", v_type: str = "") -> tuple[str, str]:
        """The KV types of a backend's model, "" being the settings'. Of an openvino model's, one
        stands for both.
        """
        if backend == "openvino":
            k_type = k_type or v_type or self.openvino_kv_type
            return k_type, v_type or k_type
        return k_type or self.k_type, v_type or self.v_type

    def streams(self, layout: str) -> int:
        """Of the context that a session of that layout gets; 0: it is the session's own."""
        return self.batch_streams if layout == "batched" else 0

    def with_settings(self, changes: Mapping[str, str], where: str) -> Config:
        """The same with some settings of the planner as if they were these texts.

        Raises ConfigError for one that can't be, or that a plan doesn't depend on.
        """
        values: dict[str, Any] = {}
        for name, text in changes.items():
            if name not in PLANNED:
                raise ConfigError(
                    f"{where}: {name[:80]!r} is no setting that a plan depends on. "
                    f"Those are: {', '.join(PLANNED)}.",
                    metadata={"source": where, "field": name[:80]},
                )
            values[name] = parse_value(BY_NAME[name], text, where)
        sources = dict(self.sources) | dict.fromkeys(values, where)
        given = {setting.name: getattr(self, setting.name) for setting in SETTINGS} | values
        for name, bound in GIVES_WAY:
            if name not in sources and bound in values:
                given[name] = BY_NAME[name].default
        _give_way(given, sources)
        config = replace(self, **given, sources=tuple(sorted(sources.items())))
        _check_together(config, sources)
        return config


def load_config(
    flags: Mapping[str, object], env: Mapping[str, str], data_root: Path | None = None
) -> Config:
    """Flags (None: not given) over environment over ``<data_root>/modeld.toml`` over defaults.

    The data root is ``data_root``, else the flag, else MODELD_DATA_ROOT, else the platform's
    folder. Raises ConfigError naming the flag, the variable, or the file with its line.
    """
    given = dict(flags)
    flagged_root = given.pop("data_root", None)
    if data_root is None:
        data_root = Path(str(flagged_root)) if flagged_root else default_data_root(env)
    data_root = data_root.expanduser().absolute()
    values: dict[str, Any] = {setting.name: setting.default for setting in SETTINGS}
    sources: dict[str, str] = {}

    def take(name: str, value: object, where: str) -> None:
        values[name] = parse_value(BY_NAME[name], value, where)
        sources[name] = where

    for name, value, where in _from_file(data_root / FILE_NAME):
        take(name, value, where)
    for name, value, where in _from_env(env):
        take(name, value, where)
    for name, value in given.items():
        if value is None:
            continue
        if name not in BY_NAME:
            raise unknown_setting(name, f"flag --{name.replace('_', '-')}")
        take(name, value, f"flag {BY_NAME[name].flag}")
    _give_way(values, sources)
    config = Config(data_root=data_root, **values, sources=tuple(sorted(sources.items())))
    _check_together(config, sources)
    return config


def _give_way(values: dict[str, Any], sources: Mapping[str, str]) -> None:
    """A default gives way where it would contradict what was asked for."""
    if "max_open_sessions" not in sources:
        values["max_open_sessions"] = max(values["max_open_sessions"], values["max_sessions"])
    for name, bound in GIVES_WAY:
        if name not in sources and values[bound]:
            values[name] = min(values[name], values[bound])


# --- sources ---------------------------------------------------------------------------------


def _from_file(path: Path) -> list[tuple[str, object, str]]:
    try:
        text = path.read_bytes().decode()
        table = tomllib.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text.") from None
    except ValueError as error:  # TOMLDecodeError, or a number of more than 4,300 digits
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    found = []
    for name, value in table.items():
        where = f"{path}, line {find_line(text, name)}"
        if name not in BY_NAME:
            raise unknown_setting(name, where)
        found.append((name, value, where))
    return found


def find_line(text: str, key: str) -> int:
    """The line (from 1) on which a top-level key or table of a valid TOML text begins.

    The parser tells no lines, but what stands before the right one parses without the key.
    """
    lines = text.splitlines()
    begins = re.compile(rf"""^\s*\[{{0,2}}\s*["']?{re.escape(key)}["']?\s*[\].=]""")
    for index, line in enumerate(lines):
        if not begins.match(line):
            continue
        try:
            before = tomllib.loads("\n".join(lines[:index]))
        except tomllib.TOMLDecodeError:
            continue  # inside a multi-line value
        if key not in before:
            return index + 1
    return 1


def _from_env(env: Mapping[str, str]) -> list[tuple[str, object, str]]:
    known = {setting.env: setting.name for setting in SETTINGS}
    for variable in env:
        if variable.startswith(ENV_PREFIX) and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.85)
            if near:
                log.warning("the variable %s is no setting; did you mean %s?", variable, near[0])
    return [
        (name, env[variable], f"variable {variable}")
        for variable, name in known.items()
        if variable in env
    ]


# --- checks over several settings ------------------------------------------------------------


def _check_together(config: Config, sources: Mapping[str, str]) -> None:
    def refuse(name: str, detail: str) -> ConfigError:
        where = sources.get(name, "default")
        value = getattr(config, name)
        return ConfigError(
            f"{where}: {name} = {value!r} can't be used: {detail}",
            metadata={"source": where, "field": name, "value": value},
        )

    if bool(config.tls_cert) != bool(config.tls_key):
        given = "tls_cert" if config.tls_cert else "tls_key"
        raise refuse(given, "tls_cert and tls_key are given together or not at all.")
    if config.tls_client_ca and not config.tls_cert:
        raise refuse("tls_client_ca", "it needs tls_cert and tls_key.")
    address = split_address(config.listen)
    if config.tls_cert and address is None:
        raise refuse("tls_cert", "a unix socket has no TLS; set listen to host:port.")
    if address is not None and not is_loopback(address[0]) and not config.tls_client_ca:
        raise refuse(
            "listen",
            f"{address[0]} is reachable from other machines, which needs TLS with client "
            "certificates. Set tls_cert, tls_key and tls_client_ca, or listen on 127.0.0.1.",
        )
    if config.max_window and config.floor_window > config.max_window:
        raise refuse(
            "floor_window",
            f"floor_window ({config.floor_window}) is more than max_window ({config.max_window}).",
        )
    if config.max_sessions > config.max_open_sessions:
        raise refuse(
            "max_open_sessions",
            f"it is less than max_sessions ({config.max_sessions}), and every session that holds "
            "a context is open.",
        )
    if config.n_ubatch > config.n_batch:
        raise refuse(
            "n_ubatch", f"n_ubatch ({config.n_ubatch}) is more than n_batch ({config.n_batch})."
        )
