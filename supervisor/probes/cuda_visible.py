"""Which NVIDIA devices CUDA_VISIBLE_DEVICES hides from engines that this process starts.

Owns the variable's grammar. A probe sees every card; the engine's own list is what decides where
something is placed, so what is said here explains and changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from modeld.shared.capacity import DeviceReading

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


def visible_devices(
    environ: Mapping[str, str], devices: Sequence[DeviceReading]
) -> dict[str, bool | None]:
    """By device id: seen by engines, hidden, or None where that can't be told from here.

    ``devices`` are cards in NVML's order and MIG instances. Entries are read up to the first that
    names nothing, as CUDA does. Indices count in CUDA's order, fastest card first, unless
    CUDA_DEVICE_ORDER says PCI_BUS_ID: with several cards, which one an index means isn't known.
    """
    value = environ.get(VARIABLE)
    if value is None:
        return {device.id: True for device in devices}
    cards = [device for device in devices if not device.parent]
    named: set[str] = set()
    indices: set[int] = set()
    for entry in (part.strip() for part in value.split(",")):
        if re.fullmatch(r"[0-9]{1,9}", entry) and int(entry) < len(cards):
            indices.add(int(entry))
            continue
        found = [d for d in devices if _is_named(d, entry)]
        if len(found) != 1:
            break
        named.add(found[0].id)
    seen: dict[str, bool | None] = {card.id: card.id in named for card in cards}
    seen |= _by_index(cards, indices, environ.get(ORDER, ""))
    seen |= {card.id: True for card in cards if card.id in named}
    for device in devices:
        if device.parent:
            # Of a card that is named as a whole, CUDA uses one instance, which it chooses.
            of_card = seen.get(device.parent, False)
            seen[device.id] = (
                True if device.id in named else (None if of_card is not False else False)
            )
    return seen


def _is_named(device: DeviceReading, entry: str) -> bool:
    """A UUID may be cut short as long as it names one device."""
    kind = "MIG-" if device.parent else "GPU-"
    return entry.startswith(kind) and len(entry) > len(kind) and device.id.startswith(entry)


def _by_index(
    cards: Sequence[DeviceReading], indices: set[int], order: str
) -> dict[str, bool | None]:
    if not indices:
        return {}
    if len(indices) == len(cards):
        return {card.id: True for card in cards}
    if order == "PCI_BUS_ID" and all(card.pci for card in cards):
        by_bus = sorted(cards, key=lambda card: card.pci)
        return {card.id: index in indices for index, card in enumerate(by_bus)}
    return {card.id: None for card in cards}


def visibility_note(environ: Mapping[str, str], seen: bool | None) -> str:
    """For one device; "" where it is seen."""
    value = f"{VARIABLE}={environ.get(VARIABLE, '')[:200]!r}"
    if seen is None:
        return (
            f"{value} doesn't tell whether engines see it: name its UUID there, or count in "
            f"bus order with {ORDER}=PCI_BUS_ID"
        )
    return "" if seen else f"hidden from engines by {value}"
