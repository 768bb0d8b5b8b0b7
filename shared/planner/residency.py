"""What of a conversation is attended once it outgrows its window: sizes, classes, scores, plans.

Pure: plans are data, and nothing is carried out here. Knows no engine, no session and no text.

A conversation is a list of tokens, prompt and answer. A ``Layout`` says which of them are attended:
some ranges, and everything from ``tail`` on. What is attended is computed as if it were all there
is, one token after the other; so where tokens go out, those that stay behind the first gap are
evaluated again. A ``Pass`` is one such list that fits the window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace

from modeld.shared.errors import InvalidRequest
from modeld.shared.planner.token_ranges import (
    Range,
    Ranges,
    common,
    minus,
    taken,
    total,
    union,
    upto,
)

BLOCK_TOKENS = 256
MIN_WINDOW = 4 * BLOCK_TOKENS
SINK_SHARE, RECENT_SHARE = 16, 4  # of the window
PROTECTED = ("pinned", "sink", "recent")


@dataclass(frozen=True)
class Sizes:
    """Tokens: the window, what is attended at the conversation's head, and at its end."""

    window: int
    sink: int
    recent: int


def sizes_of(window: int) -> Sizes:
    """Raises InvalidRequest for a window of fewer than four blocks."""
    if window < MIN_WINDOW:
        raise InvalidRequest.of(
            "window",
            window,
            f"{MIN_WINDOW} tokens or more with overflow evict",
            "Ask for a larger window, or open with overflow refuse.",
        )

    def blocks(share: int) -> int:
        return -(-window // (share * BLOCK_TOKENS)) * BLOCK_TOKENS

    return Sizes(window, blocks(SINK_SHARE), blocks(RECENT_SHARE))


@dataclass(frozen=True)
class Admitted:
    """A range that was asked back; ``used`` rises with each call that asks for it."""

    begin: int
    end: int
    used: int


@dataclass(frozen=True)
class Stored:
    """A range that went out, and the key of the block that its KV was stored in."""

    begin: int
    end: int
    key: str


@dataclass(frozen=True)
class Layout:
    """What of a conversation is attended, and what is known of the rest. Counts are tokens."""

    sizes: Sizes
    kept: Ranges = ()  # before the tail
    tail: int = 0
    pinned: Ranges = ()
    repo_map: Ranges = ()
    admitted: tuple[Admitted, ...] = ()
    stored: tuple[Stored, ...] = ()
    seen: int = 0  # tokens from the first on that were evaluated, generated or found before
    evaluated: int = 0  # … of which the KV was there at some time
    as_prompt: int = 0  # tokens from the first on that are evaluated as prompts are, not one by one
    tick: int = 0  # of the last admission

    def attended(self, length: int) -> Ranges:
        """Of a conversation of ``length`` tokens."""
        return union(upto(self.kept, length), ((self.tail, length),))

    def size(self, length: int) -> int:
        """Tokens that are attended."""
        return total(self.attended(length))

    @property
    def ranges_admitted(self) -> Ranges:
        return union((one.begin, one.end) for one in self.admitted)


@dataclass(frozen=True)
class Pass:
    """What is attended while the tokens from ``tail`` to ``end`` are evaluated; it fits."""

    kept: Ranges
    tail: int
    end: int

    @property
    def attended(self) -> Ranges:
        return union(self.kept, ((self.tail, self.end),))


class NoRoom(Exception):
    """What must stay leaves less than a block of the window."""

    def __init__(self, pinned: int, staying: int) -> None:
        super().__init__(pinned, staying)
        self.pinned = pinned  # tokens in pinned ranges
        self.staying = staying  # … with the head and the recent ones


# --- as the conversation changes -----------------------------------------------------------------


def carried(layout: Layout, same: int, length: int, pinned: Ranges, repo_map: Ranges) -> Layout:
    """The layout of a prompt of ``length`` tokens whose first ``same`` are the conversation's."""
    return replace(
        cut(layout, same),
        pinned=upto(pinned, length),
        repo_map=upto(repo_map, length),
        as_prompt=length,
    )


def cut(layout: Layout, length: int) -> Layout:
    """Of the conversation's first ``length`` tokens only."""
    admitted = tuple(
        replace(one, end=min(one.end, length)) for one in layout.admitted if one.begin < length
    )
    stored = tuple(
        replace(one, end=min(one.end, length)) for one in layout.stored if one.begin < length
    )
    return replace(
        layout,
        kept=upto(layout.kept, length),
        tail=min(layout.tail, length),
        pinned=upto(layout.pinned, length),
        repo_map=upto(layout.repo_map, length),
        admitted=admitted,
        stored=stored,
        seen=min(layout.seen, length),
        evaluated=min(layout.evaluated, length),
        as_prompt=min(layout.as_prompt, length),
    )


def taking(layout: Layout, step: Pass, stored: Sequence[Stored] = ()) -> Layout:
    """With a pass's ranges; ``stored`` are of what goes out for it, and replace what was known."""
    attended = union(step.kept, ((step.tail, max(step.tail, step.end)),))
    new = union((one.begin, one.end) for one in stored)
    older = tuple(
        replace(one, begin=begin, end=end)
        for one in layout.stored
        for begin, end in minus(((one.begin, one.end),), new)
    )
    return replace(
        layout,
        kept=step.kept,
        tail=step.tail,
        admitted=tuple(
            one for one in layout.admitted if not minus(((one.begin, one.end),), attended)
        ),
        stored=tuple(sorted((*older, *stored), key=lambda one: one.begin)),
    )


# --- plans ---------------------------------------------------------------------------------------


def must_stay(layout: Layout, length: int) -> Ranges:
    """The head, what is pinned and what is recent."""
    recent = (max(0, length - layout.sizes.recent), length)
    return union(upto(((0, layout.sizes.sink),), length), upto(layout.pinned, length), (recent,))


def staying(layout: Layout, length: int) -> Ranges:
    """What an eviction leaves: what must stay, and of what was admitted as much as fits, the last
    used first. A block of the window is left to go on with. Raises NoRoom.
    """
    stays = must_stay(layout, length)
    most = layout.sizes.window - BLOCK_TOKENS
    if total(stays) > most:
        raise NoRoom(total(upto(layout.pinned, length)), total(stays))
    for one in sorted(layout.admitted, key=lambda one: (-one.used, -one.begin)):
        more = union(stays, upto(((one.begin, one.end),), length))
        if total(more) <= most:
            stays = more
    return stays


def passes(layout: Layout, length: int, resident: int) -> tuple[Pass, ...]:
    """How a conversation of ``length`` tokens comes to be attended at its end: one after the other.

    All of it where it fits the window; else as it is laid out where that fits. Else the middle
    goes out in one go: what stays, then every token that was never evaluated, in as many passes
    as that takes. ``resident`` tokens of what is attended now are there. Raises NoRoom.
    """
    window = layout.sizes.window
    if length <= window:
        return (_pass((), 0, length),)
    recent = length - layout.sizes.recent
    tail = min(layout.tail, recent)
    kept = union(upto(layout.kept, tail), upto(must_stay(layout, length), tail))
    as_it_is = _pass(kept, tail, length)
    if total(as_it_is.attended) <= window:
        return (as_it_is,)
    stays = staying(layout, length)
    new = min(layout.evaluated, length)
    found: list[Pass] = []

    def last() -> Pass | None:
        tail = min(new, recent)
        step = _pass(upto(stays, tail), tail, length)
        return step if total(step.attended) <= window else None

    size = layout.size(new) if new >= layout.tail else window
    if last() is None and resident == size < window:  # there is room as it is
        new += window - size
        found.append(_pass(layout.kept, layout.tail, new))
    while (end := last()) is None:
        kept = upto(stays, new)
        step = _pass(kept, new, new + window - total(kept))
        found.append(step)
        new = step.end
    return (*found, end)


def _pass(kept: Ranges, tail: int, end: int) -> Pass:
    """With the tail as early as what is attended has no gap before it."""
    ranges = list(kept)
    while ranges and ranges[-1][1] >= tail:
        tail = min(tail, ranges.pop()[0])
    return Pass(tuple(ranges), tail, end)


# --- bringing back -------------------------------------------------------------------------------


def most_admitted(layout: Layout, length: int) -> int:
    """Tokens that an admission can bring in at most."""
    left = layout.sizes.window - BLOCK_TOKENS - total(must_stay(layout, length))
    return max(0, left)


def admitting(layout: Layout, ranges: Ranges, touched: Ranges) -> Layout:
    """With ``ranges``, which aren't attended, admitted; what overlaps ``touched`` is used again."""
    tick = layout.tick + 1
    older = tuple(
        replace(one, used=tick) if common(((one.begin, one.end),), touched) else one
        for one in layout.admitted
    )
    step = _pass(union(layout.kept, upto(ranges, layout.tail)), layout.tail, layout.tail)
    return replace(
        layout,
        kept=step.kept,
        tail=step.tail,
        admitted=(*older, *(Admitted(begin, end, tick) for begin, end in ranges)),
        tick=tick,
    )


def first_of(ranges: Ranges, most: int) -> Ranges:
    """Their first ``most`` tokens."""
    return taken(ranges, 0, most)


def like_query(tokens: Sequence[int], out: Ranges, query: Set[int], most: int) -> Ranges:
    """Of the blocks in ``out`` those that are most like a query, at most ``most`` tokens of them.

    A block's score is the sum, over the query's distinct tokens in it, of how rare each is among
    all blocks (the logarithm of their number by that of those that have it); of equal ones the
    later is first. What has nothing rare in common with the query is never taken.
    """
    bounds = [(b, min(b + BLOCK_TOKENS, len(tokens))) for b in range(0, len(tokens), BLOCK_TOKENS)]
    held = [_in(tokens, (bound,), query) for bound in bounds]
    weights = {
        token: math.log(len(bounds) / having)
        for token in query
        if (having := sum(token in block for block in held))
    }
    scored: list[tuple[float, int, Ranges]] = []
    for bound in bounds:
        pieces = common(out, (bound,))
        score = math.fsum(weights[token] for token in _in(tokens, pieces, query))
        if score > 0:
            scored.append((score, bound[0], pieces))
    scored.sort(key=lambda one: (-one[0], -one[1]))
    chosen: Ranges = ()
    for _, _, pieces in scored:
        chosen = union(chosen, first_of(pieces, most - total(chosen)))
    return chosen


def _in(tokens: Sequence[int], pieces: Ranges, query: Set[int]) -> set[int]:
    return {token for begin, end in pieces for token in tokens[begin:end] if token in query}


# --- telling -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A range of one state (hot, parked, gone) and one class."""

    begin: int
    end: int
    state: str
    cls: str


def out_of_attention(
    layout: Layout, length: int, has: Callable[[str], bool]
) -> tuple[Ranges, Ranges]:
    """What isn't attended: the ranges whose KV is stored, and the others."""
    out = minus(((0, length),), layout.attended(length))
    known = union((one.begin, one.end) for one in layout.stored if has(one.key))
    return common(out, known), minus(out, known)


def pieces(
    layout: Layout, length: int, resident: int, has: Callable[[str], bool], bounds: Iterable[int]
) -> list[Piece]:
    """The conversation from its first token on, as far as it is resident or out of attention.

    No piece goes across one of ``bounds``.
    """
    parked, gone = out_of_attention(layout, length, has)
    states = {
        "hot": taken(layout.attended(length), 0, resident), "parked": parked, "gone": gone
    }  # fmt: skip
    classes = {
        "pinned": layout.pinned,
        "sink": ((0, layout.sizes.sink),),
        "recent": ((max(0, length - layout.sizes.recent), length),),
        "admitted": layout.ranges_admitted,
        "repo_map": layout.repo_map,
        "volatile": ((0, length),),
    }
    found: list[Piece] = []
    for state, ranges in states.items():
        left = _split(ranges, sorted(bounds))
        for cls, of in classes.items():
            found += [Piece(b, e, state, cls) for one in left for b, e in common((one,), of)]
            left = tuple(piece for one in left for piece in minus((one,), of))
    return sorted(found, key=lambda piece: piece.begin)


def _split(ranges: Ranges, edges: Sequence[int]) -> tuple[Range, ...]:
    split: list[Range] = []
    for begin, end in ranges:
        inside = [edge for edge in edges if begin < edge < end]
        split += zip((begin, *inside), (*inside, end), strict=True)
    return tuple(split)
