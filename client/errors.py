"""What a call can raise: one class a contract reason, plus what the transport itself may say.

Decides on google.rpc.ErrorInfo, never on message texts. Knows nothing of sessions or recovery.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from modeld.shared.errors import (
    ERROR_DOMAIN,
    GenerationStale,
    ModeldError,
    SessionClosed,
    SessionFatal,
    SessionNotFound,
    StaleFence,
    from_wire,
)

DETAILS_KEY = "grpc-status-details-bin"


class ClientError(Exception):
    """Base of what the client itself raises; a daemon's typed answers are ``ModeldError``."""


class DiscoveryError(ClientError):
    """No daemon to talk to for a data root. ``state`` is the contract's name for why."""

    state = ""


class NotInstalled(DiscoveryError):
    state = "NOT_INSTALLED"


class NotRunning(DiscoveryError):
    state = "NOT_RUNNING"


class Stale(DiscoveryError):
    state = "STALE"


class CallError(ClientError):
    """A gRPC status that carries no modeld reason. ``code`` is its name."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class DeadlineExceeded(CallError):
    """The call's own deadline passed. What it asked may still have had an effect."""


class ConnectionLost(CallError):
    """The daemon could not be reached, or went away during the call."""


class CallCancelled(CallError):
    """The call was cancelled by this side."""


class StreamStalled(CallError):
    """A stream brought nothing for ``stall_s`` seconds and was cancelled."""


class MessageTooLarge(CallError):
    """A message exceeds what one side's gRPC takes (the daemon's setting max_message_bytes)."""


class UnexpectedStatus(CallError):
    """Any other status; the daemon's log has more."""


class ProtocolViolation(ClientError):
    """The daemon's answer breaks the contract, e.g. a stream without a final record."""


# After these the session is gone or unreachable, but its text lives on in the client.
RECOVERABLE: tuple[type[Exception], ...] = (
    GenerationStale,
    SessionFatal,
    SessionClosed,
    SessionNotFound,
    StaleFence,
    ConnectionLost,
)

Metadata = Iterable[tuple[str, str | bytes]]


def typed_error(code: grpc.StatusCode, details: str, trailing: Metadata | None) -> Exception:
    """The exception for a failed call, from its status and trailing metadata."""
    status = _rich_status(trailing)
    if status is not None:
        typed = _modeld_error(status)
        if typed is not None:
            return typed
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(
            "The call's deadline passed before the daemon answered. Give it a longer timeout, "
            "or use no_wait to learn at once who holds the slot.",
            code.name,
        )
    if code is grpc.StatusCode.UNAVAILABLE:
        return ConnectionLost(
            f"The connection to the daemon is lost: {details or 'no details'}. "
            "See `modeld status`; start a daemon with `modeld serve`.",
            code.name,
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # the daemon's own has its reason with it
        return MessageTooLarge(
            f"The transport refused the message: {details or 'no details'}. Send less text, or "
            "fewer or smaller images, at once, or raise the daemon's max_message_bytes.",
            code.name,
        )
    if code is grpc.StatusCode.CANCELLED:
        return CallCancelled("The call was cancelled.", code.name)
    return UnexpectedStatus(f"{code.name}: {details or 'no details'}", code.name)


def _rich_status(trailing: Metadata | None) -> status_pb2.Status | None:
    for key, value in trailing or ():
        if key == DETAILS_KEY:
            raw = value if isinstance(value, bytes) else value.encode("latin-1")
            return status_pb2.Status.FromString(raw)
    return None


def _modeld_error(status: status_pb2.Status) -> ModeldError | None:
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    found = False
    retry_after_s: float | None = None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            detail.Unpack(info)
            found = info.domain == ERROR_DOMAIN
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if not found:
        return None
    return from_wire(info.reason, status.message, dict(info.metadata), retry_after_s)


def from_rpc_error(error: grpc.RpcError) -> Exception:
    """From what a synchronous or asyncio gRPC call raised."""
    code = getattr(error, "code", None)
    if not callable(code):
        return UnexpectedStatus(str(error) or type(error).__name__, "UNKNOWN")
    trailing: Any = error.trailing_metadata() if hasattr(error, "trailing_metadata") else None
    details = error.details() if hasattr(error, "details") else ""
    return typed_error(code() or grpc.StatusCode.UNKNOWN, details or "", trailing)
