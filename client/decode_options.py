"""How to generate, as a value, and its form on the wire. Knows no call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modeld.client.sendable import guard, put
from modeld.shared.errors import InvalidRequest
from modeld.v1 import session_pb2


@dataclass(frozen=True)
class DecodeOptions:
    """How to generate. None takes the daemon's default; with nothing set, decoding is greedy.

    ``max_tokens`` 0: until the window is full; in a session that evicts, until the answer ends by
    itself, so that a bound is wise. ``stream_interval_ms`` 0: each token at once. One
    of ``json_schema`` (its text or the schema itself), ``regex`` and ``grammar`` (Lark) constrains
    the whole answer; with any other stop reason than EOS the text is a beginning of such an answer.
    """

    max_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    stop: str | Sequence[str] = ()
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    stream_interval_ms: int | None = None
    token_ids: bool = False
    top_logprobs: int = 0
    ignore_eos: bool = False

    def to_proto(self) -> session_pb2.DecodeOptions:
        """Raises InvalidRequest for a value that the field's type can't hold, and for more than
        one constraint.
        """
        constraints = [name for name in _STRUCTURED if getattr(self, name) is not None]
        if len(constraints) > 1:
            raise InvalidRequest.of(
                "options.structured", " and ".join(constraints), f"one of {', '.join(_STRUCTURED)}"
            )
        options = session_pb2.DecodeOptions()
        options.sampling.SetInParent()
        for name in (*_SAMPLING, *_STRUCTURED, *_PLAIN):
            value = getattr(self, name)
            if name == "json_schema" and isinstance(value, Mapping | bool):
                value = _schema_text(value)
            if value is not None:
                part = options.sampling if name in _SAMPLING else options
                put(options.structured if name in _STRUCTURED else part, name, value)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        guard("stop", lambda: options.stop.extend(stop))
        bias = self.logit_bias or {}
        guard("logit_bias", lambda: options.sampling.logit_bias.update(bias))
        return options


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "frequency_penalty",
    "presence_penalty",
    "seed",
)
_STRUCTURED = ("json_schema", "regex", "grammar")
_PLAIN = ("max_tokens", "stream_interval_ms", "token_ids", "top_logprobs", "ignore_eos")


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    """Its JSON, the properties in the order given: that is their order in an answer."""
    try:
        return json.dumps(schema if isinstance(schema, bool) else dict(schema), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        allowed = "a schema that can be written as JSON"
        raise InvalidRequest.of(
            "json_schema", type(schema).__name__, allowed, f"({type(error).__name__})"
        ) from None
