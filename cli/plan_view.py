"""How a description of a model is shown: its facts, six numbers, memories, questions, refusal.

Shared by the commands that describe and plan. Prints; asks nobody.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.text import Text

from modeld.cli.budget_bar import Line, can_draw, draw
from modeld.cli.budget_parts import pictures
from modeld.cli.output import count, one_line, say, size, stdout_console, table
from modeld.client import Capability, ContextNumber, ContextNumbers, ContextReason
from modeld.client.values_capacity import Device, Machine, Refusal, Remedy, Resolution
from modeld.client.values_daemon import ModelFacts

MEANING = {
    "model_max": "the model's own ceiling",
    "requested": "what was asked",
    "memory_fit": "what memory alone allows",
    "effective": "the window a session is served",
    "hot": "cells allocated for the slot",
    "planner": "with the cold budget counted",
}
DEFAULT_COLUMNS = 80

Options = Sequence[tuple[str, str]]


def executor(name: str, reason: str) -> str:
    """Which of its engine's ways runs a model, and why."""
    if reason.startswith(f"{name}:"):
        return reason
    return f"{name}: {reason}" if reason else name


def facts_line(name: str, model_type: str, facts: ModelFacts) -> str:
    """One line: what the model is."""
    parts = f", {facts.parts} files" if facts.parts > 1 else ""
    return (
        f"{name} ({model_type}, {facts.architecture}, {layers_by_kind(facts)}, "
        f"{facts.quantization or 'unquantized'}, {size(facts.file_bytes)}{parts})"
    )


def layers_by_kind(facts: ModelFacts) -> str:
    """'26 layers: 4 full, 22 window of 512'."""
    counted: dict[str, int] = {}
    for run in facts.layer_runs:
        kind = f"window of {count(run.window)}" if run.window else run.kind
        counted[kind] = counted.get(kind, 0) + run.count
    layers = f"{count(facts.layers)} layers"
    if not counted:
        return layers
    return f"{layers}: " + ", ".join(f"{n} {kind}" for kind, n in counted.items())


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
        following = f"{reason(number.runner_up)}: {count(number.runner_up_tokens)}"
    tokens = count(number.tokens) if number.known else "unknown"
    return name, tokens, reason(number.reason), following, MEANING.get(name, "")


def reason(value: ContextReason) -> str:
    return "–" if value is ContextReason.NONE else value.value.lower()


def picture(plan: Resolution, sessions: int = 0) -> None:
    """A bar for each memory: where its bytes go, with ``sessions`` as many as were asked for."""
    glyphs = can_draw(sys.stdout.encoding)
    width = shutil.get_terminal_size((DEFAULT_COLUMNS, 24)).columns
    for one in pictures(plan, sessions):
        say("")
        for line in draw(one, width, glyphs=glyphs):
            _print(line)


def _print(line: Line) -> None:
    if sys.stdout.isatty():  # rich leaves the colours out where NO_COLOR says so
        text = Text.assemble(*((one_line(run.text), run.style) for run in line))
        stdout_console().print(text, soft_wrap=True)
    else:
        print("".join(one_line(run.text) for run in line))


def budget(plan: Resolution) -> None:
    """Every row that entered the sum, and the devices' rows where there are some."""
    table(
        f"memory ({plan.placement or 'host'}, K {plan.k_type}, V {plan.v_type}, "
        f"up to {plan.max_sessions} sessions)",
        ("what", "bytes", "size", "note"),
        [(row.name, count(row.bytes), size(row.bytes), row.note) for row in plan.budget],
    )
    if plan.devices:
        shed = ", layers were left on the host" if plan.shed else ""
        table(
            f"devices ({plan.gpu_layers} layers on accelerators{shed})",
            ("device", "layers", "weights", "KV", "compute", "free", "reserve", "budget", "left"),
            [
                (
                    row.engine_name or row.device_id,
                    row.layers,
                    size(row.weights_bytes),
                    size(row.kv_bytes),
                    size(row.compute_bytes),
                    size(row.free_bytes),
                    size(row.reserve_bytes),
                    size(row.budget_bytes),
                    size(row.left_bytes),
                )
                for row in plan.devices
            ],
        )


def findings(plan: Resolution) -> None:
    if plan.findings:
        table("findings", ("",), [(finding,) for finding in plan.findings])


def answers(title: str, given: tuple[Capability, ...]) -> None:
    if given:
        rows = [(a.name, a.answer, a.evidence) for a in given]
        table(title, ("question", "answer", "evidence"), rows)


def refusal(
    refused: Refusal, model: str, asked: Options = (), data_root: Path | None = None
) -> None:
    """Why it is refused, and what would make it fit, with what to type for each.

    ``asked`` are the options of `modeld plan` that the question had, ``data_root`` the folder that
    was named on the command line.
    """
    if not refused.message:
        return
    say("")
    say(f"refused: {refused.message}", "red")
    for remedy in refused.remedies:
        command = with_data_root(remedy_command(remedy, model, asked), data_root)
        text = remedy.text
        if remedy.kind in ("free", "user_limit", "device_limit") and remedy.value.isdigit():
            text += f" ({size(int(remedy.value))})"
        say(f"  {text}" + (f": {command}" if command else ""))


def remedy_command(remedy: Remedy, model: str, asked: Options = ()) -> str:
    """What to type for it; "" where nothing that modeld has would do it."""
    value = remedy.value
    if remedy.kind == "k_type":
        _, _, v_type = dict(asked).get("--kv", "").partition("/")
        v_type = value if value.startswith("u") else v_type  # OpenVINO's types go together
        value += f"/{v_type}" if v_type else ""
    option = {"window": "--ctx", "k_type": "--kv", "sessions": "--sessions"}.get(remedy.kind)
    if option is not None:
        kept = [one for one in asked if one[0] != option]
        return _plan_command(model, [*kept, (option, value)])
    if remedy.kind == "model":
        return _plan_command(value, asked)
    setting = {
        "gpu_layers": "--gpu-layers",
        "placement": "--placement",
        "user_limit": "--user-limit-bytes",
        "device_limit": "--device-limit-bytes",
        "max_sessions": "--max-sessions",
    }.get(remedy.kind)
    return f"modeld serve {setting} {shlex.quote(value)}" if setting else ""


def _plan_command(model: str, options: Options) -> str:
    words = [model, *(word for option in options for word in option)]
    return "modeld plan " + " ".join(shlex.quote(word) for word in words)


def with_data_root(text: str, data_root: Path | None) -> str:
    """The commands in a text, for the folder that was named on the command line if one was."""
    if data_root is None:
        return text
    named = f"modeld --data-root {shlex.quote(str(data_root))} "
    return re.sub(
        r"\bmodeld (?=(?:drain|models|plan|serve|sessions|status)\b)", lambda _: named, text
    )


def machine(read: Machine) -> None:
    """The readings that an answer was made from."""
    if not (read.host_known or read.devices or read.notes):
        return
    say(f"machine ({read.source}): {host(read)}")
    devices(read.devices)
    for said in read.notes:
        say(f"  {said}")


def host(read: Machine) -> str:
    if not read.host_known:
        return "the host's memory can't be read"
    text = f"{size(read.host_available_bytes)} available of {size(read.host_total_bytes)}"
    if read.cgroup_limit_bytes:
        text += f", limited to {size(read.cgroup_limit_bytes)} by its cgroup"
    if read.swap_total_bytes:
        used = read.swap_total_bytes - read.swap_free_bytes
        text += f"; swap {size(used)} used of {size(read.swap_total_bytes)}, never planned with"
    return text


def devices(found: tuple[Device, ...]) -> None:
    """The accelerators as a table; nothing where there are none."""
    if not found:
        return
    table(
        "accelerators",
        ("device", "kind", "engine", "total", "free", "held by", "note"),
        [
            (
                device.name or device.id,
                device.kind,
                device.engine_name or "–",
                size(device.total_bytes) if device.known else "unknown",
                size(device.free_bytes) if device.known else "unknown",
                _holders(device),
                device.note + (" uses the host's memory" if device.shared_memory else ""),
            )
            for device in found
        ],
    )


def _holders(device: Device) -> str:
    return (
        ", ".join(
            f"{process.name or 'pid'} {process.pid}"
            + (f" ({size(process.bytes)})" if process.bytes else "")
            for process in device.processes
        )
        or "–"
    )
