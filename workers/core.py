"""The session core: serves every operation of a worker over an engine's primitives.

Owns which operation is done how, and beside which others it may run. What a load brings is the
loaded model's. Knows no particular engine, and nothing of leases, clients, policy or transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from modeld.shared.errors import InvalidRequest, ModelNotActive
from modeld.shared.messages import (
    AdmitOp,
    AdmitResult,
    CloseOp,
    CloseResult,
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
    PromptIn,
    RenderOp,
    RenderResult,
    RestoreOp,
    RestoreResult,
    ResumeOp,
    ResumeResult,
    SaveOp,
    SaveResult,
    Status,
    SuffixOp,
    TokenizeOp,
    TokenizeResult,
    TrimOp,
    TrimResult,
    TurnOp,
    UnloadOp,
)
from modeld.workers import (
    admit,
    eviction,
    faults,
    parked_sessions,
    questions,
    residency,
    restoring,
    saving,
    state_import,
)
from modeld.workers.batching import Gate, Place
from modeld.workers.decode import check_options, decode, nothing_decoded
from modeld.workers.embedding import embed
from modeld.workers.engine import Engine
from modeld.workers.executor import OpContext
from modeld.workers.forgetting import forget
from modeld.workers.loaded_model import LoadedModel, load
from modeld.workers.new_files import Live, nobody
from modeld.workers.pooled_context import Shape
from modeld.workers.prompt import Assembled
from modeld.workers.session import Session

# How long parked KV may take to get to disk when its model goes, and when the worker does, which
# has 5 seconds to leave.
_KEEP_S, _KEEP_AT_CLOSE_S = 10.0, 2.0
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
        self._model: LoadedModel | None = None
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
        if self._model is not None and self._model.parking is not None:
            self._model.parking.serve(residency.live_of(context))
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
        session = self._model.sessions.by_id.get(ids[0]) if self._model is not None else None
        if session is None:  # it is refused
            return Place("between")
        return Place("beside" if session.batched else "alone", ids)

    @property
    def cold_bytes(self) -> int:
        """RAM of the cold store now; read by any thread."""
        model = self._model
        parking = model.parking if model is not None else None
        return parking.store.ram_bytes if parking is not None else 0

    def close(self) -> None:
        """Free everything, within the seconds that a worker has to leave. Idempotent."""
        self._drop_model(_KEEP_AT_CLOSE_S)

    # --- model ---------------------------------------------------------------------------------

    def _load(self, op: LoadOp, context: OpContext) -> LoadResult:
        """Load a model in the place of the one that is loaded, whose sessions go with it."""
        if op.max_contexts < 1:
            raise InvalidRequest.of("max_contexts", op.max_contexts, "1 or more")
        self._drop_model(_KEEP_S, residency.live_of(context))
        self._model, result = load(self._engine, op, self.gate, context)
        return result

    def _unload(self, op: UnloadOp, context: OpContext) -> Empty:
        self._drop_model(_KEEP_S, residency.live_of(context))
        return Empty()

    def _drop_model(self, keep_s: float, live: Live = nobody) -> None:
        model, self._model = self._model, None
        try:
            if model is not None:
                model.close(keep_s, live)
        finally:
            self._engine.unload()

    @property
    def model(self) -> LoadedModel:
        """What is loaded. Raises ModelNotActive."""
        if self._model is None:
            raise ModelNotActive("No model is loaded in this worker. Load one first.")
        return self._model

    # --- sessions ------------------------------------------------------------------------------

    def _open(self, op: OpenOp, context: OpContext) -> OpenResult:
        model = self.model
        model.sessions.check_new("session_id", op.session_id)
        if op.window < 1:
            raise InvalidRequest.of("window", op.window, "1 token or more")
        layout = model.layout(op)
        assembler = model.assembler(op.prompt_format)
        faults.point("open")
        shape = Shape(op.window, op.k_type, op.v_type, _streams(op))
        entry, reused = model.pool.acquire(op.session_id, shape, op.free_bytes, op.compute_bytes)
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
        model.sessions.add(session)
        return OpenResult(
            reused_context=reused,
            retained=len(entry),
            **model.pool.opened(entry),
        )

    def _close(self, op: CloseOp, context: OpContext) -> CloseResult:
        model = self.model
        session = model.sessions.remove(op.session_id)
        entry, retained = session.context, 0
        if op.discard:
            forget(session, model.sessions.by_id.values(), model.pool)
        if entry is not None and op.discard:
            model.pool.destroy(entry)
        elif entry is not None:
            model.pool.release(entry)
            retained = len(entry)
        return CloseResult(
            retained=retained,
            **model.pool.totals(),
        )

    # --- turns ---------------------------------------------------------------------------------

    def _ensure(self, op: EnsureOp, context: OpContext) -> Status:
        model = self.model
        session, pool = model.sessions.usable(op.session_id), model.pool
        assembled = session.assemble(op.prefix, None, model.admit(session, "prefix"))
        eviction.check_fits(session, pool, op.prefix, None, assembled, "prefix")
        with model.sessions.changing(session):
            session.set_prompt(op.prefix, None, assembled)
            prefill = eviction.prefill_of(session, pool, assembled, need_logits=False)
            prefill.advance(session.prompt, context)
            return prefill.status("prefix")

    def _suffix(self, op: SuffixOp, context: OpContext) -> Status:
        model = self.model
        session, pool = model.sessions.usable(op.session_id), model.pool
        suffix = op.suffix
        if op.extend and session.suffix is not None:
            suffix = PromptIn(
                segments=[*session.suffix.segments, *suffix.segments], tools=suffix.tools
            )
        assembled = session.assemble(session.prefix, suffix, model.admit(session, "suffix"))
        _check_not_empty(assembled)
        eviction.check_fits(session, pool, session.prefix, suffix, assembled, "suffix")
        with model.sessions.changing(session):
            session.set_prompt(session.prefix, suffix, assembled)
            # A suffix without a token has no last one to evaluate again: a decode sees to that.
            adds = len(assembled.tokens) > assembled.prefix_tokens
            prefill = eviction.prefill_of(session, pool, assembled, need_logits=adds)
            prefill.advance(session.prompt, context)
            return prefill.status("suffix")

    def _decode(self, op: DecodeOp, context: OpContext) -> FinalOut:
        model = self.model
        session, pool = model.sessions.usable(op.session_id), model.pool
        tokenizer = model.engine.tokenizer
        check_options(op.turn_id, op.options, tokenizer, session.entry.samples_itself)
        _check_not_empty(session.assembled)
        rule = model.constraint(op.options, session.answer_text, context)
        with model.sessions.changing(session):
            return decode(
                session, tokenizer, op.turn_id, op.options, context, constraint=rule, pool=pool
            )

    def _turn(self, op: TurnOp, context: OpContext) -> FinalOut:
        """Prefix, suffix, decode. Refused before anything changes, or done."""
        model = self.model
        session, pool = model.sessions.usable(op.session_id), model.pool
        tokenizer = model.engine.tokenizer
        check_options(op.turn_id, op.options, tokenizer, session.entry.samples_itself)
        assembled = session.assemble(op.prefix, op.suffix, model.admit(session, "turn"))
        _check_not_empty(assembled)
        eviction.check_fits(session, pool, op.prefix, op.suffix, assembled, "turn")
        rule = model.constraint(op.options, "", context)
        with model.sessions.changing(session):
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
        model = self.model
        session = model.sessions.usable(op.session_id)
        with model.sessions.changing(session):
            return residency.export(session, model.source, op, context)

    def _import(self, op: ImportOp, context: OpContext) -> ImportResult:
        model = self.model
        session, pool = model.sessions.usable(op.session_id), model.pool
        with model.sessions.changing(session):
            return state_import.import_(session, pool, model.source, op, context)

    def _fork(self, op: ForkOp, context: OpContext) -> ForkResult:
        model = self.model
        source, pool = model.sessions.usable(op.session_id), model.pool
        model.sessions.check_new("new_session_id", op.new_session_id)
        assembler = model.assembler(source.prompt_format)
        session, result = residency.fork(source, assembler, pool, op)
        model.sessions.add(session)
        return result

    def _trim(self, op: TrimOp, context: OpContext) -> TrimResult:
        model = self.model
        session = model.sessions.usable(op.session_id)
        with model.sessions.changing(session):
            return residency.trim(session, op.keep)

    def _save(self, op: SaveOp, context: OpContext) -> SaveResult:
        model = self.model
        session = model.sessions.usable(op.session_id)
        with model.sessions.changing(session):
            return saving.save(session, model.source, op, context)

    def _restore(self, op: RestoreOp, context: OpContext) -> RestoreResult:
        model = self.model
        session, pool = model.sessions.usable(op.session_id), model.pool
        with model.sessions.changing(session):
            return restoring.restore(session, pool, model.source, op, context)

    def _park(self, op: ParkOp, context: OpContext) -> ParkResult:
        model = self.model
        session, pool = model.sessions.usable(op.session_id), model.pool
        with model.sessions.changing(session):
            return parked_sessions.park(session, pool)

    def _resume(self, op: ResumeOp, context: OpContext) -> ResumeResult:
        began_s = time.perf_counter()
        model = self.model
        session, pool = model.sessions.find(op.session_id), model.pool
        reused = parked_sessions.give_context(session, pool, op)
        with model.sessions.changing(session):
            return parked_sessions.resume(session, pool, reused=reused, began_s=began_s)

    def _admit_again(self, op: AdmitOp, context: OpContext) -> AdmitResult:
        model = self.model
        session, pool = model.sessions.usable(op.session_id), model.pool
        chosen = admit.choose(session, model.engine.tokenizer, op)
        with model.sessions.changing(session):
            return admit.admit(session, pool, chosen, context)

    # --- questions -----------------------------------------------------------------------------

    def _explain(self, op: ExplainOp, context: OpContext) -> ExplainResult:
        model = self.model
        return questions.explain(model.sessions.usable(op.session_id), model.pool)

    def _tokenize(self, op: TokenizeOp, context: OpContext) -> TokenizeResult:
        return questions.tokenize(self.model.engine.tokenizer, op)

    def _detokenize(self, op: DetokenizeOp, context: OpContext) -> DetokenizeResult:
        return questions.detokenize(self.model.engine.tokenizer, op)

    def _render(self, op: RenderOp, context: OpContext) -> RenderResult:
        return questions.render(self.model, op)

    def _embed(self, op: EmbedOp, context: OpContext) -> EmbedResult:
        return embed(self.model.engine, op, context)


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
