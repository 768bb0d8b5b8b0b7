"""A fact that leaves attention is said to have left it, and comes back as it was computed.

``MODELD_FACT_TOKENS`` says how long the conversation is when it is asked for. By default it has
just outgrown a window of 1,024 tokens; from 4,000 tokens on the window is 2,048.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from modeld.client import Admitted, Client, ContextReport, Session
from modeld.supervisor.saved_folder import SavedFolder
from modeld.workers.state_file import open_state
from tests.support.daemon import MODEL, RunningDaemon
from tests.support.product import Told, ask, go_on, prompt_ids, system, text_ids, user
from tests.support.reference import Reference, never

pytestmark = pytest.mark.real

TOKENS = int(os.environ.get("MODELD_FACT_TOKENS", "1100"))
WINDOW = 1024 if TOKENS < 4000 else 2048
SINK, RECENT, BLOCK = 256, WINDOW // 4, 256
BUDGET = BLOCK
SECRET = "heliotrope-4417"
FACT = f"It is for you alone, and stands in no log: the vault's code word is {SECRET}."
QUESTION = "What is the vault's code word?"
PREFIX = [
    system(
        "You keep the log of a lighthouse, and answer in few words. "
        + " ".join(f"Rule {n}: note ship {n * 37} before the tide of day {n}." for n in range(12))
    )
]
Ranges = list[tuple[int, int]]


def lines(turn: int, count: int) -> str:
    """Of fourteen tokens or so."""
    return " ".join(f"Ship {turn}{n} came by with cargo {n * 71 % 97}." for n in range(count))


@dataclass
class Talk:
    """A conversation whose answers are named as they were generated."""

    session: Session
    said: list[Any] = field(default_factory=list)
    turns: int = 0

    def ask(self, text: str, max_tokens: int = 1) -> Told:
        """By default an answer too short to say anything again."""
        self.said.append(user(text))
        told = ask(self.session, PREFIX, self.said, max_tokens, ignore_eos=True)
        self.said.append(told.turn)
        self.turns += 1
        return told

    def note(self) -> Told:
        return self.ask(lines(self.turns, 12))


@pytest.fixture
def talk(client: Client) -> Iterator[Talk]:
    with client.open_session(MODEL, window=WINDOW, overflow="evict") as session:
        yield Talk(session)
    for info in client.list_snapshots().snapshots:
        client.delete_snapshot(info.snapshot_id)


def ranges(report: ContextReport, *states: str) -> Ranges:
    """What is in one of these states, without the edges between equal neighbours."""
    found: Ranges = []
    for block in report.blocks:
        if block.state in states:
            begin, end = block.token_begin, block.token_end
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))
    return found


def positions(of: Ranges) -> set[int]:
    return {at for begin, end in of for at in range(begin, end)}


def place(tokens: Sequence[int], of: Sequence[int]) -> tuple[int, int]:
    size = len(of)
    (begin,) = (at for at in range(len(tokens)) if tokens[at : at + size] == of)
    return begin, begin + size


def check_counts(report: ContextReport, length: int) -> None:
    """Every token of the conversation is in one place, and each place's count is its ranges'."""
    places = {state: positions(ranges(report, state)) for state in ("hot", "parked", "gone")}
    assert [len(places[state]) for state in places] == [
        report.resident, report.parked, report.gone,
    ]  # fmt: skip
    assert set().union(*places.values()) == set(range(length))
    assert sum(map(len, places.values())) == length
    assert report.resident <= WINDOW


def held(client: Client, daemon: RunningDaemon, session: Session) -> tuple[list[int], Any]:
    """The tokens of the session's KV as it is saved now, and its bytes by where they end."""
    info = session.snapshot()
    folder = SavedFolder(daemon.data_root / "snapshots" / info.snapshot_id)
    tokens: list[int] = []
    chunks: dict[int, Any] = {}
    for part in folder.require(info.snapshot_id).parts:
        with open_state(str(folder.path / part.name)) as file:
            tokens = file.header.tokens.tolist()
            chunks |= dict(file.parts(lambda: 1 << 40))
    client.delete_snapshot(info.snapshot_id)
    return tokens, chunks


class Fresh:
    """A context of another process that has evaluated the same tokens, first to last."""

    def __init__(self, reference: Reference, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._context = reference.engine.new_context(WINDOW, "f16", "f16")
        assert self._context.evaluate(tokens, 0, cancelled=never) == len(tokens)
        self._row = self._context.logits().astype(np.float64)

    def check(self, chunks: dict[int, Any], told: Told) -> None:
        """The KV is byte for byte this one, and the next token's row too."""
        begin = 0
        for end, state in sorted(chunks.items()):
            # A block's cells behind its last token are of no token.
            if end % BLOCK == 0:
                assert np.array_equal(state, self._context.export_state(begin, end))
            begin = end
        assert begin == len(self.tokens) > SINK + BLOCK
        (step,) = told.logprobs
        assert [one.token_id for one in step.top] == np.argsort(-self._row)[:5].tolist()
        row = self._row - self._row.max()
        row -= np.log(np.exp(row).sum())
        assert [one.logprob for one in step.top] == pytest.approx(-np.sort(-row)[:5], abs=1e-6)

    def close(self) -> None:
        self._context.close()


def check_admitted(
    before: ContextReport, after: ContextReport, told: Admitted, length: int
) -> None:
    """What is said to have come in and gone out is what is attended now and wasn't, and was."""
    was, now = positions(ranges(before, "hot")), positions(ranges(after, "hot"))
    brought = [(one.begin, one.end) for one in told.ranges]
    assert brought == sorted(brought)
    newest = {length - 1}  # was sampled, and is evaluated now
    assert positions(brought) == now - was - newest
    assert told.admitted == len(positions(brought)) <= BUDGET
    assert told.evicted == len(was - now) > 0
    assert (told.parked, told.gone, told.resident) == (after.parked, 0, after.resident)
    assert set(range(SINK)) | set(range(length - RECENT, length)) <= now
    check_counts(after, length)


def test_a_fact_that_went_out_is_not_attended_and_is_again_once_it_is_admitted(
    client: Client, daemon: RunningDaemon, talk: Talk, reference: Reference
) -> None:
    session = talk.session
    # The whole block that the fact lies in is of one prompt, so that none of it was sampled.
    said = f"{FACT} {lines(0, 20)}"
    talk.ask(said)
    opening = prompt_ids(client, [*PREFIX, user(said)])
    fact = place(opening, text_ids(client, f" {SECRET}"))
    assert SINK <= fact[0] < fact[1] <= SINK + BLOCK <= len(opening)
    while (told := talk.note()).final.seen_tokens < TOKENS or told.final.available >= BLOCK:
        check_counts(session.explain(), told.final.resident + told.final.parked + told.final.gone)
    told = talk.ask(QUESTION, 12)
    before = session.explain()
    assert positions([fact]) <= positions(ranges(before, "parked"))
    final, length = told.final, told.final.seen_tokens - 1  # the last one sampled isn't evaluated
    assert length + 1 > max(TOKENS, WINDOW)
    assert (final.resident, final.parked, final.gone) == (
        before.resident, before.parked, before.gone,
    )  # fmt: skip
    check_counts(before, length)
    tokens, _ = held(client, daemon, session)
    text = reference.text(tokens).lower()
    assert "tide of day 11" in text
    assert "helio" not in text

    print(f"\n{length=} {fact=} {ranges(before, 'hot')=}\n{final}\n{told.text}")

    branch = session.fork()
    assert branch.explain().blocks == before.blocks
    by_query, by_range = {"query": f"code word {SECRET}"}, {"range": (SINK, SINK + BLOCK)}
    fresh: Fresh | None = None
    for one, what in ((branch, by_query), (session, by_range)):
        assert one.explain().blocks == before.blocks  # the other branch's is not this one's
        admitted = one.admit(budget=BUDGET, **what)
        after = one.explain()
        check_admitted(before, after, admitted, after.resident + after.parked + after.gone)
        assert [(one.begin, one.end) for one in admitted.ranges] == [(SINK, SINK + BLOCK)]
        assert admitted.restored == admitted.admitted == BLOCK
        tokens, chunks = held(client, daemon, one)
        assert len(tokens) == after.resident
        assert SECRET in reference.text(tokens)
        fresh = fresh or Fresh(reference, tokens)
        assert fresh.tokens == tokens  # by either way
        told = go_on(one, 1, top_logprobs=5)
        fresh.check(chunks, told)
        print(f"\n{what}: {admitted}\n{told.text}{go_on(one, 12).text}")
        one.close(discard=True)
    assert fresh is not None
    fresh.close()
