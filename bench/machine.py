"""What a result was measured on: the processor, the system, the versions, the load."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil

import modeld


def processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def facts() -> dict[str, str]:
    memory_gib = psutil.virtual_memory().total / 2**30
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    packages = ("llama-cpp-python", "grpcio", "pyzmq", "msgspec", "protobuf", "numpy")
    return {
        "machine": f"{processor()}, {usable} usable processors, {memory_gib:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "load average before the run": load,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "modeld": modeld.__version__,
        "packages": ", ".join(f"{name} {version(name)}" for name in packages),
    }
