"""LoRA adapters in the data root: a folder each, with the file and a record of what it is.

Owns names, digests, imports and removals below ``<data_root>/adapters``. It doesn't know what is
resident: whoever removes or replaces decides that first. Every method blocks on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from modeld.shared.errors import InvalidRequest, ModelLoadFailed, ModelNotFound
from modeld.shared.ids import MODEL_NAME, check_model_name
from modeld.shared.lora import BadLora, LoraFile, config_alpha, read_lora
from modeld.shared.safetensors import BadSafetensors, read_header
from modeld.supervisor.durable import fsync_dir, storage_errors, write_atomic
from modeld.supervisor.models.intake import check_digest, check_expected, derive_name

TYPE = "adapter"
SUFFIX = ".safetensors"
ADAPTER_FILE = "adapter.safetensors"
RECORD_FILE = "adapter.json"
CONFIG_FILE = "adapter_config.json"
MAX_FILE_BYTES = 4 * 1024**3
MAX_CONFIG_BYTES = 1024 * 1024
_INCOMING = ".incoming-"
_CHUNK_BYTES = 4 * 1024 * 1024


class AdapterRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``adapter.json`` says. ``digest`` is the SHA-256 hex of the file as it is kept."""

    name: str
    digest: str
    size_bytes: int
    mtime_ns: int
    memory_bytes: int  # as an engine holds it
    ranks: tuple[int, ...]
    weights: int  # of a model, that it changes
    imported_unix_ms: int


@dataclass(frozen=True)
class StoredAdapter:
    record: AdapterRecord
    path: Path

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def digest(self) -> str:
        return self.record.digest


def is_adapter(path: Path, model_type: str) -> bool:
    """Whether an import is of an adapter: by its type, else by the file's name."""
    return model_type == TYPE or (not model_type and path.suffix == SUFFIX)


class AdapterStore:
    def __init__(self, data_root: Path) -> None:
        self._root = data_root / "adapters"

    # --- looking -----------------------------------------------------------------------------

    def list(self) -> tuple[StoredAdapter, ...]:
        """Every adapter with a readable record, by name."""
        found = []
        for folder in sorted(self._root.iterdir()) if self._root.is_dir() else ():
            if MODEL_NAME.match(folder.name):
                with contextlib.suppress(ModelLoadFailed):
                    found.append(self._load(folder))
        return tuple(found)

    def has(self, name: str) -> bool:
        return bool(MODEL_NAME.match(name)) and (self._root / name).is_dir()

    def by_digest(self, digest: str) -> StoredAdapter:
        """Raises ModelNotFound, and ModelLoadFailed where its file was changed or removed."""
        for adapter in self.list():
            if adapter.digest == digest:
                self._check_unchanged(adapter)
                return adapter
        names = ", ".join(f"{one.name} ({one.digest[:12]})" for one in self.list()[:10])
        raise ModelNotFound(
            f"No adapter of digest {digest[:64]!r} is in the store. "
            + (f"It holds: {names}." if names else "Import one: a .safetensors file."),
            metadata={"adapter": digest[:64]},
        )

    def _load(self, folder: Path) -> StoredAdapter:
        try:
            record = msgspec.json.decode((folder / RECORD_FILE).read_bytes(), type=AdapterRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise ModelLoadFailed(
                f"The record of adapter {folder.name!r} can't be read ({error}). Import its file "
                "again, with replace.",
                metadata={"adapter": folder.name},
            ) from None
        return StoredAdapter(record, folder / ADAPTER_FILE)

    def _check_unchanged(self, adapter: StoredAdapter) -> None:
        record = adapter.record
        try:
            status = adapter.path.stat()
        except OSError:
            status = None
        if status is None or (status.st_size, status.st_mtime_ns) != (
            record.size_bytes,
            record.mtime_ns,
        ):
            raise ModelLoadFailed(
                f"The file of adapter {adapter.name!r} was changed or removed since its import. "
                "Import it again, with replace.",
                metadata={"adapter": adapter.name, "digest": adapter.digest},
            )

    # --- changing ----------------------------------------------------------------------------

    def import_file(
        self, path: Path, name: str = "", *, replace: bool = False, expected_digest: str = ""
    ) -> StoredAdapter:
        """Check a .safetensors file of LoRA pairs and copy it into the store.

        Where the file doesn't say its alpha, ``adapter_config.json`` beside it is asked, and the
        copy is given that number in its header; the digest is then the copy's. The digest that
        was expected is the source's. Raises InvalidRequest (path, name, content), DigestMismatch
        or StorageFull; the store is then as it was.
        """
        source = _check_source(path)
        name = check_model_name(name) if name else derive_name(path.with_suffix(""))
        expected_digest = check_digest(expected_digest)
        try:
            lora = read_lora(source)
            alpha = None if lora.alpha_known else _alpha_beside(path)
        except BadLora as error:
            raise _bad(path, f"{error}.") from None
        except OSError as error:
            raise _bad(path, f"The system says: {error.strerror or error}.") from None
        with storage_errors("the adapter store", self._root):
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._incoming() as folder:
                file = folder / ADAPTER_FILE
                check_expected(_copy(source, file), expected_digest, source)
                if alpha is not None:
                    _give_alpha(file, alpha)
                lora = _read_again(path, file)
                record = _record(name, file, lora)
                write_atomic(folder / RECORD_FILE, msgspec.json.encode(record))
                self._install(folder, name, record.digest, replace)
        return StoredAdapter(record, self._root / name / ADAPTER_FILE)

    def remove(self, name: str) -> int:
        """The bytes that this freed. Raises InvalidRequest or ModelNotFound."""
        folder = self._root / check_model_name(name)
        if not folder.is_dir() or folder.is_symlink():
            raise ModelNotFound(f"No adapter is named {name!r}.", metadata={"adapter": name})
        freed = sum(file.lstat().st_size for file in folder.iterdir())
        # A rename first: a crash half-way through must not leave half an adapter.
        trash = self._root / f"{_INCOMING}{secrets.token_hex(6)}"
        folder.rename(trash)
        fsync_dir(self._root)
        shutil.rmtree(trash, ignore_errors=True)
        return freed

    @contextlib.contextmanager
    def _incoming(self) -> Iterator[Path]:
        folder = self._root / f"{_INCOMING}{secrets.token_hex(6)}"
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # after an install, there is none

    def _install(self, folder: Path, name: str, digest: str, replace: bool) -> None:
        target = self._root / name
        if target.exists():
            with contextlib.suppress(ModelLoadFailed):
                if self._load(target).digest == digest:
                    replace = True  # the same content: nothing is lost
            if not replace:
                raise InvalidRequest.of(
                    "name",
                    name,
                    "a name that isn't taken",
                    "Import with replace, or under another name.",
                )
            self.remove(name)
        folder.rename(target)
        fsync_dir(self._root)


def _record(name: str, file: Path, lora: LoraFile) -> AdapterRecord:
    status = file.stat()
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return AdapterRecord(
        name=name,
        digest=digest,
        size_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        memory_bytes=lora.memory_bytes,
        ranks=lora.ranks,
        weights=len(lora.pairs),
        imported_unix_ms=time.time_ns() // 1_000_000,
    )


def _check_source(path: Path) -> Path:
    if not path.is_absolute():
        raise _bad(path, "It is not absolute.")
    try:
        real = path.resolve(strict=True)
        size = real.stat().st_size if real.is_file() else -1
    except (OSError, RuntimeError, ValueError) as error:
        raise _bad(path, f"The system says: {getattr(error, 'strerror', None) or error}.") from None
    if size < 0:
        raise _bad(path, "It is no regular file; name the .safetensors file itself.")
    if size > MAX_FILE_BYTES:
        raise _bad(path, f"It has {size} bytes, more than {MAX_FILE_BYTES}.")
    return real


def _bad(path: Path, detail: str) -> InvalidRequest:
    return InvalidRequest.of(
        "path", str(path)[:1000], "the absolute path of a .safetensors file of LoRA pairs", detail
    )


def _alpha_beside(path: Path) -> float:
    """Raises BadLora where nobody says it."""
    file = path.parent / CONFIG_FILE
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError:
        raise BadLora(
            "it doesn't say its alpha, without which its strength is unknown: neither by tensors "
            "named alpha, nor by lora_alpha in its header's metadata, nor by an "
            f"{CONFIG_FILE} beside it"
        ) from None
    if len(text) > MAX_CONFIG_BYTES:
        raise BadLora(f"its {CONFIG_FILE} has more than {MAX_CONFIG_BYTES} bytes")
    return config_alpha(text)


def _copy(source: Path, file: Path) -> str:
    """SHA-256 hex of what was copied."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, file.open("xb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return digest.hexdigest()


def _give_alpha(file: Path, alpha: float) -> None:
    """Put ``lora_alpha`` into the header's metadata; the tensors stay as they are."""
    header = read_header(file)
    with file.open("rb") as reader:
        reader.seek(8)
        plain = json.loads(reader.read(header.data_begin - 8))
        plain["__metadata__"] = {**header.metadata, "lora_alpha": repr(alpha)}
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()
        fresh = file.with_name(f".{file.name}")
        with fresh.open("xb") as writer:
            writer.write(len(text).to_bytes(8, "little") + text)
            reader.seek(header.data_begin)
            shutil.copyfileobj(reader, writer, _CHUNK_BYTES)
            writer.flush()
            os.fsync(writer.fileno())
    fresh.replace(file)


def _read_again(path: Path, file: Path) -> LoraFile:
    """What was copied, which is what counts: the source may have changed meanwhile."""
    try:
        lora = read_lora(file)
    except (BadLora, BadSafetensors) as error:
        raise _bad(path, f"It changed while it was imported: {error}.") from None
    if not lora.alpha_known:
        raise _bad(path, "It changed while it was imported.")
    return lora
