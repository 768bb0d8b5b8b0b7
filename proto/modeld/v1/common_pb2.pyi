from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    NOT_OWNER: _ClassVar[ErrorReason]
    STALE_FENCE: _ClassVar[ErrorReason]
    GENERATION_STALE: _ClassVar[ErrorReason]
    SESSION_CLOSED: _ClassVar[ErrorReason]
    SESSION_FATAL: _ClassVar[ErrorReason]
    MODEL_BUSY: _ClassVar[ErrorReason]
    MODEL_NOT_ACTIVE: _ClassVar[ErrorReason]
    SWITCH_REQUIRED: _ClassVar[ErrorReason]
    MODEL_LOAD_FAILED: _ClassVar[ErrorReason]
    MODEL_QUARANTINED: _ClassVar[ErrorReason]
    INSUFFICIENT_MEMORY: _ClassVar[ErrorReason]
    CONTEXT_OVERFLOW: _ClassVar[ErrorReason]
    DEVICE_BUSY: _ClassVar[ErrorReason]
    BACKEND_MISMATCH: _ClassVar[ErrorReason]
    UNSUPPORTED_MODEL_TYPE: _ClassVar[ErrorReason]
    UNSUPPORTED_FEATURE: _ClassVar[ErrorReason]
    MANIFEST_MISMATCH: _ClassVar[ErrorReason]
    DIGEST_MISMATCH: _ClassVar[ErrorReason]
    MODEL_NOT_FOUND: _ClassVar[ErrorReason]
    SESSION_NOT_FOUND: _ClassVar[ErrorReason]
    SNAPSHOT_NOT_FOUND: _ClassVar[ErrorReason]
    INVALID_REQUEST: _ClassVar[ErrorReason]
    SLOW_CONSUMER: _ClassVar[ErrorReason]
    WORKER_UNAVAILABLE: _ClassVar[ErrorReason]
    STORAGE_FULL: _ClassVar[ErrorReason]
    SHUTTING_DOWN: _ClassVar[ErrorReason]

class Answer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ANSWER_UNKNOWN: _ClassVar[Answer]
    ANSWER_YES: _ClassVar[Answer]
    ANSWER_NO: _ClassVar[Answer]

class ContextReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTEXT_REASON_NONE: _ClassVar[ContextReason]
    MODEL_CEILING: _ClassVar[ContextReason]
    REQUEST: _ClassVar[ContextReason]
    MEMORY: _ClassVar[ContextReason]
    USER_LIMIT: _ClassVar[ContextReason]
    RESERVE: _ClassVar[ContextReason]
    HEADROOM: _ClassVar[ContextReason]
    FLOOR: _ClassVar[ContextReason]
    TRAINING_WINDOW: _ClassVar[ContextReason]
    COLD_BUDGET: _ClassVar[ContextReason]
    UNKNOWN_METADATA: _ClassVar[ContextReason]
    UNKNOWN_PATTERN: _ClassVar[ContextReason]
ERROR_REASON_UNSPECIFIED: ErrorReason
NOT_OWNER: ErrorReason
STALE_FENCE: ErrorReason
GENERATION_STALE: ErrorReason
SESSION_CLOSED: ErrorReason
SESSION_FATAL: ErrorReason
MODEL_BUSY: ErrorReason
MODEL_NOT_ACTIVE: ErrorReason
SWITCH_REQUIRED: ErrorReason
MODEL_LOAD_FAILED: ErrorReason
MODEL_QUARANTINED: ErrorReason
INSUFFICIENT_MEMORY: ErrorReason
CONTEXT_OVERFLOW: ErrorReason
DEVICE_BUSY: ErrorReason
BACKEND_MISMATCH: ErrorReason
UNSUPPORTED_MODEL_TYPE: ErrorReason
UNSUPPORTED_FEATURE: ErrorReason
MANIFEST_MISMATCH: ErrorReason
DIGEST_MISMATCH: ErrorReason
MODEL_NOT_FOUND: ErrorReason
SESSION_NOT_FOUND: ErrorReason
SNAPSHOT_NOT_FOUND: ErrorReason
INVALID_REQUEST: ErrorReason
SLOW_CONSUMER: ErrorReason
WORKER_UNAVAILABLE: ErrorReason
STORAGE_FULL: ErrorReason
SHUTTING_DOWN: ErrorReason
ANSWER_UNKNOWN: Answer
ANSWER_YES: Answer
ANSWER_NO: Answer
CONTEXT_REASON_NONE: ContextReason
MODEL_CEILING: ContextReason
REQUEST: ContextReason
MEMORY: ContextReason
USER_LIMIT: ContextReason
RESERVE: ContextReason
HEADROOM: ContextReason
FLOOR: ContextReason
TRAINING_WINDOW: ContextReason
COLD_BUDGET: ContextReason
UNKNOWN_METADATA: ContextReason
UNKNOWN_PATTERN: ContextReason

class Capability(_message.Message):
    __slots__ = ("name", "answer", "evidence")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    answer: Answer
    evidence: str
    def __init__(self, name: _Optional[str] = ..., answer: _Optional[_Union[Answer, str]] = ..., evidence: _Optional[str] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("digest", "scale")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    digest: str
    scale: float
    def __init__(self, digest: _Optional[str] = ..., scale: _Optional[float] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("backend", "backend_version", "model_digest", "adapters", "prompt_format", "prompt_template_digest", "add_bos", "kv_digest", "runtime_digest", "profile_id")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    KV_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RUNTIME_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    backend: str
    backend_version: str
    model_digest: str
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    prompt_format: str
    prompt_template_digest: str
    add_bos: bool
    kv_digest: str
    runtime_digest: str
    profile_id: str
    def __init__(self, backend: _Optional[str] = ..., backend_version: _Optional[str] = ..., model_digest: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., prompt_format: _Optional[str] = ..., prompt_template_digest: _Optional[str] = ..., add_bos: _Optional[bool] = ..., kv_digest: _Optional[str] = ..., runtime_digest: _Optional[str] = ..., profile_id: _Optional[str] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: ImageRef
    def __init__(self, text: _Optional[str] = ..., image: _Optional[_Union[ImageRef, _Mapping]] = ...) -> None: ...

class ImageRef(_message.Message):
    __slots__ = ("data", "mime_type")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MIME_TYPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    mime_type: str
    def __init__(self, data: _Optional[bytes] = ..., mime_type: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "tool_calls", "tool_call_id", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: _containers.RepeatedCompositeFieldContainer[ContentPart]
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class RawText(_message.Message):
    __slots__ = ("text", "parse_special")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    text: str
    parse_special: bool
    def __init__(self, text: _Optional[str] = ..., parse_special: _Optional[bool] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("kind", "stable", "cache_class", "invalidation", "hash", "raw", "message", "generated_turn_id")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STABLE_FIELD_NUMBER: _ClassVar[int]
    CACHE_CLASS_FIELD_NUMBER: _ClassVar[int]
    INVALIDATION_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TURN_ID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    stable: bool
    cache_class: str
    invalidation: str
    hash: str
    raw: RawText
    message: ChatMessage
    generated_turn_id: str
    def __init__(self, kind: _Optional[str] = ..., stable: _Optional[bool] = ..., cache_class: _Optional[str] = ..., invalidation: _Optional[str] = ..., hash: _Optional[str] = ..., raw: _Optional[_Union[RawText, _Mapping]] = ..., message: _Optional[_Union[ChatMessage, _Mapping]] = ..., generated_turn_id: _Optional[str] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("json_schema",)
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    def __init__(self, json_schema: _Optional[str] = ...) -> None: ...

class ContextNumber(_message.Message):
    __slots__ = ("tokens", "reason", "runner_up", "runner_up_tokens", "known")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    reason: ContextReason
    runner_up: ContextReason
    runner_up_tokens: int
    known: bool
    def __init__(self, tokens: _Optional[int] = ..., reason: _Optional[_Union[ContextReason, str]] = ..., runner_up: _Optional[_Union[ContextReason, str]] = ..., runner_up_tokens: _Optional[int] = ..., known: _Optional[bool] = ...) -> None: ...

class ContextNumbers(_message.Message):
    __slots__ = ("model_max", "requested", "memory_fit", "effective", "hot", "planner")
    MODEL_MAX_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIT_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_FIELD_NUMBER: _ClassVar[int]
    HOT_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    model_max: ContextNumber
    requested: ContextNumber
    memory_fit: ContextNumber
    effective: ContextNumber
    hot: ContextNumber
    planner: ContextNumber
    def __init__(self, model_max: _Optional[_Union[ContextNumber, _Mapping]] = ..., requested: _Optional[_Union[ContextNumber, _Mapping]] = ..., memory_fit: _Optional[_Union[ContextNumber, _Mapping]] = ..., effective: _Optional[_Union[ContextNumber, _Mapping]] = ..., hot: _Optional[_Union[ContextNumber, _Mapping]] = ..., planner: _Optional[_Union[ContextNumber, _Mapping]] = ...) -> None: ...

class BudgetRow(_message.Message):
    __slots__ = ("name", "bytes", "note")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    note: str
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...

class DevicePlan(_message.Message):
    __slots__ = ("device_id", "name", "engine_name", "layers", "first_layer", "weights_bytes", "kv_bytes", "compute_bytes", "free_bytes", "reserve_bytes", "budget_bytes", "headroom_bytes", "left_bytes")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENGINE_NAME_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEADROOM_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, device_id: _Optional[str] = ..., name: _Optional[str] = ..., engine_name: _Optional[str] = ..., layers: _Optional[int] = ..., first_layer: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., compute_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., reserve_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., headroom_bytes: _Optional[int] = ..., left_bytes: _Optional[int] = ...) -> None: ...

class Remedy(_message.Message):
    __slots__ = ("kind", "value", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    value: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., value: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("bound", "message", "numbers", "remedies")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BOUND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    REMEDIES_FIELD_NUMBER: _ClassVar[int]
    bound: ContextReason
    message: str
    numbers: _containers.ScalarMap[str, str]
    remedies: _containers.RepeatedCompositeFieldContainer[Remedy]
    def __init__(self, bound: _Optional[_Union[ContextReason, str]] = ..., message: _Optional[str] = ..., numbers: _Optional[_Mapping[str, str]] = ..., remedies: _Optional[_Iterable[_Union[Remedy, _Mapping]]] = ...) -> None: ...

class Resolution(_message.Message):
    __slots__ = ("context", "budget", "k_type", "v_type", "kv_bytes", "compute_bytes", "weights_bytes", "placement", "max_sessions", "gpu_layers", "tensor_split", "devices", "shed", "findings", "refusal", "allocated")
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    K_TYPE_FIELD_NUMBER: _ClassVar[int]
    V_TYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    GPU_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_SPLIT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    SHED_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_FIELD_NUMBER: _ClassVar[int]
    context: ContextNumbers
    budget: _containers.RepeatedCompositeFieldContainer[BudgetRow]
    k_type: str
    v_type: str
    kv_bytes: int
    compute_bytes: int
    weights_bytes: int
    placement: str
    max_sessions: int
    gpu_layers: int
    tensor_split: _containers.RepeatedScalarFieldContainer[float]
    devices: _containers.RepeatedCompositeFieldContainer[DevicePlan]
    shed: bool
    findings: _containers.RepeatedScalarFieldContainer[str]
    refusal: Refusal
    allocated: int
    def __init__(self, context: _Optional[_Union[ContextNumbers, _Mapping]] = ..., budget: _Optional[_Iterable[_Union[BudgetRow, _Mapping]]] = ..., k_type: _Optional[str] = ..., v_type: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., compute_bytes: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., placement: _Optional[str] = ..., max_sessions: _Optional[int] = ..., gpu_layers: _Optional[int] = ..., tensor_split: _Optional[_Iterable[float]] = ..., devices: _Optional[_Iterable[_Union[DevicePlan, _Mapping]]] = ..., shed: _Optional[bool] = ..., findings: _Optional[_Iterable[str]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., allocated: _Optional[int] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("id", "name", "kind", "total_bytes", "free_bytes", "known", "engine_name", "shared_memory", "note", "processes", "pci", "parent")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    ENGINE_NAME_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    PCI_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    kind: str
    total_bytes: int
    free_bytes: int
    known: bool
    engine_name: str
    shared_memory: bool
    note: str
    processes: _containers.RepeatedCompositeFieldContainer[DeviceProcess]
    pci: str
    parent: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., kind: _Optional[str] = ..., total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., known: _Optional[bool] = ..., engine_name: _Optional[str] = ..., shared_memory: _Optional[bool] = ..., note: _Optional[str] = ..., processes: _Optional[_Iterable[_Union[DeviceProcess, _Mapping]]] = ..., pci: _Optional[str] = ..., parent: _Optional[str] = ...) -> None: ...

class DeviceProcess(_message.Message):
    __slots__ = ("pid", "bytes", "name")
    PID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    pid: int
    bytes: int
    name: str
    def __init__(self, pid: _Optional[int] = ..., bytes: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Machine(_message.Message):
    __slots__ = ("source", "host_total_bytes", "host_available_bytes", "cgroup_limit_bytes", "host_known", "swap_total_bytes", "swap_free_bytes", "devices", "notes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    HOST_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CGROUP_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_KNOWN_FIELD_NUMBER: _ClassVar[int]
    SWAP_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAP_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    source: str
    host_total_bytes: int
    host_available_bytes: int
    cgroup_limit_bytes: int
    host_known: bool
    swap_total_bytes: int
    swap_free_bytes: int
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, source: _Optional[str] = ..., host_total_bytes: _Optional[int] = ..., host_available_bytes: _Optional[int] = ..., cgroup_limit_bytes: _Optional[int] = ..., host_known: _Optional[bool] = ..., swap_total_bytes: _Optional[int] = ..., swap_free_bytes: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionHandle(_message.Message):
    __slots__ = ("session_id", "generation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    generation: int
    def __init__(self, session_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class QueueStatus(_message.Message):
    __slots__ = ("position", "holder_operation", "holder_age_seconds")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_OPERATION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    position: int
    holder_operation: str
    holder_age_seconds: float
    def __init__(self, position: _Optional[int] = ..., holder_operation: _Optional[str] = ..., holder_age_seconds: _Optional[float] = ...) -> None: ...
