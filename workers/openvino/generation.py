"""What a decode's options mean to GenAI's sampler, and which it can't do.

Owns the mapping and its refusals. Knows no pipeline, no session and no text.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from modeld.shared.errors import UnsupportedFeature
from modeld.shared.messages import DecodeIn, SamplingIn
from modeld.workers.openvino import native

if TYPE_CHECKING:
    from collections.abc import Iterator

assert native.ov  # loaded first: it sets what must be set before the library is
genai: Any = importlib.import_module("openvino_genai")

# GenAI's own bounds of the two penalties that count tokens of the answer.
MAX_COUNTED_PENALTY = 2.0
_SEED_BITS = 32  # its generator takes no more of a seed
_SEED_MASK = (1 << _SEED_BITS) - 1

CAPABILITIES = {
    "decode.logit_bias": "no: the engine samples by itself and takes no bias",
    "decode.logprobs": "no: the engine samples by itself and doesn't give its logits",
    "decode.typical_p": "no: the engine's sampler has no such filter",
    "decode.repeat_last_n": (
        "no: the engine's penalties have no window; repeat_penalty looks back on everything, "
        "frequency_penalty and presence_penalty on the answer alone (send repeat_last_n -1)"
    ),
    "decode.temperature_first": (
        "yes: the engine divides by the temperature before top_p and min_p, not after"
    ),
}


def check(options: DecodeIn, executor: str = "pipeline") -> None:
    """Raises UnsupportedFeature, naming the capability, for what this executor can't do."""
    other = ", or load the model where the paged executor serves it"
    for capability, why in _refusals(options):
        raise UnsupportedFeature(
            f"This model runs by GenAI's pipeline, where {why}. Leave it out"
            f"{other if executor == 'pipeline' else ''}.",
            metadata={"capability": capability, "executor": executor},
        )


def _refusals(options: DecodeIn) -> Iterator[tuple[str, str]]:
    sampling = options.sampling
    if options.top_logprobs:
        yield "decode.logprobs", "log-probabilities can't be read"
    if sampling.logit_bias:
        yield "decode.logit_bias", "logit_bias can't be applied"
    if sampling.typical_p < 1.0 and sampling.temperature > 0.0:
        yield "decode.typical_p", f"typical_p={sampling.typical_p:g} can't be applied"
    if _penalized(sampling) and sampling.repeat_last_n != -1:
        yield (
            "decode.repeat_last_n",
            f"penalties can't look back on repeat_last_n={sampling.repeat_last_n} tokens only, "
            "but on all (-1)",
        )
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(sampling, name)
        if abs(value) > MAX_COUNTED_PENALTY:
            yield (
                f"decode.{name}",
                f"{name}={value:g} is outside of -{MAX_COUNTED_PENALTY:g} to "
                f"{MAX_COUNTED_PENALTY:g}",
            )


def prompt_config(*, echo: bool) -> Any:
    """For a request that only evaluates: its one token is thrown away.

    With ``echo`` the engine gives log-probabilities of what it evaluated: their number is how many
    tokens that were. It costs the output layer for each of them.
    """
    return genai.GenerationConfig(
        max_new_tokens=1, ignore_eos=True, echo=echo, logprobs=1 if echo else 0
    )


def decode_config(options: DecodeIn, most: int, *, echo: bool) -> Any:
    """For an answer of at most ``most`` tokens. Ends of all kinds are the caller's to see."""
    sampling = options.sampling
    config = genai.GenerationConfig(
        max_new_tokens=most, ignore_eos=True, echo=echo, logprobs=1 if echo else 0
    )
    config.repetition_penalty = sampling.repeat_penalty
    config.frequency_penalty = sampling.frequency_penalty
    config.presence_penalty = sampling.presence_penalty
    # What keeps only the best token is greedy, and the engine takes neither as a number.
    greedy = sampling.temperature <= 0.0 or sampling.top_p <= 0.0 or sampling.min_p >= 1.0
    config.do_sample = not greedy
    if not greedy:
        config.temperature = sampling.temperature
        config.top_k = sampling.top_k
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        config.rng_seed = folded(sampling.seed)
    return config


def folded(seed: int) -> int:
    """All 64 bits of a seed in the 32 that the engine's generator takes."""
    return (seed ^ (seed >> _SEED_BITS)) & _SEED_MASK


def _penalized(sampling: SamplingIn) -> bool:
    return (
        sampling.repeat_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )
