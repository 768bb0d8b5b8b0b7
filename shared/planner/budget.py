"""The memory budget of one place, the host or an accelerator, as named terms.

Pure arithmetic in bytes. Knows no window policy and takes no reading: numbers in, numbers out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from modeld.shared.capacity import (
    BudgetRow,
    CapacityPolicy,
    Companions,
    DeviceReading,
    MemorySnapshot,
    ModelFacts,
    PlacedUse,
    Reason,
    SlotUse,
)
from modeld.shared.planner.graph import PAD_CELLS, SEQUENCES, estimate_compute_bytes

__all__ = [
    "NO_COMPANIONS",
    "PAD_CELLS",
    "SEQUENCES",
    "Budget",
    "default_reserve",
    "device_budget",
    "device_reserve",
    "estimate_compute_bytes",
    "kept_part",
    "make_budget",
    "needed_total",
]

MIB = 1 << 20
NO_COMPANIONS = Companions()


def default_reserve(total_bytes: int) -> int:
    """Host bytes left alone where the operator set none.

    A sixteenth, from 512 MiB to 4 GiB, at most a quarter. The reading of available memory already
    leaves out what the kernel needs; this is room for other programs before the machine swaps.
    """
    return min(max(512 * MIB, total_bytes // 16), 4096 * MIB, total_bytes // 4)


def device_reserve(total_bytes: int) -> int:
    """Bytes of an accelerator left alone where the operator set none.

    A tenth, at least 512 MiB, at most a quarter: others draw on it too, and its driver keeps
    memory that no reading shows.
    """
    return min(max(512 * MIB, total_bytes // 10), total_bytes // 4)


@dataclass(frozen=True)
class Budget:
    """What ``min(free + loaded + reclaimable - promised - elsewhere_untouched - reserve,
    user_limit - resident - elsewhere)`` leaves.

    ``weights`` are charged once, here, whether the model is resident or not: a reading counts the
    pages of a mapped file as available, so that loading it changes nothing, and ``loaded`` gives
    back only what the engine copied. ``elsewhere`` is what other slots hold, and of it
    ``elsewhere_untouched`` what the reading counts as available all the same. ``user_limit`` is 0
    where not set.
    """

    free: int
    loaded: int
    reclaimable: int
    promised: int
    reserve: int
    user_limit: int
    resident: int
    weights: int
    headroom_fraction: float
    companions: Companions = NO_COMPANIONS
    copied: int = 0  # what the engine keeps of weights beside the file's pages, in its own layout
    elsewhere: int = 0
    elsewhere_untouched: int = 0

    @property
    def fixed(self) -> int:
        """What is charged once, whatever the window."""
        beside = self.companions
        return (
            self.weights
            + self.copied
            + beside.projector_bytes
            + beside.projector_compute_bytes
            + beside.adapter_bytes
            + beside.draft_bytes
        )

    @property
    def memory_arm(self) -> int:
        spent = self.promised + self.elsewhere_untouched + self.reserve
        return self.free + self.loaded + self.reclaimable - spent

    @property
    def limit_arm(self) -> int:
        return self.user_limit - self.resident - self.elsewhere

    @property
    def bound(self) -> Reason:
        """Which of the two terms is the smaller."""
        if self.user_limit and self.limit_arm < self.memory_arm:
            return Reason.USER_LIMIT
        return Reason.MEMORY

    @property
    def total(self) -> int:
        if self.bound is Reason.USER_LIMIT:
            return self.limit_arm
        return self.memory_arm

    @property
    def headroom(self) -> int:
        """Kept for what isn't modelled; nothing of a budget that is spent already."""
        usable = max(0, self.total)
        part, whole = kept_part(self.headroom_fraction)
        return usable - usable * part // whole

    @property
    def spendable(self) -> int:
        return self.total - self.headroom

    @property
    def contexts(self) -> int:
        """What is left for KV and compute buffers together; below zero when weights don't fit."""
        return self.spendable - self.fixed

    def without(self, term: Reason) -> Budget:
        """The same with one term lifted, to find out which one decided."""
        if term is Reason.RESERVE:
            return replace(self, reserve=0)
        if term is Reason.HEADROOM:
            return replace(self, headroom_fraction=0.0)
        return replace(self, user_limit=0)

    def other_arm(self) -> Budget | None:
        """The budget that the larger of the two terms alone would give; None without a limit."""
        if not self.user_limit:
            return None
        if self.bound is Reason.USER_LIMIT:
            return self.without(Reason.USER_LIMIT)
        beside = self.promised + self.elsewhere_untouched + self.reserve
        return replace(self, free=self.user_limit + beside + 1)  # only the limit binds

    def deciding(self, needed_bytes: int) -> Reason:
        """The term that alone keeps ``needed_bytes`` out, or the smaller arm if no single one."""
        for term in (Reason.HEADROOM, Reason.RESERVE, Reason.USER_LIMIT):
            if self.without(term).contexts >= needed_bytes:
                return term
        return self.bound

    def rows(self) -> tuple[BudgetRow, ...]:
        limit_note = "" if self.user_limit else "not set"
        return (
            BudgetRow("free", self.free),
            BudgetRow("loaded", self.loaded, "this model's weights in anonymous memory"),
            BudgetRow("reclaimable", self.reclaimable, "contexts of no session, and parked KV"),
            BudgetRow("promised", self.promised, "to contexts, and not touched yet"),
            *self._elsewhere_rows(),
            BudgetRow("reserve", self.reserve, "left to the rest of the machine"),
            BudgetRow("user_limit", self.user_limit, limit_note),
            BudgetRow("resident", self.resident, "contexts that stay; counts against user_limit"),
            BudgetRow(
                "budget",
                self.total,
                self._sum(),
            ),
            BudgetRow("headroom", self.headroom, "for what isn't modelled"),
            BudgetRow("weights", self.weights, "mapped file pages, charged once"),
            *self._copied_rows(),
            *self._companion_rows(),
        )

    def _copied_rows(self) -> tuple[BudgetRow, ...]:
        if not self.copied:
            return ()
        note = "the engine's own form of them, and what it works in; charged once"
        return (BudgetRow("weights_copied", self.copied, note),)

    def _elsewhere_rows(self) -> tuple[BudgetRow, ...]:
        if not self.elsewhere:
            return ()
        return (
            BudgetRow(
                "elsewhere_untouched",
                self.elsewhere_untouched,
                "of other slots: mapped weights and promises, which count as free",
            ),
            BudgetRow("elsewhere", self.elsewhere, "of other slots; counts against user_limit"),
        )

    def _sum(self) -> str:
        if self.bound is Reason.USER_LIMIT:
            return "user_limit - resident" + (" - elsewhere" if self.elsewhere else "")
        beside = " - elsewhere_untouched" if self.elsewhere else ""
        return f"free + loaded + reclaimable - promised{beside} - reserve"

    def _companion_rows(self) -> tuple[BudgetRow, ...]:
        beside = self.companions
        rows = (
            BudgetRow("projector", beside.projector_bytes, "charged once"),
            BudgetRow("projector_compute", beside.projector_compute_bytes),
            BudgetRow("adapters", beside.adapter_bytes, "charged once"),
            BudgetRow("draft", beside.draft_bytes, "weights, KV and compute of a draft model"),
        )
        return tuple(row for row in rows if row.bytes)


@lru_cache(maxsize=64)
def kept_part(headroom_fraction: float) -> tuple[int, int]:
    """What headroom leaves of a budget, as numerator and denominator: sums are exact however
    large they are. The fraction is the decimal that was written, from 0 to below 1.
    """
    kept = 1 - Fraction(str(headroom_fraction))
    return kept.numerator, kept.denominator


def needed_total(spend_bytes: int, headroom_fraction: float) -> int:
    """The smallest budget that leaves ``spend_bytes`` beside its headroom."""

    part, whole = kept_part(headroom_fraction)
    return -(-max(0, spend_bytes) * whole // part)


def make_budget(
    facts: ModelFacts,
    policy: CapacityPolicy,
    memory: MemorySnapshot,
    use: SlotUse,
    *,
    reclaim: bool,
    companions: Companions = NO_COMPANIONS,
    copied_bytes: int = 0,
) -> Budget:
    """The host's budget from the readings; with ``reclaim``, as if what is reclaimable were given
    back. ``weights`` are all of the model's: a placement that moves some of them says so.
    ``copied_bytes`` is what loading it takes beside them; of a resident model the use tells it.
    """
    total = min(memory.total_bytes, memory.limit_bytes or memory.total_bytes)
    if copied_bytes and use.weights_resident:
        copied_bytes = use.weights_anonymous_bytes or copied_bytes
    weights_resident = facts.weights_bytes + copied_bytes if use.weights_resident else 0
    given_back = use.reclaimable_bytes + use.cold_bytes if reclaim else 0
    return Budget(
        free=memory.available_bytes,
        loaded=min(use.weights_anonymous_bytes, weights_resident),
        reclaimable=given_back,
        promised=use.compute_bytes,
        reserve=policy.reserve_bytes or default_reserve(total),
        user_limit=policy.user_limit_bytes,
        resident=max(0, use.resident_bytes + use.cold_bytes - given_back),
        weights=facts.weights_bytes,
        headroom_fraction=policy.headroom,
        companions=companions,
        copied=copied_bytes,
        elsewhere=use.elsewhere_bytes,
        elsewhere_untouched=use.elsewhere_untouched_bytes,
    )


def device_budget(
    policy: CapacityPolicy, reading: DeviceReading, placed: PlacedUse, *, reclaim: bool
) -> Budget:
    """An accelerator's budget. What is loaded there was allocated, so that it is given back before
    it is charged again. ``weights`` are left 0: the placement charges them.
    """
    reclaimable = placed.reclaimable_bytes if reclaim else 0
    return Budget(
        free=reading.free_bytes,
        loaded=placed.weights_bytes,
        reclaimable=reclaimable,
        promised=0,
        reserve=policy.device_reserve_bytes or device_reserve(reading.total_bytes),
        user_limit=policy.device_limit_bytes,
        resident=max(0, placed.resident_bytes - reclaimable),
        weights=0,
        headroom_fraction=policy.headroom,
    )
