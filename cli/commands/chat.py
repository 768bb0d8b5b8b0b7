"""``modeld chat``: a conversation at the terminal."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import click

from modeld.cli import conversations, texts
from modeld.cli.answering import (
    decode_flags,
    kept_conversation,
    leave,
    open_session,
    session_flags,
    stream_answer,
    tell_numbers,
    tell_unsaved,
    tell_window_full,
)
from modeld.cli.conversations import Conversation
from modeld.cli.daemon_start import connect_or_start
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import note, report_error
from modeld.client import Chat, ClientError, DecodeOptions, Image, Session, TurnStream
from modeld.shared.errors import ModeldError

HELP = """Talk with MODEL at the terminal.

The conversation stays in the model's memory: each message reads only what is new. Ctrl-C stops an
answer, not the program; Ctrl-D ends it.

With --session KEY it is kept, and goes on the next time, here or with `modeld run --session KEY`
(whose help says more, also on --overflow and --durable). /new then begins it anew: what was said
before is forgotten with the first answer after it.

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
    session_key: str,
    overflow: str | None,
    durable: bool | None,
    no_start: bool,
    no_wait: bool,
    window: int | None,
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
    kept = kept_conversation(
        settings,
        session_key,
        "chat",
        model,
        window=window,
        overflow=overflow,
        durable=durable,
        k_type=k_type,
        v_type=v_type,
    )
    kept.system = [system] if system else kept.system
    client, _started = connect_or_start(settings, may_start=not no_start)
    with client:
        session = open_session(
            client,
            settings,
            model,
            prompt_format="chat",
            session_key=session_key,
            no_wait=no_wait,
            **kept.opening(),
        )
        try:
            _Talk(settings, session, kept, session_key, options, no_wait).run()
        finally:
            leave(session, keep=bool(session_key))


class _Talk:
    """The conversation at the terminal; kept, where it has a key, after each answer."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        kept: Conversation,
        session_key: str,
        options: DecodeOptions,
        no_wait: bool,
    ) -> None:
        self._settings = settings
        self._session = session
        self._kept = kept
        self._key = session_key
        self._options = options
        self._no_wait = no_wait
        self._last: TurnStream | None = None
        self._images: list[Image] = []
        kept.follow(session)
        self._chat = self._begun()

    def _begun(self) -> Chat:
        return self._session.chat(history=self._kept.items())

    def run(self) -> None:
        """Lines and commands, until the input ends."""
        effective = self._session.resolution.context.effective.tokens
        note(f"{self._kept.model}, a window of {effective:,} tokens. {COMMANDS}")
        if self._kept.exchanges:
            said = len(self._kept.exchanges)
            note(f"{self._key!r} goes on after {said} exchange{'' if said == 1 else 's'}")
        while (line := _ask()) is not None:
            command = line.strip()
            if command in ("/quit", "/exit"):
                return
            if command.startswith("/"):
                self._command(command)
            elif command:
                self._answer(line)

    def _command(self, command: str) -> None:
        if command == "/new":
            self._kept.exchanges = []
            self._chat, self._last, self._images = self._begun(), None, []
            note("a new conversation")
        elif command == "/stats":
            if self._last is None:
                note("no answer yet")
            else:
                tell_numbers(self._last, seed=bool(self._options.temperature))
        elif command == "/help":
            note(COMMANDS)
        elif command.split(maxsplit=1)[:1] == ["/image"]:
            self._images += _image(command.removeprefix("/image").strip())
        else:
            note(f"{command.split()[0]} is unknown. {COMMANDS}")

    def _answer(self, line: str) -> None:
        images, self._images = self._images, []
        stream = _answer(self._chat, line, images, self._options, self._no_wait)
        if stream is None:
            return
        self._last = stream
        self._kept.follow(self._session)
        if self._kept.add(line, images, stream) and self._key:
            conversations.save(self._settings.root, self._key, self._kept)


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
        tell_unsaved(stream.final.saved if stream.final else None)
        tell_window_full(stream, "Start over with /new, or chat with a larger --window.")
        return stream
    except KeyboardInterrupt as stopped:
        note("(stopped)")
        return stopped.args[0] if stopped.args else None
    except (ModeldError, ClientError) as error:
        report_error(error, as_json=False)
        return None
