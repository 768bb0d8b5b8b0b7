"""What the engine's log lines say of memory: buffers by device, KV summaries, layers offloaded.

Pure text in, numbers out. The lines give MiB with two decimals, so that a number from here is
within half a hundredth of a MiB, a line. Knows no engine handle and no policy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from modeld.shared.messages import PlacedOut

HOST = "CPU"
_MIB = 1024 * 1024
_HALF_UNIT = 0.005 * _MIB  # bytes that two decimals may hide
# A summary is computed in 32-bit floats before it is printed.
_FLOAT_STEP = 2.0**-23
_MODEL = re.compile(r": +(\S+) +model buffer size *= *([\d.]+) MiB")
_KV = re.compile(r": +(\S+) +(?:KV|RS|DSV4 .*state) buffer size *= *([\d.]+) MiB")
_COMPUTE = re.compile(r": +(\S+) +(?:compute|output) buffer size *= *([\d.]+) MiB")
_KV_SUMMARY = re.compile(
    r"^llama_(?:kv_cache|memory_recurrent|dsv4)\w*: (?:.*, )?size *= *([\d.]+) MiB"
)
_OFFLOADED = re.compile(r": offloaded (\d+)/\d+ layers to GPU")
# Buffer types are named after their device, and how the memory was had: CPU_Mapped, CPU_REPACK.
_HOW = re.compile(r"_(?:Mapped|Private|REPACK|Split)$")
_NO_MEMORY = re.compile(r"bad_alloc|(?:fail\w*|unable|cannot) to allocate|out of memory", re.I)


@dataclass(frozen=True)
class Reported:
    """Bytes that lines of one kind add up to, as near as they are printed."""

    bytes: int
    lines: int

    @property
    def at_most(self) -> int:
        """The bytes with every line's rounding against us."""
        return self.bytes + math.ceil(self.lines * _HALF_UNIT)

    def agrees_with(self, planned: int) -> bool:
        """Whether ``planned`` bytes could have been printed so."""
        hidden = 1.002 * _HALF_UNIT * max(self.lines, 1) + self.bytes * _FLOAT_STEP
        return abs(self.bytes - planned) <= hidden


def device_of(buffer_type: str) -> str:
    """The engine's name of the device that a buffer type is of; pinned memory is the host's."""
    if buffer_type.endswith("_Host"):
        return HOST
    return _HOW.sub("", buffer_type)


def weights_by_device(lines: Iterable[str]) -> dict[str, int]:
    """Bytes of weights, after a load. Mapped files count where they are mapped: on the host."""
    return _by_device(_MODEL, lines)


def kv_by_device(lines: Iterable[str]) -> dict[str, int]:
    """Bytes of KV and recurrent states that a context allocated."""
    return _by_device(_KV, lines)


def compute_by_device(lines: Iterable[str]) -> dict[str, int]:
    """Bytes of a context's compute and output buffers."""
    return _by_device(_COMPUTE, lines)


def kv_reported(lines: Iterable[str]) -> Reported:
    """KV and recurrent states as allocated, in all."""
    return _sum(match[2] for line in lines if (match := _KV.search(line)))


def kv_summarised(lines: Iterable[str]) -> Reported:
    """KV and recurrent states by each memory's own summary, which a dry run prints too (where the
    buffer lines say 0).
    """
    return _sum(match[1] for line in lines if (match := _KV_SUMMARY.search(line)))


def settled_kv_bytes(planned: int, reported: Reported) -> int:
    """The computed bytes where the engine's report agrees at its precision; else the report's,
    rounded against us. ``planned`` is 0 where no formula knows it.
    """
    if planned and reported.agrees_with(planned):
        return planned
    return reported.at_most


def offloaded_layers(lines: Iterable[str]) -> int:
    """Layers on accelerators, the output counted as one; 0 where the engine has none."""
    found = [int(match[1]) for line in lines if (match := _OFFLOADED.search(line))]
    return found[-1] if found else 0


def lacks_memory(words: str) -> bool:
    """Whether the engine's words say that an allocation failed."""
    return _NO_MEMORY.search(words) is not None


def placed(
    *,
    weights: Mapping[str, int] | None = None,
    kv: Mapping[str, int] | None = None,
    compute: Mapping[str, int] | None = None,
) -> list[PlacedOut]:
    """One row a device, the host's first, then as the engine named them."""
    weights, kv, compute = weights or {}, kv or {}, compute or {}
    names = dict.fromkeys([HOST, *weights, *kv, *compute])
    return [
        PlacedOut(
            device=name,
            weights_bytes=weights.get(name, 0),
            kv_bytes=kv.get(name, 0),
            compute_bytes=compute.get(name, 0),
        )
        for name in names
    ]


def scaled_to(total: int, by_device: Mapping[str, int]) -> dict[str, int]:
    """The same split, but adding up to ``total``: what rounding hid goes to the largest part."""
    if not by_device:
        return {HOST: total} if total else {}
    largest = max(by_device, key=lambda name: by_device[name])
    parts = dict(by_device)
    parts[largest] += total - sum(by_device.values())
    return parts


def _by_device(pattern: re.Pattern[str], lines: Iterable[str]) -> dict[str, int]:
    found: dict[str, float] = {}
    for line in lines:
        if match := pattern.search(line):
            device = device_of(match[1])
            found[device] = found.get(device, 0.0) + float(match[2])
    return {device: round(mebibytes * _MIB) for device, mebibytes in found.items()}


def _sum(mebibytes: Iterable[str]) -> Reported:
    values = [float(text) for text in mebibytes]
    return Reported(round(math.fsum(values) * _MIB), len(values))
