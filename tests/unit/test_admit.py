"""What went out of attention comes back by range, segment or query, and says what went for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modeld.shared.errors import ContextOverflow, InvalidRequest, UnsupportedFeature
from tests.support.core_harness import FakeOp, options, raw
from tests.support.evicting import Evicting, numbered, pinned, segments
from tests.support.fake_engine import FakeEngine

WINDOW, SINK, RECENT, BLOCK = 1024, 256, 256, 256
FACT = "~code: {QZX}~ "  # characters that are nowhere else
TEXT = numbered(300) + FACT + numbered(3000, 1000)
WHERE = TEXT.index(FACT)


@pytest.fixture
def h() -> Evicting:
    made = Evicting()
    made.open_evicting()
    return made


def filled(h: Evicting, text: str = TEXT) -> list[int]:
    h.suffix(raw(text))
    return list(text.encode())


def attended(h: Evicting) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for block in h.explain().blocks:
        if block.state == "hot" and found and found[-1][1] == block.begin:
            found[-1] = (found[-1][0], block.end)
        elif block.state == "hot":
            found.append((block.begin, block.end))
    return found


def test_a_fact_that_went_out_is_said_not_to_be_attended(h: Evicting) -> None:
    filled(h)
    (block,) = [b for b in h.explain().blocks if b.begin <= WHERE < b.end]
    assert (block.state, block.protected) == ("parked", False)
    assert not any(begin <= WHERE < end for begin, end in attended(h))


def test_a_range_comes_back_and_what_follows_is_evaluated_behind_it(h: Evicting) -> None:
    tape = filled(h)
    before = attended(h)
    told = h.admit(begin=WHERE, end=WHERE + len(FACT))
    assert told.ranges == [[WHERE, WHERE + len(FACT)]]
    assert (told.admitted, told.evicted, told.cancelled) == (len(FACT), 0, False)
    assert attended(h) == [before[0], (WHERE, WHERE + len(FACT)), before[1]]
    assert h.held() == h.hot(tape)
    assert told.recomputed == len(FACT) + before[1][1] - before[1][0]
    assert told.resident == len(h.held())
    assert told.resident + told.available == WINDOW
    assert told.parked + told.gone == len(tape) - told.resident
    (block,) = [b for b in h.explain().blocks if b.begin == WHERE]
    assert (block.state, block.cls) == ("hot", "admitted")
    op = FakeOp()
    evaluated = h.engine.evaluated
    h.decode(options(1), op=op)
    assert h.engine.evaluated == evaluated  # its logits were left current
    assert op.ids == [int(np.argmax(h.logits_after(h.held())))]


def test_blocks_right_behind_the_head_are_brought_back_and_not_evaluated(h: Evicting) -> None:
    tape = filled(h)
    told = h.admit(begin=SINK, end=SINK + BLOCK)
    assert (told.admitted, told.restored) == (BLOCK, BLOCK)
    assert told.recomputed == told.resident - SINK - BLOCK
    assert h.held() == h.hot(tape)
    context = h.fresh_context(h.held())
    held = h.session().entry.engine_context
    assert held.hashes[: len(context.hashes)] == context.hashes  # type: ignore[attr-defined]


def test_a_query_brings_the_block_that_is_like_it(h: Evicting) -> None:
    tape = filled(h)
    told = h.admit(query="what is the ~code~ {?}", budget_tokens=BLOCK)
    first = WHERE // BLOCK * BLOCK
    assert told.ranges == [[max(first, SINK), first + BLOCK]]
    assert h.held() == h.hot(tape)
    assert h.admit(query="0123 ~~").admitted == 0  # what it asks for is attended


def test_a_segment_comes_back_by_its_place_in_the_prompt(h: Evicting) -> None:
    parts = (numbered(300), FACT * 5, numbered(3000, 900))
    h.turn(raw(*parts[:2]), raw(parts[2]), options(1))
    told = h.admit(segment_index=1)
    assert told.ranges == [[300, 300 + 5 * len(FACT)]]
    assert h.admit(segment_index=1).admitted == 0
    assert h.admit(segment_index=0).ranges == [[SINK, 300]]


def test_what_is_admitted_stays_through_evictions_and_says_what_goes_for_it(h: Evicting) -> None:
    tape = filled(h)
    h.decode(options(WINDOW - len(h.held()) + 1))  # the window is full
    tape = h.session().conversation()
    before = h.explain()
    told = h.admit(begin=300, end=500)
    assert (told.admitted, told.resident) == (200, SINK + 200 + RECENT)
    assert told.evicted == before.resident + 1 - SINK - RECENT
    assert h.held() == h.hot(tape)
    for _ in range(3):
        final = h.decode(options(400))
        assert final.stop_reason == "length"
        assert (300, 500) in attended(h)
    assert h.held() == h.hot(h.session().conversation())


def test_the_budget_bounds_what_comes_in_and_the_latest_stays_first(h: Evicting) -> None:
    filled(h)
    told = h.admit(begin=300, end=2000, budget_tokens=100)
    assert told.ranges == [[300, 400]]
    most = WINDOW - SINK - RECENT - BLOCK
    told = h.admit(begin=1000, end=2000)
    assert told.ranges == [[1000, 1000 + most]]
    h.decode(options(WINDOW))
    assert (1000, 1000 + most) in attended(h)
    assert (300, 400) not in attended(h)
    assert not any(b.cls == "admitted" and b.begin == 300 for b in h.explain().blocks)


def test_pins_leave_less_to_admit(h: Evicting) -> None:
    h.suffix(segments(numbered(400), pinned(numbered(200, 500)), numbered(3000, 900)))
    told = h.admit(begin=600, end=2000)
    assert told.admitted == WINDOW - SINK - RECENT - BLOCK - 200


def test_what_is_gone_is_evaluated_again() -> None:
    h = Evicting(cold_bytes=0)
    h.open_evicting()
    tape = filled(h)
    told = h.admit(begin=SINK, end=SINK + BLOCK)
    assert (told.admitted, told.restored, told.parked) == (BLOCK, 0, 0)
    assert told.recomputed == told.resident - SINK
    assert h.held() == h.hot(tape)


def test_a_cancel_at_any_moment_says_what_is_there_and_the_next_call_goes_on() -> None:
    seen = set()
    for cancel_at in range(24):
        h = Evicting(FakeEngine(micro_batch=32, end_bias=-100.0))
        h.open_evicting()
        tape = filled(h)
        told = h.admit(begin=400, end=600, op=FakeOp(cancel_at=cancel_at))
        seen.add((told.cancelled, told.admitted))
        assert told.admitted == sum(end - begin for begin, end in told.ranges)
        assert h.held() == h.hot(tape)
        assert told.resident == len(h.held())
        h.check_records()
        op = FakeOp()
        h.decode(options(1), op=op)
        assert (400, 600) in attended(h)
        assert op.ids == [int(np.argmax(h.logits_after(h.held())))]
    assert {cancelled for cancelled, _ in seen} == {True, False}
    assert len({admitted for cancelled, admitted in seen if cancelled}) > 2


def test_what_cannot_be_admitted_is_refused_by_name(h: Evicting) -> None:
    with pytest.raises(InvalidRequest):
        h.admit(begin=0, end=1)  # no prompt yet
    filled(h)
    before = h.explain()
    wrong: list[dict[str, Any]] = [
        {},
        {"begin": 5, "end": 5},
        {"begin": -1, "end": 5},
        {"begin": 0, "end": len(TEXT) + 1},
        {"segment_index": 1},
        {"begin": 0, "end": 5, "query": "x"},
        {"segment_index": 0, "query": "x"},
        {"begin": 300, "end": 310, "budget_tokens": -1},
    ]
    for what in wrong:
        with pytest.raises(InvalidRequest):
            h.admit(**what)
    assert h.explain() == before
    plain = Evicting()
    plain.open(window=WINDOW)
    plain.suffix(raw("x"))
    with pytest.raises(UnsupportedFeature) as refused:
        plain.admit(begin=0, end=1)
    assert refused.value.metadata["capability"] == "overflow.evict"


def test_where_pins_leave_no_room_at_all_it_is_an_overflow_and_nothing_changes(
    h: Evicting,
) -> None:
    h.suffix(segments(numbered(256), pinned(numbered(300, 200)), numbered(400, 400)))
    assert h.decode(options(500)).stop_reason == "context_full"
    before = h.explain()
    with pytest.raises(ContextOverflow) as refused:
        h.admit(query="0")
    assert refused.value.metadata["pinned"] == "300"
    assert h.explain() == before
