"""A model's facts, read in a short-lived process of its own: the files are not trusted.

Run as ``python -m modeld.supervisor.models.facts PATH [TYPE]`` it prints one JSON object and ends.
The caller's side maps every way in which that can fail to a typed error.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from modeld.shared.capacity import FileKind, ModelFacts
from modeld.shared.errors import BackendMismatch, ModeldError, ModelLoadFailed, from_wire
from modeld.shared.gguf_header import (
    GgufHeader,
    check_extents,
    companion_facts,
    model_facts,
    read_header,
    repeated_token,
)
from modeld.shared.gguf_parts import read_parts
from modeld.shared.manifest import template_digest

VERSION = 3  # of what is read: facts of an older one are read again
ADDRESS_SPACE_BYTES = 200 * 1024 * 1024
CPU_SECONDS = 2  # of it, a header at every limit takes less than one
FOLDER_CPU_SECONDS = 20  # XML of the greatest size that is read
TIMEOUT_S = 120.0  # a cold disk or a network filesystem may be slow without using any CPU
_PROJECTORS = ("mmproj", "clip")


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """Facts or an error, never both."""

    facts: ModelFacts | None = None
    error: dict[str, Any] | None = None


def inspect(path: Path, model_type: str = "") -> ModelFacts:
    """Read and check a model's files in this process: a GGUF file, any part of a split set, or an
    OpenVINO folder. Raises ModelLoadFailed in the reader's words; what isn't a model to serve is
    told by its facts (``refuse_unless_model``).

    ``model_type`` "openvino": what can be served as such, or UnsupportedFeature. A folder must be
    whole then, and a GGUF file one that is converted rightly.
    """
    if path.is_dir():
        return _inspect_folder(path, model_type)
    header, parts, first = read_header(path), 1, path
    if header.integer("split.count", 1) > 1:
        header, parts, first = read_parts(path, header)
    elif header.tensors:
        check_extents(header, header.file_bytes)
    if not header.architecture or not header.tensors:
        raise _refused(path, "it names no architecture or holds no tensors")
    kind = _kind(path, header)
    if kind is not FileKind.MODEL:
        return replace(companion_facts(header, header.file_bytes, kind), parts=parts)
    if header.block_count == 0:
        raise _refused(path, f"it says of no block of a {header.architecture!r} model")
    repeated = repeated_token(first, header)
    if repeated is not None:
        index, text = repeated
        raise _refused(path, f"its vocabulary holds token {index} ({text!r:.60}) twice")
    template = header.chat_template
    digest = template_digest(template, header.bos_text, header.eos_text) if template else ""
    facts = model_facts(header, header.file_bytes, template_digest=digest)
    if model_type == "openvino":
        from modeld.shared.gguf_convertible import check_convertible

        check_convertible(header, parts)
        return replace(facts, model_type=model_type)
    return replace(facts, parts=parts) if parts > 1 else facts


def _inspect_folder(path: Path, model_type: str) -> ModelFacts:
    from modeld.shared.ir_check import check_folder  # readers of GGUF need none of it
    from modeld.shared.ir_facts import ir_facts

    if model_type == "llama":
        raise BackendMismatch(
            f"{path.name} is a folder, and a model of type 'llama' is a GGUF file. Name the file, "
            "or import the folder as type openvino.",
            metadata={"type": "llama", "served": "openvino"},
        )
    if model_type == "openvino":
        check_folder(path)
    return ir_facts(path)


def _kind(path: Path, header: GgufHeader) -> FileKind:
    kind = header.text("general.type") or "model"
    if kind in _PROJECTORS or header.architecture in _PROJECTORS:
        return FileKind.PROJECTOR
    if kind == "adapter":
        return FileKind.ADAPTER
    if kind != "model":
        raise _refused(path, f"it holds a GGUF of type {kind!r:.60}, not a model")
    return FileKind.MODEL


def refuse_unless_model(facts: ModelFacts, path: Path) -> None:
    """Raise ModelLoadFailed for facts of what can't be imported as a model by itself (a projector
    or an adapter), saying what to do.
    """
    if facts.file_kind is FileKind.PROJECTOR:
        raise _refused(
            path,
            "it is a multimodal projector, not a whole model; import the model that it belongs to",
        )
    if facts.file_kind is FileKind.ADAPTER:
        raise _refused(
            path, "it is an adapter, not a whole model; import the model that it was made for"
        )


def read_facts(
    path: Path,
    model_type: str = "",
    *,
    timeout_s: float = TIMEOUT_S,
    any_kind: bool = False,
) -> ModelFacts:
    """The facts of the model at ``path``, read by a process with limits. Blocks; use a thread.

    Only a whole model is answered, unless ``any_kind``: then whatever ``inspect`` knows.
    Raises ModelLoadFailed: what is wrong with the files, or that reading them crashed or took
    longer than ``timeout_s`` seconds; and what ``inspect`` and ``refuse_unless_model`` raise.
    """
    import subprocess  # not above: the reading process starts faster without

    try:
        done = subprocess.run(
            _command(path, model_type),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _refused(path, f"reading its header took longer than {timeout_s:g} s") from None
    facts = _answered(path, done.returncode, done.stdout, done.stderr)
    if not any_kind:
        refuse_unless_model(facts, path)
    return facts


def _answered(path: Path, returncode: int, stdout: bytes, stderr: bytes) -> ModelFacts:
    if returncode != 0:
        import logging  # as above

        from modeld.supervisor.exits import ending

        logging.getLogger(__name__).warning(
            "the facts reader failed: %s", stderr[-2000:].decode(errors="replace")
        )
        raise _refused(path, f"reading its header failed ({ending(returncode)})")
    try:
        answer = msgspec.json.decode(stdout, type=_Answer)
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise _refused(path, "the header reader gave no usable answer") from None
    if answer.error is not None:
        raise from_wire(**answer.error)
    if answer.facts is None:
        raise _refused(path, "the header reader gave no answer")
    return answer.facts


def _refused(path: Path, why: str) -> ModelLoadFailed:
    return ModelLoadFailed(f"{path.name} can't be used: {why}.", metadata={"file": path.name})


def _command(path: Path, model_type: str = "") -> list[str]:
    # -P: what lies in the current folder must not be imported in place of the package.
    command = [sys.executable, "-P", "-m", "modeld.supervisor.models.facts", str(path)]
    return [*command, model_type] if model_type else command


def _limit_self(cpu_s: int = CPU_SECONDS) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(argv: list[str]) -> int:
    if len(argv) not in (2, 3):
        sys.stderr.write("usage: python -m modeld.supervisor.models.facts PATH [TYPE]\n")
        return 2
    path, model_type = Path(argv[1]), "".join(argv[2:])
    _limit_self(FOLDER_CPU_SECONDS if path.is_dir() else CPU_SECONDS)
    try:
        answer = _Answer(facts=inspect(path, model_type))
    except ModeldError as error:
        answer = _Answer(error=error.to_wire())
    except MemoryError:
        refused = _refused(path, f"its header needs more than {ADDRESS_SPACE_BYTES} bytes to read")
        answer = _Answer(error=refused.to_wire())
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
