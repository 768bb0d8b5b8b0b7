"""OpenVINO folders written by hand: whole by their files, with weights of noise and no engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "vocab_size": 100,
}
TOKENIZER = {"chat_template": "{{ messages }}", "bos_token": None, "eos_token": "</s>"}


def net(*constants: tuple[int, int], version: str = "11", outputs: str = "logits") -> str:
    """A model's XML with (offset, bytes) of its constants."""
    layers = "".join(
        f'<layer id="{number}" name="c" type="Const" version="opset1"><data element_type="u8" '
        f'shape="{size}" offset="{offset}" size="{size}" /></layer>\n'
        for number, (offset, size) in enumerate(constants)
    )
    return (
        f'<?xml version="1.0"?>\n<net name="Model0" version="{version}">\n<layers>\n{layers}'
        f'<layer id="99" name="r" type="Result" version="opset1" output_names="{outputs}"><input>'
        f'<port id="0" names="{outputs}" /></input></layer>\n</layers>\n</net>\n'
    )


def write_pair(folder: Path, stem: str, size: int, **of: Any) -> None:
    """``<stem>.xml`` and a ``<stem>.bin`` of as many bytes as it claims."""
    (folder / f"{stem}.xml").write_text(net((0, size // 2), (size // 2, size - size // 2), **of))
    (folder / f"{stem}.bin").write_bytes(bytes(i % 251 for i in range(size)))


def ir_folder(folder: Path, *, size: int = 5000) -> Path:
    """A whole folder, with ``size`` bytes of weights."""
    folder.mkdir(parents=True)
    write_pair(folder, "openvino_model", size)
    write_pair(folder, "openvino_tokenizer", 300)
    write_pair(folder, "openvino_detokenizer", 200)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    return folder
