"""What the supervisor costs: processor time a token on paced streams, and its memory."""

from __future__ import annotations

import time

from bench.daemon import MODEL, Daemon
from bench.lab import Lab, now
from bench.runner import Spec, Target, require

FAST, SLOW = 500, 60  # tokens a second
RUN_S = 10.0
MB = 1e6

FAST_CPU = Spec(
    "supervisor.cpu.fast",
    f"supervisor's CPU a token: {FAST} tokens/s, stream_interval_ms=50",
    "product",
    "ms/token",
    Target("at most", 0.15),
)
SLOW_CPU = Spec(
    "supervisor.cpu.slow",
    f"supervisor's CPU a token: {SLOW} tokens/s, default interval",
    "product",
    "ms/token",
    Target("at most", 0.4),
)
IDLE_CPU = Spec("supervisor.cpu.idle", "supervisor's CPU while idle", "product", "ms/s")
RSS = Spec(
    "supervisor.rss",
    "supervisor's resident memory after its measurements",
    "product",
    "MB",
    Target("at most", 150),
)


def run(lab: Lab) -> None:
    runs = 3 if lab.plan.quick else 5
    note = f"scripted worker; {runs} streams of {RUN_S:g} s"
    with lab.book.expecting(FAST_CPU), lab.scripted(FAST) as daemon:
        samples = [_cpu_ms_a_token(daemon, FAST, 50) for _ in range(runs)]
        lab.book.record(FAST_CPU, samples, note)
    with lab.book.expecting(SLOW_CPU, IDLE_CPU), lab.scripted(SLOW) as daemon:
        samples = [_cpu_ms_a_token(daemon, SLOW, None) for _ in range(runs)]
        lab.book.record(SLOW_CPU, samples, note)
        before_s = daemon.cpu_s()
        time.sleep(RUN_S)
        lab.book.record(IDLE_CPU, [(daemon.cpu_s() - before_s) * 1000 / RUN_S], "in both above")


def _cpu_ms_a_token(daemon: Daemon, rate: int, interval_ms: int | None) -> float:
    """Processor time of the whole process over one stream, its idle work included."""
    wanted = int(rate * RUN_S)
    with daemon.client.open_session(MODEL, window=8192, prompt_format="raw") as session:
        before_s, began_s = daemon.cpu_s(), now()
        stream = session.turn(
            "A prefix.", " A suffix.", max_tokens=wanted, ignore_eos=True,
            stream_interval_ms=interval_ms,
        )  # fmt: skip
        tokens = sum(chunk.tokens for chunk in stream.chunks())
        spent_s, took_s = daemon.cpu_s() - before_s, now() - began_s
    require(tokens == wanted, f"it made {tokens}, not {wanted} tokens")
    require(took_s >= 0.9 * RUN_S, f"{tokens} tokens took {took_s:.1f} s: that isn't {rate}/s")
    return spent_s * 1000 / tokens


def memory(lab: Lab) -> None:
    """Measured last, on the daemon that served all of the other measurements."""
    with lab.book.expecting(RSS):
        daemon = lab.product
        resident = daemon.rss_bytes() / MB
        uptime_s = daemon.client.status().uptime_seconds
        lab.book.record(RSS, [resident], f"the daemon of all the turns above, up {uptime_s:.0f} s")
