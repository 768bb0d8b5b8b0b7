"""A worker behind the supervisor's keeper and link, without a daemon and without gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modeld.shared.messages import (
    ChunkOut,
    DecodeIn,
    FinalOut,
    LoadOp,
    OpenOp,
    PromptIn,
    SamplingIn,
    SegmentIn,
    Status,
    TurnOp,
)
from modeld.supervisor.fleet import Death, WorkerKeeper
from modeld.supervisor.launcher import LocalLauncher
from modeld.supervisor.link import Link
from modeld.supervisor.restart import RestartPolicy

now = time.perf_counter
SESSION = "bench"
HEARTBEAT_S = 0.25
# Deaths are brought about on purpose here; the product's own back-off would only be waited for.
PATIENT = RestartPolicy(base_s=0.0, jitter=0.0, max_deaths=10_000)


class KeptWorker:
    """Start it, load a model and open a session, run turns; or kill it."""

    def __init__(
        self,
        root: Path,
        module: str,
        on_death: Callable[[Death], None] = lambda death: None,
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._link = Link("bench", HEARTBEAT_S)
        self.keeper = WorkerKeeper(
            "llama", LocalLauncher(module, root), self._link, policy=PATIENT, on_death=on_death
        )
        self._turns = 0

    async def start(self) -> None:
        await self._link.start()
        self.keeper.start()
        await self.keeper.ready(None)

    async def load(self, request: LoadOp, window: int) -> None:
        await self.keeper.call(1, request).result()
        opened = OpenOp(
            session_id=SESSION,
            prompt_format="raw",
            window=window,
            k_type="f16",
            v_type="f16",
            kv_digest="bench",
            runtime_digest="bench",
        )
        await self.keeper.call(1, opened).result()

    async def turn(self, prefix: str, suffix: str, tokens: int) -> dict[str, Any]:
        """Greedy tokens, with the seconds from the first chunk to the final record."""
        self._turns += 1
        request = TurnOp(
            session_id=SESSION,
            turn_id=f"t{self._turns}",
            prefix=PromptIn(segments=[SegmentIn(text=prefix)]),
            suffix=PromptIn(segments=[SegmentIn(text=suffix)]),
            options=DecodeIn(
                sampling=SamplingIn(), max_tokens=tokens, ignore_eos=True, token_ids=True
            ),
        )
        began_s, first_s, ids = now(), 0.0, list[int]()
        operation = self.keeper.call(1, request, credit=64)
        while (payload := await operation.next()) is not None:
            if isinstance(payload, ChunkOut):
                first_s = first_s or now()
                ids += payload.token_ids
                operation.grant(1)
            elif isinstance(payload, Status):
                began_s = now()
        final = await operation.result()
        ended_s = now()
        if not isinstance(final, FinalOut) or final.tokens != len(ids):
            raise RuntimeError(f"the worker's answer was cut short: {final}")
        return {"ids": ids, "first_s": first_s - began_s, "rest_s": ended_s - first_s}

    async def stop(self) -> None:
        await self.keeper.stop(now=True)
        await self._link.close()
