"""The decode loop: sample, stream, evaluate, until there is a reason to stop.

Owns how an answer ends and what of it is kept. Knows nothing of templates or other sessions.

A sampled token is part of the answer at once, and is evaluated only when another one follows. So
the last token of an answer isn't resident; the next turn, or the next decode, evaluates it with
what comes then. The end-of-generation token is never evaluated: a chat template writes its own.
A prompt that fills the window still yields one token, whose sampling needs no cell.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from modeld.shared.errors import InvalidRequest
from modeld.shared.messages import ChunkOut, DecodeIn, FinalOut, SampledTokenOut
from modeld.workers import faults, sampling
from modeld.workers.engine import Tokenizer
from modeld.workers.executor import OpContext
from modeld.workers.prefill import ensure_logits
from modeld.workers.prompt import GeneratedTurn
from modeld.workers.session import Session
from modeld.workers.stream import Coalescer, TextStream, visible_tokens
