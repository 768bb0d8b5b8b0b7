"""A small in-process daemon that follows the protos: for testing the client and the command.

One token a byte of the rendered prompt; it answers "you said: <the last user text>". It checks
what a daemon checks of a request: owner, identity, hashes and manifest digests, built here from
the wire alone. Failures are planned with ``fail``. Run as a module it serves until terminated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from modeld.shared import lease_record, manifest
from modeld.shared.errors import (
    ContextOverflow,
    DigestMismatch,
    GenerationStale,
    InvalidRequest,
    ManifestMismatch,
    ModeldError,
    ModelNotActive,
    ModelNotFound,
    SessionNotFound,
    StaleFence,
    SwitchRequired,
)
from modeld.v1 import (
    common_pb2,
    daemon_pb2,
    daemon_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from tests.support.fake_residency import FakeResidency, Kept

WINDOW = 4096


@dataclass
class Plan:
    """A failure to come: of one method, after some of the stream's chunks."""

    method: str
    action: Callable[[], Exception | None]
    after_chunks: int = 0


@dataclass
class FakeSession:
    session_id: str
    generation: int
    model: str
    key: str
    identity: common_pb2.Identity
    prefix: list[common_pb2.Segment] = field(default_factory=list)
    tools: list[common_pb2.Tool] = field(default_factory=list)
    suffix: list[common_pb2.Segment] = field(default_factory=list)
    tokens: bytes = b""
    turns: dict[str, str] = field(default_factory=dict)
    seen: int = 0
    window: int = 0
    attached: bool = True
    overflow: Any = session_pb2.OVERFLOW_REFUSE
    durable: bool = False


@dataclass
class World:
    """What the daemon knows, and what tests look at."""

    data_root: Path
    owner: str = field(default_factory=lambda: str(uuid.uuid4()))
    generation: int = 1
    models: dict[str, int] = field(default_factory=lambda: {"tiny": 1000, "other": 2000})
    resident: str = ""
    sessions: dict[str, FakeSession] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    endpoints: list[str] = field(default_factory=list)
    wrong_digest: bool = False
    no_final: bool = False
    window_full: bool = False
    chunk_pause_s: float = 0.0
    cancelled: int = 0
    drained: threading.Event = field(default_factory=threading.Event)
    counter: int = 0
    snapshots: dict[str, Kept] = field(default_factory=dict)
    snapshot_quota: int = 0
    outside: tuple[int, int, int] = (0, 0, 0)  # parked, gone, recomputed: of every session
    saved: session_pb2.Saved | None = None  # of a durable session's turns
    resumed: session_pb2.Resumed | None = None  # of the next durable session
    kept_keys: set[str] = field(default_factory=set)  # that a durable session is saved under
    kept_turns: dict[str, str] = field(default_factory=dict)  # the answers that it resumes with

    def fail(self, method: str, error: Exception, after_chunks: int = 0) -> None:
        self.plans.append(Plan(method, lambda: error, after_chunks))

    def crash_worker(self, method: str, error: Exception, after_chunks: int = 0) -> None:
        """The error, and every session of this generation gone."""

        def act() -> Exception:
            self.bump()
            return error

        self.plans.append(Plan(method, act, after_chunks))

    def bump(self) -> None:
        self.generation += 1
        self.sessions.clear()

    def due(self, method: str, chunks: int = 0) -> None:
        for plan in self.plans:
            if plan.method == method and plan.after_chunks == chunks:
                self.plans.remove(plan)
                error = plan.action()
                if error is not None:
                    raise error

    def resolution(self, window: int) -> common_pb2.Resolution:
        return resolution(window)

    def requests_of(self, cls: type[Any]) -> list[Any]:
        return [r for r in self.requests if isinstance(r, cls)]


class Hangup(Exception):
    """Makes the call end as UNAVAILABLE without details, as a lost connection does."""


def number(tokens: int, reason: int = common_pb2.REQUEST) -> common_pb2.ContextNumber:
    return common_pb2.ContextNumber(
        tokens=tokens,
        reason=reason,  # type: ignore[arg-type]
        runner_up=common_pb2.MEMORY,
        runner_up_tokens=tokens * 2,
        known=True,
    )


MOST = 100_000  # tokens that a window here may have


def resolution(window: int) -> common_pb2.Resolution:
    return common_pb2.Resolution(
        context=common_pb2.ContextNumbers(
            model_max=number(8192, common_pb2.MODEL_CEILING),
            requested=number(window),
            memory_fit=number(20000, common_pb2.MEMORY),
            effective=(
                number(window or WINDOW)
                if window <= MOST
                else number(MOST, common_pb2.MODEL_CEILING)
            ),
            hot=number(window or WINDOW),
            planner=common_pb2.ContextNumber(reason=common_pb2.COLD_BUDGET),
        ),
        budget=[common_pb2.BudgetRow(name="weights", bytes=1000, note="as loaded")],
        k_type="f16",
        v_type="f16",
        kv_bytes=5 * 1024 * 1024,
        compute_bytes=1 << 20,
        weights_bytes=1000,
        placement="host",
        max_sessions=4,
    )


GPU = common_pb2.Device(
    id="GPU-1",
    name="Fake 3060",
    kind="nvidia",
    total_bytes=6 << 30,
    free_bytes=5 << 30,
    known=True,
    engine_name="CUDA0",
    processes=[common_pb2.DeviceProcess(pid=77, bytes=1 << 30, name="game")],
)
LARGEST = 19000  # tokens that fit the fake's memory


def machine(source: str = "live") -> common_pb2.Machine:
    return common_pb2.Machine(
        source=source,
        host_total_bytes=1 << 34,
        host_available_bytes=1 << 33,
        host_known=True,
        swap_total_bytes=1 << 30,
        swap_free_bytes=1 << 29,
        devices=[GPU],
        notes=["Intel: none listed"],
    )


def planned(request: session_pb2.DescribeRequest) -> common_pb2.Resolution:
    """What a daemon would plan: everything on the host, a GiB of KV for each 8,192 tokens."""
    answer = resolution(request.window)
    window = answer.context.effective.tokens
    weights, kv, compute = 1 << 30, (window << 30) // 8192, 1 << 20
    beside = request.companions
    charged = beside.projector_bytes + beside.projector_compute_bytes
    charged += beside.adapter_bytes + beside.draft_bytes
    free, reserve, headroom = 4 << 30, 1 << 29, 1 << 26
    budget = free - reserve
    left = budget - headroom - weights - kv - compute - charged
    answer.k_type = request.k_type or "f16"
    answer.weights_bytes, answer.kv_bytes, answer.compute_bytes = weights, kv, compute
    answer.allocated = window
    del answer.budget[:]
    for name, value in (
        ("free", free),
        ("reserve", reserve),
        ("budget", budget),
        ("headroom", headroom),
        ("weights", weights),
        ("projector", beside.projector_bytes),
        ("projector_compute", beside.projector_compute_bytes),
        ("adapters", beside.adapter_bytes),
        ("draft", beside.draft_bytes),
        ("compute", compute),
        ("kv", kv),
        ("left", left),
    ):
        answer.budget.add(name=name, bytes=value, note="fake")
    answer.devices.add(
        device_id="host",
        name="host memory",
        layers=3,
        weights_bytes=weights + charged - beside.projector_compute_bytes,
        kv_bytes=kv,
        compute_bytes=compute + beside.projector_compute_bytes,
        free_bytes=free,
        reserve_bytes=reserve,
        budget_bytes=budget,
        headroom_bytes=headroom,
        left_bytes=left,
    )
    answer.findings.append("the file declares heads 3, the engine reads 4")
    if left < 0:
        answer.refusal.bound = common_pb2.MEMORY
        answer.refusal.message = f"Not enough memory for a window of {window} tokens."
        answer.refusal.numbers["needed_bytes"] = str(weights + kv + compute + charged)
        for kind, to in (("window", str(LARGEST)), ("k_type", "q8_0"), ("placement", "shed")):
            answer.refusal.remedies.add(kind=kind, value=to, text=f"set {kind} to {to}")
        answer.refusal.remedies.add(kind="free", value=str(-left), text=f"free {-left} bytes")
    return answer


def render(segment: common_pb2.Segment, turns: dict[str, str]) -> str:
    kind = segment.WhichOneof("content")
    if kind == "raw":
        return segment.raw.text
    if kind == "generated_turn_id":
        return f"<assistant>{turns[segment.generated_turn_id]}\n"
    message = segment.message
    return f"<{message.role}>{''.join(p.text for p in message.content)}\n"


def content_hash(segment: common_pb2.Segment) -> str:
    kind = segment.WhichOneof("content")
    if kind == "raw":
        return manifest.raw_hash(segment.raw.text)
    if kind == "generated_turn_id":
        return manifest.turn_hash(segment.generated_turn_id)
    message = segment.message
    return manifest.message_hash(
        role=message.role,
        content=[
            ("", manifest.sha256_hex(part.image.data))
            if part.HasField("image")
            else (part.text, "")
            for part in message.content
        ],
        name=message.name,
        tool_call_id=message.tool_call_id,
        tool_calls=[(c.id, c.name, c.arguments) for c in message.tool_calls],
    )


class Servicer(
    FakeResidency,
    session_pb2_grpc.SessionServiceServicer,
    model_pb2_grpc.ModelServiceServicer,
    daemon_pb2_grpc.DaemonServiceServicer,
):
    w: World

    def __init__(self, world: World) -> None:
        self.w = world

    # --- guards --------------------------------------------------------------------------------

    async def enter(self, request: Any, context: Any) -> None:
        self.w.requests.append(request)
        owner = dict(context.invocation_metadata()).get("modeld-owner")
        if owner is None:
            raise InvalidRequest.of("modeld-owner", "", "the owner id")
        if owner != self.w.owner:
            raise StaleFence("another owner serves this data root now")

    def session(self, request: Any) -> FakeSession:
        handle = request.session
        if handle.generation < self.w.generation:
            raise GenerationStale(
                "the handle is older than the slot",
                metadata={"handle": handle.generation, "slot": self.w.generation},
            )
        session = self.w.sessions.get(handle.session_id)
        if session is None:
            raise SessionNotFound("no such session")
        if hasattr(request, "identity") and request.identity != session.identity:
            raise InvalidRequest.of("identity", "", "the session's own")
        return session

    def model(self, name: str) -> int:
        if name not in self.w.models:
            raise ModelNotFound(f"No model is named {name!r}.", metadata={"model": name})
        return self.w.models[name]

    def identity(self, request: Any) -> common_pb2.Identity:
        return common_pb2.Identity(
            backend="llama",
            backend_version="fake 1",
            model_digest=manifest.raw_hash(request.model),
            prompt_format=request.prompt_format or "chat",
            prompt_template_digest="tt",
            add_bos=False,
            kv_digest="kk",
            runtime_digest="rr",
            profile_id=request.profile_id,
        )

    def digest(self, session: FakeSession, segments: list[Any], tools: list[Any]) -> str:
        ids = []
        for segment in segments:
            if segment.hash and segment.hash != content_hash(segment):
                raise DigestMismatch("segment hash")
            ids.append(
                manifest.SegmentId(
                    segment.kind,
                    segment.stable,
                    segment.cache_class,
                    segment.invalidation,
                    content_hash(segment),
                )
            )
        i = session.identity
        identity = manifest.Identity(
            i.backend,
            i.backend_version,
            i.model_digest,
            tuple(manifest.AdapterId(a.digest, a.scale) for a in i.adapters),
            i.prompt_format,
            i.prompt_template_digest,
            i.add_bos,
            i.kv_digest,
            i.runtime_digest,
            i.profile_id,
        )
        return manifest.manifest_digest(identity, ids, [t.json_schema for t in tools])

    # --- sessions ------------------------------------------------------------------------------

    async def open_events(self, request: Any) -> AsyncIterator[Any]:
        self.model(request.model)
        yield session_pb2.OpenSessionEvent(
            progress=session_pb2.LoadProgress(stage="loading", fraction=0.5)
        )
        self.w.due("OpenSession")
        loaded = self.w.resident != request.model
        self.w.resident = request.model
        found = next(
            (
                s
                for s in self.w.sessions.values()
                if request.session_key and s.key == request.session_key
            ),
            None,
        )
        if found is not None and request.window not in (0, found.window):
            raise ManifestMismatch(
                "open with another window",
                metadata={
                    "reason": "identity",
                    "field": "window",
                    "asserted": request.window,
                    "actual": found.window,
                },
            )
        session = found or FakeSession(
            session_id=f"s-{uuid.uuid4().hex[:8]}",
            generation=self.w.generation,
            model=request.model,
            key=request.session_key,
            identity=self.identity(request),
            window=request.window,
            overflow=request.overflow,
            durable=request.durable,
            turns=dict(self.w.kept_turns) if request.durable else {},
        )
        session.attached = True
        self.w.sessions[session.session_id] = session
        if session.durable:
            self.w.kept_keys.add(session.key)
        yield session_pb2.OpenSessionEvent(
            opened=session_pb2.OpenSessionResponse(
                session=common_pb2.SessionHandle(
                    session_id=session.session_id, generation=session.generation
                ),
                identity=session.identity,
                resolution=resolution(request.window),
                capabilities=[
                    common_pb2.Capability(
                        name="tail_removal",
                        answer=common_pb2.ANSWER_YES,
                        evidence="probed at load",
                    )
                ],
                attached=found is not None,
                loaded=loaded,
                load_seconds=0.1 if loaded else 0.0,
                resident=len(session.tokens),
                resumed=self.w.resumed if request.durable and found is None else None,
            )
        )

    async def OpenSessionStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.enter(request, context)
        async for event in self.open_events(request):
            yield event

    def prefill(
        self, session: FakeSession, segments: list[Any], tools: list[Any], asserted: str
    ) -> session_pb2.PrefillStatus:
        digest = self.digest(session, segments, tools)
        if asserted and asserted != digest:
            raise DigestMismatch("manifest digest", metadata={"actual": digest})
        text = "".join(render(s, session.turns) for s in segments).encode()
        prefix = "".join(render(s, session.turns) for s in session.prefix).encode()
        pairs = zip(session.tokens, text, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        dropped, prefilled = len(session.tokens) - same, len(text) - same
        session.tokens = text
        session.seen += prefilled
        return session_pb2.PrefillStatus(
            reused=same,
            dropped=dropped,
            prefilled=prefilled,
            prefix=len(prefix),
            suffix=len(text) - len(prefix),
            resident=len(text),
            available=WINDOW - len(text),
            miss_reason=session_pb2.MISS_COLD if not same else session_pb2.MISS_EXTENDED,
            manifest_digest="0" * 64 if self.w.wrong_digest else digest,
            seconds=0.01,
            template_additive=True,
            seen_tokens=session.seen,
        )

    def ensure(self, session: FakeSession, prompt: Any) -> session_pb2.PrefillStatus:
        session.prefix, session.tools = list(prompt.segments), list(prompt.tools)
        session.suffix = []
        return self.prefill(session, session.prefix, session.tools, prompt.manifest_digest)

    def append(self, session: FakeSession, prompt: Any, extend: bool) -> session_pb2.PrefillStatus:
        session.suffix = (session.suffix if extend else []) + list(prompt.segments)
        whole = session.prefix + session.suffix
        return self.prefill(session, whole, session.tools, prompt.manifest_digest)

    async def EnsurePrefix(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        session = self.session(request)
        self.w.due("EnsurePrefix")
        return session_pb2.EnsurePrefixResponse(status=self.ensure(session, request.prompt))

    async def PrefillSuffix(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        session = self.session(request)
        self.w.due("PrefillSuffix")
        status = self.append(session, request.prompt, request.extend)
        return session_pb2.PrefillSuffixResponse(status=status)

    async def generate(
        self, session: FakeSession, method: str, options: Any
    ) -> AsyncIterator[dict[str, Any]]:
        said = session.tokens.decode().strip().splitlines()
        words = f"you said: {said[-1].removeprefix('<user>') if said else ''}".split(" ")
        words = [word if i == 0 else f" {word}" for i, word in enumerate(words)]
        limit = options.max_tokens or len(words)
        text = ""
        for index, word in enumerate(words[:limit]):
            self.w.due(method, index)
            if index and self.w.chunk_pause_s:
                await asyncio.sleep(self.w.chunk_pause_s)
            text += word
            yield {"chunk": session_pb2.Chunk(text=word, tokens=1)}
        self.w.due(method, len(words[:limit]))
        self.w.counter += 1
        turn_id = f"t-{self.w.counter}"
        session.turns[turn_id] = text
        cue = "<assistant>" if session.identity.prompt_format == "chat" else ""
        session.tokens += f"{cue}{text}".encode()
        if self.w.no_final:
            return
        yield {
            "final": session_pb2.Final(
                stop_reason=session_pb2.CONTEXT_FULL
                if self.w.window_full
                else (session_pb2.LENGTH if limit < len(words) else session_pb2.EOS),
                tokens=min(limit, len(words)),
                engine_seconds=0.5,
                first_token_seconds=0.05,
                resident=len(session.tokens),
                available=WINDOW - len(session.tokens),
                generated_turn_id=turn_id,
                seed=options.sampling.seed if options.sampling.HasField("seed") else 2**63 + 1,
                parked=self.w.outside[0],
                gone=self.w.outside[1],
                recomputed=self.w.outside[2],
                saved=self.w.saved if session.durable else None,
            )
        }

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.enter(request, context)
        session = self.session(request)
        self.w.due("Decode", -1)
        async for event in self.generate(session, "Decode", request.options):
            yield session_pb2.DecodeEvent(**event)

    async def Turn(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.enter(request, context)
        session = self.session(request)
        self.w.due("Turn", -1)
        try:
            yield session_pb2.TurnEvent(
                queued=common_pb2.QueueStatus(position=1, holder_operation="turn")
            )
            yield session_pb2.TurnEvent(prefix=self.ensure(session, request.prefix))
            yield session_pb2.TurnEvent(suffix=self.append(session, request.suffix, False))
            async for event in self.generate(session, "Turn", request.options):
                yield session_pb2.TurnEvent(**event)
        except asyncio.CancelledError:
            self.w.cancelled += 1
            raise

    async def CloseSession(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        self.w.due("CloseSession")
        try:
            session = self.session(request)
        except ModeldError:
            if not (request.discard and request.session_key):
                raise
            return self.forget(request.session_key, gone=bool(request.session.session_id))
        if request.detach:
            session.attached = False
        else:
            del self.w.sessions[session.session_id]
        if request.discard and session.durable:
            self.w.kept_keys.discard(session.key)
        return session_pb2.CloseSessionResponse(retained_tokens=len(session.tokens))

    def forget(self, key: str, *, gone: bool) -> Any:
        found = [s for s in self.w.sessions.values() if s.durable and s.key == key]
        if not found and key not in self.w.kept_keys and not gone:
            raise SessionNotFound(f"nothing is saved under {key!r}")
        for session in found:
            del self.w.sessions[session.session_id]
        self.w.kept_keys.discard(key)
        return session_pb2.CloseSessionResponse()

    async def ListSessions(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        return session_pb2.ListSessionsResponse(
            sessions=[
                session_pb2.SessionInfo(
                    session=common_pb2.SessionHandle(
                        session_id=s.session_id, generation=s.generation
                    ),
                    session_key=s.key,
                    model=s.model,
                    prompt_format=s.identity.prompt_format,
                    context=resolution(0).context,
                    resident=len(s.tokens),
                    attached=s.attached,
                    overflow=s.overflow,
                    durable=s.durable,
                )
                for s in self.w.sessions.values()
            ]
        )

    async def ListSavedSessions(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        opened = {s.key for s in self.w.sessions.values() if s.durable}
        return session_pb2.ListSavedSessionsResponse(
            saved=[
                session_pb2.SavedSession(
                    session_key=key,
                    model="tiny",
                    model_digest=manifest.raw_hash("tiny"),
                    tokens=40,
                    turns=2,
                    window=4096,
                    size_bytes=3_000_000,
                    open=key in opened,
                )
                for key in sorted(self.w.kept_keys)
            ]
        )

    def quoted(self, request: Any) -> bool:
        """Whether an open session's own numbers are the answer."""
        is_open = any(session.model == request.model for session in self.w.sessions.values())
        otherwise = request.hypothetical or request.sessions or request.machine or request.what_if
        return is_open and not otherwise

    async def Describe(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        self.model(request.model)
        return session_pb2.DescribeResponse(
            model=request.model,
            model_type="llama",
            resident=self.w.resident == request.model,
            identity=self.identity(request),
            resolution=planned(request),
            questions=[
                common_pb2.Capability(
                    name="memory_fits", answer=common_pb2.ANSWER_YES, evidence="planned"
                ),
                common_pb2.Capability(name="quality_certified", evidence="never used"),
            ],
            facts=session_pb2.ModelFacts(
                architecture="llama",
                layers=3,
                kv_heads=[1],
                quantization="Q4_1",
                file_bytes=1 << 30,
                layer_runs=[
                    session_pb2.LayerRun(count=1, kind="full", kv_heads=1),
                    session_pb2.LayerRun(count=2, kind="window", kv_heads=1, window=512),
                ],
            ),
            resolution_source="open_session" if self.quoted(request) else "hypothetical",
            machine=machine("machine" if request.machine else "live"),
        )

    async def Tokenize(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        self.model(request.model)
        if not request.load and self.w.resident != request.model:
            raise ModelNotActive("not resident")
        pieces = [bytes([b]) for b in request.text.encode()]
        return session_pb2.TokenizeResponse(token_ids=[p[0] for p in pieces], pieces=pieces)

    async def Embed(self, request: Any, context: Any) -> Any:
        """A text's vector is its length and its first byte; its tokens are its bytes."""
        await self.enter(request, context)
        self.model(request.model)
        for index, text in enumerate(request.texts):
            if len(text) > 8:
                raise ContextOverflow(
                    f"texts[{index}] is too long",
                    metadata={"index": index, "tokens": len(text), "max_tokens": 8},
                )
        return session_pb2.EmbedResponse(
            embeddings=[
                session_pb2.Embedding(values=[len(text), text.encode()[0]], tokens=len(text))
                for text in request.texts
            ],
            dimensions=2,
            pooling=request.pooling or "mean",
            normalized=request.normalize,
            engine_seconds=0.5,
        )

    async def Detokenize(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        raw = bytes(request.token_ids)
        return session_pb2.DetokenizeResponse(text=raw.decode(), raw=raw)

    # --- models --------------------------------------------------------------------------------

    async def DiskStats(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        return model_pb2.DiskStatsResponse(snapshots_bytes=4096, quota_bytes=1 << 30)

    async def ListModels(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        return model_pb2.ListModelsResponse(
            models=[
                model_pb2.ModelInfo(
                    name=name,
                    type="llama",
                    digest=manifest.raw_hash(name),
                    size_bytes=size,
                    architecture="llama",
                    quantization="Q4_1",
                    context_length=8192,
                    resident=self.w.resident == name,
                )
                for name, size in self.w.models.items()
            ]
        )

    async def ImportModel(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.enter(request, context)
        size = Path(request.path).stat().st_size  # noqa: ASYNC240
        name = request.name or Path(request.path).stem
        if name in self.w.models and not request.replace:
            raise InvalidRequest.of("name", name, "a name that isn't taken")
        yield model_pb2.ImportModelEvent(
            progress=model_pb2.ImportProgress(stage="hash", done_bytes=size, total_bytes=size)
        )
        self.w.models[name] = size
        yield model_pb2.ImportModelEvent(
            imported=model_pb2.ModelInfo(name=name, type="llama", size_bytes=size, digest="ab" * 32)
        )

    async def RemoveModel(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        self.w.due("RemoveModel")
        return model_pb2.RemoveModelResponse(freed_bytes=self.model(request.name))

    async def UnloadModel(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        if request.model not in ("", self.w.resident) or not self.w.resident:
            return model_pb2.UnloadModelResponse()
        if not request.force and any(s.attached for s in self.w.sessions.values()):
            raise SwitchRequired("sessions are attached")
        closed = len(self.w.sessions)
        self.w.bump()
        self.w.resident = ""
        return model_pb2.UnloadModelResponse(
            was_resident=True, generation=self.w.generation, sessions_closed=closed
        )

    # --- daemon --------------------------------------------------------------------------------

    async def Status(self, request: Any, context: Any) -> Any:
        self.w.due("Status")
        slot = daemon_pb2.SlotStatus(
            backend="llama",
            state=daemon_pb2.SLOT_READY if self.w.resident else daemon_pb2.SLOT_EMPTY,
            model=self.w.resident,
            generation=self.w.generation,
            sessions=len(self.w.sessions),
            context=resolution(0).context,
            worker=daemon_pb2.WorkerStatus(
                backend="llama", state="IDLE", pid=os.getpid(), backend_version="fake 1"
            ),
        )
        return daemon_pb2.StatusResponse(
            owner_instance_id=self.w.owner,
            version="0.1.0",
            protocol_version=1,
            generation=self.w.generation,
            uptime_seconds=5.0,
            data_root=str(self.w.data_root),
            endpoints=self.w.endpoints,
            slots=[slot],
            memory_total_bytes=1 << 34,
            memory_available_bytes=1 << 33,
            pid=os.getpid(),
            machine=machine(),
        )

    async def ClearQuarantine(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        return daemon_pb2.ClearQuarantineResponse(was_quarantined=request.model == "tiny")

    async def Drain(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        self.w.drained.set()
        return daemon_pb2.DrainResponse(running=1, queued=0)


def _guarded(servicer: Servicer) -> None:
    """Map typed errors to statuses, as the daemon does."""
    from modeld.supervisor.rpc.errors import abort

    async def fail(error: Exception, context: Any) -> None:
        if isinstance(error, Hangup):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        assert isinstance(error, ModeldError)
        await abort(context, error)

    def unary(method: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            try:
                return await method(request, context)
            except (ModeldError, Hangup) as error:
                await fail(error, context)

        return call

    def stream(method: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                async for event in method(request, context):
                    yield event
            except (ModeldError, Hangup) as error:
                await fail(error, context)

        return call

    streams = {"OpenSessionStream", "Decode", "Turn", "ImportModel", "ExportSnapshot"}
    for name in dir(servicer):
        if name[0].isupper() and (name in vars(Servicer) or name in vars(FakeResidency)):
            method = getattr(servicer, name)
            setattr(servicer, name, stream(method) if name in streams else unary(method))


class FakeDaemon:
    """A world served on a unix socket in its data root, by a thread, with a lease file.

    The socket is named by the owner: a successor on the same data root is another daemon.
    """

    def __init__(self, data_root: Path, *, lease: bool = True) -> None:
        self.world = World(data_root)
        self.endpoint = f"unix:{data_root / f'{self.world.owner[:8]}.sock'}"
        self.world.endpoints = [self.endpoint]
        self._lease = lease
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="fake-daemon", daemon=True)

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        assert self._ready.wait(30), "the fake daemon did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(30)
        if self._lease:
            path = lease_record.lease_path(self.world.data_root)
            record = lease_record.read(path)
            if record is not None and record.instance_id == self.world.owner:
                path.unlink()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = grpc.aio.server()
        # What it leaves out answers UNIMPLEMENTED.
        servicer = Servicer(self.world)  # type: ignore[abstract]
        _guarded(servicer)
        session_pb2_grpc.add_SessionServiceServicer_to_server(servicer, server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
        daemon_pb2_grpc.add_DaemonServiceServicer_to_server(servicer, server)
        server.add_insecure_port(self.endpoint)
        await server.start()
        if self._lease:
            write_lease(self.world.data_root, self.world.owner, self.endpoint)
        self._ready.set()
        await self._stop.wait()
        await server.stop(0)


def write_lease(data_root: Path, owner: str, *endpoints: str, pid: int | None = None) -> None:
    pid = pid or os.getpid()
    now = time.time()
    record = lease_record.LeaseRecord(
        format=lease_record.FORMAT,
        instance_id=owner,
        pid=pid,
        pid_start=lease_record.process_start(pid) or 1,
        pid_namespace=lease_record.pid_namespace(),
        host=socket.gethostname(),
        boot_id=lease_record.boot_id(),
        endpoints=endpoints,
        backends=("llama",),
        protocol_version=1,
        generation_floor=0,
        acquired=now,
        renewed=now,
        renewed_boot_s=lease_record.boot_clock_s(),
        ttl_s=3600.0,
    )
    lease_record.lease_path(data_root).write_bytes(record.encode())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("data_root", type=Path)
    parser.add_argument("--fail", default="")
    options = parser.parse_args()
    if options.fail:
        print(options.fail, file=sys.stderr)
        return 2
    ended = threading.Event()
    for number_ in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number_, lambda *_: ended.set())
    with FakeDaemon(options.data_root) as daemon:
        print("serving", daemon.endpoint, flush=True)
        while not ended.wait(0.05) and not daemon.world.drained.is_set():
            pass
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main())
