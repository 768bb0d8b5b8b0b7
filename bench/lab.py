"""What the measurements share: the plan, a product daemon, scripted daemons, engine controls.

Everything is started when it is first asked for, and all of it is ended by ``close``.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.control import Control, DecodeRun, EngineSettings, Kind
from bench.daemon import MODEL, Daemon
from bench.runner import TARGET_PAIRS, Book, RunFailed, require
from bench.texts import Words
from modeld.client import Final, PrefillStatus, Session, TurnStream
from modeld.client.prompts import PromptInput

now = time.perf_counter


@dataclass(frozen=True)
class Plan:
    """How much is measured. ``few`` is for what has no target, or is quick's."""

    model: Path
    threads: int
    quick: bool = False
    pairs: int = TARGET_PAIRS
    few: int = 3


@dataclass(frozen=True)
class Turn:
    """One turn through gRPC, as its client saw it."""

    first_s: float
    rest_s: float  # from the first chunk to the final record
    prefix: PrefillStatus
    suffix: PrefillStatus
    final: Final
    ids: tuple[int, ...]

    @property
    def decode(self) -> DecodeRun:
        return DecodeRun(self.final.tokens, self.first_s, self.rest_s, self.ids)


def follow(stream: TurnStream) -> Turn:
    """Read a turn to its end. Raises RunFailed if it made no tokens."""
    began_s = now()
    first_s, tokens, ids = 0.0, 0, list[int]()
    for chunk in stream.chunks():
        first_s = first_s or now()
        tokens += chunk.tokens
        ids += chunk.token_ids
    ended_s = now()
    prefix, suffix, final = stream.prefix_status, stream.suffix_status, stream.final
    require(tokens > 0, "the turn made no tokens")
    if prefix is None or suffix is None or final is None:
        raise RunFailed("the turn ended without its records")
    require(final.tokens == tokens, f"chunks told of {tokens} tokens, the end of {final.tokens}")
    return Turn(first_s - began_s, ended_s - first_s, prefix, suffix, final, tuple(ids))


class Lab:
    def __init__(self, plan: Plan, book: Book, backend: str = "llama") -> None:
        self.plan, self.book, self.backend = plan, book, backend
        self.folder = Path(tempfile.mkdtemp(prefix="modeld-bench-"))
        self.engine = EngineSettings(model=str(plan.model), threads=plan.threads)
        self.daemons: list[Daemon] = []
        self._controls: dict[Kind, Control] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        for control in self._controls.values():
            control.stop()
        for daemon in self.daemons:
            daemon.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def settings(self) -> dict[str, object]:
        """The daemon's, to match the controls'."""
        return {
            "backends": self.backend,
            "threads": self.engine.threads,
            "n_batch": self.engine.n_batch,
            "n_ubatch": self.engine.n_ubatch,
            "idle_release_s": 0,
        }

    @cached_property
    def product(self) -> Daemon:
        """``modeld serve`` with this lab's backend; stays up until the end."""
        daemon = Daemon(self.folder / "product", self.settings)
        self.daemons.append(daemon)
        daemon.import_model(self.plan.model, self.backend)
        return daemon

    @cached_property
    def openvino(self) -> Lab:
        """The same for the OpenVINO worker; its controls run the folder that the product made."""
        lab = self._stack.enter_context(Lab(self.plan, self.book, "openvino"))
        lab.product.client.tokenize(MODEL, "converts and loads it", load=True)
        (made,) = (lab.folder / "product" / "converted").glob("*/openvino_model.xml")
        lab.engine = replace(lab.engine, model=str(made.parent))
        return lab

    @contextmanager
    def scripted(self, tokens_a_second: int) -> Iterator[Daemon]:
        """A daemon whose worker streams a text at a given rate."""
        daemon = Daemon(
            self.folder / f"scripted-{tokens_a_second}",
            self.settings,
            module="modeld.workers.scripted",
            env={"MODELD_SCRIPT_RATE": str(tokens_a_second)},
        )
        try:
            daemon.import_model(self.plan.model)
            yield daemon
        finally:
            daemon.stop()

    def control(self, kind: Kind) -> Control:
        if kind not in self._controls:
            self._controls[kind] = Control(kind, self.engine, self.folder)
        return self._controls[kind]

    @cached_property
    def words(self) -> Words:
        client = self.product.client
        return Words(lambda text: client.tokenize(MODEL, text, load=True).token_ids)

    @contextmanager
    def session(self, prompt_format: str = "raw") -> Iterator[Session]:
        """A session of the product with the controls' window; gives its memory back."""
        session = self.product.client.open_session(
            MODEL, window=self.engine.window, prompt_format=prompt_format
        )
        try:
            window = session.resolution.context.effective.tokens
            require(window == self.engine.window, f"the session's window is {window:,} tokens")
            yield session
        finally:
            session.close(discard=True)

    def turn(
        self,
        session: Session,
        prefix: PromptInput,
        suffix: PromptInput,
        tokens: int,
        *,
        token_ids: bool = False,
    ) -> Turn:
        """Greedy, to exactly ``tokens`` tokens. Raises RunFailed for fewer."""
        stream = session.turn(
            prefix, suffix, max_tokens=tokens, ignore_eos=True, token_ids=token_ids
        )
        turn = follow(stream)
        require(turn.final.tokens == tokens, f"it made {turn.final.tokens}, not {tokens} tokens")
        return turn
