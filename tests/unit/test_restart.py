from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modeld.supervisor.restart import EXIT_CANNOT_BOOT, GiveUp, RestartPolicy, Restarts, Retry

NEVER_GIVE_UP = RestartPolicy(jitter=0.0, max_deaths=1000)


def test_the_first_restart_is_at_once_and_later_ones_double_up_to_the_cap() -> None:
    restarts = Restarts(NEVER_GIVE_UP, lambda: 0.0)
    delays = [restarts.after_death(now, 0.1, -9) for now in range(9)]
    assert delays == [Retry(d) for d in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)]


def test_a_stable_life_makes_the_next_restart_immediate_again() -> None:
    restarts = Restarts(NEVER_GIVE_UP, lambda: 0.0)
    for now in range(4):
        restarts.after_death(now, 0.1, -11)
    assert restarts.after_death(100.0, NEVER_GIVE_UP.stable_after_s, -11) == Retry(0.0)
    assert restarts.streak == 1


def test_a_crash_loop_gives_up_and_clearing_it_starts_over() -> None:
    restarts = Restarts(RestartPolicy(jitter=0.0, max_deaths=2), lambda: 0.0)
    assert restarts.after_death(0.0, 0.0, 1) == Retry(0.0)
    assert restarts.after_death(1.0, 0.0, 1) == Retry(0.5)
    verdict = restarts.after_death(2.0, 0.0, 1)
    assert isinstance(verdict, GiveUp)
    assert "3 times" in verdict.text
    restarts.clear()
    assert restarts.after_death(3.0, 0.0, 1) == Retry(0.0)


def test_deaths_outside_the_window_do_not_count_as_a_loop() -> None:
    restarts = Restarts(RestartPolicy(max_deaths=1, window_s=10.0), lambda: 0.0)
    for now in range(0, 100, 10):
        assert isinstance(restarts.after_death(float(now), 0.0, 1), Retry)


def test_a_worker_that_cannot_boot_is_given_up_at_once() -> None:
    verdict = Restarts(NEVER_GIVE_UP, lambda: 0.0).after_death(0.0, 0.1, EXIT_CANNOT_BOOT)
    assert isinstance(verdict, GiveUp)


@given(st.floats(0, 1, exclude_max=True), st.integers(2, 2000))
def test_jitter_only_lengthens_a_delay_and_never_beyond_its_share(jitter: float, n: int) -> None:
    policy = RestartPolicy(max_deaths=10_000, jitter=0.2)
    plain, shaken = Restarts(policy, lambda: 0.0), Restarts(policy, lambda: jitter)
    for now in range(n):
        least = plain.after_death(now, 0.0, 1)
        most = shaken.after_death(now, 0.0, 1)
    assert isinstance(least, Retry)
    assert isinstance(most, Retry)
    assert least.delay_s <= most.delay_s <= least.delay_s * 1.2
    assert least.delay_s <= policy.cap_s
