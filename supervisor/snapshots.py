"""The snapshots of a data root: ids, what is listed, what is in use, and what is removed.

A snapshot is a folder that is built out of sight and renamed into place when it is whole. Knows
no engine, session or transport, and removes nothing that a user didn't ask for, but by age.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from modeld.shared.errors import DigestMismatch, ModelBusy, SnapshotNotFound
from modeld.shared.ids import SNAPSHOT_ID, new_snapshot_id
from modeld.supervisor.durable import fsync_dir, storage_errors
from modeld.supervisor.models.folders import is_plain_dir, remove_tree
from modeld.supervisor.saved_folder import SavedFolder, SavedInfo, now_unix_ms
from modeld.supervisor.saved_quota import Deletable, SavedQuota

log = logging.getLogger(__name__)

NEW_MARK = ".new-"


class PendingSnapshot:
    """A snapshot that is being written, in a folder that nobody lists."""

    def __init__(self, store: SnapshotStore, saved_id: str, folder: SavedFolder) -> None:
        self._store = store
        self.saved_id = saved_id
        self.folder = folder

    def commit(self, info: SavedInfo) -> SavedInfo:
        """Make it whole and listed, durably, and answer what is listed: this, or what was there
        already with the same content. Raises StorageFull or DigestMismatch.
        """
        return self._store._commit(self, info)

    def discard(self) -> None:
        """Remove what was written. Nothing to do once it is committed."""
        remove_tree(self.folder.path)


class SnapshotStore:
    """Snapshots below ``<data_root>/snapshots``. Blocking: call it in a thread.

    ``max_age_s``: seconds without use after which ``prune`` removes one; 0: never.
    """

    def __init__(self, data_root: Path, quota: SavedQuota, max_age_s: float = 0.0) -> None:
        """Make the folder, and sweep what crashes left. Raises StorageFull."""
        self.root = data_root / "snapshots"
        self.quota = quota
        self._max_age_s = max_age_s
        self._uses: Counter[str] = Counter()
        self._told: set[str] = set()  # ids that the log says are damaged
        self._lock = threading.Lock()  # over names and uses; never held while bytes are moved
        with storage_errors("snapshots", data_root):
            self.root.mkdir(mode=0o700, exist_ok=True)
        self._sweep()
        quota.deletable = self._deletable

    def _sweep(self) -> None:
        for entry in list(self.root.iterdir()):
            if entry.name.startswith("."):
                log.info("removing the unfinished %s", entry.name)
                remove_tree(entry)
            elif is_plain_dir(entry):
                folder = SavedFolder(entry)
                if self._read(folder) is not None:
                    folder.sweep()

    # --- looking -----------------------------------------------------------------------------

    def list(self, model_digest: str = "") -> tuple[SavedInfo, ...]:
        """Every snapshot that is whole, newest first; of one model where its digest is given."""
        infos = [info for folder in self._folders() if (info := self._read(folder)) is not None]
        chosen = [i for i in infos if model_digest in ("", i.identity.model_digest)]
        return tuple(sorted(chosen, key=lambda i: (-i.created_unix_ms, i.saved_id)))

    def damaged(self) -> tuple[str, ...]:
        """Ids whose files aren't what was saved, as far as names and sizes tell."""
        return tuple(f.path.name for f in self._folders() if self._read(f) is None)

    def _folders(self) -> Sequence[SavedFolder]:
        entries = sorted(self.root.iterdir())
        return [SavedFolder(e) for e in entries if SNAPSHOT_ID.match(e.name) and is_plain_dir(e)]

    def _read(self, folder: SavedFolder) -> SavedInfo | None:
        """What is in a folder; None where it is damaged, or another moved it meanwhile."""
        try:
            return self._whole(folder)
        except DigestMismatch as error:
            name = folder.path.name
            if name not in self._told and is_plain_dir(folder.path):
                self._told.add(name)
                log.warning("snapshot %s is left out: %s", name, error.message)
            return None

    def _whole(self, folder: SavedFolder) -> SavedInfo:
        info = folder.require(folder.path.name)
        if info.saved_id != folder.path.name:
            raise DigestMismatch(
                f"The folder of snapshot {folder.path.name} holds {info.saved_id}. Rename it back.",
                metadata={"snapshot_id": folder.path.name, "saved_id": info.saved_id},
            )
        return info

    def find(self, snapshot_id: str) -> SavedInfo:
        """Raises SnapshotNotFound, or DigestMismatch where files are missing or cut."""
        return self._whole(self._folder(snapshot_id))

    def _folder(self, snapshot_id: str) -> SavedFolder:
        path = self.root / snapshot_id
        if not SNAPSHOT_ID.match(snapshot_id) or not is_plain_dir(path):
            raise SnapshotNotFound(
                f"There is no snapshot {snapshot_id[:64]!r}. `modeld snapshots list`, or "
                "ListSnapshots, tells what there is.",
                metadata={"snapshot_id": snapshot_id[:64]},
            )
        return SavedFolder(path)

    @contextmanager
    def using(self, snapshot_id: str) -> Iterator[tuple[SavedFolder, SavedInfo]]:
        """A snapshot that isn't removed meanwhile. Raises as ``find``."""
        with self._lock:
            folder = self._folder(snapshot_id)
            self._uses[snapshot_id] += 1
        try:
            yield folder, self._whole(folder)
        finally:
            with self._lock:
                self._uses[snapshot_id] -= 1
                if not self._uses[snapshot_id]:
                    del self._uses[snapshot_id]

    def _deletable(self) -> tuple[Deletable, ...]:
        with self._lock:
            used = set(self._uses)
        unused = [info for info in self.list() if info.saved_id not in used]
        unused.sort(key=lambda info: info.used_unix_ms)
        sizes = {i.saved_id: SavedFolder(self.root / i.saved_id).bytes_used() for i in unused}
        return tuple(Deletable(saved_id, size) for saved_id, size in sizes.items())

    # --- changing ----------------------------------------------------------------------------

    @contextmanager
    def begin(self, saved_id: str = "") -> Iterator[PendingSnapshot]:
        """A folder to write a snapshot in; unless it is committed, it is gone afterwards.

        ``saved_id`` "": a new one. Raises StorageFull.
        """
        folder = SavedFolder(self.root / f"{NEW_MARK}{secrets.token_hex(8)}")
        folder.create()
        pending = PendingSnapshot(self, saved_id or new_snapshot_id(), folder)
        try:
            yield pending
        finally:
            pending.discard()

    def _commit(self, pending: PendingSnapshot, info: SavedInfo) -> SavedInfo:
        """Under the id it asks for, or another where that is taken by another content."""
        folder, gone = pending.folder, None
        info = replace(info, saved_id=pending.saved_id)
        folder.commit(info)
        with self._lock:
            there = self.root / info.saved_id
            if is_plain_dir(there):
                held = self._read(SavedFolder(there))
                if held is not None and held.record_digest == info.record_digest:
                    return held
                if held is not None or self._uses[info.saved_id]:
                    info = replace(info, saved_id=new_snapshot_id())
                    folder.commit(info)
                else:  # damaged, and here it comes again
                    gone = self._take_away(there)
            self._publish(folder, SavedFolder(self.root / info.saved_id))
        if gone is not None:
            remove_tree(gone)
        return info

    def _publish(self, folder: SavedFolder, target: SavedFolder) -> None:
        with storage_errors("a snapshot", self.root):
            folder.path.rename(target.path)
            try:
                fsync_dir(self.root)
            except BaseException:
                target.path.rename(folder.path)  # not known to last: nothing is half saved
                raise

    def delete(self, snapshot_id: str) -> int:
        """Remove a snapshot, be it damaged; the bytes that it had.

        Raises SnapshotNotFound, or ModelBusy while it is being restored or exported.
        """
        with self._lock:
            folder = self._folder(snapshot_id)
            if self._uses[snapshot_id]:
                raise ModelBusy(
                    f"Snapshot {snapshot_id} is being restored or exported now, and stays. Delete "
                    "it when that has ended.",
                    metadata={"snapshot_id": snapshot_id, "uses": self._uses[snapshot_id]},
                    retry_after_s=1.0,
                )
            size = folder.bytes_used()
            gone = self._take_away(folder.path)
        remove_tree(gone)
        return size

    def _remove_unused(self, snapshot_id: str, oldest_ms: int) -> bool:
        """Remove it unless it is in use, or was used at ``oldest_ms`` or later; whether it was."""
        with self._lock:
            path = self.root / snapshot_id
            if self._uses[snapshot_id] or SavedFolder(path).used_since(oldest_ms):
                return False
            gone = self._take_away(path)
        remove_tree(gone)
        return True

    def _take_away(self, path: Path) -> Path:
        """Out of sight at once, for good: a crash while it is removed must not leave half of it."""
        gone = self.root / f".gone-{secrets.token_hex(8)}"
        path.rename(gone)
        fsync_dir(self.root)
        return gone

    def prune(self) -> tuple[str, ...]:
        """Remove what wasn't used for longer than the age that is set, unless it is in use now."""
        if self._max_age_s <= 0:
            return ()
        oldest = now_unix_ms() - int(self._max_age_s * 1000)
        removed = []
        for info in self.list():
            if info.used_unix_ms >= oldest or not self._remove_unused(info.saved_id, oldest):
                continue
            log.info("snapshot %s wasn't used for %g s: removed", info.saved_id, self._max_age_s)
            removed.append(info.saved_id)
        return tuple(removed)
