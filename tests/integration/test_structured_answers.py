"""Structured output through the whole product, on the real model: what comes, how it ends."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from modeld.client import Client, InvalidRequest, Session, StopReason
from tests.support.daemon import MODEL
from tests.support.product import ask, go_on, system, user

pytestmark = pytest.mark.real

CHARACTERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["hero", "villain", "Zuschauer – ñ 🙂"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 150},
        "scores": {
            "type": "array",
            "items": {
                "type": "array",
                "items": {"type": "integer", "minimum": -9, "maximum": 99},
                "minItems": 1,
                "maxItems": 2,
            },
            "minItems": 2,
            "maxItems": 2,
        },
        "pet": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pet"}]},
    },
    "required": ["name", "kind", "age", "scores", "pet"],
    "additionalProperties": False,
    "$defs": {
        "pet": {
            "type": "object",
            "properties": {"called": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"}},
            "required": ["called"],
            "additionalProperties": False,
        }
    },
}
SUMS = """
start: sum ("," " " sum)*
sum: NUMBER " + " NUMBER " = " NUMBER
NUMBER: /[1-9][0-9]?/
"""


@pytest.fixture
def asked(client: Client) -> Session:
    session = client.open_session(MODEL, window=1024)
    ask(session, [system("You answer in JSON.")], [user("Invent a character.")], 1)
    return session


def check_character(found: dict[str, Any]) -> None:
    assert list(found) == ["name", "kind", "age", "scores", "pet"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 12
    assert found["kind"] in CHARACTERS["properties"]["kind"]["enum"]
    assert type(found["age"]) is int
    assert 1 <= found["age"] <= 150
    assert len(found["scores"]) == 2
    assert all(1 <= len(row) <= 2 for row in found["scores"])
    assert all(type(n) is int and -9 <= n <= 99 for row in found["scores"] for n in row)
    assert found["pet"] is None or re.fullmatch("[A-Z][a-z]{1,8}", found["pet"]["called"])


def character(session: Session, schema: Any = CHARACTERS, **options: Any) -> str:
    prefix, suffix = [system("You answer in JSON.")], [user("Invent a character.")]
    told = ask(session, prefix, suffix, 200, json_schema=schema, **options)
    assert told.stop is StopReason.EOS
    return told.text


def test_greedy_json_parses_and_is_what_the_schema_says(asked: Session) -> None:
    check_character(json.loads(character(asked)))


def test_seeded_json_is_valid_at_any_heat_and_repeats(asked: Session) -> None:
    texts = [character(asked, temperature=1.5, seed=seed, top_k=0, min_p=0.0) for seed in range(4)]
    for text in texts:
        check_character(json.loads(text))
    assert len(set(texts)) > 1
    assert character(asked, temperature=1.5, seed=3, top_k=0, min_p=0.0) == texts[3]


def test_a_schema_may_be_its_text(asked: Session) -> None:
    assert character(asked, json.dumps(CHARACTERS)) == character(asked)


@pytest.mark.parametrize(
    ("constraint", "valid"),
    [
        ({"regex": "(yes|no), because [a-z ]{10,40}\\."}, None),
        ({"regex": "[А-Яа-я]{4,9} 🙂[éü]{2}"}, None),
        (
            {"grammar": SUMS},
            r"([1-9]\d? \+ [1-9]\d? = [1-9]\d?)(, [1-9]\d? \+ [1-9]\d? = [1-9]\d?)*",
        ),
    ],
)
def test_text_matches_a_regex_or_a_grammar(
    asked: Session, constraint: dict[str, str], valid: str | None
) -> None:
    for seed in range(4):
        told = ask(
            asked, [], [user("Is 12 more than 7?")], 60, **constraint, temperature=1.2, seed=seed
        )
        if told.stop is StopReason.EOS:
            assert re.fullmatch(valid or constraint["regex"], told.text)
        else:
            assert told.stop is StopReason.LENGTH
            assert "grammar" in constraint  # the sums may go on; a regex here may not


def test_an_answer_in_parts_is_one_answer(asked: Session) -> None:
    parts: list[str] = []
    ask(asked, [system("You answer in JSON.")], [user("Invent a character.")], 1, regex="")
    for _ in range(100):
        told = go_on(asked, 7, json_schema=CHARACTERS)
        parts.append(told.text)
        if told.stop is StopReason.EOS:
            break
        assert told.stop is StopReason.LENGTH
    assert len(parts) > 3
    check_character(json.loads("".join(parts)))


def test_what_cannot_be_is_refused_and_nothing_changes(asked: Session) -> None:
    before = asked.explain()
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"regex": "("}, "unclosed group"),
        ({"json_schema": {"type": "object", "minProperties": {}}}, "minProperties"),
        ({"json_schema": {"not": {"type": "null"}}}, "Unimplemented keys"),
        ({"json_schema": "{"}, "isn't JSON"),
        ({"grammar": "start: missing"}, "unknown name"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "x" * 200_000}, "at most 131072 bytes"),
    ]
    for options, words in refusals:
        with pytest.raises(InvalidRequest) as refused:
            ask(asked, [], [user("Other prompt.")], 5, **options)
        assert words in refused.value.message
        assert "Other prompt" not in refused.value.message
    after = asked.explain()
    assert (after.resident, after.segments) == (before.resident, before.segments)
    assert ask(asked, [], [user("Say yes.")], 3, regex="yes").text == "yes"


def test_an_answer_that_cannot_go_on_is_an_error_after_its_text_and_the_session_goes_on(
    asked: Session,
) -> None:
    kept = len(asked.explain().generated_turn_ids)
    stream = asked.turn([], [user("Say it.")], grammar='start: "abc" <[2]> "d"')
    texts: list[str] = []
    with pytest.raises(InvalidRequest, match="no token of the model fits"):
        texts.extend(stream)
    assert "".join(texts) == "abc"
    assert len(asked.explain().generated_turn_ids) == kept + 1
    assert ask(asked, [], [user("Say yes.")], 3, regex="yes").text == "yes"


def test_a_turn_under_a_constraint_is_reused_like_any_other(asked: Session) -> None:
    prefix: list[Any] = [system("You answer in JSON.")]
    told = ask(asked, prefix, [user("Invent a character.")], 200, json_schema=CHARACTERS)
    assert told.turn is not None
    prefix += [user("Invent a character."), told.turn]
    following = ask(asked, prefix, [user("Another.")], 4)
    assert following.before.turns_recomputed == 0
    assert following.before.reused >= told.final.resident - 1
    assert following.before.prefilled <= 8


def test_the_capability_is_told(asked: Session) -> None:
    assert asked.capabilities["structured_output"].answer == "yes"
    assert "llguidance" in asked.capabilities["structured_output"].evidence
