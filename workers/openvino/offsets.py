"""Offsets of four-bit weights as the GGUF file has them, in the place of the converter's rounded
ones.

A block of Q4_1 or Q4_K means ``scale * q - offset``; the engine's converter writes it as
``scale * (q - zero)`` with ``zero`` rounded to a whole number, off by up to half a step for a whole
block. Here ``zero`` gets its fraction back. Knows those two formats (ggml's ``block_q4_1`` and
``block_q4_K``) and the graph that the converter writes for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import ModelLoadFailed
from modeld.shared.gguf_convertible import ROUNDED_TYPES
from modeld.shared.gguf_header import GgufHeader, tensor_size
from modeld.shared.gguf_parse import TensorInfo
from modeld.shared.gguf_types import TENSOR_TYPES
from modeld.shared.ir_check import MODEL
from modeld.workers.openvino.native import core, ops, ov

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Raw = NDArray[np.uint8]

GROUP = 32  # weights of one scale
_CLOSE = 2e-3  # relative: scales were rounded to float16 on the way
_ALL_EIGHT = 0x88  # two zero points of Q4_0 in a byte
_ATTENTION = re.compile(r"blk\.[0-9]+\.attn_(q|k)\.weight")


@dataclass(frozen=True)
class _Groups:
    """[rows, groups] of one tensor."""

    scales: Floats
    offsets: Floats


def restore(source: Path, header: GgufHeader, folder: Path) -> int:
    """Rewrite the converted model in ``folder`` where the GGUF ``source`` has such weights; how
    many tensors were restored.

    Raises ModelLoadFailed where the model's weights aren't recognised as that file's.
    """
    tensors = [
        tensor
        for tensor in header.tensors
        if TENSOR_TYPES[tensor.type_number].name in ROUNDED_TYPES
    ]
    if not tensors:
        return 0
    model = core().read_model(str(folder / f"{MODEL}.xml"))
    waiting = list(_rounded(model))
    found = 0
    for tensor in tensors:
        groups = _groups(source, header, tensor)
        held = [_in_pairs(groups, header, tensor), groups]
        place = next((p for p in waiting for g in held if g is not None and p.holds(g)), None)
        if place is None:
            raise _unknown(tensor.name)
        place.restore(next(g for g in held if g is not None and place.holds(g)))
        waiting.remove(place)
        found += 1
    if not all(place.exact for place in waiting):
        raise _unknown(f"{len(waiting)} more")
    model.validate_nodes_and_infer_types()
    _replace(model, folder)
    return found


def _unknown(what: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"What OpenVINO made of this GGUF file isn't what was seen of other files: its weights "
        f"({what}) can't be told apart, so that their precision can't be kept. Import it as type "
        "llama, or import a folder that was exported for OpenVINO.",
        metadata={"cause": "conversion"},
    )


def _replace(model: Any, folder: Path) -> None:
    aside = folder / f"{MODEL}-restored.xml"
    ov.save_model(model, str(aside), compress_to_fp16=False)
    for end in (".xml", ".bin"):  # the old ones may still be mapped, which a rename leaves alone
        aside.with_suffix(end).replace(folder / f"{MODEL}{end}")


# --- the graph -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Place:
    """Where the graph subtracts zero points from one tensor's weights, and scales the result."""

    subtract: Any
    multiply: Any
    scales: Floats  # [rows, groups]
    exact: bool  # as of Q4_0, whose zero points are all the same

    def holds(self, groups: _Groups) -> bool:
        if self.scales.shape != groups.scales.shape:
            return False
        first = np.s_[: min(len(self.scales), 4)]
        return all(
            np.allclose(self.scales[part], groups.scales[part], rtol=_CLOSE, atol=1e-7)
            for part in (first, np.s_[:])
        )

    def restore(self, groups: _Groups) -> None:
        scales, offsets = groups.scales, groups.offsets
        flat = scales == 0  # a block whose weights are all the same has no step, and q is 0
        zeros = np.where(flat, offsets, offsets / np.where(flat, 1, scales))
        self.subtract.input(1).replace_source_output(_constant(zeros))
        if (flat & (offsets != 0)).any():
            self.multiply.input(1).replace_source_output(_constant(np.where(flat, 1, scales)))


def _constant(values: Floats) -> Any:
    return ops.constant(values[..., None].astype(np.float16)).output(0)


def _rounded(model: Any) -> Iterator[_Place]:
    """The places of all weights of four bits with zero points of four bits."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Subtract":
            continue
        weights, zeros = (_behind_convert(node, which) for which in (0, 1))
        if weights is None or zeros is None:
            continue
        if zeros.get_output_shape(0) != [*weights.get_output_shape(0)[:-1], 1]:
            continue
        users = [target.get_node() for target in node.output(0).get_target_inputs()]
        if len(users) != 1 or users[0].get_type_name() != "Multiply":
            continue
        scales = users[0].input_value(1).get_node()
        if scales.get_type_name() != "Constant" or len(scales.get_output_shape(0)) != 3:
            continue
        exact = bool((np.asarray(zeros.data).reshape(-1).view(np.uint8) == _ALL_EIGHT).all())
        yield _Place(node, users[0], np.array(scales.data, np.float32)[..., 0], exact)


def _behind_convert(node: Any, which: int) -> Any | None:
    """The four-bit constant that an input converts."""
    convert = node.input_value(which).get_node()
    if convert.get_type_name() != "Convert":
        return None
    constant = convert.input_value(0).get_node()
    if constant.get_type_name() != "Constant" or constant.get_output_element_type(0) != ov.Type.u4:
        return None
    return constant


# --- the file ------------------------------------------------------------------------------------


def _groups(source: Path, header: GgufHeader, tensor: TensorInfo) -> _Groups:
    kind = TENSOR_TYPES[tensor.type_number]
    raw = np.fromfile(
        source,
        np.uint8,
        count=tensor_size(tensor),
        offset=header.data_offset + tensor.offset,
    ).reshape(-1, kind.block_bytes)
    groups = _of_q4_1(raw) if kind.name == "Q4_1" else _of_q4_k(raw)
    shape = (-1, tensor.dimensions[0] // GROUP)
    return _Groups(groups.scales.reshape(shape), groups.offsets.reshape(shape))


def _half(raw: Raw, at: int) -> Floats:
    return raw[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _of_q4_1(raw: Raw) -> _Groups:
    """A scale and a least value, which is the offset's negative."""
    return _Groups(_half(raw, 0), -_half(raw, 2))


def _of_q4_k(raw: Raw) -> _Groups:
    """Eight groups a block: two factors for all, and six bits a group for scale and offset, the
    upper two of the last four groups in the top bits of the first four's.
    """
    packed = raw[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    offsets = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return _Groups(_half(raw, 0) * scales, _half(raw, 2) * offsets)


def _in_pairs(groups: _Groups, header: GgufHeader, tensor: TensorInfo) -> _Groups | None:
    """As the converter orders a llama's query and key rows: halves of a head one after the other,
    where the file has them in turn. None for any other tensor.
    """
    named = _ATTENTION.fullmatch(tensor.name)
    if named is None or header.architecture != "llama":
        return None
    heads = header.head_count if named[1] == "q" else header.head_count_kv[0]

    def ordered(rows: Floats) -> Floats:
        paired = rows.reshape(heads, len(rows) // heads // 2, 2, -1)
        return paired.swapaxes(1, 2).reshape(rows.shape)

    return _Groups(ordered(groups.scales), ordered(groups.offsets))
