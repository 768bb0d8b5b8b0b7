"""The token gate of reuse: what of the resident tokens an asked prompt may keep, and why not more.

The reference for every implementation of the rule. Pure: knows token ids, no engine and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class MissReason(Enum):
    """Why not everything was reused. Names equal the proto's MissReason without its prefix."""

    NONE = "NONE"
    COLD = "COLD"
    TOKENS_DIFFER = "TOKENS_DIFFER"
    EXTENDED = "EXTENDED"
    KV_DIGEST = "KV_DIGEST"
    CANNOT_TRIM = "CANNOT_TRIM"


@dataclass(frozen=True)
class PrefixMatch:
    """What to do with a context. Counts are tokens; ``reused + prefill`` is what was asked.

    ``dropped`` are resident tokens that leave for good: a last token evaluated again for its
    logits is prefilled, not dropped.
    """

    reused: int
    dropped: int
    prefill: int
    miss_reason: MissReason


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading items are equal.

    Sequences of one type (list, tuple, bytes, ``array``) are compared slice by slice at the
    speed of their own equality; mixed types item by item.
    """
    length = min(len(a), len(b))
    if type(a) is not type(b):
        return next((i for i in range(length) if a[i] != b[i]), length)
    equal, differs = 0, length + 1  # a[:equal] == b[:equal]; a[:differs] != b[:differs]
    probe = length  # the whole first: the usual case is that everything matches
    while differs - equal > 1:
        if a[equal:probe] == b[equal:probe]:
            equal = probe
        else:
            differs = probe
        probe = (equal + differs) // 2
    return equal


def match_prefix(
    resident: Sequence[int],
    asked: Sequence[int],
    *,
    same_kv: bool,
    can_trim: Callable[[int], bool],
    logits_needed: bool = True,
) -> PrefixMatch:
    """Decide what stays. ``same_kv``: the resident KV was built under the asked kv_digest.

    ``can_trim(keep)`` answers whether the context can drop its tail from ``keep`` on with exact
    results; it is asked only when something has to go. With ``logits_needed``, a prompt that
    matches whole gives up its last token, which is evaluated again: logits are not kept.
    """
    if not resident:
        return PrefixMatch(0, 0, len(asked), MissReason.COLD if asked else MissReason.NONE)
    if not same_kv:
        return PrefixMatch(0, len(resident), len(asked), MissReason.KV_DIGEST)
    matched = common_prefix(resident, asked)
    if matched == len(asked):
        reason = MissReason.NONE
    elif matched == len(resident):
        reason = MissReason.EXTENDED
    else:
        reason = MissReason.TOKENS_DIFFER
    again = 1 if logits_needed and matched and matched == len(asked) else 0
    keep = matched - again
    if 0 < keep < len(resident) and not can_trim(keep):
        return PrefixMatch(0, len(resident), len(asked), MissReason.CANNOT_TRIM)
    return PrefixMatch(keep, len(resident) - matched, len(asked) - keep, reason)
