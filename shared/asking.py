"""What a backend's engine is asked about a model file before it is loaded, and what it answers.

The question goes to a short-lived process as one JSON object, the answer comes back as another.
Values only: nobody here runs a process or an engine.
"""

from __future__ import annotations

import msgspec

from modeld.shared.messages import EngineDevice

# Windows (tokens) that a dry run tries: between two of them costs are taken as linear, which is
# never below what the engine needs, since its buffers grow convexly.
WINDOWS = tuple(256 << step for step in range(13))


class AskRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``path`` "": ask for the build and its devices only."""

    path: str = ""
    n_batch: int = 512
    n_ubatch: int = 512
    k_type: str = "f16"
    v_type: str = "f16"
    flash_attn: bool = False
    device: str = ""  # the engine's name of the one device to compile for; "": its default
    windows: list[int] = []  # tokens; beyond what the model takes, its ceiling is tried once


class AskPoint(msgspec.Struct, forbid_unknown_fields=True):
    """What a context of ``cells`` costs on the host, in bytes, as the engine reports it (0: it
    doesn't tell).
    """

    cells: int
    kv_bytes: int
    compute_bytes: int


class AskAnswer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``loader`` is "yes" where the engine took the model's shape, "no" with its ``words``, or
    "unknown" where it could not be asked. ``generates`` is "" where it can, else why not.
    """

    loader: str
    words: str = ""
    generates: str = ""
    device: str = ""  # why the device that was asked can't be used, in the engine's words
    copied_bytes: int = 0  # memory beside its file's pages that loading it took; 0: not measured
    backend_version: str = ""
    build_digest: str = ""
    devices: list[EngineDevice] = []
    traits: dict[str, int] = {}
    points: list[AskPoint] = []
    notes: list[str] = []  # contexts that could not be tried, in the engine's words
