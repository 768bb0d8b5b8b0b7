"""Which GGUF files are converted for OpenVINO: what would come out as another model is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modeld.shared.errors import ModelLoadFailed, UnsupportedFeature
from modeld.shared.gguf_convertible import ARCHITECTURES, CAPABILITY, check_convertible
from modeld.shared.gguf_header import GgufHeader, read_header
from modeld.shared.gguf_parse import ArrayInfo, TensorInfo
from modeld.shared.gguf_types import TENSOR_TYPES
from modeld.shared.gguf_vocabulary import read_vocabulary
from modeld.supervisor.models.facts import inspect
from tests.support import tiny_models
from tests.support.openvino_models import tiny_gguf

KV_HEADS, TWO = "llama.attention.head_count_kv", ArrayInfo(2, 100, strings=False)
TYPES = {kind.name: number for number, kind in TENSOR_TYPES.items()}
Change = Callable[[GgufHeader], GgufHeader]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def header(path: Path) -> GgufHeader:
    return read_header(path)


def setting(key: str, value: Any) -> Change:
    """A setting changed; None: without it."""

    def change(header: GgufHeader) -> GgufHeader:
        metadata = {**header.metadata, key: value}
        if value is None:
            del metadata[key]
        return replace(header, metadata=metadata)

    return change


def tensors(change: Callable[[TensorInfo], TensorInfo | None], *more: TensorInfo) -> Change:
    def changed(header: GgufHeader) -> GgufHeader:
        kept = [new for tensor in header.tensors if (new := change(tensor)) is not None]
        return replace(header, tensors=(*kept, *more))

    return changed


def typed(part: str, kind: str) -> Change:
    """Every tensor whose name holds ``part`` is said to be of another type."""
    return tensors(lambda t: t._replace(type_number=TYPES[kind]) if part in t.name else t)


def added(name: str, *dimensions: int) -> Change:
    return tensors(lambda tensor: tensor, TensorInfo(name, dimensions, TYPES["F32"], 0))


def without(part: str) -> Change:
    return tensors(lambda tensor: None if part in tensor.name else tensor)


def array(key: str, **changes: Any) -> Change:
    def change(header: GgufHeader) -> GgufHeader:
        info: ArrayInfo = header.arrays[key]._replace(**changes)
        return replace(header, arrays={**header.arrays, key: info})

    return change


def both(*changes: Change) -> Change:
    def change(header: GgufHeader) -> GgufHeader:
        for one in changes:
            header = one(header)
        return header

    return change


QUANTIZED = setting("general.file_type", 15)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header,
        tensors(lambda t: None if t.name == "output.weight" else t),  # the embedding serves
        typed("token_embd", "BF16"),
        both(QUANTIZED, typed("attn_q.weight", "Q4_0"), typed("ffn_down", "Q8_0")),
        both(QUANTIZED, typed("attn_v.weight", "Q6_K"), typed("ffn_down", "Q4_K")),
        setting("llama.rope.scaling.type", "none"),
        setting("llama.expert_count", 0),
        setting("tokenizer.ggml.pre", "qwen2"),
        setting("tokenizer.ggml.pre", "default"),
        setting("llama.rope.freq_base", 500000.0),
    ],
)
def test_what_comes_out_as_the_same_model_passes(header: GgufHeader, change: Change) -> None:
    check_convertible(change(header))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (setting("general.architecture", "gemma3"), "architecture is 'gemma3'"),
        (setting("llama.rope.scaling.type", "linear"), "llama.rope.scaling.type"),
        (setting("llama.attention.sliding_window", 512), "sliding_window"),
        (setting("llama.expert_count", 8), "expert_count"),
        (setting("llama.rope.dimension_count", 32), "rotates 32 of 64"),
        (setting("llama.attention.value_length", 32), "its values 32"),
        (
            lambda header: replace(header, arrays={**header.arrays, KV_HEADS: TWO}),
            "differs by layer",
        ),
        (setting("tokenizer.ggml.model", "llama"), "kind 'llama'"),
        (setting("tokenizer.ggml.pre", "llama-bpe"), "the rule 'llama-bpe'"),
        (setting("tokenizer.ggml.pre", None), "the rule ''"),
        (setting("tokenizer.ggml.eos_token_id", None), "no eos token"),
        (setting("general.file_type", None), "general.file_type"),
        (added("rope_freqs.weight", 32), "rope_freqs.weight"),
        (added("blk.0.attn_q.bias", 256), "blk.0.attn_q.bias"),
        (typed("attn_q.weight", "F32"), "of type F32"),
        (typed("attn_q.weight", "BF16"), "of type BF16"),
        (both(QUANTIZED, typed("ffn_up", "Q5_K")), "of type Q5_K"),
        (typed("norm", "F16"), "of type F16"),
        (typed("ffn_up", "Q8_0"), "holds tensors of Q8_0"),
    ],
)
def test_what_would_come_out_otherwise_is_refused_with_what_to_use(
    header: GgufHeader, change: Change, words: str
) -> None:
    with pytest.raises(UnsupportedFeature) as refused:
        check_convertible(change(header))
    assert words in refused.value.message
    assert "Import it as type llama" in refused.value.message
    assert refused.value.metadata["capability"] == CAPABILITY


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (setting("llama.attention.head_count", 0), "0 heads"),
        (setting("llama.attention.head_count_kv", 3), "3 KV heads"),
        (setting("llama.attention.layer_norm_rms_epsilon", float("nan")), "epsilon"),
        (setting("llama.attention.layer_norm_rms_epsilon", None), "epsilon"),
        (setting("llama.rope.freq_base", 0.0), "freq_base"),
        (setting("llama.context_length", 0), "context length"),
        (setting("llama.feed_forward_length", 255), "not (256, 255)"),
        (setting("llama.block_count", 3), "no tensor 'blk.2"),
        (without("attn_k"), "no tensor 'blk.0.attn_k.weight'"),
        (array("tokenizer.ggml.token_type", length=3), "types of 3"),
        (array("tokenizer.ggml.merges", strings=False), "no merges"),
        (array("tokenizer.ggml.tokens", length=3), "types of"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_before_the_converter_sees_it(
    header: GgufHeader, change: Change, words: str
) -> None:
    with pytest.raises(ModelLoadFailed) as refused:
        check_convertible(change(header))
    assert words in refused.value.message


def test_a_split_set_is_refused(header: GgufHeader) -> None:
    with pytest.raises(UnsupportedFeature, match="split set"):
        check_convertible(header, parts=2)


def test_every_tried_architecture_has_its_own_tensors(header: GgufHeader) -> None:
    for name in ARCHITECTURES:
        renamed = replace(
            header,
            metadata={
                key.replace("llama.", f"{name}.") if key.startswith("llama.") else key: value
                for key, value in header.metadata.items()
            }
            | {"general.architecture": name},
        )
        norms = [
            TensorInfo(f"blk.{i}.attn_{x}_norm.weight", (64,), 0, 0) for i in (0, 1) for x in "qk"
        ]
        if name == "qwen3":
            with pytest.raises(ModelLoadFailed, match="attn_q_norm"):
                check_convertible(renamed)
            renamed = tensors(lambda tensor: tensor, *norms)(renamed)
        check_convertible(renamed)
        bias = added("blk.0.attn_q.bias", 256)(renamed)
        said = "attn_k.bias" if name == "qwen2" else "leave out its tensor"
        with pytest.raises((ModelLoadFailed, UnsupportedFeature), match=said):
            check_convertible(bias)


def test_facts_of_an_openvino_gguf_are_the_files_own_under_its_type(path: Path) -> None:
    assert inspect(path, "openvino") == replace(inspect(path), model_type="openvino")


def test_a_model_in_float32_is_refused_as_openvino(tmp_path: Path) -> None:
    gguf = tiny_models.llama(tmp_path / "f32.gguf")
    inspect(gguf, "llama")
    with pytest.raises(UnsupportedFeature, match="of type F32"):
        inspect(gguf, "openvino")


def test_the_vocabulary_is_read_with_its_types(path: Path, header: GgufHeader) -> None:
    tokens, types, _ = tiny_models.vocabulary()
    read = read_vocabulary(path, header)
    assert read.tokens == tuple(tokens)
    assert read.types == tuple(types)
    with pytest.raises(ModelLoadFailed, match="aren't integers"):
        read_vocabulary(path, array("tokenizer.ggml.token_type", offset=12)(header))
