"""A llama context as the engine makes it, and the arrays that batches for it are filled in.

Knows what was made and what it takes; nothing of what it holds.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from modeld.shared.errors import InsufficientMemory
from modeld.shared.messages import PlacedOut
from modeld.workers.llama import reports
from modeld.workers.llama.native import engine_log, llama
from modeld.workers.llama.parameters import ContextSettings, context_parameters

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Made:
    """Its handles, and its sizes as the engine has them: it lowers them by rules of its own, and a
    longer batch aborts. ``window`` is a sequence's, ``placed`` the whole's.
    """

    handle: Any
    memory: Any
    window: int
    n_batch: int
    n_ubatch: int
    placed: list[PlacedOut]


def make(
    model: Any,
    settings: ContextSettings,
    planned_kv_bytes: Callable[[int], int],
    work_bytes: int,
    streams: int = 0,
) -> Made:
    """A context of one session, or of several ``streams`` with a window each.

    ``planned_kv_bytes`` are of one window; ``work_bytes`` are what no report of the engine tells.
    Raises InsufficientMemory with the engine's words when it can't be made.
    """
    engine_log.clear()
    with engine_log.recording() as lines:
        handle = llama.llama_init_from_model(model, context_parameters(settings, streams))
    if not handle:
        raise _refused(settings, streams)
    window: int = llama.llama_n_ctx_seq(handle)
    compute = reports.compute_by_device(lines)
    compute["CPU"] = compute.get("CPU", 0) + work_bytes
    kv_bytes = _settled(planned_kv_bytes(window) * max(1, streams), lines)
    kv = reports.scaled_to(kv_bytes, reports.kv_by_device(lines))
    return Made(
        handle,
        llama.llama_get_memory(handle),
        window,
        llama.llama_n_batch(handle),
        llama.llama_n_ubatch(handle),
        reports.placed(kv=kv, compute=compute),
    )


def _refused(settings: ContextSettings, streams: int) -> InsufficientMemory:
    size, fewer = f"{settings.window} tokens", ""
    numbers: dict[str, object] = {"window": settings.window, "cause": "engine"}
    if streams:
        size, fewer = f"{streams} streams of {size}", "fewer streams or "
        numbers["streams"] = streams
    return InsufficientMemory(
        f"The engine can't make a context of {size} with K {settings.k_type} and V "
        f"{settings.v_type}. It said: {engine_log.words()}. Ask for {fewer}a smaller window, or "
        "close a session.",
        metadata=numbers,
    )


def _settled(planned: int, lines: list[str]) -> int:
    """The computed bytes where the engine's report agrees; else its."""
    reported = reports.kv_reported(lines)
    if planned and not reported.agrees_with(planned):
        log.warning("KV planned at %d bytes, the engine reports %d", planned, reported.bytes)
    return reports.settled_kv_bytes(planned, reported)


class Rows:
    """Arrays that every evaluation reuses: filled through numpy, read by the engine. ``of`` says
    whose each row is, by the addresses in ``ids``; at first all are the first sequence's.
    """

    def __init__(self, size: int, sequences: int) -> None:
        self._size = size
        self.tokens = np.zeros(size, dtype=np.int32)
        self.positions = np.zeros(size, dtype=np.int32)
        self.wanted = np.zeros(size, dtype=np.int8)
        self._counts = np.ones(size, dtype=np.int32)
        self.ids = [(llama.llama_seq_id * 1)(index) for index in range(sequences)]
        self.of = self.all_of(0)
        self.batch = llama.llama_batch(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(ctypes.POINTER(llama.llama_token)),
            embd=None,
            pos=self.positions.ctypes.data_as(ctypes.POINTER(llama.llama_pos)),
            n_seq_id=self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self.of,
            logits=self.wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def all_of(self, index: int) -> Any:
        """For ``batch.seq_id``: every row is that sequence's."""
        pointer = ctypes.POINTER(llama.llama_seq_id)
        return (pointer * self._size)(*[self.ids[index]] * self._size)
