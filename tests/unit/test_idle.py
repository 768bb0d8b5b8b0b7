"""Idle release, on a clock made of numbers."""

from __future__ import annotations

import pytest

from modeld.supervisor.idle import IdleTimer


def test_release_is_due_after_the_idle_time_and_not_before() -> None:
    timer = IdleTimer(300)
    timer.touch(1000)
    assert timer.remaining_s(1000) == 300
    assert not timer.due(1299.9)
    assert timer.due(1300)


def test_running_work_is_never_idle_however_long() -> None:
    timer = IdleTimer(10)
    timer.began()
    timer.began()
    timer.ended(100)
    assert timer.remaining_s(10_000) is None
    timer.ended(10_000)
    assert not timer.due(10_009)
    assert timer.due(10_010)


def test_zero_means_never_and_nothing_resident_is_never_due() -> None:
    never = IdleTimer(0)
    never.touch(0)
    assert not never.due(1e9)
    timer = IdleTimer(5)
    assert not timer.due(1e9)
    timer.touch(0)
    timer.clear()
    assert timer.remaining_s(1e9) is None


def test_an_end_without_a_beginning_is_an_error() -> None:
    with pytest.raises(ValueError, match="never began"):
        IdleTimer(5).ended(1)
