"""The asyncio client; the twin of ``client``."""

# ruff: noqa: ASYNC109  a timeout here is the call's gRPC deadline, which the daemon sees too

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from modeld.client import calls, values, values_daemon
from modeld.client.aio_residency import AsyncClientSnapshots
from modeld.client.aio_session import AsyncSession
from modeld.client.aio_transport import AsyncStream, AsyncTransport
from modeld.client.calls import NO_COMPANIONS, Call, Deadlines, OpenOptions
from modeld.client.client import RECONNECT_POLL_S, ImportCallback, ProgressCallback
from modeld.client.discovery import discover
from modeld.client.errors import ConnectionLost, DiscoveryError, ProtocolViolation
from modeld.client.prompts import Message, ToolInput
from modeld.client.session_core import RecoveryCallback, SessionCore
from modeld.shared.capacity import Companions
from modeld.shared.manifest import AdapterId

E = TypeVar("E")
T = TypeVar("T")


class AsyncClient(AsyncClientSnapshots):
    """A connection to one daemon. Bound to one event loop; an asynchronous context manager.

    Calls raise one class of ``modeld.shared.errors`` for each of the contract's reasons, and one
    of ``modeld.client.errors`` for discovery and transport. Times are seconds.
    """

    def __init__(
        self,
        transport: AsyncTransport,
        *,
        data_root: str | Path | None = None,
        endpoint: str | None = None,
        deadlines: Deadlines | None = None,
        recover_wait_s: float = 10.0,
    ) -> None:
        """Prefer ``connect``. ``recover_wait_s``: how long a recovery waits for a daemon."""
        self._transport = transport
        self._data_root = data_root
        self._endpoint = endpoint
        self._recover_wait_s = recover_wait_s
        self._lock = asyncio.Lock()
        self.deadlines = deadlines or Deadlines()

    @classmethod
    async def connect(
        cls,
        data_root: str | Path | None = None,
        endpoint: str | None = None,
        *,
        timeout: float = 10.0,
        deadlines: Deadlines | None = None,
        recover_wait_s: float = 10.0,
    ) -> Self:
        """Connect to the daemon of a data root (default: MODELD_DATA_ROOT, else this user's), or
        to an endpoint such as ``unix:/path/modeld.sock`` or ``127.0.0.1:9000``.

        Raises NotInstalled, NotRunning or Stale where no daemon serves the data root,
        ConnectionLost or DeadlineExceeded where it doesn't answer within ``timeout``.
        """
        transport = await _reach(data_root, endpoint, timeout)
        return cls(
            transport,
            data_root=data_root,
            endpoint=endpoint,
            deadlines=deadlines,
            recover_wait_s=recover_wait_s,
        )

    @property
    def transport(self) -> AsyncTransport:
        return self._transport

    @property
    def owner_instance_id(self) -> str:
        return self._transport.owner

    @property
    def endpoint(self) -> str:
        return self._transport.endpoint

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.close()

    # --- sessions --------------------------------------------------------------------------------

    async def open_session(
        self,
        model: str,
        *,
        window: int = 0,
        session_key: str = "",
        profile_id: str = "",
        prompt_format: str = "",
        k_type: str = "",
        v_type: str = "",
        model_type: str = "",
        overflow: str = "refuse",
        layout: str = "isolated",
        durable: bool = False,
        fresh: bool = False,
        adapters: Sequence[AdapterId] = (),
        no_wait: bool = False,
        timeout: float | None = None,
        on_progress: ProgressCallback | None = None,
        recover: bool = False,
        on_recovery: RecoveryCallback | None = None,
    ) -> AsyncSession:
        """Make the model resident if need be, and open (or by key attach to) a session.

        ``adapters`` are LoRA adapters of the store, by the digests that ``models`` tells.

        With ``overflow`` "evict" a conversation goes on beyond its window (of at least 1,024
        tokens): what is neither pinned, at its head nor recent goes out of attention, and every
        answer counts it (``parked``, ``gone``); ``Session.admit`` brings it back. With "refuse" a
        prompt beyond the window is ContextOverflow.

        With ``durable``, which needs a ``session_key``, the session is saved at the end of each
        turn (``Final.saved``), and an open with the same key after a crash or a restart brings it
        back: ``opened.resumed`` says what, from when, or why not. ``fresh`` forgets what was saved
        under the key instead. Closing with ``discard`` forgets it too.

        ``window`` in tokens, 0: chosen by the planner. ``prompt_format`` "": chat where the model
        has a template, else raw. With ``recover`` a lost session is reopened by itself, and says
        so in ``recoveries``, by ``on_recovery`` and as a logged warning; a call that had already
        streamed part of an answer still raises.
        """
        options = OpenOptions(
            model=model,
            model_type=model_type,
            window=window,
            k_type=k_type,
            v_type=v_type,
            session_key=session_key,
            no_wait=no_wait,
            profile_id=profile_id,
            prompt_format=prompt_format,
            overflow=overflow,
            layout=layout,
            durable=durable,
            fresh=fresh,
            adapters=tuple(adapters),
        )
        timeout_s = timeout if timeout is not None else self.deadlines.open_s
        call = calls.open_session(options, timeout_s)
        opened = await self._outcome(call, values.Opened, on_progress)
        core = SessionCore(
            options=options,
            deadlines=self.deadlines,
            opened=opened,
            recover=recover,
            on_recovery=on_recovery,
        )
        return AsyncSession(self, core)

    async def reopen(self, core: SessionCore) -> values.Opened:
        call = calls.open_session(core.reopening, self.deadlines.open_s)
        return await self._outcome(call, values.Opened, None)

    async def reconnect(self) -> None:
        """Reach the present owner of the data root; the same channel if it still answers.

        Waits up to ``recover_wait_s`` for a daemon to come back. Raises DiscoveryError or
        ConnectionLost.
        """
        async with self._lock:
            if await self._still_served():
                return
            end = time.monotonic() + self._recover_wait_s
            while True:
                try:
                    fresh = await _reach(self._data_root, self._endpoint, self.deadlines.status_s)
                    break
                except (DiscoveryError, ConnectionLost):
                    if time.monotonic() >= end:
                        raise
                await asyncio.sleep(RECONNECT_POLL_S)
            old, self._transport = self._transport, fresh
            await old.close()

    async def _still_served(self) -> bool:
        try:
            status = await self._transport.unary(calls.status(self.deadlines))
        except ConnectionLost:
            return False
        return status.owner_instance_id == self._transport.owner

    async def sessions(self) -> list[values.SessionInfo]:
        return list((await self._transport.unary(calls.list_sessions(self.deadlines))).sessions)

    async def close_session(
        self, session: values.SessionHandle, *, discard: bool = False
    ) -> values.Closed:
        """Close any session by its handle, as ``sessions`` tells it; what runs for it is stopped.

        What it held stays as reclaimable cache unless ``discard``.
        """
        call = calls.close_session(session, discard=discard, deadlines=self.deadlines)
        return await self._transport.unary(call)

    # --- models ----------------------------------------------------------------------------------

    async def models(self) -> list[values_daemon.ModelInfo]:
        return list((await self._transport.unary(calls.list_models(self.deadlines))).models)

    async def describe(
        self,
        model: str,
        *,
        window: int = 0,
        k_type: str = "",
        v_type: str = "",
        model_type: str = "",
        prompt_format: str = "",
        profile_id: str = "",
        session_id: str = "",
        sessions: int = 0,
        machine: str = "",
        what_if: Mapping[str, str] | None = None,
        companions: Companions = NO_COMPANIONS,
        hypothetical: bool = False,
        layout: str = "isolated",
    ) -> values_daemon.Description:
        """A model's capacity and capability truth, without loading it.

        ``machine`` is the JSON of a machine file, to plan for that machine instead of the
        daemon's; ``what_if`` are settings of the daemon, as if they were these. Of a resident
        model an open session's own resolution is quoted, unless ``hypothetical``. ``layout``:
        "batched" for a session that shares its context with others.
        """
        return await self._transport.unary(
            calls.describe(
                model,
                window=window,
                k_type=k_type,
                v_type=v_type,
                model_type=model_type,
                prompt_format=prompt_format,
                profile_id=profile_id,
                session_id=session_id,
                sessions=sessions,
                machine=machine,
                what_if=what_if,
                companions=companions,
                hypothetical=hypothetical,
                layout=layout,
                deadlines=self.deadlines,
            )
        )

    async def load_model(
        self,
        model: str,
        *,
        model_type: str = "",
        no_wait: bool = False,
        timeout: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> values_daemon.Loaded:
        timeout_s = timeout if timeout is not None else self.deadlines.open_s
        call = calls.load_model(model, model_type, no_wait, timeout_s)
        return await self._outcome(call, values_daemon.Loaded, on_progress)

    async def switch_model(
        self,
        model: str,
        expected_generation: int,
        *,
        model_type: str = "",
        no_wait: bool = False,
        timeout: float | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> values_daemon.Loaded:
        """Replace the resident model, closing its sessions; GenerationStale if it has moved on."""
        timeout_s = timeout if timeout is not None else self.deadlines.open_s
        call = calls.switch_model(model, model_type, expected_generation, no_wait, timeout_s)
        return await self._outcome(call, values_daemon.Loaded, on_progress)

    async def unload_model(
        self,
        model: str = "",
        *,
        no_wait: bool = False,
        force: bool = False,
        timeout: float | None = None,
    ) -> values_daemon.Unloaded:
        timeout_s = timeout if timeout is not None else self.deadlines.open_s
        return await self._transport.unary(calls.unload_model(model, no_wait, force, timeout_s))

    async def import_model(
        self,
        path: str | Path,
        *,
        name: str = "",
        model_type: str = "",
        copy: bool = False,
        replace: bool = False,
        expected_digest: str = "",
        timeout: float | None = None,
        on_progress: ImportCallback | None = None,
    ) -> values_daemon.ModelInfo:
        """Take a file of the daemon's machine into its store."""
        timeout_s = timeout if timeout is not None else self.deadlines.import_s
        call = calls.import_model(path, name, model_type, copy, replace, expected_digest, timeout_s)
        return await self._outcome(call, values_daemon.ModelInfo, on_progress)

    async def remove_model(self, name: str) -> values_daemon.Removed:
        return await self._transport.unary(calls.remove_model(name, self.deadlines))

    async def disk_stats(self) -> values_daemon.DiskStats:
        return await self._transport.unary(calls.disk_stats(self.deadlines))

    # --- text ------------------------------------------------------------------------------------

    async def tokenize(
        self,
        model: str,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool = False,
        load: bool = False,
    ) -> values.Tokens:
        call = calls.tokenize(
            model,
            text,
            parse_special=parse_special,
            add_bos=add_bos,
            load=load,
            deadlines=self.deadlines,
        )
        return await self._transport.unary(call)

    async def embed(
        self,
        model: str,
        texts: str | Sequence[str],
        *,
        pooling: str = "",
        normalize: bool = True,
        model_type: str = "",
        no_wait: bool = False,
        timeout: float | None = None,
    ) -> values.Embeddings:
        """The vectors of one or many texts, by an embedding model, which is loaded if need be.

        ``pooling`` mean, cls or last; "": what the model declares, else mean. ``normalize``: to
        length 1. Raises ContextOverflow for a text that is too long, InvalidRequest for an empty
        one, and UnsupportedFeature for a model that generates; then nothing was embedded.
        """
        timeout_s = timeout if timeout is not None else self.deadlines.open_s
        call = calls.embed(
            model,
            texts,
            model_type=model_type,
            pooling=pooling,
            normalize=normalize,
            no_wait=no_wait,
            timeout_s=timeout_s,
        )
        return await self._transport.unary(call)

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, load: bool = False
    ) -> values.Detokenized:
        call = calls.detokenize(model, token_ids, load=load, deadlines=self.deadlines)
        return await self._transport.unary(call)

    async def render_template(
        self,
        model: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[ToolInput] = (),
        add_generation_prompt: bool = True,
        load: bool = False,
    ) -> values.Rendered:
        call = calls.render_template(
            model,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            load=load,
            deadlines=self.deadlines,
        )
        return await self._transport.unary(call)

    # --- the daemon ------------------------------------------------------------------------------

    async def status(self) -> values_daemon.DaemonStatus:
        return await self._transport.unary(calls.status(self.deadlines))

    def watch_events(self) -> AsyncIterator[values_daemon.Event]:
        """State changes as they happen, the current state of every slot first."""
        return aiter(self._transport.stream(calls.watch_events()))

    async def drain(self, grace_s: float = 0.0) -> values_daemon.Draining:
        """Stop admitting, let what runs finish, then stop. 0: the daemon's configured grace."""
        return await self._transport.unary(calls.drain(grace_s, self.deadlines))

    async def clear_quarantine(self, model: str) -> values_daemon.QuarantineCleared:
        return await self._transport.unary(calls.clear_quarantine(model, self.deadlines))

    async def _outcome(
        self, call: Call[E], cls: type[T], on_progress: Callable[[Any], None] | None
    ) -> T:
        """Follow a stream of progress to its outcome."""
        stream: AsyncStream[E] = self._transport.stream(call)
        async for event in stream:
            if isinstance(event, cls):
                stream.close()
                return event
            if on_progress is not None:
                on_progress(event)
        raise ProtocolViolation(f"The stream of {call.path} ended without its outcome.")


async def _reach(
    data_root: str | Path | None, endpoint: str | None, timeout_s: float
) -> AsyncTransport:
    """A transport whose daemon has answered, with its owner id."""
    target = endpoint or discover(data_root).endpoint
    transport = AsyncTransport(target)
    try:
        status = await transport.unary(calls.status(Deadlines(status_s=timeout_s)))
    except BaseException:
        await transport.close()
        raise
    transport.owner = status.owner_instance_id
    return transport
