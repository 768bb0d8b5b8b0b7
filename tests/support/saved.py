"""Saves and restores on a core harness, and what of a session must not differ afterwards."""

from __future__ import annotations

from pathlib import Path

from modeld.shared.messages import (
    ExplainResult,
    RestoreOp,
    RestoreResult,
    SaveOp,
    SaveResult,
)
from modeld.workers.session import Session
from tests.support.core_harness import FakeOp, Harness


def save(
    harness: Harness, folder: Path | str, session_id: str = "a", op: FakeOp | None = None
) -> SaveResult:
    result = harness.run(SaveOp(session_id=session_id, folder=str(folder)), op)
    assert isinstance(result, SaveResult)
    return result


def restore(
    harness: Harness,
    folder: Path | str,
    record: str,
    session_id: str = "a",
    op: FakeOp | None = None,
) -> RestoreResult:
    request = RestoreOp(session_id=session_id, folder=str(folder), record=record)
    result = harness.run(request, op)
    assert isinstance(result, RestoreResult)
    return result


def session_of(harness: Harness, session_id: str = "a") -> Session:
    return harness.core.model.sessions.by_id[session_id]


def told(harness: Harness, session_id: str = "a") -> ExplainResult:
    """Without how many contexts there ever were: a second one may have come and gone."""
    explained = harness.explain(session_id)
    for counter in ("slot_contexts_created", "slot_contexts_freed"):
        del explained.counters[counter]
    return explained


def ranges(saved: SaveResult) -> list[tuple[int, int]]:
    return [(part.begin, part.end) for part in saved.parts]


def content(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def prune(folder: Path, saved: SaveResult) -> None:
    """What a caller does once it has committed: remove what isn't named."""
    named = {saved.record, *(part.name for part in saved.parts)}
    for path in folder.iterdir():
        if path.name not in named:
            path.unlink()
