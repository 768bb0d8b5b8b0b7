"""What `run` and `chat` share: opening a session, streaming an answer, telling its numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from modeld.cli import conversations, texts
from modeld.cli.conversations import Conversation
from modeld.cli.main import Settings
from modeld.cli.output import ago, count, note, seconds
from modeld.cli.progress import Meanwhile
from modeld.client import (
    Client,
    ClientError,
    Final,
    GenerationStale,
    ManifestMismatch,
    ModeldError,
    PrefillStatus,
    Recovery,
    Resumed,
    Saved,
    Session,
    SessionClosed,
    SessionNotFound,
    StopReason,
    TurnStream,
)
from modeld.client.streams import EventCallback

F = TypeVar("F", bound=Callable[..., Any])

# How a session was opened, as against what it is of.
REPLACEABLE = frozenset(
    {
        "window",
        "k_type",
        "v_type",
        "profile_id",
        "prompt_format",
        "adapters",
        "overflow",
        "layout",
        "durable",
    }
)


def decode_flags(function: F) -> F:
    """The options of how to generate."""
    flags = [
        click.option("--max-tokens", type=click.IntRange(min=0), default=0, metavar="N",
                     help="Stop after N tokens. 0: when the model ends, or the window is full."),
        click.option("--temperature", type=click.FloatRange(min=0), default=None, metavar="T",
                     help="0: always the likeliest token (the default); higher: more varied."),
        click.option("--top-p", type=click.FloatRange(0, 1), default=None, metavar="P",
                     help="Sample among the likeliest tokens of this total probability."),
        click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=None, metavar="N",
                     help="Make sampling repeatable. Default: drawn, and told afterwards."),
        click.option("--stop", multiple=True, metavar="TEXT",
                     help="Stop before this text; may be given several times."),
    ]  # fmt: skip
    for flag in reversed(flags):
        function = flag(function)
    return function


def structured_flags(function: F) -> F:
    """The options of what form an answer must have: one of them at most."""
    file = click.Path(path_type=Path, exists=True, dir_okay=False)
    flags = [
        click.option("--json-schema", type=file, metavar="FILE",
                     help="Answer with JSON that this schema allows, and nothing else."),
        click.option("--regex", metavar="REGEX",
                     help="Answer with a text that all of this regular expression matches."),
        click.option("--grammar", type=file, metavar="FILE",
                     help="Answer with a text of this Lark grammar (its rule 'start')."),
    ]  # fmt: skip
    for flag in reversed(flags):
        function = flag(function)
    return function


def structured(json_schema: Path | None, regex: str | None, grammar: Path | None) -> dict[str, Any]:
    """What ``structured_flags`` gave as decode options; a usage error for more than one."""
    given = {"--json-schema": json_schema, "--regex": regex, "--grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise click.UsageError(f"{' and '.join(names)} can't be used together")
    return {
        "json_schema": None if json_schema is None else texts.file(json_schema),
        "regex": None if regex is None else texts.argument(regex, "--regex"),
        "grammar": None if grammar is None else texts.file(grammar),
    }


def session_flags(function: F) -> F:
    """The options of what kind of session to open."""
    flags = [
        click.option("--window", type=click.IntRange(min=0), default=None, metavar="N",
                     help="Context window in tokens. 0 (the default): chosen by what memory "
                     "allows."),
        click.option("--k-type", default="", metavar="TYPE",
                     help="KV cache type of the keys, e.g. q8_0. Default: the daemon's."),
        click.option("--v-type", default="", metavar="TYPE", help="The same of the values."),
        click.option("--overflow", type=click.Choice(["refuse", "evict"]), default=None,
                     help="What to do once the window (of at least 1,024 tokens) is full: refuse "
                     "(the default), or evict: go on, with the middle out of attention."),
        click.option("--session", "session_key", default="", metavar="KEY",
                     help="Go on with the conversation of this name, or begin it."),
        click.option("--durable/--no-durable", default=None,
                     help="Save the session's memory after each answer, so that it comes back "
                     "after a restart; with --session."),
        click.option("--no-start", is_flag=True,
                     help="Fail (exit status 3) rather than start a daemon where none runs."),
        click.option("--no-wait", is_flag=True,
                     help="Fail (exit status 5) rather than wait while the model is busy."),
    ]  # fmt: skip
    for flag in reversed(flags):
        function = flag(function)
    return function


def kept_conversation(
    settings: Settings,
    key: str,
    prompt_format: str,
    model: str,
    *,
    window: int | None,
    overflow: str | None,
    durable: bool | None,
    k_type: str,
    v_type: str,
) -> Conversation:
    """The conversation of ``--session KEY``, or one that isn't kept ("").

    What isn't said stays as the conversation had it. The cache types are said together.
    """
    if durable and not key:
        raise click.UsageError("--durable needs a --session KEY to come back by")
    conversation = (
        conversations.load(settings.root, key, prompt_format, model)
        if key
        else Conversation(prompt_format, model)
    )
    conversation.window = conversation.window if window is None else window
    conversation.overflow = overflow or conversation.overflow
    conversation.durable = conversation.durable if durable is None else durable
    if k_type or v_type:
        conversation.k_type, conversation.v_type = k_type, v_type
    return conversation


def leave(session: Session, *, keep: bool) -> None:
    """Best effort: the answer has been given, or a better error is on its way."""
    with contextlib.suppress(ModeldError, ClientError):
        if keep:
            session.detach()
        else:
            session.close()


def tell_recovery(recovery: Recovery) -> None:
    lost = f"the session was lost ({recovery.cause})"
    if recovery.retried:
        note(f"{lost} and is continued in a new one; the question is sent again", "yellow")
        return
    note(
        f"{lost} while it answered: the answer ends here. What was shown stands, but is not kept; "
        "the conversation goes on from before this question.",
        "yellow",
    )


def open_session(
    client: Client, settings: Settings, model: str, *, prompt_format: str, **options: Any
) -> Session:
    """A session. The key's own, if it is left open with another window or cache, is replaced:
    the caller has its text.
    """

    def opened() -> Session:
        with Meanwhile(quiet=settings.json) as meanwhile:
            return client.open_session(
                model,
                prompt_format=prompt_format,
                on_progress=meanwhile.event,
                recover=True,
                on_recovery=tell_recovery,
                **options,
            )

    try:
        session = opened()
    except ManifestMismatch as error:
        if not _gave_way(client, options.get("session_key", ""), error):
            raise
        session = opened()
    _tell_resumed(session.opened.resumed)
    effective = session.resolution.context.effective
    if effective.tokens < (asked := options.get("window", 0)):
        why = effective.reason.value.lower()
        note(f"the window is {count(effective.tokens)} tokens, not {count(asked)}: {why}", "yellow")
    return session


def _tell_resumed(resumed: Resumed | None) -> None:
    if resumed is None:
        return
    if resumed.miss_reason:
        note(f"what was saved of the session didn't come back ({resumed.miss_reason})", "yellow")
        return
    age = ago(resumed.saved_unix_ms)
    note(f"the session is back with {count(resumed.tokens)} tokens, as saved {age}")


def _gave_way(client: Client, key: str, error: ManifestMismatch) -> bool:
    """Close the detached session of that key where only how it was opened is in the way."""
    field = error.metadata.get("field", "")
    if not key or error.metadata.get("reason") != "identity" or field not in REPLACEABLE:
        return False
    found = [s for s in client.sessions() if s.session_key == key]
    if not found or any(s.attached for s in found):
        error.add_note(
            f"Somebody is attached to it. Wait until that has ended, or end it with "
            f"`modeld sessions close {key}`."
        )
        return False
    for each in found:
        with contextlib.suppress(SessionNotFound, SessionClosed, GenerationStale):
            client.close_session(each.session)
    actual, asked = error.metadata.get("actual", ""), error.metadata.get("asserted", "")
    if field == "window" and actual == "0":
        actual = "as memory allowed"
    note(
        f"the session of {key!r} had {field} {actual or 'unset'}; it is opened anew with "
        f"{asked or 'the default'} and goes on from the kept text",
        "yellow",
    )
    return True


def stream_answer(
    start: Callable[[EventCallback], TurnStream], *, show: bool, quiet: bool
) -> TurnStream:
    """Take a turn to its end, writing the text to stdout as it comes if ``show``.

    Ctrl-C cancels the turn and is raised on, with the turn as the exception's argument.
    """
    with Meanwhile(quiet=True) as meanwhile:  # without a terminal there is nothing to tell
        if not quiet:
            meanwhile.show("reading the prompt")
        stream = start(meanwhile.event)
        try:
            for text in stream:
                if show:
                    sys.stdout.write(text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(stream) from None
        finally:
            stream.close()
            if show and stream.text and not stream.text.endswith("\n"):
                sys.stdout.write("\n")
                sys.stdout.flush()
    return stream


def tell_window_full(stream: TurnStream, how: str) -> None:
    """Say that an answer ended for lack of room, and ``how`` to go on."""
    final = stream.final
    if final is not None and final.stop_reason is StopReason.CONTEXT_FULL:
        note(
            f"the window is full ({count(final.resident)} tokens): the answer was cut. {how}",
            "yellow",
        )


def tell_unsaved(saved: Saved | None) -> None:
    """Say that, and why, a durable session wasn't saved."""
    if saved is not None and not saved.ok:
        before = "; what was saved before stays" if saved.saved_unix_ms else ""
        note(
            f"the session wasn't saved: {saved.reason}. {saved.detail} Its next answer saves it"
            f"{before}.",
            "yellow",
        )


def tell_numbers(stream: TurnStream, *, seed: bool) -> None:
    """The numbers of a turn, on one line of stderr. ``seed``: it was drawn from, so tell it."""
    parts = []
    if stream.prefix_status is not None and stream.prefix_status.prefix:
        parts.append(_prefilled("prefix", stream.prefix_status.prefix, stream.prefix_status))
    if stream.suffix_status is not None:
        parts.append(_prefilled("suffix", stream.suffix_status.suffix, stream.suffix_status))
    if stream.seconds_to_first_token is not None:
        parts.append(f"first token {seconds(stream.seconds_to_first_token)}")
    if stream.final is not None:
        parts.append(_generated(stream.final))
        parts += _outside(stream, stream.final)
        if seed:
            parts.append(f"seed {stream.final.seed}")
    elif stream.cancelled:
        parts.append("cancelled")
    note(" · ".join(parts))


def _prefilled(name: str, tokens: int, status: PrefillStatus) -> str:
    reused, prefilled = count(status.reused), count(status.prefilled)
    if status.restored:
        reused += f" ({count(status.restored)} restored)"
    return f"{name} {count(tokens)}: {reused} reused, {prefilled} prefilled"


def _outside(stream: TurnStream, final: Final) -> list[str]:
    """What isn't attended and what that cost, where there is any; whether the turn was saved."""
    statuses = [s for s in (stream.prefix_status, stream.suffix_status) if s is not None]
    recomputed = final.recomputed + sum(status.recomputed for status in statuses)
    numbers = (("parked", final.parked), ("gone", final.gone), ("recomputed", recomputed))
    parts = [f"{count(tokens)} {name}" for name, tokens in numbers if tokens]
    saved = final.saved
    if saved is not None:
        parts.append("saved" if saved.ok else f"not saved: {saved.reason}")
    return parts


def _generated(final: Final) -> str:
    text = f"{count(final.tokens)} token{'s' if final.tokens != 1 else ''}"
    further = final.tokens - 1  # what gives the first one is the prompt's evaluation
    if further > 0 and final.engine_seconds > 0:
        text += f", {further / final.engine_seconds:.1f}/s"
    if final.stop_reason is not StopReason.EOS:
        text += f", stopped: {final.stop_reason.value.lower()}"
    return f"{text} · {count(final.available)} tokens left"
