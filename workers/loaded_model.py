"""A model as a worker has it loaded: its contexts, sessions, template and cold store.

Owns what comes with a load and goes with the next. Knows no operation but the load.
"""

from __future__ import annotations

from collections.abc import Callable

from modeld.shared.errors import InvalidRequest, UnsupportedFeature
from modeld.shared.messages import DecodeIn, LoadOp, LoadResult, OpenOp, Progress
from modeld.shared.planner.residency import Layout, sizes_of
from modeld.workers import faults, residency, structured
from modeld.workers.batching import Gate
from modeld.workers.engine import Cancelled, Engine, ReportProgress
from modeld.workers.executor import OpContext
from modeld.workers.images import SeeingEngine
from modeld.workers.new_files import Live, nobody
from modeld.workers.open_sessions import OpenSessions
from modeld.workers.parking import parking_of
from modeld.workers.pool import ContextPool
from modeld.workers.prefill import check_bytes, polled
from modeld.workers.prompt import PromptAssembler
from modeld.workers.quality import KV_TYPE, greedy_probe
from modeld.workers.session import Session
from modeld.workers.structured import Constraint, Constraints
from modeld.workers.template import ChatTemplate


class LoadedModel:
    """All that sessions share. The engine is the worker's: ``close`` leaves it loaded."""

    def __init__(
        self, engine: Engine, op: LoadOp, result: LoadResult, gate: Gate, beat: Callable[[], None]
    ) -> None:
        """``result``: what the engine answered to ``op``; gets what is known of the template."""
        self.engine = engine
        self.pool = ContextPool(engine, op.max_contexts, gate)
        self.sessions = OpenSessions(self.pool)
        self.template: ChatTemplate | None = None
        source = engine.chat_template
        if source:
            self.template = template = ChatTemplate(source, engine.special_texts())
            result.template_digest = template.digest
            result.template_supports_tools = template.supports_tools
        self.source = residency.Source.of(engine.hello(), result)
        self._evicts = result.capabilities.get("overflow.evict", "")
        self.parking = self.pool.parking = parking_of(op, result, self.source, beat)
        self._constraints: Constraints | None = None  # made for the first decode under one

    def layout(self, op: OpenOp) -> Layout | None:
        """None under overflow refuse. Raises UnsupportedFeature where it can't evict."""
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

    def assembler(self, prompt_format: str) -> PromptAssembler:
        """Raises InvalidRequest for a format that isn't one."""
        if prompt_format not in ("raw", "chat"):
            raise InvalidRequest.of("prompt_format", prompt_format, "raw or chat")
        vision = self.engine.vision if isinstance(self.engine, SeeingEngine) else None
        return PromptAssembler(self.engine.tokenizer, self.template, prompt_format, vision)

    def admit(self, session: Session, stage: str) -> Callable[[int], None]:
        """Refuses texts that can't fit, told their bytes, before they are tokenised."""
        if session.layout is not None:  # a conversation of any length is taken
            return lambda _text_bytes: None
        return lambda text_bytes: check_bytes(session, self.pool, text_bytes, stage)

    def constraint(self, options: DecodeIn, answer: str, context: OpContext) -> Constraint | None:
        """What the options constrain an answer to, of which ``answer`` is there already."""
        if not options.structured_kind:
            return None
        if self._constraints is None:
            self._constraints = Constraints(self.engine.tokenizer, context.beat)
        return self._constraints.begin(options.structured_kind, options.structured, answer)

    def close(self, keep_s: float, live: Live = nobody) -> None:
        """Free the contexts and the cold store, after about ``keep_s`` seconds at most in which
        what it has in RAM goes to disk. Idempotent.
        """
        self.sessions.by_id.clear()
        self.pool.close()
        if self.parking is not None:
            self.parking.keep(keep_s, live)
            self.parking.close()


def load(
    engine: Engine, op: LoadOp, gate: Gate, context: OpContext
) -> tuple[LoadedModel, LoadResult]:
    """Have an engine that holds no model load one. On any error it holds none again."""

    def report(stage: str, fraction: float) -> None:
        faults.point("load")
        context.beat()
        context.emit(Progress(stage=stage, fraction=fraction))

    try:
        result = engine.load(op, report, context.cancelled)
        _probe(engine, op, result, report, polled(context))
        model = LoadedModel(engine, op, result, gate, context.beat)
        declared = result.longest_gap_s or engine.hello().longest_gap_s
        result.longest_gap_s = structured.longest_gap_s(declared, result.vocab)
    except BaseException:
        engine.unload()
        raise
    return model, result


def _probe(
    engine: Engine,
    op: LoadOp,
    result: LoadResult,
    report: ReportProgress,
    cancelled: Cancelled,
) -> None:
    """Where quality is asked for, of what generates."""
    if op.quality and not result.capabilities.get("generate", "").startswith("no"):
        # Where an executor is named, the KV type is compiled in.
        kv_type = op.k_type if result.executor else KV_TYPE
        result.quality = greedy_probe(engine, report, cancelled, kv_type)
