"""An open session's six numbers read alike wherever they stand, whatever the machine does then.

Another program takes memory and gives it back. What was promised to a session doesn't move; an
answer about what could be opened now does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from modeld.client import Client, ContextNumbers, ContextOverflow, Session, to_plain
from tests.support import tiny_models
from tests.support.cgroup import limited_daemon, memory_cgroup
from tests.support.daemon import RunningDaemon, eventually, running_daemon
from tests.support.memory_hog import memory_hog
from tests.support.product import ask

pytestmark = pytest.mark.real

GIB = 1 << 30
EATEN = 2 * GIB
MODEL, OTHER = "smol", "other"
WINDOW = 768
NAMES = ("model_max", "requested", "memory_fit", "effective", "hot", "planner")

Join = Callable[[int], None]


@contextmanager
def _in_a_shared_cgroup() -> Iterator[tuple[RunningDaemon, Join]]:
    unproven = "that an open session's numbers stand while its cgroup's memory is taken"
    with memory_cgroup(6 * GIB, unproven) as group, limited_daemon(group) as daemon:
        yield daemon, group.add


@contextmanager
def _on_the_machine() -> Iterator[tuple[RunningDaemon, None]]:
    with running_daemon() as daemon:
        yield daemon, None


@pytest.fixture(scope="module", params=[_in_a_shared_cgroup, _on_the_machine])
def place(
    request: pytest.FixtureRequest, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningDaemon, Client, Join | None]]:
    """A daemon, and how another program comes to share its memory."""
    with ExitStack() as stack:
        daemon, join = stack.enter_context(request.param())
        client = stack.enter_context(daemon.client())
        client.import_model(demo_model, name=MODEL)
        other = tiny_models.llama(tmp_path_factory.mktemp("other") / "other.gguf")
        client.import_model(other, name=OTHER)
        yield daemon, client, join


def plain(context: ContextNumbers) -> dict[str, Any]:
    numbers: dict[str, Any] = to_plain(context)
    assert tuple(numbers) == NAMES
    return numbers


def command(daemon: RunningDaemon, *words: str) -> Any:
    """What a command of the CLI prints for programs."""
    done = subprocess.run(
        [sys.executable, "-m", "modeld", *words, "--json", "--data-root", str(daemon.data_root)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def everywhere(daemon: RunningDaemon, client: Client, session: Session) -> dict[str, Any]:
    """The session's numbers by every way of asking, in the form that a program reads."""
    session_id = session.handle.session_id
    (slot,) = client.status().slots
    (listed,) = client.sessions()
    told = command(daemon, "status")
    (cli_slot,), (cli_session,) = told["slots"], told["sessions"]
    described = command(daemon, "describe", MODEL, "--session-id", session_id)
    by_model = command(daemon, "describe", MODEL)
    assert described["resolution_source"] == by_model["resolution_source"] == "open_session"
    return {
        "OpenSession": plain(session.resolution.context),
        "Describe of the session": plain(
            client.describe(MODEL, session_id=session_id).resolution.context
        ),
        "Describe of the model": plain(client.describe(MODEL).resolution.context),
        "Status": plain(slot.context),
        "ListSessions": plain(listed.context),
        "ExplainContext": plain(session.explain().resolution.context),
        "modeld status, the slot": cli_slot["context"],
        "modeld status, the session": cli_session["context"],
        "modeld describe of the session": described["resolution"]["context"],
        "modeld describe of the model": by_model["resolution"]["context"],
    }


def assert_an_error_tells(session: Session, numbers: dict[str, Any]) -> None:
    with pytest.raises(ContextOverflow) as refused:
        ask(session, " the" * WINDOW, " sea" * 20)
    for name in ("effective", "hot", "planner"):
        assert int(refused.value.metadata[name]) == numbers[name]["tokens"], name


def hypothetical(client: Client) -> dict[str, tuple[int, int]]:
    """What could be opened now: memory_fit, and the free bytes that it is made from."""
    found = {}
    for what, described in (
        ("another window", client.describe(MODEL, window=2 * WINDOW)),
        ("another model", client.describe(OTHER)),
    ):
        assert described.resolution_source == "hypothetical"
        free = {row.name: row.bytes for row in described.resolution.budget}["free"]
        found[what] = (described.resolution.context.memory_fit.tokens, free)
    return found


def given_back(before: dict[str, tuple[int, int]], now: dict[str, tuple[int, int]]) -> bool:
    return all(now[what][1] - free > EATEN // 2 for what, (_, free) in before.items())


def test_a_sessions_numbers_stand_while_the_machine_changes(
    place: tuple[RunningDaemon, Client, Join | None],
) -> None:
    daemon, client, join = place
    with client.open_session(MODEL, window=WINDOW, prompt_format="raw") as session:
        own = plain(session.resolution.context)
        assert own["effective"]["tokens"] == WINDOW
        whole = asdict(session.resolution)
        before = hypothetical(client)
        for where, told in everywhere(daemon, client, session).items():
            assert told == own, where
        assert_an_error_tells(session, own)
        with memory_hog(EATEN, join):
            while_eaten = hypothetical(client)
            for where, told in everywhere(daemon, client, session).items():
                assert told == own, f"{where}, while memory is taken"
            assert_an_error_tells(session, own)
        # The kernel takes a while to count all that an ended process held as free.
        eventually(lambda: given_back(while_eaten, hypothetical(client)))
        after = hypothetical(client)
        for where, told in everywhere(daemon, client, session).items():
            assert told == own, f"{where}, after memory was given back"
        assert_an_error_tells(session, own)
        # The whole resolution with its budget, too: the readings that it was made from.
        described = client.describe(MODEL, session_id=session.handle.session_id)
        assert asdict(described.resolution) == whole
    for what in before:
        (fit, free), (less, left), (again, _) = before[what], while_eaten[what], after[what]
        # The machine's other programs take and free memory as well: half of it must be seen.
        assert free - left > EATEN // 2, what
        assert less < fit, what
        assert again > less, what
