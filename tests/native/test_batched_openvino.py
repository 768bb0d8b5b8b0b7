"""Sequences of the paged executor in one inference: what neighbours do changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.errors import (
    ContextOverflow,
    InsufficientMemory,
    InvalidRequest,
    SessionFatal,
    UnsupportedFeature,
)
from modeld.shared.messages import CloseOp, LoadOp, LoadResult, Status
from modeld.workers.batching import Gate
from modeld.workers.engine import EngineContext
from modeld.workers.openvino.blocks import BLOCK_TOKENS, BlockPool
from modeld.workers.openvino.engine import EXECUTOR_VARIABLE, OpenVinoEngine
from modeld.workers.openvino.graph import compile_paged, read_model, to_paged
from modeld.workers.openvino.paged import PagedModel
from modeld.workers.openvino.streams import PagedStreams
from tests.support.batch_rig import Rig
from tests.support.core_harness import options
from tests.support.openvino_models import converted, tiny_gguf

TOKENS = [[(7 * at + 31 * s + 11) % 250 for at in range(600)] for s in range(4)]
LENGTHS = (5, 40, 2, 300)


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("ir")
    return converted(tiny_gguf(base / "tiny.gguf"), base / "tiny")


def load(folder: Path, kv_type: str) -> PagedModel:
    model = read_model(folder)
    selects = to_paged(model)
    compiled = compile_paged(model, selects, device="CPU", kv_type=kv_type, threads=2)
    return PagedModel(compiled, BlockPool(compiled.ports, 256))


@pytest.fixture(scope="module", params=("f16", "f32", "u8"))
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[PagedModel]:
    made = load(folder, request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def f16(folder: Path) -> Iterator[PagedModel]:
    made = load(folder, "f16")
    yield made
    made.close()


def batch_of(model: PagedModel, streams: int = 4, window: int = 640) -> PagedStreams:
    return PagedStreams(model, streams, window, Gate(), lambda: 1 << 40, company=True)


@pytest.fixture
def batch(f16: PagedModel) -> Iterator[PagedStreams]:
    made = batch_of(f16)
    yield made
    made.close()


def fill(context: EngineContext, tokens: list[int]) -> np.ndarray:
    context.trim(0)
    assert context.evaluate(tokens, 0, cancelled=never) == len(tokens)
    return context.logits().copy()


def stepped(batch: PagedStreams, group: tuple[int, ...], count: int = 4) -> list[np.ndarray]:
    """Stream 1's logits after its prompt and after each token, with a group that goes along."""
    for index in group:
        fill(batch.streams[index], TOKENS[index][: LENGTHS[index]])
    rows = [batch.streams[1].logits().copy()]
    for step in range(count):
        batch.step([(index, TOKENS[index][LENGTHS[index] + step]) for index in group])
        rows.append(batch.streams[1].logits().copy())
    return rows


def test_a_stream_s_logits_are_the_same_alone_and_with_any_others(model: PagedModel) -> None:
    batch = batch_of(model)
    expected = stepped(batch, (1,))
    for group in ((0, 1), (1, 3), (0, 1, 3), (0, 1, 2, 3)):
        for row, other in zip(stepped(batch, group), expected, strict=True):
            assert np.array_equal(row, other)
    batch.close()


def test_a_prompt_is_what_it_is_in_a_context_of_its_own_however_it_is_cut(
    f16: PagedModel, batch: PagedStreams
) -> None:
    own = f16.new_context(640, lambda: 1 << 40)
    expected = fill(own, TOKENS[0][:301])
    for ends in ((301,), (64, 128, 300, 301), (1, 2, 301), (63, 127, 301)):
        stream, begin = batch.streams[2], 0
        stream.trim(0)
        for end in ends:
            batch.step([(0, 7), (3, 9)])  # neighbours that go on meanwhile
            stream.evaluate(TOKENS[0][begin:end], begin, cancelled=never)
            begin = end
        assert np.array_equal(stream.logits(), expected)
    assert np.array_equal(batch.streams[2].export_state(0, 301), own.export_state(0, 301))
    own.close()


def test_streams_and_contexts_of_their_own_share_blocks_until_one_writes(
    f16: PagedModel, batch: PagedStreams
) -> None:
    own = f16.new_context(640, lambda: 1 << 40)
    fill(own, TOKENS[0][:100])
    taken = f16.pool.taken
    for stream in batch.streams:
        assert stream.copy_prefix_from(own, 100)
    assert f16.pool.taken == taken
    before = own.export_state(0, 100)
    rows = []
    for group in ((1, 2), (0, 1, 2, 3)):  # all write into the block that they share
        for stream in batch.streams:
            stream.trim(0)
            stream.copy_prefix_from(own, 100)
        batch.step([(index, 20 + index) for index in group])
        rows.append([batch.streams[index].logits().copy() for index in (1, 2)])
    assert np.array_equal(rows[0][0], rows[1][0])
    assert np.array_equal(rows[0][1], rows[1][1])
    assert not np.array_equal(rows[0][0], rows[0][1])
    assert np.array_equal(own.export_state(0, 100), before)
    own.close()


@pytest.mark.parametrize("polls", [0, 1, 2, 3])
def test_a_cancel_within_a_prompt_leaves_the_others_and_later_batches_whole(
    batch: PagedStreams, polls: int
) -> None:
    expected = stepped(batch, (1, 2))
    for index in (1, 2):
        fill(batch.streams[index], TOKENS[index][: LENGTHS[index]])
    left = polls

    def cancelled() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    for step in range(4):
        left = polls
        stream = batch.streams[3]
        stream.trim(0)
        done = stream.evaluate(TOKENS[3][:600], 0, cancelled=cancelled)
        assert done == len(stream)
        assert done in (0, 256, 512, 600)
        batch.step([(index, TOKENS[index][LENGTHS[index] + step]) for index in (1, 2)])
        assert np.array_equal(batch.streams[1].logits(), expected[step + 1])


def test_a_failed_inference_breaks_the_whole_batch_and_no_context_beside_it(
    f16: PagedModel, batch: PagedStreams
) -> None:
    own = f16.new_context(640, lambda: 1 << 40)
    expected = fill(own, TOKENS[0][:50])
    fill(batch.streams[0], TOKENS[0][:50])
    batch._request = object()  # which no inference can be asked of
    with pytest.raises(SessionFatal) as fatal:
        batch.step([(0, 1), (1, 1)])
    assert fatal.value.metadata["cause"] == "engine"
    for stream in batch.streams:
        with pytest.raises(SessionFatal):
            stream.evaluate([1], len(stream), cancelled=never)
    own.trim(49)
    own.evaluate(TOKENS[0][49:50], 49, cancelled=never)
    assert np.array_equal(own.logits(), expected)
    own.close()


def test_what_the_engine_would_not_check_is_refused_before(batch: PagedStreams) -> None:
    stream = batch.streams[0]
    fill(stream, (TOKENS[0] * 2)[:639])
    with pytest.raises(ContextOverflow):
        stream.evaluate([1, 2], 639, cancelled=never)
    for token in (-1, 1 << 20):
        with pytest.raises(InvalidRequest):
            stream.step(token, 639)
        with pytest.raises(InvalidRequest):
            stream.evaluate([token], 639, cancelled=never)
    stream.step(1, 639)
    with pytest.raises(ContextOverflow):
        stream.step(1, 640)
    with pytest.raises(SessionFatal):
        stream.evaluate([1], 3, cancelled=never)


def test_blocks_are_reserved_for_all_streams_and_given_back_with_them(f16: PagedModel) -> None:
    reserved, taken = f16.pool.reserved, f16.pool.taken
    made = batch_of(f16, 3, 1000)
    assert f16.pool.reserved - reserved == 3 * 32
    assert sum(stream.kv_bytes for stream in made.streams) == 96 * f16.pool.block_bytes
    fill(made.streams[0], TOKENS[0][:200])
    made.streams[0].close()  # emptied, not freed
    assert (f16.pool.reserved - reserved, f16.pool.taken) == (96, taken)
    fill(made.streams[0], TOKENS[0][:200])
    made.close()
    made.close()
    assert (f16.pool.reserved, f16.pool.taken) == (reserved, taken)
    with pytest.raises(InsufficientMemory):
        batch_of(f16, 5, 64 * BLOCK_TOKENS)
    assert f16.pool.reserved == reserved


def request(folder: Path) -> LoadOp:
    return LoadOp(path=str(folder), model="m", digest="", threads=2, max_contexts=6)


def test_four_sessions_answer_together_what_each_answers_alone(folder: Path) -> None:
    made = Rig(OpenVinoEngine(), request(folder))
    loaded = made.frames[-1][2]
    assert isinstance(loaded, LoadResult)
    assert loaded.capabilities["layout.batched"].startswith("yes: ")
    assert ": exact" in loaded.capabilities["layout.batched"]
    assert "in a context of its own they differ" in loaded.capabilities["layout.batched"]
    made.open("a", "b", "c", "d", window=512)
    texts = {session: f"{session} says " * (3 + 20 * at) for at, session in enumerate("abcd")}
    how = options(24, temperature=0.9, seed=5)
    expected = {}
    for session, text in texts.items():
        op_id = made.send_turn(session, text, how=how)
        made.run()
        expected[session] = made.ids(op_id)
        assert len(expected[session]) > 3
        made.do(CloseOp(session_id=session, discard=True))
    made.open("a", "b", "c", "d", window=512)
    for prefilled in (False, True):
        turns = {s: made.send_turn(s, text, how=how) for s, text in texts.items()}
        made.run()
        for session, op_id in turns.items():
            assert made.ids(op_id) == expected[session]
            statuses = [p for op, _, p in made.frames if op == op_id and isinstance(p, Status)]
            assert (sum(status.prefilled for status in statuses) == 1) == prefilled
    made.core.close()


def test_a_model_that_genai_s_pipeline_runs_is_refused_by_capability(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXECUTOR_VARIABLE, "pipeline")
    engine = OpenVinoEngine()
    loaded = engine.load(request(folder), lambda stage, fraction: None, never)
    assert loaded.executor == "pipeline"
    assert not loaded.capabilities["layout.batched"].startswith("yes")
    with pytest.raises(UnsupportedFeature) as refused:
        engine.new_batch(4, 256, "f16", "f16", Gate())
    assert refused.value.metadata["capability"] == "layout.batched"
    engine.unload()


def test_scaled_keys_are_said_to_be_inexact(folder: Path) -> None:
    engine = OpenVinoEngine()
    asked = request(folder)
    asked.k_type = asked.v_type = "u8"
    loaded = engine.load(asked, lambda stage, fraction: None, never)
    assert loaded.capabilities["layout.batched"].endswith("not exact")
    assert ": exact" not in loaded.capabilities["layout.batched"]
    for streams in (0, 65):
        with pytest.raises(InvalidRequest):
            engine.new_batch(streams, 256, "u8", "u8", Gate())
    engine.unload()
