"""DaemonService: what the daemon is doing, and how it ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

import modeld
from modeld.shared.capacity import CapacityRequest
from modeld.shared.messages import PROTOCOL_VERSION
from modeld.supervisor.events import Event
from modeld.supervisor.model_slot import ModelSlot
from modeld.supervisor.rpc import convert
from modeld.supervisor.rpc.errors import Context, guarded, guarded_while_draining, unguarded
from modeld.supervisor.rpc.services import Services
from modeld.supervisor.rpc.streaming import Writer
from modeld.v1 import daemon_pb2 as pb
from modeld.v1 import daemon_pb2_grpc

if TYPE_CHECKING:
    from modeld.supervisor.generation import GenerationStore


class DaemonService(daemon_pb2_grpc.DaemonServiceServicer):
    """See the proto for what each call promises."""

    def __init__(
        self,
        services: Services,
        generations: GenerationStore,
        endpoints: Callable[[], tuple[str, ...]],
        drain: Callable[[float | None], tuple[int, int]],
    ) -> None:
        self.services = services
        self.gate = services.gate
        self._generations = generations
        self._endpoints = endpoints
        self._drain = drain
        self._started = time.monotonic()

    @unguarded
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        planning = next(iter(self.services.slots.values())).planning
        machine = await planning.read()
        process = psutil.Process()
        times = process.cpu_times()
        names = {m.digest: m.name for m in self.services.store.list()}
        quarantined = sorted(
            names.get(digest, digest)
            for slot in self.services.slots.values()
            for digest in slot.quarantine.quarantined
        )
        return pb.StatusResponse(
            owner_instance_id=self.gate.owner_instance_id,
            version=modeld.__version__,
            protocol_version=PROTOCOL_VERSION,
            generation=self._generations.current,
            uptime_seconds=time.monotonic() - self._started,
            data_root=str(self.services.config.data_root),
            endpoints=self._endpoints(),
            slots=[_slot(slot) for slot in self.services.slots.values()],
            draining=self.gate.draining,
            memory_total_bytes=machine.host.total_bytes,
            memory_available_bytes=machine.host.available_bytes,
            supervisor_rss_bytes=process.memory_info().rss,
            pid=os.getpid(),
            quarantined_models=quarantined,
            supervisor_cpu_seconds=times.user + times.system,
            machine=convert.machine(machine),
        )

    @guarded
    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Context) -> None:
        watcher = self.services.bus.watch()
        writer = Writer(context, self.services.config.stall_limit_s, self.gate.check_owner)
        try:
            for slot in self.services.slots.values():
                await writer.write(
                    pb.Event(
                        unix_ms=int(time.time() * 1000),
                        kind="slot",
                        backend=slot.backend,
                        state=slot.machine.state.name,
                        model=slot.model_name,
                        generation=slot.sessions.generation,
                    )
                )
            while not self.gate.draining:
                await writer.write(_event(await watcher.next()))
        finally:
            self.services.bus.unwatch(watcher)

    @guarded_while_draining
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        running, queued = self._drain(request.grace_seconds or None)
        return pb.DrainResponse(running=running, queued=queued)

    @guarded
    async def ClearQuarantine(
        self, request: pb.ClearQuarantineRequest, context: Context
    ) -> pb.ClearQuarantineResponse:
        model = await asyncio.to_thread(self.services.store.get, request.model)
        was = False
        for slot in self.services.slots.values():
            was = slot.clear_quarantine(model.digest) or was
        return pb.ClearQuarantineResponse(was_quarantined=was)


def _event(event: Event) -> pb.Event:
    return pb.Event(
        sequence=event.sequence,
        unix_ms=event.unix_ms,
        kind=event.kind,
        backend=event.backend,
        state=event.state,
        model=event.model,
        generation=event.generation,
        session_id=event.session_id,
        cause=event.cause,
    )


def _slot(slot: ModelSlot) -> pb.SlotStatus:
    queue = slot.queue.snapshot()
    status = pb.SlotStatus(
        backend=slot.backend,
        state=f"SLOT_{slot.machine.state.name}",
        model=slot.model_name,
        generation=slot.sessions.generation,
        sessions=len(slot.sessions),
        queued=queue.queued,
        holder_operation=queue.holder_operation,
        holder_age_seconds=queue.holder_age_s,
        last_fatal=slot.last_fatal,
        idle_release_in_seconds=slot.idle.remaining_s(time.monotonic()) or 0.0,
        reclaimable_bytes=slot.use.reclaimable_bytes,
        worker=_worker(slot),
    )
    if slot.latest is not None:
        status.context.CopyFrom(convert.numbers(slot.latest.numbers))
    if slot.resident is not None:
        model = slot.resident.model
        status.model_digest = model.digest
        status.executor = slot.resident.load.executor
        status.executor_reason = slot.resident.load.executor_reason
        k_type, v_type = slot.kv_types
        identity = slot.identity(
            model,
            CapacityRequest(k_type=k_type, v_type=v_type, adapters=slot.resident.adapters),
            window=slot.latest.numbers.effective.tokens if slot.latest else 0,
            prompt_format="",
            profile_id="",
        )
        status.identity.CopyFrom(convert.identity(identity))
    return status


def _worker(slot: ModelSlot) -> pb.WorkerStatus:
    keeper = slot.keeper
    return pb.WorkerStatus(
        backend=slot.backend,
        state=keeper.state.name,
        pid=keeper.pid or 0,
        rss_bytes=keeper.heartbeat.rss_bytes if keeper.heartbeat else 0,
        restarts=keeper.restarts,
        restart_in_seconds=keeper.restart_in_s,
        last_death=keeper.last_death.text if keeper.last_death else "",
        backend_version=keeper.hello.backend_version if keeper.hello else "",
    )
