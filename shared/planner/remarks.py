"""What an operator should be told of a plan beside its numbers: settings that it could not follow.

Words only. Decides nothing, and knows no budget.
"""

from __future__ import annotations

from collections.abc import Iterator

from modeld.shared.planner.placement import unread, usable
from modeld.shared.planner.windows import Problem


def remarks(problem: Problem, gpu_layers: int) -> tuple[str, ...]:
    """Sentences on a plan that puts ``gpu_layers`` on accelerators, its refusal included."""
    return (
        *_on_sessions(problem),
        *_on_devices(problem),
        *_on_layers(problem, gpu_layers),
    )


def _on_sessions(problem: Problem) -> Iterator[str]:
    open_now, most = problem.use.sessions, problem.policy.max_sessions
    if open_now >= most:
        yield f"all {most} contexts (max_sessions) are taken: a session must close, or be parked"


def _on_devices(problem: Problem) -> Iterator[str]:
    policy, use, devices = problem.policy, problem.use, problem.machine.devices
    yield from (note for note in problem.machine.notes if note.startswith("devices names"))
    if not policy.gpu_layers or problem.facts.model_type != "llama":
        return
    where_it_lives = {row.device_id for row in use.on_devices} if use.gpu_layers > 0 else set()
    for device in unread(devices):
        if device.id not in where_it_lives:
            note = f" ({device.note})" if device.note else ""
            name = f"{device.engine_name} ({device.name})"
            yield f"{name} is not used: its memory could not be read{note}"
    if use.gpu_layers > 0:
        return
    there = usable(devices)
    if problem.blind and there:
        names = ", ".join(device.engine_name for device in there)
        yield (
            f"{problem.blind}: nothing is promised of memory, and the model is planned on the "
            f"host, without {names}"
        )
    asked = [name for name in ("devices", "tensor_split") if getattr(policy, name)]
    if asked and not there:
        verb = "is" if len(asked) == 1 else "are"
        yield (
            f"{' and '.join(asked)} {verb} set, and no accelerator here can be used: everything "
            "is host memory"
        )


def _on_layers(problem: Problem, gpu_layers: int) -> Iterator[str]:
    """Where the operator wants more layers on accelerators than are planned there."""
    wanted = problem.policy.gpu_layers
    if 0 < gpu_layers < wanted or (wanted > 0 and not gpu_layers):
        yield f"gpu_layers is {wanted}, and {gpu_layers} are planned: {_why(problem, gpu_layers)}"


def _why(problem: Problem, gpu_layers: int) -> str:
    facts = problem.facts
    total = sum(run.count for run in facts.layers) + 1
    if facts.model_type != "llama":
        return f"{facts.model_type} models are planned on the host only"
    if problem.use.gpu_layers >= 0:
        return "the model was loaded so"
    if not usable(problem.machine.devices):
        return "no accelerator here can be used"
    if problem.blind:
        return problem.blind
    if gpu_layers == total:
        return f"the model has {total} layers, its output counted as one"
    return "the file doesn't tell its layers"
