"""How a child process ended, in words: the one place that reads an exit code."""

from __future__ import annotations

import signal


def signal_name(code: int | None) -> str:
    """The name of the signal that an exit code tells of; "" where it tells of none."""
    if code is None or code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def ending(code: int) -> str:
    """An exit code as words: ``exit code 3`` or ``signal SIGKILL``."""
    name = signal_name(code)
    if not name:
        return f"exit code {code}"
    return name if name.startswith("signal ") else f"signal {name}"
