from modeld.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Overflow(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OVERFLOW_REFUSE: _ClassVar[Overflow]
    OVERFLOW_EVICT: _ClassVar[Overflow]

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYOUT_ISOLATED: _ClassVar[Layout]
    LAYOUT_BATCHED: _ClassVar[Layout]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_NONE: _ClassVar[MissReason]
    MISS_COLD: _ClassVar[MissReason]
    MISS_TOKENS_DIFFER: _ClassVar[MissReason]
    MISS_EXTENDED: _ClassVar[MissReason]
    MISS_KV_DIGEST: _ClassVar[MissReason]
    MISS_CANNOT_TRIM: _ClassVar[MissReason]
    MISS_RECLAIMED: _ClassVar[MissReason]
    MISS_RECOMPUTED: _ClassVar[MissReason]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    EOS: _ClassVar[StopReason]
    STOP_SEQUENCE: _ClassVar[StopReason]
    LENGTH: _ClassVar[StopReason]
    CONTEXT_FULL: _ClassVar[StopReason]
    CANCELLED: _ClassVar[StopReason]
OVERFLOW_REFUSE: Overflow
OVERFLOW_EVICT: Overflow
LAYOUT_ISOLATED: Layout
LAYOUT_BATCHED: Layout
MISS_NONE: MissReason
MISS_COLD: MissReason
MISS_TOKENS_DIFFER: MissReason
MISS_EXTENDED: MissReason
MISS_KV_DIGEST: MissReason
MISS_CANNOT_TRIM: MissReason
MISS_RECLAIMED: MissReason
MISS_RECOMPUTED: MissReason
STOP_REASON_UNSPECIFIED: StopReason
EOS: StopReason
STOP_SEQUENCE: StopReason
LENGTH: StopReason
CONTEXT_FULL: StopReason
CANCELLED: StopReason

class OpenSessionRequest(_message.Message):
    __slots__ = ("model", "model_type", "window", "k_type", "v_type", "overflow", "layout", "durable", "session_key", "no_wait", "profile_id", "prompt_format", "adapters", "fresh")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    K_TYPE_FIELD_NUMBER: _ClassVar[int]
    V_TYPE_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    FRESH_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_type: str
    window: int
    k_type: str
    v_type: str
    overflow: Overflow
    layout: Layout
    durable: bool
    session_key: str
    no_wait: bool
    profile_id: str
    prompt_format: str
    adapters: _containers.RepeatedCompositeFieldContainer[_common_pb2.Adapter]
    fresh: bool
    def __init__(self, model: _Optional[str] = ..., model_type: _Optional[str] = ..., window: _Optional[int] = ..., k_type: _Optional[str] = ..., v_type: _Optional[str] = ..., overflow: _Optional[_Union[Overflow, str]] = ..., layout: _Optional[_Union[Layout, str]] = ..., durable: _Optional[bool] = ..., session_key: _Optional[str] = ..., no_wait: _Optional[bool] = ..., profile_id: _Optional[str] = ..., prompt_format: _Optional[str] = ..., adapters: _Optional[_Iterable[_Union[_common_pb2.Adapter, _Mapping]]] = ..., fresh: _Optional[bool] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("tokens", "seen_tokens", "saved_unix_ms", "generated_turn_ids", "exact", "exact_reason", "seconds", "miss_reason")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAVED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TURN_IDS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    EXACT_REASON_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    seen_tokens: int
    saved_unix_ms: int
    generated_turn_ids: _containers.RepeatedScalarFieldContainer[str]
    exact: bool
    exact_reason: str
    seconds: float
    miss_reason: str
    def __init__(self, tokens: _Optional[int] = ..., seen_tokens: _Optional[int] = ..., saved_unix_ms: _Optional[int] = ..., generated_turn_ids: _Optional[_Iterable[str]] = ..., exact: _Optional[bool] = ..., exact_reason: _Optional[str] = ..., seconds: _Optional[float] = ..., miss_reason: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session", "identity", "resolution", "capabilities", "attached", "loaded", "load_seconds", "resident", "detail", "queue_seconds", "resumed")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RESOLUTION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    resolution: _common_pb2.Resolution
    capabilities: _containers.RepeatedCompositeFieldContainer[_common_pb2.Capability]
    attached: bool
    loaded: bool
    load_seconds: float
    resident: int
    detail: str
    queue_seconds: float
    resumed: Resumed
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., resolution: _Optional[_Union[_common_pb2.Resolution, _Mapping]] = ..., capabilities: _Optional[_Iterable[_Union[_common_pb2.Capability, _Mapping]]] = ..., attached: _Optional[bool] = ..., loaded: _Optional[bool] = ..., load_seconds: _Optional[float] = ..., resident: _Optional[int] = ..., detail: _Optional[str] = ..., queue_seconds: _Optional[float] = ..., resumed: _Optional[_Union[Resumed, _Mapping]] = ...) -> None: ...

class LoadProgress(_message.Message):
    __slots__ = ("stage", "fraction")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    FRACTION_FIELD_NUMBER: _ClassVar[int]
    stage: str
    fraction: float
    def __init__(self, stage: _Optional[str] = ..., fraction: _Optional[float] = ...) -> None: ...

class OpenSessionEvent(_message.Message):
    __slots__ = ("queued", "progress", "opened")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    queued: _common_pb2.QueueStatus
    progress: LoadProgress
    opened: OpenSessionResponse
    def __init__(self, queued: _Optional[_Union[_common_pb2.QueueStatus, _Mapping]] = ..., progress: _Optional[_Union[LoadProgress, _Mapping]] = ..., opened: _Optional[_Union[OpenSessionResponse, _Mapping]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("segments", "tools", "manifest_digest")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[_common_pb2.Segment]
    tools: _containers.RepeatedCompositeFieldContainer[_common_pb2.Tool]
    manifest_digest: str
    def __init__(self, segments: _Optional[_Iterable[_Union[_common_pb2.Segment, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[_common_pb2.Tool, _Mapping]]] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class PrefillStatus(_message.Message):
    __slots__ = ("reused", "dropped", "prefilled", "prefix", "suffix", "resident", "available", "restored", "retained", "copied", "miss_reason", "manifest_digest", "resolved_manifest_digest", "stable_token_hash", "volatile_token_hash", "seconds", "queue_seconds", "template_additive", "turns_recomputed", "resolved", "seen_tokens", "reused_lower_bound", "parked", "gone", "recomputed")
    REUSED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    COPIED_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STABLE_TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    VOLATILE_TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ADDITIVE_FIELD_NUMBER: _ClassVar[int]
    TURNS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_LOWER_BOUND_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
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
    resolved: _containers.RepeatedCompositeFieldContainer[ResolvedSegment]
    seen_tokens: int
    reused_lower_bound: bool
    parked: int
    gone: int
    recomputed: int
    def __init__(self, reused: _Optional[int] = ..., dropped: _Optional[int] = ..., prefilled: _Optional[int] = ..., prefix: _Optional[int] = ..., suffix: _Optional[int] = ..., resident: _Optional[int] = ..., available: _Optional[int] = ..., restored: _Optional[int] = ..., retained: _Optional[int] = ..., copied: _Optional[int] = ..., miss_reason: _Optional[_Union[MissReason, str]] = ..., manifest_digest: _Optional[str] = ..., resolved_manifest_digest: _Optional[str] = ..., stable_token_hash: _Optional[str] = ..., volatile_token_hash: _Optional[str] = ..., seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., template_additive: _Optional[bool] = ..., turns_recomputed: _Optional[int] = ..., resolved: _Optional[_Iterable[_Union[ResolvedSegment, _Mapping]]] = ..., seen_tokens: _Optional[int] = ..., reused_lower_bound: _Optional[bool] = ..., parked: _Optional[int] = ..., gone: _Optional[int] = ..., recomputed: _Optional[int] = ...) -> None: ...

class ResolvedSegment(_message.Message):
    __slots__ = ("index", "byte_begin", "byte_end", "token_begin", "token_end", "token_hash", "located")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTE_BEGIN_FIELD_NUMBER: _ClassVar[int]
    BYTE_END_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BEGIN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    LOCATED_FIELD_NUMBER: _ClassVar[int]
    index: int
    byte_begin: int
    byte_end: int
    token_begin: int
    token_end: int
    token_hash: str
    located: bool
    def __init__(self, index: _Optional[int] = ..., byte_begin: _Optional[int] = ..., byte_end: _Optional[int] = ..., token_begin: _Optional[int] = ..., token_end: _Optional[int] = ..., token_hash: _Optional[str] = ..., located: _Optional[bool] = ...) -> None: ...

class EnsurePrefixRequest(_message.Message):
    __slots__ = ("session", "identity", "prompt", "turn_id", "no_wait")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    prompt: Prompt
    turn_id: str
    no_wait: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., turn_id: _Optional[str] = ..., no_wait: _Optional[bool] = ...) -> None: ...

class EnsurePrefixResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: PrefillStatus
    def __init__(self, status: _Optional[_Union[PrefillStatus, _Mapping]] = ...) -> None: ...

class PrefillSuffixRequest(_message.Message):
    __slots__ = ("session", "identity", "prompt", "extend", "turn_id", "no_wait")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    EXTEND_FIELD_NUMBER: _ClassVar[int]
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    prompt: Prompt
    extend: bool
    turn_id: str
    no_wait: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., extend: _Optional[bool] = ..., turn_id: _Optional[str] = ..., no_wait: _Optional[bool] = ...) -> None: ...

class PrefillSuffixResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: PrefillStatus
    def __init__(self, status: _Optional[_Union[PrefillStatus, _Mapping]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repeat_penalty", "repeat_last_n", "frequency_penalty", "presence_penalty", "seed", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    REPEAT_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPEAT_LAST_N_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    repeat_last_n: int
    frequency_penalty: float
    presence_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., typical_p: _Optional[float] = ..., repeat_penalty: _Optional[float] = ..., repeat_last_n: _Optional[int] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class DecodeOptions(_message.Message):
    __slots__ = ("sampling", "stop", "max_tokens", "structured", "stream_interval_ms", "token_ids", "top_logprobs", "ignore_eos")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    sampling: Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    structured: StructuredOutput
    stream_interval_ms: int
    token_ids: bool
    top_logprobs: int
    ignore_eos: bool
    def __init__(self, sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., structured: _Optional[_Union[StructuredOutput, _Mapping]] = ..., stream_interval_ms: _Optional[int] = ..., token_ids: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("session", "identity", "options", "turn_id", "no_wait")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TURN_ID_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    options: DecodeOptions
    turn_id: str
    no_wait: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., options: _Optional[_Union[DecodeOptions, _Mapping]] = ..., turn_id: _Optional[str] = ..., no_wait: _Optional[bool] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "text", "raw", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    raw: bytes
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., raw: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("sampled", "top")
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    sampled: TokenLogprob
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, sampled: _Optional[_Union[TokenLogprob, _Mapping]] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("text", "reasoning_text", "tool_calls", "token_ids", "logprobs", "tokens")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_TEXT_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    text: str
    reasoning_text: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[_common_pb2.ToolCall]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[SampledToken]
    tokens: int
    def __init__(self, text: _Optional[str] = ..., reasoning_text: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[_common_pb2.ToolCall, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., tokens: _Optional[int] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("stop_reason", "stop_sequence", "tokens", "prefilled", "engine_seconds", "queue_seconds", "first_token_seconds", "resident", "available", "generated_turn_id", "seed", "seen_tokens", "parked", "gone", "recomputed", "saved")
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TURN_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
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
    parked: int
    gone: int
    recomputed: int
    saved: Saved
    def __init__(self, stop_reason: _Optional[_Union[StopReason, str]] = ..., stop_sequence: _Optional[str] = ..., tokens: _Optional[int] = ..., prefilled: _Optional[int] = ..., engine_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., resident: _Optional[int] = ..., available: _Optional[int] = ..., generated_turn_id: _Optional[str] = ..., seed: _Optional[int] = ..., seen_tokens: _Optional[int] = ..., parked: _Optional[int] = ..., gone: _Optional[int] = ..., recomputed: _Optional[int] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("ok", "tokens", "written_bytes", "seconds", "reason", "detail", "saved_unix_ms")
    OK_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SAVED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    tokens: int
    written_bytes: int
    seconds: float
    reason: str
    detail: str
    saved_unix_ms: int
    def __init__(self, ok: _Optional[bool] = ..., tokens: _Optional[int] = ..., written_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., saved_unix_ms: _Optional[int] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("queued", "chunk", "final")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    queued: _common_pb2.QueueStatus
    chunk: Chunk
    final: Final
    def __init__(self, queued: _Optional[_Union[_common_pb2.QueueStatus, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ...) -> None: ...

class TurnRequest(_message.Message):
    __slots__ = ("session", "identity", "prefix", "suffix", "options", "no_wait")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    prefix: Prompt
    suffix: Prompt
    options: DecodeOptions
    no_wait: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., prefix: _Optional[_Union[Prompt, _Mapping]] = ..., suffix: _Optional[_Union[Prompt, _Mapping]] = ..., options: _Optional[_Union[DecodeOptions, _Mapping]] = ..., no_wait: _Optional[bool] = ...) -> None: ...

class TurnEvent(_message.Message):
    __slots__ = ("queued", "prefix", "suffix", "chunk", "final")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    queued: _common_pb2.QueueStatus
    prefix: PrefillStatus
    suffix: PrefillStatus
    chunk: Chunk
    final: Final
    def __init__(self, queued: _Optional[_Union[_common_pb2.QueueStatus, _Mapping]] = ..., prefix: _Optional[_Union[PrefillStatus, _Mapping]] = ..., suffix: _Optional[_Union[PrefillStatus, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("session", "identity", "label")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    label: str
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., label: _Optional[str] = ...) -> None: ...

class SnapshotInfo(_message.Message):
    __slots__ = ("snapshot_id", "label", "size_bytes", "digest", "tokens", "exact", "identity", "created_unix_ms", "exact_reason", "model", "window", "seen_tokens", "turns", "seconds", "k_type", "v_type", "overflow")
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    EXACT_REASON_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    K_TYPE_FIELD_NUMBER: _ClassVar[int]
    V_TYPE_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    label: str
    size_bytes: int
    digest: str
    tokens: int
    exact: bool
    identity: _common_pb2.Identity
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
    def __init__(self, snapshot_id: _Optional[str] = ..., label: _Optional[str] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., tokens: _Optional[int] = ..., exact: _Optional[bool] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., created_unix_ms: _Optional[int] = ..., exact_reason: _Optional[str] = ..., model: _Optional[str] = ..., window: _Optional[int] = ..., seen_tokens: _Optional[int] = ..., turns: _Optional[int] = ..., seconds: _Optional[float] = ..., k_type: _Optional[str] = ..., v_type: _Optional[str] = ..., overflow: _Optional[_Union[Overflow, str]] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("session", "identity", "snapshot_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    snapshot_id: str
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., snapshot_id: _Optional[str] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("snapshot", "resident", "available", "seconds", "tokens", "exact", "exact_reason", "seen_tokens", "generated_turn_ids")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    EXACT_REASON_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TURN_IDS_FIELD_NUMBER: _ClassVar[int]
    snapshot: SnapshotInfo
    resident: int
    available: int
    seconds: float
    tokens: int
    exact: bool
    exact_reason: str
    seen_tokens: int
    generated_turn_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, snapshot: _Optional[_Union[SnapshotInfo, _Mapping]] = ..., resident: _Optional[int] = ..., available: _Optional[int] = ..., seconds: _Optional[float] = ..., tokens: _Optional[int] = ..., exact: _Optional[bool] = ..., exact_reason: _Optional[str] = ..., seen_tokens: _Optional[int] = ..., generated_turn_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListSnapshotsRequest(_message.Message):
    __slots__ = ("model_digest",)
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    def __init__(self, model_digest: _Optional[str] = ...) -> None: ...

class ListSnapshotsResponse(_message.Message):
    __slots__ = ("snapshots", "used_bytes", "quota_bytes")
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    snapshots: _containers.RepeatedCompositeFieldContainer[SnapshotInfo]
    used_bytes: int
    quota_bytes: int
    def __init__(self, snapshots: _Optional[_Iterable[_Union[SnapshotInfo, _Mapping]]] = ..., used_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class DeleteSnapshotRequest(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class DeleteSnapshotResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExportSnapshotRequest(_message.Message):
    __slots__ = ("snapshot_id",)
    SNAPSHOT_ID_FIELD_NUMBER: _ClassVar[int]
    snapshot_id: str
    def __init__(self, snapshot_id: _Optional[str] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("info", "offset", "data", "file")
    INFO_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    info: SnapshotInfo
    offset: int
    data: bytes
    file: str
    def __init__(self, info: _Optional[_Union[SnapshotInfo, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., file: _Optional[str] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("session", "identity", "segment_index", "range", "query", "budget_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_INDEX_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    segment_index: int
    range: TokenRange
    query: str
    budget_tokens: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., segment_index: _Optional[int] = ..., range: _Optional[_Union[TokenRange, _Mapping]] = ..., query: _Optional[str] = ..., budget_tokens: _Optional[int] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("admitted", "evicted", "resident", "available", "restored", "recomputed", "ranges", "parked", "gone", "seconds", "queue_seconds")
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    admitted: int
    evicted: int
    resident: int
    available: int
    restored: int
    recomputed: int
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    parked: int
    gone: int
    seconds: float
    queue_seconds: float
    def __init__(self, admitted: _Optional[int] = ..., evicted: _Optional[int] = ..., resident: _Optional[int] = ..., available: _Optional[int] = ..., restored: _Optional[int] = ..., recomputed: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., parked: _Optional[int] = ..., gone: _Optional[int] = ..., seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session", "identity", "session_key", "durable", "no_wait")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    session_key: str
    durable: bool
    no_wait: bool
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., session_key: _Optional[str] = ..., durable: _Optional[bool] = ..., no_wait: _Optional[bool] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("session", "status", "identity", "resolution", "capabilities", "generated_turn_ids", "saved")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RESOLUTION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TURN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    status: PrefillStatus
    identity: _common_pb2.Identity
    resolution: _common_pb2.Resolution
    capabilities: _containers.RepeatedCompositeFieldContainer[_common_pb2.Capability]
    generated_turn_ids: _containers.RepeatedScalarFieldContainer[str]
    saved: Saved
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., status: _Optional[_Union[PrefillStatus, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., resolution: _Optional[_Union[_common_pb2.Resolution, _Mapping]] = ..., capabilities: _Optional[_Iterable[_Union[_common_pb2.Capability, _Mapping]]] = ..., generated_turn_ids: _Optional[_Iterable[str]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ...) -> None: ...

class ExplainContextRequest(_message.Message):
    __slots__ = ("session", "identity")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ...) -> None: ...

class ResidentBlock(_message.Message):
    __slots__ = ("token_begin", "token_end", "state", "protected_range", "what", "cache_class")
    TOKEN_BEGIN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_RANGE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    CACHE_CLASS_FIELD_NUMBER: _ClassVar[int]
    token_begin: int
    token_end: int
    state: str
    protected_range: bool
    what: str
    cache_class: str
    def __init__(self, token_begin: _Optional[int] = ..., token_end: _Optional[int] = ..., state: _Optional[str] = ..., protected_range: _Optional[bool] = ..., what: _Optional[str] = ..., cache_class: _Optional[str] = ...) -> None: ...

class Counter(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class ExplainContextResponse(_message.Message):
    __slots__ = ("session", "identity", "resolution", "resident", "available", "retained", "seen_tokens", "segments", "blocks", "capabilities", "counters", "last_fatal", "generated_turn_ids", "detail", "parked", "gone")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RESOLUTION_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LAST_FATAL_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TURN_IDS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    identity: _common_pb2.Identity
    resolution: _common_pb2.Resolution
    resident: int
    available: int
    retained: int
    seen_tokens: int
    segments: _containers.RepeatedCompositeFieldContainer[ResolvedSegment]
    blocks: _containers.RepeatedCompositeFieldContainer[ResidentBlock]
    capabilities: _containers.RepeatedCompositeFieldContainer[_common_pb2.Capability]
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    last_fatal: str
    generated_turn_ids: _containers.RepeatedScalarFieldContainer[str]
    detail: str
    parked: int
    gone: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., resolution: _Optional[_Union[_common_pb2.Resolution, _Mapping]] = ..., resident: _Optional[int] = ..., available: _Optional[int] = ..., retained: _Optional[int] = ..., seen_tokens: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[ResolvedSegment, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[ResidentBlock, _Mapping]]] = ..., capabilities: _Optional[_Iterable[_Union[_common_pb2.Capability, _Mapping]]] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ..., last_fatal: _Optional[str] = ..., generated_turn_ids: _Optional[_Iterable[str]] = ..., detail: _Optional[str] = ..., parked: _Optional[int] = ..., gone: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("model", "model_type", "window", "k_type", "v_type", "prompt_format", "profile_id", "session_id", "sessions", "machine", "what_if", "companions", "hypothetical", "layout")
    class WhatIfEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    K_TYPE_FIELD_NUMBER: _ClassVar[int]
    V_TYPE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    WHAT_IF_FIELD_NUMBER: _ClassVar[int]
    COMPANIONS_FIELD_NUMBER: _ClassVar[int]
    HYPOTHETICAL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_type: str
    window: int
    k_type: str
    v_type: str
    prompt_format: str
    profile_id: str
    session_id: str
    sessions: int
    machine: str
    what_if: _containers.ScalarMap[str, str]
    companions: Companions
    hypothetical: bool
    layout: Layout
    def __init__(self, model: _Optional[str] = ..., model_type: _Optional[str] = ..., window: _Optional[int] = ..., k_type: _Optional[str] = ..., v_type: _Optional[str] = ..., prompt_format: _Optional[str] = ..., profile_id: _Optional[str] = ..., session_id: _Optional[str] = ..., sessions: _Optional[int] = ..., machine: _Optional[str] = ..., what_if: _Optional[_Mapping[str, str]] = ..., companions: _Optional[_Union[Companions, _Mapping]] = ..., hypothetical: _Optional[bool] = ..., layout: _Optional[_Union[Layout, str]] = ...) -> None: ...

class Companions(_message.Message):
    __slots__ = ("projector_bytes", "projector_compute_bytes", "adapter_bytes", "draft_bytes")
    PROJECTOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROJECTOR_COMPUTE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    projector_bytes: int
    projector_compute_bytes: int
    adapter_bytes: int
    draft_bytes: int
    def __init__(self, projector_bytes: _Optional[int] = ..., projector_compute_bytes: _Optional[int] = ..., adapter_bytes: _Optional[int] = ..., draft_bytes: _Optional[int] = ...) -> None: ...

class LayerRun(_message.Message):
    __slots__ = ("count", "kind", "kv_heads", "key_length", "value_length", "window", "state_bytes")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VALUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    count: int
    kind: str
    kv_heads: int
    key_length: int
    value_length: int
    window: int
    state_bytes: int
    def __init__(self, count: _Optional[int] = ..., kind: _Optional[str] = ..., kv_heads: _Optional[int] = ..., key_length: _Optional[int] = ..., value_length: _Optional[int] = ..., window: _Optional[int] = ..., state_bytes: _Optional[int] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("architecture", "layers", "embedding_length", "heads", "kv_heads", "key_length", "value_length", "context_length", "vocabulary", "sliding_window", "quantization", "file_bytes", "has_chat_template", "name", "layer_runs", "weights_bytes", "input_bytes", "output_bytes", "pooling", "parts", "unknown_pattern", "window_pattern_source")
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_LENGTH_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    KEY_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VALUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYER_RUNS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    INPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_PATTERN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_PATTERN_SOURCE_FIELD_NUMBER: _ClassVar[int]
    architecture: str
    layers: int
    embedding_length: int
    heads: int
    kv_heads: _containers.RepeatedScalarFieldContainer[int]
    key_length: int
    value_length: int
    context_length: int
    vocabulary: int
    sliding_window: int
    quantization: str
    file_bytes: int
    has_chat_template: bool
    name: str
    layer_runs: _containers.RepeatedCompositeFieldContainer[LayerRun]
    weights_bytes: int
    input_bytes: int
    output_bytes: int
    pooling: str
    parts: int
    unknown_pattern: bool
    window_pattern_source: str
    def __init__(self, architecture: _Optional[str] = ..., layers: _Optional[int] = ..., embedding_length: _Optional[int] = ..., heads: _Optional[int] = ..., kv_heads: _Optional[_Iterable[int]] = ..., key_length: _Optional[int] = ..., value_length: _Optional[int] = ..., context_length: _Optional[int] = ..., vocabulary: _Optional[int] = ..., sliding_window: _Optional[int] = ..., quantization: _Optional[str] = ..., file_bytes: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., name: _Optional[str] = ..., layer_runs: _Optional[_Iterable[_Union[LayerRun, _Mapping]]] = ..., weights_bytes: _Optional[int] = ..., input_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., pooling: _Optional[str] = ..., parts: _Optional[int] = ..., unknown_pattern: _Optional[bool] = ..., window_pattern_source: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("model", "model_type", "resident", "identity", "resolution", "questions", "capabilities", "facts", "resolution_source", "template_supports_tools", "machine", "executor", "executor_reason")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RESOLUTION_FIELD_NUMBER: _ClassVar[int]
    QUESTIONS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    RESOLUTION_SOURCE_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_SUPPORTS_TOOLS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_REASON_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_type: str
    resident: bool
    identity: _common_pb2.Identity
    resolution: _common_pb2.Resolution
    questions: _containers.RepeatedCompositeFieldContainer[_common_pb2.Capability]
    capabilities: _containers.RepeatedCompositeFieldContainer[_common_pb2.Capability]
    facts: ModelFacts
    resolution_source: str
    template_supports_tools: bool
    machine: _common_pb2.Machine
    executor: str
    executor_reason: str
    def __init__(self, model: _Optional[str] = ..., model_type: _Optional[str] = ..., resident: _Optional[bool] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., resolution: _Optional[_Union[_common_pb2.Resolution, _Mapping]] = ..., questions: _Optional[_Iterable[_Union[_common_pb2.Capability, _Mapping]]] = ..., capabilities: _Optional[_Iterable[_Union[_common_pb2.Capability, _Mapping]]] = ..., facts: _Optional[_Union[ModelFacts, _Mapping]] = ..., resolution_source: _Optional[str] = ..., template_supports_tools: _Optional[bool] = ..., machine: _Optional[_Union[_common_pb2.Machine, _Mapping]] = ..., executor: _Optional[str] = ..., executor_reason: _Optional[str] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "texts", "model_type", "pooling", "normalize", "no_wait")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    texts: _containers.RepeatedScalarFieldContainer[str]
    model_type: str
    pooling: str
    normalize: bool
    no_wait: bool
    def __init__(self, model: _Optional[str] = ..., texts: _Optional[_Iterable[str]] = ..., model_type: _Optional[str] = ..., pooling: _Optional[str] = ..., normalize: _Optional[bool] = ..., no_wait: _Optional[bool] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values", "tokens")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    tokens: int
    def __init__(self, values: _Optional[_Iterable[float]] = ..., tokens: _Optional[int] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("embeddings", "dimensions", "pooling", "normalized", "engine_seconds", "queue_seconds")
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    NORMALIZED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    embeddings: _containers.RepeatedCompositeFieldContainer[Embedding]
    dimensions: int
    pooling: str
    normalized: bool
    engine_seconds: float
    queue_seconds: float
    def __init__(self, embeddings: _Optional[_Iterable[_Union[Embedding, _Mapping]]] = ..., dimensions: _Optional[int] = ..., pooling: _Optional[str] = ..., normalized: _Optional[bool] = ..., engine_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "parse_special", "add_bos", "load")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PARSE_SPECIAL_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    parse_special: bool
    add_bos: bool
    load: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., parse_special: _Optional[bool] = ..., add_bos: _Optional[bool] = ..., load: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids", "pieces")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "load")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    load: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., load: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "raw")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    text: str
    raw: bytes
    def __init__(self, text: _Optional[str] = ..., raw: _Optional[bytes] = ...) -> None: ...

class RenderTemplateRequest(_message.Message):
    __slots__ = ("model", "messages", "tools", "add_generation_prompt", "load")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    model: str
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChatMessage]
    tools: _containers.RepeatedCompositeFieldContainer[_common_pb2.Tool]
    add_generation_prompt: bool
    load: bool
    def __init__(self, model: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_common_pb2.ChatMessage, _Mapping]]] = ..., tools: _Optional[_Iterable[_Union[_common_pb2.Tool, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., load: _Optional[bool] = ...) -> None: ...

class RenderTemplateResponse(_message.Message):
    __slots__ = ("text", "template_digest", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    template_digest: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, text: _Optional[str] = ..., template_digest: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session", "discard", "detach", "session_key")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    discard: bool
    detach: bool
    session_key: str
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., discard: _Optional[bool] = ..., detach: _Optional[bool] = ..., session_key: _Optional[str] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ("retained_tokens",)
    RETAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    retained_tokens: int
    def __init__(self, retained_tokens: _Optional[int] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session", "session_key", "model", "prompt_format", "context", "resident", "seen_tokens", "age_seconds", "idle_seconds", "attached", "profile_id", "parked", "durable", "overflow", "layout", "saved_unix_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    PROFILE_ID_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SAVED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    session: _common_pb2.SessionHandle
    session_key: str
    model: str
    prompt_format: str
    context: _common_pb2.ContextNumbers
    resident: int
    seen_tokens: int
    age_seconds: float
    idle_seconds: float
    attached: bool
    profile_id: str
    parked: bool
    durable: bool
    overflow: Overflow
    layout: Layout
    saved_unix_ms: int
    def __init__(self, session: _Optional[_Union[_common_pb2.SessionHandle, _Mapping]] = ..., session_key: _Optional[str] = ..., model: _Optional[str] = ..., prompt_format: _Optional[str] = ..., context: _Optional[_Union[_common_pb2.ContextNumbers, _Mapping]] = ..., resident: _Optional[int] = ..., seen_tokens: _Optional[int] = ..., age_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., attached: _Optional[bool] = ..., profile_id: _Optional[str] = ..., parked: _Optional[bool] = ..., durable: _Optional[bool] = ..., overflow: _Optional[_Union[Overflow, str]] = ..., layout: _Optional[_Union[Layout, str]] = ..., saved_unix_ms: _Optional[int] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class ListSavedSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SavedSession(_message.Message):
    __slots__ = ("session_key", "model", "model_digest", "prompt_format", "tokens", "seen_tokens", "turns", "window", "overflow", "size_bytes", "saved_unix_ms", "used_unix_ms", "open")
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FORMAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    USED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    session_key: str
    model: str
    model_digest: str
    prompt_format: str
    tokens: int
    seen_tokens: int
    turns: int
    window: int
    overflow: Overflow
    size_bytes: int
    saved_unix_ms: int
    used_unix_ms: int
    open: bool
    def __init__(self, session_key: _Optional[str] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., prompt_format: _Optional[str] = ..., tokens: _Optional[int] = ..., seen_tokens: _Optional[int] = ..., turns: _Optional[int] = ..., window: _Optional[int] = ..., overflow: _Optional[_Union[Overflow, str]] = ..., size_bytes: _Optional[int] = ..., saved_unix_ms: _Optional[int] = ..., used_unix_ms: _Optional[int] = ..., open: _Optional[bool] = ...) -> None: ...

class ListSavedSessionsResponse(_message.Message):
    __slots__ = ("saved",)
    SAVED_FIELD_NUMBER: _ClassVar[int]
    saved: _containers.RepeatedCompositeFieldContainer[SavedSession]
    def __init__(self, saved: _Optional[_Iterable[_Union[SavedSession, _Mapping]]] = ...) -> None: ...
