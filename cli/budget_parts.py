"""A plan's bytes as the parts of one picture a memory. Pure arithmetic over an answer's rows.

A memory's own row holds its sum; the host's has what is loaded beside the model among weights and
compute, which the budget's rows tell apart. What a limit withholds follows from the sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from modeld.cli.budget_bar import Part, Picture
from modeld.cli.output import size
from modeld.client.values_capacity import DevicePlan, Resolution

HOST = "host"


def pictures(plan: Resolution, sessions: int = 0) -> tuple[Picture, ...]:
    """The host's memory, then each accelerator, with room for as many ``sessions`` as were asked
    for (0: one, or as many as a refusal says).
    """
    named = {row.name: row.bytes for row in plan.budget}
    told = int(plan.refusal.numbers.get("sessions", "1") or 1)
    more = max(told if plan.refusal.message else sessions, 1) - 1
    rows = plan.devices or (_host_row(plan, named),)
    return tuple(_picture(row, named if row.device_id == HOST else {}, more, plan) for row in rows)


def _host_row(plan: Resolution, named: Mapping[str, int]) -> DevicePlan:
    """For an answer that has no rows by device: everything is the host's."""
    beside = _beside(named)
    buffer = named.get("projector_compute", 0)
    return DevicePlan(
        device_id=HOST,
        name="host memory",
        engine_name="",
        layers=0,
        first_layer=-1,
        weights_bytes=plan.weights_bytes + sum(part.bytes for part in beside) - buffer,
        kv_bytes=plan.kv_bytes,
        compute_bytes=plan.compute_bytes + buffer,
        free_bytes=named.get("free", 0),
        reserve_bytes=named.get("reserve", 0),
        budget_bytes=named.get("budget", 0),
        headroom_bytes=named.get("headroom", 0),
        left_bytes=named.get("left", 0),
    )


def _beside(named: Mapping[str, int]) -> list[Part]:
    """What is loaded beside the model."""
    projector = named.get("projector", 0) + named.get("projector_compute", 0)
    return [
        Part("projector", projector),
        Part("adapters", named.get("adapters", 0)),
        Part("draft", named.get("draft", 0)),
    ]


def _picture(row: DevicePlan, named: Mapping[str, int], more: int, plan: Resolution) -> Picture:
    """The parts of one memory: their sum is what there is, and by how much they are over it."""
    promised, resident = named.get("promised", 0), named.get("resident", 0)
    elsewhere = named.get("elsewhere_untouched", 0)
    have = row.free_bytes + named.get("loaded", 0) + named.get("reclaimable", 0)
    beyond = have - promised - elsewhere - row.reserve_bytes - row.budget_bytes
    if beyond < 0:  # an accelerator's row doesn't tell what a switch gives back there
        have, beyond = have - beyond, 0
    beside = _beside(named)
    buffer = named.get("projector_compute", 0)
    compute = row.compute_bytes - buffer
    others = more * (row.kv_bytes + compute)
    if not plan.refusal.message:  # what fits is never shown as if it didn't
        others = min(others, max(0, row.left_bytes))
    left = row.left_bytes - others
    parts = (
        Part("weights", row.weights_bytes + buffer - sum(part.bytes for part in beside)),
        Part("KV", row.kv_bytes),
        Part("compute", compute),
        *beside,
        Part("more sessions", others),
        Part("resident", resident),
        Part("promised", promised),
        Part("other slots", elsewhere),
        Part("headroom", row.headroom_bytes),
        Part("reserve", row.reserve_bytes),
        Part("beyond the limit", beyond),
        Part("left free", max(0, left)),
    )
    known = row.free_bytes or row.budget_bytes or row.left_bytes
    title = f"{_name(row)}: {size(have + resident) if known else 'unknown'}"
    return Picture(title, parts, max(0, -left), _note(row))


def _name(row: DevicePlan) -> str:
    if row.device_id == HOST:
        return "host memory"
    name = row.name or row.device_id
    return f"{row.engine_name} ({name})" if row.engine_name else name


def _note(row: DevicePlan) -> str:
    return f"layers here: {row.layers}, the output counted as one" if row.layers else ""
