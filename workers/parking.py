"""Puts what contexts hold into the cold store, and brings it back where tokens match.

Owns which blocks that are, and the order of what is done. Knows neither budgets nor files, which
are the store's, nor an engine's bytes.

A block is 256 tokens at a multiple of 256; the last one of what is held is as long as that is.
Where a model's memory gives no ranges, all that is held is one block. Images are never stored:
their ids don't say what they were computed from.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.errors import InsufficientMemory, SessionFatal, UnsupportedFeature
from modeld.shared.planner.token_ranges import placed
from modeld.workers.cold_disk import Maker
from modeld.workers.cold_store import BLOCK_TOKENS, ColdStore, Match
from modeld.workers.new_files import Cancelled, Live, nobody
from modeld.workers.pool import WORTHWHILE_TOKENS
from modeld.workers.pooled_context import PooledContext, Ranks, Tokens
from modeld.workers.state_file import StateHeader, token_chain, token_chains

if TYPE_CHECKING:
    from modeld.shared.messages import LoadOp, LoadResult
    from modeld.workers.engine import State
    from modeld.workers.residency import Source
    from modeld.workers.session import Session

log = logging.getLogger(__name__)

RANKS = {"volatile": 0, "repo_map": 1, "task_pinned": 2}  # what has the higher one stays longer
# A tail that is shorter isn't worth a copy: evaluating it again takes a moment.
PARK_LEAST_TOKENS = 64


def ranks_of(session: Session) -> Ranks:
    """Where in the context what is more than volatile stands, and its rank."""
    if session.assembled is None:
        return ()
    if session.layout is not None:
        attended = session.layout.attended(session.length)
        classes = (("repo_map", session.layout.repo_map), ("task_pinned", session.layout.pinned))
        return tuple(
            (begin, end, RANKS[name])
            for name, ranges in classes
            for begin, end in placed(attended, ranges)
        )
    suffix = session.suffix.segments if session.suffix is not None else []
    asked = [*session.prefix.segments, *suffix]
    return tuple(
        (out.token_begin, out.token_end, rank)
        for segment, out in zip(asked, session.assembled.segments, strict=False)
        if out.located and (rank := RANKS.get(segment.cache_class, 0))
    )


class Parking:
    """What a loaded model has of it; ``ContextPool.parking`` and every context's own."""

    def __init__(
        self,
        store: ColdStore,
        source: Source,
        *,
        ranges: bool = True,
        tried: bool = False,
        on_host: bool = True,
    ) -> None:
        """``ranges``: whether the model's memory gives parts of what is held. ``tried``: whether
        its bytes were seen to go out and back at load; else the first that come back are proved.
        ``on_host``: whether contexts take the host's memory, as the store does.
        """
        self.store, self._source = store, source
        self._ranges, self._tried, self._on_host = ranges, tried, on_host
        self._off = False
        self._serving = threading.local()  # operations of batched sessions have threads
        store.live = lambda: self.live
        self.failed = 0  # blocks that couldn't be taken out, or that the engine wouldn't take back
        self.restored = 0  # tokens

    @property
    def live(self) -> Live:
        """Of what the present thread serves."""
        found: Live = getattr(self._serving, "live", nobody)
        return found

    def serve(self, live: Live) -> None:
        """What this thread does from here on is for an operation that is told so, and may stop it.

        A cancel ends parking and bringing back between two blocks, or leaves the block as it was.
        """
        self._serving.live = live

    @contextlib.contextmanager
    def unstopped(self) -> Iterator[None]:
        """Meanwhile what this thread does shows life as before, but no cancel stops it."""
        live = self.live

        def beat() -> None:
            with contextlib.suppress(Cancelled):
                live()

        self.serve(beat)
        try:
            yield
        finally:
            self.serve(live)

    @property
    def gives_ranges(self) -> bool:
        """Whether parts of what is held are stored, and come back behind what was before them."""
        return self._ranges and not self._off

    def counters(self) -> dict[str, int]:
        """The slot's, since the model was loaded."""
        return {
            **self.store.counters(),
            "slot_cold_failed": self.failed,
            "slot_cold_restored_tokens": self.restored,
        }

    # --- out

    def park(self, entry: PooledContext, keep: int = 0, *, in_ram: bool = True) -> bool:
        """Before what ``entry`` holds from ``keep`` on goes: store it, where that is worthwhile.

        False where it was cancelled. Raises SessionFatal only.
        """
        if len(entry) - keep < PARK_LEAST_TOKENS:
            return True
        return self._stored_of(self._park(entry, keep, len(entry), entry.ranks, in_ram))[1]

    def park_range(
        self,
        entry: PooledContext,
        begin: int,
        end: int,
        ranks: Ranks = (),
        *,
        in_ram: bool = True,
    ) -> dict[int, str]:
        """Store the blocks of ``entry`` that cover positions ``begin`` to ``end``; returns the keys
        of those that are stored now, each by where it begins.

        What is stored already is only marked as used. A block has the highest rank of ``ranks``
        that it, or what follows in the range, touches: without those before, the later ones mean
        nothing. ``in_ram`` is False where memory is short. What can't be stored is left and
        counted; nothing raises but SessionFatal.
        """
        stored, _ = self._stored_of(self._park(entry, begin, end, ranks, in_ram))
        entry.settle()
        return stored

    def _stored_of(self, blocks: Iterator[tuple[int, str]]) -> tuple[dict[int, str], bool]:
        """What ``_park`` stores, as ``park_range`` tells it, and False where it was cancelled."""
        stored: dict[int, str] = {}
        if self._off:
            return stored, True
        try:
            stored.update(blocks)  # one by one: what is in it by then stays
        except SessionFatal:
            raise
        except Cancelled:
            return stored, False
        except Exception:
            log.exception("parking failed; what was to be parked is evaluated again")
            self.failed += 1
        return stored, True

    def _park(
        self, entry: PooledContext, begin: int, end: int, ranks: Ranks, in_ram: bool
    ) -> Iterator[tuple[int, str]]:
        """Store block by block: where each that is stored now begins, and its key."""
        tokens = entry.tokens
        size = _without_images(tokens)
        self.store.tick()
        if self._ranges:
            first = begin // BLOCK_TOKENS * BLOCK_TOKENS
            # What goes out may end within a block only where nothing is held behind it.
            last = size if size == len(tokens) else size // BLOCK_TOKENS * BLOCK_TOKENS
            last = min(last, -(-end // BLOCK_TOKENS) * BLOCK_TOKENS)
            bounds = [*range(first, last, BLOCK_TOKENS), last] if first < last else []
        else:
            bounds = [0, size] if 0 < size == len(tokens) else []
        chains = token_chains(entry.kv_digest, tokens, bounds)
        for (left, before), (right, chain) in pairwise(zip(bounds, chains, strict=True)):
            self.live()
            rank = max((r for b, e, r in ranks if e > left and b < max(end, right)), default=0)
            key = self._stored(before, chain, tokens[left:right], rank)
            if key is None:
                state = self._exported(entry, left, right)
                if state is None:
                    if not self._ranges and (left, right) != (0, len(tokens)):
                        yield from self._park(entry, 0, len(tokens), ranks, in_ram)
                        return
                    continue
                header = self._header(entry, left, right, before, chain)
                if not self.store.put(header, state, rank, in_ram=in_ram):
                    continue
                key = chain
                if self._ranges:
                    self.store.absorb(key)
            yield left, key

    def _stored(self, before: str, chain: str, ids: Tokens, rank: int) -> str | None:
        """The key of what is stored already and has all of it."""
        key: str | None = chain if self.store.has(chain) else None
        if key is None and self._ranges:
            match = self.store.longest(before, ids)
            key = match.key if match is not None and match.common == len(ids) else None
        if key is not None:
            self.store.touch((key,), rank)
        return key

    def _exported(self, entry: PooledContext, begin: int, end: int) -> State | None:
        try:
            return entry.export_state(begin, end)
        except UnsupportedFeature as error:
            no_ranges = error.metadata.get("capability") == "state.blocks"
            if no_ranges and self._ranges and (begin, end) != (0, len(entry)):
                self._ranges = False
                return None
            log.info("not parked: %s", error.message)
        except InsufficientMemory as error:
            log.info("not parked: %s", error.message)
        self.failed += 1
        return None

    def _header(
        self, entry: PooledContext, begin: int, end: int, before: str, chain: str
    ) -> StateHeader:
        source, shape = self._source, entry.shape
        exact, why = source.exactness(entry)
        return StateHeader(
            backend=source.backend,
            build_digest=source.build_digest,
            state_layout=source.state_layout,
            kv_digest=entry.kv_digest,
            runtime_digest=entry.runtime_digest,
            k_type=shape.k_type,
            v_type=shape.v_type,
            begin=begin,
            end=end,
            token_ids=entry.tokens[:end].astype("<i4", copy=False).tobytes(),
            chain_before=before,
            chain=chain,
            exact=exact,
            exact_reason=why,
        )

    # --- in

    def reach(self, kv_digest: str, target: Tokens, window: int, begin: int = 0) -> int:
        """Up to where the store has ``target`` without a gap from ``begin`` on."""
        path = self._path(kv_digest, target, window, begin)
        return path[-1].begin + path[-1].common if path else begin

    def bring_back(
        self,
        entry: PooledContext,
        target: Tokens,
        keep: int,
        *,
        need_logits: bool = False,
        least: int = WORTHWHILE_TOKENS,
    ) -> int:
        """Have ``entry``, which can be kept up to ``keep``, hold more of ``target`` from the store;
        returns up to where it does now.

        Only where that is at least ``least`` tokens more; else nothing changes. What goes for it
        is parked first, and not in the place of what is brought back. Where a block turns out
        damaged or isn't taken, it may be less than ``keep``. With ``need_logits`` the last token is
        left out, to be evaluated. Cancelled, it is what is there by then. Raises SessionFatal.
        """
        wanted = target[: max(0, len(target) - need_logits)]
        path = self._path(entry.kv_digest, wanted, entry.window, keep)
        stop = path[-1].begin + path[-1].common if path else 0
        if stop < keep + least or not entry.can_keep(path[0].begin):
            return keep
        self.store.tick()  # so that what is parked now pushes others out
        keys = [match.key for match in path]
        self.store.touch(keys)
        with self.store.holding(keys):
            if not self._take(entry, path, keep):
                return keep
        if len(entry) > stop:
            entry.trim(stop if entry.can_keep(stop) else 0)
        self.restored += max(0, len(entry) - keep)
        return len(entry)

    def _take(self, entry: PooledContext, path: list[Match], keep: int) -> bool:
        """Have ``entry`` hold the blocks of ``path``; False where nothing changed."""
        begun = False
        try:
            for match in path:
                state = self.store.read(match.key)
                if state is None:
                    break
                if not begun:
                    if not self.park(entry, keep):
                        break
                    entry.trim(match.begin)
                    begun = True
                if not self._taken(entry, match, state):
                    break
                self.store.hits += 1
                self.live()
        except Cancelled:
            pass
        return begun

    def _path(self, kv_digest: str, wanted: Tokens, window: int, keep: int) -> list[Match]:
        """The blocks that follow each other from the one on that ``keep`` lies in."""
        if self._off or not len(self.store):
            return []
        if not self._ranges:
            match = self.store.wholly(token_chain(kv_digest, wanted[:0]), wanted[:window])
            return [match] if match is not None else []
        path: list[Match] = []
        begins = range(keep // BLOCK_TOKENS * BLOCK_TOKENS, len(wanted), BLOCK_TOKENS)
        for at, chain in zip(begins, token_chains(kv_digest, wanted, begins), strict=True):
            match = self.store.longest(chain, wanted[at : at + BLOCK_TOKENS])
            if match is None or match.end > window:
                break
            path.append(match)
            if match.common < BLOCK_TOKENS:
                break
        return path

    def _taken(self, entry: PooledContext, match: Match, state: State) -> bool:
        begin = len(entry)
        try:
            taken = entry.import_state(state, match.ids)
        except (InsufficientMemory, UnsupportedFeature, MemoryError) as error:
            # Not now, or not here: the block is as good as it was, its tokens are evaluated.
            log.info("a block isn't brought back: %s", error)
            return False
        wrong = taken and not self._tried and not self._same(entry, match, state)
        if wrong:
            log.error("this model's state comes back as other bytes: nothing is parked any more")
            entry.trim(begin if entry.can_keep(begin) else 0)
        if wrong or not taken:
            self.failed += 1
            self.store.remove(match.key)
        if wrong:
            self.close()  # what lies on disk is proved again before a later load trusts it
        return taken and not wrong

    def _same(self, entry: PooledContext, match: Match, state: State) -> bool:
        """What wasn't tried at load: that what went in comes out again, byte by byte."""
        try:
            again = entry.export_state(match.begin, match.end)
        except InsufficientMemory:  # another time there may be
            return True
        self._tried = True
        return bool(np.array_equal(again, state))

    # --- room

    def give_back(self, wanted_bytes: int) -> int:
        """Free RAM for a new context; returns how many bytes. None where contexts lie elsewhere."""
        return self.store.shrink(wanted_bytes) if self._on_host and wanted_bytes > 0 else 0

    def make_way(self, refusal: InsufficientMemory) -> bool:
        """Whether anything was freed of what ``refusal`` says the host lacked for a context."""
        numbers = refusal.metadata
        if numbers.get("cause") != "host_memory":
            return False
        return self.give_back(int(numbers["needed_bytes"]) - int(numbers["free_bytes"])) > 0

    def keep(self, most_s: float, live: Live) -> None:
        """Before its RAM is given back: what lies there to disk, where a later load finds it. What
        matters most goes first, for about ``most_s`` seconds at most.
        """
        end_s = time.monotonic() + most_s

        def until() -> None:
            live()
            if time.monotonic() > end_s:
                raise Cancelled

        self.serve(until)
        try:
            kept = self.store.flush()
        except Exception:  # the model goes nevertheless
            log.exception("parked blocks aren't all kept")
        else:
            if kept:
                log.info("%d parked blocks went to disk before the model goes", kept)
        finally:
            self.serve(nobody)

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._off = True
        self.store.close()


def parking_of(
    op: LoadOp, loaded: LoadResult, source: Source, beat: Callable[[], None]
) -> Parking | None:
    """What ``op`` asks for, where the loaded model can be parked at all."""
    cold, told = op.cold, loaded.capabilities.get("cold_store", "")
    if cold is None or told.startswith("no") or not (cold.ram_bytes or cold.disk_bytes):
        return None
    store = ColdStore(
        Maker(source.backend, source.build_digest, source.state_layout),
        cold.ram_bytes,
        cold.disk_bytes,
        Path(cold.folder) if cold.folder else None,
        beat=beat,
    )
    return Parking(
        store,
        source,
        ranges=not loaded.capabilities.get("state.blocks", "").startswith("no"),
        tried=told.startswith("yes"),
        on_host=loaded.gpu_layers == 0,
    )


def _without_images(tokens: Tokens) -> int:
    """Tokens before the first image."""
    images = tokens < 0
    return int(images.argmax()) if images.any() else len(tokens)
