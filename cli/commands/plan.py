"""``modeld plan``: whether a model fits here or on another machine, how, and what else would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from modeld.cli import plan_view, planning
from modeld.cli.exit_codes import Exit
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import count, emit_json, note, say, size, table
from modeld.cli.planning import LocalPlanner, Planner, Wanted
from modeld.cli.progress import Meanwhile
from modeld.client import ContextReason, Description, InvalidRequest, to_plain
from modeld.shared.capacity import Companions

# Pairs for the keys and the values: llama.cpp's values stay f16, since their quantisation needs
# flash attention, which is off.
KV_TYPES = {
    "llama": (("f16", "f16"), ("q8_0", "f16"), ("q4_0", "f16")),
    "openvino": (("f16", "f16"), ("u8", "u8"), ("u4", "u4")),
}
SESSIONS = (1, 2, 4, 8)
# What may be asked, of a daemon as of the planner here.
MAX_WINDOW = 2**31 - 1  # tokens
MAX_SESSIONS = 1024
FILE = click.Path(path_type=Path)


def _check_what_if(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    """Before the MODEL is missed: an option without a value takes what stands behind it."""
    for item in given:
        if item and "=" not in item:
            raise click.BadParameter(
                f"{item!r} is no SETTING=VALUE. For the table of alternatives put --what-if at "
                "the end.",
                context,
                option,
            )
    return given


def _check_named(context: click.Context, argument: click.Parameter, given: str) -> str:
    if not given.strip():
        raise click.BadParameter(
            "it is empty. Name a model of the store, a GGUF file, or an OpenVINO IR folder.",
            context,
            argument,
        )
    return given


@click.command(short_help="Plan a model: what fits, where the bytes go.")
@click.argument("model", callback=_check_named)
@click.option("--device", type=FILE, metavar="FILE", help="Plan for the machine in this file.")
@click.option(
    "--ctx",
    type=click.IntRange(0, MAX_WINDOW),
    default=0,
    metavar="N",
    help="A window of N tokens. 0: automatic.",
)
@click.option("--kv", default="", metavar="K|K/V", help="KV cache types: q8_0, or q8_0/f16.")
@click.option(
    "--sessions",
    type=click.IntRange(0, MAX_SESSIONS),
    default=0,
    metavar="N",
    help="N sessions of that window must fit.",
)
@click.option(
    "--layout",
    type=click.Choice(["isolated", "batched"]),
    metavar="LAYOUT",
    help="batched: sessions that share a context. Default: isolated.",
)
@click.option(
    "--what-if",
    "what_if",
    multiple=True,
    is_flag=False,
    flag_value="",
    callback=_check_what_if,
    metavar="[SETTING=VALUE]",
    help="As if the daemon's setting were that (repeatable). Alone: a table of alternatives.",
)
@click.option("--projector", type=FILE, metavar="FILE", help="A projector to load beside it.")
@click.option(
    "--adapter",
    type=FILE,
    multiple=True,
    metavar="FILE",
    help="An adapter to load with it (repeatable).",
)
@click.option("--draft", default="", metavar="MODEL", help="A draft model to load beside it.")
@global_options
@pass_settings
def plan(
    settings: Settings,
    model: str,
    device: Path | None,
    ctx: int,
    kv: str,
    sessions: int,
    layout: str | None,
    what_if: tuple[str, ...],
    projector: Path | None,
    adapter: tuple[Path, ...],
    draft: str,
) -> None:
    """Plan MODEL: whether it fits, the window that a session would get, and where the bytes go.

    MODEL is a name in the store, the path of a GGUF file, or of an OpenVINO IR folder. A name in
    the store goes before a file here of that name: write ./NAME for the file. A running daemon is
    asked about its models, so that the answer is the one that an open would get now; otherwise it
    is planned here. Nothing is loaded. Exit status 6 if it doesn't fit.

    \b
    modeld plan my-model --ctx 32768 --kv q8_0 --sessions 4
    modeld plan ./model.gguf --device other-machine.json   (`modeld doctor --record` writes one)
    modeld plan my-model --what-if placement=shed
    modeld plan my-model --what-if
    """
    changes = _changes(what_if)
    wanted = _wanted(ctx, kv, sessions, layout or "isolated", changes)
    with Meanwhile(quiet=settings.json) as meanwhile:
        meanwhile.show("planning")
        with planning.planner(settings, model, device) as planner:
            wanted, notes = _with_companions(
                settings, planner, model, wanted, device, projector, adapter, draft
            )
            described = planner.describe(model, wanted)
            rows = (
                _alternatives(planner, model, described.model_type, wanted)
                if "" in what_if
                else None
            )
            by = planner.by
    if settings.json:
        emit_json(described if rows is None else {**to_plain(described), "alternatives": rows[0]})
    else:
        _head(described, by, notes)
        if rows is None:
            _show(described, model, sessions, settings.data_root)
        else:
            _show_alternatives(*rows)
    if described.resolution.refusal.message:
        click.get_current_context().exit(Exit.NO_ROOM)


# --- what is asked -----------------------------------------------------------------------------


def _changes(what_if: tuple[str, ...]) -> dict[str, str]:
    """The settings to plan with. Raises a usage error, or ConfigError for one that can't be."""
    from modeld.supervisor.config import PLANNED, ConfigError
    from modeld.supervisor.settings import BY_NAME, parse_value

    changes: dict[str, str] = {}
    for item in what_if:
        name, _, value = item.partition("=")
        if not item:
            continue
        name = name.strip().replace("-", "_")
        if name not in PLANNED:
            raise ConfigError(
                f"--what-if: {name[:80]!r} is no setting that a plan depends on. Those are: "
                f"{', '.join(PLANNED)}.",
                metadata={"field": name[:80]},
            )
        parse_value(BY_NAME[name], value, "--what-if")
        changes[name] = value
    return changes


def _wanted(ctx: int, kv: str, sessions: int, layout: str, changes: Mapping[str, str]) -> Wanted:
    k_type, slash, v_type = kv.strip().lower().partition("/")
    if slash and not (k_type and v_type):
        raise InvalidRequest.of("kv", kv, "a type for the keys, or two as K/V: q8_0, q8_0/f16")
    return Wanted(
        window=ctx,
        k_type=k_type,
        v_type=v_type,
        sessions=sessions,
        layout=layout,
        what_if=changes,
    )


def _asked() -> list[tuple[str, str]]:
    """The options that were given, which a remedy's command repeats."""
    context = click.get_current_context()
    given = []
    for option in context.command.params:
        value = context.params.get(option.name or "")
        values = value if isinstance(value, tuple) else (value,)
        if isinstance(option, click.Option) and value:
            given += [(option.opts[0], str(one)) for one in values]
    return given


def _with_companions(
    settings: Settings,
    planner: Planner,
    model: str,
    wanted: Wanted,
    device: Path | None,
    projector: Path | None,
    adapters: tuple[Path, ...],
    draft: str,
) -> tuple[Wanted, list[str]]:
    """The question with what is loaded beside the model, and the estimates in words."""
    companions, notes = Companions(), []
    if projector is not None:
        companions, said = planning.projector(projector)
        notes.append(said)
    if adapters:
        adapter_bytes, said = planning.adapters(adapters)
        companions = replace(companions, adapter_bytes=adapter_bytes)
        notes.append(said)
    wanted = replace(wanted, companions=companions)
    if draft:
        # Its window is the model's: what that gets with nothing drafted for it, which is no less.
        alone = planning.window_of(planner.describe(model, wanted))
        local = LocalPlanner.beside(planner, settings.root, device)
        draft_bytes, said = planning.draft(local, draft, alone, wanted.what_if)
        companions = replace(companions, draft_bytes=draft_bytes)
        wanted = replace(wanted, companions=companions)
        notes.append(said)
    return wanted, notes


# --- what is answered --------------------------------------------------------------------------


def _head(described: Description, by: str, notes: list[str]) -> None:
    line = plan_view.facts_line(described.model, described.model_type, described.facts)
    say(line, "bold")
    own = described.resolution_source == "open_session"
    say(f"{by}: an open session's own numbers" if own else by)
    plan_view.machine(described.machine)
    for said in notes:
        say(said)


def _show(described: Description, model: str, sessions: int, data_root: Path | None) -> None:
    resolution = described.resolution
    plan_view.numbers(resolution.context)
    plan_view.picture(resolution, sessions)
    plan_view.budget(resolution)
    plan_view.findings(resolution)
    plan_view.answers("questions", described.questions)
    plan_view.refusal(resolution.refusal, model, _asked(), data_root)


# --- alternatives ------------------------------------------------------------------------------


def _alternatives(
    planner: Planner, model: str, model_type: str, wanted: Wanted
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each type of the keys and number of sessions, and the types that can't be."""
    rows: list[dict[str, Any]] = []
    left_out = []
    for k_type, v_type in KV_TYPES.get(model_type, ()):
        for sessions in SESSIONS:
            asked = replace(wanted, k_type=k_type, v_type=v_type, sessions=sessions)
            try:
                described = planner.describe(model, asked)
            except InvalidRequest as error:
                left_out.append(f"{k_type}: {error.message}")
                break
            rows.append(_alternative(described, k_type, sessions))
    return rows, left_out


def _alternative(described: Description, k_type: str, sessions: int) -> dict[str, Any]:
    resolution = described.resolution
    refused = bool(resolution.refusal.message)
    window = resolution.context.effective
    bound = resolution.refusal.bound if refused else window.reason
    return {
        "k_type": k_type,
        "v_type": resolution.v_type,
        "sessions": sessions,
        "fits": not refused,
        "window": 0 if refused else window.tokens,
        "kv_bytes": 0 if refused else resolution.kv_bytes * sessions,
        "bound": ContextReason(bound).value,
        "message": resolution.refusal.message,
    }


def _show_alternatives(rows: list[dict[str, Any]], left_out: list[str]) -> None:
    table(
        "alternatives",
        ("K", "V", "sessions", "window each", "KV in all", "bound by"),
        [
            (
                row["k_type"],
                row["v_type"],
                row["sessions"],
                count(row["window"]) if row["fits"] else "–",
                size(row["kv_bytes"]) if row["fits"] else "–",
                ("refused: " if not row["fits"] else "")
                + plan_view.reason(ContextReason(row["bound"])),
            )
            for row in rows
        ],
    )
    for said in left_out:
        note(f"left out, {said}")
