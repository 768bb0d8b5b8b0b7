"""A slot whose sessions may be more than its contexts: parks idle ones, and brings them back.

Owns the order of planning, parking and making a context. Whom to park is ``parking``'s, what a
context costs the planner's; knows no transport and no model's load.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from modeld.shared.capacity import (
    CapacityRequest,
    MachineReading,
    Resolution,
    SlotUse,
)
from modeld.shared.errors import (
    InsufficientMemory,
    InvalidRequest,
    SessionNotFound,
    StorageFull,
    UnsupportedFeature,
)
from modeld.shared.messages import (
    OpenResult,
    ParkOp,
    ParkResult,
    Payload,
    ResumeOp,
    ResumeResult,
)
from modeld.supervisor import parking
from modeld.supervisor.awaiting import see_through
from modeld.supervisor.models.store import StoredModel
from modeld.supervisor.planning import Question
from modeld.supervisor.planning_slot import PlanningSlot
from modeld.supervisor.sessions import Back, Session
from modeld.supervisor.slot_plan import host_buffers

logger = logging.getLogger(__name__)

T = TypeVar("T")
Leaving = list[tuple[Session, str]]  # who is closed for another, and why
# What keeps one session from being parked, and nothing else from going on.
_CANNOT = (InsufficientMemory, InvalidRequest, SessionNotFound, StorageFull, UnsupportedFeature)


def nobody() -> Leaving:
    return []


class ParkingSlot(PlanningSlot):
    """Part of ``ModelSlot``. All methods run on the daemon's loop."""

    batch_plan: Resolution | None = None  # of the batch that was made last, as it came true

    def _joined(
        self, capacity: CapacityRequest, leaving: Leaving, *, swaps: bool = False
    ) -> Resolution | None:
        raise NotImplementedError

    async def close(self, session: Session, *, why: str, discard: bool = False) -> int:
        raise NotImplementedError

    async def place(
        self,
        model: StoredModel,
        request: CapacityRequest,
        make: Callable[[Resolution], Awaitable[T]],
        *,
        kept: Session | None = None,
        leaves: Callable[[], Leaving] = nobody,
    ) -> T:
        """Plan a context and have it made, parking idle sessions for it where need be.

        ``make`` is given the plan and sends the operation; ``kept`` stays, and who ``leaves`` is
        closed, once it is planned that this makes it fit. A batch takes the place of an idle one.
        To be called by who holds ``placing``.
        Raises InsufficientMemory as the planner or the worker says it, with how many were parked;
        where parking all that are idle wouldn't help, none is.
        """
        stays = {kept.session_id} if kept else set[str]()
        parked = 0
        while True:
            machine = await self.planning.read()
            leaving = leaves()
            question = self._question(model, request)
            going = [session for session, _ in leaving]
            if going:
                question = replace(question, use=self._use_without(question, going))
            refusal: InsufficientMemory | None = None
            # Streams are beside the contexts that are counted, and there is one batch at most.
            staying = [one for one in self.sessions.all() if not one.parked and one not in going]
            alike = sum(one.batched == bool(request.streams) for one in staying)
            full = alike >= (1 if request.streams else self.config.max_sessions)
            idle = [one for one in self._idle(stays) if one not in going]
            spare = [one for one in idle if one.batched == bool(request.streams)]
            try:
                planned = self.plan.resolve(question, machine)
                if not leaving and not (full and spare):
                    return await make(planned)
            except InsufficientMemory as error:
                refusal = error
                if full:  # without one of its kind the others' memory is of no use
                    rest = [one for one in idle if one not in spare]
                    spare = spare and [*spare, *rest]
                else:
                    spare = idle
            if refusal is not None and not (spare and self._fits(question, machine, spare)):
                others = self.sessions.resident - (kept is not None and not kept.parked)
                raise parking.refused(refusal, parked, others, self.cannot_park) from None
            if leaving:
                await self._close_all(leaving)
            elif await see_through(self._park(spare[0])):
                parked += 1
            else:
                stays.add(spare[0].session_id)

    async def refuse_unless_two(
        self, model: StoredModel, request: CapacityRequest, session: Session
    ) -> None:
        """Raises InsufficientMemory unless it can be planned to give the parked session a context
        and another of its kind beside it, with all parked that are idle.
        """
        machine = await self.planning.read()
        question, spare = self._question(model, request), self._idle({session.session_id})
        alone = sum(not one.batched for one in spare)
        most, busy = self.config.max_sessions, self.sessions.contexts - alone
        if busy + 2 > most:
            raise InsufficientMemory(
                f"A fork takes a context beside its source's: {busy + 2} with those that can't be "
                f"parked now, and max_sessions allows {most}. Raise it, or close a session.",
                metadata={"max_sessions": most, "contexts": busy + 2},
            )
        use = parking.use_if_parked(question.use, spare)
        if alone < len(spare):  # the batch goes as a whole
            question = replace(question, batched=0)
        both = replace(request, sessions=use.sessions + 2)
        try:
            self.plan.resolve(replace(question, use=use, request=both), machine)
        except InsufficientMemory as error:
            raise parking.refused(error, 0, self.sessions.resident, self.cannot_park) from None

    async def call_beside(self, session: Session, request: Payload) -> Payload:
        """Send what takes a second context beside the session's for as long as it runs, parking an
        idle session for it where there is none. In a hold; raises as ``call`` and ``place``.
        """
        await self.ready(session)
        try:
            return await self.call(request, session=session)
        except InsufficientMemory as error:
            resident = self.resident
            if resident is None or error.metadata.get("cause") == "state":  # no context's lack
                raise
            if session.batched:  # no other stream is to be had by parking
                raise
            if not self._idle({session.session_id}):
                raise
        window = session.resolution.numbers.effective.tokens
        async with self.placing:
            return await self.place(
                resident.model,
                replace(session.request, window=window, sessions=0),
                lambda planned: self.call(request, session=session),
                kept=session,
            )

    def _idle(self, kept: set[str]) -> list[Session]:
        """Who may be parked, in that order: who only waits for its turn comes after who is idle."""
        if self.cannot_park:
            return []
        sessions = self.sessions.all()
        idle = parking.idle(sessions, self.queue.sessions(), kept)
        passed = kept | {one.session_id for one in idle}
        return [*idle, *parking.idle(sessions, self.queue.running(), passed)]

    def _use_without(self, question: Question, going: list[Session]) -> SlotUse:
        staying = [one for one in self.sessions.all() if one not in going]
        return parking.use_if_parked(question.use, parking.given_back(going, staying))

    async def _close_all(self, leaving: Leaving) -> None:
        for session, why in leaving:
            if self.sessions.is_open(session):  # its client may have closed it meanwhile
                await self.close(session, why=why)

    def _fits(self, question: Question, machine: MachineReading, spare: list[Session]) -> bool:
        """Whether it would be planned with all of these parked."""
        use = parking.use_if_parked(question.use, spare)
        try:
            self.planning.resolve(replace(question, use=use), machine)
        except InsufficientMemory:
            return False
        return True

    async def _park(self, session: Session) -> bool:
        """Give its context to others; whether that was done."""
        generation = self.sessions.generation
        try:
            result = await self.call(ParkOp(session_id=session.session_id))
        except _CANNOT as error:
            logger.warning("%s isn't parked: %s", session.session_id, error.message)
            return False
        assert isinstance(result, ParkResult)
        self.refuse_overtaken(generation)
        session.parked = True
        session.times_parked += 1
        self._cold_is(result.ram_bytes)
        self.plan.count(result, self.sessions.resident)
        lost = f", {result.lost} lost" if result.lost else ""
        self._tell_moved(session, "parked", f"{result.parked} tokens kept{lost}", result.seconds)
        return True

    async def ready(self, session: Session) -> None:
        """Give a parked session a context again, parking another for it where need be.

        Raises InsufficientMemory where that can't be; the session then stays parked. Raises
        SessionClosed where it was closed meanwhile.
        """
        if session.parked:
            await self._bring_back(session)

    async def _bring_back(self, session: Session) -> None:
        async with self.placing:
            if not session.parked:  # another call of it was first
                return
            resident = self.resident
            if resident is None:
                raise self.sessions.stale(session.generation)
            capacity = self.wanted_back(session)
            try:
                joined = self._joined(capacity, [], swaps=True)
                if joined is not None:
                    await see_through(self._resume(session, joined))
                    return
                await self.place(
                    resident.model,
                    capacity,
                    lambda planned: see_through(self._resume(session, planned)),
                    kept=session,
                )
            except InsufficientMemory:
                self.sessions.require(session)  # closed meanwhile, it needs no memory
                raise

    def wanted_back(self, session: Session) -> CapacityRequest:
        """What a parked session needs again. A batch comes back as it was."""
        told = session.resolution
        window = told.allocated if session.batched else told.numbers.effective.tokens
        return replace(session.request, window=window, sessions=0)

    async def _resume(self, session: Session, planned: Resolution) -> None:
        self.sessions.get(session.session_id, session.generation, time.monotonic())
        operation = ResumeOp(
            session_id=session.session_id,
            free_bytes=planned.free_bytes,
            compute_bytes=host_buffers(planned),
        )
        result = await self._made(planned, operation)
        assert isinstance(result, ResumeResult)
        session.parked = False
        session.resident = result.resident
        session.resumed_tokens += result.restored
        session.back = Back(
            result.restored, result.missing, result.seconds, result.resident - result.restored
        )
        self.plan.count(result, self.sessions.resident, planned)
        missing = f", {result.missing} missing" if result.missing else ""
        text = f"{result.restored} tokens brought back{missing}"
        self._tell_moved(session, "resumed", text, result.seconds)

    async def _made(
        self, planned: Resolution, operation: Payload, session: Session | None = None
    ) -> OpenResult:
        """What the worker answers to an operation that takes a context as planned, or a stream of
        the batch that is there.
        """
        generation = self.sessions.generation
        joins = bool(planned.streams and self.sessions.in_batch)
        with contextlib.nullcontext() if joins else self.plan.under_way(planned, load=False):
            result = await self.call(operation, session=session)
        assert isinstance(result, OpenResult)
        self.refuse_overtaken(generation)
        if planned.streams and not joins:
            self.batch_plan = replace(planned, allocated=result.window)
        return result

    def _tell_moved(self, session: Session, state: str, text: str, seconds: float) -> None:
        logger.info("%s %s: %s in %.3f s", session.session_id, state, text, seconds)
        self._bus.emit(
            "session",
            backend=self.backend,
            state=state,
            model=session.model,
            generation=session.generation,
            session_id=session.session_id,
            cause=f"{text} in {seconds:.3f} s",
        )
