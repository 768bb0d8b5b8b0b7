"""A whole session into a folder, writing only what is new of it.

Owns which parts are written, named again or replaced. Knows no engine's bytes, and not who commits
or removes what is written.

A part is a file (``state_file``) with the KV of a range of positions; the record
(``session_record``) is all else. A part that an earlier save wrote is named again where the file is
still that one and its KV is, bit for bit, what the session holds: what a restore brings back is
what was there at the save, also where a conversation was evaluated anew between two of them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from modeld.shared.errors import InvalidRequest, UnsupportedFeature
from modeld.shared.messages import SavedPart, SaveOp, SaveResult
from modeld.shared.planner.token_ranges import Ranges, total, upto
from modeld.workers.executor import OpContext
from modeld.workers.images import Rereading
from modeld.workers.new_files import Cancelled, Live, NewFiles, free_name, write_all
from modeld.workers.pooled_context import Mark, Tokens, common_prefix
from modeld.workers.residency import Outgoing, Source, held, live_of, state_header
from modeld.workers.session import Session
from modeld.workers.session_record import encode_record, record_of
from modeld.workers.state_file import Chunk, fill_state

CAPABILITY = "snapshot"
MAX_PARTS = 64  # of a saved session; beyond, all of it is written anew
# A part ends where the next turn is likely to go another way, if it spares writing so many tokens.
CUT_TOKENS = 256
_MOST_FOLDERS = 4  # remembered for a session
_NAME_DIGITS = 32  # of a digest


def capabilities(found: Mapping[str, str]) -> dict[str, str]:
    """What ``state.blocks`` and ``state.whole`` of a loaded model mean for saving its sessions."""
    blocks, whole = found["state.blocks"], found["state.whole"]
    if blocks.startswith("yes"):
        answer = f"{blocks}; of a session that was saved before, only what is new is written"
    elif whole.startswith("yes"):
        answer = f"{whole}; all of it is written each time"
    else:
        answer = whole
    return {CAPABILITY: answer, "durable": answer}


@dataclass(frozen=True)
class Known:
    """A part in a folder, and what shows that its file is still the one that was seen whole."""

    part: SavedPart
    chunks: tuple[Chunk, ...]
    seen: tuple[int, int, int]

    def is_there(self, folder: Path) -> bool:
        try:
            return seen_file(folder / self.part.name) == self.seen
        except OSError:
            return False


@dataclass(frozen=True)
class SavedParts:
    """What a save or a restore left known of a folder."""

    tokens: Tokens  # whose KV the parts hold
    mark: Mark  # of the context that they were written from or read into
    parts: tuple[Known, ...]


def seen_file(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def remember(session: Session, folder: Path, tokens: Tokens, parts: Sequence[Known]) -> None:
    saves = session.saves
    saves[str(folder)] = SavedParts(tokens, session.entry.mark(), tuple(parts))
    saves.move_to_end(str(folder))
    while len(saves) > _MOST_FOLDERS:
        saves.popitem(last=False)


def checked_folder(given: str) -> Path:
    if not given.startswith("/") or "\0" in given or not Path(given).is_dir():
        raise InvalidRequest.of("folder", given, "the absolute path of a folder that exists")
    return Path(given)


def save(session: Session, source: Source, op: SaveOp, context: OpContext) -> SaveResult:
    """Write the session's resident KV and its record. Changes nothing in the session.

    What is retained behind the resident tokens stays out, unless the model's memory goes out only
    as a whole. Files that were there are left; without an answer, nothing new is.

    Raises UnsupportedFeature (capability ``snapshot``) for an executor that gives no KV out or a
    prompt with images, InvalidRequest for a folder that can't be, StorageFull, and
    InsufficientMemory where there is none for a chunk.
    """
    began_s = time.perf_counter()
    folder = checked_folder(op.folder)
    _check_can_save(session)
    saving = _Saving(session, source, folder, live_of(context))
    try:
        result = saving.of_resident()
    except UnsupportedFeature as error:
        if error.metadata.get("capability") != "state.blocks":
            raise _unsupported(error.message) from None
        try:
            result = saving.of_whole()
        except UnsupportedFeature as whole:
            raise _unsupported(whole.message) from None
    except Cancelled:
        result = None
    if result is None:
        exact, why = source.exactness(session.entry)
        result = _save_result(session, exact, why)
        result.cancelled = True
    result.seconds = time.perf_counter() - began_s
    return result


def _save_result(session: Session, exact: bool, why: str) -> SaveResult:
    """Of nothing written."""
    return SaveResult(
        record="", record_bytes=0, record_digest="", parts=[], written_bytes=0, tokens=0,
        seen_tokens=session.seen_tokens, turns=len(session.turns), exact=exact, exact_reason=why,
        seconds=0.0,
    )  # fmt: skip


def _check_can_save(session: Session) -> None:
    entry = session.entry
    if entry.samples_itself is not None or isinstance(entry.engine_context, Rereading):
        raise _unsupported("The engine keeps this session's KV to itself.")
    prompts = [session.prefix, *([session.suffix] if session.suffix is not None else [])]
    messages = [segment.message for prompt in prompts for segment in prompt.segments]
    images = sum(len(message.images) for message in messages if message is not None)
    if images or (session.assembled is not None and session.assembled.images):
        raise _unsupported(f"Its prompt has {images} image(s), whose pixels aren't kept.")


def _unsupported(why: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"This session can't be saved. {why} Keep its messages, and send them again.",
        metadata={"capability": CAPABILITY},
    )


@dataclass(frozen=True)
class _Saving:
    session: Session
    source: Source
    folder: Path
    live: Live

    def of_resident(self) -> SaveResult | None:
        """None where it was cancelled. Raises UnsupportedFeature where it takes ranges."""
        session = self.session
        tokens = held(session)[: session.logical].copy()
        kept, common = self._kept(tokens)
        begin = kept[-1].part.end if kept else 0
        cuts = [common]
        if session.assembled is not None and session.prompt > session.prefix_tokens:
            # The suffix is another one next time.
            ahead: Ranges = ((0, session.prefix_tokens),)
            if session.layout is not None:
                ahead = upto(session.layout.attended(session.length), session.prefix_tokens)
            cuts.append(total(ahead))
        ranges = self._ranges(begin, len(tokens), cuts)
        if len(kept) + len(ranges) > MAX_PARTS:
            kept, ranges = [], self._ranges(0, len(tokens), [])
        return self._write(tokens, kept, ranges)

    def of_whole(self) -> SaveResult | None:
        """All that the context holds in one part."""
        tokens = held(self.session).copy()
        size = len(tokens)
        known = self.session.saves.get(str(self.folder))
        if known is not None and np.array_equal(known.tokens, tokens):
            kept = [one for one in known.parts if one.is_there(self.folder)]
            untouched = self.session.entry.untouched(known.mark)
            if [(one.part.begin, one.part.end) for one in kept] == [(0, size)] == [(0, untouched)]:
                return self._write(tokens, kept, [])
        return self._write(tokens, [], [(0, size)])

    def _kept(self, tokens: Tokens) -> tuple[list[Known], int]:
        """The parts that are named again, and how many tokens are those of the last save.

        Not one that ends within a block that has more tokens now. Where it has the same ones,
        others may have been in it meanwhile, by which an engine may have scaled it anew.
        """
        known = self.session.saves.get(str(self.folder))
        if known is None:
            return [], 0
        entry, size = self.session.entry, len(tokens)
        block, untouched = entry.engine_context.state_block, entry.untouched(known.mark)
        common, kept = common_prefix(known.tokens, tokens), []
        for one in known.parts:
            end = one.part.end
            if end > common or (end % block and end != size) or not one.is_there(self.folder):
                break
            if (end > untouched or end % block) and not self._same(one):
                break
            kept.append(one)
        return kept, common

    def _same(self, known: Known) -> bool:
        """Whether the context holds the part's very bytes, as after it was parked and came back."""
        begin = known.part.begin
        going = Outgoing(self.session.entry, begin, known.part.end, self.live)
        for chunk in known.chunks:
            state = going.chunk(begin, chunk.end)
            if hashlib.sha256(state.data).digest() != chunk.sha256:
                return False
            begin = chunk.end
        return True

    def _ranges(self, begin: int, end: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
        """What is written of ``begin`` to ``end``, split at whole blocks where that will spare
        writing it again: near ``cuts``, and before a last block that isn't full.
        """
        block = self.session.entry.engine_context.state_block
        points = [begin]
        for cut in sorted(at - at % block for at in cuts):
            if cut < end and cut - points[-1] >= CUT_TOKENS:
                points.append(cut)
        full = end - end % block
        if points[-1] < full < end:
            points.append(full)
        return [*pairwise([*points, end])] if begin < end else []

    def _write(
        self, tokens: Tokens, kept: Sequence[Known], ranges: Sequence[tuple[int, int]]
    ) -> SaveResult | None:
        session, folder = self.session, self.folder
        exact, why = self.source.exactness(session.entry)
        result = _save_result(session, exact, why)
        try:
            with NewFiles(folder, self.live) as files:
                new = [self._write_part(files, tokens, begin, end) for begin, end in ranges]
                known = [*kept, *new]
                result.parts = [one.part for one in known]
                record = record_of(session, self.source, tokens, result.parts, (exact, why))
                data, digest = encode_record(record)
                result.record, _ = files.add(
                    lambda fd: write_all(fd, memoryview(data)),
                    lambda _: free_name(folder, f"session-{digest[:_NAME_DIGITS]}"),
                )
                files.keep()
        except Cancelled:
            return None
        remember(session, folder, tokens, known)
        result.record_bytes, result.record_digest = len(data), digest
        result.written_bytes = len(data) + sum(one.part.file_bytes for one in new)
        result.tokens = len(tokens)
        return result

    def _write_part(self, files: NewFiles, tokens: Tokens, begin: int, end: int) -> Known:
        header = state_header(self.session, self.source, tokens, begin, end)
        outgoing = Outgoing(self.session.entry, begin, end, self.live)
        name, written = files.add(
            lambda fd: fill_state(fd, header, outgoing.most_chunks, outgoing.chunks(), self.live),
            lambda made: free_name(self.folder, f"kv-{begin}-{end}-{made.digest[:_NAME_DIGITS]}"),
        )
        part = SavedPart(
            name=name, begin=begin, end=end, file_bytes=written.file_bytes, digest=written.digest
        )
        return Known(part, written.chunks, seen_file(self.folder / name))
