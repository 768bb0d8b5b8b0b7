"""``modeld status``: the daemon, its slots and engines, its sessions."""

from __future__ import annotations

import click

from modeld.cli import plan_view
from modeld.cli.commands.sessions import session_table
from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import count, emit_json, say, seconds, size, table
from modeld.client import DaemonStatus, SlotStatus, to_plain


@click.command(short_help="Show slots, engines, sessions, memory.")
@global_options
@pass_settings
def status(settings: Settings) -> None:
    """Show what the daemon does: slots, engines, sessions, generation, memory.

    Doesn't start one: exit status 3 if none runs.
    """
    with connect(settings) as client:
        daemon, sessions = client.status(), client.sessions()
    if settings.json:
        emit_json({"state": "RUNNING", **to_plain(daemon), "sessions": to_plain(sessions)})
        return
    _daemon(daemon)
    plan_view.devices(daemon.machine.devices)
    for said in daemon.machine.notes:
        say(f"  {said}")
    for slot in daemon.slots:
        _slot(slot)
    if sessions:
        session_table("sessions", sessions)


def _daemon(daemon: DaemonStatus) -> None:
    state = "draining" if daemon.draining else "running"
    say(
        f"modeld {daemon.version}, {state} for {seconds(daemon.uptime_seconds)} "
        f"(pid {daemon.pid}, generation {daemon.generation})",
        "bold",
    )
    say(f"data root: {daemon.data_root}")
    say(f"endpoints: {', '.join(daemon.endpoints)}")
    memory = (
        plan_view.host(daemon.machine)
        if daemon.machine.host_known
        else f"{size(daemon.memory_available_bytes)} available of {size(daemon.memory_total_bytes)}"
    )
    say(f"memory: {memory}; the daemon itself {size(daemon.supervisor_rss_bytes)}")
    if daemon.quarantined_models:
        say(f"quarantined: {', '.join(daemon.quarantined_models)}", "red")


def _slot(slot: SlotStatus) -> None:
    effective = slot.context.effective
    rows = [
        ("state", slot.state.value.removeprefix("SLOT_")),
        ("model", slot.model or "–"),
        ("generation", slot.generation),
        ("sessions", slot.sessions),
        ("queued", slot.queued),
        ("window", f"{count(effective.tokens)} tokens" if effective.known else "–"),
        ("engine", _worker(slot)),
    ]
    if slot.executor:
        rows.append(("executor", plan_view.executor(slot.executor, slot.executor_reason)))
    if slot.holder_operation:
        rows.append(("held by", f"{slot.holder_operation}, {seconds(slot.holder_age_seconds)}"))
    if slot.idle_release_in_seconds > 0:
        rows.append(("released in", seconds(slot.idle_release_in_seconds)))
    if slot.reclaimable_bytes:
        rows.append(("reclaimable", size(slot.reclaimable_bytes)))
    if slot.last_fatal:
        rows.append(("last fatal", slot.last_fatal))
    table(f"slot {slot.backend}", ("", ""), rows)


def _worker(slot: SlotStatus) -> str:
    worker = slot.worker
    text = f"{worker.state or 'none'}"
    if worker.pid:
        text += f", pid {worker.pid}, {size(worker.rss_bytes)}"
    if worker.restarts:
        text += f", {worker.restarts} restarts"
    if worker.last_death:
        text += f", last death: {worker.last_death}"
    return text
