"""More sessions than contexts, through a real daemon: taking turns changes what they cost alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from modeld.client import Client, GenerationStale, PrefillStatus, Session
from tests.support import openvino_models, tiny_models
from tests.support.daemon import RunningDaemon, eventually, running_daemon
from tests.support.product import Told, ask

pytestmark = pytest.mark.real

BACKENDS = ("llama", "openvino")
TINY = "tiny"
WINDOW = 1024
CONTEXTS, SESSIONS, ROUNDS = 3, 12, 3
TOKENS = 6
BLOCK = 256  # tokens that are parked together


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {
        "llama": tiny_models.llama(folder / "tiny.gguf"),
        "openvino": openvino_models.tiny_ir(folder / "tiny"),
    }


@contextmanager
def serving(path: Path, backend: str, **settings: Any) -> Iterator[tuple[RunningDaemon, Client]]:
    with running_daemon(backend=backend, **settings) as daemon, daemon.client() as client:
        client.import_model(path, name=TINY, model_type=backend)
        yield daemon, client


@dataclass
class Talk:
    """A conversation of its own in one session; every suffix holds all answers so far."""

    number: int
    session: Session
    suffix: list[Any] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        return f"{self.number} of many. " + " ".join(f"{self.number * k}." for k in range(90))

    def go_on(self) -> Told:
        self.suffix.append(f" Round {len(self.answers)}:")
        told = ask(self.session, self.prefix, self.suffix, TOKENS, ignore_eos=True)
        self.suffix.append(told.turn)
        self.answers.append(told.ids)
        return told


def open_raw(client: Client, window: int = WINDOW) -> Session:
    return client.open_session(TINY, window=window, prompt_format="raw")


@pytest.fixture(scope="module")
def undisturbed(files: dict[str, Path]) -> dict[str, list[list[list[int]]]]:
    """The answers of each conversation, one after the other, where nothing is ever parked."""
    found: dict[str, list[list[list[int]]]] = {backend: [] for backend in BACKENDS}
    for backend, answers in found.items():
        with serving(files[backend], backend, cold_ram_bytes=0) as (_, client):
            for number in range(SESSIONS):
                with open_raw(client) as session:
                    talk = Talk(number, session)
                    for _ in range(ROUNDS):
                        talk.go_on()
                    answers.append(talk.answers)
    return found


def assert_adds_up(status: PrefillStatus, tokens: int) -> None:
    assert status.reused + status.prefilled == tokens
    assert status.restored <= status.reused


def assert_came_back(told: Told) -> None:
    """By copy: all that this turn found was parked meanwhile, and next to nothing is evaluated."""
    before, after = told.before, told.after
    assert_adds_up(before, before.prefix)
    assert_adds_up(after, after.suffix)
    assert before.prefilled == 0
    reused = before.reused + after.reused
    assert reused > BLOCK
    # All but the first token, with which all of them begin: any context holds that.
    assert reused - 1 <= before.restored + after.restored <= reused
    assert after.prefilled < 30


def counters(session: Session) -> dict[str, int]:
    return {one.name: one.value for one in session.explain().counters}


def parked(client: Client) -> set[str]:
    return {one.session.session_id for one in client.sessions() if one.parked}


def id_of(session: Session) -> str:
    return session.opened.session.session_id


def take_turns(client: Client, talks: Sequence[Talk], rounds: int = ROUNDS) -> None:
    """Round robin, so that the one whose turn it is was always parked for the longest."""
    for number in range(rounds):
        for talk in talks:
            told = talk.go_on()
            if number:
                assert_came_back(told)
            assert len(parked(client)) == len(talks) - CONTEXTS
            assert id_of(talk.session) not in parked(client)
    for talk in talks[-CONTEXTS:]:
        found = counters(talk.session)
        assert found["slot_contexts"] <= CONTEXTS
        assert found["times_parked"] == rounds
        assert found["resumed_tokens"] > (rounds - 1) * BLOCK
    assert len(client.sessions()) == len(talks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dozen_conversations_take_turns_in_three_contexts_and_answer_as_ever(
    files: dict[str, Path], undisturbed: dict[str, list[list[list[int]]]], backend: str
) -> None:
    with serving(files[backend], backend, max_sessions=CONTEXTS) as (_, client):
        talks = [Talk(number, open_raw(client)) for number in range(SESSIONS)]
        take_turns(client, talks)
        assert [talk.answers for talk in talks] == undisturbed[backend]


def test_where_memory_is_short_parked_kv_goes_to_disk_and_comes_back_from_there(
    files: dict[str, Path], undisturbed: dict[str, list[list[list[int]]]]
) -> None:
    """Contexts are bounded by the plan here, and what is parked in RAM is half a context."""
    with serving(files["llama"], "llama") as (_, client):
        plan = client.describe(TINY, window=WINDOW).resolution
    context = plan.kv_bytes + plan.compute_bytes
    limit = int((plan.weights_bytes + (CONTEXTS + 0.5) * context) / 0.98)
    with serving(
        files["llama"],
        "llama",
        user_limit_bytes=limit,
        cold_ram_bytes=plan.kv_bytes // 2,
        cold_disk_bytes="1GiB",
    ) as (
        daemon,
        client,
    ):
        talks = [Talk(number, open_raw(client)) for number in range(2 * CONTEXTS)]
        take_turns(client, talks, rounds=2)
        expected = [answers[:2] for answers in undisturbed["llama"][: len(talks)]]
        assert [talk.answers for talk in talks] == expected
        folder = daemon.data_root / "cold" / "llama"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert any(folder.rglob("*")), "nothing was parked on disk"


@pytest.mark.parametrize("backend", BACKENDS)
def test_sessions_close_detach_and_die_parked_like_any_other(
    files: dict[str, Path], backend: str
) -> None:
    with serving(files[backend], backend, max_sessions=1) as (_, client):
        first = Talk(0, open_raw(client))
        answer = first.go_on()
        second = Talk(1, open_raw(client))
        second.go_on()
        assert parked(client) == {id_of(first.session)}
        first.session.close()
        assert parked(client) == set()
        again = Talk(
            0, client.open_session(TINY, window=WINDOW, prompt_format="raw", session_key="again")
        )
        back = again.go_on()  # what the closed one left in the cold store serves its like
        assert back.ids == answer.ids
        assert back.before.restored == back.before.reused > 0
        again.session.detach()
        assert second.go_on().ids
        assert parked(client) == {id_of(again.session)}
        attached = client.open_session(
            TINY, window=WINDOW, prompt_format="raw", session_key="again"
        )
        assert attached.opened.attached
        assert id_of(attached) == id_of(again.session)
        assert_came_back(Talk(0, attached, again.suffix, again.answers).go_on())
        slot = client.status().slots[0]
        os.kill(slot.worker.pid, signal.SIGKILL)
        eventually(lambda: client.status().slots[0].generation > slot.generation)
        with pytest.raises(GenerationStale):
            second.go_on()
        assert client.sessions() == []
        fresh = Talk(0, open_raw(client))
        assert fresh.go_on().ids == answer.ids
