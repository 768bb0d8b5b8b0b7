"""Statistics over interleaved runs, rows with their targets, and how a failure becomes a row.

Knows nothing of daemons, engines or how a report looks.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

RESAMPLES = 10_000
CONFIDENCE = 0.95
TARGET_PAIRS = 15  # fewer runs than these are no verdict on a target

Name = TypeVar("Name", bound=str)
Path = Literal["product", "engine control", "microbenchmark"]


class RunFailed(Exception):
    """A run that measured nothing: no tokens, other tokens than asked for, other counts."""


def require(holds: bool, what: str) -> None:
    """Raises RunFailed: what was to be measured didn't happen."""
    if not holds:
        raise RunFailed(what)


def tokens_a_second(tokens: int, seconds: float) -> float:
    """Raises RunFailed for a run that made nothing: it is never a fast one."""
    require(tokens > 0, f"it made {tokens} tokens")
    require(seconds > 0, f"it took {seconds} s")
    return tokens / seconds


# --- statistics ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def bootstrap(samples: Sequence[float], *, seed: int = 1, resamples: int = RESAMPLES) -> Interval:
    """The interval of the median by the percentile method. Raises RunFailed without samples."""
    require(bool(samples), "it has no samples")
    median = statistics.median(samples)
    if len(samples) == 1:
        return Interval(median, median, median)
    draw = random.Random(seed)
    size = len(samples)
    medians = sorted(statistics.median(draw.choices(samples, k=size)) for _ in range(resamples))
    tail = (1 - CONFIDENCE) / 2
    low = medians[int(tail * resamples)]
    high = medians[min(resamples - 1, int((1 - tail) * resamples))]
    return Interval(median, low, high)


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Pair by pair. Raises RunFailed unless every run has its partner."""
    _require_pairs(above, below)
    return [a / b for a, b in zip(above, below, strict=True)]


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Pair by pair. Raises RunFailed unless every run has its partner."""
    _require_pairs(left, right)
    return [a - b for a, b in zip(left, right, strict=True)]


def _require_pairs(left: Sequence[float], right: Sequence[float]) -> None:
    require(len(left) == len(right), f"{len(left)} runs on one side, {len(right)} on the other")


def interleaved(names: Sequence[Name], rounds: int) -> Iterator[tuple[int, Name]]:
    """ABC CBA ABC …: (round, name), so that a drift of the machine falls on all alike."""
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            yield number, name


# --- rows ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Met if the median's interval reaches ``limit``, from above or from below."""

    kind: Literal["at most", "at least"]
    limit: float

    def met_by(self, interval: Interval) -> bool:
        if self.kind == "at most":
            return interval.low <= self.limit
        return interval.high >= self.limit

    def covers(self, value: float) -> bool:
        return value <= self.limit if self.kind == "at most" else value >= self.limit

    def worst(self, samples: Sequence[float]) -> float:
        return max(samples) if self.kind == "at most" else min(samples)


@dataclass(frozen=True)
class Spec:
    """What a row measures, by which path, in which unit."""

    name: str
    title: str
    path: Path
    unit: str
    target: Target | None = None


@dataclass(frozen=True)
class Row:
    """One measurement, or the failure of one."""

    spec: Spec
    samples: tuple[float, ...] = ()
    interval: Interval | None = None
    note: str = ""
    error: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def worst(self) -> float | None:
        """The sample farthest on the target's wrong side; the largest where there is none."""
        if not self.samples:
            return None
        return self.spec.target.worst(self.samples) if self.spec.target else max(self.samples)

    @property
    def verdict(self) -> str:
        """``failed``, ``met``, ``missed``, either with ``(N runs)`` if too few, or ``""``."""
        if self.error or self.interval is None:
            return "failed"
        target = self.spec.target
        if target is None:
            return ""
        word = "met" if target.met_by(self.interval) else "missed"
        runs = len(self.samples)
        return word if runs >= TARGET_PAIRS else f"{word} ({runs} run{'s' * (runs != 1)})"


@dataclass
class Book:
    """The rows of one run of the suite, in the order in which they were measured."""

    rows: list[Row] = field(default_factory=list)
    quiet: bool = False
    began_s: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return any(row.failed for row in self.rows)

    def say(self, text: str) -> None:
        """Progress, for people."""
        if not self.quiet:
            spent_s = time.monotonic() - self.began_s
            print(f"[{spent_s:7.1f} s] {text}", file=sys.stderr, flush=True)

    def record(self, spec: Spec, samples: Sequence[float], note: str = "") -> Row:
        """A measured row. Raises RunFailed without samples."""
        row = Row(spec, tuple(samples), bootstrap(samples), note)
        self.rows.append(row)
        median = row.interval.median if row.interval else 0.0
        self.say(f"{spec.name}: {median:.4g} {spec.unit} {row.verdict}")
        return row

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """What breaks outside of any measurement fails the case, and the next one goes on."""
        self.say(f"== {name}")
        try:
            yield
        except Exception as caught:
            self._fail(Spec(name, f"the case {name!r}", "product", ""), caught)

    @contextmanager
    def expecting(self, *specs: Spec) -> Iterator[None]:
        """What the block doesn't record, because it failed or forgot, becomes a failed row."""
        error: Exception = RunFailed("it was not measured")
        try:
            yield
        except Exception as caught:  # a failure is a row, and the rest goes on
            error = caught
        recorded = {row.spec.name for row in self.rows}
        for spec in specs:
            if spec.name not in recorded:
                self._fail(spec, error)

    def _fail(self, spec: Spec, error: Exception) -> None:
        row = Row(spec, error=f"{type(error).__name__}: {error}")
        self.rows.append(row)
        self.say(f"{spec.name}: FAILED: {row.error}")
        if not self.quiet:
            traceback.print_exception(error)
