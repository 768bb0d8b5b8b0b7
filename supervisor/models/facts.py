"""A model file's facts, read in a short-lived process of its own: the file is not trusted.

Run as ``python -m modeld.supervisor.models.facts PATH`` it prints one JSON object and ends. The
caller's side maps every way in which that can fail to a typed error.
"""

from __future__ import annotations

import hashlib
import logging
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import ModeldError, ModelLoadFailed, from_wire
from modeld.shared.gguf_header import check_extents, model_facts, read_header, repeated_token

log = logging.getLogger(__name__)

ADDRESS_SPACE_BYTES = 1 << 30
CPU_SECONDS = 30
TIMEOUT_S = 120.0  # a cold disk or a network filesystem may be slow without using any CPU


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """Facts or an error, never both."""

    facts: ModelFacts | None = None
    error: dict[str, Any] | None = None


def inspect(path: Path) -> ModelFacts:
    """Read and check a file in this process. Raises ModelLoadFailed in the reader's words."""
    header = read_header(path)
    kind = header.text("general.type") or "model"
    if kind != "model":
        raise _refused(path, f"it holds a GGUF of type {kind!r}, not a whole model")
    parts = header.integer("split.count")
    if parts > 1:
        raise _refused(
            path,
            f"it is one of {parts} parts; merge them into one file first "
            "(`llama-gguf-split --merge`)",
        )
    if not header.architecture or not header.tensors:
        raise _refused(path, "it names no architecture or holds no tensors")
    check_extents(header, header.file_bytes)
    repeated = repeated_token(path, header)
    if repeated is not None:
        index, text = repeated
        raise _refused(path, f"its vocabulary holds token {index} ({text!r:.60}) twice")
    template = header.chat_template
    digest = hashlib.sha256(template.encode()).hexdigest() if template else ""
    return model_facts(header, header.file_bytes, template_digest=digest)


def read_facts(path: Path, timeout_s: float = TIMEOUT_S) -> ModelFacts:
    """The facts of the file at ``path``, read by a process with limits. Blocks; use a thread.

    Raises ModelLoadFailed: what is wrong with the file, or that reading it crashed or took longer
    than ``timeout_s`` seconds.
    """
    try:
        done = subprocess.run(
            _command(path),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refused(path, f"reading its header took longer than {timeout_s:g} s") from None
    if done.returncode != 0:
        log.warning("the facts reader failed: %s", done.stderr[-2000:].decode(errors="replace"))
        raise _refused(path, f"reading its header failed ({_ending(done.returncode)})")
    try:
        answer = msgspec.json.decode(done.stdout, type=_Answer)
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise _refused(path, "the header reader gave no usable answer") from None
    if answer.error is not None:
        raise from_wire(**answer.error)
    if answer.facts is None:
        raise _refused(path, "the header reader gave no answer")
    return answer.facts


def _refused(path: Path, why: str) -> ModelLoadFailed:
    return ModelLoadFailed(f"{path.name} can't be used: {why}.", metadata={"file": path.name})


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def _command(path: Path) -> list[str]:
    # -P: what lies in the current folder must not be imported in place of the package.
    return [sys.executable, "-P", "-m", "modeld.supervisor.models.facts", str(path)]


def _limit_self() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        sys.stderr.write("usage: python -m modeld.supervisor.models.facts PATH\n")
        return 2
    _limit_self()
    path = Path(argv[1])
    try:
        answer = _Answer(facts=inspect(path))
    except ModeldError as error:
        answer = _Answer(error=error.to_wire())
    except MemoryError:
        refused = _refused(path, f"its header needs more than {ADDRESS_SPACE_BYTES} bytes to read")
        answer = _Answer(error=refused.to_wire())
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
