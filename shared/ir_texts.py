"""What decides how an OpenVINO folder's chats render: its template and its special texts.

Supervisor and worker read them here, so that both know the same model. Loads no engine.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from modeld.shared.ir_files import (
    open_regular,
    read_bounded,
    read_elements,
    read_object,
    refused,
)
from modeld.shared.manifest import template_digest

TOKENIZER_XML = "openvino_tokenizer.xml"
DETOKENIZER = "openvino_detokenizer"
MAX_TOKENIZER_JSON_BYTES = 32 * 1024 * 1024  # some list every added token
MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_TOKENIZER_XML_BYTES = 8 * 1024 * 1024
MAX_TEXT_CHARS = 1000  # of a special token; many times what is known
# Whose own code puts a beginning-of-text token first where the configuration doesn't say.
_ADD_BOS_CLASSES = frozenset(
    {
        "CodeLlamaTokenizer",
        "CodeLlamaTokenizerFast",
        "GemmaTokenizer",
        "GemmaTokenizerFast",
        "LlamaTokenizer",
        "LlamaTokenizerFast",
    }
)


@dataclass(frozen=True)
class IrTexts:
    """``template`` "" where the folder has none; a text "" where it has no such token.

    ``add_bos``: whether a prompt begins with the beginning-of-text token.
    """

    template: str
    bos_text: str
    eos_text: str
    add_bos: bool

    @property
    def digest(self) -> str:
        """``shared.manifest.template_digest`` of the template; "" if there is none."""
        if not self.template:
            return ""
        return template_digest(self.template, self.bos_text, self.eos_text)


def ir_texts(folder: Path) -> IrTexts:
    """The texts of an OpenVINO folder. Raises ModelLoadFailed in words that say what to do.

    From ``chat_template.jinja`` and ``tokenizer_config.json``; what these don't say, from the
    notes (``rt_info``) at the end of ``openvino_tokenizer.xml``, which name tokens by their ids.
    """
    config = read_object(folder / "tokenizer_config.json", MAX_TOKENIZER_JSON_BYTES)
    template = _template(folder, config)
    known = {which: _token_text(folder, config, which) for which in ("bos_token", "eos_token")}
    if template is None or None in known.values():
        notes = _notes(folder)
        if template is None:
            template = notes.get("chat_template", "")
        for which, text in known.items():
            if text is None:
                known[which] = _text_of_id(folder, notes.get(f"{which}_id", ""))
    if len(template.encode()) > MAX_TEMPLATE_BYTES:
        raise refused(
            folder / "tokenizer_config.json",
            f"its chat template has more than {MAX_TEMPLATE_BYTES} bytes",
        )
    bos = known["bos_token"] or ""
    return IrTexts(template, bos, known["eos_token"] or "", bool(bos) and _adds_bos(folder, config))


# --- the template ------------------------------------------------------------------------------


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """None where neither file says anything of one."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        try:
            return read_bounded(path, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError:
            raise refused(path, "it is not valid UTF-8") from None
    value = config.get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


# --- special texts -----------------------------------------------------------------------------


def _token_text(folder: Path, config: Mapping[str, Any], which: str) -> str | None:
    """A text, or an object that holds one; None where the configuration doesn't say."""
    if which not in config:
        return None
    value = config[which]
    if isinstance(value, dict):
        value = value.get("content")
    if value is None:
        return ""  # it has no such token
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        raise refused(folder / "tokenizer_config.json", f"{which!r} is not a token's text")
    return value


class _TokenizerJson(msgspec.Struct):
    """The one part of ``tokenizer.json`` that is of use here."""

    post_processor: Any = None


def _adds_bos(folder: Path, config: Mapping[str, Any]) -> bool:
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    path = folder / "tokenizer.json"
    if os.path.lexists(path):
        try:
            raw = read_bounded(path, MAX_TOKENIZER_JSON_BYTES)
            processor = msgspec.json.decode(raw, type=_TokenizerJson).post_processor
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise refused(path, f"it is not a tokenizer ({str(error)[:100]})") from None
        bos = _token_text(folder, config, "bos_token")
        return bool(bos) and _first_special(processor) == bos
    return config.get("tokenizer_class") in _ADD_BOS_CLASSES


def _first_special(processor: Any) -> str:
    """The special token that a post-processor puts first; "" if none."""
    if not isinstance(processor, dict):
        return ""
    if processor.get("type") == "Sequence":
        inner = processor.get("processors")
        found = [_first_special(one) for one in inner[:16]] if isinstance(inner, list) else []
        return next(filter(None, found), "")
    single = processor.get("single")
    first = single[0] if isinstance(single, list) and single else None
    special = first.get("SpecialToken") if isinstance(first, dict) else None
    text = special.get("id") if isinstance(special, dict) else None
    return text if isinstance(text, str) else ""


# --- the notes of a converted tokenizer --------------------------------------------------------


def _notes(folder: Path) -> Mapping[str, str]:
    """What ``rt_info`` of the tokenizer's model says, by name; empty if there is no such file."""
    path = folder / TOKENIZER_XML
    if not os.path.lexists(path):
        return {}
    notes: dict[str, str] = {}

    def element(name: str, attributes: Mapping[str, str], around: list[str]) -> None:
        if around == ["net", "rt_info"] and "value" in attributes:
            notes[name] = attributes["value"]

    read_elements(path, element, MAX_TOKENIZER_XML_BYTES)
    return notes


@dataclass
class _Vocabulary:
    """Where the detokenizer's weights hold its vocabulary: begins, ends and bytes."""

    constants: dict[str, tuple[str, int, int]]  # layer id → element type, offset, size in bytes
    sources: dict[str, str]  # port of the decoder → layer id
    decoder: str = ""


def _text_of_id(folder: Path, number: str) -> str:
    """The text of a token, from the detokenizer's vocabulary; "" where it can't be told."""
    xml, weights = folder / f"{DETOKENIZER}.xml", folder / f"{DETOKENIZER}.bin"
    if not number.isdecimal() or len(number) > 9 or not os.path.lexists(xml):
        return ""
    where = _vocabulary(xml)
    try:
        parts = [where.constants[where.sources[port]] for port in ("1", "2", "3")]
    except KeyError:
        return ""
    if [kind for kind, _, _ in parts] != ["i32", "i32", "u8"]:
        return ""
    (_, begins, count), (_, ends, _), (_, texts, size) = parts
    token = int(number)
    if 4 * token + 4 > count:
        return ""
    descriptor, _ = open_regular(weights)
    with os.fdopen(descriptor, "rb") as file:
        begin, end = _int_at(file, begins + 4 * token), _int_at(file, ends + 4 * token)
        if begin is None or end is None or not 0 <= begin <= end <= size:
            return ""
        if end - begin > MAX_TEXT_CHARS:
            return ""
        file.seek(texts + begin)
        return file.read(end - begin).decode(errors="replace")


def _int_at(file: Any, offset: int) -> int | None:
    file.seek(offset)
    raw = file.read(4)
    return int(struct.unpack("<i", raw)[0]) if len(raw) == 4 else None


def _vocabulary(xml: Path) -> _Vocabulary:
    found = _Vocabulary({}, {})
    layer = {"id": "", "type": ""}

    def element(name: str, attributes: Mapping[str, str], around: list[str]) -> None:
        if name == "layer":
            layer["id"], layer["type"] = attributes.get("id", ""), attributes.get("type", "")
            if layer["type"] == "VocabDecoder":
                found.decoder = layer["id"]
        elif name == "data" and around[-1:] == ["layer"] and layer["type"] == "Const":
            offset, size = attributes.get("offset", ""), attributes.get("size", "")
            if offset.isdecimal() and size.isdecimal() and max(len(offset), len(size)) < 19:
                kind = attributes.get("element_type", "")
                found.constants[layer["id"]] = (kind, int(offset), int(size))
        elif name == "edge" and attributes.get("to-layer") == found.decoder:
            found.sources[attributes.get("to-port", "")] = attributes.get("from-layer", "")

    read_elements(xml, element, MAX_TOKENIZER_XML_BYTES)
    return found
