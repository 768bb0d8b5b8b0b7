"""The capacity planner: facts, policy, a memory reading and a request in; the six numbers out.

Pure: no file, device, clock or environment is read here. A number names the bound that decided
it, and a refusal carries the whole arithmetic.

How the numbers are defined where a definition was needed:

* ``memory_fit`` counts the cells of the slot: those it holds and those that still fit beside
  them, so that it bounds ``hot``. It is in whole pads of the engine and stops at 16,777,216.
* ``effective`` is served exactly as asked; the engine allocates it rounded up to its pad
  (``Resolution.allocated``), and that is what is charged to memory and counted in ``hot``.
* A compute buffer grows with the window, so it is inverted together with the KV cache.
* Without a memory reading, ``memory_fit`` is unknown, nothing is refused for memory, and the
  window is what was asked or else the floor, within the ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modeld.shared.capacity import (
    BudgetRow,
    CapacityPolicy,
    CapacityRequest,
    MemorySnapshot,
    ModelFacts,
    Number,
    Reason,
    Resolution,
    SixNumbers,
    SlotUse,
)
from modeld.shared.errors import InsufficientMemory, InvalidRequest
from modeld.shared.planner.budget import (
    PAD_CELLS,
    SEQUENCES,
    Budget,
    estimate_compute_bytes,
    make_budget,
)
from modeld.shared.planner.kv_math import check_types, fit, kv_bytes, round_up

MAX_CONTEXT_TOKENS = 1 << 24  # beyond every model's ceiling; the engine takes no more than 31 bits
NARROWER_TYPES = ("q8_0", "q4_0")  # offered in a refusal, widest first

Bound = tuple[int, Reason]


@dataclass(frozen=True)
class _Costs:
    """What a context of this model costs, by its window."""

    facts: ModelFacts
    policy: CapacityPolicy
    k_type: str
    v_type: str

    def kv(self, tokens: int) -> int:
        return kv_bytes(
            self.facts.layers,
            tokens,
            self.k_type,
            self.v_type,
            pad=PAD_CELLS,
            extra_window_cells=self.policy.n_ubatch,
            window_sequences=SEQUENCES,
        )

    def compute(self, tokens: int) -> int:
        return estimate_compute_bytes(
            self.facts, tokens, n_batch=self.policy.n_batch, n_ubatch=self.policy.n_ubatch
        )

    def both(self, tokens: int) -> int:
        return self.kv(tokens) + self.compute(tokens)

    def fit(self, room_bytes: int) -> int:
        return fit(
            self.facts.layers,
            room_bytes,
            self.k_type,
            self.v_type,
            pad=PAD_CELLS,
            limit_tokens=MAX_CONTEXT_TOKENS,
            extra_window_cells=self.policy.n_ubatch,
            window_sequences=SEQUENCES,
            overhead_bytes=self.compute,
        )


def resolve(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    memory: MemorySnapshot,
    use: SlotUse,
) -> Resolution:
    """Plan one session. Raises InsufficientMemory with the whole budget, or InvalidRequest.

    For a model that replaces another, ``use`` describes the slot after the switch (no cells) with
    ``reclaimable_bytes`` for what the resident model's contexts, and what it copied of its weights,
    would give back; its mapped pages are in the reading already.
    """
    _check(facts, request, policy)
    costs = _Costs(facts, policy, request.k_type, request.v_type)
    if not memory.known or not (facts.layers or facts.recurrent):
        return _resolve_blind(costs, request, memory, use)
    as_is = make_budget(facts, policy, memory, use, reclaim=False)
    budget = make_budget(facts, policy, memory, use, reclaim=True)
    evicted = _reclaimable_cells(use)
    fits = costs.fit(budget.contexts)
    window = _window(costs, request, use, budget, fits)
    allocated = round_up(window.tokens, PAD_CELLS)
    if allocated > fits:
        raise _refusal(costs, request, window.tokens, budget, fits)
    needed = costs.both(allocated)
    held = use.cells if needed <= as_is.contexts else use.cells - evicted
    cells_fit = max(use.cells + costs.fit(as_is.contexts), use.cells - evicted + fits)
    memory_fit = _memory_number(facts, budget, cells_fit, fits, costs)
    sessions = use.sessions + (budget.contexts // needed if needed else policy.max_sessions)
    return Resolution(
        numbers=_six(facts, request, window, memory_fit, held + allocated),
        budget=_rows(costs, budget, allocated, fits, memory),
        k_type=request.k_type,
        v_type=request.v_type,
        kv_bytes=costs.kv(allocated),
        compute_bytes=costs.compute(allocated),
        weights_bytes=facts.weights_bytes,
        placement="host",
        max_sessions=min(policy.max_sessions, sessions),
        allocated=allocated,
        free_bytes=max(0, needed - as_is.contexts),
    )


def confirm(
    planned: Resolution, *, window: int, slot_cells: int, kv_bytes: int, compute_bytes: int
) -> Resolution:
    """The plan with what the engine reported after it opened the session.

    ``hot`` becomes the measured cells. Predicted bytes stay beside measured ones as rows, so that
    a difference is seen. What was allocated has fitted, so ``memory_fit`` is at least that.
    ``window`` is what the engine allocated; ``effective`` never exceeds it.
    """
    numbers = planned.numbers
    effective, planner = numbers.effective, numbers.planner
    if window < effective.tokens:
        effective = replace(effective, tokens=window, reason=Reason.MEMORY)
        planner = replace(planner, tokens=min(planner.tokens, window))
    cells = max(slot_cells, window)
    memory_fit = numbers.memory_fit
    if memory_fit.known:
        memory_fit = replace(memory_fit, tokens=max(memory_fit.tokens, cells))
    rows = (
        BudgetRow("kv_measured", kv_bytes, f"predicted {planned.kv_bytes}"),
        BudgetRow("compute_measured", compute_bytes, f"predicted {planned.compute_bytes}"),
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
        budget=planned.budget + rows,
        kv_bytes=kv_bytes,
        compute_bytes=compute_bytes,
        allocated=window,
    )


def _check(facts: ModelFacts, request: CapacityRequest, policy: CapacityPolicy) -> None:
    if request.window < 0:
        raise InvalidRequest.of("window", request.window, "0 (automatic) or a number of tokens")
    check_types(facts.layers, request.k_type, request.v_type)
    limits = [n for n in (request.window, facts.model_max, policy.max_window) if n]
    if request.window and min(limits) > MAX_CONTEXT_TOKENS:
        raise InvalidRequest.of("window", request.window, f"at most {MAX_CONTEXT_TOKENS} tokens")
    if not 0.0 <= policy.headroom < 1.0:
        raise InvalidRequest.of("headroom", policy.headroom, "from 0 to below 1")
    if policy.floor_window < 1:
        raise InvalidRequest.of("floor_window", policy.floor_window, "at least 1 token")


def _reclaimable_cells(use: SlotUse) -> int:
    """Cells that go when everything reclaimable is evicted; by share of bytes if not counted."""
    if use.reclaimable_cells or not use.reclaimable_bytes:
        return min(use.cells, use.reclaimable_cells)
    contexts = max(use.resident_bytes, use.reclaimable_bytes)
    return use.cells * use.reclaimable_bytes // contexts


def _decide(bounds: list[Bound], spare: Bound | None = None) -> Number:
    """The smallest bound decides, the first named one at a tie; ``spare`` can only come second."""
    tokens, reason = min(bounds, key=lambda bound: bound[0])
    others = [bound for bound in bounds if bound[1] is not reason]
    if spare is not None:
        others.append(spare)
    if not others:
        return Number(tokens, reason)
    next_tokens, next_reason = min(others, key=lambda bound: bound[0])
    return Number(tokens, reason, next_reason, next_tokens)


def _ceilings(facts: ModelFacts, policy: CapacityPolicy) -> list[Bound]:
    """Bounds that no request and no memory lifts."""
    bounds = []
    if facts.model_max:
        bounds.append((facts.model_max, Reason.MODEL_CEILING))
    if policy.max_window:
        bounds.append((policy.max_window, Reason.USER_LIMIT))
    return bounds


def _memory_reason(facts: ModelFacts, budget: Budget, tokens: int) -> Reason:
    if tokens >= MAX_CONTEXT_TOKENS:
        return Reason.NONE
    return Reason.UNKNOWN_PATTERN if facts.unknown_pattern else budget.bound


def _window(
    costs: _Costs, request: CapacityRequest, use: SlotUse, budget: Budget, fits: int
) -> Number:
    """What to serve, before it is known to fit.

    Automatic: the memory is shared out among the sessions that the operator wants room for, but
    a window isn't made smaller than the floor for sessions that may never come.
    """
    facts, policy = costs.facts, costs.policy
    ceilings = _ceilings(facts, policy)
    if request.window:
        return _decide(
            [(request.window, Reason.REQUEST), *ceilings],
            (fits, _memory_reason(facts, budget, fits)),
        )
    floor = min([policy.floor_window, *(tokens for tokens, _ in ceilings)])
    others = max(1, policy.sessions_share - use.sessions)
    share = costs.fit(budget.contexts // others) if budget.contexts > 0 else 0
    memory_bound = (share, _memory_reason(facts, budget, share))
    if not facts.model_max:
        return Number(floor, Reason.UNKNOWN_METADATA, memory_bound[1], share)
    window = _decide([*ceilings, memory_bound])
    if window.tokens < floor:
        return Number(floor, Reason.FLOOR, memory_bound[1], share)
    return window


def _memory_number(
    facts: ModelFacts, budget: Budget, cells: int, fits: int, costs: _Costs
) -> Number:
    """``cells`` of the slot in all, of which ``fits`` are still to be had."""
    reason = _memory_reason(facts, budget, fits)
    if reason is Reason.UNKNOWN_PATTERN:
        return Number(cells, reason, budget.bound, cells)
    other = budget.other_arm()
    if other is None or reason is Reason.NONE:
        return Number(cells, reason)
    return Number(cells, reason, other.bound, cells - fits + costs.fit(other.contexts))


def _six(
    facts: ModelFacts, request: CapacityRequest, window: Number, memory_fit: Number, hot: int
) -> SixNumbers:
    known = facts.model_max > 0
    model_max = Number(
        facts.model_max,
        Reason.TRAINING_WINDOW if known else Reason.UNKNOWN_METADATA,
        known=known,
    )
    # No cold store is counted yet, so the logical window ends with the dense one.
    planner = Number(window.tokens, Reason.COLD_BUDGET)
    if known and window.tokens == facts.model_max:
        planner = Number(window.tokens, Reason.MODEL_CEILING, Reason.COLD_BUDGET, window.tokens)
    elif known:
        planner = replace(planner, runner_up=Reason.MODEL_CEILING, runner_up_tokens=facts.model_max)
    return SixNumbers(
        model_max=model_max,
        requested=Number(request.window, Reason.REQUEST if request.window else Reason.NONE),
        memory_fit=memory_fit,
        effective=window,
        hot=Number(hot, window.reason, memory_fit.reason, memory_fit.tokens),
        planner=planner,
    )


def _rows(
    costs: _Costs, budget: Budget, allocated: int, fits: int, memory: MemorySnapshot
) -> tuple[BudgetRow, ...]:
    kv, compute = costs.kv(allocated), costs.compute(allocated)
    room = budget.contexts - compute
    kv_note = (
        "window pattern unknown: every layer as full attention"
        if costs.facts.unknown_pattern
        else ""
    )
    return (
        BudgetRow("total", memory.total_bytes),
        BudgetRow("cgroup_limit", memory.limit_bytes, "" if memory.limit_bytes else "none"),
        *budget.rows(),
        BudgetRow("compute", compute, f"estimate for a window of {allocated}"),
        BudgetRow("room", room, "budget - headroom - weights - compute"),
        BudgetRow("kv", kv, kv_note),
        BudgetRow("left", room - kv, "room - kv"),
        BudgetRow("compute_at_memory_fit", costs.compute(fits), f"for {fits} more tokens"),
        BudgetRow("kv_at_memory_fit", costs.kv(fits), f"for {fits} more tokens"),
    )


def _resolve_blind(
    costs: _Costs, request: CapacityRequest, memory: MemorySnapshot, use: SlotUse
) -> Resolution:
    """Without a reading, or without layer facts: nothing is promised of memory."""
    facts, policy = costs.facts, costs.policy
    ceilings = _ceilings(facts, policy)
    if request.window:
        window = _decide([(request.window, Reason.REQUEST), *ceilings])
    elif facts.model_max:
        window = _decide([(policy.floor_window, Reason.FLOOR), *ceilings])
    else:
        floor = min([policy.floor_window, *(tokens for tokens, _ in ceilings)])
        window = Number(floor, Reason.UNKNOWN_METADATA)
    allocated = round_up(window.tokens, PAD_CELLS)
    unknown = Number(0, Reason.UNKNOWN_METADATA, known=False)
    kv, compute = costs.kv(allocated), costs.compute(allocated)
    note = "no memory reading" if not memory.known else "the file doesn't tell its layers"
    return Resolution(
        numbers=_six(facts, request, window, unknown, use.cells + allocated),
        budget=(
            BudgetRow("free", memory.available_bytes if memory.known else 0, note),
            BudgetRow("weights", facts.weights_bytes),
            BudgetRow("compute", compute, f"estimate for a window of {allocated}"),
            BudgetRow("kv", kv),
        ),
        k_type=request.k_type,
        v_type=request.v_type,
        kv_bytes=kv,
        compute_bytes=compute,
        weights_bytes=facts.weights_bytes,
        placement="host",
        max_sessions=min(policy.max_sessions, use.sessions + 1),  # this one, at the asker's risk
        allocated=allocated,
    )


def _refusal(
    costs: _Costs, request: CapacityRequest, window: int, budget: Budget, fits: int
) -> InsufficientMemory:
    facts, policy = costs.facts, costs.policy
    allocated = round_up(window, PAD_CELLS)
    kv, compute = costs.kv(allocated), costs.compute(allocated)
    largest = min([fits, *(tokens for tokens, _ in _ceilings(facts, policy))])
    numbers: dict[str, object] = {
        "model": facts.name,
        "window": window,
        "allocated": allocated,
        "asked_by": "request" if request.window else "floor",
        "bound": budget.deciding(kv + compute).value,
        "k_type": request.k_type,
        "v_type": request.v_type,
        "weights_bytes": budget.weights,
        "kv_bytes": kv,
        "compute_bytes": compute,
        "needed_bytes": budget.weights + kv + compute,
        "free_bytes": budget.free,
        "loaded_bytes": budget.loaded,
        "reclaimable_bytes": budget.reclaimable,
        "promised_bytes": budget.promised,
        "reserve_bytes": budget.reserve,
        "user_limit_bytes": budget.user_limit,
        "resident_bytes": budget.resident,
        "budget_term": budget.bound.value,
        "budget_bytes": budget.total,
        "headroom_bytes": budget.headroom,
        "room_bytes": budget.contexts - compute,
        "largest_window": largest,
        "k_type_that_fits": _narrower(costs, allocated, budget),
    }
    return InsufficientMemory(explain_refusal(numbers), metadata=numbers)


def _narrower(costs: _Costs, allocated: int, budget: Budget) -> str:
    """The widest cache type of the keys at which the window would fit; or "".

    Values stay as they are: their quantisation needs flash attention, which is off.
    """
    for kv_type in NARROWER_TYPES:
        other = replace(costs, k_type=kv_type)
        try:
            check_types(costs.facts.layers, kv_type, costs.v_type)
        except InvalidRequest:
            continue
        if other.kv(allocated) < costs.kv(allocated) and other.both(allocated) <= budget.contexts:
            return kv_type
    return ""


def explain_refusal(numbers: dict[str, object]) -> str:
    """The refusal in words, from its own metadata: what is short, the sum, and what to do."""
    by_limit = numbers["budget_term"] == Reason.USER_LIMIT.value
    source = (
        "user limit {user_limit_bytes} - {resident_bytes} resident"
        if by_limit
        else "{free_bytes} free + {loaded_bytes} loaded + {reclaimable_bytes} reclaimable"
        " - {promised_bytes} promised to open contexts - {reserve_bytes} reserve"
    )
    text = (
        "Not enough memory for {model} with a window of {window} tokens ({asked_by}): it needs "
        "{needed_bytes} bytes ({weights_bytes} weights + {kv_bytes} KV + {compute_bytes} compute)"
        f", and the budget is {{budget_bytes}} bytes ({source}) less {{headroom_bytes}} headroom. "
    )
    if numbers["largest_window"]:
        text += "The largest window that fits is {largest_window} tokens: ask for at most that"
    else:
        text += "No window fits: use a smaller or more quantised model"
    if numbers["k_type_that_fits"]:
        text += ", or for k_type {k_type_that_fits}"
    text += ", or raise the limit." if by_limit else ", or free memory."
    return text.format(**numbers)
