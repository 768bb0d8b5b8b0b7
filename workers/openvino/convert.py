"""Converts a GGUF file for OpenVINO: ``python -P -m modeld.workers.openvino.convert``.

Reads one line of JSON, a ``ConvertRequest``, from standard input and prints lines of JSON, each a
``ConvertLine``. The engine converts; what it leaves out is written from the GGUF's own header; and
the result must compute. The process is short-lived: the file is not trusted, and a crash costs
nobody else. Plans nothing and knows no store.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modeld.shared.converting import ConvertLine, ConvertRequest
from modeld.shared.errors import (
    InsufficientMemory,
    InvalidRequest,
    ModeldError,
    ModelLoadFailed,
    StorageFull,
)
from modeld.shared.gguf_convertible import check_convertible
from modeld.shared.gguf_header import GgufHeader, check_extents, read_header
from modeld.shared.gguf_vocabulary import read_vocabulary
from modeld.shared.ir_check import MODEL, check_folder
from modeld.workers.memory_guard import offer_to_oom_killer
from modeld.workers.openvino.native import PRECISION, core, words
from modeld.workers.openvino.offsets import restore
from modeld.workers.openvino.special_tokens import SIDECAR, SpecialTokens, of_gguf

SOURCE = "source.gguf"  # the engine writes beside its input
MAX_REQUEST_BYTES = 1 << 20
PROBE_TEXT = "Hello, world"
PROBE_TOKENS = 3  # that the converted model must generate
_NICE = 5  # behind workers with open sessions
_PR_SET_PDEATHSIG = 1

Tell = Callable[[float], None]


def convert(request: ConvertRequest, tell: Tell) -> None:
    """Convert in this process, which may crash with the engine.

    Raises ModelLoadFailed, UnsupportedFeature, InvalidRequest, InsufficientMemory or StorageFull.
    """
    source, folder = Path(request.source), Path(request.folder)
    if not source.is_absolute() or not folder.is_absolute():
        raise InvalidRequest.of("source", request.source, "an absolute path")
    header = read_header(source)
    check_extents(header, header.file_bytes)
    check_convertible(header)
    specials = _specials(source, header)
    tell(0.05)
    _run_engine(source, folder)
    tell(0.6)
    restore(source, header, folder)
    tell(0.7)
    _write_settings(folder, header, specials)
    try:
        check_folder(folder)
    except ModelLoadFailed as error:
        raise _does_not_compute(error.message) from None
    tell(0.8)
    _check_computes(folder, header.vocabulary)
    tell(0.95)


def _run_engine(source: Path, folder: Path) -> None:
    """Leaves the models that the engine makes in ``folder``, and nothing else."""
    import openvino_genai

    link = folder / SOURCE
    link.symlink_to(source)  # a second hard link would be the store's to explain
    try:
        openvino_genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    except (RuntimeError, ValueError, LookupError) as error:
        raise ModelLoadFailed(
            f"OpenVINO can't convert this GGUF file. It said: {words(error)}. Import it as type "
            "llama, or import a folder that was exported for OpenVINO.",
            metadata={"cause": "conversion"},
        ) from None
    finally:
        link.unlink()
    gc.collect()


# --- what the engine leaves out ------------------------------------------------------------------


def _specials(source: Path, header: GgufHeader) -> SpecialTokens:
    vocabulary = read_vocabulary(source, header)
    named = {k: v for k, v in header.metadata.items() if k.startswith("tokenizer.ggml.")}
    named["tokenizer.ggml.tokens"] = vocabulary.tokens  # type: ignore[assignment]
    named["tokenizer.ggml.token_type"] = vocabulary.types
    return of_gguf(named)


def _write_settings(folder: Path, header: GgufHeader, specials: SpecialTokens) -> None:
    eos, padding = header.eos_id, header.integer("tokenizer.ggml.padding_token_id", -1)
    if not 0 <= padding < header.vocabulary:
        padding = eos if eos is not None else 0
    ids = {"bos_token_id": header.bos_id, "pad_token_id": padding}
    _write(folder / "config.json", {**_config(header), **ids, "eos_token_id": eos})
    ends = sorted(specials.eog)
    _write(folder / "generation_config.json", {**ids, "eos_token_id": ends})
    tokenizer = {
        # "" where there is none: the engine's own notes may hold another's.
        "chat_template": header.chat_template or "",
        "bos_token": header.bos_text or None,
        "eos_token": header.eos_text or None,
        "add_bos_token": header.add_bos,
    }
    _write(folder / "tokenizer_config.json", tokenizer)
    _write(folder / SIDECAR, specials.as_json())


def _config(header: GgufHeader) -> dict[str, Any]:
    """As exports name these settings, from the GGUF's."""
    return {
        "model_type": header.architecture,
        "num_hidden_layers": header.block_count,
        "num_attention_heads": header.head_count,
        "num_key_value_heads": header.head_count_kv[0],
        "head_dim": header.key_length,
        "hidden_size": header.embedding_length,
        "intermediate_size": header.feed_forward_length,
        "max_position_embeddings": header.context_length,
        "vocab_size": header.vocabulary,
        "rms_norm_eps": header.metadata[header.own("attention.layer_norm_rms_epsilon")],
        "rope_theta": header.metadata.get(header.own("rope.freq_base"), 10000.0),
        "tie_word_embeddings": all(t.name != "output.weight" for t in header.tensors),
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


# --- the proof -----------------------------------------------------------------------------------


def _check_computes(folder: Path, vocabulary: int) -> None:
    """Raise ModelLoadFailed unless the converted model generates: from a tokenized text, greedily,
    with finite numbers that differ from each other, and text comes out.
    """
    import openvino_genai

    try:
        tokenizer = openvino_genai.Tokenizer(str(folder))
        prompt = [int(i) for i in np.asarray(tokenizer.encode(PROBE_TEXT).input_ids.data)[0]]
        if not prompt or not all(0 <= token < vocabulary for token in prompt):
            raise _does_not_compute(f"its tokenizer made {prompt[:8]} of a text")
        generated = _generated(folder, prompt, vocabulary)
        tokenizer.decode(generated)
    except RuntimeError as error:
        raise _does_not_compute(words(error)) from None


def _generated(folder: Path, prompt: list[int], vocabulary: int) -> list[int]:
    settings = {"INFERENCE_PRECISION_HINT": PRECISION}
    model = core().compile_model(str(folder / f"{MODEL}.xml"), "CPU", settings)
    run = model.create_infer_request()
    given, past, generated = prompt, 0, list[int]()
    for _ in range(PROBE_TOKENS):
        end = past + len(given)
        run.infer(
            {
                "input_ids": np.array([given], np.int64),
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(past, end, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        logits = np.array(run.get_output_tensor(0).data[0, -1], np.float32)
        if logits.shape != (vocabulary,):
            raise _does_not_compute(f"it has {logits.shape[-1]} logits for {vocabulary} tokens")
        if not np.isfinite(logits).all() or float(np.ptp(logits)) == 0:
            raise _does_not_compute("its logits are not finite, or all the same")
        generated.append(int(logits.argmax()))
        given, past = generated[-1:], end
    return generated


def _does_not_compute(why: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"What OpenVINO made of this GGUF file doesn't work: {why}. Import it as type llama, or "
        "import a folder that was exported for OpenVINO.",
        metadata={"cause": "conversion"},
    )


# --- the process ---------------------------------------------------------------------------------


def _take_standard_output() -> int:
    """The descriptor for the answer, closed to all else: what anything prints, now or as the
    process ends, goes to the standard error.
    """
    kept = os.dup(1)
    os.dup2(2, 1)
    return kept


def _end_with_caller() -> None:
    """Nobody waits for the rest of a conversion whose caller has died."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(1)

    threading.Thread(target=watch, name="caller", daemon=True).start()


def _as_error(error: Exception) -> ModeldError:
    if isinstance(error, ModeldError):
        return error
    if isinstance(error, MemoryError):
        return InsufficientMemory(
            "There isn't enough memory to convert this GGUF file for OpenVINO. Unload models or "
            "close programs, and try again.",
            metadata={"cause": "conversion"},
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageFull(
            "No space left for the converted model: nothing was half written. Free some space on "
            "the data root's filesystem and try again.",
            metadata={"what": "a converted model"},
        )
    return ModelLoadFailed(
        f"Converting this GGUF file failed ({type(error).__name__}: {str(error)[:300]}).",
        metadata={"cause": "conversion"},
    )


def _read_request() -> ConvertRequest:
    line = b""
    while not line.endswith(b"\n") and len(line) < MAX_REQUEST_BYTES:
        byte = os.read(0, 1)  # no further: the rest is the caller's sign of life
        if not byte:
            break
        line += byte
    return msgspec.json.decode(line, type=ConvertRequest)


def main(argv: Sequence[str]) -> int:
    """Exit code 0 with a last line wherever one can be given; 2 for a wrong command line."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -P -m modeld.workers.openvino.convert < request\n")
        return 2
    out = _take_standard_output()

    def say(line: ConvertLine) -> None:
        raw = msgspec.json.encode(line) + b"\n"
        while raw:
            raw = raw[os.write(out, raw) :]

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    offer_to_oom_killer()
    os.nice(_NICE)
    last = ConvertLine(fraction=1.0, done=True)
    try:
        request = _read_request()
        _end_with_caller()
        convert(request, lambda fraction: say(ConvertLine(fraction=fraction)))
    except Exception as error:  # the caller must learn it; there is nobody else to tell
        last = ConvertLine(error=_as_error(error).to_wire())
    say(last)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
