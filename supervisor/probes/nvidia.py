"""NVIDIA devices by NVML: cards, MIG instances, their memory and the processes that hold it.

Owns the only import of ``pynvml`` and every word of NVML. What NVML doesn't answer is unknown,
with NVML's words; nothing here raises.

NVML is started once and kept, since a start takes long and wakes idle cards. Handles are looked up
for every reading: that is cheap, and a kept one would outlive a lost card or a changed MIG layout.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import psutil

from modeld.shared.capacity import DeviceKind, DeviceReading, DeviceUse
from modeld.supervisor.probes import ProbeReading, pci_id
from modeld.supervisor.probes.cuda_visible import VARIABLE, visibility_note, visible_devices

log = logging.getLogger(__name__)

# NVML's return codes, which its ABI fixes.
UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 1, 2, 3, 6
DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 9, 12, 13
GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, ARGUMENT_VERSION, UNKNOWN = 15, 16, 18, 25, 999
_NEEDS_RESTART = frozenset(
    {UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, UNKNOWN}
)
_NO_V2 = frozenset({INVALID_ARGUMENT, NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION})
_NO_MIG = frozenset({NOT_SUPPORTED, FUNCTION_NOT_FOUND})
_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE
_MAX_MIG = 64  # more than any card has: a bound on a number that a driver gives


class Nvml(Protocol):
    """What is used of the ``pynvml`` module. Its calls raise ``NVMLError``, with ``value``."""

    nvmlMemory_v2: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any) -> str: ...
    def nvmlDeviceGetName(self, handle: Any) -> str: ...
    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any: ...
    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any: ...
    def nvmlDeviceGetGpuInstanceId(self, handle: Any) -> int: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Any]: ...
    def nvmlSystemGetProcessName(self, pid: int) -> str: ...


def load_nvml() -> Nvml:
    """The real library's binding. Raises ImportError."""
    import pynvml

    return cast("Nvml", pynvml)


class NvidiaProbe:
    """Readings of every NVIDIA device that the driver lists. Safe to use from any thread.

    ``environ`` is what engines are started with.
    """

    def __init__(
        self, load: Callable[[], Nvml] = load_nvml, environ: Mapping[str, str] | None = None
    ) -> None:
        self._load = load
        self._environ = os.environ if environ is None else environ
        self._lock = threading.Lock()
        self._nvml: Nvml | None = None  # started

    def read(self) -> ProbeReading:
        """A live reading. Blocks for some milliseconds; the first one longer."""
        with self._lock:
            try:
                nvml = self._started()
                session = _Session(nvml)
                devices = session.devices()
            except _Failed as failure:
                self._stop()
                return ProbeReading(notes=(f"NVIDIA: {_explained(failure)}",))
            if session.codes & _NEEDS_RESTART:
                self._stop()
        if not devices:
            return ProbeReading(notes=("NVIDIA: the driver lists no device.",))
        return self._with_visibility(devices)

    def close(self) -> None:
        """Let go of the driver. A later reading starts NVML again."""
        with self._lock:
            self._stop()

    def _started(self) -> Nvml:
        if self._nvml is None:
            try:
                nvml = self._load()
            except Exception as error:  # an import may fail in any way
                raise _Failed(f"nvidia-ml-py can't be imported: {_words(error)}", 0) from None
            _call(nvml, "nvmlInit")
            self._nvml = nvml
        return self._nvml

    def _stop(self) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            with suppress(_Failed):  # it may be what has failed already
                _call(nvml, "nvmlShutdown")

    def _with_visibility(self, devices: list[DeviceReading]) -> ProbeReading:
        seen = visible_devices(self._environ, devices)
        noted = tuple(
            replace(device, note=_joined(device.note, visibility_note(self._environ, sees)))
            for device in devices
            for sees in (seen[device.id],)
        )
        hidden = [device.id for device in devices if seen[device.id] is False]
        if not hidden:
            return ProbeReading(noted)
        which = "every NVIDIA device" if len(hidden) == len(devices) else ", ".join(hidden)
        value = self._environ.get(VARIABLE, "")[:200]
        note = f"{VARIABLE}={value!r} hides from engines: {which}."
        return ProbeReading(noted, (note,), frozenset(hidden))


class _Failed(Exception):
    """A call that failed, with NVML's words and its code (0: not NVML's failure)."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.words, self.code = words, code


@dataclass(frozen=True)
class _Memory:
    total_bytes: int = 0
    free_bytes: int = 0
    known: bool = False
    unsupported: bool = False
    note: str = ""


class _Session:
    """One reading. ``codes`` gathers NVML's failures, for the probe to judge afterwards."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self.codes: set[int] = set()

    def devices(self) -> list[DeviceReading]:
        """Cards in NVML's order, each followed by its MIG instances."""
        found: list[DeviceReading] = []
        for index in range(self._ask("nvmlDeviceGetCount")):
            found += self._card(index)
        return found

    def _ask(self, name: str, *args: Any, **keywords: Any) -> Any:
        try:
            return _call(self._nvml, name, *args, **keywords)
        except _Failed as failure:
            self.codes.add(failure.code)
            raise

    def _card(self, index: int) -> list[DeviceReading]:
        card = DeviceReading(
            id=f"nvidia:{index}", name=f"NVIDIA device {index}", kind=DeviceKind.NVIDIA, known=False
        )
        try:
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
        except _Failed as failure:
            return [replace(card, note=f"NVML: {failure.words}")]
        notes: list[str] = []
        card = replace(
            card,
            id=self._text("nvmlDeviceGetUUID", handle, notes) or card.id,
            name=self._text("nvmlDeviceGetName", handle, notes) or card.name,
            pci=self._pci(handle, notes),
        )
        mig, instances = self._mig(handle, card, notes)
        # What instances hold isn't told of the card again: the same bytes would be seen twice.
        uses = () if mig else self._uses(handle, notes)
        memory = self._memory(handle)
        shared = memory.unsupported and not mig
        if shared:
            notes.append("NVML tells no memory of its own: it uses the host's")
        return [_filled(card, memory, uses, notes, shared), *instances]

    def _mig(
        self, handle: Any, card: DeviceReading, notes: list[str]
    ) -> tuple[bool, list[DeviceReading]]:
        try:
            current, pending = self._ask("nvmlDeviceGetMigMode", handle)
        except _Failed as failure:
            if failure.code not in _NO_MIG:
                notes.append(f"MIG mode: {failure.words}")
            return False, []
        if pending != current:
            notes.append(f"MIG will be {'on' if pending else 'off'} after the next reset")
        if not current:
            return False, []
        instances = self._instances(handle, card, notes)
        what = f"its {len(instances)} instances" if instances else "nothing, for it has no instance"
        notes.append(f"MIG is on: engines see {what}, and not the card itself")
        return True, instances

    def _instances(self, handle: Any, card: DeviceReading, notes: list[str]) -> list[DeviceReading]:
        found: list[DeviceReading] = []
        slices: dict[int, str] = {}  # GPU instance → the first device in it
        try:
            count = min(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle), _MAX_MIG)
        except _Failed as failure:
            notes.append(f"MIG instances: {failure.words}")
            return []
        for index in range(count):
            try:
                one = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
            except _Failed as failure:
                if failure.code != NOT_FOUND:  # a place without an instance
                    notes.append(f"MIG instance {index}: {failure.words}")
                continue
            own: list[str] = []
            instance = replace(
                card,
                id=self._text("nvmlDeviceGetUUID", one, own) or f"{card.id}/mig:{index}",
                name=self._text("nvmlDeviceGetName", one, own) or f"{card.name} MIG {index}",
                parent=card.id,
            )
            with suppress(_Failed):
                first = slices.setdefault(self._ask("nvmlDeviceGetGpuInstanceId", one), instance.id)
                if first != instance.id:
                    own.append(f"its memory is the same as that of {first}")
            uses = self._uses(one, own, mig=True)
            found.append(_filled(instance, self._memory(one), uses, own, shared=False))
        return found

    def _memory(self, handle: Any) -> _Memory:
        try:
            try:
                info = self._ask("nvmlDeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2)
            except _Failed as failure:
                if failure.code not in _NO_V2:
                    raise
                info = self._ask("nvmlDeviceGetMemoryInfo", handle)
            total, free, used = int(info.total), int(info.free), int(info.used)
            # Version 2 tells what the driver keeps for itself: never free for anyone.
            free = min(free, max(0, total - used - int(getattr(info, "reserved", 0))))
        except _Failed as failure:
            return _Memory(
                unsupported=failure.code == NOT_SUPPORTED, note=f"memory: {failure.words}"
            )
        except (AttributeError, TypeError, ValueError) as error:
            return _Memory(note=f"memory: {_words(error)}")
        if total <= 0 or free > total:
            return _Memory(note=f"memory: NVML tells {total} bytes in all and {free} free")
        return _Memory(total, free, known=True)

    def _uses(self, handle: Any, notes: list[str], mig: bool = False) -> tuple[DeviceUse, ...]:
        """Processes by pid. One that computes and draws is listed twice by NVML, with one use."""
        held: dict[int, int] = {}
        untold = 0
        for kind in ("Compute", "Graphics"):
            try:
                listed = self._ask(f"nvmlDeviceGet{kind}RunningProcesses", handle)
            except _Failed as failure:
                if not (mig and kind == "Graphics" and failure.code in _NO_MIG):
                    notes.append(f"{kind.lower()} processes: {failure.words}")
                continue
            for process in listed:
                pid, told = int(process.pid), process.usedGpuMemory
                if told is None or not 0 <= int(told) < _NOT_AVAILABLE:
                    untold += pid not in held
                    told = 0
                held[pid] = max(held.get(pid, 0), int(told))
        if untold:
            notes.append(f"the driver doesn't tell what {untold} of {len(held)} processes hold")
        return tuple(DeviceUse(pid, size, self._process_name(pid)) for pid, size in held.items())

    def _process_name(self, pid: int) -> str:
        try:
            return _plain(_call(self._nvml, "nvmlSystemGetProcessName", pid))
        except _Failed:
            with suppress(psutil.Error, OSError, ValueError):
                return str(psutil.Process(pid).name())
            return ""

    def _text(self, name: str, handle: Any, notes: list[str]) -> str:
        try:
            return _plain(self._ask(name, handle))
        except _Failed as failure:
            notes.append(f"{name.removeprefix('nvmlDeviceGet').lower()}: {failure.words}")
            return ""

    def _pci(self, handle: Any, notes: list[str]) -> str:
        try:
            return pci_id(_plain(self._ask("nvmlDeviceGetPciInfo", handle).busId))
        except _Failed as failure:
            notes.append(f"PCI bus: {failure.words}")
            return ""


def _filled(
    device: DeviceReading,
    memory: _Memory,
    uses: tuple[DeviceUse, ...],
    notes: list[str],
    shared: bool,
) -> DeviceReading:
    return replace(
        device,
        total_bytes=memory.total_bytes,
        free_bytes=memory.free_bytes,
        known=memory.known,
        shared_memory=shared,
        processes=uses,
        note=_joined(memory.note, *notes),
    )


def _call(nvml: Nvml, name: str, *args: Any, **keywords: Any) -> Any:
    """Whatever goes wrong in the binding or the driver is one failure. Raises _Failed."""
    try:
        return getattr(nvml, name)(*args, **keywords)
    except Exception as error:  # NVMLError, a function that an older binding lacks, bad text
        code = getattr(error, "value", 0)
        raise _Failed(_words(error), code if isinstance(code, int) else 0) from None


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _explained(failure: _Failed) -> str:
    if failure.code == LIBRARY_NOT_FOUND:
        return f"{failure.words}: no driver is installed, or this process can't see it."
    return f"{failure.words}."


def _plain(text: str | bytes) -> str:
    return (text.decode(errors="replace") if isinstance(text, bytes) else str(text)).strip()


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)
