"""What the store remembers of a model, and whether its files still are what was remembered.

Values and their form on the disk; knows nothing of how a model gets into the store.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import DigestMismatch, ModelLoadFailed
from modeld.shared.manifest import sha256_hex

MODEL_FILE = "model.gguf"
MODEL_FOLDER = "ir"  # an OpenVINO model's files, in the model's own folder
RECORD_FILE = "model.json"


class PartRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of several, as it was when it was hashed."""

    digest: str
    size_bytes: int
    mtime_ns: int
    inode: int
    name: str = ""  # in an OpenVINO folder; "": one of a split set, named by its place


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``model.json`` says. ``digest`` is SHA-256 hex; size, time and inode are the file's
    when it was hashed, so that a later change of it shows.

    Of several files they are the first one's but for the size, which is of all, and the digest:
    ``set_digest`` of a split set, ``folder_digest`` of a folder.
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
    parts: tuple[PartRecord, ...] = ()  # of a split set, in order; of a folder, by name
    facts_version: int = 0  # of what was read of it; an older one is read again

    @property
    def is_folder(self) -> bool:
        return bool(self.parts and self.parts[0].name)

    @property
    def file_names(self) -> tuple[str, ...]:
        """Below the model's own folder."""
        if self.is_folder:
            return tuple(f"{MODEL_FOLDER}/{part.name}" for part in self.parts)
        return tuple(set_names(self.facts.parts))


@dataclass(frozen=True)
class StoredModel:
    """A model as it stands in the store."""

    record: ModelRecord
    path: Path  # the model file, the first of a split set, or an OpenVINO model's folder

    @property
    def files(self) -> tuple[Path, ...]:
        """All its files, in order."""
        return tuple(self.path.parent / name for name in self.record.file_names)

    @property
    def converts(self) -> bool:
        """Whether its engine runs what is made of it, and not the file itself."""
        return self.record.type == "openvino" and self.path.suffix == ".gguf"

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


def stored(record: ModelRecord, folder: Path) -> StoredModel:
    """The model whose own folder this is."""
    first = MODEL_FOLDER if record.is_folder else record.file_names[0]
    return StoredModel(record, folder / first)


@dataclass(frozen=True)
class DiskStats:
    """Bytes. A linked model counts in full, although it shares its blocks; what was converted of
    one counts with the models.
    """

    data_root: Path
    models_bytes: int
    snapshots_bytes: int
    free_bytes: int
    total_bytes: int
    durable_bytes: int = 0
    cold_bytes: int = 0  # parked KV on disk


def set_names(parts: int) -> list[str]:
    """As the engine finds the parts of a set: by their names, from the first's."""
    if parts == 1:
        return [MODEL_FILE]
    return [f"model-{number:05d}-of-{parts:05d}.gguf" for number in range(1, parts + 1)]


def set_digest(digests: Sequence[str]) -> str:
    """A model's digest from its files'. A single file's is its own."""
    if len(digests) == 1:
        return digests[0]
    return sha256_hex("".join(f"{digest}\n" for digest in digests).encode())


def folder_digest(digests: Iterable[tuple[str, str]]) -> str:
    """A folder's digest from (name, digest) of its files: the SHA-256 of what ``sha256sum`` prints
    for them in the order of their names' bytes, a line each: digest, two spaces, name.
    """
    lines = sorted((name.encode(), digest) for name, digest in digests)
    return sha256_hex(b"".join(digest.encode() + b"  " + name + b"\n" for name, digest in lines))


def part_record(digest: str, status: os.stat_result, name: str = "") -> PartRecord:
    return PartRecord(
        digest=digest,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
        name=name,
    )


def digest_of(parts: Sequence[PartRecord]) -> str:
    """The model's digest from the records of all its files."""
    if parts[0].name:
        return folder_digest((part.name, part.digest) for part in parts)
    return set_digest([part.digest for part in parts])


def shape(facts: ModelFacts) -> tuple[object, ...]:
    layers = sum(run.count for run in facts.layers)
    return (
        facts.model_type,
        facts.architecture,
        layers,
        facts.embedding_length,
        facts.vocabulary,
    )


# --- the disk ----------------------------------------------------------------------------------


def is_record_of(record: ModelRecord | PartRecord, status: os.stat_result) -> bool:
    return (record.size_bytes, record.mtime_ns, record.inode) == (
        status.st_size,
        status.st_mtime_ns,
        status.st_ino,
    )


def check_unchanged(model: StoredModel) -> None:
    """Raise DigestMismatch unless every file is the one that was hashed, by a stat."""
    parts = model.record.parts or (None,)
    for file, part in zip(model.files, parts, strict=True):
        try:
            status = file.lstat()
        except OSError as error:
            raise changed(model, f"{file.name} can't be read: {error.strerror}") from None
        if not stat.S_ISREG(status.st_mode):
            raise changed(model, f"{file.name} is not a regular file any more")
        if not is_record_of(part or model.record, status):
            raise changed(model, f"{file.name} has another size, time or inode")
    if model.record.is_folder:
        _check_nothing_added(model)


def _check_nothing_added(model: StoredModel) -> None:
    """What lies in the folder unasked would be read by the engine all the same."""
    known = set(model.files)
    for parent, _, names in os.walk(model.path):
        for name in names:
            if Path(parent) / name not in known:
                raise changed(model, f"{name[:100]} has come into its folder")


def changed(model: StoredModel, why: str) -> DigestMismatch:
    shared = " It shares its blocks with the imported file." if model.record.linked else ""
    what = "files" if model.record.is_folder else "file"
    return DigestMismatch(
        f"The {what} of model {model.name!r} {'are' if what == 'files' else 'is'} not the "
        f"{'ones that were' if what == 'files' else 'one that was'} imported: {why}.{shared} "
        "Import it again, with replace.",
        metadata={"model": model.name, "expected": model.digest},
    )


def encode(record: ModelRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def read_record(folder: Path) -> ModelRecord:
    """The record in a model's own folder. Raises ModelLoadFailed."""
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
    return record
