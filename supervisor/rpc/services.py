"""What the servicers share: the gate, the configuration, the store and the slots."""

from __future__ import annotations

from dataclasses import dataclass

from modeld.shared.errors import BackendMismatch, SessionNotFound, UnsupportedModelType
from modeld.shared.ids import backend_of
from modeld.supervisor.config import Config
from modeld.supervisor.durable_sessions import DurableSessions
from modeld.supervisor.events import EventBus
from modeld.supervisor.model_slot import ModelSlot
from modeld.supervisor.models.adapters import AdapterStore
from modeld.supervisor.models.store import ModelStore
from modeld.supervisor.rpc.errors import Gate
from modeld.supervisor.snapshots import SnapshotStore

KNOWN_TYPES = ("llama", "openvino")


@dataclass(frozen=True)
class Services:
    gate: Gate
    config: Config
    store: ModelStore
    slots: dict[str, ModelSlot]  # by backend
    bus: EventBus
    stored_snapshots: SnapshotStore | None = None  # None: of a daemon that is only a part of one

    @property
    def snapshots(self) -> SnapshotStore:
        assert self.stored_snapshots is not None
        return self.stored_snapshots

    @property
    def durable(self) -> DurableSessions:
        """Those of the data root, which all slots share."""
        return next(iter(self.slots.values())).durable

    @property
    def adapters(self) -> AdapterStore:
        return AdapterStore(self.config.data_root)

    def slot_of_type(self, model_type: str) -> ModelSlot:
        """The slot that serves a model type.

        Raises UnsupportedModelType for an unknown type, BackendMismatch for one that this daemon
        doesn't run.
        """
        if model_type not in KNOWN_TYPES:
            raise UnsupportedModelType(
                f"Model type {model_type!r} is unknown. Known are {', '.join(KNOWN_TYPES)}.",
                metadata={"type": model_type, "known": ",".join(KNOWN_TYPES)},
            )
        slot = self.slots.get(model_type)
        if slot is None:
            raise BackendMismatch(
                f"This daemon runs {', '.join(self.slots)} only, not {model_type!r}. The setting "
                "backends says which.",
                metadata={"type": model_type, "backends": ",".join(self.slots)},
            )
        return slot

    def slot_of_model(self, name: str, model_type: str = "") -> ModelSlot:
        """The slot that serves a model: names are unique in the store, so its record tells the
        type, and a given one can only agree.

        Raises as ``slot_of_type``, and InvalidRequest, ModelNotFound, DigestMismatch,
        ModelLoadFailed or BackendMismatch.
        """
        given = self.slot_of_type(model_type) if model_type else None
        kind = self.store.get(name).record.type
        if given is not None and kind != model_type:
            raise BackendMismatch(
                f"{name!r} is a model of type {kind!r}, not {model_type!r}. Leave the type out, or "
                f"give {kind!r}.",
                metadata={"model": name, "type": kind, "asked_type": model_type},
            )
        if kind in self.slots:
            return self.slots[kind]
        raise BackendMismatch(
            f"{name!r} is a model of type {kind!r}, and this daemon runs "
            f"{', '.join(self.slots)} only. The setting backends says which.",
            metadata={"model": name, "type": kind, "backends": ",".join(self.slots)},
        )

    def slot_of_session(self, session_id: str) -> ModelSlot:
        slot = self.slots.get(backend_of(session_id))
        if slot is not None or not session_id:
            return slot or next(iter(self.slots.values()))
        raise SessionNotFound(
            f"No session {session_id[:64]!r}: not an id that OpenSession answered.",
            metadata={"session_id": session_id[:64]},
        )
