"""The models in the data root: a folder each, with the file and a record of what it is.

Owns names, digests, imports and removals below ``<data_root>/models``. It doesn't know what is
resident: whoever calls ``import_file(replace=True)`` or ``remove`` decides that first. Every
method blocks on the disk; call it in a thread.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import (
    DigestMismatch,
    InvalidRequest,
    ModeldError,
    ModelLoadFailed,
    ModelNotFound,
    StorageFull,
)
from modeld.shared.gguf_parts import is_part, part_paths
from modeld.shared.ids import MODEL_NAME, check_model_name
from modeld.shared.manifest import sha256_hex
from modeld.supervisor.durable import fsync_dir, storage_errors, write_atomic
from modeld.supervisor.models.facts import VERSION as FACTS_VERSION
from modeld.supervisor.models.facts import read_facts
from modeld.supervisor.models.intake import (
    ImportProgress,
    check_digest,
    check_expected,
    check_source,
    check_type,
    derive_name,
    hard_link,
    hash_file,
    no_progress,
    opened,
    same_file,
)

log = logging.getLogger(__name__)

MODEL_FILE = "model.gguf"
RECORD_FILE = "model.json"
SPARE_BYTES = 16 * 1024 * 1024  # left free on the filesystem beside a copy
_INCOMING = ".incoming-"
_TRASH = ".trash-"


class PartRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of a split set, as it was when it was hashed."""

    digest: str
    size_bytes: int
    mtime_ns: int
    inode: int


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``model.json`` says. ``digest`` is SHA-256 hex; size, time and inode are the file's
    when it was hashed, so that a later change of it shows.

    Of a split set they are the first part's but for the size, which is of all, and the digest,
    which is the SHA-256 of the parts' digests in hex, a line each.
    """

    name: str
    type: str
    digest: str
    size_bytes: int
    mtime_ns: int
    inode: int
    facts: ModelFacts
    imported_unix_ms: int
    linked: bool  # shares its blocks with the file it was imported from
    parts: tuple[PartRecord, ...] = ()  # of a split set, in order
    facts_version: int = 0  # of what was read of it; an older one is read again


@dataclass(frozen=True)
class StoredModel:
    """A model as it stands in the store."""

    record: ModelRecord
    path: Path  # the model file, or the first of a split set

    @property
    def files(self) -> tuple[Path, ...]:
        """All its files, in order."""
        return tuple(self.path.with_name(name) for name in _file_names(self.record.facts.parts))

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def type(self) -> str:
        return self.record.type

    @property
    def digest(self) -> str:
        return self.record.digest

    @property
    def size_bytes(self) -> int:
        return self.record.size_bytes

    @property
    def facts(self) -> ModelFacts:
        return self.record.facts

    @property
    def imported_unix_ms(self) -> int:
        return self.record.imported_unix_ms

    @property
    def linked(self) -> bool:
        return self.record.linked


@dataclass(frozen=True)
class DiskStats:
    """Bytes. A linked model counts in full, although it shares its blocks."""

    data_root: Path
    models_bytes: int
    snapshots_bytes: int
    free_bytes: int
    total_bytes: int


class ModelStore:
    """Models by name. Safe against other processes that import into the same folder."""

    def __init__(self, data_root: Path, read: Callable[[Path], ModelFacts] = read_facts) -> None:
        """Create the folder and sweep what a crash left in it. Raises StorageFull."""
        self._data_root = data_root
        self._root = data_root / "models"
        self._read = read
        self._as_they_are: set[str] = set()  # models whose older facts can't be read again
        with storage_errors("the model store", data_root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep()

    # --- looking -----------------------------------------------------------------------------

    def list(self) -> tuple[StoredModel, ...]:
        """Every model with a readable record, by name. Files are not checked for changes here."""
        found = []
        for folder in sorted(self._root.iterdir()):
            if not MODEL_NAME.match(folder.name) or not _is_plain_dir(folder):
                continue
            try:
                found.append(self._load(folder))
            except ModelLoadFailed as error:
                log.warning("model %s is left out of the list: %s", folder.name, error.message)
        return tuple(found)

    def get(self, name: str) -> StoredModel:
        """The model, after a check (of a stat's cost) that its file is the one that was hashed.

        Raises InvalidRequest (not a name), ModelNotFound (with near names), DigestMismatch (the
        file was changed) or ModelLoadFailed (its record can't be read).
        """
        model = self._find(name)
        _check_unchanged(model)
        return model

    def smaller_than(self, facts: ModelFacts) -> tuple[ModelFacts, ...]:
        """Facts, under their names here, of smaller files of the same architecture and shape: what
        may be used in the place of one that doesn't fit. The largest first.
        """
        shape = _shape(facts)
        others = [
            replace(model.facts, name=model.name)
            for model in self.list()
            if _shape(model.facts) == shape and model.facts.weights_bytes < facts.weights_bytes
        ]
        return tuple(sorted(others, key=lambda other: -other.weights_bytes))

    def rehash(self, name: str, progress: ImportProgress | None = None) -> StoredModel:
        """Hash the file again. Raises DigestMismatch if it isn't what was imported.

        Where only its time or inode differ (a restored backup), the record is brought up to date.
        """
        model = self._find(name)
        found = []
        for file in model.files:
            with opened(file) as (fd, before):
                digest = hash_file(fd, before.st_size, None, progress)
                if not same_file(before, os.fstat(fd)):
                    raise _changed(model, "it changes while it is read")
                found.append(_part_record(digest, before))
        digest = set_digest([part.digest for part in found])
        if digest != model.digest:
            raise _changed(model, f"its SHA-256 is {digest}, not {model.digest}")
        record = msgspec.structs.replace(
            model.record,
            mtime_ns=found[0].mtime_ns,
            inode=found[0].inode,
            parts=tuple(found) if len(found) > 1 else (),
        )
        if record != model.record:
            write_atomic(model.path.with_name(RECORD_FILE), _encode(record))
        return StoredModel(record, model.path)

    def disk_stats(self) -> DiskStats:
        usage = shutil.disk_usage(self._root)
        return DiskStats(
            data_root=self._data_root,
            models_bytes=_tree_bytes(self._root),
            snapshots_bytes=_tree_bytes(self._data_root / "snapshots"),
            free_bytes=usage.free,
            total_bytes=usage.total,
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
    ) -> StoredModel:
        """Verify a file and take it into the store: a hard link where that works, else a copy.

        A file that is already there under this name, with the same content, is simply answered.
        Raises InvalidRequest (path, name, name taken), BackendMismatch or UnsupportedModelType,
        ModelLoadFailed (not a whole GGUF model), DigestMismatch (``expected_digest``), or
        StorageFull. Whatever is raised, the store is as it was before.
        """
        source = check_source(path)
        # By the name that was given: what it links to may be named after its content.
        name = check_model_name(name) if name else derive_name(path)
        check_type(model_type)
        expected_digest = check_digest(expected_digest)
        before = source.stat()
        existing = self._existing(name)
        if existing is not None and not replace:
            if _is_record_of(existing.record, before):
                _check_unchanged(existing)
                check_expected(existing.digest, expected_digest, source)
                return existing  # the very file that was linked: nothing to hash again
            alone = not existing.record.parts and not is_part(path)
            if alone and existing.record.size_bytes != before.st_size:
                raise self._name_taken(name)
        try:
            return self._build(path, name, copy, replace, expected_digest, progress or no_progress)
        except OSError as error:
            raise InvalidRequest.of(
                "path",
                str(source),
                "a file that can be read",
                f"The system says: {error.strerror or error}.",
            ) from None

    def _build(
        self,
        path: Path,
        name: str,
        copy: bool,
        replace: bool,
        expected_digest: str,
        report: ImportProgress,
    ) -> StoredModel:
        """The import itself, once its arguments are known to be good."""
        report("check", 0, path.stat().st_size)
        facts = self._read(path)
        sources = [check_source(part) for part in part_paths(path, facts.parts)]
        before = [source.stat() for source in sources]
        total, done = sum(status.st_size for status in before), 0
        with self._incoming() as folder, storage_errors("the model", self._root):
            parts: list[PartRecord] = []
            linked = True
            for source, status, file_name in zip(
                sources, before, _file_names(facts.parts), strict=True
            ):
                file = folder / file_name
                link = not copy and hard_link(source, file)
                linked = linked and link
                digest, taken = self._take(source, file, link, _after(report, done, total))
                if not same_file(status, source.stat()):
                    raise InvalidRequest(
                        f"{source} changed while it was imported. Import it when it is complete.",
                        metadata={"field": "path", "value": source},
                    )
                parts.append(_part_record(digest, taken))
                done += status.st_size
            digest = set_digest([part.digest for part in parts])
            check_expected(digest, expected_digest, sources[0])
            record = ModelRecord(
                name=name,
                type="llama",
                digest=digest,
                size_bytes=sum(part.size_bytes for part in parts),
                mtime_ns=parts[0].mtime_ns,
                inode=parts[0].inode,
                facts=facts,
                imported_unix_ms=time.time_ns() // 1_000_000,
                linked=linked,
                parts=tuple(parts) if len(parts) > 1 else (),
                facts_version=FACTS_VERSION,
            )
            write_atomic(folder / RECORD_FILE, _encode(record))
            return self._install(folder, record, replace)

    def remove(self, name: str) -> int:
        """Remove a model; returns the bytes that this freed (0 for blocks still shared).

        Raises InvalidRequest or ModelNotFound.
        """
        with self._locked():
            folder = self._folder(name)
            freed = 0
            for file in folder.glob("*.gguf"):
                with contextlib.suppress(OSError):
                    status = file.lstat()
                    freed += status.st_size if status.st_nlink == 1 else 0
            # A rename first: a crash half-way through must not leave half a model.
            trash = self._root / f"{_TRASH}{secrets.token_hex(6)}"
            folder.rename(trash)
            fsync_dir(self._root)
        _remove_tree(trash)
        return freed

    # --- inside ------------------------------------------------------------------------------

    def _folder(self, name: str) -> Path:
        """The model's folder; a link in its place is not followed."""
        folder = self._root / check_model_name(name)
        if not _is_plain_dir(folder):
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
        try:
            fd = os.open(folder / RECORD_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                record = msgspec.json.decode(file.read(), type=ModelRecord)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ModelLoadFailed(
                f"The record of model {folder.name!r} can't be read ({error}). "
                "Import its file again, with replace.",
                metadata={"model": folder.name},
            ) from None
        if record.name != folder.name:
            raise ModelLoadFailed(
                f"The record in {folder.name!r} is that of {record.name!r}. "
                "Remove it, or import the file again with replace.",
                metadata={"model": folder.name},
            )
        if record.facts_version < FACTS_VERSION and record.name not in self._as_they_are:
            record = self._refreshed(record, folder)
        return StoredModel(record, folder / _file_names(record.facts.parts)[0])

    def _refreshed(self, record: ModelRecord, folder: Path) -> ModelRecord:
        """An older version's record with facts as they are read now; as it is if they can't be."""
        try:
            facts = self._read(folder / _file_names(record.facts.parts)[0])
        except ModeldError as error:
            log.warning("the facts of model %s can't be read again: %s", record.name, error.message)
            self._as_they_are.add(record.name)
            return record
        record = msgspec.structs.replace(record, facts=facts, facts_version=FACTS_VERSION)
        try:
            write_atomic(folder / RECORD_FILE, _encode(record))
        except (ModeldError, OSError) as error:
            log.warning("the record of model %s isn't brought up to date: %s", record.name, error)
        return record

    def _take(
        self, source: Path, file: Path, linked: bool, report: ImportProgress
    ) -> tuple[str, os.stat_result]:
        """Hash the link, or copy and hash in one pass; the digest, and the file as it was read."""
        if linked:
            with opened(file) as (fd, status):
                digest = hash_file(fd, status.st_size, None, report)
                if not same_file(status, os.fstat(fd)):
                    raise InvalidRequest(f"{source} changed while it was imported. Try again.")
                with contextlib.suppress(OSError):
                    os.fsync(fd)  # a file just downloaded may not be on the disk yet
                return digest, status
        with opened(source) as (fd, status):
            free = shutil.disk_usage(self._root).free
            if free < status.st_size + SPARE_BYTES:
                raise StorageFull(
                    f"Copying {source.name} needs {status.st_size} bytes and {self._root} has "
                    f"{free} free: nothing was written. Free some space, or move the file to that "
                    "filesystem, where it can be linked.",
                    metadata={"needed_bytes": status.st_size, "free_bytes": free},
                )
            out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                digest = hash_file(fd, status.st_size, out, report)
                os.fsync(out)
                return digest, os.fstat(out)
            finally:
                os.close(out)

    def _install(self, folder: Path, record: ModelRecord, replace: bool) -> StoredModel:
        """Put a finished folder in its place; one of several importers of a name wins."""
        target = self._root / record.name
        trash = None
        with self._locked():
            if target.exists() or target.is_symlink():
                existing = self._existing(record.name)
                if not replace:
                    if existing is not None and existing.digest == record.digest:
                        _check_unchanged(existing)
                        return existing
                    raise self._name_taken(record.name)
                # The name tells the sweep where it belongs, should a crash come in between.
                trash = self._root / f"{_TRASH}{secrets.token_hex(6)}-{record.name}"
                target.rename(trash)
            try:
                folder.rename(target)
            except BaseException:
                if trash is not None:
                    trash.rename(target)
                raise
            fsync_dir(self._root)
        if trash is not None:
            _remove_tree(trash)
        return StoredModel(record, target / _file_names(record.facts.parts)[0])

    def _name_taken(self, name: str) -> InvalidRequest:
        return InvalidRequest.of(
            "name",
            name,
            "a name that isn't taken by another model",
            "Give another name, or replace the one that is there.",
        )

    @contextlib.contextmanager
    def _incoming(self) -> Iterator[Path]:
        """A folder to build a model in, locked while this process lives; gone afterwards."""
        folder = self._root / f"{_INCOMING}{secrets.token_hex(6)}"
        with storage_errors("the model", self._root), self._locked():
            folder.mkdir(mode=0o700)
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            os.close(fd)
            _remove_tree(folder)

    def _sweep(self) -> None:
        """Remove what crashed imports and removals left; put back what a crash left nowhere."""
        with self._locked():
            for leftover in list(self._root.glob(f"{_TRASH}*")):
                _, _, name = leftover.name.removeprefix(_TRASH).partition("-")
                if name and not (self._root / name).exists():
                    leftover.rename(self._root / name)
                else:
                    _remove_tree(leftover)
            for leftover in list(self._root.glob(f"{_INCOMING}*")):
                if not _in_use(leftover):
                    log.info("removing the unfinished import %s", leftover.name)
                    _remove_tree(leftover)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with storage_errors("the model store", self._root):
            fd = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _file_names(parts: int) -> list[str]:
    """As the engine finds the parts of a set: by their names, from the first's."""
    if parts == 1:
        return [MODEL_FILE]
    return [f"model-{number:05d}-of-{parts:05d}.gguf" for number in range(1, parts + 1)]


def set_digest(digests: Sequence[str]) -> str:
    """A model's digest from its files'. A single file's is its own."""
    if len(digests) == 1:
        return digests[0]
    return sha256_hex("".join(f"{digest}\n" for digest in digests).encode())


def _part_record(digest: str, status: os.stat_result) -> PartRecord:
    return PartRecord(
        digest=digest,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
    )


def _after(report: ImportProgress, before: int, total: int) -> ImportProgress:
    """Progress of one file of several as that of all."""
    return lambda stage, done, _: report(stage, before + done, total)


def _shape(facts: ModelFacts) -> tuple[object, ...]:
    layers = sum(run.count for run in facts.layers)
    return facts.architecture, layers, facts.embedding_length, facts.vocabulary


def _is_record_of(record: ModelRecord | PartRecord, status: os.stat_result) -> bool:
    return (record.size_bytes, record.mtime_ns, record.inode) == (
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
    )


def _check_unchanged(model: StoredModel) -> None:
    parts = model.record.parts or (None,)
    for file, part in zip(model.files, parts, strict=True):
        try:
            status = file.lstat()
        except OSError as error:
            raise _changed(model, f"{file.name} can't be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise _changed(model, f"{file.name} is not a regular file any more")
        if not _is_record_of(part or model.record, status):
            raise _changed(model, f"{file.name} has another size, time or inode")


def _changed(model: StoredModel, why: str) -> DigestMismatch:
    shared = " It shares its blocks with the imported file." if model.record.linked else ""
    return DigestMismatch(
        f"The file of model {model.name!r} is not the one that was imported: {why}.{shared} "
        "Import it again, with replace.",
        metadata={"model": model.name, "expected": model.digest},
    )


def _encode(record: ModelRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def _is_plain_dir(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _in_use(folder: Path) -> bool:
    """Whether a living process builds in it (it holds the folder's lock)."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _remove_tree(path: Path) -> None:
    """Remove a folder or whatever is in its place; a rest that stays is swept at the next start."""
    if _is_plain_dir(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                total += (Path(parent) / name).lstat().st_size
    return total
