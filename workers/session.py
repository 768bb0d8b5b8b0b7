"""One session's state: its context, where its logical parts end, its answers, its counters.

Knows what is where; does no evaluation and no rendering.

Of what a context physically holds, the first ``logical`` tokens are the session's resident
context: prefix, suffix, generated. What lies behind them is *retained*: it belongs to no prompt
now, may be found again by a later one, and goes only when another token must be evaluated there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from modeld.shared.messages import BlockOut, PromptIn, SegmentOut
from modeld.workers.pool import PooledContext, Tokens
from modeld.workers.prompt import Assembled, GeneratedTurn, PromptAssembler

MAX_TURNS = 256  # generated turns kept a session; the oldest go first
COUNTERS = (
    "evaluated_tokens",  # by the engine, prompt and answers
    "reused_tokens",
    "copied_tokens",
    "dropped_tokens",
    "generated_tokens",
    "cancelled_ops",
    "created_contexts",
    "adopted_contexts",  # taken from the pool, at open or for what they held
)


@dataclass
class Session:
    session_id: str
    assembler: PromptAssembler
    kv_digest: str
    runtime_digest: str
    context: PooledContext | None  # None once fatal
    served_window: int  # tokens; what the engine allocated may be more
    prompt_format: str = "raw"  # raw | chat
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
        """Tokens of the prompt (after a cancel) and the answer that aren't resident.

        An answer's last token is sampled but not evaluated: nothing needs its KV until the
        conversation goes on, and then it is evaluated together with what follows.
        """
        if self.assembled is None or self.logical >= self.prompt:
            return self.answer_ids[self.logical - self.prompt :]
        return [*self.assembled.tokens[self.logical :], *self.answer_ids]

    def logical_tokens(self) -> Tokens:
        return self.entry.tokens[: self.logical]

    def set_prompt(self, prefix: PromptIn, suffix: PromptIn | None, assembled: Assembled) -> None:
        """From here on the session is about this prompt; what was generated is behind it."""
        self.prefix = prefix
        self.suffix = suffix
        self.assembled = assembled
        self.prefix_tokens = assembled.prefix_tokens
        self.prompt = len(assembled.tokens)
        self.answer_ids = []
        self.answer_text = ""
        self.answer_spelled = True

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
