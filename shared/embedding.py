"""The bounds of an embedding call, which client, daemon and worker hold alike.

Pure; knows no model, engine or transport.
"""

from __future__ import annotations

from collections.abc import Sequence

from modeld.shared.errors import InvalidRequest

POOLINGS = ("mean", "cls", "last")
MAX_TEXTS = 1024  # of one call: with 8,192 dimensions its vectors fit half a frame
# Of one text: a tokenizer takes it in one call, in which nothing else of the process runs. Many
# times what the longest windows of embedding models hold.
MAX_TEXT_BYTES = 256 * 1024


def check_texts(texts: Sequence[str]) -> int:
    """The texts' bytes in all. Raises InvalidRequest that names the text by its index."""
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise InvalidRequest.of(
            "texts", f"{len(texts)} texts", f"1 to {MAX_TEXTS}", "Send several calls."
        )
    total = 0
    for index, text in enumerate(texts):
        size = len(text.encode())
        if not text:
            raise empty_text(index)
        if size > MAX_TEXT_BYTES:
            raise InvalidRequest.of(
                f"texts[{index}]", f"{size} bytes", f"at most {MAX_TEXT_BYTES} bytes"
            )
        total += size
    return total


def empty_text(index: int) -> InvalidRequest:
    """The refusal of a text that has nothing to embed."""
    return InvalidRequest.of(
        f"texts[{index}]",
        "",
        "a text with at least one token of its own",
        "The vector of an empty text means nothing: leave it out.",
    )
