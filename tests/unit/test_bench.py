"""What the benchmark suite says about its numbers: statistics, verdicts, failures as rows."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import report
from bench.control import DecodeRun
from bench.runner import (
    TARGET_PAIRS,
    Book,
    Interval,
    Row,
    RunFailed,
    Spec,
    Target,
    bootstrap,
    differences,
    interleaved,
    ratios,
    tokens_a_second,
)
from bench.texts import CANDIDATES, Words, text

RATE = Spec("rate", "a rate", "product", "of its rate", Target("at least", 0.95))
DELAY = Spec("delay", "a delay", "product", "ms", Target("at most", 25.0))
samples = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=20)


@pytest.fixture
def book() -> Book:
    return Book(quiet=True)


# --- statistics ----------------------------------------------------------------------------------


@given(samples)
def test_the_interval_holds_the_median_and_stays_within_the_samples(values: list[float]) -> None:
    interval = bootstrap(values, resamples=200)
    assert interval.median == statistics.median(values)
    assert min(values) <= interval.low <= interval.median <= interval.high <= max(values)


def test_the_same_samples_give_the_same_interval() -> None:
    values = [10.0, 11.0, 9.0, 14.0, 10.5, 10.2, 9.8]
    assert bootstrap(values) == bootstrap(values)


def test_equal_samples_have_no_spread() -> None:
    assert bootstrap([3.0] * 15) == Interval(3.0, 3.0, 3.0)


def test_an_outlier_moves_neither_the_median_nor_the_interval_of_many() -> None:
    steady = [10.0 + i / 100 for i in range(15)]
    assert bootstrap([*steady[:-1], 1000.0]).high < 11.0


def test_ratios_and_differences_are_taken_pair_by_pair() -> None:
    # The machine halves its speed between the pairs; the ratio doesn't notice.
    assert ratios([10.0, 20.0], [5.0, 10.0]) == [2.0, 2.0]
    assert differences([10.0, 20.0], [8.0, 17.0]) == [2.0, 3.0]


def test_a_run_without_a_partner_is_no_pair() -> None:
    with pytest.raises(RunFailed, match="2 runs on one side, 1 on the other"):
        ratios([1.0, 2.0], [1.0])


def test_sides_alternate_which_goes_first() -> None:
    order = [name for _, name in interleaved(("a", "b", "c"), 3)]
    assert order == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]


# --- verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "interval", "met"),
    [
        (Target("at least", 0.95), Interval(0.97, 0.96, 0.98), True),
        (Target("at least", 0.95), Interval(0.94, 0.92, 0.95), True),
        (Target("at least", 0.95), Interval(0.94, 0.93, 0.949), False),
        (Target("at most", 25.0), Interval(20.0, 18.0, 30.0), True),
        (Target("at most", 25.0), Interval(26.0, 25.0, 27.0), True),
        (Target("at most", 25.0), Interval(26.0, 25.1, 27.0), False),
    ],
)
def test_a_target_is_met_if_the_interval_reaches_it(
    target: Target, interval: Interval, met: bool
) -> None:
    assert target.met_by(interval) is met


def test_a_verdict_on_too_few_runs_says_so(book: Book) -> None:
    assert book.record(DELAY, [20.0] * TARGET_PAIRS).verdict == "met"
    assert book.record(DELAY, [20.0] * 3).verdict == "met (3 runs)"
    assert book.record(DELAY, [30.0]).verdict == "missed (1 run)"


def test_the_worst_run_is_the_one_farthest_on_the_wrong_side(book: Book) -> None:
    assert book.record(RATE, [0.9, 0.97, 0.99]).worst == 0.9
    assert book.record(DELAY, [3.0, 90.0, 4.0]).worst == 90.0


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_decode_that_made_no_tokens_has_no_speed(tokens: int) -> None:
    run = DecodeRun(tokens=tokens, first_s=0.001, rest_s=0.0001, ids=())
    with pytest.raises(RunFailed, match=f"it made {tokens} tokens"):
        _ = run.ms_a_token


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (5, 0.0)])
def test_a_prefill_of_nothing_or_in_no_time_has_no_rate(tokens: int, seconds: float) -> None:
    with pytest.raises(RunFailed):
        tokens_a_second(tokens, seconds)


def test_a_run_without_tokens_is_a_failed_row_and_never_a_fast_one(book: Book) -> None:
    with book.expecting(RATE):
        book.record(RATE, [tokens_a_second(tokens, 0.5) for tokens in (10, 0, 12)])
    (row,) = book.rows
    assert (row.failed, row.verdict, row.interval) == (True, "failed", None)
    assert "it made 0 tokens" in row.error
    assert book.failed


def lose_the_daemon() -> None:
    raise ConnectionError("the daemon went away")


def test_a_failure_fails_what_it_kept_from_being_measured_and_nothing_else(book: Book) -> None:
    with book.expecting(DELAY, RATE):
        book.record(DELAY, [1.0] * TARGET_PAIRS)
        lose_the_daemon()
    assert [(row.spec.name, row.verdict) for row in book.rows] == [
        ("delay", "met"),
        ("rate", "failed"),
    ]
    assert book.rows[1].error == "ConnectionError: the daemon went away"


def test_a_row_that_was_forgotten_or_has_no_samples_is_a_failed_row(book: Book) -> None:
    with book.expecting(DELAY):
        pass
    with book.expecting(RATE):
        book.record(RATE, [])
    assert [row.verdict for row in book.rows] == ["failed", "failed"]


def test_what_breaks_outside_of_any_measurement_is_a_failed_row_too(book: Book) -> None:
    with book.case("decode"):
        lose_the_daemon()
    assert [(row.spec.name, row.verdict) for row in book.rows] == [("decode", "failed")]


def test_an_interrupt_is_not_swallowed(book: Book) -> None:
    with pytest.raises(KeyboardInterrupt), book.expecting(DELAY):
        raise KeyboardInterrupt


def test_a_missed_target_is_a_result_and_no_failure(book: Book) -> None:
    book.record(DELAY, [99.0] * TARGET_PAIRS)
    assert (book.rows[0].verdict, book.failed) == ("missed", False)


# --- texts and reports ---------------------------------------------------------------------------


def one_token_a_word(given: str) -> list[int]:
    return [CANDIDATES.index(word) for word in given.split()]


def test_a_text_has_exactly_the_tokens_asked_for_and_is_the_same_every_time() -> None:
    words = Words(one_token_a_word)
    drawn = words.draw(4000, 7)
    assert len(words.ids(drawn)) == 4000
    assert text(drawn) == text(words.draw(4000, 7))


def test_texts_of_other_numbers_share_no_prefix() -> None:
    words = Words(one_token_a_word)
    assert len({words.draw(26, number)[0] for number in range(100)}) == 100


def test_words_that_are_several_tokens_are_not_used() -> None:
    words = Words(lambda given: [1, 2] if given == " time" else one_token_a_word(given))
    assert "time" not in words.draw(5000, 1)


def test_a_report_holds_every_row_with_its_path_and_its_failures(tmp_path: Path) -> None:
    rows = [
        Row(RATE, (0.96, 0.97, 0.98), Interval(0.97, 0.96, 0.98), note="a | b"),
        Row(DELAY, error="RunFailed: it made 0 tokens"),
    ]
    markdown, data = report.write(tmp_path / "out", rows, {"label": "Quick run.", "python": "3"})
    lines = markdown.read_text().splitlines()
    assert "**Quick run.**" in lines
    assert (
        "| a rate | product | 0.970 [0.960, 0.980] of its rate | 0.960 | 3 | ≥ 0.95 "
        "| met (3 runs) | a \\| b |"
    ) in lines
    assert any("**failed** | RunFailed: it made 0 tokens" in line for line in lines)
    document = json.loads(data.read_text())
    assert document["rows"][0]["samples"] == [0.96, 0.97, 0.98]
    assert document["rows"][1]["error"] == "RunFailed: it made 0 tokens"


def test_a_later_run_replaces_only_what_it_measured(tmp_path: Path) -> None:
    one = Spec("one", "the one", "product", "ms", Target("at most", 5))
    two = Spec("two", "the other", "product", "ms")
    book = Book(quiet=True)
    book.record(one, [1.0, 2.0, 3.0], "first")

    def broken() -> None:
        raise RunFailed("no tokens")

    with book.expecting(two):
        broken()
    report.write(tmp_path, book.rows, {})
    later = Book(quiet=True)
    later.record(two, [7.0])
    rows = report.merged(tmp_path, later.rows)
    assert [row.spec.name for row in rows] == ["one", "two"]
    assert rows[0] == book.rows[0]
    assert not rows[1].failed
    assert rows[1].samples == (7.0,)
