"""A killed worker: how soon it is seen, callers are answered, and a fresh one is ready."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.daemon import MODEL, Daemon
from bench.engine_control import load_request
from bench.keeping import KeptWorker
from bench.lab import Lab, now
from bench.runner import RunFailed, Spec, Target, require
from modeld.client import (
    ClientError,
    Event,
    GenerationStale,
    ModeldError,
    Session,
    SessionFatal,
    SlotState,
)

WAITERS = 3  # callers in the queue, beside the one that runs
WINDOW = 1024  # tokens
WAIT_S = 30.0

SEEN = Spec(
    "death.seen",
    "SIGKILL to the keeper's on_death",
    "microbenchmark",
    "ms",
    Target("at most", 5.0),
)
EVENT = Spec("death.event", "SIGKILL to the new generation's event at a client", "product", "ms")
ANSWERED = Spec(
    "death.answered",
    f"SIGKILL to the last of {WAITERS + 1} callers' typed error",
    "product",
    "ms",
    Target("at most", 50.0),
)
READY = Spec(
    "death.ready",
    "SIGKILL to a fresh worker, IDLE in Status",
    "product",
    "ms",
    Target("at most", 1000.0),
)


@dataclass
class Answers:
    """When each caller's error came, and which it was. Written by the callers' threads."""

    at_s: list[float] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    streaming: threading.Event = field(default_factory=threading.Event)

    def call(self, session: Session) -> None:
        try:
            for _ in session.turn(" one", " two", ignore_eos=True).chunks():
                self.streaming.set()
        except (ModeldError, ClientError) as error:
            self.at_s.append(now())
            self.errors.append(error)


@dataclass
class Watch:
    """Events with the times of their arrival."""

    events: list[tuple[float, Event]] = field(default_factory=list)

    def follow(self, daemon: Daemon) -> None:
        try:
            for event in daemon.client.watch_events():
                self.events.append((now(), event))
        except (ModeldError, ClientError):
            pass  # the daemon ended

    def first(self, after_s: float, kind: str, state: str = "") -> float | None:
        return next(
            (
                at_s
                for at_s, event in list(self.events)
                if at_s >= after_s and event.kind == kind and state in ("", event.state)
            ),
            None,
        )


def run(lab: Lab) -> None:
    repetitions = lab.plan.pairs
    with lab.book.expecting(SEEN):
        lab.book.say("killing a worker behind the keeper")
        seen_ms = asyncio.run(_seen_ms(lab, repetitions))
        lab.book.record(SEEN, seen_ms, "llama worker with a model and a context")
    with lab.book.expecting(EVENT, ANSWERED, READY):
        lab.book.say("killing a worker behind a daemon")
        deaths = [_one_death(lab) for _ in range(repetitions)]
        note = "a fresh daemon each time: always the first death"
        lab.book.record(EVENT, [d[0] for d in deaths], "made durable before it is sent")
        lab.book.record(ANSWERED, [d[1] for d in deaths], "one decoding, the others in the queue")
        lab.book.record(READY, [d[2] for d in deaths], note)


async def _seen_ms(lab: Lab, repetitions: int) -> list[float]:
    died_s: list[float] = []
    worker = KeptWorker(
        lab.folder / "keeper", "modeld.workers.llama", lambda death: died_s.append(now())
    )
    samples = []
    await worker.start()
    try:
        for number in range(repetitions):
            await worker.keeper.ready(None)
            await worker.load(load_request(lab.engine), WINDOW)
            pid = worker.keeper.pid
            require(bool(pid), "there is no worker")
            killed_s = now()
            os.kill(pid or 0, signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                # A future would be set by the same callback; its wake-up isn't what is measured.
                while len(died_s) == number:  # noqa: ASYNC110
                    await asyncio.sleep(0.0005)
            samples.append((died_s[-1] - killed_s) * 1000)
    finally:
        await worker.stop()
    return samples


def _one_death(lab: Lab) -> tuple[float, float, float]:
    """Milliseconds to the event, to the last answer, to the fresh worker."""
    daemon = Daemon(lab.folder / "death", lab.settings)
    answers, watch = Answers(), Watch()
    threads = []
    try:
        daemon.import_model(lab.plan.model)
        sessions = [
            daemon.client.open_session(MODEL, window=WINDOW, prompt_format="raw")
            for _ in range(WAITERS + 1)
        ]
        threads = [threading.Thread(target=watch.follow, args=(daemon,))]
        threads += [threading.Thread(target=answers.call, args=(s,)) for s in sessions]
        for thread in threads[:2]:
            thread.start()
        require(answers.streaming.wait(WAIT_S), "the turn that was to be killed didn't start")
        for thread in threads[2:]:
            thread.start()
        _until(lambda: daemon.client.status().slots[0].queued == WAITERS, "the queue")
        pid = daemon.worker_pid()
        killed_s = now()
        os.kill(pid, signal.SIGKILL)
        _until(lambda: watch.first(killed_s, "worker", "IDLE") is not None, "a fresh worker")
        slot = daemon.client.status().slots[0]
        ready_s = now()
        require(
            slot.worker.state == "IDLE" and slot.worker.pid != pid,
            f"the worker is {slot.worker.state}",
        )
        require(slot.state is SlotState.EMPTY, f"the slot is {slot.state.value}")
        _until(lambda: len(answers.at_s) == WAITERS + 1, "every caller's answer")
        _check_kinds(answers)
        event_s = watch.first(killed_s, "generation")
        require(event_s is not None, "no event told of the new generation")
        marks = (event_s or 0.0, max(answers.at_s), ready_s)
        event, answered, ready = ((mark - killed_s) * 1000 for mark in marks)
        return event, answered, ready
    finally:
        daemon.stop()
        for thread in threads:
            if thread.ident is not None:
                thread.join(WAIT_S)


def _check_kinds(answers: Answers) -> None:
    fatal = sum(isinstance(error, SessionFatal) for error in answers.errors)
    stale = sum(isinstance(error, GenerationStale) for error in answers.errors)
    kinds = sorted(type(error).__name__ for error in answers.errors)
    require((fatal, stale) == (1, WAITERS), f"the callers got {', '.join(kinds)}")


def _until(condition: Callable[[], bool], what: str) -> None:
    end_s = now() + WAIT_S
    while not condition():
        if now() > end_s:
            raise RunFailed(f"{what} didn't come within {WAIT_S:g} s")
        time.sleep(0.001)
