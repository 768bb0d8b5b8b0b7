"""Keeps one worker alive: carries out what the worker's state machine instructs.

Owns the worker's process, its place on the link, its heartbeat watch and its restarts. Knows
nothing of models, sessions, generations or gRPC; who must know of a death is told by a callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from modeld.shared.errors import SessionFatal, WorkerUnavailable
from modeld.shared.ids import new_epoch
from modeld.shared.messages import Heartbeat, Hello, Payload
from modeld.supervisor.exits import signal_name
from modeld.supervisor.launcher import Launcher, SpawnSpec
from modeld.supervisor.lifecycle import (
    AbandonOperations,
    AnnounceDeath,
    BackoffElapsed,
    CancelWait,
    Cleared,
    Exited,
    Greeted,
    Instruction,
    Misbehaved,
    OpEnded,
    OpStarted,
    Report,
    SendWelcome,
    Spawn,
    Spawned,
    SpawnFailed,
    StartAsked,
    StopAsked,
    TakeDown,
    Wait,
    WorkerEvent,
    WorkerMachine,
    WorkerState,
)
from modeld.supervisor.link import Link, Operation, Peer
from modeld.supervisor.oom import oom_kills
from modeld.supervisor.process import ABORT_GRACE_S, Handle, take_down
from modeld.supervisor.restart import EXIT_CANNOT_BOOT, RestartPolicy, Restarts

log = logging.getLogger(__name__)

_READY = (WorkerState.IDLE, WorkerState.BUSY)
_LOG_TRIM_EVERY_S = 10.0
LOSS_KNOWN_S = 2.0
_DEADLINE_MARGIN_S = 0.25
# What may be shown of a worker's stderr: lines that engines and the runtime write when they fail.
# Anything else could hold text of a prompt.
_TELLING = re.compile(
    r"^(modeld: |terminate called|  what\(\): |CUDA error|MemoryError"
    r"|(ggml|llama|openvino)\w*: )|GGML_ASSERT|ov::\w*Exception"
)
_LINE_LIMIT = 300  # characters
PACKAGES = ("llama", "openvino")  # backends that are extras of the package

# The kinds of engine call, as a worker declares its longest gaps by, that a request makes.
CALL_KINDS: dict[str, tuple[str, ...]] = {
    "LoadOp": ("load",),
    "UnloadOp": ("unload",),
    "OpenOp": ("open",),
    "EnsureOp": ("tokenize", "evaluate", "copy"),
    "SuffixOp": ("tokenize", "evaluate", "copy"),
    "DecodeOp": ("evaluate",),
    "TurnOp": ("tokenize", "evaluate", "copy"),
    "TokenizeOp": ("tokenize",),
    "DetokenizeOp": ("tokenize",),
    "RenderOp": ("tokenize",),
    "EmbedOp": ("tokenize", "embed"),
    "ExportOp": ("copy",),
    "ImportOp": ("copy",),
    "ForkOp": ("open", "copy"),
    "TrimOp": ("copy",),
    "ParkOp": ("copy",),
    "ResumeOp": ("open", "copy"),
    "AdmitOp": ("tokenize", "evaluate", "copy"),
    "SaveOp": ("copy",),
    "RestoreOp": ("copy",),
}


@dataclass(frozen=True, slots=True)
class HeartbeatLimits:
    """When a worker counts as hung. Seconds."""

    silence_s: float = 10.0  # where it declared no longest gap for the kinds of call it runs
    slack_s: float = 5.0  # over the gap that it declared: a loaded machine isn't a hang
    stall_s: float = 600.0  # heartbeats, an operation running, and no progress; 0: no limit
    cancel_s: float = 60.0  # a running operation goes on after its cancel; 0: no limit
    boot_s: float = 120.0  # from spawn to hello


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker was lost."""

    cause: str  # signal | exit | heartbeat | protocol | out of memory
    signal: str  # its name, "" if none
    exit_code: int | None  # None: not known yet, it is being taken down
    text: str  # for people; no prompt text
    pid: int | None
    operations: tuple[str, ...]  # type names of the requests that ran
    at_s: float = field(default_factory=time.time)  # since the epoch

    def error(self) -> SessionFatal:
        """What a call that ran gets."""
        metadata: dict[str, object] = {
            "cause": "native crash" if self.cause == "signal" else self.cause,
            "detail": self.text,
        }
        if self.signal:
            metadata["signal"] = self.signal
        if self.exit_code is not None:
            metadata["exit_code"] = self.exit_code
        return SessionFatal(
            f"The worker was lost while this call ran: {self.text}. What the session held is "
            "gone; open a new one.",
            metadata=metadata,
        )


def _ignore_death(death: Death) -> None:
    pass


def _ignore_state() -> None:
    pass


class WorkerKeeper:
    """One worker, kept alive by policy. All methods run on the loop's thread.

    On a death ``on_death`` is called first, synchronously; then every running operation ends as
    SessionFatal; then the worker is restarted. ``on_state`` is called after the state changed.
    """

    def __init__(
        self,
        backend: str,
        launcher: Launcher,
        link: Link,
        *,
        policy: RestartPolicy | None = None,
        limits: HeartbeatLimits | None = None,
        on_death: Callable[[Death], None] = _ignore_death,
        on_state: Callable[[], None] = _ignore_state,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.backend = backend
        self.hello: Hello | None = None
        self.heartbeat: Heartbeat | None = None
        # Of the model that is loaded, in the place of the greeting's: seconds, by kind of call.
        self.longest_gap_s: Mapping[str, float] = {}
        self.last_death: Death | None = None
        self.failure = ""  # why it is FAILED
        self.limits = limits or HeartbeatLimits()
        self._launcher = launcher
        self._link = link
        self._on_death = on_death
        self._on_state = on_state
        self._machine = WorkerMachine(Restarts(policy or RestartPolicy(), jitter))
        self._events: deque[WorkerEvent] = deque()
        self._pumping = False
        self._changed: set[asyncio.Future[None]] = set()
        self._handle: Handle | None = None
        self._epoch = b""
        self._peer: Peer | None = None
        self._spawning: asyncio.Task[None] | None = None
        self._ladder: asyncio.Task[int] | None = None
        self._wait: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._restart_at_s = 0.0
        self._oom_kills: int | None = None
        self._spawned_s = 0.0
        self._looked_s = 0.0
        self._trimmed_s = 0.0
        self._progressed_s = 0.0

    # --- what it is ------------------------------------------------------------------------

    @property
    def state(self) -> WorkerState:
        return self._machine.state

    @property
    def pid(self) -> int | None:
        return self._machine.pid

    @property
    def restarts(self) -> int:
        """Spawns after the first."""
        return max(0, self._machine.spawns - 1)

    @property
    def restart_in_s(self) -> float:
        """Seconds until the next spawn; 0 if none is waited for."""
        if self._machine.state is not WorkerState.BACKOFF:
            return 0.0
        return max(0.0, self._restart_at_s - time.monotonic())

    @property
    def progress(self) -> int:
        """The engine's progress counter, as the last heartbeat told it."""
        return self.heartbeat.progress if self.heartbeat else 0

    @property
    def story(self) -> tuple[str, ...]:
        """The worker's last transitions, oldest first."""
        return self._machine.story

    # --- what can be asked of it -----------------------------------------------------------

    def start(self) -> None:
        """Begin keeping a worker alive. Raises InvalidTransition unless it is stopped."""
        self._post(StartAsked())

    def clear(self) -> None:
        """Forget the deaths, and try again if it was given up."""
        self._post(Cleared())

    async def ready(self, deadline: float | None) -> Hello:
        """Wait for a greeted worker until ``deadline`` (of ``time.monotonic``; None: for ever).

        Raises WorkerUnavailable slightly before it passes, so that it still reaches the caller;
        at once when the next restart lies beyond it, or when no worker will come by itself.
        """
        loop = asyncio.get_running_loop()
        if deadline is not None:
            deadline -= min(_DEADLINE_MARGIN_S, max(0.0, deadline - time.monotonic()) / 4)
        while self.state not in _READY or self.hello is None:
            now_s = time.monotonic()
            if not self._machine.will_return:
                raise self._unavailable()
            if deadline is not None and now_s + self.restart_in_s >= deadline:
                raise self._unavailable()
            changed: asyncio.Future[None] = loop.create_future()
            self._changed.add(changed)
            try:
                await asyncio.wait(
                    {changed}, timeout=None if deadline is None else deadline - now_s
                )
            finally:
                self._changed.discard(changed)
        return self.hello

    def call(self, generation: int, payload: Payload, credit: int = 0) -> Operation:
        """Send a request. Raises WorkerUnavailable if no worker is up: nothing was sent then."""
        if self.state not in _READY:
            raise self._unavailable()
        operation = self._link.start_op(
            self._epoch, generation, payload, credit, on_end=self._operation_ended
        )
        if not operation.ended:
            if not self._machine.running:
                self._progressed_s = time.monotonic()
            self._post(OpStarted(operation.op_id))
        return operation

    async def loss_known(self) -> None:
        """After a call that couldn't be sent to a worker that seemed up: wait until it is known to
        be lost, for LOSS_KNOWN_S at most. What becomes of its sessions is decided by then.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOSS_KNOWN_S):
                while self.state in _READY:
                    await self._next_change()

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls, let running ones finish within ``grace_s`` seconds, end the worker.

        What still runs then ends as SessionFatal.
        """
        self._post(StopAsked(grace_s))
        await self._gone()

    async def stop(self, now: bool) -> None:
        """End the worker and don't restart it; returns once it is reaped."""
        await self.drain(0.0 if now else 5.0)

    async def recycle(self, grace_s: float = 5.0) -> None:
        """Replace the worker by a fresh one; returns once the old one is reaped.

        No death is announced: whoever asks knows that the old state goes.
        """
        self._post(StopAsked(grace_s, then_restart=True))
        while self.state in (WorkerState.DRAINING, WorkerState.DEAD):
            await self._next_change()

    async def _gone(self) -> None:
        while self.state is not WorkerState.STOPPED:
            await self._next_change()

    async def _next_change(self) -> None:
        changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed.add(changed)
        try:
            await changed
        finally:
            self._changed.discard(changed)

    def _unavailable(self) -> WorkerUnavailable:
        restart_in_s = self.restart_in_s
        metadata: dict[str, object] = {
            "backend": self.backend,
            "state": self.state.value,
            "restart_in_seconds": f"{restart_in_s:.3f}",
        }
        text = f"No {self.backend} worker is up (it is {self.state.value})"
        if self.last_death is not None:
            metadata["last_death"] = self.last_death.text
            text += f"; the last one was lost: {self.last_death.text}"
        if self.state is WorkerState.FAILED:
            text += f". {self.failure}. Find the cause in the worker's log, then clear it"
            if self.backend in PACKAGES and self._cannot_boot():
                metadata["install"] = how = f"pip install 'modeld[{self.backend}]'"
                text += f" or start the daemon again. Where its engine isn't installed: {how}"
        elif self._machine.will_return:
            text += f". Try again in {restart_in_s:.1f} s"
        retry_after_s = max(restart_in_s, 0.1) if self._machine.will_return else None
        return WorkerUnavailable(f"{text}.", metadata=metadata, retry_after_s=retry_after_s)

    def _cannot_boot(self) -> bool:
        return self.last_death is not None and self.last_death.exit_code == EXIT_CANNOT_BOOT

    # --- what happens to it: the link's listener, timers, exits ---------------------------

    def on_hello(self, hello: Hello) -> None:
        if self.state is WorkerState.HANDSHAKING:
            self.hello = hello
            self._post(Greeted())
        elif self.state in _READY:
            self._post(Misbehaved("protocol", "it said hello twice"))

    def on_heartbeat(self, beat: Heartbeat) -> None:
        if self.heartbeat is None or beat.progress != self.heartbeat.progress or not beat.busy_op:
            self._progressed_s = time.monotonic()
        self.heartbeat = beat

    def on_protocol_error(self, text: str) -> None:
        self._post(Misbehaved("protocol", f"it broke the protocol: {text}"))

    def _operation_ended(self, operation: Operation) -> None:
        if operation.op_id in self._machine.running:
            self._post(OpEnded(operation.op_id))

    def _exited(self, handle: Handle, future: asyncio.Future[int]) -> None:
        if handle is not self._handle or future.cancelled():
            return
        # What it finished before it died counts as finished.
        self._link.poll()
        self._post(Exited(future.result()))

    def _look(self) -> None:
        """Judge the worker's silence, now and then."""
        now_s = time.monotonic()
        period_s = self._look_every_s()
        late_s = now_s - self._looked_s - period_s
        self._looked_s = now_s
        self._watch = asyncio.get_running_loop().call_later(period_s, self._look)
        peer = self._peer
        if peer is None:
            return
        self._link.poll()
        if late_s > 1.0:
            # This process was held up itself (stopped, suspended, starved): the silence may have
            # been its own deafness, so the worker gets its whole limit again.
            peer.heard_s = self._progressed_s = now_s
            self._spawned_s += late_s
        if now_s - self._trimmed_s > _LOG_TRIM_EVERY_S and self._handle is not None:
            self._trimmed_s = now_s
            self._handle.trim_log()
        if text := self._hung(peer, now_s):
            self._post(Misbehaved("heartbeat", text))

    def _look_every_s(self) -> float:
        return min(max(self._link.heartbeat_interval_s, 0.02), self.limits.silence_s / 4)

    def _hung(self, peer: Peer, now_s: float) -> str:
        if self.state is WorkerState.HANDSHAKING:
            if now_s - self._spawned_s > self.limits.boot_s:
                return f"it didn't say hello within {self.limits.boot_s:g} s"
            return ""
        if self.state not in _READY:
            return ""
        silent_s = now_s - peer.heard_s
        if silent_s > (limit_s := self._silence_limit_s(peer)):
            return f"no heartbeat for {silent_s:.1f} s (the limit is {limit_s:g} s)"
        stalled_s = now_s - self._progressed_s
        if self._machine.running and 0 < self.limits.stall_s < stalled_s:
            return f"no progress for {stalled_s:.1f} s (the limit is {self.limits.stall_s:g} s)"
        # Those queued behind what runs wait for their turn, cancelled or not: they aren't judged.
        # Of several that run, heartbeats name the oldest; others are known by what they have sent.
        busy_op = self.heartbeat.busy_op if self.heartbeat else 0
        ignored_s = max(
            (
                now_s - one.cancelled_s
                for one in peer.operations.values()
                if one.cancelled_s and (one.op_id == busy_op or one.begun)
            ),
            default=0.0,
        )
        if 0 < self.limits.cancel_s < ignored_s:
            return f"it ignored a cancel for {ignored_s:.1f} s"
        return ""

    def _silence_limit_s(self, peer: Peer) -> float:
        declared = self.longest_gap_s or (self.hello.longest_gap_s if self.hello else {})
        kinds = {
            kind
            for operation in peer.operations.values()
            for kind in CALL_KINDS.get(operation.kind, ())
        } or {"idle"}
        gaps_s = [declared[kind] for kind in kinds if kind in declared]
        limit_s = max(gaps_s) + self.limits.slack_s if gaps_s else self.limits.silence_s
        return max(limit_s, 4 * self._link.heartbeat_interval_s)

    # --- the machine -----------------------------------------------------------------------

    def _post(self, event: WorkerEvent) -> None:
        """Events are taken one at a time: what happens while one is handled waits its turn."""
        self._events.append(event)
        if self._pumping:
            return
        self._pumping = True
        before = self.state
        try:
            while self._events:
                for instruction in self._machine.handle(self._events.popleft(), time.monotonic()):
                    self._carry_out(instruction)
        finally:
            self._pumping = False
        if self.state is not before:
            # A call makes it busy and idle again: too much to tell of each.
            level = logging.DEBUG if before in _READY and self.state in _READY else logging.INFO
            log.log(level, "%s worker: %s -> %s", self.backend, before.value, self.state.value)
        for changed in self._changed:
            if not changed.done():
                changed.set_result(None)
        if self.state is not before:
            self._on_state()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Spawn():
                self._spawning = asyncio.get_running_loop().create_task(self._spawn())
            case SendWelcome():
                self._progressed_s = time.monotonic()
                self._link.welcome(self._epoch)
            case AnnounceDeath(cause, code, text):
                self._announce(cause, code, text)
            case TakeDown(grace_s, ask, abort):
                self._take_down(grace_s, ask, abort)
            case AbandonOperations():
                self._let_go(self._drained)
            case Wait(delay_s):
                self._restart_at_s = time.monotonic() + delay_s
                loop = asyncio.get_running_loop()
                self._wait = loop.call_later(delay_s, self._post, BackoffElapsed())
            case CancelWait():
                if self._wait is not None:
                    self._wait.cancel()
            case Report(text):
                self.failure = text
                log.error("%s worker given up: %s", self.backend, text)

    async def _spawn(self) -> None:
        self._handle = None
        self._oom_kills = oom_kills()
        self._epoch = _usable_epoch()
        self._peer = self._link.admit(self._epoch, self)
        self._spawned_s = self._looked_s = time.monotonic()
        spec = SpawnSpec(
            backend=self.backend,
            endpoint=self._link.endpoint,
            epoch=self._epoch,
            owner_id=self._link.owner_id,
            heartbeat_interval_s=self._link.heartbeat_interval_s,
        )
        try:
            handle = await self._launcher.spawn(spec)
        except Exception as error:
            log.exception("spawning the %s worker", self.backend)
            self._post(SpawnFailed(f"it couldn't be started: {error}"))
            return
        self._handle = handle
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.get_running_loop().call_later(self._look_every_s(), self._look)
        self._post(Spawned(handle.pid))
        handle.exit.add_done_callback(functools.partial(self._exited, handle))

    def _announce(self, cause: str, code: int | None, text: str) -> None:
        tail = self._handle.stderr_tail() if self._handle else ""
        operations = tuple(op.kind for op in self._peer.operations.values()) if self._peer else ()
        killed = signal_name(code) == "SIGKILL" and not text
        before, now = self._oom_kills, oom_kills() if killed else None
        if before is not None and now is not None and now > before:
            cause = "out of memory"
            text = (
                "killed (SIGKILL) while the kernel ran out of memory: plan with a larger "
                "reserve_bytes, or free memory on this machine"
            )
        death = Death(
            cause=cause,
            signal=signal_name(code),
            exit_code=code,
            text=_death_text(code, text, tail),
            pid=self._handle.pid if self._handle else None,
            operations=operations,
        )
        self.last_death = death
        log.error("%s worker %s lost: %s", self.backend, death.pid, death.text)
        try:
            self._on_death(death)
        except Exception:  # whoever waits must still be answered, and the worker restarted
            log.exception("on_death")
        self._let_go(death.error)

    def _let_go(self, error: Callable[[], SessionFatal]) -> None:
        self._link.forget(self._epoch, error)
        self._peer = None
        self.hello = None
        self.heartbeat = None
        self.longest_gap_s = {}
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _drained(self) -> SessionFatal:
        return SessionFatal(
            "The daemon drains, and its worker was ended before this call was through "
            "(drain_grace_s says when). Open a new session once a daemon runs again.",
            metadata={"cause": "drain"},
        )

    def _take_down(self, grace_s: float, ask: bool, abort: bool) -> None:
        handle = self._handle
        if handle is None:
            return
        if self._ladder is not None:
            self._ladder.cancel()  # a steeper one takes over
        epoch = self._epoch
        self._ladder = asyncio.get_running_loop().create_task(
            take_down(
                handle,
                grace_s=grace_s,
                ask=(lambda: self._link.shutdown(epoch)) if ask else None,
                abort_s=ABORT_GRACE_S if abort else 0.0,
            )
        )


def _usable_epoch() -> bytes:
    """An epoch is also a socket's routing id, whose first byte mustn't be zero."""
    while (epoch := new_epoch())[0] == 0:
        pass
    return epoch


def _death_text(code: int | None, text: str, tail: str) -> str:
    name = signal_name(code)
    if not text:
        if name == "SIGKILL":
            text = "killed (SIGKILL; the system may have run out of memory)"
        else:
            text = f"native crash ({name})" if name else f"it left with exit code {code}"
    said = next((line for line in reversed(tail.splitlines()) if _TELLING.search(line)), "")
    return f"{text}; it last said: {said.strip()[:_LINE_LIMIT]}" if said else text
