"""What a plan says of memory and window, and the machine that it was made for.

Values only, as in ``values``: frozen, under the contract's field names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from modeld.shared.capacity import BudgetRow


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
