"""What an operator should know of an installation, as findings: each with a level and a remedy.

Pure: what was found out goes in, findings come out. Reads no file and asks nobody.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from modeld.cli.output import count, size
from modeld.cli.plan_view import host, remedy_command
from modeld.client import DaemonStatus, Description, SlotState, SlotStatus
from modeld.client.values_capacity import Device, Machine
from modeld.client.values_daemon import DiskStats
from modeld.shared.asking import AskAnswer
from modeld.shared.errors import DigestMismatch, ModeldError, ModelLoadFailed, ModelNotFound
from modeld.shared.lease_record import Discovery, DiscoveryState

LLAMA = "llama-cpp-python"
OPENVINO = "openvino"
OPENVINO_PACKAGES = (OPENVINO, "openvino-genai", "openvino-tokenizers")
NVML = "nvidia-ml-py"
OFFLOADS = ("gpu", "igpu")  # kinds of engine devices that layers can be placed on
OPEN_FILES = 1024  # sockets, logs and pipes of a daemon with its workers and some hundred clients
DISK_LOW_BYTES = 1 << 30
DISK_OUT_BYTES = 16 << 20  # below it the lease, a small file, may soon not be renewed
SWAP_MUCH = 0.5  # of the swap in use: the machine is short of memory, not merely tidy


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``remedy`` is what to do, "" only where it is ok."""

    area: str
    level: Level
    text: str
    remedy: str = ""


# --- what is installed -------------------------------------------------------------------------


def installed(versions: Mapping[str, str], engine: AskAnswer) -> list[Finding]:
    """``versions`` by package, "" where it isn't installed; ``engine`` is its own answer."""
    found = [
        Finding("installed", Level.OK, f"modeld {versions['modeld']}, Python {versions['python']}")
    ]
    found.append(_llama(versions.get(LLAMA, ""), engine))
    version = versions.get(NVML, "")
    if version:
        found.append(Finding("installed", Level.OK, f"{NVML} {version}"))
    else:
        text = f"{NVML} isn't installed; it is there to read NVIDIA devices"
        how = "where you need it: pip install nvidia-ml-py"
        found.append(Finding("installed", Level.NOTE, text, how))
    return found


def openvino(
    versions: Mapping[str, str], engine: AskAnswer, backends: Sequence[str], device: str
) -> list[Finding]:
    """``engine``: what OpenVINO answered; ``backends`` and ``device`` as they are configured."""
    served = "openvino" in backends
    missing = [package for package in OPENVINO_PACKAGES if not versions.get(package)]
    if missing:
        text = f"{', '.join(missing)} isn't installed; it is for OpenVINO models and Intel devices"
        how = "pip install 'modeld[openvino]'"
        if served:
            text += ", and the setting backends names openvino"
            return [Finding("installed", Level.PROBLEM, text, how)]
        return [Finding("installed", Level.NOTE, text, f"where you need it: {how}")]
    if not engine.backend_version:
        level = Level.PROBLEM if served else Level.WARNING
        text = f"{OPENVINO} {versions[OPENVINO]} doesn't start: {engine.words}"
        how = "install it again: pip install --force-reinstall --no-cache-dir 'modeld[openvino]'"
        return [Finding("installed", level, text, how)]
    names = [one.name for one in engine.devices]
    text = f"{engine.backend_version}, build {engine.build_digest[:12]}: runs on {', '.join(names)}"
    if not served:
        text += "; the setting backends doesn't name it"
    found = [Finding("installed", Level.OK, text)]
    if served and device not in names:
        found.append(
            Finding(
                "installed",
                Level.PROBLEM,
                f"the setting openvino_device is {device}, which OpenVINO doesn't list",
                f"set it to one of {', '.join(names)}, or install that device's driver",
            )
        )
    return found


def _llama(version: str, engine: AskAnswer) -> Finding:
    if not version and not engine.backend_version:
        return Finding(
            "installed",
            Level.PROBLEM,
            f"{LLAMA} isn't installed: no engine can serve GGUF models",
            "pip install 'modeld[llama]'",
        )
    if not engine.backend_version:
        return Finding(
            "installed",
            Level.PROBLEM,
            f"{LLAMA} {version} doesn't start: {engine.words}",
            "install it again for this Python and processor: "
            f"pip install --force-reinstall --no-cache-dir --no-deps {LLAMA}=={version}",
        )
    usable = [device.name for device in engine.devices if device.kind in OFFLOADS]
    offload = f"GPU offload to {', '.join(usable)}" if usable else "no GPU offload"
    text = f"{engine.backend_version}, build {engine.build_digest[:12]}: {offload}"
    return Finding("installed", Level.OK, text)


# --- what runs ---------------------------------------------------------------------------------


def discovered(found: Discovery) -> Finding:
    """The state of the data root."""
    if found.state is DiscoveryState.RUNNING:
        return Finding("running", Level.OK, found.detail)
    if found.state is DiscoveryState.STALE:
        # Without a record nobody can tell whose lease it is, so that no daemon takes it over.
        level = Level.WARNING if found.record is not None else Level.PROBLEM
        how = "modeld serve" if found.record is not None else "see the text: delete that file"
        return Finding("running", level, f"the lease is stale: {found.detail}", how)
    if found.state is DiscoveryState.NOT_INSTALLED:
        return Finding("running", Level.PROBLEM, found.detail, "pip install modeld")
    how = "modeld status" if found.record is not None else "modeld serve"
    return Finding("running", Level.NOTE, found.detail, how)


def unanswering(why: str) -> Finding:
    return Finding(
        "running",
        Level.PROBLEM,
        f"the daemon holds the lease and doesn't answer: {why}",
        "read logs/daemon.log in the data root; if it hangs, end that process and start it again",
    )


def daemon(status: DaemonStatus, own_version: str) -> list[Finding]:
    """A running daemon and its workers."""
    found = []
    text = f"daemon {status.version}, pid {status.pid}, {count(len(status.slots))} slot(s)"
    if status.version == own_version:
        found.append(Finding("running", Level.OK, text))
    else:
        text += f"; this command is of version {own_version}"
        found.append(
            Finding("running", Level.WARNING, text, "modeld drain --wait, then modeld serve")
        )
    if status.draining:
        found.append(
            Finding("running", Level.NOTE, "it drains and admits nothing", "modeld serve, after it")
        )
    found += [_worker(slot) for slot in status.slots]
    found += [
        Finding(
            "running",
            Level.PROBLEM,
            f"{model} is quarantined: it killed its engine repeatedly",
            f"read its engine's log, logs/worker-*.log, then modeld models clear "
            f"{shlex.quote(model)}",
        )
        for model in status.quarantined_models
    ]
    return found


def _worker(slot: SlotStatus) -> Finding:
    worker = slot.worker
    text = f"worker {slot.backend}: {worker.state or 'not started'}"
    if worker.pid:
        text += f", pid {worker.pid}, {size(worker.rss_bytes)}"
    text += f", {count(worker.restarts)} restart(s)"
    if worker.last_death:
        text += f", last death: {worker.last_death}"
    log = f"read logs/worker-{slot.backend}.log in the data root"
    if worker.state == "FAILED" or slot.state is SlotState.FAILED:
        return Finding("running", Level.PROBLEM, text, f"{log}, then modeld models clear MODEL")
    if worker.state in ("DEAD", "BACKOFF"):
        return Finding("running", Level.WARNING, text, f"it starts again by itself; {log}")
    if worker.last_death:
        return Finding("running", Level.NOTE, text, log)
    return Finding("running", Level.OK, text)


# --- the machine -------------------------------------------------------------------------------


def machine(read: Machine, llama_version: str) -> list[Finding]:
    """The host's memory, swap, and the accelerators. ``llama_version``: the binding to build."""
    if read.host_known:
        found = [Finding("devices", Level.OK, f"host: {host(read)}")]
    else:
        found = [
            Finding(
                "devices",
                Level.PROBLEM,
                "the host's memory can't be read: a plan promises nothing",
                "see the notes below; /proc and /sys/fs/cgroup must be readable",
            )
        ]
    found += _swap(read)
    cards = {device.parent for device in read.devices if device.parent}
    found += [_device(device, device.id in cards, llama_version) for device in read.devices]
    found += [
        Finding("devices", Level.NOTE, said, "nothing, where there is no such device")
        for said in read.notes
    ]
    return found


def _swap(read: Machine) -> list[Finding]:
    used = read.swap_total_bytes - read.swap_free_bytes
    if used <= 0:
        return []
    much = used > SWAP_MUCH * read.swap_total_bytes
    return [
        Finding(
            "devices",
            Level.WARNING if much else Level.NOTE,
            f"{size(used)} of swap is in use; nothing is planned with it",
            "end programs that hold memory, or raise the setting reserve_bytes, if the machine "
            "is slow",
        )
    ]


def _device(device: Device, has_instances: bool, llama_version: str) -> Finding:
    name = device.name or device.id
    text = f"{name} ({device.kind})"
    if device.known:
        text += f": {size(device.free_bytes)} free of {size(device.total_bytes)}"
    if device.note:
        text += f"; {device.note}"
    if has_instances:
        return Finding("devices", Level.OK, f"{text}; used by its instances")
    if not device.engine_name:
        return Finding(
            "devices",
            Level.WARNING,
            f"{text}; no engine build here can use it",
            _build(device, llama_version),
        )
    text += f"; the engine's {device.engine_name}"
    if not device.known:
        return Finding(
            "devices",
            Level.WARNING,
            f"{text}; its memory can't be read, so that nothing is placed on it",
            "look at its driver; the note has its words",
        )
    return Finding("devices", Level.OK, text)


def _build(device: Device, llama_version: str) -> str:
    """How to get an engine that uses it."""
    flag = {"nvidia": "-DGGML_CUDA=on", "intel_gpu": "-DGGML_VULKAN=on"}.get(device.kind)
    if flag is None:
        return "nothing in this version: no engine that modeld serves uses such a device"
    toolkit = "the CUDA toolkit (nvcc)" if device.kind == "nvidia" else "the Vulkan SDK"
    package = f"{LLAMA}=={llama_version}" if llama_version else "'modeld[llama]'"
    return (
        f'with {toolkit} installed: CMAKE_ARGS="{flag}" pip install --force-reinstall '
        f"--no-cache-dir --no-deps {package}"
    )


# --- models ------------------------------------------------------------------------------------


def model(name: str, planned: Description | ModeldError, limit_bytes: int) -> list[Finding]:
    """Whether a model of the store fits here. ``limit_bytes`` is the cgroup's, 0: none."""
    if isinstance(planned, ModeldError):
        # Of the file, or of whoever was asked about it.
        of_file = isinstance(planned, (DigestMismatch, ModelLoadFailed, ModelNotFound))
        again = f"modeld models import FILE --name {shlex.quote(name)} --replace"
        text = f"{name}: {planned.message}"
        return [
            Finding("models", Level.PROBLEM, text, again if of_file else "look at modeld status")
        ]
    found = _engine_takes(name, planned)
    resolution = planned.resolution
    refused = resolution.refusal
    if not refused.message:
        window = resolution.context.effective
        text = f"{name}: fits, a window of {count(window.tokens)} tokens"
        text += f", up to {count(resolution.max_sessions)} session(s), on the "
        text += {"device": "accelerator", "split": "accelerator and the host"}.get(
            resolution.placement, "host"
        )
        return [*found, Finding("models", Level.OK, text)]
    remedies = [remedy_command(remedy, name) or remedy.text for remedy in refused.remedies] or [
        f"modeld plan {shlex.quote(name)}"
    ]
    found.append(
        Finding(
            "models",
            Level.WARNING,
            f"{name}: doesn't fit. {refused.message}",
            " | ".join(remedies),
        )
    )
    needed = int(refused.numbers.get("needed_bytes", "0") or 0)
    if 0 < limit_bytes < needed:
        found.append(
            Finding(
                "models",
                Level.WARNING,
                f"{name} needs {size(needed)}, and the memory limit of this process's cgroup is "
                f"{size(limit_bytes)}",
                "raise the limit: the container's --memory, or MemoryMax of the service",
            )
        )
    return found


def _engine_takes(name: str, planned: Description) -> list[Finding]:
    return [
        Finding(
            "models",
            Level.WARNING,
            f"{name}: {question.evidence}",
            "use another engine build, or another file of this model",
        )
        for question in planned.questions
        if question.name == "loader_supports_architecture" and question.answer == "no"
    ]


def store(root: str, names: Iterable[str] | None) -> list[Finding]:
    """The store itself; ``names`` None: there is none."""
    how = "modeld models import FILE, or modeld models import --demo"
    if names is None:
        return [Finding("models", Level.NOTE, f"there is no store in {root} yet", how)]
    if not list(names):
        return [Finding("models", Level.NOTE, "the store is empty", how)]
    return []


# --- what the system grants --------------------------------------------------------------------


def disk(path: str, free_bytes: int, total_bytes: int) -> Finding:
    """The filesystem of the data root."""
    text = f"{size(free_bytes)} free of {size(total_bytes)} for {path}"
    if free_bytes < DISK_OUT_BYTES:
        return Finding(
            "disk", Level.PROBLEM, f"{text}: the lease may not be renewed", "free some space now"
        )
    if free_bytes < DISK_LOW_BYTES:
        how = "free some, or choose another data root: --data-root, MODELD_DATA_ROOT"
        return Finding("disk", Level.WARNING, text, how)
    return Finding("disk", Level.OK, text)


def saved(stats: DiskStats) -> Finding:
    """What a running daemon keeps of sessions on its disk."""
    kept = stats.snapshots_bytes + stats.durable_bytes
    limit = f" of the {size(stats.quota_bytes)} that may be" if stats.quota_bytes else ""
    text = f"saved sessions take {size(kept)}{limit}"
    if stats.cold_bytes:
        text += f", parked KV {size(stats.cold_bytes)}"
    if 0 < stats.quota_bytes <= kept:
        how = (
            "raise the setting snapshot_quota_bytes, or remove what isn't needed: modeld snapshots "
            "delete ID, modeld sessions close KEY --discard"
        )
        return Finding("disk", Level.WARNING, f"{text}: nothing more is saved", how)
    if not stats.damaged_snapshots:
        return Finding("disk", Level.OK, text)
    named = ", ".join(stats.damaged_snapshots[:3])
    more = len(stats.damaged_snapshots) - 3
    text += f"; damaged and not listed: {named}{f' and {more} more' if more > 0 else ''}"
    return Finding("disk", Level.WARNING, text, "delete them, or import them from a whole copy")


def open_files(soft: int, hard: int) -> Finding:
    """Limits on descriptors; a limit of -1 is none."""
    text = f"open files: {'no limit' if soft < 0 else f'at most {count(soft)}'}"
    if 0 <= soft < OPEN_FILES:
        able = hard < 0 or hard >= OPEN_FILES
        how = f"ulimit -n {OPEN_FILES}" if able else "raise LimitNOFILE or limits.conf"
        text += f", and many clients need {count(OPEN_FILES)}"
        return Finding("limits", Level.WARNING, text, f"{how}, before modeld serve")
    return Finding("limits", Level.OK, text)


def settings(error: ModeldError | None) -> list[Finding]:
    """Whether a daemon could be started with what is configured."""
    if error is None:
        return [Finding("running", Level.OK, "settings: they can be used")]
    return [
        Finding(
            "running",
            Level.PROBLEM,
            f"settings: {error.message}",
            "mend it there; plans below are made with the defaults",
        )
    ]
