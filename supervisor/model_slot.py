"""One backend's slot: its sessions, from being opened or attached to being closed, and saved.

Knows no gRPC and no engine; who may run what on the slot is the core's, what model it has
``loading_slot``'s.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace

from modeld.shared.capabilities import Capability, parse_capability
from modeld.shared.capacity import (
    CapacityRequest,
    Resolution,
)
from modeld.shared.errors import (
    GenerationStale,
    InvalidRequest,
    ModeldError,
    SessionFatal,
    UnsupportedFeature,
)
from modeld.shared.messages import (
    CloseOp,
    CloseResult,
    LoadResult,
    OpenOp,
    Payload,
    RestoreResult,
)
from modeld.supervisor.awaiting import see_through
from modeld.supervisor.durable_sessions import Resumed, Saved, refuse_unless_saved
from modeld.supervisor.loading_slot import OPEN_RETRY_S, LoadingSlot
from modeld.supervisor.models.store import StoredModel
from modeld.supervisor.parking_slot import Leaving
from modeld.supervisor.sessions import Session, check_attach
from modeld.supervisor.slot_core import (
    CREDIT_CHUNKS,
    Adopt,
    Caller,
    OnData,
    Report,
    ignore_progress,
)
from modeld.supervisor.slot_plan import host_buffers


@dataclass(frozen=True)
class OpenRequest:
    model: str
    capacity: CapacityRequest
    session_key: str
    profile_id: str
    prompt_format: str
    overflow: str = "refuse"  # refuse | evict
    durable: bool = False  # saved at the end of each turn, and brought back from what was saved
    fresh: bool = False  # … but begun anew
    layout: str = "isolated"  # isolated | batched

    @property
    def alone(self) -> bool:
        """Whether opening it must run with nothing else: what is saved comes back before anyone who
        attaches by key can send a turn.
        """
        return self.layout != "batched" or self.durable


@dataclass(frozen=True)
class Opened:
    session: Session
    attached: bool
    loaded: bool
    load_seconds: float
    queue_seconds: float
    resumed: Resumed | None = None  # of a durable session that was saved before


class ModelSlot(LoadingSlot):
    """The slot of one backend. All methods run on the daemon's loop."""

    # --- sessions ------------------------------------------------------------------------------

    async def open(
        self, request: OpenRequest, caller: Caller, report: Report = ignore_progress
    ) -> Opened:
        """Open or attach a session, loading the model if policy allows."""
        started = time.monotonic()
        load_s = 0.0
        streams = self.config.streams(request.layout)
        request = replace(request, capacity=replace(request.capacity, streams=streams))
        while True:
            model = self.find_model(request.model)
            try:
                attached = self._attach(request)
                if attached is not None:
                    return attached
                load_s += await self.ensure_loaded(model, caller, report, capacity=request.capacity)
                async with (
                    self.naming(request.session_key, caller),
                    self.hold("", "open", caller, beside=not request.alone) as hold,
                ):
                    # Waiting may have changed everything: look again.
                    attached = self._attach(request)
                    if attached is not None:
                        return attached
                    if not self._is_resident(model, request.capacity):
                        continue
                    waited_s = hold.waited_s
                    await report("opening", 1.0)
                    session = await self._open(model, request)
                    resumed = await self._begin(session, request)
            except GenerationStale:
                # The slot was reset while this call waited; it has no handle that could be stale.
                if time.monotonic() - started > OPEN_RETRY_S:
                    raise
                continue
            return Opened(session, False, load_s > 0, load_s, waited_s, resumed)

    def _attach(self, request: OpenRequest) -> Opened | None:
        if not request.session_key:
            return None
        session = self.sessions.by_key(request.session_key)
        if session is None:
            self._refuse_taken(request)
            return None
        if request.fresh and session.durable:
            return None  # it makes way for the new one
        check_attach(
            session,
            model=request.model,
            profile_id=request.profile_id,
            prompt_format=request.prompt_format,
            capacity=request.capacity,
            durable=request.durable,
            overflow=request.overflow,
            layout=request.layout,
        )
        session.attached = True
        session.used_at = time.monotonic()
        self.idle.touch(session.used_at)
        return Opened(session, True, False, 0.0, 0.0)

    async def _open(self, model: StoredModel, request: OpenRequest) -> Session:
        assert self.resident is not None
        load = self.resident.load
        _refuse_overflow(request, load)
        _refuse_layout(request, load)
        if request.durable:
            refuse_unless_saved(model.name, load.capabilities)
        session_id = self.sessions.new_id()

        async def make(planned: Resolution) -> Session:
            window = planned.numbers.effective.tokens
            identity = self.identity(
                model,
                request.capacity,
                window=window,
                prompt_format=request.prompt_format,
                profile_id=request.profile_id,
            )
            operation = OpenOp(
                session_id=session_id,
                prompt_format=identity.prompt_format,
                window=window,
                k_type=request.capacity.k_type,
                v_type=request.capacity.v_type,
                kv_digest=identity.kv_digest,
                runtime_digest=identity.runtime_digest,
                free_bytes=planned.free_bytes,
                compute_bytes=host_buffers(planned),
                overflow=request.overflow,
                layout=request.layout,
                streams=request.capacity.streams,
            )
            _, resolution = await self._make_context(planned, operation)
            return Session(
                session_id=session_id,
                generation=self.sessions.generation,
                key=request.session_key,
                model=model.name,
                identity=identity,
                request=request.capacity,
                resolution=resolution,
                capabilities=capabilities_of(load),
                opened_at=time.monotonic(),
                used_at=time.monotonic(),
                overflow=request.overflow,
                layout=request.layout,
                durable=request.durable,
            )

        def leaves() -> Leaving:
            held = self.sessions.by_key(request.session_key) if request.fresh else None
            return self._leaving(request.layout, replaced=held)

        return await self._new_session(session_id, model, request.capacity, make, leaves)

    # --- durable sessions ----------------------------------------------------------------------

    def _refuse_taken(self, request: OpenRequest) -> None:
        self.durable.check_elsewhere(
            self.sessions, request.session_key, model=request.model, durable=request.durable
        )

    async def _begin(self, session: Session, request: OpenRequest) -> Resumed | None:
        """Bring a new durable session to where it was saved. What stands against it is part of the
        answer; GenerationStale where the worker went away.
        """
        if not request.durable:
            return None

        async def send(operation: Payload) -> Payload:
            try:
                await self.ready(session)
            except SessionFatal as error:  # of the resume: the operation wasn't sent
                raise GenerationStale(error.message, metadata=error.metadata) from None
            result = await self.call(operation, session=session)
            if isinstance(result, RestoreResult) and not result.cancelled:
                self.plan.count(result, self.sessions.resident)
            return result

        try:
            return await self.durable.begin(session, send, fresh=request.fresh)
        except BaseException:  # before anyone, this call's next try too, finds it by its key
            await see_through(self._close_unknown(session))
            raise

    async def _close_unknown(self, session: Session, *, discard: bool = False) -> None:
        """Nobody has its handle, and what was saved hasn't come back: it must not stand for it."""
        if self.sessions.is_open(session):
            with contextlib.suppress(ModeldError):
                await self.close(session, why="opening it didn't go through", discard=discard)

    async def keep(self, session: Session, key: str) -> Saved:
        """Make an open session durable under a key, and save it at once. In a hold.

        Raises InvalidRequest for a key that is taken.
        """
        other = self.sessions.by_key(key)
        if other is not None and other is not session:
            raise InvalidRequest.of(
                "session_key", key, "a key of no open session", f"{other.session_id} has it."
            )
        self.durable.check_elsewhere(self.sessions, key, model=session.model, durable=True)
        session.key, session.durable = key, True
        return await self._save(session)

    async def answer(
        self,
        session: Session,
        request: Payload,
        on_data: OnData,
        adopt: Adopt | None = None,
    ) -> tuple[Payload, Saved | None]:
        """A decode or a turn; then, of a durable session, how saving it went. In a hold, which is
        kept until it is saved, also where the caller is gone, or the answer failed on its way.
        ``adopt`` as in ``call``.
        """
        began = False

        async def took(payload: Payload) -> None:
            nonlocal began
            began = True
            await on_data(payload)

        try:
            result = await self.call(
                request, session=session, on_data=took, credit=CREDIT_CHUNKS, adopt=adopt
            )
        except BaseException as error:
            # A refusal has changed nothing, and must not take the place of what is saved.
            refused = isinstance(error, ModeldError) and not began
            if session.durable and not refused and self.sessions.is_open(session):
                await self._save(session)
            raise
        return result, await self._save(session) if session.durable else None

    async def _save(self, session: Session) -> Saved:
        async def send(operation: Payload) -> Payload:
            self.sessions.require(session)
            return await self.call(operation)

        return await self.durable.save(session, send)

    async def close(self, session: Session, *, why: str, discard: bool = False) -> int:
        """Close a session; how many tokens stay behind as reclaimable cache.

        What runs for it is stopped; the worker closes it after that. What is saved of a durable one
        stays unless ``discard``.
        """
        self.sessions.close(session, why)
        open_ones = self.sessions.all()
        newest = max(open_ones, key=lambda one: one.opened_at) if open_ones else None
        self.latest = newest.resolution if newest else None
        self.queue.release_parked(session.session_id)
        for operation in tuple(session.operations):
            operation.cancel()
        self._bus.emit(
            "session",
            backend=self.backend,
            state="closed",
            model=session.model,
            generation=session.generation,
            session_id=session.session_id,
            cause=why,
        )
        if session.durable and discard:
            session.durable = False  # what its last turn saves comes too late
            # First, so that it is forgotten also where the worker dies of the close.
            await see_through(self.durable.forget(session.key))
        return await see_through(self._close_in_worker(session, discard))

    async def _close_in_worker(self, session: Session, discard: bool) -> int:
        generation = self.sessions.generation
        result = await self.call(CloseOp(session_id=session.session_id, discard=discard))
        assert isinstance(result, CloseResult)
        if self.sessions.generation == generation:
            self.plan.count(result, self.sessions.resident)
        return result.retained


def _refuse_overflow(request: OpenRequest, load: LoadResult) -> None:
    """Raises UnsupportedFeature for overflow evict where the load didn't find that it can be."""
    told = parse_capability("overflow.evict", load.capabilities.get("overflow.evict", ""))
    if request.overflow == "evict" and told.answer != "yes":
        raise UnsupportedFeature(
            f"Sessions of {request.model!r} can't go on beyond their window: {told.answer}, "
            f"{told.evidence or 'its worker does not say so'}. Open with OVERFLOW_REFUSE.",
            metadata={"capability": "overflow.evict", "model": request.model},
        )


def _refuse_layout(request: OpenRequest, load: LoadResult) -> None:
    """Raises UnsupportedFeature for a batched session where the load didn't find that it can be."""
    told = parse_capability("layout.batched", load.capabilities.get("layout.batched", ""))
    if request.layout == "batched" and told.answer != "yes":
        raise UnsupportedFeature(
            f"Sessions of {request.model!r} can't share a context: {told.answer}, "
            f"{told.evidence or 'its worker does not say so'}. Open with LAYOUT_ISOLATED.",
            metadata={"capability": "layout.batched", "model": request.model},
        )


def capabilities_of(load: LoadResult) -> tuple[Capability, ...]:
    return tuple(
        # It names the executor, and why it is that one: what is asked of it isn't yes or no.
        Capability(name, "yes", text) if name == "executor" else parse_capability(name, text)
        for name, text in sorted(load.capabilities.items())
    )
