"""A conversation's history: what to send as prefix and suffix. Shared by both clients; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from modeld.client.prompts import GeneratedTurn, Message, PromptItem, Segment
from modeld.client.session_core import StreamState
from modeld.shared.errors import InvalidRequest


@dataclass
class History:
    """Messages and generated turns, oldest first.

    A turn joins only once it has ended; a cancelled answer joins as the text that was delivered.
    """

    items: list[PromptItem] = field(default_factory=list)

    @classmethod
    def starting(cls, system: str, earlier: Sequence[PromptItem] = ()) -> History:
        first: list[PromptItem] = [Segment(Message("system", system))] if system else []
        return cls(first + list(earlier))

    def add(self, user: Message, answer: GeneratedTurn | None, text: str) -> None:
        self.items.append(user)
        self.items.append(answer if answer is not None else Message("assistant", text))

    def recorder(self, user: Message) -> Callable[[StreamState, GeneratedTurn | None], None]:
        return lambda state, answer: self.add(user, answer, state.text)


def require_chat(prompt_format: str) -> None:
    if prompt_format != "chat":
        raise InvalidRequest.of(
            "prompt_format",
            prompt_format,
            "'chat' for a conversation of messages",
            "The model has no chat template, or the session was opened raw; use turn() with text.",
        )
