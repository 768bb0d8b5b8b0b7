"""Adapter files: what is read of them, what is refused, and how the store keeps them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modeld.shared.errors import DigestMismatch, InvalidRequest, ModelLoadFailed, ModelNotFound
from modeld.shared.lora import BadLora, config_alpha, read_lora
from modeld.shared.manifest import sha256_hex
from modeld.shared.safetensors import BadSafetensors, read_header
from modeld.supervisor.models.adapters import AdapterStore, is_adapter
from tests.support.lora_files import peft, safetensors

TARGET = "model.layers.0.self_attn.q_proj"
A, B = np.ones((4, 16), np.float32), np.ones((8, 4), np.float32)
GOOD = peft({TARGET: (A, B)}, alpha=8)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def raw(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


# --- the file


def test_a_pair_is_read_with_its_rank_sizes_and_scaling(tmp_path: Path) -> None:
    lora = read_lora(written(tmp_path / "a", GOOD))
    (pair,) = lora.pairs
    assert (pair.target, pair.rank, pair.inputs, pair.outputs) == (TARGET, 4, 16, 8)
    assert pair.scaling == 2.0
    assert lora.memory_bytes == 4 * (A.size + B.size)
    assert lora.alpha_known


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "header"),
        (GOOD[:-1], "cut off"),
        (GOOD + b"\0", "cut off or more"),
        (struct.pack("<Q", 1 << 62) + GOOD[8:], "header would be of"),
        (raw(b"[1]"), "isn't a map"),
        (raw(b"{" * 5000), "isn't JSON"),
        (raw(b'{"a": 1, "a": 2}'), "isn't JSON"),
        (raw({"a": entry([2], 0, 4)}, b"\0" * 4), "takes 8 bytes"),
        (raw({"a": entry([-1], 0, 4)}, b"\0" * 4), "bad shape"),
        (raw({"a": entry([1], 0, 4, "F9")}, b"\0" * 4), "unknown type"),
        (raw({"a": entry([1], 4, 8)}, b"\0" * 8), "begins at"),
        (raw({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"\0" * 4), "begins at"),
        (raw({"a": {"dtype": "F32", "shape": [1]}}), "lacks"),
        (raw({"__metadata__": {"a": 1}}), "metadata"),
    ],
)
def test_a_file_that_does_not_add_up_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(BadSafetensors, match=said):
        read_header(written(tmp_path / "a", data))


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reader_fail_otherwise(tmp_path_factory: Any, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "a"
    for content in (data, struct.pack("<Q", len(data)) + data, GOOD[:60] + data):
        with pytest.raises((BadSafetensors, BadLora)):
            read_lora(written(path, content))


def changed(**tensors: Any) -> bytes:
    names = {"A": f"{TARGET}.lora_A.weight", "B": f"{TARGET}.lora_B.weight"}
    named = {names.get(name, name): value for name, value in tensors.items() if value is not None}
    return safetensors(named, {"lora_alpha": "8"})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(A=A, B=None), "a lora_A and not the other"),
        (changed(A=A, B=B.T.copy()), "are one rank"),
        (changed(A=A.reshape(-1), B=B), "shape"),
        (changed(A=A, B=B, **{"model.embed_tokens.weight": A}), "no lora_A, lora_B or alpha"),
        (changed(A=A, B=B, **{"other.alpha": np.float32(1)}), "no pair"),
        (changed(A=A, B=B, **{f"{TARGET}.alpha": A}), "isn't one number"),
        (changed(A=A, B=B, **{f"{TARGET}.lora_A.default.weight": A}), "two lora_A"),
        (changed(**{"x.lora_magnitude_vector": A}), "only plain LoRA"),
        (safetensors({}), "no lora_A and lora_B at all"),
        (safetensors({f"{TARGET}.lora_A.weight": A}, {"lora_alpha": "much"}), "not a number"),
    ],
)
def test_what_is_not_plain_lora_is_refused(tmp_path: Path, data: bytes, said: str) -> None:
    with pytest.raises(BadLora, match=said):
        read_lora(written(tmp_path / "a", data))


def test_matrices_of_whole_numbers_are_refused(tmp_path: Path) -> None:
    data = changed(A=A, B=B).replace(b'"F32"', b'"I32"')
    with pytest.raises(BadLora, match="I32; allowed are F32, F16, BF16"):
        read_lora(written(tmp_path / "a", data))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"lora_alpha": 8, "use_dora": True}, "use_dora"),
        ({"lora_alpha": 8, "use_rslora": True}, "use_rslora"),
        ({"lora_alpha": 8, "bias": "all"}, "biases"),
        ({"lora_alpha": 8, "peft_type": "IA3"}, "IA3"),
        ({"r": 4}, "lora_alpha"),
        ([], "isn't a map"),
    ],
)
def test_a_config_of_another_method_is_refused(config: Any, said: str) -> None:
    assert config_alpha(b'{"lora_alpha": 8, "peft_type": "LORA", "bias": "none"}') == 8.0
    with pytest.raises(BadLora, match=said):
        config_alpha(json.dumps(config).encode())


# --- the store


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "root")


def test_an_adapter_is_found_by_its_digest(store: AdapterStore, tmp_path: Path) -> None:
    source = written(tmp_path / "french.safetensors", GOOD)
    stored = store.import_file(source)
    assert (stored.name, stored.digest) == ("french", sha256_hex(GOOD))
    assert store.by_digest(stored.digest) == stored
    assert stored.path.read_bytes() == GOOD
    assert [one.name for one in store.list()] == ["french"]
    assert store.import_file(source).digest == stored.digest  # the same again is no conflict
    with pytest.raises(ModelNotFound, match="french"):
        store.by_digest("0" * 64)


def test_alpha_from_the_file_beside_becomes_part_of_what_is_digested(
    store: AdapterStore, tmp_path: Path
) -> None:
    source = written(tmp_path / "a.safetensors", peft({TARGET: (A, B)}, alpha=None))
    with pytest.raises(InvalidRequest, match=r"adapter_config\.json beside"):
        store.import_file(source)
    digests = set()
    for alpha in (8, 16):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
        stored = store.import_file(
            source, f"a{alpha}", expected_digest=sha256_hex(source.read_bytes())
        )
        assert read_lora(stored.path).pairs[0].scaling == alpha / 4
        assert stored.digest == sha256_hex(stored.path.read_bytes())
        digests.add(stored.digest)
    assert len(digests) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder / "none.safetensors",
        lambda folder: folder,
        lambda folder: written(folder / "cut.safetensors", GOOD[:-3]),
        lambda folder: written(folder / "pickle.safetensors", b"\x80\x04\x95" + bytes(40)),
        lambda folder: Path("relative.safetensors"),
    ],
)
def test_a_bad_file_is_refused_and_leaves_nothing(
    store: AdapterStore, tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    with pytest.raises(InvalidRequest) as error:
        store.import_file(make(tmp_path))
    assert error.value.metadata["field"] == "path"
    assert store.list() == ()
    assert list((tmp_path / "root").rglob("*.safetensors")) == []


def test_another_file_needs_replace_or_another_name(store: AdapterStore, tmp_path: Path) -> None:
    source = written(tmp_path / "a.safetensors", GOOD)
    other = written(tmp_path / "b.safetensors", peft({TARGET: (A, B * 2)}, alpha=8))
    store.import_file(source, "a")
    with pytest.raises(InvalidRequest, match="taken"):
        store.import_file(other, "a")
    assert store.list()[0].digest == sha256_hex(GOOD)
    assert store.import_file(other, "a", replace=True).digest == store.list()[0].digest
    with pytest.raises(DigestMismatch):
        store.import_file(source, "c", expected_digest="0" * 64)
    assert store.remove("a") > 0
    assert not store.has("a")
    with pytest.raises(ModelNotFound):
        store.remove("a")


def test_a_file_changed_since_its_import_is_not_used(store: AdapterStore, tmp_path: Path) -> None:
    stored = store.import_file(written(tmp_path / "a.safetensors", GOOD))
    stored.path.write_bytes(GOOD + b"\0")
    with pytest.raises(ModelLoadFailed, match="changed or removed"):
        store.by_digest(stored.digest)


def test_adapters_are_known_by_type_or_by_the_files_name() -> None:
    assert is_adapter(Path("/a/x.safetensors"), "")
    assert is_adapter(Path("/a/x.bin"), "adapter")
    assert not is_adapter(Path("/a/x.safetensors"), "openvino")
    assert not is_adapter(Path("/a/x.gguf"), "")
