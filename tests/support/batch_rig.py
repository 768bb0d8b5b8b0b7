"""Runs a worker's loop over a handler in a test: all operations sent at once, frames kept.

And the fake engine's batch, which records what each engine batch evaluated.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

from modeld.shared.codec import encode_payload
from modeld.shared.errors import SessionFatal
from modeld.shared.messages import (
    ChunkOut,
    DecodeIn,
    FinalOut,
    Kind,
    LoadOp,
    OpenOp,
    Payload,
    PromptIn,
    TurnOp,
    WireError,
)
from modeld.workers.batching import Gate
from modeld.workers.core import SessionCore
from modeld.workers.engine import Cancelled, Engine, Piece
from modeld.workers.executor import Pulse, RunningOp, Tasks, run
from tests.support.core_harness import options, raw
from tests.support.fake_engine import FakeContext, FakeEngine

PLENTY = 1 << 20  # chunks of credit


class FakeStream(FakeContext):
    def __init__(self, batch: FakeBatch, index: int, window: int) -> None:
        super().__init__(batch.engine, window, cell_bytes=2)
        self.batch, self.index = batch, index

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        self._check_usable()
        assert position == len(self.tokens)
        return self.batch.gate.evaluate(self.batch, self.index, tokens, cancelled)

    def step(self, token: int, position: int) -> None:
        self._check_usable()
        assert position == len(self.tokens)
        self.batch.gate.step(self.batch, self.index, token)

    def really(self, tokens: Sequence[int], cancelled: Cancelled) -> int:
        return super().evaluate(tokens, len(self.tokens), cancelled=cancelled)

    def close(self) -> None:
        self.tokens, self.hashes = [], []

    def _check_usable(self) -> None:
        if self.batch.broken:
            raise SessionFatal("the batch is broken", metadata={"cause": "engine_error"})


class FakeBatch:
    """``log``: of each engine batch the streams and how many tokens each got."""

    def __init__(self, engine: BatchingFake, streams: int, window: int, gate: Gate) -> None:
        self.engine, self.gate, self.window, self.chunk = engine, gate, window, 512
        self.broken = self.closed = self.company = False
        self.together = engine.joins
        self.streams = [FakeStream(self, index, window) for index in range(streams)]

    def step(self, tokens: Sequence[tuple[int, int]]) -> None:
        self.engine.log.append([(stream, 1) for stream, _ in tokens])
        self.engine.between(self)
        for stream, token in tokens:
            self.streams[stream].really([token], lambda: False)

    def evaluate(self, pieces: Sequence[Piece]) -> list[int]:
        done: list[int] = []
        for group in [pieces] if self.together else [[one] for one in pieces]:
            self.engine.log.append([(one.stream, len(one.tokens)) for one in group])
            self.engine.between(self)
            done += [
                self.streams[one.stream].really(one.tokens.tolist(), one.cancelled) for one in group
            ]
        return done

    def close(self) -> None:
        self.closed = True


class BatchingFake(FakeEngine):
    """``between`` is called in each engine batch."""

    def __init__(self) -> None:
        super().__init__(micro_batch=16)
        self.joins = False  # whether its batches evaluate prompts together
        self.batches: list[FakeBatch] = []
        self.log: list[list[tuple[int, int]]] = []
        self.between: Callable[[FakeBatch], None] = lambda batch: None

    def new_batch(
        self,
        streams: int,
        window: int,
        k_type: str,
        v_type: str,
        gate: Gate,
        compute_bytes: int = 0,
    ) -> FakeBatch:
        made = FakeBatch(self, streams, window, gate)
        self.batches.append(made)
        return made

    @property
    def together(self) -> list[int]:
        """Sizes of the batches of sampled tokens."""
        return [len(batch) for batch in self.log if all(count == 1 for _, count in batch)]


class Kept:
    """Where frames go: each is handed on, and the loop must see that none is forgotten."""

    def __init__(
        self,
        keep: Callable[[Kind, int, int, Payload], None] = lambda *frame: None,
        on_end: Callable[[int], None] = lambda op_id: None,
    ) -> None:
        self.held = 0  # sent since the last flush
        self._keep, self._on_end = keep, on_end

    def send(self, kind: Kind, generation: int, op_id: int, seq: int, payload: Payload) -> None:
        self.held += 1
        self._keep(kind, op_id, seq, payload)

    def flush(self) -> None:
        self.held = 0

    def ended(self, operation: RunningOp) -> None:
        self._on_end(operation.op_id)


class Rig:
    """A worker's loop over a core. Operations are numbered from 1 in the order sent."""

    def __init__(self, engine: Engine, load: LoadOp | None = None, *, contexts: int = 4) -> None:
        self.engine = engine
        self.core = SessionCore(engine)
        self.pulse = Pulse()
        self.tasks: Tasks = queue.SimpleQueue()
        self.operations: list[RunningOp] = []
        self.frames: list[tuple[int, Kind, Payload]] = []
        self.ended: list[int] = []
        self.out = Kept(self._keep, self._end)
        self.on_end: Callable[[int], None] = lambda op_id: None
        self._turns = 0
        self.do(load or LoadOp(path="m", model="m", digest="d", max_contexts=contexts))

    def send(self, request: Payload, *, credit: int = PLENTY) -> int:
        operation = RunningOp(
            len(self.operations) + 1, 7, encode_payload(request), self.out, self.pulse
        )
        operation.grant(credit)
        self.operations.append(operation)
        self.tasks.put(operation)
        return operation.op_id

    def _keep(self, kind: Kind, op_id: int, seq: int, payload: Payload) -> None:
        assert seq == sum(op == op_id for op, _, _ in self.frames)
        self.frames.append((op_id, kind, payload))

    def _end(self, op_id: int) -> None:
        self.ended.append(op_id)
        self.on_end(op_id)
        if len(self.ended) == len(self.operations):
            self.tasks.put(None)

    def run(self) -> None:
        """Until all that was sent has ended, what is sent meanwhile too."""
        run(self.core, self.tasks, self.pulse, self.out)
        assert not self.out.held, "frames were left in the queue"
        ends = [op for op, kind, _ in self.frames if kind in (Kind.DONE, Kind.ERROR)]
        assert sorted(ends) == [operation.op_id for operation in self.operations], "one end each"
        assert self.ended == ends
        assert self.pulse.busy_op == 0

    def do(self, request: Payload) -> Payload:
        """Send it alone, and what came of it."""
        op_id = self.send(request)
        self.run()
        return self.end(op_id)

    def end(self, op_id: int) -> Payload:
        return next(
            payload
            for op, kind, payload in self.frames
            if op == op_id and kind in (Kind.DONE, Kind.ERROR)
        )

    def final(self, op_id: int) -> FinalOut:
        final = self.end(op_id)
        assert isinstance(final, FinalOut), final
        return final

    def error(self, op_id: int) -> WireError:
        error = self.end(op_id)
        assert isinstance(error, WireError), error
        return error

    def ids(self, op_id: int) -> list[int]:
        """Tokens that an operation streamed."""
        return [
            token
            for op, _, payload in self.frames
            if op == op_id and isinstance(payload, ChunkOut)
            for token in payload.token_ids
        ]

    def send_open(self, session_id: str, *, layout: str = "batched", **more: object) -> int:
        settings: dict[str, object] = {
            "window": 1024, "k_type": "f16", "v_type": "f16", "kv_digest": "kv",
            "streams": 4 if layout == "batched" else 0, **more,
        }  # fmt: skip
        return self.send(
            OpenOp(
                session_id=session_id,
                prompt_format="raw",
                runtime_digest="rt",
                layout=layout,
                **settings,  # type: ignore[arg-type]
            )
        )

    def open(self, *session_ids: str, layout: str = "batched", **more: object) -> None:
        sent = [self.send_open(session_id, layout=layout, **more) for session_id in session_ids]
        self.run()
        for op_id in sent:
            assert not isinstance(self.end(op_id), WireError), self.end(op_id)

    def send_turn(
        self,
        session_id: str,
        text: str,
        tokens: int = 12,
        *,
        credit: int = PLENTY,
        how: DecodeIn | None = None,
    ) -> int:
        self._turns += 1
        request = TurnOp(
            session_id=session_id,
            turn_id=f"t{self._turns}",
            prefix=PromptIn(segments=[]),
            suffix=raw(text),
            options=how or options(tokens),
        )
        return self.send(request, credit=credit)
