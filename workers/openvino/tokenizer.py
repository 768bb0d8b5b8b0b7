"""A converted tokenizer as the ``Tokenizer`` protocol: ids, pieces, control tokens.

Control tokens are never recognised in text here, which is checked for every model when it is
loaded. Knows no context, prompt or template.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from modeld.shared.errors import InvalidRequest, ModelLoadFailed, UnsupportedFeature
from modeld.shared.ir_files import read_object
from modeld.shared.ir_texts import ir_texts
from modeld.workers.openvino.native import words
from modeld.workers.openvino.pieces import DETOKENIZER, Pieces
from modeld.workers.openvino.special_tokens import SpecialTokens, classify, sidecar
from modeld.workers.openvino.tokenizer_graph import (
    Encoder,
    EncoderGraph,
    Ints,
    broken,
    encoder_graph,
    with_tokenizers,
)
from modeld.workers.splits import Controls, bpe_can_split, bpe_safe_split
from modeld.workers.utf8 import encoded

TOKENIZER = "openvino_tokenizer"
_CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_ANY_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_DIGITS
_QWEN_2 = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_DIGITS
# The patterns that cut text into words, as converters write them, and the name of the rule in
# ``workers.splits`` that they follow.
WORD_PATTERNS: Mapping[tuple[str, ...], str] = {
    (r"\p{N}", _GPT_2): "smollm",
    (_GPT_2.replace(r"| ?\p{N}+|", r"|\p{N}|") + r"|\s+",): "smollm",
    (_GPT_2 + r"|\s+",): "gpt-2",
    (_CONTRACTIONS + _LLAMA_3,): "llama-bpe",
    (_ANY_CASE + _LLAMA_3,): "llama-bpe",
    (_CONTRACTIONS + _QWEN_2,): "qwen2",
    (_ANY_CASE + _QWEN_2,): "qwen2",
}
# What the engine's GGUF conversion writes for every pre-tokenizer that it doesn't know.
FALLBACK_PATTERNS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")
_PROBE = "The quick brown fox\n\tjumps over 13 lazy dogs; naïve café, 漢字 🙂 {x: [1.5]}"


class OpenVinoTokenizer:
    """Tokenizes with the tokenizer and detokenizer of a model's folder."""

    vocab_size: int
    bos: int | None
    add_bos: bool
    end_of_generation: frozenset[int]
    controls: Mapping[str, int]
    strips_left: frozenset[int]
    strips_right: frozenset[int]

    def __init__(self, folder: Path, core: Any, vocab_size: int | None = None) -> None:
        """``vocab_size``: the width of the model's logits; None: as the tokenizer says.

        Raises ModelLoadFailed for files that are missing, broken or don't belong together, and
        UnsupportedFeature for a kind of tokenizer that can't be used safely.
        """
        core = with_tokenizers(core)
        graph = encoder_graph(core, folder, TOKENIZER)
        self._pieces = pieces = Pieces(core, folder)
        self.vocab_size = _checked_size(len(graph.vocabulary), pieces, vocab_size)
        specials = _specials(folder, graph, pieces)
        pieces.keep(
            frozenset(specials.controls.values()) | frozenset(specials.user_defined.values())
        )
        self.controls = MappingProxyType(dict(specials.controls))
        self.end_of_generation = specials.eog
        self.bos, self.add_bos = self._beginning(folder, graph)
        marked = {one.text: one for one in graph.specials}
        stripping = [(token, marked[t]) for t, token in self.controls.items() if t in marked]
        self.strips_left = frozenset(token for token, one in stripping if one.strips_left)
        self.strips_right = frozenset(token for token, one in stripping if one.strips_right)
        plain = specials.user_defined
        left = [plain[t] for t in plain if t in marked and marked[t].strips_left]
        right = [plain[t] for t in plain if t in marked and marked[t].strips_right]
        self._plain = Controls(plain, left, right)
        self._plain_raw = {token: text.encode() for text, token in plain.items()}
        pre = _split_rule(graph, specials)
        self._splits = bool(pre) and bpe_can_split(
            pre, plain, user_defined_strips=bool(left or right)
        )
        hidden = {text.encode() for text in self.controls}
        places = [at for at, raw in enumerate(graph.vocabulary.as_list()) if raw in hidden]
        try:
            self._encoder = Encoder(core, graph, places, dict(plain))
            self._check()
        except (RuntimeError, InvalidRequest) as error:
            raise broken(graph.name, words(error)) from None

    def _beginning(self, folder: Path, graph: EncoderGraph) -> tuple[int | None, bool]:
        texts = ir_texts(folder)
        noted = graph.notes("bos_token_id")
        bos = int(noted) if noted.isdecimal() and len(noted) < 10 else None
        if bos is None or self._pieces.text(bos) != texts.bos_text.encode() or not texts.bos_text:
            bos = self.controls.get(texts.bos_text)
        return bos, texts.add_bos and bos is not None

    def _check(self) -> None:
        """Prove what the session core relies on, with this very model's graphs."""
        if self.encode(""):
            raise broken(TOKENIZER, "it makes tokens of an empty text")
        taken = frozenset(self.controls.values())
        # All in one go, each a text of its own; some vocabularies have thousands.
        tried = [around + t + around for t in self.controls for around in ("", "a", " ", "\n")]
        raws = [text.encode() for text in tried]
        ends = np.cumsum([len(raw) for raw in raws]).tolist()
        ids = self._encoder.encode(b"".join(raws), ends, [False] * len(ends)).tolist()
        if found := taken.intersection(ids):
            texts = [text for text, token in self.controls.items() if token in found]
            raise UnsupportedFeature(
                "This model's tokenizer can't be used: in plain text it finds the control tokens "
                f"{texts[:5]!a}, so that a message could pretend to be another. Use a GGUF file "
                "of the model.",
                metadata={"capability": "openvino.tokenizer"},
            )
        spelled = b"".join(map(self.piece, self.encode(_PROBE)))
        if spelled.removeprefix(b" ") != self._spellable(_PROBE):
            raise ModelLoadFailed(
                f"{DETOKENIZER}.xml doesn't belong to {TOKENIZER}.xml: {_PROBE!a} comes back as "
                f"{spelled.decode(errors='replace')!a}. Convert the model again.",
                metadata={"cause": "tokenizer", "file": f"{DETOKENIZER}.xml"},
            )

    def _spellable(self, text: str) -> bytes:
        return bytes(one for one in text.encode() if one not in self._encoder.uncovered)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, control tokens off, no BOS; InvalidRequest for a lone surrogate.

        A byte that the vocabulary has no token for, as a few control characters, has no id.
        """
        if not text:
            return []
        raw = encoded(text)
        try:
            ids = self._encode_parts(text) if self._plain_raw else self._encode_whole(raw)
        except RuntimeError as error:
            why = words(error)
            allowed = "text the tokenizer can take"
            raise InvalidRequest.of("text", f"{len(raw)} bytes", allowed, why) from None
        answer: list[int] = ids.tolist()
        return answer

    def _encode_whole(self, raw: bytes) -> Ints:
        return self._encoder.encode(raw, [len(raw)], [False])

    def _encode_parts(self, text: str) -> Ints:
        """Where some tokens are found in plain text: those, and what is between them."""
        chunks, ends, whole, at = [], [], [], 0
        for part in self._plain.split(text):
            # A part that is a token includes whitespace that it swallowed, which has no id.
            raw = part.text.encode() if part.token is None else self._plain_raw[part.token]
            at += len(raw)
            chunks.append(raw)
            ends.append(at)
            whole.append(part.token is not None)
        return self._encoder.encode(b"".join(chunks), ends, whole)

    def piece(self, token: int) -> bytes:
        """The token's own bytes, a control token's text included; raises InvalidRequest.

        b"" for an id that only pads the model's vocabulary.
        """
        if not 0 <= token < self.vocab_size:
            raise InvalidRequest.of("token", token, f"0 to {self.vocab_size - 1}")
        return self._pieces.piece(token)

    def safe_split(self, text: str, before: int) -> int | None:
        """See the protocol; None where this tokenizer allows no proof."""
        return bpe_safe_split(text, before) if self._splits else None


def _checked_size(known: int, pieces: Pieces, width: int | None) -> int:
    """The model's vocabulary, maybe padded beyond the tokenizer's. Raises ModelLoadFailed."""
    most = max(known, pieces.size)
    if width is None:
        return most
    if width < most:
        raise ModelLoadFailed(
            f"The tokenizer has {most} tokens and the model's output {width}: they don't belong "
            "together. Convert or fetch the model again with its own tokenizer.",
            metadata={"cause": "tokenizer", "tokens": most, "width": width},
        )
    return width


def _specials(folder: Path, graph: EncoderGraph, pieces: Pieces) -> SpecialTokens:
    """From the file that a conversion left, or else from what the graphs say.

    Tokens that the detokenizer leaves out are control; others that the tokenizer finds in text
    are ordinary text, as where the llama engine calls them user-defined.
    """
    known = sidecar(folder, pieces.text)
    if known is not None:
        return known
    ids = {raw: token for token, raw in enumerate(graph.vocabulary.as_list())}
    marked = {one.text: ids.get(one.text.encode()) for one in graph.specials}
    tokens = {text: token for text, token in marked.items() if token is not None}
    ends = _end_ids(folder, graph)
    control = pieces.skipped | ends if pieces.skipped else set(tokens.values()) | ends
    controls = {
        raw.decode(errors="replace"): token
        for token in sorted(control)
        if (raw := pieces.text(token))
    }
    plain = {text: token for text, token in tokens.items() if text not in controls}
    every = {**plain, **controls}
    return classify(controls, plain, {end for end in ends if pieces.text(end)}, every.get)


def _end_ids(folder: Path, graph: EncoderGraph) -> frozenset[int]:
    """What the model's files say ends an answer."""
    said = read_object(folder / "generation_config.json").get("eos_token_id")
    listed = said if isinstance(said, list) else [said]
    ends = {one for one in listed if type(one) is int}
    noted = graph.notes("eos_token_id")
    if noted.isdecimal() and len(noted) < 10:
        ends.add(int(noted))
    return frozenset(ends)


def _split_rule(graph: EncoderGraph, specials: SpecialTokens) -> str:
    """The rule of ``workers.splits`` that the graph's words follow; "" where none is known.

    Raises UnsupportedFeature where the conversion didn't know the model's own rule: it then
    makes words in another way than the model was trained with.
    """
    patterns = graph.word_patterns()
    if patterns == FALLBACK_PATTERNS and specials.pre != "default":
        raise UnsupportedFeature(
            "This folder was converted from a GGUF file whose pre-tokenizer "
            f"({specials.pre or 'unknown'}) OpenVINO's conversion doesn't know: it cuts text into "
            "other words than the model was trained with. Import the GGUF file for the llama "
            "engine, or export the model for OpenVINO from its original weights.",
            metadata={"capability": "openvino.tokenizer", "pre": specials.pre},
        )
    return WORD_PATTERNS.get(patterns, "") if patterns is not None else ""
