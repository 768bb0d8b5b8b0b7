"""The session service's calls on what a session holds: saved, brought back, forked, admitted, let
go.
"""

from __future__ import annotations

import asyncio

from modeld.shared.errors import (
    GenerationStale,
    InvalidRequest,
    ModeldError,
    SessionClosed,
    SessionFatal,
    SessionNotFound,
)
from modeld.shared.ids import check_session_key
from modeld.shared.manifest import manifest_digest
from modeld.shared.messages import AdmitOp, AdmitResult, Status
from modeld.supervisor.context_slot import Forked
from modeld.supervisor.model_slot import ModelSlot
from modeld.supervisor.rpc import convert
from modeld.supervisor.rpc.errors import Context, guarded, guarded_while_draining
from modeld.supervisor.rpc.session_calls import expect, handle_of
from modeld.supervisor.rpc.snapshot_calls import SnapshotCalls
from modeld.supervisor.rpc.streaming import caller_of
from modeld.supervisor.sessions import Session
from modeld.v1 import session_pb2 as pb


class ResidencyCalls(SnapshotCalls):
    """Part of the session service; see the proto for what each call promises."""

    @guarded
    async def Admit(self, request: pb.AdmitRequest, context: Context) -> pb.AdmitResponse:
        slot, session = self._session(request.session, request.identity)
        operation = _admit(session.session_id, request)
        async with slot.hold(
            session.session_id, "admit", caller_of(context, no_wait=False)
        ) as hold:
            self._session(request.session)  # it may have gone while this call waited
            told = expect(await slot.call(operation, session=session), AdmitResult)
            session.resident = told.resident
        if told.cancelled:
            raise SessionClosed(
                f"Session {session.session_id} was closed while tokens were admitted to it.",
                metadata={"session_id": session.session_id, "cause": "closed"},
            )
        return pb.AdmitResponse(
            admitted=told.admitted,
            evicted=told.evicted,
            resident=told.resident,
            available=told.available,
            restored=told.restored,
            recomputed=told.recomputed,
            ranges=[pb.TokenRange(begin=begin, end=end) for begin, end in told.ranges],
            parked=told.parked,
            gone=told.gone,
            seconds=told.seconds,
            queue_seconds=hold.waited_s,
        )

    @guarded
    async def Fork(self, request: pb.ForkRequest, context: Context) -> pb.ForkResponse:
        slot, source = self._session(request.session, request.identity)
        key = request.session_key
        if key:
            check_session_key(key)
        elif request.durable:
            raise InvalidRequest.of(
                "session_key", "", "a key with durable", "It names what the next open brings back."
            )
        caller = caller_of(context, no_wait=request.no_wait)
        forked = await slot.fork(source, caller, session_key=key, durable=request.durable)
        session = forked.session
        digest = manifest_digest(
            session.identity, (*session.prefix, *session.suffix), session.tools
        )
        return pb.ForkResponse(
            session=handle_of(session),
            status=convert.prefill_status(_status(forked), digest, forked.queue_seconds),
            identity=convert.identity(session.identity),
            resolution=convert.resolution(session.resolution),
            capabilities=convert.capabilities(session.capabilities),
            generated_turn_ids=forked.result.turn_ids,
            saved=convert.saved_out(forked.saved),
        )

    @guarded_while_draining
    async def ListSavedSessions(
        self, request: pb.ListSavedSessionsRequest, context: Context
    ) -> pb.ListSavedSessionsResponse:
        durable = self.services.durable
        infos, opened = await asyncio.to_thread(durable.infos), durable.open_keys()
        return pb.ListSavedSessionsResponse(
            saved=[
                pb.SavedSession(
                    session_key=info.session_key,
                    model=info.model,
                    model_digest=info.identity.model_digest,
                    prompt_format=info.identity.prompt_format,
                    tokens=info.tokens,
                    seen_tokens=info.seen_tokens,
                    turns=info.turns,
                    window=info.window,
                    overflow=f"OVERFLOW_{info.overflow.upper()}",
                    size_bytes=info.size_bytes,
                    saved_unix_ms=info.created_unix_ms,
                    used_unix_ms=info.used_unix_ms,
                    open=info.session_key in opened,
                )
                for info in infos
            ]
        )

    @guarded
    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        try:
            slot, session = self._session(request.session)
        except ModeldError:
            if not (request.discard and request.session_key):
                raise
            return await self._forget(request.session_key, gone=bool(request.session.session_id))
        if request.detach:
            session.attached = False
            return pb.CloseSessionResponse(retained_tokens=session.resident)
        retained = await _close(slot, session, "closed by its client", discard=request.discard)
        return pb.CloseSessionResponse(retained_tokens=retained)

    async def _forget(self, key: str, *, gone: bool) -> pb.CloseSessionResponse:
        """A durable session by its key: open or not, nothing of it stays.

        Raises SessionNotFound where there is nothing, unless its client knows it as ``gone``.
        """
        check_session_key(key)
        retained, found = 0, gone
        for slot in self.services.slots.values():
            session = slot.sessions.by_key(key)
            if session is not None and session.durable:
                why = "what was saved under its key was discarded"
                retained, found = await _close(slot, session, why, discard=True), True
        found = await self.services.durable.forget(key) or found
        if not found:
            raise SessionNotFound(
                f"No durable session has the key {key!r}, and nothing is saved under it.",
                metadata={"session_key": key},
            )
        return pb.CloseSessionResponse(retained_tokens=retained)


async def _close(slot: ModelSlot, session: Session, why: str, *, discard: bool) -> int:
    """Tokens that stay behind. What is to be discarded is gone also where the worker dies of it."""
    try:
        return await slot.close(session, why=why, discard=discard)
    except (SessionFatal, GenerationStale):
        if not discard:
            raise
        return 0


def _admit(session_id: str, request: pb.AdmitRequest) -> AdmitOp:
    """Raises InvalidRequest unless one thing is asked for, by a value that it can have."""
    kind = request.WhichOneof("what")
    operation = AdmitOp(session_id=session_id, budget_tokens=request.budget_tokens)
    if kind == "segment_index" and request.segment_index >= 0:
        operation.segment_index = request.segment_index
    elif kind == "range" and 0 <= request.range.begin < request.range.end:
        operation.begin, operation.end = request.range.begin, request.range.end
    elif kind == "query" and request.query:
        operation.query = request.query
    else:
        raise InvalidRequest.of(
            kind or "what",
            "" if kind in (None, "query") else str(getattr(request, kind)).strip(),
            "one of a segment_index from 0 on, a range [begin, end) and a query that isn't empty",
        )
    return operation


def _status(forked: Forked) -> Status:
    """What the new session holds, as a prefill would tell it."""
    session, result = forked.session, forked.result
    window = min(session.resolution.numbers.effective.tokens, result.window)
    return Status(
        part="suffix",
        reused=0,
        dropped=0,
        prefilled=0,
        prefix=0,
        suffix=0,
        resident=result.resident,
        available=window - result.resident,
        retained=result.retained,
        copied=result.copied,
        miss_reason="NONE",
        stable_token_hash="",
        volatile_token_hash="",
        template_additive=True,
        turns_recomputed=0,
        seen_tokens=session.seen_tokens,
        seconds=result.seconds,
        segments=[],
    )
