"""Any order of trims, exports, imports, forks and prompts: each session holds what a tape says.

The tape is kept here, from prompts tokenized here and answers computed on a context of the test's
own. The fake engine's KV is a chain of hashes, recomputed from the tape after every step.
"""

from __future__ import annotations

import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from modeld.shared.errors import (
    ContextOverflow,
    DigestMismatch,
    InsufficientMemory,
    InvalidRequest,
    ManifestMismatch,
    UnsupportedFeature,
)
from modeld.shared.messages import ExplainResult
from modeld.workers import residency
from tests.support.core_harness import FakeOp, Harness, options, raw
from tests.support.fake_engine import FakeContext, FakeEngine
from tests.support.residency import export, flipped, fork, import_, trim
from tests.support.saved import told

WINDOW = 96
CONTEXTS = 4
LINES = ("the world\n", "and another line of it\n", "hello\n", "a longer line than the others\n")
PROMPTS = st.lists(st.sampled_from(LINES), min_size=1, max_size=3)
SHARES = st.floats(0, 1)


@dataclass
class Tape:
    digest: str
    held: list[int]  # what the context holds
    known: list[int]  # the prompt and the answer so far
    logical: int = 0


@dataclass(frozen=True)
class Stored:
    path: Path
    digest: str
    begin: int
    tokens: list[int]  # of positions 0 to its end


def common(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


class Residency(RuleBasedStateMachine):
    ranges = True
    block = 1
    sessions: Bundle[str] = Bundle("sessions")
    files: Bundle[Stored] = Bundle("files")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.engine = FakeEngine(
            micro_batch=7, ranges=self.ranges, trimmable=self.ranges, state_block=self.block
        )
        self.harness = Harness(self.engine, max_contexts=CONTEXTS)
        self.tapes: dict[str, Tape] = {}
        self.names = 0
        self.chunk, residency.CHUNK_TOKENS = residency.CHUNK_TOKENS, 16

    def teardown(self) -> None:
        residency.CHUNK_TOKENS = self.chunk
        self.folder.cleanup()

    # --- steps -----------------------------------------------------------------------------

    @initialize(target=sessions, lines=PROMPTS)
    def first(self, lines: list[str]) -> Any:
        name = self.opened("kv")
        self.ensure(name, lines)
        return name

    @initialize(target=files, lines=PROMPTS, digest=st.sampled_from(("kv", "kv", "kv2")))
    def stored(self, lines: list[str], digest: str) -> Any:
        name = self.opened(digest)
        self.ensure(name, lines)
        stored = self.export(name, 0, 1, True)
        self.close(name, True)
        return stored

    @rule(target=sessions, digest=st.sampled_from(("kv", "kv", "kv2")))
    def open(self, digest: str) -> Any:
        if len(self.tapes) >= CONTEXTS - 1:  # one more is needed to import over what is held
            return multiple()
        return self.opened(digest)

    def opened(self, digest: str) -> str:
        name = self.new_name()
        self.harness.open(name, window=WINDOW, kv_digest=digest)
        self.tapes[name] = Tape(digest, self.physical(name, digest), [])
        return name

    @rule(name=consumes(sessions), discard=st.booleans())
    def close(self, name: str, discard: bool) -> None:
        self.harness.close(name, discard=discard)
        del self.tapes[name]

    @rule(name=sessions, lines=PROMPTS)
    def ensure(self, name: str, lines: list[str]) -> None:
        tape = self.tapes[name]
        tokens = [token for line in lines for token in self.engine.tokenizer.encode(line)]
        status = self.harness.ensure(raw(*lines), name)
        own = common(tape.held, tokens)
        if self.ranges or own in (len(tape.held), 0):
            assert status.reused >= own  # another context may hold more
        assert status.reused + status.prefilled == status.resident == len(tokens)
        tape.known, tape.logical = tokens, len(tokens)
        tape.held = self.physical(name, tape.digest)
        assert tape.held[: len(tokens)] == tokens

    @rule(name=sessions, count=st.integers(1, 6))
    def decode(self, name: str, count: int) -> None:
        tape = self.tapes[name]
        if not tape.known or len(tape.known) + count > WINDOW:
            return
        op = FakeOp()
        final = self.harness.decode(options(count), name, op)
        assert op.ids[:count] == self.answer(tape.known, len(op.ids))
        ended = final.stop_reason == "eos"
        tape.known += op.ids[:-1] if ended else op.ids
        tape.logical = len(tape.known) - (0 if ended else 1)
        tape.held = self.physical(name, tape.digest)
        assert tape.held[: tape.logical] == tape.known[: tape.logical]

    @rule(name=sessions, share=SHARES)
    def trim(self, name: str, share: float) -> None:
        tape = self.tapes[name]
        keep = round(share * len(tape.held))
        if not self.ranges and keep not in (0, len(tape.held)):
            try:
                trim(self.harness, keep, name)
            except UnsupportedFeature:
                return
            raise AssertionError("trimmed a memory that can't be")
        assert trim(self.harness, keep, name).dropped == len(tape.held) - keep
        tape.held = tape.held[:keep]
        tape.logical = min(tape.logical, keep)

    @rule(target=files, name=sessions, begin=SHARES, end=SHARES, whole=st.booleans())
    def export(self, name: str, begin: float, end: float, whole: bool) -> Any:
        tape, path = self.tapes[name], Path(self.folder.name) / self.new_name()
        size = len(tape.held)
        begin, end = min(begin, end), max(begin, end)
        first, last = (0, size) if whole else (round(begin * size), round(end * size))
        if end < 0.9:  # else anywhere, to be refused
            first, last = (bound // self.block * self.block for bound in (first, last))
        fits = 0 <= first < last and not first % self.block
        fits = fits and (last == size or not last % self.block)
        try:
            written = export(self.harness, path, name, first, last)
        except (InvalidRequest, UnsupportedFeature) as error:
            whole_only = not self.ranges and (first, last) != (0, size)
            assert not fits or (whole_only and type(error) is UnsupportedFeature)  # noqa: PT017
            assert not path.exists()
            return multiple()
        assert fits
        assert written.tokens == last - first
        return Stored(path, tape.digest, first, tape.held[:last])

    @rule(
        name=sessions,
        file=files,
        refuse=st.one_of(st.none(), st.none(), st.integers(0, 4)),
        cut=st.booleans(),
    )
    def import_(self, name: str, file: Stored, refuse: int | None, cut: bool) -> None:
        tape = self.tapes[name]
        if cut and self.ranges and tape.held[: file.begin] == file.tokens[: file.begin]:
            trim(self.harness, file.begin, name)
            tape.held = tape.held[: file.begin]
            tape.logical = min(tape.logical, file.begin)
        before = self.harness.explain(name)
        follows = tape.held == file.tokens[: file.begin] if file.begin else True
        self.engine.refuse_imports_after = refuse
        try:
            taken = import_(self.harness, file.path, name)
        except InvalidRequest:
            assert len(tape.held) != file.begin > 0
        except ManifestMismatch as error:
            wrong = "identity" if file.digest != tape.digest else "tokens"
            assert error.metadata["reason"] == wrong  # noqa: PT017
            assert wrong == "identity" or not follows
        except DigestMismatch:
            assert refuse is not None
        except InsufficientMemory:
            assert file.begin == 0
            assert tape.held
            assert len(self.tapes) == CONTEXTS
        else:
            assert follows
            assert file.digest == tape.digest
            tape.held = list(file.tokens)
            tape.logical = common(tape.held, tape.known)
            assert (taken.resident, taken.tokens) == (
                tape.logical, len(file.tokens) - file.begin,
            )  # fmt: skip
            return
        finally:
            self.engine.refuse_imports_after = None
        after = self.harness.explain(name)
        assert (after.resident, after.retained) == (before.resident, before.retained)

    @rule(target=files, name=sessions, begin=st.integers(1, 60), refuse=st.integers(-9, 3))
    def park_the_tail_and_bring_it_back(self, name: str, begin: int, refuse: int) -> Any:
        """The second time it is there, the first time the engine may refuse it on the way."""
        begin, size = begin // self.block * self.block, len(self.tapes[name].held)
        if not self.ranges or not 0 < begin < size:
            return multiple()
        parked = self.export(name, begin / size, 1, False)
        assert isinstance(parked, Stored)
        self.trim(name, begin / size)
        self.import_(name, parked, refuse if refuse >= 0 else None, False)
        self.every_session_holds_its_tape()
        if len(self.tapes[name].held) == begin:
            self.import_(name, parked, None, False)
        assert self.tapes[name].held == parked.tokens
        return parked

    @rule(name=sessions, file=files, at=st.integers(0, 1 << 20))
    def import_damaged(self, name: str, file: Stored, at: int) -> None:
        damaged = Path(self.folder.name) / "damaged"
        flipped(file.path, at % file.path.stat().st_size, damaged)
        before = self.told(name)
        try:
            import_(self.harness, damaged, name)
        except (DigestMismatch, ManifestMismatch, InvalidRequest, ContextOverflow):
            assert self.told(name) == before
            return
        except InsufficientMemory:  # for the second context, before the damage was come to
            assert len(self.tapes) == CONTEXTS
            assert self.told(name) == before
            return
        raise AssertionError("a damaged file was taken")

    def told(self, name: str) -> ExplainResult:
        """Of the session: a second context may have come and gone, and been another's cache."""
        explained = told(self.harness, name)
        explained.reclaimable_tokens = 0
        return explained

    @rule(target=sessions, name=sessions)
    def fork(self, name: str) -> Any:
        new, tape = self.new_name(), self.tapes[name]
        try:
            made = fork(self.harness, name, new)
        except InsufficientMemory:
            assert len(self.tapes) == CONTEXTS
            return multiple()
        assert len(self.tapes) < CONTEXTS
        assert (made.copied, made.resident) == (len(tape.held), tape.logical)
        self.tapes[new] = Tape(tape.digest, list(tape.held), list(tape.known), tape.logical)
        return new

    # --- what must hold --------------------------------------------------------------------

    @invariant()
    def every_session_holds_its_tape(self) -> None:
        for name, tape in self.tapes.items():
            session = self.harness.core.model.sessions.by_id[name]
            assert self.physical(name, tape.digest) == tape.held
            assert session.logical == tape.logical
            assert tape.held[: tape.logical] == tape.known[: tape.logical]

    @invariant()
    def every_position_was_computed_after_those_before_it(self) -> None:
        self.harness.check_records()
        pool = self.harness.core.model.pool
        assert pool is not None
        assert len(pool.contexts) <= CONTEXTS
        assert pool.in_use == len(self.tapes)
        for entry in pool.contexts:
            context = entry.engine_context
            assert isinstance(context, FakeContext)
            assert context.hashes == chain(context.tokens)

    @invariant()
    def nothing_is_left_of_unfinished_files(self) -> None:
        assert not list(Path(self.folder.name).glob(".*"))

    # --- helpers ---------------------------------------------------------------------------

    def new_name(self) -> str:
        self.names += 1
        return f"n{self.names}"

    def physical(self, name: str, digest: str) -> list[int]:
        entry = self.harness.core.model.sessions.by_id[name].entry
        assert isinstance(entry.engine_context, FakeContext)
        return list(entry.engine_context.tokens) if entry.kv_digest == digest else []

    def answer(self, known: list[int], count: int) -> list[int]:
        context = FakeContext(self.engine, 4096, 0)
        evaluated = self.engine.evaluated
        context.evaluate(known, 0, cancelled=lambda: False)
        tokens: list[int] = []
        while len(tokens) < count:
            tokens.append(int(np.argmax(context.logits())))
            context.step(tokens[-1], len(context.tokens))
        self.engine.evaluated = evaluated
        return tokens


def chain(tokens: list[int]) -> list[int]:
    hashes, before = [], 17
    for token in tokens:
        before = zlib.crc32(token.to_bytes(4, "little"), before)
        hashes.append(before)
    return hashes


class WholeStates(Residency):
    """Of a memory that can't be trimmed and gives no ranges."""

    ranges = False


class Blocks(Residency):
    block = 8


SETTINGS = settings(
    max_examples=50,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
for machine in (Residency, WholeStates, Blocks):
    machine.TestCase.settings = SETTINGS
TestResidency = Residency.TestCase
TestWholeStates = WholeStates.TestCase
TestBlocks = Blocks.TestCase
