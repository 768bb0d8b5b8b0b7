"""What the calls on a session's state answer: snapshots, restores, forks, admissions.

Values only, as in ``values``: frozen, under the contract's field names. Sizes are bytes, counts
are tokens, times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from modeld.client.values import Overflow, PrefillStatus, Saved, SessionHandle
from modeld.client.values_capacity import Resolution
from modeld.shared.capabilities import Capability
from modeld.shared.manifest import Identity


@dataclass(frozen=True)
class SnapshotInfo:
    """A kept state of a session. ``identity`` is what must match for a restore."""

    snapshot_id: str
    label: str
    size_bytes: int
    digest: str
    tokens: int
    exact: bool
    identity: Identity
    created_unix_ms: int
    exact_reason: str
    model: str
    window: int
    seen_tokens: int
    turns: int
    seconds: float
    k_type: str
    v_type: str
    overflow: Overflow


@dataclass(frozen=True)
class SnapshotList:
    """Newest first. The bytes are of snapshots and durable sessions together; quota 0: no limit."""

    snapshots: tuple[SnapshotInfo, ...]
    used_bytes: int
    quota_bytes: int


@dataclass(frozen=True)
class SnapshotChunk:
    """A piece of a snapshot's ``file``, from byte ``offset`` on; ``info`` is on the first."""

    info: SnapshotInfo | None
    offset: int
    data: bytes
    file: str


@dataclass(frozen=True)
class Restored:
    """``tokens``: whose KV was brought back."""

    snapshot: SnapshotInfo
    resident: int
    available: int
    seconds: float
    tokens: int
    exact: bool
    exact_reason: str
    seen_tokens: int
    generated_turn_ids: tuple[str, ...]


@dataclass(frozen=True)
class TokenRange:
    begin: int
    end: int


@dataclass(frozen=True)
class Admitted:
    """What came into attention (``ranges`` of the conversation), and what went out for it."""

    admitted: int
    evicted: int
    resident: int
    available: int
    restored: int
    recomputed: int
    ranges: tuple[TokenRange, ...]
    parked: int
    gone: int
    seconds: float
    queue_seconds: float


@dataclass(frozen=True)
class Forked:
    """A new session beside the one that was forked; ``status.copied`` tokens are what it got."""

    session: SessionHandle
    status: PrefillStatus
    identity: Identity
    resolution: Resolution
    capabilities: tuple[Capability, ...]
    generated_turn_ids: tuple[str, ...]  # the answers that it took over, oldest first
    saved: Saved | None  # of a durable one


@dataclass(frozen=True)
class Exported:
    """A snapshot as one file of ``size_bytes``."""

    snapshot: SnapshotInfo
    path: str
    size_bytes: int
