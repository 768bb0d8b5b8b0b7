"""Capability answers: yes, no or unknown, each with its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AnswerName = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Capability:
    name: str
    answer: AnswerName
    evidence: str


def parse_capability(name: str, text: str) -> Capability:
    """From a worker's ``"yes: evidence"`` form; anything else is unknown, kept as evidence."""
    head, _, evidence = text.partition(":")
    if head == "yes":
        return Capability(name, "yes", evidence.strip())
    if head == "no":
        return Capability(name, "no", evidence.strip())
    return Capability(name, "unknown", (evidence if head == "unknown" else text).strip())
