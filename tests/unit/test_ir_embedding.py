"""How an OpenVINO folder's files tell an embedding model, and what planning makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modeld.shared.capacity import (
    CapacityPolicy,
    CapacityRequest,
    LayerKind,
    MachineReading,
    MemorySnapshot,
    Reason,
    SlotUse,
)
from modeld.shared.ir_embedding import embeds
from modeld.shared.ir_facts import ir_facts
from modeld.shared.planner.capacity import resolve

BERT = {
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
}
HIDDEN = '<port id="1" precision="FP32" names="last_hidden_state">'
STATE = '<layer id="2" name="past_key_values.0.key" type="ReadValue" version="opset6">'
LOGITS = '<port id="1" precision="FP32" names="logits,7">'


def folder(path: Path, *parts: str, config: dict[str, object] | None = None) -> Path:
    path.mkdir()
    body = "".join(parts)
    (path / "openvino_model.xml").write_text(f'<net name="Model" version="11">{body}</net>')
    (path / "openvino_model.bin").write_bytes(b"x" * 1000)
    (path / "config.json").write_text(json.dumps(BERT if config is None else config))
    return path


def test_hidden_states_and_nothing_kept_make_an_embedding_model(tmp_path: Path) -> None:
    facts = ir_facts(folder(tmp_path / "m", HIDDEN))
    assert embeds(facts)
    (layers,) = facts.layers
    assert (layers.count, layers.kind, layers.kv_heads) == (6, LayerKind.NONE, 0)
    assert (facts.model_max, facts.embedding_length, facts.pooling) == (512, 384, "")


@pytest.mark.parametrize("parts", [(LOGITS,), (HIDDEN, LOGITS), (HIDDEN, STATE), ()])
def test_logits_or_a_state_make_a_model_that_generates(
    tmp_path: Path, parts: tuple[str, ...]
) -> None:
    assert not embeds(ir_facts(folder(tmp_path / "m", *parts)))


def test_a_name_across_the_pieces_a_file_is_read_in_is_found(tmp_path: Path) -> None:
    for before in range(1024 * 1024 - 120, 1024 * 1024, 40):
        path = folder(tmp_path / str(before), f"<!--{'x' * before}-->", HIDDEN)
        assert embeds(ir_facts(path))


def test_an_embedding_model_whose_configuration_says_nothing_is_still_one(tmp_path: Path) -> None:
    facts = ir_facts(folder(tmp_path / "m", HIDDEN, config={}))
    assert embeds(facts)
    assert facts.layers[0].count == 1


@pytest.mark.parametrize(
    ("declared", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "mean+cls"),
        ({"word_embedding_dimension": 384}, ""),
    ],
)
def test_the_declared_pooling_is_read(
    tmp_path: Path, declared: dict[str, object], pooling: str
) -> None:
    path = folder(tmp_path / "m", HIDDEN)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(declared))
    assert ir_facts(path).pooling == pooling


@pytest.mark.parametrize("config", [BERT, {}])
def test_a_model_without_kv_is_planned(tmp_path: Path, config: dict[str, object]) -> None:
    facts = ir_facts(folder(tmp_path / "m", HIDDEN, config=config))
    machine = MachineReading(MemorySnapshot(16 << 30, 8 << 30))
    plan = resolve(facts, CapacityRequest(), CapacityPolicy(), machine, SlotUse())
    assert (plan.kv_bytes, plan.refusal) == (0, None)
    if config:
        assert plan.numbers.effective.tokens == 512
        assert plan.numbers.effective.reason is Reason.MODEL_CEILING
