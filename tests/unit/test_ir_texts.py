"""Templates and special texts of OpenVINO folders, wherever a tokenizer keeps them."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from modeld.shared.errors import ModelLoadFailed
from modeld.shared.ir_texts import MAX_TEMPLATE_BYTES, IrTexts, ir_texts
from modeld.shared.manifest import template_digest

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|a|>\n{{ m['content'] }}{% endfor %}"


def config(folder: Path, **content: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))


def notes(folder: Path, **values: str) -> None:
    """A tokenizer's model as the engine writes it, with only its notes."""
    lines = "".join(
        f'<{name} value="{value.replace("<", "&lt;").replace(chr(10), "&#10;")}" />'
        for name, value in values.items()
    )
    (folder / "openvino_tokenizer.xml").write_text(
        f'<?xml version="1.0"?><net name="t" version="11"><layers></layers>'
        f"<rt_info>{lines}</rt_info></net>"
    )


def detokenizer(folder: Path, texts: list[str]) -> None:
    """A detokenizer with the vocabulary ``texts``."""
    raw = [text.encode() for text in texts]
    ends = [sum(len(one) for one in raw[: i + 1]) for i in range(len(raw))]
    begins = [0, *ends[:-1]]
    size, total = 4 * len(raw), sum(map(len, raw))
    data = struct.pack(f"<{len(raw)}i", *begins) + struct.pack(f"<{len(raw)}i", *ends)
    (folder / "openvino_detokenizer.bin").write_bytes(data + b"".join(raw))
    layers = "".join(
        f'<layer id="{number}" type="Const"><data element_type="{kind}" offset="{offset}" '
        f'size="{length}" /></layer>'
        for number, kind, offset, length in (
            (1, "i32", 0, size),
            (2, "i32", size, size),
            (3, "u8", 2 * size, total),
        )
    )
    edges = "".join(
        f'<edge from-layer="{n}" from-port="0" to-layer="9" to-port="{n}" />' for n in (1, 2, 3)
    )
    (folder / "openvino_detokenizer.xml").write_text(
        f'<net version="11"><layers>{layers}<layer id="9" type="VocabDecoder" /></layers>'
        f"<edges>{edges}</edges></net>"
    )


def test_a_configuration_tells_all(tmp_path: Path) -> None:
    eos = {"content": "</s>", "lstrip": False}
    config(tmp_path, chat_template=TEMPLATE, bos_token="<s>", eos_token=eos, add_bos_token=True)
    notes(tmp_path, chat_template="another", bos_token_id="0")
    texts = ir_texts(tmp_path)
    assert texts == IrTexts(TEMPLATE, "<s>", "</s>", True)
    assert texts.digest == template_digest(TEMPLATE, "<s>", "</s>")


def test_a_template_of_its_own_file_comes_first(tmp_path: Path) -> None:
    config(tmp_path, chat_template=TEMPLATE, bos_token=None, eos_token="</s>")
    (tmp_path / "chat_template.jinja").write_text("x")
    assert ir_texts(tmp_path) == IrTexts("x", "", "</s>", False)


def test_a_converted_tokenizers_notes_tell_what_no_file_does(tmp_path: Path) -> None:
    detokenizer(tmp_path, ["<|end|>", "<s>", "né"])
    notes(tmp_path, chat_template=TEMPLATE, bos_token_id="1", eos_token_id="0")
    assert ir_texts(tmp_path) == IrTexts(TEMPLATE, "<s>", "<|end|>", False)
    notes(tmp_path, bos_token_id="2", eos_token_id="3")
    assert ir_texts(tmp_path) == IrTexts("", "né", "", False)


def test_an_empty_template_is_no_reason_to_look_further(tmp_path: Path) -> None:
    config(tmp_path, chat_template="", bos_token="<s>", eos_token="</s>")
    notes(tmp_path, chat_template=TEMPLATE)
    assert ir_texts(tmp_path).template == ""
    assert ir_texts(tmp_path).digest == ""


@pytest.mark.parametrize(
    ("content", "tokenizer", "expected"),
    [
        ({"add_bos_token": True}, None, True),
        ({"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}, None, False),
        ({"tokenizer_class": "LlamaTokenizer"}, None, True),
        ({"tokenizer_class": "Qwen2Tokenizer"}, None, False),
        ({}, {"post_processor": None}, False),
        ({}, {"single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}, True),
        ({}, {"single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "<s>"}}]}, False),
        ({"bos_token": None, "add_bos_token": True}, None, False),
    ],
)
def test_whether_a_prompt_begins_with_a_special_token(
    tmp_path: Path, content: dict[str, Any], tokenizer: dict[str, Any] | None, expected: bool
) -> None:
    config(tmp_path, **{"bos_token": "<s>", "eos_token": "</s>", **content})
    if tokenizer is not None:
        inner = {"type": "TemplateProcessing", **tokenizer}
        processor = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, inner]}
        (tmp_path / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {"a": 1}}, "post_processor": processor})
        )
    assert ir_texts(tmp_path).add_bos is expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config.json", b'{"bos_token": 3}', "not a token's text"),
        ("tokenizer_config.json", b"[1]", "JSON object"),
        ("tokenizer.json", b"{", "not a tokenizer"),
        ("openvino_tokenizer.xml", b"<net><rt_info>", "not well-formed"),
        ("openvino_tokenizer.xml", b"<!DOCTYPE a [<!ENTITY b 'c'>]><net/>", "document type"),
        ("openvino_tokenizer.xml", b"<a>" * 100, "nest deeper"),
        ("openvino_tokenizer.xml", b" " * (8 * 1024 * 1024 + 1), "at most"),
        ("openvino_detokenizer.xml", b"<net", "not well-formed"),
        ("chat_template.jinja", b"x" * (MAX_TEMPLATE_BYTES + 1), "at most"),
    ],
)
def test_files_that_are_not_what_they_seem_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    if name == "tokenizer.json":
        config(tmp_path, bos_token="<s>")
    elif name.startswith("openvino_detokenizer"):
        notes(tmp_path, bos_token_id="0")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadFailed) as refused:
        ir_texts(tmp_path)
    assert refused.value.message.startswith(name)
    assert said in refused.value.message


@pytest.mark.parametrize("number", ["-1", "99", "999999999999", "x", ""])
def test_ids_that_are_none_have_no_text(tmp_path: Path, number: str) -> None:
    detokenizer(tmp_path, ["a", "b"])
    notes(tmp_path, bos_token_id=number)
    assert ir_texts(tmp_path).bos_text == ""


def test_a_damaged_detokenizer_gives_no_text_and_no_error(tmp_path: Path) -> None:
    detokenizer(tmp_path, ["<s>", "b"])
    notes(tmp_path, bos_token_id="0")
    weights = tmp_path / "openvino_detokenizer.bin"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:9], struct.pack("<4i", -5, 0, 2**31 - 1, 3)):
        weights.write_bytes(damaged)
        assert ir_texts(tmp_path).bos_text == ""
