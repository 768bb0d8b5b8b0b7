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


class LayerKind(Enum):
    """What a layer keeps of the tokens that it has seen."""

    FULL = "full"  # KV of every token
    WINDOW = "window"  # KV of the last ``window_cells`` tokens
    RECURRENT = "recurrent"  # a state of fixed size, and no KV
    SHARED = "shared"  # another layer's KV: nothing of its own
    LATENT = "latent"  # one compressed row a token for keys and values together (MLA)
    MIXED = "mixed"  # KV of every token and a recurrent state beside it
    NONE = "none"  # nothing: a layer without attention


@dataclass(frozen=True)
class LayerFacts:
    """A run of ``count`` consecutive layers that are alike. Lengths are elements of one head."""

    count: int
    kv_heads: int  # 0: no KV
    key_length: int
    value_length: int  # 0 with latent layers: values are part of the row
    window_cells: int = 0  # 0: full attention; else cells a sequence keeps in these layers
    kind: LayerKind = LayerKind.FULL
    state_bytes: int = 0  # of one layer's recurrent state, for one sequence


class FileKind(Enum):
    """What a model file is for."""

    MODEL = "model"
    PROJECTOR = "projector"
    ADAPTER = "adapter"


@dataclass(frozen=True)
class ModelFacts:
    """What planning needs, from the file alone. Bytes are file bytes."""

    architecture: str
    name: str
    layers: tuple[LayerFacts, ...]  # runs in the order of the layers
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
    model_type: str = "llama"  # which backend's format: llama (GGUF) or openvino (IR)
    file_kind: FileKind = FileKind.MODEL
    layer_weights: tuple[int, ...] = ()  # bytes of each layer's tensors, by layer; (): unknown
    input_bytes: int = 0  # token embedding and what else stays with the input
    output_bytes: int = 0  # output norm and head, which count as one more layer
    tied_output: bool = False  # the head is the token embedding: copied where the output lives
    tensor_types: tuple[tuple[str, int], ...] = ()  # (type, bytes), most bytes first
    pooling: str = ""  # of embeddings, as the file says: mean, cls, last, rank; "": none
    vision: bool = False  # made as a model that takes images; whether it does is tried at load
    parts: int = 1  # files of a split set
    window_pattern_source: str = ""  # where the kinds of windowed layers are known from
    # Values are stored transposed without flash attention, every layer as wide as the widest.
    widest_value: int = 0  # elements a token (heads x length); 0: all alike
    experts_used: int = 0  # experts that work on one token; 0: none, or unknown
    expert_feed_forward_length: int = 0  # elements of one expert; 0: feed_forward_length


@dataclass(frozen=True)
class MemorySnapshot:
    """A live reading of the host, in bytes. ``limit_bytes`` is the cgroup's, 0 if none.

    Swap is shown and never spent: ``available_bytes`` has none of it.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int = 0
    known: bool = True
    swap_total_bytes: int = 0
    swap_free_bytes: int = 0


class DeviceKind(Enum):
    NVIDIA = "nvidia"
    INTEL_GPU = "intel_gpu"
    INTEL_NPU = "intel_npu"
    OTHER = "other"


@dataclass(frozen=True)
class DeviceUse:
    """A process that holds memory of a device. ``bytes`` is 0 where the driver doesn't tell."""

    pid: int
    bytes: int
    name: str = ""


@dataclass(frozen=True)
class DeviceReading:
    """One accelerator as a probe saw it, in bytes.

    Where a probe fails, ``known`` is False and ``note`` has its words: zero is never a guess.
    ``engine_name`` is what the linked engine calls the device ("CUDA0"); "" while no engine build
    here can use it, so that nothing is placed on it.
    """

    id: str  # stable: a UUID, or the name that its driver gives it
    name: str
    kind: DeviceKind
    total_bytes: int = 0
    free_bytes: int = 0
    known: bool = True
    engine_name: str = ""
    pci: str = ""  # bus id, lower case, as 0000:01:00.0; MIG instances share their card's
    shared_memory: bool = False  # it uses the host's memory: planned as the host
    parent: str = ""  # of a MIG instance: its card's id
    note: str = ""
    processes: tuple[DeviceUse, ...] = ()


@dataclass(frozen=True)
class MachineReading:
    """Everything that was read of a machine at one moment."""

    host: MemorySnapshot
    devices: tuple[DeviceReading, ...] = ()
    source: str = "live"  # or the file that it was read from
    notes: tuple[str, ...] = ()  # probes that failed or found nothing, in their words


class Placement(Enum):
    """What may be done when a model doesn't fit its accelerators whole."""

    REFUSE = "refuse"
    SHED = "shed"  # leave layers on the host, and say so


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
    flash_attn: bool = False
    placement: Placement = Placement.REFUSE
    gpu_layers: int = -1  # layers on accelerators, the output counted as one; -1: planned
    tensor_split: tuple[float, ...] = ()  # shares by device; (): planned by free memory
    device_reserve_bytes: int = 0  # 0: the default for each device
    device_limit_bytes: int = 0  # most bytes to plan with on each device; 0: no limit
    cold_budget_bytes: int = 0  # host memory for parked KV
    devices: tuple[str, ...] = ()  # accelerators to use, as the operator named them; (): all


@dataclass(frozen=True)
class AdapterUse:
    """A LoRA adapter of the store, as a session asks for it."""

    digest: str  # SHA-256 hex of its file
    scale: float
    name: str
    path: str
    memory_bytes: int  # as an engine holds it


@dataclass(frozen=True)
class CapacityRequest:
    """What a caller asks: window 0 means automatic. Types are ggml names."""

    window: int = 0
    k_type: str = "f16"
    v_type: str = "f16"
    sessions: int = 0  # sessions of this window that must fit; 0: the policy's share
    adapters: tuple[AdapterUse, ...] = ()  # beside the model, in this order
    # Sessions that share one context, of this window each: what is planned is room for them all.
    # 0: a context of its own.
    streams: int = 0


@dataclass(frozen=True)
class Companions:
    """What is loaded beside the model. Bytes of weights and of the buffers that they work in."""

    projector_bytes: int = 0
    projector_compute_bytes: int = 0
    adapter_bytes: int = 0
    draft_bytes: int = 0  # a draft model's weights, KV and compute buffer together


@dataclass(frozen=True)
class MeasuredPoint:
    """What the engine said a context of ``cells`` costs, in bytes (0: it didn't tell)."""

    cells: int
    kv_bytes: int
    compute_bytes: int


@dataclass(frozen=True)
class EngineMeasure:
    """What an engine's build reports of a model's contexts, for one choice of batch sizes and KV
    types: from a dry run that allocates nothing, or after real loads. Points ascend by cells.
    """

    points: tuple[MeasuredPoint, ...] = ()
    source: str = ""
    copied_bytes: int = 0  # memory of its own beside the file's pages, once loaded; 0: not measured


@dataclass(frozen=True)
class PlacedUse:
    """What the slot holds on one device: of this model's weights, and of its contexts."""

    device_id: str
    weights_bytes: int = 0
    resident_bytes: int = 0
    reclaimable_bytes: int = 0


@dataclass(frozen=True)
class SlotUse:
    """What the slot already holds when the question is asked (all zero: nothing loaded)."""

    weights_resident: bool = False
    cells: int = 0  # KV cells allocated by live and reclaimable contexts
    resident_bytes: int = 0  # of those contexts, on the host; weights are charged apart
    reclaimable_bytes: int = 0  # what evicting closed sessions' contexts gives back
    cold_bytes: int = 0  # parked KV in the host's memory: given back when a context needs it
    # What was promised to contexts and isn't touched yet, so that a reading of available memory
    # still holds it: compute buffers, and KV where the engine touches it only as it fills.
    compute_bytes: int = 0
    sessions: int = 0
    # Cells of what is reclaimable; 0 with reclaimable bytes: taken in proportion to the bytes.
    reclaimable_cells: int = 0
    # Of resident weights: bytes that the engine copied to anonymous memory, so that the reading
    # of available memory lacks them. Mapped file pages are still counted as available.
    weights_anonymous_bytes: int = 0
    gpu_layers: int = -1  # as the resident model was loaded; -1: nothing is loaded, plan it
    tensor_split: tuple[float, ...] = ()
    # What other slots hold on this host: of it, what a reading still counts as available, and all.
    elsewhere_untouched_bytes: int = 0
    elsewhere_bytes: int = 0
    on_devices: tuple[PlacedUse, ...] = ()


@dataclass(frozen=True)
class DevicePlan:
    """One device's row in a plan. Bytes; ``layers`` counts the output as one more layer."""

    device_id: str  # "host" for the host's memory
    name: str
    engine_name: str
    layers: int
    first_layer: int  # -1: none
    weights_bytes: int
    kv_bytes: int  # of one session
    compute_bytes: int
    free_bytes: int
    reserve_bytes: int
    budget_bytes: int
    headroom_bytes: int
    left_bytes: int


@dataclass(frozen=True)
class Remedy:
    """One thing that would make a refused plan fit. ``kind`` names it, ``value`` is what to set:

    ``window`` (tokens), ``k_type``, ``gpu_layers``, ``placement`` (shed), ``sessions``,
    ``max_sessions`` (the setting's new value), ``model`` (a smaller one of the store), ``free``
    (bytes to be freed), ``layout`` (isolated), ``user_limit`` and ``device_limit`` (bytes, the
    setting's new value).
    """

    kind: str
    value: str
    text: str


@dataclass(frozen=True)
class Refusal:
    """Why a plan is refused: the bound, the sum as numbers, and what would make it fit."""

    bound: Reason
    message: str
    numbers: tuple[tuple[str, str], ...]
    remedies: tuple[Remedy, ...] = ()


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
    placement: str  # host | device | split
    max_sessions: int
    allocated: int = 0  # tokens to allocate: ``effective`` rounded up as the engine does
    free_bytes: int = 0  # of reclaimable contexts and parked KV, to give back before allocating
    cold_bytes: int = 0  # host memory that the plan leaves to parked KV, within its budget
    gpu_layers: int = 0
    tensor_split: tuple[float, ...] = ()
    devices: tuple[DevicePlan, ...] = ()  # the host's row first
    shed: bool = False  # layers were left on the host because they did not fit
    findings: tuple[str, ...] = ()  # what the engine reports otherwise than it was declared
    streams: int = 0  # whose windows are planned, with one buffer; 0: of a context of its own
    refusal: Refusal | None = None  # set by ``survey`` where the plan would be refused
