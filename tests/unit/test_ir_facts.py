"""Facts of OpenVINO IR folders: from the configuration, or from the model file's own states."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from modeld.shared.capacity import LayerFacts, LayerKind
from modeld.shared.errors import ModelLoadFailed
from modeld.shared.ir_facts import ir_facts, is_ir
from modeld.shared.ir_files import MAX_JSON_BYTES, MAX_XML_BYTES
from modeld.shared.manifest import template_digest

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
    "rope_theta": 10000.0,
}
HEAD = '<?xml version="1.0"?>\n<net name="Model0" version="11">\n\t<layers>\n'


def state(layer: int, what: str, heads: int, length: int) -> str:
    """A stateful model's variable, as the runtime writes it."""
    return (
        f'\t\t<layer id="{layer}" name="ReadValue_{layer}" type="ReadValue" version="opset6">\n'
        f'\t\t\t<data variable_id="past_key_values.{layer}.{what}present.{layer}.{what}" '
        f'variable_type="f32" variable_shape="?,{heads},?,{length}" />\n\t\t</layer>\n'
    )


def past_input(layer: int, what: str, heads: int, length: int) -> str:
    """A stateless model's input."""
    return (
        f'\t\t<layer id="9" name="past_key_values.{layer}.{what}" type="Parameter" '
        f'version="opset1">\n\t\t\t<data shape="?,{heads},?,{length}" element_type="f32" />\n'
    )


def make(
    folder: Path, config: object | None = None, xml: str = HEAD, stem: str = "openvino_model"
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{stem}.xml").write_text(xml + "\t</layers>\n</net>\n")
    with (folder / f"{stem}.bin").open("wb") as file:
        file.truncate(123_456)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(folder: Path) -> ModelLoadFailed:
    with pytest.raises(ModelLoadFailed) as refused:
        ir_facts(folder)
    return refused.value


def test_facts_come_from_the_configuration(tmp_path: Path) -> None:
    folder = make(tmp_path / "ir", CONFIG)
    assert is_ir(folder)
    facts = ir_facts(folder)
    assert facts.layers == (LayerFacts(4, 2, 16, 16),)
    assert (facts.model_type, facts.architecture, facts.name) == ("openvino", "qwen2", "ir")
    assert (facts.heads, facts.embedding_length, facts.feed_forward_length) == (8, 128, 256)
    assert (facts.model_max, facts.vocabulary, facts.weights_bytes) == (4096, 1000, 123_456)
    assert facts.file_bytes == 123_456 + (folder / "openvino_model.xml").stat().st_size
    assert facts.rope == (("rope_theta", "10000.0"),)
    assert not facts.unknown_pattern
    assert not facts.has_template


def test_a_vision_models_language_part_is_taken_with_its_nested_settings(tmp_path: Path) -> None:
    nested = {"model_type": "llava", "text_config": {**CONFIG, "head_dim": 32}}
    folder = make(tmp_path / "ir", nested, stem="openvino_language_model")
    (folder / "openvino_model.xml").write_text("not this one")
    assert ir_facts(folder).layers == (LayerFacts(4, 2, 32, 32),)


@pytest.mark.parametrize(
    ("settings", "runs", "unknown"),
    [
        ({"sliding_window": 64}, [(4, 0)], True),
        ({"sliding_window": 64, "use_sliding_window": False}, [(4, 0)], False),
        ({"sliding_window": 64, "sliding_window_pattern": 2}, [(1, 64), (1, 0)] * 2, False),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            [(3, 64), (1, 0)],
            False,
        ),
        ({"layer_types": ["sliding_attention"] * 4}, [(4, 0)], True),
        ({"layer_types": ["novel_attention"] * 4}, [(4, 0)], True),
    ],
)
def test_windows_follow_what_is_declared(
    tmp_path: Path, settings: dict[str, Any], runs: list[tuple[int, int]], unknown: bool
) -> None:
    facts = ir_facts(make(tmp_path / "ir", {**CONFIG, **settings}))
    assert [(layer.count, layer.window_cells) for layer in facts.layers] == runs
    assert facts.unknown_pattern == unknown
    assert facts.sliding_window in (0, 64)


def test_layers_with_linear_attention_are_recurrent(tmp_path: Path) -> None:
    kinds = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    facts = ir_facts(make(tmp_path / "ir", {**CONFIG, **kinds}))
    assert [layer.kind for layer in facts.layers] == [LayerKind.RECURRENT, LayerKind.FULL]
    assert facts.recurrent


@pytest.mark.parametrize("line", [state, past_input])
def test_without_a_configuration_the_model_files_states_tell(tmp_path: Path, line) -> None:
    lines = "".join(
        line(layer, what, 3 if layer else 2, 64) for layer in (2, 1, 0) for what in ("value", "key")
    )
    facts = ir_facts(make(tmp_path / "ir", None, HEAD + lines))
    assert facts.layers == (LayerFacts(1, 2, 64, 64), LayerFacts(2, 3, 64, 64))
    assert (facts.model_max, facts.vocabulary) == (0, 0)


def test_states_are_found_across_the_edges_of_what_is_read_at_once(tmp_path: Path) -> None:
    edge = 1024 * 1024 - len(HEAD) - 150
    lines = "".join(" " * edge + state(layer, "key", 2, 8) for layer in range(6))
    assert ir_facts(make(tmp_path / "ir", None, HEAD + lines)).layers == (LayerFacts(6, 2, 8, 8),)


@pytest.mark.parametrize(
    "lines", ["", state(1, "key", 2, 8), past_input(0, "value", 2, 8), "past_key_values.0.key"]
)
def test_layers_that_nothing_tells_are_refused_and_not_taken_as_free(
    tmp_path: Path, lines: str
) -> None:
    assert "openvino_model.xml" in refusal(make(tmp_path / "ir", None, HEAD + lines)).message


def test_templates_are_found_where_tokenizers_keep_them(tmp_path: Path) -> None:
    folder = make(tmp_path / "ir", CONFIG)
    listed = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = folder / "tokenizer_config.json"
    texts = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True}
    tokenizer.write_text(json.dumps({**texts, "chat_template": listed}))
    from_list = ir_facts(folder)
    assert (from_list.has_template, from_list.add_bos) == (True, True)
    assert from_list.template_digest == template_digest("yes", "<s>", "</s>")
    tokenizer.write_text(json.dumps({**texts, "chat_template": "yes"}))
    assert ir_facts(folder).template_digest == from_list.template_digest
    (folder / "chat_template.jinja").write_text("another")
    assert ir_facts(folder).template_digest != from_list.template_digest


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"{", "not JSON"),
        ("config.json", b"\xff\xfe", "not JSON"),
        ("config.json", b"[]", "JSON object"),
        ("config.json", b"[" * 100_000, "not JSON"),
        ("config.json", b" " * (MAX_JSON_BYTES + 1), "at most"),
        ("openvino_model.xml", b"<html version='11'>", "IR of version"),
        ("openvino_model.xml", b'<net name="x" version="9">', "IR of version"),
        ("openvino_model.xml", b"", "IR of version"),
        ("chat_template.jinja", b"\xff", "UTF-8"),
    ],
)
def test_files_that_are_not_what_they_seem_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    folder = make(tmp_path / "ir", CONFIG)
    (folder / name).write_bytes(content)
    message = refusal(folder).message
    assert message.startswith(name)
    assert said in message


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": "4"},
        {"num_hidden_layers": 4.5},
        {"num_key_value_heads": 2**31},
        {"head_dim": True},
        {"head_dim": 2**31 - 1, "num_key_value_heads": 2**31 - 1},
        {"layer_types": ["full_attention"]},
        {"vocab_size": 10**30},
    ],
)
def test_settings_that_can_not_be_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    assert "config.json" in refusal(make(tmp_path / "ir", {**CONFIG, **settings})).message


@pytest.mark.parametrize("what", ["missing", "pipe", "folder"])
def test_weights_that_are_no_file_are_refused(tmp_path: Path, what: str) -> None:
    folder = make(tmp_path / "ir", CONFIG)
    weights = folder / "openvino_model.bin"
    weights.unlink()
    if what == "pipe":
        os.mkfifo(weights)
    elif what == "folder":
        weights.mkdir()
    assert "openvino_model.bin" in refusal(folder).message


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert not is_ir(tmp_path)
    assert "openvino_model.xml" in refusal(tmp_path).message


def test_a_huge_model_file_is_searched_in_little_memory_or_refused(tmp_path: Path) -> None:
    folder = make(tmp_path / "ir", None)
    xml = folder / "openvino_model.xml"
    for hostile, said in (
        (" name=", "doesn't tell"),
        (' name="past_key_values.1.key', "names more"),
    ):
        xml.write_text(HEAD + hostile * 400_000)
        tracemalloc.start()
        try:
            assert said in refusal(folder).message
            assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
        finally:
            tracemalloc.stop()
    with xml.open("r+b") as file:
        file.truncate(MAX_XML_BYTES + 1)
    assert "at most" in refusal(folder).message
