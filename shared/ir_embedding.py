"""Whether an OpenVINO folder holds an embedding model, and how it says its vectors are made.

Reads a bounded part of its files and no weights; loads no engine.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from modeld.shared.capacity import LayerFacts, LayerKind, ModelFacts
from modeld.shared.ir_files import MAX_XML_BYTES, open_regular, read_object, refused

POOLING_FILE = Path("1_Pooling") / "config.json"  # as sentence-transformers exports it
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
}
_HIDDEN = re.compile(rb'names="[^"]{0,200}\blast_hidden_state\b')
# What a model that generates has: its logits, or the states that it keeps.
_GENERATES = re.compile(rb'names="[^"]{0,200}\blogits\b|type="ReadValue"|"past_key_values\.')
_CHUNK_BYTES = 1024 * 1024
_OVERLAP_BYTES = 1024


def embeds(facts: ModelFacts) -> bool:
    """Whether these are an embedding model's facts: an IR whose layers keep nothing."""
    kinds = {run.kind for run in facts.layers}
    return facts.model_type == "openvino" and kinds == {LayerKind.NONE}


def gives_hidden_states(xml: Path) -> bool:
    """Whether an IR answers hidden states of its tokens and neither logits nor a cache.

    Raises ModelLoadFailed for a file that can't be read.
    """
    found = False
    descriptor, size = open_regular(xml)
    with os.fdopen(descriptor, "rb") as file:
        if size > MAX_XML_BYTES:
            raise refused(xml, f"it has {size} bytes, and at most {MAX_XML_BYTES} are read")
        window = b""
        while chunk := file.read(_CHUNK_BYTES):
            window = window[-_OVERLAP_BYTES:] + chunk
            if _GENERATES.search(window):
                return False
            found = found or _HIDDEN.search(window) is not None
    return found


def layers_without_kv(count: int) -> tuple[LayerFacts, ...]:
    """An embedding model's layers, for planning; ``count`` 0: it isn't told."""
    return (LayerFacts(max(count, 1), 0, 0, 0, kind=LayerKind.NONE),)


def declared_pooling(folder: Path) -> str:
    """mean, cls, last or a name that isn't served; several joined by ``+``; "": none is declared.

    Raises ModelLoadFailed for a file that can't be read.
    """
    config = read_object(folder / POOLING_FILE)
    return "+".join(name for mode, name in _MODES.items() if config.get(mode) is True)
