"""Who holds the slot: one holder, fair turns, prompt answers, and no trace of who went away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeld.shared.errors import ModelBusy, SessionFatal, ShuttingDown
from modeld.supervisor.queue import Hold, TurnQueue


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def start(queue: TurnQueue, session: str, operation: str = "turn", **more) -> asyncio.Task[Hold]:
    return asyncio.create_task(queue.acquire(session=session, operation=operation, **more))


async def waiting(queue: TurnQueue, session: str, *args, **more) -> asyncio.Task[Hold]:
    task = start(queue, session, *args, **more)
    await settle()
    assert not task.done()
    return task


async def order_of(
    queue: TurnQueue, first: Hold, tasks: dict[str, asyncio.Task[Hold]]
) -> list[str]:
    """Release one hold after the other; the names in the order in which they were served."""
    served: list[str] = []
    hold = first
    while len(served) < len(tasks):
        hold.release()
        await settle()
        done = [name for name, task in tasks.items() if task.done() and name not in served]
        assert len(done) == 1
        served += done
        hold = tasks[done[0]].result()
    hold.release()
    return served


async def test_free_slot_is_given_at_once_and_again_after_release() -> None:
    queue = TurnQueue(4)
    with await queue.acquire(session="a", operation="turn") as hold:
        assert (hold.waited_s, hold.resumed) == (0.0, False)
        view = queue.snapshot()
        assert (view.running, view.queued, view.holder_operation) == (1, 0, "turn")
        assert view.holder_session == "a"
    assert queue.snapshot().holder_operation == ""
    hold.release()  # twice is once
    assert (await queue.acquire(session="b", operation="turn")).session == "b"


async def test_sessions_take_turns_and_each_keeps_its_order() -> None:
    queue = TurnQueue(10)
    first = await queue.acquire(session="x", operation="turn")
    tasks = {}
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        tasks[name] = await waiting(queue, name[0])
    assert await order_of(queue, first, tasks) == ["a1", "b1", "c1", "a2", "b2", "a3"]


async def test_newcomers_do_not_overtake_who_waits() -> None:
    queue = TurnQueue(100)
    hold = await queue.acquire(session="busy", operation="turn")
    again = await waiting(queue, "busy")
    later = [await waiting(queue, f"new{n}") for n in range(5)]
    hold.release()
    await settle()
    assert again.done()
    assert not any(task.done() for task in later)
    for task in later:
        task.cancel()


async def test_exclusive_operation_waits_for_all_and_is_not_overtaken() -> None:
    queue = TurnQueue(10, max_running=2)
    one = await queue.acquire(session="a", operation="turn")
    two = await queue.acquire(session="b", operation="turn")
    load = await waiting(queue, "", "load", exclusive=True)
    late = await waiting(queue, "c")
    one.release()
    await settle()
    assert not load.done()  # b runs still
    assert not late.done()  # although there is room, the load goes first
    two.release()
    await settle()
    assert load.done()
    assert not late.done()
    load.result().release()
    assert (await late).operation == "turn"


async def test_no_wait_is_told_who_holds_the_slot() -> None:
    queue = TurnQueue(4)
    await queue.acquire(session="a", operation="turn")
    task = await waiting(queue, "b")
    with pytest.raises(ModelBusy) as caught:
        await queue.acquire(session="c", operation="turn", no_wait=True)
    metadata = caught.value.metadata
    assert (metadata["position"], metadata["queued"]) == ("2", "1")
    assert metadata["holder_operation"] == "turn"
    assert float(metadata["holder_age_seconds"]) >= 0
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    task.cancel()


async def test_full_queue_refuses_with_its_limit() -> None:
    queue = TurnQueue(1)
    hold = await queue.acquire(session="a", operation="turn")
    task = await waiting(queue, "b")
    with pytest.raises(ModelBusy, match="full at 1") as caught:
        await queue.acquire(session="c", operation="turn")
    assert caught.value.metadata["queue_limit"] == "1"
    hold.release()
    (await task).release()


async def test_deadline_is_answered_before_it_passes_and_leaves_no_trace() -> None:
    queue = TurnQueue(4, deadline_margin_s=0.02)
    loop = asyncio.get_running_loop()
    hold = await queue.acquire(session="a", operation="turn")
    deadline = loop.time() + 0.1
    with pytest.raises(ModelBusy, match="deadline") as caught:
        await queue.acquire(session="b", operation="turn", deadline=deadline)
    assert loop.time() >= deadline - 0.021
    assert caught.value.metadata["position"] == "1"
    assert queue.snapshot().queued == 0
    with pytest.raises(ModelBusy):
        await queue.acquire(session="b", operation="turn", deadline=loop.time() - 1)
    hold.release()
    assert await queue.acquire(session="b", operation="turn", deadline=loop.time() - 1)


async def test_cancelled_waiter_leaves_no_trace() -> None:
    queue = TurnQueue(2)
    hold = await queue.acquire(session="a", operation="turn")
    gone = await waiting(queue, "b")
    kept = await waiting(queue, "c")
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert queue.snapshot().queued == 1
    hold.release()
    await settle()
    assert kept.done()


async def test_slot_released_in_the_moment_of_a_cancel_goes_to_the_next() -> None:
    queue = TurnQueue(4)
    hold = await queue.acquire(session="a", operation="turn")
    gone = await waiting(queue, "b")
    other = await waiting(queue, "c")
    gone.cancel()  # its task has not run yet
    hold.release()
    assert (await other).session == "c"
    assert gone.cancelled()


async def test_cancelled_in_the_moment_of_being_served_passes_the_slot_on() -> None:
    queue = TurnQueue(4)
    hold = await queue.acquire(session="a", operation="turn")
    served = await waiting(queue, "b")
    other = await waiting(queue, "c")
    hold.release()  # b has the slot, but its task has not run yet
    served.cancel()
    await asyncio.gather(served, return_exceptions=True)
    assert (await other).session == "c"


async def test_cancelled_exclusive_operation_lets_the_others_go() -> None:
    queue = TurnQueue(4, max_running=2)
    await queue.acquire(session="a", operation="turn")
    load = await waiting(queue, "", "load", exclusive=True)
    other = await waiting(queue, "b")
    load.cancel()
    assert (await other).session == "b"


async def test_positions_are_told_at_the_start_and_when_they_change() -> None:
    queue = TurnQueue(4)
    told: list[tuple[int, str]] = []
    hold = await queue.acquire(session="a", operation="load")
    ahead = await waiting(queue, "b")
    task = await waiting(queue, "c", on_position=lambda p, who, age: told.append((p, who)))
    assert told == [(2, "load")]
    await waiting(queue, "d")
    assert len(told) == 1
    hold.release()
    (await ahead).release()
    await task
    assert told == [(2, "load"), (1, "turn")]


async def test_failing_position_callback_harms_nobody() -> None:
    queue = TurnQueue(4)
    hold = await queue.acquire(session="a", operation="turn")

    def broken(*_: object) -> None:
        raise RuntimeError("no")

    task = await waiting(queue, "b", on_position=broken)
    hold.release()
    assert (await task).session == "b"


async def test_worker_death_fails_every_waiter_with_an_error_of_its_own() -> None:
    queue = TurnQueue(4)
    hold = await queue.acquire(session="a", operation="turn")
    tasks = [await waiting(queue, name) for name in "bcd"]
    assert queue.fail_waiters(lambda: SessionFatal("died")) == 3
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, SessionFatal) for error in errors)
    assert len({id(error) for error in errors}) == 3
    hold.release()
    assert await queue.acquire(session="e", operation="turn")


async def test_closed_queue_lets_nobody_in_but_holders_finish() -> None:
    queue = TurnQueue(4)
    hold = await queue.acquire(session="a", operation="turn")
    task = await waiting(queue, "b")
    queue.close(lambda: ShuttingDown("draining"))
    with pytest.raises(ShuttingDown):
        await task
    with pytest.raises(ShuttingDown):
        await queue.acquire(session="c", operation="turn")
    hold.park("t", 60)  # nothing could come any more
    assert queue.snapshot().running == 0


async def test_parked_turn_keeps_the_slot_for_its_next_part_only() -> None:
    queue = TurnQueue(4)
    first = await queue.acquire(session="a", operation="ensure_prefix", turn_id="t")
    first.park("t", 60)
    other = await waiting(queue, "b")
    stranger = await waiting(queue, "c", turn_id="t")  # another session's id opens nothing
    assert queue.snapshot().holder_parked
    part = await queue.acquire(session="a", operation="decode", turn_id="t")
    assert part.resumed
    assert part.since == first.since
    assert queue.snapshot().holder_operation == "decode"
    first.release()  # the earlier part's hold is spent
    await settle()
    assert not other.done()
    part.release()
    (await other).release()
    (await stranger).release()


async def test_parked_turn_gives_way_when_its_idle_time_is_over() -> None:
    queue = TurnQueue(4)
    hold = await queue.acquire(session="a", operation="ensure_prefix", turn_id="t")
    hold.park("t", 0.02)
    assert (await queue.acquire(session="b", operation="turn")).session == "b"


async def test_next_part_that_came_early_takes_over_when_the_turn_is_parked() -> None:
    queue = TurnQueue(4)
    with await queue.acquire(session="a", operation="ensure_prefix", turn_id="t") as hold:
        other = await waiting(queue, "b")
        early = await waiting(queue, "a", "decode", turn_id="t")
        hold.park("t", 60)
    part = await early
    assert part.resumed
    assert not other.done()
    part.release()
    assert (await other).session == "b"


async def test_closing_a_session_gives_up_its_parked_turn() -> None:
    queue = TurnQueue(4)
    (await queue.acquire(session="a", operation="x", turn_id="t")).park("t", 60)
    queue.release_parked("b")
    assert queue.snapshot().running == 1
    queue.release_parked("a")
    assert queue.snapshot().running == 0


# --- random histories ------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "exclusive", "release", "cancel", "park", "resume", "settle"]),
        st.integers(0, 3),
    ),
    max_size=60,
)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS, max_running=st.integers(1, 2))
def test_no_history_gives_two_holders_or_loses_a_wakeup(
    actions: list[tuple[str, int]], max_running: int
) -> None:
    async def story() -> None:
        queue = TurnQueue(1000, max_running=max_running)
        tasks: list[asyncio.Task[Hold]] = []
        held: list[Hold] = []

        def check() -> None:
            running = list(queue._running)
            assert len(running) <= max_running
            assert len(running) == 1 or not any(hold.exclusive for hold in running)
            assert queue._queued == len(queue._in_order())

        def collect() -> None:
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled():
                    held.append(task.result())
            held[:] = [hold for hold in held if hold in queue._running]

        for action, number in actions:
            collect()
            if action in ("acquire", "exclusive", "resume"):
                turn_id = "t" if action == "resume" else ""
                exclusive = action == "exclusive"
                tasks.append(start(queue, f"s{number}", exclusive=exclusive, turn_id=turn_id))
            elif action == "settle":
                await settle()
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif action == "release" and held:
                held[number % len(held)].release()
            elif action == "park" and held:
                held[number % len(held)].park("t", 1000)
            check()
        # From here on everybody only releases: whoever was not cancelled must be served.
        for _ in range(4 * len(actions) + 4):
            await settle()
            collect()
            check()
            queue.release_parked()
            for hold in held:
                hold.release()
        await settle()
        collect()
        assert tasks == []
        assert queue.snapshot().queued == 0
        assert queue._ring == {}

    run(story)


@settings(max_examples=50, deadline=None)
@given(wants=st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_no_session_is_served_twice_while_another_waits_for_its_first(wants: list[int]) -> None:
    async def story() -> None:
        queue = TurnQueue(1000)
        hold = await queue.acquire(session="first", operation="turn")
        tasks = {f"{s}.{n}": await waiting(queue, f"s{s}") for n, s in enumerate(wants)}
        served = await order_of(queue, hold, tasks)
        counts = dict.fromkeys(set(wants), 0)
        left = {s: wants.count(s) for s in counts}
        for name in served:
            session = int(name.split(".")[0])
            counts[session] += 1
            left[session] -= 1
            waiting_ones = [counts[s] for s in counts if left[s] > 0]
            assert all(counts[session] <= count + 1 for count in waiting_ones)
        numbers = {s: [int(n.split(".")[1]) for n in served if n.startswith(f"{s}.")] for s in left}
        assert all(order == sorted(order) for order in numbers.values())

    run(story)
