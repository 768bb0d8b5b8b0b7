"""What a refused plan is short of, and what would make it fit. Each remedy was tried.

Owns the numbers of a refusal and its remedies. Raises nothing: whoever asked decides what to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from modeld.shared.capacity import (
    EngineMeasure,
    ModelFacts,
    PlacedUse,
    Placement,
    Reason,
    Refusal,
    Remedy,
    SlotUse,
)
from modeld.shared.errors import InvalidRequest
from modeld.shared.planner.budget import Budget, needed_total
from modeld.shared.planner.placement import HOST, Layout, Place, Spread
from modeld.shared.planner.refusal_words import explain_refusal
from modeld.shared.planner.report import place_budgets
from modeld.shared.planner.windows import Decision, Problem, ceilings_of, decide

NARROWER_TYPES = {"llama": ("q8_0", "q4_0"), "openvino": ("u8", "u4")}  # widest first


@dataclass(frozen=True)
class _Short:
    """The placement that was tried, and the place that is short of most."""

    spread: Spread
    place: Place
    budget: Budget
    index: int  # of the place, the host being 0
    kv: int
    compute: int
    missing: tuple[int, ...]  # bytes by place, the host first


def refuse(decision: Decision, alternatives: Sequence[ModelFacts]) -> Refusal:
    """The refusal of a plan that doesn't fit, with its whole sum."""
    short = _find_short(decision)
    remedies = tuple(_remedies(decision, short, alternatives))
    numbers = _numbers(decision, short, remedies)
    return Refusal(
        bound=Reason(numbers["bound"]),
        message=explain_refusal(numbers),
        numbers=tuple((key, str(value)) for key, value in numbers.items()),
        remedies=remedies,
    )


def _find_short(decision: Decision) -> _Short:
    layout, need = decision.layout, decision.need
    spread = layout.attempt(decision.allocated, need)
    budgets = place_budgets(layout, spread)
    missing = tuple(
        max(0, needed_total(b.fixed + need * part.context, b.headroom_fraction) - b.total)
        if b.fixed + need * part.context > b.spendable and (part.layers or not index)
        else 0
        for index, (b, part) in enumerate(zip(budgets, spread.parts, strict=True))
    )
    index = max(range(len(missing)), key=lambda i: missing[i])
    part = spread.parts[index]
    place = (layout.host, *layout.devices)[index]
    return _Short(spread, place, budgets[index], index, part.kv, part.compute, missing)


def _numbers(decision: Decision, short: _Short, remedies: tuple[Remedy, ...]) -> dict[str, object]:
    """Every term of the sum, of the place that is short; and what lies on each accelerator."""
    problem, budget, need = decision.problem, short.budget, decision.need
    beside = budget.companions
    context = short.kv + short.compute
    value = {remedy.kind: remedy.value for remedy in remedies}
    numbers: dict[str, object] = {
        "model": problem.facts.name,
        "window": decision.window.tokens,
        "allocated": decision.allocated,
        "asked_by": "request" if problem.request.window else "floor",
        "sessions": need,
        "place": short.place.id,
        "place_name": short.place.engine_name or HOST,
        "bound": budget.deciding(need * context).value,
        "k_type": problem.request.k_type,
        "v_type": problem.request.v_type,
        "weights_bytes": budget.weights,
        "copied_bytes": budget.copied,
        "projector_bytes": beside.projector_bytes,
        "projector_compute_bytes": beside.projector_compute_bytes,
        "adapter_bytes": beside.adapter_bytes,
        "draft_bytes": beside.draft_bytes,
        "kv_bytes": short.kv,
        "compute_bytes": short.compute,
        "needed_bytes": budget.fixed + need * context,
        "free_bytes": budget.free,
        "loaded_bytes": budget.loaded,
        "reclaimable_bytes": budget.reclaimable,
        "promised_bytes": budget.promised,
        "elsewhere_untouched_bytes": budget.elsewhere_untouched,
        "elsewhere_bytes": budget.elsewhere,
        "reserve_bytes": budget.reserve,
        "user_limit_bytes": budget.user_limit,
        "resident_bytes": budget.resident,
        "budget_term": budget.bound.value,
        "budget_bytes": budget.total,
        "headroom_bytes": budget.headroom,
        "room_bytes": budget.contexts - need * short.compute,
        "short_bytes": sum(short.missing),
        "open_sessions": problem.use.sessions,
        "held_bytes": held_bytes(problem.use),
        "largest_window": value.get("window", "0"),
        "k_type_that_fits": value.get("k_type", ""),
        "sessions_that_fit": value.get("sessions", ""),
        "layers_that_fit": value.get("gpu_layers", ""),
        "model_that_fits": value.get("model", ""),
        "bytes_to_free": value.get("free", ""),
        "limit_that_fits": value.get("device_limit", value.get("user_limit", "")),
        "remedies": "; ".join(remedy.text for remedy in remedies),
    }
    if problem.request.streams:
        numbers["streams"] = problem.request.streams
        numbers["layout_that_fits"] = value.get("layout", "")
    if decision.layout.devices:
        numbers.update(_place_numbers(decision.layout, short.spread))
    return numbers


def _place_numbers(layout: Layout, spread: Spread) -> Iterator[tuple[str, object]]:
    """The sum of every place, for one session: ``host_...``, ``device0_...`` and so on."""
    places = (layout.host, *layout.devices)
    budgets = place_budgets(layout, spread)
    for index, (place, budget, part) in enumerate(zip(places, budgets, spread.parts, strict=True)):
        prefix = f"device{index - 1}" if index else HOST
        if index:
            yield f"{prefix}_id", place.id
            yield f"{prefix}_name", place.name
        yield f"{prefix}_layers", part.layers
        yield f"{prefix}_weights_bytes", budget.fixed
        yield f"{prefix}_kv_bytes", part.kv
        yield f"{prefix}_compute_bytes", part.compute
        yield f"{prefix}_free_bytes", budget.free
        yield f"{prefix}_reserve_bytes", budget.reserve
        yield f"{prefix}_budget_bytes", budget.total
        yield f"{prefix}_headroom_bytes", budget.headroom
        yield f"{prefix}_left_bytes", budget.contexts - part.context


def refuse_sessions(problem: Problem, decision: Decision | None) -> Refusal:
    """The refusal of more sessions than the operator lets be open, whatever the memory.

    ``decision`` is None where nothing can be promised of memory; its sum is then unknown.
    """
    asked, (setting, most) = problem.request.sessions, problem.most_sessions
    remedies = list(_by_sessions(problem, 1, most))
    raised = replace(problem, policy=replace(problem.policy, max_sessions=asked))
    if problem.request.streams:
        raised = replace(problem, request=replace(problem.request, streams=asked))
    if admits(raised):
        remedies.append(Remedy(setting, str(asked), f"set {setting} to {asked}"))
    numbers: dict[str, object] = {
        "model": problem.facts.name,
        "window": problem.request.window,
        "needed_bytes": "unknown",
        "short_bytes": "unknown",
    }
    if decision is not None:
        numbers = _numbers(decision, _find_short(decision), tuple(remedies))
    numbers |= {
        "bound": Reason.USER_LIMIT.value,
        setting: most,
        "sessions_asked": asked,
        "remedies": "; ".join(remedy.text for remedy in remedies),
    }
    advice = ", or ".join(remedy.text for remedy in remedies)
    advice = advice or "memory doesn't hold one such session either"
    return Refusal(
        bound=Reason.USER_LIMIT,
        message=(
            f"Room for {asked} {'batched ' if problem.request.streams else ''}sessions of "
            f"{problem.facts.name} was asked for, and the setting {setting} lets {most} be open at "
            f"once: {advice}."
        ),
        numbers=tuple((key, str(value)) for key, value in numbers.items()),
        remedies=tuple(remedies),
    )


# --- what would make it fit -----------------------------------------------------------------------


def admits(problem: Problem) -> bool:
    """Whether such a plan would be admitted."""
    try:
        problem.check()
    except InvalidRequest:
        return False
    if problem.beyond_settings:
        return False
    return bool(problem.blind) or decide(problem).spread is not None


def held_bytes(use: SlotUse) -> int:
    """What the contexts of open sessions hold over all memories, beyond what is reclaimable."""
    resident = use.resident_bytes + sum(row.resident_bytes for row in use.on_devices)
    reclaimable = use.reclaimable_bytes + sum(row.reclaimable_bytes for row in use.on_devices)
    return max(0, resident - reclaimable)


def use_after_switch(use: SlotUse) -> SlotUse:
    """The slot as another model finds it: what this one allocated would be given back."""
    if not (use.weights_resident or use.cells):
        return use
    return SlotUse(
        reclaimable_bytes=use.resident_bytes + use.weights_anonymous_bytes + use.cold_bytes,
        compute_bytes=use.compute_bytes,
        elsewhere_untouched_bytes=use.elsewhere_untouched_bytes,
        elsewhere_bytes=use.elsewhere_bytes,
        on_devices=tuple(
            PlacedUse(
                row.device_id,
                resident_bytes=row.resident_bytes + row.weights_bytes,
                reclaimable_bytes=row.resident_bytes + row.weights_bytes,
            )
            for row in use.on_devices
        ),
    )


def _remedies(
    decision: Decision, short: _Short, alternatives: Sequence[ModelFacts]
) -> Iterator[Remedy]:
    problem = decision.problem
    yield from _by_request(decision)
    if decision.layout.devices and problem.use.gpu_layers < 0:
        yield from _by_placement(decision)
    for other in sorted(alternatives, key=lambda one: -one.weights_bytes):
        if other.name == problem.facts.name:
            continue
        if other.weights_bytes < problem.facts.weights_bytes and admits(
            replace(
                problem,
                facts=other,
                use=use_after_switch(problem.use),
                measure=EngineMeasure(),
            )
        ):
            yield Remedy("model", other.name, f"use {other.name}, which fits")
            break
    yield from _by_memory(decision, short)


def _by_request(decision: Decision) -> Iterator[Remedy]:
    problem, request = decision.problem, decision.problem.request
    ceilings = ceilings_of(problem.facts, problem.policy)
    largest = min([decision.fits, *(tokens for tokens, _ in ceilings)])
    if largest > 0 and admits(replace(problem, request=replace(request, window=largest))):
        yield Remedy("window", str(largest), f"ask for at most {largest} tokens")
    if request.streams > 1 and admits(replace(problem, request=replace(request, streams=0))):
        yield Remedy("layout", "isolated", "open an isolated session")
    # Values stay as they are: their quantisation needs flash attention, which is off. Where both
    # are one row, neither can change.
    for kv_type in NARROWER_TYPES.get(problem.facts.model_type, ()):
        values = kv_type if problem.facts.model_type == "openvino" else request.v_type
        narrow = replace(request, k_type=kv_type, v_type=values)
        other = replace(problem, request=narrow, measure=EngineMeasure())
        if not admits(other):
            continue
        if other.costs().kv(decision.allocated) < decision.costs.kv(decision.allocated):
            yield Remedy("k_type", kv_type, f"ask for k_type {kv_type}")
            break
    there = problem.use.sessions
    yield from _by_sessions(problem, there + 1, there + decision.need - 1)


def _by_sessions(problem: Problem, low: int, high: int) -> Iterator[Remedy]:
    """The most sessions from ``low`` to ``high`` that would be admitted. Where some number is,
    every smaller one is as well.
    """
    most = 0
    while low <= high:
        asked = (low + high) // 2
        if admits(replace(problem, request=replace(problem.request, sessions=asked))):
            most, low = asked, asked + 1
        else:
            high = asked - 1
    if most:
        yield Remedy("sessions", str(most), f"ask for room for {most} sessions")


def _by_placement(decision: Decision) -> Iterator[Remedy]:
    problem, policy = decision.problem, decision.problem.policy
    shed = replace(policy, gpu_layers=-1, placement=Placement.SHED)
    placed = decide(replace(problem, policy=shed))
    if placed.spread is None:
        return
    layers, total = placed.spread.gpu_layers, placed.layout.total
    if admits(replace(problem, policy=replace(policy, gpu_layers=layers))):
        text = f"set gpu_layers to {layers}: that many of {total} layers fit on accelerators"
        yield Remedy("gpu_layers", str(layers), text)
    if policy.placement is Placement.REFUSE and policy.gpu_layers < 0:
        text = "set placement to shed, to leave on the host what doesn't fit"
        yield Remedy("placement", Placement.SHED.value, text)


def _by_memory(decision: Decision, short: _Short) -> Iterator[Remedy]:
    """More memory, or a higher limit, where one of them alone is enough."""
    layout, need = decision.layout, decision.need
    if not sum(short.missing):
        return
    indices = [i for i, missing in enumerate(short.missing) if missing]
    if len(indices) == 1:
        needed = short.budget.total + short.missing[indices[0]]
        yield from _one_place(decision, short.index, needed)
    else:
        # Several overflow in proportion: the one with the most room is given all that is missing.
        there = [i for i in indices if i]
        best = max(there, key=lambda i: layout.devices[i - 1].budget.total)
        yield from _largest_place(decision, best, need)


def _one_place(decision: Decision, index: int, needed: int) -> Iterator[Remedy]:
    layout = decision.layout
    place = (layout.host, *layout.devices)[index]
    budget = place.budget
    where = f" on {place.engine_name}" if index else ""
    more = needed - budget.memory_arm
    limit = needed + budget.resident + budget.elsewhere
    taken = _total(decision, index) - budget.free  # what isn't taken can't be freed
    if 0 < more <= taken and _fits_with(decision, index, free=budget.free + more):
        yield Remedy("free", str(more), f"free {more} bytes{where}")
    if budget.user_limit and _fits_with(decision, index, limit=limit):
        kind = "device_limit" if index else "user_limit"
        yield Remedy(kind, str(limit), f"raise {kind}_bytes to {limit}")


def _largest_place(decision: Decision, index: int, need: int) -> Iterator[Remedy]:
    """Bytes to free on one of several accelerators, found by trying."""
    place = decision.layout.devices[index - 1]
    step = 1 << 20
    low, high = 1, 2 * _total_bytes(decision, need) // step + 1
    if not _fits_with(decision, index, free=place.budget.free + high * step):
        return
    while low < high:
        middle = (low + high) // 2
        if _fits_with(decision, index, free=place.budget.free + middle * step):
            high = middle
        else:
            low = middle + 1
    more = high * step
    if more <= _total(decision, index) - place.budget.free:
        yield Remedy("free", str(more), f"free {more} bytes on {place.engine_name}")


def _total(decision: Decision, index: int) -> int:
    """Bytes that the place has in all, within what bounds it."""
    host = decision.problem.machine.host
    if not index:
        return min(host.total_bytes, host.limit_bytes or host.total_bytes)
    place = decision.layout.devices[index - 1]
    readings = decision.problem.machine.devices
    return next(reading.total_bytes for reading in readings if reading.id == place.id)


def _total_bytes(decision: Decision, need: int) -> int:
    spread = decision.layout.attempt(decision.allocated, need)
    all_budgets = sum(abs(d.budget.total) for d in decision.layout.devices)
    return spread.weights + need * (spread.kv + spread.compute) + all_budgets


def _fits_with(
    decision: Decision, index: int, *, free: int | None = None, limit: int | None = None
) -> bool:
    """Whether the window fits with another reading, or another limit, of one place."""
    layout = decision.layout
    places = [layout.host, *layout.devices]
    changed = places[index].budget
    if free is not None:
        changed = replace(changed, free=free)
    if limit is not None:
        changed = replace(changed, user_limit=limit)
    places[index] = replace(places[index], budget=changed)
    there = layout.with_places(places[0], tuple(places[1:]))
    return there.spread(decision.allocated, decision.need) is not None
