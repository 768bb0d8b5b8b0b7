"""An answer that ends within a character is spelled by its tokens, whatever stands for the rest."""

from __future__ import annotations

import pytest

from modeld.workers.stream import TextStream


@pytest.mark.parametrize(
    ("rest", "shown"),
    [
        (b"\xe2", "\ufffd"),
        (b"\xe2\x82", "\ufffd"),
        (b"\xf0\x9f\x98", "\ufffd"),
        (b"\xed\xb5", "\ufffd\ufffd"),  # no character begins so: each byte is shown
    ],
)
def test_every_token_is_visible_and_they_make_up_the_text(rest: bytes, shown: str) -> None:
    one_by_one, at_once = TextStream(), TextStream()
    for piece in (b"a", *(bytes([byte]) for byte in rest)):
        one_by_one.feed(piece)
    at_once.feed(b"a" + rest)
    for stream, tokens in ((one_by_one, 1 + len(rest)), (at_once, 1)):
        stream.finish()
        assert (stream.text, stream.visible_tokens) == ("a" + shown, tokens)
        assert stream.spelled
