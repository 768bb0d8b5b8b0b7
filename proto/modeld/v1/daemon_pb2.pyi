from modeld.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SlotState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLOT_STATE_UNSPECIFIED: _ClassVar[SlotState]
    SLOT_EMPTY: _ClassVar[SlotState]
    SLOT_LOADING: _ClassVar[SlotState]
    SLOT_READY: _ClassVar[SlotState]
    SLOT_BUSY: _ClassVar[SlotState]
    SLOT_SWITCHING: _ClassVar[SlotState]
    SLOT_UNLOADING: _ClassVar[SlotState]
    SLOT_IDLE: _ClassVar[SlotState]
    SLOT_FAILED: _ClassVar[SlotState]
    SLOT_QUARANTINED: _ClassVar[SlotState]
    SLOT_SHUTTING_DOWN: _ClassVar[SlotState]
    SLOT_LOST_OWNER: _ClassVar[SlotState]
SLOT_STATE_UNSPECIFIED: SlotState
SLOT_EMPTY: SlotState
SLOT_LOADING: SlotState
SLOT_READY: SlotState
SLOT_BUSY: SlotState
SLOT_SWITCHING: SlotState
SLOT_UNLOADING: SlotState
SLOT_IDLE: SlotState
SLOT_FAILED: SlotState
SLOT_QUARANTINED: SlotState
SLOT_SHUTTING_DOWN: SlotState
SLOT_LOST_OWNER: SlotState

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("backend", "state", "pid", "rss_bytes", "restarts", "restart_in_seconds", "last_death", "backend_version")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RESTART_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_DEATH_FIELD_NUMBER: _ClassVar[int]
    BACKEND_VERSION_FIELD_NUMBER: _ClassVar[int]
    backend: str
    state: str
    pid: int
    rss_bytes: int
    restarts: int
    restart_in_seconds: float
    last_death: str
    backend_version: str
    def __init__(self, backend: _Optional[str] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., restarts: _Optional[int] = ..., restart_in_seconds: _Optional[float] = ..., last_death: _Optional[str] = ..., backend_version: _Optional[str] = ...) -> None: ...

class SlotStatus(_message.Message):
    __slots__ = ("backend", "state", "model", "model_digest", "generation", "sessions", "queued", "holder_operation", "holder_age_seconds", "context", "last_fatal", "idle_release_in_seconds", "reclaimable_bytes", "worker", "identity", "executor", "executor_reason")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    HOLDER_OPERATION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LAST_FATAL_FIELD_NUMBER: _ClassVar[int]
    IDLE_RELEASE_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECLAIMABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_REASON_FIELD_NUMBER: _ClassVar[int]
    backend: str
    state: SlotState
    model: str
    model_digest: str
    generation: int
    sessions: int
    queued: int
    holder_operation: str
    holder_age_seconds: float
    context: _common_pb2.ContextNumbers
    last_fatal: str
    idle_release_in_seconds: float
    reclaimable_bytes: int
    worker: WorkerStatus
    identity: _common_pb2.Identity
    executor: str
    executor_reason: str
    def __init__(self, backend: _Optional[str] = ..., state: _Optional[_Union[SlotState, str]] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., generation: _Optional[int] = ..., sessions: _Optional[int] = ..., queued: _Optional[int] = ..., holder_operation: _Optional[str] = ..., holder_age_seconds: _Optional[float] = ..., context: _Optional[_Union[_common_pb2.ContextNumbers, _Mapping]] = ..., last_fatal: _Optional[str] = ..., idle_release_in_seconds: _Optional[float] = ..., reclaimable_bytes: _Optional[int] = ..., worker: _Optional[_Union[WorkerStatus, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., executor: _Optional[str] = ..., executor_reason: _Optional[str] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("owner_instance_id", "version", "protocol_version", "generation", "uptime_seconds", "data_root", "endpoints", "slots", "draining", "memory_total_bytes", "memory_available_bytes", "supervisor_rss_bytes", "pid", "quarantined_models", "supervisor_cpu_seconds", "machine")
    OWNER_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DATA_ROOT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SUPERVISOR_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_MODELS_FIELD_NUMBER: _ClassVar[int]
    SUPERVISOR_CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    owner_instance_id: str
    version: str
    protocol_version: int
    generation: int
    uptime_seconds: float
    data_root: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    slots: _containers.RepeatedCompositeFieldContainer[SlotStatus]
    draining: bool
    memory_total_bytes: int
    memory_available_bytes: int
    supervisor_rss_bytes: int
    pid: int
    quarantined_models: _containers.RepeatedScalarFieldContainer[str]
    supervisor_cpu_seconds: float
    machine: _common_pb2.Machine
    def __init__(self, owner_instance_id: _Optional[str] = ..., version: _Optional[str] = ..., protocol_version: _Optional[int] = ..., generation: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., data_root: _Optional[str] = ..., endpoints: _Optional[_Iterable[str]] = ..., slots: _Optional[_Iterable[_Union[SlotStatus, _Mapping]]] = ..., draining: _Optional[bool] = ..., memory_total_bytes: _Optional[int] = ..., memory_available_bytes: _Optional[int] = ..., supervisor_rss_bytes: _Optional[int] = ..., pid: _Optional[int] = ..., quarantined_models: _Optional[_Iterable[str]] = ..., supervisor_cpu_seconds: _Optional[float] = ..., machine: _Optional[_Union[_common_pb2.Machine, _Mapping]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "unix_ms", "kind", "backend", "state", "model", "generation", "session_id", "cause")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    unix_ms: int
    kind: str
    backend: str
    state: str
    model: str
    generation: int
    session_id: str
    cause: str
    def __init__(self, sequence: _Optional[int] = ..., unix_ms: _Optional[int] = ..., kind: _Optional[str] = ..., backend: _Optional[str] = ..., state: _Optional[str] = ..., model: _Optional[str] = ..., generation: _Optional[int] = ..., session_id: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("running", "queued")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    running: int
    queued: int
    def __init__(self, running: _Optional[int] = ..., queued: _Optional[int] = ...) -> None: ...

class ClearQuarantineRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ClearQuarantineResponse(_message.Message):
    __slots__ = ("was_quarantined",)
    WAS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    was_quarantined: bool
    def __init__(self, was_quarantined: _Optional[bool] = ...) -> None: ...
