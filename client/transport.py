"""One synchronous gRPC channel to a daemon: sends calls, maps failures to typed exceptions.

Knows owner metadata, deadlines and the stall watch; knows nothing of sessions or recovery.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar

import grpc

from modeld.client.calls import Call
from modeld.client.errors import StreamStalled, from_rpc_error
from modeld.shared.errors import InvalidRequest

T = TypeVar("T")

OWNER_METADATA = "modeld-owner"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
END_WAIT_S = 0.5
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),  # the daemon is local; a proxy would only break it
    ("grpc.enable_retries", 0),  # nothing is replayed behind the caller's back
    # A shared connection may still lead to an owner that another has followed by now.
    ("grpc.use_local_subchannel_pool", 1),
)


def check_size(call: Call[Any]) -> None:
    """Raises InvalidRequest for a request that the channel would refuse without a reason."""
    size = call.request.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise InvalidRequest.of(
            "request",
            f"{size} bytes",
            f"at most {MAX_MESSAGE_BYTES} bytes a call",
            "Send less text, or fewer or smaller images, at once. Nothing was sent.",
        )


def stalled(stall_s: float) -> StreamStalled:
    return StreamStalled(
        f"The daemon sent nothing for {stall_s:g} s; the call was cancelled. If long prefills are "
        "expected, raise the stall limit.",
        "CANCELLED",
    )


class Transport:
    """A channel and the owner id that every call asserts. Thread-safe."""

    def __init__(self, endpoint: str, owner: str = "") -> None:
        self.endpoint = endpoint
        self.owner = owner
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)

    def close(self) -> None:
        self._channel.close()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((OWNER_METADATA, self.owner),) if self.owner else ()

    def unary(self, call: Call[T]) -> T:
        check_size(call)
        method = self._channel.unary_unary(
            call.path,
            request_serializer=_serialize,
            response_deserializer=call.response_type.FromString,
        )
        try:
            answer = method(call.request, timeout=call.timeout_s, metadata=self.metadata())
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return call.parse(answer)

    def stream(self, call: Call[T], stall_s: float | None = None) -> Stream[T]:
        check_size(call)
        method = self._channel.unary_stream(
            call.path,
            request_serializer=_serialize,
            response_deserializer=call.response_type.FromString,
        )
        rpc = method(call.request, timeout=call.timeout_s, metadata=self.metadata())
        return Stream(rpc, call, stall_s)

    def upload(self, call: Call[T], requests: Iterator[Any]) -> T:
        """Send all of ``requests``; what their iterator raises cancels the call and is raised."""
        method = self._channel.stream_unary(
            call.path,
            request_serializer=_serialize,
            response_deserializer=call.response_type.FromString,
        )
        source = _Requests(requests)
        rpc: Any = method.future(source, timeout=call.timeout_s, metadata=self.metadata())
        source.rpc = rpc
        try:
            answer = rpc.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            if source.error is not None:
                raise source.error from None
            raise from_rpc_error(rpc) from None
        finally:
            rpc.cancel()  # no effect on a call that has ended
            source.end()
        return call.parse(answer)


def _serialize(message: Any) -> bytes:
    return bytes(message.SerializeToString())


class _Requests:
    """An iterator that gRPC's thread takes from: it keeps an error, and ends when it is told to."""

    def __init__(self, requests: Iterator[Any]) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        self._ended = False
        self.error: Exception | None = None
        self.rpc: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._lock:
            if self._ended:
                raise StopIteration
            try:
                return next(self._requests)
            except StopIteration:
                raise
            except Exception as error:
                self._ended, self.error = True, error
        # Cancelled before it ends, so that the daemon never takes it for all there was.
        while self.rpc is None:
            time.sleep(0.001)
        self.rpc.cancel()
        raise StopIteration

    def end(self) -> None:
        """Nothing is taken after this; one that is taken now isn't waited for if it takes long."""
        self._ended = True
        if self._lock.acquire(timeout=END_WAIT_S):
            self._lock.release()


class Stream(Generic[T]):
    """An iterator over a stream's parsed messages. Leaving it early cancels the call."""

    def __init__(self, rpc: Any, call: Call[T], stall_s: float | None) -> None:
        self._rpc = rpc
        self._parse = call.parse
        self._watch = _StallWatch(rpc, stall_s) if stall_s else None

    def cancel(self) -> None:
        self._rpc.cancel()

    def __iter__(self) -> Iterator[T]:
        try:
            while True:
                try:
                    message = self._next()
                except StopIteration:
                    return
                except grpc.RpcError as error:
                    if self._watch is not None and self._watch.fired:
                        raise stalled(self._watch.stall_s) from None
                    raise from_rpc_error(error) from None
                parsed = self._parse(message)
                if parsed is not None:
                    yield parsed
        finally:
            self.close()

    def _next(self) -> Any:
        if self._watch is None:
            return next(self._rpc)
        with self._watch:
            return next(self._rpc)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._rpc.cancel()  # no effect on a call that has ended


class _StallWatch:
    """Cancels a call whose reader has waited ``stall_s`` for one message.

    One thread a stream; the time the reader spends elsewhere doesn't count.
    """

    def __init__(self, rpc: Any, stall_s: float) -> None:
        self.stall_s = stall_s
        self.fired = False
        self._rpc = rpc
        self._waiting_since: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="modeld-stall", daemon=True)
        self._thread.start()

    def __enter__(self) -> None:
        self._waiting_since = time.monotonic()

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._waiting_since = None

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause = self.stall_s
        while not self._stopped.wait(pause):
            since = self._waiting_since
            if since is None:
                pause = self.stall_s
                continue
            pause = since + self.stall_s - time.monotonic()
            if pause <= 0:
                self.fired = True
                self._rpc.cancel()
                return
