"""What a daemon tells of itself and of its models.

Values only, as in ``values``: frozen, under the contract's field names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from modeld.client.values_capacity import ContextNumbers, Machine, Resolution
from modeld.shared.capabilities import Capability
from modeld.shared.manifest import Identity


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
