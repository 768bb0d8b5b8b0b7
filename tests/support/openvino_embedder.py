"""A tiny embedding model for OpenVINO, and the same computation in numpy to hold it against.

It has positions and attention, so that padding, a wrong mask or a wrong place would show.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset13
from numpy.typing import NDArray

from modeld.workers.openvino.tokenizer_graph import with_tokenizers
from tests.support.openvino_models import TOKENIZER, converted, tiny_gguf
from tests.support.tiny_models import vocabulary

ov: Any = openvino
ops: Any = openvino.opset13
Array = NDArray[np.float32]

WIDTH, MAX_TOKENS = 32, 64
_WEIGHTS = ("query", "key", "value", "output")


@dataclass(frozen=True)
class TinyEmbedder:
    """The folder, and the weights from which ``reference`` computes what it should answer."""

    folder: Path
    weights: dict[str, Array]

    def hidden(self, ids: Sequence[int]) -> Array:
        """Hidden states of one text's tokens, shape (tokens, WIDTH)."""
        w = self.weights
        x = w["tokens"][np.asarray(ids)] + w["positions"][: len(ids)]
        scores = (x @ w["query"]) @ (x @ w["key"]).T / np.sqrt(WIDTH)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        attended = scores / scores.sum(axis=1, keepdims=True) @ (x @ w["value"])
        states: Array = np.tanh((x + attended) @ w["output"])
        return states

    def reference(self, ids: Sequence[int], pooling: str, *, normalize: bool = True) -> Array:
        pool: dict[str, Callable[[Array], Array]] = {
            "mean": lambda states: states.mean(axis=0),
            "cls": lambda states: states[0],
            "last": lambda states: states[-1],
        }
        vector = pool[pooling](self.hidden(ids))
        return vector / np.float32(np.linalg.norm(vector)) if normalize else vector


def tiny_embedder(
    into: Path,
    *,
    pooling: str = "",
    around: tuple[int, int] | None = None,
    max_tokens: int = MAX_TOKENS,
    config: dict[str, object] | None = None,
) -> TinyEmbedder:
    """Make one in the folder ``into``. ``pooling``: what the folder declares; "": nothing.

    ``around``: ids that its tokenizer puts before and behind every text. ``config`` is laid over
    what ``config.json`` says.
    """
    converted(tiny_gguf(into.parent / f"{into.name}.gguf", layers=1), into)
    if around is not None:
        _put_around(into / TOKENIZER, *around)
    weights = _weights(len(vocabulary()[0]), max_tokens)
    model = _model(weights)
    ov.save_model(model, str(into / "openvino_model.xml"), compress_to_fp16=False)
    declared = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": max_tokens,
        "vocab_size": len(weights["tokens"]),
    }
    (into / "config.json").write_text(json.dumps({**declared, **(config or {})}))
    if pooling:
        names = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
        (into / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{name}": own == pooling for own, name in names.items()}
        (into / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": WIDTH, **modes})
        )
    return TinyEmbedder(into, weights)


def _put_around(tokenizer: Path, before: int, behind: int) -> None:
    model = with_tokenizers(ov.Core()).read_model(str(tokenizer))
    for result in model.get_results():
        output = result.input_value(0)
        ids = "input_ids" in output.get_names()
        rows = ops.gather(ops.shape_of(output, output_type="i64"), _constant([0]), _constant(0))
        column = ops.concat([rows, _constant([1])], 0)
        first, last = (
            ops.broadcast(_constant(token if ids else 1), column) for token in (before, behind)
        )
        whole = ops.concat([first, output, last], 1)
        names = output.get_names()
        output.get_tensor().set_names(set())
        whole.output(0).get_tensor().set_names(names)
        result.input(0).replace_source_output(whole.output(0))
    model.validate_nodes_and_infer_types()
    changed = tokenizer.with_suffix(".new.xml")
    ov.save_model(model, str(changed), compress_to_fp16=False)
    del model  # the old files are mapped
    for suffix in (".xml", ".bin"):
        changed.with_suffix(suffix).replace(tokenizer.with_suffix(suffix))


def _constant(value: Any, kind: type[np.generic] = np.int64) -> Any:
    return ops.constant(np.asarray(value, dtype=kind))


def _weights(tokens: int, positions: int) -> dict[str, Array]:
    random = np.random.default_rng(7)

    def matrix(*shape: int, scale: float) -> Array:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    weights = {
        "tokens": matrix(tokens, WIDTH, scale=1.0),
        "positions": matrix(positions, WIDTH, scale=0.5),
    }
    return weights | {name: matrix(WIDTH, WIDTH, scale=WIDTH**-0.5) for name in _WEIGHTS}


def _model(weights: dict[str, Array]) -> Any:
    def entry(name: str) -> Any:
        parameter = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.i64, name=name)
        parameter.output(0).get_tensor().set_names({name})
        return parameter

    def times(x: Any, name: str) -> Any:
        return ops.matmul(x, _constant(weights[name], np.float32), False, False)

    ids, mask = entry("input_ids"), entry("attention_mask")
    zero, one = _constant(0), _constant(1)
    length = ops.gather(ops.shape_of(ids, output_type="i64"), one, zero)
    places = ops.range(zero, length, one, output_type="i64")
    x = ops.add(
        ops.gather(_constant(weights["tokens"], np.float32), ids, zero),
        ops.gather(_constant(weights["positions"], np.float32), places, zero),
    )
    scores = ops.divide(
        ops.matmul(times(x, "query"), times(x, "key"), False, True),
        _constant(np.sqrt(WIDTH), np.float32),
    )
    hidden = ops.multiply(
        ops.subtract(_constant(1, np.float32), ops.convert(ops.unsqueeze(mask, one), "f32")),
        _constant(-1e9, np.float32),
    )
    attended = ops.matmul(ops.softmax(ops.add(scores, hidden), -1), times(x, "value"), False, False)
    result = ops.result(ops.tanh(times(ops.add(x, attended), "output")))
    result.output(0).get_tensor().set_names({"last_hidden_state"})
    return ov.Model([result], [ids, mask], "tiny_embedder")
