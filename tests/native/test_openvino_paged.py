"""The paged executor on the real small model: what a sequence's KV can do, bit by bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from modeld.shared.errors import ContextOverflow, InsufficientMemory, InvalidRequest, SessionFatal
from modeld.shared.host_memory import anonymous_bytes
from modeld.shared.ir_facts import ir_facts
from modeld.shared.planner.openvino_kv import kv_bytes
from modeld.workers.openvino.blocks import BLOCK_TOKENS, BlockPool
from modeld.workers.openvino.graph import compile_paged, read_model, to_paged
from modeld.workers.openvino.paged import PagedContext, PagedModel
from modeld.workers.openvino.proof import paged_loop_works
from tests.support.openvino_models import converted

TYPES = ("f32", "f16", "u8", "u4")
EXACT = ("f32", "f16")
TOKENS = 200


def never() -> bool:
    return False


@pytest.fixture(scope="module")
def folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(demo_model, tmp_path_factory.mktemp("ir") / "smollm2")


def load(folder: Path, kv_type: str, blocks: int = 512) -> PagedModel:
    model = read_model(folder)
    selects = to_paged(model)
    compiled = compile_paged(model, selects, device="CPU", kv_type=kv_type, threads=2)
    return PagedModel(compiled, BlockPool(compiled.ports, blocks))


@pytest.fixture(scope="module", params=("f16", "u8"))
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[PagedModel]:
    made = load(folder, request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def f16(folder: Path) -> Iterator[PagedModel]:
    made = load(folder, "f16")
    yield made
    made.close()


@pytest.fixture
def context(model: PagedModel) -> Iterator[PagedContext]:
    made = model.new_context(1024, lambda: 1 << 40)
    yield made
    made.close()


def tokens(count: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(100, 40_000, count)]


def filled(model: PagedModel, ids: list[int], *ends: int) -> PagedContext:
    """A sequence that holds ``ids``, evaluated up to each of ``ends`` and to the end."""
    made = model.new_context(len(ids) + 128, lambda: 1 << 40)
    begin = 0
    for end in (*ends, len(ids)):
        assert made.evaluate(ids[begin:end], begin, cancelled=never) == end - begin
        begin = end
    return made


def test_the_block_loop_agrees_with_a_direct_computation() -> None:
    assert paged_loop_works().works, paged_loop_works().reason


@pytest.mark.parametrize("kv_type", TYPES)
def test_kv_is_made_in_the_type_asked_for_at_the_bytes_planned(kv_type: str, folder: Path) -> None:
    model = load(folder, kv_type, blocks=64)
    try:
        assert (model.compiled.k_type, model.compiled.v_type) == (kv_type, kv_type)
        planned = kv_bytes(ir_facts(folder).layers, 1000, kv_type, kv_type)
        context = model.new_context(1000, lambda: 1 << 40)
        assert (context.window, context.kv_bytes) == (1024, planned)
        allocated = sum(tensor.byte_size for tensor in model.pool.tensors.values())
        assert allocated == 64 * model.pool.block_bytes == 2 * planned
        ids = tokens(90)
        context.evaluate(ids, 0, cancelled=never)
        state = context.export_state(0, 90)
        assert state.nbytes == kv_bytes(ir_facts(folder).layers, 90, kv_type, kv_type)
        expected = context.logits().copy()
        context.trim(64)
        context.evaluate(ids[64:], 64, cancelled=never)
        if kv_type in EXACT:
            assert np.array_equal(context.logits(), expected)
        context.trim(0)
        assert context.import_state(state, 90)
        assert np.array_equal(context.export_state(0, 90), state)
    finally:
        model.close()


@pytest.mark.parametrize("ends", [(1,), (199,), (31, 32, 33), (64, 65, 66), (100, 101), (7, 190)])
def test_how_a_prompt_is_split_changes_nothing_where_that_is_promised(
    model: PagedModel, ends: tuple[int, ...]
) -> None:
    ids = tokens(TOKENS)
    whole, split = filled(model, ids), filled(model, ids, *ends)
    try:
        same = np.array_equal(whole.logits(), split.logits())
        if model.compiled.k_type in EXACT:
            assert model.exact
            assert same
            assert np.array_equal(whole.export_state(0, 192), split.export_state(0, 192))
        else:  # its scales cover blocks: not promised
            assert not model.exact
    finally:
        whole.close()
        split.close()


@pytest.mark.parametrize("keep", [0, 1, 31, 32, 33, 150, 199])
def test_a_removed_tail_leaves_nothing_behind(model: PagedModel, keep: int) -> None:
    if not model.exact and keep % BLOCK_TOKENS:
        keep -= keep % BLOCK_TOKENS  # within a block its scales remember what was removed
    ids, other = tokens(TOKENS), tokens(90, seed=2)
    trimmed = filled(model, ids)
    fresh = filled(model, ids[:keep] + other, *([keep] if keep else []))
    try:
        trimmed.trim(keep)
        trimmed.evaluate(other, keep, cancelled=never)
        assert np.array_equal(trimmed.logits(), fresh.logits())
    finally:
        trimmed.close()
        fresh.close()


def test_a_whole_sequence_goes_out_and_into_a_fresh_model_bit_for_bit(
    model: PagedModel, folder: Path
) -> None:
    ids, tail = tokens(TOKENS), tokens(20, seed=3)
    source = filled(model, ids)
    state = source.export_state(0, TOKENS)
    source.evaluate(tail, TOKENS, cancelled=never)
    other = load(folder, model.compiled.k_type, blocks=64)
    try:
        before = filled(other, tokens(70, seed=9))  # so that it lies in other blocks
        target = other.new_context(512, lambda: 1 << 40)
        assert target.import_state(state, TOKENS)
        assert np.array_equal(target.export_state(0, TOKENS), state)
        target.evaluate(tail, TOKENS, cancelled=never)
        assert np.array_equal(target.logits(), source.logits())
        before.close()
    finally:
        source.close()
        other.close()


def test_blocks_return_after_the_survivors_were_evaluated_again(model: PagedModel) -> None:
    ids, tail = tokens(320), tokens(8, seed=4)
    live = filled(model, ids)
    middle, rest = live.export_state(128, 256), live.export_state(256, 320)
    untouched = filled(model, ids)
    try:
        live.trim(128)
        live.evaluate(ids[256:], 128, cancelled=never)  # the survivors, at new positions
        live.step(tail[0], 192)
        live.trim(128)
        assert live.import_state(middle, 256)
        assert live.import_state(rest, 320)
        assert np.array_equal(live.export_state(0, 320), untouched.export_state(0, 320))
        live.evaluate(tail, 320, cancelled=never)
        untouched.evaluate(tail, 320, cancelled=never)
        assert np.array_equal(live.logits(), untouched.logits())
    finally:
        live.close()
        untouched.close()


def test_a_branch_shares_blocks_and_neither_hurts_the_other(model: PagedModel) -> None:
    ids = tokens(TOKENS)
    trunk = filled(model, ids)
    taken = model.pool.taken
    branch = model.new_context(512, lambda: 1 << 40)
    reference = filled(model, ids)
    try:
        assert branch.copy_prefix_from(trunk, TOKENS)
        assert model.pool.taken == taken + 7  # the reference's own; the branch has none yet
        here, there = tokens(50, seed=5), tokens(50, seed=6)
        branch.evaluate(here, TOKENS, cancelled=never)
        trunk.evaluate(there, TOKENS, cancelled=never)
        assert branch.export_state(0, 192).tobytes() == trunk.export_state(0, 192).tobytes()
        reference.evaluate(here, TOKENS, cancelled=never)
        assert np.array_equal(branch.logits(), reference.logits())
        trunk.close()
        reference.trim(TOKENS)
        reference.evaluate(there, TOKENS, cancelled=never)
        branch.trim(TOKENS)
        branch.evaluate(there, TOKENS, cancelled=never)
        assert np.array_equal(branch.logits(), reference.logits())
    finally:
        for one in (trunk, branch, reference):
            one.close()
    assert model.pool.taken == 1  # the scratch block


def test_neighbours_change_nothing(model: PagedModel) -> None:
    ids = tokens(100)
    alone = filled(model, ids)
    expected = alone.logits().copy()
    alone.close()
    first = filled(model, ids[:60])
    neighbour = filled(model, tokens(150, seed=8))
    try:
        neighbour.step(5, 150)
        first.evaluate(ids[60:], 60, cancelled=never)
        again = filled(model, ids, 60)
        assert np.array_equal(first.logits(), again.logits())
        if model.exact:
            assert np.array_equal(first.logits(), expected)
        again.close()
    finally:
        first.close()
        neighbour.close()


def test_logits_stay_a_sequences_own_while_others_run(context: PagedContext) -> None:
    context.evaluate(tokens(10), 0, cancelled=never)
    before = context.logits().copy()
    other = context._model.new_context(64, lambda: 1 << 40)
    other.evaluate(tokens(20, seed=7), 0, cancelled=never)
    other.close()
    assert np.array_equal(context.logits(), before)


def test_a_cancel_in_a_prefill_keeps_whole_chunks_and_the_sequence_usable(f16: PagedModel) -> None:
    ids = tokens(2000)
    stopped = f16.new_context(2048, lambda: 1 << 40)
    deadline = threading.Event()
    threading.Timer(0.4, deadline.set).start()
    try:
        done = stopped.evaluate(ids, 0, cancelled=deadline.is_set)
        assert 0 <= done < 2000
        assert done % f16.chunk == 0
        stopped.evaluate(ids[done:], done, cancelled=never)
        whole = filled(f16, ids)
        assert np.array_equal(stopped.logits(), whole.logits())
        whole.close()
    finally:
        stopped.close()


def test_other_threads_run_while_a_prompt_is_evaluated(f16: PagedModel) -> None:
    beats, stop = 0, threading.Event()

    def beat() -> None:
        nonlocal beats
        while not stop.is_set():
            beats += 1
            time.sleep(0.001)

    beating = threading.Thread(target=beat)
    beating.start()
    whole = filled(f16, tokens(1500))
    stop.set()
    beating.join()
    whole.close()
    assert beats > 20


def test_what_the_engine_would_swallow_is_refused(context: PagedContext) -> None:
    width = context._model.compiled.vocabulary
    for bad in (-1, width, 2**40):
        with pytest.raises(InvalidRequest) as refused:
            context.evaluate([5, bad], 0, cancelled=never)
        assert refused.value.metadata["field"] == "token"
        with pytest.raises(InvalidRequest):
            context.step(bad, 0)
    with pytest.raises(ContextOverflow):
        context.evaluate(tokens(1025), 0, cancelled=never)
    with pytest.raises(SessionFatal):
        context.evaluate([5], 3, cancelled=never)
    with pytest.raises(SessionFatal):
        context.logits()
    with pytest.raises(InvalidRequest):
        context.export_state(0, 32)
    assert context.evaluate([5, 6], 0, cancelled=never) == 2
    with pytest.raises(InvalidRequest):
        context.export_state(1, 2)
    assert not context.import_state(np.zeros(3, np.uint8), 32)


def test_a_sequence_may_fill_its_window_to_the_last_token(model: PagedModel) -> None:
    ids = tokens(64)
    full = model.new_context(64, lambda: 1 << 40)
    try:
        assert full.evaluate(ids[:63], 0, cancelled=never) == 63
        assert full.evaluate(ids[63:], 63, cancelled=never) == 1  # its companion has no cell
        whole = filled(model, ids)
        if model.exact:
            assert np.array_equal(full.logits(), whole.logits())
        whole.close()
        with pytest.raises(ContextOverflow):
            full.step(1, 64)
    finally:
        full.close()


def test_memory_is_reserved_first_touched_with_use_and_given_back(f16: PagedModel) -> None:
    import os

    def held() -> int:
        return anonymous_bytes(os.getpid()) or 0

    # As long as what follows: the engine's own memory grows with what it attends to, and stays.
    warm = f16.new_context(4000, lambda: 1 << 40)
    warm.evaluate(tokens(2000), 0, cancelled=never)
    warm.close()
    before = held()
    big = f16.new_context(4000, lambda: 1 << 40)
    opened = held()
    assert opened - before < big.kv_bytes // 20
    assert f16.pool.promised_bytes >= big.kv_bytes - f16.pool.block_bytes
    big.evaluate(tokens(2000), 0, cancelled=never)
    used = held()
    assert used - opened > 0.45 * big.kv_bytes
    big.close()
    assert used - held() > 0.45 * big.kv_bytes
    assert held() - before < 0.1 * big.kv_bytes


def test_more_blocks_than_there_are_is_refused_with_the_numbers(folder: Path) -> None:
    small = load(folder, "f16", blocks=10)
    try:
        with pytest.raises(InsufficientMemory) as refused:
            small.new_context(320, lambda: 1 << 40)
        assert refused.value.metadata["needed_blocks"] == "10"
        assert refused.value.metadata["free_blocks"] == "9"
        kept = small.new_context(288, lambda: 1 << 40)
        assert kept.evaluate(tokens(288), 0, cancelled=never) == 288
    finally:
        small.close()


def test_a_copy_is_refused_where_there_is_no_memory_for_it(model: PagedModel) -> None:
    poor = model.new_context(64, lambda: 100)
    try:
        poor.evaluate(tokens(40), 0, cancelled=never)
        with pytest.raises(InsufficientMemory):
            poor.export_state(0, 40)
    finally:
        poor.close()
