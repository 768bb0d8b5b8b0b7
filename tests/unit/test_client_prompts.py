"""What a caller writes becomes the manifest that every implementation of the contract builds."""

from __future__ import annotations

import math

import pytest

from modeld.client.decode_options import DecodeOptions
from modeld.client.prompts import (
    GeneratedTurn,
    Message,
    Segment,
    Text,
    digest_of,
    prompt_part,
    wire_prompt,
)
from modeld.shared.errors import InvalidRequest
from modeld.shared.manifest import Identity

IDENTITY = Identity("llama", "1", "aa", (), "raw", "", False, "bb", "cc", "")


def wire(prompt, *, stable=True, prompt_format="chat", session_id="s-1", tools=()):
    part = prompt_part(prompt, stable=stable, tools=tools)
    return wire_prompt(part, prompt_format=prompt_format, session_id=session_id)


def test_the_protos_test_vector_is_met():
    sent = wire("hello", prompt_format="raw")
    assert sent.proto.segments[0].hash == (
        "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    )
    assert digest_of(IDENTITY, sent) == (
        "f7a955e118eef73484490928018e5a7356872378edfcd5c02e63458e5aa6df14"
    )


def test_kinds_and_stability_follow_the_role_and_the_part():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    prefix, suffix = wire(messages), wire(messages[1], stable=False)
    assert [(s.kind, s.stable, s.cache_class) for s in prefix.proto.segments] == [
        ("system", True, "task_pinned"),
        ("user_turn", True, "task_pinned"),
    ]
    (segment,) = suffix.proto.segments
    assert (segment.kind, segment.stable, segment.cache_class) == ("user_turn", False, "volatile")


def test_a_segment_keeps_the_attributes_it_was_given():
    given = Segment(Text("map"), kind="repo_map", cache_class="repo_map", invalidation="on_edit")
    (segment,) = wire(given, prompt_format="raw").proto.segments
    assert (segment.kind, segment.cache_class, segment.invalidation) == (
        "repo_map",
        "repo_map",
        "on_edit",
    )


def test_a_generated_turn_goes_by_id_in_its_own_session_and_as_text_in_another():
    turn = GeneratedTurn("t-1", "s-1", "an answer")
    (own,) = wire(turn).proto.segments
    (chat,) = wire(turn, session_id="s-2").proto.segments
    (raw,) = wire(turn, session_id="s-2", prompt_format="raw").proto.segments
    assert own.generated_turn_id == "t-1"
    assert (chat.message.role, chat.message.content[0].text) == ("assistant", "an answer")
    assert raw.raw.text == "an answer"


@pytest.mark.parametrize(
    ("prompt", "prompt_format"), [("text", "chat"), ({"role": "user", "content": "x"}, "raw")]
)
def test_a_form_that_the_session_cannot_take_is_refused_before_sending(prompt, prompt_format):
    with pytest.raises(InvalidRequest, match="prompt_format"):
        wire(prompt, prompt_format=prompt_format)


@pytest.mark.parametrize(
    "prompt", [[7], {"role": "user", "text": "x"}, {"content": "x"}, {"role": "u", "content": [3]}]
)
def test_what_is_not_a_prompt_is_refused_naming_the_field(prompt):
    with pytest.raises(InvalidRequest) as caught:
        wire(prompt)
    assert caught.value.metadata["field"]


def test_tools_given_as_mappings_are_sent_as_one_json_text_each():
    sent = wire([], tools=[{"b": 1, "a": "ü"}, '{"raw": 1}'])
    assert [t.json_schema for t in sent.proto.tools] == ['{"a":"ü","b":1}', '{"raw": 1}']


def test_tool_calls_of_the_usual_chat_form_are_understood():
    call = {"id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}
    (segment,) = wire({"role": "assistant", "content": None, "tool_calls": [call]}).proto.segments
    sent = segment.message.tool_calls[0]
    assert (sent.id, sent.name, sent.arguments) == ("c1", "f", '{"x": 1}')


def test_options_that_are_not_set_stay_unset_on_the_wire():
    sent = DecodeOptions().to_proto()
    assert sent.ByteSize() <= 2  # nothing but an empty sampling
    assert not sent.sampling.HasField("temperature")
    given = DecodeOptions(temperature=0.0, stop="x", logit_bias={3: -math.inf}, seed=0).to_proto()
    assert given.sampling.HasField("temperature")
    assert given.sampling.HasField("seed")
    assert list(given.stop) == ["x"]
    assert given.sampling.logit_bias[3] == -math.inf


def test_an_option_of_the_wrong_kind_is_a_typed_error():
    with pytest.raises(InvalidRequest):
        DecodeOptions(seed=-1).to_proto()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_tokens": 10**23}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"top_k": 2**40}, "top_k"),
        ({"stop": ["x\udcff"]}, "stop"),
        ({"json_schema": "\udcff"}, "json_schema"),
        ({"logit_bias": {2**40: 1.0}}, "logit_bias"),
    ],
)
def test_an_option_that_cannot_be_sent_is_named(options, name):
    with pytest.raises(InvalidRequest, match=name) as caught:
        DecodeOptions(**options).to_proto()
    assert caught.value.metadata["field"] == name


def test_messages_may_be_objects_with_parts():
    (segment,) = wire(Message("user", ("a", "b"))).proto.segments
    assert [p.text for p in segment.message.content] == ["a", "b"]
