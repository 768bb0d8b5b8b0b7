"""What has been found out about a model on this machine: asked of the engine, seen after loads.

One file a model digest below ``<data_root>/evidence``. All of it can be found out again, so that
a torn or foreign file is dropped with a log line, and a full disk costs only the memory of it.
Knows no policy and no engine.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path
from typing import TypeVar

import msgspec

from modeld.shared.asking import AskAnswer, AskPoint
from modeld.shared.capabilities import Capability
from modeld.shared.capacity import EngineMeasure, MeasuredPoint
from modeld.shared.errors import StorageFull
from modeld.shared.messages import QualityOut
from modeld.shared.quality import Continuation, judge
from modeld.supervisor.durable import write_atomic

log = logging.getLogger(__name__)

T = TypeVar("T")
VERSION = 2  # costs of an older one lack what the processor works in
MAX_FILE_BYTES = 1 << 20
MAX_FILES = 1000  # models; the least recently changed go first
# Kept in a file, the earliest goes first: builds, settings of a build, loads of a setting. All
# together stay well below the file's limit.
MAX_BUILDS, MAX_SETTINGS, MAX_POINTS = 8, 24, 16
LOAD_BOUND = 2  # a load corrects what was asked by this factor at most


class Costs(msgspec.Struct, kw_only=True):
    """What contexts cost under one choice of batch sizes and KV types."""

    dry: list[AskPoint] = []  # asked with nothing allocated
    loads: list[AskPoint] = []  # reported after contexts were made
    notes: list[str] = []
    copied: int = 0  # bytes that loading took beside the file's pages, when it was asked
    copied_at_load: int = 0  # the same of the latest load


class BuildEvidence(msgspec.Struct, kw_only=True):
    """What one build of an engine answered."""

    backend_version: str = ""
    loader: str = "unknown"
    words: str = ""
    generates: str = ""
    traits: dict[str, int] = {}
    costs: dict[str, Costs] = {}


class Run(msgspec.Struct, kw_only=True):
    """One run of the greedy probe."""

    build: str
    backend_version: str
    placement: str  # host | device | split
    unix_ms: int
    prompt_ids: list[int]
    ids: list[int]
    margins: list[float]


class Evidence(msgspec.Struct, kw_only=True):
    version: int = VERSION
    digest: str = ""
    builds: dict[str, BuildEvidence] = {}
    reference: Run | None = None
    latest: Run | None = None  # the latest run after the reference


def cost_key(n_batch: int, n_ubatch: int, k_type: str, v_type: str, flash_attn: bool) -> str:
    return f"batch {n_batch}/{n_ubatch}, K {k_type}, V {v_type}, flash {int(flash_attn)}"


def paged_key(n_ubatch: int, k_type: str, v_type: str, device: str) -> str:
    """As ``cost_key``, for a model that is compiled for one device and its types."""
    return f"chunk {n_ubatch}, K {k_type}, V {v_type}, on {device}"


class EvidenceStore:
    """Evidence by model digest. Methods that write block on the disk.

    With ``read_only`` nothing is written: what is found out lasts as long as the store.
    """

    def __init__(self, data_root: Path, *, read_only: bool = False) -> None:
        self._folder = data_root / "evidence"
        self._read_only = read_only
        self._cache: dict[str, Evidence] = {}

    def get(self, digest: str) -> Evidence:
        """What is known; empty where nothing is."""
        found = self._cache.get(digest)
        if found is None:
            found = self._cache[digest] = self._read(digest)
        return found

    def build(self, digest: str, build: str) -> BuildEvidence:
        """What ``build`` said of the model; an empty one, not stored yet, where it said nothing."""
        return self.get(digest).builds.get(build) or BuildEvidence()

    def costs(self, digest: str, build: str, key: str) -> Costs | None:
        return self.build(digest, build).costs.get(key)

    def measure(self, digest: str, build: str, key: str) -> EngineMeasure:
        """The points for the planner: dry runs, with what loads reported in their places."""
        costs = self.costs(digest, build, key)
        if costs is None:
            return EngineMeasure()
        points = {point.cells: point for point in costs.dry or costs.loads}
        for seen in costs.loads:
            asked = points.get(seen.cells)
            if asked is not None:  # between what was asked, nothing could bound a report
                points[seen.cells] = _corrected(asked, seen)
        ordered = sorted(points.values(), key=lambda point: point.cells)
        return EngineMeasure(
            tuple(MeasuredPoint(p.cells, p.kv_bytes, p.compute_bytes) for p in ordered),
            "dry run" if costs.dry else "loads",
            max(costs.copied, costs.copied_at_load),
        )

    # --- what is found out -----------------------------------------------------------------------

    def asked(self, digest: str, key: str, answer: AskAnswer) -> None:
        """Keep an answer. One that couldn't be had is kept in memory only: asked again later."""
        evidence = self.get(digest)
        known = _kept(evidence.builds, answer.build_digest, BuildEvidence(), MAX_BUILDS)
        known.backend_version = answer.backend_version
        known.loader, known.words = answer.loader, answer.words
        known.generates, known.traits = answer.generates, answer.traits
        costs = _kept(known.costs, key, Costs(), MAX_SETTINGS)
        costs.dry, costs.notes = answer.points, answer.notes
        costs.copied = answer.copied_bytes
        if answer.loader != "unknown":
            self._write(evidence)

    def loaded(self, digest: str, build: str, key: str, point: AskPoint) -> None:
        """Keep what a context cost when it was really made."""
        evidence = self.get(digest)
        known = _kept(evidence.builds, build, BuildEvidence(), MAX_BUILDS)
        costs = _kept(known.costs, key, Costs(), MAX_SETTINGS)
        if point in costs.loads:
            return
        others = [p for p in costs.loads if p.cells != point.cells]
        costs.loads = [*others, point][-MAX_POINTS:]
        self._write(evidence)

    def model_loaded(self, digest: str, build: str, key: str, copied: int) -> None:
        """Keep what loading the model took beside its file's pages, in bytes."""
        evidence = self.get(digest)
        known = _kept(evidence.builds, build, BuildEvidence(), MAX_BUILDS)
        costs = _kept(known.costs, key, Costs(), MAX_SETTINGS)
        costs.copied_at_load = copied
        self._write(evidence)

    def wants_quality(self, digest: str, build: str, placement: str) -> bool:
        """Whether a load should run the greedy probe: until this build has been compared here."""
        evidence = self.get(digest)
        seen = evidence.latest
        return seen is None or (seen.build, seen.placement) != (build, placement)

    def quality_seen(
        self, digest: str, build: str, version: str, placement: str, seen: QualityOut
    ) -> None:
        evidence = self.get(digest)
        run = Run(
            build=build,
            backend_version=version,
            placement=placement,
            unix_ms=time.time_ns() // 1_000_000,
            prompt_ids=seen.prompt_ids,
            ids=seen.ids,
            margins=seen.margins,
        )
        if evidence.reference is None:
            evidence.reference = run
        else:
            evidence.latest = run
        self._write(evidence)

    def quality(self, digest: str) -> Capability:
        """The sixth question's answer."""
        evidence = self.get(digest)
        reference, latest = evidence.reference, evidence.latest
        if reference is None:
            return Capability(
                "quality_certified", "unknown", "no greedy probe has run; the first load runs one"
            )
        if latest is None:
            return Capability(
                "quality_certified",
                "unknown",
                f"one run ({reference.backend_version}) is recorded as the reference; the next "
                "load compares with it",
            )
        verdict = judge(_continuation(reference), _continuation(latest))
        by = f"{latest.backend_version} on {latest.placement}"
        if (latest.build, latest.placement) == (reference.build, reference.placement):
            by += ", a second run"
        return Capability("quality_certified", verdict.answer, f"{verdict.evidence} ({by})")

    # --- files -----------------------------------------------------------------------------------

    def _read(self, digest: str) -> Evidence:
        try:
            content = _read_plain(self._folder / f"{digest}.json")
            evidence = msgspec.json.decode(content, type=Evidence)
        except FileNotFoundError:
            return Evidence(digest=digest)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("evidence on model %s is dropped: %s", digest[:12], error)
            return Evidence(digest=digest)
        if evidence.version != VERSION or evidence.digest != digest:
            log.warning("evidence on model %s is another's or of another version", digest[:12])
            return Evidence(digest=digest)
        return evidence

    def _write(self, evidence: Evidence) -> None:
        if self._read_only:
            return
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._folder / f"{evidence.digest}.json"
            write_atomic(path, msgspec.json.encode(evidence))
            _prune(self._folder)
        except (StorageFull, OSError) as error:
            log.warning("evidence on model %s isn't kept: %s", evidence.digest[:12], error)


def _kept(table: dict[str, T], key: str, new: T, most: int) -> T:
    """What stands under the key, new if need be; of too many others the earliest go."""
    found = table.setdefault(key, new)
    for other in list(table)[: max(0, len(table) - most)]:
        if other != key:
            del table[other]
    return found


def _corrected(asked: AskPoint, seen: AskPoint) -> AskPoint:
    """What the engine was asked, as a load corrects it: never to less, and never without bound."""

    def between(low: int, value: int) -> int:
        return min(max(low, value), LOAD_BOUND * low)

    return AskPoint(
        asked.cells,
        between(asked.kv_bytes, seen.kv_bytes),
        between(asked.compute_bytes, seen.compute_bytes),
    )


def _read_plain(path: Path) -> bytes:
    """A regular file's content, up to the limit: a pipe or a device in its place holds nobody up.

    Raises OSError or ValueError.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes")
    return content


def _prune(folder: Path) -> None:
    files = list(folder.glob("*.json"))
    if len(files) <= MAX_FILES:
        return
    files.sort(key=lambda path: path.stat().st_mtime_ns)
    for path in files[: len(files) - MAX_FILES]:
        path.unlink(missing_ok=True)


def _continuation(run: Run) -> Continuation:
    return Continuation(tuple(run.prompt_ids), tuple(run.ids), tuple(run.margins))
