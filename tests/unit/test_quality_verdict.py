"""The verdict on a greedy continuation: the same, otherwise, or a near tie."""

from __future__ import annotations

from modeld.shared.quality import NEAR_TIE, Continuation, judge

SURE = NEAR_TIE * 4


def continuation(
    *ids: int, margins: tuple[float, ...] = (), prompt: tuple[int, ...] = (1, 2)
) -> Continuation:
    return Continuation(prompt, ids, margins or (SURE,) * len(ids))


def test_the_same_tokens_certify() -> None:
    verdict = judge(continuation(5, 6, 7), continuation(5, 6, 7))
    assert verdict.answer == "yes"
    assert "3 greedy tokens" in verdict.evidence


def test_another_token_where_the_reference_was_sure_is_a_no() -> None:
    verdict = judge(continuation(5, 6, 7), continuation(5, 9, 7))
    assert verdict.answer == "no"
    assert "token 2 is 9, the reference has 6" in verdict.evidence


def test_another_token_at_a_near_tie_leaves_it_unknown() -> None:
    close = continuation(5, 6, 7, margins=(SURE, NEAR_TIE / 2, SURE))
    for pair in ((close, continuation(5, 9, 7)), (continuation(5, 9, 7), close)):
        verdict = judge(*pair)
        assert verdict.answer == "unknown"
        assert "near tie" in verdict.evidence


def test_a_margin_of_exactly_the_limit_is_no_tie() -> None:
    edge = continuation(5, margins=(NEAR_TIE,))
    assert judge(edge, continuation(6)).answer == "no"


def test_a_prompt_that_is_tokenized_otherwise_is_a_no() -> None:
    assert judge(continuation(5), continuation(5, prompt=(1, 3))).answer == "no"


def test_a_continuation_that_ends_early_is_a_no() -> None:
    assert judge(continuation(5, 6), continuation(5)).answer == "no"


def test_nothing_sampled_certifies_nothing() -> None:
    assert judge(continuation(), continuation()).answer == "unknown"
