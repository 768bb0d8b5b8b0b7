"""Turns through the product with all that tests look at: ids, text, numbers, in one value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from modeld.client import (
    Chunk,
    Client,
    Final,
    GeneratedTurn,
    PrefillStatus,
    SampledToken,
    Session,
    StopReason,
)
from modeld.client.streams import DecodeStream, TurnStream
from tests.support.daemon import MODEL

Prompt = Any


@dataclass(frozen=True)
class Told:
    """A finished turn or decode."""

    ids: list[int]
    text: str
    logprobs: list[SampledToken]
    chunks: list[Chunk]
    prefix: PrefillStatus | None
    suffix: PrefillStatus | None
    final: Final
    turn: GeneratedTurn | None

    @property
    def stop(self) -> StopReason:
        return self.final.stop_reason

    @property
    def before(self) -> PrefillStatus:
        assert self.prefix is not None
        return self.prefix

    @property
    def after(self) -> PrefillStatus:
        assert self.suffix is not None
        return self.suffix


def ask(
    session: Session, prefix: Prompt, suffix: Prompt, max_tokens: int = 8, **options: Any
) -> Told:
    """One turn, read to its end."""
    return told(session.turn(prefix, suffix, max_tokens=max_tokens, token_ids=True, **options))


def go_on(session: Session, max_tokens: int = 8, **options: Any) -> Told:
    """One decode of what is resident, read to its end."""
    return told(session.decode(max_tokens=max_tokens, token_ids=True, **options))


def told(stream: TurnStream | DecodeStream) -> Told:
    """Everything that a stream brings, from where it stands to its end."""
    chunks = list(stream.chunks())
    turn = stream if isinstance(stream, TurnStream) else None
    assert stream.final is not None
    return Told(
        ids=[token for chunk in chunks for token in chunk.token_ids],
        text=stream.text,
        logprobs=[sampled for chunk in chunks for sampled in chunk.logprobs],
        chunks=chunks,
        prefix=turn.prefix_status if turn else None,
        suffix=turn.suffix_status if turn else None,
        final=stream.final,
        turn=stream.generated_turn,
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def prompt_ids(client: Client, messages: Sequence[Any], *, cue: bool = True) -> list[int]:
    """A chat prompt's token ids, as the daemon's own template and tokenizer have them."""
    rendered = client.render_template(MODEL, messages, add_generation_prompt=cue, load=True)
    return list(rendered.token_ids)


def text_ids(client: Client, text: str) -> list[int]:
    """A raw text's token ids."""
    return list(client.tokenize(MODEL, text, load=True).token_ids)


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
