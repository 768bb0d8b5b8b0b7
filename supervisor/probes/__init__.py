"""Probes: what a machine has, read from its drivers.

Each probe answers with readings and with notes in its driver's words. None of them raises, and
none reports zero for what it couldn't read. They know nothing of models or plans.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from modeld.shared.capacity import DeviceReading

_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")


@dataclass(frozen=True)
class ProbeReading:
    """What one probe saw: its devices, and what failed or wasn't found, in its driver's words.

    ``hidden`` are ids of devices that engines started from here don't see.
    """

    devices: tuple[DeviceReading, ...] = ()
    notes: tuple[str, ...] = ()
    hidden: frozenset[str] = frozenset()


def pci_id(text: str) -> str:
    """A PCI bus id as ``0000:01:00.0``: lower case, a domain of four digits; "" if it is none.

    Drivers write domains with four or eight digits, or leave out domain 0.
    """
    match = _PCI.fullmatch(text.strip().lower())
    if match is None:
        return ""
    domain = int(match[1] or "0", 16)
    return f"{domain:04x}:{match[2]}:{match[3]}.{match[4]}"
