"""The token gate: what is reused, what goes, what is evaluated, and why."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from modeld.shared.planner.prefix import MissReason, PrefixMatch, common_prefix, match_prefix

tokens = st.lists(st.integers(0, 3), max_size=40)


def always(_keep: int) -> bool:
    return True


def never(_keep: int) -> bool:
    return False


def match(resident: list[int], asked: list[int], *, trims: bool = True) -> PrefixMatch:
    return match_prefix(resident, asked, same_kv=True, can_trim=always if trims else never)


@given(tokens, tokens, tokens)
def test_the_common_prefix_is_the_longest(head: list[int], a: list[int], b: list[int]) -> None:
    a, b = head + a, head + b
    found = common_prefix(a, b)
    assert a[:found] == b[:found]
    assert found == min(len(a), len(b)) or a[found] != b[found]
    assert found == common_prefix(array("i", a), array("i", b)) == common_prefix(tuple(a), b)


def test_long_sequences_that_differ_in_one_token_are_told_exactly() -> None:
    base = array("i", range(20_000))
    for at in (0, 1, 9_999, 19_999):
        other = array("i", base)
        other[at] = -1
        assert common_prefix(base, other) == at
    assert common_prefix(base, base[:7]) == 7


def test_an_empty_context_is_cold() -> None:
    assert match([], [1, 2]) == PrefixMatch(0, 0, 2, MissReason.COLD)


def test_a_whole_match_evaluates_its_last_token_again() -> None:
    assert match([1, 2, 3], [1, 2, 3]) == PrefixMatch(2, 0, 1, MissReason.NONE)
    assert match([1, 2, 3, 4], [1, 2, 3]) == PrefixMatch(2, 1, 1, MissReason.NONE)


def test_a_match_that_needs_no_logits_is_reused_whole() -> None:
    found = match_prefix([1, 2, 3], [1, 2, 3], same_kv=True, can_trim=never, logits_needed=False)
    assert found == PrefixMatch(3, 0, 0, MissReason.NONE)


def test_a_prompt_that_goes_on_is_extended_without_a_trim() -> None:
    assert match([1, 2], [1, 2, 3], trims=False) == PrefixMatch(2, 0, 1, MissReason.EXTENDED)


def test_differing_tokens_drop_the_tail() -> None:
    assert match([1, 2, 3, 4], [1, 9]) == PrefixMatch(1, 3, 1, MissReason.TOKENS_DIFFER)


def test_another_kv_digest_reuses_nothing_whatever_the_tokens() -> None:
    found = match_prefix([1, 2], [1, 2], same_kv=False, can_trim=always)
    assert found == PrefixMatch(0, 2, 2, MissReason.KV_DIGEST)


def test_a_context_that_cannot_drop_its_tail_starts_over_and_says_so() -> None:
    assert match([1, 2, 3], [1, 9], trims=False) == PrefixMatch(0, 3, 2, MissReason.CANNOT_TRIM)
    assert match([1, 2], [1, 2], trims=False).miss_reason is MissReason.CANNOT_TRIM


def test_nothing_in_common_needs_no_trim() -> None:
    assert match([1, 2], [9], trims=False) == PrefixMatch(0, 2, 1, MissReason.TOKENS_DIFFER)


@given(tokens, tokens, st.booleans(), st.booleans(), st.booleans())
def test_the_counts_always_add_up(
    resident: list[int], asked: list[int], same_kv: bool, trims: bool, logits: bool
) -> None:
    found = match_prefix(
        resident,
        asked,
        same_kv=same_kv,
        can_trim=always if trims else never,
        logits_needed=logits,
    )
    assert found.reused + found.prefill == len(asked)
    assert resident[: found.reused] == asked[: found.reused]
    assert 0 <= found.dropped <= len(resident)
    if logits and asked:
        assert found.prefill >= 1
    if not same_kv:
        assert found.reused == 0
    if found.reused == 0:
        assert found.miss_reason is not MissReason.NONE or len(asked) <= 1
