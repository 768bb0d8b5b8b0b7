"""Ranges of token positions, ``[begin, end)``: rising and apart, as every function here answers.

Pure arithmetic. Knows nothing of what the tokens are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
Ranges: TypeAlias = tuple[Range, ...]


def total(ranges: Iterable[Range]) -> int:
    """Tokens in them, which don't overlap."""
    return sum(end - begin for begin, end in ranges)


def union(*parts: Iterable[Range]) -> Ranges:
    """What is in any of them; empty ranges go, touching ones become one."""
    merged: list[Range] = []
    for begin, end in sorted(one for part in parts for one in part if one[1] > one[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def common(ranges: Sequence[Range], others: Sequence[Range]) -> Ranges:
    """What is in both; each is rising and apart."""
    found: list[Range] = []
    at = 0
    for begin, end in ranges:
        while at < len(others) and others[at][1] <= begin:
            at += 1
        for other_begin, other_end in others[at:]:
            if other_begin >= end:
                break
            found.append((max(begin, other_begin), min(end, other_end)))
    return tuple(found)


def minus(ranges: Iterable[Range], others: Sequence[Range]) -> Ranges:
    """What of the first isn't in the others; each is rising and apart."""
    left: list[Range] = []
    for begin, end in ranges:
        for other_begin, other_end in others:
            if other_begin >= end:
                break
            if other_end <= begin:
                continue
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = other_end
        if begin < end:
            left.append((begin, end))
    return tuple(left)


def upto(ranges: Iterable[Range], end: int) -> Ranges:
    """What of them lies before ``end``."""
    return tuple((b, min(e, end)) for b, e in ranges if b < end)


def past(ranges: Iterable[Range], begin: int) -> Ranges:
    """What of them lies from ``begin`` on."""
    return tuple((max(b, begin), e) for b, e in ranges if e > begin)


def taken(ranges: Iterable[Range], begin: int, end: int) -> Ranges:
    """Tokens ``begin`` to ``end`` of the list that their tokens make up, one after the other."""
    found: list[Range] = []
    at = 0
    for first, last in ranges:
        size = last - first
        left, right = max(begin - at, 0), min(end - at, size)
        if left < right:
            found.append((first + left, first + right))
        at += size
    return tuple(found)


def placed(ranges: Iterable[Range], wanted: Sequence[Range]) -> Ranges:
    """Where ``wanted`` stand in the list that the tokens of ``ranges`` make up."""
    found: list[Range] = []
    at = 0
    for first, last in ranges:
        found += [(at + b - first, at + e - first) for b, e in common(((first, last),), wanted)]
        at += last - first
    return union(found)
