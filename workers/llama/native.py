"""The engine library itself: environment, log capture, build identity, pointer checks.

The only place that imports the binding, so that what must be set before the library loads is
set. Knows no model and no session.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# OpenMP reads its policy when it is loaded: waiting actively costs several times the throughput
# wherever cores are shared. The other keeps an abort from attaching a debugger first.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import llama_cpp
import llama_cpp.llama_cpp as _binding

from modeld.shared.manifest import sha256_hex

log = logging.getLogger(__name__)
llama: Any = _binding

_DEBUG, _WARN, _ERROR, _CONTINUATION = 1, 3, 4, 5
_KEPT_LINES = 50
_LIBRARY = re.compile(r"lib(llama|ggml)[^/]*\.(so[.\d]*|dylib)$")


class EngineLog:
    """Keeps the engine's last lines, so that a refusal can carry its own words."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, str]] = deque(maxlen=_KEPT_LINES)
        self._recordings: list[list[str]] = []

    def add(self, level: int, text: str) -> None:
        line = text.rstrip("\n")
        if level == _CONTINUATION or not line.strip(". "):
            return  # progress dots
        self._recent.append((level, line))
        for lines in self._recordings:
            lines.append(line)
        if level >= _ERROR:
            log.warning("engine: %s", line)
        else:
            log.debug("engine: %s", line)

    def clear(self) -> None:
        self._recent.clear()

    def words(self, most: int = 6) -> str:
        """The last errors and warnings, or the last lines where there is none; oldest first."""
        said = [line for level, line in self._recent if level in (_WARN, _ERROR)]
        return " | ".join((said or [line for _, line in self._recent])[-most:]) or "nothing"

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[str]]:
        """Collects every line, debug output excepted, that is logged meanwhile."""
        lines: list[str] = []
        self._recordings.append(lines)
        try:
            yield lines
        finally:
            self._recordings.remove(lines)


_M_MMAP_THRESHOLD = -3
LARGE_BLOCK_BYTES = 1 << 20

engine_log = EngineLog()


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes | None, _data: object) -> None:
    if level == _DEBUG or not text:  # a thousand lines a context
        return
    engine_log.add(level, text.decode(errors="replace"))


def _silence() -> None:
    """Back to the library's own printing: destructors may log after the interpreter is gone."""
    llama.llama_log_set(llama.llama_log_callback(0), None)


def _return_large_blocks() -> None:
    """Have the allocator map every large block by itself, and unmap it when it is freed.

    glibc raises its threshold to the largest block that was freed, up to 32 MiB: a context's
    buffers then come from the heap, and stay there after it is closed.
    """
    with contextlib.suppress(AttributeError, OSError):  # another platform's allocator
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


@functools.cache
def start() -> None:
    """Bring the library up once a process; every use of it comes after."""
    llama.llama_log_set(_on_log, None)
    _return_large_blocks()
    atexit.register(_silence)
    llama.llama_backend_init()


@dataclass(frozen=True)
class Build:
    version: str
    digest: str  # SHA-256 hex over version, and name, size and content of each library


@functools.cache
def libraries() -> list[Path]:
    """The engine's shared libraries that this process has mapped."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
        found = {parts[5] for line in maps.splitlines() if len(parts := line.split(None, 5)) == 6}
        paths = [Path(path) for path in found if _LIBRARY.search(path)]
    except OSError:
        paths = []
    if not paths:
        folder = Path(_binding.__file__).parent / "lib"
        paths = [path for path in folder.iterdir() if _LIBRARY.search(path.name)]
    return sorted(paths, key=lambda path: path.name)


@functools.cache
def build() -> Build:
    """Which engine this is; reads some megabytes of libraries once a process."""
    version = f"llama-cpp-python {llama_cpp.__version__}, libllama {llama.llama_version().decode()}"
    parts = [version]
    for path in libraries():
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        parts.append(f"{path.name} {path.stat().st_size} {content}")
    return Build(version, sha256_hex("\n".join(parts).encode()))
