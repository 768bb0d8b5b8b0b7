"""``modeld sessions``: the sessions a daemon holds, and what can be done with one of them."""

from __future__ import annotations

import contextlib

import click

from modeld.cli.attaching import having, not_open
from modeld.cli.commands import session_state
from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import ago, count, emit_json, note, say, seconds, size, table
from modeld.client import Client, Layout, Overflow, SavedSession, SessionInfo, SessionNotFound


@click.group(invoke_without_command=True, short_help="List, show, keep, branch and close sessions.")
@global_options
@click.pass_context
def sessions(ctx: click.Context) -> None:
    """List the sessions that the daemon holds, as `list` does.

    A session is a conversation's state in a model's memory. `run --session KEY` leaves one open
    (detached) for the next run; its text is kept apart from it, so that closing one loses no
    conversation. Doesn't start a daemon.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_sessions)


@sessions.command("list")
@global_options
@pass_settings
def list_sessions(settings: Settings) -> None:
    """List the sessions that the daemon holds, and what is saved of durable ones that aren't open.

    seen: the tokens that the session read or wrote itself; what it took over from others, or from
    what was saved, isn't counted.
    """
    with connect(settings) as client:
        listed, saved = client.sessions(), client.saved_sessions()
    if settings.json:
        emit_json({"sessions": listed, "saved": saved})
        return
    if listed:
        session_table("", listed)
    else:
        note("no sessions")
    closed = [one for one in saved if not one.open]
    if closed:
        _saved_table(closed)


def _saved_table(those: list[SavedSession]) -> None:
    table(
        "saved, not open",
        ("key", "model", "window", "tokens", "answers", "size", "saved"),
        [
            (
                s.session_key,
                s.model,
                count(s.window),
                count(s.tokens),
                count(s.turns),
                size(s.size_bytes),
                ago(s.saved_unix_ms),
            )
            for s in those
        ],
    )


@sessions.command("close")
@click.argument("key_or_id", metavar="KEY_OR_ID")
@click.option(
    "--discard",
    is_flag=True,
    help="Drop what it held, rather than keep it as cache, and what was saved of a durable one, "
    "be it open or not.",
)
@global_options
@pass_settings
def close(settings: Settings, key_or_id: str, discard: bool) -> None:
    """Close the session of a key or an id, as `modeld sessions` lists them.

    What runs for it is stopped. The text of a conversation (`run --session`) stays, and goes on
    with the next run, in a session of its own window. What was saved of a durable one stays too,
    unless --discard is given.
    """
    with connect(settings) as client:
        those = having(client, key_or_id)
        retained = [client.close_session(s.session, discard=discard) for s in those]
        discarded = [s.session_key for s in those if s.durable and discard]
        if discard:
            discarded += _discarded(client, those)
        if not those:
            if not discard:
                raise not_open(key_or_id)
            client.discard_saved(key_or_id)
            discarded = [key_or_id]
    if settings.json:
        emit_json(
            {
                "closed": [s.session.session_id for s in those],
                "retained_tokens": sum(r.retained_tokens for r in retained),
                "discarded": discarded,
            }
        )
    else:
        if those:
            say(f"closed {', '.join(s.session.session_id for s in those)}")
        for key in discarded:
            say(f"discarded what was saved of {key}")
        if any(s.durable for s in those) and not discard:
            note("what was saved of it stays; `close --discard` with its key removes it")


def _discarded(client: Client, those: list[SessionInfo]) -> list[str]:
    """Forget what a durable session left saved under the key of one that isn't; the keys."""
    gone = []
    for key in sorted({s.session_key for s in those if s.session_key and not s.durable}):
        with contextlib.suppress(SessionNotFound):
            client.discard_saved(key)
            gone.append(key)
    return gone


for command in (
    session_state.show,
    session_state.snapshot,
    session_state.restore,
    session_state.fork,
):
    sessions.add_command(command)


def session_table(title: str, those: list[SessionInfo]) -> None:
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
                _state(s),
            )
            for s in those
        ],
    )


def _state(session: SessionInfo) -> str:
    """Attached or not, and what else is out of the ordinary."""
    parts = ["attached" if session.attached else "detached"]
    if session.parked:
        parts.append("parked")
    if session.layout is Layout.BATCHED:
        parts.append("batched")
    if session.overflow is Overflow.EVICT:
        parts.append("evicts")
    if session.durable:
        parts.append(f"durable (saved {ago(session.saved_unix_ms)})")
    return ", ".join(parts)
