"""A vision-language model for tests, in the form in which GenAI takes llava: tiny, and of noise.

Made from the tiny language model: its token table becomes a model of its own, and one convolution
stands for the vision encoder. Different images give different answers, equal ones the same.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.openvino_models import HEAD_LENGTH, HEADS, KV_HEADS, LAYERS, tiny_ir
from tests.support.tiny_models import CONTEXT, vocabulary

WIDTH = HEADS * HEAD_LENGTH
PATCH, SIDE = 14, 56  # pixels
IMAGE_TOKENS = (SIDE // PATCH) ** 2
IMAGE_TOKEN = "<image>"
LANGUAGE, TEXT_EMBEDDINGS, VISION_EMBEDDINGS = (
    f"openvino_{part}_model" for part in ("language", "text_embeddings", "vision_embeddings")
)
SEED = 20


def tiny_llava(into: Path, *, seed: int = 1, image_size: int = SIDE) -> Path:
    """A whole folder, which is made and answered. An image takes ``IMAGE_TOKENS`` positions."""
    base = tiny_ir(into / "base", seed=seed, controls=[IMAGE_TOKEN])
    ov: Any = importlib.import_module("openvino")
    model = ov.Core().read_model(str(base / "openvino_model.xml"))
    table = _embeddings_outside(model)
    _save(model, into / LANGUAGE)
    _save(_text_embeddings(table), into / TEXT_EMBEDDINGS)
    _save(_vision_embeddings(), into / VISION_EMBEDDINGS)
    del model
    for file in base.glob("*tokenizer.*"):
        file.rename(into / file.name)
    shutil.rmtree(base)
    for name, value in _settings(image_size).items():
        (into / name).write_text(json.dumps(value))
    return into


def _settings(image_size: int) -> dict[str, Any]:
    text = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_LENGTH,
        "max_position_embeddings": CONTEXT,
    }
    config = {
        "model_type": "llava",
        "image_token_index": len(vocabulary()[0]),  # behind the others
        "vision_config": {"patch_size": PATCH, "image_size": image_size},
        "hidden_size": WIDTH,
        "text_config": text,
    }
    preprocessor = {
        "size": {"shortest_edge": image_size},
        "crop_size": {"height": image_size, "width": image_size},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": PATCH,
        "do_resize": True,
    }
    ends = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 2}
    return {
        "config.json": config,
        "preprocessor_config.json": preprocessor,
        "generation_config.json": ends,
    }


def _embeddings_outside(model: Any) -> Any:
    """Have a language model take embeddings in the place of ids; answers its token table."""
    ov: Any = importlib.import_module("openvino")
    ops: Any = importlib.import_module("openvino.opset13")
    ids = next(one for one in model.get_parameters() if one.get_friendly_name() == "input_ids")
    given = ops.parameter(ov.PartialShape([-1, -1, WIDTH]), ov.Type.f32, name="inputs_embeds")
    given.output(0).get_tensor().set_names({"inputs_embeds"})
    table = None
    shape = None
    for use in list(ids.output(0).get_target_inputs()):
        node = use.get_node()
        if node.get_type_name() == "ShapeOf":
            shape = node
            continue
        gather = next(iter(node.output(0).get_target_inputs())).get_node()
        gather = node if node.get_type_name() == "Gather" else gather
        table = _constant(gather.input_value(0))
        for reader in list(gather.output(0).get_target_inputs()):
            reader.replace_source_output(given.output(0))
    if shape is not None:  # of ids: batch and length, which the embeddings' shape begins with
        first = ops.constant(np.array([0, 1], dtype=np.int64))
        whole = ops.shape_of(given, output_type="i64")
        begin = ops.gather(whole, first, ops.constant(np.int64(0)))
        for reader in list(shape.output(0).get_target_inputs()):
            reader.replace_source_output(begin.output(0))
    if table is None:
        raise RuntimeError("no token table was found in the language model")
    model.add_parameters([given])
    model.remove_parameter(ids)
    model.validate_nodes_and_infer_types()
    return table


def _constant(output: Any) -> Any:
    node = output.get_node()
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    return np.array(node.data, dtype=np.float32)


def _text_embeddings(table: Any) -> Any:
    ov: Any = importlib.import_module("openvino")
    ops: Any = importlib.import_module("openvino.opset13")
    ids = ops.parameter(ov.PartialShape([-1, -1]), ov.Type.i64, name="input")
    ids.output(0).get_tensor().set_names({"input"})
    result = ops.result(ops.gather(ops.constant(table), ids, ops.constant(np.int64(0))))
    result.output(0).get_tensor().set_names({"inputs_embeds"})
    return ov.Model([result], [ids], "text_embeddings")


def _vision_embeddings() -> Any:
    ov: Any = importlib.import_module("openvino")
    ops: Any = importlib.import_module("openvino.opset13")
    pixels = ops.parameter(ov.PartialShape([-1, 3, -1, -1]), ov.Type.f32, name="pixel_values")
    pixels.output(0).get_tensor().set_names({"pixel_values"})
    random = np.random.default_rng(SEED)
    weights = random.standard_normal((WIDTH, 3, PATCH, PATCH)).astype(np.float32) * 0.1
    patches = ops.convolution(pixels, ops.constant(weights), [PATCH, PATCH], [0, 0], [0, 0], [1, 1])
    rows = ops.reshape(patches, ops.constant(np.array([0, WIDTH, -1], dtype=np.int64)), True)
    result = ops.result(ops.transpose(rows, ops.constant(np.array([0, 2, 1], dtype=np.int64))))
    result.output(0).get_tensor().set_names({"last_hidden_state"})
    return ov.Model([result], [pixels], "vision_embeddings")


def _save(model: Any, stem: Path) -> None:
    ov: Any = importlib.import_module("openvino")
    ov.save_model(model, f"{stem}.xml", compress_to_fp16=False)
