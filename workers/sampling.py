"""Choosing the next token from logits: bias, penalties, filters, temperature, one seeded draw.

Pure arithmetic over numpy arrays. Knows nothing of engines or text.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from modeld.shared.errors import InvalidRequest, SessionFatal
from modeld.shared.messages import SamplingIn

if TYPE_CHECKING:
    from modeld.workers.engine import Logits

Ids: TypeAlias = NDArray[np.intp]
Values: TypeAlias = NDArray[np.float64]

MAX_BIAS = 1e6
MAX_PENALTY = 1e3


def validate(options: SamplingIn, vocab_size: int) -> None:
    """Raises InvalidRequest with field, value and what is allowed."""
    for name, low, high in (
        ("temperature", 0.0, MAX_PENALTY),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("typical_p", 0.0, 1.0),
        ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
        ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
    ):
        value = getattr(options, name)
        if not low <= value <= high:  # NaN too is outside
            raise InvalidRequest.of(f"sampling.{name}", value, f"a number from {low:g} to {high:g}")
    if not 0.0 < options.repeat_penalty <= MAX_PENALTY:
        raise InvalidRequest.of(
            "sampling.repeat_penalty", options.repeat_penalty, f"above 0, up to {MAX_PENALTY:g}"
        )
    if options.top_k < 0:
        raise InvalidRequest.of("sampling.top_k", options.top_k, "0 (off) or more")
    if options.repeat_last_n < -1:
        raise InvalidRequest.of(
            "sampling.repeat_last_n", options.repeat_last_n, "-1 (all), 0 (none) or more"
        )
    if not 0 <= options.seed < 2**64:
        raise InvalidRequest.of("sampling.seed", options.seed, "0 to 2^64 - 1")
    for token, bias in options.logit_bias.items():
        if not 0 <= token < vocab_size:
            raise InvalidRequest.of(
                "sampling.logit_bias", token, f"token ids from 0 to {vocab_size - 1}"
            )
        if not (bias == -math.inf or abs(bias) <= MAX_BIAS):
            raise InvalidRequest.of(
                f"sampling.logit_bias[{token}]", bias, f"-{MAX_BIAS:g} to {MAX_BIAS:g}, or -inf"
            )


class Sampler:
    """One decode's sampler. The same options, tokens and logits give the same choices."""

    def __init__(self, options: SamplingIn, vocab_size: int) -> None:
        """Raises InvalidRequest as ``validate`` does."""
        validate(options, vocab_size)
        self._options = options
        self._vocab_size = vocab_size
        self._random = np.random.Generator(np.random.PCG64(options.seed))
        self._greedy = options.temperature <= 0.0
        self._bias_ids: Ids = np.fromiter(options.logit_bias.keys(), dtype=np.intp)
        self._bias = np.fromiter(options.logit_bias.values(), dtype=np.float32)
        penalized = (
            options.repeat_penalty != 1.0
            or options.frequency_penalty != 0.0
            or options.presence_penalty != 0.0
        )
        self._look_back = options.repeat_last_n if penalized else 0
        self._recent: deque[int] = deque()
        self._counts: Counter[int] = Counter()

    def prime(self, tokens: Iterable[int]) -> None:
        """Tell what stands before the answer: the prompt's tail counts for the penalties."""
        for token in tokens:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Count a token that was sampled, or stands before."""
        if self._look_back == 0:
            return
        self._recent.append(token)
        self._counts[token] += 1
        if 0 < self._look_back < len(self._recent):
            gone = self._recent.popleft()
            self._counts[gone] -= 1
            if not self._counts[gone]:
                del self._counts[gone]

    def sample(self, logits: Logits, allowed: Ids | None = None) -> int:
        """The next token's id, one of ``allowed`` where that is given. ``logits`` stay as they are.

        Raises SessionFatal if the logits aren't numbers, and InvalidRequest if all is banned.
        """
        values = self._edited(logits)
        if allowed is None:
            return self._choose(values)
        # Nothing but these, so that no rounding can choose another.
        values = values[allowed]
        left = values != -math.inf
        if left.all():
            return int(allowed[self._choose(values)])
        if not left.any():
            raise InvalidRequest.of(
                "sampling.logit_bias",
                "-inf for every token that the constraint allows here",
                "at least one token left to choose",
            )
        return int(allowed[left][self._choose(values[left])])

    def _choose(self, values: Logits) -> int:
        """The index of what is taken."""
        if self._greedy:
            best = int(np.argmax(values))  # the first NaN, if there is one
            self._check_best(float(values[best]))
            return best
        return self._draw(values)

    def _edited(self, logits: Logits) -> Logits:
        """The logits with bias and penalties, or the same array where there are none."""
        if not len(self._bias_ids) and not self._counts:
            return logits
        values = logits.copy()
        if len(self._bias_ids):
            values[self._bias_ids] += self._bias
        if self._counts:
            options = self._options
            ids = np.fromiter(self._counts.keys(), dtype=np.intp)
            counts = np.fromiter(self._counts.values(), dtype=np.float32)
            hit = values[ids]
            penalty = np.float32(options.repeat_penalty)
            hit = np.where(hit > 0, hit / penalty, hit * penalty)
            hit -= counts * np.float32(options.frequency_penalty)
            hit -= np.float32(options.presence_penalty)
            values[ids] = hit
        return values

    def _check_best(self, value: float) -> None:
        if value == -math.inf and len(self._bias_ids):
            raise InvalidRequest.of(
                "sampling.logit_bias", "-inf for every token", "at least one token left to choose"
            )
        if not math.isfinite(value):
            raise SessionFatal(
                f"The engine answered {value} for a token's logit: its state can't be trusted. "
                "Open a new session; if it happens again, the model's weights are damaged.",
                metadata={"cause": "engine_error"},
            )

    def _draw(self, logits: Logits) -> int:
        options = self._options
        share = 1.0  # of all probability, what the candidates hold
        if options.top_k == 0 and options.typical_p >= 1.0 and options.min_p > 0.0:
            # top_p and min_p both keep a number of the best: min_p first spares sorting all.
            highest = float(logits.max())
            self._check_best(highest)
            share, ids = _above(logits, highest, math.log(options.min_p))
            ids, values = _sorted(ids, logits[ids])
        else:
            ids, values = _best(logits, options.top_k)
            # Of what is sorted the largest, or a NaN.
            self._check_best(float(values[0]))
        values = values - values[0]
        if options.typical_p < 1.0:
            keep = _typical(values, options.typical_p)
            ids, values = ids[keep], values[keep]
        if options.top_p < 1.0:
            reached = np.cumsum(_softmax(values)) * share
            kept = int(np.searchsorted(reached, options.top_p)) + 1
            ids, values = ids[:kept], values[:kept]
        if options.min_p > 0.0:
            # Sorted, so all up to the first that falls below stay; at least the best.
            kept = int(np.count_nonzero(values - values[0] >= math.log(options.min_p)))
            ids, values = ids[:kept], values[:kept]
        with np.errstate(over="ignore"):
            scaled = (values - values[0]) / options.temperature
        reached = np.cumsum(_softmax(scaled))
        place = int(np.searchsorted(reached, self._random.random() * reached[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])


def _best(logits: Logits, top_k: int) -> tuple[Ids, Values]:
    """Ids and logits of the ``top_k`` best (0: all), best first; equal ones by id. NaN is best."""
    if 0 < top_k < len(logits):
        # Partition puts NaN last, that is among the best; and one more than asked decides
        # whether the cut goes through equals, of which the lowest ids are to stay.
        ids = np.argpartition(logits, len(logits) - top_k)[-top_k:]
        threshold = logits[ids].min()
        if np.count_nonzero(logits == threshold) > 1:
            ids = np.flatnonzero(~(logits < threshold))
    else:
        ids = np.arange(len(logits))
    ids, values = _sorted(ids, logits[ids])
    return (ids[:top_k], values[:top_k]) if top_k > 0 else (ids, values)


def _sorted(ids: Ids, logits: Logits) -> tuple[Ids, Values]:
    """Best first, equal ones by id; a NaN before all. ``ids`` need no order."""
    if len(ids) and np.isnan(logits).any():
        return ids[:1], np.full(1, np.nan)
    values = logits.astype(np.float64)
    by_id = np.argsort(ids, kind="stable")
    order = by_id[np.argsort(-values[by_id], kind="stable")]
    return ids[order], values[order]


def _above(logits: Logits, highest: float, floor: float) -> tuple[float, Ids]:
    """Ids at most ``-floor`` below the highest logit, and their share of all probability."""
    below = logits.astype(np.float64) - highest
    ids = np.flatnonzero(below >= floor)
    weights = np.exp(below)
    return float(weights[ids].sum() / weights.sum()), ids


def _softmax(values: Values) -> Values:
    weights: Values = np.exp(values - values.max())
    weights /= weights.sum()
    return weights


def _typical(values: Values, typical_p: float) -> NDArray[np.bool_]:
    """Those whose surprise is nearest the expected one, up to a mass of ``typical_p``."""
    chances = _softmax(values)
    surprise = -np.log(np.maximum(chances, np.finfo(np.float64).tiny))
    expected = float((chances * surprise).sum())
    order = np.argsort(np.abs(surprise - expected), kind="stable")
    kept = int(np.searchsorted(np.cumsum(chances[order]), typical_p)) + 1
    keep = np.zeros(len(values), dtype=np.bool_)
    keep[order[:kept]] = True
    return keep


def top_logprobs(logits: Logits, n: int, token: int) -> tuple[float, list[tuple[int, float]]]:
    """Log-probability of ``token``, and the ``n`` best ids with theirs, best first.

    From the logits as the model gave them, before bias, penalties and filters.
    """
    exact = logits.astype(np.float64)
    highest = exact.max()
    base = float(highest + np.log(np.exp(exact - highest).sum()))
    if n <= 0:
        return float(exact[token]) - base, []
    ids, values = _best(logits, n)
    best = [(int(i), float(v) - base) for i, v in zip(ids, values, strict=True)]
    return float(exact[token]) - base, best
