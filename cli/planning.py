"""Asks for a plan: the running daemon, whose answer an open would get now, or the planner here.

Owns who is asked and what goes with the question. Prints nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from modeld.cli.daemon_start import connect
from modeld.cli.main import Settings
from modeld.client import Client, ClientError, Description, NotRunning, Stale
from modeld.client.convert import from_proto
from modeld.shared.asking import AskAnswer, AskRequest
from modeld.shared.capacity import CapacityRequest, Companions, FileKind, MachineReading, ModelFacts
from modeld.shared.errors import InvalidRequest, ModeldError
from modeld.shared.ids import MODEL_NAME

if TYPE_CHECKING:
    from modeld.supervisor.config import Config
    from modeld.supervisor.models.store import StoredModel

BY_DAEMON = "planned by the running daemon"
HERE_NO_DAEMON = "planned here; no daemon runs"
HERE_A_FILE = "planned here, for a file that isn't in a store"
# A projector's buffer depends on the picture it is given, which no file tells. This is an
# estimate, not a bound: half as much again as its weights, and at least this.
PROJECTOR_LEAST_BYTES = 512 << 20


@dataclass(frozen=True)
class Wanted:
    """What is asked of a model. Types "" are the settings'; window and sessions 0 are automatic."""

    window: int = 0
    k_type: str = ""
    v_type: str = ""
    sessions: int = 0
    layout: str = "isolated"
    what_if: Mapping[str, str] = field(default_factory=dict)
    companions: Companions = field(default_factory=Companions)


class Planner(Protocol):
    """Answers questions about models. ``by`` says who does."""

    by: str

    def describe(self, model: str, wanted: Wanted) -> Description:
        """Raises ModeldError, or what a client raises. A refusal is part of the answer."""


class DaemonPlanner:
    """The running daemon, asked what an open would get now: no open session's numbers are quoted.

    ``machine`` is a machine file's text, "" for the daemon's own; ``source`` is that file's name,
    which the daemon never learns.
    """

    by = BY_DAEMON

    def __init__(self, client: Client, machine: str = "", source: str = "") -> None:
        self._client = client
        self._machine = machine
        self._source = source

    def describe(self, model: str, wanted: Wanted) -> Description:
        described = self._client.describe(
            model,
            window=wanted.window,
            k_type=wanted.k_type,
            v_type=wanted.v_type,
            sessions=wanted.sessions,
            layout=wanted.layout,
            machine=self._machine,
            what_if=wanted.what_if,
            companions=wanted.companions,
            hypothetical=True,
        )
        if not self._source:
            return described
        return replace(described, machine=replace(described.machine, source=self._source))


class LocalPlanner:
    """The same planner in this process, with the configuration that a daemon would have here.

    Models and what the engine said of them are kept from one question to the next.
    """

    def __init__(
        self,
        root: Path,
        by: str,
        *,
        machine: MachineReading | None = None,
        config: Config | None = None,
    ) -> None:
        from modeld.supervisor.config import load_config
        from modeld.supervisor.probes.machine import MachineProbe

        self.by = by
        self.config = config or load_config({}, os.environ, root)
        self._root = root
        self._machine = machine
        self._probe = MachineProbe()
        self._models: dict[str, StoredModel] = {}
        self._asked: dict[tuple[str, bytes], AskAnswer] = {}

    @classmethod
    def beside(cls, planner: Planner, root: Path, device: Path | None) -> LocalPlanner:
        """``planner`` itself where it is one of these; else one for the same machine."""
        if isinstance(planner, cls):
            return planner
        return cls(root, HERE_A_FILE, machine=_machine_file(device)[1] if device else None)

    def describe(self, model: str, wanted: Wanted) -> Description:
        from modeld.supervisor import offline

        stored = self._find(model)
        answer = offline.describe(
            self.config,
            stored,
            self._request(stored.type, wanted),
            machine=self._machine,
            what_if=wanted.what_if,
            companions=wanted.companions,
            probe=self._probe,
            ask=self._ask,
        )
        return from_proto(Description, answer)

    def _request(self, model_type: str, wanted: Wanted) -> CapacityRequest:
        config = self.config
        if wanted.what_if:
            config = config.with_settings(wanted.what_if, "what-if")
        k_type, v_type = config.kv_types(model_type, wanted.k_type, wanted.v_type)
        return CapacityRequest(
            window=wanted.window,
            k_type=k_type,
            v_type=v_type,
            sessions=wanted.sessions,
            streams=config.streams(wanted.layout),
        )

    def _find(self, model: str) -> StoredModel:
        from modeld.supervisor.offline import find_model

        found = self._models.get(model)
        if found is None:
            found = self._models[model] = find_model(model, self._root)
        return found

    def _ask(self, backend: str, request: AskRequest) -> AskAnswer:
        from modeld.supervisor.asking import ask_engine

        key = backend, msgspec.json.encode(request)
        answer = self._asked.get(key)
        if answer is None:
            answer = self._asked[key] = ask_engine(backend, request)
        return answer


@contextmanager
def planner(settings: Settings, model: str, device: Path | None) -> Iterator[Planner]:
    """Whoever answers about ``model``: the daemon of the data root for one of its names.

    ``device`` is a machine file to plan for. Raises InvalidRequest for one that can't be used, and
    for a path that can't be one.
    """
    from modeld.supervisor.offline import names_a_file

    text, machine = _machine_file(device) if device else ("", None)
    if names_a_file(model, settings.root) and not _daemon_has(settings, model):
        yield LocalPlanner(settings.root, HERE_A_FILE, machine=machine)
        return
    try:
        client = connect(settings)
    except (NotRunning, Stale):
        yield LocalPlanner(settings.root, HERE_NO_DAEMON, machine=machine)
        return
    with client:
        yield DaemonPlanner(client, text, _source(device) if device else "")


def _daemon_has(settings: Settings, model: str) -> bool:
    """Whether a running daemon serves a model of that name. One that doesn't answer has none."""
    if not MODEL_NAME.match(model):
        return False
    try:
        with connect(settings) as client:
            return any(one.name == model for one in client.models())
    except (ClientError, ModeldError):
        return False


def _machine_file(path: Path) -> tuple[str, MachineReading]:
    """The file's text and what it says, of one reading of it."""
    from modeld.supervisor.probes.simulated import machine_text, parse_machine

    text = machine_text(path)
    return text, parse_machine(text, _source(path))


def _source(path: Path) -> str:
    """The file's name as text: one that isn't UTF-8 can't be part of an answer."""
    return str(path).encode(errors="backslashreplace").decode()


# --- what is loaded beside the model -----------------------------------------------------------


def projector(path: Path) -> tuple[Companions, str]:
    """A projector's weights, and an estimate of its buffer."""
    facts = _companion(path, FileKind.PROJECTOR)
    buffer = max(PROJECTOR_LEAST_BYTES, facts.weights_bytes * 3 // 2)
    note = (
        f"projector: {facts.weights_bytes} bytes of weights, and {buffer} bytes for its buffer: an "
        "estimate (1.5 times its weights, at least 512 MiB), since the picture decides it"
    )
    return Companions(projector_bytes=facts.weights_bytes, projector_compute_bytes=buffer), note


def adapters(paths: tuple[Path, ...]) -> tuple[int, str]:
    """The adapters' weights together."""
    total = sum(_companion(path, FileKind.ADAPTER).weights_bytes for path in paths)
    return total, f"adapters: {total} bytes of weights in {len(paths)} file(s)"


def window_of(described: Description) -> int:
    """Tokens that a session gets, or those that a refused plan was tried with."""
    plan = described.resolution
    return plan.context.effective.tokens or int(plan.refusal.numbers.get("window", "0"))


def draft(
    local: LocalPlanner, path: str, tokens: int, what_if: Mapping[str, str]
) -> tuple[int, str]:
    """What a draft model takes for one context of ``tokens``, or of its ceiling if that is less,
    with the settings' KV types (``--kv`` is the model's own).
    """
    wanted = Wanted(
        window=tokens,
        what_if=what_if,
    )
    described = local.describe(path, wanted)
    plan = described.resolution
    total = plan.weights_bytes + plan.kv_bytes + plan.compute_bytes
    note = (
        f"draft: {described.model}, {plan.weights_bytes} bytes of weights, {plan.kv_bytes} of KV "
        f"and {plan.compute_bytes} of compute for one context of {window_of(described)} tokens"
    )
    return total, note


def _companion(path: Path, kind: FileKind) -> ModelFacts:
    from modeld.supervisor.models.facts import read_facts

    facts = read_facts(path, any_kind=True)
    if facts.file_kind is not kind:
        found = facts.file_kind.value
        article = "an" if kind is FileKind.ADAPTER else "a"
        raise InvalidRequest.of(
            kind.value,
            str(path),
            f"{article} {kind.value}'s file",
            f"It is a {found}'s: "
            + ("name it as MODEL." if facts.file_kind is FileKind.MODEL else f"use --{found}."),
        )
    return facts
