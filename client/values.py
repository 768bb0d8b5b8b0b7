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

from modeld.shared.capabilities import Capability
from modeld.shared.capacity import BudgetRow
from modeld.shared.manifest import Identity

_ANSWER_NAMES = {"yes": "ANSWER_YES", "no": "ANSWER_NO", "unknown": "ANSWER_UNKNOWN"}


class ContextReason(StrEnum):
    NONE = "CONTEXT_REASON_NONE"
    MODEL_CEILING = "MODEL_CEILING"
    REQUEST = "REQUEST"
    MEMORY = "MEMORY"
    USER_LIMIT = "USER_LIMIT"
    RESERVE = "RESERVE"
    HEADROOM = "HEADROOM"
    FLOOR = "FLOOR"
    TRAINING_WINDOW = "TRAINING_WINDOW"
    COLD_BUDGET = "COLD_BUDGET"
    UNKNOWN_METADATA = "UNKNOWN_METADATA"
    UNKNOWN_PATTERN = "UNKNOWN_PATTERN"
    UNRECOGNIZED = "UNRECOGNIZED"  # a newer daemon's


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


class SlotState(StrEnum):
    UNSPECIFIED = "SLOT_STATE_UNSPECIFIED"
    EMPTY = "SLOT_EMPTY"
    LOADING = "SLOT_LOADING"
    READY = "SLOT_READY"
    BUSY = "SLOT_BUSY"
    SWITCHING = "SLOT_SWITCHING"
    UNLOADING = "SLOT_UNLOADING"
    IDLE = "SLOT_IDLE"
    FAILED = "SLOT_FAILED"
    QUARANTINED = "SLOT_QUARANTINED"
    SHUTTING_DOWN = "SLOT_SHUTTING_DOWN"
    LOST_OWNER = "SLOT_LOST_OWNER"
    UNRECOGNIZED = "UNRECOGNIZED"


# --- capacity ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ContextNumber:
    tokens: int
    reason: ContextReason
    runner_up: ContextReason
    runner_up_tokens: int
    known: bool


@dataclass(frozen=True)
class ContextNumbers:
    """The six context numbers; never collapsed into one."""

    model_max: ContextNumber
    requested: ContextNumber
    memory_fit: ContextNumber
    effective: ContextNumber
    hot: ContextNumber
    planner: ContextNumber


@dataclass(frozen=True)
class DevicePlan:
    """One memory's part of a plan: the host's first, then each accelerator's."""

    device_id: str
    name: str
    engine_name: str
    layers: int
    first_layer: int
    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    free_bytes: int
    reserve_bytes: int
    budget_bytes: int
    headroom_bytes: int
    left_bytes: int


@dataclass(frozen=True)
class Remedy:
    """Something that would make a refused plan fit: set ``kind`` to ``value``."""

    kind: str
    value: str
    text: str


@dataclass(frozen=True)
class Refusal:
    """Why a plan is refused. ``message`` is "" where it isn't."""

    bound: ContextReason
    message: str
    numbers: dict[str, str]
    remedies: tuple[Remedy, ...]


@dataclass(frozen=True)
class Resolution:
    context: ContextNumbers
    budget: tuple[BudgetRow, ...]
    k_type: str
    v_type: str
    kv_bytes: int
    compute_bytes: int
    weights_bytes: int
    placement: str
    max_sessions: int
    gpu_layers: int
    tensor_split: tuple[float, ...]
    devices: tuple[DevicePlan, ...]
    shed: bool
    findings: tuple[str, ...]
    refusal: Refusal
    allocated: int


@dataclass(frozen=True)
class DeviceProcess:
    pid: int
    bytes: int
    name: str


@dataclass(frozen=True)
class Device:
    """An accelerator as it was read. Where it isn't ``known``, ``note`` says why."""

    id: str
    name: str
    kind: str
    total_bytes: int
    free_bytes: int
    known: bool
    engine_name: str
    shared_memory: bool
    note: str
    processes: tuple[DeviceProcess, ...]
    pci: str
    parent: str


@dataclass(frozen=True)
class Machine:
    """The readings that an answer was made from."""

    source: str
    host_total_bytes: int
    host_available_bytes: int
    cgroup_limit_bytes: int
    host_known: bool
    swap_total_bytes: int
    swap_free_bytes: int
    devices: tuple[Device, ...]
    notes: tuple[str, ...]


# --- sessions ----------------------------------------------------------------------------------


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
    """How saving a durable session at a turn's end went. ``tokens``: whose KV is saved now."""

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
class LayerRun:
    """Consecutive layers that are alike. Lengths are elements of one head."""

    count: int
    kind: str
    kv_heads: int
    key_length: int
    value_length: int
    window: int
    state_bytes: int


@dataclass(frozen=True)
class ModelFacts:
    architecture: str
    layers: int
    embedding_length: int
    heads: int
    kv_heads: tuple[int, ...]
    key_length: int
    value_length: int
    context_length: int
    vocabulary: int
    sliding_window: int
    quantization: str
    file_bytes: int
    has_chat_template: bool
    name: str
    layer_runs: tuple[LayerRun, ...]
    weights_bytes: int
    input_bytes: int
    output_bytes: int
    pooling: str
    parts: int
    unknown_pattern: bool
    window_pattern_source: str


@dataclass(frozen=True)
class Description:
    """Describe's answer. ``resolution_source`` is "hypothetical" or "open_session"."""

    model: str
    model_type: str
    resident: bool
    identity: Identity
    resolution: Resolution
    questions: tuple[Capability, ...]
    capabilities: tuple[Capability, ...]
    facts: ModelFacts
    resolution_source: str
    template_supports_tools: bool
    machine: Machine
    executor: str = ""  # of a resident model: which of its engine's ways runs it
    executor_reason: str = ""


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


# --- models ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInfo:
    name: str
    type: str
    digest: str
    size_bytes: int
    architecture: str
    quantization: str
    context_length: int
    resident: bool
    imported_unix_ms: int
    linked: bool
    executor: str = ""  # of a resident model: which of its engine's ways runs it


@dataclass(frozen=True)
class ModelList:
    models: tuple[ModelInfo, ...]


@dataclass(frozen=True)
class Loaded:
    generation: int
    identity: Identity
    already_resident: bool
    seconds: float


@dataclass(frozen=True)
class Unloaded:
    was_resident: bool
    generation: int
    sessions_closed: int


@dataclass(frozen=True)
class ImportProgress:
    stage: str
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Removed:
    freed_bytes: int


@dataclass(frozen=True)
class DiskStats:
    data_root: str
    models_bytes: int
    snapshots_bytes: int
    free_bytes: int
    total_bytes: int
    durable_bytes: int = 0
    cold_bytes: int = 0  # parked KV on disk
    quota_bytes: int = 0  # of snapshots and durable sessions together; 0: none
    damaged_snapshots: tuple[str, ...] = ()


# --- daemon ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerStatus:
    backend: str
    state: str
    pid: int
    rss_bytes: int
    restarts: int
    restart_in_seconds: float
    last_death: str
    backend_version: str


@dataclass(frozen=True)
class SlotStatus:
    backend: str
    state: SlotState
    model: str
    model_digest: str
    generation: int
    sessions: int
    queued: int
    holder_operation: str
    holder_age_seconds: float
    context: ContextNumbers
    last_fatal: str
    idle_release_in_seconds: float
    reclaimable_bytes: int
    worker: WorkerStatus
    identity: Identity
    executor: str = ""  # of the resident model: which of its engine's ways runs it
    executor_reason: str = ""


@dataclass(frozen=True)
class DaemonStatus:
    owner_instance_id: str
    version: str
    protocol_version: int
    generation: int
    uptime_seconds: float
    data_root: str
    endpoints: tuple[str, ...]
    slots: tuple[SlotStatus, ...]
    draining: bool
    memory_total_bytes: int
    memory_available_bytes: int
    supervisor_rss_bytes: int
    pid: int
    quarantined_models: tuple[str, ...]
    supervisor_cpu_seconds: float
    machine: Machine


@dataclass(frozen=True)
class Event:
    sequence: int
    unix_ms: int
    kind: str
    backend: str
    state: str
    model: str
    generation: int
    session_id: str
    cause: str


@dataclass(frozen=True)
class Draining:
    running: int
    queued: int


@dataclass(frozen=True)
class QuarantineCleared:
    was_quarantined: bool


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
