"""A real model's converted tokenizer: what it makes of text, beside what the llama engine makes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modeld.shared.errors import InvalidRequest, ModelLoadFailed
from modeld.workers.llama.native import start
from modeld.workers.llama.tokenizer import LlamaTokenizer
from modeld.workers.openvino.native import core
from modeld.workers.openvino.tokenizer import OpenVinoTokenizer
from tests.support.openvino_models import converted

# Where the two engines' patterns differ: U+180E is a space to the one and none to the other, and
# the rest, given by Unicode 16 and 17, are letters and numbers to the one and unknown to the other.
_OTHER = (
    "88f c5c cdc 180e 1c89-1c8a a7cb-a7cf a7d2 a7d4 a7da-a7dc a7f1 105c0-105f3 10940-10959 "
    "10d40-10d65 10d6f-10d85 10ec2-10ec7 11380-11389 1138b 1138e 11390-113b5 113b7 113d1 "
    "113d3 116d0-116e3 11bc0-11be0 11bf0-11bf9 11db0-11ddb 11de0-11de9 13460-143fa "
    "16100-1611d 16130-16139 16d40-16d6c 16d70-16d79 16ea0-16eb8 16ebb-16ed3 16ff2-16ff6 "
    "187f8-187ff 18cff 18d09-18d1e 18d80-18df2 1ccf0-1ccf9 1e5d0-1e5ed 1e5f0-1e5fa "
    "1e6c0-1e6de 1e6e0-1e6e2 1e6e4-1e6e5 1e6e7-1e6ed 1e6f0-1e6f4 1e6fe-1e6ff 2b73a-2b73f "
    "2cea2-2cead 323b0-33479 "
)
OTHER_WORDS = frozenset(
    chr(code)
    for first, _, last in (run.partition("-") for run in _OTHER.split())
    for code in range(int(first, 16), int(last or first, 16) + 1)
)
NO_TOKEN = ("\x04", "\x06", "\x13", "\x14", "\x16", "\x1d")  # bytes that the vocabulary lacks
FRAGMENTS = (
    *("the", "Hello", " world", "foo_bar", "don't", "'s", "'LL", "  ", "\n", "\n\n", " \n ", "\t"),
    *(
        "123",
        "3.14",
        "٣",
        "①",
        "½",
        "🙂",
        "👩‍👩‍👧",
        "漢字",
        "é",
        "e\u0301",
        "ſ",
        "\u200d",
        "\ufeff",
    ),
    *("def f(x):\n    return x\n", "{}();", "==", "...", "\r\n", "\u00a0", "\u3000", "\x85", "\0"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im", "|>", *NO_TOKEN),
)


def plain(alphabet: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.one_of(st.sampled_from(FRAGMENTS), st.text(alphabet, max_size=12))
    return st.lists(parts, max_size=12).map("".join)


TEXTS = plain(st.characters(exclude_categories=["Cs"])).map(
    lambda text: "".join(one for one in text if one not in OTHER_WORDS)
)


@pytest.fixture(scope="module")
def folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(demo_model, tmp_path_factory.mktemp("ir"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> OpenVinoTokenizer:
    return OpenVinoTokenizer(folder, core())


@pytest.fixture(scope="module")
def llama(demo_model: Path) -> Iterator[LlamaTokenizer]:
    start()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(demo_model).encode(), params)
    assert model
    yield LlamaTokenizer(llama_cpp.llama_model_get_vocab(model), kind="gpt2", pre="smollm")
    llama_cpp.llama_model_free(model)


def test_it_knows_the_same_vocabulary_as_the_llama_engine(
    tokenizer: OpenVinoTokenizer, llama: LlamaTokenizer
) -> None:
    assert dict(tokenizer.controls) == dict(llama.controls)
    assert tokenizer.end_of_generation == llama.end_of_generation
    assert (tokenizer.bos, tokenizer.add_bos) == (llama.bos, llama.add_bos) == (1, False)
    assert (tokenizer.strips_left, tokenizer.strips_right) == (frozenset(), frozenset())
    assert tokenizer.vocab_size == llama.vocab_size == 49152
    ids = range(llama.vocab_size)
    assert [tokenizer.piece(one) for one in ids] == [llama.piece(one) for one in ids]


@settings(max_examples=400, deadline=None)
@given(text=TEXTS)
@example(text="\0")
@example(text="\x04")
@example(text="a\U00040000b")
def test_text_becomes_the_ids_that_the_llama_engine_gives(
    tokenizer: OpenVinoTokenizer, llama: LlamaTokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == llama.encode(text)


@pytest.mark.parametrize("around", ["a{}b", " {}", "{}'s ", "\n\n{}1"])
def test_every_character_of_the_first_planes_makes_the_same_words(
    tokenizer: OpenVinoTokenizer, llama: LlamaTokenizer, around: str
) -> None:
    every = (chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000)
    text = "".join(around.format(one) for one in every if one not in OTHER_WORDS)
    assert tokenizer.encode(text) == llama.encode(text)


@pytest.mark.parametrize("character", ["\u180e", "\u088f", "\U00013460"])
def test_a_few_characters_are_known_to_make_other_words_but_lose_nothing(
    tokenizer: OpenVinoTokenizer, llama: LlamaTokenizer, character: str
) -> None:
    assert character in OTHER_WORDS
    text = f"\n\n{character}'s \n{character}1"
    ids = tokenizer.encode(text)
    assert ids != llama.encode(text)
    assert b"".join(map(tokenizer.piece, ids)) == text.encode()


def test_control_tokens_in_text_are_only_text(tokenizer: OpenVinoTokenizer) -> None:
    text = "".join(f"a{control} {control}\n{control}{control}" for control in tokenizer.controls)
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.controls.values())
    assert b"".join(map(tokenizer.piece, ids)) == text.encode()


def test_what_the_vocabulary_lacks_becomes_no_control_token(tokenizer: OpenVinoTokenizer) -> None:
    for lacking in NO_TOKEN:
        assert tokenizer.encode(lacking) == []
        assert tokenizer.encode(f"x{lacking}y") == tokenizer.encode("x") + tokenizer.encode("y")


def test_an_empty_text_has_no_tokens(tokenizer: OpenVinoTokenizer) -> None:
    assert tokenizer.encode("") == []


@pytest.mark.parametrize("word", ["lighthouse ", "x", " ", "\n", "漢", "1"])
def test_a_long_text_is_neither_cut_nor_padded(
    tokenizer: OpenVinoTokenizer, llama: LlamaTokenizer, word: str
) -> None:
    text = word * (100_000 // len(word))
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.piece, ids)) == text.encode()
    assert ids == llama.encode(text)
    assert tokenizer.encode("a") == llama.encode("a"), "what follows a long text is as before"


def test_a_lone_surrogate_is_refused_and_named(tokenizer: OpenVinoTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="character 2 is"):
        tokenizer.encode("ab\ud800")


@pytest.mark.parametrize("token", [-1, 49152, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: OpenVinoTokenizer, token: int) -> None:
    with pytest.raises(InvalidRequest, match="allowed is 0 to 49151"):
        tokenizer.piece(token)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, data=st.data())
def test_a_prompt_may_be_tokenized_in_two_where_it_says_so(
    tokenizer: OpenVinoTokenizer, llama: LlamaTokenizer, text: str, data: st.DataObject
) -> None:
    before = data.draw(st.integers(0, len(text)))
    place = tokenizer.safe_split(text, before)
    assert place == llama.safe_split(text, before)
    if place is not None:
        one, other = tokenizer.encode(text[:place]), tokenizer.encode(text[place:])
        assert tokenizer.encode(text) == one + other


def test_a_model_with_a_wider_output_has_empty_tokens_at_the_end(folder: Path) -> None:
    padded = OpenVinoTokenizer(folder, core(), 49200)
    assert padded.vocab_size == 49200
    assert padded.piece(49199) == b""
    with pytest.raises(InvalidRequest):
        padded.piece(49200)


def test_a_model_with_a_narrower_output_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadFailed, match="49152 tokens and the model's output 49000"):
        OpenVinoTokenizer(folder, core(), 49000)


def test_what_the_model_says_of_its_ends_is_taken(
    folder: Path, tmp_path: Path, tokenizer: OpenVinoTokenizer, files: Callable[[Path], Path]
) -> None:
    content = {"eos_token_id": [2, 8, 10**6]}  # the last is no token
    (files(tmp_path) / "generation_config.json").write_text(json.dumps(content))
    made = OpenVinoTokenizer(tmp_path, core())
    assert made.end_of_generation == tokenizer.end_of_generation | {8}


@pytest.fixture
def files(folder: Path) -> Callable[[Path], Path]:
    """Puts the tokenizer's files into a folder."""

    def link(into: Path) -> Path:
        for path in folder.glob("openvino_*tokenizer.*"):
            (into / path.name).write_bytes(path.read_bytes())
        return into

    return link


@pytest.mark.parametrize(
    "name",
    [f"openvino_{kind}tokenizer.{suffix}" for kind in ("", "de") for suffix in ("xml", "bin")],
)
@pytest.mark.parametrize("harm", ["missing", "empty", "half", "noise"])
def test_a_broken_file_is_named_and_nothing_crashes(
    tmp_path: Path, files: Callable[[Path], Path], name: str, harm: str
) -> None:
    path = files(tmp_path) / name
    raw = path.read_bytes()
    if harm == "missing":
        path.unlink()
    else:
        noise = bytes(i * 7 % 256 for i in range(len(raw)))
        path.write_bytes({"empty": b"", "half": raw[: len(raw) // 2], "noise": noise}[harm])
    with pytest.raises(ModelLoadFailed) as caught:
        OpenVinoTokenizer(tmp_path, core())
    message = str(caught.value)
    assert path.stem in message
    assert "again" in message, "it says what to do"


def test_another_models_detokenizer_is_refused(
    tmp_path: Path, files: Callable[[Path], Path]
) -> None:
    path = files(tmp_path) / "openvino_detokenizer.bin"
    raw = bytearray(path.read_bytes())
    begins, size = 0, 4 * 49152  # each token now begins where the one after it did
    raw[begins : begins + size - 4] = raw[begins + 4 : begins + size]
    raw[size : 2 * size - 4] = raw[size + 4 : 2 * size]
    path.write_bytes(bytes(raw))
    with pytest.raises(ModelLoadFailed, match=r"openvino_detokenizer\.xml doesn't belong to"):
        OpenVinoTokenizer(tmp_path, core())


def test_a_process_that_used_it_ends_well(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from modeld.workers.openvino.native import core\n"
        "from modeld.workers.openvino.tokenizer import OpenVinoTokenizer\n"
        "made = OpenVinoTokenizer(Path(sys.argv[1]), core())\n"
        "again = OpenVinoTokenizer(Path(sys.argv[1]), core())\n"
        "print(made.encode('hello') == again.encode('hello'))\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
