"""Who holds a slot, and who is next: fair turns, exclusive operations, turns kept across calls.

Round-robin among sessions, first come first served within one; exclusive operations take a place
of their own in the round and wait for the running set to be empty. Operations that may run beside
each other do, one of each session; nobody passes one that must wait for them. Runs on one event
loop, does no I/O, and knows nothing of models, engines or gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from modeld.shared.errors import ModelBusy, ModeldError

log = logging.getLogger(__name__)

OnPosition = Callable[[int, str, float], None]
ErrorFactory = Callable[[], ModeldError]

_RETRY_FIRST_S = 1.0  # what a turn takes, until one was seen
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 30.0


@dataclass(frozen=True)
class QueueSnapshot:
    """The queue as status shows it. Ages are seconds; the holder is the oldest running one."""

    queued: int
    running: int
    holder_operation: str  # "" when nobody holds the slot
    holder_age_s: float
    holder_session: str
    holder_parked: bool  # kept between the calls of one turn


class Hold:
    """A place in the running set. Release it exactly when the operation is over; idempotent."""

    def __init__(
        self,
        queue: TurnQueue,
        session: str,
        operation: str,
        exclusive: bool,
        since: float,
        beside: bool = False,
    ) -> None:
        self._queue = queue
        self.session = session
        self.operation = operation
        self.exclusive = exclusive
        self.beside = beside
        self.since = since  # loop time at which the slot was granted
        self.waited_s = 0.0
        self.resumed = False  # taken up again from a parked turn
        self.parked_turn = ""
        self._timer: asyncio.TimerHandle | None = None

    def release(self) -> None:
        self._queue._release(self)

    def park(self, turn_id: str, idle_s: float) -> None:
        """Keep the slot for ``turn_id`` of this session, for at most ``idle_s`` seconds.

        ``acquire`` with the same session and turn id takes it up at once. Without an id, or with
        no idle time, this releases.
        """
        self._queue._park(self, turn_id, idle_s)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.parked_turn:
            self.release()


class _Waiter:
    def __init__(
        self,
        session: str,
        operation: str,
        exclusive: bool,
        turn_id: str,
        on_position: OnPosition | None,
        since: float,
        future: asyncio.Future[Hold],
        beside: bool,
    ) -> None:
        self.session = session
        self.operation = operation
        self.exclusive = exclusive
        self.beside = beside
        self.turn_id = turn_id
        self.on_position = on_position
        self.since = since
        self.future = future
        self.told = 0  # the position last reported
        # An exclusive operation is a party of its own in the round.
        self.party: object = object() if exclusive else session


class TurnQueue:
    """The queue of one slot. Every method must be called on the loop that runs it."""

    def __init__(
        self,
        limit: int,
        *,
        max_running: int = 1,
        max_beside: int = 1,
        deadline_margin_s: float = 0.25,
    ) -> None:
        """``max_beside``: of sessions' operations that may run beside each other, as many do at
        most; what is no session's is short, and isn't among them.
        """
        self._limit = limit
        self._max_running = max_running
        self._max_beside = max_beside
        self._margin_s = deadline_margin_s
        self._running: dict[Hold, None] = {}  # a set that keeps its order
        # Parties in the order of their turn; a party that was served goes to the end. Newcomers
        # enter at the end too, so nobody is overtaken without limit.
        self._ring: dict[object, deque[_Waiter]] = {}
        self._queued = 0
        self._closed: ErrorFactory | None = None
        self._typical_s = _RETRY_FIRST_S
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def acquire(
        self,
        *,
        session: str,
        operation: str,
        no_wait: bool = False,
        deadline: float | None = None,
        exclusive: bool = False,
        beside: bool = False,
        turn_id: str = "",
        on_position: OnPosition | None = None,
    ) -> Hold:
        """Wait for the slot and return a Hold.

        ``beside``: it may run together with other such operations, of other sessions; all others
        run when nothing does, a turn that is kept between its calls included.
        ``deadline`` is loop time in seconds. ``on_position(position, holder_operation,
        holder_age_s)`` is called when waiting starts and when the position (1: next) changes; it
        must not call the queue. Raises ModelBusy at once with ``no_wait`` or when the queue is
        full, and slightly before the deadline otherwise, so that it still reaches the caller;
        or what ``close`` and ``fail_waiters`` say. Cancelling leaves no trace.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._closed is not None:
            raise self._closed()
        resumed = self._resume(session, operation, turn_id)
        if resumed is not None:
            return resumed
        passes = all(self._steps_aside(waiters[0]) for waiters in self._ring.values())
        if passes and self._admits(session, exclusive, beside):
            return self._grant(session, operation, exclusive, now, beside)
        if no_wait:
            raise self._busy(session, beside, "and the caller asked not to wait")
        if self._queued >= self._limit:
            raise self._busy(session, beside, f"and the queue is full at {self._limit} calls")
        waiter = _Waiter(
            session, operation, exclusive, turn_id, on_position, now, loop.create_future(), beside
        )
        self._ring.setdefault(waiter.party, deque()).append(waiter)
        self._queued += 1
        timer = None
        if deadline is not None:
            margin_s = min(self._margin_s, max(0.0, deadline - now) / 4)
            timer = loop.call_at(deadline - margin_s, self._give_up, waiter)
        self._tell_positions()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def release_parked(self, session: str | None = None) -> None:
        """Give up turns kept between calls: of one session, or of all."""
        for hold in list(self._running):
            if hold.parked_turn and session in (None, hold.session):
                self._release(hold)

    def fail_waiters(self, error: ErrorFactory) -> int:
        """End every waiting call with an error of its own; returns how many there were."""
        waiters = self._in_order()
        self._ring.clear()
        self._queued = 0
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error())
        return len(waiters)

    def close(self, error: ErrorFactory) -> int:
        """As ``fail_waiters``, and every later ``acquire`` fails alike. Holds stand."""
        self._closed = error
        return self.fail_waiters(error)

    def sessions(self) -> set[str]:
        """Whose operations run or wait, turns kept between their calls included."""
        return self.running() | {
            waiter.session for waiters in self._ring.values() for waiter in waiters
        }

    def running(self) -> set[str]:
        """Those whose operations run, turns kept between their calls included."""
        return {hold.session for hold in self._running}

    async def quiet(self) -> None:
        """Wait until nothing holds the slot."""
        await self._quiet.wait()

    def snapshot(self) -> QueueSnapshot:
        holder = min(self._running, key=lambda hold: hold.since, default=None)
        if holder is None:
            return QueueSnapshot(self._queued, 0, "", 0.0, "", False)
        return QueueSnapshot(
            queued=self._queued,
            running=len(self._running),
            holder_operation=holder.operation,
            holder_age_s=self._age_s(holder),
            holder_session=holder.session,
            holder_parked=bool(holder.parked_turn),
        )

    # --- granting ----------------------------------------------------------------------------

    def _admits(self, session: str, exclusive: bool, beside: bool) -> bool:
        if exclusive:
            return not self._running
        if beside:
            turns = sum(bool(hold.session) for hold in self._running)
            return (not session or turns < self._max_beside) and all(
                hold.beside and hold.session != session for hold in self._running
            )
        return len(self._running) < self._max_running and not any(
            hold.exclusive or hold.beside for hold in self._running
        )

    def _steps_aside(self, waiter: _Waiter) -> bool:
        """Whether it waits for its own session alone, so that others may go on meanwhile."""
        return (
            waiter.beside
            and not waiter.future.done()
            and any(hold.session == waiter.session for hold in self._running)
            and all(hold.beside for hold in self._running)
        )

    def _grant(
        self, session: str, operation: str, exclusive: bool, now: float, beside: bool = False
    ) -> Hold:
        hold = Hold(self, session, operation, exclusive, now, beside)
        self._running[hold] = None
        self._quiet.clear()
        return hold

    def _pump(self) -> None:
        """Admit whoever is next, as long as there is room."""
        while (waiter := self._next()) is not None:
            waiters = self._ring.pop(waiter.party)
            waiters.popleft()
            self._queued -= 1
            if waiters:
                self._ring[waiter.party] = waiters  # to the end of the round
            hold = self._grant(
                waiter.session, waiter.operation, waiter.exclusive, self._now(), waiter.beside
            )
            self._hand(waiter, hold)
        self._tell_positions()

    def _next(self) -> _Waiter | None:
        """Who can be admitted now. Nobody passes one whose turn it is and who can't be, an
        exclusive operation say: that would starve it.
        """
        for waiters in list(self._ring.values()):
            while waiters and waiters[0].future.done():  # cancelled, its task has not run since
                self._remove(waiters[0])
            if not waiters or self._steps_aside(waiters[0]):
                continue
            first = waiters[0]
            return first if self._admits(first.session, first.exclusive, first.beside) else None
        return None

    def _hand(self, waiter: _Waiter, hold: Hold) -> None:
        hold.waited_s = self._now() - waiter.since
        waiter.future.set_result(hold)

    def _release(self, hold: Hold) -> None:
        if hold not in self._running:
            return
        self._unpark(hold)
        del self._running[hold]
        self._typical_s += (self._age_s(hold) - self._typical_s) / 4
        self._pump()
        if not self._running:
            self._quiet.set()

    # --- turns kept between calls ------------------------------------------------------------

    def _park(self, hold: Hold, turn_id: str, idle_s: float) -> None:
        if hold not in self._running:
            return
        if not turn_id or idle_s <= 0 or self._closed is not None:
            self._release(hold)
            return
        hold.parked_turn = turn_id
        for waiter in self._in_order():
            same_turn = (waiter.session, waiter.turn_id) == (hold.session, turn_id)
            if same_turn and not waiter.future.done():
                self._remove(waiter)  # the turn's next part is here already
                self._hand(waiter, self._take_up(hold, waiter.operation))
                self._tell_positions()
                return
        loop = asyncio.get_running_loop()
        hold._timer = loop.call_later(idle_s, self._release, hold)

    def _resume(self, session: str, operation: str, turn_id: str) -> Hold | None:
        if not turn_id:
            return None
        for hold in self._running:
            if (hold.session, hold.parked_turn) == (session, turn_id):
                return self._take_up(hold, operation)
        return None

    def _take_up(self, parked: Hold, operation: str) -> Hold:
        """The next part gets a hold of its own; the old one no longer releases anything."""
        self._unpark(parked)
        del self._running[parked]
        hold = self._grant(parked.session, operation, parked.exclusive, parked.since, parked.beside)
        hold.resumed = True
        return hold

    def _unpark(self, hold: Hold) -> None:
        hold.parked_turn = ""
        if hold._timer is not None:
            hold._timer.cancel()
            hold._timer = None

    # --- waiting -----------------------------------------------------------------------------

    def _abandon(self, waiter: _Waiter) -> None:
        """The waiting task was cancelled, perhaps in the moment in which it was served."""
        future = waiter.future
        if future.done() and not future.cancelled():
            if future.exception() is None:
                future.result().release()
        elif self._remove(waiter):
            self._pump()  # it may have been an exclusive operation that others stood behind

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter.future.done():
            return
        ahead = self._in_order()
        ahead = ahead[: ahead.index(waiter)]
        error = self._busy(waiter.session, waiter.beside, "until the caller's deadline", ahead)
        self._remove(waiter)
        waiter.future.set_exception(error)
        self._pump()

    def _remove(self, waiter: _Waiter) -> bool:
        waiters = self._ring.get(waiter.party)
        if waiters is None or waiter not in waiters:
            return False
        waiters.remove(waiter)
        self._queued -= 1
        if not waiters:
            del self._ring[waiter.party]
        return True

    def _in_order(self) -> list[_Waiter]:
        """Waiters in the order in which they will be served."""
        places = [
            (turn, place, waiter)
            for place, waiters in enumerate(self._ring.values())
            for turn, waiter in enumerate(waiters)
        ]
        return [waiter for _, _, waiter in sorted(places, key=lambda item: item[:2])]

    def _tell_positions(self) -> None:
        if not self._ring:
            return
        view = self.snapshot()
        for position, waiter in enumerate(self._in_order(), start=1):
            if waiter.on_position is None or waiter.told == position:
                continue
            waiter.told = position
            try:
                waiter.on_position(position, view.holder_operation, view.holder_age_s)
            except Exception:
                log.exception("a position callback failed")

    def _rounds(self, session: str, beside: bool, ahead: Sequence[_Waiter]) -> float:
        """How many turns' times it takes until it would be served. Of those that run side by side
        one ends in a fraction of a turn's time; what runs alone waits for the last of them.
        """
        running = self._running
        joins = beside and all(hold.beside and hold.session != session for hold in running)
        first = 1 / max(1, len(running)) if joins else 1.0
        return first + sum(1 / self._max_beside if one.beside else 1.0 for one in ahead)

    def _busy(
        self, session: str, beside: bool, why: str, ahead: Sequence[_Waiter] | None = None
    ) -> ModelBusy:
        """The refusal of a call that stands behind ``ahead``; None: behind all that wait."""
        view = self.snapshot()
        ahead = self._in_order() if ahead is None else ahead
        position = len(ahead) + 1
        retry_s = self._typical_s * self._rounds(session, beside, ahead)
        retry_s = min(max(retry_s, _RETRY_MIN_S), _RETRY_MAX_S)
        who = (
            f"held by {view.holder_operation!r} for {view.holder_age_s:.1f} s"
            if view.holder_operation
            else "about to change hands"
        )
        return ModelBusy(
            f"The slot is {who}, with {self._queued} queued, {why}. "
            f"Try again in about {retry_s:.1f} s, or with a longer deadline.",
            metadata={
                "position": position,
                "holder_operation": view.holder_operation,
                "holder_age_seconds": f"{view.holder_age_s:.3f}",
                "queued": self._queued,
                "queue_limit": self._limit,
            },
            retry_after_s=retry_s,
        )

    def _age_s(self, hold: Hold) -> float:
        return self._now() - hold.since

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
