"""``modeld describe``: a model's capacity and capability truth, with the reasons."""

from __future__ import annotations

from dataclasses import fields

import click

from modeld.cli import plan_view
from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import emit_json, say, table


@click.command(short_help="Show what a model can do here, and why.")
@click.argument("model")
@click.option("--window", type=click.IntRange(min=0), default=0, help="Ask for this many tokens.")
@click.option("--k-type", default="", help="KV cache type of the keys, e.g. f16 or q8_0.")
@click.option("--v-type", default="", help="KV cache type of the values.")
@click.option("--raw", is_flag=True, help="The identity of a session of raw text.")
@click.option("--session-id", default="", help="Quote this open session's own resolution.")
@global_options
@pass_settings
def describe(
    settings: Settings,
    model: str,
    window: int,
    k_type: str,
    v_type: str,
    raw: bool,
    session_id: str,
) -> None:
    """Show what MODEL can do here and how large a context it would get, without loading it.

    Six numbers, each with what bound it and the bound that would come next; every byte that
    entered them; six questions answered yes, no or unknown with the evidence; the identity that
    decides what may be reused. Doesn't start a daemon: exit status 3 if none runs.
    """
    with connect(settings) as client:
        described = client.describe(
            model,
            window=window,
            k_type=k_type,
            v_type=v_type,
            prompt_format="raw" if raw else "",
            session_id=session_id,
        )
    if settings.json:
        emit_json(described)
        return
    resident = "resident" if described.resident else "not loaded"
    line = plan_view.facts_line(described.model, described.model_type, described.facts)
    say(f"{line}, {resident}", "bold")
    say(f"numbers from: {described.resolution_source}")
    if described.executor:
        say(f"executor: {plan_view.executor(described.executor, described.executor_reason)}")
    plan_view.machine(described.machine)
    plan_view.numbers(described.resolution.context)
    plan_view.budget(described.resolution)
    plan_view.findings(described.resolution)
    plan_view.answers("questions", described.questions)
    plan_view.answers("capabilities", described.capabilities)
    identity = described.identity
    rows = [(f.name, _shown(getattr(identity, f.name))) for f in fields(identity)]
    table("identity", ("field", "value"), rows)
    asked = [("--ctx", str(window))] if window else []
    if k_type:
        asked.append(("--kv", f"{k_type}/{v_type}" if v_type else k_type))
    plan_view.refusal(described.resolution.refusal, model, asked, settings.data_root)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(f"{a.digest} × {a.scale:g}" for a in value) or "–"
    return str(value) or "–"
