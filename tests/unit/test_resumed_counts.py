"""What the first statuses of a resumed session say was restored: what is reused and came back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from modeld.shared.messages import Status
from modeld.supervisor import parking
from modeld.supervisor.sessions import Back


def status(part: str, reused: int, prefix: int, *, restored: int = 0, copied: int = 0) -> Status:
    return Status(
        part=part, reused=reused, dropped=0, prefilled=5, prefix=prefix, suffix=0, resident=0,
        available=0, retained=0, copied=copied, miss_reason="NONE", stable_token_hash="",
        volatile_token_hash="", template_additive=True, turns_recomputed=0, seen_tokens=0,
        seconds=0.0, segments=[], restored=restored,
    )  # fmt: skip


def told(back: Back, *statuses: Status) -> list[int]:
    session: Any = SimpleNamespace(back=back)
    return [parking.told(session, one).restored for one in statuses]


def test_what_was_copied_from_another_session_was_not_restored() -> None:
    back = Back(restored=446, missing=0, seconds=0.1)
    parts = status("prefix", 103, 103, copied=103), status("suffix", 1, 103, copied=1)
    assert told(back, *parts) == [0, 0]


def test_what_the_new_context_held_anyhow_was_not_restored() -> None:
    """It had the first 200 tokens, and the store gave 100 more."""
    assert told(Back(100, 0, 0.1, begin=200), status("prefix", 150, 150)) == [0]
    assert told(Back(100, 0, 0.1, begin=200), status("prefix", 250, 250)) == [50]
    parts = status("prefix", 250, 250), status("suffix", 60, 250, restored=20)
    assert told(Back(100, 0, 0.1, begin=200), *parts) == [50, 60]
