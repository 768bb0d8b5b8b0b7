"""``modeld doctor``: what is installed and runs, which devices, which models fit, what is amiss."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

import modeld
from modeld.cli import checks, plan_view
from modeld.cli.checks import Finding, Level
from modeld.cli.exit_codes import Exit
from modeld.cli.main import Settings, global_options, pass_settings
from modeld.cli.output import emit_json, note, say
from modeld.cli.planning import HERE_NO_DAEMON, DaemonPlanner, LocalPlanner, Planner, Wanted
from modeld.cli.progress import Meanwhile
from modeld.client import Client, ClientError, DaemonStatus, Description, InvalidRequest
from modeld.client.convert import from_proto
from modeld.client.discovery import look
from modeld.client.values_capacity import Machine
from modeld.client.values_daemon import DiskStats
from modeld.shared.asking import AskAnswer, AskRequest
from modeld.shared.capacity import MachineReading
from modeld.shared.errors import ModeldError, ModelLoadFailed
from modeld.shared.ids import MODEL_NAME
from modeld.shared.lease_record import DiscoveryState

if TYPE_CHECKING:
    from modeld.supervisor.config import Config

STYLES = {Level.OK: "", Level.NOTE: "dim", Level.WARNING: "yellow", Level.PROBLEM: "red"}


@dataclass
class Report:
    """What was found out, beside the findings."""

    findings: list[Finding] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    engine: AskAnswer = field(default_factory=lambda: AskAnswer(loader="unknown"))
    openvino: AskAnswer = field(default_factory=lambda: AskAnswer(loader="unknown"))
    state: str = ""
    daemon: DaemonStatus | None = None
    stored: DiskStats | None = None
    machine: Machine | None = None
    models: dict[str, Description | ModeldError] = field(default_factory=dict)
    disk: dict[str, Any] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        return all(finding.level is not Level.PROBLEM for finding in self.findings)


@click.command(short_help="Check the installation, devices, models.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write this machine's reading as a machine file, for `modeld plan --device`.",
)
@global_options
@pass_settings
def doctor(settings: Settings, record: Path | None) -> None:
    """Tell what is installed, what runs, which devices there are, and which models fit.

    Every finding is ok, a note, a warning or a problem, and says what to do. Works without a
    daemon, a store or an engine, and changes nothing. Exit status 1 if there is a problem.
    """
    with Meanwhile(quiet=settings.json) as meanwhile:
        meanwhile.show("looking")
        report, reading = examine(settings.root, meanwhile)
    report.findings = [
        replace(one, remedy=plan_view.with_data_root(one.remedy, settings.data_root))
        for one in report.findings
    ]
    if record is not None:
        _record(record, reading)
    if settings.json:
        emit_json(_plain(report))
    else:
        _tell(report)
    if record is not None:
        note(f"recorded this machine in {record}")
    if not report.healthy:
        click.get_current_context().exit(Exit.UNEXPECTED)


def examine(root: Path, meanwhile: Meanwhile) -> tuple[Report, MachineReading]:
    """Look at everything; blocks for some seconds where models are planned."""
    from modeld.supervisor.asking import ask_engine
    from modeld.supervisor.probes.machine import MachineProbe
    from modeld.supervisor.rpc.convert import machine as machine_proto

    report = Report(versions=_versions(), engine=ask_engine("llama", AskRequest()))
    report.findings += checks.installed(report.versions, report.engine)
    probe = MachineProbe()
    probe.attach_engine(report.engine.devices)
    reading = probe.read()
    report.machine = from_proto(Machine, machine_proto(reading))
    with ExitStack() as stack:
        client = _running(root, report, stack)
        config = _config(root, report)
        if report.versions[checks.OPENVINO]:
            report.openvino = ask_engine("openvino", AskRequest())
        report.findings += checks.openvino(
            report.versions, report.openvino, config.backends, config.openvino_device
        )
        report.findings += checks.machine(report.machine, report.versions[checks.LLAMA])
        planner: Planner = (
            DaemonPlanner(client)
            if client is not None
            else LocalPlanner(root, HERE_NO_DAEMON, config=config)
        )
        _models(root, planner, report, meanwhile)
    usage = shutil.disk_usage(_existing(root))
    report.disk = {"path": str(root), "free_bytes": usage.free, "total_bytes": usage.total}
    report.findings.append(checks.disk(str(root), usage.free, usage.total))
    if report.stored is not None:
        report.findings.append(checks.saved(report.stored))
        report.disk |= {
            "snapshots_bytes": report.stored.snapshots_bytes,
            "durable_bytes": report.stored.durable_bytes,
            "cold_bytes": report.stored.cold_bytes,
            "quota_bytes": report.stored.quota_bytes,
            "damaged_snapshots": report.stored.damaged_snapshots,
        }
    report.findings.append(checks.open_files(*_open_files()))
    return report, reading


def _versions() -> dict[str, str]:
    versions = {"modeld": modeld.__version__, "python": platform.python_version()}
    for package in (checks.LLAMA, *checks.OPENVINO_PACKAGES, checks.NVML):
        versions[package] = ""
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _running(root: Path, report: Report, stack: ExitStack) -> Client | None:
    """The running daemon, if one answers."""
    found = look(root)
    report.state = found.state.value
    report.findings.append(checks.discovered(found))
    if found.state is not DiscoveryState.RUNNING:
        return None
    try:
        client = stack.enter_context(Client.connect(root))
        report.daemon = client.status()
    except (ClientError, ModeldError) as error:
        report.findings.append(checks.unanswering(str(error)))
        return None
    with contextlib.suppress(ClientError, ModeldError):  # one that drains tells its status only
        report.stored = client.disk_stats()
    report.findings += checks.daemon(report.daemon, modeld.__version__)
    return client


def _config(root: Path, report: Report) -> Config:
    """What a daemon started here would be configured with; the defaults where it couldn't be."""
    from modeld.supervisor.config import load_config

    try:
        config = load_config({}, os.environ, root)
    except ModeldError as error:
        report.findings += checks.settings(error)
        return replace(load_config({}, {}, root / "no-such-folder"), data_root=root)
    report.findings += checks.settings(None)
    return config


def _models(root: Path, planner: Planner, report: Report, meanwhile: Meanwhile) -> None:
    names = list(_names(root)) if (root / "models").is_dir() else None
    report.findings += checks.store(str(root), names)
    limit = report.machine.cgroup_limit_bytes if report.machine else 0
    for name in names or ():
        meanwhile.show(f"planning {name}")
        planned: Description | ModeldError
        try:
            planned = planner.describe(name, Wanted())
            found = checks.model(name, planned, limit)
        except ModeldError as error:
            planned = error
            found = checks.model(name, planned, limit)
        except ClientError as error:  # the daemon ended meanwhile
            planned = ModeldError(f"the daemon could not be asked: {error}")
            found = checks.model(name, planned, limit)
        except Exception as error:  # one model's trouble, whatever it is, hides no other's
            planned = ModelLoadFailed(f"planning it failed: {type(error).__name__}: {error}")
            found = checks.model(name, planned, limit)
        report.models[name] = planned
        report.findings += found


def _names(root: Path) -> Iterator[str]:
    """Folders of the store, those whose record is damaged included."""
    for folder in sorted((root / "models").iterdir()):
        if folder.is_dir() and not folder.is_symlink() and MODEL_NAME.match(folder.name):
            yield folder.name


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _open_files() -> tuple[int, int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    return (-1 if soft == infinite else soft), (-1 if hard == infinite else hard)


def _record(path: Path, reading: MachineReading) -> None:
    from modeld.supervisor.probes.simulated import write_machine_file

    try:
        write_machine_file(path, reading)
    except OSError as error:
        raise InvalidRequest.of(
            "record", str(path), "a file that can be written", f"{error.strerror or error}."
        ) from None


# --- what is told ------------------------------------------------------------------------------


def _tell(report: Report) -> None:
    areas = dict.fromkeys(finding.area for finding in report.findings)
    for area in areas:
        say(area, "bold")
        for finding in report.findings:
            if finding.area == area:
                say(f"  {finding.level:<8} {finding.text}", STYLES[finding.level])
                if finding.remedy:
                    say(f"           do: {finding.remedy}")
    counted = [
        f"{n} {level}{'s' if n != 1 else ''}"
        for level in (Level.PROBLEM, Level.WARNING, Level.NOTE)
        if (n := sum(finding.level is level for finding in report.findings))
    ]
    say(", ".join(counted) or "all is well", "bold")


def _plain(report: Report) -> dict[str, Any]:
    return {
        "healthy": report.healthy,
        "findings": report.findings,
        "installed": report.versions,
        "engine": msgspec.to_builtins(report.engine),
        "openvino": msgspec.to_builtins(report.openvino),
        "state": report.state,
        "daemon": report.daemon,
        "machine": report.machine,
        "models": [_plain_model(name, planned) for name, planned in report.models.items()],
        "disk": report.disk,
    }


def _plain_model(name: str, planned: Description | ModeldError) -> dict[str, Any]:
    if isinstance(planned, ModeldError):
        return {"name": name, "fits": None, "error": planned.reason, "message": planned.message}
    resolution = planned.resolution
    return {
        "name": name,
        "fits": not resolution.refusal.message,
        "window": resolution.context.effective.tokens,
        "max_sessions": resolution.max_sessions,
        "placement": resolution.placement,
        "refusal": resolution.refusal,
    }
