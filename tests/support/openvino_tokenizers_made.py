"""Converted tokenizers of other kinds than a GGUF gives, made for tests from parts.

One as a Hugging Face tokenizer with a beginning token, truncation and padding becomes; and copies
of a folder whose patterns for words are others.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as openvino_ops
from openvino.utils.node_factory import NodeFactory

from modeld.workers.openvino.native import core
from modeld.workers.openvino.tokenizer_graph import Strings, nodes, source, with_tokenizers

ov: Any = openvino
ops: Any = openvino_ops
TRUNCATED_TO = 8  # tokens
METASPACE = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
METASPACE += ["▁", "h", "e", "l", "o", "▁h", "▁he", "ll", "▁hell", "▁hello", "<tool>", "<pad>"]
_MERGES = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll"), ("▁hell", "o")]


def metaspace(into: Path) -> Path:
    """A tokenizer with ▁ for spaces, which puts <s> first, keeps 8 tokens and pads to 16.

    <tool> is found in plain text, <pad> swallows spaces before it. Ids as in ``METASPACE``.
    """
    made: Any = importlib.import_module("openvino_tokenizers.tokenizer_pipeline")
    skipped = [METASPACE.index(text) for text in ("<unk>", "<s>", "</s>", "<pad>")]
    added = {text: METASPACE.index(text) for text in ("<unk>", "<s>", "</s>", "<tool>", "<pad>")}
    pipeline = made.TokenizerPipeline()
    pipeline.vocab, pipeline.skip_tokens = list(METASPACE), skipped
    specials = [made.SpecialToken(text, strip_left=text == "<pad>") for text in added]
    pipeline.add_steps(
        [
            made.SpecialTokensSplit(specials),
            made.RegexNormalizationStep.prepend_regex("▁"),
            made.RegexNormalizationStep.replace_spaces_metaspace(),
            made.BPETokenizationStep(
                list(METASPACE),
                _MERGES,
                unk_token="<unk>",
                fuse_unk=True,
                byte_fallback=True,
                added_tokens=added,
            ),
            made.TruncationStep(TRUNCATED_TO, truncation=True),
            made.CombineSegmentsStep(
                [made.AddToken("<s>", token_type_id=0), made.Sequence(token_type_id=0)]
            ),
            made.PaddingStep(token="<s>", max_length=16, pad_to_max_length=True),
            made.VocabDecoderStep(skip_tokens=skipped),
            made.RegexDecodingStep.replace_sp_spaces(),
            made.ByteFallbackStep(),
            made.FuseStep(),
            made.RegexDecodingStep.strip_forward_space(),
            made.UTF8ValidateStep(),
        ]
    )
    tokenizer = pipeline.get_tokenizer_ov_subgraph()
    tokenizer.set_rt_info("2", "eos_token_id")
    into.mkdir(parents=True, exist_ok=True)
    ov.save_model(tokenizer, str(into / "openvino_tokenizer.xml"))
    ov.save_model(pipeline.get_detokenizer_ov_subgraph(), str(into / "openvino_detokenizer.xml"))
    return into


def with_patterns(folder: Path, into: Path, patterns: Sequence[str], *, nfc: bool = False) -> Path:
    """A copy of ``folder`` that cuts text into words by ``patterns``.

    Its vocabulary merges a letter with what follows it too: "e" with a space, "n" with a newline.
    """
    shutil.copytree(folder, into)
    model = with_tokenizers(core()).read_model(str(folder / "openvino_tokenizer.xml"))
    (split,), (bpe,) = nodes(model, "SpecialTokensSplit"), nodes(model, "BPETokenizer")
    factory = NodeFactory()
    factory.add_extension(str(_extension()))
    parts = list(split.outputs())
    if nfc:
        settings = {"normalization_form": "nfc", "remove_extra_whitespaces": False}
        parts[2:] = factory.create("CharsMapNormalization", parts[2:], settings).outputs()
    for pattern in patterns:
        text = ops.constant(np.frombuffer(pattern.encode(), dtype=np.uint8))
        given = [*parts, text.output(0)]
        settings = {"behaviour": "isolate", "invert": False, "max_splits": -1}
        parts = list(factory.create("RegexSplit", given, settings).outputs())
    for place, output in enumerate(parts[:5]):
        bpe.input(place).replace_source_output(output)
    _append(bpe, 5, [b"e ", b"n\n"])
    _append(bpe, 8, [b"e", b"n"])
    _append(bpe, 11, [b" ", b"\n"])
    _save(model, into, "openvino_tokenizer")
    model = core().read_model(str(folder / "openvino_detokenizer.xml"))
    (decoder,) = nodes(model, "VocabDecoder")
    _append(decoder, 1, [b"e ", b"n\n"])
    _save(model, into, "openvino_detokenizer")
    return into


def replaced(folder: Path, into: Path, place: int, values: np.ndarray[Any, Any]) -> Path:
    """A copy of ``folder`` with another constant at input ``place`` of what makes ids."""
    shutil.copytree(folder, into)
    model = with_tokenizers(core()).read_model(str(folder / "openvino_tokenizer.xml"))
    (bpe,) = nodes(model, "BPETokenizer")
    assert source(bpe, place).get_type_name() == "Constant"
    bpe.input(place).replace_source_output(ops.constant(values).output(0))
    _save(model, into, "openvino_tokenizer")
    return into


def without_special_split(folder: Path, into: Path) -> Path:
    """A copy of ``folder`` whose tokenizer looks for no special tokens."""
    shutil.copytree(folder, into)
    model = with_tokenizers(core()).read_model(str(folder / "openvino_tokenizer.xml"))
    (split,) = nodes(model, "SpecialTokensSplit")
    instead = [split.input_value(place) for place in range(5)]
    instead.append(ops.constant(np.array([False])).output(0))
    for output, other in zip(split.outputs(), instead, strict=True):
        for target in list(output.get_target_inputs()):
            target.replace_source_output(other)
    _save(model, into, "openvino_tokenizer")
    return into


def _append(node: Any, place: int, texts: Sequence[bytes]) -> None:
    known = Strings.of_input(node, place, "test")
    known.changed(dict(enumerate(texts, len(known)))).put(node, place)


def _extension() -> Path:
    return (
        Path(importlib.import_module("openvino_tokenizers").__path__[0])
        / "lib"
        / ("libopenvino_tokenizers.so")
    )


def _save(model: Any, into: Path, stem: str) -> None:
    for suffix in (".xml", ".bin"):
        (into / f"{stem}{suffix}").unlink()
    ov.save_model(model, str(into / f"{stem}.xml"), compress_to_fp16=False)
