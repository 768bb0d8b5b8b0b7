"""Adapters in the calls: what a session asks for, and the store's as models of type "adapter"."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from modeld.shared.capacity import AdapterUse
from modeld.shared.errors import InvalidRequest, SwitchRequired
from modeld.supervisor.models.adapters import TYPE, StoredAdapter
from modeld.supervisor.rpc.services import Services
from modeld.v1 import common_pb2 as common
from modeld.v1 import model_pb2 as pb

MAX_ADAPTERS = 16


async def adapters_of(
    services: Services, asked: Sequence[common.Adapter]
) -> tuple[AdapterUse, ...]:
    """Raises InvalidRequest for a bad or repeated one, ModelNotFound for an unknown digest."""
    if len(asked) > MAX_ADAPTERS:
        raise InvalidRequest.of("adapters", len(asked), f"at most {MAX_ADAPTERS}")
    found: list[AdapterUse] = []
    for index, one in enumerate(asked):
        if not math.isfinite(one.scale) or not one.scale:
            raise InvalidRequest.of(
                f"adapters[{index}].scale", one.scale, "a finite number other than 0"
            )
        if any(one.digest == other.digest for other in found):
            raise InvalidRequest.of(
                f"adapters[{index}].digest", one.digest[:64], "each adapter once"
            )
        stored = await asyncio.to_thread(services.adapters.by_digest, one.digest)
        found.append(
            AdapterUse(
                one.digest, one.scale, stored.name, str(stored.path), stored.record.memory_bytes
            )
        )
    return tuple(found)


def infos(services: Services, stored: Iterable[StoredAdapter]) -> list[pb.ModelInfo]:
    return [info(services, one) for one in stored]


def info(services: Services, stored: StoredAdapter) -> pb.ModelInfo:
    record = stored.record
    ranks = ", ".join(map(str, record.ranks))
    return pb.ModelInfo(
        name=record.name,
        type=TYPE,
        digest=record.digest,
        size_bytes=record.size_bytes,
        architecture=f"lora, rank {ranks}",
        resident=_resident(services, record.digest),
        imported_unix_ms=record.imported_unix_ms,
    )


async def import_adapter(services: Services, request: pb.ImportModelRequest) -> pb.ModelInfo:
    if request.replace and request.name:
        refuse_resident(services, request.name, "replaced")
    _refuse_models_name(services, request.name)
    stored = await asyncio.to_thread(
        services.adapters.import_file,
        Path(request.path),
        request.name,
        replace=request.replace,
        expected_digest=request.expected_digest,
    )
    return info(services, stored)


def refuse_resident(services: Services, name: str, what: str) -> None:
    """Raises SwitchRequired where an adapter of that name is loaded."""
    for slot in services.slots.values():
        if slot.resident and any(one.name == name for one in slot.resident.adapters):
            raise SwitchRequired(
                f"The adapter {name!r} is resident with {slot.model_name!r} and can't be {what}. "
                "Unload that first.",
                metadata={"resident_model": slot.model_name, "adapter": name},
            )


def _refuse_models_name(services: Services, name: str) -> None:
    """One name is one thing: `remove` and `list` know both by it."""
    if name and any(model.name == name for model in services.store.list()):
        raise InvalidRequest.of("name", name, "a name that no model has")


def _resident(services: Services, digest: str) -> bool:
    return any(
        one.digest == digest
        for slot in services.slots.values()
        if slot.resident
        for one in slot.resident.adapters
    )
