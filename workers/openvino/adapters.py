"""LoRA adapters in a model's graph: each adds its low-rank product to the weights it was made for.

Owns the reading of their numbers and the change of the graph before it is compiled. Knows no
sessions and no store. An adapter is applied whole, or the load fails by name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modeld.shared.errors import DigestMismatch, ModelLoadFailed, unsupported
from modeld.shared.lora import BadLora, LoraFile, LoraPair, read_lora
from modeld.shared.messages import AdapterIn
from modeld.shared.safetensors import TensorEntry
from modeld.workers.openvino.native import ops, ov
from modeld.workers.openvino.targets import weight_products

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Matrix = NDArray[np.float32]

# An input of one number that all adapters' products are multiplied by: 1, or 0 to do without.
SWITCH = "modeld_adapters"


@dataclass(frozen=True)
class Applied:
    """What was done: adapters, model weights that they change, and the numbers added for it.

    ``changeable``: weights of the model that an adapter could change.
    """

    changeable: int = 0
    adapters: int = 0
    weights: int = 0
    memory_bytes: int = 0
    ranks: tuple[int, ...] = ()


NOTHING_APPLIED = Applied()


@dataclass
class _Change:
    """What all adapters add to one weight, B with everything that scales it."""

    a: list[Matrix]
    b: list[Matrix]


def apply(model: Any, adapters: Sequence[AdapterIn]) -> Applied:
    """Change the graph in place so that ``y += SWITCH · Σ scale · alpha/rank · (x Aᵀ) Bᵀ``.

    For a graph in its PagedAttention form, or before that. Raises ModelLoadFailed, with the graph
    as it was, where an adapter can't be read or fits the model in any place badly; DigestMismatch
    where a file isn't the one that was named.
    """
    products = weight_products(model)
    if not adapters:
        return Applied(len(products))
    nodes = {node.get_friendly_name(): node for node in model.get_ops()}
    files = [(adapter, _read(adapter)) for adapter in adapters]
    for adapter, file in files:
        for pair in file.pairs:
            _check_fits(adapter, pair, products, nodes)
    changes: dict[str, _Change] = {}
    for adapter, file in files:
        for pair in file.pairs:
            a, b = _numbers(adapter, pair)
            change = changes.setdefault(products[pair.target], _Change([], []))
            change.a.append(a)
            change.b.append(b)
    switch = ops.parameter(ov.PartialShape([1]), ov.Type.f32, name=SWITCH)
    switch.output(0).get_tensor().set_names({SWITCH})
    memory = 0
    for name, change in changes.items():
        memory += _add(nodes[name], switch, np.concatenate(change.a), np.hstack(change.b))
    model.add_parameters([switch])
    model.validate_nodes_and_infer_types()
    ranks = sorted({rank for _, file in files for rank in file.ranks})
    return Applied(len(products), len(files), len(changes), memory, tuple(ranks))


def refuse(adapters: Sequence[AdapterIn], what: str) -> None:
    """Raises UnsupportedFeature (capability ``adapters``) if there are any."""
    if adapters:
        raise unsupported("adapters", f"{what} takes none: leave them out.".capitalize())


def _add(node: Any, switch: Any, a: Matrix, b: Matrix) -> int:
    """Put the low-rank product beside a weight's; the bytes that its numbers take."""
    readers = list(node.output(0).get_target_inputs())
    inner = ops.matmul(node.input_value(0), ops.constant(a), False, True)
    switched = ops.multiply(inner, switch)
    outer = ops.matmul(switched, ops.constant(b), False, True)
    total = ops.add(node.output(0), outer)
    total.set_friendly_name(f"{node.get_friendly_name()}/with_adapters")
    for reader in readers:
        reader.replace_source_output(total.output(0))
    return int(a.nbytes + b.nbytes)


# --- the files -----------------------------------------------------------------------------------


def _read(adapter: AdapterIn) -> LoraFile:
    path = Path(adapter.path)
    if not math.isfinite(adapter.scale):
        raise _refused(adapter, f"its scale is {adapter.scale}, not a finite number")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != adapter.digest:
            raise DigestMismatch(
                f"The adapter {path.name} has the SHA-256 {digest}, not {adapter.digest}. Import "
                "it again.",
                metadata={"digest": digest, "expected": adapter.digest},
            )
        lora = read_lora(path)
    except BadLora as error:
        raise _refused(adapter, str(error)) from None
    except OSError as error:
        raise _refused(adapter, f"it can't be read: {error.strerror or error}") from None
    if not lora.alpha_known:
        raise _refused(adapter, "it doesn't say its alpha, without which its strength is unknown")
    return lora


def _check_fits(
    adapter: AdapterIn, pair: LoraPair, products: Mapping[str, str], nodes: Mapping[str, Any]
) -> None:
    name = products.get(pair.target)
    if name is None:
        near = sorted(path for path in products if path.rpartition(".")[2] in pair.target)[:2]
        hint = f" It has {', '.join(near)}." if near else ""
        raise _refused(
            adapter, f"the model has no weight {pair.target!r} that could be changed.{hint}",
            target=pair.target,
        )  # fmt: skip
    shape = nodes[name].input_value(1).get_shape()
    if [pair.outputs, pair.inputs] != list(shape):
        raise _refused(
            adapter,
            f"its {pair.target!r} is for a weight of {pair.outputs} x {pair.inputs}, and the "
            f"model's is {shape[0]} x {shape[1]}",
            target=pair.target,
        )


def _numbers(adapter: AdapterIn, pair: LoraPair) -> tuple[Matrix, Matrix]:
    """A, and B times everything that scales the product."""
    a, b = _matrix(Path(adapter.path), pair.a), _matrix(Path(adapter.path), pair.b)
    b = b * np.float32(adapter.scale * pair.scaling)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise _refused(
            adapter, f"its {pair.target!r} holds what isn't a number", target=pair.target
        )
    return a, b


def _matrix(path: Path, entry: TensorEntry) -> Matrix:
    with path.open("rb") as file:
        file.seek(entry.begin)
        raw = file.read(entry.end - entry.begin)
    if entry.dtype == "BF16":
        values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, "<f4" if entry.dtype == "F32" else "<f2").astype(np.float32)
    return values.reshape(entry.shape)


def _refused(adapter: AdapterIn, why: str, **more: str) -> ModelLoadFailed:
    return ModelLoadFailed(
        f"The adapter {adapter.digest[:12]} can't be applied: {why}. Nothing is loaded; leave the "
        "adapter out, or use it with the model that it was made for.",
        metadata={"cause": "adapter", "adapter": adapter.digest, **more},
    )
