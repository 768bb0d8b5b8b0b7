"""``modeld serve``: the daemon in the foreground. Options are the table of settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from modeld.cli.main import Settings, global_options, pass_settings
from modeld.supervisor.settings import SETTINGS, Setting


def _option(setting: Setting) -> Callable[[Any], Any]:
    default = setting.default
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    words = f"{setting.help}." + (f" Default: {shown}." if shown else "")
    metavar = {
        "seconds": "SECONDS",
        "size": "SIZE",
        "int": "N",
        "bool": "BOOL",
        "path": "FILE",
        "name": "NAME",
        "names": "NAME,NAME",
        "shares": "N,N",
    }
    return click.option(
        setting.flag,
        setting.name,
        default=None,
        metavar=metavar.get(setting.kind, "|".join(setting.choices) or "HOST:PORT"),
        help=words[0].upper() + words[1:],
    )


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(SETTINGS):
        function = _option(setting)(function)
    return function


@click.command(short_help="Run the daemon in the foreground.")
@_options
@global_options
@pass_settings
def serve(settings: Settings, /, **flags: str | None) -> None:
    """Serve the models of a data root, until Ctrl-C, SIGTERM or `modeld drain`.

    One daemon owns a data root at a time. It listens on a unix socket there (mode 0600) unless
    --listen says otherwise. Settings come from these options, then from variables MODELD_NAME,
    then from modeld.toml in the data root, then from the defaults. Sizes are bytes or like 512MiB.
    """
    from modeld.supervisor.config import load_config
    from modeld.supervisor.daemon import run_daemon

    config = load_config(flags, os.environ, settings.root)
    raise SystemExit(run_daemon(config))
