"""A session's state and rules without transport: requests, manifest checks, what recovery needs.

The synchronous and the asyncio session share this; nothing here sends a call or waits.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from modeld.client import calls
from modeld.client.calls import Call, Deadlines, OpenOptions, TurnEvent, TurnItem
from modeld.client.convert import from_proto, identity_to_proto
from modeld.client.decode_options import DecodeOptions
from modeld.client.errors import RECOVERABLE, ConnectionLost, ProtocolViolation
from modeld.client.prompts import GeneratedTurn, PromptPart, WirePrompt, digest_of, wire_prompt
from modeld.client.sendable import sendable
from modeld.client.values import (
    Chunk,
    Closed,
    ContextReport,
    Final,
    Opened,
    PrefillStatus,
    QueueStatus,
    Recovery,
    Saved,
    SessionHandle,
)
from modeld.shared.errors import DigestMismatch, ModeldError
from modeld.shared.manifest import Identity
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2

logger = logging.getLogger(__name__)

RecoveryCallback = Callable[[Recovery], None]


def checked(status: PrefillStatus, expected: str, part: str) -> PrefillStatus:
    """The daemon must have seen the same manifest that this client built.

    Raises DigestMismatch otherwise: its numbers would speak of another prompt.
    """
    if expected and status.manifest_digest != expected:
        raise DigestMismatch(
            f"The daemon's manifest digest of the {part} is {status.manifest_digest or 'empty'}, "
            f"this client's is {expected}: they disagree on what was asked. "
            "Use a client and a daemon of the same version.",
            metadata={
                "field": f"{part}.manifest_digest",
                "asserted": expected,
                "actual": status.manifest_digest,
            },
        )
    return status


@dataclass
class SessionCore:
    """One session. ``prefix`` and ``suffix`` are the caller's own text, kept for recovery."""

    options: OpenOptions
    deadlines: Deadlines
    opened: Opened
    recover: bool = False
    on_recovery: RecoveryCallback | None = None
    recoveries: list[Recovery] = field(default_factory=list)
    prefix: PromptPart | None = None
    suffix: PromptPart | None = None
    lost: Exception | None = None  # a loss that has not been recovered from yet
    closed: bool = False
    discarded: bool = False
    turns: set[str] | None = None  # ids of the answers that it has; None: those given in it
    saved: Saved | None = None  # how saving it went last
    saved_turn: str = ""  # the answer after which it was saved, if nothing came since
    answered: str = ""  # since the prompt, over all decodes

    def __post_init__(self) -> None:
        self.turns = _turns_of(self.opened)

    @property
    def handle(self) -> SessionHandle:
        return self.opened.session

    @property
    def identity(self) -> Identity:
        return self.opened.identity

    @property
    def reopening(self) -> OpenOptions:
        """What to open it with after a loss: what was saved of it isn't forgotten then."""
        return dataclasses.replace(self.options, fresh=False)

    # --- requests --------------------------------------------------------------------------------

    def wire_handle(self) -> common.SessionHandle:
        handle = self.handle
        return common.SessionHandle(session_id=handle.session_id, generation=handle.generation)

    def wire(self, part: PromptPart) -> WirePrompt:
        return wire_prompt(
            part,
            prompt_format=self.identity.prompt_format,
            session_id=self.handle.session_id,
            turns=self.turns,
            evicts=self.options.overflow == "evict",
        )

    @sendable
    def prefix_call(
        self, part: PromptPart, *, turn_id: str, no_wait: bool, timeout_s: float | None
    ) -> Call[PrefillStatus]:
        wire = self.wire(part)
        expected = digest_of(self.identity, wire)
        wire.proto.manifest_digest = expected
        request = session_pb2.EnsurePrefixRequest(
            session=self.wire_handle(),
            identity=identity_to_proto(self.identity),
            prompt=wire.proto,
            turn_id=turn_id,
            no_wait=no_wait,
        )

        def parse(response: session_pb2.EnsurePrefixResponse) -> PrefillStatus:
            status = checked(from_proto(PrefillStatus, response.status), expected, "prefix")
            self._ensured(part)
            return status

        return calls.call("SessionService", "EnsurePrefix", request, parse, timeout_s)

    @sendable
    def suffix_call(
        self,
        part: PromptPart,
        *,
        extend: bool,
        turn_id: str,
        no_wait: bool,
        timeout_s: float | None,
    ) -> Call[PrefillStatus]:
        wire = self.wire(part)
        expected = self._suffix_digest(wire, extend)
        wire.proto.manifest_digest = expected
        request = session_pb2.PrefillSuffixRequest(
            session=self.wire_handle(),
            identity=identity_to_proto(self.identity),
            prompt=wire.proto,
            extend=extend,
            turn_id=turn_id,
            no_wait=no_wait,
        )

        def parse(response: session_pb2.PrefillSuffixResponse) -> PrefillStatus:
            status = checked(from_proto(PrefillStatus, response.status), expected, "suffix")
            self._suffixed(part, extend)
            return status

        return calls.call("SessionService", "PrefillSuffix", request, parse, timeout_s)

    def _suffix_digest(self, wire: WirePrompt, extend: bool) -> str:
        """Over the whole prompt; "" (not asserted) where this client didn't send its prefix."""
        if self.prefix is None:
            return ""
        before = [self.wire(self.prefix)]
        if extend and self.suffix is not None:
            before.append(self.wire(self.suffix))
        return digest_of(self.identity, *before, wire)

    @sendable
    def decode_call(
        self, options: DecodeOptions, *, turn_id: str, no_wait: bool, timeout_s: float | None
    ) -> Call[TurnEvent]:
        request = session_pb2.DecodeRequest(
            session=self.wire_handle(),
            identity=identity_to_proto(self.identity),
            options=options.to_proto(),
            turn_id=turn_id,
            no_wait=no_wait,
        )
        parse = calls.tagged_events(
            {kind: calls.TURN_EVENTS[kind] for kind in ("queued", "chunk", "final")}
        )
        return calls.call("SessionService", "Decode", request, parse, timeout_s)  # type: ignore[arg-type]

    @sendable
    def turn_call(
        self,
        prefix: PromptPart,
        suffix: PromptPart,
        options: DecodeOptions,
        *,
        no_wait: bool,
        timeout_s: float | None,
    ) -> Call[TurnEvent]:
        wires = {"prefix": self.wire(prefix), "suffix": self.wire(suffix)}
        expected = {
            "prefix": digest_of(self.identity, wires["prefix"]),
            "suffix": digest_of(self.identity, wires["prefix"], wires["suffix"]),
        }
        for name, wire in wires.items():
            wire.proto.manifest_digest = expected[name]
        request = session_pb2.TurnRequest(
            session=self.wire_handle(),
            identity=identity_to_proto(self.identity),
            prefix=wires["prefix"].proto,
            suffix=wires["suffix"].proto,
            options=options.to_proto(),
            no_wait=no_wait,
        )
        tagged = calls.tagged_events(calls.TURN_EVENTS)

        def parse(message: Any) -> TurnEvent | None:
            event = tagged(message)
            if event is not None and event[0] in expected:
                checked(event[1], expected[event[0]], event[0])
                if event[0] == "prefix":
                    self._ensured(prefix)
                else:
                    self._suffixed(suffix, extend=False)
            return event

        return calls.call("SessionService", "Turn", request, parse, timeout_s)  # type: ignore[arg-type]

    def explain_call(self) -> Call[ContextReport]:
        request = session_pb2.ExplainContextRequest(
            session=self.wire_handle(), identity=identity_to_proto(self.identity)
        )
        parse = calls.answer(ContextReport)
        timeout_s = self.deadlines.quick_s
        return calls.call("SessionService", "ExplainContext", request, parse, timeout_s)

    def end_call(self, *, discard: bool, detach: bool) -> Call[Closed] | None:
        """Closing or detaching it; None where that was done. What is saved is discarded by its key,
        so that it goes also where the handle is stale.
        """
        if self.closed and (not discard or self.discarded):
            return None
        self.closed = True
        return calls.close_session(
            self.handle,
            discard=discard,
            detach=detach,
            session_key=self.options.session_key if discard and self.options.durable else "",
            deadlines=self.deadlines,
        )

    def not_ended(self, error: Exception, *, discard: bool) -> bool:
        """Whether the failure of an ``end_call`` may leave something of it. A discard can be asked
        for again then, and the error says so.
        """
        durable = discard and self.options.durable
        if isinstance(error, RECOVERABLE) and not durable:
            return False  # it is gone
        self.closed = not discard
        if durable:
            key = self.options.session_key
            error.add_note(
                f"What is saved under {key!r} may still be there. Close it with discard again, or "
                f"discard it by its key: Client.discard_saved, `modeld sessions close {key} "
                "--discard`."
            )
        return True

    # --- what calls leave behind -----------------------------------------------------------------

    def _ensured(self, part: PromptPart) -> None:
        self.prefix, self.suffix, self.saved_turn, self.answered = part, None, "", ""

    def _suffixed(self, part: PromptPart, extend: bool) -> None:
        keep = extend and self.suffix is not None
        self.suffix = self.suffix.extended(part) if keep and self.suffix else part
        self.saved_turn = self.answered = ""

    def failed(self, error: BaseException) -> None:
        """A call that this side gave up may have had its effect, and have been saved with it. After
        a refusal, and after a loss, the session is what it was.
        """
        if not isinstance(error, (ModeldError, *RECOVERABLE)):
            self.saved_turn = ""

    def generated(self, state: StreamState) -> GeneratedTurn | None:
        """The finished answer as a turn to refer to, or None where there is none."""
        self.saved_turn = ""
        self.answered += state.text  # a decode goes on with what was answered: a turn is all of it
        if state.final is None:
            return None
        self.saved, turn_id = state.final.saved, state.final.generated_turn_id
        if not turn_id:
            return None
        if self.saved is not None and self.saved.ok:
            self.saved_turn = turn_id
        if self.turns is not None:
            self.turns.add(turn_id)
        return GeneratedTurn(turn_id, self.handle.session_id, self.answered)

    def adopt(self, opened: Opened, cause: Exception, *, operation: str, retried: bool) -> Recovery:
        """Take the reopened session; record, log and tell it."""
        old = self.handle
        same = opened.attached and opened.session.session_id == old.session_id
        reason = cause.reason if isinstance(cause, ModeldError) else ""
        if isinstance(cause, ConnectionLost):
            reason = "CONNECTION_LOST"
        recovery = Recovery(
            cause=reason or type(cause).__name__,
            message=str(cause),
            unix_s=time.time(),
            old=old,
            new=opened.session,
            attached=same,
            operation=operation,
            retried=retried,
            detail=opened.detail,
            resumed=opened.resumed,
        )
        self.opened = opened
        if not same or opened.resumed is not None:
            self.turns = _turns_of(opened)
        if opened.resumed is None:
            self.saved_turn = ""  # the lost call may have changed the session that is still there
        self.lost = None
        self.recoveries.append(recovery)
        logger.warning(
            "session %s was lost in %s (%s); continued as %s%s",
            old.session_id,
            operation,
            recovery.cause,
            opened.session.session_id,
            ", the call is sent again" if retried else "",
        )
        if self.on_recovery is not None:
            self.on_recovery(recovery)
        return recovery

    def is_where_it_was(self) -> bool:
        """Whether what came back is the last answer that this client took, its prompt included."""
        resumed = self.opened.resumed
        if resumed is None or not self.saved_turn or not resumed.generated_turn_ids:
            return False
        return resumed.generated_turn_ids[-1] == self.saved_turn


def _turns_of(opened: Opened) -> set[str] | None:
    return set(opened.resumed.generated_turn_ids) if opened.resumed is not None else None


@dataclass
class StreamState:
    """What a turn's or a decode's stream has brought so far."""

    queue: QueueStatus | None = None
    prefix_status: PrefillStatus | None = None
    suffix_status: PrefillStatus | None = None
    final: Final | None = None
    pieces: list[str] = field(default_factory=list)
    delivered: bool = False  # a chunk has reached the caller: the call is never sent again
    started_s: float = field(default_factory=time.monotonic)
    seconds_to_first_token: float | None = None  # as this side saw it, waiting included

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def feed(self, kind: str, value: TurnItem) -> Chunk | None:
        """Take one event; returns the chunk if it was one."""
        if isinstance(value, Chunk):
            if self.seconds_to_first_token is None:
                self.seconds_to_first_token = time.monotonic() - self.started_s
            self.delivered = True
            self.pieces.append(value.text)
            return value
        if isinstance(value, QueueStatus):
            self.queue = value
        elif isinstance(value, Final):
            self.final = value
        elif kind == "prefix":
            self.prefix_status = value
        else:
            self.suffix_status = value
        return None

    def require_final(self) -> Final:
        if self.final is None:
            raise ProtocolViolation("The stream ended without its final record.")
        return self.final


def decode_options(options: DecodeOptions | None, overrides: Mapping[str, Any]) -> DecodeOptions:
    """Options from an object or from keywords, not both."""
    if options is not None and overrides:
        raise TypeError("pass decode options as an object or as keywords, not both")
    return options if options is not None else DecodeOptions(**overrides)


def not_sent_again(operation: str) -> str:
    """Why a call that met a loss was not repeated."""
    if operation in ("turn", "decode"):
        return "Part of the answer had been delivered"
    return "The call may have had its effect and was not sent again"


def restores(operation: str, restore: bool | None) -> bool:
    """A turn and an ensured prefix carry their own text; the other calls build on earlier ones."""
    return operation != "turn" if restore is None else restore
