"""Prompts with images: where each stands, what stands for it, and what is refused."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from modeld.shared.errors import InvalidRequest, UnsupportedFeature
from modeld.shared.messages import (
    EnsureOp,
    ImageIn,
    Message,
    PromptIn,
    RenderOp,
    RenderResult,
    SegmentIn,
    Status,
)
from modeld.workers.engine import Cancelled
from modeld.workers.images import PlacedImage, Vision, image_ids
from modeld.workers.prompt import Assembled, GeneratedTurn, PromptAssembler
from modeld.workers.template import ChatTemplate
from tests.support.core_harness import FakeOp, Harness, chat, options, turn_ref
from tests.support.fake_engine import TEMPLATE, FakeContext, FakeEngine, FakeTokenizer
from tests.support.pictures import picture, png_of

RED, BLUE = picture((200, 0, 0)), picture((0, 0, 200))
VISION = Vision("<image>", tokens=lambda pixels: pixels.shape[2] // 2)  # 8 pixels wide: 4
PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}{{ '<image>' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONLY_PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}"
    "{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def shows(text: str, *images: tuple[bytes, int], role: str = "user") -> SegmentIn:
    given = [ImageIn(data=data, mime_type="image/png", at=at) for data, at in images]
    return SegmentIn(message=Message(role=role, text=text, images=given))


def says(text: str, role: str = "user") -> SegmentIn:
    return SegmentIn(message=Message(role=role, text=text))


def assembler(template: str = TEMPLATE, vision: Vision | None = VISION) -> PromptAssembler:
    compiled = ChatTemplate(template, {"bos_token": "", "eos_token": "<|im_end|>"})
    return PromptAssembler(FakeTokenizer(), compiled, "chat", vision)


def assembled(
    *suffix: SegmentIn, template: str = TEMPLATE, vision: Vision | None = VISION
) -> Assembled:
    prefix = PromptIn(segments=[says("be kind", "system")])
    return assembler(template, vision).assemble(prefix, PromptIn(segments=list(suffix)), {})


def spelled(tokens: Sequence[int]) -> str:
    """Text of tokens, with a star for each position of an image."""
    tokenizer = FakeTokenizer()
    return b"".join(tokenizer.piece(t) if t >= 0 else b"*" for t in tokens).decode()


@pytest.mark.parametrize("template", [TEMPLATE, PARTS])
def test_each_image_stands_in_its_place_among_the_text(template: str) -> None:
    done = assembled(shows("before after", (RED, 6), (BLUE, 12)), template=template)
    assert "\nbefore**** after****<|im_end|>" in spelled(done.tokens)
    assert "\nbefore<image> after<image><|im_end|>" in done.text
    first, second = done.images
    assert done.text[first.begin :].startswith("<image> after")
    assert done.tokens[first.token : first.token + 4] == list(first.ids)
    assert first.pixels[0, 0, 0].tolist() == [200, 0, 0]
    assert second.pixels[0, 0, 0].tolist() == [0, 0, 200]
    assert second.ids == image_ids(second.digest, 4)


def test_a_template_that_takes_only_parts_gets_text_as_parts_too() -> None:
    done = assembled(shows("what is it?", (RED, 0)), says("well?"), template=ONLY_PARTS)
    text = spelled(done.tokens)
    assert "system\nbe kind<|im_end|>" in text
    assert "****what is it?<|im_end|>" in text
    assert "well?" in text


@pytest.mark.parametrize("template", [TEMPLATE, PARTS])
def test_text_that_spells_the_marker_stays_text(template: str) -> None:
    done = assembled(says("an <image> tag"), shows("see <image>", (RED, 0)), template=template)
    text = spelled(done.tokens)
    assert "an <image> tag" in text
    assert "****see <image>" in text
    assert len(done.images) == 1


def test_text_that_spells_the_marker_is_refused_where_the_engine_reads_the_text() -> None:
    reads = Vision("<image>", by_text=True)
    with pytest.raises(InvalidRequest, match="finds images"):
        assembled(says("an <image> tag"), vision=reads)
    assert len(assembled(shows("this", (RED, 0)), vision=reads).images) == 1


def test_equal_images_match_and_others_do_not() -> None:
    one, same, other = (assembled(shows("x", (data, 0))).tokens for data in (RED, RED, BLUE))
    assert one == same
    assert len(one) == len(other)
    assert one != other


def test_a_segments_range_covers_its_images() -> None:
    done = assembled(shows("look", (RED, 4)), says("and tell"))
    raw = done.text.encode()
    shown, told = done.segments[1], done.segments[2]
    assert raw[: shown.byte_end].endswith(b"look<image>")
    assert b"and tell" in raw[told.byte_begin : told.byte_end]
    image = done.images[0]
    assert shown.token_begin <= image.token < image.token + 4 <= shown.token_end
    assert told.token_begin == shown.token_end
    assert all(segment.located for segment in done.segments)


def test_an_answer_after_an_image_keeps_its_sampled_tokens() -> None:
    first = assembled(shows("look", (RED, 0)))
    odd = tuple(b"hello")  # not how the tokenizer spells it
    turn = GeneratedTurn("t1", first.tail_text, tuple(first.tail_ids), "hello", odd)
    prefix = PromptIn(segments=[says("be kind", "system")])
    suffix = PromptIn(segments=[shows("look", (RED, 0)), turn_ref("t1"), says("more")])
    again = assembler().assemble(prefix, suffix, {"t1": turn})
    assert again.turns_recomputed == 0
    assert again.tokens[: len(first.tokens) + 5] == [*first.tokens, *odd]


def test_an_image_in_the_prefix_is_refused() -> None:
    with pytest.raises(UnsupportedFeature) as error:
        assembler().assemble(PromptIn(segments=[shows("x", (RED, 0))]), None, {})
    assert error.value.metadata["capability"] == "vision"


def test_a_model_without_vision_refuses_images() -> None:
    with pytest.raises(UnsupportedFeature) as error:
        assembled(shows("x", (RED, 0)), vision=None)
    assert error.value.metadata["capability"] == "vision"


def test_a_bad_image_is_named() -> None:
    with pytest.raises(InvalidRequest) as error:
        assembled(says("hi"), shows("x", (RED, 0), (png_of(50_000, 50_000), 1)))
    assert error.value.metadata["field"] == "suffix.segments[1].images[1]"


def test_a_template_that_leaves_an_image_out_is_told_of() -> None:
    drops = TEMPLATE.replace(
        "message['content']", "(message['content'] if message['role'] != 'tool' else '')"
    )
    with pytest.raises(InvalidRequest, match="leaves out"):
        assembled(shows("x", (RED, 0), role="tool"), template=drops)


def test_a_template_with_another_marker_than_the_engines_is_told_of() -> None:
    other = PARTS.replace("'<image>'", "'<picture>'")
    with pytest.raises(UnsupportedFeature) as error:
        assembled(shows("x", (RED, 0)), template=other)
    assert error.value.metadata["capability"] == "vision"


# --- through the session core


class SeeingFakeContext(FakeContext):
    """Its KV depends on what an image shows, not on the ids that stand for it."""

    shown: tuple[PlacedImage, ...] = ()

    def show(self, images: Sequence[PlacedImage]) -> None:
        self.shown = tuple(images)

    def evaluate(self, tokens: Sequence[int], position: int, *, cancelled: Cancelled) -> int:
        seen = {
            image.token + n: zlib.crc32(image.pixels.tobytes()) % 97
            for image in self.shown
            for n in range(len(image.ids))
        }
        plain = [
            token if token >= 0 else seen[position + index] for index, token in enumerate(tokens)
        ]
        done = super().evaluate(plain, position, cancelled=cancelled)
        self.tokens[position:] = tokens[:done]
        return done


class SeeingFakeEngine(FakeEngine):
    vision: Vision | None = VISION

    def new_context(
        self, window: int, k_type: str, v_type: str, compute_bytes: int = 0
    ) -> FakeContext:
        context = super().new_context(window, k_type, v_type, compute_bytes)
        context.__class__ = SeeingFakeContext
        return context


def seeing() -> Harness:
    harness = Harness(SeeingFakeEngine())
    harness.open(prompt_format="chat", window=512)
    return harness


def test_a_conversation_about_an_image_reuses_all_of_it() -> None:
    harness, system = seeing(), chat(("system", "be kind"))
    op = FakeOp()
    harness.turn(system, PromptIn(segments=[shows("look", (RED, 0))]), options(5), op=op)
    follow = PromptIn(segments=[shows("look", (RED, 0)), turn_ref("t1"), says("more")])
    op2 = FakeOp()
    harness.turn(system, follow, options(5), op=op2)
    status = op2.of(Status)[-1]
    assert status.turns_recomputed == 0
    assert status.prefilled < 30
    harness.check_records()
    fresh = seeing()
    op3 = FakeOp()
    text = PromptIn(segments=[shows("look", (RED, 0)), says(op.text, "assistant"), says("more")])
    fresh.turn(system, text, options(5), op=op3)
    assert op3.text == op2.text


def test_another_image_gives_another_answer_and_is_evaluated() -> None:
    harness, system = seeing(), chat(("system", "be kind"))
    answers = []
    for data in (RED, BLUE, RED):
        op = FakeOp()
        harness.turn(system, PromptIn(segments=[shows("look", (data, 0))]), options(12), op=op)
        answers.append(op.text)
    assert answers[0] == answers[2] != answers[1]


def test_penalties_do_not_count_the_ids_of_images() -> None:
    harness, system = seeing(), chat(("system", "be kind"))
    suffix = PromptIn(segments=[shows("look", (RED, 4))])
    harness.turn(system, suffix, options(8, repeat_penalty=1.5, repeat_last_n=-1))


def test_a_refused_image_changes_nothing() -> None:
    harness = seeing()
    harness.ensure(chat(("system", "be kind")))
    before = harness.explain()
    bad = PromptIn(segments=[shows("x", (b"no image", 0))])
    with pytest.raises(InvalidRequest):
        harness.turn(chat(("system", "be kind")), bad)
    with pytest.raises(UnsupportedFeature):
        harness.run(EnsureOp(session_id="a", prefix=PromptIn(segments=[shows("x", (RED, 0))])))
    assert harness.explain() == before


def test_an_engine_without_vision_refuses_and_renders_without() -> None:
    harness = Harness()
    harness.open(prompt_format="chat")
    with pytest.raises(UnsupportedFeature):
        harness.turn(chat(), PromptIn(segments=[shows("x", (RED, 0))]))


def test_rendering_shows_where_an_image_goes() -> None:
    message = shows("look", (RED, 0)).message
    assert message is not None
    op = RenderOp(messages=[message], tools=[], add_generation_prompt=True)
    result = seeing().run(op)
    assert isinstance(result, RenderResult)
    assert "<image>look" in result.text
    assert sum(token < 0 for token in result.ids) == 4
