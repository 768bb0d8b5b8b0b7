"""The record of a saved session: all that it is besides its KV, in one sealed file.

Owns the format, its checks, and what of a session goes in and comes out. Knows no engine, and of
the parts that hold the KV only their names, ranges and digests.

The layout is the record's of ``shared/sealed_file.py``; its body is MessagePack of
``SessionRecord``.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from modeld.shared.codec import CodecError, canonical, decode_struct
from modeld.shared.errors import (
    DigestMismatch,
    InvalidRequest,
    ManifestMismatch,
)
from modeld.shared.messages import MAX_FRAME_BYTES, PromptIn, SavedPart, SegmentOut
from modeld.shared.planner.residency import Layout
from modeld.shared.planner.token_ranges import Ranges
from modeld.shared.sealed_file import RECORD_MAGIC, RECORD_NUMBERS, SHA_BYTES
from modeld.workers.prompt import Assembled, GeneratedTurn
from modeld.workers.regular_file import opened, unreadable
from modeld.workers.tape import Former

if TYPE_CHECKING:
    from modeld.workers.pooled_context import Tokens
    from modeld.workers.residency import Source
    from modeld.workers.session import Session

VERSION = 1
_HEAD_BYTES = RECORD_NUMBERS.size + SHA_BYTES
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


class TurnRecord(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A ``GeneratedTurn``. Ids are little-endian int32, here and below."""

    turn_id: str
    tail_text: str
    tail_ids: bytes
    answer_text: str
    answer_ids: bytes
    spelled: bool


class PromptRecord(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An ``Assembled`` without images."""

    tokens: bytes
    prefix_tokens: int
    text_bytes: int
    additive: bool
    turns_recomputed: int
    segments: list[SegmentOut]
    tail_text: str
    tail_ids: bytes
    text: str
    tools_end: int


class FormerRecord(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A ``Former``."""

    tokens: bytes
    layout: Layout


class SessionRecord(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What a session was. Nothing in it depends on when or where it was written."""

    # What its KV means something to.
    backend: str
    build_digest: str
    state_layout: str
    kv_digest: str
    runtime_digest: str
    k_type: str
    v_type: str
    prompt_format: str
    template_digest: str
    window: int  # tokens, as it was served
    # What was asked and answered.
    prefix: PromptIn
    suffix: PromptIn | None
    prompt: PromptRecord | None
    answer_ids: bytes
    answer_text: str
    answer_spelled: bool
    turns: list[TurnRecord]  # oldest first
    seen_tokens: int
    counters: dict[str, int]
    # Under overflow evict: what of prompt and answer is attended.
    layout: Layout | None
    former: FormerRecord | None
    stayed: Ranges
    # Its KV.
    resident: int  # tokens; the first of ``token_ids``
    token_ids: bytes  # whose KV the parts hold
    parts: list[SavedPart]  # in order, of positions 0 to the last
    exact: bool  # whether the engine was seen to continue bit for bit from such bytes
    exact_reason: str

    @property
    def tokens(self) -> Tokens:
        return _tokens(self.token_ids)

    @property
    def overflow(self) -> str:
        return "refuse" if self.layout is None else "evict"

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.tokens) // 4 if self.prompt is not None else 0

    def attended(self) -> bytes:
        """Ids of prompt and answer that the context is to hold."""
        known = (self.prompt.tokens if self.prompt is not None else b"") + self.answer_ids
        if self.layout is None:
            return known
        return b"".join(known[4 * b : 4 * e] for b, e in self.layout.attended(len(known) // 4))

    def all_ids(self) -> list[Tokens]:
        """Every id that stands for a token of the model, wherever in the record."""
        prompt, turns = self.prompt, self.turns
        ids = [self.token_ids, self.answer_ids, *(t.tail_ids for t in turns)]
        ids += [turn.answer_ids for turn in turns]
        ids += [prompt.tokens, prompt.tail_ids] if prompt is not None else []
        ids += [self.former.tokens] if self.former is not None else []
        return [_tokens(each) for each in ids]


# --- from a session, and into one -----------------------------------------------------------------


def record_of(
    session: Session,
    source: Source,
    tokens: Tokens,
    parts: Sequence[SavedPart],
    exactness: tuple[bool, str],
) -> SessionRecord:
    """Of a session whose KV of ``tokens`` the ``parts`` hold."""
    assembled, former, shape = session.assembled, session.former, session.entry.shape
    return SessionRecord(
        backend=source.backend,
        build_digest=source.build_digest,
        state_layout=source.state_layout,
        kv_digest=session.kv_digest,
        runtime_digest=session.runtime_digest,
        k_type=shape.k_type,
        v_type=shape.v_type,
        prompt_format=session.prompt_format,
        template_digest=source.template_digest,
        window=session.window,
        prefix=session.prefix,
        suffix=session.suffix,
        prompt=_prompt_record(assembled) if assembled is not None else None,
        answer_ids=_bytes(session.answer_ids),
        answer_text=session.answer_text,
        answer_spelled=session.answer_spelled,
        turns=[_turn_record(turn) for turn in session.turns.values()],
        seen_tokens=session.seen_tokens,
        counters=dict(session.counters),
        layout=session.layout,
        former=FormerRecord(tokens=_bytes(former.tokens), layout=former.layout) if former else None,
        stayed=session.stayed,
        resident=min(session.logical, len(tokens)),
        token_ids=_bytes(tokens),
        parts=list(parts),
        exact=exactness[0],
        exact_reason=exactness[1],
    )


def _prompt_record(assembled: Assembled) -> PromptRecord:
    return PromptRecord(
        tokens=_bytes(assembled.tokens),
        prefix_tokens=assembled.prefix_tokens,
        text_bytes=assembled.text_bytes,
        additive=assembled.additive,
        turns_recomputed=assembled.turns_recomputed,
        segments=list(assembled.segments),
        tail_text=assembled.tail_text,
        tail_ids=_bytes(assembled.tail_ids),
        text=assembled.text,
        tools_end=assembled.tools_end,
    )


def _turn_record(turn: GeneratedTurn) -> TurnRecord:
    return TurnRecord(
        turn_id=turn.turn_id,
        tail_text=turn.tail_text,
        tail_ids=_bytes(turn.tail_ids),
        answer_text=turn.answer_text,
        answer_ids=_bytes(turn.answer_ids),
        spelled=turn.spelled,
    )


def put_into(record: SessionRecord, session: Session) -> None:
    """Make a session what was saved, but for its KV, which its context holds already."""
    prompt, former, layout = record.prompt, record.former, session.layout
    if layout is not None and record.layout is not None:
        # Shares of the window that it has now.
        session.layout = replace(record.layout, sizes=layout.sizes)
    session.stayed, session.former = record.stayed, None
    if layout is not None and former is not None:
        kept = replace(former.layout, sizes=layout.sizes)
        session.former = Former(_tokens(former.tokens), kept)
    session.prefix, session.suffix = record.prefix, record.suffix
    session.assembled = _assembled(prompt) if prompt is not None else None
    session.prefix_tokens = prompt.prefix_tokens if prompt is not None else 0
    session.prompt = record.prompt_tokens
    session.answer_ids = _ids(record.answer_ids)
    session.answer_text = record.answer_text
    session.answer_spelled = record.answer_spelled
    session.turns = OrderedDict((turn.turn_id, _turn(turn)) for turn in record.turns)
    session.seen_tokens = record.seen_tokens
    session.counters = Counter(record.counters)
    session.logical = record.resident


def _assembled(prompt: PromptRecord) -> Assembled:
    return Assembled(
        tokens=_ids(prompt.tokens),
        prefix_tokens=prompt.prefix_tokens,
        text_bytes=prompt.text_bytes,
        additive=prompt.additive,
        turns_recomputed=prompt.turns_recomputed,
        segments=list(prompt.segments),
        tail_text=prompt.tail_text,
        tail_ids=_ids(prompt.tail_ids),
        text=prompt.text,
        tools_end=prompt.tools_end,
    )


def _turn(turn: TurnRecord) -> GeneratedTurn:
    return GeneratedTurn(
        turn_id=turn.turn_id,
        tail_text=turn.tail_text,
        tail_ids=tuple(_ids(turn.tail_ids)),
        answer_text=turn.answer_text,
        answer_ids=tuple(_ids(turn.answer_ids)),
        spelled=turn.spelled,
    )


def _bytes(ids: Sequence[int] | Tokens) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def _tokens(ids: bytes) -> Tokens:
    return np.frombuffer(ids, dtype="<i4").astype(np.int32)


def _ids(ids: bytes) -> list[int]:
    found: list[int] = _tokens(ids).tolist()
    return found


# --- the file -------------------------------------------------------------------------------------


def encode_record(record: SessionRecord) -> tuple[bytes, str]:
    """The file's bytes, and the SHA-256 hex that seals them.

    Raises InvalidRequest for a prompt too large to be read again.
    """
    body = canonical(record)
    if len(body) > MAX_FRAME_BYTES:
        raise InvalidRequest.of(
            "prompt", f"{len(body)} bytes", f"at most {MAX_FRAME_BYTES} bytes of a saved session"
        )
    numbers = RECORD_NUMBERS.pack(RECORD_MAGIC, VERSION, len(body))
    digest = hashlib.sha256(numbers + body)
    return numbers + digest.digest() + body, digest.hexdigest()


def read_record(folder: Path, name: str) -> SessionRecord:
    """Read and verify all of it.

    Raises SnapshotNotFound where there is nothing, InvalidRequest for what can't be read,
    DigestMismatch for a file that is damaged or another kind's, ManifestMismatch for another
    version's.
    """
    if not FILE_NAME.match(name):
        raise InvalidRequest.of("record", name, "the name of a file in the folder")
    return decode_record(_content(folder / name))


def _content(path: Path) -> bytes:
    with opened(path, "record", ", which is to say what was saved") as (fd, _):
        try:
            with open(fd, "rb", closefd=False) as file:
                return file.read(_HEAD_BYTES + MAX_FRAME_BYTES + 1)
        except OSError as error:
            raise unreadable(path, "record", error.strerror) from None


def decode_record(data: bytes) -> SessionRecord:
    """Raises DigestMismatch and ManifestMismatch as ``read_record``."""
    if len(data) < _HEAD_BYTES or not data.startswith(RECORD_MAGIC):
        raise damaged("it doesn't begin as one")
    numbers, sealed = data[: RECORD_NUMBERS.size], data[RECORD_NUMBERS.size : _HEAD_BYTES]
    body = data[_HEAD_BYTES:]
    _, version, size = RECORD_NUMBERS.unpack(numbers)
    if hashlib.sha256(numbers + body).digest() != sealed or len(body) != size:
        raise damaged("its content isn't what was written")
    if version != VERSION:
        raise ManifestMismatch(
            f"The saved session is of version {version} of its format; this worker reads version "
            f"{VERSION}. Its conversation must be evaluated again.",
            metadata={
                "reason": "identity", "field": "version", "asserted": version, "actual": VERSION,
            },
        )  # fmt: skip
    try:
        record = decode_struct(body, SessionRecord)
    except CodecError as error:
        raise damaged(f"its content can't be read ({error})") from None
    _check(record)
    return record


def _check(record: SessionRecord) -> None:
    """That the record agrees with itself."""
    prompt = record.prompt
    tokens, at = len(record.token_ids) // 4, 0
    for part in record.parts:
        if part.begin != at or part.end <= at or not FILE_NAME.match(part.name):
            raise damaged("its parts don't follow each other")
        at = part.end
    if at != tokens:
        raise damaged(f"its parts are of {at} tokens, not {tokens}")
    raw = [record.token_ids, record.answer_ids, prompt.tokens if prompt is not None else b""]
    raw += [record.former.tokens] if record.former is not None else []
    raw += [ids for turn in record.turns for ids in (turn.tail_ids, turn.answer_ids)]
    if any(len(ids) % 4 for ids in raw) or (prompt is not None and len(prompt.tail_ids) % 4):
        raise damaged("its token ids can't be read")
    resident = record.token_ids[: 4 * record.resident]
    if not 0 <= record.resident <= tokens or not record.attended().startswith(resident):
        raise damaged("its resident tokens aren't those of its prompt and answer")
    if prompt is not None and not 0 <= prompt.prefix_tokens <= len(prompt.tokens) // 4:
        raise damaged("its prefix isn't a part of its prompt")
    if len({turn.turn_id for turn in record.turns}) != len(record.turns):
        raise damaged("it has two turns of one name")


def damaged(what: str) -> DigestMismatch:
    """The refusal of a record, or of a folder that isn't as the record says."""
    return DigestMismatch(
        f"What was saved can't be brought back: {what}. Nothing was changed. The conversation must "
        "be evaluated again.",
        metadata={"cause": "session_record"},
    )
