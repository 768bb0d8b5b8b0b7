"""The session registry: handles, keys, staleness, time-outs. No I/O; the caller passes the clock.

A handle is valid for the generation it was minted under and never reaches another model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace

from modeld.shared.capabilities import Capability
from modeld.shared.capacity import CapacityRequest, Resolution
from modeld.shared.errors import (
    GenerationStale,
    InvalidRequest,
    ManifestMismatch,
    SessionClosed,
    SessionNotFound,
)
from modeld.shared.ids import new_session_id
from modeld.shared.manifest import Identity, SegmentId
from modeld.supervisor.link import Operation

REMEMBERED = 4096  # closed sessions and generation causes kept for a better answer


@dataclass
class Back:
    """What a parked session got back with its context. Tokens, seconds; used up as it is told."""

    restored: int
    missing: int
    seconds: float
    begin: int = 0  # of what was restored, in the context


@dataclass
class Session:
    """One open session as the supervisor knows it; token counts are of the last answer."""

    session_id: str
    generation: int
    key: str
    model: str
    identity: Identity
    request: CapacityRequest
    resolution: Resolution
    capabilities: tuple[Capability, ...]
    opened_at: float
    used_at: float
    attached: bool = True
    # Operations that run for it, so that closing it can stop them.
    operations: set[Operation] = field(default_factory=set)
    resident: int = 0
    seen_tokens: int = 0
    # The prefix and suffix of the last prefill, for the manifest of what is resident.
    prefix: tuple[SegmentId, ...] = ()
    tools: tuple[str, ...] = ()
    suffix: tuple[SegmentId, ...] = ()
    parked: bool = False  # its KV is in the cold store, and it has no context
    times_parked: int = 0
    resumed_tokens: int = 0  # brought back from the cold store, over all resumes
    back: Back | None = None  # of the last resume, what no answer has told yet
    overflow: str = "refuse"  # refuse | evict
    layout: str = "isolated"  # isolated | batched: its turns run beside others' of the batch
    durable: bool = False  # saved at the end of each turn
    saved_unix_ms: int = 0  # when it was saved last; 0: not yet
    saved_tokens: int = 0  # whose KV was saved then

    @property
    def batched(self) -> bool:
        return self.layout == "batched"

    def forked(
        self, session_id: str, key: str, resolution: Resolution, resident: int, now: float
    ) -> Session:
        """A second session of the same prompt and answers, with a context of its own."""
        return replace(
            self,
            session_id=session_id,
            key=key,
            resolution=resolution,
            opened_at=now,
            used_at=now,
            attached=True,
            operations=set(),
            resident=resident,
            times_parked=0,
            resumed_tokens=0,
            back=None,
            durable=False,
            saved_unix_ms=0,
            saved_tokens=0,
        )


class SessionRegistry:
    """Open sessions of one slot.

    ``session_ttl_s``: a detached session without a key closes after this; ``detach_after_s``: a
    session without a call for this long counts as detached.
    """

    def __init__(self, backend: str, *, session_ttl_s: float, detach_after_s: float) -> None:
        self._backend = backend
        self._ttl_s = session_ttl_s
        self._detach_after_s = detach_after_s
        self._open: dict[str, Session] = {}
        self._closed: OrderedDict[str, str] = OrderedDict()
        self._causes: OrderedDict[int, str] = OrderedDict()
        # Whose calls run or wait, or keep a turn: set by the slot, which knows its queue.
        self.at_work: Callable[[], Container[str]] = frozenset
        self.generation = 0
        self.previous = 0  # this slot's before that; others may have taken numbers in between

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> list[Session]:
        return list(self._open.values())

    @property
    def resident(self) -> int:
        """How many have a context: all but those that are parked."""
        return sum(not session.parked for session in self._open.values())

    def of_layout(self, layout: str) -> list[Session]:
        return [session for session in self._open.values() if session.layout == layout]

    @property
    def in_batch(self) -> list[Session]:
        """Those that have a stream."""
        return [one for one in self.of_layout("batched") if not one.parked]

    @property
    def contexts(self) -> int:
        """How many have a context of their own."""
        return sum(not one.parked for one in self.of_layout("isolated"))

    def is_batched(self, session_id: str) -> bool:
        session = self._open.get(session_id)
        return session is not None and session.batched

    def bumped(self, generation: int, cause: str) -> None:
        """The slot has a new generation: every session of an older one is gone."""
        self._causes[generation] = cause
        while len(self._causes) > REMEMBERED:
            self._causes.popitem(last=False)
        self.previous, self.generation = self.generation, generation

    def evict(self) -> None:
        """Every session is gone; their handles are of an older generation by now."""
        self._open.clear()

    def add(self, session: Session) -> None:
        self._open[session.session_id] = session

    def new_id(self) -> str:
        return new_session_id(self._backend)

    def by_key(self, key: str) -> Session | None:
        return next((s for s in self._open.values() if s.key == key), None)

    def is_open(self, session: Session) -> bool:
        return self._open.get(session.session_id) is session

    def cause_after(self, generation: int) -> str:
        """What first made a handle of ``generation`` stale."""
        return next((cause for gen, cause in self._causes.items() if gen > generation), "")

    def stale(self, generation: int) -> GenerationStale:
        cause = self.cause_after(generation) or "the daemon restarted or another owner took over"
        return GenerationStale(
            f"This handle is of generation {generation}, but the slot is at "
            f"{self.generation} ({cause}). Open the session again and ensure its prefix.",
            metadata={
                "handle_generation": generation,
                "slot_generation": self.generation,
                "cause": cause,
            },
        )

    def get(self, session_id: str, generation: int, now: float) -> Session:
        """Raises GenerationStale, SessionClosed, SessionNotFound or InvalidRequest."""
        if not session_id:
            raise InvalidRequest.of("session", "", "a handle that OpenSession answered")
        if generation > self.generation:
            raise InvalidRequest.of(
                "session.generation", generation, f"at most {self.generation}, as answered"
            )
        if generation < self.generation:
            raise self.stale(generation)
        session = self._open.get(session_id)
        if session is None:
            why = self._closed.get(session_id)
            if why is not None:
                raise SessionClosed(
                    f"Session {session_id} is closed ({why}). Open a new one.",
                    metadata={"session_id": session_id, "cause": why},
                )
            raise SessionNotFound(
                f"No session {session_id} in generation {generation}. Open one first.",
                metadata={"session_id": session_id, "open_sessions": len(self._open)},
            )
        session.used_at = now
        session.attached = True
        return session

    def require(self, session: Session) -> None:
        """Raises SessionClosed or GenerationStale unless it is open still."""
        if not self.is_open(session):
            self.get(session.session_id, session.generation, session.used_at)

    def close(self, session: Session, why: str) -> None:
        if self._open.pop(session.session_id, None) is not None:
            self._closed[session.session_id] = why
            while len(self._closed) > REMEMBERED:
                self._closed.popitem(last=False)

    def is_attached(self, session: Session, now: float) -> bool:
        if self._works(session):
            return True
        return session.attached and now - session.used_at < self._detach_after_s

    def attached(self, now: float) -> list[Session]:
        """Sessions that stand in the way of a switch."""
        return [s for s in self._open.values() if self.is_attached(s, now)]

    def expired(self, now: float) -> list[Session]:
        """Detached sessions without a key whose time is up."""
        return [s for s in self._open.values() if self.is_expired(s, now)]

    def is_expired(self, session: Session, now: float) -> bool:
        return (
            session.session_id in self._open
            and not session.key
            and not self._works(session)
            and now - session.used_at >= self._ttl_s
        )

    def used(self, session_id: str, now: float) -> None:
        """A call of it ended: only from here on it is idle."""
        if (session := self._open.get(session_id)) is not None:
            session.used_at = now

    def _works(self, session: Session) -> bool:
        return bool(session.operations) or session.session_id in self.at_work()


def check_attach(
    session: Session,
    *,
    model: str,
    profile_id: str,
    prompt_format: str,
    capacity: CapacityRequest,
    durable: bool = False,
    overflow: str = "refuse",
    layout: str = "isolated",
) -> None:
    """Whether a caller may attach by key; raises ManifestMismatch naming what differs.

    A caller that names no window takes the session's.
    """
    wanted: dict[str, tuple[object, object]] = {
        "model": (model, session.model),
        "profile_id": (profile_id, session.identity.profile_id),
        "prompt_format": (
            prompt_format or session.identity.prompt_format,
            session.identity.prompt_format,
        ),
        "window": (capacity.window or session.request.window, session.request.window),
        "k_type": (capacity.k_type, session.request.k_type),
        "v_type": (capacity.v_type, session.request.v_type),
        "adapters": (
            tuple((one.digest, one.scale) for one in capacity.adapters),
            tuple((one.digest, one.scale) for one in session.identity.adapters),
        ),
        "durable": (durable, session.durable),
        "overflow": (overflow, session.overflow),
        "layout": (layout, session.layout),
    }
    for name, (asked, actual) in wanted.items():
        if asked != actual:
            raise ManifestMismatch(
                f"Session key {session.key!r} is open with {name}={actual!r}, and this call asks "
                f"{asked!r}. Use the same {name}, another key, or close that session first.",
                metadata={
                    "reason": "identity",
                    "field": name,
                    "asserted": asked,
                    "actual": actual,
                },
            )
