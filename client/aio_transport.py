"""One asyncio gRPC channel to a daemon; the twin of ``transport``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from modeld.client.calls import Call
from modeld.client.errors import from_rpc_error, typed_error
from modeld.client.transport import (
    CHANNEL_OPTIONS,
    OWNER_METADATA,
    Transport,
    check_size,
    stalled,
)

T = TypeVar("T")

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]


class AsyncTransport:
    """A channel and the owner id that every call asserts. Bound to the running event loop."""

    def __init__(self, endpoint: str, owner: str = "") -> None:
        self.endpoint = endpoint
        self.owner = owner
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        await self._channel.close(None)

    def _metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(((OWNER_METADATA, self.owner),) if self.owner else ()))

    async def unary(self, call: Call[T]) -> T:
        check_size(call)
        method = self._channel.unary_unary(
            call.path,
            request_serializer=_serialize,
            response_deserializer=call.response_type.FromString,
        )
        try:
            answer = await method(call.request, timeout=call.timeout_s, metadata=self._metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return call.parse(answer)

    def stream(self, call: Call[T], stall_s: float | None = None) -> AsyncStream[T]:
        check_size(call)
        method = self._channel.unary_stream(
            call.path,
            request_serializer=_serialize,
            response_deserializer=call.response_type.FromString,
        )
        rpc = method(call.request, timeout=call.timeout_s, metadata=self._metadata())
        return AsyncStream(rpc, call, stall_s)

    async def upload(self, call: Call[T], requests: Iterator[Any]) -> T:
        """Send all of ``requests``, as ``Transport.upload`` does.

        By a synchronous channel of its own, in a thread: where a daemon refuses in the midst of an
        upload, grpc.aio may lose the reason.
        """
        transport = Transport(self.endpoint, self.owner)
        try:
            return await asyncio.to_thread(transport.upload, call, requests)
        finally:
            transport.close()  # and with it an upload whose task was cancelled


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class AsyncStream(Generic[T]):
    """An asynchronous iterator over a stream's parsed messages."""

    def __init__(self, rpc: Any, call: Call[T], stall_s: float | None) -> None:
        self._rpc = rpc
        self._parse = call.parse
        self._stall_s = stall_s
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._rpc.cancel()

    async def __aiter__(self) -> AsyncIterator[T]:
        try:
            while True:
                message = await self._read()
                if message is _EOF:
                    return
                parsed = self._parse(message)
                if parsed is not None:
                    yield parsed
        finally:
            self.close()

    def close(self) -> None:
        self._rpc.cancel()  # no effect on a call that has ended

    async def _read(self) -> Any:
        try:
            return await asyncio.wait_for(self._rpc.read(), self._stall_s)
        except TimeoutError:
            raise stalled(self._stall_s or 0.0) from None
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            # A call cancelled by cancel() ends its reads this way too; a cancelled task must
            # stay cancelled.
            task = asyncio.current_task()
            if self._cancelled and (task is None or not task.cancelling()):
                raise typed_error(grpc.StatusCode.CANCELLED, "", None) from None
            raise
