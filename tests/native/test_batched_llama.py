"""Streams of one llama context: what neighbours do changes nothing, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.errors import (
    ContextOverflow,
    InvalidRequest,
    SessionFatal,
    UnsupportedFeature,
)
from modeld.shared.messages import (
    ChunkOut,
    CloseOp,
    FinalOut,
    LoadOp,
    LoadResult,
    OpenOp,
    Status,
    TurnOp,
)
from modeld.supervisor.link import Operation
from modeld.workers.batching import Gate
from modeld.workers.engine import EngineContext, Piece
from modeld.workers.llama import native
from modeld.workers.llama.engine import LlamaEngine
from modeld.workers.llama.streams import LlamaStreams
from tests.support import tiny_models
from tests.support.batch_rig import Rig
from tests.support.core_harness import options, raw
from tests.support.keeping import kept

TOKENS = [[(7 * at + 31 * s + 11) % 250 for at in range(400)] for s in range(4)]
Load = Callable[..., LoadResult]


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaEngine]:
    made = LlamaEngine()
    yield made
    made.unload()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def request(path: Path, **more: object) -> LoadOp:
    settings: dict[str, object] = {"n_batch": 128, "n_ubatch": 64, "threads": 1, **more}
    return LoadOp(path=str(path), model="m", digest="", **settings)  # type: ignore[arg-type]


@pytest.fixture
def load(engine: LlamaEngine, folder: Path) -> Load:
    """Loads one of the generated models by its maker's name."""

    def make(kind: str, **more: object) -> LoadResult:
        path = getattr(tiny_models, kind)(folder / f"{kind}.gguf")
        return engine.load(request(path, **more), lambda stage, fraction: None, never)

    return make


@pytest.fixture
def batch(engine: LlamaEngine, load: Load) -> Iterator[LlamaStreams]:
    load("llama")
    made = engine.new_batch(4, 512, "f16", "f16", Gate())
    yield made
    made.close()


def never() -> bool:
    return False


def fill(context: EngineContext, tokens: list[int]) -> np.ndarray:
    context.trim(0)
    assert context.evaluate(tokens, 0, cancelled=never) == len(tokens)
    return context.logits().copy()


def stepped(batch: LlamaStreams, group: tuple[int, ...], count: int = 4) -> list[np.ndarray]:
    """Stream 1's logits after its prompt and after each token, with a group that goes along."""
    lengths = (5, 9, 2, 300)
    for index in group:
        fill(batch.streams[index], TOKENS[index][: lengths[index]])
    rows = [batch.streams[1].logits().copy()]
    for step in range(count):
        batch.step([(index, TOKENS[index][lengths[index] + step]) for index in group])
        rows.append(batch.streams[1].logits().copy())
    return rows


@pytest.mark.parametrize("kind", ["llama", "qwen2", "deepseek2"])
def test_a_stream_s_logits_are_the_same_alone_and_with_any_others(
    engine: LlamaEngine, load: Load, kind: str
) -> None:
    capability = load(kind).capabilities["layout.batched"]
    assert capability.startswith("yes: ")
    assert ": exact" in capability
    batch = engine.new_batch(4, 512, "f16", "f16", Gate())
    expected = stepped(batch, (1,))
    for group in ((0, 1), (1, 2), (1, 3), (0, 1, 3), (0, 1, 2, 3)):
        for row, other in zip(stepped(batch, group), expected, strict=True):
            assert np.array_equal(row, other)
    batch.close()


def test_a_prompt_is_what_it_is_in_a_context_of_its_own_however_it_is_cut(
    engine: LlamaEngine, batch: LlamaStreams
) -> None:
    own = engine.new_context(512, "f16", "f16")
    near = fill(own, TOKENS[0][:301])
    assert batch.company  # so that the last layer, too, computes several rows, and own's one
    expected = fill(batch.streams[2], TOKENS[0][:301])
    np.testing.assert_allclose(expected, near, atol=1e-5)
    for ends in ((301,), (64, 128, 300, 301), (1, 2, 301), (63, 127, 301)):
        stream, begin = batch.streams[2], 0
        stream.trim(0)
        for end in ends:
            batch.step([(0, 7), (3, 9)])  # neighbours that go on meanwhile
            stream.evaluate(TOKENS[0][begin:end], begin, cancelled=never)
            begin = end
        assert np.array_equal(stream.logits(), expected)
        for other in (0, 3):
            batch.streams[other].trim(0)
    assert np.array_equal(batch.streams[2].export_state(0, 301), own.export_state(0, 301))
    own.close()


@pytest.mark.parametrize("streams", [1, 2])
def test_as_many_rows_are_wanted_as_the_engine_gives(
    engine: LlamaEngine, load: Load, streams: int
) -> None:
    load("llama")
    batch = engine.new_batch(streams, 300, "f16", "f16", Gate())
    own = engine.new_context(300, "f16", "f16")
    assert batch.company
    for index in range(streams):
        for count in (1, 2, 65, 200, 299, 300):
            near = fill(own, TOKENS[index][:count])
            row = fill(batch.streams[index], TOKENS[index][:count])
            np.testing.assert_allclose(row, near, atol=1e-5)
            assert streams > 1 or np.array_equal(row, near)
        batch.streams[index].trim(299)
        assert batch.streams[index].evaluate([5], 299, cancelled=never) == 1
        batch.streams[index].trim(100)
        batch.step([(index, 7)])
    own.close()
    batch.close()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "deepseek2"])
def test_prompts_evaluated_together_are_what_each_is_alone(
    engine: LlamaEngine, load: Load, kind: str
) -> None:
    load(kind, n_ubatch=128)
    batch = engine.new_batch(4, 512, "f16", "f16", Gate())
    heads, tails = (300, 9, 40, 2), (27, 25, 26, 27)
    expected, states = [], []
    for tokens, head, tail in zip(TOKENS, heads, tails, strict=True):
        alone = batch.streams[0]
        fill(alone, tokens[:head])
        alone.evaluate(tokens[head : head + tail], head, cancelled=never)
        expected.append(alone.logits().copy())
        states.append(alone.export_state(0, head + tail))
    for group in ((0, 1, 2, 3), (3, 2, 1), (0, 1), (0, 2, 3), (1, 3)):
        for index in range(4):
            fill(batch.streams[index], TOKENS[index][: heads[index]])
        pieces = [
            Piece(at, np.asarray(TOKENS[at][heads[at] : heads[at] + tails[at]]), True, never)
            for at in group
        ]
        assert batch.evaluate(pieces) == [tails[at] for at in group]
        for at in group:
            stream = batch.streams[at]
            assert stream.length == heads[at] + tails[at]
            assert np.array_equal(stream.logits(), expected[at])
            assert np.array_equal(stream.export_state(0, stream.length), states[at])
        for at in {0, 1, 2, 3}.difference(group):
            assert batch.streams[at].length == heads[at]
    batch.close()


def test_prompts_evaluated_together_end_with_a_cancel_of_all_and_not_of_some(
    batch: LlamaStreams,
) -> None:
    for at in range(3):
        fill(batch.streams[at], TOKENS[at][:20])

    def pieces(*cancelled: bool) -> list[Piece]:
        return [
            Piece(at, np.asarray(TOKENS[at][20:40]), True, partial(bool, one))
            for at, one in enumerate(cancelled)
        ]

    assert batch.evaluate(pieces(True, True, True)) == [0, 0, 0]
    assert [stream.length for stream in batch.streams] == [20, 20, 20, 0]
    polls = iter(range(10_000))
    late = [
        Piece(at, np.asarray(TOKENS[at][20:40]), True, lambda: next(polls) > 40) for at in range(3)
    ]
    assert batch.evaluate(late) == [0, 0, 0]  # within the engine
    assert [stream.length for stream in batch.streams] == [20, 20, 20, 0]
    assert batch.evaluate(pieces(True, False, True)) == [20, 20, 20]
    for at in range(3):
        logits = batch.streams[at].logits().copy()
        assert np.array_equal(logits, fill(batch.streams[3], TOKENS[at][:40]))


def test_a_token_s_companion_leaves_no_trace_in_the_stream_that_lent_its_cell(
    batch: LlamaStreams,
) -> None:
    assert batch.company  # of this model one row alone rounds otherwise
    fill(batch.streams[0], TOKENS[0][:100])
    fill(batch.streams[1], TOKENS[1][:50])
    fill(batch.streams[2], TOKENS[2][:512][:400])
    before = [batch.streams[index].export_state(0, (100, 0, 400)[index]) for index in (0, 2)]
    for token in range(20):
        batch.step([(1, token)])
    assert [stream.length for stream in batch.streams] == [100, 70, 400, 0]
    for index, state in zip((0, 2), before, strict=True):
        assert np.array_equal(batch.streams[index].export_state(0, (100, 0, 400)[index]), state)
    fill(batch.streams[0], (TOKENS[0] * 2)[:512])  # neighbours without a free cell
    fill(batch.streams[2], (TOKENS[2] * 2)[:512])
    batch.step([(1, 5)])
    assert batch.streams[1].length == 71
    assert np.isfinite(batch.streams[1].logits()).all()


def test_ranges_go_between_streams_and_contexts_of_their_own_and_go_on_bit_for_bit(
    engine: LlamaEngine, batch: LlamaStreams
) -> None:
    own = engine.new_context(512, "f16", "f16")
    fill(own, TOKENS[0][:300])
    source, taker = batch.streams[1], batch.streams[3]
    fill(source, TOKENS[0][:300])
    fill(batch.streams[2], TOKENS[2][:40])
    neighbour = batch.streams[2].export_state(0, 40)
    for begin, end in ((0, 1), (1, 130), (130, 300)):
        part = source.export_state(begin, end)
        assert np.array_equal(part, own.export_state(begin, end))
        assert taker.import_state(part, end)
    assert np.array_equal(batch.streams[2].export_state(0, 40), neighbour)
    own.trim(0)
    assert own.import_state(taker.export_state(0, 300), 300)
    assert batch.streams[0].copy_prefix_from(own, 257)
    assert np.array_equal(batch.streams[0].export_state(0, 257), own.export_state(0, 257))
    tail = TOKENS[1][:16]
    rows = []
    for context in (own, source, taker):
        context.evaluate(tail, 300, cancelled=never)
        rows.append(context.logits().copy())
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)  # the last layer's rounding
    assert np.array_equal(rows[1], rows[2])
    for context in (source, taker):
        assert np.array_equal(context.export_state(0, 316), own.export_state(0, 316))
    own.close()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each state that the engine gives or takes."""
    sizes: list[int] = []
    library = native.llama
    get, put = library.llama_state_seq_get_data, library.llama_state_seq_set_data

    def counted(call: Callable[..., int]) -> Callable[..., int]:
        def through(handle: object, data: object, size: int, sequence: int) -> int:
            sizes.append(size)
            return call(handle, data, size, sequence)

        return through

    monkeypatch.setattr(library, "llama_state_seq_get_data", counted(get))
    monkeypatch.setattr(library, "llama_state_seq_set_data", counted(put))
    return sizes


def test_taking_and_giving_a_stream_range_by_range_copies_it_a_few_times_however_many(
    batch: LlamaStreams, copied: list[int]
) -> None:
    source, taker = batch.streams[0], batch.streams[3]
    expected = fill(source, TOKENS[0][:400])
    bounds = list(range(0, 401, 16))
    parts = [source.export_state(begin, end) for begin, end in pairwise(bounds)]
    assert len(copied) == 1
    whole = copied[0]
    source.settle()
    copied.clear()
    for end, part in zip(bounds[1:], parts, strict=True):
        assert taker.import_state(part, end)
    taker.settle()
    assert sum(copied) < 2 * whole
    assert np.array_equal(taker.export_state(0, 400), source.export_state(0, 400))
    taker.trim(399)
    taker.evaluate(TOKENS[0][399:400], 399, cancelled=never)
    assert np.array_equal(taker.logits(), expected)


def test_what_came_in_is_there_whatever_is_done_next(batch: LlamaStreams) -> None:
    source, taker = batch.streams[1], batch.streams[2]
    fill(source, TOKENS[0][:100])
    parts = [(source.export_state(at, at + 20), at + 20) for at in range(0, 100, 20)]

    def given() -> None:
        taker.trim(0)
        for part, end in parts:
            assert taker.import_state(part, end)
        assert taker.length == 100

    given()
    taker.trim(50)  # within what came in
    assert np.array_equal(taker.export_state(0, 50), source.export_state(0, 50))
    given()
    batch.step([(3, 7)])  # it lends a cell
    assert taker.length == 100
    source.step(9, 100)
    given()
    taker.step(9, 100)
    assert np.array_equal(taker.logits(), source.logits())
    given()
    taker.close()
    fill(taker, TOKENS[1][:5])


def test_going_back_to_what_was_held_gives_the_engine_nothing_of_what_came_in(
    batch: LlamaStreams, copied: list[int]
) -> None:
    source, taker = batch.streams[0], batch.streams[2]
    fill(source, TOKENS[0][:80])
    expected = source.logits().copy()
    parts = [(source.export_state(at, at + 20), at + 20) for at in (20, 40)]
    source.settle()
    fill(taker, TOKENS[0][:20])
    for part, end in parts:
        assert taker.import_state(part, end)
    copied.clear()
    taker.trim(20)
    assert copied == []
    taker.evaluate(TOKENS[0][20:80], 20, cancelled=never)
    assert taker.length == 80
    assert int(taker.logits().argmax()) == int(expected.argmax())


def test_an_engine_that_does_not_take_back_what_was_held_ends_that_session_only(
    batch: LlamaStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, taker = batch.streams[1], batch.streams[2]
    fill(source, TOKENS[0][:100])
    for begin, end in ((0, 40), (40, 100)):
        assert taker.import_state(source.export_state(begin, end), end)
    monkeypatch.setattr(native.llama, "llama_state_seq_set_data", lambda *given: 0)
    with pytest.raises(SessionFatal):
        taker.evaluate([1], 100, cancelled=never)
    monkeypatch.undo()
    assert not batch.broken
    taker.close()
    fill(taker, TOKENS[0][:100])
    assert np.array_equal(taker.logits(), source.logits())


def test_bytes_that_are_not_of_this_place_are_refused_and_change_nothing(
    engine: LlamaEngine, batch: LlamaStreams
) -> None:
    source, taker = batch.streams[0], batch.streams[1]
    fill(source, TOKENS[0][:60])
    fill(taker, TOKENS[0][:20])
    held = taker.export_state(0, 20)
    part = source.export_state(20, 60)
    other = engine.new_context(512, "f32", "f32")
    fill(other, TOKENS[0][:60])
    for state, end in (
        (part, 61),
        (source.export_state(0, 60), 60),  # of other positions
        (part[:-1].copy(), 60),
        (part[:40].copy(), 60),
        (np.zeros(0, dtype=np.uint8), 60),
        (other.export_state(20, 60), 60),  # of another type
    ):
        assert not taker.import_state(state, end)
        assert np.array_equal(taker.export_state(0, 20), held)
    assert taker.import_state(part, 60)
    other.close()
    for begin, end in ((0, 61), (5, 5), (-1, 3)):
        with pytest.raises(InvalidRequest):
            source.export_state(begin, end)


def test_going_back_is_exact_and_touches_no_neighbour(batch: LlamaStreams) -> None:
    fill(batch.streams[0], TOKENS[0][:200])
    state = batch.streams[0].export_state(0, 200)
    stream = batch.streams[1]
    expected = fill(stream, TOKENS[1][:90])
    stream.evaluate(TOKENS[2][:100], 90, cancelled=never)
    stream.trim(89)
    stream.evaluate(TOKENS[1][89:90], 89, cancelled=never)
    assert np.array_equal(stream.logits(), expected)
    stream.close()
    assert stream.length == 0
    assert np.array_equal(batch.streams[0].export_state(0, 200), state)


def test_a_cancel_within_a_prompt_keeps_whole_micro_batches_and_the_neighbours(
    batch: LlamaStreams,
) -> None:
    fill(batch.streams[0], TOKENS[0][:200])
    state = batch.streams[0].export_state(0, 200)
    seen = set()
    for polls in (0, 1, 40, 150, 400):
        left = polls

        def cancelled() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        stream = batch.streams[1]
        stream.trim(0)
        done = stream.evaluate(TOKENS[1][:400], 0, cancelled=cancelled)
        assert done == stream.length
        assert done % 64 == 0 or done == 400
        seen.add(done)
        stream.evaluate(TOKENS[1][done:400], done, cancelled=never)
        assert np.array_equal(stream.logits(), fill(batch.streams[2], TOKENS[1][:400]))
    assert len(seen) > 1
    assert np.array_equal(batch.streams[0].export_state(0, 200), state)


def test_what_would_end_the_process_is_refused_before(batch: LlamaStreams) -> None:
    stream = batch.streams[0]
    fill(stream, (TOKENS[0] * 2)[:511])
    with pytest.raises(ContextOverflow):
        stream.evaluate([1, 2], 511, cancelled=never)
    for token in (-1, 1 << 20):
        with pytest.raises(InvalidRequest):
            stream.step(token, 511)
    stream.step(1, 511)
    with pytest.raises(ContextOverflow):
        stream.step(1, 512)
    with pytest.raises(SessionFatal):
        stream.evaluate([1], 3, cancelled=never)
    with pytest.raises(SessionFatal):  # its own state only is in doubt
        stream.logits()
    fill(batch.streams[1], TOKENS[1][:4])
    stream.close()
    fill(stream, TOKENS[0][:4])


def test_an_engine_error_breaks_the_whole_batch(
    batch: LlamaStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(batch.streams[0], TOKENS[0][:4])
    monkeypatch.setattr(native.llama, "llama_decode", lambda handle, rows: -3)
    with pytest.raises(SessionFatal) as fatal:
        batch.step([(0, 1), (1, 1)])
    assert fatal.value.metadata["code"] == "-3"
    monkeypatch.undo()
    assert batch.broken
    for stream in batch.streams:
        with pytest.raises(SessionFatal):
            stream.evaluate([1], stream.length, cancelled=never)


def test_a_stream_that_holds_something_else_than_recorded_breaks_the_batch(
    batch: LlamaStreams,
) -> None:
    fill(batch.streams[0], TOKENS[0][:40])
    native.llama.llama_memory_seq_rm(batch.memory, 0, 20, -1)
    with pytest.raises(SessionFatal):
        batch.step([(0, 1), (1, 1)])
    assert batch.broken


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("gemma3", {}, "sliding window"),
        ("mamba", {}, "recurrent"),
        ("jamba", {}, "recurrent"),
        ("llama", {"flash_attn": True}, "flash attention"),
    ],
)
def test_models_whose_results_neighbours_could_change_are_refused(
    engine: LlamaEngine, load: Load, kind: str, more: dict[str, object], why: str
) -> None:
    capability = load(kind, **more).capabilities["layout.batched"]
    assert capability.startswith("no: ")
    assert why in capability
    with pytest.raises(UnsupportedFeature) as refused:
        engine.new_batch(4, 256, "f16", "f16", Gate())
    assert refused.value.metadata["capability"] == "layout.batched"


def test_streams_are_charged_what_the_engine_allocates(engine: LlamaEngine, load: Load) -> None:
    load("llama")
    own = engine.new_context(1000, "f16", "f16")
    batch = engine.new_batch(3, 1000, "f16", "f16", Gate())
    assert batch.window == own.window == 1024
    assert sum(stream.kv_bytes for stream in batch.streams) == 3 * own.kv_bytes
    assert sum(stream.compute_bytes for stream in batch.streams) > 0
    placed = sum(part.compute_bytes for stream in batch.streams for part in stream.placed)
    assert placed == sum(stream.compute_bytes for stream in batch.streams)
    for streams in (0, 65):
        with pytest.raises(InvalidRequest):
            engine.new_batch(streams, 256, "f16", "f16", Gate())
    with pytest.raises(InvalidRequest):
        engine.new_batch(2, 256, "f16", "q4_0", Gate())
    batch.close()
    batch.close()
    own.close()


def test_four_sessions_answer_together_what_each_answers_alone(folder: Path) -> None:
    path = tiny_models.llama(folder / "together.gguf")
    made = Rig(LlamaEngine(), request(path))
    made.open("a", "b", "c", "d", window=512)
    texts = {session: f"{session} says " * (3 + 20 * at) for at, session in enumerate("abcd")}
    how = options(30, temperature=0.9, seed=5)
    expected = {}
    for session, text in texts.items():
        op_id = made.send_turn(session, text, how=how)
        made.run()
        expected[session] = made.ids(op_id)
        assert len(expected[session]) > 3
        made.do(CloseOp(session_id=session, discard=True))
    made.open("a", "b", "c", "d", window=512)
    turns = {session: made.send_turn(session, text, how=how) for session, text in texts.items()}
    made.run()
    for session, op_id in turns.items():
        assert made.ids(op_id) == expected[session]
        statuses = [p for op, _, p in made.frames if op == op_id and isinstance(p, Status)]
        assert sum(status.prefilled for status in statuses) > 0
    again = {session: made.send_turn(session, text, how=how) for session, text in texts.items()}
    made.run()
    for session, op_id in again.items():
        assert made.ids(op_id) == expected[session]
        statuses = [p for op, _, p in made.frames if op == op_id and isinstance(p, Status)]
        assert sum(status.prefilled for status in statuses) == 1  # the last token, for its logits
    made.core.close()


def test_the_real_small_model_answers_in_a_batch_what_it_answers_in_a_context_of_its_own(
    demo_model: Path,
) -> None:
    made = Rig(LlamaEngine(), request(demo_model, threads=2))
    capability = made.frames[-1][2]
    assert isinstance(capability, LoadResult)
    assert "the same as in a context of its own" in capability.capabilities["layout.batched"]
    texts = {s: f"Tell me about the number {at} and why." for at, s in enumerate("abc")}
    how = options(8, temperature=0.0, top_logprobs=4)
    made.open("a", "b", "c", window=256, streams=3)
    made.open("own", layout="isolated", window=256)
    turns = {s: made.send_turn(s, text, how=how) for s, text in texts.items()}
    made.run()
    for session, op_id in turns.items():
        own = made.send_turn("own", texts[session], how=how)
        made.run()
        together, apart = (
            [p for op, _, p in made.frames if op == one and isinstance(p, ChunkOut)]
            for one in (op_id, own)
        )
        assert [c.logprobs for c in together] == [c.logprobs for c in apart]  # to the last bit
        assert made.ids(op_id) == made.ids(own)
    made.core.close()


async def test_a_worker_process_serves_turns_sent_at_once(folder: Path, tmp_path: Path) -> None:
    path = tiny_models.llama(folder / "process.gguf")
    how = options(60)
    how.ignore_eos = True
    async with kept(tmp_path, module="modeld.workers.llama") as running:
        call = running.keeper.call
        await running.keeper.ready(None)
        await call(1, request(path)).result()

        def turn(session: str, credit: int) -> Operation:
            asked = TurnOp(
                session_id=session, turn_id="t", prefix=raw(), suffix=raw(f"{session} " * 80),
                options=how,
            )  # fmt: skip
            return call(1, asked, credit=credit)

        async def open_(session: str) -> None:
            asked = OpenOp(
                session_id=session, prompt_format="raw", window=1024, k_type="f16", v_type="f16",
                kv_digest="kv", runtime_digest="rt", layout="batched", streams=4,
            )  # fmt: skip
            await call(1, asked).result()

        async def ids(operation: Operation) -> list[int]:
            found: list[int] = []
            while (payload := await operation.next()) is not None:
                found += payload.token_ids if isinstance(payload, ChunkOut) else []
            return found

        expected = {}
        for session in "abcd":
            await open_(session)
            expected[session] = await ids(turn(session, 1000))
            await call(1, CloseOp(session_id=session, discard=True)).result()
        for session in "abcd":
            await open_(session)
        together = {session: turn(session, 3 if session == "a" else 1000) for session in "abcd"}
        for session in "bcd":  # while the first one's reader takes nothing
            assert await ids(together[session]) == expected[session]
        assert not together["a"].ended
        again = turn("b", 1000)
        await again.next()
        again.cancel()
        final = await again.result()
        assert isinstance(final, FinalOut)
        together["a"].grant(1000)
        assert await ids(together["a"]) == expected["a"]
        assert await ids(turn("b", 1000)) == expected["b"]
        assert not running.deaths
