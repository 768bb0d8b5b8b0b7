"""Every way to lose a worker: what callers are told, and that a fresh one serves afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from modeld.shared.errors import ModeldError, SessionFatal
from modeld.shared.messages import DetokenizeOp, DetokenizeResult, EnsureOp, LoadOp
from modeld.supervisor.fleet import HeartbeatLimits
from modeld.supervisor.lifecycle import WorkerState
from tests.support.keeping import Kept, decode, kept, prompt, until

CRASHES = [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]
IMPATIENT = HeartbeatLimits(silence_s=1.0, stall_s=0.0)


async def death_of(k: Kept, seen: int = 0) -> None:
    await until(lambda: len(k.deaths) > seen)


async def serves_again(k: Kept, lost_pid: int) -> None:
    await k.keeper.ready(None)
    assert k.keeper.pid != lost_pid
    assert await k.keeper.call(2, DetokenizeOp(ids=[65])).result() == DetokenizeResult(raw=b"A")


@pytest.mark.parametrize("signum", CRASHES)
async def test_a_worker_killed_while_idle_is_replaced(tmp_path: Path, signum: int) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        pid = k.keeper.pid or 0
        os.kill(pid, signum)
        await death_of(k)
        death = k.deaths[0]
        assert (death.cause, death.signal, death.exit_code, death.pid) == (
            "signal", signal.Signals(signum).name, -signum, pid,
        )  # fmt: skip
        assert not psutil.pid_exists(pid)  # reaped
        await serves_again(k, pid)


@pytest.mark.parametrize("signum", CRASHES)
async def test_a_native_crash_in_a_call_ends_that_call_with_its_signal(
    tmp_path: Path, signum: int
) -> None:
    name = signal.Signals(signum).name
    fault = f"decode:after=5:kill={name}:once={tmp_path / 'struck'}"
    async with kept(tmp_path, env={"MODELD_FAULTS": fault}) as k:
        await k.keeper.ready(None)
        await k.open()
        pid = k.keeper.pid or 0
        # Without credit it waits after its first token, so the crash comes after both are sent.
        running = k.keeper.call(1, decode(max_tokens=50, stream_interval_ms=0))
        queued = k.keeper.call(1, DetokenizeOp(ids=[1]))
        running.grant(100)
        for operation in (running, queued):
            with pytest.raises(SessionFatal) as caught:
                await operation.result()
            assert caught.value.metadata["cause"] == "native crash"
            assert caught.value.metadata["signal"] == name
            assert caught.value.metadata["exit_code"] == str(-signum)
        assert k.deaths[0].operations == ("DecodeOp", "DetokenizeOp")
        await serves_again(k, pid)


async def test_the_death_is_announced_before_any_call_learns_of_it(tmp_path: Path) -> None:
    order: list[str] = []
    async with kept(
        tmp_path,
        env={"MODELD_FAULTS": "load:kill=SIGSEGV"},
        on_death=lambda death: order.append("announced"),
    ) as k:
        await k.keeper.ready(None)

        async def call() -> None:
            try:
                await k.keeper.call(1, LoadOp(path="x", model="m", digest="d")).result()
            except ModeldError:
                order.append("answered")

        await call()
    assert order[:2] == ["announced", "answered"]


async def test_nothing_is_sent_again_after_a_death(tmp_path: Path) -> None:
    # A replayed load would find the fault a second time, and kill the second worker as well.
    async with kept(tmp_path, env={"MODELD_FAULTS": "load:kill=SIGKILL"}) as k:
        await k.keeper.ready(None)
        pid = k.keeper.pid or 0
        with pytest.raises(SessionFatal):
            await k.keeper.call(1, LoadOp(path="x", model="m", digest="d")).result()
        await serves_again(k, pid)
        assert len(k.deaths) == 1


@pytest.mark.parametrize("busy", [False, True])
async def test_a_stopped_worker_is_found_by_its_silence(tmp_path: Path, busy: bool) -> None:
    async with kept(tmp_path, limits=IMPATIENT, env={"MODELD_SCRIPT_PREFILL_RATE": "10"}) as k:
        await k.keeper.ready(None)
        await k.open()
        pid = k.keeper.pid or 0
        operation = None
        if busy:
            request = EnsureOp(session_id="s", prefix=prompt("x" * 1000))
            operation = k.keeper.call(1, request)
        os.kill(pid, signal.SIGSTOP)
        await death_of(k)
        assert k.deaths[0].cause == "heartbeat"
        assert k.keeper.state is not WorkerState.IDLE
        if operation is not None:
            with pytest.raises(SessionFatal) as caught:
                await operation.result()
            assert caught.value.metadata["cause"] == "heartbeat"
        await serves_again(k, pid)
        assert not psutil.pid_exists(pid)
        assert len(k.deaths) == 1


async def test_a_call_that_holds_the_interpreter_is_found_and_leaves_its_stacks(
    tmp_path: Path,
) -> None:
    fault = f"prefill:hang:once={tmp_path / 'struck'}"
    async with kept(tmp_path, limits=IMPATIENT, env={"MODELD_FAULTS": fault}) as k:
        await k.keeper.ready(None)
        await k.open()
        pid = k.keeper.pid or 0
        with pytest.raises(SessionFatal) as caught:
            await k.keeper.call(1, EnsureOp(session_id="s", prefix=prompt("x"))).result()
        assert caught.value.metadata["cause"] == "heartbeat"
        await serves_again(k, pid)
        log = (tmp_path / "logs" / "worker-scripted.log").read_text()
        assert "_hang" in log  # written at SIGABRT, before the kill


async def test_a_call_that_beats_but_makes_no_progress_is_found(tmp_path: Path) -> None:
    fault = f"decode:stall:once={tmp_path / 'struck'}"
    limits = HeartbeatLimits(silence_s=30.0, stall_s=0.5)
    async with kept(tmp_path, limits=limits, env={"MODELD_FAULTS": fault}) as k:
        await k.keeper.ready(None)
        await k.open()
        pid = k.keeper.pid or 0
        with pytest.raises(SessionFatal, match="no progress"):
            await k.keeper.call(1, decode(max_tokens=5), credit=9).result()
        await serves_again(k, pid)


async def test_a_call_that_ignores_its_cancel_is_found(tmp_path: Path) -> None:
    struck = tmp_path / "struck"
    fault = f"prefill:slow=3600:once={struck}"
    limits = HeartbeatLimits(silence_s=30.0, cancel_s=0.5)
    async with kept(tmp_path, limits=limits, env={"MODELD_FAULTS": fault}) as k:
        await k.keeper.ready(None)
        await k.open()
        pid = k.keeper.pid or 0
        operation = k.keeper.call(1, EnsureOp(session_id="s", prefix=prompt("x")))
        await until(struck.exists)  # a cancel that came before the start would be obeyed
        operation.cancel()
        with pytest.raises(SessionFatal, match="ignored a cancel"):
            await operation.result()
        await serves_again(k, pid)


async def test_a_stream_that_waits_for_its_reader_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    async with kept(tmp_path, limits=HeartbeatLimits(stall_s=2.0)) as k:
        await k.keeper.ready(None)
        await k.open()
        operation = k.keeper.call(1, decode(max_tokens=9, stream_interval_ms=0), credit=1)
        await asyncio.sleep(3.0)
        operation.grant(100)
        await operation.result()
        assert k.deaths == []


async def test_a_worker_that_leaves_on_its_own_is_replaced(tmp_path: Path) -> None:
    async with kept(tmp_path, env={"MODELD_FAULTS": "load:exit=3"}) as k:
        await k.keeper.ready(None)
        pid = k.keeper.pid or 0
        with pytest.raises(SessionFatal) as caught:
            await k.keeper.call(1, LoadOp(path="x", model="m", digest="d")).result()
        assert (caught.value.metadata["cause"], caught.value.metadata["exit_code"]) == ("exit", "3")
        await serves_again(k, pid)


async def test_no_call_after_a_death_reaches_the_lost_worker(tmp_path: Path) -> None:
    refused: list[str] = []

    def try_to_call(death: object) -> None:
        try:
            k.keeper.call(1, DetokenizeOp(ids=[1]))
        except ModeldError as error:
            refused.append(error.reason)

    async with kept(tmp_path, on_death=try_to_call) as k:
        await k.keeper.ready(None)
        os.kill(k.keeper.pid or 0, signal.SIGKILL)
        await until(lambda: refused)
        assert refused == ["WORKER_UNAVAILABLE"]


SUPERVISOR = """
    import asyncio, os, signal, sys
    from pathlib import Path
    from tests.support.keeping import decode, kept

    async def main():
        async with kept(Path(sys.argv[1]), env={"MODELD_FAULTS": sys.argv[2]}) as k:
            await k.keeper.ready(None)
            await k.open()
            k.keeper.call(1, decode(max_tokens=5), credit=0)
            await asyncio.sleep(0.2)
            print(k.keeper.pid, flush=True)
            await asyncio.sleep(3600)

    asyncio.run(main())
"""


@pytest.mark.parametrize("doing", ["", "decode:hang"], ids=["waiting", "holding the interpreter"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_ends_itself_when_its_supervisor_dies(
    tmp_path: Path, doing: str, signum: int
) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SUPERVISOR), str(tmp_path), doing],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert supervisor.stdout is not None
    worker = psutil.Process(int(supervisor.stdout.readline()))
    supervisor.send_signal(signum)
    supervisor.wait()
    supervisor.stdout.close()
    worker.wait(timeout=30)
    assert not worker.is_running()


def test_the_end_of_the_pipe_alone_ends_a_worker(tmp_path: Path) -> None:
    # As on a system without a parent-death signal: the pipe closes while the parent lives on.
    read_end, write_end = os.pipe()
    env = {
        **os.environ,
        "MODELD_WORKER_ENDPOINT": f"ipc://{tmp_path}/nobody",
        "MODELD_WORKER_EPOCH": "01" * 16,
        "MODELD_WORKER_OWNER": "owner",
        "MODELD_WORKER_SUPERVISOR_PID": str(os.getpid()),
        "MODELD_WORKER_PARENT_FD": str(read_end),
        "MODELD_WORKER_HEARTBEAT_S": "0.25",
    }
    worker = subprocess.Popen(
        [sys.executable, "-m", "modeld.workers.scripted"], env=env, pass_fds=(read_end,)
    )
    os.close(read_end)
    os.close(write_end)
    assert worker.wait(timeout=30) == 70
