"""What calls answer, as frozen dataclasses under the contract's own field names.

Values only: no transport, no protobuf. Tokens are counts, times are seconds, sizes are bytes.
Enums' values are the contract's wire names. ``to_plain`` gives the JSON form.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum, StrEnum
from typing import Any

from modeld.client.values_capacity import ContextNumbers, Resolution
from modeld.shared.capabilities import Capability
from modeld.shared.manifest import Identity

_ANSWER_NAMES = {"yes": "ANSWER_YES", "no": "ANSWER_NO", "unknown": "ANSWER_UNKNOWN"}


class MissReason(StrEnum):
    NONE = "MISS_NONE"
    COLD = "MISS_COLD"
    TOKENS_DIFFER = "MISS_TOKENS_DIFFER"
    EXTENDED = "MISS_EXTENDED"
    KV_DIGEST = "MISS_KV_DIGEST"
    CANNOT_TRIM = "MISS_CANNOT_TRIM"
    RECLAIMED = "MISS_RECLAIMED"
    RECOMPUTED = "MISS_RECOMPUTED"
    UNRECOGNIZED = "UNRECOGNIZED"


class StopReason(StrEnum):
    UNSPECIFIED = "STOP_REASON_UNSPECIFIED"
    EOS = "EOS"
    STOP_SEQUENCE = "STOP_SEQUENCE"
    LENGTH = "LENGTH"
    CONTEXT_FULL = "CONTEXT_FULL"
    CANCELLED = "CANCELLED"
    UNRECOGNIZED = "UNRECOGNIZED"


class Overflow(StrEnum):
    REFUSE = "OVERFLOW_REFUSE"
    EVICT = "OVERFLOW_EVICT"
    UNRECOGNIZED = "UNRECOGNIZED"


class Layout(StrEnum):
    ISOLATED = "LAYOUT_ISOLATED"
    BATCHED = "LAYOUT_BATCHED"
    UNRECOGNIZED = "UNRECOGNIZED"


@dataclass(frozen=True)
class SessionHandle:
    session_id: str
    generation: int


@dataclass(frozen=True)
class QueueStatus:
    position: int
    holder_operation: str
    holder_age_seconds: float


@dataclass(frozen=True)
class LoadProgress:
    stage: str
    fraction: float


@dataclass(frozen=True)
class Resumed:
    """What of a durable session came back when it was opened. ``tokens``: whose KV did."""

    tokens: int
    seen_tokens: int
    saved_unix_ms: int
    generated_turn_ids: tuple[str, ...]
    exact: bool
    exact_reason: str
    seconds: float
    miss_reason: str


@dataclass(frozen=True)
class Opened:
    session: SessionHandle
    identity: Identity
    resolution: Resolution
    capabilities: tuple[Capability, ...]
    attached: bool
    loaded: bool
    load_seconds: float
    resident: int
    detail: str
    queue_seconds: float
    resumed: Resumed | None = None  # of a durable session that was saved before


@dataclass(frozen=True)
class ResolvedSegment:
    index: int
    byte_begin: int
    byte_end: int
    token_begin: int
    token_end: int
    token_hash: str
    located: bool


@dataclass(frozen=True)
class PrefillStatus:
    reused: int
    dropped: int
    prefilled: int
    prefix: int
    suffix: int
    resident: int
    available: int
    restored: int
    retained: int
    copied: int
    miss_reason: MissReason
    manifest_digest: str
    resolved_manifest_digest: str
    stable_token_hash: str
    volatile_token_hash: str
    seconds: float
    queue_seconds: float
    template_additive: bool
    turns_recomputed: int
    resolved: tuple[ResolvedSegment, ...]
    seen_tokens: int
    reused_lower_bound: bool = False
    parked: int = 0  # not attended; the KV is in the cold store
    gone: int = 0  # not attended; the KV is nowhere
    recomputed: int = 0  # of ``prefilled``: evaluated again since others went out of attention


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    text: str
    raw: bytes
    logprob: float


@dataclass(frozen=True)
class SampledToken:
    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Chunk:
    text: str
    reasoning_text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledToken, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class Saved:
    """How saving a durable session at a turn's end, or at its fork, went.

    ``tokens``: whose KV is saved now.
    """

    ok: bool
    tokens: int
    written_bytes: int
    seconds: float
    reason: str
    detail: str
    saved_unix_ms: int


@dataclass(frozen=True)
class Final:
    stop_reason: StopReason
    stop_sequence: str
    tokens: int
    prefilled: int
    engine_seconds: float
    queue_seconds: float
    first_token_seconds: float
    resident: int
    available: int
    generated_turn_id: str
    seed: int
    seen_tokens: int
    parked: int = 0
    gone: int = 0
    recomputed: int = 0
    saved: Saved | None = None  # of a durable session


@dataclass(frozen=True)
class ResidentBlock:
    token_begin: int
    token_end: int
    state: str
    protected_range: bool
    what: str
    cache_class: str = ""


@dataclass(frozen=True)
class Counter:
    name: str
    value: int


@dataclass(frozen=True)
class ContextReport:
    """ExplainContext's answer."""

    session: SessionHandle
    identity: Identity
    resolution: Resolution
    resident: int
    available: int
    retained: int
    seen_tokens: int
    segments: tuple[ResolvedSegment, ...]
    blocks: tuple[ResidentBlock, ...]
    capabilities: tuple[Capability, ...]
    counters: tuple[Counter, ...]
    last_fatal: str
    generated_turn_ids: tuple[str, ...]
    detail: str
    parked: int = 0
    gone: int = 0


@dataclass(frozen=True)
class Tokens:
    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...]


@dataclass(frozen=True)
class Embedding:
    """A text's vector. ``tokens`` counts those that the tokenizer puts around the text too."""

    values: tuple[float, ...]
    tokens: int


@dataclass(frozen=True)
class Embeddings:
    """In the order of the texts. ``pooling`` is what was used: mean, cls or last."""

    embeddings: tuple[Embedding, ...]
    dimensions: int
    pooling: str
    normalized: bool
    engine_seconds: float
    queue_seconds: float


@dataclass(frozen=True)
class Detokenized:
    text: str
    raw: bytes


@dataclass(frozen=True)
class Rendered:
    text: str
    template_digest: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Closed:
    retained_tokens: int


@dataclass(frozen=True)
class SessionInfo:
    session: SessionHandle
    session_key: str
    model: str
    prompt_format: str
    context: ContextNumbers
    resident: int
    seen_tokens: int
    age_seconds: float
    idle_seconds: float
    attached: bool
    profile_id: str
    parked: bool = False  # its KV is in the cold store until its next call
    durable: bool = False
    overflow: Overflow = Overflow.REFUSE
    layout: Layout = Layout.ISOLATED
    saved_unix_ms: int = 0  # of a durable session; 0: not yet


@dataclass(frozen=True)
class SessionList:
    sessions: tuple[SessionInfo, ...]


@dataclass(frozen=True)
class SavedSession:
    """What is saved of the durable session of a key, ``open`` now or not."""

    session_key: str
    model: str
    model_digest: str
    prompt_format: str
    tokens: int  # whose KV is saved
    seen_tokens: int
    turns: int
    window: int
    overflow: Overflow
    size_bytes: int
    saved_unix_ms: int
    used_unix_ms: int  # saved or brought back last
    open: bool


@dataclass(frozen=True)
class SavedSessionList:
    """The last used first."""

    saved: tuple[SavedSession, ...]


# --- the client's own --------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """One recovery that the client made, and why. ``unix_s`` is wall-clock time."""

    cause: str  # the contract's reason, or CONNECTION_LOST
    message: str
    unix_s: float
    old: SessionHandle
    new: SessionHandle
    attached: bool  # the same session was found again, with what it holds
    operation: str  # the call that met the failure
    retried: bool  # whether that call was sent again (only if nothing had been delivered)
    detail: str = field(default="")
    resumed: Resumed | None = None  # of a durable session: what came back, or why nothing did


def to_plain(value: Any) -> Any:
    """JSON-ready data under the contract's field names, defaults included, integers as numbers."""
    if isinstance(value, Capability):
        return {
            "name": value.name,
            "answer": _ANSWER_NAMES[value.answer],
            "evidence": value.evidence,
        }
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value
