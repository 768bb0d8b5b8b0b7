"""Typed errors: one class a reason, and their form on the wire.

An error is a reason, a message for people (what happened, the numbers, what to do) and metadata
with the live numbers. It never holds an exception object, a traceback or prompt text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

type_of: dict[str, type[ModeldError]] = {}


class ModeldError(Exception):
    """Base of every typed error; also what an unknown reason becomes.

    ``metadata`` values are strings, as they are on the wire. ``retry_after_s`` is seconds, or
    None where a retry doesn't help.
    """

    default_reason: ClassVar[str] = ""

    def __init__(
        self,
        message: str,
        *,
        metadata: Mapping[str, object] | None = None,
        retry_after_s: float | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: dict[str, str] = {
            key: _text(value) for key, value in (metadata or {}).items()
        }
        self.retry_after_s = retry_after_s

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__dict__.get("default_reason"):  # a subclass never takes its parent's place
            type_of[cls.default_reason] = cls

    def to_wire(self) -> dict[str, Any]:
        """Plain data for the codec."""
        return {
            "reason": self.reason,
            "message": self.message,
            "metadata": dict(self.metadata),
            "retry_after_s": self.retry_after_s,
        }


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def from_wire(
    reason: str,
    message: str,
    metadata: Mapping[str, object] | None = None,
    retry_after_s: float | None = None,
) -> ModeldError:
    """Rebuild an error; a reason this version doesn't know survives as ``ModeldError``."""
    cls = type_of.get(reason, ModeldError)
    return cls(message, metadata=metadata, retry_after_s=retry_after_s, reason=reason)


class NotOwner(ModeldError):
    default_reason = "NOT_OWNER"


class StaleFence(ModeldError):
    default_reason = "STALE_FENCE"


class GenerationStale(ModeldError):
    default_reason = "GENERATION_STALE"


class SessionClosed(ModeldError):
    default_reason = "SESSION_CLOSED"


class SessionFatal(ModeldError):
    default_reason = "SESSION_FATAL"


class ModelBusy(ModeldError):
    default_reason = "MODEL_BUSY"


class ModelNotActive(ModeldError):
    default_reason = "MODEL_NOT_ACTIVE"


class SwitchRequired(ModeldError):
    default_reason = "SWITCH_REQUIRED"


class ModelLoadFailed(ModeldError):
    default_reason = "MODEL_LOAD_FAILED"


class ModelQuarantined(ModeldError):
    default_reason = "MODEL_QUARANTINED"


class InsufficientMemory(ModeldError):
    default_reason = "INSUFFICIENT_MEMORY"


class ContextOverflow(ModeldError):
    default_reason = "CONTEXT_OVERFLOW"


class DeviceBusy(ModeldError):
    default_reason = "DEVICE_BUSY"


class BackendMismatch(ModeldError):
    default_reason = "BACKEND_MISMATCH"


class UnsupportedModelType(ModeldError):
    default_reason = "UNSUPPORTED_MODEL_TYPE"


class UnsupportedFeature(ModeldError):
    default_reason = "UNSUPPORTED_FEATURE"


class ManifestMismatch(ModeldError):
    default_reason = "MANIFEST_MISMATCH"


class DigestMismatch(ModeldError):
    default_reason = "DIGEST_MISMATCH"


class ModelNotFound(ModeldError):
    default_reason = "MODEL_NOT_FOUND"


class SessionNotFound(ModeldError):
    default_reason = "SESSION_NOT_FOUND"


class SnapshotNotFound(ModeldError):
    default_reason = "SNAPSHOT_NOT_FOUND"


class InvalidRequest(ModeldError):
    default_reason = "INVALID_REQUEST"

    @classmethod
    def of(cls, field: str, value: object, allowed: str, detail: str = "") -> InvalidRequest:
        """The usual form: which field, what it was, what is allowed."""
        text = f"{field}={value!r} is not valid: allowed is {allowed}."
        return cls(
            f"{text} {detail}".strip(),
            metadata={"field": field, "value": value, "allowed": allowed},
        )


class SlowConsumer(ModeldError):
    default_reason = "SLOW_CONSUMER"


class WorkerUnavailable(ModeldError):
    default_reason = "WORKER_UNAVAILABLE"


class StorageFull(ModeldError):
    default_reason = "STORAGE_FULL"


class ShuttingDown(ModeldError):
    default_reason = "SHUTTING_DOWN"


def unsupported(capability: str, detail: str = "") -> UnsupportedFeature:
    """The answer for what a later part brings; names the capability."""
    text = f"This daemon doesn't serve {capability!r} yet."
    return UnsupportedFeature(f"{text} {detail}".strip(), metadata={"capability": capability})


# gRPC status code names by reason; UNAVAILABLE only where nothing can have had an effect, since
# clients retry it on their own.
GRPC_CODE: dict[str, str] = {
    "NOT_OWNER": "FAILED_PRECONDITION",
    "STALE_FENCE": "FAILED_PRECONDITION",
    "GENERATION_STALE": "FAILED_PRECONDITION",
    "SESSION_CLOSED": "FAILED_PRECONDITION",
    "SESSION_FATAL": "ABORTED",
    "MODEL_BUSY": "ABORTED",
    "MODEL_NOT_ACTIVE": "FAILED_PRECONDITION",
    "SWITCH_REQUIRED": "FAILED_PRECONDITION",
    "MODEL_LOAD_FAILED": "FAILED_PRECONDITION",
    "MODEL_QUARANTINED": "FAILED_PRECONDITION",
    "INSUFFICIENT_MEMORY": "RESOURCE_EXHAUSTED",
    "CONTEXT_OVERFLOW": "OUT_OF_RANGE",
    "DEVICE_BUSY": "RESOURCE_EXHAUSTED",
    "BACKEND_MISMATCH": "INVALID_ARGUMENT",
    "UNSUPPORTED_MODEL_TYPE": "INVALID_ARGUMENT",
    "UNSUPPORTED_FEATURE": "UNIMPLEMENTED",
    "MANIFEST_MISMATCH": "FAILED_PRECONDITION",
    "DIGEST_MISMATCH": "DATA_LOSS",
    "MODEL_NOT_FOUND": "NOT_FOUND",
    "SESSION_NOT_FOUND": "NOT_FOUND",
    "SNAPSHOT_NOT_FOUND": "NOT_FOUND",
    "INVALID_REQUEST": "INVALID_ARGUMENT",
    "SLOW_CONSUMER": "ABORTED",
    "WORKER_UNAVAILABLE": "UNAVAILABLE",
    "STORAGE_FULL": "RESOURCE_EXHAUSTED",
    "SHUTTING_DOWN": "UNAVAILABLE",
}
ERROR_DOMAIN = "modeld"
