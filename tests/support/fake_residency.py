"""The fake daemon's calls on kept state: snapshots, restore, fork, admit, explain.

A snapshot's files are the session's text in two parts and a record; what is exported is cut into
pieces of a few bytes. Whatever a daemon verifies of an import is verified: order, names, digest.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from modeld.shared.errors import (
    DigestMismatch,
    InvalidRequest,
    ManifestMismatch,
    SnapshotNotFound,
)
from modeld.shared.manifest import sha256_hex
from modeld.v1 import common_pb2, session_pb2

PIECE_BYTES = 7


@dataclass
class Kept:
    """A snapshot: what is told of it, its files in order, and the session's state."""

    info: session_pb2.SnapshotInfo
    files: dict[str, bytes]
    turns: dict[str, str] = field(default_factory=dict)


def digest_of(files: dict[str, bytes]) -> str:
    return sha256_hex(b"".join(name.encode() + data for name, data in files.items()))


def _created(info: Any) -> int:
    return int(info.created_unix_ms)


class FakeResidency:
    """Part of the fake's servicer."""

    w: Any
    session: Any

    async def enter(self, request: Any, context: Any) -> None:
        raise NotImplementedError

    def kept(self, snapshot_id: str) -> Kept:
        if snapshot_id not in self.w.snapshots:
            raise SnapshotNotFound(
                f"No snapshot is {snapshot_id!r}.", metadata={"snapshot_id": snapshot_id}
            )
        found: Kept = self.w.snapshots[snapshot_id]
        return found

    async def Snapshot(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        session = self.session(request)
        self.w.due("Snapshot")
        half = len(session.tokens) // 2
        files = {
            "part-0": session.tokens[:half],
            "part-1": session.tokens[half:],
            "empty": b"",
            "record-1": "\n".join(f"{k}={v}" for k, v in session.turns.items()).encode(),
        }
        info = session_pb2.SnapshotInfo(
            snapshot_id=f"snap-{uuid.uuid4().hex[:8]}",
            label=request.label,
            size_bytes=sum(len(data) for data in files.values()),
            digest=digest_of(files),
            tokens=len(session.tokens),
            exact=True,
            identity=session.identity,
            created_unix_ms=1_700_000_000_000 + len(self.w.snapshots),
            model=session.model,
            window=session.window or 4096,
            seen_tokens=session.seen,
            turns=len(session.turns),
            seconds=0.25,
            k_type="f16",
            v_type="f16",
            overflow=session.overflow,
        )
        self.w.snapshots[info.snapshot_id] = Kept(info, files, dict(session.turns))
        return info

    async def Restore(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        session = self.session(request)
        self.w.due("Restore")
        kept = self.kept(request.snapshot_id)
        if kept.info.identity.model_digest != session.identity.model_digest:
            raise ManifestMismatch("another model's", metadata={"field": "model_digest"})
        session.tokens = kept.files["part-0"] + kept.files["part-1"]
        session.turns, session.prefix, session.suffix = dict(kept.turns), [], []
        return session_pb2.RestoreResponse(
            snapshot=kept.info,
            resident=len(session.tokens),
            available=4096 - len(session.tokens),
            tokens=len(session.tokens),
            exact=True,
            seen_tokens=kept.info.seen_tokens,
            generated_turn_ids=list(session.turns),
            seconds=0.125,
        )

    async def ListSnapshots(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        kept: list[Kept] = list(self.w.snapshots.values())
        found: list[session_pb2.SnapshotInfo] = [k.info for k in kept]
        if request.model_digest:
            found = [i for i in found if i.identity.model_digest == request.model_digest]
        return session_pb2.ListSnapshotsResponse(
            snapshots=sorted(found, key=_created, reverse=True),
            used_bytes=sum(k.info.size_bytes for k in kept),
            quota_bytes=self.w.snapshot_quota,
        )

    async def DeleteSnapshot(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        self.kept(request.snapshot_id)
        del self.w.snapshots[request.snapshot_id]
        return session_pb2.DeleteSnapshotResponse()

    async def ExportSnapshot(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await self.enter(request, context)
        kept = self.kept(request.snapshot_id)
        info: Any = kept.info
        sent = 0
        for name, data in kept.files.items():
            for offset in range(0, max(1, len(data)), PIECE_BYTES):
                self.w.due("ExportSnapshot", sent)
                sent += 1
                yield session_pb2.SnapshotChunk(
                    info=info, offset=offset, data=data[offset : offset + PIECE_BYTES], file=name
                )
                info = None

    async def ImportSnapshot(self, requests: Any, context: Any) -> Any:
        info: Any = None
        files: dict[str, bytes] = {}
        async for chunk in requests:
            if info is None:
                await self.enter(chunk, context)
                info = chunk.info
                self.w.due("ImportSnapshot")
            data = files.get(chunk.file, b"")
            if chunk.offset != len(data):
                raise InvalidRequest.of("offset", chunk.offset, str(len(data)))
            files[chunk.file] = data + chunk.data
        if info is None or digest_of(files) != info.digest:
            raise DigestMismatch("The snapshot is damaged: its digest is another.")
        lines = files["record-1"].decode().splitlines()
        turns = dict(line.split("=", 1) for line in lines)
        fresh = session_pb2.SnapshotInfo()
        fresh.CopyFrom(info)
        fresh.snapshot_id = f"snap-{uuid.uuid4().hex[:8]}"
        self.w.snapshots[fresh.snapshot_id] = Kept(fresh, files, turns)
        return fresh

    async def Admit(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        session = self.session(request)
        self.w.due("Admit")
        return session_pb2.AdmitResponse(
            admitted=256,
            evicted=128,
            resident=len(session.tokens),
            restored=200,
            recomputed=56,
            ranges=[session_pb2.TokenRange(begin=256, end=512)],
            parked=self.w.outside[0],
            gone=self.w.outside[1],
        )

    async def Fork(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        session = self.session(request)
        self.w.due("Fork")
        branch = type(session)(**vars(session))
        branch.session_id, branch.key = f"s-{uuid.uuid4().hex[:8]}", request.session_key
        branch.turns, branch.durable = dict(session.turns), request.durable
        self.w.sessions[branch.session_id] = branch
        return session_pb2.ForkResponse(
            session=common_pb2.SessionHandle(
                session_id=branch.session_id, generation=branch.generation
            ),
            status=session_pb2.PrefillStatus(
                copied=len(branch.tokens), resident=len(branch.tokens), reused=len(branch.tokens)
            ),
            identity=branch.identity,
            resolution=self.w.resolution(branch.window),
            generated_turn_ids=list(branch.turns),
            saved=self.w.saved if branch.durable else None,
        )

    async def ExplainContext(self, request: Any, context: Any) -> Any:
        await self.enter(request, context)
        session = self.session(request)
        held, (parked, gone, _) = len(session.tokens), self.w.outside
        block = session_pb2.ResidentBlock
        blocks = [block(token_begin=0, token_end=held, state="hot", what="prefix")]
        for state, tokens in (("parked", parked), ("gone", gone)):
            if tokens:
                begin = blocks[-1].token_end
                blocks.append(
                    block(
                        token_begin=begin,
                        token_end=begin + tokens,
                        state=state,
                        what="prefix",
                        cache_class="volatile",
                    )
                )
        return session_pb2.ExplainContextResponse(
            session=request.session,
            identity=session.identity,
            resident=held,
            available=4096 - held,
            parked=parked,
            gone=gone,
            blocks=blocks,
            seen_tokens=session.seen,
            generated_turn_ids=list(session.turns),
            counters=[session_pb2.Counter(name="turns", value=len(session.turns))],
        )
