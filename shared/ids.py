"""Identifiers and the alphabets they are validated against."""

from __future__ import annotations

import re
import secrets
import uuid

from modeld.shared.errors import InvalidRequest

# A model's name is a name, not a path: no separators, no leading dot or dash.
MODEL_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
SESSION_KEY = re.compile(r"^[A-Za-z0-9._-]{1,128}\Z")
SNAPSHOT_ID = re.compile(r"^snap-[0-9a-f]{16}\Z")
ROLE = re.compile(r"^[a-z_]{1,32}\Z")


def new_instance_id() -> str:
    return str(uuid.uuid4())


def new_session_id(backend: str) -> str:
    """The backend's name leads, so that a handle of any age finds its slot."""
    return f"{backend}-{secrets.token_hex(8)}"


def backend_of(session_id: str) -> str:
    return session_id.rpartition("-")[0]


def new_turn_id() -> str:
    return "t-" + secrets.token_hex(8)


def new_snapshot_id() -> str:
    return "snap-" + secrets.token_hex(8)


def new_epoch() -> bytes:
    """128 random bits, one value a worker spawn."""
    return secrets.token_bytes(16)


def check_model_name(name: str) -> str:
    """Return the name, or raise InvalidRequest saying what is allowed."""
    if not MODEL_NAME.match(name):
        raise InvalidRequest.of(
            "model",
            name[:200],
            "a name of at most 128 letters, digits, '.', '_' and '-', not beginning with a mark",
            "A model is named as in `modeld models list`; import a file first to give it a name.",
        )
    return name


def check_session_key(key: str) -> str:
    if not SESSION_KEY.match(key):
        raise InvalidRequest.of(
            "session_key", key[:200], "1 to 128 letters, digits, '.', '_' and '-'"
        )
    return key
