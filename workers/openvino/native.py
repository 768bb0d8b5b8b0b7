"""The OpenVINO library itself: environment, the one Core, build identity, a failure's own words.

Imported before anything else of OpenVINO, so that what must be set before the library loads is
set. Knows no model and no session.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Nothing of a user's machine leaves it, whatever the library's own settings say.
os.environ.setdefault("OPENVINO_TELEMETRY_OPT_OUT", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import openvino
import openvino.opset13

from modeld.shared.manifest import sha256_hex

ov: Any = openvino
ops: Any = openvino.opset13
PACKAGES = ("openvino", "openvino-genai", "openvino-tokenizers")
# KV in 16 bits is then really f16: where the processor has bf16 units, the library's own choice
# computes and caches in bf16, whatever precision is asked for the cache.
PRECISION = "f32"


@functools.cache
def core() -> Any:
    """The process's one ``openvino.Core``."""
    return ov.Core()


@dataclass(frozen=True)
class Build:
    version: str
    digest: str  # SHA-256 hex over versions, and name, size and content of the CPU engine's files


@functools.cache
def build() -> Build:
    """Which engine this is; reads about a hundred megabytes of libraries once a process."""
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    parts = [*versions, f"precision {PRECISION}"]
    folder = Path(openvino.__file__).parent / "libs"
    for path in sorted(folder.glob("libopenvino*cpu_plugin*")) + sorted(
        folder.glob("libopenvino.so*")
    ):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        parts.append(f"{path.name} {path.stat().st_size} {content}")
    return Build(", ".join(versions), sha256_hex("\n".join(parts).encode()))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def words(error: BaseException, most: int = 400) -> str:
    """The library's words, without the places in its source that come before them."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [
        line
        for line in lines
        if line and not line.startswith(("Exception from ", "Caught exception:", "/home/"))
    ]
    return (" ".join(told) or type(error).__name__)[:most]
