"""What clients and daemon say to each other about a conversation beyond its window."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from modeld.client.prompts import GeneratedTurn, Message, Segment, Text, prompt_part, wire_prompt
from modeld.shared.capacity import CapacityRequest
from modeld.shared.errors import InvalidRequest, ManifestMismatch, UnsupportedFeature
from modeld.shared.messages import FinalOut, Status
from modeld.supervisor.model_slot import OpenRequest, _refuse_overflow
from modeld.supervisor.rpc import convert, residency_calls
from modeld.supervisor.rpc.session_service import _refuse_unserved
from modeld.supervisor.sessions import Session, check_attach
from modeld.v1 import common_pb2 as common
from modeld.v1 import session_pb2 as pb


def classes(prompt: Any, *, stable: bool, evicts: bool, prompt_format: str = "chat") -> list[str]:
    wire = wire_prompt(
        prompt_part(prompt, stable=stable),
        prompt_format=prompt_format,
        session_id="s",
        evicts=evicts,
    )
    assert [one.cache_class for one in wire.ids] == [s.cache_class for s in wire.proto.segments]
    return [one.cache_class for one in wire.ids]


def test_only_system_messages_are_pinned_by_default_where_a_history_may_have_to_go() -> None:
    chat = [Message("system", "be brief"), Message("user", "hello"), GeneratedTurn("t", "s", "hi")]
    assert classes(chat, stable=True, evicts=True) == ["task_pinned", "volatile", "volatile"]
    assert classes(chat, stable=True, evicts=False) == ["task_pinned"] * 3
    assert classes(chat, stable=False, evicts=True) == ["task_pinned", "volatile", "volatile"]
    assert classes(chat, stable=False, evicts=False) == ["volatile"] * 3
    assert classes("text", stable=True, evicts=True, prompt_format="raw") == ["volatile"]
    given = Segment(Text("map"), cache_class="repo_map")
    assert classes(given, stable=True, evicts=True, prompt_format="raw") == ["repo_map"]


def raw_segment(cache_class: str) -> pb.Prompt:
    return pb.Prompt(
        segments=[common.Segment(raw=common.RawText(text="x"), cache_class=cache_class)]
    )


@pytest.mark.parametrize(
    ("given", "served"),
    [("", "volatile"), ("volatile", "volatile"), ("repo_map", "repo_map"),
     ("task_pinned", "task_pinned")],
)  # fmt: skip
def test_a_segment_s_class_reaches_the_worker_and_the_manifest_as_it_was_sent(
    given: str, served: str
) -> None:
    prompt = convert.prompt_in(raw_segment(given), "suffix", prompt_format="raw", max_bytes=1000)
    assert prompt.prompt.segments[0].cache_class == served
    assert prompt.segments[0].cache_class == given


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as refused:
        convert.prompt_in(raw_segment("pinned"), "prefix", prompt_format="raw", max_bytes=1000)
    assert refused.value.metadata["field"] == "prefix.segments[0].cache_class"
    assert "task_pinned, repo_map, volatile" in refused.value.metadata["allowed"]


def test_what_went_out_is_on_the_wire_of_a_prefill_and_of_a_final() -> None:
    status = Status(
        part="suffix", reused=1, dropped=2, prefilled=3, prefix=4, suffix=5, resident=6,
        available=7, retained=8, copied=0, miss_reason="EXTENDED", stable_token_hash="",
        volatile_token_hash="", template_additive=True, turns_recomputed=0, seen_tokens=9,
        seconds=0.0, segments=[], restored=1, parked=10, gone=11, recomputed=12,
    )  # fmt: skip
    told = convert.prefill_status(status, "", 0.0)
    assert (told.parked, told.gone, told.recomputed, told.restored) == (10, 11, 12, 1)
    final = FinalOut(
        stop_reason="length", stop_sequence="", tokens=1, prefilled=0, engine_seconds=0.0,
        first_token_seconds=0.0, resident=1, available=1, seen_tokens=1, seed=0, parked=13,
        gone=14, recomputed=15,
    )  # fmt: skip
    sent = convert.final(final, "t", 0.0)
    assert (sent.parked, sent.gone, sent.recomputed) == (13, 14, 15)


def test_a_window_too_small_to_evict_in_is_refused_before_anything_is_loaded() -> None:
    _refuse_unserved(pb.OpenSessionRequest(overflow=pb.OVERFLOW_EVICT), "llama")
    _refuse_unserved(pb.OpenSessionRequest(overflow=pb.OVERFLOW_EVICT, window=1024), "llama")
    with pytest.raises(InvalidRequest) as refused:
        _refuse_unserved(pb.OpenSessionRequest(overflow=pb.OVERFLOW_EVICT, window=1000), "llama")
    assert refused.value.metadata["field"] == "window"


@pytest.mark.parametrize(
    ("told", "why"),
    [("no: its cache is its own", "its cache is its own"), ("unknown: not tried", "not tried"),
     (None, "does not say so")],
)  # fmt: skip
def test_a_model_that_cannot_evict_refuses_by_its_capability(told: str | None, why: str) -> None:
    capabilities = {} if told is None else {"overflow.evict": told}
    load: Any = SimpleNamespace(capabilities=capabilities)
    asked = OpenRequest("m", CapacityRequest(), "", "", "raw", overflow="evict")
    with pytest.raises(UnsupportedFeature) as refused:
        _refuse_overflow(asked, load)
    assert refused.value.metadata["capability"] == "overflow.evict"
    assert why in refused.value.message
    _refuse_overflow(replace(asked, overflow="refuse"), load)
    load.capabilities = {"overflow.evict": "yes: tried"}
    _refuse_overflow(asked, load)


def test_an_admission_names_one_thing_and_what_it_names_can_be() -> None:
    def operation(**what: Any) -> tuple[int, int, int, str, int]:
        one = residency_calls._admit("s", pb.AdmitRequest(**what))
        return one.segment_index, one.begin, one.end, one.query, one.budget_tokens

    assert operation(segment_index=0) == (0, 0, 0, "", 0)
    assert operation(range=pb.TokenRange(begin=5, end=9)) == (-1, 5, 9, "", 0)
    assert operation(query="where?", budget_tokens=100) == (-1, 0, 0, "where?", 100)
    wrong: list[dict[str, Any]] = [
        {},
        {"segment_index": -1},
        {"query": ""},
        {"range": pb.TokenRange(begin=5, end=5)},
        {"range": pb.TokenRange(begin=-1, end=5)},
    ]
    for what in wrong:
        with pytest.raises(InvalidRequest):
            operation(**what)


def test_a_key_attaches_only_with_the_same_overflow() -> None:
    class Identity:
        profile_id, prompt_format, adapters = "", "raw", ()

    capacity = CapacityRequest(window=2048, k_type="f16", v_type="f16")
    session = Session(
        "s", 1, "key", "m", Identity(), capacity, None, (), 0.0, 0.0,  # type: ignore[arg-type]
        overflow="evict",
    )  # fmt: skip
    asked: dict[str, Any] = {
        "model": "m", "profile_id": "", "prompt_format": "raw", "capacity": capacity,
    }  # fmt: skip
    check_attach(session, overflow="evict", **asked)
    with pytest.raises(ManifestMismatch) as refused:
        check_attach(session, overflow="refuse", **asked)
    assert refused.value.metadata["field"] == "overflow"
