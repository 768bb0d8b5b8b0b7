"""Which matrix product of an IR is which of the model's weights, by the names of Hugging Face.

Owns the search, by names where the graph has them and by its structure where a converter left
none. Changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# "model.layers[0].self_attn.q_proj.weight", on a weight constant of a converted GGUF.
_CONSTANT = re.compile(r"^(?P<path>[A-Za-z_][\w.\[\]]*)\.weight$")
# "__module.model.layers.0.self_attn.q_proj/aten::linear/MatMul", on the product itself.
_TRACED = re.compile(r"^__module\.(?P<path>[\w.]+)/.+/MatMul")
# What a converted GGUF calls the sums after attention and after the feed-forward part, and the
# product of the latter's gate.
_ATTENTION = re.compile(r"^model\.layers\.self_attn\.add0\.layer(\d+)$")
_FEED = re.compile(r"^model\.layers\.self_attn\.add1\.layer(\d+)$")
_GATE = re.compile(r"^model\.layers\.self_attn\.mlp\.mul\.layer(\d+)$")
_WEIGHT_STEPS = frozenset({"Convert", "Multiply", "Subtract", "Reshape", "Transpose", "Constant"})
_ATTENDS = frozenset({"ScaledDotProductAttention", "PagedAttentionExtension"})
_LIMIT = 400  # nodes looked at from one place


def weight_products(model: Any) -> dict[str, str]:
    """Weight ("model.layers.0.self_attn.q_proj") → friendly name of its product's node.

    Only products whose second input is a weight, transposed (outputs by inputs). A weight that
    two products share isn't told.
    """
    nodes = model.get_ordered_ops()
    found: dict[str, list[str]] = {}
    for node in nodes:
        if is_product(node) and (path := _named(node)):
            found.setdefault(path, []).append(node.get_friendly_name())
    named = {path: names[0] for path, names in found.items() if len(names) == 1}
    taken = {name for names in found.values() for name in names}
    return named | {
        path: name
        for path, name in by_structure(nodes).items()
        if path not in found and name not in taken
    }


def is_product(node: Any) -> bool:
    """Whether it multiplies by a weight of outputs × inputs."""
    if node.get_type_name() != "MatMul":
        return False
    turned = node.get_attributes()
    shape = node.input_value(1).get_partial_shape()
    if turned["transpose_a"] or not turned["transpose_b"] or shape.rank != 2 or shape.is_dynamic:
        return False
    return _weight_constant(node) is not None


def _weight_constant(node: Any) -> Any | None:
    at = node.input_value(1).get_node()
    for _ in range(len(_WEIGHT_STEPS) * 2):
        kind = at.get_type_name()
        if kind == "Constant":
            return at
        if kind not in _WEIGHT_STEPS:
            return None
        at = at.input_value(0).get_node()
    return None


def _named(node: Any) -> str:
    if traced := _TRACED.match(node.get_friendly_name()):
        return traced["path"]
    at = node.input_value(1).get_node()
    while True:
        if named := _CONSTANT.match(at.get_friendly_name()):
            return re.sub(r"\[(\d+)\]", r".\1", named["path"])
        if at.get_type_name() == "Constant" or at.get_type_name() not in _WEIGHT_STEPS:
            return ""
        at = at.input_value(0).get_node()


# --- by structure --------------------------------------------------------------------------------


def by_structure(nodes: Iterable[Any]) -> Mapping[str, str]:
    """The same, from the sums and products that a converted GGUF names by layer. A layer whose
    structure is another than that of Llama's gets no names.
    """
    found: dict[str, str] = {}
    for node in nodes:
        name = node.get_friendly_name()
        if layer := _ATTENTION.match(name):
            parts = _attention(node)
        elif layer := _FEED.match(name):
            parts = _single("mlp.down_proj", node)
        elif layer := _GATE.match(name):
            parts = _gate(node)
        else:
            continue
        found |= {f"model.layers.{layer[1]}.{part}": product for part, product in parts.items()}
    return found


def _single(part: str, node: Any) -> dict[str, str]:
    """The product right behind one of a sum's inputs."""
    own = [product for value in node.input_values() if (product := _direct(value)) is not None]
    return {part: own[0].get_friendly_name()} if len(own) == 1 else {}


def _direct(value: Any) -> Any | None:
    """The product that gives this value, through shape changes and a bias at most."""
    at = value.get_node()
    for _ in range(4):
        if is_product(at):
            return at
        if at.get_type_name() not in ("Reshape", "Convert", "Add"):
            return None
        at = at.input_value(0).get_node()
    return None


def _gate(node: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for value in node.input_values():
        source = value.get_node()
        if source.get_type_name() == "Swish":
            part, product = "mlp.gate_proj", _direct(source.input_value(0))
        else:
            part, product = "mlp.up_proj", _direct(value)
        if product is None or part in found:
            return {}
        found[part] = product.get_friendly_name()
    return found


def _attention(node: Any) -> dict[str, str]:
    """The four products around the attention that a layer's first sum adds."""
    found = _single("self_attn.o_proj", node)
    if not found:
        return {}
    output = next(p for v in node.input_values() if (p := _direct(v)) is not None)
    attention = _attends(output)
    if attention is None:
        return {}
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    for part, value in zip(parts, attention.input_values()[:3], strict=True):
        products = set(_products_behind(value))
        if len(products) != 1:
            return {}
        found[part] = products.pop()
    return found if len(set(found.values())) == 4 else {}


def _attends(output: Any) -> Any | None:
    at = output.input_value(0).get_node()
    for _ in range(8):
        if at.get_type_name() in _ATTENDS:
            return at
        if at.get_type_name() not in ("Reshape", "Transpose", "Convert"):
            return None
        at = at.input_value(0).get_node()
    return None


def _products_behind(value: Any) -> Iterator[str]:
    """The weight products that a value comes from, none behind another."""
    waiting: list[Any] = [value.get_node()]
    seen: set[str] = set()
    while waiting and len(seen) < _LIMIT:
        node = waiting.pop()
        name = node.get_friendly_name()
        if name in seen:
            continue
        seen.add(name)
        if is_product(node):
            yield name
            continue
        waiting += [source.get_node() for source in node.input_values()]
