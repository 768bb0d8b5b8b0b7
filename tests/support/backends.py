"""The backends that engine tests run on: what to start, which model to load, at which KV types."""

from __future__ import annotations

import asyncio
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modeld.supervisor.models.conversion import Conversions
from modeld.supervisor.models.store import ModelStore

if TYPE_CHECKING:
    from modeld.workers.engine import Engine


@dataclass(frozen=True)
class Backend:
    """``model`` is the fixture that answers the path of what the worker loads."""

    name: str
    module: str  # of the worker
    model: str
    kv_types: tuple[tuple[str, str], ...]  # K and V
    exact: tuple[tuple[str, str], ...]  # of those, where a prompt's split changes no bit

    def engine(self) -> Engine:
        """An engine of its own in this process."""
        if self.name == "llama":
            from modeld.workers.llama.engine import LlamaEngine

            return LlamaEngine()
        from modeld.workers.openvino.engine import OpenVinoEngine

        return OpenVinoEngine()


LLAMA = Backend(
    "llama",
    "modeld.workers.llama",
    "demo_model",
    kv_types=(("f16", "f16"), ("q8_0", "f16")),
    exact=(("f16", "f16"),),
)
OPENVINO = Backend(
    "openvino",
    "modeld.workers.openvino",
    "demo_folder",
    kv_types=(("f16", "f16"), ("u8", "u8")),
    exact=(("f16", "f16"),),
)
BACKENDS = (LLAMA, OPENVINO)


def converted_root(model: Path, root: Path) -> Path:
    """A data root in which the product has converted ``model``; answers the folder it made."""

    async def ignore(_stage: str, _fraction: float) -> None:
        pass

    stored = ModelStore(root).import_file(model, name="model", model_type="openvino")
    with ThreadPoolExecutor(1) as apart:  # a fixture of an async test is made inside its loop
        convert = apart.submit(lambda: asyncio.run(Conversions(root).ensure(stored, ignore)))
        return convert.result()


def share_conversion(folder: Path, data_root: Path) -> None:
    """Spare the daemon of ``data_root`` the conversion that made ``folder``."""
    target = data_root / "converted" / folder.name
    target.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(folder, target, copy_function=os.link)
