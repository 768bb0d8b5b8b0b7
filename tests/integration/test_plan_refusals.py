"""A plan that doesn't fit is refused with a sum that adds up, and with remedies that work.

Asked of a real daemon, on machines that are described in the question so that their numbers are
known; and of this machine, in a memory cgroup, by really opening a session.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import pytest

from modeld.client import (
    Client,
    ContextReason,
    Description,
    InsufficientMemory,
    ModelLoadFailed,
    SlotState,
)
from modeld.client.convert import from_proto
from modeld.client.values_capacity import Remedy, Resolution
from modeld.shared.capacity import CapacityRequest
from modeld.supervisor import offline
from modeld.supervisor.config import load_config
from modeld.supervisor.probes.simulated import parse_machine
from tests.support import deep_models, shapes, tiny_models
from tests.support.cgroup import limited_daemon, memory_cgroup
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.product import ask

pytestmark = pytest.mark.real

MIB, GIB = 1 << 20, 1 << 30
HEADROOM = 0.02
WHOLE, HALF = "whole", "half"  # one model's shape in two files: F32, and F16 of half the bytes


@dataclass(frozen=True)
class Asked:
    """A question. ``device_free`` 0: a machine without an accelerator. Sizes are bytes."""

    model: str = WHOLE
    window: int = 0
    k_type: str = "f16"
    sessions: int = 0
    host_free: int = 8 * GIB
    device_free: int = 0
    what_if: Mapping[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        """A card of 6 GiB, where there is one, beside 16 GiB."""
        card = {
            "id": "gpu-0",
            "name": "a card of 6 GiB",
            "kind": "nvidia",
            "engine_name": "CUDA0",
            "total": 6 * GIB,
            "free": self.device_free,
        }
        return json.dumps(
            {
                "host": {"total": 16 * GIB, "available": self.host_free},
                "devices": [card] if self.device_free else [],
            }
        )

    def with_setting(self, name: str, value: str) -> Asked:
        return replace(self, what_if={**self.what_if, name: value})


Ask = Callable[[Asked], Resolution]


def following(asked: Asked, remedy: Remedy) -> Asked:
    """The same question after the remedy was followed."""
    match remedy.kind:
        case "window":
            return replace(asked, window=int(remedy.value))
        case "sessions":
            return replace(asked, sessions=int(remedy.value))
        case "k_type":
            return replace(asked, k_type=remedy.value)
        case "model":
            return replace(asked, model=remedy.value)
        case "placement" | "gpu_layers" | "max_sessions":
            return asked.with_setting(remedy.kind, remedy.value)
        case "user_limit" | "device_limit":
            return asked.with_setting(f"{remedy.kind}_bytes", remedy.value)
        case "free" if "CUDA0" in remedy.text:
            return replace(asked, device_free=asked.device_free + int(remedy.value))
        case "free":
            return replace(asked, host_free=asked.host_free + int(remedy.value))
    raise AssertionError(f"an unknown remedy: {remedy}")


def just_less(asked: Asked, remedy: Remedy) -> Asked | None:
    """The question after a little less than the remedy; None where there is no less of it."""
    steps = {"free": -1, "user_limit": -1, "device_limit": -1}  # bytes
    steps |= {"window": 1, "sessions": 1, "gpu_layers": 1}
    if remedy.kind not in steps:
        return None
    return following(asked, replace(remedy, value=str(int(remedy.value) + steps[remedy.kind])))


def assert_adds_up(numbers: Mapping[str, str]) -> None:
    """Recompute the whole sum from the refusal's own numbers."""
    n = {name: int(value) for name, value in numbers.items() if value.lstrip("-").isdigit()}
    beside = sum(
        n[f"{name}_bytes"] for name in ("projector", "projector_compute", "adapter", "draft")
    )
    context = n["kv_bytes"] + n["compute_bytes"]
    assert n["needed_bytes"] == n["weights_bytes"] + beside + n["sessions"] * context
    free = n["free_bytes"] + n["loaded_bytes"] + n["reclaimable_bytes"]
    budget = free - n["promised_bytes"] - n["reserve_bytes"]
    if n["user_limit_bytes"]:
        budget = min(budget, n["user_limit_bytes"] - n["resident_bytes"])
    assert n["budget_bytes"] == budget
    spendable = int(max(0, budget) * (1 - HEADROOM)) if budget > 0 else budget
    assert n["headroom_bytes"] == budget - spendable
    assert n["needed_bytes"] > spendable, "it would have fitted"
    # So many bytes more, of which a part is headroom again, and it fits to the byte.
    more = budget + n["short_bytes"]
    assert int(more * (1 - HEADROOM)) >= n["needed_bytes"]
    assert int((more - 1) * (1 - HEADROOM)) < n["needed_bytes"]
    assert n["allocated"] == -(-n["window"] // 256) * 256


def assert_remedies_work(asking: Ask, asked: Asked, *kinds: str) -> None:
    """The refusal offers exactly these, each makes it fit, and a little less of it doesn't."""
    refused = asking(asked).refusal
    assert refused.message
    assert sorted(remedy.kind for remedy in refused.remedies) == sorted(kinds)
    for remedy in refused.remedies:
        assert not asking(following(asked, remedy)).refusal.message, remedy
        less = just_less(asked, remedy)
        if less is not None:
            assert asking(less).refusal.message, f"less than the remedy is enough: {remedy}"


# --- on machines that the question describes -----------------------------------------------------


def _half(path: Path) -> Path:
    """The same shape with its matrices in half precision."""
    usual = gguf.GGUFWriter.add_tensor

    def halved(writer: Any, name: str, values: Any, *rest: Any, **named: Any) -> None:
        narrow = values.astype(np.float16) if values.ndim > 1 else values
        usual(writer, name, narrow, *rest, **named)

    with patch.object(gguf.GGUFWriter, "add_tensor", halved):
        return deep_models.llama(path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    folder = tmp_path_factory.mktemp("refusals")
    with running_daemon(floor_window=4096) as running:
        with running.client() as client:
            client.import_model(deep_models.llama(folder / "whole.gguf"), name=WHOLE)
            client.import_model(_half(folder / "half.gguf"), name=HALF)
            client.import_model(
                tiny_models.llama(folder / "z.gguf", architecture="zorkformer"), name="zork"
            )
        yield running


@pytest.fixture(scope="module")
def asked_client(served: RunningDaemon) -> Iterator[Client]:
    with served.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def asking(asked_client: Client) -> Ask:
    def answer(asked: Asked) -> Resolution:
        described = asked_client.describe(
            asked.model,
            window=asked.window,
            k_type=asked.k_type,
            sessions=asked.sessions,
            machine=asked.machine,
            what_if=asked.what_if,
        )
        assert described.resolution_source == "hypothetical"
        return described.resolution

    return answer


def needed(asking: Ask, asked: Asked) -> tuple[int, int, int]:
    """Bytes of weights, KV and compute buffer where there is room."""
    plan = asking(replace(asked, what_if={}))
    assert not plan.refusal.message
    return plan.weights_bytes, plan.kv_bytes, plan.compute_bytes


def test_a_limit_of_the_user_is_named_and_so_is_what_fits_under_it(asking: Ask) -> None:
    asked = Asked(window=4096)
    weights, kv, compute = needed(asking, asked)
    # Room for the model and most of the window.
    limit = str(int((weights + kv + compute) / (1 - HEADROOM)) - 4 * MIB)
    asked = asked.with_setting("user_limit_bytes", limit)
    refused = asking(asked).refusal
    assert refused.bound is ContextReason.USER_LIMIT
    assert refused.numbers["budget_term"] == "user_limit"
    assert_adds_up(refused.numbers)
    assert f"{weights} weights" in refused.message
    assert_remedies_work(asking, asked, "window", "k_type", "model", "user_limit")


def test_a_model_larger_than_the_machines_memory_is_refused(asking: Ask) -> None:
    asked = Asked(window=1024)
    weights, _, _ = needed(asking, asked)
    reserve = 1 * GIB  # the default for a machine of 16 GiB
    asked = replace(asked, host_free=reserve + weights // 4)
    refused = asking(asked).refusal
    assert refused.bound is ContextReason.RESERVE  # without it there would be room
    assert_adds_up(refused.numbers)
    assert_remedies_work(asking, asked, "free")
    asked = asked.with_setting("reserve_bytes", "1")
    asked = replace(asked, host_free=weights // 4)
    refused = asking(asked).refusal
    assert refused.bound is ContextReason.MEMORY
    assert refused.numbers["largest_window"] == "0"
    assert "No window fits" in refused.message
    assert_adds_up(refused.numbers)
    assert_remedies_work(asking, asked, "free")


def test_a_floor_that_doesnt_fit_is_refused_as_the_floor(asking: Ask) -> None:
    asked = Asked(window=4096)
    weights, kv, compute = needed(asking, asked)
    limit = str(int((weights + kv + compute) / (1 - HEADROOM)) - 4 * MIB)
    asked = replace(asked, window=0).with_setting("user_limit_bytes", limit)
    refused = asking(asked).refusal
    assert refused.numbers["asked_by"] == "floor"
    assert refused.numbers["window"] == "4096"
    assert_adds_up(refused.numbers)
    assert_remedies_work(asking, asked, "window", "k_type", "model", "user_limit")


def test_too_many_sessions_are_refused_with_how_many_fit(asking: Ask) -> None:
    asked = Asked(window=1024, sessions=6)
    weights, kv, compute = needed(asking, asked)
    limit = str(int((weights + 4 * (kv + compute)) / (1 - HEADROOM)) + MIB)
    asked = asked.with_setting("user_limit_bytes", limit)
    refused = asking(asked).refusal
    assert refused.numbers["sessions"] == "6"
    assert_adds_up(refused.numbers)
    found = {remedy.kind: remedy.value for remedy in refused.remedies}
    assert found["sessions"] == "4"
    assert_remedies_work(asking, asked, *found)


def test_more_than_the_models_ceiling_is_cut_to_it_and_not_refused(asking: Ask) -> None:
    plan = asking(Asked(window=10 * deep_models.CONTEXT))
    assert not plan.refusal.message
    effective = plan.context.effective
    assert (effective.tokens, effective.reason) == (
        deep_models.CONTEXT,
        ContextReason.MODEL_CEILING,
    )
    assert plan.context.requested.tokens == 10 * deep_models.CONTEXT
    assert plan.context.memory_fit.tokens > deep_models.CONTEXT


# --- on a card of 6 GiB --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_a_file(tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """Planned without a daemon, for the shape of a model of 8 billion parameters."""
    path = shapes.make("llama-3.1-8b", tmp_path_factory.mktemp("shape"))
    config = load_config({}, {}, tmp_path_factory.mktemp("root"))
    model = offline.find_model(str(path), config.data_root)

    def answer(asked: Asked) -> Resolution:
        told = offline.describe(
            config,
            model,
            CapacityRequest(window=asked.window, k_type=asked.k_type, sessions=asked.sessions),
            machine=parse_machine(asked.machine, "a test's machine"),
            what_if=asked.what_if,
        )
        described = from_proto(Description, told)
        assert described.machine.source == "a test's machine"
        return described.resolution

    return answer


def test_a_model_too_large_for_the_card_is_refused_and_told_how_to_fit(of_a_file: Ask) -> None:
    asked = Asked(window=16384, host_free=12 * GIB, device_free=int(5.5 * GIB))
    refused = of_a_file(asked).refusal
    assert refused.bound is ContextReason.MEMORY
    assert refused.numbers["place"] == "gpu-0"
    assert_adds_up(refused.numbers)
    # Not to free memory: so much as is missing isn't taken on that card.
    assert_remedies_work(of_a_file, asked, "window", "gpu_layers", "placement")
    shed = of_a_file(asked.with_setting("placement", "shed"))
    assert shed.shed
    assert 0 < shed.gpu_layers < 33
    layers = next(r.value for r in refused.remedies if r.kind == "gpu_layers")
    assert shed.gpu_layers == int(layers)
    host, card = shed.devices
    assert host.layers + card.layers == 33
    assert card.left_bytes >= 0
    assert host.left_bytes >= 0


def test_memory_that_others_hold_on_the_card_is_what_to_free(of_a_file: Ask) -> None:
    asked = Asked(window=2048, host_free=12 * GIB, device_free=3 * GIB)
    assert_adds_up(of_a_file(asked).refusal.numbers)
    assert_remedies_work(of_a_file, asked, "free", "gpu_layers", "placement")


def test_a_limit_on_the_card_is_named_as_one(of_a_file: Ask) -> None:
    asked = Asked(window=2048, host_free=12 * GIB, device_free=6 * GIB)
    asked = asked.with_setting("device_limit_bytes", str(4 * GIB))
    refused = of_a_file(asked).refusal
    assert refused.bound is ContextReason.USER_LIMIT
    assert_adds_up(refused.numbers)
    found = {remedy.kind for remedy in refused.remedies}
    assert "device_limit" in found
    assert_remedies_work(of_a_file, asked, *found)


# --- by really opening a session -----------------------------------------------------------------


def test_a_model_too_large_for_its_cgroup_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    shape = shapes.make("llama-3.2-1b", tmp_path)
    unproven = "that a model too large for a cgroup is refused by the machine's own readings"
    with (
        memory_cgroup(GIB, unproven) as group,
        limited_daemon(group) as daemon,
        daemon.client() as client,
    ):
        client.import_model(shape, name="large")
        worker = client.status().slots[0].worker.pid
        with pytest.raises(InsufficientMemory) as refused:
            client.open_session("large", window=1024)
        assert_adds_up(refused.value.metadata)
        assert int(refused.value.metadata["free_bytes"]) < GIB
        assert int(refused.value.metadata["weights_bytes"]) > GIB // 2
        (slot,) = client.status().slots
        assert slot.state is SlotState.EMPTY
        assert slot.worker.pid == worker
        # What is freed is missing no more: as much again for the cgroup, and it is planned.
        missing = int(refused.value.metadata["short_bytes"])
        group.limit = GIB + 2 * missing
        assert not client.describe("large", window=1024).resolution.refusal.message
        group.limit = GIB + missing // 2
        assert client.describe("large", window=1024).resolution.refusal.message


def test_a_file_of_an_architecture_that_the_engine_lacks_is_told_apart(
    asked_client: Client,
) -> None:
    described = asked_client.describe("zork")
    assert described.facts.architecture == "zorkformer"
    assert described.facts.layers == 2
    questions = {question.name: question for question in described.questions}
    assert questions["metadata_parsed"].answer == "yes"
    loader = questions["loader_supports_architecture"]
    assert loader.answer == "no"
    assert "zorkformer" in loader.evidence
    assert described.resolution.context.effective.tokens > 0
    assert described.resolution.kv_bytes > 0
    worker = asked_client.status().slots[0].worker
    for attempt in (
        lambda: asked_client.open_session("zork", window=512),
        lambda: asked_client.load_model("zork"),
    ):
        with pytest.raises(ModelLoadFailed) as refused:
            attempt()
        assert "unknown model architecture: 'zorkformer'" in refused.value.message
        assert refused.value.metadata["architecture"] == "zorkformer"
    (slot,) = asked_client.status().slots
    assert (slot.worker.pid, slot.worker.restarts) == (worker.pid, worker.restarts)
    assert slot.state is SlotState.EMPTY
    with asked_client.open_session(HALF, window=512, prompt_format="raw") as session:
        assert len(ask(session, "12345", "678", 3, ignore_eos=True).ids) == 3
