"""LoRA adapters under the paged executor: the same numbers as weights with the change merged in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from modeld.shared.errors import DigestMismatch, ModeldError, ModelLoadFailed
from modeld.shared.messages import AdapterIn, LoadOp
from modeld.workers.openvino.adapters import Applied, apply
from modeld.workers.openvino.blocks import BlockPool
from modeld.workers.openvino.engine import OpenVinoEngine
from modeld.workers.openvino.graph import compile_paged, read_model, to_paged
from modeld.workers.openvino.native import core, ops, ov
from modeld.workers.openvino.paged import PagedModel
from modeld.workers.openvino.targets import by_structure, weight_products
from tests.support.lora_files import (
    adapter,
    gguf_names,
    interleaved,
    merged,
    pairs_for,
    peft,
    quantised,
    rounded,
    safetensors,
)
from tests.support.openvino_models import HEADS, KV_HEADS, LAYERS, converted, tiny_gguf

TOKENS = [5, 40, 77, 130, 200, 9, 31, 64, 250, 12]
RANK, ALPHA = 4, 8.0
ALL = gguf_names(LAYERS)
Q0 = "model.layers.0.self_attn.q_proj"

Rows = NDArray[np.float32]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    return rounded(tiny_gguf(folder / "tiny.gguf"), folder / "base.gguf")


@pytest.fixture(scope="module")
def base(gguf: Path) -> Path:
    return converted(gguf, gguf.parent / "base")


def built(folder: Path, adapters: Sequence[AdapterIn] = ()) -> tuple[PagedModel, Applied]:
    model = read_model(folder)
    selects = to_paged(model)
    applied = apply(model, adapters)
    compiled = compile_paged(model, selects, device="CPU", kv_type="f32", threads=2)
    return PagedModel(compiled, BlockPool(compiled.ports, 16), applied=applied), applied


def rows(model: PagedModel) -> Rows:
    """Logits after each of the tokens."""
    context = model.new_context(64, lambda: 1 << 40)
    found = []
    for index in range(len(TOKENS)):
        context.trim(0)
        context.evaluate(TOKENS[: index + 1], 0, cancelled=lambda: False)
        found.append(context.logits().copy())
    context.close()
    return np.array(found)


def logits(folder: Path, adapters: Sequence[AdapterIn] = ()) -> Rows:
    model, _ = built(folder, adapters)
    try:
        return rows(model)
    finally:
        model.close()


def difference(one: Rows, other: Rows) -> float:
    return float(np.abs(one - other).max())


@pytest.mark.parametrize("part", ["all", "self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"])
def test_an_adapter_gives_the_logits_of_weights_with_it_merged_in(
    gguf: Path, base: Path, tmp_path: Path, part: str
) -> None:
    """For q and k too, whose rows a GGUF has in another order than the adapter."""
    targets = {
        name: tensor for name, tensor in ALL.items() if part in ("all", name.split(".", 3)[3])
    }
    pairs = pairs_for(gguf, targets, RANK, seed=3)
    given = adapter(tmp_path / "a.safetensors", peft(pairs, alpha=ALPHA), scale=0.25)
    whole = converted(
        merged(gguf, tmp_path / "whole.gguf", pairs, 0.25 * ALPHA / RANK), tmp_path / "whole"
    )
    plain, with_adapter, reference = logits(base), logits(base, [given]), logits(whole)
    assert difference(with_adapter, reference) < 2e-4
    assert difference(plain, reference) > 100 * difference(with_adapter, reference)


def test_adapters_add_up_whatever_their_types(gguf: Path, base: Path, tmp_path: Path) -> None:
    one, two = pairs_for(gguf, ALL, 2, seed=4), pairs_for(gguf, ALL, 8, seed=5)
    given = [
        adapter(tmp_path / "1.safetensors", peft(one, alpha=2, dtype="bfloat16"), 0.25),
        adapter(tmp_path / "2.safetensors", peft(two, alpha=8, dtype="float16"), -0.125),
    ]
    first = merged(gguf, tmp_path / "first.gguf", one, 0.25)
    whole = converted(merged(first, tmp_path / "whole.gguf", two, -0.125), tmp_path / "whole")
    reference = logits(whole)
    assert difference(logits(base, given), reference) < 2e-4
    assert difference(logits(base, given[:1]), reference) > 1e-2


def test_alpha_may_be_a_tensor_of_each_weight(gguf: Path, base: Path, tmp_path: Path) -> None:
    a, b = pairs_for(gguf, {Q0: ALL[Q0]}, RANK, seed=6)[Q0]
    files = [
        safetensors(
            {
                f"{Q0}.lora_A.weight": a,
                f"{Q0}.lora_B.weight": b,
                f"{Q0}.alpha": np.array(alpha, np.float32),
            }
        )
        for alpha in (2.0, 4.0)
    ]
    weak, strong = (adapter(tmp_path / f"{n}.safetensors", data) for n, data in enumerate(files))
    doubled = msgspec.structs.replace(weak, scale=2.0)
    assert difference(logits(base, [doubled]), logits(base, [strong])) < 1e-6
    assert difference(logits(base, [weak]), logits(base, [strong])) > 1e-3


def test_the_output_matrix_can_be_changed(gguf: Path, base: Path, tmp_path: Path) -> None:
    pairs = pairs_for(gguf, {"lm_head": "output.weight"}, RANK, seed=7)
    given = adapter(tmp_path / "a.safetensors", peft(pairs, alpha=ALPHA))
    model, applied = built(base, [given])
    assert applied.weights == 1
    with_adapter = rows(model)
    model.switch_adapters(on=False)
    assert difference(rows(model), logits(base)) == 0.0
    assert difference(with_adapter, logits(base)) > 1e-2
    model.close()


def test_switched_off_they_change_nothing(gguf: Path, base: Path, tmp_path: Path) -> None:
    given = adapter(tmp_path / "a.safetensors", peft(pairs_for(gguf, ALL, RANK, 8), alpha=ALPHA))
    model, applied = built(base, [given])
    assert (applied.adapters, applied.weights, applied.ranks) == (1, len(ALL), (RANK,))
    model.switch_adapters(on=False)
    assert difference(rows(model), logits(base)) < 1e-5
    model.close()


def test_a_graph_without_names_is_read_by_its_structure(base: Path) -> None:
    model = read_model(base)
    named = {path: name for path, name in weight_products(model).items() if path != "lm_head"}
    assert dict(by_structure(model.get_ordered_ops())) == named
    for node in model.get_ops():
        if node.get_type_name() == "Constant":
            node.set_friendly_name(f"nameless_{node.get_friendly_name().replace('.weight', '')}")
    to_paged(model)
    assert weight_products(model) == named


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
def test_weights_of_a_quantised_model_are_found_and_in_the_adapters_row_order(
    gguf: Path, tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    """The converter leaves quantised weights without names; the GGUF says which is which."""
    source = quantised(gguf, tmp_path / "q.gguf", kind)
    model = read_model(converted(source, tmp_path / "ir"))
    products, nodes = weight_products(model), {n.get_friendly_name(): n for n in model.get_ops()}
    tensors = {tensor.name: tensor for tensor in GGUFReader(source).tensors}
    for path, name in gguf_names(LAYERS).items():
        tensor = tensors[name]
        expected = dequantize(tensor.data, tensor.tensor_type)
        value = nodes[products[path]].input_value(1)
        alone = core().compile_model(ov.Model([ops.result(value)], [], "weight"), "CPU")
        found = alone([])[0]
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(path.rpartition(".")[2], 0)
        found = interleaved(found, heads) if heads else found
        # The converter rounds a block's offset to its scale: half a step of sixteen.
        assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max(), path


# --- refused -------------------------------------------------------------------------------------


def bad(base: Path, given: AdapterIn) -> ModeldError:
    model = read_model(base)
    to_paged(model)
    before = len(model.get_ops())
    with pytest.raises((ModelLoadFailed, DigestMismatch)) as error:
        apply(model, [given])
    assert len(model.get_ops()) == before
    return error.value


def test_a_weight_that_the_model_lacks_is_named(gguf: Path, base: Path, tmp_path: Path) -> None:
    pair = pairs_for(gguf, {Q0: ALL[Q0]}, RANK, seed=1)[Q0]
    for target in ("model.layers.9.self_attn.q_proj", "model.embed_tokens", "transformer.h.0.attn"):
        given = adapter(tmp_path / "a.safetensors", peft({Q0: pair, target: pair}, alpha=1))
        error = bad(base, given)
        assert error.metadata["target"] == target
        assert repr(target) in error.message


def test_a_pair_of_other_sizes_is_named_with_both(gguf: Path, base: Path, tmp_path: Path) -> None:
    a, b = pairs_for(gguf, {Q0: ALL[Q0]}, RANK, seed=1)[Q0]
    given = adapter(tmp_path / "a.safetensors", peft({Q0: (a, b[:128])}, alpha=1))
    assert "128 x 256, and the model's is 256 x 256" in bad(base, given).message


def test_what_has_no_alpha_or_no_numbers_or_was_changed_is_refused(
    gguf: Path, base: Path, tmp_path: Path
) -> None:
    a, b = pairs_for(gguf, {Q0: ALL[Q0]}, RANK, seed=1)[Q0]
    path = tmp_path / "a.safetensors"
    assert "alpha" in bad(base, adapter(path, peft({Q0: (a, b)}, alpha=None))).message
    assert (
        "isn't a number" in bad(base, adapter(path, peft({Q0: (a * np.nan, b)}, alpha=1))).message
    )
    given = adapter(path, peft({Q0: (a, b)}, alpha=1))
    assert isinstance(bad(base, msgspec.structs.replace(given, digest="0" * 64)), DigestMismatch)
    assert "scale" in bad(base, msgspec.structs.replace(given, scale=float("inf"))).message
    path.unlink()
    assert "can't be read" in bad(base, given).message


# --- through the engine --------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[OpenVinoEngine]:
    made = OpenVinoEngine()
    yield made
    made.unload()


def load(engine: OpenVinoEngine, folder: Path, *adapters: AdapterIn) -> Any:
    request = LoadOp(
        path=str(folder), model="m", digest="d", adapters=list(adapters), k_type="f32",
        v_type="f32", threads=2,
    )  # fmt: skip
    return engine.load(request, lambda stage, fraction: None, lambda: False)


def test_a_load_proves_that_an_adapter_changes_the_logits(
    engine: OpenVinoEngine, gguf: Path, base: Path, tmp_path: Path
) -> None:
    without = load(engine, base)
    assert without.capabilities["adapters"].startswith("yes: 15 weights can be changed")
    given = adapter(tmp_path / "a.safetensors", peft(pairs_for(gguf, ALL, RANK, 8), alpha=ALPHA))
    with_one = load(engine, base, given)
    assert with_one.capabilities["adapters"].startswith("yes: 1 applied to 14 weights")
    context = engine.new_context(64, "f32", "f32")
    context.evaluate(TOKENS, 0, cancelled=lambda: False)
    assert difference(context.logits(), logits(base, [given])[-1]) < 1e-4
    context.close()


def test_a_load_with_an_adapter_that_changes_nothing_fails(
    engine: OpenVinoEngine, gguf: Path, base: Path, tmp_path: Path
) -> None:
    a, b = pairs_for(gguf, {Q0: ALL[Q0]}, RANK, seed=1)[Q0]
    given = adapter(tmp_path / "a.safetensors", peft({Q0: (a, b * 0)}, alpha=1))
    with pytest.raises(ModelLoadFailed, match="same with and without"):
        load(engine, base, given)


def test_a_load_that_fails_for_an_adapter_leaves_nothing_loaded(
    engine: OpenVinoEngine, gguf: Path, base: Path, tmp_path: Path
) -> None:
    pair = pairs_for(gguf, {Q0: ALL[Q0]}, RANK, seed=1)[Q0]
    given = adapter(tmp_path / "a.safetensors", peft({"model.layers.7.mlp": pair}, alpha=1))
    with pytest.raises(ModelLoadFailed, match=r"model\.layers\.7\.mlp"):
        load(engine, base, given)
    with pytest.raises(ModeldError):
        engine.new_context(64, "f32", "f32")
    assert load(engine, base).executor == "paged"


def test_nothing_applied_is_the_default() -> None:
    assert dataclasses.asdict(Applied()) == dict.fromkeys(
        ("changeable", "adapters", "weights", "memory_bytes"), 0
    ) | {"ranks": ()}
