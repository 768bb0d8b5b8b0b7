"""Sessions over GenAI's pipeline: the same contract, with what it can't do refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modeld.shared.errors import UnsupportedFeature
from modeld.shared.messages import LoadOp, LoadResult, OpenOp, OpenResult, Status
from modeld.workers.core import SessionCore
from modeld.workers.openvino import paged_served
from modeld.workers.openvino.engine import EXECUTOR_VARIABLE, OpenVinoEngine
from modeld.workers.openvino.graph import NotPaged
from tests.support.core_harness import FakeOp, Harness, options, raw
from tests.support.openvino_models import tiny_ir

TEXT = "".join(f"The {number}th lighthouse stands on a rock. " for number in range(12))


class PipelineHarness(Harness):
    """A real engine in the place of the fake one."""

    def __init__(self, folder: Path) -> None:
        self.core = SessionCore(OpenVinoEngine())
        self.turns = 0
        load = LoadOp(
            path=str(folder), model="m", digest="d", k_type="f32", v_type="f32", window=1024,
            max_contexts=4, threads=2, quality=True,
        )  # fmt: skip
        loaded = self.run(load)
        assert isinstance(loaded, LoadResult)
        self.result = loaded

    def open_session(self, session_id: str = "a", window: int = 1024) -> OpenResult:
        result = self.run(
            OpenOp(
                session_id=session_id,
                prompt_format="raw",
                window=window,
                k_type="f32",
                v_type="f32",
                kv_digest="kv",
                runtime_digest="rt",
            )
        )
        assert isinstance(result, OpenResult)
        return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_ir(tmp_path_factory.mktemp("sessions") / "ir")


@pytest.fixture
def harness(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipelineHarness]:
    monkeypatch.setenv(EXECUTOR_VARIABLE, "pipeline")
    harness = PipelineHarness(folder)
    harness.open_session()
    yield harness
    harness.core.close()


def test_the_load_says_which_executor_serves_and_why(harness: PipelineHarness) -> None:
    result = harness.result
    assert result.executor == "pipeline"
    assert EXECUTOR_VARIABLE in result.executor_reason
    assert result.quality is None  # no logits, so no margins to compare
    assert result.longest_gap_s["evaluate"] >= 1.0
    assert result.capabilities["tail_removal"].startswith("no: ")
    assert result.capabilities["decode.logit_bias"].startswith("no: ")


def test_the_numbers_of_a_turn_add_up(harness: PipelineHarness) -> None:
    cold = harness.ensure(raw(TEXT))
    assert (cold.reused, cold.prefilled, cold.miss_reason) == (0, cold.prefix, "COLD")
    again = harness.ensure(raw(TEXT))
    assert (again.reused, again.prefilled, again.miss_reason) == (cold.prefix - 1, 1, "NONE")
    op = FakeOp()
    final = harness.turn(raw(TEXT), raw("And then the keeper"), options(20), op=op)
    prefix, suffix = op.of(Status)
    assert prefix.reused + prefix.prefilled == prefix.prefix
    assert suffix.reused + suffix.prefilled >= suffix.suffix
    assert not prefix.reused_lower_bound
    assert not suffix.reused_lower_bound
    total = prefix.prefix + suffix.suffix
    assert (final.stop_reason, final.tokens, len(op.ids)) == ("length", 20, 20)
    assert final.resident == total + 19  # the last token is sampled, not evaluated
    assert final.prefilled >= 1
    explained = harness.explain()
    assert explained.resident == final.resident
    assert explained.counters["generated_tokens"] == 20


def test_an_answer_continues_where_it_stopped(harness: PipelineHarness) -> None:
    whole, first, second = FakeOp(), FakeOp(), FakeOp()
    harness.turn(raw(TEXT), raw("Once"), options(24), op=whole)
    harness.turn(raw(TEXT), raw("Once"), options(10), op=first)
    harness.decode(options(14), op=second)
    assert first.ids + second.ids == whole.ids


def test_a_stop_sequence_ends_the_answer_and_what_it_showed_is_resident(
    harness: PipelineHarness,
) -> None:
    op = FakeOp()
    harness.turn(raw(TEXT), raw("Once"), options(24), op=op)
    stop = op.text[8:11]
    stopped = FakeOp()
    final = harness.turn(raw(TEXT), raw("Once"), options(24, stop=[stop]), op=stopped)
    assert final.stop_reason == "stop_sequence"
    assert stopped.text == op.text[: op.text.index(stop)]
    assert final.tokens < 24
    # Another turn goes on as if nothing had been thrown away.
    after = FakeOp()
    harness.turn(raw(TEXT), raw("Once"), options(24), op=after)
    assert after.ids == op.ids


def test_cancelling_leaves_exact_numbers_and_the_same_answers(harness: PipelineHarness) -> None:
    reference = FakeOp()
    harness.turn(raw(TEXT), raw("Once"), options(16), op=reference)
    harness.ensure(raw("x"))
    status = harness.ensure(raw("y" + TEXT), op=FakeOp(cancel_at=3))
    assert 0 < status.resident < status.prefix
    assert status.reused + status.prefilled == status.resident
    done = harness.ensure(raw("y" + TEXT))
    assert done.resident == done.prefix
    cancelled = FakeOp(cancel_at=8)
    final = harness.turn(raw(TEXT), raw("Once"), options(64), op=cancelled)
    assert final.stop_reason == "cancelled"
    assert cancelled.ids == reference.ids[: len(cancelled.ids)]
    again = FakeOp()
    harness.turn(raw(TEXT), raw("Once"), options(16), op=again)
    assert again.ids == reference.ids


def test_what_the_engine_cannot_do_is_refused_before_anything_changes(
    harness: PipelineHarness,
) -> None:
    harness.ensure(raw(TEXT))
    before = harness.explain()
    for bad in ({"logit_bias": {3: 1.0}}, {"typical_p": 0.5, "temperature": 1.0}):
        with pytest.raises(UnsupportedFeature) as refused:
            harness.turn(raw("other"), raw("text"), options(4, **bad))
        assert refused.value.metadata["capability"].startswith("decode.")
    with pytest.raises(UnsupportedFeature):
        harness.turn(raw("other"), raw("text"), options(4, top_logprobs=2))
    assert harness.explain() == before


def test_a_full_window_ends_the_answer_and_says_so(harness: PipelineHarness) -> None:
    harness.open_session("small", window=96)
    op = FakeOp()
    final = harness.turn(raw(TEXT[:60]), raw("Once"), options(0), "small", op=op)
    assert final.stop_reason == "context_full"
    assert (final.resident, final.available) == (96, 0)
    status = op.of(Status)[-1]
    assert final.tokens == 96 - status.resident + 1


def test_a_second_session_finds_the_first_ones_prefix_without_a_copy(
    harness: PipelineHarness,
) -> None:
    first = FakeOp()
    harness.turn(raw(TEXT), raw("Once"), options(12), op=first)
    harness.open_session("b")  # the cache grows, and is empty
    measured = harness.ensure(raw(TEXT))
    assert (measured.reused, measured.miss_reason) == (0, "RECLAIMED")
    second = FakeOp()
    harness.turn(raw(TEXT), raw("Once"), options(12), "b", op=second)
    prefix = second.of(Status)[0]
    assert prefix.reused > 0
    assert prefix.reused + prefix.prefilled == prefix.prefix
    assert second.ids == first.ids


def test_a_model_that_cannot_be_driven_by_blocks_is_served_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_paged(model: object) -> bool:
        raise NotPaged("it keeps state of its own")

    monkeypatch.setattr(paged_served, "to_paged", to_paged)
    harness = PipelineHarness(folder)
    try:
        assert harness.result.executor == "pipeline"
        assert "it keeps state of its own" in harness.result.executor_reason
        harness.open_session()
        assert harness.turn(raw(TEXT), raw("Once"), options(4)).tokens == 4
    finally:
        harness.core.close()
