"""``modeld sessions``: the sessions a daemon holds, and closing one of them."""

from __future__ import annotations

import click

from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import count, emit_json, note, say, seconds, table
from modeld.client import SessionInfo, SessionNotFound


@click.group(invoke_without_command=True, short_help="List sessions, or close one.")
@global_options
@pass_settings
@click.pass_context
def sessions(ctx: click.Context, settings: Settings) -> None:
    """List the sessions that the daemon holds.

    A session is a conversation's state in a model's memory. `run --session KEY` leaves one open
    (detached) for the next run; its text is kept apart from it, so that closing one loses no
    conversation. Doesn't start a daemon.
    """
    if ctx.invoked_subcommand is not None:
        return
    with connect(settings) as client:
        found = client.sessions()
    if settings.json:
        emit_json({"sessions": found})
    elif found:
        session_table("", found)
    else:
        note("no sessions")


@sessions.command("close")
@click.argument("key_or_id", metavar="KEY_OR_ID")
@click.option("--discard", is_flag=True, help="Drop what it held, rather than keep it as cache.")
@global_options
@pass_settings
def close(settings: Settings, key_or_id: str, discard: bool) -> None:
    """Close the session of a key or an id, as `modeld sessions` lists them.

    What runs for it is stopped. The text of a conversation (`run --session`) stays, and goes on
    with the next run, in a session of its own window.
    """
    with connect(settings) as client:
        found = [s for s in client.sessions() if key_or_id in (s.session.session_id, s.session_key)]
        if not found:
            raise SessionNotFound(
                f"No session has the key or id {key_or_id!r}. `modeld sessions` lists them.",
                metadata={"session": key_or_id},
            )
        retained = [client.close_session(s.session, discard=discard) for s in found]
    if settings.json:
        emit_json(
            {
                "closed": [s.session.session_id for s in found],
                "retained_tokens": sum(r.retained_tokens for r in retained),
            }
        )
    else:
        say(f"closed {', '.join(s.session.session_id for s in found)}")


def session_table(title: str, found: list[SessionInfo]) -> None:
    table(
        title,
        ("session", "key", "model", "window", "resident", "seen", "idle", ""),
        [
            (
                s.session.session_id,
                s.session_key or "–",
                s.model,
                count(s.context.effective.tokens),
                count(s.resident),
                count(s.seen_tokens),
                seconds(s.idle_seconds),
                "attached" if s.attached else "detached",
            )
            for s in found
        ],
    )
