"""Where a slot's bytes lie is told by device, and planned buffers reach the engine."""

from __future__ import annotations

from modeld.shared.messages import OpenOp, PlacedOut
from tests.support.core_harness import Harness


def test_an_open_carries_its_planned_buffers_to_the_engine() -> None:
    harness = Harness()
    harness.run(
        OpenOp(
            session_id="a",
            prompt_format="raw",
            window=64,
            k_type="f16",
            v_type="f16",
            kv_digest="kv",
            runtime_digest="rt",
            compute_bytes=777,
        )
    )
    assert harness.engine.planned_compute == [777]


def test_bytes_are_told_by_device_for_the_context_the_slot_and_what_is_reclaimable() -> None:
    harness = Harness()
    first = harness.open("a", window=256)
    assert first.placed == [PlacedOut(device="CPU", kv_bytes=512, compute_bytes=1000)]
    assert first.slot_placed == first.placed
    assert first.reclaimable_placed == []
    second = harness.open("b", window=128)
    assert second.placed == [PlacedOut(device="CPU", kv_bytes=256, compute_bytes=1000)]
    assert second.slot_placed == [PlacedOut(device="CPU", kv_bytes=768, compute_bytes=2000)]
    closed = harness.close("a")
    assert closed.slot_placed == second.slot_placed
    assert closed.reclaimable_placed == first.placed
    assert closed.reclaimable_bytes == 1512


def test_bytes_on_several_devices_are_added_up_device_by_device() -> None:
    harness = Harness()
    for name in ("a", "b"):
        harness.open(name, window=64)
    pool = harness.core.model.pool
    assert pool is not None
    for entry in pool.contexts:
        entry.engine_context.placed = [
            PlacedOut(device="CPU", compute_bytes=5),
            PlacedOut(device="CUDA1", kv_bytes=30, compute_bytes=7),
        ]
    assert pool.slot_placed == [
        PlacedOut(device="CPU", compute_bytes=10),
        PlacedOut(device="CUDA1", kv_bytes=60, compute_bytes=14),
    ]
