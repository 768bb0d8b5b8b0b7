"""A llama sequence's state as bytes: taken out of one sequence, put into another.

Calls of the library only; which sequence holds what, and whether that can be, is the context's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import InsufficientMemory
from modeld.workers.llama.native import llama

if TYPE_CHECKING:
    from modeld.workers.engine import State


def take_state(
    handle: Any, sequence: int, tokens: int, spare_bytes: Callable[[], int]
) -> State | None:
    """The state of a whole sequence, of ``tokens`` tokens; None if the engine gives none.

    Raises InsufficientMemory where it is larger than ``spare_bytes`` allows.
    """
    size: int = llama.llama_state_seq_get_size(handle, sequence)
    check_spare(size, tokens, spare_bytes)
    state = np.empty(size, dtype=np.uint8)
    got = llama.llama_state_seq_get_data(handle, _address(state), size, sequence)
    return state if size and got == size else None


def check_spare(size: int, tokens: int, spare_bytes: Callable[[], int]) -> None:
    """Raises InsufficientMemory where ``size`` bytes are more than can be spared."""
    spare = spare_bytes()
    if size > spare:
        raise InsufficientMemory(
            f"A copy of the state of {tokens} tokens takes {size} bytes, for which there is no "
            f"memory now ({spare} can be spared). Free memory and try again.",
            metadata={"needed_bytes": size, "free_bytes": spare, "cause": "copy"},
        )


def put_state(handle: Any, sequence: int, state: State) -> bool:
    """Replace a sequence by a state; False where the engine doesn't take all of it, after which
    the sequence may hold a part.
    """
    taken = llama.llama_state_seq_set_data(handle, _address(state), state.nbytes, sequence)
    return bool(taken == state.nbytes)


def _address(state: State) -> Any:
    return state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
