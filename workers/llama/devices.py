"""The devices that the linked engine can compute on, asked of its own registry.

Owns the calls into ggml that the binding doesn't wrap. Starts no computation and places nothing.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from modeld.shared.messages import EngineDevice
from modeld.workers.llama.native import libraries, llama, start

_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}  # enum ggml_backend_dev_type
ACCELERATORS = ("gpu", "igpu")  # kinds that layers can be placed on


class _Capabilities(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_bool)
        for name in ("async_", "host_buffer", "buffer_from_host_ptr", "events", "mmap_support")
    ]


class _Properties(ctypes.Structure):
    """struct ggml_backend_dev_props"""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", _Capabilities),
        ("spare", ctypes.c_byte * 64),  # for members that a later version may add
    ]


@functools.cache
def _function(name: str, restype: Any, *argtypes: Any) -> Any:
    """A function of whichever of the engine's libraries has it; AttributeError if none does."""
    for path in libraries():
        try:
            found = getattr(ctypes.CDLL(str(path)), name)
        except (AttributeError, OSError):
            continue
        found.restype, found.argtypes = restype, list(argtypes)
        return found
    raise AttributeError(f"the engine's libraries have no {name}")


def _registered() -> Iterator[tuple[int, _Properties]]:
    start()
    llama.llama_supports_gpu_offload()  # loads the backends where they are separate libraries
    count = _function("ggml_backend_dev_count", ctypes.c_size_t)()
    get = _function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    ask = _function(
        "ggml_backend_dev_get_props", None, ctypes.c_void_p, ctypes.POINTER(_Properties)
    )
    for index in range(count):
        handle = get(index)
        if handle:
            properties = _Properties()
            ask(handle, ctypes.byref(properties))
            yield handle, properties


def engine_devices() -> list[EngineDevice]:
    """Every device, in the engine's order, with its memory in bytes as read now."""
    return [
        EngineDevice(
            name=_text(properties.name),
            description=_text(properties.description),
            kind=_KINDS.get(properties.type, "other"),
            total_bytes=properties.memory_total,
            free_bytes=properties.memory_free,
            pci=_text(properties.device_id).lower(),
        )
        for _, properties in _registered()
    ]


def accelerators() -> dict[str, int]:
    """Handles of the devices that layers can be placed on, by engine name."""
    return {
        _text(properties.name): handle
        for handle, properties in _registered()
        if _KINDS.get(properties.type) in ACCELERATORS
    }


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")
