from modeld.v1 import common_pb2 as _common_pb2
from modeld.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelInfo(_message.Message):
    __slots__ = ("name", "type", "digest", "size_bytes", "architecture", "quantization", "context_length", "resident", "imported_unix_ms", "linked", "executor")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LINKED_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
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
    executor: str
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., architecture: _Optional[str] = ..., quantization: _Optional[str] = ..., context_length: _Optional[int] = ..., resident: _Optional[bool] = ..., imported_unix_ms: _Optional[int] = ..., linked: _Optional[bool] = ..., executor: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("model", "model_type", "no_wait")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_type: str
    no_wait: bool
    def __init__(self, model: _Optional[str] = ..., model_type: _Optional[str] = ..., no_wait: _Optional[bool] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("generation", "identity", "already_resident", "seconds")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ALREADY_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    identity: _common_pb2.Identity
    already_resident: bool
    seconds: float
    def __init__(self, generation: _Optional[int] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., already_resident: _Optional[bool] = ..., seconds: _Optional[float] = ...) -> None: ...

class LoadModelEvent(_message.Message):
    __slots__ = ("queued", "progress", "loaded")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    queued: _common_pb2.QueueStatus
    progress: _session_pb2.LoadProgress
    loaded: LoadModelResponse
    def __init__(self, queued: _Optional[_Union[_common_pb2.QueueStatus, _Mapping]] = ..., progress: _Optional[_Union[_session_pb2.LoadProgress, _Mapping]] = ..., loaded: _Optional[_Union[LoadModelResponse, _Mapping]] = ...) -> None: ...

class SwitchModelRequest(_message.Message):
    __slots__ = ("model", "model_type", "expected_generation", "no_wait")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GENERATION_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_type: str
    expected_generation: int
    no_wait: bool
    def __init__(self, model: _Optional[str] = ..., model_type: _Optional[str] = ..., expected_generation: _Optional[int] = ..., no_wait: _Optional[bool] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("model", "no_wait", "force")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    model: str
    no_wait: bool
    force: bool
    def __init__(self, model: _Optional[str] = ..., no_wait: _Optional[bool] = ..., force: _Optional[bool] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ("was_resident", "generation", "sessions_closed")
    WAS_RESIDENT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_CLOSED_FIELD_NUMBER: _ClassVar[int]
    was_resident: bool
    generation: int
    sessions_closed: int
    def __init__(self, was_resident: _Optional[bool] = ..., generation: _Optional[int] = ..., sessions_closed: _Optional[int] = ...) -> None: ...

class ImportModelRequest(_message.Message):
    __slots__ = ("path", "name", "type", "copy", "replace", "expected_digest")
    PATH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    path: str
    name: str
    type: str
    copy: bool
    replace: bool
    expected_digest: str
    def __init__(self, path: _Optional[str] = ..., name: _Optional[str] = ..., type: _Optional[str] = ..., copy: _Optional[bool] = ..., replace: _Optional[bool] = ..., expected_digest: _Optional[str] = ...) -> None: ...

class ImportProgress(_message.Message):
    __slots__ = ("stage", "done_bytes", "total_bytes")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    stage: str
    done_bytes: int
    total_bytes: int
    def __init__(self, stage: _Optional[str] = ..., done_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class ImportModelEvent(_message.Message):
    __slots__ = ("progress", "imported")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    IMPORTED_FIELD_NUMBER: _ClassVar[int]
    progress: ImportProgress
    imported: ModelInfo
    def __init__(self, progress: _Optional[_Union[ImportProgress, _Mapping]] = ..., imported: _Optional[_Union[ModelInfo, _Mapping]] = ...) -> None: ...

class PushModelChunk(_message.Message):
    __slots__ = ("name", "type", "digest", "total_bytes", "offset", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    type: str
    digest: str
    total_bytes: int
    offset: int
    data: bytes
    def __init__(self, name: _Optional[str] = ..., type: _Optional[str] = ..., digest: _Optional[str] = ..., total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RemoveModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveModelResponse(_message.Message):
    __slots__ = ("freed_bytes",)
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    def __init__(self, freed_bytes: _Optional[int] = ...) -> None: ...

class DiskStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DiskStatsResponse(_message.Message):
    __slots__ = ("data_root", "models_bytes", "snapshots_bytes", "free_bytes", "total_bytes", "durable_bytes", "cold_bytes", "quota_bytes", "damaged_snapshots")
    DATA_ROOT_FIELD_NUMBER: _ClassVar[int]
    MODELS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COLD_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    data_root: str
    models_bytes: int
    snapshots_bytes: int
    free_bytes: int
    total_bytes: int
    durable_bytes: int
    cold_bytes: int
    quota_bytes: int
    damaged_snapshots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, data_root: _Optional[str] = ..., models_bytes: _Optional[int] = ..., snapshots_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., durable_bytes: _Optional[int] = ..., cold_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., damaged_snapshots: _Optional[_Iterable[str]] = ...) -> None: ...
