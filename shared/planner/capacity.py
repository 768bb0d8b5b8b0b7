"""The capacity planner: facts, policy, a machine's readings and a request in; the six numbers out.

Pure: no file, device, clock or environment is read here. A number names the bound that decided
it, and a refusal carries the whole arithmetic.

How the numbers are defined where a definition was needed:

* ``memory_fit`` counts the cells of the slot: those it holds and those that still fit beside
  them, so that it bounds ``hot``. It is in whole pads of the engine and stops at 16,777,216. It
  is the most that any placement which the policy allows would hold, whatever is asked.
* ``effective`` is served exactly as asked; the engine allocates it rounded up to its pad
  (``Resolution.allocated``), and that is what is charged to memory and counted in ``hot``.
* A compute buffer grows with the window, so it is inverted together with the KV cache.
* Without a memory reading, of the host or of where the model lives, ``memory_fit`` is unknown,
  nothing is refused for memory, and the window is what was asked or else the floor, within the
  ceiling.
* Where several sessions share a context (``CapacityRequest.streams``), what is planned is room for
  all of them: KV for as many windows and one compute buffer. ``effective`` is one session's.
* ``planner`` adds to ``effective`` the tokens whose KV the host's memory holds parked: within the
  policy's cold budget, and within what the plan leaves free. Unknown memory holds none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from modeld.shared.capacity import (
    BudgetRow,
    CapacityPolicy,
    CapacityRequest,
    Companions,
    DevicePlan,
    EngineMeasure,
    MachineReading,
    ModelFacts,
    Number,
    Reason,
    Refusal,
    Resolution,
    SixNumbers,
    SlotUse,
)
from modeld.shared.errors import InsufficientMemory
from modeld.shared.planner.budget import NO_COMPANIONS
from modeld.shared.planner.costs import NO_MEASURE, Costs
from modeld.shared.planner.kv_math import round_up
from modeld.shared.planner.placement import MAX_CONTEXT_TOKENS, Layout, Spread
from modeld.shared.planner.remarks import remarks
from modeld.shared.planner.remedies import refuse, refuse_sessions
from modeld.shared.planner.report import budget_rows, device_plans, placement_word
from modeld.shared.planner.windows import Decision, Problem, ceilings_of, decide, decide_number

__all__ = ["MAX_CONTEXT_TOKENS", "confirm", "resolve", "survey"]


def resolve(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    machine: MachineReading,
    use: SlotUse,
    *,
    companions: Companions = NO_COMPANIONS,
    measure: EngineMeasure = NO_MEASURE,
    alternatives: Sequence[ModelFacts] = (),
) -> Resolution:
    """Plan one session. Raises InsufficientMemory with the whole budget, or InvalidRequest.

    For a model that replaces another, ``use`` describes the slot after the switch (no cells) with
    ``reclaimable_bytes`` for what the resident model's contexts, and what it copied of its weights,
    would give back; its mapped pages are in the reading already. ``request.sessions`` counts the
    sessions in all, those of ``use`` with them. ``alternatives`` are models of the store, of which
    a refusal names one that fits.
    """
    found = survey(
        facts,
        request,
        policy,
        machine,
        use,
        companions=companions,
        measure=measure,
        alternatives=alternatives,
    )
    if found.refusal is not None:
        raise InsufficientMemory(found.refusal.message, metadata=dict(found.refusal.numbers))
    return found


def survey(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    machine: MachineReading,
    use: SlotUse,
    *,
    companions: Companions = NO_COMPANIONS,
    measure: EngineMeasure = NO_MEASURE,
    alternatives: Sequence[ModelFacts] = (),
) -> Resolution:
    """As ``resolve``, but a refusal is part of the answer. Raises InvalidRequest.

    A refused plan serves nothing: ``effective`` and ``planner`` are 0, ``hot`` is what is held,
    and ``memory_fit`` is as it is. Its rows and bytes are those of the window that was asked for.
    """
    problem = Problem(facts, request, policy, machine, use, companions, measure)
    problem.check()
    if problem.blind:
        found = _blind(problem)
        if problem.beyond_settings:
            return _nothing(found, problem, refuse_sessions(problem, None))
        return found
    decision = decide(problem)
    if problem.beyond_settings:
        return _refused(decision, refuse_sessions(problem, decision))
    if decision.spread is None:
        return _refused(decision, refuse(decision, alternatives))
    return _resolution(decision, decision.spread)


def confirm(
    planned: Resolution,
    *,
    window: int,
    slot_cells: int,
    kv_bytes: int,
    compute_bytes: int,
    findings: tuple[str, ...] = (),
    on_devices: Mapping[str, tuple[int, int]] | None = None,
) -> Resolution:
    """The plan with what the engine reported after it opened the session.

    ``hot`` becomes the measured cells. Predicted bytes stay beside measured ones as rows, so that
    a difference is seen. What was allocated has fitted, so ``memory_fit`` is at least that.
    ``window`` is what the engine allocated; ``effective`` never exceeds it. ``on_devices`` has the
    measured KV and compute bytes by device id ("host" for the host), where they are known.
    """
    numbers = planned.numbers
    effective, planner = numbers.effective, numbers.planner
    if window < effective.tokens:
        cut = effective.tokens - window
        effective = replace(effective, tokens=window, reason=Reason.MEMORY)
        planner = replace(planner, tokens=max(window, planner.tokens - cut))
    cells = max(slot_cells, window)
    memory_fit = numbers.memory_fit
    if memory_fit.known:
        memory_fit = replace(memory_fit, tokens=max(memory_fit.tokens, cells))
    measured = on_devices or {}
    rows = [
        BudgetRow("kv_measured", kv_bytes, f"predicted {planned.kv_bytes}"),
        BudgetRow("compute_measured", compute_bytes, f"predicted {planned.compute_bytes}"),
    ]
    for plan in planned.devices:
        if plan.device_id in measured:
            kv, compute = measured[plan.device_id]
            of = plan.device_id
            rows.append(BudgetRow(f"kv_measured:{of}", kv, f"predicted {plan.kv_bytes}"))
            rows.append(
                BudgetRow(f"compute_measured:{of}", compute, f"predicted {plan.compute_bytes}")
            )
    return replace(
        planned,
        numbers=replace(
            numbers,
            memory_fit=memory_fit,
            effective=effective,
            hot=replace(numbers.hot, tokens=cells),
            planner=planner,
        ),
        budget=planned.budget + tuple(rows),
        kv_bytes=kv_bytes,
        compute_bytes=compute_bytes,
        allocated=window,
        devices=tuple(_measured(plan, measured) for plan in planned.devices),
        findings=planned.findings + findings,
    )


def _measured(plan: DevicePlan, measured: Mapping[str, tuple[int, int]]) -> DevicePlan:
    if plan.device_id not in measured:
        return plan
    kv, compute = measured[plan.device_id]
    left = plan.budget_bytes - plan.headroom_bytes - plan.weights_bytes - kv - compute
    return replace(plan, kv_bytes=kv, compute_bytes=compute, left_bytes=left)


# --- the answer ----------------------------------------------------------------------------------


def _resolution(decision: Decision, spread: Spread) -> Resolution:
    problem, layout, allocated = decision.problem, decision.layout, decision.allocated
    use, policy = problem.use, problem.policy
    streams = problem.request.streams
    sessions = use.sessions + (streams or layout.max_count(spread, policy.max_sessions))
    cold = _cold_budget(decision, spread)
    return Resolution(
        numbers=_six(
            problem,
            decision.window,
            decision.memory_fit,
            decision.held + decision.costs.streams * allocated,
            _tokens_parked(decision.costs, cold),
        ),
        budget=(
            *budget_rows(problem, decision.costs, layout, spread, allocated, decision.fits_one),
            BudgetRow("cold_budget", cold, "for parked KV, of what is left"),
        ),
        k_type=problem.request.k_type,
        v_type=problem.request.v_type,
        kv_bytes=spread.kv,
        compute_bytes=spread.compute,
        weights_bytes=spread.weights,
        placement=placement_word(layout, spread),
        max_sessions=min(policy.max_sessions + streams, sessions),
        allocated=allocated,
        free_bytes=_to_free(layout, spread, use.cold_bytes),
        cold_bytes=cold,
        gpu_layers=spread.gpu_layers,
        tensor_split=spread.tensor_split,
        devices=device_plans(layout, spread),
        shed=bool(layout.devices) and not layout.fixed and spread.gpu_layers < layout.total,
        findings=remarks(problem, spread.gpu_layers),
        streams=streams,
    )


def _cold_budget(decision: Decision, spread: Spread) -> int:
    """Host bytes that parked KV may take: no context that is planned here needs them."""
    host = spread.parts[0]
    left = decision.layout.host_budget(host).contexts - decision.need * host.context
    return max(0, min(decision.problem.policy.cold_budget_bytes, left))


def _tokens_parked(costs: Costs, cold_bytes: int) -> int:
    per_token = costs.cold_bytes_per_token() if cold_bytes else 0
    return cold_bytes // per_token if per_token else 0


def _to_free(layout: Layout, spread: Spread, cold_bytes: int) -> int:
    """Bytes to give back before allocating: parked KV, which goes first, then reclaimable contexts
    over all places.

    A context lies on its places in proportion, so that what one place is short of is freed with
    what lies elsewhere.
    """
    places = (layout.host, *layout.devices)
    contexts = [place.budget.reclaimable for place in places]
    contexts[0] -= cold_bytes
    host, *others = layout.shortages(spread, 1, reclaim=False)
    short = zip((host - cold_bytes, *others), contexts, strict=True)
    needed = max([0, *(-(-sum(contexts) * s // r) for s, r in short if r)])
    return needed + cold_bytes if needed else min(cold_bytes, max(0, host))


def _refused(decision: Decision, refusal: Refusal) -> Resolution:
    attempt = decision.layout.attempt(decision.allocated, decision.need)
    served = _resolution(replace(decision, spread=attempt), attempt)
    return _nothing(served, decision.problem, refusal)


def _nothing(served: Resolution, problem: Problem, refusal: Refusal) -> Resolution:
    """The plan as one that serves nothing."""
    nothing = Number(0, refusal.bound)
    held = Number(problem.use.cells, refusal.bound)
    numbers = replace(served.numbers, effective=nothing, hot=held, planner=nothing)
    return replace(
        served,
        numbers=numbers,
        max_sessions=min(problem.policy.max_sessions, problem.use.sessions),
        allocated=0,
        free_bytes=0,
        cold_bytes=0,
        refusal=refusal,
    )


def _six(problem: Problem, window: Number, memory_fit: Number, hot: int, parked: int) -> SixNumbers:
    facts, request = problem.facts, problem.request
    known = facts.model_max > 0
    model_max = Number(
        facts.model_max,
        Reason.TRAINING_WINDOW if known else Reason.UNKNOWN_METADATA,
        known=known,
    )
    return SixNumbers(
        model_max=model_max,
        requested=Number(request.window, Reason.REQUEST if request.window else Reason.NONE),
        memory_fit=memory_fit,
        effective=window,
        hot=Number(hot, window.reason, memory_fit.reason, memory_fit.tokens),
        planner=_planner(problem, window.tokens + parked),
    )


def _planner(problem: Problem, tokens: int) -> Number:
    """The logical window: the dense one, and what is parked beside it."""
    ceiling = problem.facts.model_max
    if not ceiling:
        return Number(tokens, Reason.COLD_BUDGET)
    if tokens >= ceiling:
        return Number(ceiling, Reason.MODEL_CEILING, Reason.COLD_BUDGET, tokens)
    return Number(tokens, Reason.COLD_BUDGET, Reason.MODEL_CEILING, ceiling)


def _blind(problem: Problem) -> Resolution:
    """Without a reading, or without layer facts: nothing is promised of memory."""
    facts, policy, request = problem.facts, problem.policy, problem.request
    memory, use, costs = problem.machine.host, problem.use, problem.costs()
    ceilings = ceilings_of(facts, policy)
    if request.window:
        window = decide_number([(request.window, Reason.REQUEST), *ceilings])
    elif facts.model_max:
        window = decide_number([(policy.floor_window, Reason.FLOOR), *ceilings])
    else:
        floor = min([policy.floor_window, *(tokens for tokens, _ in ceilings)])
        window = Number(floor, Reason.UNKNOWN_METADATA)
    allocated = round_up(window.tokens, costs.pad)
    unknown = Number(0, Reason.UNKNOWN_METADATA, known=False)
    kv, compute = costs.kv(allocated), costs.compute(allocated)
    there = max(0, use.gpu_layers)
    whole = there > len(costs.shape_of)
    return Resolution(
        numbers=_six(problem, window, unknown, use.cells + costs.streams * allocated, parked=0),
        budget=(
            BudgetRow("free", memory.available_bytes if memory.known else 0, problem.blind),
            BudgetRow("weights", facts.weights_bytes),
            BudgetRow("compute", compute, f"estimate for a window of {allocated}"),
            BudgetRow("kv", kv),
        ),
        k_type=request.k_type,
        v_type=request.v_type,
        kv_bytes=kv,
        compute_bytes=compute,
        weights_bytes=facts.weights_bytes,
        placement=("device" if whole else "split") if there else "host",
        max_sessions=min(policy.max_sessions, use.sessions + 1),  # this one, at the asker's risk
        allocated=allocated,
        gpu_layers=there,
        tensor_split=use.tensor_split if there else (),
        findings=remarks(problem, there),
        streams=request.streams,
    )
