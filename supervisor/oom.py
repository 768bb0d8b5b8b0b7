"""How often the kernel has killed for lack of memory, to tell such a death from any other kill.

Owns the reading of the kernel's counter; whose death it explains is the keeper's to say.
"""

from __future__ import annotations

from pathlib import Path


def oom_kills(sysroot: Path = Path("/")) -> int | None:
    """Out-of-memory kills since boot, those of memory cgroups among them; None: not told here."""
    try:
        text = (sysroot / "proc/vmstat").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdigit():
            return int(value)
    return None
