"""How sessions come to their contexts in a slot: made, registered, forked, and what makes place.

Knows no load, no transport and no policy of whom to park; what a session is opened with is
``model_slot``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from modeld.shared.capacity import CapacityRequest, Number, Reason, Resolution
from modeld.shared.errors import InsufficientMemory, InvalidRequest, UnsupportedFeature
from modeld.shared.messages import ForkOp, ForkResult, LoadResult, OpenOp, OpenResult
from modeld.shared.planner.capacity import confirm
from modeld.supervisor.awaiting import see_through
from modeld.supervisor.durable_sessions import Saved, refuse_unless_saved
from modeld.supervisor.findings import check_context
from modeld.supervisor.models.store import StoredModel
from modeld.supervisor.parking_slot import ParkingSlot
from modeld.supervisor.sessions import Session
from modeld.supervisor.slot_core import Caller
from modeld.supervisor.slot_plan import host_buffers, one_stream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Forked:
    session: Session
    result: ForkResult
    queue_seconds: float


class ContextSlot(ParkingSlot):
    """Part of ``ModelSlot``. All methods run on the daemon's loop."""

    batch_plan: Resolution | None = None  # of the batch that was made last

    async def close(self, session: Session, *, why: str, discard: bool = False) -> int:
        raise NotImplementedError

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
        async with self.hold(source.session_id, "fork", caller, beside=beside) as hold:
            await self._refuse_used_key(source, session_key, durable)
            self.sessions.get(source.session_id, source.generation, time.monotonic())
            resident = self.resident
            if resident is None:
                raise self.sessions.stale(source.generation)
            _refuse_unless_forked(source.model, resident.load)
            if durable:
                refuse_unless_saved(source.model, resident.load.capabilities)
            await self._make_place(source.layout, source)
            await self.ready(source)
            session_id = self.sessions.new_id()
            window = source.resolution.numbers.effective.tokens
            capacity = replace(source.request, window=window, sessions=0)
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
                return source.forked(session_id, session_key, resolution, result.resident, now)

            session = await self._new_session(
                session_id, resident.model, capacity, make, kept=source
            )
            if durable:
                try:
                    await self.keep(session, session_key)
                except BaseException:  # nobody has the branch: nor must its key be taken
                    self.spawn(self._close_unknown(session, discard=True))
                    raise
            return Forked(session, results[-1], hold.waited_s)

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
        *,
        kept: Session | None = None,
    ) -> Session:
        """Plan a context, have ``make`` make it, and open the session that has it. Where the caller
        is gone meanwhile nobody has its handle, so that it is closed again.
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
                self._refuse_one_more()  # several may be on their way where they run together
                joined = self._joined(capacity)
                if joined is not None:
                    return await see_through(opened(joined))
                return await self.place(
                    model, capacity, lambda plan: see_through(opened(plan)), kept=kept
                )
        except asyncio.CancelledError:
            for session in self.sessions.all():
                if session.session_id == session_id:
                    self.spawn(self._close_unknown(session))
            raise

    def _joined(self, capacity: CapacityRequest) -> Resolution | None:
        """The plan of a session that gets a stream which is there already: it needs no memory.

        None where none is known to be: without a session in it, a batch may be gone.
        """
        batch = self.batch_plan
        if not capacity.streams or batch is None or not self.sessions.of_layout("batched"):
            return None
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
        streams = planned.streams
        joins = bool(streams and self.sessions.of_layout("batched"))
        generation = self.sessions.generation
        with contextlib.nullcontext() if joins else self.plan.under_way(planned, load=False):
            result = await self.call(operation, session=source)
        assert isinstance(result, OpenResult)
        self.refuse_overtaken(generation)
        if streams and not joins:
            self.batch_plan = planned
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

    async def _make_place(self, layout: str, kept: Session | None = None) -> None:
        """Where as many are open as may be, in all or of the layout, close the detached session
        that was used least recently, ``kept`` excepted. Raises InsufficientMemory where none is.

        What it held stays as reclaimable cache, which its key's next open finds.
        """
        config, alike = self.config, self.sessions.of_layout(layout)
        most = config.max_sessions if self.cannot_park else config.max_open_sessions
        if len(alike) < (config.batch_streams if layout == "batched" else most):
            if len(self.sessions) < config.max_open_sessions:
                return
            alike = self.sessions.all()
        detached = [
            one
            for one in self.sessions.detached(time.monotonic())
            if one is not kept and one in alike
        ]
        if detached:
            oldest = min(detached, key=lambda session: session.used_at)
            await self.close(oldest, why="closed while detached, to make room for another session")
        else:
            self._refuse_one_more()

    def _refuse_one_more(self) -> None:
        """Raises InsufficientMemory where as many are open as the operator lets be."""
        config = self.config
        if len(self.sessions) >= config.max_open_sessions:
            raise InsufficientMemory(
                f"{len(self.sessions)} sessions are open, as many as max_open_sessions allows, and "
                "none is detached. Close one, or raise that setting.",
                metadata={
                    "open_sessions": len(self.sessions),
                    "max_open_sessions": config.max_open_sessions,
                },
            )

    def _tell_findings(self, findings: tuple[str, ...]) -> None:
        for finding in findings:
            logger.warning("%s: %s", self.model_name, finding)
            self._emit("finding", cause=finding)


def _refuse_unless_forked(model: str, load: LoadResult) -> None:
    answer = load.capabilities.get("fork", "no")
    if answer.startswith("no"):
        raise UnsupportedFeature(
            f"Sessions of {model!r} can't be forked ({answer}). Open a session with the same "
            "prompt instead: it is evaluated again.",
            metadata={"capability": "fork", "model": model, "answer": answer},
        )
