"""The GGUF header reader: facts from the header alone, and refusals in bounded time and memory."""

from __future__ import annotations

import contextlib
import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modeld.shared.capacity import LayerFacts, LayerKind
from modeld.shared.errors import ModelLoadFailed
from modeld.shared.gguf_header import (
    check_extents,
    model_facts,
    read_header,
    repeated_token,
    tensor_size,
)
from modeld.shared.gguf_types import FILE_TYPES, TENSOR_TYPES
from tests.support import tiny_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def dense(folder: Path) -> Path:
    return tiny_models.llama(folder / "dense.gguf")


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _file(path: Path, *pairs: bytes, tensors: bytes = b"", tensor_count: int = 0) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, tensor_count, len(pairs))
    path.write_bytes(head + b"".join(pairs) + tensors)
    return path


def _refusal(path: Path) -> str:
    with pytest.raises(ModelLoadFailed) as refused:
        _read_all(path)
    return refused.value.message


def _read_all(path: Path) -> None:
    header = read_header(path)
    check_extents(header, header.file_bytes)
    model_facts(header, header.file_bytes)
    repeated_token(path, header)


def test_tensor_types_are_those_of_the_gguf_package() -> None:
    theirs = {
        int(kind): (kind.name, block, size) for kind, (block, size) in gguf.GGML_QUANT_SIZES.items()
    }
    assert {number: tuple(kind) for number, kind in TENSOR_TYPES.items()} == theirs


def test_file_types_are_those_of_the_gguf_package() -> None:
    theirs = {
        int(kind): kind.name.removeprefix("MOSTLY_").removeprefix("ALL_")
        for kind in gguf.LlamaFileType
        if kind is not gguf.LlamaFileType.GUESSED
    }
    assert theirs == FILE_TYPES


def test_facts_of_a_dense_model(dense: Path) -> None:
    header = read_header(dense)
    check_extents(header, header.file_bytes)
    facts = model_facts(header, header.file_bytes, template_digest="abc")
    assert facts.architecture == "llama"
    assert facts.layers == (LayerFacts(2, kv_heads=2, key_length=16, value_length=16),)
    assert (facts.model_max, facts.embedding_length, facts.heads) == (2048, 64, 4)
    assert facts.vocabulary == header.arrays["tokenizer.ggml.tokens"].length
    assert facts.quantization == "F32"
    assert facts.has_template
    assert facts.template_digest == "abc"
    assert facts.rope == (("llama.rope.dimension_count", "16"), ("llama.rope.freq_base", "10000.0"))
    assert not facts.recurrent
    assert not facts.unknown_pattern
    assert (header.bos_text, header.eos_text) == ("<|im_start|>", "<|im_end|>")
    assert header.chat_template == tiny_models.TEMPLATE


def test_weights_are_summed_from_the_tensors_and_fill_the_file(dense: Path) -> None:
    header = read_header(dense)
    last = max(header.tensors, key=lambda tensor: tensor.offset)
    end = header.data_offset + last.offset + tensor_size(last)
    assert end <= header.file_bytes < end + header.alignment
    assert header.tensor_bytes == sum(tensor_size(tensor) for tensor in header.tensors)


def test_windowed_layers_follow_the_familys_period(folder: Path) -> None:
    header = read_header(tiny_models.gemma3(folder / "windowed.gguf"))
    facts = model_facts(header, header.file_bytes)
    assert facts.sliding_window == 128
    assert facts.layers == (
        LayerFacts(5, 1, 32, 32, window_cells=128, kind=LayerKind.WINDOW),
        LayerFacts(1, kv_heads=1, key_length=32, value_length=32),
    )


def test_a_declared_window_without_a_pattern_is_costed_in_full(folder: Path) -> None:
    path = _file(
        folder / "pattern.gguf",
        _text("general.architecture") + struct.pack("<I", 8) + _text("novel"),
        _text("novel.block_count") + struct.pack("<II", 4, 3),
        _text("novel.embedding_length") + struct.pack("<II", 4, 64),
        _text("novel.attention.head_count") + struct.pack("<II", 4, 4),
        _text("novel.attention.head_count_kv") + struct.pack("<IIQIII", 9, 4, 3, 1, 0, 1),
        _text("novel.attention.sliding_window") + struct.pack("<II", 4, 32),
    )
    facts = model_facts(read_header(path), path.stat().st_size)
    assert facts.unknown_pattern
    one, none = LayerFacts(1, 1, 16, 16), LayerFacts(1, 0, 16, 16)
    assert facts.layers == (one, none, one)


def test_a_recurrent_model_says_so_by_its_own_settings(folder: Path) -> None:
    header = read_header(tiny_models.mamba(folder / "recurrent.gguf"))
    assert model_facts(header, header.file_bytes).recurrent


def test_a_truncated_file_names_the_tensor_and_the_bytes(dense: Path, folder: Path) -> None:
    cut = folder / "cut.gguf"
    cut.write_bytes(dense.read_bytes()[:-1000])
    message = _refusal(cut)
    assert "truncated: tensor 'blk.1.ffn_down.weight'" in message
    assert f"the file has {cut.stat().st_size}" in message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated"),
        (b"PK\3\4" + b"x" * 100, "magic"),
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1), "number of tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 2**60), "number of metadata keys"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "the length of a metadata key"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 60_000) + b"k", "truncated"),
    ],
)
def test_what_is_not_a_header_is_refused_in_words(folder: Path, content: bytes, said: str) -> None:
    path = folder / "hostile.gguf"
    path.write_bytes(content)
    assert said in _refusal(path)


@pytest.mark.parametrize(
    ("kind", "payload", "said"),
    [
        (9, struct.pack("<IQ", 8, 2**62), "the length of 'k'"),
        (9, struct.pack("<IQ", 8, 900_000), "truncated"),
        (9, struct.pack("<IQ", 8, 4_000_000), "more than 1000000 texts"),
        (9, struct.pack("<IQ", 10, 4_000_000), "truncated"),
        (9, struct.pack("<IQ", 9, 1), "array of arrays"),
        (9, struct.pack("<IQ", 77, 1), "unknown type 77"),
        (8, struct.pack("<Q", 2**50), "the length of 'k'"),
        (8, struct.pack("<Q", 2) + b"\xff\xfe", "UTF-8"),
        (55, b"", "unknown type 55"),
    ],
)
def test_hostile_values_are_refused_before_anything_is_built(
    folder: Path, kind: int, payload: bytes, said: str
) -> None:
    path = _file(folder / "value.gguf", _text("k") + struct.pack("<I", kind) + payload)
    tracemalloc.start()
    try:
        assert said in _refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_a_huge_block_count_does_not_build_a_layer_list(folder: Path) -> None:
    path = _file(
        folder / "blocks.gguf",
        _text("general.architecture") + struct.pack("<I", 8) + _text("llama"),
        _text("llama.block_count") + struct.pack("<II", 4, 2**32 - 1),
    )
    assert "block_count" in _refusal(path)


def _tensor(name: str, dimension: int, kind: int, offset: int) -> bytes:
    return _text(name) + struct.pack("<IQIQ", 1, dimension, kind, offset)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (_tensor("a", 8, 0, 0) + _tensor("b", 8, 0, 0), "overlap"),
        (_tensor("a", 8, 0, 0) + _tensor("b", 8, 0, 33), "not a multiple of 32"),
        (_tensor("a", 8, 0, 0) + _tensor("b", 2**60, 0, 32), "truncated"),
        (_tensor("a", 8, 0, 0) + _tensor("b", 33, 2, 32), "blocks of 32"),
        (_tensor("a", 8, 0, 0) + _tensor("b", 8, 5, 32), "unknown type 5"),
        (_tensor("a", 8, 0, 0) + _tensor("a", 8, 0, 32), "there twice"),
    ],
)
def test_tensors_that_cannot_lie_in_the_file_are_refused(
    folder: Path, tensors: bytes, said: str
) -> None:
    path = _file(folder / "extents.gguf", tensors=tensors + b"\0" * 256, tensor_count=2)
    assert said in _refusal(path)


def test_a_repeated_token_is_found(dense: Path, folder: Path) -> None:
    assert repeated_token(dense, read_header(dense)) is None
    path = folder / "repeated.gguf"
    path.write_bytes(
        dense.read_bytes().replace(b"<unk>", b"<unl>").replace(_text("b"), _text("a"), 1)
    )
    found = repeated_token(path, read_header(path))
    assert found is not None
    assert found[1] == "a"


@pytest.mark.parametrize("what", ["missing", "folder", "pipe"])
def test_what_is_not_a_regular_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "model.gguf"
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    with pytest.raises(ModelLoadFailed):
        read_header(path)


# The folder is the test's: each example writes its file anew.
fuzzed = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_headers_are_read_or_refused_with_a_typed_error(
    dense: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(dense.read_bytes())
    header_end = read_header(dense).data_offset
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_end - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    with contextlib.suppress(ModelLoadFailed):
        _read_all(damaged)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_truncation_of_a_good_file_is_refused(
    dense: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = dense.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: data.draw(st.integers(0, len(content) - 64))])
    assert "truncated" in _refusal(cut)
