"""Intel GPUs and NPUs by OpenVINO, asked in a short-lived process.

Owns the process, its time limit and what its answer means. The daemon itself never loads OpenVINO:
a plugin that crashes or hangs costs a note.
"""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import msgspec

from modeld.shared.capacity import DeviceKind, DeviceReading
from modeld.supervisor.exits import signal_name
from modeld.supervisor.probes import ProbeReading, pci_id

log = logging.getLogger(__name__)

TIMEOUT_S = 60.0  # a first start compiles nothing, but may load large plugins from a cold disk
MAX_ANSWER_BYTES = 1 << 20
COMMAND = (sys.executable, "-P", "-m", "modeld.workers.openvino.devices")
_KINDS = {"GPU": DeviceKind.INTEL_GPU, "NPU": DeviceKind.INTEL_NPU}
_UUID = re.compile(r"(?=.*[1-9a-fA-F])[0-9a-fA-F-]{8,64}")  # not all zero


class _Device(msgspec.Struct):
    name: str
    properties: dict[str, int | str] = {}
    errors: dict[str, str] = {}


class _Answer(msgspec.Struct):
    openvino: str = ""
    missing: bool = False
    error: str = ""
    devices: list[_Device] = []
    absent: dict[str, str] = {}


def read_intel(command: Sequence[str] = COMMAND, timeout_s: float = TIMEOUT_S) -> ProbeReading:
    """Spawn the listing and read its answer. Blocks, a second or more; use a thread."""
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _failed(f"listing its devices took longer than {timeout_s:g} s")
    except OSError as error:
        return _failed(f"listing its devices can't be started: {error}")
    if done.returncode != 0:
        log.warning("the OpenVINO listing failed: %s", done.stderr[-2000:].decode(errors="replace"))
        how = signal_name(done.returncode) or f"exit code {done.returncode}"
        return _failed(f"listing its devices failed ({how})")
    return parse(done.stdout)


def parse(answer: bytes) -> ProbeReading:
    """What a listing's output means. An answer that can't be understood is a note."""
    if len(answer) > MAX_ANSWER_BYTES:
        return _failed(f"the listing gave {len(answer)} bytes, which can't be an answer")
    try:
        told = msgspec.json.decode(answer, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _failed(f"the listing gave no usable answer: {error}")
    if told.missing:
        return ProbeReading(
            notes=(
                "Intel devices aren't looked for: OpenVINO isn't installed "
                "(pip install 'modeld[openvino]').",
            )
        )
    if told.error:
        return _failed(told.error)
    uuids = Counter(_uuid(device) for device in told.devices)
    devices = tuple(
        _reading(
            device, kind, uuid if (uuid := _uuid(device)) and uuids[uuid] == 1 else device.name
        )
        for device in told.devices
        if (kind := _KINDS.get(device.name.partition(".")[0])) is not None
    )
    notes = tuple(f"Intel {name}: {_ended(why)}" for name, why in told.absent.items())
    return ProbeReading(devices, notes)


def _reading(device: _Device, kind: DeviceKind, device_id: str) -> DeviceReading:
    notes = [f"{key}: {why}" for key, why in device.errors.items()]
    prefix = device.name.partition(".")[0]
    total = _size(device, f"{prefix}_DEVICE_TOTAL_MEM_SIZE")
    # Only the NPU's driver tells what is taken; a GPU's tells what this one process has.
    taken = _size(device, "NPU_DEVICE_ALLOC_MEM_SIZE") if kind is DeviceKind.INTEL_NPU else None
    free = total - taken if total is not None and taken is not None else None
    if kind is DeviceKind.INTEL_GPU:
        notes.append("the driver doesn't tell how much of its memory is free")
    elif free is not None and free < 0:
        notes.append(f"the driver tells {total} bytes in all and {taken} taken")
    known = bool(total) and free is not None and free >= 0
    return DeviceReading(
        id=device_id,
        name=str(device.properties.get("FULL_DEVICE_NAME", "")) or device.name,
        kind=kind,
        total_bytes=total or 0,
        free_bytes=free if known and free is not None else 0,
        known=known,
        pci=pci_id(str(device.properties.get("DEVICE_PCI_INFO", ""))),
        shared_memory=device.properties.get("DEVICE_TYPE") == "integrated",
        note="; ".join(notes),
    )


def _size(device: _Device, key: str) -> int | None:
    value = device.properties.get(key)
    return value if isinstance(value, int) and value >= 0 else None


def _uuid(device: _Device) -> str:
    """Lower case; "" where the plugin tells none. Its form is whatever the driver's is."""
    uuid = str(device.properties.get("DEVICE_UUID", "")).lower()
    return uuid if _UUID.fullmatch(uuid) else ""


def _failed(why: str) -> ProbeReading:
    return ProbeReading(notes=(f"OpenVINO: {_ended(why)}",))


def _ended(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
