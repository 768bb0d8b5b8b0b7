"""Adapters on the command line: ``--adapter NAME[=SCALE]``, and the store where no daemon runs."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modeld.cli.daemon_start import data_root_errors
from modeld.cli.main import Settings
from modeld.client import AdapterId, Client, ModelInfo, ModelNotFound

if TYPE_CHECKING:
    from modeld.supervisor.models.adapters import AdapterStore, StoredAdapter


def parsed(value: str) -> tuple[str, float]:
    """The name and the scale, 1 where none is given. Raises a usage error."""
    name, _, scale = value.partition("=")
    try:
        number = float(scale) if "=" in value else 1.0
    except ValueError:
        number = math.nan
    if not name or not math.isfinite(number) or not number:
        raise click.UsageError(
            f"--adapter {value!r} is not valid: allowed is NAME or NAME=SCALE, a number but not 0"
        )
    return name, number


def session_options(
    client: Client, model: str, adapters: list[tuple[str, float]]
) -> dict[str, Any]:
    """What opening a session of ``model`` with these adapters takes. Raises ModelNotFound."""
    if not adapters:
        return {}
    models = client.models()
    known = {one.name: one.digest for one in models if one.type == "adapter"}
    for name, _ in adapters:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ModelNotFound(
                f"No adapter is named {name!r}.{hint} Import one with `modeld models import "
                "FILE.safetensors`.",
                metadata={"adapter": name},
            )
    options: dict[str, Any] = {
        "adapters": [AdapterId(known[name], scale) for name, scale in adapters]
    }
    if own := next((one.type for one in models if one.name == model and one.type != "adapter"), ""):
        options["model_type"] = own
    return options


# --- without a daemon ----------------------------------------------------------------------------


def store(settings: Settings) -> AdapterStore:
    from modeld.supervisor.models.adapters import AdapterStore

    with data_root_errors(settings.root):
        return AdapterStore(settings.root)


def listed(settings: Settings) -> list[ModelInfo]:
    return [_info(one) for one in store(settings).list()]


def imported(
    settings: Settings, path: Path, name: str, *, replace: bool, expected_digest: str
) -> ModelInfo:
    return _info(
        store(settings).import_file(path, name, replace=replace, expected_digest=expected_digest)
    )


def _info(stored: StoredAdapter) -> ModelInfo:
    record = stored.record
    return ModelInfo(
        name=record.name,
        type="adapter",
        digest=record.digest,
        size_bytes=record.size_bytes,
        architecture=f"lora, rank {', '.join(map(str, record.ranks))}",
        quantization="",
        context_length=0,
        resident=False,
        imported_unix_ms=record.imported_unix_ms,
        linked=False,
    )
