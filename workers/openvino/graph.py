"""From a model's IR to the compiled PagedAttention form that the paged executor drives.

Owns what of the graph is checked and changed. Knows no cache memory, tokens or sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modeld.shared.errors import ModelLoadFailed
from modeld.workers.openvino.blocks import BLOCK_TOKENS, CachePort
from modeld.workers.openvino.native import PRECISION, core, ops, ov, words

SELECTED = "modeld_selected_rows"
_ONCE = (
    "input_ids",
    "position_ids",
    "max_context_len",
    "past_lens",
    "subsequence_begins",
    "block_indices",
    "block_indices_begins",
)


class NotPaged(Exception):
    """The model can't be driven block by block; the text says why."""


@dataclass(frozen=True)
class Compiled:
    """A model compiled for one KV type."""

    model: Any  # openvino.CompiledModel
    ports: tuple[CachePort, ...]
    layers: int
    vocabulary: int  # width of the logits
    selects: bool  # only the rows asked for are multiplied by the output matrix
    k_type: str  # as the compiled model says
    v_type: str


def read_model(folder: Path) -> Any:
    """The IR in ``folder``. Raises ModelLoadFailed with the library's words."""
    file = folder / "openvino_model.xml"
    try:
        return core().read_model(str(file))
    except Exception as error:
        raise ModelLoadFailed(
            f"OpenVINO can't read {file.name}: {words(error)}. Export or convert the model again.",
            metadata={"cause": "engine", "file": file.name},
        ) from None


def to_paged(model: Any) -> bool:
    """Turn a stateful model into its PagedAttention form, in place.

    Answers whether only selected rows go through the output matrix. Raises NotPaged.
    """
    try:
        # A private name of the library: whether it does what it did is proved by a probe.
        from openvino._offline_transformations import paged_attention_transformation
    except ImportError:
        raise NotPaged("this OpenVINO has no PagedAttention transformation") from None
    try:
        paged_attention_transformation(model)
    except Exception as error:
        raise NotPaged(f"the PagedAttention transformation fails: {words(error)}") from None
    if model.get_sinks():
        raise NotPaged("the model keeps state that the PagedAttention form doesn't hold")
    if len(model.outputs) != 1:
        raise NotPaged(f"it has {len(model.outputs)} outputs, not the logits alone")
    selects = _select_rows(model)
    _check_inputs(model, selects)
    return selects


def _check_inputs(model: Any, selects: bool) -> None:
    names = {name for port in model.inputs for name in port.get_names()}
    needed = {*_ONCE, *([SELECTED] if selects else [])}
    caches = [name for name in names if name.startswith(("key_cache.", "value_cache."))]
    if missing := needed - names:
        raise NotPaged(f"the PagedAttention form lacks the input {min(missing)}")
    if not caches:
        raise NotPaged("the PagedAttention form has no KV cache")
    for port in model.inputs:
        if not port.get_names() & {*needed, *caches}:
            raise NotPaged(f"the PagedAttention form has an input {port.get_any_name()!r} more")


def _select_rows(model: Any) -> bool:
    """Put a gather of rows before the output matrix, so that a prompt's logits cost one row."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() in ("Convert", "Multiply", "Divide", "Tanh", "Add"):
        node = node.input_value(0).get_node()
    if node.get_type_name() != "MatMul":
        return False
    rows = node.input_value(0)
    if rows.get_partial_shape().rank != 3:
        return False
    wanted = ops.parameter(ov.PartialShape([-1]), ov.Type.i64, name=SELECTED)
    wanted.output(0).get_tensor().set_names({SELECTED})
    chosen = ops.gather(rows, wanted, ops.constant(np.int64(0)))
    node.input(0).replace_source_output(chosen.output(0))
    model.add_parameters([wanted])
    model.validate_nodes_and_infer_types()
    return True


def compile_paged(
    model: Any, selects: bool, *, device: str, kv_type: str, threads: int
) -> Compiled:
    """Compile, with the KV type passed explicitly and read back.

    Raises NotPaged where what comes out isn't what the executor can drive, and whatever the
    library raises.
    """
    settings: Mapping[str, Any] = {
        "KV_CACHE_PRECISION": kv_type,
        "INFERENCE_PRECISION_HINT": PRECISION,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        # Pinned threads of two workers would share the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    compiled = core().compile_model(model, device, settings)
    ports = []
    for port in compiled.inputs:
        name = next((n for n in port.get_names() if "_cache." in n), "")
        if not name:
            continue
        blocks, *rest = list(port.get_partial_shape())
        if blocks.is_static or any(one.is_dynamic for one in rest):
            raise NotPaged(f"the cache {name} is shaped {port.get_partial_shape()}")
        shape = tuple(one.get_length() for one in rest)
        ports.append(CachePort(name, port.get_element_type(), shape))
    ports.sort(key=_place)
    keys = [port for port in ports if port.name.startswith("key_")]
    if not keys or len(keys) * 2 != len(ports):
        raise NotPaged(f"it has {len(keys)} key caches of {len(ports)}")
    if BLOCK_TOKENS not in keys[0].shape and kv_type not in ("u8", "u4"):
        raise NotPaged(f"its cache blocks are shaped {keys[0].shape}, not of {BLOCK_TOKENS} tokens")
    values = ports[len(keys)]
    width = compiled.outputs[0].get_partial_shape()[-1]
    if width.is_dynamic:
        raise NotPaged("the width of its logits isn't known")
    return Compiled(
        compiled,
        tuple(ports),
        len(keys),
        width.get_length(),
        selects,
        type_name(keys[0].element_type),
        type_name(values.element_type),
    )


def _place(port: CachePort) -> tuple[bool, int]:
    return port.name.startswith("value_"), int(port.name.rpartition(".")[2])


def type_name(element_type: Any) -> str:
    """``f16`` for the library's float16, and so on."""
    name: str = element_type.get_type_name()
    return name


Read = Callable[[Path], Any]
