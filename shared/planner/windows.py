"""Which window is served, and where its model goes: the decision, before anyone words it.

Pure: facts, policy, readings and a request in. Knows no report and no refusal's text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modeld.shared.capacity import (
    CapacityPolicy,
    CapacityRequest,
    Companions,
    EngineMeasure,
    MachineReading,
    ModelFacts,
    Number,
    PlacedUse,
    Placement,
    Reason,
    SlotUse,
)
from modeld.shared.errors import InvalidRequest
from modeld.shared.planner.budget import Budget, device_budget, make_budget
from modeld.shared.planner.costs import Costs
from modeld.shared.planner.kv_math import round_up
from modeld.shared.planner.openvino_cost import copied_bytes
from modeld.shared.planner.openvino_kv import check_types_for
from modeld.shared.planner.placement import (
    HOST,
    MAX_CONTEXT_TOKENS,
    Layout,
    Place,
    Spread,
    usable,
)

Bound = tuple[int, Reason]
MAX_SESSIONS = 1024  # that may be asked for; the setting max_sessions allows no more
LEAST_SHARE, MOST_SHARE = 1e-6, 1e6  # of tensor_split, beside 0


@dataclass(frozen=True)
class Problem:
    """Everything that a plan is made from."""

    facts: ModelFacts
    request: CapacityRequest
    policy: CapacityPolicy
    machine: MachineReading
    use: SlotUse
    companions: Companions
    measure: EngineMeasure

    @property
    def blind(self) -> str:
        """Why nothing can be promised of memory; "" where it can."""
        if not self.machine.host.known:
            return "no memory reading"
        if not (self.facts.layers or self.facts.recurrent):
            return "the file doesn't tell its layers"
        read = {device.id for device in usable(self.machine.devices)}
        lost = [row.device_id for row in self.use.on_devices if row.device_id not in read]
        if self.use.gpu_layers > 0 and (lost or not read):
            return f"no reading of {', '.join(lost) or 'any accelerator'}, where the model lives"
        return ""

    def costs(self) -> Costs:
        request = self.request
        streams = max(1, request.streams)
        return Costs(self.facts, self.policy, request.k_type, request.v_type, self.measure, streams)

    def check(self) -> None:
        """Raises InvalidRequest for what no machine could be asked."""
        facts, request, policy = self.facts, self.request, self.policy
        if request.window < 0:
            raise InvalidRequest.of("window", request.window, "0 (automatic) or a number of tokens")
        if not 0 <= request.sessions <= MAX_SESSIONS:
            allowed = f"0 (the policy's) or a number up to {MAX_SESSIONS}"
            raise InvalidRequest.of("sessions", request.sessions, allowed)
        check_types_for(facts.model_type, facts.layers, request.k_type, request.v_type)
        limits = [n for n in (request.window, facts.model_max, policy.max_window) if n]
        if request.window and min(limits) > MAX_CONTEXT_TOKENS:
            raise InvalidRequest.of(
                "window", request.window, f"at most {MAX_CONTEXT_TOKENS} tokens"
            )
        if not 0.0 <= policy.headroom < 1.0:
            raise InvalidRequest.of("headroom", policy.headroom, "from 0 to below 1")
        if policy.floor_window < 1:
            raise InvalidRequest.of("floor_window", policy.floor_window, "at least 1 token")
        if not all(is_share(share) for share in policy.tensor_split):
            allowed = f"shares of 0, or from {LEAST_SHARE:g} to {MOST_SHARE:.0f}"
            raise InvalidRequest.of("tensor_split", policy.tensor_split, allowed)

    @property
    def most_sessions(self) -> tuple[str, int]:
        """The setting that says how many sessions of this kind may be open at once, and how many
        those are: contexts, or the streams of the one batch that a slot has.
        """
        streams = self.request.streams
        return ("batch_streams", streams) if streams else ("max_sessions", self.policy.max_sessions)

    @property
    def beyond_settings(self) -> bool:
        """Whether more sessions are asked for than the operator lets be open at once."""
        return self.request.sessions > self.most_sessions[1]


def is_share(share: float) -> bool:
    """Whether it can stand in a ``tensor_split``."""
    return share == 0 or LEAST_SHARE <= share <= MOST_SHARE


@dataclass(frozen=True)
class Decision:
    """The window that is to be served, and where; ``spread`` is None where it doesn't fit."""

    problem: Problem
    costs: Costs
    layout: Layout  # of what the policy allows, with shedding if it does
    window: Number
    allocated: int
    need: int  # contexts of that window that must fit
    fits: int  # the largest window of which as many would
    fits_one: int
    memory_fit: Number
    spread: Spread | None

    @property
    def held(self) -> int:
        """Cells that stay when the window is opened."""
        use = self.problem.use
        if self.spread is None or without_cold(self.layout, use).holds(self.spread, reclaim=False):
            return use.cells
        return use.cells - reclaimable_cells(use)


# --- the machine ---------------------------------------------------------------------------------


def make_layout(problem: Problem, costs: Costs) -> Layout:
    """The machine's places with their budgets, and what may go there."""
    facts, policy, use = problem.facts, problem.policy, problem.use

    def host_budget(reclaim: bool) -> Budget:
        return make_budget(
            facts,
            policy,
            problem.machine.host,
            use,
            reclaim=reclaim,
            companions=problem.companions,
            copied_bytes=copied_bytes(facts, problem.measure, policy.n_ubatch),
        )

    host = Place(HOST, "host memory", "", host_budget(True), host_budget(False))
    fixed = use.gpu_layers if use.gpu_layers >= 0 else policy.gpu_layers
    readings = usable(problem.machine.devices)
    if fixed == 0 or facts.model_type != "llama" or not facts.layers:
        readings = ()
    placed = {row.device_id: row for row in use.on_devices}
    devices = tuple(
        Place(
            reading.id,
            reading.name,
            reading.engine_name,
            device_budget(policy, reading, placed.get(reading.id, PlacedUse("")), reclaim=True),
            device_budget(policy, reading, placed.get(reading.id, PlacedUse("")), reclaim=False),
        )
        for reading in readings
    )
    return Layout(
        costs,
        host,
        devices,
        layers=fixed if fixed >= 0 else None,
        split=_split(use if use.gpu_layers >= 0 else policy, devices, use),
        shed=policy.placement is Placement.SHED,
    )


def without_cold(layout: Layout, use: SlotUse) -> Layout:
    """The same with parked KV given back, which goes before any context does."""
    if not use.cold_bytes:
        return layout
    # As things are nothing is reclaimable, so that all that is held counts as resident.
    given = replace(layout.host.as_is, reclaimable=use.cold_bytes, resident=use.resident_bytes)
    return layout.with_places(replace(layout.host, as_is=given), layout.devices)


def _split(
    source: SlotUse | CapacityPolicy, devices: tuple[Place, ...], use: SlotUse
) -> tuple[float, ...]:
    """Shares for these devices: the operator's, or of the model as it was loaded."""
    split = source.tensor_split
    if source is use and len(split) != len(devices):
        # As loaded, but onto other devices than are read now: they are told apart by their ids.
        by_id = dict(zip((row.device_id for row in use.on_devices), split, strict=False))
        split = tuple(by_id.get(device.id, 0.0) for device in devices)
    missing = (0.0,) * max(0, len(devices) - len(split))
    return (*split[: len(devices)], *missing)


# --- the window ----------------------------------------------------------------------------------


def decide(problem: Problem) -> Decision:
    """Choose the window and the placement. The problem must have been checked, and not be blind."""
    costs = problem.costs()
    layout = make_layout(problem, costs)
    use = problem.use
    need = _need(problem)
    fits_one = layout.fit()
    fits = fits_one if need == 1 else layout.fit(need)
    window, spread = _window(problem, layout, need, fits)
    as_is, there = fits_one, without_cold(layout, use)
    if any(place.budget != place.as_is for place in (there.host, *there.devices)):
        as_is = there.fit(reclaim=False)
    evicted = reclaimable_cells(use)
    streams = costs.streams
    cells = max(use.cells + streams * as_is, use.cells - evicted + streams * fits_one)
    return Decision(
        problem,
        costs,
        layout,
        window,
        round_up(window.tokens, costs.pad),
        need,
        fits,
        fits_one,
        _memory_number(problem.facts, layout, cells, fits_one),
        spread,
    )


def _need(problem: Problem) -> int:
    """Contexts that must fit beside those that are open; one for all the streams of a batch."""
    request = problem.request
    return 1 if request.streams else max(1, request.sessions - problem.use.sessions)


def _window(problem: Problem, layout: Layout, need: int, fits: int) -> tuple[Number, Spread | None]:
    """What to serve, and where it fits.

    Automatic: the memory is shared out among the sessions that the operator wants room for, but
    a window isn't made smaller than the floor for sessions that may never come. Layers are shed
    only for a window that was asked for, or for the floor.
    """
    facts, request, policy = problem.facts, problem.request, problem.policy
    ceilings = ceilings_of(facts, policy)
    pad = layout.costs.pad
    if request.window:
        window = decide_number(
            [(request.window, Reason.REQUEST), *ceilings],
            (fits, memory_reason(facts, layout, fits)),
        )
        return window, layout.spread(round_up(window.tokens, pad), need)
    floor = min([policy.floor_window, *(tokens for tokens, _ in ceilings)])
    share = max(1, policy.sessions_share - problem.use.sessions)
    others = need if request.sessions else -(-share // layout.costs.streams)
    whole = replace_shed(layout)
    share = whole.fit(others)
    memory_bound = (share, memory_reason(facts, whole, share))
    if not facts.model_max:
        window = Number(floor, Reason.UNKNOWN_METADATA, memory_bound[1], share)
    else:
        window = decide_number([*ceilings, memory_bound])
        if window.tokens < floor:
            window = Number(floor, Reason.FLOOR, memory_bound[1], share)
    allocated = round_up(window.tokens, pad)
    return window, whole.spread(allocated, need) or layout.spread(allocated, need)


def replace_shed(layout: Layout) -> Layout:
    """The same without leaving layers on the host for want of memory."""
    if not layout.shed:
        return layout
    return layout.with_places(layout.host, layout.devices, shed=False)


def decide_number(bounds: list[Bound], spare: Bound | None = None) -> Number:
    """The smallest bound decides, the first named one at a tie; ``spare`` can only come second."""
    tokens, reason = min(bounds, key=lambda bound: bound[0])
    others = [bound for bound in bounds if bound[1] is not reason]
    if spare is not None:
        others.append(spare)
    if not others:
        return Number(tokens, reason)
    next_tokens, next_reason = min(others, key=lambda bound: bound[0])
    return Number(tokens, reason, next_reason, next_tokens)


def ceilings_of(facts: ModelFacts, policy: CapacityPolicy) -> list[Bound]:
    """Bounds that no request and no memory lifts."""
    bounds = []
    if facts.model_max:
        bounds.append((facts.model_max, Reason.MODEL_CEILING))
    if policy.max_window:
        bounds.append((policy.max_window, Reason.USER_LIMIT))
    return bounds


def reclaimable_cells(use: SlotUse) -> int:
    """Cells that go when everything reclaimable is evicted; by share of bytes if not counted."""
    on_devices = sum(row.reclaimable_bytes for row in use.on_devices)
    reclaimable = use.reclaimable_bytes + on_devices
    if use.reclaimable_cells or not reclaimable:
        return min(use.cells, use.reclaimable_cells)
    resident = use.resident_bytes + sum(row.resident_bytes for row in use.on_devices)
    return use.cells * reclaimable // max(resident, reclaimable)


def memory_reason(facts: ModelFacts, layout: Layout, tokens: int) -> Reason:
    """What keeps the machine from holding more than ``tokens``."""
    if tokens >= MAX_CONTEXT_TOKENS:
        return Reason.NONE
    return Reason.UNKNOWN_PATTERN if facts.unknown_pattern else _bound(layout, tokens)


def _bound(layout: Layout, tokens: int) -> Reason:
    """The smaller arm of the budget that decides: what the operator allows, or what is there."""
    if not layout.devices:
        return layout.host.budget.bound
    lifted = _without_limits(layout)
    if lifted is not None and lifted.spread(tokens + layout.costs.pad, balanced=False) is not None:
        return Reason.USER_LIMIT
    return Reason.MEMORY


def _without_limits(layout: Layout) -> Layout | None:
    """The machine as if the operator had set no limit; None where no limit binds."""
    places = (layout.host, *layout.devices)
    if all(place.budget.bound is not Reason.USER_LIMIT for place in places):
        return None
    host, *devices = (
        replace(
            place,
            budget=place.budget.without(Reason.USER_LIMIT),
            as_is=place.as_is.without(Reason.USER_LIMIT),
        )
        for place in places
    )
    return layout.with_places(host, tuple(devices))


def _memory_number(facts: ModelFacts, layout: Layout, cells: int, fits: int) -> Number:
    """``cells`` of the slot in all; contexts of ``fits`` tokens a stream are still to be had."""
    reason = memory_reason(facts, layout, fits)
    if reason is Reason.UNKNOWN_PATTERN:
        return Number(cells, reason, _bound(layout, fits), cells)
    if reason is Reason.NONE:
        return Number(cells, reason)
    if layout.devices:
        lifted = _without_limits(layout) if reason is Reason.USER_LIMIT else None
        if lifted is None:
            return Number(cells, reason)
        more = layout.costs.streams * (lifted.fit() - fits)
        return Number(cells, reason, Reason.MEMORY, cells + more)
    other = layout.host.budget.other_arm()
    if other is None:
        return Number(cells, reason)
    there = layout.with_places(replace(layout.host, budget=other), ())
    more = layout.costs.streams * (there.fit() - fits)
    return Number(cells, reason, other.bound, cells + more)
