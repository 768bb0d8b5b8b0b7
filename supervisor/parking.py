"""Which sessions give their contexts up for another, least recently used first, and what is said.

Pure policy over what the registry and the account hold. Sends nothing and knows no worker; what
parking carries out is ``parking_slot``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from modeld.shared.capacity import SlotUse
from modeld.shared.errors import InsufficientMemory
from modeld.shared.messages import Status
from modeld.shared.planner.remedies import held_bytes
from modeld.shared.planner.windows import reclaimable_cells
from modeld.supervisor.sessions import Session

NO_BUDGET = (
    "Idle sessions would be parked for it if there were anywhere to keep them: set cold_ram_bytes "
    "or cold_disk_bytes."
)


def idle(
    sessions: Iterable[Session], busy: Collection[str], kept: Collection[str]
) -> list[Session]:
    """Those that may be parked, the least recently used first: attached or not, but with nothing
    running, waiting or between a turn's parts (``busy``), and not among ``kept``. A batched session
    gives no memory back by itself.
    """
    return sorted(
        (
            session
            for session in sessions
            if not session.parked
            and not session.batched
            and not session.operations
            and session.session_id not in busy
            and session.session_id not in kept
        ),
        key=lambda session: session.used_at,
    )


def use_if_parked(use: SlotUse, sessions: Sequence[Session]) -> SlotUse:
    """The slot's use as a plan finds it once these are parked: their contexts given back.

    What parked KV takes of the host's memory counts as given back too, so that it changes nothing.
    """
    held = held_bytes(use)
    freed = sum(one.resolution.kv_bytes + one.resolution.compute_bytes for one in sessions)
    freed = min(freed, held)

    def after(resident: int, reclaimable: int) -> int:
        """A context lies on its places in proportion."""
        return reclaimable + (resident - reclaimable) * freed // held if held else reclaimable

    cells = reclaimable_cells(use) + sum(one.resolution.allocated for one in sessions)
    return replace(
        use,
        sessions=max(0, use.sessions - len(sessions)),
        reclaimable_bytes=after(use.resident_bytes, use.reclaimable_bytes),
        reclaimable_cells=min(use.cells, cells),
        on_devices=tuple(
            replace(row, reclaimable_bytes=after(row.resident_bytes, row.reclaimable_bytes))
            for row in use.on_devices
        ),
    )


def refused(error: InsufficientMemory, parked: int, others: int, why: str) -> InsufficientMemory:
    """The refusal with what parking did for it. ``others`` have a context still; ``why`` they
    can't be parked at all ("": they can).
    """
    words = why if others else ""
    if not why and parked:
        words = f"{parked} idle session(s) were parked for it, and more could not be."
    elif not why and others:
        words = "Parking the sessions that are idle would not make room for it either."
    return InsufficientMemory(
        f"{error.message} {words}".strip(), metadata={**error.metadata, "parked_sessions": parked}
    )


def told(session: Session, status: Status) -> Status:
    """The status with what a resume brought back for it, said once."""
    back = session.back
    if back is None:
        return status
    restored = min(back.restored, status.reused - status.restored)
    status.restored += restored
    status.seconds += back.seconds
    if back.missing and status.prefilled and status.miss_reason in ("NONE", "EXTENDED", "COLD"):
        status.miss_reason = "RECLAIMED"
    back.restored, back.seconds = back.restored - restored, 0.0
    return status


def counters(session: Session) -> dict[str, int]:
    """Of the whole session's moves, since it was opened."""
    return {"times_parked": session.times_parked, "resumed_tokens": session.resumed_tokens}
