"""What the command's exit status means; programs decide on these, people read the message."""

from __future__ import annotations

from enum import IntEnum

from modeld.client import (
    CallCancelled,
    ConnectionLost,
    DeadlineExceeded,
    DiscoveryError,
    StreamStalled,
)
from modeld.shared.errors import ModeldError


class Exit(IntEnum):
    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NO_DAEMON = 3
    REFUSED = 4
    BUSY = 5
    NO_ROOM = 6
    CONTEXT_OVERFLOW = 7
    NOT_FOUND = 8
    WORKER = 9
    UNSUPPORTED = 10
    TIMEOUT = 11
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.UNEXPECTED: "an error that has no class of its own",
    Exit.USAGE: "wrong usage, or a value that isn't allowed (INVALID_REQUEST)",
    Exit.NO_DAEMON: "no daemon: not installed, not running, stale, or the connection was lost",
    Exit.REFUSED: "refused as things stand (SWITCH_REQUIRED, MODEL_NOT_ACTIVE, *_MISMATCH, ...)",
    Exit.BUSY: "busy, try later (MODEL_BUSY, DEVICE_BUSY, SHUTTING_DOWN, SLOW_CONSUMER)",
    Exit.NO_ROOM: "not enough memory or disk (INSUFFICIENT_MEMORY, STORAGE_FULL)",
    Exit.CONTEXT_OVERFLOW: "the prompt doesn't fit the window (CONTEXT_OVERFLOW)",
    Exit.NOT_FOUND: "no such model, session or snapshot",
    Exit.WORKER: "the engine failed (MODEL_LOAD_FAILED, MODEL_QUARANTINED, SESSION_FATAL, "
    "WORKER_UNAVAILABLE)",
    Exit.UNSUPPORTED: "this daemon or model can't do that (UNSUPPORTED_*, BACKEND_MISMATCH)",
    Exit.TIMEOUT: "a deadline passed, or a stream stalled",
    Exit.INTERRUPTED: "interrupted by Ctrl-C",
}

_BY_REASON: dict[str, Exit] = {
    "INVALID_REQUEST": Exit.USAGE,
    "MODEL_BUSY": Exit.BUSY,
    "DEVICE_BUSY": Exit.BUSY,
    "SHUTTING_DOWN": Exit.BUSY,
    "SLOW_CONSUMER": Exit.BUSY,
    "INSUFFICIENT_MEMORY": Exit.NO_ROOM,
    "STORAGE_FULL": Exit.NO_ROOM,
    "CONTEXT_OVERFLOW": Exit.CONTEXT_OVERFLOW,
    "MODEL_NOT_FOUND": Exit.NOT_FOUND,
    "SESSION_NOT_FOUND": Exit.NOT_FOUND,
    "SNAPSHOT_NOT_FOUND": Exit.NOT_FOUND,
    "MODEL_LOAD_FAILED": Exit.WORKER,
    "MODEL_QUARANTINED": Exit.WORKER,
    "SESSION_FATAL": Exit.WORKER,
    "WORKER_UNAVAILABLE": Exit.WORKER,
    "UNSUPPORTED_FEATURE": Exit.UNSUPPORTED,
    "UNSUPPORTED_MODEL_TYPE": Exit.UNSUPPORTED,
    "BACKEND_MISMATCH": Exit.UNSUPPORTED,
    "NOT_OWNER": Exit.REFUSED,
    "STALE_FENCE": Exit.REFUSED,
    "GENERATION_STALE": Exit.REFUSED,
    "SESSION_CLOSED": Exit.REFUSED,
    "MODEL_NOT_ACTIVE": Exit.REFUSED,
    "SWITCH_REQUIRED": Exit.REFUSED,
    "MANIFEST_MISMATCH": Exit.REFUSED,
    "DIGEST_MISMATCH": Exit.REFUSED,
}


def exit_code_of(error: BaseException) -> Exit:
    """The exit status for an error that ends the command."""
    if isinstance(error, ModeldError):
        return _BY_REASON.get(error.reason, Exit.UNEXPECTED)
    if isinstance(error, (DiscoveryError, ConnectionLost)):
        return Exit.NO_DAEMON
    if isinstance(error, (DeadlineExceeded, StreamStalled)):
        return Exit.TIMEOUT
    if isinstance(error, (CallCancelled, KeyboardInterrupt)):
        return Exit.INTERRUPTED
    return Exit.UNEXPECTED


def help_text() -> str:
    """The table as it stands under ``modeld --help``."""
    return "\n".join(f"  {code.value:>3}  {meaning}" for code, meaning in MEANINGS.items())
