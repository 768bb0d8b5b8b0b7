"""Cold stores for tests: one by itself over made-up blocks, and a core whose model has one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from modeld.shared.messages import (
    ColdIn,
    LoadOp,
    ParkOp,
    ParkResult,
    PromptIn,
    ResumeOp,
    ResumeResult,
)
from modeld.workers.cold_disk import Maker
from modeld.workers.cold_store import BLOCK_TOKENS, ColdStore
from modeld.workers.parking import Parking
from modeld.workers.pooled_context import PooledContext
from modeld.workers.state_file import StateHeader, Tokens, token_chains
from tests.support.core_harness import FakeOp, Harness, options, raw
from tests.support.fake_engine import FakeEngine

# --- a store by itself

MAKER = Maker("fake", "b" * 64, "layout-1")
SIZE = 4096  # bytes of a block's state
IDS = 4 * BLOCK_TOKENS  # bytes of its token ids, where it is the first
PLENTY = 1 << 40


def tokens_of(seed: int, count: int = BLOCK_TOKENS) -> Tokens:
    return np.random.default_rng(seed).integers(0, 1000, count).astype(np.int32)


def state_of(seed: int) -> np.ndarray:
    return np.random.default_rng(1000 + seed).integers(0, 256, SIZE).astype(np.uint8)


def header(tokens: Tokens, begin: int = 0, maker: Maker = MAKER) -> StateHeader:
    ids = tokens
    before, chain = token_chains("kv", ids, (begin, len(ids)))
    return StateHeader(
        backend=maker.backend,
        build_digest=maker.build_digest,
        state_layout=maker.state_layout,
        kv_digest="kv",
        runtime_digest="rt",
        k_type="f16",
        v_type="f16",
        begin=begin,
        end=len(ids),
        token_ids=ids.astype("<i4").tobytes(),
        chain_before=before,
        chain=chain,
        exact=True,
        exact_reason="",
    )


def store(
    ram: int = PLENTY, disk: int = 0, folder: Path | None = None, spare: int = PLENTY
) -> ColdStore:
    return ColdStore(MAKER, ram, disk, folder, spare_bytes=lambda: spare)


def put(kept: ColdStore, seed: int, rank: int = 0) -> str:
    """A first block of tokens of its own; its key."""
    kept.tick()
    made = header(tokens_of(seed))
    kept.put(made, state_of(seed), rank)
    return made.chain


def file_of(folder: Path, key: str) -> Path:
    (path,) = folder.glob(f"*.{key}.*.kv")
    return path


# --- a core with one

GIB = 1 << 30
# The fake engine's tokens are single characters here.
A = "a1b2c3d4e5f6g7h8 " * 40  # 680
B = "z9y8x7w6v5u4t3s2 " * 40


class Parked(Harness):
    """A core whose model was loaded with a cold store."""

    def __init__(
        self,
        engine: FakeEngine | None = None,
        *,
        ram: int = GIB,
        disk: int = 0,
        folder: Path | None = None,
        max_contexts: int = 1,
    ) -> None:
        super().__init__(engine, max_contexts=max_contexts)
        self.cold = ColdIn(ram_bytes=ram, disk_bytes=disk, folder=str(folder or ""))
        self.max_contexts = max_contexts
        self.load()

    def load(self) -> None:
        op = LoadOp(path="m", model="m", digest="d", max_contexts=self.max_contexts, cold=self.cold)
        self.run(op)

    @property
    def parking(self) -> Parking:
        made = self.core.model.parking
        assert made is not None
        return made

    def entry(self, session_id: str = "a") -> PooledContext:
        return self.core.model.sessions.by_id[session_id].entry

    def counters(self, session_id: str = "a") -> dict[str, int]:
        return self.explain(session_id).counters

    def park(self, session_id: str = "a") -> ParkResult:
        result = self.run(ParkOp(session_id=session_id))
        assert isinstance(result, ParkResult)
        return result

    def resume(self, session_id: str = "a", free_bytes: int = 0) -> ResumeResult:
        result = self.run(ResumeOp(session_id=session_id, free_bytes=free_bytes))
        assert isinstance(result, ResumeResult)
        return result


def answer(harness: Harness, prompt: PromptIn, session_id: str = "a", tokens: int = 12) -> str:
    op = FakeOp()
    harness.turn(prompt, raw("?"), options(tokens), session_id, op)
    harness.check_records()
    return op.text
