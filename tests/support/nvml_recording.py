"""A stand-in for the ``pynvml`` module that answers from recorded tables.

It has the module's functions, answers with its shapes, and fails with its own error classes, so
that the words in notes are NVML's. Nothing of it needs a driver.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30
MIB = 1 << 20

NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
DRIVER_NOT_LOADED = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
LIBRARY_NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
FUNCTION_NOT_FOUND = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND
GPU_IS_LOST = pynvml.NVML_ERROR_GPU_IS_LOST
UNINITIALIZED = pynvml.NVML_ERROR_UNINITIALIZED


@dataclass
class RecordedProcess:
    pid: int
    bytes: int | None  # None: the driver doesn't tell


@dataclass
class RecordedDevice:
    """One card or MIG instance. ``failures`` maps a function's name to the code it fails with."""

    uuid: str
    name: str
    bus: str = ""
    total: int = 0
    reserved: int = 0
    used: int = 0
    compute: list[RecordedProcess] = field(default_factory=list)
    graphics: list[RecordedProcess] = field(default_factory=list)
    mig: list[int] | None = None  # current and pending mode; None: this card has no MIG
    instances: list[RecordedDevice | None] = field(default_factory=list)  # None: an empty place
    gpu_instance: int = 0
    failures: dict[str, int] = field(default_factory=dict)


class NvmlRecording:
    """Stands in for the module. ``calls`` counts what was asked."""

    nvmlMemory_v2 = pynvml.nvmlMemory_v2
    NVMLError = pynvml.NVMLError

    def __init__(
        self, *devices: RecordedDevice, init_fails: int = 0, names: dict[int, str] | None = None
    ) -> None:
        self.cards = list(devices)
        self.init_fails = init_fails
        self.names = names or {}
        self.calls: Counter[str] = Counter()
        self.started = 0

    def _answer(self, name: str, device: RecordedDevice | None = None) -> None:
        self.calls[name] += 1
        if name != "nvmlInit" and not self.started:
            raise pynvml.NVMLError(UNINITIALIZED)
        if device is None:
            return
        if name in device.failures:
            raise pynvml.NVMLError(device.failures[name])

    def nvmlInit(self) -> None:
        self._answer("nvmlInit")
        if self.init_fails:
            raise pynvml.NVMLError(self.init_fails)
        self.started += 1

    def nvmlShutdown(self) -> None:
        self._answer("nvmlShutdown")
        self.started -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._answer("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> RecordedDevice:
        self._answer("nvmlDeviceGetHandleByIndex", self.cards[index])
        return self.cards[index]

    def nvmlDeviceGetUUID(self, handle: RecordedDevice) -> str:
        self._answer("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def nvmlDeviceGetName(self, handle: RecordedDevice) -> str:
        self._answer("nvmlDeviceGetName", handle)
        return handle.name

    def nvmlDeviceGetPciInfo(self, handle: RecordedDevice) -> Any:
        self._answer("nvmlDeviceGetPciInfo", handle)
        return SimpleNamespace(busId=handle.bus.encode())

    def nvmlDeviceGetMemoryInfo(self, handle: RecordedDevice, version: int | None = None) -> Any:
        name = "nvmlDeviceGetMemoryInfo"
        self._answer(f"{name}_v2" if version else name, handle)
        free = handle.total - handle.reserved - handle.used
        if version:
            return SimpleNamespace(
                total=handle.total, reserved=handle.reserved, free=free, used=handle.used
            )
        return SimpleNamespace(total=handle.total, free=free, used=handle.used + handle.reserved)

    def nvmlDeviceGetMigMode(self, handle: RecordedDevice) -> list[int]:
        self._answer("nvmlDeviceGetMigMode", handle)
        if handle.mig is None:
            raise pynvml.NVMLError(NOT_SUPPORTED)
        return list(handle.mig)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: RecordedDevice) -> int:
        self._answer("nvmlDeviceGetMaxMigDeviceCount", handle)
        return len(handle.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(
        self, handle: RecordedDevice, index: int
    ) -> RecordedDevice:
        self._answer("nvmlDeviceGetMigDeviceHandleByIndex", handle)
        found = handle.instances[index]
        if found is None:
            raise pynvml.NVMLError(NOT_FOUND)
        return found

    def nvmlDeviceGetGpuInstanceId(self, handle: RecordedDevice) -> int:
        self._answer("nvmlDeviceGetGpuInstanceId", handle)
        return handle.gpu_instance

    def nvmlDeviceGetComputeRunningProcesses(self, handle: RecordedDevice) -> list[Any]:
        return self._processes("nvmlDeviceGetComputeRunningProcesses", handle, handle.compute)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: RecordedDevice) -> list[Any]:
        return self._processes("nvmlDeviceGetGraphicsRunningProcesses", handle, handle.graphics)

    def _processes(
        self, name: str, handle: RecordedDevice, table: list[RecordedProcess]
    ) -> list[Any]:
        self._answer(name, handle)
        return [SimpleNamespace(pid=one.pid, usedGpuMemory=one.bytes) for one in table]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        self._answer("nvmlSystemGetProcessName")
        if pid not in self.names:
            raise pynvml.NVMLError(NOT_FOUND)
        return self.names[pid]


def card_24gb() -> RecordedDevice:
    return RecordedDevice(
        uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        name="NVIDIA GeForce RTX 4090",
        bus="00000000:01:00.0",
        total=24564 * MIB,
        reserved=400 * MIB,
        used=1164 * MIB,
        compute=[RecordedProcess(4_000_101, 900 * MIB)],
        graphics=[RecordedProcess(4_000_102, 264 * MIB)],
    )


def card_6gb() -> RecordedDevice:
    return RecordedDevice(
        uuid="GPU-1b2c3d4e-0001-0002-0003-000000000004",
        name="NVIDIA GeForce RTX 3060 Laptop GPU",
        bus="00000000:C1:00.0",
        total=6144 * MIB,
        reserved=200 * MIB,
        used=0,
    )


def a100_with_mig() -> RecordedDevice:
    def instance(number: int, name: str, total: int, used: int) -> RecordedDevice:
        return RecordedDevice(
            uuid=f"MIG-5c6db8bc-0000-0000-0000-00000000000{number}",
            name=f"NVIDIA A100-SXM4-40GB MIG {name}",
            total=total,
            used=used,
            gpu_instance=number,
            failures={
                "nvmlDeviceGetPciInfo": NOT_SUPPORTED,
                "nvmlDeviceGetGraphicsRunningProcesses": NOT_SUPPORTED,
            },
        )

    first = instance(1, "3g.20gb", 20096 * MIB, 512 * MIB)
    first.compute = [RecordedProcess(4_000_201, 500 * MIB)]
    return RecordedDevice(
        uuid="GPU-a1000000-0000-0000-0000-000000000001",
        name="NVIDIA A100-SXM4-40GB",
        bus="00000000:3B:00.0",
        total=40960 * MIB,
        reserved=571 * MIB,
        used=600 * MIB,
        mig=[1, 1],
        instances=[first, None, instance(2, "1g.5gb", 4864 * MIB, 0)],
        compute=[RecordedProcess(4_000_201, 500 * MIB)],
    )


def unified_memory_card() -> RecordedDevice:
    """A machine whose GPU uses the host's memory: NVML answers neither memory query."""
    return RecordedDevice(
        uuid="GPU-2dee1e25-b3b5-007e-2b55-79f2d0f2ebe5",
        name="NVIDIA GB10",
        bus="0000000F:01:00.0",
        failures={
            "nvmlDeviceGetMemoryInfo_v2": NOT_SUPPORTED,
            "nvmlDeviceGetMemoryInfo": NOT_SUPPORTED,
        },
    )
