"""Constraints by themselves: what each step allows, where an answer may end, what is refused."""

from __future__ import annotations

import random
import re
import sys
import time
from collections.abc import Sequence

import pytest

from modeld.shared.errors import InvalidRequest, UnsupportedFeature
from modeld.shared.messages import DecodeIn, SamplingIn
from modeld.workers import structured
from modeld.workers.structured import FIELD, Constraint, Constraints
from tests.support.fake_engine import FakeTokenizer

WORDS = ("hello world", "hello there", "wor", "héllo 🙂", "an answer", "an")
REGEX = "|".join(map(re.escape, WORDS))


@pytest.fixture(scope="module")
def vocabulary() -> FakeTokenizer:
    return FakeTokenizer()


@pytest.fixture(scope="module")
def model(vocabulary: FakeTokenizer) -> Constraints:
    return Constraints(vocabulary)


def begun(model: Constraints, text: str = REGEX, kind: str = "regex") -> Constraint:
    return model.begin(kind, text, "")


def feed(constraint: Constraint, tokens: Sequence[int]) -> None:
    for token in tokens:
        allowed = constraint.allowed()
        assert allowed is not None
        assert token in allowed
        constraint.accept(token)


def walk(
    constraint: Constraint, tokenizer: FakeTokenizer, seed: int, most: int = 400
) -> tuple[bytes, bool]:
    """An answer of random choices among what is allowed; whether it came to its end."""
    chosen, text = random.Random(seed), b""
    for _ in range(most):
        allowed = constraint.allowed()
        if allowed is None:
            return text, True
        token = int(chosen.choice(allowed.tolist()))
        if token in tokenizer.end_of_generation:
            return text, True
        text += tokenizer.piece(token)
        constraint.accept(token)
        if constraint.complete:
            return text, True
    return text, False


# --- what is allowed ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_every_step_allows_only_beginnings_and_ends_only_answers(
    model: Constraints, vocabulary: FakeTokenizer, seed: int
) -> None:
    language = [word.encode() for word in WORDS]
    constraint, chosen, text = begun(model), random.Random(seed), b""
    while (allowed := constraint.allowed()) is not None:
        ends = [token for token in allowed.tolist() if token in vocabulary.end_of_generation]
        assert bool(ends) == (text in language)
        assert set(ends) in (set(), vocabulary.end_of_generation)
        others = [token for token in allowed.tolist() if token not in ends]
        assert others == sorted(others)
        for token in others:
            assert token not in vocabulary.controls.values()
            longer = text + vocabulary.piece(token)
            assert any(word.startswith(longer) for word in language), longer
        token = chosen.choice(others)
        text += vocabulary.piece(token)
        constraint.accept(token)
    assert text in language


def test_an_answer_that_may_end_or_go_on_allows_both(
    model: Constraints, vocabulary: FakeTokenizer
) -> None:
    constraint = begun(model, "(ab)+")
    feed(constraint, b"ab")
    assert not constraint.complete
    allowed = constraint.allowed()
    assert allowed is not None
    assert set(allowed.tolist()) == {ord("a")} | vocabulary.end_of_generation


def test_an_answer_is_complete_where_nothing_may_follow(model: Constraints) -> None:
    constraint = begun(model, "ab")
    told = [constraint.complete]
    for token in b"ab":
        feed(constraint, [token])
        told.append(constraint.complete)
    assert told == [False, False, True]
    assert constraint.allowed() is None


def test_the_empty_answer_is_complete_at_once(model: Constraints) -> None:
    assert begun(model, "").complete


def test_characters_of_several_tokens_are_never_left_for_others(
    model: Constraints, vocabulary: FakeTokenizer
) -> None:
    constraint = begun(model, "[éè🙂]{3}")
    for seed in range(8):
        text, ended = walk(begun(model, "[éè🙂]{3}"), vocabulary, seed)
        assert ended
        assert re.fullmatch("[éè🙂]{3}", text.decode())
    feed(constraint, "é".encode()[:1])
    allowed = constraint.allowed()
    assert allowed is not None
    assert set(allowed.tolist()) == {"é".encode()[1], "è".encode()[1]}


def test_a_tokenizer_that_adds_a_space_does_not_bend_the_mask() -> None:
    class Spacing(FakeTokenizer):
        def encode(self, text: str) -> list[int]:
            return super().encode(f" {text}")

    constraint = Constraints(Spacing()).begin("regex", "hello world", "")
    assert walk(constraint, Spacing(), 0) == (b"hello world", True)


def test_a_vocabulary_without_an_end_ends_where_nothing_may_follow() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.end_of_generation = frozenset()
    endless = Constraints(tokenizer)
    assert walk(endless.begin("regex", "ab", ""), tokenizer, 0) == (b"ab", True)
    text, ended = walk(endless.begin("regex", "a+", ""), tokenizer, 0, most=30)
    assert set(text) == {ord("a")}
    assert not ended


def test_control_tokens_are_text_in_no_answer(
    model: Constraints, vocabulary: FakeTokenizer
) -> None:
    constraint = begun(model, r"<\|im_end\|>")
    assert walk(constraint, vocabulary, 0) == (b"<|im_end|>", True)


def test_json_white_space_is_bounded(model: Constraints) -> None:
    schema = '{"type": "array", "items": {"type": "integer"}}'
    feed(begun(model, schema, "json_schema"), b"[\n\t\t1, 2,\n3 ]")
    constraint = begun(model, schema, "json_schema")
    feed(constraint, b"[ ")
    allowed = constraint.allowed()
    assert allowed is not None
    assert ord(" ") not in allowed
    assert ord("\n") not in allowed


# --- going on -------------------------------------------------------------------------------------


def test_an_answer_so_far_is_taken_in(model: Constraints) -> None:
    for cut in range(len("hello wo")):
        constraint = model.begin("regex", REGEX, "hello wo"[:cut])
        feed(constraint, b"hello wo"[cut:])
        assert not constraint.complete
    assert model.begin("regex", REGEX, "hello world").complete


@pytest.mark.parametrize("answer", ["x", "hello worldly", "hello worl\ufffd"])
def test_an_answer_so_far_that_does_not_fit_is_refused(model: Constraints, answer: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        model.begin("regex", REGEX, answer)
    assert refused.value.metadata["field"] == FIELD
    assert f"{len(answer)} characters" in refused.value.message
    assert "worl" not in refused.value.message


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "not json", "line 1 column 1"),
        ("json_schema", '{"a": 1} {}', "Extra data"),
        ("json_schema", "[1]", "an object, or true"),
        ("json_schema", "[" * 100_000, "nested too deeply"),
        ("json_schema", '{"type": "strng"}', "Invalid type"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"type": "string", "const": 3}', "Unsatisfiable"),
        ("json_schema", "false", "an object, or true"),
        ("json_schema", '{"$ref": "https://example.org/schema"}', "does not fetch"),
        ("regex", "(", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("grammar", "", "Empty grammar"),
        ("grammar", "start: nowhere", 'unknown name: "nowhere"'),
        ("grammar", "start: <|im_start|>", "special token"),
    ],
)
def test_a_constraint_that_cannot_be_is_refused_with_the_reason(
    model: Constraints, kind: str, text: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        begun(model, text, kind)
    assert words in refused.value.message
    assert refused.value.metadata["field"] == FIELD


@pytest.mark.parametrize("grammar", ["start: a\na: a 'x'".replace("'", '"'), "start: <[266]> /a/"])
def test_a_grammar_that_no_token_can_begin_is_refused(model: Constraints, grammar: str) -> None:
    with pytest.raises(InvalidRequest, match="no token of the model fits"):
        begun(model, grammar, "grammar")


def test_an_end_named_in_the_middle_of_a_grammar_is_no_end(
    model: Constraints, vocabulary: FakeTokenizer
) -> None:
    end = min(vocabulary.end_of_generation)
    constraint = begun(model, f'start: "a" <[{end}]> "b"', "grammar")
    constraint.accept(ord("a"))
    with pytest.raises(InvalidRequest, match="no token of the model fits"):
        constraint.allowed()


def test_long_words_of_the_compiler_are_cut(model: Constraints) -> None:
    with pytest.raises(InvalidRequest) as refused:
        begun(model, f"start: {'x' * 5000}", "grammar")
    assert len(refused.value.message) < structured.MAX_WORDS + 200


def test_a_chain_of_rules_as_long_as_may_be_does_not_end_the_process(model: Constraints) -> None:
    rules = 8000
    chain = "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(rules))
    text = f'{chain}\na{rules}: "x"'
    assert 64 * 1024 < len(text) < structured.MAX_BYTES
    constraint = begun(model, text, "grammar")
    feed(constraint, b"x")
    assert constraint.complete


def test_an_answer_that_gets_beyond_the_limits_is_said_to_be_too_complex(
    model: Constraints, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = range(60)
    wide = "start: " + " | ".join(f"a{i}" for i in rules)
    text = "\n".join([wide, *(f'a{i}: "x" b{i} "{i}"\nb{i}: "y"*' for i in rules)])
    feed(begun(model, text, "grammar"), b"xy")
    monkeypatch.setitem(structured._LIMITS, "max_items_in_row", 50)
    with pytest.raises(InvalidRequest, match=r"too complex here \(Current row has \d+ items\)"):
        feed(begun(model, text, "grammar"), b"xy")


def options(kind: str, text: str, **more: object) -> DecodeIn:
    return DecodeIn(sampling=SamplingIn(), structured_kind=kind, structured=text, **more)  # type: ignore[arg-type]


def test_what_needs_no_look_inside_is_refused_first() -> None:
    structured.check(options("", ""))
    structured.check(options("regex", "a" * structured.MAX_BYTES))
    with pytest.raises(InvalidRequest, match="at most 131072 bytes"):
        structured.check(options("regex", "é" * (structured.MAX_BYTES // 2 + 1)))
    with pytest.raises(InvalidRequest, match="json_schema, regex, grammar"):
        structured.check(options("xml", "x"))
    with pytest.raises(InvalidRequest, match="json_schema, regex, grammar"):
        structured.check(options("", "x"))
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        structured.check(options("regex", "a", ignore_eos=True))


# --- the capability -------------------------------------------------------------------------------


def test_the_capability_names_what_was_tried() -> None:
    structured.capability.cache_clear()
    assert re.match(r"yes: llguidance \d+\.\d+", structured.capability())


def test_a_worker_without_llguidance_says_no_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    structured.capability.cache_clear()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert structured.capability().startswith("no: llguidance can't be imported")
    with pytest.raises(UnsupportedFeature) as refused:
        Constraints(FakeTokenizer())
    assert refused.value.metadata["capability"] == "structured_output"
    structured.capability.cache_clear()


def test_making_the_vocabulary_is_told_as_a_gap_where_gaps_are() -> None:
    declared = {"load": 0.5, "evaluate": 0.25}
    assert structured.longest_gap_s({}, 10**6) == {}
    assert structured.longest_gap_s(declared, 1000) == declared
    assert structured.longest_gap_s(declared, 10**6)["evaluate"] > 5.0


def test_making_the_vocabulary_counts_as_progress() -> None:
    beats: list[float] = []
    Constraints(FakeTokenizer(), lambda: beats.append(time.monotonic()))
    assert len(beats) >= 2
