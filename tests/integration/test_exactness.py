"""Warm equals cold: reuse changes what a turn costs, never what it answers.

What these tests rely on is the daemon's default: flash attention off, K and V in f16, and an
engine context a session. With flash attention on (which a quantised V needs), the same tokens in
another batch split give other logits; q8_0 keys alone are computed alike cold and warm, but are
another model's answers; a cache shared by several sessions changes results by rounding. And one
thing is the engine's even so: a token evaluated alone goes through other routines than several at
once (up to half a unit of logits was seen). A prompt's tokens never go alone, so that prompts are
as exact as their one-shot evaluation however they are split. Sampled tokens do, as they come: what
they leave behind for the next turn is that of a decode, in the reference too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from modeld.client import Client, Session
from modeld.shared.messages import EnsureOp, OpenOp, PromptIn, SegmentIn, SuffixOp
from modeld.workers.core import SessionCore
from modeld.workers.engine import Engine, EngineContext
from tests.support.backends import Backend
from tests.support.core_harness import FakeOp, chat, options, raw
from tests.support.core_harness import Harness as CoreHarness
from tests.support.daemon import MODEL
from tests.support.product import Told, ask, go_on, prompt_ids, system, text_ids, user
from tests.support.prompts import VARIED
from tests.support.reference import Reference, Split, load_request

if TYPE_CHECKING:
    from modeld.workers.engine import Logits

pytestmark = pytest.mark.real

STORY = (
    " The old lighthouse keeper wrote each evening what the sea had brought, and what it took."
    " Storms came and went; the light did not."
)
IDS = [f"{index:02d}" for index in range(len(VARIED))]


# --- logits, bit for bit, where they are made ----------------------------------------------------


class Traced:
    """The splits by which a context came to hold what it holds, as an independent witness."""

    def __init__(self, engine: Engine) -> None:
        self.splits: dict[EngineContext, list[Split]] = {}
        self._make = engine.new_context
        engine.new_context = self._new_context  # type: ignore[method-assign]

    def _new_context(
        self, window: int, k_type: str, v_type: str, compute_bytes: int = 0
    ) -> EngineContext:
        made = self._make(window, k_type, v_type)
        self.splits[made] = []
        evaluate, step = made.evaluate, made.step
        trim, copy = made.trim, made.copy_prefix_from

        def traced_evaluate(
            tokens: Sequence[int], position: int, *, cancelled: Callable[[], bool]
        ) -> int:
            done = evaluate(tokens, position, cancelled=cancelled)
            self.splits[made].append(list(tokens[:done]))
            return done

        def traced_step(token: int, position: int) -> None:
            step(token, position)
            self.splits[made].append((token,))

        def traced_trim(keep: int) -> None:
            trim(keep)
            self.splits[made] = _first(self.splits[made], keep)

        def traced_copy(source: EngineContext, tokens: int) -> bool:
            copied = copy(source, tokens)
            self.splits[made] = _first(self.splits[source], tokens) if copied else []
            return copied

        made.evaluate = traced_evaluate  # type: ignore[method-assign]
        made.step = traced_step  # type: ignore[method-assign]
        made.trim = traced_trim  # type: ignore[method-assign]
        made.copy_prefix_from = traced_copy  # type: ignore[method-assign]
        return made


def _first(splits: Sequence[Split], keep: int) -> list[Split]:
    cut: list[Split] = []
    for part in splits:
        if keep > 0:
            cut.append(part[:keep])
            keep -= len(part)
    return cut


class Core(CoreHarness):
    """A session core over the real engine, in this process."""

    def __init__(self, backend: Backend, model: Path) -> None:
        self.engine = backend.engine()  # type: ignore[assignment]
        self.traced = Traced(self.engine)
        self.core = SessionCore(self.engine)
        self.turns = 0
        self.loaded = self.run(load_request(model), FakeOp())

    def open_real(self, session_id: str, prompt_format: str, window: int = 1024) -> None:
        self.run(
            OpenOp(
                session_id=session_id,
                prompt_format=prompt_format,
                window=window,
                k_type="f16",
                v_type="f16",
                kv_digest="kv",
                runtime_digest="rt",
            )
        )

    def context(self, session_id: str = "a") -> EngineContext:
        entry = self.core.model.sessions.by_id[session_id].context
        assert entry is not None
        return entry.engine_context

    def prompt_logits(
        self, prefix: PromptIn, suffix: PromptIn, session_id: str = "a"
    ) -> tuple[Logits, list[int]]:
        """Logits after a prompt, and how many of its tokens were reused and evaluated."""
        before = self.run(EnsureOp(session_id=session_id, prefix=prefix))
        after = self.run(SuffixOp(session_id=session_id, suffix=suffix))
        numbers = [before.reused + after.reused, before.prefilled + after.prefilled]  # type: ignore[union-attr]
        if not after.suffix:  # type: ignore[union-attr]
            self.decode(options(1), session_id)  # which evaluates the prefix's last token again
        return self.context(session_id).logits().copy(), numbers

    def close_all(self) -> None:
        for session_id in list(self.core.model.sessions.by_id):
            self.close(session_id, discard=True)


@pytest.fixture(scope="module")
def loaded_core(backend: Backend, engine_path: Path) -> Iterator[Core]:
    core = Core(backend, engine_path)
    yield core
    core.core.close()


@pytest.fixture
def core(loaded_core: Core) -> Iterator[Core]:
    yield loaded_core
    loaded_core.close_all()


def assert_same_logits(
    core: Core, reference: Reference, got: Logits, session_id: str = "a"
) -> None:
    splits = core.traced.splits[core.context(session_id)]
    fresh = reference.logits(splits, window=core.context(session_id).window)
    assert got.tobytes() == fresh.tobytes(), float(np.abs(got - fresh).max())


@pytest.mark.parametrize(("before", "after"), VARIED, ids=IDS)
def test_logits_after_a_warm_turn_are_those_of_a_fresh_context(
    core: Core, reference: Reference, before: str, after: str
) -> None:
    prefix = chat(("system", before))
    core.open_real("a", "chat")
    core.turn(prefix, chat(("user", "Say something else first.")), options(3))
    got, (reused, _evaluated) = core.prompt_logits(prefix, chat(("user", after)))
    assert reused > 0
    assert_same_logits(core, reference, got)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((STORY * 3, " And then"), (STORY + " He slept." + STORY, " And then")),
        ((STORY * 3, " And then"), (STORY * 2, " And then")),
        ((STORY * 2, " And then"), (STORY * 2, "")),
        ((STORY * 2, " And then"), (STORY * 2, " And then")),
        ((STORY, " And then"), (STORY * 3, " And then")),
        ((STORY * 2, " And then"), (" A" + STORY * 2, " And then")),
    ],
    ids=["mid-prefix edit", "shorter prefix", "empty suffix", "the same", "longer prefix", "start"],
)
def test_logits_after_an_edit_are_those_of_a_fresh_context(
    core: Core, reference: Reference, first: tuple[str, str], then: tuple[str, str]
) -> None:
    core.open_real("a", "raw")
    core.turn(raw(first[0]), raw(first[1]), options(6))
    got, _numbers = core.prompt_logits(raw(then[0]), raw(then[1]))
    splits = core.traced.splits[core.context()]
    assert [token for part in splits for token in part] == reference.encode(then[0] + then[1])
    assert_same_logits(core, reference, got)


def test_logits_of_a_growing_chat_are_those_of_a_fresh_context(
    core: Core, reference: Reference
) -> None:
    core.open_real("a", "chat")
    history = [*chat(("system", "You are brief.")).segments]
    for index, question in enumerate(["Who are you?", "Why?", "Name a colour.", "Another."]):
        ask_it = chat(("user", question))
        got, (reused, evaluated) = core.prompt_logits(PromptIn(segments=history), ask_it)
        assert evaluated < 30 or index == 0, "only what is new is evaluated"
        assert reused > 0 or index == 0
        assert_same_logits(core, reference, got)
        core.decode(options(10, temperature=0.8, seed=index), turn_id=f"t{index}")
        answer = chat(*[_turn(f"t{index}")])
        history = [*history, *ask_it.segments, *answer.segments]


def _turn(turn_id: str) -> SegmentIn:
    return SegmentIn(generated_turn_id=turn_id)


@pytest.mark.parametrize("first_closed", [False, True], ids=["both open", "first closed"])
def test_logits_over_a_prefix_of_another_session_are_those_of_a_fresh_context(
    core: Core, reference: Reference, first_closed: bool
) -> None:
    core.open_real("a", "raw")
    core.turn(raw(STORY * 3), raw(" And then"), options(6))
    if first_closed:
        core.close("a")
    core.open_real("b", "raw")
    got, (reused, evaluated) = core.prompt_logits(raw(STORY * 3), raw(" But no"), "b")
    assert reused == len(reference.encode(STORY * 3))
    assert evaluated == len(reference.encode(STORY * 3 + " But no")) - reused
    assert_same_logits(core, reference, got, "b")


@pytest.mark.parametrize(("first", "second"), [(512, 2048), (2048, 512)])
def test_logits_over_a_prefix_copied_from_another_window_are_those_of_a_fresh_context(
    core: Core, reference: Reference, first: int, second: int
) -> None:
    core.open_real("a", "raw", first)
    core.turn(raw(STORY * 3), raw(" And then"), options(2))
    core.open_real("b", "raw", second)
    got, (reused, _evaluated) = core.prompt_logits(raw(STORY * 3), raw(" But no"), "b")
    assert reused == len(reference.encode(STORY * 3))
    assert_same_logits(core, reference, got, "b")


def test_logits_after_each_generated_token_are_those_of_a_fresh_context(
    core: Core, reference: Reference
) -> None:
    core.open_real("a", "raw")
    core.turn(raw(STORY), raw(" And then"), options(1))
    for _ in range(6):
        core.decode(options(1))
        got = core.context().logits().copy()
        assert_same_logits(core, reference, got)


# --- greedy continuations through the product ----------------------------------------------------


def assert_cold_answer(told: Told, reference: Reference, prompt: Sequence[int]) -> None:
    assert told.ids == reference.greedy(prompt, len(told.ids))


@pytest.mark.parametrize(("before", "after"), VARIED, ids=IDS)
def test_a_warm_answer_is_the_one_shot_cold_one(
    client: Client, chat: Session, reference: Reference, before: str, after: str
) -> None:
    prefix = [system(before)]
    ask(chat, prefix, [user("Say something else first.")], 3)
    told = ask(chat, prefix, [user(after)], 10)
    assert told.before.reused == told.before.prefix > 0
    assert_cold_answer(told, reference, prompt_ids(client, [*prefix, user(after)]))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((STORY * 3, " And then"), (STORY + " He slept." + STORY, " And then")),
        ((STORY * 3, " And then"), (STORY * 2, " And then")),
        ((STORY * 2, " And then"), (STORY * 2, "")),
        ((STORY * 2, " And then"), (STORY * 2, " And then")),
        ((STORY, " And then"), (STORY * 3, " And then")),
    ],
    ids=["mid-prefix edit", "shorter prefix", "empty suffix", "the same", "longer prefix"],
)
def test_the_answer_after_an_edit_is_the_one_shot_cold_one(
    client: Client,
    raw: Session,
    reference: Reference,
    first: tuple[str, str],
    then: tuple[str, str],
) -> None:
    ask(raw, *first, 12)
    told = ask(raw, *then, 12)
    assert told.before.reused > 0
    prompt = text_ids(client, "".join(then))
    assert_cold_answer(told, reference, prompt)


def test_every_answer_of_a_growing_chat_is_the_one_shot_cold_one(
    client: Client, chat: Session, reference: Reference
) -> None:
    talk = chat.chat("You are brief.")
    sent = [system("You are brief.")]
    prompt: list[int] = []
    stepped: list[int] = []  # where sampled tokens lie that were evaluated as they came
    for question in ["Hello!", "Who wrote Hamlet?", "When?", "Thank you."]:
        stream = talk.send(question, max_tokens=10, token_ids=True)
        answer = [token for chunk in stream.chunks() for token in chunk.token_ids]
        if not prompt:
            prompt = prompt_ids(client, [*sent, user(question)])
        else:
            prompt = prompt + _next_question(client, question)
        assert answer == reference.greedy(prompt, len(answer), stepped=stepped)
        stepped += range(len(prompt), len(prompt) + len(answer) - 1)
        prompt = prompt + [token for token in answer if token not in reference.end_of_generation]


def _next_question(client: Client, question: str) -> list[int]:
    """What the template writes between an answer and the next answer's cue."""
    before = prompt_ids(client, [system("x")], cue=False)
    whole = prompt_ids(client, [system("x"), user(question)])
    return [*before[-2:], *whole[len(before) :]]  # the end of the answer's message comes first


def test_two_sessions_over_one_prefix_answer_as_if_alone(
    client: Client, reference: Reference
) -> None:
    with (
        client.open_session(MODEL, window=1024, prompt_format="raw") as first,
        client.open_session(MODEL, window=1024, prompt_format="raw") as second,
    ):
        ask(first, STORY * 3, " And then", 4)
        told = ask(second, STORY * 3, " But no", 10)
        assert told.before.copied == told.before.prefix
        assert_cold_answer(told, reference, text_ids(client, STORY * 3 + " But no"))
        # The first one goes on where it was, untouched by its neighbour.
        told = ask(first, STORY * 3, " Then came", 10)
        assert_cold_answer(told, reference, text_ids(client, STORY * 3 + " Then came"))


def test_decoding_in_pieces_answers_what_one_decode_does(
    client: Client, raw: Session, reference: Reference
) -> None:
    raw.ensure_prefix(STORY)
    raw.prefill_suffix(" And then")
    pieces = [go_on(raw, count).ids for count in (1, 4, 7)]
    together = reference.greedy(text_ids(client, STORY + " And then"), 12)
    assert [token for piece in pieces for token in piece] == together
