"""What goes out of attention for what is admitted is parked, and counted, as any that goes out."""

from __future__ import annotations

from modeld.shared.messages import SuffixOp
from tests.support.evicting import Evicting, numbered, segments


def test_what_goes_out_for_an_admission_is_parked_and_not_gone() -> None:
    harness = Evicting()
    harness.open_evicting()
    harness.run(SuffixOp(session_id="a", suffix=segments(numbered(3000))))
    before = harness.explain()
    while before.available >= 256:
        harness.run(SuffixOp(session_id="a", suffix=segments(numbered(200)), extend=True))
        before = harness.explain()
    evicted = before.counters["evicted_tokens"]
    told = harness.admit(begin=256, end=512)
    assert (told.admitted, told.gone) == (256, 0)
    assert told.evicted > 0
    after = harness.explain()
    assert after.counters["evicted_tokens"] - evicted == told.evicted
    assert after.parked == before.parked + told.evicted - told.admitted
