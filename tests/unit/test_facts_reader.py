"""The reader of untrusted model files: every kind of file, split sets, and hostile headers, each
within the limits of a small process.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from modeld.shared import gguf_parse
from modeld.shared.capacity import FileKind, ModelFacts
from modeld.shared.errors import BackendMismatch, ModelLoadFailed
from modeld.supervisor.models import facts as reader
from modeld.supervisor.models.facts import inspect, read_facts, refuse_unless_model
from tests.support import tiny_models
from tests.support.gguf_bytes import (
    ARRAY,
    Document,
    Setting,
    big_file,
    model,
    split,
    tensor,
    text,
)

MIB = 1024 * 1024
MUTATIONS = 280
SAMPLE = 14  # every so many mutations one goes through a process of its own


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadFailed) as refused:
        inspect(path)
    return refused.value.message


# --- kinds of files --------------------------------------------------------------------------


def companion(kind: str, architecture: str) -> Document:
    document = Document().set(general__architecture=architecture)
    if kind:
        document.set(general__type=kind)
    return document.add("v.blk.0.attn_q.weight", 64).add("mm.0.weight", 32)


@pytest.mark.parametrize(
    ("kind", "architecture", "expected"),
    [
        ("mmproj", "clip", FileKind.PROJECTOR),
        ("", "clip", FileKind.PROJECTOR),
        ("model", "clip", FileKind.PROJECTOR),
        ("adapter", "llama", FileKind.ADAPTER),
    ],
)
def test_what_goes_with_a_model_is_told_apart_and_weighed(
    tmp_path: Path, kind: str, architecture: str, expected: FileKind
) -> None:
    path = companion(kind, architecture).write(tmp_path / "companion.gguf")
    facts = inspect(path)
    assert (facts.file_kind, facts.weights_bytes, facts.layers) == (expected, 384, ())
    assert facts.tensor_types == (("F32", 384),)
    assert read_facts(path, any_kind=True) == facts
    with pytest.raises(ModelLoadFailed, match="not a whole model; import the model"):
        read_facts(path)


@pytest.mark.parametrize("kind", ["imatrix", "vocab", "x" * 1000])
def test_files_of_another_type_are_refused(tmp_path: Path, kind: str) -> None:
    path = model("llama").set(general__type=kind).write(tmp_path / "m.gguf")
    assert "not a model" in refusal(path)


def test_a_model_without_blocks_is_refused_and_not_taken_as_free(tmp_path: Path) -> None:
    path = model("llama").set(block_count=0).write(tmp_path / "m.gguf")
    assert "no block" in refusal(path)


def test_an_openvino_folder_is_read_and_refused_as_a_model_of_another_type(tmp_path: Path) -> None:
    folder = tmp_path / "ir"
    folder.mkdir()
    (folder / "openvino_model.xml").write_text('<net name="Model0" version="11">')
    (folder / "openvino_model.bin").write_bytes(b"x" * 100)
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    facts = read_facts(folder, any_kind=True)
    assert (facts.model_type, facts.weights_bytes) == ("openvino", 100)
    with pytest.raises(BackendMismatch, match="import the folder as type openvino"):
        read_facts(folder, "llama")
    with pytest.raises(ModelLoadFailed, match="openvino_model"):
        read_facts(folder, "openvino")  # its XML ends before its end


def test_a_model_passes(tmp_path: Path) -> None:
    path = tiny_models.llama(tmp_path / "tiny.gguf")
    facts = read_facts(path)
    assert facts == inspect(path)
    refuse_unless_model(facts, path)


# --- split sets ------------------------------------------------------------------------------


def whole() -> Document:
    return model("llama").set(tokenizer__ggml__tokens=["a", "b", "c"])


@pytest.mark.parametrize("given", [0, 1, 2])
def test_a_split_set_is_read_whole_from_any_of_its_parts(tmp_path: Path, given: int) -> None:
    parts = split(tmp_path, whole(), 3)
    one = inspect(whole().write(tmp_path / "one.gguf"))
    facts = inspect(parts[given])
    assert facts.parts == 3
    assert facts.file_bytes == sum(part.stat().st_size for part in parts)
    same = ("layers", "weights_bytes", "layer_weights", "input_bytes", "vocabulary", "model_max")
    assert [getattr(facts, name) for name in same] == [getattr(one, name) for name in same]
    assert read_facts(parts[given]) == facts


def rewritten(part: Path, change: Callable[[Document], object], first: bool = False) -> None:
    """Writes one part of ``whole`` split in three anew, changed."""
    number = int(part.name[6:11]) - 1
    document = Document(pairs=list(whole().pairs) if first else [])
    document.set(split__no=number, split__count=3, split__tensors__count=10)
    document.add(f"blk.{number}.new.weight", 64)
    change(document)
    document.write(part)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda document: document.set(split__no=0), "says it is part 1 of 3"),
        (lambda document: document.set(split__count=4), "says it is part 2 of 4"),
        (lambda document: document.set(split__count=0), "part 2 of 0"),
        (lambda document: document.add("token_embd.weight"), "'whole-00001-of-00003.gguf' too"),
        (lambda document: document.add("blk.0.more.weight"), "it says 10"),
        (lambda document: setattr(document, "data_bytes", 0), "broken"),
        (lambda document: document.tensors.append(b"\xff" * 40), "broken"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, change: Callable[[Document], object], said: str
) -> None:
    parts = split(tmp_path, whole(), 3)
    rewritten(parts[1], change)
    message = refusal(parts[0])
    assert said in message
    assert message.startswith("whole-0000")


def test_a_missing_part_is_named_with_what_to_do(tmp_path: Path) -> None:
    parts = split(tmp_path, whole(), 3)
    parts[2].unlink()
    message = refusal(parts[1])
    assert message.startswith(parts[2].name)
    assert "llama-gguf-split --merge" in message
    with pytest.raises(ModelLoadFailed, match="merge"):
        read_facts(parts[0])


@pytest.mark.parametrize("name", ["renamed.gguf", "whole-00001-of-00004.gguf", "-00001-of-00003"])
def test_a_part_that_is_not_named_like_one_is_refused(tmp_path: Path, name: str) -> None:
    parts = split(tmp_path, whole(), 3)
    renamed = parts[0].rename(tmp_path / name)
    assert "isn't named like one" in refusal(renamed)


@pytest.mark.parametrize("count", [65535, 2**31 - 1, -3])
def test_hostile_numbers_of_parts_open_no_files(tmp_path: Path, count: int) -> None:
    path = whole().set(split__count=count, split__no=0).write(tmp_path / "m-00001-of-65535.gguf")
    if count > 1:
        assert "at most" in refusal(path)
    else:
        assert inspect(path).parts == 1


def test_a_token_that_is_there_twice_in_a_set_is_refused(tmp_path: Path) -> None:
    document = whole().set(tokenizer__ggml__tokens=["a", "b", "a"])
    assert "token 2 ('a') twice" in refusal(split(tmp_path, document, 2)[1])


# --- bounds ----------------------------------------------------------------------------------


# A process begins with the most memory that the one which started it had: a small one measures.
MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(process.pid, 0)
spent = usage.ru_utime + usage.ru_stime
sys.stderr.write(f"{os.waitstatus_to_exitcode(status)} {usage.ru_maxrss * 1024} {spent}")
"""


class Run(NamedTuple):
    """What the reader's process answered and used: bytes, and seconds of CPU."""

    answer: bytes
    status: int
    memory_bytes: int
    cpu_s: float


def run_reader(path: Path) -> Run:
    command = [sys.executable, "-I", "-S", "-c", MEASURE, *reader._command(path)]
    done = subprocess.run(command, capture_output=True, check=True)
    status, memory, spent = done.stderr.split()
    return Run(done.stdout, int(status), int(memory), float(spent))


def test_a_big_vocabulary_is_read_in_little_memory(tmp_path: Path) -> None:
    path = big_file(tmp_path / "big.gguf", 150_000, 1000)
    run = run_reader(path)
    facts = reader._answered(path, run.status, run.answer, b"")
    assert (facts.vocabulary, len(facts.layer_weights)) == (150_000, 111)
    assert 5 * MIB < run.memory_bytes < 50 * MIB
    assert run.cpu_s < 1


def test_arrays_of_more_texts_than_any_vocabulary_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = model("llama").set(tokenizer__a=["x"] * 6, tokenizer__b=["y"] * 6)
    path = document.write(tmp_path / "m.gguf")
    assert inspect(path)
    monkeypatch.setattr(gguf_parse, "MAX_STRINGS", 11)
    assert "more than 11 texts" in refusal(path)


def test_a_vocabulary_that_fills_the_header_stays_within_the_limits(tmp_path: Path) -> None:
    document, words = model("llama"), 100_000
    document.tensors, document.counts = [], (1, len(document.pairs) + 1)
    document.pairs.append(("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", 8, words)))
    path = tmp_path / "m.gguf"
    with path.open("wb") as file:
        file.write(document.unpadded())
        for number in range(words):
            file.write(text(f"{number:01200d}"))
    run = run_reader(path)
    assert run.status == 0
    assert 100 * MIB < run.memory_bytes < 200 * MIB
    assert run.cpu_s < 1
    with pytest.raises(ModelLoadFailed):
        reader._answered(path, run.status, run.answer, b"")


# --- hostile headers -------------------------------------------------------------------------


def subjects() -> list[Document]:
    """Headers that between them reach every rule."""
    window: dict[str, Setting] = {
        "attention__sliding_window": 64,
        "attention__sliding_window_pattern": [1, 0, 1, 0],
    }
    ssm: dict[str, Setting] = {"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16}
    latent: dict[str, Setting] = {
        "attention__key_length_mla": 24,
        "attention__value_length_mla": 16,
    }
    return [
        whole().set(
            tokenizer__chat_template="{{ messages }}", rope__freq_base=1e4, general__type="model"
        ),
        model("gemma4", **window, attention__shared_kv_layers=2, attention__key_length_swa=8),
        model("gemma3", 6, attention__sliding_window=64, attention__sliding_window_pattern=3),
        model("jamba", **ssm, attention__head_count_kv=[0, 2, 0, 2]),
        model("qwen3next", **ssm, full_attention_interval=4, nextn_predict_layers=1),
        model(
            "nemotron_h", **ssm, feed_forward_length=[0, 9, 0, 9], attention__head_count_kv=[0] * 4
        ),
        model("glm-dsa", **latent, attention__indexer__types=[1, 0, 1, 1]),
        model("deepseek4", attention__compress_ratios=[0, 4, 128, 4], attention__sliding_window=64),
        model("nanbeige", num_loops=3),
        companion("adapter", "llama"),
        whole().set(split__count=3, split__no=0, split__tensors__count=10),
    ]


HOSTILE = [
    0,
    1,
    2,
    3,
    511,
    513,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63,
    2**64 - 1,
]


def number(random_: random.Random, document: Document) -> None:
    """A huge, zero or odd number, or a negative one, in a setting's place."""
    at = random_.randrange(len(document.pairs))
    kind = random_.choice((10, 10, 10, 11))
    value = random_.choice(HOSTILE)
    raw = struct.pack("<Q", value) if kind == 10 else struct.pack("<q", -(value % 2**63) - 1)
    document.pairs[at] = (document.pairs[at][0], kind, raw)


def array(random_: random.Random, document: Document) -> None:
    """An array of a wrong length, a wrong type, or of arrays, in a setting's place."""
    at = random_.randrange(len(document.pairs))
    length = random_.choice((0, 1, 3, 4, 5, 100, 5000, 2**22, 2**40, 2**63))
    kind = random_.choice((0, 4, 5, 6, 7, 8, 9, 10, 12, 13, 99))
    body = bytes(random_.randrange(3) for _ in range(min(length * 8, 40_000)))
    document.pairs[at] = (document.pairs[at][0], ARRAY, struct.pack("<IQ", kind, length) + body)


def swap(random_: random.Random, document: Document) -> None:
    """Another type's number before the same bytes."""
    at = random_.randrange(len(document.pairs))
    key, _, raw = document.pairs[at]
    document.pairs[at] = (key, random_.randrange(15), raw)


def words(random_: random.Random, document: Document) -> None:
    """Invalid UTF-8, or a text that is longer than the file."""
    at = random_.randrange(len(document.pairs))
    key, _, _ = document.pairs[at]
    raw = random_.choice(
        (text(b"\xff\xfe"), text(b"\xed\xa0\x80"), struct.pack("<Q", 2**60), text("\0" * 99))
    )
    document.pairs[at] = (key, 8, raw)


def twice(random_: random.Random, document: Document) -> None:
    document.pairs.append(random_.choice(document.pairs))


def missing(random_: random.Random, document: Document) -> None:
    document.pairs.pop(random_.randrange(len(document.pairs)))


def counts(random_: random.Random, document: Document) -> None:
    """Wrong counts of tensors and keys in the head."""
    truth = len(document.tensors), len(document.pairs)
    values = (*truth, 0, truth[0] + 1, 2**16, 2**31, 2**64 - 1)
    document.counts = random_.choice(values), random_.choice(values)


def extent(random_: random.Random, document: Document) -> None:
    """A tensor with absurd dimensions, type or offset."""
    rank = random_.randrange(6)
    shape = tuple(random_.choice(HOSTILE) for _ in range(rank))
    info = tensor(
        random_.choice(("x", "blk.0.attn_q.weight", "blk.9999.x")),
        shape,
        random_.randrange(45),
        random_.choice(HOSTILE),
    )
    document.tensors.insert(random_.randrange(len(document.tensors) + 1), info)


CHANGES = [number, number, array, array, swap, words, twice, missing, counts, extent]


def mutated(seed: int) -> bytes:
    random_ = random.Random(seed)
    document = random_.choice(subjects())
    for _ in range(random_.randrange(3)):
        random_.choice(CHANGES)(random_, document)
    content = bytearray(document.encode() + b"\0" * min(document.data_bytes, 65536))
    if seed % 3 == 0:
        for _ in range(random_.randrange(1, 6)):
            content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    if seed % 7 == 0:
        del content[random_.randrange(len(content)) :]
    return bytes(content)


def check_sound(facts: ModelFacts) -> None:
    """Facts that may be believed: sums agree, and every number fits where it is going."""
    assert msgspec.json.decode(msgspec.json.encode(facts), type=ModelFacts) == facts
    row = sum(
        layer.count * layer.kv_heads * (layer.key_length + layer.value_length)
        for layer in facts.layers
    )
    assert 4 * row * max(facts.model_max, 1) < 2**63
    assert facts.weights_bytes <= facts.file_bytes
    assert min((layer.state_bytes for layer in facts.layers), default=0) >= 0
    if facts.file_kind is FileKind.MODEL:
        weights = sum(facts.layer_weights) + facts.input_bytes + facts.output_bytes
        assert weights == facts.weights_bytes
        assert 0 < len(facts.layer_weights) == sum(layer.count for layer in facts.layers) <= 512


def test_the_subjects_are_good_before_they_are_damaged(tmp_path: Path) -> None:
    for position, document in enumerate(subjects()[:-1]):
        check_sound(inspect(document.write(tmp_path / f"{position}.gguf")))


def test_hostile_headers_end_in_a_typed_error_or_in_sound_facts(tmp_path: Path) -> None:
    path = tmp_path / "hostile-00001-of-00003.gguf"
    answered = refused = 0
    inspect(whole().write(path))  # what the interpreter itself keeps is there before the count
    for seed in range(MUTATIONS):
        path.write_bytes(mutated(seed))
        before = resource.getrusage(resource.RUSAGE_SELF)
        tracemalloc.start()
        message = ""
        try:
            check_sound(inspect(path))
        except ModelLoadFailed as error:
            message = error.message
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        after = resource.getrusage(resource.RUSAGE_SELF)
        answered, refused = answered + (not message), refused + bool(message)
        assert len(message) < 1000, seed
        assert peak < 32 * MIB, seed
        assert after.ru_utime - before.ru_utime < 1, seed
    # Damage that nothing notices, or that nothing survives, would prove little.
    assert answered > MUTATIONS // 10
    assert refused > MUTATIONS // 2


@pytest.mark.parametrize("seed", range(0, MUTATIONS, SAMPLE))
def test_a_hostile_header_costs_its_process_little(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "hostile-00001-of-00003.gguf"
    path.write_bytes(mutated(seed))
    run = run_reader(path)
    assert run.status == 0
    assert run.memory_bytes < 200 * MIB
    assert run.cpu_s < 1
    try:
        facts = reader._answered(path, run.status, run.answer, b"")
    except ModelLoadFailed:
        refusal(path)
    else:
        assert facts == inspect(path)
