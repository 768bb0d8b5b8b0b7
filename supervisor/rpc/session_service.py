"""SessionService: checks what a call asserts, hands it to the slot, converts what comes back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from modeld.shared.capabilities import Capability
from modeld.shared.capacity import CapacityRequest, Companions, MachineReading, Resolution
from modeld.shared.errors import (
    DigestMismatch,
    GenerationStale,
    InvalidRequest,
    SessionNotFound,
    unsupported,
)
from modeld.shared.ids import check_session_key, new_turn_id
from modeld.shared.images import check_images
from modeld.shared.manifest import SegmentId, manifest_digest
from modeld.shared.messages import (
    ChunkOut,
    DecodeOp,
    DetokenizeOp,
    DetokenizeResult,
    EnsureOp,
    ExplainOp,
    ExplainResult,
    FinalOut,
    Payload,
    RenderOp,
    RenderResult,
    Status,
    SuffixOp,
    TokenizeOp,
    TokenizeResult,
    TurnOp,
)
from modeld.shared.planner.residency import sizes_of
from modeld.supervisor import parking
from modeld.supervisor.config import Config
from modeld.supervisor.durable_sessions import Saved
from modeld.supervisor.model_slot import ModelSlot, OpenRequest, capabilities_of
from modeld.supervisor.planning import served_types
from modeld.supervisor.planning_slot import WhatIf
from modeld.supervisor.probes.simulated import parse_machine
from modeld.supervisor.questions import answers
from modeld.supervisor.rpc import convert, embedding
from modeld.supervisor.rpc.adapters import adapters_of
from modeld.supervisor.rpc.errors import Context, guarded, guarded_while_draining
from modeld.supervisor.rpc.residency_calls import ResidencyCalls
from modeld.supervisor.rpc.session_calls import check_text, expect, handle_of
from modeld.supervisor.rpc.streaming import QueueReporter, caller_of
from modeld.supervisor.sessions import Session
from modeld.supervisor.slot_core import Caller
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2 as pb
from modeld.v1 import session_pb2_grpc

MAX_COMPANION_BYTES = 1 << 50


class SessionService(ResidencyCalls, session_pb2_grpc.SessionServiceServicer):
    """See the proto for what each call promises."""

    # --- opening and closing ------------------------------------------------------------------

    @guarded
    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Context
    ) -> pb.OpenSessionResponse:
        return await self._open(request, caller_of(context, no_wait=request.no_wait))

    @guarded
    async def OpenSessionStream(self, request: pb.OpenSessionRequest, context: Context) -> None:
        writer = self._writer(context)
        reporter = QueueReporter(lambda s: writer.write(pb.OpenSessionEvent(queued=s)))

        async def report(stage: str, fraction: float) -> None:
            await reporter.stop()
            progress = pb.LoadProgress(stage=stage, fraction=fraction)
            await writer.write(pb.OpenSessionEvent(progress=progress))

        try:
            caller = caller_of(context, no_wait=request.no_wait, reporter=reporter)
            opened = await self._open(request, caller, report)
        finally:
            await reporter.stop()
        await writer.write(pb.OpenSessionEvent(opened=opened))

    async def _open(
        self, request: pb.OpenSessionRequest, caller: Caller, report: Any = None
    ) -> pb.OpenSessionResponse:
        slot = self.services.slot_of_model(request.model, request.model_type)
        _refuse_unserved(request, slot.backend)
        embedding.refuse_unless_it_generates(slot.find_model(request.model))
        if request.session_key:
            check_session_key(request.session_key)
        check_text("profile_id", request.profile_id)
        _check_format(request.prompt_format)
        adapters = await adapters_of(self.services, request.adapters)
        wanted = OpenRequest(
            model=request.model,
            capacity=replace(
                _capacity(
                    request.window,
                    request.k_type,
                    request.v_type,
                    self.services.config,
                    slot.backend,
                ),
                adapters=adapters,
            ),
            session_key=request.session_key,
            profile_id=request.profile_id,
            prompt_format=request.prompt_format,
            overflow="evict" if request.overflow == pb.OVERFLOW_EVICT else "refuse",
            durable=request.durable,
            fresh=request.fresh,
            layout=_layout(request.layout),
        )
        opened = await (slot.open(wanted, caller, report) if report else slot.open(wanted, caller))
        session = opened.session
        return pb.OpenSessionResponse(
            session=handle_of(session),
            identity=convert.identity(session.identity),
            resolution=convert.resolution(session.resolution),
            capabilities=convert.capabilities(session.capabilities),
            attached=opened.attached,
            loaded=opened.loaded,
            load_seconds=opened.load_seconds,
            resident=session.resident,
            queue_seconds=opened.queue_seconds,
            resumed=convert.resumed(opened.resumed) if opened.resumed else None,
        )

    @guarded_while_draining
    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        now = time.monotonic()
        return pb.ListSessionsResponse(
            sessions=[
                pb.SessionInfo(
                    session=handle_of(s),
                    session_key=s.key,
                    model=s.model,
                    prompt_format=s.identity.prompt_format,
                    context=convert.numbers(s.resolution.numbers),
                    resident=s.resident,
                    seen_tokens=s.seen_tokens,
                    age_seconds=now - s.opened_at,
                    idle_seconds=now - s.used_at,
                    attached=slot.sessions.is_attached(s, now),
                    profile_id=s.identity.profile_id,
                    parked=s.parked,
                    durable=s.durable,
                    overflow=f"OVERFLOW_{s.overflow.upper()}",
                    layout=f"LAYOUT_{s.layout.upper()}",
                    saved_unix_ms=s.saved_unix_ms,
                )
                for slot in self.services.slots.values()
                for s in slot.sessions.all()
            ]
        )

    # --- turns --------------------------------------------------------------------------------

    def _prompt(self, prompt: pb.Prompt, part: str, session: Session) -> convert.ConvertedPrompt:
        return convert.prompt_in(
            prompt,
            part,
            prompt_format=session.identity.prompt_format,
            max_bytes=self.services.config.max_prompt_bytes,
            vision=_takes_images(session.capabilities),
        )

    @guarded
    async def EnsurePrefix(
        self, request: pb.EnsurePrefixRequest, context: Context
    ) -> pb.EnsurePrefixResponse:
        slot, session = self._session(request.session, request.identity)
        check_text("turn_id", request.turn_id)
        prefix = self._prompt(request.prompt, "prefix", session)
        record = _Record(session, prefix, None)
        async with slot.hold(
            session.session_id,
            "ensure_prefix",
            caller_of(context, no_wait=request.no_wait),
            turn_id=request.turn_id,
            keep_turn=True,
        ) as hold:
            self._session(request.session)  # it may have gone while this call waited
            result = await slot.call(
                EnsureOp(session_id=session.session_id, prefix=prefix.prompt),
                session=session,
                adopt=record.adopt,
            )
            status = expect(result, Status)
            return pb.EnsurePrefixResponse(status=record.took(status, hold.waited_s))

    @guarded
    async def PrefillSuffix(
        self, request: pb.PrefillSuffixRequest, context: Context
    ) -> pb.PrefillSuffixResponse:
        slot, session = self._session(request.session, request.identity)
        check_text("turn_id", request.turn_id)
        suffix = self._prompt(request.prompt, "suffix", session)
        async with slot.hold(
            session.session_id,
            "prefill_suffix",
            caller_of(context, no_wait=request.no_wait),
            turn_id=request.turn_id,
            keep_turn=True,
        ) as hold:
            self._session(request.session)
            record = _Record(session, None, suffix, extend=request.extend)
            result = await slot.call(
                SuffixOp(
                    session_id=session.session_id, suffix=suffix.prompt, extend=request.extend
                ),
                session=session,
                adopt=record.adopt,
            )
            status = expect(result, Status)
            return pb.PrefillSuffixResponse(status=record.took(status, hold.waited_s))

    @guarded
    async def Decode(self, request: pb.DecodeRequest, context: Context) -> None:
        slot, session = self._session(request.session, request.identity)
        options = convert.decode_in(request.options)
        writer = self._writer(context)
        reporter = QueueReporter(lambda s: writer.write(pb.DecodeEvent(queued=s)))
        turn_id = new_turn_id()

        async def on_data(payload: Payload) -> None:
            if isinstance(payload, ChunkOut):
                await writer.write(pb.DecodeEvent(chunk=convert.chunk(payload)))

        try:
            async with slot.hold(
                session.session_id,
                "decode",
                caller_of(context, no_wait=request.no_wait, reporter=reporter),
                turn_id=request.turn_id,
            ) as hold:
                await reporter.stop()
                self._session(request.session)
                result, saved = await slot.answer(
                    session,
                    DecodeOp(session_id=session.session_id, turn_id=turn_id, options=options),
                    on_data,
                )
                final = _final(session, result, turn_id, hold.waited_s, saved)
        finally:
            await reporter.stop()
        await writer.write(pb.DecodeEvent(final=final))

    @guarded
    async def Turn(self, request: pb.TurnRequest, context: Context) -> None:
        slot, session = self._session(request.session, request.identity)
        _check_said(request.prefix, request.suffix)
        prefix = self._prompt(request.prefix, "prefix", session)
        suffix = self._prompt(request.suffix, "suffix", session)
        options = convert.decode_in(request.options)
        writer = self._writer(context)
        reporter = QueueReporter(lambda s: writer.write(pb.TurnEvent(queued=s)))
        turn_id = new_turn_id()
        before, whole = _Record(session, prefix, None), _Record(session, prefix, suffix)
        try:
            async with slot.hold(
                session.session_id,
                "turn",
                caller_of(context, no_wait=request.no_wait, reporter=reporter),
            ) as hold:
                await reporter.stop()
                self._session(request.session)

                async def on_data(payload: Payload) -> None:
                    if isinstance(payload, ChunkOut):
                        await writer.write(pb.TurnEvent(chunk=convert.chunk(payload)))
                    elif isinstance(payload, Status) and payload.part == "prefix":
                        status = before.took(payload, hold.waited_s)
                        await writer.write(pb.TurnEvent(prefix=status))
                    elif isinstance(payload, Status):
                        await writer.write(pb.TurnEvent(suffix=whole.took(payload, 0.0)))

                result, saved = await slot.answer(
                    session,
                    TurnOp(
                        session_id=session.session_id,
                        turn_id=turn_id,
                        prefix=prefix.prompt,
                        suffix=suffix.prompt,
                        options=options,
                    ),
                    on_data,
                    whole.adopt,
                )
                final = _final(session, result, turn_id, hold.waited_s, saved)
        finally:
            await reporter.stop()
        await writer.write(pb.TurnEvent(final=final))

    # --- telling -------------------------------------------------------------------------------

    @guarded
    async def ExplainContext(
        self, request: pb.ExplainContextRequest, context: Context
    ) -> pb.ExplainContextResponse:
        identity = request.identity if request.HasField("identity") else None
        slot, session = self._session(request.session, identity)
        async with slot.hold(session.session_id, "explain", caller_of(context, no_wait=False)):
            self._session(request.session)
            result = await slot.call(ExplainOp(session_id=session.session_id), session=session)
        told = expect(result, ExplainResult)
        return pb.ExplainContextResponse(
            session=handle_of(session),
            identity=convert.identity(session.identity),
            resolution=convert.resolution(session.resolution),
            resident=told.resident,
            available=told.available,
            retained=told.retained,
            seen_tokens=told.seen_tokens,
            segments=convert.segments_out(told.segments),
            blocks=[
                pb.ResidentBlock(
                    token_begin=b.begin,
                    token_end=b.end,
                    state=b.state,
                    protected_range=b.protected if b.cls else b.what == "prefix",
                    what=b.what,
                    cache_class=b.cls,
                )
                for b in told.blocks
            ],
            capabilities=convert.capabilities(session.capabilities),
            counters=[
                pb.Counter(name=n, value=v)
                for n, v in sorted((told.counters | parking.counters(session)).items())
            ],
            last_fatal=slot.last_fatal,
            generated_turn_ids=told.turn_ids,
            parked=told.parked,
            gone=told.gone,
        )

    @guarded
    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        slot = self.services.slot_of_model(request.model, request.model_type)
        model = slot.find_model(request.model)
        _check_format(request.prompt_format)
        resident = slot.resident is not None and slot.resident.model.digest == model.digest
        config = self.services.config
        if request.what_if:
            config = config.with_settings(dict(request.what_if), "what_if")
        wanted = _capacity(request.window, request.k_type, request.v_type, config, slot.backend)
        wanted = replace(wanted, streams=config.streams(_layout(request.layout)))
        machine: MachineReading | None = None
        plan = self._resident_plan(slot, request, resident, wanted)
        source = "open_session"
        if plan is None:
            source = "hypothetical"
            plan, machine = await slot.hypothetical(model, _what_if(request, wanted))
        identity = slot.identity(
            model,
            wanted,
            window=plan.numbers.effective.tokens,
            prompt_format=request.prompt_format,
            profile_id=request.profile_id,
        )
        load = slot.resident.load if resident and slot.resident else None
        planning = slot.planning
        questions = answers(
            model.facts,
            planning.known_of(model.digest),
            plan,
            machine,
            planning.evidence.quality(model.digest),
            resident=resident,
            device_words=planning.device_words(model.digest, wanted, config),
        )
        return pb.DescribeResponse(
            model=model.name,
            model_type=slot.backend,
            resident=resident,
            identity=convert.identity(identity),
            resolution=convert.resolution(plan),
            questions=convert.capabilities(questions),
            capabilities=convert.capabilities(capabilities_of(load) if load else ()),
            facts=convert.facts(model.facts),
            resolution_source=source,
            template_supports_tools=bool(load and load.template_supports_tools),
            machine=convert.machine(machine) if machine else None,
            executor=load.executor if load else "",
            executor_reason=load.executor_reason if load else "",
        )

    def _resident_plan(
        self,
        slot: ModelSlot,
        request: pb.DescribeRequest,
        resident: bool,
        wanted: CapacityRequest,
    ) -> Resolution | None:
        """An open session's own resolution, where that is what is asked about."""
        if request.session_id:
            chosen = next(
                (s for s in slot.sessions.all() if s.session_id == request.session_id), None
            )
            if chosen is None:
                raise SessionNotFound(
                    f"No session {request.session_id[:64]!r} is open. Ask without a session id.",
                    metadata={"session_id": request.session_id[:64]},
                )
            return chosen.resolution
        usual = _capacity(0, "", "", self.services.config, slot.backend)
        plain = replace(wanted, streams=0) == usual and not (
            request.hypothetical
            or request.sessions
            or request.machine
            or request.what_if
            or request.companions.ByteSize()
        )
        if not resident or not plain:
            return None
        if wanted.streams:  # another one gets a stream of the batch that is there
            taken = len(slot.sessions.of_layout("batched"))
            free = taken < self.services.config.batch_streams
            return next((one.resolution for one in slot.sessions.in_batch if free), None)
        return slot.latest

    # --- tokenizer and template ---------------------------------------------------------------

    async def _with_model(
        self, model: str, load: bool, context: Context, operation: str, request: Payload
    ) -> Payload:
        slot = self.services.slot_of_model(model)
        stored = slot.find_model(model)
        caller = caller_of(context, no_wait=False)
        while True:
            if load:
                await slot.ensure_loaded(stored, caller)
            slot.require_active(stored)
            try:
                # No KV is touched: the worker answers between two steps of a batch.
                async with slot.hold("", operation, caller, beside=True):
                    slot.require_active(stored)
                    return await slot.call(request)
            except GenerationStale:
                continue  # the slot was reset meanwhile; this call has no handle to be stale

    @guarded
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        operation = TokenizeOp(
            text=request.text, parse_special=request.parse_special, add_bos=request.add_bos
        )
        result = expect(
            await self._with_model(request.model, request.load, context, "tokenize", operation),
            TokenizeResult,
        )
        return pb.TokenizeResponse(token_ids=result.ids, pieces=result.pieces)

    @guarded
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        operation = DetokenizeOp(ids=list(request.token_ids))
        result = expect(
            await self._with_model(request.model, request.load, context, "detokenize", operation),
            DetokenizeResult,
        )
        return pb.DetokenizeResponse(text=result.raw.decode(errors="replace"), raw=result.raw)

    @guarded
    async def RenderTemplate(
        self, request: pb.RenderTemplateRequest, context: Context
    ) -> pb.RenderTemplateResponse:
        vision = _has_images(request.messages) and self._resident_takes_images(request.model)
        messages = [
            convert.message_in(message, f"messages[{index}]", vision=vision)[0]
            for index, message in enumerate(request.messages)
        ]
        check_images(convert.images_of((f"messages[{i}]", m) for i, m in enumerate(messages)))
        operation = RenderOp(
            messages=messages,
            tools=[tool.json_schema for tool in request.tools],
            add_generation_prompt=request.add_generation_prompt,
        )
        result = expect(
            await self._with_model(request.model, request.load, context, "render", operation),
            RenderResult,
        )
        return pb.RenderTemplateResponse(
            text=result.text, template_digest=result.template_digest, token_ids=result.ids
        )

    def _resident_takes_images(self, model: str) -> bool:
        """What a model that isn't loaded takes isn't known, and finding out changes the slot."""
        slot = self.services.slot_of_model(model)
        resident, digest = slot.resident, slot.find_model(model).digest
        if resident is None or resident.model.digest != digest:
            return False
        return _takes_images(capabilities_of(resident.load))

    @guarded
    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        return await embedding.embed(self.services, request, context)


class _Record:
    """What a prefill's manifest is, checked at once, and kept when the prefill was done."""

    def __init__(
        self,
        session: Session,
        prefix: convert.ConvertedPrompt | None,
        suffix: convert.ConvertedPrompt | None,
        *,
        extend: bool = False,
    ) -> None:
        self._session = session
        self._prefix: tuple[SegmentId, ...] = prefix.segments if prefix else session.prefix
        self._tools = tuple(prefix.prompt.tools) if prefix else session.tools
        earlier: Sequence[SegmentId] = session.suffix if extend else ()
        self._suffix = (*earlier, *(suffix.segments if suffix else ()))
        self.digest = manifest_digest(session.identity, (*self._prefix, *self._suffix), self._tools)
        asserted = (suffix or prefix).asserted_digest if (suffix or prefix) else ""  # type: ignore[union-attr]
        if asserted and asserted != self.digest:
            # What a suffix adds to is the session's prefix, which a call that was left may have
            # replaced before its caller could be told.
            behind, advice = "", "Build it as common.proto's comments say."
            if not prefix:
                behind = ", behind the session's prefix,"
                advice = (
                    f"If an earlier call was left unanswered, ensure the prefix again. {advice}"
                )
            raise DigestMismatch(
                f"The call asserts manifest_digest {asserted}, but what it carries{behind} has "
                f"{self.digest}. {advice}",
                metadata={
                    "field": "manifest_digest",
                    "asserted": asserted,
                    "actual": self.digest,
                },
            )

    def adopt(self) -> None:
        """The session is about this prompt from now on, also where its prefill was cancelled."""
        session = self._session
        session.prefix, session.tools, session.suffix = self._prefix, self._tools, self._suffix

    def took(self, status: Status, queue_s: float) -> pb.PrefillStatus:
        session = self._session
        self.adopt()
        session.resident, session.seen_tokens = status.resident, status.seen_tokens
        return convert.prefill_status(parking.told(session, status), self.digest, queue_s)


def _final(
    session: Session, result: Payload, turn_id: str, queue_s: float, saved: Saved | None
) -> pb.Final:
    final = expect(result, FinalOut)
    session.resident, session.seen_tokens = final.resident, final.seen_tokens
    session.back = None
    return convert.final(final, turn_id, queue_s, saved)


def _has_images(messages: Iterable[common.ChatMessage]) -> bool:
    return any(part.HasField("image") for message in messages for part in message.content)


def _takes_images(capabilities: Iterable[Capability]) -> bool:
    return any(c.name == "vision" and c.answer == "yes" for c in capabilities)


def _refuse_unserved(request: pb.OpenSessionRequest, backend: str) -> None:
    if request.overflow == pb.OVERFLOW_EVICT and request.window:
        sizes_of(request.window)
    if request.durable and not request.session_key:
        raise InvalidRequest.of(
            "session_key", "", "a key with durable", "It names what the next open brings back."
        )
    if request.fresh and not request.durable:
        raise InvalidRequest.of("fresh", True, "fresh with durable only")
    if request.adapters and backend != "openvino":
        raise unsupported("adapters", "Models of type openvino take them.")


def _check_format(prompt_format: str) -> None:
    if prompt_format not in ("", "raw", "chat"):
        raise InvalidRequest.of("prompt_format", prompt_format, "'raw', 'chat' or empty")


def _capacity(
    window: int, k_type: str, v_type: str, config: Config, backend: str
) -> CapacityRequest:
    if window < 0:
        raise InvalidRequest.of("window", window, "0 (automatic) or a number of tokens")
    k_type, v_type = served_types(config, backend, k_type, v_type)
    return CapacityRequest(window=window, k_type=k_type, v_type=v_type)


def _layout(number: int) -> str:
    return "batched" if number == pb.LAYOUT_BATCHED else "isolated"


def _check_said(*parts: pb.Prompt) -> None:
    if not any(part.segments for part in parts):
        raise InvalidRequest.of(
            "prompt", "", "at least one segment", "There is nothing to answer: send a prompt."
        )


def _what_if(request: pb.DescribeRequest, wanted: CapacityRequest) -> WhatIf:
    companions = Companions(
        projector_bytes=request.companions.projector_bytes,
        projector_compute_bytes=request.companions.projector_compute_bytes,
        adapter_bytes=request.companions.adapter_bytes,
        draft_bytes=request.companions.draft_bytes,
    )
    for name, size in vars(companions).items():
        if not 0 <= size <= MAX_COMPANION_BYTES:
            raise InvalidRequest.of(f"companions.{name}", size, f"0 to {MAX_COMPANION_BYTES} bytes")
    return WhatIf(
        request=replace(wanted, sessions=request.sessions),
        companions=companions,
        machine=parse_machine(request.machine, "machine") if request.machine else None,
        settings=dict(request.what_if),
    )
