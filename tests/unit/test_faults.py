from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modeld.workers import faults


@pytest.fixture(autouse=True)
def no_faults_afterwards() -> Iterator[None]:
    yield
    faults.load("")


def strikes(name: str) -> bool:
    try:
        faults.point(name)
    except faults.InjectedFault:
        return True
    return False


def test_nothing_strikes_unless_it_was_asked_for() -> None:
    faults.load("")
    assert not any(strikes(name) for name in faults.POINTS)


def test_a_fault_strikes_its_own_point_from_the_passage_named() -> None:
    faults.load("decode:after=3:raise")
    assert [strikes("decode") for _ in range(4)] == [False, False, True, True]
    assert not strikes("prefill")


def test_a_fault_may_strike_once_across_restarts(tmp_path: Path) -> None:
    text = f"load:raise:once={tmp_path / 'struck'}"
    faults.load(text)
    assert strikes("load")
    faults.load(text)  # as a fresh worker does
    assert not strikes("load")


@pytest.mark.parametrize(
    "text",
    ["nowhere:hang", "load", "load:explode", "load:kill=SIGFOO", "load:after=x:hang",
     "load:after=0:hang", "load:hang=1", "load:exit="],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_and_changes_nothing(text: str) -> None:
    faults.load("load:raise")
    with pytest.raises(faults.FaultSyntaxError):
        faults.load(text)
    assert strikes("load")
