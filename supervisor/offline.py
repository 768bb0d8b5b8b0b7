"""Describes a model without a daemon: the same planner, readings and questions, in this process.

For a command line on a machine where nothing runs yet, or for a file that isn't in a store.
Nothing is loaded and nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from modeld.shared.capacity import (
    CapacityRequest,
    Companions,
    FileKind,
    MachineReading,
    ModelFacts,
)
from modeld.shared.errors import InvalidRequest, ModelNotFound
from modeld.shared.ids import MODEL_NAME
from modeld.supervisor.asking import ask_engine
from modeld.supervisor.config import Config
from modeld.supervisor.evidence import EvidenceStore
from modeld.supervisor.models.facts import read_facts
from modeld.supervisor.models.store import ModelRecord, ModelStore, StoredModel
from modeld.supervisor.planning import Ask, Planning, Probe, Question, allowed, check_kv_types
from modeld.supervisor.probes.machine import MachineProbe
from modeld.supervisor.questions import answers
from modeld.supervisor.rpc import convert
from modeld.v1 import session_pb2 as session


def find_model(name_or_path: str, data_root: Path) -> StoredModel:
    """A model of the store by name, or a file or IR folder by path, as ``names_a_file`` says.

    Raises ModelNotFound, ModelLoadFailed, DigestMismatch or InvalidRequest.
    """
    if names_a_file(name_or_path, data_root):
        return _unstored(_path(name_or_path).absolute())
    if not (data_root / "models").is_dir():
        raise ModelNotFound(
            f"No model is named {name_or_path[:200]!r}: there is no store in {data_root}. Name a "
            "GGUF file, or import one with `modeld models import FILE`.",
            metadata={"model": name_or_path[:200], "data_root": data_root},
        )
    return ModelStore(data_root).get(name_or_path)


def names_a_file(name_or_path: str, data_root: Path) -> bool:
    """Whether a model is meant by its path: anything with a slash, or what exists without being
    the name of a model in the store. Raises InvalidRequest for what can be neither.
    """
    if not name_or_path.strip():
        raise InvalidRequest.of("model", name_or_path, "a model's name, or the path of its file")
    if "/" in name_or_path:
        _path(name_or_path)
        return True
    if MODEL_NAME.match(name_or_path) and (data_root / "models" / name_or_path).is_dir():
        return False
    try:
        return _path(name_or_path).exists()
    except OSError:  # longer than a file's name can be
        return False


def _path(text: str) -> Path:
    """The path, with a user's home folder in the place of '~'. Raises InvalidRequest."""
    try:
        text.encode()  # what isn't UTF-8 can't be said to the engine, nor be part of an answer
        return Path(text).expanduser()
    except UnicodeEncodeError:
        raise InvalidRequest.of("model", text[:200], "a path in UTF-8") from None
    except RuntimeError as error:
        raise InvalidRequest.of(
            "model", text[:200], "a path", f"{error} Write ./~... for a folder of that name."
        ) from None


def _unstored(path: Path) -> StoredModel:
    facts = read_facts(path, any_kind=True)
    if facts.file_kind is not FileKind.MODEL:
        raise InvalidRequest.of(
            "model",
            str(path),
            "a model's file",
            f"It is a {facts.file_kind.value}: name the model, and this file with "
            f"--{facts.file_kind.value}.",
        )
    record = ModelRecord(
        name=path.stem or path.name,
        type=facts.model_type,
        digest="",
        size_bytes=facts.file_bytes,
        mtime_ns=0,
        inode=0,
        facts=facts,
        imported_unix_ms=0,
        linked=False,
    )
    return StoredModel(record, path)


def describe(
    config: Config,
    model: StoredModel,
    request: CapacityRequest,
    *,
    machine: MachineReading | None = None,
    what_if: Mapping[str, str] | None = None,
    companions: Companions | None = None,
    probe: Probe | None = None,
    ask: Ask = ask_engine,
) -> session.DescribeResponse:
    """What a daemon with this configuration would answer here; blocks.

    ``machine`` None: this one is read. Raises InvalidRequest or ConfigError.
    """
    config = config.with_settings(what_if, "what-if") if what_if else config
    planning = Planning(
        model.type,
        config,
        probe or MachineProbe(),
        EvidenceStore(config.data_root, read_only=True),
        ask,
    )
    check_kv_types(model.type, request.k_type, request.v_type)
    asyncio.run(planning.ensure_asked(model, request))
    reading = allowed(machine, config.devices) if machine else asyncio.run(planning.read())
    others: tuple[ModelFacts, ...] = ()
    if model.digest and (config.data_root / "models").is_dir():
        others = ModelStore(config.data_root).smaller_than(model.facts)
    question = Question(
        replace(model.facts, name=model.name),  # as it is asked for, not as its file calls itself
        model.digest,
        request,
        companions=companions or Companions(),
        alternatives=others,
    )
    plan = planning.survey(question, reading)
    questions = answers(
        model.facts,
        planning.known_of(model.digest),
        plan,
        reading,
        planning.evidence.quality(model.digest),
        resident=False,
        device_words=planning.device_words(model.digest, request),
    )
    return session.DescribeResponse(
        model=model.name,
        model_type=model.type,
        resolution=convert.resolution(plan),
        questions=convert.capabilities(questions),
        facts=convert.facts(model.facts),
        resolution_source="hypothetical",
        machine=convert.machine(reading),
    )
