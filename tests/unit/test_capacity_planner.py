"""The capacity planner: the six numbers, their bounds, refusals that add up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modeld.shared.capacity import (
    CapacityPolicy,
    CapacityRequest,
    LayerFacts,
    MachineReading,
    MemorySnapshot,
    ModelFacts,
    Number,
    Reason,
    Resolution,
    SlotUse,
)
from modeld.shared.errors import InsufficientMemory, InvalidRequest
from modeld.shared.planner.budget import (
    NO_COMPANIONS,
    Budget,
    default_reserve,
    estimate_compute_bytes,
    needed_total,
)
from modeld.shared.planner.capacity import MAX_CONTEXT_TOKENS, confirm, resolve, survey
from modeld.shared.planner.costs import Costs
from modeld.shared.planner.graph import work_bytes
from modeld.shared.planner.windows import Decision, Problem, decide

MIB = 1 << 20
GIB = 1 << 30

SMOL = ModelFacts(
    architecture="llama",
    name="smollm2",
    layers=(LayerFacts(30, 3, 64, 64),),
    embedding_length=576,
    heads=9,
    model_max=8192,
    vocabulary=49152,
    weights_bytes=98 * MIB,
    file_bytes=100 * MIB,
    quantization="Q4_1",
    feed_forward_length=1536,
)
POLICY = CapacityPolicy(reserve_bytes=512 * MIB, n_ubatch=256)
PLENTY = MachineReading(MemorySnapshot(total_bytes=24 * GIB, available_bytes=20 * GIB))
FRESH = SlotUse()
AUTO = CapacityRequest()


def memory(available: int) -> MachineReading:
    return MachineReading(MemorySnapshot(total_bytes=24 * GIB, available_bytes=available))


def rows_of(resolution: Resolution) -> dict[str, int]:
    return {row.name: row.bytes for row in resolution.budget}


# --- the compute estimate --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "ubatch", "measured_mib"),
    [(4096, 256, 43), (4096, 128, 22), (8192, 256, 83), (8192, 512, 166)],
)
def test_the_compute_estimate_is_near_what_was_measured(
    context: int, ubatch: int, measured_mib: int
) -> None:
    estimate = estimate_compute_bytes(SMOL, context, n_batch=512, n_ubatch=ubatch) / MIB
    assert measured_mib * 0.97 <= estimate <= measured_mib * 1.1


def test_logits_for_every_token_of_a_batch_dominate_a_short_context() -> None:
    estimate = estimate_compute_bytes(SMOL, 512, n_batch=512, n_ubatch=512, outputs=512) / MIB
    assert 96 <= estimate <= 104


def test_the_estimate_does_without_optional_facts() -> None:
    bare = replace(SMOL, feed_forward_length=0, heads=0)
    full = estimate_compute_bytes(SMOL, 4096, n_batch=512, n_ubatch=256)
    assert estimate_compute_bytes(bare, 4096, n_batch=512, n_ubatch=256) == pytest.approx(
        full, rel=0.1
    )


def test_the_default_reserve_is_a_sixteenth_within_its_bounds() -> None:
    assert default_reserve(100 * GIB) == 4 * GIB
    assert default_reserve(32 * GIB) == 2 * GIB
    assert default_reserve(4 * GIB) == 512 * MIB
    assert default_reserve(1 * GIB) == 256 * MIB


# --- what is served --------------------------------------------------------------------------


def test_with_plenty_of_memory_the_model_ceiling_is_served() -> None:
    found = resolve(SMOL, AUTO, POLICY, PLENTY, FRESH)
    assert found.numbers.effective.tokens == 8192
    assert found.numbers.effective.reason is Reason.MODEL_CEILING
    assert found.numbers.effective.runner_up is Reason.MEMORY
    assert 8192 < found.numbers.effective.runner_up_tokens < found.numbers.memory_fit.tokens
    assert found.numbers.planner.tokens == 8192
    assert found.numbers.hot.tokens == 8192
    assert found.numbers.requested == Number(0, Reason.NONE)
    assert found.kv_bytes == 8192 * 23040
    assert found.max_sessions == POLICY.max_sessions
    assert found.placement == "host"


def test_a_request_is_served_exactly_and_allocated_as_the_engine_rounds() -> None:
    found = resolve(SMOL, CapacityRequest(window=1000), POLICY, PLENTY, FRESH)
    assert found.numbers.effective.tokens == 1000
    assert found.numbers.effective.reason is Reason.REQUEST
    assert found.numbers.effective.runner_up is Reason.MODEL_CEILING
    assert found.numbers.hot.tokens == found.allocated == 1024
    assert found.kv_bytes == 1024 * 23040
    assert found.numbers.planner == Number(1000, Reason.COLD_BUDGET, Reason.MODEL_CEILING, 8192)


def test_the_cold_budget_is_what_the_plan_leaves_free() -> None:
    policy = replace(POLICY, cold_budget_bytes=GIB)
    request = CapacityRequest(window=1024)
    roomy = resolve(SMOL, request, policy, PLENTY, FRESH)
    assert roomy.cold_bytes == rows_of(roomy)["cold_budget"] == GIB
    assert roomy.numbers.planner == Number(8192, Reason.MODEL_CEILING, Reason.COLD_BUDGET, 47627)
    left = rows_of(roomy)["left"] - 100 * 23040
    taken = int(left / (1 - policy.headroom))
    host = replace(PLENTY.host, available_bytes=PLENTY.host.available_bytes - taken)
    short = resolve(SMOL, request, policy, replace(PLENTY, host=host), FRESH)
    assert short.cold_bytes == rows_of(short)["left"]
    assert short.numbers.planner.tokens == pytest.approx(1124, abs=1)
    assert short.numbers.planner.reason is Reason.COLD_BUDGET
    unbounded = replace(policy, cold_budget_bytes=1 << 50)
    one, three = (
        resolve(SMOL, replace(request, sessions=sessions), unbounded, PLENTY, FRESH)
        for sessions in (1, 3)
    )
    assert one.cold_bytes - three.cold_bytes == 2 * (one.kv_bytes + one.compute_bytes)


def test_a_request_beyond_the_ceiling_is_bound_by_the_ceiling_not_by_memory() -> None:
    found = resolve(SMOL, CapacityRequest(window=100_000), POLICY, PLENTY, FRESH)
    assert found.numbers.effective.tokens == 8192
    assert found.numbers.effective.reason is Reason.MODEL_CEILING
    assert found.numbers.effective.runner_up is Reason.REQUEST
    assert found.numbers.requested == Number(100_000, Reason.REQUEST)


def test_the_operator_s_window_bounds_requests_too() -> None:
    policy = replace(POLICY, max_window=2048)
    for request in (AUTO, CapacityRequest(window=4096)):
        found = resolve(SMOL, request, policy, PLENTY, FRESH)
        assert found.numbers.effective.tokens == 2048
        assert found.numbers.effective.reason is Reason.USER_LIMIT


def test_an_automatic_window_leaves_room_for_more_sessions() -> None:
    found = resolve(SMOL, AUTO, replace(POLICY, sessions_share=4), memory(1600 * MIB), FRESH)
    assert found.numbers.effective.reason is Reason.MEMORY
    assert 4096 <= found.numbers.effective.tokens < 8192
    assert found.max_sessions >= 4


def test_the_floor_is_served_where_the_share_would_be_smaller() -> None:
    found = resolve(SMOL, AUTO, POLICY, memory(800 * MIB), FRESH)
    assert found.numbers.effective.tokens == 4096
    assert found.numbers.effective.reason is Reason.FLOOR
    assert found.numbers.effective.runner_up is Reason.MEMORY
    assert found.numbers.effective.runner_up_tokens < 4096
    assert found.max_sessions == 1


def test_a_user_limit_that_decides_is_named_and_memory_comes_next() -> None:
    policy = replace(POLICY, user_limit_bytes=400 * MIB, sessions_share=1)
    found = resolve(SMOL, AUTO, policy, PLENTY, FRESH)
    assert found.numbers.memory_fit.reason is Reason.USER_LIMIT
    assert found.numbers.memory_fit.runner_up is Reason.MEMORY
    assert found.numbers.memory_fit.runner_up_tokens > found.numbers.memory_fit.tokens
    assert found.numbers.effective.reason is not Reason.MEMORY


def test_a_default_is_never_reported_as_a_user_s_limit() -> None:
    found = resolve(SMOL, AUTO, CapacityPolicy(), memory(2 * GIB), FRESH)
    reasons = {n.reason for n in vars(found.numbers).values()}
    reasons |= {n.runner_up for n in vars(found.numbers).values()}
    assert Reason.USER_LIMIT not in reasons


def test_an_unknown_ceiling_serves_the_floor_and_says_so() -> None:
    found = resolve(replace(SMOL, model_max=0), AUTO, POLICY, PLENTY, FRESH)
    assert found.numbers.model_max == Number(0, Reason.UNKNOWN_METADATA, known=False)
    assert found.numbers.effective.tokens == 4096
    assert found.numbers.effective.reason is Reason.UNKNOWN_METADATA
    asked = resolve(
        replace(SMOL, model_max=0), CapacityRequest(window=10_000), POLICY, PLENTY, FRESH
    )
    assert asked.numbers.effective.tokens == 10_000


def test_an_unknown_window_pattern_is_the_reason_where_memory_decides() -> None:
    facts = replace(SMOL, unknown_pattern=True, sliding_window=512)
    found = resolve(facts, AUTO, POLICY, memory(1600 * MIB), FRESH)
    assert found.numbers.memory_fit.reason is Reason.UNKNOWN_PATTERN
    assert found.numbers.effective.reason is Reason.UNKNOWN_PATTERN


def test_without_a_memory_reading_nothing_is_promised_of_memory() -> None:
    blind = MachineReading(MemorySnapshot(0, 0, known=False))
    found = resolve(SMOL, AUTO, POLICY, blind, FRESH)
    assert found.numbers.memory_fit == Number(0, Reason.UNKNOWN_METADATA, known=False)
    assert found.numbers.effective.tokens == 4096
    assert found.max_sessions == 1
    asked = resolve(SMOL, CapacityRequest(window=100_000), POLICY, blind, FRESH)
    assert asked.numbers.effective.reason is Reason.MODEL_CEILING
    assert asked.numbers.effective.tokens == 8192


def test_a_cache_that_does_not_grow_is_bound_by_the_ceiling() -> None:
    facts = replace(SMOL, layers=(), recurrent=True, model_max=2048)
    found = resolve(facts, AUTO, POLICY, PLENTY, FRESH)
    assert found.numbers.effective.tokens == 2048
    assert found.kv_bytes == 0


def test_windowed_layers_allow_a_longer_window() -> None:
    windowed = replace(
        SMOL, model_max=131072, layers=(LayerFacts(5, 3, 64, 64), LayerFacts(25, 3, 64, 64, 512))
    )
    full = replace(SMOL, model_max=131072)
    by_kind = [
        resolve(facts, AUTO, POLICY, memory(1600 * MIB), FRESH).numbers.effective.tokens
        for facts in (full, windowed)
    ]
    assert by_kind[1] > by_kind[0]


def test_a_windowed_layer_is_charged_for_session_scratch_and_micro_batch() -> None:
    windowed = replace(SMOL, layers=(LayerFacts(30, 3, 64, 64, 512),))
    found = resolve(windowed, CapacityRequest(window=8192), POLICY, PLENTY, FRESH)
    assert found.kv_bytes == (2 * 512 + 256) * 23040


# --- what the slot already holds -------------------------------------------------------------


def test_hot_counts_the_cells_of_the_whole_slot() -> None:
    use = SlotUse(
        weights_resident=True,
        cells=4096,
        resident_bytes=4096 * 23040,
        sessions=1,
    )
    found = resolve(SMOL, CapacityRequest(window=2048), POLICY, PLENTY, use)
    assert found.numbers.hot.tokens == 4096 + 2048
    assert found.numbers.memory_fit.tokens > found.numbers.hot.tokens
    assert found.numbers.effective.tokens == 2048


def test_mapped_weights_are_charged_once_whether_resident_or_not() -> None:
    resident = SlotUse(weights_resident=True)
    limited = replace(POLICY, user_limit_bytes=600 * MIB)
    for policy in (POLICY, limited):
        before = resolve(SMOL, AUTO, policy, PLENTY, FRESH)
        after = resolve(SMOL, AUTO, policy, PLENTY, resident)
        assert before.numbers == after.numbers


def test_weights_that_the_engine_copied_are_given_back_to_the_reading() -> None:
    copied = SlotUse(
        weights_resident=True,
        weights_anonymous_bytes=SMOL.weights_bytes,
    )
    before = resolve(SMOL, AUTO, POLICY, memory(2 * GIB), FRESH)
    after = resolve(SMOL, AUTO, POLICY, memory(2 * GIB - SMOL.weights_bytes), copied)
    assert before.numbers == after.numbers


def test_reclaimable_contexts_make_room_and_leave_hot() -> None:
    held = 8192 * 23040
    use = SlotUse(
        weights_resident=True,
        cells=8192,
        resident_bytes=held,
        reclaimable_bytes=held,
    )
    tight = memory(512 * MIB + 260 * MIB)
    found = resolve(SMOL, CapacityRequest(window=8192), POLICY, tight, use)
    assert found.numbers.hot.tokens == 8192
    with pytest.raises(InsufficientMemory):
        resolve(
            SMOL, CapacityRequest(window=8192), POLICY, tight, replace(use, reclaimable_bytes=0)
        )


def test_reclaimable_contexts_stay_where_there_is_room_beside_them() -> None:
    held = 4096 * 23040
    use = SlotUse(cells=4096, resident_bytes=held, reclaimable_bytes=held, reclaimable_cells=4096)
    found = resolve(SMOL, CapacityRequest(window=4096), POLICY, PLENTY, use)
    assert found.numbers.hot.tokens == 8192
    kept = replace(use, reclaimable_bytes=0, reclaimable_cells=0)
    beside = resolve(SMOL, CapacityRequest(window=4096), POLICY, PLENTY, kept)
    assert found.numbers.memory_fit.tokens >= beside.numbers.memory_fit.tokens > 8192


# --- refusals --------------------------------------------------------------------------------


def refusal(
    available: int, request: CapacityRequest = AUTO, user_limit_bytes: int = 0
) -> dict[str, str]:
    policy = replace(POLICY, user_limit_bytes=user_limit_bytes)
    with pytest.raises(InsufficientMemory) as refused:
        resolve(SMOL, request, policy, memory(available), FRESH)
    assert refused.value.reason == "INSUFFICIENT_MEMORY"
    return {**refused.value.metadata, "message": refused.value.message}


def test_a_refusal_adds_up_by_hand() -> None:
    told = refusal(700 * MIB)
    number = {key: int(value) for key, value in told.items() if key.endswith("_bytes")}
    assert number["budget_bytes"] == (
        number["free_bytes"]
        + number["loaded_bytes"]
        + number["reclaimable_bytes"]
        - number["promised_bytes"]
        - number["reserve_bytes"]
    )
    assert number["needed_bytes"] == (
        number["weights_bytes"] + number["kv_bytes"] + number["compute_bytes"]
    )
    assert number["room_bytes"] == (
        number["budget_bytes"]
        - number["headroom_bytes"]
        - number["weights_bytes"]
        - number["compute_bytes"]
    )
    assert number["kv_bytes"] == 4096 * 23040 > number["room_bytes"]
    assert told["asked_by"] == "floor"


def test_the_largest_window_of_a_refusal_is_served_when_asked_for() -> None:
    told = refusal(700 * MIB)
    largest = int(told["largest_window"])
    assert "at most that" in told["message"]
    found = resolve(SMOL, CapacityRequest(window=largest), POLICY, memory(700 * MIB), FRESH)
    assert found.numbers.effective.tokens == largest
    with pytest.raises(InsufficientMemory):
        resolve(SMOL, CapacityRequest(window=largest + 1), POLICY, memory(700 * MIB), FRESH)


def test_the_quantisation_that_a_refusal_names_is_served() -> None:
    told = refusal(750 * MIB)
    k_type = told["k_type_that_fits"]
    assert k_type in told["message"]
    found = resolve(SMOL, CapacityRequest(k_type=k_type), POLICY, memory(750 * MIB), FRESH)
    assert found.numbers.effective.tokens >= 4096


def test_a_model_that_does_not_fit_at_all_says_so() -> None:
    told = refusal(600 * MIB)
    assert told["largest_window"] == "0"
    assert told["k_type_that_fits"] == ""
    assert "No window fits" in told["message"]


@pytest.mark.parametrize(
    ("available", "user_limit_bytes", "bound"),
    [
        (500 * MIB, 0, "reserve"),
        (100 * MIB, 0, "memory"),
        (20 * GIB, 150 * MIB, "user_limit"),
    ],
)
def test_a_refusal_names_the_bound_that_decided(
    available: int, user_limit_bytes: int, bound: str
) -> None:
    assert refusal(available, user_limit_bytes=user_limit_bytes)["bound"] == bound


def test_headroom_is_named_when_it_alone_decides() -> None:
    need = SMOL.weights_bytes + 4096 * 23040
    need += estimate_compute_bytes(SMOL, 4096, n_batch=512, n_ubatch=256)
    need += work_bytes(SMOL, 4096, n_batch=512, n_ubatch=256, k_type="f16", v_type="f16")
    assert refusal(512 * MIB + need)["bound"] == "headroom"


def test_an_explicit_request_that_does_not_fit_is_refused_not_shrunk() -> None:
    told = refusal(760 * MIB, CapacityRequest(window=8192))
    assert told["asked_by"] == "request"
    assert told["window"] == "8192"
    assert int(told["largest_window"]) < 8192


@pytest.mark.parametrize("window", [1, 256, 8192, 1 << 30])
def test_a_request_never_revives_a_zero_budget(window: int) -> None:
    told = refusal(512 * MIB, CapacityRequest(window=window))
    assert told["largest_window"] == "0"


def test_an_explicit_window_below_the_floor_is_served_where_the_floor_is_not() -> None:
    found = resolve(SMOL, CapacityRequest(window=512), POLICY, memory(700 * MIB), FRESH)
    assert found.numbers.effective.tokens == 512


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (CapacityRequest(sessions=-1), "sessions"),
        (CapacityRequest(sessions=1025), "sessions"),
        (CapacityRequest(window=-1), "window"),
        (CapacityRequest(k_type="q9"), "k_type"),
        (CapacityRequest(v_type=""), "v_type"),
    ],
)
def test_bad_requests_are_refused_by_field(request_: CapacityRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        resolve(SMOL, request_, POLICY, PLENTY, FRESH)
    assert refused.value.metadata["field"] == field


def test_a_window_that_no_engine_takes_is_invalid_where_no_ceiling_bounds_it() -> None:
    asked = CapacityRequest(window=MAX_CONTEXT_TOKENS + 1)
    with pytest.raises(InvalidRequest):
        resolve(replace(SMOL, model_max=0), asked, POLICY, PLENTY, FRESH)
    assert resolve(SMOL, asked, POLICY, PLENTY, FRESH).numbers.effective.tokens == 8192


def test_an_answer_is_not_accepted_as_a_request() -> None:
    answer = resolve(SMOL, AUTO, POLICY, PLENTY, FRESH)
    with pytest.raises(AttributeError):
        resolve(SMOL, answer, POLICY, PLENTY, FRESH)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        resolve(SMOL, answer.numbers, POLICY, PLENTY, FRESH)  # type: ignore[arg-type]


# --- headroom ----------------------------------------------------------------------------------


def budget_of(free: int, headroom: float) -> Budget:
    return Budget(free, 0, 0, 0, 0, 0, 0, 0, headroom, NO_COMPANIONS)


@given(
    st.integers(0, 1 << 80),
    st.one_of(
        st.sampled_from([0.0, 0.02, 0.1, 0.2, 0.3, 1e-300, 0.9999999999999999]),
        st.floats(0, 1, exclude_max=True),
    ),
)
@settings(max_examples=300, deadline=None)
def test_the_budget_that_is_needed_is_the_least_that_leaves_enough(
    spend: int, headroom: float
) -> None:
    total = needed_total(spend, headroom)
    there = budget_of(total, headroom)
    assert there.headroom + there.spendable == total
    assert there.spendable >= spend
    if total:
        assert budget_of(total - 1, headroom).spendable < spend


def test_headroom_is_the_fraction_that_was_written() -> None:
    assert budget_of(100 * 10**30, 0.02).headroom == 2 * 10**30
    assert needed_total(98 * 10**30, 0.02) == 100 * 10**30


# --- sessions --------------------------------------------------------------------------------


def test_more_sessions_than_may_be_open_are_refused_by_the_setting() -> None:
    asked = CapacityRequest(window=512, sessions=9)
    found = survey(SMOL, asked, POLICY, PLENTY, FRESH)
    assert found.refusal is not None
    assert found.refusal.bound is Reason.USER_LIMIT
    assert "the setting max_sessions lets 8 be open" in found.refusal.message
    values = {remedy.kind: remedy.value for remedy in found.refusal.remedies}
    assert values == {"sessions": "8", "max_sessions": "9"}
    assert found.numbers.effective.tokens == found.allocated == 0
    assert int(dict(found.refusal.numbers)["kv_bytes"]) == 512 * 23040
    with pytest.raises(InsufficientMemory, match="max_sessions"):
        resolve(SMOL, asked, POLICY, PLENTY, FRESH)
    assert resolve(SMOL, replace(asked, sessions=8), POLICY, PLENTY, FRESH).max_sessions == 8
    raised = replace(POLICY, max_sessions=9)
    assert resolve(SMOL, asked, raised, PLENTY, FRESH).max_sessions == 9


def test_the_setting_refuses_where_memory_is_unknown_too() -> None:
    blind = MachineReading(MemorySnapshot(0, 0, known=False))
    found = survey(SMOL, CapacityRequest(sessions=9), POLICY, blind, FRESH)
    assert found.refusal is not None
    assert found.refusal.bound is Reason.USER_LIMIT
    assert dict(found.refusal.numbers)["needed_bytes"] == "unknown"
    assert not found.numbers.memory_fit.known


def test_a_full_slot_is_planned_and_said_to_be_full() -> None:
    full = resolve(SMOL, AUTO, POLICY, PLENTY, SlotUse(sessions=8))
    assert full.findings == (
        "all 8 contexts (max_sessions) are taken: a session must close, or be parked",
    )
    assert resolve(SMOL, AUTO, POLICY, PLENTY, SlotUse(sessions=7)).findings == ()


def test_the_most_sessions_that_fit_are_found_in_few_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0
    plain = decide

    def counted(problem: Problem) -> Decision:
        nonlocal tries
        tries += 1
        return plain(problem)

    monkeypatch.setattr("modeld.shared.planner.remedies.decide", counted)
    policy = replace(POLICY, max_sessions=1024)
    asked = CapacityRequest(window=4096, sessions=1024)
    found = survey(SMOL, asked, policy, memory(2 * GIB), FRESH)
    assert found.refusal is not None
    assert tries <= 30
    (most,) = (int(one.value) for one in found.refusal.remedies if one.kind == "sessions")
    assert 1 < most < 20
    assert f"No window fits for 1024 sessions: ask for room for {most} sessions" in (
        found.refusal.message
    )
    resolve(SMOL, replace(asked, sessions=most), policy, memory(2 * GIB), FRESH)
    with pytest.raises(InsufficientMemory):
        resolve(SMOL, replace(asked, sessions=most + 1), policy, memory(2 * GIB), FRESH)


# --- words of a refusal ----------------------------------------------------------------------


def test_where_open_sessions_hold_the_memory_closing_them_is_the_advice() -> None:
    use = SlotUse(
        weights_resident=True,
        cells=8192,
        resident_bytes=8192 * 23040,
        sessions=2,
    )
    found = survey(SMOL, AUTO, POLICY, memory(560 * MIB), use)
    assert found.refusal is not None
    message = found.refusal.message
    assert "smaller or more quantised model" not in message
    assert f"2 open sessions, which hold {8192 * 23040} bytes: close sessions" in message


def test_freeing_memory_is_advised_only_where_so_much_is_taken() -> None:
    told = refusal(600 * MIB)
    assert "free " in told["remedies"]
    assert told["message"].endswith(", or free memory.")
    small = MachineReading(MemorySnapshot(total_bytes=600 * MIB, available_bytes=600 * MIB))
    found = survey(SMOL, AUTO, POLICY, small, FRESH)
    assert found.refusal is not None
    assert "free" not in {remedy.kind for remedy in found.refusal.remedies}
    assert found.refusal.message.endswith("use a smaller or more quantised model.")


# --- the report ------------------------------------------------------------------------------


def test_the_rows_of_an_answer_add_up() -> None:
    rows = rows_of(resolve(SMOL, AUTO, POLICY, memory(2 * GIB), FRESH))
    given = rows["free"] + rows["loaded"] + rows["reclaimable"]
    assert rows["budget"] == given - rows["promised"] - rows["reserve"]
    assert rows["room"] == rows["budget"] - rows["headroom"] - rows["weights"] - rows["compute"]
    assert rows["left"] == rows["room"] - rows["kv"] >= 0
    spent = rows["kv_at_memory_fit"] + rows["compute_at_memory_fit"]
    assert spent <= rows["budget"] - rows["headroom"] - rows["weights"]


def test_what_the_engine_reports_stands_beside_what_was_predicted() -> None:
    planned = resolve(SMOL, CapacityRequest(window=1000), POLICY, PLENTY, FRESH)
    found = confirm(
        planned, window=1024, slot_cells=5120, kv_bytes=1024 * 23040, compute_bytes=11 * MIB
    )
    assert found.numbers.hot.tokens == 5120
    assert found.numbers.effective.tokens == 1000
    assert rows_of(found)["compute_measured"] == found.compute_bytes == 11 * MIB
    notes = {row.name: row.note for row in found.budget}
    assert str(planned.compute_bytes) in notes["compute_measured"]


def test_a_smaller_allocation_than_planned_lowers_what_is_served() -> None:
    planned = resolve(SMOL, CapacityRequest(window=1000), POLICY, PLENTY, FRESH)
    found = confirm(planned, window=512, slot_cells=512, kv_bytes=1, compute_bytes=1)
    assert found.numbers.effective.tokens == found.numbers.planner.tokens == 512


# --- what holds for every input --------------------------------------------------------------

layers = st.lists(
    st.builds(
        LayerFacts,
        count=st.integers(1, 40),
        kv_heads=st.integers(1, 8),
        key_length=st.sampled_from([32, 64, 128]),
        value_length=st.sampled_from([32, 64, 128]),
        window_cells=st.sampled_from([0, 0, 512, 1000]),
    ),
    min_size=1,
    max_size=2,
).map(tuple)
facts_of_any_model = st.builds(
    lambda layers, heads, model_max, weights, unknown: replace(
        SMOL,
        layers=layers,
        heads=heads,
        model_max=model_max,
        weights_bytes=weights,
        unknown_pattern=unknown,
    ),
    layers,
    st.integers(0, 32),
    st.sampled_from([0, 1000, 2048, 8192, 131072]),
    st.integers(0, 2 * GIB),
    st.booleans(),
)
policies = st.builds(
    CapacityPolicy,
    reserve_bytes=st.sampled_from([0, MIB, GIB]),
    user_limit_bytes=st.sampled_from([0, 0, GIB, 4 * GIB]),
    max_window=st.sampled_from([0, 0, 1500, 16384]),
    floor_window=st.sampled_from([1, 256, 1000, 4096]),
    headroom=st.sampled_from([0.0, 0.02, 0.2]),
    sessions_share=st.integers(1, 6),
    max_sessions=st.integers(1, 10),
    n_ubatch=st.sampled_from([64, 256, 512]),
    cold_budget_bytes=st.sampled_from([0, 10 * MIB, GIB]),
)
readings = st.builds(
    MemorySnapshot,
    total_bytes=st.just(16 * GIB),
    available_bytes=st.integers(0, 16 * GIB),
    limit_bytes=st.sampled_from([0, 8 * GIB]),
    known=st.sampled_from([True, True, True, False]),
)


@st.composite
def slot_uses(draw: st.DrawFn) -> SlotUse:
    cells = draw(st.integers(0, 20_000))
    reclaimable_cells = draw(st.integers(0, cells))
    per_cell = draw(st.integers(0, 50_000))
    return SlotUse(
        weights_resident=draw(st.booleans()),
        cells=cells,
        resident_bytes=cells * per_cell,
        reclaimable_bytes=reclaimable_cells * per_cell,
        sessions=draw(st.integers(0, 4)),
        reclaimable_cells=draw(st.sampled_from([0, reclaimable_cells])),
        cold_bytes=draw(st.sampled_from([0, 0, 50 * MIB, 2 * GIB])),
    )


requests = st.builds(
    CapacityRequest,
    window=st.one_of(st.just(0), st.integers(1, 200_000)),
    k_type=st.sampled_from(["f16", "f32", "q8_0"]),
    v_type=st.sampled_from(["f16", "q8_0", "q4_0"]),
)


def outcome(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    reading: MemorySnapshot,
    use: SlotUse,
) -> Resolution | None:
    try:
        return resolve(facts, request, policy, MachineReading(reading), use)
    except InsufficientMemory:
        return None


@settings(max_examples=300, deadline=None)
@given(facts_of_any_model, requests, policies, readings, slot_uses())
def test_no_number_exceeds_what_bounds_it(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    reading: MemorySnapshot,
    use: SlotUse,
) -> None:
    found = outcome(facts, request, policy, reading, use)
    if found is None:
        assert reading.known
        return
    six = found.numbers
    assert 0 < six.effective.tokens <= six.hot.tokens
    assert six.effective.tokens <= six.planner.tokens
    assert six.effective.tokens <= found.allocated < six.effective.tokens + 256
    if six.memory_fit.known:
        assert six.hot.tokens <= six.memory_fit.tokens
        assert found.kv_bytes <= rows_of(found)["room"]
    if six.model_max.known:
        assert six.planner.tokens <= six.model_max.tokens
    # What is parked beside the window has its bytes: within its budget, and left by the plan.
    assert found.cold_bytes <= policy.cold_budget_bytes
    parked = six.planner.tokens - six.effective.tokens
    each = Costs(facts, policy, request.k_type, request.v_type).cold_bytes_per_token()
    assert parked * each <= found.cold_bytes
    if found.cold_bytes:
        assert found.cold_bytes == rows_of(found)["cold_budget"]
        assert found.cold_bytes <= max(0, rows_of(found)["left"])
    if request.window:
        assert six.effective.tokens <= request.window
    if policy.max_window:
        assert six.effective.tokens <= policy.max_window
    assert found.max_sessions <= policy.max_sessions
    deciding = {
        Reason.REQUEST: request.window,
        Reason.MODEL_CEILING: facts.model_max,
        Reason.FLOOR: policy.floor_window,
    }
    if six.effective.reason in deciding and six.effective.reason is not Reason.FLOOR:
        assert six.effective.tokens == deciding[six.effective.reason]
    if six.effective.reason is Reason.FLOOR:
        assert six.effective.tokens <= policy.floor_window
    if six.effective.runner_up_tokens and six.effective.reason is not Reason.FLOOR:
        assert six.effective.runner_up_tokens >= six.effective.tokens or not facts.model_max


@settings(max_examples=100, deadline=None)
@given(facts_of_any_model, requests, policies, readings, slot_uses(), st.integers(1, 4 * GIB))
def test_what_is_parked_in_memory_changes_no_number_of_a_plan(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    reading: MemorySnapshot,
    use: SlotUse,
    more: int,
) -> None:
    """It is off the reading, and given back to whatever needs it."""
    more = min(more, reading.available_bytes)
    taken = replace(reading, available_bytes=reading.available_bytes - more)
    plain = outcome(facts, request, policy, reading, use)
    parked = outcome(facts, request, policy, taken, replace(use, cold_bytes=use.cold_bytes + more))
    assert (plain is None) == (parked is None)
    if plain is not None and parked is not None:
        assert parked.numbers == plain.numbers
        assert parked.cold_bytes == plain.cold_bytes
        assert parked.max_sessions == plain.max_sessions
        assert plain.free_bytes <= parked.free_bytes <= plain.free_bytes + more
        if plain.numbers.memory_fit.known and not use.reclaimable_bytes:
            assert parked.free_bytes <= use.cold_bytes + more


def test_parked_kv_goes_before_the_contexts_of_closed_sessions() -> None:
    held = 4096 * 23040
    use = SlotUse(
        weights_resident=True,
        cells=4096,
        resident_bytes=held,
        reclaimable_bytes=held,
        reclaimable_cells=4096,
        cold_bytes=GIB,
    )
    short = replace(PLENTY, host=replace(PLENTY.host, available_bytes=2 * GIB))
    policy = replace(POLICY, reserve_bytes=2 * GIB)
    found = resolve(SMOL, CapacityRequest(window=8192), policy, short, use)
    assert 0 < found.free_bytes < GIB
    assert found.numbers.hot.tokens == 4096 + 8192  # the closed session's context stays
    assert found.numbers.memory_fit.tokens > 4096 + 8192


def test_without_a_memory_reading_nothing_is_promised_to_parked_kv() -> None:
    unread = replace(PLENTY, host=replace(PLENTY.host, known=False))
    policy = replace(POLICY, cold_budget_bytes=GIB)
    found = resolve(SMOL, CapacityRequest(window=1000), policy, unread, FRESH)
    assert found.numbers.planner.tokens == found.numbers.effective.tokens == 1000
    assert found.cold_bytes == 0


@settings(max_examples=200, deadline=None)
@given(
    facts_of_any_model,
    requests,
    policies,
    readings,
    slot_uses(),
    st.integers(0, 8 * GIB),
)
def test_more_free_memory_never_lowers_any_number(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    reading: MemorySnapshot,
    use: SlotUse,
    more: int,
) -> None:
    less = outcome(facts, request, policy, reading, use)
    if less is None:
        return
    richer = replace(reading, available_bytes=reading.available_bytes + more)
    found = resolve(
        facts, request, policy, MachineReading(richer), use
    )  # never refused where less was served
    for name in ("model_max", "requested", "memory_fit", "effective", "hot", "planner"):
        assert getattr(found.numbers, name).tokens >= getattr(less.numbers, name).tokens
    if found.allocated == less.allocated:
        assert found.max_sessions >= less.max_sessions


@settings(max_examples=200, deadline=None)
@given(facts_of_any_model, requests, policies, readings, slot_uses(), st.integers(1, 100_000))
def test_a_longer_request_never_raises_memory_fit(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    reading: MemorySnapshot,
    use: SlotUse,
    more: int,
) -> None:
    longer = replace(request, window=request.window + more)
    found = outcome(facts, request, policy, reading, use)
    other = outcome(facts, longer, policy, reading, use)
    if found is not None and other is not None:
        assert other.numbers.memory_fit == found.numbers.memory_fit


@settings(max_examples=200, deadline=None)
@given(facts_of_any_model, policies, readings, slot_uses(), st.sampled_from(["f16", "q8_0"]))
def test_quantising_never_shrinks_the_window(
    facts: ModelFacts,
    policy: CapacityPolicy,
    reading: MemorySnapshot,
    use: SlotUse,
    wide: str,
) -> None:
    found = outcome(facts, CapacityRequest(k_type=wide, v_type=wide), policy, reading, use)
    if found is None:
        return
    for k_type, v_type in ((wide, "q4_0"), ("q4_0", wide), ("q4_0", "q4_0")):
        narrow = CapacityRequest(k_type=k_type, v_type=v_type)
        other = resolve(facts, narrow, policy, MachineReading(reading), use)
        assert other.numbers.effective.tokens >= found.numbers.effective.tokens
        assert other.numbers.memory_fit.tokens >= found.numbers.memory_fit.tokens


@settings(max_examples=200, deadline=None)
@given(facts_of_any_model, requests, policies, readings, slot_uses())
def test_every_refusal_can_be_recomputed_and_its_advice_holds(
    facts: ModelFacts,
    request: CapacityRequest,
    policy: CapacityPolicy,
    reading: MemorySnapshot,
    use: SlotUse,
) -> None:
    try:
        resolve(facts, request, policy, MachineReading(reading), use)
    except InsufficientMemory as refused:
        told = refused.metadata
        assert int(told["kv_bytes"]) > int(told["room_bytes"])
        largest = int(told["largest_window"])
        assert largest < int(told["window"])
        if largest:
            asked = replace(request, window=largest)
            served = resolve(facts, asked, policy, MachineReading(reading), use)
            assert served.numbers.effective.tokens == largest
        if told["k_type_that_fits"]:
            other = replace(request, k_type=told["k_type_that_fits"])
            served = resolve(facts, other, policy, MachineReading(reading), use)
            assert served.numbers.effective.tokens


def test_sessions_of_a_batch_take_one_context_for_as_many_as_it_has_streams() -> None:
    def planned(sessions: int) -> Resolution:
        asked = CapacityRequest(window=512, streams=4, sessions=sessions)
        policy = replace(POLICY, max_sessions=2)
        return survey(SMOL, asked, policy, PLENTY, FRESH)

    assert planned(4).refusal is None
    assert planned(4).kv_bytes == planned(1).kv_bytes == planned(0).kv_bytes


def test_more_sessions_than_a_batch_has_streams_are_refused_with_the_setting_to_raise() -> None:
    asked = CapacityRequest(window=512, streams=4, sessions=5)
    refusal = survey(SMOL, asked, replace(POLICY, max_sessions=8), PLENTY, FRESH).refusal
    assert refusal is not None
    told = dict(refusal.numbers)
    assert (refusal.bound, told["batch_streams"], told["sessions_asked"]) == (
        Reason.USER_LIMIT,
        "4",
        "5",
    )
    assert "max_sessions" not in told
    advice = {remedy.kind: remedy.value for remedy in refusal.remedies}
    assert advice == {"sessions": "4", "batch_streams": "5"}
    raised = survey(SMOL, replace(asked, streams=5), POLICY, PLENTY, FRESH)
    assert (raised.refusal, raised.streams) == (None, 5)
