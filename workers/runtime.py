"""A worker process's main: what every worker does whatever engine it has.

Ties the process to its supervisor, greets it, and runs the executor on the main thread. Knows no
engine: a handler is made by the function handed in, after the ties are in place.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import queue
import resource
import signal
import sys
from collections.abc import Callable

from modeld.shared.messages import Kind
from modeld.workers import faults
from modeld.workers.executor import Handler, Pulse, Tasks, run
from modeld.workers.io_thread import EXIT_ORPHANED, IoThread, Settings
from modeld.workers.memory_guard import offer_to_oom_killer

log = logging.getLogger(__name__)

EXIT_ASKED = 0
EXIT_CANNOT_BOOT = 64
_PR_SET_PDEATHSIG = 1
# A busy interpreter gives the I/O thread its turn after this; the default of 5 ms would be felt
# in every chunk and cancel.
_SWITCH_INTERVAL_S = 0.001


def main(make_handler: Callable[[], Handler]) -> int:
    """Serve until asked to leave; returns the process's exit code.

    0: it was asked. 64: it can't boot, and trying again won't help (the engine doesn't import, the
    environment is incomplete). Anything else is a death.
    """
    # The stack of the thread that was struck, which is the engine's: walking the stacks of threads
    # that run meanwhile can itself end in a segfault, and the death would tell the wrong signal.
    faulthandler.enable(file=sys.stderr, all_threads=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to answer
    # A core of a worker would hold prompts and gigabytes of weights.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    offer_to_oom_killer()
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("MODELD_WORKER_LOG", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        settings = _settings()
        faults.load(os.environ.get(faults.VARIABLE, ""))
    except (KeyError, ValueError) as error:
        return _cannot_boot(error)
    if not _tie_to(settings.supervisor_pid):
        return EXIT_ORPHANED
    tasks: Tasks = queue.SimpleQueue()
    pulse = Pulse()
    io = IoThread(settings, tasks, pulse)

    def leave(signum: int, frame: object) -> None:
        io.cancel_all()
        tasks.put(None)

    signal.signal(signal.SIGTERM, leave)
    io.start()
    try:
        handler = make_handler()
        hello = handler.hello()
    except MemoryError:  # may be another's fault and pass: a plain death, tried again
        raise
    except Exception as error:
        log.debug("boot", exc_info=True)
        return _cannot_boot(error)
    io.send(Kind.HELLO, 0, 0, 0, hello)
    io.flush()
    try:
        run(handler, tasks, pulse, io)
    finally:
        handler.close()
        io.close()
    return EXIT_ASKED


def _cannot_boot(error: Exception) -> int:
    # The supervisor shows the line with this mark to people.
    print(f"modeld: cannot boot: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return EXIT_CANNOT_BOOT


def _settings() -> Settings:
    """From the launcher's environment; KeyError or ValueError if it is incomplete."""
    env = os.environ
    parent_fd = int(env["MODELD_WORKER_PARENT_FD"])
    if parent_fd >= 0:
        os.set_inheritable(parent_fd, False)
    return Settings(
        endpoint=env["MODELD_WORKER_ENDPOINT"],
        epoch=bytes.fromhex(env["MODELD_WORKER_EPOCH"]),
        owner_id=env["MODELD_WORKER_OWNER"],
        supervisor_pid=int(env["MODELD_WORKER_SUPERVISOR_PID"]),
        parent_fd=parent_fd,
        heartbeat_interval_s=float(env["MODELD_WORKER_HEARTBEAT_S"]),
    )


def _tie_to(supervisor_pid: int) -> bool:
    """Die with the supervisor where the system can do that; False if it is gone already.

    The pipe that the I/O thread watches does the same everywhere, but only this reaches a worker
    whose engine holds the interpreter.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            log.warning("no parent-death signal here: %s", os.strerror(ctypes.get_errno()))
    # It may have died between the spawn and the line above.
    return os.getppid() == supervisor_pid
