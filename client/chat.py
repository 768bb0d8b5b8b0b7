"""A conversation's history: what to send as prefix and suffix. Shared by both clients; pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from modeld.client.prompts import GeneratedTurn, Message, PromptItem, Segment, message_from
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

    def parts(self, user: Message) -> tuple[list[PromptItem], list[PromptItem]]:
        """What to send as prefix and suffix before an answer to ``user``."""
        return parted([*self.items, user])

    def recorder(self, user: Message) -> Callable[[StreamState, GeneratedTurn | None], None]:
        return lambda state, answer: self.add(user, answer, state.text)


def parted(items: Sequence[PromptItem]) -> tuple[list[PromptItem], list[PromptItem]]:
    """A conversation as prefix and suffix: the last item is the suffix, or all from the first
    message with an image on, since images are taken in a suffix only.
    """
    split = next((index for index, item in enumerate(items) if _has_images(item)), len(items) - 1)
    return list(items[:split]), list(items[split:])


def _has_images(item: PromptItem) -> bool:
    content = item.content if isinstance(item, Segment) else item
    if isinstance(content, Mapping):
        content = message_from(content)
    return isinstance(content, Message) and content.has_images


def require_chat(prompt_format: str) -> None:
    if prompt_format != "chat":
        raise InvalidRequest.of(
            "prompt_format",
            prompt_format,
            "'chat' for a conversation of messages",
            "The model has no chat template, or the session was opened raw; use turn() with text.",
        )
