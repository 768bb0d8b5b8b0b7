"""Residency operations on a core harness, and damage done to the files that they write."""

from __future__ import annotations

from pathlib import Path

import msgspec

from modeld.shared.messages import (
    ExportOp,
    ExportResult,
    ForkOp,
    ForkResult,
    ImportOp,
    ImportResult,
    TrimOp,
    TrimResult,
)
from modeld.workers.state_file import StateHeader, open_state, write_state
from tests.support.core_harness import FakeOp, Harness


def export(
    harness: Harness,
    path: Path | str,
    session_id: str = "a",
    begin: int = 0,
    end: int = -1,
    op: FakeOp | None = None,
) -> ExportResult:
    request = ExportOp(session_id=session_id, path=str(path), begin=begin, end=end)
    result = harness.run(request, op)
    assert isinstance(result, ExportResult)
    return result


def import_(
    harness: Harness, path: Path | str, session_id: str = "a", op: FakeOp | None = None
) -> ImportResult:
    result = harness.run(ImportOp(session_id=session_id, path=str(path)), op)
    assert isinstance(result, ImportResult)
    return result


def fork(harness: Harness, session_id: str, new_session_id: str) -> ForkResult:
    result = harness.run(ForkOp(session_id=session_id, new_session_id=new_session_id))
    assert isinstance(result, ForkResult)
    return result


def trim(harness: Harness, keep: int, session_id: str = "a") -> TrimResult:
    result = harness.run(TrimOp(session_id=session_id, keep=keep))
    assert isinstance(result, TrimResult)
    return result


def rewritten(path: Path, to: Path, **changes: object) -> Path:
    """The same state under a header that says something else, sealed as if it were so."""
    with open_state(str(path)) as file:
        parts = list(file.parts(lambda: 1 << 40))
        header: StateHeader = msgspec.structs.replace(file.header, **changes)
        write_state(to, header, len(parts), parts)
    return to


def flipped(path: Path, at: int, to: Path) -> Path:
    """A copy with one bit of the byte at ``at`` changed."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    to.write_bytes(data)
    return to
