"""Asks a backend's engine about a model file, in a short-lived process: neither is trusted.

Maps every way in which that can fail to an answer that says ``unknown``. Blocks; use a thread.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import msgspec

from modeld.shared.asking import AskAnswer, AskRequest
from modeld.supervisor.exits import ending

log = logging.getLogger(__name__)

TIMEOUT_S = 120.0
MAX_ANSWER_BYTES = 1 << 20
MODULES = {"llama": "modeld.workers.llama.ask", "openvino": "modeld.workers.openvino.ask"}


def ask_engine(backend: str, request: AskRequest, timeout_s: float = TIMEOUT_S) -> AskAnswer:
    """What the linked engine says of the file; ``loader`` "unknown" with the reason if nothing."""
    module = MODULES.get(backend)
    if module is None:
        return _unknown(f"the {backend} backend can't be asked before a load")
    # -P: what lies in the current folder must not be imported in place of the package.
    command = [sys.executable, "-P", "-m", module]
    try:
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            offer_to_oom_killer(process.pid)
            try:
                out, err = process.communicate(msgspec.json.encode(request), timeout_s)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(command, process.returncode, out, err)
    except subprocess.TimeoutExpired:
        return _unknown(f"the engine took longer than {timeout_s:g} s to answer")
    except OSError as error:
        return _unknown(f"the engine could not be asked: {error.strerror or error}")
    if done.returncode != 0:
        log.warning("asking the engine failed: %s", done.stderr[-2000:].decode(errors="replace"))
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = f": {said[-1][:300]}" if said else ""
        return _unknown(f"asking the engine ended with {ending(done.returncode)}{last}")
    try:
        if len(done.stdout) > MAX_ANSWER_BYTES:
            raise ValueError(f"{len(done.stdout)} bytes")
        return msgspec.json.decode(done.stdout, type=AskAnswer)
    except (ValueError, msgspec.MsgspecError) as error:
        log.warning("the engine's answer can't be read: %s", error)
        return _unknown("the engine gave no usable answer")


def _unknown(why: str) -> AskAnswer:
    return AskAnswer(loader="unknown", words=why)


def offer_to_oom_killer(pid: int) -> None:
    """Have the kernel end the question rather than a worker with open sessions, where memory runs
    out. From here: most of what it takes comes with its imports.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
