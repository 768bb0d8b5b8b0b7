"""The cold store by itself: budgets, what goes for what, and that nothing damaged comes back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from modeld.workers.cold_disk import Maker
from modeld.workers.cold_store import BLOCK_TOKENS, HOLDS, ColdStore
from modeld.workers.state_file import token_chain, token_chains
from tests.support.cold import (
    IDS,
    MAKER,
    PLENTY,
    SIZE,
    file_of,
    header,
    put,
    state_of,
    store,
    tokens_of,
)


def test_a_chain_of_several_ends_is_that_of_each() -> None:
    tokens = tokens_of(1, 700)
    ends = (0, 1, 32, 33, 256, 256, 512, 699, 700)
    assert token_chains("kv", tokens, ends) == [token_chain("kv", tokens[:end]) for end in ends]
    assert len(set(token_chains("kv", tokens, ends))) == 8


def test_a_block_is_found_by_the_tokens_before_it_and_comes_back_as_it_was() -> None:
    kept, tokens = store(), tokens_of(1, 600)
    for begin, end in ((0, 256), (256, 512), (512, 600)):
        assert kept.put(header(tokens[:end], begin), state_of(begin), 0)
    before = token_chain("kv", tokens[:512])
    match = kept.longest(before, tokens[512:])
    assert match is not None
    assert (match.begin, match.end, match.common) == (512, 600, 88)
    found = kept.read(match.key)
    assert found is not None
    assert np.array_equal(found, state_of(512))
    assert kept.longest(before, tokens[:88]) is None  # other tokens
    assert kept.longest(token_chain("other", tokens[:512]), tokens[512:]) is None
    assert kept.longest(token_chain("kv", tokens[1:513]), tokens[512:]) is None


def test_a_part_of_a_block_is_found_and_told_as_such() -> None:
    kept, tokens = store(), tokens_of(1)
    kept.put(header(tokens), state_of(1), 0)
    other = tokens.copy()
    other[200:] += 1
    start = token_chain("kv", tokens[:0])
    match = kept.longest(start, other)
    assert match is not None
    assert match.common == 200
    assert kept.wholly(start, other) is None
    whole = kept.wholly(start, np.concatenate([tokens, other]))
    assert whole is not None
    assert whole.end == BLOCK_TOKENS


def test_what_goes_first_is_volatile_then_repo_map_then_pinned_each_least_recent_first() -> None:
    kept = store(ram=4 * (SIZE + IDS))
    pinned, repo, old, new = put(kept, 1, 2), put(kept, 2, 1), put(kept, 3), put(kept, 4)
    kept.tick()
    kept.touch((old,))  # now the other is the one that wasn't used for longest
    gone = []
    for seed in range(5, 8):
        put(kept, seed, 2)
        gone.append([key for key in (pinned, repo, old, new) if not kept.has(key)])
    assert gone == [[new], [old, new], [repo, old, new]]
    assert kept.dropped == 3
    assert kept.ram_bytes == 4 * (SIZE + IDS)


def test_a_volatile_block_never_pushes_out_a_pinned_one() -> None:
    kept = store(ram=SIZE + IDS)
    pinned = put(kept, 1, 2)
    volatile = put(kept, 2)
    assert kept.has(pinned)
    assert not kept.has(volatile)
    assert kept.dropped == 1


def test_of_blocks_used_together_the_last_goes_first() -> None:
    tokens = tokens_of(1, 4 * BLOCK_TOKENS)
    kept = store(ram=4 * SIZE + (1 + 2 + 3 + 4) * IDS)
    keys = []
    kept.tick()
    for begin in range(0, len(tokens), BLOCK_TOKENS):
        made = header(tokens[: begin + BLOCK_TOKENS], begin)
        assert kept.put(made, state_of(begin), 0)
        keys.append(made.chain)
    put(kept, 2)
    assert [kept.has(key) for key in keys] == [True, True, True, False]


def test_nothing_grows_where_the_machine_has_nothing_to_spare() -> None:
    spare = [PLENTY]
    kept = ColdStore(MAKER, PLENTY, spare_bytes=lambda: spare[0])
    first = put(kept, 1)
    size, spare[0] = kept.ram_bytes, 0
    second = put(kept, 2)  # in the place of the first
    assert not kept.has(first)
    assert kept.has(second)
    assert kept.ram_bytes == size
    assert put(store(spare=SIZE), 3) == put(store(), 3)
    refused = store(spare=SIZE)
    assert not refused.put(header(tokens_of(3)), state_of(3), 0)
    assert refused.ram_bytes == 0
    assert refused.dropped == 1


def test_shrinking_frees_what_is_asked_the_least_worth_first() -> None:
    kept = store()
    keys = [put(kept, seed) for seed in range(1, 5)]
    size = SIZE + IDS
    assert kept.shrink(size + 1) == 2 * size
    assert [kept.has(key) for key in keys] == [False, False, True, True]
    assert kept.shrink(PLENTY) == 2 * size
    assert kept.ram_bytes == 0
    assert kept.shrink(1) == 0


def test_a_block_that_changed_in_ram_is_dropped_and_counted() -> None:
    kept, tokens = store(), tokens_of(1)
    state, made = state_of(1), header(tokens)
    kept.put(made, state, 0)
    state[1234] ^= 1
    assert kept.read(made.chain) is None
    assert not kept.has(made.chain)
    assert kept.damaged == 1
    assert kept.ram_bytes == 0


def test_a_longer_block_has_the_class_of_what_it_absorbs() -> None:
    kept, tokens = store(), tokens_of(1)
    for end, rank in ((100, 2), (256, 0)):
        made = header(tokens[:end])
        kept.tick()
        kept.put(made, state_of(end), rank)
        kept.absorb(made.chain)
    volatile = put(kept, 2)
    kept.shrink(1)
    assert not kept.has(volatile)
    assert kept.has(token_chain("kv", tokens))


# --- on disk


def test_a_class_that_lapsed_in_ram_has_lapsed_on_disk_too(tmp_path: Path) -> None:
    kept = store(ram=SIZE + IDS, disk=PLENTY, folder=tmp_path)
    used, unused = put(kept, 1, 2), put(kept, 2, 2)
    for _ in range(2 * HOLDS):  # so much comes in and goes again
        kept.tick()
        kept.put(header(tokens_of(3)), state_of(3), 0, in_ram=False)
        kept.remove(header(tokens_of(3)).chain)
    put(kept, 3)
    assert [file_of(tmp_path, key).name.split(".")[-2] for key in (used, unused)] == ["2", "0"]


def test_what_was_asked_for_on_disk_goes_later_after_the_next_load_too(tmp_path: Path) -> None:
    kept = store(ram=0, disk=PLENTY, folder=tmp_path)
    asked, other = put(kept, 1), put(kept, 2)
    os.utime(file_of(tmp_path, asked), (1000, 1000))
    os.utime(file_of(tmp_path, other), (2000, 2000))
    kept.touch((asked,))
    later = store(disk=SIZE + IDS + 1024, folder=tmp_path)
    assert (later.has(asked), later.has(other)) == (True, False)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_block_that_can_t_be_written_for_whatever_reason_frees_its_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    kept = store(disk=PLENTY, folder=tmp_path)
    put(kept, 1)

    def fails(*given: object) -> object:
        raise error

    monkeypatch.setattr("modeld.workers.cold_disk.write_state", fails)
    assert kept.flush() == 0
    assert kept.ram_bytes == SIZE + IDS
    assert kept.shrink(1) == SIZE + IDS
    assert (kept.ram_bytes, kept.dropped) == (0, 1)


def test_what_falls_out_of_ram_is_read_from_disk_by_a_later_process_too(tmp_path: Path) -> None:
    kept = store(ram=SIZE + IDS, disk=PLENTY, folder=tmp_path)
    first, second = put(kept, 1, 1), put(kept, 2, 1)
    assert kept.has(first)
    assert kept.has(second)
    assert kept.dropped == 0
    assert kept.disk_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    found = kept.read(first)
    assert found is not None
    assert np.array_equal(found, state_of(1))
    kept.close()
    later = store(disk=PLENTY, folder=tmp_path)
    assert later.has(first)
    assert not later.has(second)
    match = later.longest(token_chain("kv", tokens_of(0)[:0]), tokens_of(1))
    assert match is not None
    assert match.common == BLOCK_TOKENS
    found = later.read(first)
    assert found is not None
    assert np.array_equal(found, state_of(1))
    later.remove(first)
    assert list(tmp_path.iterdir()) == []
    assert later.disk_bytes == 0


def test_the_disk_budget_is_kept_now_and_at_the_next_load(tmp_path: Path) -> None:
    probe = store(ram=0, disk=PLENTY, folder=tmp_path)
    probe.remove(put(probe, 1))
    assert list(tmp_path.iterdir()) == []
    kept = store(ram=0, disk=3 * (SIZE + IDS + 1024), folder=tmp_path)
    keys = [put(kept, seed) for seed in range(1, 6)]
    assert [kept.has(key) for key in keys] == [False, False, True, True, True]
    assert kept.disk_bytes <= 3 * (SIZE + IDS + 1024)
    assert len(list(tmp_path.iterdir())) == 3
    for age, key in enumerate(reversed(keys[2:])):
        os.utime(file_of(tmp_path, key), (1000 - age, 1000 - age))
    later = store(disk=SIZE + IDS + 1024, folder=tmp_path)
    assert [later.has(key) for key in keys] == [False] * 4 + [True]
    assert list(tmp_path.iterdir()) == [file_of(tmp_path, keys[4])]


def test_every_flipped_byte_of_a_file_is_caught_and_the_file_is_deleted(tmp_path: Path) -> None:
    kept = store(ram=0, disk=PLENTY, folder=tmp_path)
    key = put(kept, 1)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    kept.close()
    places = [*range(0, 600, 7), *range(600, len(data), 97), len(data) - 1]
    for at in places:
        damaged = bytearray(data)
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        later = store(disk=PLENTY, folder=tmp_path)
        assert later.read(key) is None, f"byte {at} was flipped and trusted"
        assert later.damaged == 1, at
        assert not path.exists(), at
    for size in (0, 5, 100, len(data) - 1):
        path.write_bytes(data[:size])
        later = store(disk=PLENTY, folder=tmp_path)
        assert later.read(key) is None
        assert later.damaged == 1
        assert not path.exists()
    path.write_bytes(data)
    found = store(disk=PLENTY, folder=tmp_path).read(key)
    assert found is not None
    assert np.array_equal(found, state_of(1))


def test_a_file_damaged_while_it_is_listed_is_deleted_at_its_reading(tmp_path: Path) -> None:
    kept = store(ram=0, disk=PLENTY, folder=tmp_path)
    key, other = put(kept, 1), put(kept, 2)
    path = file_of(tmp_path, key)
    path.write_bytes(file_of(tmp_path, other).read_bytes())  # sound, but another block
    assert kept.read(key) is None
    assert kept.damaged == 1
    assert not path.exists()
    file_of(tmp_path, other).unlink()
    assert kept.read(other) is None
    assert kept.damaged == 2
    assert kept.disk_bytes == 0


def test_what_a_crash_cut_off_and_what_another_build_wrote_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".0123.partial").write_bytes(b"half")
    (tmp_path / "note.txt").write_text("not ours")
    foreign = ColdStore(
        Maker("fake", "c" * 64, "layout-1"), 0, PLENTY, tmp_path, spare_bytes=lambda: PLENTY
    )
    made = header(tokens_of(1), maker=Maker("fake", "c" * 64, "layout-1"))
    assert foreign.put(made, state_of(1), 0)
    kept = store(ram=0, disk=PLENTY, folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    assert len(kept) == 0
    assert kept.damaged == 0


def test_a_full_disk_drops_the_block_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store(ram=SIZE + IDS, disk=PLENTY, folder=tmp_path)
    first, second = put(kept, 1), put(kept, 2)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "write", full)
    third = put(kept, 3)  # the second can't go to disk for it
    assert kept.has(first)
    assert not kept.has(second)
    assert kept.has(third)
    assert kept.dropped == 1
    assert list(tmp_path.iterdir()) == [file_of(tmp_path, first)]
    monkeypatch.setattr(os, "write", write)
    for key, seed in ((first, 1), (third, 3)):
        found = kept.read(key)
        assert found is not None
        assert np.array_equal(found, state_of(seed))


def test_a_kill_at_any_moment_leaves_whole_blocks_and_nothing_else(tmp_path: Path) -> None:
    random, seeds, found = np.random.default_rng(3), range(1, 40), 0
    for _ in range(100):
        child = os.fork()
        if child == 0:  # writes until it is killed
            try:
                writer = store(ram=0, disk=12 * (SIZE + IDS + 1024), folder=tmp_path)
                while True:
                    for seed in random.permutation(seeds):
                        put(writer, int(seed))
            finally:
                os._exit(1)
        time.sleep(float(random.uniform(0.002, 0.03)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        kept = store(disk=PLENTY, folder=tmp_path)
        assert kept.damaged == 0
        assert len(kept) == len(list(tmp_path.iterdir()))
        for seed in seeds:
            key = token_chain("kv", tokens_of(seed))
            if kept.has(key):
                found += 1
                state = kept.read(key)
                assert state is not None
                assert np.array_equal(state, state_of(seed))
    assert found > 100
