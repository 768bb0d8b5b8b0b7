"""OpenVINO IR folders for tests, made by the engine's own conversion of a GGUF file.

Owns the conversion, in a process of its own, and a tiny float16 model that converts in under a
second. The same GGUF serves the llama engine, so both can be compared.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFWriter

from tests.support.tiny_models import CONTEXT, TEMPLATE, vocabulary

MODEL, TOKENIZER, DETOKENIZER = (
    f"openvino_{part}.xml" for part in ("model", "tokenizer", "detokenizer")
)
HEADS, KV_HEADS, HEAD_LENGTH, LAYERS = 4, 2, 64, 2
_WIDTH = HEADS * HEAD_LENGTH
_CONVERT = """
import sys
import openvino_genai
openvino_genai.LLMPipeline(sys.argv[1], "CPU", enable_save_ov_model=True)
"""


def converted(gguf: Path, into: Path) -> Path:
    """Converts ``gguf`` to an IR in the folder ``into``, which is made and answered.

    The engine writes beside its input, so it gets a link to it there, which is removed.
    """
    into.mkdir(parents=True, exist_ok=True)
    source = into / "model.gguf"
    try:
        source.hardlink_to(gguf)
    except OSError:  # another file system
        shutil.copyfile(gguf, source)
    command = [sys.executable, "-c", _CONVERT, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    source.unlink()
    missing = [name for name in (MODEL, TOKENIZER, DETOKENIZER) if not (into / name).is_file()]
    if done.returncode or missing:
        raise RuntimeError(f"converting {gguf} failed, {missing=}: {done.stdout}{done.stderr}")
    return into


def tiny_gguf(
    path: Path,
    *,
    seed: int = 1,
    layers: int = LAYERS,
    add_bos: bool = False,
    pre: str = "smollm",
    user_defined: Sequence[str] = (),
    controls: Sequence[str] = (),
) -> Path:
    """A llama of ``layers`` layers whose float16 weights the engine can convert.

    ``pre`` names the pre-tokenizer; ``user_defined`` are tokens found in plain text, ``controls``
    are control tokens at the vocabulary's end.
    """
    writer = GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_F16))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_LENGTH)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_add_bos_token(add_bos)
    size = _add_vocabulary(writer, pre, user_defined, controls)
    _add_weights(writer, size, layers, np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(
    writer: GGUFWriter, pre: str, user_defined: Sequence[str], controls: Sequence[str]
) -> int:
    tokens, types, merges = vocabulary()
    tokens += [*user_defined, *controls]
    types += [int(gguf.TokenType.USER_DEFINED)] * len(user_defined)
    types += [int(gguf.TokenType.CONTROL)] * len(controls)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    writer.add_vocab_size(len(tokens))
    return len(tokens)


def _add_weights(writer: GGUFWriter, size: int, layers: int, random: np.random.Generator) -> None:
    def matrix(name: str, *shape: int, scale: float) -> None:
        values = random.standard_normal(shape) * scale * shape[-1] ** -0.5
        writer.add_tensor(name, values.astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(_WIDTH, dtype=np.float32))

    matrix("token_embd.weight", size, _WIDTH, scale=_WIDTH**0.5)
    norm("output_norm.weight")
    matrix("output.weight", size, _WIDTH, scale=2)
    kv_width = KV_HEADS * HEAD_LENGTH
    for layer in range(layers):
        name = f"blk.{layer}."
        norm(name + "attn_norm.weight")
        matrix(name + "attn_q.weight", _WIDTH, _WIDTH, scale=1.5)
        matrix(name + "attn_k.weight", kv_width, _WIDTH, scale=1.5)
        matrix(name + "attn_v.weight", kv_width, _WIDTH, scale=1)
        matrix(name + "attn_output.weight", _WIDTH, _WIDTH, scale=1)
        norm(name + "ffn_norm.weight")
        for part in ("gate", "up", "down"):
            matrix(f"{name}ffn_{part}.weight", _WIDTH, _WIDTH, scale=1)


def tiny_ir(
    into: Path, *, seed: int = 1, layers: int = LAYERS, controls: Sequence[str] = ()
) -> Path:
    """The IR of ``tiny_gguf`` in the folder ``into``, which is made and answered."""
    into.mkdir(parents=True, exist_ok=True)
    source = tiny_gguf(into / "source.gguf", seed=seed, layers=layers, controls=controls)
    converted(source, into)
    source.unlink()
    return into
