"""Facts of model families: what each layer keeps, as the engine allocates it, and what weighs how
much. The rules were compared with the engine's own allocations, family by family.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from modeld.shared.capacity import LayerFacts, LayerKind, ModelFacts
from modeld.shared.errors import ModelLoadFailed
from modeld.shared.gguf_header import check_extents, model_facts, read_header
from modeld.shared.gguf_types import INDEXED, LATENT, MEMORYLESS, RECURRENT, WINDOWS
from tests.support import tiny_models
from tests.support.gguf_bytes import Setting, model, tensor

LETTERS = {
    LayerKind.FULL: "F",
    LayerKind.WINDOW: "w",
    LayerKind.RECURRENT: "r",
    LayerKind.SHARED: "s",
    LayerKind.LATENT: "L",
    LayerKind.MIXED: "M",
    LayerKind.NONE: "-",
}
SSM: dict[str, Setting] = {
    "ssm__conv_kernel": 4,
    "ssm__inner_size": 128,
    "ssm__state_size": 16,
    "ssm__group_count": 2,
}
MLA: dict[str, Setting] = {
    "attention__head_count_kv": 1,
    "attention__key_length": 40,
    "attention__value_length": 32,
    "attention__key_length_mla": 24,
    "attention__value_length_mla": 16,
}
KDA: dict[str, Setting] = {"kda__head_dim": 16, "ssm__conv_kernel": 4}
INDEX: dict[str, Setting] = {"attention__indexer__key_length": 8, "attention__indexer__top_k": 4}


def facts_of(
    folder: Path, architecture: str, blocks: int = 4, /, **settings: Setting
) -> ModelFacts:
    return facts_at(model(architecture, blocks, **settings).write(folder / "model.gguf"))


def facts_at(path: Path) -> ModelFacts:
    header = read_header(path)
    check_extents(header, header.file_bytes)
    facts = model_facts(header, header.file_bytes)
    weights = sum(facts.layer_weights) + facts.input_bytes + facts.output_bytes
    assert weights == facts.weights_bytes
    assert len(facts.layer_weights) == sum(layer.count for layer in facts.layers)
    return facts


def pattern(facts: ModelFacts) -> str:
    """A letter for each layer, in order."""
    return "".join(LETTERS[layer.kind] * layer.count for layer in facts.layers)


# --- windows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "blocks", "settings", "expected", "window"),
    [
        ("gemma2", 4, {}, "wFwF", 4096),
        ("gemma2", 4, {"attention__sliding_window": 64}, "wFwF", 64),
        ("gemma3", 7, {"attention__sliding_window": 64}, "wwwwwFw", 64),
        ("gemma3", 7, {}, "FFFFFFF", 0),
        ("gemma3n", 10, {"attention__sliding_window": 64}, "wwwwFwwwwF", 64),
        ("gpt-oss", 4, {"attention__sliding_window": 128}, "wFwF", 128),
        ("afmoe", 5, {"attention__sliding_window": 64}, "wwwFw", 64),
        ("cohere2", 5, {"attention__sliding_window": 64}, "wwwFw", 64),
        ("cohere2moe", 5, {"attention__sliding_window": 64}, "FwwwF", 64),
        ("laguna", 5, {"attention__sliding_window": 64}, "FwwwF", 64),
        ("smallthinker", 5, {"attention__sliding_window": 64}, "FwwwF", 4096),
        ("plamo3", 9, {"attention__sliding_window": 64}, "wwwwwwwFw", 64),
        ("llama4", 5, {}, "wwwFw", 8192),
        ("llama4", 5, {"attention__sliding_window": 64}, "wwwFw", 8192),
        ("llama4", 5, {"attention__sliding_window": 0}, "FFFFF", 0),
        ("exaone4", 8, {"attention__sliding_window": 64}, "FFFFFFFF", 64),
        ("exaone4", 64, {}, "wwwF" * 16, 4096),
        ("phi3", 4, {"attention__sliding_window": 64}, "FFFF", 64),
    ],
)
def test_windowed_layers_are_those_of_the_familys_rule(
    tmp_path: Path,
    architecture: str,
    blocks: int,
    settings: dict[str, Setting],
    expected: str,
    window: int,
) -> None:
    facts = facts_of(tmp_path, architecture, blocks, **settings)
    assert (pattern(facts), facts.sliding_window) == (expected, window)
    assert not facts.unknown_pattern
    for layer in facts.layers:
        assert layer.window_cells == (window if layer.kind is LayerKind.WINDOW else 0)
    assert bool(facts.window_pattern_source) == (window > 0)


@pytest.mark.parametrize("listed", [[True, False, False, True], [1, 0, 0, 1]])
@pytest.mark.parametrize("architecture", ["gemma3", "gemma4", "mimo2", "step35", "granite_swa"])
def test_a_list_in_the_file_wins_over_any_rule(
    tmp_path: Path, architecture: str, listed: list[int] | list[bool]
) -> None:
    facts = facts_of(
        tmp_path,
        architecture,
        attention__sliding_window=64,
        attention__sliding_window_pattern=listed,
    )
    assert pattern(facts) == "wFFw"
    assert facts.window_pattern_source.startswith(f"{architecture}.attention.sliding_window_pat")


def test_a_number_in_the_file_replaces_the_period_and_not_its_begin(tmp_path: Path) -> None:
    window: dict[str, Setting] = {
        "attention__sliding_window": 64,
        "attention__sliding_window_pattern": 3,
    }
    assert pattern(facts_of(tmp_path, "gemma3", 6, **window)) == "wwFwwF"
    assert pattern(facts_of(tmp_path, "cohere2moe", 6, **window)) == "FwwFww"


def test_layers_that_a_short_list_leaves_out_attend_everything(tmp_path: Path) -> None:
    window: dict[str, Setting] = {
        "attention__sliding_window": 64,
        "attention__sliding_window_pattern": [1, 1],
    }
    assert pattern(facts_of(tmp_path, "gemma4", 4, **window)) == "wwFF"


@pytest.mark.parametrize("architecture", ["novel", "llama", "gemma4", "mimo2"])
def test_a_window_without_a_known_pattern_is_costed_in_full_and_said(
    tmp_path: Path, architecture: str
) -> None:
    facts = facts_of(tmp_path, architecture, attention__sliding_window=64)
    assert (pattern(facts), facts.unknown_pattern) == ("FFFF", True)
    assert facts.sliding_window == 64
    assert facts.window_pattern_source == ""


def test_windowed_layers_have_their_own_head_lengths(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        "gemma4",
        attention__sliding_window=64,
        attention__sliding_window_pattern=[1, 0, 1, 0],
        attention__key_length_swa=8,
        attention__value_length_swa=4,
        attention__key_length=32,
        attention__value_length=24,
    )
    assert facts.layers[:2] == (
        LayerFacts(1, 2, 8, 4, 64, LayerKind.WINDOW),
        LayerFacts(1, 2, 32, 24),
    )
    assert facts.widest_value == 48  # without flash attention windowed values are as wide


def test_every_window_familys_row_names_its_source() -> None:
    for name, family in WINDOWS.items():
        assert family.source.startswith("models/"), name
    for name, recurrent in RECURRENT.items():
        assert recurrent.source.startswith("models/"), name


# --- KV heads --------------------------------------------------------------------------------


def test_heads_may_differ_by_layer_and_values_are_then_as_wide_as_the_widest(
    tmp_path: Path,
) -> None:
    facts = facts_of(
        tmp_path,
        "openelm",
        attention__head_count=[4, 4, 8, 8],
        attention__head_count_kv=[1, 1, 2, 2],
    )
    assert facts.layers == (LayerFacts(2, 1, 16, 16), LayerFacts(2, 2, 16, 16))
    assert (facts.heads, facts.widest_value) == (8, 32)


def test_a_layer_without_attention_keeps_no_keys(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path, "deci", attention__head_count=[4, 0, 4, 4], attention__head_count_kv=[2, 0, 2, 2]
    )
    assert facts.layers == (
        LayerFacts(1, 2, 16, 16),
        LayerFacts(1, 0, 16, 16),
        LayerFacts(2, 2, 16, 16),
    )
    assert facts.widest_value == 32


def test_missing_kv_heads_are_as_many_as_the_heads(tmp_path: Path) -> None:
    document = model("llama")
    document.pairs = [pair for pair in document.pairs if not pair[0].endswith("head_count_kv")]
    assert facts_at(document.write(tmp_path / "m.gguf")).layers == (LayerFacts(4, 4, 16, 16),)


def test_layers_that_share_anothers_kv_cost_nothing(tmp_path: Path) -> None:
    window: dict[str, Setting] = {
        "attention__sliding_window": 64,
        "attention__sliding_window_pattern": [1, 0] * 2,
    }
    gemma4 = facts_of(tmp_path, "gemma4", **window, attention__shared_kv_layers=2)
    assert pattern(gemma4) == "wFss"
    assert gemma4.layers[-1] == LayerFacts(2, 0, 0, 0, kind=LayerKind.SHARED)
    gemma3n = facts_of(tmp_path, "gemma3n", 24, attention__sliding_window=64)
    assert pattern(gemma3n) == "wwwwF" * 4 + "ssss"


@pytest.mark.parametrize("architecture", sorted(LATENT - set(RECURRENT) - INDEXED))
def test_latent_layers_keep_one_row_of_keys(tmp_path: Path, architecture: str) -> None:
    facts = facts_of(tmp_path, architecture, **MLA)
    assert facts.layers == (LayerFacts(4, 1, 40, 0, kind=LayerKind.LATENT),)
    assert facts.widest_value == 0


def test_without_the_latent_lengths_deepseek_keeps_keys_and_values(tmp_path: Path) -> None:
    whole: dict[str, Setting] = {"attention__key_length": 24, "attention__value_length": 16}
    assert facts_of(tmp_path, "deepseek2", **whole).layers == (LayerFacts(4, 2, 24, 16),)


def test_latent_lengths_of_a_family_that_does_not_read_them_change_nothing(tmp_path: Path) -> None:
    assert facts_of(tmp_path, "llama", **MLA).layers == (LayerFacts(4, 1, 40, 32),)


def test_an_indexers_keys_lie_beside_the_layers_own(tmp_path: Path) -> None:
    types = [1, 0, 0, 1]
    latent = facts_of(tmp_path, "deepseek32", **MLA, **INDEX)
    assert latent.layers == (LayerFacts(4, 1, 48, 0, kind=LayerKind.LATENT),)
    some = facts_of(tmp_path, "glm-dsa", **MLA, **INDEX, attention__indexer__types=types)
    assert [(layer.count, layer.key_length) for layer in some.layers] == [(1, 48), (2, 40), (1, 48)]
    sparse = facts_of(tmp_path, "minimax-m3", **INDEX, leading_dense_block_count=1)
    assert sparse.layers == (LayerFacts(1, 2, 16, 16), LayerFacts(3, 1, 2 * 16 + 8, 2 * 16 + 16))
    assert sparse.widest_value == 0


# --- states ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "settings", "state_bytes"),
    [
        ("mamba", SSM, 4 * (3 * 128 + 16 * 128)),
        ("mamba2", SSM, 4 * (3 * (128 + 2 * 2 * 16) + 16 * 128)),
        ("rwkv6", {"wkv__head_size": 16}, 4 * (2 * 64 + 64 * 16)),
        ("arwkv7", {"wkv__head_size": 16, "token_shift_count": 1}, 4 * (64 + 64 * 16)),
    ],
)
def test_recurrent_models_keep_a_state_and_no_kv(
    tmp_path: Path, architecture: str, settings: dict[str, Setting], state_bytes: int
) -> None:
    facts = facts_of(tmp_path, architecture, **settings)
    assert facts.layers == (LayerFacts(4, 0, 0, 0, 0, LayerKind.RECURRENT, state_bytes),)
    assert facts.recurrent


@pytest.mark.parametrize(
    ("architecture", "settings", "expected", "state_bytes"),
    [
        ("jamba", SSM, "rFrF", 4 * (3 * 128 + 16 * 128)),
        ("granitehybrid", SSM, "rFrF", 4 * (3 * 192 + 16 * 128)),
        ("plamo2", SSM, "rFrF", 4 * (3 * 192 + 16 * 128)),
        ("lfm2", {"shortconv__l_cache": 3}, "rFrF", 4 * 2 * 64),
        ("lfm2", {"shortconv__l_cache": 3, "attention__sliding_window": 64}, "rwrw", 4 * 2 * 64),
        ("kimi-linear", {**MLA, **KDA}, "rLrL", 4 * (3 * 3 * 64 + 16 * 16 * 4)),
        ("bailingmoe3", {**MLA, **KDA, "nextn_predict_layers": 1}, "rLrL", 4 * (576 + 1024)),
        ("glm5-next", {**MLA, **KDA, "nextn_predict_layers": 1}, "rLr-", 4 * (576 + 1024)),
    ],
)
def test_hybrids_without_kv_heads_in_a_layer_keep_a_state_there(
    tmp_path: Path, architecture: str, settings: dict[str, Setting], expected: str, state_bytes: int
) -> None:
    heads = 1 if "attention__key_length_mla" in settings else 2
    settings = {**settings, "attention__head_count_kv": [0, heads, 0, heads]}
    facts = facts_of(tmp_path, architecture, **settings)
    assert pattern(facts) == expected
    assert facts.layers[0] == LayerFacts(1, 0, 0, 0, 0, LayerKind.RECURRENT, state_bytes)
    assert facts.widest_value == 0
    assert facts.recurrent


@pytest.mark.parametrize(
    ("architecture", "settings", "expected"),
    [
        ("qwen3next", SSM, "rrrFrrrF"),
        ("qwen35", {**SSM, "full_attention_interval": 2}, "rFrFrFrF"),
        ("qwen35moe", {**SSM, "nextn_predict_layers": 1}, "rrrFrrr-"),
        ("qwen3next", {**SSM, "attention__recurrent_layers": [True] * 7 + [False]}, "rrrrrrrF"),
        ("minimax-01", {}, "rrrrrrrF"),
        ("falcon-h1", SSM, "MMMMMMMM"),
    ],
)
def test_hybrids_by_interval_or_list(
    tmp_path: Path, architecture: str, settings: dict[str, Setting], expected: str
) -> None:
    facts = facts_of(tmp_path, architecture, 8, **settings)
    assert pattern(facts) == expected
    assert facts.recurrent
    for layer in facts.layers:
        assert (layer.state_bytes > 0) == (layer.kind in (LayerKind.RECURRENT, LayerKind.MIXED))


def test_nemotrons_feed_forward_layers_keep_nothing(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        "nemotron_h",
        **SSM,
        attention__head_count_kv=[0, 0, 2, 0],
        feed_forward_length=[0, 128, 0, 128],
    )
    assert pattern(facts) == "r-F-"


# --- blocks that are more or less than they seem ---------------------------------------------


def test_blocks_that_predict_further_tokens_hold_no_kv_and_are_weighed(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "glm4moe", nextn_predict_layers=1)
    assert pattern(facts) == "FFF-"
    assert facts.layer_weights == ((64 + 128) * 4,) * 4


def test_looped_blocks_keep_kv_for_each_loop(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "nanbeige", 3, num_loops=2)
    assert facts.layers == (LayerFacts(6, 2, 16, 16),)
    assert facts.layer_weights == (768, 768, 768, 0, 0, 0)


def test_a_switching_model_has_one_more_layer_that_routes(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "graniteswitch")
    assert facts.layers == (LayerFacts(4, 2, 16, 16), LayerFacts(1, 1, 16, 16))
    assert facts.widest_value == 32


@pytest.mark.parametrize("architecture", sorted(MEMORYLESS))
def test_models_without_a_context_keep_nothing(tmp_path: Path, architecture: str) -> None:
    facts = facts_of(tmp_path, architecture, pooling_type=1)
    assert pattern(facts) == "----"
    assert facts.pooling == "mean"


def test_compressed_attention_is_costed_as_the_most_it_can_take_and_said(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        "deepseek4",
        **INDEX,
        attention__head_count_kv=1,
        attention__sliding_window=64,
        attention__compress_ratios=[0, 4, 128, 4],
    )
    assert facts.unknown_pattern
    assert [layer.key_length for layer in facts.layers] == [16, 40, 32, 40]
    assert all(layer.value_length == layer.window_cells == 0 for layer in facts.layers)


# --- weights ---------------------------------------------------------------------------------


def test_weights_are_told_by_where_the_engine_keeps_them(tmp_path: Path) -> None:
    document = model("llama", 2)
    document.add("output.weight", 256).add("rope_freqs.weight", 8).add("position_embd.weight", 32)
    document.add("token_embd_norm.weight", 64).add("blk.7.stray.weight", 16)
    facts = facts_at(document.write(tmp_path / "m.gguf"))
    assert facts.input_bytes == 4 * (256 + 32)
    assert facts.output_bytes == 4 * (64 + 256 + 16)
    assert facts.layer_weights == (4 * (64 + 128 + 8 + 64), 4 * (64 + 128))
    assert facts.tensor_types == (("F32", facts.weights_bytes),)


def test_lfm2s_embedding_norm_is_the_outputs(tmp_path: Path) -> None:
    document = model("lfm2", 2, attention__head_count_kv=[0, 2], shortconv__l_cache=3)
    facts = facts_at(document.add("token_embd_norm.weight", 64).write(tmp_path / "m.gguf"))
    assert facts.output_bytes == 4 * (64 + 64)


def test_a_missing_head_is_the_embedding_again_except_where_there_is_none(tmp_path: Path) -> None:
    assert facts_of(tmp_path, "llama").tied_output
    assert not facts_of(tmp_path, "bert").tied_output
    document = model("llama").add("output.weight", 256)
    assert not facts_at(document.write(tmp_path / "m.gguf")).tied_output


def test_tensor_types_come_by_bytes_the_most_first(tmp_path: Path) -> None:
    document = model("llama", 1)
    document.tensors.append(tensor("blk.0.big.weight", (32, 4096), 8, document.data_bytes))
    document.data_bytes += 4096 * 34
    facts = facts_at(document.write(tmp_path / "m.gguf"))
    assert facts.tensor_types == (("Q8_0", 4096 * 34), ("F32", 4 * (256 + 64 + 192)))


def test_experts_are_counted(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path, "qwen3moe", expert_count=8, expert_used_count=2, expert_feed_forward_length=32
    )
    assert (facts.experts_used, facts.expert_feed_forward_length) == (2, 32)
    assert facts_of(tmp_path, "llama").experts_used == 0


@pytest.mark.parametrize(
    ("number", "name"), [(0, ""), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank")]
)
def test_pooling_has_the_engines_name(tmp_path: Path, number: int, name: str) -> None:
    assert facts_of(tmp_path, "qwen3", pooling_type=number).pooling == name


@pytest.mark.parametrize("maker", [tiny_models.llama, tiny_models.gemma3, tiny_models.mamba])
def test_real_small_models_weights_add_up(tmp_path: Path, maker) -> None:
    facts = facts_at(maker(tmp_path / "tiny.gguf"))
    assert min(facts.layer_weights) > 0
    assert facts.input_bytes > 0


# --- numbers that can't be -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"attention__head_count_kv": -1}, "not a count"),
        ({"attention__head_count_kv": [1, 2, -3, 1]}, "not a count"),
        ({"attention__head_count_kv": [1, 2]}, "2 elements for 4 blocks"),
        ({"attention__head_count_kv": [2] * 5000}, "5000 elements"),
        ({"attention__head_count": "four"}, "not an integer"),
        ({"attention__head_count": True}, "not an integer"),
        ({"attention__key_length": 2**32}, "not a count"),
        ({"attention__key_length": 2**31, "attention__head_count_kv": 2}, "longer than"),
        ({"context_length": 2**63}, "not a count"),
        (
            {"context_length": 2**32 - 1, "attention__key_length": 2**30},
            "more than 2^63 bytes",
        ),
        ({"block_count": 513}, "block_count"),
        ({"nextn_predict_layers": 5}, "predict further"),
        ({"pooling_type": 9}, "pooling_type"),
        ({"feed_forward_length": [1] * 3}, "3 elements for 4 blocks"),
    ],
)
def test_numbers_that_the_engine_could_not_hold_are_refused(
    tmp_path: Path, settings: dict[str, Setting], said: str
) -> None:
    with pytest.raises(ModelLoadFailed) as refused:
        facts_of(tmp_path, "llama", **settings)
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("architecture", "settings", "said"),
    [
        ("gemma4", {"attention__shared_kv_layers": 3}, "at least two"),
        ("qwen3next", {**SSM, "full_attention_interval": 0}, "interval is 0"),
        ("mamba", {**SSM, "ssm__inner_size": 2**31}, "state"),
        ("nanbeige", {"num_loops": 200}, "more than 512"),
        ("deepseek4", {"attention__compress_ratios": [4]}, "1 elements for 4"),
        ("gemma3", {"attention__sliding_window": "wide"}, "not an integer"),
    ],
)
def test_settings_of_a_family_that_contradict_themselves_are_refused(
    tmp_path: Path, architecture: str, settings: dict[str, Setting], said: str
) -> None:
    with pytest.raises(ModelLoadFailed) as refused:
        facts_of(tmp_path, architecture, **settings)
    assert said in refused.value.message


# --- what no model has -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"expert_count": 8, "expert_used_count": 9}, "expert_used_count is 9, more than its 8"),
        ({"expert_count": 8, "expert_used_count": 2**32 - 1}, "more than its 8 experts"),
        ({"expert_count": 0, "expert_used_count": 2}, "more than its 0 experts"),
        ({"expert_count": 1025, "expert_used_count": 1}, "at most 1024"),
        ({"expert_feed_forward_length": 2**32 - 1}, "expert_feed_forward_length is 4294967295"),
        ({"feed_forward_length": 2**20 + 1}, "feed_forward_length is 1048577"),
        ({"embedding_length": 2**32 - 1}, "embedding_length is 4294967295"),
        ({"attention__head_count": 2**16 + 1}, "attention.head_count is 65537"),
    ],
)
def test_experts_and_widths_that_no_engine_takes_are_refused(
    tmp_path: Path, settings: dict[str, Setting], words: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=words):
        facts_of(tmp_path, "llama", 2, **settings)


def test_experts_within_bounds_are_read(tmp_path: Path) -> None:
    facts = facts_of(
        tmp_path,
        "llama",
        2,
        expert_count=1024,
        expert_used_count=1024,
        expert_feed_forward_length=64,
    )
    assert (facts.experts_used, facts.expert_feed_forward_length) == (1024, 64)


@pytest.mark.parametrize("architecture", ["hunyuan-dense", "hunyuan_vl"])
def test_the_one_expert_of_a_dense_family_is_none(tmp_path: Path, architecture: str) -> None:
    facts = facts_of(tmp_path, architecture, 2, expert_count=1, expert_used_count=1)
    assert facts.experts_used == 0
