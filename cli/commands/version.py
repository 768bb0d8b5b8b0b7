"""``modeld version``: this command's version, and the running daemon's with its engines."""

from __future__ import annotations

import contextlib
from typing import Any

import click

import modeld
from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import emit_json, say
from modeld.client import ClientError

PROTOCOL = "modeld.v1"


@click.command(short_help="Tell versions.")
@global_options
@pass_settings
def version(settings: Settings) -> None:
    """Tell versions: modeld, the protocol, and the engines of a running daemon."""
    told: dict[str, Any] = {"modeld": modeld.__version__, "protocol": PROTOCOL, "daemon": None}
    with contextlib.suppress(ClientError), connect(settings) as client:
        status = client.status()
        told["daemon"] = {
            "version": status.version,
            "protocol_version": status.protocol_version,
            "pid": status.pid,
            "backends": {slot.backend: slot.worker.backend_version for slot in status.slots},
        }
    if settings.json:
        emit_json(told)
        return
    say(f"modeld {told['modeld']}, protocol {told['protocol']}")
    daemon = told["daemon"]
    if daemon is None:
        say("no daemon running")
        return
    say(f"daemon {daemon['version']} (pid {daemon['pid']})")
    for backend, backend_version in daemon["backends"].items():
        say(f"  {backend}: {backend_version or 'not started yet'}")
