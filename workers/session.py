"""One session's state: its context, where its logical parts end, its answers, its counters.

Knows what is where; does no evaluation and no rendering.

Of what a context physically holds, the first ``logical`` tokens are the session's resident
context: prefix, suffix, generated. What lies behind them is *retained*: it belongs to no prompt
now, may be found again by a later one, and goes only when another token must be evaluated there.

Under overflow evict, prompt and answer are the *conversation*, of which a layout says what is
attended; the context holds that, one token after the other, as if it were all there is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from modeld.shared.messages import BlockOut, PromptIn, SegmentOut
from modeld.shared.planner.residency import Layout, cut
from modeld.shared.planner.token_ranges import Ranges, past, taken, total, upto
from modeld.workers.pooled_context import PooledContext, Shape, Tokens
from modeld.workers.prompt import Assembled, GeneratedTurn, PromptAssembler
from modeld.workers.tape import Former, Next, classes_of, next_tape

if TYPE_CHECKING:
    from modeld.workers.saving import SavedParts

MAX_TURNS = 256  # generated turns kept a session; the oldest go first
COUNTERS = (
    "evaluated_tokens",  # by the engine, prompt and answers
    "reused_tokens",
    "copied_tokens",
    "restored_tokens",  # from the cold store
    "dropped_tokens",
    "evicted_tokens",  # out of attention, since others needed their place
    "recomputed_tokens",  # evaluated again, since others went out
    "generated_tokens",
    "cancelled_ops",
    "created_contexts",
    "adopted_contexts",  # taken from the pool, at open or for what they held
)


@dataclass(frozen=True)
class Parked:
    """What a session had that gave its context up."""

    shape: Shape
    tokens: int  # resident


@dataclass
class Session:
    session_id: str
    assembler: PromptAssembler
    kv_digest: str
    runtime_digest: str
    context: PooledContext | None  # None once fatal, and while parked
    served_window: int  # tokens; what the engine allocated may be more
    prompt_format: str = "raw"  # raw | chat
    batched: bool = False  # its context is a stream of one that several share
    logical: int = 0  # resident tokens
    prompt: int = 0  # tokens of the prompt last asked for: prefix and suffix
    prefix_tokens: int = 0
    prefix: PromptIn = field(default_factory=lambda: PromptIn(segments=[]))
    suffix: PromptIn | None = None
    assembled: Assembled | None = None
    answer_ids: list[int] = field(default_factory=list)  # since the prompt, over all decodes
    answer_text: str = ""
    answer_spelled: bool = True  # whether the ids make up the text
    turns: OrderedDict[str, GeneratedTurn] = field(default_factory=OrderedDict)
    seen_tokens: int = 0
    counters: Counter[str] = field(default_factory=Counter)
    fatal_cause: str = ""
    saves: OrderedDict[str, SavedParts] = field(default_factory=OrderedDict)  # by folder
    parked: Parked | None = None
    layout: Layout | None = None  # under overflow evict: what of the conversation is attended
    former: Former | None = None
    stayed: Ranges = ()  # of the conversation before the last prompt: resident, and the prompt's

    @property
    def entry(self) -> PooledContext:
        """The context; the core lets no operation of a fatal session come this far."""
        assert self.context is not None
        return self.context

    def assemble(
        self, prefix: PromptIn, suffix: PromptIn | None, admit: Callable[[int], None]
    ) -> Assembled:
        """The prompt's tokens; raises InvalidRequest or ManifestMismatch, changing nothing.

        ``admit`` is told the rendered text's size in bytes before it is tokenized.
        """
        return self.assembler.assemble(prefix, suffix, self.turns, admit)

    @property
    def window(self) -> int:
        """Tokens that this session may hold."""
        return min(self.served_window, self.entry.window)

    @property
    def available(self) -> int:
        """Tokens that still fit the window."""
        return self.window - self.logical

    @property
    def retained(self) -> int:
        return len(self.entry) - self.logical

    def missing(self) -> list[int]:
        """Tokens of the prompt (after a cancel) and the answer that aren't resident, and are to be.

        An answer's last token is sampled but not evaluated: nothing needs its KV until the
        conversation goes on, and then it is evaluated together with what follows.
        """
        if self.layout is not None:
            return self.known_tokens()[self.logical :]
        if self.assembled is None or self.logical >= self.prompt:
            return self.answer_ids[self.logical - self.prompt :]
        return [*self.assembled.tokens[self.logical :], *self.answer_ids]

    def conversation(self) -> list[int]:
        """Prompt and answer so far."""
        return [*(self.assembled.tokens if self.assembled else ()), *self.answer_ids]

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt + len(self.answer_ids)

    def known_tokens(self) -> list[int]:
        """Of prompt and answer so far what the context is to hold, resident or not."""
        tokens = self.conversation()
        if self.layout is None:
            return tokens
        return [t for b, e in self.layout.attended(len(tokens)) for t in tokens[b:e]]

    def logical_tokens(self) -> Tokens:
        return self.entry.tokens[: self.logical]

    def set_prompt(self, prefix: PromptIn, suffix: PromptIn | None, assembled: Assembled) -> None:
        """From here on the session is about this prompt; what was generated is behind it."""
        if self.layout is not None:
            self._go_over(self.next_tape(prefix, suffix, assembled))
        self.prefix = prefix
        self.suffix = suffix
        self.assembled = assembled
        self.prefix_tokens = assembled.prefix_tokens
        self.prompt = len(assembled.tokens)
        self.answer_ids = []
        self.answer_text = ""
        self.answer_spelled = True

    # --- under overflow evict

    def next_tape(self, prefix: PromptIn, suffix: PromptIn | None, assembled: Assembled) -> Next:
        """What another prompt would make of the conversation."""
        assert self.layout is not None
        known = Former(np.asarray(self.conversation(), dtype=np.int32), self._noted(self.layout))
        classes = classes_of(prefix, suffix, assembled, self.assembler.control_ids)
        target = np.asarray(assembled.tokens, dtype=np.int32)
        return next_tape(known, self.former, target, classes)

    def _go_over(self, following: Next) -> None:
        self.stayed = upto(self.resident_ranges(), following.same)
        self.layout, self.former = following.layout, following.former

    def resident_ranges(self) -> Ranges:
        """What of the conversation is resident."""
        ranges = ((0, self.length),) if self.layout is None else self.layout.attended(self.length)
        return taken(ranges, 0, self.logical)

    def _noted(self, layout: Layout) -> Layout:
        """With what is resident now counted as evaluated and seen."""
        held = self.resident_ranges()
        end = held[-1][1] if held else 0
        return replace(layout, evaluated=max(layout.evaluated, end), seen=max(layout.seen, end))

    def sampled(self) -> None:
        """What was generated up to now has been seen, and what is resident of it evaluated."""
        if self.layout is not None:
            self.layout = replace(self._noted(self.layout), seen=self.length)

    def took(self, begin: int, end: int, *, again_from: int = 0) -> None:
        """Count the tokens at these positions of the context, which were evaluated just now.

        ``again_from``: before it, one is evaluated again for its logits only.
        """
        if self.layout is None:
            self.seen_tokens += end - begin
            return
        attended = self.layout.attended(self.length)
        ranges = taken(attended, begin, end)
        self.seen_tokens += total(past(ranges, self.layout.seen))
        again = taken(attended, max(begin, again_from), end)
        self.counters["recomputed_tokens"] += total(upto(again, self.layout.evaluated))
        last = ranges[-1][1] if ranges else 0
        self.layout = replace(
            self.layout,
            evaluated=max(self.layout.evaluated, last),
            seen=max(self.layout.seen, last),
        )

    @property
    def as_prompt(self) -> int:
        """Positions of the context, from the first on, that are evaluated as a prompt's are."""
        if self.layout is None:
            return self.prompt
        return total(upto(self.layout.attended(self.length), self.layout.as_prompt))

    def cut(self, kept: int) -> None:
        """Of the answer only ``kept`` tokens stay resident."""
        length = self.prompt + kept
        if self.layout is None:
            self.logical = min(self.logical, length)
            return
        self.logical = total(upto(self.resident_ranges(), length))
        self.layout = cut(self.layout, length)

    # --- turns and questions

    def keep_turn(self, turn: GeneratedTurn) -> None:
        self.turns.pop(turn.turn_id, None)
        self.turns[turn.turn_id] = turn
        while len(self.turns) > MAX_TURNS:
            self.turns.popitem(last=False)

    def segments(self) -> list[SegmentOut]:
        return list(self.assembled.segments) if self.assembled else []

    def blocks(self) -> list[BlockOut]:
        """What the context holds, in order; empty ranges are left out."""
        prefix_end = min(self.prefix_tokens, self.logical)
        prompt_end = min(self.prompt, self.logical)
        ranges = [
            (0, prefix_end, "hot", "prefix"),
            (prefix_end, prompt_end, "hot", "suffix"),
            (prompt_end, self.logical, "hot", "generated"),
            (self.logical, len(self.entry), "retained", "retained"),
        ]
        return [
            BlockOut(begin=begin, end=end, state=state, what=what)
            for begin, end, state, what in ranges
            if end > begin
        ]
