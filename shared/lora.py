"""A LoRA adapter file: pairs of low-rank matrices by the weight that each changes.

Reads the header only, for the store and for the worker alike, so that both judge by one rule.
Knows no engine.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modeld.shared.safetensors import (
    BadSafetensors,
    SafetensorsHeader,
    TensorEntry,
    read_header,
)

TYPES = ("F32", "F16", "BF16")
MAX_RANK = 4096
_PREFIX = re.compile(r"^(?:base_model\.model\.)?")
_SIDE = re.compile(r"^(?P<target>.+)\.lora_(?P<side>A|B)(?:\.default)?\.weight$")
_ALPHA = re.compile(r"^(?P<target>.+)\.alpha$")


class BadLora(ValueError):
    """What is wrong with the adapter, in words that can follow its name."""


@dataclass(frozen=True)
class LoraPair:
    """y += scaling · (x Aᵀ) Bᵀ, with A of rank × inputs and B of outputs × rank.

    ``scaling`` is alpha / rank, after the LoRA paper (Hu et al. 2021, section 4.1).
    """

    target: str  # as in model.layers.0.self_attn.q_proj
    rank: int
    inputs: int
    outputs: int
    scaling: float
    a: TensorEntry
    b: TensorEntry


@dataclass(frozen=True)
class LoraFile:
    pairs: tuple[LoraPair, ...]  # by target
    file_bytes: int
    alpha_known: bool  # by the file itself; else ``scaling`` is 0

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({pair.rank for pair in self.pairs}))

    @property
    def memory_bytes(self) -> int:
        """As the engine holds it: every number in 32 bits."""
        return sum(4 * pair.rank * (pair.inputs + pair.outputs) for pair in self.pairs)


def read_lora(path: Path) -> LoraFile:
    """Raises BadLora for anything but a whole adapter of plain LoRA pairs, and OSError.

    Alpha is, in this order: a tensor ``<target>.alpha``; the header's metadata ``lora_alpha``, as
    a number. Rank is A's first dimension.
    """
    try:
        header = read_header(path)
    except BadSafetensors as error:
        raise BadLora(str(error)) from None
    sides: dict[str, dict[str, TensorEntry]] = {}
    alphas: dict[str, TensorEntry] = {}
    for name, entry in header.tensors.items():
        bare = _PREFIX.sub("", name)
        if side := _SIDE.match(bare):
            pair = sides.setdefault(side["target"], {})
            if side["side"] in pair:
                raise BadLora(f"the target {side['target'][:100]!r} has two lora_{side['side']}")
            pair[side["side"]] = entry
        elif alpha := _ALPHA.match(bare):
            alphas[alpha["target"]] = entry
        else:
            raise BadLora(
                f"its tensor {name[:100]!r} is no lora_A, lora_B or alpha: only plain LoRA is taken"
            )
    if not sides:
        raise BadLora("it holds no lora_A and lora_B at all")
    if strays := sorted(set(alphas) - set(sides)):
        raise BadLora(f"it has an alpha for {strays[0][:100]!r} and no pair")
    common = _metadata_alpha(header)
    pairs = []
    known = True
    with path.open("rb") as file:
        for target in sorted(sides):
            value = _alpha_of(file, alphas[target]) if target in alphas else common
            known = known and value is not None
            pairs.append(_pair(target, sides[target], value))
    return LoraFile(tuple(pairs), header.file_bytes, known)


def _pair(target: str, sides: Mapping[str, TensorEntry], alpha: float | None) -> LoraPair:
    shown = target[:100]
    if set(sides) != {"A", "B"}:
        raise BadLora(f"the target {shown!r} has a lora_{min(sides)} and not the other one")
    a, b = sides["A"], sides["B"]
    for entry in (a, b):
        if entry.dtype not in TYPES:
            raise BadLora(
                f"the target {shown!r} is of type {entry.dtype}; allowed are {', '.join(TYPES)}"
            )
        if len(entry.shape) != 2 or 0 in entry.shape:
            raise BadLora(f"the target {shown!r} has a matrix of shape {list(entry.shape)}")
    if a.shape[0] != b.shape[1] or a.shape[0] > MAX_RANK:
        raise BadLora(
            f"the target {shown!r} has A of {list(a.shape)} and B of {list(b.shape)}: A's first "
            f"and B's second dimension are one rank, of at most {MAX_RANK}"
        )
    rank = a.shape[0]
    return LoraPair(target, rank, a.shape[1], b.shape[0], (alpha or 0.0) / rank, a, b)


def _metadata_alpha(header: SafetensorsHeader) -> float | None:
    text = header.metadata.get("lora_alpha")
    return None if text is None else _finite(text, "its metadata lora_alpha")


def _finite(text: Any, what: str) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or isinstance(text, bool):
        raise BadLora(f"{what} is {str(text)[:40]!r}, not a number")
    return value


def _alpha_of(file: Any, entry: TensorEntry) -> float:
    if math.prod(entry.shape) != 1 or entry.dtype not in TYPES:
        raise BadLora(f"its tensor {entry.name[:100]!r} isn't one number of {', '.join(TYPES)}")
    file.seek(entry.begin)
    raw = file.read(entry.end - entry.begin)
    if entry.dtype == "BF16":
        raw, form = b"\0\0" + raw, "<f"
    else:
        form = "<f" if entry.dtype == "F32" else "<e"
    return _finite(struct.unpack(form, raw)[0], f"its tensor {entry.name[:100]!r}")


def config_alpha(text: bytes) -> float:
    """``lora_alpha`` of a PEFT adapter_config.json.

    Raises BadLora where it has none, or asks for what plain LoRA isn't.
    """
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        raise BadLora("its adapter_config.json isn't JSON") from None
    if not isinstance(config, dict):
        raise BadLora("its adapter_config.json isn't a map")
    if config.get("peft_type", "LORA") != "LORA":
        raise BadLora(f"it is of type {str(config['peft_type'])[:40]!r}, not LORA")
    for name in ("use_dora", "use_rslora", "fan_in_fan_out", "alpha_pattern", "modules_to_save"):
        if config.get(name):
            raise BadLora(f"its adapter_config.json sets {name}, which isn't served")
    if config.get("bias", "none") != "none":
        raise BadLora("its adapter_config.json trains biases, which isn't served")
    if isinstance(config.get("lora_alpha"), str):
        raise BadLora("its adapter_config.json's lora_alpha is text, not a number")
    return _finite(config.get("lora_alpha"), "its adapter_config.json's lora_alpha")
