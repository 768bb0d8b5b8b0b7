"""What is shown of an answer, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.shared.errors import InvalidRequest
from modeld.workers.stream import Coalescer, TextStream


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


def test_text_comes_as_it_is_fed() -> None:
    stream = TextStream()
    assert [stream.feed(b"Hel"), stream.feed(b"lo")] == ["Hel", "lo"]
    assert (stream.finish(), stream.text, stream.visible_tokens) == ("", "Hello", 2)


def test_a_character_split_over_tokens_is_shown_once_whole() -> None:
    stream = TextStream()
    raw = "🙂".encode()
    assert [stream.feed(raw[:1]), stream.feed(raw[1:3]), stream.feed(raw[3:])] == ["", "", "🙂"]
    assert stream.visible_tokens == 3


def test_a_character_cut_at_the_end_is_shown_as_replaced() -> None:
    stream = TextStream()
    stream.feed(b"a")
    stream.feed("é".encode()[:1])
    assert stream.visible_tokens == 1
    assert stream.finish() == "\ufffd"
    assert (stream.text, stream.visible_tokens, stream.spelled) == ("a\ufffd", 2, True)


def test_bytes_that_are_no_text_are_replaced_in_place() -> None:
    stream = TextStream()
    assert stream.feed(b"a\xffb") == "a\ufffdb"


def test_a_stop_sequence_across_tokens_never_shows() -> None:
    stream = TextStream(["\nUser:"])
    shown = [stream.feed(piece) for piece in (b"yes", b"\nUs", b"er", b": more")]
    assert shown == ["yes", "", "", ""]
    assert (stream.matched, stream.text) == ("\nUser:", "yes")
    assert (stream.visible_tokens, stream.spelled) == (1, True)
    assert (stream.feed(b"later"), stream.finish()) == ("", "")


def test_what_only_looked_like_a_stop_is_shown_after_all() -> None:
    stream = TextStream(["END"])
    assert [stream.feed(b"xE"), stream.feed(b"N"), stream.feed(b"d")] == ["x", "", "ENd"]
    assert stream.feed(b"E") == ""
    assert (stream.finish(), stream.matched, stream.visible_tokens) == ("E", None, 4)


def test_tokens_behind_a_cut_within_a_token_are_not_visible() -> None:
    stream = TextStream(["STOP"])
    stream.feed(b"one ")
    assert stream.feed(b"two STOP three") == "two "
    assert (stream.visible_tokens, stream.spelled) == (1, False)


def test_of_several_stops_the_one_complete_first_counts_however_tokens_fall() -> None:
    for pieces in ([b"abcd"], [b"ab", b"cd"], [b"a", b"b", b"c", b"d"]):
        stream = TextStream(["abcd", "bc"])
        shown = "".join(stream.feed(piece) for piece in pieces)
        assert (shown, stream.matched) == ("a", "bc")


@given(
    st.text(alphabet="ab\né🙂", max_size=30),
    st.lists(st.text(alphabet="ab\né🙂", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 4), max_size=40),
)
def test_the_cut_into_tokens_does_not_change_what_is_shown(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    pieces = cut(text.encode(), sizes)
    stream = TextStream(stops)
    shown = "".join([*map(stream.feed, pieces), stream.finish()])
    reference = TextStream(stops)
    for char in text:
        reference.feed(char.encode())
    reference.finish()
    assert (shown, stream.matched) == (reference.text, reference.matched)
    assert shown == stream.text
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    # Visible tokens lie wholly within what is shown, and the next one doesn't.
    lengths = [len(b"".join(pieces[: n + 1])) for n in range(len(pieces))]
    assert stream.visible_tokens == sum(n <= len(shown.encode()) for n in lengths)


@pytest.mark.parametrize("stop", [[""], ["x" * 1025], ["x"] * 65])
def test_bad_stop_sequences_are_refused(stop: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        TextStream(stop)


def chunks(interval_ms: int, token_s: float, tokens: int = 200) -> list[int]:
    coalescer, sizes = Coalescer(interval_ms), []
    for index in range(tokens):
        now_s = index * token_s
        if coalescer.take(now_s):
            sizes.append(coalescer.waiting_tokens)
            coalescer.flushed(now_s)
    return sizes


def test_the_first_token_goes_at_once() -> None:
    assert chunks(8, 0.001)[0] == 1
    assert chunks(1000, 0.001)[0] == 1


def test_default_interval_sends_after_8_ms_or_8_tokens() -> None:
    assert set(chunks(8, 0.0005)[1:]) == {8}
    assert set(chunks(8, 0.0045)[1:]) == {2}
    assert set(chunks(8, 0.020)) == {1}


def test_a_longer_interval_goes_by_time_alone() -> None:
    assert set(chunks(50, 0.002)[1:]) <= {25, 26}


def test_interval_zero_sends_each_token() -> None:
    assert set(chunks(0, 0.0001)) == {1}


@pytest.mark.parametrize("interval_ms", [-1, 60_001])
def test_an_interval_out_of_range_is_refused(interval_ms: int) -> None:
    with pytest.raises(InvalidRequest):
        Coalescer(interval_ms)
