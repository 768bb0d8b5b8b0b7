"""Folders that an OpenVINO worker loads, made once of imported GGUF files and kept.

Owns ``<data_root>/converted`` and the disposable processes that convert. Links no engine: what a
conversion is made of, and whether it computes, is the process's to find out; whether its files
are whole is looked at here.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from modeld.shared.converting import MARKER, MAX_LINE_BYTES, ConvertLine, ConvertRequest
from modeld.shared.errors import (
    BackendMismatch,
    ModeldError,
    ModelLoadFailed,
    ShuttingDown,
    StorageFull,
    from_wire,
)
from modeld.shared.ir_check import check_folder
from modeld.supervisor.asking import offer_to_oom_killer
from modeld.supervisor.durable import fsync_dir, storage_errors, write_atomic
from modeld.supervisor.exits import ending
from modeld.supervisor.models.folders import Folders, is_plain_dir, remove_tree, tree_bytes
from modeld.supervisor.models.records import StoredModel, check_unchanged

log = logging.getLogger(__name__)

FORMAT = 1  # of what is written beside the converter's own files: an older one is made again
TIMEOUT_S = 3600.0  # a slow disk and a large model; what hangs for longer is ended
PACKAGE = "openvino-genai"
SPARE_BYTES = 64 * 1024 * 1024  # for tokenizers, and left free beside a conversion
_POLL_S = 0.25
_WORDS_BYTES = 2000

Report = Callable[[str, float], Awaitable[None]]


class _Marker(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What was made, from what, and how each file stood then: (bytes, modification time in ns)."""

    format: int
    engine: str
    digest: str
    files: dict[str, tuple[int, int]]


@dataclass
class _Job:
    """One conversion under way, and who waits for it."""

    task: asyncio.Task[Path]
    fraction: float = 0.0
    waiters: int = 0
    process: subprocess.Popen[bytes] | None = None
    given_up: threading.Event = field(default_factory=threading.Event)


class Conversions:
    """The conversions below a data root. ``ensure`` runs on the daemon's loop; the other methods
    block on the disk.
    """

    def __init__(self, data_root: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._root = data_root / "converted"
        self._folders = Folders(self._root, "a converted model")
        self._timeout_s = timeout_s
        self._jobs: dict[str, _Job] = {}
        self._ended = False

    # --- converting --------------------------------------------------------------------------

    async def ensure(self, model: StoredModel, report: Report) -> Path:
        """What the model's worker loads: a GGUF model of type openvino is converted if it isn't
        yet, and any other answered as it is.

        Callers that ask for the same model wait for the same conversion, which is ended when the
        last of them goes away. Raises ModelLoadFailed (the converter refused, crashed, took too
        long or made something that doesn't work), StorageFull, DigestMismatch (the file changed),
        ShuttingDown after ``end``, or BackendMismatch where the converter isn't installed.
        """
        if not model.converts:
            return model.path
        name = f"{model.digest}-{_engine()}"
        if await asyncio.to_thread(self._is_whole, name, model.digest):
            return self._root / name
        self._refuse_ended()
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = self._begun(model, name)
        job.waiters += 1
        try:
            told = -1.0
            while not job.task.done():
                if job.fraction > told:
                    told = job.fraction
                    await report("converting", told)
                await asyncio.wait([job.task], timeout=_POLL_S)
            if job.task.exception() is not None:
                self._refuse_ended()
            return job.task.result()
        finally:
            job.waiters -= 1
            if not job.waiters:
                _give_up(job)
                if self._jobs.get(name) is job:  # whoever comes now begins anew
                    del self._jobs[name]

    def end(self) -> None:
        """End what is being converted, for good."""
        self._ended = True
        for job in self._jobs.values():
            _give_up(job)

    def _refuse_ended(self) -> None:
        if self._ended:
            raise ShuttingDown(
                "The daemon is draining. Start it again, or retry later.", retry_after_s=5.0
            )

    def _begun(self, model: StoredModel, name: str) -> _Job:
        holder: list[_Job] = []

        async def work() -> Path:
            return await asyncio.to_thread(self._convert, model, name, holder[0])

        job = _Job(asyncio.create_task(work(), name=f"converting {model.name}"))
        # Where everybody has gone away nobody looks at how it ended.
        job.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        holder.append(job)
        return job

    def _convert(self, model: StoredModel, name: str, job: _Job) -> Path:
        """Convert it in a process, and put what came out in its place once it is whole."""
        log.info("converting model %s for OpenVINO", model.name)
        self._folders.make()
        _check_space(model, self._root)
        check_unchanged(model)
        with self._folders.incoming() as work, storage_errors("a converted model", self._root):
            try:
                self._run(model, work, job)
                check_folder(work)
            except ModeldError as error:
                raise _as_full_disk(error, model, self._root) from None
            check_unchanged(model)
            marker = _Marker(
                format=FORMAT, engine=_engine(), digest=model.digest, files=_synced(work)
            )
            write_atomic(work / MARKER, msgspec.json.encode(marker))
            with self._folders.locked():
                trash = self._folders.put(work, name)
        if trash is not None:
            remove_tree(trash)
        self._remove(
            other for other in self._names() if other != name and _digest_of(other) == model.digest
        )
        return self._root / name

    def _run(self, model: StoredModel, work: Path, job: _Job) -> None:
        request = ConvertRequest(source=str(model.path), folder=str(work))
        with tempfile.TemporaryFile() as words:
            try:
                process = subprocess.Popen(
                    _command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words
                )
            except OSError as error:
                raise _failed(model, f"the converter can't be started: {error.strerror}") from None
            with process:
                job.process = process
                timer = threading.Timer(self._timeout_s, process.kill)
                timer.start()
                try:
                    offer_to_oom_killer(process.pid)
                    if job.given_up.is_set():  # before there was a process to end
                        process.kill()
                    last = _conversation(process, request, job)
                finally:
                    late = not timer.is_alive()
                    timer.cancel()
                    process.kill()
            if late:
                raise _failed(model, f"it took longer than {self._timeout_s:g} s")
            if last is not None and last.error is not None:
                raise from_wire(**last.error)
            if process.returncode != 0 or last is None or not last.done:
                raise _failed(model, f"{ending(process.returncode)}{_last_words(words)}")

    # --- what is there -----------------------------------------------------------------------

    def sweep(self, needed: Callable[[], Collection[str]]) -> None:
        """Remove what a crash left, and conversions whose digest isn't ``needed``."""
        if not is_plain_dir(self._root):
            return
        self._folders.sweep()
        self.discard_unneeded(needed)

    def discard_unneeded(self, needed: Callable[[], Collection[str]]) -> int:
        """Remove conversions of files that no model needs any more; the bytes that this freed."""
        names = self._names()
        if not names:
            return 0
        kept = needed()
        return self._remove(name for name in names if _digest_of(name) not in kept)

    def total_bytes(self) -> int:
        """What all conversions take."""
        return tree_bytes(self._root)

    def _names(self) -> list[str]:
        if not is_plain_dir(self._root):
            return []
        return [path.name for path in self._root.iterdir() if not path.name.startswith(".")]

    def _remove(self, names: Iterable[str]) -> int:
        freed = 0
        for name in names:
            with self._folders.locked():
                if not os.path.lexists(self._root / name):
                    continue
                freed += tree_bytes(self._root / name)
                trash = self._folders.take_away(name)
            remove_tree(trash)
        return freed

    def _is_whole(self, name: str, digest: str) -> bool:
        """Whether the conversion is there and every file as it was left."""
        folder = self._root / name
        try:
            marker = msgspec.json.decode((folder / MARKER).read_bytes(), type=_Marker)
            if (marker.format, marker.digest) != (FORMAT, digest):
                return False
            return marker.files == _files(folder)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return False


def _engine() -> str:
    """The installed converter's version, without importing it. Raises BackendMismatch."""
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise BackendMismatch(
            f"A GGUF file of type 'openvino' is converted by {PACKAGE}, which isn't installed "
            "beside the daemon: install modeld[openvino], or import the file as type llama.",
            metadata={"type": "openvino"},
        ) from None


def _command() -> list[str]:
    # -P: what lies in the current folder must not be imported in place of the package.
    return [sys.executable, "-P", "-m", "modeld.workers.openvino.convert"]


def _conversation(
    process: subprocess.Popen[bytes], request: ConvertRequest, job: _Job
) -> ConvertLine | None:
    """Ask, and follow the answer's lines to their end; the last one that can be read."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        # Left open: the process ends with whoever holds the other end.
        process.stdin.write(msgspec.json.encode(request) + b"\n")
        process.stdin.flush()
    last = None
    while line := process.stdout.readline(MAX_LINE_BYTES):
        try:
            last = msgspec.json.decode(line, type=ConvertLine)
        except (msgspec.DecodeError, msgspec.ValidationError):
            log.warning("the converter said what can't be read: %.200r", line)
            continue
        job.fraction = max(job.fraction, min(last.fraction, 1.0))
        if last.done or last.error is not None:
            break
    process.wait()
    return last


def _give_up(job: _Job) -> None:
    job.given_up.set()
    if job.process is not None:
        job.process.kill()


# --- files ---------------------------------------------------------------------------------------


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """(bytes, modification time in ns) of each file but the marker."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name != MARKER:
                status = entry.stat(follow_symlinks=False)
                found[entry.name] = (status.st_size, status.st_mtime_ns)
    return found


def _synced(folder: Path) -> dict[str, tuple[int, int]]:
    for name in _files(folder):
        fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    fsync_dir(folder)
    return _files(folder)


def _digest_of(name: str) -> str:
    return name.partition("-")[0]


def _last_words(words: IO[bytes]) -> str:
    size = words.seek(0, os.SEEK_END)
    words.seek(max(0, size - _WORDS_BYTES))
    said = words.read(_WORDS_BYTES).decode(errors="replace")
    if said:
        log.warning("converting failed: %s", said)
    lines = said.strip().splitlines()
    return f": {lines[-1][:300]}" if lines else ""


# --- errors --------------------------------------------------------------------------------------


def _failed(model: StoredModel, why: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{model.name!r} can't be converted for OpenVINO: {why}. Import the file as type llama, or "
        "import a folder that was exported for OpenVINO.",
        metadata={"model": model.name, "cause": "conversion"},
    )


def _needed_bytes(model: StoredModel) -> int:
    """Six-bit weights come out as eight bits, most others as they are, and some are there twice
    while they are rewritten.
    """
    return model.size_bytes * 5 // 2 + SPARE_BYTES


def _check_space(model: StoredModel, root: Path) -> None:
    free, needed = shutil.disk_usage(root).free, _needed_bytes(model)
    if free < needed:
        raise StorageFull(
            f"Converting {model.name!r} may need {needed} bytes and {root} has {free} free: "
            "nothing was written. Free some space on that filesystem and try again.",
            metadata={"needed_bytes": needed, "free_bytes": free, "path": root},
        )


def _as_full_disk(error: ModeldError, model: StoredModel, root: Path) -> ModeldError:
    """The converter doesn't say that the disk was full where it only left files short."""
    free = shutil.disk_usage(root).free
    if isinstance(error, StorageFull) or free > SPARE_BYTES // 4:
        return error
    return StorageFull(
        f"Converting {model.name!r} failed with {free} bytes free at {root}: {error.message} "
        "Free some space on that filesystem and try again.",
        metadata={"free_bytes": free, "path": root, "what": "a converted model"},
    )
