"""Text on its way into a tokenizer: the bytes, or why there are none. Knows no vocabulary."""

from __future__ import annotations

from modeld.shared.errors import InvalidRequest

MAX_TEXT_BYTES = 2**31 - 64  # lengths are 32 bits in the engines


def encoded(text: str) -> bytes:
    """UTF-8; raises InvalidRequest for a lone surrogate, or more than ``MAX_TEXT_BYTES``."""
    try:
        raw = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest.of(
            "text",
            f"character {error.start} is {text[error.start]!a}",
            "text that is valid Unicode",
            "A lone surrogate can't be encoded as UTF-8.",
        ) from None
    if len(raw) > MAX_TEXT_BYTES:
        raise InvalidRequest.of("text", f"{len(raw)} bytes", f"at most {MAX_TEXT_BYTES} bytes")
    return raw
