"""A deterministic worker without an engine: ``python -m modeld.workers.scripted``.

It keeps exact counts over a tokenizer in which a byte is a token, and streams a fixed text at a
given rate. Fault tests, and measurements of the chain around the engine, run against it.

``MODELD_SCRIPT_RATE``: tokens a second (0, the default: as fast as it can).
``MODELD_SCRIPT_TOKENS``: tokens until it ends by itself (default 64).
``MODELD_SCRIPT_PREFILL_RATE``: prompt tokens a second (0: at once).
``MODELD_SCRIPT_LOAD_S``: seconds a load takes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from modeld.shared.errors import (
    ContextOverflow,
    InvalidRequest,
    ModelNotActive,
    SessionNotFound,
    unsupported,
)
from modeld.shared.messages import (
    BlockOut,
    ChunkOut,
    CloseOp,
    CloseResult,
    DecodeIn,
    DecodeOp,
    DetokenizeOp,
    DetokenizeResult,
    Empty,
    EnsureOp,
    ExplainOp,
    ExplainResult,
    FinalOut,
    Hello,
    LoadOp,
    LoadResult,
    Message,
    OpenOp,
    OpenResult,
    Payload,
    Progress,
    PromptIn,
    RenderOp,
    RenderResult,
    SegmentIn,
    SegmentOut,
    Status,
    SuffixOp,
    TokenizeOp,
    TokenizeResult,
    TurnOp,
    UnloadOp,
)
from modeld.workers import faults
from modeld.workers.executor import OpContext
from modeld.workers.runtime import main

SCRIPT = b"The quick brown fox jumps over the lazy dog. "
MICRO_BATCH = 64  # tokens
KV_BYTES_A_TOKEN = 16
_NAP_S = 0.01  # how late a cancel may be seen
_CHUNK_TOKENS = 8


@dataclass
class _Session:
    window: int
    tokens: bytearray = field(default_factory=bytearray)  # resident
    prefix: int = 0  # tokens of it
    suffix: int = 0
    generated: int = 0
    segments: list[SegmentOut] = field(default_factory=list)
    turns: dict[str, bytes] = field(default_factory=dict)
    seen: int = 0


@dataclass(frozen=True)
class Script:
    """How the worker behaves; rates in tokens a second, 0 for no limit."""

    rate: float = 0.0
    tokens: int = 64
    prefill_rate: float = 0.0
    load_s: float = 0.0

    @classmethod
    def of_environment(cls) -> Script:
        def number(name: str, default: float) -> float:
            return float(os.environ.get(f"MODELD_SCRIPT_{name}", default))

        return cls(
            rate=number("RATE", 0.0),
            tokens=int(number("TOKENS", 64)),
            prefill_rate=number("PREFILL_RATE", 0.0),
            load_s=number("LOAD_S", 0.0),
        )


class ScriptedHandler:
    """Answers every request of the protocol."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._model: LoadOp | None = None
        self._sessions: dict[str, _Session] = {}
        self._counters = {"prefilled": 0, "reused": 0, "generated": 0}
        self._routes: dict[type, Callable[..., Payload]] = {
            LoadOp: self._load,
            UnloadOp: self._unload,
            OpenOp: self._open,
            CloseOp: self._close,
            EnsureOp: self._ensure,
            SuffixOp: self._append,
            DecodeOp: self._decode,
            TurnOp: self._turn,
            ExplainOp: self._explain,
            TokenizeOp: self._tokenize,
            DetokenizeOp: self._detokenize,
            RenderOp: self._render,
        }

    def hello(self) -> Hello:
        return Hello(
            backend="scripted",
            backend_version="1",
            build_digest=hashlib.sha256(SCRIPT).hexdigest(),
            pid=os.getpid(),
            capabilities={"generate": "yes", "embed": "no"},
            state_layout="bytes",
        )

    def handle(self, request: Payload, context: OpContext) -> Payload:
        route = self._routes.get(type(request))
        if route is None:
            raise unsupported(type(request).__name__)
        return route(request, context)

    def close(self) -> None:
        self._sessions.clear()

    # --- model -----------------------------------------------------------------------------

    def _load(self, request: LoadOp, context: OpContext) -> LoadResult:
        started = time.monotonic()
        for tenth in range(11):
            faults.point("load")
            context.emit(Progress(stage="loading", fraction=tenth / 10))
            context.beat()
            if tenth < 10 and not context.cancelled():
                time.sleep(self._script.load_s / 10)
        self._sessions.clear()
        self._model = request
        return LoadResult(
            description="scripted",
            vocab=256,
            train_context=1 << 20,
            weights_bytes=1024,
            add_bos=False,
            template_digest=hashlib.sha256(b"scripted template").hexdigest(),
            template_supports_tools=False,
            threads=1,
            capabilities={"generate": "yes: by script", "tail_removal": "yes: bytes are cut"},
            seconds=time.monotonic() - started,
        )

    def _unload(self, request: UnloadOp, context: OpContext) -> Empty:
        self._model = None
        self._sessions.clear()
        return Empty()

    # --- sessions --------------------------------------------------------------------------

    def _open(self, request: OpenOp, context: OpContext) -> OpenResult:
        faults.point("open")
        if self._model is None:
            raise ModelNotActive("No model is loaded; load one first.")
        if request.session_id in self._sessions:
            raise InvalidRequest.of("session_id", request.session_id, "a new one")
        self._sessions[request.session_id] = _Session(window=request.window)
        return OpenResult(
            window=request.window,
            kv_bytes=request.window * KV_BYTES_A_TOKEN,
            compute_bytes=0,
            slot_cells=sum(session.window for session in self._sessions.values()),
            reused_context=False,
            retained=0,
        )

    def _close(self, request: CloseOp, context: OpContext) -> CloseResult:
        session = self._sessions.pop(request.session_id, None)
        kept = 0 if session is None or request.discard else len(session.tokens)
        return CloseResult(retained=kept)

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFound("The worker has no such session; open one.")
        return session

    def _ensure(self, request: EnsureOp, context: OpContext) -> Status:
        session = self._session(request.session_id)
        text, segments = _rendered(session, request.prefix, 0)
        return self._make_resident(session, "prefix", text, segments, 0, context)

    def _append(self, request: SuffixOp, context: OpContext) -> Status:
        session = self._session(request.session_id)
        begin = session.prefix + (session.suffix if request.extend else 0)
        text, segments = _rendered(session, request.suffix, begin)
        return self._make_resident(session, "suffix", text, segments, begin, context)

    def _make_resident(
        self,
        session: _Session,
        part: str,
        text: bytes,
        segments: list[SegmentOut],
        begin: int,
        context: OpContext,
    ) -> Status:
        started = time.monotonic()
        wanted = bytes(session.tokens[:begin]) + text
        if len(wanted) > session.window:
            raise ContextOverflow(
                f"{len(wanted)} tokens don't fit the window of {session.window}; "
                f"drop {len(wanted) - session.window}.",
                metadata={
                    "stage": part,
                    "resident": len(session.tokens),
                    "additional": len(text),
                    "dense_window": session.window,
                    "must_drop": len(wanted) - session.window,
                },
            )
        held = len(session.tokens)
        common = _common(session.tokens, wanted)
        # All resident already: the last token is evaluated again, for its logits.
        keep = common - 1 if common == len(wanted) and common > begin else max(common, begin)
        del session.tokens[keep:]
        prefilled = self._prefill(session, wanted, context)
        if part == "prefix":
            session.prefix, session.suffix = len(session.tokens), 0
        else:
            session.suffix = len(session.tokens) - session.prefix
        session.generated = 0
        kept_segments = [s for s in session.segments if s.token_end <= begin]
        session.segments = [*kept_segments, *segments]
        session.seen += prefilled
        self._counters["prefilled"] += prefilled
        self._counters["reused"] += keep - begin
        return Status(
            part=part,
            reused=keep - begin,
            dropped=max(0, held - max(common, begin)),
            prefilled=prefilled,
            prefix=session.prefix,
            suffix=session.suffix,
            resident=len(session.tokens),
            available=session.window - len(session.tokens),
            retained=0,
            copied=0,
            miss_reason="COLD" if held == 0 else "NONE" if common >= held else "TOKENS_DIFFER",
            stable_token_hash=_hash(session.tokens[: session.prefix]),
            volatile_token_hash=_hash(session.tokens[session.prefix :]),
            template_additive=True,
            turns_recomputed=0,
            seen_tokens=session.seen,
            seconds=time.monotonic() - started,
            segments=session.segments,
        )

    def _prefill(self, session: _Session, wanted: bytes, context: OpContext) -> int:
        """Whole micro-batches until done or cancelled; the session's count is exact either way."""
        done = 0
        while len(session.tokens) < len(wanted) and not context.cancelled():
            faults.point("prefill")
            at = len(session.tokens)
            batch = wanted[at : at + MICRO_BATCH]
            if self._script.prefill_rate > 0:
                time.sleep(len(batch) / self._script.prefill_rate)
            session.tokens += batch
            done += len(batch)
            context.beat()
        return done

    # --- generation ------------------------------------------------------------------------

    def _decode(self, request: DecodeOp, context: OpContext) -> FinalOut:
        session = self._session(request.session_id)
        return self._generate(session, request.turn_id, request.options, 0, context)

    def _turn(self, request: TurnOp, context: OpContext) -> FinalOut:
        session = self._session(request.session_id)
        text, segments = _rendered(session, request.prefix, 0)
        prefix = self._make_resident(session, "prefix", text, segments, 0, context)
        context.emit(prefix)
        text, segments = _rendered(session, request.suffix, session.prefix)
        suffix = self._make_resident(session, "suffix", text, segments, session.prefix, context)
        context.emit(suffix)
        prefilled = prefix.prefilled + suffix.prefilled
        return self._generate(session, request.turn_id, request.options, prefilled, context)

    def _generate(
        self,
        session: _Session,
        turn_id: str,
        options: DecodeIn,
        prefilled: int,
        context: OpContext,
    ) -> FinalOut:
        started = time.monotonic()
        first_token_s = 0.0
        own_end = (1 << 62) if options.ignore_eos else self._script.tokens
        limit = options.max_tokens or (1 << 62)
        stops = [stop.encode() for stop in options.stop]
        stream = _Stream(context, options, held_back=max((len(s) - 1 for s in stops), default=0))
        out = bytearray()
        reason, stop_sequence = "", ""
        while not reason:
            if len(out) >= own_end:
                reason = "eos"
            elif len(out) >= limit:
                reason = "length"
            elif len(session.tokens) >= session.window:
                reason = "context_full"
            elif not self._nap_until(started, len(out), context):
                reason = "cancelled"
            else:
                faults.point("decode")
                token = SCRIPT[len(out) % len(SCRIPT)]
                session.tokens.append(token)
                out.append(token)
                context.beat()
                first_token_s = first_token_s or time.monotonic() - started
                found = next((s for s in stops if out.endswith(s)), b"")
                if found:
                    reason, stop_sequence = "stop_sequence", found.decode()
                    stream.drop(len(found))
                elif not stream.add(token):
                    reason = "cancelled"
        if not stream.flush(everything=True) and reason != "cancelled":
            reason = "cancelled"
        session.generated += len(out)
        session.seen += len(out)
        session.turns[turn_id] = bytes(out)
        self._counters["generated"] += len(out)
        return FinalOut(
            stop_reason=reason,
            stop_sequence=stop_sequence,
            tokens=len(out),
            prefilled=prefilled,
            engine_seconds=time.monotonic() - started,
            first_token_seconds=first_token_s,
            resident=len(session.tokens),
            available=session.window - len(session.tokens),
            seen_tokens=session.seen,
            seed=options.sampling.seed,
        )

    def _nap_until(self, started_s: float, token: int, context: OpContext) -> bool:
        """Wait for the token's time; False when cancelled meanwhile."""
        due_s = started_s + (token / self._script.rate if self._script.rate > 0 else 0.0)
        while not context.cancelled():
            left_s = due_s - time.monotonic()
            if left_s <= 0:
                return True
            time.sleep(min(left_s, _NAP_S))
        return False

    # --- small ones ------------------------------------------------------------------------

    def _explain(self, request: ExplainOp, context: OpContext) -> ExplainResult:
        session = self._session(request.session_id)
        edges = [
            (0, session.prefix, "prefix"),
            (session.prefix, session.prefix + session.suffix, "suffix"),
            (session.prefix + session.suffix, len(session.tokens), "generated"),
        ]
        return ExplainResult(
            resident=len(session.tokens),
            available=session.window - len(session.tokens),
            retained=0,
            seen_tokens=session.seen,
            segments=session.segments,
            blocks=[
                BlockOut(begin=begin, end=end, state="hot", what=what)
                for begin, end, what in edges
                if end > begin
            ],
            counters=dict(self._counters),
            turn_ids=list(session.turns),
            slot_cells=sum(other.window for other in self._sessions.values()),
            reclaimable_tokens=0,
        )

    def _tokenize(self, request: TokenizeOp, context: OpContext) -> TokenizeResult:
        raw = request.text.encode()
        return TokenizeResult(ids=list(raw), pieces=[bytes([byte]) for byte in raw])

    def _detokenize(self, request: DetokenizeOp, context: OpContext) -> DetokenizeResult:
        if any(not 0 <= token < 256 for token in request.ids):
            raise InvalidRequest.of("ids", "a number outside", "0 to 255")
        return DetokenizeResult(raw=bytes(request.ids))

    def _render(self, request: RenderOp, context: OpContext) -> RenderResult:
        text = "".join(_message_text(message) for message in request.messages)
        if request.add_generation_prompt:
            text += "<assistant>"
        digest = hashlib.sha256(b"scripted template").hexdigest()
        return RenderResult(text=text, template_digest=digest, ids=list(text.encode()))


class _Stream:
    """Coalesces tokens into chunks: the first at once, then by time or number. Uses credit."""

    def __init__(self, context: OpContext, options: DecodeIn, held_back: int) -> None:
        self._context = context
        self._interval_s = options.stream_interval_ms / 1000
        self._with_ids = options.token_ids
        self._held_back = held_back  # bytes that may yet turn out to be a stop sequence
        self._pending = bytearray()
        self._tokens = 0
        self._flushed_s = 0.0

    def add(self, token: int) -> bool:
        """False when cancelled while waiting for credit."""
        self._pending.append(token)
        self._tokens += 1
        if self._tokens >= _CHUNK_TOKENS or time.monotonic() - self._flushed_s >= self._interval_s:
            return self.flush(everything=False)
        return True

    def drop(self, count: int) -> None:
        """Forget the last ``count`` bytes: they were a stop sequence, whose last isn't added."""
        del self._pending[max(0, len(self._pending) - (count - 1)) :]
        self._tokens += 1

    def flush(self, *, everything: bool) -> bool:
        ready = len(self._pending) - (0 if everything else self._held_back)
        if ready <= 0:
            return True
        if not self._context.wait_credit():
            return False
        text = bytes(self._pending[:ready])
        del self._pending[:ready]
        ids = list(text) if self._with_ids else []
        self._context.emit(ChunkOut(text=text.decode(), tokens=self._tokens, token_ids=ids))
        self._tokens = 0
        self._flushed_s = time.monotonic()
        return True


def _rendered(session: _Session, prompt: PromptIn, begin: int) -> tuple[bytes, list[SegmentOut]]:
    text = bytearray()
    segments = []
    for segment in prompt.segments:
        at = begin + len(text)
        piece = _segment_bytes(session, segment)
        text += piece
        end = begin + len(text)
        segments.append(
            SegmentOut(
                byte_begin=at,
                byte_end=end,
                token_begin=at,
                token_end=end,
                token_hash=_hash(piece),
                located=True,
            )
        )
    return bytes(text), segments


def _segment_bytes(session: _Session, segment: SegmentIn) -> bytes:
    if segment.generated_turn_id is not None:
        turn = session.turns.get(segment.generated_turn_id)
        if turn is None:
            raise InvalidRequest.of(
                "generated_turn_id", segment.generated_turn_id, "a turn of this session"
            )
        return turn
    if segment.message is not None:
        return _message_text(segment.message).encode()
    return (segment.text or "").encode()


def _message_text(message: Message) -> str:
    return f"<{message.role}>{message.text}\n"


def _common(left: bytes | bytearray, right: bytes) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _hash(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    sys.exit(main(lambda: ScriptedHandler(Script.of_environment())))
