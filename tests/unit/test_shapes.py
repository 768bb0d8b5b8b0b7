"""Our arithmetic against the engine's own sizes, over published model shapes.

The sizes are recorded (``python -m scripts.engine_costs``); tests/native compares a sample of
them with the engine that is linked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modeld.shared.gguf_header import check_extents, read_header
from tests.support import engine_costs, shapes

MIB = 1 << 20
SHAPES = sorted(shapes.SHAPES)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[engine_costs.Row]]:
    """Every shape's rows; each file is gone again once it is read."""
    found = {}
    for name in SHAPES:
        folder = tmp_path_factory.mktemp(name)
        found[name] = engine_costs.compared(name, folder)
        (folder / f"{name}.gguf").unlink()
    return found


def failing(rows: list[engine_costs.Row], name: str) -> str:
    return f"{name}: {len(rows)} rows\n  " + "\n  ".join(map(str, rows[:12]))


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_takes_little_disk_and_its_tensors_lie_in_the_file(
    name: str, tmp_path: Path
) -> None:
    path = shapes.make(name, tmp_path)
    header = read_header(path)
    check_extents(header, header.file_bytes)
    assert path.stat().st_blocks * 512 < 8 * MIB
    assert header.tensor_bytes > 20 * MIB
    assert header.file_bytes - header.data_offset >= header.tensor_bytes


def test_every_shape_is_recorded() -> None:
    table = engine_costs.table()
    assert sorted(table["shapes"]) == SHAPES
    assert table["failed"] == {}
    costs = [cost for name in SHAPES for cost in engine_costs.recorded_costs(name)]
    assert len(costs) > 500
    assert all(bool(cost.compute) != bool(cost.refused) for cost in costs)


def test_only_latent_rows_are_refused_and_only_for_keys_of_another_type_than_values() -> None:
    refused = {
        (name, cost.case.k_type, cost.case.v_type)
        for name in SHAPES
        for cost in engine_costs.recorded_costs(name)
        if cost.refused
    }
    latent = "deepseek-v2-lite"
    assert refused == {(latent, "q8_0", "f16"), (latent, "q4_0", "f16")}


@pytest.mark.parametrize("name", SHAPES)
def test_computed_kv_bytes_are_what_the_engine_prints(
    name: str, rows: dict[str, list[engine_costs.Row]]
) -> None:
    wrong = [row for row in rows[name] if abs(row.kv_difference) > row.printing]
    assert not wrong, failing(wrong, name)


@pytest.mark.parametrize("name", SHAPES)
def test_weights_and_context_together_are_within_a_twentieth_and_hardly_under(
    name: str, rows: dict[str, list[engine_costs.Row]]
) -> None:
    wrong = [row for row in rows[name] if not 0.99 <= row.total <= 1.05]
    assert not wrong, failing(wrong, name)
