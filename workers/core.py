"""The session core: serves every operation of a worker over an engine's primitives.

Owns sessions and their contexts, from load to unload. Knows no particular engine, and nothing of
leases, clients, policy or transport.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from modeld.shared.errors import (
    InvalidRequest,
    ModeldError,
    ModelNotActive,
    SessionFatal,
    SessionNotFound,
    UnsupportedFeature,
)
from modeld.shared.messages import (
    AdmitOp,
    AdmitResult,
    CloseOp,
    CloseResult,
    DecodeIn,
    DecodeOp,
    DetokenizeOp,
    DetokenizeResult,
    EmbedOp,
    EmbedResult,
    Empty,
    EnsureOp,
    ExplainOp,
    ExplainResult,
    ExportOp,
    ExportResult,
    FinalOut,
    ForkOp,
    ForkResult,
    Hello,
    ImportOp,
    ImportResult,
    LoadOp,
    LoadResult,
    OpenOp,
    OpenResult,
    ParkOp,
    ParkResult,
    Payload,
    Progress,
    PromptIn,
    RenderOp,
    RenderResult,
    RestoreOp,
    RestoreResult,
    ResumeOp,
    ResumeResult,
    SaveOp,
    SaveResult,
    SegmentIn,
    Status,
    SuffixOp,
    TokenizeOp,
    TokenizeResult,
    TrimOp,
    TrimResult,
    TurnOp,
    UnloadOp,
)
from modeld.shared.planner.residency import Layout, sizes_of
from modeld.workers import (
    admit,
    eviction,
    faults,
    parked_sessions,
    residency,
    restoring,
    saving,
    state_import,
    structured,
)
from modeld.workers.batching import Gate, Place
from modeld.workers.decode import check_options, decode, nothing_decoded
from modeld.workers.embedding import embed
from modeld.workers.engine import Engine
from modeld.workers.executor import OpContext
from modeld.workers.images import SeeingEngine
from modeld.workers.parking import Parking, parking_of
from modeld.workers.pool import ContextPool, Shape
from modeld.workers.prefill import check_bytes
from modeld.workers.prompt import Assembled, PromptAssembler
from modeld.workers.quality import KV_TYPE, greedy_probe
from modeld.workers.session import COUNTERS, Session
from modeld.workers.splits import Controls, Part
from modeld.workers.structured import Constraint, Constraints
from modeld.workers.template import ChatTemplate

log = logging.getLogger(__name__)

# What needs no batch, nor a long time: it is done between two batches of what runs.
_BETWEEN = (OpenOp, CloseOp, ExplainOp, TokenizeOp, DetokenizeOp, RenderOp)


class SessionCore:
    """A worker's ``Handler``. One operation at a time, on the engine thread.

    Every refusal (a ModeldError other than SessionFatal) leaves the session as it was. What the
    engine can't recover from destroys the session's context, and is SessionFatal from then on.
    A cancelled prefill answers with the numbers of what was done; a later call goes on from there.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pool: ContextPool | None = None
        self._template: ChatTemplate | None = None
        self._evicts = ""  # the capability overflow.evict of the loaded model
        self._source: residency.Source | None = None
        self._parking: Parking | None = None
        self._constraints: Constraints | None = None  # made for the first decode under one
        self._sessions: dict[str, Session] = {}
        self.gate = Gate()
        self._serve: dict[type, Callable[[Any, OpContext], Payload]] = {
            LoadOp: self._load,
            UnloadOp: self._unload,
            OpenOp: self._open,
            CloseOp: self._close,
            EnsureOp: self._ensure,
            SuffixOp: self._suffix,
            DecodeOp: self._decode,
            TurnOp: self._turn,
            ExplainOp: self._explain,
            TokenizeOp: self._tokenize,
            DetokenizeOp: self._detokenize,
            RenderOp: self._render,
            EmbedOp: self._embed,
            ExportOp: self._export,
            ImportOp: self._import,
            ForkOp: self._fork,
            TrimOp: self._trim,
            AdmitOp: self._admit_again,
            ParkOp: self._park,
            ResumeOp: self._resume,
            SaveOp: self._save,
            RestoreOp: self._restore,
        }

    def hello(self) -> Hello:
        return self._engine.hello()

    def handle(self, request: Payload, context: OpContext) -> Payload:
        """Serve one operation; raises ModeldError for a typed refusal."""
        serve = self._serve.get(type(request))
        if serve is None:
            raise InvalidRequest.of(
                "operation", type(request).__name__, ", ".join(op.__name__ for op in self._serve)
            )
        if self._parking is not None:
            self._parking.beat = context.beat
        return serve(request, context)

    def sessions(self, request: Payload) -> tuple[str, ...]:
        """See ``executor.Batching``."""
        ids = (getattr(request, name, "") for name in ("session_id", "new_session_id"))
        return tuple(session_id for session_id in ids if session_id)

    def place(self, request: Payload) -> Place:
        """See ``executor.Batching``: what a batched session does goes beside others' operations."""
        if isinstance(request, _BETWEEN):
            return Place("between")
        ids = self.sessions(request)
        if not ids:
            return Place("alone")
        session = self._sessions.get(ids[0])
        if session is None:  # it is refused
            return Place("between")
        return Place("beside" if session.batched else "alone", ids)

    @property
    def cold_bytes(self) -> int:
        """RAM of the cold store now; read by any thread."""
        parking = self._parking
        return parking.store.ram_bytes if parking is not None else 0

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._drop_model()

    # --- model ---------------------------------------------------------------------------------

    def _load(self, op: LoadOp, context: OpContext) -> LoadResult:
        """Load a model in the place of the one that is loaded, whose sessions go with it."""
        if op.max_contexts < 1:
            raise InvalidRequest.of("max_contexts", op.max_contexts, "1 or more")
        self._drop_model()

        def report(stage: str, fraction: float) -> None:
            faults.point("load")
            context.beat()
            context.emit(Progress(stage=stage, fraction=fraction))

        def polled() -> bool:
            context.beat()
            return context.cancelled()

        result = self._engine.load(op, report, context.cancelled)
        if op.quality and not result.capabilities.get("generate", "").startswith("no"):
            try:
                # Where an executor is named, the KV type is compiled in.
                kv_type = op.k_type if result.executor else KV_TYPE
                result.quality = greedy_probe(self._engine, report, polled, kv_type)
            except BaseException:
                self._drop_model()
                raise
        self._pool = ContextPool(self._engine, op.max_contexts, self.gate)
        source = self._engine.chat_template
        if source:
            self._template = template = ChatTemplate(source, self._engine.special_texts())
            result.template_digest = template.digest
            result.template_supports_tools = template.supports_tools
        hello = self._engine.hello()
        self._source = residency.Source.of(hello, result)
        self._evicts = result.capabilities.get("overflow.evict", "")
        self._parking = self._pool.parking = parking_of(op, result, self._source, context.beat)
        declared = result.longest_gap_s or hello.longest_gap_s
        result.longest_gap_s = structured.longest_gap_s(declared, result.vocab)
        return result

    def _unload(self, op: UnloadOp, context: OpContext) -> Empty:
        self._drop_model()
        return Empty()

    def _drop_model(self) -> None:
        self._sessions.clear()
        self._template = None
        self._constraints = None
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        parking, self._parking = self._parking, None
        if parking is not None:
            parking.close()
        self._engine.unload()

    def _loaded(self) -> ContextPool:
        if self._pool is None:
            raise ModelNotActive("No model is loaded in this worker. Load one first.")
        return self._pool

    # --- sessions ------------------------------------------------------------------------------

    def _open(self, op: OpenOp, context: OpContext) -> OpenResult:
        pool = self._loaded()
        self._check_new("session_id", op.session_id)
        if op.window < 1:
            raise InvalidRequest.of("window", op.window, "1 token or more")
        layout = self._layout(op)
        assembler = self._assembler(op.prompt_format)
        faults.point("open")
        shape = Shape(op.window, op.k_type, op.v_type, _streams(op))
        entry, reused = pool.acquire(op.session_id, shape, op.free_bytes, op.compute_bytes)
        session = Session(
            session_id=op.session_id,
            assembler=assembler,
            kv_digest=op.kv_digest,
            runtime_digest=op.runtime_digest,
            context=entry,
            served_window=op.window,
            prompt_format=op.prompt_format,
            batched=bool(shape.streams),
            layout=layout,
        )
        session.counters["adopted_contexts" if reused else "created_contexts"] += 1
        self._sessions[op.session_id] = session
        return OpenResult(
            reused_context=reused,
            retained=len(entry),
            **pool.opened(entry),
        )

    def _layout(self, op: OpenOp) -> Layout | None:
        """None under overflow refuse."""
        if op.overflow == "refuse":
            return None
        if op.overflow != "evict":
            raise InvalidRequest.of("overflow", op.overflow, "refuse or evict")
        if not self._evicts.startswith("yes"):
            raise UnsupportedFeature(
                "The loaded model can't be served beyond its window: "
                f"{self._evicts.partition(': ')[2] or 'its executor does not say so'}. Open with "
                "overflow refuse.",
                metadata={"capability": "overflow.evict"},
            )
        return Layout(sizes_of(op.window))

    def _close(self, op: CloseOp, context: OpContext) -> CloseResult:
        pool = self._loaded()
        entry = self._any_session(op.session_id).context
        del self._sessions[op.session_id]
        retained = 0
        if entry is not None and op.discard:
            pool.destroy(entry)
        elif entry is not None:
            pool.release(entry)
            retained = len(entry)
        return CloseResult(
            retained=retained,
            **pool.totals(),
        )

    def _check_new(self, field: str, session_id: str) -> None:
        if session_id in self._sessions:
            raise InvalidRequest.of(field, session_id, "an id that isn't open")

    def _session(self, session_id: str) -> Session:
        """An open session that can still be used; raises SessionNotFound or SessionFatal."""
        session = self._any_session(session_id)
        if session.parked is not None:
            raise InvalidRequest.of(
                "session_id", session_id, "a session that isn't parked", "Resume it first."
            )
        if session.context is None:
            raise SessionFatal(
                "This session's context was destroyed after an engine error. Open a new session.",
                metadata={"cause": session.fatal_cause, "session_id": session_id},
            )
        return session

    def _any_session(self, session_id: str) -> Session:
        self._loaded()
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound(
                f"This worker has no session {session_id!r}. Open one.",
                metadata={"session_id": session_id},
            )
        return session

    @contextlib.contextmanager
    def _changing(self, session: Session) -> Iterator[None]:
        """While KV is being changed: whatever leaves its state unknown ends the session."""
        try:
            yield
        except SessionFatal as error:
            self._condemn(session, error.metadata.get("cause", "engine_error"))
            raise
        except ModeldError:
            raise
        except Exception as error:
            log.exception("an operation failed while it changed KV")
            self._condemn(session, "engine_error")
            raise SessionFatal(
                f"The engine failed ({type(error).__name__}); the session's state can't be "
                "trusted and was destroyed. Open a new session.",
                metadata={"cause": "engine_error", "session_id": session.session_id},
            ) from None

    def _condemn(self, session: Session, cause: str) -> None:
        entry, session.context, session.fatal_cause = session.context, None, cause
        session.logical = 0
        if entry is not None:
            self._loaded().destroy(entry)

    # --- prompts -------------------------------------------------------------------------------

    def _assembler(self, prompt_format: str) -> PromptAssembler:
        if prompt_format not in ("raw", "chat"):
            raise InvalidRequest.of("prompt_format", prompt_format, "raw or chat")
        engine = self._engine
        vision = engine.vision if isinstance(engine, SeeingEngine) else None
        return PromptAssembler(engine.tokenizer, self._template, prompt_format, vision)

    def _admit(self, session: Session, stage: str) -> Callable[[int], None]:
        pool = self._loaded()
        if session.layout is not None:  # a conversation of any length is taken
            return lambda _text_bytes: None
        return lambda text_bytes: check_bytes(session, pool, text_bytes, stage)

    def _ensure(self, op: EnsureOp, context: OpContext) -> Status:
        session, pool = self._session(op.session_id), self._loaded()
        assembled = session.assemble(op.prefix, None, self._admit(session, "prefix"))
        eviction.check_fits(session, pool, op.prefix, None, assembled, "prefix")
        with self._changing(session):
            session.set_prompt(op.prefix, None, assembled)
            prefill = eviction.prefill_of(session, pool, assembled, need_logits=False)
            prefill.advance(session.prompt, context)
            return prefill.status("prefix")

    def _suffix(self, op: SuffixOp, context: OpContext) -> Status:
        session, pool = self._session(op.session_id), self._loaded()
        suffix = op.suffix
        if op.extend and session.suffix is not None:
            suffix = PromptIn(
                segments=[*session.suffix.segments, *suffix.segments], tools=suffix.tools
            )
        assembled = session.assemble(session.prefix, suffix, self._admit(session, "suffix"))
        _check_not_empty(assembled)
        eviction.check_fits(session, pool, session.prefix, suffix, assembled, "suffix")
        with self._changing(session):
            session.set_prompt(session.prefix, suffix, assembled)
            # A suffix without a token has no last one to evaluate again: a decode sees to that.
            adds = len(assembled.tokens) > assembled.prefix_tokens
            prefill = eviction.prefill_of(session, pool, assembled, need_logits=adds)
            prefill.advance(session.prompt, context)
            return prefill.status("suffix")

    def _decode(self, op: DecodeOp, context: OpContext) -> FinalOut:
        session, pool = self._session(op.session_id), self._loaded()
        tokenizer = self._engine.tokenizer
        check_options(op.turn_id, op.options, tokenizer, session.entry.samples_itself)
        _check_not_empty(session.assembled)
        rule = self._constraint(op.options, session.answer_text, context)
        with self._changing(session):
            return decode(
                session, tokenizer, op.turn_id, op.options, context, constraint=rule, pool=pool
            )

    def _constraint(self, options: DecodeIn, answer: str, context: OpContext) -> Constraint | None:
        """What the options constrain an answer to, of which ``answer`` is there already."""
        if not options.structured_kind:
            return None
        if self._constraints is None:
            self._constraints = Constraints(self._engine.tokenizer, context.beat)
        return self._constraints.begin(options.structured_kind, options.structured, answer)

    def _turn(self, op: TurnOp, context: OpContext) -> FinalOut:
        """Prefix, suffix, decode. Refused before anything changes, or done."""
        session, pool = self._session(op.session_id), self._loaded()
        tokenizer = self._engine.tokenizer
        check_options(op.turn_id, op.options, tokenizer, session.entry.samples_itself)
        assembled = session.assemble(op.prefix, op.suffix, self._admit(session, "turn"))
        _check_not_empty(assembled)
        eviction.check_fits(session, pool, op.prefix, op.suffix, assembled, "turn")
        rule = self._constraint(op.options, "", context)
        with self._changing(session):
            began_s = time.perf_counter()
            session.set_prompt(op.prefix, op.suffix, assembled)
            prefill = eviction.prefill_of(session, pool, assembled, need_logits=True)
            parts: tuple[tuple[Literal["prefix", "suffix"], int], ...] = (
                ("prefix", session.prefix_tokens),
                ("suffix", session.prompt),
            )
            for part, end in parts:
                arrived = prefill.advance(end, context)
                context.emit(prefill.status(part))
                if not arrived:
                    return nothing_decoded(session, op.options, pool)
            spent_s = time.perf_counter() - began_s
            return decode(
                session,
                tokenizer,
                op.turn_id,
                op.options,
                context,
                spent_s=spent_s,
                constraint=rule,
                pool=pool,
            )

    # --- residency -----------------------------------------------------------------------------

    def _export(self, op: ExportOp, context: OpContext) -> ExportResult:
        session = self._session(op.session_id)
        assert self._source is not None  # a session means a loaded model
        with self._changing(session):
            return residency.export(session, self._source, op, context)

    def _import(self, op: ImportOp, context: OpContext) -> ImportResult:
        session, pool = self._session(op.session_id), self._loaded()
        assert self._source is not None
        with self._changing(session):
            return state_import.import_(session, pool, self._source, op, context)

    def _fork(self, op: ForkOp, context: OpContext) -> ForkResult:
        source, pool = self._session(op.session_id), self._loaded()
        self._check_new("new_session_id", op.new_session_id)
        assembler = self._assembler(source.prompt_format)
        session, result = residency.fork(source, assembler, pool, op)
        self._sessions[op.new_session_id] = session
        return result

    def _trim(self, op: TrimOp, context: OpContext) -> TrimResult:
        session = self._session(op.session_id)
        with self._changing(session):
            return residency.trim(session, op.keep)

    def _save(self, op: SaveOp, context: OpContext) -> SaveResult:
        session = self._session(op.session_id)
        assert self._source is not None
        with self._changing(session):
            return saving.save(session, self._source, op, context)

    def _restore(self, op: RestoreOp, context: OpContext) -> RestoreResult:
        session, pool = self._session(op.session_id), self._loaded()
        assert self._source is not None
        with self._changing(session):
            return restoring.restore(session, pool, self._source, op, context)

    def _park(self, op: ParkOp, context: OpContext) -> ParkResult:
        session, pool = self._session(op.session_id), self._loaded()
        with self._changing(session):
            return parked_sessions.park(session, pool)

    def _resume(self, op: ResumeOp, context: OpContext) -> ResumeResult:
        began_s = time.perf_counter()
        session, pool = self._any_session(op.session_id), self._loaded()
        reused = parked_sessions.give_context(session, pool, op)
        with self._changing(session):
            return parked_sessions.resume(session, pool, reused=reused, began_s=began_s)

    def _admit_again(self, op: AdmitOp, context: OpContext) -> AdmitResult:
        session, pool = self._session(op.session_id), self._loaded()
        chosen = admit.choose(session, self._engine.tokenizer, op)
        with self._changing(session):
            return admit.admit(session, pool, chosen, context)

    # --- questions -----------------------------------------------------------------------------

    def _explain(self, op: ExplainOp, context: OpContext) -> ExplainResult:
        session, pool = self._session(op.session_id), self._loaded()
        parked, gone = eviction.standing(session, pool, session.length)
        return ExplainResult(
            resident=session.logical,
            available=session.available,
            retained=session.retained,
            seen_tokens=session.seen_tokens,
            segments=session.segments(),
            blocks=eviction.blocks(session, pool),
            counters={name: session.counters[name] for name in COUNTERS} | pool.counters(),
            turn_ids=list(session.turns),
            slot_cells=pool.slot_cells,
            reclaimable_tokens=pool.reclaimable_tokens,
            parked=parked,
            gone=gone,
        )

    def _tokenize(self, op: TokenizeOp, context: OpContext) -> TokenizeResult:
        self._loaded()
        tokenizer = self._engine.tokenizer
        ids: list[int] = []
        if op.add_bos:
            if tokenizer.bos is None:
                raise InvalidRequest.of(
                    "add_bos", op.add_bos, "false", "The model has no beginning-of-text token."
                )
            ids.append(tokenizer.bos)
        parts = [Part(op.text, None)]
        if op.parse_special:
            controls = Controls(tokenizer.controls, tokenizer.strips_left, tokenizer.strips_right)
            parts = controls.split(op.text)
        for text, token in parts:
            ids += tokenizer.encode(text) if token is None else [token]
        return TokenizeResult(ids=ids, pieces=[tokenizer.piece(token) for token in ids])

    def _embed(self, op: EmbedOp, context: OpContext) -> EmbedResult:
        self._loaded()
        return embed(self._engine, op, context)

    def _detokenize(self, op: DetokenizeOp, context: OpContext) -> DetokenizeResult:
        self._loaded()
        tokenizer = self._engine.tokenizer
        for token in op.ids:
            if not 0 <= token < tokenizer.vocab_size:
                raise InvalidRequest.of("token_ids", token, f"0 to {tokenizer.vocab_size - 1}")
        return DetokenizeResult(raw=b"".join(tokenizer.piece(token) for token in op.ids))

    def _render(self, op: RenderOp, context: OpContext) -> RenderResult:
        self._loaded()
        template = self._template
        if template is None:
            raise InvalidRequest.of(
                "messages", len(op.messages), "none", "The model has no chat template."
            )
        messages = [SegmentIn(message=message) for message in op.messages]
        suffix: PromptIn | None = None
        prefix = PromptIn(segments=messages, tools=op.tools)
        if op.add_generation_prompt:
            # All in the suffix: there is no boundary at which the two could merge.
            prefix, suffix = PromptIn(segments=[], tools=op.tools), PromptIn(segments=messages)
        assembled = self._assembler("chat").assemble(prefix, suffix, {})
        text = assembled.text
        if not assembled.images:
            text = template.render(op.messages, op.tools, op.add_generation_prompt)
        return RenderResult(text=text, template_digest=template.digest, ids=assembled.tokens)


def _streams(op: OpenOp) -> int:
    """0 for a context of its own."""
    if op.layout not in ("isolated", "batched"):
        raise InvalidRequest.of("layout", op.layout, "isolated or batched")
    if op.layout == "isolated":
        return 0
    if op.streams < 1:
        raise InvalidRequest.of("streams", op.streams, "1 or more, with layout batched")
    return op.streams


def _check_not_empty(assembled: Assembled | None) -> None:
    if assembled is None or not assembled.tokens:
        raise InvalidRequest.of(
            "prompt", "", "at least one token", "There is nothing to generate from: send a prompt."
        )
