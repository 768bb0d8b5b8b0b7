"""Converted tokenizers of several kinds: what is refused, what is found in text, what may split."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from modeld.shared.errors import ModelLoadFailed, UnsupportedFeature
from modeld.workers.llama.native import start
from modeld.workers.llama.tokenizer import LlamaTokenizer
from modeld.workers.openvino.native import core
from modeld.workers.openvino.special_tokens import END_TEXTS, SIDECAR, of_gguf
from modeld.workers.openvino.tokenizer import WORD_PATTERNS, OpenVinoTokenizer
from modeld.workers.openvino.tokenizer_graph import SpecialText, special_texts
from tests.support.openvino_models import converted, tiny_gguf, tiny_ir
from tests.support.openvino_tokenizers_made import (
    METASPACE,
    TRUNCATED_TO,
    metaspace,
    replaced,
    with_patterns,
    without_special_split,
)
from tests.support.tiny_models import CONTROLS, vocabulary

USER_DEFINED = ("<tool>", "foo", "  ", "a b")
PARTS = (
    "the",
    "e ",
    "n\n",
    " the",
    "ing",
    "user",
    "'s",
    "1",
    "23",
    " ",
    "  ",
    "\n",
    "\t",
    "é",
    "!",
)
# Without what a newer Unicode brought, which the two engines know differently.
LETTERS = st.text(st.characters(exclude_categories=["Cs", "Cn"], max_codepoint=0x7FF), max_size=6)
TEXTS = st.lists(st.one_of(st.sampled_from(PARTS), LETTERS), max_size=14).map("".join)

LoadVocabulary = Callable[[Path, str], LlamaTokenizer]


@pytest.fixture(scope="module")
def llama() -> Iterator[LoadVocabulary]:
    """The llama engine's tokenizer over a file's vocabulary."""
    start()
    models = []

    def load(path: Path, pre: str) -> LlamaTokenizer:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        models.append(llama_cpp.llama_model_load_from_file(str(path).encode(), params))
        assert models[-1]
        return LlamaTokenizer(llama_cpp.llama_model_get_vocab(models[-1]), kind="gpt2", pre=pre)

    yield load
    for model in models:
        llama_cpp.llama_model_free(model)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_ir(tmp_path_factory.mktemp("tiny"))


def metadata(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def with_sidecar(source: Path, into: Path) -> Path:
    folder = converted(source, into)
    (folder / SIDECAR).write_text(json.dumps(of_gguf(metadata(source)).as_json()))
    return folder


# --- tokens that are found in plain text


@pytest.fixture(scope="module")
def user_defined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("user")
    source = tiny_gguf(folder / "source.gguf", user_defined=USER_DEFINED)
    return with_sidecar(source, folder / "ir"), source


def test_with_what_a_conversion_wrote_down_plain_tokens_are_found_in_text(
    user_defined: tuple[Path, Path], llama: LoadVocabulary
) -> None:
    made, other = OpenVinoTokenizer(user_defined[0], core()), llama(user_defined[1], "smollm")
    assert dict(made.controls) == dict(other.controls) == dict(zip(CONTROLS, range(4), strict=True))
    parts = st.one_of(st.sampled_from([*USER_DEFINED, *CONTROLS, "x", "foobar", " "]), TEXTS)

    @settings(max_examples=200, deadline=None)
    @given(st.lists(parts, max_size=8).map("".join))
    def equal(text: str) -> None:
        assert made.encode(text) == other.encode(text)

    equal()
    assert made.encode("<tool>x") == [made.encode("<tool>")[0], *made.encode("x")]
    assert len(made.encode("<tool>")) == 1
    assert made.safe_split("some text", 9) is None, "a token spells a letter and a space"


def test_without_it_special_tokens_are_taken_for_control(
    user_defined: tuple[Path, Path], tmp_path: Path
) -> None:
    for path in user_defined[0].glob("openvino_*tokenizer.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    made = OpenVinoTokenizer(tmp_path, core())
    assert set(made.controls) == {*CONTROLS, *USER_DEFINED}
    assert len(made.encode("<tool>")) > 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"controls": {"<wrong>": 1}}, "'<wrong>' is token 1, and it is not"),
        ({"controls": {"<|im_end|>": True}}, "is token True, and it is not"),
        ({"user_defined": {"<|im_end|>": 10**9}}, "is token 1000000000, and it is not"),
        ({"controls": []}, "must be objects"),
        ({"eog": [10**9]}, '"eog" holds something that is not a token'),
        ({"pre": 1}, "must be texts"),
    ],
)
def test_a_note_that_is_not_of_this_vocabulary_is_refused(
    user_defined: tuple[Path, Path], tmp_path: Path, content: dict[str, Any], says: str
) -> None:
    for path in user_defined[0].glob("openvino_*tokenizer.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    known = json.loads((user_defined[0] / SIDECAR).read_text())
    (tmp_path / SIDECAR).write_text(json.dumps(known | content))
    with pytest.raises(ModelLoadFailed, match=says):
        OpenVinoTokenizer(tmp_path, core())


# --- what ends an answer


def test_texts_that_end_an_answer_are_those_of_the_llama_engine(
    tmp_path: Path, llama: LoadVocabulary
) -> None:
    others = ("<|im_start|>", "<unk>", "<|eot|>", "<|user|>", "<|fim_prefix|>", "<file_sep>")
    several = (("<|return|>", "<|call|>", "<|end|>"), ("</s>", "<|tool_response>"))
    alone = [(text,) for text in (*sorted(END_TEXTS), *others)]
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.NORMAL)
    for number, texts in enumerate([*alone, *several]):
        path = tmp_path / f"{number}.gguf"
        _vocabulary_only(path, texts, int(kinds[number % 3]))
        mine, other = of_gguf(metadata(path)), llama(path, "smollm")
        assert mine.eog == other.end_of_generation, texts
        if texts[0] not in others:  # parts of code may be control to it by name
            assert dict(mine.controls) == dict(other.controls), texts


def _vocabulary_only(path: Path, texts: tuple[str, ...], kind: int) -> None:
    tokens, types, merges = vocabulary()
    count = len(CONTROLS)
    tokens = ["<root>", *texts, *tokens[count:]]
    types = [types[0], *[kind] * len(texts), *types[count:]]
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_feed_forward_length(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


# --- where a text may be split


@pytest.mark.parametrize("nfc", [False, True])
@pytest.mark.parametrize("patterns", WORD_PATTERNS)
def test_every_known_way_to_make_words_splits_where_it_is_said_to(
    tiny: Path, tmp_path: Path, patterns: tuple[str, ...], nfc: bool
) -> None:
    made = OpenVinoTokenizer(with_patterns(tiny, tmp_path / "ir", patterns, nfc=nfc), core())

    @settings(max_examples=120, deadline=None)
    @given(TEXTS)
    def splits(text: str) -> None:
        place = len(text)
        while (place := made.safe_split(text, place) or 0) > 0:
            one, other = made.encode(text[:place]), made.encode(text[place:])
            assert made.encode(text) == one + other

    splits()
    assert made.safe_split("the in\n", 7) == 6


def test_words_made_in_an_unknown_way_are_not_split(tiny: Path, tmp_path: Path) -> None:
    made = OpenVinoTokenizer(with_patterns(tiny, tmp_path / "ir", [r"[\s\S]+"]), core())
    assert made.safe_split("the in\n", 7) is None
    apart = made.encode("e") + made.encode(" x")
    assert made.encode("e x") != apart, "what the proof excludes happens here"


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_a_vocabulary_whose_words_the_conversion_does_not_know_is_refused(
    tmp_path: Path, pre: str
) -> None:
    source = tiny_gguf(tmp_path / "source.gguf", pre=pre)
    folder = with_sidecar(source, tmp_path / "ir")
    with pytest.raises(UnsupportedFeature, match=rf"\({pre}\) OpenVINO's conversion doesn't know"):
        OpenVinoTokenizer(folder, core())
    (folder / SIDECAR).unlink()
    with pytest.raises(UnsupportedFeature, match=r"\(unknown\) OpenVINO's conversion"):
        OpenVinoTokenizer(folder, core())


# --- tokenizers that weren't made from a GGUF


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> OpenVinoTokenizer:
    return OpenVinoTokenizer(metaspace(tmp_path_factory.mktemp("metaspace")), core())


def test_a_beginning_token_truncation_and_padding_are_left_to_the_prompt(
    spaced: OpenVinoTokenizer,
) -> None:
    assert spaced.encode("hello") == [METASPACE.index("▁hello")]
    assert spaced.encode("hello" + " hello" * 99) == [METASPACE.index("▁hello")] * 100
    assert TRUNCATED_TO < 100


def test_its_special_tokens_are_told_apart(spaced: OpenVinoTokenizer) -> None:
    assert dict(spaced.controls) == {
        text: METASPACE.index(text) for text in ("<unk>", "<s>", "</s>", "<pad>")
    }
    assert spaced.end_of_generation == frozenset({2})
    assert spaced.strips_left == frozenset({METASPACE.index("<pad>")})
    assert spaced.strips_right == frozenset()
    ids = spaced.encode("h</s><tool>h")
    assert METASPACE.index("<tool>") in ids
    assert not set(ids) & set(spaced.controls.values())


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=20))
def test_characters_without_a_token_are_spelled_in_bytes(
    spaced: OpenVinoTokenizer, text: str
) -> None:
    spelled = b"".join(map(spaced.piece, spaced.encode(text)))
    assert spelled == (b" " + text.encode() if text else b"")


def test_the_name_of_a_byte_is_not_that_byte(spaced: OpenVinoTokenizer) -> None:
    ids = spaced.encode("<0x0A>")
    assert METASPACE.index("<0x0A>") not in ids
    assert b"".join(map(spaced.piece, ids)) == b" <0x0A>"
    assert METASPACE.index("<0x0A>") in spaced.encode("\n")


def test_a_control_token_that_text_can_spell_is_refused(tiny: Path, tmp_path: Path) -> None:
    for path in tiny.glob("openvino_*tokenizer.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    said = vocabulary()[0].index("ing")  # made by merging "in" and "g", whatever its text is
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with pytest.raises(UnsupportedFeature, match=r"it finds the control tokens \['ing'\]"):
        OpenVinoTokenizer(tmp_path, core())


def test_another_kind_of_tokenizer_is_refused_in_plain_words(tiny: Path, tmp_path: Path) -> None:
    folder = without_special_split(tiny, tmp_path / "ir")
    with pytest.raises(UnsupportedFeature, match="0 steps that find special tokens"):
        OpenVinoTokenizer(folder, core())


@pytest.mark.parametrize("place", [5, 6, 8, 12])
@pytest.mark.parametrize("value", [-1, 2**30])
def test_a_vocabulary_that_points_outside_is_refused_before_it_is_read(
    tiny: Path, tmp_path: Path, place: int, value: int
) -> None:
    size = len(vocabulary()[0 if place < 8 else 2])
    values = np.zeros(size, dtype=np.int32)
    values[-1] = value
    folder = replaced(tiny, tmp_path / "ir", place, values)
    with pytest.raises(ModelLoadFailed, match="vocabulary of its BPETokenizer points outside"):
        OpenVinoTokenizer(folder, core())


# --- the pattern of special tokens


def test_a_pattern_of_quoted_texts_is_read_back() -> None:
    pattern = "(\\<s\\>|a\\|b\\(\\\\)|(?:\\s*)(\\ \\\n)(?:\\s*)|(c)"
    assert special_texts(pattern) == [
        SpecialText("<s>", False, False),
        SpecialText("a|b(\\", False, False),
        SpecialText(" \n", True, True),
        SpecialText("c", False, False),
    ]


@pytest.mark.parametrize("pattern", [r"(\d)", "(a", "a)", "(a)b", "<s>|</s>", r"(a(b))", "(a)*"])
def test_a_pattern_of_another_kind_is_not_guessed_at(pattern: str) -> None:
    assert special_texts(pattern) is None
