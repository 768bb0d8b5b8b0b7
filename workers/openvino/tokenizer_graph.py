"""A converted tokenizer's graphs: reading them, and the one form of them that encodes text here.

Owns what of the graphs is checked, cut away and replaced. Knows no session and no special
token's meaning.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modeld.shared.errors import ModelLoadFailed, UnsupportedFeature
from modeld.shared.ir_files import file_size
from modeld.workers.openvino.native import ops, ov, words

Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]

_PACKAGE = "openvino_tokenizers"
_TOKENIZERS = (
    "BPETokenizer",
    "SentencepieceTokenizer",
    "TrieTokenizer",
    "UnigramTokenizer",
    "VocabEncoder",
    "WordpieceTokenizer",
)
_SPLIT = "SpecialTokensSplit"
# Occurs in no UTF-8 text, so a token that is spelled so is never found in one.
_NOWHERE = b"\xff\xff\xff"
_COMPOSES = {
    "normalization_form": "nfc",
    "add_dummy_prefix": "False",
    "remove_extra_whitespaces": "False",
    "escape_whitespaces": "False",
    "case_fold": "False",
    "nmt": "False",
}
_OF_THIS_PROCESS = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1, "ENABLE_CPU_PINNING": False}


@functools.cache
def with_tokenizers(core: Any) -> Any:
    """``core``, able to read tokenizers. Idempotent. Raises ModelLoadFailed."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    suffix = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
    name = ("" if sys.platform == "win32" else "lib") + _PACKAGE + suffix
    path = next((p for folder in folders if (p := Path(folder) / "lib" / name).is_file()), None)
    if path is None:
        raise ModelLoadFailed(
            f"{_PACKAGE} is not installed. Install modeld[openvino], which brings it.",
            metadata={"cause": "engine"},
        )
    try:
        # Never unloaded: the core unloads it with itself, and a graph that is freed after the
        # core, as at the interpreter's end, would run code that is gone.
        ctypes.CDLL(str(path))
        core.add_extension(str(path))
    except (OSError, RuntimeError) as error:
        raise ModelLoadFailed(
            f"{name} doesn't fit this OpenVINO: {words(error)}. Install modeld[openvino] again.",
            metadata={"cause": "engine"},
        ) from None
    return core


def read_graph(core: Any, folder: Path, stem: str) -> Any:
    """The graph ``stem`` of ``folder``. Raises ModelLoadFailed naming the file."""
    path = folder / f"{stem}.xml"
    for file in (path, path.with_suffix(".bin")):
        if not file.exists():
            raise broken(file.name, "it is not there")
        file_size(file)  # a regular file
    try:
        return with_tokenizers(core).read_model(str(path))
    except RuntimeError as error:
        raise broken(path.name, words(error)) from None


def broken(name: str, why: str) -> ModelLoadFailed:
    """The error for a file of a tokenizer that can't be used."""
    return ModelLoadFailed(
        f"{name} can't be used as the model's tokenizer: {why}. Convert the model again with its "
        "tokenizer, or fetch it again.",
        metadata={"cause": "tokenizer", "file": name},
    )


def nodes(model: Any, kind: str) -> list[Any]:
    return [node for node in model.get_ordered_ops() if node.get_type_name() == kind]


def source(node: Any, place: int) -> Any:
    """The node that gives input ``place``."""
    return node.input_value(place).get_node()


def constant(node: Any, place: int) -> NDArray[Any] | None:
    """The values of an input that is a constant; None if it isn't one."""
    given = source(node, place)
    return np.array(given.data).reshape(-1) if given.get_type_name() == "Constant" else None


# The conversion of GGUF files quotes every byte of a character by itself.
_QUOTED_BYTE = re.compile(rb"(\\[\x00-\x7f])|\\([\x80-\xff])")


def constant_text(node: Any, place: int) -> str | None:
    values = constant(node, place)
    if values is None or values.dtype != np.uint8:
        return None
    try:
        return _QUOTED_BYTE.sub(rb"\1\2", values.tobytes()).decode()
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True)
class Strings:
    """Byte strings one after another, as the graphs hold them."""

    begins: Ints
    ends: Ints
    chars: Bytes

    @classmethod
    def of_input(cls, node: Any, place: int, name: str) -> Strings:
        """The three constants from input ``place`` on. Raises ModelLoadFailed.

        The library reads where they point without looking, so they are checked.
        """
        parts = [constant(node, place + index) for index in range(3)]
        begins, ends, chars = parts
        if begins is None or ends is None or chars is None:
            raise broken(name, f"its {node.get_type_name()} has no vocabulary of its own")
        if [part.dtype for part in (begins, ends, chars)] != [np.int32, np.int32, np.uint8]:
            raise broken(name, f"its {node.get_type_name()} has a vocabulary of other types")
        if begins.size != ends.size or not (
            (begins >= 0).all() and (begins <= ends).all() and (ends <= chars.size).all()
        ):
            raise broken(name, f"the vocabulary of its {node.get_type_name()} points outside")
        return cls(begins, ends, chars)

    def __len__(self) -> int:
        return int(self.begins.size)

    def as_list(self) -> list[bytes]:
        raw = self.chars.tobytes()
        return [
            raw[begin:end]
            for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True)
        ]

    def changed(self, respelled: Mapping[int, bytes]) -> Strings:
        """These with other texts for some; what is beyond the end must be without a gap."""
        size = max([len(self) - 1, *respelled]) + 1
        begins, ends = np.resize(self.begins, size), np.resize(self.ends, size)
        raw = bytearray(self.chars.tobytes())
        for place, text in respelled.items():
            begins[place] = len(raw)
            raw += text
            ends[place] = len(raw)
        return Strings(begins, ends, np.frombuffer(bytes(raw), dtype=np.uint8))

    def put(self, node: Any, place: int) -> None:
        """Replace the inputs from ``place`` on by constants of these."""
        for index, values in enumerate((self.begins, self.ends, self.chars)):
            node.input(place + index).replace_source_output(ops.constant(values).output(0))


@dataclass(frozen=True)
class SpecialText:
    text: str
    strips_left: bool
    strips_right: bool


_QUOTED = re.compile(r"\\x\{([0-9A-Fa-f]+)\}|\\x([0-9A-Fa-f]{2})|\\([^A-Za-z0-9])|([^\\|()])")
_SPACES = r"(?:\s*)"


def special_texts(pattern: str) -> list[SpecialText] | None:
    """The texts of a pattern of quoted alternatives in groups; None if it isn't only that."""
    found: list[SpecialText] = []
    place = 0
    while place < len(pattern):
        left = pattern.startswith(_SPACES, place)
        place += len(_SPACES) * left
        if not pattern.startswith("(", place):
            return None
        texts, text = [], ""
        place += 1
        while (match := _QUOTED.match(pattern, place)) or pattern.startswith("|", place):
            if match is None:
                texts.append(text)
                text, place = "", place + 1
                continue
            wide, short, quoted, plain = match.groups()
            text += chr(int(wide or short, 16)) if wide or short else quoted or plain
            place = match.end()
        if not pattern.startswith(")", place):
            return None
        place += 1
        right = pattern.startswith(_SPACES, place)
        place += len(_SPACES) * right
        if place < len(pattern) and pattern[place] != "|":
            return None
        place += 1
        found += (SpecialText(one, left, right) for one in (*texts, text))
    return found


@dataclass
class EncoderGraph:
    """A tokenizer's graph, checked to be one that can be used here."""

    name: str  # of its file
    model: Any
    tokenizer: Any  # the node that makes ids
    split: Any  # the node that finds special tokens
    vocabulary: Strings
    specials: list[SpecialText]
    byte_fallback: bool

    def notes(self, key: str) -> str:
        """What the model says of itself under ``key``; "" if nothing."""
        if not self.model.has_rt_info(key):
            return ""
        value = self.model.get_rt_info(key)
        return str(getattr(value, "value", value))

    def word_patterns(self) -> tuple[str, ...] | None:
        """The patterns that cut text into words, in order; None where anything else is done.

        But for canonical composition (NFC) of the text before, which joins nothing with a space
        or a newline, nor anything to a letter of ASCII that one of these follows.
        """
        patterns: list[str] = []
        node = source(self.tokenizer, 4)
        while node.get_type_name() == "RegexSplit":
            attributes = {key: str(value) for key, value in node.get_attributes().items()}
            pattern = constant_text(node, node.get_input_size() - 1)
            if pattern is None or node.get_input_size() != 7:
                return None
            if attributes != {"behaviour": "isolate", "invert": "False", "max_splits": "-1"}:
                return None
            patterns.insert(0, pattern)
            node = source(node, 4)
        if node.get_type_name() == "CharsMapNormalization":
            attributes = {key: str(value) for key, value in node.get_attributes().items()}
            if attributes != _COMPOSES or node.get_input_size() != 4:
                return None
            node = source(node, 2)
        return tuple(patterns) if node.get_type_name() == _SPLIT else None


def encoder_graph(core: Any, folder: Path, stem: str) -> EncoderGraph:
    """Read and check. Raises ModelLoadFailed, and UnsupportedFeature for another kind."""
    name = f"{stem}.xml"
    model = read_graph(core, folder, stem)
    found = [node for kind in _TOKENIZERS for node in nodes(model, kind)]
    if len(found) != 1:
        raise broken(name, f"it has {len(found)} tokenizing steps, not one")
    tokenizer, kind = found[0], found[0].get_type_name()
    if kind != "BPETokenizer":
        raise _other(f"it works by {kind}, which can't be kept from finding control tokens in text")
    splits = nodes(model, _SPLIT)
    if len(splits) != 1 or splits[0].get_input_size() != 6:
        raise _other(f"it has {len(splits)} steps that find special tokens, not one as is usual")
    split = splits[0]
    if {source(split, place).get_type_name() for place in (2, 3, 4)} != {"StringTensorUnpack"}:
        raise _other("it changes text before it finds special tokens")
    pattern = constant_text(split, 5)
    specials = special_texts(pattern) if pattern is not None else None
    if specials is None:
        raise _other("its special tokens are written in a way that isn't known")
    inputs = tokenizer.get_input_size()
    for place in range(5, inputs - 4 if inputs in (15, 18) else inputs, 3):
        Strings.of_input(tokenizer, place, name)
    return EncoderGraph(
        name,
        model,
        tokenizer,
        split,
        Strings.of_input(tokenizer, 5, name),
        specials,
        str(tokenizer.get_attributes().get("byte_fallback")) == "True",
    )


def _other(why: str) -> UnsupportedFeature:
    return UnsupportedFeature(
        f"This model's tokenizer can't be used: {why}. Convert it with openvino_tokenizers from "
        "the model's fast tokenizer, or use a GGUF file of the model.",
        metadata={"capability": "openvino.tokenizer"},
    )


class Encoder:
    """Makes ids of parts of text, and nothing else: no control tokens, padding or truncation."""

    def __init__(self, core: Any, graph: EncoderGraph, hidden: Sequence[int], kept: dict[str, int]):
        """``hidden``: tokens that no text may give. ``kept``: those found in plain text.

        What follows the node that makes ids, which truncates, pads and adds special tokens, is
        cut away; what comes before the words' patterns is replaced by the parts that are given,
        so that special tokens are found nowhere else than outside. Raises ModelLoadFailed and
        UnsupportedFeature.
        """
        self._size = len(graph.vocabulary)
        respelled, self.uncovered = _bytes(graph)
        # What a merge needs stays: the library can't do without, and the check of what is found
        # in text then says so.
        merged, texts = _merged(graph), graph.vocabulary.as_list()
        respelled |= {place: _NOWHERE for place in hidden if texts[place] not in merged}
        graph.vocabulary.changed(respelled).put(graph.tokenizer, 5)
        if (inputs := graph.tokenizer.get_input_size()) in (15, 18):
            _put_added(graph.tokenizer, inputs - 4, kept)
        compiled = core.compile_model(_cut(graph), "CPU", _OF_THIS_PROCESS)
        self._request = compiled.create_infer_request()
        self._row = np.zeros(1, dtype=np.int32)

    def encode(self, raw: bytes, ends: Sequence[int], whole: Sequence[bool]) -> Ints:
        """Ids of the parts of ``raw`` that end at ``ends``; ``whole``: the part is one token.

        Bytes that the vocabulary lacks have none. The library's own RuntimeError is let through.
        """
        if not raw:
            return np.empty(0, dtype=np.int32)
        stops = np.array(ends, dtype=np.int32)
        inputs = (
            self._row,
            np.array([len(stops)], dtype=np.int32),
            np.append(self._row, stops[:-1]),
            stops,
            np.frombuffer(raw, dtype=np.uint8),
            np.array(whole, dtype=np.bool_),
        )
        for place, values in enumerate(inputs):
            self._request.set_input_tensor(place, ov.Tensor(values))
        self._request.infer()
        ids: Ints = self._request.get_output_tensor(0).data
        return ids[(ids >= 0) & (ids < self._size)]


def _bytes(graph: EncoderGraph) -> tuple[dict[int, bytes], frozenset[int]]:
    """Tokens to respell so that every byte has one, and the bytes that were without.

    Otherwise the library would put the unknown token, a control token as a rule, in their place.
    In a byte vocabulary they get tokens beyond its end, to be left out. In another the tokens
    <0x00> to <0xFF> become the bytes that they stand for: they are then found as before, but
    no longer where a text spells their names. Raises UnsupportedFeature.
    """
    entries = graph.vocabulary.as_list()
    single = {text for text in entries if len(text) == 1}
    lacking = [one for value in range(256) if (one := bytes([value])) not in single]
    if any(text >= b"\x80" for text in single):
        return dict(enumerate(lacking, len(entries))), frozenset(b"".join(lacking))
    places = {text: place for place, text in enumerate(entries)}
    named = {bytes([value]): places.get(b"<0x%02X>" % value) for value in range(256)}
    tokens = {place: one for one, place in named.items() if place is not None}
    if not graph.byte_fallback or len(tokens) != 256:
        raise _other(
            "its vocabulary has no tokens for single bytes, so some texts have no spelling"
        )
    return {
        place: one if one in lacking else _NOWHERE for place, one in tokens.items()
    }, frozenset()


def _merged(graph: EncoderGraph) -> set[bytes]:
    """The texts that merges join, and those that come of it."""
    left = Strings.of_input(graph.tokenizer, 8, graph.name).as_list()
    if graph.tokenizer.get_input_size() in (14, 18):
        right = Strings.of_input(graph.tokenizer, 11, graph.name).as_list()
    else:  # both in one text
        pairs = [text.partition(b" ") for text in left]
        left, right = [pair[0] for pair in pairs], [pair[2] for pair in pairs]
    if len(left) != len(right):
        raise broken(graph.name, f"it has {len(left)} left and {len(right)} right parts of merges")
    return {*left, *right, *(one + other for one, other in zip(left, right, strict=True))}


def _put_added(tokenizer: Any, place: int, kept: dict[str, int]) -> None:
    texts = [text.encode() for text in kept] or [_NOWHERE]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int32)
    begins = np.append(np.zeros(1, dtype=np.int32), ends[:-1])
    Strings(begins, ends, np.frombuffer(b"".join(texts), dtype=np.uint8)).put(tokenizer, place)
    ids = np.array(list(kept.values()) or [0], dtype=np.int32)
    tokenizer.input(place + 3).replace_source_output(ops.constant(ids).output(0))


def _cut(graph: EncoderGraph) -> Any:
    kinds = [ov.Type.i32] * 4 + [ov.Type.u8, ov.Type.boolean]
    given = [ops.parameter(ov.PartialShape([-1]), kind) for kind in kinds]
    for output, parameter in zip(graph.split.outputs(), given, strict=True):
        for target in list(output.get_target_inputs()):
            target.replace_source_output(parameter.output(0))
    return ov.Model([ops.result(graph.tokenizer.output(2))], given, "encoder")
