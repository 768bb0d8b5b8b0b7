"""Opt-in faults, so that every death the supervisor must survive can be brought about on purpose.

``MODELD_FAULTS`` holds faults separated by commas, each ``point:word:word…``, for example
``prefill:after=2:kill=SIGSEGV,load:hang``. Points: open, load, prefill, decode. Words:

- ``after=N``    fire at the N-th passage and not before (default 1), then at each later one
- ``once=PATH``  fire only if PATH doesn't exist, and create it: one fault across restarts
- ``kill=NAME``  send this process SIGKILL, SIGSEGV, SIGABRT or SIGSTOP
- ``stop``       the same as ``kill=SIGSTOP``
- ``hang``       never return, holding the interpreter, as a stuck native call may
- ``stall``      never return, other threads running on
- ``exit=N``     leave with this exit code at once
- ``slow=S``     take S seconds longer
- ``raise``      raise an exception nobody planned for
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "MODELD_FAULTS"
POINTS = ("open", "load", "prefill", "decode")
_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGSTOP")


class FaultSyntaxError(ValueError):
    """``MODELD_FAULTS`` can't be read."""


class InjectedFault(RuntimeError):
    """What ``raise`` raises."""


class _Fault:
    def __init__(self, act: Callable[[], None], after: int, once: Path | None) -> None:
        self._act = act
        self._left = after
        self._once = once

    def pass_by(self) -> None:
        if self._left > 1:
            self._left -= 1
            return
        if self._once is not None:
            try:
                self._once.touch(exist_ok=False)
            except FileExistsError:
                return
        self._act()


_faults: dict[str, list[_Fault]] = {}


def point(name: str) -> None:
    """Mark a place where a fault may strike. Nearly free while none is set."""
    if _faults:
        for fault in _faults.get(name, ()):
            fault.pass_by()


def load(text: str) -> None:
    """Replace the faults set; raises FaultSyntaxError, changing nothing."""
    faults: dict[str, list[_Fault]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, *words = part.split(":")
        if name not in POINTS:
            raise FaultSyntaxError(f"{VARIABLE}: no point {name!r}; there are {', '.join(POINTS)}")
        faults.setdefault(name, []).append(_parse(part, words))
    _faults.clear()
    _faults.update(faults)


def _parse(part: str, words: list[str]) -> _Fault:
    act: Callable[[], None] | None = None
    after = 1
    once: Path | None = None
    for word in words:
        key, _, value = word.partition("=")
        try:
            if key == "after":
                after = int(value)
            elif key == "once":
                once = Path(value)
            else:
                act = _action(key, value)
        except ValueError:
            raise FaultSyntaxError(f"{VARIABLE}: {word!r} in {part!r} can't be read") from None
    if act is None or after < 1:
        raise FaultSyntaxError(f"{VARIABLE}: {part!r} doesn't say what happens, or when")
    return _Fault(act, after, once)


def _action(key: str, value: str) -> Callable[[], None]:
    if (key == "stop" and not value) or (key == "kill" and value in _SIGNALS):
        number = signal.Signals[value or "SIGSTOP"]
        return lambda: os.kill(os.getpid(), number)
    if key == "exit":
        code = int(value)
        return lambda: os._exit(code)
    if key == "slow":
        seconds = float(value)
        return lambda: time.sleep(seconds)
    if value == "" and key in ("hang", "stall", "raise"):
        return {"hang": _hang, "stall": _stall, "raise": _raise}[key]
    raise ValueError(key)


def _hang() -> None:
    # PyDLL, unlike CDLL, keeps the interpreter's lock during the call.
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(3600)


def _stall() -> None:
    while True:
        time.sleep(3600)


def _raise() -> None:
    raise InjectedFault("a fault was injected here")
