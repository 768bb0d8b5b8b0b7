"""What the engine is told: how a context is made, and where a model's layers go.

The one place that fills the engine's parameter structs, so that a dry run makes exactly what a
session gets. Allocates nothing; knows no session and no budget.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import InvalidRequest
from modeld.shared.planner import graph, kv_math
from modeld.workers.llama.native import llama
from modeld.workers.llama.validate import CELL_PAD, KV_TYPES, SEQUENCES, planned_kv_bytes


@dataclass(frozen=True)
class ContextSettings:
    """How a context is made. Counts are tokens."""

    window: int
    n_batch: int
    n_ubatch: int
    k_type: str
    v_type: str
    threads: int
    flash_attn: bool
    offload: bool

    def planned_kv_bytes(self, facts: ModelFacts, cells: int) -> int:
        """Bytes of KV and states, by the planner's formula, in a context of ``cells``."""
        return planned_kv_bytes(
            facts, cells, self.k_type, self.v_type, self.n_ubatch, flash_attn=self.flash_attn
        )

    def work_bytes(self, facts: ModelFacts, cells: int) -> int:
        """What the processor takes beside the buffers that the engine reports, in bytes."""
        return graph.work_bytes(
            facts,
            cells,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            k_type=self.k_type,
            v_type=self.v_type,
            flash_attn=self.flash_attn,
        )


def context_settings(
    window: int,
    *,
    n_batch: int,
    n_ubatch: int,
    k_type: str,
    v_type: str,
    threads: int,
    flash_attn: bool,
    offload: bool,
) -> ContextSettings:
    """Settings for a window of ``window`` tokens: rounded up as the engine does, and no batch
    longer than it.
    """
    cells = kv_math.round_up(window, CELL_PAD)
    n_batch = min(n_batch, cells)
    return ContextSettings(
        window=cells,
        n_batch=n_batch,
        n_ubatch=min(n_ubatch, n_batch),
        k_type=k_type,
        v_type=v_type,
        threads=threads,
        flash_attn=flash_attn,
        offload=offload,
    )


def context_parameters(settings: ContextSettings, streams: int = 0) -> Any:
    """The engine's struct for a context of one session, or of several ``streams`` that have a
    window each.
    """
    made = llama.llama_context_default_params()
    made.n_ctx = settings.window * max(1, streams)
    made.n_batch = settings.n_batch
    made.n_ubatch = settings.n_ubatch
    # Unified with one scratch sequence: a prefix can be copied out without touching the session.
    # Several sessions in one unified cache would change each other's results: there each has cells
    # of its own.
    made.n_seq_max = streams or SEQUENCES
    made.kv_unified = not streams
    # One row of logits a stream is read; fewer rows than sequences would abort the engine.
    made.n_outputs_max = streams or SEQUENCES
    made.n_threads = made.n_threads_batch = settings.threads
    # Left on automatic, results would depend on how a prompt was split.
    made.flash_attn_type = 1 if settings.flash_attn else 0
    made.type_k, made.type_v = KV_TYPES[settings.k_type], KV_TYPES[settings.v_type]
    made.offload_kqv = made.op_offload = settings.offload
    made.embeddings = False
    made.swa_full = False
    made.no_perf = True
    return made


@dataclass(frozen=True)
class ModelParameters:
    """The engine's struct for a model, with the arrays that it points into.

    The struct holds addresses only: this object must live until the load is over.
    """

    struct: Any
    kept: list[Any] = field(default_factory=list)


def model_parameters(
    n_gpu_layers: int,
    devices: Sequence[str],
    tensor_split: Sequence[float],
    available: Mapping[str, int],
) -> ModelParameters:
    """Where layers go. ``available`` maps accelerators' engine names to their handles.

    Without layers to offload the device list is there and empty, so that a build with a GPU puts
    nothing on it: no weights, KV, compute buffer or pinned memory. With layers and no named device
    the engine takes all of them. Raises InvalidRequest for a device that isn't there, or shares
    that don't fit the devices.
    """
    struct = llama.llama_model_default_params()
    struct.n_gpu_layers = n_gpu_layers
    struct.split_mode = llama.LLAMA_SPLIT_MODE_LAYER
    struct.main_gpu = 0
    # Repacked copies would double the weights' memory outside the file's pages, and pick kernels
    # (AMX among them) that a virtual machine may announce and then not execute.
    struct.use_extra_bufts = False
    _check_devices(devices, tensor_split, available)
    made = ModelParameters(struct)
    if n_gpu_layers > 0 and not devices:
        return made
    handles = [available[name] for name in devices] if n_gpu_layers > 0 else []
    array = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
    struct.devices = ctypes.addressof(array)
    made.kept.append(array)
    if tensor_split and handles:
        size = max(llama.llama_max_devices(), len(tensor_split))
        shares = (ctypes.c_float * size)(*tensor_split)
        struct.tensor_split = ctypes.cast(shares, ctypes.POINTER(ctypes.c_float))
        made.kept.append(shares)
    return made


def _check_devices(
    devices: Sequence[str], tensor_split: Sequence[float], available: Mapping[str, int]
) -> None:
    there = ", ".join(available) or "none: this build of the engine finds no accelerator"
    for name in devices:
        if name not in available:
            raise InvalidRequest.of("devices", name, there)
    most = llama.llama_max_devices()
    if len(set(devices)) < len(devices) or len(devices) > most:
        raise InvalidRequest.of("devices", list(devices), f"each once, at most {most}: {there}")
    if not tensor_split:
        return
    if len(tensor_split) != len(devices):
        raise InvalidRequest.of(
            "tensor_split",
            list(tensor_split),
            f"one share for each of the {len(devices)} devices",
        )
    if not all(math.isfinite(share) and share >= 0 for share in tensor_split) or not any(
        tensor_split
    ):
        raise InvalidRequest.of(
            "tensor_split", list(tensor_split), "shares of 0 or more, not all of them 0"
        )
