"""A refusal in words: what is short, the sum, and what to do.

Owns the sentence alone; its numbers and what would help were found out before.
"""

from __future__ import annotations

from collections.abc import Iterator

from modeld.shared.capacity import Reason
from modeld.shared.planner.placement import HOST


def explain_refusal(numbers: dict[str, object]) -> str:
    """The refusal in words, from its own numbers: what is short, the sum, and what to do."""
    by_limit = numbers["budget_term"] == Reason.USER_LIMIT.value
    source = (
        "user limit {user_limit_bytes} - {resident_bytes} resident"
        if by_limit
        else "{free_bytes} free + {loaded_bytes} loaded + {reclaimable_bytes} reclaimable"
        " - {promised_bytes} promised to open contexts - {reserve_bytes} reserve"
    )
    if numbers["elsewhere_bytes"]:
        source += (
            " - {elsewhere_bytes} of other slots"
            if by_limit
            else " - {elsewhere_untouched_bytes} of other slots that count as free"
        )
    beside = "".join(
        f" + {{{key}}} {name}"
        for key, name in (
            ("copied_bytes", "weights in the engine's own form"),
            ("projector_bytes", "projector"),
            ("projector_compute_bytes", "projector's buffer"),
            ("adapter_bytes", "adapters"),
            ("draft_bytes", "draft model"),
        )
        if numbers[key]
    )
    contexts = "{kv_bytes} KV + {compute_bytes} compute"
    if numbers.get("streams"):
        contexts = "{streams} streams of one context with " + contexts
    if numbers["sessions"] != 1:
        contexts = f"{{sessions}} sessions of {contexts}"
    text = (
        "Not enough memory for {model} with a window of {window} tokens ({asked_by})"
        + (" on {place_name}" if numbers["place"] != HOST else "")
        + ": it needs {needed_bytes} bytes ({weights_bytes} weights"
        + f"{beside} + {contexts}), and the budget is {{budget_bytes}} bytes ({source}) less "
        "{headroom_bytes} headroom. "
    )
    text += _lead(numbers) + ", or ".join(_advice(numbers)) + "."
    return text.format(**numbers)


def _beside_open(numbers: dict[str, object]) -> bool:
    return bool(numbers["open_sessions"] or numbers["held_bytes"])


def _lead(numbers: dict[str, object]) -> str:
    if numbers["largest_window"] != "0":
        return "The largest window that fits is {largest_window} tokens: "
    lead = "No window fits"
    if numbers["sessions"] != 1:
        lead += " for {sessions} sessions"
    if _beside_open(numbers):
        lead += (
            " beside the contexts of {open_sessions} open sessions, which hold {held_bytes} bytes"
        )
    return lead + ": "


def _advice(numbers: dict[str, object]) -> Iterator[str]:
    """What to do, each by itself. Something is always said."""
    if numbers["largest_window"] != "0":
        yield "ask for at most that"
    elif _beside_open(numbers):
        yield "close sessions"
    elif not numbers["sessions_that_fit"]:
        yield "use a smaller or more quantised model"
    if numbers["elsewhere_bytes"]:
        yield "unload the other backend's model"
    for key, advice in (
        ("layout_that_fits", "open an isolated session"),
        ("k_type_that_fits", "ask for k_type {k_type_that_fits}"),
        ("sessions_that_fit", "ask for room for {sessions_that_fit} sessions"),
        (
            "layers_that_fit",
            "put {layers_that_fit} layers on accelerators (gpu_layers, or placement=shed)",
        ),
        ("model_that_fits", "use {model_that_fits}"),
        ("limit_that_fits", "raise the limit"),
        ("bytes_to_free", "free memory"),
    ):
        if numbers.get(key):
            yield advice
