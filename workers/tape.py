"""A conversation under overflow evict as its session keeps it: prompts follow prompts.

Owns what becomes of the layout when another prompt is asked for, and where the prompt's classes
lie. Changes no context, and knows no engine.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from modeld.shared.messages import PromptIn
from modeld.shared.planner.residency import Layout, carried
from modeld.shared.planner.token_ranges import Range, Ranges, union
from modeld.workers.pooled_context import Tokens, common_prefix
from modeld.workers.prompt import Assembled


def capability(*, drops_tail: bool, gives_ranges: bool) -> str:
    """What an executor that evaluates tokens one after the other says of ``overflow.evict``, by
    whether its memory can go back to a beginning, and gives ranges to be parked.
    """
    again = (
        "what stays behind the first gap (a quarter of the window, and what is pinned or admitted "
        "there) is evaluated again in one go"
        if drops_tail
        else "its memory can't go back, so all that stays is evaluated again in one go"
    )
    goes = "parked in blocks of 256 tokens" if gives_ranges else "kept as tokens only"
    return f"yes: what goes out is {goes}; {again}"


@dataclass(frozen=True)
class Former:
    """A conversation of which the present prompt is only the beginning (a prefix that is ensured
    before its suffix): a later prompt may go on from it.
    """

    tokens: Tokens
    layout: Layout


@dataclass(frozen=True)
class Next:
    """What a prompt makes of a conversation, whose first ``same`` tokens it begins with."""

    layout: Layout
    former: Former | None
    same: int


def next_tape(known: Former, former: Former | None, target: Tokens, classes: Classes) -> Next:
    """From the conversation as it is ``known``, or the ``former`` where that has more of it."""
    found = [(common_prefix(one.tokens, target), one) for one in (known, former) if one is not None]
    same, base = max(found, key=lambda one: one[0])
    longer = [one for here, one in found if here == len(target) < len(one.tokens)]
    return Next(
        layout=carried(base.layout, same, len(target), classes.pinned, classes.repo_map),
        former=max(longer, key=lambda one: len(one.tokens), default=None),
        same=found[0][0],
    )


@dataclass(frozen=True)
class Classes:
    """Token ranges of a prompt that are more than volatile."""

    pinned: Ranges
    repo_map: Ranges


def classes_of(
    prefix: PromptIn, suffix: PromptIn | None, assembled: Assembled, controls: Set[int]
) -> Classes:
    """By the segments' ``cache_class``; tools are pinned.

    A segment that the template changed beyond recognition lies somewhere between its neighbours:
    pinned, all of that is. The control token that ends a message belongs to it.
    """
    asked = [*prefix.segments, *(suffix.segments if suffix is not None else ())]
    tokens, ranges = assembled.tokens, _ranges(assembled)

    def of(cache_class: str) -> Ranges:
        found = []
        for segment, (begin, end) in zip(asked, ranges, strict=False):
            if segment.cache_class == cache_class and begin < end:
                closed = end < len(tokens) and tokens[end] in controls
                found.append((begin, end + closed))
        return union(found)

    tools = ((0, assembled.tools_end),) if prefix.tools else ()
    return Classes(union(of("task_pinned"), tools), of("repo_map"))


def _ranges(assembled: Assembled) -> list[Range]:
    """Each segment's tokens; of one that isn't located, all between its located neighbours."""
    segments = assembled.segments
    ranges: list[Range] = []
    for index, segment in enumerate(segments):
        if segment.located:
            ranges.append((segment.token_begin, segment.token_end))
            continue
        before = [one.token_end for one in segments[:index] if one.located]
        after = [one.token_begin for one in segments[index:] if one.located]
        ranges.append((max(before, default=0), min(after, default=len(assembled.tokens))))
    return ranges
