"""Durable sessions whose worker and daemon are killed at random, in their turns and between them.

``TURNS`` and ``SESSIONS`` may be set in the environment, for a longer run by hand.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from modeld.client import Client, ClientError, Opened, Session
from modeld.client.errors import RECOVERABLE
from modeld.shared.errors import ModelBusy, ModelQuarantined, WorkerUnavailable
from tests.support.daemon import MODEL, RunningDaemon, eventually
from tests.support.faulting import DataRoot, data_root, until_state, worker_pid
from tests.support.product import Told, ask, system, user
from tests.support.tiny_models import llama

SESSIONS = int(os.environ.get("MODELD_DURABLE_SESSIONS", "2"))
TURNS = int(os.environ.get("MODELD_DURABLE_TURNS", "20"))  # of all sessions together
SEED = int(os.environ.get("MODELD_DURABLE_SEED", "1"))
SETTINGS: dict[str, Any] = {"n_ubatch": 64, "max_sessions": 8}
WINDOW = 2048
ANSWER_TOKENS = 24
EVERY = 3  # turns of a session, the first attempt at one of them comes with a kill; and of others
STRIKES = 0.15  # this share
ANOTHER_TALK = 10  # turns after which a session's conversation begins anew: the window has an end
# What a call may meet while everything around it is killed and started again.
LOSSES: tuple[type[Exception], ...] = (
    *RECOVERABLE,
    ClientError,
    ModelBusy,
    ModelQuarantined,
    WorkerUnavailable,
)
# More deaths of one daemon's workers than these would put the model into quarantine.
DEATHS_A_DAEMON = 2


@pytest.fixture
def tiny_root(tmp_path: Path) -> Iterator[DataRoot]:
    with data_root(llama(tmp_path / "tiny.gguf")) as root:
        yield root


def question(session: int, turn: int) -> str:
    return f"Question {turn} of {session}: " + f"the thing in the {turn} " * (3 + turn % 5)


def answer(session: Session, said: list[Any], number: int, turn: int) -> Told:
    """One turn. Sampled, so that a wrong bit anywhere gives another answer sooner or later."""
    return ask(
        session,
        said,
        [user(question(number, turn))],
        ANSWER_TOKENS,
        temperature=0.8,
        seed=1000 * number + turn,
        ignore_eos=True,
    )


def first(number: int) -> list[Any]:
    return [system(f"You are {number}. " + "Answer with the words of a stone mason. " * 6)]


def said_more(said: list[Any], number: int, turn: int, told: Told) -> None:
    said += [user(question(number, turn)), told.turn]


def undisturbed(root: DataRoot, turns: int) -> list[list[list[int]]]:
    """The answers' ids, by session and turn, of sessions that nothing happens to."""
    daemon = root.start(**SETTINGS)
    found: list[list[list[int]]] = []
    with daemon.client() as client:
        for number in range(SESSIONS):
            session, said = open_one(client, f"plain-{number}", durable=False), first(number)
            found.append([])
            for turn in range(turns):
                said = said if turn % ANOTHER_TALK else first(number)
                told = answer(session, said, number, turn)
                said_more(said, number, turn, told)
                found[-1].append(told.ids)
    daemon.stop()
    return found


def open_one(client: Client, key: str, *, durable: bool = True) -> Session:
    return client.open_session(
        MODEL, window=WINDOW, prompt_format="chat", session_key=key, durable=durable
    )


class Killer:
    """Ends a worker or the daemon while turns run, and starts the daemon again."""

    def __init__(self, root: DataRoot) -> None:
        self.root = root
        self.random = random.Random(SEED)
        self.daemon: RunningDaemon = root.start(**SETTINGS)
        self.kills = {"worker": 0, "daemon": 0}
        self._workers = 0  # of this daemon's that were ended
        self.opening = 0  # conversations that are being brought back
        self._busy = threading.Lock()

    def client(self) -> Client:
        """A connection to whichever daemon serves now, or next."""
        found: Client = eventually(self._connected)
        return found

    def _connected(self) -> Client | None:
        with contextlib.suppress(*LOSSES):
            return Client.connect(self.root.path)
        return None

    @contextlib.contextmanager
    def at_work(self, delay_s: float | None) -> Iterator[None]:
        """Strikes so many seconds after the block began, whatever goes on then."""
        if delay_s is None:
            yield
            return
        timer = threading.Timer(delay_s, self.strike)
        timer.start()
        try:
            yield
        finally:
            timer.join()

    def strike(self) -> None:
        with self._busy:
            if self._workers >= DEATHS_A_DAEMON or self.random.random() < 0.4:
                self._end_daemon()
            else:
                self._end_worker()

    def _end_daemon(self) -> None:
        self.daemon.process.kill()
        self.daemon.process.wait()
        self.kills["daemon"] += 1
        self._workers = 0
        self.daemon = self.root.start(**SETTINGS)

    def _end_worker(self) -> None:
        with contextlib.suppress(*LOSSES), self.client() as client:
            pid = worker_pid(client)
            if pid:
                os.kill(pid, signal.SIGKILL)
                self.kills["worker"] += 1
                # A state that two workers died beside isn't tried a third time.
                self._workers = DEATHS_A_DAEMON if self.opening else self._workers + 1


@dataclass
class Conversation:
    """A client of one durable session, and what it knows of what was saved."""

    number: int
    killer: Killer
    turns: int
    random: random.Random
    typical_s: float = 0.05  # that a turn takes
    said: list[Any] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    saved: list[Told] = field(default_factory=list)
    reopened: int = 0
    attempted: int = -1  # the turn that was tried last
    unsaved: int = 0  # answers of which the final record said that they weren't
    unseen: int = 0  # answers that were saved, and whose end never arrived

    def run(self) -> None:
        client = session = None
        while len(self.answers) < self.turns:
            delay_s = self.random.uniform(0, 2 * self.typical_s)
            first_try, self.attempted = self.attempted < len(self.answers), len(self.answers)
            strikes = (first_try and self.attempted % EVERY == 0) or self.random.random() < STRIKES
            with self.killer.at_work(delay_s if strikes else None):
                try:
                    if session is None:
                        client = self.killer.client()
                        session = self.open(client)
                    self.take_turn(session)
                except LOSSES:
                    session = None
                    if client is not None:
                        client.close()
                    time.sleep(0.05)
        if client is not None:
            client.close()

    def open(self, client: Client) -> Session:
        self.killer.opening += 1
        try:
            session = open_one(client, f"kept-{self.number}")
        finally:
            self.killer.opening -= 1
        self.reopened += 1
        self.check_resumed(session.opened)
        return session

    def check_resumed(self, opened: Opened) -> None:
        """It goes on from the last answer that this client saw saved, or from one that was saved
        and whose final record was lost on its way."""
        assert not opened.attached, "a killed worker's session was still there"
        known = [told.final.generated_turn_id for told in self.saved]
        resumed = opened.resumed
        if resumed is None:
            assert not known, "what was saved is forgotten"
            return
        assert resumed.miss_reason == ""
        ids = list(resumed.generated_turn_ids)
        own = [one for one in ids if one in known]
        assert own == known
        assert len(ids) <= len(known) + self.unseen + 1
        if ids and ids[-1:] != known[-1:]:
            self.unseen += 1
            return
        last = self.saved[-1].final
        assert last.saved is not None
        assert resumed.tokens == last.saved.tokens
        assert resumed.saved_unix_ms == last.saved.saved_unix_ms
        assert resumed.seen_tokens == last.seen_tokens
        assert opened.resident == last.resident

    def take_turn(self, session: Session) -> None:
        turn, began_s = len(self.answers), time.monotonic()
        if turn % ANOTHER_TALK == 0:
            self.said = first(self.number)
        told = answer(session, self.said, self.number, turn)
        self.typical_s += (time.monotonic() - began_s - self.typical_s) / 4
        saved = told.final.saved
        assert saved is not None
        if not saved.ok:
            # The worker went between the answer and its save: it isn't lost unseen, and the turn
            # is taken again.
            assert saved.reason in ("SESSION_FATAL", "GENERATION_STALE", "WORKER_UNAVAILABLE"), (
                saved
            )
            self.unsaved += 1
            return
        if (
            turn % ANOTHER_TALK
        ):  # all that was there before is still there, and nothing is evaluated again
            assert told.before.reused >= self.saved[-1].final.resident
            assert told.before.turns_recomputed == 0
        self.answers.append(told.ids)
        self.saved.append(told)
        said_more(self.said, self.number, turn, told)


def test_killed_at_random_every_session_comes_back_to_the_token(tiny_root: DataRoot) -> None:
    turns = TURNS // SESSIONS
    expected = undisturbed(tiny_root, turns)
    killer = Killer(tiny_root)
    talks = [
        Conversation(number, killer, turns, random.Random(100 * SEED + number))
        for number in range(SESSIONS)
    ]
    with ThreadPoolExecutor(SESSIONS) as pool:
        for done in [pool.submit(talk.run) for talk in talks]:
            done.result()
    reopened, unseen = [t.reopened for t in talks], [t.unseen for t in talks]
    unsaved = [t.unsaved for t in talks]
    told = f"killed {killer.kills}, reopened {reopened}, saved unseen {unseen}, not {unsaved}"
    print(told)
    assert [talk.answers for talk in talks] == expected, told
    assert sum(killer.kills.values()) >= TURNS // 5, told
    # Nothing of what was never committed stays behind.
    with killer.client() as client:
        until_state(client, "IDLE")
        for folder in (tiny_root.path / "durable").iterdir():
            assert not list(folder.glob("*.tmp-*"))


def test_a_client_that_recovers_goes_on_with_its_answers_by_id(tiny_root: DataRoot) -> None:
    daemon = tiny_root.start(**SETTINGS)
    with daemon.client() as client:
        session = client.open_session(
            MODEL, window=WINDOW, prompt_format="chat", session_key="k", durable=True, recover=True
        )
        said, told = first(0), list[Told]()

        def go_on() -> Told:
            turn = len(told)
            told.append(answer(session, said, 0, turn))
            said_more(said, 0, turn, told[-1])
            return told[-1]

        go_on()
        os.kill(worker_pid(client), signal.SIGKILL)
        check_recovered(session, told[-1], go_on())
        daemon.process.kill()
        daemon.process.wait()
        daemon = tiny_root.start(**SETTINGS)
        check_recovered(session, told[-1], go_on())
        assert [r.operation for r in session.recoveries] == ["turn", "turn"]
        # A decode builds on the answer that is there: nothing of it is asked for again.
        whole = session.explain()
        os.kill(worker_pid(client), signal.SIGKILL)
        until_state(client, "IDLE")
        again = session.explain()
        assert again.resident == whole.resident
        assert again.generated_turn_ids == whole.generated_turn_ids


def check_recovered(session: Session, before: Told, after: Told) -> None:
    recovery = session.recoveries[-1]
    assert recovery.resumed is not None
    assert before.final.saved is not None
    assert recovery.resumed.tokens == before.final.saved.tokens
    assert recovery.resumed.saved_unix_ms == before.final.saved.saved_unix_ms
    assert after.before.reused == before.final.resident
    assert after.before.turns_recomputed == 0
