"""What happens to a slot and what has to be done about it: the slot machine's vocabulary.

Plain values only; their rules are in ``slot.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class SlotState(Enum):
    """Names equal the contract's, and the proto's SlotState without its prefix."""

    EMPTY = "EMPTY"
    LOADING = "LOADING"
    READY = "READY"
    BUSY = "BUSY"
    SWITCHING = "SWITCHING"
    UNLOADING = "UNLOADING"
    IDLE = "IDLE"
    FAILED = "FAILED"
    QUARANTINED = "QUARANTINED"
    SHUTTING_DOWN = "SHUTTING_DOWN"
    LOST_OWNER = "LOST_OWNER"


@dataclass(frozen=True)
class SlotModel:
    """The model as the slot tells models apart: ``digest`` is its content's."""

    name: str
    digest: str


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnerTakenOver:
    """This daemon took over from another owner; the first event of a slot's life, if any."""

    cause: str


@dataclass(frozen=True)
class LoadRequested:
    model: SlotModel


@dataclass(frozen=True)
class LoadDone:
    pass


@dataclass(frozen=True)
class LoadFailed:
    """The engine refused the model, or the load was given up; the worker lives."""

    reason: str
    given_up: bool = False  # by its caller: nothing is wrong with the model


@dataclass(frozen=True)
class TurnStarted:
    """A protected operation got the slot. ``op_id`` is unique among those of the daemon."""

    op_id: int


@dataclass(frozen=True)
class TurnEnded:
    op_id: int


@dataclass(frozen=True)
class SwitchRequested:
    """Replace the resident model, with nothing running."""

    model: SlotModel


@dataclass(frozen=True)
class UnloadRequested:
    cause: str = "unload"


@dataclass(frozen=True)
class Unloaded:
    pass


@dataclass(frozen=True)
class IdleExpired:
    pass


@dataclass(frozen=True)
class StateUntrusted:
    """The engine or the bookkeeping said that resident state can't be proved any more."""

    cause: str


@dataclass(frozen=True)
class WorkerDied:
    """The worker process is gone. ``at_s``: any clock that doesn't jump, the same every time."""

    cause: str
    at_s: float


@dataclass(frozen=True)
class QuarantineSet:
    digest: str


@dataclass(frozen=True)
class QuarantineCleared:
    digest: str


@dataclass(frozen=True)
class Drain:
    pass


@dataclass(frozen=True)
class GraceExpired:
    """Draining took as long as it may."""


@dataclass(frozen=True)
class OwnerLost:
    cause: str


Event: TypeAlias = (
    OwnerTakenOver | LoadRequested | LoadDone | LoadFailed | TurnStarted | TurnEnded
    | SwitchRequested | UnloadRequested | Unloaded | IdleExpired | StateUntrusted | WorkerDied
    | QuarantineSet | QuarantineCleared | Drain | GraceExpired | OwnerLost
)  # fmt: skip


# --- instructions ----------------------------------------------------------------------------


@dataclass(frozen=True)
class BumpGeneration:
    """Take the next generation and make it durable before going on."""

    cause: str


@dataclass(frozen=True)
class EvictSessions:
    """Forget every session of the slot; their handles are of an older generation already."""

    cause: str


@dataclass(frozen=True)
class FailRunning:
    """Stop these operations and answer each with SESSION_FATAL; none is replayed."""

    op_ids: tuple[int, ...]
    cause: str


@dataclass(frozen=True)
class FailWaiters:
    """Answer those that wait with an error of this reason.

    GENERATION_STALE is for calls that hold a handle (opens and loads go on waiting),
    MODEL_LOAD_FAILED and MODEL_QUARANTINED for those that wait for this load, and SHUTTING_DOWN
    and NOT_OWNER for all.
    """

    reason: str
    cause: str


@dataclass(frozen=True)
class SendLoad:
    model: SlotModel


@dataclass(frozen=True)
class SendUnload:
    pass


@dataclass(frozen=True)
class RestartWorker:
    cause: str


@dataclass(frozen=True)
class StopWorker:
    cause: str


@dataclass(frozen=True)
class Publish:
    """From here on clients may see this state."""

    state: SlotState


Instruction: TypeAlias = (
    BumpGeneration | EvictSessions | FailRunning | FailWaiters
    | SendLoad | SendUnload | RestartWorker | StopWorker | Publish
)  # fmt: skip
