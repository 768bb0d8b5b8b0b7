"""A plan as rows: the budget's sum, and what lies on each place. Words and numbers only.

Decides nothing: what it is given has been decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from modeld.shared.capacity import BudgetRow, DevicePlan, DeviceReading
from modeld.shared.planner.budget import Budget
from modeld.shared.planner.costs import Costs
from modeld.shared.planner.placement import HOST, Layout, Part, Place, Spread, unread, usable
from modeld.shared.planner.windows import Problem


def place_budgets(layout: Layout, spread: Spread) -> list[Budget]:
    """The budget of each place with the weights charged that lie there; the host first."""
    host, *parts = spread.parts
    return [layout.host_budget(host)] + [
        replace(place.budget, weights=part.weights)
        for place, part in zip(layout.devices, parts, strict=True)
    ]


def device_plans(layout: Layout, spread: Spread) -> tuple[DevicePlan, ...]:
    """One row for the host, and one for each accelerator that was used or considered.

    What is loaded beside the model counts as weights of the host, the buffer that a projector
    works in as compute.
    """
    places = (layout.host, *layout.devices)
    budgets = place_budgets(layout, spread)
    return tuple(
        _device_plan(place, part, budget)
        for place, part, budget in zip(places, spread.parts, budgets, strict=True)
    )


def _device_plan(place: Place, part: Part, budget: Budget) -> DevicePlan:
    beside = budget.companions.projector_compute_bytes
    return DevicePlan(
        device_id=place.id,
        name=place.name,
        engine_name=place.engine_name,
        layers=part.layers,
        first_layer=part.first,
        weights_bytes=budget.fixed - beside,
        kv_bytes=part.kv,
        compute_bytes=part.compute + beside,
        free_bytes=budget.free,
        reserve_bytes=budget.reserve,
        budget_bytes=budget.total,
        headroom_bytes=budget.headroom,
        left_bytes=budget.contexts - part.context,
    )


def budget_rows(
    problem: Problem, costs: Costs, layout: Layout, spread: Spread, allocated: int, fits: int
) -> tuple[BudgetRow, ...]:
    """The host's sum, from what was read to what is left."""
    host = spread.parts[0]
    budget = layout.host_budget(host)
    memory = problem.machine.host
    room = budget.contexts - host.compute
    kv_note, calibration = costs.notes(allocated)
    at_fits = layout.spread(fits, balanced=False) if fits else None
    then = at_fits.parts[0] if at_fits else None
    return (
        BudgetRow("total", memory.total_bytes),
        BudgetRow("cgroup_limit", memory.limit_bytes, "" if memory.limit_bytes else "none"),
        *budget.rows(),
        BudgetRow("compute", host.compute, _compute_note(costs, allocated)),
        *([calibration] if calibration is not None else []),
        BudgetRow("room", room, "budget - headroom - what is charged once - compute"),
        BudgetRow("kv", host.kv, kv_note),
        BudgetRow("left", room - host.kv, "room - kv"),
        BudgetRow("compute_at_memory_fit", then.compute if then else 0, f"for {fits} more tokens"),
        BudgetRow("kv_at_memory_fit", then.kv if then else 0, f"for {fits} more tokens"),
        BudgetRow("placement", 0, _placement_note(problem, layout, spread)),
    )


def _compute_note(costs: Costs, allocated: int) -> str:
    if costs.measure.points:
        return f"for a window of {allocated}, as corrected"
    return f"estimate for a window of {allocated}"


def _placement_note(problem: Problem, layout: Layout, spread: Spread) -> str:
    """Where the model goes, and why not elsewhere."""
    on_host = spread.parts[0].layers
    if layout.devices:
        note = f"{spread.gpu_layers} of {layout.total} layers on accelerators"
        if on_host and not layout.fixed:
            note += f": {on_host} stay on the host, because they don't fit"
        if layout.even:
            note += "; weights are spread evenly, the file doesn't tell them by layer"
        return note
    devices = problem.machine.devices
    if not devices:
        return "no accelerator: everything is host memory"
    if not usable(devices):
        return f"{_unused(devices)}: everything is host memory"
    if problem.facts.model_type != "llama":
        return f"{problem.facts.model_type} models are planned on the host only"
    return "0 layers are to be on accelerators: everything is host memory"


def _unused(devices: Sequence[DeviceReading]) -> str:
    """Why nothing can be placed on any of these."""
    lost = unread(devices)
    shared = [one for one in devices if one.known and one.engine_name and one.shared_memory]
    others = [one for one in devices if one not in lost and one not in shared]
    said = []
    if lost:
        said.append(f"the memory of {_names(lost)} could not be read")
    if shared:
        said.append(f"{_names(shared)} uses the host's memory")
    if others:
        said.append(f"no engine here can use {_names(others)}")
    return ", and ".join(said)


def _names(devices: Sequence[DeviceReading]) -> str:
    return ", ".join(
        f"{device.name} ({device.note})" if device.note else device.name for device in devices
    )


def placement_word(layout: Layout, spread: Spread) -> str:
    if not spread.gpu_layers:
        return HOST
    return "device" if spread.gpu_layers == layout.total else "split"
