"""The devices that OpenVINO sees, as JSON: ``python -m modeld.workers.openvino.devices``.

Owns what is asked of the plugins, and keeps their words where one fails. Runs in a short-lived
process, since a plugin may crash or hang; judges nothing.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

GENERAL = ("FULL_DEVICE_NAME", "DEVICE_TYPE", "DEVICE_UUID", "DEVICE_PCI_INFO")
MEMORY = {
    "GPU": ("GPU_DEVICE_TOTAL_MEM_SIZE",),
    "NPU": ("NPU_DEVICE_TOTAL_MEM_SIZE", "NPU_DEVICE_ALLOC_MEM_SIZE"),
}


def listing() -> dict[str, Any]:
    """What is printed: the version, the devices with their properties, and what failed."""
    try:
        import openvino
    except ModuleNotFoundError as error:
        return {"missing": error.name == "openvino", "error": str(error)}
    except Exception as error:  # a library that it needs, say
        return {"error": words(error)}
    try:
        core = openvino.Core()
        names = [str(name) for name in core.available_devices]
    except Exception as error:
        return {"openvino": openvino.__version__, "error": words(error)}
    kinds = {name.partition(".")[0] for name in names}
    return {
        "openvino": openvino.__version__,
        "devices": [describe(core, name) for name in names],
        # A plugin that lists nothing says why when it is asked.
        "absent": {kind: _why_absent(core, kind) for kind in MEMORY if kind not in kinds},
    }


def describe(core: Any, name: str) -> dict[str, Any]:
    """A device's properties, and for each that can't be read the plugin's words."""
    properties: dict[str, int | str] = {}
    errors: dict[str, str] = {}
    for key in (*GENERAL, *MEMORY.get(name.partition(".")[0], ())):
        try:
            properties[key] = plain(core.get_property(name, key))
        except Exception as error:
            errors[key] = words(error)
    return {"name": name, "properties": properties, "errors": errors}


def plain(value: Any) -> int | str:
    """A property as JSON can hold it: sizes as numbers, bus ids as 0000:00:02.0, enums by name."""
    if isinstance(value, int):
        return int(value)
    if all(hasattr(value, part) for part in ("domain", "bus", "device", "function")):
        return f"{value.domain:04x}:{value.bus:02x}:{value.device:02x}.{value.function:x}"
    name = getattr(value, "name", None)
    return name.lower() if isinstance(name, str) else str(value)


def words(error: Exception) -> str:
    """The plugin's words, without the places in its source that come before them."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith("Exception from ")]
    return " ".join(told) or type(error).__name__


def _why_absent(core: Any, kind: str) -> str:
    for key in ("DEVICE_TYPE", "FULL_DEVICE_NAME"):  # the first is asked of the device itself
        try:
            core.get_property(kind, key)
        except Exception as error:
            return words(error)
    return "it lists no device"


def main() -> int:
    # Plugins may print. What they print must not stand in the answer.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    with answer:
        json.dump(listing(), answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
