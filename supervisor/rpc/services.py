"""What the servicers share: the gate, the configuration, the store and the slots."""

from __future__ import annotations

from dataclasses import dataclass

from modeld.shared.errors import BackendMismatch, SessionNotFound, UnsupportedModelType
from modeld.shared.ids import backend_of
from modeld.supervisor.config import Config
from modeld.supervisor.events import EventBus
from modeld.supervisor.model_slot import ModelSlot
from modeld.supervisor.models.store import ModelStore
from modeld.supervisor.rpc.errors import Gate

KNOWN_TYPES = ("llama", "openvino")


@dataclass(frozen=True)
class Services:
    gate: Gate
    config: Config
    store: ModelStore
    slots: dict[str, ModelSlot]  # by backend
    bus: EventBus

    def slot_of_type(self, model_type: str) -> ModelSlot:
        """The slot that serves a model type; "" is the first backend's.

        Raises UnsupportedModelType for an unknown type, BackendMismatch for one that this daemon
        doesn't run.
        """
        if not model_type:
            return next(iter(self.slots.values()))
        if model_type not in KNOWN_TYPES:
            raise UnsupportedModelType(
                f"Model type {model_type!r} is unknown. Known are {', '.join(KNOWN_TYPES)}.",
                metadata={"type": model_type, "known": ",".join(KNOWN_TYPES)},
            )
        slot = self.slots.get(model_type)
        if slot is None:
            raise BackendMismatch(
                f"This daemon runs {', '.join(self.slots)} only, not {model_type!r}.",
                metadata={"type": model_type, "backends": ",".join(self.slots)},
            )
        return slot

    def slot_of_session(self, session_id: str) -> ModelSlot:
        slot = self.slots.get(backend_of(session_id))
        if slot is not None or not session_id:
            return slot or self.slot_of_type("")
        raise SessionNotFound(
            f"No session {session_id[:64]!r}: not an id that OpenSession answered.",
            metadata={"session_id": session_id[:64]},
        )
