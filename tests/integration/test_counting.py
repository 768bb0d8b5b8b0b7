"""Every number of a turn against an independent count over token lists made in the test."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import pytest

from modeld.client import Client, GeneratedTurn, InvalidRequest, MissReason, Session, StopReason
from tests.support.daemon import MODEL
from tests.support.product import Told, ask, common, go_on, prompt_ids, system, text_ids, user
from tests.support.reference import Reference

pytestmark = pytest.mark.real

WINDOW = 1024
STORY = " The keeper wrote what the sea had brought. Storms came and went; the light did not."
EDITED = STORY.replace("Storms", "Gales")


def digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()


def held_after(prompt: Sequence[int], told: Told) -> list[int]:
    """What is resident after a turn: an answer's last token is sampled, not evaluated."""
    return [*prompt, *told.ids[:-1]]


def check_turn(told: Told, held: Sequence[int], prompt: Sequence[int], prefix: int) -> None:
    """The numbers of a turn over ``prompt``, of which ``prefix`` tokens are the prefix's."""
    matched = common(held, prompt)
    if matched == len(prompt):
        matched -= 1  # the last one is evaluated again for its logits
    before, after = told.before, told.after
    assert (before.reused, before.prefilled) == (
        min(matched, prefix),
        max(0, prefix - matched),
    )
    assert (after.reused, after.prefilled) == (
        max(0, matched - prefix),
        min(len(prompt) - prefix, len(prompt) - matched),
    )
    # A token that is only evaluated again for its logits never left.
    assert before.dropped + after.dropped == len(held) - common(held, prompt)
    assert (before.prefix, before.suffix) == (prefix, 0)
    assert (after.prefix, after.suffix) == (prefix, len(prompt) - prefix)
    assert (before.resident, after.resident) == (prefix, len(prompt))
    for status in (before, after):
        assert status.available == WINDOW - status.resident
        assert status.restored == 0
        assert status.turns_recomputed == 0
        assert status.template_additive
    assert after.retained == 0
    assert before.stable_token_hash == after.stable_token_hash == digest(prompt[:prefix])
    assert after.volatile_token_hash == digest(prompt[prefix:])
    evaluated = len(told.ids) - 1
    assert told.final.tokens == len(told.ids)
    assert told.final.prefilled == 0
    assert told.final.resident == len(prompt) + evaluated
    assert told.final.available == WINDOW - told.final.resident


def opening(words: str, prefix: str, suffix: str) -> tuple[str, str]:
    """The prompt with ``words`` before it."""
    return (words + prefix, suffix) if prefix else ("", words + suffix)


@pytest.mark.parametrize(
    ("first", "then", "miss"),
    [
        ((STORY * 3, " And"), (STORY * 3, " And"), MissReason.NONE),
        ((STORY * 3, " And"), (STORY * 3, " But then"), MissReason.NONE),
        ((STORY * 3, " And"), (" So" + STORY * 3, " And"), MissReason.TOKENS_DIFFER),
        ((STORY * 3, " And"), (STORY + EDITED + STORY, " And"), MissReason.TOKENS_DIFFER),
        ((STORY * 3, " And"), (STORY + STORY + EDITED, " And"), MissReason.TOKENS_DIFFER),
        ((STORY * 3, " And"), (STORY * 2, " And"), MissReason.NONE),
        ((STORY * 2, " And"), (STORY * 3, " And"), MissReason.TOKENS_DIFFER),
        ((STORY * 2, " And"), (STORY * 2, ""), MissReason.NONE),
        ((STORY * 2, ""), (STORY * 2, " And"), MissReason.NONE),
        (("", STORY), ("", STORY + " And"), MissReason.NONE),
    ],
    ids=[
        "identical repeat",
        "suffix replaced",
        "edit at the start",
        "edit in the middle",
        "edit at the end",
        "shorter prefix",
        "longer prefix",
        "suffix left out",
        "suffix added",
        "empty prefix",
    ],
)
def test_a_second_turn_counts_what_it_kept(
    client: Client,
    raw: Session,
    first: tuple[str, str],
    then: tuple[str, str],
    miss: MissReason,
    request: pytest.FixtureRequest,
) -> None:
    # Each of them tells of something else: what another one computed isn't found again.
    named = f"{request.node.name}."
    first = opening(named, *first)
    if not then[0].startswith(" So"):
        then = opening(named, *then)
    ids = text_ids(client, "".join(first))
    cold = ask(raw, *first, 5)
    check_turn(cold, [], ids, len(text_ids(client, first[0])))
    begins = cold.before if first[0] else cold.after
    assert begins.miss_reason is MissReason.COLD
    held = held_after(ids, cold)
    ids = text_ids(client, "".join(then))
    warm = ask(raw, *then, 5)
    check_turn(warm, held, ids, len(text_ids(client, then[0])))
    assert warm.before.miss_reason is miss
    report = raw.explain()
    assert (report.resident, report.available) == (warm.final.resident, warm.final.available)
    assert report.seen_tokens == warm.final.seen_tokens


def test_when_everything_matches_one_token_is_evaluated_again(client: Client, raw: Session) -> None:
    ask(raw, STORY, " And", 3)
    total = len(text_ids(client, STORY + " And"))
    warm = ask(raw, STORY, " And", 3)
    assert warm.before.reused + warm.after.reused == total - 1
    assert (warm.before.prefilled, warm.after.prefilled) == (0, 1)


def test_a_warm_turn_evaluates_nothing_of_its_prefix(chat: Session) -> None:
    prefix = [system("You are the keeper of a lighthouse." + STORY)]
    ask(chat, prefix, [user("What do you see?")], 4)
    warm = ask(chat, prefix, [user("What do you hear at night?")], 4)
    assert warm.before.prefilled == 0
    assert warm.before.reused == warm.before.prefix
    assert warm.before.miss_reason is MissReason.NONE


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_growing_chat_evaluates_only_what_is_new(
    client: Client, chat: Session, temperature: float
) -> None:
    opening = system("You answer briefly.")
    talk = chat.chat("You answer briefly.")
    lead = prompt_ids(client, [opening], cue=False)
    end_of_message = lead[-2:]
    ends = set(end_of_message)
    prompt: list[int] = []
    held: list[int] = []
    for index, question in enumerate(["Hello!", "Name a colour.", "Another.", "Why that one?"]):
        asked = prompt_ids(client, [opening, user(question)])[len(lead) :]
        so_far = [*prompt, *end_of_message] if prompt else lead
        stream = talk.send(
            question, max_tokens=12, token_ids=True, temperature=temperature, seed=index
        )
        answer = [token for chunk in stream.chunks() for token in chunk.token_ids]
        assert stream.prefix_status is not None
        assert stream.suffix_status is not None
        assert stream.final is not None
        whole = [*so_far, *asked]
        matched = common(held, whole)
        assert matched == len(held), "nothing of what was said is evaluated again"
        told = Told(
            answer, "", [], [], stream.prefix_status, stream.suffix_status, stream.final, None
        )
        check_turn(told, held, whole, len(so_far))
        held = held_after(whole, told)
        said = answer[:-1] if answer[-1] in ends else answer
        prompt = [*whole, *said]


def test_an_answer_sent_back_as_text_is_not_tokenized_again(client: Client, chat: Session) -> None:
    asked = [system("You are a storyteller."), user("Tell me a story.")]
    told = ask(chat, asked[:1], asked[1:], 16, temperature=1.2, seed=3)
    history = [*asked, {"role": "assistant", "content": told.text}]
    warm = ask(chat, history, [user("Go on.")], 4)
    assert warm.before.turns_recomputed == 0
    assert warm.before.reused >= told.final.resident
    assert warm.before.prefilled == warm.before.prefix - warm.before.reused


def test_an_answer_that_was_edited_is_evaluated_from_the_edit_on(
    client: Client, chat: Session
) -> None:
    asked = [system("You are a storyteller."), user("Tell me a story.")]
    told = ask(chat, asked[:1], asked[1:], 12)
    history = [*asked, {"role": "assistant", "content": "No. " + told.text}]
    warm = ask(chat, history, [user("Go on.")], 4)
    ids = prompt_ids(client, [*history, user("Go on.")])
    prompt = prompt_ids(client, asked)
    reused = common(held_after(prompt, told), ids)
    assert warm.before.reused == reused
    assert warm.before.prefilled == warm.before.prefix - reused


# --- the parts by themselves ---------------------------------------------------------------------


def test_the_parts_count_as_the_turn_does(client: Client, raw: Session) -> None:
    prefix, whole = text_ids(client, STORY), text_ids(client, STORY + " And then")
    before = raw.ensure_prefix(STORY, turn_id="one")
    assert (before.reused, before.prefilled, before.resident) == (0, len(prefix), len(prefix))
    after = raw.prefill_suffix(" And then", turn_id="one")
    assert (after.reused, after.prefilled) == (0, len(whole) - len(prefix))
    assert (after.prefix, after.suffix, after.resident) == (
        len(prefix),
        len(whole) - len(prefix),
        len(whole),
    )
    told = go_on(raw, 4, turn_id="one")
    assert told.final.prefilled == 0
    assert told.final.resident == len(whole) + 3
    # The turn is over: nobody holds the slot.
    assert client.status().slots[0].holder_operation == ""
    # Ensuring the same prefix gives the rest up, but keeps it findable.
    again = raw.ensure_prefix(STORY)
    assert (again.reused, again.prefilled, again.dropped) == (
        len(prefix),
        0,
        told.final.resident - len(prefix),
    )
    assert (again.resident, again.retained) == (len(prefix), told.final.resident - len(prefix))
    assert again.available == WINDOW - len(prefix)
    # A shorter prefix likewise, and the longer one is found again.
    shorter = text_ids(client, STORY[: STORY.index(".")])
    cut = raw.ensure_prefix(STORY[: STORY.index(".")])
    assert (cut.reused, cut.prefilled) == (len(shorter), 0)
    assert cut.resident + cut.retained == told.final.resident
    back = raw.ensure_prefix(STORY)
    assert (back.reused, back.prefilled, back.dropped) == (len(prefix), 0, 0)


def test_a_second_suffix_replaces_the_first_and_an_extension_adds_to_it(
    client: Client, raw: Session
) -> None:
    prefix = text_ids(client, STORY)
    raw.ensure_prefix(STORY)
    one = raw.prefill_suffix(" And then the storm")
    two = raw.prefill_suffix(" And then the calm sea")
    first = text_ids(client, STORY + " And then the storm")
    second = text_ids(client, STORY + " And then the calm sea")
    kept = common(first, second)
    assert one.suffix == len(first) - len(prefix)
    assert (two.reused, two.prefilled) == (kept - len(prefix), len(second) - kept)
    assert two.dropped == len(first) - kept
    more = raw.prefill_suffix(" rose again", extend=True)
    third = text_ids(client, STORY + " And then the calm sea rose again")
    assert (more.reused, more.prefilled) == (
        len(second) - len(prefix),
        len(third) - len(second),
    )
    assert (more.dropped, more.suffix, more.resident) == (
        0,
        len(third) - len(prefix),
        len(third),
    )


def test_decoding_on_continues_the_answer_and_counts_its_last_token(
    client: Client, raw: Session
) -> None:
    raw.ensure_prefix(STORY)
    raw.prefill_suffix(" And then")
    whole = len(text_ids(client, STORY + " And then"))
    first = go_on(raw, 3)
    assert (first.final.prefilled, first.final.resident) == (0, whole + 2)
    second = go_on(raw, 3)
    assert second.final.prefilled == 1, "the last sampled token had not been evaluated"
    assert second.final.resident == whole + 5


def test_an_empty_suffix_leaves_the_prefix_to_decode_from(client: Client, raw: Session) -> None:
    prefix = len(text_ids(client, STORY))
    ask(raw, STORY, " And then", 4)
    raw.ensure_prefix(STORY)
    status = raw.prefill_suffix("")
    assert (status.suffix, status.prefilled, status.resident) == (0, 0, prefix)
    told = go_on(raw, 3)
    assert told.final.prefilled == 1, "the prefix's last token is evaluated again for its logits"
    assert told.final.resident == prefix + 2


def test_an_answer_cut_within_a_token_is_recomputed_from_its_text_and_said_so(
    chat: Session, reference: Reference
) -> None:
    asked = ([system("You are a storyteller.")], [user("Tell a story.")])
    plain = ask(chat, *asked, 24)
    pieces = [reference.text([token]) for token in plain.ids]
    long = next(i for i, piece in enumerate(pieces) if i > 4 and len(piece) > 5)
    cut = len("".join(pieces[:long])) + 3
    stopped = ask(chat, *asked, 24, stop=[plain.text[cut : cut + 3]])
    assert stopped.text == plain.text[:cut]
    assert stopped.turn is not None
    more = ask(chat, [*asked[0], *asked[1], stopped.turn], [user("Go on.")], 3)
    assert more.before.turns_recomputed == 1
    # What was sampled before the cut stands for the text all the same, as far as it is resident.
    assert more.before.reused <= stopped.final.resident
    assert more.before.reused + more.before.prefilled == more.before.prefix


def test_what_was_seen_only_grows(client: Client, raw: Session) -> None:
    whole = len(text_ids(client, STORY + " And"))
    first = ask(raw, STORY, " And", 4)
    assert first.final.seen_tokens == whole + 4
    second = ask(raw, STORY, " And", 4)
    assert second.final.seen_tokens == first.final.seen_tokens + 1 + 4


def test_blocks_and_segments_say_where_everything_lies(client: Client, raw: Session) -> None:
    prefix, whole = len(text_ids(client, STORY)), len(text_ids(client, STORY + " And"))
    told = ask(raw, STORY, " And", 4)
    report = raw.explain()
    assert [(b.token_begin, b.token_end, b.state, b.what) for b in report.blocks] == [
        (0, prefix, "hot", "prefix"),
        (prefix, whole, "hot", "suffix"),
        (whole, whole + 3, "hot", "generated"),
    ]
    assert [(s.token_begin, s.token_end, s.located) for s in report.segments] == [
        (0, prefix, True),
        (prefix, whole, True),
    ]
    assert [(s.byte_begin, s.byte_end) for s in report.segments] == [
        (0, len(STORY)),
        (len(STORY), len(STORY) + 4),
    ]
    assert told.turn is not None
    assert report.generated_turn_ids == (told.turn.turn_id,)


def test_the_counters_add_up(client: Client, raw: Session) -> None:
    first = ask(raw, STORY, " And", 4)
    second = ask(raw, STORY, " But", 4)
    counters = {counter.name: counter.value for counter in raw.explain().counters}
    turns = (first, second)
    statuses = [status for told in turns for status in (told.before, told.after)]
    assert counters["evaluated_tokens"] == sum(s.prefilled for s in statuses) + sum(
        len(told.ids) - 1 for told in turns
    )
    assert counters["reused_tokens"] == sum(s.reused for s in statuses)
    assert counters["dropped_tokens"] == sum(s.dropped for s in statuses)
    assert counters["generated_tokens"] == sum(len(told.ids) for told in turns)
    assert counters["cancelled_ops"] == 0


def test_text_that_differs_in_segments_but_not_in_tokens_is_a_hit(raw: Session) -> None:
    cut = STORY.index(" Storms")
    first = ask(raw, STORY, " And", 2)
    second = ask(raw, [STORY[:cut], STORY[cut:]], " And", 2)
    assert second.before.reused == second.before.prefix
    assert second.before.manifest_digest != first.before.manifest_digest
    assert second.before.stable_token_hash == first.before.stable_token_hash


def test_a_window_that_is_not_a_multiple_of_the_engines_is_kept_as_asked(client: Client) -> None:
    with client.open_session(MODEL, window=1000, prompt_format="raw") as session:
        told = ask(session, STORY, " And", 2)
        assert session.resolution.context.effective.tokens == 1000
        assert told.final.available == 1000 - told.final.resident
        assert session.explain().available == told.final.available


def test_a_generated_turn_that_is_unknown_is_refused(chat: Session) -> None:
    told = ask(chat, [system("x")], [user("y")], 2)
    unknown = GeneratedTurn("t-unknown", chat.handle.session_id, "text")
    with pytest.raises(InvalidRequest):
        ask(chat, [system("x"), user("y"), unknown], [user("z")], 2)
    assert chat.explain().resident == told.final.resident
    assert told.stop in (StopReason.LENGTH, StopReason.EOS)
