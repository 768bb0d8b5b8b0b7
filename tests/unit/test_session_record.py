"""The record of a saved session: it comes back as it went in, and no changed byte goes unseen."""

from __future__ import annotations

import hashlib
import os
from dataclasses import fields
from pathlib import Path

import msgspec
import numpy as np
import pytest

from modeld.shared.codec import canonical
from modeld.shared.errors import (
    DigestMismatch,
    InvalidRequest,
    ManifestMismatch,
    SnapshotNotFound,
)
from modeld.shared.messages import Message, PromptIn, SavedPart, SegmentIn, SegmentOut
from modeld.shared.planner.residency import Admitted, Layout, Sizes, Stored
from modeld.workers.prompt import Assembled, GeneratedTurn
from modeld.workers.session import Session
from modeld.workers.session_record import (
    VERSION,
    FormerRecord,
    PromptRecord,
    SessionRecord,
    TurnRecord,
    decode_record,
    encode_record,
    read_record,
)
from modeld.workers.tape import Former

# What of a session is another's business, or follows from what is recorded.
UNRECORDED = {
    "session_id", "assembler", "context", "served_window", "batched", "prompt", "prefix_tokens",
    "fatal_cause", "saves", "parked",
}  # fmt: skip
RECORDED_AS = {"logical": "resident", "assembled": "prompt"}
HEAD_BYTES = 52


def ids(*values: int) -> bytes:
    return np.array(values, dtype="<i4").tobytes()


def record(**changes: object) -> SessionRecord:
    part = SavedPart(name="kv-0-3-abc", begin=0, end=3, file_bytes=99, digest="d" * 64)
    segment = SegmentOut(
        byte_begin=0, byte_end=9, token_begin=0, token_end=2, token_hash="h", located=True
    )
    plain: dict[str, object] = {
        "backend": "fake",
        "build_digest": "b" * 64,
        "state_layout": "rows-1",
        "kv_digest": "kv",
        "runtime_digest": "rt",
        "k_type": "f16",
        "v_type": "q8_0",
        "prompt_format": "chat",
        "template_digest": "t" * 64,
        "window": 512,
        "prefix": PromptIn(
            segments=[SegmentIn(message=Message(role="user", text="grüß dich"))], tools=["{}"]
        ),
        "suffix": PromptIn(segments=[SegmentIn(generated_turn_id="t1")]),
        "prompt": PromptRecord(
            tokens=ids(5, 6), prefix_tokens=1, text_bytes=9, additive=True, turns_recomputed=0,
            segments=[segment], tail_text="grüß", tail_ids=ids(6), text="grüß dich", tools_end=0,
        ),
        "answer_ids": ids(7, 8),
        "answer_text": "und",
        "answer_spelled": True,
        "turns": [
            TurnRecord(
                turn_id="t1", tail_text="a", tail_ids=ids(1), answer_text="b", answer_ids=ids(2, 3),
                spelled=False,
            )
        ],
        "seen_tokens": 44,
        "counters": {"evaluated_tokens": 3},
        "layout": None,
        "former": None,
        "stayed": (),
        "resident": 3,
        "token_ids": ids(5, 6, 7),
        "parts": [part],
        "exact": True,
        "exact_reason": "seen",
    }  # fmt: skip
    return SessionRecord(**{**plain, **changes})  # type: ignore[arg-type]


def sealed(body: bytes, version: int = VERSION, size: int | None = None) -> bytes:
    """A file that is sound but for what is asked."""
    numbers = b"modeldSR" + version.to_bytes(4, "little")
    numbers += (len(body) if size is None else size).to_bytes(8, "little")
    return numbers + hashlib.sha256(numbers + body).digest() + body


LAYOUT = Layout(
    Sizes(1024, 256, 256), kept=((0, 1),), tail=3, pinned=((0, 1),),
    admitted=(Admitted(0, 1, 2),), stored=(Stored(1, 3, "key"),), seen=4, evaluated=4,
)  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        record(),
        record(prompt=None, suffix=None, answer_ids=b"", turns=[], resident=0, token_ids=b"",
               parts=[]),
        record(layout=LAYOUT, former=FormerRecord(tokens=ids(5, 6), layout=LAYOUT),
               stayed=((0, 1), (3, 4)), token_ids=ids(5, 8), resident=2,
               parts=[SavedPart(name="p", begin=0, end=2, file_bytes=9, digest="d")]),
    ],
    ids=["conversation", "nothing", "evicted"],
)  # fmt: skip
def test_what_was_recorded_comes_back(given: SessionRecord) -> None:
    data, digest = encode_record(given)
    assert decode_record(data) == given
    assert (data, digest) == encode_record(decode_record(data))
    assert digest == hashlib.sha256(data[:20] + data[HEAD_BYTES:]).hexdigest()


def test_every_flipped_byte_is_seen() -> None:
    data, _ = encode_record(record())
    assert len(data) > 800
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(DigestMismatch):
            decode_record(bytes(changed))


def test_every_missing_or_added_byte_is_seen() -> None:
    data, _ = encode_record(record())
    for length in range(len(data)):
        with pytest.raises(DigestMismatch):
            decode_record(data[:length])
    with pytest.raises(DigestMismatch):
        decode_record(data + b"\0")


def test_another_version_is_told_from_damage() -> None:
    body = canonical({"from": "the future"})
    with pytest.raises(ManifestMismatch) as refused:
        decode_record(sealed(body, version=VERSION + 1))
    assert refused.value.metadata["field"] == "version"
    assert refused.value.metadata["asserted"] == str(VERSION + 1)
    with pytest.raises(DigestMismatch):
        decode_record(sealed(canonical(record()), size=5))


@pytest.mark.parametrize(
    "plain",
    [
        {"surplus": 1},
        {"window": "wide"},
        {"parts": None},
        {"resident": 4},
        {"resident": -1},
        {"token_ids": ids(5, 6, 9)},  # not what was answered
        {"token_ids": ids(5, 6, 7)[:-1]},
        {"answer_ids": b"\1"},
        {"token_ids": ids(5, 6)},  # fewer than the parts'
    ],
)
def test_a_record_that_disagrees_with_itself_is_damaged(plain: dict[str, object]) -> None:
    body = msgspec.msgpack.decode(canonical(record()))
    with pytest.raises(DigestMismatch, match="can't be brought back"):
        decode_record(sealed(canonical(body | plain)))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [("a", 1, 3)],
        [("a", 0, 2), ("b", 1, 3)],
        [("a", 0, 1), ("b", 2, 3)],
        [("a", 0, 0), ("b", 0, 3)],
        [("../a", 0, 3)],
        [("/etc/passwd", 0, 3)],
        [(".a", 0, 3)],
        [("", 0, 3)],
    ],
)
def test_parts_follow_each_other_and_stay_in_the_folder(parts: list[tuple[str, int, int]]) -> None:
    named = [
        SavedPart(name=name, begin=begin, end=end, file_bytes=9, digest="d")
        for name, begin, end in parts
    ]
    with pytest.raises(DigestMismatch):
        decode_record(encode_record(record(parts=named))[0])


def test_a_record_is_a_file_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "session-1").write_bytes(encode_record(record())[0])
    assert read_record(tmp_path, "session-1") == record()
    with pytest.raises(SnapshotNotFound):
        read_record(tmp_path, "session-2")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe", "../" + tmp_path.name, "/session-1", ""):
        with pytest.raises(InvalidRequest) as refused:
            read_record(tmp_path, name)
        assert refused.value.metadata["field"] == "record"


def test_everything_a_session_is_has_its_place_in_the_record() -> None:
    def named(kind: type) -> set[str]:
        return {field.name for field in fields(kind)}

    here = {RECORDED_AS.get(name, name) for name in named(Session) - UNRECORDED}
    assert here <= set(SessionRecord.__struct_fields__)
    assert named(Assembled) - {"images"} == set(PromptRecord.__struct_fields__)
    assert named(GeneratedTurn) == set(TurnRecord.__struct_fields__)
    assert named(Former) == set(FormerRecord.__struct_fields__)
