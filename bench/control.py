"""The other side of a pair: an engine in a process of its own, asked over a pipe.

Owns the child's life and what it is asked. What it does with the engine is ``engine_control``'s.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bench.daemon import REPOSITORY, clean_environment
from bench.runner import RunFailed, require

Kind = Literal["bare", "engine", "link", "high_level", "paged", "genai"]


@dataclass(frozen=True)
class EngineSettings:
    """The same on both sides of every pair. Counts are tokens."""

    model: str
    window: int = 8192
    n_batch: int = 512
    n_ubatch: int = 512
    threads: int = 2


@dataclass(frozen=True)
class DecodeRun:
    """One decode: seconds from the first sampled token to the last, and what was sampled."""

    tokens: int
    first_s: float  # suffix and first token
    rest_s: float  # the other tokens
    ids: tuple[int, ...]

    @property
    def ms_a_token(self) -> float:
        """Raises RunFailed for a run that didn't make two tokens."""
        require(self.tokens > 1, f"it made {self.tokens} tokens")
        require(self.rest_s > 0, f"{self.tokens} tokens took {self.rest_s} s")
        return self.rest_s / (self.tokens - 1) * 1000


@dataclass(frozen=True)
class TurnRun:
    """One turn through the high-level class. ``prompt`` and ``tokens`` are counts."""

    prompt: int
    tokens: int
    first_s: float


class Control:
    """A child that runs one kind of engine loop. Raises RunFailed with the child's own words."""

    def __init__(self, kind: Kind, settings: EngineSettings, folder: Path) -> None:
        self.kind = kind
        self._errors = folder / f"control-{kind}.log"
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.engine_control", kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=REPOSITORY,
                env=clean_environment(),
            )
        self._ask("start", folder=str(folder), **asdict(settings))

    def _ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            tail = self._errors.read_text(errors="replace")[-800:]
            raise RunFailed(f"the {self.kind} control ended ({self._process.wait()}): {tail}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunFailed(f"the {self.kind} control: {answer['error']}")
        return answer

    def decode(
        self, prefix: Sequence[int], suffix: Sequence[int], tokens: int, *, texts: Sequence[str]
    ) -> DecodeRun:
        """Greedy tokens after a resident prefix and a new suffix. ``texts``: the same as text."""
        a = self._ask(
            "decode", prefix=list(prefix), suffix=list(suffix), tokens=tokens, texts=list(texts)
        )
        run = DecodeRun(len(a["ids"]), a["first_s"], a["rest_s"], tuple(a["ids"]))
        require(run.tokens == tokens, f"the {self.kind} control made {run.tokens}, not {tokens}")
        return run

    def prefill(self, ids: Sequence[int]) -> float:
        """Seconds for these tokens, from an empty context."""
        a = self._ask("prefill", ids=list(ids))
        require(a["tokens"] == len(ids), f"it evaluated {a['tokens']} of {len(ids)} tokens")
        return float(a["seconds"])

    def turn(self, prefix: str, suffix: str, tokens: int, *, chat: bool) -> TurnRun:
        """A completion of the text, or of a system and a user message."""
        a = self._ask("turn", prefix=prefix, suffix=suffix, tokens=tokens, chat=chat)
        run = TurnRun(a["prompt"], a["tokens"], a["first_s"])
        require(run.tokens > 0, f"the {self.kind} control made no tokens")
        return run

    def stop(self) -> None:
        """The end of its input ends it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
