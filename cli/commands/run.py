"""``modeld run``: one prompt, one answer; with a key, one turn of a kept conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from modeld.cli import conversations, texts
from modeld.cli.adapters import parsed, session_options
from modeld.cli.answering import (
    decode_flags,
    kept_conversation,
    leave,
    open_session,
    session_flags,
    stream_answer,
    structured,
    structured_flags,
    tell_numbers,
    tell_unsaved,
    tell_window_full,
)
from modeld.cli.conversations import Conversation
from modeld.cli.daemon_start import connect_or_start
from modeld.cli.exit_codes import exit_code_of
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import count, emit_json, error_object, note
from modeld.client import (
    Client,
    ClientError,
    ContextOverflow,
    DecodeOptions,
    Image,
    Message,
    ModeldError,
    Session,
    SnapshotInfo,
    Text,
    TurnStream,
    to_plain,
)
from modeld.client.chat import parted

HELP = """Ask MODEL one PROMPT and print the answer as it is generated.

PROMPT is the text itself, or '-' for stdin. The answer goes to stdout, everything else to stderr,
so it can be piped. A daemon is started where none runs, and stays.

A prompt has a stable part, kept in the model's memory between runs and read again only where it
differs (--system, --prefix-file, and what was said before), and the new part, PROMPT. The line of
numbers at the end says how many tokens of each were reused and how many were read (prefilled).

With --session KEY the conversation goes on from run to run: its text is kept in
conversations/KEY.json of the data root, readable by you alone, and sent along each time. While the
daemon holds the session, nothing of it is read again; after that it is read anew from the text.
--system, --prefix-file, --window, --overflow, --durable, --k-type and --v-type need to be given
only the first time. A key belongs to one model; another window or cache type opens its session
anew. To forget it, remove the file, and end its session with `modeld sessions close KEY --discard`.

With --overflow evict the conversation goes on beyond the window: what is neither at its head nor
recent goes out of the model's attention, and the line of numbers says how many tokens are parked
(kept aside) and gone. With --durable its memory is saved after each answer, and comes back after a
restart of the daemon without being read again.

\b
Examples:
  modeld run smollm2-135m-instruct "Name three colours."
  git diff | modeld run MODEL - --system "Review this change."
  modeld run MODEL "My name is Ada." --session me
  modeld run MODEL "What is my name?" --session me
  modeld run MODEL --raw "Once upon a time" --max-tokens 50
  modeld run MODEL "Is water wet?" --regex "yes|no"
  modeld run MODEL --image photo.jpg "What is on it?"
"""


@click.command(help=HELP, short_help="Ask a model one prompt; print the answer.")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option(
    "--file",
    "file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read the prompt from a file.",
)
@click.option(
    "--image",
    "images",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    metavar="FILE",
    help="Show the model a PNG, JPEG or WebP image before the prompt; may be given several times.",
)
@click.option("--system", default="", help="What the model is told first (stable).")
@click.option(
    "--prefix-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="More stable text: part of the system message, or with --raw what stands "
    "before the prompt.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME[=SCALE]",
    help="Apply a LoRA adapter of the store (scale 1 by default); may be given several times.",
)
@click.option("--raw", is_flag=True, help="Continue the text as it stands, without chat roles.")
@decode_flags
@structured_flags
@session_flags
@click.option(
    "--snapshot",
    "label",
    default=None,
    metavar="LABEL",
    help="Keep the session's memory under this label afterwards; see `modeld snapshots`.",
)
@click.option("--stats/--no-stats", default=True, help="The line of numbers at the end.")
@global_options
@pass_settings  # fmt: skip
def run(
    settings: Settings,
    /,
    model: str,
    prompt: str | None,
    file: Path | None,
    images: tuple[Path, ...],
    system: str,
    prefix_file: Path | None,
    session_key: str,
    overflow: str | None,
    durable: bool | None,
    adapters: tuple[str, ...],
    raw: bool,
    label: str | None,
    stats: bool,
    no_start: bool,
    no_wait: bool,
    window: int | None,
    k_type: str,
    v_type: str,
    stop: tuple[str, ...],
    json_schema: Path | None,
    regex: str | None,
    grammar: Path | None,
    **sampling: Any,
) -> None:
    if raw and system:
        raise click.UsageError("--system needs chat roles; with --raw use --prefix-file")
    if raw and images:
        raise click.UsageError("--image needs chat roles; it can't be used with --raw")
    wanted = [parsed(value) for value in adapters]
    text = _prompt(prompt, file)
    shown = [Image.from_file(path) for path in images]
    system = texts.argument(system, "--system")
    stable = [part for part in (system, texts.file(prefix_file)) if part]
    prompt_format = "raw" if raw else "chat"
    conversation = kept_conversation(
        settings,
        session_key,
        prompt_format,
        model,
        window=window,
        overflow=overflow,
        durable=durable,
        k_type=k_type,
        v_type=v_type,
    )
    conversation.system = stable or conversation.system
    label = None if label is None else texts.argument(label, "--snapshot")
    constraint = structured(json_schema, regex, grammar)
    options = DecodeOptions(stop=stop, **constraint, **sampling)
    options.to_proto()  # refused, if it must be, before anything is started
    client, started = connect_or_start(settings, may_start=not no_start)
    with client:
        session = open_session(
            client,
            settings,
            model,
            prompt_format=prompt_format,
            session_key=session_key,
            no_wait=no_wait,
            **conversation.opening(),
            **session_options(client, model, wanted),
        )
        snapshot: SnapshotInfo | None = None
        late: ModeldError | ClientError | None = None  # what failed once the answer was there
        try:
            stream, interrupt = _turn(
                settings, session, conversation, text, shown, options, no_wait
            )
            try:
                conversation.follow(session)
                if session_key and conversation.add(text, shown, stream):
                    conversations.save(settings.root, session_key, conversation)
                if interrupt is not None:
                    raise interrupt
                if label is not None:
                    snapshot = session.snapshot(label)
            except (ModeldError, ClientError) as error:
                late = error
        except ContextOverflow as error:
            error.add_note("Run it again with a larger --window.")
            raise
        finally:
            leave(session, keep=bool(session_key))
        if settings.json:
            told = _object(client, session, model, session_key, stream, started)
            told["snapshot"] = snapshot
            if late is not None:
                told["error"] = error_object(late)
            emit_json(told)
            if late is not None:
                click.get_current_context().exit(exit_code_of(late))
            return
        if snapshot is not None:
            note(f"snapshot {snapshot.snapshot_id}, {count(snapshot.tokens)} tokens")
        if stats:
            tell_numbers(stream, seed=bool(options.temperature))
        tell_unsaved(stream.final.saved if stream.final else None)
        effective = session.resolution.context.effective.tokens
        larger = f"a --window larger than {effective}"
        tell_window_full(
            stream,
            f"Go on with {larger}, or begin another --session."
            if session_key
            else f"Ask again with {larger}, or with a shorter prompt.",
        )
        if late is not None:
            raise late


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise click.UsageError("give a PROMPT, '-' for stdin, or --file")
    if file is not None:
        text = texts.file(file)
    else:
        text = texts.stdin() if prompt == "-" else texts.argument(prompt or "", "PROMPT")
    if not text:
        raise click.UsageError("the prompt is empty")
    return text


def _turn(
    settings: Settings,
    session: Session,
    conversation: Conversation,
    text: str,
    images: list[Image],
    options: DecodeOptions,
    no_wait: bool,
) -> tuple[TurnStream, KeyboardInterrupt | None]:
    """The turn, however it ends but with an error, and what interrupted it."""
    items = conversation.items()
    raw = conversation.prompt_format == "raw"
    items.append(Text(text) if raw else Message.user(text, images))
    prefix, suffix = parted(items)
    interrupt: KeyboardInterrupt | None = None
    try:
        stream = stream_answer(
            lambda on_event: session.turn(
                prefix, suffix, options, no_wait=no_wait, on_event=on_event
            ),
            show=not settings.json,
            quiet=settings.json,
        )
    except KeyboardInterrupt as stopped:
        if not stopped.args:
            raise
        interrupt, stream = stopped, stopped.args[0]
    return stream, interrupt


def _object(
    client: Client,
    session: Session,
    model: str,
    session_key: str,
    stream: TurnStream,
    started: bool,
) -> dict[str, Any]:
    """What `--json` prints, under the contract's own field names."""
    return {
        "answer": stream.text,
        "session": {
            **to_plain(session.opened),
            "model": model,
            "session_key": session_key,
            "owner_instance_id": client.owner_instance_id,
        },
        "prefix": stream.prefix_status,
        "suffix": stream.suffix_status,
        "final": stream.final,
        "daemon_started": started,
        "recoveries": session.recoveries,
        "seconds_to_first_token": stream.seconds_to_first_token,
    }
