"""``modeld snapshots``: what was kept of sessions; listed, removed, written out and read in."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO, cast

import click

from modeld.cli import texts
from modeld.cli.commands.session_state import snapshot_of
from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import ago, count, emit_json, note, say, size, table
from modeld.cli.progress import Meanwhile
from modeld.client import Client, ModeldError, ModelNotFound, SnapshotInfo, SnapshotList


@click.group(
    invoke_without_command=True, short_help="List, show, remove, export and import snapshots."
)
@global_options
@click.pass_context
def snapshots(ctx: click.Context) -> None:
    """List the snapshots, as `list` does: what sessions held, kept under ids in the data root.

    `modeld sessions snapshot KEY` takes one, `modeld sessions restore KEY ID` brings it back. They
    outlive sessions, models in memory and daemons. Doesn't start a daemon: exit status 3 if none
    runs.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_snapshots)


@snapshots.command("list")
@click.option("--model", default="", help="Only those of this model of the store.")
@global_options
@pass_settings
def list_snapshots(settings: Settings, model: str) -> None:
    """List the snapshots, newest first, and the space that they take."""
    with connect(settings) as client:
        listed = client.list_snapshots(_digest_of(client, model) if model else "")
    if settings.json:
        emit_json(listed)
        return
    if listed.snapshots:
        _listed(listed)
    else:
        note("no snapshots")
    quota = f" of {size(listed.quota_bytes)}" if listed.quota_bytes else ""
    note(f"{size(listed.used_bytes)}{quota} used by snapshots and durable sessions")


def _digest_of(client: Client, name: str) -> str:
    for model in client.models():
        if model.name == name:
            return model.digest
    raise ModelNotFound(
        f"No model is named {name!r}. `modeld models list` lists them.", metadata={"model": name}
    )


def _listed(listed: SnapshotList) -> None:
    table(
        "",
        ("snapshot", "label", "model", "tokens", "window", "size", "taken", ""),
        [
            (
                info.snapshot_id,
                info.label or "–",
                info.model,
                count(info.tokens),
                count(info.window),
                size(info.size_bytes),
                ago(info.created_unix_ms),
                "exact" if info.exact else "",
            )
            for info in listed.snapshots
        ],
    )


@snapshots.command("show")
@click.argument("snapshot_id")
@global_options
@pass_settings
def show(settings: Settings, snapshot_id: str) -> None:
    """Show what the snapshot holds, and what a session must be for it to come back."""
    with connect(settings) as client:
        info = snapshot_of(client, snapshot_id)
    if settings.json:
        emit_json(info)
        return
    exact = "yes" if info.exact else "no"
    rows = [
        ("label", info.label or "–"),
        ("model", info.model),
        ("tokens", count(info.tokens)),
        ("window", count(info.window)),
        ("seen", count(info.seen_tokens)),
        ("answers", count(info.turns)),
        ("size", size(info.size_bytes)),
        ("taken", ago(info.created_unix_ms)),
        ("exact", f"{exact}: {info.exact_reason}" if info.exact_reason else exact),
        ("digest", info.digest),
    ]
    table(info.snapshot_id, ("", ""), rows)
    table("must match", ("", ""), _identity(info))


def _identity(info: SnapshotInfo) -> list[tuple[str, str]]:
    """All that a session must agree in; the rest of an identity may differ."""
    identity = info.identity
    names = [f.name for f in fields(identity) if f.name not in ("runtime_digest", "profile_id")]
    rows = {name: getattr(identity, name) for name in names}
    rows["adapters"] = ", ".join(f"{a.digest} × {a.scale:g}" for a in identity.adapters)
    rows["add_bos"] = "yes" if identity.add_bos else "no"
    return [(name, value or "–") for name, value in rows.items()]


@snapshots.command("delete")
@click.argument("snapshot_ids", nargs=-1, required=True, metavar="SNAPSHOT_ID...")
@global_options
@pass_settings
def delete(settings: Settings, snapshot_ids: tuple[str, ...]) -> None:
    """Remove snapshots. What runs or was restored from them goes on."""
    deleted: list[str] = []
    with connect(settings) as client:
        for snapshot_id in snapshot_ids:
            try:
                client.delete_snapshot(snapshot_id)
            except ModeldError as error:
                error.metadata["deleted"] = ",".join(deleted)  # before it
                raise
            deleted.append(snapshot_id)
            if not settings.json:
                say(f"deleted {snapshot_id}")
    if settings.json:
        emit_json({"deleted": deleted})


@snapshots.command("export")
@click.argument("snapshot_id")
@click.argument("path", required=False, type=click.Path(path_type=Path), default=None)
@global_options
@pass_settings
def export(settings: Settings, snapshot_id: str, path: Path | None) -> None:
    """Write a snapshot to one file, PATH, to keep it elsewhere or bring it to another data root.

    PATH must not exist yet; a folder (by default this one) gets a file named by the id. The file
    is a tar; it holds the conversation's tokens.
    """
    target = texts.path(path or Path(), "PATH")
    with connect(settings) as client, Meanwhile(quiet=settings.json) as meanwhile:
        meanwhile.show("exporting the snapshot")
        exported = client.export_snapshot(snapshot_id, target)
    if settings.json:
        emit_json(exported)
    else:
        say(f"wrote {exported.path} ({size(exported.size_bytes)})")


def _stdin() -> BinaryIO:
    """Unbuffered: a read that is stuck in the buffer's lock would abort the process at its end."""
    return cast("BinaryIO", getattr(sys.stdin.buffer, "raw", sys.stdin.buffer))


@snapshots.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@global_options
@pass_settings
def import_snapshot(settings: Settings, file: Path) -> None:
    """Take in a snapshot from the FILE that `export` wrote ('-': stdin), once all is verified."""
    with ExitStack() as stack:
        client = stack.enter_context(connect(settings))
        meanwhile = stack.enter_context(Meanwhile(quiet=settings.json))
        meanwhile.show("importing the snapshot")
        info = client.import_snapshot(_stdin() if str(file) == "-" else texts.path(file, "FILE"))
    if settings.json:
        emit_json(info)
    else:
        say(f"imported {info.snapshot_id} ({count(info.tokens)} tokens of {info.model})")
