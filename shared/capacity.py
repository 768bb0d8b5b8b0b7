"""Value types of the capacity planner: the six numbers, their reasons, the budget.

Requests (``CapacityRequest``) and answers (``Resolution``) are different types on purpose: an
answer must never be fed back as a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """What bound a context number. Names equal the proto's ContextReason."""

    NONE = "none"
    MODEL_CEILING = "model_ceiling"
    REQUEST = "request"
    MEMORY = "memory"
    USER_LIMIT = "user_limit"
    RESERVE = "reserve"
    HEADROOM = "headroom"
    FLOOR = "floor"
    TRAINING_WINDOW = "training_window"
    COLD_BUDGET = "cold_budget"
    UNKNOWN_METADATA = "unknown_metadata"
    UNKNOWN_PATTERN = "unknown_pattern"


@dataclass(frozen=True)
class Number:
    """A count of tokens with the bound that decided it and the one that would come next."""

    tokens: int
    reason: Reason
    runner_up: Reason = Reason.NONE
    runner_up_tokens: int = 0
    known: bool = True


@dataclass(frozen=True)
class SixNumbers:
    model_max: Number
    requested: Number
    memory_fit: Number
    effective: Number
    hot: Number
    planner: Number


@dataclass(frozen=True)
class BudgetRow:
    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class LayerFacts:
    """Layers of one kind. ``count`` layers, each with ``kv_heads`` and lengths in elements."""

    count: int
    kv_heads: int
    key_length: int
    value_length: int
    window_cells: int = 0  # 0: full attention; else cells a sequence keeps in these layers


@dataclass(frozen=True)
class ModelFacts:
    """What planning needs, from the file alone. Bytes are file bytes."""

    architecture: str
    name: str
    layers: tuple[LayerFacts, ...]
    embedding_length: int
    heads: int
    model_max: int  # tokens; 0: unknown
    vocabulary: int
    weights_bytes: int
    file_bytes: int
    quantization: str
    sliding_window: int = 0
    unknown_pattern: bool = False
    recurrent: bool = False
    has_template: bool = False
    template_digest: str = ""
    add_bos: bool = False
    feed_forward_length: int = 0  # elements; 0: unknown
    rope: tuple[tuple[str, str], ...] = ()  # settings that change what KV bytes mean


@dataclass(frozen=True)
class MemorySnapshot:
    """A live reading, in bytes. ``limit_bytes`` is the cgroup's, 0 if none."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int = 0
    known: bool = True


@dataclass(frozen=True)
class CapacityPolicy:
    """The operator's settings. ``user_limit_bytes`` and ``max_window`` are 0 where not set."""

    reserve_bytes: int = 0  # 0: the default for this machine
    user_limit_bytes: int = 0
    max_window: int = 0  # tokens
    floor_window: int = 4096  # tokens
    headroom: float = 0.02  # fraction of the budget kept for what isn't modelled
    sessions_share: int = 4  # an automatic window leaves room for this many sessions
    max_sessions: int = 8
    n_batch: int = 512
    n_ubatch: int = 512


@dataclass(frozen=True)
class CapacityRequest:
    """What a caller asks: window 0 means automatic. Types are ggml names."""

    window: int = 0
    k_type: str = "f16"
    v_type: str = "f16"


@dataclass(frozen=True)
class SlotUse:
    """What the slot already holds when the question is asked (all zero: nothing loaded)."""

    weights_resident: bool = False
    cells: int = 0  # KV cells allocated by live and reclaimable contexts
    resident_bytes: int = 0  # of those contexts; weights are charged apart
    reclaimable_bytes: int = 0  # what evicting closed sessions' contexts gives back
    # Compute buffers of all contexts. The engine touches them as it works, so that a reading of
    # available memory may still hold what is promised to them.
    compute_bytes: int = 0
    sessions: int = 0
    # Cells of what is reclaimable; 0 with reclaimable bytes: taken in proportion to the bytes.
    reclaimable_cells: int = 0
    # Of resident weights: bytes that the engine copied to anonymous memory, so that the reading
    # of available memory lacks them. Mapped file pages are still counted as available.
    weights_anonymous_bytes: int = 0


@dataclass(frozen=True)
class Resolution:
    """An answer, with the inputs it was made from."""

    numbers: SixNumbers
    budget: tuple[BudgetRow, ...]
    k_type: str
    v_type: str
    kv_bytes: int
    compute_bytes: int
    weights_bytes: int
    placement: str
    max_sessions: int
    allocated: int = 0  # tokens to allocate: ``effective`` rounded up as the engine does
    free_bytes: int = 0  # of reclaimable contexts, to give back before allocating
