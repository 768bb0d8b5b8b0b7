"""What every call on sessions begins with: the session of a handle, its identity, its prompt."""

from __future__ import annotations

import time
from typing import TypeVar

from modeld.shared.errors import InvalidRequest
from modeld.shared.manifest import check_identity
from modeld.shared.messages import Payload
from modeld.supervisor.model_slot import ModelSlot
from modeld.supervisor.rpc import convert
from modeld.supervisor.rpc.errors import Context
from modeld.supervisor.rpc.services import Services
from modeld.supervisor.rpc.streaming import Writer
from modeld.supervisor.sessions import Session
from modeld.v1 import common_pb2 as common

MAX_NAME = 256

P = TypeVar("P", bound=Payload)


class SessionCalls:
    """Base of the session service's parts."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.gate = services.gate

    def _session(
        self, handle: common.SessionHandle, identity: common.Identity | None = None
    ) -> tuple[ModelSlot, Session]:
        """The slot and session of a handle, with the asserted identity checked (gate one)."""
        slot = self.services.slot_of_session(handle.session_id)
        session = slot.sessions.get(handle.session_id, handle.generation, time.monotonic())
        if identity is not None:
            check_identity(convert.identity_in(identity), session.identity)
        return slot, session

    def _writer(self, context: Context) -> Writer:
        return Writer(context, self.services.config.stall_limit_s, self.gate.check_owner)


def handle_of(session: Session) -> common.SessionHandle:
    return common.SessionHandle(session_id=session.session_id, generation=session.generation)


def expect(payload: Payload, kind: type[P]) -> P:
    if not isinstance(payload, kind):
        raise TypeError(f"the worker answered {type(payload).__name__}, not {kind.__name__}")
    return payload


def check_text(field: str, text: str) -> None:
    """A name that callers choose: short, and printable wherever it is shown."""
    if len(text) > MAX_NAME or not text.isprintable():
        raise InvalidRequest.of(field, text[:64], f"at most {MAX_NAME} printable characters")
