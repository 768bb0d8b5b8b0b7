"""One place where what can't be put on the wire becomes InvalidRequest: text that isn't Unicode,
numbers beyond their field's type. Knows no call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from google.protobuf.message import Message as Proto

from modeld.shared.errors import InvalidRequest

P = ParamSpec("P")
T = TypeVar("T")


def unsendable(error: ValueError, field: str = "") -> InvalidRequest:
    """The typed error for what an encoder refused. Never quotes the text around a character."""
    if isinstance(error, UnicodeEncodeError):
        code = ord(error.object[error.start])
        name = field or "text"
        return InvalidRequest(
            f"{name} can't be sent: its character {error.start} is U+{code:04X}, half of a "
            "surrogate pair. Allowed is Unicode text; such a character comes from bytes that "
            "aren't UTF-8, so decode them from the encoding they are in.",
            metadata={"field": name, "value": f"U+{code:04X}", "allowed": "Unicode text"},
        )
    return InvalidRequest(
        f"{field or 'A value'} can't be sent: {error}. Allowed is what the field's type holds.",
        metadata={"field": field, "allowed": "what the field's type holds"},
    )


def sendable(build: Callable[P, T]) -> Callable[P, T]:
    """For whatever builds a request: raises InvalidRequest where a value can't be encoded."""

    @functools.wraps(build)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return build(*args, **kwargs)
        except ValueError as error:
            raise unsendable(error) from None

    return checked


def put(target: Proto, name: str, value: object) -> None:
    guard(name, lambda: setattr(target, name, value), value)


def guard(name: str, put: Callable[[], None], value: object = None) -> None:
    """Name the option that the field's type can't hold; text is never quoted."""
    try:
        put()
    except UnicodeEncodeError as error:
        raise unsendable(error, name) from None
    except (TypeError, ValueError) as error:
        shown = value if isinstance(value, (int, float)) else type(value).__name__
        allowed = "a value of the option's type and range"
        raise InvalidRequest.of(name, shown, allowed, f"({error})") from None
