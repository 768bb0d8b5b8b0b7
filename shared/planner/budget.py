"""The memory budget as named terms, and the estimate of an engine context's compute buffer.

Pure arithmetic in bytes. Knows no window policy and takes no reading: numbers in, numbers out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modeld.shared.capacity import (
    BudgetRow,
    CapacityPolicy,
    MemorySnapshot,
    ModelFacts,
    Reason,
    SlotUse,
)
from modeld.shared.planner.kv_math import layer_cells

PAD_CELLS = 256  # llama.cpp rounds n_ctx, and what a windowed layer keeps, up to this
# The isolated layout's context is unified, with the session and one scratch sequence; a windowed
# layer keeps its window for each.
SEQUENCES = 2
F32_BYTES = 4
MIB = 1 << 20


def default_reserve(total_bytes: int) -> int:
    """Host bytes left alone where the operator set none.

    A sixteenth, from 512 MiB to 4 GiB, at most a quarter. The reading of available memory already
    leaves out what the kernel needs; this is room for other programs before the machine swaps.
    """
    return min(max(512 * MIB, total_bytes // 16), 4096 * MIB, total_bytes // 4)


def estimate_compute_bytes(
    facts: ModelFacts,
    context: int,
    *,
    n_batch: int,
    n_ubatch: int,
    outputs: int = 1,
    pad: int = PAD_CELLS,
) -> int:
    """Compute buffer of one context without flash attention: an estimate to be calibrated.

    Its drivers, for a micro-batch of u tokens over c cells: attention scores (heads x u x c), a
    mask (u x c) for each kind of layer, and the widest pair of activations (u x twice the
    feed-forward length), or the logits where those are larger, since the engine re-uses the
    space. All are f32.
    """
    batch = min(n_batch, n_ubatch, context)
    cells = {
        bool(layer.window_cells): layer_cells(layer, context, pad=pad, extra_window_cells=n_ubatch)
        for layer in facts.layers
    }
    if not cells:
        cells = {False: context}
    heads = facts.heads or max(1, facts.embedding_length // 64)
    scores = heads * batch * max(cells.values())
    masks = batch * sum(cells.values())
    wide = max(2 * facts.feed_forward_length, 6 * facts.embedding_length)
    logits = min(outputs, batch) * facts.vocabulary
    return F32_BYTES * (max(scores + batch * wide, logits) + masks)


@dataclass(frozen=True)
class Budget:
    """What ``min(free + loaded + reclaimable - promised - reserve, user_limit - resident)`` leaves.

    ``weights`` are charged once, here, whether the model is resident or not: a reading counts the
    pages of a mapped file as available, so that loading it changes nothing, and ``loaded`` gives
    back only what the engine copied. ``user_limit`` is 0 where not set.
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

    @property
    def _memory_arm(self) -> int:
        return self.free + self.loaded + self.reclaimable - self.promised - self.reserve

    @property
    def bound(self) -> Reason:
        """Which of the two terms is the smaller."""
        if self.user_limit and self.user_limit - self.resident < self._memory_arm:
            return Reason.USER_LIMIT
        return Reason.MEMORY

    @property
    def total(self) -> int:
        if self.bound is Reason.USER_LIMIT:
            return self.user_limit - self.resident
        return self._memory_arm

    @property
    def headroom(self) -> int:
        """Kept for what isn't modelled; nothing of a budget that is spent already."""
        usable = max(0, self.total)
        return usable - int(usable * (1.0 - self.headroom_fraction))

    @property
    def contexts(self) -> int:
        """What is left for KV and compute buffers together; below zero when weights don't fit."""
        return self.total - self.headroom - self.weights

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
        return replace(
            self, free=self.user_limit + self.promised + self.reserve + 1
        )  # only the limit binds

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
            BudgetRow("reclaimable", self.reclaimable, "given back by evicting"),
            BudgetRow(
                "promised", self.promised, "compute buffers of contexts, not all touched yet"
            ),
            BudgetRow("reserve", self.reserve, "left to the rest of the machine"),
            BudgetRow("user_limit", self.user_limit, limit_note),
            BudgetRow("resident", self.resident, "contexts that stay; counts against user_limit"),
            BudgetRow(
                "budget",
                self.total,
                "user_limit - resident"
                if self.bound is Reason.USER_LIMIT
                else "free + loaded + reclaimable - promised - reserve",
            ),
            BudgetRow("headroom", self.headroom, "for what isn't modelled"),
            BudgetRow("weights", self.weights, "mapped file pages, charged once"),
        )


def make_budget(
    facts: ModelFacts,
    policy: CapacityPolicy,
    memory: MemorySnapshot,
    use: SlotUse,
    *,
    reclaim: bool,
) -> Budget:
    """The budget from the readings; with ``reclaim``, as if what is reclaimable were given back."""
    total = min(memory.total_bytes, memory.limit_bytes or memory.total_bytes)
    weights_resident = facts.weights_bytes if use.weights_resident else 0
    reclaimable = use.reclaimable_bytes if reclaim else 0
    return Budget(
        free=memory.available_bytes,
        loaded=min(use.weights_anonymous_bytes, weights_resident),
        reclaimable=reclaimable,
        promised=use.compute_bytes,
        reserve=policy.reserve_bytes or default_reserve(total),
        user_limit=policy.user_limit_bytes,
        resident=max(0, use.resident_bytes - reclaimable),
        weights=facts.weights_bytes,
        headroom_fraction=policy.headroom,
    )
