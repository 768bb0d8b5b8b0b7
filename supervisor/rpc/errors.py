"""How a typed error leaves as a gRPC status, and the guards that every call passes.

The only place that knows google.rpc. Unexpected exceptions become INTERNAL without a trace.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from modeld.shared.errors import (
    ERROR_DOMAIN,
    GRPC_CODE,
    InvalidRequest,
    ModeldError,
    ShuttingDown,
    StaleFence,
)

logger = logging.getLogger(__name__)

OWNER_METADATA = "modeld-owner"
DETAILS_KEY = "grpc-status-details-bin"


class Gate(Protocol):
    """What the guards ask of the daemon before a call starts and before its answer leaves."""

    owner_instance_id: str

    def check_owner(self) -> None:
        """Raises NotOwner once this process may no longer answer for the data root."""

    @property
    def draining(self) -> bool: ...


class Servicer(Protocol):
    gate: Gate


Request = TypeVar("Request")
Response = TypeVar("Response")
Context = Any  # grpc.aio.ServicerContext; the generated stubs type it as a private class


def status_of(error: ModeldError) -> tuple[grpc.StatusCode, str, bytes]:
    """The gRPC code, the message, and the serialized google.rpc.Status of an error."""
    code = grpc.StatusCode[GRPC_CODE.get(error.reason, "UNKNOWN")]
    status = status_pb2.Status(code=code.value[0], message=error.message)
    info = any_pb2.Any()
    info.Pack(
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata
        )
    )
    status.details.append(info)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        retry = any_pb2.Any()
        retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(retry)
    return code, error.message, status.SerializeToString()


async def abort(context: Context, error: ModeldError) -> NoReturn:
    code, message, details = status_of(error)
    await context.abort(code, message, trailing_metadata=((DETAILS_KEY, details),))
    raise AssertionError("abort returned")


def _check_request(gate: Gate, context: Context, method: str, *, while_draining: bool) -> None:
    gate.check_owner()
    metadata = dict(context.invocation_metadata() or ())
    owner = metadata.get(OWNER_METADATA)
    if owner is None:
        raise InvalidRequest.of(
            f"metadata {OWNER_METADATA}",
            "",
            "the owner_instance_id that DaemonService.Status tells",
            "Ask Status first; the client library does so by itself.",
        )
    if owner != gate.owner_instance_id:
        raise StaleFence(
            f"This call names owner {owner}, but the data root is served by "
            f"{gate.owner_instance_id} now. Reconnect, reopen sessions and ensure prefixes again.",
            metadata={"asserted": owner, "actual": gate.owner_instance_id},
        )
    if gate.draining and not while_draining:
        raise ShuttingDown(
            f"The daemon is draining and admits no new {method}. Start it again, or retry later.",
            metadata={"method": method},
            retry_after_s=5.0,
        )


def _guard(
    *, owner: bool = True, while_draining: bool = False
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Any]]:
    # The stubs type a streaming method as an iterator; ours are coroutines that write.
    def wrap(method: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        @functools.wraps(method)
        async def call(self: Servicer, request: Any, context: Context) -> Any:
            try:
                if owner:
                    _check_request(
                        self.gate, context, method.__name__, while_draining=while_draining
                    )
                answer = await method(self, request, context)
                # A process that was suspended may have lost the data root meanwhile.
                self.gate.check_owner()
                return answer
            except ModeldError as error:
                logger.info("refused %s: %s", method.__name__, error.reason)
                await abort(context, error)
            except (asyncio.CancelledError, grpc.aio.AbortError, grpc.aio.UsageError):
                raise
            except Exception:
                logger.exception("unexpected error in %s", method.__name__)
                await context.abort(
                    grpc.StatusCode.INTERNAL,
                    "Internal error in modeld; the daemon's log has the details.",
                )

        return call

    return wrap


guarded = _guard()
guarded_while_draining = _guard(while_draining=True)
unguarded = _guard(owner=False)


# --- what grpc logs by itself ---------------------------------------------------------------------


def told_in_a_line(record: logging.LogRecord) -> bool:
    """A filter for grpc's own log: a client that is gone when its answer ends is no fault of the
    daemon's, and is told without a trace.
    """
    error = record.exc_info[1] if record.exc_info else None
    if type(error).__name__ == "ExecuteBatchError":  # a private class of grpc's
        record.msg, record.args = f"a client left before its answer ended: {error}", None
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.exc_info = None
    return logging.getLogger(record.name).isEnabledFor(record.levelno)


def hear_grpc() -> None:
    """Have what grpc logs go through ``told_in_a_line``. May be called again."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(told_in_a_line)
