"""The greedy probe: deterministic, honest about failures, and never left behind."""

from __future__ import annotations

import numpy as np
import pytest

from modeld.shared.errors import ModelLoadFailed, ModelNotActive
from modeld.shared.messages import LoadOp, LoadResult, OpenOp, Progress, QualityOut
from modeld.workers.core import SessionCore
from modeld.workers.quality import PROMPT, STEPS, best, greedy_probe
from tests.support.core_harness import FakeOp
from tests.support.fake_engine import FakeContext, FakeEngine


def never() -> bool:
    return False


def probe(engine: FakeEngine) -> QualityOut:
    sampled = greedy_probe(engine, lambda stage, fraction: None, never)
    assert sampled is not None
    return sampled


def by_hand(engine: FakeEngine) -> tuple[list[int], list[float]]:
    """The reference: every step from the whole row, in a context of the test's own."""
    context = FakeContext(engine, 4096, 2)
    prompt = engine.tokenizer.encode(PROMPT)
    context.evaluate(prompt, 0, cancelled=never)
    ids: list[int] = []
    margins: list[float] = []
    for step in range(STEPS):
        row = sorted(((float(v), -t) for t, v in enumerate(context.logits())), reverse=True)
        ids.append(-row[0][1])
        margins.append(row[0][0] - row[1][0])
        context.step(ids[-1], len(prompt) + step)
    return ids, margins


def test_it_reports_the_likeliest_tokens_and_their_margins() -> None:
    engine = FakeEngine(end_bias=-100.0)
    told = probe(engine)
    ids, margins = by_hand(FakeEngine(end_bias=-100.0))
    assert told.prompt_ids == engine.tokenizer.encode(PROMPT)
    assert told.ids == ids
    assert len(ids) == STEPS
    assert told.margins == pytest.approx(margins)
    assert min(told.margins) > 0
    assert told.seconds >= 0


def test_it_is_the_same_every_time_and_another_model_answers_otherwise() -> None:
    first, again, other = FakeEngine(), FakeEngine(), FakeEngine()
    other.table = other.table[::-1].copy()
    assert (probe(first).ids, probe(first).margins) == (probe(again).ids, probe(again).margins)
    assert probe(other).ids != probe(first).ids


def test_the_prompt_begins_as_the_model_wants_it() -> None:
    engine = FakeEngine(add_bos=True)
    assert probe(engine).prompt_ids[0] == engine.tokenizer.bos
    assert probe(FakeEngine()).prompt_ids[0] != engine.tokenizer.bos


def test_it_ends_with_an_end_of_generation_token() -> None:
    engine = FakeEngine(end_bias=1000.0)
    told = probe(engine)
    assert len(told.ids) == len(told.margins) == 1
    assert told.ids[0] in engine.tokenizer.end_of_generation


def test_ties_go_to_the_lowest_id_with_no_margin() -> None:
    assert best(np.array([0.0, 3.0, 1.0, 3.0], dtype=np.float32)) == (1, 0.0)
    assert best(np.array([0.5, 3.0, 1.0], dtype=np.float32)) == (1, 2.0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_a_failed_load(broken: float) -> None:
    with pytest.raises(ModelLoadFailed, match="not finite"):
        best(np.array([0.0, broken, 1.0], dtype=np.float32))


def test_its_context_is_closed_whatever_happens() -> None:
    engine = FakeEngine()
    probe(engine)
    assert engine.cells == 0
    engine.fail_after = 0
    with pytest.raises(ModelLoadFailed, match="decode failed"):
        probe(engine)
    assert engine.cells == 0


# --- in a load ---------------------------------------------------------------------------------


def load_op(quality: bool = True) -> LoadOp:
    return LoadOp(path="m", model="m", digest="d", quality=quality)


def test_a_load_that_asks_for_it_answers_with_it_and_says_what_it_does_meanwhile() -> None:
    engine, op = FakeEngine(end_bias=-100.0), FakeOp()
    result = SessionCore(engine).handle(load_op(), op)
    assert isinstance(result, LoadResult)
    assert result.quality is not None
    assert result.quality.ids == probe(FakeEngine(end_bias=-100.0)).ids
    told = [progress.fraction for progress in op.of(Progress) if progress.stage == "certifying"]
    assert told[0] == 0.0
    assert told[-1] == 1.0
    # Every poll inside an evaluation counts as life, so that a slow model isn't taken for hung.
    assert op.beats > STEPS + len(op.of(Progress)) / 2
    assert engine.cells == 0


def test_a_load_that_does_not_ask_does_not_pay() -> None:
    engine = FakeEngine()
    result = SessionCore(engine).handle(load_op(quality=False), FakeOp())
    assert isinstance(result, LoadResult)
    assert result.quality is None
    assert engine.evaluated == 0


@pytest.mark.parametrize("cancel_at", [0, 5, 20])
def test_a_cancelled_probe_leaves_nothing_loaded(cancel_at: int) -> None:
    engine = FakeEngine(end_bias=-100.0)
    core = SessionCore(engine)
    with pytest.raises(ModelLoadFailed) as refused:
        core.handle(load_op(), FakeOp(cancel_at=cancel_at))
    assert refused.value.metadata["cause"] == "cancelled"
    assert_nothing_loaded(core, engine)


def test_a_model_that_does_not_compute_is_not_loaded() -> None:
    engine = FakeEngine()
    engine.fail_after = 1
    core = SessionCore(engine)
    with pytest.raises(ModelLoadFailed) as refused:
        core.handle(load_op(), FakeOp())
    assert refused.value.metadata["cause"] == "quality_probe"
    assert_nothing_loaded(core, engine)
    assert isinstance(core.handle(load_op(), FakeOp()), LoadResult)


def assert_nothing_loaded(core: SessionCore, engine: FakeEngine) -> None:
    assert not engine.loaded
    assert engine.cells == 0
    opened = OpenOp(
        session_id="a",
        prompt_format="raw",
        window=64,
        k_type="f16",
        v_type="f16",
        kv_digest="",
        runtime_digest="",
    )
    with pytest.raises(ModelNotActive):
        core.handle(opened, FakeOp())
