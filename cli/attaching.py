"""Reaching an open session by its key: as it was opened, and left as it was found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from modeld.client import (
    Client,
    ClientError,
    InvalidRequest,
    ModeldError,
    Resolution,
    Session,
    SessionInfo,
    SessionNotFound,
)


def having(client: Client, key_or_id: str) -> list[SessionInfo]:
    """The open sessions of a key or an id."""
    return [s for s in client.sessions() if key_or_id in (s.session.session_id, s.session_key)]


def found(client: Client, key_or_id: str) -> SessionInfo:
    """Raises SessionNotFound where none is open."""
    for info in having(client, key_or_id):
        return info
    raise not_open(key_or_id)


def not_open(key_or_id: str) -> SessionNotFound:
    return SessionNotFound(
        f"No open session has the key or id {key_or_id!r}. `modeld sessions` lists them; `modeld "
        "run MODEL PROMPT --session KEY` opens one, and brings back what is saved of it.",
        metadata={"session": key_or_id},
    )


def opened_as(info: SessionInfo, resolution: Resolution) -> dict[str, Any]:
    """How a session was opened, but for its model, prompt format and adapters."""
    return {
        "window": resolution.context.requested.tokens,
        "profile_id": info.profile_id,
        "k_type": resolution.k_type,
        "v_type": resolution.v_type,
        "overflow": info.overflow.value.removeprefix("OVERFLOW_").lower(),
        "layout": info.layout.value.removeprefix("LAYOUT_").lower(),
        "durable": info.durable,
    }


@contextlib.contextmanager
def attached(client: Client, info: SessionInfo) -> Iterator[Session]:
    """An open session, attached by its key; detached again if it was before.

    Raises InvalidRequest for a session without a key.
    """
    if not info.session_key:
        raise InvalidRequest.of(
            "session",
            info.session.session_id,
            "a session with a key",
            "Only its own client can reach another.",
        )
    session_id = info.session.session_id
    resolution = client.describe(info.model, session_id=session_id).resolution
    slots = [slot for slot in client.status().slots if slot.model == info.model]
    session = client.open_session(
        info.model,
        session_key=info.session_key,
        prompt_format=info.prompt_format,
        adapters=slots[0].identity.adapters if slots else (),
        **{**opened_as(info, resolution), "window": 0},  # whatever it is
    )
    try:
        yield session
    finally:
        if not info.attached:
            with contextlib.suppress(ModeldError, ClientError):
                session.detach()
