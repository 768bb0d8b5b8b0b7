"""``modeld chat``: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from modeld.cli import texts
from modeld.cli.answering import (
    decode_flags,
    open_session,
    session_flags,
    stream_answer,
    tell_numbers,
    tell_window_full,
)
from modeld.cli.daemon_start import connect_or_start
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import note, report_error
from modeld.client import Chat, ClientError, DecodeOptions, Image, Session, TurnStream
from modeld.shared.errors import ModeldError

HELP = """Talk with MODEL at the terminal.

The conversation stays in the model's memory: each message reads only what is new. Ctrl-C stops an
answer, not the program; Ctrl-D ends it.

\b
Commands:
  /stats       the numbers of the last answer
  /image FILE  show an image with the next message
  /new         start over
  /help        this list
  /quit        end
"""
COMMANDS = (
    "/stats: numbers of the last answer · /image FILE: show an image with the next message · "
    "/new: start over · /quit or Ctrl-D: end"
)


@click.command(help=HELP, short_help="Talk with a model at the terminal.")
@click.argument("model")
@click.option("--system", default="", help="What the model is told first.")
@decode_flags
@session_flags
@global_options
@pass_settings
def chat(
    settings: Settings,
    /,
    model: str,
    system: str,
    no_start: bool,
    no_wait: bool,
    window: int,
    k_type: str,
    v_type: str,
    stop: tuple[str, ...],
    **sampling: Any,
) -> None:
    if settings.json:
        raise click.UsageError("chat speaks to people; for --json use `modeld run --session KEY`")
    system = texts.argument(system, "--system")
    options = DecodeOptions(stop=stop, **sampling)
    options.to_proto()  # refused, if it must be, before anything is started
    client, _started = connect_or_start(settings, may_start=not no_start)
    with (
        client,
        open_session(
            client,
            settings,
            model,
            prompt_format="chat",
            window=window,
            k_type=k_type,
            v_type=v_type,
            no_wait=no_wait,
        ) as session,
    ):
        effective = session.resolution.context.effective.tokens
        note(f"{model}, a window of {effective:,} tokens. {COMMANDS}")
        _loop(session, system, options, no_wait)


def _loop(session: Session, system: str, options: DecodeOptions, no_wait: bool) -> None:
    conversation, last = session.chat(system), None
    images: list[Image] = []
    while (line := _ask()) is not None:
        command = line.strip()
        if command in ("/quit", "/exit"):
            return
        if command == "/new":
            conversation, last, images = session.chat(system), None, []
            note("a new conversation")
        elif command == "/stats":
            if last is None:
                note("no answer yet")
            else:
                tell_numbers(last, seed=bool(options.temperature))
        elif command == "/help":
            note(COMMANDS)
        elif command.split(maxsplit=1)[:1] == ["/image"]:
            images += _image(command.removeprefix("/image").strip())
        elif command.startswith("/"):
            note(f"{command.split()[0]} is unknown. {COMMANDS}")
        elif command:
            last = _answer(conversation, line, images, options, no_wait) or last
            images = []


def _image(path: str) -> list[Image]:
    """The image to be shown; what is wrong with it is told, and the conversation goes on."""
    if not path:
        note("/image needs a file: /image photo.jpg")
        return []
    try:
        image = Image.from_file(texts.path(Path(path), "/image"))
    except (ModeldError, click.UsageError) as error:
        note(str(error), "yellow")
        return []
    note(f"{path} goes with the next message")
    return [image]


def _ask() -> str | None:
    """A line, or None at the end of the input. Ctrl-C clears the line."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history
    while True:
        try:
            if interactive:
                return input("› ")
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        except UnicodeDecodeError as error:
            raise texts.not_utf8("stdin", error) from None
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            note("\n(Ctrl-D or /quit ends)")


def _answer(
    conversation: Chat, text: str, images: list[Image], options: DecodeOptions, no_wait: bool
) -> TurnStream | None:
    """One answer. A typed error is told, and the conversation goes on without that message."""
    try:
        stream = stream_answer(
            lambda on_event: conversation.send(
                text, images=images, options=options, no_wait=no_wait, on_event=on_event
            ),
            show=True,
            quiet=False,
        )
        tell_window_full(stream, "Start over with /new, or chat with a larger --window.")
        return stream
    except KeyboardInterrupt as stopped:
        note("(stopped)")
        return stopped.args[0] if stopped.args else None
    except (ModeldError, ClientError) as error:
        report_error(error, as_json=False)
        return None
