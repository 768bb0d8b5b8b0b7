"""Which tokens of a vocabulary are control, which are found in plain text, and which end an answer.

Pure work on texts and ids, with the file that a conversion may leave beside a model. Knows no
graph and loads no library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modeld.shared.errors import ModelLoadFailed
from modeld.shared.ir_files import read_object

SIDECAR = "modeld_tokenizer.json"
MAX_SIDECAR_BYTES = 32 * 1024 * 1024

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
# Texts by which the llama engine knows the end of an answer, of whatever type the token is. Found
# by asking it about vocabularies with one of them each; a test asks again.
END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<end_of_utterance>",
        "<|eom_id|>",
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "</s>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
        "<｜end▁of▁sentence｜>",
    }
)
_END_IDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Where all of the others are there, the first doesn't end an answer and isn't control.
_NO_END = (
    ("<|end|>", "<|return|>", "<|call|>"),
    ("<|end|>", "<|flush|>", "<|call|>"),
    ("<|end|>", "<|flush|>", "<|calls|>"),
    ("</s>", "<|tool_response>"),
)


@dataclass(frozen=True)
class SpecialTokens:
    """Text → id of control tokens and of those found in plain text; ids that end an answer.

    ``model`` and ``pre`` are the GGUF names of the vocabulary's rules, "" where not known.
    """

    controls: Mapping[str, int]
    user_defined: Mapping[str, int]
    eog: frozenset[int]
    pre: str = ""
    model: str = ""

    def as_json(self) -> dict[str, Any]:
        """What the sidecar holds."""
        return {
            "controls": dict(self.controls),
            "user_defined": dict(self.user_defined),
            "eog": sorted(self.eog),
            "pre": self.pre,
            "model": self.model,
        }


def of_gguf(metadata: Mapping[str, Any]) -> SpecialTokens:
    """The special tokens of a GGUF's metadata as the llama engine sees them.

    Raises ModelLoadFailed where the metadata holds no vocabulary with types.
    """
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or ()
    if not tokens or len(types) != len(tokens):
        raise ModelLoadFailed(
            f"The GGUF file names {len(tokens)} tokens and {len(types)} token types, which must "
            "be as many. Use another file of this model.",
            metadata={"cause": "vocabulary"},
        )
    controls = {t: i for i, t in enumerate(tokens) if types[i] in (_CONTROL, _UNKNOWN) and t}
    user_defined = {t: i for i, t in enumerate(tokens) if types[i] == _USER_DEFINED and t}
    ids = {text: index for index, text in enumerate(tokens)}
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _END_IDS)
    ends = {one for one in named if isinstance(one, int) and 0 <= one < len(tokens)}
    return classify(
        controls,
        user_defined,
        ends,
        ids.get,
        pre=str(metadata.get("tokenizer.ggml.pre", "")),
        model=str(metadata.get("tokenizer.ggml.model", "")),
    )


def classify(
    controls: Mapping[str, int],
    user_defined: Mapping[str, int],
    ends: Set[int],
    id_of: Callable[[str], int | None],
    *,
    pre: str = "",
    model: str = "",
) -> SpecialTokens:
    """Complete what a file says by the texts in ``END_TEXTS`` that ``id_of`` knows.

    The engine ends at one only of several texts for the same fill-in-the-middle part, whichever
    it meets first; here all of them end an answer.
    """
    found = {text: token for text in END_TEXTS if (token := id_of(text)) is not None}
    kept, plain = dict(controls), dict(user_defined)
    kept |= found
    for text in found:
        plain.pop(text, None)
    eog = set(ends) | set(found.values())
    for first, *others in _NO_END:
        if first in found and all(one in found for one in others):
            eog.discard(found[first])
            kept.pop(first, None)
            plain[first] = found[first]
    return SpecialTokens(kept, plain, frozenset(eog), pre, model)


def sidecar(folder: Path, text_of: Callable[[int], bytes | None]) -> SpecialTokens | None:
    """What a conversion wrote down, if it did; checked against the vocabulary.

    ``text_of`` gives a token's text by id, None for an id that isn't one. Raises ModelLoadFailed.
    """
    path = folder / SIDECAR
    content = read_object(path, MAX_SIDECAR_BYTES)
    if not content:
        return None
    controls = _texts(content.get("controls"), text_of)
    user_defined = _texts(content.get("user_defined"), text_of)
    eog = content.get("eog")
    if not isinstance(eog, list) or not all(_is_id(one, text_of) for one in eog):
        raise _refused('its list "eog" holds something that is not a token')
    pre, model = content.get("pre"), content.get("model")
    if not isinstance(pre, str) or not isinstance(model, str):
        raise _refused('its "pre" and "model" must be texts')
    return SpecialTokens(controls, user_defined, frozenset(eog), pre, model)


def _is_id(value: object, text_of: Callable[[int], bytes | None]) -> bool:
    return type(value) is int and text_of(value) is not None


def _texts(value: object, text_of: Callable[[int], bytes | None]) -> dict[str, int]:
    if not isinstance(value, dict):
        raise _refused('its "controls" and "user_defined" must be objects of text and id')
    for text, token in value.items():
        if not _is_id(token, text_of) or not text or text_of(token) != text.encode():
            raise _refused(f"it says that {text[:100]!a} is token {token!a:.20}, and it is not")
    return value


def _refused(why: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"{SIDECAR} doesn't belong to this model's vocabulary: {why}. Import the model again.",
        metadata={"cause": "vocabulary", "file": SIDECAR},
    )
