"""When a slot has been idle long enough.

Pure: times come in, answers go out. Nothing here waits or releases anything.
"""

from __future__ import annotations


class IdleTimer:
    """Idle means: nothing is running, and nothing has run for ``idle_s`` seconds (0: never idle).

    ``now`` is any clock in seconds that never goes back. A running operation is never idle,
    however long it takes.
    """

    def __init__(self, idle_s: float) -> None:
        self._idle_s = idle_s
        self._running = 0
        self._since: float | None = (
            None  # when the slot last became quiet; None: nothing to release
        )

    def began(self) -> None:
        self._running += 1

    def ended(self, now: float) -> None:
        if self._running == 0:
            raise ValueError("an operation ended that never began")
        self._running -= 1
        self._since = now

    def touch(self, now: float) -> None:
        """Activity without an operation of its own: a model was loaded, a session attached."""
        self._since = now

    def clear(self) -> None:
        """Nothing is resident, so there is nothing to release."""
        self._since = None

    def remaining_s(self, now: float) -> float | None:
        """Seconds until release is due, 0 when it is; None while it can't become due."""
        if self._idle_s <= 0 or self._running or self._since is None:
            return None
        return max(0.0, self._since + self._idle_s - now)

    def due(self, now: float) -> bool:
        return self.remaining_s(now) == 0.0
