"""What lasts beyond a window, a context and a process: eviction, parking, snapshots, durability."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from bench.daemon import MODEL, Daemon
from bench.lab import Lab, follow, now
from bench.runner import Spec, Target, ratios, require
from bench.texts import text
from modeld.client import Session

HOT_WINDOW = 2048  # tokens, of what evicts
SEEN = 30_000  # tokens of the long conversation
QUESTION, ANSWER = 256, 64  # tokens, of its turns
EARLY = 10  # the turn that the last one is held against
FLAT = Target("at most", 1.5)
GENERATED = 8000
EVICTION = Target("at most", 0.1)
RETURNING = 2000  # tokens of a prefix that comes back
TIMES_PREFILL = Target("at least", 20.0)
DEPTH = 4000
AGAIN_MS = Target("at most", 300.0)
SAVE = Target("at most", 2.0)
RESTORE_MS = {"llama": Target("at most", 100.0), "openvino": Target("at most", 600.0)}
SIZE = Target("at most", 1.05)
DURABLE_DEPTH = 2000
DURABLE = Target("at most", 0.05)


def run(lab: Lab) -> None:
    for here in (lab, lab.openvino):
        conversation(here)
        evicting_decode(here)
        returning(here)
        evicted_by_another(here)
        snapshots(here)
        durable(here)


def spec(lab: Lab, name: str, title: str, unit: str, target: Target | None = None) -> Spec:
    return Spec(
        f"residency.{lab.backend}.{name}", f"{lab.backend}: {title}", "product", unit, target
    )


@contextmanager
def opened(daemon: Daemon, window: int, **options: object) -> Iterator[Session]:
    """A raw session whose memory is given back."""
    session = daemon.client.open_session(
        MODEL,
        window=window,
        prompt_format="raw",
        **options,  # type: ignore[arg-type]
    )
    try:
        yield session
    finally:
        session.close(discard=True)


def conversation(lab: Lab) -> None:
    """Turns of equal size through a window that evicts, until SEEN tokens were seen."""
    flat = spec(lab, "flat", f"a turn at the end of {SEEN:,} seen tokens over one from turn "
                f"{EARLY} on, window {HOT_WINDOW:,}", "times", FLAT)  # fmt: skip
    each = spec(lab, "turn", f"the same: a turn of {QUESTION} + {ANSWER} tokens", "ms")
    pairs, took_ms = lab.plan.pairs, list[float]()
    with lab.book.expecting(flat, each):
        lab.book.say(f"{lab.backend}: a conversation of {SEEN:,} tokens")
        session = lab.product.client.open_session(MODEL, window=HOT_WINDOW, overflow="evict")
        try:
            chat, seen = session.chat("Answer at length."), 0
            while seen < SEEN or len(took_ms) < EARLY + 2 * pairs:
                began_s = now()
                question = text(lab.words.draw(QUESTION, len(took_ms)))
                turn = follow(chat.send(question, max_tokens=ANSWER, ignore_eos=True))
                took_ms.append((now() - began_s) * 1000)
                require(turn.final.tokens == ANSWER, f"it made {turn.final.tokens} tokens")
                seen = turn.final.seen_tokens
            require(turn.final.parked + turn.final.gone > 0, "nothing went out of the window")
            told = f"{len(took_ms)} turns; {turn.final.parked:,} parked, {turn.final.gone:,} gone"
        finally:
            session.close(discard=True)
        early = took_ms[EARLY - 1 : EARLY - 1 + pairs]
        lab.book.record(flat, ratios(took_ms[-pairs:], early), told)
        lab.book.record(each, took_ms[EARLY:])


def evicting_decode(lab: Lab) -> None:
    """What evictions take of a long answer's time: how much longer their tokens took."""
    share = spec(lab, "eviction", f"evictions' share of decode time, {GENERATED:,} tokens, window "
                 f"{HOT_WINDOW:,}, what stays evaluated again", "of it", EVICTION)  # fmt: skip
    tokens = 2 * HOT_WINDOW if lab.plan.quick else GENERATED
    with lab.book.expecting(share), opened(lab.product, HOT_WINDOW, overflow="evict") as session:
        lab.book.say(f"{lab.backend}: an answer of {tokens:,} tokens")
        stream = session.turn(
            text(lab.words.draw(200, 3)), " Then", max_tokens=tokens, ignore_eos=True,
            stream_interval_ms=0,
        )  # fmt: skip
        at_s = [now() for chunk in stream.chunks() if chunk.tokens]
        final = stream.final
        require(final is not None and final.tokens == tokens, "the answer ended early")
        assert final is not None
        gaps = [after - before for before, after in pairwise(at_s)]
        usual_s = statistics.median(gaps)
        long = [index for index, gap in enumerate(gaps) if gap > 8 * usual_s]
        require(final.recomputed > 0 and bool(long), "nothing was evicted")
        # From one eviction to the next: what it took over a usual token, of the time between.
        shares = [
            (gaps[begin] - usual_s) / sum(gaps[begin:end])
            for begin, end in zip(long, [*long[1:], len(gaps)], strict=True)
            if end - begin > HOT_WINDOW // 4
        ]
        lab.book.record(share, shares, f"{final.recomputed:,} tokens recomputed, "
                        f"{final.parked:,} parked, {final.gone:,} gone")  # fmt: skip


def returning(lab: Lab) -> None:
    """A prefix that another one pushed out: its return from the cold store against its prefill."""
    times = spec(lab, "returning", f"a prefix of {RETURNING:,} tokens: prefill over its return "
                 "from the cold store, by token", "times", TIMES_PREFILL)  # fmt: skip
    back = spec(lab, "returning.ms", "the same: the return", "ms")
    cold_s: list[float] = []
    back_s: list[float] = []
    with lab.book.expecting(times, back), opened(lab.product, DEPTH) as session:
        lab.book.say(f"{lab.backend}: prefixes that come back")
        draws = [text(lab.words.draw(RETURNING, 30 + n)) for n in range(lab.plan.pairs + 1)]
        session.ensure_prefix(draws[0])
        for before, prefix in pairwise(draws):
            began_s = now()
            status = session.ensure_prefix(prefix)
            cold_s.append((now() - began_s) / status.prefilled)
            require(status.reused == 0, f"{status.reused} tokens were there")
            began_s = now()
            status = session.ensure_prefix(before)
            spent_s = now() - began_s
            require(status.restored > RETURNING * 3 // 4, f"only {status.restored} came back")
            back_s.append(spent_s / status.restored)
        lab.book.record(
            times, ratios(cold_s, back_s), "the prefix that it pushes out is parked, too"
        )
        lab.book.record(back, [1000 * RETURNING * second for second in back_s])


def evicted_by_another(lab: Lab) -> None:
    """Two conversations on one context, turn about."""
    again = spec(lab, "again", f"a conversation of {DEPTH:,} tokens, evicted by another: to the "
                 "first token", "ms", AGAIN_MS)  # fmt: skip
    above = spec(lab, "again.above", "the same above that conversation's next turn, on the context "
                 "that it then has", "ms")  # fmt: skip
    first_ms: list[float] = []
    above_ms: list[float] = []
    settings = {**lab.settings, "max_sessions": 1}
    with lab.book.expecting(again, above):
        lab.book.say(f"{lab.backend}: two conversations on one context")
        daemon = Daemon(lab.folder / "one-context", settings)
        lab.daemons.append(daemon)
        daemon.import_model(lab.plan.model, lab.backend)
        with opened(daemon, 2 * DEPTH) as one, opened(daemon, 2 * DEPTH) as other:
            talks = [(one, text(lab.words.draw(DEPTH, 1))), (other, text(lab.words.draw(DEPTH, 2)))]
            for session, prefix in talks:
                lab.turn(session, prefix, " go", 1)
            for number in range(lab.plan.pairs):
                session, prefix = talks[number % 2]
                suffix = text(lab.words.draw(26, number))
                turn = lab.turn(session, prefix, suffix, 8)
                require(turn.prefix.prefilled == 0, f"{turn.prefix.prefilled} were read again")
                require(turn.prefix.restored > 0, "its context had not been taken")
                first_ms.append(turn.first_s * 1000)
                warm = lab.turn(session, prefix, text(lab.words.draw(26, 100 + number)), 8)
                require(warm.prefix.restored == 0, "its context had been taken again")
                above_ms.append(first_ms[-1] - warm.first_s * 1000)
        daemon.stop()
        lab.book.record(again, first_ms, "resumed by copy: prefix prefilled 0 in every run")
        lab.book.record(above, above_ms, "what parking the other and bringing this back take")


def snapshots(lab: Lab) -> None:
    """Saving and bringing back, against writing as many bytes with one sync."""
    saving = spec(lab, "snapshot", f"snapshot of {DEPTH:,} tokens over writing its bytes with one "
                  "sync", "times", SAVE)  # fmt: skip
    spent = spec(lab, "snapshot.ms", "the same: the snapshot, by its client's clock", "ms")
    size = spec(lab, "snapshot.size", "the same: its size over the KV's", "times", SIZE)
    restoring = spec(lab, "restore", f"restore of {DEPTH:,} tokens into a fresh session", "ms",
                     RESTORE_MS[lab.backend])  # fmt: skip
    client = lab.product.client
    save_s: list[float] = []
    write_s: list[float] = []
    restore_ms: list[float] = []
    with lab.book.expecting(saving, spent, size, restoring), lab.session() as session:
        lab.book.say(f"{lab.backend}: snapshots of {DEPTH:,} tokens")
        session.ensure_prefix(text(lab.words.draw(DEPTH, 4)))
        resolution = session.resolution
        kv_bytes = resolution.kv_bytes * DEPTH / resolution.context.effective.tokens
        for _ in range(lab.plan.pairs):
            began_s = now()
            info = session.snapshot("bench")
            save_s.append(now() - began_s)
            require(info.tokens == DEPTH, f"it has {info.tokens} tokens")
            write_s.append(_write(lab.folder / "written", info.size_bytes))
            with lab.session() as fresh:
                began_s = now()
                restored = fresh.restore(info.snapshot_id)
                restore_ms.append((now() - began_s) * 1000)
                require(restored.tokens == DEPTH, f"{restored.tokens} tokens came back")
                again = fresh.ensure_prefix(text(lab.words.draw(DEPTH, 4)))
                require(again.prefilled == 0, f"{again.prefilled} tokens were read again")
            client.delete_snapshot(info.snapshot_id)
        lab.book.record(saving, ratios(save_s, write_s))
        lab.book.record(spent, [1000 * second for second in save_s])
        lab.book.record(size, [info.size_bytes / kv_bytes])
        lab.book.record(restoring, restore_ms, "all reused by the next prompt")


def _write(path: Path, size: int) -> float:
    """Seconds to write a new file of ``size`` bytes and sync it."""
    block = os.urandom(1 << 20)
    began_s = now()
    with path.open("wb") as file:
        for begin in range(0, size, len(block)):
            file.write(block[: size - begin])
        file.flush()
        os.fsync(file.fileno())
    spent_s = now() - began_s
    path.unlink()
    return spent_s


def durable(lab: Lab) -> None:
    """What saving takes of a durable session's turns."""
    share = spec(lab, "durable", f"saving's share of a durable turn ({DURABLE_DEPTH:,} tokens "
                 f"resident, {ANSWER} generated)", "of the time", DURABLE)  # fmt: skip
    shares: list[float] = []
    written: list[int] = []
    with (
        lab.book.expecting(share),
        opened(lab.product, DEPTH, session_key="bench-durable", durable=True) as session,
    ):
        lab.book.say(f"{lab.backend}: durable turns")
        prefix = text(lab.words.draw(DURABLE_DEPTH, 6))
        for number in range(lab.plan.pairs + 1):
            turn = lab.turn(session, prefix, text(lab.words.draw(26, number)), ANSWER)
            saved = turn.final.saved
            require(saved is not None and saved.ok, f"it wasn't saved: {saved}")
            assert saved is not None
            if number:  # the first one reads and writes it all
                shares.append(saved.seconds / (turn.first_s + turn.rest_s))
                written.append(saved.written_bytes)
        lab.book.record(share, shares, f"{statistics.median(written) / 1e6:.1f} MB written a turn")
