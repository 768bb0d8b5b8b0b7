"""What an import is made of: one GGUF file, a split set, or the files of an OpenVINO folder.

Finds the files and takes their bytes; what they are is for ``facts`` to say, where they go for the
store.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from modeld.shared.capacity import ModelFacts
from modeld.shared.errors import InvalidRequest, ModelLoadFailed, StorageFull
from modeld.shared.gguf_parts import part_paths
from modeld.supervisor.models.intake import (
    ImportProgress,
    check_source,
    hard_link,
    hash_file,
    opened,
    same_file,
)
from modeld.supervisor.models.records import MODEL_FOLDER, PartRecord, part_record, set_names

SPARE_BYTES = 16 * 1024 * 1024  # left free on the filesystem beside a copy
# Of an OpenVINO folder; whatever else lies there is of no use to the engine.
SUFFIXES = frozenset({".bin", ".jinja", ".json", ".txt", ".xml"})
NESTED = ("1_Pooling/config.json",)  # how an embedding model says what its vector is
MAX_FILES = 1000


@dataclass(frozen=True)
class Source:
    """One file to take: from where, and to which path below the model's own folder."""

    path: Path
    target: str
    name: str = ""  # in an OpenVINO folder


def gguf_sources(path: Path, facts: ModelFacts) -> list[Source]:
    """A GGUF file, or all parts of its set. Raises InvalidRequest for one that can't be taken."""
    paths = part_paths(path, facts.parts)
    return [
        Source(check_source(part), target)
        for part, target in zip(paths, set_names(facts.parts), strict=True)
    ]


def folder_sources(folder: Path) -> list[Source]:
    """The files of an OpenVINO folder that matter, by name.

    Raises ModelLoadFailed for a link that leads out of it, for what isn't a regular file, and for
    more files than any model has.
    """
    found = [
        name
        for name in sorted(_names(folder), key=os.fsencode)
        if Path(name).suffix in SUFFIXES and not name.startswith(".")
    ]
    found += [name for name in NESTED if os.path.lexists(folder / name)]
    if len(found) > MAX_FILES:
        raise _refused(folder, f"it holds {len(found)} files, and at most {MAX_FILES} are taken")
    sources = []
    for name in sorted(found, key=os.fsencode):
        real = _real(folder, folder / name)
        if real is not None:
            sources.append(Source(real, f"{MODEL_FOLDER}/{name}", name))
    return sources


def _names(folder: Path) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                entry.name.encode()  # a name that isn't UTF-8 can't be written down
                yield entry.name
    except UnicodeEncodeError:
        raise _refused(folder, "the name of a file in it is not UTF-8") from None
    except OSError as error:
        raise _refused(folder, f"it can't be read ({error.strerror})") from None


def _real(folder: Path, path: Path) -> Path | None:
    """The file itself, links within the folder resolved; None for a folder in its place."""
    try:
        real = path.resolve(strict=True)
        mode = real.stat().st_mode
    except (OSError, RuntimeError) as error:
        said = getattr(error, "strerror", None) or error
        raise _refused(folder, f"{path.name} can't be read ({said})") from None
    if not real.is_relative_to(folder):
        raise _refused(
            folder,
            f"{path.name} is a link that leads out of it; copy the folder with what its links mean "
            "(`cp -rL`) and import the copy",
        )
    if stat.S_ISDIR(mode):
        return None
    if not stat.S_ISREG(mode):
        raise _refused(folder, f"{path.name} is not a regular file")
    return real


def _refused(folder: Path, why: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{folder.name} can't be used as an OpenVINO model: {why}.",
        metadata={"file": folder.name, "cause": "ir"},
    )


# --- taking ------------------------------------------------------------------------------------


def take_all(
    sources: Sequence[Source], folder: Path, *, copy: bool, report: ImportProgress
) -> tuple[list[PartRecord], bool]:
    """Link or copy the sources into ``folder``, hashed on the way, and whether all were linked.

    Raises InvalidRequest for one that changes meanwhile, StorageFull.
    """
    before = [source.path.stat() for source in sources]
    total, done = sum(status.st_size for status in before), 0
    parts: list[PartRecord] = []
    linked = True
    for source, status in zip(sources, before, strict=True):
        file = folder / source.target
        file.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
        link = not copy and hard_link(source.path, file)
        linked = linked and link
        digest, taken = _take(source.path, file, link, _after(report, done, total))
        if not same_file(status, source.path.stat()):
            raise InvalidRequest(
                f"{source.path} changed while it was imported. Import it when it is complete.",
                metadata={"field": "path", "value": source.path},
            )
        parts.append(part_record(digest, taken, source.name))
        done += status.st_size
    return parts, linked


def _after(report: ImportProgress, before: int, total: int) -> ImportProgress:
    """Progress of one file of several as that of all."""
    return lambda stage, done, _: report(stage, before + done, total)


def _take(
    source: Path, file: Path, linked: bool, report: ImportProgress
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
        free = shutil.disk_usage(file.parent).free
        if free < status.st_size + SPARE_BYTES:
            raise StorageFull(
                f"Copying {source.name} needs {status.st_size} bytes and {file.parent} has "
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
