"""``modeld describe``: a model's capacity and capability truth, with the reasons."""

from __future__ import annotations

from dataclasses import fields

import click

from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import count, emit_json, say, size, table
from modeld.client import (
    Capability,
    ContextNumber,
    ContextNumbers,
    ContextReason,
    Description,
    Resolution,
)

MEANING = {
    "model_max": "the model's own ceiling",
    "requested": "what was asked",
    "memory_fit": "what memory alone allows",
    "effective": "the window a session is served",
    "hot": "cells allocated for the slot",
    "planner": "with the cold budget counted",
}


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
    _facts(described)
    numbers(described.resolution.context)
    _budget(described.resolution)
    _answers("questions", described.questions)
    _answers("capabilities", described.capabilities)
    identity = described.identity
    rows = [(f.name, _shown(getattr(identity, f.name))) for f in fields(identity)]
    table("identity", ("field", "value"), rows)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(f"{a.digest} × {a.scale:g}" for a in value) or "–"
    return str(value) or "–"


def _facts(described: Description) -> None:
    facts = described.facts
    resident = "resident" if described.resident else "not loaded"
    say(
        f"{described.model} ({described.model_type}, {facts.architecture}, "
        f"{facts.quantization or 'unquantized'}, {size(facts.file_bytes)}), {resident}",
        "bold",
    )
    say(f"numbers from: {described.resolution_source}")


def numbers(context: ContextNumbers) -> None:
    """The six context numbers as a table."""
    table(
        "context",
        ("number", "tokens", "bound by", "next bound", "meaning"),
        [_number(f.name, getattr(context, f.name)) for f in fields(context)],
    )


def _number(name: str, number: ContextNumber) -> tuple[str, str, str, str, str]:
    following = "–"
    if number.runner_up is not ContextReason.NONE:
        following = f"{_reason(number.runner_up)}: {count(number.runner_up_tokens)}"
    tokens = count(number.tokens) if number.known else "unknown"
    return name, tokens, _reason(number.reason), following, MEANING.get(name, "")


def _reason(reason: ContextReason) -> str:
    return "–" if reason is ContextReason.NONE else reason.value.lower()


def _budget(resolution: Resolution) -> None:
    table(
        f"memory ({resolution.placement or 'host'}, K {resolution.k_type}, V {resolution.v_type}, "
        f"up to {resolution.max_sessions} sessions)",
        ("what", "bytes", "size", "note"),
        [(row.name, count(row.bytes), size(row.bytes), row.note) for row in resolution.budget],
    )


def _answers(title: str, answers: tuple[Capability, ...]) -> None:
    if answers:
        rows = [(a.name, a.answer, a.evidence) for a in answers]
        table(title, ("question", "answer", "evidence"), rows)
