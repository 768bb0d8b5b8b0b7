"""Plans of what is attended: they fit, they lose nothing that must stay, they reach every token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from modeld.shared.errors import InvalidRequest
from modeld.shared.planner import residency as r
from modeld.shared.planner import token_ranges as t

WINDOWS = (1024, 1500, 2048, 4096)
ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: (min(p), max(p))), max_size=6
).map(lambda found: t.union(found))


def members(found: Sequence[tuple[int, int]]) -> list[int]:
    return [at for begin, end in found for at in range(begin, end)]


# --- ranges ------------------------------------------------------------------------------------


@given(ranges, ranges, st.integers(0, 60), st.integers(0, 60))
def test_ranges_are_sets_of_positions(a: t.Ranges, b: t.Ranges, low: int, high: int) -> None:
    left, right = set(members(a)), set(members(b))
    assert members(t.union(a, b)) == sorted(left | right)
    assert members(t.common(a, b)) == sorted(left & right)
    assert members(t.minus(a, b)) == sorted(left - right)
    assert members(t.upto(a, low)) == [at for at in members(a) if at < low]
    assert members(t.past(a, low)) == [at for at in members(a) if at >= low]
    assert members(t.taken(a, low, high)) == members(a)[low:high]
    listed = members(a)
    assert members(t.placed(a, b)) == [i for i, at in enumerate(listed) if at in right]
    assert t.total(a) == len(left)
    for found in (t.union(a, b), t.common(a, b), t.minus(a, b)):
        assert all(begin < end for begin, end in found)
        assert all(one[1] <= two[0] for one, two in pairwise(found))


# --- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "sink", "recent"),
    [(1024, 256, 256), (2048, 256, 512), (4096, 256, 1024), (5000, 512, 1280), (32768, 2048, 8192)],
)
def test_the_head_is_a_sixteenth_and_the_tail_a_quarter_in_whole_blocks(
    window: int, sink: int, recent: int
) -> None:
    assert r.sizes_of(window) == r.Sizes(window, sink, recent)


def test_a_window_below_four_blocks_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refused:
        r.sizes_of(1023)
    assert refused.value.metadata["field"] == "window"
    assert "1024" in refused.value.metadata["allowed"]


# --- passes ------------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn) -> tuple[r.Layout, int, int]:
    """A layout, a conversation's length and what is resident: as any history may have left them."""
    window = draw(st.sampled_from(WINDOWS))
    sizes = r.sizes_of(window)
    length = draw(st.integers(1, 5 * window))
    evaluated = draw(st.integers(0, length))
    tail = draw(st.integers(0, evaluated))
    small = st.tuples(st.integers(0, max(1, length - 1)), st.integers(1, 400)).map(
        lambda one: (one[0], min(one[0] + one[1], length))
    )
    pinned = t.union(draw(st.lists(small, max_size=2)))
    kept = t.union(t.upto([(0, sizes.sink), *draw(st.lists(small, max_size=3))], tail))
    admitted = tuple(
        r.Admitted(begin, end, draw(st.integers(0, 3)))
        for begin, end in t.upto(draw(st.lists(small, max_size=3)), tail)
    )
    layout = r.Layout(sizes, kept=kept, tail=tail, pinned=pinned, admitted=admitted,
                      seen=evaluated, evaluated=evaluated)  # fmt: skip
    resident = draw(st.sampled_from((0, min(window, layout.size(evaluated)))))
    return layout, length, resident


@given(conversations())
def test_passes_fit_reach_every_new_token_and_end_with_what_must_stay(
    given_: tuple[r.Layout, int, int],
) -> None:
    layout, length, resident = given_
    window = layout.sizes.window
    try:
        steps = r.passes(layout, length, resident)
    except r.NoRoom as error:
        staying = t.total(r.must_stay(layout, length))
        assert (error.staying, error.pinned) == (staying, t.total(layout.pinned))  # noqa: PT017
        assert length > window < staying + r.BLOCK_TOKENS
        return
    assert steps[-1].end == length
    for step in steps:
        assert t.total(step.attended) <= window
        assert all(end <= step.tail for _, end in step.kept)
    assert not t.minus(r.must_stay(layout, length), steps[-1].attended)
    # Every token that was never evaluated comes in some pass, the passes one behind the other.
    assert [s.end for s in steps] == sorted({s.end for s in steps})
    reached = t.union(*(step.attended for step in steps))
    assert not t.minus(((layout.evaluated, length),), reached)
    at = layout.evaluated
    for step in steps:
        assert step.tail <= at or step.end == length
        at = max(at, step.end)
    if length <= window:
        assert steps == (r.Pass((), 0, length),)
    # Planning again from what the last pass made changes nothing.
    settled = replace(r.taking(layout, steps[-1]), evaluated=length)
    again = r.passes(settled, length, t.total(steps[-1].attended))
    assert [step.attended for step in again] == [steps[-1].attended]


@given(st.sampled_from(WINDOWS), st.integers(0, 200))
def test_an_eviction_leaves_most_of_the_window_to_go_on_with(window: int, more: int) -> None:
    sizes = r.sizes_of(window)
    length = window + 1 + more
    layout = r.Layout(sizes, evaluated=length - 1, seen=length - 1)
    (step,) = r.passes(layout, length, window)
    assert step.attended == ((0, sizes.sink), (length - sizes.recent, length))


def test_what_fits_as_it_is_laid_out_is_left_alone() -> None:
    sizes = r.sizes_of(2048)
    layout = r.Layout(sizes, kept=((0, 256), (400, 500)), tail=5000, evaluated=6000, seen=6000)
    (step,) = r.passes(layout, 6600, 1356)
    assert step == r.Pass(((0, 256), (400, 500)), 5000, 6600)


def test_a_long_prompt_fills_the_window_first_and_is_then_read_chunk_by_chunk() -> None:
    layout = r.Layout(r.sizes_of(2048))
    steps = r.passes(layout, 5000, 0)
    assert [(step.attended, step.end) for step in steps] == [
        (((0, 2048),), 2048),
        (((0, 256), (2048, 3840)), 3840),
        (((0, 256), (3840, 5000)), 5000),
    ]
    # A short rest takes what is recent with it.
    assert r.passes(layout, 3900, 0)[-1].attended == ((0, 256), (3900 - 512, 3900))


def test_pinned_ranges_stay_and_too_many_leave_no_room() -> None:
    sizes = r.sizes_of(1024)
    layout = r.Layout(sizes, pinned=((600, 800),), evaluated=1024, seen=1024)
    (step,) = r.passes(layout, 1025, 1024)
    assert step.attended == ((0, 256), (600, 1025))  # what is recent begins within it
    (step,) = r.passes(replace(layout, evaluated=2999), 3000, 0)
    assert step.attended == ((0, 256), (600, 800), (3000 - 256, 3000))
    with pytest.raises(r.NoRoom) as refused:
        r.passes(replace(layout, pinned=((600, 857),)), 3000, 0)
    assert (refused.value.pinned, refused.value.staying) == (257, 769)


def test_of_what_was_admitted_the_last_used_stays_first() -> None:
    sizes = r.sizes_of(1024)
    kept = ((0, 256), (300, 400), (500, 600), (700, 780))
    admitted = (r.Admitted(300, 400, 3), r.Admitted(500, 600, 1), r.Admitted(700, 780, 2))
    layout = r.Layout(sizes, kept=kept, tail=3000, admitted=admitted, evaluated=3487, seen=3487)
    (step,) = r.passes(layout, 3490, 1023)
    assert step.attended == ((0, 256), (300, 400), (700, 780), (3490 - 256, 3490))
    assert [one.begin for one in r.taking(layout, step).admitted] == [300, 700]


# --- a conversation that changes ---------------------------------------------------------------


def test_what_another_prompt_has_in_common_keeps_its_layout() -> None:
    stored = (r.Stored(256, 512, "a"), r.Stored(700, 900, "b"), r.Stored(900, 1100, "c"))
    layout = r.Layout(r.sizes_of(2048), kept=((0, 256), (1000, 1100)), tail=3000, stored=stored,
                      admitted=(r.Admitted(1000, 1100, 1),), evaluated=4000, seen=4001)  # fmt: skip
    longer = r.carried(layout, 4001, 4500, ((0, 50),), ())
    assert longer.attended(4500) == ((0, 256), (1000, 1100), (3000, 4500))
    assert (longer.seen, longer.evaluated, longer.stored) == (4001, 4000, stored)
    assert longer.pinned == ((0, 50),)
    other = r.carried(layout, 1050, 5000, (), ())
    assert other.attended(5000) == ((0, 256), (1000, 5000))
    assert (other.seen, other.evaluated) == (1050, 1050)
    assert other.stored == (*stored[:2], r.Stored(900, 1050, "c"))  # a block's beginning is of use
    assert other.admitted == (r.Admitted(1000, 1050, 1),)


def test_a_block_that_goes_out_again_is_known_by_its_latest_key() -> None:
    layout = r.Layout(r.sizes_of(1024), tail=0, stored=(r.Stored(256, 768, "old"),))
    new = [r.Stored(500, 700, "new")]
    told = r.taking(layout, r.Pass(((0, 256),), 900, 1500), new).stored
    assert [(one.begin, one.end, one.key) for one in told] == [
        (256, 500, "old"), (500, 700, "new"), (700, 768, "old"),
    ]  # fmt: skip


# --- bringing back -----------------------------------------------------------------------------


@given(conversations(), st.integers(1, 2000), st.integers(0, 2000))
def test_what_is_admitted_fits_and_stays_at_the_next_eviction(
    given_: tuple[r.Layout, int, int], size: int, at: int
) -> None:
    layout, length, _ = given_
    layout = replace(layout, evaluated=length, seen=length, admitted=())
    most = r.most_admitted(layout, length)
    out = t.minus(((0, length),), layout.attended(length))
    wanted = r.first_of(t.common(out, ((at, at + size),)), most)
    if not wanted:
        return
    admitting = r.admitting(layout, wanted, wanted)
    step = r.passes(admitting, length, 0)[-1]
    assert not t.minus(wanted, step.attended)
    assert t.total(step.attended) <= layout.sizes.window
    later = r.passes(r.taking(admitting, step), length, 0)[-1]
    assert not t.minus(wanted, later.attended)


def test_a_query_finds_the_block_with_its_rarest_words() -> None:
    tokens = [1] * 3000
    for at in (300, 1000, 1600):  # blocks 1, 3 and 6
        tokens[at] = 7
    tokens[1100] = 8  # block 4
    tokens[1601] = 8
    out = ((256, 2800),)
    assert r.like_query(tokens, out, {1, 7, 8}, 256) == ((1536, 1792),)
    assert r.like_query(tokens, out, {1, 8}, 600) == ((1024, 1280), (1536, 1792))
    assert r.like_query(tokens, out, {1, 7}, 300) == ((768, 812), (1536, 1792))
    assert r.like_query(tokens, ((256, 700),), {7}, 5000) == ((256, 512),)
    assert r.like_query(tokens, out, {1, 9}, 5000) == ()  # in every block, and in none


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=2000),
    st.sets(st.integers(0, 40), max_size=6),
    st.integers(0, 900),
    st.integers(0, 2000),
)
def test_a_query_never_takes_more_than_it_may_nor_what_is_attended(
    tokens: list[int], query: set[int], most: int, begin: int
) -> None:
    out = t.upto(((begin, begin + 700),), len(tokens))
    found = r.like_query(tokens, out, query, most)
    assert t.total(found) <= most
    assert not t.minus(found, out)
    blocks = [set(tokens[at : at + 256]) for at in range(0, len(tokens), 256)]
    for start, _ in found:
        held = query & set(tokens[start // 256 * 256 : start // 256 * 256 + 256])
        assert any(math.log(len(blocks) / sum(q in b for b in blocks)) > 0 for q in held)


# --- telling -----------------------------------------------------------------------------------


@given(conversations())
def test_pieces_tile_what_is_resident_and_what_is_out(given_: tuple[r.Layout, int, int]) -> None:
    layout, length, resident = given_
    stored = (r.Stored(200, 600, "here"), r.Stored(600, 900, "lost"))
    layout = replace(layout, stored=tuple(s for s in stored if s.end <= length))
    found = r.pieces(layout, length, resident, "here".__eq__, [length // 3, length // 2])
    assert all(one.end <= two.begin for one, two in pairwise(found))
    by = {state: t.union((p.begin, p.end) for p in found if p.state == state)
          for state in ("hot", "parked", "gone")}  # fmt: skip
    attended = layout.attended(length)
    assert by["hot"] == t.taken(attended, 0, resident)
    assert t.union(by["parked"], by["gone"]) == t.minus(((0, length),), attended)
    assert by["parked"] == t.common(
        t.minus(((0, length),), attended), ((200, 600),) if length >= 600 else ()
    )
    for piece in found:
        assert not piece.begin < length // 3 < piece.end
        inside = ((piece.begin, piece.end),)
        assert (piece.cls == "pinned") == bool(t.common(inside, layout.pinned))
        if piece.cls == "volatile":
            assert piece.begin >= layout.sizes.sink
            assert piece.end <= length - layout.sizes.recent
