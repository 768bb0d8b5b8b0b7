"""ModelService: the store and what is resident."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from modeld.shared.capacity import CapacityRequest
from modeld.shared.errors import InvalidRequest, SwitchRequired, unsupported
from modeld.supervisor.model_slot import ModelSlot
from modeld.supervisor.models.adapters import is_adapter
from modeld.supervisor.models.store import StoredModel
from modeld.supervisor.rpc import adapters, convert
from modeld.supervisor.rpc.errors import Context, guarded, guarded_while_draining
from modeld.supervisor.rpc.services import Services
from modeld.supervisor.rpc.streaming import QueueReporter, Writer, caller_of
from modeld.v1 import model_pb2 as pb
from modeld.v1 import model_pb2_grpc
from modeld.v1 import session_pb2 as session

PROGRESS_EVERY_S = 0.1


class ModelService(model_pb2_grpc.ModelServiceServicer):
    """See the proto for what each call promises."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.gate = services.gate

    def _writer(self, context: Context) -> Writer:
        return Writer(context, self.services.config.stall_limit_s, self.gate.check_owner)

    def _info(self, model: StoredModel) -> pb.ModelInfo:
        slot = self.services.slots.get(model.record.type)
        there = slot.resident if slot is not None else None
        resident = there is not None and there.model.name == model.name
        return pb.ModelInfo(
            name=model.name,
            type=model.record.type,
            digest=model.digest,
            size_bytes=model.record.size_bytes,
            architecture=model.facts.architecture,
            quantization=model.facts.quantization,
            context_length=model.facts.model_max,
            resident=resident,
            imported_unix_ms=model.record.imported_unix_ms,
            linked=model.record.linked,
            executor=there.load.executor if there is not None and resident else "",
        )

    @guarded_while_draining
    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        models = await asyncio.to_thread(self.services.store.list)
        stored = await asyncio.to_thread(self.services.adapters.list)
        found = [self._info(model) for model in models]
        return pb.ListModelsResponse(models=[*found, *adapters.infos(self.services, stored)])

    # --- residency ----------------------------------------------------------------------------

    async def _make_resident(
        self,
        request: Any,
        context: Context,
        *,
        force_switch: bool = False,
        expected_generation: int | None = None,
    ) -> None:
        slot = self.services.slot_of_model(request.model, request.model_type)
        model = slot.find_model(request.model)
        writer = self._writer(context)
        reporter = QueueReporter(lambda s: writer.write(pb.LoadModelEvent(queued=s)))

        async def report(stage: str, fraction: float) -> None:
            await reporter.stop()
            progress = session.LoadProgress(stage=stage, fraction=fraction)
            await writer.write(pb.LoadModelEvent(progress=progress))

        try:
            seconds = await slot.ensure_loaded(
                model,
                caller_of(context, no_wait=request.no_wait, reporter=reporter),
                report,
                force_switch=force_switch,
                expected_generation=expected_generation,
            )
        finally:
            await reporter.stop()
        await writer.write(pb.LoadModelEvent(loaded=self._loaded(slot, model, seconds)))

    def _loaded(self, slot: ModelSlot, model: StoredModel, seconds: float) -> pb.LoadModelResponse:
        k_type, v_type = slot.kv_types
        identity = slot.identity(
            model,
            CapacityRequest(k_type=k_type, v_type=v_type),
            window=0,
            prompt_format="",
            profile_id="",
        )
        return pb.LoadModelResponse(
            generation=slot.sessions.generation,
            identity=convert.identity(identity),
            already_resident=seconds == 0.0,
            seconds=seconds,
        )

    @guarded
    async def LoadModel(self, request: pb.LoadModelRequest, context: Context) -> None:
        await self._make_resident(request, context)

    @guarded
    async def SwitchModel(self, request: pb.SwitchModelRequest, context: Context) -> None:
        await self._make_resident(
            request, context, force_switch=True, expected_generation=request.expected_generation
        )

    @guarded
    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: Context
    ) -> pb.UnloadModelResponse:
        closed, found = 0, False
        generation = 0
        for slot in self.services.slots.values():
            generation = max(generation, slot.sessions.generation)
            if slot.resident is None or request.model not in ("", slot.model_name):
                continue
            caller = caller_of(context, no_wait=request.no_wait)
            count = await slot.unload(caller, force=request.force)
            found = found or count is not None
            closed += count or 0
            generation = max(generation, slot.sessions.generation)
        if not found and request.model:
            self.services.store.get(request.model)  # an unknown name is told, not ignored
        return pb.UnloadModelResponse(
            was_resident=found, generation=generation, sessions_closed=closed
        )

    # --- the store ----------------------------------------------------------------------------

    @guarded
    async def ImportModel(self, request: pb.ImportModelRequest, context: Context) -> None:
        path = Path(request.path)
        if not path.is_absolute():
            raise InvalidRequest.of(
                "path", request.path, "an absolute path on the daemon's machine"
            )
        writer = self._writer(context)
        if is_adapter(path, request.type):
            imported = await adapters.import_adapter(self.services, request)
            await writer.write(pb.ImportModelEvent(imported=imported))
            return
        if request.replace and request.name:
            self._refuse_resident(request.name, "replaced")
        loop = asyncio.get_running_loop()
        latest: list[tuple[str, int, int]] = []

        def progress(stage: str, done: int, total: int) -> None:
            # Called in a thread: the loop reads the latest when it next looks.
            loop.call_soon_threadsafe(latest.append, (stage, done, total))

        work = asyncio.ensure_future(
            asyncio.to_thread(
                self.services.store.import_file,
                path,
                request.name,
                request.type,
                copy=request.copy,
                replace=request.replace,
                expected_digest=request.expected_digest,
                progress=progress,
                served=tuple(self.services.slots),
            )
        )
        try:
            while not work.done():
                await asyncio.wait([work], timeout=PROGRESS_EVERY_S)
                if latest:
                    stage, done, total = latest[-1]
                    latest.clear()
                    told = pb.ImportProgress(stage=stage, done_bytes=done, total_bytes=total)
                    await writer.write(pb.ImportModelEvent(progress=told))
        finally:
            # A thread can't be stopped: a client that went away leaves a finished import behind.
            model = await asyncio.shield(work)
        await writer.write(pb.ImportModelEvent(imported=self._info(model)))

    def _refuse_resident(self, name: str, what: str) -> None:
        for slot in self.services.slots.values():
            if slot.model_name == name:
                raise SwitchRequired(
                    f"{name!r} is resident and can't be {what}. Unload it first.",
                    metadata={
                        "resident_model": name,
                        "sessions": len(slot.sessions.attached(time.monotonic())),
                    },
                )

    @guarded
    async def RemoveModel(
        self, request: pb.RemoveModelRequest, context: Context
    ) -> pb.RemoveModelResponse:
        if self.services.adapters.has(request.name):
            adapters.refuse_resident(self.services, request.name, "removed")
            freed = await asyncio.to_thread(self.services.adapters.remove, request.name)
            return pb.RemoveModelResponse(freed_bytes=freed)
        self._refuse_resident(request.name, "removed")
        freed = await asyncio.to_thread(self.services.store.remove, request.name)
        return pb.RemoveModelResponse(freed_bytes=freed)

    @guarded
    async def DiskStats(
        self, request: pb.DiskStatsRequest, context: Context
    ) -> pb.DiskStatsResponse:
        stats = await asyncio.to_thread(self.services.store.disk_stats)
        return pb.DiskStatsResponse(
            data_root=str(stats.data_root),
            models_bytes=stats.models_bytes,
            snapshots_bytes=stats.snapshots_bytes,
            free_bytes=stats.free_bytes,
            total_bytes=stats.total_bytes,
            durable_bytes=stats.durable_bytes,
            cold_bytes=stats.cold_bytes,
            quota_bytes=self.services.config.snapshot_quota_bytes,
            damaged_snapshots=await asyncio.to_thread(self.services.snapshots.damaged),
        )

    @guarded
    async def PushModel(self, request_iterator: Any, context: Context) -> pb.ModelInfo:
        raise unsupported("push_model", "Copy the file to the daemon's machine and import it.")
