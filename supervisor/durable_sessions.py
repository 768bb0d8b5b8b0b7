"""Durable sessions: what each key's session was when it was saved last, and how it comes back.

Owns the folders under ``durable/`` of the data root, one a key, and that a key has one open session
in all of a daemon. The worker reads and writes, as the slot sends it; knows no gRPC and no engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from modeld.shared.errors import (
    GenerationStale,
    ManifestMismatch,
    ModeldError,
    SessionClosed,
    SessionFatal,
    UnsupportedFeature,
    WorkerUnavailable,
)
from modeld.shared.manifest import Identity
from modeld.shared.messages import Payload, RestoreOp, RestoreResult, SaveOp, SaveResult
from modeld.supervisor.awaiting import see_through
from modeld.supervisor.durable import fsync_dir, private_folder, storage_errors
from modeld.supervisor.models.folders import is_plain_dir, remove_tree
from modeld.supervisor.saved_folder import SavedFolder, SavedInfo, now_unix_ms, saved_info
from modeld.supervisor.saved_quota import SavedQuota
from modeld.supervisor.sessions import Session, SessionRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")
Locks = weakref.WeakValueDictionary[str, asyncio.Lock]
Send = Callable[[Payload], Awaitable[Payload]]  # one operation of the worker, to its end

FOLDER = "durable"
KIND = "durable"
TRIES = 2  # of restoring one state, where the worker dies of it or beside it
WORKER_GONE = (SessionFatal, GenerationStale, WorkerUnavailable)
# What may differ between what was saved and the session that it is brought back into.
MAY_DIFFER = frozenset({"runtime_digest"})


@dataclass(frozen=True)
class Saved:
    """How saving at a turn's end went; ``tokens`` and ``saved_unix_ms`` are of what is saved now,
    be it of an earlier turn. ``reason`` is an error's, "" where it went well."""

    ok: bool
    tokens: int
    saved_unix_ms: int
    written_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Resumed:
    """What of a saved session came back. Nothing did where there is a ``miss_reason``."""

    saved_unix_ms: int
    tokens: int = 0  # whose KV was brought back
    seen_tokens: int = 0
    turn_ids: tuple[str, ...] = ()
    exact: bool = False
    exact_reason: str = ""
    seconds: float = 0.0
    miss_reason: str = ""


def folder_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:32]


class DurableSessions:
    """Those of one data root, for all slots of its daemon. Runs on the daemon's loop; files are
    touched in threads, one at a time a key.
    """

    def __init__(
        self,
        data_root: Path,
        quota: SavedQuota | None = None,
        *,
        max_age_s: float = 0.0,
        check_owner: Callable[[], None] = lambda: None,
    ) -> None:
        """``quota`` None: no limit. ``max_age_s``: without use, after which ``prune`` removes what
        is saved; 0: never. ``check_owner`` raises once this process may no longer write here.
        """
        self.root = data_root / FOLDER
        self.quota = quota or SavedQuota(data_root, 0)
        self._max_age_s = max_age_s
        self._check_owner = check_owner
        self._registries: list[SessionRegistry] = []
        self._locks: Locks = weakref.WeakValueDictionary()  # of what is saved under a key
        self._openings: Locks = weakref.WeakValueDictionary()
        self._deaths: dict[str, int] = {}  # of workers, in restoring a record, by its digest

    # --- who has a key -----------------------------------------------------------------------

    def join(self, registry: SessionRegistry) -> None:
        """A slot's sessions are of those that a key is looked for among."""
        self._registries.append(registry)

    def open_keys(self) -> frozenset[str]:
        """Of durable sessions that are open: what is saved under these isn't removed."""
        return frozenset(
            session.key
            for registry in self._registries
            for session in registry.all()
            if session.durable
        )

    def check_elsewhere(
        self, registry: SessionRegistry, key: str, *, model: str, durable: bool
    ) -> None:
        """Raises ManifestMismatch where the key is another slot's, and one of both is durable."""
        for other in self._registries:
            session = other.by_key(key) if other is not registry else None
            if session is not None and (durable or session.durable):
                raise ManifestMismatch(
                    f"Session key {key!r} is open with {session.model!r}, and this call asks for "
                    f"{model!r}: a durable session's key is for one session of all. Use another "
                    "key, or close that session first.",
                    metadata={
                        "reason": "identity",
                        "field": "model",
                        "asserted": model,
                        "actual": session.model,
                    },
                )

    def opening(self, key: str) -> asyncio.Lock:
        """Held while a session is opened under a key: others who would open one wait, in whatever
        slot, so that who has the key stays true from the look to the taking.
        """
        return _lock_of(self._openings, key)

    # --- saving ------------------------------------------------------------------------------

    async def save(self, session: Session, send: Send) -> Saved:
        """Save what the session is now. Goes through also where the caller is cancelled meanwhile,
        who is cancelled then. Raises nothing else: a failure is part of the answer.
        """
        return await see_through(self._save(session, send))

    async def _save(self, session: Session, send: Send) -> Saved:
        began_s = time.perf_counter()
        async with self._lock(session.key):
            try:
                written = await self._write(session, send)
            except ModeldError as error:
                reason, detail = error.reason, error.message
            except OSError as error:
                reason, detail = "ERROR_REASON_UNSPECIFIED", f"{error.strerror or error}"
            else:
                seconds = time.perf_counter() - began_s
                saved_ms, tokens = session.saved_unix_ms, session.saved_tokens
                return Saved(True, tokens, saved_ms, written, seconds)
            await asyncio.to_thread(self._swept, session.key)
        logger.warning("session %s wasn't saved: %s", session.session_id, reason)
        return Saved(
            False,
            session.saved_tokens,
            session.saved_unix_ms,
            seconds=time.perf_counter() - began_s,
            reason=reason,
            detail=detail,
        )

    async def _write(self, session: Session, send: Send) -> int:
        if not session.durable:
            raise SessionClosed(
                f"Session {session.session_id} was closed, and what was saved of it discarded.",
                metadata={"session_id": session.session_id},
            )
        self._check_owner()
        folder = await asyncio.to_thread(self._ready, session.key)
        result = await send(SaveOp(session_id=session.session_id, folder=str(folder.path)))
        assert isinstance(result, SaveResult)
        if result.cancelled:
            raise SessionClosed(
                f"Saving session {session.session_id} was cancelled. Its next turn saves it.",
                metadata={"session_id": session.session_id},
            )
        info = saved_info(result, session, kind=KIND, saved_id=folder.path.name)
        await asyncio.to_thread(self._commit, folder, info)
        _note(session, info)
        return result.written_bytes

    def _commit(self, folder: SavedFolder, info: SavedInfo) -> None:
        # What the new state doesn't name goes with the commit: only what is left counts.
        self.quota.check(
            f"The durable session {info.session_key!r}",
            needed=info.size_bytes,
            leaving=folder.leaving_bytes(info) + info.size_bytes,
        )
        self._check_owner()
        folder.commit(info)

    # --- bringing back -----------------------------------------------------------------------

    async def begin(self, session: Session, send: Send, *, fresh: bool) -> Resumed | None:
        """Make a new session what is saved under its key; None where nothing is.

        ``fresh``: forget it instead. What can't be brought back stays saved until the next save,
        and is told; only a worker that is gone is raised, as GenerationStale, since the session is
        gone with it. ``send`` raises SessionFatal only of an operation that the worker was given.
        """
        async with self._lock(session.key):
            if fresh:
                await asyncio.to_thread(self._remove, session.key)
                return None
            try:
                info = await asyncio.to_thread(self.folder(session.key).read)
            except (ModeldError, OSError) as error:
                return Resumed(0, miss_reason=_words(error))
            if info is None:
                return None
            _note(session, info)
            try:
                return await self._restore(session, info, send)
            except WORKER_GONE as error:
                if isinstance(error, SessionFatal) and error.metadata.get("cause") != "drain":
                    deaths = self._deaths.get(info.record_digest, 0) + 1
                    self._deaths[info.record_digest] = deaths
                    logger.warning(
                        "restoring %s: %s (%d)", session.session_id, error.message, deaths
                    )
                raise GenerationStale(error.message, metadata=error.metadata) from None
            except (ModeldError, OSError) as error:
                logger.warning("session %s begins cold: %s", session.session_id, _words(error))
                return Resumed(info.created_unix_ms, miss_reason=_words(error))

    async def _restore(self, session: Session, info: SavedInfo, send: Send) -> Resumed:
        why = mismatch(info, session) or self._deadly(info)
        if why:
            return Resumed(info.created_unix_ms, miss_reason=why)
        folder = self.folder(session.key)
        await asyncio.to_thread(folder.require, info.saved_id)
        began_s = time.perf_counter()
        result = await send(
            RestoreOp(session_id=session.session_id, folder=str(folder.path), record=info.record)
        )
        assert isinstance(result, RestoreResult)
        if result.cancelled:
            return Resumed(info.created_unix_ms, miss_reason="Bringing it back was cancelled.")
        session.resident, session.seen_tokens = result.resident, result.seen_tokens
        session.prefix, session.tools, session.suffix = info.prefix, info.tools, info.suffix
        await asyncio.to_thread(folder.touch, now_unix_ms())
        return Resumed(
            info.created_unix_ms,
            tokens=result.tokens,
            seen_tokens=result.seen_tokens,
            turn_ids=tuple(result.turn_ids),
            exact=result.exact,
            exact_reason=result.exact_reason,
            seconds=time.perf_counter() - began_s,
        )

    def _deadly(self, info: SavedInfo) -> str:
        deaths = self._deaths.get(info.record_digest, 0)
        if deaths < TRIES:
            return ""
        return (
            f"The worker ended {deaths} times while this was brought back, so it isn't tried "
            "again before the daemon starts anew."
        )

    # --- forgetting --------------------------------------------------------------------------

    async def forget(self, key: str) -> bool:
        """Remove what is saved under a key; whether anything was."""
        async with self._lock(key):
            found = await asyncio.to_thread(self.folder(key).path.exists)
            await asyncio.to_thread(self._remove, key)
        return found

    def start(self) -> None:
        """Sweep what crashes left. Blocking; before the first session."""
        if not self.root.is_dir():
            return
        for entry in list(self.root.iterdir()):
            if entry.name.startswith("."):
                remove_tree(entry)
            elif is_plain_dir(entry):
                SavedFolder(entry).sweep()

    async def prune(self) -> tuple[str, ...]:
        """Remove what wasn't used for longer than the age that is set, unless its session is open;
        the keys.
        """
        if self._max_age_s <= 0:
            return ()
        oldest = now_unix_ms() - int(self._max_age_s * 1000)
        removed = []
        for info in await asyncio.to_thread(self.infos):
            async with self._lock(info.session_key):
                if info.used_unix_ms >= oldest or info.session_key in self.open_keys():
                    continue
                if await asyncio.to_thread(self._remove_unused, info.session_key, oldest):
                    removed.append(info.session_key)
        if removed:
            logger.info("not used for %g s, removed: %s", self._max_age_s, ", ".join(removed))
        return tuple(removed)

    def infos(self) -> list[SavedInfo]:
        """What is saved, the last used first; what is damaged is left out. Blocks on the disk."""
        found = []
        for entry in self.root.iterdir() if self.root.is_dir() else ():
            with contextlib.suppress(ModeldError, OSError):
                info = SavedFolder(entry).read()
                if info is not None:
                    found.append(info)
        return sorted(found, key=lambda info: -info.used_unix_ms)

    # --- folders -----------------------------------------------------------------------------

    def folder(self, key: str) -> SavedFolder:
        return SavedFolder(self.root / folder_name(key))

    def _lock(self, key: str) -> asyncio.Lock:
        return _lock_of(self._locks, key)

    def _ready(self, key: str) -> SavedFolder:
        """The folder, there to be written into. Raises StorageFull where the quota is full."""
        folder = self.folder(key)
        self.quota.check(f"The durable session {key!r}")
        if not folder.path.exists():
            with storage_errors("a durable session", self.root):
                private_folder(self.root)
                folder.create()
                fsync_dir(self.root)
        return folder

    def _swept(self, key: str) -> None:
        """Remove what a save has left that came to nothing."""
        with contextlib.suppress(ModeldError, OSError):
            self._check_owner()
            self.folder(key).sweep()

    def _remove_unused(self, key: str, oldest_ms: int) -> bool:
        """Whether it was removed: not where it was used since it was looked at."""
        if self.folder(key).used_since(oldest_ms):
            return False
        self._remove(key)
        return True

    def _remove(self, key: str) -> None:
        self._check_owner()
        self.folder(key).remove()


def _lock_of(locks: Locks, key: str) -> asyncio.Lock:
    lock = locks.get(key)
    if lock is None:
        lock = locks[key] = asyncio.Lock()
    return lock


def refuse_unless_saved(model: str, capabilities: Mapping[str, str]) -> None:
    """Raises UnsupportedFeature, capability ``durable``, for a model whose executor doesn't give
    its KV.
    """
    answer = capabilities.get("durable", "")
    if answer.startswith("no"):
        raise UnsupportedFeature(
            f"Sessions of {model!r} can't be durable: what the worker found at load is "
            f"{answer!r}. Open it without durable; its text is yours to send again.",
            metadata={"capability": "durable", "model": model},
        )


def _note(session: Session, info: SavedInfo) -> None:
    session.saved_unix_ms, session.saved_tokens = info.created_unix_ms, info.tokens


def mismatch(info: SavedInfo, session: Session) -> str:
    """Why what is saved can't become this session, in words; "" where nothing stands against it
    that can be told without reading it.
    """
    for field in fields(Identity):
        if field.name in MAY_DIFFER:
            continue
        was, now = getattr(info.identity, field.name), getattr(session.identity, field.name)
        if was != now:
            return f"It was saved with {field.name}={was!r}, and this session has {now!r}."
    window = session.resolution.numbers.effective.tokens
    if info.tokens > window:
        return (
            f"{info.tokens} tokens were saved, and this session's window has {window}: open it "
            f"with a window of {info.window} tokens, as it was saved, to have them back."
        )
    return ""


def _words(error: Exception) -> str:
    if isinstance(error, ModeldError):
        return error.message
    return f"It can't be read: {getattr(error, 'strerror', None) or error}."
