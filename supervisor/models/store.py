"""The models in the data root: a folder each, with the files and a record of what they are.

Owns names, digests, imports and removals below ``<data_root>/models``, and which conversions
(``conversion``) are still of use. It doesn't know what is resident: whoever calls
``import_file(replace=True)`` or ``remove`` decides that first. Every method blocks on the disk;
call it in a thread.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import msgspec

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import InvalidRequest, ModeldError, ModelLoadFailed, ModelNotFound
from modeld.shared.gguf_parts import is_part
from modeld.shared.ids import MODEL_NAME, check_model_name
from modeld.supervisor.durable import storage_errors, write_atomic
from modeld.supervisor.models.conversion import Conversions
from modeld.supervisor.models.facts import VERSION as FACTS_VERSION
from modeld.supervisor.models.facts import read_facts
from modeld.supervisor.models.folders import Folders, is_plain_dir, remove_tree, tree_bytes
from modeld.supervisor.models.intake import (
    TYPES,
    ImportProgress,
    check_digest,
    check_expected,
    check_model_source,
    check_served,
    check_type,
    derive_name,
    hash_file,
    no_progress,
    opened,
    same_file,
)
from modeld.supervisor.models.records import (
    RECORD_FILE,
    DiskStats,
    ModelRecord,
    PartRecord,
    StoredModel,
    changed,
    check_unchanged,
    digest_of,
    encode,
    is_record_of,
    part_record,
    read_record,
    shape,
    stored,
)
from modeld.supervisor.models.sources import Source, folder_sources, gguf_sources, take_all

__all__ = ["DiskStats", "ModelRecord", "ModelStore", "PartRecord", "StoredModel"]

log = logging.getLogger(__name__)

ReadFacts = Callable[[Path, str], ModelFacts]


class ModelStore:
    """Models by name. Safe against other processes that import into the same folder."""

    def __init__(self, data_root: Path, read: ReadFacts = read_facts) -> None:
        """Create the folder and sweep what a crash left in it. Raises StorageFull."""
        self._data_root = data_root
        self._root = data_root / "models"
        self._read = read
        self._as_they_are: set[str] = set()  # models whose older facts can't be read again
        self._folders = Folders(self._root, "the model store")
        self._folders.make()
        self._folders.sweep()
        self.conversions = Conversions(data_root)
        self.conversions.sweep(self._converted_digests)

    # --- looking -----------------------------------------------------------------------------

    def list(self) -> tuple[StoredModel, ...]:
        """Every model with a readable record, by name. Files are not checked for changes here."""
        found = []
        for folder in sorted(self._root.iterdir()):
            if not MODEL_NAME.match(folder.name) or not is_plain_dir(folder):
                continue
            try:
                found.append(self._load(folder))
            except ModelLoadFailed as error:
                log.warning("model %s is left out of the list: %s", folder.name, error.message)
        return tuple(found)

    def get(self, name: str) -> StoredModel:
        """The model, after a check (of a stat's cost) that its files are the ones that were hashed.

        Raises InvalidRequest (not a name), ModelNotFound (with near names), DigestMismatch (a
        file was changed) or ModelLoadFailed (its record can't be read).
        """
        model = self._find(name)
        check_unchanged(model)
        return model

    def smaller_than(self, facts: ModelFacts) -> tuple[ModelFacts, ...]:
        """Facts, under their names here, of smaller files of the same architecture and shape: what
        may be used in the place of one that doesn't fit. The largest first.
        """
        wanted = shape(facts)
        others = [
            replace(model.facts, name=model.name)
            for model in self.list()
            if shape(model.facts) == wanted and model.facts.weights_bytes < facts.weights_bytes
        ]
        return tuple(sorted(others, key=lambda other: -other.weights_bytes))

    def rehash(self, name: str, progress: ImportProgress | None = None) -> StoredModel:
        """Hash the files again. Raises DigestMismatch if they aren't what was imported.

        Where only a time or an inode differs (a restored backup), the record is brought up to date.
        """
        model = self._find(name)
        found = []
        names = [part.name for part in model.record.parts] or [""]
        for file, part_name in zip(model.files, names, strict=True):
            with opened(file) as (fd, before):
                digest = hash_file(fd, before.st_size, None, progress)
                if not same_file(before, os.fstat(fd)):
                    raise changed(model, "it changes while it is read")
                found.append(part_record(digest, before, part_name))
        digest = digest_of(found)
        if digest != model.digest:
            raise changed(model, f"its SHA-256 is {digest}, not {model.digest}")
        record = msgspec.structs.replace(
            model.record,
            mtime_ns=found[0].mtime_ns,
            inode=found[0].inode,
            parts=tuple(found) if model.record.parts else (),
        )
        if record != model.record:
            write_atomic(model.path.with_name(RECORD_FILE), encode(record))
        return StoredModel(record, model.path)

    def disk_stats(self) -> DiskStats:
        usage = shutil.disk_usage(self._root)
        return DiskStats(
            data_root=self._data_root,
            models_bytes=tree_bytes(self._root) + self.conversions.total_bytes(),
            snapshots_bytes=tree_bytes(self._data_root / "snapshots"),
            free_bytes=usage.free,
            total_bytes=usage.total,
            durable_bytes=tree_bytes(self._data_root / "durable"),
            cold_bytes=tree_bytes(self._data_root / "cold"),
        )

    # --- changing ----------------------------------------------------------------------------

    def import_file(
        self,
        path: Path,
        name: str = "",
        model_type: str = "",
        *,
        copy: bool = False,
        replace: bool = False,
        expected_digest: str = "",
        progress: ImportProgress | None = None,
        served: Collection[str] = TYPES,
    ) -> StoredModel:
        """Verify a GGUF file or an OpenVINO folder and take it into the store: hard links where
        that works, else a copy. ``model_type`` "": by the content. ``served``: the types that the
        daemon runs.

        What is already there under this name, with the same content and type, is simply answered.
        Raises InvalidRequest (path, name, name taken), BackendMismatch or UnsupportedModelType,
        ModelLoadFailed (not a whole model), UnsupportedFeature (not one that OpenVINO's converter
        makes the same of), DigestMismatch (``expected_digest``), or StorageFull. Whatever is
        raised, the store is as it was before.
        """
        check_type(model_type)
        source = check_model_source(path, model_type)
        model_type = model_type or ("openvino" if source.is_dir() else "llama")
        check_served(model_type, served)
        # By the name that was given: what it links to may be named after its content.
        name = check_model_name(name) if name else derive_name(path, is_folder=source.is_dir())
        expected_digest = check_digest(expected_digest)
        if not replace and not source.is_dir():
            existing = self._imported_before(path, source, name, model_type)
            if existing is not None:
                check_expected(existing.digest, expected_digest, source)
                return existing
        try:
            return self._build(
                path if not source.is_dir() else source,
                name,
                model_type,
                copy,
                replace,
                expected_digest,
                progress or no_progress,
            )
        except OSError as error:
            raise InvalidRequest.of(
                "path",
                str(source),
                "a file that can be read",
                f"The system says: {error.strerror or error}.",
            ) from None

    def _imported_before(
        self, path: Path, source: Path, name: str, model_type: str
    ) -> StoredModel | None:
        """The model of that name if it is the very file; InvalidRequest if it can't be it."""
        existing, status = self._existing(name), source.stat()
        if existing is None:
            return None
        if is_record_of(existing.record, status) and existing.type == model_type:
            check_unchanged(existing)
            return existing  # the very file that was linked: nothing to hash again
        alone = not existing.record.parts and not is_part(path)
        if alone and existing.record.size_bytes != status.st_size:
            raise self._name_taken(name)
        return None

    def _build(
        self,
        path: Path,
        name: str,
        model_type: str,
        copy: bool,
        replace: bool,
        expected_digest: str,
        report: ImportProgress,
    ) -> StoredModel:
        """The import itself, once its arguments are known to be good."""
        sources: list[Source] = []
        if path.is_dir():
            sources = folder_sources(path)
            report("check", 0, sum(source.path.stat().st_size for source in sources))
            facts = self._read(path, model_type)
        else:
            report("check", 0, path.stat().st_size)
            facts = self._read(path, model_type)
            sources = gguf_sources(path, facts)
        with self._folders.incoming() as folder, storage_errors("the model", self._root):
            parts, linked = take_all(sources, folder, copy=copy, report=report)
            digest = digest_of(parts)
            check_expected(digest, expected_digest, path)
            record = ModelRecord(
                name=name,
                type=model_type,
                digest=digest,
                size_bytes=sum(part.size_bytes for part in parts),
                mtime_ns=parts[0].mtime_ns,
                inode=parts[0].inode,
                facts=facts,
                imported_unix_ms=time.time_ns() // 1_000_000,
                linked=linked,
                parts=tuple(parts) if len(parts) > 1 or parts[0].name else (),
                facts_version=FACTS_VERSION,
            )
            write_atomic(folder / RECORD_FILE, encode(record))
            return self._install(folder, record, replace)

    def remove(self, name: str) -> int:
        """Remove a model, and what was converted of it if no other model needs that.

        Returns the bytes that this freed (0 for blocks still shared). Raises InvalidRequest or
        ModelNotFound.
        """
        with self._folders.locked():
            folder = self._folder(name)
            record = folder / RECORD_FILE
            freed = tree_bytes(folder, freed=True)
            with contextlib.suppress(OSError):
                freed -= record.lstat().st_size  # none of the model's own
            trash = self._folders.take_away(name)
        remove_tree(trash)
        return freed + self.conversions.discard_unneeded(self._converted_digests)

    # --- inside ------------------------------------------------------------------------------

    def _converted_digests(self) -> frozenset[str]:
        """Of the models whose conversion is of use."""
        return frozenset(model.digest for model in self.list() if model.converts)

    def _folder(self, name: str) -> Path:
        """The model's folder; a link in its place is not followed."""
        folder = self._root / check_model_name(name)
        if not is_plain_dir(folder):
            raise self._not_found(name)
        return folder

    def _not_found(self, name: str) -> ModelNotFound:
        names = [model.name for model in self.list()]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        if near:
            hint = f"Did you mean {' or '.join(repr(n) for n in near)}?"
        elif names:
            hint = f"The store holds: {', '.join(names[:10])}."
        else:
            hint = "The store is empty: import a GGUF file with `modeld models import FILE`."
        return ModelNotFound(
            f"No model is named {name!r}. {hint}", metadata={"model": name, "near": ",".join(near)}
        )

    def _find(self, name: str) -> StoredModel:
        return self._load(self._folder(name))

    def _existing(self, name: str) -> StoredModel | None:
        """A model of that name, unless there is none or nothing usable."""
        try:
            return self._find(name)
        except (ModelNotFound, ModelLoadFailed):
            return None

    def _load(self, folder: Path) -> StoredModel:
        record = read_record(folder)
        if record.facts_version < FACTS_VERSION and record.name not in self._as_they_are:
            record = self._refreshed(record, folder)
        return stored(record, folder)

    def _refreshed(self, record: ModelRecord, folder: Path) -> ModelRecord:
        """An older version's record with facts as they are read now; as it is if they can't be."""
        try:
            facts = self._read(stored(record, folder).path, record.type)
        except ModeldError as error:
            log.warning("the facts of model %s can't be read again: %s", record.name, error.message)
            self._as_they_are.add(record.name)
            return record
        record = msgspec.structs.replace(record, facts=facts, facts_version=FACTS_VERSION)
        try:
            write_atomic(folder / RECORD_FILE, encode(record))
        except (ModeldError, OSError) as error:
            log.warning("the record of model %s isn't brought up to date: %s", record.name, error)
        return record

    def _install(self, folder: Path, record: ModelRecord, replace: bool) -> StoredModel:
        """Put a finished folder in its place; one of several importers of a name wins."""
        target = self._root / record.name
        with self._folders.locked():
            if not replace and (target.exists() or target.is_symlink()):
                existing = self._existing(record.name)
                same = (record.digest, record.type)
                if existing is not None and (existing.digest, existing.type) == same:
                    check_unchanged(existing)
                    return existing
                raise self._name_taken(record.name)
            trash = self._folders.put(folder, record.name)
        if trash is not None:
            remove_tree(trash)
            self.conversions.discard_unneeded(self._converted_digests)
        return stored(record, target)

    def _name_taken(self, name: str) -> InvalidRequest:
        return InvalidRequest.of(
            "name",
            name,
            "a name that isn't taken by another model",
            "Give another name, or replace the one that is there.",
        )
