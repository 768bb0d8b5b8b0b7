"""What the session core promises about answers under a constraint: their text, end and rest."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from typing import Any

import pytest

from modeld.shared.errors import InvalidRequest
from modeld.shared.messages import (
    ChunkOut,
    DecodeIn,
    ExplainResult,
    FinalOut,
    LoadOp,
    PromptIn,
    SampledTokenOut,
    SegmentIn,
)
from tests.support.core_harness import FakeOp, Harness, options, raw, turn_ref

CHOICE = "yes|no|perhaps"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "marks": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 3},
    },
    "required": ["name", "size", "marks"],
    "additionalProperties": False,
}


def under(text: str, max_tokens: int = 200, *, kind: str = "regex", **more: Any) -> DecodeIn:
    made = options(max_tokens, **more)
    made.structured_kind, made.structured = kind, text
    return made


def ready(window: int = 512) -> Harness:
    harness = Harness()
    harness.open(window=window)
    harness.ensure(raw("one two three\n"))
    return harness


def answered(harness: Harness, chosen: DecodeIn) -> tuple[str, FinalOut]:
    """A turn of its own, with a prompt that the seed sets apart."""
    op = FakeOp()
    seed = chosen.sampling.seed
    final = harness.turn(raw("one\n"), raw(f"question {seed}\n"), chosen, op=op)
    return op.text, final


# --- the text ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_answer_matches_and_ends_by_itself(temperature: float) -> None:
    harness = ready()
    texts = set()
    for seed in range(16):
        chosen = under(CHOICE, temperature=temperature, seed=seed, top_k=0, min_p=0.0)
        text, final = answered(harness, chosen)
        assert re.fullmatch(CHOICE, text)
        assert final.stop_reason == "eos"
        texts.add(text)
    assert len(texts) > 1
    harness.check_records()


@pytest.mark.parametrize("seed", range(12))
def test_json_by_a_schema_parses_and_holds_what_it_says(seed: int) -> None:
    chosen = under(json.dumps(SCHEMA), kind="json_schema", temperature=1.0, seed=seed, top_k=0)
    text, final = answered(ready(), chosen)
    assert final.stop_reason == "eos"
    found = json.loads(text)
    assert set(found) == {"name", "size", "marks"}
    assert len(found["name"]) <= 6
    assert found["size"] in ("small", "large")
    assert len(found["marks"]) <= 3
    assert all(type(mark) is int and mark >= 1 for mark in found["marks"])


def test_the_end_that_is_not_needed_is_not_sampled() -> None:
    harness, op = ready(), FakeOp()
    final = harness.decode(under("yes"), op=op)
    assert (op.text, final.stop_reason) == ("yes", "eos")
    assert final.tokens == len(op.ids)
    assert not set(op.ids) & harness.engine.tokenizer.end_of_generation


def test_an_end_is_sampled_where_the_answer_could_go_on() -> None:
    harness, op = ready(), FakeOp()
    harness.engine.bias[harness.engine.tokenizer.controls["<|im_end|>"]] = 1e3
    final = harness.decode(under("(ab)+"), op=op)
    assert (op.text, final.stop_reason) == ("ab", "eos")
    assert op.ids[-1] in harness.engine.tokenizer.end_of_generation


def test_an_answer_that_is_cut_is_a_beginning_and_says_so() -> None:
    whole, _ = answered(ready(), under("(abc|def){8}"))
    for limit in range(1, 6):
        text, final = answered(ready(), under("(abc|def){8}", limit))
        assert final.stop_reason == "length"
        assert whole.startswith(text)
    harness = Harness()
    harness.open(window=24)
    text, final = answered(harness, under("(abc|def){8}"))
    assert final.stop_reason == "context_full"
    assert whole.startswith(text)


def test_the_last_token_that_is_allowed_completes_the_answer() -> None:
    text, final = answered(ready(), under("hello"))
    _, again = answered(ready(), under("hello", final.tokens))
    assert (text, again.stop_reason) == ("hello", "eos")


def test_an_answer_cut_within_a_character_ends_before_it_and_goes_on_from_there() -> None:
    harness = ready()
    regex, texts, ends = "a[éè🙂]{4}z", [], []
    for _ in range(60):
        op = FakeOp()
        ends.append(harness.decode(under(regex, 3), op=op).stop_reason)
        texts.append(op.text)
        so_far = "".join(texts)
        assert re.fullmatch(r"(a[éè🙂]{0,4}z?)?", so_far)
        harness.check_records()
        if ends[-1] == "eos":
            break
        # A character may take four tokens: with three at a time it can't be had.
        op = FakeOp()
        ends.append(harness.decode(under(regex, 5), op=op).stop_reason)
        texts.append(op.text)
        if ends[-1] == "eos":
            break
    assert re.fullmatch(regex, "".join(texts))


# --- with other options ---------------------------------------------------------------------------


def test_what_is_banned_stays_banned() -> None:
    harness = ready()
    for seed in range(8):
        ban = {ord("y"): -math.inf, ord("p"): -math.inf}
        chosen = under(CHOICE, logit_bias=ban, temperature=1.5, seed=seed)
        assert answered(harness, chosen)[0] == "no"


def test_a_bias_chooses_among_what_is_allowed() -> None:
    chosen = under(CHOICE, logit_bias={ord("p"): 100.0, ord("Z"): 1e6})
    assert answered(ready(), chosen)[0] == "perhaps"


def test_nothing_left_to_choose_is_refused_and_what_was_said_is_kept() -> None:
    harness, op = ready(), FakeOp()
    chosen = under("(ab){3}!", logit_bias={ord("!"): -math.inf})
    with pytest.raises(InvalidRequest, match="constraint allows"):
        harness.decode(chosen, op=op, turn_id="cut")
    assert op.text == "ababab"
    harness.check_records()
    after, fresh = FakeOp(), FakeOp()
    harness.turn(raw("one two three\n"), _with(turn_ref("cut"), "\nmore\n"), options(6), op=after)
    other = ready()
    other.turn(raw("one two three\n"), raw("ababab\nmore\n"), options(6), op=fresh)
    assert after.text == fresh.text


def test_stop_sequences_end_an_answer_before_its_own_end() -> None:
    harness, op = ready(), FakeOp()
    final = harness.decode(under("hello (there|world)!", stop=["o t", "o w"]), op=op)
    assert (op.text, final.stop_reason) == ("hell", "stop_sequence")
    again = FakeOp()
    final = harness.decode(under("hello (there|world)!"), op=again)
    assert re.fullmatch("hello (there|world)!", op.text + again.text)
    assert final.stop_reason == "eos"


def test_log_probabilities_are_the_models_own() -> None:
    free, bound = FakeOp(), FakeOp()
    ready().decode(options(1, top_logprobs=3), op=free)
    ready().decode(under("~q~", 1, top_logprobs=3), op=bound)
    (mine,), (theirs,) = (_logprobs(op) for op in (bound, free))
    assert mine.top == theirs.top
    assert mine.sampled.raw == b"~"
    assert mine.sampled.logprob < theirs.top[0].logprob


def test_the_same_seed_gives_the_same_answer() -> None:
    chosen = under("[a-z]{20}", temperature=1.0, seed=5)
    assert answered(ready(), chosen)[0] == answered(ready(), chosen)[0]


# --- going on -------------------------------------------------------------------------------------


def test_a_second_decode_goes_on_under_the_same_constraint() -> None:
    harness, parts = ready(), []
    for _ in range(100):
        op = FakeOp()
        final = harness.decode(under("([a-z]{3}-){5}", 4), op=op)
        parts.append(op.text)
        if final.stop_reason == "eos":
            break
    assert len(parts) > 2
    assert re.fullmatch("([a-z]{3}-){5}", "".join(parts))
    op = FakeOp()
    final = harness.decode(under("([a-z]{3}-){5}", 4), op=op)
    assert (op.text, final.stop_reason, final.tokens) == ("", "eos", 0)


def test_an_answer_that_was_free_can_be_constrained_where_it_fits() -> None:
    harness, first, rest = ready(), FakeOp(), FakeOp()
    harness.decode(options(3), op=first)
    final = harness.decode(under(f"{re.escape(first.text)} and [a-z]{{2}}"), op=rest)
    assert re.fullmatch(" and [a-z]{2}", rest.text)
    assert final.stop_reason == "eos"


# --- refusals -------------------------------------------------------------------------------------


def test_a_refused_constraint_changes_nothing() -> None:
    harness = ready()
    harness.turn(raw("one\n"), raw("two\n"), options(5), turn_id="t")
    before = harness.explain()
    for bad in (
        under("("),
        under('{"type": "strng"}', kind="json_schema"),
        under("start: nowhere", kind="grammar"),
        under("a" * 200_000),
        under("a", kind="xml"),
        DecodeIn(sampling=options().sampling, structured_kind="regex", ignore_eos=True),
    ):
        with pytest.raises(InvalidRequest):
            harness.turn(raw("other\n"), raw("x"), bad)
        with pytest.raises(InvalidRequest):
            harness.decode(bad)
    with pytest.raises(InvalidRequest, match="the answer so far"):
        harness.decode(under("\u2603"))
    assert harness.explain() == before
    harness.check_records()


def test_what_is_resident_is_reused_before_and_after() -> None:
    harness = ready()
    counts = []
    for chosen in (options(4), under(CHOICE), options(4)):
        harness.turn(raw("one two three\n"), raw("four\n"), chosen)
        counts.append(_evaluated(harness.explain()))
    # The prompt is there: of the second and third turn its last token, and the answers'.
    assert all(later - earlier < 12 for earlier, later in pairwise(counts))


def test_the_vocabulary_is_made_for_the_first_constraint_and_goes_with_the_model() -> None:
    harness, made = ready(), []
    for chosen in (options(3), under(CHOICE), under("x+y")):
        harness.turn(raw("a\n"), raw("b\n"), chosen)
        made.append(harness.core.model._constraints)
    harness.run(LoadOp(path="m", model="m", digest="d"))
    assert made[0] is None
    assert made[1] is made[2] is not None
    assert harness.core.model._constraints is None


def _evaluated(found: ExplainResult) -> int:
    return found.counters["evaluated_tokens"]


def _logprobs(op: FakeOp) -> list[SampledTokenOut]:
    return [sampled for chunk in op.of(ChunkOut) for sampled in chunk.logprobs]


def _with(reference: SegmentIn, text: str) -> PromptIn:
    prompt = raw(text)
    prompt.segments.insert(0, reference)
    return prompt
