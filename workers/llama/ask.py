"""Asks the linked engine about itself and a file: ``python -P -m modeld.workers.llama.ask``.

Reads one JSON ``AskRequest`` from standard input and prints one ``AskAnswer``. A dry run: the
model's shape is loaded without its weights, and contexts are sized without being allocated. The
process is short-lived, and limits itself: the file is not trusted, and a crash costs nobody else.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from modeld.shared.asking import AskAnswer, AskPoint, AskRequest
from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import InvalidRequest, ModeldError, ModelLoadFailed
from modeld.shared.gguf_header import model_facts
from modeld.shared.messages import LoadOp
from modeld.workers.llama import reports, validate
from modeld.workers.llama.devices import engine_devices
from modeld.workers.llama.native import build, engine_log, llama, start
from modeld.workers.llama.parameters import (
    ContextSettings,
    context_parameters,
    context_settings,
    model_parameters,
)
from modeld.workers.llama.traits import engine_traits, why_not_generating
from modeld.workers.memory_guard import data_bytes, offer_to_oom_killer

# Beyond what the process has when it starts. A vocabulary of a quarter million tokens takes some
# hundred megabytes, the record of a window's cells some 60 bytes each.
MEMORY_BYTES = 2 << 30
CPU_SECONDS = 30
MAX_REQUEST_BYTES = 1 << 20
MAX_WINDOWS = 64


def answer(request: AskRequest) -> AskAnswer:
    """Answer in this process; a refusal is part of the answer. May crash with the engine."""
    start()
    told = AskAnswer(
        loader="unknown",
        words="no file was asked about",
        backend_version=build().version,
        build_digest=build().digest,
        devices=engine_devices(),
    )
    if not request.path:
        return told
    try:
        _ask_of_file(request, told)
    except ModelLoadFailed as error:
        told.loader, told.words = "no", error.message
    except ModeldError as error:
        told.words = error.message
    return told


def _ask_of_file(request: AskRequest, told: AskAnswer) -> None:
    load = LoadOp(
        path=request.path,
        model="",
        digest="",
        n_batch=request.n_batch,
        n_ubatch=request.n_ubatch,
    )
    validate.check_load(load)
    if len(request.windows) > MAX_WINDOWS:
        raise InvalidRequest.of("windows", len(request.windows), f"at most {MAX_WINDOWS} windows")
    for window in request.windows:
        if window < 1:
            raise InvalidRequest.of("windows", window, "1 token or more")
    header = validate.check_file(request.path)
    facts = model_facts(header, header.file_bytes)
    parameters = model_parameters(0, (), (), {})  # on the host
    parameters.struct.load_mode = llama.LLAMA_LOAD_MODE_NONE
    parameters.struct.no_alloc = True
    engine_log.clear()
    model = llama.llama_model_load_from_file(request.path.encode(), parameters.struct)
    if not model:
        told.loader, told.words = "no", engine_log.words()
        return
    try:
        told.loader, told.words = "yes", ""
        told.traits = engine_traits(model)
        told.generates = why_not_generating(model, header)
        if not told.generates:
            _measure(model, facts, request, told)
    finally:
        llama.llama_model_free(model)


def _measure(model: Any, facts: ModelFacts, request: AskRequest, told: AskAnswer) -> None:
    """A point for each window, in ascending order; windows beyond the model's ceiling have one
    together, for the ceiling itself.
    """
    seen: set[int] = set()
    try:
        validate.check_kv_types(
            facts, request.k_type, request.v_type, flash_attn=request.flash_attn
        )
    except InvalidRequest as error:
        told.notes.append(error.message)
        return
    ceiling = validate.largest_window(facts)
    for window in sorted(min(window, ceiling) for window in request.windows):
        settings = context_settings(
            window,
            n_batch=request.n_batch,
            n_ubatch=request.n_ubatch,
            k_type=request.k_type,
            v_type=request.v_type,
            threads=1,
            flash_attn=request.flash_attn,
            offload=False,
        )
        if settings.window in seen:
            continue
        seen.add(settings.window)
        point = measured(model, facts, settings)
        if isinstance(point, AskPoint):
            told.points.append(point)
        else:
            told.notes.append(f"{settings.window} cells: {point}")


def measured(model: Any, facts: ModelFacts, settings: ContextSettings) -> AskPoint | str:
    """What a context of a model loaded without its weights would take; else the engine's words."""
    engine_log.clear()
    with engine_log.recording() as lines:
        context = llama.llama_init_from_model(model, context_parameters(settings))
    if not context:
        return engine_log.words()
    cells: int = llama.llama_n_ctx_seq(context)
    llama.llama_free(context)
    return AskPoint(
        cells=cells,
        kv_bytes=reports.settled_kv_bytes(
            settings.planned_kv_bytes(facts, cells), reports.kv_summarised(lines)
        ),
        compute_bytes=sum(reports.compute_by_device(lines).values())
        + settings.work_bytes(facts, cells),
    )


# --- the process -------------------------------------------------------------------------------


def _limit_self() -> None:
    """Memory beyond the present, processor time, and no core. A GPU's driver reserves address
    space by the terabyte, so that address space is limited only where there is none.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_CPU, CPU_SECONDS)
    data = data_bytes()
    if data is None:
        return
    _lower(resource.RLIMIT_DATA, data + MEMORY_BYTES)
    if not llama.llama_supports_gpu_offload():
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[0])
        _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + 2 * MEMORY_BYTES)


def _lower(which: int, limit: int) -> None:
    _, hard = resource.getrlimit(which)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (limit, limit))


def _take_standard_output() -> int:
    """The descriptor for the answer, closed to all else: what anything prints, now or as the
    process ends, goes to the standard error.
    """
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def _read_request() -> AskRequest:
    return msgspec.json.decode(sys.stdin.buffer.read(MAX_REQUEST_BYTES), type=AskRequest)


def _unknown(why: str) -> AskAnswer:
    return AskAnswer(loader="unknown", words=why)


def main(argv: Sequence[str]) -> int:
    """Exit code 0 with an answer wherever one can be given; 2 for a wrong command line."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -P -m modeld.workers.llama.ask < request.json\n")
        return 2
    out = _take_standard_output()
    offer_to_oom_killer()
    try:
        start()
        _limit_self()
        told = answer(_read_request())
    except MemoryError:
        told = _unknown(f"answering needs more than {MEMORY_BYTES} bytes")
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        told = _unknown(f"the request can't be read: {error}")
    except Exception as error:  # the caller must learn it; there is nobody else to tell
        told = _unknown(f"{type(error).__name__}: {error}")
    raw = msgspec.json.encode(told)
    while raw:
        raw = raw[os.write(out, raw) :]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
