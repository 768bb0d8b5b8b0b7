"""What crosses the ZeroMQ seam: the envelope and the tagged payloads.

One envelope a frame: ``[version, kind, worker_epoch, generation, op_id, seq, payload]``. Payloads
are tagged structs; the supervisor sends requests, the worker answers with any number of DATA
frames and exactly one DONE or ERROR frame per operation. ``seq`` counts a worker's frames of one
operation from 0. Nothing here knows gRPC, sockets or engines.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

import msgspec

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 64 * 1024 * 1024


class Kind(IntEnum):
    HELLO = 1  # worker → supervisor, first frame
    WELCOME = 2  # supervisor → worker
    OP = 3  # supervisor → worker: a request
    CANCEL = 4  # supervisor → worker
    CREDIT = 5  # supervisor → worker: more chunks may be sent
    DATA = 6  # worker → supervisor: progress, status or chunk
    DONE = 7  # worker → supervisor: terminal, with the result
    ERROR = 8  # worker → supervisor: terminal, with a typed error
    HEARTBEAT = 9  # worker → supervisor
    SHUTDOWN = 10  # supervisor → worker: finish and exit


class Envelope(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    version: int
    kind: int
    epoch: bytes
    generation: int
    op_id: int
    seq: int
    payload: msgspec.Raw


class _Message(msgspec.Struct, tag=True, forbid_unknown_fields=True, kw_only=True):
    """Base of payloads: tagged by class name, unknown fields refused."""


# --- link ------------------------------------------------------------------------------------


class EngineDevice(_Message):
    """A device that the linked engine can compute on, in the engine's own words."""

    name: str  # as the engine calls it: "CPU", "CUDA0"
    description: str
    kind: str  # cpu | gpu | igpu | accel
    total_bytes: int = 0  # 0: it doesn't tell
    free_bytes: int = 0
    pci: str = ""  # bus id, lower case, where it is known


class Hello(_Message):
    backend: str
    backend_version: str
    build_digest: str  # SHA-256 hex over the engine's shared libraries' identity
    pid: int
    capabilities: dict[str, str] = {}  # name → "yes"/"no"/"unknown"
    state_layout: str = ""
    # Longest time, in seconds, that each kind of call may leave the I/O thread without the GIL.
    longest_gap_s: dict[str, float] = {}
    devices: list[EngineDevice] = []


class Welcome(_Message):
    owner_instance_id: str
    heartbeat_interval_s: float


class Heartbeat(_Message):
    progress: int  # grows while the engine works
    busy_op: int  # 0: idle
    rss_bytes: int = 0
    dropped: int = 0  # frames dropped for an old epoch or generation
    cold_bytes: int = 0  # RAM that the cold store holds now


class Cancel(_Message):
    pass


class Credit(_Message):
    chunks: int


class Shutdown(_Message):
    pass


class WireError(_Message):
    reason: str
    message: str
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None


# --- model -----------------------------------------------------------------------------------


class AdapterIn(_Message):
    """A LoRA adapter to apply: its file, SHA-256 hex and the scale of what it adds."""

    path: str
    digest: str
    scale: float


class LoadOp(_Message):
    path: str
    model: str
    digest: str
    n_batch: int = 512  # tokens a decode call
    n_ubatch: int = 512  # tokens a micro-batch: cancel granularity, compute buffer
    n_gpu_layers: int = 0
    flash_attn: bool = False
    threads: int = 0  # 0: the worker chooses from what is free
    max_contexts: int = 8  # engine contexts, in use and reclaimable together
    devices: list[str] = []  # engine names of the accelerators to use, in the engine's order
    tensor_split: list[float] = []  # one share for each of ``devices``: how many layers it takes
    quality: bool = False  # run the greedy probe and report what it sampled
    # KV types that the first session will ask for; an engine that compiles them in does so now.
    k_type: str = "f16"
    v_type: str = "f16"
    device: str = ""  # the engine's own name of the one device to compile for; "": its default
    window: int = 0  # tokens that the first session was planned; 0: not known
    adapters: list[AdapterIn] = []  # applied all, in this order
    cold: ColdIn | None = None  # None: nothing is parked


class ColdIn(_Message):
    """The cold store's budgets, and the folder of its disk part, which the worker owns."""

    ram_bytes: int  # at most; less where the machine's memory is short
    disk_bytes: int = 0  # 0: nothing on disk
    folder: str = ""  # absolute; made by the supervisor


class Progress(_Message):
    stage: str
    fraction: float


class PlacedOut(_Message):
    """Bytes that the engine reports on one of its devices."""

    device: str  # engine name; "CPU" for the host
    weights_bytes: int = 0
    kv_bytes: int = 0
    compute_bytes: int = 0


class QualityOut(_Message):
    """What greedy sampling gave after a fixed prompt. ``margins`` are the distances, in logits,
    between the best and the second-best token of each step."""

    prompt_ids: list[int]
    ids: list[int]
    margins: list[float]
    seconds: float


class LoadResult(_Message):
    description: str
    vocab: int
    train_context: int  # tokens
    weights_bytes: int
    add_bos: bool
    template_digest: str  # "" if none
    template_supports_tools: bool
    threads: int
    capabilities: dict[str, str]  # name → evidence-bearing "yes: ..." / "no: ..." / "unknown: ..."
    seconds: float
    gpu_layers: int = 0  # layers really on accelerators, the output counted as one
    placed: list[PlacedOut] = []
    # What the engine read from the file, to be held against the facts: layers, train_context,
    # sliding_window, embedding_length, heads, kv_heads, vocabulary, recurrent (0 or 1), …
    traits: dict[str, int] = {}
    quality: QualityOut | None = None
    executor: str = ""  # which of an engine's ways to run a model serves this one
    executor_reason: str = ""
    # A context's KV is reserved when it is made, and touched as it fills: until then a reading of
    # free memory still counts it.
    kv_untouched: bool = False
    # In the place of the greeting's, while this model is loaded: seconds, by kind of call.
    longest_gap_s: dict[str, float] = {}
    # Cache types, as "K/V", at which imported states were seen to continue bit for bit.
    exact_state_types: list[str] = []


class UnloadOp(_Message):
    pass


class Empty(_Message):
    pass


# --- prompt ----------------------------------------------------------------------------------


class Message(_Message):
    role: str
    text: str
    tool_calls: list[ToolCallPart] = []
    tool_call_id: str = ""
    name: str = ""
    images: list[ImageIn] = []  # in order


class ImageIn(_Message):
    """An encoded image of a message, which stands before the text's character ``at``."""

    data: bytes
    mime_type: str  # "": whatever the content is
    at: int = 0


class ToolCallPart(_Message):
    id: str
    name: str
    arguments: str


class SegmentIn(_Message):
    """One of text, message or generated_turn_id is set."""

    text: str | None = None
    parse_special: bool = False
    message: Message | None = None
    generated_turn_id: str | None = None
    cache_class: str = "volatile"  # task_pinned | repo_map | volatile


class PromptIn(_Message):
    segments: list[SegmentIn]
    tools: list[str] = []  # JSON texts


class SegmentOut(_Message):
    byte_begin: int
    byte_end: int
    token_begin: int
    token_end: int
    token_hash: str
    located: bool


# --- sessions --------------------------------------------------------------------------------


class OpenOp(_Message):
    session_id: str
    prompt_format: str  # raw | chat
    window: int  # tokens
    k_type: str
    v_type: str
    kv_digest: str
    runtime_digest: str
    free_bytes: int = 0  # of reclaimable contexts, to give back before allocating
    compute_bytes: int = 0  # on the host, as planned: part of the last look before allocating
    overflow: str = "refuse"  # refuse | evict
    layout: str = "isolated"  # isolated | batched: a stream of a context that several share
    streams: int = 0  # of the slot's batch, should this open be the one that makes it


class SlotTotals(_Message):
    """What all of a slot's contexts take: part of every answer to what may have changed it."""

    slot_cells: int = 0  # KV cells allocated
    slot_bytes: int = 0  # KV and compute bytes
    slot_compute_bytes: int = 0  # of those, compute buffers
    reclaimable_bytes: int = 0  # of those, what contexts without a session hold
    slot_placed: list[PlacedOut] = []  # by device
    reclaimable_placed: list[PlacedOut] = []  # of those, of contexts without a session


class OpenResult(SlotTotals, kw_only=True):
    window: int  # tokens actually allocated (the engine rounds up)
    kv_bytes: int
    compute_bytes: int
    slot_cells: int
    reused_context: bool
    retained: int  # tokens the context it got still holds
    placed: list[PlacedOut] = []  # of this context, by device


class ParkOp(_Message):
    """Put a session's KV into the cold store and give its context back; the session stays."""

    session_id: str


class ParkResult(SlotTotals, kw_only=True):
    parked: int  # tokens whose KV the cold store holds now, of what the context held
    lost: int  # … and those that it doesn't: they are evaluated again
    ram_bytes: int  # of the cold store, in use after this
    disk_bytes: int
    seconds: float


class ResumeOp(_Message):
    """Give a parked session a context again, with what the cold store still has of it."""

    session_id: str
    free_bytes: int = 0  # as in OpenOp
    compute_bytes: int = 0


class ResumeResult(OpenResult, kw_only=True):
    restored: int  # tokens brought back from the cold store
    missing: int  # tokens that the session held and that must be evaluated again
    resident: int
    seconds: float


class AdmitOp(_Message):
    """Bring parked tokens of a session under overflow evict back into attention.

    One of ``segment_index`` (of the prompt's, prefix then suffix; -1: not by segment), a range of
    positions in the conversation, and ``query``.
    """

    session_id: str
    segment_index: int = -1
    begin: int = 0
    end: int = 0
    query: str = ""
    budget_tokens: int = 0  # at most so many are admitted; 0: what fits


class AdmitResult(_Message):
    admitted: int  # tokens that are attended now and weren't before
    restored: int  # of those, brought back from the cold store
    recomputed: int  # tokens evaluated for it, what follows the admitted ones included
    evicted: int  # tokens that went out of attention for them
    ranges: list[list[int]]  # [begin, end) in the conversation, what was admitted
    resident: int
    available: int
    parked: int
    gone: int
    seconds: float
    cancelled: bool = False


class SaveOp(_Message):
    """Write a session durably into a folder: what changed since the files that are there.

    ``folder`` is absolute and exists. Files that the new record doesn't name are left; the caller
    removes them once it has the answer.
    """

    session_id: str
    folder: str


class SavedPart(_Message):
    name: str  # of a file in the folder
    begin: int  # tokens
    end: int
    file_bytes: int
    digest: str  # SHA-256 hex that covers every byte of the file


class SaveResult(_Message):
    record: str  # name of the file that holds the session, and names the parts
    record_bytes: int
    record_digest: str
    parts: list[SavedPart]  # in order; of positions 0 to ``tokens``
    written_bytes: int  # by this call, the record included
    tokens: int  # whose KV is saved
    seen_tokens: int
    turns: int
    exact: bool
    exact_reason: str
    seconds: float
    cancelled: bool = False  # then nothing of the folder's record changed


class RestoreOp(_Message):
    """Make a session what was saved: prompt, answers and KV in the place of what it has."""

    session_id: str
    folder: str
    record: str  # name of the record's file in it


class RestoreResult(SlotTotals, kw_only=True):
    tokens: int  # whose KV was brought back; 0 where it was cancelled: then nothing changed
    resident: int
    available: int
    retained: int
    seen_tokens: int
    turn_ids: list[str]
    exact: bool
    exact_reason: str
    seconds: float
    cancelled: bool = False


class CloseOp(_Message):
    session_id: str
    discard: bool = False


class CloseResult(SlotTotals, kw_only=True):
    retained: int


# --- residency: a session's KV on disk, in a second session, shorter ------------------------------


class ExportOp(_Message):
    """Write the KV of a range of positions to a new file."""

    session_id: str
    path: str  # absolute; its folder exists, it doesn't
    begin: int = 0
    end: int = -1  # -1: all that the session's context holds, what is retained included


class ExportResult(_Message):
    begin: int
    end: int
    tokens: int  # 0 where it was cancelled: then nothing was written
    file_bytes: int
    payload_bytes: int  # of those, the engine's own
    digest: str  # SHA-256 hex that covers every byte of the file
    chain: str  # SHA-256 hex that names the KV of all tokens up to ``end``
    exact: bool
    exact_reason: str
    seconds: float
    cancelled: bool = False


class ImportOp(_Message):
    """Take an exported range: a whole one in the place of what the context holds, any other
    behind exactly the tokens that came before it.
    """

    session_id: str
    path: str


class ImportResult(SlotTotals, kw_only=True):
    begin: int
    end: int
    tokens: int  # 0 where it was cancelled: then nothing changed
    resident: int
    available: int
    retained: int
    payload_bytes: int
    digest: str
    exact: bool
    exact_reason: str
    seconds: float
    cancelled: bool = False


class ForkOp(_Message):
    """A second session of the same prompt, answers and KV, which goes on by itself."""

    session_id: str
    new_session_id: str
    free_bytes: int = 0  # as in OpenOp
    compute_bytes: int = 0


class ForkResult(OpenResult, kw_only=True):
    """``retained`` and ``resident`` are the new session's."""

    copied: int  # tokens
    resident: int
    seconds: float
    turn_ids: list[str]  # oldest first


class TrimOp(_Message):
    """Remove what the session's context holds from position ``keep`` on."""

    session_id: str
    keep: int


class TrimResult(_Message):
    dropped: int  # tokens, retained ones included
    resident: int
    available: int
    retained: int


class EnsureOp(_Message):
    session_id: str
    prefix: PromptIn


class SuffixOp(_Message):
    session_id: str
    suffix: PromptIn
    extend: bool = False


class Status(_Message):
    """What a prefill did. Counts are tokens."""

    part: str  # prefix | suffix
    reused: int
    dropped: int
    prefilled: int
    prefix: int
    suffix: int
    resident: int
    available: int
    retained: int
    copied: int
    # NONE COLD TOKENS_DIFFER EXTENDED KV_DIGEST CANNOT_TRIM RECLAIMED RECOMPUTED
    miss_reason: str
    stable_token_hash: str
    volatile_token_hash: str
    template_additive: bool
    turns_recomputed: int
    seen_tokens: int
    seconds: float
    segments: list[SegmentOut]  # of prefix, then suffix
    reused_lower_bound: bool = False  # more may have been reused, and as many fewer prefilled
    restored: int = 0  # of ``reused``: brought back from the cold store
    # Under overflow evict, of the prompt's tokens: not attended, kept or not.
    parked: int = 0
    gone: int = 0
    recomputed: int = 0  # of ``prefilled``: evaluated before, and again since others went out


class SamplingIn(_Message):
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = {}


class DecodeIn(_Message):
    sampling: SamplingIn
    stop: list[str] = []
    max_tokens: int = 0
    stream_interval_ms: int = 8
    token_ids: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False
    structured_kind: str = ""  # json_schema | regex | grammar; "": none
    structured: str = ""  # the constraint's text


class DecodeOp(_Message):
    session_id: str
    turn_id: str  # becomes generated_turn_id
    options: DecodeIn


class TurnOp(_Message):
    session_id: str
    turn_id: str
    prefix: PromptIn
    suffix: PromptIn
    options: DecodeIn


class TokenLogprobOut(_Message):
    token_id: int
    raw: bytes
    logprob: float


class SampledTokenOut(_Message):
    sampled: TokenLogprobOut
    top: list[TokenLogprobOut]


class ChunkOut(_Message):
    text: str
    tokens: int
    token_ids: list[int] = []
    logprobs: list[SampledTokenOut] = []


class FinalOut(_Message):
    stop_reason: str  # eos stop_sequence length context_full cancelled
    stop_sequence: str
    tokens: int
    prefilled: int
    engine_seconds: float
    first_token_seconds: float
    resident: int
    available: int
    seen_tokens: int
    seed: int
    parked: int = 0  # as in Status, after the answer
    gone: int = 0
    recomputed: int = 0  # tokens evaluated again during the answer, since others went out


class ExplainOp(_Message):
    session_id: str


class BlockOut(_Message):
    begin: int
    end: int
    state: str  # hot | retained | parked | gone
    what: str  # prefix | suffix | generated | retained
    protected: bool = False  # isn't evicted
    cls: str = ""  # under overflow evict: pinned | sink | recent | admitted | repo_map | volatile


class ExplainResult(_Message):
    resident: int
    available: int
    retained: int
    seen_tokens: int
    segments: list[SegmentOut]
    blocks: list[BlockOut]
    counters: dict[str, int]
    turn_ids: list[str]
    slot_cells: int
    reclaimable_tokens: int
    parked: int = 0
    gone: int = 0


class TokenizeOp(_Message):
    text: str
    parse_special: bool
    add_bos: bool


class TokenizeResult(_Message):
    ids: list[int]
    pieces: list[bytes]


class DetokenizeOp(_Message):
    ids: list[int]


class DetokenizeResult(_Message):
    raw: bytes


class RenderOp(_Message):
    messages: list[Message]
    tools: list[str]
    add_generation_prompt: bool


class RenderResult(_Message):
    text: str
    template_digest: str
    ids: list[int]


class EmbedOp(_Message):
    texts: list[str]
    pooling: str = ""  # mean | cls | last; "": what the model declares
    normalize: bool = True  # to length 1


class EmbedResult(_Message):
    dimensions: int
    pooling: str
    tokens: list[int]  # of each text, with what the tokenizer puts around it
    vectors: bytes  # float32, little-endian: a row of ``dimensions`` for each text
    normalized: bool
    seconds: float
    cancelled: bool = False  # then there are fewer rows than texts


Payload: TypeAlias = (
    Hello | Welcome | Heartbeat | Cancel | Credit | Shutdown | WireError
    | LoadOp | Progress | LoadResult | UnloadOp | Empty
    | OpenOp | OpenResult | CloseOp | CloseResult
    | ExportOp | ExportResult | ImportOp | ImportResult | ForkOp | ForkResult | TrimOp | TrimResult
    | ParkOp | ParkResult | ResumeOp | ResumeResult | AdmitOp | AdmitResult
    | SaveOp | SaveResult | RestoreOp | RestoreResult
    | EnsureOp | SuffixOp | Status | DecodeOp | TurnOp | ChunkOut | FinalOut
    | ExplainOp | ExplainResult
    | TokenizeOp | TokenizeResult | DetokenizeOp | DetokenizeResult | RenderOp | RenderResult
    | EmbedOp | EmbedResult
)  # fmt: skip
