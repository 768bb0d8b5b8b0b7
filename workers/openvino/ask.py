"""Asks OpenVINO about itself and a model: ``python -P -m modeld.workers.openvino.ask``.

Reads one JSON ``AskRequest`` from standard input and prints one ``AskAnswer``. The model is loaded
as a worker would load it, since only compiling tells whether a plugin takes it and what it keeps of
the weights; contexts are sized without being allocated. The process is short-lived, and limits
itself: the folder is not trusted, and a crash costs nobody else.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from modeld.shared.asking import AskAnswer, AskPoint, AskRequest
from modeld.shared.capacity import EngineMeasure
from modeld.shared.errors import (
    InsufficientMemory,
    InvalidRequest,
    ModeldError,
    ModelLoadFailed,
    UnsupportedFeature,
)
from modeld.shared.gguf_convertible import check_convertible
from modeld.shared.gguf_header import check_extents, read_header
from modeld.shared.host_memory import anonymous_bytes, host_memory
from modeld.shared.ir_facts import ir_facts
from modeld.shared.messages import LoadOp
from modeld.shared.planner.openvino_cost import copied_bytes
from modeld.shared.planner.openvino_kv import BLOCK_TOKENS, check_types
from modeld.workers.memory_guard import offer_to_oom_killer

if TYPE_CHECKING:
    from modeld.workers.openvino.engine import OpenVinoEngine

CPU_SECONDS = 600  # on all cores; the caller waits for two minutes
MAX_REQUEST_BYTES = 1 << 20
MAX_WINDOWS = 64
HOST_DEVICE = "CPU"


def answer(request: AskRequest) -> AskAnswer:
    """Answer in this process; a refusal is part of the answer. May crash with the engine.

    Raises ImportError where the library isn't installed.
    """
    from modeld.workers.openvino.engine import OpenVinoEngine

    engine = OpenVinoEngine()
    hello = engine.hello()
    told = AskAnswer(
        loader="unknown",
        words="no model was asked about",
        backend_version=hello.backend_version,
        build_digest=hello.build_digest,
        devices=hello.devices,
    )
    if not request.path:
        return told
    try:
        path = Path(request.path)
        if path.is_dir():
            _ask_of_folder(engine, path, request, told)
        else:
            _ask_of_file(path, told)
    except (ModelLoadFailed, UnsupportedFeature) as error:
        told.loader, told.words = "no", error.message
    except ModeldError as error:
        told.words = error.message
    return told


def _ask_of_file(path: Path, told: AskAnswer) -> None:
    """A GGUF file is converted when it is imported: so far, the checks before that can tell."""
    header = read_header(path)
    check_extents(header, header.file_bytes)
    check_convertible(header)
    told.words = "a GGUF file that can be converted; what comes out is asked about when it is there"


def _ask_of_folder(
    engine: OpenVinoEngine, folder: Path, request: AskRequest, told: AskAnswer
) -> None:
    _check_windows(request.windows)
    device = request.device or HOST_DEVICE
    told.device = why_not(device)
    if told.device:
        told.words = f"not tried: the device {device} can't be used"
        return
    try:
        check_types(request.k_type, request.v_type)
    except InvalidRequest as error:
        told.words, told.notes = "not tried with these types", [error.message]
        return
    facts = ir_facts(folder)
    needed = copied_bytes(facts, EngineMeasure(), request.n_ubatch)
    reading = host_memory()
    if reading.known and needed > reading.available_bytes:
        told.words = (
            f"not tried: compiling it takes about {needed} bytes, and {reading.available_bytes} "
            "are free"
        )
        return
    try:
        _try(engine, request, device, told)
    except InsufficientMemory:
        raise
    except (ModelLoadFailed, UnsupportedFeature) as error:
        if device == HOST_DEVICE:
            raise
        told.device = error.message  # of this device only
        told.words = f"not loaded on {device}"


def _try(engine: OpenVinoEngine, request: AskRequest, device: str, told: AskAnswer) -> None:
    load = LoadOp(
        path=request.path,
        model=Path(request.path).name,
        digest="",
        n_batch=request.n_batch,
        n_ubatch=request.n_ubatch,
        k_type=request.k_type,
        v_type=request.v_type,
        device=device,
    )
    before = anonymous_bytes(os.getpid())
    result = engine.load(load, lambda _stage, _fraction: None, lambda: False)
    after = anonymous_bytes(os.getpid())
    told.loader, told.words, told.traits = "yes", "", result.traits
    if before is not None and after is not None:
        told.copied_bytes = max(0, after - before)
    try:
        block = engine.new_context(BLOCK_TOKENS, request.k_type, request.v_type)
    except UnsupportedFeature as error:
        told.generates = error.message
        return
    seen = result.capabilities.get("vision", "")
    if result.executor == "vision" and not seen.startswith("yes"):
        told.generates = seen.partition(": ")[2]
    ceiling = result.train_context or max(request.windows, default=0)
    for window in sorted({min(window, ceiling) for window in request.windows}):
        blocks = -(-window // BLOCK_TOKENS)
        told.points.append(AskPoint(blocks * BLOCK_TOKENS, blocks * block.kv_bytes, 0))
    block.close()


def why_not(device: str) -> str:
    """Why the library can't use a device, in its words; "" where it lists it."""
    from modeld.workers.openvino.native import core, words

    if device in core().available_devices:
        return ""
    try:
        core().get_property(device, "FULL_DEVICE_NAME")
    except Exception as error:
        return words(error)
    return "its plugin lists no such device"


def _check_windows(windows: Sequence[int]) -> None:
    if len(windows) > MAX_WINDOWS:
        raise InvalidRequest.of("windows", len(windows), f"at most {MAX_WINDOWS} windows")
    for window in windows:
        if window < 1:
            raise InvalidRequest.of("windows", window, "1 token or more")


# --- the process -------------------------------------------------------------------------------


def _limit_self() -> None:
    """Processor time, and no core. What it may allocate is bounded where the engine does."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = CPU_SECONDS if hard == resource.RLIM_INFINITY else min(CPU_SECONDS, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (most, hard))


def main(argv: Sequence[str]) -> int:
    """Exit code 0 with an answer wherever one can be given; 2 for a wrong command line."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -P -m modeld.workers.openvino.ask < request.json\n")
        return 2
    # The answer's descriptor, closed to all else: what a plugin prints goes to the standard error.
    out = os.dup(1)
    os.dup2(2, 1)
    offer_to_oom_killer()
    _limit_self()
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(MAX_REQUEST_BYTES), type=AskRequest)
        told = answer(request)
    except ImportError as error:
        told = AskAnswer(loader="unknown", words=f"openvino can't be imported: {error}")
    except MemoryError:
        told = AskAnswer(loader="unknown", words="answering needs more memory than there is")
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        told = AskAnswer(loader="unknown", words=f"the request can't be read: {error}")
    except Exception as error:  # the caller must learn it; there is nobody else to tell
        told = AskAnswer(loader="unknown", words=f"{type(error).__name__}: {error}")
    raw = msgspec.json.encode(told)
    while raw:
        raw = raw[os.write(out, raw) :]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
