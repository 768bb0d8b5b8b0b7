"""llama.cpp's own server, built from the source that llama-cpp-python's package carries.

Owns its build, its life and its streamed completions. Knows nothing of what is measured.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from bench.control import EngineSettings
from bench.daemon import REPOSITORY, clean_environment
from bench.runner import RunFailed, require
from modeld.supervisor.launcher import OPENMP

HERE = "127.0.0.1"
START_S = 60.0
ANSWER_S = 600.0  # without a byte from the server
PACKAGE = "llama-cpp-python"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


@dataclass(frozen=True)
class Streamed:
    """One streamed completion: when its first and its last token came, by ``perf_counter``."""

    tokens: int
    cached: int  # prompt tokens that weren't evaluated again
    first_s: float
    last_s: float


def binary() -> Path:
    """``MODELD_LLAMA_SERVER``, or what is built here once. Raises RunFailed."""
    if given := os.environ.get("MODELD_LLAMA_SERVER"):
        require(Path(given).is_file(), f"MODELD_LLAMA_SERVER={given} is no file")
        return Path(given)
    folder = REPOSITORY / ".data" / "bench" / f"llama-server-{version(PACKAGE)}"
    built = folder / "build" / "bin" / "llama-server"
    if not built.is_file():
        _build(folder)
    return built


def _build(folder: Path) -> None:
    """Minutes on two cores. cmake and a compiler, as llama-cpp-python's own build needs them."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.log").open("w") as log:
        wanted = f"{PACKAGE}=={version(PACKAGE)}"
        fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE]
        _step([*fetch, "--dest", str(folder), wanted], log.fileno(), folder)
        (source,) = folder.glob("*.tar.gz")
        with tarfile.open(source) as packed:
            packed.extractall(folder, filter="data")
        (code,) = folder.glob("*/vendor/llama.cpp")
        make = str(folder / "build")
        _step(["cmake", "-S", str(code), "-B", make, *FLAGS], log.fileno(), folder)
        _step(
            ["cmake", "--build", make, "--target", "llama-server", "--parallel"],
            log.fileno(),
            folder,
        )


def _step(command: Sequence[str], log: int, folder: Path) -> None:
    try:
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    except FileNotFoundError as missing:
        raise RunFailed(f"building llama-server needs {command[0]}") from missing
    require(code == 0, f"llama-server wasn't built ({command[0]}): see {folder}/build.log")


class LlamaServer:
    """A started server with ``slots`` slots of ``window`` tokens. Raises RunFailed."""

    def __init__(self, settings: EngineSettings, slots: int, window: int, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind((HERE, 0))
            self.port = int(probe.getsockname()[1])
        options = {
            "--model": settings.model,
            "--parallel": slots,
            "--ctx-size": slots * window,
            "--threads": settings.threads,
            "--batch-size": settings.n_batch,
            "--ubatch-size": settings.n_ubatch,
            "--flash-attn": "off",  # as on the product's side; on is slower here
            "--host": HERE,
            "--port": self.port,
        }
        # Repacked weights need AMX here, which a virtual machine may list and then not execute; the
        # product leaves them off for the same reason.
        given = [str(part) for pair in options.items() for part in pair] + ["--no-repack"]
        # It has its own defaults of how threads wait.
        env = {name: value for name, value in clean_environment().items() if name not in OPENMP}
        self._log = folder / "llama-server.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [binary(), *given],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
            )
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self._process.poll() is None:
            try:
                connection = http.client.HTTPConnection(HERE, self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        tail = self._log.read_text(errors="replace")[-800:]
        raise RunFailed(f"llama-server didn't start: {tail}")

    def complete(self, prompt: Sequence[int], tokens: int, slot: int) -> Streamed:
        """Greedy, exactly ``tokens`` tokens, streamed, in one slot. Raises RunFailed for fewer."""
        body = {
            "prompt": list(prompt),
            "n_predict": tokens,
            "id_slot": slot,
            "cache_prompt": True,
            "ignore_eos": True,
            "samplers": ["top_k"],  # the cheapest that it has
            "top_k": 1,
            "stream": True,
        }
        connection = http.client.HTTPConnection(HERE, self.port, timeout=ANSWER_S)
        connection.request("POST", "/completion", json.dumps(body))
        response = connection.getresponse()
        require(response.status == 200, f"llama-server answered {response.status}")
        first_s = last_s = 0.0
        end: dict[str, object] = {}
        for line in response:
            if line.startswith(b"data: "):
                last_s = time.perf_counter()
                first_s = first_s or last_s
                end = json.loads(line[6:])
        connection.close()
        made, read = end.get("tokens_predicted"), end.get("timings", {})
        require(made == tokens, f"llama-server made {made}, not {tokens} tokens")
        assert isinstance(read, dict)
        return Streamed(tokens, len(prompt) - int(read["prompt_n"]), first_s, last_s)

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
