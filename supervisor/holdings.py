"""What the slots of one daemon hold on the host they share, so that each plans beside the others.

A reading of available memory counts mapped weights and what was promised and not touched yet as
free: only the slots know better. Knows no model, no plan and no worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Held:
    """One slot's, or several slots', bytes on the host."""

    total: int = 0
    untouched: int = 0  # of it, what a reading of available memory still counts as free

    def __add__(self, other: Held) -> Held:
        return Held(self.total + other.total, self.untouched + other.untouched)


class Holdings:
    """The slots, by backend. Each tells what it holds when it is asked."""

    def __init__(self) -> None:
        self._slots: dict[str, Callable[[], Held]] = {}

    def join(self, backend: str, held: Callable[[], Held]) -> None:
        self._slots[backend] = held

    def beside(self, backend: str) -> Held:
        """What all other slots hold now."""
        return sum((held() for name, held in self._slots.items() if name != backend), Held())
