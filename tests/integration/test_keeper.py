"""The keeper over real worker processes that run the scripted handler."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from modeld.shared.errors import ContextOverflow, SessionFatal, WorkerUnavailable
from modeld.shared.messages import (
    ChunkOut,
    DetokenizeOp,
    EnsureOp,
    FinalOut,
    Heartbeat,
    LoadOp,
    Progress,
    Status,
    SuffixOp,
    TokenizeOp,
    TokenizeResult,
)
from modeld.supervisor.fleet import HeartbeatLimits
from modeld.supervisor.lifecycle import WorkerState
from modeld.supervisor.link import Operation
from modeld.supervisor.process import LOG_MAX_BYTES, BoundedLog, started_at, sweep_leftovers
from modeld.supervisor.restart import RestartPolicy
from tests.support.keeping import Kept, decode, kept, prompt, turn, until


async def chunks(operation: Operation, grant: int = 0) -> list[ChunkOut]:
    out = []
    while (payload := await operation.next()) is not None:
        if isinstance(payload, ChunkOut):
            out.append(payload)
            operation.grant(grant)
    return out


async def kill(k: Kept) -> None:
    seen = len(k.deaths)
    os.kill(k.keeper.pid or 0, signal.SIGKILL)
    await until(lambda: len(k.deaths) > seen)


async def test_a_worker_says_who_it_is_and_serves(tmp_path: Path) -> None:
    async with kept(tmp_path) as k:
        hello = await k.keeper.ready(None)
        assert (hello.backend, hello.pid) == ("scripted", k.keeper.pid)
        assert k.keeper.state is WorkerState.IDLE
        result = await k.keeper.call(
            1, TokenizeOp(text="hi", parse_special=False, add_bos=False)
        ).result()
        assert result == TokenizeResult(ids=[104, 105], pieces=[b"h", b"i"])


async def test_a_turn_streams_its_statuses_its_text_and_one_final_record(tmp_path: Path) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        await k.open()
        operation = k.keeper.call(1, turn("stable", "volatile", max_tokens=20), credit=100)
        states = [k.keeper.state]
        prefix, suffix = await operation.next(), await operation.next()
        assert isinstance(prefix, Status)
        assert isinstance(suffix, Status)
        assert (prefix.part, prefix.prefilled, suffix.part, suffix.resident) == (
            "prefix", 6, "suffix", 14,
        )  # fmt: skip
        text = "".join(chunk.text for chunk in await chunks(operation))
        assert text == "The quick brown fox "
        final = await operation.result()
        assert isinstance(final, FinalOut)
        assert (final.stop_reason, final.tokens, final.resident) == ("length", 20, 34)
        assert [*states, k.keeper.state] == [WorkerState.BUSY, WorkerState.IDLE]


async def test_prefix_reuse_is_counted_to_the_token(tmp_path: Path) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        await k.open()
        await k.keeper.call(1, EnsureOp(session_id="s", prefix=prompt("abcdef"))).result()
        again = await k.keeper.call(1, EnsureOp(session_id="s", prefix=prompt("abcdef"))).result()
        assert isinstance(again, Status)
        assert (again.reused, again.dropped, again.prefilled) == (5, 0, 1)
        other = await k.keeper.call(1, EnsureOp(session_id="s", prefix=prompt("abcXY"))).result()
        assert isinstance(other, Status)
        assert (other.reused, other.dropped, other.prefilled) == (3, 3, 2)
        suffix = await k.keeper.call(1, SuffixOp(session_id="s", suffix=prompt("z"))).result()
        assert isinstance(suffix, Status)
        assert (suffix.prefix, suffix.suffix, suffix.resident) == (5, 1, 6)


async def test_a_load_reports_progress(tmp_path: Path) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        operation = k.keeper.call(1, LoadOp(path="x", model="m", digest="d"))
        fractions = []
        while isinstance(payload := await operation.next(), Progress):
            fractions.append(payload.fraction)
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0


async def test_a_typed_refusal_leaves_the_worker_up(tmp_path: Path) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        await k.open(window=4)
        with pytest.raises(ContextOverflow) as caught:
            await k.keeper.call(1, EnsureOp(session_id="s", prefix=prompt("abcdef"))).result()
        assert caught.value.metadata["must_drop"] == "2"
        assert k.keeper.state is WorkerState.IDLE


async def test_without_credit_the_worker_pauses_and_nothing_is_lost(tmp_path: Path) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        await k.open()
        operation = k.keeper.call(1, decode(max_tokens=40, stream_interval_ms=0), credit=3)
        first = [await operation.next() for _ in range(3)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(operation.next(), 0.2)
        operation.grant(1000)
        rest = await chunks(operation)
        text = "".join(c.text for c in [*first, *rest] if isinstance(c, ChunkOut))
        assert text == "The quick brown fox jumps over the lazy "


async def test_cancel_ends_a_stream_that_waits_for_credit(tmp_path: Path) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        await k.open()
        operation = k.keeper.call(1, decode(max_tokens=40, stream_interval_ms=0), credit=1)
        await operation.next()
        operation.cancel()
        final = await operation.result()
        assert isinstance(final, FinalOut)
        assert final.stop_reason == "cancelled"


async def test_a_cancel_reaches_an_operation_that_has_not_started(tmp_path: Path) -> None:
    async with kept(tmp_path, env={"MODELD_SCRIPT_RATE": "50"}) as k:
        await k.keeper.ready(None)
        await k.open()
        running = k.keeper.call(1, decode(max_tokens=10), credit=100)
        queued = k.keeper.call(1, decode(max_tokens=10), credit=100)
        queued.cancel()
        final = await queued.result()
        assert isinstance(final, FinalOut)
        assert (final.stop_reason, final.tokens) == ("cancelled", 0)
        first = await running.result()
        assert isinstance(first, FinalOut)
        assert first.tokens == 10


async def test_heartbeats_show_progress_and_the_running_operation(tmp_path: Path) -> None:
    async with kept(tmp_path, env={"MODELD_SCRIPT_RATE": "200"}) as k:
        await k.keeper.ready(None)
        await k.open()
        operation = k.keeper.call(1, decode(max_tokens=5000, ignore_eos=True), credit=10_000)

        def beat() -> Heartbeat:
            return k.keeper.heartbeat or Heartbeat(progress=0, busy_op=0)

        await until(lambda: beat().busy_op == operation.op_id)
        seen = k.keeper.progress
        await until(lambda: k.keeper.progress > seen)
        assert beat().rss_bytes > 1_000_000
        operation.cancel()
        await operation.result()


async def test_a_bug_in_the_worker_crosses_as_a_typed_error_without_its_words(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path, env={"MODELD_FAULTS": "decode:raise"}) as k:
        await k.keeper.ready(None)
        await k.open()
        with pytest.raises(SessionFatal) as caught:
            await k.keeper.call(1, decode(max_tokens=5), credit=9).result()
        assert caught.value.metadata == {"cause": "internal"}
        assert "injected" not in caught.value.message
        assert "InjectedFault" in (tmp_path / "logs" / "worker-scripted.log").read_text()


async def test_a_drain_lets_running_calls_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async with kept(tmp_path, env={"MODELD_SCRIPT_RATE": "100"}) as k:
        await k.keeper.ready(None)
        await k.open()
        operation = k.keeper.call(1, decode(max_tokens=20), credit=100)
        draining = asyncio.create_task(k.keeper.drain(30.0))
        await asyncio.sleep(0)
        with pytest.raises(WorkerUnavailable):
            k.keeper.call(1, DetokenizeOp(ids=[1]))
        final = await operation.result()
        assert isinstance(final, FinalOut)
        assert final.tokens == 20
        await draining
        assert k.keeper.state is WorkerState.STOPPED
        assert k.deaths == []


async def test_a_drain_that_runs_out_of_time_ends_the_call_as_fatal(tmp_path: Path) -> None:
    async with kept(tmp_path, env={"MODELD_SCRIPT_RATE": "1"}) as k:
        await k.keeper.ready(None)
        await k.open()
        operation = k.keeper.call(1, decode(max_tokens=1000), credit=100)
        await k.keeper.drain(0.1)
        with pytest.raises(SessionFatal) as caught:
            await operation.result()
        assert caught.value.metadata["cause"] == "drain"


async def test_a_recycled_worker_is_another_process_and_no_death(tmp_path: Path) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        old = k.keeper.pid
        await k.keeper.recycle()
        await k.keeper.ready(None)
        assert k.keeper.pid != old
        assert (k.deaths, k.keeper.restarts) == ([], 1)


async def test_a_worker_that_cannot_boot_is_given_up_with_its_own_words(tmp_path: Path) -> None:
    async with kept(tmp_path, env={"MODELD_FAULTS": "nonsense:hang"}) as k:
        with pytest.raises(WorkerUnavailable) as caught:
            await k.keeper.ready(None)
        assert caught.value.metadata["state"] == "failed"
        assert caught.value.retry_after_s is None
        assert "no point 'nonsense'" in caught.value.message
        assert k.keeper.restarts == 0
        k.launcher.env.clear()
        k.keeper.clear()
        await k.keeper.ready(None)


async def test_a_program_that_is_not_there_counts_as_a_death(tmp_path: Path) -> None:
    async with kept(tmp_path, policy=RestartPolicy(max_deaths=0), start=False) as k:
        k.launcher.python = str(tmp_path / "no-python")
        k.keeper.start()
        with pytest.raises(WorkerUnavailable, match="couldn't be started"):
            await k.keeper.ready(None)


async def test_a_crash_loop_is_given_up_and_clearing_it_tries_again(tmp_path: Path) -> None:
    policy = RestartPolicy(base_s=0.0, jitter=0.0, max_deaths=2)
    async with kept(tmp_path, policy=policy) as k:
        for _ in range(3):
            await k.keeper.ready(None)
            await kill(k)
        assert k.keeper.state is WorkerState.FAILED
        with pytest.raises(WorkerUnavailable, match="3 times"):
            await k.keeper.ready(None)
        k.keeper.clear()
        await k.keeper.ready(None)


async def test_waiting_for_a_worker_in_back_off_says_when_it_will_be_back(tmp_path: Path) -> None:
    policy = RestartPolicy(base_s=60.0, cap_s=60.0, jitter=0.0)
    async with kept(tmp_path, policy=policy) as k:
        for _ in range(2):
            await k.keeper.ready(None)
            await kill(k)
        with pytest.raises(WorkerUnavailable) as caught:
            await k.keeper.ready(time.monotonic() + 5.0)
        assert caught.value.metadata["state"] == "backoff"
        assert 0 < float(caught.value.metadata["restart_in_seconds"]) <= 60.0
        assert "SIGKILL" in caught.value.metadata["last_death"]


async def test_a_worker_that_never_says_hello_is_taken_down(tmp_path: Path) -> None:
    package = tmp_path / "mute_worker.py"
    package.write_text("import time\ntime.sleep(3600)\n")
    async with kept(
        tmp_path,
        module="mute_worker",
        env={"PYTHONPATH": str(tmp_path)},
        limits=HeartbeatLimits(boot_s=0.3),
        policy=RestartPolicy(max_deaths=0),
    ) as k:
        with pytest.raises(WorkerUnavailable):
            await k.keeper.ready(None)
        await until(lambda: k.keeper.state is WorkerState.FAILED)
        assert [death.cause for death in k.deaths] == ["heartbeat"]


async def test_interrupts_and_hangups_meant_for_the_supervisor_do_not_reach_a_worker(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        pid = k.keeper.pid or 0
        assert os.getsid(pid) == pid
        os.kill(pid, signal.SIGINT)
        await k.keeper.call(1, DetokenizeOp(ids=[1])).result()
        assert k.keeper.pid == pid


async def test_leftovers_are_swept_by_pid_and_start_time(tmp_path: Path) -> None:
    folder = tmp_path / "workers"
    folder.mkdir()
    left = await asyncio.create_subprocess_exec("sleep", "3600")
    spared = await asyncio.create_subprocess_exec("sleep", "3600")
    record = '{"pid": %d, "started": "%s"}'
    (folder / "1.json").write_text(record % (left.pid, started_at(left.pid)))
    (folder / "2.json").write_text(record % (spared.pid, "another life of that pid"))
    (folder / "3.json").write_text('{"pid": ')
    assert await asyncio.to_thread(sweep_leftovers, tmp_path) == [left.pid]
    assert await left.wait() == -signal.SIGKILL
    assert psutil.Process(spared.pid).is_running()
    spared.kill()
    await spared.wait()
    assert list(folder.iterdir()) == []


def _without_the_loop(pid: int) -> None:
    """Wait until a process ended, and its socket's peer knows: the loop stands meanwhile."""
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    time.sleep(0.2)


async def test_a_loss_is_known_soon_after_a_call_finds_nobody(tmp_path: Path) -> None:
    async with kept(tmp_path) as k:
        await k.keeper.ready(None)
        await k.open()
        hello = k.keeper.hello
        assert hello is not None
        os.kill(hello.pid, signal.SIGKILL)
        _without_the_loop(hello.pid)
        with pytest.raises(WorkerUnavailable):
            k.keeper.call(1, turn("a", "b", max_tokens=1))
        assert k.deaths == []
        await k.keeper.loss_known()
        assert len(k.deaths) == 1


OWN_LOG = """
import sys
from pathlib import Path
from modeld.supervisor.process import own_log
log = own_log(Path(sys.argv[1]))
for number in range(300_000):
    sys.stderr.write("%020d\\n" % number)
    if log is not None and number % 1000 == 0:
        log.trim()
print(log is not None)
"""


@pytest.mark.parametrize("mode", ["ab", "wb"])
def test_a_daemon_s_log_is_bounded_where_it_is_appended_to(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "daemon.log"
    with path.open(mode) as output:
        told = subprocess.run(
            [sys.executable, "-c", OWN_LOG, str(path)],
            stderr=output,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    bounded = mode == "ab"
    assert told.stdout.strip() == str(bounded)
    assert (path.stat().st_size < LOG_MAX_BYTES + 50_000) == bounded
    assert path.read_text().endswith("299999\n")


def test_a_log_stays_bounded_and_keeps_its_end(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "worker.log", max_bytes=1000)
    for number in range(100):
        os.write(log.fd, b"%020d\n" % number)
    assert log.tail(21) == "00000000000000000099\n"
    log.trim()
    assert (tmp_path / "worker.log").stat().st_size == 0
    assert (tmp_path / "worker.log.1").read_text().endswith("99\n")
    os.write(log.fd, b"after\n")
    assert log.tail() == "after\n"
    log.close()
