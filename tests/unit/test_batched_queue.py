"""Who holds the slot where several may: batched sessions together, and all others by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeld.shared.errors import ModelBusy
from modeld.supervisor.queue import Hold, TurnQueue

STREAMS = 3


def queue_of(limit: int = 100) -> TurnQueue:
    return TurnQueue(limit, max_beside=STREAMS)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def start(queue: TurnQueue, session: str, **more: Any) -> asyncio.Task[Hold]:
    """Of a batched session, unless ``beside`` says otherwise."""
    given = {"operation": "turn", "beside": not more.get("exclusive", False), **more}
    return asyncio.create_task(queue.acquire(session=session, **given))


async def got(queue: TurnQueue, session: str, **more: Any) -> Hold:
    task = start(queue, session, **more)
    await settle()
    assert task.done(), f"{session} waits"
    return task.result()


async def waiting(queue: TurnQueue, session: str, **more: Any) -> asyncio.Task[Hold]:
    task = start(queue, session, **more)
    await settle()
    assert not task.done(), f"{session} doesn't wait"
    return task


async def test_batched_sessions_run_together_up_to_the_number_of_streams() -> None:
    queue = queue_of()
    holds = [await got(queue, name) for name in "abc"]
    view = queue.snapshot()
    assert (view.running, view.queued, view.holder_session) == (3, 0, "a")
    fourth = await waiting(queue, "d")
    holds[1].release()
    assert (await fourth).session == "d"
    assert queue.running() == {"a", "c", "d"}


async def test_a_question_goes_beside_all_streams_turns_and_behind_who_waits_for_them() -> None:
    queue = queue_of()
    turns = [await got(queue, name) for name in "abc"]
    (await got(queue, "", operation="tokenize")).release()
    isolated = await waiting(queue, "x", beside=False)
    question = await waiting(queue, "", operation="tokenize")
    for turn in turns:
        turn.release()
    await settle()
    assert isolated.done()
    assert not question.done()
    isolated.result().release()
    (await question).release()


async def test_one_session_does_one_thing_at_a_time_in_order_and_holds_nobody_up() -> None:
    queue = queue_of()
    first = await got(queue, "a")
    second = await waiting(queue, "a")
    third = await waiting(queue, "a")
    other = await got(queue, "b")  # passes who only waits for its own session
    first.release()
    await settle()
    assert second.done()
    assert not third.done()
    other.release()
    await settle()
    assert not third.done()
    second.result().release()
    (await third).release()


@pytest.mark.parametrize("kind", [{"exclusive": True}, {"beside": False}])
async def test_what_runs_alone_waits_for_all_of_them_and_is_not_overtaken(
    kind: dict[str, bool],
) -> None:
    queue = queue_of()
    holds = [await got(queue, name) for name in "ab"]
    alone = await waiting(queue, "x", **kind)
    late = await waiting(queue, "c")  # although a stream is free
    for hold in holds:
        assert not alone.done()
        hold.release()
        await settle()
    assert alone.done()
    assert not late.done()
    again = await waiting(queue, "a")
    alone.result().release()
    assert {(await late).session, (await again).session} == {"c", "a"}


async def test_an_isolated_turn_comes_before_the_next_one_of_each_batched_session() -> None:
    queue = queue_of()
    holds = [await got(queue, name) for name in "ab"]
    next_a = await waiting(queue, "a")
    isolated = await waiting(queue, "x", beside=False)
    next_b = await waiting(queue, "b")
    holds[0].release()
    await settle()
    assert next_a.done()  # it came before the isolated one
    holds[1].release()
    await settle()
    assert not next_b.done()
    next_a.result().release()
    await settle()
    assert isolated.done()
    assert not next_b.done()
    isolated.result().release()
    assert (await next_b).session == "b"


async def test_others_go_on_while_a_turn_is_kept_between_its_parts() -> None:
    queue = queue_of()
    first = await got(queue, "a", turn_id="t")
    first.park("t", 60)
    other = await got(queue, "b")
    stranger = await waiting(queue, "a", turn_id="u")  # another turn of the same session
    isolated = await waiting(queue, "x", beside=False)
    other.release()
    await settle()
    assert not isolated.done()  # the turn isn't over
    part = await got(queue, "a", turn_id="t")
    assert part.resumed
    part.park("t", 60)
    early = await got(queue, "a", turn_id="t")
    early.release()
    (await stranger).release()
    (await isolated).release()


async def test_no_wait_is_told_at_once_and_goes_beside_who_runs() -> None:
    queue = queue_of()
    await got(queue, "a")
    assert (await got(queue, "b", no_wait=True)).session == "b"
    for session, beside in (("a", True), ("x", False)):
        with pytest.raises(ModelBusy) as refused:
            await queue.acquire(session=session, operation="turn", beside=beside, no_wait=True)
        assert refused.value.metadata["holder_operation"] == "turn"


async def test_who_is_to_try_again_is_told_of_turns_that_run_side_by_side() -> None:
    """A turn takes a second, as far as the queue knows: of three at once, one ends each third."""
    queue = queue_of()

    async def told(session: str, **more: Any) -> float:
        with pytest.raises(ModelBusy) as refused:
            await got(queue, session, no_wait=True, **more)
        assert refused.value.retry_after_s is not None
        return refused.value.retry_after_s

    holds = [await got(queue, name) for name in "abc"]
    assert await told("d") == pytest.approx(1 / 3)
    assert await told("a") == pytest.approx(1.0)  # its own turn must end
    assert await told("x", beside=False) == pytest.approx(1.0)  # all of them must
    tasks = [await waiting(queue, name) for name in "defg"]
    assert await told("h") == pytest.approx(5 / 3)
    assert await told("x", beside=False) == pytest.approx(1 + 4 / 3)
    tasks.append(await waiting(queue, "y", beside=False))
    assert await told("h") == pytest.approx(5 / 3 + 1)
    with pytest.raises(ModelBusy) as late:
        await queue.acquire(
            session="h", operation="turn", beside=True, deadline=asyncio.get_running_loop().time()
        )
    assert late.value.retry_after_s == pytest.approx(5 / 3 + 1)
    for task in tasks:
        task.cancel()
    for hold in holds:
        hold.release()


async def test_a_drain_waits_until_the_last_of_them_is_over() -> None:
    queue = queue_of()
    holds = [await got(queue, name) for name in "abc"]
    quiet = asyncio.create_task(queue.quiet())
    for hold in holds:
        await settle()
        assert not quiet.done()
        hold.release()
    await quiet


async def test_a_cancelled_isolated_turn_lets_those_behind_it_join() -> None:
    queue = queue_of()
    await got(queue, "a")
    isolated = await waiting(queue, "x", beside=False)
    behind = await waiting(queue, "b")
    isolated.cancel()
    assert (await behind).session == "b"


# --- random histories ------------------------------------------------------------------------

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["beside", "beside", "plain", "exclusive", "release", "cancel", "park", "resume"]
        ),
        st.integers(0, 4),
        st.booleans(),
    ),
    max_size=60,
)


def run(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story())


def check(queue: TurnQueue) -> None:
    running = list(queue._running)
    together = [hold for hold in running if hold.beside]
    assert len(together) in (0, len(running))
    assert len(running) <= (STREAMS if together else 1)
    assert len({hold.session for hold in running}) == len(running)
    assert queue._queued == len(queue._in_order())


@settings(max_examples=300, deadline=None)
@given(actions=ACTIONS)
def test_no_history_mixes_layouts_or_loses_a_wakeup(
    actions: list[tuple[str, int, bool]],
) -> None:
    async def story() -> None:
        queue = queue_of(1000)
        tasks: list[asyncio.Task[Hold]] = []
        held: list[Hold] = []

        def collect() -> None:
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled():
                    held.append(task.result())
            held[:] = [hold for hold in held if hold in queue._running]

        for action, number, settles in actions:
            collect()
            if action in ("beside", "resume"):
                turn_id = "t" if action == "resume" else ""
                tasks.append(start(queue, f"b{number}", turn_id=turn_id))
            elif action == "plain":
                tasks.append(start(queue, f"i{number}", beside=False))
            elif action == "exclusive":
                tasks.append(start(queue, "", exclusive=True))
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif action == "release" and held:
                held[number % len(held)].release()
            elif action == "park" and held:
                held[number % len(held)].park("t", 1000)
            if settles:
                await settle()
            check(queue)
        # From here on everybody only releases: whoever was not cancelled must be served.
        for _ in range(2 * len(actions) + 4):
            await settle()
            collect()
            check(queue)
            queue.release_parked()
            for hold in held:
                hold.release()
        await settle()
        collect()
        assert tasks == []
        assert queue.snapshot().queued == 0
        assert queue._ring == {}

    run(story)


@settings(max_examples=100, deadline=None)
@given(kinds=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_who_keeps_asking_never_starves_another(kinds: list[tuple[int, bool]]) -> None:
    """A session that asks again as soon as it was served is served once before any other is
    served for the first time, at most.
    """

    async def story() -> None:
        queue = queue_of(1000)
        greedy = [await got(queue, f"greedy{n}") for n in range(STREAMS)]
        again = [start(queue, hold.session) for hold in greedy]
        await settle()
        tasks = [start(queue, f"s{n}-{at}", beside=at) for n, at in kinds]
        served = dict.fromkeys((hold.session for hold in greedy), 0)
        held = list(greedy)
        for _ in range(10 * len(tasks) + 10):
            await settle()
            for index, task in enumerate(again):
                if task.done():
                    hold = task.result()
                    held.append(hold)
                    if not all(one.done() for one in tasks):
                        served[hold.session] += 1
                    again[index] = start(queue, hold.session)
            held += [task.result() for task in tasks if task.done()]
            held = [hold for hold in held if hold in queue._running]
            if all(task.done() for task in tasks):
                break
            held[0].release()
        assert all(task.done() for task in tasks)
        rounds = max((sum(name == kind for name in kinds) for kind in kinds), default=1)
        assert max(served.values()) <= rounds + 1
        for task in again:
            task.cancel()

    run(story)
