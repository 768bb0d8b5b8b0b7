"""When a dead worker may be started again: back-off, crash loops, and boots that can't succeed.

Pure: no clock, no randomness, no process. Times are seconds on whatever monotonic clock the caller
uses; jitter is handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# A worker that leaves with this code says "I cannot boot, and trying again won't help".
EXIT_CANNOT_BOOT = 64


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Limits of restarting. All ``_s`` are seconds."""

    base_s: float = 0.5  # delay before the second restart; doubles from there
    cap_s: float = 30.0
    jitter: float = 0.2  # a delay grows by up to this share of itself
    stable_after_s: float = 30.0  # a worker that lived this long starts over with no delay
    max_deaths: int = 5  # more deaths than this within the window: give up
    window_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Retry:
    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    text: str


class Restarts:
    """The memory of one worker's deaths, and what each of them calls for."""

    def __init__(self, policy: RestartPolicy, jitter: Callable[[], float]) -> None:
        """``jitter`` answers a number in [0, 1)."""
        self._policy = policy
        self._jitter = jitter
        self._recent: deque[float] = deque()
        self._streak = 0

    @property
    def streak(self) -> int:
        """Deaths in a row since the last stable life."""
        return self._streak

    def after_death(self, now_s: float, lived_s: float, exit_code: int | None) -> Retry | GiveUp:
        """``exit_code`` is None where the worker was taken down or never ran."""
        if exit_code == EXIT_CANNOT_BOOT:
            return GiveUp("the worker can't boot (its log says why); restarting won't help")
        policy = self._policy
        # A long life says that the earlier deaths had another cause: being fast again matters more
        # than being careful.
        if lived_s >= policy.stable_after_s:
            self._streak = 0
        self._streak += 1
        self._recent.append(now_s)
        while self._recent and self._recent[0] <= now_s - policy.window_s:
            self._recent.popleft()
        if len(self._recent) > policy.max_deaths:
            return GiveUp(
                f"the worker died {len(self._recent)} times within {policy.window_s:g} s; "
                "it stays down until that is cleared"
            )
        return Retry(self._delay_s())

    def _delay_s(self) -> float:
        if self._streak <= 1:
            return 0.0
        policy = self._policy
        # The exponent is bounded so that a long streak can't overflow a float.
        delay_s: float = min(policy.cap_s, policy.base_s * 2.0 ** min(self._streak - 2, 30))
        return delay_s * (1.0 + policy.jitter * self._jitter())

    def clear(self) -> None:
        """Forget every death."""
        self._recent.clear()
        self._streak = 0
