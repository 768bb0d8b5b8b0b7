"""Between the public messages and the internal value types; validates what it converts."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from modeld.shared.capabilities import Capability
from modeld.shared.capacity import (
    DeviceReading,
    MachineReading,
    ModelFacts,
    Number,
    Reason,
    Refusal,
    Resolution,
    SixNumbers,
)
from modeld.shared.errors import DigestMismatch, InvalidRequest, ManifestMismatch, unsupported
from modeld.shared.ids import ROLE
from modeld.shared.images import NamedImage, check_images
from modeld.shared.manifest import (
    AdapterId,
    Identity,
    SegmentId,
    message_hash,
    raw_hash,
    sha256_hex,
    turn_hash,
)
from modeld.shared.messages import (
    ChunkOut,
    DecodeIn,
    FinalOut,
    ImageIn,
    Message,
    PromptIn,
    SampledTokenOut,
    SamplingIn,
    SegmentIn,
    SegmentOut,
    Status,
    TokenLogprobOut,
    ToolCallPart,
)
from modeld.supervisor.durable_sessions import Resumed, Saved
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2 as session

_REASONS = {
    reason: "CONTEXT_REASON_NONE" if reason is Reason.NONE else reason.name for reason in Reason
}
_STOP_REASONS = {
    "eos": session.EOS,
    "stop_sequence": session.STOP_SEQUENCE,
    "length": session.LENGTH,
    "context_full": session.CONTEXT_FULL,
    "cancelled": session.CANCELLED,
}
_ANSWERS = {"yes": common.ANSWER_YES, "no": common.ANSWER_NO, "unknown": common.ANSWER_UNKNOWN}

MAX_STREAM_INTERVAL_MS = 10_000
MAX_TOP_LOGPROBS = 20
CACHE_CLASSES = ("task_pinned", "repo_map", "volatile")


# --- out ---------------------------------------------------------------------------------------


def number(value: Number) -> common.ContextNumber:
    return common.ContextNumber(
        tokens=value.tokens,
        reason=_REASONS[value.reason],
        runner_up=_REASONS[value.runner_up],
        runner_up_tokens=value.runner_up_tokens,
        known=value.known,
    )


def numbers(value: SixNumbers) -> common.ContextNumbers:
    return common.ContextNumbers(
        model_max=number(value.model_max),
        requested=number(value.requested),
        memory_fit=number(value.memory_fit),
        effective=number(value.effective),
        hot=number(value.hot),
        planner=number(value.planner),
    )


def resolution(value: Resolution) -> common.Resolution:
    return common.Resolution(
        context=numbers(value.numbers),
        budget=[
            common.BudgetRow(name=row.name, bytes=row.bytes, note=row.note) for row in value.budget
        ],
        k_type=value.k_type,
        v_type=value.v_type,
        kv_bytes=value.kv_bytes,
        compute_bytes=value.compute_bytes,
        weights_bytes=value.weights_bytes,
        placement=value.placement,
        max_sessions=value.max_sessions,
        gpu_layers=value.gpu_layers,
        tensor_split=value.tensor_split,
        devices=[common.DevicePlan(**asdict(row)) for row in value.devices],
        shed=value.shed,
        findings=value.findings,
        refusal=_refusal(value.refusal) if value.refusal else None,
        allocated=value.allocated,
    )


def _refusal(value: Refusal) -> common.Refusal:
    return common.Refusal(
        bound=_REASONS[value.bound],
        message=value.message,
        numbers=dict(value.numbers),
        remedies=[common.Remedy(**asdict(remedy)) for remedy in value.remedies],
    )


def machine(value: MachineReading) -> common.Machine:
    return common.Machine(
        source=value.source,
        host_total_bytes=value.host.total_bytes,
        host_available_bytes=value.host.available_bytes,
        cgroup_limit_bytes=value.host.limit_bytes,
        host_known=value.host.known,
        swap_total_bytes=value.host.swap_total_bytes,
        swap_free_bytes=value.host.swap_free_bytes,
        devices=[_device(device) for device in value.devices],
        notes=value.notes,
    )


def _device(value: DeviceReading) -> common.Device:
    return common.Device(
        id=value.id,
        name=value.name,
        kind=value.kind.value,
        total_bytes=value.total_bytes,
        free_bytes=value.free_bytes,
        known=value.known,
        engine_name=value.engine_name,
        shared_memory=value.shared_memory,
        note=value.note,
        processes=[common.DeviceProcess(**asdict(process)) for process in value.processes],
        pci=value.pci,
        parent=value.parent,
    )


def facts(value: ModelFacts) -> session.ModelFacts:
    runs = value.layers
    with_kv = next((run for run in runs if run.kv_heads), None)
    return session.ModelFacts(
        architecture=value.architecture,
        layers=sum(run.count for run in runs),
        embedding_length=value.embedding_length,
        heads=value.heads,
        kv_heads=sorted({run.kv_heads for run in runs}),
        key_length=with_kv.key_length if with_kv else 0,
        value_length=with_kv.value_length if with_kv else 0,
        context_length=value.model_max,
        vocabulary=value.vocabulary,
        sliding_window=value.sliding_window,
        quantization=value.quantization,
        file_bytes=value.file_bytes,
        has_chat_template=value.has_template,
        name=value.name,
        layer_runs=[
            session.LayerRun(
                count=run.count,
                kind=run.kind.value,
                kv_heads=run.kv_heads,
                key_length=run.key_length,
                value_length=run.value_length,
                window=run.window_cells,
                state_bytes=run.state_bytes,
            )
            for run in runs
        ],
        weights_bytes=value.weights_bytes,
        input_bytes=value.input_bytes,
        output_bytes=value.output_bytes,
        pooling=value.pooling,
        parts=value.parts,
        unknown_pattern=value.unknown_pattern,
        window_pattern_source=value.window_pattern_source,
    )


def identity(value: Identity) -> common.Identity:
    return common.Identity(
        backend=value.backend,
        backend_version=value.backend_version,
        model_digest=value.model_digest,
        adapters=[common.Adapter(digest=a.digest, scale=a.scale) for a in value.adapters],
        prompt_format=value.prompt_format,
        prompt_template_digest=value.prompt_template_digest,
        add_bos=value.add_bos,
        kv_digest=value.kv_digest,
        runtime_digest=value.runtime_digest,
        profile_id=value.profile_id,
    )


def capabilities(values: Iterable[Capability]) -> list[common.Capability]:
    return [
        common.Capability(name=c.name, answer=_ANSWERS[c.answer], evidence=c.evidence)
        for c in values
    ]


def segments_out(values: Sequence[SegmentOut]) -> list[session.ResolvedSegment]:
    return [
        session.ResolvedSegment(
            index=index,
            byte_begin=value.byte_begin,
            byte_end=value.byte_end,
            token_begin=value.token_begin,
            token_end=value.token_end,
            token_hash=value.token_hash,
            located=value.located,
        )
        for index, value in enumerate(values)
    ]


def prefill_status(value: Status, manifest_digest: str, queue_s: float) -> session.PrefillStatus:
    resolved = sha256_hex(
        (manifest_digest + value.stable_token_hash + value.volatile_token_hash).encode()
    )
    return session.PrefillStatus(
        reused=value.reused,
        dropped=value.dropped,
        prefilled=value.prefilled,
        prefix=value.prefix,
        suffix=value.suffix,
        resident=value.resident,
        available=value.available,
        retained=value.retained,
        copied=value.copied,
        miss_reason=f"MISS_{value.miss_reason}",
        manifest_digest=manifest_digest,
        resolved_manifest_digest=resolved,
        stable_token_hash=value.stable_token_hash,
        volatile_token_hash=value.volatile_token_hash,
        seconds=value.seconds,
        queue_seconds=queue_s,
        template_additive=value.template_additive,
        turns_recomputed=value.turns_recomputed,
        resolved=segments_out(value.segments),
        seen_tokens=value.seen_tokens,
        reused_lower_bound=value.reused_lower_bound,
        restored=value.restored,
        parked=value.parked,
        gone=value.gone,
        recomputed=value.recomputed,
    )


def _logprob(value: TokenLogprobOut) -> session.TokenLogprob:
    return session.TokenLogprob(
        token_id=value.token_id,
        raw=value.raw,
        text=value.raw.decode(errors="ignore"),
        logprob=value.logprob,
    )


def _sampled(value: SampledTokenOut) -> session.SampledToken:
    return session.SampledToken(
        sampled=_logprob(value.sampled), top=[_logprob(t) for t in value.top]
    )


def chunk(value: ChunkOut) -> session.Chunk:
    # The hot path: a plain chunk sets two fields and nothing else.
    if not value.token_ids and not value.logprobs:
        return session.Chunk(text=value.text, tokens=value.tokens)
    return session.Chunk(
        text=value.text,
        tokens=value.tokens,
        token_ids=value.token_ids,
        logprobs=[_sampled(s) for s in value.logprobs],
    )


def final(
    value: FinalOut, turn_id: str, queue_s: float, saved: Saved | None = None
) -> session.Final:
    return session.Final(
        stop_reason=_STOP_REASONS[value.stop_reason],
        stop_sequence=value.stop_sequence,
        tokens=value.tokens,
        prefilled=value.prefilled,
        engine_seconds=value.engine_seconds,
        queue_seconds=queue_s,
        first_token_seconds=value.first_token_seconds,
        resident=value.resident,
        available=value.available,
        generated_turn_id=turn_id,
        seed=value.seed,
        seen_tokens=value.seen_tokens,
        parked=value.parked,
        gone=value.gone,
        recomputed=value.recomputed,
        saved=saved_out(saved),
    )


def saved_out(value: Saved | None) -> session.Saved | None:
    return session.Saved(**vars(value)) if value else None


def resumed(value: Resumed) -> session.Resumed:
    return session.Resumed(
        tokens=value.tokens,
        seen_tokens=value.seen_tokens,
        saved_unix_ms=value.saved_unix_ms,
        generated_turn_ids=value.turn_ids,
        exact=value.exact,
        exact_reason=value.exact_reason,
        seconds=value.seconds,
        miss_reason=value.miss_reason,
    )


# --- in ----------------------------------------------------------------------------------------


def identity_in(value: common.Identity) -> Identity:
    return Identity(
        backend=value.backend,
        backend_version=value.backend_version,
        model_digest=value.model_digest,
        adapters=tuple(AdapterId(a.digest, a.scale) for a in value.adapters),
        prompt_format=value.prompt_format,
        prompt_template_digest=value.prompt_template_digest,
        add_bos=value.add_bos,
        kv_digest=value.kv_digest,
        runtime_digest=value.runtime_digest,
        profile_id=value.profile_id,
    )


@dataclass(frozen=True)
class ConvertedPrompt:
    """A prompt part for the worker, and what the manifest says of it."""

    prompt: PromptIn
    segments: tuple[SegmentId, ...]
    asserted_digest: str


def message_in(
    value: common.ChatMessage, where: str, *, vision: bool = False
) -> tuple[Message, str]:
    """The worker's message and its canonical hash; refuses what isn't served.

    ``vision``: the model takes images. Of these, only that there may be any is checked here.
    """
    if not ROLE.match(value.role):
        raise InvalidRequest.of(f"{where}.role", value.role[:64], "1 to 32 of a-z and '_'")
    texts: list[str] = []
    images: list[ImageIn] = []
    content: list[tuple[str, str]] = []
    for part in value.content:
        if part.WhichOneof("part") != "image":
            texts.append(part.text)
            content.append((part.text, ""))
            continue
        if not vision:
            raise unsupported("vision", f"{where} has an image: send text content only.")
        data, mime_type = part.image.data, part.image.mime_type
        images.append(ImageIn(data=data, mime_type=mime_type, at=sum(map(len, texts))))
        content.append(("", sha256_hex(data)))
    calls = [(c.id, c.name, c.arguments) for c in value.tool_calls]
    digest = message_hash(
        role=value.role,
        content=content,
        name=value.name,
        tool_call_id=value.tool_call_id,
        tool_calls=calls,
    )
    message = Message(
        role=value.role,
        text="".join(texts),
        tool_calls=[ToolCallPart(id=i, name=n, arguments=a) for i, n, a in calls],
        tool_call_id=value.tool_call_id,
        name=value.name,
        images=images,
    )
    return message, digest


def images_of(messages: Iterable[tuple[str, Message]]) -> list[NamedImage]:
    """The images of messages with the name each is called by in errors."""
    return [
        NamedImage(f"{where}.images[{index}]", image.data, image.mime_type)
        for where, message in messages
        for index, image in enumerate(message.images)
    ]


def _check_images(part: str, messages: Sequence[tuple[str, Message]]) -> None:
    """Images stand in the suffix only, each within its limits; nothing is decoded here."""
    images = images_of(messages)
    if images and part == "prefix":
        raise unsupported(
            "vision",
            f"{images[0].where} is in the prefix, and images are taken in the suffix only. Send "
            "that message, and whatever follows it, in the suffix.",
        )
    check_images(images)


def prompt_in(
    value: session.Prompt, part: str, *, prompt_format: str, max_bytes: int, vision: bool = False
) -> ConvertedPrompt:
    """Convert one part of a prompt ("prefix" or "suffix") of a session of ``prompt_format``.

    ``max_bytes`` bounds the part as it came, encoded images included; ``vision`` says whether the
    model takes images.

    Raises InvalidRequest, DigestMismatch, ManifestMismatch (raw text in a chat session or the
    reverse) and UnsupportedFeature.
    """
    size = value.ByteSize()
    if size > max_bytes:
        raise InvalidRequest.of(
            part, f"{size} bytes", f"at most {max_bytes} bytes (setting max_prompt_bytes)"
        )
    segments: list[SegmentIn] = []
    ids: list[SegmentId] = []
    messages: list[tuple[str, Message]] = []
    for index, item in enumerate(value.segments):
        where = f"{part}.segments[{index}]"
        kind = item.WhichOneof("content")
        if kind == "raw":
            digest = raw_hash(item.raw.text)
            segment = SegmentIn(text=item.raw.text, parse_special=item.raw.parse_special)
        elif kind == "message":
            message, digest = message_in(item.message, where, vision=vision)
            messages.append((where, message))
            segment = SegmentIn(message=message)
        elif kind == "generated_turn_id":
            digest = turn_hash(item.generated_turn_id)
            segment = SegmentIn(generated_turn_id=item.generated_turn_id)
        else:
            raise InvalidRequest.of(where, "empty", "raw text, a message, or a generated turn")
        segment.cache_class = _cache_class(item.cache_class, where)
        segments.append(segment)
        if (kind == "raw" and prompt_format == "chat") or (
            kind == "message" and prompt_format == "raw"
        ):
            got = "raw" if kind == "raw" else "chat"
            raise ManifestMismatch(
                f"{where} is {'raw text' if got == 'raw' else 'a message'}, but the session's "
                f"prompt_format is {prompt_format!r}. Open a session with "
                f"prompt_format={got!r} for such prompts.",
                metadata={
                    "reason": "identity",
                    "field": "prompt_format",
                    "asserted": got,
                    "actual": prompt_format,
                },
            )
        if item.hash and item.hash != digest:
            raise DigestMismatch(
                f"{where} asserts hash {item.hash}, but its content's is {digest}.",
                metadata={"field": f"{where}.hash", "asserted": item.hash, "actual": digest},
            )
        ids.append(
            SegmentId(
                kind=item.kind,
                stable=item.stable,
                cache_class=item.cache_class,
                invalidation=item.invalidation,
                hash=digest,
            )
        )
    _check_order(ids, part)
    _check_images(part, messages)
    if part == "suffix" and value.tools:
        raise InvalidRequest.of("suffix.tools", len(value.tools), "tools with the prefix only")
    return ConvertedPrompt(
        PromptIn(segments=segments, tools=[tool.json_schema for tool in value.tools]),
        tuple(ids),
        value.manifest_digest,
    )


def _cache_class(value: str, where: str) -> str:
    if value not in ("", *CACHE_CLASSES):
        raise InvalidRequest.of(
            f"{where}.cache_class", value[:64], ", ".join((*CACHE_CLASSES, "or empty (volatile)"))
        )
    return value or "volatile"


def _check_order(ids: Sequence[SegmentId], part: str) -> None:
    volatile_seen = False
    for index, segment in enumerate(ids):
        if segment.stable and volatile_seen:
            raise InvalidRequest.of(
                f"{part}.segments[{index}].stable",
                True,
                "stable segments before volatile ones",
                "Move it before the first volatile segment, or mark it volatile.",
            )
        volatile_seen = volatile_seen or not segment.stable


_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "frequency_penalty",
    "presence_penalty",
)


def decode_in(value: session.DecodeOptions) -> DecodeIn:
    """Decode options for the worker; a seed is drawn where none was given."""
    kind = value.structured.WhichOneof("constraint") or ""
    if value.HasField("structured") and not kind:
        raise InvalidRequest.of("options.structured", "empty", "one of json_schema, regex, grammar")
    sampling = value.sampling
    given = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS if sampling.HasField(name)}
    for name, setting in given.items():
        if not math.isfinite(setting):
            raise InvalidRequest.of(f"sampling.{name}", setting, "a finite number")
    seed = sampling.seed if sampling.HasField("seed") else secrets.randbits(63)
    interval = value.stream_interval_ms if value.HasField("stream_interval_ms") else 8
    if not 0 <= interval <= MAX_STREAM_INTERVAL_MS:
        raise InvalidRequest.of(
            "stream_interval_ms", interval, f"0 to {MAX_STREAM_INTERVAL_MS} milliseconds"
        )
    if not 0 <= value.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest.of("top_logprobs", value.top_logprobs, f"0 to {MAX_TOP_LOGPROBS}")
    if value.max_tokens < 0:
        raise InvalidRequest.of("max_tokens", value.max_tokens, "0 (until full) or more")
    if len(value.stop) > 64 or any(not s or len(s) > 1024 for s in value.stop):
        raise InvalidRequest.of(
            "stop", list(value.stop[:3]), "at most 64 sequences, each of 1 to 1,024 characters"
        )
    return DecodeIn(
        sampling=SamplingIn(seed=seed, logit_bias=dict(sampling.logit_bias), **given),
        stop=list(value.stop),
        max_tokens=value.max_tokens,
        stream_interval_ms=interval,
        token_ids=value.token_ids,
        top_logprobs=value.top_logprobs,
        ignore_eos=value.ignore_eos,
        structured_kind=kind,
        structured=getattr(value.structured, kind) if kind else "",
    )
