"""A keeper over real scripted workers, and the check that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from modeld.shared.messages import (
    DecodeIn,
    DecodeOp,
    LoadOp,
    OpenOp,
    PromptIn,
    SamplingIn,
    SegmentIn,
    TurnOp,
)
from modeld.supervisor.fleet import Death, HeartbeatLimits, WorkerKeeper
from modeld.supervisor.launcher import LocalLauncher
from modeld.supervisor.link import Link
from modeld.supervisor.restart import RestartPolicy

# Tests bring about many deaths and shouldn't wait for them.
QUICK = RestartPolicy(base_s=0.0, jitter=0.0, max_deaths=50)


@dataclass
class Kept:
    keeper: WorkerKeeper
    link: Link
    launcher: LocalLauncher
    deaths: list[Death] = field(default_factory=list)
    states: list[str] = field(default_factory=list)

    async def open(self, generation: int = 1, session_id: str = "s", window: int = 65536) -> None:
        load = LoadOp(path="x", model="m", digest="d")
        await self.keeper.call(generation, load).result()
        await self.keeper.call(
            generation,
            OpenOp(
                session_id=session_id,
                prompt_format="raw",
                window=window,
                k_type="f16",
                v_type="f16",
                kv_digest="",
                runtime_digest="",
            ),
        ).result()


@asynccontextmanager
async def kept(
    tmp_path: Path,
    *,
    env: Mapping[str, str] | None = None,
    policy: RestartPolicy = QUICK,
    limits: HeartbeatLimits | None = None,
    module: str = "modeld.workers.scripted",
    heartbeat_interval_s: float = 0.05,
    start: bool = True,
    on_death: Callable[[Death], None] = lambda death: None,
) -> AsyncIterator[Kept]:
    """A started keeper; afterwards no child process and no descriptor of it is left."""
    before, children = _descriptors(), _children()
    link = Link("owner", heartbeat_interval_s)
    await link.start()
    launcher = LocalLauncher(module, tmp_path, env)
    deaths: list[Death] = []
    states: list[str] = []

    def died(death: Death) -> None:
        deaths.append(death)
        on_death(death)

    keeper = WorkerKeeper(
        "scripted",
        launcher,
        link,
        policy=policy,
        limits=limits,
        on_death=died,
        on_state=lambda: states.append(keeper.state.value),
        jitter=lambda: 0.0,
    )
    try:
        if start:
            keeper.start()
        yield Kept(keeper, link, launcher, deaths, states)
    finally:
        await keeper.stop(now=True)
        await link.close()
    assert not _children() - children
    assert not list((tmp_path / "workers").glob("*.json"))
    gc.collect()
    # The socket library closes its own descriptors on its own thread.
    for _ in range(200):
        left = _descriptors() - before
        if not left:
            break
        await asyncio.sleep(0.01)
    assert not left, left


def _children() -> set[int]:
    """Not only ours: a daemon of other tests may run in this process's care."""
    return {child.pid for child in psutil.Process().children()}


def _descriptors() -> set[tuple[str, str]]:
    """Open descriptors by number and what they are."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add((entry.name, str(entry.readlink())))
        except OSError:
            continue  # the one this listing used
    return found


async def until(condition: Callable[[], object]) -> None:
    """Return once the condition holds."""
    # Polled, since what is waited for may be a process's doing, which no event here tells.
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def options(**given: object) -> DecodeIn:
    return DecodeIn(sampling=SamplingIn(), **given)  # type: ignore[arg-type]


def prompt(text: str) -> PromptIn:
    return PromptIn(segments=[SegmentIn(text=text)])


def turn(prefix: str, suffix: str, **given: object) -> TurnOp:
    return TurnOp(
        session_id="s",
        turn_id="t",
        prefix=prompt(prefix),
        suffix=prompt(suffix),
        options=options(**given),
    )


def decode(**given: object) -> DecodeOp:
    return DecodeOp(session_id="s", turn_id="t", options=options(**given))
