"""Structured output: which tokens a JSON schema, a regular expression or a grammar allows next.

Owns llguidance: a model's vocabulary in its form, and the state of one constrained answer. Knows
no engine, no session and no sampling; nothing else here imports llguidance.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from modeld.shared.errors import (
    InsufficientMemory,
    InvalidRequest,
    ModeldError,
    UnsupportedFeature,
)
from modeld.shared.messages import DecodeIn
from modeld.workers.engine import SelfSampling, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from modeld.workers.sampling import Ids

FIELD = "options.structured"
CAPABILITY = "structured_output"
KINDS = ("json_schema", "regex", "grammar")
# A schema of this size with nothing but optional properties takes about a second to compile.
MAX_BYTES = 128 * 1024
MAX_WORDS = 300  # characters of llguidance's own words in an error
# Between two parts of a JSON text. Without a bound a small model may never leave the white space;
# a schema's own "x-guidance" can say otherwise.
JSON_WHITESPACE = r" |\n[ \t]{0,32}"

# What one step and one constraint may cost; beyond it the matcher gives up, which is an error.
_LIMITS = {
    "max_items_in_row": 2_000,
    "step_max_items": 20_000,
    "step_lexer_fuel": 200_000,  # some 14 ms
    "max_lexer_states": 50_000,  # some 100 MB
    "max_grammar_size": 100_000,  # symbols
    "verbose_errors": False,  # they would quote the answer
}
# The compiler recurses along chains of rules, 400 bytes of stack a byte of text as measured, and
# an overflow would end the process.
_STACK_BYTES, _STACK_BYTES_PER_BYTE = 16 << 20, 1024
_MARK = b"\xff"  # begins what isn't text
_BEAT_TOKENS = 4096
_GAP_S_PER_TOKEN = 10e-6  # without the GIL, while the vocabulary is made; 4 to 8 were measured
# Of a matcher's words while it runs, those that quote nothing.
_LIMIT_WORDS = re.compile(
    r"too many expressions constructed|too many items \(limit \d+|current row has \d+ items",
    re.IGNORECASE,
)


def check(options: DecodeIn, engine: SelfSampling | None = None) -> None:
    """What of a constraint can be refused without looking into it.

    Raises InvalidRequest; UnsupportedFeature where the ``engine`` samples by itself.
    """
    kind, text = options.structured_kind, options.structured
    if not kind and not text:
        return
    if kind not in KINDS:
        raise InvalidRequest.of(f"{FIELD}.kind", kind[:64], ", ".join(KINDS))
    if (size := len(text.encode(errors="surrogatepass"))) > MAX_BYTES:
        raise InvalidRequest.of(FIELD, f"{kind} of {size} bytes", f"at most {MAX_BYTES} bytes")
    if options.ignore_eos:
        raise InvalidRequest.of(
            "ignore_eos", True, "false with a constraint", "A constraint says where the end may be."
        )
    if engine is not None:
        raise UnsupportedFeature(
            "This model's engine samples by itself and can't be constrained: ask without.",
            metadata={"capability": CAPABILITY},
        )


@functools.cache
def capability() -> str:
    """``"yes: …"`` where llguidance constrained a few bytes as it should, else ``"no: …"``."""
    try:
        library = importlib.import_module("llguidance")
    except Exception as error:  # whatever an import of native code may raise
        return f"no: llguidance can't be imported ({type(error).__name__})"
    try:
        seen = _walked(Constraints(_Bytes()).begin("regex", "a(b|c)", ""), b"ac")
    except Exception as error:
        return f"no: llguidance {library.__version__} doesn't work ({type(error).__name__})"
    if seen != [b"a", b"bc"]:
        return f"no: llguidance {library.__version__} allows other bytes than a regex does"
    done = "masks each step by JSON schema, regex or Lark grammar; tried on a regex"
    return f"yes: llguidance {library.__version__} {done}"


def longest_gap_s(declared: Mapping[str, float], vocab_size: int) -> dict[str, float]:
    """A worker's longest gaps by kind of call, in seconds, with the making of ``Constraints``."""
    gaps_s = dict(declared)
    if "evaluate" in gaps_s and capability().startswith("yes"):
        gaps_s["evaluate"] = max(gaps_s["evaluate"], _GAP_S_PER_TOKEN * vocab_size)
    return gaps_s


def _walked(constraint: Constraint, text: bytes) -> list[bytes]:
    """What was allowed at each step of ``text``, which must be all of an answer."""
    seen = []
    for byte in text:
        allowed = constraint.allowed()
        seen.append(b"" if allowed is None else bytes(allowed.tolist()))
        constraint.accept(byte)
    return seen if constraint.complete else []


class _Bytes:
    """The smallest vocabulary: every byte is a token, and none ends an answer."""

    vocab_size = 256
    bos: int | None = None
    add_bos = False
    end_of_generation: frozenset[int] = frozenset()
    controls: Mapping[str, int] = MappingProxyType({})
    strips_left: frozenset[int] = frozenset()
    strips_right: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def safe_split(self, text: str, before: int) -> int | None:
        return None


class Constraints:
    """One model's vocabulary as llguidance needs it: made once, when it is first asked for."""

    def __init__(self, tokenizer: Tokenizer, beat: Callable[[], None] = lambda: None) -> None:
        """Takes some 10 µs a token, the second half of it without releasing the GIL: 0.2 s for a
        vocabulary of 49,152. ``beat`` is called while it goes on.

        Raises UnsupportedFeature where llguidance isn't there.
        """
        self._library = library = _library()
        size = tokenizer.vocab_size
        special = set(tokenizer.controls.values()) | tokenizer.end_of_generation
        tokens = []
        for token in range(size):
            if token % _BEAT_TOKENS == 0:
                beat()
            tokens.append(_named(token) if token in special else _text(tokenizer.piece(token)))
        ends = sorted(tokenizer.end_of_generation)
        if not ends:  # one that no engine can sample: the answer ends where nothing may follow
            ends = [size]
            tokens.append(_named(size))
        self.size = size
        self.special: Ids = np.array(sorted(special), dtype=np.intp)
        self.ends: Ids = np.array(ends, dtype=np.intp)
        asked = _Asked(tokenizer, tokens, ends[0])
        wrapped = library.TokenizerWrapper(asked)
        beat()
        self.vocabulary: LLTokenizer = library.LLTokenizer(
            wrapped, n_vocab=len(tokens), eos_token=ends
        )
        asked.bytewise = self.vocabulary.greedy_tokenize
        beat()

    def begin(self, kind: str, text: str, answer: str) -> Constraint:
        """The constraint of an answer of which ``answer`` is there already.

        Raises InvalidRequest for a constraint that can't be, with llguidance's own words, for one
        that is beyond its limits, and where ``answer`` isn't a beginning of what it allows;
        InsufficientMemory where there is none for compiling.
        """
        library, limits = self._library, self._library.LLParserLimits(**_LIMITS)

        def compiled() -> LLMatcher:
            matcher: LLMatcher = library.LLMatcher(
                self.vocabulary, self._grammar(kind, text), log_level=0, limits=limits
            )
            return matcher

        if kind == "json_schema":
            text = _checked_json(text)
        try:
            matcher = _deep(compiled, len(text.encode()))
        except ValueError as error:
            raise _refused(kind, text, _words(kind, str(error))) from None
        if matcher.is_error():
            raise _refused(kind, text, _words(kind, matcher.get_error()))
        constraint = Constraint(self, matcher, f"{kind} of {len(text)} characters")
        constraint.go_on_from(answer)
        constraint.allowed()  # what fails at the first step fails before anything has changed
        return constraint

    def _grammar(self, kind: str, text: str) -> str:
        matcher = self._library.LLMatcher
        if kind == "json_schema":
            defaults = {"whitespace_pattern": JSON_WHITESPACE}
            grammar: str = matcher.grammar_from_json_schema(text, defaults=defaults)
        elif kind == "regex":
            grammar = matcher.grammar_from_regex(text)
        else:
            grammar = matcher.grammar_from_lark(text)
        return grammar


class Constraint:
    """One answer under a constraint. ``complete``: nothing but the end may follow."""

    def __init__(self, model: Constraints, matcher: LLMatcher, what: str) -> None:
        self._model, self._matcher, self._what = model, matcher, what
        self._next: Ids | None = None
        self.complete = False

    def go_on_from(self, answer: str) -> None:
        """Take in the text of the answer so far; raises InvalidRequest if it doesn't fit."""
        vocabulary = self._model.vocabulary
        ids = vocabulary.greedy_tokenize(answer) if answer else []
        fits = vocabulary.decode_bytes(ids) == answer.encode()
        if not fits or self._matcher.try_consume_tokens(ids) < len(ids):
            raise InvalidRequest.of(
                FIELD,
                self._what,
                "a constraint that the answer so far fits",
                f"It holds for the whole answer, of which {len(answer)} characters are there. "
                "Leave it out, or send the prompt again for a new answer.",
            )
        self._settle()

    def allowed(self) -> Ids | None:
        """The ids that may come next, ascending; None where the answer is complete.

        Raises InvalidRequest where nothing may, not even the end.
        """
        if self._next is None and not self.complete:
            self._next = self._masked()
        return self._next

    def accept(self, token: int) -> None:
        """Take in a token that was sampled, other than the end; raises InvalidRequest if it isn't
        allowed after all.
        """
        if not self._matcher.consume_token(token):
            raise self._dead_end()
        self._settle()

    def _settle(self) -> None:
        self._next = None
        if self._matcher.is_error():
            raise self._dead_end()
        self.complete = self._matcher.is_stopped()

    def _masked(self) -> Ids | None:
        model, matcher = self._model, self._matcher
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():  # its mask then is the end alone
            raise self._dead_end()
        mask: NDArray[np.bool_] = np.unpackbits(bits, bitorder="little").view(np.bool_)
        # A grammar can name an end in its middle, by number.
        ended = bool(mask[model.ends].any()) and matcher.is_accepting()
        mask = mask[: model.size]
        mask[model.special] = False
        if not mask.any():
            if not ended:
                raise self._dead_end()
            self.complete = True
            return None
        if ended:
            mask[model.ends[model.ends < model.size]] = True
        return np.flatnonzero(mask)

    def _dead_end(self) -> InvalidRequest:
        told = _LIMIT_WORDS.search(self._matcher.get_error())
        why = f"it is too complex here ({told[0]})" if told else "no token of the model fits"
        return InvalidRequest(
            f"No answer can go on here under its {self._what}: {why}. What was generated until "
            "here, if anything, is kept. Loosen the constraint, or ask for another answer.",
            metadata={"field": FIELD, "value": self._what, "cause": "dead_end"},
        )


class _Asked:
    """What llguidance asks of a tokenizer: the tokens' bytes, and how the model spells a text.

    How a text is spelled must give exactly its bytes back: a mask is made from it.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id, self.bos_token_id = tokens, end, None
        self.special_token_ids: list[int] = []  # their marks tell
        self.bytewise: Callable[[str], list[int]] = lambda text: []
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            raise TypeError("text, please")  # so that it is never asked with half a character
        try:
            ids = self._encode(text)
        except ModeldError:
            return self.bytewise(text)
        return ids if self._spells(ids, text) else self.bytewise(text)

    def _spells(self, ids: Iterable[int], text: str) -> bool:
        """False for a vocabulary that puts a space before each text, for one."""
        return b"".join([self.tokens[token] for token in ids]) == text.encode()


def _named(token: int) -> bytes:
    """A control token, by a name that no grammar uses: none may be asked for."""
    return b"%s<|%d|>" % (_MARK, token)


def _text(piece: bytes) -> bytes:
    """A token's bytes, or none where it would pass for a control token: no text has that byte."""
    return b"" if piece.startswith(_MARK) else piece


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise UnsupportedFeature(
            f"Structured output needs llguidance ({error}): install it, or ask without.",
            metadata={"capability": CAPABILITY},
        ) from None


def _deep(compiled: Callable[[], LLMatcher], text_bytes: int) -> LLMatcher:
    """Compile on a stack that the longest chain of rules in so much text can't overflow."""
    outcome: list[LLMatcher] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(compiled())
        except BaseException as error:  # a panic of native code isn't an Exception
            failure.append(error)

    stack_bytes = _STACK_BYTES + text_bytes * _STACK_BYTES_PER_BYTE
    before = threading.stack_size(stack_bytes // 65536 * 65536)
    try:
        thread = threading.Thread(target=run, name="constraint", daemon=True)
        thread.start()
    except RuntimeError:
        raise InsufficientMemory(
            f"There is no memory to compile the constraint: {stack_bytes} bytes of address space "
            "were asked for. Try again, or with a shorter one.",
            metadata={"requested_bytes": stack_bytes},
        ) from None
    finally:
        threading.stack_size(before)
    thread.join()
    if failure:
        told = str(failure[0]) if isinstance(failure[0], ValueError) else ""
        raise ValueError(told or f"it failed with {type(failure[0]).__name__}")
    return outcome[0]


def _checked_json(text: str) -> str:
    """The schema as an object. Raises InvalidRequest, with the place, for what isn't JSON or can't
    be a schema.
    """
    try:
        schema = json.loads(text)
    except RecursionError:
        raise _refused("json_schema", text, "it is nested too deeply") from None
    except ValueError as error:
        raise _refused("json_schema", text, f"it isn't JSON: {error}") from None
    if schema is True:
        return "{}"
    if not isinstance(schema, dict):
        raise _refused("json_schema", text, "it must be an object, or true")
    return text


def _words(kind: str, told: str) -> str:
    """llguidance's words on a constraint, without the picture of where in it the fault lies."""
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if kind == "regex" and errors:  # the place that it tells is one in its own wrapping
        return errors[0]
    return ": ".join([*lines[:1], *errors[:1]]) or "it gave no reason"


def _refused(kind: str, text: str, why: str) -> InvalidRequest:
    words = why if len(why) <= MAX_WORDS else f"{why[:MAX_WORDS]}…"
    return InvalidRequest(
        f"{FIELD}.{kind} ({len(text)} characters) can't be used as a constraint: {words}.",
        metadata={"field": FIELD, "value": f"{kind} of {len(text)} characters", "cause": words},
    )
