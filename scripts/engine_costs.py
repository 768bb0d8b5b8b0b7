"""Record what the linked engine says that contexts of published model shapes cost.

Run it from the repository's root after a change of the engine's version or of the shapes:
``python -m scripts.engine_costs`` writes tests/vectors/engine_costs.json anew, in half a minute.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from modeld.shared.gguf_header import GgufHeader, read_header
from tests.support import shapes
from tests.support.dry_run import Case, measure, row_of

OUTPUT = Path(__file__).parents[1] / "tests" / "vectors" / "engine_costs.json"
WINDOWS = (256, 512, 1024, 4096, 16384, 65536)  # tokens
BATCHES = ((512, 512), (2048, 512), (128, 128))
OTHER_TYPES = (("q8_0", "f16"), ("q4_0", "f16"), ("f32", "f32"))
OTHER_WINDOWS = (512, 4096)
COLUMNS = (
    "window",
    "n_batch",
    "n_ubatch",
    "k_type",
    "v_type",
    "cells",
    "caches: cells, layers, K MiB, V MiB",
    "states: R MiB, S MiB",
    "compute MiB",
    "output MiB",
    "the engine's words where it refuses",
)


def cases(ceiling: int) -> list[Case]:
    """f16 at every window and batch, the other types where they could differ."""
    windows = [window for window in WINDOWS if window <= ceiling]
    made = [Case(window, *batch, "f16", "f16") for batch in BATCHES for window in windows]
    for types in OTHER_TYPES:
        made += [Case(window, 512, 512, *types) for window in OTHER_WINDOWS if window <= ceiling]
    return made


def inputs(header: GgufHeader, n_swa: int) -> dict[str, object]:
    """What the costs follow from. Lengths are elements, the window is the engine's, in tokens."""
    recurrent = {
        key.removeprefix(f"{header.architecture}."): value
        for key, value in header.metadata.items()
        if ".ssm." in key or ".shortconv." in key
    }
    return {
        "architecture": header.architecture,
        "blocks": header.block_count,
        "embedding_length": header.embedding_length,
        "feed_forward_length": header.feed_forward_length,
        "head_count": header.head_count,
        "head_count_kv": max(header.head_count_kv),
        "key_length": header.key_length,
        "value_length": header.value_length,
        "vocabulary": header.vocabulary,
        "weights_bytes": header.tensor_bytes,
        "n_swa": n_swa,
        **recurrent,
    }


def record(folder: Path) -> dict[str, object]:
    engine, recorded, failed = "", {}, {}
    for name in sorted(shapes.SHAPES):
        path = shapes.make(name, folder)
        header = read_header(path)
        try:
            measured = measure(path, cases(header.context_length))
        except RuntimeError as error:
            failed[name] = str(error)
            continue
        finally:
            path.unlink()
        engine = measured.engine
        rows = [row_of(cost) for cost in measured.costs]
        recorded[name] = {"inputs": inputs(header, measured.n_swa), "rows": rows}
        print(name, len(rows), file=sys.stderr)
    return {"engine": engine, "columns": COLUMNS, "failed": failed, "shapes": recorded}


def write(table: dict[str, Any], path: Path) -> None:
    """One row a line, so that a difference can be read."""

    def shape(name: str, recorded: dict[str, Any]) -> str:
        rows = ",\n".join(map(json.dumps, recorded["rows"]))
        inputs = json.dumps(recorded["inputs"])
        return f'{json.dumps(name)}: {{"inputs": {inputs}, "rows": [\n{rows}\n]}}'

    body = ",\n".join(shape(*item) for item in table.pop("shapes").items())
    head = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items())
    path.write_text(f'{{\n{head},\n"shapes": {{\n{body}\n}}\n}}\n')


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        write(record(Path(made)), OUTPUT)
