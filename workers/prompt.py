"""The one procedure that turns a prompt into tokens, cold and warm, on every backend.

Control tokens come from the template's own text only; what stands between two of them is one run,
tokenized as plain text, or the sampled ids where the model itself wrote it. Knows no engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from modeld.shared.errors import InvalidRequest, ManifestMismatch, UnsupportedFeature, unsupported
from modeld.shared.messages import Message, PromptIn, SegmentIn, SegmentOut
from modeld.workers.engine import Tokenizer
from modeld.workers.images import IMAGE, PlacedImage, Vision
from modeld.workers.locate import located, stretched
from modeld.workers.pictures import Picture, Pictures
from modeld.workers.rendering import ChatRenderer, Rendered, Span
from modeld.workers.runs import Ids, Offsets, Run, Runs
from modeld.workers.splits import Controls, Part
from modeld.workers.template import ChatTemplate

AROUND_TOKENS = 4  # shown on either side of a merge at the boundary


@dataclass(frozen=True)
class GeneratedTurn:
    """An answer as it was sampled.

    The sampled run is the prompt's last run (``tail``: after its last control token) and the
    answer, without a final end-of-generation token. ``spelled`` is False where the ids don't make
    up the text (a stop sequence cut within a token): then it is always recomputed from text.
    """

    turn_id: str
    tail_text: str
    tail_ids: tuple[int, ...]
    answer_text: str
    answer_ids: tuple[int, ...]
    spelled: bool = True


@dataclass(frozen=True)
class Assembled:
    """A prompt's tokens. ``tail`` is its last run, after the last control token.

    ``prefix_tokens`` of ``tokens`` belong to the prefix. ``segments`` are those of the prefix,
    then of the suffix; their byte offsets count in the rendered text of ``text_bytes``.
    ``images`` stand in order, each for ids below 0 among ``tokens`` and for a marker in ``text``.
    """

    tokens: list[int]
    prefix_tokens: int
    text_bytes: int
    additive: bool
    turns_recomputed: int
    segments: list[SegmentOut]
    tail_text: str
    tail_ids: list[int]
    text: str = ""
    images: tuple[PlacedImage, ...] = ()
    tools_end: int = 0  # tokens before the first message that isn't the system's; tools are there


@dataclass
class _Prompt:
    """A prompt as rendered."""

    text: str
    parts: list[Part]
    named: list[str]  # generated turns that segments name, in order


@dataclass
class _Built:
    tokens: list[int] = field(default_factory=list)
    ids: list[Ids] = field(default_factory=list)
    ends: list[Offsets] = field(default_factory=list)
    matched: set[str] = field(default_factory=set)  # texts of runs whose sampled ids stand
    tail: Run | None = None
    images: list[PlacedImage] = field(default_factory=list)


class PromptAssembler:
    """One session's. Remembers the runs of its last prompts, so that a warm one costs its news.

    What it answers never depends on what it remembers.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        prompt_format: str,
        vision: Vision | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._controls = Controls(tokenizer.controls, tokenizer.strips_left, tokenizer.strips_right)
        self._chat = prompt_format == "chat"
        if self._chat and template is None:
            raise InvalidRequest.of(
                "prompt_format", prompt_format, "raw", "The model has no chat template."
            )
        self._renderer = (
            ChatRenderer(template, self._chat_controls(vision), vision) if template else None
        )
        self._runs = Runs(tokenizer)
        self._vision = vision
        self._pictures = Pictures(vision)

    def _chat_controls(self, vision: Vision | None) -> Controls:
        """Those of the vocabulary, and the marker of images where the model takes any."""
        if vision is None:
            return self._controls
        tokenizer = self._tokenizer
        controls = {**tokenizer.controls, vision.marker: IMAGE}
        return Controls(controls, tokenizer.strips_left, tokenizer.strips_right)

    @functools.cached_property
    def control_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.controls.values())

    @functools.cached_property
    def longest_piece(self) -> int:
        """Bytes of the longest text that one token can stand for."""
        piece = self._tokenizer.piece
        return max(len(piece(token)) for token in range(self._tokenizer.vocab_size))

    def assemble(
        self,
        prefix: PromptIn,
        suffix: PromptIn | None,
        turns: Mapping[str, GeneratedTurn],
        admit: Callable[[int], None] = lambda _text_bytes: None,
    ) -> Assembled:
        """The tokens of the prefix alone, or of prefix and suffix with the generation cue.

        ``turns`` are the session's generated turns, oldest first. ``admit`` is told the rendered
        text's size in bytes before it is tokenized, and may raise to refuse it.

        Raises ManifestMismatch for segments of another prompt format (reason ``identity``) or for
        a suffix that merges with the prefix's end (reason ``boundary_merge``), InvalidRequest
        for what can't be rendered or is no image, and UnsupportedFeature (capability ``vision``)
        for images where none are taken: in the prefix, or by this model at all.
        """
        self._check(prefix, "prefix")
        if suffix is not None:
            self._check(suffix, "suffix")
        self._runs.turn_over()
        by_text = {
            turn.tail_text + turn.answer_text: turn for turn in turns.values() if turn.spelled
        }
        if suffix is None:
            whole = self._render(prefix, None, turns)
            admit(len(whole.text.encode()))
            built = self._build(whole, by_text, turns)
            return self._assembled(whole, built, len(built.tokens), True, prefix, None, None, turns)
        whole = self._render(prefix, suffix, turns)
        admit(len(whole.text.encode()))
        pictures = self._pictures.of(suffix.segments)
        built = self._build(whole, by_text, turns, pictures=pictures)
        alone = self._alone(prefix, turns)
        if alone is None or not whole.text.startswith(alone.text):
            known = self._build(alone, by_text, turns).tokens if alone else []
            count, additive = _common_tokens(known, built.tokens), False
        else:
            count, additive = self._boundary(alone, built, by_text, turns), True
        boundary = len(alone.text) if alone is not None and additive else None
        return self._assembled(whole, built, count, additive, prefix, suffix, boundary, turns)

    # --- what is asked

    def _check(self, prompt: PromptIn, part: str) -> None:
        if part == "suffix" and prompt.tools:
            raise InvalidRequest.of(
                "suffix.tools", len(prompt.tools), "none", "Tools go with the prefix."
            )
        asserted = "chat" if prompt.tools else ""
        for index, segment in enumerate(prompt.segments):
            if part == "prefix" and segment.message is not None and segment.message.images:
                raise images_in_prefix(f"prefix.segments[{index}]")
            given = (segment.text, segment.message, segment.generated_turn_id)
            if sum(value is not None for value in given) != 1:
                raise InvalidRequest.of(
                    f"{part}.segments[{index}]",
                    "",
                    "exactly one of text, message and generated_turn_id",
                )
            if segment.generated_turn_id is None:
                asserted = "raw" if segment.text is not None else "chat"
            if asserted and (asserted == "chat") != self._chat:
                break
        actual = "chat" if self._chat else "raw"
        if asserted and asserted != actual:
            raise ManifestMismatch(
                f"The {part} has {'messages or tools' if asserted == 'chat' else 'raw text'}, but "
                f"the session's prompt_format is {actual!r}. A prompt is all raw text or all "
                "messages: send the other kind, or open a session with the other format.",
                metadata={
                    "reason": "identity",
                    "field": "prompt_format",
                    "asserted": asserted,
                    "actual": actual,
                },
            )

    def _alone(self, prefix: PromptIn, turns: Mapping[str, GeneratedTurn]) -> _Prompt | None:
        """The prefix rendered by itself, or None if the template won't without the suffix."""
        try:
            return self._render(prefix, None, turns)
        except InvalidRequest:
            return None

    def _render(
        self, prefix: PromptIn, suffix: PromptIn | None, turns: Mapping[str, GeneratedTurn]
    ) -> _Prompt:
        segments = _segments(prefix, suffix)
        named = [s.generated_turn_id for s in segments if s.generated_turn_id is not None]
        if self._renderer is None or not self._chat:
            texts = [_raw_text(segment, turns) for segment in segments]
            return _Prompt("".join(texts), self._raw_parts(segments, texts), named)
        if suffix is None and not segments:
            return _Prompt("", [], [])  # nothing to render; many templates fail without a message
        messages = [_message(segment, turns) for segment in segments]
        rendered = self._renderer.render(messages, prefix.tools, suffix is not None)
        return _Prompt(rendered.text, rendered.parts, named)

    def _raw_parts(self, segments: Sequence[SegmentIn], texts: Sequence[str]) -> list[Part]:
        pieces: list[Part] = []
        for segment, text in zip(segments, texts, strict=True):
            if segment.parse_special and segment.text is not None:
                pieces += self._controls.split(text, strip=False)
            elif text:
                pieces.append(Part(text, None))
        return self._controls.join(pieces)

    # --- tokens

    def _build(
        self,
        whole: _Prompt,
        by_text: Mapping[str, GeneratedTurn],
        turns: Mapping[str, GeneratedTurn],
        *,
        end_is_bound: bool = True,
        pictures: Sequence[Picture] = (),
    ) -> _Built:
        """Tokens of all parts; sampled ids for the runs that a turn wrote, and images' own.

        ``end_is_bound`` says whether the end of the prompt can bound a sampled run.
        """
        built = _Built()
        bos = self._tokenizer.bos
        if self._tokenizer.add_bos and bos is not None:
            begins_with_bos = bool(whole.parts) and whole.parts[0].token == bos
            if not begins_with_bos:
                built.tokens.append(bos)
                built.ids.append(np.array([bos], dtype=np.int32))
                built.ends.append(np.zeros(1, dtype=np.int64))
        named = [turns[turn_id] for turn_id in whole.named]
        coming = iter(pictures)
        offset = chars = 0
        for index, (text, token) in enumerate(whole.parts):
            begin, chars = chars, chars + len(text)
            if token == IMAGE:
                size = len(text.encode())
                _put_image(built, next(coming), begin, offset, size)
                offset += size
                continue
            if token is not None:
                offset += len(text.encode())
                built.tokens.append(token)
                built.ids.append(np.array([token], dtype=np.int32))
                built.ends.append(np.array([offset], dtype=np.int64))
                continue
            at_end = index + 1 == len(whole.parts)
            turn = _turn_of(text, named, by_text) if end_is_bound or not at_end else None
            if turn is None:
                run = self._runs.of_text(text)
            else:
                ids = (*turn.tail_ids, *turn.answer_ids)
                run = self._runs.of_tokens(text, turn.turn_id, ids)
                built.matched.add(text)
            built.tokens += run.tokens
            built.ids.append(run.ids)
            built.ends.append(run.ends + offset)
            offset += run.size_bytes
            if at_end:
                built.tail = run
        return built

    def _boundary(
        self,
        alone: _Prompt,
        whole: _Built,
        by_text: Mapping[str, GeneratedTurn],
        turns: Mapping[str, GeneratedTurn],
    ) -> int:
        """How many of the whole's tokens are the prefix's; raises if they merge at its end."""
        known = self._build(alone, by_text, turns)
        if whole.tokens[: len(known.tokens)] == known.tokens:
            return len(known.tokens)
        if known.tail is not None and known.tail.text in known.matched:
            # An answer at the prefix's end: there its sampled ids stand only if a control token
            # follows, else it is part of a longer run.
            plain = self._build(alone, by_text, turns, end_is_bound=False)
            if whole.tokens[: len(plain.tokens)] == plain.tokens:
                return len(plain.tokens)
        check_boundary(known.tokens, whole.tokens, len(alone.text.encode()))
        return len(known.tokens)

    # --- the answer

    def _assembled(
        self,
        whole: _Prompt,
        built: _Built,
        prefix_tokens: int,
        additive: bool,
        prefix: PromptIn,
        suffix: PromptIn | None,
        boundary: int | None,
        turns: Mapping[str, GeneratedTurn],
    ) -> Assembled:
        recomputed = 0
        for turn_id in whole.named:
            turn = turns[turn_id]
            text = turn.tail_text + turn.answer_text
            recomputed += bool(turn.answer_ids) and text not in built.matched
        ranges, head = self._ranges(whole, prefix, suffix, boundary, turns)
        *segments, tools = located([*ranges, head], whole.text, built.ids, built.ends)
        assembled = Assembled(
            tokens=built.tokens,
            prefix_tokens=prefix_tokens,
            text_bytes=len(whole.text.encode()),
            additive=additive,
            turns_recomputed=recomputed,
            segments=segments,
            tail_text=built.tail.text if built.tail else "",
            tail_ids=list(built.tail.tokens) if built.tail else [],
            text=whole.text,
            images=tuple(built.images),
            tools_end=tools.token_end,
        )
        if self._vision is not None:
            self._vision.check(assembled)
        return assembled

    def _ranges(
        self,
        whole: _Prompt,
        prefix: PromptIn,
        suffix: PromptIn | None,
        boundary: int | None,
        turns: Mapping[str, GeneratedTurn],
    ) -> tuple[list[Span | None], Span]:
        """Each segment's characters, the template's text before its content included; and what
        stands before the first content that isn't the system's.
        """
        segments = _segments(prefix, suffix)
        if self._renderer is None or not self._chat:
            ranges: list[Span | None] = []
            end = 0
            for segment in segments:
                begin, end = end, end + len(_raw_text(segment, turns))
                ranges.append((begin, end))
            return ranges, (0, 0)
        if not segments:
            return [], (0, 0)
        messages = [_message(segment, turns) for segment in segments]
        rendered = Rendered(whole.text, whole.parts)
        spans = self._renderer.spans(messages, prefix.tools, suffix is not None, rendered)
        others = (
            span[0] if span else None
            for message, span in zip(messages, spans, strict=True)
            if message.role != "system"
        )
        head = (0, next((begin for begin in others if begin is not None), len(whole.text)))
        return stretched(spans, len(prefix.segments), boundary, len(whole.text)), head


def _put_image(built: _Built, picture: Picture, begin: int, offset: int, size: int) -> None:
    """An image's ids, which share the bytes of its marker (two or more)."""
    count = len(picture.ids)
    placed = PlacedImage(picture.digest, picture.pixels, begin, len(built.tokens), picture.ids)
    built.images.append(placed)
    built.tokens += picture.ids
    built.ids.append(np.array(picture.ids, dtype=np.int32))
    ends = np.full(count, offset + size - 1, dtype=np.int64)
    ends[-1] = offset + size
    built.ends.append(ends)


def images_in_prefix(where: str) -> UnsupportedFeature:
    """The refusal of an image outside the suffix."""
    return unsupported(
        "vision",
        f"{where} has an image, and images are taken in the suffix only. Send that message, and "
        "whatever follows it, in the suffix.",
    )


def check_boundary(
    prefix_tokens: Sequence[int], whole_tokens: Sequence[int], byte_offset: int
) -> None:
    """Raises ManifestMismatch (reason ``boundary_merge``) unless the whole begins with the prefix.

    ``byte_offset`` is the boundary's place in the rendered text's UTF-8 bytes.
    """
    same = _common_tokens(prefix_tokens, whole_tokens)
    if same == len(prefix_tokens):
        return
    around = slice(max(0, same - AROUND_TOKENS), same + AROUND_TOKENS)
    alone = ",".join(map(str, prefix_tokens[around]))
    joined = ",".join(map(str, whole_tokens[around]))
    raise ManifestMismatch(
        f"The suffix merges with the end of the prefix, at byte {byte_offset} of the rendered "
        f"prompt: the prefix alone ends in tokens {alone}, the whole has {joined} there. End the "
        "prefix where tokens can't merge: at the end of a message or of a line, or before the "
        "space of a new word.",
        metadata={
            "reason": "boundary_merge",
            "byte_offset": byte_offset,
            "prefix_tokens": alone,
            "whole_tokens": joined,
        },
    )


def _segments(prefix: PromptIn, suffix: PromptIn | None) -> list[SegmentIn]:
    return [*prefix.segments, *(suffix.segments if suffix is not None else [])]


def _turn(turn_id: str, turns: Mapping[str, GeneratedTurn]) -> GeneratedTurn:
    turn = turns.get(turn_id)
    if turn is None:
        raise InvalidRequest.of(
            "generated_turn_id",
            turn_id[:80],
            "the id of a turn that this session generated and still keeps",
            "Send the answer's text instead.",
        )
    return turn


def _raw_text(segment: SegmentIn, turns: Mapping[str, GeneratedTurn]) -> str:
    if segment.generated_turn_id is not None:
        return _turn(segment.generated_turn_id, turns).answer_text
    return segment.text or ""


def _message(segment: SegmentIn, turns: Mapping[str, GeneratedTurn]) -> Message:
    if segment.generated_turn_id is not None:
        answer = _turn(segment.generated_turn_id, turns).answer_text
        return Message(role="assistant", text=answer)
    assert segment.message is not None  # checked before
    return segment.message


def _turn_of(
    text: str, named: list[GeneratedTurn], by_text: Mapping[str, GeneratedTurn]
) -> GeneratedTurn | None:
    """The turn that wrote this run: the next one named with this text, else the latest."""
    if text not in by_text:
        return None
    for index, turn in enumerate(named):
        if turn.spelled and turn.tail_text + turn.answer_text == text:
            return named.pop(index)
    return by_text[text]


def _common_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
