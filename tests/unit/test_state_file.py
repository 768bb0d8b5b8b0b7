"""The file of a session's state: written whole or not at all, and no changed byte goes unseen."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from modeld.shared.errors import (
    DigestMismatch,
    InsufficientMemory,
    InvalidRequest,
    ManifestMismatch,
    ModeldError,
    SnapshotNotFound,
    StorageFull,
)
from modeld.workers.state_file import (
    CHAIN_TOKENS,
    StateHeader,
    check_target,
    open_state,
    token_chain,
    write_state,
)
from tests.support.residency import flipped, rewritten

if TYPE_CHECKING:
    from modeld.workers.engine import State

TOKENS = np.arange(100, 150, dtype=np.int32)
PARTS: list[tuple[int, State]] = [
    (30, np.arange(200, dtype=np.uint8)),
    (50, np.full(77, 9, dtype=np.uint8)),
]


def header(**changes: object) -> StateHeader:
    fields: dict[str, object] = {
        "backend": "fake",
        "build_digest": "b" * 64,
        "state_layout": "rows-1",
        "kv_digest": "kv",
        "runtime_digest": "rt",
        "k_type": "f16",
        "v_type": "q8_0",
        "begin": 10,
        "end": 50,
        "token_ids": TOKENS.tobytes(),
        "chain_before": token_chain("kv", TOKENS[:10]),
        "chain": token_chain("kv", TOKENS),
        "exact": True,
        "exact_reason": "seen",
    }
    return StateHeader(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "state"
    write_state(target, header(), 2, PARTS)
    return target


def everything(path: Path) -> list[tuple[int, bytes]]:
    with open_state(str(path)) as file:
        return [(end, state.tobytes()) for end, state in file.parts(lambda: 1 << 30)]


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    target = tmp_path / "state"
    written = write_state(target, header(), 2, PARTS)
    assert written.payload_bytes == 277
    assert written.file_bytes == target.stat().st_size
    assert target.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [target]
    with open_state(str(target)) as file:
        assert file.digest == written.digest
        assert file.header.tokens.tolist() == TOKENS.tolist()
        assert (file.header.v_type, file.header.begin, file.header.exact) == ("q8_0", 10, True)
    assert everything(target) == [(end, state.tobytes()) for end, state in PARTS]


def test_the_same_state_makes_the_same_file(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    write_state(again, header(), 2, PARTS)
    assert again.read_bytes() == path.read_bytes()


def test_every_flipped_byte_is_seen(path: Path, tmp_path: Path) -> None:
    size = path.stat().st_size
    assert size > 700
    for at in range(size):
        with pytest.raises((DigestMismatch, ManifestMismatch)) as refused:
            everything(flipped(path, at, tmp_path / "flipped"))
        # Only the version's own bytes can make it another version's file.
        assert isinstance(refused.value, ManifestMismatch) == (8 <= at < 12)


def test_every_shorter_or_longer_file_is_refused(path: Path, tmp_path: Path) -> None:
    whole = path.read_bytes()
    cut = tmp_path / "cut"
    for length in [*range(0, len(whole), 7), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(DigestMismatch):
            everything(cut)
    cut.write_bytes(whole + b"\0")
    with pytest.raises(DigestMismatch, match="278 bytes of payload, not 277"):
        everything(cut)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"begin": 50}, "range"),
        ({"begin": -1}, "range"),
        ({"end": 49}, "range"),
        ({"begin": 30}, "chunks"),
        ({"token_ids": TOKENS.tobytes()[:-4]}, "range"),
        ({"token_ids": TOKENS[::-1].tobytes()}, "chained"),
        ({"kv_digest": "other"}, "chained"),
        ({"chain_before": "0" * 64}, "chained"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    path: Path, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(DigestMismatch, match=said):
        everything(rewritten(path, tmp_path / "other", **changes))


def test_a_field_of_another_type_or_name_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(DigestMismatch, match="can't be read"):
        everything(rewritten(path, tmp_path / "other", exact=1))


def test_the_chained_hash_depends_on_every_token_and_on_the_kv_digest() -> None:
    tokens = np.arange(3 * CHAIN_TOKENS + 5, dtype=np.int32)
    chains = {token_chain("kv", tokens[:end]) for end in range(len(tokens) + 1)}
    for at in range(len(tokens)):
        other = tokens.copy()
        other[at] += 1
        chains.add(token_chain("kv", other))
    chains.add(token_chain("kv2", tokens))
    assert len(chains) == 2 * len(tokens) + 2


@pytest.mark.parametrize("given", ["state", "./state", "", "/", "\0", "/tmp/a\0b"])
def test_only_absolute_paths_are_taken(given: str) -> None:
    for take in (check_target, lambda path: open_state(path).__enter__()):
        with pytest.raises(InvalidRequest) as refused:
            take(given)
        assert refused.value.metadata["field"] == "path"


def test_a_target_must_be_new_and_its_folder_there(path: Path, tmp_path: Path) -> None:
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    for taken in (path, dangling, tmp_path):
        with pytest.raises(InvalidRequest, match="doesn't exist yet"):
            check_target(str(taken))
    for missing in (tmp_path / "none" / "state", path / "state"):
        with pytest.raises(InvalidRequest, match="folder that exists"):
            check_target(str(missing))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for wrong in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InvalidRequest, match="regular file"):
            everything(wrong)
    with pytest.raises(SnapshotNotFound):
        everything(tmp_path / "none")
    (tmp_path / "text").write_text("not a state" * 50)
    with pytest.raises(DigestMismatch, match="begin as one"):
        everything(tmp_path / "text")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("writes", range(3))
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, number: int
) -> None:
    real = os.write
    left = writes

    def full(fd: int, data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(number, os.strerror(number))
        left -= 1
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageFull, match="Free some space"):
        write_state(tmp_path / "state", header(), 2, PARTS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_is_full_only_when_asked_to_keep_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(StorageFull):
        write_state(tmp_path / "state", header(), 2, PARTS)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_synced_does_not_keep_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, 0

    def second_fails(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(StorageFull):
        write_state(tmp_path / "state", header(), 2, PARTS)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_the_filesystem_refuses_is_the_callers_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        write_state(tmp_path / ("x" * 300), header(), 2, PARTS)
    assert "too long" in refused.value.message
    assert list(tmp_path.iterdir()) == []


def test_what_the_engine_raises_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    def parts() -> Iterator[tuple[int, State]]:
        yield PARTS[0]
        raise ModeldError("on the way")

    with pytest.raises(ModeldError, match="on the way"):
        write_state(tmp_path / "state", header(), 2, parts())
    assert list(tmp_path.iterdir()) == []


def test_a_chunk_beyond_free_memory_is_refused_with_the_numbers(path: Path) -> None:
    with (
        open_state(str(path)) as file,
        pytest.raises(InsufficientMemory) as refused,
    ):
        list(file.parts(lambda: 199))
    assert refused.value.metadata == {
        "needed_bytes": "200", "spare_bytes": "199", "cause": "state",
    }  # fmt: skip
