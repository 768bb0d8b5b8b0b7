"""The table of settings: names, types, defaults, ranges, and how a value is read from its text.

Command-line options and the reference of settings are generated from ``SETTINGS``. Where a value
comes from, and which of them go together, is ``config``'s.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modeld.shared.errors import InvalidRequest
from modeld.shared.planner import openvino_kv
from modeld.shared.planner.placement import MAX_CONTEXT_TOKENS
from modeld.shared.planner.windows import LEAST_SHARE, MAX_SESSIONS, MOST_SHARE, is_share

ENV_PREFIX = "MODELD_"
KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
MIB = 1024 * 1024
GIB = 1024 * MIB
EIB = 1 << 60  # more than any machine's memory, and sums of such sizes still fit 63 bits
MAX_SIZE_LETTERS = 40
MAX_OPEN_SESSIONS = 16_384
MAX_SHOWN = 200  # letters of a bad value in a message
UNQUANTISED = ("f16", "bf16", "f32")
BACKENDS = ("llama", "openvino")


class ConfigError(InvalidRequest):
    """A setting that can't be used: where it stands, what it is, and what is allowed."""


@dataclass(frozen=True)
class Setting:
    """One row. ``kind`` is text, name, int, seconds, size, bool, choice, list (of choices), names
    (any), shares (numbers) or path; ``minimum`` and ``maximum`` are inclusive; ``zero`` says what
    0 means where it is outside the range, ``why`` what rules other choices out."""

    name: str
    kind: str
    default: Any
    help: str
    minimum: float = 0
    maximum: float = math.inf
    zero: str = ""
    choices: tuple[str, ...] = ()
    why: str = ""

    @property
    def env(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def allowed(self) -> str:
        """What may be given, in words."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices) + (f" ({self.why})" if self.why else "")
        if self.kind == "list":
            return "a list of " + ", ".join(self.choices)
        if self.kind == "bool":
            return "true or false"
        if self.kind == "path":
            return "the path of a file that can be read, or nothing"
        if self.kind == "name":
            return "a name of at most 64 letters, digits, '.', '_' and '-'"
        if self.kind == "text":
            return "host:port, or nothing for a unix socket in the data root"
        what = {
            "int": "a whole number",
            "names": "a list of names, none twice",
            "shares": f"a list of numbers, each 0 or from {LEAST_SHARE:f} to {MOST_SHARE:.0f}, "
            "not all 0",
            "seconds": "a number of seconds",
            "size": "a size in bytes, or like '512MiB' (KiB, MiB, GiB, TiB, KB, MB, GB, TB)",
        }[self.kind]
        if self.kind in ("names", "shares"):
            return what
        low, high = self._shown(self.minimum), self._shown(self.maximum)
        span = f" from {low} to {high}" if self.maximum < math.inf else f" of at least {low}"
        return f"{what}{span}" + (f", or 0 ({self.zero})" if self.zero and self.minimum > 0 else "")

    def _shown(self, bound: float) -> str:
        if self.kind == "size" and bound < math.inf:
            return size_text(int(bound))
        return str(int(bound)) if self.kind == "int" else f"{bound:g}"


SETTINGS: tuple[Setting, ...] = (
    Setting("listen", "text", "", "where to listen; beyond loopback only with TLS"),
    Setting("tls_cert", "path", "", "the server's certificate chain (PEM)"),
    Setting("tls_key", "path", "", "the server's private key (PEM)"),
    Setting("tls_client_ca", "path", "", "whose client certificates are let in (PEM)"),
    Setting(
        "backends", "list", ("llama",), "engines to serve, each in a process of its own",
        choices=BACKENDS,
    ),
    Setting(
        "idle_release_s", "seconds", 300.0,
        "free the model's memory after this long without work; 0: never",
    ),
    Setting(
        "session_ttl_s", "seconds", 600.0, "close a detached session without a key after this long"
    ),
    Setting(
        "turn_idle_s", "seconds", 5.0,
        "how long the slot is kept between the calls of one turn", maximum=600,
    ),
    Setting("queue_limit", "int", 64, "calls that may wait for a slot", 1, 100_000),
    Setting(
        "max_sessions", "int", 8, "sessions that hold a context at once on a slot", 1, MAX_SESSIONS
    ),
    Setting(
        "batch_streams", "int", 4,
        "sessions of the batched layout that share a context, whose turns run together", 1, 64,
    ),
    Setting(
        "max_open_sessions", "int", 64, "sessions open at once on a slot, parked ones included",
        1, MAX_OPEN_SESSIONS,
    ),
    Setting(
        "max_window", "int", 0, "most tokens a session's window may have; 0: no limit",
        256, MAX_CONTEXT_TOKENS, zero="no limit",
    ),
    Setting(
        "floor_window", "int", 4096, "least tokens of an automatic window", 256, MAX_CONTEXT_TOKENS
    ),
    Setting(
        "sessions_share", "int", 4, "sessions for which an automatic window leaves room",
        1, MAX_SESSIONS,
    ),
    Setting(
        "reserve_bytes", "size", 0,
        "memory left to the rest of the machine; 0: the default for it", maximum=EIB,
    ),
    Setting(
        "user_limit_bytes", "size", 0, "most memory that modeld may plan with; 0: no limit",
        maximum=EIB,
    ),
    Setting(
        "cold_ram_bytes", "size", GIB,
        "most host memory for parked KV, where it is free; 0: none", maximum=EIB,
    ),
    Setting(
        "cold_disk_bytes", "size", 0, "most disk for parked KV; 0: none", maximum=EIB
    ),
    Setting(
        "snapshot_quota_bytes", "size", 16 * GIB,
        "most disk for snapshots and durable sessions together; 0: no limit", maximum=EIB,
    ),
    Setting(
        "snapshot_max_age_s", "seconds", 0.0,
        "remove snapshots and saved sessions not used for this long; 0: never",
    ),
    Setting(
        "k_type", "choice", "f16", "KV cache type of a llama model's keys", choices=KV_TYPES
    ),
    Setting(
        "v_type", "choice", "f16", "KV cache type of a llama model's values", choices=UNQUANTISED,
        why="quantised values need flash attention, which is off; keys can be quantised",
    ),
    Setting(
        "openvino_kv_type", "choice", "f16",
        "KV cache type of an openvino model's keys and values", choices=openvino_kv.TYPES,
    ),
    Setting(
        "openvino_device", "name", "CPU",
        "device that openvino models run on, as OpenVINO names it",
    ),
    Setting(
        "placement", "choice", "refuse",
        "when a model doesn't fit the accelerators whole: refuse it, or shed layers to the host",
        choices=("refuse", "shed"),
    ),
    Setting(
        "gpu_layers", "int", -1,
        "layers on accelerators, the output counted as one; -1: as many as planned; 0: none",
        -1, 10_000,
    ),
    Setting(
        "devices", "names", (),
        "accelerators to use, as the engine names them; empty: all, 'none': none",
    ),
    Setting(
        "tensor_split", "shares", (), "shares of the layers for each device; empty: planned"
    ),
    Setting(
        "device_reserve_bytes", "size", 0,
        "memory left free on each accelerator; 0: the default for it", maximum=EIB,
    ),
    Setting(
        "device_limit_bytes", "size", 0,
        "most memory to plan with on each accelerator; 0: no limit", maximum=EIB,
    ),
    Setting("n_batch", "int", 512, "tokens in a decode call", 1, 65536),
    Setting("n_ubatch", "int", 512, "tokens between checks for a cancel", 1, 65536),
    Setting("threads", "int", 0, "engine threads; 0: what is free", 0, 1024),
    Setting("drain_grace_s", "seconds", 30.0, "time that running calls get to finish at a drain"),
    Setting(
        "stall_limit_s", "seconds", 30.0,
        "stop a stream whose reader took nothing, or an import that brought nothing, for this long",
        0.1,
    ),
    Setting("max_message_bytes", "size", 64 * MIB, "largest gRPC message", 64 * 1024, 2 * GIB - 1),
    Setting("max_prompt_bytes", "size", 32 * MIB, "largest prompt, all its segments", 1024, GIB),
    Setting(
        "heartbeat_limit_s", "seconds", 10.0,
        "a worker silent for this long, beyond its declared gaps, is ended", 0.5, 3600,
    ),
    Setting(
        "lease_ttl_s", "seconds", 15.0, "how long the lease holds without a renewal", 3, 3600
    ),
    Setting(
        "log_level", "choice", "info", "how much to log",
        choices=("debug", "info", "warning", "error"),
    ),
    Setting("log_prompts", "bool", False, "let logs hold prompt text"),
)  # fmt: skip
BY_NAME: Mapping[str, Setting] = {setting.name: setting for setting in SETTINGS}


def unknown_setting(name: str, where: str) -> ConfigError:
    near = difflib.get_close_matches(name, BY_NAME, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else f" Settings are: {', '.join(BY_NAME)}."
    return ConfigError(
        f"{where}: there is no setting {name[:80]!r}.{hint}",
        metadata={"source": where, "field": name},
    )


def _bad(setting: Setting, value: object, where: str, detail: str = "") -> ConfigError:
    shown = _shown_value(value)
    text = f"{where}: {setting.name} = {shown} is not valid: allowed is {setting.allowed}."
    return ConfigError(
        f"{text} {detail}".strip(),
        metadata={
            "source": where,
            "field": setting.name,
            "value": shown if len(shown) >= MAX_SHOWN else value,
            "allowed": setting.allowed,
        },
    )


def _shown_value(value: object) -> str:
    try:
        return repr(value)[:MAX_SHOWN]
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number that is too long to be written".ljust(MAX_SHOWN)


# --- values ----------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtpe", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}


def parse_size(text: str) -> int | None:
    """Bytes of '512MiB', '1.5 GiB', '2GB' or '1048576'; None if it is none of these."""
    text = text.strip()
    match = _SIZE.fullmatch(text) if len(text) <= MAX_SIZE_LETTERS else None
    if match is None or match[2].lower() not in _UNITS:
        return None
    unit: int = _UNITS[match[2].lower()]
    return int(match[1]) * unit if match[1].isdigit() else round(float(match[1]) * unit)


def size_text(size_bytes: int) -> str:
    """The shortest exact form: 67108864 is '64MiB'."""
    for unit, factor in (("EiB", EIB), ("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def parse_value(setting: Setting, value: object, where: str) -> Any:
    """A value of the setting's type from a typed one or its text. Raises ConfigError."""
    if setting.kind in ("int", "seconds", "size"):
        return _number(setting, value, where)
    if setting.kind == "bool":
        plain = value.strip().lower() if isinstance(value, str) else value
        if plain is True or plain in ("true", "yes", "on", "1"):
            return True
        if plain is False or plain in ("false", "no", "off", "0"):
            return False
        raise _bad(setting, value, where)
    if setting.kind in ("list", "names"):
        return _names(setting, value, where)
    if setting.kind == "shares":
        return _shares(setting, value, where)
    if not isinstance(value, str | Path):
        raise _bad(setting, value, where, f"It is of type {type(value).__name__}.")
    text = str(value).strip()
    if setting.kind == "choice":
        text = text.lower()
        if text not in setting.choices:
            raise _bad(setting, value, where)
    elif setting.kind == "path":
        return _path(setting, text, where)
    elif setting.kind == "name":
        if not _NAME.fullmatch(text):
            raise _bad(setting, value, where)
    elif text and split_address(text) is None:
        raise _bad(setting, value, where)
    return text


def _number(setting: Setting, value: object, where: str) -> int | float:
    number: int | float | None = None
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        if setting.kind == "size":
            number = parse_size(text)
        else:
            try:
                number = int(text) if setting.kind == "int" else float(text)
            except ValueError:
                number = None
    elif not isinstance(value, bool) and isinstance(value, int | float):
        number = value if isinstance(value, int) or setting.kind == "seconds" else None
    if number is None or (isinstance(number, float) and not math.isfinite(number)):
        raise _bad(setting, value, where)
    if not setting.minimum <= number <= setting.maximum and not (setting.zero and number == 0):
        raise _bad(setting, value, where, "It is out of range.")
    try:
        return float(number) if setting.kind == "seconds" else int(number)
    except OverflowError:
        raise _bad(setting, value, where, "It is out of range.") from None


def _names(setting: Setting, value: object, where: str) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise _bad(setting, value, where)
    names = tuple(dict.fromkeys(part.strip() for part in parts))
    if setting.kind == "names":
        return tuple(name for name in names if name)
    if not names or not set(names) <= set(setting.choices):
        raise _bad(setting, value, where)
    return names


def _shares(setting: Setting, value: object, where: str) -> tuple[float, ...]:
    parts = [p for p in value.split(",") if p.strip()] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise _bad(setting, value, where)
    try:
        shares = tuple(float(part) for part in parts if not isinstance(part, bool))
    except (TypeError, ValueError, OverflowError):
        raise _bad(setting, value, where) from None
    if len(shares) != len(parts) or not all(is_share(share) for share in shares):
        raise _bad(setting, value, where)
    if shares and not any(shares):
        raise _bad(setting, value, where)
    return shares


def _path(setting: Setting, text: str, where: str) -> str:
    if not text:
        return ""
    path = Path(text).expanduser().absolute()
    if not path.is_file():
        raise _bad(setting, text, where, "There is no such file.")
    if not os.access(path, os.R_OK):
        raise _bad(setting, text, where, "It can't be read; check its permissions.")
    return str(path)


def split_address(text: str) -> tuple[str, int] | None:
    """(host, port) of 'host:port' or '[v6]:port'; None if it isn't one."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        return None
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Only addresses, and ``localhost``: a name could resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
