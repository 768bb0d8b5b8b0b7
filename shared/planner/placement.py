"""Which layers go to which accelerator, and whether what they cost fits there.

Pure arithmetic over budgets and costs. Knows no policy of windows and no words of a refusal.

The engine's rule (llama-model.cpp, load_tensors): a model of n blocks has n + 1 layers, the output
being the last. ``n_gpu_layers`` L puts the last L of them on accelerators, and the j-th of these
goes to the first whose cumulative share exceeds j / L; with counts of layers as shares that is
exact. KV and states of a layer live where it lives. The token embedding stays on the host.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from modeld.shared.capacity import Companions, DeviceReading, ModelFacts
from modeld.shared.planner.budget import Budget
from modeld.shared.planner.costs import Costs, WindowCosts
from modeld.shared.planner.kv_math import largest

MAX_CONTEXT_TOKENS = 1 << 24  # beyond every model's ceiling; the engine takes no more than 31 bits
FINE = 1024  # steps in which budgets are filled, to spread layers in proportion to them
HOST = "host"


@dataclass(frozen=True)
class Place:
    """One memory: its budget if what is reclaimable were given back, and as it is."""

    id: str
    name: str
    engine_name: str
    budget: Budget
    as_is: Budget


@dataclass(frozen=True)
class Part:
    """What a place holds of a model and of one context. Bytes; the output counts as a layer."""

    layers: int
    first: int  # -1: none
    weights: int
    kv: int
    compute: int

    @property
    def context(self) -> int:
        return self.kv + self.compute


@dataclass(frozen=True)
class Spread:
    """A placement of all layers: the host's part, and one of each accelerator."""

    gpu_layers: int
    parts: tuple[Part, ...]

    @property
    def tensor_split(self) -> tuple[float, ...]:
        """Shares as the engine takes them: layers of each accelerator."""
        return tuple(float(part.layers) for part in self.parts[1:]) if self.gpu_layers else ()

    @property
    def kv(self) -> int:
        return sum(part.kv for part in self.parts)

    @property
    def compute(self) -> int:
        return sum(part.compute for part in self.parts)

    @property
    def weights(self) -> int:
        return sum(part.weights for part in self.parts)


def usable(devices: Sequence[DeviceReading]) -> tuple[DeviceReading, ...]:
    """Accelerators that a model can be placed on, in the engine's order."""
    parents = {device.parent for device in devices if device.parent}
    return tuple(
        device
        for device in devices
        if device.known
        and device.engine_name
        and not device.shared_memory
        and device.id not in parents
    )


def unread(devices: Sequence[DeviceReading]) -> tuple[DeviceReading, ...]:
    """Accelerators that the engine can use, and whose memory could not be read."""
    return tuple(device for device in devices if device.engine_name and not device.known)


@lru_cache(maxsize=1024)
def engine_counts(layers: int, split: tuple[float, ...]) -> tuple[int, ...]:
    """How many of ``layers`` the engine gives each accelerator, in its float32 arithmetic.

    A share that is too small for any layer gets none. Raises ValueError without a share above 0.
    """
    total = 0.0
    ends = []
    for share in _scaled(split):
        total = _f32(total + _f32(share))
        ends.append(total)
    if not total > 0:
        raise ValueError("no share is above 0")
    ends = [_f32(end / total) for end in ends]
    counts = [0] * len(ends)
    for layer in range(layers):
        at = _f32(layer / layers)
        counts[next(i for i, end in enumerate(ends) if end > at)] += 1
    return tuple(counts)


def _scaled(split: tuple[float, ...]) -> tuple[float, ...]:
    """The same shares, by a power of two where their sum would be 0 or infinite in single
    precision: by that nothing else of the engine's arithmetic changes.
    """
    most = max(split, default=0.0)
    if 1e-30 <= most <= 1e30:
        return split
    exponent = math.frexp(most)[1]
    return tuple(math.ldexp(share, -exponent) for share in split)


def _f32(value: float) -> float:
    """Rounded to single precision, as the engine keeps its shares."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


class Layout:
    """Where the layers of one model may go on one machine.

    ``layers``: as many on accelerators, and no other number; None: all of them, or, with
    ``shed``, the most that fit. ``split``: shares of the accelerators, () to plan them.
    """

    def __init__(
        self,
        costs: Costs,
        host: Place,
        devices: tuple[Place, ...],
        *,
        layers: int | None = None,
        split: tuple[float, ...] = (),
        shed: bool = False,
    ) -> None:
        self.costs = costs
        self.host = host
        self.devices = devices
        self.split = split if any(share > 0 for share in split) else ()
        self.total = len(costs.shape_of) + 1  # with the output
        everything = self.total if devices else 0
        self.target = everything if layers is None else min(layers, everything)
        self.fixed = layers is not None or not devices
        self.shed = shed and not self.fixed
        facts = costs.facts
        weights, self.even = _layer_weights(facts, host.budget.companions)
        self._weights_before = list(accumulate(weights, initial=0))
        self._copied = facts.input_bytes if facts.tied_output and not self.even else 0
        self._adapters = -(-host.budget.companions.adapter_bytes // self.total)

    def with_places(
        self, host: Place, devices: tuple[Place, ...], *, shed: bool | None = None
    ) -> Layout:
        """The same with other budgets, or with another rule for shedding."""
        return Layout(
            self.costs,
            host,
            devices,
            layers=self.target if self.fixed else None,
            split=self.split,
            shed=self.shed if shed is None else shed,
        )

    # --- what a place costs ----------------------------------------------------------------------

    def _device_bytes(self, window: WindowCosts, first: int, stop: int, count: int) -> int:
        weights = self._weights_before[stop] - self._weights_before[first]
        working = window.working(first, stop, copies=len(self.devices) > 1)
        return weights + count * (window.kv_of(first, stop) + working)

    def _device_part(self, window: WindowCosts, first: int, stop: int) -> Part:
        if first >= stop:
            return Part(0, -1, 0, 0, 0)
        weights = self._weights_before[stop] - self._weights_before[first]
        working = window.working(first, stop, copies=len(self.devices) > 1)
        return Part(stop - first, first, weights, window.kv_of(first, stop), working)

    def _host_part(self, window: WindowCosts, gpu_layers: int) -> Part:
        facts = self.costs.facts
        if gpu_layers == 0:
            return Part(self.total, 0, facts.weights_bytes, window.kv, window.compute)
        stay = self.total - gpu_layers
        moved = self._weights_before[-1] - self._weights_before[stay]
        moved -= self._copied + gpu_layers * self._adapters
        weights = max(0, facts.weights_bytes - moved)
        compute = max(window.inputs(), window.working(0, stay, host=True))
        return Part(stay, 0 if stay else -1, weights, window.kv_of(0, stay), compute)

    def host_budget(self, part: Part, *, reclaim: bool = True) -> Budget:
        """The host's budget with what it holds of the model, and of the adapters, charged."""
        budget = self.host.budget if reclaim else self.host.as_is
        beside = budget.companions
        moved = (self.total - part.layers) * self._adapters
        adapters = max(0, beside.adapter_bytes - moved)
        return replace(
            budget, weights=part.weights, companions=replace(beside, adapter_bytes=adapters)
        )

    # --- whether it fits -------------------------------------------------------------------------

    def fit(self, count: int = 1, *, reclaim: bool = True) -> int:
        """The largest window of which ``count`` contexts fit; 0 where none does."""
        return largest(
            lambda tokens: self._boundaries(tokens, count, reclaim) is not None,
            self.costs.pad,
            MAX_CONTEXT_TOKENS,
        )

    def spread(
        self, tokens: int, count: int = 1, *, reclaim: bool = True, balanced: bool = True
    ) -> Spread | None:
        """Place ``count`` contexts of such a window; None where they don't fit."""
        counts = self._boundaries(tokens, count, reclaim)
        if counts is None:
            return None
        layers = sum(counts)
        window = self.costs.window(tokens)
        if balanced and len(self.devices) > 1 and layers and not self.split:
            caps = self._caps(reclaim)
            counts = self._balanced(window, count, caps, layers, FINE) or counts
        return self._build(window, counts)

    def holds(self, spread: Spread, count: int = 1, *, reclaim: bool = True) -> bool:
        """Whether ``count`` contexts fit as they are placed there."""
        return all(short <= 0 for short in self.shortages(spread, count, reclaim=reclaim))

    def shortages(self, spread: Spread, count: int, *, reclaim: bool = True) -> list[int]:
        """By place, the host first: bytes that are charged beyond what may be spent."""
        host, *parts = spread.parts
        budget = self.host_budget(host, reclaim=reclaim)
        return [count * host.context - budget.contexts] + [
            part.weights + count * part.context - cap if part.layers else 0
            for part, cap in zip(parts, self._caps(reclaim), strict=True)
        ]

    def attempt(self, tokens: int, count: int) -> Spread:
        """A placement to show where it doesn't fit: budgets overfilled in proportion."""
        window = self.costs.window(tokens)
        layers = self.target
        if self.shed or not layers:
            layers = self._most(window, count, self._caps(True), self.target)[1]
        if self.split and layers:
            return self._build(window, engine_counts(layers, self.split))
        if not layers:
            return self._build(window, (0,) * len(self.devices))
        caps = [max(1, cap) for cap in self._caps(True)]
        counts = self._balanced(window, count, caps, layers, FINE << 60)
        if counts is None:
            raise AssertionError("no budget is that small")
        return self._build(window, counts)

    def max_count(self, spread: Spread, most: int) -> int:
        """How many contexts fit as they are placed there, up to ``most``."""
        host, *parts = spread.parts
        found = most
        rooms = [(self.host_budget(host).contexts, host.context)]
        rooms += [
            (cap - part.weights, part.context)
            for part, cap in zip(parts, self._caps(True), strict=True)
        ]
        for room, each in rooms:
            if each:
                found = min(found, max(0, room) // each)
        return found

    def _caps(self, reclaim: bool) -> list[int]:
        return [(d.budget if reclaim else d.as_is).spendable for d in self.devices]

    def _boundaries(self, tokens: int, count: int, reclaim: bool) -> tuple[int, ...] | None:
        """Layers of each accelerator, or None where no allowed placement fits."""
        window, caps = self.costs.window(tokens), self._caps(reclaim)
        if self.split and self.target:
            return self._by_split(window, count, caps, reclaim)
        if self._hopeless(window, count, caps):
            return None
        counts, reached = self._most(window, count, caps, self.target)
        if reached < self.target and not self.shed:
            return None
        return counts if self._host_holds(window, count, reached, reclaim) else None

    def _hopeless(self, window: WindowCosts, count: int, caps: list[int]) -> bool:
        """Whether all accelerators together can't hold the weights and the KV that must go there:
        quick to see, and true of most windows that are tried.
        """
        if self.shed or not self.target:
            return False
        begin = self.total - self.target
        weights = self._weights_before[-1] - self._weights_before[begin]
        kv = window.kv if begin == 0 else 0
        return weights + count * kv > sum(max(0, cap) for cap in caps)

    def _by_split(
        self, window: WindowCosts, count: int, caps: list[int], reclaim: bool
    ) -> tuple[int, ...] | None:
        for layers in range(self.target, -1 if self.shed else self.target - 1, -1):
            counts = engine_counts(layers, self.split) if layers else (0,) * len(caps)
            stop = self.total
            fits = True
            for i in reversed(range(len(caps))):
                first = stop - counts[i]
                if first < stop:
                    fits = fits and self._device_bytes(window, first, stop, count) <= caps[i]
                stop = first
            if fits and self._host_holds(window, count, layers, reclaim):
                return counts
        return None

    def _host_holds(self, window: WindowCosts, count: int, gpu_layers: int, reclaim: bool) -> bool:
        part = self._host_part(window, gpu_layers)
        return count * part.context <= self.host_budget(part, reclaim=reclaim).contexts

    def _most(
        self, window: WindowCosts, count: int, caps: Sequence[int], target: int
    ) -> tuple[tuple[int, ...], int]:
        """The most of the last ``target`` layers that fit, from the output backwards.

        Each accelerator takes as many as it holds: what is left to those before it is then as
        little as can be, so that this finds a placement wherever there is one.
        """
        begin = self.total - target
        stop = self.total
        counts = [0] * len(caps)
        for i in reversed(range(len(caps))):
            low, high = begin, stop
            while low < high:
                middle = (low + high) // 2
                if self._device_bytes(window, middle, stop, count) <= caps[i]:
                    high = middle
                else:
                    low = middle + 1
            counts[i] = stop - high
            stop = high
            if stop == begin:
                break
        return tuple(counts), self.total - stop

    def _balanced(
        self, window: WindowCosts, count: int, caps: list[int], layers: int, most: int
    ) -> tuple[int, ...] | None:
        """Layers of each accelerator at the least common fill of their budgets, in 1/1024."""
        low, high = 1, most
        best = None
        while low <= high:
            middle = (low + high) // 2
            filled = [cap * middle // FINE for cap in caps]
            counts, reached = self._most(window, count, filled, layers)
            if reached == layers:
                best, high = counts, middle - 1
            else:
                low = middle + 1
        return best

    def _build(self, window: WindowCosts, counts: Sequence[int]) -> Spread:
        layers = sum(counts)
        first = self.total - layers
        parts = [self._host_part(window, layers)]
        for number in counts:
            parts.append(self._device_part(window, first, first + number))
            first += number
        return Spread(layers, tuple(parts))


def _layer_weights(facts: ModelFacts, companions: Companions) -> tuple[list[int], bool]:
    """Bytes of each layer's tensors where it is offloaded, the output last; whether that is the
    file's size spread evenly, because its tensors aren't known by layer.
    """
    blocks = sum(run.count for run in facts.layers)
    adapters = -(-companions.adapter_bytes // (blocks + 1))
    if len(facts.layer_weights) != blocks:
        spread = max(0, facts.weights_bytes - facts.input_bytes)
        return [-(-spread // (blocks + 1)) + adapters] * (blocks + 1), True
    output = facts.output_bytes + (facts.input_bytes if facts.tied_output else 0)
    return [own + adapters for own in (*facts.layer_weights, output)], False
