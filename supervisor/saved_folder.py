"""A saved session's folder: what was committed there, and what of it is whole.

Owns ``saved.json``, which names the record and the parts that a worker wrote, and what is removed.
Knows no engine and not what record and parts hold; names, sizes and digests are all it looks at.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from modeld.shared.codec import canonical
from modeld.shared.errors import DigestMismatch, InvalidRequest
from modeld.shared.manifest import Identity, SegmentId, sha256_hex
from modeld.shared.messages import SaveResult
from modeld.supervisor.durable import fsync_dir, storage_errors, sweep_temps, write_atomic
from modeld.supervisor.sessions import Session

INFO_NAME = "saved.json"
FORMAT = 1
MAX_INFO_BYTES = 64 * 1024 * 1024
GONE_MARK = ".gone-"  # a folder that is being removed; one that stays was left by a crash
# No separators and no leading dot, so that no name leads out of the folder or hides in it.
FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


@dataclass(frozen=True)
class SavedFile:
    """One part: a file with the KV of positions ``begin`` to ``end``."""

    name: str
    begin: int  # tokens
    end: int
    file_bytes: int
    digest: str  # SHA-256 hex, as the worker said it


@dataclass(frozen=True)
class SavedInfo:
    """What is committed in a folder. Counts are tokens, sizes bytes, times of the wall clock."""

    kind: str  # snapshot | durable
    saved_id: str
    label: str
    session_key: str
    model: str  # its name when it was saved
    backend: str
    identity: Identity
    record: str  # the file that holds the session, and names the parts
    record_bytes: int
    record_digest: str  # SHA-256 hex; covers the parts' digests, so it names the whole content
    parts: tuple[SavedFile, ...]
    size_bytes: int  # of record and parts
    tokens: int  # whose KV is saved
    seen_tokens: int
    turns: int
    window: int  # of the session that was saved
    k_type: str
    v_type: str
    exact: bool
    exact_reason: str
    created_unix_ms: int
    used_unix_ms: int  # when it was last saved or restored
    seconds: float  # that saving took
    turn_ids: tuple[str, ...] = ()
    overflow: str = "refuse"  # of the session that was saved: refuse | evict
    # What the session's prompt was, for the manifest of what is resident after a restore.
    prefix: tuple[SegmentId, ...] = ()
    tools: tuple[str, ...] = ()
    suffix: tuple[SegmentId, ...] = ()

    @property
    def files(self) -> dict[str, int]:
        """Bytes of every file that it names, in the order they are read: the record first."""
        return {self.record: self.record_bytes} | {p.name: p.file_bytes for p in self.parts}


def now_unix_ms() -> int:
    return time.time_ns() // 1_000_000


def saved_info(
    result: SaveResult,
    session: Session,
    *,
    kind: str,
    saved_id: str,
    label: str = "",
    created_unix_ms: int = 0,
    turn_ids: Sequence[str] = (),
) -> SavedInfo:
    """What to commit after a worker's save; ``created_unix_ms`` 0: now.

    Raises DigestMismatch where the worker named files in a way that no folder takes.
    """
    now = now_unix_ms()
    parts = tuple(
        SavedFile(part.name, part.begin, part.end, part.file_bytes, part.digest)
        for part in result.parts
    )
    info = SavedInfo(
        kind=kind,
        saved_id=saved_id,
        label=label,
        session_key=session.key,
        model=session.model,
        backend=session.identity.backend,
        identity=session.identity,
        record=result.record,
        record_bytes=result.record_bytes,
        record_digest=result.record_digest,
        parts=parts,
        size_bytes=result.record_bytes + sum(part.file_bytes for part in parts),
        tokens=result.tokens,
        seen_tokens=result.seen_tokens,
        turns=result.turns,
        window=session.resolution.numbers.effective.tokens,
        k_type=session.request.k_type,
        v_type=session.request.v_type,
        exact=result.exact,
        exact_reason=result.exact_reason,
        created_unix_ms=created_unix_ms or now,
        used_unix_ms=now,
        seconds=result.seconds,
        turn_ids=tuple(turn_ids),
        overflow=session.overflow,
        prefix=session.prefix,
        tools=session.tools,
        suffix=session.suffix,
    )
    check_names(info)
    return info


def check_names(info: SavedInfo) -> None:
    """Raises DigestMismatch unless the files have names of their own, and parts that follow each
    other from position 0 to ``tokens``.
    """
    names = [info.record, *(part.name for part in info.parts)]
    wrong = [name for name in names if not FILE_NAME.match(name) or name == INFO_NAME]
    if wrong or len(set(names)) != len(names):
        raise DigestMismatch(
            f"What is saved names its files wrongly: {(wrong or names)[0][:64]!r}. Each needs a "
            "name of its own, of letters, digits, '.', '_' and '-'.",
            metadata={"file": (wrong or names)[0][:64]},
        )
    at = 0
    for part in info.parts:
        if part.begin != at or part.end <= part.begin or part.file_bytes <= 0:
            raise DigestMismatch(
                f"What is saved has a gap: {part.name} is of tokens {part.begin} to {part.end}, "
                f"and what stands before it ends at {at}.",
                metadata={"file": part.name, "begin": part.begin, "end": part.end},
            )
        at = part.end
    size = info.record_bytes + sum(part.file_bytes for part in info.parts)
    if at != info.tokens or size != info.size_bytes or info.record_bytes <= 0:
        raise DigestMismatch(
            f"What is saved doesn't add up: {info.tokens} tokens in {info.size_bytes} bytes are "
            f"declared, its files are of {at} tokens in {size} bytes.",
            metadata={"tokens": info.tokens, "size_bytes": info.size_bytes},
        )


def encode_info(info: SavedInfo) -> bytes:
    """The text of ``saved.json``, sealed by a digest of its content.

    Raises InvalidRequest for one that is too large to be read again.
    """
    plain = asdict(info)
    plain["identity"] = info.identity.to_plain()
    data = _text({"format": FORMAT, "sha256": sha256_hex(canonical(plain)), "saved": plain})
    if len(data) > MAX_INFO_BYTES:
        raise InvalidRequest.of(
            "prompt",
            f"{len(data)} bytes",
            f"at most {MAX_INFO_BYTES} bytes of segment identities and tools in what is saved",
            "Use fewer or shorter tools.",
        )
    return data


def _text(sealed: dict[str, Any]) -> bytes:
    return json.dumps(sealed, indent=1, ensure_ascii=False).encode() + b"\n"


def decode_info(data: bytes, where: str) -> SavedInfo:
    """Raises DigestMismatch, naming ``where``, for what no ``encode_info`` gave."""
    try:
        sealed: dict[str, Any] = json.loads(data)
        plain = sealed["saved"]
        if sealed["format"] != FORMAT:
            raise ValueError(f"of format {sealed['format']!r}, this version reads {FORMAT}")
        # The text as well: another one that says the same is no copy of what was written.
        if sha256_hex(canonical(plain)) != sealed["sha256"] or _text(sealed) != data:
            raise ValueError("its content isn't what its digest names")
        info = msgspec.convert(plain, SavedInfo)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DigestMismatch(
            f"{where} is damaged: {str(error)[:200]}. What it describes isn't used; delete it.",
            metadata={"file": INFO_NAME, "path": where},
        ) from None
    check_names(info)
    return info


class SavedFolder:
    """One folder with at most one committed state. Blocking: call it in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def _info_path(self) -> Path:
        return self.path / INFO_NAME

    def create(self) -> None:
        """Make the folder, private, unless it is there. Raises StorageFull."""
        with storage_errors("a saved session", self.path.parent):
            self.path.mkdir(mode=0o700, exist_ok=True)

    def read(self) -> SavedInfo | None:
        """What is committed; None: nothing. Raises DigestMismatch where ``saved.json`` is damaged.

        ``used_unix_ms`` is as ``touch`` left it.
        """
        try:
            with self._info_path.open("rb") as file:
                data = file.read(MAX_INFO_BYTES + 1)
            used_ms = self._info_path.stat().st_mtime_ns // 1_000_000
        except (FileNotFoundError, NotADirectoryError):
            return None
        info = decode_info(data, str(self._info_path))
        return replace(info, used_unix_ms=max(used_ms, info.used_unix_ms))

    def used_since(self, unix_ms: int) -> bool:
        """Whether it was saved or restored at that time or later; also where that isn't known."""
        try:
            return self._info_path.stat().st_mtime_ns // 1_000_000 >= unix_ms
        except OSError:
            return True

    def commit(self, info: SavedInfo) -> None:
        """Make ``info`` what is committed, durably, then remove the files that it doesn't name.

        The files that it names were written and synced before. Raises DigestMismatch where one
        of them isn't there, and StorageFull; what was committed before then still is.
        """
        check_names(info)
        self._require_whole(info)
        write_atomic(self._info_path, encode_info(info))
        self._remove_unnamed(info)

    def _require_whole(self, info: SavedInfo) -> None:
        missing = self.missing(info)
        if missing:
            raise DigestMismatch(
                f"{len(missing)} of the {len(info.files)} files of {info.saved_id} are missing or "
                f"have another size, {missing[0]} first. What is left of it can't be restored.",
                metadata={"saved_id": info.saved_id, "file": missing[0], "missing": len(missing)},
            )

    def require(self, saved_id: str) -> SavedInfo:
        """What is committed, its files there in their sizes; raises DigestMismatch otherwise."""
        info = self.read()
        if info is None:
            raise DigestMismatch(
                f"{saved_id} has no {INFO_NAME}: its folder was changed by somebody else.",
                metadata={"saved_id": saved_id, "file": INFO_NAME},
            )
        self._require_whole(info)
        return info

    def touch(self, used_unix_ms: int) -> None:
        """Note that it was used: the file's time, since a rewrite would cost a sync."""
        when = used_unix_ms * 1_000_000
        with suppress(OSError):  # it only makes it look older than it is
            os.utime(self._info_path, ns=(when, when))

    def missing(self, info: SavedInfo | None = None) -> list[str]:
        """The named files that aren't there, or have another size; of ``info`` or of what is
        committed. Raises DigestMismatch where ``saved.json`` is damaged.
        """
        info = info or self.read()
        return (
            [] if info is None else [n for n, size in info.files.items() if self._size(n) != size]
        )

    def _size(self, name: str) -> int:
        path = self.path / name
        with suppress(OSError):
            return path.lstat().st_size if path.is_file() and not path.is_symlink() else -1
        return -1

    def _remove_unnamed(self, info: SavedInfo) -> None:
        for entry in self._unnamed(info):
            _remove(entry)

    def _unnamed(self, info: SavedInfo) -> list[Path]:
        keep = {INFO_NAME, *info.files}
        return [entry for entry in self.path.iterdir() if entry.name not in keep]

    def leaving_bytes(self, info: SavedInfo) -> int:
        """Bytes of the files that committing ``info`` removes."""
        return sum(entry.lstat().st_size for entry in self._unnamed(info))

    def sweep(self) -> None:
        """Remove what a crash left: files that nothing committed names, and a folder in which
        nothing is committed. A damaged one stays as it is. For when nobody writes in it.
        """
        sweep_temps(self._info_path)
        try:
            info = self.read()
        except DigestMismatch:
            return
        if info is None:
            self.remove()
        else:
            self._remove_unnamed(info)

    def remove(self) -> None:
        """Remove the folder: out of sight first, at once and durably, then file by file."""
        gone = self.path.with_name(f"{GONE_MARK}{self.path.name}-{secrets.token_hex(4)}")
        try:
            self.path.rename(gone)
        except FileNotFoundError:
            return
        fsync_dir(self.path.parent)
        _remove(gone)

    def bytes_used(self) -> int:
        """Bytes of all files in it, committed or not."""
        total = 0
        with suppress(OSError):
            for entry in self.path.iterdir():
                with suppress(OSError):
                    total += entry.lstat().st_size
        return total


def _remove(path: Path) -> None:
    """A file or a folder; what can't be removed now is swept at the next start."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()
