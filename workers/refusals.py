"""Refusals that several operations give in the same words and numbers.

Owns what their metadata says. Knows nothing of why they are given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from modeld.shared.errors import ContextOverflow, ManifestMismatch

if TYPE_CHECKING:
    from modeld.workers.pool import ContextPool
    from modeld.workers.residency import Source
    from modeld.workers.session import Session
    from modeld.workers.session_record import SessionRecord
    from modeld.workers.state_file import StateHeader


def context_overflow(
    session: Session,
    pool: ContextPool,
    message: str,
    *,
    stage: str,
    asked: int,
    additional: int,
    drop: int,
    **more: object,
) -> ContextOverflow:
    """``asked`` tokens in all, ``additional`` to what is there; ``drop`` of them, and it fits."""
    return ContextOverflow(
        message,
        metadata={
            "stage": stage,
            "resident": session.logical,
            "additional": additional,
            "requested_tokens": asked,
            "effective": session.window,
            "hot": pool.slot_cells,
            "planner": session.window,
            **more,
            "drop_tokens": drop,
        },
    )


def check_identity(
    session: Session,
    source: Source,
    made: StateHeader | SessionRecord,
    what: str,
    otherwise: str,
    more: Iterable[tuple[str, str, str]] = (),
) -> None:
    """Raises ManifestMismatch, which names the first field that differs, where ``what`` isn't of
    the session's identity. ``more`` fields: each with what was ``made`` and what the session has.

    kv_digest decides; what it covers comes first, to be named.
    """
    shape = session.entry.shape
    fields = (
        ("backend", made.backend, source.backend),
        ("build_digest", made.build_digest, source.build_digest),
        ("state_layout", made.state_layout, source.state_layout),
        ("k_type", made.k_type, shape.k_type),
        ("v_type", made.v_type, shape.v_type),
        ("kv_digest", made.kv_digest, session.kv_digest),
        *more,
    )
    for field, asserted, actual in fields:
        if asserted != actual:
            raise ManifestMismatch(
                f"{what} is of another identity: its {field} is {asserted!r}, this session's "
                f"{actual!r}. Nothing was changed. {otherwise}",
                metadata={
                    "reason": "identity", "field": field, "asserted": asserted, "actual": actual,
                },
            )  # fmt: skip
