"""The results as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.runner import CONFIDENCE, RESAMPLES, TARGET_PAIRS, Row, Spec, Target, bootstrap

METHOD = f"""\
How to read it. `product` goes through the Python client, gRPC, the supervisor and the worker;
`engine control` is the same engine in a process of its own without any of these; a
`microbenchmark` is one part alone. Both sides of a comparison read the same text with the same
window, batch, micro-batch, thread count and kernels, with flash attention off and
`OMP_WAIT_POLICY=passive`, `GOMP_SPINCOUNT=1000` (llama-server: its own defaults), and never compute
at the same time. Runs of the sides alternate (A B,
B A, A B, …). A value is the median of the runs or, for a ratio or a difference, of the pairs; in
brackets is its {CONFIDENCE:.0%} bootstrap interval ({RESAMPLES} resamples). A target is met if
the interval reaches it, on {TARGET_PAIRS} pairs or more; `worst` is the run farthest on the wrong
side. A run that made no tokens, or whose token counts are not what was asked for, is a failed
row."""


def number(value: float) -> str:
    """About four significant digits, without an exponent."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 10 else f"{value:.3f}"


def _target(target: Target | None) -> str:
    if target is None:
        return ""
    return f"{'≤' if target.kind == 'at most' else '≥'} {target.limit:g}"


def _line(row: Row) -> str:
    spec = row.spec
    if row.failed or row.interval is None or row.worst is None:
        cells = ["—", "—", "0", _target(spec.target), "**failed**", row.error]
    else:
        interval = row.interval
        value = (
            f"{number(interval.median)} [{number(interval.low)}, {number(interval.high)}] "
            f"{spec.unit}"
        )
        verdict = f"**{row.verdict}**" if row.verdict.startswith("missed") else row.verdict
        cells = [
            value, number(row.worst), str(len(row.samples)), _target(spec.target), verdict,
            row.note,
        ]  # fmt: skip
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {spec.title} | {spec.path} | " + " | ".join(escaped) + " |"


def markdown(rows: Sequence[Row], facts: Mapping[str, Any]) -> str:
    head = [
        "# Benchmarks",
        "",
        "Made by `make bench`; every sample stands in `bench.json`.",
        "",
        *([f"**{facts['label']}**", ""] if facts.get("label") else []),
        METHOD,
        "",
        *(f"- {key}: {value}" for key, value in facts.items() if key != "label"),
        "",
        "| measurement | path | median [interval] | worst | runs | target | verdict | note |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *map(_line, rows)]) + "\n"


def plain(row: Row) -> dict[str, Any]:
    """A row as JSON data."""
    spec, interval, target = row.spec, row.interval, row.spec.target
    return {
        "name": spec.name,
        "title": spec.title,
        "path": spec.path,
        "unit": spec.unit,
        "median": interval.median if interval else None,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "worst": row.worst,
        "runs": len(row.samples),
        "target": {"kind": target.kind, "limit": target.limit} if target else None,
        "verdict": row.verdict,
        "note": row.note,
        "error": row.error,
        "samples": list(row.samples),
    }


def row_of(data: Mapping[str, Any]) -> Row:
    """The row that ``plain`` made ``data`` of, its interval drawn again from its samples."""
    target = data["target"]
    spec = Spec(
        data["name"],
        data["title"],
        data["path"],
        data["unit"],
        Target(target["kind"], target["limit"]) if target else None,
    )
    samples = tuple(data["samples"])
    interval = bootstrap(samples) if samples else None
    return Row(spec, samples, interval, data["note"], data["error"])


def merged(folder: Path, rows: Sequence[Row]) -> list[Row]:
    """The rows that stand in ``folder``, each replaced by its new measurement if there is one."""
    path = folder / "bench.json"
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    fresh = {row.spec.name: row for row in rows}
    kept = [fresh.pop(data["name"]) if data["name"] in fresh else row_of(data) for data in known]
    return [*kept, *fresh.values()]


def write(folder: Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> tuple[Path, Path]:
    """``bench.md`` and ``bench.json`` in ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    text, data = folder / "bench.md", folder / "bench.json"
    text.write_text(markdown(rows, facts), encoding="utf-8")
    document = {"facts": dict(facts), "rows": [plain(row) for row in rows]}
    data.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return text, data
