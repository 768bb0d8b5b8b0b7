"""Where a prompt's segments lie: byte ranges, token ranges, and the hash of their tokens.

Pure arithmetic over what was rendered and tokenized. Knows nothing of templates or tokenizers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from modeld.shared.messages import SegmentOut
from modeld.workers.rendering import Span
from modeld.workers.runs import Ids, Offsets


def stretched(
    spans: Sequence[Span | None], prefix_segments: int, boundary: int | None, size: int
) -> list[Span | None]:
    """Contents' spans widened to tile the text: what introduces a message belongs to it."""
    ranges: list[Span | None] = []
    cursor = 0
    last_of_prefix = max(
        (i for i in range(min(prefix_segments, len(spans))) if spans[i]), default=-1
    )
    last = max((i for i, span in enumerate(spans) if span), default=-1)
    for index, span in enumerate(spans):
        if span is None or span[1] < cursor:
            ranges.append(None)
            continue
        end = span[1]
        if index == last:
            end = size if boundary is None or last >= prefix_segments else boundary
        elif index == last_of_prefix and boundary is not None:
            end = boundary
        ranges.append((cursor, end))
        cursor = end
    return ranges


def located(
    ranges: Sequence[Span | None],
    text: str,
    token_ids: Sequence[Ids],
    token_ends: Sequence[Offsets],
) -> list[SegmentOut]:
    """Segments at character ranges of ``text``; its tokens come in pieces, in order.

    A token belongs to every segment whose bytes it overlaps.
    """
    ends = np.concatenate(token_ends) if token_ends else np.zeros(0, dtype=np.int64)
    ids = np.concatenate(token_ids) if token_ids else np.zeros(0, dtype=np.int32)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), ends[:-1])) if len(ends) else ends
    ids = ids.astype("<i4", copy=False)
    to_bytes = _byte_offsets(text, ranges)
    found = []
    for span in ranges:
        if span is None:
            found.append(_segment(0, 0, 0, 0, "", False))
            continue
        begin, end = to_bytes[span[0]], to_bytes[span[1]]
        first = int(np.searchsorted(ends, begin, side="right"))
        last = max(first, int(np.searchsorted(starts, end, side="left")))
        if begin == end:
            last = first
        found.append(_segment(begin, end, first, last, _hash(ids[first:last]), True))
    return found


def _segment(
    byte_begin: int, byte_end: int, token_begin: int, token_end: int, hash_: str, located: bool
) -> SegmentOut:
    return SegmentOut(
        byte_begin=byte_begin,
        byte_end=byte_end,
        token_begin=token_begin,
        token_end=token_end,
        token_hash=hash_,
        located=located,
    )


def _hash(ids: Ids) -> str:
    return hashlib.sha256(ids.tobytes()).hexdigest()


def _byte_offsets(text: str, ranges: Sequence[Span | None]) -> dict[int, int]:
    """Character offset → offset in UTF-8 bytes, for the ranges' ends."""
    places = sorted({place for span in ranges if span is not None for place in span})
    if text.isascii():
        return {place: place for place in places}
    offsets: dict[int, int] = {}
    done = size = 0
    for place in places:
        size += len(text[done:place].encode())
        done = place
        offsets[place] = size
    return offsets
