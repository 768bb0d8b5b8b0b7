"""Reaching an open session by its key: as it was opened, and left as it was found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from modeld.client import (
    Client,
    ClientError,
    InvalidRequest,
    ModeldError,
    Session,
    SessionInfo,
    SessionNotFound,
)


def found(client: Client, key_or_id: str) -> list[SessionInfo]:
    """The sessions of a key or an id. Raises SessionNotFound where there is none."""
    those = [s for s in client.sessions() if key_or_id in (s.session.session_id, s.session_key)]
    if not those:
        raise SessionNotFound(
            f"No session has the key or id {key_or_id!r}. `modeld sessions` lists them.",
            metadata={"session": key_or_id},
        )
    return those


@contextlib.contextmanager
def attached(client: Client, key_or_id: str) -> Iterator[Session]:
    """The open session, attached by its key; detached again if it was before.

    Raises SessionNotFound, and InvalidRequest for a session without a key.
    """
    info = found(client, key_or_id)[0]
    if not info.session_key:
        raise InvalidRequest.of(
            "session", key_or_id, "a session with a key", "Only its own client can reach another."
        )
    session_id = info.session.session_id
    resolution = client.describe(info.model, session_id=session_id).resolution
    slots = [slot for slot in client.status().slots if slot.model == info.model]
    session = client.open_session(
        info.model,
        session_key=info.session_key,
        profile_id=info.profile_id,
        prompt_format=info.prompt_format,
        k_type=resolution.k_type,
        v_type=resolution.v_type,
        overflow=info.overflow.value.removeprefix("OVERFLOW_").lower(),
        layout=info.layout.value.removeprefix("LAYOUT_").lower(),
        durable=info.durable,
        adapters=slots[0].identity.adapters if slots else (),
    )
    try:
        yield session
    finally:
        if not info.attached:
            with contextlib.suppress(ModeldError, ClientError):
                session.detach()
