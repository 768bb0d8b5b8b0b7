"""An answer that another decode went on with is one turn: all of it, by its id or as its text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from modeld.client import Client, Session
from tests.support.daemon import MODEL, running_daemon
from tests.support.product import Told, ask, go_on, system, user
from tests.support.tiny_models import llama

PREFIX = [system("You answer.")]
QUESTION, NEXT = user("What is kept?"), [user("And then?")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with running_daemon(model) as daemon, daemon.client() as client:
        yield client


def opened(client: Client, **options: Any) -> Session:
    return client.open_session(MODEL, window=1024, prompt_format="chat", **options)


def answered(session: Session) -> tuple[list[Any], str]:
    """A conversation whose answer two decodes went on with, and that answer."""
    parts: list[Told] = [ask(session, PREFIX, [QUESTION], 8, ignore_eos=True)]
    parts += [go_on(session, count, ignore_eos=True) for count in (5, 6)]
    return [*PREFIX, QUESTION, parts[-1].turn], "".join(part.text for part in parts)


def test_a_continued_answer_is_given_whole_to_a_session_that_never_gave_it(tiny: Client) -> None:
    with opened(tiny) as session:
        history, text = answered(session)
        assert history[-1].text == text
    with opened(tiny) as one, opened(tiny) as other:
        named = ask(one, history, NEXT, 4)
        spelled = ask(other, [*PREFIX, QUESTION, {"role": "assistant", "content": text}], NEXT, 4)
    assert named.before.stable_token_hash == spelled.before.stable_token_hash
    assert named.ids == spelled.ids


def test_who_attaches_to_a_fork_goes_on_with_the_whole_answer(tiny: Client) -> None:
    with opened(tiny) as session:
        history, text = answered(session)
        branch = session.fork(session_key="branch")
        more = go_on(branch, 4, ignore_eos=True)
        assert more.turn is not None
        assert more.turn.text == text + more.text
        ids = ask(branch, history, NEXT, 4)
    branch.detach()
    attached = opened(tiny, session_key="branch")
    again = ask(attached, history, NEXT, 4)
    assert again.before.stable_token_hash == ids.before.stable_token_hash
    assert (again.before.prefilled, again.ids) == (0, ids.ids)
    attached.close()
