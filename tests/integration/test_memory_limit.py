"""An admitted plan opens and fills its window, at the exact limit of a real memory cgroup.

The daemon and its worker live in the cgroup. Its limit is lowered until the plan of the largest
window has next to nothing left over; then every session is opened, filled to the last token with
full micro-batches, and its answer compared with one that was computed without a limit.
"""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from modeld.client import (
    Client,
    InsufficientMemory,
    Session,
    StopReason,
)
from modeld.workers.llama.engine import LlamaEngine
from tests.support import deep_models
from tests.support.cgroup import (
    LimitedDaemon,
    MemoryCgroup,
    limited_daemon,
    memory_cgroup,
)
from tests.support.product import ask
from tests.support.reference import load_request, never

pytestmark = pytest.mark.real

MIB = 1 << 20
SEED = 20240607
CASES = 17  # of the seed's combinations; each takes some ten seconds
ROOMY = 8 << 30  # bytes, while nothing is to be short
SLACK = 1 << 20  # bytes left over at the limit: pages are charged ahead, heaps grow a little
# Bytes: each CPU's share of pages that the kernel counts as used before anybody uses them.
CHARGED_AHEAD = (os.cpu_count() or 1) * 64 * mmap.PAGESIZE
TURN_LIMIT_S = 300.0  # of one turn: short of memory, an engine reads its weights again and again
PAD = 256  # tokens, to whose multiples an engine rounds a window
HEADROOM = 0.02  # of a budget
DECODED = 8  # tokens, up to the last of the window
SMOL = "smollm2"
BATCHES = ((512, 512), (512, 256), (256, 128), (64, 64))  # n_batch, n_ubatch
UNPROVEN = (
    "that an admitted plan always opens, and fills its window with full micro-batches, at the "
    "exact limit of its memory"
)


@dataclass(frozen=True)
class Case:
    """One combination; its limit is what the plan of ``sessions`` such windows needs."""

    number: int
    model: str
    batches: tuple[int, int]  # n_batch, n_ubatch
    k_type: str
    v_type: str
    sessions: int
    alike: bool  # the sessions' prompts, so that a prefix is copied
    window: int  # tokens, as the engine rounds them

    def __str__(self) -> str:
        n_batch, n_ubatch = self.batches
        alike = "-alike" if self.alike else ""
        return (
            f"{self.number}-{self.model}-{n_batch}/{n_ubatch}-{self.k_type}/{self.v_type}"
            f"-{self.sessions}x{self.window}{alike}"
        )


def _cases() -> list[Case]:
    """The same ones for a seed, sorted so that those of one daemon follow each other."""
    chance = random.Random(SEED)
    found = []
    for number in range(CASES):
        small = number % 5 != 4
        model = chance.choice(list(deep_models.MODELS)) if small else SMOL
        n_batch, n_ubatch = chance.choice(BATCHES if small else BATCHES[1:])
        sessions = chance.choice((1, 1, 2, 3) if small else (1, 1, 2))
        pads = chance.randint(max(2, 2 * n_ubatch // PAD), 6 if small else 3)
        found.append(
            Case(
                number,
                model,
                (n_batch, n_ubatch),
                chance.choice(("f16", "f16", "f32", "q8_0")),
                chance.choice(("f16", "f16", "f16", "f32")),
                sessions,
                sessions > 1 and chance.random() < 0.5,
                pads * PAD,
            )
        )
    return sorted(found, key=lambda case: case.batches)


class Served:
    """The daemon in its cgroup, for one choice of batch sizes at a time."""

    def __init__(self, group: MemoryCgroup, files: dict[str, Path]) -> None:
        self.group, self.files = group, files
        self.daemon: LimitedDaemon
        self.client: Client
        self._batches: tuple[int, int] | None = None
        self._stack = ExitStack()

    def with_batches(self, batches: tuple[int, int]) -> None:
        if batches == self._batches:
            return
        self.stop()
        self.group.limit = ROOMY
        self._batches = batches
        self.daemon = self._stack.enter_context(
            limited_daemon(
                self.group,
                n_batch=batches[0],
                n_ubatch=batches[1],
                reserve_bytes=1,  # 0 is the default; nothing is left to the rest of the machine
                floor_window=256,
                cold_ram_bytes=0,
                threads=2,
                idle_release_s=0,
            )
        )
        self.client = self._stack.enter_context(self.daemon.client())
        for name, path in self.files.items():
            # A copy's pages are this cgroup's; those of the file may be charged to another one.
            self.client.import_model(path, name=name, copy=True)

    def stop(self) -> None:
        self._batches = None
        self._stack.close()
        self._stack = ExitStack()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("deep")
    made = {name: make(folder / f"{name}.gguf") for name, make in deep_models.MODELS.items()}
    return {**made, SMOL: demo_model}


@pytest.fixture(scope="module")
def served(files: dict[str, Path]) -> Iterator[Served]:
    with memory_cgroup(ROOMY, UNPROVEN) as group:
        made = Served(group, files)
        try:
            yield made
        finally:
            made.stop()


class Cold:
    """What the engine answers outside the cgroup, in one context for each question."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._engine = LlamaEngine()
        self._loaded: tuple[str, tuple[int, int]] | None = None
        self._known: dict[tuple[object, ...], list[int]] = {}

    def answer(self, case: Case, text: str, window: int, count: int) -> list[int]:
        """The most likely tokens after ``text``, ``count`` of them."""
        key = (case.model, case.batches, case.k_type, case.v_type, text, window, count)
        if key not in self._known:
            self._known[key] = self._compute(case, text, window, count)
        return self._known[key]

    def _compute(self, case: Case, text: str, window: int, count: int) -> list[int]:
        if self._loaded != (case.model, case.batches):
            path, (n_batch, n_ubatch) = self._files[case.model], case.batches
            request = load_request(path, n_batch=n_batch, n_ubatch=n_ubatch)
            self._engine.load(request, lambda _stage, _fraction: None, never)
            self._loaded = case.model, case.batches
        context = self._engine.new_context(window, case.k_type, case.v_type)
        ids = self._engine.tokenizer.encode(text)
        assert context.evaluate(ids, 0, cancelled=never) == len(ids)
        answer = [int(np.argmax(context.logits()))]
        while len(answer) < count:
            context.step(answer[-1], len(ids) + len(answer) - 1)
            answer.append(int(np.argmax(context.logits())))
        context.close()
        return answer

    def close(self) -> None:
        self._engine.unload()


@pytest.fixture(scope="module")
def cold(files: dict[str, Path]) -> Iterator[Cold]:
    made = Cold(files)
    yield made
    made.close()


# --- at the exact limit --------------------------------------------------------------------------


def slack(case: Case) -> int:
    """Less than a further window would cost; a real vocabulary's heaps grow by more."""
    return 2 * SLACK if case.model == SMOL else SLACK


def admit(served: Served, case: Case) -> None:
    """Load the model, and limit the cgroup to what the plan of the case's windows needs: they are
    then the largest that fit.
    """
    client, group = served.client, served.group
    client.unload_model(force=True)
    group.limit = ROOMY
    client.load_model(case.model)
    types: dict[str, Any] = {"k_type": case.k_type, "v_type": case.v_type}
    plan = client.describe(case.model, window=case.window, **types).resolution
    contexts = case.sessions * (plan.kv_bytes + plan.compute_bytes)
    group.limit = group.used + int((plan.weights_bytes + contexts) / (1 - HEADROOM)) + slack(case)
    told = client.describe(
        case.model, window=deep_models.CONTEXT, sessions=case.sessions, **types
    ).resolution.refusal.numbers
    assert int(told["largest_window"]) == case.window, told


def tighten(served: Served, case: Case, window: int, sessions: int) -> None:
    """Lower the cgroup's limit until the plan of so many more sessions has nothing left over."""
    plan = served.client.describe(
        case.model,
        window=window,
        sessions=case.sessions,
        k_type=case.k_type,
        v_type=case.v_type,
    ).resolution
    rows = {row.name: row.bytes for row in plan.budget}
    contexts = sessions * (plan.kv_bytes + plan.compute_bytes)
    left = rows["budget"] - rows["headroom"] - rows["weights"] - contexts
    share = rows["headroom"] / rows["budget"]  # of each byte less, so much is headroom
    served.group.limit -= max(0, int(left / (1 - share)) - slack(case))


def open_all(served: Served, case: Case, window: int) -> list[Session]:
    """Every session, and before the last one a token more than fits, which must be refused."""
    opened = []
    options: dict[str, Any] = {
        "k_type": case.k_type,
        "v_type": case.v_type,
        "prompt_format": "raw",
    }
    for number in range(case.sessions):
        tighten(served, case, window, case.sessions - number)
        if number == case.sessions - 1:
            assert_refused(served, case, window + 1)
        opened.append(served.client.open_session(case.model, window=window, **options))
    return opened


def assert_refused(served: Served, case: Case, window: int) -> None:
    worker = served.client.status().slots[0].worker.pid
    before = data_bytes(worker)
    with pytest.raises(InsufficientMemory) as refused:
        served.client.open_session(
            case.model,
            window=window,
            k_type=case.k_type,
            v_type=case.v_type,
            prompt_format="raw",
        )
    assert int(refused.value.metadata["largest_window"]) == window - 1
    assert data_bytes(worker) - before < MIB, "something was allocated for a refused window"


def data_bytes(pid: int) -> int:
    """Private writable memory of a process, touched or not."""
    return int(psutil.Process(pid).memory_info().data)


def digits(case: Case, session: int, count: int) -> str:
    """A text of ``count`` tokens in every vocabulary here: a digit is one."""
    chance = random.Random(f"{SEED} {case.number} {0 if case.alike else session}")
    return "".join(chance.choices("0123456789", k=count))


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_an_admitted_plan_opens_and_fills_its_window_at_the_exact_limit(
    served: Served, cold: Cold, case: Case, record_property: Callable[[str, object], None]
) -> None:
    served.with_batches(case.batches)
    group, client = served.group, served.client
    admit(served, case)
    window = case.window
    worker, generation = client.status().slots[0].worker.pid, client.status().generation
    kills, full = group.oom_kills, group.times_full
    sessions = open_all(served, case, window)
    told = f"{case} (seed {SEED}), window {window}, limit {group.limit}"
    answers = []
    for number, session in enumerate(sessions):
        text = digits(case, number, window - DECODED)
        answer = ask(session, text[:-1], text[-1:], 0, ignore_eos=True, timeout=TURN_LIMIT_S)
        assert answer.stop is StopReason.CONTEXT_FULL, told
        assert answer.final.resident == window, told
        answers.append((text, answer.ids))
        slot = client.status().slots[0]
        assert group.oom_kills == kills, f"killed: {told}, session {number}"
        assert (slot.worker.pid, slot.generation) == (worker, generation), told
    over = group.used + sessions[0].resolution.weights_bytes - group.limit
    record_property("times_full", group.times_full - full)
    record_property("left_bytes", -over)
    print(f"{told}: {-over} bytes left, full {group.times_full - full} times")
    group.limit = ROOMY
    for session in sessions:
        session.close(discard=True)
    for text, ids in answers:
        assert ids == cold.answer(case, text, window, len(ids)), told
    # Weights may be dropped and read again, so that a plan may be exceeded with nobody killed.
    assert over <= CHARGED_AHEAD, (
        f"{over} bytes more than planned were used, at the weights' expense: {told}"
    )
