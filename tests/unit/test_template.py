"""What a model's chat template may do, and what it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from modeld.shared.errors import InvalidRequest, UnsupportedFeature
from modeld.shared.manifest import template_digest
from modeld.shared.messages import Message, ToolCallPart
from modeld.workers.template import ChatTemplate

DUMP = "{{ messages | tojson }}"
TOOL = '{"type": "function", "function": {"name": "get", "parameters": {}}}'


def render(
    source: str, *messages: Message, tools: list[str] | None = None, cue: bool = False
) -> str:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source, special).render(messages, tools or [], cue)


def user(text: str = "hi") -> Message:
    return Message(role="user", text=text)


def test_messages_and_the_cue_reach_the_template() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert render(source, user("a"), user("b"), cue=True) == "<s>[user]a[user]b[assistant]"
    assert render(source, user("a")) == "<s>[user]a"


def test_blocks_leave_no_lines_of_their_own() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc"


def test_optional_fields_are_absent_when_empty() -> None:
    assert json.loads(render(DUMP, user())) == [{"role": "user", "content": "hi"}]


def test_a_tool_call_has_its_arguments_parsed_where_they_are_an_object() -> None:
    message = Message(
        role="assistant",
        text="",
        tool_calls=[
            ToolCallPart(id="c1", name="get", arguments='{"n": [1, "ü"]}'),
            ToolCallPart(id="c2", name="get", arguments="not json"),
        ],
    )
    calls = json.loads(render(DUMP, message))[0]["tool_calls"]
    assert calls[0] == {
        "id": "c1",
        "type": "function",
        "function": {"name": "get", "arguments": {"n": [1, "ü"]}},
    }
    assert calls[1]["function"]["arguments"] == "not json"


def test_a_tool_answer_carries_its_id_and_name() -> None:
    message = Message(role="tool", text="4", tool_call_id="c1", name="get")
    assert json.loads(render(DUMP, message))[0] == {
        "role": "tool",
        "content": "4",
        "tool_call_id": "c1",
        "name": "get",
    }


def test_json_is_neither_escaped_for_html_nor_for_ascii() -> None:
    assert render("{{ messages[0].content | tojson }}", user("<é>&'")) == '"<é>&\'"'


def test_tools_are_known_from_the_template_itself() -> None:
    with_tools = "{% if tools %}{{ tools[0].function.name }}{% endif %}"
    assert ChatTemplate(with_tools, {}).supports_tools
    assert not ChatTemplate(DUMP, {}).supports_tools
    assert render(with_tools, user(), tools=[TOOL]) == "get"
    assert render("{{ tools is none }}", user()) == "True"


def test_tools_for_a_template_without_a_place_for_them_are_refused() -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        render(DUMP, user(), tools=[TOOL])
    assert caught.value.metadata["capability"] == "tools"


@pytest.mark.parametrize(
    "tool", ["", "[]", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}', '{"a":' * 300]
)
def test_a_tool_that_is_no_json_object_is_named(tool: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render("{{ tools }}", user(), tools=[TOOL, tool])
    assert caught.value.metadata["field"] == "tools[1]"


@pytest.mark.parametrize("role", ["", "User", "user\n", "a b", "x" * 33, "<|im_end|>"])
def test_a_role_is_a_plain_name(role: str) -> None:
    with pytest.raises(InvalidRequest, match="role"):
        render(DUMP, Message(role=role, text=""))


def test_loop_controls_and_generation_marks_work() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{{ loop.index }}of{{ loop.length }}"
        "{% endgeneration %}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    )
    assert render(source, user("a"), user("b"), user("c")) == "a1of3b2of3"


def test_the_template_refuses_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_refusal_never_quotes_the_prompt() -> None:
    source = "{{ raise_exception('Unknown: ' + messages[0].content) }}"
    with pytest.raises(InvalidRequest, match="Unknown: …") as caught:
        render(source, user("secret words"))
    assert "secret" not in str(caught.value)
    for source in (
        "{{ raise_exception(messages[0].content) }}",
        "{{ messages[0][messages[0].content].x }}",
        "{{ {}[messages[0].content] + 1 }}",
        "{{ messages[0].content.index('x') }}",
    ):
        with pytest.raises(InvalidRequest) as caught:
            render(source, user("secret words"))
        assert "secret" not in str(caught.value), source


def test_something_undefined_is_named() -> None:
    with pytest.raises(InvalidRequest, match="has no attribute 'nothing'"):
        render("{{ messages[0].nothing.more }}", user())


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a' | nofilter }}", "{{" + "(" * 9000, "x" * 300_000]
)
def test_a_broken_template_fails_at_rendering_not_before(source: str) -> None:
    template = ChatTemplate(source, {})
    assert template.error is not None
    assert not template.supports_tools
    with pytest.raises(InvalidRequest, match="prompt_format=raw"):
        template.render([user()], [], True)


DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = %s %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{% set x = m(n - 1) %}{% set x = m(n - 1) %}{% endif %}"
        "{% endmacro %}{{ m(40) }}",
        "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
        DOUBLING.replace("%s", "ns.x ~ ns.x"),
        DOUBLING.replace("%s", "ns.x + ns.x"),
        DOUBLING.replace("%s", "ns.x * 2"),
        DOUBLING.replace("%s", "ns.x | replace('a', ns.x)"),
        DOUBLING.replace("%s", "ns.x.replace('a', ns.x)"),
        DOUBLING.replace("%s", "[ns.x, ns.x] | join"),
        DOUBLING.replace("%s", "''.join([ns.x, ns.x])"),
        "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 60,
        "{{ 'a' * 10**10 }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a\n' | indent(10**9) }}",
        "{{ '{:>999999999}'.format('a') }}",
        "{{ '{:{}}'.format('a', 10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%999999999s' | format('a') }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{{ range(10**9) | list }}",
        "{{ lipsum(n=10**6) }}",
        "{{ messages | tojson(indent=10**8) }}",
        "{{ '\\ud800' }}",
    ],
)
def test_a_template_can_neither_hang_nor_eat_memory(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source, user())


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{% include 'x' %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
    ],
)
def test_a_template_cannot_reach_python(source: str) -> None:
    try:
        text = render(source, user())
    except InvalidRequest:
        return
    assert text == ""


def test_a_long_conversation_is_no_attack() -> None:
    source = "{% for m in messages %}{{ '<' + m.content ~ '>' }}{% endfor %}"
    assert len(render(source, *[user("x" * 5000)] * 2000)) == 2000 * 5002


def test_the_digest_covers_the_source_and_what_decides_its_rendering() -> None:
    template = ChatTemplate("x", {"bos_token": "<s>", "eos_token": "</s>"})
    assert template.digest == template_digest("x", "<s>", "</s>")
    others: list[Any] = [("y", "<s>", "</s>"), ("x", "", "</s>"), ("x", "<s>", "")]
    assert len({template.digest, *(template_digest(*other) for other in others)}) == 4


def test_tool_calls_are_refused_where_the_template_has_no_place_for_them() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m['content'] }}{% endfor %}", {})
    call = ToolCallPart(id="1", name="clock", arguments="{}")
    message = Message(role="assistant", text="", tool_calls=[call])
    with pytest.raises(UnsupportedFeature, match="tool calls"):
        template.render([message], [], False)
