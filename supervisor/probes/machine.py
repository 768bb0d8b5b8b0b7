"""The whole machine at one moment: the host, its accelerators, and which of them the engine uses.

Owns what is read live and what is kept, and the match between drivers' devices and the engine's.
Nothing here raises: what failed is a note.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from modeld.shared.capacity import DeviceKind, DeviceReading, MachineReading, MemorySnapshot
from modeld.shared.host_memory import UNKNOWN, host_memory
from modeld.shared.messages import EngineDevice
from modeld.supervisor.probes import ProbeReading, pci_id
from modeld.supervisor.probes.intel import read_intel
from modeld.supervisor.probes.nvidia import NvidiaProbe

log = logging.getLogger(__name__)

# Layers are placed on these. An "accel" (a BLAS library, say) works beside the CPU on its memory.
_PLACES = ("gpu", "igpu")


class _Nvidia(Protocol):
    def read(self) -> ProbeReading: ...
    def close(self) -> None: ...


class MachineProbe:
    """Reads this machine. Safe to use from any thread.

    The host and NVIDIA devices are read live each time. Intel's are listed by a process, once:
    what their drivers tell doesn't change while the machine runs; ``refresh`` lists them anew.
    """

    def __init__(
        self,
        host: Callable[[], MemorySnapshot] = host_memory,
        nvidia: _Nvidia | None = None,
        intel: Callable[[], ProbeReading] = read_intel,
    ) -> None:
        self._host = host
        self._nvidia = NvidiaProbe() if nvidia is None else nvidia
        self._list_intel = intel
        self._intel: ProbeReading | None = None
        self._intel_lock = threading.Lock()
        self._engine: tuple[EngineDevice, ...] = ()

    def read(self) -> MachineReading:
        """A reading. Blocks for milliseconds, the first one for a second or more: use a thread."""
        notes: list[str] = []
        try:
            host = self._host()
        except Exception as error:
            log.warning("the host's memory can't be read", exc_info=True)
            host = UNKNOWN
            notes.append(f"The host's memory can't be read: {error}.")
        else:
            if not host.known:
                notes.append("The host's memory can't be read; the daemon's log says why.")
        probed = [
            _guarded("NVIDIA devices", self._nvidia.read),
            _guarded("Intel devices", self._read_intel),
        ]
        notes += [note for reading in probed for note in reading.notes]
        devices, engine_notes = with_engine(
            [device for reading in probed for device in reading.devices],
            self._engine,
            frozenset().union(*(reading.hidden for reading in probed)),
        )
        return MachineReading(host, tuple(devices), notes=(*notes, *engine_notes))

    def refresh(self) -> None:
        """Let the next reading list Intel's devices anew."""
        with self._intel_lock:
            self._intel = None

    def attach_engine(self, devices: Sequence[EngineDevice]) -> None:
        """Take what the engine's worker said it can compute on; replaces what was said before."""
        self._engine = tuple(devices)

    def close(self) -> None:
        """Let go of the drivers. A later reading takes them up again."""
        self._nvidia.close()

    def _read_intel(self) -> ProbeReading:
        with self._intel_lock:
            if self._intel is None:
                self._intel = self._list_intel()
            return self._intel


def _guarded(what: str, read: Callable[[], ProbeReading]) -> ProbeReading:
    try:
        return read()
    except Exception as error:
        log.warning("%s can't be read", what, exc_info=True)
        return ProbeReading(notes=(f"{what} can't be read: {error or type(error).__name__}.",))


def with_engine(
    devices: Sequence[DeviceReading],
    engine: Iterable[EngineDevice],
    hidden: frozenset[str] = frozenset(),
) -> tuple[list[DeviceReading], list[str]]:
    """The devices, each with the engine's name for it where it has one; and notes.

    Matched by PCI bus id, else by a name that only one has on either side. Those that the engine
    uses come first, in its order; those that only it knows are added with what it told. The same
    device under a second name (of another of the engine's backends) is left out: its memory is
    there once.
    """
    places = [one for one in engine if one.kind in _PLACES]
    descriptions = Counter(one.description for one in places)
    used: dict[str, DeviceReading] = {}
    added: list[DeviceReading] = []
    order: list[str] = []
    notes: list[str] = []
    ids = {device.id for device in devices}
    for one in places:
        found = _on_bus(one, devices, hidden)
        if found is None and descriptions[one.description] == 1:
            found = _of_name(one, devices)
        if found is None:
            own = _own(one, ids)
            ids.add(own.id)
            added.append(own)
            order.append(own.id)
        elif found.id in used:
            first = used[found.id].engine_name
            notes.append(f"{one.name} is the same device as {first}, and isn't used beside it.")
        else:
            shared = found.shared_memory or one.kind == "igpu"
            used[found.id] = replace(found, engine_name=one.name, shared_memory=shared)
            order.append(found.id)
    named = used | {device.id: device for device in added}
    return [named[i] for i in order] + [one for one in devices if one.id not in used], notes


def _on_bus(
    one: EngineDevice, devices: Sequence[DeviceReading], hidden: frozenset[str]
) -> DeviceReading | None:
    bus = pci_id(one.pci)
    found = [device for device in devices if bus and device.pci == bus]
    if any(device.parent for device in found):
        # With MIG on, an engine computes on an instance, never on the card. Which one is told by
        # what is hidden from it, or by the profile in the name; else it isn't known.
        found = [device for device in found if device.parent and device.id not in hidden]
        if len(found) > 1:
            found = [device for device in found if device.name == one.description]
    return found[0] if len(found) == 1 else None


def _of_name(one: EngineDevice, devices: Sequence[DeviceReading]) -> DeviceReading | None:
    with_instances = {device.parent for device in devices}
    found = [d for d in devices if d.name == one.description and d.id not in with_instances]
    if len(found) != 1 or (found[0].pci and pci_id(one.pci)):  # the buses differ, or would match
        return None
    return found[0]


def _own(one: EngineDevice, taken: set[str]) -> DeviceReading:
    """A device that no probe knows, with the memory that the engine told when it started."""
    known = 0 < one.free_bytes <= one.total_bytes
    silent = not one.total_bytes and not one.free_bytes
    told = "memory as the engine told it when it started" if known else "memory: not told"
    return DeviceReading(
        id=one.name if one.name not in taken else f"engine:{one.name}",
        name=one.description or one.name,
        kind=DeviceKind.OTHER,
        total_bytes=max(0, one.total_bytes),
        free_bytes=one.free_bytes if known else 0,
        known=known,
        engine_name=one.name,
        pci=pci_id(one.pci),
        shared_memory=silent or one.kind == "igpu",
        note=f"only the engine lists it; {told}",
    )
