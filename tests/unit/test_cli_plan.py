"""`modeld plan`: the picture of a budget, the daemon asked, the planner here, alternatives."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st

from modeld.cli.budget_bar import KINDS, MAX_WIDTH, MIN_WIDTH, Part, Picture, columns, draw
from modeld.cli.budget_parts import pictures
from modeld.cli.exit_codes import Exit
from modeld.cli.plan_view import remedy_command
from modeld.client.convert import from_proto
from modeld.client.values_capacity import Remedy, Resolution
from modeld.v1 import common_pb2, session_pb2
from tests.support import tiny_models
from tests.support.fake_daemon import LARGEST, planned

MIB = 1 << 20


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A real model: two dense layers whose heads of 32 elements take quantised keys."""
    path: Path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    return tiny_models.qwen2(path)


@pytest.fixture(scope="module")
def small_machine(tmp_path_factory) -> Path:
    """A machine on which nothing fits."""
    path: Path = tmp_path_factory.mktemp("machines") / "small.json"
    path.write_text(json.dumps({"host": {"total": "64MiB", "available": "4MiB"}}))
    return path


# --- the bar -------------------------------------------------------------------------------------

sizes = st.lists(st.integers(0, 1 << 45), min_size=1, max_size=len(KINDS))
widths = st.integers(MIN_WIDTH - 2, MAX_WIDTH - 2)


@given(sizes, widths)
def test_the_columns_of_a_bar_add_up_and_hide_nothing(parts, width):
    shares = columns(parts, width)
    assert sum(shares) == (width if any(parts) else 0)
    for size, share in zip(parts, shares, strict=True):
        assert (share > 0) == (size > 0)


@given(sizes, widths)
def test_a_larger_part_never_has_fewer_columns(parts, width):
    shares = columns(parts, width)
    by_size = sorted(zip(parts, shares, strict=True))
    for (smaller, fewer), (larger, more) in pairwise(by_size):
        assert smaller == larger or fewer <= more


@given(st.lists(st.integers(1000, 1 << 45), min_size=1, max_size=8), widths)
def test_columns_are_within_one_of_the_exact_share_where_each_part_has_one(parts, width):
    total = sum(parts)
    shares = columns(parts, width)
    if all(size * width >= total for size in parts):
        for size, share in zip(parts, shares, strict=True):
            assert abs(share - size * width / total) < 1


def test_a_bar_with_more_parts_than_columns_is_refused_not_cut():
    with pytest.raises(ValueError, match="don't fit"):
        columns([1] * 39, 38)


def picture_of(parts: list[int], over: int) -> Picture:
    named = [Part(kind, size) for kind, size in zip(KINDS, parts, strict=False)]
    return Picture("memory", tuple(named), over)


@given(sizes, st.integers(0, 1 << 45), st.integers(1, 200), st.booleans())
def test_a_drawn_bar_is_as_wide_as_the_terminal_between_40_and_100(parts, over, width, glyphs):
    picture = picture_of(parts, min(over, sum(parts)))
    lines = ["".join(run.text for run in line) for line in draw(picture, width, glyphs=glyphs)]
    if not any(parts):
        assert "nothing is known" in lines[1]
        return
    assert len(lines[1]) == min(max(width, 40), 100)
    if picture.over_bytes:
        assert len(lines[2]) == len(lines[1]) - 1
        assert lines[2].rstrip("!").strip("- ") == ""
        assert "!" in lines[2]
        assert any("over by" in line for line in lines)
    drawn = set(lines[1][1:-1])
    marks = {kind.glyph if glyphs else kind.letter for kind in KINDS.values()}
    assert drawn <= marks
    assert len(drawn) == sum(1 for size in parts if size)


def test_every_part_looks_different_with_and_without_glyphs():
    assert len({kind.letter for kind in KINDS.values()}) == len(KINDS)
    assert len({kind.glyph for kind in KINDS.values()}) == len(KINDS)
    assert all(kind.letter.isascii() for kind in KINDS.values())


# --- its parts -----------------------------------------------------------------------------------

amounts = st.integers(0, 1 << 36)


@st.composite
def budgets(draw: Any) -> tuple[Resolution, dict[str, int]]:
    """A plan of one memory whose rows add up as a planner's do, and its terms."""
    free, reserve, promised, resident = (draw(amounts) for _ in range(4))
    weights, kv, compute, beside = (draw(amounts) for _ in range(4))
    limit = draw(st.sampled_from([0, draw(amounts)]))
    arm = free - promised - reserve
    budget = min(arm, limit - resident) if limit else arm
    headroom = max(0, budget) // 50
    left = budget - headroom - weights - kv - compute - beside
    answer = common_pb2.Resolution(max_sessions=1)
    answer.devices.add(
        device_id="host",
        weights_bytes=weights + beside,
        kv_bytes=kv,
        compute_bytes=compute,
        free_bytes=free,
        reserve_bytes=reserve,
        budget_bytes=budget,
        headroom_bytes=headroom,
        left_bytes=left,
    )
    for name, value in (("promised", promised), ("resident", resident), ("draft", beside)):
        answer.budget.add(name=name, bytes=value)
    terms = {"have": free + resident, "left": left, "beside": beside, "beyond": arm - budget}
    return from_proto(Resolution, answer), terms


@given(budgets(), st.integers(0, 8))
def test_the_parts_of_a_memory_add_up_to_what_there_is_and_what_is_missing(
    planned_budget, sessions
):
    plan, terms = planned_budget
    (picture,) = pictures(plan, sessions)
    assert picture.over_bytes == max(0, -terms["left"])
    assert picture.total_bytes == terms["have"] + picture.over_bytes
    by_kind = {part.kind: part.bytes for part in picture.parts}
    assert by_kind.get("draft", 0) == terms["beside"]
    assert by_kind["beyond the limit"] == terms["beyond"]
    assert all(part.bytes >= 0 for part in picture.parts)


def test_every_session_that_was_asked_for_is_in_the_picture():
    plan = from_proto(Resolution, planned(session_pb2.DescribeRequest(window=1024)))
    one = plan.kv_bytes + plan.compute_bytes
    by_kind = {part.kind: part.bytes for part in pictures(plan, 3)[0].parts}
    assert by_kind["more sessions"] == 2 * one
    refused = replace(plan, refusal=replace(plan.refusal, message="no", numbers={"sessions": "9"}))
    (picture,) = pictures(refused)
    assert {part.kind: part.bytes for part in picture.parts}["more sessions"] == 8 * one


def test_each_device_has_a_picture_of_its_own():
    answer = planned(session_pb2.DescribeRequest(window=1024))
    answer.devices.add(
        device_id="GPU-1",
        name="Card",
        engine_name="CUDA0",
        layers=3,
        weights_bytes=100,
        kv_bytes=50,
        free_bytes=300,
        reserve_bytes=20,
        budget_bytes=280,
        left_bytes=130,
    )
    host, card = pictures(from_proto(Resolution, answer))
    assert host.title.startswith("host memory")
    assert card.title.startswith("CUDA0 (Card)")
    assert card.total_bytes == 300


def test_an_answer_without_rows_by_device_is_pictured_from_the_budget():
    answer = planned(session_pb2.DescribeRequest(window=1024))
    whole = pictures(from_proto(Resolution, answer))
    del answer.devices[:]
    assert [p.parts for p in pictures(from_proto(Resolution, answer))] == [p.parts for p in whole]


# --- the daemon's answer -------------------------------------------------------------------------


def test_a_running_daemon_is_asked_and_said_to_be(modeld, daemon):
    result = modeld("plan", "tiny", "--ctx", "2048", "--kv", "q8_0/f16", "--sessions", "2",
                    "--what-if", "placement=shed")  # fmt: skip
    assert result.exit_code == 0
    (request,) = daemon.world.requests_of(session_pb2.DescribeRequest)
    assert (request.window, request.k_type, request.v_type) == (2048, "q8_0", "f16")
    assert request.sessions == 2
    assert dict(request.what_if) == {"placement": "shed"}
    for words in (
        "planned by the running daemon",
        "3 layers: 1 full, 2 window of 512",
        "Q4_1, 1.1 GB",
        "memory_fit",
        "host memory: 4.3 GB",
        "W weights",
        "left free",
        "Fake 3060",
        "game 77 (1.1 GB)",
        "the engine reads 4",
        "quality_certified",
    ):
        assert words in result.stdout.replace("█", "W"), words


def test_what_does_not_fit_has_its_status_the_overshoot_and_remedies_to_type(modeld, daemon):
    result = modeld("plan", "tiny", "--ctx", "30000", "--kv", "f16")
    assert result.exit_code == Exit.NO_ROOM
    assert int(Exit.NO_ROOM) == 6
    for words in (
        "refused: Not enough memory for a window of 30000 tokens.",
        f"modeld plan tiny --kv f16 --ctx {LARGEST}",
        "modeld plan tiny --ctx 30000 --kv q8_0",
        "modeld serve --placement shed",
        "over by",
    ):
        assert words in result.stdout
    assert re.search(r"^ -+!+$", result.stdout, re.MULTILINE)


def test_a_remedys_command_fits_when_it_is_typed(modeld, daemon):
    refused = modeld("plan", "tiny", "--ctx", "30000").stdout
    (command,) = re.findall(r"set window to \d+: modeld (.*)", refused)
    assert modeld(*command.split()).exit_code == 0


@pytest.mark.parametrize(("ctx", "status"), [("1000", 0), ("30000", 6)])
def test_json_is_the_whole_description_with_the_same_status(modeld, daemon, ctx, status):
    result = modeld("plan", "tiny", "--ctx", ctx, "--json")
    assert result.exit_code == status
    told = json.loads(result.stdout)
    assert told == json.loads(modeld("describe", "tiny", "--window", ctx, "--json").stdout)
    assert bool(told["resolution"]["refusal"]["message"]) == bool(status)


def test_without_utf8_the_picture_is_letters(modeld, daemon):
    result = modeld("plan", "tiny", charset="ascii")
    assert result.exit_code == 0
    (bar,) = re.findall(r"^\[.*\]$", result.stdout, re.MULTILINE)
    assert bar.isascii()
    assert set(bar) >= set("[WKCh.]")
    assert len(bar) == 80


def test_alternatives_are_asked_through_the_same_path(modeld, daemon):
    result = modeld("plan", "tiny", "--ctx", "12000", "--what-if")
    asked = daemon.world.requests_of(session_pb2.DescribeRequest)[1:]
    assert [(r.k_type, r.sessions) for r in asked] == [
        (k, n) for k in ("f16", "q8_0", "q4_0") for n in (1, 2, 4, 8)
    ]
    assert "alternatives" in result.stdout
    assert len(re.findall(r"^q8_0 +f16 +\d +12,000 ", result.stdout, re.MULTILINE)) == 4


def test_alternatives_that_are_refused_say_why(modeld, daemon):
    result = modeld("plan", "tiny", "--ctx", "30000", "--what-if", "--json")
    assert result.exit_code == Exit.NO_ROOM
    rows = json.loads(result.stdout)["alternatives"]
    assert len(rows) == 12
    assert {(row["fits"], row["bound"]) for row in rows} == {(False, "MEMORY")}
    text = modeld("plan", "tiny", "--ctx", "30000", "--what-if").stdout
    assert len(re.findall(r"–  refused: memory$", text, re.MULTILINE)) == 12


# --- what can't be asked -------------------------------------------------------------------------


def test_an_unknown_setting_is_refused_with_the_list_before_anybody_is_asked(modeld, daemon):
    result = modeld("plan", "tiny", "--what-if", "colour=red")
    assert result.exit_code == Exit.USAGE
    assert "'colour'" in result.stderr
    assert "placement, gpu_layers" in result.stderr
    assert daemon.world.requests_of(session_pb2.DescribeRequest) == []


def test_a_setting_of_another_kind_is_refused_as_the_daemon_would(modeld):
    result = modeld("plan", "tiny", "--what-if", "gpu_layers=many")
    assert result.exit_code == Exit.USAGE
    assert "gpu_layers" in result.stderr


def test_what_if_before_the_model_says_where_it_belongs(modeld):
    result = modeld("plan", "--what-if", "tiny")
    assert result.exit_code == Exit.USAGE
    assert "put --what-if at the end" in result.stderr


def test_half_a_pair_of_types_is_refused(modeld):
    result = modeld("plan", "tiny", "--kv", "q8_0/")
    assert result.exit_code == Exit.USAGE
    assert "q8_0/f16" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("{", "a JSON object"),
        ('{"host": {"total": "8GiB", "available": "9GiB"}}', "host.available"),
        ('{"host": {"total": "8GiB"}, "gpus": []}', "gpus"),
    ],
)
def test_a_bad_machine_file_is_named_with_what_is_wrong(modeld, daemon, tmp_path, text, words):
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    result = modeld("plan", "tiny", "--device", path)
    assert result.exit_code == Exit.USAGE
    assert str(path) in result.stderr
    assert words in result.stderr
    assert daemon.world.requests_of(session_pb2.DescribeRequest) == []


def test_a_machine_file_goes_to_the_daemon_as_it_stands(modeld, daemon, small_machine):
    result = modeld("plan", "tiny", "--device", small_machine)
    (request,) = daemon.world.requests_of(session_pb2.DescribeRequest)
    assert request.machine == small_machine.read_text()
    assert f"machine ({small_machine})" in result.stdout


def test_a_model_that_is_nowhere_is_not_found(modeld, tmp_path):
    assert modeld("plan", "nothing").exit_code == Exit.NOT_FOUND
    assert modeld("plan", tmp_path / "nothing.gguf").exit_code == Exit.WORKER


# --- here, with the real planner and the real engine asked ---------------------------------------


def test_a_file_is_planned_here_with_nothing_started_or_written(modeld, root, tiny):
    result = modeld("plan", tiny, "--ctx", "1000", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    resolution = told["resolution"]
    assert resolution["context"]["effective"]["tokens"] == 1000
    assert resolution["allocated"] == 1024
    # 3 layers, 1 KV head of 32 elements, keys and values in f16.
    assert resolution["kv_bytes"] == 3 * 1024 * 32 * 2 * 2
    asked = {q["name"]: q for q in told["questions"]}
    assert asked["loader_supports_architecture"]["answer"] == "ANSWER_YES"
    assert "dry run" in asked["loader_supports_architecture"]["evidence"]
    assert list(root.iterdir()) == []
    assert "planned here" in modeld("plan", tiny).stdout


def test_a_name_of_the_store_is_planned_here_where_no_daemon_runs(modeld, tiny):
    assert modeld("models", "import", tiny, "--name", "mine").exit_code == 0
    result = modeld("plan", "mine")
    assert result.exit_code == 0
    assert "planned here; no daemon runs" in result.stdout
    assert result.stdout.startswith("mine (llama, qwen2, 3 layers: 3 full")


def test_a_machine_on_which_it_does_not_fit_is_refused_here(modeld, tiny, small_machine):
    result = modeld("plan", tiny, "--device", small_machine)
    assert result.exit_code == Exit.NO_ROOM
    assert f"machine ({small_machine})" in result.stdout
    assert "refused: " in result.stdout
    assert "over by" in result.stdout


def test_a_setting_as_if_it_were_otherwise_changes_the_plan(modeld, tiny):
    def compute(*more: str) -> int:
        told = json.loads(modeld("plan", tiny, "--ctx", "2048", "--json", *more).stdout)
        return int(told["resolution"]["compute_bytes"])

    assert compute("--what-if", "n_ubatch=64") < compute()


def test_a_batched_context_is_planned_with_all_its_streams(modeld, tiny):
    def kv_bytes(*options: str) -> int:
        planned = modeld("--json", "plan", str(tiny), "--ctx", "512", *options)
        assert planned.exit_code == Exit.OK, planned.output
        return int(json.loads(planned.output)["resolution"]["kv_bytes"])

    alone = kv_bytes()
    assert kv_bytes("--layout", "isolated") == alone
    assert kv_bytes("--layout", "batched") == 4 * alone
    assert kv_bytes("--layout", "batched", "--what-if", "batch_streams=2") == 2 * alone


def test_narrower_keys_take_less_and_types_that_a_head_does_not_hold_are_left_out(
    modeld, tiny, tmp_path
):
    told = json.loads(modeld("plan", tiny, "--ctx", "1024", "--what-if", "--json").stdout)
    kv = {(row["k_type"], row["sessions"]): row["kv_bytes"] for row in told["alternatives"]}
    assert kv["f16", 1] > kv["q8_0", 1] > kv["q4_0", 1]
    assert kv["f16", 4] == 4 * kv["f16", 1]
    narrow = tiny_models.llama(tmp_path / "narrow.gguf")  # heads of 16 elements
    result = modeld("plan", narrow, "--what-if")
    assert not re.search(r"^q8_0", result.stdout, re.MULTILINE)
    assert "left out, q8_0: " in result.stderr


def test_quantised_values_are_refused_here_as_a_daemon_refuses_them(modeld, tiny):
    result = modeld("plan", tiny, "--kv", "q8_0/q8_0")
    assert result.exit_code == Exit.USAGE
    assert "flash attention" in result.stderr


def test_an_openvino_folder_is_planned_with_its_own_types(modeld, tmp_path):
    folder = tmp_path / "ir"
    folder.mkdir()
    (folder / "openvino_model.xml").write_text(
        '<?xml version="1.0"?>\n<net name="Model0" version="11">\n\t<layers>\n\t</layers>\n</net>\n'
    )
    (folder / "openvino_model.bin").write_bytes(bytes(1000))
    config = {
        "model_type": "qwen2",
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "max_position_embeddings": 4096,
        "vocab_size": 1000,
    }
    (folder / "config.json").write_text(json.dumps(config))
    result = modeld("plan", folder, "--what-if", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["model_type"] == "openvino"
    types = {(row["k_type"], row["v_type"]) for row in answer["alternatives"]}
    assert types == {("f16", "f16"), ("u8", "u8"), ("u4", "u4")}
    loader = next(q for q in answer["questions"] if q["name"] == "loader_supports_architecture")
    assert loader["answer"] == "ANSWER_NO"  # the file is no model, and the engine says so
    assert ".xml" in loader["evidence"]


@pytest.mark.parametrize(
    ("kind", "value", "asked", "command"),
    [
        ("k_type", "q8_0", (("--kv", "f16/bf16"),), "modeld plan m --kv q8_0/bf16"),
        ("k_type", "u8", (), "modeld plan m --kv u8/u8"),
        ("sessions", "2", (("--ctx", "9"),), "modeld plan m --ctx 9 --sessions 2"),
        ("model", "small one", (), "modeld plan 'small one'"),
        ("gpu_layers", "3", (), "modeld serve --gpu-layers 3"),
        ("user_limit", "5", (), "modeld serve --user-limit-bytes 5"),
        ("device_limit", "5", (), "modeld serve --device-limit-bytes 5"),
        ("free", "5", (), ""),
    ],
)
def test_each_kind_of_remedy_is_a_command_where_there_is_one(kind, value, asked, command):
    assert remedy_command(Remedy(kind, value, ""), "m", asked) == command


# --- what is loaded beside it --------------------------------------------------------------------


def companion(path: Path, kind: str, architecture: str) -> Path:
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_type(kind)
    if kind == "adapter":
        writer.add_string("adapter.type", "lora")
    writer.add_tensor("some.weight", np.zeros((64, 64), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


WEIGHTS = 64 * 64 * 4


def rows_of(result: Result) -> dict[str, int]:
    return {row["name"]: row["bytes"] for row in json.loads(result.stdout)["resolution"]["budget"]}


def test_projector_adapters_and_draft_are_charged_and_the_estimates_told(modeld, tiny, tmp_path):
    projector = companion(tmp_path / "mm.gguf", "mmproj", "clip")
    one = companion(tmp_path / "one.gguf", "adapter", "qwen2")
    two = companion(tmp_path / "two.gguf", "adapter", "qwen2")
    beside = ("--projector", projector, "--adapter", one, "--adapter", two, "--draft", tiny)
    alone = json.loads(modeld("plan", tiny, "--ctx", "1024", "--json").stdout)["resolution"]
    rows = rows_of(modeld("plan", tiny, "--ctx", "1024", *beside, "--json"))
    assert rows["projector"] == WEIGHTS
    assert rows["projector_compute"] == 512 * MIB
    assert rows["adapters"] == 2 * WEIGHTS
    own = ("weights_bytes", "kv_bytes", "compute_bytes")
    assert rows["draft"] == sum(alone[name] for name in own)
    text = modeld("plan", tiny, "--ctx", "1024", *beside).stdout
    assert "an estimate (1.5 times its weights, at least 512 MiB)" in text
    assert "draft: tiny" in text
    for kind in ("projector", "adapters", "draft"):
        assert re.search(rf"^  \S {kind} ", text, re.MULTILINE)


def test_a_draft_is_counted_for_the_window_that_was_asked_where_the_model_does_not_fit(
    modeld, tiny, small_machine
):
    text = modeld("plan", tiny, "--ctx", "512", "--draft", tiny, "--device", small_machine).stdout
    assert "compute for one context of 512 tokens" in text


@pytest.mark.parametrize(
    ("option", "kind", "architecture", "words"),
    [
        ("--projector", "adapter", "qwen2", "use --adapter"),
        ("--adapter", "mmproj", "clip", "use --projector"),
        ("--draft", "adapter", "qwen2", "--adapter"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_where_it_belongs(
    modeld, tiny, tmp_path, option, kind, architecture, words
):
    other = companion(tmp_path / "other.gguf", kind, architecture)
    result = modeld("plan", tiny, option, other)
    assert result.exit_code == Exit.USAGE
    assert "INVALID_REQUEST" in result.stderr
    assert str(other) in result.stderr
    assert words in result.stderr


def test_a_model_as_a_projector_is_refused(modeld, tiny):
    result = modeld("plan", tiny, "--projector", tiny)
    assert result.exit_code == Exit.USAGE
    assert "name it as MODEL" in result.stderr
