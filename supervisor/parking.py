"""Which sessions give their contexts up for another, least recently used first, and what is said.

Pure policy over what the registry and the account hold. Sends nothing and knows no worker; what
parking carries out is ``parking_slot``'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from modeld.shared.capacity import Resolution, SlotUse
from modeld.shared.errors import InsufficientMemory
from modeld.shared.messages import Status
from modeld.shared.planner.remedies import held_bytes
from modeld.shared.planner.windows import reclaimable_cells
from modeld.supervisor.config import Config
from modeld.supervisor.sessions import Session


def nowhere(config: Config, planned: Resolution | None) -> str:
    """Why there is nowhere to keep parked KV, and which setting changes that. ``planned`` is what
    the resident model was loaded by; None: none is.
    """
    ram, disk, limit = config.cold_ram_bytes, config.cold_disk_bytes, config.user_limit_bytes
    least = planned.kv_bytes if planned else 0
    enough = f" to at least {least}, which is one such session's KV" if least else ""
    if not ram and not disk:
        why = f"cold_ram_bytes and cold_disk_bytes are both 0. Set one of them{enough}"
    elif disk:
        folder = config.data_root / "cold"
        why = f"cold_disk_bytes is {disk}, but {folder} can't be written (the log says why)"
        if ram:
            why += f", and user_limit_bytes ({limit}) leaves none of cold_ram_bytes ({ram})"
        why += ". Make that folder one of this user's alone, and load the model again"
    else:
        why = (
            f"cold_ram_bytes is {ram}, but of user_limit_bytes ({limit}) the plan that the model "
            f"was loaded by left 0 bytes to it. Set cold_disk_bytes{enough}"
        )
        if planned and planned.numbers.requested.tokens:  # an automatic window takes what there is
            why += f", or user_limit_bytes to at least {limit + least}"
    return f"Idle sessions would be parked for it if there were anywhere to keep them: {why}."


def idle(
    sessions: Iterable[Session], busy: Collection[str], kept: Collection[str]
) -> list[Session]:
    """Those that may be parked, the least recently used first: attached or not, but with nothing
    running, waiting or between a turn's parts (``busy``), and not among ``kept``. A batched session
    gives no memory back by itself: all of a batch or none, as if all were used when the last was.
    """
    there = [session for session in sessions if not session.parked]
    able = [
        session
        for session in there
        if not session.operations
        and session.session_id not in busy
        and session.session_id not in kept
    ]
    batch = [session for session in there if session.batched]
    if any(session not in able for session in batch):
        able = [session for session in able if not session.batched]
    last = max((session.used_at for session in batch), default=0.0)
    return sorted(able, key=lambda one: (last if one.batched else one.used_at, one.used_at))


def given_back(sessions: Iterable[Session], staying: Iterable[Session]) -> list[Session]:
    """Of sessions that are parked or closed, those whose memory can be had then: those with a
    context of their own, and all of a batch that none of ``staying`` is in.
    """
    batch_stays = any(one.batched and not one.parked for one in staying)
    return [one for one in sessions if not one.parked and not (one.batched and batch_stays)]


def use_if_parked(use: SlotUse, sessions: Sequence[Session]) -> SlotUse:
    """The slot's use as a plan finds it once these are parked or closed: what they hold given back,
    of a batch all of it.

    What parked KV takes of the host's memory counts as given back too, so that it changes nothing.
    """
    held = held_bytes(use)
    alone = [one for one in sessions if not one.batched]
    freed = sum(one.resolution.kv_bytes + one.resolution.compute_bytes for one in alone)
    cells = sum(one.resolution.allocated for one in alone)
    batch = next((one.resolution for one in sessions if one.batched), None)
    if batch is not None:
        freed += batch.streams * (batch.kv_bytes + batch.compute_bytes)
        cells += batch.streams * batch.allocated
    freed = min(freed, held)

    def after(resident: int, reclaimable: int) -> int:
        """A context lies on its places in proportion."""
        return reclaimable + (resident - reclaimable) * freed // held if held else reclaimable

    return replace(
        use,
        sessions=max(0, use.sessions - len(sessions)),
        reclaimable_bytes=after(use.resident_bytes, use.reclaimable_bytes),
        reclaimable_cells=min(use.cells, reclaimable_cells(use) + cells),
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
    at, found = (status.prefix if status.part == "suffix" else 0), status.reused - status.restored
    # It isn't what the context that it got held anyhow, nor what was copied in its place.
    restored = min(back.restored, max(0, at + found - max(at, back.begin)))
    if status.copied:
        restored = back.restored = 0
    status.restored += restored
    status.seconds += back.seconds
    if back.missing and status.prefilled and status.miss_reason in ("NONE", "EXTENDED", "COLD"):
        status.miss_reason = "RECLAIMED"
    back.restored, back.seconds = back.restored - restored, 0.0
    return status


def counters(session: Session) -> dict[str, int]:
    """Of the whole session's moves, since it was opened."""
    return {"times_parked": session.times_parked, "resumed_tokens": session.resumed_tokens}
