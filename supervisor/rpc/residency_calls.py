"""The session service's calls on what a session holds: saved, brought back, forked, admitted."""

from __future__ import annotations

from typing import Any

from modeld.shared.errors import unsupported
from modeld.supervisor.rpc.errors import Context, guarded
from modeld.supervisor.rpc.session_calls import SessionCalls
from modeld.v1 import session_pb2 as pb


class ResidencyCalls(SessionCalls):
    """Part of the session service; see the proto for what each call promises."""

    @guarded
    async def Snapshot(self, request: Any, context: Context) -> pb.SnapshotInfo:
        raise unsupported("snapshot")

    @guarded
    async def Restore(self, request: Any, context: Context) -> pb.RestoreResponse:
        raise unsupported("snapshot")

    @guarded
    async def ListSnapshots(self, request: Any, context: Context) -> pb.ListSnapshotsResponse:
        raise unsupported("snapshot")

    @guarded
    async def DeleteSnapshot(self, request: Any, context: Context) -> pb.DeleteSnapshotResponse:
        raise unsupported("snapshot")

    @guarded
    async def ExportSnapshot(self, request: Any, context: Context) -> None:
        raise unsupported("snapshot")

    @guarded
    async def ImportSnapshot(self, request: Any, context: Context) -> pb.SnapshotInfo:
        raise unsupported("snapshot")

    @guarded
    async def Admit(self, request: Any, context: Context) -> pb.AdmitResponse:
        raise unsupported("cold_store")

    @guarded
    async def Fork(self, request: Any, context: Context) -> pb.ForkResponse:
        raise unsupported("fork")
