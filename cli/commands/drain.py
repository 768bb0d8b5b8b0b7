"""``modeld drain``: stop a daemon without cutting off what runs."""

from __future__ import annotations

import time

import click

from modeld.cli.daemon_start import connect
from modeld.cli.exit_codes import Exit
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import emit_json, note, say
from modeld.cli.progress import Meanwhile
from modeld.client.discovery import look
from modeld.shared.lease_record import DiscoveryState

POLL_S = 0.1
BEYOND_GRACE_S = 30.0


@click.command(short_help="Stop the daemon gently.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="How long running calls may take to finish. 0: as the daemon is configured.",
)
@click.option("--wait", is_flag=True, help="Wait until the daemon has ended.")
@global_options
@pass_settings
def drain(settings: Settings, grace_s: float, wait: bool) -> None:
    """Stop the daemon gently: nothing new is admitted, what runs may finish, then it ends."""
    with connect(settings) as client:
        answer = client.drain(grace_s)
    if wait:
        with Meanwhile(quiet=settings.json) as meanwhile:
            meanwhile.show("waiting for the daemon to end")
            end = time.monotonic() + (grace_s or 600.0) + BEYOND_GRACE_S
            while look(settings.data_root).state is DiscoveryState.RUNNING:
                if time.monotonic() > end:
                    note("the daemon still runs", "red")
                    raise SystemExit(Exit.TIMEOUT)
                time.sleep(POLL_S)
    if settings.json:
        emit_json(answer)
    else:
        verb = "drained" if wait else "draining"
        say(f"{verb}: {answer.running} running, {answer.queued} queued")
