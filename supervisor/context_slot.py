"""How sessions come to their contexts in a slot: made, registered, forked, and what makes place.

Knows no load, no transport and no policy of whom to park; what a session is opened with is
``model_slot``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from modeld.shared.capacity import CapacityRequest, Number, Reason, Resolution
from modeld.shared.errors import (
    InsufficientMemory,
    InvalidRequest,
    ModelBusy,
    UnsupportedFeature,
)
from modeld.shared.messages import ForkOp, ForkResult, LoadResult, OpenOp, OpenResult
from modeld.shared.planner.capacity import confirm
from modeld.supervisor.awaiting import see_through
from modeld.supervisor.durable_sessions import Saved, refuse_unless_saved
from modeld.supervisor.findings import check_context
from modeld.supervisor.models.store import StoredModel
from modeld.supervisor.parking_slot import Leaving, ParkingSlot
from modeld.supervisor.sessions import Session
from modeld.supervisor.slot_core import Caller
from modeld.supervisor.slot_plan import host_buffers, one_stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forked:
    session: Session
    result: ForkResult
    queue_seconds: float
    saved: Saved | None  # of a durable one, how saving it at once went


class ContextSlot(ParkingSlot):
    """Part of ``ModelSlot``. All methods run on the daemon's loop."""

    async def keep(self, session: Session, key: str) -> Saved:
        raise NotImplementedError

    async def _close_unknown(self, session: Session, *, discard: bool = False) -> None:
        raise NotImplementedError

    async def fork(
        self, source: Session, caller: Caller, *, session_key: str = "", durable: bool = False
    ) -> Forked:
        """A second session of what ``source`` holds, which goes on by itself.

        Raises InvalidRequest for a key that is open or, if ``durable``, that something is saved
        under; InsufficientMemory where no context can be had; UnsupportedFeature where the engine
        doesn't copy, or doesn't give what is to be saved. The source is as it was then.
        """
        await self._refuse_used_key(source, session_key, durable)
        # A key is looked up and taken at once, and what is saved is brought back before any turn.
        beside = False if session_key else None
        async with (
            self.naming(session_key, caller),
            self.hold(source.session_id, "fork", caller, beside=beside) as hold,
        ):
            await self._refuse_used_key(source, session_key, durable)
            session, result = await self._fork(source, session_key, durable)
            saved = None
            if durable:
                try:
                    saved = await self.keep(session, session_key)
                except BaseException:  # nobody has the branch: nor must its key be taken
                    self.spawn(self._close_unknown(session, discard=True))
                    raise
            return Forked(session, result, hold.waited_s, saved)

    @contextlib.asynccontextmanager
    async def naming(self, key: str, caller: Caller) -> AsyncIterator[None]:
        """While a session is opened under a key: to be taken before the slot, which others use
        meanwhile. Raises ModelBusy where the key isn't free as long as the caller waits.
        """
        if not key:
            yield
            return
        lock = self.durable.opening(key)
        now = asyncio.get_running_loop().time()
        until = now if caller.no_wait else caller.deadline  # a free lock is had without waiting
        if until is not None:  # a little before, so that the refusal reaches the caller
            until -= min(0.25, max(0.0, until - now) / 4)
        try:
            async with asyncio.timeout_at(until):
                await lock.acquire()
        except TimeoutError:
            raise ModelBusy(
                f"Another call opens a session under the key {key!r}. Try again when it is there.",
                metadata={"session_key": key},
                retry_after_s=1.0,
            ) from None
        try:
            yield
        finally:
            lock.release()

    async def _fork(self, source: Session, key: str, durable: bool) -> tuple[Session, ForkResult]:
        self.sessions.require(source)
        resident = self.resident
        if resident is None:
            raise self.sessions.stale(source.generation)
        _refuse_unless_forked(source.model, resident.load)
        if durable:
            refuse_unless_saved(source.model, resident.load.capabilities)
        leaves = partial(self._leaving, source.layout, kept=source)
        window = source.resolution.numbers.effective.tokens
        capacity = replace(source.request, window=window, sessions=0)
        if source.parked:  # refused before it is brought back for it, and another parked
            leaves()
            if not source.batched:
                await self.refuse_unless_two(resident.model, capacity, source)
        await self.ready(source)
        session_id = self.sessions.new_id()
        results: list[ForkResult] = []

        async def make(planned: Resolution) -> Session:
            operation = ForkOp(
                session_id=source.session_id,
                new_session_id=session_id,
                free_bytes=planned.free_bytes,
                compute_bytes=host_buffers(planned),
            )
            result, resolution = await self._make_context(planned, operation, source)
            assert isinstance(result, ForkResult)
            results.append(result)
            now = time.monotonic()
            return source.forked(session_id, key, resolution, result.resident, now)

        session = await self._new_session(
            session_id, resident.model, capacity, make, leaves, kept=source
        )
        return session, results[-1]

    async def _refuse_used_key(self, source: Session, key: str, durable: bool) -> None:
        """A branch never takes another session's place."""
        if not key:
            return
        other = self.sessions.by_key(key)
        if other is not None:
            raise InvalidRequest.of(
                "session_key", key, "a key of no open session", f"{other.session_id} has it."
            )
        self.durable.check_elsewhere(self.sessions, key, model=source.model, durable=durable)
        if durable and await asyncio.to_thread(self.durable.folder(key).read) is not None:
            raise InvalidRequest.of(
                "session_key",
                key,
                "a key that nothing is saved under",
                "Open that session instead, or close it with discard first.",
            )

    async def _new_session(
        self,
        session_id: str,
        model: StoredModel,
        capacity: CapacityRequest,
        make: Callable[[Resolution], Awaitable[Session]],
        leaves: Callable[[], Leaving],
        *,
        kept: Session | None = None,
    ) -> Session:
        """Plan a context, have ``make`` make it, and open the session that has it; who ``leaves``
        for it is closed in between. Where the caller is gone meanwhile nobody has its handle, so
        that it is closed again.
        """

        async def opened(planned: Resolution) -> Session:
            session = await make(planned)
            self.sessions.add(session)
            self.latest = told = session.resolution
            self._bus.emit(
                "session",
                backend=self.backend,
                state="open",
                model=session.model,
                generation=session.generation,
                session_id=session_id,
            )
            if not planned.gpu_layers and not session.batched:
                await self.planning.context_made(
                    model.digest, capacity, told.allocated, told.kv_bytes, told.compute_bytes
                )
            return session

        try:
            async with self.placing:
                leaving = leaves()
                joined = self._joined(capacity, leaving)
                if joined is not None:
                    await self._close_all(leaving)
                    return await see_through(opened(joined))
                return await self.place(
                    model,
                    capacity,
                    lambda plan: see_through(opened(plan)),
                    kept=kept,
                    leaves=leaves,
                )
        except asyncio.CancelledError:
            for session in self.sessions.all():
                if session.session_id == session_id:
                    self.spawn(self._close_unknown(session))
            raise

    def goes_beside(self, session_id: str) -> bool:
        """See ``SlotCore``. Not where its batch must first take the place of a narrower one: it
        waits until nothing of that runs.
        """
        if not super().goes_beside(session_id):
            return False
        session = next(one for one in self.sessions.all() if one.session_id == session_id)
        batch = self.batch_plan if self.sessions.in_batch else None
        return not (session.parked and batch and _lacks(batch, self.wanted_back(session)))

    def _joined(
        self, capacity: CapacityRequest, leaving: Leaving, *, swaps: bool = False
    ) -> Resolution | None:
        """The plan of a session that gets a stream which is there already: it needs no memory.

        None where none is known to be: without a session in it, a batch may be gone; with ``swaps``
        also where it is to make way for another, since it has no such stream and all in it are
        idle. Raises InsufficientMemory, as the worker does, where it has none otherwise.
        """
        batch, going = self.batch_plan, [session for session, _ in leaving]
        staying = [one for one in self.sessions.in_batch if one not in going]
        if not capacity.streams or batch is None or not staying:
            return None
        if _lacks(batch, capacity):
            if swaps and any(one.batched for one in self._idle(set())):  # all of them, or none
                return None
            raise _no_such_stream(batch, capacity, len(self.sessions.in_batch), swaps)
        numbers = batch.numbers
        effective = numbers.effective
        if capacity.window:
            effective = Number(capacity.window, Reason.REQUEST, Reason.MEMORY, batch.allocated)
        beyond = numbers.planner.tokens - numbers.effective.tokens
        planner = replace(numbers.planner, tokens=effective.tokens + max(0, beyond))
        asked = Number(capacity.window, Reason.REQUEST if capacity.window else Reason.NONE)
        numbers = replace(numbers, requested=asked, effective=effective, planner=planner)
        return replace(batch, numbers=numbers, free_bytes=0)

    async def _make_context(
        self, planned: Resolution, operation: OpenOp | ForkOp, source: Session | None = None
    ) -> tuple[OpenResult, Resolution]:
        """Have the worker make it as planned: what it answered, and the plan as it came true.

        Who gets it is registered before anything else happens.
        """
        resident = self.resident
        if resident is None:  # the worker went away while the plan was made
            raise self.sessions.stale(self.sessions.previous)
        result = await self._made(planned, operation, source)
        mine = one_stream(planned)
        findings = check_context(mine, result)
        self._tell_findings(findings)
        resolution = confirm(
            mine,
            window=result.window,
            slot_cells=result.slot_cells,
            kv_bytes=result.kv_bytes,
            compute_bytes=result.compute_bytes,
            findings=resident.findings + findings,
        )
        self.plan.count(result, self.sessions.resident + 1, planned)
        return result, resolution

    def _leaving(
        self, layout: str, *, replaced: Session | None = None, kept: Session | None = None
    ) -> Leaving:
        """Who is closed for one more session: the one that is ``replaced``, and where as many are
        open as may be, in all or of the layout, the detached session that was used least recently,
        ``kept`` excepted. Raises InsufficientMemory where none is and one must be. A parked
        session's stream is its own: all that are open must find one.

        What it held stays as reclaimable cache, which its key's next open finds.
        """
        config = self.config
        leaving = [(replaced, "its key was opened anew")] if replaced is not None else []
        staying = [one for one in self.sessions.all() if one is not replaced]
        alike = [one for one in staying if one.layout == layout]
        most = config.max_sessions if self.cannot_park else config.max_open_sessions
        if len(alike) < (config.batch_streams if layout == "batched" else most):
            if len(staying) < config.max_open_sessions:
                return leaving
            alike = staying
        now = time.monotonic()
        detached = [
            one for one in alike if one is not kept and not self.sessions.is_attached(one, now)
        ]
        if detached:
            oldest = min(detached, key=lambda session: session.used_at)
            why = "closed while detached, to make room for another session"
            return [*leaving, (oldest, why)]
        if len(staying) >= config.max_open_sessions:
            raise self._one_too_many(len(staying))
        if layout == "batched":
            raise _no_stream(config.batch_streams, len(self.sessions.in_batch))
        return leaving

    def _one_too_many(self, count: int) -> InsufficientMemory:
        most = self.config.max_open_sessions
        return InsufficientMemory(
            f"{count} sessions are open, as many as max_open_sessions allows, and none is "
            "detached. Close one, or raise that setting.",
            metadata={"open_sessions": count, "max_open_sessions": most},
        )

    def _tell_findings(self, findings: tuple[str, ...]) -> None:
        for finding in findings:
            logger.warning("%s: %s", self.model_name, finding)
            self._emit("finding", cause=finding)


def _lacks(batch: Resolution, asked: CapacityRequest) -> bool:
    """Whether none of its streams is what was asked for."""
    types = (batch.k_type, batch.v_type)
    return asked.window > batch.allocated or (asked.k_type, asked.v_type) != types


def _no_stream(streams: int, used: int) -> InsufficientMemory:
    return InsufficientMemory(
        f"All {streams} streams of this slot's batch are held by open sessions, those that are "
        "parked included. Close one, or open an isolated session.",
        metadata={"cause": "streams", "streams": streams, "streams_in_use": used},
    )


def _no_such_stream(
    batch: Resolution, asked: CapacityRequest, used: int, swaps: bool
) -> InsufficientMemory:
    advice = "Ask for what there is, close the sessions in them, or open an isolated session."
    if swaps:
        advice = "It comes back once none of the sessions in them has a call that runs or waits."
    return InsufficientMemory(
        f"This slot's {batch.streams} streams have windows of {batch.allocated} tokens, K "
        f"{batch.k_type} and V {batch.v_type}, and {used} are in use: a window of {asked.window} "
        f"with K {asked.k_type} and V {asked.v_type} isn't among them. {advice}",
        metadata={
            "cause": "streams",
            "streams": batch.streams,
            "streams_in_use": used,
            "stream_window": batch.allocated,
            "window": asked.window,
        },
    )


def _refuse_unless_forked(model: str, load: LoadResult) -> None:
    answer = load.capabilities.get("fork", "no")
    if answer.startswith("no"):
        raise UnsupportedFeature(
            f"Sessions of {model!r} can't be forked ({answer}). Open a session with the same "
            "prompt instead: it is evaluated again.",
            metadata={"capability": "fork", "model": model, "answer": answer},
        )
