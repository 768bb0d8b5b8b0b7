"""Another program that takes memory, for as long as a test wants it to: a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Touches every page, says so, and keeps it until a line comes or whoever started it is gone.
_PROGRAM = """
import sys
sys.stdin.readline()
held = bytearray(int(sys.argv[1]))
held[::4096] = b"x" * len(held[::4096])
print("held", flush=True)
sys.stdin.readline()
"""


@contextmanager
def memory_hog(size: int, join: Callable[[int], None] | None = None) -> Iterator[None]:
    """Hold ``size`` bytes of memory inside the block; when it ends they are free again.

    ``join`` is called with the process's id before it takes any: to put it into a cgroup.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if join is not None:
            join(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "held\n", f"{size} bytes could not be taken"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
